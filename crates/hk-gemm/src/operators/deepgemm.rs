//! Products in groups, and weights in shuffled order.

use super::{
    ACTIVATION, GROUP_K, GROUP_N, Row, TILE, W_SHUFFLED, act, activation, as_y, block_shape, case, choice,
    of_k, options, tile, w_shuffled, weight, weights, with_codes, with_half,
};
use crate::gemm::table::Variant;
use crate::reference::{self, Sums};
use crate::{GemmScales, kernels};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named, Operator,
    Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Fp8E4M3, Fp8E4M3Fnuz, Result, Stream, bf16};

pub(super) const ROWS: &[Row] = &[
    Row::new(DEEPGEMM_MASKED, |call| choice::masked(choice::plain(call, Variant::Plain)?)),
    Row::new(DEEPGEMM_MASKED_A8W8, |call| choice::masked(choice::rows_or_blocks(call)?)),
    Row::new(DEEPGEMM_CONTIGUOUS, |call| choice::contiguous(choice::plain(call, Variant::Plain)?)),
    Row::new(DEEPGEMM_CONTIGUOUS_A8W8, |call| choice::contiguous(choice::rows_or_blocks(call)?)),
    Row::without_tiles(SHUFFLE_WEIGHT),
    Row::without_tiles(UNSHUFFLE_WEIGHT),
];

const HALVES: &[DType] = &[DType::Bf16, DType::F16];
const CODES: &[DType] = &[DType::I8, DType::Fp8E4M3Fnuz, DType::Fp8E4M3];

/// Error of a sum in f32, in its magnitude.
const TERMS: f64 = 1.0 / (1u64 << 16) as f64;

const CODE: Sample = Sample::Uniform { low: -100.0, high: 100.0 };
const W: ArgSpec = ArgSpec::input("w", HALVES, 3, "[G, N, K]");
const W8: ArgSpec = ArgSpec::input("w", CODES, 3, "[G, N, K]").sampled(CODE);
const fn scale(name: &'static str, fewest: usize, most: usize, shape: &'static str) -> ArgSpec {
    let sample = Sample::Uniform { low: 0.001, high: 0.02 };
    ArgSpec::input(name, &[DType::F32], fewest, shape).ranks(fewest, most).sampled(sample)
}
/// Outputs of rows that have none are left as they are: so the example's are given.
const fn updated(rank: usize, shape: &'static str) -> ArgSpec {
    ArgSpec::updated("y", Tolerance::Sum { terms: TERMS }, HALVES, rank, shape)
}

/// The type of `y`, which is updated in place.
fn y_dtype(call: &DeviceCall) -> DType {
    call.outputs().next().map_or(DType::Bf16, |(_, y)| y.dtype())
}

const MASKED_M: ArgSpec = ArgSpec::input("masked_m", &[DType::I32], 1, "[G]");
/// Of group 0, or none: examples know no runs.
const M_GROUP: ArgSpec =
    ArgSpec::input("m_group", &[DType::I32], 1, "[M]").sampled(Sample::Integers { low: -1, high: 1 });

const BLOCKS: ScalarSpec = ScalarSpec {
    name: "blocks",
    default: Scalar::Bool(false),
    choices: &[],
    summary: "scales of blocks, rather than of rows",
};
const fn blocks() -> (&'static str, Scalar) {
    ("blocks", Scalar::Bool(true))
}

fn scales<'a>(inputs: &Inputs<'a>) -> Result<GemmScales<'a>> {
    let (a, w) = (inputs.view("a_scale")?, inputs.view("w_scale")?);
    Ok(if inputs.bool("blocks")? {
        GemmScales::Blocks { a, w, group: block_shape(inputs)? }
    } else {
        GemmScales::Rows { a, w }
    })
}

/// Which matrix each row has, if any: rows of all batches.
fn matrices(call: &HostCall) -> Result<Vec<Option<usize>>> {
    let a = call.get("a")?.shape();
    Ok(match call.optional("masked_m") {
        Some(list) => {
            let rows = |(g, &m): (usize, &f64)| (0..a[1]).map(move |i| ((i as f64) < m).then_some(g));
            list.to_f64().iter().enumerate().flat_map(rows).collect()
        }
        None => {
            let groups = call.get("w")?.shape()[0] as f64;
            let of = |g: &f64| (0.0..groups).contains(g).then_some(*g as usize);
            call.get("m_group")?.to_f64().iter().map(of).collect()
        }
    })
}

fn grouped(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let (a, w) = (call.get("a")?, call.get("w")?.shape());
    // Weights come without their padding.
    let (k, n) = (a.shape()[a.shape().len() - 1], w[1]);
    let (mut x, mut of_w) = (a.to_f64(), weights(call)?);
    if let Some(a_scale) = call.optional("a_scale") {
        let (a_scale, w_scale) = (a_scale.to_f64(), call.get("w_scale")?.to_f64());
        if call.bool("blocks")? {
            let group = block_shape(call)?;
            x = reference::scaled(&x, k, &a_scale, [1, group.k]);
            let (each, rows) = ((n * k).max(1), n.div_ceil(group.n) * k.div_ceil(group.k));
            let scaled = |(w, s): (&[f64], &[f64])| reference::scaled(w, k, s, [group.n, group.k]);
            of_w = of_w.chunks(each).zip(w_scale.chunks(rows.max(1))).flat_map(scaled).collect();
        } else {
            x.iter_mut()
                .enumerate()
                .for_each(|(i, x)| *x *= a_scale[if a_scale.len() == 1 { 0 } else { i / k }]);
            of_w.iter_mut()
                .enumerate()
                .for_each(|(i, w)| *w *= w_scale[if w_scale.len() == 1 { 0 } else { i / k }]);
        }
    }
    let before = call.get("y")?.to_f64();
    let mut sums = Sums { values: Vec::new(), magnitudes: Vec::new() };
    for (row, matrix) in matrices(call)?.into_iter().enumerate() {
        let of_row = match matrix {
            Some(g) => {
                let w = &of_w[g * n * k..][..n * k];
                reference::product(&x[row * k..][..k], w, [1, 1, n, k]).activated(activation(call))
            }
            // Untouched, and no part of any error.
            None => Sums { values: before[row * n..][..n].to_vec(), magnitudes: vec![0.0; n] },
        };
        sums.values.extend(of_row.values);
        sums.magnitudes.extend(of_row.magnitudes);
    }
    as_y(call, sums, n)
}

const DEEPGEMM_MASKED: Operator = Operator {
    name: "deepgemm_masked",
    family: "hk-gemm",
    summary: "y[g] = activation(a[g] w[g]^T) for the first masked_m[g] rows of each group",
    args: &[
        ArgSpec::input("a", HALVES, 3, "[G, Mmax, K]"),
        W,
        MASKED_M.sampled(Sample::Integers { low: 0, high: 48 }),
        updated(3, "[G, Mmax, N]"),
    ],
    scalars: &[ACTIVATION, W_SHUFFLED, TILE],
    kernels: &[&kernels::A16W16, &kernels::A16W16_DECODE],
    cases: &[
        case!("16 experts of DeepSeek-V3, up to 64 tokens each", a: Bf16 [16, 64, 1024], w: Bf16 [16, 512, 1024], masked_m: I32 [16], y: Bf16 [16, 64, 512]),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &[], axis1: &["a", "a_scale", "y"] },
    corners: &[
        case!("128 x 128", a: Bf16 [4, 130, 96], w: Bf16 [4, 140, 96], masked_m: I32 [4], y: Bf16 [4, 130, 140]; tile("128x128")),
        case!("64 x 64, shuffled", a: F16 [3, 65, 96], w: F16 [3, 80, 96], masked_m: I32 [3], y: F16 [3, 65, 80]; tile("64x64"), w_shuffled(), act("relu")),
        case!("elements", a: Bf16 [3, 33, 77], w: Bf16 [3, 50, 77], masked_m: I32 [3], y: Bf16 [3, 33, 50]; tile("elements")),
        case!("32 x 32", a: Bf16 [6, 30, 136], w: Bf16 [6, 40, 136], masked_m: I32 [6], y: Bf16 [6, 30, 40]; tile("32x32")),
    ],
    outputs: |_| Ok(vec![]),
    run: |stream: &Stream, call: &mut DeviceCall| {
        let y = y_dtype(call);
        let (inputs, mut outputs) = call.split();
        let (options, masked_m) = (options(&inputs)?, inputs.view("masked_m")?);
        with_half!(inputs, "a", T => {
            let (a, w) = (inputs.view::<T>("a")?, weight::<T>(&inputs)?);
            with_half!(@ inputs, y, "y", Y => {
                crate::deepgemm_masked(stream, a, w, masked_m, outputs.take::<Y>("y")?, options)
            })
        })
    },
    reference: grouped,
    traffic: Traffic::once,
};

const DEEPGEMM_CONTIGUOUS: Operator = Operator {
    name: "deepgemm_contiguous",
    summary: "y[m] = activation(a[m] w[m_group[m]]^T), the rows of a group side by side",
    args: &[ArgSpec::input("a", HALVES, 2, "[M, K]"), W, M_GROUP, updated(2, "[M, N]")],
    cases: &[
        case!("512 rows of DeepSeek-V3", a: Bf16 [512, 1024], w: Bf16 [4, 512, 1024], m_group: I32 [512], y: Bf16 [512, 512]),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["a", "a_scale", "m_group", "y"], axis1: &[] },
    corners: &[
        case!("128 x 128", a: Bf16 [257, 96], w: Bf16 [4, 140, 96], m_group: I32 [257], y: Bf16 [257, 140]; tile("128x128")),
        case!("64 x 64, shuffled", a: F16 [130, 96], w: F16 [3, 80, 96], m_group: I32 [130], y: F16 [130, 80]; tile("64x64"), w_shuffled(), act("relu")),
        case!("elements", a: Bf16 [33, 77], w: Bf16 [3, 50, 77], m_group: I32 [33], y: Bf16 [33, 50]; tile("elements")),
        case!("64 x 32", a: Bf16 [100, 136], w: Bf16 [6, 40, 136], m_group: I32 [100], y: Bf16 [100, 40]; tile("64x32")),
    ],
    run: |stream: &Stream, call: &mut DeviceCall| {
        let y = y_dtype(call);
        let (inputs, mut outputs) = call.split();
        let (options, m_group) = (options(&inputs)?, inputs.view("m_group")?);
        with_half!(inputs, "a", T => {
            let (a, w) = (inputs.view::<T>("a")?, weight::<T>(&inputs)?);
            with_half!(@ inputs, y, "y", Y => {
                crate::deepgemm_contiguous(stream, a, w, m_group, outputs.take::<Y>("y")?, options)
            })
        })
    },
    ..DEEPGEMM_MASKED
};

const DEEPGEMM_MASKED_A8W8: Operator = Operator {
    name: "deepgemm_masked_a8w8",
    summary: "y[g] = activation(scales (a[g] w[g]^T)) for the first masked_m[g] rows of each group",
    args: &[
        ArgSpec::input("a", CODES, 3, "[G, Mmax, K]").sampled(CODE),
        W8,
        scale("a_scale", 2, 3, "[G, Mmax] or [G, Mmax, groups of K]"),
        scale("w_scale", 2, 3, "[G, N] or [G, groups of N, groups of K]"),
        MASKED_M.sampled(Sample::Integers { low: 0, high: 48 }),
        updated(3, "[G, Mmax, N]"),
    ],
    scalars: &[ACTIVATION, BLOCKS, GROUP_N, GROUP_K, W_SHUFFLED, TILE],
    kernels: &[
        &kernels::A8W8,
        &kernels::A8W8_DECODE,
        &kernels::A8W8_BLOCKSCALE,
        &kernels::A8W8_BLOCKSCALE_DECODE,
        &kernels::A8W8_GROUPSCALE,
    ],
    cases: &[
        case!("16 experts of DeepSeek-V3, up to 64 tokens each", a: Fp8E4M3Fnuz [16, 64, 1024], w: Fp8E4M3Fnuz [16, 512, 1024], a_scale: F32 [16, 64], w_scale: F32 [16, 512], masked_m: I32 [16], y: Bf16 [16, 64, 512]),
        case!("16 experts of DeepSeek-V3, up to 64 tokens each (OCP)", a: Fp8E4M3 [16, 64, 1024], w: Fp8E4M3 [16, 512, 1024], a_scale: F32 [16, 64], w_scale: F32 [16, 512], masked_m: I32 [16], y: Bf16 [16, 64, 512]),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &[], axis1: &["a", "a_scale", "y"] },
    corners: &[
        case!("128 x 128", a: Fp8E4M3Fnuz [4, 130, 96], w: Fp8E4M3Fnuz [4, 140, 96], a_scale: F32 [4, 130], w_scale: F32 [4, 140, 1], masked_m: I32 [4], y: Bf16 [4, 130, 140]; tile("128x128")),
        case!("64 x 64, blocks", a: Fp8E4M3 [3, 65, 160], w: Fp8E4M3 [3, 144, 160], a_scale: F32 [3, 65, 2], w_scale: F32 [3, 2, 2], masked_m: I32 [3], y: Bf16 [3, 65, 144]; tile("64x64"), w_shuffled(), blocks()),
        case!("32 x 32, blocks", a: I8 [6, 30, 272], w: I8 [6, 40, 272], a_scale: F32 [6, 30, 3], w_scale: F32 [6, 1, 3], masked_m: I32 [6], y: F16 [6, 30, 40]; tile("32x32"), blocks()),
        case!("groups of 64", a: Fp8E4M3Fnuz [3, 30, 272], w: Fp8E4M3Fnuz [3, 40, 272], a_scale: F32 [3, 30, 5], w_scale: F32 [3, 1, 5], masked_m: I32 [3], y: Bf16 [3, 30, 40]; blocks(), of_k(64)),
    ],
    run: |stream: &Stream, call: &mut DeviceCall| {
        let y = y_dtype(call);
        let (inputs, mut outputs) = call.split();
        let (options, scales, masked_m) = (options(&inputs)?, scales(&inputs)?, inputs.view("masked_m")?);
        with_codes!(inputs, "a", T => {
            let (a, w) = (inputs.view::<T>("a")?, weight::<T>(&inputs)?);
            with_half!(@ inputs, y, "y", Y => {
                crate::deepgemm_masked_a8w8(stream, a, w, scales, masked_m, outputs.take::<Y>("y")?, options)
            })
        })
    },
    ..DEEPGEMM_MASKED
};

const DEEPGEMM_CONTIGUOUS_A8W8: Operator = Operator {
    name: "deepgemm_contiguous_a8w8",
    summary: "y[m] = activation(scales (a[m] w[m_group[m]]^T)), the rows of a group side by side",
    args: &[
        ArgSpec::input("a", CODES, 2, "[M, K]").sampled(CODE),
        W8,
        scale("a_scale", 1, 2, "[M] or [M, groups of K]"),
        scale("w_scale", 2, 3, "[G, N] or [G, groups of N, groups of K]"),
        M_GROUP,
        updated(2, "[M, N]"),
    ],
    cases: &[
        case!("512 rows of DeepSeek-V3", a: Fp8E4M3Fnuz [512, 1024], w: Fp8E4M3Fnuz [4, 512, 1024], a_scale: F32 [512, 8], w_scale: F32 [4, 4, 8], m_group: I32 [512], y: Bf16 [512, 512]; blocks()),
        case!("512 rows of DeepSeek-V3 (OCP)", a: Fp8E4M3 [512, 1024], w: Fp8E4M3 [4, 512, 1024], a_scale: F32 [512, 8], w_scale: F32 [4, 4, 8], m_group: I32 [512], y: Bf16 [512, 512]; blocks()),
    ],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["a", "a_scale", "m_group", "y"], axis1: &[] },
    corners: &[
        case!("128 x 128", a: Fp8E4M3Fnuz [257, 96], w: Fp8E4M3Fnuz [4, 140, 96], a_scale: F32 [257], w_scale: F32 [4, 140], m_group: I32 [257], y: Bf16 [257, 140]; tile("128x128")),
        case!("64 x 64, blocks", a: Fp8E4M3 [130, 160], w: Fp8E4M3 [3, 144, 160], a_scale: F32 [130, 2], w_scale: F32 [3, 2, 2], m_group: I32 [130], y: Bf16 [130, 144]; tile("64x64"), w_shuffled(), blocks()),
        case!("groups of 8", a: Fp8E4M3 [130, 40], w: Fp8E4M3 [3, 50, 40], a_scale: F32 [130, 5], w_scale: F32 [3, 1, 5], m_group: I32 [130], y: F16 [130, 50]; blocks(), of_k(8)),
        case!("elements", a: I8 [33, 77], w: I8 [3, 50, 77], a_scale: F32 [33], w_scale: F32 [3, 50], m_group: I32 [33], y: Bf16 [33, 50]; tile("elements")),
    ],
    run: |stream: &Stream, call: &mut DeviceCall| {
        let y = y_dtype(call);
        let (inputs, mut outputs) = call.split();
        let (options, scales, m_group) = (options(&inputs)?, scales(&inputs)?, inputs.view("m_group")?);
        with_codes!(inputs, "a", T => {
            let (a, w) = (inputs.view::<T>("a")?, weight::<T>(&inputs)?);
            with_half!(@ inputs, y, "y", Y => {
                crate::deepgemm_contiguous_a8w8(stream, a, w, scales, m_group, outputs.take::<Y>("y")?, options)
            })
        })
    },
    ..DEEPGEMM_MASKED_A8W8
};

const ANY: &[DType] =
    &[DType::Bf16, DType::F16, DType::I8, DType::Fp8E4M3Fnuz, DType::Fp8E4M3, DType::Fp4x2, DType::F32];

/// Runs `$body` with `$t` as the type of the input, whichever it is: elements of as many bytes.
macro_rules! with_any {
    ($inputs:ident, $name:literal, $t:ident => $body:expr) => {
        match $inputs.get($name)?.dtype() {
            DType::Bf16 => {
                type $t = bf16;
                $body
            }
            DType::F16 => {
                type $t = hk_core::f16;
                $body
            }
            DType::F32 => {
                type $t = f32;
                $body
            }
            DType::I8 => {
                type $t = i8;
                $body
            }
            DType::Fp8E4M3Fnuz => {
                type $t = Fp8E4M3Fnuz;
                $body
            }
            DType::Fp8E4M3 => {
                type $t = Fp8E4M3;
                $body
            }
            DType::Fp4x2 => {
                type $t = hk_core::Fp4x2;
                $body
            }
            other => {
                Err(Error::dtype($inputs.operator().name, $name, other, "bf16, f16, f32, i8, fp8, fp4x2"))
            }
        }
    };
}

const COLUMNS: ScalarSpec = ScalarSpec {
    name: "columns",
    default: Scalar::Int(0),
    choices: &[],
    summary: "of shuffled, zero from those of plain on; 0: as many",
};

/// The shape of shuffled weights.
fn shuffled_shape<V: Described>(call: &Call<V>) -> Result<Vec<usize>> {
    let mut shape = call.get("plain")?.shape().to_vec();
    let columns = call.int("columns")?;
    let wrong = |_| Error::argument(call.operator().name, "columns", columns, "0 or more");
    if let (Some(last), columns @ 1..) = (shape.last_mut(), usize::try_from(columns).map_err(wrong)?) {
        *last = columns;
    }
    Ok(shape)
}

/// Values in the order of shuffled weights, and back.
fn reordered(
    call: &HostCall,
    from: &'static str,
    to: &'static str,
    back: bool,
) -> Result<Named<HostTensorF64>> {
    let tensor = call.get(from)?;
    let mut values = tensor.to_f64();
    let each = values.len() / tensor.shape().iter().product::<usize>().max(1);
    let mut shape = if back { tensor.shape().to_vec() } else { shuffled_shape(call)? };
    let last = shape.len() - 1;
    shape[last] *= each;
    if !back {
        let k = tensor.shape()[last] * each;
        let padded = |row: &[f64]| [row, &vec![0.0; shape[last] - k]].concat();
        values = values.chunks(k.max(1)).flat_map(padded).collect();
    }
    let chunk = 16 / tensor.dtype().size_bytes() * each;
    let plain_of: Vec<f64> =
        reference::unshuffled(&(0..values.len()).map(|i| i as f64).collect::<Vec<_>>(), shape[last], chunk);
    // plain_of[p]: the place in shuffled order of plain element p.
    let mut out = vec![0.0; values.len()];
    for (plain, shuffled) in plain_of.into_iter().map(|x| x as usize).enumerate() {
        if back { out[plain] = values[shuffled] } else { out[shuffled] = values[plain] }
    }
    Ok(vec![(to, HostTensorF64::new(shape, out))])
}

const SHUFFLE_WEIGHT: Operator = Operator {
    name: "shuffle_weight",
    summary: "weights to the order in which matrix instructions take them",
    args: &[
        ArgSpec::input("plain", ANY, 2, "[N, K] or [batch, N, K]").ranks(2, 3),
        ArgSpec::output("shuffled", Tolerance::Exact, ANY, 2, "as plain").ranks(2, 3),
    ],
    scalars: &[COLUMNS],
    kernels: &[&kernels::SHUFFLE],
    cases: &[
        case!("Llama-3 8B o", plain: Bf16 [4096, 4096]),
        case!("Llama-3 8B o, fp8", plain: Fp8E4M3 [4096, 4096]),
    ],
    bench: BenchSizes::Tokens { rows: 28_672, axis0: &["plain"], axis1: &[] },
    corners: &[
        case!("bf16", plain: Bf16 [48, 96]),
        case!("fp8, batches", plain: Fp8E4M3Fnuz [3, 32, 64]),
        case!("fp4", plain: Fp4x2 [16, 64]),
        case!("longer rows", plain: I8 [32, 45]; ("columns", Scalar::Int(64))),
        case!("longer rows on 16 bytes", plain: F16 [2, 16, 40]; ("columns", Scalar::Int(64))),
    ],
    outputs: |call| {
        Ok(vec![("shuffled", TensorSpec::new(call.get("plain")?.dtype(), shuffled_shape(call)?))])
    },
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        with_any!(inputs, "plain", T => {
            crate::shuffle_weight(stream, inputs.view::<T>("plain")?, outputs.take::<T>("shuffled")?)
        })
    },
    reference: |call: &HostCall| reordered(call, "plain", "shuffled", false),
    ..DEEPGEMM_MASKED
};

const UNSHUFFLE_WEIGHT: Operator = Operator {
    name: "unshuffle_weight",
    summary: "weights in the order of matrix instructions back to rows",
    scalars: &[],
    args: &[
        ArgSpec::input("shuffled", ANY, 2, "[N, K] or [batch, N, K]").ranks(2, 3),
        ArgSpec::output("plain", Tolerance::Exact, ANY, 2, "as shuffled").ranks(2, 3),
    ],
    cases: &[case!("Llama-3 8B o", shuffled: Bf16 [4096, 4096])],
    bench: BenchSizes::Tokens { rows: 28_672, axis0: &["shuffled"], axis1: &[] },
    corners: &[case!("bf16", shuffled: Bf16 [48, 96]), case!("int8", shuffled: I8 [2, 16, 32])],
    outputs: |call| {
        let shuffled = call.get("shuffled")?;
        Ok(vec![("plain", TensorSpec::new(shuffled.dtype(), shuffled.shape()))])
    },
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        with_any!(inputs, "shuffled", T => {
            crate::unshuffle_weight(stream, inputs.view::<T>("shuffled")?, outputs.take::<T>("plain")?)
        })
    },
    reference: |call: &HostCall| reordered(call, "shuffled", "plain", true),
    ..SHUFFLE_WEIGHT
};
