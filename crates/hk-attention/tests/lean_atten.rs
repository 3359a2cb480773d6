//! `lean_atten` on the emulated GPUs (and real ones where there are some) against its f64 reference.

use crate::common::attention::{Builder, COLUMNS, HEADS};
use hk_attention::{
    AttentionElement, AttentionOutput, AttentionOutputs, AttentionProblem, LeanOptions, Programs, Qkv,
    lean_atten, lean_workspace,
};
use hk_core::registry::Scalar;
use hk_core::{DType, Element, Float, Result, TensorViewMut, bf16, f16};
use hk_testkit::{self as kit, Array, Fill, Gpu, Place, Refusals, Tolerance, kind};

fn call(
    dtype: DType,
    [rows, total]: [usize; 2],
    lens: &[i32],
    [heads, kv_heads, dqk, dv]: [usize; 4],
) -> Builder {
    Builder::new("lean_atten")
        .tensor("q", dtype, [rows, heads, dqk])
        .tensor("k", dtype, [total, kv_heads, dqk])
        .tensor("v", dtype, [total, kv_heads, dv])
        .integers("kv_lens", lens)
        .want("lse")
}

/// Ragged keys, none among them, for one and more queries; rows of keys behind the last sequence.
#[test]
fn ragged_keys() {
    const TYPES: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];
    let mut n = 0;
    for lens in [&[1, 65, 0, 129][..], &[0], &[300], &[17, 17, 17], &[]] {
        for sq in [1, 2, 33, 130] {
            let ([heads, kv_heads], [dqk, dv]) = (HEADS[n % 4], COLUMNS[n * 2 % 9]);
            let sizes = [sq * lens.len(), lens.iter().sum::<i32>() as usize + n % 2 * 5];
            let scalars =
                [("causal", Scalar::Bool(n % 3 != 0)), ("scale", Scalar::Float([0.0, 0.25][n % 2]))];
            let call = call(TYPES[n % 3], sizes, lens, [heads, kv_heads, dqk, dv]).scalars(&scalars);
            call.check(&format!("{sq} queries, keys {lens:?}, causal: {}", n % 3 != 0), n as u64);
            n += 1;
        }
    }
}

/// More sequences than a wave has lanes.
#[test]
fn many_sequences() {
    let lens: Vec<i32> = (0..100).map(|i| i * 7 % 20).collect();
    let sizes = [200, lens.iter().sum::<i32>() as usize];
    for programs in [0, 9, 150] {
        let call = call(DType::Bf16, sizes, &lens, [4, 2, 32, 32]);
        let call = call.scalars(&[("causal", Scalar::Bool(true)), ("programs", Scalar::Count(programs))]);
        call.check(&format!("100 sequences, {programs} programs"), 1);
    }
}

/// NaN from the first sequence on whose keys are not there.
#[test]
fn lengths_are_not_trusted() {
    for (lens, total) in [
        ([20, 30, 11], 60),
        ([20, -1, 30], 60),
        ([61, 0, 0], 60),
        ([0, 0, 1], 0),
        ([i32::MAX, i32::MAX, i32::MAX], 60),
        ([10, i32::MIN, 10], 60),
    ] {
        for programs in [0, 1, 5] {
            let call = call(DType::Bf16, [9, total], &lens, [4, 2, 32, 16]);
            let call = call.scalar("programs", Scalar::Count(programs));
            call.check(&format!("keys {lens:?} of {total}, {programs} programs"), 1);
        }
    }
}

/// Programs share the work: of whole tiles, of parts of one, of nothing.
#[test]
fn every_number_of_programs() {
    const TYPES: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];
    let mut n = 0;
    for sq in [1, 40, 300] {
        for causal in [false, true] {
            for programs in [1, 3, 7, 304] {
                let ([heads, kv_heads], [dqk, dv]) = (HEADS[n % 4], COLUMNS[n * 2 % 9]);
                let lens = [1, 65, 0, 129];
                let call = call(TYPES[n % 3], [sq * 4, 195], &lens, [heads, kv_heads, dqk, dv]);
                let call = call.scalar("causal", Scalar::Bool(causal));
                let what = format!(
                    "{} of {sq} queries, {heads}/{kv_heads} heads, {dqk} and {dv} columns",
                    TYPES[n % 3]
                );
                let what = format!("{what}, causal: {causal}, {programs} programs");
                call.scalar("programs", Scalar::Count(programs)).check(&what, n as u64);
                n += 1;
            }
        }
    }
}

/// Views of any strides give the bits of contiguous tensors; keys behind the last sequence are not read.
#[test]
fn strided_views() {
    let shapes = [[24, 4, 24], [70, 2, 24], [70, 2, 16], [24, 4, 16]];
    for gpu in kit::devices() {
        let draw = |i: usize| Fill::Normal.elements::<f16>(shapes[i].iter().product(), i as u64);
        let (q, mut k, mut v) = (draw(0), draw(1), draw(2));
        k[60 * 2 * 24..].fill(f16::NAN);
        v[60 * 2 * 16..].fill(f16::NAN);
        let run = |place: &dyn Fn(usize) -> Place, lse: Place| {
            let (q, k, v) = (gpu.upload(&q, place(0)), gpu.upload(&k, place(1)), gpu.upload(&v, place(2)));
            let lens = gpu.upload(&[40, 0, 20], [3]);
            let (mut out, mut lse) = (gpu.poisoned::<f16>(place(3)), gpu.poisoned(lse));
            let inputs = Qkv { q: q.view(), k: k.view(), v: v.view() };
            let outputs = AttentionOutputs { out: out.view_mut(), lse: Some(lse.view_mut()) };
            let options = LeanOptions { causal: true, ..LeanOptions::default() };
            lean_atten(gpu.stream(), inputs, lens.view(), outputs, None, &options).unwrap();
            gpu.assert_guards(&out);
            gpu.assert_guards(&lse);
            (gpu.download(&out), gpu.download(&lse))
        };
        let want = run(&|i| shapes[i].into(), [24, 4].into());
        let transposed = hk_core::Layout::with_strides([24, 4], [1, 25]).unwrap();
        let got = run(&|i| Place::rows(shapes[i], 27 + i).shifted(i % 2), Place::new(transposed));
        // Rows that are not whole vectors have another kernel.
        kit::assert_close(&got.0, &kit::widen(&want.0), Tolerance::Attention);
        kit::assert_close(&got.1, &kit::widen(&want.1), Tolerance::Within { rtol: 1e-4, atol: 1e-4 });
    }
}

/// `q`, `k`, `v` and the lengths of keys of a call, on the host.
struct Ragged<T: Element> {
    qkv: [Vec<T>; 3],
    lens: Vec<i32>,
    shapes: [[usize; 3]; 4],
}

impl<T: Float + AttentionElement + AttentionOutput<T>> Ragged<T> {
    fn new(sq: usize, lens: &[i32], [heads, kv_heads, dqk, dv]: [usize; 4]) -> Self {
        let (rows, total) = (sq * lens.len(), lens.iter().sum::<i32>() as usize);
        let shapes = [[rows, heads, dqk], [total, kv_heads, dqk], [total, kv_heads, dv], [rows, heads, dv]];
        let draw = |i: usize| Fill::Normal.elements::<T>(shapes[i].iter().product(), i as u64);
        Self { qkv: [draw(0), draw(1), draw(2)], lens: lens.to_vec(), shapes }
    }

    fn problem(&self) -> AttentionProblem {
        let ([queries, heads, _], [keys, kv_heads, dv]) = (self.shapes[0], self.shapes[2]);
        AttentionProblem { sequences: self.lens.len(), heads, kv_heads, queries, keys, dv }
    }

    /// Runs with a workspace of exactly the length that `lean_workspace` says.
    #[track_caller]
    fn run(&self, gpu: &Gpu, programs: Programs, causal: bool) -> (Array<T>, Array<f32>) {
        let len = lean_workspace(gpu.stream().device().info(), &self.problem(), programs);
        let mut workspace = gpu.poisoned::<f32>([len]);
        let out = self.run_with(gpu, programs, causal, Some(workspace.view_mut())).unwrap();
        gpu.assert_guards(&workspace);
        out
    }

    fn run_with(
        &self,
        gpu: &Gpu,
        programs: Programs,
        causal: bool,
        workspace: Option<TensorViewMut<f32>>,
    ) -> Result<(Array<T>, Array<f32>)> {
        let [q, k, v] = [0, 1, 2].map(|i| gpu.upload(&self.qkv[i], self.shapes[i]));
        let lens = gpu.upload(&self.lens, [self.lens.len()]);
        let [rows, heads, _] = self.shapes[3];
        let (mut out, mut lse) = (gpu.poisoned::<T>(self.shapes[3]), gpu.poisoned([rows, heads]));
        let inputs = Qkv { q: q.view(), k: k.view(), v: v.view() };
        let outputs = AttentionOutputs { out: out.view_mut(), lse: Some(lse.view_mut()) };
        let options = LeanOptions { causal, programs, ..LeanOptions::default() };
        lean_atten(gpu.stream(), inputs, lens.view(), outputs, workspace, &options)?;
        Ok((gpu.download(&out), gpu.download(&lse)))
    }
}

/// Another number of programs rounds probabilities to another base: within these relative errors. The same number gives the same bits, whatever the
/// workspace held before; one program has those of a block for each tile of as many rows.
#[test]
fn programs_change_little() {
    fn change_little<T: Float + AttentionElement + AttentionOutput<T>>(columns: [usize; 4], most: f64) {
        let few = Ragged::<T>::new(20, &[700, 65, 0, 129], columns);
        let many = Ragged::<T>::new(150, &[257, 1, 430], columns);
        for gpu in kit::devices() {
            for (data, causal) in [(&few, true), (&few, false), (&many, true), (&many, false)] {
                let one = data.run(&gpu, Programs::Count(1), causal);
                let cus = gpu.stream().device().info().compute_units as usize;
                for programs in [2, 3, 7, 16, cus] {
                    let got = data.run(&gpu, Programs::Count(programs), causal);
                    let difference = |(a, b): (f64, f64)| [(a - b).powi(2), b.powi(2)];
                    let sums = (kit::widen(&got.0).into_iter().zip(kit::widen(&one.0)).map(difference))
                        .fold([0.0; 2], |sum, x| [sum[0] + x[0], sum[1] + x[1]]);
                    let error = (sums[0] / sums[1]).sqrt();
                    assert!(error <= most, "{}, {programs} programs: {error:e}", T::DTYPE);
                    kit::assert_close(
                        &got.1,
                        &kit::widen(&one.1),
                        Tolerance::Within { rtol: 1e-6, atol: 2e-6 },
                    );
                    let again = data.run(&gpu, Programs::Count(programs), causal);
                    kit::assert_bits(&again.0, &got.0);
                    kit::assert_bits(&again.1, &got.1);
                }
            }
            let plain = few.run_with(&gpu, Programs::Auto, true, None).unwrap();
            let one = few.run(&gpu, Programs::Count(1), true);
            kit::assert_bits(&one.0, &plain.0);
            kit::assert_bits(&one.1, &plain.1);
        }
    }
    change_little::<f32>([2, 1, 32, 40], 2e-6);
    change_little::<f16>([4, 2, 64, 64], 3e-4);
    change_little::<bf16>([2, 2, 128, 128], 3e-3);
    change_little::<bf16>([2, 1, 192, 256], 3e-3);
}

/// A sequence of many keys for one query is shared by as many blocks as are resident, short sequences are not. A workspace that
/// `Programs::Auto` does not need may be anything.
#[test]
fn programs_that_suit_the_device() {
    let long = Ragged::<bf16>::new(1, &[9000, 40], [8, 2, 64, 64]);
    let short = Ragged::<bf16>::new(16, &[60; 3], [8, 2, 64, 64]);
    for gpu in kit::devices() {
        let info = gpu.stream().device().info();
        assert_eq!(lean_workspace(info, &short.problem(), Programs::Auto), 0);
        // Two heads, 9040 keys: a program for each 256 keys. Two tiles of the four rows that there are, and where it begins.
        let programs = (2 * 9040 / 256).min(2 * info.compute_units as usize);
        let len = lean_workspace(info, &long.problem(), Programs::Auto);
        assert_eq!(len, programs * (2 * 4 * 66 + 8));
        let got = long.run(&gpu, Programs::Auto, true);
        kit::assert_bits(&long.run(&gpu, Programs::Count(programs), true).0, &got.0);
        let mut less = gpu.poisoned::<f32>([len - 1]);
        let error = long.run_with(&gpu, Programs::Auto, true, Some(less.view_mut())).map(|_| ());
        let (got, want) = (format!("[{}]", len - 1), format!("[{len}] or longer ({programs} programs)"));
        kit::assert_error(error, kind!(Shape), &["lean_atten: workspace", &got, &want]);
        short.run_with(&gpu, Programs::Auto, true, Some(less.view_mut())).unwrap();
        gpu.assert_guards(&less);
    }
}

/// A count of programs needs its workspace, and is a number of blocks.
#[test]
fn programs_are_refused() {
    let gpu = &kit::devices()[0];
    let data = Ragged::<bf16>::new(4, &[200], [1, 1, 16, 16]);
    let mut short = gpu.poisoned::<f32>([7 * (2 * 4 * 18 + 8) - 1]);
    let mut run = |programs, given: bool| {
        let workspace = given.then(|| short.view_mut());
        data.run_with(gpu, Programs::Count(programs), false, workspace).map(|_| ())
    };
    gpu.assert_nothing_launched(|| {
        let want = ["lean_atten: workspace", "[0]", "[1064] or longer (7 programs)"];
        kit::assert_error(run(7, false), kind!(Shape), &want);
        kit::assert_error(run(7, true), kind!(Shape), &["[1063]", "[1064]"]);
        for programs in [0, 65537, usize::MAX] {
            let want = ["lean_atten: programs", "1 to 65536"];
            kit::assert_error(run(programs, true), kind!(Argument), &want);
        }
    });
}

#[test]
fn bad_calls_are_refused() {
    Refusals::new((None, 2), |stream, tensors, (scale, programs)| {
        let inputs = Qkv { q: tensors.input::<bf16>("q"), k: tensors.input("k"), v: tensors.input("v") };
        let outputs =
            AttentionOutputs { out: tensors.output::<bf16>("out"), lse: tensors.optional_output("lse") };
        let options = LeanOptions { scale, causal: true, programs: Programs::Count(programs) };
        let workspace = tensors.optional_output("workspace");
        lean_atten(stream, inputs, tensors.input("kv_lens"), outputs, workspace, &options)
    })
    .input::<bf16>("q", [6, 4, 8])
    .input::<bf16>("k", [9, 2, 8])
    .input::<bf16>("v", [9, 2, 6])
    .input::<i32>("kv_lens", [2])
    .output::<bf16>("out", [6, 4, 6])
    .output::<f32>("lse", [6, 4])
    .output::<f32>("workspace", [256])
    .accepts(|_| {})
    .accepts(|call| {
        call.options.1 = 1;
        call.without("workspace");
    })
    .refuses(kind!(Shape), &["lean_atten: workspace: shape [0]", "[256] or longer"], |call| {
        call.without("workspace")
    })
    .accepts(|call| call.shape("kv_lens", [3]))
    .refuses(kind!(Argument), &["lean_atten: programs: 0", "1 to 65536"], |call| call.options.1 = 0)
    .refuses(kind!(Shape), &["lean_atten: q: shape [6, 4, 8]", "a multiple of 4 rows"], |call| {
        call.shape("kv_lens", [4]);
    })
    .refuses(kind!(Shape), &["lean_atten: q: shape [6, 4, 8]", "a multiple of 0 rows"], |call| {
        call.shape("kv_lens", [0]);
    })
    .refuses(kind!(Shape), &["lean_atten: v: shape [8, 2, 6]", "[9, 2, 6]"], |call| {
        call.shape("v", [8, 2, 6]);
    })
    .refuses(kind!(Shape), &["lean_atten: k: shape [9, 2, 7]", "8 columns"], |call| {
        call.shape("k", [9, 2, 7]);
    })
    .refuses(kind!(Shape), &["lean_atten: lse: shape [4, 6]"], |call| call.shape("lse", [4, 6]))
    .refuses(kind!(Stride), &["lean_atten: workspace", "contiguous"], |call| call.strides("workspace", [2]))
    .refuses(kind!(Shape), &["lean_atten: workspace", "[2, 4]"], |call| call.shape("workspace", [2, 4]))
    .refuses(kind!(Stride), &["lean_atten: kv_lens", "contiguous"], |call| call.strides("kv_lens", [2]))
    .refuses(kind!(Argument), &["lean_atten: scale: 0"], |call| call.options.0 = Some(0.0))
    .refuses(kind!(Argument), &["lean_atten: scale: NaN"], |call| call.options.0 = Some(f32::NAN))
    .refuses_other_devices()
    .refuses_overlaps();
}
