//! The operators with filters.

use super::{
    IDS, LOGITS, OFFSET, ORDER, PROBS, ROW_INDEX, SEED, TEMPERATURE, TEMPERATURE_SCALAR, of_row, order,
    outputs_of, per_row, reference, rows, rows_of, seed,
};
use crate::{Draw, Filters, PerRow, SampledRows, Samples, kernels, sampling_workspace};
use hk_core::registry::{
    ArgSpec, BenchSizes, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named,
    Operator, Role, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Result, Stream, with_float};

const K: ArgSpec =
    ArgSpec::input("k", &[DType::I32], 1, "[R]").optional().sampled(Sample::Integers { low: -1, high: 60 });
const P: ArgSpec =
    ArgSpec::input("p", &[DType::F32], 1, "[R]").optional().sampled(Sample::Uniform { low: -0.1, high: 1.1 });
const MIN_P: ArgSpec = ArgSpec::input("min_p", &[DType::F32], 1, "[R]")
    .optional()
    .sampled(Sample::Uniform { low: -0.1, high: 0.2 });
const UNIFORM: ArgSpec = ArgSpec::input("uniform", &[DType::F32], 1, "[B]")
    .optional()
    .sampled(Sample::Uniform { low: 0.0, high: 1.0 });
const MASS: ArgSpec = ArgSpec::output("mass", Tolerance::Reduction, &[DType::F32], 1, "[B]").optional();
const COUNT: ArgSpec = ArgSpec::output("count", Tolerance::Exact, &[DType::I32], 1, "[B]").optional();
const Y: ArgSpec = ArgSpec { name: "y", role: Role::Out(Tolerance::Reduction), ..PROBS };

const K_SCALAR: ScalarSpec = ScalarSpec {
    name: "k",
    default: Scalar::Int(50),
    choices: &[],
    summary: "tokens that top-k keeps of all rows, unless there is a tensor",
};
const P_SCALAR: ScalarSpec = ScalarSpec {
    name: "p",
    default: Scalar::Float(0.9),
    choices: &[],
    summary: "mass that top-p keeps of all rows, unless there is a tensor",
};
const MIN_P_SCALAR: ScalarSpec = ScalarSpec {
    name: "min_p",
    default: Scalar::Float(0.0),
    choices: &[],
    summary: "share of the largest probability that min-p asks for, unless there is a tensor",
};

const LLAMA: Case = Case {
    label: "Llama-3 8B, 4 rows",
    tensors: &[("probs", DType::F32, &[4, 128_256]), ("mass", DType::F32, &[4]), ("count", DType::I32, &[4])],
    scalars: &[],
};

pub(crate) const TOP_K_TOP_P_SAMPLING_FROM_PROBS: Operator = Operator {
    name: "top_k_top_p_sampling_from_probs",
    family: "hk-sampling",
    summary: "a token from those that top-k, top-p and min-p all keep",
    args: &[PROBS, ROW_INDEX, IDS, MASS, COUNT, K, P, MIN_P, UNIFORM],
    scalars: &[K_SCALAR, P_SCALAR, MIN_P_SCALAR, ORDER, SEED, OFFSET],
    kernels: &[&kernels::ROWS, &kernels::SEGMENTS],
    cases: &[
        LLAMA,
        Case {
            label: "DeepSeek-V3, 2 rows, top-k first",
            tensors: &[("probs", DType::Bf16, &[2, 129_280]), ("mass", DType::F32, &[2])],
            scalars: &[("order", Scalar::Choice("top_k_first"))],
        },
    ],
    bench: BenchSizes::Cases(&[
        Case { label: "64 x 128256", tensors: &[("probs", DType::F32, &[64, 128256])], scalars: &[] },
        Case { label: "256 x 151936", tensors: &[("probs", DType::F32, &[256, 151936])], scalars: &[] },
        Case { label: "2048 x 151936", tensors: &[("probs", DType::F32, &[2048, 151936])], scalars: &[] },
    ]),
    corners: &[
        corner("a wave, bf16", &[("probs", DType::Bf16, &[9, 1000]), ALL9[0], ALL9[1]]),
        corner("a wave, f16", &[("probs", DType::F16, &[9, 1024]), ALL9[0], ALL9[1]]),
        corner("a wave, f32", &[("probs", DType::F32, &[9, 512]), ALL9[0], ALL9[1]]),
        corner("a wave, bf16, odd", &[("probs", DType::Bf16, &[9, 1001]), ALL9[0], ALL9[1]]),
        corner("a wave, f16, odd", &[("probs", DType::F16, &[9, 1]), ALL9[0], ALL9[1]]),
        corner("a wave, f32, odd", &[("probs", DType::F32, &[9, 111]), ALL9[0], ALL9[1]]),
        corner(
            "chosen rows with parameters of their own",
            &[
                ("probs", DType::F32, &[6, 500]),
                ("row_index", DType::I32, &[9]),
                ("k", DType::I32, &[6]),
                ("p", DType::F32, &[6]),
                ("min_p", DType::F32, &[6]),
                ("uniform", DType::F32, &[9]),
                ALL9[0],
                ALL9[1],
            ],
        ),
        Case {
            label: "top-k first",
            tensors: &[("probs", DType::F32, &[9, 500]), ALL9[0], ALL9[1]],
            scalars: &[
                ("order", Scalar::Choice("top_k_first")),
                ("p", Scalar::Float(0.8)),
                ("min_p", Scalar::Float(0.02)),
            ],
        },
        corner("a block, bf16", &[("probs", DType::Bf16, &[2, 8192]), ALL2[0], ALL2[1]]),
        corner("a block, f16", &[("probs", DType::F16, &[2, 2000]), ALL2[0], ALL2[1]]),
        corner("a block, f32", &[("probs", DType::F32, &[2, 5000]), ALL2[0], ALL2[1]]),
        corner("a block, bf16, odd", &[("probs", DType::Bf16, &[2, 5001]), ALL2[0], ALL2[1]]),
        corner("a block, f16, odd", &[("probs", DType::F16, &[2, 2001]), ALL2[0], ALL2[1]]),
        corner("a block, f32, odd", &[("probs", DType::F32, &[2, 1025]), ALL2[0], ALL2[1]]),
        corner("segments, bf16", &[("probs", DType::Bf16, &[2, 9000]), ALL2[0], ALL2[1]]),
        corner("segments, f32, odd", &[("probs", DType::F32, &[2, 16_385]), ALL2[0], ALL2[1]]),
        Case {
            label: "segments, top-k first",
            tensors: &[("probs", DType::F32, &[2, 20_000]), ALL2[0], ALL2[1]],
            scalars: &[("order", Scalar::Choice("top_k_first")), ("k", Scalar::Int(2000))],
        },
    ],
    outputs,
    run,
    reference: reference_draw,
    traffic: Traffic::once,
};

type CaseTensor = (&'static str, DType, &'static [usize]);
const ALL9: [CaseTensor; 2] = [("mass", DType::F32, &[9]), ("count", DType::I32, &[9])];
const ALL2: [CaseTensor; 2] = [("mass", DType::F32, &[2]), ("count", DType::I32, &[2])];

const fn corner(label: &'static str, tensors: &'static [CaseTensor]) -> Case {
    Case { label, tensors, scalars: &[] }
}

pub(crate) const TOP_P_SAMPLING_FROM_PROBS: Operator = Operator {
    name: "top_p_sampling_from_probs",
    summary: "a token from the most likely that have p together",
    args: &[PROBS, ROW_INDEX, IDS, MASS, COUNT, P, UNIFORM],
    scalars: &[P_SCALAR, SEED, OFFSET],
    cases: &[
        LLAMA,
        Case {
            label: "Qwen3 8B, 2 rows",
            tensors: &[("probs", DType::F32, &[2, 151_936])],
            scalars: &[("p", Scalar::Float(0.95))],
        },
    ],
    corners: &[
        corner("a wave", &[("probs", DType::F32, &[9, 100]), ALL9[0], ALL9[1]]),
        corner("segments, f16", &[("probs", DType::F16, &[2, 9000]), ALL2[0], ALL2[1]]),
        corner(
            "segments, chosen rows",
            &[
                ("probs", DType::F32, &[3, 8196]),
                ("row_index", DType::I32, &[9]),
                ("p", DType::F32, &[3]),
                ("uniform", DType::F32, &[9]),
                ALL9[0],
                ALL9[1],
            ],
        ),
    ],
    ..TOP_K_TOP_P_SAMPLING_FROM_PROBS
};

pub(crate) const TOP_K_SAMPLING_FROM_PROBS: Operator = Operator {
    name: "top_k_sampling_from_probs",
    summary: "a token from the k most likely",
    args: &[PROBS, ROW_INDEX, IDS, MASS, COUNT, K, UNIFORM],
    scalars: &[K_SCALAR, SEED, OFFSET],
    cases: &[LLAMA],
    corners: &[
        corner("a wave", &[("probs", DType::F32, &[9, 100]), ALL9[0], ALL9[1]]),
        corner(
            "chosen rows, given uniform numbers",
            &[
                ("probs", DType::F32, &[6, 100]),
                ("row_index", DType::I32, &[9]),
                ("k", DType::I32, &[6]),
                ("uniform", DType::F32, &[9]),
                ALL9[0],
                ALL9[1],
            ],
        ),
        corner("segments, bf16, odd", &[("probs", DType::Bf16, &[2, 9001]), ALL2[0], ALL2[1]]),
    ],
    ..TOP_K_TOP_P_SAMPLING_FROM_PROBS
};

pub(crate) const MIN_P_SAMPLING_FROM_PROBS: Operator = Operator {
    name: "min_p_sampling_from_probs",
    summary: "a token from those at least min_p times as likely as the most likely",
    args: &[PROBS, ROW_INDEX, IDS, MASS, COUNT, MIN_P, UNIFORM],
    scalars: &[ScalarSpec { default: Scalar::Float(0.05), ..MIN_P_SCALAR }, SEED, OFFSET],
    cases: &[LLAMA],
    bench: BenchSizes::Cases(&[Case {
        label: "2048 x 151936",
        tensors: &[("probs", DType::F32, &[2048, 151936])],
        scalars: &[],
    }]),
    corners: &[
        corner("a wave", &[("probs", DType::F32, &[9, 100]), ALL9[0], ALL9[1]]),
        corner(
            "chosen rows, given uniform numbers",
            &[
                ("probs", DType::F32, &[6, 100]),
                ("row_index", DType::I32, &[9]),
                ("min_p", DType::F32, &[6]),
                ("uniform", DType::F32, &[9]),
                ALL9[0],
                ALL9[1],
            ],
        ),
        corner("segments, f16, odd", &[("probs", DType::F16, &[2, 9001]), ALL2[0], ALL2[1]]),
    ],
    ..TOP_K_TOP_P_SAMPLING_FROM_PROBS
};

pub(crate) const TOP_K_RENORM_PROBS: Operator = Operator {
    name: "top_k_renorm_probs",
    summary: "y = probs / max(mass, 1e-8) for the k most likely tokens, whose mass that is, else 0",
    args: &[PROBS, Y, K],
    scalars: &[K_SCALAR],
    cases: &[Case {
        label: "Llama-3 8B, 4 rows",
        tensors: &[("probs", DType::F32, &[4, 128_256])],
        scalars: &[],
    }],
    bench: BenchSizes::Cases(&[Case {
        label: "1024 x 151936",
        tensors: &[("probs", DType::F32, &[1024, 151936])],
        scalars: &[],
    }]),
    corners: &[
        corner("a wave", &[("probs", DType::F32, &[9, 100])]),
        corner("a wave, odd", &[("probs", DType::Bf16, &[9, 101]), ("k", DType::I32, &[9])]),
        corner("a block", &[("probs", DType::F16, &[2, 3000])]),
        corner("segments, bf16", &[("probs", DType::Bf16, &[2, 9000])]),
        corner("segments, f16", &[("probs", DType::F16, &[2, 9000])]),
        corner("segments, f32", &[("probs", DType::F32, &[2, 9000])]),
        corner("segments, bf16, odd", &[("probs", DType::Bf16, &[2, 9001])]),
        corner("segments, f16, odd", &[("probs", DType::F16, &[2, 9001])]),
        corner("segments, f32, odd", &[("probs", DType::F32, &[2, 9001])]),
    ],
    outputs: outputs_renorm,
    run: run_renorm,
    reference: reference_renorm,
    ..TOP_K_TOP_P_SAMPLING_FROM_PROBS
};

const NO_FILTER: &[(&str, Scalar)] =
    &[("k", Scalar::Int(0)), ("p", Scalar::Float(0.0)), ("min_p", Scalar::Float(0.0))];

pub(crate) const SAMPLE_FROM_LOGITS: Operator = Operator {
    name: "sample_from_logits",
    summary: "a token of softmax(logits / temperature) from those that top-k, top-p and min-p all keep",
    args: &[LOGITS, TEMPERATURE, ROW_INDEX, IDS, MASS, COUNT, K, P, MIN_P, UNIFORM],
    scalars: &[
        TEMPERATURE_SCALAR,
        ScalarSpec { summary: "as in top_k_sampling_from_probs; 0: off", ..K_SCALAR },
        ScalarSpec { summary: "as in top_p_sampling_from_probs; 0: off", ..P_SCALAR },
        MIN_P_SCALAR,
        ORDER,
        SEED,
        OFFSET,
    ],
    cases: &[
        Case {
            label: "Llama-3 8B, 4 rows",
            tensors: &[
                ("logits", DType::Bf16, &[4, 128_256]),
                ("mass", DType::F32, &[4]),
                ("count", DType::I32, &[4]),
            ],
            scalars: &[("temperature", Scalar::Float(0.7))],
        },
        Case {
            label: "GPT-OSS, 2 rows, no filter",
            tensors: &[("logits", DType::F32, &[2, 201_088])],
            scalars: NO_FILTER,
        },
    ],
    bench: BenchSizes::Cases(&[
        Case {
            label: "64 x 128256",
            tensors: &[("logits", DType::Bf16, &[64, 128256])],
            scalars: &[("k", Scalar::Int(50)), ("p", Scalar::Float(0.9))],
        },
        Case {
            label: "4096 x 151936",
            tensors: &[("logits", DType::Bf16, &[4096, 151936])],
            scalars: &[("k", Scalar::Int(50)), ("p", Scalar::Float(0.9))],
        },
    ]),
    corners: &[
        corner("a wave", &[("logits", DType::Bf16, &[9, 1000]), ALL9[0], ALL9[1]]),
        corner("a wave, odd", &[("logits", DType::F32, &[9, 301]), ALL9[0], ALL9[1]]),
        corner(
            "chosen rows, given uniform numbers",
            &[
                ("logits", DType::F32, &[6, 100]),
                ("temperature", DType::F32, &[6]),
                ("row_index", DType::I32, &[9]),
                ("k", DType::I32, &[6]),
                ("p", DType::F32, &[6]),
                ("min_p", DType::F32, &[6]),
                ("uniform", DType::F32, &[9]),
                ALL9[0],
                ALL9[1],
            ],
        ),
        Case { label: "no filter", tensors: &[("logits", DType::F16, &[9, 300])], scalars: NO_FILTER },
        Case {
            label: "greedy",
            tensors: &[("logits", DType::F16, &[9, 300]), ALL9[0], ALL9[1]],
            scalars: &[("temperature", Scalar::Float(0.0))],
        },
        corner("a block", &[("logits", DType::F32, &[2, 3000]), ("temperature", DType::F32, &[2]), ALL2[0]]),
        corner("segments, bf16", &[("logits", DType::Bf16, &[2, 9000]), ALL2[0]]),
        corner("segments, f16", &[("logits", DType::F16, &[2, 9000]), ALL2[0]]),
        corner("segments, f32", &[("logits", DType::F32, &[2, 9000]), ALL2[0], ALL2[1]]),
        corner("segments, bf16, odd", &[("logits", DType::Bf16, &[2, 9001]), ALL2[0]]),
        corner("segments, f16, odd", &[("logits", DType::F16, &[2, 9001]), ALL2[0]]),
        corner("segments, f32, odd", &[("logits", DType::F32, &[2, 9001]), ALL2[0], ALL2[1]]),
        Case {
            label: "segments, greedy",
            tensors: &[("logits", DType::Bf16, &[2, 20_000]), ALL2[0], ALL2[1]],
            scalars: &[("temperature", Scalar::Float(0.0))],
        },
    ],
    ..TOP_K_TOP_P_SAMPLING_FROM_PROBS
};

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let outputs = outputs_of(call, call.get(call.operator().args[0].name)?);
    let wanted = [("ids", DType::I32, true), ("mass", DType::F32, false), ("count", DType::I32, false)];
    let wanted = wanted.into_iter().filter(|(name, _, always)| *always || call.wants(name));
    Ok(wanted.map(|(name, dtype, _)| (name, TensorSpec::new(dtype, [outputs]))).collect())
}

fn outputs_renorm(call: &CallSpec) -> Result<Named<TensorSpec>> {
    Ok(vec![("y", call.get("probs")?.clone())])
}

/// The filters of the operator. For logits, values of zero disable a filter.
fn filters<'a>(inputs: &Inputs<'a>) -> Result<Filters<'a>> {
    let op = inputs.operator();
    let has = |name: &str| op.scalars.iter().any(|s| s.name == name);
    let logits = op.arg("logits").is_some();
    let mut filters = Filters::default();
    if has("k") {
        let k = per_row(inputs, "k", || Ok(i32::try_from(inputs.int("k")?).unwrap_or(i32::MAX)))?;
        filters.k = Some(k).filter(|k| !(logits && matches!(k, PerRow::All(0))));
    }
    if has("p") {
        let p = per_row(inputs, "p", || Ok(inputs.float("p")? as f32))?;
        filters.p = Some(p).filter(|p| !(logits && matches!(p, PerRow::All(0.0))));
    }
    if has("min_p") {
        filters.min_p = Some(per_row(inputs, "min_p", || Ok(inputs.float("min_p")? as f32))?);
    }
    if has("order") {
        filters.order = order(inputs)?;
    }
    Ok(filters)
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let op = inputs.operator();
    let name = op.args[0].name;
    let x = inputs.get(name)?;
    let bytes = sampling_workspace(stream.device().info(), outputs_of(&inputs, x), x.shape()[1]);
    let workspace = outputs.workspace(stream, bytes)?;
    let samples = Samples {
        ids: outputs.take("ids")?,
        mass: outputs.take_optional("mass")?,
        count: outputs.take_optional("count")?,
    };
    let row_index = inputs.optional_view("row_index")?;
    let (seed, offset) = seed(&inputs)?;
    let draw = Draw { seed, offset, uniform: inputs.optional_view("uniform")? };
    let filters = filters(&inputs)?;
    with_float!(op.name, name, x.dtype(), T => {
        let x = inputs.view::<T>(name)?;
        match (op.name, filters) {
            ("top_p_sampling_from_probs", Filters { p: Some(p), .. }) => {
                crate::top_p_sampling_from_probs(stream, x, row_index, samples, workspace, p, draw)
            }
            ("top_k_sampling_from_probs", Filters { k: Some(k), .. }) => {
                crate::top_k_sampling_from_probs(stream, x, row_index, samples, workspace, k, draw)
            }
            ("min_p_sampling_from_probs", Filters { min_p: Some(min_p), .. }) => {
                crate::min_p_sampling_from_probs(stream, x, row_index, samples, workspace, min_p, draw)
            }
            ("sample_from_logits", _) => {
                let t = per_row(&inputs, "temperature", || Ok(inputs.float("temperature")? as f32))?;
                let rows = SampledRows { temperature: t, row_index };
                crate::sample_from_logits(stream, x, rows, samples, workspace, filters, draw)
            }
            _ => {
                crate::top_k_top_p_sampling_from_probs(stream, x, row_index, samples, workspace, filters, draw)
            }
        }
    })
}

fn run_renorm(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let probs = inputs.get("probs")?;
    let bytes = sampling_workspace(stream.device().info(), probs.shape()[0], probs.shape()[1]);
    let workspace = outputs.workspace(stream, bytes)?;
    let k = per_row(&inputs, "k", || Ok(i32::try_from(inputs.int("k")?).unwrap_or(i32::MAX)))?;
    with_float!("top_k_renorm_probs", "probs", probs.dtype(), T => {
        let (probs, y) = (inputs.view::<T>("probs")?, outputs.take::<T>("y")?);
        crate::top_k_renorm_probs(stream, probs, y, workspace, k)
    })
}

/// The filters of one row.
fn filters_of_row(call: &HostCall, row: usize) -> Result<reference::Filters> {
    let op = call.operator();
    let logits = op.arg("logits").is_some();
    let value = |name: &'static str| -> Result<Option<f64>> {
        let scalar = match call.scalar(name) {
            Ok(Scalar::Int(k)) => k as f64,
            Ok(Scalar::Float(p)) => f64::from(p as f32),
            _ => return Ok(None),
        };
        let off = logits && scalar == 0.0 && call.optional(name).is_none();
        Ok(if off { None } else { Some(of_row(call, name, row, scalar)?) })
    };
    Ok(reference::Filters {
        k: value("k")?.map(|k| k as i64),
        p: value("p")?,
        min_p: value("min_p")?,
        order: if op.scalars.iter().any(|s| s.name == "order") { order(call)? } else { Default::default() },
    })
}

/// The clean probabilities of one row.
fn probabilities(call: &HostCall, row: usize, values: &[f64]) -> Result<Vec<f64>> {
    if call.operator().arg("logits").is_none() {
        return Ok(reference::clean(values));
    }
    let t = of_row(call, "temperature", row, f64::from(call.float("temperature")? as f32))?;
    Ok(reference::softmax(values, t))
}

fn reference_draw(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let x = call.get(call.operator().args[0].name)?;
    let rows = rows(x);
    let (seed, offset) = seed(call)?;
    let uniform = call.optional("uniform").map(|u| u.to_f64());
    let (mut ids, mut mass, mut count) = (Vec::new(), Vec::new(), Vec::new());
    for (b, row) in rows_of(call, x).into_iter().enumerate() {
        let Some(row) = row else {
            ids.push(0.0);
            mass.push(f64::NAN);
            count.push(0.0);
            continue;
        };
        let probs = probabilities(call, row, &rows[row])?;
        let kept = reference::kept(&probs, filters_of_row(call, row)?);
        let u = uniform.as_ref().map_or_else(|| reference::uniform(seed, offset, b), |u| u[b]);
        ids.push(reference::draw(&probs, &kept, u) as f64);
        mass.push(kept.mass);
        count.push(kept.count as f64);
    }
    let all = [("ids", ids), ("mass", mass), ("count", count)];
    let wanted = all.into_iter().filter(|(name, _)| *name == "ids" || call.wants(name));
    Ok(wanted.map(|(name, values)| (name, HostTensorF64::new([values.len()], values))).collect())
}

fn reference_renorm(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let probs = call.get("probs")?;
    let mut values = Vec::new();
    for (row, p) in rows(probs).iter().enumerate() {
        let p = reference::clean(p);
        values.extend(reference::renorm(&p, &reference::kept(&p, filters_of_row(call, row)?)));
    }
    Ok(vec![("y", HostTensorF64::new(probs.shape(), values))])
}
