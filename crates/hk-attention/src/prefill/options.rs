//! What scores are made of, as the operators take it.

use super::plan::Tiling;
use crate::kv_cache::KvLayout;
use hk_core::{Arch, DType, Element, Error, Fp8E4M3, Fp8E4M3Fnuz, Result, TensorView, bf16, f16};

/// Which keys a query sees. Query `i` of `Sq` stands at key `p = i + Sk - Sq`; without limits it sees all keys.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Mask {
    /// Keys after `p` are masked.
    pub causal: bool,
    /// Keys before `p - left` are masked. `Some(0)` with `causal`: the query sees its own place alone.
    pub left: Option<u32>,
    /// Keys after `p + right` are masked.
    pub right: Option<u32>,
}

impl Mask {
    /// Every key up to the query's own place.
    pub const CAUSAL: Self = Self { causal: true, left: None, right: None };

    /// Keys before and after the own place, as the kernels take them.
    pub(crate) fn reach(self) -> [i32; 2] {
        let limit = |keys: Option<u32>| keys.map_or(UNLIMITED, |n| n.min(UNLIMITED as u32) as i32);
        [limit(self.left), if self.causal { 0 } else { limit(self.right) }]
    }
}

/// More keys than a sequence has.
pub(crate) const UNLIMITED: i32 = 1 << 30;

/// Added to scores, after scale and softcap: `[Sq, Sk]` or `[B, Hq, Sq, Sk]`, the last axis of unit stride, others free or
/// broadcast.
#[derive(Debug, Clone, Copy)]
pub enum Bias<'a, T: Element> {
    /// In `f32`.
    F32(TensorView<'a, f32>),
    /// In the type of the queries.
    Own(TensorView<'a, T>),
}

/// Dropout of probabilities: `keep / (1 - p)` times each, after their sum is taken. Key `j` of query `i` is kept if `u >= p`, where `u` is
/// `2^-24` times the upper 24 bits of word `j mod 4` of Philox4x32-10 with key `seed` and counter
/// `offset + ((batch Hq + head) Sq + i) ceil(Sk / 4) + floor(j / 4)`; `Sq` and `Sk` are the rows of `q` and `k`, of all sequences if
/// they are packed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// The probability of being dropped, in [0, 1).
    pub p: f32,
    /// Key of the random numbers.
    pub seed: u64,
    /// Added to their counters.
    pub offset: u64,
}

/// Factors of quantized tensors, `f32`: of queries `[B, Hq]`, of keys and values `[B, Hkv]`, or `[1]`. Absent: 1.
#[derive(Debug, Clone, Copy, Default)]
pub struct Descales<'a> {
    /// Of queries.
    pub q: Option<TensorView<'a, f32>>,
    /// Of keys.
    pub k: Option<TensorView<'a, f32>>,
    /// Of values.
    pub v: Option<TensorView<'a, f32>>,
}

/// Where the keys of a sequence are in a cache: token `t` of sequence `n` is token `t % tokens` of page
/// `block_table[n, t / tokens]`. Entries behind the last key are not read.
#[derive(Debug, Clone, Copy)]
pub struct Pages<'a> {
    /// `[sequences, pages]`.
    pub block_table: TensorView<'a, i32>,
    /// Of the caches.
    pub layout: KvLayout,
}

/// Keys and values in pages.
#[derive(Debug, Clone, Copy)]
pub struct PagedKv<'a, C: Element> {
    /// Keys, of the shape that the layout says: [`KvLayout::key_shape`].
    pub k_cache: TensorView<'a, C>,
    /// Values: [`KvLayout::value_shape`].
    pub v_cache: TensorView<'a, C>,
    /// Which pages a sequence has.
    pub pages: Pages<'a>,
}

/// Options of attention; the default is `softmax(q k^T / sqrt(Dqk)) v` over all keys.
#[derive(Debug, Clone, Copy)]
pub struct AttentionOptions<'a, T: Element> {
    /// Factor of the products; `None`: `1 / sqrt(Dqk)`.
    pub scale: Option<f32>,
    /// Which keys a query sees.
    pub mask: Mask,
    /// `c > 0`: scores become `c tanh(s / c)`. 0: they do not.
    pub softcap: f32,
    /// Slopes `[Hq]` or `[B, Hq]`: `slope |p - j|` is subtracted from scores.
    pub alibi: Option<TensorView<'a, f32>>,
    /// Added to scores.
    pub bias: Option<Bias<'a, T>>,
    /// A logit `[Hq]` of no value for each head, which is not scaled: it adds to the sum of exponentials.
    pub sink: Option<TensorView<'a, f32>>,
    /// Dropout of probabilities.
    pub dropout: Option<Dropout>,
    /// Factors of quantized tensors.
    pub descales: Descales<'a>,
    /// How the work is cut into blocks.
    pub tiling: Tiling,
    /// Of [`mha_varlen`](super::mha_varlen): keys and values are caches, of which sequences have these pages.
    pub pages: Option<Pages<'a>>,
}

impl<T: Element> Default for AttentionOptions<'_, T> {
    fn default() -> Self {
        Self {
            scale: None,
            mask: Mask::default(),
            softcap: 0.0,
            alibi: None,
            bias: None,
            sink: None,
            dropout: None,
            descales: Descales::default(),
            tiling: Tiling::Auto,
            pages: None,
        }
    }
}

/// Element type of queries, keys and values.
pub trait AttentionElement: Element {}

impl AttentionElement for bf16 {}
impl AttentionElement for f16 {}
impl AttentionElement for f32 {}
impl AttentionElement for Fp8E4M3 {}
impl AttentionElement for Fp8E4M3Fnuz {}

/// The fp8 e4m3 of the device's matrix instructions: [`Fp8E4M3Fnuz`] of gfx942, else [`Fp8E4M3`].
pub trait DeviceFp8: Element {}

impl DeviceFp8 for Fp8E4M3 {}
impl DeviceFp8 for Fp8E4M3Fnuz {}

/// Element type of outputs for queries of type `T`: `T` itself, or of fp8 `bf16`, `f16` or `f32`.
pub trait AttentionOutput<T: AttentionElement>: Element {}

impl AttentionOutput<bf16> for bf16 {}
impl AttentionOutput<f16> for f16 {}
impl AttentionOutput<f32> for f32 {}
macro_rules! outputs_of_fp8 {
    ($($fp8:ty),*) => {$(
        impl AttentionOutput<$fp8> for bf16 {}
        impl AttentionOutput<$fp8> for f16 {}
        impl AttentionOutput<$fp8> for f32 {}
    )*};
}
outputs_of_fp8!(Fp8E4M3, Fp8E4M3Fnuz);

/// Element type of a cache for queries of type `T`: `T` itself, the device's fp8 e4m3, or `i8`.
pub trait PagedElement<T: AttentionElement>: Element {}

impl<T: AttentionElement> PagedElement<T> for T {}
macro_rules! caches {
    ($($t:ty: $($c:ty),*;)*) => {$($(impl PagedElement<$t> for $c {})*)*};
}
caches! {
    bf16: Fp8E4M3, Fp8E4M3Fnuz, i8;
    f16: Fp8E4M3, Fp8E4M3Fnuz, i8;
    f32: Fp8E4M3, Fp8E4M3Fnuz, i8;
    Fp8E4M3: Fp8E4M3Fnuz, i8;
    Fp8E4M3Fnuz: Fp8E4M3, i8;
}

/// Checks a finite factor.
pub(crate) fn check_scale(op: &'static str, scale: Option<f32>, dqk: usize) -> Result<f32> {
    match scale {
        None => Ok(1.0 / (dqk as f32).sqrt()),
        Some(scale) if scale.is_finite() && scale != 0.0 => Ok(scale),
        Some(scale) => Err(Error::argument(op, "scale", scale, "a finite number other than 0")),
    }
}

pub(crate) fn check_softcap(op: &'static str, softcap: f32) -> Result<f32> {
    if softcap.is_finite() && softcap >= 0.0 {
        return Ok(softcap);
    }
    Err(Error::argument(op, "softcap", softcap, "0 (none) or a positive number"))
}

impl Dropout {
    /// The smallest upper 24 bits that are kept, and the factor of those.
    pub(crate) fn threshold(self, op: &'static str) -> Result<(u32, f32)> {
        if !(0.0..1.0).contains(&self.p) {
            return Err(Error::argument(op, "dropout_p", self.p, "a number in [0, 1)"));
        }
        // u >= p, of multiples of 2^-24: exact in f64.
        Ok(((f64::from(self.p) * f64::from(1 << 24)).ceil() as u32, 1.0 / (1.0 - self.p)))
    }
}

/// Refuses the fp8 that the device's instructions do not have: the kernels widen their own.
pub(crate) fn check_fp8(op: &'static str, arg: &'static str, dtype: DType, arch: Arch) -> Result<()> {
    if dtype.is_fp8_of_another(arch) {
        return Err(Error::unsupported(
            op,
            format!("{arg} of {dtype} on {arch}"),
            format!("its fp8 is {}", DType::fp8_of(arch)),
        ));
    }
    Ok(())
}
