//! What the operators share: limits, checks of tensors.

use hk_core::{Element, Error, Result, TensorView, TensorViewMut};

/// Experts at most, `kExperts` of the kernels.
pub(crate) const MOST_EXPERTS: usize = 1024;
/// Choices of a token at most, `kChoices` of the kernels.
pub(crate) const MOST_CHOICES: usize = 32;
/// Gates at most: places are `i32`, with padding.
pub(crate) const MOST_GATES: usize = 1 << 30;

/// Views of either kind.
pub(crate) trait Vector {
    /// Checks that the elements follow each other without gaps, and are aligned.
    fn expect_packed(&self, op: &'static str, arg: &'static str) -> Result<()>;

    /// Checks that the tensor is contiguous, with one axis of `len` elements, one for each of `of`.
    fn expect_vector(&self, op: &'static str, arg: &'static str, len: usize, of: &str) -> Result<()>;
}

macro_rules! vector {
    ($view:ident) => {
        impl<T: Element> Vector for $view<'_, T> {
            fn expect_packed(&self, op: &'static str, arg: &'static str) -> Result<()> {
                self.expect_contiguous(op, arg)?;
                self.expect_aligned(op, arg, size_of::<T>() as u64)
            }

            fn expect_vector(&self, op: &'static str, arg: &'static str, len: usize, of: &str) -> Result<()> {
                if self.shape() != [len] {
                    return Err(Error::shape(op, arg, self.shape(), format!("[{len}] ({of})")));
                }
                self.expect_packed(op, arg)
            }
        }
    };
}
vector!(TensorView);
vector!(TensorViewMut);

/// Checks a number of experts.
pub(crate) fn check_experts(op: &'static str, arg: &'static str, experts: usize) -> Result<()> {
    let want = format!("1 to {MOST_EXPERTS}");
    if (1..=MOST_EXPERTS).contains(&experts) { Ok(()) } else { Err(Error::argument(op, arg, experts, want)) }
}

/// Checks a number of choices of a token.
pub(crate) fn check_choices(op: &'static str, arg: &'static str, k: usize, experts: usize) -> Result<()> {
    let most = experts.min(MOST_CHOICES);
    if (1..=most).contains(&k) {
        return Ok(());
    }
    Err(Error::argument(op, arg, format!("k = {k}"), format!("k from 1 to {most}")))
}
