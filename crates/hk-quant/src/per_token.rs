//! The safe functions of `hip/per_token_quant.hip` and `hip/smoothquant.hip`.

use crate::kernels;
use bytemuck::{Pod, Zeroable};
use hk_core::quant::{CodeFormat, Quantized};
use hk_core::rowwise::{RowPlan, RowProblem, RowVariant};
use hk_core::{
    Aliasing, CodeObjects, DType, Element, Error, Float, GlobalLayout, Operand, Result, Rows, Stream,
    TensorView, TensorViewMut, bf16, check_overlap, f16,
};

/// A type that factors can have beside activations of type `T`: `T` itself and `f32`.
pub trait Smooth<T: Float>: Element {}

impl<T: Float> Smooth<T> for T {}
impl Smooth<bf16> for f32 {}
impl Smooth<f16> for f32 {}

/// `quant::TokenScalars` of `hip/token_rows.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Scalars {
    format: CodeFormat,
    batch: u32,
    smooth_is_f32: u32,
}

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct TokenParams {
    x: GlobalLayout,
    q: GlobalLayout,
    scale: GlobalLayout,
    scale_ub: GlobalLayout,
    scalars: Scalars,
}

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct SmoothParams {
    x: GlobalLayout,
    smooth: GlobalLayout,
    q: GlobalLayout,
    scale: GlobalLayout,
    scalars: Scalars,
}

/// The entry points for each dtype of 16 bits.
const VARIANTS: [RowVariant; 10] = variants(8);
/// The entry points for f32.
const VARIANTS_F32: [RowVariant; 10] = variants(16);

const fn variants(lanes_of_128: usize) -> [RowVariant; 10] {
    [
        RowVariant::vectors(128, lanes_of_128, 2, 8),
        RowVariant::vectors(512, 16, 1, 8),
        RowVariant::vectors(2048, 64, 1, 12),
        RowVariant::vectors(4096, 64, 1, 12),
        RowVariant::vectors(8192, 256, 1, 12),
        RowVariant::vectors(32768, 512, 1, 16),
        RowVariant::vectors(usize::MAX, 256, 1, 16),
        RowVariant::elements(512, 16),
        RowVariant::elements(32768, 512),
        RowVariant::elements(usize::MAX, 256),
    ]
}

macro_rules! names {
    ($op:literal) => {
        hk_core::row_kernels!(
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
                "512_elements",
                "32768_elements",
                "long_elements"
            ]
        )
    };
}

static PER_TOKEN: [[&str; 10]; 3] = names!("per_token_quant");
static SMOOTH: [[&str; 10]; 3] = names!("smoothquant");

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
        // The bytes of q are the ones that 16 columns are a vector of.
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
    fn apart<Q: Quantized>(
        &self,
        arg: &'static str,
        input: &impl Operand,
        q: &TensorViewMut<Q>,
        scale: &TensorViewMut<f32>,
    ) -> Result<()> {
        check_overlap(self.op, (arg, input), ("q", q), Aliasing::Disjoint)?;
        check_overlap(self.op, (arg, input), ("scale", scale), Aliasing::Disjoint)
    }

    fn plan<T: Float>(
        &self,
        stream: &Stream,
        objects: &'static CodeObjects,
        names: &'static [[&'static str; 10]; 3],
    ) -> Result<RowPlan> {
        let variants = if T::DTYPE == DType::F32 { &VARIANTS_F32 } else { &VARIANTS };
        self.rows.plan(stream, objects, variants, &names[hk_core::rowwise::float_index(T::DTYPE)])
    }
}

/// Quantizes each row with a scale of its own: `scale = max |x| / qmax`, `q = round(x / scale)`.
///
/// | arg        | shape               | dtype                         | layout                                                   |
/// |------------|---------------------|-------------------------------|----------------------------------------------------------|
/// | `x`        | `[.., cols]`        | `bf16`, `f16`, `f32`          | unit stride on `cols`, one row stride over the rest      |
/// | `q`        | `[.., cols]`        | `i8`, `fp8e4m3`, `fp8e4m3fnuz` | likewise                                                |
/// | `scale`    | `[rows]`, `[rows, 1]` | `f32`                       | contiguous                                               |
/// | `scale_ub` | `[1]`               | `f32`                         | may be left out                                          |
///
/// `qmax` is 127, 448 or 240. The maximum is over finite elements, in `f32`; with `scale_ub` it counts as at most that
/// number, and larger elements saturate (numbers that are not positive, and NaN, count as left out). A row of zeros has the
/// scale 1; a maximum below 1e-30 counts as 1e-30. The scale is an IEEE quotient, and codes are `x * (1 / scale)` clamped
/// and rounded to nearest even: infinities saturate, NaN becomes NaN or, of `i8`, 0.
///
/// 16 bytes are moved at a time where all rows begin on a multiple of 16 bytes and `cols` is a multiple of 16; the bits of
/// a row depend on that row alone. Rows of up to 32768 columns are read once. Returns when the launch is queued.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table,
/// [`Empty`](Error::Empty) for zero columns, [`Overlap`](Error::Overlap) if an output shares memory with another tensor,
/// [`TooLarge`](Error::TooLarge) beyond 2^29 - 1 columns or 2^32 - 1 rows, [`DeviceMismatch`](Error::DeviceMismatch), and
/// what loading and launching a kernel can answer. Nothing is written then.
pub fn per_token_quant<T: Float, Q: Quantized>(
    stream: &Stream,
    x: TensorView<T>,
    mut q: TensorViewMut<Q>,
    mut scale: TensorViewMut<f32>,
    scale_ub: Option<TensorView<f32>>,
) -> Result<()> {
    const OP: &str = "per_token_quant";
    let problem = Problem::new(OP, &x, &q, &scale)?;
    if let Some(bound) = &scale_ub {
        crate::expect_one(OP, "scale_ub", bound)?;
        problem.apart("scale_ub", bound, &q, &scale)?;
    }
    if problem.rows.rows() == 0 {
        return Ok(());
    }
    let plan = problem.plan::<T>(stream, &kernels::PER_TOKEN_QUANT, &PER_TOKEN)?;
    let mut launch = stream.launch(OP, &plan.kernel);
    let params = TokenParams {
        x: launch.input("x", &x.flatten_rows(OP, "x")?)?,
        q: launch.output("q", &mut q.reborrow().flatten_rows(OP, "q")?)?,
        scale: launch.output("scale", &mut scale)?,
        scale_ub: launch.optional_input("scale_ub", scale_ub.as_ref())?,
        scalars: Scalars { format: Q::FORMAT, batch: plan.batch, smooth_is_f32: 0 },
    };
    // SAFETY: the checks above make every row of x and q `cols` long and scale as long as there are rows, which is what
    // the kernel accesses, whatever the grid; the loader matches the parameters to the kernel.
    unsafe { launch.run(plan.config, &params) }
}

/// SmoothQuant: [`per_token_quant`] of `z = x * smooth`, in `f32`.
///
/// | arg      | shape          | dtype                          | layout                                              |
/// |----------|----------------|--------------------------------|-----------------------------------------------------|
/// | `x`      | `[.., cols]`   | `bf16`, `f16`, `f32`           | unit stride on `cols`, one row stride over the rest |
/// | `smooth` | `[cols]`       | as `x`, or `f32`               | contiguous                                          |
/// | `q`      | `[.., cols]`   | `i8`, `fp8e4m3`, `fp8e4m3fnuz` | as `x`                                              |
/// | `scale`  | `[rows]`, `[rows, 1]` | `f32`                   | contiguous                                          |
///
/// `smooth` multiplies: who wants a division hands over reciprocals. `z` is not rounded but to `f32`.
///
/// # Errors
/// As [`per_token_quant`].
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
    problem.apart("smooth", &smooth, &q, &scale)?;
    if problem.rows.rows() == 0 {
        return Ok(());
    }
    let plan = problem.plan::<T>(stream, &kernels::SMOOTHQUANT, &SMOOTH)?;
    let mut launch = stream.launch(OP, &plan.kernel);
    let smooth_is_f32 = u32::from(W::DTYPE == DType::F32);
    let params = SmoothParams {
        x: launch.input("x", &x.flatten_rows(OP, "x")?)?,
        smooth: launch.input("smooth", &smooth)?,
        q: launch.output("q", &mut q.reborrow().flatten_rows(OP, "q")?)?,
        scale: launch.output("scale", &mut scale)?,
        scalars: Scalars { format: Q::FORMAT, batch: plan.batch, smooth_is_f32 },
    };
    // SAFETY: the checks above make every row of x and q as long as smooth and scale as long as there are rows, which is
    // what the kernel accesses, whatever the grid; the loader matches the parameters to the kernel.
    unsafe { launch.run(plan.config, &params) }
}
