//! The safe functions of `hip/prepare.h`, `hip/states.h` and `hip/outputs.hip`: the gated delta rule in chunks.

use crate::kernels::gdr::{Heads, Prefill};
use crate::recurrent::{check_scale, expect_plain, expect_state, heads, optional_address};
use crate::sizes::{Shapes, Sizes};
use crate::{GateBase, StateElement, StateLayout, States};
use bytemuck::Zeroable;
use hk_core::plan::rows::float_index;
use hk_core::{
    Arch, DType, Element, Error, Float, KernelRef, Launch, LaunchConfig, NamedOperand, Operand, Result,
    Stream, TensorView, TensorViewMut, check_aliases,
};

/// For bf16, f16, f32: vectorized, scalar.
macro_rules! kernels {
    ($op:literal, $variant:literal) => {
        [kernels!(@ $op, "bf16", $variant), kernels!(@ $op, "f16", $variant), kernels!(@ $op, "f32", $variant)]
    };
    (@ $op:literal, $t:literal, $variant:literal) => {
        [
            Prefill::kernel(concat!($op, "_", $t, $variant)),
            Prefill::kernel(concat!($op, "_", $t, $variant, "_scalar")),
        ]
    };
}
static PREPARE: [[KernelRef<Prefill>; 2]; 3] = kernels!("prepare", "");
static RECOMPUTE: [[KernelRef<Prefill>; 2]; 3] = kernels!("recompute", "");
static OUTPUTS: [[KernelRef<Prefill>; 2]; 3] = kernels!("outputs", "");
/// For bf16, f16: vectorized, whole chunks.
static OUTPUTS_64: [KernelRef<Prefill>; 2] =
    [Prefill::kernel("outputs_bf16_64"), Prefill::kernel("outputs_f16_64")];
/// With gates of channels; and their sums.
static PREPARE_CHANNELS: [[KernelRef<Prefill>; 2]; 3] = kernels!("prepare", "_channels");
static OUTPUTS_CHANNELS: [[KernelRef<Prefill>; 2]; 3] = kernels!("outputs", "_channels");
static SUMS: KernelRef<Prefill> = Prefill::kernel("sums_channels");
/// For bf16, f16, f32: K up to 128, up to 256, scalar; then those with gates of channels.
static STATES: [[KernelRef<Prefill>; 6]; 3] = hk_core::row_kernels!(
    Prefill,
    "states",
    ["bf16", "f16", "f32"],
    ["128", "256", "scalar_256", "128_channels", "256_channels", "scalar_256_channels"]
);

/// Tokens of a wave of `hip/outputs.hip`, but for those of whole chunks.
const OUTPUT_TOKENS: usize = 32;
/// A wave has whole chunks where a compute unit has that many of such waves: they read states once, but there are half as many.
const WHOLE_CHUNK_WAVES: usize = 2;
/// Columns v of a wave of `hip/states.h`.
const STATE_COLS: usize = 16;
/// Alignment of the parts of a workspace.
const PART: usize = 256;

/// The shapes of a call in chunks. What an operator does not have is `None`.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ChunkShapes<'s> {
    pub op: &'static str,
    pub chunk_size: usize,
    /// Layouts of states, and of snapshots.
    pub layout: StateLayout,
    pub h_layout: StateLayout,
    pub q: Option<&'s [usize]>,
    pub k: &'s [usize],
    /// The tensor of values: its name and shape.
    pub v: (&'static str, &'s [usize]),
    pub w: Option<&'s [usize]>,
    pub x: Option<&'s [usize]>,
    pub g: Option<&'s [usize]>,
    pub gk: Option<&'s [usize]>,
    pub beta: Option<&'s [usize]>,
    pub h: Option<&'s [usize]>,
    pub cu_seqlens: Option<&'s [usize]>,
    pub initial_state: Option<&'s [usize]>,
    pub state_pool: Option<&'s [usize]>,
    pub state_indices: Option<&'s [usize]>,
    pub num_accepted_tokens: Option<&'s [usize]>,
}

/// Sizes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChunkSizes {
    /// Of states; the rest of it, too.
    pub all: Sizes,
    pub packed: bool,
    pub chunk_size: usize,
    /// Of a sequence that is not packed; of all that are, at most.
    pub chunks: usize,
}

impl ChunkSizes {
    /// The shape of a tensor of value heads, with another axis.
    pub fn of_heads(&self, last: &[usize]) -> Vec<usize> {
        let Sizes { sequences, tokens, v_heads, .. } = self.all;
        let rows = if self.packed { vec![tokens] } else { vec![sequences, tokens] };
        [&rows[..], &[v_heads], last].concat()
    }

    /// The shape of the snapshots of states.
    pub fn snapshots(&self, layout: StateLayout) -> Vec<usize> {
        let rows = if self.packed { vec![self.chunks] } else { vec![self.all.sequences, self.chunks] };
        [&rows[..], &self.all.state(layout)].concat()
    }

    /// Tokens of all batches.
    fn rows(&self) -> usize {
        if self.packed { self.all.tokens } else { self.all.sequences * self.all.tokens }
    }

    /// Chunks of all sequences, at most.
    fn all_chunks(&self) -> usize {
        if self.packed { self.chunks } else { self.all.sequences * self.chunks }
    }
}

impl ChunkShapes<'_> {
    /// # Errors
    /// [`Error::Shape`], [`Error::Unsupported`] and [`Error::Argument`], naming the tensor.
    pub fn check(&self) -> Result<ChunkSizes> {
        let (op, chunk_size) = (self.op, self.chunk_size);
        if ![16, 32, 64].contains(&chunk_size) {
            let what = format!("C = {chunk_size}");
            return Err(Error::unsupported(op, what, "chunks have 16, 32 or 64 tokens"));
        }
        if self.g.is_some() && self.gk.is_some() {
            return Err(Error::argument(op, "g", "given", "nothing beside gk"));
        }
        // Keys beside values as q and k beside v: one set of checks.
        let (v, shape) = self.v;
        let shapes = Shapes {
            op,
            layout: self.layout,
            q: self.q.unwrap_or(self.k),
            k: self.k,
            v: shape,
            names: Some([if self.q.is_some() { "q" } else { "k" }, v]),
            cu_seqlens: self.cu_seqlens,
            g: self.g,
            gk: self.gk,
            initial_state: self.initial_state,
            state_pool: self.state_pool,
            state_indices: self.state_indices,
            num_accepted_tokens: self.num_accepted_tokens,
            ..Shapes::default()
        };
        let all = shapes.check()?;
        if all.each_token {
            let (got, want) = (self.state_indices.unwrap_or(&[]), format!("[{}] (sequences)", all.sequences));
            return Err(Error::shape(op, "state_indices", got, want));
        }
        let packed = self.cu_seqlens.is_some();
        let chunks =
            if packed { all.tokens / chunk_size + all.sequences } else { all.tokens.div_ceil(chunk_size) };
        let sizes = ChunkSizes { all, packed, chunk_size, chunks };
        for (arg, shape, want) in [
            ("w", self.w, sizes.of_heads(&[all.k_dim])),
            ("x", self.x, sizes.of_heads(&[chunk_size])),
            ("beta", self.beta, sizes.of_heads(&[])),
            ("h", self.h, sizes.snapshots(self.h_layout)),
        ] {
            if let Some(shape) = shape.filter(|shape| *shape != want) {
                return Err(Error::shape(op, arg, shape, format!("{want:?}")));
            }
        }
        let limit = i32::MAX as usize;
        for (arg, n, what, limit) in [
            ("k", all.sequences, "sequences", limit),
            ("k", all.tokens, "tokens", limit),
            (v, all.v_heads, "heads", 1 << 16),
            ("state_pool", all.n_slots, "slots", limit),
        ] {
            if n > limit {
                return Err(Error::too_large(op, arg, format!("{n} {what}"), limit as u64));
            }
        }
        Ok(sizes)
    }
}

/// A tensor of rows of heads: checked, and whether its rows can be read by 16 bytes.
fn expect_rows<E: Element>(
    op: &'static str,
    arg: &'static str,
    tensor: &TensorView<E>,
    chunk_size: usize,
) -> Result<bool> {
    let (shape, strides) = (tensor.shape(), tensor.strides());
    let rank = shape.len();
    let [tokens, dim] = [shape[rank - 3], shape[rank - 1]];
    if dim > 1 {
        tensor.expect_unit_stride(op, arg)?;
    }
    tensor.expect_aligned(op, arg, size_of::<E>() as u64)?;
    let apart = strides[rank - 3].saturating_mul(size_of::<E>()).saturating_mul(chunk_size);
    if tokens > 1 && apart > 1 << 30 {
        let what = format!("{apart} bytes from the first to the last token of a chunk");
        return Err(Error::too_large(op, arg, what, 1 << 30));
    }
    let whole = (dim * size_of::<E>()).is_multiple_of(16);
    Ok(whole && tensor.rows_aligned(16) && (tokens <= 1 || strides[rank - 3] >= dim))
}

/// The addresses of a launch's tensors in its parameters.
fn rows_of<E: Element>(address: u64, tensor: &TensorView<E>, tokens: usize) -> Heads {
    let mut rows = heads(address, tensor.strides());
    if tokens == 1 {
        // A stride of an axis of one element is anything.
        rows.token = *tensor.shape().last().unwrap_or(&1) as i64;
    }
    rows
}

impl ChunkSizes {
    fn params(&self, base: GateBase, scale: f32) -> Prefill {
        let Sizes { sequences, tokens, k_heads, v_heads, k_dim, v_dim, n_slots, .. } = self.all;
        Prefill {
            sequences: sequences as u32,
            tokens: tokens as u32,
            chunk: self.chunk_size as u32,
            chunks: self.chunks.max(1) as u32,
            k_dim: k_dim as u32,
            v_dim: v_dim as u32,
            k_heads: k_heads as u32,
            v_heads: v_heads as u32,
            group: (v_heads / k_heads) as u32,
            n_slots: n_slots as u32,
            base_2: (base == GateBase::Two).into(),
            scale,
            ..Prefill::zeroed()
        }
    }

    /// Rows of value heads, contiguous, from an address.
    fn packed_rows(&self, data: u64, dim: usize) -> Heads {
        let token = self.all.v_heads * dim;
        Heads { data, batch: (self.all.tokens * token) as i64, token: token as i64, head: dim as i64 }
    }

    fn run_prepare<'a, T: Float>(
        &self,
        stream: &'a Stream,
        launch: Launch<'a>,
        params: &Prefill,
        vectorized: bool,
        kernels: &'static [[KernelRef<Prefill>; 2]; 3],
    ) -> Result<()> {
        let kernel = stream.kernel(kernels[float_index(T::DTYPE)][usize::from(!vectorized)])?;
        let waves = self.all_chunks().saturating_mul(self.all.v_heads);
        // SAFETY: the callers have checked that the tensors have these sizes, in which the kernel stays whatever starts hold.
        unsafe { launch.run(&kernel, LaunchConfig::grid_1d(waves), params) }
    }

    /// Sums of gates of channels.
    fn run_sums<'a>(&self, stream: &'a Stream, launch: Launch<'a>, params: &Prefill) -> Result<()> {
        let slices = self.all.k_dim.div_ceil(stream.device().info().wave_size as usize);
        let waves = self.all_chunks().saturating_mul(self.all.v_heads).saturating_mul(slices);
        // SAFETY: as of run_prepare.
        unsafe { launch.run(&stream.kernel(SUMS)?, LaunchConfig::grid_1d(waves), params) }
    }

    fn run_states<'a, T: Float>(
        &self,
        stream: &'a Stream,
        launch: Launch<'a>,
        params: &Prefill,
        vectorized: bool,
    ) -> Result<()> {
        let variant = match vectorized {
            false => 2,
            true => usize::from(self.all.k_dim > 128),
        } + if params.gk == 0 { 0 } else { 3 };
        let kernel = stream.kernel(STATES[float_index(T::DTYPE)][variant])?;
        // Waves beyond four only load and store: `hip/states_warpgroup.h`.
        let waves = (kernel.block()[0] / stream.device().info().wave_size).min(4);
        let of_head = self.all.v_dim.div_ceil(STATE_COLS * waves as usize);
        let blocks = self.all.sequences.saturating_mul(self.all.v_heads).saturating_mul(of_head);
        // SAFETY: as of run_prepare; slots beyond the pool are neither read nor written.
        unsafe { launch.run(&kernel, LaunchConfig::grid_1d(blocks), params) }
    }

    fn run_outputs<'a, T: Float>(
        &self,
        stream: &'a Stream,
        launch: Launch<'a>,
        params: &Prefill,
        vectorized: bool,
    ) -> Result<()> {
        let (info, of_t) = (stream.device().info(), float_index(T::DTYPE));
        let units = self.all.v_dim.div_ceil(256 / size_of::<T>());
        let of_chunks = self.all_chunks().saturating_mul(self.all.v_heads).saturating_mul(units);
        let whole = vectorized
            && (params.gk == 0 && size_of::<T>() == 2)
            && match info.arch {
                // With warpgroup instructions blocks have more than a wave: `hip/outputs_warpgroup.h`.
                Arch::Sm90a => {
                    self.all.k_dim <= 128 && stream.kernel(OUTPUTS_64[of_t])?.block()[0] > info.wave_size
                }
                _ => {
                    self.chunk_size == 64
                        && info.wave_size == 64
                        && of_chunks >= WHOLE_CHUNK_WAVES * info.compute_units as usize
                }
            };
        let kernels = if params.gk == 0 { &OUTPUTS } else { &OUTPUTS_CHANNELS };
        let (kernel, waves) = if whole {
            (OUTPUTS_64[of_t], of_chunks)
        } else {
            let parts = self.chunk_size.div_ceil(OUTPUT_TOKENS);
            (kernels[of_t][usize::from(!vectorized)], of_chunks.saturating_mul(parts))
        };
        let kernel = stream.kernel(kernel)?;
        // SAFETY: as of run_prepare.
        unsafe { launch.run(&kernel, LaunchConfig::grid_1d(waves), params) }
    }
}

fn some<O: Operand>(tensor: Option<&O>) -> Option<&dyn Operand> {
    tensor.map(|tensor| tensor as _)
}

fn shape_of<'s, E: Element>(tensor: &'s Option<TensorView<E>>) -> Option<&'s [usize]> {
    tensor.as_ref().map(|tensor| tensor.shape())
}

/// The shapes of states.
fn with_states<'s, S: Element>(shapes: ChunkShapes<'s>, states: &'s States<S>) -> ChunkShapes<'s> {
    match states {
        States::Dense { initial, .. } => ChunkShapes { initial_state: shape_of(initial), ..shapes },
        States::Pool { pool, indices, accepted } => ChunkShapes {
            state_pool: Some(pool.shape()),
            state_indices: Some(indices.shape()),
            num_accepted_tokens: shape_of(accepted),
            ..shapes
        },
    }
}

/// Checks the tensors of states.
fn expect_states<S: StateElement>(
    op: &'static str,
    sizes: &ChunkSizes,
    layout: StateLayout,
    states: &States<S>,
) -> Result<()> {
    let align = size_of::<S>() as u64;
    match states {
        States::Dense { initial, last } => {
            if let Some(initial) = initial {
                expect_state(op, "initial_state", initial.shape(), initial.strides(), initial.layout())?;
                initial.expect_aligned(op, "initial_state", align)?;
            }
            if let Some(last) = last {
                let want = [&[sizes.all.sequences], &sizes.all.state(layout)[..]].concat();
                last.expect_shape(op, "final_state", want)?;
                expect_state(op, "final_state", last.shape(), last.strides(), last.layout())?;
                last.expect_aligned(op, "final_state", align)?;
            }
        }
        States::Pool { pool, indices, .. } => {
            expect_state(op, "state_pool", pool.shape(), pool.strides(), pool.layout())?;
            pool.expect_aligned(op, "state_pool", align)?;
            expect_plain(op, "state_indices", Some(indices))?;
        }
    }
    Ok(())
}

/// The tensors of states that are read, and those that are written.
fn state_operands<'s, S: StateElement>(
    states: &'s States<S>,
) -> ([NamedOperand<'s>; 2], [NamedOperand<'s>; 2]) {
    let (initial, last, pool, indices) = match states {
        States::Dense { initial, last } => (initial.as_ref(), last.as_ref(), None, None),
        States::Pool { pool, indices, .. } => (None, None, Some(pool), Some(indices)),
    };
    (
        [("initial_state", some(initial)), ("state_indices", some(indices))],
        [("final_state", some(last)), ("state_pool", some(pool))],
    )
}

/// The addresses of states.
fn bind_states<'t: 'a, 'a, S: StateElement>(
    launch: &mut Launch<'a>,
    states: &mut States<'t, S>,
    sizes: &ChunkSizes,
    layout: StateLayout,
    params: &mut Prefill,
) -> Result<()> {
    let (k_stride, v_stride) = match layout {
        StateLayout::Kv => (sizes.all.v_dim, 1),
        StateLayout::Vk => (1, sizes.all.k_dim),
    };
    (params.k_stride, params.v_stride) = (k_stride as u32, v_stride as u32);
    params.bf16_states = (S::DTYPE == DType::Bf16).into();
    let at = states.bind(launch)?;
    (params.from, params.from_slot) = at.from;
    (params.to, params.to_slot) = at.to;
    params.slots = at.slots;
    Ok(())
}

/// The inputs of [`recompute_w_u`].
#[derive(Debug, Clone, Copy)]
pub struct RecomputeInputs<'a, T: Element> {
    /// `[B, T, k_heads, K]`; packed sequences: `[T, k_heads, K]`.
    pub k: TensorView<'a, T>,
    /// `[B, T, v_heads, V]`; packed: `[T, v_heads, V]`.
    pub v: TensorView<'a, T>,
    /// `[B, T, v_heads]`; packed: `[T, v_heads]`.
    pub beta: TensorView<'a, f32>,
    /// `[B, T, v_heads, C]`; packed: `[T, v_heads, C]`: `(I + A)^-1` of each chunk, of [`solve_tril`](crate::solve_tril).
    pub x: TensorView<'a, T>,
    /// As `beta`: sums of logarithms of decays from the first token of a chunk on; zeros if left out.
    pub g: Option<TensorView<'a, f32>>,
    /// `[N + 1]`: the first token of each packed sequence, then the number of tokens.
    pub cu_seqlens: Option<TensorView<'a, i32>>,
    /// The base of `g`.
    pub base: GateBase,
}

/// What the states of a chunk are updated with, from the inverse: `u = X diag(beta) V` and `w = X diag(beta exp(G)) K`.
///
/// | arg          | shape                                               | dtype                | layout                       |
/// |--------------|-----------------------------------------------------|----------------------|------------------------------|
/// | `k`          | `[B, T, k_heads, K]`; packed: `[T, k_heads, K]`     | `bf16`, `f16`, `f32` | unit stride on `K`           |
/// | `v`          | `[B, T, v_heads, V]`; packed: `[T, v_heads, V]`     | as `k`               | unit stride on `V`           |
/// | `beta`, `g`  | `[B, T, v_heads]`; packed: `[T, v_heads]`           | `f32`                | contiguous; `g` optional     |
/// | `x`          | `[B, T, v_heads, C]`; packed: `[T, v_heads, C]`     | as `k`               | contiguous, on 16 bytes      |
/// | `cu_seqlens` | `[N + 1]`; given if packed                          | `i32`                | contiguous                   |
/// | `w`          | `[B, T, v_heads, K]`; packed: `[T, v_heads, K]`     | as `k`               | unit stride on `K`           |
/// | `u`          | as `v`                                              | as `k`               | unit stride on `V`           |
///
/// `C` is 16, 32 or 64; of `x` only what is on and below the diagonal is used. Value head `h` has the keys of head
/// `h / (v_heads / k_heads)`. `x` times the weights of its columns is rounded to the type of `k`, products are summed up in `f32`, results
/// rounded to nearest even. Batch-invariant. Tokens of no sequence are not written; those of a sequence whose tokens are out of range are NaN.
/// No output may share memory with another tensor. Returns when the launch is queued.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table,
/// [`Unsupported`](Error::Unsupported) for another `C`, or heads of more than 256 elements, [`Overlap`](Error::Overlap) if tensors share
/// memory, [`TooLarge`](Error::TooLarge) beyond 2^31 - 1 tokens or sequences, 2^16 heads, or a chunk whose tokens are 1 GiB apart,
/// [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written then.
///
/// Source: Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", section 3.3.
pub fn recompute_w_u<'a, T: Float>(
    stream: &Stream,
    inputs: RecomputeInputs<'a, T>,
    mut w: TensorViewMut<'a, T>,
    mut u: TensorViewMut<'a, T>,
) -> Result<()> {
    const OP: &str = "recompute_w_u";
    let RecomputeInputs { k, v, beta, x, g, cu_seqlens, base } = inputs;
    let shapes = ChunkShapes {
        op: OP,
        chunk_size: x.shape().last().copied().unwrap_or(0),
        k: k.shape(),
        v: ("v", v.shape()),
        x: Some(x.shape()),
        g: shape_of(&g),
        beta: Some(beta.shape()),
        cu_seqlens: shape_of(&cu_seqlens),
        ..ChunkShapes::default()
    };
    let sizes = shapes.check()?;
    let chunk = sizes.chunk_size;
    w.expect_shape(OP, "w", sizes.of_heads(&[sizes.all.k_dim]))?;
    u.expect_shape(OP, "u", v.shape())?;
    let vectorized = expect_rows(OP, "k", &k, chunk)?
        & expect_rows(OP, "v", &v, chunk)?
        & expect_rows(OP, "w", &w.alias(), chunk)?
        & expect_rows(OP, "u", &u.alias(), chunk)?;
    x.expect_contiguous(OP, "x")?;
    x.expect_aligned(OP, "x", 16)?;
    expect_plain(OP, "beta", Some(&beta))?;
    expect_plain(OP, "g", g.as_ref())?;
    expect_plain(OP, "cu_seqlens", cu_seqlens.as_ref())?;
    let read: [NamedOperand; 6] = [
        ("k", Some(&k)),
        ("v", Some(&v)),
        ("beta", Some(&beta)),
        ("x", Some(&x)),
        ("g", some(g.as_ref())),
        ("cu_seqlens", some(cu_seqlens.as_ref())),
    ];
    check_aliases(OP, &read, &[(("w", Some(&w)), &[]), (("u", Some(&u)), &[])])?;
    if sizes.rows() == 0 || sizes.all.sequences == 0 {
        return Ok(());
    }
    let tokens = sizes.all.tokens;
    let mut launch = stream.launch(OP);
    let (of_w, of_u) = (launch.output_address("w", &mut w)?, launch.output_address("u", &mut u)?);
    let params = Prefill {
        k: rows_of(launch.input_address("k", &k)?, &k, tokens),
        v: rows_of(launch.input_address("v", &v)?, &v, tokens),
        w: rows_of(of_w, &w.alias(), tokens),
        u: rows_of(of_u, &u.alias(), tokens),
        beta: launch.input_address("beta", &beta)?,
        x: launch.input_address("x", &x)?,
        g: optional_address(&mut launch, "g", &g)?,
        starts: optional_address(&mut launch, "cu_seqlens", &cu_seqlens)?,
        ..sizes.params(base, 1.0)
    };
    sizes.run_prepare::<T>(stream, launch, &params, vectorized, &RECOMPUTE)
}

/// The inputs of [`wy_representation`].
#[derive(Debug, Clone, Copy)]
pub struct WyInputs<'a, T: Element> {
    /// `[B, T, k_heads, K]`; packed sequences: `[T, k_heads, K]`.
    pub k: TensorView<'a, T>,
    /// `[B, T, v_heads, V]`; packed: `[T, v_heads, V]`.
    pub v: TensorView<'a, T>,
    /// `[B, T, v_heads]`; packed: `[T, v_heads]`: logarithms of decays; zeros if left out.
    pub g: Option<TensorView<'a, f32>>,
    /// `[B, T, v_heads, K]`; packed: `[T, v_heads, K]`: of rows of states, instead of `g`.
    pub gk: Option<TensorView<'a, f32>>,
    /// `[B, T, v_heads]`; packed: `[T, v_heads]`.
    pub beta: TensorView<'a, f32>,
    /// `[N + 1]`: the first token of each packed sequence, then the number of tokens.
    pub cu_seqlens: Option<TensorView<'a, i32>>,
}

/// The outputs of [`wy_representation`].
#[derive(Debug)]
pub struct WyOutputs<'a, T: Element> {
    /// As `g`, or as `gk`: sums of the logarithms of decays from the first token of a chunk on.
    pub sums: TensorViewMut<'a, f32>,
    /// `[B, T, v_heads, K]`; packed: `[T, v_heads, K]`.
    pub w: TensorViewMut<'a, T>,
    /// As `v`.
    pub u: TensorViewMut<'a, T>,
    /// As `w`, beside `gk`: the keys with their decays, for [`chunk_delta_h`].
    pub kg: Option<TensorViewMut<'a, T>>,
}

/// What the states of a chunk are updated with, in one launch: [`chunk_local_cumsum`](crate::chunk_local_cumsum),
/// [`chunk_scaled_dot_kkt`](crate::chunk_scaled_dot_kkt), [`solve_tril`](crate::solve_tril) and [`recompute_w_u`], with all between in
/// registers:
///
/// ```text
/// G_i  = sum of g_j, j <= i in the chunk
/// A_ij = beta_i exp(G_i - G_j) k_i k_j for j < i, else 0
/// X    = (I + A)^-1
/// u    = X diag(beta) V,  w = X diag(beta exp(G)) K
/// ```
///
/// | arg          | shape                                               | dtype                | layout                          |
/// |--------------|-----------------------------------------------------|----------------------|---------------------------------|
/// | `k`          | `[B, T, k_heads, K]`; packed: `[T, k_heads, K]`     | `bf16`, `f16`, `f32` | unit stride on `K`              |
/// | `v`          | `[B, T, v_heads, V]`; packed: `[T, v_heads, V]`     | as `k`               | unit stride on `V`              |
/// | `g`, `beta`  | `[B, T, v_heads]`; packed: `[T, v_heads]`           | `f32`                | contiguous; `g` optional        |
/// | `cu_seqlens` | `[N + 1]`; given if packed                          | `i32`                | contiguous                      |
/// | `gk`         | `[B, T, v_heads, K]`; packed: `[T, v_heads, K]`     | `f32`                | contiguous; instead of `g`      |
/// | `sums`       | as `g`, or as `gk`                                  | `f32`                | contiguous                      |
/// | `w`          | `[B, T, v_heads, K]`; packed: `[T, v_heads, K]`     | as `k`               | unit stride on `K`              |
/// | `u`          | as `v`                                              | as `k`               | unit stride on `V`              |
/// | `kg`         | as `w`; given beside `gk`                           | as `k`               | unit stride on `K`              |
///
/// With `gk` the sums `G` are of each channel `d`, in a launch before: `A_ij = beta_i sum_d k_id k_jd exp(G_id - G_jd)`,
/// `w = X diag(beta) (exp(G) K)`, and `kg = exp(G_last - G) K`. No exponent is positive. `chunk_size` is 16, 32 or 64. Value head `h` has the keys of head `h / (v_heads / k_heads)`. `A` and `X` are `f32`; `X` times the weights
/// of its columns is rounded to the type of `k`, products are summed up in `f32`, results rounded to nearest even. Batch-invariant. Tokens of
/// no sequence are not written; those of a sequence whose tokens are out of range are NaN in `w` and `u`, and so are those of a chunk with a
/// `g` that is positive or NaN. A `g` below -150 counts as -150: nothing is left of the state. No output may share memory with another tensor. Returns when the launch is queued.
///
/// # Errors
/// As [`recompute_w_u`].
///
/// Source: Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", section 3.3.
pub fn wy_representation<'a, T: Float>(
    stream: &Stream,
    inputs: WyInputs<'a, T>,
    outputs: WyOutputs<'a, T>,
    chunk_size: usize,
) -> Result<()> {
    const OP: &str = "wy_representation";
    let WyInputs { k, v, g, gk, beta, cu_seqlens } = inputs;
    let WyOutputs { mut sums, mut w, mut u, mut kg } = outputs;
    let shapes = ChunkShapes {
        op: OP,
        chunk_size,
        k: k.shape(),
        v: ("v", v.shape()),
        g: shape_of(&g),
        gk: shape_of(&gk),
        beta: Some(beta.shape()),
        cu_seqlens: shape_of(&cu_seqlens),
        ..ChunkShapes::default()
    };
    let sizes = shapes.check()?;
    if kg.is_some() != gk.is_some() {
        let (got, want) =
            if gk.is_some() { ("no tensor", "a tensor beside gk") } else { ("given", "nothing without gk") };
        return Err(Error::argument(OP, "kg", got, want));
    }
    sums.expect_shape(OP, "sums", gk.as_ref().map_or(beta.shape(), |gk| gk.shape()))?;
    w.expect_shape(OP, "w", sizes.of_heads(&[sizes.all.k_dim]))?;
    u.expect_shape(OP, "u", v.shape())?;
    let mut vectorized = expect_rows(OP, "k", &k, chunk_size)?
        & expect_rows(OP, "v", &v, chunk_size)?
        & expect_rows(OP, "w", &w.alias(), chunk_size)?
        & expect_rows(OP, "u", &u.alias(), chunk_size)?;
    if let Some(kg) = &kg {
        kg.expect_shape(OP, "kg", w.shape())?;
        vectorized &= expect_rows(OP, "kg", &kg.alias(), chunk_size)? && sums.is_aligned(16);
    }
    expect_plain(OP, "beta", Some(&beta))?;
    expect_plain(OP, "gk", gk.as_ref())?;
    expect_plain(OP, "g", g.as_ref())?;
    expect_plain(OP, "sums", Some(&sums.alias()))?;
    expect_plain(OP, "cu_seqlens", cu_seqlens.as_ref())?;
    let read: [NamedOperand; 6] = [
        ("k", Some(&k)),
        ("v", Some(&v)),
        ("g", some(g.as_ref())),
        ("gk", some(gk.as_ref())),
        ("beta", Some(&beta)),
        ("cu_seqlens", some(cu_seqlens.as_ref())),
    ];
    let written: [(NamedOperand, &[_]); 4] = [
        (("sums", Some(&sums)), &[]),
        (("w", Some(&w)), &[]),
        (("u", Some(&u)), &[]),
        (("kg", some(kg.as_ref())), &[]),
    ];
    check_aliases(OP, &read, &written)?;
    if sizes.rows() == 0 || sizes.all.sequences == 0 {
        return Ok(());
    }
    let tokens = sizes.all.tokens;
    let mut of_gates = stream.launch(OP);
    let all = sizes.params(GateBase::Natural, 1.0);
    let of_sums = Prefill {
        g: optional_address(&mut of_gates, "gk", &gk)?,
        sums: of_gates.output_address("sums", &mut sums)?,
        starts: optional_address(&mut of_gates, "cu_seqlens", &cu_seqlens)?,
        ..all
    };
    let mut launch = stream.launch(OP);
    let (of_w, of_u) = (launch.output_address("w", &mut w)?, launch.output_address("u", &mut u)?);
    let mut params = Prefill {
        k: rows_of(launch.input_address("k", &k)?, &k, tokens),
        v: rows_of(launch.input_address("v", &v)?, &v, tokens),
        w: rows_of(of_w, &w.alias(), tokens),
        u: rows_of(of_u, &u.alias(), tokens),
        sums: launch.output_address("sums", &mut sums)?,
        beta: launch.input_address("beta", &beta)?,
        g: optional_address(&mut launch, "g", &g)?,
        starts: of_sums.starts,
        ..all
    };
    optional_address(&mut launch, "cu_seqlens", &cu_seqlens)?;
    let Some(kg) = &mut kg else {
        return sizes.run_prepare::<T>(stream, launch, &params, vectorized, &PREPARE);
    };
    let address = launch.output_address("kg", kg)?;
    params = Prefill { kg: rows_of(address, &kg.alias(), tokens), gk: params.sums, sums: 0, ..params };
    sizes.run_sums(stream, of_gates, &of_sums)?;
    sizes.run_prepare::<T>(stream, launch, &params, vectorized, &PREPARE_CHANNELS)
}

/// The inputs of [`chunk_delta_h`].
#[derive(Debug, Clone, Copy)]
pub struct DeltaInputs<'a, T: Element> {
    /// `[B, T, k_heads, K]`; packed sequences: `[T, k_heads, K]`.
    pub k: TensorView<'a, T>,
    /// `[B, T, v_heads, K]`; packed: `[T, v_heads, K]`.
    pub w: TensorView<'a, T>,
    /// `[B, T, v_heads, V]`; packed: `[T, v_heads, V]`.
    pub u: TensorView<'a, T>,
    /// `[B, T, v_heads]`; packed: `[T, v_heads]`: sums of logarithms of decays from the first token of a chunk on; zeros if left out.
    pub g: Option<TensorView<'a, f32>>,
    /// `[B, T, v_heads, K]`; packed: `[T, v_heads, K]`: such sums of rows of states, instead of `g`; then `k` has its decays.
    pub gk: Option<TensorView<'a, f32>>,
    /// `[N + 1]`: the first token of each packed sequence, then the number of tokens.
    pub cu_seqlens: Option<TensorView<'a, i32>>,
    /// The base of `g`.
    pub base: GateBase,
}

/// The outputs of [`chunk_delta_h`] beside the states; each may be left out.
#[derive(Debug, Default)]
pub struct DeltaOutputs<'a, T: Element> {
    /// `[B, ceil(T / C), v_heads, K, V]`, or `V, K`: the states that enter the chunks. Packed: `[T / C + N, v_heads, K, V]`, rounded down.
    pub h: Option<TensorViewMut<'a, T>>,
    /// As `u`.
    pub v_new: Option<TensorViewMut<'a, T>>,
}

/// Options of [`chunk_delta_h`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaOptions {
    /// Tokens of a chunk: 16, 32 or 64.
    pub chunk_size: usize,
    /// Layout of the states.
    pub layout: StateLayout,
    /// Layout of `h`.
    pub h_layout: StateLayout,
}

impl Default for DeltaOptions {
    fn default() -> Self {
        Self { chunk_size: 64, layout: StateLayout::Kv, h_layout: StateLayout::Kv }
    }
}

/// The states of sequences over their chunks:
///
/// ```text
/// D  = u - w H                                       v_new
/// H' = exp(G_last) H + K^T diag(exp(G_last - G)) D
/// ```
///
/// | arg               | shape                                                    | dtype                | layout                            |
/// |-------------------|----------------------------------------------------------|----------------------|-----------------------------------|
/// | `k`               | `[B, T, k_heads, K]`; packed: `[T, k_heads, K]`          | `bf16`, `f16`, `f32` | unit stride on `K`                |
/// | `w`               | `[B, T, v_heads, K]`; packed: `[T, v_heads, K]`          | as `k`               | unit stride on `K`                |
/// | `u`, `v_new`      | `[B, T, v_heads, V]`; packed: `[T, v_heads, V]`          | as `k`               | unit stride on `V`                |
/// | `g`               | `[B, T, v_heads]`; packed: `[T, v_heads]`                | `f32`                | contiguous; optional              |
/// | `gk`              | `[B, T, v_heads, K]`; packed: `[T, v_heads, K]`          | `f32`                | contiguous; optional, not with `g` |
/// | `cu_seqlens`      | `[N + 1]`; given if packed                               | `i32`                | contiguous                        |
/// | `h`               | `[B, NT, v_heads, K, V]`; packed: `[NT, v_heads, K, V]`; or `V, K` by `h_layout`; optional | as `k` | contiguous, on 16 bytes |
/// | `initial`, `last`, `pool`, `indices` | as of [`fused_recurrent`](crate::fused_recurrent), one slot a sequence | `f32`, `bf16` | the same         |
///
/// With `gk`, rows of `H` decay by `exp(gk_last)`, and `k` is taken as it is: `kg` of [`wy_representation`].
///
/// `NT` is `ceil(T / C)`; packed: `floor(T / C) + N`, where chunk `c` of sequence `n` is at `floor(start / C) + n + c`; others are not
/// written. `C` is 16, 32 or 64. Value head `h` has the keys of head `h / (v_heads / k_heads)`; `K` and `V` are from 1 to 256.
///
/// The state is `f32` from the first chunk to the last one. It is rounded to the type of `k` as an operand and in `h`, `D` where it is stored,
/// and, decayed, as an operand; a `bf16` state when it is written. Batch-invariant. A sequence without tokens keeps its state. What is on the
/// device is not trusted, as of [`fused_recurrent`](crate::fused_recurrent): what such a sequence has in `v_new` and `h` is NaN, and no
/// state is written. `v_new` may be exactly `u`, `last` exactly `initial`; else no output may share memory with another tensor. Returns when the
/// launch is queued.
///
/// # Errors
/// As [`recompute_w_u`]; [`Argument`](Error::Argument) for `accepted`, [`Shape`](Error::Shape) for indices of several states.
///
/// Source: Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", section 3.3.
pub fn chunk_delta_h<'a, T: Float, S: StateElement>(
    stream: &Stream,
    inputs: DeltaInputs<'a, T>,
    mut states: States<'a, S>,
    outputs: DeltaOutputs<'a, T>,
    options: DeltaOptions,
) -> Result<()> {
    const OP: &str = "chunk_delta_h";
    let DeltaInputs { k, w, u, g, gk, cu_seqlens, base } = inputs;
    let DeltaOutputs { mut h, mut v_new } = outputs;
    let DeltaOptions { chunk_size, layout, h_layout } = options;
    let shapes = ChunkShapes {
        op: OP,
        chunk_size,
        layout,
        h_layout,
        k: k.shape(),
        v: ("u", u.shape()),
        w: Some(w.shape()),
        h: h.as_ref().map(|h| h.shape()),
        g: shape_of(&g),
        gk: shape_of(&gk),
        cu_seqlens: shape_of(&cu_seqlens),
        ..ChunkShapes::default()
    };
    let sizes = with_states(shapes, &states).check()?;
    let mut vectorized = expect_rows(OP, "k", &k, chunk_size)?
        & expect_rows(OP, "w", &w, chunk_size)?
        & expect_rows(OP, "u", &u, chunk_size)?;
    if let Some(v_new) = &v_new {
        v_new.expect_shape(OP, "v_new", u.shape())?;
        vectorized &= expect_rows(OP, "v_new", &v_new.alias(), chunk_size)?;
    }
    if let Some(h) = &h {
        h.expect_contiguous(OP, "h")?;
        h.expect_aligned(OP, "h", 16)?;
    }
    expect_plain(OP, "g", g.as_ref())?;
    expect_plain(OP, "gk", gk.as_ref())?;
    vectorized &= gk.as_ref().is_none_or(|gk| gk.is_aligned(16));
    expect_plain(OP, "cu_seqlens", cu_seqlens.as_ref())?;
    expect_states(OP, &sizes, layout, &states)?;
    let (state_inputs, state_outputs) = state_operands(&states);
    let read: Vec<NamedOperand> = [
        ("k", Some(&k as &dyn Operand)),
        ("w", Some(&w)),
        ("u", Some(&u)),
        ("g", some(g.as_ref())),
        ("gk", some(gk.as_ref())),
        ("cu_seqlens", some(cu_seqlens.as_ref())),
    ]
    .into_iter()
    .chain(state_inputs)
    .collect();
    let [last, pool] = state_outputs;
    let written: [(NamedOperand, &[_]); 4] = [
        (("h", some(h.as_ref())), &[]),
        (("v_new", some(v_new.as_ref())), &["u"]),
        (last, &["initial_state"]),
        (pool, &[]),
    ];
    check_aliases(OP, &read, &written)?;
    if sizes.all.sequences == 0 {
        return Ok(());
    }
    let tokens = sizes.all.tokens;
    let mut launch = stream.launch(OP);
    let mut params = Prefill {
        k: rows_of(launch.input_address("k", &k)?, &k, tokens),
        w: rows_of(launch.input_address("w", &w)?, &w, tokens),
        u: rows_of(launch.input_address("u", &u)?, &u, tokens),
        g: optional_address(&mut launch, "g", &g)?,
        gk: optional_address(&mut launch, "gk", &gk)?,
        starts: optional_address(&mut launch, "cu_seqlens", &cu_seqlens)?,
        h_vk: (h_layout == StateLayout::Vk).into(),
        ..sizes.params(base, 1.0)
    };
    if let Some(v_new) = &mut v_new {
        let address = launch.output_address("v_new", v_new)?;
        params.d = rows_of(address, &v_new.alias(), tokens);
    }
    if let Some(h) = &mut h {
        params.h = launch.output_address("h", h)?;
    }
    bind_states(&mut launch, &mut states, &sizes, layout, &mut params)?;
    sizes.run_states::<T>(stream, launch, &params, vectorized)
}

/// The inputs of [`chunk_o`].
#[derive(Debug, Clone, Copy)]
pub struct ChunkOutputInputs<'a, T: Element> {
    /// `[B, T, k_heads, K]`; packed sequences: `[T, k_heads, K]`.
    pub q: TensorView<'a, T>,
    /// As `q`.
    pub k: TensorView<'a, T>,
    /// `[B, T, v_heads, V]`; packed: `[T, v_heads, V]`.
    pub v_new: TensorView<'a, T>,
    /// The states that enter the chunks, of [`chunk_delta_h`].
    pub h: TensorView<'a, T>,
    /// `[B, T, v_heads]`; packed: `[T, v_heads]`: sums of logarithms of decays from the first token of a chunk on; zeros if left out.
    pub g: Option<TensorView<'a, f32>>,
    /// `[B, T, v_heads, K]`; packed: `[T, v_heads, K]`: such sums of rows of states, instead of `g`.
    pub gk: Option<TensorView<'a, f32>>,
    /// `[N + 1]`: the first token of each packed sequence, then the number of tokens.
    pub cu_seqlens: Option<TensorView<'a, i32>>,
    /// The base of `g`.
    pub base: GateBase,
}

/// Options of [`chunk_o`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChunkOutputOptions {
    /// Factor of `o`; `K^(-1/2)` if left out.
    pub scale: Option<f32>,
    /// Tokens of a chunk: 16, 32 or 64.
    pub chunk_size: usize,
    /// Layout of `h`.
    pub h_layout: StateLayout,
}

impl Default for ChunkOutputOptions {
    fn default() -> Self {
        Self { scale: None, chunk_size: 64, h_layout: StateLayout::Kv }
    }
}

/// The outputs of the tokens of each chunk, from the state that enters it and the updates of its tokens:
/// `o_i = scale (exp(G_i) H^T q_i + sum_{j <= i} exp(G_i - G_j) (q_i k_j) D_j)`.
///
/// | arg          | shape                                                   | dtype                | layout                       |
/// |--------------|---------------------------------------------------------|----------------------|------------------------------|
/// | `q`, `k`     | `[B, T, k_heads, K]`; packed: `[T, k_heads, K]`         | `bf16`, `f16`, `f32` | unit stride on `K`           |
/// | `v_new`, `o` | `[B, T, v_heads, V]`; packed: `[T, v_heads, V]`         | as `q`               | unit stride on `V`           |
/// | `h`          | as of [`chunk_delta_h`]                                 | as `q`               | contiguous, on 16 bytes      |
/// | `g`          | `[B, T, v_heads]`; packed: `[T, v_heads]`               | `f32`                | contiguous; optional         |
/// | `gk`         | `[B, T, v_heads, K]`; packed: `[T, v_heads, K]`         | `f32`                | contiguous; not with `g`     |
/// | `cu_seqlens` | `[N + 1]`; given if packed                              | `i32`                | contiguous                   |
///
/// With `gk` the decays are of channels: `o_i = scale (H^T (exp(G_i) q_i) + sum_{j <= i} (sum_d q_id k_jd exp(G_id - G_jd)) D_j)`.
///
/// `C` is 16, 32 or 64. Value head `h` has the keys of head `h / (v_heads / k_heads)`; `K` and `V` are from 1 to 256. Where `j > i` nothing is
/// exponentiated: the product is 0. The decayed products of `q` and `k` are rounded to the type of `q` as an operand; sums are `f32`; `o` is
/// rounded to nearest even. Batch-invariant. Tokens of no sequence are not written; those of a sequence whose tokens are out of range are NaN.
/// `o` may not share memory with another tensor. Returns when the launch is queued.
///
/// # Errors
/// As [`recompute_w_u`]; [`Argument`](Error::Argument) for a scale that is not positive and finite.
///
/// Source: Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", section 3.3.
pub fn chunk_o<'a, T: Float>(
    stream: &Stream,
    inputs: ChunkOutputInputs<'a, T>,
    mut o: TensorViewMut<'a, T>,
    options: ChunkOutputOptions,
) -> Result<()> {
    const OP: &str = "chunk_o";
    let ChunkOutputInputs { q, k, v_new, h, g, gk, cu_seqlens, base } = inputs;
    let ChunkOutputOptions { scale, chunk_size, h_layout } = options;
    let shapes = ChunkShapes {
        op: OP,
        chunk_size,
        h_layout,
        q: Some(q.shape()),
        k: k.shape(),
        v: ("v_new", v_new.shape()),
        h: Some(h.shape()),
        g: shape_of(&g),
        gk: shape_of(&gk),
        cu_seqlens: shape_of(&cu_seqlens),
        ..ChunkShapes::default()
    };
    let sizes = shapes.check()?;
    let scale = check_scale(OP, scale, sizes.all.k_dim)?;
    o.expect_shape(OP, "o", v_new.shape())?;
    let vectorized = expect_rows(OP, "q", &q, chunk_size)?
        & expect_rows(OP, "k", &k, chunk_size)?
        & expect_rows(OP, "v_new", &v_new, chunk_size)?
        & expect_rows(OP, "o", &o.alias(), chunk_size)?
        & gk.as_ref().is_none_or(|gk| gk.is_aligned(16));
    expect_plain(OP, "gk", gk.as_ref())?;
    h.expect_contiguous(OP, "h")?;
    h.expect_aligned(OP, "h", 16)?;
    expect_plain(OP, "g", g.as_ref())?;
    expect_plain(OP, "cu_seqlens", cu_seqlens.as_ref())?;
    let read: [NamedOperand; 7] = [
        ("q", Some(&q)),
        ("k", Some(&k)),
        ("v_new", Some(&v_new)),
        ("h", Some(&h)),
        ("g", some(g.as_ref())),
        ("gk", some(gk.as_ref())),
        ("cu_seqlens", some(cu_seqlens.as_ref())),
    ];
    check_aliases(OP, &read, &[(("o", Some(&o)), &[])])?;
    if sizes.rows() == 0 || sizes.all.sequences == 0 {
        return Ok(());
    }
    let tokens = sizes.all.tokens;
    let mut launch = stream.launch(OP);
    let of_o = launch.output_address("o", &mut o)?;
    let params = Prefill {
        q: rows_of(launch.input_address("q", &q)?, &q, tokens),
        k: rows_of(launch.input_address("k", &k)?, &k, tokens),
        d: rows_of(launch.input_address("v_new", &v_new)?, &v_new, tokens),
        o: rows_of(of_o, &o.alias(), tokens),
        h: launch.input_address("h", &h)?,
        g: optional_address(&mut launch, "g", &g)?,
        gk: optional_address(&mut launch, "gk", &gk)?,
        starts: optional_address(&mut launch, "cu_seqlens", &cu_seqlens)?,
        h_vk: (h_layout == StateLayout::Vk).into(),
        ..sizes.params(base, scale)
    };
    sizes.run_outputs::<T>(stream, launch, &params, vectorized)
}

/// The inputs of [`chunk_gated_delta_rule`].
#[derive(Debug, Clone, Copy)]
pub struct ChunkInputs<'a, T: Element> {
    /// `[B, T, k_heads, K]`; packed sequences: `[T, k_heads, K]`.
    pub q: TensorView<'a, T>,
    /// As `q`.
    pub k: TensorView<'a, T>,
    /// `[B, T, v_heads, V]`; packed: `[T, v_heads, V]`.
    pub v: TensorView<'a, T>,
    /// `[B, T, v_heads]`; packed: `[T, v_heads]`: logarithms of decays of states; zeros if left out.
    pub g: Option<TensorView<'a, f32>>,
    /// `[B, T, v_heads, K]`; packed: `[T, v_heads, K]`: of their rows, instead of `g`.
    pub gk: Option<TensorView<'a, f32>>,
    /// `[B, T, v_heads]`; packed: `[T, v_heads]`: weights of the updates.
    pub beta: TensorView<'a, f32>,
    /// `[N + 1]`: the first token of each packed sequence, then the number of tokens.
    pub cu_seqlens: Option<TensorView<'a, i32>>,
}

/// Options of [`chunk_gated_delta_rule`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChunkOptions {
    /// Factor of `o`; `K^(-1/2)` if left out.
    pub scale: Option<f32>,
    /// Divides `q` and `k` by `sqrt(sum of squares + 1e-6)`.
    pub qk_l2norm: bool,
    /// Tokens of a chunk: 16, 32 or 64.
    pub chunk_size: usize,
    /// Layout of the states.
    pub layout: StateLayout,
}

impl Default for ChunkOptions {
    fn default() -> Self {
        Self { scale: None, qk_l2norm: false, chunk_size: 64, layout: StateLayout::Kv }
    }
}

const OP: &str = "chunk_gated_delta_rule";

impl<T: Float> ChunkInputs<'_, T> {
    fn shapes(&self, options: ChunkOptions) -> ChunkShapes<'_> {
        ChunkShapes {
            op: OP,
            chunk_size: options.chunk_size,
            layout: options.layout,
            q: Some(self.q.shape()),
            k: self.k.shape(),
            v: ("v", self.v.shape()),
            g: shape_of(&self.g),
            gk: shape_of(&self.gk),
            beta: Some(self.beta.shape()),
            cu_seqlens: shape_of(&self.cu_seqlens),
            ..ChunkShapes::default()
        }
    }

    /// Bytes of the workspace of [`chunk_gated_delta_rule`]: `w` and `u` (then `v_new`), the sums of gates, the norms of keys, the states
    /// that enter the chunks; with gates of rows, the decayed keys.
    ///
    /// # Errors
    /// [`Error::Shape`] and [`Error::Unsupported`], as the call itself.
    pub fn workspace_bytes(&self, options: ChunkOptions) -> Result<usize> {
        Ok(Parts::new(&self.shapes(options).check()?, size_of::<T>(), self.gk.is_some()).len)
    }
}

/// The parts of a workspace: where they begin, and the length of all, in bytes.
#[derive(Debug)]
struct Parts {
    w: usize,
    u: usize,
    sums: usize,
    norms: usize,
    h: usize,
    kg: usize,
    len: usize,
}

impl Parts {
    fn new(sizes: &ChunkSizes, element: usize, channels: bool) -> Self {
        let Sizes { k_heads, v_heads, k_dim, v_dim, .. } = sizes.all;
        let rows = sizes.rows();
        let mut len = 0;
        let mut part = |elements: usize, bytes: usize| {
            let at = len;
            len += (elements * bytes).next_multiple_of(PART);
            at
        };
        Self {
            w: part(rows * v_heads * k_dim, element),
            u: part(rows * v_heads * v_dim, element),
            sums: part(rows * v_heads * if channels { k_dim } else { 1 }, 4),
            norms: part(rows * k_heads, 4),
            h: part(sizes.all_chunks() * v_heads * k_dim * v_dim, element),
            kg: part(if channels { rows * v_heads * k_dim } else { 0 }, element),
            len,
        }
    }
}

/// The gated delta rule over whole prompts, in chunks: [`fused_recurrent`](crate::fused_recurrent) with other roundings, three launches and
/// matrix instructions: [`wy_representation`], [`chunk_delta_h`] and [`chunk_o`].
///
/// | arg                  | shape                                                           | dtype                | layout                                 |
/// |----------------------|-----------------------------------------------------------------|----------------------|----------------------------------------|
/// | `q`, `k`             | `[B, T, k_heads, K]`; packed: `[T, k_heads, K]`                 | `bf16`, `f16`, `f32` | unit stride on `K`                     |
/// | `v`, `o`             | `[B, T, v_heads, V]`; packed: `[T, v_heads, V]`                 | as `q`               | unit stride on `V`                     |
/// | `g`, `beta`          | `[B, T, v_heads]`; packed: `[T, v_heads]`                       | `f32`                | contiguous; `g` optional               |
/// | `gk`                 | the same and `K`; optional, instead of `g`                      | `f32`                | contiguous                             |
/// | `cu_seqlens`         | `[N + 1]`; given if packed                                      | `i32`                | contiguous                             |
/// | `initial`, `last`, `pool`, `indices` | as of [`fused_recurrent`](crate::fused_recurrent), one slot a sequence | `f32`, `bf16` | the same               |
/// | `workspace`          | `[bytes]`, at least [`ChunkInputs::workspace_bytes`]            | `u8`                 | contiguous, on 16 bytes                |
///
/// Value head `h` uses key head `h / (v_heads / k_heads)`. `K` and `V` are from 1 to 256; `chunk_size` is 16, 32 or 64. Norms of `q` and `k` are
/// of the given elements, in `f32`, and are applied to products. Operands of products are rounded to the type of `q`, sums are `f32`, and so is
/// the state between chunks; `o`, and a `bf16` state when it is written, are rounded to nearest even. Results are batch-invariant, and those of
/// packed sequences have the bits of each alone. A sequence without tokens keeps its state. A sequence may be split over two calls; if the first
/// part is whole chunks and the state is `f32`, the bits are the same.
///
/// With `gk`, gates of rows of states (Kimi Linear), there is one launch more, of their sums, and products of keys, and of queries and keys,
/// have decays by channel: those of tokens of one tile of 16 each exponential, others that of differences from the first token of the later
/// tile, so that no exponent is positive.
///
/// What is on the device is not trusted: a sequence whose tokens are out of range, or whose slot is beyond the pool, is NaN in `o` where it
/// has tokens, and writes no state. A `g` or `gk` that is positive or NaN makes the outputs of its token, others of its chunk, all of later ones, and the state NaN; one
/// below -150 counts as -150. If two
/// sequences have one slot, the state of either may remain. `last` may be exactly `initial`; else no output may share memory with another
/// tensor. No allocation, no host copy: it can be captured in a graph. Returns when the launches are queued.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table, or the workspace is too short,
/// [`Argument`](Error::Argument) for a scale that is not positive and finite, `g` beside `gk`, or `accepted`, [`Unsupported`](Error::Unsupported) for another
/// `chunk_size`, or heads of more than 256 elements, [`Overlap`](Error::Overlap) if an output shares memory with another tensor,
/// [`TooLarge`](Error::TooLarge) beyond 2^31 - 1 tokens, sequences or slots, 2^16 heads, or a chunk whose tokens are 1 GiB apart,
/// [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a kernel.
///
/// Source: Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", section 3.3.
pub fn chunk_gated_delta_rule<'a, T: Float, S: StateElement>(
    stream: &Stream,
    inputs: ChunkInputs<'a, T>,
    mut states: States<'a, S>,
    mut workspace: TensorViewMut<'a, u8>,
    mut o: TensorViewMut<'a, T>,
    options: ChunkOptions,
) -> Result<()> {
    let ChunkInputs { q, k, v, g, gk, beta, cu_seqlens } = inputs;
    let chunk_size = options.chunk_size;
    let sizes = with_states(inputs.shapes(options), &states).check()?;
    let scale = check_scale(OP, options.scale, sizes.all.k_dim)?;
    o.expect_shape(OP, "o", v.shape())?;
    let of_q = expect_rows(OP, "q", &q, chunk_size)? & expect_rows(OP, "o", &o.alias(), chunk_size)?;
    let of_k = expect_rows(OP, "k", &k, chunk_size)?;
    let of_v = expect_rows(OP, "v", &v, chunk_size)?;
    // The rows of the workspace, too, are whole 16-byte vectors then.
    let vectorized = of_k & of_v;
    expect_plain(OP, "g", g.as_ref())?;
    expect_plain(OP, "gk", gk.as_ref())?;
    expect_plain(OP, "beta", Some(&beta))?;
    expect_plain(OP, "cu_seqlens", cu_seqlens.as_ref())?;
    expect_states(OP, &sizes, options.layout, &states)?;
    let parts = Parts::new(&sizes, size_of::<T>(), gk.is_some());
    let [given] = workspace.dims(OP, "workspace")?;
    if given < parts.len {
        let want = format!("[{}] or longer (ChunkInputs::workspace_bytes)", parts.len);
        return Err(Error::shape(OP, "workspace", [given], want));
    }
    workspace.expect_contiguous(OP, "workspace")?;
    workspace.expect_aligned(OP, "workspace", 16)?;
    let (state_inputs, state_outputs) = state_operands(&states);
    let read: Vec<NamedOperand> = [
        ("q", Some(&q as &dyn Operand)),
        ("k", Some(&k)),
        ("v", Some(&v)),
        ("g", some(g.as_ref())),
        ("gk", some(gk.as_ref())),
        ("beta", Some(&beta)),
        ("cu_seqlens", some(cu_seqlens.as_ref())),
    ]
    .into_iter()
    .chain(state_inputs)
    .collect();
    let [last, pool] = state_outputs;
    let written: [(NamedOperand, &[_]); 4] = [
        (("o", Some(&o)), &[]),
        (last, &["initial_state"]),
        (pool, &[]),
        (("workspace", Some(&workspace)), &[]),
    ];
    check_aliases(OP, &read, &written)?;
    if sizes.all.sequences == 0 {
        return Ok(());
    }

    let Sizes { tokens, k_dim, v_dim, .. } = sizes.all;
    // All tensors are bound before anything is launched.
    let mut prepare = stream.launch(OP);
    let space = prepare.output_address("workspace", &mut workspace)?;
    let at = |part: usize| space + part as u64;
    let all = Prefill {
        k: rows_of(prepare.input_address("k", &k)?, &k, tokens),
        w: sizes.packed_rows(at(parts.w), k_dim),
        u: sizes.packed_rows(at(parts.u), v_dim),
        norms: if options.qk_l2norm { at(parts.norms) } else { 0 },
        l2norm: options.qk_l2norm.into(),
        h: at(parts.h),
        h_vk: 1,
        starts: optional_address(&mut prepare, "cu_seqlens", &cu_seqlens)?,
        ..sizes.params(GateBase::Natural, scale)
    };
    // With gates of rows their sums are made before, and the decayed keys take the place of k.
    let channels = gk.is_some();
    let (sums, of_channels) = if channels { (0, at(parts.sums)) } else { (at(parts.sums), 0) };
    let all = Prefill { gk: of_channels, ..all };
    let kg = sizes.packed_rows(at(parts.kg), k_dim);
    let mut of_gates = stream.launch(OP);
    of_gates.output_address("workspace", &mut workspace)?;
    optional_address(&mut of_gates, "cu_seqlens", &cu_seqlens)?;
    let raw = optional_address(&mut of_gates, "gk", &gk)?;
    let of_sums = Prefill { g: raw, sums: at(parts.sums), ..all };
    let of_prepare = Prefill {
        kg,
        v: rows_of(prepare.input_address("v", &v)?, &v, tokens),
        g: optional_address(&mut prepare, "g", &g)?,
        beta: prepare.input_address("beta", &beta)?,
        sums,
        ..all
    };

    let mut update = stream.launch(OP);
    update.input_address("k", &k)?;
    update.output_address("workspace", &mut workspace)?;
    optional_address(&mut update, "cu_seqlens", &cu_seqlens)?;
    // v_new takes the place of u.
    let mut of_update = Prefill { d: all.u, g: sums, ..all };
    if channels {
        of_update = Prefill { k: kg, group: 1, norms: 0, ..of_update };
    }
    bind_states(&mut update, &mut states, &sizes, options.layout, &mut of_update)?;

    let mut outputs = stream.launch(OP);
    outputs.input_address("k", &k)?;
    outputs.output_address("workspace", &mut workspace)?;
    optional_address(&mut outputs, "cu_seqlens", &cu_seqlens)?;
    let of_o = outputs.output_address("o", &mut o)?;
    let of_outputs = Prefill {
        q: rows_of(outputs.input_address("q", &q)?, &q, tokens),
        d: all.u,
        o: rows_of(of_o, &o.alias(), tokens),
        g: sums,
        ..all
    };
    if sizes.rows() == 0 {
        return sizes.run_states::<T>(stream, update, &of_update, vectorized);
    }
    if channels {
        sizes.run_sums(stream, of_gates, &of_sums)?;
    }
    let kernels = if channels { &PREPARE_CHANNELS } else { &PREPARE };
    sizes.run_prepare::<T>(stream, prepare, &of_prepare, vectorized, kernels)?;
    sizes.run_states::<T>(stream, update, &of_update, vectorized)?;
    sizes.run_outputs::<T>(stream, outputs, &of_outputs, vectorized & of_q)
}
