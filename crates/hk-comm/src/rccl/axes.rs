//! Collectives of the library along any axis: its own know the first one alone.

use super::{Group, RcclComm, ReduceOp};
use crate::kernels::swap_axes::Params;
use crate::p2p::{PACKET, Parts, THREADS, expect_parts};
use hk_core::{
    Element, Error, KernelRef, LaunchConfig, Result, Stream, TensorView, TensorViewMut, check_aliases,
};

static KERNELS: [KernelRef<Params>; 2] =
    [Params::kernel("swap_axes_packets"), Params::kernel("swap_axes_bytes")];

/// Packets that a thread has in flight.
const BATCH: usize = 4;

impl RcclComm {
    /// [`all_gather`](Self::all_gather) along axis `dim`: with y as `world` parts along it, part r is the x of rank r. One more launch, which
    /// moves the parts from `workspace` to their places.
    ///
    /// | arg         | shape                 | layout                            |
    /// |-------------|-----------------------|-----------------------------------|
    /// | `x`         | `[.., n, ..]`         | contiguous                        |
    /// | `y`         | `[.., world * n, ..]` | contiguous                        |
    /// | `workspace` | as y                  | contiguous; not used along axis 0 |
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather), but that x is not y. [`Argument`](Error::Argument): x has no axis `dim`.
    /// [`TooLarge`](Error::TooLarge): y has 2^31 packets of 16 bytes or more; or as many bytes, where the axes from `dim` on are not whole packets,
    /// or a tensor is not on 16 bytes.
    pub fn all_gather_dim<T: Element>(
        &self,
        stream: &Stream,
        x: TensorView<T>,
        workspace: TensorViewMut<T>,
        mut y: TensorViewMut<T>,
        dim: usize,
    ) -> Result<()> {
        const OP: &str = "RcclComm::all_gather_dim";
        let Parts { rows, cols } = expect_parts(OP, ("x", x.shape()), ("y", y.shape()), dim, self.world())?;
        if rows == 1 {
            return self.all_gather(stream, x, y);
        }
        self.expect_stream(OP, stream)?;
        workspace.expect_shape(OP, "workspace", y.shape())?;
        workspace.expect_contiguous(OP, "workspace")?;
        y.expect_contiguous(OP, "y")?;
        check_aliases(
            OP,
            &[("x", Some(&x))],
            &[(("y", Some(&y)), &[]), (("workspace", Some(&workspace)), &[])],
        )?;
        let swap = Swap::new(OP, [self.world(), rows, cols * size_of::<T>()], workspace.addr() | y.addr())?;
        let parts = workspace.alias();
        let mut group = Group::new();
        group.all_gather(self, x, workspace)?;
        group.end()?;
        swap.run(OP, stream, parts, &mut y)
    }

    /// [`reduce_scatter`](Self::reduce_scatter) along axis `dim`: with x as `world` parts along it, rank k gets part k of `op_r x_r`. One more
    /// launch before it, which puts the parts one after the other into `workspace`.
    ///
    /// | arg         | shape                 | layout                            |
    /// |-------------|-----------------------|-----------------------------------|
    /// | `x`         | `[.., world * n, ..]` | contiguous                        |
    /// | `y`         | `[.., n, ..]`         | contiguous                        |
    /// | `workspace` | as x                  | contiguous; not used along axis 0 |
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter), but that y is not x. [`Argument`](Error::Argument), [`TooLarge`](Error::TooLarge): as
    /// [`all_gather_dim`](Self::all_gather_dim), of x.
    pub fn reduce_scatter_dim<T: Element>(
        &self,
        stream: &Stream,
        x: TensorView<T>,
        mut workspace: TensorViewMut<T>,
        y: TensorViewMut<T>,
        op: ReduceOp,
        dim: usize,
    ) -> Result<()> {
        const OP: &str = "RcclComm::reduce_scatter_dim";
        let Parts { rows, cols } = expect_parts(OP, ("y", y.shape()), ("x", x.shape()), dim, self.world())?;
        if rows == 1 {
            return self.reduce_scatter(stream, x, y, op);
        }
        self.expect_stream(OP, stream)?;
        workspace.expect_shape(OP, "workspace", x.shape())?;
        workspace.expect_contiguous(OP, "workspace")?;
        x.expect_contiguous(OP, "x")?;
        check_aliases(
            OP,
            &[("x", Some(&x))],
            &[(("y", Some(&y)), &[]), (("workspace", Some(&workspace)), &[])],
        )?;
        let swap = Swap::new(OP, [rows, self.world(), cols * size_of::<T>()], workspace.addr() | x.addr())?;
        let mut group = Group::new();
        group.reduce_scatter(self, workspace.alias(), y, op)?;
        swap.run(OP, stream, x, &mut workspace)?;
        group.end()
    }
}

/// A launch of `hip/swap_axes.hip`.
struct Swap {
    packets: bool,
    /// `[rows, parts, cols]` of x, cols in units.
    shape: [u32; 3],
    units: u32,
}

impl Swap {
    /// Of `[rows, parts]` runs of bytes. `addresses` has the low bits of all.
    fn new(op: &'static str, [rows, parts, bytes]: [usize; 3], addresses: u64) -> Result<Self> {
        let packets = bytes.is_multiple_of(PACKET) && addresses.is_multiple_of(PACKET as u64);
        let cols = if packets { bytes / PACKET } else { bytes };
        // The kernel counts units, those of a step past the last one, too, in 32 bits.
        let limit = 1u64 << 31;
        let units = (rows * parts * cols) as u64;
        if units >= limit {
            let unit = if packets { "packets of 16 bytes" } else { "bytes" };
            return Err(Error::too_large(op, "y", format!("{units} {unit}"), limit));
        }
        Ok(Self { packets, shape: [rows as u32, parts as u32, cols as u32], units: units as u32 })
    }

    fn run<T: Element>(
        &self,
        op: &'static str,
        stream: &Stream,
        x: TensorView<T>,
        y: &mut TensorViewMut<T>,
    ) -> Result<()> {
        if self.units == 0 {
            return Ok(());
        }
        let [rows, parts, cols] = self.shape;
        let kernel = stream.kernel(KERNELS[usize::from(!self.packets)])?;
        let mut launch = stream.launch(op);
        let params = Params {
            x: launch.input_address("x", &x)?,
            y: launch.output_address("y", y)?,
            units: self.units,
            rows,
            parts,
            cols,
            parts_inverse: u32::MAX / parts,
            cols_inverse: u32::MAX / cols,
        };
        let most = 4 * stream.device().info().compute_units as usize;
        let grid = (self.units as usize).div_ceil(BATCH * THREADS).clamp(1, most);
        // SAFETY: x and y are contiguous and have `units` units each; the indices of both are those of `[rows, parts, cols]`.
        unsafe { launch.run(&kernel, LaunchConfig::grid_1d(grid), &params) }
    }
}
