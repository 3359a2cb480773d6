//! What the registry entries of `rope_cat_and_cache_mla` and `fused_bmm_rope_kv_cache` share.

use super::common::{
    self, ACTIVATIONS, CACHED, FP8, HostTokens, NARROW, expect_dtype_of, expect_dtypes, expect_scale,
    expect_shape, expect_slots, expect_tables, reciprocal, rope, shape, slots, stored, tables,
    with_activation, with_narrow, with_table,
};
use crate::{
    CacheElement, Fp8Weight, HeadElement, MlaInputs, MlaOutputs, MlaWeight, Mxfp4Weight,
    fused_bmm_rope_kv_cache, rope_cat_and_cache_mla,
};
use hk_core::plan::rope::RopeElement;
use hk_core::registry::{
    ArgSpec, CallSpec, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named, Role, Scalar,
    ScalarSpec, TensorSpec, Tolerance, Traffic,
};
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

/// Error of a GEMM's `f32` sums, relative to the sum of absolute terms, as hk-gemm bounds that of quantized operands.
pub(super) const TERMS: f64 = 1.0 / (1u64 << 16) as f64;

pub(super) const Q_OUT_TYPE: ScalarSpec = ScalarSpec {
    name: "q_out_type",
    default: Scalar::Choice("input"),
    choices: &["input", "cache"],
    summary: "type of q_out: that of q_pe or that of kv_cache",
};
pub(super) const HEAD_TOKENS: ScalarSpec = ScalarSpec {
    name: "head_tokens",
    default: Scalar::Count(0),
    choices: &[],
    summary: "tokens of q_pe_head and nope_zeros",
};

pub(super) fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let op = call.operator().name;
    let [tokens, heads, pe] = shape(call, "q_pe")?;
    let [all, kv_heads, nope] = shape(call, "k_nope")?;
    for (name, cols) in [("q_pe", pe), ("k_nope", nope)] {
        if cols == 0 {
            return Err(Error::empty(op, name, 2, &call.get(name)?.shape));
        }
    }
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        let want = format!("a number of heads that is a multiple of those of k_nope ({kv_heads})");
        return Err(Error::shape(op, "q_pe", &call.get("q_pe")?.shape, want));
    }
    expect_dtypes(call, "q_pe", &["q_nope", "k_nope", "k_pe"])?;
    expect_shape(call, "k_pe", &[all, kv_heads, pe], "tokens and heads of k_nope, columns of q_pe")?;
    let rope = rope(call)?;
    rope.check(op, "q_pe", &call.get("q_pe")?.shape, pe)?;
    expect_tables(call, &rope, tokens, "q_pe")?;
    expect_scale(call, "k_scale")?;
    expect_dtype_of(call, "kv_cache", "q_pe", FP8)?;
    let [slots, ..] = shape::<3, _>(call, "kv_cache")?;
    expect_shape(call, "kv_cache", &[slots, kv_heads, nope + pe], "heads of k_nope, columns of both")?;
    expect_slots(call, tokens, all)?;
    let activations = call.get("q_pe")?.dtype;
    let q_type = match call.choice("q_out_type")? {
        "cache" => call.get("kv_cache")?.dtype,
        _ => activations,
    };
    let first = call.size("head_tokens")?;
    if first > tokens {
        return Err(Error::argument(op, "head_tokens", first, format!("at most {tokens} (tokens of q_pe)")));
    }
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

fn run_typed<T: HeadElement, R: RopeElement<T>, Q: CacheElement<T>, C: CacheElement<T>>(
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
    let tensors = MlaInputs::<T, R> {
        q_nope: inputs.view("q_nope")?,
        q_pe: inputs.view("q_pe")?,
        k_nope: inputs.view("k_nope")?,
        k_pe: inputs.view("k_pe")?,
        tables: tables(&inputs)?,
        slot_mapping: slots(&inputs)?,
        k_scale: inputs.optional_view("k_scale")?,
    };
    match weight(&inputs)? {
        None => rope_cat_and_cache_mla(stream, tensors, outputs, rope),
        Some(w) => fused_bmm_rope_kv_cache(stream, tensors, w, outputs, rope),
    }
}

/// The weights of the GEMM, if the operator has one.
fn weight<'a, T: HeadElement>(inputs: &Inputs<'a>) -> Result<Option<MlaWeight<'a, T>>> {
    let Some(w) = inputs.optional("w") else { return Ok(None) };
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
    let group = inputs.size("group")?;
    Ok(Fp8Weight { w: inputs.view("w")?, scale: inputs.view("w_scale")?, group })
}

/// The outputs, from the queries without position, `[tokens, q_heads, nope]`. `magnitudes`: the sums of absolute terms if
/// these are results of a GEMM.
pub(super) fn mla_reference(
    call: &HostCall,
    q_nope: &[f64],
    magnitudes: &[f64],
) -> Result<Named<HostTensorF64>> {
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

    let (mut q_out, mut q_rotated, mut q_magnitudes) = (Vec::new(), Vec::new(), Vec::new());
    let q_type = dtype_of("q_out");
    // A quantized value may be either of two neighbours, which are up to an eighth apart.
    let step = |x: f64| if q_type.size_bytes() == 1 { x.abs() / 8.0 + 1.0 / 512.0 } else { 0.0 };
    for (row, (first, last)) in q_nope.chunks(nope).zip(q_pe.chunks(pe)).enumerate() {
        let rotated = tokens.rotate(row / q_heads, last);
        let kept = tokens.keep(row / q_heads, first);
        if !magnitudes.is_empty() {
            let sums = &magnitudes[row * nope..][..nope];
            // Each column is a sum of two terms of the head, with factors from the tables.
            let largest = last.iter().fold(0.0, |m: f64, x| m.max(x.abs())) * 2.0 * tokens.largest_factor();
            let all = sums.iter().copied().chain(std::iter::repeat_n(largest, pe));
            let values = kept.iter().chain(&rotated);
            q_magnitudes.extend(all.zip(values).map(|(m, &x)| m + step(x) / TERMS));
        }
        q_out.extend(kept.iter().chain(&rotated).map(|&x| stored(q_type, x)));
        q_rotated.extend(rotated);
    }
    // Rows of tokens without a slot are not written.
    let mut k_pe_out = vec![HostTensorF64::UNTOUCHED; all * kv_heads * pe];
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
    for (_, q_out) in outputs.iter_mut().filter(|(name, _)| *name == "q_out") {
        q_out.magnitudes = std::mem::take(&mut q_magnitudes);
    }
    Ok(outputs)
}

/// The weights with their scales are read once.
pub(super) fn traffic(call: &HostCall) -> Traffic {
    let n_slots = call.optional("kv_cache").map_or(0, |cache| cache.shape()[0]);
    common::traffic(call, &["kv_cache"], n_slots, "k_nope")
}
