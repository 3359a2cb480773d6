//! `fused_mul_add` on the emulated GPUs (and real ones where there are some) against f64 and its laws.

use hk_activation::{MulAddOperand, fused_mul_add, reference};
use hk_core::{DType, Float, Layout, TensorView, bf16, f16};
use hk_testkit::{
    self as kit, Array, Fill, Gpu, Place, Refusals, Tensor, Tensors, kind, proptest::prelude::*, widen,
};

/// What an operand is.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Host,
    Device,
    Tensor,
}

const KINDS: [Kind; 3] = [Kind::Host, Kind::Device, Kind::Tensor];

/// An operand on a device, and its values.
struct Operand<E: Float> {
    kind: Kind,
    values: Vec<E>,
    tensor: Tensor<E>,
}

impl<E: Float> Operand<E> {
    fn new(gpu: &Gpu, kind: Kind, n: usize, shift: usize, seed: u64) -> Self {
        let n = if kind == Kind::Tensor { n } else { 1 };
        let values = Fill::Normal.elements::<E>(n, seed);
        let tensor = gpu.upload(&values, Place::contiguous([n]).shifted(shift));
        Self { kind, values, tensor }
    }

    fn view<'a>(&'a self) -> MulAddOperand<'a>
    where
        MulAddOperand<'a>: From<TensorView<'a, E>>,
    {
        if self.kind == Kind::Host { self.values[0].to_f32().into() } else { self.tensor.view().into() }
    }
}

/// `|got - want| <= rtol (|want| + |a x|) + 1e-6`: cancellation is allowed for.
#[track_caller]
fn assert_mul_add<O: Float>(got: &Array<O>, x: &[f64], a: &[f64], b: &[f64]) {
    let rtol = match O::DTYPE {
        DType::Bf16 => 8e-3,
        DType::F16 => 1e-3,
        _ => 4e-6,
    };
    let want = reference::fused_mul_add(x, a, b);
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        let product = x[i] * if a.len() == 1 { a[0] } else { a[i] };
        let bound = rtol * (want.abs() + product.abs()) + 1e-6;
        let got = got.to_f64();
        assert!((got - want).abs() <= bound, "[{i}]: {got:e}, not {want:e}");
    }
    assert_eq!(got.len(), want.len());
}

fn check<T: Float, A: Float, B: Float, O: Float>(n: usize, kinds: (Kind, Kind), shift: usize)
where
    for<'a> MulAddOperand<'a>: From<TensorView<'a, A>> + From<TensorView<'a, B>>,
{
    let x = Fill::Normal.elements::<T>(n, n as u64);
    for gpu in kit::devices() {
        let x_tensor = gpu.upload(&x, Place::contiguous([n]).shifted(shift));
        let a = Operand::<A>::new(&gpu, kinds.0, n, shift, 1);
        let b = Operand::<B>::new(&gpu, kinds.1, n, shift, 2);
        let mut y = gpu.poisoned::<O>(Place::contiguous([n]).shifted(shift));
        fused_mul_add(gpu.stream(), x_tensor.view(), a.view(), b.view(), y.view_mut()).unwrap();
        assert_mul_add(&gpu.download(&y), &widen(&x), &widen(&a.values), &widen(&b.values));
        gpu.assert_guards(&y);
        gpu.assert_untouched(&x_tensor);
        gpu.assert_untouched(&a.tensor);
        gpu.assert_untouched(&b.tensor);
    }
}

/// All nine combinations of operand kinds, with mixed types, aligned and unaligned.
#[test]
fn every_combination() {
    for a in KINDS {
        for b in KINDS {
            for (n, shift) in [(500, 0), (501, 1)] {
                check::<bf16, bf16, bf16, bf16>(n, (a, b), shift);
                check::<f16, f32, bf16, f32>(n, (a, b), shift);
                check::<f32, bf16, f16, f16>(n, (a, b), shift);
                check::<bf16, f16, f32, f16>(n, (a, b), shift);
                check::<f32, f32, f32, bf16>(n, (a, b), shift);
            }
        }
    }
}

#[test]
fn every_number_of_elements() {
    let full = [32 * 7168, 16 * 50 * 4186];
    let sizes = [1, 7, 8, 127, 500, 2049, 4096, 8193, 10_000];
    for &n in sizes.iter().chain(if kit::full() { &full[..] } else { &[] }) {
        check::<bf16, bf16, bf16, bf16>(n, (Kind::Tensor, Kind::Tensor), 0);
        check::<f16, f16, f32, f16>(n, (Kind::Device, Kind::Tensor), 0);
        check::<f32, f32, f32, f32>(n, (Kind::Tensor, Kind::Host), 0);
    }
}

/// More elements than the grid covers in one iteration.
#[test]
fn waves_loop() {
    let n = 300_001;
    let x: Vec<f16> = Fill::Grid.elements(n, 3);
    for spec in ["emu:gfx942?cus=2", "emu:gfx950?cus=2"] {
        let gpu = Gpu::open(spec);
        for offset in [0, 1] {
            let mut buffer = gpu.stream().upload(&x).unwrap();
            let layout = Layout::contiguous([n - 1]).unwrap();
            let y = buffer.view_mut_with(layout, offset).unwrap();
            fused_mul_add(gpu.stream(), y.alias(), 2.0, y.alias(), y).unwrap();
            let got = gpu.stream().download(&buffer).unwrap();
            for (i, (got, x)) in got.iter().zip(&x).enumerate() {
                let inside = (offset..offset + n - 1).contains(&i);
                assert_eq!(got.to_f32(), if inside { 3.0 } else { 1.0 } * x.to_f32(), "element {i}");
            }
        }
    }
}

/// A host scalar, a device scalar and a filled tensor are bitwise identical.
#[test]
fn operand_kinds_are_bitwise_identical() {
    let n = 1003;
    let x = Fill::Wide.elements::<bf16>(n, 4);
    for gpu in kit::devices() {
        let x = gpu.upload(&x, [n]);
        for (a, b) in [(1.7f32, -0.3f32), (100.0, 99.0), (0.0, 3.5), (-2.5, 0.0)] {
            let ones = [gpu.upload(&[a], [1]), gpu.upload(&[b], [1])];
            let full = [gpu.upload(&vec![a; n], [n]), gpu.upload(&vec![b; n], [n])];
            let operand = |i: usize, kind: Kind| -> MulAddOperand {
                match kind {
                    Kind::Host => [a, b][i].into(),
                    Kind::Device => ones[i].view().into(),
                    Kind::Tensor => full[i].view().into(),
                }
            };
            let run = |a: Kind, b: Kind| {
                let mut y = gpu.poisoned::<f32>([n]);
                fused_mul_add(gpu.stream(), x.view(), operand(0, a), operand(1, b), y.view_mut()).unwrap();
                gpu.download(&y)
            };
            let first = run(Kind::Host, Kind::Host);
            for a in KINDS {
                for b in KINDS {
                    kit::assert_bits(&run(a, b), &first);
                }
            }
        }
    }
}

#[test]
fn neutral_operands() {
    let n = 777;
    let x = Fill::Wide.elements::<f16>(n, 5);
    let b = Fill::Normal.elements::<f16>(n, 6);
    for gpu in kit::devices() {
        let (x_tensor, b_tensor) = (gpu.upload(&x, [n]), gpu.upload(&b, [n]));
        let mut y = gpu.poisoned::<f16>([n]);
        fused_mul_add(gpu.stream(), x_tensor.view(), 1.0, -0.0, y.view_mut()).unwrap();
        kit::assert_bits(&gpu.download(&y), &x);
        fused_mul_add(gpu.stream(), x_tensor.view(), 0.0, b_tensor.view(), y.view_mut()).unwrap();
        assert!(gpu.download(&y).iter().zip(&b).all(|(y, b)| y == b));
        let odd = gpu.upload(&[f32::NAN, f32::INFINITY, 1.0], [3]);
        let mut y = gpu.poisoned::<f32>([3]);
        fused_mul_add(gpu.stream(), odd.view(), 0.0, 1.0, y.view_mut()).unwrap();
        let got = gpu.download(&y);
        assert!(got[0].is_nan() && got[1].is_nan() && got[2] == 1.0, "{:?}", got.data);
    }
}

/// In place over x, a or b: bitwise identical to out of place.
#[test]
fn in_place_is_out_of_place() {
    for n in [96, 97] {
        let data: [Vec<bf16>; 3] = [1, 2, 3].map(|seed| Fill::Normal.elements(n, seed));
        for gpu in kit::devices() {
            let mut y = gpu.poisoned::<bf16>([n]);
            let tensors = || [0, 1, 2].map(|i| gpu.upload(&data[i], [n]));
            let [x, a, b] = tensors();
            fused_mul_add(gpu.stream(), x.view(), a.view(), b.view(), y.view_mut()).unwrap();
            let want = gpu.download(&y);
            for over in 0..3 {
                let [mut x, mut a, mut b] = tensors();
                let others = tensors();
                let y = [&mut x, &mut a, &mut b][over].view_mut();
                let operand = |i: usize| if i == over { y.alias() } else { others[i].view() };
                let (x_view, a_view, b_view) = (operand(0), operand(1), operand(2));
                fused_mul_add(gpu.stream(), x_view, a_view, b_view, y).unwrap();
                let got = gpu.download([&x, &a, &b][over]);
                kit::assert_bits(&got, &want);
            }
        }
    }
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn matches_reference(n in 1usize..=6000, a in 0usize..3, b in 0usize..3, shift in prop_oneof![Just(0usize), 1usize..=9]) {
        check::<f16, bf16, f32, bf16>(n, (KINDS[a], KINDS[b]), shift);
        check::<bf16, f32, bf16, f32>(n, (KINDS[a], KINDS[b]), shift);
    }
}

#[test]
fn nothing_is_launched_for_no_elements() {
    for gpu in kit::devices() {
        let x = gpu.upload::<bf16>(&[], [0]);
        let mut y = gpu.poisoned::<bf16>([0]);
        gpu.assert_nothing_launched(|| {
            fused_mul_add(gpu.stream(), x.view(), x.view(), 1.0, y.view_mut()).unwrap();
        });
    }
}

#[test]
fn errors() {
    /// A tensor, or 1 if it is left out.
    fn operand<'a>(tensors: &Tensors<'a>, name: &str) -> MulAddOperand<'a> {
        tensors.optional_input::<bf16>(name).map_or(MulAddOperand::Scalar(1.0), Into::into)
    }
    Refusals::new((), |stream, tensors, ()| {
        let (a, b) = (operand(tensors, "a"), operand(tensors, "b"));
        fused_mul_add(stream, tensors.input::<bf16>("x"), a, b, tensors.output::<bf16>("y"))
    })
    .input::<bf16>("x", [3, 4])
    .input::<bf16>("a", [3, 4])
    .input::<bf16>("b", [3, 4])
    .output::<bf16>("y", [3, 4])
    .accepts(|_| {})
    .accepts(|call| {
        call.without("a");
        call.without("b");
    })
    .accepts(|call| call.overlap("a", "y", 0))
    .refuses(kind!(Shape), &["fused_mul_add: a: shape [3], expected 1 element or 12 (those of x)"], |call| {
        call.shape("a", [3])
    })
    .refuses(kind!(Shape), &["b", "[3]"], |call| call.shape("b", [3]))
    .refuses(kind!(Shape), &["y", "[12]"], |call| call.shape("y", [12]))
    .refuses(kind!(Stride), &["x"], |call| call.strides("x", [5, 1]))
    .refuses(kind!(Stride), &["a"], |call| call.strides("a", [5, 1]))
    .refuses(kind!(Stride), &["b"], |call| call.strides("b", [5, 1]))
    .refuses(kind!(Stride), &["y"], |call| call.strides("y", [5, 1]))
    // A tensor of one element may not be an element of `y`.
    .refuses(kind!(Overlap), &["b and y"], |call| {
        call.shape("b", [1]);
        call.overlap("b", "y", 0);
    })
    .refuses_other_devices()
    .refuses_overlaps();
}
