//! `rope_cat_and_cache_mla` as data.

use super::common::{
    ACTIVATIONS, CACHED, COS, HostTokens, K_SCALE, NARROW, OFFSETS, POSITIONS, SIN, SLOT_MAPPING, SPAN,
    STYLE, TABLE, reciprocal, rope, shape, slots, stored, tables, with_activation, with_narrow, with_table,
};
use crate::{Activation, CacheElement, MlaOutputs, kernels};
use hk_core::registry::{
    ArgSpec, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named, Operator, Role, Scalar,
    ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::rope::RopeElement;
use hk_core::{DType, Result, Stream};

/// A case of `[tokens, q_heads, kv_heads, nope, pe]`: names of the types of activations, tables and the cache, shape of the
/// tables, slots.
macro_rules! case {
    ($label:literal, [$tokens:literal, $q:literal, $kv:literal, $nope:literal, $pe:literal], $t:ident, $r:ident, $c:ident,
        $table:tt, [$slots:literal, $width:literal], [$($more:tt),*], $scalars:tt) => {
        Case {
            label: $label,
            tensors: &[
                ("q_nope", DType::$t, &[$tokens, $q, $nope]),
                ("q_pe", DType::$t, &[$tokens, $q, $pe]),
                ("k_nope", DType::$t, &[$tokens, $kv, $nope]),
                ("k_pe", DType::$t, &[$tokens, $kv, $pe]),
                ("cos", DType::$r, &$table),
                ("sin", DType::$r, &$table),
                ("positions", DType::I64, &[$tokens]),
                ("slot_mapping", DType::I32, &[$tokens]),
                ("kv_cache", DType::$c, &[$slots, $kv, $width]),
                $($more),*
            ],
            scalars: &$scalars,
        }
    };
}

pub(super) const GPT_J: (&str, Scalar) = ("style", Scalar::Choice("interleaved"));

pub(super) const ROPE_CAT_AND_CACHE_MLA: Operator = Operator {
    name: "rope_cat_and_cache_mla",
    family: "hk-attention",
    summary: "q_out = [q_nope, rope(q_pe)], kv_cache[slot] = cast([k_nope, rope(k_pe)] / k_scale)",
    args: &[
        Q_NOPE,
        Q_PE,
        K_NOPE,
        K_PE,
        COS,
        SIN,
        POSITIONS,
        OFFSETS,
        SLOT_MAPPING,
        K_SCALE,
        Q_OUT,
        K_PE_OUT,
        KV_CACHE,
        Q_PE_HEAD,
        NOPE_ZEROS,
    ],
    scalars: &[STYLE, TABLE, SPAN, Q_OUT_TYPE, HEAD_TOKENS],
    kernels: &[&kernels::CACHE_ROWS],
    cases: &[
        case!(
            "DeepSeek-V3, 16 tokens",
            [16, 128, 1, 512, 64],
            Bf16,
            Bf16,
            Bf16,
            [64, 32],
            [64, 576],
            [],
            [GPT_J]
        ),
        case!(
            "DeepSeek-V3, 16 tokens of 8 ranks, fp8",
            [16, 16, 1, 512, 64],
            Bf16,
            Bf16,
            Fp8E4M3Fnuz,
            [64, 32],
            [64, 576],
            [("k_scale", DType::F32, &[1])],
            [GPT_J, ("q_out_type", Scalar::Choice("cache"))]
        ),
    ],
    corners: &[
        case!(
            "bf16",
            [9, 4, 1, 128, 64],
            Bf16,
            Bf16,
            Bf16,
            [64, 32],
            [16, 192],
            [("q_pe_head", DType::Bf16, &[4, 4, 64]), ("nope_zeros", DType::Bf16, &[4, 4, 128])],
            [GPT_J, ("head_tokens", Scalar::Int(4))]
        ),
        case!(
            "f16 to fp8",
            [7, 4, 2, 64, 64],
            F16,
            F32,
            Fp8E4M3,
            [64, 64],
            [8, 128],
            [("k_scale", DType::F32, &[1])],
            [("table", Scalar::Choice("full")), ("q_out_type", Scalar::Choice("cache"))]
        ),
        case!(
            "bf16 by elements",
            [5, 2, 1, 127, 2],
            Bf16,
            Bf16,
            Bf16,
            [64, 1],
            [8, 129],
            [("q_pe_head", DType::Bf16, &[5, 2, 2]), ("nope_zeros", DType::Bf16, &[5, 2, 127])],
            [("head_tokens", Scalar::Int(5))]
        ),
        case!(
            "f16 by elements to fp8",
            [5, 2, 2, 31, 6],
            F16,
            F32,
            Fp8E4M3Fnuz,
            [64, 3],
            [4, 37],
            [("k_scale", DType::F32, &[1])],
            [GPT_J]
        ),
    ],
    outputs,
    run,
    reference,
    traffic,
};

const Q_NOPE: ArgSpec = ArgSpec::input("q_nope", ACTIVATIONS, 3, "[tokens, q_heads, nope]");
pub(super) const Q_PE: ArgSpec = ArgSpec::input("q_pe", ACTIVATIONS, 3, "[tokens, q_heads, pe]");
pub(super) const K_NOPE: ArgSpec = ArgSpec::input("k_nope", ACTIVATIONS, 3, "[all, kv_heads, nope]");
pub(super) const K_PE: ArgSpec = ArgSpec::input("k_pe", ACTIVATIONS, 3, "[all, kv_heads, pe]");
pub(super) const Q_OUT: ArgSpec = ArgSpec::output("q_out", CACHED, NARROW, 3, "[tokens, q_heads, nope + pe]");
pub(super) const K_PE_OUT: ArgSpec =
    ArgSpec { name: "k_pe_out", role: Role::Out(Tolerance::Elementwise), ..K_PE };
pub(super) const KV_CACHE: ArgSpec =
    ArgSpec::updated("kv_cache", CACHED, NARROW, 3, "[slots, kv_heads, nope + pe]");
pub(super) const Q_PE_HEAD: ArgSpec =
    ArgSpec::output("q_pe_head", Tolerance::Elementwise, ACTIVATIONS, 3, "[head_tokens, q_heads, pe]")
        .optional();
pub(super) const NOPE_ZEROS: ArgSpec =
    ArgSpec::output("nope_zeros", Tolerance::Exact, ACTIVATIONS, 3, "[head_tokens, q_heads, nope]")
        .optional();

pub(super) const Q_OUT_TYPE: ScalarSpec = ScalarSpec {
    name: "q_out_type",
    default: Scalar::Choice("input"),
    choices: &["input", "cache"],
    summary: "type of q_out: that of q_pe or that of kv_cache",
};
pub(super) const HEAD_TOKENS: ScalarSpec = ScalarSpec {
    name: "head_tokens",
    default: Scalar::Int(0),
    choices: &[],
    summary: "tokens of q_pe_head and nope_zeros",
};

pub(super) fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    rope(call)?;
    let ([tokens, heads, pe], [_, _, nope]) = (shape::<3, _>(call, "q_pe")?, shape::<3, _>(call, "k_nope")?);
    let activations = call.get("q_pe")?.dtype;
    let q_type = match call.choice("q_out_type")? {
        "cache" => call.get("kv_cache")?.dtype,
        _ => activations,
    };
    let first = usize::try_from(call.int("head_tokens")?).unwrap_or(0);
    let mut outputs = vec![
        ("q_out", TensorSpec::new(q_type, [tokens, heads, nope + pe])),
        ("k_pe_out", call.get("k_pe")?.clone()),
    ];
    if call.wants("q_pe_head") {
        outputs.push(("q_pe_head", TensorSpec::new(activations, [first, heads, pe])));
    }
    if call.wants("nope_zeros") {
        outputs.push(("nope_zeros", TensorSpec::new(activations, [first, heads, nope])));
    }
    Ok(outputs)
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let dtype = |name: &str| call.outputs().find(|(n, _)| *n == name).map(|(_, t)| t.dtype());
    let (q_out, cache) = (dtype("q_out"), dtype("kv_cache"));
    let (inputs, _) = call.split();
    let (activations, table) = (inputs.get("q_pe")?.dtype(), inputs.get("cos")?.dtype());
    with_activation!("rope_cat_and_cache_mla", "q_pe", activations, T => with_table!(table, T, R => {
        with_narrow!(q_out.unwrap_or(activations), T, Q => {
            with_narrow!(cache.unwrap_or(activations), T, C => run_typed::<T, R, Q, C>(stream, call))
        })
    }))
}

fn run_typed<T: Activation, R: RopeElement<T>, Q: CacheElement<T>, C: CacheElement<T>>(
    stream: &Stream,
    call: &mut DeviceCall,
) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let rope = rope(&inputs)?;
    let outputs = MlaOutputs::<T, Q, C> {
        q_out: outputs.take("q_out")?,
        k_pe_out: outputs.take("k_pe_out")?,
        kv_cache: outputs.take("kv_cache")?,
        q_pe_head: outputs.take_optional("q_pe_head")?,
        nope_zeros: outputs.take_optional("nope_zeros")?,
    };
    let view = |name| inputs.view::<T>(name);
    crate::rope_cat_and_cache_mla(
        stream,
        view("q_nope")?,
        view("q_pe")?,
        view("k_nope")?,
        view("k_pe")?,
        tables::<R>(&inputs)?,
        slots(&inputs)?,
        inputs.optional_view("k_scale")?,
        outputs,
        rope,
    )
}

fn reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let q_nope = call.get("q_nope")?.to_f64();
    mla_reference(call, &q_nope)
}

/// The outputs from the part of the queries without position, `[tokens, q_heads, nope]`.
pub(super) fn mla_reference(call: &HostCall, q_nope: &[f64]) -> Result<Named<HostTensorF64>> {
    let ([_, q_heads, pe], [all, kv_heads, nope]) =
        (shape::<3, _>(call, "q_pe")?, shape::<3, _>(call, "k_nope")?);
    let host = HostTokens::of(call)?;
    let [n_slots, ..] = shape::<3, _>(call, "kv_cache")?;
    let tokens = host.tokens(n_slots);
    let spec = (call.operator().outputs)(&call.spec())?;
    let dtype_of = |name: &str| spec.iter().find(|(n, _)| *n == name).map_or(DType::F32, |(_, s)| s.dtype);
    let cache_type = call.get("kv_cache")?.dtype();
    let (q_pe, k_nope, k_pe) =
        (call.get("q_pe")?.to_f64(), call.get("k_nope")?.to_f64(), call.get("k_pe")?.to_f64());
    let scale = reciprocal(call, "k_scale");

    let (mut q_out, mut q_rotated) = (Vec::new(), Vec::new());
    for (row, (first, last)) in q_nope.chunks(nope).zip(q_pe.chunks(pe)).enumerate() {
        let rotated = tokens.rotate(row / q_heads, last);
        q_out.extend(
            tokens.keep(row / q_heads, first).iter().chain(&rotated).map(|&x| stored(dtype_of("q_out"), x)),
        );
        q_rotated.extend(rotated);
    }
    let mut k_pe_out = vec![f64::NAN; all * kv_heads * pe]; // beyond the tokens with a slot: as it was, poisoned
    let mut cache = call.get("kv_cache")?.to_f64();
    for row in 0..host.cached() * kv_heads {
        let (token, head) = (row / kv_heads, row % kv_heads);
        let rotated = tokens.rotate(token, &k_pe[row * pe..][..pe]);
        if let Some(slot) = tokens.slot(token) {
            let first = &k_nope[row * nope..][..nope];
            let to = &mut cache[(slot * kv_heads + head) * (nope + pe)..][..nope + pe];
            to.iter_mut()
                .zip(first.iter().chain(&rotated))
                .for_each(|(to, x)| *to = stored(cache_type, x * scale));
        }
        k_pe_out[row * pe..][..pe].copy_from_slice(&rotated);
    }
    let value_of = |name: &str, len: usize| match name {
        "q_out" => q_out.clone(),
        "k_pe_out" => k_pe_out.clone(),
        "q_pe_head" => q_rotated[..len].to_vec(),
        _ => vec![0.0; len],
    };
    let mut outputs: Vec<_> = spec
        .iter()
        .map(|(name, s)| {
            let values = value_of(name, s.shape.iter().product());
            (*name, HostTensorF64::new(s.shape.clone(), values))
        })
        .collect();
    outputs.push(("kv_cache", HostTensorF64::new(call.get("kv_cache")?.shape(), cache)));
    Ok(outputs)
}

/// Of the cache only what is written, and none of it is read.
pub(super) fn traffic(call: &HostCall) -> Traffic {
    let once = Traffic::once(call);
    let cache = call.optional("kv_cache").map_or(0, |t| t.bytes().len() as u64);
    let written = || -> Result<u64> {
        let (host, [n_slots, heads, cols]) = (HostTokens::of(call)?, shape::<3, _>(call, "kv_cache")?);
        let tokens = host.tokens(n_slots);
        let rows = (0..host.cached()).filter(|&t| tokens.slot(t).is_some()).count() * heads;
        Ok((rows * cols * call.get("kv_cache")?.dtype().size_bytes()) as u64)
    };
    Traffic { read: once.read - cache, written: once.written - cache + written().unwrap_or(0) }
}
