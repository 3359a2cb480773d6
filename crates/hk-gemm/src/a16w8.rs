//! Products of 16-bit floats by int8 and fp8.

use crate::a8w8::{self, MatrixCode, expect_served};
use crate::a16w16::Half;
use crate::config::{GemmTile, Precision};
use crate::kernels;
use crate::problem::{
    After, BlockScales, BlockShape, Blocks, GROUP, GemmOptions, Grouping, Kernels, NAMES, Product, Scales, To,
};
use crate::quantized::Quantized;
use crate::views::{FloatView, Weight};
use bytemuck::{Pod, Zeroable};
use hk_core::quant::{CodeFormat, GroupSize};
use hk_core::{DType, DeviceInfo, Error, Float, LaunchConfig, Result, Stream, TensorView, TensorViewMut};
use hk_quant::{GroupOptions, group_quant};

/// Length of the workspace, in `f32`, for [`gemm_a16w8_blockscale`] with `prequant`, or [`batched_gemm_a8w8_ptgq`], to quantize `a`
/// but once, in groups of `group` columns, and to cut K into as many parts as suit the device. A shorter one, or none, is as good but
/// for speed, if rows of `a` begin on 16 bytes and groups are of 128 columns.
pub fn gemm_a16w8_workspace(info: &DeviceInfo, [batch, m, n, k]: [usize; 4], group: usize) -> usize {
    let planes =
        [Precision::Fp8, Precision::HalfByByte].map(|p| crate::gemm_workspace(info, p, [batch, m, n, k]));
    Quantized::<i8, f32>::new(&[batch, m, k], group).len().saturating_add(planes[0].max(planes[1]))
}

/// There are none.
static NONE: Kernels =
    Kernels { tiles: &kernels::QUANTIZED8, skinny: &kernels::QUANTIZED8, names: [""; GemmTile::COUNT] };

/// What the two operators have in common.
struct Call<'a, T: Half, C: MatrixCode> {
    op: &'static str,
    a: TensorView<'a, T>,
    w: Weight<'a, C>,
    w_scale: TensorView<'a, f32>,
    group: BlockShape,
    bias: Option<FloatView<'a>>,
    options: GemmOptions,
}

impl<'a, T: Half, C: MatrixCode> Call<'a, T, C> {
    /// The product with activations as they are, or quantized on their way.
    fn product(&self, quantized: bool) -> Product<'a, T, C> {
        let half = usize::from(T::DTYPE == DType::F16);
        Product {
            op: self.op,
            names: NAMES,
            kernels: match quantized {
                false => self.group.kernels(C::OF_HALVES[half]),
                true if self.group.k == GROUP => C::OF_QUANTIZED[half],
                true => &NONE,
            },
            precision: Precision::HalfByByte,
            x: self.a,
            w: self.w,
            scales: Scales::default(),
            blocks: Blocks::Weights { w: self.w_scale, group: self.group },
            bias: self.bias,
            grouping: Grouping::Batches,
            after: After::default(),
            gated: false,
            options: self.options,
        }
    }

    fn run_quantized<Y: Float>(
        mut self,
        stream: &Stream,
        mut to: To<'_, 'a, Y>,
        workspace: Option<TensorViewMut<'a, f32>>,
    ) -> Result<()> {
        self.group.check(self.op)?;
        let quantized = Quantized::<C, f32>::new(self.a.shape(), self.group.k);
        if let Some(config) = quantized.on_their_way(&self.product(true), workspace.as_ref())? {
            self.options.config = config;
            return self.product(true).run(stream, to, workspace);
        }
        let (codes, scales, planes) = quantized.places(self.op, &self.a, &mut to, workspace)?;
        let (x, x_scale) = (codes.alias(), scales.alias());
        // Groups of w are as wide as those of a, or wider: both are read as the former.
        let blocks = BlockScales { x: x_scale, w: self.w_scale, group: self.group };
        let product = Product {
            kernels: self.group.kernels(C::BLOCK),
            blocks: Blocks::F32(blocks),
            bias: self.bias,
            ..a8w8::product(self.op, stream, x, self.w, self.options)?
        };
        let checked = product.check(stream, to, Some(&planes))?;
        let size = [GroupSize::G32, GroupSize::G64, GroupSize::G128]
            .into_iter()
            .find(|size| size.columns() == self.group.k);
        quantized.each_batch(self.op, self.a, codes, scales, |x, q, scale| match size {
            Some(group) => group_quant(stream, x, q, scale, GroupOptions { group, pow2_scale: false }),
            None => self.quantize(stream, x, q, scale),
        })?;
        product.launch(stream, checked, Some(planes))
    }

    /// [`group_quant`] of rows of `x`, with groups of any length.
    fn quantize(
        &self,
        stream: &Stream,
        x: TensorView<T>,
        mut q: TensorViewMut<C>,
        mut scale: TensorViewMut<f32>,
    ) -> Result<()> {
        let [rows, cols] = x.dims::<2>(self.op, "a")?;
        let name = if T::DTYPE == DType::F16 { "gemm_group_quant_f16" } else { "gemm_group_quant_bf16" };
        let kernel = stream.kernel(&kernels::GROUP_QUANT, name)?;
        let mut launch = stream.launch(self.op, &kernel);
        let groups = cols.div_ceil(self.group.k);
        let params = GroupQuantParams {
            x: launch.input("a", &x)?.data(),
            q: launch.output("workspace", &mut q)?.data(),
            scale: launch.output("workspace", &mut scale)?.data(),
            x_row: x.strides()[0] as i64,
            rows: rows as u64,
            cols: cols as u32,
            groups: groups as u32,
            group: self.group.k as u32,
            format: C::FORMAT,
            pad: 0,
        };
        let blocks = rows.saturating_mul(groups).div_ceil(GROUPS_OF_BLOCK);
        let most = stream.device().info().compute_units as usize * BLOCKS_PER_CU;
        // SAFETY: codes and scales, which are contiguous, are as many as x has elements and groups; the kernel covers both, whatever
        // the grid.
        unsafe { launch.run(LaunchConfig::grid_1d(blocks.min(most)), &params) }
    }
}

/// `Params` in `hip/group_quant.hip`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct GroupQuantParams {
    x: u64,
    q: u64,
    scale: u64,
    x_row: i64,
    rows: u64,
    cols: u32,
    groups: u32,
    group: u32,
    format: CodeFormat,
    pad: u32,
}

/// Waves of a block of `hip/group_quant.hip`, each with a group; blocks a CU.
const GROUPS_OF_BLOCK: usize = 4;
const BLOCKS_PER_CU: usize = 8;

/// Product of 16-bit floats by codes with a scale for each block:
/// `y[m, n] = activation(sum_g w_scale[n / group.n, g] sum_{k in g} q(a)[m, k] w[n, k])`.
///
/// | arg         | shape                        | dtype                | layout                                                    |
/// |-------------|------------------------------|----------------------|-----------------------------------------------------------|
/// | `a`         | `[M, K]`                     | `bf16`, `f16`        | unit stride on `K`, any row stride                        |
/// | `w`         | `[N, K]`                     | [`MatrixCode`]       | likewise, or a [`ShuffledWeight`](crate::ShuffledWeight)  |
/// | `w_scale`   | `[groups of N, groups of K]` | `f32`                | any strides                                               |
/// | `y`         | `[M, N]`                     | `bf16`, `f16`, `f32` | unit stride on `N`, any row stride                        |
/// | `workspace` | `[n]`                        | `f32`                | contiguous, 16-byte aligned; see [`gemm_a16w8_workspace`] |
///
/// Without `prequant`, `q(a)` is `a`, and `w` the same type, exactly. With it, each `group.k` columns of a row of `a` are quantized to
/// the type of `w`, as by [`group_quant`] (`s = max(max |a|, 1e-10) / qmax`), and their products multiplied by `s`: up to 32 rows on
/// their way to the product, if groups are of 128 columns, more once, into the workspace. Sums of 128 columns are scaled into `f32`
/// (of 32, or a group, if a group has less than 128); there is one rounding, to the type of `y`. All else is as of
/// [`gemm_a8w8_blockscale`](crate::gemm_a8w8_blockscale).
///
/// # Errors
/// As `gemm_a8w8_blockscale`; with `prequant` [`Shape`](Error::Shape) for a workspace without room for the codes of `a`, if its rows
/// do not begin on 16 bytes, the options ask for tiles of more than 32 rows, or groups are not of 128 columns.
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn gemm_a16w8_blockscale<'a, T: Half, C: MatrixCode, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<Weight<'a, C>>,
    w_scale: TensorView<'a, f32>,
    group: BlockShape,
    prequant: bool,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<'a, f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "gemm_a16w8_blockscale";
    expect_served::<C>(OP, stream)?;
    a.dims::<2>(OP, "a")?;
    let call = Call { op: OP, a, w: w.into(), w_scale, group, bias: None, options };
    if !prequant {
        return call.product(false).run(stream, To::Y(y), workspace);
    }
    call.run_quantized(stream, To::Y(y), workspace)
}

/// Products of 16-bit floats, quantized by tokens and groups, by codes with one scale for all:
/// `y[b, m, n] = activation(w_scale sum_g s[b, m, g] sum_{k in g} q(a)[b, m, k] w[b, n, k] + bias[b, n])`.
///
/// | arg         | shape                         | dtype                | layout                                                   |
/// |-------------|-------------------------------|----------------------|----------------------------------------------------------|
/// | `a`         | `[batch, M, K]`               | `bf16`, `f16`        | unit stride on `K`, others free                          |
/// | `w`         | `[batch, N, K]`               | [`MatrixCode`]       | likewise, or a [`ShuffledWeight`](crate::ShuffledWeight) |
/// | `w_scale`   | `[1]`                         | `f32`                |                                                          |
/// | `bias`      | `[batch, N]`, `[batch, 1, N]` | `bf16`, `f16`, `f32` | contiguous                                               |
/// | `y`         | `[batch, M, N]`               | `bf16`, `f16`, `f32` | unit stride on `N`, others free                          |
/// | `workspace` | `[n]`                         | `f32`                | as of [`gemm_a16w8_blockscale`]                          |
///
/// Groups of `a` are `group` columns, a power of two (128 is the fastest), quantized as by [`gemm_a16w8_blockscale`] with `prequant`.
/// Activations and outputs with `M` as their first axis are views with their axes exchanged ([`TensorView::transpose`]).
///
/// # Errors
/// As `gemm_a16w8_blockscale`.
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn batched_gemm_a8w8_ptgq<'a, T: Half, C: MatrixCode, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<Weight<'a, C>>,
    w_scale: TensorView<'a, f32>,
    group: usize,
    bias: Option<FloatView<'a>>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<'a, f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "batched_gemm_a8w8_ptgq";
    expect_served::<C>(OP, stream)?;
    let [_, _, k] = a.dims::<3>(OP, "a")?;
    let w = w.into();
    let &[batch, n, _] = w.view().shape() else {
        return Err(Error::shape(OP, "w", w.view().shape(), "[batch, rows, cols]"));
    };
    w_scale.expect_shape(OP, "w_scale", [1])?;
    let group = BlockShape { n: n.max(4).checked_next_power_of_two().unwrap_or(1), k: group };
    group.check(OP)?;
    let w_scale = w_scale.broadcast([batch, n.div_ceil(group.n), k.div_ceil(group.k)])?;
    let call = Call { op: OP, a, w, w_scale, group, bias, options };
    call.run_quantized(stream, To::Y(y), workspace)
}
