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
}

impl Precision {
    /// Bytes of an element.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::I8 | Self::Fp8 => 1,
        }
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

/// The table. Costs are the longest of the CU's pipes per product (matrix, LDS), counted on the emulator.
const TILES: [TileInfo; 4] = [
    TileInfo { tile: GemmTile::T256x256, m: 256, n: 256, per_cu: 1, cost: 1.0 },
    TileInfo { tile: GemmTile::T128x128, m: 128, n: 128, per_cu: 2, cost: 1.1 },
    TileInfo { tile: GemmTile::T64x64, m: 64, n: 64, per_cu: 4, cost: 1.6 },
    TileInfo { tile: GemmTile::Elements, m: 64, n: 64, per_cu: 4, cost: 16.0 },
];

/// Bytes of a row that a stage holds: `Tile::kBytes`.
pub(crate) const STAGE_BYTES: usize = 64;

impl GemmTile {
    fn info(self) -> &'static TileInfo {
        &TILES[self as usize]
    }

    /// Rows and columns of outputs that a block makes.
    pub const fn shape(self) -> (usize, usize) {
        let info = &TILES[self as usize];
        (info.m, info.n)
    }

    /// The end of its kernels' names.
    pub(crate) const fn suffix(self) -> usize {
        self as usize
    }
}

/// How a product is made.
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
    /// multiple of 16 bytes long. `most_splits`: that there is a workspace for.
    ///
    /// Of all tiles and splits it is the one with the shortest modelled time: rounds of blocks over the CUs, times the
    /// stages of a block, times the tile's cost; a split adds the traffic of its plane.
    pub fn choose(
        info: &DeviceInfo,
        precision: Precision,
        [batch, m, n, k]: [usize; 4],
        vectors: bool,
        most_splits: usize,
    ) -> Self {
        let stages = (k * precision.bytes()).div_ceil(STAGE_BYTES).max(1);
        let cus = (info.compute_units as usize).max(1);
        let mut best: Option<(f64, Self)> = None;
        for t in TILES.iter().filter(|t| (t.tile != GemmTile::Elements) == vectors) {
            let tiles = batch.saturating_mul(m.div_ceil(t.m)).saturating_mul(n.div_ceil(t.n));
            let mut splits = 1;
            while splits <= most_splits.min(stages) {
                let blocks = tiles.saturating_mul(splits);
                let rounds = blocks.div_ceil(cus * t.per_cu).max(1);
                // A CU with fewer blocks than it holds is as slow for each as with all of them, at worst.
                let resident = blocks.div_ceil(cus).min(t.per_cu).max(1);
                let stage = (t.m * t.n) as f64 * t.cost * resident as f64;
                // Prologue and epilogue weigh as some stages.
                let block = (stages.div_ceil(splits) + 8) as f64;
                let planes = if splits > 1 { (splits + 1) as f64 * (batch * m * n) as f64 / cus as f64 } else { 0.0 };
                let time = rounds as f64 * block * stage + planes;
                if best.as_ref().is_none_or(|(t, _)| time < *t) {
                    let group = (2048 / t.m).max(1);
                    best = Some((time, Self { tile: t.tile, splits, group }));
                }
                splits *= 2;
            }
        }
        best.map_or(Self { tile: GemmTile::Elements, splits: 1, group: 1 }, |(_, config)| config)
    }

    /// Elements of K in each part but perhaps the last, and how many parts are not empty.
    pub(crate) fn parts(&self, k: usize, precision: Precision, multiple: usize) -> (usize, usize) {
        let step = (STAGE_BYTES / precision.bytes()).max(multiple);
        let each = k.div_ceil(self.splits.max(1)).next_multiple_of(step).max(step);
        (each, k.div_ceil(each).max(1))
    }

    pub(crate) fn tiles(&self, m: usize, n: usize) -> (usize, usize) {
        let info = self.tile.info();
        (m.div_ceil(info.m), n.div_ceil(info.n))
    }
}
