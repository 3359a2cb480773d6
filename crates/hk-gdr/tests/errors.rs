//! Errors of the operators. After an error every output is as it was.

use hk_core::{Layout, bf16};
use hk_gdr::{Gates, RecurrentInputs, RecurrentOptions, StateLayout, States, fused_recurrent};
use hk_testkit::{Call, Place, Refusals, kind};

const OPTIONS: RecurrentOptions = RecurrentOptions { scale: None, qk_l2norm: false, layout: StateLayout::Kv };

/// Two sequences of three tokens, two key heads of 16, four value heads of 8; states of a pool, or one for each sequence.
fn table<'f>(pooled: bool) -> Refusals<'f, RecurrentOptions> {
    let table = Refusals::new(OPTIONS, |stream, tensors, options| {
        let gates = Gates {
            g: tensors.optional_input("g"),
            gk: tensors.optional_input("gk"),
            gv: tensors.optional_input("gv"),
            beta: tensors.optional_input("beta"),
        };
        let inputs = RecurrentInputs::<bf16> {
            q: tensors.input("q"),
            k: tensors.input("k"),
            v: tensors.input("v"),
            gates,
            cu_seqlens: tensors.optional_input("cu_seqlens"),
        };
        let states = match tensors.optional_output::<f32>("state_pool") {
            Some(pool) => States::Pool {
                pool,
                indices: tensors.input("state_indices"),
                accepted: tensors.optional_input("num_accepted_tokens"),
            },
            None => States::Dense {
                initial: tensors.optional_input("initial_state"),
                last: tensors.optional_output("final_state"),
            },
        };
        fused_recurrent(stream, inputs, states, tensors.output("o"), options)
    })
    .input::<bf16>("q", [2, 3, 2, 16])
    .input::<bf16>("k", [2, 3, 2, 16])
    .input::<bf16>("v", [2, 3, 4, 8])
    .input::<f32>("g", [2, 3, 4])
    .input::<f32>("gk", [2, 3, 4, 16])
    .input::<f32>("gv", [2, 3, 4, 8])
    .input::<f32>("beta", [2, 3, 4])
    .output::<bf16>("o", [2, 3, 4, 8]);
    if pooled {
        table
            .input::<i32>("state_indices", [2, 3])
            .input::<i32>("num_accepted_tokens", [2])
            .output::<f32>("state_pool", [5, 4, 16, 8])
    } else {
        table.input::<f32>("initial_state", [2, 4, 16, 8]).output::<f32>("final_state", [2, 4, 16, 8])
    }
}

/// The same call with packed sequences of six tokens.
fn packed(call: &mut Call<RecurrentOptions>) {
    call.shape("q", [6, 2, 16]);
    call.shape("k", [6, 2, 16]);
    call.shape("v", [6, 4, 8]);
    call.shape("o", [6, 4, 8]);
    call.shape("g", [6, 4]);
    call.shape("gk", [6, 4, 16]);
    call.shape("gv", [6, 4, 8]);
    call.shape("beta", [6, 4]);
}

#[test]
fn shapes() {
    table(false)
        .accepts(|_| {})
        .accepts(|call| call.shape("beta", [2, 3, 4, 8]))
        .accepts(|call| {
            ["g", "gk", "gv", "beta", "initial_state", "final_state"]
                .iter()
                .for_each(|name| call.without(name));
        })
        .refuses(kind!(Shape), &["fused_recurrent: q: shape [6, 2, 16], expected 4 axes"], |call| {
            call.shape("q", [6, 2, 16]);
        })
        .refuses(kind!(Shape), &["k: shape [2, 3, 2, 17], expected [2, 3, 2, 16] (shape of q)"], |call| {
            call.shape("k", [2, 3, 2, 17]);
        })
        .refuses(kind!(Shape), &["v: shape [2, 4, 4, 8]", "tokens of q"], |call| {
            call.shape("v", [2, 4, 4, 8])
        })
        .refuses(kind!(Shape), &["v: shape [2, 3, 3, 8]", "multiple of 2 heads"], |call| {
            call.shape("v", [2, 3, 3, 8]);
        })
        .refuses(kind!(Shape), &["v: shape [2, 3, 0, 8]"], |call| call.shape("v", [2, 3, 0, 8]))
        .refuses(kind!(Unsupported), &["K = 257", "1 to 256"], |call| {
            call.shape("q", [2, 3, 2, 257]);
            call.shape("k", [2, 3, 2, 257]);
        })
        .refuses(kind!(Unsupported), &["V = 257"], |call| call.shape("v", [2, 3, 4, 257]))
        .refuses(kind!(Unsupported), &["V = 0"], |call| call.shape("v", [2, 3, 4, 0]))
        .refuses(kind!(Shape), &["o: shape [2, 3, 4, 9]"], |call| call.shape("o", [2, 3, 4, 9]))
        .refuses(kind!(Shape), &["g: shape [2, 3, 5], expected [2, 3, 4]"], |call| call.shape("g", [2, 3, 5]))
        .refuses(kind!(Shape), &["gk: shape [2, 3, 4, 8]"], |call| call.shape("gk", [2, 3, 4, 8]))
        .refuses(kind!(Shape), &["gv: shape [2, 3, 4, 16]"], |call| call.shape("gv", [2, 3, 4, 16]))
        .refuses(kind!(Shape), &["beta: shape [2, 3, 4, 16], expected [2, 3, 4] or [2, 3, 4, 8]"], |call| {
            call.shape("beta", [2, 3, 4, 16]);
        })
        .refuses(kind!(Shape), &["initial_state: shape [3, 4, 16, 8], expected [2, 4, 16, 8]"], |call| {
            call.shape("initial_state", [3, 4, 16, 8]);
        })
        .refuses(kind!(Shape), &["final_state: shape [2, 4, 8, 16]"], |call| {
            call.shape("final_state", [2, 4, 8, 16]);
        })
        .refuses(kind!(Shape), &["initial_state", "expected [2, 4, 8, 16]"], |call| {
            call.options.layout = StateLayout::Vk;
        })
        .refuses_other_devices();
    table(true)
        .accepts(|_| {})
        .accepts(|call| {
            call.shape("state_indices", [2]);
            call.without("num_accepted_tokens");
        })
        .refuses(kind!(Shape), &["state_pool: shape [5, 4, 16, 9]"], |call| {
            call.shape("state_pool", [5, 4, 16, 9])
        })
        .refuses(kind!(Shape), &["state_indices: shape [3, 3], expected [2] or [2, states]"], |call| {
            call.shape("state_indices", [3, 3]);
        })
        .refuses(kind!(Shape), &["state_indices: shape [2, 0]"], |call| call.shape("state_indices", [2, 0]))
        .refuses(kind!(Shape), &["num_accepted_tokens: shape [3], expected [2]"], |call| {
            call.shape("num_accepted_tokens", [3]);
        })
        .refuses(kind!(Argument), &["num_accepted_tokens: given"], |call| call.shape("state_indices", [2]))
        .refuses_other_devices();
    let with_starts = || table(false).input::<i32>("cu_seqlens", [3]);
    with_starts()
        .accepts(packed)
        .refuses(kind!(Shape), &["q: shape [2, 3, 2, 16], expected 3 axes"], |_| {})
        .refuses(kind!(Shape), &["cu_seqlens: shape [0]"], |call| {
            packed(call);
            call.shape("cu_seqlens", [0]);
        })
        .refuses(kind!(Shape), &["initial_state", "expected [3, 4, 16, 8]"], |call| {
            packed(call);
            call.shape("cu_seqlens", [4]);
        });
}

#[test]
fn scales() {
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        table(false).refuses(kind!(Argument), &["fused_recurrent: scale", "positive and finite"], |call| {
            call.options.scale = Some(scale);
        });
    }
}

#[test]
fn layouts_and_alignment() {
    let odd = |dims: [usize; 4]| Place::contiguous(dims).shifted(1);
    table(false)
        .accepts(|call| call.place("q", odd([2, 3, 2, 16])))
        .accepts(|call| call.strides("v", [200, 50, 9, 1]))
        .accepts(|call| call.strides("final_state", [600, 128, 8, 1]))
        .refuses(kind!(Stride), &["q"], |call| call.strides("q", [192, 64, 32, 2]))
        .refuses(kind!(Stride), &["o"], |call| call.strides("o", [192, 64, 16, 2]))
        .refuses(kind!(Stride), &["g"], |call| call.strides("g", [24, 8, 2]))
        .refuses(kind!(Stride), &["initial_state", "contiguous"], |call| {
            call.strides("initial_state", [1024, 256, 16, 1]);
        })
        .refuses(kind!(Stride), &["final_state"], |call| call.strides("final_state", [512, 128, 1, 16]));
    table(true)
        .refuses(kind!(Stride), &["state_pool"], |call| call.strides("state_pool", [1024, 256, 8, 1]))
        .refuses(kind!(Stride), &["state_indices"], |call| {
            let layout = Layout::with_strides([2, 3], [6, 2]).unwrap();
            call.place("state_indices", Place::new(layout));
        });
}

#[test]
fn overlaps() {
    table(false)
        .refuses(kind!(Overlap), &["v and o"], |call| call.overlap("v", "o", 0))
        .refuses(kind!(Overlap), &["q and o"], |call| call.overlap("q", "o", 7))
        .accepts(|call| call.overlap("initial_state", "final_state", 0))
        .refuses(kind!(Overlap), &["initial_state and final_state"], |call| {
            call.overlap("initial_state", "final_state", 512);
        })
        .refuses(kind!(Overlap), &["gk and final_state"], |call| call.overlap("gk", "final_state", 3));
    table(true).refuses(kind!(Overlap), &["gv and state_pool"], |call| call.overlap("gv", "state_pool", 1));
}

/// Nothing to do.
#[test]
fn no_sequences() {
    table(false).accepts(|call| {
        for (name, rest) in
            [("q", [2, 16]), ("k", [2, 16]), ("v", [4, 8]), ("o", [4, 8]), ("gk", [4, 16]), ("gv", [4, 8])]
        {
            call.shape(name, [0, 3, rest[0], rest[1]]);
        }
        call.shape("g", [0, 3, 4]);
        call.shape("beta", [0, 3, 4]);
        call.shape("initial_state", [0, 4, 16, 8]);
        call.shape("final_state", [0, 4, 16, 8]);
    });
}
