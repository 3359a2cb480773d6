//! Modules, functions and launches.

use std::backtrace::Backtrace;
use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_uint};
use std::sync::{Arc, LazyLock, Mutex};

use hk_codeobj::{Kernel, workgroups_per_cu};
use hk_emu::{Dispatch, Fault, LoadError, Space};

use crate::abi::{Dim3, FuncAttributes, KernelNodeParams};
use crate::capture;
use crate::error::{HipError, Result};
use crate::host::{get, put, put_if, read, string, write};
use crate::hostcall;
use crate::image;
use crate::memory::{ManagedGlobal, Mapped, add_global, remove_globals};
use crate::queue;
use crate::runtime::{Device, api, lock, runtime, say};
use crate::sanitize;
use crate::stream::{StreamRef, record, stream};
use crate::work::{self, Work};

/// A code object on a device.
pub(crate) struct Module {
    pub device: usize,
    module: Arc<hk_emu::Module>,
    /// Handles of kernels, by name.
    functions: Mutex<HashMap<String, u64>>,
    /// Managed variables whose memory is the module's own.
    managed: HashMap<String, ManagedGlobal>,
}

/// A kernel of a module.
pub(crate) struct Function {
    pub module: Arc<Module>,
    pub name: CString,
}

impl Function {
    fn name(&self) -> &str {
        self.name.to_str().unwrap_or_default()
    }

    pub fn kernel(&self) -> Result<&Kernel> {
        let kernel = self.module.module.code_object().kernel(self.name());
        kernel.ok_or(HipError::INVALID_DEVICE_FUNCTION)
    }

    fn device(&self) -> Result<&'static Device> {
        runtime().devices.get(self.module.device).ok_or(HipError::INVALID_HANDLE)
    }
}

/// Loads a code object. `program` has the addresses of managed variables that the program keeps.
///
/// # Errors
/// `hipErrorNoBinaryForGpu`, `hipErrorOutOfMemory`, `hipErrorInvalidImage`.
pub(crate) fn load(device: &Device, image: &[u8], program: &HashMap<String, u64>) -> Result<u64> {
    device.check()?;
    let module = device.machine.load(image).map_err(|error| {
        say!("{error}");
        match error {
            LoadError::Arch { .. } => HipError::NO_BINARY_FOR_GPU,
            LoadError::Memory(_) => HipError::OUT_OF_MEMORY,
            _ => HipError::INVALID_IMAGE,
        }
    })?;
    let managed = bind_managed(device, &module, program)?;
    let module = Module { device: device.ordinal, module, functions: Mutex::default(), managed };
    Ok(runtime().modules.insert(|_| module))
}

/// Points managed variables to their memory, which is new unless `program` has it. Clang makes two symbols of `x`: the pointer
/// `x` that kernels follow, and `x.managed` with the initial value.
fn bind_managed(
    device: &Device,
    module: &hk_emu::Module,
    program: &HashMap<String, u64>,
) -> Result<HashMap<String, ManagedGlobal>> {
    let mut managed = HashMap::new();
    let broken = |_| HipError::INVALID_IMAGE;
    let globals: HashMap<String, (u64, u64)> =
        module.globals().into_iter().map(|(name, addr, size)| (name, (addr, size))).collect();
    // No more than the image has, however its symbols overlap.
    let mut room: u64 = module.code_object().segments.iter().map(|s| s.mem_size).sum();
    for (symbol, &(initial, size)) in &globals {
        let Some(name) = symbol.strip_suffix(".managed").filter(|_| size != 0) else { continue };
        let Some(&(pointer, 8)) = globals.get(name) else { continue };
        room = room.checked_sub(size).ok_or(HipError::INVALID_IMAGE)?;
        let addr = match program.get(name) {
            Some(addr) => *addr,
            None => {
                let variable = ManagedGlobal::new(device, device.ordinal, size)?;
                let addr = variable.addr();
                // From the device: addresses in it are relocated.
                let mut value = vec![0; size as usize];
                device.machine.read(initial, &mut value).map_err(broken)?;
                write(addr, &value)?;
                managed.insert(name.to_owned(), variable);
                addr
            }
        };
        device.machine.write(pointer, &addr.to_le_bytes()).map_err(broken)?;
    }
    Ok(managed)
}

pub(crate) fn unload(handle: u64) -> Result {
    if handle == 0 {
        return Err(HipError::INVALID_HANDLE);
    }
    let module = runtime().modules.remove(handle).ok_or(HipError::NOT_FOUND)?;
    queue::synchronize_device(Some(module.device));
    for function in lock(&module.functions).values() {
        runtime().functions.remove(*function);
    }
    remove_globals(handle);
    Ok(())
}

fn load_to(module: *mut u64, image: impl FnOnce(&Device) -> Result<Vec<u8>>) -> Result {
    let device = runtime().current()?;
    put(module, 0)?;
    put(module, load(device, &image(device)?, &HashMap::new())?)
}

fn load_data(module: *mut u64, addr: u64) -> Result {
    if addr == 0 {
        return Err(HipError::INVALID_VALUE);
    }
    load_to(module, |device| image::in_memory(addr, device.arch))
}

/// The handle of a kernel.
///
/// # Errors
/// `hipErrorInvalidHandle`, `hipErrorNotFound`.
pub(crate) fn function(module: u64, name: &str) -> Result<u64> {
    let module = runtime().modules.get(module).ok_or(HipError::INVALID_HANDLE)?;
    if module.module.code_object().kernel(name).is_none() {
        return Err(HipError::NOT_FOUND);
    }
    let mut functions = lock(&module.functions);
    if let Some(handle) = functions.get(name) {
        return Ok(*handle);
    }
    let c_name = CString::new(name).map_err(|_| HipError::NOT_FOUND)?;
    let handle = runtime().functions.insert(|_| Function { module: module.clone(), name: c_name });
    functions.insert(name.to_owned(), handle);
    Ok(handle)
}

/// Address and size of a variable.
///
/// # Errors
/// `hipErrorInvalidHandle`, `hipErrorNotFound`.
pub(crate) fn global(handle: u64, name: &str) -> Result<(u64, u64)> {
    let module = runtime().modules.get(handle).ok_or(HipError::INVALID_HANDLE)?;
    if let Some(managed) = module.managed.get(name) {
        return Ok((managed.addr(), managed.size));
    }
    let (addr, size) = module.module.global(name).ok_or(HipError::NOT_FOUND)?;
    add_global(runtime().device(module.device as c_int)?, handle, addr, size);
    Ok((addr, size))
}

pub(crate) fn known_function(handle: u64) -> Result<Arc<Function>> {
    runtime().functions.get(handle).ok_or(HipError::INVALID_HANDLE)
}

/// How a launch passes its arguments.
#[derive(Clone, Copy)]
pub(crate) struct Arguments {
    /// An array of pointers, one to each argument.
    pub params: u64,
    /// Keys and values that name a buffer with all of them.
    pub extra: u64,
}

/// Keys of `extra`.
const BUFFER_POINTER: u64 = 1;
const BUFFER_SIZE: u64 = 2;
const END: u64 = 3;

impl Arguments {
    /// The explicit arguments as the kernel's metadata lays them out.
    pub fn gather(self, kernel: &Kernel) -> Result<Vec<u8>> {
        let mut bytes = vec![0; kernel.explicit_arg_bytes as usize];
        match self {
            Arguments { params: 0, extra: 0 } => {
                if !bytes.is_empty() {
                    return Err(HipError::INVALID_VALUE);
                }
            }
            Arguments { params, extra: 0 } => {
                for (i, arg) in kernel.args.iter().filter(|a| !a.hidden()).enumerate() {
                    let from = get((params as *const u64).wrapping_add(i))?;
                    let at = arg.offset as usize..arg.offset as usize + arg.size as usize;
                    read(from, bytes.get_mut(at).ok_or(HipError::INVALID_VALUE)?)?;
                }
            }
            Arguments { params: 0, extra } => {
                let (buffer, size) = extra_buffer(extra)?;
                if size < bytes.len() as u64 {
                    say!("{size} bytes of arguments, {} takes {}", kernel.name, bytes.len());
                    return Err(HipError::INVALID_VALUE);
                }
                // A C structure may have padding behind its last member.
                read(buffer, &mut bytes)?;
            }
            _ => return Err(HipError::INVALID_VALUE),
        }
        Ok(bytes)
    }
}

fn extra_buffer(extra: u64) -> Result<(u64, u64)> {
    let entry = |i: usize| get((extra as *const u64).wrapping_add(i));
    let (mut buffer, mut size) = (0, 0);
    for i in [0, 2, 4] {
        match entry(i)? {
            BUFFER_POINTER => buffer = entry(i + 1)?,
            BUFFER_SIZE => size = get(entry(i + 1)? as *const u64)?,
            END => return Ok((buffer, size)),
            _ => break,
        }
    }
    Err(HipError::INVALID_VALUE)
}

/// A launch; the grid is in blocks.
#[derive(Clone, Copy)]
pub(crate) struct Launch {
    /// What the program launches: a host function, or the handle of a kernel.
    pub handle: u64,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub dynamic_lds: u64,
    pub on: StreamRef,
    pub arguments: Arguments,
    /// Events around it; 0 is none.
    pub start: u64,
    pub stop: u64,
    /// All blocks are resident at a time, and can wait for each other.
    pub cooperative: bool,
}

/// The blocks of a grid, or the threads of a block.
pub(crate) fn count_of(sizes: [u32; 3]) -> u64 {
    sizes.iter().fold(1, |n: u64, size| n.saturating_mul(u64::from(*size)))
}

/// Checks the sizes of a launch on the device of its kernel, as HIP does.
///
/// # Errors
/// `hipErrorInvalidValue`, `hipErrorInvalidConfiguration`, `hipErrorLaunchFailure`.
pub(crate) fn check_sizes(function: &Function, grid: [u32; 3], block: [u32; 3], dynamic_lds: u64) -> Result {
    let (kernel, device) = (function.kernel()?, function.device()?);
    if grid.contains(&0) {
        return Err(HipError::INVALID_VALUE);
    }
    if block.contains(&0) {
        return Err(HipError::INVALID_CONFIGURATION);
    }
    let threads = count_of(block);
    if threads > device.arch.max_workgroup_threads().into() {
        return Err(HipError::INVALID_VALUE);
    }
    if threads > kernel.max_threads.into() {
        say!("{threads} threads in a block, {} is compiled for {}", kernel.name, kernel.max_threads);
        return Err(HipError::LAUNCH_FAILURE);
    }
    let lds = u64::from(kernel.lds_bytes).saturating_add(dynamic_lds);
    if lds > device.arch.lds_bytes().into() {
        say!("{}: {lds} bytes of LDS, {} has {}", kernel.name, device.arch, device.arch.lds_bytes());
        return Err(HipError::INVALID_VALUE);
    }
    Ok(())
}

/// Whether the device holds all blocks of a grid at a time.
///
/// # Errors
/// `hipErrorCooperativeLaunchTooLarge`.
fn check_resident(function: &Function, grid: [u32; 3], block: [u32; 3], dynamic_lds: u64) -> Result {
    let threads = u32::try_from(count_of(block)).map_err(|_| HipError::INVALID_VALUE)?;
    let each = u64::from(resident_blocks(function, threads, dynamic_lds)?);
    let (blocks, resident) = (count_of(grid), each * function.device()?.compute_units() as u64);
    if blocks > resident {
        say!(
            "{}: {blocks} blocks in a cooperative launch, {resident} are resident at a time",
            function.name()
        );
        return Err(HipError::COOPERATIVE_LAUNCH_TOO_LARGE);
    }
    Ok(())
}

/// A cooperative launch, whose arguments HIP checks more than those of others.
///
/// # Errors
/// `hipErrorInvalidConfiguration`, `hipErrorCooperativeLaunchTooLarge`, and those of other launches.
pub(crate) fn launch_cooperative(
    (function, handle): (&Arc<Function>, u64),
    grid: [u32; 3],
    block: [u32; 3],
    dynamic_lds: u64,
    on: StreamRef,
    params: u64,
) -> Result {
    let threads = grid.iter().zip(block).map(|(blocks, threads)| u64::from(*blocks) * u64::from(threads));
    if threads.into_iter().any(|n| n == 0 || n > u32::MAX.into()) {
        return Err(HipError::INVALID_CONFIGURATION);
    }
    let arguments = Arguments { params, extra: 0 };
    let (start, stop, cooperative) = (0, 0, true);
    launch(function, &Launch { handle, grid, block, dynamic_lds, on, arguments, start, stop, cooperative })
}

/// Checks a launch as HIP does, and runs it or adds it to the graph that the stream captures.
pub(crate) fn launch(function: &Arc<Function>, launch: &Launch) -> Result {
    let Launch { grid, block, on, .. } = *launch;
    on.device.check()?;
    if capture::captures(on)? {
        if launch.cooperative {
            return Err(HipError::STREAM_CAPTURE_UNSUPPORTED);
        }
        let params = KernelNodeParams {
            block: Dim3 { x: block[0], y: block[1], z: block[2] },
            pad0: 0,
            extra: launch.arguments.extra,
            function: launch.handle,
            grid: Dim3 { x: grid[0], y: grid[1], z: grid[2] },
            pad1: 0,
            params: launch.arguments.params,
            dynamic_lds: u32::try_from(launch.dynamic_lds).map_err(|_| HipError::INVALID_VALUE)?,
            pad2: 0,
        };
        let kernel = work::Kernel::of(function, &params, (launch.start, launch.stop))?;
        return capture::add(on, Work::Kernel(kernel)).map(drop);
    }
    check_sizes(function, grid, block, launch.dynamic_lds)?;
    check_device(function, on)?;
    if launch.cooperative {
        check_resident(function, grid, block, launch.dynamic_lds)?;
    }
    let args = launch.arguments.gather(function.kernel()?)?;
    let dispatch = Dispatch { grid, block, dynamic_lds: launch.dynamic_lds as u32, args: &args };
    on.device.machine.check(&function.module.module, function.name(), &dispatch).map_err(|fault| {
        say!("{fault}");
        HipError::INVALID_VALUE
    })?;
    if launch.start != 0 {
        record(launch.start, on)?;
    }
    let (function, work, from) = (function.clone(), *launch, sanitize::options().launched());
    let ticket =
        queue::add(on, &[], move || work::complain(on, execute(&function, &work, &args, from.as_ref())));
    if *BLOCKING {
        queue::wait(ticket);
    }
    if launch.stop != 0 { record(launch.stop, on) } else { Ok(()) }
}

/// Whether launches wait for their kernels, by the variables of ROCm.
static BLOCKING: LazyLock<bool> = LazyLock::new(|| {
    let set = |name| std::env::var(name).is_ok_and(|value| !value.is_empty() && value != "0");
    set("HIP_LAUNCH_BLOCKING") || set("AMD_SERIALIZE_KERNEL")
});

/// Whether a failed assertion of a kernel ends the program, as in ROCm, or is an error of the device.
static ABORTS: LazyLock<bool> = LazyLock::new(|| {
    const VARIABLE: &str = "HK_EMU_ASSERT";
    match std::env::var(VARIABLE).as_deref() {
        Ok("error") => false,
        Ok("abort" | "") | Err(_) => true,
        Ok(other) => {
            say!("{VARIABLE}=`{other}` is neither abort nor error");
            true
        }
    }
});

fn check_device(function: &Function, on: StreamRef) -> Result {
    if function.module.device == on.device.ordinal {
        return Ok(());
    }
    say!(
        "{} is loaded on device {}, the stream is of device {}",
        function.name(),
        function.module.device,
        on.device.ordinal
    );
    Err(HipError::INVALID_DEVICE)
}

/// Runs a launch whose sizes are checked, in a command. What the kernel does wrong is told by later calls. `from`: the stack of the launch.
pub(crate) fn execute(function: &Function, launch: &Launch, args: &[u8], from: Option<&Backtrace>) -> Result {
    let Launch { grid, block, on, .. } = *launch;
    let device = on.device;
    let kernel = function.kernel()?;
    check_device(function, on)?;
    device.check()?;
    let _turn = lock(&device.turn);
    let mapped = Mapped::enter(device);
    let dispatch = Dispatch { grid, block, dynamic_lds: launch.dynamic_lds as u32, args };
    if let Some(clock) = &device.clock {
        clock.launch(on, &function.module.module, function.name(), &dispatch);
    }
    let (result, complained) =
        hostcall::launch(device, &function.module.module, kernel, &dispatch, launch.cooperative);
    if let Some(mapped) = mapped {
        mapped.leave(device);
    }
    if let Err(fault) = result {
        sanitize::options().report(device, on.id, &fault, from);
        let error = match &fault {
            Fault::Memory { space: Space::Global, .. } => HipError::ILLEGAL_ADDRESS,
            Fault::Budget { .. } => HipError::LAUNCH_TIME_OUT,
            // A failed assertion prints, and traps.
            Fault::Trap { .. } if complained => {
                if *ABORTS {
                    sanitize::abort();
                }
                HipError::ASSERT
            }
            _ => HipError::LAUNCH_FAILURE,
        };
        device.fail(error);
    }
    Ok(())
}

/// Blocks of `threads` for a grid of so many threads in each dimension. Only whole blocks can be launched.
fn blocks(threads: [u32; 3], block: [u32; 3]) -> Result<[u32; 3]> {
    let mut grid = [0; 3];
    for i in 0..3 {
        if block[i] == 0 {
            return Err(HipError::INVALID_CONFIGURATION);
        }
        if !threads[i].is_multiple_of(block[i]) {
            return Err(HipError::INVALID_VALUE);
        }
        grid[i] = threads[i] / block[i];
    }
    Ok(grid)
}

/// A launch whose grid is in threads, as that of `hipExtModuleLaunchKernel` and its older form.
fn launch_threads(
    handle: u64,
    [grid, block]: [[u32; 3]; 2],
    dynamic_lds: u64,
    on: u64,
    arguments: Arguments,
    [start, stop]: [u64; 2],
) -> Result {
    let function = known_function(handle)?;
    let on = stream(on)?;
    let threads = count_of(block);
    if threads > on.device.arch.max_workgroup_threads().into() {
        return Err(HipError::INVALID_VALUE);
    }
    let block = [0, 1, 2].map(|i: usize| block[i].min(grid[i]));
    let grid = blocks(grid, block)?;
    let cooperative = false;
    launch(&function, &Launch { handle, grid, block, dynamic_lds, on, arguments, start, stop, cooperative })
}

fn resident_blocks(function: &Function, block: u32, dynamic_lds: u64) -> Result<u32> {
    let (kernel, device) = (function.kernel()?, function.device()?);
    let lds = u64::from(kernel.lds_bytes).saturating_add(dynamic_lds);
    let lds = u32::try_from(lds).unwrap_or(u32::MAX);
    Ok(if block > kernel.max_threads {
        0
    } else {
        workgroups_per_cu(device.arch, kernel.total_vgprs, lds, block)
    })
}

/// # Errors
/// `hipErrorInvalidValue` for other flags than the default and `hipOccupancyDisableCachingOverride`.
pub(crate) fn check_occupancy_flags(flags: c_uint) -> Result {
    if flags <= 1 { Ok(()) } else { Err(HipError::INVALID_VALUE) }
}

pub(crate) fn max_active_blocks(
    count: *mut c_int,
    function: &Function,
    block: c_int,
    dynamic_lds: u64,
) -> Result {
    let block = u32::try_from(block).ok().filter(|b| *b > 0).ok_or(HipError::INVALID_VALUE)?;
    put(count, resident_blocks(function, block, dynamic_lds)? as c_int)
}

/// The block size with the most resident threads, the largest of those; and a grid that fills the device.
pub(crate) fn potential_block_size(
    grid: *mut c_int,
    block: *mut c_int,
    function: &Function,
    dynamic_lds: u64,
    limit: c_int,
) -> Result {
    let (kernel, device) = (function.kernel()?, function.device()?);
    let limit = u32::try_from(limit).ok().filter(|l| *l > 0).unwrap_or(u32::MAX);
    let wave = device.arch.wave_size();
    let largest = limit.min(kernel.max_threads).min(device.arch.max_workgroup_threads());
    let mut best = (0, largest, 0);
    // Whole waves, and sizes below one wave.
    for size in (1..=largest / wave).map(|n| n * wave).chain((largest < wave).then_some(largest)) {
        let blocks = resident_blocks(function, size, dynamic_lds)?;
        best = best.max((blocks * size, size, blocks));
    }
    put(grid, best.2 as c_int * device.compute_units())?;
    put(block, best.1 as c_int)
}

/// `hipFuncAttributes` of a kernel.
pub(crate) fn attributes(function: &Function) -> Result<FuncAttributes> {
    let (kernel, device) = (function.kernel()?, function.device()?);
    Ok(FuncAttributes {
        binary_version: device.version(),
        cache_mode_ca: 0,
        const_size_bytes: 0,
        local_size_bytes: kernel.scratch_bytes.into(),
        max_dynamic_shared_size_bytes: device.arch.lds_bytes().saturating_sub(kernel.lds_bytes) as i32,
        max_threads_per_block: kernel.max_threads as i32,
        num_regs: kernel.total_vgprs as i32,
        preferred_shmem_carveout: 0,
        ptx_version: device.version(),
        pad: 0,
        shared_size_bytes: kernel.lds_bytes.into(),
    })
}

fn attribute(a: &FuncAttributes, number: c_int) -> Result<c_int> {
    Ok(match number {
        0 => a.max_threads_per_block,
        1 => a.shared_size_bytes as c_int,
        2 => a.const_size_bytes as c_int,
        3 => a.local_size_bytes as c_int,
        4 => a.num_regs,
        5 => a.ptx_version,
        6 => a.binary_version,
        7 => a.cache_mode_ca,
        8 => a.max_dynamic_shared_size_bytes,
        9 => a.preferred_shmem_carveout,
        _ => return Err(HipError::INVALID_VALUE),
    })
}

api! {
    fn hipModuleLoad(module: *mut u64, path: *const c_char) {
        let path = string(path)?;
        if path.is_empty() {
            return Err(HipError::INVALID_VALUE);
        }
        load_to(module, |device| image::in_file(&path, device.arch))
    }

    fn hipModuleLoadData(module: *mut u64, image: u64) { load_data(module, image) }

    fn hipModuleLoadDataEx(module: *mut u64, image: u64, _options: c_uint, _keys: u64, _values: u64) {
        load_data(module, image)
    }

    fn hipModuleUnload(module: u64) { unload(module) }

    fn hipModuleGetFunction(handle: *mut u64, module: u64, name: *const c_char) {
        let name = string(name)?;
        if name.is_empty() {
            return Err(HipError::INVALID_VALUE);
        }
        put(handle, 0)?;
        put(handle, function(module, &name)?)
    }

    fn hipModuleGetGlobal(addr: *mut u64, bytes: *mut u64, module: u64, name: *const c_char) {
        let name = string(name)?;
        if name.is_empty() || (addr.is_null() && bytes.is_null()) {
            return Err(HipError::INVALID_VALUE);
        }
        let (at, size) = global(module, &name)?;
        put_if(addr, at)?;
        put_if(bytes, size)
    }

    fn hipFuncGetAttribute(value: *mut c_int, number: c_int, f: u64) {
        put(value, attribute(&attributes(&*known_function(f)?)?, number)?)
    }

    fn hipModuleLaunchKernel(
        f: u64,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        dynamic_lds: c_uint,
        on: u64,
        params: u64,
        extra: u64,
    ) {
        let function = known_function(f)?;
        launch(&function, &Launch {
            handle: f,
            grid: [grid_x, grid_y, grid_z],
            block: [block_x, block_y, block_z],
            dynamic_lds: dynamic_lds.into(),
            on: stream(on)?,
            arguments: Arguments { params, extra },
            start: 0,
            stop: 0,
            cooperative: false,
        })
    }

    fn hipModuleLaunchCooperativeKernel(
        f: u64,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        dynamic_lds: c_uint,
        on: u64,
        params: u64,
    ) {
        let on = stream(on).map_err(|_| HipError::INVALID_VALUE)?;
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        launch_cooperative((&known_function(f)?, f), grid, block, dynamic_lds.into(), on, params)
    }

    fn hipExtModuleLaunchKernel(
        f: u64,
        x: u32,
        y: u32,
        z: u32,
        block_x: u32,
        block_y: u32,
        block_z: u32,
        dynamic_lds: u64,
        on: u64,
        params: u64,
        extra: u64,
        start: u64,
        stop: u64,
        _flags: u32,
    ) {
        let (sizes, arguments) = ([[x, y, z], [block_x, block_y, block_z]], Arguments { params, extra });
        launch_threads(f, sizes, dynamic_lds, on, arguments, [start, stop])
    }

    // The form of `hipExtModuleLaunchKernel` without flags.
    fn hipHccModuleLaunchKernel(
        f: u64,
        x: u32,
        y: u32,
        z: u32,
        block_x: u32,
        block_y: u32,
        block_z: u32,
        dynamic_lds: u64,
        on: u64,
        params: u64,
        extra: u64,
        start: u64,
        stop: u64,
    ) {
        let (sizes, arguments) = ([[x, y, z], [block_x, block_y, block_z]], Arguments { params, extra });
        launch_threads(f, sizes, dynamic_lds, on, arguments, [start, stop])
    }

    fn hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
        count: *mut c_int,
        f: u64,
        block: c_int,
        dynamic_lds: u64,
    ) {
        max_active_blocks(count, &*known_function(f)?, block, dynamic_lds)
    }

    fn hipModuleOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        count: *mut c_int,
        f: u64,
        block: c_int,
        dynamic_lds: u64,
        flags: c_uint,
    ) {
        check_occupancy_flags(flags)?;
        max_active_blocks(count, &*known_function(f)?, block, dynamic_lds)
    }

    fn hipModuleOccupancyMaxPotentialBlockSize(
        grid: *mut c_int,
        block: *mut c_int,
        f: u64,
        dynamic_lds: u64,
        limit: c_int,
    ) {
        potential_block_size(grid, block, &*known_function(f)?, dynamic_lds, limit)
    }

    fn hipModuleOccupancyMaxPotentialBlockSizeWithFlags(
        grid: *mut c_int,
        block: *mut c_int,
        f: u64,
        dynamic_lds: u64,
        limit: c_int,
        flags: c_uint,
    ) {
        check_occupancy_flags(flags)?;
        potential_block_size(grid, block, &*known_function(f)?, dynamic_lds, limit)
    }
}

/// `hipExtModuleLaunchKernel` with the C++ linkage that HIP 5 gave it.
#[unsafe(export_name = "_Z24hipExtModuleLaunchKernelP18ihipModuleSymbol_tjjjjjjmP12ihipStream_tPPvS4_P11ihipEvent_tS6_j")]
extern "C" fn ext_module_launch_kernel(
    f: u64,
    x: u32,
    y: u32,
    z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    dynamic_lds: u64,
    on: u64,
    params: u64,
    extra: u64,
    start: u64,
    stop: u64,
    flags: u32,
) -> c_int {
    hipExtModuleLaunchKernel(
        f,
        x,
        y,
        z,
        block_x,
        block_y,
        block_z,
        dynamic_lds,
        on,
        params,
        extra,
        start,
        stop,
        flags,
    )
}

/// `hipHccModuleLaunchKernel` with C++ linkage.
#[unsafe(export_name = "_Z24hipHccModuleLaunchKernelP18ihipModuleSymbol_tjjjjjjmP12ihipStream_tPPvS4_P11ihipEvent_tS6_")]
extern "C" fn hcc_module_launch_kernel(
    f: u64,
    x: u32,
    y: u32,
    z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    dynamic_lds: u64,
    on: u64,
    params: u64,
    extra: u64,
    start: u64,
    stop: u64,
) -> c_int {
    hipHccModuleLaunchKernel(
        f,
        x,
        y,
        z,
        block_x,
        block_y,
        block_z,
        dynamic_lds,
        on,
        params,
        extra,
        start,
        stop,
    )
}

#[unsafe(no_mangle)]
extern "C" fn hipKernelNameRef(f: u64) -> *const c_char {
    known_function(f).map_or(std::ptr::null(), |function| function.name.as_ptr())
}

/// Exported functions whose result is no `hipError_t`, or whose name is no identifier.
pub(crate) const MORE_NAMES: &[&str] = &[
    "_Z24hipExtModuleLaunchKernelP18ihipModuleSymbol_tjjjjjjmP12ihipStream_tPPvS4_P11ihipEvent_tS6_j",
    "_Z24hipHccModuleLaunchKernelP18ihipModuleSymbol_tjjjjjjmP12ihipStream_tPPvS4_P11ihipEvent_tS6_",
    "hipKernelNameRef",
];

/// A launch by the address of a host function: sizes are structures.
pub(crate) fn launch_dims(
    (function, handle): (&Arc<Function>, u64),
    grid: Dim3,
    block: Dim3,
    dynamic_lds: u64,
    on: u64,
    arguments: Arguments,
    (start, stop): (u64, u64),
) -> Result {
    let (on, cooperative) = (stream(on)?, false);
    let (grid, block) = (grid.into(), block.into());
    launch(function, &Launch { handle, grid, block, dynamic_lds, on, arguments, start, stop, cooperative })
}
