//! The functions of `hk/math.h` against f64: the error bounds that the header states.
#![cfg(feature = "emu")]

use crate::common::{self, Params};
use hk_core::{Arch, CodeObjects, Device, KernelRef, LaunchConfig, Stream, f16};
use std::sync::LazyLock;

static MATH: LazyLock<&'static CodeObjects> = LazyLock::new(|| common::compile("math"));

/// A function: its kernel, the same in f64, and how far it may be off in ulp where special functions are rounded correctly.
struct Function {
    kernel: &'static str,
    exact: fn(f64) -> f64,
    ulps: f64,
    /// Subnormal arguments and results are zero.
    flushes: bool,
}

const fn function(kernel: &'static str, exact: fn(f64) -> f64, ulps: f64) -> Function {
    Function { kernel, exact, ulps, flushes: false }
}

const FUNCTIONS: [Function; 13] = [
    Function { flushes: true, ..function("exp2_fast", f64::exp2, 0.501) },
    Function { flushes: true, ..function("log2_fast", f64::log2, 0.501) },
    Function { flushes: true, ..function("rcp_fast", f64::recip, 0.501) },
    function("exp2", f64::exp2, 0.75),
    function("exp", f64::exp, 3.5),
    function("log2", f64::log2, 0.75),
    function("log", f64::ln, 2.0),
    function("sigmoid", |x| 1.0 / (1.0 + (-x).exp()), 4.5),
    function("tanh", f64::tanh, 2.0),
    function("erf", libm::erf, 2.0),
    function("erfc", libm::erfc, 7.5),
    function("normal_cdf", |x| 0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2), 7.5),
    function("rsqrt", |x| 1.0 / x.sqrt(), 1.0),
];

fn streams() -> impl Iterator<Item = Stream> {
    Arch::AMD.iter().map(|a| Device::open(&format!("emu:{a}")).unwrap().create_stream().unwrap())
}

/// What the kernel makes of `x`.
fn run(stream: &Stream, kernel: &str, x: &[f32], results: usize) -> Vec<f32> {
    let kernel = stream.kernel(KernelRef::new(*MATH, common::leak(kernel.to_owned()))).unwrap();
    let x_buffer = stream.upload(x).unwrap();
    let mut y = stream.alloc_zeroed::<f32>(results).unwrap();
    let mut launch = stream.launch("math");
    let params = Params {
        x: launch.input("x", &x_buffer.view([x.len()]).unwrap()).unwrap(),
        y: launch.output("y", &mut y.view_mut([results]).unwrap()).unwrap(),
        a: 0.0,
        pad: 0,
    };
    // SAFETY: the parameters are the kernel's, which reads and writes as many elements as `y` has.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(64), &params) }.unwrap();
    stream.download(&y).unwrap()
}

/// All bf16 and f16, and f32 of every exponent: `HK_FULL=1` takes many more of these.
fn arguments() -> Vec<f32> {
    let step = if std::env::var_os("HK_FULL").is_some() { 509 } else { 8191 };
    let bf16 = (0..=u16::MAX).map(|b| f32::from_bits(u32::from(b) << 16));
    let f16 = (0..=u16::MAX).map(|b| f16::from_bits(b).to_f32());
    let sweep = (0..=u32::MAX).step_by(step).map(f32::from_bits);
    // Where the functions are of ordinary size.
    let near = (-120_000..=120_000).map(|i| i as f32 * 1e-3);
    bf16.chain(f16).chain(sweep).chain(near).collect()
}

/// Distance in units of the last place of an f32 of the size of `want`.
fn ulps(got: f32, want: f64) -> f64 {
    if (got.is_nan() && want.is_nan()) || f64::from(got) == want {
        return 0.0;
    }
    // Beyond the largest f32, infinity is right, or next to right.
    let past_end = 2f64.powi(128);
    let (value, want) = match got {
        f32::INFINITY | f32::NEG_INFINITY => (past_end.copysign(got.into()), want.clamp(-past_end, past_end)),
        _ => (f64::from(got), want),
    };
    let exponent = (want.abs().to_bits() >> 52) as i32 - 1023;
    (value - want).abs() / 2f64.powi(exponent.clamp(-126, 127) - 23)
}

#[test]
fn errors_are_within_their_bounds() {
    let arguments = arguments();
    for f in &FUNCTIONS {
        let subnormal = |v: f64| v != 0.0 && v.abs() < 2f64.powi(-126);
        let exact: Vec<f64> = arguments.iter().map(|&x| (f.exact)(x.into())).collect();
        for stream in streams() {
            let mut worst = (0.0, 0.0, 0.0, 0.0);
            for (i, got) in run(&stream, f.kernel, &arguments, arguments.len()).into_iter().enumerate() {
                let (x, want) = (arguments[i], exact[i]);
                if f.flushes && (subnormal(x.into()) || subnormal(want)) {
                    continue;
                }
                let error = ulps(got, want);
                assert!(
                    !error.is_nan(),
                    "{}({x:e}) on {}: {got:e}, not {want:e}",
                    f.kernel,
                    stream.device().spec()
                );
                if error > worst.0 {
                    worst = (error, x, got, want as f32);
                }
            }
            let (error, x, got, want) = worst;
            println!("{} on {}: {error:.3} ulp at {x:e}", f.kernel, stream.device().spec());
            assert!(error <= f.ulps, "{}({x:e}) = {got:e}, not {want:e}: {error:.2} ulp", f.kernel);
        }
    }
}

/// Vector functions are bitwise identical to scalar ones.
#[test]
fn vector_functions_are_bitwise_identical_to_scalar_ones() {
    let arguments: Vec<f32> = arguments().into_iter().step_by(7).collect();
    for f in FUNCTIONS.iter().filter(|f| f.kernel != "rsqrt") {
        for stream in streams() {
            let floats = run(&stream, f.kernel, &arguments, arguments.len());
            let vectors = run(&stream, &format!("{}_pair", f.kernel), &arguments, arguments.len());
            let differ = |(a, b): &(&f32, &f32)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan());
            assert_eq!(floats.iter().zip(&vectors).find(differ), None, "{}", f.kernel);
        }
    }
}

#[test]
fn values_that_are_exact() {
    const INF: f32 = f32::INFINITY;
    let cases: [(&str, f32, f32); 32] = [
        ("exp2", 3.0, 8.0),
        ("exp2", -149.0, 1e-45),
        ("exp2", 127.0, 1.7014118e38),
        ("exp2", 128.0, INF),
        ("exp2", -INF, 0.0),
        ("exp", 0.0, 1.0),
        ("exp", -0.0, 1.0),
        ("exp", INF, INF),
        ("exp", -INF, 0.0),
        ("exp", f32::MAX, INF),
        ("exp", f32::MIN, 0.0),
        ("exp", 1e-45, 1.0),
        ("log2", 1e-45, -149.0),
        ("log2", 8.0, 3.0),
        ("log", 1.0, 0.0),
        ("log", 0.0, -INF),
        ("log", -0.0, -INF),
        ("log", INF, INF),
        ("sigmoid", 0.0, 0.5),
        ("sigmoid", INF, 1.0),
        ("sigmoid", -INF, 0.0),
        ("tanh", INF, 1.0),
        ("tanh", -INF, -1.0),
        ("tanh", 1e-45, 1e-45),
        ("tanh", -0.0, -0.0),
        ("erf", INF, 1.0),
        ("erf", -INF, -1.0),
        ("erf", -0.0, -0.0),
        ("erfc", INF, 0.0),
        ("erfc", -INF, 2.0),
        ("normal_cdf", INF, 1.0),
        ("normal_cdf", -INF, 0.0),
    ];
    for stream in streams() {
        for (kernel, x, want) in cases {
            assert_eq!(run(&stream, kernel, &[x], 1)[0].to_bits(), want.to_bits(), "{kernel}({x:e})");
        }
        for kernel in ["log", "log2", "rsqrt"] {
            assert!(run(&stream, kernel, &[-1e-45], 1)[0].is_nan(), "{kernel}");
        }
    }
}

#[test]
fn odd_functions_are_odd() {
    let positive: Vec<f32> = (0..0x7f80_0000u32).step_by(40_009).map(f32::from_bits).collect();
    let negative: Vec<f32> = positive.iter().map(|x| -x).collect();
    for stream in streams() {
        for kernel in ["tanh", "erf"] {
            let y = run(&stream, kernel, &positive, positive.len());
            let mirrored = run(&stream, kernel, &negative, negative.len());
            assert!(y.iter().zip(&mirrored).all(|(a, b)| a.to_bits() == (-b).to_bits()), "{kernel}");
        }
    }
}

#[test]
fn division_is_rounded_correctly() {
    // Pairs of bit patterns by two steps without a common period, and quotients at both ends of the range.
    let pairs = (0..400_000u32)
        .flat_map(|i| [i.wrapping_mul(2_654_435_761), i.wrapping_mul(40_503).wrapping_mul(2_246_822_519)]);
    let ends =
        [(1.0, 3e38), (1e-45, 3.0), (3e38, 0.7), (1e-38, 1e7), (0.0, 0.0), (1.0, 0.0), (f32::INFINITY, 2.0)];
    let x: Vec<f32> = pairs.map(f32::from_bits).chain(ends.into_iter().flat_map(|(a, b)| [a, b])).collect();
    for stream in streams() {
        let quotients = run(&stream, "divide", &x, x.len() / 2);
        for (pair, got) in x.chunks(2).zip(quotients) {
            let want = pair[0] / pair[1];
            let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
            assert!(same, "{:e} / {:e}: {got:e}, not {want:e}", pair[0], pair[1]);
        }
    }
}
