//! The safe functions of `hip/per_tensor_quant.hip`.

use crate::expect_one;
use crate::kernels::per_tensor_quant::Params;
use crate::launch_tiles::{self, Kernels, Spread, elementwise};
use hk_core::quant::Quantized;
use hk_core::{
    Aliasing, DType, Error, Float, KernelRef, LaunchConfig, Result, Stream, TensorView, TensorViewMut,
    check_overlap,
};

static CLEAR: KernelRef<Params> = Params::kernel("per_tensor_clear");
static SCALE: Kernels<Params> = launch_tiles::kernels!(Params, "per_tensor_scale");
static QUANT: Kernels<Params> = launch_tiles::kernels!(Params, "per_tensor_quant");

fn launch_static<T: Float, Q: Quantized>(
    op: &'static str,
    stream: &Stream,
    x: TensorView<T>,
    scale: TensorView<f32>,
    q: TensorViewMut<Q>,
    divide: bool,
) -> Result<()> {
    let (problem, x, mut q) = elementwise(op, ("x", x), ("q", q))?;
    expect_one(op, "scale", &scale)?;
    check_overlap(op, ("scale", &scale), ("q", &q), Aliasing::Disjoint)?;
    if problem.rows() == 0 {
        return Ok(());
    }
    let spread = Spread::bytes32(T::DTYPE);
    let plan = spread.plan(&problem, stream, T::DTYPE, &QUANT)?;
    let mut launch = stream.launch(op);
    let params = Params {
        x: launch.input("x", &x)?,
        q: launch.output("q", &mut q)?,
        scale: launch.input("scale", &scale)?,
        format: Q::FORMAT,
        batch: plan.batch,
        divide: divide.into(),
        dynamic: 0,
        pad: 0,
    };
    // SAFETY: the checks above make every row of x and q `cols` long. The kernel accesses no more than that on any grid; it
    // writes the scale only if that is dynamic.
    unsafe { launch.run(&plan.kernel, plan.config, &params) }
}

/// Quantizes a tensor with a given scale: `q = round(x * (1 / scale))`.
///
/// | arg     | shape        | dtype                          | layout                                              |
/// |---------|--------------|--------------------------------|-----------------------------------------------------|
/// | `x`     | `[.., cols]` | `bf16`, `f16`, `f32`           | unit stride on `cols`, one row stride over the rest |
/// | `scale` | `[1]`        | `f32`                          |                                                     |
/// | `q`     | `[.., cols]` | `i8`, `fp8e4m3`, `fp8e4m3fnuz` | as `x`                                              |
///
/// The product is rounded to `f32`, clamped to `qmax` (127, 448 or 240) and rounded to nearest even: infinities saturate, NaN becomes
/// NaN or, in `i8`, 0. The scale is read on the device and can be any number: a negative one changes signs; 0, infinities and NaN
/// follow IEEE arithmetic. `q` may not alias an input. Returns when the launch is queued. No rows: nothing is launched.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table,
/// [`Empty`](Error::Empty) for zero columns, [`Overlap`](Error::Overlap) if an output shares memory with another tensor,
/// [`TooLarge`](Error::TooLarge) beyond 2^29 - 1 columns or 2^32 - 1 rows, [`DeviceMismatch`](Error::DeviceMismatch), and
/// the errors of loading and launching a kernel. Nothing is written then.
pub fn per_tensor_quant_static<T: Float, Q: Quantized>(
    stream: &Stream,
    x: TensorView<T>,
    scale: TensorView<f32>,
    q: TensorViewMut<Q>,
) -> Result<()> {
    launch_static("per_tensor_quant_static", stream, x, scale, q, false)
}

/// Quantizes a tensor to fp8 with a given scale by true division: `q = round(x / scale)`.
///
/// | arg     | shape        | dtype                    | layout                                              |
/// |---------|--------------|--------------------------|-----------------------------------------------------|
/// | `x`     | `[.., cols]` | `bf16`, `f16`, `f32`     | unit stride on `cols`, one row stride over the rest |
/// | `scale` | `[1]`        | `f32`                    |                                                     |
/// | `q`     | `[.., cols]` | `fp8e4m3`, `fp8e4m3fnuz` | as `x`                                              |
///
/// The quotient is rounded to `f32`, clamped to 448 or 240 and rounded to nearest even: infinities saturate, NaN stays NaN. It
/// differs from [`per_tensor_quant_static`] where the product with the reciprocal rounds differently. The scale is read on the device
/// and can be any number. `q` may not alias an input. Returns when the launch is queued. No rows: nothing is launched.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table,
/// [`Empty`](Error::Empty) for zero columns, [`DType`](Error::DType) for `i8`, [`Overlap`](Error::Overlap) if an output shares memory with another tensor,
/// [`TooLarge`](Error::TooLarge) beyond 2^29 - 1 columns or 2^32 - 1 rows, [`DeviceMismatch`](Error::DeviceMismatch), and
/// the errors of loading and launching a kernel. Nothing is written then.
pub fn downcast_to_static_fp8<T: Float, Q: Quantized>(
    stream: &Stream,
    x: TensorView<T>,
    scale: TensorView<f32>,
    q: TensorViewMut<Q>,
) -> Result<()> {
    const OP: &str = "downcast_to_static_fp8";
    if Q::DTYPE == DType::I8 {
        return Err(Error::dtype(OP, "q", Q::DTYPE, "fp8e4m3, fp8e4m3fnuz"));
    }
    launch_static(OP, stream, x, scale, q, true)
}

/// Quantizes a tensor with its own scale: `scale = max |x| / qmax`, `q = round(x * (1 / scale))`.
///
/// | arg     | shape        | dtype                          | layout                                              |
/// |---------|--------------|--------------------------------|-----------------------------------------------------|
/// | `x`     | `[.., cols]` | `bf16`, `f16`, `f32`           | unit stride on `cols`, one row stride over the rest |
/// | `q`     | `[.., cols]` | `i8`, `fp8e4m3`, `fp8e4m3fnuz` | as `x`                                              |
/// | `scale` | `[1]`        | `f32`                          | overwritten                                         |
///
/// `qmax` is 127, 448 or 240. The maximum is over finite elements; a tensor of zeros, or without rows, has the scale 1, and a maximum
/// below 1e-30 counts as 1e-30. The scale is an IEEE quotient, bitwise the largest scale that
/// [`per_token_quant`](crate::per_token_quant) gives a nonzero row; [`per_tensor_quant_static`] with it gives the same `q`. The
/// product is clamped to `qmax` and rounded to nearest even: infinities saturate, NaN becomes NaN or, in `i8`, 0.
///
/// Deterministic: the result does not depend on the order of the blocks. Three launches; `x` is read twice. No output may alias
/// another tensor. Returns when the launches are queued.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table,
/// [`Empty`](Error::Empty) for zero columns, [`Overlap`](Error::Overlap) if an output shares memory with another tensor,
/// [`TooLarge`](Error::TooLarge) beyond 2^29 - 1 columns or 2^32 - 1 rows, [`DeviceMismatch`](Error::DeviceMismatch), and
/// the errors of loading and launching a kernel. Nothing is written then.
pub fn per_tensor_quant_dynamic<T: Float, Q: Quantized>(
    stream: &Stream,
    x: TensorView<T>,
    q: TensorViewMut<Q>,
    mut scale: TensorViewMut<f32>,
) -> Result<()> {
    const OP: &str = "per_tensor_quant_dynamic";
    let (problem, x, mut q) = elementwise(OP, ("x", x), ("q", q))?;
    expect_one(OP, "scale", &scale.alias())?;
    check_overlap(OP, ("x", &x), ("scale", &scale), Aliasing::Disjoint)?;
    check_overlap(OP, ("q", &q), ("scale", &scale), Aliasing::Disjoint)?;

    let clear = stream.kernel(CLEAR)?;
    let spread = Spread::bytes32(T::DTYPE);
    let plan = |kernels| spread.plan(&problem, stream, T::DTYPE, kernels);
    let (mut gather, encode) = (plan(&SCALE)?, plan(&QUANT)?);
    // One atomic maximum per block: no more blocks than are resident.
    let info = stream.device().info();
    gather.config.grid[0] = gather.config.grid[0].min(info.max_blocks(info.wave_size as usize, 16));
    let one = LaunchConfig::grid_1d(1);
    for (kernel, config, batch) in [
        (&clear, one, 1),
        (&gather.kernel, gather.config, gather.batch),
        (&encode.kernel, encode.config, encode.batch),
    ] {
        let mut launch = stream.launch(OP);
        let params = Params {
            x: launch.input("x", &x)?,
            q: launch.output("q", &mut q)?,
            scale: launch.output("scale", &mut scale)?,
            format: Q::FORMAT,
            batch,
            divide: 0,
            dynamic: 1,
            pad: 0,
        };
        // SAFETY: the checks above make every row of x and q `cols` long. The kernels access no more than that and the scale on
        // any grid.
        unsafe { launch.run(kernel, config, &params) }?;
    }
    Ok(())
}
