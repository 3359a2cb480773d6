//! Quantizers fused behind an RMS norm: the safe functions of `hip/fused_rmsnorm_fp8_quant_*.hip` and
//! `hip/fused_rmsnorm_mxfp4_quant_*.hip`, and what they share.

mod fp8;
mod mxfp4;
pub(crate) mod operators;
pub(crate) mod reference;

pub use fp8::{Fp8Scale, fused_rmsnorm_fp8_quant};
pub use mxfp4::fused_rmsnorm_mxfp4_quant;

use crate::Smooth;
use bytemuck::{Pod, Zeroable};
use hk_core::rowwise::{RowPlan, RowProblem, RowTensor, RowVariant};
use hk_core::{
    CodeObjects, DType, Error, Float, GlobalLayout, Launch, NamedOperand, Operand, Result, Stream,
    TensorView, TensorViewMut,
};

/// Rows to be normalised: `y = s * rsqrt(mean(s^2) + eps) * weight`, with `s = x`, or `x + residual_in`, in `f32`.
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
    /// Multiplies the normalised values.
    pub weight: TensorView<'a, W>,
    /// Added to the mean of the squares, inside the root. Finite and not negative.
    pub eps: f32,
    /// `(residual_in, residual_out)`: added to `x`, and the sum rounded once. `residual_out` may be exactly `x` or exactly
    /// `residual_in`.
    pub residual: Option<(TensorView<'a, T>, TensorViewMut<'a, T>)>,
    /// `y` itself, rounded once.
    pub out: Option<TensorViewMut<'a, T>>,
}

/// Further rows, as many as those to be quantized, that are normalised only: DeepSeek's compressed keys beside the queries.
#[derive(Debug)]
pub struct SecondRows<'a, T: Float, W: Smooth<T>> {
    /// The rows, `[rows, cols2]`.
    pub x: TensorView<'a, T>,
    /// Multiplies the normalised values, `[cols2]`.
    pub weight: TensorView<'a, W>,
    /// Added to the mean of the squares.
    pub eps: f32,
    /// The normalised rows, `[rows, cols2]`.
    pub out: TensorViewMut<'a, T>,
}

/// `norm_quant::NormParams` of `hip/norm_rows.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct NormParams {
    x: GlobalLayout,
    residual_in: GlobalLayout,
    weight: GlobalLayout,
    residual_out: GlobalLayout,
    out: GlobalLayout,
    eps: f32,
    inv_cols: f32,
    weight_offset: f32,
    weight_is_f32: u32,
    round_norm: u32,
    batch: u32,
}

/// The entry points for each dtype, as `NORM_QUANT_ENTRIES` of `hip/norm_rows.h` makes them. Lanes are those of hk-norm.
const VARIANTS: [RowVariant; 16] = [
    RowVariant::vectors(64, 8, 1, 8),
    RowVariant::vectors(512, 16, 1, 8),
    RowVariant::vectors(2048, 64, 1, 8),
    RowVariant::vectors(4096, 64, 1, 8),
    RowVariant::vectors(6144, 128, 1, 8),
    RowVariant::vectors(8192, 256, 1, 8),
    RowVariant::vectors(16384, 256, 1, 8),
    RowVariant::vectors(usize::MAX, 256, 1, 16),
    RowVariant::elements(64, 8),
    RowVariant::elements(512, 16),
    RowVariant::elements(2048, 64),
    RowVariant::elements(4096, 64),
    RowVariant::elements(6144, 128),
    RowVariant::elements(8192, 256),
    RowVariant::elements(16384, 256),
    RowVariant::elements(usize::MAX, 256),
];

macro_rules! names {
    ($op:literal) => {
        hk_core::row_kernels!(
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
                "64_elements",
                "512_elements",
                "2048_elements",
                "4096_elements",
                "6144_elements",
                "8192_elements",
                "16384_elements",
                "long_elements"
            ]
        )
    };
}
use names;

/// Arguments have other names for the second rows.
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

    /// The first rows, with their residual and their output.
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

    /// Adds the codes.
    fn codes(&mut self, q: &impl RowTensor, shape: [usize; 2], why: &str) -> Result<()> {
        self.rows.shaped("q", q, &shape, why)
    }

    fn plan<T: Float>(
        &self,
        stream: &Stream,
        objects: [&'static CodeObjects; 3],
        names: &[[&'static str; VARIANTS.len()]; 3],
    ) -> Result<RowPlan> {
        let dtype = hk_core::rowwise::float_index(T::DTYPE);
        self.rows.plan(stream, objects[dtype], &VARIANTS, &names[dtype])
    }

    /// The head of the parameters of a launch.
    #[expect(clippy::too_many_arguments, reason = "the tensors of a norm")]
    fn params<'a, T: Float, W: Smooth<T>>(
        &self,
        launch: &mut Launch<'a>,
        plan: &RowPlan,
        names: &Names,
        x: TensorView<'a, T>,
        weight: &TensorView<'a, W>,
        residual: Option<(TensorView<'a, T>, TensorViewMut<'a, T>)>,
        out: Option<TensorViewMut<'a, T>>,
        round_norm: bool,
    ) -> Result<NormParams> {
        let op = self.op;
        let (residual_in, residual_out) = residual.unzip();
        let residual_in = residual_in.map(|t| t.flatten_rows(op, "residual_in")).transpose()?;
        let mut residual_out = residual_out.map(|t| t.flatten_rows(op, "residual_out")).transpose()?;
        let mut out = out.map(|t| t.flatten_rows(op, names.out)).transpose()?;
        Ok(NormParams {
            x: launch.input(names.x, &x.flatten_rows(op, names.x)?)?,
            residual_in: launch.optional_input("residual_in", residual_in.as_ref())?,
            weight: launch.input(names.weight, weight)?,
            residual_out: launch.optional_output("residual_out", residual_out.as_mut())?,
            out: launch.optional_output(names.out, out.as_mut())?,
            eps: self.eps,
            inv_cols: (1.0 / self.rows.cols() as f64) as f32,
            weight_offset: -0.0, // leaves every weight as it is
            weight_is_f32: self.weight_is_f32.into(),
            round_norm: round_norm.into(),
            batch: plan.batch,
        })
    }
}

/// An output, and which inputs it may exactly be.
type Output<'a> = (NamedOperand<'a>, &'static [&'static str]);

/// Checks that outputs share memory with no other tensor, but for `residual_out`.
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
