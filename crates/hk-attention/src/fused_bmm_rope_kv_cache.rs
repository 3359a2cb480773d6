//! The product of queries with absorbed weights, rotation, concatenation and caching of multi-head latent attention.

use crate::cache::{
    Activation, CacheElement, Common, Heads as _, PART, Target, Tokens, check_scale, optional,
};
use crate::kernels;
use crate::mla::{Inputs, MlaOutputs, Sizes};
use bytemuck::{Pod, Zeroable};
use hk_core::quant::{BlockRule, BlockScale};
use hk_core::rope::{Rope, RopeElement, RopeTables};
use hk_core::{
    Arch, DType, E8M0, Element, Error, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz, GlobalLayout, IndexView, Launch,
    LaunchConfig, NamedOperand, Result, Stream, TensorView,
};

const OP: &str = "fused_bmm_rope_kv_cache";

/// The weights of [`fused_bmm_rope_kv_cache`], `[q_heads, nope, cols]` with unit stride on `cols` and all others free, and how
/// the queries meet them.
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

/// Weights in fp8. Queries are quantized to the same fp8, with a scale `s = max(max |q|, 1e-10) / largest` for each token,
/// head and group of columns, which multiplies the sum over the group.
#[derive(Debug, Clone, Copy)]
pub struct Fp8Weight<'a, F: Element> {
    /// The codes.
    pub w: TensorView<'a, F>,
    /// What they are multiplied by: one number, on the device.
    pub scale: TensorView<'a, f32>,
    /// Columns of a group: 64 or a larger power of two; the last group may be shorter. 128 is usual.
    pub group: usize,
}

/// Weights in mxfp4: fp4 e2m1 with a power-of-two scale for each 32 columns. Queries are quantized alike, with scales by
/// [`BlockScale::Even`]; a block with a value that is not finite is NaN. gfx950 multiplies the codes; elsewhere both operands
/// are widened to `bf16`, which holds their values, scales included, exactly.
#[derive(Debug, Clone, Copy)]
pub struct Mxfp4Weight<'a> {
    /// The codes, two columns a byte: `[q_heads, nope, cols / 2]`, unit stride on the last axis.
    pub w: TensorView<'a, Fp4x2>,
    /// The scales: `[q_heads, nope, cols / 32]`, unit stride on the last axis.
    pub scales: TensorView<'a, E8M0>,
    /// What the product is divided by before it is rounded: one number, on the device. For a product that goes on in fp8.
    pub y_scale: Option<TensorView<'a, f32>>,
}

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    common: Common,
    q: GlobalLayout,
    w: GlobalLayout,
    w_scales: GlobalLayout,
    out: Target,
    zeros: Target,
    w_scale: u64,
    y_scale: u64,
    group: u32,
    m_tiles: u32,
    n_tiles: u32,
    tasks: u32,
    rule: BlockRule,
    pad: u32,
}

/// The entry points of `hip/mla_bmm.hip` for one form of weights: of bf16 and f16, for few tokens, for many, by elements.
type Form = [[&'static str; 3]; 2];

macro_rules! form {
    ($name:literal) => {
        [form!(@ "bf16", $name), form!(@ "f16", $name)]
    };
    (@ $dtype:literal, $name:literal) => {
        [
            concat!("mla_bmm_", $dtype, "_", $name, "_16"),
            concat!("mla_bmm_", $dtype, "_", $name, "_64"),
            concat!("mla_bmm_", $dtype, "_", $name, "_16_elements"),
        ]
    };
}

static SAME: Form = form!("same");
static FP8: Form = form!("fp8");
static MXFP4: Form = form!("mxfp4");

/// Tokens of a block, if they are few and if they are many.
const FEW: usize = 16;
const MANY: usize = 64;
/// Outputs of a wave: `16 * kTiles`.
const OUTPUTS: usize = 64;
/// Columns that a wave takes at a time: `kStep`.
const STEP: usize = 64;
/// Blocks a CU that keep memory busy.
const BLOCKS_PER_CU: usize = 16;
/// Bytes that the rows of a block are within, by vectors.
const WINDOW: usize = 1 << 31;

impl<'a, T: Activation> MlaWeight<'a, T> {
    fn form(&self) -> &'static Form {
        match self {
            Self::Same(_) => &SAME,
            Self::Fp8(_) | Self::Fp8Fnuz(_) => &FP8,
            Self::Mxfp4(_) => &MXFP4,
        }
    }

    /// Checks shapes, strides and options, and that the device has products of this form.
    fn check(&self, stream: &Stream, [heads, nope, cols]: [usize; 3]) -> Result<()> {
        const WHY: &str = "heads, columns of k_nope, columns of q_nope";
        let arch = stream.device().info().arch;
        let native = |what: DType, served: bool| {
            let reason = "products take fp8e4m3fnuz on gfx942, fp8e4m3 elsewhere";
            if served {
                Ok(())
            } else {
                Err(Error::unsupported(OP, format!("{what} weights on {arch}"), reason))
            }
        };
        match self {
            Self::Same(w) => w.check(OP, "w", &[heads, nope, cols], WHY),
            Self::Fp8(Fp8Weight { w, scale, group }) => {
                w.check(OP, "w", &[heads, nope, cols], WHY)?;
                check_fp8(scale, *group)?;
                native(DType::Fp8E4M3, arch != Arch::Gfx942)
            }
            Self::Fp8Fnuz(Fp8Weight { w, scale, group }) => {
                w.check(OP, "w", &[heads, nope, cols], WHY)?;
                check_fp8(scale, *group)?;
                native(DType::Fp8E4M3Fnuz, arch == Arch::Gfx942)
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

    /// Whether rows begin on 16 bytes, are as long as kernels by vectors need, and as near to each other.
    fn by_vectors(&self, cols: usize) -> bool {
        match self {
            Self::Same(w) => w.rows_aligned(16) && cols.is_multiple_of(8) && is_near(w, OUTPUTS),
            Self::Fp8(Fp8Weight { w, .. }) => fp8_by_vectors(w, cols),
            Self::Fp8Fnuz(Fp8Weight { w, .. }) => fp8_by_vectors(w, cols),
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

fn fp8_by_vectors<F: Element>(w: &TensorView<F>, cols: usize) -> bool {
    w.rows_aligned(16) && cols.is_multiple_of(16) && is_near(w, OUTPUTS)
}

fn check_fp8(scale: &TensorView<f32>, group: usize) -> Result<()> {
    if !group.is_power_of_two() || group < STEP {
        return Err(Error::argument(OP, "group", group, format!("a power of two from {STEP} columns on")));
    }
    check_scale(OP, "w_scale", Some(scale))
}

/// Multiplies the part of the queries that has no position with the weights that the latent cache absorbs, and does what
/// [`rope_cat_and_cache_mla`](crate::rope_cat_and_cache_mla()) does with the result: `q_nope_out = q_nope w^T` for each head,
/// `q_out = [q_nope_out, rope(q_pe)]`, `kv_cache[slot] = cast([k_nope, rope(k_pe)] / k_scale)`.
///
/// | arg      | shape                       | dtype          | layout                                  |
/// |----------|-----------------------------|----------------|-----------------------------------------|
/// | `q_nope` | `[q_heads, tokens, cols]`   | `bf16`, `f16`  | unit stride on `cols`, all others free  |
/// | `w`      | `[q_heads, nope, cols]`, see [`MlaWeight`] | as `q_nope`, the fp8 of the device, mxfp4 | as `q_nope` |
///
/// `nope` is the number of columns of `k_nope`; all other arguments are those of `rope_cat_and_cache_mla`, and what it writes
/// besides the product has the same bits.
///
/// Any number of tokens, heads, outputs and columns. Products are summed in `f32` in the order of the columns, groups of fp8
/// after each other, and rounded once, to the type of `q_out`; fp4 and fp8 enter exactly. The bits of a token's row depend on
/// that row and the weights alone.
///
/// Returns when the two launches are queued, before they have run.
///
/// # Errors
/// As `rope_cat_and_cache_mla`; [`Error::Unsupported`] for weights in the fp8 that the device's products do not take,
/// [`Error::Argument`] for groups of fp8 that are no power of two from 64 on, [`Error::Empty`] for `cols` of length zero,
/// [`Error::TooLarge`] for more than 2^30 of them.
///
/// Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.2 (absorbing the projection of keys in that of queries).
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn fused_bmm_rope_kv_cache<
    'a,
    T: Activation,
    R: RopeElement<T>,
    Q: CacheElement<T>,
    C: CacheElement<T>,
>(
    stream: &Stream,
    q_nope: TensorView<'a, T>,
    w: MlaWeight<'a, T>,
    q_pe: TensorView<'a, T>,
    k_nope: TensorView<'a, T>,
    k_pe: TensorView<'a, T>,
    tables: RopeTables<'a, R>,
    slot_mapping: impl Into<IndexView<'a>>,
    k_scale: Option<TensorView<'a, f32>>,
    mut outputs: MlaOutputs<'a, T, Q, C>,
    rope: Rope,
) -> Result<()> {
    let slot_mapping = slot_mapping.into();
    let inputs = Inputs { q_pe, k_nope, k_pe, tables: tables.into(), slot_mapping, k_scale, rope };
    let [weights, scales, y_scale] = w.operands();
    let sizes = inputs.check(OP, &outputs, &[("q_nope", Some(&q_nope)), weights, scales, y_scale])?;
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

    if tokens > 0 && q_heads > 0 {
        let mut product = outputs.q_out.reborrow().slice(2, 0..nope)?;
        let vectors = w.by_vectors(cols)
            && q_nope.by_vectors()
            && is_near(&q_nope, MANY)
            && cols.is_multiple_of(PART)
            && nope.is_multiple_of(PART)
            && product.by_vectors()
            && outputs.nope_zeros.as_ref().is_none_or(|t| t.by_vectors());
        let info = stream.device().info();
        let blocks = info.most_blocks(64, BLOCKS_PER_CU);
        let n_tiles = nope.div_ceil(OUTPUTS);
        // Many tokens a block read weights fewer times; not if that leaves the device idle.
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
        let names = &w.form()[usize::from(T::DTYPE == DType::F16)];
        let kernel = stream.kernel(&kernels::MLA_BMM, names[kernel])?;
        let mut launch = stream.launch(OP, &kernel);
        let Operands { w, w_scales, w_scale, y_scale, group } = w.inputs(&mut launch)?;
        let places = Tokens { rotated: tokens, cached: 0, blocks: 0, block: 1 };
        let zeros = match &mut outputs.nope_zeros {
            Some(zeros) => Target::zeros(&launch.output("nope_zeros", &mut zeros.reborrow())?),
            None => Target::NONE,
        };
        let params = Params {
            common: places.common(&mut launch, &rope, &inputs.tables, &inputs.slot_mapping)?,
            q: launch.input("q_nope", &q_nope)?,
            w,
            w_scales,
            out: Target::output::<Q>(&launch.output("q_out", &mut product)?),
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
        // the tiles cover; the kernel checks positions, and the loader its parameters.
        unsafe { launch.run(config, &params)? };
    }
    inputs.run(OP, stream, sizes, None, outputs)
}
