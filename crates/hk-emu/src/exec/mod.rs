//! Instruction handlers.
//!
//! An instruction is lowered once to a [`Uop`] with a handler; executing it is one indirect call. Vector handlers work
//! in chunks of 16 lanes that the host compiler turns into vector code, compiled once for each [`Level`] of host
//! features. Every level computes the same bits.

// Lanes are numbers that index several arrays at once, and bits are written as the ISA manuals write them.
#![allow(clippy::needless_range_loop, clippy::precedence, clippy::manual_is_multiple_of)]
// With a NaN a negated comparison, or two of them, is not the opposite one.
#![allow(clippy::neg_cmp_op_on_partial_ord, clippy::double_comparisons)]

pub(crate) mod buffer_format;
pub(crate) mod convert;
pub(crate) mod ds;
pub(crate) mod flat;
pub(crate) mod float;
pub(crate) mod indexed;
pub(crate) mod lanes;
pub(crate) mod mem;
pub(crate) mod mfma;
pub(crate) mod mubuf;
pub(crate) mod narrow;
pub(crate) mod prep;
pub(crate) mod salu;
pub(crate) mod smem;
pub(crate) mod special;
pub(crate) mod valu;
pub(crate) mod vfloat;
pub(crate) mod vop3p;

pub(crate) use crate::program::{Ctl, Env, Handler, SPECIAL, Uop};
use crate::wave::CHUNK;

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

/// Host features that handlers are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Nothing beyond the target's baseline.
    Portable,
    /// x86-64 with AVX2, FMA, F16C, BMI.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL, CD.
    Avx512,
}

impl Level {
    /// The best level of this host.
    pub fn detect() -> Level {
        [Level::Avx512, Level::Avx2].into_iter().find(|l| l.available()).unwrap_or(Level::Portable)
    }

    /// Whether this host can run it.
    pub fn available(self) -> bool {
        #[cfg(all(target_arch = "x86_64", not(any(hk_emu_portable, test))))]
        {
            let avx2 = || {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("bmi1")
                    && is_x86_feature_detected!("bmi2")
                    && is_x86_feature_detected!("lzcnt")
                    && is_x86_feature_detected!("popcnt")
            };
            match self {
                Level::Portable => true,
                Level::Avx2 => avx2(),
                Level::Avx512 => {
                    avx2()
                        && is_x86_feature_detected!("avx512f")
                        && is_x86_feature_detected!("avx512bw")
                        && is_x86_feature_detected!("avx512dq")
                        && is_x86_feature_detected!("avx512vl")
                        && is_x86_feature_detected!("avx512cd")
                }
            }
        }
        #[cfg(any(not(target_arch = "x86_64"), hk_emu_portable, test))]
        {
            self == Level::Portable
        }
    }
}

/// What differs between levels inside a handler. The results never do.
pub(crate) trait Host {
    /// `a * b + c`, rounded once to nearest even.
    fn fma32(a: f32, b: f32, c: f32) -> f32;
    /// `a * b + c`, rounded once to nearest even.
    fn fma64(a: f64, b: f64, c: f64) -> f64;
    /// Whether the host has the fused operations itself.
    const FUSED: bool;
    /// Whether it writes chosen lanes of a chunk in one instruction: little work is then done for idle chunks, too, without branches.
    const MASKS: bool = false;
    /// A chunk of f32 in the host's registers.
    type Chunk: Copy;
    /// Chunks that fill the host's registers with sums, and its pipeline with work.
    const SUMS: usize;
    fn load(x: &[f32; CHUNK]) -> Self::Chunk;
    fn store(x: Self::Chunk) -> [f32; CHUNK];
    /// `a * b + c` of each lane, rounded once to nearest even.
    fn fma_chunk(a: f32, b: Self::Chunk, c: Self::Chunk) -> Self::Chunk;
    /// Loads words, each atomic by itself.
    #[inline(always)]
    fn load_words(from: &[AtomicU32; CHUNK]) -> [u32; CHUNK] {
        std::array::from_fn(|l| from[l].load(Relaxed))
    }
    /// Stores words, each atomic by itself.
    #[inline(always)]
    fn store_words(to: &[AtomicU32; CHUNK], words: [u32; CHUNK]) {
        for (to, word) in to.iter().zip(words) {
            to.store(word, Relaxed);
        }
    }
    /// The bits of a chunk of booleans given as 0 or all-ones words.
    #[inline(always)]
    fn movemask(x: [u32; CHUNK]) -> u32 {
        let mut m = 0;
        for (l, x) in x.iter().enumerate() {
            m |= x & 1 << l;
        }
        m
    }
}

/// The baseline.
pub(crate) struct Portable;
impl Host for Portable {
    #[inline(always)]
    fn fma32(a: f32, b: f32, c: f32) -> f32 {
        float::fma32(a, b, c)
    }
    #[inline(always)]
    fn fma64(a: f64, b: f64, c: f64) -> f64 {
        libm::fma(a, b, c)
    }

    const FUSED: bool = false;
    type Chunk = [f32; CHUNK];
    const SUMS: usize = 4;
    #[inline(always)]
    fn load(x: &[f32; CHUNK]) -> [f32; CHUNK] {
        *x
    }
    #[inline(always)]
    fn store(x: [f32; CHUNK]) -> [f32; CHUNK] {
        x
    }
    #[inline(always)]
    fn fma_chunk(a: f32, b: [f32; CHUNK], c: [f32; CHUNK]) -> [f32; CHUNK] {
        let mut r = c;
        for l in 0..CHUNK {
            r[l] = float::fma32(a, b[l], c[l]);
        }
        r
    }
}

#[cfg(all(target_arch = "x86_64", not(any(hk_emu_portable, test))))]
mod x86 {
    use super::{CHUNK, Host};
    use std::arch::asm;
    use std::arch::x86_64::{
        __m256, __m256i, __m512, __m512i, _mm256_castsi256_ps, _mm256_fmadd_ps, _mm256_movemask_ps,
        _mm256_set1_ps, _mm512_fmadd_ps, _mm512_movepi32_mask, _mm512_set1_ps,
    };
    use std::mem::transmute;
    use std::sync::atomic::AtomicU32;

    // Memory that other threads write at the same time: the compiler has no vector accesses that are atomic by element, the hosts'
    // instructions do not tear aligned elements.

    #[inline]
    #[target_feature(enable = "avx2")]
    fn load_256(from: &[AtomicU32; 8]) -> __m256i {
        let value;
        // SAFETY: reads the 32 bytes of `from`.
        unsafe {
            asm!("vmovdqu {}, [{}]", out(ymm_reg) value, in(reg) from, options(nostack, preserves_flags, readonly));
        }
        value
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn store_256(to: &[AtomicU32; 8], value: __m256i) {
        // SAFETY: writes the 32 bytes of `to`, which are atomics.
        unsafe {
            asm!("vmovdqu [{}], {}", in(reg) to, in(ymm_reg) value, options(nostack, preserves_flags));
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load_512(from: &[AtomicU32; CHUNK]) -> __m512i {
        let value;
        // SAFETY: reads the 64 bytes of `from`.
        unsafe {
            asm!("vmovdqu32 {}, [{}]", out(zmm_reg) value, in(reg) from, options(nostack, preserves_flags, readonly));
        }
        value
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn store_512(to: &[AtomicU32; CHUNK], value: __m512i) {
        // SAFETY: writes the 64 bytes of `to`, which are atomics.
        unsafe {
            asm!("vmovdqu32 [{}], {}", in(reg) to, in(zmm_reg) value, options(nostack, preserves_flags));
        }
    }

    /// Handlers of [`Level::Avx2`](super::Level::Avx2).
    pub(crate) struct Avx2;
    /// Handlers of [`Level::Avx512`](super::Level::Avx512).
    pub(crate) struct Avx512;

    impl Host for Avx2 {
        #[inline(always)]
        fn fma32(a: f32, b: f32, c: f32) -> f32 {
            a.mul_add(b, c)
        }
        #[inline(always)]
        fn fma64(a: f64, b: f64, c: f64) -> f64 {
            a.mul_add(b, c)
        }
        const FUSED: bool = true;
        type Chunk = [__m256; 2];
        const SUMS: usize = 4;
        #[inline(always)]
        fn load(x: &[f32; CHUNK]) -> Self::Chunk {
            // SAFETY: the same 64 bytes.
            unsafe { transmute::<[f32; CHUNK], Self::Chunk>(*x) }
        }
        #[inline(always)]
        fn store(x: Self::Chunk) -> [f32; CHUNK] {
            // SAFETY: the same 64 bytes.
            unsafe { transmute::<Self::Chunk, [f32; CHUNK]>(x) }
        }
        #[inline(always)]
        fn fma_chunk(a: f32, b: Self::Chunk, c: Self::Chunk) -> Self::Chunk {
            // SAFETY: only handlers of the level use this, which run where its features are.
            unsafe {
                let a = _mm256_set1_ps(a);
                [_mm256_fmadd_ps(a, b[0], c[0]), _mm256_fmadd_ps(a, b[1], c[1])]
            }
        }
        #[inline(always)]
        fn load_words(from: &[AtomicU32; CHUNK]) -> [u32; CHUNK] {
            let (halves, _) = from.as_chunks::<8>();
            // SAFETY: 64 bytes are two vectors. Only handlers of the level use this, which run where AVX2 is.
            unsafe { transmute([load_256(&halves[0]), load_256(&halves[1])]) }
        }
        #[inline(always)]
        fn store_words(to: &[AtomicU32; CHUNK], words: [u32; CHUNK]) {
            let (halves, _) = to.as_chunks::<8>();
            // SAFETY: as above.
            unsafe {
                let [low, high]: [__m256i; 2] = transmute(words);
                store_256(&halves[0], low);
                store_256(&halves[1], high);
            }
        }
        #[inline(always)]
        fn movemask(x: [u32; CHUNK]) -> u32 {
            // SAFETY: 64 bytes are two vectors. Only handlers of the level use this, which run where AVX2 is.
            let [low, high]: [__m256i; 2] = unsafe { transmute(x) };
            // SAFETY: as above.
            unsafe {
                let bits = |v| _mm256_movemask_ps(_mm256_castsi256_ps(v)) as u32;
                bits(low) | bits(high) << 8
            }
        }
    }

    impl Host for Avx512 {
        #[inline(always)]
        fn fma32(a: f32, b: f32, c: f32) -> f32 {
            a.mul_add(b, c)
        }
        #[inline(always)]
        fn fma64(a: f64, b: f64, c: f64) -> f64 {
            a.mul_add(b, c)
        }
        const FUSED: bool = true;
        const MASKS: bool = true;
        type Chunk = __m512;
        const SUMS: usize = 8;
        #[inline(always)]
        fn load(x: &[f32; CHUNK]) -> Self::Chunk {
            // SAFETY: the same 64 bytes.
            unsafe { transmute::<[f32; CHUNK], Self::Chunk>(*x) }
        }
        #[inline(always)]
        fn store(x: Self::Chunk) -> [f32; CHUNK] {
            // SAFETY: the same 64 bytes.
            unsafe { transmute::<Self::Chunk, [f32; CHUNK]>(x) }
        }
        #[inline(always)]
        fn fma_chunk(a: f32, b: Self::Chunk, c: Self::Chunk) -> Self::Chunk {
            // SAFETY: only handlers of the level use this, which run where its features are.
            unsafe { _mm512_fmadd_ps(_mm512_set1_ps(a), b, c) }
        }
        #[inline(always)]
        fn load_words(from: &[AtomicU32; CHUNK]) -> [u32; CHUNK] {
            // SAFETY: 64 bytes are one vector. Only handlers of the level use this, which run where AVX-512 is.
            unsafe { transmute(load_512(from)) }
        }
        #[inline(always)]
        fn store_words(to: &[AtomicU32; CHUNK], words: [u32; CHUNK]) {
            // SAFETY: as above.
            unsafe { store_512(to, transmute::<[u32; CHUNK], __m512i>(words)) }
        }
        #[inline(always)]
        fn movemask(x: [u32; CHUNK]) -> u32 {
            // SAFETY: 64 bytes are one vector. Only handlers of the level use this, which run where AVX-512 DQ is.
            unsafe { _mm512_movepi32_mask(transmute::<[u32; CHUNK], __m512i>(x)).into() }
        }
    }
}
#[cfg(all(target_arch = "x86_64", not(any(hk_emu_portable, test))))]
pub(crate) use x86::{Avx2, Avx512};

/// Defines `fn pick(level) -> Handler` that compiles a generic handler body for each level.
macro_rules! levels {
    ($(#[$meta:meta])* $pick:ident = $body:ident $(<$($P:ident: $bound:path),+>)? $([$($N:ident: $ty:ty),+])?) => {
        $(#[$meta])*
        #[cfg_attr(any(hk_emu_portable, test), allow(unused))]
        pub(crate) fn $pick<$($($P: $bound,)+)? $($(const $N: $ty,)+)?>(level: $crate::exec::Level) -> $crate::exec::Handler {
            use $crate::{exec::{Ctl, Env, Level, Uop}, wave::Wave};
            fn portable<$($($P: $bound,)+)? $($(const $N: $ty,)+)?>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
                $body::<$crate::exec::Portable, $($($P,)+)? $($($N,)+)?>(w, e, u)
            }
            #[cfg(all(target_arch = "x86_64", not(any(hk_emu_portable, test))))]
            #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
            fn avx2<$($($P: $bound,)+)? $($(const $N: $ty,)+)?>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
                $body::<$crate::exec::Avx2, $($($P,)+)? $($($N,)+)?>(w, e, u)
            }
            #[cfg(all(target_arch = "x86_64", not(any(hk_emu_portable, test))))]
            #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512cd")]
            fn avx512<$($($P: $bound,)+)? $($(const $N: $ty,)+)?>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
                $body::<$crate::exec::Avx512, $($($P,)+)? $($($N,)+)?>(w, e, u)
            }
            match level {
                #[cfg(all(target_arch = "x86_64", not(any(hk_emu_portable, test))))]
                Level::Avx2 => avx2::<$($($P,)+)? $($($N,)+)?>,
                #[cfg(all(target_arch = "x86_64", not(any(hk_emu_portable, test))))]
                Level::Avx512 => avx512::<$($($P,)+)? $($($N,)+)?>,
                _ => portable::<$($($P,)+)? $($($N,)+)?>,
            }
        }
    };
}
pub(crate) use levels;

/// `f` of every lane of a chunk.
#[inline(always)]
pub(crate) fn lanes1(x: [u32; CHUNK], f: impl Fn(u32) -> u32) -> [u32; CHUNK] {
    let mut r = [0; CHUNK];
    for l in 0..CHUNK {
        r[l] = f(x[l]);
    }
    r
}
