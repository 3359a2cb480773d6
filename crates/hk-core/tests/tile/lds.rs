//! Tiles in LDS through `hk/{shared,sums,pipeline}.h`: what lands where, and in how many clocks.

use crate::{Random, common, open, streams};
use bytemuck::{Pod, Zeroable};
use hk_core::{
    Arch, CodeObjects, Details, Fp8E4M3, Fp8E4M3Fnuz, GlobalLayout, LaunchConfig, Stream, bf16, f16,
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
    given: Given,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Given {
    stride: i64,
    rows: u32,
    end: u32,
    from: u32,
    factor: u32,
    read: u32,
    count: u32,
}

const READ: Given = Given { stride: 0, rows: 0, end: 0, from: 0, factor: 1, read: 1, count: 1 };

/// What a kernel writes; `x` from byte `skip` on.
fn run(stream: &Stream, kernel: &str, x: &[u8], skip: usize, w: &[u32], bytes: usize, given: Given) -> Vec<u8> {
    run_grid(stream, kernel, x, skip, w, bytes, given, 1)
}

#[expect(clippy::too_many_arguments, reason = "a launch has as many")]
fn run_grid(
    stream: &Stream,
    kernel: &str,
    x: &[u8],
    skip: usize,
    w: &[u32],
    bytes: usize,
    given: Given,
    grid: usize,
) -> Vec<u8> {
    let (x_buffer, w_buffer) = (stream.upload(x).unwrap(), stream.upload(w).unwrap());
    let mut y = stream.upload(&vec![0xa5u8; bytes]).unwrap();
    let kernel = stream.kernel(*TILE, kernel).unwrap();
    let mut launch = stream.launch("tile", &kernel);
    let x_view = x_buffer.view([x.len()]).unwrap();
    let params = Params {
        x: launch.input("x", &x_view.slice(0, skip..x.len()).unwrap()).unwrap(),
        w: launch.input("w", &w_buffer.view([w.len()]).unwrap()).unwrap(),
        y: launch.output("y", &mut y.view_mut([bytes]).unwrap()).unwrap(),
        given,
    };
    // SAFETY: the parameters are the kernel's, and each tensor has what its threads access.
    unsafe { launch.run(LaunchConfig::grid_1d(grid), &params) }.unwrap();
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

/// Clocks of LDS, and those of them that conflicts cost.
fn clocks(stream: &Stream, f: impl FnOnce(&Stream)) -> (u64, u64) {
    stream.take_counters().unwrap();
    f(stream);
    let Details { lds_clocks, lds_conflict_clocks, .. } =
        stream.take_counters().unwrap().unwrap().details.unwrap();
    (lds_clocks, lds_conflict_clocks)
}

/// The same of what a kernel does up to its first reads of LDS, and of those.
fn clocks_of_halves(stream: &Stream, kernel: &str, x: &[u8], given: Given) -> [(u64, u64); 2] {
    let of = |read| {
        clocks(stream, |s| drop(run(s, kernel, x, 0, &[0], x.len(), Given { read, ..given })))
    };
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
            let of = |kernel: &str| clocks_of_halves(&stream, &format!("{kernel}_{bytes}_{dim}"), &rows, READ);

            let [writes, reads] = of("fragments");
            println!("{target}, {dim} rows of {bytes} bytes: {} of {all} bytes written, {} read", writes.0, reads.0);
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

/// v (w x^T), the first product being an operand of the second, without a move and by LDS.
#[test]
fn sums_are_an_operand_of_the_next_product() {
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
            let mut matrix = |rows: usize| (0..rows * cols).map(|_| random.below(5) as i32 - 2).collect::<Vec<_>>();
            let (x, v) = (matrix(64), matrix(64));
            // Each row of w is one column of x, twice: sums of all types stay small.
            let w: Vec<i32> = (0..cols * cols).map(|i| i32::from(i % cols == (5 * (i / cols) + 3) % cols) * 2).collect();
            let data: Vec<u8> = [&x, &w, &v].into_iter().flatten().flat_map(|&v| encode(kind, arch(&stream), v)).collect();
            let kernel = format!("chain_{kind}_{dim}");
            let got = run(&stream, &kernel, &data, 0, &[0], 2 * 64 * 64 * 4, READ);
            let got: &[f32] = bytemuck::cast_slice(&got);
            let dot = |a: &[i32], b: &[i32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<i32>();
            for m in 0..64 {
                let x = &x[m * cols..][..cols];
                let d: Vec<i32> = w.chunks(cols).map(|w| dot(w, x)).collect();
                for (i, v) in v.chunks(cols).enumerate() {
                    let at = m * 64 + i;
                    let want = dot(v, &d) as f32;
                    let got = [got[at], got[64 * 64 + at]];
                    assert_eq!(got, [want; 2], "{kernel} on {}, y[{m}, {i}]", arch(&stream));
                }
            }
        }
    }
}
