//! GEMMs with a fused multiply-add, with two outputs, grouped GEMMs, and the order of shuffled weights.

use crate::mixed::{By, Case, Inputs, Memory, SUM, config, devices, normal};
use hk_core::{
    Element, Float, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz, Layout, Result, Stream, TensorView, TensorViewMut, bf16, f16,
};
use hk_gemm::{
    Addend, BlockShape, FloatView, FuseType, FusedBlockInputs, FusedMxInputs, GemmConfig, GemmOptions,
    GemmScales, GemmTile, GemmWeight, MulAdd, SplitCatOutputs, deepgemm_contiguous, deepgemm_contiguous_a8w8,
    deepgemm_masked, deepgemm_masked_a8w8, fused_gemm_a8w8_blockscale_mul_add,
    fused_gemm_a8w8_blockscale_split_cat, fused_gemm_afp4wfp4_mul_add, fused_gemm_afp4wfp4_split_cat,
    shuffle_weight, shuffle_weight_host, unshuffle_weight, unshuffle_weight_host,
};
use hk_testkit::{self as kit, Gpu, HostTensorF64, Place, Tensor};

hk_testkit::corners_of!(hk_gemm::OPERATORS: fused_gemm_a8w8_blockscale_mul_add, fused_gemm_a8w8_blockscale_split_cat, fused_gemm_afp4wfp4_mul_add, fused_gemm_afp4wfp4_split_cat, deepgemm_masked, deepgemm_masked_a8w8, deepgemm_contiguous, deepgemm_contiguous_a8w8, shuffle_weight, unshuffle_weight);

/// GEMMs that have fused forms.
trait Fused: By<Self> {
    #[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
    fn mul_add<Y: Float>(
        stream: &Stream,
        of: &Inputs<Self, Self>,
        a: Addend,
        b: Addend,
        fuse: FuseType,
        y: TensorViewMut<Y>,
        workspace: TensorViewMut<f32>,
        options: GemmOptions,
    ) -> Result<()>;
    fn split_cat<Y: Float>(
        stream: &Stream,
        of: &Inputs<Self, Self>,
        y: FloatView,
        c1: TensorViewMut<Y>,
        c2: TensorViewMut<Y>,
        workspace: TensorViewMut<f32>,
        options: GemmOptions,
    ) -> Result<()>;
}

macro_rules! fused {
    ($($t:ident: $mul_add:ident, $split_cat:ident, $inputs:ident, $x:ident, $w:ident $(, $group:ident)?;)+) => {$(
        impl Fused for $t {
            fn mul_add<Y: Float>(
                stream: &Stream,
                of: &Inputs<Self, Self>,
                a: Addend,
                b: Addend,
                fuse: FuseType,
                y: TensorViewMut<Y>,
                workspace: TensorViewMut<f32>,
                options: GemmOptions,
            ) -> Result<()> {
                let (x, w, x_scale, w_scale) = (of.x.view(), of.weight(), of.$x(), of.$w());
                $(let $group = BlockShape::default();)?
                let inputs = $inputs { x, w, x_scale, w_scale $(, $group)? };
                $mul_add(stream, inputs, MulAdd { a, b, fuse }, y, Some(workspace), options)
            }
            fn split_cat<Y: Float>(
                stream: &Stream,
                of: &Inputs<Self, Self>,
                y: FloatView,
                c1: TensorViewMut<Y>,
                c2: TensorViewMut<Y>,
                workspace: TensorViewMut<f32>,
                options: GemmOptions,
            ) -> Result<()> {
                let (x, w, x_scale, w_scale) = (of.x.view(), of.weight(), of.$x(), of.$w());
                $(let $group = BlockShape::default();)?
                let inputs = $inputs { x, w, x_scale, w_scale $(, $group)? };
                $split_cat(stream, inputs, y, SplitCatOutputs { c1, c2 }, Some(workspace), options)
            }
        }
    )+};
}
fused! {
    i8: fused_gemm_a8w8_blockscale_mul_add, fused_gemm_a8w8_blockscale_split_cat, FusedBlockInputs, x_f32, w_f32, group;
    Fp8E4M3: fused_gemm_a8w8_blockscale_mul_add, fused_gemm_a8w8_blockscale_split_cat, FusedBlockInputs, x_f32, w_f32, group;
    Fp8E4M3Fnuz: fused_gemm_a8w8_blockscale_mul_add, fused_gemm_a8w8_blockscale_split_cat, FusedBlockInputs, x_f32, w_f32, group;
    Fp4x2: fused_gemm_afp4wfp4_mul_add, fused_gemm_afp4wfp4_split_cat, FusedMxInputs, x_mx, w_mx;
}

const FUSES: [FuseType; 2] = [FuseType::ScaleAdd, FuseType::AddProduct];

/// A term of an element type: on the device, with `pad` between rows, or one number.
enum Term {
    Value(f32),
    Bf16(Tensor<bf16>),
    F16(Tensor<f16>),
    F32(Tensor<f32>),
}

impl Term {
    /// Kind `i` of all, and its values.
    fn new(gpu: &Gpu, i: usize, [m, n]: [usize; 2], pad: usize, seed: u64) -> (Self, Vec<f64>) {
        let one = i % 7 < 4;
        let values = normal(if one { 1 } else { m * n }, seed);
        fn tensor<T: Float>(
            gpu: &Gpu,
            values: &[f32],
            [m, n]: [usize; 2],
            pad: usize,
        ) -> (Tensor<T>, Vec<f64>) {
            let values = kit::floats::<T>(values);
            let place = if values.len() == 1 { Place::contiguous([1]) } else { Place::rows([m, n], n + pad) };
            (gpu.upload(&values, place), kit::widen(&values))
        }
        match i % 7 {
            0 => (Self::Value(values[0]), kit::widen(&values)),
            1 | 4 => {
                let (term, values) = tensor(gpu, &values, [m, n], pad);
                (Self::Bf16(term), values)
            }
            2 | 5 => {
                let (term, values) = tensor(gpu, &values, [m, n], pad);
                (Self::F16(term), values)
            }
            _ => {
                let (term, values) = tensor(gpu, &values, [m, n], pad);
                (Self::F32(term), values)
            }
        }
    }
    fn addend(&self) -> Addend<'_> {
        match self {
            Self::Value(value) => (*value).into(),
            Self::Bf16(term) => term.view().into(),
            Self::F16(term) => term.view().into(),
            Self::F32(term) => term.view().into(),
        }
    }
}

fn options(config: Option<GemmConfig>) -> GemmOptions {
    GemmOptions { config, ..GemmOptions::default() }
}

/// What the largest tiles and the smallest have, K whole and in parts.
const CONFIGS: [Option<GemmConfig>; 6] = {
    const fn of(tile: GemmTile, splits: usize) -> Option<GemmConfig> {
        Some(GemmConfig { tile, splits, group: 3 })
    }
    [
        None,
        of(GemmTile::T256x128, 1),
        of(GemmTile::T64x64, 2),
        of(GemmTile::S16x32, 1),
        of(GemmTile::S32x32, 3),
        of(GemmTile::Elements, 2),
    ]
};

fn mul_add<T: Fused>() {
    let [m, n, k] = [21, 44, 416];
    let case = Case::<T, T>::new(None, [m, n, k], false, 1);
    let sums = case.sums();
    for gpu in devices::<T, T>() {
        let of = case.upload(&gpu);
        let mut workspace = gpu.poisoned::<f32>([case.room(&gpu, None)]);
        for (c, config) in CONFIGS.into_iter().enumerate() {
            // The largest tiles are the slowest to emulate.
            let large = config.is_some_and(|config| config.tile.shape().0 > 64);
            for i in 0..if large { 2 } else { 7 } {
                let fuse = FUSES[(i + c) % 2];
                let pads = [4 * (c % 2), 3 * (i % 2)];
                let (a, of_a) = Term::new(&gpu, i, [m, n], pads[0], 2);
                let (b, of_b) = Term::new(&gpu, 3 * i + c, [m, n], pads[1], 3);
                let want = sums.clone().with_terms(fuse, &of_a, &of_b);
                let want = HostTensorF64::new(vec![m, n], want.values).with_magnitudes(want.magnitudes);
                let mut y = gpu.poisoned::<bf16>(Place::rows([m, n], n + pads[1]).shifted(pads[0]));
                let (space, to) = (workspace.view_mut(), y.view_mut());
                T::mul_add(gpu.stream(), &of, a.addend(), b.addend(), fuse, to, space, options(config))
                    .unwrap();
                let mut got = gpu.download(&y);
                got.label = format!("{} {fuse:?} {i} {config:?}: {}", T::DTYPE, got.label);
                kit::assert_near(&got, &want, SUM);
                gpu.assert_guards(&y);
            }
            // Without an effect it is the GEMM.
            let want = case.run::<f32>(&gpu, config);
            for (fuse, a, b) in [(FUSES[0], 1.0, 0.0), (FUSES[1], 0.0, 5.0), (FUSES[1], 5.0, 0.0)] {
                let mut y = gpu.poisoned::<f32>([m, n]);
                let (space, to) = (workspace.view_mut(), y.view_mut());
                T::mul_add(gpu.stream(), &of, a.into(), b.into(), fuse, to, space, options(config)).unwrap();
                kit::assert_bits(&gpu.download(&y), &want);
            }
        }
        gpu.assert_guards(&workspace);
    }
}

fn split_cat<T: Fused>() {
    let [m, k] = [19, 416];
    // D, S1, S2, S3.
    let sizes = [
        [3, 16, 8, 8],
        [5, 8, 8, 32],
        [2, 0, 24, 8],
        [4, 8, 0, 16],
        [3, 5, 9, 4],
        [1, 48, 16, 0],
        [7, 1, 4, 13],
    ];
    for (i, [d, s1, s2, s3]) in sizes.into_iter().enumerate() {
        let n = d * (s1 + s2);
        let case = Case::<T, T>::new(None, [m, n, k], false, i as u64);
        for gpu in devices::<T, T>() {
            let of = case.upload(&gpu);
            let mut workspace = gpu.poisoned::<f32>([case.room(&gpu, None)]);
            for (c, config) in CONFIGS.into_iter().enumerate().filter(|(c, _)| *c != 1 || i % 4 == 0) {
                let (shared, pad) = ((i + c) % 2 == 0, [0, 8, 3][(i + c) % 3]);
                let cat = kit::floats::<f16>(&normal(m * if shared { 1 } else { d } * s3, 5));
                let row = s3 + pad;
                let at = |i: usize, j: usize, s: usize| cat[if shared { i } else { i * d + j } * s3 + s];
                let rows = if shared { [m, s3] } else { [m * d, s3] };
                let uploaded = gpu.upload(&cat, Place::rows(rows, row));
                let y = if shared {
                    // Of each row the same for all D.
                    uploaded.view().split_axis(0, 1).unwrap().broadcast([m, d, s3]).unwrap()
                } else {
                    uploaded.view().split_axis(0, d).unwrap()
                };
                let mut c1 = gpu.poisoned::<f32>(Place::rows([m, d, s1 + s3], s1 + s3 + pad));
                let mut c2 = gpu.poisoned::<f32>(Place::rows([m, d, s2], s2 + 2 * pad));
                let (to, rest, space) = (c1.view_mut(), c2.view_mut(), workspace.view_mut());
                T::split_cat(gpu.stream(), &of, y.into(), to, rest, space, options(config))
                    .unwrap_or_else(|e| panic!("{d} {s1} {s2} {s3} {config:?}: {e}"));
                let product = case.run::<f32>(&gpu, config);
                let (mut want1, mut want2) = (vec![], vec![]);
                for (i, j) in (0..m).flat_map(|i| (0..d).map(move |j| (i, j))) {
                    let row = &product[i * n + j * (s1 + s2)..][..s1 + s2];
                    want1.extend_from_slice(&row[..s1]);
                    want1.extend((0..s3).map(|s| at(i, j, s).to_f32()));
                    want2.extend_from_slice(&row[s1..]);
                }
                for (tensor, want) in [(&c1, &want1), (&c2, &want2)] {
                    let mut got = gpu.download(tensor);
                    got.label = format!(
                        "{} {d} {s1} {s2} {s3}, {config:?}, {shared}, {pad}: {}",
                        T::DTYPE,
                        got.label
                    );
                    kit::assert_bits(&got, want);
                    gpu.assert_guards(tensor);
                }
            }
            let want = case.reference();
            case.check::<f32>(&gpu, None, &want);
        }
    }
}

/// Types of GEMMs in groups.
trait Grouped: By<Self> {
    const SCALED: bool;
    fn masked(
        stream: &Stream,
        x: TensorView<Self>,
        w: GemmWeight<Self>,
        scales: GemmScales,
        list: TensorView<i32>,
        y: TensorViewMut<bf16>,
        options: GemmOptions,
    ) -> Result<()>;
    fn contiguous(
        stream: &Stream,
        x: TensorView<Self>,
        w: GemmWeight<Self>,
        scales: GemmScales,
        list: TensorView<i32>,
        y: TensorViewMut<bf16>,
        options: GemmOptions,
    ) -> Result<()>;
}

macro_rules! grouped {
    ($($t:ident: $scaled:literal, $masked:ident, $contiguous:ident $(, $scales:ident)?;)+) => {$(
        impl Grouped for $t {
            const SCALED: bool = $scaled;
            fn masked(
                stream: &Stream,
                x: TensorView<Self>,
                w: GemmWeight<Self>,
                _scales: GemmScales,
                list: TensorView<i32>,
                y: TensorViewMut<bf16>,
                options: GemmOptions,
            ) -> Result<()> {
                $(let $scales = _scales;)?
                $masked(stream, x, w, $($scales,)? list, y, options)
            }
            fn contiguous(
                stream: &Stream,
                x: TensorView<Self>,
                w: GemmWeight<Self>,
                _scales: GemmScales,
                list: TensorView<i32>,
                y: TensorViewMut<bf16>,
                options: GemmOptions,
            ) -> Result<()> {
                $(let $scales = _scales;)?
                $contiguous(stream, x, w, $($scales,)? list, y, options)
            }
        }
    )+};
}
grouped! {
    bf16: false, deepgemm_masked, deepgemm_contiguous;
    f16: false, deepgemm_masked, deepgemm_contiguous;
    i8: true, deepgemm_masked_a8w8, deepgemm_contiguous_a8w8, scales;
    Fp8E4M3: true, deepgemm_masked_a8w8, deepgemm_contiguous_a8w8, scales;
    Fp8E4M3Fnuz: true, deepgemm_masked_a8w8, deepgemm_contiguous_a8w8, scales;
}

/// What rows without outputs had before.
fn before(len: usize) -> Vec<bf16> {
    (0..len).map(|i| bf16::from_f32((i % 200) as f32)).collect()
}

/// Tiles of groups: with scales of rows, or of blocks.
fn group_tiles(blocks: bool, rows: usize) -> Vec<Option<GemmTile>> {
    use GemmTile::*;
    let all = GemmTile::ALL;
    let fits = |tile: &GemmTile| {
        let whole = rows == usize::MAX || rows.is_multiple_of(tile.shape().0);
        let served = match tile {
            T160x256 | T96x256 => false,
            T256x256 | T128x256 | S16x16Twice => !blocks,
            T256x128 | T96x128 => blocks,
            _ => true,
        };
        whole && served
    };
    all.into_iter().filter(fits).map(Some).chain([None]).collect()
}

/// A GEMM of groups: each of `rows` rows.
struct Groups<T: Grouped> {
    case: Case<T, T>,
    groups: usize,
    blocks: bool,
    want: HostTensorF64,
}

impl<T: Grouped> Groups<T> {
    fn new([groups, rows, n, k]: [usize; 4], blocks: bool, memory: Memory) -> Self {
        let mut case = Case::<T, T>::new(Some(groups), [rows, n, k], false, 20).lies(memory);
        if blocks {
            let columns = k.div_ceil(128);
            let scales =
                |len, seed| normal(len, seed).into_iter().map(|x| 0.01 + 0.1 * x.abs()).collect::<Vec<_>>();
            case.x_scale = scales(groups * rows * columns, 21);
            case.w_scale = scales(groups * n.div_ceil(128) * columns, 22);
        }
        let mut all = Self { case, groups, blocks, want: HostTensorF64::new([0], vec![]) };
        all.want = all.reference();
        all
    }

    fn reference(&self) -> HostTensorF64 {
        let Self { case, groups, .. } = self;
        let groups = *groups;
        let sums = if self.blocks {
            let (mut values, mut magnitudes) = (vec![], vec![]);
            for g in 0..groups {
                fn part<E: Clone>(x: &[E], g: usize, groups: usize) -> Vec<E> {
                    let each = x.len() / groups;
                    x[g * each..][..each].to_vec()
                }
                let alone = Case {
                    batch: None,
                    group: Some(BlockShape::default()),
                    x: part(&case.x, g, groups),
                    w: part(&case.w, g, groups),
                    x_scale: part(&case.x_scale, g, groups),
                    w_scale: part(&case.w_scale, g, groups),
                    ..case.clone()
                };
                let sums = alone.sums();
                values.extend(sums.values);
                magnitudes.extend(sums.magnitudes);
            }
            hk_gemm::reference::Sums { values, magnitudes }
        } else {
            case.sums()
        };
        HostTensorF64::new(case.shape(), sums.values).with_magnitudes(sums.magnitudes)
    }

    /// Whether row `row` of all has outputs: the others still are what they were.
    #[track_caller]
    fn assert(&self, gpu: &Gpu, label: &str, y: &Tensor<bf16>, has: impl Fn(usize) -> bool) {
        let mut got = gpu.download(y);
        gpu.assert_guards(y);
        let n = self.case.n;
        let mut want = self.want.clone();
        for (i, before) in before(got.len()).into_iter().enumerate().filter(|(i, _)| !has(i / n)) {
            assert_eq!(got[i].to_bits(), before.to_bits(), "{label}: row {} is written to", i / n);
            (want.values[i], want.magnitudes[i]) = (before.to_f64(), 0.0);
        }
        want.shape = got.shape.clone();
        got.label = format!("{} {label}: {}", T::DTYPE, got.label);
        kit::assert_near(&got, &want, SUM);
    }

    fn scales<'a>(&self, a: &'a Tensor<f32>, w: &'a Tensor<f32>) -> GemmScales<'a> {
        let (a, w) = (a.view(), w.view());
        if self.blocks {
            GemmScales::Blocks { a, w, group: BlockShape::default() }
        } else {
            GemmScales::Rows { a, w }
        }
    }
}

fn masked<T: Grouped>() {
    let [groups, rows, n, k] = [8, 66, 40, 160];
    let lists =
        [[-3, 0, 1, 66, 67, i32::MAX, i32::MIN, 16], [17, 33, 64, 65, 5, 66, 32, 31], [0; 8], [66; 8]];
    for blocks in [false, true].into_iter().filter(|&blocks| !blocks || T::SCALED) {
        let sixteen = 16 / size_of::<T>();
        let memory = Memory { x: [sixteen, sixteen], y: [3, 1], rows: 1, ..Memory::default() };
        for memory in [Memory::default(), memory] {
            let all = Groups::<T>::new([groups, rows, n, k], blocks, memory);
            for gpu in devices::<T, T>() {
                let of = all.unscaled(memory).upload(&gpu);
                let x_scale = all.upload_scale(&gpu, &all.case.x_scale, rows, 1);
                let w_scale = all.upload_scale(&gpu, &all.case.w_scale, n, 128);
                for tile in group_tiles(blocks, 256) {
                    // The largest tiles are the slowest to emulate.
                    let lists =
                        if tile.is_some_and(|tile| tile.shape().0 > 64) { &lists[..1] } else { &lists[..] };
                    for list in lists {
                        let device = gpu.upload(list, [groups]);
                        let place = all.case.place([rows, n], memory.y, false);
                        let mut y = gpu.upload(&before(groups * rows * n), place);
                        let config = tile.and_then(|tile| config(tile, 1));
                        let (scales, to) = (all.scales(&x_scale, &w_scale), y.view_mut());
                        T::masked(
                            gpu.stream(),
                            of.x.view(),
                            of.weight(),
                            scales,
                            device.view(),
                            to,
                            options(config),
                        )
                        .unwrap();
                        let label = format!("{tile:?} {list:?} {blocks} {memory:?}");
                        all.assert(&gpu, &label, &y, |row| {
                            ((row % rows) as i64) < i64::from(list[row / rows])
                        });
                        // All rows: the bits of the batched GEMM.
                        if !blocks && list == &[66; 8] {
                            kit::assert_bits(&gpu.download(&y), &all.case.run::<bf16>(&gpu, config));
                        }
                    }
                }
            }
        }
    }
}

impl<T: Grouped> Groups<T> {
    /// The operands alone.
    fn unscaled(&self, memory: Memory) -> Case<T, T> {
        Case { x_scale: vec![], w_scale: vec![], memory, ..self.case.clone() }
    }

    fn upload_scale(&self, gpu: &Gpu, scale: &[f32], rows: usize, of: usize) -> Tensor<f32> {
        match (scale.is_empty(), self.blocks) {
            (true, _) => gpu.upload(&[f32::NAN], [1]),
            (_, false) => gpu.upload(scale, [self.groups, rows]),
            (_, true) => gpu.upload(scale, [self.groups, rows.div_ceil(of), self.case.k.div_ceil(128)]),
        }
    }
}

/// Runs of 128 rows: the groups' matrices in another order, rows without outputs at the ends of runs and in them, whole runs
/// without any.
fn contiguous<T: Grouped>() {
    let [groups, n, k] = [3, 40, 160];
    let order = [2, 0, 2, -1, 1];
    let m = order.len() * 128 - 57;
    let list: Vec<i32> = (0..m)
        .map(|i| match i % 128 {
            _ if order[i / 128] < 0 => [-1, 3, i32::MIN, i32::MAX][i % 4],
            20 | 33 => -1,
            50 => 3,
            51 => i32::MAX,
            j if j >= 100 && i < 256 => [-1, -7][j % 2],
            _ => order[i / 128],
        })
        .collect();
    for blocks in [false, true].into_iter().filter(|&blocks| !blocks || T::SCALED) {
        for shuffled in [false, true] {
            // As batches of 128 rows, each with its matrix.
            let n = if shuffled { 48 } else { n };
            let all = Groups::<T>::new([groups, 1, n, k], blocks, Memory::default());
            let w_memory = Memory { w_shuffled: shuffled.then_some(32), ..Memory::default() };
            let runs = Groups::<T>::new([order.len(), 128, n, k], blocks, Memory::default());
            let each = all.case.w.len() / groups;
            let of_scale = all.case.w_scale.len() / groups;
            let mut of_runs = runs.case.clone();
            for (run, &g) in order.iter().enumerate() {
                let g = g.max(0) as usize;
                of_runs.w[run * each..][..each].copy_from_slice(&all.case.w[g * each..][..each]);
                let scales = &all.case.w_scale[g * of_scale..][..of_scale];
                of_runs.w_scale[run * of_scale..][..of_scale].copy_from_slice(scales);
            }
            let mut runs = Groups { case: of_runs, ..runs };
            runs.want = runs.reference();
            runs.want.values.truncate(m * n);
            runs.want.magnitudes.truncate(m * n);
            let columns = k.div_ceil(128);
            for gpu in devices::<T, T>() {
                let of = all.unscaled(w_memory).upload(&gpu);
                let x = gpu.upload(&runs.case.x[..m * k], [m, k]);
                let x_scale = match (T::SCALED, blocks) {
                    (false, _) => gpu.upload(&[f32::NAN], [1]),
                    (_, false) => gpu.upload(&runs.case.x_scale[..m], [m]),
                    (_, true) => gpu.upload(&runs.case.x_scale[..m * columns], [m, columns]),
                };
                let w_scale = all.upload_scale(&gpu, &all.case.w_scale, n, 128);
                let device = gpu.upload(&list, [m]);
                for tile in group_tiles(blocks, 128) {
                    let mut y = gpu.upload(&before(m * n), Place::rows([m, n], n + 5));
                    let config = tile.and_then(|tile| config(tile, 1));
                    let (scales, to) = (all.scales(&x_scale, &w_scale), y.view_mut());
                    T::contiguous(
                        gpu.stream(),
                        x.view(),
                        of.weight(),
                        scales,
                        device.view(),
                        to,
                        options(config),
                    )
                    .unwrap();
                    let label = format!("{tile:?} {blocks} {shuffled}");
                    runs.assert(&gpu, &label, &y, |row| (0..groups as i32).contains(&list[row]));
                }
            }
        }
    }
}

/// A test for each type.
macro_rules! for_each {
    ($name:ident: $($test:ident: $($t:ident),+;)+) => {
        mod $name {
            use super::*;
            $(#[test]
            fn $test() {
                $(super::$name::<$t>();)+
            })+
        }
    };
}
for_each!(mul_add: int8: i8; fp8: Fp8E4M3Fnuz, Fp8E4M3; fp4: Fp4x2;);
for_each!(split_cat: int8: i8; fp8: Fp8E4M3Fnuz, Fp8E4M3; fp4: Fp4x2;);
for_each!(masked: halves: bf16, f16; int8: i8; fp8: Fp8E4M3Fnuz, Fp8E4M3;);
for_each!(contiguous: halves: bf16, f16; int8: i8; fp8: Fp8E4M3Fnuz, Fp8E4M3;);

/// Elements that all differ as far as their bytes can.
fn distinct<T: Element>(len: usize) -> Vec<T> {
    let bytes: Vec<u8> = (0..len * size_of::<T>()).map(|i| (i * 167 + i / 251 * 13) as u8).collect();
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

/// Shuffled on the device and the host alike; back again; with rows that are longer, on 16 bytes and not.
fn order<T: Element>() {
    let bits = |x: &[T]| bytemuck::cast_slice::<T, u8>(x).to_vec();
    for (batch, rows, k, longer) in
        [(1, 16, 32, 32), (3, 48, 96, 96), (2, 32, 64, 128), (2, 16, 40, 64), (1, 80, 33, 96)]
    {
        let plain = distinct::<T>(batch * rows * k);
        let zero = T::zeroed();
        let padded: Vec<T> =
            plain.chunks(k).flat_map(|row| [row, &vec![zero; longer - k]].concat()).collect();
        let want = shuffle_weight_host(&padded, [batch * rows, longer]);
        let back = unshuffle_weight_host(&want, [batch * rows, longer]);
        assert!(bits(&back) == bits(&padded));
        // The formula of the layout.
        let chunk = 16 / size_of::<T>();
        for (i, &element) in padded.iter().enumerate() {
            let (n, k) = (i / longer, i % longer);
            let at = n / 16 * 16 * longer + k / chunk * 16 * chunk + n % 16 * chunk + k % chunk;
            assert!(bits(&[want[at]]) == bits(&[element]));
        }
        for gpu in kit::devices() {
            for [pad, shift] in [[0, 0], [chunk, chunk], [1, 3]] {
                let stride = k + pad;
                let place = |lead: bool| {
                    let layout = if lead {
                        Layout::with_strides([batch, rows, k], [stride * (rows + 2), stride, 1])
                    } else {
                        Layout::with_strides([rows, k], [stride, 1])
                    };
                    Place::new(layout.unwrap()).shifted(shift)
                };
                let shape = [batch, rows, longer];
                let shape = if batch > 1 { &shape[..] } else { &shape[1..] };
                let from = gpu.upload(&plain, place(batch > 1));
                let mut shuffled = gpu.poisoned::<T>(Place::contiguous(shape));
                shuffle_weight(gpu.stream(), from.view(), shuffled.view_mut()).unwrap();
                kit::assert_bits(&gpu.download(&shuffled), &want);
                gpu.assert_guards(&shuffled);
                let mut to = gpu.poisoned::<T>(place(batch > 1));
                unshuffle_weight(gpu.stream(), shuffled.view(), to.view_mut()).unwrap();
                kit::assert_bits(&gpu.download(&to), &plain);
                gpu.assert_guards(&to);
            }
        }
    }
}

#[test]
fn the_order_of_shuffled_weights() {
    order::<i8>();
    order::<Fp4x2>();
    order::<bf16>();
    order::<f32>();
}
