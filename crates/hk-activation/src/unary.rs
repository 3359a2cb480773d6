//! The safe functions of `hip/unary.hip`.

use crate::kernels::unary::Params;
use crate::tiles::{KernelTable, Tiles, kernel_table, start_of, start_of_mut};
use hk_core::plan::rows::float_index;
use hk_core::{Aliasing, Error, Float, Result, Stream, TensorView, TensorViewMut, bf16, check_overlap, f16};

static KERNELS: KernelTable<Params> = kernel_table!(Params, "unary");

/// A type that the result of an activation of `T` can have: `T` itself and `f32`.
pub trait ActivationOutput<T: Float>: Float {}

impl<T: Float> ActivationOutput<T> for T {}
impl ActivationOutput<bf16> for f32 {}
impl ActivationOutput<f16> for f32 {}

/// The activations, each with its place in `hk::Activation` of `hk/activate.h`.
macro_rules! activations {
    ($($(#[doc = $doc:literal])+ $name:ident: $activation:ident = $value:literal;)+) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Activation {
            $($activation = $value),+
        }

        /// Their names.
        #[cfg(all(test, feature = "registry"))]
        pub(crate) const NAMES: &[&str] = &[$(stringify!($name)),+];

        $(
        $(#[doc = $doc])+
        ///
        /// | arg      | shape | dtype                                | layout                                              |
        /// |----------|-------|--------------------------------------|-----------------------------------------------------|
        /// | `x`      | any   | `bf16`, `f16`, `f32`                 | contiguous, or unit stride on the last axis and one row stride over the rest |
        /// | `y`      | as `x` | as `x`, or `f32`                    | as `x`, its own strides                              |
        ///
        /// `f32` arithmetic, one rounding, to nearest even; NaN gives NaN. `y` may be exactly `x` ([`TensorViewMut::alias`]);
        /// otherwise they share no memory. The vectorized path moves 16 bytes at a time; it needs tensors aligned to 16 bytes
        /// and, unless they are contiguous, rows aligned to 16 bytes and a multiple of 16 bytes long.
        ///
        /// Returns when the launch is queued, before it has run. Without elements, nothing is launched.
        ///
        /// # Errors
        /// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a
        /// tensor breaks the table, [`Overlap`](hk_core::Error::Overlap) if the tensors share memory otherwise than stated,
        /// [`TooLarge`](hk_core::Error::TooLarge) beyond 2^29 - 1 columns or 2^32 - 1 rows of tensors with gaps,
        /// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is
        /// written then.
        pub fn $name<T: Float, O: ActivationOutput<T>>(
            stream: &Stream,
            x: TensorView<T>,
            y: TensorViewMut<O>,
        ) -> Result<()> {
            unary(stringify!($name), Activation::$activation, stream, x, y)
        }
        )+
    };
}

activations! {
    /// `y = x / (1 + exp(-x))`, also called swish. `-inf` gives NaN; results are relatively accurate down to the smallest
    /// normal one.
    silu: Silu = 0;
    /// `y = x * (1 + erf(x / sqrt(2))) / 2`. `-inf` gives NaN; results are relatively accurate down to the smallest normal
    /// one.
    gelu: Gelu = 1;
    /// `y = x * (1 + tanh(u)) / 2` with `u = sqrt(2 / pi) * (x + 0.044715 * x^3)`. `-inf` gives NaN.
    gelu_tanh: GeluTanh = 2;
    /// `y = max(x, 0)`.
    relu: Relu = 3;
    /// `y = tanh(x)`, relatively accurate near 0.
    tanh: Tanh = 4;
}

fn unary<T: Float, O: ActivationOutput<T>>(
    op: &'static str,
    activation: Activation,
    stream: &Stream,
    x: TensorView<T>,
    y: TensorViewMut<O>,
) -> Result<()> {
    if y.shape() != x.shape() {
        return Err(Error::shape(op, "y", y.shape(), format!("{:?} (shape of x)", x.shape())));
    }
    check_overlap(op, ("x", &x), ("y", &y), Aliasing::ExactAliasAllowed)?;
    let flat = x.layout().is_contiguous() && y.layout().is_contiguous();
    if x.numel() == 0 {
        return Ok(());
    }
    let mut tiles = if flat {
        Tiles::flat(op, T::DTYPE, x.numel())
    } else {
        let rows = x.rows(op, "x")?;
        Tiles::rows(op, "x", rows.rows, rows.cols, T::DTYPE)?
    };
    tiles.input("x", &x)?;
    tiles.output("y", &y)?;

    let (kernel, shape, config) = tiles.plan(stream, &KERNELS)?;
    let x = if flat { start_of(op, "x", x)? } else { x.flatten_rows(op, "x")? };
    let mut y = if flat { start_of_mut(op, "y", y)? } else { y.flatten_rows(op, "y")? };
    let mut launch = stream.launch(op);
    let params = Params {
        x: launch.input("x", &x)?,
        y: launch.output("y", &mut y)?,
        shape,
        activation: activation as u32,
        y_type: float_index(O::DTYPE) as u32,
    };
    // SAFETY: x and y have the same shape. The kernel accesses as many rows and columns of them as they have, or as many
    // elements as both have if they are contiguous, whatever the grid.
    unsafe { launch.run(&kernel, config, &params) }
}
