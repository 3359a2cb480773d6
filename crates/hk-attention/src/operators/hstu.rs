//! Registry entries of `hstu_attn` and `hstu_attn_bwd`.

use super::attention::{CAUSAL, OUT, indices, packed};
use super::common::{INDICES_32, expect_dtypes, expect_shape, integers};
use super::mha::{sizes, specs};
use crate::reference::hstu::Hstu;
use crate::{
    HstuGradientInputs, HstuGradients, HstuOptions, HstuSequences, Qkv, hstu_attn, hstu_attn_bwd, kernels,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named,
    Operator, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Result, Stream, with_float};
use std::ops::Range;

const fn count(name: &'static str, summary: &'static str) -> ScalarSpec {
    ScalarSpec { name, default: Scalar::Count(0), choices: &[], summary }
}

/// Type; sequences, rows; heads; columns; targets.
macro_rules! tokens {
    ($dtype:ident $n:literal $rows:literal, $heads:literal, $dqk:literal $dv:literal $(, $name:literal)?) => {
        &[
            ("q", DType::$dtype, &[$rows, $heads, $dqk]),
            ("k", DType::$dtype, &[$rows, $heads, $dqk]),
            ("v", DType::$dtype, &[$rows, $heads, $dv]),
            ("seq_offsets", DType::I32, &[$n + 1]),
            $(($name, DType::I32, &[$n]),)?
        ]
    };
}

/// The same with the gradient of outputs.
macro_rules! gradients {
    ($dtype:ident $n:literal $rows:literal, $heads:literal, $dqk:literal $dv:literal $(, $name:literal)?) => {
        &[
            ("q", DType::$dtype, &[$rows, $heads, $dqk]),
            ("k", DType::$dtype, &[$rows, $heads, $dqk]),
            ("v", DType::$dtype, &[$rows, $heads, $dv]),
            ("dout", DType::$dtype, &[$rows, $heads, $dv]),
            ("seq_offsets", DType::I32, &[$n + 1]),
            $(($name, DType::I32, &[$n]),)?
        ]
    };
}

const ALPHA: (&str, Scalar) = ("alpha", Scalar::Float(0.125));
const MAX_LEN: (&str, Scalar) = ("max_len", Scalar::Count(40));
const NOT_CAUSAL: (&str, Scalar) = ("causal", Scalar::Bool(false));

/// The corners of an operator whose tensors `$tensors` makes.
macro_rules! corners {
    ($tensors:ident) => {
        &[
        Case {
            label: "bf16, causal, targets",
            tensors: $tensors!(Bf16 3 120, 2, 64 64, "num_targets"),
            scalars: &[ALPHA, MAX_LEN],
        },
        Case {
            label: "bf16, 128 columns, context, targets, window",
            tensors: $tensors!(Bf16 2 80, 1, 128 100, "num_targets"),
            scalars: &[
                ALPHA,
                MAX_LEN,
                ("contextual_len", Scalar::Count(4)),
                ("max_attn_len", Scalar::Count(7)),
            ],
        },
        Case {
            label: "bf16, 256 columns, in both directions",
            tensors: $tensors!(Bf16 1 40, 1, 256 200, "num_targets"),
            scalars: &[ALPHA, MAX_LEN, NOT_CAUSAL],
        },
        Case { label: "f16", tensors: $tensors!(F16 2 80, 2, 50 33), scalars: &[ALPHA, MAX_LEN] },
        Case {
            label: "f16, 128 columns, in both directions, window",
            tensors: $tensors!(F16 2 80, 1, 128 128),
            scalars: &[ALPHA, MAX_LEN, NOT_CAUSAL, ("max_attn_len", Scalar::Count(7))],
        },
        Case {
            label: "f16, 256 columns",
            tensors: $tensors!(F16 1 40, 1, 130 256),
            scalars: &[ALPHA, MAX_LEN],
        },
        Case {
            label: "f32, context",
            tensors: $tensors!(F32 2 80, 2, 64 64, "num_targets"),
            scalars: &[ALPHA, MAX_LEN, ("contextual_len", Scalar::Count(1))],
        },
        Case { label: "f32, 128 columns", tensors: $tensors!(F32 1 40, 1, 90 128), scalars: &[ALPHA, MAX_LEN] },
        Case {
            label: "f32, 256 columns",
            tensors: $tensors!(F32 1 40, 1, 200 256),
            scalars: &[ALPHA, MAX_LEN],
        },
        Case {
            label: "offsets that do not end with the rows",
            tensors: $tensors!(Bf16 2 90, 2, 64 64),
            scalars: &[ALPHA, MAX_LEN],
        },
    ]
    };
}

pub(crate) const HSTU_ATTN: Operator = Operator {
    name: "hstu_attn",
    family: "hk-attention",
    summary: "out = (mask silu(alpha q k^T) / max_len) v of packed sequences with targets and context",
    args: &[
        ArgSpec::input("q", OUT, 3, "[rows, H, Dqk]"),
        ArgSpec::input("k", OUT, 3, "[rows, H, Dqk]"),
        ArgSpec::input("v", OUT, 3, "[rows, H, Dv]"),
        ArgSpec::input("seq_offsets", INDICES_32, 1, "[sequences + 1]").sampled(Sample::Steps { step: 40 }),
        ArgSpec::input("num_targets", INDICES_32, 1, "[sequences]")
            .sampled(Sample::Integers { low: 0, high: 30 })
            .optional(),
        // The reference says how far each sum may be off.
        ArgSpec::output("out", Tolerance::Sum { terms: 1.0 }, OUT, 3, "[rows, H, Dv]"),
    ],
    scalars: &[
        ScalarSpec { name: "alpha", default: Scalar::Float(1.0), choices: &[], summary: "factor of q . k" },
        ScalarSpec { default: Scalar::Count(1), ..count("max_len", "divisor of the activations") },
        ScalarSpec { default: Scalar::Bool(true), summary: "tokens see those before them only", ..CAUSAL },
        count("max_attn_len", "tokens see others at most this far away; 0: at any distance"),
        count("contextual_len", "tokens at the start of each sequence that see all but targets"),
    ],
    kernels: &[&kernels::HSTU],
    cases: &[Case {
        label: "4 heads, d128, 3 sequences of 40 tokens, targets",
        tensors: tokens!(Bf16 3 120, 4, 128 128, "num_targets"),
        scalars: &[ALPHA, MAX_LEN],
    }],
    bench: BenchSizes::Cases(&[Case {
        label: "4 heads, d128, 32 sequences of 2048 tokens",
        tensors: tokens!(Bf16 32 65536, 4, 128 128),
        scalars: &[ALPHA, ("max_len", Scalar::Count(2048))],
    }]),
    corners: corners!(tokens),
    outputs: outputs_of,
    run,
    reference,
    traffic: Traffic::once,
};

pub(crate) const HSTU_ATTN_BWD: Operator = Operator {
    name: "hstu_attn_bwd",
    summary: "gradients of hstu_attn",
    args: &[
        ArgSpec::input("q", OUT, 3, "[rows, H, Dqk]"),
        ArgSpec::input("k", OUT, 3, "[rows, H, Dqk]"),
        ArgSpec::input("v", OUT, 3, "[rows, H, Dv]"),
        ArgSpec::input("dout", OUT, 3, "[rows, H, Dv]"),
        ArgSpec::input("seq_offsets", INDICES_32, 1, "[sequences + 1]").sampled(Sample::Steps { step: 40 }),
        ArgSpec::input("num_targets", INDICES_32, 1, "[sequences]")
            .sampled(Sample::Integers { low: 0, high: 30 })
            .optional(),
        ArgSpec::output("dq", Tolerance::Gradient, OUT, 3, "[rows, H, Dqk]"),
        ArgSpec::output("dk", Tolerance::Gradient, OUT, 3, "[rows, H, Dqk]"),
        ArgSpec::output("dv", Tolerance::Gradient, OUT, 3, "[rows, H, Dv]"),
    ],
    kernels: &[&kernels::BACKWARD_HSTU],
    cases: &[Case {
        label: "2 heads, d128, 3 sequences of 40 tokens, targets",
        tensors: gradients!(Bf16 3 120, 2, 128 128, "num_targets"),
        scalars: &[ALPHA, MAX_LEN],
    }],
    bench: BenchSizes::Cases(&[Case {
        label: "4 heads, d128, 32 sequences of 2048 tokens",
        tensors: gradients!(Bf16 32 65536, 4, 128 128),
        scalars: &[ALPHA, ("max_len", Scalar::Count(2048))],
    }]),
    corners: corners!(gradients),
    outputs: gradients_of,
    run: run_gradients,
    reference: reference_gradients,
    ..HSTU_ATTN
};

fn gradients_of(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let [n, rows, heads, dqk, dv] = shape_of(call)?;
    if n == 0 && rows > 0 {
        let want = format!("[sequences + 1], of {rows} rows");
        return Err(Error::shape(call.operator().name, "seq_offsets", [1], want));
    }
    expect_dtypes(call, "q", &["dout"])?;
    expect_shape(call, "dout", &[rows, heads, dv], "shape of v")?;
    let spec = |columns| Ok::<_, Error>(TensorSpec::new(call.get("q")?.dtype(), [rows, heads, columns]));
    Ok(vec![("dq", spec(dqk)?), ("dk", spec(dqk)?), ("dv", spec(dv)?)])
}

fn run_gradients(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let sequences = HstuSequences {
        seq_offsets: indices(&inputs, "seq_offsets")?,
        num_targets: inputs.optional_view("num_targets")?,
    };
    let options = options(&inputs)?;
    with_float!("hstu_attn_bwd", "q", inputs.get("q")?.dtype(), T => {
        let of = HstuGradientInputs::<T> {
            q: inputs.view("q")?,
            k: inputs.view("k")?,
            v: inputs.view("v")?,
            dout: inputs.view("dout")?,
        };
        let gradients =
            HstuGradients { dq: outputs.take("dq")?, dk: outputs.take("dk")?, dv: outputs.take("dv")? };
        hstu_attn_bwd(stream, of, sequences, gradients, options)
    })
}

fn reference_gradients(call: &HostCall) -> Result<Named<HostTensorF64>> {
    gradients_of(&call.spec())?;
    let [_, rows, heads, dqk, dv] = shape_of(call)?;
    let values = ["q", "k", "v", "dout"].map(|name| call.get(name).map(|t| t.to_f64()));
    let [q, k, v, dout] = values;
    let (q, k, v, dout) = (q?, k?, v?, dout?);
    let mut all = [&q, &k, &v].map(|x| vec![f64::NAN; x.len()]);
    each_sequence(call, |range, hstu| {
        let part = |x: &[f64], columns: usize| x[range.start * columns..range.end * columns].to_vec();
        let [wide, narrow] = [heads * dqk, heads * dv];
        let got = hstu.backward(&part(&q, wide), &part(&k, wide), &part(&v, narrow), &part(&dout, narrow));
        for ((to, from), columns) in all.iter_mut().zip(&got).zip([wide, wide, narrow]) {
            to[range.start * columns..range.end * columns].copy_from_slice(from);
        }
    })?;
    let [dq, dk, dv_values] = all;
    let host = |columns: usize, values| HostTensorF64::new([rows, heads, columns], values);
    Ok(vec![("dq", host(dqk, dq)), ("dk", host(dqk, dk)), ("dv", host(dv, dv_values))])
}

/// Sequences, rows, heads, columns.
fn shape_of<V: Described>(call: &Call<V>) -> Result<[usize; 5]> {
    let (sizes, op) = (sizes::<3, _>(call)?, call.operator().name);
    expect_shape(call, "k", &sizes.q, "shape of q")?;
    let offsets = call.get("seq_offsets")?.shape();
    let Some(n) = offsets[0].checked_sub(1) else {
        return Err(Error::shape(op, "seq_offsets", offsets, "[sequences + 1]"));
    };
    expect_shape(call, "num_targets", &[n], "sequences of seq_offsets")?;
    let [rows, heads, dqk] = sizes.q;
    Ok([n, rows, heads, dqk, sizes.dv])
}

fn outputs_of(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let [_, rows, heads, _, dv] = shape_of(call)?;
    specs(call, vec![rows, heads, dv], vec![])
}

fn options<V: Described>(call: &Call<V>) -> Result<HstuOptions> {
    Ok(HstuOptions {
        alpha: call.float("alpha")? as f32,
        max_len: call.size("max_len")?,
        causal: call.bool("causal")?,
        max_attn_len: call.size("max_attn_len")?,
        contextual_len: call.size("contextual_len")?,
    })
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let sequences = HstuSequences {
        seq_offsets: indices(&inputs, "seq_offsets")?,
        num_targets: inputs.optional_view("num_targets")?,
    };
    let options = options(&inputs)?;
    with_float!("hstu_attn", "q", inputs.get("q")?.dtype(), T => {
        let qkv = Qkv::<T> { q: inputs.view("q")?, k: inputs.view("k")?, v: inputs.view("v")? };
        hstu_attn(stream, qkv, sequences, outputs.take("out")?, options)
    })
}

/// Calls `f` for the rows of each sequence whose results are numbers.
fn each_sequence(call: &HostCall, mut f: impl FnMut(Range<usize>, Hstu)) -> Result<()> {
    let [n, rows, heads, dqk, dv] = shape_of(call)?;
    let options = options(call)?;
    options.check(call.operator().name)?;
    let HstuOptions { alpha, max_len, causal, max_attn_len, contextual_len } = options;
    // Activations are rounded to the type of v; f16 has a smallest step.
    let rounding = match call.get("q")?.dtype() {
        DType::Bf16 => [2f64.powi(-8), 0.0],
        DType::F16 => [2f64.powi(-11), 2f64.powi(-25)],
        _ => [0.0; 2],
    };
    let targets = call.optional("num_targets").map_or_else(|| vec![0; n], integers);
    for (i, rows) in packed(&integers(call.get("seq_offsets")?), rows).into_iter().flatten().enumerate() {
        if !(0..=rows.len() as i64).contains(&targets[i]) {
            continue;
        }
        let hstu = Hstu {
            heads,
            dqk,
            dv,
            alpha: alpha.into(),
            max_len: max_len as f64,
            causal,
            max_attn_len: max_attn_len.min(1 << 30) as i64,
            contextual_len: contextual_len.min(1 << 30) as i64,
            targets: targets[i],
            rounding,
        };
        f(rows, hstu);
    }
    Ok(())
}

fn reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let [_, rows, heads, dqk, dv] = shape_of(call)?;
    let [q, k, v] = [call.get("q")?.to_f64(), call.get("k")?.to_f64(), call.get("v")?.to_f64()];
    let mut want = HostTensorF64::new([rows, heads, dv], vec![f64::NAN; rows * heads * dv]);
    want.magnitudes = vec![0.0; want.values.len()];
    each_sequence(call, |rows, hstu| {
        let part = |x: &[f64], columns: usize| x[rows.start * columns..rows.end * columns].to_vec();
        let (out, off) = hstu.run(&part(&q, heads * dqk), &part(&k, heads * dqk), &part(&v, heads * dv));
        let at = rows.start * heads * dv..rows.end * heads * dv;
        want.values[at.clone()].copy_from_slice(&out);
        want.magnitudes[at].copy_from_slice(&off);
    })?;
    Ok(vec![("out", want)])
}
