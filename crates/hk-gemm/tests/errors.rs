//! Every error of the safe functions, with its message; nothing is launched.

use hk_core::{
    DeviceBuffer, E8M0, Element, Error, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz, Layout, Result, Stream, TensorView,
    TensorViewMut, bf16,
};
use hk_gemm::{
    A8WFp4Inputs, A16W8Inputs, A16WFp4Inputs, Accumulate, Activation, BlockScaledInputs, BlockShape,
    FloatView, FuseType, FusedBlockInputs, FusedMxInputs, GemmConfig, GemmOptions, GemmScales, GemmTile,
    GemmWeight, Int8OrFp8, MulAdd, MxInputs, MxScaleView, Prequant, PtgqInputs, ScaledInputs,
    SplitCatOutputs, batched_gemm_a8w8, batched_gemm_a8w8_ptgq, batched_gemm_a16wfp4, batched_gemm_afp4wfp4,
    batched_gemm_bf16, deepgemm_contiguous, deepgemm_contiguous_a8w8, deepgemm_masked, deepgemm_masked_a8w8,
    fused_gemm_a8w8_blockscale_mul_add, fused_gemm_a8w8_blockscale_split_cat, fused_gemm_afp4wfp4_mul_add,
    fused_gemm_afp4wfp4_split_cat, gemm_a8w8, gemm_a8w8_blockscale, gemm_a8w8_per_token_scale, gemm_a8wfp4,
    gemm_a16w8_blockscale, gemm_a16w16, gemm_a16w16_atomic, gemm_a16w16_gated, gemm_a16wfp4,
    gemm_a16wfp4_atomic, gemm_afp4wfp4, gemm_afp8wfp8, shuffle_weight, unshuffle_weight,
};
use hk_testkit::{Gpu, assert_error, kind};

/// A stream, and zeros of each type.
struct Bench {
    stream: Stream,
    halves: DeviceBuffer<bf16>,
    codes: DeviceBuffer<i8>,
    floats: DeviceBuffer<f32>,
    y: DeviceBuffer<bf16>,
    sums: DeviceBuffer<f32>,
}

const M: usize = 4;
const N: usize = 6;
const K: usize = 32;

fn view<'a, T: Element>(
    buffer: &'a DeviceBuffer<T>,
    shape: &[usize],
    strides: &[usize],
    offset: usize,
) -> TensorView<'a, T> {
    buffer.view_with(Layout::with_strides(shape, strides).unwrap(), offset).unwrap()
}

/// A contiguous tensor in the first elements of a buffer.
trait Part<T: Element> {
    fn part(&self, shape: impl AsRef<[usize]>) -> Result<TensorView<'_, T>>;
    fn part_mut(&mut self, shape: impl AsRef<[usize]>) -> Result<TensorViewMut<'_, T>>;
}

impl<T: Element> Part<T> for DeviceBuffer<T> {
    fn part(&self, shape: impl AsRef<[usize]>) -> Result<TensorView<'_, T>> {
        self.view_with(Layout::contiguous(shape)?, 0)
    }
    fn part_mut(&mut self, shape: impl AsRef<[usize]>) -> Result<TensorViewMut<'_, T>> {
        self.view_mut_with(Layout::contiguous(shape)?, 0)
    }
}

impl Bench {
    fn new() -> Self {
        // A device that no other test of this program opens: they launch kernels.
        let stream = Gpu::open("emu:gfx942?threads=3").stream().clone();
        Self {
            halves: stream.alloc_zeroed(4096).unwrap(),
            codes: stream.alloc_zeroed(4096).unwrap(),
            floats: stream.alloc_zeroed(4096).unwrap(),
            y: stream.alloc_zeroed(4096).unwrap(),
            sums: stream.alloc_zeroed(4096).unwrap(),
            stream,
        }
    }

    fn half(&self, shape: &[usize]) -> TensorView<'_, bf16> {
        self.halves.part(shape).unwrap()
    }
    fn code(&self, shape: &[usize]) -> TensorView<'_, i8> {
        self.codes.part(shape).unwrap()
    }
    fn float(&self, shape: &[usize]) -> TensorView<'_, f32> {
        self.floats.part(shape).unwrap()
    }

    /// `gemm_a16w16` of `a` and `w`, all else right.
    fn half_gemm(&mut self, a: (&[usize], &[usize], usize), w: (&[usize], &[usize], usize)) -> Result<()> {
        let a = view(&self.halves, a.0, a.1, a.2);
        let w = view(&self.halves, w.0, w.1, w.2);
        let y = self.y.part_mut([M, N])?;
        gemm_a16w16(&self.stream, a, w, None, y, None, GemmOptions::default())
    }

    /// `gemm_a16w16` with these shapes of `y` and the bias, and these options.
    fn half_options(
        &mut self,
        y: &[usize],
        bias: &[usize],
        workspace: usize,
        options: GemmOptions,
    ) -> Result<()> {
        let (a, w) = (self.halves.part([M, K])?, self.halves.part([N, K])?);
        let bias = FloatView::F32(self.floats.part(bias)?);
        let space = Some(self.sums.part_mut([workspace])?);
        gemm_a16w16(&self.stream, a, w, Some(bias), self.y.part_mut(y)?, space, options)
    }

    /// `gemm_a8w8_blockscale` with these shapes of scales and groups.
    fn block_gemm(&mut self, a_scale: &[usize], w_scale: &[usize], group: BlockShape) -> Result<()> {
        let (a, w) = (self.codes.part([M, 160])?, self.codes.part([N, 160])?);
        let (a_scale, w_scale) = (self.floats.part(a_scale)?, self.floats.part(w_scale)?);
        let y = self.y.part_mut([M, N])?;
        let options = GemmOptions::default();
        gemm_a8w8_blockscale(
            &self.stream,
            BlockScaledInputs { a, w: w.into(), a_scale, w_scale, group },
            None,
            y,
            None,
            options,
        )
    }

    /// `gemm_a8w8` with these shapes of scales.
    fn quantized_gemm(&mut self, a_scale: &[usize], w_scale: &[usize]) -> Result<()> {
        let (a, w) = (self.codes.part([M, K])?, self.codes.part([N, K])?);
        let (a_scale, w_scale) = (self.floats.part(a_scale)?, self.floats.part(w_scale)?);
        let y = self.y.part_mut([M, N])?;
        gemm_a8w8(
            &self.stream,
            ScaledInputs { a, w: w.into(), a_scale, w_scale },
            None,
            y,
            None,
            GemmOptions::default(),
        )
    }
}

impl Drop for Bench {
    /// What was refused has launched nothing.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert!(self.stream.device().loaded_kernels().is_empty());
        }
    }
}

const A: (&[usize], &[usize], usize) = (&[M, K], &[K, 1], 0);
const W: (&[usize], &[usize], usize) = (&[N, K], &[K, 1], 0);

#[test]
fn shapes_of_operands() {
    let mut b = Bench::new();
    assert_error(b.half_gemm((&[K], &[1], 0), W), kind!(Shape), &["gemm_a16w16: a", "[32]"]);
    let rank3: (&[usize], &[usize], usize) = (&[1, N, K], &[N * K, K, 1], 0);
    assert_error(b.half_gemm(A, rank3), kind!(Shape), &["gemm_a16w16: w", "[1, 6, 32]", "[rows, cols]"]);
    let short: (&[usize], &[usize], usize) = (&[N, K - 1], &[K, 1], 0);
    assert_error(b.half_gemm(A, short), kind!(Shape), &["w", "[6, 31]", "[N, 32] (K of a)"]);
    let (a, w, y) = (b.half(&[2, M, K]), b.half(&[3, N, K]), b.stream.alloc_zeroed::<f32>(100).unwrap());
    let mut y = y;
    let options = GemmOptions::default();
    let r = batched_gemm_bf16(&b.stream, a, w, None, y.part_mut([2, M, N]).unwrap(), None, options);
    assert_error(r, kind!(Shape), &["batched_gemm_bf16: w", "[3, 6, 32]", "[2, N, 32] (batch and K of a)"]);
    let (a, w) = (b.half(&[M, K]), b.half(&[5, K]));
    let r = gemm_a16w16_gated(&b.stream, a, w, y.part_mut([M, 2]).unwrap(), None, options);
    assert_error(r, kind!(Shape), &["gemm_a16w16_gated: w", "[5, 32]", "even number of rows"]);
    let r = batched_gemm_bf16(
        &b.stream,
        b.half(&[M, K]),
        b.half(&[N, K]),
        None,
        y.part_mut([M, N]).unwrap(),
        None,
        options,
    );
    assert_error(r, kind!(Shape), &["batched_gemm_bf16: a", "[4, 32]"]);
    let (a, w, s) = (b.code(&[M, K]), b.code(&[N, K]), b.float(&[1]));
    let r = batched_gemm_a8w8(
        &b.stream,
        ScaledInputs { a, w: w.into(), a_scale: s, w_scale: s },
        None,
        y.part_mut([M, N]).unwrap(),
        None,
        options,
    );
    assert_error(r, kind!(Shape), &["batched_gemm_a8w8: a", "[4, 32]"]);
    let r = gemm_a8w8_per_token_scale(
        &b.stream,
        ScaledInputs { a, w: b.code(&[N, 2]).into(), a_scale: s, w_scale: s },
        y.part_mut([M, N]).unwrap(),
        None,
        options,
    );
    assert_error(r, kind!(Shape), &["gemm_a8w8_per_token_scale: w", "[6, 2]"]);
    let r = gemm_a16w16_atomic(
        &b.stream,
        b.half(&[M, K]),
        b.half(&[N, K]),
        y.part_mut([N, M]).unwrap(),
        Accumulate::Add,
        options,
    );
    assert_error(r, kind!(Shape), &["gemm_a16w16_atomic: y", "[6, 4]", "[4, 6]"]);
}

#[test]
fn strides_and_alignment() {
    let mut b = Bench::new();
    assert_error(b.half_gemm((&[M, K], &[1, M], 0), W), kind!(Stride), &["gemm_a16w16: a", "[1, 4]"]);
    assert_error(b.half_gemm(A, (&[N, K], &[2 * K, 2], 0)), kind!(Stride), &["gemm_a16w16: w", "[64, 2]"]);
    let turned = Layout::with_strides([M, N], [1, M]).unwrap();
    let y = b.y.view_mut_with(turned, 0).unwrap();
    let (a, w) = (b.halves.part([M, K]).unwrap(), b.halves.part([N, K]).unwrap());
    let r = gemm_a16w16(&b.stream, a, w, None, y, None, GemmOptions::default());
    assert_error(r, kind!(Stride), &["gemm_a16w16: y", "[1, 4]"]);
    let bias = FloatView::F32(view(&b.floats, &[N], &[2], 0));
    let y = b.y.part_mut([M, N]).unwrap();
    let r = gemm_a16w16(&b.stream, a, w, Some(bias), y, None, GemmOptions::default());
    assert_error(r, kind!(Stride), &["gemm_a16w16: bias", "[2]"]);
    let space = b.sums.view_mut_with(Layout::contiguous([8]).unwrap(), 1).unwrap();
    let r = gemm_a16w16(
        &b.stream,
        a,
        w,
        None,
        b.y.part_mut([M, N]).unwrap(),
        Some(space),
        GemmOptions::default(),
    );
    assert_error(r, kind!(Align), &["gemm_a16w16: workspace", "16"]);
    let space = b.sums.part_mut([2, 4]).unwrap();
    let r = gemm_a16w16(
        &b.stream,
        a,
        w,
        None,
        b.y.part_mut([M, N]).unwrap(),
        Some(space),
        GemmOptions::default(),
    );
    assert_error(r, kind!(Shape), &["gemm_a16w16: workspace", "[2, 4]"]);
    let space = b.sums.view_mut_with(Layout::with_strides([8], [2]).unwrap(), 0).unwrap();
    let r = gemm_a16w16(
        &b.stream,
        a,
        w,
        None,
        b.y.part_mut([M, N]).unwrap(),
        Some(space),
        GemmOptions::default(),
    );
    assert_error(r, kind!(Stride), &["gemm_a16w16: workspace", "[2]"]);
    let (a, w) = (b.codes.part([M, K]).unwrap(), b.codes.part([N, K]).unwrap());
    let scale = view(&b.floats, &[M], &[3], 0);
    let y = b.y.part_mut([M, N]).unwrap();
    let r = gemm_a8w8(
        &b.stream,
        ScaledInputs { a, w: w.into(), a_scale: scale, w_scale: b.floats.part([1]).unwrap() },
        None,
        y,
        None,
        GemmOptions::default(),
    );
    assert_error(r, kind!(Stride), &["gemm_a8w8: a_scale", "[3]"]);
}

#[test]
fn outputs_bias_and_options() {
    let mut b = Bench::new();
    let with = |tile, splits, group| GemmOptions {
        config: Some(GemmConfig { tile, splits, group }),
        ..Default::default()
    };
    let default = GemmOptions::default();
    assert_error(b.half_options(&[M, 5], &[N], 8, default), kind!(Shape), &["y", "[4, 5]", "[4, 6]"]);
    assert_error(b.half_options(&[M, N], &[5], 8, default), kind!(Shape), &["bias", "[5]", "[6] (N)"]);
    assert_error(b.half_options(&[M, N], &[1, N], 8, default), kind!(Shape), &["bias", "[1, 6]", "[6] (N)"]);
    let tile = GemmTile::T64x64;
    for splits in [0, 65536] {
        let r = b.half_options(&[M, N], &[N], 8, with(tile, splits, 1));
        assert_error(r, kind!(Argument), &["splits", &splits.to_string(), "1 to 65535"]);
    }
    let r = b.half_options(&[M, N], &[N], 8, with(tile, 1, 0));
    assert_error(r, kind!(Argument), &["group", "0", "at least 1"]);
    let r = b.half_options(&[M, N], &[N], 71, with(tile, 3, 1));
    assert_error(r, kind!(Shape), &["workspace", "[72] or longer (3 splits)"]);
    let r = b.half_options(&[M, N], &[N], 8, with(GemmTile::T256x128, 1, 1));
    assert_error(r, kind!(Argument), &["tile", "T256x128", "one of [T256x256, T128x128"]);

    let (a, w) = (b.halves.part([M, K]).unwrap(), b.halves.part([N, K]).unwrap());
    let sums = b.sums.part_mut([M, N]).unwrap();
    let r =
        gemm_a16w16_gated(&b.stream, a, w, b.y.part_mut([M, 3]).unwrap(), None, with(GemmTile::S16x16, 1, 1));
    assert_error(r, kind!(Argument), &["gemm_a16w16_gated: tile", "S16x16"]);
    let activation = GemmOptions { activation: Some(Activation::Silu), ..Default::default() };
    let r = gemm_a16w16_atomic(&b.stream, a, w, sums, Accumulate::Overwrite, activation);
    assert_error(r, kind!(Argument), &["gemm_a16w16_atomic: activation", "Silu", "none"]);
    let odd = view(&b.halves, &[M, K], &[K + 1, 1], 0);
    let r = gemm_a16w16(&b.stream, odd, w, None, b.y.part_mut([M, N]).unwrap(), None, with(tile, 1, 1));
    assert_error(r, kind!(Argument), &["gemm_a16w16: tile", "T64x64", "GemmTile::Elements, as rows"]);

    let (a, w) = (b.halves.part([2, M, K]).unwrap(), b.halves.part([2, N, K]).unwrap());
    let bias = FloatView::F32(b.floats.part([2, 2, 3]).unwrap());
    let r = batched_gemm_bf16(&b.stream, a, w, Some(bias), b.y.part_mut([2, M, N]).unwrap(), None, default);
    assert_error(r, kind!(Shape), &["batched_gemm_bf16: bias", "[2, 2, 3]", "[2, 6] or [2, 1, 6]"]);
}

#[test]
fn scales() {
    let mut b = Bench::new();
    assert_error(
        b.quantized_gemm(&[M + 1], &[N]),
        kind!(Shape),
        &["gemm_a8w8: a_scale", "[5]", "[4] (M), [4, 1], [1, 4] or one number"],
    );
    assert_error(b.quantized_gemm(&[2, 2], &[N]), kind!(Shape), &["a_scale", "[2, 2]"]);
    assert_error(b.quantized_gemm(&[M], &[N - 1]), kind!(Shape), &["gemm_a8w8: w_scale", "[5]", "[6] (N)"]);
    let (a, w) = (b.codes.part([2, M, K]).unwrap(), b.codes.part([2, N, K]).unwrap());
    let (one, flat) = (b.floats.part([1]).unwrap(), b.floats.part([2 * M]).unwrap());
    let y = b.y.part_mut([2, M, N]).unwrap();
    let r = batched_gemm_a8w8(
        &b.stream,
        ScaledInputs { a, w: w.into(), a_scale: flat, w_scale: one },
        None,
        y,
        None,
        GemmOptions::default(),
    );
    assert_error(r, kind!(Shape), &["batched_gemm_a8w8: a_scale", "[8]", "[2, 4] (M), [2, 4, 1], [2, 1, 4]"]);

    let group = BlockShape::default();
    assert_error(
        b.block_gemm(&[M, 1], &[1, 2], group),
        kind!(Shape),
        &["gemm_a8w8_blockscale: a_scale", "[4, 1]", "[4, 2] (M, groups of K)"],
    );
    assert_error(
        b.block_gemm(&[M, 2], &[N, 2], group),
        kind!(Shape),
        &["w_scale", "[6, 2]", "[1, 2] (groups of N, groups of K)"],
    );
    assert_error(b.block_gemm(&[M, 2], &[2], group), kind!(Shape), &["w_scale", "[2]"]);
    for n in [0, 3, 1 << 40] {
        let r = b.block_gemm(&[M, 2], &[1, 2], BlockShape { n, k: 128 });
        assert_error(r, kind!(Argument), &["group.n", &n.to_string(), "a power of two"]);
    }
    for k in [0, 3, 129, 192, 1 << 40] {
        let r = b.block_gemm(&[M, 2], &[1, 2], BlockShape { n: 128, k });
        assert_error(r, kind!(Argument), &["group.k", &k.to_string(), "a power of two"]);
    }
    // So many groups of one column that kernels cannot count them.
    let k = ((1 << 31) - 4096) / 64 + 1;
    let codes = b.stream.alloc_zeroed::<Fp8E4M3Fnuz>(k).unwrap();
    let (x, scale) = (codes.part([1, k]).unwrap(), b.floats.part([1, 1]).unwrap().broadcast([1, k]).unwrap());
    let (group, y) = (BlockShape { n: 1, k: 1 }, b.y.part_mut([1, 1]).unwrap());
    let r = gemm_a8w8_blockscale(
        &b.stream,
        BlockScaledInputs { a: x, w: x.into(), a_scale: scale, w_scale: scale, group },
        None,
        y,
        None,
        GemmOptions::default(),
    );
    assert_error(r, kind!(TooLarge), &["gemm_a8w8_blockscale: a", &format!("{k} columns in groups of 1")]);
}

#[test]
fn overlaps() {
    let b = Bench::new();
    let mut all = b.stream.alloc_zeroed::<bf16>(4096).unwrap();
    let (first, second) = all.part_mut([4096]).unwrap().split_at(0, 2048).unwrap();
    let a = first.alias();
    let a = a.slice(0, 0..M * K).unwrap().split_axis(0, K).unwrap();
    let w = b.half(&[N, K]);
    let y = first.slice(0, 8..8 + M * N).unwrap().split_axis(0, N).unwrap();
    let r = gemm_a16w16(&b.stream, a, w, None, y, None, GemmOptions::default());
    assert_error(r, kind!(Overlap), &["gemm_a16w16", "a", "y"]);
    let bias = second.alias().slice(0, 3..3 + N).unwrap();
    let y = second.slice(0, 0..M * N).unwrap().split_axis(0, N).unwrap();
    let r = gemm_a16w16(&b.stream, b.half(&[M, K]), w, Some(bias.into()), y, None, GemmOptions::default());
    assert_error(r, kind!(Overlap), &["bias", "y"]);
    let mut sums = b.stream.alloc_zeroed::<f32>(4096).unwrap();
    let (s, code) = (sums.part_mut([4096]).unwrap(), b.code(&[M, K]));
    let scale = s.alias().slice(0, 0..1).unwrap();
    let mut y = b.stream.alloc_zeroed::<bf16>(M * N).unwrap();
    let y = y.part_mut([M, N]).unwrap();
    let r = gemm_a8w8(
        &b.stream,
        ScaledInputs { a: code, w: b.code(&[N, K]).into(), a_scale: scale, w_scale: scale },
        None,
        y,
        Some(s),
        GemmOptions::default(),
    );
    assert_error(r, kind!(Overlap), &["gemm_a8w8", "a_scale", "workspace"]);
}

fn fp8<T: hk_gemm::Int8OrFp8>(gpu: &Gpu) -> Result<()> {
    let stream = gpu.stream();
    let (a, w) = (stream.alloc_zeroed::<T>(M * K)?, stream.alloc_zeroed::<T>(N * K)?);
    let (scale, mut y) = (stream.alloc_zeroed::<f32>(1)?, stream.alloc_zeroed::<bf16>(M * N)?);
    let (a, w, s) = (a.part([M, K])?, w.part([N, K])?, scale.part([1])?);
    gemm_a8w8(
        stream,
        ScaledInputs { a, w: w.into(), a_scale: s, w_scale: s },
        None,
        y.part_mut([M, N])?,
        None,
        GemmOptions::default(),
    )
}

#[test]
fn fp8_of_the_other_target() {
    let (first, second) = (Gpu::open("emu:gfx942"), Gpu::open("emu:gfx950"));
    assert_error(
        fp8::<Fp8E4M3>(&first),
        kind!(Unsupported),
        &["gemm_a8w8", "fp8e4m3 on gfx942", "fp8e4m3fnuz on gfx942"],
    );
    assert_error(
        fp8::<Fp8E4M3Fnuz>(&second),
        kind!(Unsupported),
        &["fp8e4m3fnuz on gfx950", "fp8e4m3 on gfx950"],
    );
    fp8::<Fp8E4M3Fnuz>(&first).unwrap();
    fp8::<Fp8E4M3>(&second).unwrap();
}

/// One element, seen as so many.
fn broadcast<T: Element>(buffer: &DeviceBuffer<T>, shape: [usize; 2]) -> TensorView<'_, T> {
    view(buffer, &shape, &[0, 1], 0)
}

#[test]
fn sizes_beyond_the_limits() {
    let b = Bench::new();
    let mut y = b.stream.alloc_zeroed::<f32>(64).unwrap();
    let (few, many) = (b.half(&[1, 8]), broadcast(&b.halves, [1 << 31, 8]));
    let turned = |y: &mut DeviceBuffer<f32>, a: TensorView<bf16>, w: TensorView<bf16>| {
        gemm_a16w16(&b.stream, a, w, None, y.part_mut([1, 1]).unwrap(), None, GemmOptions::default())
    };
    assert_error(turned(&mut y, many, few), kind!(TooLarge), &["gemm_a16w16: a", "axis 0", "2147483648"]);
    assert_error(turned(&mut y, few, many), kind!(TooLarge), &["gemm_a16w16: w", "axis 0", "2147483648"]);
    let long = view(&b.halves, &[1, 1 << 31], &[1, 0], 0);
    assert_error(turned(&mut y, long, long), kind!(TooLarge), &["gemm_a16w16: a", "axis 1", "2147483648"]);

    let long = view(&b.codes, &[1, 131_072], &[1, 0], 0);
    let one = b.float(&[1]);
    let y = y.part_mut([1, 1]).unwrap();
    let r = gemm_a8w8(
        &b.stream,
        ScaledInputs { a: long, w: long.into(), a_scale: one, w_scale: one },
        None,
        y,
        None,
        GemmOptions::default(),
    );
    assert_error(r, kind!(Argument), &["gemm_a8w8: a", "131072 columns", "131071"]);
}

#[test]
fn tensors_of_another_device() {
    let b = Bench::new();
    let other = Gpu::open("emu:gfx950");
    let w = other.stream().alloc_zeroed::<bf16>(N * K).unwrap();
    let mut y = b.stream.alloc_zeroed::<f32>(M * N).unwrap();
    let w = w.part([N, K]).unwrap();
    let r = gemm_a16w16(
        &b.stream,
        b.half(&[M, K]),
        w,
        None,
        y.part_mut([M, N]).unwrap(),
        None,
        GemmOptions::default(),
    );
    assert!(matches!(r, Err(Error::DeviceMismatch { op: "gemm_a16w16", arg: "w", .. })), "{r:?}");
    std::mem::forget(b);
}

/// Tensors of GEMMs with mxfp4 `[M, 64]` by `[N, 64]`.
struct Fp4Bench {
    b: Bench,
    codes: DeviceBuffer<Fp4x2>,
    scales: DeviceBuffer<E8M0>,
    out: DeviceBuffer<f32>,
}

/// What a call of [`Fp4Bench::half`] is to have otherwise.
struct Fp4Call<'c> {
    a: (&'c [usize], &'c [usize]),
    w: (&'c [usize], &'c [usize]),
    w_scale: &'c [usize],
    shuffled: bool,
    prequant: bool,
    y: &'c [usize],
    workspace: usize,
    options: GemmOptions,
}

impl Default for Fp4Call<'_> {
    fn default() -> Self {
        Self {
            a: (&[M, 64], &[64, 1]),
            w: (&[N, 32], &[32, 1]),
            w_scale: &[N, 2],
            shuffled: false,
            prequant: true,
            y: &[M, N],
            workspace: 0,
            options: GemmOptions::default(),
        }
    }
}

impl Fp4Bench {
    fn new() -> Self {
        let b = Bench::new();
        let codes = b.stream.alloc_zeroed(8192).unwrap();
        let scales = b.stream.alloc_zeroed(8192).unwrap();
        let out = b.stream.alloc_zeroed(8192).unwrap();
        Self { b, codes, scales, out }
    }

    fn code(&self, shape: &[usize]) -> TensorView<'_, Fp4x2> {
        self.codes.part(shape).unwrap()
    }

    fn scale(&self, shape: &[usize]) -> TensorView<'_, E8M0> {
        self.scales.part(shape).unwrap()
    }

    fn half(&mut self, call: Fp4Call) -> Result<()> {
        let a = view(&self.b.halves, call.a.0, call.a.1, 0);
        let w = view(&self.codes, call.w.0, call.w.1, 0);
        let w_scale = self.scales.part(call.w_scale)?;
        let w_scale = if call.shuffled { MxScaleView::Shuffled(w_scale) } else { w_scale.into() };
        let space = if call.workspace > 0 { Some(self.b.sums.part_mut([call.workspace])?) } else { None };
        let y = self.out.part_mut(call.y)?;
        gemm_a16wfp4(
            &self.b.stream,
            A16WFp4Inputs { a, w: w.into(), w_scale },
            if call.prequant { Prequant::Yes } else { Prequant::No },
            y,
            space,
            call.options,
        )
    }

    /// `gemm_afp4wfp4`, or with terms or two outputs.
    fn fp4(&mut self, x: &[usize], x_scale: &[usize], y: &[usize]) -> Result<()> {
        let (x, w) = (self.codes.part(x)?, self.codes.part([N, 32])?);
        let (x_scale, w_scale) = (self.scales.part(x_scale)?, self.scales.part([N, 2])?);
        gemm_afp4wfp4(
            &self.b.stream,
            MxInputs { a: x, w: w.into(), a_scale: x_scale.into(), w_scale: w_scale.into() },
            self.out.part_mut(y)?,
            None,
            GemmOptions::default(),
        )
    }
}

fn with_tile(tile: GemmTile, splits: usize) -> GemmOptions {
    GemmOptions { config: Some(GemmConfig { tile, splits, group: 1 }), ..Default::default() }
}

#[test]
fn mxfp4() {
    let mut b = Fp4Bench::new();
    let all = || Fp4Call::default();
    for prequant in [false, true] {
        let all = || Fp4Call { prequant, workspace: 4096, ..Fp4Call::default() };
        let r = b.half(Fp4Call { a: (&[M, 48], &[48, 1]), w: (&[N, 24], &[24, 1]), ..all() });
        assert_error(r, kind!(Shape), &["gemm_a16wfp4: a", "[4, 48]", "K a multiple of 32"]);
        let r = b.half(Fp4Call { w: (&[N, 31], &[31, 1]), ..all() });
        assert_error(r, kind!(Shape), &["gemm_a16wfp4: w", "[6, 31]", "[N, 32] (K of a)"]);
        let r = b.half(Fp4Call { a: (&[64], &[1]), ..all() });
        assert_error(r, kind!(Shape), &["gemm_a16wfp4: a", "[64]"]);
        let r = b.half(Fp4Call { a: (&[M, 64], &[128, 2]), ..all() });
        assert_error(r, kind!(Stride), &["gemm_a16wfp4: a", "[128, 2]"]);
        let r = b.half(Fp4Call { w: (&[N, 32], &[64, 2]), ..all() });
        assert_error(r, kind!(Stride), &["gemm_a16wfp4: w", "[64, 2]"]);
        let r = b.half(Fp4Call { w_scale: &[N, 3], ..all() });
        assert_error(
            r,
            kind!(Shape),
            &["gemm_a16wfp4: w_scale", "[6, 3]", "[6, 2] (rows, blocks of 32 columns)"],
        );
        let r = b.half(Fp4Call { w_scale: &[255], shuffled: true, ..all() });
        let want = "[256] or longer (shuffled scales of 6 rows of 2 blocks)";
        assert_error(r, kind!(Shape), &["gemm_a16wfp4: w_scale", "[255]", want]);
        let r = b.half(Fp4Call { w_scale: &[1, 256], shuffled: true, ..all() });
        assert_error(r, kind!(Shape), &["gemm_a16wfp4: w_scale", "[1, 256]"]);
        let r = b.half(Fp4Call { y: &[M, 5], ..all() });
        assert_error(r, kind!(Shape), &["gemm_a16wfp4: y", "[4, 5]", "[4, 6]"]);
        let r = b.half(Fp4Call { y: &[1, M, N], ..all() });
        assert_error(r, kind!(Shape), &["gemm_a16wfp4: y", "[1, 4, 6]", "[4, 6]"]);
        let r = b.half(Fp4Call { options: with_tile(GemmTile::S32x32, 0), ..all() });
        assert_error(r, kind!(Argument), &["gemm_a16wfp4: splits", "0"]);
        let r = b.half(Fp4Call { workspace: 71, options: with_tile(GemmTile::S32x32, 3), ..all() });
        assert_error(r, kind!(Shape), &["gemm_a16wfp4: workspace", "[71]", "[72] or longer (3 splits)"]);
        let room = 4096;
        let r = b.half(Fp4Call { workspace: room, options: with_tile(GemmTile::T128x256, 1), ..all() });
        assert_error(r, kind!(Argument), &["gemm_a16wfp4: tile", "T128x256", "one of ["]);
    }
    // Tiles of more rows and the scalar path need room for quantized values: 4 rows of 32 bytes, 8 scales.
    let r = b.half(Fp4Call { workspace: 35, options: with_tile(GemmTile::T64x64, 1), ..all() });
    assert_error(r, kind!(Shape), &["gemm_a16wfp4: workspace", "[35]", "[36] or longer, for quantized a"]);
    let r = b.half(Fp4Call { a: (&[M, 64], &[65, 1]), ..all() });
    assert_error(r, kind!(Shape), &["gemm_a16wfp4: workspace", "[0]", "[36] or longer, for quantized a"]);
    let r = b.half(Fp4Call { workspace: 36 + 23, options: with_tile(GemmTile::T64x64, 2), ..all() });
    assert_error(r, kind!(Shape), &["gemm_a16wfp4: workspace", "[48] or longer (2 splits)"]);
    let r = b.half(Fp4Call {
        a: (&[M, 64], &[65, 1]),
        prequant: false,
        options: with_tile(GemmTile::S32x32, 1),
        ..all()
    });
    assert_error(r, kind!(Argument), &["gemm_a16wfp4: tile", "S32x32", "GemmTile::Elements, as rows"]);

    let (s, options) = (&b.b.stream, GemmOptions::default());
    let (a, w, w_scale) =
        (b.b.half(&[M, 64]), b.codes.part([N, 32]).unwrap(), b.scales.part([N, 2]).unwrap());
    let activation = GemmOptions { activation: Some(Activation::Relu6), ..options };
    let y = b.out.part_mut([M, N]).unwrap();
    let r = gemm_a16wfp4_atomic(
        s,
        A16WFp4Inputs { a, w: w.into(), w_scale: w_scale.into() },
        Prequant::Yes,
        y,
        Accumulate::Overwrite,
        None,
        activation,
    );
    assert_error(r, kind!(Argument), &["gemm_a16wfp4_atomic: activation", "Relu6", "none"]);
    let y = b.out.part_mut([1, M, N]).unwrap();
    let skip = GemmOptions { skip_reduce: true, ..options };
    let r = gemm_a16wfp4_atomic(
        s,
        A16WFp4Inputs { a, w: w.into(), w_scale: w_scale.into() },
        Prequant::No,
        y,
        Accumulate::Overwrite,
        None,
        skip,
    );
    assert_error(r, kind!(Argument), &["gemm_a16wfp4_atomic: skip_reduce", "true", "whole sums"]);
    let y = b.out.part_mut([M, N]).unwrap();
    let r = batched_gemm_a16wfp4(
        s,
        A16WFp4Inputs { a, w: w.into(), w_scale: w_scale.into() },
        Prequant::Yes,
        None,
        y,
        None,
        options,
    );
    assert_error(r, kind!(Shape), &["batched_gemm_a16wfp4: a", "[4, 64]"]);
    let (a, w, w_scale) = (b.b.half(&[2, M, 64]), b.code(&[2, N, 32]), b.scale(&[2, N, 2]));
    let two = b.b.float(&[2]);
    let mut y = s.alloc_zeroed::<f32>(2 * M * N).unwrap();
    let r = batched_gemm_a16wfp4(
        s,
        A16WFp4Inputs { a, w: w.into(), w_scale: w_scale.into() },
        Prequant::Yes,
        Some(two),
        y.part_mut([2, M, N]).unwrap(),
        None,
        options,
    );
    assert_error(r, kind!(Shape), &["batched_gemm_a16wfp4: y_scale", "[2]", "[1]"]);
    let flat = b.scale(&[2 * N, 2]);
    let r = batched_gemm_a16wfp4(
        s,
        A16WFp4Inputs { a, w: w.into(), w_scale: flat.into() },
        Prequant::No,
        None,
        y.part_mut([2, M, N]).unwrap(),
        None,
        options,
    );
    assert_error(r, kind!(Shape), &["batched_gemm_a16wfp4: w_scale", "[12, 2]", "[2, 6, 2]"]);
    let one = b.b.float(&[1]);
    let r = batched_gemm_a16wfp4(
        s,
        A16WFp4Inputs { a, w: w.into(), w_scale: w_scale.into() },
        Prequant::No,
        Some(one),
        y.part_mut([2, M, N]).unwrap(),
        None,
        skip,
    );
    assert_error(r, kind!(Argument), &["batched_gemm_a16wfp4: skip_reduce", "true"]);
    let flat = MxScaleView::Shuffled(b.scale(&[512]));
    let (x, x_scale) = (b.code(&[2, M, 32]), b.scale(&[2, M, 2]));
    let r = batched_gemm_afp4wfp4(
        s,
        MxInputs { a: x, w: w.into(), a_scale: x_scale.into(), w_scale: flat },
        y.part_mut([2, M, N]).unwrap(),
        None,
        options,
    );
    assert_error(r, kind!(Shape), &["batched_gemm_afp4wfp4: w_scale", "[512]", "[2, 256] or longer"]);
    let w3 = b.code(&[3, N, 32]);
    let r = batched_gemm_afp4wfp4(
        s,
        MxInputs { a: x, w: w3.into(), a_scale: x_scale.into(), w_scale: w_scale.into() },
        y.part_mut([2, M, N]).unwrap(),
        None,
        options,
    );
    assert_error(r, kind!(Shape), &["batched_gemm_afp4wfp4: w", "[3, 6, 32]", "(batch and K of a)"]);
    let x = b.code(&[M, 32]);
    let r = batched_gemm_afp4wfp4(
        s,
        MxInputs { a: x, w: w.into(), a_scale: x_scale.into(), w_scale: w_scale.into() },
        y.part_mut([2, M, N]).unwrap(),
        None,
        options,
    );
    assert_error(r, kind!(Shape), &["batched_gemm_afp4wfp4: a", "[4, 32]"]);

    let (a, w, w_scale) = (b.b.code(&[M, 64]), b.code(&[N, 32]), b.scale(&[N, 2]));
    let r = gemm_a8wfp4(
        s,
        A8WFp4Inputs { a, w: w.into(), a_scale: one, w_scale: w_scale.into() },
        y.part_mut([M, N]).unwrap(),
        None,
        options,
    );
    assert_error(r, kind!(Unsupported), &["gemm_a8wfp4", "i8 by fp4e2m1x2", "fp8e4m3fnuz by fp4e2m1x2"]);
    let fp8 = s.alloc_zeroed::<Fp8E4M3>(M * 64).unwrap();
    let r = gemm_a8wfp4(
        s,
        A8WFp4Inputs { a: fp8.part([M, 64]).unwrap(), w: w.into(), a_scale: one, w_scale: w_scale.into() },
        y.part_mut([M, N]).unwrap(),
        None,
        options,
    );
    assert_error(r, kind!(Unsupported), &["gemm_a8wfp4", "fp8e4m3 on gfx942"]);
    let fp8 = s.alloc_zeroed::<Fp8E4M3Fnuz>(M * 64).unwrap();
    let a = fp8.part([M, 64]).unwrap();
    let r = gemm_a8wfp4(
        s,
        A8WFp4Inputs { a, w: w.into(), a_scale: two, w_scale: w_scale.into() },
        y.part_mut([M, N]).unwrap(),
        None,
        options,
    );
    assert_error(r, kind!(Shape), &["gemm_a8wfp4: a_scale", "[2]", "[4] (M), [4, 1]"]);

    assert_error(
        b.fp4(&[M, 31], &[M, 2], &[M, N]),
        kind!(Shape),
        &["gemm_afp4wfp4: w", "[6, 32]", "[N, 31] (K of a)"],
    );
    assert_error(
        b.fp4(&[M, 32], &[M, 1], &[M, N]),
        kind!(Shape),
        &["gemm_afp4wfp4: a_scale", "[4, 1]", "[4, 2]"],
    );
    assert_error(b.fp4(&[M, 32], &[M, 2], &[N, M]), kind!(Shape), &["gemm_afp4wfp4: y", "[6, 4]", "[4, 6]"]);
    assert_error(b.fp4(&[32], &[M, 2], &[M, N]), kind!(Shape), &["gemm_afp4wfp4: a", "[32]"]);
}

#[test]
fn mxfp8() {
    fn run<T: Int8OrFp8>(b: &Fp4Bench, of_a: &[usize], of_w: &[usize], of_scale: &[usize]) -> Result<()> {
        let (s, codes) = (&b.b.stream, b.b.stream.alloc_zeroed::<T>(N * 64).unwrap());
        let mut y = s.alloc_zeroed::<f32>(M * N).unwrap();
        let (a, w, to) = (codes.part(of_a).unwrap(), codes.part(of_w).unwrap(), y.part_mut([M, N]).unwrap());
        let scales = [b.scale(of_scale), b.scale(&[N, 2])];
        gemm_afp8wfp8(
            s,
            MxInputs { a, w: w.into(), a_scale: scales[0].into(), w_scale: scales[1].into() },
            to,
            None,
            GemmOptions::default(),
        )
    }
    let b = Fp4Bench::new();
    let r = run::<Fp8E4M3Fnuz>(&b, &[M, 64], &[N, 64], &[M, 1]);
    assert_error(r, kind!(Shape), &["gemm_afp8wfp8: a_scale", "[4, 1]", "[4, 2]"]);
    let r = run::<Fp8E4M3Fnuz>(&b, &[M, 32], &[N, 64], &[M, 1]);
    assert_error(r, kind!(Shape), &["gemm_afp8wfp8: w", "[6, 64]", "[N, 32] (K of a)"]);
    let r = run::<Fp8E4M3Fnuz>(&b, &[M, 48], &[N, 48], &[M, 2]);
    assert_error(r, kind!(Shape), &["gemm_afp8wfp8: a", "[4, 48]", "K a multiple of 32"]);
    let r = run::<Fp8E4M3Fnuz>(&b, &[64], &[N, 64], &[M, 2]);
    assert_error(r, kind!(Shape), &["gemm_afp8wfp8: a", "[64]"]);
    let r = run::<i8>(&b, &[M, 64], &[N, 64], &[M, 2]);
    assert_error(r, kind!(Unsupported), &["gemm_afp8wfp8", "i8", "fp8e4m3fnuz by fp8e4m3fnuz"]);
    let r = run::<Fp8E4M3>(&b, &[M, 64], &[N, 64], &[M, 2]);
    assert_error(r, kind!(Unsupported), &["gemm_afp8wfp8", "fp8e4m3 on gfx942"]);
}

#[test]
fn weights_of_bytes() {
    let b = Bench::new();
    let (s, options, group) = (&b.stream, GemmOptions::default(), BlockShape::default());
    let (a, w) = (b.half(&[M, 160]), b.code(&[N, 160]));
    let mut y = s.alloc_zeroed::<f32>(256).unwrap();
    let mut space = s.alloc_zeroed::<f32>(1024).unwrap();
    let mut of = |a, w: TensorView<'_, i8>, scale: &[usize], group, prequant: bool, room: usize, options| {
        let (scale, y) = (b.floats.part(scale).unwrap(), y.part_mut([M, N]).unwrap());
        let space = if room > 0 { Some(space.part_mut([room]).unwrap()) } else { None };
        gemm_a16w8_blockscale(
            s,
            A16W8Inputs { a, w: w.into(), w_scale: scale, group },
            if prequant { Prequant::Yes } else { Prequant::No },
            y,
            space,
            options,
        )
    };
    for prequant in [false, true] {
        let r = of(a, b.code(&[N, 159]), &[1, 2], group, prequant, 0, options);
        assert_error(r, kind!(Shape), &["gemm_a16w8_blockscale: w", "[6, 159]", "[N, 160] (K of a)"]);
        let r = of(b.half(&[160]), w, &[1, 2], group, prequant, 0, options);
        assert_error(r, kind!(Shape), &["gemm_a16w8_blockscale: a", "[160]"]);
        let r = of(a, w, &[1, 1], group, prequant, 0, options);
        assert_error(
            r,
            kind!(Shape),
            &["gemm_a16w8_blockscale: w_scale", "[1, 1]", "[1, 2] (groups of N, groups of K)"],
        );
        let r = of(a, w, &[1, 2], BlockShape { n: 3, k: 128 }, prequant, 1024, options);
        assert_error(r, kind!(Argument), &["gemm_a16w8_blockscale: group.n", "3", "a power of two"]);
        let r = of(a, w, &[1, 2], group, prequant, 0, with_tile(GemmTile::S32x32, 2));
        assert_error(
            r,
            kind!(Shape),
            &["gemm_a16w8_blockscale: workspace", "[0]", "[48] or longer (2 splits)"],
        );
    }
    for prequant in [false, true] {
        let r = of(a, w, &[1, 2], BlockShape { n: 128, k: 96 }, prequant, 0, options);
        assert_error(r, kind!(Argument), &["gemm_a16w8_blockscale: group.k", "96", "a power of two"]);
    }
    // Activations are quantized in registers in groups of 128 columns only.
    for (k, groups, room) in [(32, 5, 180), (256, 1, 164)] {
        let r = of(a, w, &[1, groups], BlockShape { n: 128, k }, true, room - 1, options);
        let (got, want) = (format!("[{}]", room - 1), format!("[{room}] or longer, for quantized a"));
        assert_error(r, kind!(Shape), &["gemm_a16w8_blockscale: workspace", &got, &want]);
    }
    let r = of(a, w, &[1, 3], BlockShape { n: 128, k: 64 }, false, 0, with_tile(GemmTile::S32x32, 1));
    assert_error(r, kind!(Argument), &["gemm_a16w8_blockscale: tile", "S32x32", "one of [T64x64, Elements]"]);
    let r = of(a, w, &[1, 20], BlockShape { n: 128, k: 8 }, false, 0, with_tile(GemmTile::T64x64, 1));
    let want = "GemmTile::Elements, as rows do not begin on 16 bytes, are no multiple of 16 bytes long, or lie too far apart, or groups \
                have fewer than 16 columns";
    assert_error(r, kind!(Argument), &["gemm_a16w8_blockscale: tile", "T64x64", want]);
    // 4 rows of 160 bytes, 8 scales.
    let r = of(a, w, &[1, 2], group, true, 167, with_tile(GemmTile::T64x64, 1));
    assert_error(
        r,
        kind!(Shape),
        &["gemm_a16w8_blockscale: workspace", "[167]", "[168] or longer, for quantized a"],
    );
    let r = of(a, w, &[1, 2], group, false, 0, with_tile(GemmTile::S16x16, 1));
    assert_error(r, kind!(Argument), &["gemm_a16w8_blockscale: tile", "S16x16", "one of [T128x128, T64x64"]);
    // Too few rows of w have a scale for tiles whose lanes read one.
    let few = BlockShape { n: 2, k: 128 };
    let r = of(a, w, &[3, 2], few, false, 0, with_tile(GemmTile::S16x32, 1));
    assert_error(
        r,
        kind!(Argument),
        &["gemm_a16w8_blockscale: tile", "S16x32", "one of [T128x128, T64x64, Elements]"],
    );

    let (a, w, one) = (b.half(&[2, M, 160]), b.code(&[2, N, 160]), b.float(&[1]));
    let mut run = |a: TensorView<bf16>, w: TensorView<_>, scale, bias, options| {
        batched_gemm_a8w8_ptgq(
            s,
            PtgqInputs { a, group: 128, w: w.into(), w_scale: scale },
            bias,
            y.part_mut([2, M, N]).unwrap(),
            None,
            options,
        )
    };
    assert_error(
        run(b.half(&[M, 160]), w, one, None, options),
        kind!(Shape),
        &["batched_gemm_a8w8_ptgq: a", "[4, 160]"],
    );
    assert_error(
        run(a, b.code(&[N, 160]), one, None, options),
        kind!(Shape),
        &["batched_gemm_a8w8_ptgq: w", "[6, 160]"],
    );
    let three = b.code(&[3, N, 160]);
    assert_error(
        run(a, three, one, None, options),
        kind!(Shape),
        &["batched_gemm_a8w8_ptgq: w", "[3, 6, 160]"],
    );
    let r = run(a, w, b.float(&[2]), None, options);
    assert_error(r, kind!(Shape), &["batched_gemm_a8w8_ptgq: w_scale", "[2]", "[1]"]);
    let mut out = s.alloc_zeroed::<f32>(256).unwrap();
    for group in [0, 48] {
        let to = out.part_mut([2, M, N]).unwrap();
        let r = batched_gemm_a8w8_ptgq(
            s,
            PtgqInputs { a, group, w: w.into(), w_scale: one },
            None,
            to,
            None,
            options,
        );
        assert_error(
            r,
            kind!(Argument),
            &["batched_gemm_a8w8_ptgq: group.k", &group.to_string(), "a power of two"],
        );
    }
    let r = run(a, w, one, Some(b.float(&[N]).into()), options);
    assert_error(
        r,
        kind!(Shape),
        &["batched_gemm_a8w8_ptgq: bias", "[6]", "[2, 6] or [2, 1, 6] (batch and N)"],
    );
}

#[test]
fn terms_and_two_outputs() {
    let b = Fp4Bench::new();
    let (s, options, group) = (&b.b.stream, GemmOptions::default(), BlockShape::default());
    let (x, w, x_scale, w_scale) = (b.code(&[M, 32]), b.code(&[N, 32]), b.scale(&[M, 2]), b.scale(&[N, 2]));
    let (of_x, of_w) = (b.b.code(&[M, 32]), b.b.code(&[N, 32]));
    let (f_x, f_w) = (b.b.float(&[M, 1]), b.b.float(&[1, 1]));
    let (mut y, mut rest) = (s.alloc_zeroed::<f32>(256).unwrap(), s.alloc_zeroed::<f32>(256).unwrap());
    let fuse = FuseType::ScaleAdd;
    let wrong = b.b.float(&[M, N - 1]);
    let mut mul_add = |a: hk_gemm::Addend, b: hk_gemm::Addend, shape: &[usize], options| {
        let first = fused_gemm_afp4wfp4_mul_add(
            s,
            FusedMxInputs { x, w: w.into(), x_scale: x_scale.into(), w_scale: w_scale.into() },
            MulAdd { a, b, fuse },
            y.part_mut(shape)?,
            None,
            options,
        );
        let y = y.part_mut(shape)?;
        let second = fused_gemm_a8w8_blockscale_mul_add(
            s,
            FusedBlockInputs { x: of_x, w: of_w.into(), x_scale: f_x, w_scale: f_w, group },
            MulAdd { a, b, fuse },
            y,
            None,
            options,
        );
        let message = second.as_ref().unwrap_err().to_string();
        assert!(message.starts_with("fused_gemm_a8w8_blockscale_mul_add: "), "{message}");
        assert_eq!(
            message.split_once(": ").unwrap().1,
            first.as_ref().unwrap_err().to_string().split_once(": ").unwrap().1
        );
        first
    };
    let r = mul_add(wrong.into(), 1.0.into(), &[M, N], options);
    assert_error(
        r,
        kind!(Shape),
        &["fused_gemm_afp4wfp4_mul_add: a", "[4, 5]", "[4, 6] (M, N), or one element"],
    );
    let r = mul_add(1.0.into(), b.b.half(&[N]).into(), &[M, N], options);
    assert_error(
        r,
        kind!(Shape),
        &["fused_gemm_afp4wfp4_mul_add: b", "[6]", "[4, 6] (M, N), or one element"],
    );
    let turned = view(&b.b.floats, &[M, N], &[1, M], 0);
    let r = mul_add(1.0.into(), turned.into(), &[M, N], options);
    assert_error(r, kind!(Stride), &["fused_gemm_afp4wfp4_mul_add: b", "[1, 4]"]);
    let r = mul_add(1.0.into(), 1.0.into(), &[N, M], options);
    assert_error(r, kind!(Shape), &["fused_gemm_afp4wfp4_mul_add: y", "[6, 4]", "[4, 6]"]);
    let skip = GemmOptions { skip_reduce: true, ..options };
    let r = mul_add(1.0.into(), 1.0.into(), &[1, M, N], skip);
    assert_error(r, kind!(Argument), &["fused_gemm_afp4wfp4_mul_add: skip_reduce", "true", "whole sums"]);
    let r = fused_gemm_afp4wfp4_mul_add(
        s,
        FusedMxInputs { x: b.code(&[32]), w: w.into(), x_scale: x_scale.into(), w_scale: w_scale.into() },
        MulAdd { a: 1.0.into(), b: 1.0.into(), fuse },
        y.part_mut([M, N]).unwrap(),
        None,
        options,
    );
    assert_error(r, kind!(Shape), &["fused_gemm_afp4wfp4_mul_add: x", "[32]"]);
    let r = fused_gemm_afp4wfp4_mul_add(
        s,
        FusedMxInputs { x, w: w.into(), x_scale: x_scale.into(), w_scale: b.scale(&[N, 1]).into() },
        MulAdd { a: 1.0.into(), b: 1.0.into(), fuse },
        y.part_mut([M, N]).unwrap(),
        None,
        options,
    );
    assert_error(r, kind!(Shape), &["fused_gemm_afp4wfp4_mul_add: w_scale", "[6, 1]"]);
    let r = fused_gemm_a8w8_blockscale_mul_add(
        s,
        FusedBlockInputs { x: of_x, w: of_w.into(), x_scale: b.b.float(&[M, 2]), w_scale: f_w, group },
        MulAdd { a: 1.0.into(), b: 1.0.into(), fuse },
        y.part_mut([M, N]).unwrap(),
        None,
        options,
    );
    assert_error(
        r,
        kind!(Shape),
        &["fused_gemm_a8w8_blockscale_mul_add: x_scale", "[4, 2]", "[4, 1] (M, groups of K)"],
    );
    let sums = y.part_mut([M, N]).unwrap();
    let term = sums.alias();
    let r = fused_gemm_afp4wfp4_mul_add(
        s,
        FusedMxInputs { x, w: w.into(), x_scale: x_scale.into(), w_scale: w_scale.into() },
        MulAdd { a: term.into(), b: 1.0.into(), fuse },
        sums,
        None,
        options,
    );
    assert_error(r, kind!(Overlap), &["fused_gemm_afp4wfp4_mul_add", "a", "y"]);

    // N = 6 = D (S1 + S2) = 2 (1 + 2), S3 = 4.
    let mut split_cat = |cat: TensorView<f32>, c1: &[usize], c2: &[usize], options| {
        let (to, rest) = (y.part_mut(c1)?, rest.part_mut(c2)?);
        fused_gemm_afp4wfp4_split_cat(
            s,
            FusedMxInputs { x, w: w.into(), x_scale: x_scale.into(), w_scale: w_scale.into() },
            cat,
            SplitCatOutputs { c1: to, c2: rest },
            None,
            options,
        )
    };
    let cat = b.b.float(&[M, 2, 4]);
    let right: [&[usize]; 2] = [&[M, 2, 5], &[M, 2, 2]];
    for (cat, c1, c2) in [
        (cat, &[M, 2, 6][..], right[1]),
        (cat, right[0], &[M, 2, 1][..]),
        (cat, right[0], &[M, 1, 2]),
        (cat, &[3, 2, 5], right[1]),
        (cat, &[M, 2, 3], right[1]),
        (cat, &[M, 10], right[1]),
        (b.b.float(&[M, 3, 4]), right[0], right[1]),
        (b.b.float(&[M, 2, 6]), right[0], right[1]),
    ] {
        let want = format!("{c1:?}");
        let beside = format!(
            "[4, D, S1 + S3], beside c2 {c2:?} [4, D, S2] and y {:?} [4, D, S3], D (S1 + S2) = 6",
            cat.shape()
        );
        let r = split_cat(cat, c1, c2, options);
        assert_error(r, kind!(Shape), &["fused_gemm_afp4wfp4_split_cat: c1", &want, &beside]);
    }
    let turned = view(&b.b.floats, &[M, 2, 4], &[8, 1, 2], 0);
    assert_error(
        split_cat(turned, right[0], right[1], options),
        kind!(Stride),
        &["fused_gemm_afp4wfp4_split_cat: y"],
    );
    let r = split_cat(cat, right[0], right[1], skip);
    assert_error(r, kind!(Argument), &["fused_gemm_afp4wfp4_split_cat: skip_reduce", "true"]);
    let layout = Layout::with_strides([M, 2, 2], [4, 1, 2]).unwrap();
    let c2 = rest.view_mut_with(layout, 0).unwrap();
    let c1 = y.part_mut([M, 2, 5]).unwrap();
    let r = fused_gemm_a8w8_blockscale_split_cat(
        s,
        FusedBlockInputs { x: of_x, w: of_w.into(), x_scale: f_x, w_scale: f_w, group },
        cat,
        SplitCatOutputs { c1, c2 },
        None,
        options,
    );
    assert_error(r, kind!(Stride), &["fused_gemm_a8w8_blockscale_split_cat: c2", "[4, 1, 2]"]);
    let c1 = y.part_mut([M, 2, 3]).unwrap();
    let c2 = rest.part_mut([M, 2, 2]).unwrap();
    let own = c2.alias();
    let r = fused_gemm_a8w8_blockscale_split_cat(
        s,
        FusedBlockInputs { x: of_x, w: of_w.into(), x_scale: f_x, w_scale: f_w, group },
        own,
        SplitCatOutputs { c1, c2 },
        None,
        options,
    );
    assert_error(r, kind!(Overlap), &["fused_gemm_a8w8_blockscale_split_cat", "y", "c2"]);
}

#[test]
fn groups_of_rows() {
    let b = Bench::new();
    let (s, options) = (&b.stream, GemmOptions::default());
    let (a, w) = (b.half(&[2, M, K]), b.half(&[2, N, K]));
    let lists = s.alloc_zeroed::<i32>(64).unwrap();
    let list = |n: usize| lists.part([n]).unwrap();
    let mut y = s.alloc_zeroed::<f32>(256).unwrap();
    let mut masked = |a, w, list, shape: &[usize], options| {
        deepgemm_masked(s, a, w, list, y.part_mut(shape).unwrap(), options)
    };
    let shape = &[2, M, N][..];
    assert_error(
        masked(a, w, list(3), shape, options),
        kind!(Shape),
        &["deepgemm_masked: masked_m", "[3]", "[2]"],
    );
    let apart = view(&lists, &[2], &[2], 0);
    assert_error(masked(a, w, apart, shape, options), kind!(Stride), &["deepgemm_masked: masked_m", "[2]"]);
    assert_error(
        masked(b.half(&[M, K]), w, list(2), shape, options),
        kind!(Shape),
        &["deepgemm_masked: a", "[4, 32]"],
    );
    let three = b.half(&[3, N, K]);
    assert_error(
        masked(a, three, list(2), shape, options),
        kind!(Shape),
        &["deepgemm_masked: w", "[3, 6, 32]"],
    );
    assert_error(
        masked(a, w, list(2), &[2, N, M], options),
        kind!(Shape),
        &["deepgemm_masked: y", "[2, 6, 4]"],
    );
    // K stays whole: there is no workspace.
    let r = masked(a, w, list(2), shape, with_tile(GemmTile::T64x64, 2));
    assert_error(r, kind!(Shape), &["deepgemm_masked: workspace", "[0]", "(2 splits)"]);
    let (x, wc) = (b.code(&[2, M, K]), b.code(&[2, N, K]));
    let scales = GemmScales::Rows { a: b.float(&[2, N]), w: b.float(&[2, N]) };
    let r = deepgemm_masked_a8w8(s, x, wc, scales, list(2), y.part_mut(shape).unwrap(), options);
    assert_error(r, kind!(Shape), &["deepgemm_masked_a8w8: a_scale", "[2, 6]", "[2, 4] (M)"]);
    let group = BlockShape::default();
    let scales = GemmScales::Blocks { a: b.float(&[2, M, 1]), w: b.float(&[2, N, 1]), group };
    let r = deepgemm_masked_a8w8(s, x, wc, scales, list(2), y.part_mut(shape).unwrap(), options);
    assert_error(
        r,
        kind!(Shape),
        &["deepgemm_masked_a8w8: w_scale", "[2, 6, 1]", "[2, 1, 1] (groups of N, groups of K)"],
    );

    let a = b.half(&[M, K]);
    let mut rows = |a, w, list, shape: &[usize], options| {
        deepgemm_contiguous(s, a, w, list, y.part_mut(shape).unwrap(), options)
    };
    let shape = &[M, N][..];
    assert_error(
        rows(a, w, list(3), shape, options),
        kind!(Shape),
        &["deepgemm_contiguous: m_group", "[3]", "[4]"],
    );
    let r = rows(a, b.half(&[N, K]), list(M), shape, options);
    assert_error(r, kind!(Shape), &["deepgemm_contiguous: w", "[6, 32]", "[batch, rows, cols]"]);
    let r = rows(a, b.half(&[2, N, 8]), list(M), shape, options);
    assert_error(r, kind!(Shape), &["deepgemm_contiguous: w", "[2, 6, 8]", "[matrices, N, 32] (K of a)"]);
    assert_error(rows(a, w, list(M), &[N, M], options), kind!(Shape), &["deepgemm_contiguous: y", "[6, 4]"]);
    let r = rows(a, w, list(M), shape, with_tile(GemmTile::T256x256, 1));
    assert_error(r, kind!(Argument), &["deepgemm_contiguous: tile", "T256x256", "one of [T128x128"]);
    let x = b.code(&[M, K]);
    let scales = GemmScales::Rows { a: b.float(&[M]), w: b.float(&[N]) };
    let r = deepgemm_contiguous_a8w8(s, x, wc, scales, list(M), y.part_mut(shape).unwrap(), options);
    assert_error(r, kind!(Shape), &["deepgemm_contiguous_a8w8: w_scale", "[6]", "[2, 6] (N)"]);
    let scales = GemmScales::Blocks { a: b.float(&[M, 2]), w: b.float(&[2, 1, 1]), group };
    let r = deepgemm_contiguous_a8w8(s, x, wc, scales, list(M), y.part_mut(shape).unwrap(), options);
    assert_error(
        r,
        kind!(Shape),
        &["deepgemm_contiguous_a8w8: a_scale", "[4, 2]", "[4, 1] (M, groups of K)"],
    );
}

#[test]
fn shuffled_weights() {
    let b = Bench::new();
    let s = &b.stream;
    let mut y = s.alloc_zeroed::<f32>(256).unwrap();
    let mut call = |w: TensorView<'_, bf16>| {
        let (w, y) = (GemmWeight::Shuffled(w), y.part_mut([M, 16]).unwrap());
        gemm_a16w16(s, b.half(&[M, 32]), w, None, y, None, GemmOptions::default())
    };
    for shape in [&[15, 32][..], &[16, 31], &[16], &[1, 1, 16, 32]] {
        let want = &["gemm_a16w16: w", &format!("{shape:?}"), "N a multiple of 16, K of 32"];
        assert_error(call(b.half(shape)), kind!(Shape), want);
    }
    let r = call(view(&b.halves, &[16, 32], &[40, 1], 0));
    assert_error(r, kind!(Stride), &["gemm_a16w16: w", "[40, 1]"]);
    let r = call(view(&b.halves, &[16, 32], &[32, 1], 1));
    assert_error(r, kind!(Align), &["gemm_a16w16: w", "16"]);
    // Shorter than a's K.
    let w = GemmWeight::Shuffled(b.half(&[16, 32]));
    let r =
        gemm_a16w16(s, b.half(&[M, 64]), w, None, y.part_mut([M, 16]).unwrap(), None, GemmOptions::default());
    assert_error(r, kind!(Shape), &["gemm_a16w16: w", "[16, 32]", "[N, 64] (K of a)"]);

    let mut all = s.alloc_zeroed::<bf16>(4096).unwrap();
    for (plain, shuffled, arg) in [
        (&[16, 32][..], &[16, 33][..], "shuffled"),
        (&[15, 32], &[15, 32], "shuffled"),
        (&[16, 40], &[16, 32], "plain"),
        (&[32, 32], &[16, 32], "plain"),
        (&[1, 16, 32], &[16, 32], "plain"),
    ] {
        let r = shuffle_weight(s, b.half(plain), all.part_mut(shuffled).unwrap());
        assert_error(r, kind!(Shape), &[&format!("shuffle_weight: {arg}")]);
        let r = unshuffle_weight(s, b.half(shuffled), all.part_mut(plain).unwrap());
        assert_error(r, kind!(Shape), &[&format!("unshuffle_weight: {arg}")]);
    }
    let turned = view(&b.halves, &[16, 32], &[1, 16], 0);
    let r = shuffle_weight(s, turned, all.part_mut([16, 32]).unwrap());
    assert_error(r, kind!(Stride), &["shuffle_weight: plain", "[1, 16]"]);
    let padded = Layout::with_strides([16, 32], [40, 1]).unwrap();
    let r = shuffle_weight(s, b.half(&[16, 32]), all.view_mut_with(padded, 0).unwrap());
    assert_error(r, kind!(Stride), &["shuffle_weight: shuffled", "[40, 1]"]);
    let r = unshuffle_weight(s, view(&b.halves, &[16, 32], &[40, 1], 0), all.part_mut([16, 32]).unwrap());
    assert_error(r, kind!(Stride), &["unshuffle_weight: shuffled", "[40, 1]"]);
    let odd = Layout::contiguous([16, 32]).unwrap();
    let r = shuffle_weight(s, b.half(&[16, 32]), all.view_mut_with(odd, 1).unwrap());
    assert_error(r, kind!(Align), &["shuffle_weight: shuffled", "16"]);
    let r = unshuffle_weight(s, view(&b.halves, &[16, 32], &[32, 1], 1), all.part_mut([16, 32]).unwrap());
    assert_error(r, kind!(Align), &["unshuffle_weight: shuffled", "16"]);
    let own = all.part_mut([16, 32]).unwrap();
    let r = shuffle_weight(s, own.alias(), own);
    assert_error(r, kind!(Overlap), &["shuffle_weight", "plain", "shuffled"]);
    let own = all.part_mut([16, 32]).unwrap();
    let r = unshuffle_weight(s, own.alias(), own);
    assert_error(r, kind!(Overlap), &["unshuffle_weight", "shuffled", "plain"]);
}

/// Unsummed split-K slices are f32, as many as y has, and only of plain GEMMs.
#[test]
fn parts_that_are_not_summed() {
    let b = Bench::new();
    let (s, options) = (&b.stream, GemmOptions { skip_reduce: true, ..Default::default() });
    let (a, w) = (b.half(&[M, K]), b.half(&[N, K]));
    let mut y = s.alloc_zeroed::<f32>(4096).unwrap();
    for shape in [&[M, N][..], &[0, M, N], &[2, N, M], &[1, 2, M, N]] {
        let r = gemm_a16w16(s, a, w, None, y.part_mut(shape).unwrap(), None, options);
        assert_error(
            r,
            kind!(Shape),
            &["gemm_a16w16: y", &format!("{shape:?}"), "[split-K slices, then [4, 6]]"],
        );
    }
    let mut halves = s.alloc_zeroed::<bf16>(4096).unwrap();
    let r = gemm_a16w16(s, a, w, None, halves.part_mut([2, M, N]).unwrap(), None, options);
    assert_error(r, kind!(DType), &["gemm_a16w16: y", "bf16", "f32 (skip_reduce)"]);
    let r = gemm_a16w16_gated(s, a, w, y.part_mut([2, M, N / 2]).unwrap(), None, options);
    assert_error(r, kind!(Argument), &["gemm_a16w16_gated: skip_reduce", "true", "whole sums"]);
    let r = gemm_a16w16_atomic(s, a, w, y.part_mut([2, M, N]).unwrap(), Accumulate::Overwrite, options);
    assert_error(r, kind!(Argument), &["gemm_a16w16_atomic: skip_reduce", "true", "whole sums"]);
}
