//! GEMMs of operands that need not have one type, with one face: inputs, where they lie, the call, the reference.
#![allow(dead_code, reason = "each test uses its part")]

use hk_core::quant::shuffled_index;
use hk_core::{
    Arch, E8M0, Element, Float, Fp4Rounding, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz, Layout, Result, Stream, TensorView,
    TensorViewMut, bf16, f16,
};
use hk_gemm::reference::{self, Sums};
use hk_gemm::{
    A8WFp4Inputs, A16W8Inputs, A16WFp4Inputs, Activation, BlockScaledInputs, BlockShape, FloatView,
    GemmConfig, GemmOptions, GemmProblem, GemmTile, GemmWeight, MxInputs, MxScaleView, Precision, Prequant,
    PtgqInputs, ScaledInputs, batched_gemm_a8w8, batched_gemm_a8w8_ptgq, batched_gemm_a16wfp4,
    batched_gemm_afp4wfp4, batched_gemm_bf16, gemm_a8w8, gemm_a8w8_blockscale, gemm_a8wfp4,
    gemm_a16w8_blockscale, gemm_a16w16, gemm_a16wfp4, gemm_afp4wfp4, gemm_afp8wfp8, gemm_workspace,
    shuffle_weight_host,
};
use hk_testkit::{Array, Fill, Gpu, HostTensorF64, Place, Tensor, Tolerance};

/// Error of a sum in f32, in its magnitude.
pub const SUM: Tolerance = Tolerance::Sum { terms: 1.0 / (1u64 << 16) as f64 };

/// What can be multiplied.
pub trait Operand: Element {
    /// Numbers in an element.
    const EACH: usize = 1;
    /// Standard deviation of random ones.
    const SPREAD: f32;
    fn pack(values: &[f32]) -> Vec<Self>;
    fn unpack(elements: &[Self]) -> Vec<f64>;
    fn served(_: Arch) -> bool {
        true
    }
}

macro_rules! operand {
    ($t:ident, $spread:literal, $arch:pat, |$x:ident| $pack:expr, |$y:ident| $unpack:expr) => {
        impl Operand for $t {
            const SPREAD: f32 = $spread;
            fn pack(values: &[f32]) -> Vec<Self> {
                values.iter().map(|&$x| $pack).collect()
            }
            fn unpack(elements: &[Self]) -> Vec<f64> {
                elements.iter().map(|&$y| $unpack).collect()
            }
            fn served(arch: Arch) -> bool {
                matches!(arch, $arch)
            }
        }
    };
}
operand!(bf16, 1.0, _, |x| bf16::from_f32(x), |y| Float::to_f64(y));
operand!(f16, 1.0, _, |x| f16::from_f32(x), |y| Float::to_f64(y));
operand!(i8, 32.0, _, |x| x.round() as i8, |y| f64::from(y));
operand!(Fp8E4M3, 4.0, Arch::Gfx950 | Arch::Sm90 | Arch::Sm90a, |x| Fp8E4M3::from_f32_saturating(x), |y| {
    f64::from(y.to_f32())
});
operand!(Fp8E4M3Fnuz, 4.0, Arch::Gfx942, |x| Fp8E4M3Fnuz::from_f32_saturating(x), |y| f64::from(y.to_f32()));
impl Operand for Fp4x2 {
    const EACH: usize = 2;
    const SPREAD: f32 = 2.0;
    fn pack(values: &[f32]) -> Vec<Self> {
        values.chunks(2).map(|pair| Self::from_f32([pair[0], pair[1]], Fp4Rounding::NearestEven)).collect()
    }
    fn unpack(elements: &[Self]) -> Vec<f64> {
        elements.iter().flat_map(|pair| pair.to_f32()).map(f64::from).collect()
    }
}

/// What GEMMs are of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    Halves,
    Codes,
    HalfByCode,
    HalfByFp4,
    CodeByFp4,
    Fp4,
}

impl Kind {
    /// Whether activations can be quantized.
    pub fn quantizes(self) -> &'static [bool] {
        if matches!(self, Self::HalfByCode | Self::HalfByFp4) { &[false, true] } else { &[false] }
    }
    pub fn mx(self) -> bool {
        matches!(self, Self::HalfByFp4 | Self::CodeByFp4 | Self::Fp4)
    }
    /// Columns of K of which rows have whole ones.
    pub fn columns(self) -> usize {
        if self.mx() { 32 } else { 1 }
    }
}

/// The tensors of a call.
pub struct Call<'a, X: Element, W: Element, Y: Element> {
    pub batched: bool,
    pub prequant: bool,
    pub group: Option<BlockShape>,
    pub columns: usize,
    pub mxfp8: bool,
    pub x: TensorView<'a, X>,
    pub w: GemmWeight<'a, W>,
    pub x_scale: TensorView<'a, f32>,
    pub w_scale: TensorView<'a, f32>,
    pub x_mx: MxScaleView<'a>,
    pub w_mx: MxScaleView<'a>,
    pub y_scale: Option<TensorView<'a, f32>>,
    pub bias: Option<FloatView<'a>>,
    pub y: TensorViewMut<'a, Y>,
    pub workspace: Option<TensorViewMut<'a, f32>>,
    pub options: GemmOptions,
}

/// What can be multiplied by what.
pub trait By<W: Operand>: Operand {
    const KIND: Kind;
    /// What rows of `k` stand for that are quantized, those with a scale for each `columns`.
    fn quantized(x: &[f64], _k: usize, _columns: usize) -> Vec<f64> {
        x.to_vec()
    }
    fn call<Y: Float>(stream: &Stream, call: Call<Self, W, Y>) -> Result<()>;
}

macro_rules! halves {
    ($($t:ident),+) => {$(
        impl By<$t> for $t {
            const KIND: Kind = Kind::Halves;
            fn call<Y: Float>(s: &Stream, c: Call<Self, Self, Y>) -> Result<()> {
                let product = if c.batched { batched_gemm_bf16 } else { gemm_a16w16 };
                product(s, c.x, c.w, c.bias, c.y, c.workspace, c.options)
            }
        }
        impl By<Fp4x2> for $t {
            const KIND: Kind = Kind::HalfByFp4;
            fn quantized(x: &[f64], k: usize, _columns: usize) -> Vec<f64> {
                reference::mx_quantized(x, k)
            }
            fn call<Y: Float>(s: &Stream, c: Call<Self, Fp4x2, Y>) -> Result<()> {
                if c.batched {
                    batched_gemm_a16wfp4(s, A16WFp4Inputs { a: c.x, w: c.w.into(), w_scale: c.w_mx.into() }, if c.prequant { Prequant::Yes } else { Prequant::No }, c.y_scale, c.y, c.workspace, c.options)
                } else {
                    gemm_a16wfp4(s, A16WFp4Inputs { a: c.x, w: c.w.into(), w_scale: c.w_mx.into() }, if c.prequant { Prequant::Yes } else { Prequant::No }, c.y, c.workspace, c.options)
                }
            }
        }
        halves!(by $t, i8);
        halves!(by $t, Fp8E4M3);
        halves!(by $t, Fp8E4M3Fnuz);
    )+};
    (by $t:ident, $c:ident) => {
        impl By<$c> for $t {
            const KIND: Kind = Kind::HalfByCode;
            fn quantized(x: &[f64], k: usize, columns: usize) -> Vec<f64> {
                reference::group_quantized::<$c>(x, k, columns)
            }
            fn call<Y: Float>(s: &Stream, c: Call<Self, $c, Y>) -> Result<()> {
                if c.batched {
                    batched_gemm_a8w8_ptgq(s, PtgqInputs { a: c.x, group: c.columns, w: c.w.into(), w_scale: c.w_scale }, c.bias, c.y, c.workspace, c.options)
                } else {
                    let group = c.group.unwrap_or_default();
                    gemm_a16w8_blockscale(s, A16W8Inputs { a: c.x, w: c.w.into(), w_scale: c.w_scale, group }, if c.prequant { Prequant::Yes } else { Prequant::No }, c.y, c.workspace, c.options)
                }
            }
        }
    };
}
halves!(bf16, f16);

macro_rules! codes {
    ($($t:ident),+) => {$(
        impl By<$t> for $t {
            const KIND: Kind = Kind::Codes;
            fn call<Y: Float>(s: &Stream, c: Call<Self, Self, Y>) -> Result<()> {
                if c.mxfp8 {
                    return gemm_afp8wfp8(s, MxInputs { a: c.x, w: c.w.into(), a_scale: c.x_mx.into(), w_scale: c.w_mx.into() }, c.y, c.workspace, c.options);
                }
                match (c.batched, c.group) {
                    (true, _) => {
                        batched_gemm_a8w8(s, ScaledInputs { a: c.x, w: c.w.into(), a_scale: c.x_scale, w_scale: c.w_scale }, c.bias, c.y, c.workspace, c.options)
                    }
                    (_, None) => gemm_a8w8(s, ScaledInputs { a: c.x, w: c.w.into(), a_scale: c.x_scale, w_scale: c.w_scale }, c.bias, c.y, c.workspace, c.options),
                    (_, Some(group)) => gemm_a8w8_blockscale(s, BlockScaledInputs { a: c.x, w: c.w.into(), a_scale: c.x_scale, w_scale: c.w_scale, group }, c.bias, c.y, c.workspace, c.options),
                }
            }
        }
    )+};
}
codes!(i8, Fp8E4M3, Fp8E4M3Fnuz);

macro_rules! fp8_by_fp4 {
    ($($t:ident),+) => {$(
        impl By<Fp4x2> for $t {
            const KIND: Kind = Kind::CodeByFp4;
            fn call<Y: Float>(s: &Stream, c: Call<Self, Fp4x2, Y>) -> Result<()> {
                gemm_a8wfp4(s, A8WFp4Inputs { a: c.x, w: c.w.into(), a_scale: c.x_scale, w_scale: c.w_mx.into() }, c.y, c.workspace, c.options)
            }
        }
    )+};
}
fp8_by_fp4!(Fp8E4M3, Fp8E4M3Fnuz);
impl By<Fp4x2> for Fp4x2 {
    const KIND: Kind = Kind::Fp4;
    fn call<Y: Float>(s: &Stream, c: Call<Self, Self, Y>) -> Result<()> {
        let inputs = MxInputs { a: c.x, w: c.w, a_scale: c.x_mx, w_scale: c.w_mx };
        let gemm = if c.batched { batched_gemm_afp4wfp4 } else { gemm_afp4wfp4 };
        gemm(s, inputs, c.y, c.workspace, c.options)
    }
}

/// How inputs and outputs lie in memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct Memory {
    /// Elements between rows, and before the first.
    pub x: [usize; 2],
    pub w: [usize; 2],
    pub y: [usize; 2],
    /// Rows between batches.
    pub rows: usize,
    /// The batch is the second axis of x and y.
    pub turned: bool,
    /// Scales of blocks column by column, with gaps.
    pub turned_scales: bool,
    /// Weights in shuffled order, with elements more in a row.
    pub w_shuffled: Option<usize>,
    pub scales_shuffled: bool,
    /// No workspace.
    pub no_workspace: bool,
}

/// Inputs on the host.
#[derive(Debug, Clone)]
pub struct Case<X, W> {
    pub batch: Option<usize>,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub prequant: bool,
    pub x: Vec<X>,
    pub w: Vec<W>,
    /// Of rows, or of blocks if there is a group.
    pub group: Option<BlockShape>,
    /// Of activations that are quantized, without a group.
    pub quantized: usize,
    /// Codes with scales of blocks of 32 columns.
    pub mxfp8: bool,
    pub x_scale: Vec<f32>,
    pub w_scale: Vec<f32>,
    pub x_mx: Vec<E8M0>,
    pub w_mx: Vec<E8M0>,
    pub y_scale: Option<f32>,
    pub bias: Option<Vec<f32>>,
    pub activation: Option<Activation>,
    pub memory: Memory,
}

/// The inputs on a device.
pub struct Inputs<X: Element, W: Element> {
    pub x: Tensor<X>,
    w: Tensor<W>,
    pub x_scale: Tensor<f32>,
    pub w_scale: Tensor<f32>,
    x_mx: Tensor<E8M0>,
    w_mx: Tensor<E8M0>,
    memory: Memory,
}

impl<X: Element, W: Element> Inputs<X, W> {
    pub fn weight(&self) -> GemmWeight<'_, W> {
        match self.memory.w_shuffled {
            Some(_) => GemmWeight::Shuffled(self.w.view()),
            None => self.w.view().into(),
        }
    }
    fn mx<'a>(&self, scale: &'a Tensor<E8M0>) -> MxScaleView<'a> {
        let view = scale.view();
        if self.memory.scales_shuffled { MxScaleView::Shuffled(view) } else { view.into() }
    }
    pub fn x_f32(&self) -> TensorView<'_, f32> {
        self.x_scale.view()
    }
    pub fn w_f32(&self) -> TensorView<'_, f32> {
        self.w_scale.view()
    }
    pub fn x_mx(&self) -> MxScaleView<'_> {
        self.mx(&self.x_mx)
    }
    pub fn w_mx(&self) -> MxScaleView<'_> {
        self.mx(&self.w_mx)
    }
}

pub fn normal(len: usize, seed: u64) -> Vec<f32> {
    Fill::Normal.elements(len, seed)
}

pub fn config(tile: GemmTile, splits: usize) -> Option<GemmConfig> {
    Some(GemmConfig { tile, splits, group: 3 })
}

impl<X: By<W>, W: Operand> Case<X, W> {
    /// Random ones. Without a batch codes have scales of blocks; with one, of rows.
    pub fn new(batch: Option<usize>, [m, n, k]: [usize; 3], prequant: bool, seed: u64) -> Self {
        let kind = X::KIND;
        let batch = batch.filter(|_| kind != Kind::CodeByFp4);
        let prequant = prequant && kind.quantizes().len() == 2 || kind == Kind::HalfByCode && batch.is_some();
        let group =
            (batch.is_none() && matches!(kind, Kind::Codes | Kind::HalfByCode)).then(BlockShape::default);
        let b = batch.unwrap_or(1);
        let random = |len, i| normal(len, seed.wrapping_mul(31) + i);
        let scales = |len, i| random(len, i).into_iter().map(|x| 0.01 + 0.1 * x.abs()).collect::<Vec<_>>();
        let mx = |rows, i| {
            random(rows * k.div_ceil(32), i)
                .into_iter()
                .map(|x| E8M0::from_exponent((2.0 * x) as i32))
                .collect()
        };
        let times = |x: Vec<f32>, by: f32| x.into_iter().map(|x| by * x).collect::<Vec<_>>();
        let groups = k.div_ceil(128);
        let (of_x, of_w) = match (kind, group) {
            (Kind::Codes, Some(_)) => (m * groups, n.div_ceil(128) * groups),
            (Kind::Codes, None) => (b * m, b * n),
            (Kind::HalfByCode, Some(_)) => (0, n.div_ceil(128) * groups),
            (Kind::HalfByCode, None) => (0, 1),
            (Kind::CodeByFp4, _) => (m, 0),
            _ => (0, 0),
        };
        Self {
            batch,
            m,
            n,
            k,
            prequant,
            x: X::pack(&times(random(b * m * k, 1), X::SPREAD)),
            w: W::pack(&times(random(b * n * k, 2), W::SPREAD)),
            group,
            quantized: 128,
            mxfp8: false,
            x_scale: scales(of_x, 3),
            w_scale: scales(of_w, 4),
            x_mx: if kind == Kind::Fp4 { mx(b * m, 5) } else { vec![] },
            w_mx: if kind.mx() { mx(b * n, 6) } else { vec![] },
            y_scale: None,
            bias: None,
            activation: None,
            memory: Memory::default(),
        }
    }

    /// Without a batch, of codes with scales of blocks of 32 columns.
    pub fn mxfp8(sizes: [usize; 3], seed: u64) -> Self {
        let case = Self::new(None, sizes, false, seed);
        let scales = |rows: usize, i| -> Vec<E8M0> {
            let random = normal(rows * case.k / 32, seed.wrapping_mul(31) + i);
            random.into_iter().map(|x| E8M0::from_exponent((2.0 * x) as i32)).collect()
        };
        let (x_mx, w_mx) = (scales(case.m, 5), scales(case.n, 6));
        Self { group: None, x_scale: vec![], w_scale: vec![], x_mx, w_mx, mxfp8: true, ..case }
    }

    /// Columns with one scale.
    pub fn columns(&self) -> usize {
        self.group.map_or(self.quantized, |group| group.k)
    }

    /// With scales of blocks of another shape.
    pub fn grouped(mut self, group: BlockShape) -> Self {
        let of = |rows: usize| rows * self.k.div_ceil(group.k);
        let scales = |len, i| normal(len, i).into_iter().map(|x| 0.01 + 0.1 * x.abs()).collect::<Vec<_>>();
        self.w_scale = scales(of(self.n.div_ceil(group.n)), 14);
        if X::KIND == Kind::Codes {
            self.x_scale = scales(of(self.m), 13);
        }
        Self { group: Some(group), ..self }
    }

    /// All scales one.
    pub fn unscaled(mut self) -> Self {
        self.x_scale.fill(1.0);
        self.w_scale.fill(1.0);
        self.x_mx.fill(E8M0::ONE);
        self.w_mx.fill(E8M0::ONE);
        self
    }

    /// With a bias and a number to divide by, as far as the GEMM takes them.
    pub fn finished(mut self, activation: Option<Activation>) -> Self {
        let batches = self.batch.unwrap_or(1);
        let biased = matches!(X::KIND, Kind::Halves | Kind::Codes)
            || X::KIND == Kind::HalfByCode && self.batch.is_some();
        self.bias = biased.then(|| normal(batches * self.n, 77));
        self.y_scale = (X::KIND == Kind::HalfByFp4 && self.batch.is_some()).then_some(0.375);
        Self { activation, ..self }
    }

    pub fn lies(self, memory: Memory) -> Self {
        Self { memory, ..self }
    }

    /// Tiles that there are kernels of.
    pub fn tiles(&self) -> Vec<GemmTile> {
        use GemmTile::*;
        if self.columns() < 128 {
            return vec![T64x64, Elements];
        }
        let large: &[GemmTile] = match (X::KIND, self.group, self.prequant) {
            _ if self.mxfp8 => &[T256x128],
            (Kind::Halves, ..) | (Kind::Codes, None, _) => &[T256x256, T128x128, S16x16],
            (Kind::Codes, ..) | (Kind::HalfByCode, _, true) => &[T256x128, T128x128, T64x128, S16x16],
            (Kind::HalfByFp4, _, true) => &[T256x128, T128x128, T64x128],
            (Kind::Fp4, ..) => &[T256x256, T160x256, T96x256, T256x128, T128x128, T64x128],
            _ => &[T128x128],
        };
        [large, &[T64x64, Elements, S16x32, S32x32, S64x32]].concat()
    }

    /// The sums with all scales.
    pub fn sums(&self) -> Sums {
        let &Self { m, n, k, .. } = self;
        let floats = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let mx = |x: &[E8M0]| x.iter().map(|x| f64::from(x.to_f32())).collect::<Vec<_>>();
        let (mut x, mut w) = (X::unpack(&self.x), W::unpack(&self.w));
        if self.prequant {
            x = X::quantized(&x, k, self.columns());
        }
        if !self.x_mx.is_empty() {
            x = reference::scaled(&x, k, &mx(&self.x_mx), [1, 32]);
        }
        if !self.w_mx.is_empty() {
            w = reference::scaled(&w, k, &mx(&self.w_mx), [1, 32]);
        }
        let (mut of_x, mut of_w) = (floats(&self.x_scale), floats(&self.w_scale));
        if let Some(group) = self.group {
            if !of_x.is_empty() {
                x = reference::scaled(&x, k, &of_x, [1, group.k]);
            }
            w = reference::scaled(&w, k, &of_w, [group.n, group.k]);
            (of_x, of_w) = (vec![], vec![]);
        }
        let or_one = |x: Vec<f64>| if x.is_empty() { vec![1.0] } else { x };
        let sums = reference::product(&x, &w, [self.batch.unwrap_or(1), m, n, k]);
        if m * n == 0 { sums } else { sums.scaled(&or_one(of_x), &or_one(of_w), [m, n]) }
    }

    pub fn shape(&self) -> Vec<usize> {
        self.batch.into_iter().chain([self.m, self.n]).collect()
    }

    pub fn reference(&self) -> HostTensorF64 {
        let bias: Vec<f64> = self.bias.iter().flatten().map(|&x| f64::from(x)).collect();
        let sums = self.sums().biased(&bias, [self.m, self.n]).activated(self.activation);
        let sums = sums.divided(f64::from(self.y_scale.unwrap_or(1.0)));
        HostTensorF64::new(self.shape(), sums.values).with_magnitudes(sums.magnitudes)
    }

    /// A place of rows, in batches if there are any.
    pub fn place(&self, [rows, cols]: [usize; 2], [pad, shift]: [usize; 2], turned: bool) -> Place {
        let (stride, more) = (cols + pad, self.memory.rows);
        let layout = match self.batch {
            None => Layout::with_strides([rows, cols], [stride, 1]),
            Some(b) if turned => Layout::with_strides([b, rows, cols], [stride, stride * (b + more), 1]),
            Some(b) => Layout::with_strides([b, rows, cols], [stride * (rows + more), stride, 1]),
        };
        Place::new(layout.unwrap()).shifted(shift)
    }

    /// A place of scales of blocks.
    fn scales(&self, [rows, cols]: [usize; 2]) -> Place {
        if !self.memory.turned_scales {
            return self.place([rows, cols], [0, 0], false);
        }
        let (apart, lead) = (rows + 3, self.batch);
        let shape: Vec<usize> = lead.into_iter().chain([rows, cols]).collect();
        let strides: Vec<usize> = lead.map(|_| apart * cols + 5).into_iter().chain([1, apart]).collect();
        Place::new(Layout::with_strides(shape, strides).unwrap()).shifted(1)
    }

    fn upload_mx(&self, gpu: &Gpu, scales: &[E8M0], rows: usize) -> Tensor<E8M0> {
        if scales.is_empty() && rows * self.k > 0 {
            return gpu.upload(&[E8M0::NAN], [1]);
        }
        let blocks = self.k / 32;
        if !self.memory.scales_shuffled {
            return gpu.upload(scales, self.scales([rows, blocks]));
        }
        // What pads rows and blocks is of no effect.
        let len = rows.next_multiple_of(32) * blocks.next_multiple_of(8);
        let b = self.batch.unwrap_or(1);
        let mut shuffled = vec![E8M0::NAN; b * len];
        for (i, &scale) in scales.iter().enumerate() {
            let (row, block) = (i / blocks, i % blocks);
            shuffled[row / rows * len + shuffled_index(row % rows, block, blocks)] = scale;
        }
        if self.batch.is_some() { gpu.upload(&shuffled, [b, len]) } else { gpu.upload(&shuffled, [len]) }
    }

    pub fn upload(&self, gpu: &Gpu) -> Inputs<X, W> {
        let &Self { m, n, k, memory, .. } = self;
        let b = self.batch.unwrap_or(1);
        let w = match memory.w_shuffled {
            None => gpu.upload(&self.w, self.place([n, k / W::EACH], memory.w, false)),
            Some(more) => {
                let columns = k / W::EACH;
                // What is past K is of no effect, whatever it is.
                let more = vec![W::pack(&[f32::MAX; 2][..W::EACH])[0]; more];
                let rows = (0..b * n).flat_map(|i| [&self.w[i * columns..][..columns], &more].concat());
                let columns = columns + more.len();
                let shuffled = shuffle_weight_host(&rows.collect::<Vec<_>>(), [b * n, columns]);
                gpu.upload(&shuffled, self.place([n, columns], [0, 0], false))
            }
        };
        let f32s = |scale: &[f32], rows: usize, of: usize| match (self.group, self.batch) {
            _ if scale.len() == 1 || scale.is_empty() && (self.group.is_none() || rows * k > 0) => {
                let one = [scale.first().copied().unwrap_or(f32::NAN)];
                let shape: &[usize] = if self.group.is_some() { &[1, 1] } else { &[1] };
                gpu.upload(&one, Place::contiguous(shape))
            }
            (Some(group), _) => gpu.upload(scale, self.scales([rows.div_ceil(of), k.div_ceil(group.k)])),
            (None, Some(b)) => gpu.upload(scale, [b, rows]),
            (None, None) => gpu.upload(scale, [rows]),
        };
        Inputs {
            x: gpu.upload(&self.x, self.place([m, k / X::EACH], memory.x, memory.turned)),
            w,
            x_scale: f32s(&self.x_scale, m, 1),
            w_scale: f32s(&self.w_scale, n, self.group.map_or(1, |group| group.n)),
            x_mx: self.upload_mx(gpu, &self.x_mx, m),
            w_mx: self.upload_mx(gpu, &self.w_mx, n),
            memory,
        }
    }

    /// f32 of a workspace that is long enough for anything.
    pub fn room(&self, gpu: &Gpu, config: Option<GemmConfig>) -> usize {
        let info = gpu.stream().device().info();
        let sizes = [self.batch.unwrap_or(1), self.m, self.n, self.k];
        let slices = config.map_or_else(
            || 4 * sizes[..3].iter().product::<usize>(),
            |config| config.workspace(info, [sizes[0], sizes[1], sizes[2]]),
        );
        // Not none, even for no rows.
        4 + slices
            + [Precision::HalfByFp4, Precision::HalfByByte]
                .map(|p| {
                    gemm_workspace(
                        info,
                        &GemmProblem::new(p, sizes[1], sizes[2], sizes[3])
                            .batched(sizes[0])
                            .prequantized(self.columns()),
                    )
                })
                .into_iter()
                .max()
                .unwrap_or(0)
    }

    /// The call, to `y`.
    pub fn run_to<Y: Float>(
        &self,
        gpu: &Gpu,
        options: GemmOptions,
        room: usize,
        y: &mut Tensor<Y>,
    ) -> Result<()> {
        let inputs = self.upload(gpu);
        let bias = self.bias.as_ref().map(|bias| match self.batch {
            Some(b) => gpu.upload(bias, [b, self.n]),
            None => gpu.upload(bias, [self.n]),
        });
        let y_scale = self.y_scale.map(|y_scale| gpu.upload(&[y_scale], [1]));
        let mut workspace = gpu.poisoned::<f32>([room]);
        let call = Call {
            batched: self.batch.is_some(),
            prequant: self.prequant,
            group: self.group,
            columns: self.columns(),
            mxfp8: self.mxfp8,
            x: inputs.x.view(),
            w: inputs.weight(),
            x_scale: inputs.x_scale.view(),
            w_scale: inputs.w_scale.view(),
            x_mx: inputs.x_mx(),
            w_mx: inputs.w_mx(),
            y_scale: y_scale.as_ref().map(|y| y.view()),
            bias: bias.as_ref().map(|bias| bias.view().into()),
            y: y.view_mut(),
            workspace: (room > 0).then(|| workspace.view_mut()),
            options,
        };
        X::call(gpu.stream(), call)?;
        gpu.assert_guards(&workspace);
        gpu.assert_untouched(&inputs.x);
        gpu.assert_untouched(&inputs.w);
        Ok(())
    }

    pub fn options(&self, config: Option<GemmConfig>) -> GemmOptions {
        GemmOptions { activation: self.activation, config, ..GemmOptions::default() }
    }

    /// The GEMM, with a workspace as long as the configuration, or the device's choice, can use.
    #[track_caller]
    pub fn run<Y: Float>(&self, gpu: &Gpu, config: Option<GemmConfig>) -> Array<Y> {
        let &Self { m, n, memory, .. } = self;
        let mut y = gpu.poisoned::<Y>(self.place([m, n], memory.y, memory.turned));
        let room = if memory.no_workspace { 0 } else { self.room(gpu, config) };
        let label = || {
            let Self { batch, m, n, k, prequant, .. } = self;
            format!(
                "{} x {}, {batch:?} x {m} x {n} x {k}, quantized {prequant}, {config:?}, {memory:?}",
                X::DTYPE,
                W::DTYPE
            )
        };
        self.run_to(gpu, self.options(config), room, &mut y)
            .unwrap_or_else(|e| panic!("{} on {}: {e}", label(), gpu.spec()));
        let mut got = gpu.download(&y);
        got.label = format!("{}: {}", label(), got.label);
        gpu.assert_guards(&y);
        got
    }

    /// Compares with the reference.
    #[track_caller]
    pub fn check<Y: Float>(&self, gpu: &Gpu, config: Option<GemmConfig>, want: &HostTensorF64) {
        hk_testkit::assert_near(&self.run::<Y>(gpu, config), want, SUM);
    }
}

/// The devices whose GEMMs take two types.
pub fn devices<X: Operand, W: Operand>() -> Vec<Gpu> {
    hk_testkit::devices_where(|arch| X::served(arch) && W::served(arch))
}
