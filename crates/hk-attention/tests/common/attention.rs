//! Calls of attention operators through the registry, and what their tests share.

use hk_attention::OPERATORS;
use hk_core::registry::{Call, CallSpec, HostCall, HostTensor, Operator, Scalar, TensorSpec};
use hk_core::{DType, Error};
use hk_testkit::{self as kit, compare::compare};

/// Sequences, queries, keys; heads of queries and of keys; columns of keys and of values.
pub type Sizes = [usize; 7];

pub const CAUSAL: (&str, Scalar) = ("causal", Scalar::Bool(true));

/// Runs a call on every device that serves it and compares each output with the reference.
#[track_caller]
pub fn check(what: &str, call: &HostCall) {
    let operator = call.operator();
    let want = (operator.reference)(call).unwrap_or_else(|e| panic!("{what}: {e}"));
    let mut served = 0;
    let gpus = kit::devices();
    for gpu in &gpus {
        let outputs = match operator.execute(gpu.stream(), call) {
            // The fp8 of another target.
            Err(Error::Unsupported { .. }) => continue,
            outputs => outputs.unwrap_or_else(|e| panic!("{what} on {}: {e}", gpu.spec())),
        };
        assert_eq!(outputs.len(), want.len(), "{what}: outputs");
        for ((name, got), (_, want)) in outputs.iter().zip(&want) {
            let tolerance = operator.arg(name).and_then(|arg| arg.role.output()).expect("an output");
            let label = format!("{what}: {name} on {}", gpu.spec());
            let dtype = hk_core::registry::Described::dtype(got);
            compare(label, dtype, &got.to_f64(), want, tolerance).assert();
        }
        served += 1;
    }
    assert!(served > 0 || gpus.len() < 2, "{what}: no target serves it");
}

pub fn operator(name: &str) -> &'static Operator {
    OPERATORS.iter().find(|op| op.name == name).unwrap_or_else(|| panic!("no operator {name}"))
}

/// A call of an operator by the types and shapes of its tensors.
pub struct Builder {
    spec: CallSpec,
    given: Vec<(&'static str, HostTensor)>,
}

impl Builder {
    pub fn new(name: &str) -> Self {
        Self { spec: Call::new(operator(name)), given: vec![] }
    }

    /// `q`, `k` and `v` of `[B, S, H, D]`.
    pub fn dense(name: &str, dtype: DType, [b, sq, sk, heads, kv_heads, dqk, dv]: Sizes) -> Self {
        Self::new(name)
            .tensor("q", dtype, [b, sq, heads, dqk])
            .tensor("k", dtype, [b, sk, kv_heads, dqk])
            .tensor("v", dtype, [b, sk, kv_heads, dv])
    }

    /// `q`, `k` and `v` of packed sequences of these lengths.
    pub fn packed(
        name: &str,
        dtype: DType,
        lens: [&[usize]; 2],
        [heads, kv_heads, dqk, dv]: [usize; 4],
    ) -> Self {
        let [total_q, total_k] = lens.map(|lens| lens.iter().sum());
        Self::new(name)
            .tensor("q", dtype, [total_q, heads, dqk])
            .tensor("k", dtype, [total_k, kv_heads, dqk])
            .tensor("v", dtype, [total_k, kv_heads, dv])
            .integers("cu_seqlens_q", &starts(lens[0]))
            .integers("cu_seqlens_k", &starts(lens[1]))
    }

    /// Example data.
    pub fn tensor(mut self, name: &str, dtype: DType, shape: impl Into<Vec<usize>>) -> Self {
        self.spec.set(name, TensorSpec::new(dtype, shape)).unwrap_or_else(|e| panic!("{e}"));
        self
    }

    pub fn f32(self, name: &str, shape: impl Into<Vec<usize>>) -> Self {
        self.tensor(name, DType::F32, shape)
    }

    pub fn integers(mut self, name: &'static str, values: &[i32]) -> Self {
        self.given.push((name, HostTensor::new([values.len()], values).unwrap()));
        self
    }

    pub fn table(mut self, name: &'static str, shape: [usize; 2], values: &[i32]) -> Self {
        self.given.push((name, HostTensor::new(shape, values).unwrap()));
        self
    }

    pub fn scalar(mut self, name: &str, value: Scalar) -> Self {
        self.spec.set_scalar(name, value).unwrap_or_else(|e| panic!("{e}"));
        self
    }

    pub fn scalars(self, scalars: &[(&str, Scalar)]) -> Self {
        scalars.iter().fold(self, |b, (name, value)| b.scalar(name, *value))
    }

    pub fn want(mut self, name: &str) -> Self {
        self.spec.want(name).unwrap_or_else(|e| panic!("{e}"));
        self
    }

    pub fn call(self, seed: u64) -> HostCall {
        let mut call = self.spec.sample(seed).unwrap_or_else(|e| panic!("{e}"));
        self.given.into_iter().for_each(|(name, tensor)| call.set(name, tensor).unwrap());
        call
    }

    #[track_caller]
    pub fn check(self, what: &str, seed: u64) {
        check(what, &self.call(seed));
    }
}

/// `cu_seqlens` of these lengths.
pub fn starts(lens: &[usize]) -> Vec<i32> {
    let ends = lens.iter().scan(0, |end, len| {
        *end += *len as i32;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// Masks: causal, keys before and after the own place.
pub const MASKS: [(bool, i64, i64); 7] = [
    (false, -1, -1),
    (true, -1, -1),
    (false, 0, 0),
    (false, 5, -1),
    (true, 127, 0),
    (false, -1, 3),
    (false, 4, 2),
];

pub fn masked(b: Builder, (causal, left, right): (bool, i64, i64)) -> Builder {
    b.scalars(&[
        ("causal", Scalar::Bool(causal)),
        ("window_left", Scalar::Int(left)),
        ("window_right", Scalar::Int(right)),
    ])
}

/// Queries and keys of a sequence.
pub const LENGTHS: [[usize; 2]; 12] = [
    [1, 1],
    [1, 3],
    [3, 17],
    [17, 17],
    [65, 65],
    [129, 129],
    [2, 5],
    [5, 2],
    [32, 16],
    [64, 128],
    [129, 65],
    [510, 1020],
];
pub const HEADS: [[usize; 2]; 5] = [[1, 1], [2, 1], [8, 8], [6, 2], [48, 8]];
pub const COLUMNS: [[usize; 2]; 9] =
    [[16, 16], [32, 32], [40, 40], [64, 64], [80, 80], [96, 96], [128, 128], [192, 128], [256, 256]];
/// bf16, f16, f32, and the fp8 of both targets.
pub const TYPES: [DType; 5] = [DType::Bf16, DType::F16, DType::F32, DType::Fp8E4M3, DType::Fp8E4M3Fnuz];
