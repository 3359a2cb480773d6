//! `fused_rmsnorm_fp8_quant`.

use super::{
    FIRST, NormParams, NormRows, Problem, SECOND, SecondRows, VARIANTS, check_aliases, names, operand,
};
use crate::{Smooth, kernels};
use bytemuck::{Pod, Zeroable};
use hk_core::quant::{BlockRule, BlockScale, CodeFormat, GroupSize, Quantized};
use hk_core::{CodeObjects, DType, Error, Float, GlobalLayout, Result, Stream, TensorView, TensorViewMut};

const OP: &str = "fused_rmsnorm_fp8_quant";

/// Of `bf16`, `f16`, `f32`.
pub(super) static OBJECTS: [&CodeObjects; 3] = [
    &kernels::FUSED_RMSNORM_FP8_QUANT_BF16,
    &kernels::FUSED_RMSNORM_FP8_QUANT_F16,
    &kernels::FUSED_RMSNORM_FP8_QUANT_F32,
];
static KERNELS: [[&str; VARIANTS.len()]; 3] = names!("fused_rmsnorm_fp8_quant");

/// `Params` of `hip/fused_rmsnorm_fp8_quant.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    head: NormParams,
    smooth: GlobalLayout,
    q: GlobalLayout,
    scale: GlobalLayout,
    format: CodeFormat,
    rule: BlockRule,
    mode: u32,
    group: u32,
    pow2: u32,
}

/// Which values share a scale, and where it is.
#[derive(Debug)]
pub enum Fp8Scale<'a> {
    /// All: `scale`, `[1]`, is given. Any sign; 0, NaN and infinities do what the arithmetic does.
    PerTensorStatic {
        /// `[1]`, read.
        scale: TensorView<'a, f32>,
    },
    /// Those of a row: `scale[r] = max |z[r, :]| / qmax`, 1 for zeros, of `z = y * smooth`.
    PerToken {
        /// `[rows]`, contiguous.
        scale: TensorViewMut<'a, f32>,
        /// `[cols]`, contiguous; 1 if left out.
        smooth: Option<TensorView<'a, f32>>,
    },
    /// So many neighbouring columns of a row: `scale[r, j] = max |y[r, j]| / qmax`, magnitudes below 1e-10 as 1e-10.
    Group {
        /// How many.
        size: GroupSize,
        /// `[rows, ceil(cols / size)]`, any strides: rows or columns contiguous.
        scale: TensorViewMut<'a, f32>,
        /// The scale is the power of two that is not below the quotient.
        pow2: bool,
    },
}

/// Normalises rows and quantizes them to int8 or fp8: `y = s * rsqrt(mean(s^2) + eps) * weight`, `q = round(y / scale)`.
///
/// `norm` says what `s` is and what else is written; `q` is `[rows, cols]` of `fp8e4m3`, `fp8e4m3fnuz` or, per token, `i8`,
/// with unit stride on `cols`. `second` is normalised and not quantized: `out2` has the bits that it would have alone.
///
/// All arithmetic is `f32`: a sum with the residual is not rounded before the norm, and what is quantized is `y` as it is, or
/// with `round_norm` rounded to `T`. Codes are `y * (1 / scale)` clamped to the largest code and rounded to nearest even:
/// infinities saturate, NaN becomes NaN or, of `i8`, 0; neither counts for a scale. The bits of a row depend on that row, the
/// vectors and the options alone, and `y` has those of hk-norm's padded RMS norms. Rows of up to 16384 columns are read once.
///
/// `residual_out` may be exactly `x` or exactly `residual_in`; no other output shares memory with any tensor. Returns when
/// the launches are queued, one and one for `second`. No rows: nothing is launched.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor is not as said,
/// [`Empty`](Error::Empty) for zero columns, [`Argument`](Error::Argument) for an `eps` that is negative or not finite,
/// [`DType`](Error::DType) for `i8` codes that are not per token, [`Overlap`](Error::Overlap),
/// [`TooLarge`](Error::TooLarge) beyond 2^29 - 1 columns or 2^32 - 1 rows, [`DeviceMismatch`](Error::DeviceMismatch), and
/// what loading and launching a kernel can answer. Nothing is written then.
///
/// Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4.
pub fn fused_rmsnorm_fp8_quant<T: Float, W: Smooth<T>, Q: Quantized>(
    stream: &Stream,
    norm: NormRows<T, W>,
    second: Option<SecondRows<T, W>>,
    q: TensorViewMut<Q>,
    scale: Fp8Scale,
    round_norm: bool,
) -> Result<()> {
    let mut problem = Problem::first(OP, &norm)?;
    let [rows, cols] = norm.x.dims(OP, "x")?;
    problem.codes(&q, [rows, cols], "shape of x")?;
    let per_token = matches!(scale, Fp8Scale::PerToken { .. });
    if Q::DTYPE == DType::I8 && !per_token {
        return Err(Error::dtype(OP, "q", Q::DTYPE, "fp8e4m3, fp8e4m3fnuz; i8 only with a scale per token"));
    }
    let (scale_in, smooth, mut scale_out) = match &scale {
        Fp8Scale::PerTensorStatic { scale } => {
            expect(scale.shape() == [1], "scale", scale.shape(), || "[1]".into())?;
            scale.expect_aligned(OP, "scale", 4)?;
            (Some(*scale), None, None)
        }
        Fp8Scale::PerToken { scale, smooth } => {
            expect(scale.shape() == [rows], "scale", scale.shape(), || format!("[{rows}] (rows of x)"))?;
            scale.expect_contiguous(OP, "scale")?;
            scale.expect_aligned(OP, "scale", 4)?;
            if let Some(smooth) = smooth {
                expect(smooth.shape() == [cols], "smooth", smooth.shape(), || {
                    format!("[{cols}] (columns of x)")
                })?;
                smooth.expect_contiguous(OP, "smooth")?;
                problem.rows.tensor("smooth", smooth)?;
            }
            (None, *smooth, None)
        }
        Fp8Scale::Group { size, scale, .. } => {
            let groups = cols.div_ceil(size.columns());
            let want = || format!("[{rows}, {groups}] (rows of x, its groups of {})", size.columns());
            expect(scale.shape() == [rows, groups], "scale", scale.shape(), want)?;
            scale.expect_aligned(OP, "scale", 4)?;
            (None, None, None::<TensorViewMut<f32>>)
        }
    };
    let (mode, group, pow2) = match scale {
        Fp8Scale::PerTensorStatic { .. } => (0, 0, false),
        Fp8Scale::PerToken { scale, .. } => {
            scale_out = Some(scale);
            (1, 0, false)
        }
        Fp8Scale::Group { size, scale, pow2 } => {
            scale_out = Some(scale);
            (2, size.columns() as u32, pow2)
        }
    };
    let second_problem = second.as_ref().map(|s| Problem::second(OP, rows, s)).transpose()?;
    check_aliases(
        OP,
        &norm,
        second.as_ref(),
        &[("smooth", smooth.as_ref().map(operand)), ("scale", scale_in.as_ref().map(operand))],
        &[("q", Some(&q)), ("scale", scale_out.as_ref().map(operand))],
    )?;
    if rows == 0 {
        return Ok(());
    }

    let plan = problem.plan::<T>(stream, OBJECTS, &KERNELS)?;
    let mut launch = stream.launch(OP, &plan.kernel);
    let NormRows { x, weight, residual, out, .. } = norm;
    let params = Params {
        head: problem.params(&mut launch, &plan, &FIRST, x, &weight, residual, out, round_norm)?,
        smooth: launch.optional_input("smooth", smooth.as_ref())?,
        q: launch.output("q", &mut q.flatten_rows(OP, "q")?)?,
        scale: match &scale_in {
            Some(scale) => launch.input("scale", scale)?,
            None => launch.optional_output("scale", scale_out.as_mut())?,
        },
        format: Q::FORMAT,
        rule: BlockRule::codes(BlockScale::RoundUp, Q::FORMAT, 0),
        mode,
        group,
        pow2: pow2.into(),
    };
    // SAFETY: the checks above make every row of the matrices `cols` long, and scales and vectors as long as their mode
    // needs, which is what the kernel accesses, whatever the grid; the loader matches `Params` to the kernel.
    unsafe { launch.run(plan.config, &params) }?;

    let Some((second, problem)) = second.zip(second_problem) else { return Ok(()) };
    let plan = problem.plan::<T>(stream, OBJECTS, &KERNELS)?;
    let mut launch = stream.launch(OP, &plan.kernel);
    let SecondRows { x, weight, out, .. } = second;
    let absent = GlobalLayout::ABSENT;
    let params = Params {
        head: problem.params(&mut launch, &plan, &SECOND, x, &weight, None, Some(out), false)?,
        smooth: absent,
        q: absent,
        scale: absent,
        format: Q::FORMAT,
        rule: params.rule,
        mode: 0,
        group: 0,
        pow2: 0,
    };
    // SAFETY: as above; without q nothing but `out2` is written.
    unsafe { launch.run(plan.config, &params) }
}

fn expect(is: bool, arg: &'static str, got: &[usize], want: impl FnOnce() -> String) -> Result<()> {
    if is { Ok(()) } else { Err(Error::shape(OP, arg, got, want())) }
}
