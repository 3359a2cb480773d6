//! Registry entry of `flash_attn_fwd_prefill`.

use super::attention::{
    ALIBI, CAUSAL, DROPOUT_P, F32, K_DESCALE, LSE, OFFSET, OUT, Q_DESCALE, QKV, SCALE, SEED, Sequence,
    V_DESCALE, WINDOW_LEFT, WINDOW_RIGHT, attend, options, outputs, packed, transposed,
};
use super::common::{
    COS, INDICES_32, SIN, STYLE, TABLES, expect_dtypes, expect_shape, integers, rope_of_pairs, rope_style,
    rounded,
};
use super::mha::{PREFILL, expect_options, host_rows, joined, sizes, specs, with_qkv};
use crate::{
    AttentionOptions, AttentionOutputs, FlashInputs, FlashOptions, FlashRotary, Qkv, SequenceStarts,
    flash_attn_fwd_prefill, kernels,
};
use hk_core::plan::rope::reference::Tables;
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named,
    Operator, Sample, Scalar, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Fp8E4M3, Fp8E4M3Fnuz, Result, Stream, bf16, f16};

const STARTS: ArgSpec =
    ArgSpec::input("cu_seqlens_q", INDICES_32, 1, "[sequences + 1]").sampled(Sample::Steps { step: 40 });
const USED: ArgSpec = ArgSpec::input("seqused_q", INDICES_32, 1, "[sequences]")
    .sampled(Sample::Integers { low: 20, high: 43 })
    .optional();

/// Of queries: batched or packed.
const Q_ROTATED: ArgSpec =
    ArgSpec::output("q_rotated", Tolerance::Elementwise, TABLES, 4, "shape of q, with cos; of k")
        .ranks(3, 4)
        .optional();

/// Of queries and of outputs: batched or packed.
macro_rules! flash {
    ($dtype:ident $q:expr, $k:expr, $v:expr $(, $name:literal $other:ident $shape:expr)*) => {
        &[
            ("q", DType::$dtype, &$q),
            ("k", DType::$dtype, &$k),
            ("v", DType::$dtype, &$v),
            $(($name, DType::$other, &$shape),)*
        ]
    };
}

pub(crate) const FLASH_ATTN_FWD_PREFILL: Operator = Operator {
    name: "flash_attn_fwd_prefill",
    family: "hk-attention",
    summary: "mha of batched or packed sequences of which a part is used",
    args: &[
        ArgSpec::input("q", QKV, 4, "[B, Sq, Hq, Dqk] or [total_q, Hq, Dqk]").ranks(3, 4),
        ArgSpec::input("k", QKV, 4, "[B, Sk, Hkv, Dqk] or [total_k, Hkv, Dqk]").ranks(3, 4),
        ArgSpec::input("v", QKV, 4, "[B, Sk, Hkv, Dv] or [total_k, Hkv, Dv]").ranks(3, 4),
        STARTS.optional(),
        ArgSpec { name: "cu_seqlens_k", sample: Sample::Steps { step: 48 }, ..STARTS }.optional(),
        USED,
        ArgSpec { name: "seqused_k", ..USED },
        ArgSpec { shape: "[positions, rotary / 2]", ..COS }.optional(),
        ArgSpec { shape: "[positions, rotary / 2]", ..SIN }.optional(),
        ArgSpec::input("offsets", INDICES_32, 1, "[sequences]")
            .sampled(Sample::Integers { low: 0, high: 10 })
            .optional(),
        ALIBI,
        Q_DESCALE,
        K_DESCALE,
        V_DESCALE,
        ArgSpec::output("out", Tolerance::Attention, OUT, 4, "[B, Sq, Hq, Dv] or [total_q, Hq, Dv]")
            .ranks(3, 4),
        ArgSpec::output("lse", LSE, F32, 3, "[B, Hq, Sq] or [Hq, total_q]").ranks(2, 3).optional(),
        Q_ROTATED,
        ArgSpec { name: "k_rotated", ..Q_ROTATED },
    ],
    scalars: &[SCALE, CAUSAL, WINDOW_LEFT, WINDOW_RIGHT, DROPOUT_P, SEED, OFFSET, STYLE],
    kernels: &joined::<8>(PREFILL, &[&kernels::QK_ROPE_CAT]),
    cases: &[Case {
        label: "Llama-3 8B, 3 prompts, 20 to 42 of 48 tokens",
        tensors: flash!(Bf16 [3, 48, 32, 128], [3, 48, 8, 128], [3, 48, 8, 128],
            "seqused_q" I32 [3], "seqused_k" I32 [3]),
        scalars: &[("causal", Scalar::Bool(true))],
    }],
    bench: BenchSizes::Cases(&[Case {
        label: "Llama-3 8B, 8 x 2048 tokens, causal",
        tensors: flash!(Bf16 [8, 2048, 32, 128], [8, 2048, 8, 128], [8, 2048, 8, 128]),
        scalars: &[("causal", Scalar::Bool(true))],
    }]),
    corners: &[
        Case {
            label: "bf16, batched, causal, used parts",
            tensors: flash!(Bf16 [3, 42, 4, 64], [3, 50, 2, 64], [3, 50, 2, 64],
                "seqused_q" I32 [3], "seqused_k" I32 [3], "lse" F32 [3, 4, 42]),
            scalars: &[("causal", Scalar::Bool(true))],
        },
        Case {
            label: "f16, packed, used parts, some too long, every option",
            tensors: flash!(F16 [160, 2, 40], [192, 1, 40], [192, 1, 24],
                "cu_seqlens_q" I32 [5], "cu_seqlens_k" I32 [5], "seqused_q" I32 [4], "seqused_k" I32 [4],
                "alibi" F32 [2], "lse" F32 [2, 160]),
            scalars: &[
                ("scale", Scalar::Float(0.2)),
                ("window_left", Scalar::Int(20)),
                ("window_right", Scalar::Int(6)),
                ("dropout_p", Scalar::Float(0.2)),
                ("seed", Scalar::Count(11)),
                ("offset", Scalar::Count(12)),
            ],
        },
        Case {
            label: "f32, packed",
            tensors: flash!(F32 [80, 2, 64], [96, 2, 64], [96, 2, 64],
                "cu_seqlens_q" I32 [3], "cu_seqlens_k" I32 [3]),
            scalars: &[("causal", Scalar::Bool(true))],
        },
        Case {
            label: "bf16, batched, rotated",
            tensors: flash!(Bf16 [3, 42, 4, 64], [3, 50, 2, 64], [3, 50, 2, 64],
                "cos" Bf16 [64, 32], "sin" Bf16 [64, 32], "offsets" I32 [3],
                "q_rotated" Bf16 [3, 42, 4, 64], "k_rotated" Bf16 [3, 50, 2, 64]),
            scalars: &[("causal", Scalar::Bool(true))],
        },
        Case {
            label: "f16, packed, rotated in part, interleaved",
            tensors: flash!(F16 [80, 2, 40], [96, 1, 40], [96, 1, 24],
                "cu_seqlens_q" I32 [3], "cu_seqlens_k" I32 [3], "cos" F16 [64, 8], "sin" F16 [64, 8], "offsets" I32 [2],
                "q_rotated" F16 [80, 2, 40], "k_rotated" F16 [96, 1, 40]),
            scalars: &[("style", Scalar::Choice("interleaved"))],
        },
        Case {
            label: "f32, packed, rotated",
            tensors: flash!(F32 [80, 2, 16], [96, 2, 16], [96, 2, 16],
                "cu_seqlens_q" I32 [3], "cu_seqlens_k" I32 [3], "cos" F32 [48, 8], "sin" F32 [48, 8],
                "q_rotated" F32 [80, 2, 16], "k_rotated" F32 [96, 2, 16]),
            scalars: &[],
        },
        Case {
            label: "bf16, rotated, scalar",
            tensors: flash!(Bf16 [1, 9, 2, 13], [1, 20, 1, 13], [1, 20, 1, 13],
                "cos" Bf16 [20, 3], "sin" Bf16 [20, 3], "q_rotated" Bf16 [1, 9, 2, 13], "k_rotated" Bf16 [1, 20, 1, 13]),
            scalars: &[],
        },
        Case {
            label: "f16, rotated, scalar",
            tensors: flash!(F16 [1, 9, 2, 13], [1, 20, 1, 13], [1, 20, 1, 13],
                "cos" F16 [20, 3], "sin" F16 [20, 3], "q_rotated" F16 [1, 9, 2, 13], "k_rotated" F16 [1, 20, 1, 13]),
            scalars: &[],
        },
        Case {
            label: "f32, rotated, scalar",
            tensors: flash!(F32 [1, 9, 2, 13], [1, 20, 1, 13], [1, 20, 1, 13],
                "cos" F32 [20, 3], "sin" F32 [20, 3], "q_rotated" F32 [1, 9, 2, 13], "k_rotated" F32 [1, 20, 1, 13]),
            scalars: &[],
        },
        Case {
            label: "fp8 of gfx950, batched, descales",
            tensors: flash!(Fp8E4M3 [2, 17, 4, 64], [2, 60, 2, 64], [2, 60, 2, 64],
                "seqused_k" I32 [2], "q_descale" F32 [2, 4], "k_descale" F32 [1], "v_descale" F32 [2, 2]),
            scalars: &[],
        },
        Case {
            label: "fp8 of gfx942, batched, descales",
            tensors: flash!(Fp8E4M3Fnuz [2, 17, 4, 64], [2, 60, 2, 64], [2, 60, 2, 64],
                "seqused_k" I32 [2], "q_descale" F32 [1], "k_descale" F32 [2, 2], "v_descale" F32 [1]),
            scalars: &[],
        },
    ],
    outputs: outputs_of,
    run,
    reference,
    traffic: Traffic::once,
};

/// Sequences, queries and keys, or rows of all sequences; heads and columns.
struct Shape {
    packed: bool,
    sequences: usize,
    rows: [usize; 2],
    heads: [usize; 4],
}

fn shape_of<V: Described>(call: &Call<V>) -> Result<Shape> {
    let op = call.operator().name;
    let starts = ["cu_seqlens_q", "cu_seqlens_k"].map(|name| call.optional(name).map(V::shape));
    let shape = match starts {
        [None, None] => {
            let sizes = sizes::<4, _>(call)?;
            let ([sequences, sq, ..], [k_sequences, sk, ..]) = (sizes.q, sizes.k);
            if k_sequences != sequences {
                return Err(Error::shape(op, "k", sizes.k, format!("{sequences} sequences (of q)")));
            }
            Shape { packed: false, sequences, rows: [sq, sk], heads: sizes.heads() }
        }
        [Some(q), Some(k)] => {
            let sizes = sizes::<3, _>(call)?;
            let sequences =
                q[0].checked_sub(1).ok_or_else(|| Error::shape(op, "cu_seqlens_q", q, "[sequences + 1]"))?;
            if k != q {
                return Err(Error::shape(op, "cu_seqlens_k", k, format!("{q:?} (shape of cu_seqlens_q)")));
            }
            Shape { packed: true, sequences, rows: [sizes.q[0], sizes.k[0]], heads: sizes.heads() }
        }
        _ => {
            return Err(Error::argument(
                op,
                "cu_seqlens_k",
                "one of two",
                "starts of both, queries and keys",
            ));
        }
    };
    for name in ["seqused_q", "seqused_k"] {
        expect_shape(call, name, &[shape.sequences], "sequences")?;
    }
    expect_options(call, shape.sequences, shape.heads, shape.rows)?;
    expect_rotary(call, shape.sequences)?;
    Ok(shape)
}

/// Checks that everything that a rotation needs is there, or nothing.
fn expect_rotary<V: Described>(call: &Call<V>, sequences: usize) -> Result<()> {
    let op = call.operator().name;
    let given = |name| call.optional(name).is_some() || call.wants(name);
    let needed = ["cos", "sin", "q_rotated", "k_rotated"];
    let Some(first) = needed.into_iter().chain(["offsets"]).find(|name| given(name)) else {
        return Ok(());
    };
    if let Some(missing) = needed.into_iter().find(|name| !given(name)) {
        let want = format!("one beside {first}: a rotation takes cos, sin, q_rotated, k_rotated");
        return Err(Error::argument(op, missing, "none", want));
    }
    expect_dtypes(call, "q", &["cos", "sin"])?;
    let (cos, sin) = (call.get("cos")?.shape(), call.get("sin")?.shape());
    if sin != cos {
        return Err(Error::shape(op, "sin", sin, format!("{cos:?} (shape of cos)")));
    }
    expect_shape(call, "offsets", &[sequences], "sequences")
}

impl Shape {
    fn outputs(&self) -> [Vec<usize>; 2] {
        let (Self { sequences: n, rows: [sq, _], heads: [heads, .., dv], .. }, packed) = (self, self.packed);
        if packed {
            [vec![*sq, *heads, *dv], vec![*heads, *sq]]
        } else {
            [vec![*n, *sq, *heads, *dv], vec![*n, *heads, *sq]]
        }
    }
}

fn outputs_of(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let [out, lse] = shape_of(call)?.outputs();
    let mut specs = specs(call, out, lse)?;
    for (name, of) in [("q_rotated", "q"), ("k_rotated", "k")] {
        if call.wants(name) {
            let of = call.get(of)?;
            specs.push((name, TensorSpec::new(of.dtype(), of.shape())));
        }
    }
    Ok(specs)
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let starts = inputs.optional_view("cu_seqlens_q")?.zip(inputs.optional_view("cu_seqlens_k")?);
    let cu_seqlens = starts.map(|(q, k)| SequenceStarts { q, k });
    let (seqused_q, seqused_k) = (inputs.optional_view("seqused_q")?, inputs.optional_view("seqused_k")?);
    with_qkv!(inputs.get("q")?.dtype(), T, O => {
        let qkv = Qkv::<T> { q: inputs.view("q")?, k: inputs.view("k")?, v: inputs.view("v")? };
        let out = AttentionOutputs::<O> { out: outputs.take("out")?, lse: outputs.take_optional("lse")? };
        let AttentionOptions { scale, mask, alibi, dropout, descales, .. } = options::<T>(&inputs)?;
        let options = FlashOptions { scale, mask, alibi, dropout, descales };
        let rotary = match inputs.optional_view::<T>("cos")? {
            None => None,
            Some(cos) => Some(FlashRotary {
                cos,
                sin: inputs.view("sin")?,
                style: rope_style(&inputs)?,
                offsets: inputs.optional_view("offsets")?,
                q_rotated: outputs.take("q_rotated")?,
                k_rotated: outputs.take("k_rotated")?,
            }),
        };
        let inputs = FlashInputs { qkv, cu_seqlens, seqused_q, seqused_k };
        flash_attn_fwd_prefill(stream, inputs, out, rotary, &options)
    })
}

fn reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let shape = shape_of(call)?;
    let Shape { packed: is_packed, sequences: n, rows: [sq, sk], heads } = shape;
    let values = |name: &str| call.optional(name).map(integers);
    // Of a sequence that has `rows`, those that are used.
    let used = |lens: &Option<Vec<i64>>, n: usize, rows: usize| match lens {
        None => Some(rows),
        Some(lens) => usize::try_from(lens[n]).ok().filter(|used| *used <= rows),
    };
    let lens = ["seqused_q", "seqused_k"].map(values);
    let starts = ["cu_seqlens_q", "cu_seqlens_k"].map(values);
    let steps = |rows: usize| (0..=n).map(|i| (i * rows) as i64).collect::<Vec<_>>();
    let [q_starts, k_starts] =
        [(0, sq), (1, sk)].map(|(i, rows)| starts[i].clone().unwrap_or_else(|| steps(rows)));
    let [total_q, total_k] = [sq, sk].map(|rows| if is_packed { rows } else { rows * n });
    let sequence = |(i, rows): (usize, std::ops::Range<usize>)| {
        let queries = used(&lens[0], i, rows.len());
        let keys = super::attention::keys_of(&k_starts, i, total_k)
            .and_then(|keys| Some(keys[..used(&lens[1], i, keys.len())?].to_vec()));
        let end = queries.map_or(rows.end, |used| rows.start + used);
        Sequence { queries: rows.start..end, keys: keys.filter(|_| queries.is_some()) }
    };
    let sequences: Vec<_> = match packed(&q_starts, total_q) {
        None => vec![Sequence { queries: 0..total_q, keys: None }],
        Some(rows) => rows.into_iter().enumerate().map(sequence).collect(),
    };
    let (mut q, mut rows) = (call.get("q")?.to_f64(), host_rows(call)?);
    let mut rotated = vec![];
    if let Some(cos) = call.optional("cos") {
        let tables = Tables { cos: cos.to_f64(), sin: call.get("sin")?.to_f64() };
        let (positions, dtype) = (cos.shape()[0], cos.dtype());
        let offsets = values("offsets").unwrap_or_else(|| vec![0; n]);
        let rope = rope_of_pairs(rope_style(call)?, 2 * cos.shape()[1]);
        let [hq, hkv, dqk, _] = heads;
        for (name, of, starts, values, heads) in
            [("q_rotated", "q", &q_starts, &mut q, hq), ("k_rotated", "k", &k_starts, &mut rows.k, hkv)]
        {
            let all = values.chunks(dqk).enumerate().flat_map(|(i, head)| {
                let row = row_of(i / heads, starts, &offsets).filter(|row| *row < positions);
                tables.rotate(head, row, &rope)
            });
            let all: Vec<_> = all.collect();
            *values = all.iter().map(|&x| rounded(dtype, x)).collect();
            rotated.push((name, HostTensorF64::new(call.get(of)?.shape(), all)));
        }
    }
    let (out, lse) = attend(call, heads, &q, &rows, &sequences, [sq, sk])?;
    let [out_shape, lse_shape] = shape.outputs();
    let lse = transposed(&lse, [if is_packed { 1 } else { n }, sq, heads[0]]);
    let mut outputs = outputs(call, (out_shape, out), (lse_shape, lse));
    outputs.extend(rotated);
    Ok(outputs)
}

/// The position of a token of packed sequences that begin at `offsets`, if it is in one and not before 0.
fn row_of(token: usize, starts: &[i64], offsets: &[i64]) -> Option<usize> {
    let token = token as i64;
    let of = starts.windows(2).position(|range| range[0] <= token && token < range[1])?;
    usize::try_from(token - starts[of] + offsets[of]).ok()
}
