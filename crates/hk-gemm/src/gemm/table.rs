//! Which tiles have kernels: one row per (tile, kernel), for each combination of operand types, scales and epilogue.
//!
//! Dispatch, [`gemm_workspace`](crate::gemm_workspace), `hk inspect` and the tests read this table and nothing else.

use super::params::{
    BlockAndPlain, BlockParams, BulkParams, MixedAndPlain, MixedParams, Params, QuantXParams,
};
use super::select::GemmTile;
use hk_core::{DType, KernelRef};

/// Operand types of a GEMM: activations by weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// `bf16` by `bf16`.
    Bf16,
    /// `f16` by `f16`.
    F16,
    /// `i8` by `i8`, summed in `i32`.
    I8,
    /// The fp8 of the device's matrix instructions by itself; mxfp8 too.
    Fp8,
    /// 16-bit floats by int8 or fp8.
    HalfByByte,
    /// 16-bit floats by mxfp4.
    HalfByFp4,
    /// The fp8 of the device's matrix instructions by mxfp4.
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

    /// Bytes of so many elements of the activations.
    pub(crate) const fn bytes(self, elements: usize) -> usize {
        (elements / 8).saturating_mul(self.bits()).saturating_add((elements % 8 * self.bits()).div_ceil(8))
    }
}

/// The order of e8m0 scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MxOrder {
    /// Any: a byte at a time is loaded.
    Any,
    /// The four of 128 columns of a row are a 32-bit word.
    Packed,
    /// Pre-shuffled, whole groups of 256 columns.
    Shuffled,
}

impl MxOrder {
    /// Of contiguous scales of K columns.
    pub fn of(shuffled: bool, k: usize) -> Self {
        let (order, columns) = if shuffled { (Self::Shuffled, 256) } else { (Self::Packed, 128) };
        if k.is_multiple_of(columns) { order } else { Self::Any }
    }
}

/// The kernel of a tile, which takes the parameters `P`.
#[derive(Debug)]
pub struct TileKernel<P: 'static> {
    pub tile: GemmTile,
    pub kernel: KernelRef<P>,
    /// Kernels for scales in these orders.
    pub packed: Option<KernelRef<P>>,
    pub shuffled: Option<KernelRef<P>>,
}

impl<P> TileKernel<P> {
    pub fn kernel(&self, scales: MxOrder) -> KernelRef<P> {
        let of_order = match scales {
            MxOrder::Any => None,
            MxOrder::Packed => self.packed,
            MxOrder::Shuffled => self.shuffled,
        };
        of_order.unwrap_or(self.kernel)
    }

    /// The kernel of a tile among `rows`.
    pub fn find(rows: &'static [Self], tile: GemmTile) -> Option<&'static Self> {
        rows.iter().find(|row| row.tile == tile)
    }
}

/// The kernels of a family, by the parameters that they take.
#[derive(Debug)]
pub enum Kernels {
    Params(&'static [TileKernel<Params>]),
    BlockParams(&'static [TileKernel<BlockParams>]),
    MixedParams(&'static [TileKernel<MixedParams>]),
    QuantXParams(&'static [TileKernel<QuantXParams>]),
    BlockAndPlain(&'static [TileKernel<BlockAndPlain>]),
    MixedAndPlain(&'static [TileKernel<MixedAndPlain>]),
}

/// Runs `$body` for the rows.
macro_rules! each_row {
    ($kernels:expr, $rows:ident => $body:expr) => {
        match $kernels {
            Kernels::Params($rows) => $body,
            Kernels::BlockParams($rows) => $body,
            Kernels::MixedParams($rows) => $body,
            Kernels::QuantXParams($rows) => $body,
            Kernels::BlockAndPlain($rows) => $body,
            Kernels::MixedAndPlain($rows) => $body,
        }
    };
}

impl Kernels {
    pub fn has(&self, tile: GemmTile) -> bool {
        each_row!(self, rows => TileKernel::find(rows, tile).is_some())
    }

    /// Name of a tile's kernel.
    #[cfg(feature = "registry")]
    pub fn name(&self, tile: GemmTile, scales: MxOrder) -> Option<&'static str> {
        each_row!(self, rows => TileKernel::find(rows, tile).map(|row| row.kernel(scales).name()))
    }
}

/// Scales that a main loop applies. Scales of whole rows are applied by the epilogue, and are none here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleKind {
    None,
    /// f32, groups of 128 columns or more.
    Block,
    /// f32, groups of fewer than 128 columns.
    ShortBlock,
    /// e8m0, groups of 32 columns.
    Mx,
}

/// What a kernel does beside one GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    Plain,
    /// Multiplies two halves of the columns: `activation(gate) * value`.
    Gated,
    /// Quantizes `a` to the type of `w` in registers.
    Prequant,
    /// Writes the activations as MX blocks.
    QuantX,
    /// A second GEMM of 16-bit floats of this type runs in the same launch.
    Beside(DType),
}

/// The kernels of one combination.
#[derive(Debug)]
pub struct Family {
    pub a: DType,
    pub w: DType,
    pub scales: ScaleKind,
    pub variant: Variant,
    pub precision: Precision,
    pub kernels: Kernels,
}

impl Family {
    /// The family of a combination, if there is one.
    pub fn find(a: DType, w: DType, scales: ScaleKind, variant: Variant) -> Option<&'static Self> {
        Self::all().find(|f| (f.a, f.w, f.scales, f.variant) == (a, w, scales, variant))
    }

    pub fn all() -> impl Iterator<Item = &'static Self> {
        FAMILIES.iter().flat_map(|families| families.iter())
    }
}

macro_rules! family {
    ($a:ident, $w:ident, $scales:ident, $variant:expr, $precision:ident, $params:ident [
        $($tile:ident: [$($name:expr),+] $(, packed [$($packed:expr),+])? $(, shuffled [$($shuffled:expr),+])?;)+
    ]) => {
        Family {
            a: DType::$a,
            w: DType::$w,
            scales: ScaleKind::$scales,
            variant: $variant,
            precision: Precision::$precision,
            kernels: Kernels::$params(&[$(TileKernel {
                tile: GemmTile::$tile,
                kernel: const { $params::kernel(concat!($($name),+)) },
                packed: family!(@ $params $($($packed),+)?),
                shuffled: family!(@ $params $($($shuffled),+)?),
            }),+]),
        }
    };
    (@ $params:ident) => { None };
    (@ $params:ident $($packed:expr),+) => { Some(const { $params::kernel(concat!($($packed),+)) }) };
}

/// 16-bit floats by themselves, and by mxfp4.
macro_rules! halves {
    ($t:ident, $n:literal) => {
        &[
            family!($t, $t, None, Variant::Plain, $t, Params [
                    T256x256: ["gemm_", $n, "_256x256"];
                    T128x256: ["gemm_", $n, "_128x256"];
                    T128x128: ["gemm_", $n, "_128x128"];
                    T64x128: ["gemm_", $n, "_64x128"];
                    T64x64: ["gemm_", $n, "_64x64"];
                    Elements: ["gemm_", $n, "_64x64_scalar"];
                    S16x16: ["gemm_", $n, "_16x16"];
                    S16x16Twice: ["gemm_", $n, "_16x16_twice"];
                    S16x32: ["gemm_", $n, "_16x32"];
                    S32x32: ["gemm_", $n, "_32x32"];
                    S64x32: ["gemm_", $n, "_64x32"];
                ]
            ),
            family!($t, $t, None, Variant::Gated, $t, Params [
                    T256x256: ["gemm_", $n, "_256x256_gated"];
                    T128x256: ["gemm_", $n, "_128x256_gated"];
                    T128x128: ["gemm_", $n, "_128x128_gated"];
                    T64x64: ["gemm_", $n, "_64x64_gated"];
                    Elements: ["gemm_", $n, "_64x64_gated_scalar"];
                    S16x32: ["gemm_", $n, "_16x32_gated"];
                    S32x32: ["gemm_", $n, "_32x32_gated"];
                    S64x32: ["gemm_", $n, "_64x32_gated"];
                ]
            ),
            family!($t, $t, None, Variant::QuantX, $t, QuantXParams [
                    T256x256: ["gemm_", $n, "_256x256_quant_x"];
                    T128x128: ["gemm_", $n, "_128x128_quant_x"];
                    T64x64: ["gemm_", $n, "_64x64_quant_x"];
                    Elements: ["gemm_", $n, "_64x64_quant_x_scalar"];
                    S16x16: ["gemm_", $n, "_16x16_quant_x"];
                    S16x32: ["gemm_", $n, "_16x32_quant_x"];
                    S32x32: ["gemm_", $n, "_32x32_quant_x"];
                    S64x32: ["gemm_", $n, "_64x32_quant_x"];
                ]
            ),
            family!($t, Fp4x2, Mx, Variant::Plain, HalfByFp4, MixedParams [
                    T128x128: ["gemm_", $n, "_wfp4_128x128"];
                    T64x64: ["gemm_", $n, "_wfp4_64x64"];
                    Elements: ["gemm_", $n, "_wfp4_64x64_scalar"];
                    S16x32: ["gemm_", $n, "_wfp4_16x32"];
                    S32x32: ["gemm_", $n, "_wfp4_32x32"];
                    S64x32: ["gemm_", $n, "_wfp4_64x32"];
                ]
            ),
            family!($t, Fp4x2, Mx, Variant::Prequant, HalfByFp4, MixedParams [
                    S16x32: ["gemm_", $n, "_to_fp4_wfp4_16x32"];
                    S32x32: ["gemm_", $n, "_to_fp4_wfp4_32x32"];
                ]
            ),
        ]
    };
}

/// int8 or fp8 by itself.
macro_rules! bytes {
    ($t:ident, $n:literal, $precision:ident) => {
        &[
            family!($t, $t, None, Variant::Plain, $precision, Params [
                    T256x256: ["gemm_", $n, "_256x256"];
                    T128x256: ["gemm_", $n, "_128x256"];
                    T128x128: ["gemm_", $n, "_128x128"];
                    T64x128: ["gemm_", $n, "_64x128"];
                    T64x64: ["gemm_", $n, "_64x64"];
                    Elements: ["gemm_", $n, "_64x64_scalar"];
                    S16x16: ["gemm_", $n, "_16x16"];
                    S16x16Twice: ["gemm_", $n, "_16x16_twice"];
                    S16x32: ["gemm_", $n, "_16x32"];
                    S32x32: ["gemm_", $n, "_32x32"];
                    S64x32: ["gemm_", $n, "_64x32"];
                ]
            ),
            family!($t, $t, Block, Variant::Plain, $precision, BlockParams [
                    T256x128: ["gemm_", $n, "_block_256x128"];
                    T128x128: ["gemm_", $n, "_block_128x128"];
                    T96x128: ["gemm_", $n, "_block_96x128"];
                    T64x128: ["gemm_", $n, "_block_64x128"];
                    T64x64: ["gemm_", $n, "_block_64x64"];
                    Elements: ["gemm_", $n, "_block_64x64_scalar"];
                    S16x16: ["gemm_", $n, "_block_16x16"];
                    S16x32: ["gemm_", $n, "_block_16x32"];
                    S32x32: ["gemm_", $n, "_block_32x32"];
                    S64x32: ["gemm_", $n, "_block_64x32"];
                ]
            ),
            family!($t, $t, ShortBlock, Variant::Plain, $precision, BlockParams [
                    T64x64: ["gemm_", $n, "_group_64x64"];
                    Elements: ["gemm_", $n, "_group_64x64_scalar"];
                ]
            ),
        ]
    };
}

/// 16-bit floats by int8 or fp8.
macro_rules! half_by_byte {
    ($h:ident, $half:literal, $t:ident, $n:literal) => {
        &[
            family!($h, $t, Block, Variant::Plain, HalfByByte, MixedParams [
                    T128x128: ["gemm_", $half, "_w", $n, "_128x128"];
                    T64x64: ["gemm_", $half, "_w", $n, "_64x64"];
                    Elements: ["gemm_", $half, "_w", $n, "_64x64_scalar"];
                    S16x32: ["gemm_", $half, "_w", $n, "_16x32"];
                    S32x32: ["gemm_", $half, "_w", $n, "_32x32"];
                    S64x32: ["gemm_", $half, "_w", $n, "_64x32"];
                ]
            ),
            family!($h, $t, ShortBlock, Variant::Plain, HalfByByte, MixedParams [
                    T64x64: ["gemm_", $half, "_w", $n, "_group_64x64"];
                    Elements: ["gemm_", $half, "_w", $n, "_group_64x64_scalar"];
                ]
            ),
            family!($h, $t, Block, Variant::Prequant, HalfByByte, MixedParams [
                    S16x32: ["gemm_", $half, "_to_w", $n, "_16x32"];
                    S32x32: ["gemm_", $half, "_to_w", $n, "_32x32"];
                ]
            ),
        ]
    };
}

/// fp8 with MX scales: by itself, and by mxfp4.
macro_rules! mx8 {
    ($t:ident) => {
        &[
            family!($t, $t, Mx, Variant::Plain, Fp8, MixedParams [
                    T256x128: ["gemm_afp8wfp8_256x128"], packed ["gemm_afp8wfp8_256x128_packed"];
                    T64x64: ["gemm_afp8wfp8_64x64"], packed ["gemm_afp8wfp8_64x64_packed"];
                    Elements: ["gemm_afp8wfp8_64x64_scalar"];
                    S16x32: ["gemm_afp8wfp8_16x32"];
                    S32x32: ["gemm_afp8wfp8_32x32"];
                    S64x32: ["gemm_afp8wfp8_64x32"];
                ]
            ),
            family!($t, Fp4x2, Mx, Variant::Plain, Fp8ByFp4, MixedParams [
                    T128x128: ["gemm_a8wfp4_128x128"], packed ["gemm_a8wfp4_128x128_packed"];
                    T64x64: ["gemm_a8wfp4_64x64"], packed ["gemm_a8wfp4_64x64_packed"];
                    Elements: ["gemm_a8wfp4_64x64_scalar"];
                    S16x32: ["gemm_a8wfp4_16x32"];
                    S32x32: ["gemm_a8wfp4_32x32"];
                    S64x32: ["gemm_a8wfp4_64x32"];
                ]
            ),
        ]
    };
}

/// fp8 with block scales beside a GEMM of 16-bit floats.
macro_rules! fp8_beside {
    ($t:ident, $h:ident, $half:literal) => {
        &[
            family!($t, $t, Block, Variant::Beside(DType::$h), Fp8, BlockAndPlain [
                    T256x128: ["gemm_fp8_block_and_", $half, "_256x128"];
                    T64x64: ["gemm_fp8_block_and_", $half, "_64x64"];
                    Elements: ["gemm_fp8_block_and_", $half, "_64x64_scalar"];
                    S16x32: ["gemm_fp8_block_and_", $half, "_16x32"];
                    S32x32: ["gemm_fp8_block_and_", $half, "_32x32"];
                    S64x32: ["gemm_fp8_block_and_", $half, "_64x32"];
                ]
            ),
            family!($t, $t, ShortBlock, Variant::Beside(DType::$h), Fp8, BlockAndPlain [
                    T64x64: ["gemm_fp8_group_and_", $half, "_64x64"];
                    Elements: ["gemm_fp8_group_and_", $half, "_64x64_scalar"];
                ]
            ),
        ]
    };
}

/// mxfp4 beside a GEMM of 16-bit floats.
macro_rules! fp4_beside {
    ($h:ident, $half:literal) => {
        &[family!(Fp4x2, Fp4x2, Mx, Variant::Beside(DType::$h), Fp4, MixedAndPlain [
            T256x128: ["gemm_fp4_and_", $half, "_256x128"], packed ["gemm_fp4_and_", $half, "_256x128_packed"];
            T64x64: ["gemm_fp4_and_", $half, "_64x64"], packed ["gemm_fp4_and_", $half, "_64x64_packed"];
            Elements: ["gemm_fp4_and_", $half, "_64x64_scalar"];
            S16x32: ["gemm_fp4_and_", $half, "_16x32"];
            S32x32: ["gemm_fp4_and_", $half, "_32x32"];
            S64x32: ["gemm_fp4_and_", $half, "_64x32"];
        ])]
    };
}

static FAMILIES: &[&[Family]] = &[
    halves!(Bf16, "bf16"),
    halves!(F16, "f16"),
    bytes!(I8, "i8", I8),
    bytes!(Fp8E4M3, "fp8", Fp8),
    bytes!(Fp8E4M3Fnuz, "fp8", Fp8),
    half_by_byte!(Bf16, "bf16", I8, "i8"),
    half_by_byte!(F16, "f16", I8, "i8"),
    half_by_byte!(Bf16, "bf16", Fp8E4M3, "fp8"),
    half_by_byte!(F16, "f16", Fp8E4M3, "fp8"),
    half_by_byte!(Bf16, "bf16", Fp8E4M3Fnuz, "fp8"),
    half_by_byte!(F16, "f16", Fp8E4M3Fnuz, "fp8"),
    mx8!(Fp8E4M3),
    mx8!(Fp8E4M3Fnuz),
    &[family!(Fp4x2, Fp4x2, Mx, Variant::Plain, Fp4, MixedParams [
            T256x256: ["gemm_afp4wfp4_256x256"], packed ["gemm_afp4wfp4_256x256_packed"], shuffled ["gemm_afp4wfp4_256x256_shuffled"];
            T160x256: ["gemm_afp4wfp4_160x256"], packed ["gemm_afp4wfp4_160x256_packed"], shuffled ["gemm_afp4wfp4_160x256_shuffled"];
            T96x256: ["gemm_afp4wfp4_96x256"], packed ["gemm_afp4wfp4_96x256_packed"], shuffled ["gemm_afp4wfp4_96x256_shuffled"];
            T256x128: ["gemm_afp4wfp4_256x128"], packed ["gemm_afp4wfp4_256x128_packed"], shuffled ["gemm_afp4wfp4_256x128_shuffled"];
            T128x128: ["gemm_afp4wfp4_128x128"], packed ["gemm_afp4wfp4_128x128_packed"], shuffled ["gemm_afp4wfp4_128x128_shuffled"];
            T64x128: ["gemm_afp4wfp4_64x128"], packed ["gemm_afp4wfp4_64x128_packed"], shuffled ["gemm_afp4wfp4_64x128_shuffled"];
            T64x64: ["gemm_afp4wfp4_64x64"], packed ["gemm_afp4wfp4_64x64_packed"], shuffled ["gemm_afp4wfp4_64x64_shuffled"];
            Elements: ["gemm_afp4wfp4_64x64_scalar"];
            S16x32: ["gemm_afp4wfp4_16x32"];
            S32x32: ["gemm_afp4wfp4_32x32"];
            S64x32: ["gemm_afp4wfp4_64x32"];
        ]
    )],
    fp8_beside!(Fp8E4M3, Bf16, "bf16"),
    fp8_beside!(Fp8E4M3, F16, "f16"),
    fp8_beside!(Fp8E4M3Fnuz, Bf16, "bf16"),
    fp8_beside!(Fp8E4M3Fnuz, F16, "f16"),
    fp4_beside!(Bf16, "bf16"),
    fp4_beside!(F16, "f16"),
];

macro_rules! bulk {
    ($n:literal) => {
        &[
            bulk!(@ T64x64, "gemm_", $n, "_64x64_bulk"),
            bulk!(@ T128x128, "gemm_", $n, "_128x128_bulk"),
            bulk!(@ T128x256, "gemm_", $n, "_128x256_bulk"),
        ]
    };
    (@ $tile:ident, $($name:expr),+) => {
        TileKernel {
            tile: GemmTile::$tile,
            kernel: const { BulkParams::kernel(concat!($($name),+)) },
            packed: None,
            shuffled: None,
        }
    };
}

/// The kernels of 16-bit floats whose loads are bulk tensor copies, in code objects for sm_90a: those of `Variant::Plain` for one output,
/// whole K, N a multiple of 16. See `hip/include/gemm/bulk.h`.
pub fn bulk_kernel(dtype: DType, tile: GemmTile) -> Option<KernelRef<BulkParams>> {
    let rows: &'static [TileKernel<BulkParams>] = match dtype {
        DType::Bf16 => bulk!("bf16"),
        DType::F16 => bulk!("f16"),
        _ => return None,
    };
    TileKernel::find(rows, tile).map(|row| row.kernel)
}

/// Most rows of a tile whose rows choose their matrix: groups begin on multiples of it.
pub(crate) const GROUPED_ROWS: usize = 128;

/// The kernels that can serve a call.
#[derive(Debug, Clone, Copy)]
pub struct Eligible {
    pub family: &'static Family,
    /// Most rows of a tile, and a multiple of its rows: groups begin on multiples of it.
    pub max_rows: usize,
    /// Fewer than 4 rows of `w` share a scale.
    pub fine_scales: bool,
}

impl Eligible {
    pub const fn new(family: &'static Family) -> Self {
        Self { family, max_rows: usize::MAX, fine_scales: false }
    }

    /// Whether a tile has a kernel for the call. Kernels whose waves share K read one scale for the four rows of `w` of a lane.
    pub fn serves(&self, tile: GemmTile) -> bool {
        let rows = tile.shape().0;
        (self.max_rows == usize::MAX || self.max_rows.is_multiple_of(rows))
            && self.family.kernels.has(tile)
            && !(self.fine_scales && tile.skinny())
    }

    /// The tiles that have a kernel.
    pub fn tiles(self) -> impl Iterator<Item = GemmTile> {
        GemmTile::ALL.into_iter().filter(move |&tile| self.serves(tile))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_distinct() {
        let mut seen = Vec::new();
        for family in Family::all() {
            let key = (family.a, family.w, family.scales, family.variant);
            assert!(!seen.contains(&key), "{key:?}");
            seen.push(key);
            let tiles: Vec<_> = each_row!(&family.kernels, rows => rows.iter().map(|row| row.tile).collect());
            for (i, tile) in tiles.iter().enumerate() {
                assert!(!tiles[..i].contains(tile), "{key:?}: {tile:?} twice");
            }
        }
    }

    /// Every kernel is in the code objects of both targets.
    #[test]
    fn rows_are_entry_points() {
        for spec in ["emu:gfx942", "emu:gfx950"] {
            let stream = hk_core::Device::open(spec).unwrap().create_stream().unwrap();
            for family in Family::all() {
                each_row!(&family.kernels, rows => for row in *rows {
                    for scales in [MxOrder::Any, MxOrder::Packed, MxOrder::Shuffled] {
                        stream.kernel(row.kernel(scales)).unwrap_or_else(|e| panic!("{spec}: {e}"));
                    }
                });
            }
        }
    }

    /// The steps that a block has in LDS: all of the pipeline if loads go straight to LDS, else half of them.
    #[cfg(feature = "registry")]
    #[test]
    fn pipelines_are_as_long_as_the_lds_of_their_kernels() {
        use super::super::select::{Pipeline, STAGE_BYTES};
        use hk_core::Arch::{Gfx942, Gfx950};
        for (arch, spec) in [(Gfx942, "emu:gfx942"), (Gfx950, "emu:gfx950")] {
            let stream = hk_core::Device::open(spec).unwrap().create_stream().unwrap();
            let families = Family::all().filter(|f| !matches!(f.variant, Variant::Beside(_)));
            for f in families {
                each_row!(&f.kernels, rows => for row in rows.iter().filter(|row| !row.tile.skinny()) {
                    for scales in [MxOrder::Any, MxOrder::Packed, MxOrder::Shuffled] {
                        let kernel = stream.kernel(row.kernel(scales)).unwrap();
                        let ((m, n), lds) = (row.tile.shape(), kernel.info().lds_bytes as usize);
                        let by_bytes = kernel.info().name == row.kernel.name();
                        let scales = if by_bytes { MxOrder::Any } else { scales };
                        let Pipeline { step, stages } = row.tile.pipeline(arch, f.precision, (f.scales, scales), n);
                        let of_w = if f.precision == Precision::Fp8ByFp4 { STAGE_BYTES } else { step };
                        let streamed = arch == Gfx942 && matches!(row.tile, GemmTile::T128x128 | GemmTile::T96x128) && step == 128 && of_w == step;
                        // Rings of packed scales have at least two chunks, 16 bytes of a row each.
                        let rings = if arch == Gfx950 && scales == MxOrder::Packed { 32 * (m + n) } else { 0 };
                        let held = (lds - rings) / (m * step + if streamed && lds < 32768 { 0 } else { n * of_w });
                        assert!([stages, stages / 2].contains(&held), "{spec} {}: {lds} B, {stages} x {step}", kernel.info().name);
                    }
                });
            }
        }
    }
}
