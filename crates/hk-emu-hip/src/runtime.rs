//! What outlives a call: the devices, the objects that handles name, and each thread's state.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, Once, OnceLock, PoisonError};
use std::time::Duration;

use hk_codeobj::Arch;
use hk_emu::{Checks, Machine, MachineOptions, MatrixNumerics, Node};

use crate::error::{HipError, Result, SUCCESS};
use crate::hostcall::Console;
use crate::memory::{Block, GraphUse};
use crate::module::{Function, Module};
use crate::register::Registered;
use crate::stream::{Event, Stream};
use crate::time::Clock;

/// A message for the programmer: error codes alone lack the cause.
macro_rules! say {
    ($($text:tt)*) => {
        eprintln!("hk-emu-hip: {}", format_args!($($text)*))
    };
}
pub(crate) use say;

/// Defines exported functions that return a `hipError_t`, and the list of their names. A body evaluates to `Result`. Without a device, each
/// is `hipErrorNoDevice`, as in ROCm.
macro_rules! api {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            pub(crate) extern "C" fn $name($($arg: $type),*) -> std::ffi::c_int {
                crate::runtime::call(|| {
                    crate::runtime::some_device()?;
                    $body
                })
            }
        )*

        pub(crate) const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}
pub(crate) use api;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An emulated device.
pub(crate) struct Device {
    /// Its number for the program, and that among all devices of the host.
    pub ordinal: usize,
    pub slot: usize,
    pub arch: Arch,
    pub machine: Machine,
    /// Bytes of its memory, if that was said.
    pub memory: Option<u64>,
    /// Where time is modelled.
    pub clock: Option<Clock>,
    /// Whose time events have is said once.
    pub said_clock: Once,
    /// Devices to whose memory the program has enabled access.
    pub peers: Mutex<HashSet<usize>>,
    /// Held while a kernel runs: those of a device do not overlap.
    pub turn: Mutex<()>,
    /// The code that a failed kernel left: what every later call that uses the device gives.
    failure: AtomicI32,
    /// Bytes that the program has allocated.
    pub used: AtomicU64,
    pub graph_use: GraphUse,
    /// What the program set: bytes of stack of a thread, and of the heap of device code.
    pub stack_limit: AtomicU64,
    pub heap_limit: AtomicU64,
    /// How the program wants to wait.
    pub flags: AtomicU32,
    /// What its kernels call the host with.
    pub console: Console,
}

impl Device {
    /// # Errors
    /// What a kernel left when it failed.
    pub fn check(&self) -> Result {
        match self.failure.load(Relaxed) {
            SUCCESS => Ok(()),
            code => Err(HipError(code)),
        }
    }

    /// From now on every use of the device fails.
    pub fn fail(&self, error: HipError) {
        let _ = self.failure.compare_exchange(SUCCESS, error.0, Relaxed, Relaxed);
    }

    /// As before any failure.
    pub fn recover(&self) {
        self.failure.store(SUCCESS, Relaxed);
        self.clock.iter().for_each(Clock::reset);
    }
}

/// What the handle of a type says in its upper bits. No such address exists, so a program that takes a handle for a
/// pointer faults at once, and a handle of another type is never mistaken.
#[derive(Clone, Copy)]
pub(crate) enum Tag {
    Stream = 0x51,
    Event = 0x52,
    Module = 0x53,
    Function = 0x54,
    Context = 0x55,
    FatBinary = 0x56,
    Pool = 0x57,
    Graph = 0x58,
    Node = 0x59,
    Exec = 0x5a,
    UserObject = 0x5b,
    Program = 0x5c,
    Link = 0x5d,
    Physical = 0x5e,
}

impl Tag {
    const SHIFT: u32 = 56;

    pub fn handle(self, id: u64) -> u64 {
        (self as u64) << Self::SHIFT | id
    }

    /// The number in a handle of this type.
    pub fn id(self, handle: u64) -> Option<u64> {
        (handle >> Self::SHIFT == self as u64).then_some(handle & !(0xff << Self::SHIFT))
    }
}

/// The live objects of one type by their handles. A handle is never used again.
pub(crate) struct Table<T> {
    tag: Tag,
    objects: Mutex<HashMap<u64, Arc<T>>>,
}

impl<T> Table<T> {
    pub fn new(tag: Tag) -> Self {
        Table { tag, objects: Mutex::default() }
    }

    /// Makes an object, which may know its number, and its handle.
    pub fn insert(&self, make: impl FnOnce(u64) -> T) -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Relaxed);
        let handle = self.tag.handle(id);
        lock(&self.objects).insert(handle, Arc::new(make(id)));
        handle
    }

    pub fn get(&self, handle: u64) -> Option<Arc<T>> {
        lock(&self.objects).get(&handle).cloned()
    }

    pub fn remove(&self, handle: u64) -> Option<Arc<T>> {
        lock(&self.objects).remove(&handle)
    }

    pub fn retain(&self, mut keep: impl FnMut(&T) -> bool) {
        lock(&self.objects).retain(|_, object| keep(object));
    }
}

pub(crate) struct Runtime {
    /// Made by the first call that needs one, from the environment as it is then. What a program registers before its `main` does not.
    pub devices: LazyLock<Vec<Device>>,
    pub streams: Table<Stream>,
    pub events: Table<Event>,
    pub modules: Table<Module>,
    pub functions: Table<Function>,
    /// What the program has allocated, by first address: device memory of all devices, and mapped host memory.
    pub blocks: Mutex<BTreeMap<u64, Block>>,
    pub registered: Mutex<Registered>,
}

/// # Errors
/// `hipErrorNoDevice`.
pub(crate) fn some_device() -> Result {
    if runtime().devices.is_empty() { Err(HipError::NO_DEVICE) } else { Ok(()) }
}

const DEFAULT_STACK: u64 = 1 << 10;
const DEFAULT_HEAP: u64 = 4 << 20;

/// Addresses of device memory. A share for each device keeps any address on one device.
const FIRST_ADDRESS: u64 = 0x1000_0000_0000;
const ADDRESSES_PER_DEVICE: u64 = 0x0800_0000_0000;
/// Where the program's own memory begins on x86-64 and AArch64 is far above the last share.
const MAX_DEVICES: usize = 8;
/// Bytes of memory of a device: there are addresses for more.
const MAX_MEMORY: u64 = 1 << 40;

/// The runtime, made by the first call.
pub(crate) fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| Runtime {
        devices: LazyLock::new(devices),
        streams: Table::new(Tag::Stream),
        events: Table::new(Tag::Event),
        modules: Table::new(Tag::Module),
        functions: Table::new(Tag::Function),
        blocks: Mutex::default(),
        registered: Mutex::default(),
    })
}

/// The devices that `HK_EMU_ARCH` names; none, with a message, if a variable is wrong.
fn devices() -> Vec<Device> {
    let list = std::env::var("HK_EMU_ARCH").unwrap_or_else(|_| "gfx942".into());
    let set = |name| std::env::var(name).ok().filter(|value: &String| !value.is_empty());
    let visible =
        [set("ROCR_VISIBLE_DEVICES"), set("HIP_VISIBLE_DEVICES").or_else(|| set("CUDA_VISIBLE_DEVICES"))];
    let parsed = defaults().and_then(|options| {
        parse_devices(&list, &visible, &options).map_err(|e| format!("HK_EMU_ARCH=`{list}`: {e}"))
    });
    parsed.unwrap_or_else(|why| {
        say!("{why}; there is no device");
        vec![]
    })
}

/// What the variables say that hold for every emulated device.
fn defaults() -> std::result::Result<MachineOptions, String> {
    // ROCm runs kernels in the unaligned mode: packed structures are addressed as they lie. Programs see that a kernel waits.
    // The host may be slow to write what one waits for.
    const PATIENCE: Duration = Duration::from_secs(5);
    let mut options = MachineOptions::default().allow_misaligned(true).paced(true).patience(PATIENCE);
    crate::sanitize::from_environment()?;
    if let Ok(names) = std::env::var("HK_SANITIZE") {
        let checks: Checks = names.parse().map_err(|e| format!("HK_SANITIZE=`{names}`: {e}"))?;
        options = options.sanitize(checks);
    }
    if let Ok(name) = std::env::var("HK_MFMA") {
        let numerics: MatrixNumerics = name.parse().map_err(|e| format!("HK_MFMA=`{name}`: {e}"))?;
        options = options.matrix_numerics(numerics);
    }
    Ok(options)
}

/// A number of bytes, or of units of 1024, its square, its cube or its fourth power.
fn parse_size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift).filter(|bytes| (1..=MAX_MEMORY).contains(bytes))
}

/// The devices that a list of numbers names, in its order: up to the first entry that names none, or one again.
fn chosen<T: Copy + PartialEq>(all: &[T], list: &str) -> Vec<T> {
    let mut devices = vec![];
    for entry in list.split(',') {
        let device = entry.trim().parse().ok().and_then(|i: usize| all.get(i));
        match device {
            Some(device) if !devices.contains(device) => devices.push(*device),
            _ => break,
        }
    }
    devices
}

/// `TARGET[*COUNT][?OPTION=VALUE[&..]],..`; each of `visible` chooses among what is left.
fn parse_devices(
    list: &str,
    visible: &[Option<String>],
    defaults: &MachineOptions,
) -> std::result::Result<Vec<Device>, String> {
    let mut specs: Vec<String> = vec![];
    for spec in list.split(',').map(str::trim).filter(|s| !s.is_empty()) {
        let (head, options) = spec.split_at(spec.find('?').unwrap_or(spec.len()));
        let (target, count) = head.split_once('*').unwrap_or((head, "1"));
        let count = count.parse().ok().filter(|n| (1..=MAX_DEVICES).contains(n));
        let count =
            count.ok_or_else(|| format!("`{head}` is not TARGET*N with N from 1 to {MAX_DEVICES}"))?;
        specs.extend(std::iter::repeat_n(format!("{target}{options}"), count));
    }
    if specs.len() > MAX_DEVICES {
        return Err(format!("more than {MAX_DEVICES} devices"));
    }
    let mut slots: Vec<(usize, &str)> = specs.iter().map(String::as_str).enumerate().collect();
    for list in visible.iter().flatten() {
        slots = chosen(&slots, list);
    }
    let specs = slots;
    // A single device has all host threads; several run side by side, each on the thread that launches.
    let node = (specs.len() > 1).then(Node::new);
    let device = |(ordinal, &(slot, spec)): (usize, &(usize, &str))| {
        let (target, rest) = spec.split_once('?').unwrap_or((spec, ""));
        let arch: Arch = target
            .parse()
            .ok()
            .filter(|a: &Arch| a.is_amd())
            .ok_or_else(|| format!("`{target}` is neither gfx942 nor gfx950"))?;
        let first = FIRST_ADDRESS + ordinal as u64 * ADDRESSES_PER_DEVICE;
        let mut options = defaults.clone().arch(arch);
        if let Some(node) = &node {
            options = options
                .node(node, ordinal as u32)
                .ok_or_else(|| format!("more than {MAX_DEVICES} devices"))?;
        }
        options = options.addresses(first..first + ADDRESSES_PER_DEVICE);
        let (mut memory, mut clock) = (None, None);
        for option in rest.split('&').filter(|o| !o.is_empty()) {
            let wrong = || {
                format!(
                    "`{option}` is none of threads=N (N > 0), memory=SIZE (such as 16G), budget=N, skew=N, \
                     misaligned=true or =false, time=PART (such as mi325x)"
                )
            };
            let (key, value) = option.split_once('=').ok_or_else(wrong)?;
            options = match key {
                "threads" => options.threads(Some(value.parse().ok().filter(|n| *n > 0).ok_or_else(wrong)?)),
                "memory" => {
                    memory = Some(parse_size(value).ok_or_else(wrong)?);
                    options
                }
                "time" => {
                    let new = Clock::new(value, arch).map_err(|want| format!("`{option}` is not {want}"));
                    clock = Some(new?);
                    options
                }
                "budget" => options.instruction_budget(Some(value.parse().map_err(|_| wrong())?)),
                "skew" => options.skew(Some(value.parse().map_err(|_| wrong())?)),
                "misaligned" => options.allow_misaligned(value.parse().map_err(|_| wrong())?),
                _ => return Err(wrong()),
            };
        }
        Ok(Device {
            ordinal,
            slot,
            arch,
            machine: Machine::new(options),
            memory,
            clock,
            said_clock: Once::new(),
            peers: Mutex::default(),
            turn: Mutex::default(),
            failure: AtomicI32::new(SUCCESS),
            used: AtomicU64::new(0),
            graph_use: GraphUse::default(),
            stack_limit: AtomicU64::new(DEFAULT_STACK),
            heap_limit: AtomicU64::new(DEFAULT_HEAP),
            flags: AtomicU32::new(0),
            console: Console::default(),
        })
    };
    specs.iter().enumerate().map(device).collect()
}

thread_local! {
    static LAST: Cell<c_int> = const { Cell::new(SUCCESS) };
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    /// Devices of the contexts below the current one.
    pub(crate) static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(vec![]) };
}

/// Runs the body of an exported function: a panic becomes an error, and an error is kept for `hipGetLastError`.
pub(crate) fn call(body: impl FnOnce() -> Result) -> c_int {
    let result = catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(HipError::UNKNOWN));
    let code = result.err().map_or(SUCCESS, |e| e.0);
    // `hipErrorNotReady` is an answer, not a failure.
    if code != SUCCESS && code != HipError::NOT_READY.0 {
        LAST.set(code);
    }
    code
}

/// The last error of this thread; `reset` forgets it.
pub(crate) fn last_error(reset: bool) -> c_int {
    if reset { LAST.replace(SUCCESS) } else { LAST.get() }
}

impl Runtime {
    /// Whether only a device can have this address.
    pub fn is_device_address(addr: u64) -> bool {
        addr >= FIRST_ADDRESS && Self::device_of_address(addr) < MAX_DEVICES
    }

    /// The ordinal of the device whose share of the addresses this one is in.
    pub fn device_of_address(addr: u64) -> usize {
        (addr.saturating_sub(FIRST_ADDRESS) / ADDRESSES_PER_DEVICE) as usize
    }

    /// # Errors
    /// `hipErrorNoDevice`, `hipErrorInvalidDevice`.
    pub fn device(&self, ordinal: c_int) -> Result<&Device> {
        if self.devices.is_empty() {
            return Err(HipError::NO_DEVICE);
        }
        let device = usize::try_from(ordinal).ok().and_then(|i| self.devices.get(i));
        device.ok_or(HipError::INVALID_DEVICE)
    }

    /// This thread's current device.
    ///
    /// # Errors
    /// `hipErrorNoDevice`.
    pub fn current(&self) -> Result<&Device> {
        self.devices.get(CURRENT.get()).ok_or(HipError::NO_DEVICE)
    }

    /// Makes a device this thread's current one.
    pub fn set_current(&self, device: &Device) {
        CURRENT.set(device.ordinal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(list: &str) -> std::result::Result<Vec<Device>, String> {
        parse_devices(list, &[], &MachineOptions::default())
    }

    #[test]
    fn devices_are_parsed() {
        let devices = parse(" gfx942 ,gfx950?threads=2&misaligned=true&budget=10&skew=0").unwrap();
        let archs: Vec<_> = devices.iter().map(|d| d.arch).collect();
        assert_eq!(archs, [Arch::Gfx942, Arch::Gfx950]);
        assert!(parse("").unwrap().is_empty());
        assert!(parse("gfx942?").is_ok());
        let memory = parse("gfx942?memory=3G,gfx950").unwrap();
        assert_eq!([memory[0].memory_bytes(), memory[1].memory_bytes()], [3 << 30, 288 << 30]);
        let counted = parse("gfx942*3?threads=1,gfx950").unwrap();
        assert_eq!(
            counted.iter().map(|d| d.arch.name()).collect::<Vec<_>>(),
            ["gfx942", "gfx942", "gfx942", "gfx950"]
        );
        for wrong in [
            "gfx90a",
            "sm_90",
            "gfx942?threads=0",
            "gfx942?threads",
            "gfx942?skew=-1",
            "gfx942?x=1",
            "gfx942?memory=0",
            "gfx942?memory=1X",
            "gfx942?memory=2T",
            "gfx942*0",
            "gfx942*",
            "gfx942*9",
            "gfx942*4,gfx950*5",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        assert!(parse(&["gfx942"; MAX_DEVICES + 1].join(",")).is_err());
    }

    #[test]
    fn variables_choose_devices() {
        let slots = |visible: &[&str]| -> Vec<usize> {
            let visible: Vec<_> = visible.iter().map(|list| Some((*list).to_owned())).collect();
            let devices = parse_devices("gfx942*3,gfx950", &visible, &MachineOptions::default()).unwrap();
            assert!(devices.iter().enumerate().all(|(i, d)| d.ordinal == i));
            devices.iter().map(|d| d.slot).collect()
        };
        assert_eq!(slots(&["3, 0"]), [3, 0]);
        assert_eq!(slots(&["3,1,2", "2,0"]), [2, 3]);
        assert_eq!(slots(&["1,7,2"]), [1], "the list ends at what is no device");
        assert_eq!(slots(&["1,2,1"]), [1, 2]);
        assert!(slots(&["-1"]).is_empty());
    }

    #[test]
    fn addresses_of_devices_are_disjoint() {
        let devices = parse("gfx942,gfx950").unwrap();
        let [a, b] = [0, 1].map(|i: usize| devices[i].machine.alloc(16, 256, "x").unwrap());
        assert!(b - a >= ADDRESSES_PER_DEVICE / 2);
        assert!(devices[1].machine.write(a, &[0]).is_err());
    }

    #[test]
    fn a_handle_has_one_type() {
        let handle = Tag::Event.handle(7);
        assert_eq!((Tag::Event.id(handle), Tag::Stream.id(handle)), (Some(7), None));
        let table = Table::new(Tag::Event);
        let handle = table.insert(|_| 5);
        assert_eq!(table.get(handle).as_deref(), Some(&5));
        assert!(table.get(handle + 1).is_none() && table.get(0).is_none());
        assert!(table.remove(handle).is_some() && table.remove(handle).is_none());
    }

    #[test]
    fn panics_become_errors() {
        assert_eq!(call(|| panic!("expected by this test")), HipError::UNKNOWN.0);
        assert_eq!((last_error(false), last_error(true), last_error(true)), (999, 999, SUCCESS));
        assert_eq!(call(|| Err(HipError::NOT_READY)), 600);
        assert_eq!(last_error(true), SUCCESS);
    }
}
