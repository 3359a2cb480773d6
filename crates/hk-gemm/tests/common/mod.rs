//! GEMMs of any kind with one face: inputs, the call, the reference.
#![allow(dead_code, reason = "each test uses its part")]

use hk_core::{
    Arch, Element, Float, Fp8E4M3, Fp8E4M3Fnuz, Layout, Result, Stream, TensorView, TensorViewMut, bf16, f16,
};
use hk_gemm::{
    Activation, BlockScaledInputs, BlockShape, FloatView, GemmConfig, GemmOptions, GemmTile, Half, Int8OrFp8,
    ScaledInputs, batched_gemm_a8w8, batched_gemm_bf16, gemm_a8w8, gemm_a8w8_blockscale, gemm_a16w16,
    gemm_a16w16_gated, reference,
};
use hk_testkit::{Array, Fill, Gpu, HostTensorF64, Place, Tolerance};

/// The form of a GEMM.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Form {
    Plain,
    Batched,
    /// Of 16-bit floats alone.
    Gated,
    /// Of codes alone.
    Block(BlockShape),
}

/// The tensors of a call, on a device.
pub struct Call<'a, T: Element, Y: Element> {
    pub a: TensorView<'a, T>,
    pub w: TensorView<'a, T>,
    pub a_scale: TensorView<'a, f32>,
    pub w_scale: TensorView<'a, f32>,
    pub bias: Option<FloatView<'a>>,
    pub y: TensorViewMut<'a, Y>,
    pub workspace: Option<TensorViewMut<'a, f32>>,
    pub options: GemmOptions,
}

/// What GEMMs multiply.
pub trait Operand: Element {
    /// Errors of their sums, in terms of magnitudes.
    const TERMS: f64;
    /// Forms that there are.
    const FORMS: &'static [Form];
    /// Whether GEMMs have scales.
    const SCALED: bool;
    /// Standard deviation of random ones.
    const SPREAD: f32;
    fn value(self) -> f64;
    /// The nearest to a number.
    fn near(x: f32) -> Self;
    fn served(arch: Arch) -> bool;
    fn call<Y: Float>(stream: &Stream, form: Form, call: Call<Self, Y>) -> Result<()>;
}

const HALF_FORMS: &[Form] = &[Form::Plain, Form::Batched, Form::Gated];
const CODE_FORMS: &[Form] = &[
    Form::Plain,
    Form::Batched,
    Form::Block(BlockShape { n: 128, k: 128 }),
    Form::Block(BlockShape { n: 8, k: 256 }),
];

fn call_half<T: Half, Y: Float>(stream: &Stream, form: Form, c: Call<T, Y>) -> Result<()> {
    match form {
        Form::Plain => gemm_a16w16(stream, c.a, c.w, c.bias, c.y, c.workspace, c.options),
        Form::Batched => batched_gemm_bf16(stream, c.a, c.w, c.bias, c.y, c.workspace, c.options),
        Form::Gated => gemm_a16w16_gated(stream, c.a, c.w, c.y, c.workspace, c.options),
        Form::Block(_) => panic!("of codes alone"),
    }
}

fn call_code<T: Int8OrFp8, Y: Float>(stream: &Stream, form: Form, c: Call<T, Y>) -> Result<()> {
    let Call { a, w, a_scale, w_scale, bias, y, workspace, options } = c;
    match form {
        Form::Plain => {
            gemm_a8w8(stream, ScaledInputs { a, w: w.into(), a_scale, w_scale }, bias, y, workspace, options)
        }
        Form::Batched => batched_gemm_a8w8(
            stream,
            ScaledInputs { a, w: w.into(), a_scale, w_scale },
            bias,
            y,
            workspace,
            options,
        ),
        Form::Block(group) => gemm_a8w8_blockscale(
            stream,
            BlockScaledInputs { a, w: w.into(), a_scale, w_scale, group },
            bias,
            y,
            workspace,
            options,
        ),
        Form::Gated => panic!("of 16-bit floats alone"),
    }
}

macro_rules! operand {
    ($t:ident, $terms:literal, $forms:ident, $scaled:literal, $spread:literal, $arch:pat, $call:ident, |$x:ident| $value:expr, |$y:ident| $near:expr) => {
        impl Operand for $t {
            const TERMS: f64 = 1.0 / (1u64 << $terms) as f64;
            const FORMS: &'static [Form] = $forms;
            const SCALED: bool = $scaled;
            const SPREAD: f32 = $spread;
            fn value(self) -> f64 {
                let $x = self;
                $value
            }
            fn near($y: f32) -> Self {
                $near
            }
            fn served(arch: Arch) -> bool {
                matches!(arch, $arch)
            }
            fn call<Y: Float>(stream: &Stream, form: Form, call: Call<Self, Y>) -> Result<()> {
                $call(stream, form, call)
            }
        }
    };
}
operand!(bf16, 18, HALF_FORMS, false, 1.0, _, call_half, |x| Float::to_f64(x), |x| bf16::from_f32(x));
operand!(f16, 18, HALF_FORMS, false, 1.0, _, call_half, |x| Float::to_f64(x), |x| f16::from_f32(x));
operand!(i8, 22, CODE_FORMS, true, 32.0, _, call_code, |x| f64::from(x), |x| x.round() as i8);
operand!(
    Fp8E4M3,
    16,
    CODE_FORMS,
    true,
    4.0,
    Arch::Gfx950 | Arch::Sm90 | Arch::Sm90a,
    call_code,
    |x| f64::from(x.to_f32()),
    |x| Fp8E4M3::from_f32_saturating(x)
);
operand!(Fp8E4M3Fnuz, 16, CODE_FORMS, true, 4.0, Arch::Gfx942, call_code, |x| f64::from(x.to_f32()), |x| {
    Fp8E4M3Fnuz::from_f32_saturating(x)
});

/// Tiles of the vectorized path for a variant.
pub fn tiles(form: Form) -> impl Iterator<Item = GemmTile> {
    use GemmTile::*;
    let of_mxfp4 = |tile| matches!(tile, T160x256 | T96x256);
    GemmTile::ALL.into_iter().filter(move |&tile| !of_mxfp4(tile)).filter(move |tile| match form {
        Form::Plain | Form::Batched => !matches!(tile, T256x128 | T96x128),
        Form::Gated => !matches!(tile, T256x128 | T96x128 | T64x128 | S16x16 | S16x16Twice),
        Form::Block(_) => !matches!(tile, T256x256 | T128x256 | S16x16Twice),
    })
}

pub fn config(tile: GemmTile, splits: usize) -> Option<GemmConfig> {
    Some(GemmConfig { tile, splits, group: 3 })
}

/// Elements between rows, and before the first, of `a`, `w` and `y`; rows between batches.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pads {
    pub a: [usize; 2],
    pub w: [usize; 2],
    pub y: [usize; 2],
    pub rows: usize,
}

/// A place of `[batch, rows, cols]`, or without the batch.
fn place(batched: bool, [batch, rows, cols]: [usize; 3], [pad, shift]: [usize; 2], more: usize) -> Place {
    let stride = cols + pad;
    let layout = if batched {
        Layout::with_strides([batch, rows, cols], [stride * (rows + more), stride, 1])
    } else {
        Layout::with_strides([rows, cols], [stride, 1])
    };
    Place::new(layout.unwrap()).shifted(shift)
}

/// Inputs on the host.
#[derive(Debug, Clone)]
pub struct Inputs<T> {
    pub form: Form,
    pub batch: usize,
    pub m: usize,
    /// Columns of y.
    pub n: usize,
    pub k: usize,
    pub a: Vec<T>,
    pub w: Vec<T>,
    pub a_scale: Vec<f32>,
    pub w_scale: Vec<f32>,
    pub bias: Option<Vec<f32>>,
    pub activation: Option<Activation>,
    pub pads: Pads,
    /// The workspace has room for partial sums alone, which a second launch sums.
    pub short: bool,
}

impl<T: Operand> Inputs<T> {
    /// Random ones. Only a batched form has a batch.
    pub fn new(form: Form, [batch, m, n, k]: [usize; 4], seed: u64) -> Self {
        let batch = if form == Form::Batched { batch } else { 1 };
        let rows = if form == Form::Gated { 2 * n } else { n };
        let normal = |len, i| Fill::Normal.elements::<f32>(len, seed.wrapping_mul(31) + i);
        let codes = |len, i| normal(len, i).into_iter().map(|x| T::near(T::SPREAD * x)).collect();
        let scales = |len, i| normal(len, i).into_iter().map(|x| 0.01 + 0.1 * x.abs()).collect();
        let (of_a, of_w) = match form {
            Form::Block(group) => (m * k.div_ceil(group.k), n.div_ceil(group.n) * k.div_ceil(group.k)),
            _ => (batch * m, batch * n),
        };
        Self {
            form,
            batch,
            m,
            n,
            k,
            a: codes(batch * m * k, 1),
            w: codes(batch * rows * k, 2),
            a_scale: scales(of_a, 3),
            w_scale: scales(of_w, 4),
            bias: None,
            activation: None,
            pads: Pads::default(),
            short: false,
        }
    }

    /// With a random bias, if the form takes one.
    pub fn biased(mut self) -> Self {
        if self.form != Form::Gated {
            self.bias = Some(Fill::Normal.elements(self.batch * self.n, 77));
        }
        self
    }

    pub fn activated(self, activation: Option<Activation>) -> Self {
        Self { activation, ..self }
    }

    pub fn padded(self, pads: Pads) -> Self {
        Self { pads, ..self }
    }

    /// All scales one.
    pub fn unscaled(mut self) -> Self {
        self.a_scale.fill(1.0);
        self.w_scale.fill(1.0);
        self
    }

    fn shape(&self) -> Vec<usize> {
        let all = [self.batch, self.m, self.n];
        if self.form == Form::Batched { all.to_vec() } else { all[1..].to_vec() }
    }

    pub fn reference(&self) -> HostTensorF64 {
        let &Self { batch, m, n, k, .. } = self;
        let wide = |x: &[T]| x.iter().map(|x| x.value()).collect::<Vec<_>>();
        let floats = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let (mut a, mut w) = (wide(&self.a), wide(&self.w));
        let (a_scale, w_scale) = (floats(&self.a_scale), floats(&self.w_scale));
        let rows = if self.form == Form::Gated { 2 * n } else { n };
        if let Form::Block(group) = self.form {
            a = reference::scaled(&a, k, &a_scale, [1, group.k]);
            w = reference::scaled(&w, k, &w_scale, [group.n, group.k]);
        }
        let sums = reference::product(&a, &w, [batch, m, rows, k]);
        let sums = match self.form {
            Form::Gated => sums.gated(self.activation, n, T::TERMS),
            Form::Plain | Form::Batched if T::SCALED => sums.scaled(&a_scale, &w_scale, [m, n]),
            _ => sums,
        };
        let sums = if self.form == Form::Gated {
            sums
        } else {
            sums.biased(&floats(self.bias.as_deref().unwrap_or(&[])), [m, n]).activated(self.activation)
        };
        HostTensorF64::new(self.shape(), sums.values).with_magnitudes(sums.magnitudes)
    }

    /// The GEMM, with a workspace as long as the configuration, or the device's choice, can use.
    pub fn run<Y: Float>(&self, gpu: &Gpu, config: Option<GemmConfig>) -> Array<Y> {
        let &Self { batch, m, n, k, pads, .. } = self;
        let batched = self.form == Form::Batched;
        let rows = if self.form == Form::Gated { 2 * n } else { n };
        let a = gpu.upload(&self.a, place(batched, [batch, m, k], pads.a, pads.rows));
        let w = gpu.upload(&self.w, place(batched, [batch, rows, k], pads.w, pads.rows));
        let mut y = gpu.poisoned::<Y>(place(batched, [batch, m, n], pads.y, pads.rows));
        let scale = |x: &[f32], rows: usize, group: usize| match self.form {
            Form::Block(shape) => gpu.upload(x, [rows.div_ceil(group), k.div_ceil(shape.k)]),
            Form::Batched => gpu.upload(x, [batch, rows]),
            _ => gpu.upload(x, [rows]),
        };
        let group_n = if let Form::Block(shape) = self.form { shape.n } else { 1 };
        let (a_scale, w_scale) = (scale(&self.a_scale, m, 1), scale(&self.w_scale, n, group_n));
        let bias = self
            .bias
            .as_ref()
            .map(|bias| if batched { gpu.upload(bias, [batch, n]) } else { gpu.upload(bias, [n]) });
        let splits = config.map_or(4, |c| c.splits);
        let (sums, info) = (batch * m * rows, gpu.stream().device().info());
        let room = match config {
            Some(config) if !self.short => config.workspace(info, [batch, m, rows]),
            _ => splits * sums,
        };
        let mut workspace = gpu.poisoned::<f32>([room]);
        let call = Call {
            a: a.view(),
            w: w.view(),
            a_scale: a_scale.view(),
            w_scale: w_scale.view(),
            bias: bias.as_ref().map(|bias| bias.view().into()),
            y: y.view_mut(),
            workspace: (splits > 1).then(|| workspace.view_mut()),
            options: GemmOptions { activation: self.activation, config, ..GemmOptions::default() },
        };
        let (form, spec) = (self.form, gpu.spec());
        T::call(gpu.stream(), form, call)
            .unwrap_or_else(|e| panic!("{form:?} {batch} {m} {n} {k} {config:?} on {spec}: {e}"));
        let mut got = gpu.download(&y);
        got.label =
            format!("{} {form:?} {batch} x {m} x {n} x {k} {config:?} {pads:?}: {}", T::DTYPE, got.label);
        gpu.assert_guards(&y);
        gpu.assert_guards(&workspace);
        gpu.assert_untouched(&a);
        gpu.assert_untouched(&w);
        got
    }

    /// Compares with the reference.
    #[track_caller]
    pub fn check<Y: Float>(&self, gpu: &Gpu, config: Option<GemmConfig>, want: &HostTensorF64) {
        hk_testkit::assert_near(&self.run::<Y>(gpu, config), want, Tolerance::Sum { terms: T::TERMS });
    }
}

/// The devices whose GEMMs take a type.
pub fn devices<T: Operand>() -> Vec<Gpu> {
    hk_testkit::devices_where(T::served)
}

/// A test for each type of operands.
#[macro_export]
macro_rules! for_each_operand {
    ($($name:ident),+ $(,)?) => {
        $(
            mod $name {
                #[test]
                fn bf16() {
                    super::$name::<hk_core::bf16>();
                }
                #[test]
                fn f16() {
                    super::$name::<hk_core::f16>();
                }
                #[test]
                fn i8() {
                    super::$name::<i8>();
                }
                #[test]
                fn fp8() {
                    super::$name::<hk_core::Fp8E4M3Fnuz>();
                    super::$name::<hk_core::Fp8E4M3>();
                }
            }
        )+
    };
}
