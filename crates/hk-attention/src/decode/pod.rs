//! Attention of prompts and of single tokens in one launch.

use super::launch::{DecodeLaunch, DecodePlan};
use super::pa_decode::{PaDecodeInputs, PaDecodeOptions, prepare};
use super::splits::{DecodeWorkspace, Splits};
use crate::kernels::attention::{Params, PodParams};
use crate::kv_cache::optional;
use crate::prefill::{
    AttentionElement, AttentionOptions, AttentionOutput, AttentionOutputs, Mask, PagedElement, Problem, Qkv,
    QueryTile, SequenceStarts, Tiling, UnifiedOutput, check_packed, packed_problem,
};
use hk_core::{DType, Element, Error, KernelRef, LaunchConfig, NamedOperand, Result, Stream, check_aliases};

const OP: &str = "pod_attn";

/// Blocks of one kind that are neighbours: `kGroup`.
const GROUP: usize = 8;

/// By most columns: for bf16 and f16.
const KERNELS: [(usize, [KernelRef<PodParams>; 2]); 2] = [
    (64, [PodParams::kernel("pod_bf16_d64"), PodParams::kernel("pod_f16_d64")]),
    (128, [PodParams::kernel("pod_bf16_d128"), PodParams::kernel("pod_f16_d128")]),
];

/// The prompts of [`pod_attn`].
#[derive(Debug)]
pub struct PodPrefill<'a, T: AttentionElement> {
    /// Packed queries, keys and values.
    pub qkv: Qkv<'a, T>,
    /// Where sequences start.
    pub cu_seqlens: SequenceStarts<'a>,
    /// `[total_q, Hq, Dv]`, and log-sum-exp `[total_q, Hq]`.
    pub outputs: AttentionOutputs<'a, T>,
}

/// The single tokens of [`pod_attn`].
#[derive(Debug)]
pub struct PodDecode<'a, T: AttentionElement, C: Element> {
    /// Queries and pages.
    pub inputs: PaDecodeInputs<'a, T, C>,
    /// `[N, Hq, Dv]`, and log-sum-exp `[N, Hq]`.
    pub outputs: AttentionOutputs<'a, T>,
    /// For the partial results of splits.
    pub workspace: DecodeWorkspace<'a>,
}

/// Options of [`pod_attn`], of both halves.
#[derive(Debug, Clone, Copy, Default)]
pub struct PodOptions {
    /// Factor of the products; `None`: `1 / sqrt(Dqk)`.
    pub scale: Option<f32>,
    /// Keys before a query's own that are seen; `None`: all.
    pub window: Option<u32>,
    /// How keys of single tokens are split among blocks.
    pub splits: Splits,
    /// Blocks of prompts to blocks of single tokens, as long as there are both; `None`: in proportion to their numbers, so that they end
    /// together. Results do not depend on it.
    pub ratio: Option<[u16; 2]>,
}

/// Causal attention of packed prompts, and attention of a token of each of other sequences over pages, in one launch: prompts are bound by
/// matrix cores, single tokens by memory, and a CU that has blocks of both uses both.
///
/// | arg                                                | shape                               | dtype                 | layout                       |
/// |----------------------------------------------------|-------------------------------------|-----------------------|------------------------------|
/// | `q_prefill`                                        | `[total_q, Hq, Dqk]`                | `bf16`, `f16`, `f32`  | unit stride on the columns   |
/// | `k_prefill`, `v_prefill`                           | `[total_k, Hkv, D]`                 | as `q_prefill`        | unit stride on the columns   |
/// | `cu_seqlens_q`, `cu_seqlens_k`                     | `[sequences + 1]`                   | `i32`                 | contiguous                   |
/// | `q_decode`                                         | `[N, Hq, Dqk]`                      | as `q_prefill`        | unit stride on the columns   |
/// | `k_cache`, `v_cache`                               | by [`KvLayout`](crate::KvLayout)    | as [`pa_decode`](crate::pa_decode)'s | unit stride on the last axis |
/// | `block_table`, `seq_lens`                          | `[N, pages]`, `[N]`                 | `i32`                 | as [`pa_decode`](crate::pa_decode)'s |
/// | `out_prefill`, `out_decode`                        | shape of `q`, `Dv` columns          | as `q_prefill`        | unit stride on the columns   |
/// | `lse_prefill`, `lse_decode`                        | shape of `q` without columns        | `f32`                 | any strides                  |
/// | `workspace`                                        | `[n]`                               | `f32`                 | contiguous, on 16 bytes      |
///
/// The results are bitwise those of [`mha_varlen`](crate::mha_varlen), causal, with [`QueryTile::Short`] and keys that are not split, and of
/// [`pa_decode`](crate::pa_decode) with these splits. Heads of the halves may differ. Up to 128 columns of 16-bit rows in whole vectors, where the
/// pages are served by the kernel of few queries, are one launch, and one more if a second one merges splits; anything else is that of
/// the two operators.
///
/// Lengths, starts and pages on the device are not trusted, as in those.
///
/// Returns when the launch is queued, before it has run. A half without queries is not launched.
///
/// # Errors
/// Those of [`mha_varlen`](crate::mha_varlen) and [`pa_decode`](crate::pa_decode), [`Argument`](Error::Argument) for a ratio of 0 : 0, and
/// [`Overlap`](Error::Overlap) of what one half writes with what the other has. Nothing is written then.
///
/// Source: Kamath et al. 2024, "POD-Attention: unlocking full prefill-decode overlap for faster LLM inference".
pub fn pod_attn<'a, T, C>(
    stream: &'a Stream,
    prefill: PodPrefill<'a, T>,
    decode: PodDecode<'a, T, C>,
    options: &PodOptions,
) -> Result<()>
where
    T: AttentionElement + AttentionOutput<T> + UnifiedOutput<T>,
    C: PagedElement<T>,
{
    let PodOptions { scale, window, splits, ratio } = *options;
    if ratio == Some([0, 0]) {
        return Err(Error::argument(OP, "ratio", "0 : 0", "blocks of either kind"));
    }
    let of_prefill = |error| renamed(error, PREFILL_NAMES);
    let of_decode = |error| renamed(error, DECODE_NAMES);
    let PodPrefill { qkv, cu_seqlens, outputs } = prefill;
    let PodDecode { inputs, outputs: out_decode, workspace } = decode;
    let sequences = cu_seqlens.check(OP)?;
    let [total_q, total_k] = check_packed(OP, &qkv, &outputs).map_err(of_prefill)?;
    let [starts_q, starts_k] = cu_seqlens.operands();
    let PaDecodeInputs { q, cache, seq_lens } = &inputs;
    let read: [NamedOperand; 10] = [
        ("q_prefill", Some(&qkv.q)),
        ("k_prefill", Some(&qkv.k)),
        ("v_prefill", Some(&qkv.v)),
        starts_q,
        starts_k,
        ("q_decode", Some(q)),
        ("k_cache", Some(&cache.k_cache)),
        ("v_cache", Some(&cache.v_cache)),
        ("block_table", Some(&cache.pages.block_table)),
        ("seq_lens", Some(seq_lens)),
    ];
    let written: [NamedOperand; 5] = [
        ("out_prefill", Some(&outputs.out)),
        ("lse_prefill", optional(&outputs.lse)),
        ("out_decode", Some(&out_decode.out)),
        ("lse_decode", optional(&out_decode.lse)),
        ("workspace", optional(&workspace.partials)),
    ];
    check_aliases(OP, &read, &written.map(|output| (output, &[][..])))?;

    let of_prompts = AttentionOptions {
        scale,
        mask: Mask { causal: true, left: window, right: None },
        tiling: Tiling::Fixed { tile: QueryTile::Short, keys_per_split: None },
        ..AttentionOptions::default()
    };
    let sizes = [sequences, total_q, total_k];
    let mut prompts =
        packed_problem(OP, stream, qkv, (outputs, None), &of_prompts, sizes, &[]).map_err(of_prefill)?;
    prompts.starts(&cu_seqlens, total_k).map_err(of_prefill)?;
    let of_tokens = PaDecodeOptions { scale, window, splits, ..PaDecodeOptions::default() };
    let (mut tokens, [n, keys]) =
        prepare(OP, stream, inputs, out_decode, &workspace, &of_tokens).map_err(of_decode)?;
    let plan = DecodePlan { splits, workspace };

    let both = total_q != 0 && n != 0 && prompts.params.heads != 0 && tokens.params.heads != 0;
    if let Some(kernel) = kernel_of_both(&prompts, &tokens).filter(|_| both)
        && let Some((prefill, prefill_blocks)) =
            prompts.short_tiles(sequences, total_q).map_err(of_prefill)?
    {
        let launch = tokens.single_tokens(plan, [n, keys]).map_err(of_decode)?;
        return run(stream, kernel, (prefill, prefill_blocks), launch, ratio);
    }
    tokens.first(move || prompts.run_packed(sequences, total_q).map_err(of_prefill));
    tokens.decode_batched(plan, n, [1, keys], false).map_err(of_decode)
}

/// The kernel of as many columns as each half has by itself.
fn kernel_of_both(prompts: &Problem, tokens: &Problem) -> Option<KernelRef<PodParams>> {
    let of = |problem: &Problem| {
        let columns = problem.params.dqk.max(problem.params.dv) as usize;
        KERNELS.iter().position(|(most, _)| columns <= *most)
    };
    tokens.decode_kernel(1, false).filter(|_| tokens.params.cache.element == 0 && tokens.in_rows(2))?;
    let at = of(tokens).filter(|at| of(prompts) == Some(*at))?;
    Some(KERNELS[at].1[usize::from(tokens.kernel == DType::F16)])
}

fn run(
    stream: &Stream,
    kernel: KernelRef<PodParams>,
    (prefill, prefill_blocks): (Params, usize),
    DecodeLaunch { params: decode, blocks: decode_blocks, merge }: DecodeLaunch,
    ratio: Option<[u16; 2]>,
) -> Result<()> {
    let too_many = |n: usize| Error::too_large(OP, "q_prefill", format!("{n} blocks"), u32::MAX.into());
    let of_kind = [prefill_blocks, decode_blocks].map(|blocks| blocks.div_ceil(GROUP));
    let blocks = of_kind[0].saturating_add(of_kind[1]).saturating_mul(GROUP);
    u32::try_from(blocks).map_err(|_| too_many(blocks))?;
    let shares = ratio.map_or(of_kind.map(|n| n as u32), |of| of.map(u32::from));
    let params = PodParams {
        prefill,
        decode,
        prefill_blocks: prefill_blocks as u32,
        decode_blocks: decode_blocks as u32,
        prefill_share: shares[0],
        shares: shares[0] + shares[1],
    };
    let kernel = stream.kernel(kernel)?;
    // SAFETY: as for the launches apart, each of which has checked its tensors.
    unsafe { stream.launch(OP).run(&kernel, LaunchConfig::grid_1d(blocks), &params)? };
    merge.map_or(Ok(()), |merge| merge.run(&params.decode.all))
}

type Names = &'static [(&'static str, &'static str)];

/// Arguments of `mha_varlen` that have other names here.
const PREFILL_NAMES: Names = &[
    ("q", "q_prefill"),
    ("k", "k_prefill"),
    ("v", "v_prefill"),
    ("out", "out_prefill"),
    ("lse", "lse_prefill"),
];
/// The same of `pa_decode`.
const DECODE_NAMES: Names = &[("q", "q_decode"), ("out", "out_decode"), ("lse", "lse_decode")];

/// An error of one half.
fn renamed(mut error: Error, names: Names) -> Error {
    if let Error::Shape { arg, .. }
    | Error::Empty { arg, .. }
    | Error::DType { arg, .. }
    | Error::Stride { arg, .. }
    | Error::Align { arg, .. }
    | Error::Argument { arg, .. }
    | Error::DeviceMismatch { arg, .. }
    | Error::TooLarge { arg, .. } = &mut error
        && let Some((_, name)) = names.iter().find(|(name, _)| name == arg)
    {
        *arg = name;
    }
    error
}
