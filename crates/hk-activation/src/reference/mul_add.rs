//! Multiply-add.

/// `a * x + b`, where `a` and `b` have as many elements as `x`, or one for all of them.
///
/// # Panics
/// If they have another number of elements.
pub fn fused_mul_add(x: &[f64], a: &[f64], b: &[f64]) -> Vec<f64> {
    let at = |v: &[f64], i: usize| if v.len() == 1 { v[0] } else { v[i] };
    assert!([a, b].iter().all(|v| v.len() == 1 || v.len() == x.len()), "one element or as many as x");
    x.iter().enumerate().map(|(i, x)| at(a, i).mul_add(*x, at(b, i))).collect()
}
