//! The safe function of `hip/gating.hip`.

use crate::kernels::gating::Params;
use crate::{GateBias, Softplus};
use hk_core::plan::rows::float_index;
use hk_core::{
    DType, Element, Error, Float, KernelRef, LaunchConfig, Result, Stream, TensorView, TensorViewMut,
    check_aliases,
};

const OP: &str = "fused_gdn_gating_prefill";

/// The entry points of each dtype: vectorized, scalar.
static KERNELS: [[KernelRef<Params>; 2]; 3] = [
    [Params::kernel("gating_bf16"), Params::kernel("gating_bf16_scalar")],
    [Params::kernel("gating_f16"), Params::kernel("gating_f16_scalar")],
    [Params::kernel("gating_f32"), Params::kernel("gating_f32_scalar")],
];
/// Threads of a block.
const THREADS: usize = 256;
/// Elements of a call at most.
const MOST: usize = 1 << 31;

/// The inputs of [`fused_gdn_gating_prefill`].
#[derive(Debug, Clone, Copy)]
pub struct GatingInputs<'a, T: Element, D: Element> {
    /// `[v_heads]`.
    pub a_log: TensorView<'a, f32>,
    /// `[.., v_heads]`.
    pub a: TensorView<'a, T>,
    /// As `a`.
    pub b: TensorView<'a, T>,
    /// `[v_heads]`.
    pub dt_bias: TensorView<'a, D>,
    /// The function between.
    pub softplus: Softplus,
}

/// The gates of tokens: `g = -exp(a_log) softplus(a + dt_bias)`, `beta = 1 / (1 + exp(-b))`.
///
/// | arg         | shape           | dtype                | layout     |
/// |-------------|-----------------|----------------------|------------|
/// | `a_log`     | `[v_heads]`     | `f32`                | contiguous |
/// | `a`, `b`    | `[.., v_heads]` | `bf16`, `f16`, `f32` | contiguous |
/// | `dt_bias`   | `[v_heads]`     | as `a`, or `f32`     | contiguous |
/// | `g`, `beta` | `[.., v_heads]` | `f32`                | contiguous |
///
/// All arithmetic is `f32`. The softplus is relatively accurate however small it is. NaN gives NaN. The vectorized path needs tensors
/// on 16 bytes and heads that are whole 16-byte vectors. No output may share memory with another tensor. Returns when the launch is
/// queued.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table,
/// [`Argument`](Error::Argument) for a `softplus_beta` that is not positive and finite, or a `softplus_threshold` that is NaN,
/// [`Overlap`](Error::Overlap) if an output shares memory with another tensor, [`TooLarge`](Error::TooLarge) beyond 2^31 elements,
/// [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written then.
///
/// Source: Dao and Gu 2024, "Mamba-2" (the decays of heads).
pub fn fused_gdn_gating_prefill<'a, T: Float, D: GateBias<T>>(
    stream: &Stream,
    inputs: GatingInputs<'a, T, D>,
    mut g: TensorViewMut<'a, f32>,
    mut beta: TensorViewMut<'a, f32>,
) -> Result<()> {
    let GatingInputs { a_log, a, b, dt_bias, softplus } = inputs;
    let heads = check_gating(a.shape(), b.shape(), a_log.shape(), dt_bias.shape(), softplus)?;
    g.expect_shape(OP, "g", a.shape())?;
    beta.expect_shape(OP, "beta", a.shape())?;
    fn plain<E: Element>(arg: &'static str, tensor: &TensorView<E>) -> Result<()> {
        tensor.expect_contiguous(OP, arg)?;
        tensor.expect_aligned(OP, arg, size_of::<E>() as u64)
    }
    plain("A_log", &a_log)?;
    plain("a", &a)?;
    plain("b", &b)?;
    plain("dt_bias", &dt_bias)?;
    plain("g", &g.alias())?;
    plain("beta", &beta.alias())?;
    let inputs: [(&'static str, Option<&dyn hk_core::Operand>); 4] =
        [("A_log", Some(&a_log)), ("a", Some(&a)), ("b", Some(&b)), ("dt_bias", Some(&dt_bias))];
    check_aliases(OP, &inputs, &[(("g", Some(&g)), &[]), (("beta", Some(&beta)), &[])])?;
    let n = a.numel();
    if n > MOST {
        return Err(Error::too_large(OP, "a", format!("{n} elements"), MOST as u64));
    }
    if n == 0 {
        return Ok(());
    }
    let vector = 16 / size_of::<T>();
    let aligned = [a.is_aligned(16), b.is_aligned(16), a_log.is_aligned(16), dt_bias.is_aligned(16)];
    let vectorized = heads.is_multiple_of(vector)
        && aligned.iter().all(|aligned| *aligned)
        && (g.is_aligned(16) && beta.is_aligned(16));
    let kernel = stream.kernel(KERNELS[float_index(T::DTYPE)][usize::from(!vectorized)])?;
    let mut launch = stream.launch(OP);
    let params = Params {
        a_log: launch.input_address("A_log", &a_log)?,
        a: launch.input_address("a", &a)?,
        b: launch.input_address("b", &b)?,
        dt_bias: launch.input_address("dt_bias", &dt_bias)?,
        g: launch.output_address("g", &mut g)?,
        beta: launch.output_address("beta", &mut beta)?,
        n: n as u32,
        heads: heads as u32,
        inverse: u32::MAX / heads as u32,
        f32_bias: (D::DTYPE == DType::F32).into(),
        softplus_beta: softplus.beta,
        softplus_threshold: softplus.threshold,
    };
    let blocks = n.div_ceil(THREADS * if vectorized { vector } else { 1 });
    // SAFETY: the checks above give a, b, g and beta n elements, a whole number of rows of `heads`, as many as a_log and dt_bias have.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(blocks), &params) }
}

/// Checks shapes and scalars; gives the number of heads.
///
/// # Errors
/// [`Error::Shape`] and [`Error::Argument`].
pub(crate) fn check_gating(
    a: &[usize],
    b: &[usize],
    a_log: &[usize],
    dt_bias: &[usize],
    softplus: Softplus,
) -> Result<usize> {
    let heads = a.last().copied().unwrap_or(0);
    if heads == 0 {
        return Err(Error::shape(OP, "a", a, "[.., v_heads], at least one head"));
    }
    if b != a {
        return Err(Error::shape(OP, "b", b, format!("{a:?} (shape of a)")));
    }
    for (arg, shape) in [("A_log", a_log), ("dt_bias", dt_bias)] {
        if shape != [heads] {
            return Err(Error::shape(OP, arg, shape, format!("[{heads}] (heads of a)")));
        }
    }
    softplus.check(OP)?;
    Ok(heads)
}
