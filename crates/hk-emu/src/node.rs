//! Devices of one host: peer access between them, and what their launches wait for, in other processes, too.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::memory::{ADDRESSES, Memory, Near};
use crate::observe::GlobalMemory;
use crate::observe::streams::Order;
use crate::shared::is_alive;

/// A host with several emulated devices: [`MachineOptions::node`](crate::MachineOptions::node). Clones are the same host.
///
/// Its devices have disjoint addresses, and kernels of one can access the memory of another after
/// [`Machine::enable_peer`](crate::Machine::enable_peer), and that of devices of other processes after
/// [`Machine::import`](crate::Machine::import). Launches of different devices advance side by side, in no fixed order.
#[derive(Clone, Default)]
pub struct Node(Arc<State>);

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Node")
    }
}

#[derive(Default)]
struct State {
    /// Counted up around whatever may change memory.
    version: AtomicU64,
    launches: Mutex<Launches>,
    memories: Mutex<BTreeMap<u32, Weak<Memory>>>,
    /// Held while a workgroup runs under [`Check::Global`](crate::Check::Global).
    turn: Mutex<()>,
    /// Of the first device that wanted the time.
    epoch: OnceLock<Instant>,
    /// For [`Check::Streams`](crate::Check::Streams): marks of one device hold for the others.
    order: OnceLock<Arc<Mutex<Order>>>,
}

#[derive(Default)]
struct Launches {
    next: u64,
    running: BTreeMap<u64, Entry>,
    /// When all were found waiting, and at which version of memory.
    stuck: Option<(u64, Instant)>,
    /// What [`Check::Global`](crate::Check::Global) knows of the launches that overlap; gone when none runs.
    global: Option<Arc<Mutex<GlobalMemory>>>,
}

/// A launch that runs.
struct Entry {
    device: Option<u32>,
    kernel: String,
    patience: Duration,
    /// Other processes whose memory it has: they may write at any time.
    processes: BTreeSet<u32>,
    /// The version at which all of it waited, and the wave that is named for it.
    waits: Option<(u64, Wait)>,
    /// It is part of a deadlock: what the other launches wait for.
    verdict: Option<String>,
}

/// A wave that waits for global memory.
#[derive(Clone, Copy)]
pub(crate) struct Wait {
    pub workgroup: [u32; 3],
    pub wave: u32,
    pub address: Option<u64>,
}

/// Devices of a node, at most.
const MAX_DEVICES: u32 = 16;
/// Addresses of each.
const SHARE: u64 = ((ADDRESSES.end - ADDRESSES.start) / MAX_DEVICES as u64) & !0xFFFF_FFFF;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Node {
    /// The largest number of devices.
    pub const MAX_DEVICES: u32 = MAX_DEVICES;

    /// A host without devices.
    pub fn new() -> Node {
        Node::default()
    }

    /// The addresses of a device; `None` if there is no such number.
    pub(crate) fn addresses(device: u32) -> Option<Range<u64>> {
        let first = ADDRESSES.start + u64::from(device) * SHARE;
        (device < MAX_DEVICES).then_some(first..first + SHARE)
    }

    pub(crate) fn same(&self, other: &Node) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(crate) fn add(&self, device: u32, memory: &Arc<Memory>) {
        lock(&self.0.memories).insert(device, Arc::downgrade(memory));
    }

    /// The time at which the node's constant counters began.
    pub(crate) fn epoch(&self) -> Instant {
        *self.0.epoch.get_or_init(Instant::now)
    }

    /// Keeps the workgroups of other launches from running: what a check knows of an access is then in the order in which
    /// memory sees it.
    pub(crate) fn turn(&self) -> MutexGuard<'_, ()> {
        lock(&self.0.turn)
    }

    /// The order of all work; its first stream is the host's.
    pub(crate) fn order(&self) -> Arc<Mutex<Order>> {
        let order = || {
            let mut order = Order::default();
            order.stream();
            Arc::new(Mutex::new(order))
        };
        self.0.order.get_or_init(order).clone()
    }

    /// The device whose memory an address is in, and what lies near it.
    pub(crate) fn near(&self, address: u64) -> Option<(u32, Near)> {
        let memories = lock(&self.0.memories);
        let (device, memory) =
            memories.iter().find(|(_, m)| m.upgrade().is_some_and(|m| m.holds(address)))?;
        Some((*device, memory.upgrade()?.near(address)))
    }

    /// A launch begins.
    pub(crate) fn begin(
        &self,
        device: Option<u32>,
        kernel: &str,
        patience: Duration,
        processes: BTreeSet<u32>,
    ) -> Running<'_> {
        let mut launches = lock(&self.0.launches);
        launches.next += 1;
        let id = launches.next;
        let kernel = kernel.to_owned();
        let entry = Entry { device, kernel, patience, processes, waits: None, verdict: None };
        launches.running.insert(id, entry);
        self.changed();
        Running { node: self, id }
    }

    /// Memory has changed, or may change from now on.
    pub(crate) fn changed(&self) {
        self.0.version.fetch_add(1, SeqCst);
    }

    pub(crate) fn version(&self) -> u64 {
        self.0.version.load(SeqCst)
    }
}

/// A launch while it runs.
pub(crate) struct Running<'n> {
    pub node: &'n Node,
    id: u64,
}

impl Running<'_> {
    /// What [`Check::Global`](crate::Check::Global) knows of the launches that overlap with this one.
    pub fn global(&self) -> Arc<Mutex<GlobalMemory>> {
        lock(&self.node.0.launches)
            .global
            .get_or_insert_with(|| Arc::new(Mutex::new(GlobalMemory::new())))
            .clone()
    }

    /// The number of its device.
    pub fn device(&self) -> Option<u32> {
        lock(&self.node.0.launches).running.get(&self.id).and_then(|entry| entry.device)
    }

    /// Every wave of the launch waited at this version of memory. True if that is for ever: no launch of the node has changed
    /// memory for a while, all wait, and no other process is left that could write.
    pub fn stuck(&self, version: u64, wait: Wait) -> bool {
        let mut launches = lock(&self.node.0.launches);
        let launches = &mut *launches;
        let Some(own) = launches.running.get_mut(&self.id) else { return false };
        own.waits = Some((version, wait));
        if own.verdict.is_some() {
            return true;
        }
        let at = |entry: &Entry| entry.waits.as_ref().is_some_and(|(at, _)| *at == version);
        if self.node.version() != version || !launches.running.values().all(at) {
            launches.stuck = None;
            return false;
        }
        let since = match launches.stuck {
            Some((of, since)) if of == version => since,
            _ => launches.stuck.insert((version, Instant::now())).1,
        };
        let patience = launches.running.values().map(|entry| entry.patience).max().unwrap_or_default();
        if since.elapsed() <= patience {
            return false;
        }
        if launches.running.values().flat_map(|entry| &entry.processes).any(|process| is_alive(*process)) {
            launches.stuck = None;
            return false;
        }
        let lines: Vec<(u64, String)> =
            launches.running.iter().map(|(id, entry)| (*id, entry.describe(self.node))).collect();
        for (id, entry) in &mut launches.running {
            let others = lines.iter().filter(|(other, _)| other != id);
            entry.verdict = Some(others.map(|(_, line)| format!("; {line}")).collect());
        }
        true
    }

    /// What the other launches of a deadlock wait for, and on which device this one runs.
    pub fn verdict(&self) -> String {
        let launches = lock(&self.node.0.launches);
        let Some(Entry { device, processes, verdict: Some(others), .. }) = launches.running.get(&self.id)
        else {
            return String::new();
        };
        let own = device.map_or(String::new(), |n| format!("; this launch runs on device {n}"));
        let ended = |process| format!("; process {process}, whose memory it has, has ended");
        own + &processes.iter().map(ended).collect::<String>() + others
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut launches = lock(&self.node.0.launches);
        launches.running.remove(&self.id);
        if launches.running.is_empty() {
            launches.global = None;
        }
        self.node.changed();
    }
}

impl Entry {
    fn describe(&self, node: &Node) -> String {
        let device = self.device.map_or(String::new(), |n| format!("on device {n} "));
        let mut line = format!("{device}kernel {}", self.kernel);
        if let Some((_, Wait { workgroup: [x, y, z], wave, address })) = &self.waits {
            line += &format!(" waits as well: workgroup ({x}, {y}, {z}), wave {wave}");
            if let Some(address) = address {
                line += &format!(", for {address:#x}");
                if let Some((owner, near)) = node.near(*address) {
                    line += &format!(" of device {owner}, {near}");
                }
            }
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_addresses_are_disjoint() {
        let shares: Vec<_> = (0..MAX_DEVICES).map(|n| Node::addresses(n).expect("a share")).collect();
        assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start));
        assert_eq!(shares[0].start, ADDRESSES.start);
        assert!(shares.last().is_some_and(|last| last.end <= ADDRESSES.end));
        assert_eq!(Node::addresses(MAX_DEVICES), None);
    }
}
