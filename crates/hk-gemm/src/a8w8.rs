//! Products of int8 and fp8 codes.

use crate::config::Precision;
use crate::kernels;
use crate::problem::{BlockScales, BlockShape, FloatView, GemmOptions, Kernels, NAMES, Product, Scales, Store, gemm_names};
use hk_core::{Arch, Element, Error, Float, Fp8E4M3, Fp8E4M3Fnuz, Result, Stream, TensorView, TensorViewMut};

mod sealed {
    use super::*;

    pub trait MatrixCode: Element {
        const PRECISION: Precision;
        const KERNELS: &'static Kernels;
        const BLOCK: &'static Kernels;
        /// Whether the products of a device take it.
        fn served(arch: Arch) -> bool;
    }
    macro_rules! code {
        ($t:ident, $precision:ident, $name:literal, $arch:pat) => {
            impl MatrixCode for $t {
                const PRECISION: Precision = Precision::$precision;
                const KERNELS: &'static Kernels = &Kernels {
                    tiles: &kernels::TILES8,
                    skinny: &kernels::SKINNY8,
                    names: gemm_names!($name, "", concat!("gemm_", $name, "_16x16")),
                };
                const BLOCK: &'static Kernels = &Kernels {
                    tiles: &kernels::BLOCKSCALE,
                    skinny: &kernels::BLOCKSCALE,
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
                    ],
                };
                fn served(arch: Arch) -> bool {
                    matches!(arch, $arch)
                }
            }
        };
    }
    code!(i8, I8, "i8", _);
    code!(Fp8E4M3, Fp8, "fp8", Arch::Gfx950 | Arch::Sm90);
    code!(Fp8E4M3Fnuz, Fp8, "fp8", Arch::Gfx942);
}

/// `i8`, or the fp8 of the device's products: [`Fp8E4M3Fnuz`] on gfx942, [`Fp8E4M3`] on gfx950.
pub trait MatrixCode: sealed::MatrixCode {}
impl MatrixCode for i8 {}
impl MatrixCode for Fp8E4M3 {}
impl MatrixCode for Fp8E4M3Fnuz {}

/// Longest sum of products of int8 that an i32 holds.
const LONGEST_I8: usize = (1 << 17) - 1;

/// Checks what codes need, and describes their product.
fn product<'a, T: MatrixCode>(
    op: &'static str,
    stream: &Stream,
    a: TensorView<'a, T>,
    w: TensorView<'a, T>,
    options: GemmOptions,
) -> Result<Product<'a, T, T>> {
    let arch = stream.device().arch();
    if !T::served(arch) {
        let reason = "products take fp8e4m3fnuz on gfx942, fp8e4m3 on gfx950";
        return Err(Error::unsupported(op, format!("{} on {arch}", T::DTYPE), reason));
    }
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
        w,
        scales: None,
        block: None,
        bias: None,
        gated: false,
        options,
    })
}

/// `y = activation(a w^T * a_scale w_scale + bias)`.
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn gemm_a8w8<'a, T: MatrixCode, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: TensorView<'a, T>,
    a_scale: TensorView<'a, f32>,
    w_scale: TensorView<'a, f32>,
    bias: Option<FloatView<'a>>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    let scales = Some(Scales { x: a_scale, w: w_scale });
    let product = product("gemm_a8w8", stream, a, w, options)?;
    Product { scales, bias, ..product }.run(stream, y, workspace, Store::Round)
}

/// [`gemm_a8w8`] without bias, by the name it has elsewhere.
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn gemm_a8w8_per_token_scale<'a, T: MatrixCode, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: TensorView<'a, T>,
    a_scale: TensorView<'a, f32>,
    w_scale: TensorView<'a, f32>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    let scales = Some(Scales { x: a_scale, w: w_scale });
    let product = product("gemm_a8w8_per_token_scale", stream, a, w, options)?;
    Product { scales, ..product }.run(stream, y, workspace, Store::Round)
}

/// `y = activation(sum_g a_scale[m, g] w_scale[n / group.n, g] sum_{k in g} a w + bias)`.
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn gemm_a8w8_blockscale<'a, T: MatrixCode, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: TensorView<'a, T>,
    a_scale: TensorView<'a, f32>,
    w_scale: TensorView<'a, f32>,
    group: BlockShape,
    bias: Option<FloatView<'a>>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    let product = product("gemm_a8w8_blockscale", stream, a, w, options)?;
    let block = Some(BlockScales { x: a_scale, w: w_scale, group });
    Product { kernels: T::BLOCK, block, bias, ..product }.run(stream, y, workspace, Store::Round)
}
