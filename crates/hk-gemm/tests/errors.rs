//! Every error of the safe functions, with its message; nothing is launched.

use hk_core::{
    DeviceBuffer, Element, Error, Fp8E4M3, Fp8E4M3Fnuz, Layout, Result, Stream, TensorView, TensorViewMut,
    bf16,
};
use hk_gemm::{
    Activation, BlockShape, FloatView, GemmConfig, GemmOptions, GemmTile, batched_gemm_a8w8,
    batched_gemm_bf16, gemm_a8w8, gemm_a8w8_blockscale, gemm_a8w8_per_token_scale, gemm_a16w16,
    gemm_a16w16_atomic, gemm_a16w16_gated,
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
        let stream = Gpu::open("emu:gfx942").stream().clone();
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
    fn half_product(&mut self, a: (&[usize], &[usize], usize), w: (&[usize], &[usize], usize)) -> Result<()> {
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
    fn block_product(&mut self, a_scale: &[usize], w_scale: &[usize], group: BlockShape) -> Result<()> {
        let (a, w) = (self.codes.part([M, 160])?, self.codes.part([N, 160])?);
        let (a_scale, w_scale) = (self.floats.part(a_scale)?, self.floats.part(w_scale)?);
        let y = self.y.part_mut([M, N])?;
        let options = GemmOptions::default();
        gemm_a8w8_blockscale(&self.stream, a, w, a_scale, w_scale, group, None, y, None, options)
    }

    /// `gemm_a8w8` with these shapes of scales.
    fn code_product(&mut self, a_scale: &[usize], w_scale: &[usize]) -> Result<()> {
        let (a, w) = (self.codes.part([M, K])?, self.codes.part([N, K])?);
        let (a_scale, w_scale) = (self.floats.part(a_scale)?, self.floats.part(w_scale)?);
        let y = self.y.part_mut([M, N])?;
        gemm_a8w8(&self.stream, a, w, a_scale, w_scale, None, y, None, GemmOptions::default())
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
    assert_error(b.half_product((&[K], &[1], 0), W), kind!(Shape), &["gemm_a16w16: a", "[32]"]);
    let rank3: (&[usize], &[usize], usize) = (&[1, N, K], &[N * K, K, 1], 0);
    assert_error(b.half_product(A, rank3), kind!(Shape), &["gemm_a16w16: w", "[1, 6, 32]", "[rows, cols]"]);
    let short: (&[usize], &[usize], usize) = (&[N, K - 1], &[K, 1], 0);
    assert_error(b.half_product(A, short), kind!(Shape), &["w", "[6, 31]", "[N, 32] (K of a)"]);
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
    let r = batched_gemm_a8w8(&b.stream, a, w, s, s, None, y.part_mut([M, N]).unwrap(), None, options);
    assert_error(r, kind!(Shape), &["batched_gemm_a8w8: a", "[4, 32]"]);
    let r = gemm_a8w8_per_token_scale(
        &b.stream,
        a,
        b.code(&[N, 2]),
        s,
        s,
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
        true,
        options,
    );
    assert_error(r, kind!(Shape), &["gemm_a16w16_atomic: y", "[6, 4]", "[4, 6]"]);
}

#[test]
fn strides_and_alignment() {
    let mut b = Bench::new();
    assert_error(b.half_product((&[M, K], &[1, M], 0), W), kind!(Stride), &["gemm_a16w16: a", "[1, 4]"]);
    assert_error(b.half_product(A, (&[N, K], &[2 * K, 2], 0)), kind!(Stride), &["gemm_a16w16: w", "[64, 2]"]);
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
    let r =
        gemm_a8w8(&b.stream, a, w, scale, b.floats.part([1]).unwrap(), None, y, None, GemmOptions::default());
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
    let r = gemm_a16w16_atomic(&b.stream, a, w, sums, false, activation);
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
        b.code_product(&[M + 1], &[N]),
        kind!(Shape),
        &["gemm_a8w8: a_scale", "[5]", "[4] (M), [4, 1], [1, 4] or one number"],
    );
    assert_error(b.code_product(&[2, 2], &[N]), kind!(Shape), &["a_scale", "[2, 2]"]);
    assert_error(b.code_product(&[M], &[N - 1]), kind!(Shape), &["gemm_a8w8: w_scale", "[5]", "[6] (N)"]);
    let (a, w) = (b.codes.part([2, M, K]).unwrap(), b.codes.part([2, N, K]).unwrap());
    let (one, flat) = (b.floats.part([1]).unwrap(), b.floats.part([2 * M]).unwrap());
    let y = b.y.part_mut([2, M, N]).unwrap();
    let r = batched_gemm_a8w8(&b.stream, a, w, flat, one, None, y, None, GemmOptions::default());
    assert_error(r, kind!(Shape), &["batched_gemm_a8w8: a_scale", "[8]", "[2, 4] (M), [2, 4, 1], [2, 1, 4]"]);

    let group = BlockShape::default();
    assert_error(
        b.block_product(&[M, 1], &[1, 2], group),
        kind!(Shape),
        &["gemm_a8w8_blockscale: a_scale", "[4, 1]", "[4, 2] (M, groups of K)"],
    );
    assert_error(
        b.block_product(&[M, 2], &[N, 2], group),
        kind!(Shape),
        &["w_scale", "[6, 2]", "[1, 2] (groups of N, groups of K)"],
    );
    assert_error(b.block_product(&[M, 2], &[2], group), kind!(Shape), &["w_scale", "[2]"]);
    for n in [0, 3, 1 << 40] {
        let r = b.block_product(&[M, 2], &[1, 2], BlockShape { n, k: 128 });
        assert_error(r, kind!(Argument), &["group.n", &n.to_string(), "a power of two"]);
    }
    for k in [0, 64, 129, 192, 1 << 40] {
        let r = b.block_product(&[M, 2], &[1, 2], BlockShape { n: 128, k });
        assert_error(r, kind!(Argument), &["group.k", &k.to_string(), "a power of two from 128 on"]);
    }
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
    let r =
        gemm_a8w8(&b.stream, code, b.code(&[N, K]), scale, scale, None, y, Some(s), GemmOptions::default());
    assert_error(r, kind!(Overlap), &["gemm_a8w8", "a_scale", "workspace"]);
}

fn fp8<T: hk_gemm::MatrixCode>(gpu: &Gpu) -> Result<()> {
    let stream = gpu.stream();
    let (a, w) = (stream.alloc_zeroed::<T>(M * K)?, stream.alloc_zeroed::<T>(N * K)?);
    let (scale, mut y) = (stream.alloc_zeroed::<f32>(1)?, stream.alloc_zeroed::<bf16>(M * N)?);
    let (a, w, s) = (a.part([M, K])?, w.part([N, K])?, scale.part([1])?);
    gemm_a8w8(stream, a, w, s, s, None, y.part_mut([M, N])?, None, GemmOptions::default())
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
    let r = gemm_a8w8(&b.stream, long, long, one, one, None, y, None, GemmOptions::default());
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
