//! `fused_moe`, a whole mixture-of-experts layer, and `moe_op_e2e`.

use crate::args::Vector;
use crate::experts::{
    ExpertEpilogue, ExpertGate, ExpertGemm, ExpertInputs, ExpertRows, ExpertScales, RaggedRows, SortedRows,
    each_float, float_address,
};
use crate::lists::{self, SMALL_TOKENS};
use crate::moe_op::silu_fused;
use crate::quantize::{RowsToQuantize, Scaled};
use crate::sum::{OfExperts, SumInputs, sum};
use crate::topk::check_weights;
use crate::{
    ExptData, Routing, RoutingOptions, TileLists, TopkOptions, moe_align_len, moe_align_workspace,
    moe_block_m, moe_max_tiles, moe_routing_workspace,
    routing::{self, mean_rows},
};
use hk_core::quant::Quantized;
use hk_core::{
    Arch, DType, DeviceInfo, E8M0, Element, Error, Float, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz, Launch, NamedOperand,
    Result, Stream, TensorView, TensorViewMut, bf16, check_aliases, f16,
};
use hk_gemm::{BlockShape, FloatView, GemmWeight, Half, MxScaleView};
use hk_quant::{GroupOptions, MxOptions, PerTokenOptions, dynamic_mxfp4_quant, group_quant, per_token_quant};

const OP: &str = "fused_moe";
/// Alignment of the parts of a workspace.
const ALIGN: usize = 256;
/// Tokens of a chunk are a multiple of this.
const CHUNK: usize = 256;

/// How the experts of tokens are found.
#[derive(Debug, Clone, Copy)]
pub enum FusedRouting<'a> {
    /// By [`moe_routing`](crate::moe_routing()).
    Logits {
        /// `[T, E]`.
        logits: FloatView<'a>,
        /// `[E]`.
        bias: Option<TensorView<'a, f32>>,
        /// Experts of a token.
        k: usize,
        /// How they are chosen and weighted.
        topk: TopkOptions,
    },
    /// Given: `[T, k]` each. Ids outside the experts are dropped. Shared experts can be further choices of all tokens.
    Chosen {
        /// Of `0..experts`.
        ids: TensorView<'a, i32>,
        /// Weights.
        weights: TensorView<'a, f32>,
        /// Experts, those of other ranks too.
        experts: usize,
    },
}

/// Scales of the weights, and with them how activations are quantized, on the fly, ahead of each GEMM.
#[expect(clippy::large_enum_variant, reason = "there is one of them at a time")]
#[derive(Debug, Clone, Copy)]
pub enum FusedScales<'a> {
    /// 16-bit weights, not quantized.
    None,
    /// `i8` or fp8 weights with f32 scales `[E, N]`, `[E]` or `[1]`; each row of activations has a scale.
    Rows {
        /// Of `w1`.
        w1: TensorView<'a, f32>,
        /// Of `w2`.
        w2: TensorView<'a, f32>,
    },
    /// `i8` or fp8 weights with f32 scales `[E, groups of N, groups of K]` of 128 by 128; activations of 1 by 128.
    Blocks {
        /// Of `w1`.
        w1: TensorView<'a, f32>,
        /// Of `w2`.
        w2: TensorView<'a, f32>,
    },
    /// mxfp4 weights `[E, N, K / 32]`, or shuffled.
    Mx {
        /// Of `w1`.
        w1: MxScaleView<'a>,
        /// Of `w2`.
        w2: MxScaleView<'a>,
        /// Type of the activations.
        activations: MxActivations,
    },
    /// `u8` weights of groups of columns, see [`ExpertScales::Groups`]; activations are as they are.
    Groups {
        /// 8, or 4: two columns in a byte, the even one in the low half.
        bits: u32,
        /// Columns that share a scale.
        group: usize,
        /// Of `w1`.
        w1: GroupScales<'a>,
        /// Of `w2`.
        w2: GroupScales<'a>,
    },
}

/// Scales and zero points of groups, as those of [`ExpertScales::Groups`].
#[derive(Debug, Clone, Copy)]
pub struct GroupScales<'a> {
    /// `[E, N, groups]`, of the type of the activations or f32.
    pub scale: FloatView<'a>,
    /// `[E, N, groups]`; of 4 bits `[E, N / 2, groups]`. Without: 128, of 4 bits 8.
    pub zero: Option<TensorView<'a, u8>>,
}

/// Activations by mxfp4 weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MxActivations {
    /// As they are.
    Half,
    /// Quantized to the device's fp8, a scale for each row.
    Fp8,
    /// Quantized to mxfp4.
    Fp4,
}

/// Experts that every token has besides those that routing chooses, as one gated MLP: several lie side by side in its inner width.
#[derive(Debug, Clone, Copy)]
pub struct SharedExperts<'a, W: Element> {
    /// `[1, 2 S, H]`, gates and values as `gate` of the layer says.
    pub w1: GemmWeight<'a, W>,
    /// `[1, H, S]`.
    pub w2: GemmWeight<'a, W>,
    /// Of both, of the kind of the layer's.
    pub scales: FusedScales<'a>,
}

/// Operands of [`fused_moe`], whose output is of type `Y`.
#[derive(Debug, Clone, Copy)]
pub struct FusedMoeInputs<'a, T: Element, W: Element, Y: Element = T> {
    /// `[T, H]`.
    pub x: TensorView<'a, T>,
    /// `[E', 2 I, H]`, gates and values as `gate` says.
    pub w1: GemmWeight<'a, W>,
    /// `[E', H, I]`.
    pub w2: GemmWeight<'a, W>,
    /// Of both.
    pub scales: FusedScales<'a>,
    /// `[E', 2 I]`.
    pub w1_bias: Option<FloatView<'a>>,
    /// `[E', H]`.
    pub w2_bias: Option<FloatView<'a>>,
    /// Function of gates and values.
    pub gate: ExpertGate,
    /// Experts of the tokens.
    pub routing: FusedRouting<'a>,
    /// `[E]`: the matrix of each expert on this rank, negative for those of others. Without: `E' = E`.
    pub expert_map: Option<TensorView<'a, i32>>,
    /// Added to the sum, with the weight 1. On one of the ranks that share the experts, or a part of its inner width on each.
    pub shared: Option<SharedExperts<'a, W>>,
    /// `[T, H]`: added to the sum.
    pub residual: Option<TensorView<'a, Y>>,
}

/// The sizes that a workspace of [`fused_moe`] follows from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FusedMoeProblem {
    /// Tokens.
    pub tokens: usize,
    /// Experts of a token.
    pub k: usize,
    /// Experts, of all ranks.
    pub experts: usize,
    /// Width of tokens.
    pub hidden: usize,
    /// Width of an expert's intermediate.
    pub inner: usize,
    /// That of [`SharedExperts`], 0 without.
    pub shared: usize,
}

impl FusedMoeProblem {
    /// Bytes for all of the tokens at once. Quantized activations are counted as 8 bits with a scale for 32 columns.
    fn bytes(&self) -> usize {
        let &Self { tokens, k, experts, hidden, inner, shared } = self;
        let gates = tokens.saturating_mul(k);
        // Both ways of routing, with the list tiles that need most.
        let routed = gates.saturating_mul(3)
            + 3 * experts
            + 2
            + moe_max_tiles(gates, experts, 16)
            + moe_routing_workspace(tokens, k, experts);
        let slots = moe_align_len(tokens, k, experts, 128).saturating_add(128);
        let sorted =
            slots.saturating_add(slots / 16 + 2).saturating_add(moe_align_workspace(tokens, k, experts));
        let lists = routed.max(sorted).saturating_mul(4);
        let quantized = |rows: usize, cols: usize| rows.saturating_mul(cols + cols.div_ceil(128) * 4 + 4);
        let floats = gates.saturating_mul(2 * (inner + hidden));
        let of_shared = if shared == 0 { 0 } else { tokens.saturating_mul(2 * (shared + hidden)) };
        let activations = [quantized(tokens, hidden), quantized(gates, inner), quantized(tokens, shared)];
        [lists, floats, of_shared, 32 * ALIGN].into_iter().chain(activations).fold(0, usize::saturating_add)
    }

    fn chunk(&self, bytes: usize) -> Option<usize> {
        if self.bytes() <= bytes {
            return Some(self.tokens);
        }
        // Bytes grow with the tokens.
        let fits = |chunks: usize| Self { tokens: chunks * CHUNK, ..*self }.bytes() <= bytes;
        let (mut low, mut high) = (0, self.tokens.div_ceil(CHUNK));
        while high - low > 1 {
            let middle = low.midpoint(high);
            if fits(middle) { low = middle } else { high = middle }
        }
        (low > 0).then_some(low * CHUNK)
    }
}

/// Bytes of the workspace of [`fused_moe`]: for all tokens at once or, if that is more than `limit`, for the most at a time that fit
/// it, at least 256.
pub fn fused_moe_workspace(problem: &FusedMoeProblem, limit: Option<usize>) -> usize {
    let all = problem.bytes();
    let least = FusedMoeProblem { tokens: problem.tokens.min(CHUNK), ..*problem }.bytes();
    limit.map_or(all, |limit| all.min(limit.max(least)))
}

/// Parts of a workspace, one after the other.
struct Space<'a>(Option<TensorViewMut<'a, u8>>);

impl<'a> Space<'a> {
    /// The next part, and the same as an input.
    fn take<U: Element, const N: usize>(
        &mut self,
        shape: [usize; N],
    ) -> Result<(TensorViewMut<'a, U>, TensorView<'a, U>)> {
        let too_small = || Error::argument(OP, "workspace", "too small", "fused_moe_workspace bytes");
        let rest = self.0.take().ok_or_else(too_small)?;
        let bytes = shape.iter().product::<usize>().saturating_mul(size_of::<U>()).next_multiple_of(ALIGN);
        if bytes > rest.numel() {
            return Err(too_small());
        }
        let (part, rest) = rest.split_at(0, bytes)?;
        self.0 = Some(rest);
        let part = part.cast::<U>(OP, "workspace")?.reshape_front(OP, "workspace", shape)?;
        let view = part.alias();
        Ok((part, view))
    }
}

/// Scales of quantized activations.
#[derive(Clone, Copy)]
enum ActivationScales<'a> {
    None,
    Rows(TensorView<'a, f32>),
    Blocks(TensorView<'a, f32>),
    Mx(TensorView<'a, E8M0>),
}

/// The scales of a GEMM by `w1` (`first`) or `w2`.
fn scales_of<'a>(scales: &FusedScales<'a>, first: bool, a: ActivationScales<'a>) -> ExpertScales<'a> {
    let group = BlockShape::default();
    match (*scales, a) {
        (FusedScales::Rows { w1, w2 }, ActivationScales::Rows(a)) => {
            ExpertScales::Rows { a: Some(a), w: if first { w1 } else { w2 } }
        }
        (FusedScales::Blocks { w1, w2 }, ActivationScales::Blocks(a)) => {
            ExpertScales::Blocks { a, a_rows: 1, w: if first { w1 } else { w2 }, group }
        }
        (FusedScales::Mx { w1, w2, .. }, a) => {
            let w = if first { w1 } else { w2 };
            let (a, a_rows) = match a {
                ActivationScales::Mx(a) => (Some(MxScaleView::Rows(a)), None),
                ActivationScales::Rows(a) => (None, Some(a)),
                _ => (None, None),
            };
            ExpertScales::Mx { a, w, a_rows, w_rows: None }
        }
        (FusedScales::Groups { bits, group, w1, w2 }, _) => {
            let GroupScales { scale, zero } = if first { w1 } else { w2 };
            ExpertScales::Groups { bits, group, scale, zero }
        }
        _ => ExpertScales::None,
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for hk_core::bf16 {}
    impl Sealed for hk_core::f16 {}
    impl Sealed for i8 {}
    impl Sealed for u8 {}
    impl Sealed for hk_core::Fp8E4M3 {}
    impl Sealed for hk_core::Fp8E4M3Fnuz {}
    impl Sealed for hk_core::Fp4x2 {}
}

/// Activations as a GEMM takes them, their scales, and what is still to be launched for that.
type Activations<'a, A> = (TensorView<'a, A>, ActivationScales<'a>, Option<RowsToQuantize>);

/// Weights of [`fused_moe`] by activations of type `T`: `T` itself, `i8`, fp8, mxfp4, and `u8` in groups.
pub trait FusedWeight<T: Half>: Element + sealed::Sealed {
    #[doc(hidden)]
    fn layer<Y: Float>(stream: &Stream, layer: Layer<'_, T, Self, Y>) -> Result<()>
    where
        Self: Sized;
}

/// Activations that are not quantized.
fn as_they_are<'a, T: Half>(
    _: &Stream,
    x: TensorView<'a, T>,
    _: &mut Space<'a>,
    _: bool,
) -> Result<Activations<'a, T>> {
    Ok((x, ActivationScales::None, None))
}

macro_rules! half {
    ($($t:ty),+) => {
        $(impl FusedWeight<$t> for $t {
            fn layer<Y: Float>(stream: &Stream, layer: Layer<'_, $t, Self, Y>) -> Result<()> {
                layer.expect(matches!(layer.inputs.scales, FusedScales::None), "FusedScales::None")?;
                layer.run(stream, &as_they_are::<$t>)
            }
        })+
    };
}
half!(bf16, f16);

impl<T: Half> FusedWeight<T> for u8 {
    fn layer<Y: Float>(stream: &Stream, layer: Layer<'_, T, Self, Y>) -> Result<()> {
        layer.expect(matches!(layer.inputs.scales, FusedScales::Groups { .. }), "FusedScales::Groups")?;
        layer.run(stream, &as_they_are::<T>)
    }
}

/// A scale for each row.
fn by_rows<'a, T: Half, Q: Quantized>(
    stream: &Stream,
    x: TensorView<'a, T>,
    space: &mut Space<'a>,
    later: bool,
) -> Result<Activations<'a, Q>> {
    let [rows, cols] = x.dims(OP, "x")?;
    let (q, view) = space.take::<Q, 2>([rows, cols])?;
    let (scale, scales) = space.take::<f32, 1>([rows])?;
    let to_launch = if later {
        Some(RowsToQuantize::new(stream, OP, Scaled::Rows(Q::FORMAT), (x, q, scale))?)
    } else {
        per_token_quant(stream, x, q, scale, PerTokenOptions::default())?;
        None
    };
    Ok((view, ActivationScales::Rows(scales), to_launch))
}

fn by_blocks<'a, T: Half, Q: Quantized>(
    stream: &Stream,
    x: TensorView<'a, T>,
    space: &mut Space<'a>,
    later: bool,
) -> Result<Activations<'a, Q>> {
    let [rows, cols] = x.dims(OP, "x")?;
    let (q, view) = space.take::<Q, 2>([rows, cols])?;
    let (scale, scales) = space.take::<f32, 2>([rows, cols.div_ceil(128)])?;
    let to_launch = if later {
        Some(RowsToQuantize::new(stream, OP, Scaled::Blocks(Q::FORMAT), (x, q, scale))?)
    } else {
        group_quant::<T, Q, f32>(stream, x, q, scale, GroupOptions::default())?;
        None
    };
    Ok((view, ActivationScales::Blocks(scales), to_launch))
}

fn by_mx<'a, T: Half>(
    stream: &Stream,
    x: TensorView<'a, T>,
    space: &mut Space<'a>,
    later: bool,
) -> Result<Activations<'a, Fp4x2>> {
    let [rows, cols] = x.dims(OP, "x")?;
    let (q, view) = space.take::<Fp4x2, 2>([rows, cols / 2])?;
    let (scale, scales) = space.take::<E8M0, 2>([rows, cols.div_ceil(32)])?;
    let to_launch = if later {
        Some(RowsToQuantize::new(stream, OP, Scaled::Mxfp4, (x, q, scale))?)
    } else {
        dynamic_mxfp4_quant(stream, x, q, scale, MxOptions::default())?;
        None
    };
    Ok((view, ActivationScales::Mx(scales), to_launch))
}

macro_rules! quantized {
    ($($t:ty),+) => {
        $(impl<T: Half> FusedWeight<T> for $t {
            fn layer<Y: Float>(stream: &Stream, layer: Layer<'_, T, Self, Y>) -> Result<()> {
                match layer.inputs.scales {
                    FusedScales::Rows { .. } => layer.run(stream, &by_rows::<T, Self>),
                    FusedScales::Blocks { .. } => layer.run(stream, &by_blocks::<T, Self>),
                    _ => layer.expect(false, "FusedScales::Rows or FusedScales::Blocks"),
                }
            }
        })+
    };
}
quantized!(i8, Fp8E4M3, Fp8E4M3Fnuz);

impl<T: Half> FusedWeight<T> for Fp4x2 {
    fn layer<Y: Float>(stream: &Stream, layer: Layer<'_, T, Self, Y>) -> Result<()> {
        let FusedScales::Mx { activations, .. } = layer.inputs.scales else {
            return layer.expect(false, "FusedScales::Mx");
        };
        match activations {
            MxActivations::Half => layer.run(stream, &as_they_are::<T>),
            MxActivations::Fp8 if stream.device().arch() == Arch::Gfx942 => {
                layer.run(stream, &by_rows::<T, Fp8E4M3Fnuz>)
            }
            MxActivations::Fp8 => layer.run(stream, &by_rows::<T, Fp8E4M3>),
            MxActivations::Fp4 => layer.run(stream, &by_mx::<T>),
        }
    }
}

/// A call of [`fused_moe`].
#[doc(hidden)]
pub struct Layer<'a, T: Half, W: Element, Y: Float> {
    inputs: FusedMoeInputs<'a, T, W, Y>,
    problem: FusedMoeProblem,
    y: TensorViewMut<'a, Y>,
    workspace: TensorViewMut<'a, u8>,
}

/// Quantizes rows of 16-bit floats, or says how the caller is to do it.
type Quantize<'f, T, A> =
    dyn for<'a> Fn(&Stream, TensorView<'a, T>, &mut Space<'a>, bool) -> Result<Activations<'a, A>> + 'f;

impl<T: Half, W: Element, Y: Float> Layer<'_, T, W, Y> {
    fn expect(&self, fits: bool, want: &str) -> Result<()> {
        let got = format!("{:?}", self.inputs.scales);
        if fits {
            Ok(())
        } else {
            Err(Error::argument(OP, "scales", got, format!("{want} for {} weights", W::DTYPE)))
        }
    }

    /// Runs the tokens, in chunks that fit the workspace.
    fn run<A: Element>(mut self, stream: &Stream, quantize: &Quantize<'_, T, A>) -> Result<()> {
        let tokens = self.problem.tokens;
        let needed = fused_moe_workspace(&self.problem, Some(0));
        let Some(chunk) = self.problem.chunk(self.workspace.numel()) else {
            let got = [self.workspace.numel()];
            return Err(Error::shape(
                OP,
                "workspace",
                got,
                format!("[{needed}] or longer (fused_moe_workspace)"),
            ));
        };
        // The list tiles of all tokens: chunks give the same bits.
        let block = self.list_rows(stream.device().info());
        for first in (0..tokens).step_by(chunk.max(1)) {
            self.run_chunk(stream, quantize, first..tokens.min(first + chunk), block)?;
        }
        Ok(())
    }

    /// Rows of a list tile.
    fn list_rows(&self, info: &DeviceInfo) -> usize {
        let FusedMoeProblem { tokens, k, experts, inner, .. } = self.problem;
        let arch = info.arch;
        let widened = match self.inputs.scales {
            FusedScales::None | FusedScales::Rows { .. } | FusedScales::Blocks { .. } => false,
            FusedScales::Mx { activations, .. } => activations != MxActivations::Fp4,
            FusedScales::Groups { .. } => true,
        };
        // NVIDIA's: measured, `docs/performance.md`.
        let fits_16 = if arch.is_amd() { 32 } else { 10 };
        match (moe_block_m(tokens, k, experts), widened) {
            (64, true) if mean_rows(tokens, k, experts) <= fits_16 => 16,
            // 128 x 256 loads fewer bytes to a CU than 64 x 64, which there is the limit even of half-empty tiles, if most CUs have one.
            (64, false) if arch == Arch::Gfx950 => {
                let blocks = moe_max_tiles(tokens.saturating_mul(k), experts, 128)
                    .saturating_mul((2 * inner).div_ceil(256));
                if blocks >= info.compute_units as usize * 3 / 4 { 128 } else { 64 }
            }
            (block, _) => block,
        }
    }

    fn run_chunk<A: Element>(
        &mut self,
        stream: &Stream,
        quantize: &Quantize<'_, T, A>,
        tokens: std::ops::Range<usize>,
        block: usize,
    ) -> Result<()> {
        let inputs = &self.inputs;
        let FusedMoeProblem { k, experts, hidden, inner, shared: shared_inner, .. } = self.problem;
        let count = tokens.len();
        let gates = count * k;
        let mut space = Space(Some(self.workspace.reborrow()));
        let expert_map = inputs.expert_map;

        // Beyond a single launch of routing, the second quantizes x.
        let x = inputs.x.slice(0, tokens.clone())?;
        let (a, a_scales, to_quantize) = quantize(stream, x, &mut space, count > SMALL_TOKENS)?;

        // Routing.
        let (rows, second_rows, weights, places, ids) = match &inputs.routing {
            FusedRouting::Logits { logits, bias, topk, .. } => {
                let tiles = moe_max_tiles(gates, experts, block);
                let (gather_indx, gather) = space.take::<i32, 1>([gates])?;
                let (scatter_indx, places) = space.take::<i32, 1>([gates])?;
                let (gate_scal, weights) = space.take::<f32, 1>([gates])?;
                let (expt_hist, _) = space.take::<i32, 1>([experts])?;
                let (token_offs_raw, offsets) = space.take::<i32, 1>([experts + 1])?;
                let (token_offs_pad, _) = space.take::<i32, 1>([experts + 1])?;
                let (block_pid_map, map) = space.take::<i32, 1>([tiles])?;
                let (workspace, _) = space.take::<i32, 1>([moe_routing_workspace(count, k, experts)])?;
                let ids = routing::ids_in(&workspace, count, k)?;
                let expt_data = ExptData { token_offs_raw, token_offs_pad, block_pid_map };
                let out = Routing { gather_indx, scatter_indx, gate_scal, expt_hist, expt_data };
                let options = RoutingOptions { k, block_m: block, topk: *topk };
                each_float!(*logits, v => {
                    let v = v.slice(0, tokens.clone())?;
                    routing::route(stream, v, *bias, expert_map, out, workspace, &options, to_quantize)
                })?;
                let ragged = RaggedRows {
                    gather_indx: Some(gather),
                    token_offs_raw: offsets,
                    block_pid_map: map,
                    block_m: block,
                    expert_map,
                };
                let second = RaggedRows { gather_indx: None, ..ragged };
                let places = places.split_axis(0, k)?;
                (ExpertRows::Ragged(ragged), ExpertRows::Ragged(second), weights, Some(places), ids)
            }
            FusedRouting::Chosen { ids, weights, .. } => {
                let (ids, weights) = (ids.slice(0, tokens.clone())?, weights.slice(0, tokens.clone())?);
                let len = moe_align_len(count, k, experts, block).next_multiple_of(block);
                let (sorted_token_ids, sorted) = space.take::<i32, 1>([len])?;
                let (expert_ids, of_tiles) = space.take::<i32, 1>([len / block])?;
                let (num_tokens_post_padded, padded) = space.take::<i32, 1>([1])?;
                let (workspace, _) = space.take::<i32, 1>([moe_align_workspace(count, k, experts)])?;
                let out = TileLists { sorted_token_ids, expert_ids, num_tokens_post_padded };
                lists::align(stream, ids, expert_map, out, workspace, [experts, block], to_quantize)?;
                let sorted = SortedRows {
                    sorted_token_ids: sorted,
                    expert_ids: of_tiles,
                    num_tokens_post_padded: padded,
                    block_size: block,
                    topk_ids: None,
                };
                (ExpertRows::Sorted(sorted), ExpertRows::Sorted(sorted), weights, None, ids)
            }
        };

        // Gates and values, and their product.
        let (h_out, h) = space.take::<T, 2>([gates, inner])?;
        let gate =
            ExpertEpilogue { gate: Some(inputs.gate), activation: None, weight_first: false, round: None };
        let first = ExpertInputs {
            a,
            w: inputs.w1,
            scales: scales_of(&inputs.scales, true, a_scales),
            bias: inputs.w1_bias,
            weights: None,
        };
        let names = ["x", "w1", "topk_weights", "h"];
        ExpertGemm { op: OP, names, inputs: first, rows, epilogue: gate, tile: None, keep: true }
            .run(stream, h_out)?;

        // The second GEMM, with the weights of the gates. Rows of shared experts come after those of the gates.
        let (of_h, h_scales, _) = quantize(stream, h, &mut space, false)?;
        let shared_rows = if inputs.shared.is_some() { count } else { 0 };
        let (y_out, of_gates) = space.take::<T, 2>([gates + shared_rows, hidden])?;
        let (y_out, shared_out) = y_out.split_at(0, gates)?;
        let second = ExpertInputs {
            a: of_h,
            w: inputs.w2,
            scales: scales_of(&inputs.scales, false, h_scales),
            bias: inputs.w2_bias,
            weights: Some(weights.into()),
        };
        let names = ["h", "w2", "topk_weights", "y"];
        let plain = ExpertEpilogue { gate: None, ..gate };
        ExpertGemm {
            op: OP,
            names,
            inputs: second,
            rows: second_rows,
            epilogue: plain,
            tile: None,
            keep: true,
        }
        .run(stream, y_out)?;

        if let Some(shared) = &inputs.shared {
            // Tiles are those of all tokens: chunks give the same bits.
            let block = self.problem.tokens.next_power_of_two().clamp(16, 256);
            let rows = ExpertRows::All { block };
            let gemm = |names, a, w, scales, epilogue| ExpertGemm {
                op: OP,
                names,
                inputs: ExpertInputs { a, w, scales, bias: None, weights: None },
                rows,
                epilogue,
                tile: None,
                keep: true,
            };
            let (h_out, h) = space.take::<T, 2>([count, shared_inner])?;
            let scales = scales_of(&shared.scales, true, a_scales);
            gemm(["x", "shared_w1", "", "h"], a, shared.w1, scales, gate).run(stream, h_out)?;
            let (h, h_scales, _) = quantize(stream, h, &mut space, false)?;
            let scales = scales_of(&shared.scales, false, h_scales);
            gemm(["h", "shared_w2", "", "y"], h, shared.w2, scales, plain).run(stream, shared_out)?;
        }

        let residual = inputs.residual.map(|r| r.slice(0, tokens.clone())).transpose()?;
        let experts = Some(OfExperts { ids, count: experts, map: expert_map });
        let y = self.y.reborrow().slice(0, tokens)?;
        let shared = inputs.shared.is_some();
        sum(stream, OP, SumInputs { x: of_gates, places, residual, experts, shared }, y)
    }
}

/// A mixture-of-experts layer: routing, `h = gate(x w1^T + w1_bias)`, `weights (h w2^T + w2_bias)`, and the sum over the experts of a
/// token.
///
/// | arg                 | shape                | dtype                             | layout                                        |
/// |---------------------|----------------------|-----------------------------------|-----------------------------------------------|
/// | `inputs.x`          | `[T, H]`             | `bf16`, `f16`                     | unit stride on `H`, rows on 16 bytes          |
/// | `y`                 | `[T, H]`             | as `x`, or `f32`                  | unit stride on `H`                            |
/// | `inputs.w1`         | `[E', 2 I, H]`       | as `x`, `i8`, fp8, mxfp4, `u8`    | rows on 16 bytes, or shuffled                 |
/// | `inputs.w2`         | `[E', H, I]`         | as `w1`                           | the same                                      |
/// | `inputs.scales`     | see [`FusedScales`]  | `f32`, `e8m0`, 16-bit floats      |                                               |
/// | `inputs.w1_bias`, `w2_bias` | `[E', 2 I]`, `[E', H]` | `bf16`, `f16`, `f32`    | optional, contiguous                          |
/// | `inputs.routing`    | see [`FusedRouting`] |                                   | ids and weights contiguous                    |
/// | `inputs.expert_map` | `[E]`                | `i32`                             | optional, contiguous                          |
/// | `inputs.shared`     | see [`SharedExperts`] | as `w1`                          | optional, as `w1` and `w2`                    |
/// | `inputs.residual`   | `[T, H]`             | as `y`                            | optional; unit stride on `H`, may be `y`      |
/// | `workspace`         | `[n]`, [`fused_moe_workspace`] | `u8`                    | contiguous, on 256 bytes                      |
///
/// Quantized weights have quantized activations, but for those in groups: `x` and `h` are quantized ahead of their GEMMs. `h`, the
/// output of each gate and that of the shared experts are rounded to the type of `x`; the sum is `f32`, in the order of the token's
/// experts, then shared experts and the residual, rounded once. An `f32` `y` is not rounded: ranks that have a part of the experts each
/// leave partial sums to an all-reduce. No atomics decide a bit: the same call gives the same bits, and so does any workspace, which
/// decides how many tokens are computed at a time. Gates of experts of other ranks and of ids outside the experts add nothing; weights
/// of experts without gates are not read.
///
/// Launches for each chunk of tokens: routing 1 up to 256 tokens, else 2; two GEMMs; the sum; if activations are quantized, `h`, and up
/// to 256 tokens `x`, which the second launch of routing takes along beyond. That is 4 to 6; shared experts are two more, three if
/// quantized. Nothing waits for the host: a graph can hold the call. No tokens: nothing is launched.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table or the workspace is too short,
/// [`Argument`](Error::Argument) for scales that the weights do not have, and as [`moe_routing`](crate::moe_routing()), [`moe_align_block_size`](crate::moe_align_block_size()),
/// [`moe_op`](crate::moe_op()), [`moe_sum`](crate::moe_sum()). `y` is not written then.
pub fn fused_moe<T: Half, W: FusedWeight<T>, Y: Float>(
    stream: &Stream,
    inputs: FusedMoeInputs<T, W, Y>,
    y: TensorViewMut<Y>,
    workspace: TensorViewMut<u8>,
) -> Result<()> {
    let problem = inputs.check(&y, &workspace)?;
    inputs.expect_device(stream)?;
    let mut y = y;
    stream.launch(OP).output_address("y", &mut y)?;
    if problem.tokens == 0 {
        return Ok(());
    }
    W::layer(stream, Layer { inputs, problem, y, workspace })
}

/// Rows that kernels load 16 bytes at a time.
fn expect_rows_on_16<T: Element>(op: &'static str, arg: &'static str, view: &TensorView<T>) -> Result<()> {
    view.expect_unit_stride(op, arg)?;
    let last = view.shape().last().copied().unwrap_or(0);
    if !(last * size_of::<T>()).is_multiple_of(16) {
        let want = format!("rows of a multiple of 16 bytes ({} elements)", 16 / size_of::<T>());
        return Err(Error::shape(op, arg, view.shape(), want));
    }
    if view.rows_aligned(16) { Ok(()) } else { Err(Error::Align { op, arg, addr: view.addr(), want: 16 }) }
}

fn view_of<'v, 'a, W: Element>(w: &'v GemmWeight<'a, W>) -> &'v TensorView<'a, W> {
    match w {
        GemmWeight::Rows(view) | GemmWeight::Shuffled(view) => view,
    }
}

/// What errors call the operands of shared experts.
const SHARED: [&str; 2] = ["shared_w1", "shared_w2"];
const SHARED_SCALES: [&str; 2] = ["shared_w1_scale", "shared_w2_scale"];

impl<'a> FusedScales<'a> {
    /// Refuses tensors of other devices.
    fn expect_device<'l>(&self, launch: &mut Launch<'l>, args: [&'static str; 2]) -> Result<()>
    where
        'a: 'l,
    {
        match self {
            Self::None => {}
            Self::Rows { w1, w2 } | Self::Blocks { w1, w2 } => {
                launch.input_address(args[0], w1)?;
                launch.input_address(args[1], w2)?;
            }
            Self::Mx { w1, w2, .. } => {
                for (arg, scale) in args.into_iter().zip([w1, w2]) {
                    let (MxScaleView::Rows(view) | MxScaleView::Shuffled(view)) = scale;
                    launch.input_address(arg, view)?;
                }
            }
            Self::Groups { w1, w2, .. } => {
                for (arg, GroupScales { scale, zero }) in args.into_iter().zip([w1, w2]) {
                    float_address(launch, arg, &Some(*scale))?;
                    if let Some(zero) = zero {
                        launch.input_address(arg, zero)?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Checks `w1` `[E, 2 I, hidden]`, `w2` `[E, hidden, I]` and their scales; returns `E` and `I`.
fn check_pair<W: Element>(
    args: [&'static str; 2],
    scale_args: [&'static str; 2],
    [w1, w2]: [&TensorView<W>; 2],
    scales: &FusedScales,
    hidden: usize,
) -> Result<[usize; 2]> {
    let in_byte = W::DTYPE == DType::Fp4x2 || matches!(scales, FusedScales::Groups { bits: 4, .. });
    let packed = if in_byte { 2 } else { 1 };
    let [local, rows, cols] = w1.dims(OP, args[0])?;
    if cols * packed != hidden || rows % 2 != 0 {
        let want = format!("[E, 2 I, {}] (columns of x)", hidden / packed);
        return Err(Error::shape(OP, args[0], w1.shape(), want));
    }
    let inner = rows / 2;
    w2.expect_shape(OP, args[1], [local, hidden, inner / packed])?;
    if inner % packed != 0 {
        let want = "an even number of gates, for two columns of w2 in a byte";
        return Err(Error::shape(OP, args[0], w1.shape(), want));
    }
    let sizes = [[rows, hidden], [hidden, inner]];
    match scales {
        FusedScales::Rows { w1, w2 } | FusedScales::Blocks { w1, w2 } => {
            let blocks = matches!(scales, FusedScales::Blocks { .. });
            for ((arg, view), [n, k]) in scale_args.into_iter().zip([w1, w2]).zip(sizes) {
                let shape = view.shape();
                let fits = if blocks {
                    shape == [local, n.div_ceil(128), k.div_ceil(128)]
                } else {
                    shape == [local, n] || shape == [local] || shape == [1]
                };
                if !fits {
                    let want =
                        if blocks { "[E, rows / 128, columns / 128]" } else { "[E, rows], [E] or [1]" };
                    return Err(Error::shape(OP, arg, shape, format!("{want} of weights [{n}, {k}]")));
                }
            }
        }
        FusedScales::Groups { group, w1, w2, .. } => {
            for ((arg, of), [n, k]) in scale_args.into_iter().zip([w1, w2]).zip(sizes) {
                let want = [local, n, k / (*group).max(1)];
                each_float!(of.scale, v => v.expect_shape(OP, arg, want)?);
            }
        }
        FusedScales::None | FusedScales::Mx { .. } => {}
    }
    expect_rows_on_16(OP, args[0], w1)?;
    expect_rows_on_16(OP, args[1], w2)?;
    Ok([local, inner])
}

impl<T: Half, W: Element, Y: Float> FusedMoeInputs<'_, T, W, Y> {
    /// Refuses tensors of other devices before anything is launched.
    fn expect_device(&self, stream: &Stream) -> Result<()> {
        let mut launch = stream.launch(OP);
        launch.input_address("x", &self.x)?;
        launch.input_address("w1", view_of(&self.w1))?;
        launch.input_address("w2", view_of(&self.w2))?;
        for (arg, bias) in [("w1_bias", &self.w1_bias), ("w2_bias", &self.w2_bias)] {
            float_address(&mut launch, arg, bias)?;
        }
        if let Some(map) = &self.expert_map {
            launch.input_address("expert_map", map)?;
        }
        if let Some(residual) = &self.residual {
            launch.input_address("residual", residual)?;
        }
        self.scales.expect_device(&mut launch, ["w1_scale", "w2_scale"])?;
        if let Some(shared) = &self.shared {
            launch.input_address(SHARED[0], view_of(&shared.w1))?;
            launch.input_address(SHARED[1], view_of(&shared.w2))?;
            shared.scales.expect_device(&mut launch, SHARED_SCALES)?;
        }
        if let FusedRouting::Chosen { ids, weights, .. } = &self.routing {
            launch.input_address("topk_ids", ids)?;
            launch.input_address("topk_weights", weights)?;
        }
        Ok(())
    }

    fn check(&self, y: &TensorViewMut<Y>, workspace: &TensorViewMut<u8>) -> Result<FusedMoeProblem> {
        let [tokens, hidden] = self.x.dims(OP, "x")?;
        y.expect_shape(OP, "y", [tokens, hidden])?;
        check_weights::<T, Y>(OP, "y")?;
        let (w1, w2) = (view_of(&self.w1), view_of(&self.w2));
        let [local, inner] =
            check_pair(["w1", "w2"], ["w1_scale", "w2_scale"], [w1, w2], &self.scales, hidden)?;
        let shared = match &self.shared {
            None => 0,
            Some(shared) => {
                let pair = [view_of(&shared.w1), view_of(&shared.w2)];
                let [matrices, inner] = check_pair(SHARED, SHARED_SCALES, pair, &shared.scales, hidden)?;
                if matrices != 1 {
                    return Err(Error::shape(OP, SHARED[0], pair[0].shape(), "[1, 2 S, H]"));
                }
                let same = match (&self.scales, &shared.scales) {
                    (FusedScales::Mx { activations: a, .. }, FusedScales::Mx { activations: b, .. }) => {
                        a == b
                    }
                    (a, b) => std::mem::discriminant(a) == std::mem::discriminant(b),
                };
                if !same {
                    let want = "scales of the kind of the layer's";
                    return Err(Error::argument(OP, "shared_scales", format!("{:?}", shared.scales), want));
                }
                inner
            }
        };
        let (k, experts, of_tokens) = match &self.routing {
            FusedRouting::Logits { logits, k, .. } => {
                let shape = match logits {
                    FloatView::Bf16(v) => v.shape(),
                    FloatView::F16(v) => v.shape(),
                    FloatView::F32(v) => v.shape(),
                };
                let &[of_tokens, experts] = shape else {
                    return Err(Error::shape(OP, "logits", shape, "[T, E]"));
                };
                (*k, experts, of_tokens)
            }
            FusedRouting::Chosen { ids, weights, experts } => {
                let [of_tokens, k] = ids.dims(OP, "topk_ids")?;
                weights.expect_shape(OP, "topk_weights", [of_tokens, k])?;
                weights.expect_packed(OP, "topk_weights")?;
                ids.expect_packed(OP, "topk_ids")?;
                (k, *experts, of_tokens)
            }
        };
        if of_tokens != tokens {
            let arg = if matches!(self.routing, FusedRouting::Logits { .. }) { "logits" } else { "topk_ids" };
            return Err(Error::shape(OP, arg, [of_tokens], format!("[{tokens}, ..] (rows of x)")));
        }
        crate::args::check_experts(OP, "experts", experts)?;
        crate::args::check_choices(OP, "k", k, crate::args::MOST_CHOICES)?;
        match &self.expert_map {
            Some(map) => map.expect_vector(OP, "expert_map", experts, "experts")?,
            None if local != experts => {
                let want = format!("{experts} experts, as there are, or an expert_map");
                return Err(Error::shape(OP, "w1", w1.shape(), want));
            }
            None => {}
        }
        if let Some(residual) = &self.residual {
            residual.expect_shape(OP, "residual", [tokens, hidden])?;
        }
        for (arg, bias, width) in [("w1_bias", &self.w1_bias, 2 * inner), ("w2_bias", &self.w2_bias, hidden)]
        {
            let Some(bias) = bias else { continue };
            let (shape, packed) = match bias {
                FloatView::Bf16(v) => (v.shape(), v.expect_packed(OP, arg)),
                FloatView::F16(v) => (v.shape(), v.expect_packed(OP, arg)),
                FloatView::F32(v) => (v.shape(), v.expect_packed(OP, arg)),
            };
            if shape != [local, width] {
                return Err(Error::shape(OP, arg, shape, format!("[{local}, {width}]")));
            }
            packed?;
        }
        expect_rows_on_16(OP, "x", &self.x)?;
        y.expect_unit_stride(OP, "y")?;
        y.expect_aligned(OP, "y", size_of::<Y>() as u64)?;
        workspace.dims::<1>(OP, "workspace")?;
        workspace.expect_contiguous(OP, "workspace")?;
        workspace.expect_aligned(OP, "workspace", ALIGN as u64)?;
        let mut inputs: Vec<NamedOperand> = vec![("x", Some(&self.x)), ("w1", Some(w1)), ("w2", Some(w2))];
        inputs.extend([
            ("expert_map", self.expert_map.as_ref().map(|map| map as _)),
            ("residual", self.residual.as_ref().map(|residual| residual as _)),
        ]);
        if let Some(shared) = &self.shared {
            inputs.extend([
                (SHARED[0], Some(view_of(&shared.w1) as _)),
                (SHARED[1], Some(view_of(&shared.w2) as _)),
            ]);
        }
        if let FusedRouting::Chosen { ids, weights, .. } = &self.routing {
            inputs.extend([("topk_ids", Some(ids as _)), ("topk_weights", Some(weights as _))]);
        }
        check_aliases(
            OP,
            &inputs,
            &[(("y", Some(y)), &["residual"]), (("workspace", Some(workspace)), &[])],
        )?;
        Ok(FusedMoeProblem { tokens, k, experts, hidden, inner, shared })
    }
}

/// Both GEMMs of each gate, `y[g] = topk_weights[g] (h w2[e(g)]^T)` with `h = silu(gate) value` of
/// [`moe_op_silu_fused`](crate::moe_op_silu_fused())'s gates and values, which are not rounded, and `h` rounded to the type of `x`.
///
/// | arg       | shape                  | dtype         | layout                                            |
/// |-----------|------------------------|---------------|---------------------------------------------------|
/// | `x`       | `[T, K]` or `[T k, K]` | `bf16`, `f16` | unit stride on `K`, rows on 16 bytes              |
/// | `w1`      | `[E, 2 I, K]`          | as `x`        | the same, or shuffled                             |
/// | `w2`      | `[E, K, I]`            | as `x`        | the same, or shuffled                             |
/// | `weights` | `[T, k]`               | `f32`         | optional, contiguous                              |
/// | `rows`    | see [`SortedRows`]     | `i32`         | contiguous                                        |
/// | `h`       | `[T k, I]`             | as `x`        | workspace, contiguous, on 16 bytes                |
/// | `y`       | `[T k, K]`             | `bf16`, `f16`, `f32` | unit stride on `K`                         |
///
/// Two launches, `h` between them in memory: deterministic, without atomics. Returns when they are queued.
///
/// # Errors
/// As [`moe_op`](crate::moe_op()).
///
/// Source: AITER, operator moe_op_e2e.
pub fn moe_op_e2e<T: Half, Y: Float>(
    stream: &Stream,
    x: TensorView<T>,
    [w1, w2]: [GemmWeight<T>; 2],
    weights: Option<TensorView<f32>>,
    rows: SortedRows,
    h: TensorViewMut<T>,
    y: TensorViewMut<Y>,
) -> Result<()> {
    const OP: &str = "moe_op_e2e";
    h.expect_contiguous(OP, "h")?;
    let between = h.alias();
    check_aliases(
        OP,
        &[
            ("w2", Some(view_of(&w2))),
            ("topk_weights", weights.as_ref().map(|w| w as _)),
            ("h", Some(&between)),
        ],
        &[(("y", Some(&y)), &[])],
    )?;
    let [gates, inner] = h.dims(OP, "h")?;
    let [_, out, _] = view_of(&w2).dims(OP, "w2")?;
    y.expect_shape(OP, "y", [gates, out])?;
    view_of(&w2).expect_shape(OP, "w2", [view_of(&w1).dims::<3>(OP, "w1")?[0], out, inner])?;
    let epilogue = ExpertEpilogue { round: None, ..silu_fused(DType::F32) };
    let names = ["x", "w1", "topk_weights", "h"];
    let first = ExpertInputs { ..ExpertInputs::new(x, w1) };
    ExpertGemm {
        op: OP,
        names,
        inputs: first,
        rows: ExpertRows::Sorted(rows),
        epilogue,
        tile: None,
        keep: false,
    }
    .run(stream, h)?;
    let names = ["h", "w2", "topk_weights", "y"];
    let epilogue = ExpertEpilogue { gate: None, ..epilogue };
    let second = ExpertInputs { weights: weights.map(Into::into), ..ExpertInputs::new(between, w2) };
    ExpertGemm {
        op: OP,
        names,
        inputs: second,
        rows: ExpertRows::Sorted(rows),
        epilogue,
        tile: None,
        keep: false,
    }
    .run(stream, y)
}
