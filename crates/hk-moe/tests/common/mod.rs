//! Inputs of the tests.

use hk_core::Float;

/// Random numbers.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
}

/// Logits, some of them equal, and if `special`, some of them zeros, infinities and NaNs of both signs.
pub fn logits<T: Float>(n: usize, seed: u64, special: bool) -> Vec<T> {
    const SPECIAL: [f32; 6] = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN];
    let mut numbers = Numbers(seed ^ 0x5555);
    (0..n)
        .map(|_| {
            let x = (numbers.next() % 4096) as f32 / 512.0 - 4.0 + (numbers.next() % 256) as f32 / 128.0;
            let which = (numbers.next() % 1024) as usize;
            T::from_f32(if special && which < SPECIAL.len() { SPECIAL[which] } else { x })
        })
        .collect()
}
