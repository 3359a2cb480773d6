//! Kernel launches.

use crate::buffer::DeviceBuffer;
use crate::driver::Dispatch;
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::global::GlobalLayout;
use crate::module::{Kernel, LoadedKernel};
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut, sealed::Operand as _};
use bytemuck::Pod;
use std::ffi::c_void;
use std::marker::PhantomData;
#[cfg(feature = "emu")]
use std::sync::Arc;

/// Device memory as work of the host accesses it: [`Launch::run_on_host`].
#[cfg(feature = "emu")]
pub trait HostAccess {
    /// Copies from an address.
    ///
    /// # Errors
    /// [`Error::Emulator`] where no buffer is.
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<()>;
    /// Copies to an address.
    ///
    /// # Errors
    /// [`Error::Emulator`] where no buffer is.
    fn write(&self, addr: u64, data: &[u8]) -> Result<()>;
}

/// Work of the host in the order of an emulated stream: [`Launch::run_on_host`].
#[cfg(feature = "emu")]
pub type HostWork = dyn Fn(&dyn HostAccess) -> Result<()> + Send + Sync;

/// The size of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchConfig {
    /// Blocks along x, y and z.
    pub grid: [usize; 3],
    /// Threads of a block along x, y and z; by default what the kernel is compiled for ([`LoadedKernel::block`]).
    pub block: Option<[u32; 3]>,
    /// LDS in bytes, on top of what the kernel declares.
    pub dynamic_lds: usize,
}

impl LaunchConfig {
    /// `x` blocks.
    pub const fn grid_1d(x: usize) -> Self {
        Self::grid_3d(x, 1, 1)
    }

    /// `x * y` blocks.
    pub const fn grid_2d(x: usize, y: usize) -> Self {
        Self::grid_3d(x, y, 1)
    }

    /// `x * y * z` blocks.
    pub const fn grid_3d(x: usize, y: usize, z: usize) -> Self {
        Self { grid: [x, y, z], block: None, dynamic_lds: 0 }
    }

    /// With this block instead of the kernel's own.
    pub const fn with_block(self, block: [u32; 3]) -> Self {
        Self { block: Some(block), ..self }
    }

    /// With dynamic LDS, in bytes.
    pub const fn with_dynamic_lds(self, bytes: usize) -> Self {
        Self { dynamic_lds: bytes, ..self }
    }
}

/// A tensor as bulk tensor copies of NVIDIA's Hopper read it, in boxes whose rows of 128 bytes are swizzled: hk/tensor_map.h.
#[derive(Debug, Clone, Copy)]
pub struct TensorMap<'a> {
    /// `bf16` or `f16`.
    pub dtype: DType,
    /// Its address; on 16 bytes.
    pub data: u64,
    /// Its sizes in elements, the contiguous axis first; up to five.
    pub sizes: &'a [u64],
    /// Strides of the other axes, in bytes; multiples of 16.
    pub strides: &'a [u64],
    /// Sizes of a box: up to 128 bytes of the contiguous axis, up to 256 elements of another.
    pub tile: &'a [u32],
    /// L2 reads 256 bytes of a row at a time, rather than 128.
    pub long_reads: bool,
}

/// A launch in preparation: the only way from a tensor to the [`GlobalLayout`] that a kernel takes, so that the stream
/// always knows the memory of its queued work. The borrow of each tensor lasts until the launch is queued.
///
/// ```no_run
/// # use hk_core::*;
/// # #[repr(C)] #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
/// struct Params { x: GlobalLayout, y: GlobalLayout }
/// # fn f(stream: &Stream, kernel: &Kernel<Params>, x: TensorView<f32>, mut y: TensorViewMut<f32>) -> Result<()> {
/// let mut launch = stream.launch("scale");
/// let params = Params { x: launch.input("x", &x)?, y: launch.output("y", &mut y)? };
/// // SAFETY: the kernel reads x and writes y within the given shapes.
/// unsafe { launch.run(kernel, LaunchConfig::grid_1d(x.shape()[0]), &params) }
/// # }
/// ```
#[must_use = "nothing happens until `run`"]
pub struct Launch<'a> {
    stream: &'a Stream,
    op: &'static str,
    tensors: PhantomData<&'a mut ()>,
}

impl<'a> Launch<'a> {
    pub(crate) fn new(stream: &'a Stream, op: &'static str) -> Self {
        Self { stream, op, tensors: PhantomData }
    }

    /// A tensor that the kernel reads.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`], [`Error::Shape`] beyond four axes ([`TensorView::flatten_rows`] helps),
    /// [`Error::TooLarge`] for an axis longer than `u32::MAX`.
    pub fn input<T: Element>(
        &mut self,
        arg: &'static str,
        tensor: &TensorView<'a, T>,
    ) -> Result<GlobalLayout> {
        tensor.storage().used_on(self.op, arg, self.stream)?;
        GlobalLayout::new(self.op, arg, tensor.addr(), tensor.layout())
    }

    /// The address of a tensor that the kernel reads, for kernels that take its layout in a form of their own.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`].
    pub fn input_address<T: Element>(
        &mut self,
        arg: &'static str,
        tensor: &TensorView<'a, T>,
    ) -> Result<u64> {
        tensor.storage().used_on(self.op, arg, self.stream)?;
        Ok(tensor.addr())
    }

    /// A tensor that the kernel writes.
    ///
    /// # Errors
    /// As [`input`](Self::input).
    pub fn output<'t: 'a, T: Element>(
        &mut self,
        arg: &'static str,
        tensor: &mut TensorViewMut<'t, T>,
    ) -> Result<GlobalLayout> {
        tensor.storage().used_on(self.op, arg, self.stream)?;
        GlobalLayout::new(self.op, arg, tensor.addr(), tensor.layout())
    }

    /// The address of a tensor that the kernel writes, for kernels that take its layout in a form of their own.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`].
    pub fn output_address<'t: 'a, T: Element>(
        &mut self,
        arg: &'static str,
        tensor: &mut TensorViewMut<'t, T>,
    ) -> Result<u64> {
        tensor.storage().used_on(self.op, arg, self.stream)?;
        Ok(tensor.addr())
    }

    /// The address of memory that kernels of several devices access while they run: of this device, or of one that it has peer
    /// access to ([`Device::enable_peer_access`](crate::Device::enable_peer_access)). Who reads and writes it when is the
    /// kernels' business.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`] for memory of a device without peer access.
    pub fn shared_address<T: Element>(
        &mut self,
        arg: &'static str,
        buffer: &'a DeviceBuffer<T>,
    ) -> Result<u64> {
        buffer.storage.shared_on(self.op, arg, self.stream)?;
        Ok(buffer.storage.addr())
    }

    /// An input that may be absent: [`GlobalLayout::ABSENT`] then.
    ///
    /// # Errors
    /// As [`input`](Self::input).
    pub fn optional_input<T: Element>(
        &mut self,
        arg: &'static str,
        tensor: Option<&TensorView<'a, T>>,
    ) -> Result<GlobalLayout> {
        tensor.map_or(Ok(GlobalLayout::ABSENT), |t| self.input(arg, t))
    }

    /// An output that may be absent: [`GlobalLayout::ABSENT`] then.
    ///
    /// # Errors
    /// As [`input`](Self::input).
    pub fn optional_output<'t: 'a, T: Element>(
        &mut self,
        arg: &'static str,
        tensor: Option<&mut TensorViewMut<'t, T>>,
    ) -> Result<GlobalLayout> {
        tensor.map_or(Ok(GlobalLayout::ABSENT), |t| self.output(arg, t))
    }

    /// What a kernel takes for bulk tensor copies of a tensor whose address this launch has given: `hk::TensorMap` of hk/tensor_map.h.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on devices without bulk tensor copies, and for other dtypes than 16-bit floats; [`Error::Argument`] for
    /// other numbers of axes than two to five, or sizes, strides or a box of another number; [`Error::Driver`] for values that the
    /// driver refuses.
    pub fn tensor_map(&self, arg: &'static str, tensor: &TensorMap) -> Result<[u64; 16]> {
        let axes = tensor.sizes.len();
        if !(2..=5).contains(&axes) || tensor.strides.len() != axes - 1 || tensor.tile.len() != axes {
            let got =
                format!("{axes} sizes, {} strides, a box of {}", tensor.strides.len(), tensor.tile.len());
            return Err(Error::argument(
                self.op,
                arg,
                got,
                "two to five axes, a stride for each but the first, a box of them",
            ));
        }
        let map = self.stream.driver().tensor_map(self.op, tensor)?;
        map.ok_or_else(|| Error::unsupported(self.op, "bulk tensor copies", "only Hopper GPUs have them"))
    }

    /// Queues the kernel and returns. A failure while it runs is reported by the stream's next synchronising call.
    ///
    /// # Errors
    /// [`Error::CodeObject`] if `params` has not the size of the kernel's parameter struct;
    /// [`Error::Argument`] for an empty grid or block; [`Error::Resource`] for more blocks, threads or LDS than the
    /// device or the kernel has; [`Error::DeviceMismatch`] for a kernel of another device; [`Error::Driver`].
    ///
    /// # Safety
    /// `P` is the kernel's parameter struct, field by field, as it is where hk-build has generated it. With these parameters and this grid the kernel stays
    /// within the tensors that this launch has been given, writes only those given as outputs, and terminates.
    pub unsafe fn run<P: Pod>(self, kernel: &Kernel<P>, config: LaunchConfig, params: &P) -> Result<()> {
        let dispatch = self.check(kernel, &config, bytemuck::bytes_of(params))?;
        self.stream.driver().launch(self.stream.handle(), &kernel.function, &dispatch)
    }

    /// Calls another library that queues work on GPUs of this process, as RCCL: with the device made current on this thread, and the
    /// driver's own handle of the stream (`hipStream_t`, `cudaStream_t`). What the library queues can be captured if it says so.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on the emulator; [`Error::Driver`]; errors of `call`.
    ///
    /// # Safety
    /// What `call` queues on the stream stays within the tensors that this launch has been given, writes only those given as outputs,
    /// and terminates.
    pub unsafe fn run_foreign<R>(self, call: impl FnOnce(*mut c_void) -> Result<R>) -> Result<R> {
        match self.stream.driver().foreign(self.stream.handle())? {
            Some(raw) => call(raw),
            None => {
                Err(Error::unsupported(self.op, self.stream.device().spec(), "the device has no runtime"))
            }
        }
    }

    /// Queues work of the host in the order of an emulated stream: it may take its time, and wait for work of other streams. A graph has
    /// it like any other work. A failure is reported by the stream's next synchronising call.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on hardware.
    ///
    /// # Safety
    /// The work accesses the tensors that this launch has been given, writes only those given as outputs, and terminates.
    #[cfg(feature = "emu")]
    pub unsafe fn run_on_host(self, work: Arc<HostWork>) -> Result<()> {
        self.stream.driver().host_work(self.stream.handle(), work)
    }

    fn check<'b>(
        &self,
        kernel: &LoadedKernel,
        config: &LaunchConfig,
        args: &'b [u8],
    ) -> Result<Dispatch<'b>> {
        let (op, device) = (self.op, self.stream.device());
        if kernel.device_id != device.id() {
            let (got, want) = (kernel.device_spec.clone(), device.spec().to_owned());
            return Err(Error::DeviceMismatch { op, arg: "kernel", got, want });
        }
        let info = device.info();
        let want = kernel.info().explicit_arg_bytes;
        if args.len() != want as usize {
            let got = args.len();
            let reason = format!("the kernel takes {want} bytes of parameters, {op} passes {got}");
            return Err(Error::CodeObject { object: kernel.name().to_owned(), reason });
        }
        let exceeded = |resource, requested: u64, limit: u64, device: &str| Error::Resource {
            op,
            kernel: kernel.name().to_owned(),
            resource,
            requested,
            limit,
            device: device.to_owned(),
        };

        let block = config.block.unwrap_or(kernel.block());
        let threads: u64 = block.iter().map(|&n| u64::from(n)).fold(1, u64::saturating_mul);
        if threads == 0 {
            return Err(Error::argument(op, "block", format!("{block:?}"), "at least one thread"));
        }
        if threads > kernel.info().max_threads.into() {
            let limit = kernel.info().max_threads.into();
            return Err(exceeded("threads per block", threads, limit, "the kernel"));
        }
        if let Some(required) = kernel.info().reqd_workgroup_size.filter(|&r| r != block) {
            let want = format!("{required:?}, what the kernel is compiled for");
            return Err(Error::argument(op, "block", format!("{block:?}"), want));
        }

        let mut grid = [0; 3];
        for i in 0..3 {
            let resource = ["blocks in x", "blocks in y", "blocks in z"][i];
            // The dispatch packet of AMD GPUs counts threads along each axis in 32 bits.
            let most = if info.arch.is_amd() { u32::MAX / block[i] } else { u32::MAX };
            let limit = info.max_grid[i].min(most);
            grid[i] = match u32::try_from(config.grid[i]) {
                Ok(0) => {
                    return Err(Error::argument(
                        op,
                        "grid",
                        format!("{:?}", config.grid),
                        "at least one block",
                    ));
                }
                Ok(n) if n <= limit => n,
                _ => return Err(exceeded(resource, config.grid[i] as u64, limit.into(), &info.spec)),
            };
        }

        let lds = u64::from(kernel.info().lds_bytes).saturating_add(config.dynamic_lds as u64);
        if lds > info.lds_per_workgroup.into() {
            return Err(exceeded("bytes of LDS", lds, info.lds_per_workgroup.into(), &info.spec));
        }
        let dynamic_lds = config.dynamic_lds as u32; // below the limit, which is a u32
        Ok(Dispatch { op, grid, block, dynamic_lds, args })
    }
}
