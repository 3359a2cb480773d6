//! Attention of a few tokens of each sequence over a cache that they join, behind the interface of FlashAttention 2.

use super::launch::DecodePlan;
use super::splits::{DecodeWorkspace, Splits};
use crate::kernels::cache::{Common, Target};
use crate::kernels::kv_cache_rows::{Append, Params};
use crate::kv_cache::{
    CacheElement, CacheScales, HeadElement, HeadView as _, Jobs, KvLayout, PART, check_scale, check_slots,
    optional, piece,
};
use crate::prefill::{
    AttentionElement, AttentionOutput, AttentionOutputs, Mask, PagedElement, Problem, check_cache_heads,
    kernel_of,
};
use bytemuck::Zeroable;
use hk_core::plan::rope::{
    Positions, Rope, RopeDirection, RopeSource, RopeSpan, RopeStyle, RopeTableWidth, RopeTables,
};
use hk_core::{
    Element, Error, Kernel, Launch, NamedOperand, Operand, Result, Stream, TensorView, TensorViewMut,
    check_aliases,
};

const OP: &str = "flash_attn_fwd_decode";

/// Where the keys of a sequence are in [`FlashCache`].
#[derive(Debug, Clone, Copy)]
pub enum CacheRows<'a> {
    /// Sequence `n` has row `n` of caches `[rows, S, Hkv, D]`; there may be more rows than sequences.
    InOrder,
    /// Sequence `n` has row `cache_batch_idx[n]`, `[B]`, no row twice.
    Indexed(TensorView<'a, i32>),
    /// Token `t` of sequence `n` is token `t % S` of page `block_table[n, t / S]` of caches `[pages, S, Hkv, D]`: `[B, pages of a sequence]`.
    Paged(TensorView<'a, i32>),
}

/// Keys and values of the tokens so far, with room for more.
#[derive(Debug)]
pub struct FlashCache<'a, C: Element> {
    /// Keys `[rows or pages, S, Hkv, Dqk]`.
    pub k_cache: TensorViewMut<'a, C>,
    /// Values `[rows or pages, S, Hkv, Dv]`.
    pub v_cache: TensorViewMut<'a, C>,
    /// Which of them a sequence has.
    pub rows: CacheRows<'a>,
}

/// Keys that sequences have in the cache before the call, `[B]`.
#[derive(Debug)]
pub enum CacheSeqlens<'a> {
    /// They stay as they are.
    Kept {
        /// The lengths.
        cache_seqlens: TensorView<'a, i32>,
        /// Gets those with the new keys, `[B]`; needed beside such.
        seqlens_out: Option<TensorViewMut<'a, i32>>,
    },
    /// They grow by the new keys.
    Advanced(TensorViewMut<'a, i32>),
}

/// Rotation of the first columns of queries and of new keys: row `i` of a sequence, of either, is at position `cache_seqlens + i`.
#[derive(Debug)]
pub struct AppendRotary<'a, T: AttentionElement> {
    /// Cosines, `[positions, rotary / 2]`, unit stride on the columns.
    pub cos: TensorView<'a, T>,
    /// Sines, as `cos`.
    pub sin: TensorView<'a, T>,
    /// Which columns are a pair.
    pub style: RopeStyle,
    /// The rotated queries, of the shape of `q`.
    pub q_rotated: TensorViewMut<'a, T>,
}

/// New keys and values, which go to the cache first.
#[derive(Debug)]
pub struct FlashAppend<'a, T: AttentionElement> {
    /// `[B, Sn, Hkv, Dqk]`.
    pub k_new: TensorView<'a, T>,
    /// `[B, Sn, Hkv, Dv]`.
    pub v_new: TensorView<'a, T>,
    /// How queries and new keys are rotated.
    pub rotary: Option<AppendRotary<'a, T>>,
}

/// Inputs of [`flash_attn_fwd_decode`].
#[derive(Debug)]
pub struct FlashDecodeInputs<'a, T: AttentionElement, C: Element> {
    /// Queries `[B, Sq, Hq, Dqk]`, of the last tokens of each sequence.
    pub q: TensorView<'a, T>,
    /// Keys and values.
    pub cache: FlashCache<'a, C>,
    /// Keys in the cache.
    pub seqlens: CacheSeqlens<'a>,
    /// Keys and values that join them.
    pub append: Option<FlashAppend<'a, T>>,
}

/// Options of [`flash_attn_fwd_decode`].
#[derive(Debug, Clone, Copy, Default)]
pub struct FlashDecodeOptions<'a> {
    /// Factor of the products; `None`: `1 / sqrt(Dqk)`.
    pub scale: Option<f32>,
    /// Which keys a query sees: query `i` stands at key `i + Sk - Sq`.
    pub mask: Mask,
    /// `c > 0`: scores become `c tanh(s / c)`. 0: they do not.
    pub softcap: f32,
    /// Slopes `[Hq]` or `[B, Hq]`.
    pub alibi: Option<TensorView<'a, f32>>,
    /// A logit `[Hq]` of no value for each head, which is not scaled.
    pub sink: Option<TensorView<'a, f32>>,
    /// Factors of the cache, which new keys and values are divided by: `[1]`, or `[B, Hkv]`, beside new keys contiguous.
    pub scales: CacheScales<'a>,
    /// How keys are split among blocks.
    pub splits: Splits,
}

/// Attention of the last `Sq` tokens of each sequence over its cache, which its `Sn` new keys and values join before:
///
/// ```text
/// p = cache_seqlens[n];  q[n, i] = rope(q[n, i], p + i);  cache[n, p + i] = (rope(k_new[n, i], p + i), v_new[n, i])
/// Sk = p + Sn;  out[n, i] = softmax(scale q[n, i] k^T) v over the keys below Sk that query i sees, at key i + Sk - Sq
/// ```
///
/// | arg                                | shape                     | dtype                         | layout                                               |
/// |------------------------------------|---------------------------|-------------------------------|------------------------------------------------------|
/// | `q`                                | `[B, Sq, Hq, Dqk]`        | `bf16`, `f16`                 | unit stride on the columns; rotated: as `k_new`      |
/// | `k_cache`, `v_cache`               | `[rows or pages, S, Hkv, D]` | as `q`, the device's fp8 e4m3 | unit stride on the columns                        |
/// | `block_table` or `cache_batch_idx` | `[B, pages]` or `[B]`     | `i32`                         | unit stride on the last axis                         |
/// | `cache_seqlens`, `seqlens_out`     | `[B]`                     | `i32`                         | contiguous                                           |
/// | `k_new`, `v_new`                   | `[B, Sn, Hkv, D]`         | as `q`                        | unit stride on the columns, one stride for all tokens |
/// | `cos`, `sin`                       | `[positions, rotary / 2]` | as `q`                        | unit stride on the columns                           |
/// | `q_rotated`                        | shape of `q`              | as `q`                        | as `k_new`                                           |
/// | `out`                              | `[B, Sq, Hq, Dv]`         | as `q`                        | unit stride on the columns                           |
/// | `lse`                              | `[B, Hq, Sq]`             | `f32`                         | any strides                                          |
/// | `workspace`                        | `[n]`                     | `f32`                         | contiguous, on 16 bytes                              |
///
/// `Hq` is a multiple of `Hkv`; `Dqk` and `Dv` are 1 to 256 and may differ. Scores, masks and rounding are those of [`mha`](fn@crate::mha).
/// Rotation is in `f32`, rounded once. New keys and values go to a cache of their type bit for bit if they are not rotated; to fp8
/// divided by the scale, of their head where there is one for each, saturating.
///
/// Up to three launches, and one more where splits are merged by one. Caches are read as by [`pa_decode`](crate::pa_decode), whether they are
/// in pages or not, by the kernel of few queries for up to 64 rows (`Sq` by heads of a group); by those of prompts for more.
/// [`decode_workspace`](crate::decode_workspace) says how long the workspace is; queries are `B Sq`.
///
/// What is on the device is not trusted. A sequence whose length is negative, or with the new keys more than its row or its pages hold,
/// has outputs of NaN, and of its new keys those that have a slot are stored; a length that grows stays negative, or too large. A page or
/// row that the cache does not have is not written, and who sees one of its keys has outputs of NaN. A new token or query whose
/// position the tables do not have is NaN, in the cache, too. Table entries behind the last key are not read.
///
/// Returns when the launches are queued, before they have run. Without sequences or queries, nothing is attended to.
///
/// # Errors
/// As [`pa_decode`](crate::pa_decode); also [`Argument`](Error::Argument) for new keys beside lengths that are kept without `seqlens_out`,
/// [`Stride`](Error::Stride) for new tokens that are not at one stride, [`Overlap`](Error::Overlap) of what is written, and the errors of
/// rotation of [`rope_reshape_and_cache`](crate::rope_reshape_and_cache). Nothing is written then.
///
/// Source: Dao 2023, "FlashAttention-2"; Dao et al. 2023, "Flash-Decoding for long-context inference".
pub fn flash_attn_fwd_decode<'a, T, C>(
    stream: &'a Stream,
    inputs: FlashDecodeInputs<'a, T, C>,
    outputs: AttentionOutputs<'a, T>,
    workspace: DecodeWorkspace<'a>,
    options: &FlashDecodeOptions<'a>,
) -> Result<()>
where
    T: AttentionElement + AttentionOutput<T> + HeadElement,
    C: PagedElement<T> + CacheElement<T>,
{
    let FlashDecodeInputs { q, cache: FlashCache { k_cache, v_cache, rows }, seqlens, append } = inputs;
    let AttentionOutputs { mut out, mut lse } = outputs;
    let [sequences, sq, heads, dqk] = q.dims(OP, "q")?;
    let sizes =
        KvLayout::Nhd.sizes(OP, C::DTYPE, ("k_cache", k_cache.shape()), ("v_cache", v_cache.shape()))?;
    let of_heads = check_cache_heads(OP, q.shape(), ["k_cache", "v_cache"], sizes, [256, 256])?;
    out.expect_shape(OP, "out", [sequences, sq, heads, sizes.dv])?;
    if let Some(lse) = &lse {
        lse.expect_shape(OP, "lse", [sequences, heads, sq])?;
    }
    let (table_arg, table) = match rows {
        CacheRows::InOrder if sizes.pages < sequences => {
            let want = format!("at least {sequences} rows (sequences of q)");
            return Err(Error::shape(OP, "k_cache", k_cache.shape(), want));
        }
        CacheRows::InOrder => ("block_table", None),
        CacheRows::Indexed(index) => {
            index.expect_shape(OP, "cache_batch_idx", [sequences])?;
            index.expect_unit_stride(OP, "cache_batch_idx")?;
            ("cache_batch_idx", Some(index.split_axis(0, 1)?))
        }
        CacheRows::Paged(table) => {
            let [_, width] = table.dims(OP, "block_table")?;
            table.expect_shape(OP, "block_table", [sequences, width])?;
            ("block_table", Some(table))
        }
    };
    let width = table.map_or(1, |table| table.shape()[1]);
    let new = append.as_ref().map_or(0, |of| of.k_new.shape().get(1).copied().unwrap_or(0));
    if let Some(FlashAppend { k_new, v_new, .. }) = &append {
        k_new.expect_shape(OP, "k_new", [sequences, new, sizes.heads, dqk])?;
        v_new.expect_shape(OP, "v_new", [sequences, new, sizes.heads, sizes.dv])?;
        for (arg, scale) in [("k_scale", &options.scales.k), ("v_scale", &options.scales.v)] {
            match scale.as_ref().filter(|scale| scale.shape().len() > 1) {
                Some(scale) if scale.shape() != [sequences, sizes.heads] => {
                    let want =
                        format!("[1] or [{sequences}, {}] (sequences, key heads) beside k_new", sizes.heads);
                    return Err(Error::shape(OP, arg, scale.shape(), want));
                }
                Some(scale) => {
                    scale.expect_contiguous(OP, arg)?;
                    scale.expect_aligned(OP, arg, 4)?;
                }
                None => check_scale(OP, arg, scale.as_ref())?,
            }
        }
    }
    // The lengths that the new keys follow, those that queries see, and where the latter are stored.
    let (lens, total, written) = match seqlens {
        CacheSeqlens::Kept { cache_seqlens, seqlens_out: None } if append.is_none() => {
            (cache_seqlens, cache_seqlens, None)
        }
        CacheSeqlens::Kept { seqlens_out: None, .. } => {
            return Err(Error::argument(OP, "seqlens_out", "none", "one beside k_new"));
        }
        CacheSeqlens::Kept { cache_seqlens, seqlens_out: Some(out) } => {
            (cache_seqlens, out.alias(), Some(("seqlens_out", out)))
        }
        CacheSeqlens::Advanced(lens) => (lens.alias(), lens.alias(), Some(("cache_seqlens", lens))),
    };
    for (arg, lens) in [("cache_seqlens", &lens), ("seqlens_out", &total)] {
        lens.expect_shape(OP, arg, [sequences])?;
        lens.expect_contiguous(OP, arg)?;
        lens.expect_aligned(OP, arg, 4)?;
    }
    let in_place = matches!(written, Some(("cache_seqlens", _)));

    let rotary = append.as_ref().and_then(|of| of.rotary.as_ref());
    let read: [NamedOperand; 11] = [
        ("q", Some(&q)),
        ("k_new", append.as_ref().map(|of| &of.k_new as _)),
        ("v_new", append.as_ref().map(|of| &of.v_new as _)),
        (table_arg, optional(&table)),
        ("cache_seqlens", Some(&lens as &dyn Operand).filter(|_| !in_place)),
        ("cos", rotary.map(|of| &of.cos as _)),
        ("sin", rotary.map(|of| &of.sin as _)),
        ("alibi", optional(&options.alibi)),
        ("sink", optional(&options.sink)),
        ("k_scale", optional(&options.scales.k)),
        ("v_scale", optional(&options.scales.v)),
    ];
    let changed: [NamedOperand; 7] = [
        ("out", Some(&out)),
        ("lse", optional(&lse)),
        ("workspace", optional(&workspace.partials)),
        ("k_cache", Some(&k_cache)),
        ("v_cache", Some(&v_cache)),
        ("q_rotated", rotary.map(|of| &of.q_rotated as _)),
        written.as_ref().map_or(("", None), |(arg, to)| (*arg, Some(to as _))),
    ];
    check_aliases(OP, &read, &changed.map(|output| (output, &[][..])))?;

    let queries = rotary.map_or(q, |of| of.q_rotated.alias());
    let caches = [k_cache.alias(), v_cache.alias()];
    let appending = match append {
        None => None,
        Some(append) => {
            let to = AppendTo { caches: [k_cache, v_cache], table, lens, sequences, width };
            Some(to.check(stream, q, append, options.scales, written)?)
        }
    };

    let mut problem = Problem::new(OP, stream, kernel_of::<T, T>(), of_heads);
    problem.queries("q", &queries)?;
    problem.cache(KvLayout::Nhd, ("k_cache", &caches[0]), ("v_cache", &caches[1]))?;
    match &table {
        Some(table) => problem.table(table_arg, table, sizes)?,
        None => problem.own_pages(sizes)?,
    }
    problem.out("out", &mut out)?;
    problem.lse(lse.as_mut())?;
    problem.scale(options.scale)?;
    problem.softcap(options.softcap)?;
    problem.mask(options.mask);
    problem.alibi(options.alibi, sequences)?;
    problem.sink(options.sink)?;
    problem.cache_scales(&options.scales, sequences)?;
    problem.params().sequences.total_lens = problem.indices("cache_seqlens", &total)?;
    let plan = DecodePlan { splits: options.splits, workspace };
    let sizes = [sq, width.saturating_mul(sizes.tokens)];
    if let Some(appending) = appending {
        problem.first(|| appending.run());
    }
    problem.decode_batched(plan, sequences, sizes, table.is_none())
}

/// Where new keys and values go.
struct AppendTo<'a, C: Element> {
    caches: [TensorViewMut<'a, C>; 2],
    table: Option<TensorView<'a, i32>>,
    lens: TensorView<'a, i32>,
    sequences: usize,
    width: usize,
}

/// The launches that rotate queries and new keys, fill the cache, and store lengths.
struct Appending<'a> {
    kernel: Kernel<Params>,
    launch: Launch<'a>,
    jobs: Jobs,
    common: Common,
    /// The launch by which lengths grow in place, when all have been read.
    advance: Option<(Launch<'a>, Jobs)>,
}

impl<'a, C: Element> AppendTo<'a, C> {
    /// `written`: the lengths with the new keys, by argument name.
    fn check<T: AttentionElement + HeadElement>(
        self,
        stream: &'a Stream,
        q: TensorView<'a, T>,
        FlashAppend { k_new, v_new, rotary }: FlashAppend<'a, T>,
        scales: CacheScales<'a>,
        written: Option<(&'static str, TensorViewMut<'a, i32>)>,
    ) -> Result<Appending<'a>>
    where
        C: CacheElement<T>,
    {
        let Self { caches: [mut k_cache, mut v_cache], table, lens, sequences, width } = self;
        let ([_, sq, _, dqk], [_, new, heads, dv]) = (q.dims(OP, "q")?, v_new.dims(OP, "v_new")?);
        let [blocks, block, ..] = k_cache.dims::<4>(OP, "k_cache")?;
        let tokens = sequences.saturating_mul(new.max(sq));
        check_slots(OP, "k_new", tokens, [blocks, block])?;
        let rows = |arg, view: TensorView<'a, T>| {
            view.expect_unit_stride(OP, arg)?;
            view.expect_aligned(OP, arg, size_of::<T>() as u64)?;
            view.merge_axes(OP, arg, 0)
        };
        let (k_new, v_new) = (rows("k_new", k_new)?, rows("v_new", v_new)?);
        let rotation = match rotary {
            None => None,
            Some(AppendRotary { cos, sin, style, q_rotated }) => {
                q_rotated.expect_shape(OP, "q_rotated", q.shape())?;
                q_rotated.expect_unit_stride(OP, "q_rotated")?;
                q_rotated.expect_aligned(OP, "q_rotated", size_of::<T>() as u64)?;
                let [_, columns] = cos.dims(OP, "cos")?;
                let rope = Rope {
                    style,
                    table: RopeTableWidth::Half,
                    rotary: columns.saturating_mul(2),
                    span: RopeSpan::First,
                    direction: RopeDirection::Forward,
                };
                rope.check(OP, "q", q.shape(), dqk)?;
                let tables = RopeTables { cos, sin, positions: Positions::Index, offsets: None };
                let source = RopeSource::from(tables);
                source.check(OP, &rope, &[tokens])?;
                Some((rope, source, rows("q", q)?, q_rotated.merge_axes(OP, "q_rotated", 0)?))
            }
        };

        let strides = [&k_cache, &v_cache].map(|of| KvLayout::Nhd.strides(of.layout(), false, piece::<C>()));
        let vectors = [dqk, dv].iter().all(|n| n.is_multiple_of(PART))
            && rotation.as_ref().is_none_or(|(rope, source, q, to)| {
                source.can_vectorize(rope, PART) && q.can_vectorize() && to.can_vectorize()
            })
            && k_new.can_vectorize()
            && v_new.can_vectorize()
            && strides[0].parts_aligned(&k_cache)
            && strides[1].parts_aligned(&v_cache);
        let mut jobs = Jobs::new(OP, stream, vectors);
        let kernel = jobs.kernel::<T>(stream)?;
        let mut launch = stream.launch(OP);
        let mut common = Common {
            n_slots: (blocks * block) as u64,
            block_tokens: block as u32, // of `check_slots`, as the product
            ..Common::zeroed()
        };

        let of_heads = |target: Target, scale: &Option<TensorView<f32>>| {
            let by_head = scale.as_ref().is_some_and(|scale| scale.shape().len() == 2);
            if by_head { target.scaled_by_head(heads) } else { target }
        };
        let scale = launch.optional_input("k_scale", scales.k.as_ref())?;
        let keys = launch.output_address("k_cache", &mut k_cache)?;
        let keys = of_heads(Target::cache::<C>(keys, strides[0], &scale), &scales.k);
        let k_new = launch.input("k_new", &k_new)?;
        match rotation {
            None => {
                jobs.of_sequence(new);
                jobs.copy(k_new, &[keys]);
            }
            Some((rope, source, q, mut q_rotated)) => {
                common.rope = source.params(&mut launch, &rope, false)?;
                let to = Target::output::<T>(&launch.output("q_rotated", &mut q_rotated)?);
                jobs.of_sequence(sq);
                jobs.rotate(launch.input("q", &q)?, &rope, &[to], false);
                jobs.of_sequence(new);
                jobs.rotate(k_new, &rope, &[keys], false);
            }
        }
        let scale = launch.optional_input("v_scale", scales.v.as_ref())?;
        let values = launch.output_address("v_cache", &mut v_cache)?;
        let values = of_heads(Target::cache::<C>(values, strides[1], &scale), &scales.v);
        jobs.copy(launch.input("v_new", &v_new)?, &[values]);

        let mut append = Append {
            lens: launch.input("cache_seqlens", &lens)?.data(),
            table: 0,
            table_row: 0,
            sequences: sequences as u32,
            width: u32::try_from(width).map_err(|_| Error::too_large(OP, "block_table", width, 1 << 32))?,
            tokens: new as u32,
            totals: 0,
            pad: 0,
        };
        if let Some(table) = &table {
            let layout = launch.input("block_table", table)?;
            (append.table, append.table_row) = (layout.data().max(4), layout.strides()[2]);
        }
        let mut advance = None;
        match written {
            _ if sequences == 0 => {}
            Some(("cache_seqlens", mut lens)) if new > 0 => {
                let (mut launch, mut jobs) = (stream.launch(OP), Jobs::new(OP, stream, vectors));
                let totals = launch.output_address("cache_seqlens", &mut lens)?;
                jobs.append(Append { totals, ..append });
                advance = Some((launch, jobs));
            }
            Some(("seqlens_out", mut to)) => append.totals = launch.output_address("seqlens_out", &mut to)?,
            _ => {}
        }
        jobs.append(append);
        jobs.check()?;
        Ok(Appending { kernel, launch, jobs, common, advance })
    }
}

impl Appending<'_> {
    fn run(self) -> Result<()> {
        let Self { kernel, launch, jobs, common, advance } = self;
        // SAFETY: all tensors have the tokens, heads and columns that the jobs say; the kernel checks lengths, positions and slots.
        unsafe { jobs.run(launch, &kernel, common)? };
        // SAFETY: of the lengths, all of which are there.
        advance.map_or(Ok(()), |(launch, jobs)| unsafe { jobs.run(launch, &kernel, Common::zeroed()) })
    }
}
