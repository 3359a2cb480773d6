//! Rotary embedding in tests: random rotations, cases of heads, tables, and positions on a device.

use crate::{Fill, Gpu, Place, Tensor};
use hk_core::plan::rope::reference::{Tables, positions_in_sequences, table_rows};
use hk_core::plan::rope::{
    Positions, Rope, RopeDirection, RopeLayout, RopeSpan, RopeStyle, RopeTableWidth, RopeTables,
};
use hk_core::{Float, IndexView, Layout};
use proptest::{prelude::*, sample::select};

/// Integers that are 64-bit (`wide`) or 32-bit on a device.
#[derive(Debug, Clone)]
pub struct Integers {
    /// The values.
    pub values: Vec<i64>,
    /// Whether they are `i64` on a device, not `i32`.
    pub wide: bool,
}

impl Integers {
    /// `n` random values from `low` to `high`, excluded.
    pub fn random(n: usize, low: i64, high: i64, seed: u64, wide: bool) -> Self {
        let draw = |i: usize| {
            let hash = (seed ^ i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
            low + (hash % (high - low) as u64) as i64
        };
        Self { values: (0..n).map(draw).collect(), wide }
    }

    /// The values on a device.
    ///
    /// # Panics
    /// If they do not fit `i32` and are not `wide`.
    pub fn upload(&self, gpu: &Gpu, place: Place) -> IntegerTensor {
        if self.wide {
            return IntegerTensor::Wide(gpu.upload(&self.values, place));
        }
        let narrow = |&v: &i64| i32::try_from(v).expect("values that are not wide fit i32");
        IntegerTensor::Narrow(gpu.upload(&self.values.iter().map(narrow).collect::<Vec<_>>(), place))
    }
}

/// Heads, their layout in memory, and the positions of their tokens.
#[derive(Debug, Clone)]
pub struct RopeCase {
    /// Order of the axes.
    pub layout: RopeLayout,
    /// Batches; 1 for packed tokens.
    pub batches: usize,
    /// Tokens of a batch.
    pub tokens: usize,
    /// Heads of a token.
    pub heads: usize,
    /// Columns of a head.
    pub head_dim: usize,
    /// The rotation.
    pub rope: Rope,
    /// Positions of the tokens.
    pub given: Option<Integers>,
    /// Offsets of the tokens.
    pub offsets: Option<Integers>,
    /// Starts of packed sequences.
    pub starts: Option<Integers>,
    /// Rows of the tables.
    pub rows: usize,
    /// Axes in another order in memory, and gaps between heads.
    pub strided: bool,
    /// Elements from an aligned address to the first.
    pub shift: usize,
    /// Seed of the elements.
    pub seed: u64,
}

impl RopeCase {
    /// Heads of packed tokens, contiguous, with a table row for each token.
    pub fn dense(tokens: usize, heads: usize, head_dim: usize, rope: Rope) -> Self {
        Self {
            layout: RopeLayout::Thd,
            batches: 1,
            tokens,
            heads,
            head_dim,
            rope,
            given: None,
            offsets: None,
            starts: None,
            rows: tokens.max(1),
            strided: false,
            shift: 0,
            seed: 7,
        }
    }

    /// The shape of the heads.
    pub fn shape(&self) -> Vec<usize> {
        let &Self { batches: b, tokens: s, heads: h, head_dim: d, .. } = self;
        match self.layout {
            RopeLayout::Bhsd => vec![b, h, s, d],
            RopeLayout::Sbhd => vec![s, b, h, d],
            RopeLayout::Bshd => vec![b, s, h, d],
            RopeLayout::Thd => vec![s, h, d],
        }
    }

    /// The index of a head, in row-major order of the shape.
    pub fn head(&self, batch: usize, token: usize, head: usize) -> usize {
        let &Self { batches: b, tokens: s, heads: h, .. } = self;
        match self.layout {
            RopeLayout::Bhsd => (batch * h + head) * s + token,
            RopeLayout::Sbhd => (token * b + batch) * h + head,
            RopeLayout::Bshd | RopeLayout::Thd => (batch * s + token) * h + head,
        }
    }

    /// The token of a head, among the positions.
    pub fn token(&self, head: usize) -> usize {
        match self.layout {
            RopeLayout::Bhsd => head / (self.heads * self.tokens) * self.tokens + head % self.tokens,
            _ => head / self.heads,
        }
    }

    /// The axes of positions.
    pub fn token_axes(&self) -> Vec<usize> {
        match self.layout {
            RopeLayout::Thd => vec![self.tokens],
            RopeLayout::Sbhd => vec![self.tokens, self.batches],
            RopeLayout::Bhsd | RopeLayout::Bshd => vec![self.batches, self.tokens],
        }
    }

    /// The table row of each token.
    pub fn rows(&self) -> Vec<Option<usize>> {
        let all = self.batches * self.tokens;
        let index =
            |i: usize| if self.layout == RopeLayout::Sbhd { i / self.batches } else { i % self.tokens };
        let positions = match (&self.given, &self.starts) {
            (Some(given), _) => given.values.clone(),
            (_, Some(starts)) => positions_in_sequences(all, &starts.values),
            _ => (0..all).map(|i| index(i) as i64).collect(),
        };
        table_rows(&positions, self.offsets.as_ref().map(|o| &o.values[..]), self.rows)
    }

    /// The same rows for only the first token.
    pub fn with_rows_of(self, other: &Self) -> Self {
        let row = other.rows()[0].unwrap_or(self.rows) as i64;
        Self { given: Some(Integers { values: vec![row], wide: false }), offsets: None, starts: None, ..self }
    }

    /// The columns of each pair.
    pub fn pairs(&self) -> Vec<(usize, usize)> {
        let half = self.rope.rotary / 2;
        let first = match self.rope.span {
            RopeSpan::First => 0,
            RopeSpan::Last => self.head_dim - self.rope.rotary,
        };
        let pair = |i| match self.rope.style {
            RopeStyle::Neox => (first + i, first + i + half),
            RopeStyle::Interleaved => (first + 2 * i, first + 2 * i + 1),
        };
        (0..half).map(pair).collect()
    }

    /// Tables of some angles; in full ones those of a pair differ, and all are scaled a little, as YaRN does.
    pub fn tables(&self) -> Tables {
        let mut tables = Tables::of_angles(&angles(self.rows, &self.rope, 1e4));
        tables.cos.iter_mut().chain(&mut tables.sin).for_each(|v| *v *= 1.125);
        tables
    }

    /// Normal elements for the heads.
    pub fn elements<T: Float>(&self) -> Vec<T> {
        Fill::Normal.elements(self.shape().iter().product(), self.seed)
    }

    /// Layout of the heads in memory.
    pub fn place(&self) -> Place {
        let shape = self.shape();
        if !self.strided {
            return Place::contiguous(&shape).shifted(self.shift);
        }
        // The second axis is the outermost in memory.
        let mut strides = vec![1; shape.len()];
        let mut next = self.head_dim.next_multiple_of(16) + 16;
        let order: Vec<usize> = (0..shape.len() - 1).rev().filter(|&a| a != 1).chain([1]).collect();
        for axis in order {
            strides[axis] = next;
            next *= shape[axis].max(1);
        }
        Place::new(Layout::with_strides(&shape, &strides).unwrap()).shifted(self.shift)
    }

    /// Tables and positions on a device.
    pub fn upload<C: Float>(&self, gpu: &Gpu, cos: &[C], sin: &[C]) -> RopeTensors<C> {
        let width = self.rope.table_width();
        let pitch = if self.strided { width.next_multiple_of(16) + 16 } else { width };
        let table = |values: &[C]| gpu.upload_rows(values, [self.rows, width], pitch);
        let tokens = Place::contiguous(self.token_axes());
        RopeTensors {
            cos: table(cos),
            sin: table(sin),
            given: self.given.as_ref().map(|i| i.upload(gpu, tokens.clone())),
            starts: self.starts.as_ref().map(|i| i.upload(gpu, Place::contiguous([i.values.len()]))),
            offsets: self.offsets.as_ref().map(|i| i.upload(gpu, tokens.clone())),
        }
    }
}

/// [`Integers`] on a device.
#[derive(Debug)]
pub enum IntegerTensor {
    /// 32-bit.
    Narrow(Tensor<i32>),
    /// 64-bit.
    Wide(Tensor<i64>),
}

impl IntegerTensor {
    /// As an operator takes them.
    pub fn view(&self) -> IndexView<'_> {
        match self {
            Self::Narrow(t) => t.view().into(),
            Self::Wide(t) => t.view().into(),
        }
    }

    /// [`Gpu::assert_untouched`].
    pub fn assert_untouched(&self, gpu: &Gpu) {
        match self {
            Self::Narrow(t) => gpu.assert_untouched(t),
            Self::Wide(t) => gpu.assert_untouched(t),
        }
    }
}

/// What a rotation reads beside the heads, on a device.
#[derive(Debug)]
pub struct RopeTensors<C: Float> {
    /// Cosines.
    pub cos: Tensor<C>,
    /// Sines.
    pub sin: Tensor<C>,
    /// Positions of the tokens.
    pub given: Option<IntegerTensor>,
    /// Starts of packed sequences.
    pub starts: Option<IntegerTensor>,
    /// Offsets of the tokens.
    pub offsets: Option<IntegerTensor>,
}

impl<C: Float> RopeTensors<C> {
    /// Positions, or starts of sequences, or else indices.
    pub fn positions(&self) -> Positions<'_> {
        match (&self.given, &self.starts) {
            (Some(given), _) => Positions::Given(given.view()),
            (_, Some(starts)) => Positions::Sequences(starts.view()),
            _ => Positions::Index,
        }
    }

    /// Offsets, if there are any.
    pub fn offsets(&self) -> Option<IndexView<'_>> {
        self.offsets.as_ref().map(IntegerTensor::view)
    }

    /// As an operator takes them.
    pub fn tables(&self) -> RopeTables<'_, C> {
        let (positions, offsets) = (self.positions(), self.offsets());
        RopeTables { cos: self.cos.view(), sin: self.sin.view(), positions, offsets }
    }

    /// [`Gpu::assert_untouched`] of all of them.
    pub fn assert_untouched(&self, gpu: &Gpu) {
        gpu.assert_untouched(&self.cos);
        gpu.assert_untouched(&self.sin);
        for integers in [&self.given, &self.starts, &self.offsets].into_iter().flatten() {
            integers.assert_untouched(gpu);
        }
    }
}

/// The rotation of the first `rotary` columns by half tables.
pub fn rotation(rotary: usize, style: RopeStyle) -> Rope {
    Rope {
        style,
        table: RopeTableWidth::Half,
        rotary,
        span: RopeSpan::First,
        direction: RopeDirection::Forward,
    }
}

/// Rotations of `rotary` columns of every kind, none of them inverse.
pub fn rotations(rotary: usize) -> impl Strategy<Value = Rope> {
    any::<[bool; 3]>().prop_map(move |[interleaved, full, last]| Rope {
        style: if interleaved { RopeStyle::Interleaved } else { RopeStyle::Neox },
        table: if full { RopeTableWidth::Full } else { RopeTableWidth::Half },
        rotary,
        span: if last { RopeSpan::Last } else { RopeSpan::First },
        direction: RopeDirection::Forward,
    })
}

/// Angles `position / theta^(2i / rotary)`; those of full tables differ within a pair.
pub fn angles(rows: usize, rope: &Rope, theta: f64) -> Vec<f64> {
    let width = rope.table_width();
    let angle = |n: usize| {
        let (row, i) = ((n / width) as f64, n % width);
        let pair = if rope.table == RopeTableWidth::Full && rope.style == RopeStyle::Interleaved {
            i / 2
        } else {
            i
        };
        row / theta.powf(2.0 * pair as f64 / rope.rotary as f64)
            + if i % 2 == 1 && width == rope.rotary { 0.25 } else { 0.0 }
    };
    (0..rows * width).map(angle).collect()
}

/// Cosines and sines, rounded to the type of the tables.
pub fn rounded<C: Float>(tables: &Tables) -> (Vec<C>, Vec<C>) {
    let round = |values: &[f64]| values.iter().map(|&v| C::from_f64(v)).collect();
    (round(&tables.cos), round(&tables.sin))
}

/// Cosines and sines of angles in f32.
pub fn cos_sin(angles: &[f64]) -> (Vec<f32>, Vec<f32>) {
    rounded(&Tables::of_angles(angles))
}

/// Small cases of every kind.
pub fn rope_case() -> impl Strategy<Value = RopeCase> {
    use RopeLayout::{Bhsd, Bshd, Sbhd, Thd};
    let dims = select(
        &[
            (32usize, 32usize),
            (64, 32),
            (64, 64),
            (80, 48),
            (128, 128),
            (48, 16),
            (96, 96),
            (20, 18),
            (8, 8),
            (6, 2),
            (34, 32),
        ][..],
    );
    let sizes = (select(&[Bhsd, Sbhd, Bshd, Thd][..]), 1usize..=3, 1usize..=9, 1usize..=6, dims);
    let rope = (rotations(2), select(&[RopeDirection::Forward, RopeDirection::Inverse][..]));
    let positions = (0usize..4, any::<bool>(), any::<bool>(), 1usize..=12);
    let place = (any::<bool>(), select(&[0usize, 0, 0, 1, 8][..]), any::<u64>().no_shrink());
    (sizes, rope, positions, place).prop_map(|(sizes, rope, positions, (strided, shift, seed))| {
        let (layout, batches, tokens, heads, (head_dim, rotary)) = sizes;
        let batches = if layout == Thd { 1 } else { batches };
        let rope = Rope { rotary, direction: rope.1, ..rope.0 };
        let (kind, has_offsets, wide, rows) = positions;
        let (all, top) = (batches * tokens, rows as i64);
        let starts = || {
            let mut starts = Integers::random(4, 0, tokens as i64 + 1, seed, wide);
            starts.values.sort_unstable();
            starts
        };
        RopeCase {
            layout,
            batches,
            tokens,
            heads,
            head_dim,
            rope,
            given: (kind == 1 || kind == 2).then(|| Integers::random(all, -1, top + 1, seed, wide)),
            offsets: has_offsets.then(|| Integers::random(all, -3, 3, seed ^ 5, !wide)),
            starts: (kind == 3 && layout == Thd).then(starts),
            rows,
            strided,
            shift,
            seed,
        }
    })
}
