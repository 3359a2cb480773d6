//! `fused_rmsnorm_mxfp4_quant`.

use super::{
    FIRST, Kernels, NormRounding, NormRows, NormTensors, Problem, SECOND, SecondRows, check_aliases, kernels,
};
use crate::kernels::norm_quant::Mxfp4Params;
use crate::{MxOptions, Smooth};
use hk_core::quant::{BlockRule, BlockScale, ScaleLayout, shuffled_len};
use hk_core::{E8M0, Error, Float, Fp4x2, GlobalLayout, Result, Stream, TensorViewMut};

const OP: &str = "fused_rmsnorm_mxfp4_quant";

static KERNELS: Kernels<Mxfp4Params> = kernels!(Mxfp4Params, "fused_rmsnorm_mxfp4_quant");

/// Columns per block.
const BLOCK: usize = 32;

/// Options of [`fused_rmsnorm_mxfp4_quant`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NormMxfp4Options {
    /// The rule and the layout of the scales.
    pub mx: MxOptions,
    /// Rounding of the norm before it is quantized. Default: none.
    pub rounding: NormRounding,
}

/// RMS norm with a quantizing epilogue to MX fp4: `y = s * rsqrt(mean(s^2) + eps) * weight` with `s = x`, or `x + residual_in`; a
/// power-of-two scale per 32 columns, `q = round(y / scale)`.
///
/// | arg                                     | shape          | dtype                | layout                |
/// |-----------------------------------------|----------------|----------------------|-----------------------|
/// | `norm.x`                                | `[rows, cols]` | `bf16`, `f16`, `f32` | unit stride on `cols` |
/// | `norm.weight`                           | `[cols]`       | as `x`, or `f32`     | contiguous            |
/// | `norm.residual`: (`residual_in`, `residual_out`) | `[rows, cols]` | as `x`      | unit stride on `cols`; optional |
/// | `norm.out`                              | `[rows, cols]` | as `x`               | unit stride on `cols`; optional |
/// | `second.x`, `second.out`                | `[rows, cols2]` | as `x`              | unit stride on `cols2`; optional |
/// | `second.weight`                         | `[cols2]`      | as `weight`          | contiguous            |
/// | `q`                                     | `[rows, cols / 2]` | pairs of fp4     | unit stride; the even column in the low nibble |
/// | `scale`                                 | `[rows, ceil(cols / 32)]` | `e8m0`    | any strides           |
/// |                                         | `[n]`          |                      | [`Shuffled950`](ScaleLayout::Shuffled950), contiguous, `n` from [`shuffled_len`] |
///
/// `options.mx.mode` is the rule of the scales: `Even`, `RoundUp` or `Floor`. `residual_out` is the sum rounded to its type, `out` is
/// `y` rounded. `second` is normalized and not quantized, and named `x2`, `weight2`, `eps2`, `out2` in errors.
///
/// All arithmetic is `f32`: the sum with the residual is not rounded before the norm, and `y` is not rounded before it is quantized,
/// unless `options.rounding` is [`NormRounding::Input`]. Values round to nearest even; zeros keep their sign. A block with a NaN or an
/// infinity has the scale NaN and zeros. Padding of shuffled scales is 127 (1.0). The bytes for a given `y` are the same on every
/// target.
///
/// Batch-invariant: the bits of a row depend on that row, the weights and the options; `y` is bitwise that of hk-norm's padded RMS
/// norms. Rows of up to 16384 columns are read once. `residual_out` may alias `x` or `residual_in` exactly; no other output shares
/// memory with another tensor. Returns when the launches, one and one for `second`, are queued. No rows: nothing is launched.
///
/// # Errors
/// [`Shape`](Error::Shape) (an odd number of columns too), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks
/// the table, [`Empty`](Error::Empty) for zero columns, [`Argument`](Error::Argument) for an `eps` that is negative or not
/// finite, and for the mode `DivFloor`, [`Overlap`](Error::Overlap), [`TooLarge`](Error::TooLarge) beyond 2^29 - 1 columns or
/// 2^32 - 1 rows, [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written
/// then.
///
/// Source: OCP Microscaling Formats (MX) Specification 1.0, section 6.3.
pub fn fused_rmsnorm_mxfp4_quant<T: Float, W: Smooth<T>>(
    stream: &Stream,
    norm: NormRows<T, W>,
    second: Option<SecondRows<T, W>>,
    q: TensorViewMut<Fp4x2>,
    mut scale: TensorViewMut<E8M0>,
    options: NormMxfp4Options,
) -> Result<()> {
    let NormMxfp4Options { mx: MxOptions { mode, scale_layout: layout }, rounding } = options;
    let mut problem = Problem::first(OP, &norm)?;
    let [rows, cols] = norm.x.dims(OP, "x")?;
    if !cols.is_multiple_of(2) {
        return Err(Error::shape(OP, "x", norm.x.shape(), "an even number of columns, two a byte of q"));
    }
    problem.quantized(&q, [rows, cols / 2], "rows of x, half its columns")?;
    if mode == BlockScale::DivFloor {
        return Err(Error::argument(OP, "mode", "DivFloor", "Even, RoundUp or Floor"));
    }
    let blocks = cols.div_ceil(BLOCK);
    let shuffled = layout == ScaleLayout::Shuffled950;
    if shuffled {
        let len = shuffled_len(rows, blocks)
            .ok_or_else(|| Error::too_large(OP, "x", format!("{rows} rows"), u32::MAX.into()))?;
        if scale.shape() != [len] {
            let want = format!("[{len}] (shuffled scales of {rows} rows of {blocks} blocks)");
            return Err(Error::shape(OP, "scale", scale.shape(), want));
        }
        scale.expect_contiguous(OP, "scale")?;
    } else if scale.shape() != [rows, blocks] {
        let want = format!("[{rows}, {blocks}] (rows of x, its blocks of {BLOCK})");
        return Err(Error::shape(OP, "scale", scale.shape(), want));
    }
    let second_problem = second.as_ref().map(|s| Problem::second(OP, rows, s)).transpose()?;
    check_aliases(OP, &norm, second.as_ref(), &[], &[("q", Some(&q)), ("scale", Some(&scale))])?;
    if rows == 0 {
        return Ok(());
    }

    let plan = problem.plan::<T, _>(stream, &KERNELS)?;
    let mut launch = stream.launch(OP);
    let NormRows { x, weight, residual, out, .. } = norm;
    let tensors = NormTensors { x, weight, residual, out };
    let params = Mxfp4Params {
        head: problem.params(&mut launch, plan.batch, &FIRST, tensors, rounding)?,
        q: launch.output("q", &mut q.flatten_rows(OP, "q")?)?,
        scale: launch.output("scale", &mut scale)?,
        rule: BlockRule::fp4(mode, 0),
        blocks: blocks as u32,
        shuffled: shuffled.into(),
        _pad: 0,
    };
    // Both launches are prepared before the first runs: an error leaves every output as it was.
    let second = match second.zip(second_problem) {
        None => None,
        Some((second, problem)) => {
            let plan = problem.plan::<T, _>(stream, &KERNELS)?;
            let mut launch = stream.launch(OP);
            let SecondRows { x, weight, out, .. } = second;
            let tensors = NormTensors { x, weight, residual: None, out: Some(out) };
            let params = Mxfp4Params {
                head: problem.params(&mut launch, plan.batch, &SECOND, tensors, NormRounding::F32)?,
                q: GlobalLayout::ABSENT,
                scale: GlobalLayout::ABSENT,
                ..params
            };
            Some((launch, plan, params))
        }
    };
    // SAFETY: the checks above make every row of the matrices as long as `cols` needs, and scales as long as their layout
    // needs. The kernel accesses no more than that on any grid.
    unsafe { launch.run(&plan.kernel, plan.config, &params) }?;
    let Some((launch, plan, params)) = second else { return Ok(()) };
    // SAFETY: as above; without q the kernel writes `out2` alone.
    unsafe { launch.run(&plan.kernel, plan.config, &params) }
}
