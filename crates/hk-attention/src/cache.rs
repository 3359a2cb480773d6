//! What the operators that write caches share: types, the layouts of caches as strides, and the launch of
//! `hip/cache_rows.hip`.

use crate::kernels;
use bytemuck::{Pod, Zeroable};
use hk_core::rope::{Rope, RopeParams, RopeSource, RopeSpan};
use hk_core::{
    DType, Element, Error, Float, Fp8E4M3, Fp8E4M3Fnuz, GlobalLayout, IndexView, Launch, LaunchConfig,
    Layout, Operand, Result, Stream, TensorView, TensorViewMut, bf16, f16,
};

/// The element types of activations here: `bf16` and `f16`.
pub trait Activation: Float {}

impl Activation for bf16 {}
impl Activation for f16 {}

/// A type that a cache, or a query after its rotation, can have beside activations of type `T`: `T` itself and both fp8
/// e4m3 formats.
pub trait CacheElement<T: Activation>: Element {}

impl<T: Activation> CacheElement<T> for T {}
impl CacheElement<bf16> for Fp8E4M3 {}
impl CacheElement<f16> for Fp8E4M3 {}
impl CacheElement<bf16> for Fp8E4M3Fnuz {}
impl CacheElement<f16> for Fp8E4M3Fnuz {}

/// How a paged cache of keys and values lies in memory. There are `blocks` blocks of `block` tokens, slot `s` is token
/// `s % block` of block `s / block`, and `x` elements are 16 bytes. Strides are free, but that of the last axis is 1.
///
/// | layout          | keys                             | values                           |
/// |-----------------|----------------------------------|----------------------------------|
/// | `Nhd`           | `[blocks, block, heads, dim]`    | `[blocks, block, heads, dim]`    |
/// | `Hnd`           | `[blocks, heads, block, dim]`    | `[blocks, heads, block, dim]`    |
/// | `Paged`         | `[blocks, heads, dim/x, block, x]` | `[blocks, heads, dim, block]`  |
/// | `PagedShuffled` | `[blocks, heads, dim/x, block, x]` | `[blocks, heads, block/x, dim, x]` |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvLayout {
    /// Tokens, then heads: what flash attention reads.
    Nhd,
    /// Heads, then tokens.
    Hnd,
    /// Keys in pieces of 16 bytes, values by columns: vLLM's paged attention.
    Paged,
    /// As [`Paged`](Self::Paged), with values in pieces of 16 bytes of tokens.
    PagedShuffled,
}

/// Elements of 16 bytes.
pub(crate) const fn piece<C: Element>() -> usize {
    16 / size_of::<C>()
}

impl KvLayout {
    /// The shape of a cache of keys with elements of type `C`.
    pub fn key_shape<C: Element>(self, [blocks, block, heads, dim]: [usize; 4]) -> Vec<usize> {
        match self {
            Self::Nhd => vec![blocks, block, heads, dim],
            Self::Hnd => vec![blocks, heads, block, dim],
            Self::Paged | Self::PagedShuffled => vec![blocks, heads, dim / piece::<C>(), block, piece::<C>()],
        }
    }

    /// The shape of a cache of values with elements of type `C`.
    pub fn value_shape<C: Element>(self, [blocks, block, heads, dim]: [usize; 4]) -> Vec<usize> {
        match self {
            Self::Nhd => vec![blocks, block, heads, dim],
            Self::Hnd => vec![blocks, heads, block, dim],
            Self::Paged => vec![blocks, heads, dim, block],
            Self::PagedShuffled => vec![blocks, heads, block / piece::<C>(), dim, piece::<C>()],
        }
    }

    /// The axis of a cache of keys that is the tokens of a block.
    pub(crate) const fn block_axis(self) -> usize {
        match self {
            Self::Nhd => 1,
            Self::Hnd => 2,
            Self::Paged | Self::PagedShuffled => 3,
        }
    }

    /// The strides of a cache, of this many elements a piece.
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

/// The stride of an axis; that of one of length 1 is of no use, and need not be aligned.
fn stride_of(cache: &Layout, axis: usize) -> i64 {
    if cache.shape()[axis] > 1 { cache.strides()[axis] as i64 } else { 0 }
}

/// Strides of a [`Target`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Strides {
    block: i64,
    head: i64,
    within: i64,
    col: i64,
    within_shift: u32,
    col_shift: u32,
}

impl Strides {
    /// Everything next to each other.
    const WHOLE: Self = Self { block: 0, head: 0, within: 0, col: 0, within_shift: 31, col_shift: 31 };

    /// Those of a cache `[slots, heads, cols]`.
    pub fn of_rows(cache: &Layout) -> Self {
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

    /// Columns are next to each other, at least [`PART`] of them.
    pub fn by_rows(&self) -> bool {
        self.col_shift >= PART.trailing_zeros()
    }

    /// Whether parts of [`PART`] columns of the cache, or its columns, can be accessed as a whole.
    pub fn parts_aligned<C: Element>(&self, cache: &TensorViewMut<C>) -> bool {
        let bytes = PART * size_of::<C>();
        !self.by_rows() || (cache.is_aligned(bytes as u64) && self.aligned(size_of::<C>(), bytes))
    }
}

/// `cache::Target` of `hip/cache.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Target {
    data: u64,
    scale: u64,
    block: i64,
    head: i64,
    within: i64,
    col: i64,
    within_shift: u32,
    col_shift: u32,
    format: u32,
    tokens: u32,
    grouped: u32,
    pad: u32,
}

/// `cache::Format` of `hip/cache.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Format {
    AsInput = 0,
    Fp8Fnuz = 1,
    Fp8Ocp = 2,
    Zeros = 3,
}

/// `cache::Target::kSlots` of `hip/cache.h`.
const SLOTS: u32 = u32::MAX;

/// `cache::Common` of `hip/cache.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Common {
    pub rope: RopeParams,
    pub slots: GlobalLayout,
    pub n_slots: u64,
    pub slots_are_i64: u32,
    pub block_tokens: u32,
    pub rotated_tokens: u32,
    pub cached_tokens: u32,
}

const TARGETS: usize = 2;
const JOBS: usize = 4;

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Job {
    input: GlobalLayout,
    targets: [Target; TARGETS],
    rotary: u32,
    rotary_at: u32,
    passed_at: u32,
    passed_end: u32,
    units: u32,
    inv_units: u32,
    tokens_abreast: u32,
    inv_tokens_abreast: u32,
    heads_abreast: u32,
    heads: u32,
    groups: u32,
    window: u32,
    end: u32,
    wide: u32,
    cached: u32,
    pad: u32,
}

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    common: Common,
    jobs: [Job; JOBS],
    rotations: u32,
    copies: u32,
    columns: u32,
    pad: u32,
}

/// The entry points of `hip/cache_rows.hip`: for bf16 and f16, by vectors and by elements.
const KERNELS: [[&str; 2]; 2] =
    [["cache_rows_bf16", "cache_rows_bf16_elements"], ["cache_rows_f16", "cache_rows_f16_elements"]];

/// Columns that a lane takes at a time, by vectors: `kPart`.
pub(crate) const PART: usize = 8;

/// The same where rows are copied to fp8: `kWidePart`.
const WIDE_PART: usize = 16;

/// Sets of heads that a wave has in hand at a time, rotating and copying: `kPasses`, `kCopyPasses`, `kWideCopyPasses`.
const PASSES: usize = 2;
const COPY_PASSES: usize = 4;
const WIDE_COPY_PASSES: usize = 2;

/// Waves a CU that keep memory busy, which is what the registers of the kernels leave room for.
const WAVES_PER_CU: usize = 16;

impl Target {
    /// None.
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
        pad: 0,
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

    /// An output to be filled with zeros.
    pub fn zeros(output: &GlobalLayout) -> Self {
        Self::new(output.data(), Strides::of_output(output), Format::Zeros, output.shape()[1])
    }

    /// A cache: fp8, or of the type of the input; `scale` may be absent.
    pub fn cache<C: Element>(data: u64, strides: Strides, scale: &GlobalLayout) -> Self {
        let grouped = data.is_multiple_of(16) && strides.aligned(size_of::<C>(), 16);
        let target = Self::new(data, strides, Format::of::<C>(), SLOTS);
        Self { scale: scale.data(), grouped: grouped.into(), ..target }
    }

    fn is_fp8(&self) -> bool {
        self.format == Format::Fp8Fnuz as u32 || self.format == Format::Fp8Ocp as u32
    }

    /// Whether parts of [`WIDE_PART`] columns, of fp8, are on 16 bytes and next to each other.
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

/// Tokens of a launch beyond which their indices do not fit.
const MOST_TOKENS: usize = 1 << 31;

/// The jobs of a launch of `hip/cache_rows.hip`: those that rotate first, then those that copy, then those that copy to a
/// cache by columns.
pub(crate) struct Jobs {
    op: &'static str,
    vectors: bool,
    wave: usize,
    waves: usize,
    jobs: [Job; JOBS],
    count: usize,
    tasks: u64,
    /// Where the tasks of each kind end.
    ends: [u64; 3],
}

impl Jobs {
    pub fn new(op: &'static str, stream: &Stream, vectors: bool) -> Self {
        let info = stream.device().info();
        Self {
            op,
            vectors,
            wave: info.wave_size as usize,
            waves: info.most_blocks(info.wave_size as usize, WAVES_PER_CU),
            jobs: Zeroable::zeroed(),
            count: 0,
            tasks: 0,
            ends: [0; 3],
        }
    }

    /// The kernel for activations of type `T`.
    pub fn kernel<T: Activation>(&self, stream: &Stream) -> Result<std::sync::Arc<hk_core::Kernel>> {
        let names = &KERNELS[usize::from(T::DTYPE == DType::F16)];
        stream.kernel(&kernels::CACHE_ROWS, names[usize::from(!self.vectors)])
    }

    /// Rotates the heads of `input`, `[tokens, heads, cols]`. `tokens_first`: neighbouring tokens are neighbours in a target.
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
        self.by_rows(0, job, input, targets, (cols as usize).div_ceil(2 * part), PASSES, tokens_first);
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
        self.by_rows(1, job, input, targets, cols.div_ceil(part), passes, false);
    }

    /// Copies the heads of `input`, `[tokens, heads, cols]`, to a cache that lies by columns, of type `C`.
    pub fn columns<C: Element>(&mut self, input: GlobalLayout, target: Target) {
        if !self.vectors {
            return self.copy(input, &[target]);
        }
        let [_, tokens, heads, cols] = input.shape().map(|n| n as usize);
        let groups = (heads * (cols / PART)).div_ceil(self.wave);
        // Lanes for the tokens around a window too, which may be in groups with those in it.
        let most = (self.wave - 2 * (piece::<C>() - 1)).min(16);
        let window = (tokens * groups / self.waves).clamp(1, most);
        let job = Job { groups: groups as u32, window: window as u32, ..Job::zeroed() };
        self.push(2, job, input, &[target], tokens.div_ceil(window), groups);
    }

    #[expect(clippy::too_many_arguments, reason = "what a job is")]
    fn by_rows(
        &mut self,
        kind: usize,
        job: Job,
        input: GlobalLayout,
        targets: &[Target],
        units: usize,
        passes: usize,
        tokens_first: bool,
    ) {
        let [_, tokens, heads, _] = input.shape().map(|n| n as usize);
        if tokens == 0 || heads == 0 {
            return;
        }
        let rows = (self.wave / units).max(1);
        let tokens_abreast = if tokens_first { rows.min(tokens) } else { (rows / heads).clamp(1, tokens) };
        let heads_abreast = (rows / tokens_abreast).min(heads);
        let sets = tokens.div_ceil(tokens_abreast);
        // As many tasks as keep the device busy, if heads allow; not more, since each loads the tables for itself.
        let turns = heads.div_ceil(heads_abreast);
        let groups = self.waves.div_ceil(sets).min(turns.div_ceil(passes));
        let heads_of_task = turns.div_ceil(groups) * heads_abreast;
        let groups = heads.div_ceil(heads_of_task);
        let inverse = |n: usize| ((1 << 16) / n + 1) as u32;
        let job = Job {
            units: units as u32,
            inv_units: inverse(units),
            tokens_abreast: tokens_abreast as u32,
            inv_tokens_abreast: inverse(tokens_abreast),
            heads_abreast: heads_abreast as u32,
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
            input,
            targets: all,
            end: self.tasks.min(u64::from(u32::MAX)) as u32,
            cached: cached.into(),
            ..job
        };
        self.count += 1;
        self.ends[kind..].fill(self.tasks);
    }

    /// Queues the jobs, if there are any.
    ///
    /// # Safety
    /// As [`Launch::run`]: rows, columns, slots and heads lie within the tensors.
    pub unsafe fn run(self, launch: Launch<'_>, common: Common) -> Result<()> {
        if self.tasks == 0 {
            return Ok(());
        }
        // The grid steps on from the last task, within 2^31.
        let limit = (1 << 31) - self.waves as u64;
        if self.tasks > limit {
            return Err(Error::too_large(self.op, "tokens", format!("work for {} waves", self.tasks), limit));
        }
        let [rotations, copies, columns] = self.ends.map(|end| end as u32);
        let params = Params { common, jobs: self.jobs, rotations, copies, columns, pad: 0 };
        let blocks = (self.tasks as usize).min(self.waves);
        // SAFETY: the caller's.
        unsafe { launch.run(LaunchConfig::grid_1d(blocks), &params) }
    }
}

/// Tokens and slots: what [`Common`] is made of.
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
        if tokens > MOST_TOKENS {
            return Err(Error::too_large(op, "k", format!("{tokens} tokens"), MOST_TOKENS as u64));
        }
        let limit = u32::MAX as usize;
        if self.blocks.checked_mul(self.block).is_none_or(|n| n > limit) {
            let what = format!("{} blocks of {} tokens", self.blocks, self.block);
            return Err(Error::too_large(op, "slots", what, limit as u64));
        }
        Ok(())
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

/// Checks a tensor that has one number for all.
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
    /// Whether each row begins on a vector of [`PART`] elements, at most 16 bytes.
    fn by_vectors(&self) -> bool;
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

            fn by_vectors(&self) -> bool {
                self.rows_aligned((PART * size_of::<T>()).min(16) as u64)
            }
        }
    };
}

heads!(TensorView);
heads!(TensorViewMut);

/// An optional tensor as one that may not share memory.
pub(crate) fn optional<O: Operand>(tensor: &Option<O>) -> Option<&dyn Operand> {
    tensor.as_ref().map(|tensor| tensor as &dyn Operand)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hk_core::Device;

    /// More than fits into memory, so not to be had through the operators.
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
