//! Typed views of device memory.

use crate::buffer::Storage;
use crate::device::Device;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::layout::{Extent, Layout, Rows};
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

/// A tensor to be read: a buffer, a [`Layout`] and the place of its first element. That every element lies within the
/// buffer is proven when a view is made, so kernels need no such check.
#[derive(Clone, Copy)]
pub struct TensorView<'a, T> {
    raw: RawView<'a>,
    element: PhantomData<&'a [T]>,
}

/// A tensor to be written (or read). No two of its elements overlap, and while it lives nothing else views them, except
/// what [`alias`](Self::alias) hands out.
pub struct TensorViewMut<'a, T> {
    raw: RawView<'a>,
    element: PhantomData<&'a mut [T]>,
}

/// What both kinds of views are.
#[derive(Clone, Copy)]
struct RawView<'a> {
    storage: &'a Storage,
    addr: u64,
    layout: Layout,
}

impl<'a> RawView<'a> {
    fn new<T: Element>(storage: &'a Storage, len: usize, layout: Layout, offset: usize) -> Result<Self> {
        if offset.checked_add(layout.span()).is_none_or(|end| end > len) {
            let got = format!("{layout:?} at offset {offset}");
            let want = format!("all elements within the {len} of the buffer");
            return Err(Error::Shape { op: "view", arg: "layout", got, want });
        }
        // In bounds, so that the product fits; an empty layout can be at the end.
        let addr = storage.addr() + (offset * size_of::<T>()) as u64;
        Ok(Self { storage, addr, layout })
    }

    fn slice<T: Element>(self, axis: usize, range: Range<usize>) -> Result<Self> {
        let (layout, offset) = self.layout.slice(axis, range)?;
        Ok(Self { addr: self.addr + (offset * size_of::<T>()) as u64, layout, ..self })
    }

    fn flatten_rows(self, op: &'static str, arg: &'static str) -> Result<Self> {
        let Rows { rows, cols, row_stride } = self.layout.rows(op, arg)?;
        Ok(Self { layout: Layout::with_strides([rows, cols], [row_stride, 1])?, ..self })
    }

    fn flatten(self, op: &'static str, arg: &'static str) -> Result<Self> {
        self.layout.expect_contiguous(op, arg)?;
        Ok(Self { layout: Layout::contiguous([self.layout.numel()])?, ..self })
    }
}

macro_rules! view_methods {
    ($view:ident) => {
        impl<'a, T: Element> $view<'a, T> {
            /// Shape and strides.
            pub fn layout(&self) -> &Layout {
                &self.raw.layout
            }

            /// Length of each axis.
            pub fn shape(&self) -> &[usize] {
                self.raw.layout.shape()
            }

            /// Stride of each axis, in elements.
            pub fn strides(&self) -> &[usize] {
                self.raw.layout.strides()
            }

            /// Number of elements.
            pub fn numel(&self) -> usize {
                self.raw.layout.numel()
            }

            /// The device it lies on.
            pub fn device(&self) -> &'a Device {
                self.raw.storage.device()
            }

            /// Device address of the first element. It says where the tensor is and is not to be dereferenced.
            pub fn addr(&self) -> u64 {
                self.raw.addr
            }

            /// True if the first element's address is a multiple of `bytes`.
            pub fn is_aligned(&self, bytes: u64) -> bool {
                self.raw.addr.is_multiple_of(bytes)
            }

            /// True if every row begins on a multiple of `bytes`: the address, and in bytes the stride of every axis
            /// but the last. Axes of length 1 are free.
            pub fn rows_aligned(&self, bytes: u64) -> bool {
                let leading = self.shape().len().saturating_sub(1);
                let mut axes = self.shape().iter().zip(self.strides()).take(leading);
                self.is_aligned(bytes)
                    && axes.all(|(&n, &s)| n <= 1 || ((s * size_of::<T>()) as u64).is_multiple_of(bytes))
            }

            /// The part of `axis` in `range`.
            ///
            /// # Errors
            /// [`Error::Argument`] if there is no such axis, or the range does not lie in it.
            pub fn slice(self, axis: usize, range: Range<usize>) -> Result<Self> {
                Ok(Self { raw: self.raw.slice::<T>(axis, range)?, element: PhantomData })
            }

            /// Exchanges two axes.
            ///
            /// # Errors
            /// [`Error::Argument`] if there is no such axis.
            pub fn transpose(self, a: usize, b: usize) -> Result<Self> {
                let layout = self.raw.layout.transpose(a, b)?;
                Ok(Self { raw: RawView { layout, ..self.raw }, element: PhantomData })
            }

            /// Splits an axis in two: see [`Layout::split_axis`].
            ///
            /// # Errors
            /// [`Error::Argument`] if there is no such axis, or its length is not a multiple of `inner`;
            /// [`Error::Shape`] beyond five axes.
            pub fn split_axis(self, axis: usize, inner: usize) -> Result<Self> {
                let layout = self.raw.layout.split_axis(axis, inner)?;
                Ok(Self { raw: RawView { layout, ..self.raw }, element: PhantomData })
            }

            /// Merges an axis with the next one: see [`Layout::merge_axes`].
            ///
            /// # Errors
            /// [`Error::Stride`] if there are gaps between them; [`Error::Argument`] if there are no such axes.
            pub fn merge_axes(self, op: &'static str, arg: &'static str, axis: usize) -> Result<Self> {
                let layout = self.raw.layout.merge_axes(op, arg, axis)?;
                Ok(Self { raw: RawView { layout, ..self.raw }, element: PhantomData })
            }

            /// The lengths of the axes, if there are `N`.
            ///
            /// # Errors
            /// [`Error::Shape`].
            pub fn dims<const N: usize>(&self, op: &'static str, arg: &'static str) -> Result<[usize; N]> {
                self.raw.layout.dims(op, arg)
            }

            /// The tensor as rows along the last axis: see [`Layout::rows`].
            ///
            /// # Errors
            /// [`Error::Shape`] for rank 0; [`Error::Stride`] if the last axis has no unit stride, or the leading
            /// axes no uniform row stride.
            pub fn rows(&self, op: &'static str, arg: &'static str) -> Result<Rows> {
                self.raw.layout.rows(op, arg)
            }

            /// The same elements with two axes, rows and columns: the view for [`rows`](Self::rows).
            ///
            /// # Errors
            /// As [`rows`](Self::rows).
            pub fn flatten_rows(self, op: &'static str, arg: &'static str) -> Result<Self> {
                Ok(Self { raw: self.raw.flatten_rows(op, arg)?, element: PhantomData })
            }

            /// The elements of a contiguous tensor as one axis.
            ///
            /// # Errors
            /// [`Error::Stride`] if there are gaps between them.
            pub fn flatten(self, op: &'static str, arg: &'static str) -> Result<Self> {
                Ok(Self { raw: self.raw.flatten(op, arg)?, element: PhantomData })
            }

            /// Checks the shape.
            ///
            /// # Errors
            /// [`Error::Shape`].
            pub fn expect_shape(
                &self,
                op: &'static str,
                arg: &'static str,
                want: impl AsRef<[usize]>,
            ) -> Result<()> {
                self.raw.layout.expect_shape(op, arg, want)
            }

            /// Checks that the last axis has stride 1.
            ///
            /// # Errors
            /// [`Error::Stride`].
            pub fn expect_unit_stride(&self, op: &'static str, arg: &'static str) -> Result<()> {
                self.raw.layout.expect_unit_stride(op, arg)
            }

            /// Checks that the elements follow each other without gaps.
            ///
            /// # Errors
            /// [`Error::Stride`].
            pub fn expect_contiguous(&self, op: &'static str, arg: &'static str) -> Result<()> {
                self.raw.layout.expect_contiguous(op, arg)
            }

            /// Checks [`is_aligned`](Self::is_aligned).
            ///
            /// # Errors
            /// [`Error::Align`].
            pub fn expect_aligned(&self, op: &'static str, arg: &'static str, bytes: u64) -> Result<()> {
                if self.is_aligned(bytes) {
                    return Ok(());
                }
                Err(Error::Align { op, arg, addr: self.raw.addr, want: bytes })
            }
        }

        impl<T: Element> fmt::Debug for $view<'_, T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let (addr, layout, device) = (self.raw.addr, self.raw.layout, self.raw.storage.device());
                write!(
                    f,
                    concat!(stringify!($view), "<{}>({:?} at {:#x} on {})"),
                    T::DTYPE,
                    layout,
                    addr,
                    device.spec()
                )
            }
        }

        impl<T: Element> Operand for $view<'_, T> {}

        impl<T: Element> sealed::Operand for $view<'_, T> {
            fn storage(&self) -> &Storage {
                self.raw.storage
            }

            fn extent(&self) -> Extent<'_> {
                Extent { addr: self.raw.addr, element_bytes: size_of::<T>(), layout: &self.raw.layout }
            }
        }
    };
}

view_methods!(TensorView);
view_methods!(TensorViewMut);

impl<'a, T: Element> TensorView<'a, T> {
    pub(crate) fn new(storage: &'a Storage, len: usize, layout: Layout, offset: usize) -> Result<Self> {
        Ok(Self { raw: RawView::new::<T>(storage, len, layout, offset)?, element: PhantomData })
    }

    /// Repeats axes of length 1, and adds leading ones, up to `shape`: see [`Layout::broadcast`].
    ///
    /// # Errors
    /// [`Error::Shape`] if the shapes do not fit.
    pub fn broadcast(self, shape: impl AsRef<[usize]>) -> Result<Self> {
        let layout = self.raw.layout.broadcast(shape)?;
        Ok(Self { raw: RawView { layout, ..self.raw }, element: PhantomData })
    }
}

impl<'a, T: Element> TensorViewMut<'a, T> {
    /// The caller has borrowed the memory mutably.
    pub(crate) fn new(storage: &'a Storage, len: usize, layout: Layout, offset: usize) -> Result<Self> {
        let raw = RawView::new::<T>(storage, len, layout, offset)?;
        if layout.overlaps_itself() {
            return Err(Error::stride("view_mut", "layout", &layout, "elements that do not overlap"));
        }
        Ok(Self { raw, element: PhantomData })
    }

    /// A shorter borrow of the same tensor, for calls that take the view by value.
    pub fn reborrow(&mut self) -> TensorViewMut<'_, T> {
        TensorViewMut { raw: self.raw, element: PhantomData }
    }

    /// The memory of a contiguous tensor as elements of another type, as many as fit in it, along one axis.
    ///
    /// # Errors
    /// [`Error::Stride`]; [`Error::Align`] if the address is not aligned to the other type.
    pub fn cast<U: Element>(self, op: &'static str, arg: &'static str) -> Result<TensorViewMut<'a, U>> {
        self.expect_contiguous(op, arg)?;
        self.expect_aligned(op, arg, size_of::<U>() as u64)?;
        let layout = Layout::contiguous([self.numel() * size_of::<T>() / size_of::<U>()])?;
        Ok(TensorViewMut { raw: RawView { layout, ..self.raw }, element: PhantomData })
    }

    /// The same elements as an input, for operators that permit an output to be exactly one of their inputs. Operators
    /// that do not permit it answer [`Error::Overlap`].
    pub fn alias(&self) -> TensorView<'a, T> {
        TensorView { raw: self.raw, element: PhantomData }
    }

    /// The first elements of a tensor `[n]`, as many as `shape` has, with that shape.
    ///
    /// # Errors
    /// [`Error::Shape`] if there are fewer.
    pub fn reshape_front(
        self,
        op: &'static str,
        arg: &'static str,
        shape: impl AsRef<[usize]>,
    ) -> Result<Self> {
        let layout = Layout::contiguous(shape)?;
        let [len] = self.dims::<1>(op, arg)?;
        self.expect_contiguous(op, arg)?;
        if layout.numel() > len {
            return Err(Error::shape(op, arg, [len], format!("[{}] or longer", layout.numel())));
        }
        Ok(Self { raw: RawView { layout, ..self.raw }, element: PhantomData })
    }

    /// Both parts of `axis`, before and from index `mid`: two outputs in one buffer, as the halves of a wide row.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such axis, or `mid` lies beyond it.
    pub fn split_at(self, axis: usize, mid: usize) -> Result<(Self, Self)> {
        let length = self.shape().get(axis).copied().unwrap_or(0);
        let part = |range| self.raw.slice::<T>(axis, range).map(|raw| Self { raw, element: PhantomData });
        Ok((part(0..mid)?, part(mid..length.max(mid))?))
    }
}

/// A view of either kind, as [`check_overlap`] takes it. Sealed.
pub trait Operand: sealed::Operand {}

pub(crate) mod sealed {
    use crate::buffer::Storage;
    use crate::layout::Extent;

    pub trait Operand {
        fn storage(&self) -> &Storage;
        fn extent(&self) -> Extent<'_>;
    }
}

/// How an input and an output of an operator may share memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aliasing {
    /// Not at all.
    Disjoint,
    /// Not at all, or exactly: same address, shape, strides and element size.
    ExactAliasAllowed,
}

/// Checks that `a` and the output `b`, each with its argument name, share memory only as permitted. Interleaved
/// tensors, as two column ranges of one matrix, are disjoint.
///
/// # Errors
/// [`Error::Overlap`].
pub fn check_overlap(
    op: &'static str,
    (a_name, a): (&'static str, &(impl Operand + ?Sized)),
    (b_name, b): (&'static str, &(impl Operand + ?Sized)),
    permitted: Aliasing,
) -> Result<()> {
    // Devices have address spaces of their own.
    if a.storage().device() != b.storage().device() {
        return Ok(());
    }
    let (a, b) = (a.extent(), b.extent());
    let exact = a.addr == b.addr && a.layout == b.layout && a.element_bytes == b.element_bytes;
    let want = match permitted {
        Aliasing::ExactAliasAllowed if exact => return Ok(()),
        Aliasing::ExactAliasAllowed => "disjoint tensors or exactly the same one",
        Aliasing::Disjoint => "disjoint tensors",
    };
    if a.intersects(&b) { Err(Error::Overlap { op, a: a_name, b: b_name, want }) } else { Ok(()) }
}

/// An argument with its name, as [`check_aliases`] takes it; `None` if it is optional and left out.
pub type NamedOperand<'a> = (&'static str, Option<&'a dyn Operand>);

/// [`check_overlap`] of every output with every input, and with the outputs before it. An output, followed by the names of
/// the inputs that it may be exactly, is disjoint from all else.
///
/// # Errors
/// [`Error::Overlap`].
pub fn check_aliases(
    op: &'static str,
    inputs: &[NamedOperand],
    outputs: &[(NamedOperand, &[&'static str])],
) -> Result<()> {
    for (i, &((name, output), may_be)) in outputs.iter().enumerate() {
        let Some(output) = output else { continue };
        let earlier = outputs[..i].iter().map(|(named, _)| named);
        for &(other_name, other) in inputs.iter().chain(earlier) {
            let Some(other) = other else { continue };
            let permitted =
                if may_be.contains(&other_name) { Aliasing::ExactAliasAllowed } else { Aliasing::Disjoint };
            check_overlap(op, (other_name, other), (name, output), permitted)?;
        }
    }
    Ok(())
}
