//! Products of mxfp8: fp8 codes, and a power-of-two scale for each 32 columns of a row.

use crate::a8w8::{MatrixCode, expect_served};
use crate::config::Precision;
use crate::fp4::product;
use crate::kernels;
use crate::problem::{GemmOptions, Kernels, To};
use crate::views::{MxScaleView, Weight};
use hk_core::{DType, Error, Float, Result, Stream, TensorView, TensorViewMut};

pub(crate) static MXFP8: Kernels = Kernels {
    tiles: &kernels::MX8,
    skinny: &kernels::MX8,
    names: [
        "",
        "",
        "gemm_afp8wfp8_64x64",
        "gemm_afp8wfp8_64x64_elements",
        "",
        "gemm_afp8wfp8_16x32",
        "gemm_afp8wfp8_32x32",
        "gemm_afp8wfp8_64x32",
        "gemm_afp8wfp8_256x128",
        "",
    ],
};
static BY_WORDS: Kernels = Kernels {
    names: [
        "",
        "",
        "gemm_afp8wfp8_64x64_words",
        "",
        "",
        "gemm_afp8wfp8_16x32",
        "gemm_afp8wfp8_32x32",
        "gemm_afp8wfp8_64x32",
        "gemm_afp8wfp8_256x128_words",
        "",
    ],
    ..MXFP8
};

/// Product of mxfp8 by mxfp8:
/// `y[m, n] = activation(sum_k 2^(a_scale[m, k / 32] - 127) a[m, k] 2^(w_scale[n, k / 32] - 127) w[n, k])`.
///
/// | arg         | shape         | dtype                | layout                                                        |
/// |-------------|---------------|----------------------|---------------------------------------------------------------|
/// | `a`         | `[M, K]`      | [`MatrixCode`], fp8  | unit stride on `K`, any row stride                            |
/// | `w`         | `[N, K]`      | as `a`               | likewise, or a [`ShuffledWeight`](crate::ShuffledWeight)      |
/// | `a_scale`   | `[M, K / 32]` | [`E8M0`](hk_core::E8M0) | any strides, or shuffled: [`MxScaleView`]                  |
/// | `w_scale`   | `[N, K / 32]` | [`E8M0`](hk_core::E8M0) | likewise                                                   |
/// | `y`         | `[M, N]`      | `bf16`, `f16`, `f32` | unit stride on `N`, any row stride                            |
/// | `workspace` | `[n]`         | `f32`                | contiguous, 16-byte aligned; see [`gemm_workspace`](crate::gemm_workspace) |
///
/// Products are exact, sums are `f32`, and there is one rounding, to the type of `y`. Targets whose matrix instructions take no such
/// blocks (gfx942) sum 32 columns and scale that, whatever the two scales: the same but for the order of sums. A scale of 255 makes
/// NaN of what its block takes part in. All else is as of [`gemm_a16w16`](crate::gemm_a16w16()).
///
/// # Errors
/// As `gemm_a16w16`; [`Shape`](Error::Shape) if `K` is no multiple of 32; [`Unsupported`](Error::Unsupported) for int8, and the fp8
/// that the device's products do not take.
///
/// Source: OCP Microscaling Formats (MX) 1.0, MXFP8 of E4M3.
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn gemm_afp8wfp8<'a, T: MatrixCode, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<Weight<'a, T>>,
    a_scale: impl Into<MxScaleView<'a>>,
    w_scale: impl Into<MxScaleView<'a>>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "gemm_afp8wfp8";
    a.dims::<2>(OP, "a")?;
    if T::DTYPE == DType::I8 {
        let reason = "products of mxfp8 take fp8e4m3fnuz on gfx942, fp8e4m3 on gfx950 and sm_90";
        return Err(Error::unsupported(OP, T::DTYPE.to_string(), reason));
    }
    expect_served::<T>(OP, stream)?;
    let (kernels, a_scale, w_scale) = ([&MXFP8, &BY_WORDS], Some(a_scale.into()), w_scale.into());
    product(OP, Precision::Fp8, kernels, a, w.into(), a_scale, w_scale, options).run(
        stream,
        To::Y(y),
        workspace,
    )
}
