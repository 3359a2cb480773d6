//! exp2 and log2 in f64, accurate enough that rounding to f32 or f16 is correct; the same bits on every host.

/// 2^x.
#[inline(always)]
pub(crate) fn exp2(x: f64) -> f64 {
    libm::exp2(x)
}

/// log2(x).
#[inline(always)]
pub(crate) fn log2(x: f64) -> f64 {
    libm::log2(x)
}
