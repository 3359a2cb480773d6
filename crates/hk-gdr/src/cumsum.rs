//! The safe function of `hip/cumsum.hip`.

use crate::kernels::cumsum::Params;
use hk_core::{
    Error, KernelRef, LaunchConfig, Operand, Result, Stream, TensorView, TensorViewMut, check_aliases,
};

const OP: &str = "chunk_local_cumsum";

static KERNEL: KernelRef<Params> = Params::kernel("cumsum_f32");
/// Threads of a block.
const THREADS: u64 = 256;
/// Tokens of a chunk at most.
const MOST_CHUNK: usize = 1 << 16;

/// Order of the axes of tokens and heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TokenLayout {
    /// Tokens, then heads.
    #[default]
    Tokens,
    /// Heads, then tokens.
    Heads,
}

/// Options of [`chunk_local_cumsum`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CumsumOptions {
    /// Tokens of a chunk: a power of two up to 2^16. Default: 64.
    pub chunk_size: usize,
    /// Sums from a token to the end of its chunk.
    pub reverse: bool,
    /// Factor of the sums. Default: 1.
    pub scale: f32,
    /// Order of the axes.
    pub layout: TokenLayout,
}

impl Default for CumsumOptions {
    fn default() -> Self {
        Self { chunk_size: 64, reverse: false, scale: 1.0, layout: TokenLayout::Tokens }
    }
}

/// Sums along the tokens of each chunk: `y[t] = scale sum x[s]`, `s` from the first token of the chunk to `t`, inclusive; in reverse from
/// `t` to the last one.
///
/// | arg          | shape                                                                             | dtype | layout                 |
/// |--------------|-----------------------------------------------------------------------------------|-------|------------------------|
/// | `x`, `y`     | `[B, T, H]`, `[B, T, H, S]`; packed: `[T, H]`, `[T, H, S]`; or heads before tokens | `f32` | any strides            |
/// | `cu_seqlens` | `[N + 1]`; given if packed                                                        | `i32` | contiguous             |
///
/// Chunks begin with the first token of a sequence; the last one of a sequence may be shorter. Sums are compensated: they err by
/// about 2^-23 of the sum of absolute values. A result depends on its chunk alone.
///
/// Tokens of no sequence are not written. Those of a sequence whose tokens are out of range are NaN where they are tokens. No output may share
/// memory with an input but `y` may be exactly `x` if there is no `cu_seqlens`. Returns when the launch is queued.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table,
/// [`Argument`](Error::Argument) for a `chunk_size` that is not a power of two from 1 to 2^16, or a scale that is not finite,
/// [`Overlap`](Error::Overlap), [`TooLarge`](Error::TooLarge) beyond 2^31 - 1 tokens, sequences or columns,
/// [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written then.
pub fn chunk_local_cumsum<'a>(
    stream: &Stream,
    x: TensorView<'a, f32>,
    cu_seqlens: Option<TensorView<'a, i32>>,
    mut y: TensorViewMut<'a, f32>,
    options: CumsumOptions,
) -> Result<()> {
    let CumsumOptions { chunk_size, reverse, scale, layout } = options;
    let sizes = cumsum_sizes(x.shape(), cu_seqlens.as_ref().map(|t| t.shape()), options)?;
    y.expect_shape(OP, "y", x.shape())?;
    x.expect_aligned(OP, "x", 4)?;
    y.expect_aligned(OP, "y", 4)?;
    if let Some(starts) = &cu_seqlens {
        starts.expect_contiguous(OP, "cu_seqlens")?;
        starts.expect_aligned(OP, "cu_seqlens", 4)?;
    }
    let may_be: &[&str] = if cu_seqlens.is_some() { &[] } else { &["x"] };
    let starts = cu_seqlens.as_ref().map(|t| t as &dyn Operand);
    check_aliases(OP, &[("x", Some(&x)), ("cu_seqlens", starts)], &[(("y", Some(&y)), may_be)])?;
    let Sizes { batch, tokens, heads, inner, sequences } = sizes;
    let columns = heads.saturating_mul(inner);
    let limit = i32::MAX as usize;
    for (n, what) in
        [(batch, "sequences"), (sequences, "sequences"), (tokens, "tokens"), (columns, "columns")]
    {
        if n > limit {
            return Err(Error::too_large(OP, "x", format!("{n} {what}"), limit as u64));
        }
    }
    if x.numel() == 0 {
        return Ok(());
    }
    // Batch, token, head, inner.
    let strides = |strides: &[usize]| -> [i64; 4] {
        let mut all: Vec<i64> = strides.iter().map(|s| *s as i64).collect();
        if cu_seqlens.is_some() {
            all.insert(0, 0);
        }
        all.resize(4, 0);
        if layout == TokenLayout::Heads {
            all.swap(1, 2);
        }
        [all[0], all[1], all[2], all[3]]
    };
    let ([x_batch, x_token, x_head, x_inner], [y_batch, y_token, y_head, y_inner]) =
        (strides(x.strides()), strides(y.strides()));
    let kernel = stream.kernel(KERNEL)?;
    let mut launch = stream.launch(OP);
    let params = Params {
        x: launch.input_address("x", &x)?,
        y: launch.output_address("y", &mut y)?,
        starts: match &cu_seqlens {
            Some(starts) => launch.input_address("cu_seqlens", starts)?,
            None => 0,
        },
        x_batch,
        x_token,
        x_head,
        x_inner,
        y_batch,
        y_token,
        y_head,
        y_inner,
        batch: batch as u32,
        tokens: tokens as u32,
        heads: heads as u32,
        inner: inner as u32,
        sequences: sequences as u32,
        chunk: chunk_size as u32,
        reverse: reverse.into(),
        scale,
    };
    let lanes = (batch as u64) * (columns as u64) * tokens.div_ceil(chunk_size) as u64;
    let blocks = lanes.div_ceil(THREADS) as usize;
    // SAFETY: the checks above give x and y these sizes, and starts one element more than there are sequences; the kernel clamps what
    // they hold to the tokens.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(blocks), &params) }
}

/// Sizes of a call. Without packed sequences `sequences` is 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub batch: usize,
    pub tokens: usize,
    pub heads: usize,
    pub inner: usize,
    pub sequences: usize,
}

/// Checks the shapes and options of a call.
///
/// # Errors
/// [`Error::Shape`] and [`Error::Argument`].
pub(crate) fn cumsum_sizes(x: &[usize], starts: Option<&[usize]>, options: CumsumOptions) -> Result<Sizes> {
    let CumsumOptions { chunk_size, scale, layout, .. } = options;
    if !chunk_size.is_power_of_two() || chunk_size > MOST_CHUNK {
        return Err(Error::argument(OP, "chunk_size", chunk_size, "a power of two from 1 to 2^16"));
    }
    if !scale.is_finite() {
        return Err(Error::argument(OP, "scale", scale, "finite"));
    }
    let sequences = match starts {
        None => 0,
        Some(&[n]) if n > 0 => n - 1,
        Some(shape) => return Err(Error::shape(OP, "cu_seqlens", shape, "[N + 1], at least one element")),
    };
    let lead = usize::from(starts.is_none());
    if !(lead + 2..=lead + 3).contains(&x.len()) {
        let want = if lead == 1 {
            "3 or 4 axes, of them the first of sequences"
        } else {
            "2 or 3 axes (packed by cu_seqlens)"
        };
        return Err(Error::shape(OP, "x", x, want));
    }
    let (first, second) = (x[lead], x[lead + 1]);
    let (tokens, heads) = if layout == TokenLayout::Tokens { (first, second) } else { (second, first) };
    let inner = x.get(lead + 2).copied().unwrap_or(1);
    Ok(Sizes { batch: if lead == 1 { x[0] } else { 1 }, tokens, heads, inner, sequences })
}
