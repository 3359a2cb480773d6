//! Code that the compiler embeds in a program: what `<<<..>>>`, `__device__` and `__managed__` variables need.
//!
//! Before `main` the program registers its bundles, the host functions that stand for kernels, and the host variables
//! that stand for device variables. A bundle is loaded on a device when it is first used there.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_uint};
use std::sync::Arc;

use crate::abi::{Dim3, FatBinaryWrapper, FuncAttributes, LaunchParams};
use crate::error::{HipError, Result, SUCCESS};
use crate::host::{get, put, read, string};
use crate::image;
use crate::memory::{ManagedGlobal, OF_THE_PROGRAM, copy};
use crate::module::{self, Arguments, Function, known_function, launch_dims};
use crate::runtime::{Device, Tag, api, call, lock, runtime, say};
use crate::stream::stream;
use crate::work::{Copy, Work, copy_now, submit};

/// What programs have registered.
#[derive(Default)]
pub(crate) struct Registered {
    bundles: HashMap<u64, Bundle>,
    /// By the address of the host function or variable.
    functions: HashMap<u64, Symbol>,
    variables: HashMap<u64, Symbol>,
}

struct Bundle {
    addr: u64,
    /// Modules by device.
    modules: HashMap<usize, u64>,
    managed: HashMap<String, ManagedGlobal>,
}

/// A name in a bundle.
#[derive(Clone)]
struct Symbol {
    bundle: u64,
    name: CString,
}

impl Symbol {
    fn name(&self) -> &str {
        self.name.to_str().unwrap_or_default()
    }
}

const MAGIC: u32 = 0x4849_5046; // "HIPF"

/// The module of a bundle on a device.
fn module_on(device: &Device, handle: u64) -> Result<u64> {
    let (addr, managed) = {
        let registered = lock(&runtime().registered);
        let bundle = registered.bundles.get(&handle).ok_or(HipError::INVALID_HANDLE)?;
        if let Some(module) = bundle.modules.get(&device.ordinal) {
            return Ok(*module);
        }
        // All devices, and the host, have the same variable.
        let managed = bundle.managed.iter().map(|(name, variable)| (name.clone(), variable.addr()));
        (bundle.addr, managed.collect())
    };
    let module = module::load(device, &image::in_memory(addr, device.arch)?, &managed)?;
    let mut registered = lock(&runtime().registered);
    let bundle = registered.bundles.get_mut(&handle).ok_or(HipError::INVALID_HANDLE)?;
    // Another thread may have been faster.
    let kept = *bundle.modules.entry(device.ordinal).or_insert(module);
    drop(registered);
    if kept != module {
        module::unload(module)?;
    }
    Ok(kept)
}

/// Forgets the modules of a device that was reset.
pub(crate) fn unload(device: &Device) {
    for bundle in lock(&runtime().registered).bundles.values_mut() {
        bundle.modules.remove(&device.ordinal);
    }
}

/// The kernel that a host function stands for, on a device.
fn function_on(device: &Device, host_function: u64) -> Result<u64> {
    let symbol = lock(&runtime().registered).functions.get(&host_function).cloned();
    let symbol = symbol.ok_or(HipError::INVALID_DEVICE_FUNCTION)?;
    let module = module_on(device, symbol.bundle)?;
    module::function(module, symbol.name()).map_err(|_| HipError::INVALID_DEVICE_FUNCTION)
}

/// The kernel for the current device. Programs pass handles of functions here, too.
pub(crate) fn current_function(function: u64) -> Result<Arc<Function>> {
    function_for(runtime().current()?, function)
}

/// The kernel of a host function, or of a handle, for a device.
pub(crate) fn function_for(device: &Device, function: u64) -> Result<Arc<Function>> {
    match known_function(function) {
        Ok(known) => Ok(known),
        Err(_) => known_function(function_on(device, function)?),
    }
}

/// Whether an address is that of a host variable that stands for a device variable.
pub(crate) fn is_variable(host_variable: u64) -> bool {
    lock(&runtime().registered).variables.contains_key(&host_variable)
}

/// Address and size of the device variable that a host variable stands for.
fn variable(host_variable: u64) -> Result<(u64, u64)> {
    let symbol = lock(&runtime().registered).variables.get(&host_variable).cloned();
    let symbol = symbol.ok_or(HipError::INVALID_SYMBOL)?;
    let module = module_on(runtime().current()?, symbol.bundle)?;
    module::global(module, symbol.name()).map_err(|_| HipError::INVALID_SYMBOL)
}

/// The part of a device variable that a copy accesses.
pub(crate) fn part_of(symbol: u64, offset: u64, bytes: u64) -> Result<u64> {
    let (addr, size) = variable(symbol)?;
    let inside = offset <= size && bytes <= size - offset;
    if inside { Ok(addr + offset) } else { Err(HipError::INVALID_VALUE) }
}

/// A launch that `<<<..>>>` or `hipConfigureCall` has set up.
struct Configuration {
    grid: Dim3,
    block: Dim3,
    dynamic_lds: u64,
    stream: u64,
    arguments: Vec<u8>,
}

thread_local!(static CONFIGURATIONS: RefCell<Vec<Configuration>> = const { RefCell::new(vec![]) });

/// Launches that may be set up and not made: a bound for programs that never launch.
const MAX_CONFIGURATIONS: usize = 1024;
/// Bytes of arguments of a launch that is set up piece by piece.
const MAX_ARGUMENTS: u64 = 4096;

fn configure(grid: Dim3, block: Dim3, dynamic_lds: u64, stream: u64) -> Result {
    CONFIGURATIONS.with_borrow_mut(|stack| {
        if stack.len() >= MAX_CONFIGURATIONS {
            return Err(HipError::INVALID_CONFIGURATION);
        }
        stack.push(Configuration { grid, block, dynamic_lds, stream, arguments: vec![] });
        Ok(())
    })
}

fn configured() -> Result<Configuration> {
    CONFIGURATIONS.with_borrow_mut(Vec::pop).ok_or(HipError::MISSING_CONFIGURATION)
}

fn launch_host_function(
    function: u64,
    grid: Dim3,
    block: Dim3,
    arguments: Arguments,
    dynamic_lds: u64,
    on: u64,
    events: (u64, u64),
) -> Result {
    let known = function_for(stream(on)?.device, function)?;
    launch_dims((&known, function), grid, block, dynamic_lds, on, arguments, events)
}

api! {
    fn __hipPushCallConfiguration(grid: Dim3, block: Dim3, dynamic_lds: u64, stream: u64) {
        configure(grid, block, dynamic_lds, stream)
    }

    fn __hipPopCallConfiguration(grid: *mut Dim3, block: *mut Dim3, dynamic_lds: *mut u64, stream: *mut u64) {
        let c = configured()?;
        put(grid, c.grid)?;
        put(block, c.block)?;
        put(dynamic_lds, c.dynamic_lds)?;
        put(stream, c.stream)
    }

    fn hipConfigureCall(grid: Dim3, block: Dim3, dynamic_lds: u64, stream: u64) {
        configure(grid, block, dynamic_lds, stream)
    }

    fn hipSetupArgument(arg: u64, bytes: u64, offset: u64) {
        let end = offset.checked_add(bytes).filter(|end| *end <= MAX_ARGUMENTS).ok_or(HipError::INVALID_VALUE)?;
        let mut value = vec![0; bytes as usize];
        read(arg, &mut value)?;
        CONFIGURATIONS.with_borrow_mut(|stack| {
            let arguments = &mut stack.last_mut().ok_or(HipError::MISSING_CONFIGURATION)?.arguments;
            arguments.resize(arguments.len().max(end as usize), 0);
            arguments[offset as usize..end as usize].copy_from_slice(&value);
            Ok(())
        })
    }

    fn hipLaunchByPtr(function: u64) {
        let c = configured()?;
        let size = c.arguments.len() as u64;
        let extra = [1, c.arguments.as_ptr() as u64, 2, (&raw const size) as u64, 3];
        let extra = if size == 0 { 0 } else { extra.as_ptr() as u64 };
        let arguments = Arguments { params: 0, extra };
        launch_host_function(function, c.grid, c.block, arguments, c.dynamic_lds, c.stream, (0, 0))
    }

    fn hipLaunchKernel(function: u64, grid: Dim3, block: Dim3, params: u64, dynamic_lds: u64, on: u64) {
        let arguments = Arguments { params, extra: 0 };
        launch_host_function(function, grid, block, arguments, dynamic_lds, on, (0, 0))
    }

    fn hipLaunchCooperativeKernel(
        function: u64,
        grid: Dim3,
        block: Dim3,
        params: u64,
        dynamic_lds: c_uint,
        on: u64,
    ) {
        let on = stream(on)?;
        if function == 0 {
            return Err(HipError::INVALID_DEVICE_FUNCTION);
        }
        let known = function_for(on.device, function)?;
        let (grid, block): ([u32; 3], [u32; 3]) = (grid.into(), block.into());
        if module::count_of(block) > on.device.arch.max_workgroup_threads().into() {
            return Err(HipError::INVALID_CONFIGURATION);
        }
        if dynamic_lds > on.device.arch.lds_bytes() {
            return Err(HipError::COOPERATIVE_LAUNCH_TOO_LARGE);
        }
        module::launch_cooperative((&known, function), grid, block, dynamic_lds.into(), on, params)
    }

    fn hipExtLaunchKernel(
        function: u64,
        grid: Dim3,
        block: Dim3,
        params: u64,
        dynamic_lds: u64,
        on: u64,
        start: u64,
        stop: u64,
        _flags: c_int,
    ) {
        let arguments = Arguments { params, extra: 0 };
        launch_host_function(function, grid, block, arguments, dynamic_lds, on, (start, stop))
    }

    fn hipExtLaunchMultiKernelMultiDevice(list: *const LaunchParams, count: c_int, flags: c_uint) {
        let devices = runtime().devices.len();
        let count = usize::try_from(count).ok().filter(|n| (1..=devices).contains(n));
        // Neither waits before nor after it.
        const NO_SYNCHRONIZATION: c_uint = 3;
        if flags & !NO_SYNCHRONIZATION != 0 {
            return Err(HipError::INVALID_VALUE);
        }
        let all = (0..count.ok_or(HipError::INVALID_VALUE)?).map(|i| get(list.wrapping_add(i)));
        let all = all.collect::<Result<Vec<LaunchParams>>>()?;
        let shape = |p: &LaunchParams| (p.function, p.grid, p.block, p.dynamic_lds);
        let mut on = vec![];
        for p in &all {
            let device = stream(p.stream)?.device.ordinal;
            if shape(p) != shape(&all[0]) || p.stream == 0 || on.contains(&device) {
                return Err(HipError::INVALID_VALUE);
            }
            on.push(device);
        }
        for p in &all {
            let arguments = Arguments { params: p.params, extra: 0 };
            launch_host_function(p.function, p.grid, p.block, arguments, p.dynamic_lds, p.stream, (0, 0))?;
        }
        Ok(())
    }

    fn hipGetFuncBySymbol(handle: *mut u64, function: u64) {
        put(handle, function_on(runtime().current()?, function)?)
    }

    fn hipFuncGetAttributes(result: *mut FuncAttributes, function: u64) {
        put(result, module::attributes(&*current_function(function)?)?)
    }

    fn hipFuncSetAttribute(function: u64, attribute: c_int, value: c_int) {
        let attributes = module::attributes(&*current_function(function)?)?;
        let legal = match attribute {
            8 => (0..=attributes.max_dynamic_shared_size_bytes).contains(&value),
            9 => (-1..=100).contains(&value),
            _ => false,
        };
        if legal { Ok(()) } else { Err(HipError::INVALID_VALUE) }
    }

    // Hints without effect here.
    fn hipFuncSetCacheConfig(function: u64, _config: c_int) { current_function(function).map(drop) }
    fn hipFuncSetSharedMemConfig(function: u64, _config: c_int) { current_function(function).map(drop) }

    fn hipOccupancyMaxActiveBlocksPerMultiprocessor(
        count: *mut c_int,
        function: u64,
        block: c_int,
        dynamic_lds: u64,
    ) {
        module::max_active_blocks(count, &*current_function(function)?, block, dynamic_lds)
    }

    fn hipOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        count: *mut c_int,
        function: u64,
        block: c_int,
        dynamic_lds: u64,
        flags: c_uint,
    ) {
        module::check_occupancy_flags(flags)?;
        module::max_active_blocks(count, &*current_function(function)?, block, dynamic_lds)
    }

    fn hipOccupancyMaxPotentialBlockSize(
        grid: *mut c_int,
        block: *mut c_int,
        function: u64,
        dynamic_lds: u64,
        limit: c_int,
    ) {
        module::potential_block_size(grid, block, &*current_function(function)?, dynamic_lds, limit)
    }

    fn hipGetSymbolAddress(addr: *mut u64, symbol: u64) {
        if addr.is_null() {
            return Err(HipError::INVALID_VALUE);
        }
        put(addr, variable(symbol)?.0)
    }

    fn hipGetSymbolSize(bytes: *mut u64, symbol: u64) {
        if bytes.is_null() {
            return Err(HipError::INVALID_VALUE);
        }
        put(bytes, variable(symbol)?.1)
    }

    fn hipMemcpyToSymbol(symbol: u64, src: u64, bytes: u64, offset: u64, kind: c_int) {
        copy_now(Copy::ToSymbol { symbol, offset, src, bytes, kind })
    }

    fn hipMemcpyToSymbolAsync(symbol: u64, src: u64, bytes: u64, offset: u64, kind: c_int, on: u64) {
        submit(on, Work::Copy(Copy::ToSymbol { symbol, offset, src, bytes, kind }))
    }

    fn hipMemcpyFromSymbol(dst: u64, symbol: u64, bytes: u64, offset: u64, kind: c_int) {
        copy_now(Copy::FromSymbol { dst, symbol, offset, bytes, kind })
    }

    fn hipMemcpyFromSymbolAsync(dst: u64, symbol: u64, bytes: u64, offset: u64, kind: c_int, on: u64) {
        submit(on, Work::Copy(Copy::FromSymbol { dst, symbol, offset, bytes, kind }))
    }
}

/// A call whose result is not a code: says what is wrong with it.
fn registering(name: &str, body: impl FnOnce() -> Result) {
    let code = call(body);
    if code != SUCCESS {
        say!("{name}: {}", crate::error::text(code).to_string_lossy());
    }
}

#[unsafe(no_mangle)]
extern "C" fn __hipRegisterFatBinary(wrapper: *const FatBinaryWrapper) -> u64 {
    let mut handle = 0;
    registering("__hipRegisterFatBinary", || {
        let wrapper = get(wrapper)?;
        if wrapper.magic != MAGIC || wrapper.version != 1 {
            return Err(HipError::INVALID_IMAGE);
        }
        let mut registered = lock(&runtime().registered);
        // Program text does not move: its address is unique.
        handle = Tag::FatBinary.handle(wrapper.binary);
        let bundle = Bundle { addr: wrapper.binary, modules: HashMap::new(), managed: HashMap::new() };
        registered.bundles.entry(handle).or_insert(bundle);
        Ok(())
    });
    handle
}

#[unsafe(no_mangle)]
extern "C" fn __hipUnregisterFatBinary(handle: u64) {
    let bundle = {
        let mut registered = lock(&runtime().registered);
        let bundle = registered.bundles.remove(&handle);
        registered.functions.retain(|_, symbol| symbol.bundle != handle);
        registered.variables.retain(|_, symbol| symbol.bundle != handle);
        bundle
    };
    for module in bundle.iter().flat_map(|b| b.modules.values()) {
        let _ = module::unload(*module);
    }
}

fn symbol(bundle: u64, name: *const c_char) -> Result<Symbol> {
    Tag::FatBinary.id(bundle).ok_or(HipError::INVALID_HANDLE)?;
    let name = CString::new(string(name)?).map_err(|_| HipError::INVALID_VALUE)?;
    Ok(Symbol { bundle, name })
}

#[unsafe(no_mangle)]
extern "C" fn __hipRegisterFunction(
    bundle: u64,
    host_function: u64,
    _device_function: *const c_char,
    name: *const c_char,
    _thread_limit: c_uint,
    _tid: u64,
    _bid: u64,
    _block: u64,
    _grid: u64,
    _wave: u64,
) {
    registering("__hipRegisterFunction", || {
        let symbol = symbol(bundle, name)?;
        lock(&runtime().registered).functions.insert(host_function, symbol);
        Ok(())
    });
}

#[unsafe(no_mangle)]
extern "C" fn __hipRegisterVar(
    bundle: u64,
    host_variable: u64,
    name: *const c_char,
    _device_name: *const c_char,
    _external: c_int,
    _bytes: u64,
    _constant: c_int,
    _global: c_int,
) {
    registering("__hipRegisterVar", || {
        let symbol = symbol(bundle, name)?;
        lock(&runtime().registered).variables.insert(host_variable, symbol);
        Ok(())
    });
}

#[unsafe(no_mangle)]
extern "C" fn __hipRegisterManagedVar(
    bundle: u64,
    pointer: *mut u64,
    initial: u64,
    name: *const c_char,
    bytes: u64,
    _align: c_uint,
) {
    registering("__hipRegisterManagedVar", || {
        let name = string(name)?;
        let variable = ManagedGlobal::new(runtime().current()?, OF_THE_PROGRAM, bytes)?;
        const HOST_TO_HOST: c_int = 0;
        let addr = variable.addr();
        copy(addr, initial, bytes, HOST_TO_HOST)?;
        let mut registered = lock(&runtime().registered);
        let bundle = registered.bundles.get_mut(&bundle).ok_or(HipError::INVALID_HANDLE)?;
        bundle.managed.insert(name, variable);
        put(pointer, addr)
    });
}

#[unsafe(no_mangle)]
extern "C" fn hipKernelNameRefByPtr(host_function: u64, _stream: u64) -> *const c_char {
    let registered = lock(&runtime().registered);
    registered.functions.get(&host_function).map_or(std::ptr::null(), |symbol| symbol.name.as_ptr())
}

/// Exported functions whose result is no `hipError_t`.
pub(crate) const MORE_NAMES: &[&str] = &[
    "__hipRegisterFatBinary",
    "__hipUnregisterFatBinary",
    "__hipRegisterFunction",
    "__hipRegisterVar",
    "__hipRegisterManagedVar",
    "hipKernelNameRefByPtr",
];
