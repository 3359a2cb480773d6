//! Memory and events of several processes, by handles that they pass to each other.

use std::collections::HashMap;
use std::ffi::c_uint;
use std::io;
use std::sync::{LazyLock, Mutex, MutexGuard};
use std::time::Duration;

use bytemuck::{Pod, Zeroable};
use hk_emu::{FilePlace, MemoryFile, MemoryHandle};

use crate::error::{HipError, Result};
use crate::host::put;
use crate::memory;
use crate::queue;
use crate::runtime::{Device, api, lock, runtime, say};
use crate::stream;

const INVALID: HipError = HipError::INVALID_VALUE;

/// `hipIpcMemHandle_t` and `hipIpcEventHandle_t`, passed by value.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(crate) struct Handle([u8; MemoryHandle::BYTES]);

/// Where the handle of memory has the offset of the pointer that it was made for.
const OFFSET: usize = MemoryHandle::BYTES - 8;

/// Memory of another process that a device has opened, and how often.
struct Opened {
    base: u64,
    bytes: u64,
    count: usize,
}

/// By device, and handle without its offset.
type AllOpened = HashMap<(usize, MemoryHandle), Opened>;

fn opened() -> MutexGuard<'static, AllOpened> {
    static OPENED: LazyLock<Mutex<AllOpened>> = LazyLock::new(Mutex::default);
    lock(&OPENED)
}

/// A device was reset: what it had opened is closed.
pub(crate) fn reset(device: &Device) {
    opened().retain(|(ordinal, _), _| *ordinal != device.ordinal);
}

/// The memory is at the same address for this process; for others it is a file from now on. Waits for the devices: work in flight has it
/// where it was.
fn export(handle: *mut Handle, ptr: u64) -> Result {
    if handle.is_null() || ptr == 0 {
        return Err(INVALID);
    }
    let (base, device) = memory::shareable(ptr).ok_or(INVALID)?;
    device.check()?;
    queue::synchronize_device(None);
    let turns: Vec<_> = runtime().devices.iter().map(|device| lock(&device.turn)).collect();
    let exported = device.machine.share(base).and_then(|()| device.machine.export(base));
    drop(turns);
    let exported = exported.map_err(|error| {
        say!("{error}");
        HipError::OUT_OF_MEMORY
    })?;
    let mut bytes = exported.to_bytes();
    bytes[OFFSET..].copy_from_slice(&(ptr - base).to_le_bytes());
    put(handle, Handle(bytes))
}

fn import(ptr: *mut u64, Handle(mut bytes): Handle, flags: c_uint) -> Result {
    const LAZY_PEER_ACCESS: c_uint = 1;
    if ptr.is_null() || flags != LAZY_PEER_ACCESS {
        return Err(INVALID);
    }
    let mut offset = [0; 8];
    offset.copy_from_slice(&bytes[OFFSET..]);
    bytes[OFFSET..].fill(0);
    let handle = MemoryHandle::from_bytes(bytes);
    let process = handle.process().ok_or(INVALID)?;
    if process == std::process::id() {
        return Err(HipError::INVALID_CONTEXT);
    }
    let device = runtime().current()?;
    device.check()?;
    put(ptr, 0)?;
    let mut opened = opened();
    let key = (device.ordinal, handle);
    let base = match opened.get_mut(&key) {
        Some(known) => {
            known.count += 1;
            known.base
        }
        None => {
            let base = device.machine.import(handle).map_err(|error| {
                say!("{error}");
                HipError::INVALID_DEVICE_POINTER
            })?;
            let bytes = memory::add_opened(device, base)?;
            opened.insert(key, Opened { base, bytes, count: 1 });
            base
        }
    };
    put(ptr, base.saturating_add(u64::from_le_bytes(offset)))
}

fn close(ptr: u64) -> Result {
    let holds = |opened: &Opened| (opened.base..opened.base + opened.bytes).contains(&ptr);
    let device = opened().iter().find(|(_, known)| holds(known)).map(|((device, _), _)| *device);
    queue::synchronize_device(Some(device.ok_or(INVALID)?));
    let mut opened = opened();
    let (key, known) = opened.iter_mut().find(|(_, known)| holds(known)).ok_or(INVALID)?;
    known.count -= 1;
    if known.count == 0 {
        let (key, base) = (*key, known.base);
        opened.remove(&key);
        memory::close(base);
    }
    Ok(())
}

/// The records of an event that several processes have: in a file, how many were begun, and up to which they are done.
pub(crate) struct SharedEvent(Mutex<MemoryFile>);

const MAGIC: [u8; 8] = *b"hk-emu-e";
/// Bytes of the file.
const RECORDS: u64 = 16;

impl SharedEvent {
    /// # Errors
    /// `hipErrorOutOfMemory`.
    pub fn new() -> Result<SharedEvent> {
        let file = MemoryFile::new(RECORDS).map_err(|_| HipError::OUT_OF_MEMORY)?;
        Ok(SharedEvent(Mutex::new(file)))
    }

    fn open(Handle(bytes): Handle) -> Result<SharedEvent> {
        let (magic, rest) = bytes.split_at(MAGIC.len());
        let (numbers, _) = rest.as_chunks::<8>();
        let mut numbers = numbers.iter().map(|bytes| u64::from_le_bytes(*bytes));
        let numbers: [u64; 5] = std::array::from_fn(|_| numbers.next().unwrap_or_default());
        let place = FilePlace::from_numbers(numbers).filter(|place| place.bytes() == RECORDS);
        let place = place.filter(|_| magic == MAGIC).ok_or(INVALID)?;
        if numbers[0] == u64::from(std::process::id()) {
            return Err(HipError::INVALID_CONTEXT);
        }
        let file = MemoryFile::open(&place).map_err(|error| {
            say!("an event of process {}: {error}", numbers[0]);
            INVALID
        })?;
        Ok(SharedEvent(Mutex::new(file)))
    }

    fn handle(&self) -> Result<Handle> {
        let place = lock(&self.0).place().map_err(|_| HipError::OPERATING_SYSTEM)?;
        let mut bytes = [0; MemoryHandle::BYTES];
        bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
        for (to, number) in bytes[MAGIC.len()..].chunks_exact_mut(8).zip(place.numbers()) {
            to.copy_from_slice(&number.to_le_bytes());
        }
        Ok(Handle(bytes))
    }

    /// Changes what is begun and done; no other process does so meanwhile.
    fn change(&self, change: impl FnOnce(&mut [u64; 2])) -> [u64; 2] {
        let file = lock(&self.0);
        let changed = file.exclusive(|| {
            let mut records = [0u64; 2];
            file.read(bytemuck::bytes_of_mut(&mut records))?;
            let before = records;
            change(&mut records);
            if records != before {
                file.write(bytemuck::bytes_of(&records), 0)?;
            }
            Ok(records)
        });
        changed.unwrap_or_else(|error: io::Error| {
            say!("an event of several processes: {error}");
            [0; 2]
        })
    }

    /// A record begins: its number.
    pub fn begin(&self) -> u64 {
        self.change(|[begun, _]| *begun += 1)[0]
    }

    /// That record is done, and with it those before.
    pub fn end(&self, record: u64) {
        self.change(|[_, done]| *done = record.max(*done));
    }

    /// The number of the last record that was begun, and whether it is done.
    pub fn last(&self) -> (u64, bool) {
        let [begun, done] = self.change(|_| ());
        (begun, done >= begun)
    }

    /// Waits for a record of any process.
    pub fn wait(&self, record: u64) {
        let mut pause = Duration::from_micros(20);
        while self.change(|_| ())[1] < record {
            std::thread::sleep(pause);
            pause = (2 * pause).min(Duration::from_millis(2));
        }
    }
}

api! {
    fn hipIpcGetMemHandle(handle: *mut Handle, ptr: u64) { export(handle, ptr) }
    fn hipIpcOpenMemHandle(ptr: *mut u64, handle: Handle, flags: c_uint) { import(ptr, handle, flags) }
    fn hipIpcCloseMemHandle(ptr: u64) { close(ptr) }

    fn hipIpcGetEventHandle(handle: *mut Handle, event: u64) {
        if handle.is_null() {
            return Err(INVALID);
        }
        let event = stream::event(event).map_err(|_| INVALID)?;
        put(handle, event.shared.as_ref().ok_or(HipError::INVALID_CONFIGURATION)?.handle()?)
    }

    fn hipIpcOpenEventHandle(event: *mut u64, handle: Handle) {
        if event.is_null() {
            return Err(INVALID);
        }
        stream::open_event(event, SharedEvent::open(handle)?)
    }
}
