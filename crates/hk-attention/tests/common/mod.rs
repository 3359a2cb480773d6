//! What the tests of cache operators share: tokens with positions and slots, and rotation by the rotation's own operator.
#![allow(dead_code, reason = "each test file uses a part")]

use hk_attention::reference;
use hk_core::rope::{
    Positions, Rope, RopeElement, RopeLayout, RopeSpan, RopeStyle, RopeTableWidth, RopeTables,
};
use hk_core::{
    Element, Float, Fp8E4M3, Fp8E4M3Fnuz, IndexView, Layout, TensorView, TensorViewMut, bf16, f16,
};
use hk_testkit::{Fill, Gpu, Place, Tensor, proptest::prelude::*, widen};

/// Rows of the tables.
pub const ROWS: usize = 50;

/// An element as caches hold it, made from f32 as the operators make it.
pub trait Stored: Element {
    fn store(x: f32) -> Self;
    fn value(self) -> f64;
}

macro_rules! stored {
    ($($t:ty: $store:expr, $value:expr;)*) => {$(
        impl Stored for $t {
            fn store(x: f32) -> Self {
                $store(x)
            }
            fn value(self) -> f64 {
                $value(self)
            }
        }
    )*};
}

stored! {
    bf16: <bf16 as Float>::from_f32, Float::to_f64;
    f16: <f16 as Float>::from_f32, Float::to_f64;
    Fp8E4M3: Fp8E4M3::from_f32_saturating, |x: Fp8E4M3| x.to_f32().into();
    Fp8E4M3Fnuz: Fp8E4M3Fnuz::from_f32_saturating, |x: Fp8E4M3Fnuz| x.to_f32().into();
}

/// Positions and slots of tokens, and the rotation.
#[derive(Debug, Clone)]
pub struct Tokens {
    /// Those that have a position, those that have a slot, all.
    pub counts: [usize; 3],
    pub rope: Rope,
    pub n_slots: usize,
    pub positions: Vec<i64>,
    pub offsets: Option<Vec<i64>>,
    pub slots: Vec<i64>,
    pub wide: bool,
    pub seed: u64,
}

/// How slots of tokens follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// A permutation, a tenth of it negative, one beyond the cache.
    Shuffled,
    /// Sequences of tokens one after the other, each from a slot of its own.
    Runs,
}

/// A few random numbers, the same for a seed.
pub fn integers(seed: u64, n: usize, below: usize) -> Vec<usize> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 33) as usize
    };
    (0..n).map(|_| next() % below.max(1)).collect()
}

impl Tokens {
    pub fn new(counts: [usize; 3], rope: Rope, n_slots: usize, order: Order, seed: u64) -> Self {
        let [rotated, cached, _] = counts;
        let positions: Vec<i64> = integers(seed, rotated, ROWS).iter().map(|&p| p as i64).collect();
        let mut free: Vec<i64> = (0..n_slots as i64).collect();
        let mut slots = Vec::new();
        match order {
            Order::Shuffled => {
                for (i, at) in integers(seed ^ 7, cached, 1 << 30).into_iter().enumerate() {
                    let skip = i % 10 == 3 || free.is_empty();
                    slots.push(if skip { -1 } else { free.swap_remove(at % free.len()) });
                }
                if cached > 5 {
                    slots[5] = n_slots as i64; // one past the last
                }
            }
            Order::Runs => {
                let starts = integers(seed ^ 9, cached, 7);
                let mut next = starts.first().map_or(0, |&s| s as i64);
                for (i, gap) in starts.iter().enumerate() {
                    // A new sequence now and then.
                    if i % 23 == 22 {
                        next += *gap as i64;
                    }
                    slots.push(if next < n_slots as i64 { next } else { -1 });
                    next += 1;
                }
            }
        }
        Self { counts, rope, n_slots, positions, offsets: None, slots, wide: seed.is_multiple_of(2), seed }
    }

    /// With positions that the tables do not have, for some tokens.
    pub fn with_bad_positions(mut self) -> Self {
        for (i, bad) in [(1, ROWS as i64), (4, -1), (6, i64::from(i32::MAX))] {
            if let Some(p) = self.positions.get_mut(i) {
                *p = bad;
            }
        }
        self
    }

    /// With the same positions made of two parts.
    pub fn with_offsets(mut self) -> Self {
        let offsets: Vec<i64> =
            integers(self.seed ^ 3, self.counts[0], 40).iter().map(|&o| o as i64 - 20).collect();
        self.positions.iter_mut().zip(&offsets).for_each(|(p, o)| *p -= o);
        self.offsets = Some(offsets);
        self
    }

    /// Table rows of the tokens.
    pub fn rows(&self) -> Vec<i64> {
        let offsets = self.offsets.clone().unwrap_or_else(|| vec![0; self.positions.len()]);
        self.positions.iter().zip(offsets).map(|(p, o)| p + o).collect()
    }

    pub fn table<R: Float>(&self, sines: bool) -> Vec<R> {
        let width = self.rope.table_width();
        let angle = |i: usize| (i / width) as f64 * 0.37 * (1.0 + (i % width) as f64).powf(-0.7);
        (0..ROWS * width)
            .map(|i| if sines { angle(i).sin() } else { angle(i).cos() })
            .map(R::from_f64)
            .collect()
    }

    pub fn slot(&self, token: usize) -> Option<usize> {
        let row = self.rows().get(token).copied().unwrap_or(0);
        let slot = usize::try_from(*self.slots.get(token)?).ok()?;
        (slot < self.n_slots && (0..ROWS as i64).contains(&row)).then_some(slot)
    }
}

/// [`Tokens`] on a device.
pub struct DeviceTokens<R: Float> {
    cos: Tensor<R>,
    sin: Tensor<R>,
    narrow: [Tensor<i32>; 3],
    wide: [Tensor<i64>; 3],
    is_wide: bool,
    has_offsets: bool,
}

impl<R: Float> DeviceTokens<R> {
    pub fn new(gpu: &Gpu, t: &Tokens, shift: usize) -> Self {
        let width = t.rope.table_width();
        let table = |sines| {
            gpu.upload(
                &t.table::<R>(sines),
                Place::rows([ROWS, width], width.next_multiple_of(8)).shifted(shift),
            )
        };
        // Every other integer of memory.
        let place = |n: usize| Place::new(Layout::with_strides([n], [2]).unwrap());
        let lists = [t.positions.clone(), t.offsets.clone().unwrap_or_default(), t.slots.clone()];
        let narrow = |list: &Vec<i64>| list.iter().map(|&v| v as i32).collect::<Vec<_>>();
        Self {
            cos: table(false),
            sin: table(true),
            narrow: [0, 1, 2].map(|i| gpu.upload(&narrow(&lists[i]), place(lists[i].len()))),
            wide: [0, 1, 2].map(|i| gpu.upload(&lists[i], place(lists[i].len()))),
            is_wide: t.wide,
            has_offsets: t.offsets.is_some(),
        }
    }

    fn index(&self, i: usize) -> IndexView<'_> {
        if self.is_wide { self.wide[i].view().into() } else { self.narrow[i].view().into() }
    }

    pub fn slots(&self) -> IndexView<'_> {
        self.index(2)
    }

    pub fn tables(&self) -> RopeTables<'_, R> {
        RopeTables {
            cos: self.cos.view(),
            sin: self.sin.view(),
            positions: Positions::Given(self.index(0)),
            offsets: self.has_offsets.then(|| self.index(1)),
        }
    }

    pub fn assert_untouched(&self, gpu: &Gpu) {
        gpu.assert_untouched(&self.cos);
        gpu.assert_untouched(&self.sin);
        self.wide.iter().for_each(|t| gpu.assert_untouched(t));
        self.narrow.iter().for_each(|t| gpu.assert_untouched(t));
    }
}

/// The rotated heads of `[tokens, heads, dim]` before rounding, by the operator that only rotates; tokens without a position
/// as they are.
pub fn rotate_f32<T: Float, R: Float>(gpu: &Gpu, t: &Tokens, x: &[T], [heads, dim]: [usize; 2]) -> Vec<f32>
where
    f32: RopeElement<f32>,
{
    let mut out: Vec<f32> = x.iter().map(|v| v.to_f32()).collect();
    let n = t.counts[0];
    if n > 0 && heads > 0 {
        let tables: [Vec<f32>; 2] =
            [false, true].map(|s| t.table::<R>(s).iter().map(|v| v.to_f32()).collect());
        let width = t.rope.table_width();
        let (cos, sin) = (gpu.upload(&tables[0], [ROWS, width]), gpu.upload(&tables[1], [ROWS, width]));
        let rows = gpu.upload(&t.rows(), [n]);
        let given = gpu.upload(&out[..n * heads * dim], [n, heads, dim]);
        let mut rotated = gpu.poisoned::<f32>([n, heads, dim]);
        let positions = Positions::Given(rows.view().into());
        let tables = RopeTables { cos: cos.view(), sin: sin.view(), positions, offsets: None };
        hk_activation::rope_cached(
            gpu.stream(),
            given.view(),
            tables,
            rotated.view_mut(),
            t.rope,
            RopeLayout::Thd,
        )
        .unwrap();
        out[..n * heads * dim].copy_from_slice(&gpu.download(&rotated));
    }
    out
}

/// The same in f64.
pub fn rotate_f64<T: Float, R: Float>(t: &Tokens, x: &[T], [heads, dim]: [usize; 2]) -> Vec<f64> {
    let (cos, sin, rows) = (widen(&t.table::<R>(false)), widen(&t.table::<R>(true)), t.rows());
    let tokens = reference::Tokens {
        rope: t.rope,
        cos: &cos,
        sin: &sin,
        positions: &rows,
        slots: &t.slots,
        n_slots: t.n_slots,
    };
    widen(x).chunks(dim).enumerate().flat_map(|(i, head)| tokens.rotate(i / heads, head)).collect()
}

/// Normal elements, one in 200 so large that fp8 saturates.
pub fn elements<T: Float>(n: usize, seed: u64) -> Vec<T> {
    let mut x: Vec<T> = Fill::Normal.elements(n, seed);
    x.iter_mut().step_by(200).for_each(|v| *v = T::from_f32(v.to_f32() * 1000.0));
    x
}

/// A place for `[tokens, heads, dim]`: padded rows and tokens if `pad` is not 0.
pub fn heads_place(shape: [usize; 3], pad: usize, shift: usize) -> Place {
    let [_, heads, dim] = shape;
    let strides = [(heads.max(1)) * (dim + pad) + pad, dim + pad, 1];
    Place::new(Layout::with_strides(shape, strides).unwrap()).shifted(shift)
}

/// Rotations of heads of `dim` columns.
pub fn ropes(dim: usize) -> impl Strategy<Value = Rope> {
    let even = move |n: usize| (n / 2 * 2).max(2);
    let rotary = prop_oneof![3 => Just(even(dim)), 1 => Just(even(dim / 2)), 1 => Just(even(dim / 3))];
    (rotary, any::<[bool; 3]>()).prop_map(|(rotary, [interleaved, full, last])| Rope {
        style: if interleaved { RopeStyle::Interleaved } else { RopeStyle::Neox },
        table: if full { RopeTableWidth::Full } else { RopeTableWidth::Half },
        rotary,
        span: if last { RopeSpan::Last } else { RopeSpan::First },
        inverse: false,
    })
}

/// An input at the start of some memory, and an output that begins eight elements on: they share memory.
pub fn overlapping<'a, T: Element>(
    memory: TensorViewMut<'a, T>,
    input: &[usize],
    output: &[usize],
) -> (TensorView<'a, T>, TensorViewMut<'a, T>) {
    macro_rules! shaped {
        ($view:expr, $at:literal, $shape:expr) => {{
            let inner = &$shape[1..];
            let first = $view.slice(0, $at..$at + $shape.iter().product::<usize>()).unwrap();
            inner.iter().rev().fold(first, |view, &n| view.split_axis(0, n).unwrap())
        }};
    }
    (shaped!(memory.alias(), 0, input), shaped!(memory, 8, output))
}
