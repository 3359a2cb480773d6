//! What the tests share.

use hk_core::quant::Quantized;
use hk_core::{Element, Float};
use hk_quant::{PerTokenOptions, Smooth};
use hk_testkit::{self as kit, Array, Gpu, Place, Tensor};

/// Columns that the specification lists, the borders of every kernel, and one past them.
pub const COLS: [usize; 26] = [
    1, 13, 16, 75, 96, 127, 128, 130, 144, 400, 512, 513, 528, 1536, 2048, 2064, 2880, 4096, 4112, 5120,
    7168, 8192, 8193, 8208, 14336, 28672,
];

/// Quantized values and scales.
#[derive(Debug)]
pub struct Output<Q> {
    pub q: Array<Q>,
    pub scale: Array<f32>,
}

impl<Q: Quantized> Output<Q> {
    /// Asserts the same bits.
    #[track_caller]
    pub fn assert_same(&self, other: &Self) {
        kit::assert_bits(&self.q, &other.q);
        kit::assert_bits(&self.scale, &other.scale);
    }
}

/// The bytes of elements.
pub fn bytes<T: Element>(q: &[T]) -> &[u8] {
    bytemuck::cast_slice(q)
}

/// Runs `per_token_quant` with `q` in the given place, and checks that nothing else is touched.
#[track_caller]
pub fn per_token<T: Float, Q: Quantized>(
    gpu: &Gpu,
    x: &Tensor<T>,
    q: impl Into<Place>,
    scale_ub: Option<f32>,
) -> Output<Q> {
    let mut q = gpu.poisoned(q);
    let mut scale = gpu.poisoned([q.layout().rows("test", "q").unwrap().rows]);
    let bound = scale_ub.map(|b| gpu.upload(&[b], [1]));
    let bound = bound.as_ref().map(|b| b.view());
    hk_quant::per_token_quant(
        gpu.stream(),
        x.view(),
        q.view_mut(),
        scale.view_mut(),
        PerTokenOptions { scale_ub: bound },
    )
    .unwrap();
    gpu.assert_guards(&q);
    gpu.assert_guards(&scale);
    gpu.assert_untouched(x);
    Output { q: gpu.download(&q), scale: gpu.download(&scale) }
}

/// Runs `smoothquant` as [`per_token`] does its operator.
#[track_caller]
pub fn smooth<T: Float, W: Smooth<T>, Q: Quantized>(
    gpu: &Gpu,
    x: &Tensor<T>,
    smooth: &Tensor<W>,
    q: impl Into<Place>,
) -> Output<Q> {
    let mut q = gpu.poisoned(q);
    let mut scale = gpu.poisoned([q.layout().rows("test", "q").unwrap().rows]);
    hk_quant::smoothquant(gpu.stream(), x.view(), smooth.view(), q.view_mut(), scale.view_mut()).unwrap();
    gpu.assert_guards(&q);
    gpu.assert_guards(&scale);
    Output { q: gpu.download(&q), scale: gpu.download(&scale) }
}

/// Asserts that quantized values are bitwise `round(x * (1 / scale))`.
#[track_caller]
pub fn assert_quantized<Q: Quantized>(q: &[Q], x: &[f32], scale_of: impl Fn(usize) -> f32) {
    for (i, (q, &x)) in q.iter().zip(x).enumerate() {
        let want = Q::from_f32(x * (1.0 / scale_of(i)));
        let same = bytes(&[*q]) == bytes(&[want]);
        assert!(same, "element {i}: {x:e} with scale {:e} is {q:?}, not {want:?}", scale_of(i));
    }
}

/// Asserts the guarantees for finite values with a dynamic scale: the error bound, that the largest becomes `qmax`, signs and
/// order.
#[track_caller]
pub fn assert_guarantees<Q: Quantized>(q: &[Q], x: &[f32], scale: f32, floor: f32) {
    let s = f64::from(scale);
    let values: Vec<f64> = q.iter().map(|q| f64::from(q.to_f32())).collect();
    let amax = x.iter().fold(0f32, |a, x| a.max(x.abs()));
    for (&x, &v) in x.iter().zip(&values) {
        let x = f64::from(x);
        let error = (x - v * s).abs();
        let bound = match Q::FORMAT.qmax {
            127.0 => 0.5 * s + x.abs() * 2f64.powi(-22),
            qmax => {
                let h = if qmax == 240.0 { 2f64.powi(-11) } else { 2f64.powi(-10) };
                (x.abs() / 16.0).max(h * s) * (1.0 + 2f64.powi(-20))
            }
        };
        assert!(error <= bound, "{x:e} became {v} * {s:e}");
        assert!(v == 0.0 || (v > 0.0) == (x > 0.0), "sign of {x:e}");
    }
    if amax >= floor {
        let top = values.iter().fold(0f64, |a, v| a.max(v.abs()));
        assert_eq!(top, f64::from(Q::FORMAT.qmax), "of {amax:e}");
    }
    let mut order: Vec<usize> = (0..x.len()).collect();
    order.sort_by(|&a, &b| x[a].total_cmp(&x[b]));
    assert!(order.windows(2).all(|w| values[w[0]] <= values[w[1]]), "order");
}

/// The elements in f32, exactly.
pub fn f32s<T: Float>(x: &[T]) -> Vec<f32> {
    x.iter().map(|x| x.to_f32()).collect()
}
