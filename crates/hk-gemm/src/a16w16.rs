//! Products of 16-bit floats.

use crate::config::Precision;
use crate::kernels;
use crate::problem::{FloatView, GemmOptions, Kernels, NAMES, Product, Store, gemm_names};
use hk_core::{Float, Result, Stream, TensorView, TensorViewMut, bf16, f16};

mod sealed {
    use super::*;

    /// A 16-bit float.
    pub trait Half: Float {
        const PRECISION: Precision;
        const KERNELS: &'static Kernels;
        const GATED: &'static Kernels;
    }
    macro_rules! half {
        ($t:ident, $precision:ident, $name:literal) => {
            impl Half for $t {
                const PRECISION: Precision = Precision::$precision;
                const KERNELS: &'static Kernels = &Kernels {
                    tiles: &kernels::TILES16,
                    skinny: &kernels::SKINNY16,
                    names: gemm_names!($name, "", concat!("gemm_", $name, "_16x16")),
                };
                const GATED: &'static Kernels = &Kernels {
                    tiles: &kernels::TILES16,
                    skinny: &kernels::SKINNY16,
                    names: gemm_names!($name, "_gated", ""),
                };
            }
        };
    }
    half!(bf16, Bf16, "bf16");
    half!(f16, F16, "f16");
}

/// `bf16` or `f16`.
pub trait Half: sealed::Half {}
impl Half for bf16 {}
impl Half for f16 {}

fn product<'a, T: Half>(
    op: &'static str,
    a: TensorView<'a, T>,
    w: TensorView<'a, T>,
    gated: bool,
    options: GemmOptions,
) -> Product<'a, T, T> {
    Product {
        op,
        names: NAMES,
        kernels: if gated { T::GATED } else { T::KERNELS },
        precision: T::PRECISION,
        x: a,
        w,
        scales: None,
        block: None,
        bias: None,
        gated,
        options,
    }
}

/// `y = activation(a w^T + bias)`.
pub fn gemm_a16w16<'a, T: Half, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: TensorView<'a, T>,
    bias: Option<FloatView<'a>>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    Product { bias, ..product("gemm_a16w16", a, w, false, options) }.run(stream, y, workspace, Store::Round)
}

/// `y += a w^T`, in any order.
pub fn gemm_a16w16_atomic<T: Half>(
    stream: &Stream,
    a: TensorView<T>,
    w: TensorView<T>,
    y: TensorViewMut<f32>,
    options: GemmOptions,
) -> Result<()> {
    product("gemm_a16w16_atomic", a, w, false, options).run(stream, y, None, Store::Add)
}

/// `y = activation(a w_gate^T) * (a w_value^T)`.
pub fn gemm_a16w16_gated<T: Half, Y: Float>(
    stream: &Stream,
    a: TensorView<T>,
    w: TensorView<T>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    product("gemm_a16w16_gated", a, w, true, options).run(stream, y, workspace, Store::Round)
}
