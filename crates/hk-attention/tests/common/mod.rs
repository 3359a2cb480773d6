//! What the tests of cache operators share: tokens with positions and slots, and rotation by `rope_cached`.

pub mod attention;

use hk_attention::{MlaInputs, MlaOutputs, reference};
use hk_core::plan::rope::reference::Tables;
use hk_core::plan::rope::{Positions, Rope, RopeElement, RopeLayout, RopeTables};
use hk_core::{Element, Float, Fp8E4M3, Fp8E4M3Fnuz, IndexView, Layout, bf16, f16};
use hk_testkit::rope::{IntegerTensor, Integers, RopeTensors, angles, rotations, rounded};
use hk_testkit::{CallElement, Fill, Gpu, Place, Tensors, proptest::prelude::*, widen};

/// Rows of the tables.
pub const ROWS: usize = 50;

/// An element as caches hold it, made from f32 as the operators make it.
pub trait Stored: Element {
    fn store(x: f32) -> Self;
}

macro_rules! stored {
    ($($t:ty: $store:expr;)*) => {$(
        impl Stored for $t {
            fn store(x: f32) -> Self {
                $store(x)
            }
        }
    )*};
}

stored! {
    bf16: <bf16 as Float>::from_f32;
    f16: <f16 as Float>::from_f32;
    Fp8E4M3: Fp8E4M3::from_f32_saturating;
    Fp8E4M3Fnuz: Fp8E4M3Fnuz::from_f32_saturating;
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

    /// With the same positions, each split into a position and an offset.
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

    /// Cosines and sines, in the type of the tables.
    pub fn tables<R: Float>(&self) -> (Vec<R>, Vec<R>) {
        rounded(&Tables::of_angles(&angles(ROWS, &self.rope, 1e4)))
    }

    pub fn slot(&self, token: usize) -> Option<usize> {
        let row = self.rows().get(token).copied().unwrap_or(0);
        let slot = usize::try_from(*self.slots.get(token)?).ok()?;
        (slot < self.n_slots && (0..ROWS as i64).contains(&row)).then_some(slot)
    }
}

/// [`Tokens`] on a device.
pub struct DeviceTokens<R: Float> {
    tables: RopeTensors<R>,
    slots: IntegerTensor,
}

impl<R: Float> DeviceTokens<R> {
    pub fn new(gpu: &Gpu, t: &Tokens, shift: usize) -> Self {
        let width = t.rope.table_width();
        let (cos, sin) = t.tables::<R>();
        let table = |values: &[R]| {
            gpu.upload(values, Place::rows([ROWS, width], width.next_multiple_of(8)).shifted(shift))
        };
        // Integers of stride 2.
        let integers = |values: &[i64]| {
            let place = Place::new(Layout::with_strides([values.len()], [2]).unwrap());
            // A position less its offset may exceed 32 bits.
            let wide = t.wide || values.iter().any(|&v| i32::try_from(v).is_err());
            Integers { values: values.to_vec(), wide }.upload(gpu, place)
        };
        let tables = RopeTensors {
            cos: table(&cos),
            sin: table(&sin),
            given: Some(integers(&t.positions)),
            starts: None,
            offsets: t.offsets.as_deref().map(integers),
        };
        Self { tables, slots: integers(&t.slots) }
    }

    pub fn slots(&self) -> IndexView<'_> {
        self.slots.view()
    }

    pub fn tables(&self) -> RopeTables<'_, R> {
        self.tables.tables()
    }

    pub fn assert_untouched(&self, gpu: &Gpu) {
        self.tables.assert_untouched(gpu);
        self.slots.assert_untouched(gpu);
    }
}

/// The rotated heads of `[tokens, heads, dim]` before rounding, by `rope_cached`; tokens without a position unchanged.
pub fn rotate_f32<T: Float, R: Float>(gpu: &Gpu, t: &Tokens, x: &[T], [heads, dim]: [usize; 2]) -> Vec<f32>
where
    f32: RopeElement<f32>,
{
    let mut out: Vec<f32> = x.iter().map(|v| v.to_f32()).collect();
    let n = t.counts[0];
    if n > 0 && heads > 0 {
        let (cos, sin) = t.tables::<R>();
        let table = |values: &[R]| {
            let values: Vec<f32> = values.iter().map(|v| v.to_f32()).collect();
            gpu.upload(&values, [ROWS, t.rope.table_width()])
        };
        let (cos, sin) = (table(&cos), table(&sin));
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
    let ((cos, sin), rows) = (t.tables::<R>(), t.rows());
    let (cos, sin) = (widen(&cos), widen(&sin));
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

/// Rotations of heads of `dim` columns, or of a part of them.
pub fn ropes(dim: usize) -> impl Strategy<Value = Rope> {
    let even = move |n: usize| (n / 2 * 2).max(2);
    prop_oneof![3 => Just(even(dim)), 1 => Just(even(dim / 2)), 1 => Just(even(dim / 3))]
        .prop_flat_map(rotations)
}

/// The inputs of operators on the latent cache, by their names.
pub fn mla_inputs<'a, T: CallElement>(tensors: &Tensors<'a>) -> MlaInputs<'a, T, T> {
    MlaInputs {
        q_nope: tensors.input("q_nope"),
        q_pe: tensors.input("q_pe"),
        k_nope: tensors.input("k_nope"),
        k_pe: tensors.input("k_pe"),
        tables: RopeTables {
            cos: tensors.input("cos"),
            sin: tensors.input("sin"),
            positions: Positions::Given(tensors.input::<i32>("positions").into()),
            offsets: None,
        },
        slot_mapping: tensors.input::<i32>("slot_mapping").into(),
        k_scale: tensors.optional_input("k_scale"),
    }
}

/// The outputs of operators on the latent cache, by their names.
pub fn mla_outputs<'a, T: CallElement>(tensors: &mut Tensors<'a>) -> MlaOutputs<'a, T, T, T> {
    MlaOutputs {
        q_out: tensors.output("q_out"),
        k_pe_out: tensors.output("k_pe_out"),
        kv_cache: tensors.output("kv_cache"),
        q_pe_head: tensors.optional_output("q_pe_head"),
        nope_zeros: tensors.optional_output("nope_zeros"),
    }
}
