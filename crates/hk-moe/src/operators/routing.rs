//! `moe_routing`, `moe_expt_data`, `moe_bitmatrix`.

use super::topk::{BIAS, DEEPSEEK, LOGITS, SCALARS, checked, options, weights_dtype};
use super::{FLOATS, I32, ints};
use crate::{
    ExptData, Routing, RoutingOptions, kernels, moe_block_m, moe_max_tiles, moe_routing_workspace, reference,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named,
    Operator, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Float, Result, Stream, with_float};

const fn int_output(name: &'static str, shape: &'static str) -> ArgSpec {
    ArgSpec::output(name, Tolerance::Exact, I32, 1, shape)
}

const BLOCK_M: ScalarSpec = ScalarSpec {
    name: "block_m",
    default: Scalar::Count(0),
    choices: &[],
    summary: "rows of a tile: 16, 32, 64, 128 or 256; 0: by the mean of an expert",
};

const ROUTING_SCALARS: &[ScalarSpec] = &{
    let mut all = [BLOCK_M; SCALARS.len() + 1];
    let mut i = 0;
    while i < SCALARS.len() {
        all[i] = SCALARS[i];
        i += 1;
    }
    all
};

macro_rules! case {
    ($label:literal, $dtype:ident $tokens:literal $experts:literal, bias, $scalars:expr) => {
        Case {
            label: $label,
            tensors: &[("logits", DType::$dtype, &[$tokens, $experts]), ("bias", DType::F32, &[$experts])],
            scalars: $scalars,
        }
    };
    ($label:literal, $dtype:ident $tokens:literal $experts:literal, $scalars:expr) => {
        Case { label: $label, tensors: &[("logits", DType::$dtype, &[$tokens, $experts])], scalars: $scalars }
    };
}

const QWEN: &[(&str, Scalar)] = &[("scores", Scalar::Choice("softmax")), ("renormalize", Scalar::Bool(true))];

pub(crate) const MOE_ROUTING: Operator = Operator {
    name: "moe_routing",
    family: "hk-moe",
    summary: "the k experts of each token, and the gates sorted by expert",
    args: &[
        LOGITS,
        BIAS,
        int_output("gather_indx", "[T k]"),
        int_output("scatter_indx", "[T k]"),
        ArgSpec::output("gate_scal", Tolerance::Elementwise, FLOATS, 1, "[T k]"),
        int_output("expt_hist", "[E]"),
        int_output("token_offs_raw", "[E + 1]"),
        int_output("token_offs_pad", "[E + 1]"),
        int_output("block_pid_map", "[tiles]"),
    ],
    scalars: ROUTING_SCALARS,
    kernels: &[&kernels::ROUTING, &kernels::LISTS],
    cases: &[
        case!("DeepSeek-V3, 64 tokens", F32 64 256, bias, DEEPSEEK),
        case!("DeepSeek-V3, 1024 tokens", F32 1024 256, bias, DEEPSEEK),
        case!("Qwen3 235B, 4096 tokens", Bf16 4096 128, QWEN),
        case!("GPT-OSS 120B, 128 tokens", Bf16 128 128, &[("k", Scalar::Count(4))]),
    ],
    bench: BenchSizes::Cases(&[
        case!("DeepSeek-V3, 1 token", F32 1 256, bias, DEEPSEEK),
        case!("DeepSeek-V3, 256 tokens", F32 256 256, bias, DEEPSEEK),
        case!("DeepSeek-V3, 16384 tokens", F32 16384 256, bias, DEEPSEEK),
        case!("Qwen3 235B, 16384 tokens", Bf16 16384 128, QWEN),
        case!("GPT-OSS 120B, 16384 tokens", Bf16 16384 128, &[("k", Scalar::Count(4))]),
    ]),
    corners: &[
        case!("one launch, groups", F32 35 72, bias, DEEPSEEK),
        case!("one launch, f16, square roots", F16 17 100, bias, &[("scores", Scalar::Choice("sqrt_softplus"))]),
        case!("one launch, bf16", Bf16 33 128, &[("k", Scalar::Count(3)), ("block_m", Scalar::Count(16))]),
        case!("one launch, many experts", Bf16 19 300, QWEN),
        case!("one launch, f16, many experts", F16 18 1024, &[("scores", Scalar::Choice("logits"))]),
        case!("one launch, f32, many experts", F32 18 512, bias, &[("scores", Scalar::Choice("sigmoid"))]),
        case!("two launches, groups", F32 270 72, bias, DEEPSEEK),
        case!("two launches, f16", F16 300 33, &[("k", Scalar::Count(5))]),
        case!("two launches, bf16", Bf16 290 128, QWEN),
        case!("two launches, many experts", Bf16 260 260, QWEN),
        case!("two launches, f16, many experts", F16 259 257, &[("k", Scalar::Count(2))]),
        case!("two launches, f32, many experts", F32 258 264, &[("k", Scalar::Count(2))]),
    ],
    outputs: routing_outputs,
    run: run_routing,
    reference: reference_routing,
    traffic: Traffic::once,
};

fn block_m<V: Described>(call: &Call<V>, gates: usize, of_mean: usize) -> Result<usize> {
    let op = call.operator().name;
    let block = match call.size("block_m")? {
        0 => of_mean,
        block if (16..=256).contains(&block) && block.is_power_of_two() => block,
        block => return Err(Error::argument(op, "block_m", block, "16, 32, 64, 128 or 256")),
    };
    if gates > block << 15 {
        return Err(Error::too_large(op, "gates", format!("{gates} gates"), (block << 15) as u64));
    }
    Ok(block)
}

fn expt_specs(experts: usize, tiles: usize) -> [(&'static str, TensorSpec); 3] {
    [
        ("token_offs_raw", TensorSpec::new(DType::I32, [experts + 1])),
        ("token_offs_pad", TensorSpec::new(DType::I32, [experts + 1])),
        ("block_pid_map", TensorSpec::new(DType::I32, [tiles])),
    ]
}

/// `[tokens, experts, k, block_m, tiles]`.
fn sizes<V: Described>(call: &Call<V>) -> Result<[usize; 5]> {
    let [tokens, experts, k] = checked(call)?;
    let gates = tokens * k;
    let block = block_m(call, gates, moe_block_m(tokens, k, experts))?;
    Ok([tokens, experts, k, block, moe_max_tiles(gates, experts, block)])
}

fn routing_outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let [tokens, experts, k, _, tiles] = sizes(call)?;
    let gates = |dtype| TensorSpec::new(dtype, [tokens * k]);
    let mut all = vec![
        ("gather_indx", gates(DType::I32)),
        ("scatter_indx", gates(DType::I32)),
        ("gate_scal", gates(weights_dtype(call)?)),
        ("expt_hist", TensorSpec::new(DType::I32, [experts])),
    ];
    all.extend(expt_specs(experts, tiles));
    Ok(all)
}

fn run_routing(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, _) = call.split();
    let (dtype, weights) = (inputs.get("logits")?.dtype(), weights_dtype(&inputs)?);
    with_float!("moe_routing", "logits", dtype, T => match weights {
        DType::F32 => run_routing_as::<T, f32>(stream, call),
        _ => run_routing_as::<T, T>(stream, call),
    })
}

fn run_routing_as<T: Float, W: Float>(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let [tokens, experts, k, block_m, _] = sizes(&inputs)?;
    let out = Routing::<W> {
        gather_indx: outputs.take("gather_indx")?,
        scatter_indx: outputs.take("scatter_indx")?,
        gate_scal: outputs.take("gate_scal")?,
        expt_hist: outputs.take("expt_hist")?,
        expt_data: ExptData {
            token_offs_raw: outputs.take("token_offs_raw")?,
            token_offs_pad: outputs.take("token_offs_pad")?,
            block_pid_map: outputs.take("block_pid_map")?,
        },
    };
    let workspace = outputs.workspace(stream, moe_routing_workspace(tokens, k, experts))?;
    let (logits, bias) = (inputs.view::<T>("logits")?, inputs.optional_view("bias")?);
    let all = RoutingOptions { k, block_m, topk: options(&inputs)? };
    crate::moe_routing(stream, logits, bias, out, workspace, &all)
}

fn reference_expt(hist: &[i32], block_m: usize, tiles: usize) -> Named<HostTensorF64> {
    let want = reference::moe_expt_data(hist, block_m, tiles);
    vec![
        ("token_offs_raw", ints(&want.token_offs_raw)),
        ("token_offs_pad", ints(&want.token_offs_pad)),
        ("block_pid_map", ints(&want.block_pid_map)),
    ]
}

fn reference_routing(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let [_, experts, k, block_m, tiles] = sizes(call)?;
    let bias = call.optional("bias").map(|bias| bias.to_f64());
    let logits = call.get("logits")?.to_f64();
    let chosen = reference::moe_topk(&logits, experts, bias.as_deref(), k, &options(call)?, 0.0);
    let want = reference::moe_sort(&chosen, experts);
    let mut all = vec![
        ("gather_indx", ints(&want.gather_indx)),
        ("scatter_indx", ints(&want.scatter_indx)),
        ("gate_scal", HostTensorF64::new([want.gate_scal.len()], want.gate_scal)),
        ("expt_hist", ints(&want.expt_hist)),
    ];
    all.extend(reference_expt(&want.expt_hist, block_m, tiles));
    Ok(all)
}

const GATES: ScalarSpec = ScalarSpec {
    name: "gates",
    default: Scalar::Count(1024),
    choices: &[],
    summary: "gates of all experts, from which the length of the map follows",
};

/// Counts of up to 15: no more gates than that many experts have together.
pub(crate) const MOE_EXPT_DATA: Operator = Operator {
    name: "moe_expt_data",
    family: "hk-moe",
    summary: "offsets of experts in gates and tiles, and a map of tiles, from counts",
    args: &[
        ArgSpec::input("hist", I32, 1, "[E]").sampled(Sample::Integers { low: 0, high: 16 }),
        int_output("token_offs_raw", "[E + 1]"),
        int_output("token_offs_pad", "[E + 1]"),
        int_output("block_pid_map", "[tiles]"),
    ],
    scalars: &[GATES, ScalarSpec { default: Scalar::Count(16), ..BLOCK_M }],
    kernels: &[&kernels::LISTS],
    cases: &[Case {
        label: "DeepSeek-V3, 256 tokens",
        tensors: &[("hist", DType::I32, &[256])],
        scalars: &[("gates", Scalar::Count(3840))],
    }],
    bench: BenchSizes::Cases(&[Case {
        label: "DeepSeek-V3, 16384 tokens",
        tensors: &[("hist", DType::I32, &[256])],
        scalars: &[("gates", Scalar::Count(131_072))],
    }]),
    corners: &[Case {
        label: "67 experts",
        tensors: &[("hist", DType::I32, &[67])],
        scalars: &[("gates", Scalar::Count(1005))],
    }],
    outputs: expt_outputs,
    run: run_expt,
    reference: |call| {
        let [_, block, tiles] = expt_sizes(call)?;
        let gates = call.size("gates")?;
        let hist = call.get("hist")?.elements::<i32>()?;
        let trusted = hist.iter().map(|&n| (n as u32).min(gates as u32) as i32);
        Ok(reference_expt(&trusted.collect::<Vec<_>>(), block, tiles))
    },
    traffic: Traffic::once,
};

/// `[experts, block_m, tiles]`.
fn expt_sizes<V: Described>(call: &Call<V>) -> Result<[usize; 3]> {
    let op = call.operator().name;
    let experts = call.get("hist")?.shape()[0];
    if !(1..=1024).contains(&experts) {
        return Err(Error::argument(op, "hist", experts, "1 to 1024"));
    }
    let gates = call.size("gates")?;
    let block = block_m(call, gates, moe_block_m(gates, 1, experts))?;
    Ok([experts, block, moe_max_tiles(gates, experts, block)])
}

fn expt_outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let [experts, _, tiles] = expt_sizes(call)?;
    Ok(expt_specs(experts, tiles).into())
}

fn run_expt(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let [_, block, _] = expt_sizes(&inputs)?;
    let out = ExptData {
        token_offs_raw: outputs.take("token_offs_raw")?,
        token_offs_pad: outputs.take("token_offs_pad")?,
        block_pid_map: outputs.take("block_pid_map")?,
    };
    crate::moe_expt_data(stream, inputs.view("hist")?, out, inputs.size("gates")?, block)
}

const PART: ScalarSpec = ScalarSpec {
    name: "part",
    default: Scalar::Count(32),
    choices: &[],
    summary: "tokens of a part, a multiple of 32",
};
const TOKENS: ScalarSpec = ScalarSpec {
    name: "tokens",
    default: Scalar::Count(0),
    choices: &[],
    summary: "tokens, up to the rows of the bits; 0: as many",
};

pub(crate) const MOE_BITMATRIX: Operator = Operator {
    name: "moe_bitmatrix",
    family: "hk-moe",
    summary: "how many tokens have each expert, and how many before each part of the tokens",
    args: &[
        ArgSpec::input("bitmatrix", I32, 2, "[words, T up to 32]")
            .sampled(Sample::Integers { low: i32::MIN as i64, high: i32::MAX as i64 }),
        int_output("hist", "[32 words]"),
        ArgSpec::output("partials", Tolerance::Exact, I32, 2, "[parts, 32 words]"),
    ],
    scalars: &[TOKENS, PART],
    kernels: &[&kernels::BITMATRIX],
    cases: &[
        Case {
            label: "DeepSeek-V3, 256 tokens",
            tensors: &[("bitmatrix", DType::I32, &[8, 256])],
            scalars: &[],
        },
        Case {
            label: "Qwen3 235B, 4096 tokens",
            tensors: &[("bitmatrix", DType::I32, &[4, 4096])],
            scalars: &[],
        },
    ],
    bench: BenchSizes::Cases(&[Case {
        label: "DeepSeek-V3, 16384 tokens",
        tensors: &[("bitmatrix", DType::I32, &[8, 16_384])],
        scalars: &[],
    }]),
    corners: &[Case {
        label: "parts of 64",
        tensors: &[("bitmatrix", DType::I32, &[4, 352])],
        scalars: &[("part", Scalar::Count(64)), ("tokens", Scalar::Count(333))],
    }],
    outputs: bits_outputs,
    run: run_bits,
    reference: reference_bits,
    traffic: Traffic::once,
};

/// `[words, rows, tokens, part]`.
fn bits_sizes<V: Described>(call: &Call<V>) -> Result<[usize; 4]> {
    let op = call.operator().name;
    let bits = call.get("bitmatrix")?.shape();
    let (words, rows) = (bits[0], bits[1]);
    let (tokens, part) = (call.size("tokens")?, call.size("part")?);
    if words > 32 {
        return Err(Error::argument(op, "bitmatrix", format!("{words} words"), "at most 32"));
    }
    if tokens > rows {
        return Err(Error::argument(op, "tokens", tokens, format!("at most {rows} (rows of bitmatrix)")));
    }
    if part == 0 || !part.is_multiple_of(32) {
        return Err(Error::argument(op, "part", part, "a multiple of 32"));
    }
    Ok([words, rows, if tokens == 0 { rows } else { tokens }, part])
}

fn bits_outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let [words, _, tokens, part] = bits_sizes(call)?;
    Ok(vec![
        ("hist", TensorSpec::new(DType::I32, [32 * words])),
        ("partials", TensorSpec::new(DType::I32, [tokens.div_ceil(part), 32 * words])),
    ])
}

fn run_bits(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let [_, _, tokens, part] = bits_sizes(&inputs)?;
    let (hist, partials) = (outputs.take("hist")?, outputs.take("partials")?);
    crate::moe_bitmatrix(stream, inputs.view("bitmatrix")?, hist, partials, tokens, part)
}

fn reference_bits(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let [words, rows, tokens, part] = bits_sizes(call)?;
    let bits = call.get("bitmatrix")?.elements::<i32>()?;
    let (hist, partials) = reference::moe_bitmatrix(&bits, rows, tokens, part);
    let shape = [tokens.div_ceil(part), 32 * words];
    let partials = partials.into_iter().map(f64::from).collect();
    Ok(vec![("hist", ints(&hist)), ("partials", HostTensorF64::new(shape, partials))])
}
