//! GEMM of queries and absorbed weights, rotation, concatenation and caching of multi-head latent attention.

use super::cache::{CacheElement, HeadElement, Heads as _, PART, Tokens, check_scale, optional};
use super::mla::{Call, MlaInputs, MlaOutputs, Sizes};
use crate::kernels::cache::Target;
use crate::kernels::mla_bmm::Params;
use hk_core::plan::rope::{Rope, RopeElement, RopeSource};
use hk_core::quant::{BlockRule, BlockScale};
use hk_core::{
    DType, E8M0, Element, Error, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz, GlobalLayout, KernelRef, Launch, LaunchConfig,
    NamedOperand, Result, Stream, TensorView,
};

const OP: &str = "fused_bmm_rope_kv_cache";

/// The weights of [`fused_bmm_rope_kv_cache`], `[q_heads, nope, cols]` with unit stride on `cols` and all others free, and
/// the quantization of the queries.
#[derive(Debug, Clone, Copy)]
pub enum MlaWeight<'a, T: Element> {
    /// In the type of the queries.
    Same(TensorView<'a, T>),
    /// In fp8 of the OCP, the one of gfx950, with one scale for all; see [`Fp8Weight`].
    Fp8(Fp8Weight<'a, Fp8E4M3>),
    /// In fp8 FNUZ, the one of gfx942, with one scale for all; see [`Fp8Weight`].
    Fp8Fnuz(Fp8Weight<'a, Fp8E4M3Fnuz>),
    /// In mxfp4, see [`Mxfp4Weight`].
    Mxfp4(Mxfp4Weight<'a>),
}

/// Weights in fp8. Queries are quantized on the fly to the same fp8, with a scale `s = max(max |q|, 1e-10) / largest` for each
/// token, head and group of columns, which multiplies the sum over the group.
#[derive(Debug, Clone, Copy)]
pub struct Fp8Weight<'a, F: Element> {
    /// The quantized weights, `[q_heads, nope, cols]`.
    pub w: TensorView<'a, F>,
    /// `w_scale`: multiplies the weights; one number on the device.
    pub scale: TensorView<'a, f32>,
    /// Columns of a group: 64 or a larger power of two; the last group may be shorter. 128 is usual.
    pub group: usize,
}

/// Weights in mxfp4: fp4 e2m1 with a power-of-two scale for each 32 columns. Queries are quantized alike, with scales by
/// [`BlockScale::Even`]; a block with a value that is not finite is NaN. gfx950 multiplies fp4; elsewhere both operands are
/// dequantized to `bf16`, which holds their values, scales included, exactly.
#[derive(Debug, Clone, Copy)]
pub struct Mxfp4Weight<'a> {
    /// The quantized weights, two columns per byte: `[q_heads, nope, cols / 2]`, unit stride on the last axis.
    pub w: TensorView<'a, Fp4x2>,
    /// The scales: `[q_heads, nope, cols / 32]`, unit stride on the last axis.
    pub scales: TensorView<'a, E8M0>,
    /// `y_scale`: divides the result before it is rounded; one number on the device. For an fp8 consumer.
    pub y_scale: Option<TensorView<'a, f32>>,
}

/// The entry points of `hip/mla_bmm.hip` for one form of weights: for bf16 and f16; few tokens, many tokens, scalar.
type Form = [[KernelRef<Params>; 3]; 2];

macro_rules! form {
    ($name:literal) => {
        [form!(@ "bf16", $name), form!(@ "f16", $name)]
    };
    (@ $dtype:literal, $name:literal) => {
        [
            const { Params::kernel(concat!("mla_bmm_", $dtype, "_", $name, "_16")) },
            const { Params::kernel(concat!("mla_bmm_", $dtype, "_", $name, "_64")) },
            const { Params::kernel(concat!("mla_bmm_", $dtype, "_", $name, "_16_scalar")) },
        ]
    };
}

static SAME: Form = form!("same");
static FP8: Form = form!("fp8");
static MXFP4: Form = form!("mxfp4");

/// Tokens per block, for few and for many tokens.
const FEW: usize = 16;
const MANY: usize = 64;
/// Outputs of a wave: `16 * kTiles`.
const OUTPUTS: usize = 64;
/// Columns per step of a wave: `kStep`.
const STEP: usize = 64;
/// Blocks per CU that keep memory busy.
const BLOCKS_PER_CU: usize = 16;
/// Most bytes between the rows of a block on the vectorized path.
const WINDOW: usize = 1 << 31;

impl<'a, T: HeadElement> MlaWeight<'a, T> {
    fn form(&self) -> &'static Form {
        match self {
            Self::Same(_) => &SAME,
            Self::Fp8(_) | Self::Fp8Fnuz(_) => &FP8,
            Self::Mxfp4(_) => &MXFP4,
        }
    }

    /// Checks shapes, strides and options, and that the device has matrix instructions for this form.
    fn check(&self, stream: &Stream, [heads, nope, cols]: [usize; 3]) -> Result<()> {
        const WHY: &str = "heads, columns of k_nope, columns of q_nope";
        let arch = stream.device().info().arch;
        let native = |what: DType| {
            let reason = "matrix cores take fp8e4m3fnuz on gfx942, fp8e4m3 elsewhere";
            if what.is_fp8_of_another(arch) {
                return Err(Error::unsupported(OP, format!("{what} weights on {arch}"), reason));
            }
            Ok(())
        };
        match self {
            Self::Same(w) => w.check(OP, "w", &[heads, nope, cols], WHY),
            Self::Fp8(Fp8Weight { w, scale, group }) => {
                w.check(OP, "w", &[heads, nope, cols], WHY)?;
                check_fp8(scale, *group)?;
                native(DType::Fp8E4M3)
            }
            Self::Fp8Fnuz(Fp8Weight { w, scale, group }) => {
                w.check(OP, "w", &[heads, nope, cols], WHY)?;
                check_fp8(scale, *group)?;
                native(DType::Fp8E4M3Fnuz)
            }
            Self::Mxfp4(Mxfp4Weight { w, scales, y_scale }) => {
                if !cols.is_multiple_of(32) {
                    let want = "a multiple of 32 columns, beside mxfp4 weights";
                    return Err(Error::shape(OP, "q_nope", [cols], want));
                }
                w.check(
                    OP,
                    "w",
                    &[heads, nope, cols / 2],
                    "heads, columns of k_nope, half the columns of q_nope",
                )?;
                scales.check(
                    OP,
                    "w_scales",
                    &[heads, nope, cols / 32],
                    "heads, columns of k_nope, blocks of 32",
                )?;
                check_scale(OP, "y_scale", y_scale.as_ref())
            }
        }
    }

    /// Whether the vectorized path serves the alignment, length and distance of rows.
    fn can_vectorize(&self, cols: usize) -> bool {
        match self {
            Self::Same(w) => w.rows_aligned(16) && cols.is_multiple_of(8) && is_near(w, OUTPUTS),
            Self::Fp8(Fp8Weight { w, .. }) => fp8_can_vectorize(w, cols),
            Self::Fp8Fnuz(Fp8Weight { w, .. }) => fp8_can_vectorize(w, cols),
            Self::Mxfp4(Mxfp4Weight { w, scales, .. }) => {
                w.rows_aligned(16) && is_near(w, OUTPUTS) && is_near(scales, OUTPUTS)
            }
        }
    }

    /// Weights and scales, which no output may share memory with.
    fn operands(&self) -> [NamedOperand<'_>; 3] {
        match self {
            Self::Same(w) => [("w", Some(w)), ("w_scale", None), ("y_scale", None)],
            Self::Fp8(Fp8Weight { w, scale, .. }) => {
                [("w", Some(w)), ("w_scale", Some(scale)), ("y_scale", None)]
            }
            Self::Fp8Fnuz(Fp8Weight { w, scale, .. }) => {
                [("w", Some(w)), ("w_scale", Some(scale)), ("y_scale", None)]
            }
            Self::Mxfp4(Mxfp4Weight { w, scales, y_scale }) => {
                [("w", Some(w)), ("w_scales", Some(scales)), ("y_scale", optional(y_scale))]
            }
        }
    }

    fn inputs(&self, launch: &mut Launch<'a>) -> Result<Operands> {
        let none = Operands {
            w: GlobalLayout::ABSENT,
            w_scales: GlobalLayout::ABSENT,
            w_scale: 0,
            y_scale: 0,
            group: 0,
        };
        Ok(match self {
            Self::Same(w) => Operands { w: launch.input("w", w)?, ..none },
            Self::Fp8(Fp8Weight { w, scale, group }) => Operands {
                w: launch.input("w", w)?,
                w_scale: launch.input("w_scale", scale)?.data(),
                group: *group,
                ..none
            },
            Self::Fp8Fnuz(Fp8Weight { w, scale, group }) => Operands {
                w: launch.input("w", w)?,
                w_scale: launch.input("w_scale", scale)?.data(),
                group: *group,
                ..none
            },
            Self::Mxfp4(Mxfp4Weight { w, scales, y_scale }) => Operands {
                w: launch.input("w", w)?,
                w_scales: launch.input("w_scales", scales)?,
                y_scale: launch.optional_input("y_scale", y_scale.as_ref())?.data(),
                ..none
            },
        })
    }
}

/// Weights and their scales as the kernel takes them.
struct Operands {
    w: GlobalLayout,
    w_scales: GlobalLayout,
    /// Addresses; 0: none.
    w_scale: u64,
    y_scale: u64,
    /// Columns of an fp8 group.
    group: usize,
}

/// Whether so many rows of a tensor of three axes are within [`WINDOW`].
fn is_near<E: Element>(view: &TensorView<E>, rows: usize) -> bool {
    let (cols, stride) = (view.shape()[2], view.strides()[1]);
    let elements = stride.saturating_mul(rows.min(view.shape()[1]).saturating_sub(1)).saturating_add(cols);
    elements.saturating_mul(size_of::<E>()) < WINDOW
}

fn fp8_can_vectorize<F: Element>(w: &TensorView<F>, cols: usize) -> bool {
    w.rows_aligned(16) && cols.is_multiple_of(16) && is_near(w, OUTPUTS)
}

fn check_fp8(scale: &TensorView<f32>, group: usize) -> Result<()> {
    if !group.is_power_of_two() || group < STEP {
        return Err(Error::argument(OP, "group", group, format!("a power of two from {STEP} columns on")));
    }
    check_scale(OP, "w_scale", Some(scale))
}

/// Multiplies the queries without position by the weights absorbed into the latent cache, rotates and joins columns, and writes
/// keys to their slots of the cache: `q_out = [q_nope w^T, rope(q_pe)]` for each head, `k_pe_out = rope(k_pe)`,
/// `kv_cache[slot] = cast([k_nope, rope(k_pe)] / k_scale)`.
///
/// With the columns `a` and `b` of a pair ([`RopeStyle`](hk_core::plan::rope::RopeStyle)): `rope(x)_a = x_a cos_a - x_b sin_a`,
/// `rope(x)_b = x_b cos_b + x_a sin_b`.
///
/// | arg                    | shape                                       | dtype                                | layout                                           |
/// |------------------------|---------------------------------------------|--------------------------------------|--------------------------------------------------|
/// | `q_nope`               | `[q_heads, tokens, cols]`                   | `bf16`, `f16`                        | unit stride on the last axis, other strides free |
/// | `w`                    | `[q_heads, nope, cols]`, see [`MlaWeight`]  | as `q_nope`, fp8 of the device, mxfp4 | unit stride on the last axis, other strides free |
/// | `q_pe`                 | `[tokens, q_heads, pe]`                     | as `q_nope`                          | unit stride on the last axis, other strides free |
/// | `k_nope`               | `[all, kv_heads, nope]`                     | as `q_nope`                          | unit stride on the last axis, other strides free |
/// | `k_pe`                 | `[all, kv_heads, pe]`                       | as `q_nope`                          | unit stride on the last axis, other strides free |
/// | `cos`, `sin`           | `[positions, rotary / 2]` or `[.., rotary]` | as `q_nope`, or `f32`                | unit stride on the columns                       |
/// | `positions`, `offsets` | `[tokens]`; optional                        | `i32`, `i64`                         | any stride                                       |
/// | `slot_mapping`         | `[n]`, `tokens <= n <= all`                 | `i32`, `i64`                         | any stride                                       |
/// | `k_scale`              | `[1]` or `[]`; optional                     | `f32`                                |                                                  |
/// | `q_out`                | `[tokens, q_heads, nope + pe]`              | as `q_nope`, fp8 e4m3 of either kind | unit stride on the last axis, other strides free |
/// | `k_pe_out`             | `[all, kv_heads, pe]`                       | as `q_nope`                          | unit stride on the last axis, other strides free |
/// | `kv_cache`             | `[slots, kv_heads, nope + pe]`              | as `q_nope`, fp8 e4m3 of either kind | unit stride on the last axis, other strides free |
/// | `q_pe_head`            | `[head_tokens, q_heads, pe]`; optional      | as `q_nope`                          | unit stride on the last axis, other strides free |
/// | `nope_zeros`           | `[head_tokens, q_heads, nope]`; optional    | as `q_nope`                          | unit stride on the last axis, other strides free |
///
/// `q_heads` is a multiple of `kv_heads`. `q_pe_head` is `rope(q_pe)` of the first tokens, and `nope_zeros` is filled with zeros.
/// All but the GEMM is bitwise identical to [`rope_cat_and_cache_mla`](crate::rope_cat_and_cache_mla()).
///
/// The GEMM accumulates in `f32` in the order of the columns, fp8 groups one after the other, and rounds once, to the type of
/// `q_out`; fp4 and fp8 enter exactly.
///
/// Tokens from the `tokens`-th to the `n`-th are rotated already: their keys are copied bit by bit to `k_pe_out`, and cached
/// as the others. `k_pe_out` is not written from the `n`-th token on.
///
/// Slots and positions are checked on the device. A slot that is negative or beyond the cache is skipped; `q_out` and
/// `k_pe_out` are written all the same. If two tokens have one slot, each element of it comes from either. A token whose
/// position plus offset is no row of the tables gives NaN in all of `q_out` and `k_pe_out` and is not cached.
///
/// `f32` arithmetic. Rotated keys are not rounded before the cache. A scale enters as its reciprocal, rounded once. Conversion
/// to fp8 saturates, rounds to nearest even and keeps NaN. A signalling NaN that is rotated, scaled, or beside rotated columns
/// of its head becomes quiet. Results are batch-invariant: they depend on their token alone.
///
/// `k_pe_out` may be exactly `k_pe`; otherwise tensors that are written share no memory with another.
///
/// Returns when the two launches are queued, before they have run.
///
/// # Errors
/// [`Error::Shape`], [`Error::Stride`],
/// [`Error::Align`] if an argument breaks the table; [`Error::Empty`] for columns
/// of length zero; [`Error::Unsupported`] for weights in the fp8 that the device's matrix cores do not take; [`Error::Argument`] for an odd [`Rope::rotary`], or an
/// fp8 group that is no power of two from 64 on;
/// [`Error::Overlap`] for outputs that share memory otherwise than stated;
/// [`Error::TooLarge`] beyond 2^32 slots, 2^31 tokens or 2^30 `cols`;
/// [`Error::DeviceMismatch`], and the errors of loading and launching a kernel. Nothing is
/// written then.
///
/// Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.2 (absorbing the projection of keys into that of queries).
pub fn fused_bmm_rope_kv_cache<
    'a,
    T: HeadElement,
    R: RopeElement<T>,
    Q: CacheElement<T>,
    C: CacheElement<T>,
>(
    stream: &Stream,
    inputs: MlaInputs<'a, T, R>,
    w: MlaWeight<'a, T>,
    outputs: MlaOutputs<'a, T, Q, C>,
    rope: Rope,
) -> Result<()> {
    let (q_nope, slot_mapping, tables) =
        (inputs.q_nope, inputs.slot_mapping, RopeSource::from(inputs.tables));
    let call = Call::new(inputs, rope);
    let [weights, scales, y_scale] = w.operands();
    let sizes = call.check(OP, &outputs, &[("q_nope", Some(&q_nope)), weights, scales, y_scale])?;
    let Sizes { tokens, q_heads, nope, .. } = sizes;
    let [_, _, cols] = q_nope.dims(OP, "q_nope")?;
    q_nope.check(OP, "q_nope", &[q_heads, tokens, cols], "heads and tokens of q_pe")?;
    if cols == 0 {
        return Err(Error::empty(OP, "q_nope", 2, q_nope.shape()));
    }
    w.check(stream, [q_heads, nope, cols])?;
    let limit = 1 << 30;
    if cols > limit {
        return Err(Error::too_large(OP, "q_nope", format!("{cols} columns"), limit as u64));
    }

    // Both launches are prepared before either is queued: after an error nothing is written.
    let mut rest = call.prepare(OP, stream, sizes, None, outputs)?;
    if tokens > 0 && q_heads > 0 {
        let (q_nope_out, nope_zeros) = (&mut rest.q_nope_out, &mut rest.nope_zeros);
        let vectors = w.can_vectorize(cols)
            && q_nope.can_vectorize()
            && is_near(&q_nope, MANY)
            && cols.is_multiple_of(PART)
            && nope.is_multiple_of(PART)
            && q_nope_out.can_vectorize()
            && nope_zeros.as_ref().is_none_or(|t| t.can_vectorize());
        let info = stream.device().info();
        let blocks = info.max_blocks(64, BLOCKS_PER_CU);
        let n_tiles = nope.div_ceil(OUTPUTS);
        // Many tokens per block read weights fewer times, unless that leaves CUs idle.
        let many = tokens > FEW && q_heads * n_tiles * tokens.div_ceil(MANY) >= info.compute_units as usize;
        let (kernel, tokens_of_block) = match (vectors, many) {
            (true, false) => (0, FEW),
            (true, true) => (1, MANY),
            (false, _) => (2, FEW),
        };
        let m_tiles = tokens.div_ceil(tokens_of_block);
        let tasks = m_tiles as u64 * n_tiles as u64 * q_heads as u64;
        let limit = (1 << 31) - blocks as u64;
        if tasks > limit {
            return Err(Error::too_large(OP, "q_nope", format!("work for {tasks} blocks"), limit));
        }
        let kernel = stream.kernel(w.form()[usize::from(T::DTYPE == DType::F16)][kernel])?;
        let mut launch = stream.launch(OP);
        let Operands { w, w_scales, w_scale, y_scale, group } = w.inputs(&mut launch)?;
        let places = Tokens { rotated: tokens, cached: 0, blocks: 0, block: 1 };
        let zeros = match nope_zeros {
            Some(zeros) => Target::zeros(&launch.output("nope_zeros", zeros)?),
            None => Target::NONE,
        };
        let params = Params {
            common: places.common(&mut launch, &rope, &tables, &slot_mapping)?,
            q: launch.input("q_nope", &q_nope)?,
            w,
            w_scales,
            out: Target::output::<Q>(&launch.output("q_out", q_nope_out)?),
            zeros,
            w_scale,
            y_scale,
            group: group.min(cols.next_multiple_of(STEP)) as u32,
            m_tiles: m_tiles as u32,
            n_tiles: n_tiles as u32,
            tasks: tasks as u32,
            rule: BlockRule::fp4(BlockScale::Even, 0),
            pad: 0,
        };
        let config = LaunchConfig::grid_1d((tasks as usize).min(blocks));
        // SAFETY: the checks make queries, weights and outputs as long as their heads, tokens, outputs and columns, which
        // the tiles cover; the kernel checks positions.
        unsafe { launch.run(&kernel, config, &params)? };
    }
    rest.run()
}
