//! Products of groups of rows, whose places are on the device: DeepGEMM's forms.

use crate::a8w8::{self, MatrixCode};
use crate::a16w16::{self, Half};
use crate::problem::{
    BlockScales, BlockShape, Blocks, GemmOptions, Grouping, NAMES, Names, Product, Scales, To,
};
use crate::views::Weight;
use hk_core::{Float, Result, Stream, TensorView, TensorViewMut};

const MASKED: Names = Names { groups: "masked_m", ..NAMES };
const CONTIGUOUS: Names = Names { groups: "m_group", ..NAMES };

/// Scales of codes that are multiplied in groups.
#[derive(Debug, Clone, Copy)]
pub enum GroupedScales<'a> {
    /// Of rows: `a` as many as it has rows, `w` `[G, N]` or `[G, N, 1]`.
    Rows {
        /// Of `a`.
        a: TensorView<'a, f32>,
        /// Of `w`.
        w: TensorView<'a, f32>,
    },
    /// Of blocks: `a` `[.., groups of K]`, `w` `[G, groups of N, groups of K]`.
    Blocks {
        /// Of `a`.
        a: TensorView<'a, f32>,
        /// Of `w`.
        w: TensorView<'a, f32>,
        /// What has one.
        group: BlockShape,
    },
}

impl<'a> GroupedScales<'a> {
    fn of<T: MatrixCode>(self, product: Product<'a, T, T>) -> Product<'a, T, T> {
        match self {
            Self::Rows { a, w } => Product { scales: Scales { x: Some(a), w: Some(w) }, ..product },
            Self::Blocks { a, w, group } => {
                let blocks = Blocks::F32(BlockScales { x: a, w, group });
                Product { kernels: group.kernels(T::BLOCK), blocks, ..product }
            }
        }
    }
}

/// Products of the first rows of each group: `y[g, m, n] = sum_k a[g, m, k] w[g, n, k]` for `m < masked_m[g]`.
///
/// | arg        | shape          | dtype                | layout                                                        |
/// |------------|----------------|----------------------|---------------------------------------------------------------|
/// | `a`        | `[G, Mmax, K]` | `bf16`, `f16`        | unit stride on `K`, others free                               |
/// | `w`        | `[G, N, K]`    | as `a`               | likewise, or a [`ShuffledWeight`](crate::ShuffledWeight)      |
/// | `masked_m` | `[G]`          | `i32`                | contiguous                                                    |
/// | `y`        | `[G, Mmax, N]` | `bf16`, `f16`, `f32` | unit stride on `N`, others free                               |
///
/// Rows from `masked_m[g]` on are not written. A number below zero is zero, one above `Mmax` is `Mmax`; the host does not read it,
/// and tiles without rows end at once. All else is as of [`batched_gemm_bf16`](crate::batched_gemm_bf16).
///
/// # Errors
/// As `batched_gemm_bf16`.
pub fn deepgemm_masked<'a, T: Half, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<Weight<'a, T>>,
    masked_m: TensorView<'a, i32>,
    y: TensorViewMut<Y>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "deepgemm_masked";
    a.dims::<3>(OP, "a")?;
    let product = a16w16::product(OP, a, w, false, options);
    Product { names: MASKED, grouping: Grouping::Masked(masked_m), ..product }.run(stream, To::Y(y), None)
}

/// [`deepgemm_masked`] of codes with scales: of rows, `a` `[G, Mmax]` or `[G, Mmax, 1]`, or of blocks, `a`
/// `[G, Mmax, groups of K]`.
///
/// # Errors
/// As [`batched_gemm_a8w8`](crate::batched_gemm_a8w8), and [`gemm_a8w8_blockscale`](crate::gemm_a8w8_blockscale).
pub fn deepgemm_masked_a8w8<'a, T: MatrixCode, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<Weight<'a, T>>,
    scales: GroupedScales<'a>,
    masked_m: TensorView<'a, i32>,
    y: TensorViewMut<Y>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "deepgemm_masked_a8w8";
    a.dims::<3>(OP, "a")?;
    let product = scales.of(a8w8::product(OP, stream, a, w, options)?);
    Product { names: MASKED, grouping: Grouping::Masked(masked_m), ..product }.run(stream, To::Y(y), None)
}

/// Products of rows that are sorted by groups: `y[m, n] = sum_k a[m, k] w[m_group[m], n, k]`.
///
/// | arg       | shape       | dtype                | layout                                                   |
/// |-----------|-------------|----------------------|----------------------------------------------------------|
/// | `a`       | `[M, K]`    | `bf16`, `f16`        | unit stride on `K`, any row stride                       |
/// | `w`       | `[G, N, K]` | as `a`               | likewise, or a [`ShuffledWeight`](crate::ShuffledWeight) |
/// | `m_group` | `[M]`       | `i32`                | contiguous                                               |
/// | `y`       | `[M, N]`    | `bf16`, `f16`, `f32` | unit stride on `N`, any row stride                       |
///
/// Each 128 rows of `a`, from row 0 on, are of one group, or of none (padding): `m_group` is -1, or not below `G`, and the row's
/// outputs are not written. All else is as of [`gemm_a16w16`](crate::gemm_a16w16()).
///
/// # Errors
/// As `gemm_a16w16`; [`Argument`](hk_core::Error::Argument) if the options ask for tiles of more than 128 rows.
pub fn deepgemm_contiguous<'a, T: Half, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<Weight<'a, T>>,
    m_group: TensorView<'a, i32>,
    y: TensorViewMut<Y>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "deepgemm_contiguous";
    a.dims::<2>(OP, "a")?;
    let product = a16w16::product(OP, a, w, false, options);
    Product { names: CONTIGUOUS, grouping: Grouping::Rows(m_group), ..product }.run(stream, To::Y(y), None)
}

/// [`deepgemm_contiguous`] of codes with scales: of rows, `a` `[M]` or `[M, 1]`, or of blocks, `a` `[M, groups of K]`.
///
/// # Errors
/// As [`gemm_a8w8`](crate::gemm_a8w8), and [`gemm_a8w8_blockscale`](crate::gemm_a8w8_blockscale); as [`deepgemm_contiguous`].
pub fn deepgemm_contiguous_a8w8<'a, T: MatrixCode, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<Weight<'a, T>>,
    scales: GroupedScales<'a>,
    m_group: TensorView<'a, i32>,
    y: TensorViewMut<Y>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "deepgemm_contiguous_a8w8";
    a.dims::<2>(OP, "a")?;
    let product = scales.of(a8w8::product(OP, stream, a, w, options)?);
    Product { names: CONTIGUOUS, grouping: Grouping::Rows(m_group), ..product }.run(stream, To::Y(y), None)
}
