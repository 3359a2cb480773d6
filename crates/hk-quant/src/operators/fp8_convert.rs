//! `fp8_ocp_to_fnuz` and `fp8_fnuz_to_ocp`.

use crate::{kernels, reference};
use hk_core::DType;
use hk_core::Result;
use hk_core::registry::{
    ArgSpec, BenchSizes, CallSpec, Case, HostCall, HostTensorF64, Named, Operator, Sample, TensorSpec,
    Tolerance, Traffic,
};

const SCALE: ArgSpec = ArgSpec::input("scale", &[DType::F32], 1, "any")
    .ranks(1, 4)
    .sampled(Sample::Uniform { low: 0.001, high: 0.1 });
const SCALE_OUT: ArgSpec =
    ArgSpec::output("scale_out", Tolerance::Exact, &[DType::F32], 1, "shape of scale").ranks(1, 4);
const WIDE: Sample = Sample::Normal { mean: 0.0, deviation: 200.0 };

const fn q(dtypes: &'static [DType]) -> ArgSpec {
    ArgSpec::input("q", dtypes, 2, "[.., cols]").ranks(1, 5).sampled(WIDE)
}

const fn out(dtypes: &'static [DType]) -> ArgSpec {
    ArgSpec::output("out", Tolerance::Exact, dtypes, 2, "shape of q").ranks(1, 5)
}

macro_rules! cases {
    ($dtype:ident: $($label:literal $shape:expr, $scales:expr);+) => {
        &[$(Case {
            label: $label,
            tensors: &[("q", DType::$dtype, &$shape), ("scale", DType::F32, &$scales)],
            scalars: &[],
        }),+]
    };
}

pub(crate) const FP8_OCP_TO_FNUZ: Operator = Operator {
    name: "fp8_ocp_to_fnuz",
    family: "hk-quant",
    summary: "the same bytes with twice the scale; -0 and NaN become FNUZ's",
    args: &[q(&[DType::Fp8E4M3]), SCALE, out(&[DType::Fp8E4M3Fnuz]), SCALE_OUT],
    scalars: &[],
    kernels: &[&kernels::FP8_CONVERT],
    cases: cases!(Fp8E4M3: "DeepSeek-V3 q_b, 128 x 128 blocks" [1536, 1536], [12, 12]),
    bench: BenchSizes::Cases(&[Case {
        label: "32768 x 16384, 128 x 128 blocks",
        tensors: &[("q", DType::Fp8E4M3, &[32_768, 16_384]), ("scale", DType::F32, &[256, 128])],
        scalars: &[],
    }]),
    corners: cases!(Fp8E4M3: "rows of 2048" [40, 2048], [40, 16]; "rows of 101" [70, 101], [300]; "many, zeros of both signs among them" [300, 2048], [40]),
    outputs: |call| outputs(call, DType::Fp8E4M3Fnuz),
    run: |stream, call| {
        let (inputs, mut outputs) = call.split();
        let (out, scale_out) = (outputs.take("out")?, outputs.take("scale_out")?);
        crate::fp8_ocp_to_fnuz(stream, inputs.view("q")?, inputs.view("scale")?, out, scale_out)
    },
    reference: |call| reference(call, 0.5, 240.0),
    traffic: Traffic::once,
};

pub(crate) const FP8_FNUZ_TO_OCP: Operator = Operator {
    name: "fp8_fnuz_to_ocp",
    family: "hk-quant",
    summary: "the same bytes with half the scale; NaN becomes the OCP's, 240 saturates",
    args: &[q(&[DType::Fp8E4M3Fnuz]), SCALE, out(&[DType::Fp8E4M3]), SCALE_OUT],
    cases: cases!(Fp8E4M3Fnuz: "DeepSeek-V3 q_b, 128 x 128 blocks" [1536, 1536], [12, 12]),
    bench: BenchSizes::Cases(&[Case {
        label: "32768 x 16384, 128 x 128 blocks",
        tensors: &[("q", DType::Fp8E4M3Fnuz, &[32_768, 16_384]), ("scale", DType::F32, &[256, 128])],
        scalars: &[],
    }]),
    corners: cases!(Fp8E4M3Fnuz: "rows of 2048" [40, 2048], [40, 16]; "rows of 101" [70, 101], [300]),
    outputs: |call| outputs(call, DType::Fp8E4M3),
    run: |stream, call| {
        let (inputs, mut outputs) = call.split();
        let (out, scale_out) = (outputs.take("out")?, outputs.take("scale_out")?);
        crate::fp8_fnuz_to_ocp(stream, inputs.view("q")?, inputs.view("scale")?, out, scale_out)
    },
    reference: |call| reference(call, 2.0, 448.0),
    ..FP8_OCP_TO_FNUZ
};

fn outputs(call: &CallSpec, dtype: DType) -> Result<Named<TensorSpec>> {
    let (q, scale) = (call.get("q")?, call.get("scale")?);
    Ok(vec![("out", TensorSpec::new(dtype, q.shape.clone())), ("scale_out", scale.clone())])
}

fn reference(call: &HostCall, factor: f64, largest: f64) -> Result<Named<HostTensorF64>> {
    use hk_core::registry::Described;
    let (q, scale) = (call.get("q")?, call.get("scale")?);
    let (values, scales) = reference::fp8_convert(&q.to_f64(), &scale.to_f64(), factor, largest);
    Ok(vec![
        ("out", HostTensorF64::new(q.shape(), values)),
        ("scale_out", HostTensorF64::new(scale.shape(), scales)),
    ])
}
