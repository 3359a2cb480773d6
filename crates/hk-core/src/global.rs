//! The tensor descriptor that kernels receive.

use crate::error::{Error, Result};
use crate::layout::Layout;
use bytemuck::{Pod, Zeroable};

/// A tensor as the device sees it, up to four axes (batch, depth, rows, cols): the Rust side of `hk::Global` in
/// `hk/global.h`, a field of a kernel's parameter struct.
///
/// Made by [`Launch::input`](crate::Launch::input) and its siblings, which keep the memory alive for the launch;
/// axes that the tensor lacks are 1 with a stride of 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct GlobalLayout {
    data: u64,
    shape: [u32; 4],
    strides: [i64; 4],
}

crate::params::declared!(GlobalLayout { data, shape, strides });

impl GlobalLayout {
    /// An optional tensor that is not there: `data` is null, every length 0.
    pub const ABSENT: Self = Self { data: 0, shape: [0; 4], strides: [0; 4] };

    /// Device address of the first element; 0 if the tensor is absent.
    pub const fn data(&self) -> u64 {
        self.data
    }

    /// Lengths of (batch, depth, rows, cols).
    pub const fn shape(&self) -> [u32; 4] {
        self.shape
    }

    /// Strides of (batch, depth, rows, cols), in elements.
    pub const fn strides(&self) -> [i64; 4] {
        self.strides
    }

    pub(crate) fn new(op: &'static str, arg: &'static str, data: u64, layout: &Layout) -> Result<Self> {
        let Some(lead) = 4usize.checked_sub(layout.rank()) else {
            return Err(Error::shape(op, arg, layout.shape(), "at most 4 axes"));
        };
        let mut global = Self { data, shape: [1; 4], strides: [0; 4] };
        for (i, (&n, &s)) in layout.shape().iter().zip(layout.strides()).enumerate() {
            global.shape[lead + i] = u32::try_from(n).map_err(|_| {
                Error::too_large(op, arg, format!("axis {i} of shape {:?}", layout.shape()), u32::MAX.into())
            })?;
            // An axis of one element, or an empty tensor, can have any stride.
            global.strides[lead + i] = i64::try_from(s)
                .map_err(|_| Error::too_large(op, arg, format!("stride {s} of axis {i}"), i64::MAX as u64))?;
        }
        Ok(global)
    }
}
