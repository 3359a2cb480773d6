//! Which kernels serve which operands: a row for each tile.

use crate::kernels::experts::Params;
use hk_core::{DType, KernelRef};

/// The tile of outputs that a block of an expert GEMM computes: rows by rows of `w`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExpertTile {
    /// 256 x 256 by eight waves, through LDS: a block fills a CU.
    T256x256,
    /// 128 x 256 by eight waves, through LDS: a block fills a CU. For block scales and mxfp4.
    T128x256,
    /// 128 x 128 by four waves (mxfp4 by fp8: eight), through LDS: two blocks a CU.
    T128x128,
    /// 64 x 64 by four waves, through LDS: four blocks a CU.
    T64x64,
    /// 16 x 32 by waves that split K among them, from memory to registers: experts of few rows.
    T16x32,
}

impl ExpertTile {
    /// All of them, the largest first.
    pub const ALL: [Self; 5] = [Self::T256x256, Self::T128x256, Self::T128x128, Self::T64x64, Self::T16x32];

    /// Rows of `a`, and rows of `w`.
    pub const fn shape(self) -> (usize, usize) {
        match self {
            Self::T256x256 => (256, 256),
            Self::T128x256 => (128, 256),
            Self::T128x128 => (128, 128),
            Self::T64x64 => (64, 64),
            Self::T16x32 => (16, 32),
        }
    }

    /// What `hk run --param tile=..` calls it.
    #[cfg(feature = "registry")]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::T256x256 => "256x256",
            Self::T128x256 => "128x256",
            Self::T128x128 => "128x128",
            Self::T64x64 => "64x64",
            Self::T16x32 => "16x32",
        }
    }
}

/// Scales that the main loop applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LoopScales {
    /// None: scales of rows are applied to the sums.
    None,
    /// f32 for blocks of both operands.
    Blocks,
}

pub(crate) type Kernels = &'static [(ExpertTile, KernelRef<Params>)];

macro_rules! kernels {
    ($($tile:ident: [$($name:expr),+]),+ $(,)?) => {
        &[$((ExpertTile::$tile, const { Params::kernel(concat!($($name),+)) })),+]
    };
}

macro_rules! direct {
    ($name:literal) => {
        kernels!(
            T256x256: ["experts_", $name, "_256x256"],
            T128x128: ["experts_", $name, "_128x128"],
            T64x64: ["experts_", $name, "_64x64"],
            T16x32: ["experts_", $name, "_16x32"],
        )
    };
}
macro_rules! blocks {
    ($name:literal) => {
        kernels!(
            T128x256: ["experts_", $name, "_block_128x256"],
            T64x64: ["experts_", $name, "_block_64x64"],
            T16x32: ["experts_", $name, "_block_16x32"],
        )
    };
}

static BF16: Kernels = direct!("bf16");
static F16: Kernels = direct!("f16");
static I8: Kernels = direct!("i8");
static FP8: Kernels = direct!("fp8");
static I8_BLOCK: Kernels = blocks!("i8");
static FP8_BLOCK: Kernels = blocks!("fp8");

/// The kernels for activations, weights and scales.
pub(crate) fn kernels(a: DType, w: DType, scales: LoopScales) -> Option<Kernels> {
    use DType::{Bf16, Fp8E4M3, Fp8E4M3Fnuz};
    Some(match (a, w, scales) {
        (Bf16, Bf16, LoopScales::None) => BF16,
        (DType::F16, DType::F16, LoopScales::None) => F16,
        (DType::I8, DType::I8, LoopScales::None) => I8,
        (Fp8E4M3, Fp8E4M3, LoopScales::None) | (Fp8E4M3Fnuz, Fp8E4M3Fnuz, LoopScales::None) => FP8,
        (DType::I8, DType::I8, LoopScales::Blocks) => I8_BLOCK,
        (Fp8E4M3, Fp8E4M3, LoopScales::Blocks) | (Fp8E4M3Fnuz, Fp8E4M3Fnuz, LoopScales::Blocks) => FP8_BLOCK,
        _ => return None,
    })
}
