//! The tile library (`hk/{matrix,mma,shared,sums,pipeline}.h`) on both targets, against index formulas that are written here.
#![cfg(feature = "emu")]

mod gemm;
mod lds;
mod mma;

use hk_core::{Arch, Device, Stream};

fn open(device: &str) -> Stream {
    Device::open(device).unwrap().create_stream().unwrap()
}

fn streams() -> impl Iterator<Item = Stream> {
    Arch::AMD.iter().map(|a| open(&format!("emu:{a}")))
}

/// Numbers without a pattern, the same in every run.
struct Random(u64);

impl Random {
    /// splitmix64
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// From 0 on, below 1.
    fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 * 2f64.powi(-53)
    }
}
