//! Integers on the device, of either width.

use crate::buffer::Storage;
use crate::dtype::Element;
use crate::error::Result;
use crate::global::GlobalLayout;
use crate::launch::Launch;
use crate::layout::Extent;
use crate::tensor::{Operand, TensorView, sealed};

/// A tensor of i32 or i64: positions, slots, starts of sequences.
#[derive(Debug, Clone, Copy)]
pub enum IndexView<'a> {
    /// 32 bits.
    I32(TensorView<'a, i32>),
    /// 64 bits.
    I64(TensorView<'a, i64>),
}

impl<'a> From<TensorView<'a, i32>> for IndexView<'a> {
    fn from(view: TensorView<'a, i32>) -> Self {
        Self::I32(view)
    }
}

impl<'a> From<TensorView<'a, i64>> for IndexView<'a> {
    fn from(view: TensorView<'a, i64>) -> Self {
        Self::I64(view)
    }
}

/// Runs `$body` for the view of either width.
macro_rules! either {
    ($self:expr, $view:ident => $body:expr) => {
        match $self {
            Self::I32($view) => $body,
            Self::I64($view) => $body,
        }
    };
}

impl<'a> IndexView<'a> {
    /// True if the integers have 64 bits.
    pub const fn is_i64(&self) -> bool {
        matches!(self, Self::I64(_))
    }

    /// Length of each axis.
    pub fn shape(&self) -> &[usize] {
        either!(self, view => view.shape())
    }

    /// Exchanges two axes.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) if there is no such axis.
    pub fn transpose(self, a: usize, b: usize) -> Result<Self> {
        either!(self, view => Ok(view.transpose(a, b)?.into()))
    }

    /// Checks that the address is aligned to the integers.
    ///
    /// # Errors
    /// [`Error::Align`](crate::Error::Align).
    pub fn expect_aligned(&self, op: &'static str, arg: &'static str) -> Result<()> {
        fn aligned<T: Element>(view: &TensorView<T>, op: &'static str, arg: &'static str) -> Result<()> {
            view.expect_aligned(op, arg, size_of::<T>() as u64)
        }
        either!(self, view => aligned(view, op, arg))
    }

    /// [`Launch::input`].
    ///
    /// # Errors
    /// As [`Launch::input`].
    pub fn input(&self, launch: &mut Launch<'a>, arg: &'static str) -> Result<GlobalLayout> {
        either!(self, view => launch.input(arg, view))
    }
}

impl Operand for IndexView<'_> {}

impl sealed::Operand for IndexView<'_> {
    fn storage(&self) -> &Storage {
        either!(self, view => sealed::Operand::storage(view))
    }

    fn extent(&self) -> Extent<'_> {
        either!(self, view => sealed::Operand::extent(view))
    }
}
