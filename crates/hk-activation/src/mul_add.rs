//! The safe function of `hip/mul_add.hip`.

use crate::kernels::mul_add::{Operand, Params};
use crate::tiles::{KernelTable, Tiles, kernel_table, start_of, start_of_mut};
use hk_core::plan::rows::float_index;
use hk_core::{
    Aliasing, DType, Error, Float, GlobalLayout, Launch, Result, Stream, TensorView, TensorViewMut, bf16,
    check_overlap, f16,
};

const OP: &str = "fused_mul_add";

static KERNELS: KernelTable<Params> = kernel_table!(Params, "mul_add");

/// The same values as `Kind` in `hip/mul_add.hip`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Host = 0,
    Device = 1,
    Tensor = 2,
}

/// The factor or the addend of [`fused_mul_add`]: a number, or a tensor with one element or as many as `x`.
///
/// Made by `into()` from an `f32` or a [`TensorView`].
#[derive(Debug, Clone, Copy)]
pub enum MulAddOperand<'a> {
    /// A number of the host.
    Scalar(f32),
    /// On the device.
    Bf16(TensorView<'a, bf16>),
    /// On the device.
    F16(TensorView<'a, f16>),
    /// On the device.
    F32(TensorView<'a, f32>),
}

macro_rules! from {
    ($($source:ty => $variant:ident),+) => {$(
        impl<'a> From<$source> for MulAddOperand<'a> {
            fn from(operand: $source) -> Self {
                Self::$variant(operand)
            }
        }
    )+};
}
from!(f32 => Scalar, TensorView<'a, bf16> => Bf16, TensorView<'a, f16> => F16, TensorView<'a, f32> => F32);

impl<'a> MulAddOperand<'a> {
    /// Checks it against `x`, which has `numel` elements, and against `y`, and adds it to the tensors of the kernel.
    fn check<O: Float>(
        &self,
        arg: &'static str,
        numel: usize,
        y: &TensorViewMut<O>,
        tiles: &mut Tiles,
    ) -> Result<Operand> {
        match self {
            Self::Scalar(value) => Ok(Operand {
                kind: Kind::Host as u32,
                r#type: float_index(DType::F32) as u32,
                value: *value,
                pad: 0,
            }),
            Self::Bf16(tensor) => check_tensor(arg, tensor, numel, y, tiles),
            Self::F16(tensor) => check_tensor(arg, tensor, numel, y, tiles),
            Self::F32(tensor) => check_tensor(arg, tensor, numel, y, tiles),
        }
    }

    fn layout(self, arg: &'static str, launch: &mut Launch<'a>) -> Result<GlobalLayout> {
        match self {
            Self::Scalar(_) => Ok(GlobalLayout::ABSENT),
            Self::Bf16(tensor) => launch.input(arg, &start_of(OP, arg, tensor)?),
            Self::F16(tensor) => launch.input(arg, &start_of(OP, arg, tensor)?),
            Self::F32(tensor) => launch.input(arg, &start_of(OP, arg, tensor)?),
        }
    }
}

fn check_tensor<E: Float, O: Float>(
    arg: &'static str,
    tensor: &TensorView<E>,
    numel: usize,
    y: &TensorViewMut<O>,
    tiles: &mut Tiles,
) -> Result<Operand> {
    let kind = match tensor.numel() {
        n if n == numel => Kind::Tensor,
        1 => Kind::Device,
        _ => {
            let want = format!("1 element or {numel} (those of x)");
            return Err(Error::shape(OP, arg, tensor.shape(), want));
        }
    };
    tensor.expect_contiguous(OP, arg)?;
    if kind == Kind::Tensor {
        tiles.input(arg, tensor)?;
        check_overlap(OP, (arg, tensor), ("y", y), Aliasing::ExactAliasAllowed)?;
    } else {
        tensor.expect_aligned(OP, arg, size_of::<E>() as u64)?;
        check_overlap(OP, (arg, tensor), ("y", y), Aliasing::Disjoint)?;
    }
    Ok(Operand { kind: kind as u32, r#type: float_index(E::DTYPE) as u32, value: 0.0, pad: 0 })
}

/// `y = a * x + b`, elementwise.
///
/// | arg      | shape                                                 | dtype                             | layout     |
/// |----------|-------------------------------------------------------|-----------------------------------|------------|
/// | `x`      | any                                                   | `bf16`, `f16`, `f32`              | contiguous |
/// | `a`, `b` | a number; or a tensor of 1 element or as many as `x` | `bf16`, `f16`, `f32`, any of them | contiguous |
/// | `y`      | as `x`                                                | `bf16`, `f16`, `f32`, any of them | contiguous |
///
/// `y` may be exactly `x`, or exactly `a` or `b` if that has as many elements ([`TensorViewMut::alias`]); otherwise it shares no
/// memory with an input. One `f32` fused multiply-add, rounded to the type of `y`, to nearest even; infinities and NaN as in
/// IEEE 754. A scalar, a tensor of one element and a filled tensor give bitwise identical results. The vectorized path moves
/// 16 bytes at a time; it needs tensors aligned to 16 bytes.
///
/// Returns when the launch is queued, before it has run. Without elements, nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks
/// the table, [`Overlap`](hk_core::Error::Overlap) if `y` shares memory with another tensor otherwise than stated,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written
/// then.
pub fn fused_mul_add<'a, T: Float, O: Float>(
    stream: &Stream,
    x: TensorView<'a, T>,
    a: impl Into<MulAddOperand<'a>>,
    b: impl Into<MulAddOperand<'a>>,
    y: TensorViewMut<'a, O>,
) -> Result<()> {
    let (a, b) = (a.into(), b.into());
    if y.shape() != x.shape() {
        return Err(Error::shape(OP, "y", y.shape(), format!("{:?} (shape of x)", x.shape())));
    }
    x.expect_contiguous(OP, "x")?;
    y.layout().expect_contiguous(OP, "y")?;
    let mut tiles = Tiles::flat(OP, T::DTYPE, x.numel());
    tiles.input("x", &x)?;
    tiles.output("y", &y)?;
    check_overlap(OP, ("x", &x), ("y", &y), Aliasing::ExactAliasAllowed)?;
    let a_is = a.check("a", x.numel(), &y, &mut tiles)?;
    let b_is = b.check("b", x.numel(), &y, &mut tiles)?;
    if x.numel() == 0 {
        return Ok(());
    }

    let (kernel, shape, config) = tiles.plan(stream, &KERNELS)?;
    let mut y = start_of_mut(OP, "y", y)?;
    let mut launch = stream.launch(OP);
    let params = Params {
        x: launch.input("x", &start_of(OP, "x", x)?)?,
        a: a.layout("a", &mut launch)?,
        b: b.layout("b", &mut launch)?,
        y: launch.output("y", &mut y)?,
        shape,
        a_is,
        b_is,
        y_type: float_index(O::DTYPE) as u32,
        pad: 0,
    };
    // SAFETY: x, y and those of a and b that are tensors have the same number of contiguous elements, which is what the
    // kernel accesses, whatever the grid; the others have one.
    unsafe { launch.run(&kernel, config, &params) }
}
