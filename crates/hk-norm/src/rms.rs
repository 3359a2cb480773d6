//! What `rmsnorm` and `fused_add_rmsnorm` share: options, checks, and the choice of the kernel.

use bytemuck::{Pod, Zeroable};
use hk_core::{
    CodeObjects, DType, Element, Error, Float, Kernel, LaunchConfig, Result, Rows, Stream, TensorView,
    TensorViewMut, bf16, f16,
};
use std::sync::Arc;

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

/// The entry points of one source, in the order of [`VARIANTS`] for each dtype.
pub(crate) struct KernelTable {
    pub objects: &'static CodeObjects,
    pub bf16: [&'static str; VARIANTS.len()],
    pub f16: [&'static str; VARIANTS.len()],
    pub f32: [&'static str; VARIANTS.len()],
}

/// Names of the entry points of an operator, as `RMS_ENTRIES` of `hip/rms_rows.h` makes them.
macro_rules! kernel_table {
    ($objects:expr, $op:literal) => {
        $crate::rms::KernelTable {
            objects: $objects,
            bf16: $crate::rms::kernel_table!(@names $op, "_bf16"),
            f16: $crate::rms::kernel_table!(@names $op, "_f16"),
            f32: $crate::rms::kernel_table!(@names $op, "_f32"),
        }
    };
    (@names $op:literal, $dtype:literal) => {
        [
            concat!($op, $dtype, "_128"),
            concat!($op, $dtype, "_512"),
            concat!($op, $dtype, "_1024"),
            concat!($op, $dtype, "_2048"),
            concat!($op, $dtype, "_4096"),
            concat!($op, $dtype, "_8192"),
            concat!($op, $dtype, "_16384"),
            concat!($op, $dtype, "_long"),
            concat!($op, $dtype, "_512_elements"),
            concat!($op, $dtype, "_4096_elements"),
            concat!($op, $dtype, "_16384_elements"),
            concat!($op, $dtype, "_long_elements"),
        ]
    };
}
pub(crate) use kernel_table;

/// How an entry point spreads rows over lanes.
///
/// The lanes of a row fix the order of its sum. They depend on the length of the row alone: an entry point by elements
/// has the lanes that the ones by vectors have for the same lengths.
pub(crate) struct Variant {
    /// Longest row.
    pub widest: usize,
    /// Lanes that share a row.
    pub lanes: usize,
    /// Rows that a lane has in hand at a time.
    pub rows: usize,
    /// Works on 16 bytes at a time, rather than on elements.
    pub vectors: bool,
    /// Waves that a CU needs for enough bytes in flight to cover the latency of memory: about 32 KiB. More waves only
    /// cost their launch, since each one loops over rows.
    pub waves_per_cu: usize,
}

/// The entry points for each dtype, those by vectors first, each kind from narrow to wide.
pub(crate) const VARIANTS: [Variant; 12] = {
    const fn vectors(widest: usize, lanes: usize, rows: usize, waves_per_cu: usize) -> Variant {
        Variant { widest, lanes, rows, vectors: true, waves_per_cu }
    }
    const fn elements(widest: usize, lanes: usize) -> Variant {
        Variant { widest, lanes, rows: 1, vectors: false, waves_per_cu: 8 }
    }
    [
        vectors(128, 16, 4, 8),
        vectors(512, 16, 1, 8),
        vectors(1024, 64, 1, 16),
        vectors(2048, 64, 1, 8),
        vectors(4096, 64, 1, 12),
        vectors(8192, 256, 1, 8),
        vectors(16384, 256, 1, 8),
        vectors(usize::MAX, 256, 1, 16),
        elements(512, 16),
        elements(4096, 64),
        elements(16384, 256),
        elements(usize::MAX, 256),
    ]
};

/// Bytes of a vector access, `hk::kVecBytes`.
const VECTOR_BYTES: usize = 16;

/// Kernels reach what a block has in hand of a tensor from one base, with offsets below this many bytes.
const WINDOW: usize = 1 << 31;

/// An operator's tensors as rows, checked against `x`: what the choice of a kernel depends on.
pub(crate) struct Problem<'a> {
    op: &'static str,
    shape: &'a [usize],
    rows: usize,
    cols: usize,
    element_bytes: usize,
    /// The largest row stride of the tensors, in elements.
    row_stride: usize,
    /// Each row of each tensor begins on 16 bytes.
    aligned: bool,
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
        if cols == 0 {
            return Err(Error::empty(op, "x", x.shape().len() - 1, x.shape()));
        }
        // A row of f32 weights has to fit a window.
        let limit = (WINDOW - 1) / size_of::<f32>();
        if cols > limit {
            return Err(Error::too_large(op, "x", format!("{cols} columns"), limit as u64));
        }
        let [weights] = weight.dims(op, "weight")?;
        if weights != cols {
            return Err(Error::shape(op, "weight", weight.shape(), format!("[{cols}] (columns of x)")));
        }
        weight.expect_contiguous(op, "weight")?;
        weight.expect_aligned(op, "weight", size_of::<W>() as u64)?;
        if !(options.eps.is_finite() && options.eps >= 0.0) {
            return Err(Error::argument(op, "eps", options.eps, "a finite number that is not negative"));
        }
        let mut problem = Self {
            op,
            shape: x.shape(),
            rows,
            cols,
            element_bytes: size_of::<T>(),
            row_stride: 0,
            aligned: weight.is_aligned(VECTOR_BYTES as u64),
            weight_is_f32: W::DTYPE == DType::F32,
            options,
        };
        problem.like_x("x", x)?;
        Ok(problem)
    }

    /// Checks a tensor of the shape of `x`.
    pub fn like_x(&mut self, arg: &'static str, tensor: &impl RowView) -> Result<()> {
        let (row_stride, aligned) = tensor.check(self.op, arg, self.shape, self.element_bytes)?;
        self.row_stride = self.row_stride.max(row_stride);
        self.aligned &= aligned;
        Ok(())
    }

    /// Checks the optional output of one value per row.
    pub fn per_row(&self, arg: &'static str, tensor: &TensorViewMut<f32>) -> Result<()> {
        if tensor.shape() != [self.rows] {
            let want = format!("[{}] (rows of x)", self.rows);
            return Err(Error::shape(self.op, arg, tensor.shape(), want));
        }
        tensor.expect_contiguous(self.op, arg)
    }

    /// True if there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// The kernel for these tensors, its grid and its scalars.
    pub fn plan(&self, stream: &Stream, table: &KernelTable, dtype: DType) -> Result<Plan> {
        let info = stream.device().info();
        let wave = info.wave_size as usize;
        // A block of `threads` takes this many rows at a time.
        let threads = |v: &Variant| v.lanes.max(wave);
        let batch = |v: &Variant| threads(v) / v.lanes * v.rows;
        let fits_window = |batch: usize| {
            let columns = (batch - 1).checked_mul(self.row_stride).and_then(|n| n.checked_add(self.cols));
            columns.and_then(|n| n.checked_mul(self.element_bytes)).is_some_and(|bytes| bytes < WINDOW)
        };

        let narrowest = |vectors: bool| {
            let mut kind = VARIANTS.iter().enumerate().filter(|(_, v)| v.vectors == vectors);
            kind.find(|(_, v)| self.cols <= v.widest).expect("the last of each kind has no widest row")
        };
        let vectors = narrowest(true);
        let by_vectors = self.aligned
            && (self.cols * self.element_bytes).is_multiple_of(VECTOR_BYTES)
            && fits_window(batch(vectors.1));
        let (index, variant) = if by_vectors { vectors } else { narrowest(false) };
        let batch = if fits_window(batch(variant)) { batch(variant) } else { 1 };

        // No more blocks than keep memory busy, and each with as many rows as the next, as far as that goes.
        let most = (info.compute_units as usize * variant.waves_per_cu).div_ceil(threads(variant) / wave);
        let batches = self.rows.div_ceil(batch);
        let blocks = batches.div_ceil(batches.div_ceil(most.max(1)));

        let symbols = match dtype {
            DType::Bf16 => &table.bf16,
            DType::F16 => &table.f16,
            _ => &table.f32,
        };
        Ok(Plan {
            kernel: stream.kernel(table.objects, symbols[index])?,
            config: LaunchConfig::grid_1d(blocks),
            scalars: Scalars {
                eps: self.options.eps,
                inv_cols: (1.0 / self.cols as f64) as f32,
                weight_offset: match self.options.weight_offset {
                    WeightOffset::Zero => -0.0, // adding 0 would turn a weight of -0 into 0
                    WeightOffset::One => 1.0,
                },
                weight_is_f32: self.weight_is_f32.into(),
                model_sensitive: (self.options.round_mode == RoundMode::ModelSensitive).into(),
                batch: batch as u32,
            },
        })
    }
}

/// A kernel and how to launch it.
pub(crate) struct Plan {
    pub kernel: Arc<Kernel>,
    pub config: LaunchConfig,
    pub scalars: Scalars,
}

/// A view of either kind, as rows.
pub(crate) trait RowView {
    /// Checks the shape, the strides and the alignment; gives the row stride, and whether each row begins on 16 bytes.
    fn check(
        &self,
        op: &'static str,
        arg: &'static str,
        shape: &[usize],
        element_bytes: usize,
    ) -> Result<(usize, bool)>;
}

macro_rules! row_view {
    ($view:ident) => {
        impl<T: Element> RowView for $view<'_, T> {
            fn check(
                &self,
                op: &'static str,
                arg: &'static str,
                shape: &[usize],
                element_bytes: usize,
            ) -> Result<(usize, bool)> {
                if self.shape() != shape {
                    return Err(Error::shape(op, arg, self.shape(), format!("{shape:?} (shape of x)")));
                }
                let row_stride = self.rows(op, arg)?.row_stride;
                self.expect_aligned(op, arg, element_bytes as u64)?;
                Ok((row_stride, self.rows_aligned(VECTOR_BYTES as u64)))
            }
        }
    };
}

row_view!(TensorView);
row_view!(TensorViewMut);
