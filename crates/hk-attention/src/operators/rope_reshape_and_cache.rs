//! `rope_reshape_and_cache` as data.

use super::common::{
    self, ACTIVATIONS, CACHED, COS, FP8, HostTokens, K_SCALE, LAYOUT, NARROW, OFFSETS, POSITIONS, SIN,
    SLOT_MAPPING, SPAN, STYLE, TABLE, TABLE_ROWS, V_SCALE, expect_dtype_of, expect_dtypes, expect_scale,
    expect_shape, expect_slots, expect_tables, layout, reciprocal, rope, shape, slots, stored, tables,
    with_activation, with_narrow, with_table,
};
use crate::reference::element_of;
use crate::{CacheElement, CacheScales, HeadElement, RopeCacheInputs, RopeCacheOutputs, kernels};
use hk_core::plan::rope::RopeElement;
use hk_core::registry::{
    ArgSpec, BenchSizes, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named, Operator,
    Role, Scalar, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Result, Stream};

/// A case of `[tokens, q_heads, kv_heads, dim]`: names of the types of activations and tables, shape of the tables, caches.
macro_rules! case {
    ($label:literal, [$tokens:literal, $q:literal, $kv:literal, $dim:literal], $t:ident, $r:ident, $table:tt,
        fp8 [$(($cache:literal, $shape:tt)),*], $scalars:tt) => {
        case!(@ $label, [$tokens, $q, $kv, $dim], $t, $r, $table, [$(($cache, DType::Fp8E4M3Fnuz, &$shape),)*
            ("k_scale", DType::F32, &[1]), ("v_scale", DType::F32, &[1]), ("zeros_out", DType::$t, &[$tokens, $q, $dim])],
            $scalars)
    };
    ($label:literal, $dims:tt, $t:ident, $r:ident, $table:tt, [$(($cache:literal, $shape:tt)),*], $scalars:tt) => {
        case!(@ $label, $dims, $t, $r, $table, [$(($cache, DType::$t, &$shape)),*], $scalars)
    };
    (@ $label:literal, [$tokens:literal, $q:literal, $kv:literal, $dim:literal], $t:ident, $r:ident, $table:tt,
        [$($more:tt),*], $scalars:tt) => {
        Case {
            label: $label,
            tensors: &[
                ("q", DType::$t, &[$tokens, $q, $dim]),
                ("k", DType::$t, &[$tokens, $kv, $dim]),
                ("v", DType::$t, &[$tokens, $kv, $dim]),
                ("cos", DType::$r, &$table),
                ("sin", DType::$r, &$table),
                ("positions", DType::I32, &[$tokens]),
                ("slot_mapping", DType::I64, &[$tokens]),
                $($more),*
            ],
            scalars: &$scalars,
        }
    };
}

pub(super) const ROPE_RESHAPE_AND_CACHE: Operator = Operator {
    name: "rope_reshape_and_cache",
    family: "hk-attention",
    summary: "q_out = rope(q), k_out = rope(k), key_cache[slot] = cast(rope(k) / k_scale), value_cache[slot] = cast(v / v_scale)",
    args: &[
        Q,
        K,
        V,
        COS,
        SIN,
        POSITIONS,
        OFFSETS,
        SLOT_MAPPING,
        K_SCALE,
        V_SCALE,
        Q_OUT,
        K_OUT,
        ZEROS_OUT,
        KEY_CACHE,
        VALUE_CACHE,
    ],
    scalars: &[STYLE, TABLE, SPAN, LAYOUT],
    kernels: &[&kernels::KV_CACHE_ROWS],
    cases: &[
        case!(
            "Llama-3 8B, 64 tokens of a prompt, NHD",
            [64, 32, 8, 128],
            Bf16,
            Bf16,
            [64, 64],
            [("key_cache", [8, 16, 8, 128]), ("value_cache", [8, 16, 8, 128])],
            []
        ),
        case!("Llama-3 8B, 64 tokens of a prompt, paged fp8", [64, 32, 8, 128], Bf16, Bf16, [64, 64],
            fp8 [("key_cache", [8, 8, 8, 16, 16]), ("value_cache", [8, 8, 1, 128, 16])],
            [("layout", Scalar::Choice("paged_shuffled"))]),
        case!(
            "GPT-OSS 120B, 16 tokens, HND",
            [16, 64, 8, 64],
            Bf16,
            Bf16,
            [64, 32],
            [("key_cache", [2, 8, 64, 64]), ("value_cache", [2, 8, 64, 64])],
            [("layout", Scalar::Choice("hnd"))]
        ),
    ],
    bench: BenchSizes::Cases(&[Case {
        label: "Llama-3 8B, 65536 tokens",
        tensors: &[
            ("q", DType::Bf16, &[65_536, 32, 128]),
            ("k", DType::Bf16, &[65_536, 8, 128]),
            ("v", DType::Bf16, &[65_536, 8, 128]),
            ("cos", DType::Bf16, &[8192, 64]),
            ("sin", DType::Bf16, &[8192, 64]),
            ("positions", DType::I32, &[65_536]),
            ("slot_mapping", DType::I64, &[65_536]),
            ("key_cache", DType::Bf16, &[4096, 16, 8, 128]),
            ("value_cache", DType::Bf16, &[4096, 16, 8, 128]),
        ],
        scalars: &[],
    }]),
    corners: &[
        case!(
            "bf16, NHD",
            [37, 8, 2, 128],
            Bf16,
            Bf16,
            [64, 64],
            [("key_cache", [4, 8, 2, 128]), ("value_cache", [4, 8, 2, 128])],
            []
        ),
        case!(
            "f16, paged",
            [29, 4, 4, 64],
            F16,
            F16,
            [64, 32],
            [("key_cache", [2, 4, 8, 16, 8]), ("value_cache", [2, 4, 64, 16])],
            [("layout", Scalar::Choice("paged")), ("style", Scalar::Choice("interleaved"))]
        ),
        case!("bf16, paged and shuffled, fp8", [40, 2, 1, 80], Bf16, F32, [64, 80],
            fp8 [("key_cache", [1, 1, 5, 32, 16]), ("value_cache", [1, 1, 2, 80, 16])],
            [("layout", Scalar::Choice("paged_shuffled")), ("table", Scalar::Choice("full"))]),
        case!(
            "f16, scalar, HND",
            [9, 3, 3, 22],
            F16,
            F32,
            [64, 5],
            [("key_cache", [3, 3, 5, 22]), ("value_cache", [3, 3, 5, 22])],
            [("layout", Scalar::Choice("hnd")), ("span", Scalar::Choice("last"))]
        ),
        case!(
            "bf16, scalar, paged",
            [11, 2, 2, 24],
            Bf16,
            Bf16,
            [64, 6],
            [("key_cache", [3, 2, 3, 3, 8]), ("value_cache", [3, 2, 24, 3])],
            [("layout", Scalar::Choice("paged"))]
        ),
        case!(@ "offsets", [9, 2, 2, 32], Bf16, F32, [64, 16],
            [("offsets", DType::I32, &[9]), ("key_cache", DType::Bf16, &[3, 4, 2, 32]),
             ("value_cache", DType::Bf16, &[3, 4, 2, 32])], []),
        case!(
            "f16, rows longer than a wave",
            [3, 2, 1, 1056],
            F16,
            F16,
            [64, 528],
            [("key_cache", [3, 1, 1, 1056]), ("value_cache", [3, 1, 1, 1056])],
            []
        ),
        case!(
            "bf16, scalar rows longer than a wave",
            [3, 2, 1, 202],
            Bf16,
            Bf16,
            [64, 101],
            [("key_cache", [3, 1, 1, 202]), ("value_cache", [3, 1, 1, 202])],
            []
        ),
    ],
    outputs,
    run,
    reference,
    traffic,
};

const _: () = assert!(TABLE_ROWS == 64, "the tables of the cases");

const Q: ArgSpec = ArgSpec::input("q", ACTIVATIONS, 3, "[tokens, q_heads, dim]");
const K: ArgSpec = ArgSpec::input("k", ACTIVATIONS, 3, "[all, kv_heads, dim]");
const V: ArgSpec = ArgSpec { name: "v", ..K };
const Q_OUT: ArgSpec = ArgSpec { name: "q_out", role: Role::Out(Tolerance::Elementwise), ..Q };
const K_OUT: ArgSpec = ArgSpec { name: "k_out", role: Role::Out(Tolerance::Elementwise), ..K };
const ZEROS_OUT: ArgSpec =
    ArgSpec::output("zeros_out", Tolerance::Exact, ACTIVATIONS, 3, "[tokens, q_heads, dim]").optional();
const KEY_CACHE: ArgSpec = ArgSpec::updated("key_cache", CACHED, NARROW, 4, "by layout").ranks(4, 5);
const VALUE_CACHE: ArgSpec = ArgSpec { name: "value_cache", ..KEY_CACHE };

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let op = call.operator().name;
    let (q, k) = (call.get("q")?, call.get("k")?);
    let ([tokens, q_heads, dim], [all, kv_heads, _]) = (shape::<3, _>(call, "q")?, shape::<3, _>(call, "k")?);
    if dim == 0 {
        return Err(Error::empty(op, "q", 2, &q.shape));
    }
    if kv_heads == 0 || !q_heads.is_multiple_of(kv_heads) {
        let want = format!("a number of heads that is a multiple of those of k ({kv_heads})");
        return Err(Error::shape(op, "q", &q.shape, want));
    }
    expect_dtypes(call, "q", &["k", "v"])?;
    expect_shape(call, "k", &[all, kv_heads, dim], "dim of q")?;
    expect_shape(call, "v", &[all, kv_heads, dim], "shape of k")?;
    let rope = rope(call)?;
    rope.check(op, "q", &q.shape, dim)?;
    expect_tables(call, &rope, tokens, "q")?;
    expect_scale(call, "k_scale")?;
    expect_scale(call, "v_scale")?;
    expect_dtype_of(call, "key_cache", "q", FP8)?;
    expect_dtypes(call, "key_cache", &["value_cache"])?;
    let (layout, cache) = (layout(call)?, call.get("key_cache")?);
    layout.check_rank(op, "key_cache", &cache.shape)?;
    let [blocks, block] = [cache.shape[0], cache.shape[layout.block_axis()]];
    let piece = 16 / cache.dtype.size_bytes();
    layout.check_pieces(op, cache.dtype, [block, dim])?;
    let sizes = [blocks, block, kv_heads, dim];
    expect_shape(call, "key_cache", &layout.key_shape_of(piece, sizes), "the layout, kv_heads and dim")?;
    expect_shape(call, "value_cache", &layout.value_shape_of(piece, sizes), "the layout and key_cache")?;
    if block == 0 {
        return Err(Error::empty(op, "key_cache", layout.block_axis(), &cache.shape));
    }
    expect_slots(call, tokens, all)?;
    let mut outputs = vec![("q_out", q.clone()), ("k_out", k.clone())];
    if call.wants("zeros_out") {
        outputs.push(("zeros_out", q.clone()));
    }
    Ok(outputs)
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let cache = call.outputs().find(|(name, _)| *name == "key_cache").map(|(_, t)| t.dtype());
    let (inputs, _) = call.split();
    let (activations, table) = (inputs.get("q")?.dtype(), inputs.get("cos")?.dtype());
    with_activation!("rope_reshape_and_cache", "q", activations, T => {
        with_table!(table, T, R => with_narrow!(cache.unwrap_or(activations), T, C => run_typed::<T, R, C>(stream, call)))
    })
}

fn run_typed<T: HeadElement, R: RopeElement<T>, C: CacheElement<T>>(
    stream: &Stream,
    call: &mut DeviceCall,
) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let (rope, layout) = (rope(&inputs)?, layout(&inputs)?);
    let scales = CacheScales { k: inputs.optional_view("k_scale")?, v: inputs.optional_view("v_scale")? };
    let tensors = RopeCacheInputs::<T, R> {
        q: inputs.view("q")?,
        k: inputs.view("k")?,
        v: inputs.view("v")?,
        tables: tables(&inputs)?,
        slot_mapping: slots(&inputs)?,
        scales,
    };
    let outputs = RopeCacheOutputs::<T, C> {
        q_out: outputs.take("q_out")?,
        k_out: outputs.take("k_out")?,
        zeros_out: outputs.take_optional("zeros_out")?,
        key_cache: outputs.take("key_cache")?,
        value_cache: outputs.take("value_cache")?,
    };
    crate::rope_reshape_and_cache(stream, tensors, outputs, layout, rope)
}

/// Blocks' tokens, heads and columns of the caches, and elements of a piece.
fn cache_sizes(call: &HostCall) -> Result<([usize; 3], usize, usize)> {
    let [_, heads, dim] = shape(call, "k")?;
    let cache = call.get("key_cache")?;
    let block = cache.shape()[layout(call)?.block_axis()];
    Ok(([block, heads, dim], cache.shape()[0] * block, 16 / cache.dtype().size_bytes()))
}

fn reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    outputs(&call.spec())?;
    let ([_, q_heads, dim], [all, kv_heads, _]) = (shape::<3, _>(call, "q")?, shape::<3, _>(call, "k")?);
    let host = HostTokens::of(call)?;
    let (sizes, n_slots, piece) = cache_sizes(call)?;
    let (tokens, layout) = (host.tokens(n_slots), layout(call)?);
    let (q, k, v) = (call.get("q")?.to_f64(), call.get("k")?.to_f64(), call.get("v")?.to_f64());
    let (mut keys, mut values) = (call.get("key_cache")?.to_f64(), call.get("value_cache")?.to_f64());
    let dtype = call.get("key_cache")?.dtype();
    let (k_scale, v_scale) = (reciprocal(call, "k_scale"), reciprocal(call, "v_scale"));

    let q_out = q.chunks(dim).enumerate().flat_map(|(i, head)| tokens.rotate(i / q_heads, head)).collect();
    // Rows of tokens without a slot are not written.
    let mut k_out = vec![HostTensorF64::UNTOUCHED; all * kv_heads * dim];
    for row in 0..host.cached() * kv_heads {
        let (token, head) = (row / kv_heads, row % kv_heads);
        let columns = row * dim..(row + 1) * dim;
        let rotated = tokens.rotate(token, &k[columns.clone()]);
        if let Some(slot) = tokens.slot(token) {
            for col in 0..dim {
                let at = [slot, head, col];
                keys[element_of(layout, false, piece, sizes, at)] = stored(dtype, rotated[col] * k_scale);
                values[element_of(layout, true, piece, sizes, at)] =
                    stored(dtype, v[columns.start + col] * v_scale);
            }
        }
        k_out[columns].copy_from_slice(&rotated);
    }
    let tensor = |name: &'static str, shape: &[usize], values| (name, HostTensorF64::new(shape, values));
    let mut outputs =
        vec![tensor("q_out", call.get("q")?.shape(), q_out), tensor("k_out", call.get("k")?.shape(), k_out)];
    if call.wants("zeros_out") {
        outputs.push(tensor("zeros_out", call.get("q")?.shape(), vec![0.0; q.len()]));
    }
    outputs.push(tensor("key_cache", call.get("key_cache")?.shape(), keys));
    outputs.push(tensor("value_cache", call.get("value_cache")?.shape(), values));
    Ok(outputs)
}

fn traffic(call: &HostCall) -> Traffic {
    let n_slots = cache_sizes(call).map_or(0, |(_, n_slots, _)| n_slots);
    common::traffic(call, &["key_cache", "value_cache"], n_slots, "v")
}
