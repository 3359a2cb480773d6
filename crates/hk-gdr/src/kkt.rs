//! The safe function of `hip/kkt.hip`.

use crate::TokenLayout;
use crate::kernels::gdr::{Heads, Prefill};
use crate::kernels::kkt::Params;
use crate::recurrent::{expect_plain, optional_address};
use bytemuck::Zeroable;
use hk_core::plan::rows::float_index;
use hk_core::{
    Element, Error, Float, KernelRef, LaunchConfig, Operand, Result, Stream, TensorView, TensorViewMut,
    check_aliases, row_kernels,
};

/// The entry points: for bf16, f16, f32; of chunks of 16, 32, 64, vectorized, then scalar.
static KERNELS: [[KernelRef<Params>; 6]; 3] = row_kernels!(
    Params,
    "kkt",
    ["bf16", "f16", "f32"],
    ["16", "32", "64", "16_scalar", "32_scalar", "64_scalar"]
);

/// With gates of channels: for bf16, f16, f32, vectorized, then scalar.
static CHANNELS: [[KernelRef<Prefill>; 2]; 3] = [
    [Prefill::kernel("kkt_channels_bf16"), Prefill::kernel("kkt_channels_bf16_scalar")],
    [Prefill::kernel("kkt_channels_f16"), Prefill::kernel("kkt_channels_f16_scalar")],
    [Prefill::kernel("kkt_channels_f32"), Prefill::kernel("kkt_channels_f32_scalar")],
];

/// The base of the logarithms that gates are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GateBase {
    /// e.
    #[default]
    Natural,
    /// 2.
    Two,
}

/// The inputs of [`chunk_scaled_dot_kkt`].
#[derive(Debug, Clone, Copy)]
pub struct KktInputs<'a, T: Element> {
    /// `[B, T, k_heads, K]`; packed sequences: `[T, k_heads, K]`.
    pub k: TensorView<'a, T>,
    /// `[B, T, v_heads]`; packed: `[T, v_heads]`: sums of logarithms of decays from the first token of a chunk on; zeros if left out.
    pub g: Option<TensorView<'a, f32>>,
    /// As `g`.
    pub beta: TensorView<'a, f32>,
    /// `[N + 1]`: the first token of each packed sequence, then the number of tokens.
    pub cu_seqlens: Option<TensorView<'a, i32>>,
    /// The base of `g`.
    pub base: GateBase,
}

/// The products of the keys of each chunk, weighted, below the diagonal: `A[i, j] = beta_i exp(G_i - G_j) k_i k_j` for `j < i`, else 0.
///
/// | arg          | shape                                               | dtype                | layout                          |
/// |--------------|-----------------------------------------------------|----------------------|---------------------------------|
/// | `k`          | `[B, T, k_heads, K]`; packed: `[T, k_heads, K]`     | `bf16`, `f16`, `f32` | unit stride on `K`              |
/// | `g`, `beta`  | `[B, T, v_heads]`; packed: `[T, v_heads]`           | `f32`                | contiguous; `g` optional        |
/// | `a`          | `[B, T, v_heads, C]`; packed: `[T, v_heads, C]`     | `f32`                | contiguous, on 16 bytes         |
/// | `cu_seqlens` | `[N + 1]`; given if packed                          | `i32`                | contiguous                      |
///
/// `C`, the tokens of a chunk, is 16, 32 or 64. Token `i` of a chunk has row `i` of its matrix. Value head `h` has the keys of head
/// `h / (v_heads / k_heads)`. Chunks begin with the first token of a sequence; of a shorter last one, columns past its end are 0.
///
/// Products are of the given keys, summed up in `f32`; gates are applied in `f32` after the sum. Where `j < i` the exponent is not
/// positive if gates are sums of logarithms of decays; nothing above the diagonal is computed. Batch-invariant. Tokens of no sequence are not
/// written; those of a sequence whose tokens are out of range are NaN. The vectorized path needs `k` with rows on 16 bytes and `K` whole
/// 16-byte vectors. No output may share memory with an input. Returns when the launch is queued.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table,
/// [`Unsupported`](Error::Unsupported) for another `C`, or `K` of 0 or beyond 256, [`Overlap`](Error::Overlap) if tensors share memory,
/// [`TooLarge`](Error::TooLarge) beyond 2^31 - 1 tokens or sequences, 2^16 heads, or keys of which those of a chunk are 2 GiB apart,
/// [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written then.
///
/// Source: Yang, Wang, Zhang, Shen and Kim 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", section 3.
pub fn chunk_scaled_dot_kkt<'a, T: Float>(
    stream: &Stream,
    inputs: KktInputs<'a, T>,
    a: TensorViewMut<'a, f32>,
) -> Result<()> {
    run("chunk_scaled_dot_kkt", stream, inputs, None, None, a)
}

/// The inputs of [`fused_cumsum_kkt`].
#[derive(Debug, Clone, Copy)]
pub struct FusedKktInputs<'a, T: Element> {
    /// `[B, T, k_heads, K]`; packed sequences: `[T, k_heads, K]`.
    pub k: TensorView<'a, T>,
    /// `[B, T, v_heads]`; packed: `[T, v_heads]`: logarithms of decays. Left out beside `gk`.
    pub g: Option<TensorView<'a, f32>>,
    /// `[B, T, v_heads, K]`; packed: `[T, v_heads, K]`: of channels, instead of `g`.
    pub gk: Option<TensorView<'a, f32>>,
    /// `[B, T, v_heads]`; packed: `[T, v_heads]`.
    pub beta: TensorView<'a, f32>,
    /// `[N + 1]`: the first token of each packed sequence, then the number of tokens.
    pub cu_seqlens: Option<TensorView<'a, i32>>,
}

/// The sums that [`fused_cumsum_kkt`] gives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FusedKktOptions {
    /// The base of the logarithms that they are.
    pub base: GateBase,
    /// Their layout.
    pub layout: TokenLayout,
}

/// [`chunk_local_cumsum`](crate::chunk_local_cumsum) and [`chunk_scaled_dot_kkt`] in one launch: the sums of logarithms of decays from the first
/// token of each chunk on, and `A[i, j] = beta_i exp(G_i - G_j) k_i k_j` for `j < i`, else 0. With gates of channels
/// `A[i, j] = beta_i sum_d k_id k_jd exp(G_id - G_jd)`.
///
/// | arg          | shape                                                                          | dtype                | layout                  |
/// |--------------|--------------------------------------------------------------------------------|----------------------|-------------------------|
/// | `k`          | `[B, T, k_heads, K]`; packed: `[T, k_heads, K]`                                | `bf16`, `f16`, `f32` | unit stride on `K`      |
/// | `g`, `beta`  | `[B, T, v_heads]`; packed: `[T, v_heads]`                                      | `f32`                | contiguous              |
/// | `gk`         | `[B, T, v_heads, K]`; packed: `[T, v_heads, K]`; instead of `g`                | `f32`                | contiguous              |
/// | `sums`       | as `g`, or as `gk`; heads first: `[B, v_heads, T]`, packed `[v_heads, T]`      | `f32`                | contiguous              |
/// | `a`          | `[B, T, v_heads, C]`; packed: `[T, v_heads, C]`                                | `f32`                | contiguous, on 16 bytes |
/// | `cu_seqlens` | `[N + 1]`; given if packed                                                     | `i32`                | contiguous              |
///
/// `g` is of base e; the base of `sums` is an option, on which `a` does not depend. Sums are made in `f64` and rounded once. A `g` that is
/// positive or NaN makes what follows of its chunk NaN; one below -150 counts as -150. All else is as of [`chunk_scaled_dot_kkt`].
///
/// With `gk`, sums are of base e and tokens first. Exponents are differences of sums, from those of the first token of the tile of 16 of `i`, none
/// of them positive: keys times such exponentials are rounded to the type of `k` as operands; within a tile each product has its own exponential, in
/// `f32`.
///
/// # Errors
/// As [`chunk_scaled_dot_kkt`]; [`Argument`](Error::Argument) for both of `g` and `gk` or none, and beside `gk` for another base or layout of
/// sums.
///
/// Source: Yang, Wang, Zhang, Shen and Kim 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", section 3.
pub fn fused_cumsum_kkt<'a, T: Float>(
    stream: &Stream,
    inputs: FusedKktInputs<'a, T>,
    sums: TensorViewMut<'a, f32>,
    a: TensorViewMut<'a, f32>,
    options: FusedKktOptions,
) -> Result<()> {
    const OP: &str = "fused_cumsum_kkt";
    let FusedKktInputs { k, g, gk, beta, cu_seqlens } = inputs;
    check_gates(OP, g.is_some(), gk.is_some(), options)?;
    let inputs = KktInputs { k, g, beta, cu_seqlens, base: options.base };
    run(OP, stream, inputs, gk, Some((sums, options.layout)), a)
}

/// Checks which gates there are, and whether their sums can be what is asked for.
///
/// # Errors
/// [`Error::Argument`].
pub(crate) fn check_gates(op: &'static str, g: bool, gk: bool, options: FusedKktOptions) -> Result<()> {
    let FusedKktOptions { base, layout } = options;
    match (g, gk) {
        (true, true) => Err(Error::argument(op, "g", "given", "nothing beside gk")),
        (false, false) => Err(Error::argument(op, "g", "no tensor", "a tensor, or gk")),
        (_, true) if base != GateBase::Natural => Err(Error::argument(op, "base", "2", "e beside gk")),
        (_, true) if layout != TokenLayout::Tokens => {
            Err(Error::argument(op, "layout", "heads", "tokens beside gk"))
        }
        _ => Ok(()),
    }
}

/// The shape of sums of gates of this shape.
pub(crate) fn sums_shape(g: &[usize], layout: TokenLayout) -> Vec<usize> {
    let mut shape = g.to_vec();
    if layout == TokenLayout::Heads && shape.len() > 1 {
        let last = shape.len() - 1;
        shape.swap(last - 1, last);
    }
    shape
}

fn run<'a, T: Float>(
    op: &'static str,
    stream: &Stream,
    inputs: KktInputs<'a, T>,
    gk: Option<TensorView<'a, f32>>,
    sums: Option<(TensorViewMut<'a, f32>, TokenLayout)>,
    mut a: TensorViewMut<'a, f32>,
) -> Result<()> {
    let KktInputs { k, g, beta, cu_seqlens, base } = inputs;
    let shapes = KktShapes {
        op,
        k: k.shape(),
        g: g.as_ref().map(|t| t.shape()),
        gk: gk.as_ref().map(|t| t.shape()),
        beta: beta.shape(),
        cu_seqlens: cu_seqlens.as_ref().map(|t| t.shape()),
    };
    let chunk = a.shape().last().copied().unwrap_or(0);
    let sizes = shapes.check(chunk)?;
    a.expect_shape(op, "a", [beta.shape(), &[chunk]].concat())?;
    if sizes.k_dim > 1 {
        k.expect_unit_stride(op, "k")?;
    }
    k.expect_aligned(op, "k", size_of::<T>() as u64)?;
    a.expect_contiguous(op, "a")?;
    a.expect_aligned(op, "a", 16)?;
    expect_plain(op, "g", g.as_ref())?;
    expect_plain(op, "gk", gk.as_ref())?;
    expect_plain(op, "beta", Some(&beta))?;
    expect_plain(op, "cu_seqlens", cu_seqlens.as_ref())?;
    let (mut sums, layout) = sums.map_or((None, TokenLayout::Tokens), |(sums, layout)| (Some(sums), layout));
    if let Some(sums) = &sums {
        let of_channels = gk.as_ref().map(|gk| gk.shape().to_vec());
        sums.expect_shape(op, "sums", of_channels.unwrap_or_else(|| sums_shape(beta.shape(), layout)))?;
        sums.expect_contiguous(op, "sums")?;
        sums.expect_aligned(op, "sums", 4)?;
    }
    let (gates, starts) =
        (g.as_ref().map(|t| t as &dyn Operand), cu_seqlens.as_ref().map(|t| t as &dyn Operand));
    let of_channels = gk.as_ref().map(|t| t as &dyn Operand);
    let read = [
        ("k", Some(&k as &dyn Operand)),
        ("g", gates),
        ("gk", of_channels),
        ("beta", Some(&beta)),
        ("cu_seqlens", starts),
    ];
    let of_sums = sums.as_ref().map(|t| t as &dyn Operand);
    check_aliases(op, &read, &[(("a", Some(&a)), &[]), (("sums", of_sums), &[])])?;
    let KktSizes { batch, tokens, k_heads, v_heads, k_dim, sequences } = sizes;
    let limit = i32::MAX as usize;
    for (n, what, limit) in [
        (batch, "sequences", limit),
        (sequences, "sequences", limit),
        (tokens, "tokens", limit),
        (v_heads, "heads", 1 << 16),
    ] {
        if n > limit {
            return Err(Error::too_large(op, "k", format!("{n} {what}"), limit as u64));
        }
    }
    let at = |from_end: usize| k.shape().len().checked_sub(from_end).map_or(0, |i| k.strides()[i]);
    let apart = at(3).saturating_mul(size_of::<T>()).saturating_mul(chunk);
    if tokens > 1 && apart > 1 << 30 {
        let what = format!("{apart} bytes from the first to the last key of a chunk");
        return Err(Error::too_large(op, "k", what, 1 << 30));
    }
    let of_sums = (v_heads * k_dim * chunk).saturating_mul(if gk.is_some() { 4 } else { 0 });
    if of_sums > 1 << 30 {
        let what = format!("{of_sums} bytes of the gates of a chunk");
        return Err(Error::too_large(op, "gk", what, 1 << 30));
    }
    if a.numel() == 0 {
        return Ok(());
    }
    let k_token = if tokens > 1 { at(3) as i64 } else { k_dim as i64 };
    if let (Some(gk), Some(sums)) = (&gk, &mut sums) {
        let whole = (k_dim * size_of::<T>()).is_multiple_of(16) && k.rows_aligned(16) && sums.is_aligned(16);
        let vectorized = whole && (tokens <= 1 || at(3) >= k_dim);
        let packed = cu_seqlens.is_some();
        let chunks = if packed { tokens / chunk + sequences } else { tokens.div_ceil(chunk) };
        let kernel = stream.kernel(CHANNELS[float_index(T::DTYPE)][usize::from(!vectorized)])?;
        let mut launch = stream.launch(op);
        let of_sums = launch.output_address("sums", sums)?;
        let data = launch.input_address("k", &k)?;
        let params = Prefill {
            k: Heads { data, batch: at(4) as i64, token: k_token, head: at(2) as i64 },
            g: launch.input_address("gk", gk)?,
            sums: of_sums,
            gk: of_sums,
            beta: launch.input_address("beta", &beta)?,
            x: launch.output_address("a", &mut a)?,
            starts: optional_address(&mut launch, "cu_seqlens", &cu_seqlens)?,
            sequences: if packed { sequences } else { batch } as u32,
            tokens: tokens as u32,
            chunk: chunk as u32,
            chunks: chunks.max(1) as u32,
            k_dim: k_dim as u32,
            k_heads: k_heads as u32,
            v_heads: v_heads as u32,
            group: (v_heads / k_heads) as u32,
            ..Prefill::zeroed()
        };
        let waves = if packed { 1 } else { batch }.saturating_mul(chunks).saturating_mul(v_heads);
        // SAFETY: the checks above give the tensors these sizes, in which the kernel stays whatever starts hold.
        return unsafe { launch.run(&kernel, LaunchConfig::grid_1d(waves), &params) };
    }
    let vectorized = (k_dim * size_of::<T>()).is_multiple_of(16) && k.rows_aligned(16);
    let variant = chunk.trailing_zeros() as usize - 4 + if vectorized { 0 } else { 3 };
    let kernel = stream.kernel(KERNELS[float_index(T::DTYPE)][variant])?;
    let mut launch = stream.launch(op);
    let params = Params {
        k: launch.input_address("k", &k)?,
        g: match &g {
            Some(g) => launch.input_address("g", g)?,
            None => 0,
        },
        beta: launch.input_address("beta", &beta)?,
        a: launch.output_address("a", &mut a)?,
        starts: match &cu_seqlens {
            Some(starts) => launch.input_address("cu_seqlens", starts)?,
            None => 0,
        },
        sums: match &mut sums {
            Some(sums) => launch.output_address("sums", sums)?,
            None => 0,
        },
        sums_batch: (tokens * v_heads) as i64,
        sums_token: if layout == TokenLayout::Tokens { v_heads as i64 } else { 1 },
        sums_head: if layout == TokenLayout::Tokens { 1 } else { tokens as i64 },
        k_batch: at(4) as i64,
        k_token,
        k_head: at(2) as i64,
        batch: batch as u32,
        tokens: tokens as u32,
        k_heads: k_heads as u32,
        group: (v_heads / k_heads) as u32,
        sequences: sequences as u32,
        k_dim: k_dim as u32,
        base_2: (base == GateBase::Two).into(),
        pad: 0,
    };
    let waves = batch.saturating_mul(tokens.div_ceil(chunk)).saturating_mul(k_heads);
    // SAFETY: the checks above give the tensors these sizes, and starts one element more than there are sequences; the kernel clamps what
    // they hold to the tokens.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(waves), &params) }
}

/// The shapes of a call.
#[derive(Debug)]
pub(crate) struct KktShapes<'s> {
    pub op: &'static str,
    pub k: &'s [usize],
    pub g: Option<&'s [usize]>,
    pub gk: Option<&'s [usize]>,
    pub beta: &'s [usize],
    pub cu_seqlens: Option<&'s [usize]>,
}

/// Sizes of a call. Without packed sequences `sequences` is 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KktSizes {
    pub batch: usize,
    pub tokens: usize,
    pub k_heads: usize,
    pub v_heads: usize,
    pub k_dim: usize,
    pub sequences: usize,
}

impl KktShapes<'_> {
    /// # Errors
    /// [`Error::Shape`] and [`Error::Unsupported`].
    pub fn check(&self, chunk: usize) -> Result<KktSizes> {
        let Self { op, k, g, gk, beta, cu_seqlens } = *self;
        let sequences = match cu_seqlens {
            None => 0,
            Some(&[n]) if n > 0 => n - 1,
            Some(shape) => {
                return Err(Error::shape(op, "cu_seqlens", shape, "[N + 1], at least one element"));
            }
        };
        let (batch, tokens, k_heads, k_dim) = match (cu_seqlens, k) {
            (None, &[batch, tokens, heads, dim]) => (batch, tokens, heads, dim),
            (Some(_), &[tokens, heads, dim]) => (1, tokens, heads, dim),
            (None, _) => return Err(Error::shape(op, "k", k, "4 axes: [B, T, k_heads, K]")),
            (Some(_), _) => {
                return Err(Error::shape(op, "k", k, "3 axes: [T, k_heads, K] (packed by cu_seqlens)"));
            }
        };
        let rows = &k[..k.len() - 2];
        let v_heads = beta.last().copied().unwrap_or(0);
        if beta.len() != rows.len() + 1 || &beta[..rows.len()] != rows {
            return Err(Error::shape(op, "beta", beta, format!("{rows:?} and v_heads (tokens of k)")));
        }
        if k_heads == 0 || v_heads == 0 || !v_heads.is_multiple_of(k_heads) {
            let want = format!("a positive multiple of {k_heads} heads (those of k)");
            return Err(Error::shape(op, "beta", beta, want));
        }
        if let Some(g) = g.filter(|g| *g != beta) {
            return Err(Error::shape(op, "g", g, format!("{beta:?} (shape of beta)")));
        }
        let of_channels = [beta, &[k_dim]].concat();
        if let Some(gk) = gk.filter(|gk| *gk != of_channels) {
            return Err(Error::shape(op, "gk", gk, format!("{of_channels:?} (shape of beta, and K)")));
        }
        if !(1..=256).contains(&k_dim) {
            return Err(Error::unsupported(op, format!("K = {k_dim}"), "heads have 1 to 256 elements"));
        }
        if ![16, 32, 64].contains(&chunk) {
            return Err(Error::unsupported(op, format!("C = {chunk}"), "chunks have 16, 32 or 64 tokens"));
        }
        Ok(KktSizes { batch, tokens, k_heads, v_heads, k_dim, sequences })
    }
}
