//! Which kernel makes a product, and how it is cut into tiles.

use hk_core::{Arch, DeviceInfo};

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

    /// Bits of an element of the weights.
    pub(crate) const fn weight_bits(self) -> usize {
        match self {
            Self::HalfByByte => 8,
            Self::HalfByFp4 | Self::Fp8ByFp4 => 4,
            _ => self.bits(),
        }
    }

    /// Bytes of so many of them.
    pub(crate) const fn bytes(self, elements: usize) -> usize {
        (elements / 8).saturating_mul(self.bits()).saturating_add((elements % 8 * self.bits()).div_ceil(8))
    }
}

/// The outputs that a block makes, and how. On sm_90, tiles of 16 and 32 rows are made by four waves; those of 256 rows do not
/// fit its registers, and are taken only if options say so.
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
    /// 16 x 16 by eight waves (on sm_90 by four) that share K, from memory to registers: the most blocks for few outputs. Not of
    /// gated products.
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
    /// [`S16x16`](Self::S16x16) by twice as many waves: more loads on their way where there are no more than two blocks for
    /// each SM of sm_90, where 16-bit floats take it by themselves. Of plain products.
    S16x16Twice,
}

/// A tile's shape, and what it costs.
struct TileInfo {
    m: usize,
    n: usize,
    amd: Cost,
    nvidia: Cost,
}

/// What a tile costs on a target.
struct Cost {
    /// Blocks that a CU holds.
    per_cu: usize,
    /// Time for a stage of K, in a CU full of such blocks, relative to outputs: reading and writing LDS, and addresses.
    time: f64,
}

impl TileInfo {
    const fn on(&self, arch: Arch) -> &Cost {
        if arch.is_amd() { &self.amd } else { &self.nvidia }
    }
}

/// What times are modelled from, of the largest part of each AMD target: bandwidths, clocks and rates as published. Of sm_90 they
/// are an H200's, measured but for the latency of memory. What a launch costs is assumed.
struct Rates {
    /// Nanoseconds that a CU's matrix units take for a stage of K of an output.
    stage: f64,
    /// Nanoseconds for a byte in a CU's share of the memory's bandwidth, and from L2.
    byte: f64,
    near: f64,
    /// The same from L2 to LDS, where it is no part of a tile's cost.
    to_lds: f64,
    /// The least for a stage of a tile that goes through LDS, of one more launch.
    least: f64,
    launch: f64,
}

impl Rates {
    /// Reading a stage, its products and a barrier: some 200 clocks.
    const CLOCKS: f64 = 90.0;
    const LAUNCH: f64 = 4000.0;

    const fn of(arch: Arch) -> Self {
        match arch {
            // 256 CUs, 2.2 GHz, 8 TB/s.
            Arch::Gfx950 => Self {
                stage: 1.0 / (64.0 * 2.2),
                byte: 0.032,
                near: 1.0 / (64.0 * 2.2),
                to_lds: 0.0,
                least: Self::CLOCKS,
                launch: Self::LAUNCH,
            },
            // 132 SMs. Of 790 TFLOP/s of bf16, mma.sync makes 0.65. Memory is copied at 4.2 TB/s; tiles of 128 x 128 read 6.7 TB/s
            // from L2, so that it has some more. Loads are on their way for some 800 ns, those of four stages together.
            Arch::Sm90 => Self {
                stage: 64.0 / (0.65 * 790e3 / 132.0),
                byte: 132.0 / 4200.0,
                near: 132.0 / 7200.0,
                to_lds: 132.0 / 7200.0,
                least: 800.0 / 4.0,
                launch: Self::LAUNCH / 2.0,
            },
            // 304 CUs, 2.1 GHz, 5.3 TB/s.
            _ => Self {
                stage: 1.0 / (32.0 * 2.1),
                byte: 0.057,
                near: 1.0 / (64.0 * 2.1),
                to_lds: 0.0,
                least: Self::CLOCKS,
                launch: Self::LAUNCH,
            },
        }
    }
}

/// How much more than its share of the bandwidth a CU can use while others have nothing to read.
const ALONE: f64 = 1.5;
/// Numbers of parts of K to choose from.
const SPLITS: [usize; 10] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32];

/// Bytes of a row that a stage holds: `Tile::kBytes`.
pub(crate) const STAGE_BYTES: usize = 64;

impl GemmTile {
    /// How many there are.
    pub(crate) const COUNT: usize = 10;

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
        Self::S16x16Twice,
    ];

    /// On AMD targets, costs are the longest of the CU's pipes per product (matrix, LDS), counted on the emulator. On sm_90, blocks
    /// are those that registers have room for; of tiles through LDS, 128 x 128 was measured on an H200 (426 TFLOP/s of 4096^3),
    /// 64 x 64 is assumed, and the larger ones spill registers, so that they are never chosen.
    const fn info(self) -> TileInfo {
        const fn of([m, n]: [usize; 2], amd: (usize, f64), nvidia: (usize, f64)) -> TileInfo {
            const fn cost((per_cu, time): (usize, f64)) -> Cost {
                Cost { per_cu, time }
            }
            TileInfo { m, n, amd: cost(amd), nvidia: cost(nvidia) }
        }
        match self {
            Self::T256x256 => of([256, 256], (1, 1.0), (1, 4.0)),
            Self::T128x128 => of([128, 128], (2, 1.1), (2, 1.1)),
            Self::T64x64 => of([64, 64], (4, 1.6), (4, 1.3)),
            Self::Elements => of([64, 64], (4, 16.0), (4, 16.0)),
            Self::S16x16 => of([16, 16], (3, 1.0), (5, 1.0)),
            Self::S16x16Twice => of([16, 16], (1, 1.0), (2, 1.0)),
            Self::S16x32 => of([16, 32], (2, 1.0), (3, 1.0)),
            Self::S32x32 => of([32, 32], (2, 1.0), (4, 1.0)),
            Self::S64x32 => of([64, 32], (3, 1.0), (2, 1.0)),
            Self::T256x128 => of([256, 128], (1, 1.1), (1, 4.0)),
        }
    }

    /// Rows and columns of outputs that a block makes.
    pub const fn shape(self) -> (usize, usize) {
        let info = self.info();
        (info.m, info.n)
    }

    /// Waves of a block.
    pub(crate) const fn waves(self, arch: Arch) -> usize {
        match self {
            Self::T256x256 | Self::T256x128 => 8,
            // `kTwiceSharing` and `kSharing` in `hip/skinny.h`.
            Self::S16x16Twice if arch.is_amd() => 16,
            Self::S16x16Twice => 8,
            Self::S16x16 | Self::S16x32 | Self::S32x32 if arch.is_amd() => 8,
            _ => 4,
        }
    }

    /// Bytes of a row that a block reads at a time.
    pub(crate) const fn stretch(self, arch: Arch) -> usize {
        // Of a wave: `kLongStretch` in `hip/skinny.h`.
        let longest = if arch.is_amd() { 256 } else { 128 };
        match self {
            Self::S16x16 | Self::S16x32 => self.waves(arch) * longest,
            Self::S16x16Twice => self.waves(arch) * 128,
            Self::S32x32 | Self::S64x32 => self.waves(arch) * longest / 2,
            _ => STAGE_BYTES,
        }
    }

    /// How often that is in LDS or registers, or on its way there.
    pub(crate) const fn stages(self, arch: Arch) -> usize {
        match (self, arch) {
            (Self::T256x256 | Self::T256x128 | Self::T128x128 | Self::T64x64, Arch::Gfx950 | Arch::Sm90) => 5,
            // Two in LDS, two in registers.
            (Self::T256x256 | Self::T256x128 | Self::T128x128 | Self::T64x64 | Self::Elements, _) => 4,
            _ => 2,
        }
    }

    /// Its place in tables of kernels.
    pub(crate) const fn index(self) -> usize {
        self as usize
    }

    /// The tile of 16-bit floats beside one of codes in the same launch: of as many threads.
    pub(crate) const fn beside(self) -> Self {
        match self {
            Self::T256x128 => Self::T256x256,
            other => other,
        }
    }

    /// Whether waves share K, from memory to registers.
    pub(crate) const fn skinny(self) -> bool {
        matches!(self, Self::S16x16 | Self::S16x16Twice | Self::S16x32 | Self::S32x32 | Self::S64x32)
    }
}

/// How a product is made.
///
/// Unless options say it, it follows from the sizes and the device. Up to 64 rows, a tile with the fewest rows that hold them
/// all, or on sm_90, from 17 rows on, one of 64 x 64; else, and among those, the one with the shortest modelled time. (On sm_90,
/// up to 16 rows, the narrowest, by twice the waves where blocks are few: [`GemmTile::S16x16Twice`].) K is cut
/// into as few parts as make that time about the shortest: it is what the matrix units take, or the loads of a CU, or the
/// memory, if that is longer, and what parts cost: a launch, and writing and reading their planes. Without a workspace K is
/// not cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GemmConfig {
    /// The tile.
    pub tile: GemmTile,
    /// Parts that K is cut into, each made by blocks of its own and then summed in order; at least 1.
    pub splits: usize,
    /// Tiles along M that follow each other, so that they share the weights of a tile in L2.
    pub group: usize,
}

/// A product whose configuration is to be chosen.
pub(crate) struct Job<'a> {
    pub info: &'a DeviceInfo,
    pub precision: Precision,
    /// Batches, M, rows of `w`, K.
    pub sizes: [usize; 4],
    /// Rows begin on 16 bytes and are a multiple of 16 bytes long.
    pub vectors: bool,
    /// Parts of K that there is a workspace for.
    pub most_splits: usize,
    /// Another product in the same launch.
    pub second: Option<Second>,
}

/// A product in the launch of another, with the same M and K.
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
    /// Such a part of the blocks takes so long each.
    fn add(&mut self, part: f64, time: f64) {
        self.mean += part * time;
        if part > 0.0 {
            self.longest = self.longest.max(time);
        }
    }

    /// The last blocks may be of the longest.
    fn time(&self, rounds: f64) -> f64 {
        (rounds - 1.0) * self.mean + self.longest
    }
}

impl Job<'_> {
    /// Each product of the launch: its tile, type and rows of `w`.
    pub fn products(&self, tile: GemmTile) -> impl Iterator<Item = (GemmTile, Precision, usize)> {
        let second = self.second.map(|Second { precision, n }| (tile.beside(), precision, n));
        [(tile, self.precision, self.sizes[2])].into_iter().chain(second)
    }

    /// Modelled nanoseconds.
    pub fn time(&self, GemmConfig { tile, splits, .. }: GemmConfig) -> f64 {
        let splits = splits.max(1);
        let [batch, m, _, k] = self.sizes;
        let rates = Rates::of(self.info.arch);
        let cus = (self.info.compute_units as usize).max(1);
        let blocks_of = |t: &TileInfo, n: usize| {
            let tiles = batch.saturating_mul(m.div_ceil(t.m)).saturating_mul(n.div_ceil(t.n));
            tiles.saturating_mul(splits)
        };
        let blocks =
            self.products(tile).map(|(tile, _, n)| blocks_of(&tile.info(), n)).fold(0, usize::saturating_add);
        // Blocks on a CU share what it has.
        let arch = self.info.arch;
        let per_cu = tile.info().on(arch).per_cu;
        let rounds = blocks.div_ceil(cus.saturating_mul(per_cu)).max(1) as f64;
        let resident = blocks.div_ceil(cus).min(per_cu).max(1) as f64;
        let share = batch as f64 / cus as f64 * rates.byte;
        let (mut matrix, mut loads) = (Rounds::default(), Rounds::default());
        let (mut memory, mut planes) = (0.0, rates.launch);
        for (tile, precision, n) in self.products(tile) {
            let t = tile.info();
            let bytes = precision.bytes(k);
            let weight = precision.weight_bits() as f64 / precision.bits() as f64;
            let stages = bytes.div_ceil(STAGE_BYTES).max(1).div_ceil(splits) as f64;
            let part = blocks_of(&t, n) as f64 / blocks.max(1) as f64;
            let stage = resident * (t.m * t.n) as f64 * t.on(arch).time * rates.stage;
            // Prologue and epilogue weigh as some stages.
            let least = if tile.skinny() { 0.0 } else { rates.least };
            matrix.add(part, (stages + 8.0) * stage.max(least));
            // The weights come from memory, the rows of all blocks from L2. Through LDS, tiles of the same weights are at work
            // together, and both come from L2.
            let (of_w, of_x) = (t.n as f64 * weight, m.min(t.m) as f64);
            let row = if tile.skinny() {
                of_w * rates.byte / ALONE + of_x * rates.near
            } else {
                (of_w + of_x) * rates.to_lds
            };
            loads.add(part, resident * stages * STAGE_BYTES as f64 * row);
            memory += (m as f64 + n as f64 * weight) * bytes as f64 * share;
            // Four bytes are written and read again.
            planes += 8.0 * splits as f64 * m as f64 * n as f64 * share;
        }
        let busiest = matrix.time(rounds).max(loads.time(rounds)).max(memory);
        busiest + if splits > 1 { planes } else { 0.0 }
    }

    /// With the parts of K that make its time shortest, and that.
    fn fastest(&self, tile: GemmTile) -> (GemmConfig, f64) {
        let t = tile.info();
        let parts = self.precision.bytes(self.sizes[3]).div_ceil(tile.stretch(self.info.arch)).max(1);
        let most = parts.min(self.most_splits);
        let group = if tile.skinny() { 1 } else { (2048 / t.m).max(1) };
        let configs = || {
            let splits = SPLITS.into_iter().filter(|&n| n == 1 || n <= most);
            // As many as there are, of whole stretches each.
            let splits = splits.map(|n| parts.div_ceil(parts.div_ceil(n)));
            splits.map(|splits| GemmConfig { tile, splits, group }).map(|config| (config, self.time(config)))
        };
        let shortest = configs().fold(f64::INFINITY, |shortest, (_, time)| time.min(shortest));
        // The fewest parts within a tenth of it: the model is no better than that, and planes are traffic.
        let few = configs().find(|(_, time)| *time <= 1.1 * shortest);
        few.unwrap_or((GemmConfig { tile, splits: 1, group }, f64::INFINITY))
    }

    /// Each tile that can make the product, with its parts of K and modelled nanoseconds.
    pub fn candidates(&self, serves: impl Fn(GemmTile) -> bool) -> Vec<(GemmConfig, f64)> {
        let fits = |&tile: &GemmTile| {
            serves(tile)
                && (tile != GemmTile::Elements) == self.vectors
                && (!tile.skinny() || self.sizes[1] <= tile.info().m)
        };
        GemmTile::ALL.into_iter().filter(fits).map(|tile| self.fastest(tile)).collect()
    }

    /// The choice, among the tiles that there are kernels of.
    pub fn choose(&self, serves: impl Fn(GemmTile) -> bool) -> GemmConfig {
        // The fewest rows that hold all. On sm_90 the narrow tiles, of which each reads all rows, can ask L2 for more than it has;
        // and of those of 16 rows the narrowest was the fastest on an H200, of few blocks by twice as many waves.
        let amd = self.info.arch.is_amd();
        let blocks = self.sizes[0].saturating_mul(self.sizes[2].div_ceil(16));
        let few = blocks <= 2 * self.info.compute_units as usize
            && matches!(self.precision, Precision::Bf16 | Precision::F16);
        let skinny: &[GemmTile] = match self.sizes[1] {
            65.. => &[],
            33.. if amd => &[GemmTile::S64x32],
            33.. => &[GemmTile::S64x32, GemmTile::T64x64],
            17.. if amd => &[GemmTile::S32x32],
            17.. => &[GemmTile::S32x32, GemmTile::T64x64],
            _ if !amd && few && serves(GemmTile::S16x16Twice) => &[GemmTile::S16x16Twice],
            _ if !amd && serves(GemmTile::S16x16) => &[GemmTile::S16x16],
            _ => &[GemmTile::S16x16, GemmTile::S16x32],
        };
        let fastest = |tiles: &[GemmTile], fits: &dyn Fn(GemmTile) -> bool| {
            let times =
                tiles.iter().filter(|&&tile| serves(tile) && fits(tile)).map(|&tile| self.fastest(tile));
            times.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(config, _)| config)
        };
        let through_lds = |tile: GemmTile| !tile.skinny() && (tile != GemmTile::Elements) == self.vectors;
        fastest(skinny, &|_| self.vectors)
            .or_else(|| fastest(&GemmTile::ALL, &through_lds))
            .unwrap_or(GemmConfig { tile: GemmTile::Elements, splits: 1, group: 1 })
    }
}

impl GemmConfig {
    /// The choice for `batch` products of `[m, k]` by `[n, k]` on a device. `vectors`: rows begin on 16 bytes and are a
    /// multiple of 16 bytes long. `most_splits`: that there is a workspace for. `serves`: which tiles there are kernels of.
    pub(crate) fn choose(
        info: &DeviceInfo,
        precision: Precision,
        sizes: [usize; 4],
        vectors: bool,
        most_splits: usize,
        serves: impl Fn(GemmTile) -> bool,
    ) -> Self {
        Job { info, precision, sizes, vectors, most_splits, second: None }.choose(serves)
    }

    /// Elements of K in each part but perhaps the last, and how many parts are not empty.
    pub(crate) fn parts(
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
        let tiles =
            GemmTile::ALL.into_iter().flat_map(|tile| [Arch::Gfx942, Arch::Sm90].map(|arch| (tile, arch)));
        for (tile, arch) in tiles {
            for precision in [Precision::Bf16, Precision::I8, Precision::Fp4] {
                for (k, multiple) in [(0, 1), (1, 1), (77, 1), (4096, 1), (7168, 128), (100_000, 1 << 14)] {
                    for splits in 1..40 {
                        let config = GemmConfig { tile, splits, group: 1 };
                        let (each, parts) = config.parts(arch, k, precision, multiple);
                        assert!((1..=splits).contains(&parts) && each % multiple == 0, "{config:?} {k}");
                        assert!(parts * each >= k && (parts - 1) * each < k.max(1), "{config:?} {k}");
                        assert_eq!(precision.bytes(each) % tile.stretch(arch), 0, "{config:?} {k}");
                    }
                }
            }
        }
    }

    #[test]
    fn tables_are_in_order() {
        for (i, tile) in GemmTile::ALL.into_iter().enumerate() {
            assert_eq!(tile.index(), i);
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
            // Most CUs have work, if K has enough of it.
            let config = choose(m, 1280, 1 << 20, true);
            let (_, n_tiles) = config.tiles(m, 1280);
            assert!(n_tiles * config.splits * 4 >= 3 * cus, "{config:?}");
            // Where parts would save less than they cost, K is whole.
            assert_eq!(choose(m, 2112, 1024, true).splits, 1);
            assert_eq!(choose(m, 14336, 4096, true).splits, 1);
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

    #[test]
    fn two_products_of_a_launch_take_as_long_as_one_of_their_columns() {
        let device = Device::open("emu:gfx942").unwrap();
        let job = |precision, n, second| Job {
            info: device.info(),
            precision,
            sizes: [1, 48, n, 7168],
            vectors: true,
            most_splits: 32,
            second,
        };
        let of = |precision, n| Some(Second { precision, n });
        for tile in [GemmTile::T64x64, GemmTile::S64x32] {
            for splits in [1, 3] {
                let config = GemmConfig { tile, splits, group: 1 };
                let one = job(Precision::Bf16, 3072, None).time(config);
                let two = job(Precision::Bf16, 2048, of(Precision::Bf16, 1024)).time(config);
                // But each reads rows of its own.
                assert!(two > 0.999 * one && two < 1.02 * one, "{config:?}: {one} {two}");
                // Codes are half as long.
                let codes = job(Precision::Fp8, 2048, of(Precision::Fp8, 1024)).time(config);
                let mixed = job(Precision::Fp8, 2048, of(Precision::Bf16, 1024)).time(config);
                assert!(codes < mixed && mixed <= two, "{config:?}: {codes} {mixed} {two}");
            }
        }
    }

    /// What was measured to be the best on an H200: large products and up to 16 rows. Else, what asks less of L2.
    #[test]
    fn the_choice_on_an_h200() {
        let mut info = Device::open("emu:gfx942").unwrap().info().clone();
        (info.arch, info.compute_units) = (Arch::Sm90, 132);
        let choose = |[m, n, k]: [usize; 3], serves: fn(GemmTile) -> bool| {
            GemmConfig::choose(&info, Precision::Bf16, [1, m, n, k], true, 32, serves)
        };
        let plain: fn(GemmTile) -> bool = |tile| tile != GemmTile::T256x128;
        let gated = |tile| !matches!(tile, GemmTile::T256x128 | GemmTile::S16x16 | GemmTile::S16x16Twice);
        for size in [2048, 4096, 8192, 16384] {
            let config = choose([size; 3], plain);
            assert_eq!((config.tile, config.splits), (GemmTile::T128x128, 1), "{size}");
        }
        for m in [1, 8, 16] {
            for [n, k] in [[6144, 4096], [28672, 4096], [4096, 14336], [57344, 8192], [8192, 28672]] {
                let narrow = if n == 4096 { GemmTile::S16x16Twice } else { GemmTile::S16x16 };
                assert_eq!(choose([m, n, k], plain).tile, narrow, "{m} {n} {k}");
                assert_eq!(choose([m, n, k], gated).tile, GemmTile::S16x32, "{m} {n} {k}");
            }
        }
        // Twice as many rows for each weight as S64x32 has.
        for [n, k] in [[4096, 4096], [28672, 4096], [4096, 14336]] {
            assert_eq!(choose([64, n, k], plain).tile, GemmTile::T64x64, "{n} {k}");
        }
        // Whatever the sizes, none that spills while there is another.
        let block = |tile| !matches!(tile, GemmTile::T256x256 | GemmTile::T128x128);
        for m in [65, 128, 500, 1 << 14] {
            for serves in [plain, block] {
                let config = choose([m, 7168, 7168], serves);
                assert!(config.tile.shape().0 < 256, "{m}: {config:?}");
            }
        }
    }
}
