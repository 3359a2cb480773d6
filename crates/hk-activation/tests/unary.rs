//! The activations on the emulated GPUs (and real ones where there are some) against f64 and their laws.

use hk_activation::{ActivationOutput, gelu, gelu_tanh, reference, relu, silu, tanh};
use hk_core::{Float, Layout, Result, Stream, TensorView, TensorViewMut, bf16, f16};
use hk_testkit::{
    self as kit, Array, Fill, Gpu, Place, Refusals, Tensor, Tolerance, kind, proptest::prelude::*,
};

type Call<T, O> = fn(&Stream, TensorView<T>, TensorViewMut<O>) -> Result<()>;

/// Name, the function, the same in f64.
type Function<T, O> = (&'static str, Call<T, O>, fn(f64) -> f64);

fn functions<T: Float, O: ActivationOutput<T>>() -> [Function<T, O>; 5] {
    [
        ("silu", silu::<T, O>, reference::silu),
        ("gelu", gelu::<T, O>, reference::gelu),
        ("gelu_tanh", gelu_tanh::<T, O>, reference::gelu_tanh),
        ("relu", relu::<T, O>, reference::relu),
        ("tanh", tanh::<T, O>, reference::tanh),
    ]
}

/// The result at the given place; nothing else is written.
#[track_caller]
fn run<T: Float, O: Float>(gpu: &Gpu, f: Call<T, O>, x: &Tensor<T>, y: impl Into<Place>) -> Array<O> {
    let mut y = gpu.poisoned(y);
    f(gpu.stream(), x.view(), y.view_mut()).unwrap();
    gpu.assert_guards(&y);
    gpu.assert_untouched(x);
    gpu.download(&y)
}

/// All bit patterns of a 16-bit float type.
fn patterns<T: Float>() -> Vec<T> {
    (0..=u16::MAX).map(|bits| bytemuck::pod_read_unaligned(&bits.to_le_bytes()[..])).collect()
}

/// The reference.
fn want<T: Float>(f: fn(f64) -> f64, x: &[T]) -> Vec<f64> {
    x.iter().map(|x| f(x.to_f64())).collect()
}

fn every_pattern<T: Float, O: ActivationOutput<T>>(share: f64) {
    let x = patterns::<T>();
    for gpu in kit::devices() {
        let tensor = gpu.upload(&x, [x.len()]);
        for (name, f, exact) in functions::<T, O>() {
            let mut got = run(&gpu, f, &tensor, [x.len()]);
            got.label = format!("{name}: {}", got.label);
            let want = want(exact, &x);
            kit::assert_close(&got, &want, Tolerance::Elementwise);
            if share > 0.0 {
                kit::assert_rounded(&got, &want, share);
            }
        }
    }
}

#[test]
fn every_bf16() {
    every_pattern::<bf16, bf16>(0.99);
}

#[test]
fn every_f16() {
    every_pattern::<f16, f16>(0.99);
}

#[test]
fn every_bf16_to_f32() {
    every_pattern::<bf16, f32>(0.0);
}

#[test]
fn every_f16_to_f32() {
    every_pattern::<f16, f32>(0.0);
}

/// `+-2^e (1 + m / 16)`, every exponent.
fn sweep() -> Vec<f32> {
    let positive = (0..0x7f80_0000u32).step_by(1 << 19).map(f32::from_bits);
    positive.flat_map(|x| [x, -x]).chain(kit::special_values()).collect()
}

#[test]
fn f32_of_every_exponent() {
    let x = sweep();
    for gpu in kit::devices() {
        let tensor = gpu.upload(&x, [x.len()]);
        for (name, f, exact) in functions::<f32, f32>() {
            let got = run(&gpu, f, &tensor, [x.len()]);
            let want = want(exact, &x);
            kit::assert_close(&got, &want, Tolerance::Elementwise);
            // Relatively, however small, where there are normal numbers.
            for ((x, got), want) in x.iter().zip(got.iter()).zip(&want) {
                let relative = (f64::from(*got) - want).abs() / want.abs();
                let bound = match name {
                    "gelu_tanh" => continue, // u, which is rounded, is large there
                    _ => 4e-6,
                };
                let normal = want.abs() >= 2e-38 && want.is_finite();
                assert!(!normal || relative <= bound, "{name}({x:e}) = {got:e}, not {want:e}");
            }
        }
    }
}

/// What happens at infinities, NaN, zeros and beyond the range of exp.
#[test]
fn special_values() {
    const INF: f32 = f32::INFINITY;
    let x = [f32::NAN, INF, -INF, 0.0, -0.0, -100.0, -1e30, f32::MIN, f32::MAX, 1e-45, -1e-45];
    for gpu in kit::devices() {
        let tensor = gpu.upload(&x, [x.len()]);
        let [silu, gelu, gelu_tanh, relu, tanh, ..] =
            functions::<f32, f32>().map(|(_, f, _)| run(&gpu, f, &tensor, [x.len()]).data);
        for y in [&silu, &gelu, &gelu_tanh] {
            assert!(y[0].is_nan() && y[1] == INF && y[2].is_nan(), "{y:?}");
            assert!(
                y[3..5].iter().all(|v| *v == 0.0) && y[5].abs() < 1e-37 && y[6] == 0.0 && y[7] == 0.0,
                "{y:?}"
            );
            assert!(y[8] == f32::MAX && y[9].abs() <= 1e-45 && y[10].abs() <= 1e-45, "{y:?}");
        }
        assert!(relu[0].is_nan() && relu[1] == INF && relu[2] == 0.0 && relu[10] == 0.0, "{relu:?}");
        assert!(tanh[0].is_nan() && tanh[1] == 1.0 && tanh[2] == -1.0, "{tanh:?}");
        assert!(tanh[4].is_sign_negative() && tanh[9] == 1e-45 && tanh[10] == -1e-45, "{tanh:?}");
    }
}

/// Numbers of elements at the borders of vectors and tiles, aligned and not; a tail after the last vector.
#[test]
fn any_number_of_elements() {
    fn check<T: Float, O: ActivationOutput<T>>(seed: u64) {
        let all = Fill::Wide.elements::<T>(8200, seed);
        for n in [0, 1, 7, 8, 9, 63, 64, 65, 511, 513, 1023, 1025, 2047, 2049, 8195] {
            for gpu in kit::devices() {
                for shift in [0, 1] {
                    let x = gpu.upload(&all[..n], Place::contiguous([n]).shifted(shift));
                    let (_, f, exact) = functions::<T, O>()[n % 5];
                    let got = run(&gpu, f, &x, Place::contiguous([n]).shifted(shift));
                    kit::assert_close(&got, &want(exact, &all[..n]), Tolerance::Elementwise);
                }
            }
        }
    }
    check::<bf16, bf16>(1);
    check::<f16, f32>(2);
    check::<f32, f32>(3);
    check::<bf16, f32>(4);
    check::<f16, f16>(5);
}

/// Rows with gaps of any length, vectorized and scalar.
#[test]
fn rows_with_gaps() {
    fn check<T: Float, O: ActivationOutput<T>>() {
        let sizes = [
            (5, 130, 137),
            (3, 2880, 2888),
            (40, 8, 16),
            (300, 24, 32),
            (7, 2056, 2064),
            (1, 5, 9),
            (70, 1, 3),
        ];
        for (rows, cols, stride) in sizes {
            let x = Fill::Normal.elements::<T>(rows * cols, cols as u64);
            for gpu in kit::devices() {
                for (places, shift) in [([stride, cols], 0), ([stride, stride], 0), ([cols, stride], 1)] {
                    let [from, to] = places.map(|s| Place::rows([rows, cols], s).shifted(shift));
                    let (_, f, exact) = functions::<T, O>()[rows % 5];
                    let got = run(&gpu, f, &gpu.upload(&x, from), to);
                    kit::assert_close(&got, &want(exact, &x), Tolerance::Elementwise);
                }
            }
        }
    }
    check::<bf16, bf16>();
    check::<bf16, f32>();
    check::<f16, f16>();
    check::<f32, f32>();
}

/// Rows so far apart that a tile has no more than one.
#[test]
fn rows_far_apart() {
    for (rows, cols, stride) in [(3, 24, 1 << 23), (2, 2056, (1 << 23) + 8), (3, 5, (1 << 23) + 1)] {
        let x = Fill::Normal.elements::<bf16>(rows * cols, 7);
        let want = want(reference::silu, &x);
        for gpu in kit::devices() {
            let stream = gpu.stream();
            let mut wide = stream.alloc_zeroed::<bf16>((rows - 1) * stride + cols).unwrap();
            let layout = Layout::with_strides([rows, cols], [stride, 1]).unwrap();
            let near = gpu.upload(&x, [rows, cols]);
            silu(stream, near.view(), wide.view_mut_with(layout, 0).unwrap()).unwrap();
            let mut back = gpu.poisoned::<bf16>([rows, cols]);
            relu(stream, wide.view_with(layout, 0).unwrap(), back.view_mut()).unwrap();
            let positive: Vec<f64> = want.iter().map(|v| v.max(0.0)).collect();
            kit::assert_close(&gpu.download(&back), &positive, Tolerance::Elementwise);
        }
    }
}

#[test]
fn any_shape() {
    let x = Fill::Normal.elements::<f16>(24, 3);
    let exact = want(reference::silu, &x);
    for gpu in kit::devices() {
        for shape in [vec![24], vec![2, 12], vec![2, 1, 3, 1, 4], vec![1, 24, 1]] {
            let tensor = gpu.upload(&x, Place::contiguous(&shape));
            let got = run(&gpu, silu::<f16, f16>, &tensor, Place::contiguous(&shape));
            kit::assert_close(&got, &exact, Tolerance::Elementwise);
        }
        let scalar = gpu.upload(&x[..1], Place::contiguous([]));
        let got = run(&gpu, silu::<f16, f16>, &scalar, Place::contiguous([]));
        kit::assert_close(&got, &exact[..1], Tolerance::Elementwise);
        // One row, seen as many.
        let row = gpu.upload(&x, [1, 24]);
        let mut y = gpu.poisoned::<f16>([5, 24]);
        silu(gpu.stream(), row.view().broadcast([5, 24]).unwrap(), y.view_mut()).unwrap();
        kit::assert_close(&gpu.download(&y), &exact.repeat(5), Tolerance::Elementwise);
    }
}

/// More elements than the grid covers in one iteration, vectorized and scalar. (Without guards: the emulator finds an access
/// past a buffer.)
#[test]
fn waves_loop() {
    let n = if kit::full() { 4096 * 4096 + 3 } else { 400_003 };
    let period = 60_001;
    let x: Vec<bf16> = Fill::Normal.elements::<bf16>(period, 9).into_iter().cycle().take(n + 1).collect();
    let want = want(reference::tanh, &x[..period]);
    // Few CUs: few waves.
    for spec in ["emu:gfx942", "emu:gfx950"] {
        let gpu = Gpu::open(&format!("{spec}?cus=3"));
        for offset in [0, 1] {
            let buffer = gpu.stream().upload(&x).unwrap();
            let mut y = gpu.stream().alloc_zeroed::<bf16>(n + 1).unwrap();
            let layout = Layout::contiguous([n]).unwrap();
            tanh(
                gpu.stream(),
                buffer.view_with(layout, offset).unwrap(),
                y.view_mut_with(layout, offset).unwrap(),
            )
            .unwrap();
            let y = gpu.stream().download(&y).unwrap();
            let first = Array::new("the first elements", [period - offset], y[offset..period].to_vec());
            kit::assert_close(&first, &want[offset..], Tolerance::Elementwise);
            for (i, part) in y[offset..offset + n].chunks(period).enumerate().skip(1) {
                assert!(*part == y[offset..offset + part.len()], "elements from {} on differ", i * period);
            }
        }
    }
}

#[test]
fn in_place_is_out_of_place() {
    for gpu in kit::devices() {
        for place in [Place::contiguous([3, 40]), Place::rows([3, 40], 41), Place::rows([3, 40], 48)] {
            let data = Fill::Normal.elements::<bf16>(120, 4);
            for (_, f, _) in functions::<bf16, bf16>() {
                let mut x = gpu.upload(&data, &place);
                let want = run(&gpu, f, &x, &place);
                let y = x.view_mut();
                f(gpu.stream(), y.alias(), y).unwrap();
                kit::assert_bits(&gpu.download(&x), &want);
                gpu.assert_guards(&x);
            }
        }
    }
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn bf16_rows_match_reference(c in kit::row_case::<bf16>(1..=60, 1..=5000), which in 0usize..5) {
        for gpu in kit::devices() {
            let (_, f, exact) = functions::<bf16, f32>()[which];
            let got = run(&gpu, f, &gpu.upload(&c.x, c.place(0)), c.place(1));
            kit::assert_close(&got, &want(exact, &c.x), Tolerance::Elementwise);
        }
    }

    /// Elements are independent: a permuted input gives a permuted result.
    #[test]
    fn results_do_not_depend_on_position(c in kit::row_case::<f16>(1..=20, 1..=300), turn: usize, which in 0usize..5) {
        let n = c.x.len();
        let turned: Vec<f16> = (0..n).map(|i| c.x[(i + turn % n) % n]).collect();
        for gpu in kit::devices() {
            let (_, f, _) = functions::<f16, f16>()[which];
            let plain = run(&gpu, f, &gpu.upload(&c.x, c.place(0)), c.place(1));
            let other = run(&gpu, f, &gpu.upload(&turned, c.shape()), c.shape());
            let want: Vec<f16> = (0..n).map(|i| plain[(i + turn % n) % n]).collect();
            kit::assert_bits(&other, &want);
        }
    }
}

#[test]
fn laws() {
    let positive: Vec<f32> = (0..=4000).map(|i| i as f32 / 400.0).collect();
    let negative: Vec<f32> = positive.iter().map(|x| -x).collect();
    for gpu in kit::devices() {
        let (p, n) = (gpu.upload(&positive, [4001]), gpu.upload(&negative, [4001]));
        let both = |f: Call<f32, f32>| (run(&gpu, f, &p, [4001]), run(&gpu, f, &n, [4001]));
        for f in [silu::<f32, f32>, gelu, gelu_tanh] {
            let (up, down) = both(f);
            for (i, x) in positive.iter().enumerate() {
                assert!(
                    (up[i] - down[i] - x).abs() <= 4e-6 * x.abs() + 1e-6,
                    "f({x}) - f(-{x}) is {}",
                    up[i] - down[i]
                );
            }
            assert!(up.windows(2).all(|w| w[0] <= w[1]), "not monotone");
        }
        let (up, down) = both(tanh);
        assert!(up.iter().zip(down.iter()).all(|(a, b)| a.to_bits() == (-b).to_bits()), "tanh is odd");
        assert!(up.windows(2).all(|w| w[0] <= w[1] + 1.2e-7), "tanh is monotone");
        let (erf, approximated) = (both(gelu), both(gelu_tanh));
        let near =
            |a: &Array<f32>, b: &Array<f32>| a.iter().zip(b.iter()).all(|(a, b)| (a - b).abs() <= 5e-4);
        assert!(near(&erf.0, &approximated.0) && near(&erf.1, &approximated.1));
        let once = run(&gpu, relu::<f32, f32>, &n, [4001]);
        let twice = run(&gpu, relu::<f32, f32>, &gpu.upload(&once, [4001]), [4001]);
        kit::assert_bits(&twice, &once);
    }
}

/// Counted: each 128-byte line is accessed once, by few waves.
#[test]
fn elements_are_moved_once() {
    let n = 1 << 17;
    let x = vec![bf16::ONE; n];
    for arch in ["gfx942", "gfx950"] {
        let gpu = Gpu::open(&format!("emu:{arch}?details=true"));
        let (x, mut y) = (gpu.upload(&x, [n]), gpu.poisoned::<bf16>([n]));
        gpu.stream().take_counters().unwrap();
        silu(gpu.stream(), x.view(), y.view_mut()).unwrap();
        let counters = gpu.stream().take_counters().unwrap().unwrap();
        let details = counters.details.unwrap();
        let lines = (2 * n / 128) as u64;
        assert_eq!((details.global_read_lines, details.global_written_lines), (lines, lines), "{arch}");
        assert_eq!((details.distinct_read_lines, details.distinct_written_lines), (lines, lines), "{arch}");
        assert_eq!((counters.waves, details.scratch_bytes), (64, 0), "{arch}");
    }
}

#[test]
fn nothing_is_launched_for_no_elements() {
    for gpu in kit::devices() {
        for shape in [vec![0], vec![3, 0], vec![0, 3]] {
            let x = gpu.upload::<bf16>(&[], Place::contiguous(&shape));
            gpu.assert_nothing_launched(|| {
                run(&gpu, silu::<bf16, bf16>, &x, Place::contiguous(&shape));
            });
        }
    }
}

#[test]
fn errors() {
    Refusals::new((), |stream, tensors, ()| {
        silu(stream, tensors.input::<bf16>("x"), tensors.output::<bf16>("y"))
    })
    .input::<bf16>("x", [3, 4])
    .output::<bf16>("y", [3, 4])
    .accepts(|_| {})
    .accepts(|call| call.overlap("x", "y", 0))
    .refuses(kind!(Shape), &["silu: y: shape [4, 3], expected [3, 4] (shape of x)"], |call| {
        call.shape("y", [4, 3])
    })
    .refuses(kind!(Stride), &["silu: y"], |call| call.strides("y", [1, 3]))
    .refuses(kind!(Stride), &["silu: x"], |call| {
        call.shape("x", [2, 2, 4]);
        call.strides("x", [100, 8, 1]);
        call.shape("y", [2, 2, 4]);
    })
    .refuses(kind!(DeviceMismatch), &["x", "emu:gfx942", "emu:gfx950"], |call| call.elsewhere("x"))
    .refuses_other_devices()
    .refuses_overlaps();
}
