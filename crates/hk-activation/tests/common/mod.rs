//! What the tests of rotations share: cases, and how one is run.
#![allow(dead_code, reason = "each test binary uses its part")]

use hk_activation::rope_cached;
use hk_core::rope::reference::{Tables, positions_in_sequences, table_rows};
use hk_core::rope::{
    Positions, Rope, RopeElement, RopeLayout, RopeSpan, RopeStyle, RopeTableWidth, RopeTables,
};
use hk_core::{Float, IndexView, Layout};
use hk_testkit::{Array, Fill, Gpu, Place, Tensor, proptest::prelude::*, proptest::sample::select};

/// Integers of 64 or 32 bits.
#[derive(Debug, Clone)]
pub struct Integers {
    pub values: Vec<i64>,
    pub wide: bool,
}

/// Heads, how they lie in memory, and the positions of their tokens.
#[derive(Debug, Clone)]
pub struct Case {
    pub layout: RopeLayout,
    pub batches: usize,
    pub tokens: usize,
    pub heads: usize,
    pub head_dim: usize,
    pub rope: Rope,
    pub given: Option<Integers>,
    pub offsets: Option<Integers>,
    pub starts: Option<Integers>,
    /// Rows of the tables.
    pub rows: usize,
    /// Axes in another order in memory, and gaps between heads.
    pub strided: bool,
    /// Elements from an aligned address to the first.
    pub shift: usize,
    pub seed: u64,
}

impl Case {
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

    /// The same rows for the first token alone.
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

    pub fn rounded<C: Float>(&self, tables: &Tables) -> (Vec<C>, Vec<C>) {
        let round = |values: &[f64]| values.iter().map(|&v| C::from_f64(v)).collect();
        (round(&tables.cos), round(&tables.sin))
    }

    pub fn elements<T: Float>(&self) -> Vec<T> {
        Fill::Normal.elements(self.shape().iter().product(), self.seed)
    }

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

    /// The tables and positions on a device.
    pub fn upload<C: Float>(&self, gpu: &Gpu, cos: &[C], sin: &[C]) -> Inputs<C> {
        let width = self.rope.table_width();
        let pitch = if self.strided { width.next_multiple_of(16) + 16 } else { width };
        let table = |values: &[C]| gpu.upload_rows(values, [self.rows, width], pitch);
        let tokens = Place::contiguous(self.token_axes());
        let integers = |i: &Integers, place: Place| {
            if i.wide {
                IntegerTensor::Wide(gpu.upload(&i.values, place))
            } else {
                let narrow: Vec<i32> = i.values.iter().map(|&v| i32::try_from(v).unwrap()).collect();
                IntegerTensor::Narrow(gpu.upload(&narrow, place))
            }
        };
        Inputs {
            cos: table(cos),
            sin: table(sin),
            given: self.given.as_ref().map(|i| integers(i, tokens.clone())),
            starts: self.starts.as_ref().map(|i| integers(i, Place::contiguous([i.values.len()]))),
            offsets: self.offsets.as_ref().map(|i| integers(i, tokens.clone())),
        }
    }
}

pub enum IntegerTensor {
    Narrow(Tensor<i32>),
    Wide(Tensor<i64>),
}

impl IntegerTensor {
    pub fn view(&self) -> IndexView<'_> {
        match self {
            Self::Narrow(t) => t.view().into(),
            Self::Wide(t) => t.view().into(),
        }
    }
}

/// What a rotation reads beside the heads.
pub struct Inputs<C: Float> {
    cos: Tensor<C>,
    sin: Tensor<C>,
    given: Option<IntegerTensor>,
    starts: Option<IntegerTensor>,
    offsets: Option<IntegerTensor>,
}

impl<C: Float> Inputs<C> {
    pub fn positions(&self) -> Positions<'_> {
        match (&self.given, &self.starts) {
            (Some(given), _) => Positions::Given(given.view()),
            (_, Some(starts)) => Positions::Sequences(starts.view()),
            _ => Positions::Index,
        }
    }

    pub fn offsets(&self) -> Option<IndexView<'_>> {
        self.offsets.as_ref().map(IntegerTensor::view)
    }

    pub fn tables(&self) -> RopeTables<'_, C> {
        let (positions, offsets) = (self.positions(), self.offsets());
        RopeTables { cos: self.cos.view(), sin: self.sin.view(), positions, offsets }
    }

    pub fn assert_untouched(&self, gpu: &Gpu) {
        gpu.assert_untouched(&self.cos);
        gpu.assert_untouched(&self.sin);
    }
}

/// The first `rotary` columns, by half tables.
pub fn rotation(rotary: usize, style: RopeStyle) -> Rope {
    Rope { style, table: RopeTableWidth::Half, rotary, span: RopeSpan::First, inverse: false }
}

/// Heads of packed tokens, without gaps.
pub fn dense(tokens: usize, heads: usize, head_dim: usize, rope: Rope) -> Case {
    Case {
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

/// Runs `rope_cached` and checks that nothing but the output is touched.
#[track_caller]
pub fn run<T: Float, C: RopeElement<T> + Float>(
    gpu: &Gpu,
    case: &Case,
    x: &[T],
    cos: &[C],
    sin: &[C],
) -> Array<T> {
    let inputs = case.upload(gpu, cos, sin);
    let x = gpu.upload(x, case.place());
    // The output need not lie as the input does.
    let mut y = gpu.poisoned(Case { strided: !case.strided, ..case.clone() }.place());
    rope_cached(gpu.stream(), x.view(), inputs.tables(), y.view_mut(), case.rope, case.layout).unwrap();
    gpu.assert_guards(&y);
    gpu.assert_untouched(&x);
    inputs.assert_untouched(gpu);
    gpu.download(&y)
}

/// The same over its input.
#[track_caller]
pub fn run_in_place<T: Float, C: RopeElement<T> + Float>(
    gpu: &Gpu,
    case: &Case,
    x: &[T],
    cos: &[C],
    sin: &[C],
) -> Array<T> {
    let inputs = case.upload(gpu, cos, sin);
    let mut x = gpu.upload(x, case.place());
    let y = x.view_mut();
    rope_cached(gpu.stream(), y.alias(), inputs.tables(), y, case.rope, case.layout).unwrap();
    gpu.assert_guards(&x);
    gpu.download(&x)
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

/// Cosines and sines in f32.
pub fn cos_sin(angles: &[f64]) -> (Vec<f32>, Vec<f32>) {
    angles.iter().map(|a| (a.cos() as f32, a.sin() as f32)).unzip()
}

fn integers(n: usize, low: i64, high: i64, seed: u64, wide: bool) -> Integers {
    let draw = |i: usize| {
        let hash = (seed ^ i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
        low + (hash % (high - low) as u64) as i64
    };
    Integers { values: (0..n).map(draw).collect(), wide }
}

/// Small cases of every kind.
pub fn case() -> impl Strategy<Value = Case> {
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
    let rope = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    let positions = (0usize..4, any::<bool>(), any::<bool>(), 1usize..=12);
    let place = (any::<bool>(), select(&[0usize, 0, 0, 1, 8][..]), any::<u64>().no_shrink());
    (sizes, rope, positions, place).prop_map(|(sizes, rope, positions, (strided, shift, seed))| {
        let (layout, batches, tokens, heads, (head_dim, rotary)) = sizes;
        let batches = if layout == Thd { 1 } else { batches };
        let (interleaved, full, last, inverse) = rope;
        let rope = Rope {
            style: if interleaved { RopeStyle::Interleaved } else { RopeStyle::Neox },
            table: if full { RopeTableWidth::Full } else { RopeTableWidth::Half },
            rotary,
            span: if last { RopeSpan::Last } else { RopeSpan::First },
            inverse,
        };
        let (kind, has_offsets, wide, rows) = positions;
        let (all, top) = (batches * tokens, rows as i64);
        let starts = || {
            let mut starts = integers(4, 0, tokens as i64 + 1, seed, wide);
            starts.values.sort_unstable();
            starts
        };
        Case {
            layout,
            batches,
            tokens,
            heads,
            head_dim,
            rope,
            given: (kind == 1 || kind == 2).then(|| integers(all, -1, top + 1, seed, wide)),
            offsets: has_offsets.then(|| integers(all, -3, 3, seed ^ 5, !wide)),
            starts: (kind == 3 && layout == Thd).then(starts),
            rows,
            strided,
            shift,
            seed,
        }
    })
}
