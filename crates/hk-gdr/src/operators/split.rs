//! `fused_qkvzba_split`.

use super::recurrent::{case, size};
use crate::split::split_shapes;
use crate::{HeadSizes, SplitOutputs, kernels};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, HostTensor, HostTensorF64, Named, Operator, Scalar,
    TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Result, with_float};

const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];

const fn output(name: &'static str, rank: usize, shape: &'static str) -> ArgSpec {
    ArgSpec::output(name, Tolerance::Exact, FLOATS, rank, shape)
}

pub(crate) const FUSED_QKVZBA_SPLIT: Operator = Operator {
    name: "fused_qkvzba_split",
    family: "hk-gdr",
    summary: "q, k, v, z and b, a by key head to all q, all k, all v; z; b; a",
    args: &[
        ArgSpec::input("mixed_qkvz", FLOATS, 2, "[T, k_heads (2K + 2rV)]"),
        ArgSpec::input("mixed_ba", FLOATS, 2, "[T, k_heads 2r]"),
        output("qkv", 2, "[T, 2 k_heads K + v_heads V]"),
        output("z", 3, "[T, v_heads, V]"),
        output("b", 2, "[T, v_heads]"),
        output("a", 2, "[T, v_heads]"),
    ],
    scalars: &[
        size("k_heads", 16, "heads of q and k"),
        size("v_heads", 32, "heads of v and z"),
        size("k_dim", 128, "elements of a head of q and k"),
        size("v_dim", 128, "elements of a head of v and z"),
    ],
    kernels: &[&kernels::SPLIT],
    cases: &[case!("Qwen3-Next, 64 tokens"; ; mixed_qkvz Bf16 [64, 12_288] mixed_ba Bf16 [64, 64])],
    bench: BenchSizes::Cases(&[
        case!("Qwen3-Next, 8192 tokens"; ; mixed_qkvz Bf16 [8192, 12_288] mixed_ba Bf16 [8192, 64]),
    ]),
    corners: &[
        case!("vectors"; k_heads = Scalar::Count(2), v_heads = Scalar::Count(4), k_dim = Scalar::Count(16), v_dim = Scalar::Count(24);
            mixed_qkvz Bf16 [5, 256] mixed_ba Bf16 [5, 8]),
        case!("elements"; k_heads = Scalar::Count(3), v_heads = Scalar::Count(6), k_dim = Scalar::Count(5), v_dim = Scalar::Count(3);
            mixed_qkvz F16 [4, 66] mixed_ba F16 [4, 12]),
        case!("vectors"; k_heads = Scalar::Count(1), v_heads = Scalar::Count(4), k_dim = Scalar::Count(8), v_dim = Scalar::Count(4);
            mixed_qkvz F32 [3, 48] mixed_ba F32 [3, 8]),
        case!("elements"; k_heads = Scalar::Count(1), v_heads = Scalar::Count(1), k_dim = Scalar::Count(7), v_dim = Scalar::Count(5);
            mixed_qkvz F32 [3, 24] mixed_ba F32 [3, 2]),
    ],
    outputs,
    run: |stream, call| {
        let (inputs, mut outputs) = call.split();
        let sizes = sizes::<hk_core::registry::DynTensor>(&inputs)?;
        with_float!("fused_qkvzba_split", "mixed_qkvz", inputs.get("mixed_qkvz")?.dtype(), T => {
            let outputs = SplitOutputs::<T> {
                qkv: outputs.take("qkv")?,
                z: outputs.take("z")?,
                b: outputs.take("b")?,
                a: outputs.take("a")?,
            };
            crate::fused_qkvzba_split(stream, inputs.view("mixed_qkvz")?, inputs.view("mixed_ba")?, outputs, sizes)
        })
    },
    reference: |call| {
        let specs = outputs(&call.spec())?;
        let HeadSizes { k_heads, v_heads, k_dim, v_dim } = sizes(call)?;
        let group = v_heads / k_heads;
        // Rows by key head, each of parts of some lengths: the elements of one part of all heads.
        let part = |rows: &HostTensor, lens: &[usize], which: usize| -> Vec<Vec<f64>> {
            let values = rows.to_f64();
            let head: usize = lens.iter().sum();
            let from: usize = lens[..which].iter().sum();
            let row =
                |row: &[f64]| row.chunks(head).flat_map(|h| h[from..from + lens[which]].to_vec()).collect();
            values.chunks(head * k_heads).map(row).collect()
        };
        let (qkvz, ba) = (call.get("mixed_qkvz")?, call.get("mixed_ba")?);
        let lens = [k_dim, k_dim, group * v_dim, group * v_dim];
        let [q, k, v, z] = [0, 1, 2, 3].map(|i| part(qkvz, &lens, i));
        let [b, a] = [0, 1].map(|i| part(ba, &[group, group], i));
        let rows = q.into_iter().zip(k).zip(v);
        let qkv = rows.flat_map(|((q, k), v)| [q, k, v].concat()).collect();
        let values = [qkv, z.concat(), b.concat(), a.concat()];
        let made = specs.into_iter().zip(values);
        Ok(made.map(|((name, spec), values)| (name, HostTensorF64::new(spec.shape, values))).collect())
    },
    traffic: Traffic::once,
};

fn sizes<D: Described>(call: &Call<D>) -> Result<HeadSizes> {
    Ok(HeadSizes {
        k_heads: call.size("k_heads")?,
        v_heads: call.size("v_heads")?,
        k_dim: call.size("k_dim")?,
        v_dim: call.size("v_dim")?,
    })
}

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let (qkvz, ba) = (call.get("mixed_qkvz")?, call.get("mixed_ba")?);
    let dtype = qkvz.dtype;
    if ba.dtype != dtype {
        let want = format!("{dtype} (dtype of mixed_qkvz)");
        return Err(Error::dtype(call.operator().name, "mixed_ba", ba.dtype, want));
    }
    let [qkv, z, gates] = split_shapes(&qkvz.shape, &ba.shape, sizes(call)?)?;
    let spec = |shape| TensorSpec::new(dtype, shape);
    Ok(vec![("qkv", spec(qkv)), ("z", spec(z)), ("b", spec(gates.clone())), ("a", spec(gates))])
}
