//! `solve_tril`: the inverse times the matrix, and against f64.

use hk_core::registry::{HostTensor, Scalar};
use hk_core::{DType, Float, bf16, f16};
use hk_gdr::{OPERATORS, reference, solve_tril};
use hk_testkit::{self as kit, Fill, Refusals, check_call, host_call, kind, proptest::prelude::*, widen};

/// How the keys of a chunk lie to each other.
#[derive(Debug, Clone, Copy)]
enum Keys {
    Random,
    /// Each is the one before, half renewed.
    Alike,
    /// A common direction, and 2 % of others; weights near 1, and no decay.
    Collinear,
}

/// `A[i, j] = beta_i k_i k_j` of normalised keys of 128, below the diagonal; NaN on and above it, which is not read.
fn matrix(keys: Keys, rows: usize, chunk: usize, seed: u64) -> Vec<f32> {
    const DIM: usize = 128;
    let draw: Vec<f64> = widen(&Fill::Normal.elements::<f32>((rows + 1) * DIM, seed));
    let common = &draw[rows * DIM..];
    let mut all: Vec<Vec<f64>> = Vec::new();
    for i in 0..rows {
        let own = &draw[i * DIM..][..DIM];
        let mix = |other: &[f64], share: f64| -> Vec<f64> {
            own.iter().zip(other).map(|(a, b)| share * a + (1.0 - share * share).sqrt() * b).collect()
        };
        let key = match (keys, all.last()) {
            (Keys::Alike, Some(last)) => {
                mix(&last.iter().map(|x| x * (DIM as f64).sqrt()).collect::<Vec<_>>(), 0.5)
            }
            (Keys::Collinear, _) => mix(common, 0.02),
            _ => own.to_vec(),
        };
        let norm = key.iter().map(|x| x * x).sum::<f64>().sqrt();
        all.push(key.iter().map(|x| x / norm).collect());
    }
    let beta = if matches!(keys, Keys::Random) { 0.5 } else { 0.98 };
    let element = |i: usize, j: usize| {
        let dot: f64 = all[i].iter().zip(&all[j]).map(|(a, b)| a * b).sum();
        if j < i { (beta * dot) as f32 } else { f32::NAN }
    };
    (0..rows)
        .flat_map(|i| (0..chunk).map(move |j| (i, j)))
        .map(|(i, j)| if j < rows { element(i, j) } else { f32::NAN })
        .collect()
}

/// The largest element of (I + A) X - I.
fn residual(a: &[f32], x: &[f32], rows: usize, chunk: usize) -> f64 {
    let mut largest: f64 = 0.0;
    for i in 0..rows {
        for c in 0..rows {
            let mut sum = f64::from(x[i * chunk + c]);
            for j in 0..i {
                sum += f64::from(a[i * chunk + j]) * f64::from(x[j * chunk + c]);
            }
            largest = largest.max((sum - f64::from(u8::from(i == c))).abs());
        }
    }
    largest
}

#[track_caller]
fn check<T: Float>(keys: Keys, rows: usize, chunk: usize, seed: u64) {
    let a = matrix(keys, rows, chunk, seed);
    let want = reference::solve_tril(&widen(&a), rows, chunk);
    for gpu in kit::devices() {
        let input = gpu.upload(&a, [1, rows, 1, chunk]);
        let mut x = gpu.poisoned::<T>([1, rows, 1, chunk]);
        solve_tril(gpu.stream(), input.view(), None, x.view_mut()).unwrap();
        gpu.assert_guards(&x);
        let got = gpu.download(&x).data;
        let at = format!("{keys:?}, {rows} rows of {chunk} on {}", gpu.spec());
        for i in 0..rows {
            for c in 0..chunk {
                // Unit lower triangular, exactly.
                let value = got[i * chunk + c].to_f64();
                if c >= i {
                    assert!(value == f64::from(u8::from(c == i)), "[{i}, {c}] is {value}: {at}");
                }
            }
        }
        let error = crate::recurrent::relative(&got, &want);
        let bound = match T::DTYPE {
            DType::Bf16 => 5e-3,
            DType::F16 => 1e-3,
            _ => 1e-5,
        };
        assert!(error <= bound, "relative error {error:e}: {at}");
        if T::DTYPE == DType::F32 {
            let x: Vec<f32> = got.iter().map(|x| x.to_f32()).collect();
            let residual = residual(&a, &x, rows, chunk);
            assert!(residual <= 1e-5, "(I + A) X - I has {residual:e}: {at}");
        }
    }
}

#[test]
fn inverses_of_keys_of_any_kind() {
    for keys in [Keys::Random, Keys::Alike, Keys::Collinear] {
        for chunk in [16, 32, 64] {
            for rows in [1, 15, chunk / 2 + 1, chunk - 1, chunk] {
                check::<f32>(keys, rows, chunk, 7 + rows as u64);
            }
            check::<bf16>(keys, chunk, chunk, 3);
            check::<f16>(keys, chunk, chunk, 4);
        }
    }
}

proptest! {
    #![proptest_config(kit::config())]

    /// Many heads and chunks, batched or packed, with sequences without tokens and shorter chunks.
    #[test]
    fn chunks_match_f64(
        lengths in prop::collection::vec(prop_oneof![Just(0usize), 1usize..=5, 14usize..=70, Just(128)], 1..=4), packed: bool,
        heads in 1usize..=3, log2 in 4u32..=6, type_ in 0usize..3, seed in any::<u64>().no_shrink(),
    ) {
        let chunk = 1usize << log2;
        let tokens: usize = if packed { lengths.iter().sum() } else { lengths[0] };
        let shape = if packed { vec![tokens, heads, chunk] } else { vec![lengths.len(), tokens, heads, chunk] };
        let values: Vec<f32> = Fill::Normal.elements(shape.iter().product(), seed);
        let values: Vec<f32> = values.iter().map(|x| x * 0.1).collect();
        let mut tensors = vec![("a", HostTensor::new(shape, &values).unwrap())];
        if packed {
            let mut starts = vec![0i32];
            lengths.iter().for_each(|n| starts.push(starts[starts.len() - 1] + *n as i32));
            tensors.push(("cu_seqlens", HostTensor::new([starts.len()], &starts).unwrap()));
        }
        let scalars = [("x_dtype", Scalar::Choice(["f32", "bf16", "f16"][type_]))];
        check_call(&host_call(OPERATORS, "solve_tril", &tensors, &scalars, &[]).unwrap()).unwrap();
    }
}

/// Sequences out of range are NaN where they are tokens.
#[test]
fn sequences_out_of_range_are_nan() {
    let a = vec![0.25f32; 40 * 16];
    for gpu in kit::devices() {
        for (starts, poisoned) in [([0, 20, 41], 20..40), ([-1, 20, 40], 0..20), ([0, 40, 30], 40..40)] {
            let (input, cu) = (gpu.upload(&a, [40, 1, 16]), gpu.upload(&starts, [3]));
            let mut x = gpu.poisoned::<f32>([40, 1, 16]);
            solve_tril(gpu.stream(), input.view(), Some(cu.view()), x.view_mut()).unwrap();
            gpu.assert_guards(&x);
            let got = gpu.download(&x).data;
            for (t, row) in got.chunks(16).enumerate() {
                let nan = row.iter().all(|v| v.is_nan());
                assert_eq!(nan, poisoned.contains(&t), "{starts:?}: token {t}");
            }
        }
    }
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    let table = |packed: bool| {
        let table = Refusals::new((), |stream, tensors, ()| {
            let starts = tensors.optional_input("cu_seqlens");
            solve_tril::<f32>(stream, tensors.input("a"), starts, tensors.output("x"))
        });
        if packed {
            table
                .input::<f32>("a", [40, 2, 32])
                .input::<i32>("cu_seqlens", [3])
                .output::<f32>("x", [40, 2, 32])
        } else {
            table.input::<f32>("a", [1, 40, 2, 32]).output::<f32>("x", [1, 40, 2, 32])
        }
    };
    table(false)
        .accepts(|_| {})
        .refuses(kind!(Unsupported), &["solve_tril: C = 24", "16, 32 or 64"], |call| {
            call.shape("a", [1, 40, 2, 24]);
        })
        .refuses(kind!(Unsupported), &["C = 128"], |call| call.shape("a", [1, 40, 2, 128]))
        .refuses(kind!(Shape), &["a: shape [40, 2, 32], expected 4 axes"], |call| {
            call.shape("a", [40, 2, 32])
        })
        .refuses(kind!(Shape), &["x: shape [1, 40, 1, 32]"], |call| call.shape("x", [1, 40, 1, 32]))
        .refuses(kind!(Stride), &["a"], |call| call.strides("a", [2560, 64, 32, 2]))
        .refuses(kind!(Align), &["x"], |call| {
            call.place("x", kit::Place::contiguous([1, 40, 2, 32]).shifted(1));
        })
        .refuses(kind!(Overlap), &["a and x"], |call| call.overlap("a", "x", 32))
        .refuses_other_devices();
    table(true)
        .accepts(|_| {})
        .refuses(kind!(Shape), &["cu_seqlens: shape [0]"], |call| call.shape("cu_seqlens", [0]))
        .refuses(kind!(Shape), &["a: shape [1, 40, 2, 32], expected 3 axes"], |call| {
            call.shape("a", [1, 40, 2, 32])
        });
}
