//! Code objects and the kernels in them.

use crate::device::Device;
use crate::driver::Handle;
use crate::error::{Error, Result};
use crate::external;
use crate::once::OnceMap;
use crate::params::KernelRef;
use hk_codeobj::CodeObject;
use hk_codeobj::{Arch, Kernel as KernelInfo};
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

/// One HIP source, compiled for every target and embedded in the program. Made by the build script of a family crate.
#[derive(Debug)]
pub struct CodeObjects {
    name: &'static str,
    images: &'static [(Arch, &'static [u8])],
    /// Why there are no images, and what to do about it.
    missing: &'static str,
    /// The package, if the code objects are read from a folder.
    package: Option<&'static str>,
}

impl CodeObjects {
    /// The code objects of the source `name`, one per target.
    pub const fn embedded(name: &'static str, images: &'static [(Arch, &'static [u8])]) -> Self {
        Self { name, images, missing: "", package: None }
    }

    /// No code objects: there was no compiler. `why` says so and what to do.
    pub const fn missing(name: &'static str, why: &'static str) -> Self {
        Self { name, images: &[], missing: why, package: None }
    }

    /// Code objects that are read from the folder `HK_KERNELS` when they are used, as `PACKAGE.NAME.TARGET.co`. A program
    /// built so starts before its kernels are compiled, and uses kernels that were compiled after it.
    pub const fn external(package: &'static str, name: &'static str) -> Self {
        Self { name, images: &[], missing: "", package: Some(package) }
    }

    /// Name of the source, without directory and extension.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// The targets it was compiled for, with the bytes.
    pub const fn images(&self) -> &'static [(Arch, &'static [u8])] {
        self.images
    }

    /// The code object for `arch`; that for sm_90 where there is none for sm_90a.
    ///
    /// # Errors
    /// [`Error::Compiler`] if it was not compiled for that, with the remedy.
    pub fn image(&self, arch: Arch) -> Result<&'static [u8]> {
        match self.compiled(arch) {
            Err(_) if arch == Arch::Sm90a => self.compiled(Arch::Sm90),
            image => image,
        }
    }

    fn compiled(&self, arch: Arch) -> Result<&'static [u8]> {
        if let Some((_, image)) = self.images.iter().find(|(a, _)| *a == arch) {
            return Ok(image);
        }
        if let Some(package) = self.package {
            let compiler =
                |remedy| Error::Compiler { object: self.name.into(), target: arch.to_string(), remedy };
            return external::image(package, self.name, arch).map_err(compiler);
        }
        let remedy = if self.missing.is_empty() {
            let have: Vec<_> = self.images.iter().map(|(a, _)| a.name()).collect();
            format!("it was built for {} only; build with HK_TARGETS={arch}", have.join(", "))
        } else {
            self.missing.to_owned()
        };
        Err(Error::Compiler { object: self.name.into(), target: arch.to_string(), remedy })
    }
}

/// A kernel on a device that takes the parameter struct `P`, ready to be launched. Made by
/// [`Stream::kernel`](crate::Stream::kernel) from a [`KernelRef`]; what it is lies in [`LoadedKernel`].
pub struct Kernel<P> {
    loaded: Arc<LoadedKernel>,
    params: PhantomData<fn(&P)>,
}

impl<P> Clone for Kernel<P> {
    fn clone(&self) -> Self {
        Self { loaded: Arc::clone(&self.loaded), params: PhantomData }
    }
}

impl<P> Deref for Kernel<P> {
    type Target = LoadedKernel;

    fn deref(&self) -> &LoadedKernel {
        &self.loaded
    }
}

impl<P> fmt::Debug for Kernel<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.loaded.fmt(f)
    }
}

/// A kernel that is loaded on a device.
///
/// Loading has checked it against the library's contract: it is compiled for the device, takes one parameter
/// struct by value, and its static LDS and threads are within the device's limits.
pub struct LoadedKernel {
    pub(crate) device_id: u64,
    pub(crate) device_spec: String,
    pub(crate) function: Handle,
    info: KernelInfo,
}

impl LoadedKernel {
    /// Name of the entry point.
    pub fn name(&self) -> &str {
        &self.info.name
    }

    /// What the code object says about it: arguments, registers, LDS, threads.
    pub fn info(&self) -> &KernelInfo {
        &self.info
    }

    /// The block it is launched with by default: the required size if it has one, else the largest number of
    /// threads it is compiled for, along x.
    pub fn block(&self) -> [u32; 3] {
        self.info.reqd_workgroup_size.unwrap_or([self.info.max_threads, 1, 1])
    }
}

impl fmt::Debug for LoadedKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernel({} on {})", self.name(), self.device_spec)
    }
}

/// A code object on a device, and the kernels of it that were asked for.
pub(crate) struct Loaded {
    object: CodeObject,
    module: Handle,
    kernels: OnceMap<String, Arc<LoadedKernel>>,
}

/// The code objects on a device, by the address of their [`CodeObjects`].
#[derive(Default)]
pub(crate) struct Modules(OnceMap<usize, Arc<Loaded>>);

impl Modules {
    /// The kernels that were asked for.
    pub fn kernels(&self) -> Vec<Arc<LoadedKernel>> {
        self.0.values().iter().flat_map(|loaded| loaded.kernels.values()).collect()
    }
}

/// The kernel, loaded once per device.
pub(crate) fn kernel<P>(device: &Device, kernel: KernelRef<P>) -> Result<Kernel<P>> {
    let (objects, name) = (kernel.objects(), kernel.name());
    let key = std::ptr::from_ref(objects).addr();
    let module = device.modules().0.get_or_try_init(&key, || load(device, objects).map(Arc::new))?;
    let init = || load_kernel(device, objects, &module, name).map(Arc::new);
    Ok(Kernel { loaded: module.kernels.get_or_try_init(name, init)?, params: PhantomData })
}

fn load(device: &Device, objects: &'static CodeObjects) -> Result<Loaded> {
    let image = objects.image(device.arch())?;
    let wrong = |reason: String| Error::CodeObject { object: objects.name.into(), reason };
    let object = CodeObject::parse(image).map_err(|e| wrong(e.to_string()))?;
    let runs = object.arch == device.arch() || (object.arch, device.arch()) == (Arch::Sm90, Arch::Sm90a);
    if !runs {
        return Err(wrong(format!("compiled for {}, the device is {}", object.arch, device.arch())));
    }
    let module = device.driver().load_module(objects.name, image)?;
    Ok(Loaded { object, module, kernels: OnceMap::default() })
}

fn load_kernel(
    device: &Device,
    objects: &CodeObjects,
    loaded: &Loaded,
    symbol: &str,
) -> Result<LoadedKernel> {
    let wrong = |reason: String| Error::CodeObject { object: format!("{}: {symbol}", objects.name), reason };
    let info = loaded.object.kernel(symbol).ok_or_else(|| {
        let have: Vec<_> = loaded.object.kernels.iter().map(|k| k.name.as_str()).collect();
        wrong(format!("no such kernel; it has {}", have.join(", ")))
    })?;
    check_contract(device, info).map_err(wrong)?;
    let function = device.driver().function(&loaded.module, symbol)?;
    let mut info = info.clone();
    device.driver().resources(&function, &mut info)?;
    Ok(LoadedKernel { device_id: device.id(), device_spec: device.spec().into(), function, info })
}

/// What every kernel of the library must be.
fn check_contract(device: &Device, kernel: &KernelInfo) -> Result<(), String> {
    let info = device.info();
    let mut explicit = kernel.args.iter().filter(|a| !a.hidden());
    match (explicit.next(), explicit.next()) {
        (Some(params), None) if params.kind == "by_value" && params.offset == 0 => {}
        _ => {
            let kinds: Vec<_> = kernel.args.iter().filter(|a| !a.hidden()).map(|a| a.kind.as_str()).collect();
            return Err(format!(
                "a kernel takes one parameter struct by value, this one takes [{}]",
                kinds.join(", ")
            ));
        }
    }
    if kernel.wave_size != info.wave_size {
        return Err(format!("wave size {}, the device has {}", kernel.wave_size, info.wave_size));
    }
    if kernel.max_threads == 0 || kernel.max_threads > info.max_threads_per_workgroup {
        let limit = info.max_threads_per_workgroup;
        return Err(format!("compiled for {} threads per block, the device has {limit}", kernel.max_threads));
    }
    if kernel.lds_bytes > info.lds_per_workgroup {
        let limit = info.lds_per_workgroup;
        return Err(format!("{} bytes of static LDS, the device has {limit}", kernel.lds_bytes));
    }
    if kernel.uses_dynamic_stack {
        return Err("the compiler could not bound its stack".into());
    }
    Ok(())
}
