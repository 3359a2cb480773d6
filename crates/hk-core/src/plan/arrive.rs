//! Blocks whose last one goes on with what all have written.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that no other launch of this process has, and that memory hardly holds by accident: splitmix64 of a count.
pub fn next_mark() -> u64 {
    static COUNT: AtomicU64 = AtomicU64::new(1);
    let mut z = COUNT.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}
