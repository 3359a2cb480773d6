//! A product of 16-bit floats, and its activations quantized, in one launch.

use crate::a16w16::{self, Half};
use crate::dual::sums;
use crate::fused::OPERANDS;
use crate::params::QuantXParams;
use crate::problem::{Checked, GemmOptions, Given, LIMIT, Product, To, erased};
use crate::views::{FloatView, MX_BLOCK, Weight};
use hk_core::quant::{BlockRule, BlockScale, MxElement};
use hk_core::{
    DType, E8M0, Error, Float, LaunchConfig, NamedOperand, Result, Stream, TensorView, TensorViewMut,
    check_aliases,
};

/// [`gemm_a16w16`](crate::gemm_a16w16()), and its activations as MX blocks of 32 columns, in one launch:
/// `y[m, n] = activation(sum_k x[m, k] w[n, k] + bias[n])`, `x_quant[m, k] = round(x[m, k] / x_scale[m, k / 32])`.
///
/// | arg         | shape                 | dtype                              | layout                                    |
/// |-------------|-----------------------|------------------------------------|-------------------------------------------|
/// | `x`         | `[M, K]`              | `bf16`, `f16`                      | unit stride on `K`, any row stride        |
/// | `w`         | `[N, K]`              | as `x`                             | likewise, or a [`ShuffledWeight`](crate::ShuffledWeight) |
/// | `bias`      | `[N]`                 | `bf16`, `f16`, `f32`               | contiguous                                |
/// | `y`         | `[M, N]`              | `bf16`, `f16`, `f32`               | unit stride on `N`, any row stride        |
/// | `x_quant`   | `[M, K]`              | `fp8e4m3`, `fp8e5m2`               | unit stride on `K`, any row stride        |
/// |             | `[M, K / 2]`          | pairs of fp4; `K` even             | likewise; the even column in the low half |
/// | `x_scale`   | `[M, ceil(K / 32)]`   | `e8m0`                             | any strides                               |
/// | `workspace` | `[n]`                 | `f32`                              | contiguous, 16-byte aligned; see [`gemm_workspace`](crate::gemm_workspace) |
///
/// It is the router of a layer of experts, whose activations the experts take as codes. `y` has the bits of `gemm_a16w16` with
/// the same options. Each block is quantized once: fp8 (the OCP's, on every target) as by
/// [`downcast_to_mxfp`](hk_quant::downcast_to_mxfp) along the last axis, pairs of fp4 as by
/// [`dynamic_mxfp4_quant`](hk_quant::dynamic_mxfp4_quant), with the same bits. The last block of a row may be short. `mode` is
/// how a scale follows from the largest magnitude of its block, all but [`BlockScale::DivFloor`]; a block with a NaN or an
/// infinity has the scale NaN and zeros.
///
/// # Errors
/// As `gemm_a16w16`, of `x_quant` and `x_scale` too; [`Shape`](Error::Shape) for pairs of fp4 of an odd `K`,
/// [`Argument`](Error::Argument) for the mode `DivFloor`, [`TooLarge`](Error::TooLarge) for tiles and blocks beyond what a
/// launch can have.
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn fused_gemm_a16w16_quant_x<'a, T: Half, Y: Float, E: MxElement>(
    stream: &Stream,
    x: TensorView<'a, T>,
    w: impl Into<Weight<'a, T>>,
    bias: Option<FloatView<'a>>,
    y: TensorViewMut<Y>,
    mut x_quant: TensorViewMut<E>,
    mut x_scale: TensorViewMut<E8M0>,
    workspace: Option<TensorViewMut<f32>>,
    mode: BlockScale,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "fused_gemm_a16w16_quant_x";
    const QUANT: &str = "x_quant";
    const SCALE: &str = "x_scale";
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
    let product =
        Product { names: OPERANDS, kernels: T::QUANT_X, bias, ..a16w16::product(OP, x, w, false, options) };
    let made: [(NamedOperand, &[&'static str]); 4] = [
        ((OPERANDS.y, Some(&y)), &[]),
        ((QUANT, Some(&x_quant)), &[]),
        ((SCALE, Some(&x_scale)), &[]),
        (("workspace", erased(workspace.as_ref())), &[]),
    ];
    check_aliases(OP, &product.inputs(), &made)?;
    let mut checked = product.check(stream, To::Y(y), workspace.as_ref())?;

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
    // Parts of K that are not summed are y's.
    let mut planes = workspace.filter(|_| !options.skip_reduce);
    let store = sums(&checked, &mut planes);
    let objects = if tile.skinny() { T::QUANT_X.skinny } else { T::QUANT_X.tiles };
    let kernel = stream.kernel(objects, T::QUANT_X.names[tile.index()])?;
    let mut launch = stream.launch(OP, &kernel);
    let Checked { to, sizes, plan } = &mut checked;
    let Given::Plain(given) = product.given(&mut launch, to, sizes, plan, store, planes.as_mut())? else {
        return Err(Error::unsupported(OP, "its operands", "16-bit floats"));
    };
    let (of_quant, of_scale) = (launch.output(QUANT, &mut x_quant)?, launch.output(SCALE, &mut x_scale)?);
    let params = QuantXParams {
        product: given,
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
    // SAFETY: as of the product alone: the checks make its tensors as long as its tiles cover; `x_quant` and `x_scale` have as
    // many rows and blocks as x, which the kernel bounds the others by.
    unsafe { launch.run(LaunchConfig::grid_1d(grid), &params) }?;
    match planes {
        Some(planes) => {
            product.reduce(stream, &mut checked.to, &checked.sizes, Some((planes, checked.plan.splits)))
        }
        None => Ok(()),
    }
}

/// How scales follow, as `hk_quant` has it: of fp8, those of blocks that are not zero are at least 2^-126.
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
