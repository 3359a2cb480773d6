//! Which kernels serve which operands: a row for each tile.

use crate::kernels::experts::Params;
use hk_core::{Arch, DType, KernelRef};

/// The tile of outputs that a block of an expert GEMM computes: rows by rows of `w`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExpertTile {
    /// 256 x 256 by eight waves, through LDS: a block fills a CU.
    T256x256,
    /// 128 x 256 by eight waves, through LDS: a block fills a CU. Not for weights that are widened as they are loaded.
    T128x256,
    /// 128 x 128 by four waves (mxfp4 by fp8, and what warpgroup instructions multiply: eight), through LDS.
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
    /// For groups of columns of 4- and 8-bit weights.
    Groups4,
    Groups8,
    /// e8m0 for blocks of 32 columns of both operands, and of the weights alone.
    Mx,
    MxWeights,
}

/// The kernel of a tile, and the one that loads the four e8m0 scales of 128 columns as one 32-bit word.
#[derive(Debug)]
pub(crate) struct TileKernel {
    pub tile: ExpertTile,
    pub kernel: KernelRef<Params>,
    pub packed: Option<KernelRef<Params>>,
}

pub(crate) type Kernels = &'static [TileKernel];

/// The kernel for list tiles of `block` rows and `mean` rows of an expert: the largest that fits, but for
///
/// - gfx942, without scales in the main loop: 128 x 128 is faster than 256 x 256, and from some 256 rows on than 128 x 256, by modelled
///   times (`docs/performance.md`);
/// - sm_90 and sm_90a: larger tiles than 128 x 128 spill registers, but for 128 x 256 by warpgroup instructions, where blocks of it fill
///   the device twice, `wide`.
pub(crate) fn choose(
    kernels: Kernels,
    arch: Arch,
    wide: bool,
    block: usize,
    mean: usize,
) -> Option<&'static TileKernel> {
    let has = |tile: ExpertTile| kernels.iter().any(|row| row.tile == tile);
    let (largest, smaller) = (has(ExpertTile::T256x256), has(ExpertTile::T128x128));
    let good = |tile: ExpertTile| match (tile, arch) {
        (ExpertTile::T256x256, _) => arch == Arch::Gfx950,
        (ExpertTile::T128x256, Arch::Gfx942) => !largest || mean <= 256,
        (ExpertTile::T128x256, Arch::Sm90 | Arch::Sm90a) => !smaller || wide && arch == Arch::Sm90a,
        _ => true,
    };
    kernels.iter().find(|row| row.tile.shape().0 <= block && good(row.tile))
}

macro_rules! kernels {
    ($($tile:ident: [$($name:expr),+] $(packed [$($packed:expr),+])?),+ $(,)?) => {
        &[$(TileKernel {
            tile: ExpertTile::$tile,
            kernel: const { Params::kernel(concat!($($name),+)) },
            packed: kernels!(@ $($($packed),+)?),
        }),+]
    };
    (@) => { None };
    (@ $($packed:expr),+) => { Some(const { Params::kernel(concat!($($packed),+)) }) };
}

macro_rules! direct {
    ($name:literal) => {
        kernels!(
            T256x256: ["experts_", $name, "_256x256"],
            T128x256: ["experts_", $name, "_128x256"],
            T128x128: ["experts_", $name, "_128x128"],
            T64x64: ["experts_", $name, "_64x64"],
            T16x32: ["experts_", $name, "_16x32"],
        )
    };
}

macro_rules! dequantized {
    ($name:literal) => {
        kernels!(
            T128x128: ["experts_", $name, "_128x128"],
            T64x64: ["experts_", $name, "_64x64"],
            T16x32: ["experts_", $name, "_16x32"],
        )
    };
}
macro_rules! by_fp4 {
    ($name:literal) => {
        kernels!(
            T128x128: ["experts_", $name, "_wfp4_128x128"],
            T64x64: ["experts_", $name, "_wfp4_64x64"],
            T16x32: ["experts_", $name, "_wfp4_16x32"],
        )
    };
}

/// 16-bit floats by int8, and by groups of 8 and of 4 bits: bf16, then f16.
static BY_I8: [Kernels; 2] = [dequantized!("bf16_wi8"), dequantized!("f16_wi8")];
static BY_U8: [Kernels; 2] = [dequantized!("bf16_wu8"), dequantized!("f16_wu8")];
static BY_U4: [Kernels; 2] = [dequantized!("bf16_wu4"), dequantized!("f16_wu4")];
static BY_FP4: [Kernels; 2] = [by_fp4!("bf16"), by_fp4!("f16")];
static MXFP8_BY_FP4: Kernels = by_fp4!("mxfp8");
static FP8_BY_FP4: Kernels = kernels!(
    T128x128: ["experts_fp8_wfp4_128x128"] packed ["experts_fp8_wfp4_128x128_packed"],
    T64x64: ["experts_fp8_wfp4_64x64"],
    T16x32: ["experts_fp8_wfp4_16x32"],
);
static MXFP8: Kernels = kernels!(
    T128x256: ["experts_mxfp8_128x256"] packed ["experts_mxfp8_128x256_packed"],
    T64x64: ["experts_mxfp8_64x64"],
    T16x32: ["experts_mxfp8_16x32"],
);
static FP4: Kernels = kernels!(
    T128x256: ["experts_fp4_wfp4_128x256"] packed ["experts_fp4_wfp4_128x256_packed"],
    T64x64: ["experts_fp4_wfp4_64x64"],
    T16x32: ["experts_fp4_wfp4_16x32"],
);
static BF16: Kernels = direct!("bf16");
static F16: Kernels = direct!("f16");
static I8: Kernels = direct!("i8");
static FP8: Kernels = direct!("fp8");
static I8_BLOCK: Kernels = kernels!(
    T128x256: ["experts_i8_block_128x256"],
    T64x64: ["experts_i8_block_64x64"],
    T16x32: ["experts_i8_block_16x32"],
);
static FP8_BLOCK: Kernels = kernels!(
    T128x256: ["experts_fp8_block_128x256"],
    T128x128: ["experts_fp8_block_128x128"],
    T64x64: ["experts_fp8_block_64x64"],
    T16x32: ["experts_fp8_block_16x32"],
);

/// The kernels for activations, weights and scales.
pub(crate) fn kernels(a: DType, w: DType, scales: LoopScales) -> Option<Kernels> {
    use DType::{Bf16, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz};
    // f16 comes second.
    let half = usize::from(a == DType::F16);
    Some(match (a, w, scales) {
        (Bf16, Bf16, LoopScales::None) => BF16,
        (DType::F16, DType::F16, LoopScales::None) => F16,
        (DType::I8, DType::I8, LoopScales::None) => I8,
        (Fp8E4M3, Fp8E4M3, LoopScales::None) | (Fp8E4M3Fnuz, Fp8E4M3Fnuz, LoopScales::None) => FP8,
        (DType::I8, DType::I8, LoopScales::Blocks) => I8_BLOCK,
        (Fp8E4M3, Fp8E4M3, LoopScales::Blocks) | (Fp8E4M3Fnuz, Fp8E4M3Fnuz, LoopScales::Blocks) => FP8_BLOCK,
        (Bf16 | DType::F16, DType::I8, LoopScales::None) => BY_I8[half],
        (Bf16 | DType::F16, DType::U8, LoopScales::Groups8) => BY_U8[half],
        (Bf16 | DType::F16, DType::U8, LoopScales::Groups4) => BY_U4[half],
        (Bf16 | DType::F16, Fp4x2, LoopScales::MxWeights) => BY_FP4[half],
        (Fp8E4M3 | Fp8E4M3Fnuz, Fp4x2, LoopScales::MxWeights) => FP8_BY_FP4,
        (Fp8E4M3 | Fp8E4M3Fnuz, Fp4x2, LoopScales::Mx) => MXFP8_BY_FP4,
        (Fp4x2, Fp4x2, LoopScales::Mx) => FP4,
        (Fp8E4M3, Fp8E4M3, LoopScales::Mx) | (Fp8E4M3Fnuz, Fp8E4M3Fnuz, LoopScales::Mx) => MXFP8,
        _ => return None,
    })
}
