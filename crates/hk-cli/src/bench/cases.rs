//! The sizes that are measured: one list, which the peers read, too (`hk bench --list`).

use crate::Result;
use hk_core::DType;
use hk_core::registry::{Call, CallSpec, Described as _, Operator, Scalar, TensorSpec};
use serde::Serialize;
use std::collections::BTreeMap;

/// Which sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Set {
    /// Those of the registry, that the emulator takes about a second for.
    Models,
    /// Those that only a GPU can do: published tables, prefill, more than a GiB.
    Large,
    /// Both.
    All,
}

/// A call to be measured.
pub struct Case {
    /// With operator and element type, unique.
    pub label: String,
    pub call: CallSpec,
}

impl Case {
    /// The element type of the first input.
    pub fn dtype(&self) -> &'static str {
        self.call.tensors().next().map_or("", |(_, t)| t.dtype().name())
    }

    pub fn json(&self) -> CaseJson {
        let op = self.call.operator();
        let tensor = |(name, t): (&'static str, &TensorSpec)| TensorJson {
            name,
            dtype: t.dtype().name(),
            shape: t.shape().to_vec(),
        };
        CaseJson {
            operator: op.name,
            family: op.family,
            case: self.label.clone(),
            dtype: self.dtype(),
            tensors: self.call.tensors().map(tensor).collect(),
            scalars: self.call.scalars().map(|(name, value)| (name, json(value))).collect(),
            wanted: self.call.wanted().to_vec(),
        }
    }
}

/// A case as the peers read it.
#[derive(Serialize)]
pub struct CaseJson {
    operator: &'static str,
    family: &'static str,
    case: String,
    dtype: &'static str,
    /// The inputs.
    tensors: Vec<TensorJson>,
    /// All scalars, those at their defaults, too.
    scalars: BTreeMap<&'static str, serde_json::Value>,
    /// The optional outputs that are asked for.
    wanted: Vec<&'static str>,
}

#[derive(Serialize)]
struct TensorJson {
    name: &'static str,
    dtype: &'static str,
    shape: Vec<usize>,
}

fn json(value: Scalar) -> serde_json::Value {
    match value {
        Scalar::Float(x) => x.into(),
        Scalar::Int(x) => x.into(),
        Scalar::Bool(x) => x.into(),
        Scalar::Choice(x) => x.into(),
    }
}

/// The sizes of an operator.
pub fn of(op: &'static Operator, set: Set) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    if set != Set::Large {
        for case in op.cases {
            cases.push(Case { label: case.label.into(), call: op.spec(case)? });
        }
    }
    if set != Set::Models {
        for (label, tensors, scalars) in large(op.name) {
            let mut call: CallSpec = Call::new(op);
            for (name, dtype, shape) in tensors {
                call.set(name, TensorSpec::new(dtype, shape))?;
            }
            for (name, value) in scalars {
                call.set_scalar(name, value)?;
            }
            cases.push(Case { label, call });
        }
    }
    Ok(cases)
}

type Tensors = Vec<(&'static str, DType, Vec<usize>)>;
type Sized = (String, Tensors, Vec<(&'static str, Scalar)>);

const BF16: DType = DType::Bf16;

/// 128 columns: a head, the width of published tables.
const HEADS: [usize; 4] = [128, 4096, 16_384, 65_536];
/// Widths of models, decode and prefill: Qwen3 30B-A3B, GPT-OSS, Llama-3 8B, DeepSeek-V3, Llama-3 70B.
const MODELS: [[usize; 2]; 6] =
    [[1, 8192], [4096, 2048], [4096, 2880], [4096, 4096], [4096, 7168], [4096, 8192]];

fn large(operator: &str) -> Vec<Sized> {
    let rows = |more: &[[usize; 2]]| -> Vec<[usize; 2]> {
        HEADS.iter().map(|&m| [m, 128]).chain(MODELS).chain(more.iter().copied()).collect()
    };
    match operator {
        "rmsnorm" => by_rows(rows(&[[2_097_152, 128], [40_960, 8192]]), &["x"], &["weight"], &[]),
        "fused_add_rmsnorm" => {
            by_rows(rows(&[[1_048_576, 128], [20_480, 8192]]), &["x", "residual_in"], &["weight"], &[])
        }
        "rmsnorm_pad" => by_rows(vec![[131_072, 2880]], &["x"], &["weight"], &[]),
        "fused_add_rmsnorm_pad" => by_rows(vec![[65_536, 2880]], &["x", "residual_in"], &["weight"], &[]),
        "layernorm" => by_rows(rows(&[[2_097_152, 128], [40_960, 8192]]), &["x"], &["weight", "bias"], &[]),
        "fused_add_layernorm" => {
            by_rows(vec![[4096, 8192], [20_480, 8192]], &["x", "residual_in"], &["weight", "bias"], &[])
        }
        "softmax" => {
            let more = [[64, 128_256], [2_097_152, 128], [40_960, 8192], [16_384, 32_768]];
            by_rows(rows(&more), &["x"], &[], &[])
        }
        "silu_and_mul" | "gelu_and_mul" => {
            let shapes = [
                [4096, 256],
                [16_384, 256],
                [65_536, 256],
                [131_072, 256],
                [4096, 8192],
                [4096, 16_384],
                // Llama-3 8B: a token, prefill, more than a GiB.
                [1, 28_672],
                [4096, 28_672],
                [16_384, 28_672],
            ];
            by_rows(shapes.into(), &["x"], &[], &[])
        }
        "silu" | "gelu" | "gelu_tanh" | "relu" | "tanh" => {
            by_rows(vec![[4096, 14_336], [40_960, 8192]], &["x"], &[], &[])
        }
        "gelu_tanh_and_mul" | "swiglu_oai_and_mul" => by_rows(vec![[16_384, 28_672]], &["x"], &[], &[]),
        "fused_mul_add" => by_rows(vec![[20_480, 7168]], &["x", "a", "b"], &[], &[]),
        "causal_conv1d_fwd" => {
            let packed = vec![
                ("x", BF16, vec![65_536, 8192]),
                ("weight", BF16, vec![8192, 4]),
                ("query_start_loc", DType::I32, vec![1025]),
                ("cache_indices", DType::I32, vec![1024]),
                ("has_initial_state", DType::U8, vec![1024]),
                ("conv_states", BF16, vec![1024, 8192, 3]),
            ];
            let along = vec![("x", BF16, vec![8, 8192, 8192]), ("weight", BF16, vec![8192, 4])];
            let layout = |name| vec![("layout", Scalar::Choice(name))];
            vec![
                (
                    "Qwen3-Next, 65536 tokens of 1024 sequences, channels together".into(),
                    packed,
                    layout("channels"),
                ),
                ("Qwen3-Next, 8 x 8192 tokens, tokens together".into(), along, layout("tokens")),
            ]
        }
        "per_token_quant" => {
            let fp8 = ("output", Scalar::Choice("fp8e4m3"));
            by_rows(rows(&[[4_194_304, 128], [51_200, 8192], [16_384, 32_768]]), &["x"], &[], &[fp8])
        }
        "smoothquant" => {
            let fp8 = ("output", Scalar::Choice("fp8e4m3"));
            by_rows(vec![[4096, 4096], [51_200, 8192]], &["x"], &["smooth"], &[fp8])
        }
        "moe_smoothquant" => {
            let ids = ("topk_ids", DType::I32, vec![65_536, 8]);
            let tensors = vec![("x", BF16, vec![65_536, 2048]), ("smooth", DType::F32, vec![128, 2048]), ids];
            vec![("Qwen3 30B-A3B, 65536 tokens, 8 of 128 experts".into(), tensors, vec![])]
        }
        "per_tensor_quant_static" | "downcast_to_static_fp8" => {
            let fp8 = ("output", Scalar::Choice("fp8e4m3"));
            let mut cases = by_rows(vec![[4096, 4096], [51_200, 8192]], &["x"], &[], &[fp8]);
            cases.iter_mut().for_each(|(_, tensors, _)| tensors.push(("scale", DType::F32, vec![1])));
            cases
        }
        "per_tensor_quant_dynamic" | "group_quant" => {
            let fp8 = ("output", Scalar::Choice("fp8e4m3"));
            by_rows(vec![[4096, 7168], [51_200, 8192]], &["x"], &[], &[fp8])
        }
        "dynamic_mxfp4_quant" => by_rows(vec![[4096, 7168], [61_440, 8192]], &["x"], &[], &[]),
        "downcast_to_mxfp" => {
            let fp8 = ("element", Scalar::Choice("fp8e4m3"));
            by_rows(vec![[61_440, 8192]], &["x"], &[], &[fp8])
        }
        "upcast_from_mxfp" => {
            let tensors =
                vec![("q", DType::Fp4x2, vec![61_440, 4096]), ("scale", DType::E8M0, vec![61_440, 256])];
            vec![("61440 x 8192".into(), tensors, vec![])]
        }
        "shuffle_scales" => {
            vec![("1048576 x 512".into(), vec![("plain", DType::E8M0, vec![1_048_576, 512])], vec![])]
        }
        "unshuffle_scales" => {
            let scalars = vec![("rows", Scalar::Int(1_048_576)), ("blocks", Scalar::Int(512))];
            vec![("1048576 x 512".into(), vec![("shuffled", DType::E8M0, vec![1 << 29])], scalars)]
        }
        "fp8_ocp_to_fnuz" | "fp8_fnuz_to_ocp" => {
            let q = if operator == "fp8_ocp_to_fnuz" { DType::Fp8E4M3 } else { DType::Fp8E4M3Fnuz };
            let tensors = vec![("q", q, vec![32_768, 16_384]), ("scale", DType::F32, vec![256, 128])];
            vec![("32768 x 16384, 128 x 128 blocks".into(), tensors, vec![])]
        }
        "fused_rmsnorm_fp8_quant" => {
            let token = [("output", Scalar::Choice("fp8e4m3")), ("scaling", Scalar::Choice("token"))];
            with_and_without_residual(&token)
        }
        "fused_rmsnorm_mxfp4_quant" => with_and_without_residual(&[]),
        "topk" => [[1024, 256, 10], [4096, 256, 10], [4096, 1024, 32], [64, 128_256, 50], [8192, 65_536, 32]]
            .map(|[m, n, k]| {
                let scalars = vec![("k", Scalar::Int(k as i64)), ("index_dtype", Scalar::Choice("i64"))];
                (format!("{m} x {n}, k = {k}"), vec![("x", BF16, vec![m, n])], scalars)
            })
            .into(),
        "mixed_sample" | "sample_from_logits" => [[64, 128_256], [4096, 151_936]]
            .map(|[m, n]| {
                let scalars = match operator {
                    "sample_from_logits" => vec![("k", Scalar::Int(50)), ("p", Scalar::Float(0.9))],
                    _ => vec![],
                };
                (format!("{m} x {n}"), vec![("logits", BF16, vec![m, n])], scalars)
            })
            .into(),
        "random_sample" => [[64, 128_256], [4096, 151_936]]
            .map(|[m, n]| (format!("{m} x {n}"), vec![("logits", BF16, vec![m, n])], vec![]))
            .into(),
        "greedy_sample" => [[64, 128_256], [256, 151_936], [4096, 151_936]]
            .map(|[m, n]| (format!("{m} x {n}"), vec![("x", BF16, vec![m, n])], vec![]))
            .into(),
        "qk_cat" => {
            let part = |name, heads, cols| (name, BF16, vec![16_384, heads, cols]);
            let tensors =
                vec![part("q1", 32, 512), part("q2", 32, 64), part("k1", 1, 512), part("k2", 1, 64)];
            vec![("DeepSeek-V3, 16384 tokens".into(), tensors, vec![])]
        }
        "fused_qkv_split_qk_rope" => {
            let table = |name| (name, DType::F32, vec![8192, 64]);
            let positions = ("positions", DType::I64, vec![65_536]);
            let tensors = vec![("qkv", BF16, vec![65_536, 6144]), table("cos"), table("sin"), positions];
            let heads = [("q_heads", 32), ("kv_heads", 8), ("head_dim", 128), ("rotary", 128)];
            let scalars = heads.map(|(name, n)| (name, Scalar::Int(n))).into();
            vec![("Llama-3 8B, 65536 tokens".into(), tensors, scalars)]
        }
        "qk_rope_cat" => {
            let part = |name, heads, cols| (name, BF16, vec![16_384, heads, cols]);
            let table = |name| (name, DType::F32, vec![8192, 32]);
            let tensors = vec![
                part("q_nope", 32, 512),
                part("q_pe", 32, 64),
                part("k_nope", 1, 512),
                part("k_pe", 1, 64),
                table("cos"),
                table("sin"),
                ("positions", DType::I64, vec![16_384]),
            ];
            vec![("DeepSeek-V3, 16384 tokens".into(), tensors, vec![])]
        }
        "rope_reshape_and_cache" => {
            let heads = |name, heads| (name, BF16, vec![65_536, heads, 128]);
            let table = |name| (name, BF16, vec![8192, 64]);
            let cache = |name| (name, BF16, vec![4096, 16, 8, 128]);
            let tensors = vec![
                heads("q", 32),
                heads("k", 8),
                heads("v", 8),
                table("cos"),
                table("sin"),
                ("positions", DType::I32, vec![65_536]),
                ("slot_mapping", DType::I64, vec![65_536]),
                cache("key_cache"),
                cache("value_cache"),
            ];
            vec![("Llama-3 8B, 65536 tokens".into(), tensors, vec![])]
        }
        "rope_cat_and_cache_mla" => {
            let part = |name, heads, cols| (name, BF16, vec![8192, heads, cols]);
            let table = |name| (name, BF16, vec![8192, 32]);
            let tensors = vec![
                part("q_nope", 128, 512),
                part("q_pe", 128, 64),
                part("k_nope", 1, 512),
                part("k_pe", 1, 64),
                table("cos"),
                table("sin"),
                ("positions", DType::I64, vec![8192]),
                ("slot_mapping", DType::I32, vec![8192]),
                ("kv_cache", BF16, vec![8192, 1, 576]),
            ];
            vec![("DeepSeek-V3, 8192 tokens".into(), tensors, vec![])]
        }
        "min_p_sampling_from_probs" => {
            vec![("2048 x 151936".into(), vec![("probs", DType::F32, vec![2048, 151_936])], vec![])]
        }
        "top_k_renorm_probs" => {
            vec![("1024 x 151936".into(), vec![("probs", DType::F32, vec![1024, 151_936])], vec![])]
        }
        "top_k_top_p_sampling_from_probs" | "top_p_sampling_from_probs" | "top_k_sampling_from_probs" => {
            [[64, 128_256], [256, 151_936], [2048, 151_936]]
                .map(|[m, n]| (format!("{m} x {n}"), vec![("probs", DType::F32, vec![m, n])], vec![]))
                .into()
        }
        "rope_freqs" => {
            let tensors = vec![("x", BF16, vec![65_536, 32, 128]), ("angles", DType::F32, vec![65_536, 64])];
            vec![("Llama-3 8B queries, 65536 tokens".into(), tensors, vec![("rotary", Scalar::Int(128))])]
        }
        "rope_qk" => {
            let heads = |name, heads| (name, BF16, vec![65_536, heads, 128]);
            let table = |name| (name, DType::F32, vec![8192, 64]);
            let positions = ("positions", DType::I64, vec![65_536]);
            let tensors = vec![heads("q", 32), heads("k", 8), table("cos"), table("sin"), positions];
            vec![("Llama-3 8B, 65536 tokens".into(), tensors, vec![("rotary", Scalar::Int(128))])]
        }
        "rope_cached" => [[4, 32, 1024, 128], [8, 32, 2048, 128], [16, 32, 4096, 128]]
            .map(|[b, h, s, d]| {
                let table = |name| (name, BF16, vec![s, d / 2]);
                let tensors = vec![("x", BF16, vec![b, h, s, d]), table("cos"), table("sin")];
                let scalars = vec![("rotary", Scalar::Int(d as i64)), ("layout", Scalar::Choice("bhsd"))];
                (format!("{b} x {h} x {s} x {d}"), tensors, scalars)
            })
            .into(),
        "gemm_a16w16" => products().map(|mnk| product(mnk, BF16, &[])).collect(),
        "gemm_a8w8" => products().map(|mnk| product(mnk, DType::Fp8E4M3, &["a_scale", "w_scale"])).collect(),
        _ => vec![],
    }
}

/// Tensors of `[rows, cols]`, and vectors of `[cols]`.
fn by_rows(
    shapes: Vec<[usize; 2]>,
    full: &[&'static str],
    vectors: &[&'static str],
    scalars: &[(&'static str, Scalar)],
) -> Vec<Sized> {
    let case = |[m, n]: [usize; 2]| {
        let full = full.iter().map(|&name| (name, BF16, vec![m, n]));
        let vectors = vectors.iter().map(|&name| (name, BF16, vec![n]));
        (format!("{m} x {n}"), full.chain(vectors).collect(), scalars.to_vec())
    };
    shapes.into_iter().map(case).collect()
}

/// Norms that quantize.
fn with_and_without_residual(scalars: &[(&'static str, Scalar)]) -> Vec<Sized> {
    let with = by_rows(vec![[4096, 4096], [32_768, 8192]], &["x", "residual_in"], &["weight"], scalars);
    let without = by_rows(vec![[51_200, 8192]], &["x"], &["weight"], scalars);
    let named = |(label, tensors, scalars): Sized| (label + ", no residual", tensors, scalars);
    with.into_iter().chain(without.into_iter().map(named)).collect()
}

/// M, N and K: squares, and the weights of Llama-3 8B for few and for many tokens.
fn products() -> impl Iterator<Item = [usize; 3]> {
    let squares = [1024, 2048, 4096, 8192].map(|n| [n, n, n]);
    let weights = [[6144, 4096], [28_672, 4096], [4096, 14_336]];
    let tokens = [1, 16, 64, 512];
    squares.into_iter().chain(tokens.into_iter().flat_map(move |m| weights.map(|[n, k]| [m, n, k])))
}

fn product([m, n, k]: [usize; 3], dtype: DType, scales: &[&'static str]) -> Sized {
    let mut tensors = vec![("a", dtype, vec![m, k]), ("w", dtype, vec![n, k])];
    tensors.extend(scales.iter().zip([m, n]).map(|(&name, rows)| (name, DType::F32, vec![rows])));
    (format!("{m} x {n} x {k}"), tensors, vec![])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn keys_are_unique_and_every_size_is_a_call() {
        let mut keys = HashSet::new();
        let mut operators = HashSet::new();
        for op in crate::operators() {
            for case in of(op, Set::All).unwrap() {
                case.call.check_complete().unwrap();
                (op.outputs)(&case.call).unwrap_or_else(|e| panic!("{}: {e}", case.label));
                assert!(
                    keys.insert((op.name, case.label.clone(), case.dtype())),
                    "{} {}",
                    op.name,
                    case.label
                );
            }
            let larger = of(op, Set::Large).unwrap().len();
            assert_eq!(of(op, Set::All).unwrap().len(), op.cases.len() + larger);
            operators.extend((larger > 0).then_some(op.name));
        }
        // All names of `large` are operators.
        assert_eq!(operators.len(), 54, "{operators:?}");
    }

    #[test]
    fn a_case_is_json() {
        let op = crate::operator("topk").unwrap();
        let case = &of(op, Set::Large).unwrap()[2];
        let json = serde_json::to_value(case.json()).unwrap();
        assert_eq!(json["case"], "4096 x 1024, k = 32");
        assert_eq!(
            json["tensors"],
            serde_json::json!([{"name": "x", "dtype": "bf16", "shape": [4096, 1024]}])
        );
        assert_eq!(json["scalars"], serde_json::json!({"k": 32, "index_dtype": "i64", "largest": true}));
        assert_eq!((&json["dtype"], &json["wanted"]), (&"bf16".into(), &serde_json::json!([])));
    }
}
