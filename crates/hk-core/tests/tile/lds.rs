//! Tiles in LDS through `hk/{shared,sums,pipeline}.h`: what lands where, and in how many clocks.

use super::{Random, open, streams};
use crate::common;
use bytemuck::{Pod, Zeroable};
use hk_core::{
    Arch, CodeObjects, Details, Fp8E4M3, Fp8E4M3Fnuz, GlobalLayout, KernelRef, LaunchConfig, Stream, bf16,
    f16,
};
use std::sync::LazyLock;

static TILE: LazyLock<&'static CodeObjects> = LazyLock::new(|| common::compile("tile"));

/// The parameters of the kernels in `tests/hip/tile.hip`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Params {
    x: GlobalLayout,
    w: GlobalLayout,
    y: GlobalLayout,
    args: Args,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Args {
    layout: RowLayout,
    rows: u32,
    end: u32,
    from: u32,
    factor: u32,
    read: u32,
    count: u32,
}

/// Where rows are: from one to the next among 16, from 16 to the next 16, and 16 << spread from a chunk to the next.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct RowLayout {
    row: i64,
    block: i64,
    spread: u32,
    pad: u32,
}

impl RowLayout {
    const fn by_rows(stride: usize) -> RowLayout {
        RowLayout { row: stride as i64, block: 16 * stride as i64, spread: 0, pad: 0 }
    }

    /// A chunk of each of 16 rows side by side, of rows of `chunks`.
    const fn shuffled(chunks: usize) -> RowLayout {
        RowLayout { row: 16, block: 256 * chunks as i64, spread: 4, pad: 0 }
    }

    fn at(self, row: usize, byte: usize) -> usize {
        let of_row = row / 16 * self.block as usize + row % 16 * self.row as usize;
        of_row + ((byte / 16 * 16) << self.spread) + byte % 16
    }
}

const READ: Args =
    Args { layout: RowLayout::by_rows(0), rows: 0, end: 0, from: 0, factor: 1, read: 1, count: 1 };

/// What a kernel writes; `x` from byte `skip` on.
fn run(stream: &Stream, kernel: &str, x: &[u8], skip: usize, w: &[u32], bytes: usize, args: Args) -> Vec<u8> {
    run_grid(stream, kernel, x, skip, w, bytes, args, 1)
}

#[expect(clippy::too_many_arguments, reason = "a launch has as many")]
fn run_grid(
    stream: &Stream,
    kernel: &str,
    x: &[u8],
    skip: usize,
    w: &[u32],
    bytes: usize,
    args: Args,
    grid: usize,
) -> Vec<u8> {
    let (x_buffer, w_buffer) = (stream.upload(x).unwrap(), stream.upload(w).unwrap());
    let mut y = stream.upload(&vec![0xa5u8; bytes]).unwrap();
    let kernel = stream.kernel(KernelRef::new(*TILE, common::leak(kernel.to_owned()))).unwrap();
    let mut launch = stream.launch("tile");
    let x_view = x_buffer.view([x.len()]).unwrap();
    let params = Params {
        x: launch.input("x", &x_view.slice(0, skip..x.len()).unwrap()).unwrap(),
        w: launch.input("w", &w_buffer.view([w.len()]).unwrap()).unwrap(),
        y: launch.output("y", &mut y.view_mut([bytes]).unwrap()).unwrap(),
        args,
    };
    // SAFETY: the parameters are the kernel's, and each tensor has what its threads access.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(grid), &params) }.unwrap();
    stream.download(&y).unwrap()
}

fn arch(stream: &Stream) -> Arch {
    stream.device().info().arch
}

fn random_bytes(seed: u64, n: usize) -> Vec<u8> {
    let mut random = Random(seed);
    (0..n).map(|_| random.bits() as u8).collect()
}

/// 64 rows of `bytes`, as fragments of `dim` rows: those of each `dim` rows in turn, lane after lane.
fn as_fragments(rows: &[u8], bytes: usize, dim: usize) -> Vec<u8> {
    let groups = 64 / dim;
    let mut all = vec![];
    for first in (0..64).step_by(dim) {
        for step in 0..bytes / (16 * groups) {
            for lane in 0..64 {
                let at = (first + lane % dim) * bytes + (step * groups + lane / dim) * 16;
                all.extend_from_slice(&rows[at..at + 16]);
            }
        }
    }
    all
}

#[test]
fn fragments_are_of_rows() {
    for stream in streams() {
        for (bytes, dim) in [(64, 16), (64, 32), (128, 16), (128, 32)] {
            let rows = random_bytes(1, 64 * bytes);
            let fragments = as_fragments(&rows, bytes, dim);
            for kind in ["fragments", "fragments_unswizzled"] {
                let kernel = format!("{kind}_{bytes}_{dim}");
                let got = run(&stream, &kernel, &rows, 0, &[0], rows.len(), READ);
                assert_eq!(got, fragments, "{kernel} on {}", arch(&stream));
            }
            let kernel = format!("fragment_writes_{bytes}_{dim}");
            let got = run(&stream, &kernel, &fragments, 0, &[0], rows.len(), READ);
            assert_eq!(got, rows, "{kernel} on {}", arch(&stream));
        }
    }
}

/// A tile's columns as rows of operands, over its rows in order or as they are in sums.
#[test]
fn fragments_are_of_columns() {
    for stream in streams() {
        for (kernel, dim, of_sums) in [
            ("columns_16", 16, false),
            ("columns_32", 32, false),
            ("columns_16_of_sums", 16, true),
            ("columns_32_of_sums", 32, true),
        ] {
            let x: Vec<u16> = (0..64 * 64).collect();
            let got = run(&stream, kernel, bytemuck::cast_slice(&x), 0, &[0], 64 * 128 + 64 * 4, READ);
            let (got, columns) = got.split_at(64 * 128);
            let columns: &[u32] = bytemuck::cast_slice(columns);
            // Where a lane has neighbouring columns, these are of different operands.
            let operands = 64 / dim;
            let column =
                |i: usize| if arch(&stream) == Arch::Gfx950 { i } else { i % dim * operands + i / dim };
            assert_eq!(columns, (0..64).map(|i| column(i) as u32).collect::<Vec<_>>(), "{kernel}");
            let groups = 64 / dim;
            for (at, got) in bytemuck::cast_slice::<u8, u16>(got).iter().enumerate() {
                let (i, lane, j, first) =
                    (at % 8, at / 8 % 64, at / 512 % operands, at / 512 / operands * 8 * groups);
                let of_lane =
                    if of_sums { i / 4 * 4 * groups + lane / dim * 4 + i % 4 } else { lane / dim * 8 + i };
                let want = (first + of_lane) * 64 + column(j * dim + lane % dim);
                assert_eq!(usize::from(*got), want, "{kernel} on {}, lane {lane}, {i} of {j}", arch(&stream));
            }
        }
    }
}

/// Clocks of LDS, and those of them that conflicts cost.
fn clocks(stream: &Stream, f: impl FnOnce(&Stream)) -> (u64, u64) {
    stream.take_counters().unwrap();
    f(stream);
    let Details { lds_clocks, lds_conflict_clocks, .. } =
        stream.take_counters().unwrap().unwrap().details.unwrap();
    (lds_clocks, lds_conflict_clocks)
}

/// The same of what a kernel does up to its first reads of LDS, and of those.
fn clocks_of_writes_and_reads(stream: &Stream, kernel: &str, x: &[u8], args: Args) -> [(u64, u64); 2] {
    let of = |read| clocks(stream, |s| drop(run(s, kernel, x, 0, &[0], x.len(), Args { read, ..args })));
    let (without, with) = (of(0), of(1));
    [without, (with.0 - without.0, with.1 - without.1)]
}

/// Reads and writes of 16 bytes a lane take as many clocks as their bytes fill all banks. Without a swizzle, or one that is
/// not for fragments, they take more.
#[test]
fn tiles_have_no_bank_conflicts() {
    for target in Arch::AMD {
        let stream = open(&format!("emu:{target}?details=true"));
        // Banks of 4 bytes.
        let (of_write, of_read) = (32 * 4, if target == Arch::Gfx950 { 64 * 4 } else { 32 * 4 });
        for (bytes, dim) in [(64, 16), (64, 32), (128, 16), (128, 32)] {
            let rows = random_bytes(2, 64 * bytes as usize);
            let all = 64 * bytes;
            let of = |kernel: &str| {
                clocks_of_writes_and_reads(&stream, &format!("{kernel}_{bytes}_{dim}"), &rows, READ)
            };

            let [writes, reads] = of("fragments");
            println!(
                "{target}, {dim} rows of {bytes} bytes: {} of {all} bytes written, {} read",
                writes.0, reads.0
            );
            assert_eq!(writes, (all / of_write, 0), "lanes side by side, {bytes} bytes a row, on {target}");
            assert_eq!(reads, (all / of_read, 0), "fragments of {dim} rows of {bytes} bytes on {target}");

            let [writes, _] = of("fragment_writes");
            assert_eq!(writes, (all / of_write, 0), "fragments of {dim} rows of {bytes} bytes on {target}");

            // Lanes of as many rows meet as their chunks are on the same banks.
            let [writes, reads] = of("fragments_unswizzled");
            println!("{target}, {dim} rows of {bytes} bytes, unswizzled: {} clocks", reads.0);
            assert_eq!(writes, (all / of_write, 0));
            let times = match (target, bytes, dim) {
                (Arch::Gfx942, 64, 16) | (Arch::Gfx950, 64, 16) => 2,
                (Arch::Gfx942, 128, 32) | (Arch::Gfx950, 128, 32) => 8,
                _ => 4,
            };
            assert_eq!(reads.0, times * all / of_read, "{dim} rows of {bytes} bytes on {target}");
            assert_eq!(reads.1, (times - 1) * all / of_read);
        }
    }
}

/// Reads of columns fill all banks, too: 8 bytes of a lane, or 4 where 32 of them have a row.
#[test]
fn columns_have_no_bank_conflicts() {
    for target in Arch::AMD {
        let stream = open(&format!("emu:{target}?details=true"));
        for kernel in ["columns_16", "columns_32", "columns_16_of_sums", "columns_32_of_sums"] {
            let x = random_bytes(10, 64 * 128 + 64 * 4);
            let [writes, reads] = clocks_of_writes_and_reads(&stream, kernel, &x, READ);
            println!("{target}, {kernel}: {} clocks for 8192 bytes", reads.0);
            assert_eq!(writes, (64, 0));
            let of_clock = if target == Arch::Gfx950 { 64 * 4 } else { 32 * 4 };
            assert_eq!(reads, (64 * 128 / of_clock, 0), "{kernel} on {target}");
        }
    }
}

/// Accumulators are stored 8 bytes of 16 rows at a time, on one half of the banks: two-way bank conflicts.
#[test]
fn accumulator_stores_have_two_way_bank_conflicts() {
    for target in Arch::AMD {
        let stream = open(&format!("emu:{target}?details=true"));
        let of_read = if target == Arch::Gfx950 { 64 * 4 } else { 32 * 4 };
        for (kernel, dim, cols, bytes) in [
            ("bf16_16", 16, 64, 128),
            ("bf16_32", 32, 64, 128),
            ("f16_16", 16, 32, 64),
            ("f16_32", 32, 32, 64),
        ] {
            let x = vec![0; (128 + cols) * bytes];
            let of = |read| {
                let args = Args { read, ..READ };
                let kernel = format!("chain_{kernel}");
                clocks(&stream, |s| drop(run(s, &kernel, &x, 0, &[0], 2 * 64 * 64 * 4, args)))
            };
            // With `read`, the sums go to LDS, and both operands' fragments from there once.
            let (without, with) = (of(0), of(1));
            let (sums, fragments) = (64 * bytes as u64 / (32 * 4), 2 * 64 * bytes as u64 / of_read);
            println!("{target}, {kernel}: {} clocks for sums, {dim} rows", with.0 - without.0 - fragments);
            assert_eq!(with.0 - without.0, 2 * sums + fragments, "{kernel} on {target}");
            assert_eq!(with.1 - without.1, sums, "{kernel} on {target}");
        }
    }
}

/// Small values of a type, as bytes.
fn encode(kind: &str, target: Arch, v: i32) -> Vec<u8> {
    let v = v as f32;
    match kind {
        "bf16" => bf16::from_f32(v).to_le_bytes().to_vec(),
        "f16" => f16::from_f32(v).to_le_bytes().to_vec(),
        _ if target == Arch::Gfx942 => vec![Fp8E4M3Fnuz::from_f32(v).0],
        _ => vec![Fp8E4M3::from_f32(v).0],
    }
}

/// v (w x^T), the first product being an operand of the second: without a move, v by rows or by columns, and by LDS.
#[test]
fn accumulators_are_an_operand_of_the_next_mma() {
    for stream in streams() {
        for (kind, dim, bytes) in [
            ("bf16", 16, 128),
            ("bf16", 32, 128),
            ("f16", 16, 64),
            ("f16", 32, 64),
            ("fp8", 16, 128),
            ("fp8", 32, 64),
        ] {
            let cols = if kind == "fp8" { bytes } else { bytes / 2 };
            let mut random = Random(3);
            let mut matrix =
                |rows: usize| (0..rows * cols).map(|_| random.below(5) as i32 - 2).collect::<Vec<_>>();
            let (x, v) = (matrix(64), matrix(64));
            // Each row of w is one column of x, twice: sums of all types stay small.
            let w: Vec<i32> =
                (0..cols * cols).map(|i| i32::from(i % cols == (5 * (i / cols) + 3) % cols) * 2).collect();
            let data: Vec<u8> =
                [&x, &w, &v].into_iter().flatten().flat_map(|&v| encode(kind, arch(&stream), v)).collect();
            let kernel = format!("chain_{kind}_{dim}");
            let ways = if kind == "fp8" { 2 } else { 3 };
            let got = run(&stream, &kernel, &data, 0, &[0], ways * 64 * 64 * 4, Args { read: 2, ..READ });
            let got: &[f32] = bytemuck::cast_slice(&got);
            let dot = |a: &[i32], b: &[i32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<i32>();
            for m in 0..64 {
                let x = &x[m * cols..][..cols];
                let d: Vec<i32> = w.chunks(cols).map(|w| dot(w, x)).collect();
                for (i, v) in v.chunks(cols).enumerate() {
                    let at = m * 64 + i;
                    let want = dot(v, &d) as f32;
                    let got: Vec<f32> = got.iter().skip(at).step_by(64 * 64).copied().collect();
                    assert_eq!(got, vec![want; ways], "{kernel} on {}, y[{m}, {i}]", arch(&stream));
                }
            }
        }
    }
}

/// A stage of 128 rows: of rows of `x`, of `end` bytes; zeros where there is none.
fn stage(x: &[u8], bytes: usize, args: Args) -> Vec<u8> {
    let mut stage = vec![0; 128 * bytes];
    for row in 0..128 {
        let of_x = row * args.factor as usize;
        for i in 0..bytes {
            let at = args.from as usize + i;
            if of_x < args.rows as usize && at < args.end as usize {
                stage[row * bytes + i] = x[args.layout.at(of_x, at)];
            }
        }
    }
    stage
}

/// Whole tiles; tails of rows and of their ends; a stage beyond the end; rows apart from each other, and
/// shuffled.
#[test]
fn movers_load_rows() {
    let mut random = Random(4);
    for stream in streams() {
        for bytes in [64usize, 128] {
            for kind in ["vectors", "elements1", "elements2"] {
                // What ends, strides and first bytes are multiples of.
                let unit = match kind {
                    "vectors" => 16,
                    "elements2" => 2,
                    _ => 1,
                };
                for case in 0..8 {
                    let whole = case == 0;
                    let rows = if whole { 128 } else { 1 + random.below(150) };
                    let end = if whole { bytes } else { unit * (1 + random.below(3 * bytes / unit)) };
                    let stride = end + if whole { 0 } else { unit * random.below(4) };
                    let shuffled = case % 3 == 2;
                    let layout = if shuffled {
                        RowLayout::shuffled(end.div_ceil(16))
                    } else {
                        RowLayout::by_rows(stride)
                    };
                    let from = if whole { 0 } else { bytes * random.below(end / bytes + 2) };
                    let factor = if whole { 1 } else { 1 + random.below(3) as u32 };
                    let skip = if whole { 0 } else { unit * random.below(5) };
                    let args = Args {
                        layout,
                        rows: rows as u32,
                        end: end as u32,
                        from: from as u32,
                        factor,
                        ..READ
                    };
                    // Beyond the last row's end there is nothing that may be read.
                    let x = random_bytes(case, skip + layout.at(rows - 1, end - 1) + 1);
                    let want = stage(&x[skip..], bytes, args);
                    let copies = if kind == "vectors" && arch(&stream) == Arch::Gfx950 { 2 } else { 1 };
                    let kernel = format!("move_{kind}_{bytes}");
                    let got = run(&stream, &kernel, &x, skip, &[0], copies * want.len(), args);
                    for got in got.chunks(want.len()) {
                        let differs = got.iter().zip(&want).position(|(a, b)| a != b);
                        assert_eq!(differs, None, "{kernel} on {}, case {case}", arch(&stream));
                    }
                }
            }
        }
    }
}

/// Matrices of 16-bit elements with contiguous columns or any strides, and slices of their columns.
#[test]
fn movers_load_16_bit_elements() {
    let mut random = Random(8);
    for stream in streams() {
        for (kernel, tile_rows) in [
            ("move_transposed_64", 64),
            ("move_transposed_128", 128),
            ("move_transposed_part", 128),
            ("move_ragged", 128),
            ("move_strided", 128),
        ] {
            for case in 0..6 {
                let whole = case == 0;
                let (unit, part) = match kernel {
                    "move_strided" => (1, false),
                    "move_ragged" => (1, true),
                    _ => (4, kernel == "move_transposed_part"),
                };
                let rows = if whole { tile_rows } else { unit * (1 + random.below(150 / unit)) };
                let columns = if whole { 32 } else { 1 + random.below(100) };
                let from = if whole { 0 } else { random.below(columns / 32 + 2) * 32 };
                let begin = if part && !whole { random.below(columns) } else { 0 };
                // Elements from a row to the next, and from a column.
                let (row, column) = match kernel {
                    "move_strided" => (2, 2 * rows + random.below(4)),
                    "move_ragged" => (columns.next_multiple_of(8) + 8 * random.below(2), 1),
                    _ => (1, rows + unit * random.below(3)),
                };
                let (first, second) =
                    if kernel.contains("transposed") { (column, row) } else { (row, column) };
                let args = Args {
                    layout: RowLayout { row: 2 * first as i64, block: 2 * second as i64, spread: 0, pad: 0 },
                    rows: rows as u32,
                    end: 2 * columns as u32,
                    from: 2 * from as u32,
                    factor: 2 * begin as u32,
                    ..READ
                };
                // Ragged rows are parts of whole chunks.
                let in_memory = if kernel == "move_ragged" { columns.next_multiple_of(8) } else { columns };
                let x: Vec<u16> =
                    (0..(rows - 1) * row + (in_memory - 1) * column + 1).map(|i| i as u16 + 1).collect();
                let element = |at: usize| {
                    let (r, c) = (at / 32, from + at % 32);
                    if r < rows && (begin..columns).contains(&c) { x[r * row + c * column] } else { 0 }
                };
                let want: Vec<u16> = (0..tile_rows * 32).map(element).collect();
                let got = run(&stream, kernel, bytemuck::cast_slice(&x), 0, &[0], 2 * want.len(), args);
                let got: &[u16] = bytemuck::cast_slice(&got);
                assert_eq!(got, want, "{kernel} on {}, case {case}", arch(&stream));
            }
        }
    }
}

/// Rows of codes, half as long as the tile's.
#[test]
fn movers_decode() {
    let mut random = Random(9);
    for stream in streams() {
        for kind in ["vectors", "elements"] {
            for case in 0..6 {
                let (whole, unit) = (case == 0, if kind == "vectors" { 16 } else { 1 });
                let rows = if whole { 128 } else { 1 + random.below(150) };
                let end = if whole { 32 } else { unit * (1 + random.below(100 / unit)) };
                let from = if whole { 0 } else { 32 * random.below(end / 32 + 2) };
                let layout = match case % 3 {
                    2 => RowLayout::shuffled(end.div_ceil(16)),
                    _ => RowLayout::by_rows(end + unit * random.below(3)),
                };
                let args = Args { layout, rows: rows as u32, end: end as u32, from: from as u32, ..READ };
                let x = random_bytes(case, layout.at(rows - 1, end - 1) + 1);
                let half = |at: usize| {
                    let (r, c) = (at / 32, from + at % 32);
                    let code = if r < rows && c < end { x[layout.at(r, c)] } else { 0 };
                    (usize::from(code) + r * 256 + from) as u16
                };
                let want: Vec<u16> = (0..128 * 32).map(half).collect();
                let kernel = format!("move_decoded_{kind}");
                let got = run(&stream, &kernel, &x, 0, &[0], 2 * want.len(), args);
                let got: &[u16] = bytemuck::cast_slice(&got);
                assert_eq!(got, want, "{kernel} on {}, case {case}", arch(&stream));
            }
        }
    }
}

/// What a mover writes to LDS fills all banks, by registers and straight from global memory.
#[test]
fn movers_have_no_bank_conflicts() {
    for target in Arch::AMD {
        let stream = open(&format!("emu:{target}?details=true"));
        for bytes in [64u32, 128] {
            let all = 128 * bytes;
            let args =
                Args { layout: RowLayout::by_rows(bytes as usize), rows: 128, end: bytes, read: 0, ..READ };
            let x = random_bytes(5, all as usize);
            let of = |kind: &str, count| {
                let kernel = format!("move_{kind}_{bytes}");
                clocks(&stream, |s| drop(run(s, &kernel, &x, 0, &[0], x.len(), Args { count, ..args })))
            };
            let (by_registers, elements) = (of("vectors", 0), of("elements1", 0));
            let direct = of("vectors", 1).0 - by_registers.0;
            println!("{target}: {} clocks for {all} bytes, {direct} straight from memory", by_registers.0);
            assert_eq!([by_registers, elements], [(u64::from(all) / 128, 0); 2], "{target}");
            assert_eq!(of("vectors", 1).1, 0, "{target}");
            assert_eq!(direct, if target == Arch::Gfx950 { u64::from(all) / 128 } else { 0 }, "{target}");
        }
        for (kernel, rows) in
            [("transposed_64", 64), ("transposed_128", 128), ("strided", 128), ("decoded_vectors", 128)]
        {
            let all = rows * 64;
            let mut layout = RowLayout::by_rows(2 * rows);
            if kernel == "strided" {
                layout.block = 2;
            }
            let args = Args { layout, rows: rows as u32, end: 64, read: 0, ..READ };
            let x = random_bytes(5, 4 * all);
            let kernel = format!("move_{kernel}");
            let of = clocks(&stream, |s| drop(run(s, &kernel, &x, 0, &[0], all, args)));
            println!("{target}, {kernel}: {} clocks for {all} bytes", of.0);
            assert_eq!(of, (all as u64 / 128, 0), "{kernel} on {target}");
        }
    }
}

#[test]
fn packed_scales_go_with_their_rows() {
    for stream in streams() {
        for (rows, end, from) in
            [(128usize, 256usize, 0), (70, 256, 64), (41, 512, 128), (1, 200, 192), (128, 128, 128)]
        {
            let factor = 2;
            let args =
                Args { rows: rows as u32, end: end as u32, from: from as u32, factor: factor as u32, ..READ };
            let words = |n: usize, first: u32| (0..n as u32).map(|i| first + i).collect::<Vec<u32>>();
            // A word of x's rows for each 64 bytes, of w's for each 128.
            let (x, w) =
                (words(rows * end.div_ceil(64), 1), words(rows * factor * end.div_ceil(128), 1 << 20));
            let got = run(&stream, "move_words", bytemuck::cast_slice(&x), 0, &w, 2 * 198 * 4, args);
            let there = |row: usize| row < rows && from < end;
            let want = (0..128).map(|row| if there(row) { x[from / 64 * rows + row] } else { 0 });
            let of_w = |row: usize| w[from / 128 * rows * factor + row * factor];
            let want =
                want.chain((0..70).map(|row| if there(row) { of_w(row) } else { 0 })).collect::<Vec<u32>>();
            for got in bytemuck::cast_slice::<u8, u32>(&got).chunks(198) {
                assert_eq!(got, want, "{rows} rows, from {from} of {end} on {}", arch(&stream));
            }
        }
    }
}

/// Rows of stages from the first one on, the last without its tail, with a word for each row and stage.
struct Rows {
    rows: usize,
    first: usize,
    end: usize,
    x: Vec<u8>,
    words: Vec<u32>,
}

/// How many stages, bytes of the last one that are past the rows' end, stages before the first.
const STAGES: [(usize, usize, usize); 9] =
    [(0, 0, 0), (1, 0, 0), (1, 48, 1), (2, 0, 0), (3, 16, 0), (4, 0, 2), (5, 0, 0), (6, 32, 1), (7, 0, 0)];

impl Rows {
    fn new(rows: usize, (count, tail, first): (usize, usize, usize)) -> Rows {
        let end = (first + count) * 64 - tail;
        let words = (0..((first + count) * rows).max(1) as u32).map(|i| i + 1).collect();
        Rows { rows, first, end, x: random_bytes(6, rows * end.max(16)), words }
    }

    fn args(&self, rows_of_tile: u32, count: usize) -> Args {
        Args {
            layout: RowLayout::by_rows(self.end.max(16)),
            rows: rows_of_tile,
            end: self.end as u32,
            from: (self.first * 64) as u32,
            count: count as u32,
            ..READ
        }
    }

    /// The rows of a stage and then their packed scales, zeros past the end.
    fn stage(&self, i: usize) -> Vec<u8> {
        let (from, stride) = ((self.first + i) * 64, self.end.max(16));
        let byte =
            |row: usize, i: usize| if from + i < self.end { self.x[row * stride + from + i] } else { 0 };
        let word =
            |row: usize| if from < self.end { self.words[(self.first + i) * self.rows + row] } else { 0 };
        let bytes = (0..self.rows * 64).map(|at| byte(at / 64, at % 64));
        bytes.chain((0..self.rows).flat_map(|row| word(row).to_le_bytes())).collect()
    }
}

/// Every stage once, in order, in turns; then the end. Under all checks: no wave reads what another is writing, none reads
/// ahead of its loads.
#[test]
fn pipelines_give_every_stage_in_order() {
    // Of a stage: 64 rows of x, 32 of w, of 64 bytes; their packed scales; the turn and 12 bytes that nothing writes.
    const ROWS: usize = 96;
    const STAGE: usize = ROWS * 64 + ROWS * 4;
    for target in Arch::AMD {
        let stream = open(&format!("emu:{target}?sanitize=all"));
        let direct = target == Arch::Gfx950;
        for (kernel, step, turns) in [
            ("pipeline_registers_1", 1, 2),
            ("pipeline_registers_2", 2, 2),
            ("pipeline_registers_1_in_4", 1, 4),
            ("pipeline_registers_2_in_4", 2, 4),
            ("pipeline_target_3_1", 1, if direct { 1 } else { 2 }),
            ("pipeline_target_5_2", 2, if direct { 1 } else { 2 }),
        ] {
            for stages in STAGES {
                let (count, rows) = (stages.0, Rows::new(ROWS, stages));
                // All turns of a round, and no more, for which there is no room.
                let bytes = count.next_multiple_of(step * turns) * (STAGE + 16);
                let got = run(&stream, kernel, &rows.x, 0, &rows.words, bytes, rows.args(64, count));
                for (i, got) in got.chunks_exact(STAGE + 16).enumerate() {
                    let at = format!("stage {i} of {count}, {kernel} on {target}");
                    assert!(got[..STAGE] == rows.stage(i), "{at}");
                    assert_eq!(got[STAGE] as usize, i / step % turns, "{at}: the turn");
                }
            }
        }
    }
}

/// Both halves of a block get every stage, in order, under all checks; while one reads, the other multiplies.
#[test]
fn ping_pong_gives_every_stage_to_both_halves() {
    const ROWS: usize = 256;
    const STAGE: usize = ROWS * 64 + ROWS * 4;
    for target in Arch::AMD {
        let stream = open(&format!("emu:{target}?sanitize=all"));
        let direct = target == Arch::Gfx950;
        for (kernel, step) in [
            ("ping_pong_registers_1", 1),
            ("ping_pong_target_3_1", 1),
            ("ping_pong_target_5_1", 1),
            ("ping_pong_target_6_2", if direct { 2 } else { 1 }),
        ] {
            // By registers, two steps at a time.
            let round = if direct && kernel.contains("target") { step } else { 2 * step };
            for stages in STAGES.into_iter().step_by(2) {
                let (count, rows) = (stages.0, Rows::new(ROWS, stages));
                let all = count.next_multiple_of(round);
                let args = Args { factor: all as u32, ..rows.args(128, count) };
                // At the end is the clock.
                let bytes = 2 * all * (STAGE + 16) + 16;
                let got = run(&stream, kernel, &rows.x, 0, &rows.words, bytes, args);
                let begin = u32::from_le_bytes([0xa5; 4]);
                for (i, got) in got.chunks_exact(STAGE + 16).enumerate() {
                    let (stage, half) = (i / 2, i % 2);
                    let at = format!("stage {stage} of {count}, half {half}, {kernel} on {target}");
                    assert!(got[..STAGE] == rows.stage(stage), "{at}");
                    // First one half reads; then there are two events at a time, one of each half, in any order.
                    let times: &[u32] = bytemuck::cast_slice(&got[STAGE..STAGE + 8]);
                    let turns = [times[0], times[1]].map(|time| (time - begin).div_ceil(2) as usize);
                    let turn = 2 * (stage / step) + half;
                    assert_eq!(turns, [turn, turn + 1], "{at}");
                }
            }
        }
    }
}

/// Every task once, whatever the grid; those of an XCD are neighbours, in order.
#[test]
fn tasks_of_an_xcd_are_neighbours() {
    const XCDS: usize = 8;
    const GRIDS: usize = 333;
    for stream in streams() {
        let args = Args { rows: GRIDS as u32, ..READ };
        let got = run_grid(&stream, "tasks_by_xcd", &[0], 0, &[0], GRIDS * GRIDS * 4, args, GRIDS);
        for (i, tasks) in bytemuck::cast_slice::<u8, u32>(&got).chunks(GRIDS).enumerate() {
            let n = i + 1;
            // Blocks go to XCDs in turn.
            let order: Vec<usize> = (0..XCDS).flat_map(|xcd| (xcd..n).step_by(XCDS)).collect();
            assert_eq!(order.len(), n);
            for (task, block) in order.into_iter().enumerate() {
                assert_eq!(tasks[block] as usize, task, "block {block} of {n}");
            }
        }
    }
}
