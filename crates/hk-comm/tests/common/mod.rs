//! Ranks on emulated devices, each with a thread of its own.

pub mod quantized;

use hk_comm::{P2pComm, P2pOptions};
use hk_core::{Arch, Device, Float, Stream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The ranks of a communicator, on devices of an emulated host that nothing else uses.
pub struct Ranks {
    pub comms: Vec<P2pComm>,
}

/// Few blocks and small buffers: the emulator's time goes with both.
pub fn options() -> P2pOptions {
    P2pOptions { buffer_bytes: 1 << 20, blocks: Some(2), timeout: Duration::from_secs(60), checked: false }
}

/// Streams of `world` devices of one host; `more` are options of the devices.
pub fn streams(arch: Arch, world: usize, more: &str) -> Vec<Stream> {
    static NODES: AtomicU32 = AtomicU32::new(0);
    let node = NODES.fetch_add(1, Ordering::Relaxed);
    let open = |rank| Device::open(&format!("emu:{arch}:{rank}?node=test{node}{more}")).unwrap();
    (0..world).map(|rank| open(rank).create_stream().unwrap()).collect()
}

impl Ranks {
    pub fn new(arch: Arch, world: usize) -> Self {
        Self::with(arch, world, "", &options())
    }

    pub fn with(arch: Arch, world: usize, more: &str, options: &P2pOptions) -> Self {
        Self { comms: P2pComm::new(&streams(arch, world, more), options).unwrap() }
    }

    /// What `call` gives on each rank.
    pub fn each<R: Send>(&mut self, call: impl Fn(usize, &mut P2pComm, &Stream) -> R + Sync) -> Vec<R> {
        let call = &call;
        std::thread::scope(|scope| {
            let ranks = self.comms.iter_mut().enumerate().map(|(rank, comm)| {
                scope.spawn(move || {
                    let stream = comm.stream().clone();
                    call(rank, comm, &stream)
                })
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}

/// Pseudo-random values about 0, the same for the same seed.
pub fn random<T: Float>(seed: u64, n: usize) -> Vec<T> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut unit = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32
    };
    // A sum of four is near enough to a normal distribution.
    (0..n).map(|_| T::from_f32((unit() + unit() + unit() + unit() - 2.0) * 1.7)).collect()
}

/// Small integers: their sums are exact in every type and order.
pub fn integers<T: Float>(rank: usize, n: usize) -> Vec<T> {
    (0..n).map(|i| T::from_f32(((i * 7 + i / 11 + rank * 13) % 17) as f32 - 8.0)).collect()
}

/// The sum in f32 of ranks 0, 1, .., rounded once.
pub fn sum<T: Float>(x: &[Vec<T>]) -> Vec<T> {
    let at = |i: usize| x[1..].iter().fold(x[0][i].to_f32(), |sum, x| sum + x[i].to_f32());
    (0..x[0].len()).map(|i| T::from_f32(at(i))).collect()
}

/// Bytes of a value, so that NaNs and zeros compare.
pub fn bits<T: Float>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}
