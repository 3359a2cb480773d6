//! What the four RMS norms share: options, kernels and their scalars.

use crate::kernels;
use crate::problem::{KernelTable, Problem};
use bytemuck::{Pod, Zeroable};
use hk_core::rowwise::{RowPlan, RowVariant};
use hk_core::{DType, Element, GlobalLayout};

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

/// `rms::Scalars` of `hip/rms_rows.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Scalars {
    eps: f32,
    inv_cols: f32,
    weight_offset: f32,
    weight_is_f32: u32,
    rounding: u32,
    batch: u32,
}

/// `rms::kRoundSum` and `rms::kRoundNormalised` of `hip/rms_rows.h`.
const ROUND_SUM: u32 = 1;
const ROUND_NORMALISED: u32 = 2;

impl Scalars {
    /// `W`: the type of the weights; `round_sum`: the norm is that of a rounded sum.
    pub fn new<W: Element>(
        problem: &Problem,
        plan: &RowPlan,
        options: RmsNormOptions,
        round_sum: bool,
    ) -> Self {
        let normalised = if options.round_mode == RoundMode::ModelSensitive { ROUND_NORMALISED } else { 0 };
        Self {
            eps: options.eps,
            inv_cols: problem.inv_cols(),
            weight_offset: match options.weight_offset {
                WeightOffset::Zero => -0.0, // adding 0 would turn a weight of -0 into 0
                WeightOffset::One => 1.0,
            },
            weight_is_f32: (W::DTYPE == DType::F32).into(),
            rounding: normalised | if round_sum { ROUND_SUM } else { 0 },
            batch: plan.batch,
        }
    }
}

/// `Params` of `hip/rmsnorm.hip`, for `rmsnorm` and `rmsnorm_pad`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Params {
    pub x: GlobalLayout,
    pub weight: GlobalLayout,
    pub y: GlobalLayout,
    pub rstd: GlobalLayout,
    pub scalars: Scalars,
}

/// `Params` of `hip/fused_add_rmsnorm.hip`, for `fused_add_rmsnorm` and `fused_add_rmsnorm_pad`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct FusedAddParams {
    pub x: GlobalLayout,
    pub residual_in: GlobalLayout,
    pub weight: GlobalLayout,
    pub y: GlobalLayout,
    pub residual_out: GlobalLayout,
    pub rstd: GlobalLayout,
    pub scalars: Scalars,
}

/// The entry points of a source, as `RMS_ENTRIES` of `hip/rms_rows.h` makes them.
macro_rules! kernel_table {
    ($objects:expr, $op:literal) => {
        KernelTable {
            objects: $objects,
            variants: [
                RowVariant::vectors(64, 8, 4, 8),
                RowVariant::vectors(128, 16, 4, 8),
                RowVariant::vectors(256, 16, 2, 8),
                RowVariant::vectors(512, 16, 1, 8),
                RowVariant::vectors(1024, 64, 1, 16),
                RowVariant::vectors(1536, 64, 2, 8),
                RowVariant::vectors(2048, 64, 1, 8),
                RowVariant::vectors(3072, 64, 1, 8),
                RowVariant::vectors(4096, 64, 1, 12),
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
            ],
            names: hk_core::row_kernels!(
                $op,
                ["bf16", "f16", "f32"],
                [
                    "64",
                    "128",
                    "256",
                    "512",
                    "1024",
                    "1536",
                    "2048",
                    "3072",
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
            ),
        }
    };
}

pub(crate) static RMSNORM: KernelTable<21> = kernel_table!(&kernels::RMSNORM, "rmsnorm");
pub(crate) static FUSED_ADD_RMSNORM: KernelTable<21> =
    kernel_table!(&kernels::FUSED_ADD_RMSNORM, "fused_add_rmsnorm");
