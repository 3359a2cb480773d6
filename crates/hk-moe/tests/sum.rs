//! `moe_sum` against the reference, and its refusals.

use crate::common::{Numbers, logits};
use hk_core::{Float, bf16, f16};
use hk_moe::{moe_sum, reference};
use hk_testkit::{self as kit, Gpu, HostTensorF64, Refusals, Tolerance, kind, proptest::prelude::*, widen};

/// `placed`: gates in any order, some of them outside.
#[track_caller]
fn check<T: Float, Y: Float>(
    gpu: &Gpu,
    [tokens, k, cols]: [usize; 3],
    more: usize,
    placed: bool,
    with_residual: bool,
    seed: u64,
) {
    let gates = tokens * k;
    let data = logits::<T>(gates * cols, seed, false);
    let mut numbers = Numbers(seed);
    let any: Vec<i32> = (0..gates).map(|_| numbers.next() as i32 % (gates as i32 + 2) - 1).collect();
    let in_order: Vec<i32> = (0..gates as i32).collect();
    let added = logits::<Y>(tokens * cols, seed + 1, false);
    let x = gpu.upload_rows(&data, [gates, cols], cols + more);
    let places = placed.then(|| gpu.upload(&any, [tokens, k]));
    let residual = with_residual.then(|| gpu.upload_rows(&added, [tokens, cols], cols + more));
    let mut y = gpu.poisoned_rows::<Y>([tokens, cols], cols + more);
    let (places_view, residual_view) =
        (places.as_ref().map(|p| p.view()), residual.as_ref().map(|r| r.view()));
    moe_sum(gpu.stream(), x.view(), places_view, residual_view, y.view_mut()).unwrap();
    let wide = widen(&added);
    let (want, magnitudes) = reference::moe_sum(
        &widen(&data),
        cols,
        if placed { &any } else { &in_order },
        k,
        with_residual.then_some(&wide[..]),
    );
    let want = HostTensorF64::new([tokens, cols], want).with_magnitudes(magnitudes);
    kit::assert_near(&gpu.download(&y), &want, Tolerance::Sum { terms: 4e-6 });
    gpu.assert_guards(&y);
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn sums_are_those_of_the_reference(
        tokens in kit::size(1..=40, &[8]), k in kit::size(1..=32, &[4, 8]), cols in kit::size(1..=5000, &[256, 2048]), more in 0usize..9,
        placed: bool, residual: bool, kind in 0..5, seed: u64,
    ) {
        let more = if more % 3 == 0 { 8 * more } else { more };
        let size = [tokens, k, cols];
        for gpu in kit::devices() {
            match kind {
                0 => check::<bf16, bf16>(&gpu, size, more, placed, residual, seed),
                1 => check::<bf16, f32>(&gpu, size, more, placed, residual, seed),
                2 => check::<f16, f16>(&gpu, size, more, placed, residual, seed),
                3 => check::<f16, f32>(&gpu, size, more, placed, residual, seed),
                _ => check::<f32, f32>(&gpu, size, more, placed, residual, seed),
            }
        }
    }
}

#[test]
fn the_order_of_rows_changes_no_bit() {
    for gpu in kit::devices() {
        let (tokens, k, cols) = (11, 6, 264);
        let data = logits::<bf16>(tokens * k * cols, 7, false);
        // Row r of x is row 5 r mod 66 of the other.
        let place = |gate: usize| gate * 5 % (tokens * k);
        let mut moved = data.clone();
        for gate in 0..tokens * k {
            moved[place(gate) * cols..][..cols].copy_from_slice(&data[gate * cols..][..cols]);
        }
        let places: Vec<i32> = (0..tokens * k).map(|gate| place(gate) as i32).collect();
        let (x, other) = (gpu.upload(&data, [tokens * k, cols]), gpu.upload(&moved, [tokens * k, cols]));
        let places = gpu.upload(&places, [tokens, k]);
        let (mut y, mut z) = (gpu.poisoned::<f32>([tokens, cols]), gpu.poisoned::<f32>([tokens, cols]));
        moe_sum(gpu.stream(), x.view(), None, None, y.view_mut()).unwrap();
        moe_sum(gpu.stream(), other.view(), Some(places.view()), None, z.view_mut()).unwrap();
        kit::assert_bits(&gpu.download(&y), &gpu.download(&z).data);
    }
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    Refusals::new((), |stream, tensors, ()| {
        let (places, residual) = (tensors.optional_input("places"), tensors.optional_input("residual"));
        moe_sum(stream, tensors.input::<bf16>("x"), places, residual, tensors.output::<bf16>("y"))
    })
    .input::<bf16>("x", [12, 9])
    .input::<i32>("places", [3, 4])
    .input::<bf16>("residual", [3, 9])
    .output::<bf16>("y", [3, 9])
    .accepts(|_| {})
    .accepts(|call| call.without("places"))
    .refuses(kind!(Shape), &["moe_sum: y"], |call| call.shape("y", [3, 8]))
    .refuses(kind!(Shape), &["moe_sum: places"], |call| call.shape("places", [4, 4]))
    .refuses(kind!(Shape), &["moe_sum: residual"], |call| call.shape("residual", [2, 9]))
    .refuses(kind!(Shape), &["moe_sum: x", "a multiple of 3"], |call| {
        call.without("places");
        call.shape("x", [13, 9]);
    })
    .refuses(kind!(Overlap), &["x", "y"], |call| call.overlap("x", "y", 1))
    .refuses_other_devices();
    Refusals::new((), |stream, tensors, ()| {
        moe_sum(stream, tensors.input::<bf16>("x"), None, None, tensors.output::<f16>("y"))
    })
    .input::<bf16>("x", [12, 9])
    .output::<f16>("y", [3, 9])
    .refuses(kind!(DType), &["moe_sum: y: dtype f16"], |_| {});
}
