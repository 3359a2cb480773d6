//! Scores of an indexer: `hip/logits.hip`.

use crate::kernels::logits::Params;
use crate::prefill::{DeviceFp8, check_fp8};
use bytemuck::Zeroable;
use hk_core::{
    Element, Error, KernelRef, Launch, LaunchConfig, Result, Stream, TensorView, TensorViewMut, check_aliases,
};

/// The entry points by the most columns, and the queries of a wave.
static DENSE: [(usize, usize, KernelRef<Params>); 3] = [
    (64, 2, Params::kernel("mqa_logits_64")),
    (128, 2, Params::kernel("mqa_logits_128")),
    (256, 1, Params::kernel("mqa_logits_256")),
];
/// Of pages of whole tiles, and of any number of tokens.
static PAGED: [(usize, [KernelRef<Params>; 2]); 3] = [
    (64, [Params::kernel("mqa_logits_paged_64"), Params::kernel("mqa_logits_tokens_64")]),
    (128, [Params::kernel("mqa_logits_paged_128"), Params::kernel("mqa_logits_tokens_128")]),
    (256, [Params::kernel("mqa_logits_paged_256"), Params::kernel("mqa_logits_tokens_256")]),
];

/// Threads of a block.
const THREADS: usize = 256;
/// Columns of keys are multiples of this.
const COLUMNS: usize = 16;
/// Chunks are multiples of this many keys.
const KEYS_OF_TILE: usize = 32;
/// Keys that a wave walks through at most; of pages.
const KEYS_OF_CHUNK: usize = 2048;
const KEYS_OF_PAGED_CHUNK: usize = 256;
/// Bytes between keys at most, of rows and of pages of whole tiles.
const MOST_STRIDE: i64 = 1 << 23;
/// Rows and columns that the kernels count.
pub(crate) const MOST: usize = (1 << 30) - 1;

/// What [`fp8_mqa_logits`] is made of.
#[derive(Debug, Clone, Copy)]
pub struct MqaLogitsInputs<'a, F: DeviceFp8> {
    /// Queries, `[Sq, H, D]`.
    pub q: TensorView<'a, F>,
    /// Keys, `[Sk, D]`.
    pub k: TensorView<'a, F>,
    /// Factors of keys, `[Sk]`.
    pub k_scale: TensorView<'a, f32>,
    /// Weights of heads, `[Sq, H]`.
    pub weights: TensorView<'a, f32>,
    /// The first key that a query sees, `[Sq]`.
    pub starts: TensorView<'a, i32>,
    /// The key behind the last one, `[Sq]`.
    pub ends: TensorView<'a, i32>,
}

/// Where the keys of a sequence are in a cache of keys of an indexer.
#[derive(Debug, Clone, Copy)]
pub enum IndexerPages<'a> {
    /// Token `t` of sequence `b` is token `t % tokens` of page `block_table[b, t / tokens]`: `[B, pages]`.
    Table(TensorView<'a, i32>),
    /// The same of page `indices[indptr[b] + t / tokens]`.
    Lists {
        /// `[B + 1]`
        indptr: TensorView<'a, i32>,
        /// Pages of all sequences, one after the other.
        indices: TensorView<'a, i32>,
    },
}

/// What [`pa_mqa_logits`] is made of.
#[derive(Debug, Clone, Copy)]
pub struct PagedMqaLogitsInputs<'a, F: DeviceFp8> {
    /// Queries, `[B, n, H, D]`.
    pub q: TensorView<'a, F>,
    /// Keys in pages, `[pages, tokens, D]`.
    pub k: TensorView<'a, F>,
    /// Their factors, `[pages, tokens]`: of a buffer of their own, or behind the keys of each page or token.
    pub k_scale: TensorView<'a, f32>,
    /// Weights of heads, `[B n, H]`.
    pub weights: TensorView<'a, f32>,
    /// Keys of sequences, `[B]`, those of the queries included.
    pub context_lens: TensorView<'a, i32>,
    /// Where they are.
    pub pages: IndexerPages<'a>,
}

fn check_columns(op: &'static str, shape: &[usize], columns: usize) -> Result<()> {
    if columns == 0 || columns > 256 || !columns.is_multiple_of(COLUMNS) {
        let want = format!("a multiple of {COLUMNS} columns, up to 256");
        return Err(Error::shape(op, "q", shape, want));
    }
    Ok(())
}

/// Checks rows of 16-byte accesses, and gives the strides of all axes but the last one, in bytes.
fn rows<'a, T: Element>(
    op: &'static str,
    launch: &mut Launch<'a>,
    arg: &'static str,
    view: &TensorView<'a, T>,
    align: u64,
) -> Result<(u64, Vec<i64>)> {
    view.expect_unit_stride(op, arg)?;
    view.expect_aligned(op, arg, align)?;
    let strides = view.strides();
    let of_rows = &strides[..strides.len() - 1];
    let bytes: Vec<i64> = of_rows.iter().map(|s| s.saturating_mul(size_of::<T>()) as i64).collect();
    for (axis, stride) in bytes.iter().enumerate() {
        if view.shape()[axis] > 1 && stride % align as i64 != 0 {
            let want = format!("rows on {align} bytes");
            return Err(Error::stride(op, arg, view.layout(), want));
        }
    }
    Ok((launch.input_address(arg, view)?, bytes))
}

fn vector<'a, T: Element>(
    op: &'static str,
    launch: &mut Launch<'a>,
    arg: &'static str,
    view: &TensorView<'a, T>,
    len: usize,
) -> Result<u64> {
    view.expect_shape(op, arg, [len])?;
    view.expect_contiguous(op, arg)?;
    view.expect_aligned(op, arg, size_of::<T>() as u64)?;
    launch.input_address(arg, view)
}

fn check_counts(op: &'static str, counts: &[(&'static str, usize)]) -> Result<()> {
    match counts.iter().find(|(_, n)| *n > MOST) {
        Some((arg, n)) => Err(Error::too_large(op, arg, format!("{n} rows"), MOST as u64)),
        None => Ok(()),
    }
}

/// Scores of an indexer, `out[i, j] = k_scale[j] sum_h weights[i, h] max(q[i, h] . k[j], 0)` for `starts[i] <= j < ends[i]`.
///
/// | arg              | shape         | dtype                 | layout                                             |
/// |------------------|---------------|-----------------------|----------------------------------------------------|
/// | `q`              | `[Sq, H, D]`  | the device's fp8 e4m3 | unit stride on `D`, other strides multiples of 16  |
/// | `k`              | `[Sk, D]`     | as `q`                | unit stride on `D`, rows on 16 bytes, 2^23 bytes apart at most |
/// | `k_scale`        | `[Sk]`        | `f32`                 | contiguous                                         |
/// | `weights`        | `[Sq, H]`     | `f32`                 | unit stride on `H`, any row stride                 |
/// | `starts`, `ends` | `[Sq]`        | `i32`                 | contiguous                                         |
/// | `out`            | `[Sq, Sk]`    | `f32`                 | unit stride on `Sk`, any row stride                |
///
/// `D` is a multiple of 16 up to 256. Sums are `f32`. Other cells are -inf if `clean`, else they are left as they are. Ranges are on the device:
/// what of them lies outside the keys is ignored. A product that is NaN counts as 0. Cells depend on their query and key alone.
///
/// One launch. `out` may not share memory with another tensor. Returns when it is queued.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table,
/// [`Unsupported`](Error::Unsupported) for the fp8 of another device, [`TooLarge`](Error::TooLarge) beyond 2^30 - 1 rows, [`Overlap`](Error::Overlap),
/// [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written then.
///
/// Source: DeepSeek-V3.2 technical report (2025), lightning indexer.
pub fn fp8_mqa_logits<'a, F: DeviceFp8>(
    stream: &'a Stream,
    inputs: MqaLogitsInputs<'a, F>,
    out: TensorViewMut<'a, f32>,
    clean: bool,
) -> Result<()> {
    const OP: &str = "fp8_mqa_logits";
    let MqaLogitsInputs { q, k, k_scale, weights, starts, ends } = inputs;
    let mut out = out;
    check_fp8(OP, "q", F::DTYPE, stream.device().arch())?;
    let [queries, heads, columns] = q.dims(OP, "q")?;
    let [keys, _] = k.dims(OP, "k")?;
    check_columns(OP, q.shape(), columns)?;
    k.expect_shape(OP, "k", [keys, columns])?;
    weights.expect_shape(OP, "weights", [queries, heads])?;
    out.expect_shape(OP, "out", [queries, keys])?;
    check_counts(OP, &[("q", queries), ("k", keys), ("q", heads)])?;
    check_aliases(
        OP,
        &[
            ("q", Some(&q)),
            ("k", Some(&k)),
            ("k_scale", Some(&k_scale)),
            ("weights", Some(&weights)),
            ("starts", Some(&starts)),
            ("ends", Some(&ends)),
        ],
        &[(("out", Some(&out)), &[])],
    )?;
    let mut launch = stream.launch(OP);
    let (q_data, q_strides) = rows(OP, &mut launch, "q", &q, 16)?;
    let (k_data, k_strides) = rows(OP, &mut launch, "k", &k, 16)?;
    if keys > 1 && k_strides[0] > MOST_STRIDE {
        return Err(Error::stride(OP, "k", k.layout(), format!("rows at most {MOST_STRIDE} bytes apart")));
    }
    let (weights_data, weights_strides) = rows(OP, &mut launch, "weights", &weights, 4)?;
    let k_scale = vector(OP, &mut launch, "k_scale", &k_scale, keys)?;
    let starts = vector(OP, &mut launch, "starts", &starts, queries)?;
    let ends = vector(OP, &mut launch, "ends", &ends, queries)?;
    let (out_data, out_row) = output(OP, &mut launch, &mut out)?;
    if queries == 0 || keys == 0 {
        return Ok(());
    }
    let (_, of_wave, kernel) = DENSE.into_iter().find(|(most, ..)| columns <= *most).unwrap_or(DENSE[2]);
    let info = stream.device().info();
    let groups = queries.div_ceil(of_wave * THREADS / info.wave_size as usize);
    // Fewer keys of a chunk where that keeps more CUs busy.
    let wanted = (2 * info.compute_units as usize).div_ceil(groups);
    let chunk = keys.div_ceil(wanted).next_multiple_of(KEYS_OF_TILE).min(KEYS_OF_CHUNK);
    let chunks = keys.div_ceil(chunk);
    let params = Params {
        q: q_data,
        k: k_data,
        k_scale,
        weights: weights_data,
        out: out_data,
        q_row: q_strides[0],
        q_head: q_strides[1],
        k_row: k_strides[0],
        weights_row: weights_strides[0],
        out_row,
        starts,
        ends,
        queries: queries as u32,
        of_sequence: 1,
        heads: heads as u32,
        columns: columns as u32,
        keys: keys as u32,
        chunks: chunks as u32,
        tiles_of_chunk: (chunk / tile_keys(info.wave_size)) as u32,
        clean: clean.into(),
        ..Params::zeroed()
    };
    let kernel = stream.kernel(kernel)?;
    // SAFETY: the checks above make the tensors as large as they count; ranges are clamped to the keys.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(groups * chunks), &params) }
}

/// Keys of a tile of a wave, `kDim` of the kernel.
fn tile_keys(wave_size: u32) -> usize {
    if wave_size == 64 { 32 } else { 16 }
}

fn output<'a>(
    op: &'static str,
    launch: &mut Launch<'a>,
    out: &mut TensorViewMut<'a, f32>,
) -> Result<(u64, i64)> {
    out.expect_unit_stride(op, "out")?;
    out.expect_aligned(op, "out", 4)?;
    let row = out.strides()[0].saturating_mul(4) as i64;
    Ok((launch.output_address("out", out)?, row))
}

/// The same of queries that are the last tokens of sequences in a paged cache: query `r` of `n` of sequence `b` sees the keys
/// `j <= context_lens[b] - n + r`.
///
/// | arg                 | shape           | dtype                 | layout                                            |
/// |---------------------|-----------------|-----------------------|---------------------------------------------------|
/// | `q`                 | `[B, n, H, D]`  | the device's fp8 e4m3 | contiguous but for the last two axes, on 16 bytes |
/// | `k`                 | `[pages, tokens, D]` | as `q`           | unit stride on `D`, other strides multiples of 4  |
/// | `k_scale`           | `[pages, tokens]` | `f32`               | any strides                                       |
/// | `weights`           | `[B n, H]`      | `f32`                 | unit stride on `H`, any row stride                |
/// | `context_lens`      | `[B]`           | `i32`                 | contiguous                                        |
/// | `block_table`       | `[B, width]`    | `i32`                 | unit stride on the pages, any row stride          |
/// | `indptr`, `indices` | `[B + 1]`, `[n]`| `i32`                 | contiguous                                        |
/// | `out`               | `[B n, max_len]`| `f32`                 | unit stride on the keys, any row stride           |
///
/// Cells that their query does not see are -inf if `clean`, else they are left as they are. Lengths and pages are on the device and are not
/// trusted: keys from `max_len` on are ignored; a key whose page the table or the cache does not have is NaN.
///
/// # Errors
/// As [`fp8_mqa_logits`].
pub fn pa_mqa_logits<'a, F: DeviceFp8>(
    stream: &'a Stream,
    inputs: PagedMqaLogitsInputs<'a, F>,
    out: TensorViewMut<'a, f32>,
    clean: bool,
) -> Result<()> {
    const OP: &str = "pa_mqa_logits";
    let PagedMqaLogitsInputs { q, k, k_scale, weights, context_lens, pages } = inputs;
    let mut out = out;
    check_fp8(OP, "q", F::DTYPE, stream.device().arch())?;
    let [sequences, of_sequence, heads, columns] = q.dims(OP, "q")?;
    let queries = sequences.saturating_mul(of_sequence);
    let [n_pages, page_tokens, _] = k.dims(OP, "k")?;
    let [_, keys] = out.dims(OP, "out")?;
    check_columns(OP, q.shape(), columns)?;
    if page_tokens == 0 {
        return Err(Error::empty(OP, "k", 1, k.shape()));
    }
    k.expect_shape(OP, "k", [n_pages, page_tokens, columns])?;
    k_scale.expect_shape(OP, "k_scale", [n_pages, page_tokens])?;
    weights.expect_shape(OP, "weights", [queries, heads])?;
    out.expect_shape(OP, "out", [queries, keys])?;
    let counts = [("q", queries), ("out", keys), ("q", heads), ("k", n_pages), ("k", page_tokens)];
    check_counts(OP, &counts)?;
    let (table, indptr) = match &pages {
        IndexerPages::Table(table) => (("block_table", table), None),
        IndexerPages::Lists { indptr, indices } => (("indices", indices), Some(indptr)),
    };
    check_aliases(
        OP,
        &[
            ("q", Some(&q)),
            ("k", Some(&k)),
            ("k_scale", Some(&k_scale)),
            ("weights", Some(&weights)),
            ("context_lens", Some(&context_lens)),
            (table.0, Some(table.1)),
            ("indptr", indptr.map(|v| v as _)),
        ],
        &[(("out", Some(&out)), &[])],
    )?;
    let mut launch = stream.launch(OP);
    let (q_data, q_strides) = rows(OP, &mut launch, "q", &q, 16)?;
    if sequences > 1 && q_strides[0] != of_sequence as i64 * q_strides[1] {
        return Err(Error::stride(OP, "q", q.layout(), "sequences one after the other"));
    }
    let (k_data, k_strides) = rows(OP, &mut launch, "k", &k, 4)?;
    k_scale.expect_aligned(OP, "k_scale", 4)?;
    let of_scales = |axis: usize| k_scale.strides()[axis].saturating_mul(4) as i64;
    let (weights_data, weights_strides) = rows(OP, &mut launch, "weights", &weights, 4)?;
    let lens = vector(OP, &mut launch, "context_lens", &context_lens, sequences)?;
    let mut params = Params::zeroed();
    match &pages {
        IndexerPages::Table(table) => {
            let [of, width] = table.dims(OP, "block_table")?;
            if of != sequences {
                let want = format!("[{sequences}, pages] (sequences of q)");
                return Err(Error::shape(OP, "block_table", table.shape(), want));
            }
            check_counts(OP, &[("block_table", width)])?;
            table.expect_unit_stride(OP, "block_table")?;
            table.expect_aligned(OP, "block_table", 4)?;
            (params.table_row, params.table_width) = (table.strides()[0] as i64, width as u32);
            params.table = launch.input_address("block_table", table)?;
        }
        IndexerPages::Lists { indptr, indices } => {
            let [n] = indices.dims(OP, "indices")?;
            check_counts(OP, &[("indices", n)])?;
            params.table_starts = vector(OP, &mut launch, "indptr", indptr, sequences + 1)?;
            params.table = vector(OP, &mut launch, "indices", indices, n)?;
            params.table_width = n as u32;
        }
    }
    let (out_data, out_row) = output(OP, &mut launch, &mut out)?;
    if queries == 0 || keys == 0 {
        return Ok(());
    }
    let info = stream.device().info();
    let of_block = KEYS_OF_PAGED_CHUNK * THREADS / info.wave_size as usize;
    let chunks = keys.div_ceil(of_block);
    params = Params {
        q: q_data,
        k: k_data,
        k_scale: launch.input_address("k_scale", &k_scale)?,
        weights: weights_data,
        out: out_data,
        q_row: q_strides[1],
        q_head: q_strides[2],
        k_row: k_strides[0],
        k_token: k_strides[1],
        scale_page: of_scales(0),
        scale_token: of_scales(1),
        weights_row: weights_strides[0],
        out_row,
        lens,
        n_pages: n_pages as u32,
        page_tokens: page_tokens as u32,
        page_inverse: u32::MAX / page_tokens as u32,
        queries: queries as u32,
        of_sequence: of_sequence as u32,
        heads: heads as u32,
        columns: columns as u32,
        keys: keys as u32,
        chunks: chunks as u32,
        tiles_of_chunk: (KEYS_OF_PAGED_CHUNK / tile_keys(info.wave_size)) as u32,
        clean: clean.into(),
        ..params
    };
    let (_, [of_tiles, of_tokens]) = PAGED.into_iter().find(|(most, _)| columns <= *most).unwrap_or(PAGED[2]);
    let near = params.k_token.max(params.scale_token) <= MOST_STRIDE;
    let whole = page_tokens.is_multiple_of(tile_keys(info.wave_size)) && near;
    let kernel = stream.kernel(if whole { of_tiles } else { of_tokens })?;
    // SAFETY: the checks above make the tensors as large as they count; lengths are clamped to the columns of the output, pages to the cache.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(sequences * chunks), &params) }
}
