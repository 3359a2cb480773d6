//! `merge_attn_states` on the emulated GPUs (and real ones where there are some) against its f64 reference.

use crate::common::attention::Builder;
use crate::paged::Case;
use hk_attention::{AttentionOutputs, AttentionState, merge_attn_states};
use hk_core::registry::HostTensor;
use hk_core::{DType, Layout, bf16, f16};
use hk_testkit::{self as kit, Fill, Place, Refusals, kind};

const NEVER: f32 = f32::NEG_INFINITY;

fn call(dtype: DType, [tokens, heads, columns]: [usize; 3]) -> Builder {
    Builder::new("merge_attn_states")
        .tensor("out_a", dtype, [tokens, heads, columns])
        .f32("lse_a", [tokens, heads])
        .tensor("out_b", dtype, [tokens, heads, columns])
        .f32("lse_b", [tokens, heads])
        .want("lse")
}

#[test]
fn matches_the_reference() {
    for (n, sizes) in
        [[1, 1, 1], [0, 3, 8], [5, 0, 8], [33, 2, 64], [7, 3, 130], [2, 40, 128], [9, 5, 256], [3, 1, 7]]
            .into_iter()
            .enumerate()
    {
        for dtype in [DType::Bf16, DType::F16, DType::F32] {
            call(dtype, sizes).check(&format!("{dtype} {sizes:?}"), n as u64);
        }
    }
}

/// A set without keys weighs nothing, whatever its values are; far apart, one has all the weight; NaN stays.
#[test]
fn weights() {
    let of_lse =
        [[NEVER, 0.5], [0.5, NEVER], [NEVER, NEVER], [1e30, -1e30], [-700.0, 700.0], [f32::NAN, 0.0]];
    for gpu in kit::devices() {
        let rows = of_lse.len();
        // The values of sets without keys are NaN.
        let values = |i: usize, x: f32| {
            let of = |row: &[f32; 2]| if row[i] == NEVER { f32::NAN } else { x };
            let all: Vec<bf16> = of_lse.iter().flat_map(|row| [bf16::from_f32(of(row)); 8]).collect();
            gpu.upload(&all, [rows, 1, 8])
        };
        let lse = |i: usize| gpu.upload(&of_lse.map(|row| row[i]), [rows, 1]);
        let (a, b, lse_a, lse_b) = (values(0, 1.0), values(1, 2.0), lse(0), lse(1));
        let (mut out, mut lse) = (gpu.poisoned::<bf16>([rows, 1, 8]), gpu.poisoned::<f32>([rows, 1]));
        let outputs = AttentionOutputs { out: out.view_mut(), lse: Some(lse.view_mut()) };
        let a = AttentionState { out: a.view(), lse: lse_a.view() };
        let b = AttentionState { out: b.view(), lse: lse_b.view() };
        merge_attn_states(gpu.stream(), a, b, outputs).unwrap();
        let out: Vec<f32> = gpu.download(&out).data.iter().step_by(8).map(|x| x.to_f32()).collect();
        assert_eq!(out[..5], [2.0, 1.0, 0.0, 1.0, 2.0], "{}", gpu.spec());
        let lse = gpu.download(&lse).data;
        assert_eq!(lse[..3], [0.5, 0.5, NEVER]);
        assert!((lse[3] / 1e30 - 1.0).abs() < 1e-6 && (lse[4] - 700.0).abs() < 1e-3);
        assert!(out[5].is_nan() && lse[5].is_nan());
    }
}

/// Decoding over a prefix that sequences share, and over the rest of each, is decoding over all.
#[test]
fn a_shared_prefix() {
    let case = Case::new(&[[1, 200], [1, 150]], [2, 2], [64, 64]);
    let part = |before: i32| {
        let given = case.decode::<bf16, bf16>();
        let width = given.get("block_table").elements::<i32>().unwrap().len() / 2;
        // Six pages of 16 tokens are the prefix.
        let given = given.changed("seq_lens", |lens| {
            for len in lens {
                *len = if before == 0 { 96 } else { *len - 96 };
            }
        });
        given.changed("block_table", |table| {
            if before != 0 {
                table.chunks_mut(width).for_each(|row| row.rotate_left(6));
            }
        })
    };
    let all = case.decode::<bf16, bf16>().call();
    let parts = [part(0).call(), part(96).call()];
    for gpu in kit::devices() {
        let run = |call: &hk_core::registry::HostCall| call.operator().execute(gpu.stream(), call).unwrap();
        let of = |tensors: &[(&str, HostTensor)], name: &str| {
            tensors.iter().find(|(other, _)| *other == name).unwrap().1.clone()
        };
        let [a, b] = [run(&parts[0]), run(&parts[1])];
        let tensors = [
            ("out_a", of(&a, "out")),
            ("lse_a", of(&a, "lse")),
            ("out_b", of(&b, "out")),
            ("lse_b", of(&b, "lse")),
        ];
        let merged =
            kit::host_call(hk_attention::OPERATORS, "merge_attn_states", &tensors, &[], &["lse"]).unwrap();
        let (got, want) = (run(&merged), run(&all));
        for (name, within) in [("out", 2e-2), ("lse", 1e-4)] {
            for (x, y) in of(&got, name).to_f64().into_iter().zip(of(&want, name).to_f64()) {
                assert!((x - y).abs() <= within * (1.0 + y.abs()), "{name}: {x} {y} on {}", gpu.spec());
            }
        }
    }
}

#[test]
fn strided_views() {
    for gpu in kit::devices() {
        let draw = |seed| Fill::Normal.elements::<f16>(6 * 3 * 24, seed);
        let of_lse = |seed| Fill::Normal.elements::<f32>(18, seed);
        let run = |place: &dyn Fn() -> Place, of_sums: &dyn Fn() -> Place| {
            let (a, b) = (gpu.upload(&draw(1), place()), gpu.upload(&draw(2), place()));
            let (lse_a, lse_b) = (gpu.upload(&of_lse(3), of_sums()), gpu.upload(&of_lse(4), of_sums()));
            let (mut out, mut lse) = (gpu.poisoned::<f16>(place()), gpu.poisoned::<f32>(of_sums()));
            let outputs = AttentionOutputs { out: out.view_mut(), lse: Some(lse.view_mut()) };
            let a = AttentionState { out: a.view(), lse: lse_a.view() };
            let b = AttentionState { out: b.view(), lse: lse_b.view() };
            merge_attn_states(gpu.stream(), a, b, outputs).unwrap();
            gpu.assert_guards(&out);
            gpu.assert_guards(&lse);
            (gpu.download(&out).data, gpu.download(&lse).data)
        };
        let strided = |strides: [usize; 3]| Place::new(Layout::with_strides([6, 3, 24], strides).unwrap());
        let sums = |strides: [usize; 2]| Place::new(Layout::with_strides([6, 3], strides).unwrap());
        let want = run(&|| strided([72, 24, 1]), &|| sums([3, 1]));
        assert_eq!(run(&|| strided([100, 29, 1]).shifted(1), &|| sums([1, 6])), want);
        assert_eq!(run(&|| strided([24, 160, 1]), &|| sums([7, 2])), want);
    }
}

#[test]
fn errors() {
    Refusals::new((), |stream, tensors, ()| {
        let a = AttentionState::<bf16> { out: tensors.input("out_a"), lse: tensors.input("lse_a") };
        let b = AttentionState::<bf16> { out: tensors.input("out_b"), lse: tensors.input("lse_b") };
        let outputs = AttentionOutputs { out: tensors.output("out"), lse: tensors.optional_output("lse") };
        merge_attn_states(stream, a, b, outputs)
    })
    .input::<bf16>("out_a", [6, 4, 32])
    .input::<f32>("lse_a", [6, 4])
    .input::<bf16>("out_b", [6, 4, 32])
    .input::<f32>("lse_b", [6, 4])
    .output::<bf16>("out", [6, 4, 32])
    .output::<f32>("lse", [6, 4])
    .accepts(|_| {})
    .refuses(kind!(Shape), &["out_b: shape [6, 4, 16]"], |c| c.shape("out_b", [6, 4, 16]))
    .refuses(kind!(Shape), &["lse_a"], |c| c.shape("lse_a", [4, 6]))
    .refuses(kind!(Shape), &["lse_b"], |c| c.shape("lse_b", [6, 3]))
    .refuses(kind!(Shape), &["out: shape"], |c| c.shape("out", [6, 4, 31]))
    .refuses(kind!(Shape), &["lse: shape"], |c| c.shape("lse", [5, 4]))
    .refuses(kind!(Stride), &["out_a"], |c| c.strides("out_a", [256, 64, 2]))
    .refuses(kind!(Stride), &["out_b"], |c| c.strides("out_b", [256, 64, 2]))
    .refuses(kind!(Stride), &["out"], |c| c.strides("out", [256, 64, 2]))
    .refuses(kind!(Empty), &["out_a"], |c| {
        c.shape("out_a", [6, 4, 0]);
        c.shape("out_b", [6, 4, 0]);
        c.shape("out", [6, 4, 0]);
    })
    .refuses_overlaps()
    .refuses_other_devices();
}
