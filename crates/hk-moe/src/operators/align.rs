//! `moe_align_block_size`.

use super::{I32, ints};
use crate::{TileLists, kernels, moe_align_len, moe_align_workspace, reference};
use hk_core::registry::{
    ArgSpec, BenchSizes, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named, Operator,
    Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Result, Stream};

const E256: &[(&str, Scalar)] = &[("experts", Scalar::Count(256)), ("block_size", Scalar::Count(64))];

pub(crate) const MOE_ALIGN_BLOCK_SIZE: Operator = Operator {
    name: "moe_align_block_size",
    family: "hk-moe",
    summary: "gates sorted by expert, each expert's padded to whole tiles of block_size",
    args: &[
        ArgSpec::input("topk_ids", I32, 2, "[T, k]").sampled(Sample::Integers { low: -1, high: 258 }),
        ArgSpec::input("expert_map", I32, 1, "[E]").optional().sampled(Sample::Integers { low: -2, high: 9 }),
        ArgSpec::output("sorted_token_ids", Tolerance::Exact, I32, 1, "[EM]"),
        ArgSpec::output("expert_ids", Tolerance::Exact, I32, 1, "[tiles]"),
        ArgSpec::output("num_tokens_post_padded", Tolerance::Exact, I32, 1, "[1]"),
    ],
    scalars: &[
        ScalarSpec {
            name: "experts",
            default: Scalar::Count(256),
            choices: &[],
            summary: "experts, up to 1024",
        },
        ScalarSpec {
            name: "block_size",
            default: Scalar::Count(64),
            choices: &[],
            summary: "slots of a tile: 16, 32, 64, 128 or 256",
        },
    ],
    kernels: &[&kernels::LISTS],
    cases: &[
        Case {
            label: "DeepSeek-V3, 64 tokens",
            tensors: &[("topk_ids", DType::I32, &[64, 8])],
            scalars: E256,
        },
        Case {
            label: "Qwen3 235B, 4096 tokens",
            tensors: &[("topk_ids", DType::I32, &[4096, 8])],
            scalars: &[("experts", Scalar::Count(128)), ("block_size", Scalar::Count(128))],
        },
    ],
    bench: BenchSizes::Cases(&[Case {
        label: "DeepSeek-V3, 16384 tokens",
        tensors: &[("topk_ids", DType::I32, &[16_384, 8])],
        scalars: E256,
    }]),
    corners: &[
        Case { label: "one launch", tensors: &[("topk_ids", DType::I32, &[33, 3])], scalars: &[] },
        Case {
            label: "two launches, expert map",
            tensors: &[("topk_ids", DType::I32, &[515, 5]), ("expert_map", DType::I32, &[129])],
            scalars: &[("experts", Scalar::Count(129)), ("block_size", Scalar::Count(16))],
        },
    ],
    outputs,
    run,
    reference: reference_align,
    traffic: Traffic::once,
};

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let ids = call.get("topk_ids")?;
    let (experts, block) = (call.size("experts")?, call.size("block_size")?);
    let (tokens, k) = (ids.shape()[0], ids.shape()[1]);
    let op = call.operator().name;
    if !(1..=1024).contains(&experts) {
        return Err(Error::argument(op, "experts", experts, "1 to 1024"));
    }
    if !(16..=256).contains(&block) || !block.is_power_of_two() {
        return Err(Error::argument(op, "block_size", block, "16, 32, 64, 128 or 256"));
    }
    if !(1..=32).contains(&k) {
        return Err(Error::argument(op, "topk_ids", format!("k = {k}"), "k from 1 to 32"));
    }
    if let Some(map) = call.optional("expert_map")
        && map.shape() != [experts]
    {
        return Err(Error::shape(op, "expert_map", map.shape(), format!("[{experts}]")));
    }
    let len = moe_align_len(tokens, k, experts, block);
    Ok(vec![
        ("sorted_token_ids", TensorSpec::new(DType::I32, [len])),
        ("expert_ids", TensorSpec::new(DType::I32, [len.div_ceil(block)])),
        ("num_tokens_post_padded", TensorSpec::new(DType::I32, [1])),
    ])
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let (experts, block) = (inputs.size("experts")?, inputs.size("block_size")?);
    let ids = inputs.view::<i32>("topk_ids")?;
    let out = TileLists {
        sorted_token_ids: outputs.take("sorted_token_ids")?,
        expert_ids: outputs.take("expert_ids")?,
        num_tokens_post_padded: outputs.take("num_tokens_post_padded")?,
    };
    let workspace =
        outputs.workspace(stream, moe_align_workspace(ids.shape()[0], ids.shape()[1], experts))?;
    crate::moe_align_block_size(
        stream,
        ids,
        inputs.optional_view("expert_map")?,
        out,
        workspace,
        experts,
        block,
    )
}

fn reference_align(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let specs = outputs(&call.spec())?;
    let map = call.optional("expert_map").map(|map| map.elements::<i32>()).transpose()?;
    let (experts, block) = (call.size("experts")?, call.size("block_size")?);
    let ids = call.get("topk_ids")?.elements::<i32>()?;
    let (len, tiles) = (specs[0].1.shape[0], specs[1].1.shape[0]);
    let want = reference::moe_align_block_size(&ids, experts, block, map.as_deref(), len, tiles);
    Ok(vec![
        ("sorted_token_ids", ints(&want.sorted_token_ids)),
        ("expert_ids", ints(&want.expert_ids)),
        ("num_tokens_post_padded", ints(&[want.num_tokens_post_padded])),
    ])
}
