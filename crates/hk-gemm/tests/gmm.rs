//! GEMMs of groups: against f64 at awkward sizes, groups and layouts; laws; errors.

use hk_core::{IndexView, Layout, bf16, f16};
use hk_gemm::{
    Accumulate, GemmOptions, GroupedOptions, GroupedTile, Half, TgmmOutputs, gemm_a16w16, gmm, nptgmm, ptgmm,
    reference::{self, Sums},
};
use hk_testkit::proptest::test_runner::TestRunner;
use hk_testkit::{
    self as kit, Array, Fill, Gpu, HostTensorF64, Place, Tensor, Tolerance, assert_error, devices, kind,
    proptest::prelude::*,
};

hk_testkit::corners_of!(hk_gemm::OPERATORS: gmm, ptgmm, nptgmm);

const TOLERANCE: Tolerance = Tolerance::Sum { terms: 1.0 / (1u64 << 18) as f64 };

/// Which axis of a matrix is contiguous, and how far its rows are apart.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Order {
    /// The first of two axes, not the second.
    turned: bool,
    pad: usize,
    shift: usize,
}

const STRAIGHT: Order = Order { turned: false, pad: 0, shift: 0 };
const TURNED: Order = Order { turned: true, ..STRAIGHT };

impl Order {
    /// A place of `[.., rows, cols]`.
    fn place(self, shape: &[usize]) -> Place {
        let [.., rows, cols] = *shape else { panic!("a matrix") };
        let (long, short) = if self.turned { (rows, cols) } else { (cols, rows) };
        let stride = long + self.pad;
        let mut strides = vec![0; shape.len()];
        let last = shape.len() - 1;
        (strides[last], strides[last - 1]) = if self.turned { (stride, 1) } else { (1, stride) };
        if last == 2 {
            strides[0] = stride * short.max(1) + self.pad * 4;
        }
        Place::new(Layout::with_strides(shape, strides).unwrap()).shifted(self.shift)
    }
}

/// A call.
#[derive(Debug, Clone)]
struct Case {
    sizes: Vec<i64>,
    wide: bool,
    m: usize,
    n: usize,
    k: usize,
    /// Of `lhs`, `rhs` and `out`.
    orders: [Order; 3],
    /// A bias, or its gradient.
    bias: bool,
    accumulate: bool,
    options: GroupedOptions,
    seed: u64,
}

impl Case {
    fn new(sizes: &[i64], [m, n, k]: [usize; 3]) -> Self {
        Self {
            sizes: sizes.to_vec(),
            wide: false,
            m,
            n,
            k,
            orders: [STRAIGHT; 3],
            bias: false,
            accumulate: false,
            options: GroupedOptions::default(),
            seed: 1,
        }
    }

    fn tile(mut self, tile: GroupedTile) -> Self {
        self.options.tile = Some(tile);
        self
    }

    fn groups(&self) -> usize {
        self.sizes.len()
    }

    fn random<T: Half>(&self, len: usize, which: u64) -> Vec<T> {
        Fill::Normal.elements(len, self.seed * 7 + which)
    }

    fn shape(&self) -> [usize; 3] {
        [self.m, self.n, self.k]
    }

    fn with_sizes<R>(&self, gpu: &Gpu, f: impl FnOnce(IndexView) -> R) -> R {
        if self.wide {
            f(gpu.upload(&self.sizes, [self.groups()]).view().into())
        } else {
            let sizes: Vec<i32> = self.sizes.iter().map(|&n| n as i32).collect();
            f(gpu.upload(&sizes, [self.groups()]).view().into())
        }
    }

    /// `gmm`, and what it should be.
    fn gmm<T: Half>(&self, gpu: &Gpu) -> (Array<T>, HostTensorF64) {
        let (g, &Self { m, n, k, .. }) = (self.groups(), self);
        let (lhs, rhs) = (self.random::<T>(m * k, 1), self.random::<T>(g * k * n, 2));
        let (bias, old) = (self.random::<T>(g * n, 3), self.random::<T>(m * n, 4));
        let rows = reference::group_rows(&self.sizes, m);
        let mut want = reference::gmm(&kit::widen(&lhs), &kit::widen(&rhs), &rows, self.shape());
        for row in 0..m {
            let group = rows.iter().position(|rows| rows.contains(&row));
            for col in 0..n {
                let at = row * n + col;
                match group {
                    None => want.values[at] = old[at].to_f64(),
                    Some(g) if self.bias => {
                        want.values[at] += bias[g * n + col].to_f64();
                        want.magnitudes[at] += bias[g * n + col].to_f64().abs();
                    }
                    Some(_) => {}
                }
            }
        }
        let lhs = gpu.upload(&lhs, self.orders[0].place(&[m, k]));
        let rhs = gpu.upload(&rhs, self.orders[1].place(&[g, k, n]));
        let bias = gpu.upload(&bias, [g, n]);
        let mut out = gpu.upload(&old, self.orders[2].place(&[m, n]));
        self.with_sizes(gpu, |sizes| {
            let bias = self.bias.then(|| bias.view());
            gmm(gpu.stream(), lhs.view(), rhs.view(), sizes, bias, out.view_mut(), self.options)
                .unwrap_or_else(|e| panic!("{self:?} on {}: {e}", gpu.spec()));
            self.finish(gpu, out, want, &[m, n])
        })
    }

    /// `ptgmm`, which is compared with `nptgmm`, and what it should be.
    fn ptgmm<T: Half>(&self, gpu: &Gpu) -> (Array<T>, HostTensorF64) {
        let (g, &Self { m, n, k, .. }) = (self.groups(), self);
        let (lhs, rhs) = (self.random::<T>(m * k, 1), self.random::<T>(m * n, 2));
        let old = self.random::<T>(g * k * n, 4);
        let rows = reference::group_rows(&self.sizes, m);
        let wide = kit::widen(&lhs);
        let mut want = reference::tgmm(&wide, &kit::widen(&rhs), &rows, self.shape());
        if self.accumulate {
            for (at, old) in old.iter().enumerate() {
                want.values[at] += old.to_f64();
                want.magnitudes[at] += old.to_f64().abs();
            }
        }
        let ones = vec![1.0; m];
        let row_sums = reference::tgmm(&wide, &ones, &rows, [m, 1, k]);

        let lhs = gpu.upload(&lhs, self.orders[0].place(&[k, m]));
        let rhs = gpu.upload(&rhs, self.orders[1].place(&[m, n]));
        let place = self.orders[2].place(&[g, k, n]);
        let mut outs = [&place; 2].map(|place| match self.accumulate {
            true => gpu.upload(&old, place),
            false => gpu.poisoned(place),
        });
        let mut sums = [(); 2].map(|()| gpu.poisoned::<f32>([g, k]));
        let of_tiles = GroupedOptions { grid: None, ..self.options };
        self.with_sizes(gpu, |sizes| {
            let ([a, b], [x, y]) = (&mut outs, &mut sums);
            let [x, y] = [x, y].map(|sums| self.bias.then(|| sums.view_mut()));
            let (lhs, rhs) = (lhs.view(), rhs.view());
            ptgmm(
                gpu.stream(),
                lhs,
                rhs,
                sizes,
                TgmmOutputs { out: a.view_mut(), bias_grad: x },
                if self.accumulate { Accumulate::Add } else { Accumulate::Overwrite },
                self.options,
            )
            .unwrap_or_else(|e| panic!("{self:?} on {}: {e}", gpu.spec()));
            nptgmm(
                gpu.stream(),
                lhs,
                rhs,
                sizes,
                TgmmOutputs { out: b.view_mut(), bias_grad: y },
                if self.accumulate { Accumulate::Add } else { Accumulate::Overwrite },
                of_tiles,
            )
            .unwrap_or_else(|e| panic!("{self:?} on {}: {e}", gpu.spec()));
        });
        let [a, b] = outs;
        let [x, y] = sums;
        kit::assert_bits(&gpu.download(&b), &gpu.download(&a));
        if self.bias {
            kit::assert_bits(&gpu.download(&y), &gpu.download(&x));
            let (got, want) = self.finish(gpu, x, row_sums, &[g, k]);
            kit::assert_near(&got, &want, TOLERANCE);
        } else {
            gpu.assert_untouched(&x);
        }
        self.finish(gpu, a, want, &[g, k, n])
    }

    fn finish<Y: hk_core::Float>(
        &self,
        gpu: &Gpu,
        out: Tensor<Y>,
        want: Sums,
        shape: &[usize],
    ) -> (Array<Y>, HostTensorF64) {
        let mut got = gpu.download(&out);
        got.label = format!("{self:?}: {}", got.label);
        gpu.assert_guards(&out);
        (got, HostTensorF64::new(shape.to_vec(), want.values).with_magnitudes(want.magnitudes))
    }

    fn check_gmm<T: Half>(&self, gpu: &Gpu) {
        let (got, want) = self.gmm::<T>(gpu);
        kit::assert_near(&got, &want, TOLERANCE);
    }

    fn check_ptgmm<T: Half>(&self, gpu: &Gpu) {
        let (got, want) = self.ptgmm::<T>(gpu);
        kit::assert_near(&got, &want, TOLERANCE);
    }
}

/// Sizes of groups for so many rows: with zeros, one giant, all in the last, fewer than the rows, more, negative, many groups.
fn groupings(m: i64) -> Vec<Vec<i64>> {
    vec![
        vec![m],
        vec![0, m / 3, 0, m - m / 3, 0],
        vec![0, 0, 0, m],
        vec![m / 4, 1, m / 4],
        vec![m / 2, m, 7, 1],
        vec![-5, m / 2, i64::from(i32::MIN), 2],
        (0..150).map(|i| i % 3).collect(),
    ]
}

#[test]
fn groups_of_any_sizes() {
    let m = 150;
    for (i, sizes) in groupings(m).iter().enumerate() {
        let mut case = Case::new(sizes, [m as usize, 72, 40]).tile(GroupedTile::T64x64);
        (case.wide, case.bias, case.accumulate) = (i % 2 == 0, i % 3 != 0, i % 2 == 1);
        case.options.grid = [None, Some(1), Some(3)][i % 3];
        for gpu in devices() {
            case.orders = [STRAIGHT, [TURNED, STRAIGHT][i % 2], STRAIGHT];
            case.check_gmm::<bf16>(&gpu);
            case.orders = [TURNED, STRAIGHT, STRAIGHT];
            case.check_ptgmm::<f16>(&gpu);
        }
    }
    // More than an i64 holds together.
    let huge = Case { wide: true, ..Case::new(&[3, i64::MAX, i64::MAX, 5], [40, 16, 16]) };
    for gpu in devices() {
        huge.check_gmm::<bf16>(&gpu);
        Case { orders: [TURNED, STRAIGHT, STRAIGHT], ..huge.clone() }.check_ptgmm::<bf16>(&gpu);
    }
}

#[test]
fn tiles_and_layouts() {
    for tile in GroupedTile::ALL {
        for (i, [m, n, k]) in [[300, 260, 72], [70, 132, 200]].into_iter().enumerate() {
            let mut case = Case::new(&[m as i64 / 3, 5, m as i64 / 2], [m, n, k]).tile(tile);
            case.bias = i == 0;
            for gpu in devices() {
                for order in [STRAIGHT, TURNED] {
                    case.orders = [STRAIGHT, order, STRAIGHT];
                    case.check_gmm::<f16>(&gpu);
                }
                if tile != GroupedTile::T32x128 {
                    case.orders = [TURNED, STRAIGHT, STRAIGHT];
                    case.check_ptgmm::<bf16>(&gpu);
                }
                if matches!(tile, GroupedTile::T128x128 | GroupedTile::T64x64) {
                    // Rows of M: groups begin and end anywhere in 16 bytes.
                    let m = m.next_multiple_of(8);
                    Case { m, orders: [STRAIGHT; 3], ..case.clone() }.check_ptgmm::<bf16>(&gpu);
                }
            }
        }
    }
}

/// Rows with gaps, aligned to 16 bytes, to 8, or not; the scalar path takes what the vectorized one does not.
#[test]
fn strides() {
    let order = |turned, pad, shift| Order { turned, pad, shift };
    let orders = [
        [order(false, 8, 0), order(true, 24, 8), order(false, 16, 0)],
        [order(false, 16, 8), order(false, 4, 4), order(false, 3, 1)],
        [order(false, 0, 1), order(false, 0, 0), order(false, 8, 8)],
        [order(true, 0, 0), order(true, 5, 3), order(false, 1, 0)],
        [order(false, 8, 0), order(false, 6, 0), order(false, 0, 0)],
    ];
    for (i, orders) in orders.into_iter().enumerate() {
        let mut case = Case::new(&[33, 0, 60], [101, 68, 48]);
        (case.orders, case.accumulate, case.bias) = (orders, i % 2 == 1, true);
        for gpu in devices() {
            case.check_gmm::<bf16>(&gpu);
            // The same for columns of K: of lhs the first axis, of rhs the second.
            let [lhs, rhs, out] = orders;
            let turned = |order: Order| Order { turned: !order.turned, ..order };
            let of_tgmm = Case { orders: [turned(lhs), turned(rhs), out], ..case.clone() };
            of_tgmm.check_ptgmm::<bf16>(&gpu);
        }
    }
}

/// One column of K, one row, one output; lengths that vectors and tiles do not divide.
#[test]
fn awkward_lengths() {
    for (i, [m, n, k]) in
        [[1, 1, 1], [5, 4, 1], [1, 4, 4], [3, 8, 2], [65, 129, 33], [129, 68, 8], [40, 200, 100]]
            .into_iter()
            .enumerate()
    {
        let mut case = Case::new(&[m as i64 / 2, 0, m as i64], [m, n, k]);
        case.bias = i % 2 == 0;
        for gpu in devices() {
            case.check_gmm::<f16>(&gpu);
            case.orders = [TURNED, STRAIGHT, STRAIGHT];
            case.check_ptgmm::<f16>(&gpu);
            case.orders = [STRAIGHT; 3];
        }
    }
}

/// A single column of K of a broadcast or infinite operand meets no other column.
#[test]
fn columns_past_the_last_are_not_read() {
    for gpu in devices() {
        let (m, n, k) = (3, 8, 8);
        let lhs = gpu.upload(&vec![bf16::ONE; m * k], [m, k]);
        let row = gpu.upload(&vec![bf16::INFINITY; n], [1, 1, n]);
        // Every column of K is the same row of memory: the scalar path.
        let rhs = row.view().broadcast([1, k, n]).unwrap();
        let sizes = gpu.upload(&[m as i32], [1]);
        let mut out = gpu.poisoned::<bf16>([m, n]);
        gmm(gpu.stream(), lhs.view(), rhs, sizes.view(), None, out.view_mut(), GroupedOptions::default())
            .unwrap();
        kit::assert_bits(&gpu.download(&out), &vec![bf16::INFINITY; m * n]);
        // Groups of one row.
        let sizes = gpu.upload(&[1i32, 1, 1], [3]);
        let mut out = gpu.poisoned::<bf16>([3, k, n]);
        let lhs = gpu.upload(&vec![bf16::INFINITY; m * k], Order::place(TURNED, &[k, m]));
        let rhs = gpu.upload(&vec![bf16::INFINITY; m * n], [m, n]);
        let options = GroupedOptions { tile: Some(GroupedTile::T64x64), grid: None };
        ptgmm(
            gpu.stream(),
            lhs.view(),
            rhs.view(),
            sizes.view(),
            TgmmOutputs { out: out.view_mut(), bias_grad: None },
            Accumulate::Overwrite,
            options,
        )
        .unwrap();
        kit::assert_bits(&gpu.download(&out), &vec![bf16::INFINITY; 3 * k * n]);
    }
}

/// One group is the plain GEMM, bit by bit where the sums are in the same order.
#[test]
fn one_group_is_a_gemm() {
    let (m, n, k) = (130, 136, 264);
    let case = Case::new(&[m as i64], [m, n, k]).tile(GroupedTile::T64x64);
    let turned = Case { orders: [STRAIGHT, TURNED, STRAIGHT], ..case.clone() };
    for gpu in devices() {
        let (straight, _) = case.gmm::<bf16>(&gpu);
        let (per_row, _) = turned.gmm::<bf16>(&gpu);
        kit::assert_bits(&per_row, &straight);
        let a = gpu.upload(&case.random::<bf16>(m * k, 1), [m, k]);
        let w = gpu.upload(&case.random::<bf16>(k * n, 2), TURNED.place(&[k, n]));
        let w = w.view().transpose(0, 1).unwrap();
        let mut y = gpu.poisoned::<bf16>([m, n]);
        let config = Some(hk_gemm::GemmConfig { tile: hk_gemm::GemmTile::T64x64, splits: 1, group: 1 });
        let options = GemmOptions { config, ..GemmOptions::default() };
        gemm_a16w16(gpu.stream(), a.view(), w, None, y.view_mut(), None, options).unwrap();
        kit::assert_bits(&straight, &gpu.download(&y));
    }
}

/// A row, and a group, have the same bits whatever the others are.
#[test]
fn groups_are_independent() {
    let (m, n, k) = (200, 72, 104);
    for gpu in devices() {
        for (tile, grid) in [(GroupedTile::T64x64, 2), (GroupedTile::T32x128, 5), (GroupedTile::Elements, 1)]
        {
            let mut case = Case::new(&[70, 50, 80], [m, n, k]).tile(tile);
            let (all, _) = case.gmm::<f16>(&gpu);
            case.options.grid = Some(grid);
            kit::assert_bits(&case.gmm::<f16>(&gpu).0, &all);
            // Not a number in a group's matrix, or in rows of another, is nowhere else.
            let (lhs, rhs) = (case.random::<f16>(m * k, 1), case.random::<f16>(3 * k * n, 2));
            let mut spoilt = (lhs.clone(), rhs.clone());
            spoilt.0[69 * k..70 * k].fill(f16::NAN);
            spoilt.1[2 * k * n..].fill(f16::INFINITY);
            let (lhs, rhs) = (gpu.upload(&spoilt.0, [m, k]), gpu.upload(&spoilt.1, [3, k, n]));
            let sizes = gpu.upload(&[70i64, 50, 80], [3]);
            let mut out = gpu.poisoned::<f16>([m, n]);
            gmm(gpu.stream(), lhs.view(), rhs.view(), sizes.view(), None, out.view_mut(), case.options)
                .unwrap();
            let got = gpu.download(&out);
            for row in (0..69).chain(70..120) {
                assert_eq!(got.row(row), all.row(row), "{tile:?} {row}");
            }
            assert!(got[69 * n..70 * n].iter().chain(&got[120 * n..]).all(|y| !y.is_finite()));
        }
        // Rows of other groups are no part of a group's sums.
        let (lhs, rhs) = (vec![bf16::ONE; m * k], vec![bf16::ONE; m * n]);
        let mut spoilt = lhs.clone();
        spoilt[..70 * k].fill(bf16::NAN);
        spoilt[120 * k..].fill(bf16::INFINITY);
        let turned: Vec<bf16> = (0..m * k).map(|i| spoilt[i % m * k + i / m]).collect();
        let rows = [gpu.upload(&spoilt, [m, k]), gpu.upload(&turned, [k, m])];
        let mut spoilt = rhs;
        spoilt[..70 * n].fill(bf16::INFINITY);
        spoilt[120 * n..].fill(bf16::NAN);
        let rhs = gpu.upload(&spoilt, [m, n]);
        let sizes = gpu.upload(&[70i32, 50, 80], [3]);
        for lhs in [rows[0].view().transpose(0, 1).unwrap(), rows[1].view()] {
            for tile in [GroupedTile::T64x64, GroupedTile::T128x128, GroupedTile::Elements] {
                let mut out = gpu.poisoned::<bf16>([3, k, n]);
                let options = GroupedOptions { tile: Some(tile), grid: None };
                ptgmm(
                    gpu.stream(),
                    lhs,
                    rhs.view(),
                    sizes.view(),
                    TgmmOutputs { out: out.view_mut(), bias_grad: None },
                    Accumulate::Overwrite,
                    options,
                )
                .unwrap();
                let got = gpu.download(&out);
                assert!(got[k * n..2 * k * n].iter().all(|y| y.to_f32() == 50.0), "{tile:?} {lhs:?}");
                assert!(got[..k * n].iter().all(|y| y.is_nan()));
            }
        }
    }
}

/// No rows: `gmm` writes nothing, `ptgmm` zeros, or nothing if it accumulates.
#[test]
fn no_rows() {
    for gpu in devices() {
        let none = Case::new(&[3, 4], [0, 8, 8]);
        gpu.assert_nothing_launched(|| none.check_gmm::<bf16>(&gpu));
        for accumulate in [false, true] {
            Case { accumulate, bias: true, ..none.clone() }.check_ptgmm::<bf16>(&gpu);
        }
        // What nothing is added to keeps its bits, the sign of zero too.
        let (lhs, rhs) = (gpu.upload(&[bf16::ONE; 32], [8, 4]), gpu.upload(&[bf16::ONE; 32], [4, 8]));
        let sizes = gpu.upload(&[4i32, 0], [2]);
        let mut out = gpu.upload(&[bf16::from_f32(-0.0); 128], [2, 8, 8]);
        let options = GroupedOptions::default();
        ptgmm(
            gpu.stream(),
            lhs.view(),
            rhs.view(),
            sizes.view(),
            TgmmOutputs { out: out.view_mut(), bias_grad: None },
            Accumulate::Add,
            options,
        )
        .unwrap();
        let want: Vec<bf16> = (0..128).map(|i| bf16::from_f32(if i < 64 { 4.0 } else { -0.0 })).collect();
        kit::assert_bits(&gpu.download(&out), &want);
    }
}

#[test]
fn random() {
    let gpus = devices();
    let side = || kit::size(1..=150, &[32, 64, 128]);
    let sizes = proptest::collection::vec(prop_oneof![4 => 0i64..60, 1 => -3i64..1, 1 => 0i64..400], 1..12);
    let order = || (any::<bool>(), prop_oneof![3 => Just(0usize), 1 => Just(8), 1 => 1usize..9], 0usize..9);
    let layout = (order(), order(), order(), 0..GroupedTile::ALL.len() + 2, 1usize..20);
    let strategy = (sizes, [side(), side(), side()], layout, any::<[bool; 3]>(), any::<u64>());
    let run = |(sizes, shape, (a, b, c, tile, grid), [wide, bias, accumulate], seed): (
        Vec<i64>,
        [usize; 3],
        _,
        [bool; 3],
        u64,
    )| {
        let order = |(turned, pad, shift)| Order { turned, pad, shift };
        let out = Order { turned: false, ..order(c) };
        let [m, n, k] = shape.map(|n: usize| if seed % 3 == 0 { n } else { n.next_multiple_of(8) });
        let orders = [order(a), order(b), out];
        let grid = (seed % 2 == 0).then_some(grid);
        let mut case =
            Case { wide, bias, accumulate, orders, seed: seed % 1000, ..Case::new(&sizes, [m, n, k]) };
        case.options.grid = grid;
        for gpu in &gpus {
            case.options.tile = (tile == 0).then_some(GroupedTile::Elements);
            case.check_gmm::<bf16>(gpu);
            case.check_ptgmm::<f16>(gpu);
        }
        Ok(())
    };
    TestRunner::new(kit::config()).run(&strategy, run).unwrap();
}

#[test]
fn errors() {
    let gpu = Gpu::open("emu:gfx942");
    let stream = gpu.stream();
    let (m, n, k) = (16, 16, 16);
    let half = |shape: &[usize]| gpu.poisoned::<bf16>(Place::contiguous(shape));
    let (lhs, rhs, sizes) = (half(&[m, k]), half(&[2, k, n]), gpu.upload(&[4i32, 5], [2]));
    let default = GroupedOptions::default();
    let bad = |lhs: &Tensor<bf16>,
               rhs: &Tensor<bf16>,
               sizes: IndexView,
               bias: Option<&Tensor<bf16>>,
               out: &mut Tensor<bf16>,
               options,
               kind,
               parts: &[&str]| {
        let bias = bias.map(Tensor::view);
        assert_error(gmm(stream, lhs.view(), rhs.view(), sizes, bias, out.view_mut(), options), kind, parts);
        gpu.assert_untouched(out);
    };
    let mut out = half(&[m, n]);
    let ok: IndexView = sizes.view().into();
    bad(&half(&[m]), &rhs, ok, None, &mut out, default, kind!(Shape), &["gmm", "lhs", "[16]"]);
    bad(&lhs, &half(&[k, n]), ok, None, &mut out, default, kind!(Shape), &["rhs", "[16, 16]"]);
    bad(
        &lhs,
        &half(&[2, 8, n]),
        ok,
        None,
        &mut out,
        default,
        kind!(Shape),
        &["rhs", "[G, 16, N] (K of lhs)"],
    );
    bad(
        &lhs,
        &half(&[3, k, n]),
        ok,
        None,
        &mut out,
        default,
        kind!(Shape),
        &["group_sizes", "[3] (G of rhs)"],
    );
    let table = gpu.upload(&[1i32, 2], [1, 2]);
    bad(
        &lhs,
        &rhs,
        table.view().into(),
        None,
        &mut out,
        default,
        kind!(Shape),
        &["group_sizes", "[1, 2]", "[G]"],
    );
    let apart = gpu.upload(&[1i64, 2], Place::new(Layout::with_strides([2], [2]).unwrap()));
    bad(&lhs, &rhs, apart.view().into(), None, &mut out, default, kind!(Stride), &["group_sizes"]);
    bad(&lhs, &rhs, ok, Some(&half(&[2, 8])), &mut out, default, kind!(Shape), &["bias", "[2, 16]"]);
    let gaps = gpu.poisoned(Place::rows([2, n], n + 1));
    bad(&lhs, &rhs, ok, Some(&gaps), &mut out, default, kind!(Stride), &["bias"]);
    bad(&lhs, &rhs, ok, None, &mut half(&[m, 8]), default, kind!(Shape), &["out", "[16, 16]"]);
    let mut turned = gpu.poisoned(TURNED.place(&[m, n]));
    bad(&lhs, &rhs, ok, None, &mut turned, default, kind!(Stride), &["out"]);
    for (shape, axis) in [([0, k, n], "axis 0"), ([2, 0, n], "axis 1"), ([2, k, 0], "axis 2")] {
        let [g, k, n] = shape;
        let sizes = gpu.upload(&[1i32, 2][..g], [g]);
        bad(
            &half(&[m, k]),
            &half(&shape),
            sizes.view().into(),
            None,
            &mut half(&[m, n]),
            default,
            kind!(Empty),
            &["rhs", axis],
        );
    }
    let grid = GroupedOptions { grid: Some(0), ..default };
    bad(&lhs, &rhs, ok, None, &mut out, grid, kind!(Argument), &["grid", "at least one block"]);
    let tile = GroupedOptions { tile: Some(GroupedTile::T64x64), ..default };
    bad(
        &gpu.poisoned(TURNED.place(&[m, k])),
        &rhs,
        ok,
        None,
        &mut out,
        tile,
        kind!(Argument),
        &["tile", "T64x64", "[Elements]"],
    );
    let most = GroupedOptions { grid: Some(u32::MAX as usize), ..default };
    bad(&lhs, &rhs, ok, None, &mut out, most, kind!(TooLarge), &["out", "blocks"]);
    let one = gpu.poisoned::<bf16>([1, 1, 1]);
    let long = one.view().broadcast([1, 1 << 31, 1]).unwrap();
    let lone = gpu.poisoned::<bf16>([1, 1]);
    let wide = lone.view().broadcast([1, 1 << 31]).unwrap();
    let single = gpu.upload(&[1i32], [1]);
    let mut small = half(&[1, 1]);
    let result = gmm(stream, wide, long, single.view(), None, small.view_mut(), default);
    assert_error(result, kind!(TooLarge), &["lhs", "axis 1"]);
    // An output that is an input too.
    let mut both = half(&[m, n]);
    let view = both.view_mut();
    let result = gmm(stream, view.alias(), rhs.view(), sizes.view(), None, view, default);
    assert_error(result, kind!(Overlap), &["lhs", "out"]);
    let other = Gpu::open("emu:gfx950");
    let far = other.poisoned::<bf16>([m, k]);
    let result = gmm(stream, far.view(), rhs.view(), sizes.view(), None, out.view_mut(), default);
    assert_error(result, kind!(DeviceMismatch), &["lhs"]);
    gpu.assert_untouched(&out);

    let (lhs, rhs) = (half(&[k, m]), half(&[m, n]));
    let bad = |lhs: &Tensor<bf16>,
               rhs: &Tensor<bf16>,
               out: &mut Tensor<bf16>,
               sums: Option<&mut Tensor<f32>>,
               options,
               kind,
               parts: &[&str]| {
        let sums = sums.map(Tensor::view_mut);
        let result = ptgmm(
            stream,
            lhs.view(),
            rhs.view(),
            sizes.view(),
            TgmmOutputs { out: out.view_mut(), bias_grad: sums },
            Accumulate::Overwrite,
            options,
        );
        assert_error(result, kind, parts);
        gpu.assert_untouched(out);
    };
    let mut out = half(&[2, k, n]);
    bad(&half(&[k]), &rhs, &mut out, None, default, kind!(Shape), &["ptgmm", "lhs"]);
    bad(&lhs, &half(&[8, n]), &mut out, None, default, kind!(Shape), &["rhs", "[16, N] (M of lhs)"]);
    bad(&lhs, &rhs, &mut half(&[3, k, n]), None, default, kind!(Shape), &["out", "[2, 16, 16]"]);
    bad(&lhs, &rhs, &mut gpu.poisoned(TURNED.place(&[2, k, n])), None, default, kind!(Stride), &["out"]);
    bad(
        &lhs,
        &rhs,
        &mut out,
        Some(&mut gpu.poisoned([2, 8])),
        default,
        kind!(Shape),
        &["bias_grad", "[2, 16]"],
    );
    let mut gaps = gpu.poisoned(Place::rows([2, k], k + 1));
    bad(&lhs, &rhs, &mut out, Some(&mut gaps), default, kind!(Stride), &["bias_grad"]);
    bad(&half(&[0, m]), &rhs, &mut half(&[2, 0, n]), None, default, kind!(Empty), &["out", "axis 1"]);
    bad(&lhs, &half(&[m, 0]), &mut half(&[2, k, 0]), None, default, kind!(Empty), &["out", "axis 2"]);
    bad(&lhs, &rhs, &mut out, None, grid, kind!(Argument), &["grid", "at least one block"]);
    let small = GroupedOptions { tile: Some(GroupedTile::T32x128), ..default };
    bad(&lhs, &rhs, &mut out, None, small, kind!(Argument), &["tile", "T32x128"]);
    let odd = gpu.poisoned(Place::rows([k, m], m + 1));
    bad(&odd, &rhs, &mut out, None, tile, kind!(Argument), &["tile", "[Elements]"]);
    let largest = GroupedOptions { tile: Some(GroupedTile::T256x256), ..default };
    bad(&lhs, &rhs, &mut out, None, largest, kind!(Argument), &["tile", "T256x256"]);
    let result = nptgmm(
        stream,
        lhs.view(),
        rhs.view(),
        sizes.view(),
        TgmmOutputs { out: out.view_mut(), bias_grad: None },
        Accumulate::Overwrite,
        GroupedOptions { grid: Some(4), ..default },
    );
    assert_error(result, kind!(Argument), &["nptgmm", "grid", "a block for each tile"]);
    let view = out.view_mut();
    let result = ptgmm(
        stream,
        view.alias().slice(0, 0..1).unwrap().flatten_rows("", "").unwrap(),
        rhs.view(),
        sizes.view(),
        TgmmOutputs { out: view, bias_grad: None },
        Accumulate::Overwrite,
        default,
    );
    assert_error(result, kind!(Overlap), &["lhs", "out"]);
}

/// No bank of LDS is met twice on the way of operands, transposed or not: what a longer sum adds has no conflicts.
#[test]
fn stages_have_no_bank_conflicts() {
    for target in ["gfx942", "gfx950"] {
        let gpu = Gpu::open(&format!("emu:{target}?details=true"));
        let clocks = |run: &dyn Fn()| {
            run();
            let counted = gpu.stream().take_counters().unwrap().and_then(|c| c.details).unwrap();
            [counted.lds_clocks, counted.lds_conflict_clocks]
        };
        for tile in GroupedTile::ALL.into_iter().filter(|&tile| tile != GroupedTile::Elements) {
            for order in [STRAIGHT, TURNED] {
                let mut case = Case::new(&[128], [128, 128, 32]).tile(tile);
                case.orders[1] = order;
                let longer = Case { k: 128, ..case.clone() };
                let [few, more] = [case, longer].map(|case| clocks(&|| case.check_gmm::<bf16>(&gpu)));
                assert!(
                    more[0] > few[0] && more[1] == few[1],
                    "{target} {tile:?} {order:?}: {few:?} {more:?}"
                );
            }
            if tile != GroupedTile::T32x128 {
                let case = Case {
                    orders: [TURNED, STRAIGHT, STRAIGHT],
                    ..Case::new(&[32], [32, 128, 128]).tile(tile)
                };
                let longer = Case { sizes: vec![128], m: 128, ..case.clone() };
                let [few, more] = [case, longer].map(|case| clocks(&|| case.check_ptgmm::<bf16>(&gpu)));
                assert!(more[0] > few[0] && more[1] == few[1], "{target} {tile:?}: {few:?} {more:?}");
            }
        }
    }
}
