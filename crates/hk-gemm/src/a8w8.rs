//! Products of int8 and fp8 codes.

use crate::config::Precision;
use crate::kernels;
use crate::problem::{
    After, BlockScales, BlockShape, Blocks, GemmOptions, Grouping, Kernels, NAMES, Product, Scales, To,
    gemm_names,
};
use crate::views::{FloatView, Weight};
use hk_core::quant::Quantized;
use hk_core::{Arch, Element, Error, Float, Fp8E4M3, Fp8E4M3Fnuz, Result, Stream, TensorView, TensorViewMut};

pub(crate) mod sealed {
    use super::*;

    pub trait MatrixCode: Element + Quantized {
        const PRECISION: Precision;
        const KERNELS: &'static Kernels;
        /// With scales of blocks: see [`BlockShape::kernels`].
        const BLOCK: [&'static Kernels; 2];
        /// As weights of `bf16` and `f16`, likewise, and of what these are quantized to on their way.
        const OF_HALVES: [[&'static Kernels; 2]; 2];
        const OF_QUANTIZED: [&'static Kernels; 2];
        /// Whether the products of a device take it.
        fn served(arch: Arch) -> bool;
    }
    macro_rules! code {
        ($t:ident, $precision:ident, $name:literal, $decoded:ident, $arch:pat) => {
            impl MatrixCode for $t {
                const PRECISION: Precision = Precision::$precision;
                const KERNELS: &'static Kernels = &Kernels {
                    tiles: &kernels::TILES8,
                    skinny: &kernels::SKINNY8,
                    names: gemm_names!(
                        $name,
                        "",
                        concat!("gemm_", $name, "_16x16"),
                        concat!("gemm_", $name, "_16x16_twice")
                    ),
                };
                const BLOCK: [&'static Kernels; 2] = [
                    &Kernels {
                        tiles: &kernels::BLOCKSCALE,
                        skinny: &kernels::SKINNY_BLOCKSCALE,
                        names: [
                            "",
                            "",
                            concat!("gemm_", $name, "_block_64x64"),
                            concat!("gemm_", $name, "_block_64x64_elements"),
                            concat!("gemm_", $name, "_block_16x16"),
                            concat!("gemm_", $name, "_block_16x32"),
                            concat!("gemm_", $name, "_block_32x32"),
                            concat!("gemm_", $name, "_block_64x32"),
                            concat!("gemm_", $name, "_block_256x128"),
                            "",
                        ],
                    },
                    &group_kernels!(GROUPS8, $name),
                ];
                const OF_HALVES: [[&'static Kernels; 2]; 2] = [
                    [
                        &mixed_kernels!("bf16", "w", $name, $decoded),
                        &group_kernels!(DECODED_GROUPS8, "bf16_w", $name),
                    ],
                    [
                        &mixed_kernels!("f16", "w", $name, $decoded),
                        &group_kernels!(DECODED_GROUPS8, "f16_w", $name),
                    ],
                ];
                const OF_QUANTIZED: [&'static Kernels; 2] =
                    [&quantized_kernels!("bf16", "to_w", $name), &quantized_kernels!("f16", "to_w", $name)];
                fn served(arch: Arch) -> bool {
                    matches!(arch, $arch)
                }
            }
        };
    }
    macro_rules! group_kernels {
        ($objects:ident, $($name:literal),+) => {
            Kernels {
                tiles: &kernels::$objects,
                skinny: &kernels::$objects,
                names: [
                    "",
                    "",
                    concat!("gemm_", $($name,)+ "_group_64x64"),
                    concat!("gemm_", $($name,)+ "_group_64x64_elements"),
                    "",
                    "",
                    "",
                    "",
                    "",
                    "",
                ],
            }
        };
    }
    macro_rules! mixed_kernels {
        ($half:literal, $by:literal, $name:literal, $decoded:ident) => {
            Kernels {
                tiles: &kernels::$decoded,
                skinny: &kernels::MIXED8,
                names: [
                    "",
                    concat!("gemm_", $half, "_", $by, $name, "_128x128"),
                    concat!("gemm_", $half, "_", $by, $name, "_64x64"),
                    concat!("gemm_", $half, "_", $by, $name, "_64x64_elements"),
                    "",
                    concat!("gemm_", $half, "_", $by, $name, "_16x32"),
                    concat!("gemm_", $half, "_", $by, $name, "_32x32"),
                    concat!("gemm_", $half, "_", $by, $name, "_64x32"),
                    "",
                    "",
                ],
            }
        };
    }
    macro_rules! quantized_kernels {
        ($half:literal, $by:literal, $name:literal) => {
            Kernels {
                tiles: &kernels::QUANTIZED8,
                skinny: &kernels::QUANTIZED8,
                names: [
                    "",
                    "",
                    "",
                    "",
                    "",
                    concat!("gemm_", $half, "_", $by, $name, "_16x32"),
                    concat!("gemm_", $half, "_", $by, $name, "_32x32"),
                    "",
                    "",
                    "",
                ],
            }
        };
    }
    code!(i8, I8, "i8", DECODED_I8, _);
    code!(Fp8E4M3, Fp8, "fp8", DECODED_FP8, Arch::Gfx950 | Arch::Sm90);
    code!(Fp8E4M3Fnuz, Fp8, "fp8", DECODED_FP8, Arch::Gfx942);
}

/// `i8`, or the fp8 of the device's products: [`Fp8E4M3Fnuz`] on gfx942, [`Fp8E4M3`] on gfx950 and sm_90.
pub trait MatrixCode: sealed::MatrixCode {}
impl MatrixCode for i8 {}
impl MatrixCode for Fp8E4M3 {}
impl MatrixCode for Fp8E4M3Fnuz {}

/// Longest sum of products of int8 that an i32 holds.
const LONGEST_I8: usize = (1 << 17) - 1;

/// Refuses the fp8 that products do not take.
pub(crate) fn expect_served<T: MatrixCode>(op: &'static str, stream: &Stream) -> Result<()> {
    let arch = stream.device().arch();
    if T::served(arch) {
        return Ok(());
    }
    let reason = "products take fp8e4m3fnuz on gfx942, fp8e4m3 on gfx950 and sm_90";
    Err(Error::unsupported(op, format!("{} on {arch}", T::DTYPE), reason))
}

/// Checks what codes need, and describes their product.
pub(crate) fn product<'a, T: MatrixCode>(
    op: &'static str,
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<Weight<'a, T>>,
    options: GemmOptions,
) -> Result<Product<'a, T, T>> {
    expect_served::<T>(op, stream)?;
    let k = a.shape().last().copied().unwrap_or(0);
    if T::PRECISION == Precision::I8 && k > LONGEST_I8 {
        let want = format!("at most {LONGEST_I8}, so that sums fit i32");
        return Err(Error::argument(op, "a", format!("{k} columns"), want));
    }
    Ok(Product {
        op,
        names: NAMES,
        kernels: T::KERNELS,
        precision: T::PRECISION,
        x: a,
        w: w.into(),
        scales: Scales::default(),
        blocks: Blocks::None,
        bias: None,
        grouping: Grouping::Batches,
        after: After::default(),
        gated: false,
        options,
    })
}

/// Product of codes with a scale for each row: `y[m, n] = activation(a_scale[m] w_scale[n] sum_k a[m, k] w[n, k] + bias[n])`.
///
/// | arg         | shape                              | dtype                | layout                                    |
/// |-------------|------------------------------------|----------------------|-------------------------------------------|
/// | `a`         | `[M, K]`                           | [`MatrixCode`]       | unit stride on `K`, any row stride        |
/// | `w`         | `[N, K]`                           | as `a`               | likewise                                  |
/// | `a_scale`   | `[M]`, `[M, 1]`, `[1, M]` or `[1]` | `f32`                | contiguous                                |
/// | `w_scale`   | `[N]`, `[N, 1]`, `[1, N]` or `[1]` | `f32`                | contiguous                                |
/// | `bias`      | `[N]`                              | `bf16`, `f16`, `f32` | contiguous                                |
/// | `y`         | `[M, N]`                           | `bf16`, `f16`, `f32` | unit stride on `N`, any row stride        |
/// | `workspace` | `[n]`                              | `f32`                | contiguous, 16-byte aligned; see [`gemm_workspace`](crate::gemm_workspace) |
///
/// Sums of int8 are exact, in `i32`, over each part of K; of fp8 they are `f32`. Scales, bias and activation are `f32`, and
/// there is one rounding, to the type of `y`. All else is as of [`gemm_a16w16`](crate::gemm_a16w16()).
///
/// # Errors
/// As `gemm_a16w16`; [`Unsupported`](hk_core::Error::Unsupported) for the fp8 that the device's products do not take,
/// [`Argument`](hk_core::Error::Argument) for int8 with `K` beyond 131071, whose sums may not fit.
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn gemm_a8w8<'a, T: MatrixCode, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<Weight<'a, T>>,
    a_scale: TensorView<'a, f32>,
    w_scale: TensorView<'a, f32>,
    bias: Option<FloatView<'a>>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "gemm_a8w8";
    a.dims::<2>(OP, "a")?;
    let scales = Scales { x: Some(a_scale), w: Some(w_scale) };
    Product { scales, bias, ..product(OP, stream, a, w, options)? }.run(stream, To::Y(y), workspace)
}

/// [`gemm_a8w8`] without bias.
///
/// # Errors
/// As [`gemm_a8w8`].
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn gemm_a8w8_per_token_scale<'a, T: MatrixCode, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<Weight<'a, T>>,
    a_scale: TensorView<'a, f32>,
    w_scale: TensorView<'a, f32>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "gemm_a8w8_per_token_scale";
    a.dims::<2>(OP, "a")?;
    let scales = Scales { x: Some(a_scale), w: Some(w_scale) };
    Product { scales, ..product(OP, stream, a, w, options)? }.run(stream, To::Y(y), workspace)
}

/// [`gemm_a8w8`] of `batch` independent products: tensors have `batch` as their first axis, scales as `[batch, M]` and
/// `[batch, N]` (or with an axis of 1 more, or one number for all), the bias as `[batch, N]` or `[batch, 1, N]`.
///
/// # Errors
/// As [`gemm_a8w8`].
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn batched_gemm_a8w8<'a, T: MatrixCode, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<Weight<'a, T>>,
    a_scale: TensorView<'a, f32>,
    w_scale: TensorView<'a, f32>,
    bias: Option<FloatView<'a>>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "batched_gemm_a8w8";
    a.dims::<3>(OP, "a")?;
    let scales = Scales { x: Some(a_scale), w: Some(w_scale) };
    Product { scales, bias, ..product(OP, stream, a, w, options)? }.run(stream, To::Y(y), workspace)
}

/// Product of codes with a scale for each block:
/// `y[m, n] = activation(sum_g a_scale[m, g] w_scale[n / group.n, g] sum_{k in g} a[m, k] w[n, k] + bias[n])`, where group `g`
/// of `K` is columns `group.k g` to `group.k (g + 1)`.
///
/// | arg       | shape                                        | dtype          | layout                         |
/// |-----------|----------------------------------------------|----------------|--------------------------------|
/// | `a`, `w`, `bias`, `y`, `workspace` | as of [`gemm_a8w8`] |                |                                |
/// | `a_scale` | `[M, groups of K]`                           | `f32`          | any strides                    |
/// | `w_scale` | `[groups of N, groups of K]`                 | `f32`          | any strides                    |
///
/// The last groups may be short. Scales that are stored with `M` as the last axis are a view with its axes exchanged
/// ([`TensorView::transpose`]). Products are summed over 128 columns (in `i32` for int8), and each such sum is scaled into an
/// `f32` sum; the result is rounded once. With a `group.k` of less, they are summed over 64 columns, or a group, by tiles of 64 by
/// 64, by elements if a group has fewer than 16 columns.
///
/// # Errors
/// As [`gemm_a8w8`]; [`Argument`](hk_core::Error::Argument) for a `group.n` or `group.k` that is no power of two,
/// [`TooLarge`](hk_core::Error::TooLarge) for more than some 2^25 groups of fewer than 64 columns.
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn gemm_a8w8_blockscale<'a, T: MatrixCode, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<Weight<'a, T>>,
    a_scale: TensorView<'a, f32>,
    w_scale: TensorView<'a, f32>,
    group: BlockShape,
    bias: Option<FloatView<'a>>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "gemm_a8w8_blockscale";
    a.dims::<2>(OP, "a")?;
    let blocks = Blocks::F32(BlockScales { x: a_scale, w: w_scale, group });
    let product = product(OP, stream, a, w, options)?;
    Product { kernels: group.kernels(T::BLOCK), blocks, bias, ..product }.run(stream, To::Y(y), workspace)
}
