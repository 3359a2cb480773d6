//! The safe functions of `hip/recurrent.hip`: the gated delta rule, token by token.

use crate::kernels::gdr::{Heads, Recurrent};
use crate::sizes::Shapes;
use bytemuck::Zeroable;
use hk_core::plan::rows::float_index;
use hk_core::{
    DType, Element, Error, Float, KernelRef, Launch, LaunchConfig, NamedOperand, Operand, Result, Stream,
    TensorView, TensorViewMut, bf16, check_aliases, f16,
};

/// How the state of a value head lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StateLayout {
    /// `[slots, v_heads, K, V]`.
    #[default]
    Kv,
    /// `[slots, v_heads, V, K]`.
    Vk,
}

/// Element type of states: `f32` or `bf16`.
pub trait StateElement: Float {}

impl StateElement for f32 {}
impl StateElement for bf16 {}

/// Gates of a recurrence, contiguous; each may be left out.
#[derive(Debug, Clone, Copy, Default)]
pub struct Gates<'a> {
    /// `[.., v_heads]`: logarithm of the decay of a state.
    pub g: Option<TensorView<'a, f32>>,
    /// `[.., v_heads, K]`: of its rows.
    pub gk: Option<TensorView<'a, f32>>,
    /// `[.., v_heads, V]`: of its columns.
    pub gv: Option<TensorView<'a, f32>>,
    /// `[.., v_heads]`, or `[.., v_heads, V]`: weight of the update; 1 if left out.
    pub beta: Option<TensorView<'a, f32>>,
}

/// Gates that the kernel computes, contiguous: `g = -exp(a_log) softplus(a + dt_bias)`, `beta = 1 / (1 + exp(-b))`.
#[derive(Debug, Clone, Copy)]
pub struct SigmoidGates<'a, T: Element, D: Element> {
    /// `[.., v_heads]`; gates of rows of states: `[.., v_heads, K]`.
    pub a: TensorView<'a, T>,
    /// `[.., v_heads]`.
    pub b: TensorView<'a, T>,
    /// `[v_heads]`.
    pub a_log: TensorView<'a, f32>,
    /// `[v_heads]`; gates of rows of states: `[v_heads, K]`.
    pub dt_bias: TensorView<'a, D>,
    /// The function between.
    pub softplus: Softplus,
}

/// `ln(1 + exp(beta x)) / beta`, or `x` where `beta x` is above the threshold.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Softplus {
    /// Positive and finite.
    pub beta: f32,
    /// Not NaN.
    pub threshold: f32,
}

impl Default for Softplus {
    fn default() -> Self {
        Self { beta: 1.0, threshold: 20.0 }
    }
}

impl Softplus {
    /// # Errors
    /// [`Error::Argument`].
    pub(crate) fn check(self, op: &'static str) -> Result<()> {
        if !(self.beta > 0.0 && self.beta.is_finite()) {
            return Err(Error::argument(op, "softplus_beta", self.beta, "positive and finite"));
        }
        if self.threshold.is_nan() {
            return Err(Error::argument(op, "softplus_threshold", self.threshold, "a number"));
        }
        Ok(())
    }
}

/// Element type of the bias of gates beside operands of type `T`: `T` itself or `f32`.
pub trait GateBias<T: Float>: Float {}

impl<T: Float> GateBias<T> for T {}
impl GateBias<bf16> for f32 {}
impl GateBias<f16> for f32 {}

/// The inputs of [`fused_recurrent`].
#[derive(Debug, Clone, Copy)]
pub struct RecurrentInputs<'a, T: Element> {
    /// `[B, T, k_heads, K]`; packed sequences: `[T, k_heads, K]`.
    pub q: TensorView<'a, T>,
    /// As `q`.
    pub k: TensorView<'a, T>,
    /// `[B, T, v_heads, V]`; packed sequences: `[T, v_heads, V]`.
    pub v: TensorView<'a, T>,
    /// The gates.
    pub gates: Gates<'a>,
    /// `[N + 1]`: the first token of each packed sequence, then the number of tokens. Given if the sequences are packed.
    pub cu_seqlens: Option<TensorView<'a, i32>>,
}

/// Where the states of sequences come from and go to. A state is contiguous; states are of any stride.
#[derive(Debug)]
pub enum States<'a, S: Element> {
    /// One for each sequence, `[N, v_heads, K, V]`.
    Dense {
        /// The states before the first tokens; zeros if left out.
        initial: Option<TensorView<'a, S>>,
        /// The states after the last tokens. May be exactly `initial`.
        last: Option<TensorViewMut<'a, S>>,
    },
    /// Slots, updated in place.
    Pool {
        /// `[slots, v_heads, K, V]`.
        pool: TensorViewMut<'a, S>,
        /// `[N]`: the slot of each sequence; negative: the state is zero, and none is kept. Or `[N, states]`, for speculative
        /// decoding: the state after token `t` goes to the slot in column `t`.
        indices: TensorView<'a, i32>,
        /// `[N]`, beside indices of several states: the state before the first token is in column `accepted - 1`. Column 0 if
        /// left out.
        accepted: Option<TensorView<'a, i32>>,
    },
}

/// Where the states of a launch are; 0: nowhere.
#[derive(Default)]
pub(crate) struct StateAddresses {
    /// Address, and elements from a state to the next.
    pub from: (u64, i64),
    pub to: (u64, i64),
    pub slots: u64,
    pub accepted: u64,
}

impl<'t, S: StateElement> States<'t, S> {
    pub(crate) fn bind<'a>(&mut self, launch: &mut Launch<'a>) -> Result<StateAddresses>
    where
        't: 'a,
    {
        let mut at = StateAddresses::default();
        match self {
            States::Dense { initial, last } => {
                if let Some(initial) = initial {
                    at.from = (launch.input_address("initial_state", initial)?, initial.strides()[0] as i64);
                }
                if let Some(last) = last {
                    let slot = last.strides()[0] as i64;
                    at.to = (launch.output_address("final_state", last)?, slot);
                }
            }
            States::Pool { pool, indices, accepted } => {
                let slot = pool.strides()[0] as i64;
                at.from = (launch.output_address("state_pool", pool)?, slot);
                at.to = at.from;
                at.slots = launch.input_address("state_indices", indices)?;
                at.accepted = optional_address(launch, "num_accepted_tokens", accepted)?;
            }
        }
        Ok(at)
    }
}

/// Options of a recurrence.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RecurrentOptions {
    /// Factor of `o`; `K^(-1/2)` if left out.
    pub scale: Option<f32>,
    /// Divides `q` and `k` by `sqrt(sum of squares + 1e-6)`.
    pub qk_l2norm: bool,
    /// Layout of all states.
    pub layout: StateLayout,
}

/// The gated delta rule over the tokens of sequences, one by one:
///
/// ```text
/// S~ = exp(g) exp(gk) exp(gv) S      by value head, by row k, by column v
/// d  = beta (v - S~^T k)
/// S  = S~ + k d^T
/// o  = scale S^T q
/// ```
///
/// | arg                  | shape                                                           | dtype                | layout                                    |
/// |----------------------|-----------------------------------------------------------------|----------------------|-------------------------------------------|
/// | `q`, `k`             | `[B, T, k_heads, K]`; packed: `[T, k_heads, K]`                 | `bf16`, `f16`, `f32` | unit stride on `K`                        |
/// | `v`, `o`             | `[B, T, v_heads, V]`; packed: `[T, v_heads, V]`                 | as `q`               | unit stride on `V`                        |
/// | `g`                  | `[B, T, v_heads]`; packed: `[T, v_heads]`; optional             | `f32`                | contiguous                                |
/// | `gk`, `gv`           | the same and `K`, `V`; optional                                 | `f32`                | contiguous                                |
/// | `beta`               | as `g` or as `gv`; optional                                     | `f32`                | contiguous                                |
/// | `cu_seqlens`         | `[N + 1]`; given if packed                                      | `i32`                | contiguous                                |
/// | `initial`, `last`    | `[N, v_heads, K, V]`, or `V, K` by the layout; optional         | `f32`, `bf16`        | contiguous but for the stride of states   |
/// | `pool`               | `[slots, v_heads, K, V]`, or `V, K`                             | `f32`, `bf16`        | the same                                  |
/// | `indices`            | `[N]` or `[N, states]`                                          | `i32`                | contiguous                                |
/// | `accepted`           | `[N]`; optional                                                 | `i32`                | contiguous                                |
///
/// Value head `h` uses key head `h / (v_heads / k_heads)`. `K` and `V` are from 1 to 256. All arithmetic is `f32`; `o`, and a `bf16`
/// state when it is written, are rounded once, to nearest even. Results are batch-invariant. A sequence whose tokens are split over two
/// calls, with a state in `f32` from the one to the other, has the same bits, if strides and alignment choose the same path (below). A sequence
/// without tokens keeps its state.
///
/// What is on the device is not trusted. A sequence whose tokens are out of range, whose slot is beyond the pool, or which has more tokens
/// than states, becomes NaN in `o` where it has tokens, and writes no state; so does one whose `accepted` is not from 1 to the number of
/// states. A `g`, `gk` or `gv` that is positive or NaN makes what it decays NaN. If two sequences have one slot, the
/// state of either may remain.
///
/// The vectorized path needs `q`, `k`, `v`, `o` with addresses and all strides but the last on 16 bytes, gates by channel and states on 16 bytes, `K` and `V` whole
/// 16-byte vectors, and no `f32` operands with `bf16` states. No output may share memory with another tensor, but `last` may be exactly
/// `initial`. Returns when the launch is queued.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table,
/// [`Argument`](Error::Argument) for a scale that is not positive and finite, or `accepted` beside indices of one state,
/// [`Unsupported`](Error::Unsupported) for heads of more than 256 elements, [`Overlap`](Error::Overlap) if an output shares memory with
/// another tensor, [`TooLarge`](Error::TooLarge) beyond 2^31 - 1 tokens, sequences or slots,
/// [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written then.
///
/// Source: Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", equation 10; per channel: Kimi Team 2025, "Kimi Linear".
pub fn fused_recurrent<'a, T: Float, S: StateElement>(
    stream: &Stream,
    inputs: RecurrentInputs<'a, T>,
    states: States<'a, S>,
    o: TensorViewMut<'a, T>,
    options: RecurrentOptions,
) -> Result<()> {
    let RecurrentInputs { q, k, v, gates, cu_seqlens } = inputs;
    let call =
        Recurrence::<T, T> { op: "fused_recurrent", q, k, v, gates, computed: None, cu_seqlens, options };
    call.run(stream, states, o)
}

/// The inputs of [`fused_sigmoid_gating_recurrent`].
#[derive(Debug, Clone, Copy)]
pub struct SigmoidInputs<'a, T: Element, D: Element> {
    /// `[B, T, k_heads, K]`; packed sequences: `[T, k_heads, K]`.
    pub q: TensorView<'a, T>,
    /// As `q`.
    pub k: TensorView<'a, T>,
    /// `[B, T, v_heads, V]`; packed sequences: `[T, v_heads, V]`.
    pub v: TensorView<'a, T>,
    /// What the gates are made from.
    pub gates: SigmoidGates<'a, T, D>,
    /// `[N + 1]`, as of [`RecurrentInputs`].
    pub cu_seqlens: Option<TensorView<'a, i32>>,
}

/// [`fused_recurrent`] with gates that are computed on the way:
/// `g = -exp(a_log) softplus(a + dt_bias)` and `beta = 1 / (1 + exp(-b))`.
///
/// | arg          | shape                                                                    | dtype           | layout     |
/// |--------------|--------------------------------------------------------------------------|-----------------|------------|
/// | `a`          | `[B, T, v_heads]`; packed: `[T, v_heads]`; gates of rows: the same and `K` | as `q`          | contiguous |
/// | `b`          | `[B, T, v_heads]`; packed: `[T, v_heads]`                                | as `q`          | contiguous |
/// | `a_log`      | `[v_heads]`                                                              | `f32`           | contiguous |
/// | `dt_bias`    | `[v_heads]`; gates of rows: `[v_heads, K]`                               | as `q` or `f32` | contiguous |
///
/// With one more axis, `a` and `dt_bias` are gates of rows of states, `gk`. The softplus is relatively accurate however small it is. All else,
/// tensors, states, rounding and what happens to indices out of range, is as of [`fused_recurrent`].
///
/// # Errors
/// As [`fused_recurrent`]; [`Argument`](Error::Argument) for a `softplus_beta` that is not positive and finite, or a
/// `softplus_threshold` that is NaN.
///
/// Source: Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks"; gates: Dao and Gu 2024, "Mamba-2".
pub fn fused_sigmoid_gating_recurrent<'a, T: Float, D: GateBias<T>, S: StateElement>(
    stream: &Stream,
    inputs: SigmoidInputs<'a, T, D>,
    states: States<'a, S>,
    o: TensorViewMut<'a, T>,
    options: RecurrentOptions,
) -> Result<()> {
    let SigmoidInputs { q, k, v, gates, cu_seqlens } = inputs;
    let op = "fused_sigmoid_gating_recurrent";
    let none = Gates::default();
    let call = Recurrence { op, q, k, v, gates: none, computed: Some(gates), cu_seqlens, options };
    call.run(stream, states, o)
}

/// The inputs of [`fused_rearrange_sigmoid_gdr`].
#[derive(Debug, Clone, Copy)]
pub struct RearrangedInputs<'a, T: Element, D: Element> {
    /// `[B, T, 2 k_heads K + v_heads V]`; packed sequences: `[T, ..]`. All heads of q, then of k, then of v.
    pub qkv: TensorView<'a, T>,
    /// What the gates are made from.
    pub gates: SigmoidGates<'a, T, D>,
    /// `[N + 1]`, as of [`RecurrentInputs`].
    pub cu_seqlens: Option<TensorView<'a, i32>>,
    /// Heads of keys.
    pub k_heads: usize,
    /// Elements of a key.
    pub k_dim: usize,
    /// Elements of a value.
    pub v_dim: usize,
}

/// [`fused_sigmoid_gating_recurrent`] with q, k and v side by side in one tensor, as a projection or a convolution leaves them.
///
/// | arg    | shape                                                          | dtype                | layout                                  |
/// |--------|----------------------------------------------------------------|----------------------|-----------------------------------------|
/// | `qkv`  | `[B, T, 2 k_heads K + v_heads V]`; packed: `[T, ..]`           | `bf16`, `f16`, `f32` | unit stride on the last axis            |
/// | `o`    | `[B, T, v_heads, V]`; packed: `[T, v_heads, V]`                | as `qkv`             | unit stride on `V`                      |
///
/// `v_heads` is that of `o`. Columns are `k_heads` heads of q, as many of k, then `v_heads` of v.
///
/// # Errors
/// As [`fused_sigmoid_gating_recurrent`]; [`Shape`](Error::Shape) for another number of columns.
pub fn fused_rearrange_sigmoid_gdr<'a, T: Float, D: GateBias<T>, S: StateElement>(
    stream: &Stream,
    inputs: RearrangedInputs<'a, T, D>,
    states: States<'a, S>,
    o: TensorViewMut<'a, T>,
    options: RecurrentOptions,
) -> Result<()> {
    let op = "fused_rearrange_sigmoid_gdr";
    let RearrangedInputs { qkv, gates, cu_seqlens, k_heads, k_dim, v_dim } = inputs;
    let packed = cu_seqlens.is_some();
    let rank = if packed { 2 } else { 3 };
    let shape = qkv.shape().to_vec();
    let v_heads = o.shape().get(rank - 1).copied().unwrap_or(0);
    let columns = packed_columns(op, &shape, packed, [k_heads, v_heads], [k_dim, v_dim])?;
    let part = |from: usize, to: usize, dim: usize| {
        let columns = qkv.slice(rank - 1, from..to)?;
        columns.split_axis(rank - 1, dim)
    };
    let keys = k_heads * k_dim;
    let (q, k, v) = (part(0, keys, k_dim)?, part(keys, 2 * keys, k_dim)?, part(2 * keys, columns, v_dim)?);
    let none = Gates::default();
    let call = Recurrence { op, q, k, v, gates: none, computed: Some(gates), cu_seqlens, options };
    call.run(stream, states, o)
}

/// Checks the shape of q, k and v side by side; gives the number of columns.
///
/// # Errors
/// [`Error::Shape`] and [`Error::Argument`].
pub(crate) fn packed_columns(
    op: &'static str,
    qkv: &[usize],
    packed: bool,
    [k_heads, v_heads]: [usize; 2],
    [k_dim, v_dim]: [usize; 2],
) -> Result<usize> {
    let (rank, axes) =
        if packed { (2, "[T, columns] (packed by cu_seqlens)") } else { (3, "[B, T, columns]") };
    if qkv.len() != rank {
        return Err(Error::shape(op, "qkv", qkv, format!("{rank} axes: {axes}")));
    }
    for (arg, n) in [("k_heads", k_heads), ("k_dim", k_dim), ("v_dim", v_dim)] {
        if n == 0 || n > 1 << 20 {
            return Err(Error::argument(op, arg, n, "from 1 to 2^20"));
        }
    }
    let columns = 2 * k_heads * k_dim + v_heads.saturating_mul(v_dim);
    if v_heads == 0 || qkv[rank - 1] != columns {
        let want = format!("{columns} columns: {k_heads} heads of q and of k, {v_heads} of v");
        return Err(Error::shape(op, "qkv", qkv, want));
    }
    Ok(columns)
}

/// The entry points of `hip/recurrent.hip` for an element type: of `f32` states, of `bf16` states.
macro_rules! kernels {
    ($($t:tt),+) => {[$([kernels!(@ $t, "f32"), kernels!(@ $t, "bf16")]),+]};
    // Only the scalar path.
    (@ "f32", "bf16") => {
        [Recurrent::kernel("recurrent_f32_bf16_scalar_256"); 5]
    };
    (@ $t:tt, $s:tt) => {
        [
            Recurrent::kernel(concat!("recurrent_", $t, "_", $s, "_kv_128")),
            Recurrent::kernel(concat!("recurrent_", $t, "_", $s, "_kv_256")),
            Recurrent::kernel(concat!("recurrent_", $t, "_", $s, "_vk_128")),
            Recurrent::kernel(concat!("recurrent_", $t, "_", $s, "_vk_256")),
            Recurrent::kernel(concat!("recurrent_", $t, "_", $s, "_scalar_256")),
        ]
    };
}

static KERNELS: [[[KernelRef<Recurrent>; 5]; 2]; 3] = kernels!["bf16", "f16", "f32"];
/// Index of the scalar path.
const SCALAR: usize = 4;

/// Columns v of a wave, as `Part` of `hip/recurrent.h`.
fn wave_cols(wave: usize, state_bytes: usize, layout: Option<StateLayout>, most_k: usize) -> usize {
    let cols = if layout == Some(StateLayout::Kv) { 16 / state_bytes } else { 4 };
    let lanes = if layout.is_none() || cols * most_k > 16 * wave { 16 } else { 8 };
    wave / lanes * cols
}

/// One call.
struct Recurrence<'a, T: Element, D: Element> {
    op: &'static str,
    q: TensorView<'a, T>,
    k: TensorView<'a, T>,
    v: TensorView<'a, T>,
    gates: Gates<'a>,
    computed: Option<SigmoidGates<'a, T, D>>,
    cu_seqlens: Option<TensorView<'a, i32>>,
    options: RecurrentOptions,
}

impl<'a, T: Float, D: Float> Recurrence<'a, T, D> {
    fn run<S: StateElement>(
        self,
        stream: &Stream,
        mut states: States<'a, S>,
        mut o: TensorViewMut<'a, T>,
    ) -> Result<()> {
        let Self { op, q, k, v, gates, computed, cu_seqlens, options } = self;
        let Gates { g, gk, gv, beta } = gates;
        fn shape<'s, E: Element>(tensor: &'s Option<TensorView<E>>) -> Option<&'s [usize]> {
            tensor.as_ref().map(|tensor| tensor.shape())
        }
        let mut shapes = Shapes {
            op,
            layout: options.layout,
            q: q.shape(),
            k: k.shape(),
            v: v.shape(),
            cu_seqlens: shape(&cu_seqlens),
            g: shape(&g),
            gk: shape(&gk),
            gv: shape(&gv),
            beta: shape(&beta),
            ..Shapes::default()
        };
        if let Some(SigmoidGates { a, b, a_log, dt_bias, softplus }) = &computed {
            softplus.check(op)?;
            shapes.a = Some(a.shape());
            shapes.b = Some(b.shape());
            shapes.a_log = Some(a_log.shape());
            shapes.dt_bias = Some(dt_bias.shape());
        }
        match &states {
            States::Dense { initial, .. } => shapes.initial_state = shape(initial),
            States::Pool { pool, indices, accepted } => {
                shapes.state_pool = Some(pool.shape());
                shapes.state_indices = Some(indices.shape());
                shapes.num_accepted_tokens = shape(accepted);
            }
        }
        let sizes = shapes.check()?;
        let scale = check_scale(op, options.scale, sizes.k_dim)?;
        o.expect_shape(op, "o", v.shape())?;
        for (arg, unit, size) in [("q", &q, sizes.k_dim), ("k", &k, sizes.k_dim), ("v", &v, sizes.v_dim)] {
            if size > 1 {
                unit.expect_unit_stride(op, arg)?;
            }
            unit.expect_aligned(op, arg, size_of::<T>() as u64)?;
        }
        if sizes.v_dim > 1 {
            o.expect_unit_stride(op, "o")?;
        }
        o.expect_aligned(op, "o", size_of::<T>() as u64)?;
        for (arg, tensor) in [("g", &g), ("gk", &gk), ("gv", &gv), ("beta", &beta)] {
            expect_plain(op, arg, tensor.as_ref())?;
        }
        if let Some(gates) = &computed {
            expect_plain(op, "a", Some(&gates.a))?;
            expect_plain(op, "b", Some(&gates.b))?;
            expect_plain(op, "A_log", Some(&gates.a_log))?;
            expect_plain(op, "dt_bias", Some(&gates.dt_bias))?;
        }
        expect_plain(op, "cu_seqlens", cu_seqlens.as_ref())?;
        let mut states_aligned = true;
        match &states {
            States::Dense { initial, last } => {
                if let Some(initial) = initial {
                    expect_state(op, "initial_state", initial.shape(), initial.strides(), initial.layout())?;
                    initial.expect_aligned(op, "initial_state", size_of::<S>() as u64)?;
                    states_aligned &= initial.rows_aligned(16);
                }
                if let Some(last) = last {
                    let want = [&[sizes.sequences], &sizes.state(options.layout)[..]].concat();
                    last.expect_shape(op, "final_state", want)?;
                    expect_state(op, "final_state", last.shape(), last.strides(), last.layout())?;
                    last.expect_aligned(op, "final_state", size_of::<S>() as u64)?;
                    states_aligned &= last.rows_aligned(16);
                }
            }
            States::Pool { pool, indices, accepted } => {
                expect_state(op, "state_pool", pool.shape(), pool.strides(), pool.layout())?;
                pool.expect_aligned(op, "state_pool", size_of::<S>() as u64)?;
                states_aligned &= pool.rows_aligned(16);
                expect_plain(op, "state_indices", Some(indices))?;
                expect_plain(op, "num_accepted_tokens", accepted.as_ref())?;
            }
        }
        fn some<O: Operand>(tensor: Option<&O>) -> Option<&dyn Operand> {
            tensor.map(|tensor| tensor as _)
        }
        let (initial, last, pool, indices, accepted) = match &states {
            States::Dense { initial, last } => (initial.as_ref(), last.as_ref(), None, None, None),
            States::Pool { pool, indices, accepted } => {
                (None, None, Some(pool), Some(indices), accepted.as_ref())
            }
        };
        let inputs: [NamedOperand; 15] = [
            ("q", Some(&q)),
            ("k", Some(&k)),
            ("v", Some(&v)),
            ("g", some(g.as_ref())),
            ("gk", some(gk.as_ref())),
            ("gv", some(gv.as_ref())),
            ("beta", some(beta.as_ref())),
            ("cu_seqlens", some(cu_seqlens.as_ref())),
            ("initial_state", some(initial)),
            ("state_indices", some(indices)),
            ("num_accepted_tokens", some(accepted)),
            ("a", some(computed.as_ref().map(|gates| &gates.a))),
            ("b", some(computed.as_ref().map(|gates| &gates.b))),
            ("A_log", some(computed.as_ref().map(|gates| &gates.a_log))),
            ("dt_bias", some(computed.as_ref().map(|gates| &gates.dt_bias))),
        ];
        let outputs: [(NamedOperand, &[_]); 3] = [
            (("o", Some(&o)), &[]),
            (("final_state", some(last)), &["initial_state"]),
            (("state_pool", some(pool)), &[]),
        ];
        check_aliases(op, &inputs, &outputs)?;
        let limit = i32::MAX as usize;
        for (arg, n, what) in [
            ("q", sizes.sequences, "sequences"),
            ("q", sizes.tokens, "tokens"),
            ("state_pool", sizes.n_slots, "slots"),
        ] {
            if n > limit {
                return Err(Error::too_large(op, arg, format!("{n} {what}"), limit as u64));
            }
        }
        if sizes.sequences == 0 {
            return Ok(());
        }

        let whole = |n: usize, bytes: usize| (n * bytes).is_multiple_of(16);
        let state_row = match options.layout {
            StateLayout::Kv => sizes.v_dim,
            StateLayout::Vk => sizes.k_dim,
        };
        let channels = |tensor: &Option<TensorView<f32>>, dim: usize| {
            tensor.as_ref().is_none_or(|t| t.is_aligned(16) && whole(dim, 4))
        };
        let vectorized = (T::DTYPE != DType::F32 || S::DTYPE == DType::F32)
            && whole(sizes.k_dim, size_of::<T>())
            && whole(sizes.v_dim, size_of::<T>())
            && whole(state_row, size_of::<S>())
            && [&q, &k, &v, &o.alias()].into_iter().all(strides_aligned)
            && states_aligned
            && (channels(&gk, sizes.k_dim) && channels(&gv, sizes.v_dim))
            && (!sizes.beta_of_v || channels(&beta, sizes.v_dim))
            && computed.as_ref().is_none_or(|gates| {
                !sizes.a_of_k
                    || (gates.a.is_aligned(16)
                        && gates.dt_bias.is_aligned(16)
                        && whole(sizes.k_dim, size_of::<D>()))
            });
        let wide = usize::from(sizes.k_dim > 128);
        let path = match options.layout {
            _ if !vectorized => SCALAR,
            StateLayout::Kv => wide,
            StateLayout::Vk => 2 + wide,
        };
        let layout = vectorized.then_some(options.layout);
        let most_k = if matches!(path, 0 | 2) { 128 } else { 256 };
        let wave = stream.device().info().wave_size as usize;
        let slices = sizes.v_dim.div_ceil(wave_cols(wave, size_of::<S>(), layout, most_k));

        let of_states = usize::from(S::DTYPE != DType::F32);
        let kernel = stream.kernel(KERNELS[float_index(T::DTYPE)][of_states][path])?;
        let mut launch = stream.launch(op);
        let (k_stride, v_stride) = match options.layout {
            StateLayout::Kv => (sizes.v_dim, 1),
            StateLayout::Vk => (1, sizes.k_dim),
        };
        let mut params = Recurrent {
            q: heads(launch.input_address("q", &q)?, q.strides()),
            k: heads(launch.input_address("k", &k)?, k.strides()),
            v: heads(launch.input_address("v", &v)?, v.strides()),
            o: heads(launch.output_address("o", &mut o)?, o.strides()),
            g: optional_address(&mut launch, "g", &g)?,
            gk: optional_address(&mut launch, "gk", &gk)?,
            gv: optional_address(&mut launch, "gv", &gv)?,
            beta: optional_address(&mut launch, "beta", &beta)?,
            starts: optional_address(&mut launch, "cu_seqlens", &cu_seqlens)?,
            sequences: sizes.sequences as u32,
            tokens: sizes.tokens as u32,
            k_dim: sizes.k_dim as u32,
            v_dim: sizes.v_dim as u32,
            v_heads: sizes.v_heads as u32,
            group: (sizes.v_heads / sizes.k_heads) as u32,
            slices: slices as u32,
            n_slots: sizes.n_slots as u32,
            slot_cols: sizes.slot_cols as u32,
            each_token: sizes.each_token.into(),
            beta_of_v: sizes.beta_of_v.into(),
            l2norm: options.qk_l2norm.into(),
            k_stride: k_stride as u32,
            v_stride: v_stride as u32,
            scale,
            ..Recurrent::zeroed()
        };
        if let Some(SigmoidGates { a, b, a_log, dt_bias, softplus }) = &computed {
            params.a = launch.input_address("a", a)?;
            params.b = launch.input_address("b", b)?;
            params.a_log = launch.input_address("A_log", a_log)?;
            params.dt_bias = launch.input_address("dt_bias", dt_bias)?;
            params.a_of_k = sizes.a_of_k.into();
            params.f32_bias = (D::DTYPE == DType::F32).into();
            params.softplus_beta = softplus.beta;
            params.softplus_threshold = softplus.threshold;
        }
        let at = states.bind(&mut launch)?;
        (params.from, params.from_slot) = at.from;
        (params.to, params.to_slot) = at.to;
        (params.slots, params.accepted) = (at.slots, at.accepted);
        let waves = sizes.sequences.saturating_mul(sizes.v_heads).saturating_mul(slices);
        // SAFETY: the checks above give every tensor the sizes in `params`, in which the kernel stays whatever the grid: it clamps packed
        // sequences to the tokens, and checks slots and their columns.
        unsafe { launch.run(&kernel, LaunchConfig::grid_1d(waves), &params) }
    }
}

/// The address of an input that may be absent: 0 then.
pub(crate) fn optional_address<'a, E: Element>(
    launch: &mut Launch<'a>,
    arg: &'static str,
    tensor: &Option<TensorView<'a, E>>,
) -> Result<u64> {
    tensor.as_ref().map_or(Ok(0), |tensor| launch.input_address(arg, tensor))
}

/// Whether all rows begin on 16 bytes, whatever the number of tokens: a stride counts even where its axis has one element. The paths sum up
/// in different orders, and a call of one token has to have the bits of that token in a call of many.
fn strides_aligned<E: Element>(tensor: &TensorView<E>) -> bool {
    let (_, rows) = tensor.strides().split_last().unwrap_or((&1, &[]));
    tensor.is_aligned(16) && rows.iter().all(|stride| (stride * size_of::<E>()).is_multiple_of(16))
}

/// Strides of sequences, tokens and heads.
pub(crate) fn heads(data: u64, strides: &[usize]) -> Heads {
    let at = |from_end: usize| strides.len().checked_sub(from_end).map_or(0, |i| strides[i] as i64);
    Heads { data, batch: at(4), token: at(3), head: at(2) }
}

pub(crate) fn check_scale(op: &'static str, scale: Option<f32>, k_dim: usize) -> Result<f32> {
    match scale {
        None => Ok((1.0 / (k_dim as f64).sqrt()) as f32),
        Some(scale) if scale > 0.0 && scale.is_finite() => Ok(scale),
        Some(scale) => Err(Error::argument(op, "scale", scale, "positive and finite")),
    }
}

/// Checks that a tensor is contiguous and aligned to its elements.
pub(crate) fn expect_plain<E: Element>(
    op: &'static str,
    arg: &'static str,
    tensor: Option<&TensorView<E>>,
) -> Result<()> {
    let Some(tensor) = tensor else { return Ok(()) };
    tensor.expect_contiguous(op, arg)?;
    tensor.expect_aligned(op, arg, size_of::<E>() as u64)
}

/// Checks that each state is contiguous.
pub(crate) fn expect_state(
    op: &'static str,
    arg: &'static str,
    shape: &[usize],
    strides: &[usize],
    layout: &hk_core::Layout,
) -> Result<()> {
    let mut want = 1;
    for axis in (1..4).rev() {
        if shape[axis] > 1 && strides[axis] != want {
            return Err(Error::stride(op, arg, layout, "states that are contiguous"));
        }
        want *= shape[axis];
    }
    Ok(())
}
