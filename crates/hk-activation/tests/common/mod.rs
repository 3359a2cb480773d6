//! Runs of `rope_cached` that the tests of rotations share.

use hk_activation::rope_cached;
use hk_core::Float;
use hk_core::plan::rope::RopeElement;
use hk_testkit::rope::RopeCase;
use hk_testkit::{Array, Gpu};

/// Runs `rope_cached` and checks that nothing but the output is touched.
#[track_caller]
pub fn run<T: Float, C: RopeElement<T> + Float>(
    gpu: &Gpu,
    case: &RopeCase,
    x: &[T],
    cos: &[C],
    sin: &[C],
) -> Array<T> {
    let inputs = case.upload(gpu, cos, sin);
    let x = gpu.upload(x, case.place());
    // The output may have other strides than the input.
    let mut y = gpu.poisoned(RopeCase { strided: !case.strided, ..case.clone() }.place());
    rope_cached(gpu.stream(), x.view(), inputs.tables(), y.view_mut(), case.rope, case.layout).unwrap();
    gpu.assert_guards(&y);
    gpu.assert_untouched(&x);
    inputs.assert_untouched(gpu);
    gpu.download(&y)
}

/// The same over its input.
#[track_caller]
pub fn run_in_place<T: Float, C: RopeElement<T> + Float>(
    gpu: &Gpu,
    case: &RopeCase,
    x: &[T],
    cos: &[C],
    sin: &[C],
) -> Array<T> {
    let inputs = case.upload(gpu, cos, sin);
    let mut x = gpu.upload(x, case.place());
    let y = x.view_mut();
    rope_cached(gpu.stream(), y.alias(), inputs.tables(), y, case.rope, case.layout).unwrap();
    gpu.assert_guards(&x);
    gpu.download(&x)
}
