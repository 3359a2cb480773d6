//! `fused_rmsnorm_mxfp4_quant`.

use super::{FIRST, NormParams, NormRows, Problem, SECOND, SecondRows, VARIANTS, check_aliases, names};
use crate::{Smooth, kernels};
use bytemuck::{Pod, Zeroable};
use hk_core::quant::{BlockRule, BlockScale, ScaleLayout, shuffled_len};
use hk_core::{CodeObjects, E8M0, Error, Float, Fp4x2, GlobalLayout, Result, Stream, TensorViewMut};

const OP: &str = "fused_rmsnorm_mxfp4_quant";

/// Of `bf16`, `f16`, `f32`.
pub(super) static OBJECTS: [&CodeObjects; 3] = [
    &kernels::FUSED_RMSNORM_MXFP4_QUANT_BF16,
    &kernels::FUSED_RMSNORM_MXFP4_QUANT_F16,
    &kernels::FUSED_RMSNORM_MXFP4_QUANT_F32,
];
static KERNELS: [[&str; VARIANTS.len()]; 3] = names!("fused_rmsnorm_mxfp4_quant");

/// Columns of a block.
const BLOCK: usize = 32;

/// `Params` of `hip/fused_rmsnorm_mxfp4_quant.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    head: NormParams,
    q: GlobalLayout,
    scale: GlobalLayout,
    rule: BlockRule,
    blocks: u32,
    shuffled: u32,
    _pad: u32,
}

/// Normalises rows and quantizes them to MX blocks of fp4: `y = s * rsqrt(mean(s^2) + eps) * weight`, a power-of-two scale for
/// 32 columns, `q = round(y / scale)`.
///
/// `norm` says what `s` is and what else is written; `q` is `[rows, cols / 2]`, pairs of values, with unit stride. `scale` is
/// `[rows, ceil(cols / 32)]` of any strides (rows or columns contiguous), or in
/// [`Shuffled950`](ScaleLayout::Shuffled950) a contiguous tensor of
/// [`shuffled_len`]`(rows, ceil(cols / 32))` bytes, the padding among them 127. `mode` is the rule for scales:
/// `Even`, `RoundUp` or `Floor`. `second` is normalised and not quantized.
///
/// All arithmetic is `f32`: neither a sum with the residual nor `y` is rounded before it is quantized; `round_norm` rounds `y` to
/// `T` first. Codes are rounded to nearest even, a zero keeps its sign, and a block with a NaN or an infinity has the scale
/// NaN and codes of 0. Both targets give the same bytes for the same `y`; the bits of a row depend on that row, the weights
/// and the options alone. Rows of up to 16384 columns are read once.
///
/// `residual_out` may be exactly `x` or exactly `residual_in`; no other output shares memory with any tensor. Returns when
/// the launches are queued, one and one for `second`. No rows: nothing is launched.
///
/// # Errors
/// As [`fused_rmsnorm_fp8_quant`](crate::fused_rmsnorm_fp8_quant); [`Shape`](Error::Shape) for an odd number of columns,
/// [`Argument`](Error::Argument) for `DivFloor`.
///
/// Source: OCP Microscaling Formats (MX) Specification 1.0, section 6.3.
#[expect(clippy::too_many_arguments, reason = "the operator's tensors and options")]
pub fn fused_rmsnorm_mxfp4_quant<T: Float, W: Smooth<T>>(
    stream: &Stream,
    norm: NormRows<T, W>,
    second: Option<SecondRows<T, W>>,
    q: TensorViewMut<Fp4x2>,
    mut scale: TensorViewMut<E8M0>,
    layout: ScaleLayout,
    mode: BlockScale,
    round_norm: bool,
) -> Result<()> {
    let mut problem = Problem::first(OP, &norm)?;
    let [rows, cols] = norm.x.dims(OP, "x")?;
    if !cols.is_multiple_of(2) {
        return Err(Error::shape(OP, "x", norm.x.shape(), "an even number of columns, two a byte of q"));
    }
    problem.codes(&q, [rows, cols / 2], "rows of x, half its columns")?;
    if mode == BlockScale::DivFloor {
        return Err(Error::argument(OP, "mode", "DivFloor", "Even, RoundUp or Floor"));
    }
    let blocks = cols.div_ceil(BLOCK);
    let shuffled = layout == ScaleLayout::Shuffled950;
    if shuffled {
        let len = shuffled_len(rows, blocks);
        if len.is_none_or(|len| scale.shape() != [len]) {
            let want = format!("{len:?} (shuffled scales of {rows} rows of {blocks} blocks)");
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

    let plan = problem.plan::<T>(stream, OBJECTS, &KERNELS)?;
    let mut launch = stream.launch(OP, &plan.kernel);
    let NormRows { x, weight, residual, out, .. } = norm;
    let params = Params {
        head: problem.params(&mut launch, &plan, &FIRST, x, &weight, residual, out, round_norm)?,
        q: launch.output("q", &mut q.flatten_rows(OP, "q")?)?,
        scale: launch.output("scale", &mut scale)?,
        rule: BlockRule::fp4(mode, 0),
        blocks: blocks as u32,
        shuffled: shuffled.into(),
        _pad: 0,
    };
    // SAFETY: the checks above make every row of the matrices as long as `cols` asks, and scales as long as their layout
    // needs, which is what the kernel accesses, whatever the grid; the loader matches `Params` to the kernel.
    unsafe { launch.run(plan.config, &params) }?;

    let Some((second, problem)) = second.zip(second_problem) else { return Ok(()) };
    let plan = problem.plan::<T>(stream, OBJECTS, &KERNELS)?;
    let mut launch = stream.launch(OP, &plan.kernel);
    let SecondRows { x, weight, out, .. } = second;
    let params = Params {
        head: problem.params(&mut launch, &plan, &SECOND, x, &weight, None, Some(out), false)?,
        q: GlobalLayout::ABSENT,
        scale: GlobalLayout::ABSENT,
        ..params
    };
    // SAFETY: as above; without q nothing but `out2` is written.
    unsafe { launch.run(plan.config, &params) }
}
