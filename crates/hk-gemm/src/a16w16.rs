//! Products of 16-bit floats.

use crate::config::Precision;
use crate::kernels;
use crate::problem::{After, Blocks, GemmOptions, Grouping, Kernels, NAMES, Product, Scales, To, gemm_names};
use crate::views::{FloatView, Weight};
use hk_core::{Float, Result, Stream, TensorView, TensorViewMut, bf16, f16};

pub(crate) mod sealed {
    use super::*;

    /// A 16-bit float.
    pub trait Half: Float {
        const PRECISION: Precision;
        const KERNELS: &'static Kernels;
        const GATED: &'static Kernels;
        /// Beside the quantization of the activations.
        const QUANT_X: &'static Kernels;
        /// By mxfp4: as it is, and quantized to mxfp4 on its way.
        const BY_FP4: &'static Kernels;
        const TO_FP4: &'static Kernels;
        /// Beside a product of fp8 with scales of blocks ([`BlockShape::kernels`](crate::BlockShape)); beside one of mxfp4, and one whose
        /// scales are words.
        const BESIDE_FP8: [&'static Kernels; 2];
        const BESIDE_FP4: [&'static Kernels; 2];
    }
    macro_rules! beside {
        ($name:literal, $first:literal, $tiles:ident, $skinny:ident, $large:literal, $small:literal) => {
            Kernels {
                tiles: &kernels::$tiles,
                skinny: &kernels::$skinny,
                names: [
                    "",
                    "",
                    concat!("gemm_", $first, "_and_", $name, $small),
                    concat!("gemm_", $first, "_and_", $name, "_64x64_elements"),
                    "",
                    concat!("gemm_", $first, "_and_", $name, "_16x32"),
                    concat!("gemm_", $first, "_and_", $name, "_32x32"),
                    concat!("gemm_", $first, "_and_", $name, "_64x32"),
                    concat!("gemm_", $first, "_and_", $name, $large),
                    "",
                ],
            }
        };
    }
    macro_rules! half {
        ($t:ident, $precision:ident, $name:literal, $dual4:ident) => {
            impl Half for $t {
                const PRECISION: Precision = Precision::$precision;
                const KERNELS: &'static Kernels = &Kernels {
                    tiles: &kernels::TILES16,
                    skinny: &kernels::SKINNY16,
                    names: gemm_names!(
                        $name,
                        "",
                        concat!("gemm_", $name, "_16x16"),
                        concat!("gemm_", $name, "_16x16_twice")
                    ),
                };
                const GATED: &'static Kernels = &Kernels {
                    tiles: &kernels::TILES16,
                    skinny: &kernels::SKINNY16,
                    names: gemm_names!($name, "_gated", ""),
                };
                const QUANT_X: &'static Kernels = &Kernels {
                    tiles: &kernels::QUANT_X,
                    skinny: &kernels::SKINNY_QUANT_X,
                    names: gemm_names!($name, "_quant_x", concat!("gemm_", $name, "_16x16_quant_x")),
                };
                const BY_FP4: &'static Kernels = &Kernels {
                    tiles: &kernels::DECODED4,
                    skinny: &kernels::MIXED4,
                    names: [
                        "",
                        concat!("gemm_", $name, "_wfp4_128x128"),
                        concat!("gemm_", $name, "_wfp4_64x64"),
                        concat!("gemm_", $name, "_wfp4_64x64_elements"),
                        "",
                        concat!("gemm_", $name, "_wfp4_16x32"),
                        concat!("gemm_", $name, "_wfp4_32x32"),
                        concat!("gemm_", $name, "_wfp4_64x32"),
                        "",
                        "",
                    ],
                };
                const TO_FP4: &'static Kernels = &Kernels {
                    tiles: &kernels::QUANTIZED4,
                    skinny: &kernels::QUANTIZED4,
                    names: [
                        "",
                        "",
                        "",
                        "",
                        "",
                        concat!("gemm_", $name, "_to_fp4_wfp4_16x32"),
                        concat!("gemm_", $name, "_to_fp4_wfp4_32x32"),
                        "",
                        "",
                        "",
                    ],
                };
                const BESIDE_FP8: [&'static Kernels; 2] = [
                    &beside!($name, "fp8_block", DUAL8, SKINNY_DUAL8, "_256x128", "_64x64"),
                    &Kernels {
                        tiles: &kernels::DUAL_GROUPS8,
                        skinny: &kernels::DUAL_GROUPS8,
                        names: [
                            "",
                            "",
                            concat!("gemm_fp8_group_and_", $name, "_64x64"),
                            concat!("gemm_fp8_group_and_", $name, "_64x64_elements"),
                            "",
                            "",
                            "",
                            "",
                            "",
                            "",
                        ],
                    },
                ];
                const BESIDE_FP4: [&'static Kernels; 2] = [
                    &beside!($name, "fp4", $dual4, SKINNY_DUAL4, "_256x128", "_64x64"),
                    &beside!($name, "fp4", $dual4, SKINNY_DUAL4, "_256x128_words", "_64x64_words"),
                ];
            }
        };
    }
    half!(bf16, Bf16, "bf16", DUAL4_BF16);
    half!(f16, F16, "f16", DUAL4_F16);
}

/// `bf16` or `f16`.
pub trait Half: sealed::Half {}
impl Half for bf16 {}
impl Half for f16 {}

pub(crate) fn product<'a, T: Half>(
    op: &'static str,
    a: TensorView<'a, T>,
    w: impl Into<Weight<'a, T>>,
    gated: bool,
    options: GemmOptions,
) -> Product<'a, T, T> {
    Product {
        op,
        names: NAMES,
        kernels: if gated { T::GATED } else { T::KERNELS },
        precision: T::PRECISION,
        x: a,
        w: w.into(),
        scales: Scales::default(),
        blocks: Blocks::None,
        bias: None,
        grouping: Grouping::Batches,
        after: After::default(),
        gated,
        options,
    }
}

/// Product of 16-bit floats: `y[m, n] = activation(sum_k a[m, k] w[n, k] + bias[n])`.
///
/// | arg         | shape             | dtype                | layout                                              |
/// |-------------|-------------------|----------------------|-----------------------------------------------------|
/// | `a`         | `[M, K]`          | `bf16`, `f16`        | unit stride on `K`, any row stride                  |
/// | `w`         | `[N, K]`          | as `a`               | likewise, or a [`ShuffledWeight`](crate::ShuffledWeight) |
/// | `bias`      | `[N]`             | `bf16`, `f16`, `f32` | contiguous                                          |
/// | `y`         | `[M, N]`          | `bf16`, `f16`, `f32` | unit stride on `N`, any row stride                  |
/// | `workspace` | `[n]`             | `f32`                | contiguous, 16-byte aligned; see [`gemm_workspace`](crate::gemm_workspace) |
///
/// Any `M`, `N` and `K`. Rows of `a` and `w` that begin on 16 bytes, and are a multiple of 16 bytes long, are moved 16 bytes at
/// a time; others go element by element, much slower. `K = 0` gives the bias, or zero.
///
/// Sums are `f32`; bias and activation too; there is one rounding, to the type of `y`. Which elements are summed in which order
/// depends on the configuration ([`GemmConfig`](crate::GemmConfig)), which depends on the shape and the device alone, or on
/// what the options say: the same call gives the same bits. If K is cut into parts, their sums go to the workspace, and are
/// added in the order of K. A NaN or an infinity in a row of `a` or `w` stays in that row, or column, of `y`.
///
/// Returns when the work is queued, before it has run. No rows or no columns: nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks
/// the table, or the workspace is too short for the splits that the options ask for,
/// [`Overlap`](hk_core::Error::Overlap) if `y` or the workspace shares memory with another tensor,
/// [`Argument`](hk_core::Error::Argument) for options that do not fit the tensors,
/// [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 rows, columns or elements of `K`, or 2^31 tiles,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and what loading and launching a kernel can answer. Nothing is
/// written then.
pub fn gemm_a16w16<'a, T: Half, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<Weight<'a, T>>,
    bias: Option<FloatView<'a>>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "gemm_a16w16";
    a.dims::<2>(OP, "a")?;
    Product { bias, ..product(OP, a, w, false, options) }.run(stream, To::Y(y), workspace)
}

/// [`gemm_a16w16`] of `batch` independent products: `y[b, m, n] = activation(sum_k a[b, m, k] w[b, n, k] + bias[b, n])`.
///
/// | arg         | shape                          | dtype                | layout                                 |
/// |-------------|--------------------------------|----------------------|----------------------------------------|
/// | `a`         | `[batch, M, K]`                | `bf16`, `f16`        | unit stride on `K`, others free        |
/// | `w`         | `[batch, N, K]`                | as `a`               | likewise                               |
/// | `bias`      | `[batch, N]`, `[batch, 1, N]`  | `bf16`, `f16`, `f32` | contiguous                             |
/// | `y`         | `[batch, M, N]`                | `bf16`, `f16`, `f32` | unit stride on `N`, others free        |
/// | `workspace` | `[n]`                          | `f32`                | as of `gemm_a16w16`                    |
///
/// A batch has the bits that it has alone with the same configuration.
///
/// # Errors
/// As [`gemm_a16w16`].
pub fn batched_gemm_bf16<'a, T: Half, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<Weight<'a, T>>,
    bias: Option<FloatView<'a>>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "batched_gemm_bf16";
    a.dims::<3>(OP, "a")?;
    Product { bias, ..product(OP, a, w, false, options) }.run(stream, To::Y(y), workspace)
}

/// [`gemm_a16w16`] whose parts of K are added in memory: `y[m, n] = sum_k a[m, k] w[n, k]`, or `+=` if `accumulate`.
///
/// `a` and `w` as of `gemm_a16w16`; `y` `[M, N]` of `f32`, unit stride on `N`, any row stride. No workspace. Blocks add to `y`
/// in any order, so that calls of the same can differ in bits; with one split and without `accumulate` nothing is added.
///
/// # Errors
/// As [`gemm_a16w16`]; [`Argument`](hk_core::Error::Argument) for an activation, which sums of parts cannot have.
pub fn gemm_a16w16_atomic<'a, T: Half>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<Weight<'a, T>>,
    y: TensorViewMut<f32>,
    accumulate: bool,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "gemm_a16w16_atomic";
    options.expect_no_activation(OP)?;
    a.dims::<2>(OP, "a")?;
    product(OP, a, w, false, options).run(stream, To::Sum { y, accumulate }, None)
}

/// Product with gates: `y[m, n] = activation(sum_k a[m, k] w[n, k]) * sum_k a[m, k] w[N + n, k]`.
///
/// `a` and `workspace` as of [`gemm_a16w16`]; `w` `[2 N, K]`, rows of gates, then of values; `y` `[M, N]`. Both sums and
/// their product are `f32`; one rounding. Without an activation it is the plain product.
///
/// # Errors
/// As [`gemm_a16w16`]; [`Shape`](hk_core::Error::Shape) for an odd number of rows of `w`.
pub fn gemm_a16w16_gated<'a, T: Half, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<Weight<'a, T>>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "gemm_a16w16_gated";
    a.dims::<2>(OP, "a")?;
    product(OP, a, w, true, options).run(stream, To::Y(y), workspace)
}
