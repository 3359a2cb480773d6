//! Products of groups of rows.

use super::{Row, case, with_half};
use crate::kernels;
use crate::reference::{self, Sums};
use crate::{GroupedOptions, GroupedTile, TgmmOutputs};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, Case, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Operator,
    Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, IndexView, Result, Stream};

pub(super) const ROWS: &[Row] =
    &[Row::without_tiles(GMM), Row::without_tiles(PTGMM), Row::without_tiles(NPTGMM)];

const HALVES: &[DType] = &[DType::Bf16, DType::F16];
const TOLERANCE: Tolerance = Tolerance::Sum { terms: 1.0 / (1u64 << 18) as f64 };

const SIZES: ArgSpec = ArgSpec::input("group_sizes", &[DType::I32, DType::I64], 1, "[G]")
    .sampled(Sample::Integers { low: -4, high: 68 });

const fn switch(name: &'static str, summary: &'static str) -> ScalarSpec {
    ScalarSpec { name, default: Scalar::Bool(false), choices: &[], summary }
}
const TILE: ScalarSpec = ScalarSpec {
    name: "tile",
    default: Scalar::Choice("auto"),
    choices: &["auto", "256x256", "128x128", "64x64", "32x128", "elements"],
    summary: "outputs of a block",
};
const GRID: ScalarSpec = ScalarSpec {
    name: "grid_dim",
    default: Scalar::Int(0),
    choices: &[],
    summary: "blocks; 0: as suits the device",
};

const fn tile(name: &'static str) -> (&'static str, Scalar) {
    ("tile", Scalar::Choice(name))
}
const fn set(name: &'static str) -> (&'static str, Scalar) {
    (name, Scalar::Bool(true))
}
const fn grid(blocks: i64) -> (&'static str, Scalar) {
    ("grid_dim", Scalar::Int(blocks))
}

/// Each entry point of a type, over the ends of tiles and groups.
macro_rules! corners {
    ($name:ident, $count:literal: $case:ident) => {
        static $name: [Case; 2 * $count] = {
            const CASES: [[Case; $count]; 2] = [corners!(@ $case Bf16), corners!(@ $case F16)];
            let mut all = [CASES[0][0]; 2 * $count];
            let mut i = 0;
            while i < all.len() {
                all[i] = CASES[i / $count][i % $count];
                i += 1;
            }
            all
        };
    };
    (@ gmm $dtype:ident) => {
        [
            case!("256 x 256", lhs: $dtype [300, 72], rhs: $dtype [12, 72, 260], group_sizes: I32 [12], out: $dtype [300, 260]; tile("256x256")),
            case!("128 x 128", lhs: $dtype [150, 72], rhs: $dtype [6, 72, 132], group_sizes: I64 [6], bias: $dtype [6, 132], out: $dtype [150, 132]; tile("128x128")),
            case!("64 x 64", lhs: $dtype [130, 136], rhs: $dtype [70, 136, 68], group_sizes: I32 [70], out: $dtype [130, 68]; tile("64x64"), grid(3)),
            case!("32 x 128", lhs: $dtype [70, 40], rhs: $dtype [5, 40, 132], group_sizes: I32 [5], out: $dtype [70, 132]; tile("32x128")),
            case!("256 x 256, K contiguous", lhs: $dtype [270, 40], rhs: $dtype [7, 257, 40], group_sizes: I64 [7], out: $dtype [270, 257]; tile("256x256"), set("rhs_transposed")),
            case!("128 x 128, K contiguous", lhs: $dtype [130, 72], rhs: $dtype [4, 70, 72], group_sizes: I32 [4], out: $dtype [130, 70]; tile("128x128"), set("rhs_transposed")),
            case!("64 x 64, K contiguous", lhs: $dtype [100, 264], rhs: $dtype [4, 65, 264], group_sizes: I32 [4], bias: $dtype [4, 65], out: $dtype [100, 65]; tile("64x64"), set("rhs_transposed")),
            case!("32 x 128, K contiguous", lhs: $dtype [100, 40], rhs: $dtype [4, 130, 40], group_sizes: I32 [4], out: $dtype [100, 130]; tile("32x128"), set("rhs_transposed"), grid(2)),
            case!("elements", lhs: $dtype [70, 35], rhs: $dtype [3, 35, 67], group_sizes: I32 [3], bias: $dtype [3, 67], out: $dtype [70, 67]),
        ]
    };
    (@ tgmm $dtype:ident) => {
        [
            case!("256 x 256", lhs: $dtype [90, 260], rhs: $dtype [90, 264], group_sizes: I32 [3], out: $dtype [3, 260, 264], bias_grad: F32 [3, 260]; tile("256x256"), set("lhs_transposed")),
            case!("128 x 128", lhs: $dtype [100, 132], rhs: $dtype [100, 72], group_sizes: I64 [5], out: $dtype [5, 132, 72], bias_grad: F32 [5, 132]; tile("128x128"), set("lhs_transposed"), set("accumulate")),
            case!("64 x 64", lhs: $dtype [150, 72], rhs: $dtype [150, 68], group_sizes: I32 [70], out: $dtype [70, 72, 68]; tile("64x64"), set("lhs_transposed")),
            case!("128 x 128, M contiguous", lhs: $dtype [132, 104], rhs: $dtype [104, 72], group_sizes: I64 [5], out: $dtype [5, 132, 72], bias_grad: F32 [5, 132]; tile("128x128")),
            case!("64 x 64, M contiguous", lhs: $dtype [72, 152], rhs: $dtype [152, 68], group_sizes: I32 [6], out: $dtype [6, 72, 68]; tile("64x64"), set("accumulate")),
            case!("elements", lhs: $dtype [35, 70], rhs: $dtype [70, 67], group_sizes: I32 [3], out: $dtype [3, 35, 67], bias_grad: F32 [3, 35]; set("accumulate")),
        ]
    };
}
corners!(GMM_CORNERS, 9: gmm);
corners!(TGMM_CORNERS, 6: tgmm);

const GMM: Operator = Operator {
    name: "gmm",
    family: "hk-gemm",
    summary: "out[m] = lhs[m] rhs[g] + bias[g] for the rows m of group g",
    args: &[
        ArgSpec::input("lhs", HALVES, 2, "[M, K]"),
        ArgSpec::input("rhs", HALVES, 3, "[G, K, N]; [G, N, K] if transposed"),
        SIZES,
        ArgSpec::input("bias", HALVES, 2, "[G, N]").optional(),
        ArgSpec::updated("out", TOLERANCE, HALVES, 2, "[M, N]"),
    ],
    scalars: &[switch("rhs_transposed", "rhs is given as [G, N, K]"), TILE, GRID],
    kernels: &[&kernels::GMM],
    cases: &[
        case!("8 experts of DeepSeek-V2-Lite, 256 tokens", lhs: Bf16 [256, 2048], rhs: Bf16 [8, 2048, 1408], group_sizes: I32 [8], out: Bf16 [256, 1408]),
        case!("8 experts of DeepSeek-V2-Lite, 256 tokens, K contiguous", lhs: Bf16 [256, 1408], rhs: Bf16 [8, 2048, 1408], group_sizes: I64 [8], out: Bf16 [256, 2048]; set("rhs_transposed")),
        case!("64 experts, 64 tokens", lhs: Bf16 [64, 1024], rhs: Bf16 [64, 1024, 256], group_sizes: I32 [64], out: Bf16 [64, 256]),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["lhs", "out"], axis1: &[] },
    corners: &GMM_CORNERS,
    outputs: |_| Ok(vec![]),
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let (sizes, options, transposed) =
            (sizes(&inputs)?, options(&inputs)?, inputs.bool("rhs_transposed")?);
        with_half!(inputs, "lhs", T => {
            let (lhs, mut rhs) = (inputs.view::<T>("lhs")?, inputs.view::<T>("rhs")?);
            if transposed {
                rhs = rhs.transpose(1, 2)?;
            }
            crate::gmm(stream, lhs, rhs, sizes, inputs.optional_view("bias")?, outputs.take("out")?, options)
        })
    },
    reference: |call: &HostCall| {
        let (lhs, out) = (call.get("lhs")?, call.get("out")?);
        let (&[m, k], &[groups, a, b]) = (lhs.shape(), call.get("rhs")?.shape()) else {
            return Err(ranks(call));
        };
        let n = if call.bool("rhs_transposed")? { a } else { b };
        let mut rhs = call.get("rhs")?.to_f64();
        if call.bool("rhs_transposed")? {
            rhs = rhs.chunks((n * k).max(1)).flat_map(|w| transposed(w, [n, k])).collect();
        }
        let rows = reference::group_rows(&group_sizes(call)?, m);
        let mut sums = reference::gmm(&lhs.to_f64(), &rhs, &rows, [m, n, k]);
        let bias = call.optional("bias").map(|t| t.to_f64()).unwrap_or(vec![0.0; groups * n]);
        let old = out.to_f64();
        for (i, (value, magnitude)) in sums.values.iter_mut().zip(&mut sums.magnitudes).enumerate() {
            match rows.iter().position(|rows| rows.contains(&(i / n))) {
                Some(g) => {
                    *value += bias[g * n + i % n];
                    *magnitude += bias[g * n + i % n].abs();
                }
                None => *value = old[i],
            }
        }
        Ok(vec![("out", as_tensor(out.shape(), sums))])
    },
    traffic: |call: &HostCall| {
        let all = without_old(call, false);
        let (Ok(sizes), Ok(rhs)) = (group_sizes(call), call.get("rhs")) else { return all };
        let m = call.get("lhs").map_or(0, |lhs| lhs.shape()[0]);
        let idle = reference::group_rows(&sizes, m).iter().filter(|rows| rows.is_empty()).count() as u64;
        Traffic { read: all.read - idle * (rhs.bytes().len() as u64 / sizes.len().max(1) as u64), ..all }
    },
};

const PTGMM: Operator = Operator {
    name: "ptgmm",
    summary: "out[g] = lhs[:, rows of g] rhs[rows of g], or +=, by a persistent grid",
    args: &[
        ArgSpec::input("lhs", HALVES, 2, "[K, M]; [M, K] if transposed"),
        ArgSpec::input("rhs", HALVES, 2, "[M, N]"),
        SIZES,
        ArgSpec::updated("out", TOLERANCE, HALVES, 3, "[G, K, N]"),
        ArgSpec::output("bias_grad", TOLERANCE, &[DType::F32], 2, "[G, K]").optional(),
    ],
    scalars: &[
        switch("lhs_transposed", "lhs is given as [M, K]"),
        switch("accumulate", "add to out, rather than to zero"),
        TILE,
        GRID,
    ],
    kernels: &[&kernels::TGMM],
    cases: &[
        case!("2 experts of DeepSeek-V2-Lite, 128 tokens", lhs: Bf16 [128, 2048], rhs: Bf16 [128, 1408], group_sizes: I32 [2], out: Bf16 [2, 2048, 1408], bias_grad: F32 [2, 2048]; set("lhs_transposed")),
        case!("8 experts, 256 tokens", lhs: Bf16 [256, 512], rhs: Bf16 [256, 1024], group_sizes: I32 [8], out: Bf16 [8, 512, 1024]; set("lhs_transposed"), set("accumulate")),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["lhs", "rhs"], axis1: &[] },
    corners: &TGMM_CORNERS,
    outputs: |call| {
        let (sizes, out) = (call.get("group_sizes")?.shape(), call.get("out")?.shape());
        let (&[groups], &[_, k, _]) = (sizes, out) else { return Ok(vec![]) };
        let wanted = call.wants("bias_grad");
        Ok(wanted.then(|| ("bias_grad", TensorSpec::new(DType::F32, [groups, k]))).into_iter().collect())
    },
    run: |stream: &Stream, call: &mut DeviceCall| run_tgmm(true, stream, call),
    reference: |call: &HostCall| {
        let (given, rhs, out) = (call.get("lhs")?, call.get("rhs")?, call.get("out")?);
        let (&[groups, k, n], &[m, _]) = (out.shape(), rhs.shape()) else { return Err(ranks(call)) };
        let mut lhs = given.to_f64();
        if call.bool("lhs_transposed")? {
            lhs = transposed(&lhs, [m, k]);
        }
        let rows = reference::group_rows(&group_sizes(call)?, m);
        let mut sums = reference::tgmm(&lhs, &rhs.to_f64(), &rows, [m, n, k]);
        if call.bool("accumulate")? {
            let terms = sums.values.iter_mut().zip(&mut sums.magnitudes);
            for (old, (value, magnitude)) in out.to_f64().into_iter().zip(terms) {
                *value += old;
                *magnitude += old.abs();
            }
        }
        let mut outputs = vec![("out", as_tensor(out.shape(), sums))];
        if call.wants("bias_grad") {
            let per_row = reference::tgmm(&lhs, &vec![1.0; m], &rows, [m, 1, k]);
            outputs.push(("bias_grad", as_tensor(&[groups, k], per_row)));
        }
        Ok(outputs)
    },
    traffic: |call: &HostCall| without_old(call, call.bool("accumulate").unwrap_or(false)),
    ..GMM
};

const NPTGMM: Operator = Operator {
    name: "nptgmm",
    summary: "ptgmm with a block for each tile",
    scalars: &[
        switch("lhs_transposed", "lhs is given as [M, K]"),
        switch("accumulate", "add to out, rather than to zero"),
        TILE,
    ],
    run: |stream: &Stream, call: &mut DeviceCall| run_tgmm(false, stream, call),
    ..PTGMM
};

fn run_tgmm(persistent: bool, stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let (sizes, options, accumulate) = (sizes(&inputs)?, options(&inputs)?, super::accumulate(&inputs)?);
    let transposed = inputs.bool("lhs_transposed")?;
    with_half!(inputs, "lhs", T => {
        let (mut lhs, rhs) = (inputs.view::<T>("lhs")?, inputs.view::<T>("rhs")?);
        if transposed {
            lhs = lhs.transpose(0, 1)?;
        }
        let (out, bias_grad) = (outputs.take("out")?, outputs.take_optional("bias_grad")?);
        let outputs = TgmmOutputs { out, bias_grad };
        if persistent {
            crate::ptgmm(stream, lhs, rhs, sizes, outputs, accumulate, options)
        } else {
            crate::nptgmm(stream, lhs, rhs, sizes, outputs, accumulate, options)
        }
    })
}

/// The options of a call.
fn options<V: Described>(call: &Call<V>) -> Result<GroupedOptions> {
    let tile = match call.choice("tile")? {
        "256x256" => Some(GroupedTile::T256x256),
        "128x128" => Some(GroupedTile::T128x128),
        "64x64" => Some(GroupedTile::T64x64),
        "32x128" => Some(GroupedTile::T32x128),
        "elements" => Some(GroupedTile::Elements),
        _ => None,
    };
    let grid = call.int("grid_dim").unwrap_or(0);
    let wrong = || Error::argument(call.operator().name, "grid_dim", grid, "0 or more");
    let grid = usize::try_from(grid).map_err(|_| wrong())?;
    Ok(GroupedOptions { tile, grid: (grid > 0).then_some(grid) })
}

fn sizes<'a>(inputs: &Inputs<'a>) -> Result<IndexView<'a>> {
    Ok(match inputs.get("group_sizes")?.dtype() {
        DType::I64 => inputs.view::<i64>("group_sizes")?.into(),
        _ => inputs.view::<i32>("group_sizes")?.into(),
    })
}

fn group_sizes(call: &HostCall) -> Result<Vec<i64>> {
    Ok(call.get("group_sizes")?.to_f64().into_iter().map(|n| n as i64).collect())
}

fn ranks(call: &HostCall) -> Error {
    Error::argument(call.operator().name, "tensors", "other ranks", "those of the arguments")
}

/// `[n, k]` as `[k, n]`.
fn transposed(x: &[f64], [n, k]: [usize; 2]) -> Vec<f64> {
    (0..n * k).map(|i| x[i % n * k + i / n]).collect()
}

fn as_tensor(shape: &[usize], sums: Sums) -> HostTensorF64 {
    HostTensorF64::new(shape, sums.values).with_magnitudes(sums.magnitudes)
}

/// What is written into is read only to be added to.
fn without_old(call: &HostCall, accumulate: bool) -> Traffic {
    let (all, old) = (Traffic::once(call), call.get("out").map_or(0, |out| out.bytes().len() as u64));
    Traffic { read: all.read - if accumulate { 0 } else { old }, ..all }
}
