//! Calls of the host by kernels, and what a launch prints.
//!
//! Device libraries put a packet for each wave into a buffer in device memory and raise an interrupt; here the interrupt serves
//! the packets before the wave goes on. Source of the protocol: `ockl/src/hostcall_impl.cl` and `services.cl` of ROCm's device
//! libraries.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use hk_emu::{Counters, Dispatch, Fault, Host, Machine, MemoryError, Module};

use crate::heap::Heap;
use crate::module::count_of;
use crate::printf::{self, Output};
use crate::runtime::{Device, lock, say};
use crate::{sanitize, stats};

/// Packets: a wave holds one at a time, and a device at most 32 waves on each of 304 compute units.
const PACKETS: u64 = 1 << 14;
/// Bytes of a header: next packet, lanes, service, control.
const HEADER: u64 = 24;
/// Words of a lane's slot, and bytes of the slots of a packet.
const SLOT_WORDS: usize = 8;
const PAYLOAD: u64 = 64 * 8 * SLOT_WORDS as u64;
/// Offsets in the buffer: fifth word of its header, the signal that the kernel raises, its mailbox, and the packets.
const READY_STACK: u64 = 32;
const SIGNAL: u64 = 64;
const MAILBOX: u64 = 128;
const HEADERS: u64 = 192;
const PAYLOADS: u64 = HEADERS + PACKETS * HEADER;

/// Services: messages that are printed, and memory of the heap of kernels.
const PRINTF: u32 = 2;
const MEMORY: u32 = 3;

/// Flags and fields of the first word of a message's packet.
const BEGIN: u64 = 1;
const END: u64 = 2;
const LENGTH_SHIFT: u32 = 5;
const ID_SHIFT: u32 = 8;

/// Bytes of a message whose end does not come.
const MAX_MESSAGE_WORDS: usize = 1 << 17;

/// Kinds of hidden arguments that are served.
const HOSTCALL_BUFFER: &str = "hidden_hostcall_buffer";
const PRINTF_BUFFER: &str = "hidden_printf_buffer";
const HEAP: &str = "hidden_heap_v1";
const GRID: &str = "hidden_multigrid_sync_arg";

/// What the kernels of a device call the host with: made at the first launch that needs it.
#[derive(Default)]
pub(crate) struct Console {
    hostcall: Mutex<Option<u64>>,
    printf: Mutex<Option<u64>>,
    heap: Mutex<Option<Heap>>,
    messages: Mutex<Messages>,
    grid: Mutex<Option<u64>>,
}

/// Messages that have begun, by number.
#[derive(Default)]
struct Messages {
    begun: HashMap<u64, Vec<u64>>,
    next: u64,
}

/// Makes the buffer: its header, the signal, and all packets in the stack of free ones.
fn new_buffer(machine: &Machine) -> Result<u64, MemoryError> {
    let buffer = machine.alloc_zeroed(PAYLOADS + PACKETS * PAYLOAD, 4096, "hostcall buffer")?;
    let words = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    // A packet is named by its index and, above that, a tag that is never 0 together with the index.
    let first = PACKETS - 1;
    let header = [buffer + HEADERS, buffer + PAYLOADS, buffer + SIGNAL, first, 0, PACKETS - 1];
    machine.write(buffer, &words(&header))?;
    machine.write(buffer + SIGNAL, &words(&[1, 0, buffer + MAILBOX, 1]))?;
    let next = |i: u64| match i {
        0 => 0,
        1 => PACKETS,
        _ => i - 1,
    };
    let headers: Vec<u64> = (0..PACKETS).flat_map(|i| [next(i), 0, 0]).collect();
    machine.write(buffer + HEADERS, &words(&headers))?;
    Ok(buffer)
}

/// The bytes of what the blocks of a cooperative launch wait by, as ROCm's device library reads it.
const GRID_BYTES: u64 = 48;

fn new_grid(machine: &Machine) -> Result<u64, MemoryError> {
    machine.alloc_zeroed(GRID_BYTES, 256, "barrier of the grid")
}

/// What the device library knows of a grid that is the only one of its launch: the barrier of several grids (none), the grid's number,
/// their count, the threads before it and of all, the barrier of its blocks (two words) and their count.
fn grid_info(dispatch: &Dispatch<'_>) -> [u8; GRID_BYTES as usize] {
    let blocks = count_of(dispatch.grid);
    let words = [0, 1 << 32, 0, blocks * count_of(dispatch.block), 0, blocks];
    let mut bytes = [0; GRID_BYTES as usize];
    bytes.chunks_exact_mut(8).zip(words).for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
    bytes
}

/// Runs a kernel, serves its calls of the host, and prints what it prints. True if it wrote to stderr, as failed assertions do.
pub(crate) fn launch(
    device: &Device,
    module: &Module,
    kernel: &hk_codeobj::Kernel,
    dispatch: &Dispatch<'_>,
    cooperative: bool,
) -> (Result<Counters, Fault>, bool) {
    let (machine, console) = (&device.machine, &device.console);
    let mut hidden = vec![];
    let mut want = |kind, buffer: &Mutex<Option<u64>>, make: fn(&Machine) -> Result<u64, MemoryError>| {
        if !kernel.args.iter().any(|arg| arg.kind == kind) {
            return None;
        }
        let mut buffer = lock(buffer);
        if buffer.is_none() {
            *buffer = make(machine).map_err(|error| say!("{error}")).ok();
        }
        hidden.extend(buffer.map(|at| (kind, at)));
        *buffer
    };
    let hostcall = want(HOSTCALL_BUFFER, &console.hostcall, new_buffer);
    let printf = want(PRINTF_BUFFER, &console.printf, printf::new_buffer);
    let grid = if cooperative { want(GRID, &console.grid, new_grid) } else { None };
    if let Some(grid) = grid
        && let Err(error) = machine.write(grid, &grid_info(dispatch))
    {
        say!("{error}");
    }
    if kernel.args.iter().any(|arg| arg.kind == HEAP) {
        let mut heap = lock(&console.heap);
        if heap.is_none() {
            let limit = device.heap_limit.load(Relaxed);
            *heap = Heap::new(machine, limit).map_err(|error| say!("{error}")).ok();
        }
        hidden.extend(heap.as_ref().map(|heap| (HEAP, heap.structure())));
    }
    let complained = AtomicBool::new(false);
    let serve = || {
        let Some(buffer) = hostcall else { return };
        if let Err(error) = console.serve(machine, buffer, &complained) {
            say!("a call of the host by {}: {error}", kernel.name);
        }
    };
    let checks = sanitize::options().checks(&kernel.name);
    let host = Host { hidden: &hidden, interrupt: hostcall.is_some().then_some(&serve), checks };
    let result = machine.launch_with(module, &kernel.name, dispatch, &host);
    if let Ok(counters) = &result {
        stats::add(device.ordinal, &kernel.name, *counters);
    }
    if let Some(buffer) = printf {
        match printf::drain(machine, buffer, &module.code_object().printf) {
            Ok(wrote) => complained.store(wrote | complained.load(Relaxed), Relaxed),
            Err(error) => say!("what {} printed: {error}", kernel.name),
        }
    }
    if result.is_err() {
        // Waves that were stopped hold packets and have begun messages.
        *lock(&console.messages) = Messages::default();
        if let Some(buffer) = lock(&console.hostcall).take() {
            let _ = machine.free(buffer);
        }
    }
    if !hidden.is_empty() {
        Output::Stdout.flush();
    }
    (result, complained.load(Relaxed))
}

impl Console {
    /// What kernels have allocated is gone.
    pub fn reset(&self, machine: &Machine) {
        if let Some(heap) = lock(&self.heap).take() {
            heap.release(machine);
        }
    }

    /// Serves the packets that wait.
    fn serve(&self, machine: &Machine, buffer: u64, complained: &AtomicBool) -> Result<(), MemoryError> {
        let mut messages = lock(&self.messages);
        let mut packet = machine.exchange(buffer + READY_STACK, 0)?;
        // Each packet once, however the stack is damaged.
        for _ in 0..PACKETS {
            if packet == 0 {
                break;
            }
            let index = packet % PACKETS;
            let (header, payload) = (buffer + HEADERS + index * HEADER, buffer + PAYLOADS + index * PAYLOAD);
            let mut bytes = [0; HEADER as usize];
            machine.read(header, &mut bytes)?;
            let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|b| bytes[8 * i + b]));
            let (next, lanes, service, control) = (word(0), word(1), word(2) as u32, (word(2) >> 32) as u32);
            for lane in (0..64).filter(|lane| lanes >> lane & 1 != 0) {
                let at = payload + lane * 8 * SLOT_WORDS as u64;
                let mut slot = [0u64; SLOT_WORDS];
                machine.read(at, bytemuck::bytes_of_mut(&mut slot))?;
                match service {
                    MEMORY => self.answer_memory(&mut slot),
                    _ => answer(&mut messages, service, &mut slot, complained),
                }
                machine.write(at, bytemuck::cast_slice(&slot[..2]))?;
            }
            machine.write(header + 20, &(control & !1).to_le_bytes())?;
            packet = next;
        }
        Ok(())
    }

    /// Memory of the heap: an address to free, or 0 and the bytes to allocate.
    fn answer_memory(&self, slot: &mut [u64; SLOT_WORDS]) {
        let mut heap = lock(&self.heap);
        let Some(heap) = heap.as_mut() else {
            slot[0] = 0;
            return;
        };
        match *slot {
            [0, bytes, ..] => slot[0] = heap.alloc(bytes),
            [addr, ..] => {
                if !heap.free(addr) {
                    say!("a kernel frees {addr:#x}, which its heap has not given");
                }
                slot[0] = 0;
            }
        }
    }
}

/// Replaces the first words of a lane's slot by the answer.
fn answer(messages: &mut Messages, service: u32, slot: &mut [u64; SLOT_WORDS], complained: &AtomicBool) {
    if service != PRINTF {
        say!("a kernel calls service {service} of the host, which there is not");
        *slot = [0; SLOT_WORDS];
    } else if let Some(message) = messages.append(slot) {
        slot[0] = print(&message, complained);
    }
}

impl Messages {
    /// Adds a packet to its message. The message if that is its end, else the packet's first word names it for the next one.
    fn append(&mut self, slot: &mut [u64; SLOT_WORDS]) -> Option<Vec<u64>> {
        let mut descriptor = slot[0];
        if descriptor & BEGIN != 0 {
            self.begun.insert(self.next, vec![]);
            descriptor = descriptor & !BEGIN & ((1 << ID_SHIFT) - 1) | self.next << ID_SHIFT;
            self.next += 1;
        }
        let id = descriptor >> ID_SHIFT;
        let Some(words) = self.begun.get_mut(&id) else {
            say!("a kernel continues message {id}, which has not begun");
            return None;
        };
        let count = (descriptor >> LENGTH_SHIFT & 7) as usize;
        if words.len() < MAX_MESSAGE_WORDS {
            words.extend(&slot[1..=count]);
        }
        slot[0] = descriptor;
        if descriptor & END == 0 { None } else { self.begun.remove(&id) }
    }
}

/// Prints a message; what `printf` returns. Its first word says where to: 0 is stdout, 1 stderr.
fn print(message: &[u64], complained: &AtomicBool) -> u64 {
    const FAILED: u64 = u64::MAX;
    let output = match message.first() {
        Some(0) => Output::Stdout,
        Some(1) => Output::Stderr,
        _ => return FAILED,
    };
    let Some(text) = printf::message(&message[1..]) else { return FAILED };
    output.print(&text);
    complained.fetch_or(output == Output::Stderr, Relaxed);
    text.len() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_joined_by_number() {
        let mut messages = Messages::default();
        let first = |words: [u64; 2]| [BEGIN | 2 << LENGTH_SHIFT, words[0], words[1], 0, 0, 0, 0, 0];
        let [mut a, mut b] = [first([0, 10]), first([0, 20])];
        assert!(messages.append(&mut a).is_none() && messages.append(&mut b).is_none());
        assert_ne!(a[0] >> ID_SHIFT, b[0] >> ID_SHIFT);
        let end =
            |of: u64, word| [of & !(7 << LENGTH_SHIFT) | END | 1 << LENGTH_SHIFT, word, 0, 0, 0, 0, 0, 0];
        assert_eq!(messages.append(&mut end(b[0], 21)), Some(vec![0, 20, 21]));
        assert_eq!(messages.append(&mut end(a[0], 11)), Some(vec![0, 10, 11]));
        // It has ended, and no other has that number.
        assert_eq!(messages.append(&mut end(a[0], 12)), None);
        assert_eq!(messages.append(&mut [END | 99 << ID_SHIFT; SLOT_WORDS]), None);
    }
}
