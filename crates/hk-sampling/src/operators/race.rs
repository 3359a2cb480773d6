//! The argmax and the exponential races.

use super::{
    IDS, LOGITS, OFFSET, ROW_INDEX, SEED, TEMPERATURE, TEMPERATURE_SCALAR, of_row, outputs_of, per_row,
    reference, rows, rows_of, seed,
};
use crate::{Race, kernels, race_workspace};
use hk_core::registry::{
    ArgSpec, BenchSizes, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named, Operator,
    Sample, Scalar, TensorSpec, Traffic,
};
use hk_core::{DType, Result, Stream, with_float};

const X: ArgSpec = ArgSpec { name: "x", ..LOGITS };
const EXPONENTIALS: ArgSpec = ArgSpec::input("exponentials", &[DType::F32], 2, "[B, V]")
    .optional()
    .sampled(Sample::Uniform { low: 0.01, high: 3.0 });

pub(crate) const GREEDY_SAMPLE: Operator = Operator {
    name: "greedy_sample",
    family: "hk-sampling",
    summary: "ids = argmax(x), the first if there are several",
    args: &[X, ROW_INDEX, IDS],
    scalars: &[],
    kernels: &[&kernels::RACE],
    cases: &[
        Case { label: "Llama-3 8B, 8 rows", tensors: &[("x", DType::Bf16, &[8, 128_256])], scalars: &[] },
        Case { label: "Qwen3 8B, 4 rows", tensors: &[("x", DType::F32, &[4, 151_936])], scalars: &[] },
    ],
    bench: BenchSizes::Cases(&[
        Case { label: "64 x 128256", tensors: &[("x", DType::Bf16, &[64, 128256])], scalars: &[] },
        Case { label: "256 x 151936", tensors: &[("x", DType::Bf16, &[256, 151936])], scalars: &[] },
        Case { label: "4096 x 151936", tensors: &[("x", DType::Bf16, &[4096, 151936])], scalars: &[] },
    ]),
    corners: &[
        Case { label: "a wave, bf16", tensors: &[("x", DType::Bf16, &[5, 1000])], scalars: &[] },
        Case { label: "a wave, f16", tensors: &[("x", DType::F16, &[5, 1024])], scalars: &[] },
        Case { label: "a wave, f32", tensors: &[("x", DType::F32, &[5, 16])], scalars: &[] },
        Case { label: "a wave, bf16, odd", tensors: &[("x", DType::Bf16, &[5, 1001])], scalars: &[] },
        Case { label: "a wave, f16, odd", tensors: &[("x", DType::F16, &[5, 1])], scalars: &[] },
        Case { label: "a wave, f32, odd", tensors: &[("x", DType::F32, &[5, 111])], scalars: &[] },
        Case {
            label: "chosen rows",
            tensors: &[("x", DType::F32, &[5, 111]), ("row_index", DType::I32, &[9])],
            scalars: &[],
        },
        Case { label: "a block, bf16", tensors: &[("x", DType::Bf16, &[2, 8192])], scalars: &[] },
        Case { label: "segments, f16", tensors: &[("x", DType::F16, &[2, 20_000])], scalars: &[] },
        Case { label: "segments, f32, odd", tensors: &[("x", DType::F32, &[2, 20_001])], scalars: &[] },
    ],
    outputs,
    run,
    reference: reference_greedy,
    traffic: Traffic::once,
};

pub(crate) const RANDOM_SAMPLE: Operator = Operator {
    name: "random_sample",
    summary: "ids = argmax(softmax(logits / temperature) / (E + 1e-10)), E exponential",
    args: &[LOGITS, TEMPERATURE, ROW_INDEX, EXPONENTIALS, IDS],
    scalars: &[TEMPERATURE_SCALAR, SEED, OFFSET],
    cases: &[
        Case {
            label: "Llama-3 8B, 4 rows",
            tensors: &[("logits", DType::Bf16, &[4, 128_256])],
            scalars: &[("temperature", Scalar::Float(0.7))],
        },
        Case {
            label: "Qwen3 8B, 2 rows",
            tensors: &[("logits", DType::F32, &[2, 151_936]), ("temperature", DType::F32, &[2])],
            scalars: &[],
        },
    ],
    bench: BenchSizes::Cases(&[
        Case { label: "64 x 128256", tensors: &[("logits", DType::Bf16, &[64, 128256])], scalars: &[] },
        Case { label: "4096 x 151936", tensors: &[("logits", DType::Bf16, &[4096, 151936])], scalars: &[] },
    ]),
    corners: &[
        Case { label: "a block, f16", tensors: &[("logits", DType::F16, &[2, 5000])], scalars: &[] },
        Case { label: "a block, f32", tensors: &[("logits", DType::F32, &[2, 2000])], scalars: &[] },
        Case { label: "a block, bf16, odd", tensors: &[("logits", DType::Bf16, &[2, 4001])], scalars: &[] },
        Case { label: "a block, f16, odd", tensors: &[("logits", DType::F16, &[2, 2001])], scalars: &[] },
        Case { label: "a block, f32, odd", tensors: &[("logits", DType::F32, &[2, 3001])], scalars: &[] },
        Case {
            label: "given exponentials",
            tensors: &[("logits", DType::Bf16, &[5, 500]), ("exponentials", DType::F32, &[5, 500])],
            scalars: &[],
        },
        Case {
            label: "chosen rows, given exponentials, odd",
            tensors: &[
                ("logits", DType::Bf16, &[6, 77]),
                ("temperature", DType::F32, &[6]),
                ("row_index", DType::I32, &[9]),
                ("exponentials", DType::F32, &[9, 77]),
            ],
            scalars: &[],
        },
    ],
    reference: reference_race,
    ..GREEDY_SAMPLE
};

pub(crate) const MIXED_SAMPLE: Operator = Operator {
    name: "mixed_sample",
    summary: "greedy_sample of rows with temperature 0, random_sample of all others",
    cases: &[Case {
        label: "Llama-3 8B, 4 rows",
        tensors: &[("logits", DType::Bf16, &[4, 128_256])],
        scalars: &[("temperature", Scalar::Float(0.0))],
    }],
    bench: BenchSizes::Cases(&[
        Case { label: "64 x 128256", tensors: &[("logits", DType::Bf16, &[64, 128256])], scalars: &[] },
        Case { label: "4096 x 151936", tensors: &[("logits", DType::Bf16, &[4096, 151936])], scalars: &[] },
    ]),
    corners: &[
        Case {
            label: "greedy",
            tensors: &[("logits", DType::F32, &[4, 300])],
            scalars: &[("temperature", Scalar::Float(0.0))],
        },
        Case {
            label: "random",
            tensors: &[("logits", DType::F32, &[4, 300]), ("temperature", DType::F32, &[4])],
            scalars: &[("seed", Scalar::Count(u64::MAX - 4)), ("offset", Scalar::Int(77))],
        },
        Case {
            label: "given exponentials",
            tensors: &[("logits", DType::F32, &[4, 77]), ("exponentials", DType::F32, &[4, 77])],
            scalars: &[],
        },
        Case {
            label: "segments, chosen rows",
            tensors: &[("logits", DType::Bf16, &[5, 9000]), ("row_index", DType::I32, &[4])],
            scalars: &[],
        },
    ],
    ..RANDOM_SAMPLE
};

fn x_name(op: &Operator) -> &'static str {
    op.args[0].name
}

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let outputs = outputs_of(call, call.get(x_name(call.operator()))?);
    Ok(vec![("ids", TensorSpec::new(DType::I32, [outputs]))])
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let op = inputs.operator();
    let x = inputs.get(x_name(op))?;
    let bytes = race_workspace(stream.device().info(), outputs_of(&inputs, x), x.shape()[1]);
    let (ids, workspace) = (outputs.take("ids")?, outputs.workspace(stream, bytes)?);
    let row_index = inputs.optional_view("row_index")?;
    with_float!(op.name, x_name(op), x.dtype(), T => {
        let x = inputs.view::<T>(x_name(op))?;
        if op.name == "greedy_sample" {
            return crate::greedy_sample(stream, x, row_index, ids, workspace);
        }
        let temperature = per_row(&inputs, "temperature", || Ok(inputs.float("temperature")? as f32))?;
        let (seed, offset) = seed(&inputs)?;
        let race = Race { seed, offset, exponentials: inputs.optional_view("exponentials")? };
        if op.name == "mixed_sample" {
            crate::mixed_sample(stream, x, temperature, row_index, ids, workspace, race)
        } else {
            crate::random_sample(stream, x, temperature, row_index, ids, workspace, race)
        }
    })
}

fn named(ids: Vec<usize>) -> Named<HostTensorF64> {
    let values = ids.into_iter().map(|id| id as f64).collect::<Vec<_>>();
    vec![("ids", HostTensorF64::new([values.len()], values))]
}

fn reference_greedy(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let x = call.get("x")?;
    let rows = rows(x);
    let id = |row: Option<usize>| row.map_or(0, |row| reference::argmax(&rows[row]));
    Ok(named(rows_of(call, x).into_iter().map(id).collect()))
}

fn reference_race(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let x = call.get("logits")?;
    let (rows, given) = (rows(x), call.optional("exponentials").map(self::rows));
    let (seed, offset) = seed(call)?;
    let greedy_at_zero = call.operator().name == "mixed_sample";
    let mut ids = Vec::new();
    for (b, row) in rows_of(call, x).into_iter().enumerate() {
        let Some(row) = row else {
            ids.push(0);
            continue;
        };
        let t = of_row(call, "temperature", row, f64::from(call.float("temperature")? as f32))?;
        let logits = &rows[row];
        if greedy_at_zero && t == 0.0 {
            ids.push(reference::argmax(logits));
            continue;
        }
        let drawn = || (0..logits.len()).map(|i| reference::exponential(seed, offset, b, i)).collect();
        let exponentials = given.as_ref().map_or_else(drawn, |e: &Vec<Vec<f64>>| e[b].clone());
        ids.push(reference::argmax(&reference::race_scores(logits, t, &exponentials)));
    }
    Ok(named(ids))
}
