//! The safe functions of `hip/fp8_convert.hip`.

use crate::kernels::fp8_convert::Params;
use crate::launch_tiles::{elementwise, grid, tiles};
use hk_core::{
    Aliasing, DType, Element, Fp8E4M3, Fp8E4M3Fnuz, KernelRef, Result, Stream, TensorView, TensorViewMut,
    check_overlap,
};

/// Vectorized, scalar.
static KERNELS: [KernelRef<Params>; 2] =
    [Params::kernel("fp8_convert_bytes"), Params::kernel("fp8_convert_scalar")];

/// Columns per lane and tile, `RowT::kCols / kWaveSize`.
const LANE_COLUMNS: usize = 64;

fn convert<A: Element, B: Element>(
    op: &'static str,
    stream: &Stream,
    q: TensorView<A>,
    scale: TensorView<f32>,
    out: TensorViewMut<B>,
    mut scale_out: TensorViewMut<f32>,
) -> Result<()> {
    let (problem, q, mut out) = elementwise(op, ("q", q), ("out", out))?;
    scale.expect_contiguous(op, "scale")?;
    scale.expect_aligned(op, "scale", 4)?;
    scale_out.expect_shape(op, "scale_out", scale.shape())?;
    scale_out.expect_contiguous(op, "scale_out")?;
    scale_out.expect_aligned(op, "scale_out", 4)?;
    check_overlap(op, ("q", &q), ("scale_out", &scale_out), Aliasing::Disjoint)?;
    check_overlap(op, ("scale", &scale), ("out", &out), Aliasing::Disjoint)?;
    check_overlap(op, ("scale", &scale), ("scale_out", &scale_out), Aliasing::ExactAliasAllowed)?;
    check_overlap(op, ("out", &out), ("scale_out", &scale_out), Aliasing::Disjoint)?;
    let scales = scale.numel();
    if problem.rows() == 0 && scales == 0 {
        return Ok(());
    }
    let kernel = stream.kernel(KERNELS[usize::from(!problem.can_vectorize())])?;
    let mut launch = stream.launch(op);
    let params = Params {
        q: launch.input("q", &q)?,
        scale: launch.input("scale", &scale)?,
        out: launch.output("out", &mut out)?,
        scale_out: launch.output("scale_out", &mut scale_out)?,
        scales: scales as u64,
        to_fnuz: (B::DTYPE == DType::Fp8E4M3Fnuz).into(),
        pad: 0,
    };
    let wave = stream.device().info().wave_size as usize;
    let grid = grid(stream, tiles(&problem, wave * LANE_COLUMNS).max(scales.div_ceil(wave)), 16);
    // SAFETY: the checks above make every row of q and out `cols` long and both tensors of scales contiguous, of `scales`
    // elements. The kernel accesses no more than that on any grid.
    unsafe { launch.run(&kernel, grid, &params) }
}

/// Converts fp8 e4m3 of the OCP, with its scales, to FNUZ, the encoding of gfx942: the same bytes, which mean half the value, and
/// twice the scale.
///
/// | arg         | shape        | dtype         | layout                                              |
/// |-------------|--------------|---------------|-----------------------------------------------------|
/// | `q`         | `[.., cols]` | `fp8e4m3`     | unit stride on `cols`, one row stride over the rest |
/// | `scale`     | any          | `f32`         | contiguous                                          |
/// | `out`       | `[.., cols]` | `fp8e4m3fnuz` | as `q`                                              |
/// | `scale_out` | as `scale`   | `f32`         | contiguous                                          |
///
/// Every product `q * scale` is unchanged. -0 becomes 0; NaN stays NaN. `scale_out` may alias `scale` exactly
/// ([`TensorViewMut::alias`]). Returns when the launch is queued.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks
/// the table, [`Empty`](hk_core::Error::Empty) for zero columns, [`Overlap`](hk_core::Error::Overlap) if an output shares
/// memory with another tensor except as said, [`TooLarge`](hk_core::Error::TooLarge) beyond 2^29 - 1 columns or 2^32 - 1
/// rows, [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is
/// written then.
pub fn fp8_ocp_to_fnuz(
    stream: &Stream,
    q: TensorView<Fp8E4M3>,
    scale: TensorView<f32>,
    out: TensorViewMut<Fp8E4M3Fnuz>,
    scale_out: TensorViewMut<f32>,
) -> Result<()> {
    convert("fp8_ocp_to_fnuz", stream, q, scale, out, scale_out)
}

/// Converts fp8 e4m3 FNUZ, with its scales, to the OCP's encoding: the same bytes, which mean twice the value, and half the scale.
///
/// | arg         | shape        | dtype         | layout                                              |
/// |-------------|--------------|---------------|-----------------------------------------------------|
/// | `q`         | `[.., cols]` | `fp8e4m3fnuz` | unit stride on `cols`, one row stride over the rest |
/// | `scale`     | any          | `f32`         | contiguous                                          |
/// | `out`       | `[.., cols]` | `fp8e4m3`     | as `q`                                              |
/// | `scale_out` | as `scale`   | `f32`         | contiguous                                          |
///
/// Every product `q * scale` is unchanged, except for the largest value, 240, which has no counterpart and becomes that of 224. NaN
/// stays NaN. `scale_out` may alias `scale` exactly ([`TensorViewMut::alias`]). Returns when the launch is queued.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks
/// the table, [`Empty`](hk_core::Error::Empty) for zero columns, [`Overlap`](hk_core::Error::Overlap) if an output shares
/// memory with another tensor except as said, [`TooLarge`](hk_core::Error::TooLarge) beyond 2^29 - 1 columns or 2^32 - 1
/// rows, [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is
/// written then.
pub fn fp8_fnuz_to_ocp(
    stream: &Stream,
    q: TensorView<Fp8E4M3Fnuz>,
    scale: TensorView<f32>,
    out: TensorViewMut<Fp8E4M3>,
    scale_out: TensorViewMut<f32>,
) -> Result<()> {
    convert("fp8_fnuz_to_ocp", stream, q, scale, out, scale_out)
}
