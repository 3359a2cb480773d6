//! Types and layouts of KV caches, and the launch of `hip/kv_cache_rows.hip`.

use crate::kernels::cache::{Common, Target};
use crate::kernels::kv_cache_rows::{Append, Job, Params};
use bytemuck::Zeroable;
use hk_core::plan::rope::{Rope, RopeSource, RopeSpan};
use hk_core::{
    DType, Element, Error, Float, Fp8E4M3, Fp8E4M3Fnuz, GlobalLayout, IndexView, Kernel, KernelRef, Launch,
    LaunchConfig, Layout, Operand, Result, Stream, TensorView, TensorViewMut, bf16, f16,
};

/// Element type of queries, keys and values: `bf16` or `f16`.
pub trait HeadElement: Float {}

impl HeadElement for bf16 {}
impl HeadElement for f16 {}

/// Element type of a cache, or of rotated queries, for heads of type `T`: `T` itself or either fp8 e4m3 format.
pub trait CacheElement<T: HeadElement>: Element {}

impl<T: HeadElement> CacheElement<T> for T {}
impl CacheElement<bf16> for Fp8E4M3 {}
impl CacheElement<f16> for Fp8E4M3 {}
impl CacheElement<bf16> for Fp8E4M3Fnuz {}
impl CacheElement<f16> for Fp8E4M3Fnuz {}

/// Memory layout of a paged cache of keys and values: `blocks` blocks of `block` tokens. Slot `s` is token `s % block` of block
/// `s / block`; `x` elements are 16 bytes. The last axis has unit stride, other strides are free.
///
/// | layout          | keys                             | values                           |
/// |-----------------|----------------------------------|----------------------------------|
/// | `Nhd`           | `[blocks, block, heads, dim]`    | `[blocks, block, heads, dim]`    |
/// | `Hnd`           | `[blocks, heads, block, dim]`    | `[blocks, heads, block, dim]`    |
/// | `Paged`         | `[blocks, heads, dim/x, block, x]` | `[blocks, heads, dim, block]`  |
/// | `PagedShuffled` | `[blocks, heads, dim/x, block, x]` | `[blocks, heads, block/x, dim, x]` |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvLayout {
    /// Tokens, then heads: the layout of FlashAttention.
    Nhd,
    /// Heads, then tokens.
    Hnd,
    /// Keys in pieces of 16 bytes, values column-major: the layout of vLLM's paged attention.
    Paged,
    /// As [`Paged`](Self::Paged), but values in pieces of 16 bytes of tokens.
    PagedShuffled,
}

/// Elements of 16 bytes.
pub(crate) const fn piece<C: Element>() -> usize {
    16 / size_of::<C>()
}

impl KvLayout {
    /// The shape of a cache of keys with elements of type `C`; `sizes` are blocks, tokens of a block, heads, columns.
    pub fn key_shape<C: Element>(self, sizes: [usize; 4]) -> Vec<usize> {
        self.key_shape_of(piece::<C>(), sizes)
    }

    /// The shape of a cache of values with elements of type `C`; `sizes` as for [`key_shape`](Self::key_shape).
    pub fn value_shape<C: Element>(self, sizes: [usize; 4]) -> Vec<usize> {
        self.value_shape_of(piece::<C>(), sizes)
    }

    pub(crate) fn key_shape_of(self, piece: usize, [blocks, block, heads, dim]: [usize; 4]) -> Vec<usize> {
        match self {
            Self::Nhd => vec![blocks, block, heads, dim],
            Self::Hnd => vec![blocks, heads, block, dim],
            Self::Paged | Self::PagedShuffled => vec![blocks, heads, dim / piece, block, piece],
        }
    }

    pub(crate) fn value_shape_of(self, piece: usize, [blocks, block, heads, dim]: [usize; 4]) -> Vec<usize> {
        match self {
            Self::Nhd => vec![blocks, block, heads, dim],
            Self::Hnd => vec![blocks, heads, block, dim],
            Self::Paged => vec![blocks, heads, dim, block],
            Self::PagedShuffled => vec![blocks, heads, block / piece, dim, piece],
        }
    }

    /// Sizes of a cache by the shapes of its keys and values, of elements of type `dtype`.
    pub(crate) fn sizes(
        self,
        op: &'static str,
        dtype: DType,
        (k_arg, k): (&'static str, &[usize]),
        (v_arg, v): (&'static str, &[usize]),
    ) -> Result<CacheSizes> {
        self.check_rank(op, k_arg, k)?;
        let piece = 16 / dtype.size_bytes();
        let [pages, tokens] = [k[0], k[self.block_axis()]];
        let (heads, dqk) = match self {
            Self::Nhd => (k[2], k[3]),
            Self::Hnd => (k[1], k[3]),
            Self::Paged | Self::PagedShuffled => (k[1], k[2] * piece),
        };
        let keys = self.key_shape_of(piece, [pages, tokens, heads, dqk]);
        if k != keys {
            return Err(Error::shape(op, k_arg, k, format!("{keys:?} ({self:?} of {dtype})")));
        }
        if tokens == 0 {
            return Err(Error::empty(op, k_arg, self.block_axis(), k));
        }
        if self == Self::PagedShuffled && !tokens.is_multiple_of(piece) {
            let want = format!("pages of a multiple of {piece} tokens ({self:?} of {dtype})");
            return Err(Error::shape(op, k_arg, k, want));
        }
        let dv = match self {
            Self::Nhd | Self::Hnd | Self::PagedShuffled => v.get(3),
            Self::Paged => v.get(2),
        };
        let dv = dv.copied().unwrap_or(0);
        let values = self.value_shape_of(piece, [pages, tokens, heads, dv]);
        if v != values {
            return Err(Error::shape(op, v_arg, v, format!("{values:?} ({self:?} of {dtype}, for {k_arg})")));
        }
        Ok(CacheSizes { pages, tokens, heads, dqk, dv })
    }

    /// Checks the number of axes of a cache of keys.
    pub(crate) fn check_rank(self, op: &'static str, arg: &'static str, keys: &[usize]) -> Result<()> {
        let rank = match self {
            Self::Nhd | Self::Hnd => 4,
            Self::Paged | Self::PagedShuffled => 5,
        };
        if keys.len() == rank {
            return Ok(());
        }
        Err(Error::shape(op, arg, keys, format!("{rank} axes, for {self:?}")))
    }

    /// Checks that heads, and in the shuffled layout blocks, are a multiple of 16 bytes.
    pub(crate) fn check_pieces(self, op: &'static str, cache: DType, [block, dim]: [usize; 2]) -> Result<()> {
        let piece = 16 / cache.size_bytes();
        if matches!(self, Self::Paged | Self::PagedShuffled) && !dim.is_multiple_of(piece) {
            let want = format!("a dim that is a multiple of {piece} ({self:?} of {cache})");
            return Err(Error::shape(op, "k", [dim], want));
        }
        if self == Self::PagedShuffled && !block.is_multiple_of(piece) {
            let want = format!("blocks of a multiple of {piece} tokens ({self:?} of {cache})");
            return Err(Error::shape(op, "key_cache", [block], want));
        }
        Ok(())
    }

    /// The axis of tokens within a block, of a cache of keys.
    pub(crate) const fn block_axis(self) -> usize {
        match self {
            Self::Nhd => 1,
            Self::Hnd => 2,
            Self::Paged | Self::PagedShuffled => 3,
        }
    }

    /// The strides of a cache with pieces of this many elements.
    pub(crate) fn strides(self, cache: &Layout, values: bool, piece: usize) -> Strides {
        let s = |axis| stride_of(cache, axis);
        let whole = Strides::WHOLE;
        let log = piece.trailing_zeros();
        match self {
            Self::Nhd => Strides { block: s(0), within: s(1), head: s(2), within_shift: 0, ..whole },
            Self::Hnd => Strides { block: s(0), head: s(1), within: s(2), within_shift: 0, ..whole },
            Self::Paged | Self::PagedShuffled if !values => {
                let strides = Strides { block: s(0), head: s(1), within: s(3), within_shift: 0, ..whole };
                Strides { col: s(2), col_shift: log, ..strides }
            }
            Self::Paged => Strides { block: s(0), head: s(1), col: s(2), col_shift: 0, ..whole },
            Self::PagedShuffled => {
                let strides = Strides { block: s(0), head: s(1), within: s(2), within_shift: log, ..whole };
                Strides { col: s(3), col_shift: 0, ..strides }
            }
        }
    }
}

/// Sizes of a cache of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CacheSizes {
    pub pages: usize,
    /// Of a page.
    pub tokens: usize,
    pub heads: usize,
    pub dqk: usize,
    pub dv: usize,
}

/// The stride of an axis; 0 for an axis of length 1, whose stride need not be aligned.
fn stride_of(cache: &Layout, axis: usize) -> i64 {
    if cache.shape()[axis] > 1 { cache.strides()[axis] as i64 } else { 0 }
}

/// Strides of a [`Target`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Strides {
    pub block: i64,
    pub head: i64,
    pub within: i64,
    pub col: i64,
    pub within_shift: u32,
    pub col_shift: u32,
}

impl Strides {
    /// Contiguous tokens and columns.
    const WHOLE: Self = Self { block: 0, head: 0, within: 0, col: 0, within_shift: 31, col_shift: 31 };

    /// The strides of a cache `[slots, heads, cols]`.
    pub fn per_row(cache: &Layout) -> Self {
        Self { block: stride_of(cache, 0), head: stride_of(cache, 1), ..Self::WHOLE }
    }

    fn of_output(output: &GlobalLayout) -> Self {
        let [_, block, head, _] = output.strides();
        Self { block, head, ..Self::WHOLE }
    }

    /// Whether all strides, of elements of this size, are multiples of `bytes`.
    fn aligned(&self, element: usize, bytes: usize) -> bool {
        let all = [self.block, self.head, self.within, self.col];
        all.iter().all(|s| (s.unsigned_abs() as usize).wrapping_mul(element).is_multiple_of(bytes))
    }

    /// Whether at least [`PART`] columns are contiguous.
    pub fn is_row_major(&self) -> bool {
        self.col_shift >= PART.trailing_zeros()
    }

    /// Whether [`PART`] columns of a row-major cache are aligned for vector accesses.
    pub fn parts_aligned<C: Element>(&self, cache: &TensorViewMut<C>) -> bool {
        let bytes = PART * size_of::<C>();
        !self.is_row_major() || (cache.is_aligned(bytes as u64) && self.aligned(size_of::<C>(), bytes))
    }
}

/// `cache::Format` of `hip/kv_cache.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Format {
    AsInput = 0,
    Fp8Fnuz = 1,
    Fp8Ocp = 2,
    Zeros = 3,
}

/// `cache::Target::kSlots` of `hip/kv_cache.h`.
const SLOTS: u32 = u32::MAX;

const TARGETS: usize = 2;
const JOBS: usize = 4;

/// The entry points of `hip/kv_cache_rows.hip`: for bf16 and f16, vectorized and scalar.
const KERNELS: [[KernelRef<Params>; 2]; 2] = [
    [Params::kernel("kv_cache_rows_bf16"), Params::kernel("kv_cache_rows_bf16_scalar")],
    [Params::kernel("kv_cache_rows_f16"), Params::kernel("kv_cache_rows_f16_scalar")],
];

/// Columns of a vector of a lane: `kPart`.
pub(crate) const PART: usize = 8;

/// The same for copies to fp8: `kWidePart`.
const WIDE_PART: usize = 16;

/// Sets of heads in flight per wave, rotating and copying: `kPasses`, `kCopyPasses`, `kWideCopyPasses`.
const PASSES: usize = 2;
const COPY_PASSES: usize = 4;
const WIDE_COPY_PASSES: usize = 2;

/// Waves per CU: the occupancy of the kernels, enough to keep memory busy.
const WAVES_PER_CU: usize = 16;

impl Target {
    /// No target.
    pub const NONE: Self = Self {
        data: 0,
        scale: 0,
        block: 0,
        head: 0,
        within: 0,
        col: 0,
        within_shift: 0,
        col_shift: 0,
        format: Format::AsInput as u32,
        tokens: 0,
        grouped: 0,
        scale_heads: 0,
    };

    fn new(data: u64, strides: Strides, format: Format, tokens: u32) -> Self {
        let Strides { block, head, within, col, within_shift, col_shift } = strides;
        Self {
            data,
            block,
            head,
            within,
            col,
            within_shift,
            col_shift,
            format: format as u32,
            tokens,
            ..Self::NONE
        }
    }

    /// An output `[tokens, heads, cols]`: fp8, or of the type of the input.
    pub fn output<C: Element>(output: &GlobalLayout) -> Self {
        Self::new(output.data(), Strides::of_output(output), Format::of::<C>(), output.shape()[1])
    }

    /// An output that is filled with zeros.
    pub fn zeros(output: &GlobalLayout) -> Self {
        Self::new(output.data(), Strides::of_output(output), Format::Zeros, output.shape()[1])
    }

    /// A cache: fp8, or of the type of the input; `scale` may be absent.
    pub fn cache<C: Element>(data: u64, strides: Strides, scale: &GlobalLayout) -> Self {
        let grouped = data.is_multiple_of(16) && strides.aligned(size_of::<C>(), 16);
        let target = Self::new(data, strides, Format::of::<C>(), SLOTS);
        Self { scale: scale.data(), grouped: grouped.into(), ..target }
    }

    /// The same with factors of sequences and `heads`, `[sequences, heads]`.
    pub fn scaled_by_head(self, heads: usize) -> Self {
        Self { scale_heads: heads as u32, ..self }
    }

    fn is_fp8(&self) -> bool {
        self.format == Format::Fp8Fnuz as u32 || self.format == Format::Fp8Ocp as u32
    }

    /// Whether [`WIDE_PART`] columns of fp8 are contiguous and aligned to 16 bytes.
    fn wide_parts_aligned(&self) -> bool {
        let strides = [self.block, self.head, self.within, self.col];
        self.data.is_multiple_of(16)
            && strides.iter().all(|s| s % 16 == 0)
            && self.col_shift >= WIDE_PART.trailing_zeros()
    }
}

impl Format {
    fn of<C: Element>() -> Self {
        match C::DTYPE {
            DType::Fp8E4M3Fnuz => Self::Fp8Fnuz,
            DType::Fp8E4M3 => Self::Fp8Ocp,
            _ => Self::AsInput,
        }
    }
}

/// Most tokens of a launch: their indices are 32-bit.
const MOST_TOKENS: usize = 1 << 31;

/// How the waves of a job walk over rows.
struct Walk {
    /// Which kind of job: see [`Jobs`].
    kind: usize,
    /// Units of a row.
    units: usize,
    /// Sets of heads in flight per wave.
    passes: usize,
    /// Neighbouring tokens are adjacent in a target.
    tokens_first: bool,
}

/// The jobs of a launch of `hip/kv_cache_rows.hip`: those that rotate, then those that copy, then those that copy to a
/// column-major cache.
pub(crate) struct Jobs {
    op: &'static str,
    vectors: bool,
    wave: usize,
    waves: usize,
    jobs: [Job; JOBS],
    count: usize,
    /// Sequences that the tokens continue.
    append: Append,
    /// Tokens of each in the next job.
    of_sequence: u32,
    tasks: u64,
    /// Ends of the tasks of each kind.
    ends: [u64; 3],
}

impl Jobs {
    pub fn new(op: &'static str, stream: &Stream, vectors: bool) -> Self {
        let info = stream.device().info();
        Self {
            op,
            vectors,
            wave: info.wave_size as usize,
            waves: info.max_blocks(info.wave_size as usize, WAVES_PER_CU),
            jobs: Zeroable::zeroed(),
            count: 0,
            append: Zeroable::zeroed(),
            of_sequence: 0,
            tasks: 0,
            ends: [0; 3],
        }
    }

    /// The kernel for activations of type `T`.
    pub fn kernel<T: HeadElement>(&self, stream: &Stream) -> Result<Kernel<Params>> {
        let kernels = &KERNELS[usize::from(T::DTYPE == DType::F16)];
        stream.kernel(kernels[usize::from(!self.vectors)])
    }

    /// Tokens continue sequences.
    pub fn append(&mut self, append: Append) {
        self.append = append;
    }

    /// Those of the next job are so many of each sequence.
    pub fn of_sequence(&mut self, tokens: usize) {
        self.of_sequence = tokens as u32; // no more than the input has
    }

    /// Rotates the heads of `input`, `[tokens, heads, cols]`. `tokens_first`: neighbouring tokens are adjacent in a target.
    pub fn rotate(&mut self, input: GlobalLayout, rope: &Rope, targets: &[Target], tokens_first: bool) {
        let cols = input.shape()[3];
        let rotary = rope.rotary as u32; // at most `cols`
        let job = match rope.span {
            RopeSpan::First => Job { rotary, passed_at: rotary, passed_end: cols, ..Job::zeroed() },
            RopeSpan::Last => {
                Job { rotary, rotary_at: cols - rotary, passed_end: cols - rotary, ..Job::zeroed() }
            }
        };
        let part = if self.vectors { PART } else { 1 };
        let units = (cols as usize).div_ceil(2 * part);
        self.push_rows(Walk { kind: 0, units, passes: PASSES, tokens_first }, job, input, targets);
    }

    /// Copies the heads of `input`, `[tokens, heads, cols]`.
    pub fn copy(&mut self, input: GlobalLayout, targets: &[Target]) {
        let cols = input.shape()[3] as usize;
        let wide = self.vectors
            && cols.is_multiple_of(WIDE_PART)
            && targets.iter().any(|t| t.is_fp8())
            && targets.iter().all(|t| !t.is_fp8() || t.wide_parts_aligned());
        let (part, passes) = match (self.vectors, wide) {
            (false, _) => (1, COPY_PASSES),
            (true, false) => (PART, COPY_PASSES),
            (true, true) => (WIDE_PART, WIDE_COPY_PASSES),
        };
        let job = Job { wide: wide.into(), ..Job::zeroed() };
        let walk = Walk { kind: 1, units: cols.div_ceil(part), passes, tokens_first: false };
        self.push_rows(walk, job, input, targets);
    }

    /// Copies the heads of `input`, `[tokens, heads, cols]`, to a column-major cache of type `C`.
    pub fn columns<C: Element>(&mut self, input: GlobalLayout, target: Target) {
        if !self.vectors {
            return self.copy(input, &[target]);
        }
        let [_, tokens, heads, cols] = input.shape().map(|n| n as usize);
        let groups = (heads * (cols / PART)).div_ceil(self.wave);
        // Lanes also for the tokens around a window, which may share a group with those in it.
        let most = (self.wave - 2 * (piece::<C>() - 1)).min(16);
        let window = (tokens * groups / self.waves).clamp(1, most);
        let job = Job { groups: groups as u32, window: window as u32, ..Job::zeroed() };
        self.push(2, job, input, &[target], tokens.div_ceil(window), groups);
    }

    fn push_rows(&mut self, walk: Walk, job: Job, input: GlobalLayout, targets: &[Target]) {
        let Walk { kind, units, passes, tokens_first } = walk;
        let [_, tokens, heads, _] = input.shape().map(|n| n as usize);
        if tokens == 0 || heads == 0 {
            return;
        }
        let rows = (self.wave / units).max(1);
        let tokens_per_wave = if tokens_first { rows.min(tokens) } else { (rows / heads).clamp(1, tokens) };
        let heads_per_wave = (rows / tokens_per_wave).min(heads);
        let sets = tokens.div_ceil(tokens_per_wave);
        // As many tasks as keep the device busy, if heads allow; not more, since each loads the tables for itself.
        let passes_per_set = heads.div_ceil(heads_per_wave);
        let groups = self.waves.div_ceil(sets).min(passes_per_set.div_ceil(passes));
        let heads_of_task = passes_per_set.div_ceil(groups) * heads_per_wave;
        let groups = heads.div_ceil(heads_of_task);
        let inverse = |n: usize| ((1 << 16) / n + 1) as u32;
        let job = Job {
            units: units as u32,
            inv_units: inverse(units),
            tokens_per_wave: tokens_per_wave as u32,
            inv_tokens_per_wave: inverse(tokens_per_wave),
            heads_per_wave: heads_per_wave as u32,
            heads: heads_of_task as u32,
            groups: groups as u32,
            ..job
        };
        self.push(kind, job, input, targets, sets, groups);
    }

    fn push(
        &mut self,
        kind: usize,
        job: Job,
        input: GlobalLayout,
        targets: &[Target],
        sets: usize,
        groups: usize,
    ) {
        if input.shape()[1..].contains(&0) {
            return;
        }
        self.tasks += sets as u64 * groups as u64;
        let cached = targets.iter().any(|t| t.tokens == SLOTS);
        let mut all = [Target::NONE; TARGETS];
        all[..targets.len()].copy_from_slice(targets);
        self.jobs[self.count] = Job {
            r#in: input,
            targets: all,
            end: self.tasks.min(u64::from(u32::MAX)) as u32,
            cached: cached.into(),
            of_sequence: self.of_sequence,
            ..job
        };
        self.count += 1;
        self.ends[kind..].fill(self.tasks);
    }

    /// Checks that the grid stride from the last task stays below 2^31.
    pub fn check(&self) -> Result<()> {
        let limit = (1 << 31) - self.waves as u64;
        if self.tasks > limit {
            return Err(Error::too_large(self.op, "tokens", format!("work for {} waves", self.tasks), limit));
        }
        Ok(())
    }

    /// Queues the launch, if there are jobs, or lengths to store.
    ///
    /// # Safety
    /// As [`Launch::run`]: rows, columns, slots and heads lie within the tensors.
    pub unsafe fn run(self, launch: Launch<'_>, kernel: &Kernel<Params>, common: Common) -> Result<()> {
        self.check()?;
        if self.tasks == 0 && self.append.totals == 0 {
            return Ok(());
        }
        let [rotations, copies, columns] = self.ends.map(|end| end as u32);
        let Self { jobs, append, .. } = self;
        let params = Params { common, append, jobs, rotations, copies, columns, pad: 0 };
        let blocks = (self.tasks as usize).clamp(1, self.waves);
        // SAFETY: the caller's.
        unsafe { launch.run(kernel, LaunchConfig::grid_1d(blocks), &params) }
    }
}

/// Numbers of tokens and slots, from which [`Common`] is made.
pub(crate) struct Tokens {
    /// Tokens that have a position.
    pub rotated: usize,
    /// Tokens that have a slot.
    pub cached: usize,
    pub blocks: usize,
    pub block: usize,
}

impl Tokens {
    /// Checks the slots: `[tokens]`, at least as many as have a position and at most as many as there are.
    pub fn check(&self, op: &'static str, slots: &IndexView, tokens: usize) -> Result<()> {
        let &[cached] = slots.shape() else {
            return Err(Error::shape(op, "slot_mapping", slots.shape(), "[tokens]"));
        };
        if cached < self.rotated || cached > tokens {
            let want = format!("[n] with n from {} (tokens of q) to {tokens} (tokens of k)", self.rotated);
            return Err(Error::shape(op, "slot_mapping", slots.shape(), want));
        }
        slots.expect_aligned(op, "slot_mapping")?;
        check_slots(op, "k", tokens, [self.blocks, self.block])
    }

    pub fn common<'a, C: Element>(
        &self,
        launch: &mut Launch<'a>,
        rope: &Rope,
        tables: &RopeSource<'a, C>,
        slots: &IndexView<'a>,
    ) -> Result<Common> {
        Ok(Common {
            rope: tables.params(launch, rope, false)?,
            slots: slots.input(launch, "slot_mapping")?,
            n_slots: (self.blocks * self.block) as u64,
            slots_are_i64: slots.is_i64().into(),
            block_tokens: self.block.max(1) as u32,
            rotated_tokens: self.rotated as u32,
            cached_tokens: self.cached as u32,
        })
    }
}

/// Checks numbers of tokens, of `arg`, and of slots in so many blocks of so many tokens.
pub(crate) fn check_slots(
    op: &'static str,
    arg: &'static str,
    tokens: usize,
    [blocks, block]: [usize; 2],
) -> Result<()> {
    if tokens > MOST_TOKENS {
        return Err(Error::too_large(op, arg, format!("{tokens} tokens"), MOST_TOKENS as u64));
    }
    let limit = u32::MAX as usize;
    if blocks.checked_mul(block).is_none_or(|n| n > limit) {
        let what = format!("{blocks} blocks of {block} tokens");
        return Err(Error::too_large(op, "slots", what, limit as u64));
    }
    Ok(())
}

/// Checks the tensor of a scale.
pub(crate) fn check_scale(
    op: &'static str,
    arg: &'static str,
    scale: Option<&TensorView<f32>>,
) -> Result<()> {
    let Some(scale) = scale else { return Ok(()) };
    if scale.numel() != 1 || scale.shape().len() > 1 {
        return Err(Error::shape(op, arg, scale.shape(), "[1]"));
    }
    scale.expect_aligned(op, arg, 4)
}

/// A view of either kind, of heads or rows: unit stride on the last axis, all other strides free.
pub(crate) trait Heads: Operand {
    /// Checks shape, unit stride and alignment; `why` says where the shape comes from.
    fn check(&self, op: &'static str, arg: &'static str, shape: &[usize], why: &str) -> Result<()>;
    /// Whether each row is aligned to a vector of [`PART`] elements, at most 16 bytes.
    fn can_vectorize(&self) -> bool;
}

macro_rules! heads {
    ($view:ident) => {
        impl<T: Element> Heads for $view<'_, T> {
            fn check(&self, op: &'static str, arg: &'static str, shape: &[usize], why: &str) -> Result<()> {
                if self.shape() != shape {
                    return Err(Error::shape(op, arg, self.shape(), format!("{shape:?} ({why})")));
                }
                self.expect_unit_stride(op, arg)?;
                self.expect_aligned(op, arg, size_of::<T>() as u64)
            }

            fn can_vectorize(&self) -> bool {
                self.rows_aligned((PART * size_of::<T>()).min(16) as u64)
            }
        }
    };
}

heads!(TensorView);
heads!(TensorViewMut);

/// An optional tensor, for [`check_aliases`](hk_core::check_aliases).
pub(crate) fn optional<O: Operand>(tensor: &Option<O>) -> Option<&dyn Operand> {
    tensor.as_ref().map(|tensor| tensor as &dyn Operand)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hk_core::Device;

    /// More than fits in memory, so not reachable through the operators.
    #[test]
    fn numbers_of_tokens_and_slots_have_a_limit() {
        let stream = Device::open("emu:gfx942").unwrap().create_stream().unwrap();
        let slots = stream.upload(&[0i32]).unwrap();
        let check = |blocks: usize, block: usize, tokens: usize| {
            let places = Tokens { rotated: 0, cached: 1, blocks, block };
            places.check("op", &slots.view([1]).unwrap().into(), tokens)
        };
        check(1 << 20, (1 << 12) - 1, MOST_TOKENS).unwrap();
        let error = check(1 << 20, 1 << 12, 1).unwrap_err();
        assert!(matches!(error, Error::TooLarge { .. }), "{error}");
        assert!(error.to_string().contains("slots: 1048576 blocks of 4096 tokens"), "{error}");
        let error = check(usize::MAX, 2, 1).unwrap_err();
        assert!(matches!(error, Error::TooLarge { .. }), "{error}");
        let error = check(1, 1, MOST_TOKENS + 1).unwrap_err();
        assert!(matches!(error, Error::TooLarge { .. }), "{error}");
        assert!(error.to_string().contains("k: 2147483649 tokens"), "{error}");
    }
}
