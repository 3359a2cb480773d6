//! The product of queries with absorbed weights, rotation, concatenation and caching of multi-head latent attention.

use crate::cache::{Activation, CacheElement, Common, Heads as _, PART, Target, Tokens};
use crate::kernels;
use crate::mla::{Inputs, MlaOutputs, Sizes};
use bytemuck::{Pod, Zeroable};
use hk_core::quant::{BlockRule, BlockScale};
use hk_core::rope::{Rope, RopeElement, RopeTables};
use hk_core::{
    Aliasing, Arch, DType, E8M0, Element, Error, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz, GlobalLayout, IndexView,
    Launch, LaunchConfig, Result, Stream, TensorView, check_overlap,
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
    /// In pairs of fp4, `[q_heads, nope, cols / 2]`, with a scale for each 32 columns, `[q_heads, nope, cols / 32]`, both with
    /// unit stride on the last axis. Queries are quantized alike, with scales by [`BlockScale::Even`]. gfx950 only.
    Mxfp4 {
        /// The codes.
        w: TensorView<'a, Fp4x2>,
        /// The scales.
        scales: TensorView<'a, E8M0>,
    },
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
    group: u32,
    m_tiles: u32,
    n_tiles: u32,
    tasks: u32,
    rule: BlockRule,
    pad: u32,
}

/// The entry points of `hip/mla_bmm.hip` for one form of weights: of bf16 and f16, for few tokens, for many, by elements; and
/// how many tokens a wave has, if they are many.
struct Form {
    kernels: [[&'static str; 3]; 2],
    wide: usize,
}

macro_rules! form {
    ($name:literal, $wide:literal) => {
        Form {
            kernels: [form!(@ "bf16", $name, $wide), form!(@ "f16", $name, $wide)],
            wide: $wide,
        }
    };
    (@ $dtype:literal, $name:literal, $wide:literal) => {
        [
            concat!("mla_bmm_", $dtype, "_", $name, "_16"),
            concat!("mla_bmm_", $dtype, "_", $name, "_", $wide),
            concat!("mla_bmm_", $dtype, "_", $name, "_16_elements"),
        ]
    };
}

static SAME: Form = form!("same", 64);
static FP8: Form = form!("fp8", 32);
static MXFP4: Form = form!("mxfp4", 32);

/// Outputs of a wave: `16 * kTiles`.
const OUTPUTS: usize = 64;
/// Columns that a wave takes at a time: `kStep`.
const STEP: usize = 64;
/// Waves a CU that keep memory busy.
const WAVES_PER_CU: usize = 16;

impl<'a, T: Activation> MlaWeight<'a, T> {
    fn form(&self) -> &'static Form {
        match self {
            Self::Same(_) => &SAME,
            Self::Fp8(_) | Self::Fp8Fnuz(_) => &FP8,
            Self::Mxfp4 { .. } => &MXFP4,
        }
    }

    /// Checks shapes, strides and options, and that the device has products of this form.
    fn check(&self, stream: &Stream, [heads, nope, cols]: [usize; 3]) -> Result<()> {
        const WHY: &str = "heads, columns of k_nope, columns of q_nope";
        let arch = stream.device().info().arch;
        let native = |what: DType, served: bool| {
            let reason = "products take fp8e4m3fnuz on gfx942, fp8e4m3 on gfx950, fp4 on gfx950";
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
            Self::Mxfp4 { w, scales } => {
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
                native(DType::Fp4x2, arch == Arch::Gfx950)
            }
        }
    }

    /// Whether rows begin on 16 bytes and are as long as kernels by vectors need.
    fn by_vectors(&self, cols: usize) -> bool {
        match self {
            Self::Same(w) => w.rows_aligned(16) && cols.is_multiple_of(8),
            Self::Fp8(Fp8Weight { w, .. }) => w.rows_aligned(16) && cols.is_multiple_of(16),
            Self::Fp8Fnuz(Fp8Weight { w, .. }) => w.rows_aligned(16) && cols.is_multiple_of(16),
            Self::Mxfp4 { w, .. } => w.rows_aligned(16),
        }
    }

    /// Checks that an output shares no memory with the weights.
    fn check_disjoint(&self, name: &'static str, out: &impl hk_core::Operand) -> Result<()> {
        let out = (name, out);
        let scaled = |scale: &TensorView<f32>| check_overlap(OP, ("w_scale", scale), out, Aliasing::Disjoint);
        match self {
            Self::Same(w) => check_overlap(OP, ("w", w), out, Aliasing::Disjoint),
            Self::Fp8(Fp8Weight { w, scale, .. }) => {
                scaled(scale)?;
                check_overlap(OP, ("w", w), out, Aliasing::Disjoint)
            }
            Self::Fp8Fnuz(Fp8Weight { w, scale, .. }) => {
                scaled(scale)?;
                check_overlap(OP, ("w", w), out, Aliasing::Disjoint)
            }
            Self::Mxfp4 { w, scales } => {
                check_overlap(OP, ("w_scales", scales), out, Aliasing::Disjoint)?;
                check_overlap(OP, ("w", w), out, Aliasing::Disjoint)
            }
        }
    }

    /// Weights, block scales, address of the scale, and columns of a group.
    fn params(&self, launch: &mut Launch<'a>) -> Result<(GlobalLayout, GlobalLayout, u64, usize)> {
        let absent = GlobalLayout::ABSENT;
        Ok(match self {
            Self::Same(w) => (launch.input("w", w)?, absent, 0, 0),
            Self::Fp8(Fp8Weight { w, scale, group }) => {
                (launch.input("w", w)?, absent, launch.input("w_scale", scale)?.data(), *group)
            }
            Self::Fp8Fnuz(Fp8Weight { w, scale, group }) => {
                (launch.input("w", w)?, absent, launch.input("w_scale", scale)?.data(), *group)
            }
            Self::Mxfp4 { w, scales } => (launch.input("w", w)?, launch.input("w_scales", scales)?, 0, 0),
        })
    }
}

fn check_fp8(scale: &TensorView<f32>, group: usize) -> Result<()> {
    if !group.is_power_of_two() || group < STEP {
        return Err(Error::argument(OP, "group", group, format!("a power of two from {STEP} columns on")));
    }
    crate::cache::check_scale(OP, "w_scale", Some(scale))
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
/// As `rope_cat_and_cache_mla`; [`Error::Unsupported`] for weights that the device's products do not take,
/// [`Error::Argument`] for groups of fp8 that are no power of two from 64 on, [`Error::Empty`] for `cols` of length zero.
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
    let sizes = inputs.check(OP, &outputs)?;
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
    check_overlap(OP, ("q_nope", &q_nope), ("q_out", &outputs.q_out), Aliasing::Disjoint)?;
    check_overlap(OP, ("q_nope", &q_nope), ("k_pe_out", &outputs.k_pe_out), Aliasing::Disjoint)?;
    check_overlap(OP, ("q_nope", &q_nope), ("kv_cache", &outputs.kv_cache), Aliasing::Disjoint)?;
    w.check_disjoint("q_out", &outputs.q_out)?;
    w.check_disjoint("k_pe_out", &outputs.k_pe_out)?;
    w.check_disjoint("kv_cache", &outputs.kv_cache)?;
    for (name, head) in [("q_pe_head", &outputs.q_pe_head), ("nope_zeros", &outputs.nope_zeros)] {
        let Some(head) = head else { continue };
        check_overlap(OP, ("q_nope", &q_nope), (name, head), Aliasing::Disjoint)?;
        w.check_disjoint(name, head)?;
    }

    if tokens > 0 && q_heads > 0 {
        let mut product = outputs.q_out.reborrow().slice(2, 0..nope)?;
        let vectors = w.by_vectors(cols)
            && q_nope.by_vectors()
            && cols.is_multiple_of(PART)
            && nope.is_multiple_of(PART)
            && product.by_vectors()
            && outputs.nope_zeros.as_ref().is_none_or(|t| t.by_vectors());
        let info = stream.device().info();
        let waves = info.compute_units as usize * WAVES_PER_CU;
        let form = w.form();
        let n_tiles = nope.div_ceil(OUTPUTS);
        // Many tokens a wave read weights fewer times; not if that leaves the device idle.
        let wide = vectors && q_heads * n_tiles * tokens.div_ceil(form.wide) >= info.compute_units as usize;
        let (kernel, tokens_of_wave) = match (vectors, wide && tokens > 16) {
            (true, true) => (1, form.wide),
            (true, false) => (0, 16),
            (false, _) => (2, 16),
        };
        let m_tiles = tokens.div_ceil(tokens_of_wave);
        let tasks = m_tiles as u64 * n_tiles as u64 * q_heads as u64;
        let limit = (1 << 31) - waves as u64;
        if tasks > limit {
            return Err(Error::too_large(OP, "q_nope", format!("work for {tasks} waves"), limit));
        }
        let names = &form.kernels[usize::from(T::DTYPE == DType::F16)];
        let kernel = stream.kernel(&kernels::MLA_BMM, names[kernel])?;
        let mut launch = stream.launch(OP, &kernel);
        let (w, w_scales, w_scale, group) = w.params(&mut launch)?;
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
            group: group.min(cols.next_multiple_of(STEP)) as u32,
            m_tiles: m_tiles as u32,
            n_tiles: n_tiles as u32,
            tasks: tasks as u32,
            rule: BlockRule::fp4(BlockScale::Even, 0),
            pad: 0,
        };
        let config = LaunchConfig::grid_1d((tasks as usize).min(waves));
        // SAFETY: the checks make queries, weights and outputs as long as their heads, tokens, outputs and columns, which
        // the tiles cover; the kernel checks positions, and the loader its parameters.
        unsafe { launch.run(config, &params)? };
    }
    inputs.run(OP, stream, sizes, None, outputs)
}
