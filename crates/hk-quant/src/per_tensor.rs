//! The safe functions of `hip/per_tensor_quant.hip`.

use crate::launch_tiles::{self, Spread, elementwise};
use crate::{expect_one, kernels};
use bytemuck::{Pod, Zeroable};
use hk_core::quant::{CodeFormat, Quantized};
use hk_core::{
    Aliasing, DType, Error, Float, GlobalLayout, LaunchConfig, Result, Stream, TensorView, TensorViewMut,
    check_overlap,
};

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    x: GlobalLayout,
    q: GlobalLayout,
    scale: GlobalLayout,
    format: CodeFormat,
    batch: u32,
    divide: u32,
    dynamic: u32,
    pad: u32,
}

static SCALE: [[&str; 4]; 3] = launch_tiles::names!("per_tensor_scale");
static QUANT: [[&str; 4]; 3] = launch_tiles::names!("per_tensor_quant");

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
    let plan = spread.plan(&problem, stream, &kernels::PER_TENSOR_QUANT, T::DTYPE, &QUANT)?;
    let mut launch = stream.launch(op, &plan.kernel);
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
    // SAFETY: the checks above make every row of x and q `cols` long, which is what the kernel accesses, whatever the
    // grid; it writes the scale only if that is dynamic. The loader matches the parameters to the kernel.
    unsafe { launch.run(plan.config, &params) }
}

/// Quantizes a tensor with a given scale: `q = round(x * (1 / scale))`.
///
/// | arg     | shape       | dtype                          | layout                                              |
/// |---------|-------------|--------------------------------|-----------------------------------------------------|
/// | `x`     | `[.., cols]` | `bf16`, `f16`, `f32`          | unit stride on `cols`, one row stride over the rest |
/// | `scale` | `[1]`       | `f32`                          |                                                     |
/// | `q`     | `[.., cols]` | `i8`, `fp8e4m3`, `fp8e4m3fnuz` | likewise                                           |
///
/// Codes are clamped to the largest value and rounded to nearest even: infinities saturate, NaN becomes NaN or, of `i8`, 0.
/// The scale lies on the device and can be any number: a negative one changes signs, and 0, infinities and NaN do what
/// IEEE arithmetic makes of them.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table,
/// [`Empty`](Error::Empty) for zero columns, [`Overlap`](Error::Overlap) if `q` shares memory with an input,
/// [`TooLarge`](Error::TooLarge) beyond 2^29 - 1 columns or 2^32 - 1 rows, [`DeviceMismatch`](Error::DeviceMismatch), and
/// what loading and launching a kernel can answer. Nothing is written then.
pub fn per_tensor_quant_static<T: Float, Q: Quantized>(
    stream: &Stream,
    x: TensorView<T>,
    scale: TensorView<f32>,
    q: TensorViewMut<Q>,
) -> Result<()> {
    launch_static("per_tensor_quant_static", stream, x, scale, q, false)
}

/// Quantizes a tensor with a given scale by true division: `q = round(x / scale)`, the quotient rounded to `f32` first.
///
/// Arguments, layout and errors are those of [`per_tensor_quant_static`], whose codes differ where the product with the
/// reciprocal rounds another way.
///
/// # Errors
/// As [`per_tensor_quant_static`].
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

/// Quantizes a tensor with the scale that it needs: `scale = max |x| / qmax`, `q = round(x * (1 / scale))`.
///
/// | arg     | shape       | dtype                          | layout                                              |
/// |---------|-------------|--------------------------------|-----------------------------------------------------|
/// | `x`     | `[.., cols]` | `bf16`, `f16`, `f32`          | unit stride on `cols`, one row stride over the rest |
/// | `q`     | `[.., cols]` | `i8`, `fp8e4m3`, `fp8e4m3fnuz` | likewise                                           |
/// | `scale` | `[1]`       | `f32`                          | written, whatever was in it                         |
///
/// The maximum is over finite elements; a tensor of zeros, or without rows, has the scale 1, and a maximum below 1e-30
/// counts as 1e-30. The scale is the largest of those that [`per_token_quant`](crate::per_token_quant) gives rows that are
/// not zero, to the bit, and [`per_tensor_quant_static`] with it gives the same codes. The result does not depend on the
/// order in which blocks run. Three launches: the tensor is read twice.
///
/// # Errors
/// As [`per_tensor_quant_static`].
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

    let clear = stream.kernel(&kernels::PER_TENSOR_QUANT, "per_tensor_clear")?;
    let spread = Spread::bytes32(T::DTYPE);
    let plan = |names| spread.plan(&problem, stream, &kernels::PER_TENSOR_QUANT, T::DTYPE, names);
    let (mut gather, encode) = (plan(&SCALE)?, plan(&QUANT)?);
    // Each block takes part in one atomic maximum.
    let info = stream.device().info();
    gather.config.grid[0] = gather.config.grid[0].min(info.most_blocks(info.wave_size as usize, 16));
    let one = LaunchConfig::grid_1d(1);
    for (kernel, config, batch) in [
        (&clear, one, 1),
        (&gather.kernel, gather.config, gather.batch),
        (&encode.kernel, encode.config, encode.batch),
    ] {
        let mut launch = stream.launch(OP, kernel);
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
        // SAFETY: the checks above make every row of x and q `cols` long, which is what the kernels access, whatever the
        // grid, beside the scale. The loader matches the parameters to the kernels.
        unsafe { launch.run(config, &params) }?;
    }
    Ok(())
}
