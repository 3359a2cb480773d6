//! `rope_cached`, `rope_freqs` and `rope_qk` on the emulated GPUs (and real ones where there are some) against their f64
//! reference and their laws.

use crate::common::{run, run_in_place};
use hk_activation::{RopeQkInputs, RopeQkOutputs, reference, rope_cached, rope_freqs, rope_qk};
use hk_core::plan::rope::reference::Tables;
use hk_core::plan::rope::{
    Positions, Rope, RopeAngles, RopeDirection, RopeElement, RopeLayout, RopeSpan, RopeStyle, RopeTableWidth,
    RopeTables,
};
use hk_core::{Float, bf16, f16};
use hk_testkit::{
    self as kit, Fill, Refusals, Tensors, Tolerance, assert_error, floats, kind,
    proptest::prelude::*,
    rope::{Integers, RopeCase, angles, cos_sin, rope_case, rotation, rounded},
    widen,
};

const LAYOUTS: [RopeLayout; 4] = [RopeLayout::Bhsd, RopeLayout::Sbhd, RopeLayout::Bshd, RopeLayout::Thd];

/// Close to the f64 reference in every element, with guards around, out of place and in place.
#[track_caller]
fn check<T: Float, C: RopeElement<T> + Float>(case: &RopeCase, tables: &Tables) {
    let x: Vec<T> = case.elements();
    let (cos, sin): (Vec<C>, Vec<C>) = rounded(tables);
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

/// Columns that are not rotated are copied bit for bit, but for tokens without a row.
#[track_caller]
fn assert_passed_through<T: Float>(case: &RopeCase, x: &[T], got: &[T]) {
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
    fn matches_f64_reference(case in rope_case(), kind in 0usize..5) {
        let tables = case.tables();
        match kind {
            0 => check::<bf16, bf16>(&case, &tables),
            1 => check::<bf16, f32>(&case, &tables),
            2 => check::<f16, f16>(&case, &tables),
            3 => check::<f16, f32>(&case, &tables),
            _ => check::<f32, f32>(&case, &tables),
        }
    }

    /// A head is bitwise identical whatever the other heads, its position and the access path are.
    #[test]
    fn heads_are_batch_invariant(case in rope_case()) {
        let x: Vec<bf16> = case.elements();
        let (cos, sin): (Vec<f32>, Vec<f32>) = rounded(&case.tables());
        let plain = RopeCase { strided: false, shift: 0, ..case.clone() };
        let odd = RopeCase { strided: true, shift: 1, ..case.clone() };
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
            let alone = RopeCase { layout: RopeLayout::Thd, batches: 1, tokens: 1, ..plain.clone() }.with_rows_of(&case);
            let got = run(&gpu, &alone, &first, &cos, &sin);
            for h in 0..case.heads {
                let at = case.head(0, 0, h) * case.head_dim;
                let bits = |v: &[bf16]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                prop_assert_eq!(bits(got.row(h)), bits(&want[at..at + case.head_dim]));
            }
        }
    }

    /// Pairs keep their norm, and the inverse rotation restores them.
    #[test]
    fn rotation_keeps_norms_and_can_be_undone(case in rope_case()) {
        let case = RopeCase {
            rope: Rope { table: RopeTableWidth::Half, direction: RopeDirection::Forward, ..case.rope },
            given: None, offsets: None, starts: None, rows: case.batches * case.tokens,
            ..case
        };
        let x: Vec<f32> = case.elements();
        let (cos, sin) = cos_sin(&angles(case.rows, &case.rope, 1e4));
        let back = RopeCase { rope: Rope { direction: RopeDirection::Inverse, ..case.rope }, ..case.clone() };
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

    /// One style is the other with permuted columns, bitwise.
    #[test]
    fn styles_differ_by_a_permutation(case in rope_case()) {
        // Column `a` of a pair in either style, and `b`.
        let neox = RopeCase { rope: Rope { style: RopeStyle::Neox, ..case.rope }, ..case.clone() };
        let interleaved = RopeCase { rope: Rope { style: RopeStyle::Interleaved, ..case.rope }, ..case.clone() };
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
        let (cos, sin): (Vec<f32>, Vec<f32>) = rounded(&tables);
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
    fn rotations_add_up(case in rope_case(), p in 0i64..40, q in 0i64..40) {
        let case = RopeCase { rope: Rope { direction: RopeDirection::Forward, table: RopeTableWidth::Half, ..case.rope }, starts: None, offsets: None, rows: 80, ..case };
        let at = |position| RopeCase { given: Some(Integers { values: vec![position; case.batches * case.tokens], wide: true }), ..case.clone() };
        let x: Vec<f32> = case.elements();
        let (cos, sin) = cos_sin(&angles(80, &case.rope, 1e4));
        for gpu in kit::devices() {
            let twice = run(&gpu, &at(q), &run(&gpu, &at(p), &x, &cos, &sin), &cos, &sin);
            let once = run(&gpu, &at(p + q), &x, &cos, &sin);
            kit::assert_close(&twice, &widen(&once), Tolerance::Within { rtol: 1e-5, atol: 1e-5 });
        }
    }

    /// Queries and keys in one launch are bitwise identical to two launches.
    #[test]
    fn queries_and_keys_in_one_launch_are_bitwise_identical_to_two(case in rope_case(), kv_heads in 1usize..4, alias: bool) {
        let keys = RopeCase { heads: kv_heads, seed: case.seed ^ 1, ..case.clone() };
        let (q, k): (Vec<bf16>, Vec<bf16>) = (case.elements(), keys.elements());
        let (cos, sin): (Vec<bf16>, Vec<bf16>) = rounded(&case.tables());
        for gpu in kit::devices() {
            let want = (run(&gpu, &case, &q, &cos, &sin), run(&gpu, &keys, &k, &cos, &sin));
            let inputs = case.upload(&gpu, &cos, &sin);
            let (mut q_in, mut k_in) = (gpu.upload(&q, case.place()), gpu.upload(&k, keys.place()));
            let (mut q_out, mut k_out) = (gpu.poisoned(case.place()), gpu.poisoned(keys.place()));
            let (rope, layout) = (case.rope, case.layout);
            if alias {
                let (q_view, k_view) = (q_in.view_mut(), k_in.view_mut());
                rope_qk(gpu.stream(), RopeQkInputs { q: q_view.alias(), k: k_view.alias() }, inputs.tables(), RopeQkOutputs { q_out: q_view, k_out: k_view }, rope, layout).unwrap();
                kit::assert_bits(&gpu.download(&q_in), &want.0);
                kit::assert_bits(&gpu.download(&k_in), &want.1);
                gpu.assert_guards(&q_in);
                gpu.assert_guards(&k_in);
            } else {
                rope_qk(gpu.stream(), RopeQkInputs { q: q_in.view(), k: k_in.view() }, inputs.tables(), RopeQkOutputs { q_out: q_out.view_mut(), k_out: k_out.view_mut() }, rope, layout).unwrap();
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

/// Head widths and rotated columns of real models, vectorized and scalar, with both styles and tables.
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
                let rope = Rope {
                    style,
                    table,
                    rotary,
                    span,
                    direction: [RopeDirection::Forward, RopeDirection::Inverse][usize::from(n % 5 == 0)],
                };
                let case = RopeCase {
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
            let case = RopeCase { layout: LAYOUTS[(i + j) % 4], ..RopeCase::dense(tokens, heads, 64, rope) };
            check::<bf16, f32>(&case, &Tables::of_angles(&angles(case.rows, &rope, 5e5)));
        }
    }
}

/// An angle of zero is the identity, bitwise.
#[test]
fn position_zero_is_the_identity() {
    fn identity<T: Float>(style: RopeStyle) {
        for (head_dim, rotary) in [(64, 64), (48, 18), (128, 64)] {
            let case = RopeCase::dense(9, 5, head_dim, rotation(rotary, style));
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

/// The dot product of a rotated query and a rotated key depends only on the difference of their positions.
#[test]
fn dot_products_depend_on_relative_position() {
    let rope = rotation(64, RopeStyle::Interleaved);
    let case = RopeCase::dense(1, 1, 64, rope);
    let q: Vec<f32> = case.elements();
    let k: Vec<f32> = RopeCase { seed: 8, ..case.clone() }.elements();
    let (cos, sin) = cos_sin(&angles(64, &rope, 1e4));
    let case = RopeCase { rows: 64, ..case };
    for gpu in kit::devices() {
        let at = |x: &[f32], position| {
            let given = Some(Integers { values: vec![position], wide: false });
            run(&gpu, &RopeCase { given, ..case.clone() }, x, &cos, &sin)
        };
        let product =
            |m, n| at(&q, m).iter().zip(at(&k, n).iter()).map(|(a, b)| f64::from(a * b)).sum::<f64>();
        for (m, n, by) in [(5, 3, 40), (0, 17, 46), (9, 9, 54)] {
            let (near, far) = (product(m, n), product(m + by, n + by));
            assert!((near - far).abs() <= 1e-4 * near.abs().max(1.0), "{near} {far}");
        }
    }
}

/// Positions outside the tables give NaN for their token and no other, whatever the source of positions.
#[test]
fn tokens_without_a_row_are_poisoned() {
    let rope = Rope { span: RopeSpan::Last, ..rotation(32, RopeStyle::Neox) };
    let base = RopeCase { rows: 16, ..RopeCase::dense(8, 3, 48, rope) };
    let far = [i64::MIN, i64::MAX, -1, 16, 15, 0, 1 << 32, 3];
    let given = |values: &[i64], wide| Some(Integers { values: values.to_vec(), wide });
    let cases = [
        RopeCase { given: given(&far, true), ..base.clone() },
        RopeCase {
            given: given(&far, true),
            offsets: given(&[i64::MIN, i64::MAX, 1, -1, 1, -1, -(1 << 32), 2], true),
            ..base.clone()
        },
        RopeCase {
            given: given(&[-1, 16, 15, 0, i32::MIN.into(), i32::MAX.into(), 3, 4], false),
            ..base.clone()
        },
        RopeCase { offsets: given(&[0, -2, 20, 3, 11, 12, 9, 8], false), ..base.clone() },
        // Sequences 1..3, none, 3..7; the tokens before and after have none.
        RopeCase { starts: given(&[1, 3, 3, 7], false), offsets: given(&[1; 8], true), ..base.clone() },
    ];
    for (i, case) in cases.into_iter().enumerate() {
        let poisoned = case.rows().iter().filter(|row| row.is_none()).count();
        assert!(poisoned > 0 && poisoned < 8, "case {i}: {poisoned}");
        check::<bf16, f32>(&case, &case.tables());
        check::<f32, f32>(&RopeCase { shift: 1, ..case.clone() }, &case.tables());
    }
    // Starts that are not ascending do not lead outside the tables.
    for starts in [vec![5, -3, 9, 2], vec![i64::MIN, i64::MAX, 0], vec![7], vec![0; 9]] {
        let case = RopeCase { starts: Some(Integers { values: starts, wide: true }), ..base.clone() };
        let x: Vec<f32> = case.elements();
        let (cos, sin): (Vec<f32>, Vec<f32>) = rounded(&case.tables());
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
    let case = RopeCase::dense(n, 1, 2 * half, rope);
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

/// Angles that are not finite, or beyond the kernel's range reduction, make only their pairs NaN.
#[test]
fn angles_out_of_domain_are_nan() {
    let rope = rotation(16, RopeStyle::Interleaved);
    let case = RopeCase::dense(1, 2, 20, rope);
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
    fn one<T: Float>(case: &RopeCase)
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
                let rope = Rope {
                    style,
                    table,
                    rotary,
                    span,
                    direction: [RopeDirection::Forward, RopeDirection::Inverse][usize::from(n % 3 == 0)],
                };
                let given = (n % 2 == 1).then(|| Integers { values: vec![3, 9, 30, 0, 11], wide: true });
                let case = RopeCase { rows: 24, given, ..RopeCase::dense(5, 3, 48, rope) };
                match n % 3 {
                    0 => one::<bf16>(&case),
                    1 => one::<f16>(&case),
                    _ => one::<f32>(&case),
                }
            }
        }
    }
}

/// No tokens, heads or batches: nothing is launched, but wrong shapes are refused.
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

/// The rotation, the order of the axes, and whether positions are starts of sequences.
#[derive(Clone, Copy)]
struct Options {
    rope: Rope,
    layout: RopeLayout,
    sequences: bool,
}

const REFUSED_CALL: Options = Options {
    rope: Rope {
        style: RopeStyle::Neox,
        table: RopeTableWidth::Half,
        rotary: 20,
        span: RopeSpan::First,
        direction: RopeDirection::Forward,
    },
    layout: RopeLayout::Thd,
    sequences: false,
};

fn positions<'a>(tensors: &Tensors<'a>, sequences: bool) -> Positions<'a> {
    match tensors.optional_input::<i32>("positions") {
        Some(starts) if sequences => Positions::Sequences(starts.into()),
        Some(given) => Positions::Given(given.into()),
        None => Positions::Index,
    }
}

fn tables<'a>(tensors: &Tensors<'a>, sequences: bool) -> RopeTables<'a, f32> {
    RopeTables {
        cos: tensors.input("cos"),
        sin: tensors.input("sin"),
        positions: positions(tensors, sequences),
        offsets: tensors.optional_input::<i32>("offsets").map(Into::into),
    }
}

#[test]
fn wrong_arguments_are_refused() {
    Refusals::new(REFUSED_CALL, |stream, tensors, Options { rope, layout, sequences }| {
        let (x, tables) = (tensors.input::<f32>("x"), tables(tensors, sequences));
        rope_cached(stream, x, tables, tensors.output("y"), rope, layout)
    })
    .input::<f32>("x", [4, 3, 20])
    .input::<f32>("cos", [4, 10])
    .input::<f32>("sin", [4, 10])
    .input::<i32>("positions", [4])
    .input::<i32>("offsets", [4])
    .output::<f32>("y", [4, 3, 20])
    .accepts(|_| {})
    .accepts(|call| {
        call.without("positions");
        call.without("offsets");
    })
    .accepts(|call| call.overlap("x", "y", 0))
    .accepts(|call| call.overlap("cos", "y", 40))
    .refuses(kind!(Argument), &["rope_cached", "rotary: 7", "even"], |call| call.options.rope.rotary = 7)
    .refuses(kind!(Argument), &["rotary: 0"], |call| call.options.rope.rotary = 0)
    .refuses(kind!(Shape), &["x: shape [4, 3, 20]", "at least 22"], |call| call.options.rope.rotary = 22)
    .refuses(kind!(Shape), &["x: shape [4, 3, 20]", "4 axes"], |call| call.options.layout = RopeLayout::Bshd)
    .refuses(kind!(Shape), &["cos: shape [4, 10]", "[4, 9] (columns: rotary / 2)"], |call| {
        call.options.rope.rotary = 18
    })
    .refuses(kind!(Shape), &["cos: shape [4, 10]", "[4, 20] (columns: rotary)"], |call| {
        call.options.rope.table = RopeTableWidth::Full
    })
    .refuses(kind!(Shape), &["cos: shape [40]", "2 axes"], |call| call.shape("cos", [40]))
    .refuses(kind!(Shape), &["sin: shape [3, 10]", "[4, 10] (shape of cos)"], |call| {
        call.shape("sin", [3, 10])
    })
    .refuses(kind!(Stride), &["cos", "unit stride"], |call| call.strides("cos", [1, 4]))
    .refuses(kind!(Stride), &["sin", "unit stride"], |call| call.strides("sin", [1, 4]))
    .refuses(kind!(Shape), &["positions: shape [5]", "[4] (the tokens)"], |call| call.shape("positions", [5]))
    .refuses(kind!(Shape), &["offsets: shape [5]", "[4] (the tokens)"], |call| call.shape("offsets", [5]))
    .refuses(kind!(Shape), &["positions: shape [0]", "[sequences + 1]"], |call| {
        call.options.sequences = true;
        call.shape("positions", [0]);
    })
    // Starts of sequences beside batches.
    .refuses(kind!(Argument), &["positions: tokens [1, 4]", "packed"], |call| {
        call.options.layout = RopeLayout::Bshd;
        call.options.sequences = true;
        call.shape("x", [1, 4, 3, 20]);
        call.shape("y", [1, 4, 3, 20]);
        call.shape("positions", [5]);
        call.without("offsets");
    })
    .refuses(kind!(Shape), &["y: shape [4, 3, 22]", "[4, 3, 20] (shape of x)"], |call| {
        call.shape("y", [4, 3, 22])
    })
    .refuses(kind!(Shape), &["x: shape [2, 1, 127]", "an even number of columns"], |call| {
        call.shape("x", [2, 1, 127]);
        call.shape("y", [2, 1, 127]);
    })
    .refuses(kind!(Stride), &["x", "unit stride"], |call| call.strides("x", [60, 1, 3]))
    .refuses(kind!(Stride), &["y", "unit stride"], |call| call.strides("y", [60, 1, 3]))
    .refuses(kind!(DeviceMismatch), &["rope_cached: x"], |call| call.elsewhere("x"))
    .refuses(kind!(DeviceMismatch), &["rope_cached: sin"], |call| call.elsewhere("sin"))
    .refuses_other_devices()
    .refuses_overlaps();

    Refusals::new(REFUSED_CALL, |stream, tensors, Options { rope, layout, sequences }| {
        let angles = RopeAngles {
            angles: tensors.input::<f32>("angles"),
            positions: positions(tensors, sequences),
            offsets: None,
        };
        rope_freqs(stream, tensors.input::<f32>("x"), angles, tensors.output("y"), rope, layout)
    })
    .input::<f32>("x", [4, 3, 20])
    .input::<f32>("angles", [3, 10])
    .input::<i32>("positions", [4])
    .output::<f32>("y", [4, 3, 20])
    .accepts(|_| {})
    .refuses(kind!(Shape), &["rope_freqs: positions: shape [5]"], |call| call.shape("positions", [5]))
    .refuses(kind!(Shape), &["rope_freqs: angles: shape [40]"], |call| call.shape("angles", [40]))
    .refuses_other_devices()
    .refuses_overlaps();

    Refusals::new(REFUSED_CALL, |stream, tensors, Options { rope, layout, sequences }| {
        let inputs = RopeQkInputs { q: tensors.input::<f32>("q"), k: tensors.input("k") };
        let tables = tables(tensors, sequences);
        let outputs = RopeQkOutputs { q_out: tensors.output("q_out"), k_out: tensors.output("k_out") };
        rope_qk(stream, inputs, tables, outputs, rope, layout)
    })
    .input::<f32>("q", [4, 3, 20])
    .input::<f32>("k", [4, 2, 20])
    .input::<f32>("cos", [4, 10])
    .input::<f32>("sin", [4, 10])
    .output::<f32>("q_out", [4, 3, 20])
    .output::<f32>("k_out", [4, 2, 20])
    .accepts(|_| {})
    .accepts(|call| call.overlap("k", "k_out", 0))
    .refuses(kind!(Shape), &["rope_qk: k: shape [5, 2, 20]", "[4, 2, 20] (q, but for the heads)"], |call| {
        call.shape("k", [5, 2, 20]);
        call.shape("k_out", [5, 2, 20]);
    })
    .refuses(kind!(Shape), &["rope_qk: k_out: shape [5, 2, 20]", "[4, 2, 20] (shape of k)"], |call| {
        call.shape("k_out", [5, 2, 20])
    })
    // An output that is the other input.
    .refuses(kind!(Overlap), &["rope_qk: k and q_out overlap", "disjoint"], |call| {
        call.overlap("k", "q_out", 0)
    })
    .refuses(kind!(Overlap), &["rope_qk: q and k_out overlap"], |call| call.overlap("q", "k_out", 0))
    .refuses_other_devices()
    .refuses_overlaps();
}

/// In place, the output is exactly the input.
#[test]
fn overlaps_are_refused() {
    let gpu = &kit::devices()[0];
    let (rope, thd) = (rotation(20, RopeStyle::Neox), RopeLayout::Thd);
    let table = gpu.upload(&[1.0f32; 40], [4, 10]);
    let tables =
        RopeTables { cos: table.view(), sin: table.view(), positions: Positions::Index, offsets: None };
    let mut buffer = gpu.upload(&[1.0f32; 600], [10, 3, 20]);
    let view = buffer.view_mut();
    let (x, y) = (view.alias().slice(0, 0..4).unwrap(), view.slice(0, 3..7).unwrap());
    let result = rope_cached(gpu.stream(), x, tables, y, rope, thd);
    assert_error(result, kind!(Overlap), &["rope_cached: x and y overlap", "exactly the same"]);
    gpu.assert_untouched(&buffer);
}

/// Head strides of a wider projection.
#[test]
fn heads_may_be_columns_of_wider_rows() {
    // Keys of a projection of 8 query, 2 key and 2 value heads.
    let (tokens, width, head_dim) = (7, 12 * 32, 32);
    let rope = rotation(32, RopeStyle::Neox);
    let case = RopeCase::dense(tokens, 2, head_dim, rope);
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
