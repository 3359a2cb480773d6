//! `topk`.

use super::{FLOATS, expect_columns};
use crate::{TopkIndex, TopkOrder, TopkOutputs, kernels, reference, topk_workspace};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Operator,
    Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Float, Result, Stream, with_float};

pub(crate) const TOPK: Operator = Operator {
    name: "topk",
    family: "hk-activation",
    summary: "the k first elements of each row, by value, then by column, with their columns",
    args: &[
        ArgSpec::input("x", FLOATS, 2, "[.., cols]").ranks(1, 5),
        ArgSpec::output("values", Tolerance::Exact, FLOATS, 2, "[.., k]").ranks(1, 5),
        ArgSpec::output("indices", Tolerance::Exact, &[DType::I32, DType::I64], 2, "[.., k]").ranks(1, 5),
    ],
    scalars: &[
        ScalarSpec { name: "k", default: Scalar::Count(8), choices: &[], summary: "elements of each row" },
        ScalarSpec {
            name: "largest",
            default: Scalar::Bool(true),
            choices: &[],
            summary: "the largest rather than the smallest",
        },
        ScalarSpec {
            name: "index_dtype",
            default: Scalar::Choice("i32"),
            choices: &["i32", "i64"],
            summary: "type of the indices",
        },
    ],
    kernels: &[&kernels::TOPK, &kernels::TOPK_SORT],
    cases: &[
        case(
            "Qwen3 30B-A3B router, 1024 tokens",
            &[("x", DType::F32, &[1024, 128])],
            &[("k", Scalar::Int(8))],
        ),
        case(
            "DeepSeek-V3 router, 1024 tokens",
            &[("x", DType::Bf16, &[1024, 256])],
            &[("k", Scalar::Int(8))],
        ),
        case("512 rows of 1024, k = 32", &[("x", DType::F32, &[512, 1024])], &[("k", Scalar::Int(32))]),
        case(
            "Llama-3 logits, batch 4, k = 50",
            &[("x", DType::Bf16, &[4, 128_256])],
            &[("k", Scalar::Int(50))],
        ),
    ],
    bench: BenchSizes::Cases(&[
        Case {
            label: "1024 x 256, k = 10",
            tensors: &[("x", DType::Bf16, &[1024, 256])],
            scalars: &[("k", Scalar::Int(10)), ("index_dtype", Scalar::Choice("i64"))],
        },
        Case {
            label: "4096 x 256, k = 10",
            tensors: &[("x", DType::Bf16, &[4096, 256])],
            scalars: &[("k", Scalar::Int(10)), ("index_dtype", Scalar::Choice("i64"))],
        },
        Case {
            label: "4096 x 1024, k = 32",
            tensors: &[("x", DType::Bf16, &[4096, 1024])],
            scalars: &[("k", Scalar::Int(32)), ("index_dtype", Scalar::Choice("i64"))],
        },
        Case {
            label: "64 x 128256, k = 50",
            tensors: &[("x", DType::Bf16, &[64, 128256])],
            scalars: &[("k", Scalar::Int(50)), ("index_dtype", Scalar::Choice("i64"))],
        },
        Case {
            label: "8192 x 65536, k = 32",
            tensors: &[("x", DType::Bf16, &[8192, 65536])],
            scalars: &[("k", Scalar::Int(32)), ("index_dtype", Scalar::Choice("i64"))],
        },
    ]),
    corners: &CORNERS,
    outputs,
    run,
    reference,
    traffic: Traffic::once,
};

const fn case(
    label: &'static str,
    tensors: &'static [(&'static str, DType, &'static [usize])],
    scalars: &'static [(&'static str, Scalar)],
) -> Case {
    Case { label, tensors, scalars }
}

macro_rules! corners {
    ($dtype:ident) => {
        corners!(@cases $dtype: 150 64 8, 70 128 5 smallest, 60 256 8, 50 99 3, 30 256 16, 30 512 32, 30 1024 64,
            30 1024 10 smallest, 30 999 33, 6 4096 64, 3 16384 20, 6 3001 64, 3 9999 50 smallest, 2 20000 64, 2 16387 9,
            6 1024 100, 2 4097 300 smallest)
    };
    (@cases $dtype:ident: $($rows:literal $cols:literal $k:literal $($smallest:ident)?),+) => {
        [$(Case {
            label: concat!($k, " of ", $rows, " rows of ", $cols),
            tensors: &[("x", DType::$dtype, &[$rows, $cols])],
            scalars: corners!(@scalars $k $($smallest)?),
        }),+]
    };
    (@scalars $k:literal smallest) => {
        &[
            ("k", Scalar::Int($k)),
            ("largest", Scalar::Bool(false)),
            ("index_dtype", Scalar::Choice("i64")),
        ]
    };
    (@scalars $k:literal) => {
        &[("k", Scalar::Int($k))]
    };
}

/// Each entry point, with enough rows that blocks loop on one compute unit. Rows of odd length take the scalar path.
static CORNERS: [Case; 51] = {
    const CASES: [[Case; 17]; 3] = [corners!(Bf16), corners!(F16), corners!(F32)];
    let mut all = [CASES[0][0]; 51];
    let mut i = 0;
    while i < all.len() {
        all[i] = CASES[i / 17][i % 17];
        i += 1;
    }
    all
};

/// `k`, from 1 to the columns of `x`.
fn k<V: Described>(call: &Call<V>) -> Result<usize> {
    let (k, x) = (call.int("k")?, call.get("x")?.shape());
    let cols = x.last().copied().unwrap_or(0);
    expect_columns("topk", x, cols)?;
    let refused = || Error::argument("topk", "k", k, format!("1 to {cols} (columns of x)"));
    usize::try_from(k).ok().filter(|k| (1..=cols).contains(k)).ok_or_else(refused)
}

fn outputs(call: &CallSpec) -> Result<Vec<(&'static str, TensorSpec)>> {
    let x = call.get("x")?;
    let mut shape = x.shape.clone();
    if let Some(last) = shape.last_mut() {
        *last = k(call)?;
    }
    let index = if call.choice("index_dtype")? == "i64" { DType::I64 } else { DType::I32 };
    Ok(vec![("values", TensorSpec::new(x.dtype, shape.clone())), ("indices", TensorSpec::new(index, shape))])
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let wide = call.split().0.choice("index_dtype")? == "i64";
    let dtype = call.split().0.get("x")?.dtype();
    with_float!("topk", "x", dtype, T => if wide { run_as::<T, i64>(stream, call) } else { run_as::<T, i32>(stream, call) })
}

fn run_as<T: Float, I: TopkIndex>(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let x = inputs.view::<T>("x")?;
    let cols = x.shape().last().copied().unwrap_or(0);
    let rows = x.numel() / cols.max(1);
    let len = topk_workspace(stream.device().info(), rows, cols, k(&inputs)?);
    let workspace = if len == 0 { None } else { Some(outputs.workspace(stream, len)?) };
    let order = if inputs.bool("largest")? { TopkOrder::Largest } else { TopkOrder::Smallest };
    let (values, indices) = (outputs.take::<T>("values")?, outputs.take::<I>("indices")?);
    crate::topk(stream, x, TopkOutputs { values, indices }, workspace, order)
}

fn reference(call: &HostCall) -> Result<Vec<(&'static str, HostTensorF64)>> {
    let x = call.get("x")?;
    let spec = outputs(&call.spec())?;
    let cols = x.shape().last().copied().unwrap_or(0);
    let result = reference::topk(&x.to_f64(), cols, k(call)?, call.bool("largest")?);
    let indices = result.indices.iter().map(|&i| i as f64).collect();
    let tensor = |values| HostTensorF64::new(spec[0].1.shape.clone(), values);
    Ok(vec![("values", tensor(result.values)), ("indices", tensor(indices))])
}
