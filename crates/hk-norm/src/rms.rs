//! What the four RMS norms share: options, kernel tables and kernel parameters.

use crate::kernels::hk::RmsScalars;
use crate::kernels::rms::Scalars;
use crate::kernels::{fused_add_rmsnorm, rmsnorm};
use crate::problem::{KernelTable, Problem};
use hk_core::plan::rows::RowVariant;
use hk_core::{DType, Element};

/// Options of the RMS norms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsNormOptions {
    /// Added to the mean square under the root. Finite, not negative. Default: 1e-6.
    pub eps: f32,
    /// Added to each weight. Default: 0.
    pub weight_offset: WeightOffset,
    /// Where values are rounded to the output type. Default: once, at the end.
    pub round_mode: RoundMode,
}

impl Default for RmsNormOptions {
    fn default() -> Self {
        Self { eps: 1e-6, weight_offset: WeightOffset::Zero, round_mode: RoundMode::F32 }
    }
}

/// The constant added to each weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WeightOffset {
    /// 0: weights are stored as is.
    #[default]
    Zero,
    /// 1: weights are stored as `weight - 1`, as in Gemma.
    One,
}

impl WeightOffset {
    /// The constant as a number.
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
    /// Twice: `x * rstd`, then its product with the weight, as T5 and Llama do in Hugging Face Transformers.
    ModelSensitive,
}

/// `rms::kRoundSum` and `rms::kRoundNormalised` of `hip/rms_rows.h`.
const ROUND_SUM: u32 = 1;
const ROUND_NORMALISED: u32 = 2;

impl Scalars {
    /// `W` is the weight type. `round_sum`: the residual sum is rounded before it is normalized.
    pub fn new<W: Element>(problem: &Problem, batch: u32, options: RmsNormOptions, round_sum: bool) -> Self {
        let normalised = if options.round_mode == RoundMode::ModelSensitive { ROUND_NORMALISED } else { 0 };
        Self {
            norm: RmsScalars {
                eps: options.eps,
                inv_cols: problem.inv_cols(),
                weight_offset: match options.weight_offset {
                    WeightOffset::Zero => -0.0, // adding 0 would turn a weight of -0 into 0
                    WeightOffset::One => 1.0,
                },
                weight_is_f32: (W::DTYPE == DType::F32).into(),
            },
            rounding: normalised | if round_sum { ROUND_SUM } else { 0 },
            batch,
        }
    }
}

/// The entry points of a source, in the order of `RMS_ENTRIES` in `hip/rms_rows.h`.
macro_rules! kernel_table {
    ($params:ty, $op:literal) => {
        KernelTable {
            variants: [
                RowVariant::vectorized(64, 8, 4, 8),
                RowVariant::vectorized(128, 16, 4, 8),
                RowVariant::vectorized(256, 16, 2, 8),
                RowVariant::vectorized(512, 16, 1, 8),
                RowVariant::vectorized(1024, 64, 1, 16),
                RowVariant::vectorized(1536, 64, 2, 8),
                RowVariant::vectorized(2048, 64, 1, 8),
                RowVariant::vectorized(3072, 64, 1, 8),
                RowVariant::vectorized(4096, 64, 1, 12),
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
            ],
            kernels: hk_core::row_kernels!(
                $params,
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
                    "64_scalar",
                    "512_scalar",
                    "2048_scalar",
                    "4096_scalar",
                    "6144_scalar",
                    "8192_scalar",
                    "16384_scalar",
                    "long_scalar"
                ]
            ),
        }
    };
}

pub(crate) static RMSNORM: KernelTable<rmsnorm::Params, 21> = kernel_table!(rmsnorm::Params, "rmsnorm");
pub(crate) static FUSED_ADD_RMSNORM: KernelTable<fused_add_rmsnorm::Params, 21> =
    kernel_table!(fused_add_rmsnorm::Params, "fused_add_rmsnorm");
