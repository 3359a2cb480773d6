//! The safe function of `hip/solve.hip`.

use crate::kernels::solve::Params;
use hk_core::plan::rows::float_index;
use hk_core::{
    Error, Float, KernelRef, LaunchConfig, Operand, Result, Stream, TensorView, TensorViewMut, check_aliases,
    row_kernels,
};

const OP: &str = "solve_tril";

/// The entry points: for bf16, f16, f32; of chunks of 16, 32, 64.
static KERNELS: [[KernelRef<Params>; 3]; 3] =
    row_kernels!(Params, "solve", ["bf16", "f16", "f32"], ["16", "32", "64"]);

/// The inverses of triangular matrices, `X = (I + A)^-1`, one for each chunk of `C` tokens and each head.
///
/// | arg          | shape                                  | dtype                | layout                  |
/// |--------------|----------------------------------------|----------------------|-------------------------|
/// | `a`          | `[B, T, heads, C]`; packed: `[T, heads, C]` | `f32`           | contiguous, on 16 bytes |
/// | `x`          | as `a`                                 | `bf16`, `f16`, `f32` | contiguous, on 16 bytes |
/// | `cu_seqlens` | `[N + 1]`; given if packed             | `i32`                | contiguous              |
///
/// `C` is 16, 32 or 64. Token `i` of a chunk has row `i` of the chunk's matrix; of `A` only what is below the diagonal is read, and `X` is
/// zero above it. Chunks begin with the first token of a sequence; the last one of a sequence may be shorter, which is as if further rows of
/// `A` were zero.
///
/// `f32` arithmetic, one rounding, to nearest even: blocks of 16 rows on the diagonal by substitution, the others by products. On sm_90
/// substitution alone. A result depends on its chunk alone. Tokens of no sequence are not written; those of a sequence whose tokens are
/// out of range are NaN. No output may share memory with an input. Returns when the launch is queued.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table,
/// [`Unsupported`](Error::Unsupported) for another `C`, [`Overlap`](Error::Overlap) if tensors share memory,
/// [`TooLarge`](Error::TooLarge) beyond 2^31 - 1 tokens or sequences, or 2^16 heads, [`DeviceMismatch`](Error::DeviceMismatch), and the errors of
/// loading and launching a kernel. Nothing is written then.
pub fn solve_tril<'a, T: Float>(
    stream: &Stream,
    a: TensorView<'a, f32>,
    cu_seqlens: Option<TensorView<'a, i32>>,
    mut x: TensorViewMut<'a, T>,
) -> Result<()> {
    let sizes = solve_sizes(a.shape(), cu_seqlens.as_ref().map(|t| t.shape()))?;
    x.expect_shape(OP, "x", a.shape())?;
    a.expect_contiguous(OP, "a")?;
    a.expect_aligned(OP, "a", 16)?;
    x.expect_contiguous(OP, "x")?;
    x.expect_aligned(OP, "x", 16)?;
    if let Some(starts) = &cu_seqlens {
        starts.expect_contiguous(OP, "cu_seqlens")?;
        starts.expect_aligned(OP, "cu_seqlens", 4)?;
    }
    let starts = cu_seqlens.as_ref().map(|t| t as &dyn Operand);
    check_aliases(OP, &[("a", Some(&a)), ("cu_seqlens", starts)], &[(("x", Some(&x)), &[])])?;
    let Sizes { batch, tokens, heads, chunk, sequences } = sizes;
    let limit = i32::MAX as usize;
    for (n, what, limit) in [
        (batch, "sequences", limit),
        (sequences, "sequences", limit),
        (tokens, "tokens", limit),
        (heads, "heads", 1 << 16),
    ] {
        if n > limit {
            return Err(Error::too_large(OP, "a", format!("{n} {what}"), limit as u64));
        }
    }
    if a.numel() == 0 {
        return Ok(());
    }
    let kernel = stream.kernel(KERNELS[float_index(T::DTYPE)][chunk.trailing_zeros() as usize - 4])?;
    let mut launch = stream.launch(OP);
    let params = Params {
        a: launch.input_address("a", &a)?,
        x: launch.output_address("x", &mut x)?,
        starts: match &cu_seqlens {
            Some(starts) => launch.input_address("cu_seqlens", starts)?,
            None => 0,
        },
        batch: batch as u32,
        tokens: tokens as u32,
        heads: heads as u32,
        sequences: sequences as u32,
    };
    let waves = batch.saturating_mul(tokens.div_ceil(chunk)).saturating_mul(heads);
    // SAFETY: the checks above give a and x these sizes, and starts one element more than there are sequences; the kernel clamps what
    // they hold to the tokens.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(waves), &params) }
}

/// Sizes of a call. Without packed sequences `sequences` is 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub batch: usize,
    pub tokens: usize,
    pub heads: usize,
    pub chunk: usize,
    pub sequences: usize,
}

/// Checks the shapes of a call.
///
/// # Errors
/// [`Error::Shape`] and [`Error::Unsupported`].
pub(crate) fn solve_sizes(a: &[usize], starts: Option<&[usize]>) -> Result<Sizes> {
    let sequences = match starts {
        None => 0,
        Some(&[n]) if n > 0 => n - 1,
        Some(shape) => return Err(Error::shape(OP, "cu_seqlens", shape, "[N + 1], at least one element")),
    };
    let (batch, tokens, heads, chunk) = match (starts, a) {
        (None, &[batch, tokens, heads, chunk]) => (batch, tokens, heads, chunk),
        (Some(_), &[tokens, heads, chunk]) => (1, tokens, heads, chunk),
        (None, _) => return Err(Error::shape(OP, "a", a, "4 axes: [B, T, heads, C]")),
        (Some(_), _) => {
            return Err(Error::shape(OP, "a", a, "3 axes: [T, heads, C] (packed by cu_seqlens)"));
        }
    };
    if ![16, 32, 64].contains(&chunk) {
        return Err(Error::unsupported(OP, format!("C = {chunk}"), "chunks have 16, 32 or 64 tokens"));
    }
    Ok(Sizes { batch, tokens, heads, chunk, sequences })
}
