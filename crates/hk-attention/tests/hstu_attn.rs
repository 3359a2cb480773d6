//! `hstu_attn` and `hstu_attn_bwd` on the emulated GPUs (and real ones where there are some) against their f64 references.

use crate::common::attention::{Builder, starts};
use hk_attention::{
    HstuGradientInputs, HstuGradients, HstuOptions, HstuSequences, Qkv, hstu_attn, hstu_attn_bwd,
};
use hk_core::registry::Scalar;
use hk_core::{DType, Layout, bf16};
use hk_testkit::{self as kit, Array, Fill, Gpu, Place, Refusals, kind};

fn call(dtype: DType, lens: &[usize], columns: [usize; 3]) -> Builder {
    call_of("hstu_attn", dtype, lens, columns)
}

fn call_of(name: &str, dtype: DType, lens: &[usize], [heads, dqk, dv]: [usize; 3]) -> Builder {
    let rows = lens.iter().sum();
    let call = if name == "hstu_attn_bwd" {
        Builder::new(name).tensor("dout", dtype, [rows, heads, dv])
    } else {
        Builder::new(name)
    };
    call.tensor("q", dtype, [rows, heads, dqk])
        .tensor("k", dtype, [rows, heads, dqk])
        .tensor("v", dtype, [rows, heads, dv])
        .integers("seq_offsets", &starts(lens))
        .scalars(&[("alpha", Scalar::Float(0.2)), ("max_len", Scalar::Count(100))])
}

/// Every mask on sequences of many lengths, with no, one, five and only targets.
#[test]
fn every_mask() {
    const LENS: [usize; 6] = [17, 0, 1, 65, 3, 129];
    const COLUMNS: [[usize; 2]; 5] = [[32, 32], [64, 40], [40, 17], [128, 100], [16, 256]];
    let mut n = 0;
    for causal in [true, false] {
        for context in [0, 1, 4] {
            for reach in [0, 7] {
                for targets in [None, Some(0), Some(1), Some(5), Some(usize::MAX)] {
                    let dtype = [DType::Bf16, DType::F16, DType::F32][n % 3];
                    let [dqk, dv] = COLUMNS[n % 5];
                    for name in ["hstu_attn", "hstu_attn_bwd"] {
                        let mut call = call_of(name, dtype, &LENS, [1 + n % 2, dqk, dv]).scalars(&[
                            ("causal", Scalar::Bool(causal)),
                            ("contextual_len", Scalar::Count(context)),
                            ("max_attn_len", Scalar::Count(reach)),
                        ]);
                        if let Some(targets) = targets {
                            call = call.integers("num_targets", &LENS.map(|len| len.min(targets) as i32));
                        }
                        let mask = format!(
                            "causal: {causal}, context {context}, reach {reach}, targets {targets:?}"
                        );
                        call.check(&format!("{name}: {dtype}, {mask}"), n as u64);
                    }
                    n += 1;
                }
            }
        }
    }
}

/// Context longer than a sequence, distances beyond any, a divisor far from the lengths, no sequences, no rows.
#[test]
fn unusual_sizes() {
    for (name, value) in [
        ("contextual_len", 40),
        ("contextual_len", 41),
        ("contextual_len", u64::from(u32::MAX)),
        ("max_attn_len", u64::from(u32::MAX)),
        ("max_len", 1),
        ("max_len", 1 << 13),
    ] {
        for dtype in [DType::F16, DType::Bf16] {
            let call = call(dtype, &[40, 33], [2, 32, 32]).scalar(name, Scalar::Count(value));
            let call = call.integers("num_targets", &[0, 3]);
            call.check(&format!("{name} {value} in {dtype}"), value);
        }
    }
    for alpha in [0.0, -3.0] {
        let call = call(DType::F32, &[40], [1, 16, 16]).scalar("alpha", Scalar::Float(alpha));
        call.check(&format!("alpha {alpha}"), 1);
    }
    let many: Vec<usize> = (0..100).map(|i| i * 7 % 12).collect();
    call(DType::Bf16, &many, [1, 16, 16]).check("more sequences than a wave has lanes", 1);
    call(DType::Bf16, &[], [2, 16, 16]).check("no sequences", 1);
    call(DType::Bf16, &[0, 0], [2, 16, 16]).integers("num_targets", &[0, 0]).check("no rows", 1);
    call(DType::Bf16, &[4], [0, 16, 16]).check("no heads", 1);
}

/// NaN: of all outputs if the offsets are wrong, of a sequence if its targets are.
#[test]
fn offsets_and_targets_are_not_trusted() {
    for (offsets, targets) in [
        ([0, 9, 5, 30], [0, 1, 2]),
        ([0, 9, 15, 29], [0, 1, 2]),
        ([1, 9, 15, 30], [0, 1, 2]),
        ([0, i32::MIN, i32::MAX, 30], [0, 1, 2]),
        ([0, 9, 15, 30], [0, 7, 2]),
        ([0, 9, 15, 30], [-1, 6, 15]),
        ([0, 9, 15, 30], [i32::MAX, i32::MIN, 16]),
    ] {
        let b = Builder::new("hstu_attn").tensor("q", DType::F16, [30, 2, 16]);
        let b = b.tensor("k", DType::F16, [30, 2, 16]).tensor("v", DType::F16, [30, 2, 16]);
        let b = b.integers("seq_offsets", &offsets).integers("num_targets", &targets);
        b.scalar("max_len", Scalar::Count(9)).check(&format!("{offsets:?}, targets {targets:?}"), 3);
    }
}

const OPTIONS: HstuOptions =
    HstuOptions { alpha: 0.3, max_len: 50, causal: true, max_attn_len: 0, contextual_len: 0 };

/// Places of q, k, v and the output.
fn run(
    gpu: &Gpu,
    places: [Place; 4],
    starts: &[i32],
    data: &[Vec<bf16>; 3],
    options: HstuOptions,
) -> Array<bf16> {
    let [q, k, v, out] = places;
    let (q, k, v) = (gpu.upload(&data[0], q), gpu.upload(&data[1], k), gpu.upload(&data[2], v));
    let starts = gpu.upload(starts, [starts.len()]);
    let mut out = gpu.poisoned(out);
    let inputs = Qkv { q: q.view(), k: k.view(), v: v.view() };
    let sequences = HstuSequences { seq_offsets: starts.view(), num_targets: None };
    hstu_attn(gpu.stream(), inputs, sequences, out.view_mut(), options).unwrap();
    gpu.assert_guards(&out);
    gpu.download(&out)
}

/// Strides, other sequences of the batch, and a distance that none exceeds change no bit; values count linearly.
#[test]
fn laws() {
    let shapes = [[70, 2, 24], [70, 2, 24], [70, 2, 20], [70, 2, 20]];
    let draw = |i: usize| Fill::Normal.elements::<bf16>(shapes[i].iter().product(), i as u64);
    let data = [draw(0), draw(1), draw(2)];
    for gpu in kit::devices() {
        for causal in [true, false] {
            let options = HstuOptions { causal, ..OPTIONS };
            let want = run(&gpu, shapes.map(Place::from), &[0, 40, 70], &data, options);
            let strided = |i: usize, shape: [usize; 3]| {
                let layout = Layout::with_strides(shape, [25 + i, (25 + i) * 71, 1]).unwrap();
                Place::new(layout).shifted(i % 2)
            };
            let places = [0, 1, 2, 3].map(|i| strided(i, shapes[i]));
            kit::assert_bits(&run(&gpu, places, &[0, 40, 70], &data, options), &want);
            let far = HstuOptions { max_attn_len: 40, ..options };
            kit::assert_bits(&run(&gpu, shapes.map(Place::from), &[0, 40, 70], &data, far), &want);

            let last = [0, 1, 2].map(|i| data[i][40 * 2 * shapes[i][2]..].to_vec());
            let alone = shapes.map(|[_, heads, columns]| Place::from([30, heads, columns]));
            kit::assert_bits(&run(&gpu, alone, &[0, 30], &last, options), &want[40 * 40..]);

            let doubled = [data[0].clone(), data[1].clone(), data[2].iter().map(|v| *v + *v).collect()];
            let twice: Vec<bf16> = want.iter().map(|y| *y + *y).collect();
            kit::assert_bits(&run(&gpu, shapes.map(Place::from), &[0, 40, 70], &doubled, options), &twice);
        }
    }
}

#[test]
fn bad_calls_are_refused() {
    Refusals::new(OPTIONS, |stream, tensors, options| {
        let inputs = Qkv { q: tensors.input::<bf16>("q"), k: tensors.input("k"), v: tensors.input("v") };
        let sequences = HstuSequences {
            seq_offsets: tensors.input("seq_offsets"),
            num_targets: tensors.optional_input("num_targets"),
        };
        hstu_attn(stream, inputs, sequences, tensors.output("out"), options)
    })
    .input::<bf16>("q", [6, 2, 8])
    .input::<bf16>("k", [6, 2, 8])
    .input::<bf16>("v", [6, 2, 5])
    .input::<i32>("seq_offsets", [3])
    .input::<i32>("num_targets", [2])
    .output::<bf16>("out", [6, 2, 5])
    .accepts(|_| {})
    .accepts(|call| call.without("num_targets"))
    .refuses(kind!(Shape), &["hstu_attn: k: shape [6, 1, 8]", "[6, 2, 8]"], |call| {
        call.shape("k", [6, 1, 8]);
        call.shape("v", [6, 1, 5]);
    })
    .refuses(kind!(Shape), &["hstu_attn: k: shape [5, 2, 8]", "[6, 2, 8]"], |call| {
        call.shape("k", [5, 2, 8]);
        call.shape("v", [5, 2, 5]);
    })
    .refuses(kind!(Shape), &["hstu_attn: v: shape [5, 2, 5]"], |call| call.shape("v", [5, 2, 5]))
    .refuses(kind!(Shape), &["hstu_attn: out: shape [6, 2, 8]"], |call| call.shape("out", [6, 2, 8]))
    .refuses(kind!(Shape), &["hstu_attn: num_targets: shape [3]", "[2]"], |call| {
        call.shape("num_targets", [3]);
    })
    .refuses(kind!(Shape), &["hstu_attn: seq_offsets: shape [0]", "[sequences + 1]"], |call| {
        call.shape("seq_offsets", [0]);
        call.without("num_targets");
    })
    .refuses(kind!(Stride), &["hstu_attn: seq_offsets", "contiguous"], |call| {
        call.strides("seq_offsets", [2]);
    })
    .refuses(kind!(Argument), &["hstu_attn: alpha: NaN"], |call| call.options.alpha = f32::NAN)
    .refuses(kind!(Argument), &["hstu_attn: alpha: inf"], |call| call.options.alpha = f32::INFINITY)
    .refuses(kind!(Argument), &["hstu_attn: max_len: 0"], |call| call.options.max_len = 0)
    .refuses_other_devices()
    .refuses_overlaps();
}

#[test]
fn bad_gradients_are_refused() {
    let op = "hstu_attn_bwd";
    Refusals::new(OPTIONS, |stream, tensors, options| {
        let inputs = HstuGradientInputs {
            q: tensors.input::<bf16>("q"),
            k: tensors.input("k"),
            v: tensors.input("v"),
            dout: tensors.input("dout"),
        };
        let sequences = HstuSequences {
            seq_offsets: tensors.input("seq_offsets"),
            num_targets: tensors.optional_input("num_targets"),
        };
        let (dq, dk, dv) = (tensors.output("dq"), tensors.output("dk"), tensors.output("dv"));
        hstu_attn_bwd(stream, inputs, sequences, HstuGradients { dq, dk, dv }, options)
    })
    .input::<bf16>("q", [6, 2, 8])
    .input::<bf16>("k", [6, 2, 8])
    .input::<bf16>("v", [6, 2, 5])
    .input::<bf16>("dout", [6, 2, 5])
    .input::<i32>("seq_offsets", [3])
    .input::<i32>("num_targets", [2])
    .output::<bf16>("dq", [6, 2, 8])
    .output::<bf16>("dk", [6, 2, 8])
    .output::<bf16>("dv", [6, 2, 5])
    .accepts(|_| {})
    .accepts(|call| call.without("num_targets"))
    .refuses(kind!(Shape), &[op, "k: shape [5, 2, 8]", "[6, 2, 8]"], |call| call.shape("k", [5, 2, 8]))
    .refuses(kind!(Shape), &[op, "v: shape [5, 2, 5]"], |call| call.shape("v", [5, 2, 5]))
    .refuses(kind!(Shape), &[op, "dout: shape [6, 2, 8]"], |call| call.shape("dout", [6, 2, 8]))
    .refuses(kind!(Shape), &[op, "dq"], |call| call.shape("dq", [6, 2, 5]))
    .refuses(kind!(Shape), &[op, "dk"], |call| call.shape("dk", [5, 2, 8]))
    .refuses(kind!(Shape), &[op, "dv"], |call| call.shape("dv", [6, 2, 8]))
    .refuses(kind!(Shape), &[op, "num_targets: shape [3]", "[2]"], |call| call.shape("num_targets", [3]))
    .refuses(kind!(Shape), &[op, "seq_offsets: shape [1]"], |call| {
        call.shape("seq_offsets", [1]);
        call.shape("num_targets", [0]);
    })
    .refuses(kind!(Argument), &[op, "alpha: NaN"], |call| call.options.alpha = f32::NAN)
    .refuses(kind!(Argument), &[op, "max_len: 0"], |call| call.options.max_len = 0)
    .refuses_other_devices()
    .refuses_overlaps();
}
