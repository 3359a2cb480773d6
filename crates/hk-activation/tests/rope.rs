//! `rope_cached`, `rope_freqs` and `rope_qk` on the emulated GPUs (and real ones where there are some) against their f64
//! reference and their laws.

mod common;

use common::{Case, Integers, angles, cos_sin, dense, rotation, run, run_in_place};
use hk_activation::{reference, rope_cached, rope_freqs, rope_qk};
use hk_core::rope::reference::Tables;
use hk_core::rope::{
    Positions, Rope, RopeAngles, RopeElement, RopeLayout, RopeSpan, RopeStyle, RopeTableWidth, RopeTables,
};
use hk_core::{Float, Layout, TensorView, TensorViewMut, bf16, f16};
use hk_testkit::{
    self as kit, Fill, Gpu, Place, Tensor, Tolerance, assert_error, floats, kind, proptest::prelude::*, widen,
};

const LAYOUTS: [RopeLayout; 4] = [RopeLayout::Bhsd, RopeLayout::Sbhd, RopeLayout::Bshd, RopeLayout::Thd];

/// Near the f64 reference in every element, with guards around, out of place and in place.
#[track_caller]
fn check<T: Float, C: RopeElement<T> + Float>(case: &Case, tables: &Tables) {
    let x: Vec<T> = case.elements();
    let (cos, sin): (Vec<C>, Vec<C>) = case.rounded(tables);
    let tables = Tables { cos: widen(&cos), sin: widen(&sin) };
    let want =
        reference::rope::rope(&widen(&x), &case.shape(), case.layout, &tables, &case.rows(), &case.rope);
    for gpu in kit::devices() {
        let got = run(&gpu, case, &x, &cos, &sin);
        kit::assert_close(&got, &want, Tolerance::Elementwise);
        kit::assert_bits(&run_in_place(&gpu, case, &x, &cos, &sin), &got);
        assert_passed_through(case, &x, &got);
    }
}

/// What is not rotated has the bits that it had, but for tokens without a row.
#[track_caller]
fn assert_passed_through<T: Float>(case: &Case, x: &[T], got: &[T]) {
    let dim = case.head_dim;
    for (i, (x, got)) in x.chunks(dim).zip(got.chunks(dim)).enumerate() {
        if case.rows()[case.token(i)].is_none() {
            assert!(got.iter().all(|v| v.to_f64().is_nan()), "head {i}");
            continue;
        }
        let rest = match case.rope.span {
            RopeSpan::First => case.rope.rotary..dim,
            RopeSpan::Last => 0..dim - case.rope.rotary,
        };
        assert_eq!(
            bytemuck::cast_slice::<T, u8>(&got[rest.clone()]),
            bytemuck::cast_slice::<T, u8>(&x[rest])
        );
    }
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn matches_f64_reference(case in common::case(), kind in 0usize..5) {
        let tables = case.tables();
        match kind {
            0 => check::<bf16, bf16>(&case, &tables),
            1 => check::<bf16, f32>(&case, &tables),
            2 => check::<f16, f16>(&case, &tables),
            3 => check::<f16, f32>(&case, &tables),
            _ => check::<f32, f32>(&case, &tables),
        }
    }

    /// The bits of a head do not depend on tensors around it, on its place, or on how memory is accessed.
    #[test]
    fn a_head_does_not_depend_on_its_surroundings(case in common::case()) {
        let x: Vec<bf16> = case.elements();
        let (cos, sin): (Vec<f32>, Vec<f32>) = case.rounded(&case.tables());
        let plain = Case { strided: false, shift: 0, ..case.clone() };
        let odd = Case { strided: true, shift: 1, ..case.clone() };
        for gpu in kit::devices() {
            let want = run(&gpu, &plain, &x, &cos, &sin);
            kit::assert_bits(&run(&gpu, &odd, &x, &cos, &sin), &want);
            // The first token of the first batch alone.
            let first: Vec<bf16> = (0..case.heads)
                .flat_map(|h| {
                    let at = case.head(0, 0, h) * case.head_dim;
                    x[at..at + case.head_dim].to_vec()
                })
                .collect();
            let alone = Case { layout: RopeLayout::Thd, batches: 1, tokens: 1, ..plain.clone() }.with_rows_of(&case);
            let got = run(&gpu, &alone, &first, &cos, &sin);
            for h in 0..case.heads {
                let at = case.head(0, 0, h) * case.head_dim;
                let bits = |v: &[bf16]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                prop_assert_eq!(bits(got.row(h)), bits(&want[at..at + case.head_dim]));
            }
        }
    }

    /// Pairs keep their norm, and rotating back gives what there was.
    #[test]
    fn rotation_keeps_norms_and_can_be_undone(case in common::case()) {
        let case = Case {
            rope: Rope { table: RopeTableWidth::Half, inverse: false, ..case.rope },
            given: None, offsets: None, starts: None, rows: case.batches * case.tokens,
            ..case
        };
        let x: Vec<f32> = case.elements();
        let (cos, sin) = cos_sin(&angles(case.rows, &case.rope, 1e4));
        let back = Case { rope: Rope { inverse: true, ..case.rope }, ..case.clone() };
        for gpu in kit::devices() {
            let y = run(&gpu, &case, &x, &cos, &sin);
            for (x, y) in x.chunks(case.head_dim).zip(y.chunks(case.head_dim)) {
                for (a, b) in case.pairs() {
                    let norm = |v: &[f32]| f64::from(v[a]).hypot(f64::from(v[b]));
                    let (x, y) = (norm(x), norm(y));
                    prop_assert!((x - y).abs() <= 2.0 * f64::from(f32::EPSILON) * x, "{} {}", x, y);
                }
            }
            let again = run(&gpu, &back, &y, &cos, &sin);
            for (x, z) in x.chunks(case.head_dim).zip(again.chunks(case.head_dim)) {
                for (a, b) in case.pairs() {
                    // Two units in the last place of the larger of the pair.
                    let unit = f64::from(f32::EPSILON) * f64::from(x[a].abs().max(x[b].abs()));
                    for i in [a, b] {
                        prop_assert!((f64::from(x[i]) - f64::from(z[i])).abs() <= 2.0 * unit, "{} {}", x[i], z[i]);
                    }
                }
            }
        }
    }

    /// One style is the other with the columns permuted, to the bit.
    #[test]
    fn styles_differ_by_a_permutation(case in common::case()) {
        // Column `a` of a pair in either style, and `b`.
        let neox = Case { rope: Rope { style: RopeStyle::Neox, ..case.rope }, ..case.clone() };
        let interleaved = Case { rope: Rope { style: RopeStyle::Interleaved, ..case.rope }, ..case.clone() };
        let permute = |x: &[f16]| -> Vec<f16> {
            let mut out = x.to_vec();
            for (head, from) in out.chunks_mut(case.head_dim).zip(x.chunks(case.head_dim)) {
                for ((a, b), (c, d)) in interleaved.pairs().into_iter().zip(neox.pairs()) {
                    (head[a], head[b]) = (from[c], from[d]);
                }
            }
            out
        };
        let tables = case.tables();
        let (cos, sin): (Vec<f32>, Vec<f32>) = case.rounded(&tables);
        // Full tables have columns to permute as well.
        let table = |t: &[f32]| -> Vec<f32> {
            if case.rope.table == RopeTableWidth::Half {
                return t.to_vec();
            }
            let half = case.rope.rotary / 2;
            t.chunks(2 * half).flat_map(|row| (0..2 * half).map(|i| row[i / 2 + i % 2 * half]).collect::<Vec<_>>()).collect()
        };
        let x: Vec<f16> = case.elements();
        for gpu in kit::devices() {
            let want = permute(&run(&gpu, &neox, &x, &cos, &sin));
            let got = run(&gpu, &interleaved, &permute(&x), &table(&cos), &table(&sin));
            kit::assert_bits(&got, &want);
        }
    }

    /// Rotating by p and then by q is rotating by p + q.
    #[test]
    fn rotations_add_up(case in common::case(), p in 0i64..40, q in 0i64..40) {
        let case = Case { rope: Rope { inverse: false, table: RopeTableWidth::Half, ..case.rope }, starts: None, offsets: None, rows: 80, ..case };
        let at = |position| Case { given: Some(Integers { values: vec![position; case.batches * case.tokens], wide: true }), ..case.clone() };
        let x: Vec<f32> = case.elements();
        let (cos, sin) = cos_sin(&angles(80, &case.rope, 1e4));
        for gpu in kit::devices() {
            let twice = run(&gpu, &at(q), &run(&gpu, &at(p), &x, &cos, &sin), &cos, &sin);
            let once = run(&gpu, &at(p + q), &x, &cos, &sin);
            kit::assert_close(&twice, &widen(&once), Tolerance::Within { rtol: 1e-5, atol: 1e-5 });
        }
    }

    /// Queries and keys in one launch are what they are in two.
    #[test]
    fn queries_and_keys_together_are_each_alone(case in common::case(), kv_heads in 1usize..4, alias: bool) {
        let keys = Case { heads: kv_heads, seed: case.seed ^ 1, ..case.clone() };
        let (q, k): (Vec<bf16>, Vec<bf16>) = (case.elements(), keys.elements());
        let (cos, sin): (Vec<bf16>, Vec<bf16>) = case.rounded(&case.tables());
        for gpu in kit::devices() {
            let want = (run(&gpu, &case, &q, &cos, &sin), run(&gpu, &keys, &k, &cos, &sin));
            let inputs = case.upload(&gpu, &cos, &sin);
            let (mut q_in, mut k_in) = (gpu.upload(&q, case.place()), gpu.upload(&k, keys.place()));
            let (mut q_out, mut k_out) = (gpu.poisoned(case.place()), gpu.poisoned(keys.place()));
            let (rope, layout) = (case.rope, case.layout);
            if alias {
                let (q_view, k_view) = (q_in.view_mut(), k_in.view_mut());
                rope_qk(gpu.stream(), q_view.alias(), k_view.alias(), inputs.tables(), q_view, k_view, rope, layout).unwrap();
                kit::assert_bits(&gpu.download(&q_in), &want.0);
                kit::assert_bits(&gpu.download(&k_in), &want.1);
                gpu.assert_guards(&q_in);
                gpu.assert_guards(&k_in);
            } else {
                rope_qk(gpu.stream(), q_in.view(), k_in.view(), inputs.tables(), q_out.view_mut(), k_out.view_mut(), rope, layout).unwrap();
                kit::assert_bits(&gpu.download(&q_out), &want.0);
                kit::assert_bits(&gpu.download(&k_out), &want.1);
                gpu.assert_guards(&q_out);
                gpu.assert_guards(&k_out);
                gpu.assert_untouched(&q_in);
                gpu.assert_untouched(&k_in);
            }
        }
    }
}

/// Widths and parts of heads that models have, by vectors and by elements, with both styles and tables.
#[test]
fn every_width() {
    let sizes = [
        (2, 2),
        (32, 32),
        (32, 2),
        (64, 64),
        (64, 32),
        (80, 80),
        (80, 40),
        (80, 64),
        (96, 96),
        (96, 48),
        (128, 128),
        (128, 64),
        (128, 32),
        (192, 64),
        (256, 256),
        (256, 128),
        (576, 64),
        (576, 576),
        (130, 66),
        (6, 4),
    ];
    let mut n = 0;
    for (head_dim, rotary) in sizes {
        for style in [RopeStyle::Neox, RopeStyle::Interleaved] {
            for table in [RopeTableWidth::Half, RopeTableWidth::Full] {
                n += 1;
                let span = if n % 3 == 0 { RopeSpan::Last } else { RopeSpan::First };
                let rope = Rope { style, table, rotary, span, inverse: n % 5 == 0 };
                let case = Case {
                    layout: LAYOUTS[n % 4],
                    batches: if n % 4 == 3 { 1 } else { 2 },
                    tokens: 5,
                    heads: 3,
                    head_dim,
                    rope,
                    given: None,
                    offsets: None,
                    starts: None,
                    rows: 5,
                    strided: false,
                    shift: 0,
                    seed: n as u64,
                };
                match n % 3 {
                    0 => check::<bf16, f32>(&case, &case.tables()),
                    1 => check::<f16, f16>(&case, &case.tables()),
                    _ => check::<f32, f32>(&case, &case.tables()),
                }
            }
        }
    }
}

/// Shapes of the specification, from none to many tokens and heads.
#[test]
fn numbers_of_tokens_and_heads() {
    let most = if kit::full() { 1024 } else { 40 };
    for (i, heads) in [1, 8, 32, 64, 128].into_iter().enumerate() {
        for (j, tokens) in [0, 1, 31, most].into_iter().enumerate() {
            let rope = rotation(64, RopeStyle::Neox);
            let case = Case { layout: LAYOUTS[(i + j) % 4], ..dense(tokens, heads, 64, rope) };
            check::<bf16, f32>(&case, &Tables::of_angles(&angles(case.rows, &rope, 5e5)));
        }
    }
}

/// An angle of zero changes nothing, to the bit.
#[test]
fn position_zero_is_the_identity() {
    fn identity<T: Float>(style: RopeStyle) {
        for (head_dim, rotary) in [(64, 64), (48, 18), (128, 64)] {
            let case = dense(9, 5, head_dim, rotation(rotary, style));
            let x: Vec<T> = case.elements();
            let n = case.rows * case.rope.table_width();
            let (cos, sin) = (floats::<T>(&vec![1.0; n]), floats::<T>(&vec![0.0; n]));
            for gpu in kit::devices() {
                kit::assert_bits(&run(&gpu, &case, &x, &cos, &sin), &x);
            }
        }
    }
    for style in [RopeStyle::Neox, RopeStyle::Interleaved] {
        identity::<bf16>(style);
        identity::<f16>(style);
        identity::<f32>(style);
    }
}

/// The product of a rotated query and a rotated key depends on the difference of their positions alone.
#[test]
fn products_depend_on_the_distance() {
    let rope = rotation(64, RopeStyle::Interleaved);
    let case = dense(1, 1, 64, rope);
    let q: Vec<f32> = case.elements();
    let k: Vec<f32> = Case { seed: 8, ..case.clone() }.elements();
    let (cos, sin) = cos_sin(&angles(64, &rope, 1e4));
    let case = Case { rows: 64, ..case };
    for gpu in kit::devices() {
        let at = |x: &[f32], position| {
            let given = Some(Integers { values: vec![position], wide: false });
            run(&gpu, &Case { given, ..case.clone() }, x, &cos, &sin)
        };
        let product =
            |m, n| at(&q, m).iter().zip(at(&k, n).iter()).map(|(a, b)| f64::from(a * b)).sum::<f64>();
        for (m, n, by) in [(5, 3, 40), (0, 17, 46), (9, 9, 54)] {
            let (near, far) = (product(m, n), product(m + by, n + by));
            assert!((near - far).abs() <= 1e-4 * near.abs().max(1.0), "{near} {far}");
        }
    }
}

/// Positions that are in no table poison their token and no other, wherever the number comes from.
#[test]
fn tokens_without_a_row_are_poisoned() {
    let rope = Rope { span: RopeSpan::Last, ..rotation(32, RopeStyle::Neox) };
    let base = Case { rows: 16, ..dense(8, 3, 48, rope) };
    let far = [i64::MIN, i64::MAX, -1, 16, 15, 0, 1 << 32, 3];
    let given = |values: &[i64], wide| Some(Integers { values: values.to_vec(), wide });
    let cases = [
        Case { given: given(&far, true), ..base.clone() },
        Case {
            given: given(&far, true),
            offsets: given(&[i64::MIN, i64::MAX, 1, -1, 1, -1, -(1 << 32), 2], true),
            ..base.clone()
        },
        Case {
            given: given(&[-1, 16, 15, 0, i32::MIN.into(), i32::MAX.into(), 3, 4], false),
            ..base.clone()
        },
        Case { offsets: given(&[0, -2, 20, 3, 11, 12, 9, 8], false), ..base.clone() },
        // Sequences 1..3, none, 3..7; the tokens before and after have none.
        Case { starts: given(&[1, 3, 3, 7], false), offsets: given(&[1; 8], true), ..base.clone() },
    ];
    for (i, case) in cases.into_iter().enumerate() {
        let poisoned = case.rows().iter().filter(|row| row.is_none()).count();
        assert!(poisoned > 0 && poisoned < 8, "case {i}: {poisoned}");
        check::<bf16, f32>(&case, &case.tables());
        check::<f32, f32>(&Case { shift: 1, ..case.clone() }, &case.tables());
    }
    // Starts that are not ascending are no reason to leave the tables.
    for starts in [vec![5, -3, 9, 2], vec![i64::MIN, i64::MAX, 0], vec![7], vec![0; 9]] {
        let case = Case { starts: Some(Integers { values: starts, wide: true }), ..base.clone() };
        let x: Vec<f32> = case.elements();
        let (cos, sin): (Vec<f32>, Vec<f32>) = case.rounded(&case.tables());
        for gpu in kit::devices() {
            run(&gpu, &case, &x, &cos, &sin);
        }
    }
}

/// Angles of models, up to 1e5 and beyond: cosines and sines of the kernel are within 1e-6, so a pair within 2e-6 of its
/// norm; and the result is what tables of the true ones give.
#[test]
fn large_angles_keep_their_precision() {
    let half = 64;
    let n = if kit::full() { 2048 } else { 64 };
    let mut angles: Vec<f32> =
        (0..n * half).map(|i| (i as f32).powf(2.1) * 1.0e-3 * if i % 3 == 0 { -1.0 } else { 1.0 }).collect();
    let special = [
        0.0,
        -0.0,
        1e5,
        99_999.99,
        1.0e6,
        1.073_741_8e9,
        f32::MIN_POSITIVE,
        1e-40,
        std::f32::consts::FRAC_PI_4,
        std::f32::consts::FRAC_PI_2,
    ];
    angles[..special.len()].copy_from_slice(&special);
    for i in 0..20 {
        // Nearest to multiples of pi / 2, where cosine or sine vanishes.
        angles[20 + i] = (f64::from(1u32 << i) * std::f64::consts::FRAC_PI_2) as f32;
    }
    let rope = rotation(2 * half, RopeStyle::Neox);
    let case = dense(n, 1, 2 * half, rope);
    // A pair (1, 0) becomes (cos, sin).
    let x: Vec<f32> = (0..n).flat_map(|_| (0..2 * half).map(|c| if c < half { 1.0 } else { 0.0 })).collect();
    for gpu in kit::devices() {
        let (x, table) = (gpu.upload(&x, case.place()), gpu.upload(&angles, [n, half]));
        let mut y = gpu.poisoned::<f32>(case.place());
        let source = RopeAngles { angles: table.view(), positions: Positions::Index, offsets: None };
        rope_freqs(gpu.stream(), x.view(), source, y.view_mut(), rope, case.layout).unwrap();
        let got = gpu.download(&y);
        let mut worst = 0f64;
        for (row, angles) in got.chunks(2 * half).zip(angles.chunks(half)) {
            for (i, angle) in angles.iter().enumerate() {
                let angle = f64::from(*angle);
                let error = (f64::from(row[i]) - angle.cos())
                    .abs()
                    .max((f64::from(row[half + i]) - angle.sin()).abs());
                worst = worst.max(error);
            }
        }
        assert!(worst <= 1.2e-7, "{worst:e}");
        gpu.assert_guards(&y);
    }
}

/// Angles that are none, or beyond what the kernel can reduce, make NaN of their pairs alone.
#[test]
fn angles_out_of_domain_are_nan() {
    let rope = rotation(16, RopeStyle::Interleaved);
    let case = dense(1, 2, 20, rope);
    let angles = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.1e9, f32::MAX, 0.0, 1.0, 2.0];
    let x: Vec<f32> = case.elements();
    for gpu in kit::devices() {
        let (x_in, table) = (gpu.upload(&x, case.place()), gpu.upload(&angles, [1, 8]));
        let mut y = gpu.poisoned::<f32>(case.place());
        let source = RopeAngles { angles: table.view(), positions: Positions::Index, offsets: None };
        rope_freqs(gpu.stream(), x_in.view(), source, y.view_mut(), rope, case.layout).unwrap();
        for (i, y) in gpu.download(&y).iter().enumerate() {
            assert_eq!(y.is_nan(), i % 20 < 10, "column {i}");
        }
    }
}

/// `rope_freqs` is `rope_cached` with the cosines and sines of the angles, for every style, table, layout and dtype.
#[test]
fn angles_give_what_their_tables_give() {
    fn one<T: Float>(case: &Case)
    where
        f32: RopeElement<T>,
    {
        let angles: Vec<f32> = angles(case.rows, &case.rope, 1e4).iter().map(|&a| a as f32).collect();
        let x: Vec<T> = case.elements();
        let tables = Tables::of_angles(&widen(&angles));
        let want =
            reference::rope::rope(&widen(&x), &case.shape(), case.layout, &tables, &case.rows(), &case.rope);
        for gpu in kit::devices() {
            let (mut x_in, table) =
                (gpu.upload(&x, case.place()), gpu.upload(&angles, [case.rows, case.rope.table_width()]));
            let mut y = gpu.poisoned::<T>(case.place());
            let inputs = case.upload::<f32>(&gpu, &vec![0.0; angles.len()], &vec![0.0; angles.len()]);
            let source = || RopeAngles {
                angles: table.view(),
                positions: inputs.positions(),
                offsets: inputs.offsets(),
            };
            rope_freqs(gpu.stream(), x_in.view(), source(), y.view_mut(), case.rope, case.layout).unwrap();
            kit::assert_close(&gpu.download(&y), &want, Tolerance::Elementwise);
            let x_view = x_in.view_mut();
            rope_freqs(gpu.stream(), x_view.alias(), source(), x_view, case.rope, case.layout).unwrap();
            kit::assert_bits(&gpu.download(&x_in), &gpu.download(&y));
            gpu.assert_guards(&x_in);
        }
    }
    let mut n = 0;
    for style in [RopeStyle::Neox, RopeStyle::Interleaved] {
        for table in [RopeTableWidth::Half, RopeTableWidth::Full] {
            for rotary in [32, 18] {
                n += 1;
                let span = if n % 2 == 0 { RopeSpan::First } else { RopeSpan::Last };
                let rope = Rope { style, table, rotary, span, inverse: n % 3 == 0 };
                let given = (n % 2 == 1).then(|| Integers { values: vec![3, 9, 30, 0, 11], wide: true });
                let case = Case { rows: 24, given, ..dense(5, 3, 48, rope) };
                match n % 3 {
                    0 => one::<bf16>(&case),
                    1 => one::<f16>(&case),
                    _ => one::<f32>(&case),
                }
            }
        }
    }
}

/// No tokens, no heads, no batches: nothing happens, but a wrong shape is still one.
#[test]
fn nothing_to_rotate_is_fine() {
    for gpu in kit::devices() {
        let table = gpu.upload(&[1.0f32; 16], [1, 16]);
        for shape in [[0, 3, 5, 32], [2, 0, 5, 32], [2, 3, 0, 32]] {
            let x = gpu.poisoned::<bf16>(shape);
            let mut y = gpu.poisoned::<bf16>(shape);
            let tables = RopeTables {
                cos: table.view(),
                sin: table.view(),
                positions: Positions::Index,
                offsets: None,
            };
            for layout in [RopeLayout::Bhsd, RopeLayout::Sbhd, RopeLayout::Bshd] {
                rope_cached(
                    gpu.stream(),
                    x.view(),
                    tables,
                    y.view_mut(),
                    rotation(32, RopeStyle::Neox),
                    layout,
                )
                .unwrap();
            }
            gpu.assert_untouched(&y);
        }
        // Tables of no positions poison every token.
        let none = gpu.poisoned::<f32>([0, 16]);
        let tables =
            RopeTables { cos: none.view(), sin: none.view(), positions: Positions::Index, offsets: None };
        let x = gpu.upload(&[1.0f32; 64], [1, 2, 32]);
        let mut y = gpu.upload(&[1.0f32; 64], [1, 2, 32]);
        rope_cached(
            gpu.stream(),
            x.view(),
            tables,
            y.view_mut(),
            rotation(32, RopeStyle::Neox),
            RopeLayout::Thd,
        )
        .unwrap();
        assert!(gpu.download(&y).iter().all(|v| v.is_nan()));
    }
}

/// Each thing that can be wrong is refused, with its name, and nothing is written.
#[test]
fn wrong_arguments_are_refused() {
    let gpu = &kit::devices()[0];
    let stream = gpu.stream();
    let x = gpu.upload(&[1.0f32; 240], [4, 3, 20]);
    let mut y = gpu.poisoned::<f32>([4, 3, 20]);
    let table = gpu.upload(&[1.0f32; 40], [4, 10]);
    let rope = rotation(20, RopeStyle::Neox);
    let thd = RopeLayout::Thd;
    fn source<'a>(cos: TensorView<'a, f32>, sin: TensorView<'a, f32>) -> RopeTables<'a, f32> {
        RopeTables { cos, sin, positions: Positions::Index, offsets: None }
    }
    let tables = source(table.view(), table.view());
    let mut refuse =
        |rope: Rope, tables: RopeTables<f32>, layout, kind: fn(&hk_core::Error) -> bool, parts: &[&str]| {
            assert_error(rope_cached(stream, x.view(), tables, y.view_mut(), rope, layout), kind, parts);
        };
    refuse(Rope { rotary: 7, ..rope }, tables, thd, kind!(Argument), &["rope_cached", "rotary: 7", "even"]);
    refuse(Rope { rotary: 0, ..rope }, tables, thd, kind!(Argument), &["rotary: 0"]);
    refuse(Rope { rotary: 22, ..rope }, tables, thd, kind!(Shape), &["x: shape [4, 3, 20]", "at least 22"]);
    refuse(rope, tables, RopeLayout::Bshd, kind!(Shape), &["x: shape [4, 3, 20]", "4 axes"]);
    refuse(
        Rope { rotary: 18, ..rope },
        tables,
        thd,
        kind!(Shape),
        &["cos: shape [4, 10]", "[4, 9] (columns: rotary / 2)"],
    );
    refuse(
        Rope { table: RopeTableWidth::Full, ..rope },
        tables,
        thd,
        kind!(Shape),
        &["cos: shape [4, 10]", "[4, 20] (columns: rotary)"],
    );
    let flat = gpu.upload(&[1.0f32; 40], [40]);
    refuse(rope, source(flat.view(), table.view()), thd, kind!(Shape), &["cos: shape [40]", "2 axes"]);
    let short = gpu.upload(&[1.0f32; 30], [3, 10]);
    refuse(
        rope,
        source(table.view(), short.view()),
        thd,
        kind!(Shape),
        &["sin: shape [3, 10]", "[4, 10] (shape of cos)"],
    );
    let columns = gpu.upload(&[1.0f32; 40], Place::new(Layout::with_strides([4, 10], [1, 4]).unwrap()));
    refuse(rope, source(columns.view(), table.view()), thd, kind!(Stride), &["cos", "unit stride"]);
    refuse(rope, source(table.view(), columns.view()), thd, kind!(Stride), &["sin", "unit stride"]);
    let five = gpu.upload(&[0i32; 5], [5]);
    let given = RopeTables { positions: Positions::Given(five.view().into()), ..tables };
    refuse(rope, given, thd, kind!(Shape), &["positions: shape [5]", "[4] (the tokens)"]);
    let offsets = RopeTables { offsets: Some(five.view().into()), ..tables };
    refuse(rope, offsets, thd, kind!(Shape), &["offsets: shape [5]", "[4] (the tokens)"]);
    let none = gpu.poisoned::<i64>([0]);
    let starts = RopeTables { positions: Positions::Sequences(none.view().into()), ..tables };
    refuse(rope, starts, thd, kind!(Shape), &["positions: shape [0]", "[sequences + 1]"]);
    gpu.assert_untouched(&y);

    // Starts of sequences beside batches.
    let x4 = gpu.upload(&[1.0f32; 240], [1, 4, 3, 20]);
    let mut y4 = gpu.poisoned::<f32>([1, 4, 3, 20]);
    let starts = RopeTables { positions: Positions::Sequences(five.view().into()), ..tables };
    let result = rope_cached(stream, x4.view(), starts, y4.view_mut(), rope, RopeLayout::Bshd);
    assert_error(result, kind!(Argument), &["positions: tokens [1, 4]", "packed"]);

    let mut other = gpu.poisoned::<f32>([4, 3, 22]);
    let result = rope_cached(stream, x.view(), tables, other.view_mut(), rope, thd);
    assert_error(result, kind!(Shape), &["y: shape [4, 3, 22]", "[4, 3, 20] (shape of x)"]);
    let odd = gpu.upload(&[1.0f32; 254], [2, 1, 127]);
    let mut odd_y = gpu.poisoned::<f32>([2, 1, 127]);
    let result = rope_cached(stream, odd.view(), tables, odd_y.view_mut(), rope, thd);
    assert_error(result, kind!(Shape), &["x: shape [2, 1, 127]", "an even number of columns"]);
    let transposed = Place::new(Layout::with_strides([4, 3, 20], [60, 1, 3]).unwrap());
    let x_columns = gpu.upload(&[1.0f32; 240], &transposed);
    let result = rope_cached(stream, x_columns.view(), tables, y.view_mut(), rope, thd);
    assert_error(result, kind!(Stride), &["x", "unit stride"]);
    let mut y_columns = gpu.poisoned::<f32>(&transposed);
    let result = rope_cached(stream, x.view(), tables, y_columns.view_mut(), rope, thd);
    assert_error(result, kind!(Stride), &["y", "unit stride"]);
    gpu.assert_untouched(&y_columns);
    gpu.assert_untouched(&y);

    let angles =
        RopeAngles { angles: short.view(), positions: Positions::Given(five.view().into()), offsets: None };
    let result = rope_freqs(stream, x.view(), angles, y.view_mut(), rope, thd);
    assert_error(result, kind!(Shape), &["rope_freqs: positions: shape [5]"]);
    let angles = RopeAngles { angles: flat.view(), ..angles };
    assert_error(
        rope_freqs(stream, x.view(), angles, y.view_mut(), rope, thd),
        kind!(Shape),
        &["rope_freqs: angles: shape [40]"],
    );

    // Keys of other tokens than the queries', on another device.
    let k = gpu.upload(&[1.0f32; 300], [5, 3, 20]);
    let mut k_out = gpu.poisoned::<f32>([5, 3, 20]);
    let result = rope_qk(stream, x.view(), k.view(), tables, y.view_mut(), k_out.view_mut(), rope, thd);
    assert_error(
        result,
        kind!(Shape),
        &["rope_qk: k: shape [5, 3, 20]", "[4, 3, 20] (q, but for the heads)"],
    );
    let elsewhere = &Gpu::open("emu:gfx950");
    let foreign = elsewhere.upload(&[1.0f32; 240], [4, 3, 20]);
    let result = rope_cached(stream, foreign.view(), tables, y.view_mut(), rope, thd);
    assert_error(result, kind!(DeviceMismatch), &["rope_cached: x"]);
    let foreign = elsewhere.upload(&[1.0f32; 40], [4, 10]);
    let result = rope_cached(stream, x.view(), source(table.view(), foreign.view()), y.view_mut(), rope, thd);
    assert_error(result, kind!(DeviceMismatch), &["rope_cached: sin"]);
    let result = rope_qk(stream, x.view(), x.view(), tables, y.view_mut(), k_out.view_mut(), rope, thd);
    assert_error(result, kind!(Shape), &["rope_qk: k_out: shape [5, 3, 20]", "[4, 3, 20] (shape of k)"]);
    gpu.assert_untouched(&y);
}

/// Outputs share memory with nothing but their own input, and that exactly.
#[test]
fn overlaps_are_refused() {
    let gpu = &kit::devices()[0];
    let (stream, rope, thd) = (gpu.stream(), rotation(20, RopeStyle::Neox), RopeLayout::Thd);
    let table = gpu.upload(&[1.0f32; 40], [4, 10]);
    let tables =
        RopeTables { cos: table.view(), sin: table.view(), positions: Positions::Index, offsets: None };
    let mut buffer = gpu.upload(&[1.0f32; 600], [10, 3, 20]);

    let view = buffer.view_mut();
    let (x, y) = (view.alias().slice(0, 0..4).unwrap(), view.slice(0, 3..7).unwrap());
    let result = rope_cached(stream, x, tables, y, rope, thd);
    assert_error(result, kind!(Overlap), &["rope_cached: x and y overlap", "exactly the same"]);

    let other = gpu.upload(&[1.0f32; 240], [4, 3, 20]);
    let mut out = gpu.poisoned::<f32>([4, 3, 20]);
    // An output that is the other input, or the other output.
    let view = buffer.view_mut();
    let (k, q_out) = (view.alias().slice(0, 0..4).unwrap(), view.slice(0, 0..4).unwrap());
    let result = rope_qk(stream, other.view(), k, tables, q_out, out.view_mut(), rope, thd);
    assert_error(result, kind!(Overlap), &["rope_qk: k and q_out overlap", "disjoint"]);
    let view = buffer.view_mut();
    let (q, k_out) = (view.alias().slice(0, 0..4).unwrap(), view.slice(0, 1..5).unwrap());
    let result = rope_qk(stream, q, other.view(), tables, out.view_mut(), k_out, rope, thd);
    assert_error(result, kind!(Overlap), &["rope_qk: q and k_out overlap"]);

    // An output over the tables, which are columns of one buffer with it.
    fn table_and_heads(
        wide: &mut Tensor<f32>,
        first: usize,
    ) -> (TensorView<'_, f32>, TensorViewMut<'_, f32>) {
        let view = wide.view_mut();
        let table = view.alias().slice(1, first..first + 10).unwrap();
        (table, view.slice(1, 0..60).unwrap().split_axis(1, 20).unwrap())
    }
    let mut wide = gpu.upload(&[1.0f32; 320], [4, 80]);
    let (cos, y) = table_and_heads(&mut wide, 55);
    let result = rope_cached(stream, other.view(), RopeTables { cos, ..tables }, y, rope, thd);
    assert_error(result, kind!(Overlap), &["cos and y overlap"]);
    let (sin, y) = table_and_heads(&mut wide, 55);
    let result = rope_cached(stream, other.view(), RopeTables { sin, ..tables }, y, rope, thd);
    assert_error(result, kind!(Overlap), &["sin and y overlap"]);
    let (angles, y) = table_and_heads(&mut wide, 55);
    let angles = RopeAngles { angles, positions: Positions::Index, offsets: None };
    let result = rope_freqs(stream, other.view(), angles, y, rope, thd);
    assert_error(result, kind!(Overlap), &["angles and y overlap"]);
    let (cos, k_out) = table_and_heads(&mut wide, 55);
    let over = RopeTables { cos, ..tables };
    let result = rope_qk(stream, other.view(), other.view(), over, out.view_mut(), k_out, rope, thd);
    assert_error(result, kind!(Overlap), &["cos and k_out overlap"]);
    // Beside them it is fine.
    let (cos, y) = table_and_heads(&mut wide, 60);
    rope_cached(stream, other.view(), RopeTables { cos, ..tables }, y, rope, thd).unwrap();
    gpu.assert_untouched(&out);
}

/// Heads that begin further apart than 32 bits of bytes reach, and whole rows of a wider projection.
#[test]
fn heads_may_be_columns_of_wider_rows() {
    // Keys of a projection of 8 query, 2 key and 2 value heads.
    let (tokens, width, head_dim) = (7, 12 * 32, 32);
    let rope = rotation(32, RopeStyle::Neox);
    let case = dense(tokens, 2, head_dim, rope);
    let row: Vec<bf16> = Fill::Normal.elements(tokens * width, 3);
    let keys: Vec<bf16> = row.chunks(width).flat_map(|r| r[256..320].to_vec()).collect();
    let (cos, sin) = cos_sin(&angles(tokens, &rope, 1e4));
    for gpu in kit::devices() {
        let want = run(&gpu, &case, &keys, &cos, &sin);
        let inputs = case.upload(&gpu, &cos, &sin);
        let mut qkv = gpu.upload(&row, [tokens, width]);
        let k = qkv.view_mut().slice(1, 256..320).unwrap().split_axis(1, head_dim).unwrap();
        rope_cached(gpu.stream(), k.alias(), inputs.tables(), k, rope, RopeLayout::Thd).unwrap();
        let got = gpu.download(&qkv);
        for (i, (got, was)) in got.chunks(width).zip(row.chunks(width)).enumerate() {
            assert_eq!(got[..256], was[..256]);
            assert_eq!(got[256..320], want[i * 64..][..64]);
            assert_eq!(got[320..], was[320..]);
        }
    }
}
