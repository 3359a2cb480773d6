//! An operator described as data: its call is checked, made up from a case, run and compared.
#![cfg(feature = "emu")]

use crate::common::{self, Params};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, DeviceCall, DynTensor, HostCall, HostTensor, HostTensorF64,
    Named, Operator, POISON, Role, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{
    Arch, CodeObjects, DType, Device, E8M0, Error, Fp4x2, KernelRef, LaunchConfig, Result, Stream, bf16,
};
use std::sync::LazyLock;

static PROBE: LazyLock<&'static CodeObjects> = LazyLock::new(|| common::compile("probe"));

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    Ok(vec![("y", call.get("x")?.clone())])
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let (x, mut y) = (inputs.view::<f32>("x")?, outputs.take::<f32>("y")?);
    let kernel = stream.kernel(KernelRef::new(*PROBE, "scale"))?;
    let mut launch = stream.launch("scale");
    let a = inputs.float("a")? as f32;
    let params = Params { x: launch.input("x", &x)?, y: launch.output("y", &mut y)?, a, pad: 0 };
    // SAFETY: the kernel reads as many elements of x as y has, and x has as many.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(x.numel().div_ceil(64)), &params) }
}

fn reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let (x, a) = (call.get("x")?, call.float("a")?);
    let values = x.to_f64().into_iter().map(|x| a * x).collect();
    Ok(vec![("y", HostTensorF64::new(call.spec().get("x")?.shape.clone(), values))])
}

fn traffic(call: &HostCall) -> Traffic {
    let bytes = call.optional("x").map_or(0, |x| x.bytes().len() as u64);
    Traffic { read: bytes, written: bytes }
}

const ARG: ArgSpec = ArgSpec {
    name: "x",
    role: Role::In,
    optional: false,
    dtypes: &[DType::F32, DType::Bf16],
    rank: (1, 2),
    shape: "[n]",
    sample: Sample::Normal { mean: 0.0, deviation: 1.0 },
};

const SCALE_OPERATOR: Operator = Operator {
    name: "scale",
    family: "hk-core",
    summary: "y = a x",
    args: &[
        ARG,
        ArgSpec { name: "w", optional: true, ..ARG },
        ArgSpec { name: "y", role: Role::Out(Tolerance::Exact), ..ARG },
        ArgSpec { name: "extra", role: Role::Out(Tolerance::Exact), optional: true, ..ARG },
    ],
    scalars: &[
        ScalarSpec { name: "a", default: Scalar::Float(2.0), choices: &[], summary: "factor" },
        ScalarSpec { name: "n", default: Scalar::Int(1), choices: &[], summary: "a number" },
        ScalarSpec { name: "seed", default: Scalar::Count(3), choices: &[], summary: "a count" },
        ScalarSpec { name: "fast", default: Scalar::Bool(false), choices: &[], summary: "a switch" },
        ScalarSpec {
            name: "mode",
            default: Scalar::Choice("up"),
            choices: &["up", "down"],
            summary: "a mode",
        },
    ],
    kernels: &[],
    cases: &[Case {
        label: "a row",
        tensors: &[("x", DType::F32, &[200]), ("extra", DType::F32, &[1])],
        scalars: &[("a", Scalar::Float(0.5))],
    }],
    bench: BenchSizes::Several(&[]),
    corners: &[],
    outputs,
    run,
    reference,
    traffic,
};

static SCALE: Operator = SCALE_OPERATOR;

fn message<T: std::fmt::Debug>(result: Result<T>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn a_case_runs_and_agrees_with_the_reference() {
    for arch in Arch::AMD {
        let stream = Device::open(&format!("emu:{arch}")).unwrap().create_stream().unwrap();
        let call = SCALE.example(&SCALE.cases[0], 1).unwrap();
        assert!(call.wants("extra") && !call.wants("y"));
        let got = SCALE.execute(&stream, &call).unwrap();
        let want = (SCALE.reference)(&call).unwrap();
        assert_eq!(got.len(), 1);
        assert_eq!((got[0].0, got[0].1.to_f64()), (want[0].0, want[0].1.values.clone()));
        assert_eq!((SCALE.traffic)(&call), Traffic { read: 800, written: 800 });
    }
}

#[test]
fn inputs_are_checked_when_given() {
    let mut call = HostCall::new(&SCALE);
    assert_eq!(message(call.check_complete()), "scale: x: no tensor, expected a tensor");
    let f32s = HostTensor::new([4], &[1f32; 4]).unwrap();
    assert_eq!(message(call.set("z", f32s.clone())), "scale: input: `z`, expected one of x, w");
    assert_eq!(message(call.set("y", f32s.clone())), "scale: input: `y`, expected one of x, w");
    let i32s = HostTensor::new([4], &[1i32; 4]).unwrap();
    assert_eq!(message(call.set("x", i32s)), "scale: x: dtype i32, expected f32, bf16");
    let deep = HostTensor::new([1, 2, 2], &[1f32; 4]).unwrap();
    assert_eq!(message(call.set("x", deep)), "scale: x: shape [1, 2, 2], expected 1 to 2 axes: [n]");
    call.set("x", f32s).unwrap();
    assert_eq!(call.check_complete(), Ok(()));
    assert_eq!(message(call.want("y")), "scale: output: `y`, expected an optional output of the operator");
    // Types that the operator lists and this implementation does not have show when it asks for them.
    let stream = Device::open("emu:gfx942").unwrap().create_stream().unwrap();
    call.set("x", HostTensor::new([4], &[bf16::ONE; 4]).unwrap()).unwrap();
    assert_eq!(message(SCALE.execute(&stream, &call)), "scale: x: dtype bf16, expected f32");
}

/// A tensor that is too large, or has too many axes, is named by operator and argument.
#[test]
fn layout_errors_name_the_argument() {
    fn huge(_: &CallSpec) -> Result<Named<TensorSpec>> {
        Ok(vec![("y", TensorSpec::new(DType::F32, [4, 1 << 61]))])
    }
    fn deep(_: &CallSpec) -> Result<Named<TensorSpec>> {
        Ok(vec![("y", TensorSpec::new(DType::F32, [1; 6]))])
    }
    fn long_workspace(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
        call.split().1.workspace::<f32>(stream, usize::MAX).map(drop)
    }
    static HUGE: Operator = Operator { outputs: huge, ..SCALE_OPERATOR };
    static DEEP: Operator = Operator { outputs: deep, ..SCALE_OPERATOR };
    static LONG: Operator = Operator { run: long_workspace, ..SCALE_OPERATOR };
    let stream = Device::open("emu:gfx942").unwrap().create_stream().unwrap();
    let execute = |operator: &'static Operator| {
        message(operator.execute(&stream, &operator.example(&operator.cases[0], 1).unwrap()))
    };
    let huge = execute(&HUGE);
    assert!(huge.starts_with("scale: y: shape [4, 2305843009213693952]"), "{huge}");
    let deep = execute(&DEEP);
    assert!(deep.starts_with("scale: y: shape [1, 1, 1, 1, 1, 1]"), "{deep}");
    let long = execute(&LONG);
    assert!(long.starts_with("scale: workspace: "), "{long}");
    let mut spec: CallSpec = Call::new(&SCALE);
    spec.set("x", TensorSpec::new(DType::F32, [4, 1 << 61])).unwrap();
    let sampled = message(spec.sample(1));
    assert!(sampled.starts_with("scale: x: shape [4, 2305843009213693952]"), "{sampled}");
}

#[test]
fn scalars_come_as_text_or_values() {
    let mut call = HostCall::new(&SCALE);
    assert_eq!((call.float("a"), call.int("n"), call.bool("fast")), (Ok(2.0), Ok(1), Ok(false)));
    for (name, text, value) in [
        ("a", "1e-5", Scalar::Float(1e-5)),
        ("n", "-3", Scalar::Int(-3)),
        ("fast", "true", Scalar::Bool(true)),
        ("mode", "down", Scalar::Choice("down")),
    ] {
        call.parse_scalar(name, text).unwrap();
        assert_eq!(call.scalar(name), Ok(value));
        call.parse_scalar(name, &call.scalar(name).unwrap().to_string()).unwrap();
        assert_eq!(call.scalar(name), Ok(value));
    }
    assert_eq!(call.choice("mode"), Ok("down"));
    assert_eq!(message(call.parse_scalar("a", "x")), "scale: a: `x`, expected a real number");
    assert_eq!(message(call.parse_scalar("n", "1.5")), "scale: n: `1.5`, expected an integer");
    assert_eq!(message(call.parse_scalar("fast", "1")), "scale: fast: `1`, expected true or false");
    assert_eq!(message(call.parse_scalar("mode", "left")), "scale: mode: `left`, expected one of up, down");
    assert_eq!(message(call.set_scalar("a", Scalar::Int(1))), "scale: a: 1, expected a real number");
    assert!(call.set_scalar("mode", Scalar::Choice("left")).is_err());
    let unknown = "scale: scalar: `b`, expected one of a, n, seed, fast, mode";
    assert_eq!(message(call.parse_scalar("b", "1")), unknown);
    assert_eq!(message(call.float("b")), unknown);
    assert!(call.float("n").is_err() && call.int("a").is_err() && call.bool("a").is_err());
}

#[test]
fn counts_are_not_negative_and_reach_all_of_64_bits() {
    let mut call = HostCall::new(&SCALE);
    assert_eq!((call.count("seed"), call.int("seed"), call.size("seed")), (Ok(3), Ok(3), Ok(3)));
    let negative = "scale: seed: `-1`, expected an integer, 0 or more";
    assert_eq!(message(call.parse_scalar("seed", "-1")), negative);
    assert_eq!(
        message(call.set_scalar("seed", Scalar::Int(-1))),
        "scale: seed: -1, expected an integer, 0 or more"
    );
    // An integer that is not negative is a count.
    call.set_scalar("seed", Scalar::Int(1 << 32)).unwrap();
    assert_eq!(call.count("seed"), Ok(1 << 32));
    assert_eq!(message(call.size("seed")), "scale: seed: 4294967296, expected a size, less than 2^32");
    call.parse_scalar("seed", "18446744073709551615").unwrap();
    assert_eq!(call.count("seed"), Ok(u64::MAX));
    assert_eq!(message(call.int("seed")), "scale: seed: 18446744073709551615, expected less than 2^63");
    assert!(call.count("n").is_err() && call.count("b").is_err());
}

static NOTHING: Operator =
    Operator { name: "nothing", args: &[], scalars: &[], cases: &[], ..SCALE_OPERATOR };

#[test]
fn messages_say_what_there_is() {
    let mut call = HostCall::new(&NOTHING);
    assert_eq!(
        message(call.parse_scalar("a", "1")),
        "nothing: scalar: `a`, expected none: the operator has no parameters"
    );
    let x = HostTensor::new([4], &[1f32; 4]).unwrap();
    assert_eq!(message(call.set("x", x)), "nothing: input: `x`, expected none: the operator has no inputs");
}

#[test]
fn outputs_begin_as_the_fill() {
    let stream = Device::open("emu:gfx942").unwrap().create_stream().unwrap();
    let mut call = HostCall::new(&SCALE);
    call.set("x", HostTensor::new([4], &[1f32; 4]).unwrap()).unwrap();
    for fill in [POISON, 0x11] {
        let device_call = DeviceCall::prepare_filled(&stream, &call, fill).unwrap();
        let (_, y) = device_call.outputs().next().unwrap();
        assert_eq!(y.download(&stream).unwrap().bytes(), [fill; 16]);
        let y = SCALE.execute_filled(&stream, &call, fill).unwrap().remove(0).1;
        assert_eq!(y.to_f64(), [2.0; 4]);
    }
    assert!(HostTensorF64::is_untouched(HostTensorF64::UNTOUCHED) && HostTensorF64::UNTOUCHED.is_nan());
    assert!(!HostTensorF64::is_untouched(f64::NAN));
}

#[test]
fn a_device_call_hands_out_each_output_once() {
    let stream = Device::open("emu:gfx942").unwrap().create_stream().unwrap();
    let mut call = HostCall::new(&SCALE);
    call.set("x", HostTensor::new([4], &[1f32; 4]).unwrap()).unwrap();
    let mut device_call = DeviceCall::prepare(&stream, &call).unwrap();
    let (inputs, mut outputs) = device_call.split();
    assert_eq!(inputs.optional_view::<f32>("w").map(|w| w.is_none()), Ok(true));
    assert!(outputs.take::<f32>("y").is_ok());
    assert_eq!(message(outputs.take::<f32>("y")), "scale: y: no tensor, expected an output, taken once");
    assert_eq!(outputs.take_optional::<f32>("extra").map(|e| e.is_none()), Ok(true));
    // What nobody has written is NaN.
    let (_, y) = device_call.outputs().next().unwrap();
    assert!(y.download(&stream).unwrap().to_f64().iter().all(|y| y.is_nan()));
}

#[test]
fn host_tensors_hold_what_their_shape_says() {
    assert_eq!(
        message(HostTensor::new([2, 3], &[1f32; 5])),
        "HostTensor: bytes: shape [20], expected 24, for shape [2, 3] of f32"
    );
    let t = HostTensor::new([2, 2], &[bf16::ONE, bf16::PI, bf16::NEG_ONE, bf16::ZERO]).unwrap();
    assert_eq!(t.to_f64(), [1.0, 3.140625, -1.0, 0.0]);
    assert_eq!(t.elements::<bf16>().unwrap()[1], bf16::PI);
    assert!(matches!(t.elements::<f32>(), Err(Error::DType { .. })));
    assert_eq!(HostTensor::new([1], &[Fp4x2(0xf1)]).unwrap().to_f64(), [0.5, -6.0]);
    assert_eq!(HostTensor::new([1], &[E8M0(130)]).unwrap().to_f64(), [8.0]);
    assert_eq!(HostTensor::new([2], &[i64::MIN, -1]).unwrap().to_f64(), [-(2f64.powi(63)), -1.0]);
    let huge = TensorSpec::new(DType::F32, [1usize << 62]);
    assert!(matches!(huge.bytes(), Err(Error::TooLarge { .. })));
    let stream = Device::open("emu:gfx950").unwrap().create_stream().unwrap();
    let on_device = DynTensor::upload(&stream, &t).unwrap();
    assert_eq!(on_device.download(&stream).unwrap(), t);
    let empty = HostTensor::new::<f32>([0, 7], &[]).unwrap();
    assert_eq!(DynTensor::upload(&stream, &empty).unwrap().download(&stream).unwrap(), empty);
}

#[test]
fn samples_follow_their_distribution_and_their_seed() {
    let sample =
        |dtype, sample, seed| HostTensor::sample(TensorSpec::new(dtype, [10_000]), sample, seed).unwrap();
    let normal = Sample::Normal { mean: 3.0, deviation: 2.0 };
    let values = sample(DType::F32, normal, 1).to_f64();
    let mean = values.iter().sum::<f64>() / 1e4;
    let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 1e4;
    // Five standard errors.
    assert!((mean - 3.0).abs() < 0.1 && (variance - 4.0).abs() < 0.3, "{mean} {variance}");
    assert_eq!(sample(DType::F32, normal, 1).to_f64(), values);
    assert_ne!(sample(DType::F32, normal, 2).to_f64(), values);

    let uniform = sample(DType::Bf16, Sample::Uniform { low: -1.0, high: 2.0 }, 1).to_f64();
    assert!(uniform.iter().all(|x| (-1.0..=2.0).contains(x)));
    assert!(uniform.iter().any(|x| *x < -0.9) && uniform.iter().any(|x| *x > 1.9));
    let integers = sample(DType::I32, Sample::Integers { low: -2, high: 3 }, 1).to_f64();
    for want in -2..3 {
        assert!(integers.iter().filter(|x| **x == f64::from(want)).count() > 1500);
    }
    for dtype in DType::ALL {
        let values = sample(dtype, Sample::Uniform { low: 1.0, high: 4.0 }, 1).to_f64();
        assert!(values.iter().all(|x| (1.0..=4.0).contains(x)), "{dtype}");
    }
}

/// Starts and lengths that fit other inputs of the call, and tensors of one row and page where there is no call.
#[test]
fn samples_follow_other_inputs() {
    const LENGTHS: Sample = Sample::LengthsIn { table: "table", page: 16 };
    static RAGGED: Operator = Operator {
        args: &[
            ARG,
            ArgSpec { name: "starts", sample: Sample::StartsOf("x"), ..ARG },
            ArgSpec { name: "table", ..ARG },
            ArgSpec { name: "lens", sample: LENGTHS, ..ARG },
            ArgSpec { name: "parts", sample: Sample::LengthsOf("x"), ..ARG },
        ],
        ..SCALE_OPERATOR
    };
    let mut call: Call<TensorSpec> = Call::new(&RAGGED);
    let shapes = [
        ("x", vec![100, 3]),
        ("starts", vec![4]),
        ("table", vec![3, 5]),
        ("lens", vec![1000]),
        ("parts", vec![4]),
    ];
    for (name, shape) in shapes {
        call.set(name, TensorSpec::new(DType::F32, shape)).unwrap();
    }
    let call = call.sample(1).unwrap();
    assert_eq!(call.get("starts").unwrap().to_f64(), [0.0, 33.0, 66.0, 100.0]);
    let lens = call.get("lens").unwrap().to_f64();
    assert!(lens.iter().all(|n| (40.0..=80.0).contains(n)) && lens.contains(&40.0) && lens.contains(&80.0));
    let parts = call.get("parts").unwrap().to_f64();
    assert!(
        parts.iter().sum::<f64>() == 100.0 && parts.iter().all(|n| (0.0..=50.0).contains(n)),
        "{parts:?}"
    );

    let alone = |sample| HostTensor::sample(TensorSpec::new(DType::F32, [3]), sample, 1).unwrap().to_f64();
    assert_eq!(alone(Sample::StartsOf("x")), [0.0, 0.0, 1.0]);
    assert_eq!(alone(Sample::LengthsOf("x")).iter().sum::<f64>(), 1.0);
    assert!(alone(LENGTHS).iter().all(|n| (8.0..=16.0).contains(n)));
}

/// Large tensors are made by repetition; their rows differ, and what depends on all of a tensor holds.
#[test]
fn large_samples_repeat_after_a_prime() {
    let normal = Sample::Normal { mean: 0.0, deviation: 1.0 };
    let large = HostTensor::sample(TensorSpec::new(DType::U8, [1 << 23]), normal, 1).unwrap();
    let small = HostTensor::sample(TensorSpec::new(DType::U8, [1 << 20]), normal, 1).unwrap();
    let (first, rest) = large.bytes().split_at(4_194_301);
    assert_eq!(&first[..1 << 20], small.bytes());
    assert_eq!(rest, &first.repeat(2)[..rest.len()]);
    let steps =
        HostTensor::sample(TensorSpec::new(DType::I32, [1 << 23]), Sample::Steps { step: 1 }, 1).unwrap();
    assert_eq!(steps.elements::<i32>().unwrap()[(1 << 23) - 1], (1 << 23) - 1);
}

#[test]
fn tolerances() {
    assert_eq!(Tolerance::Exact.bounds(DType::F32), (0.0, 0.0));
    assert_eq!(Tolerance::Reduction.bounds(DType::I8), (0.0, 0.0));
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let (elementwise, reduction) =
            (Tolerance::Elementwise.bounds(dtype), Tolerance::Reduction.bounds(dtype));
        assert!(elementwise.0 > 0.0 && elementwise.0 <= reduction.0 && elementwise.1 <= reduction.1);
    }
}

#[test]
fn a_call_remembers_its_operator() {
    let call: Call<TensorSpec> = Call::new(&SCALE);
    assert_eq!(call.operator().name, "scale");
    assert_eq!(SCALE.arg("y").map(|a| a.role), Some(Role::Out(Tolerance::Exact)));
    assert!(SCALE.arg("z").is_none());
}
