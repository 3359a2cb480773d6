//! RMS norms with a quantizing epilogue: what the safe functions of `hip/fused_rmsnorm_fp8_quant_*.hip` and
//! `hip/fused_rmsnorm_mxfp4_quant_*.hip` share.

mod fp8;
mod mxfp4;
#[cfg(feature = "registry")]
pub(crate) mod operators;
#[cfg(feature = "registry")]
pub(crate) mod reference;

pub use fp8::{Fp8Scale, fused_rmsnorm_fp8_quant};
pub use mxfp4::{NormMxfp4Options, fused_rmsnorm_mxfp4_quant};

use crate::Smooth;
use crate::kernels::hk::RmsScalars;
use crate::kernels::norm_quant::NormParams;
use bytemuck::Pod;
use hk_core::plan::rows::{RowPlan, RowProblem, RowTensor, RowVariant, float_index};
use hk_core::{
    DType, Error, Float, KernelRef, Launch, NamedOperand, Operand, Result, Stream, TensorView, TensorViewMut,
};

/// Rows to normalize: `y = s * rsqrt(mean(s^2) + eps) * weight`, with `s = x`, or `x + residual_in`, in `f32`.
///
/// | field                         | shape          | dtype                | layout                |
/// |-------------------------------|----------------|----------------------|-----------------------|
/// | `x`                           | `[rows, cols]` | `bf16`, `f16`, `f32` | unit stride on `cols` |
/// | `weight`                      | `[cols]`       | as `x`, or `f32`     | contiguous            |
/// | `residual_in`, `residual_out` | `[rows, cols]` | as `x`               | unit stride on `cols` |
/// | `out`                         | `[rows, cols]` | as `x`               | unit stride on `cols` |
#[derive(Debug)]
pub struct NormRows<'a, T: Float, W: Smooth<T>> {
    /// The rows.
    pub x: TensorView<'a, T>,
    /// Multiplies the normalized values.
    pub weight: TensorView<'a, W>,
    /// Added to the mean square under the root. Finite, not negative.
    pub eps: f32,
    /// `(residual_in, residual_out)`: added to `x`, and the rounded sum. `residual_out` may alias `x` or `residual_in` exactly.
    pub residual: Option<(TensorView<'a, T>, TensorViewMut<'a, T>)>,
    /// `y` itself, rounded once.
    pub out: Option<TensorViewMut<'a, T>>,
}

/// As many further rows that are normalized and not quantized: DeepSeek's compressed keys beside the queries.
#[derive(Debug)]
pub struct SecondRows<'a, T: Float, W: Smooth<T>> {
    /// The rows, `[rows, cols2]`.
    pub x: TensorView<'a, T>,
    /// Multiplies the normalized values, `[cols2]`.
    pub weight: TensorView<'a, W>,
    /// Added to the mean square under the root. Finite, not negative.
    pub eps: f32,
    /// The normalized rows, `[rows, cols2]`.
    pub out: TensorViewMut<'a, T>,
}

/// Rounding of the norm before it is quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NormRounding {
    /// None: `f32`.
    #[default]
    F32,
    /// To the type of `x`: bitwise identical to storing the norm and quantizing that.
    Input,
}

/// The tensors of one norm.
struct NormTensors<'a, T: Float, W: Smooth<T>> {
    x: TensorView<'a, T>,
    weight: TensorView<'a, W>,
    residual: Option<(TensorView<'a, T>, TensorViewMut<'a, T>)>,
    out: Option<TensorViewMut<'a, T>>,
}

/// The entry points of a dtype, as `NORM_QUANT_ENTRIES` of `hip/norm_rows.h` lists them. Lanes are those of hk-norm.
const VARIANTS: [RowVariant; 16] = [
    RowVariant::vectorized(64, 8, 1, 8),
    RowVariant::vectorized(512, 16, 1, 8),
    RowVariant::vectorized(2048, 64, 1, 8),
    RowVariant::vectorized(4096, 64, 1, 8),
    RowVariant::vectorized(6144, 128, 1, 8),
    RowVariant::vectorized(8192, 256, 1, 8),
    RowVariant::vectorized(16384, 256, 1, 8),
    RowVariant::vectorized(usize::MAX, 256, 1, 16),
    RowVariant::scalar(64, 8),
    RowVariant::scalar(512, 16),
    RowVariant::scalar(2048, 64),
    RowVariant::scalar(4096, 64),
    RowVariant::scalar(6144, 128),
    RowVariant::scalar(8192, 256),
    RowVariant::scalar(16384, 256),
    RowVariant::scalar(usize::MAX, 256),
];

/// By dtype (bf16, f16, f32), then by variant.
type Kernels<P> = [[KernelRef<P>; VARIANTS.len()]; 3];

macro_rules! kernels {
    ($params:ty, $op:literal) => {
        hk_core::row_kernels!(
            $params,
            $op,
            ["bf16", "f16", "f32"],
            [
                "64",
                "512",
                "2048",
                "4096",
                "6144",
                "8192",
                "16384",
                "long",
                "64_scalar",
                "512_scalar",
                "2048_scalar",
                "4096_scalar",
                "6144_scalar",
                "8192_scalar",
                "16384_scalar",
                "long_scalar"
            ]
        )
    };
}
use kernels;

/// Argument names of the first or the second rows.
struct Names {
    x: &'static str,
    weight: &'static str,
    eps: &'static str,
    out: &'static str,
}

const FIRST: Names = Names { x: "x", weight: "weight", eps: "eps", out: "out" };
const SECOND: Names = Names { x: "x2", weight: "weight2", eps: "eps2", out: "out2" };

/// The tensors of one norm, checked.
struct Problem {
    op: &'static str,
    rows: RowProblem,
    eps: f32,
    weight_is_f32: bool,
}

impl Problem {
    fn new<T: Float, W: Smooth<T>>(
        op: &'static str,
        names: &Names,
        x: &TensorView<T>,
        weight: &TensorView<W>,
        eps: f32,
    ) -> Result<Self> {
        let [rows, cols] = x.dims(op, names.x)?;
        let mut rows = RowProblem::new(op, names.x, rows, cols, T::DTYPE)?;
        rows.tensor(names.x, x)?;
        if weight.shape() != [cols] {
            let want = format!("[{cols}] (columns of {})", names.x);
            return Err(Error::shape(op, names.weight, weight.shape(), want));
        }
        weight.expect_contiguous(op, names.weight)?;
        rows.tensor(names.weight, weight)?;
        if !(eps.is_finite() && eps >= 0.0) {
            return Err(Error::argument(op, names.eps, eps, "a finite number that is not negative"));
        }
        Ok(Self { op, rows, eps, weight_is_f32: W::DTYPE == DType::F32 })
    }

    /// The first rows, with residual and output.
    fn first<T: Float, W: Smooth<T>>(op: &'static str, norm: &NormRows<T, W>) -> Result<Self> {
        let mut problem = Self::new(op, &FIRST, &norm.x, &norm.weight, norm.eps)?;
        let shape = norm.x.shape();
        if let Some((residual_in, residual_out)) = &norm.residual {
            problem.rows.shaped("residual_in", residual_in, shape, "shape of x")?;
            problem.rows.shaped("residual_out", residual_out, shape, "shape of x")?;
        }
        if let Some(out) = &norm.out {
            problem.rows.shaped("out", out, shape, "shape of x")?;
        }
        Ok(problem)
    }

    /// The second rows.
    fn second<T: Float, W: Smooth<T>>(
        op: &'static str,
        rows: usize,
        second: &SecondRows<T, W>,
    ) -> Result<Self> {
        let mut problem = Self::new(op, &SECOND, &second.x, &second.weight, second.eps)?;
        let [rows2, cols] = second.x.dims(op, SECOND.x)?;
        if rows2 != rows {
            let want = format!("[{rows}, {cols}] (rows of x)");
            return Err(Error::shape(op, SECOND.x, second.x.shape(), want));
        }
        problem.rows.shaped(SECOND.out, &second.out, second.x.shape(), "shape of x2")?;
        Ok(problem)
    }

    /// Adds the quantized output.
    fn quantized(&mut self, q: &impl RowTensor, shape: [usize; 2], why: &str) -> Result<()> {
        self.rows.shaped("q", q, &shape, why)
    }

    fn plan<T: Float, P: Pod>(&self, stream: &Stream, kernels: &Kernels<P>) -> Result<RowPlan<P>> {
        self.rows.plan(stream, &VARIANTS, &kernels[float_index(T::DTYPE)])
    }

    /// The head of the parameters of a launch.
    fn params<'a, T: Float, W: Smooth<T>>(
        &self,
        launch: &mut Launch<'a>,
        batch: u32,
        names: &Names,
        tensors: NormTensors<'a, T, W>,
        rounding: NormRounding,
    ) -> Result<NormParams> {
        let op = self.op;
        let NormTensors { x, weight, residual, out } = tensors;
        let (residual_in, residual_out) = residual.unzip();
        let residual_in = residual_in.map(|t| t.flatten_rows(op, "residual_in")).transpose()?;
        let mut residual_out = residual_out.map(|t| t.flatten_rows(op, "residual_out")).transpose()?;
        let mut out = out.map(|t| t.flatten_rows(op, names.out)).transpose()?;
        Ok(NormParams {
            x: launch.input(names.x, &x.flatten_rows(op, names.x)?)?,
            residual_in: launch.optional_input("residual_in", residual_in.as_ref())?,
            weight: launch.input(names.weight, &weight)?,
            residual_out: launch.optional_output("residual_out", residual_out.as_mut())?,
            out: launch.optional_output(names.out, out.as_mut())?,
            norm: RmsScalars {
                eps: self.eps,
                inv_cols: (1.0 / self.rows.cols() as f64) as f32,
                weight_offset: -0.0, // adding 0 would turn a weight of -0 into 0
                weight_is_f32: self.weight_is_f32.into(),
            },
            round_norm: (rounding == NormRounding::Input).into(),
            batch,
        })
    }
}

/// An output, and the inputs that it may alias exactly.
type Output<'a> = (NamedOperand<'a>, &'static [&'static str]);

/// Checks that outputs share memory with no other tensor, except `residual_out` with its inputs.
fn check_aliases<T: Float, W: Smooth<T>>(
    op: &'static str,
    norm: &NormRows<T, W>,
    second: Option<&SecondRows<T, W>>,
    inputs: &[NamedOperand],
    outputs: &[NamedOperand],
) -> Result<()> {
    let mut all_inputs: Vec<NamedOperand> = vec![
        ("x", Some(&norm.x)),
        ("residual_in", norm.residual.as_ref().map(|(t, _)| operand(t))),
        ("weight", Some(&norm.weight)),
        ("x2", second.map(|s| operand(&s.x))),
        ("weight2", second.map(|s| operand(&s.weight))),
    ];
    all_inputs.extend(inputs);
    let mut all_outputs: Vec<Output> = vec![
        (("residual_out", norm.residual.as_ref().map(|(_, t)| operand(t))), &["x", "residual_in"]),
        (("out", norm.out.as_ref().map(operand)), &[]),
        (("out2", second.map(|s| operand(&s.out))), &[]),
    ];
    all_outputs.extend(outputs.iter().map(|&named| -> Output { (named, &[]) }));
    hk_core::check_aliases(op, &all_inputs, &all_outputs)
}

fn operand(tensor: &impl Operand) -> &dyn Operand {
    tensor
}
