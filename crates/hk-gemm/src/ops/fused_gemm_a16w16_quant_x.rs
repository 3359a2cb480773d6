//! `fused_gemm_a16w16_quant_x`: GEMM of 16-bit floats that also quantizes its activations, in one launch.

use crate::element::Half;
use crate::gemm::check::{Checked, erased};
use crate::gemm::desc::{Destination, GemmDesc, LIMIT, arg};
use crate::gemm::launch::{KernelArgs, store_mode};
use crate::gemm::operands::MX_BLOCK;
use crate::gemm::params::QuantXParams;
use crate::gemm::table::{Kernels, Variant};
use crate::gemm::{FloatView, GemmOptions, GemmWeight};
use hk_core::quant::{BlockRule, BlockScale, MxElement};
use hk_core::{
    DType, E8M0, Element, Error, Float, LaunchConfig, NamedOperand, Result, Stream, TensorView,
    TensorViewMut, check_aliases,
};

/// Options of [`fused_gemm_a16w16_quant_x`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QuantXOptions {
    /// How a scale follows from the largest magnitude of its block.
    pub mode: BlockScale,
    /// Of the GEMM.
    pub gemm: GemmOptions,
}

impl Default for QuantXOptions {
    /// [`BlockScale::RoundUp`].
    fn default() -> Self {
        Self { mode: BlockScale::RoundUp, gemm: GemmOptions::default() }
    }
}

/// The outputs of [`fused_gemm_a16w16_quant_x`].
#[derive(Debug)]
pub struct QuantXOutputs<'t, Y: Element, E: Element> {
    /// `[M, N]`.
    pub y: TensorViewMut<'t, Y>,
    /// `[M, K]`, or `[M, K / 2]` of pairs.
    pub x_quant: TensorViewMut<'t, E>,
    /// `[M, ceil(K / 32)]`.
    pub x_scale: TensorViewMut<'t, E8M0>,
}

/// GEMM of 16-bit floats that also writes its activations as MX blocks of 32 columns, in one launch:
/// `y[m, n] = activation(sum_k x[m, k] w[n, k] + bias[n])`, `x_quant[m, k] = round(x[m, k] / x_scale[m, k / 32])`.
///
/// | arg         | shape                 | dtype                              | layout                                    |
/// |-------------|-----------------------|------------------------------------|-------------------------------------------|
/// | `x`         | `[M, K]`              | `bf16`, `f16`                      | unit stride on `K`, any row stride        |
/// | `w`         | `[N, K]`              | as `x`                             | likewise, or [`GemmWeight::Shuffled`]     |
/// | `bias`      | `[N]`                 | `bf16`, `f16`, `f32`               | contiguous; optional                      |
/// | `y`         | `[M, N]`              | `bf16`, `f16`, `f32`               | unit stride on `N`, any row stride        |
/// | `x_quant`   | `[M, K]`              | `fp8e4m3`, `fp8e5m2`               | unit stride on `K`, any row stride        |
/// |             | `[M, K / 2]`          | pairs of fp4; `K` even             | likewise; the even column in the low bits |
/// | `x_scale`   | `[M, ceil(K / 32)]`   | `e8m0`                             | any strides                               |
/// | `workspace` | `[n]`                 | `f32`                              | contiguous, 16-byte aligned; optional, see [`gemm_workspace`](crate::gemm_workspace) |
///
/// It is the router of a mixture of experts, whose activations the experts take quantized. `y` is bitwise identical to that of
/// [`gemm_a16w16`](crate::gemm_a16w16()) with the same options. Each block is quantized once: fp8 (OCP's, on every target) as by
/// [`downcast_to_mxfp`](hk_quant::downcast_to_mxfp) along the last axis, pairs of fp4 as by
/// [`dynamic_mxfp4_quant`](hk_quant::dynamic_mxfp4_quant), bitwise identical to them. The last block of a row may be short.
/// [`QuantXOptions::mode`] says how a scale follows from the largest magnitude of its block, all but [`BlockScale::DivFloor`]; a
/// block with a NaN or an infinity has the scale NaN and zeros.
///
/// Sums, bias and activation are `f32`; one rounding, to nearest even, to the type of `y`. Deterministic: the same call gives the
/// same bits. A row is bitwise identical for any `M` under
/// [`Determinism::BatchInvariant`](crate::Determinism::BatchInvariant), or a given [`GemmConfig`](crate::GemmConfig).
///
/// Outputs and `workspace` share no memory with each other or with an input. Returns when the work is queued.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) for a tensor that breaks the table, an odd `K` with
/// pairs of fp4, or a workspace too short for the split-K of the options; [`Overlap`](hk_core::Error::Overlap) for shared memory;
/// [`Argument`](hk_core::Error::Argument) for the mode `DivFloor`, and options that do not fit the tensors;
/// [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 rows, columns or elements of `K`, or what a launch can have;
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch); and what loading and launching a kernel can answer. Nothing is written then.
///
/// Source: OCP Microscaling Formats (MX) 1.0.
pub fn fused_gemm_a16w16_quant_x<'a, T: Half, Y: Float, E: MxElement>(
    stream: &Stream,
    x: TensorView<'a, T>,
    w: impl Into<GemmWeight<'a, T>>,
    bias: Option<FloatView<'a>>,
    outputs: QuantXOutputs<Y, E>,
    workspace: Option<TensorViewMut<f32>>,
    options: QuantXOptions,
) -> Result<()> {
    const OP: &str = "fused_gemm_a16w16_quant_x";
    const QUANT: &str = "x_quant";
    const SCALE: &str = "x_scale";
    let QuantXOutputs { y, mut x_quant, mut x_scale } = outputs;
    let QuantXOptions { mode, gemm: options } = options;
    let [m, k] = x.dims(OP, "x")?;
    if mode == BlockScale::DivFloor {
        return Err(Error::argument(OP, "mode", "DivFloor", "Even, RoundUp or Floor"));
    }
    if !k.is_multiple_of(E::PER_ELEMENT) {
        return Err(Error::shape(OP, "x", x.shape(), "an even number of columns (pairs of fp4)"));
    }
    let blocks = k.div_ceil(MX_BLOCK);
    x_quant.expect_shape(OP, QUANT, [m, k / E::PER_ELEMENT])?;
    x_quant.expect_unit_stride(OP, QUANT)?;
    x_scale.expect_shape(OP, SCALE, [m, blocks])?;
    let gemm = GemmDesc {
        a: arg("x", x),
        variant: Variant::QuantX,
        ..GemmDesc::new(OP, x, w).options(options).bias(bias)
    };
    let outputs: [(NamedOperand, &[&'static str]); 4] = [
        (("y", Some(&y)), &[]),
        ((QUANT, Some(&x_quant)), &[]),
        ((SCALE, Some(&x_scale)), &[]),
        (("workspace", erased(workspace.as_ref())), &[]),
    ];
    check_aliases(OP, &gemm.inputs(), &outputs)?;
    let mut checked = gemm.check(stream, Destination::Store(y), workspace.as_ref())?;

    let tile = checked.plan.config.tile;
    let (tiles, units) = (checked.plan.blocks, m.saturating_mul(blocks));
    let info = stream.device().info();
    let threads = tile.waves(info.arch) * info.wave_size as usize;
    let grid = tiles.saturating_add(units.div_ceil(threads));
    // Units are counted in 32 bits.
    if grid > LIMIT || units > u32::MAX as usize - threads {
        let what = format!("{tiles} tiles, {units} blocks of x");
        return Err(Error::too_large(OP, QUANT, what, LIMIT as u64));
    }
    if grid == 0 {
        return Ok(());
    }
    // Unsummed slices are y's.
    let (store, mut slices) = store_mode(&checked, workspace.filter(|_| !options.skip_reduce));
    let Kernels::QuantXParams(rows) = checked.plan.eligible.family.kernels else {
        return Err(gemm.no_kernel());
    };
    let kernel = gemm.kernel(stream, rows, tile, k)?;
    let mut launch = stream.launch(OP);
    let Checked { to, sizes, plan } = &mut checked;
    let KernelArgs::Plain(args) = gemm.args(&mut launch, to, sizes, plan, store, slices.as_mut())? else {
        return Err(gemm.no_kernel());
    };
    let (of_quant, of_scale) = (launch.output(QUANT, &mut x_quant)?, launch.output(SCALE, &mut x_scale)?);
    let params = QuantXParams {
        args,
        q: of_quant.data(),
        scale: of_scale.data(),
        q_row: of_quant.strides()[2] * size_of::<E>() as i64,
        scale_row: of_scale.strides()[2],
        scale_block: of_scale.strides()[3],
        cols: k as u32,
        blocks: blocks as u32,
        rule: rule::<E>(mode),
        element: element::<E>(),
        vectors: (x.rows_aligned(16) && x_quant.rows_aligned(16)).into(),
        pad: 0,
    };
    // SAFETY: as for the GEMM by itself: the checks make its tensors as long as its tiles cover; `x_quant` and `x_scale` have as
    // many rows and blocks as x, which the kernel bounds the others by.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(grid), &params) }?;
    match slices {
        Some(slices) => gemm.reduce_slices(stream, &mut checked.to, &checked.sizes, &checked.plan, slices),
        None => Ok(()),
    }
}

/// The rule of scales, that of `hk_quant`: of fp8, scales of blocks that are not zero are at least 2^-126.
pub(crate) fn rule<E: MxElement>(mode: BlockScale) -> BlockRule {
    let (max, mantissa_bits) = E::RANGE;
    BlockRule::new(mode, max, mantissa_bits, E::FORMAT.is_some().into())
}

/// `MxElement` in `hip/quant_x.h`.
fn element<E: MxElement>() -> u32 {
    match E::DTYPE {
        DType::Fp4x2 => 0,
        DType::Fp8E4M3 => 1,
        _ => 2,
    }
}
