//! `fused_rmsnorm_fp8_quant` and `fused_rmsnorm_mxfp4_quant` on the emulated GPUs (and real ones if there are any), against the
//! norm of hk-norm and a scalar quantizer on the host.

use hk_core::quant::{
    BlockRule, BlockScale, GroupSize, Quantized, ScaleLayout, group_scale, linear_scale, shuffled_index,
    shuffled_len,
};
use hk_core::{E8M0, Float, Fp4Rounding, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz, Layout, Result, Stream, bf16, f16};
use hk_quant::{
    Fp8Scale, GroupScaleRule, MxOptions, NormMxfp4Options, NormRounding, NormRows, SecondRows, Smooth,
    reference,
};
use hk_testkit::{
    self as kit, Array, CallElement, Fill, Gpu, Place, Refusals, RowCase, Tensor, Tensors, assert_error,
    kind, proptest::prelude::*, widen,
};

const EPS: f32 = 1e-6;

/// Granularity of the scales.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mode {
    Tensor(f32),
    Token { smooth: bool },
    Group(GroupSize, bool, ScaleLayout),
}

fn modes() -> impl Strategy<Value = Mode> {
    let size = prop_oneof![Just(GroupSize::G32), Just(GroupSize::G64), Just(GroupSize::G128)];
    let layout = prop_oneof![Just(ScaleLayout::RowMajor), Just(ScaleLayout::ColMajor)];
    prop_oneof![
        prop_oneof![Just(0.02f32), Just(-0.5), Just(3e-3)].prop_map(Mode::Tensor),
        any::<bool>().prop_map(|smooth| Mode::Token { smooth }),
        (size, any::<bool>(), layout).prop_map(|(size, pow2, layout)| Mode::Group(size, pow2, layout)),
    ]
}

/// The same rows on the host and on a device.
struct Inputs<'a, T: Float, W> {
    case: &'a RowCase<T>,
    residual: Option<Vec<T>>,
    weight: Vec<W>,
}

impl<'a, T: Float> Inputs<'a, T, T> {
    fn new(case: &'a RowCase<T>, residual: bool) -> Self {
        Self { case, residual: residual.then(|| case.matrix(1)), weight: case.w.clone() }
    }
}

/// All outputs of a call.
struct Output<T, Q, S> {
    q: Array<Q>,
    scale: Array<S>,
    out: Array<T>,
    residual_out: Array<T>,
}

fn q_place<T: Float>(c: &RowCase<T>, per_byte: usize, i: usize) -> Place {
    let strides = c.place(i).layout().strides()[0];
    let shift = if strides.is_multiple_of(16) { 0 } else { 1 };
    Place::rows([c.rows, c.cols / per_byte], strides).shifted(shift)
}

fn scale_place(rows: usize, groups: usize, layout: ScaleLayout) -> Place {
    match layout {
        ScaleLayout::ColMajor => Place::new(Layout::with_strides([rows, groups], [1, rows + 3]).unwrap()),
        _ => Place::rows([rows, groups], groups + 2),
    }
}

#[track_caller]
fn run_fp8<T: Float, W: Smooth<T>, Q: Quantized>(
    gpu: &Gpu,
    inputs: &Inputs<T, W>,
    mode: Mode,
    round_norm: bool,
) -> Output<T, Q, f32> {
    let c = inputs.case;
    let x = gpu.upload(&c.x, c.place(0));
    let weight = gpu.upload(&inputs.weight, [c.cols]);
    let residual = inputs.residual.as_ref().map(|r| gpu.upload(r, c.place(1)));
    let (mut out, mut residual_out) = (gpu.poisoned(c.place(2)), gpu.poisoned(c.place(3)));
    let mut q = gpu.poisoned::<Q>(q_place(c, 1, 1));
    let groups = |size: GroupSize| c.cols.div_ceil(size.columns());
    let mut scale = match mode {
        Mode::Tensor(value) => gpu.upload(&[value], [1]),
        Mode::Token { .. } => gpu.poisoned([c.rows]),
        Mode::Group(size, _, layout) => gpu.poisoned(scale_place(c.rows, groups(size), layout)),
    };
    let smooth = gpu.upload(&smooth(c.cols), [c.cols]);
    let on_device = match mode {
        Mode::Tensor(_) => Fp8Scale::PerTensorStatic { scale: scale.view() },
        Mode::Token { smooth: with } => {
            Fp8Scale::PerToken { scale: scale.view_mut(), smooth: with.then(|| smooth.view()) }
        }
        Mode::Group(size, pow2, _) => Fp8Scale::Group { size, scale: scale.view_mut(), rule: rule(pow2) },
    };
    let norm = NormRows {
        x: x.view(),
        weight: weight.view(),
        eps: EPS,
        residual: residual.as_ref().map(|r| (r.view(), residual_out.view_mut())),
        out: Some(out.view_mut()),
    };
    hk_quant::fused_rmsnorm_fp8_quant(
        gpu.stream(),
        norm,
        None,
        q.view_mut(),
        on_device,
        rounding(round_norm),
    )
    .unwrap();
    gpu.assert_guards(&q);
    gpu.assert_guards(&scale);
    gpu.assert_guards(&out);
    gpu.assert_guards(&residual_out);
    gpu.assert_untouched(&x);
    Output {
        q: gpu.download(&q),
        scale: gpu.download(&scale),
        out: gpu.download(&out),
        residual_out: gpu.download(&residual_out),
    }
}

fn rule(pow2: bool) -> GroupScaleRule {
    if pow2 { GroupScaleRule::PowerOfTwo } else { GroupScaleRule::Exact }
}

fn rounding(round_norm: bool) -> NormRounding {
    if round_norm { NormRounding::Input } else { NormRounding::F32 }
}

fn options(scale_layout: ScaleLayout, mode: BlockScale, round_norm: bool) -> NormMxfp4Options {
    NormMxfp4Options { mx: MxOptions { mode, scale_layout }, rounding: rounding(round_norm) }
}

fn smooth(cols: usize) -> Vec<f32> {
    (0..cols).map(|i| [0.5, -2.0, 1.25, 0.0, 3.0][i % 5]).collect()
}

/// The norm of hk-norm.
fn plain_norm<T: Float, W: Smooth<T> + hk_norm::Weight<T>>(
    gpu: &Gpu,
    inputs: &Inputs<T, W>,
) -> (Array<T>, Array<T>) {
    let c = inputs.case;
    let (x, weight) = (gpu.upload(&c.x, c.shape()), gpu.upload(&inputs.weight, [c.cols]));
    let (mut y, mut sum) = (gpu.poisoned::<T>(c.shape()), gpu.poisoned::<T>(c.shape()));
    let options = hk_norm::RmsNormPadOptions { eps: EPS, pad_multiple: 0 };
    match &inputs.residual {
        Some(residual) => {
            let r = gpu.upload(residual, c.shape());
            let outputs =
                hk_norm::FusedAddRmsNormPadOutputs { y: y.view_mut(), residual_out: sum.view_mut() };
            let (xv, rv, wv) = (x.view(), r.view(), weight.view());
            hk_norm::fused_add_rmsnorm_pad(gpu.stream(), xv, rv, wv, outputs, options).unwrap();
        }
        None => {
            hk_norm::rmsnorm_pad(gpu.stream(), x.view(), weight.view(), y.view_mut(), options).unwrap();
        }
    }
    (gpu.download(&y), gpu.download(&sum))
}

fn finite_max(values: &[f32]) -> f32 {
    values.iter().filter(|v| v.is_finite()).fold(0.0, |max, v| v.abs().max(max))
}

/// Quantized rows and scales, operation by operation in f32.
fn quantized<Q: Quantized>(y: &[f32], cols: usize, mode: Mode) -> (Vec<Q>, Vec<f32>) {
    let (mut q, mut scales) = (Vec::new(), Vec::new());
    let smooth = smooth(cols);
    for row in y.chunks(cols) {
        let with = mode == (Mode::Token { smooth: true });
        let z: Vec<f32> = row.iter().zip(&smooth).map(|(y, s)| if with { y * s } else { *y }).collect();
        let size = if let Mode::Group(size, ..) = mode { size.columns() } else { cols };
        for part in z.chunks(size) {
            let amax = finite_max(part);
            let scale = match mode {
                Mode::Tensor(value) => value,
                Mode::Token { .. } => linear_scale(amax, Q::FORMAT),
                Mode::Group(_, false, _) => group_scale(amax, Q::FORMAT),
                Mode::Group(_, true, _) => {
                    BlockRule::codes(BlockScale::RoundUp, Q::FORMAT, 0).scale(amax.max(1e-10)).to_f32()
                }
            };
            let inverse = 1.0 / scale;
            q.extend(part.iter().map(|v| Q::from_f32(v * inverse)));
            scales.push(scale);
        }
    }
    if let Mode::Tensor(value) = mode {
        scales = vec![value];
    }
    (q, scales)
}

/// `out` and `residual_out` are those of hk-norm; with `round_norm`, `q` is bitwise `out`, quantized.
#[track_caller]
fn check_fp8<T: Float, W: Float + Smooth<T> + hk_norm::Weight<T>, Q: Quantized>(
    inputs: &Inputs<T, W>,
    mode: Mode,
) {
    for gpu in kit::devices() {
        let want = plain_norm(&gpu, inputs);
        check_fp8_on::<T, W, Q>(&gpu, inputs, mode, true, &want);
        check_fp8_on::<T, W, Q>(&gpu, inputs, mode, false, &want);
    }
}

#[track_caller]
fn check_fp8_on<T: Float, W: Float + Smooth<T>, Q: Quantized>(
    gpu: &Gpu,
    inputs: &Inputs<T, W>,
    mode: Mode,
    round_norm: bool,
    (want_out, want_sum): &(Array<T>, Array<T>),
) {
    let got = run_fp8::<T, W, Q>(gpu, inputs, mode, round_norm);
    kit::assert_bits(&got.out, want_out);
    if inputs.residual.is_some() {
        kit::assert_bits(&got.residual_out, want_sum);
    }
    if round_norm || size_of::<T>() == 4 {
        let y: Vec<f32> = got.out.iter().map(|v| v.to_f32()).collect();
        let (q, scale) = quantized::<Q>(&y, inputs.case.cols, mode);
        kit::assert_bits(&got.q, &q);
        kit::assert_bits(&got.scale, &scale);
    } else {
        assert_near(&got, inputs, mode);
    }
}

/// Quantized values of the f64 norm, or their neighbours; scales within the tolerance of the norm.
#[track_caller]
fn assert_near<T: Float, W: Smooth<T> + Float, Q: Quantized>(
    got: &Output<T, Q, f32>,
    inputs: &Inputs<T, W>,
    mode: Mode,
) {
    let c = inputs.case;
    let residual = inputs.residual.as_ref().map(|r| widen(r));
    let y = reference::normed_rows::<T>(&widen(&c.x), residual.as_deref(), &widen(&inputs.weight), EPS).y;
    let y: Vec<f32> = y.into_iter().map(|v| v as f32).collect();
    let (q, scale) = quantized::<Q>(&y, c.cols, mode);
    for (got, want) in got.scale.iter().zip(&scale) {
        // Powers of two may lie on either side of a border.
        let pow2 = matches!(mode, Mode::Group(_, true, _));
        let near =
            (got - want).abs() <= 1e-5 * want.abs() || (pow2 && (*got == 2.0 * want || 2.0 * got == *want));
        assert!(near, "scale {got:e} for {want:e}");
    }
    let mut others = 0;
    for (got, want) in got.q.iter().zip(&q) {
        let (got, want) = (got.to_f32(), want.to_f32());
        assert_eq!(got.is_nan(), want.is_nan());
        others += usize::from(got != want && !want.is_nan());
        let step = if Q::FORMAT.qmax == 127.0 { 1.0 } else { (want.abs() / 8.0).max(1.0 / 512.0) };
        assert!(got.is_nan() || (got - want).abs() <= step, "code {got} for {want}");
    }
    assert!(others <= 2 + q.len() / 500, "{others} of {} codes are not the nearest", q.len());
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn bf16_is_the_norm_and_the_quantizer(c in kit::row_case::<bf16>(1..=40, 1..=18_000), residual: bool, mode in modes()) {
        check_fp8::<_, _, Fp8E4M3>(&Inputs::new(&c, residual), mode);
    }

    #[test]
    fn f16_is_the_norm_and_the_quantizer(c in kit::row_case::<f16>(1..=40, 1..=18_000), residual: bool, mode in modes()) {
        let weight = Fill::Normal.elements::<f32>(c.cols, c.seed);
        let residual = residual.then(|| c.matrix(1));
        check_fp8::<_, _, Fp8E4M3Fnuz>(&Inputs { case: &c, residual, weight }, mode);
    }

    #[test]
    fn f32_is_the_norm_and_the_quantizer(c in kit::row_case::<f32>(1..=40, 1..=18_000), residual: bool, mode in modes()) {
        check_fp8::<_, _, Fp8E4M3Fnuz>(&Inputs::new(&c, residual), mode);
    }

    #[test]
    fn int8_is_the_norm_and_the_quantizer(c in kit::row_case::<bf16>(1..=40, 1..=18_000), residual: bool, smooth: bool) {
        check_fp8::<_, _, i8>(&Inputs::new(&c, residual), Mode::Token { smooth });
    }

    #[test]
    fn fp4_is_the_norm_and_the_quantizer(
        c in kit::row_case::<bf16>(1..=40, 1..=9_000), residual: bool, mode in block_modes(), shuffled: bool,
    ) {
        check_mxfp4(&even(&c), residual, mode, shuffled);
    }

    #[test]
    fn fp4_of_f32_is_the_norm_and_the_quantizer(
        c in kit::row_case::<f32>(1..=40, 1..=9_000), residual: bool, mode in block_modes(), shuffled: bool,
    ) {
        check_mxfp4(&even(&c), residual, mode, shuffled);
    }

    /// Batch invariance: a row's bytes depend on neither other rows nor the layout.
    #[test]
    fn a_row_does_not_depend_on_its_surroundings(
        c in kit::row_case::<bf16>(2..=30, 1..=18_000), pick in any::<prop::sample::Index>(), mode in modes(),
    ) {
        let row = pick.index(c.rows);
        let mut alone: RowCase<bf16> = RowCase::new(1, c.cols, c.fill, c.seed, [(c.cols, 0); 4]);
        alone.x = c.x[row * c.cols..][..c.cols].to_vec();
        let residual = c.matrix(1)[row * c.cols..][..c.cols].to_vec();
        let one = Inputs { case: &alone, residual: Some(residual), weight: c.w.clone() };
        for gpu in kit::devices() {
            let all = run_fp8::<_, _, Fp8E4M3>(&gpu, &Inputs::new(&c, true), mode, false);
            let alone = run_fp8::<_, _, Fp8E4M3>(&gpu, &one, mode, false);
            kit::assert_bits(&alone.q, all.q.row(row));
            if !matches!(mode, Mode::Tensor(_)) {
                let per_row = all.scale.len() / c.rows;
                kit::assert_bits(&alone.scale, &all.scale[row * per_row..][..per_row]);
            }
        }
    }
}

/// The case with an even number of columns.
fn even<T: Float>(c: &RowCase<T>) -> RowCase<T> {
    let cols = c.cols.next_multiple_of(2);
    let place = |i| (c.place(i).layout().strides()[0].max(cols), 0);
    RowCase::new(c.rows, cols, c.fill, c.seed, [place(0), place(1), place(2), place(3)])
}

fn block_modes() -> impl Strategy<Value = BlockScale> {
    prop_oneof![Just(BlockScale::Even), Just(BlockScale::RoundUp), Just(BlockScale::Floor)]
}

#[track_caller]
fn run_mxfp4<T: Float>(
    gpu: &Gpu,
    inputs: &Inputs<T, T>,
    mode: BlockScale,
    layout: ScaleLayout,
    round_norm: bool,
) -> Output<T, Fp4x2, E8M0> {
    let c = inputs.case;
    let blocks = c.cols.div_ceil(32);
    let (x, weight) = (gpu.upload(&c.x, c.place(0)), gpu.upload(&inputs.weight, [c.cols]));
    let residual = inputs.residual.as_ref().map(|r| gpu.upload(r, c.place(1)));
    let (mut out, mut residual_out) = (gpu.poisoned(c.place(2)), gpu.poisoned(c.place(3)));
    let mut q = gpu.poisoned::<Fp4x2>(q_place(c, 2, 1));
    let mut scale = match layout {
        ScaleLayout::Shuffled950 => gpu.poisoned([shuffled_len(c.rows, blocks).unwrap()]),
        layout => gpu.poisoned(scale_place(c.rows, blocks, layout)),
    };
    let norm = NormRows {
        x: x.view(),
        weight: weight.view(),
        eps: EPS,
        residual: residual.as_ref().map(|r| (r.view(), residual_out.view_mut())),
        out: Some(out.view_mut()),
    };
    let (qv, sv) = (q.view_mut(), scale.view_mut());
    hk_quant::fused_rmsnorm_mxfp4_quant(gpu.stream(), norm, None, qv, sv, options(layout, mode, round_norm))
        .unwrap();
    gpu.assert_guards(&q);
    gpu.assert_guards(&scale);
    gpu.assert_guards(&out);
    gpu.assert_guards(&residual_out);
    Output {
        q: gpu.download(&q),
        scale: gpu.download(&scale),
        out: gpu.download(&out),
        residual_out: gpu.download(&residual_out),
    }
}

/// Blocks of rows by the definition.
fn blocks_of(y: &[f32], cols: usize, mode: BlockScale) -> (Vec<Fp4x2>, Vec<E8M0>) {
    let rule = BlockRule::fp4(mode, 0);
    let (mut q, mut scales) = (Vec::new(), Vec::new());
    for block in y.chunks(cols).flat_map(|row| row.chunks(32)) {
        let finite = block.iter().all(|v| v.is_finite());
        let scale = if finite { rule.scale(finite_max(block)) } else { E8M0::NAN };
        // Exact: the scale is a power of two.
        let value = |v: f32| if finite { (f64::from(v) / f64::from(scale.to_f32())) as f32 } else { 0.0 };
        q.extend(
            block.chunks(2).map(|p| Fp4x2::from_f32([value(p[0]), value(p[1])], Fp4Rounding::NearestEven)),
        );
        scales.push(scale);
    }
    (q, scales)
}

#[track_caller]
fn check_mxfp4<T: Float>(c: &RowCase<T>, residual: bool, mode: BlockScale, shuffled: bool) {
    let inputs = Inputs::new(c, residual);
    let mut unrounded: Vec<Vec<u8>> = Vec::new();
    for gpu in kit::devices() {
        let (want_out, want_sum) = plain_norm(&gpu, &inputs);
        let layout = if shuffled { ScaleLayout::Shuffled950 } else { ScaleLayout::ColMajor };
        let got = run_mxfp4(&gpu, &inputs, mode, layout, true);
        kit::assert_bits(&got.out, &want_out);
        if residual {
            kit::assert_bits(&got.residual_out, &want_sum);
        }
        let y: Vec<f32> = got.out.iter().map(|v| v.to_f32()).collect();
        let (q, scale) = blocks_of(&y, c.cols, mode);
        kit::assert_bits(&got.q, &q);
        if shuffled {
            let blocks = c.cols.div_ceil(32);
            let mut want = vec![E8M0(127); got.scale.len()];
            for (i, &scale) in scale.iter().enumerate() {
                want[shuffled_index(i / blocks, i % blocks, blocks)] = scale;
            }
            kit::assert_bits(&got.scale, &want);
        } else {
            kit::assert_bits(&got.scale, &scale);
        }

        // Not rounded: the blocks of the f64 norm, except values near a tie.
        let got = run_mxfp4(&gpu, &inputs, mode, ScaleLayout::RowMajor, false);
        let residual = inputs.residual.as_ref().map(|r| widen(r));
        let y = reference::normed_rows::<T>(&widen(&c.x), residual.as_deref(), &widen(&inputs.weight), EPS).y;
        let y: Vec<f32> = y.into_iter().map(|v| v as f32).collect();
        let (q, scale) = blocks_of(&y, c.cols, mode);
        let differ = got.q.iter().zip(&q).filter(|(a, b)| a != b).count();
        assert!(differ <= 2 + q.len() / 500, "{differ} of {} codes differ from the reference", q.len());
        let differ = got.scale.iter().zip(&scale).filter(|(a, b)| a.0.abs_diff(b.0) > 0).count();
        assert!(differ <= 1 + scale.len() / 1000, "{differ} of {} scales differ", scale.len());
        if gpu.arch().is_amd() {
            unrounded.push(bytemuck::cast_slice(&got.q.data).to_vec());
        }
    }
    // rsqrt is the same on both AMD targets, and so is all else.
    assert!(unrounded.windows(2).all(|pair| pair[0] == pair[1]), "the targets give other bytes");
}

/// Widths of the specification and of every kernel.
#[test]
fn every_width_of_fp8() {
    let modes = [
        Mode::Group(GroupSize::G128, false, ScaleLayout::RowMajor),
        Mode::Token { smooth: true },
        Mode::Group(GroupSize::G32, true, ScaleLayout::ColMajor),
        Mode::Tensor(0.02),
        Mode::Group(GroupSize::G64, false, ScaleLayout::ColMajor),
    ];
    for (i, cols) in
        [1, 127, 128, 130, 512, 1536, 2048, 2880, 4096, 7168, 8193, 16_384, 16_512].into_iter().enumerate()
    {
        let c: RowCase<bf16> = RowCase::new(3, cols, Fill::Normal, cols as u64, [(cols, 0); 4]);
        check_fp8::<_, _, Fp8E4M3Fnuz>(&Inputs::new(&c, i % 2 == 0), modes[i % 5]);
        let c: RowCase<f32> = RowCase::new(3, cols, Fill::Normal, cols as u64, [(cols, 0); 4]);
        check_fp8::<_, _, Fp8E4M3>(&Inputs::new(&c, i % 2 == 1), modes[(i + 2) % 5]);
    }
    let rows = if kit::full() { &[32, 33, 256, 4096][..] } else { &[32, 33, 256] };
    for &rows in rows {
        let c: RowCase<bf16> = RowCase::new(rows, 130, Fill::Normal, rows as u64, [(136, 0); 4]);
        check_fp8::<_, _, Fp8E4M3>(&Inputs::new(&c, true), modes[0]);
    }
}

#[test]
fn every_width_of_fp4() {
    for (i, cols) in
        [2, 4, 20, 28, 32, 40, 64, 68, 200, 1536, 2880, 7168, 8194, 16_416].into_iter().enumerate()
    {
        let mode = [BlockScale::Even, BlockScale::RoundUp, BlockScale::Floor][i % 3];
        let rows = [1, 2, 33, 4][i % 4];
        check_mxfp4::<bf16>(
            &RowCase::new(rows, cols, Fill::Normal, 5, [(cols, 0); 4]),
            true,
            mode,
            i % 2 == 0,
        );
        check_mxfp4::<f16>(&RowCase::new(2, cols, Fill::Wide, 6, [(cols, 0); 4]), false, mode, i % 2 == 1);
    }
    for rows in [132, 256, 280] {
        check_mxfp4::<bf16>(
            &RowCase::new(rows, 96, Fill::Normal, 7, [(96, 0); 4]),
            false,
            BlockScale::Even,
            true,
        );
    }
}

/// The longest rows of each kernel of the norm, and the shortest ones of the next, vectorized and scalar.
fn edges() -> impl Iterator<Item = RowPlaces> {
    let widest = [64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16_384];
    let edges = widest.into_iter().flat_map(|cols| {
        [(cols, cols), (cols + 8, cols + 8), (cols, cols + 1), (cols + 1, cols + 1), (cols + 2, cols + 2)]
    });
    edges.map(|(cols, stride)| RowPlaces { rows: 2, cols, stride })
}

struct RowPlaces {
    rows: usize,
    cols: usize,
    stride: usize,
}

impl RowPlaces {
    fn case<T: Float>(&self) -> RowCase<T> {
        RowCase::new(self.rows, self.cols, Fill::Normal, self.cols as u64, [(self.stride, 0); 4])
    }
}

/// The norm's lanes follow from the length of a row as those of hk-norm do, for each dtype.
#[test]
fn every_edge_of_fp8() {
    fn check<T: Float + Smooth<T> + hk_norm::Weight<T>>(at: &RowPlaces, mode: Mode, residual: bool) {
        let c = at.case::<T>();
        let inputs = Inputs::new(&c, residual);
        for gpu in kit::devices() {
            check_fp8_on::<_, _, Fp8E4M3>(&gpu, &inputs, mode, true, &plain_norm(&gpu, &inputs));
        }
    }
    let group = |size| Mode::Group(size, false, ScaleLayout::RowMajor);
    for (i, at) in edges().enumerate() {
        let mode = [group(GroupSize::G128), Mode::Token { smooth: false }, group(GroupSize::G64)][i % 3];
        check::<bf16>(&at, mode, i % 2 == 0);
        check::<f16>(&at, mode, i % 2 == 1);
        // Other lanes may give a row the same sum: f32 shows one bit of difference, given enough rows.
        let rows = if at.cols > 1032 { 9 } else { 40 };
        check::<f32>(&RowPlaces { rows, ..at }, mode, i % 2 == 0);
    }
}

#[test]
fn every_edge_of_fp4() {
    for (i, at) in edges().filter(|at| at.cols % 2 == 0).enumerate() {
        for gpu in kit::devices() {
            let c = at.case::<bf16>();
            let inputs = Inputs::new(&c, i % 2 == 0);
            let got = run_mxfp4(&gpu, &inputs, BlockScale::Even, ScaleLayout::RowMajor, true);
            kit::assert_bits(&got.out, &plain_norm(&gpu, &inputs).0);
        }
    }
}

/// NaN, infinities and zeros stay in their rows.
#[test]
fn special_values_stay_in_their_rows() {
    for cols in [64, 130, 2880] {
        let mut c: RowCase<bf16> = RowCase::new(6, cols, Fill::Normal, 8, [(cols, 0); 4]);
        c.x[cols + 3] = bf16::NAN;
        c.x[2 * cols + 3] = bf16::INFINITY;
        c.x[3 * cols..4 * cols].fill(bf16::ZERO);
        c.x[4 * cols..5 * cols].fill(bf16::from_f32(1e-38));
        for mode in [Mode::Token { smooth: false }, Mode::Group(GroupSize::G32, false, ScaleLayout::RowMajor)]
        {
            check_fp8::<_, _, Fp8E4M3>(&Inputs::new(&c, false), mode);
            check_fp8::<_, _, Fp8E4M3Fnuz>(&Inputs::new(&c, false), mode);
        }
        check_mxfp4(&c, false, BlockScale::Even, true);
        for gpu in kit::devices() {
            let got =
                run_fp8::<_, _, i8>(&gpu, &Inputs::new(&c, false), Mode::Token { smooth: false }, false);
            assert!(got.scale[3] == 1.0 && got.q.row(3).iter().all(|q| *q == 0));
            assert!(got.q.row(1).iter().all(|q| *q == 0), "NaN has the code 0");
        }
    }
}

/// DeepSeek's latents: both inputs are columns of one tensor; one is quantized, one only normalized.
#[test]
fn two_inputs_are_two_norms() {
    let rows = 5;
    for (cols, cols2) in [(1536, 512), (128, 7168), (127, 130), (64, 64)] {
        let width = cols + cols2 + 64;
        let c: RowCase<bf16> = RowCase::new(rows, width, Fill::Normal, 9, [(width, 0); 4]);
        let w2: Vec<bf16> = c.w[..cols2].to_vec();
        let part = |from: usize, n: usize| {
            c.x.chunks(width).flat_map(|r| r[from..from + n].to_vec()).collect::<Vec<_>>()
        };
        for gpu in kit::devices() {
            let both = gpu.upload(&c.x, c.shape());
            let (w1, w2) = (gpu.upload(&c.w[..cols], [cols]), gpu.upload(&w2, [cols2]));
            let slice = |range| both.view().slice(1, range).unwrap();
            let (mut q, mut scale) = (gpu.poisoned::<Fp8E4M3>([rows, cols]), gpu.poisoned([rows]));
            let (mut out, mut out2) = (gpu.poisoned([rows, cols]), gpu.poisoned([rows, cols2]));
            let norm = NormRows {
                x: slice(0..cols),
                weight: w1.view(),
                eps: EPS,
                residual: None,
                out: Some(out.view_mut()),
            };
            let second = SecondRows {
                x: slice(cols..cols + cols2),
                weight: w2.view(),
                eps: 1e-5,
                out: out2.view_mut(),
            };
            let per_token = Fp8Scale::PerToken { scale: scale.view_mut(), smooth: None };
            hk_quant::fused_rmsnorm_fp8_quant(
                gpu.stream(),
                norm,
                Some(second),
                q.view_mut(),
                per_token,
                NormRounding::Input,
            )
            .unwrap();
            gpu.assert_untouched(&both);
            let rmsnorm = |x: Vec<bf16>, w: &Tensor<bf16>, eps: f32| {
                let shape = [rows, x.len() / rows];
                let (x, mut y) = (gpu.upload(&x, shape), gpu.poisoned::<bf16>(shape));
                let options = hk_norm::RmsNormOptions { eps, ..Default::default() };
                hk_norm::rmsnorm(gpu.stream(), x.view(), w.view(), y.view_mut(), options).unwrap();
                gpu.download(&y)
            };
            let want = rmsnorm(part(0, cols), &w1, EPS);
            kit::assert_bits(&gpu.download(&out), &want);
            let y: Vec<f32> = want.iter().map(|v| v.to_f32()).collect();
            kit::assert_bits(
                &gpu.download(&q),
                &quantized::<Fp8E4M3>(&y, cols, Mode::Token { smooth: false }).0,
            );
            let want2 = rmsnorm(part(cols, cols2), &w2, 1e-5);
            kit::assert_bits(&gpu.download(&out2), &want2);
            gpu.assert_guards(&out2);

            if cols % 2 == 0 {
                let blocks = cols.div_ceil(32);
                let (mut q, mut scale) =
                    (gpu.poisoned::<Fp4x2>([rows, cols / 2]), gpu.poisoned([rows, blocks]));
                let mut out2 = gpu.poisoned([rows, cols2]);
                let norm =
                    NormRows { x: slice(0..cols), weight: w1.view(), eps: EPS, residual: None, out: None };
                let second = SecondRows {
                    x: slice(cols..cols + cols2),
                    weight: w2.view(),
                    eps: 1e-5,
                    out: out2.view_mut(),
                };
                let (qv, sv, layout) = (q.view_mut(), scale.view_mut(), ScaleLayout::RowMajor);
                hk_quant::fused_rmsnorm_mxfp4_quant(
                    gpu.stream(),
                    norm,
                    Some(second),
                    qv,
                    sv,
                    options(layout, BlockScale::Even, true),
                )
                .unwrap();
                kit::assert_bits(&gpu.download(&q), &blocks_of(&y, cols, BlockScale::Even).0);
                kit::assert_bits(&gpu.download(&out2), &want2);
            }
        }
    }
}

/// `residual_out` may alias `residual_in` or `x`; long rows are read again after it is written.
#[test]
fn in_place_is_out_of_place() {
    for cols in [100, 1024, 16_400] {
        let c: RowCase<f16> = RowCase::new(3, cols, Fill::Normal, 10, [(cols, 0); 4]);
        let inputs = Inputs::new(&c, true);
        let residual = inputs.residual.clone().unwrap();
        for gpu in kit::devices() {
            let want = run_fp8::<_, _, Fp8E4M3>(&gpu, &inputs, Mode::Token { smooth: false }, false);
            let weight = gpu.upload(&c.w, [cols]);
            for over_x in [false, true] {
                let (mut x, mut r) = (gpu.upload(&c.x, c.shape()), gpu.upload(&residual, c.shape()));
                let (mut q, mut scale) = (gpu.poisoned::<Fp8E4M3>(c.shape()), gpu.poisoned([3]));
                let (xv, rv) = (x.view_mut(), r.view_mut());
                let (x_in, r_in) = (xv.alias(), rv.alias());
                let residual = Some((r_in, if over_x { xv } else { rv }));
                let norm = NormRows { x: x_in, weight: weight.view(), eps: EPS, residual, out: None };
                let per_token = Fp8Scale::PerToken { scale: scale.view_mut(), smooth: None };
                hk_quant::fused_rmsnorm_fp8_quant(
                    gpu.stream(),
                    norm,
                    None,
                    q.view_mut(),
                    per_token,
                    NormRounding::F32,
                )
                .unwrap();
                kit::assert_bits(&gpu.download(&q), &want.q);
                kit::assert_bits(&gpu.download(if over_x { &x } else { &r }), &want.residual_out);
            }
        }
    }
}

#[test]
fn nothing_is_launched_for_no_rows() {
    for gpu in kit::devices() {
        gpu.stream().take_counters().unwrap();
        let c: RowCase<bf16> = RowCase::new(0, 64, Fill::Normal, 11, [(64, 0); 4]);
        run_fp8::<_, _, Fp8E4M3>(&gpu, &Inputs::new(&c, true), Mode::Token { smooth: false }, false);
        run_mxfp4(&gpu, &Inputs::new(&c, true), BlockScale::Even, ScaleLayout::Shuffled950, false);
        if let Some(counters) = gpu.stream().take_counters().unwrap() {
            assert_eq!(counters.workgroups, 0);
        }
    }
}

/// Granularity of the scales, as an option of a table.
#[derive(Clone, Copy)]
enum Scaling {
    Tensor,
    Token,
    Group,
}

/// The call of a table. All outputs but `q` and `scale` are optional, and so are the inputs that belong to them.
fn norm_rows<'a, T: CallElement + Float + Smooth<T>>(
    tensors: &mut Tensors<'a>,
    eps: f32,
) -> (NormRows<'a, T, T>, Option<SecondRows<'a, T, T>>) {
    let norm = NormRows {
        x: tensors.input("x"),
        weight: tensors.input("weight"),
        eps,
        residual: tensors.optional_input("residual_in").zip(tensors.optional_output("residual_out")),
        out: tensors.optional_output("out"),
    };
    let (x2, weight2, out2) =
        (tensors.optional_input("x2"), tensors.optional_input("weight2"), tensors.optional_output("out2"));
    let second = match (x2, weight2, out2) {
        (Some(x), Some(weight), Some(out)) => Some(SecondRows { x, weight, eps: EPS, out }),
        _ => None,
    };
    (norm, second)
}

/// The tensors of a norm of rows `[3, 64]`, and of further rows `[3, 32]`.
fn norm_tensors<'f, T: CallElement, O: Clone>(table: Refusals<'f, O>) -> Refusals<'f, O> {
    table
        .input::<T>("x", [3, 64])
        .input::<T>("weight", [64])
        .input::<T>("residual_in", [3, 64])
        .output::<T>("residual_out", [3, 64])
        .output::<T>("out", [3, 64])
        .input::<T>("x2", [3, 32])
        .input::<T>("weight2", [32])
        .output::<T>("out2", [3, 32])
}

fn fp8_table<'f, Q: CallElement + Quantized>() -> Refusals<'f, (f32, Scaling)> {
    let operator = |stream: &Stream, tensors: &mut Tensors, (eps, scaling)| {
        let (norm, second) = norm_rows::<bf16>(tensors, eps);
        let scale = match scaling {
            Scaling::Tensor => Fp8Scale::PerTensorStatic { scale: tensors.input("static_scale") },
            Scaling::Token => {
                let smooth = tensors.optional_input("smooth");
                Fp8Scale::PerToken { scale: tensors.output("scale"), smooth }
            }
            Scaling::Group => {
                Fp8Scale::Group { size: GroupSize::G32, scale: tensors.output("scale"), rule: rule(false) }
            }
        };
        let q = tensors.output::<Q>("q");
        hk_quant::fused_rmsnorm_fp8_quant(stream, norm, second, q, scale, NormRounding::F32)
    };
    norm_tensors::<bf16, _>(Refusals::new((EPS, Scaling::Token), operator))
        .input::<f32>("smooth", [64])
        .input::<f32>("static_scale", [1])
        .output::<Q>("q", [3, 64])
        .output::<f32>("scale", [3])
}

#[test]
fn errors_of_fp8() {
    let weight = "fused_rmsnorm_fp8_quant: weight: shape [5], expected [64] (columns of x)";
    let mut table = fp8_table::<Fp8E4M3>()
        .accepts(|_| {})
        .accepts(|call| ["residual_in", "x2", "smooth"].iter().for_each(|name| call.without(name)))
        .accepts(|call| call.options.1 = Scaling::Tensor)
        .accepts(|call| {
            call.options.1 = Scaling::Group;
            call.shape("scale", [3, 2]);
        })
        .refuses(kind!(Shape), &[weight], |call| call.shape("weight", [5]))
        .refuses(kind!(Shape), &["q", "[3, 32]", "[3, 64] (shape of x)"], |call| call.shape("q", [3, 32]))
        .refuses(kind!(Shape), &["scale", "[4]", "[3] (rows of x)"], |call| call.shape("scale", [4]))
        .refuses(kind!(Shape), &["scale", "[4]", "[1]"], |call| {
            call.options.1 = Scaling::Tensor;
            call.shape("static_scale", [4]);
        })
        .refuses(kind!(Shape), &["scale", "[3, 3]", "[3, 2]"], |call| {
            call.options.1 = Scaling::Group;
            call.shape("scale", [3, 3]);
        })
        .refuses(kind!(Shape), &["smooth", "[5]", "[64]"], |call| call.shape("smooth", [5]))
        .refuses(kind!(Shape), &["residual_in", "[3, 63]", "shape of x"], |call| {
            call.shape("residual_in", [3, 63])
        })
        .refuses(kind!(Shape), &["residual_out", "[2, 64]"], |call| call.shape("residual_out", [2, 64]))
        .refuses(kind!(Shape), &["out", "[2, 64]"], |call| call.shape("out", [2, 64]))
        .refuses(kind!(Shape), &["x2", "[2, 32]", "[3, 32] (rows of x)"], |call| call.shape("x2", [2, 32]))
        .refuses(kind!(Shape), &["weight2", "[5]", "[32] (columns of x2)"], |call| call.shape("weight2", [5]))
        .refuses(kind!(Shape), &["out2", "[3, 64]"], |call| call.shape("out2", [3, 64]))
        .refuses(kind!(Empty), &["x"], |call| {
            for name in ["x", "residual_in", "residual_out", "out", "q"] {
                call.shape(name, [3, 0]);
            }
            call.shape("weight", [0]);
        })
        .refuses(kind!(Stride), &["weight"], |call| call.strides("weight", [2]))
        .refuses(kind!(Overlap), &["x and out"], |call| call.overlap("x", "out", 0));
    for name in
        ["x", "weight", "residual_in", "residual_out", "out", "x2", "weight2", "out2", "smooth", "q", "scale"]
    {
        table = table.refuses(kind!(DeviceMismatch), &[name], |call| call.elsewhere(name));
    }
    for eps in [-1.0, f32::NAN, f32::INFINITY] {
        table = table.refuses(kind!(Argument), &["eps"], |call| call.options.0 = eps);
    }
    let _ = fp8_table::<i8>().accepts(|_| {}).refuses(kind!(DType), &["q", "i8"], |call| {
        call.options.1 = Scaling::Tensor;
    });
}

#[test]
fn errors_of_mxfp4() {
    let operator = |stream: &Stream, tensors: &mut Tensors, (layout, mode)| {
        let (norm, second) = norm_rows::<bf16>(tensors, EPS);
        let (q, scale) = (tensors.output("q"), tensors.output("scale"));
        let options = options(layout, mode, false);
        hk_quant::fused_rmsnorm_mxfp4_quant(stream, norm, second, q, scale, options)
    };
    norm_tensors::<bf16, _>(Refusals::new((ScaleLayout::RowMajor, BlockScale::Even), operator))
        .output::<Fp4x2>("q", [3, 32])
        .output::<E8M0>("scale", [3, 2])
        .accepts(|_| {})
        .refuses(kind!(Shape), &["x", "[3, 63]", "even"], |call| {
            for name in ["x", "residual_in", "residual_out", "out"] {
                call.shape(name, [3, 63]);
            }
            call.shape("weight", [63]);
        })
        .refuses(kind!(Shape), &["q", "[3, 64]", "[3, 32]"], |call| call.shape("q", [3, 64]))
        .refuses(kind!(Shape), &["scale", "[3, 3]", "[3, 2]"], |call| call.shape("scale", [3, 3]))
        .refuses(kind!(Shape), &["scale", "[3, 2]", "[2048]"], |call| {
            call.options.0 = ScaleLayout::Shuffled950;
        })
        .refuses(kind!(Argument), &["mode", "DivFloor"], |call| call.options.1 = BlockScale::DivFloor)
        .refuses_other_devices();
}

const INPUTS: [&str; 6] = ["x", "residual_in", "weight", "x2", "weight2", "smooth"];
const OUTPUTS: [&str; 4] = ["residual_out", "out", "out2", "scale"];

/// The result with output `o` in memory that it shares with input `i`, `ahead` elements behind its first. fp4 does not have the
/// last input and output.
fn run_overlapping(gpu: &Gpu, fp4: bool, [i, o]: [usize; 2], ahead: usize) -> Result<()> {
    const SHAPE: [usize; 2] = [1, 2];
    let inputs = [(); 6].map(|()| gpu.upload(&[1.0f32; 2], SHAPE));
    let mut outputs = [(); 4].map(|()| gpu.poisoned::<f32>(SHAPE));
    let mut shared = gpu.upload(&[1.0f32; 3], [1, 3]);
    let (mut q, mut pairs, mut exponent) =
        (gpu.poisoned::<Fp8E4M3>(SHAPE), gpu.poisoned::<Fp4x2>([1, 1]), gpu.poisoned::<E8M0>([1, 1]));

    let whole = shared.view_mut();
    let mut views = inputs.each_ref().map(Tensor::view);
    views[i] = whole.alias().slice(1, 0..2).unwrap();
    let mut views_mut = outputs.each_mut().map(Tensor::view_mut);
    views_mut[o] = whole.slice(1, ahead..ahead + 2).unwrap();

    let [x, residual_in, weight, x2, weight2, smooth] = views;
    let [residual_out, out, out2, scale] = views_mut;
    let [weight, weight2, smooth] = [weight, weight2, smooth].map(|t| t.flatten("", "").unwrap());
    let norm = NormRows { x, weight, eps: EPS, residual: Some((residual_in, residual_out)), out: Some(out) };
    let second = Some(SecondRows { x: x2, weight: weight2, eps: EPS, out: out2 });
    if fp4 {
        let (layout, mode) = (ScaleLayout::RowMajor, BlockScale::Even);
        let (q, scale) = (pairs.view_mut(), exponent.view_mut());
        return hk_quant::fused_rmsnorm_mxfp4_quant(
            gpu.stream(),
            norm,
            second,
            q,
            scale,
            options(layout, mode, false),
        );
    }
    let scale = scale.flatten("", "").unwrap().slice(0, 0..1).unwrap();
    let scale = Fp8Scale::PerToken { scale, smooth: Some(smooth) };
    hk_quant::fused_rmsnorm_fp8_quant(gpu.stream(), norm, second, q.view_mut(), scale, NormRounding::F32)
}

/// No output shares memory with an input, except `residual_out`, which may alias `x` or `residual_in` exactly. Outputs cannot
/// share memory with each other: their views are borrowed mutably.
#[test]
fn overlaps_are_refused() {
    let gpu = &kit::devices()[0];
    for fp4 in [false, true] {
        let last = usize::from(fp4);
        for (i, input) in INPUTS[..INPUTS.len() - last].iter().enumerate() {
            for (o, output) in OUTPUTS[..OUTPUTS.len() - last].iter().enumerate() {
                let names = format!("{input} and {output}");
                if o == 0 && i < 2 {
                    run_overlapping(gpu, fp4, [i, o], 0).unwrap();
                } else {
                    assert_error(run_overlapping(gpu, fp4, [i, o], 0), kind!(Overlap), &[&names]);
                }
                assert_error(run_overlapping(gpu, fp4, [i, o], 1), kind!(Overlap), &[&names]);
            }
        }
    }
}

#[test]
fn rows_that_are_too_long_are_refused() {
    let gpu = &kit::devices()[0];
    let stream = gpu.stream();
    let (long, short) = (gpu.upload::<f32>(&[], [0, 1 << 29]), gpu.upload::<f32>(&[], [0, 2]));
    let weight = gpu.upload(&[1.0f32; 2], [2]);
    let (mut q, mut scale) = (gpu.poisoned::<Fp8E4M3>([0, 2]), gpu.poisoned::<f32>([0]));
    let (mut pairs, mut exponents) = (gpu.poisoned::<Fp4x2>([0, 1]), gpu.poisoned::<E8M0>([0, 1]));
    let (layout, mode) = (ScaleLayout::RowMajor, BlockScale::Even);
    for (x, x2, name) in [(&long, &short, "x"), (&short, &long, "x2")] {
        let mut out2 = gpu.poisoned::<f32>([0, 2]);
        let message = format!("{name}: 536870912 columns");
        let norm = || NormRows { x: x.view(), weight: weight.view(), eps: EPS, residual: None, out: None };
        let second = SecondRows { x: x2.view(), weight: weight.view(), eps: EPS, out: out2.view_mut() };
        let per_token = Fp8Scale::PerToken { scale: scale.view_mut(), smooth: None };
        let result = hk_quant::fused_rmsnorm_fp8_quant(
            stream,
            norm(),
            Some(second),
            q.view_mut(),
            per_token,
            NormRounding::F32,
        );
        assert_error(result, kind!(TooLarge), &["fused_rmsnorm_fp8_quant", &message, "536870911"]);
        let second = SecondRows { x: x2.view(), weight: weight.view(), eps: EPS, out: out2.view_mut() };
        let (q, scale) = (pairs.view_mut(), exponents.view_mut());
        let result = hk_quant::fused_rmsnorm_mxfp4_quant(
            stream,
            norm(),
            Some(second),
            q,
            scale,
            options(layout, mode, false),
        );
        assert_error(result, kind!(TooLarge), &["fused_rmsnorm_mxfp4_quant", &message, "536870911"]);
    }
}
