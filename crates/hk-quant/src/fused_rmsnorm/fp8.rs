//! `fused_rmsnorm_fp8_quant`.

use super::{
    FIRST, Kernels, NormRounding, NormRows, NormTensors, Problem, SECOND, SecondRows, check_aliases, kernels,
    operand,
};
use crate::kernels::norm_quant::Fp8Params;
use crate::{GroupScaleRule, Smooth};
use hk_core::quant::{BlockRule, BlockScale, GroupSize, Quantized};
use hk_core::{DType, Error, Float, GlobalLayout, Result, Stream, TensorView, TensorViewMut};

const OP: &str = "fused_rmsnorm_fp8_quant";

static KERNELS: Kernels<Fp8Params> = kernels!(Fp8Params, "fused_rmsnorm_fp8_quant");

/// The scales of [`fused_rmsnorm_fp8_quant`].
#[derive(Debug)]
pub enum Fp8Scale<'a> {
    /// One given scale. Any sign; 0, NaN and infinities follow IEEE arithmetic.
    PerTensorStatic {
        /// `[1]`, read.
        scale: TensorView<'a, f32>,
    },
    /// One per row: `scale[r] = max |z[r, :]| / qmax`, 1 for zeros, with `z = y * smooth`.
    PerToken {
        /// `[rows]`, contiguous.
        scale: TensorViewMut<'a, f32>,
        /// `[cols]`, contiguous. `None`: 1.
        smooth: Option<TensorView<'a, f32>>,
    },
    /// One per group of adjacent columns: `scale[r, j] = max(max |y[r, j]|, 1e-10) / qmax`.
    Group {
        /// Columns per group.
        size: GroupSize,
        /// `[rows, ceil(cols / size)]`, any strides.
        scale: TensorViewMut<'a, f32>,
        /// The rule for scales.
        rule: GroupScaleRule,
    },
}

/// RMS norm with a quantizing epilogue to int8 or fp8: `y = s * rsqrt(mean(s^2) + eps) * weight` with `s = x`, or
/// `x + residual_in`; `q = round(y / scale)`.
///
/// | arg                                     | shape          | dtype                | layout                |
/// |-----------------------------------------|----------------|----------------------|-----------------------|
/// | `norm.x`                                | `[rows, cols]` | `bf16`, `f16`, `f32` | unit stride on `cols` |
/// | `norm.weight`                           | `[cols]`       | as `x`, or `f32`     | contiguous            |
/// | `norm.residual`: (`residual_in`, `residual_out`) | `[rows, cols]` | as `x`      | unit stride on `cols`; optional |
/// | `norm.out`                              | `[rows, cols]` | as `x`               | unit stride on `cols`; optional |
/// | `second.x`, `second.out`                | `[rows, cols2]` | as `x`              | unit stride on `cols2`; optional |
/// | `second.weight`                         | `[cols2]`      | as `weight`          | contiguous            |
/// | `q`                                     | `[rows, cols]` | `fp8e4m3`, `fp8e4m3fnuz`; `i8` per token | unit stride on `cols` |
/// | `scale`: `PerTensorStatic`              | `[1]`          | `f32`                | read                  |
/// | `scale`: `PerToken`                     | `[rows]`       | `f32`                | contiguous            |
/// | `scale`: `PerToken`, `smooth`           | `[cols]`       | `f32`                | contiguous; optional  |
/// | `scale`: `Group`                        | `[rows, ceil(cols / size)]` | `f32`   | any strides           |
///
/// `residual_out` is the sum rounded to its type, `out` is `y` rounded. `second` is normalized and not quantized: `second.out` is
/// bitwise identical to that of a norm by itself, and named `x2`, `weight2`, `eps2`, `out2` in errors.
///
/// All arithmetic is `f32`: the sum with the residual is not rounded before the norm, and `y` is not rounded before it is quantized,
/// unless `rounding` is [`NormRounding::Input`]. Per token, `z = y * smooth` is quantized. `q` is `y * (1 / scale)`, clamped to `qmax`
/// (127, 448 or 240) and rounded to nearest even: infinities saturate, NaN becomes NaN or, in `i8`, 0; neither counts for a scale.
///
/// Batch-invariant: the bits of a row depend on that row, the weights and the options; `y` is bitwise that of hk-norm's padded RMS
/// norms. Rows of up to 16384 columns are read once. `residual_out` may alias `x` or `residual_in` exactly; no other output shares
/// memory with another tensor. Returns when the launches, one and one for `second`, are queued. No rows: nothing is launched.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table,
/// [`Empty`](Error::Empty) for zero columns, [`Argument`](Error::Argument) for an `eps` that is negative or not finite,
/// [`DType`](Error::DType) for `i8` that is not per token, [`Overlap`](Error::Overlap),
/// [`TooLarge`](Error::TooLarge) beyond 2^29 - 1 columns or 2^32 - 1 rows, [`DeviceMismatch`](Error::DeviceMismatch), and
/// the errors of loading and launching a kernel. Nothing is written then.
///
/// Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4.
pub fn fused_rmsnorm_fp8_quant<T: Float, W: Smooth<T>, Q: Quantized>(
    stream: &Stream,
    norm: NormRows<T, W>,
    second: Option<SecondRows<T, W>>,
    q: TensorViewMut<Q>,
    scale: Fp8Scale,
    rounding: NormRounding,
) -> Result<()> {
    let mut problem = Problem::first(OP, &norm)?;
    let [rows, cols] = norm.x.dims(OP, "x")?;
    problem.quantized(&q, [rows, cols], "shape of x")?;
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
        Fp8Scale::Group { size, scale, rule } => {
            scale_out = Some(scale);
            (2, size.columns() as u32, rule == GroupScaleRule::PowerOfTwo)
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

    let plan = problem.plan::<T, _>(stream, &KERNELS)?;
    let mut launch = stream.launch(OP);
    let NormRows { x, weight, residual, out, .. } = norm;
    let tensors = NormTensors { x, weight, residual, out };
    let params = Fp8Params {
        head: problem.params(&mut launch, plan.batch, &FIRST, tensors, rounding)?,
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
    // Both launches are prepared before the first runs: an error leaves every output as it was.
    let second = match second.zip(second_problem) {
        None => None,
        Some((second, problem)) => {
            let plan = problem.plan::<T, _>(stream, &KERNELS)?;
            let mut launch = stream.launch(OP);
            let SecondRows { x, weight, out, .. } = second;
            let tensors = NormTensors { x, weight, residual: None, out: Some(out) };
            let absent = GlobalLayout::ABSENT;
            let params = Fp8Params {
                head: problem.params(&mut launch, plan.batch, &SECOND, tensors, NormRounding::F32)?,
                smooth: absent,
                q: absent,
                scale: absent,
                format: Q::FORMAT,
                rule: params.rule,
                mode: 0,
                group: 0,
                pow2: 0,
            };
            Some((launch, plan, params))
        }
    };
    // SAFETY: the checks above make every row of the matrices `cols` long, and scales and weights as long as the mode needs. The
    // kernel accesses no more than that on any grid.
    unsafe { launch.run(&plan.kernel, plan.config, &params) }?;
    let Some((launch, plan, params)) = second else { return Ok(()) };
    // SAFETY: as above; without q the kernel writes `out2` alone.
    unsafe { launch.run(&plan.kernel, plan.config, &params) }
}

fn expect(is: bool, arg: &'static str, got: &[usize], want: impl FnOnce() -> String) -> Result<()> {
    if is { Ok(()) } else { Err(Error::shape(OP, arg, got, want())) }
}
