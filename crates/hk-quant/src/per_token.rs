//! The safe functions of `hip/per_token_quant.hip` and `hip/smoothquant.hip`.

use crate::kernels::quant::TokenScalars;
use crate::kernels::{per_token_quant as token_kernel, smoothquant as smooth_kernel};
use bytemuck::Pod;
use hk_core::plan::rows::{RowPlan, RowProblem, RowVariant, float_index};
use hk_core::quant::Quantized;
use hk_core::{
    Aliasing, DType, Element, Error, Float, KernelRef, Operand, Result, Rows, Stream, TensorView,
    TensorViewMut, bf16, check_overlap, f16,
};

/// Factor types for activations of type `T`: `T` itself and `f32`.
pub trait Smooth<T: Float>: Element {}

impl<T: Float> Smooth<T> for T {}
impl Smooth<bf16> for f32 {}
impl Smooth<f16> for f32 {}

/// The entry points for each dtype of 16 bits.
const VARIANTS: [RowVariant; 10] = variants(8);
/// The entry points for f32.
const VARIANTS_F32: [RowVariant; 10] = variants(16);

const fn variants(lanes_of_128: usize) -> [RowVariant; 10] {
    [
        RowVariant::vectorized(128, lanes_of_128, 2, 8),
        RowVariant::vectorized(512, 16, 1, 8),
        RowVariant::vectorized(2048, 64, 1, 12),
        RowVariant::vectorized(4096, 64, 1, 12),
        RowVariant::vectorized(8192, 256, 1, 12),
        RowVariant::vectorized(32768, 512, 1, 16),
        RowVariant::vectorized(usize::MAX, 256, 1, 16),
        RowVariant::scalar(512, 16),
        RowVariant::scalar(32768, 512),
        RowVariant::scalar(usize::MAX, 256),
    ]
}

/// By dtype, then by variant.
type Kernels<P> = [[KernelRef<P>; 10]; 3];

macro_rules! kernels {
    ($params:ty, $op:literal) => {
        hk_core::row_kernels!(
            $params,
            $op,
            ["bf16", "f16", "f32"],
            [
                "128",
                "512",
                "2048",
                "4096",
                "8192",
                "32768",
                "long",
                "512_scalar",
                "32768_scalar",
                "long_scalar"
            ]
        )
    };
}

static PER_TOKEN: Kernels<token_kernel::Params> = kernels!(token_kernel::Params, "per_token_quant");
static SMOOTH: Kernels<smooth_kernel::Params> = kernels!(smooth_kernel::Params, "smoothquant");

/// An operator's tensors, checked against `x`.
struct Problem {
    op: &'static str,
    rows: RowProblem,
}

impl Problem {
    fn new<T: Float, Q: Quantized>(
        op: &'static str,
        x: &TensorView<T>,
        q: &TensorViewMut<Q>,
        scale: &TensorViewMut<f32>,
    ) -> Result<Self> {
        let Rows { rows, cols, .. } = x.rows(op, "x")?;
        // Vectors are 16 columns: 16 bytes of q.
        let mut problem = RowProblem::new(op, "x", rows, cols, Q::DTYPE)?;
        problem.tensor("x", x)?;
        problem.shaped("q", q, x.shape(), "shape of x")?;
        if scale.shape() != [rows] && scale.shape() != [rows, 1] {
            return Err(Error::shape(op, "scale", scale.shape(), format!("[{rows}] (rows of x)")));
        }
        scale.expect_contiguous(op, "scale")?;
        scale.expect_aligned(op, "scale", 4)?;
        check_overlap(op, ("x", x), ("q", q), Aliasing::Disjoint)?;
        check_overlap(op, ("x", x), ("scale", scale), Aliasing::Disjoint)?;
        check_overlap(op, ("q", q), ("scale", scale), Aliasing::Disjoint)?;
        Ok(Self { op, rows: problem })
    }

    /// Checks that an input shares no memory with the outputs.
    fn disjoint<Q: Quantized>(
        &self,
        arg: &'static str,
        input: &impl Operand,
        q: &TensorViewMut<Q>,
        scale: &TensorViewMut<f32>,
    ) -> Result<()> {
        check_overlap(self.op, (arg, input), ("q", q), Aliasing::Disjoint)?;
        check_overlap(self.op, (arg, input), ("scale", scale), Aliasing::Disjoint)
    }

    fn plan<T: Float, P: Pod>(&self, stream: &Stream, kernels: &Kernels<P>) -> Result<RowPlan<P>> {
        let variants = if T::DTYPE == DType::F32 { &VARIANTS_F32 } else { &VARIANTS };
        self.rows.plan(stream, variants, &kernels[float_index(T::DTYPE)])
    }
}

/// Options of [`per_token_quant`].
#[derive(Debug, Clone, Copy, Default)]
pub struct PerTokenOptions<'a> {
    /// Upper bound of `max |x|`, `[1]`: larger elements saturate. NaN or not positive: no bound. Default: none.
    pub scale_ub: Option<TensorView<'a, f32>>,
}

/// Quantizes each row with its own scale: `scale = max |x| / qmax`, `q = round(x / scale)`.
///
/// | arg                | shape                 | dtype                          | layout                                              |
/// |--------------------|-----------------------|--------------------------------|-----------------------------------------------------|
/// | `x`                | `[.., cols]`          | `bf16`, `f16`, `f32`           | unit stride on `cols`, one row stride over the rest |
/// | `q`                | `[.., cols]`          | `i8`, `fp8e4m3`, `fp8e4m3fnuz` | as `x`                                              |
/// | `scale`            | `[rows]`, `[rows, 1]` | `f32`                          | contiguous                                          |
/// | `options.scale_ub` | `[1]`                 | `f32`                          | optional                                            |
///
/// `qmax` is 127, 448 or 240. The maximum is over finite elements, in `f32`. With `scale_ub` it is at most that value, and larger
/// elements saturate; a `scale_ub` that is NaN or not positive is ignored. A row of zeros has the scale 1; a maximum below 1e-30
/// counts as 1e-30. The scale is an IEEE quotient. `q` is `x * (1 / scale)`, clamped to `qmax` and rounded to nearest even:
/// infinities saturate, NaN becomes NaN or, in `i8`, 0.
///
/// Batch-invariant: the bits of a row depend on that row alone. Accesses are 16 bytes where all rows are 16-byte aligned and `cols`
/// is a multiple of 16. Rows of up to 32768 columns are read once. No output may alias another tensor. Returns when the launch is
/// queued. No rows: nothing is launched.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table,
/// [`Empty`](Error::Empty) for zero columns, [`Overlap`](Error::Overlap) if an output shares memory with another tensor,
/// [`TooLarge`](Error::TooLarge) beyond 2^29 - 1 columns or 2^32 - 1 rows, [`DeviceMismatch`](Error::DeviceMismatch), and
/// the errors of loading and launching a kernel. Nothing is written then.
pub fn per_token_quant<T: Float, Q: Quantized>(
    stream: &Stream,
    x: TensorView<T>,
    mut q: TensorViewMut<Q>,
    mut scale: TensorViewMut<f32>,
    options: PerTokenOptions,
) -> Result<()> {
    const OP: &str = "per_token_quant";
    let PerTokenOptions { scale_ub } = options;
    let problem = Problem::new(OP, &x, &q, &scale)?;
    if let Some(bound) = &scale_ub {
        crate::expect_one(OP, "scale_ub", bound)?;
        problem.disjoint("scale_ub", bound, &q, &scale)?;
    }
    if problem.rows.rows() == 0 {
        return Ok(());
    }
    let plan = problem.plan::<T, _>(stream, &PER_TOKEN)?;
    let mut launch = stream.launch(OP);
    let params = token_kernel::Params {
        x: launch.input("x", &x.flatten_rows(OP, "x")?)?,
        q: launch.output("q", &mut q.reborrow().flatten_rows(OP, "q")?)?,
        scale: launch.output("scale", &mut scale)?,
        scale_ub: launch.optional_input("scale_ub", scale_ub.as_ref())?,
        scalars: TokenScalars { format: Q::FORMAT, batch: plan.batch, smooth_is_f32: 0 },
    };
    // SAFETY: the checks above make every row of x and q `cols` long and scale as long as there are rows. The kernel accesses
    // no more than that on any grid.
    unsafe { launch.run(&plan.kernel, plan.config, &params) }
}

/// SmoothQuant, `z = x * smooth` quantized per row: `scale = max |z| / qmax`, `q = round(z / scale)`.
///
/// | arg      | shape                 | dtype                          | layout                                              |
/// |----------|-----------------------|--------------------------------|-----------------------------------------------------|
/// | `x`      | `[.., cols]`          | `bf16`, `f16`, `f32`           | unit stride on `cols`, one row stride over the rest |
/// | `smooth` | `[cols]`              | as `x`, or `f32`               | contiguous                                          |
/// | `q`      | `[.., cols]`          | `i8`, `fp8e4m3`, `fp8e4m3fnuz` | as `x`                                              |
/// | `scale`  | `[rows]`, `[rows, 1]` | `f32`                          | contiguous                                          |
///
/// `smooth` multiplies: for a division pass reciprocals. `z` is rounded to `f32`. `qmax` is 127, 448 or 240, and the maximum is over
/// finite `z`. A row of zeros has the scale 1; a maximum below 1e-30 counts as 1e-30. The scale is an IEEE quotient. `q` is
/// `z * (1 / scale)`, clamped to `qmax` and rounded to nearest even: infinities saturate, NaN becomes NaN or, in `i8`, 0.
///
/// Batch-invariant. Rows of up to 32768 columns are read once. No output may alias another tensor. Returns when the launch is
/// queued. No rows: nothing is launched.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table,
/// [`Empty`](Error::Empty) for zero columns, [`Overlap`](Error::Overlap) if an output shares memory with another tensor,
/// [`TooLarge`](Error::TooLarge) beyond 2^29 - 1 columns or 2^32 - 1 rows, [`DeviceMismatch`](Error::DeviceMismatch), and
/// the errors of loading and launching a kernel. Nothing is written then.
///
/// Source: Xiao et al. 2023, "SmoothQuant".
pub fn smoothquant<T: Float, W: Smooth<T>, Q: Quantized>(
    stream: &Stream,
    x: TensorView<T>,
    smooth: TensorView<W>,
    mut q: TensorViewMut<Q>,
    mut scale: TensorViewMut<f32>,
) -> Result<()> {
    const OP: &str = "smoothquant";
    let mut problem = Problem::new(OP, &x, &q, &scale)?;
    problem.rows.shaped("smooth", &smooth, &[problem.rows.cols()], "columns of x")?;
    smooth.expect_contiguous(OP, "smooth")?;
    problem.disjoint("smooth", &smooth, &q, &scale)?;
    if problem.rows.rows() == 0 {
        return Ok(());
    }
    let plan = problem.plan::<T, _>(stream, &SMOOTH)?;
    let mut launch = stream.launch(OP);
    let smooth_is_f32 = u32::from(W::DTYPE == DType::F32);
    let params = smooth_kernel::Params {
        x: launch.input("x", &x.flatten_rows(OP, "x")?)?,
        smooth: launch.input("smooth", &smooth)?,
        q: launch.output("q", &mut q.reborrow().flatten_rows(OP, "q")?)?,
        scale: launch.output("scale", &mut scale)?,
        scalars: TokenScalars { format: Q::FORMAT, batch: plan.batch, smooth_is_f32 },
    };
    // SAFETY: the checks above make every row of x and q as long as smooth and scale as long as there are rows. The kernel
    // accesses no more than that on any grid.
    unsafe { launch.run(&plan.kernel, plan.config, &params) }
}
