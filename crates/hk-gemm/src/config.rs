//! Which kernel makes a product, and how it is cut into tiles.

use hk_core::DeviceInfo;

/// What a product multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// `bf16` by `bf16`.
    Bf16,
    /// `f16` by `f16`.
    F16,
    /// `i8` by `i8`, summed in `i32`.
    I8,
    /// The fp8 of the device's products by itself.
    Fp8,
    /// 16-bit floats by int8 or fp8.
    HalfByByte,
    /// 16-bit floats by mxfp4.
    HalfByFp4,
    /// The fp8 of the device's products by mxfp4.
    Fp8ByFp4,
    /// mxfp4 by mxfp4.
    Fp4,
}

impl Precision {
    /// Bits of an element of the activations.
    pub(crate) const fn bits(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 | Self::HalfByByte | Self::HalfByFp4 => 16,
            Self::I8 | Self::Fp8 | Self::Fp8ByFp4 => 8,
            Self::Fp4 => 4,
        }
    }

    /// Bytes of so many of them.
    pub(crate) const fn bytes(self, elements: usize) -> usize {
        (elements / 8).saturating_mul(self.bits()).saturating_add((elements % 8 * self.bits()).div_ceil(8))
    }
}

/// The outputs that a block makes, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GemmTile {
    /// 256 x 256 by eight waves, through LDS: a block fills a CU.
    T256x256,
    /// 128 x 128 by four waves, through LDS: two blocks a CU.
    T128x128,
    /// 64 x 64 by four waves, through LDS: four blocks a CU.
    T64x64,
    /// 64 x 64, element by element: any strides and alignment, any length of rows.
    Elements,
    /// 16 x 16 by eight waves that share K, from memory to registers: the most blocks for few outputs. Not of gated products.
    S16x16,
    /// 16 x 32, likewise.
    S16x32,
    /// 32 x 32, likewise.
    S32x32,
    /// 64 x 32 by four waves, likewise.
    S64x32,
    /// 256 x 128 by eight waves, through LDS: a block fills a CU. Of products with scales of blocks, which need twice the
    /// registers for sums.
    T256x128,
}

/// A tile's shape, and what it costs.
struct TileInfo {
    tile: GemmTile,
    m: usize,
    n: usize,
    /// Blocks that a CU holds.
    per_cu: usize,
    /// Time for a stage of K, in a CU full of such blocks, relative to outputs: reading and writing LDS, and addresses.
    cost: f64,
}

impl TileInfo {
    /// Bytes of a row that the waves of a block read at a time, if they share K.
    const fn stretch(&self) -> usize {
        match self.tile {
            GemmTile::S16x16 | GemmTile::S16x32 => 8 * 256,
            GemmTile::S32x32 => 8 * 128,
            GemmTile::S64x32 => 4 * 128,
            _ => STAGE_BYTES,
        }
    }
}

/// Time to write an output of a part of K and to read it again, 8 bytes, in a CU's share of the memory's bandwidth; and of one
/// more launch, some microseconds: both in the time that the matrix units take for a stage of one output (MI300X: 1 us for 65536 of
/// them, 17 bytes a ns).
const PLANE: f64 = 24.0;
const LAUNCH: f64 = 4.0 * 65536.0;

/// The table. Costs are the longest of the CU's pipes per product (matrix, LDS), counted on the emulator.
const TILES: [TileInfo; GemmTile::COUNT] = [
    TileInfo { tile: GemmTile::T256x256, m: 256, n: 256, per_cu: 1, cost: 1.0 },
    TileInfo { tile: GemmTile::T128x128, m: 128, n: 128, per_cu: 2, cost: 1.1 },
    TileInfo { tile: GemmTile::T64x64, m: 64, n: 64, per_cu: 4, cost: 1.6 },
    TileInfo { tile: GemmTile::Elements, m: 64, n: 64, per_cu: 4, cost: 16.0 },
    TileInfo { tile: GemmTile::S16x16, m: 16, n: 16, per_cu: 2, cost: 1.0 },
    TileInfo { tile: GemmTile::S16x32, m: 16, n: 32, per_cu: 2, cost: 1.0 },
    TileInfo { tile: GemmTile::S32x32, m: 32, n: 32, per_cu: 1, cost: 1.0 },
    TileInfo { tile: GemmTile::S64x32, m: 64, n: 32, per_cu: 1, cost: 1.0 },
    TileInfo { tile: GemmTile::T256x128, m: 256, n: 128, per_cu: 1, cost: 1.1 },
];

/// Bytes of a row that a stage holds: `Tile::kBytes`.
pub(crate) const STAGE_BYTES: usize = 64;

impl GemmTile {
    /// How many there are.
    pub(crate) const COUNT: usize = 9;

    /// All of them.
    pub const ALL: [Self; Self::COUNT] = [
        Self::T256x256,
        Self::T128x128,
        Self::T64x64,
        Self::Elements,
        Self::S16x16,
        Self::S16x32,
        Self::S32x32,
        Self::S64x32,
        Self::T256x128,
    ];

    fn info(self) -> &'static TileInfo {
        &TILES[self as usize]
    }

    /// Rows and columns of outputs that a block makes.
    pub const fn shape(self) -> (usize, usize) {
        let info = &TILES[self as usize];
        (info.m, info.n)
    }

    /// Its place in tables of kernels.
    pub(crate) const fn index(self) -> usize {
        self as usize
    }

    /// Whether waves share K, from memory to registers.
    pub(crate) const fn skinny(self) -> bool {
        matches!(self, Self::S16x16 | Self::S16x32 | Self::S32x32 | Self::S64x32)
    }
}

/// How a product is made.
///
/// Unless options say it, it follows from the sizes and the device. Up to 64 rows, reading the weights is what takes time: the
/// tile with the fewest rows that holds them all, and as many splits as give each CU a block. For more rows, of all tiles and
/// splits those with the shortest modelled time, which is rounds of blocks over the CUs, times the stages of a block, times the
/// tile's cost; splits add the traffic of their planes, and a launch. Without a workspace K is not split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GemmConfig {
    /// The tile.
    pub tile: GemmTile,
    /// Parts that K is cut into, each made by blocks of its own and then summed in order; at least 1.
    pub splits: usize,
    /// Tiles along M that follow each other, so that they share the weights of a tile in L2.
    pub group: usize,
}

impl GemmConfig {
    /// The choice for `batch` products of `[m, k]` by `[n, k]` on a device. `vectors`: rows begin on 16 bytes and are a
    /// multiple of 16 bytes long. `most_splits`: that there is a workspace for. `serves`: which tiles there are kernels of.
    pub(crate) fn choose(
        info: &DeviceInfo,
        precision: Precision,
        [batch, m, n, k]: [usize; 4],
        vectors: bool,
        most_splits: usize,
        serves: impl Fn(GemmTile) -> bool,
    ) -> Self {
        let bytes = precision.bytes(k);
        let cus = (info.compute_units as usize).max(1);
        let narrow =
            if batch.saturating_mul(n.div_ceil(32)) >= 2 * cus { GemmTile::S16x32 } else { GemmTile::S16x16 };
        let skinny = match m {
            65.. => None,
            33.. => Some(GemmTile::S64x32),
            17.. => Some(GemmTile::S32x32),
            _ if serves(narrow) => Some(narrow),
            _ => Some(GemmTile::S16x32),
        };
        let Some(tile) = skinny.filter(|&tile| vectors && serves(tile)) else {
            let fits = |t: &TileInfo| {
                !t.tile.skinny() && serves(t.tile) && (t.tile != GemmTile::Elements) == vectors
            };
            return Self::shortest(fits, cus, [batch, m, n], bytes, most_splits);
        };
        let tiles = batch.saturating_mul(n.div_ceil(tile.info().n)).max(1);
        let stretches = bytes.div_ceil(tile.info().stretch()).max(1);
        let splits = cus.div_ceil(tiles).min(stretches).min(most_splits).max(1);
        Self { tile, splits, group: 1 }
    }

    fn shortest(
        fits: impl Fn(&TileInfo) -> bool,
        cus: usize,
        [batch, m, n]: [usize; 3],
        bytes: usize,
        most_splits: usize,
    ) -> Self {
        let stages = bytes.div_ceil(STAGE_BYTES).max(1);
        let mut best = (f64::INFINITY, Self { tile: GemmTile::Elements, splits: 1, group: 1 });
        for t in TILES.iter().filter(|t| fits(t)) {
            let tiles = batch.saturating_mul(m.div_ceil(t.m)).saturating_mul(n.div_ceil(t.n));
            let mut splits = 1;
            while splits <= most_splits.min(stages) {
                let blocks = tiles.saturating_mul(splits);
                let rounds = blocks.div_ceil(cus * t.per_cu).max(1);
                // Blocks on a CU share its matrix units.
                let resident = blocks.div_ceil(cus).min(t.per_cu).max(1);
                let stage = (t.m * t.n) as f64 * t.cost * resident as f64;
                // Prologue and epilogue weigh as some stages.
                let block = (stages.div_ceil(splits) + 8) as f64;
                let outputs = batch as f64 * m as f64 * n as f64 / cus as f64;
                let planes = if splits > 1 { LAUNCH + PLANE * splits as f64 * outputs } else { 0.0 };
                let time = rounds as f64 * block * stage + planes;
                if time < best.0 {
                    best = (time, Self { tile: t.tile, splits, group: (2048 / t.m).max(1) });
                }
                splits *= 2;
            }
        }
        best.1
    }

    /// Elements of K in each part but perhaps the last, and how many parts are not empty.
    pub(crate) fn parts(&self, k: usize, precision: Precision, multiple: usize) -> (usize, usize) {
        let step = (self.tile.info().stretch() * 8 / precision.bits()).max(multiple);
        let each = k.div_ceil(self.splits.max(1)).next_multiple_of(step).max(step);
        (each, k.div_ceil(each).max(1))
    }

    pub(crate) fn tiles(&self, m: usize, n: usize) -> (usize, usize) {
        let info = self.tile.info();
        (m.div_ceil(info.m), n.div_ceil(info.n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hk_core::Device;

    #[test]
    fn parts_cover_k_and_none_is_empty() {
        for tile in GemmTile::ALL {
            for precision in [Precision::Bf16, Precision::I8, Precision::Fp4] {
                for (k, multiple) in [(0, 1), (1, 1), (77, 1), (4096, 1), (7168, 128), (100_000, 1 << 14)] {
                    for splits in 1..40 {
                        let config = GemmConfig { tile, splits, group: 1 };
                        let (each, parts) = config.parts(k, precision, multiple);
                        assert!((1..=splits).contains(&parts) && each % multiple == 0, "{config:?} {k}");
                        assert!(parts * each >= k && (parts - 1) * each < k.max(1), "{config:?} {k}");
                        assert_eq!(precision.bytes(each) % tile.info().stretch(), 0, "{config:?} {k}");
                    }
                }
            }
        }
    }

    #[test]
    fn tables_are_in_order() {
        for (i, tile) in GemmTile::ALL.into_iter().enumerate() {
            assert_eq!((tile.index(), tile.info().tile), (i, tile));
        }
    }

    #[test]
    fn the_choice_fits_the_rows_and_fills_the_device() {
        let device = Device::open("emu:gfx942").unwrap();
        let (info, cus) = (device.info(), device.info().compute_units as usize);
        const MOST: usize = 32;
        let plain = |tile| tile != GemmTile::T256x128;
        let choose =
            |m, n, k, vectors| GemmConfig::choose(info, Precision::Bf16, [1, m, n, k], vectors, MOST, plain);
        for m in [1, 16, 17, 32, 33, 64] {
            let config = choose(m, 4096, 4096, true);
            assert!(
                config.tile.skinny() && config.tile.shape().0 >= m && config.tile.shape().0 < m + 32,
                "{config:?}"
            );
            // Each CU has work, if K has enough of it.
            let config = choose(m, 1280, 1 << 20, true);
            let (_, n_tiles) = config.tiles(m, 1280);
            assert!(n_tiles * config.splits >= cus, "{config:?}");
        }
        assert_eq!(choose(16384, 16384, 8192, true).tile, GemmTile::T256x256);
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
}
