//! `silu`, `gelu`, `gelu_tanh`, `relu`, `tanh`.

use super::{FLOATS, Y_DTYPE_OR_F32, y_as_x, y_dtype};
use crate::kernels;
use hk_core::registry::{
    ArgSpec, BenchSizes, Case, Described, DeviceCall, HostCall, HostTensorF64, Operator, Sample, Scalar,
    ScalarSpec, Tolerance, Traffic,
};
use hk_core::{DType, Stream, with_float};

macro_rules! case {
    ($dtype:ident $y:literal $($n:literal)+) => {
        Case {
            label: concat!($($n, " ",)+ stringify!($dtype), " to ", $y),
            tensors: &[("x", DType::$dtype, &[$($n),+])],
            scalars: &[("y_dtype", Scalar::Choice($y))],
        }
    };
}

/// An operator of one tensor.
macro_rules! operator {
    ($const:ident, $name:ident, $summary:literal) => {
        pub(crate) const $const: Operator = Operator {
            name: stringify!($name),
            family: "hk-activation",
            summary: $summary,
            args: &[X, Y],
            scalars: SCALARS,
            kernels: &[&kernels::UNARY],
            cases: CASES,
            bench: BenchSizes::rows(&[[4096, 14_336], [40_960, 8192]], &["x"], &[]),
            corners: CORNERS,
            outputs: y_as_x,
            run: |stream: &Stream, call: &mut DeviceCall| {
                let (inputs, mut outputs) = call.split();
                let f32_out = y_dtype(&inputs)? == DType::F32;
                with_float!(stringify!($name), "x", inputs.get("x")?.dtype(), T => {
                    if f32_out {
                        crate::$name(stream, inputs.view::<T>("x")?, outputs.take::<f32>("y")?)
                    } else {
                        crate::$name(stream, inputs.view::<T>("x")?, outputs.take::<T>("y")?)
                    }
                })
            },
            reference: |call: &HostCall| {
                let x = call.get("x")?;
                let values = x.to_f64().into_iter().map(reference::$name).collect();
                Ok(vec![("y", HostTensorF64::new(x.shape(), values))])
            },
            traffic: Traffic::once,
        };
    };
}

operator!(SILU, silu, "y = x / (1 + exp(-x))");
operator!(GELU, gelu, "y = x * (1 + erf(x / sqrt(2))) / 2");
operator!(GELU_TANH, gelu_tanh, "y = x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2");
operator!(RELU, relu, "y = max(x, 0)");
operator!(TANH, tanh, "y = tanh(x)");

const X: ArgSpec =
    ArgSpec::input("x", FLOATS, 2, "any").ranks(1, 5).sampled(Sample::Normal { mean: 0.0, deviation: 3.0 });
const Y: ArgSpec = ArgSpec::output("y", Tolerance::Elementwise, FLOATS, 2, "as x").ranks(1, 5);

const SCALARS: &[ScalarSpec] = &[Y_DTYPE_OR_F32];

const CASES: &[Case] = &[
    Case { label: "Llama-3 8B, 64 tokens", tensors: &[("x", DType::Bf16, &[64, 14336])], scalars: &[] },
    Case { label: "GPT-OSS, 256 tokens", tensors: &[("x", DType::Bf16, &[256, 2880])], scalars: &[] },
];

/// Small sizes; each entry point with enough elements that waves loop on one compute unit, where possible. Tensors of less than a
/// vector take the scalar path.
const CORNERS: &[Case] = &[
    case!(Bf16 "as_x" 40 1024),
    case!(F16 "as_x" 40 1024),
    case!(F32 "as_x" 20 1024),
    case!(Bf16 "f32" 3 1001),
    case!(F16 "f32" 3 1001),
    case!(Bf16 "as_x" 9),
    case!(F16 "as_x" 5 2 1 1 13),
    case!(F32 "f32" 1025),
    case!(Bf16 "as_x" 7),
    case!(Bf16 "f32" 1),
    case!(F16 "f32" 7),
    case!(F32 "as_x" 3),
];

/// The activations in f64.
pub mod reference {
    use std::f64::consts::{FRAC_1_SQRT_2, PI};

    /// `x / (1 + exp(-x))`.
    pub fn silu(x: f64) -> f64 {
        x / (1.0 + (-x).exp())
    }

    /// `x * erfc(-x / sqrt(2)) / 2`.
    pub fn gelu(x: f64) -> f64 {
        x * (0.5 * libm::erfc(-x * FRAC_1_SQRT_2))
    }

    /// `x * (1 + tanh(u)) / 2` with `u = sqrt(2 / pi) * (x + 0.044715 * x^3)`, without its cancellation.
    pub fn gelu_tanh(x: f64) -> f64 {
        let u = (2.0 / PI).sqrt() * (x + 0.044715 * x * x * x);
        x / (1.0 + (-2.0 * u).exp())
    }

    /// `max(x, 0)`, NaN of NaN.
    pub fn relu(x: f64) -> f64 {
        if x < 0.0 { 0.0 } else { x }
    }

    /// `tanh(x)`.
    pub fn tanh(x: f64) -> f64 {
        x.tanh()
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_activation_has_a_row() {
        for name in crate::unary::NAMES {
            assert!(super::super::OPERATORS.iter().any(|op| op.name == *name), "no row for {name}");
        }
    }
}
