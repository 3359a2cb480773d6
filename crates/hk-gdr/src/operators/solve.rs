//! `solve_tril`.

use super::recurrent::{case, tolerance};
use crate::solve::{Sizes, solve_sizes};
use crate::{kernels, reference};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, Case, Described, HostCall, HostTensorF64, Named, Operator, Sample, Scalar,
    ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Result, bf16, f16};

const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];
/// Tokens of the packed sequences of an example.
const PACKED: i64 = 150;

pub(crate) const SOLVE_TRIL: Operator = Operator {
    name: "solve_tril",
    family: "hk-gdr",
    summary: "X = (I + A)^-1 of the strictly lower triangular A of each chunk",
    args: &[
        ArgSpec::input("a", &[DType::F32], 4, "[B, T, heads, C], or [T, heads, C] if packed")
            .ranks(3, 4)
            .sampled(Sample::Normal { mean: 0.0, deviation: 0.1 }),
        ArgSpec::input("cu_seqlens", &[DType::I32], 1, "[N + 1]")
            .sampled(Sample::Starts { rows: PACKED })
            .optional(),
        ArgSpec::output("x", Tolerance::Reduction, FLOATS, 4, "as a").ranks(3, 4),
    ],
    scalars: &[ScalarSpec {
        name: "x_dtype",
        default: Scalar::Choice("f32"),
        choices: &["f32", "bf16", "f16"],
        summary: "element type of x",
    }],
    kernels: &[&kernels::SOLVE],
    cases: &[case!("Qwen3-Next, 512 tokens"; ; a F32 [1, 512, 32, 64])],
    bench: BenchSizes::Cases(&[case!("Qwen3-Next, 8192 tokens"; ; a F32 [1, 8192, 32, 64])]),
    corners: &[
        case!("64"; ; a F32 [2, 70, 2, 64]),
        case!("32, packed"; ; a F32 [150, 1, 32] cu_seqlens I32 [5]),
        case!("16"; ; a F32 [1, 35, 2, 16]),
        case!("64, packed"; x_dtype = BF16; a F32 [150, 2, 64] cu_seqlens I32 [4]),
        case!("32"; x_dtype = BF16; a F32 [1, 33, 1, 32]),
        case!("16"; x_dtype = BF16; a F32 [1, 17, 3, 16]),
        case!("64"; x_dtype = F16; a F32 [1, 65, 1, 64]),
        case!("32"; x_dtype = F16; a F32 [1, 33, 1, 32]),
        case!("16"; x_dtype = F16; a F32 [1, 17, 3, 16]),
    ],
    outputs: |call| {
        sizes(call)?;
        Ok(vec![("x", TensorSpec::new(x_dtype(call)?, call.get("a")?.shape.clone()))])
    },
    run: |stream, call| {
        let (inputs, mut outputs) = call.split();
        let (a, starts) = (inputs.view("a")?, inputs.optional_view("cu_seqlens")?);
        match inputs.choice("x_dtype")? {
            "bf16" => crate::solve_tril::<bf16>(stream, a, starts, outputs.take("x")?),
            "f16" => crate::solve_tril::<f16>(stream, a, starts, outputs.take("x")?),
            _ => crate::solve_tril::<f32>(stream, a, starts, outputs.take("x")?),
        }
    },
    reference: reference_of,
    traffic,
};

const BF16: Scalar = Scalar::Choice("bf16");
const F16: Scalar = Scalar::Choice("f16");

fn x_dtype<D: Described>(call: &Call<D>) -> Result<DType> {
    Ok(match call.choice("x_dtype")? {
        "bf16" => DType::Bf16,
        "f16" => DType::F16,
        _ => DType::F32,
    })
}

fn sizes<D: Described>(call: &Call<D>) -> Result<Sizes> {
    solve_sizes(call.get("a")?.shape(), call.optional("cu_seqlens").map(D::shape))
}

fn reference_of(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let Sizes { batch, tokens, heads, chunk, .. } = sizes(call)?;
    let a = call.get("a")?;
    let values = a.to_f64();
    let mut x = vec![HostTensorF64::UNTOUCHED; values.len()];
    for (first, rows, poison) in chunks(call, batch, tokens, chunk) {
        for h in 0..heads {
            let at = |i: usize| ((first + i) * heads + h) * chunk;
            let matrix: Vec<f64> = (0..rows).flat_map(|i| values[at(i)..][..chunk].to_vec()).collect();
            let solved = reference::solve_tril(&matrix, rows, chunk);
            for i in 0..rows {
                let row = &mut x[at(i)..][..chunk];
                row.copy_from_slice(&solved[i * chunk..][..chunk]);
                if poison {
                    row.fill(f64::NAN);
                }
            }
        }
    }
    let tolerance = Some(tolerance(x_dtype(call)?, &x));
    Ok(vec![("x", HostTensorF64 { tolerance, ..HostTensorF64::new(a.shape(), x) })])
}

/// Of A what is below the diagonal.
fn traffic(call: &HostCall) -> Traffic {
    let mut traffic = Traffic::once(call);
    if let Ok(a) = call.get("a") {
        let (chunk, bytes) = (a.shape().last().map_or(1, |n| *n as u64), a.bytes().len() as u64);
        traffic.read -= bytes - bytes * (chunk - 1) / (2 * chunk);
    }
    traffic
}

/// The chunks of a call: first token among all, tokens, and whether something of its sequence is out of range.
pub(super) fn chunks(
    call: &HostCall,
    batch: usize,
    tokens: usize,
    chunk: usize,
) -> Vec<(usize, usize, bool)> {
    let all = tokens as i64;
    let ranges: Vec<(usize, usize, bool)> = match call.optional("cu_seqlens") {
        None => (0..batch).map(|b| (b * tokens, (b + 1) * tokens, false)).collect(),
        Some(starts) => {
            let starts: Vec<i64> = starts.to_f64().iter().map(|v| *v as i64).collect();
            let range = |ends: &[i64]| {
                let low = ends[0].clamp(0, all);
                let poison = ends[0] < 0 || ends[1] < ends[0] || ends[1] > all;
                (low as usize, ends[1].clamp(low, all) as usize, poison)
            };
            starts.windows(2).map(range).collect()
        }
    };
    let of = |(from, to, poison): (usize, usize, bool)| {
        (from..to).step_by(chunk).map(move |first| (first, chunk.min(to - first), poison)).collect::<Vec<_>>()
    };
    ranges.into_iter().flat_map(of).collect()
}
