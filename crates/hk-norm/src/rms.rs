//! What `rmsnorm` and `fused_add_rmsnorm` share: options, checks, and the choice of the kernel.

use bytemuck::{Pod, Zeroable};
use hk_core::rowwise::{RowPlan, RowProblem, RowTensor, RowVariant};
use hk_core::{
    CodeObjects, DType, Element, Error, Float, Result, Rows, Stream, TensorView, TensorViewMut, bf16, f16,
};

/// Options of the RMS norms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsNormOptions {
    /// Added to the mean of the squares, inside the root. Finite and not negative; 1e-6 by default.
    pub eps: f32,
    /// What is added to each weight.
    pub weight_offset: WeightOffset,
    /// Where values are rounded.
    pub round_mode: RoundMode,
}

impl Default for RmsNormOptions {
    fn default() -> Self {
        Self { eps: 1e-6, weight_offset: WeightOffset::Zero, round_mode: RoundMode::F32 }
    }
}

/// What is added to each weight before it multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WeightOffset {
    /// Nothing: weights are stored as they multiply.
    #[default]
    Zero,
    /// One: weights are stored as the distance from one, as Gemma does.
    One,
}

impl WeightOffset {
    /// The number.
    pub const fn value(self) -> f32 {
        match self {
            Self::Zero => 0.0,
            Self::One => 1.0,
        }
    }
}

/// Where an RMS norm rounds to the type of its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RoundMode {
    /// Once, at the end.
    #[default]
    F32,
    /// The normalised value before the weight, and the product again: what T5 and Llama do in Hugging Face's
    /// transformers.
    ModelSensitive,
}

/// A type that weights can have beside activations of type `T`: `T` itself and `f32`.
pub trait Weight<T: Float>: Element {}

impl<T: Float> Weight<T> for T {}
impl Weight<bf16> for f32 {}
impl Weight<f16> for f32 {}

/// `rms::Scalars` of `hip/rms_rows.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Scalars {
    eps: f32,
    inv_cols: f32,
    weight_offset: f32,
    weight_is_f32: u32,
    model_sensitive: u32,
    batch: u32,
}

/// The entry points of one source: for bf16, f16 and f32 in the order of [`VARIANTS`].
pub(crate) struct KernelTable {
    pub objects: &'static CodeObjects,
    pub names: [[&'static str; VARIANTS.len()]; 3],
}

/// Names of the entry points of an operator, as `RMS_ENTRIES` of `hip/rms_rows.h` makes them.
macro_rules! kernel_table {
    ($objects:expr, $op:literal) => {
        $crate::rms::KernelTable {
            objects: $objects,
            names: hk_core::row_kernels!(
                $op,
                ["bf16", "f16", "f32"],
                [
                    "128",
                    "512",
                    "1024",
                    "2048",
                    "4096",
                    "8192",
                    "16384",
                    "long",
                    "512_elements",
                    "4096_elements",
                    "16384_elements",
                    "long_elements"
                ]
            ),
        }
    };
}
pub(crate) use kernel_table;

/// The entry points for each dtype.
pub(crate) const VARIANTS: [RowVariant; 12] = [
    RowVariant::vectors(128, 16, 4, 8),
    RowVariant::vectors(512, 16, 1, 8),
    RowVariant::vectors(1024, 64, 1, 16),
    RowVariant::vectors(2048, 64, 1, 8),
    RowVariant::vectors(4096, 64, 1, 12),
    RowVariant::vectors(8192, 256, 1, 8),
    RowVariant::vectors(16384, 256, 1, 8),
    RowVariant::vectors(usize::MAX, 256, 1, 16),
    RowVariant::elements(512, 16),
    RowVariant::elements(4096, 64),
    RowVariant::elements(16384, 256),
    RowVariant::elements(usize::MAX, 256),
];

/// An operator's tensors, checked against `x`.
pub(crate) struct Problem<'a> {
    op: &'static str,
    shape: &'a [usize],
    rows: RowProblem,
    weight_is_f32: bool,
    options: RmsNormOptions,
}

impl<'a> Problem<'a> {
    /// Checks the options, `x` and `weight`.
    pub fn new<T: Float, W: Weight<T>>(
        op: &'static str,
        x: &'a TensorView<T>,
        weight: &TensorView<W>,
        options: RmsNormOptions,
    ) -> Result<Self> {
        let Rows { rows, cols, .. } = x.rows(op, "x")?;
        let mut rows = RowProblem::new(op, "x", rows, cols, T::DTYPE)?;
        let [weights] = weight.dims(op, "weight")?;
        if weights != cols {
            return Err(Error::shape(op, "weight", weight.shape(), format!("[{cols}] (columns of x)")));
        }
        weight.expect_contiguous(op, "weight")?;
        if !(options.eps.is_finite() && options.eps >= 0.0) {
            return Err(Error::argument(op, "eps", options.eps, "a finite number that is not negative"));
        }
        rows.tensor("weight", weight)?;
        rows.tensor("x", x)?;
        Ok(Self { op, shape: x.shape(), rows, weight_is_f32: W::DTYPE == DType::F32, options })
    }

    /// Checks a tensor of the shape of `x`.
    pub fn like_x(&mut self, arg: &'static str, tensor: &impl RowTensor) -> Result<()> {
        self.rows.shaped(arg, tensor, self.shape, "shape of x")
    }

    /// Checks the optional output of one value per row.
    pub fn per_row(&self, arg: &'static str, tensor: &TensorViewMut<f32>) -> Result<()> {
        let rows = self.rows.rows();
        if tensor.shape() != [rows] {
            return Err(Error::shape(self.op, arg, tensor.shape(), format!("[{rows}] (rows of x)")));
        }
        tensor.expect_contiguous(self.op, arg)
    }

    /// True if there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.rows.rows() == 0
    }

    /// The kernel for these tensors and its scalars.
    pub fn plan(&self, stream: &Stream, table: &KernelTable, dtype: DType) -> Result<(RowPlan, Scalars)> {
        let names = match dtype {
            DType::Bf16 => &table.names[0],
            DType::F16 => &table.names[1],
            _ => &table.names[2],
        };
        let plan = self.rows.plan(stream, table.objects, &VARIANTS, names)?;
        let scalars = Scalars {
            eps: self.options.eps,
            inv_cols: (1.0 / self.rows.cols() as f64) as f32,
            weight_offset: match self.options.weight_offset {
                WeightOffset::Zero => -0.0, // adding 0 would turn a weight of -0 into 0
                WeightOffset::One => 1.0,
            },
            weight_is_f32: self.weight_is_f32.into(),
            model_sensitive: (self.options.round_mode == RoundMode::ModelSensitive).into(),
            batch: plan.batch,
        };
        Ok((plan, scalars))
    }
}
