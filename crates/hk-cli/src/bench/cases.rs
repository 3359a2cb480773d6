//! The sizes that are measured: one list, which the peers read, too (`hk bench --list`).

use crate::Result;
use hk_core::DType;
use hk_core::registry::{CallSpec, Described as _, HostCall, HostTensor, Operator, Scalar, TensorSpec};
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
        Scalar::Count(x) => x.into(),
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
        let calls = op.bench_calls()?.into_iter();
        cases.extend(calls.map(|(label, call)| Case { label, call }));
    }
    Ok(cases)
}

/// The call with rows spread evenly over experts, or over packed sequences: drawn at random, most rows of a large call would have
/// none.
pub fn with_even_routing(call: HostCall) -> Result<HostCall> {
    let mut even = Vec::new();
    for (name, tensor) in call.tensors() {
        let shape = tensor.shape();
        let n =
            if name == "block_table" { shape.iter().product() } else { shape.first().copied().unwrap_or(0) };
        let n = n.max(1);
        let rows = |name: &str, axis: usize| {
            call.optional(name).and_then(|t| t.shape().get(axis)).copied().unwrap_or(0)
        };
        let value: Box<dyn Fn(usize) -> usize> = match name {
            "masked_m" => Box::new(|_| rows("a", 1)),
            "m_group" => {
                let groups = rows("w", 0);
                Box::new(move |i| i * groups / n)
            }
            "group_sizes" => {
                let rows = rows("lhs", 0);
                Box::new(move |i| (i + 1) * rows / n - i * rows / n)
            }
            "cu_seqlens_q" | "cu_seqlens_k" | "seq_offsets" => {
                let rows = rows(if name == "cu_seqlens_k" { "k" } else { "q" }, 0);
                Box::new(move |i| i * rows / (n - 1).max(1))
            }
            "start" => {
                let rows = rows("k", 0);
                Box::new(move |i| i * rows / n)
            }
            "kv_lens" if call.optional("block_table").is_some() => {
                let (pages, slots) = (rows("block_table", 1), call.size("page")?);
                Box::new(move |i| ((i + 1) * pages / n - i * pages / n) * slots)
            }
            // Of all sequences, one after the other.
            "block_table" if call.optional("kv_lens").is_some() => {
                let pages = rows("k_cache", 1) / call.size("page")?.max(1);
                Box::new(move |i| i % pages.max(1))
            }
            // Each query is of a sequence: all tokens of its pages.
            "seq_lens" if call.optional("cu_seqlens_q").is_none() => {
                let axis = match call.choice("layout")? {
                    "nhd" => 1,
                    "hnd" => 2,
                    _ => 3,
                };
                let tokens = rows("block_table", 1) * rows("k_cache", axis);
                Box::new(move |_| tokens)
            }
            "len" | "kv_lens" => {
                let rows = rows("k", 0);
                Box::new(move |i| (i + 1) * rows / n - i * rows / n)
            }
            _ => continue,
        };
        let shape = tensor.shape().to_vec();
        even.push((
            name,
            match tensor.dtype() {
                DType::I64 => HostTensor::new(shape, &(0..n).map(|i| value(i) as i64).collect::<Vec<_>>())?,
                _ => HostTensor::new(shape, &(0..n).map(|i| value(i) as i32).collect::<Vec<_>>())?,
            },
        ));
    }
    let mut call = call;
    for (name, tensor) in even {
        call.set(name, tensor)?;
    }
    Ok(call)
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
        let missing: Vec<_> =
            crate::operators().iter().map(|op| op.name).filter(|name| !operators.contains(name)).collect();
        assert!(missing.is_empty(), "no `bench` sizes: {missing:?}");
    }

    #[test]
    fn rows_are_spread_over_all_experts() {
        let ints = |name: &str, arg: &str| -> Vec<f64> {
            let case = &of(crate::operator(name).unwrap(), Set::Models).unwrap()[0];
            let call = with_even_routing(case.call.sample(1).unwrap()).unwrap();
            call.optional(arg).unwrap().to_f64()
        };
        assert_eq!(ints("gmm", "group_sizes"), [32.0; 8]);
        assert_eq!(ints("deepgemm_masked", "masked_m"), [64.0; 16]);
        let groups = ints("deepgemm_contiguous", "m_group");
        assert_eq!((groups[0], groups[127], groups[128], groups[511]), (0.0, 0.0, 1.0, 3.0));
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
