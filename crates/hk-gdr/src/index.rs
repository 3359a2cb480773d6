//! The safe functions of `hip/index.hip`: what packed sequences have to be known by.

use crate::kernels::index::Params;
use bytemuck::Zeroable;
use hk_core::{
    Aliasing, Element, Error, KernelRef, LaunchConfig, Result, Stream, TensorView, TensorViewMut,
    check_overlap,
};

/// Integers of the helpers: `i32` or `i64`.
pub trait Index: Element + sealed::Index {}

impl Index for i32 {}
impl Index for i64 {}

mod sealed {
    use super::{KernelRef, Params};

    pub trait Index {
        /// What one block makes, positions, numbers of sequences.
        const KERNELS: [KernelRef<Params>; 3];
    }

    impl Index for i32 {
        const KERNELS: [KernelRef<Params>; 3] = [
            Params::kernel("index_i32_sequences"),
            Params::kernel("index_i32_position_ids"),
            Params::kernel("index_i32_sequence_ids"),
        ];
    }

    impl Index for i64 {
        const KERNELS: [KernelRef<Params>; 3] = [
            Params::kernel("index_i64_sequences"),
            Params::kernel("index_i64_position_ids"),
            Params::kernel("index_i64_sequence_ids"),
        ];
    }
}

/// As `Make` of `hip/index.hip`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Make {
    Lens = 0,
    Starts = 1,
    ChunkOffsets = 2,
    ChunkIndices = 3,
    MaxSplits = 4,
}

/// Threads of a block of the kernels of tokens.
const THREADS: usize = 256;
/// Tokens of a chunk at most.
const MOST_CHUNK: usize = 1 << 16;

/// The parameters with the sequences of `cu_seqlens`, `[N + 1]`, or of `lens`, `[N]`.
fn start<I: Index>(op: &'static str, arg: &'static str, input: &TensorView<I>) -> Result<Params> {
    let n = sequences(op, arg, input.shape())?;
    plain(op, arg, input)?;
    Ok(Params { n: n as u32, chunk: 1, ..Params::zeroed() })
}

/// The number of sequences of `cu_seqlens`, or of `lens`.
pub(crate) fn sequences(op: &'static str, arg: &'static str, shape: &[usize]) -> Result<usize> {
    let of_lens = arg == "lens";
    let n = match *shape {
        [n] if of_lens => n,
        [n] if n > 0 => n - 1,
        _ => {
            let want = if of_lens { "[N]" } else { "[N + 1], at least one element" };
            return Err(Error::shape(op, arg, shape, want));
        }
    };
    let limit = i32::MAX as usize;
    if n > limit {
        return Err(Error::too_large(op, arg, format!("{n} sequences"), limit as u64));
    }
    Ok(n)
}

fn plain<E: Element>(op: &'static str, arg: &'static str, tensor: &TensorView<E>) -> Result<()> {
    tensor.expect_contiguous(op, arg)?;
    tensor.expect_aligned(op, arg, size_of::<E>() as u64)
}

pub(crate) fn check_chunk(op: &'static str, chunk_size: usize) -> Result<u32> {
    if !chunk_size.is_power_of_two() || chunk_size > MOST_CHUNK {
        return Err(Error::argument(op, "chunk_size", chunk_size, "a power of two from 1 to 2^16"));
    }
    Ok(chunk_size as u32)
}

/// Runs the kernel of one block.
fn make<'a, I: Index>(
    stream: &Stream,
    op: &'static str,
    (arg, input): (&'static str, TensorView<'a, I>),
    (name, mut out): (&'static str, TensorViewMut<'a, I>),
    count: Option<TensorViewMut<'a, i32>>,
    mut params: Params,
    what: Make,
) -> Result<()> {
    plain(op, name, &out.alias())?;
    check_overlap(op, (arg, &input), (name, &out), Aliasing::Disjoint)?;
    let kernel = stream.kernel(I::KERNELS[0])?;
    let mut launch = stream.launch(op);
    params.input_output(launch.input_address(arg, &input)?, launch.output_address(name, &mut out)?);
    params.make = what as u32;
    if let Some(mut count) = count {
        count.expect_shape(op, "count", [1])?;
        plain(op, "count", &count.alias())?;
        check_overlap(op, (arg, &input), ("count", &count), Aliasing::Disjoint)?;
        check_overlap(op, (name, &out), ("count", &count), Aliasing::Disjoint)?;
        params.count = launch.output_address("count", &mut count)?;
    }
    // SAFETY: the callers have checked that `out` is as long as the result is for `n` sequences, or has `capacity` rows.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(1), &params) }
}

impl Params {
    fn input_output(&mut self, input: u64, output: u64) {
        (self.input, self.output) = (input, output);
    }
}

/// Lengths of packed sequences: `lens[n] = cu_seqlens[n + 1] - cu_seqlens[n]`. `cu_seqlens` is `[N + 1]`, `lens` `[N]`, both contiguous.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) for other tensors, [`Overlap`](Error::Overlap) if they share
/// memory, [`TooLarge`](Error::TooLarge) beyond 2^31 - 1 sequences, [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and
/// launching a kernel. Nothing is written then.
pub fn prepare_lens<'a, I: Index>(
    stream: &Stream,
    cu_seqlens: TensorView<'a, I>,
    lens: TensorViewMut<'a, I>,
) -> Result<()> {
    const OP: &str = "prepare_lens";
    let params = start(OP, "cu_seqlens", &cu_seqlens)?;
    lens.expect_shape(OP, "lens", [params.n as usize])?;
    if params.n == 0 {
        return Ok(());
    }
    make(stream, OP, ("cu_seqlens", cu_seqlens), ("lens", lens), None, params, Make::Lens)
}

/// Starts of packed sequences from their lengths: `[0, lens[0], lens[0] + lens[1], ..]`. `lens` is `[N]`, `cu_seqlens` `[N + 1]`, both contiguous.
/// A negative length counts as 0.
///
/// # Errors
/// As [`prepare_lens`].
pub fn prepare_cu_seqlens_from_lens<'a, I: Index>(
    stream: &Stream,
    lens: TensorView<'a, I>,
    cu_seqlens: TensorViewMut<'a, I>,
) -> Result<()> {
    const OP: &str = "prepare_cu_seqlens_from_lens";
    let params = start(OP, "lens", &lens)?;
    cu_seqlens.expect_shape(OP, "cu_seqlens", [params.n as usize + 1])?;
    make(stream, OP, ("lens", lens), ("cu_seqlens", cu_seqlens), None, params, Make::Starts)
}

/// Chunks before each packed sequence: `[0, c[0], c[0] + c[1], ..]`, `c[n] = ceil(length / chunk_size)`. `cu_seqlens` and `offsets` are
/// `[N + 1]`, contiguous. A negative length counts as 0.
///
/// # Errors
/// As [`prepare_lens`]; [`Argument`](Error::Argument) for a `chunk_size` that is not a power of two from 1 to 2^16.
pub fn prepare_chunk_offsets<'a, I: Index>(
    stream: &Stream,
    cu_seqlens: TensorView<'a, I>,
    offsets: TensorViewMut<'a, I>,
    chunk_size: usize,
) -> Result<()> {
    const OP: &str = "prepare_chunk_offsets";
    let chunk = check_chunk(OP, chunk_size)?;
    let params = Params { chunk, ..start(OP, "cu_seqlens", &cu_seqlens)? };
    offsets.expect_shape(OP, "offsets", [params.n as usize + 1])?;
    make(stream, OP, ("cu_seqlens", cu_seqlens), ("offsets", offsets), None, params, Make::ChunkOffsets)
}

/// The chunks of packed sequences in order: rows `(sequence, chunk of the sequence)`. `cu_seqlens` is `[N + 1]`, `indices`
/// `[capacity, 2]`, `count` `[1]`, all contiguous. Rows that are not used are `(-1, -1)`; `count` is the number of chunks, or -1 if there are
/// more than rows. `T / chunk_size + N` rows are enough. Sequences without tokens have no chunk; a negative length counts as 0.
///
/// # Errors
/// As [`prepare_chunk_offsets`].
pub fn gpu_prepare_chunk_indices<'a, I: Index>(
    stream: &Stream,
    cu_seqlens: TensorView<'a, I>,
    indices: TensorViewMut<'a, I>,
    count: TensorViewMut<'a, i32>,
    chunk_size: usize,
) -> Result<()> {
    const OP: &str = "gpu_prepare_chunk_indices";
    let chunk = check_chunk(OP, chunk_size)?;
    let params = start(OP, "cu_seqlens", &cu_seqlens)?;
    let [capacity, pair] = indices.dims(OP, "indices")?;
    if pair != 2 {
        return Err(Error::shape(OP, "indices", indices.shape(), "[capacity, 2]"));
    }
    let limit = i32::MAX as usize;
    if capacity > limit {
        return Err(Error::too_large(OP, "indices", format!("{capacity} rows"), limit as u64));
    }
    let params = Params { chunk, capacity: capacity as u32, ..params };
    make(
        stream,
        OP,
        ("cu_seqlens", cu_seqlens),
        ("indices", indices),
        Some(count),
        params,
        Make::ChunkIndices,
    )
}

/// Chunks of the longest packed sequence, `[1]`; 0 if there is none. `cu_seqlens` is `[N + 1]`, contiguous.
///
/// # Errors
/// As [`prepare_chunk_offsets`].
pub fn get_max_num_splits<'a, I: Index>(
    stream: &Stream,
    cu_seqlens: TensorView<'a, I>,
    splits: TensorViewMut<'a, I>,
    chunk_size: usize,
) -> Result<()> {
    const OP: &str = "get_max_num_splits";
    let chunk = check_chunk(OP, chunk_size)?;
    let params = Params { chunk, ..start(OP, "cu_seqlens", &cu_seqlens)? };
    splits.expect_shape(OP, "splits", [1])?;
    make(stream, OP, ("cu_seqlens", cu_seqlens), ("splits", splits), None, params, Make::MaxSplits)
}

/// Of each token its place in its sequence, `[T]`. `cu_seqlens` is `[N + 1]`, from 0 to `T`, not falling, contiguous; `N` is not 0 if there are
/// tokens. A token of no sequence counts on from the last one.
///
/// # Errors
/// As [`prepare_lens`].
pub fn prepare_position_ids<'a, I: Index>(
    stream: &Stream,
    cu_seqlens: TensorView<'a, I>,
    position_ids: TensorViewMut<'a, I>,
) -> Result<()> {
    of_tokens(stream, "prepare_position_ids", cu_seqlens, ("position_ids", position_ids), 1)
}

/// Of each token the number of its sequence, `[T]`: sequences without tokens are counted. All else as of [`prepare_position_ids`].
///
/// # Errors
/// As [`prepare_lens`].
pub fn prepare_sequence_ids<'a, I: Index>(
    stream: &Stream,
    cu_seqlens: TensorView<'a, I>,
    sequence_ids: TensorViewMut<'a, I>,
) -> Result<()> {
    of_tokens(stream, "prepare_sequence_ids", cu_seqlens, ("sequence_ids", sequence_ids), 2)
}

/// Checks the number of tokens; gives it.
///
/// # Errors
/// [`Error::Shape`] and [`Error::TooLarge`].
pub(crate) fn check_tokens(op: &'static str, cu_seqlens: &[usize], tokens: usize) -> Result<()> {
    let n = sequences(op, "cu_seqlens", cu_seqlens)?;
    let limit = i32::MAX as usize;
    if tokens > limit {
        return Err(Error::too_large(op, "tokens", format!("{tokens} tokens"), limit as u64));
    }
    if n == 0 && tokens > 0 {
        return Err(Error::shape(
            op,
            "cu_seqlens",
            cu_seqlens,
            "[N + 1], at least one sequence for the tokens",
        ));
    }
    Ok(())
}

fn of_tokens<'a, I: Index>(
    stream: &Stream,
    op: &'static str,
    cu_seqlens: TensorView<'a, I>,
    (name, mut out): (&'static str, TensorViewMut<'a, I>),
    kernel: usize,
) -> Result<()> {
    let mut params = start(op, "cu_seqlens", &cu_seqlens)?;
    let [tokens] = out.dims(op, name)?;
    check_tokens(op, cu_seqlens.shape(), tokens)?;
    plain(op, name, &out.alias())?;
    check_overlap(op, ("cu_seqlens", &cu_seqlens), (name, &out), Aliasing::Disjoint)?;
    if tokens == 0 {
        return Ok(());
    }
    params.tokens = tokens as u32;
    let kernel = stream.kernel(I::KERNELS[kernel])?;
    let mut launch = stream.launch(op);
    params.input_output(
        launch.input_address("cu_seqlens", &cu_seqlens)?,
        launch.output_address(name, &mut out)?,
    );
    // SAFETY: `out` has `tokens` elements, `cu_seqlens` `n + 1`; the kernel searches among the first n.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(tokens.div_ceil(THREADS)), &params) }
}
