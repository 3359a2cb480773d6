//! Small checks and conversions that many tests make.

use crate::{Gpu, devices};
use hk_core::{Arch, Error, Float, Result};

/// The [`devices`] of some targets.
///
/// # Panics
/// If there are both of AMD's targets and none of them is served.
#[track_caller]
pub fn devices_where(served: impl Fn(Arch) -> bool) -> Vec<Gpu> {
    let (found, others): (Vec<_>, Vec<_>) = devices().into_iter().partition(|gpu| served(gpu.arch()));
    let all = Arch::AMD.iter().all(|arch| others.iter().any(|gpu| gpu.arch() == *arch));
    assert!(!all, "no target is served");
    found
}

/// Asserts the kind of an error, and that its message says each of `parts`: `assert_error(r, kind!(Shape), &["x", "[3]"])`.
///
/// # Panics
/// If there is no error, or another one.
#[track_caller]
pub fn assert_error(result: Result<()>, kind: fn(&Error) -> bool, parts: &[&str]) {
    let error = result.expect_err("this is to be refused");
    assert!(kind(&error), "{error:?}");
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "`{message}` does not say `{part}`");
    }
}

/// A test for a variant of [`Error`]: a macro, since the pattern of a variant is no value.
#[macro_export]
macro_rules! kind {
    ($variant:ident) => {
        |e| matches!(e, $crate::hk_core::Error::$variant { .. })
    };
}

/// The values in f64, exactly.
pub fn widen<T: Float>(values: &[T]) -> Vec<f64> {
    values.iter().map(|v| v.to_f64()).collect()
}

/// The values rounded to `T`.
pub fn floats<T: Float>(values: &[f32]) -> Vec<T> {
    values.iter().map(|&v| T::from_f32(v)).collect()
}
