//! Tile selection: tiles, configurations, and the cost model that picks among those that have kernels.

use super::plan::Meet;
#[cfg(feature = "registry")]
use super::table::MxOrder;
use super::table::{Eligible, Family, Precision, ScaleKind, Variant};
use hk_core::{Arch, DeviceInfo};
use std::ops::RangeInclusive;

/// The tile of outputs that a block computes, and how. On sm_90, tiles of 16 and 32 rows have four waves; those of 256 rows do
/// not fit its registers, and are used only if options ask for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GemmTile {
    /// 256 x 256 by eight waves, through LDS: a block fills a CU.
    T256x256,
    /// 128 x 128 by four waves, through LDS: two blocks a CU, on gfx950 one.
    T128x128,
    /// 64 x 128 by four waves, through LDS: two blocks a CU.
    T64x128,
    /// 64 x 64 by four waves, through LDS: three or four blocks a CU.
    T64x64,
    /// 64 x 64 with scalar loads: any strides, alignment and row length.
    Elements,
    /// 16 x 16 by eight waves (on sm_90 four) that split K among them, from memory to registers: the most blocks for few outputs.
    /// Not for gated GEMMs.
    S16x16,
    /// 16 x 32, likewise.
    S16x32,
    /// 32 x 32, likewise.
    S32x32,
    /// 64 x 32 by four waves, likewise.
    S64x32,
    /// 256 x 128 by eight waves, through LDS: a block fills a CU. For block scales, which need twice the accumulators.
    T256x128,
    /// [`S16x16`](Self::S16x16) by twice as many waves: more loads in flight where an SM of sm_90 has no more than two blocks,
    /// where 16-bit floats use it by default. For plain GEMMs.
    S16x16Twice,
    /// 128 x 256 by eight waves, through LDS: a block fills a CU. The largest of 16-bit floats on sm_90a, whose warpgroup instructions
    /// read fewer bytes of LDS for an output the more columns they have; there a block has 192 or 224 columns if they fill the device
    /// better. On gfx950, and on gfx942 of int8 and fp8 without block scales, it loads fewer bytes for an output than 128 x 128. Elsewhere only if
    /// options ask for it.
    T128x256,
    /// 160 x 256 by four waves, through LDS: a block fills a CU. For mxfp4, on gfx950; elsewhere only if options ask for it.
    T160x256,
    /// 96 x 256, likewise.
    T96x256,
    /// 96 x 128 by four waves, through LDS. For block scales, on AMD targets; elsewhere only if options ask for it.
    T96x128,
}

/// A tile's shape, and what it costs.
struct TileInfo {
    m: usize,
    n: usize,
    gfx942: Cost,
    gfx950: Cost,
    /// On gfx942, of 16-bit floats, and of bytes without block scales.
    halves_gfx942: Cost,
    bytes_gfx942: Cost,
    /// On gfx950, of 16-bit floats, and of mxfp4.
    halves: Cost,
    fp4: Cost,
    nvidia: Cost,
    /// On sm_90a, of types that multiply by warpgroup instructions, and of fp8, which is widened for those of f16.
    warpgroups: Cost,
    widened: Cost,
}

/// What a tile costs on a target.
#[derive(Clone, Copy)]
struct Cost {
    /// Blocks that a CU holds.
    per_cu: usize,
    /// Time for a stage of K, in a CU full of such blocks, relative to outputs: reading and writing LDS, and addresses.
    time: f64,
}

/// Whether tiles through LDS multiply by warpgroup instructions: those of fp8 by instructions of f16.
const fn by_warpgroups(arch: Arch, precision: Precision, scales: ScaleKind) -> bool {
    let plain = matches!(scales, ScaleKind::None);
    let halves = matches!(precision, Precision::Bf16 | Precision::F16);
    matches!(arch, Arch::Sm90a) && (halves || plain && matches!(precision, Precision::I8 | Precision::Fp8))
}

impl TileInfo {
    const fn on(&self, arch: Arch, precision: Precision, scales: ScaleKind) -> Cost {
        match (arch, precision) {
            (_, Precision::Fp8) if by_warpgroups(arch, precision, scales) => self.widened,
            _ if by_warpgroups(arch, precision, scales) => self.warpgroups,
            (Arch::Sm90 | Arch::Sm90a, _) => self.nvidia,
            (Arch::Gfx950, Precision::Bf16 | Precision::F16) => self.halves,
            (Arch::Gfx950, Precision::Fp4) => self.fp4,
            (Arch::Gfx950, _) => self.gfx950,
            (_, Precision::Bf16 | Precision::F16) => self.halves_gfx942,
            (_, Precision::I8 | Precision::Fp8) if matches!(scales, ScaleKind::None) => self.bytes_gfx942,
            _ => self.gfx942,
        }
    }
}

/// Rates of the cost model: clocks and throughput as published for MI308X and the largest part of each AMD target, bandwidths and launches as
/// modelled (docs/timing.md); of sm_90 measured on an H200, but for the memory latency and the cost of a launch, which are assumed; of
/// sm_90a measured on an H100.
struct Rates {
    /// Nanoseconds that a CU's matrix units take for a stage of K of an output.
    stage: f64,
    /// Nanoseconds for a byte in a CU's share of the memory's bandwidth, and from L2.
    byte: f64,
    /// How much more than its share of the bandwidth a CU can use while others have nothing to read.
    alone: f64,
    near: f64,
    /// Nanoseconds for a byte that a CU loads from L2. On AMD targets L1's lines in flight are the limit, for tiles in registers too.
    fill: f64,
    /// How much longer [`GemmTile::S64x32`] takes for it.
    tall: f64,
    /// Stages that would take as long as the first loads and the last stores of a block: of tiles through LDS, and of skinny ones.
    ends: [f64; 2],
    /// The shortest stage of a tile through LDS.
    least: f64,
    /// What split-K adds to its traffic, and how many times as much where no block can sum a tile's slices, and another launch does.
    launch: f64,
    second: f64,
}

impl Rates {
    /// 256 CUs, 2.2 GHz; of 8 TB/s 6.5 are reached.
    const GFX950: Self = Self {
        stage: 1.0 / (64.0 * 2.2),
        byte: 256.0 / 6500.0,
        alone: 1.7,
        near: 1.0 / (64.0 * 2.2),
        fill: 1.0 / 52.0,
        tall: 0.95,
        ends: [26.0, 40.0],
        least: 0.0,
        launch: 5000.0,
        second: 1.0,
    };

    const fn of(info: &DeviceInfo, precision: Precision) -> Self {
        match (info.arch, info.compute_units) {
            // These are set, as are the costs of tiles, for the choice to agree with hk-time at 111 shapes of bf16 and 75 of mxfp4, with pre-shuffled
            // scales: AITER's, and weights of Llama-3 8B and Qwen3. They are no rates by themselves: 9.35 TB/s is above the part's.
            (Arch::Gfx950, _) if matches!(precision, Precision::Bf16 | Precision::F16) => Self {
                byte: 256.0 / 9350.0,
                fill: 1.0 / 47.25,
                tall: 1.18,
                ends: [40.0, 48.5],
                launch: 3070.0,
                second: 3.8,
                ..Self::GFX950
            },
            (Arch::Gfx950, _) if matches!(precision, Precision::Fp4) => Self {
                byte: 256.0 / 4420.0,
                fill: 1.0 / 57.5,
                tall: 1.08,
                launch: 4690.0,
                second: 2.0,
                ..Self::GFX950
            },
            (Arch::Gfx950, _) => Self::GFX950,
            // 132 SMs. Of 790 TFLOP/s of bf16, mma.sync makes 0.65. Memory is copied at 4.2 TB/s; tiles of 128 x 128 read 6.7 TB/s
            // from L2, so that it has some more. Loads take some 800 ns, those of four stages overlap.
            (Arch::Sm90, _) => Self {
                stage: 64.0 / (0.65 * 790e3 / 132.0),
                byte: 132.0 / 4200.0,
                alone: 1.5,
                near: 132.0 / 7200.0,
                fill: 132.0 / 7200.0,
                tall: 1.0,
                ends: [0.0; 2],
                least: 800.0 / 4.0,
                launch: 2000.0,
                second: 1.0,
            },
            // Memory is copied at 3 TB/s. Two launches in turn, and the sum of slices, take 8 us.
            (Arch::Sm90a, _) => Self {
                stage: 64.0 / (0.65 * 790e3 / 132.0),
                byte: 132.0 / 3000.0,
                alone: 1.5,
                near: 132.0 / 10000.0,
                fill: 132.0 / 10000.0,
                tall: 1.0,
                ends: [0.0; 2],
                least: 180.0,
                launch: 8000.0,
                second: 1.0,
            },
            // MI308X: 1.37 GHz. The others are set for the choice to agree with hk-time at 94 shapes: Llama-3 8B's weights, and AITER's.
            (_, 80) => Self {
                stage: 1.0 / (32.0 * 1.37),
                byte: 80.0 / 3310.0,
                alone: 1.7,
                near: 1.0 / (64.0 * 1.37),
                fill: 1.0 / 39.0,
                tall: 1.34,
                ends: [2.0, 10.0],
                least: 0.0,
                launch: 5160.0,
                second: 1.0,
            },
            // 304 CUs, 2.1 GHz. The others likewise, at 85 shapes.
            _ => Self {
                stage: 1.0 / (32.0 * 2.1),
                byte: 304.0 / 5470.0,
                alone: 1.7,
                near: 1.0 / (64.0 * 2.1),
                fill: 1.0 / 52.0,
                tall: 1.31,
                ends: [0.0, 12.0],
                least: 0.0,
                launch: 3000.0,
                second: 1.0,
            },
        }
    }
}

/// Split-K slices to choose from.
const SPLITS: [usize; 10] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32];

/// Outputs of a tile whose slices a block can sum, at most: `kMostSummed` in `hip/include/gemm/split_k.h`.
const SUMMED: usize = 128 * 128;

/// Bytes of a row that a stage holds where it is not a line: `Tile::kBytes`.
pub(crate) const STAGE_BYTES: usize = 64;

impl GemmTile {
    /// All of them.
    pub const ALL: [Self; 15] = [
        Self::T256x256,
        Self::T128x128,
        Self::T64x128,
        Self::T64x64,
        Self::Elements,
        Self::S16x16,
        Self::S16x32,
        Self::S32x32,
        Self::S64x32,
        Self::T256x128,
        Self::S16x16Twice,
        Self::T128x256,
        Self::T160x256,
        Self::T96x256,
        Self::T96x128,
    ];

    /// On AMD targets, costs are the longer of the CU's pipes for matrices and LDS, counted on the emulator. On sm_90, blocks
    /// are those that registers have room for; of tiles through LDS, 128 x 128 was measured on an H200 (426 TFLOP/s of 4096^3),
    /// 64 x 64 is assumed, and the larger ones spill registers, so that they are never chosen.
    const fn info(self) -> TileInfo {
        const fn cost((per_cu, time): (usize, f64)) -> Cost {
            Cost { per_cu, time }
        }
        const fn of([m, n]: [usize; 2], amd: (usize, f64), nvidia: (usize, f64)) -> TileInfo {
            let (nvidia, warpgroups, widened) = (cost(nvidia), cost(nvidia), cost(nvidia));
            let (gfx942, gfx950, fp4) = (cost(amd), cost(amd), cost(amd));
            let (halves, halves_gfx942, bytes_gfx942) = (cost(amd), cost(amd), cost(amd));
            TileInfo {
                m,
                n,
                gfx942,
                gfx950,
                halves_gfx942,
                bytes_gfx942,
                halves,
                fp4,
                nvidia,
                warpgroups,
                widened,
            }
        }
        const fn of_fp4(fp4: (usize, f64), info: TileInfo) -> TileInfo {
            TileInfo { fp4: cost(fp4), ..info }
        }
        const fn of_halves(halves: (usize, f64), info: TileInfo) -> TileInfo {
            TileInfo { halves: cost(halves), ..info }
        }
        const fn on_gfx942(info: TileInfo, gfx942: (usize, f64)) -> TileInfo {
            let gfx942 = cost(gfx942);
            TileInfo { gfx942, halves_gfx942: gfx942, bytes_gfx942: gfx942, ..info }
        }
        const fn of_bytes_on_gfx942(bytes_gfx942: (usize, f64), info: TileInfo) -> TileInfo {
            TileInfo { bytes_gfx942: cost(bytes_gfx942), ..info }
        }
        const fn of_halves_on_gfx942(halves_gfx942: (usize, f64), info: TileInfo) -> TileInfo {
            TileInfo { halves_gfx942: cost(halves_gfx942), ..info }
        }
        const fn with(warpgroups: (usize, f64), info: TileInfo) -> TileInfo {
            TileInfo { warpgroups: cost(warpgroups), ..info }
        }
        // On an H200, by the shapes of docs/performance.md.
        const fn wide(widened: (usize, f64), info: TileInfo) -> TileInfo {
            TileInfo { widened: cost(widened), ..info }
        }
        match self {
            // Alone on a CU: nothing runs beside its barriers. 16-bit floats on gfx950 read halves of stages ahead.
            Self::T256x256 => {
                let info = of_halves((1, 0.6), of([256, 256], (1, 1.5), (1, 4.0)));
                of_fp4((1, 1.5), of_bytes_on_gfx942((1, 1.1), info))
            }
            Self::T160x256 => of([160, 256], (1, 0.8), (1, 4.0)),
            Self::T96x256 => of([96, 256], (1, 0.62), (1, 4.0)),
            Self::T96x128 => on_gfx942(of([96, 128], (2, 1.1), (2, 1.2)), (2, 1.1)),
            Self::T128x256 => {
                wide((1, 1.9), of_halves((1, 0.3), with((1, 0.75), of([128, 256], (1, 1.1), (1, 4.0)))))
            }
            // Its ring of three stages leaves no room for a second block on gfx950.
            Self::T128x128 => {
                let info = on_gfx942(with((1, 0.95), of([128, 128], (2, 1.0), (2, 1.1))), (2, 0.97));
                let info = of_bytes_on_gfx942((2, 0.85), info);
                wide((1, 2.3), of_fp4((1, 0.93), of_halves((1, 0.31), info)))
            }
            Self::T64x128 => {
                let info = of_halves((2, 0.5), of([64, 128], (2, 1.2), (2, 1.2)));
                wide((2, 2.9), of_fp4((2, 0.7), on_gfx942(info, (2, 1.38))))
            }
            Self::T64x64 => {
                let info = of_halves((3, 1.16), with((2, 1.2), of([64, 64], (3, 1.6), (4, 1.3))));
                wide((2, 3.9), of_halves_on_gfx942((3, 2.1), info))
            }
            Self::Elements => of([64, 64], (4, 16.0), (4, 16.0)),
            Self::S16x16 => of([16, 16], (3, 1.0), (5, 1.0)),
            Self::S16x16Twice => of([16, 16], (1, 1.0), (2, 1.0)),
            Self::S16x32 => of([16, 32], (2, 1.0), (3, 1.0)),
            Self::S32x32 => of([32, 32], (2, 1.0), (4, 1.0)),
            Self::S64x32 => of([64, 32], (3, 1.0), (2, 1.0)),
            // On gfx942 its waves store to LDS between MFMAs.
            Self::T256x128 => of_fp4((1, 1.5), on_gfx942(of([256, 128], (1, 1.1), (1, 4.0)), (1, 1.5))),
        }
    }

    /// What `hk run --param tile=..` calls it.
    #[cfg(feature = "registry")]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::T256x256 => "256x256",
            Self::T256x128 => "256x128",
            Self::T128x128 => "128x128",
            Self::T128x256 => "128x256",
            Self::T160x256 => "160x256",
            Self::T96x256 => "96x256",
            Self::T96x128 => "96x128",
            Self::T64x128 => "64x128",
            Self::T64x64 => "64x64",
            Self::Elements => "elements",
            Self::S16x16 => "16x16",
            Self::S16x16Twice => "16x16-twice",
            Self::S16x32 => "16x32",
            Self::S32x32 => "32x32",
            Self::S64x32 => "64x32",
        }
    }

    /// Rows and columns of outputs that a block makes.
    pub const fn shape(self) -> (usize, usize) {
        let info = self.info();
        (info.m, info.n)
    }

    /// Columns of a block, of `slices` outputs of `m x n`: those of the tile, or the fewer that fill the device better. Gated GEMMs have
    /// those of the tile.
    pub(crate) fn width(self, info: &DeviceInfo, precision: Precision, [slices, m, n]: [usize; 3]) -> usize {
        // A prologue and an epilogue take as long as so many columns.
        const OVERHEAD: usize = 48;
        let (tile_m, most) = self.shape();
        let halves = matches!(precision, Precision::Bf16 | Precision::F16);
        if self != Self::T128x256 || info.arch != Arch::Sm90a || !halves {
            return most;
        }
        let rounds = |width| {
            let tiles = m.div_ceil(tile_m).saturating_mul(n.div_ceil(width)).saturating_mul(slices);
            tiles.div_ceil((info.compute_units as usize).max(1))
        };
        // `wide_tile_gemm` in `hip/include/gemm/warpgroup.h`.
        let widths = [most, 224, 192];
        widths.into_iter().min_by_key(|&width| rounds(width).saturating_mul(width + OVERHEAD)).unwrap_or(most)
    }

    /// The room in a workspace with which the slices of batches, M and columns of w meet in the last block of a tile to arrive; `None` where
    /// a second launch is faster: it sums with all CUs what that block loads by itself.
    pub(crate) fn meet(self, info: &DeviceInfo, sizes: [usize; 3], splits: usize) -> Option<Meet> {
        /// Bytes that the last block loads, at most, by hk-time.
        const MOST: usize = 96 << 10;
        let (m, n) = self.shape();
        let served = info.arch.is_amd() && splits > 1 && m * n <= SUMMED;
        if served && self.summed_bytes(sizes[1], splits) <= MOST {
            Meet::new(sizes, [m, n], splits)
        } else {
            None
        }
    }

    /// Bytes of other slices' partial sums that the last block of a tile loads.
    fn summed_bytes(self, rows: usize, splits: usize) -> usize {
        let (m, n) = self.shape();
        let rows = rows.checked_next_multiple_of(16).map_or(m, |rows| rows.min(m));
        splits.saturating_sub(1).saturating_mul(rows * n * size_of::<f32>())
    }

    /// Waves of a block.
    pub(crate) const fn waves(self, arch: Arch) -> usize {
        match self {
            Self::T256x256 | Self::T256x128 | Self::T128x256 => 8,
            // `kWideDecodeWaves` and `kDecodeWaves` in `hip/include/gemm/decode_gemm.h`.
            Self::S16x16Twice if arch.is_amd() => 16,
            Self::S16x16Twice => 8,
            Self::S16x16 | Self::S16x32 | Self::S32x32 if arch.is_amd() => 8,
            _ => 4,
        }
    }

    /// Bytes of a row that a block reads at a time.
    pub(crate) const fn stretch(self, arch: Arch) -> usize {
        // Of a wave: `kLongStepBytes` in `hip/include/gemm/decode_gemm.h`.
        let longest = if arch.is_amd() { 256 } else { 128 };
        match self {
            Self::S16x16 | Self::S16x32 => self.waves(arch) * longest,
            Self::S16x16Twice => self.waves(arch) * 128,
            Self::S32x32 | Self::S64x32 => self.waves(arch) * longest / 2,
            // `kLineBytes` in `hip/include/gemm/args.h`: a slice that began within a line would fill it twice.
            _ if arch.is_amd() && !matches!(self, Self::Elements) => 2 * STAGE_BYTES,
            _ => STAGE_BYTES,
        }
    }

    /// The pipeline of a block of `width` columns.
    #[cfg(feature = "registry")]
    pub(crate) const fn pipeline(
        self,
        arch: Arch,
        precision: Precision,
        (scales, order): (ScaleKind, MxOrder),
        width: usize,
    ) -> Pipeline {
        /// Of 128 bytes of a row: a line of L1, or what warpgroup instructions read.
        const LINE: usize = 2 * STAGE_BYTES;
        if self.skinny() {
            return Pipeline { step: self.stretch(arch), stages: 2 };
        }
        let rows = self.shape().0;
        let scalar = matches!(self, Self::Elements);
        // `kWarpgroupStages` in `hip/include/gemm/warpgroup.h`: as many as fit LDS, of which each block has 1 KiB to itself.
        if by_warpgroups(arch, precision, scales)
            && matches!(self, Self::T128x256 | Self::T128x128 | Self::T64x128 | Self::T64x64)
        {
            if matches!(precision, Precision::Fp8) {
                // `WideningPipeline` in `hk/widened.h`.
                return Pipeline { step: LINE, stages: 2 };
            }
            const RESERVED: usize = 1024;
            let blocks = if rows == 64 { 2 } else { 1 };
            let free = (arch.lds_bytes() as usize + RESERVED) / blocks - RESERVED;
            return Pipeline { step: LINE, stages: free / ((rows + width) * LINE) };
        }
        let dequantized = matches!(precision, Precision::HalfByByte | Precision::HalfByFp4);
        let bytewise = matches!((scales, order), (ScaleKind::Mx, MxOrder::Any));
        let wide = matches!(precision, Precision::Fp8ByFp4);
        // Loads go straight to LDS: `kDirectToLds` of its movers.
        let direct = !matches!(arch, Arch::Gfx942) && !scalar && !dequantized && !bytewise;
        // `kLines` of the tiles in `hip/include/gemm/gemm.h` and `hip/include/gemm/operands`.
        let mx_fp8 = matches!((precision, scales), (Precision::Fp8, ScaleKind::Mx));
        let short = matches!(scales, ScaleKind::ShortBlock);
        let lines = arch.is_amd() && !scalar && !dequantized && !wide && !short && (!mx_fp8 || direct);
        if lines {
            // `LinesOf` in `hip/include/gemm/line_pipeline.h`; through registers one is in LDS and one in flight. Of two with room for a third
            // of rows alone (256 x 256) a has three. Scales of mxfp4 have LDS, too.
            let of_row = if matches!(precision, Precision::Fp4) { LINE + 8 } else { LINE };
            let (stage, lds) = ((rows + width) * of_row, arch.lds_bytes() as usize);
            // `kFills` in `hip/include/gemm/operands/mxfp4.h`: beside a stage of lines there would be no room for scales.
            let short = matches!((self, arch, precision), (Self::T256x256, Arch::Gfx942, Precision::Fp4));
            return Pipeline {
                step: if short { STAGE_BYTES } else { LINE },
                stages: match direct {
                    true if rows + width > 128 && 4 * stage <= lds => 4,
                    true if 3 * stage <= lds => 3,
                    _ => 2,
                },
            };
        }
        // An MFMA of fp8 on gfx950 spans two stages: `kStep` in `hip/include/gemm/gemm.h`.
        let pairs = matches!((arch, precision), (Arch::Gfx950, Precision::Fp8)) && !short;
        // Five in `hk::DirectPipeline`; in `hk::RegisterPipeline` two in LDS, two in registers or in flight.
        Pipeline { step: if wide || pairs { LINE } else { STAGE_BYTES }, stages: if direct { 5 } else { 4 } }
    }

    /// The tile of the second GEMM of a launch, of 16-bit floats: it has as many threads.
    pub(crate) const fn beside(self) -> Self {
        match self {
            Self::T256x128 => Self::T256x256,
            other => other,
        }
    }

    /// M for which a tile is considered. On gfx950 several skinny tiles along M fill the device.
    fn rows_served(self, arch: Arch) -> RangeInclusive<usize> {
        match (self, arch) {
            (Self::S16x32, Arch::Gfx950) => 0..=32,
            (Self::S32x32, Arch::Gfx950) => 0..=64,
            (Self::S64x32, Arch::Gfx950) => 0..=256,
            _ if self.skinny() => 0..=self.info().m,
            _ => 0..=usize::MAX,
        }
    }

    /// Consecutive tiles along M that share a tile of weights in L2: those of 2,048 rows.
    const fn group(self) -> usize {
        2048 / self.info().m
    }

    /// Whether waves split K among them and load from memory to registers: a skinny tile.
    pub(crate) const fn skinny(self) -> bool {
        matches!(self, Self::S16x16 | Self::S16x16Twice | Self::S16x32 | Self::S32x32 | Self::S64x32)
    }
}

/// How a block walks along K.
#[cfg(feature = "registry")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pipeline {
    /// Bytes of a row of the activations in a step.
    pub step: usize,
    /// Pipeline depth: steps in LDS, in registers or in flight.
    pub stages: usize,
}

/// Tile, split-K and rasterization of a GEMM.
///
/// By default it follows from the sizes and the device. Up to 64 rows, the tile is the one with the fewest rows that hold them
/// all, or from 17 rows on one through LDS (on sm_90, up to 16 rows the narrowest, with twice the waves where blocks are few; on gfx942
/// 64 x 32 from 17 rows on, one through LDS from 33). On gfx950 it is any of them, and up to 256 rows several skinny tiles along M may
/// share the weights; on gfx942, too, and for any rows, where each CU has one of them at most. On both, where memory is slower than what CUs load, it is 64 x 128 over whole K if that gives more than half of the
/// CUs a block and none two; on gfx942 from 9 rows on.
/// Otherwise, and among several, it is the one with the shortest modelled time: the longest of matrix instructions, loads of a CU
/// and memory, plus what split-K adds, a launch and the traffic of partial sums, the launch also where the last block of a tile sums
/// them. K is split into the fewest slices within a tenth of the shortest time. Without a workspace it is not split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GemmConfig {
    /// The tile.
    pub tile: GemmTile,
    /// Split-K slices, each computed by blocks of its own and then summed in order; at least 1.
    pub splits: usize,
    /// Consecutive tiles along M, which share a tile of weights in L2.
    pub group: usize,
}

/// A GEMM whose configuration is to be chosen.
pub(crate) struct Job<'a> {
    pub info: &'a DeviceInfo,
    pub precision: Precision,
    pub scales: ScaleKind,
    /// Batches, M, rows of `w`, K.
    pub sizes: [usize; 4],
    /// Rows begin on 16 bytes and are a multiple of 16 bytes long.
    pub vectorized: bool,
    /// Split-K slices that the workspace has room for.
    pub most_splits: usize,
    /// Another GEMM in the same launch.
    pub second: Option<Second>,
}

/// A GEMM in the launch of another, with the same M and K.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Second {
    pub precision: Precision,
    /// Rows of its `w`.
    pub n: usize,
}

/// Time for rounds of blocks of some kinds.
#[derive(Debug, Default)]
struct Rounds {
    mean: f64,
    longest: f64,
}

impl Rounds {
    /// A share of the blocks takes so long each.
    fn add(&mut self, share: f64, time: f64) {
        self.mean += share * time;
        if share > 0.0 {
            self.longest = self.longest.max(time);
        }
    }

    /// The last round may be of the longest blocks.
    fn time(&self, rounds: f64) -> f64 {
        (rounds - 1.0) * self.mean + self.longest
    }
}

/// A GEMM by bulk tensor copies: `hip/include/gemm/bulk.h`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bulk {
    pub config: GemmConfig,
    /// Columns of a tile.
    pub width: usize,
    /// Modelled nanoseconds.
    #[cfg_attr(not(feature = "registry"), allow(dead_code, reason = "`hk inspect` shows it"))]
    pub time: f64,
}

#[cfg(feature = "registry")]
impl Bulk {
    /// Waves of a block, with the one that copies.
    pub(crate) fn waves(&self) -> usize {
        self.config.tile.shape().0 / 16 + 1
    }

    /// `BulkTile::kStages` in `hip/include/gemm/bulk.h`: as many as fit LDS.
    pub(crate) fn pipeline(&self, arch: Arch) -> Pipeline {
        const RESERVED: usize = 1024;
        let step = 2 * STAGE_BYTES;
        let free = (arch.lds_bytes() as usize).saturating_sub(RESERVED);
        Pipeline { step, stages: free / ((self.config.tile.shape().0 + self.width) * step) }
    }
}

impl Job<'_> {
    /// Each GEMM of the launch: its tile, type and rows of `w`.
    pub fn gemms(&self, tile: GemmTile) -> impl Iterator<Item = (GemmTile, Precision, usize)> {
        let second = self.second.map(|Second { precision, n }| (tile.beside(), precision, n));
        [(tile, self.precision, self.sizes[2])].into_iter().chain(second)
    }

    /// Modelled nanoseconds.
    pub fn time(&self, GemmConfig { tile, splits, .. }: GemmConfig) -> f64 {
        let splits = splits.max(1);
        let [batch, m, _, k] = self.sizes;
        let rates = Rates::of(self.info, self.precision);
        let cus = (self.info.compute_units as usize).max(1);
        let width_of = |tile: GemmTile, precision, n| {
            tile.width(self.info, precision, [batch.saturating_mul(splits), m, n])
        };
        let blocks_of = |tile: GemmTile, precision, n: usize| {
            let n_tiles = n.div_ceil(width_of(tile, precision, n));
            let tiles = batch.saturating_mul(m.div_ceil(tile.info().m)).saturating_mul(n_tiles);
            tiles.saturating_mul(splits)
        };
        let blocks = self.gemms(tile).map(|(tile, precision, n)| blocks_of(tile, precision, n));
        let blocks = blocks.fold(0, usize::saturating_add);
        // Blocks on a CU share what it has.
        let arch = self.info.arch;
        let per_cu = tile.info().on(arch, self.precision, self.scales).per_cu;
        let rounds = blocks.div_ceil(cus.saturating_mul(per_cu)).max(1);
        let resident = blocks.div_ceil(cus).min(per_cu).max(1);
        // The last round may be of fewer blocks.
        let before = (rounds - 1).saturating_mul(cus.saturating_mul(per_cu));
        let last = if arch.is_amd() { (blocks - before.min(blocks)).div_ceil(cus).max(1) } else { resident };
        let rounds = (rounds - 1) as f64 + last as f64 / resident as f64;
        let resident = resident as f64;
        let share = batch as f64 / cus as f64 * rates.byte;
        let (mut matrix, mut loads) = (Rounds::default(), Rounds::default());
        let summed = tile.info().m * tile.info().n <= SUMMED;
        let (mut memory, mut split) = (0.0, rates.launch * if summed { 1.0 } else { rates.second });
        for (tile, precision, n) in self.gemms(tile) {
            let (t, width) = (tile.info(), width_of(tile, precision, n));
            let bytes = precision.bytes(k);
            let weight = precision.weight_bits() as f64 / precision.bits() as f64;
            let stages = bytes.div_ceil(STAGE_BYTES).max(1).div_ceil(splits) as f64;
            let part = blocks_of(tile, precision, n) as f64 / blocks.max(1) as f64;
            let cost = t.on(arch, precision, self.scales);
            let stage = resident * (t.m * width) as f64 * cost.time * rates.stage;
            // Prologue and epilogue cost some stages.
            let least = if tile.skinny() { 0.0 } else { rates.least };
            matrix.add(part, (stages + 8.0) * stage.max(least));
            // Weights come from memory, activations from L2. Through LDS, tiles of the same weights run together, and both come
            // from L2.
            let (of_w, of_x) = (width as f64 * weight, m.min(t.m) as f64);
            let (filled, streamed) =
                ((of_w + of_x) * rates.fill, of_w * rates.byte / rates.alone + of_x * rates.near);
            let row = match tile.skinny() {
                true if tile == GemmTile::S64x32 && arch.is_amd() => (rates.tall * filled).max(streamed),
                true if arch.is_amd() => filled.max(streamed),
                true => streamed,
                false => filled,
            };
            let ends = rates.ends[usize::from(tile.skinny())];
            loads.add(part, resident * (stages + ends) * STAGE_BYTES as f64 * row);
            memory += (m as f64 + n as f64 * weight) * bytes as f64 * share;
            // Partial sums are 4 bytes, written once and read once.
            split += 8.0 * splits as f64 * m as f64 * n as f64 * share;
        }
        let (matrix, loads) = (matrix.time(rounds), loads.time(rounds));
        // A wave per SIMD loads and multiplies in turn; others do one while it does the other. Skinny tiles multiply from registers.
        let waves = resident * tile.waves(arch) as f64 / 4.0;
        let alone = if arch.is_amd() && !tile.skinny() { matrix.min(loads) / waves } else { 0.0 };
        let busiest = (matrix.max(loads) + alone).max(memory);
        busiest + if splits > 1 { split } else { 0.0 }
    }

    /// A tile's split-K, and its time: the fewest slices within a tenth of the shortest, as the model is no better than that and partial
    /// sums are traffic. Where the workspace is too short for it, the same of those that it has room for: they take longer, so that no
    /// other tile wins than with a long one.
    fn fastest(&self, tile: GemmTile) -> (GemmConfig, f64) {
        let parts = self.precision.bytes(self.sizes[3]).div_ceil(tile.stretch(self.info.arch)).max(1);
        let config = |splits| GemmConfig { tile, splits, group: tile.group() };
        let fewest = |most: usize| {
            let splits = SPLITS.into_iter().filter(|&n| n == 1 || n <= most);
            // Slices of whole stretches, none empty.
            let splits = splits.map(|n| parts.div_ceil(parts.div_ceil(n)));
            let timed: Vec<_> = splits.map(config).map(|config| (config, self.time(config))).collect();
            let shortest = timed.iter().fold(f64::INFINITY, |shortest, (_, time)| time.min(shortest));
            timed.into_iter().find(|(_, time)| *time <= 1.1 * shortest)
        };
        let room = |(config, _): &(GemmConfig, f64)| config.splits <= self.most_splits.max(1);
        let few = fewest(parts).filter(room).or_else(|| fewest(parts.min(self.most_splits)));
        few.unwrap_or((config(1), f64::INFINITY))
    }

    /// The GEMM by bulk tensor copies that takes the shortest time; `None` where there is none, or where skinny tiles or split-K serve few
    /// outputs better.
    pub fn bulk(&self, eligible: &Eligible) -> Option<Bulk> {
        // Nanoseconds of a stage of 64 columns of K, by slopes over K on an H100, where a block has an SM to itself; 224 columns as if between
        // 192 and 256.
        const TILES: [(GemmTile, usize, f64); 7] = [
            (GemmTile::T64x64, 64, 205.0),
            (GemmTile::T128x128, 64, 262.0),
            (GemmTile::T128x128, 96, 297.0),
            (GemmTile::T128x128, 128, 356.0),
            (GemmTile::T128x256, 192, 505.0),
            (GemmTile::T128x256, 224, 545.0),
            (GemmTile::T128x256, 256, 584.0),
        ];
        // Prologue and epilogue of a block.
        const ENDS: f64 = 5000.0;
        let Family { precision, variant, scales, .. } = *eligible.family;
        let ([batch, m, n, k], cus) = (self.sizes, (self.info.compute_units as usize).max(1));
        let served = self.info.arch == Arch::Sm90a
            && matches!(
                (precision, variant, scales),
                (Precision::Bf16 | Precision::F16, Variant::Plain, ScaleKind::None)
            )
            && (batch == 1 && n > 16 && n.is_multiple_of(16) && k > 0 && self.vectorized);
        // 64 x 64 by all of two blocks an SM, which split-K fills, were as fast up to 32 rows.
        if !served || m <= 32 {
            return None;
        }
        let stages = precision.bytes(k).div_ceil(2 * STAGE_BYTES) as f64;
        // Blocks of 128 rows would copy and multiply rows that are not there.
        let tiles = TILES.iter().filter(|(tile, ..)| m > 64 || *tile == GemmTile::T64x64);
        let all = tiles.map(|&(tile, width, stage)| {
            let blocks = m.div_ceil(tile.shape().0).saturating_mul(n.div_ceil(width));
            let time = blocks.div_ceil(cus) as f64 * (stages * stage + ENDS);
            let config = GemmConfig { tile, splits: 1, group: tile.group() };
            (blocks, Bulk { config, width, time })
        });
        let (blocks, bulk) = all.min_by(|(_, a), (_, b)| a.time.total_cmp(&b.time))?;
        // With fewer, slices of K.
        (blocks.saturating_mul(5) >= cus).then_some(bulk)
    }

    /// Whether a tile serves these rows, and not only if options ask for it.
    fn considers(&self, tile: GemmTile, eligible: &Eligible) -> bool {
        let family = eligible.family;
        let asked_for = match tile {
            // On gfx942 no faster than 128 x 128 but for bytes without block scales, by hk-time; not measured on sm_90.
            GemmTile::T128x256 => match self.info.arch {
                Arch::Gfx950 | Arch::Sm90a => false,
                Arch::Gfx942 => self.precision.bits() != 8 || self.scales != ScaleKind::None,
                _ => true,
            },
            // Of mxfp4 it fills lines twice on gfx942, and was not measured on NVIDIA GPUs.
            GemmTile::T256x256 | GemmTile::T160x256 | GemmTile::T96x256 => {
                self.precision == Precision::Fp4 && self.info.arch != Arch::Gfx950
            }
            // Not measured on NVIDIA GPUs.
            GemmTile::T128x128 => {
                !self.info.arch.is_amd() && family.scales != ScaleKind::None && family.a == family.w
            }
            GemmTile::T96x128 | GemmTile::T64x128 => !self.info.arch.is_amd(),
            _ => false,
        };
        let ([batch, m, n, _], (tile_m, tile_n)) = (self.sizes, tile.shape());
        // Outputs are so few that each CU has one tile at most: the smaller, the fewer rows a CU loads.
        let blocks = batch.saturating_mul(m.div_ceil(tile_m)).saturating_mul(n.div_ceil(tile_n));
        let few = self.info.arch.is_amd() && tile.skinny() && blocks <= self.info.compute_units as usize;
        let rows = few || tile.rows_served(self.info.arch).contains(&m);
        !asked_for && rows && (tile != GemmTile::Elements) == self.vectorized
    }

    /// Each tile that is considered, with its split-K and modelled nanoseconds.
    #[cfg(feature = "registry")]
    pub fn candidates(&self, eligible: &Eligible) -> Vec<(GemmConfig, f64)> {
        eligible
            .tiles()
            .filter(|&tile| self.considers(tile, eligible))
            .map(|tile| self.fastest(tile))
            .collect()
    }

    /// Of tiles of 64 rows that are widened to f16, slices that SMs hold all at once: a block's time is the latency of its loads. Measured on an
    /// H200; more than four slices were slower.
    fn one_round(&self, serves: &dyn Fn(GemmTile) -> bool) -> Option<GemmConfig> {
        let [batch, _, n, _] = self.sizes;
        [(GemmTile::T64x64, 3), (GemmTile::T64x128, 2)]
            .into_iter()
            .filter(|&(tile, _)| serves(tile))
            .find_map(|(tile, per_cu)| {
                let held = per_cu * self.info.compute_units as usize;
                let tiles = batch.saturating_mul(n.div_ceil(tile.shape().1)).max(1);
                let most = (held / tiles).min(4).min(self.most_splits.max(1));
                let splits = SPLITS.into_iter().rfind(|&splits| splits <= most)?;
                Some(GemmConfig { tile, splits, group: tile.group() })
            })
    }

    /// The choice among the tiles that have a kernel.
    pub fn choose(&self, eligible: &Eligible) -> GemmConfig {
        let serves = |tile: GemmTile| eligible.serves(tile);
        // The fewest rows that hold all. Narrow tiles, each of which reads all rows, can exceed what a CU loads, or the bandwidth of
        // L2; of those of 16 rows the narrowest was the fastest on an H200, where blocks are few with twice as many waves.
        let amd = self.info.arch.is_amd();
        let blocks = self.sizes[0].saturating_mul(self.sizes[2].div_ceil(16));
        let halves = matches!(self.precision, Precision::Bf16 | Precision::F16);
        let few = blocks <= 2 * self.info.compute_units as usize && halves;
        let gfx950 = self.info.arch == Arch::Gfx950;
        let widened = matches!(self.precision, Precision::HalfByByte | Precision::HalfByFp4);
        // A block for each of most CUs is faster than tiles in registers, up to 64 rows and where memory is slower than what CUs load, by
        // hk-time.
        let rates = Rates::of(self.info, self.precision);
        let (tile, cus) = (GemmTile::T64x128, self.info.compute_units as usize);
        let blocks = self.sizes[0].saturating_mul(self.sizes[2].div_ceil(tile.shape().1));
        let rows = if gfx950 { 1 } else { 9 }..=64;
        let streams =
            amd && rates.fill < rates.byte && self.vectorized && self.second.is_none() && serves(tile);
        if streams && rows.contains(&self.sizes[1]) && (cus / 2 + 1..=cus).contains(&blocks) {
            return GemmConfig { tile, splits: 1, group: tile.group() };
        }
        let warpgroups = by_warpgroups(self.info.arch, self.precision, self.scales);
        let wide_fp8 = warpgroups && self.precision == Precision::Fp8;
        if wide_fp8
            && (33..=64).contains(&self.sizes[1])
            && self.vectorized
            && let Some(config) = self.one_round(&serves)
        {
            return config;
        }
        let few_rows: &[GemmTile] = match self.sizes[1] {
            65.. => &[],
            // Tiles through LDS widen weights in every block.
            ..=16 if gfx950 && widened => &[GemmTile::S64x32, GemmTile::S16x32],
            // Where memory takes the longest, the first of them is taken.
            _ if gfx950 => &[
                GemmTile::S64x32,
                GemmTile::S32x32,
                GemmTile::S16x32,
                GemmTile::S16x16,
                GemmTile::T64x64,
                GemmTile::T64x128,
                GemmTile::T128x128,
            ],
            33.. if amd && self.precision.bits() == 8 => {
                &[GemmTile::S64x32, GemmTile::T64x64, GemmTile::T64x128, GemmTile::T128x128, GemmTile::S16x16]
            }
            33.. if amd => &[GemmTile::S64x32, GemmTile::T64x64, GemmTile::T128x128, GemmTile::S16x16],
            // Its four waves read rows of activations once for 32 columns each: faster than 32 x 32 on gfx942, by hk-time.
            17.. if amd => &[GemmTile::S64x32],
            17..=32 if wide_fp8 => &[GemmTile::S32x32],
            17.. if warpgroups => &[GemmTile::T64x64],
            33.. => &[GemmTile::S64x32, GemmTile::T64x64],
            17.. => &[GemmTile::S32x32, GemmTile::T64x64],
            _ if !amd && few && serves(GemmTile::S16x16Twice) => &[GemmTile::S16x16Twice],
            _ if !amd && serves(GemmTile::S16x16) => &[GemmTile::S16x16],
            _ => &[GemmTile::S16x32, GemmTile::S16x16],
        };
        let fastest = |tiles: &[GemmTile], fits: &dyn Fn(GemmTile) -> bool| {
            let times =
                tiles.iter().filter(|&&tile| serves(tile) && fits(tile)).map(|&tile| self.fastest(tile));
            times.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(config, _)| config)
        };
        let considered = |tile: GemmTile| self.considers(tile, eligible);
        fastest(few_rows, &considered)
            .or_else(|| fastest(&GemmTile::ALL, &considered))
            .unwrap_or(GemmConfig { tile: GemmTile::Elements, splits: 1, group: 1 })
    }
}

impl GemmConfig {
    /// Elements of K in each split-K slice but perhaps the last, and how many slices are not empty.
    pub(crate) fn slices(
        &self,
        arch: Arch,
        k: usize,
        precision: Precision,
        multiple: usize,
    ) -> (usize, usize) {
        let step = (self.tile.stretch(arch) * 8 / precision.bits()).max(multiple);
        let each = k.div_ceil(self.splits.max(1)).next_multiple_of(step).max(step);
        (each, k.div_ceil(each).max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hk_core::{DType, Device};

    fn family(dtype: DType, scales: ScaleKind, variant: Variant) -> Eligible {
        Eligible::new(Family::find(dtype, dtype, scales, variant).unwrap())
    }
    fn plain() -> Eligible {
        family(DType::Bf16, ScaleKind::None, Variant::Plain)
    }
    fn gated() -> Eligible {
        family(DType::Bf16, ScaleKind::None, Variant::Gated)
    }
    fn block() -> Eligible {
        family(DType::I8, ScaleKind::Block, Variant::Plain)
    }
    fn job(info: &DeviceInfo, precision: Precision, sizes: [usize; 4]) -> Job<'_> {
        let scales = ScaleKind::None;
        Job { info, precision, scales, sizes, vectorized: true, most_splits: 32, second: None }
    }

    #[test]
    fn slices_cover_k_and_none_is_empty() {
        let tiles =
            GemmTile::ALL.into_iter().flat_map(|tile| [Arch::Gfx942, Arch::Sm90].map(|arch| (tile, arch)));
        for (tile, arch) in tiles {
            for precision in [Precision::Bf16, Precision::I8, Precision::Fp4] {
                for (k, multiple) in [(0, 1), (1, 1), (77, 1), (4096, 1), (7168, 128), (100_000, 1 << 14)] {
                    for splits in 1..40 {
                        let config = GemmConfig { tile, splits, group: 1 };
                        let (each, parts) = config.slices(arch, k, precision, multiple);
                        assert!((1..=splits).contains(&parts) && each % multiple == 0, "{config:?} {k}");
                        assert!(parts * each >= k && (parts - 1) * each < k.max(1), "{config:?} {k}");
                        assert_eq!(precision.bytes(each) % tile.stretch(arch), 0, "{config:?} {k}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_choice_fits_the_rows_and_fills_the_device() {
        let device = Device::open("emu:gfx942").unwrap();
        let (info, cus) = (device.info(), device.info().compute_units as usize);
        const MOST: usize = 32;
        let choose = |m, n, k, vectorized| {
            let (precision, sizes) = (Precision::Bf16, [1, m, n, k]);
            Job { vectorized, most_splits: MOST, ..job(info, precision, sizes) }.choose(&plain())
        };
        for m in [1, 16, 17, 32, 33, 64] {
            let config = choose(m, 4096, 4096, true);
            let rows = config.tile.shape().0;
            // 64 x 32 serves from 17 rows on.
            let spare = if (17..=32).contains(&m) { 48 } else { 32 };
            assert!((config.tile.skinny() || m > 32) && rows >= m && rows < m + spare, "{config:?}");
            // Most CUs have work, if K has enough of it.
            let config = choose(m, 1280, 1 << 20, true);
            let n_tiles = 1280_usize.div_ceil(config.tile.shape().1);
            assert!(n_tiles * config.splits * 4 >= 3 * cus, "{config:?}");
            // Where split-K would save less than it costs, K is whole.
            assert_eq!(choose(m, 2112, 1024, true).splits, 1, "{m}");
            assert_eq!(choose(m, 28672, 1024, true).splits, 1, "{m}");
        }
        assert_eq!(choose(16384, 16384, 8192, true).tile, GemmTile::T128x128);
        assert_eq!(choose(8192, 8192, 8192, true).splits, 1);
        assert_eq!(choose(512, 512, 512, true).splits, 1);
        assert!(choose(128, 128, 16384, true).splits > 1);
        for m in [1, 50, 5000] {
            assert_eq!(choose(m, 4096, 4099, false).tile, GemmTile::Elements);
        }
        // Lengths beyond all that there is are no panic.
        choose(usize::MAX, usize::MAX, usize::MAX, true);
        choose(1, usize::MAX, usize::MAX, true);
        choose(0, 0, 0, true);
    }

    #[test]
    fn two_gemms_of_a_launch_take_as_long_as_one_of_their_columns() {
        let device = Device::open("emu:gfx942").unwrap();
        let job = |precision, n, second| Job { second, ..job(device.info(), precision, [1, 48, n, 7168]) };
        let of = |precision, n| Some(Second { precision, n });
        for tile in [GemmTile::T64x64, GemmTile::S64x32] {
            for splits in [1, 3] {
                let config = GemmConfig { tile, splits, group: 1 };
                let one = job(Precision::Bf16, 3072, None).time(config);
                let two = job(Precision::Bf16, 2048, of(Precision::Bf16, 1024)).time(config);
                // Each reads activations of its own.
                assert!(two > 0.999 * one && two < 1.02 * one, "{config:?}: {one} {two}");
                // fp8 is half as long.
                let fp8 = job(Precision::Fp8, 2048, of(Precision::Fp8, 1024)).time(config);
                let mixed = job(Precision::Fp8, 2048, of(Precision::Bf16, 1024)).time(config);
                assert!(fp8 < mixed && mixed <= two, "{config:?}: {fp8} {mixed} {two}");
            }
        }
    }

    /// The fastest by hk-time (crates/hk-time/validation/choices.py).
    #[test]
    fn the_choice_on_mi308x_and_mi325x() {
        use GemmTile::{S64x32, T64x64, T128x128};
        let mut info = Device::open("emu:gfx942").unwrap().info().clone();
        for (cus, scales, [m, n, k], tile) in [
            (80, ScaleKind::None, [64, 28672, 4096], T128x128),
            (80, ScaleKind::None, [593, 37888, 5120], T128x128),
            (80, ScaleKind::Block, [64, 7168, 2304], T64x64),
            (80, ScaleKind::Block, [192, 2048, 2048], T64x64),
            (80, ScaleKind::Block, [368, 6144, 4096], T128x128),
            (80, ScaleKind::Block, [4096, 4096, 7168], T128x128),
            (304, ScaleKind::None, [593, 37888, 5120], T128x128),
            // Each CU has a block of fewer rows.
            (304, ScaleKind::Block, [192, 2048, 2048], S64x32),
            (304, ScaleKind::Block, [368, 6144, 4096], T64x64),
            (304, ScaleKind::Block, [4096, 4096, 7168], T128x128),
        ] {
            info.compute_units = cus;
            let (eligible, precision) =
                if scales == ScaleKind::None { (plain(), Precision::Bf16) } else { (block(), Precision::I8) };
            let (info, sizes) = (&info, [1, m, n, k]);
            let job = Job { scales, ..job(info, precision, sizes) };
            assert_eq!(job.choose(&eligible).tile, tile, "{cus} CUs, {m} x {n} x {k}");
        }
    }

    /// With room for the choice and no more, it is the choice; with less, the slices fit.
    #[test]
    fn a_workspace_that_holds_the_choice_does_not_change_it() {
        let mut of_card = Device::open("emu:gfx942").unwrap().info().clone();
        (of_card.arch, of_card.compute_units) = (Arch::Sm90a, 132);
        let amd = ["emu:gfx942", "emu:gfx942?cus=80", "emu:gfx950"];
        let mut infos = amd.map(|spec| Device::open(spec).unwrap().info().clone()).to_vec();
        infos.push(of_card);
        for info in &infos {
            for (m, n, k) in [4, 40, 129, 513]
                .into_iter()
                .flat_map(|m| [64, 2560, 6144].into_iter().map(move |n| (m, n)))
                .flat_map(|(m, n)| [512, 8192, 32768].into_iter().map(move |k| (m, n, k)))
            {
                let (precision, sizes) = (Precision::Bf16, [1, m, n, k]);
                let choice =
                    |most_splits| Job { most_splits, ..job(info, precision, sizes) }.choose(&plain());
                let free = choice(32);
                assert_eq!(choice(free.splits), free, "{}, {m} x {n} x {k}", info.arch);
                assert!(choice(free.splits.div_ceil(2)).splits <= free.splits.div_ceil(2));
            }
        }
    }

    /// Of those compared, the fastest by hk-time (crates/hk-time/validation/choices.py --floors), or within 14 % of it.
    #[test]
    fn the_choice_on_mi355x() {
        let device = Device::open("emu:gfx950").unwrap();
        let info = device.info();
        for ([m, n, k], tile, splits) in [
            ([16, 28672, 4096], GemmTile::T64x128, 1),
            ([16, 6144, 4096], GemmTile::S32x32, 1),
            ([32, 4096, 4096], GemmTile::S16x32, 1),
            ([64, 4096, 4096], GemmTile::S32x32, 1),
            ([128, 4096, 4096], GemmTile::T64x64, 2),
            ([128, 6144, 4096], GemmTile::T128x128, 4),
            ([129, 6144, 4096], GemmTile::T128x128, 2),
            // A CU has one block of 128 x 128, and 128 x 256 loads fewer bytes for an output.
            ([512, 6144, 4096], GemmTile::T128x128, 1),
            ([384, 6144, 4096], GemmTile::T128x256, 3),
            ([512, 4096, 14336], GemmTile::T256x256, 8),
            ([2048, 4096, 14336], GemmTile::T256x256, 2),
            ([255, 28672, 4096], GemmTile::T128x256, 1),
            ([2048, 4096, 4096], GemmTile::T128x256, 1),
            ([512, 28672, 4096], GemmTile::T256x256, 1),
            ([64, 2560, 8192], GemmTile::T64x64, 6),
        ] {
            let (precision, sizes) = (Precision::Bf16, [1, m, n, k]);
            let job = job(info, precision, sizes);
            let config = job.choose(&plain());
            assert_eq!((config.tile, config.splits), (tile, splits), "{m} x {n} x {k}");
        }
        let fp8 = family(DType::Fp8E4M3, ScaleKind::Block, Variant::Plain);
        let fp4 = family(DType::Fp4x2, ScaleKind::Mx, Variant::Plain);
        for ([m, n, k], tile) in [
            ([16, 28672, 4096], GemmTile::T64x128),
            ([16, 6144, 4096], GemmTile::S64x32),
            ([32, 28672, 4096], GemmTile::T64x128),
            ([32, 6144, 4096], GemmTile::S64x32),
            ([128, 6144, 4096], GemmTile::T64x64),
            ([256, 6144, 4096], GemmTile::T64x128),
            ([512, 4096, 4096], GemmTile::T64x128),
            // Several along M, so that each CU has a block.
            ([32, 4096, 4096], GemmTile::S16x32),
            ([64, 4096, 4096], GemmTile::S32x32),
            ([128, 4096, 4096], GemmTile::S64x32),
        ] {
            for (eligible, precision) in [(fp8, Precision::Fp8), (fp4, Precision::Fp4)] {
                let sizes = [1, m, n, k];
                let job = job(info, precision, sizes);
                let config = job.choose(&eligible);
                assert_eq!((config.tile, config.splits), (tile, 1), "{precision:?}, {m} x {n} x {k}");
            }
        }
        let a16w8 = Eligible::new(
            Family::find(DType::Bf16, DType::Fp8E4M3, ScaleKind::Block, Variant::Plain).unwrap(),
        );
        let (precision, sizes) = (Precision::HalfByByte, [1, 16, 28672, 4096]);
        let job = job(info, precision, sizes);
        assert_eq!(job.choose(&a16w8).tile, GemmTile::S64x32);
    }

    /// Stages that fit 227 KiB, of 128 bytes a row.
    #[cfg(feature = "registry")]
    #[test]
    fn pipeline_of_warpgroup_tiles() {
        let pipeline = |tile: GemmTile, precision, scales, width| {
            let scales = (scales, MxOrder::Any);
            let Pipeline { step, stages } = tile.pipeline(Arch::Sm90a, precision, scales, width);
            (step, stages)
        };
        let plain = |tile, width| pipeline(tile, Precision::Bf16, ScaleKind::None, width);
        let wide = [256, 224, 192].map(|width| plain(GemmTile::T128x256, width));
        assert_eq!(wide, [(128, 4), (128, 5), (128, 5)]);
        assert_eq!([plain(GemmTile::T128x128, 128), plain(GemmTile::T64x64, 64)], [(128, 7); 2]);
        // Others multiply by mma.sync.
        assert_eq!(plain(GemmTile::T256x256, 256), (64, 5));
        assert_eq!(pipeline(GemmTile::T128x128, Precision::Fp8, ScaleKind::None, 128), (128, 2));
        assert_eq!(pipeline(GemmTile::T128x128, Precision::Fp8, ScaleKind::Block, 128), (64, 5));
        assert_eq!(pipeline(GemmTile::T64x64, Precision::I8, ScaleKind::Block, 64), (64, 5));
    }

    /// On an H100 with warpgroup instructions 128 x 256 was the fastest of large GEMMs, 64 x 64 from 17 to 64 rows; in between narrower
    /// blocks of 128 rows that fill the device.
    #[test]
    fn the_choice_with_warpgroup_instructions() {
        let mut info = Device::open("emu:gfx942").unwrap().info().clone();
        (info.arch, info.compute_units) = (Arch::Sm90a, 132);
        let choose = |[m, n, k]: [usize; 3], precision| {
            let (info, sizes) = (&info, [1, m, n, k]);
            job(info, precision, sizes).choose(&plain())
        };
        for size in [2048, 4096, 8192, 16384] {
            assert_eq!(choose([size; 3], Precision::Bf16).tile, GemmTile::T128x256, "{size}");
            assert_eq!(choose([size; 3], Precision::Fp8).tile, GemmTile::T128x256, "{size}");
        }
        for ([n, k], widened) in [
            ([6144, 4096], (GemmTile::T64x64, 4)),
            ([28672, 4096], (GemmTile::T64x128, 1)),
            ([4096, 14336], (GemmTile::T64x64, 4)),
        ] {
            for m in [17, 32, 64] {
                assert_eq!(choose([m, n, k], Precision::Bf16).tile, GemmTile::T64x64, "{m} {n} {k}");
            }
            let GemmConfig { tile, splits, .. } = choose([64, n, k], Precision::Fp8);
            assert_eq!((tile, splits), widened, "{n} {k}");
        }
        // The fastest on an H200 of those tried.
        for (size, tile, splits) in [
            ([128, 6144, 4096], GemmTile::T128x128, 2),
            ([128, 28672, 4096], GemmTile::T128x256, 1),
            ([128, 4096, 14336], GemmTile::T128x128, 4),
            ([256, 6144, 4096], GemmTile::T128x128, 1),
            ([512, 28672, 4096], GemmTile::T128x256, 1),
            ([512, 4096, 14336], GemmTile::T128x256, 2),
        ] {
            let chosen = choose(size, Precision::Fp8);
            assert_eq!((chosen.tile, chosen.splits), (tile, splits), "{size:?}");
        }
        let wide = |m, n, k| {
            let GemmConfig { tile, splits, .. } = choose([m, n, k], Precision::Bf16);
            (tile == GemmTile::T128x256).then(|| tile.width(&info, Precision::Bf16, [splits, m, n]))
        };
        assert_eq!(wide(512, 6144, 4096), Some(192));
        assert_eq!([256, 512].map(|m| wide(m, 28672, 4096)), [Some(224); 2]);
        assert_eq!([2048, 4096, 8192].map(|size| wide(size, size, size)), [Some(256); 3]);
        assert_eq!(wide(256, 6144, 4096), None);
        // Only kernels of 16-bit floats have narrower blocks.
        assert_eq!(GemmTile::T128x256.width(&info, Precision::I8, [1, 512, 6144]), 256);
    }

    /// The tiles by bulk tensor copies that were the fastest on an H100, or within 4 % of it.
    #[test]
    fn the_choice_with_bulk_copies() {
        let mut info = Device::open("emu:gfx942").unwrap().info().clone();
        (info.arch, info.compute_units) = (Arch::Sm90a, 132);
        let choose = |[m, n, k]: [usize; 3]| {
            let (info, precision, sizes) = (&info, Precision::Bf16, [1, m, n, k]);
            let job = job(info, precision, sizes);
            job.bulk(&plain()).map(|bulk| (bulk.config.tile, bulk.width))
        };
        let (low, middle, wide) = (GemmTile::T64x64, GemmTile::T128x128, GemmTile::T128x256);
        for (size, fastest) in [
            ([64, 6144, 4096], (low, 64)),
            ([64, 2048, 4096], (low, 64)),
            ([128, 4096, 14336], (low, 64)),
            ([256, 2048, 4096], (low, 64)),
            ([128, 6144, 4096], (middle, 64)),
            ([256, 4096, 14336], (middle, 64)),
            ([1024, 1024, 1024], (middle, 64)),
            ([256, 6144, 4096], (middle, 96)),
            ([512, 4096, 14336], (middle, 128)),
            ([512, 6144, 4096], (wide, 192)),
            ([1024, 6144, 4096], (wide, 192)),
            ([128, 28672, 4096], (wide, 224)),
            ([256, 28672, 4096], (wide, 224)),
            ([512, 28672, 4096], (wide, 224)),
            ([1024, 4096, 14336], (wide, 256)),
            ([2048, 6144, 4096], (wide, 256)),
            ([2048; 3], (wide, 256)),
            ([4096; 3], (wide, 256)),
            ([8192; 3], (wide, 256)),
        ] {
            assert_eq!(choose(size), Some(fastest), "{size:?}");
        }
        // Few rows, and few blocks, which slices of K serve; columns that are no multiple of 16.
        assert_eq!(choose([32, 6144, 4096]), None);
        assert_eq!(choose([64, 1024, 16384]), None);
        assert_eq!(choose([256, 6148, 4096]), None);
    }

    /// The measured best on an H200 for large GEMMs and up to 16 rows; otherwise what needs less L2 bandwidth.
    #[test]
    fn the_choice_on_an_h200() {
        let mut info = Device::open("emu:gfx942").unwrap().info().clone();
        (info.arch, info.compute_units) = (Arch::Sm90, 132);
        let choose = |[m, n, k]: [usize; 3], eligible: Eligible| {
            let (info, precision, sizes) = (&info, Precision::Bf16, [1, m, n, k]);
            job(info, precision, sizes).choose(&eligible)
        };
        for size in [2048, 4096, 8192, 16384] {
            let config = choose([size; 3], plain());
            assert_eq!((config.tile, config.splits), (GemmTile::T128x128, 1), "{size}");
        }
        for m in [1, 8, 16] {
            for [n, k] in [[6144, 4096], [28672, 4096], [4096, 14336], [57344, 8192], [8192, 28672]] {
                let narrow = if n == 4096 { GemmTile::S16x16Twice } else { GemmTile::S16x16 };
                assert_eq!(choose([m, n, k], plain()).tile, narrow, "{m} {n} {k}");
                assert_eq!(choose([m, n, k], gated()).tile, GemmTile::S16x32, "{m} {n} {k}");
            }
        }
        // Twice as many rows for each weight as S64x32 has.
        for [n, k] in [[4096, 4096], [28672, 4096], [4096, 14336]] {
            assert_eq!(choose([64, n, k], plain()).tile, GemmTile::T64x64, "{n} {k}");
        }
        // Whatever the sizes, none that spills while there is another.
        for m in [65, 128, 500, 1 << 14] {
            for eligible in [plain(), block()] {
                let config = choose([m, 7168, 7168], eligible);
                assert!(config.tile.shape().0 < 256, "{m}: {config:?}");
            }
        }
    }
}
