//! What `rope_cat_and_cache_mla` and `fused_bmm_rope_kv_cache` as data share: all but how the part of the queries without
//! position comes about.

use super::common::{
    self, ACTIVATIONS, CACHED, HostTokens, NARROW, reciprocal, rope, shape, slots, stored, tables,
    with_activation, with_narrow, with_table,
};
use crate::{
    Activation, CacheElement, Fp8Weight, MlaOutputs, MlaWeight, Mxfp4Weight, fused_bmm_rope_kv_cache,
    rope_cat_and_cache_mla,
};
use hk_core::registry::{
    ArgSpec, CallSpec, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named, Role, Scalar,
    ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::rope::RopeElement;
use hk_core::{DType, Element, Error, Result, Stream};

pub(super) const GPT_J: (&str, Scalar) = ("style", Scalar::Choice("interleaved"));

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

pub(super) fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let dtype = |name: &str| call.outputs().find(|(n, _)| *n == name).map(|(_, t)| t.dtype());
    let (q_out, cache) = (dtype("q_out"), dtype("kv_cache"));
    let (inputs, _) = call.split();
    let (op, activations, table) =
        (inputs.operator().name, inputs.get("q_pe")?.dtype(), inputs.get("cos")?.dtype());
    with_activation!(op, "q_pe", activations, T => with_table!(table, T, R => {
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
    let (q_nope, q_pe, k_nope, k_pe) = (view("q_nope")?, view("q_pe")?, view("k_nope")?, view("k_pe")?);
    let (tables, slots, scale) = (tables::<R>(&inputs)?, slots(&inputs)?, inputs.optional_view("k_scale")?);
    match weight(&inputs)? {
        None => {
            rope_cat_and_cache_mla(stream, q_nope, q_pe, k_nope, k_pe, tables, slots, scale, outputs, rope)
        }
        Some(w) => fused_bmm_rope_kv_cache(
            stream, q_nope, w, q_pe, k_nope, k_pe, tables, slots, scale, outputs, rope,
        ),
    }
}

/// The weights of a product, if the operator has one.
fn weight<'a, T: Activation>(inputs: &Inputs<'a>) -> Result<Option<MlaWeight<'a, T>>> {
    let Some(w) = inputs.optional("w") else { return Ok(None) };
    let own: &[&str] = match w.dtype() {
        DType::Fp8E4M3 | DType::Fp8E4M3Fnuz => &["w_scale"],
        DType::Fp4x2 => &["w_scales", "y_scale"],
        _ => &[],
    };
    for name in ["w_scale", "w_scales", "y_scale"] {
        if inputs.optional(name).is_some() && !own.contains(&name) {
            let want = format!("nothing beside weights in {}", w.dtype());
            return Err(Error::argument(inputs.operator().name, name, "given", want));
        }
    }
    Ok(Some(match w.dtype() {
        DType::Fp8E4M3 => MlaWeight::Fp8(fp8_weight(inputs)?),
        DType::Fp8E4M3Fnuz => MlaWeight::Fp8Fnuz(fp8_weight(inputs)?),
        DType::Fp4x2 => MlaWeight::Mxfp4(Mxfp4Weight {
            w: inputs.view("w")?,
            scales: inputs.view("w_scales")?,
            y_scale: inputs.optional_view("y_scale")?,
        }),
        _ => MlaWeight::Same(inputs.view("w")?),
    }))
}

fn fp8_weight<'a, F: Element>(inputs: &Inputs<'a>) -> Result<Fp8Weight<'a, F>> {
    let group = usize::try_from(inputs.int("group")?).unwrap_or(0);
    Ok(Fp8Weight { w: inputs.view("w")?, scale: inputs.view("w_scale")?, group })
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

/// The weights with their scales are read once.
pub(super) fn traffic(call: &HostCall) -> Traffic {
    let n_slots = call.optional("kv_cache").map_or(0, |cache| cache.shape()[0]);
    common::traffic(call, &["kv_cache"], n_slots, "k_nope")
}
