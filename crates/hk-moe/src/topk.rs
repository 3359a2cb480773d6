//! The safe function of `hip/topk.hip`.

use crate::args::{MOST_GATES, Vector, check_choices, check_experts};
use crate::kernels::route::Topk;
use bytemuck::Zeroable;
use hk_core::plan::rows::float_index;
use hk_core::{
    DType, DeviceInfo, Error, Float, KernelRef, Launch, LaunchConfig, Result, Stream, TensorView,
    TensorViewMut, check_aliases, row_kernels,
};

/// The entry points of each dtype, by the experts that they serve.
static KERNELS: [[KernelRef<Topk>; 2]; 3] =
    row_kernels!(Topk, "topk", ["bf16", "f16", "f32"], ["256", "1024"]);

/// Experts of the kernels, and of those in groups at most.
pub(crate) const FEW_EXPERTS: usize = 256;
const EXPERTS: [usize; 2] = [FEW_EXPERTS, 1024];
/// Groups at most: a wave has some lanes for each.
const MOST_GROUPS: usize = 16;
/// Waves of a block.
const WAVES: usize = 4;

// `TopkFlag` of the kernel.
const RENORMALIZE: u32 = 1;
const WEIGHTS_F32: u32 = 2;
const LOW_TIES: u32 = 4;
const BY_PREFERENCE: u32 = 8;
const VECTORIZED: u32 = 16;

/// What the scores of experts are made of logits by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scores {
    /// Nothing: weights are logits.
    Logits = 0,
    /// Experts are chosen by logits, and weights are the softmax over those of the chosen.
    #[default]
    SoftmaxChosen = 1,
    /// The softmax over all experts. They are chosen by logits, whose order it keeps.
    Softmax = 2,
    /// The sigmoid, in `f32`.
    Sigmoid = 3,
    /// `sqrt(ln(1 + exp(x)))`, in `f32`.
    SqrtSoftplus = 4,
}

/// Which of two experts of equal scores comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ties {
    /// That of the higher index.
    #[default]
    HighIndex,
    /// That of the lower index.
    LowIndex,
}

/// The order of a token's experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SlotOrder {
    /// Ascending.
    #[default]
    ByExpert,
    /// The first choice first.
    ByPreference,
}

/// Experts in groups of equal size, one after the other; those of the best groups are chosen from. A group is as good as its best
/// expert, or with a bias, as the sum of its two best biased scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// Groups, up to 16.
    pub groups: usize,
    /// Groups that are chosen from.
    pub kept: usize,
}

/// How experts are chosen and weighted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TopkOptions {
    /// Scores.
    pub scores: Scores,
    /// Divides the weights of a token by their sum, plus 1e-20.
    pub renormalize: bool,
    /// Multiplies the weights.
    pub scaling: f32,
    /// Which of equals is chosen.
    pub ties: Ties,
    /// Order of a token's experts.
    pub order: SlotOrder,
    /// Groups of experts, up to 256 experts.
    pub groups: Option<Groups>,
}

impl Default for TopkOptions {
    fn default() -> Self {
        Self {
            scores: Scores::default(),
            renormalize: false,
            scaling: 1.0,
            ties: Ties::default(),
            order: SlotOrder::default(),
            groups: None,
        }
    }
}

impl TopkOptions {
    /// As DeepSeek-V3 routes: sigmoid, 4 of 8 groups, weights with a sum of 2.5.
    pub fn deepseek_v3() -> Self {
        Self {
            scores: Scores::Sigmoid,
            renormalize: true,
            scaling: 2.5,
            ties: Ties::LowIndex,
            order: SlotOrder::ByPreference,
            groups: Some(Groups { groups: 8, kept: 4 }),
        }
    }
}

/// What [`moe_topk`] writes.
#[derive(Debug)]
pub struct Choices<'a, W: Float> {
    /// `[T, k]`: weights, as the logits or `f32`.
    pub weights: TensorViewMut<'a, W>,
    /// `[T, k]`: experts.
    pub ids: TensorViewMut<'a, i32>,
    /// [`moe_bitmatrix_shape`]: bit `e % 32` of word `[e / 32, t]` is set if token `t` has expert `e`.
    pub bitmatrix: Option<TensorViewMut<'a, i32>>,
}

/// Shape of the bits of tokens' experts: words, for experts rounded up to 128, by tokens, rounded up to 32.
pub fn moe_bitmatrix_shape(tokens: usize, experts: usize) -> [usize; 2] {
    [experts.div_ceil(128) * 4, tokens.div_ceil(32) * 32]
}

/// The `k` experts of each token by their scores, and their weights.
///
/// | arg             | shape                   | dtype                 | layout                                      |
/// |-----------------|-------------------------|-----------------------|---------------------------------------------|
/// | `logits`        | `[T, E]`                | `bf16`, `f16`, `f32`  | unit stride on `E`, any row stride          |
/// | `bias`          | `[E]`                   | `f32`                 | optional, contiguous                        |
/// | `out.weights`   | `[T, k]`                | as `logits`, or `f32` | contiguous                                  |
/// | `out.ids`       | `[T, k]`                | `i32`                 | contiguous                                  |
/// | `out.bitmatrix` | [`moe_bitmatrix_shape`] | `i32`                 | optional, contiguous; zero where nothing is |
///
/// Experts are ordered by [`Scores`], of sigmoids and square roots plus `bias`. The order is total: negative NaNs, -Inf, .., -0, +0, ..,
/// +Inf, positive NaNs; of equals by [`Ties`]. A NaN logit has itself as score. A token's experts are in the order of
/// [`SlotOrder`], and their weights are made of scores without bias: `w = v / (sum of the token's v + 1e-20) scaling`, or without
/// `renormalize` `w = v scaling`; computed in `f32`, then rounded to nearest even. Groups: see [`Groups`], whose order and ties are
/// those of experts. A choice depends on its token alone.
///
/// One launch. No output may alias another tensor. Returns when it is queued. No tokens: nothing is launched.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align), [`DType`](Error::DType) if a tensor breaks the table,
/// [`Argument`](Error::Argument) for more than 1024 experts, `k` outside `1..=32` or above `E`, a bias of scores that are logits or
/// softmax, a scaling that is not finite, or groups that are more than 16, are of more than 256 experts, do not divide them, or have
/// fewer than `k` experts in those that are kept, [`TooLarge`](Error::TooLarge) beyond 2^30 gates, [`Overlap`](Error::Overlap) if an
/// output shares memory with another tensor, [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a
/// kernel. Nothing is written then.
///
/// Source of the grouped choice: DeepSeek-V3 technical report (2024), section 2.1.2.
pub fn moe_topk<T: Float, W: Float>(
    stream: &Stream,
    logits: TensorView<T>,
    bias: Option<TensorView<f32>>,
    out: Choices<W>,
    options: &TopkOptions,
) -> Result<()> {
    const OP: &str = "moe_topk";
    let Choices { mut weights, mut ids, mut bitmatrix } = out;
    let [_, k] = ids.dims(OP, "ids")?;
    let problem = TopkProblem::new(OP, &logits, bias.as_ref(), k, options)?;
    let (tokens, experts) = (problem.tokens, problem.experts);
    ids.expect_shape(OP, "ids", [tokens, k])?;
    ids.expect_packed(OP, "ids")?;
    weights.expect_shape(OP, "weights", [tokens, k])?;
    weights.expect_packed(OP, "weights")?;
    check_weights::<T, W>(OP, "weights")?;
    let [words, rows] = moe_bitmatrix_shape(tokens, experts);
    if let Some(bits) = &bitmatrix {
        bits.expect_shape(OP, "bitmatrix", [words, rows])?;
        bits.expect_packed(OP, "bitmatrix")?;
    }
    check_aliases(
        OP,
        &[("logits", Some(&logits)), ("bias", bias.as_ref().map(|b| b as _))],
        &[
            (("weights", Some(&weights)), &[]),
            (("ids", Some(&ids)), &[]),
            (("bitmatrix", bitmatrix.as_ref().map(|b| b as _)), &[]),
        ],
    )?;
    if tokens == 0 {
        return Ok(());
    }
    let kernel = stream.kernel(KERNELS[float_index(T::DTYPE)][problem.kernel()])?;
    let mut launch = stream.launch(OP);
    let mut params = problem.params::<T, W>(&mut launch, stream.device().info(), &logits, bias.as_ref())?;
    params.weights = launch.output_address("weights", &mut weights)?;
    params.ids = launch.output_address("ids", &mut ids)?;
    let mut waves = tokens;
    if let Some(bits) = &mut bitmatrix {
        params.bitmatrix = launch.output_address("bitmatrix", bits)?;
        (params.words, params.bitmatrix_rows) = (words as u32, rows as u32);
        waves = rows;
    }
    // SAFETY: the checks above make each tensor as large as the kernel takes it to be, from the counts of tokens, experts and k.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(waves.div_ceil(WAVES)), &params) }
}

/// Checks the type of weights.
pub(crate) fn check_weights<T: Float, W: Float>(op: &'static str, arg: &'static str) -> Result<()> {
    if W::DTYPE == T::DTYPE || W::DTYPE == DType::F32 {
        return Ok(());
    }
    Err(Error::dtype(op, arg, W::DTYPE, format!("f32, or {} as the logits", T::DTYPE)))
}

/// Checks what does not depend on tensors but their sizes.
pub(crate) fn check_options(
    op: &'static str,
    experts: usize,
    k: usize,
    biased: bool,
    options: &TopkOptions,
) -> Result<()> {
    check_experts(op, "logits", experts)?;
    check_choices(op, "k", k, experts)?;
    if biased && !matches!(options.scores, Scores::Sigmoid | Scores::SqrtSoftplus) {
        let got = format!("given, with {:?}", options.scores);
        return Err(Error::argument(op, "bias", got, "Sigmoid or SqrtSoftplus"));
    }
    if !options.scaling.is_finite() {
        return Err(Error::argument(op, "scaling", options.scaling, "a finite number"));
    }
    let Some(Groups { groups, kept }) = options.groups else { return Ok(()) };
    if experts > FEW_EXPERTS {
        let want = format!("at most {FEW_EXPERTS} with groups");
        return Err(Error::argument(op, "logits", format!("{experts} experts"), want));
    }
    if !(1..=MOST_GROUPS).contains(&groups) || !experts.is_multiple_of(groups) {
        let want = format!("1 to {MOST_GROUPS}, a divisor of the {experts} experts");
        return Err(Error::argument(op, "groups", groups, want));
    }
    let size = experts / groups;
    let fewest = k.div_ceil(size);
    if !(fewest..=groups).contains(&kept) {
        let want = format!("{fewest} to {groups}, for {k} experts from groups of {size}");
        return Err(Error::argument(op, "kept_groups", kept, want));
    }
    Ok(())
}

/// A choice of experts whose arguments are right.
pub(crate) struct TopkProblem {
    pub tokens: usize,
    pub experts: usize,
    k: usize,
    options: TopkOptions,
}

impl TopkProblem {
    pub fn new<T: Float>(
        op: &'static str,
        logits: &TensorView<T>,
        bias: Option<&TensorView<f32>>,
        k: usize,
        options: &TopkOptions,
    ) -> Result<Self> {
        let [tokens, experts] = logits.dims(op, "logits")?;
        check_options(op, experts, k, bias.is_some(), options)?;
        if tokens.saturating_mul(k) > MOST_GATES {
            let what = format!("{tokens} tokens of {k} gates");
            return Err(Error::too_large(op, "logits", what, MOST_GATES as u64));
        }
        logits.expect_unit_stride(op, "logits")?;
        logits.expect_aligned(op, "logits", size_of::<T>() as u64)?;
        if let Some(bias) = bias {
            bias.expect_vector(op, "bias", experts, "experts")?;
        }
        Ok(Self { tokens, experts, k, options: *options })
    }

    /// The place of the kernel in a table of [`EXPERTS`].
    pub fn kernel(&self) -> usize {
        usize::from(self.experts > FEW_EXPERTS)
    }

    /// The parameters, without outputs.
    pub fn params<'a, T: Float, W: Float>(
        &self,
        launch: &mut Launch<'a>,
        info: &DeviceInfo,
        logits: &TensorView<'a, T>,
        bias: Option<&TensorView<'a, f32>>,
    ) -> Result<Topk> {
        let options = &self.options;
        let each = EXPERTS[self.kernel()] / info.wave_size as usize;
        let aligned = |bytes: usize| bytes.min(16) as u64;
        let vectorized = self.experts.is_multiple_of(each)
            && logits.rows_aligned(aligned(each * size_of::<T>()))
            && bias.is_none_or(|bias| bias.is_aligned(aligned(4 * each)));
        let flags = [
            (options.renormalize, RENORMALIZE),
            (W::DTYPE == DType::F32, WEIGHTS_F32),
            (options.ties == Ties::LowIndex, LOW_TIES),
            (options.order == SlotOrder::ByPreference, BY_PREFERENCE),
            (vectorized, VECTORIZED),
        ];
        let size = options.groups.map_or(0, |g| self.experts / g.groups);
        Ok(Topk {
            x: launch.input("logits", logits)?,
            bias: bias.map_or(Ok(0), |bias| launch.input_address("bias", bias))?,
            scaling: options.scaling,
            tokens: self.tokens as u32,
            k: self.k as u32,
            experts: self.experts as u32,
            scores: options.scores as u32,
            flags: flags.iter().filter(|(set, _)| *set).map(|(_, flag)| flag).sum(),
            groups: options.groups.map_or(0, |g| g.groups as u32),
            kept_groups: options.groups.map_or(0, |g| g.kept as u32),
            group_size: size as u32,
            group_inverse: if size == 0 { 0 } else { (1u32 << 16).div_ceil(size as u32) },
            ..Topk::zeroed()
        })
    }
}
