//! `pod_attn` on the emulated GPUs (and real ones where there are some): against its f64 reference, and bit for bit against the operators of its
//! halves.

use crate::paged::{Cached, Case, Given, maybe};
use hk_attention::{
    AttentionOutputs, DecodeWorkspace, KvLayout, PaDecodeInputs, PagedKv, Pages, PodDecode, PodOptions,
    PodPrefill, Qkv, SequenceStarts, Splits, pod_attn,
};
use hk_core::registry::{HostCall, HostTensor, Scalar};
use hk_core::{Result, Stream, bf16, f16};
use hk_testkit::{Refusals, Tensors, config, devices, kind, proptest::prelude::*, proptest::sample::select};

/// Prompts, packed, and single tokens, in pages: cases of the same heads and columns.
#[derive(Debug, Clone)]
struct Both {
    prompts: Case,
    tokens: Case,
}

fn drawn() -> impl Strategy<Value = Both> {
    let columns = select(vec![[64, 64], [128, 128], [128, 128], [80, 128], [64, 40], [256, 256], [17, 21]]);
    let heads = (1usize..3, select(vec![1usize, 2, 4, 8, 20]));
    let prompts = prop::collection::vec((select(vec![0usize, 1, 17, 65, 130]), 0usize..40), 0..4);
    let tokens = prop::collection::vec(select(vec![0usize, 1, 16, 33, 129, 300]), 0..4);
    let pages = (select(vec![0usize, 0, 1, 2]), select(vec![16usize, 16, 48, 3]), any::<u32>());
    (columns, heads, prompts, tokens, pages).prop_map(
        |(columns, (kv_heads, group), prompts, tokens, (layout, page, seed))| {
            let prompts: Vec<_> = prompts.into_iter().map(|(q, before)| [q, q + before]).collect();
            let prompts = Case::new(&prompts, [kv_heads, group], columns);
            let tokens: Vec<_> = tokens.into_iter().map(|keys| [1, keys]).collect();
            let layout = crate::paged::LAYOUTS[layout];
            let columns = if layout.1 == KvLayout::Paged {
                columns.map(|n: usize| n.next_multiple_of(16))
            } else {
                columns
            };
            let tokens =
                Case { seed: seed.into(), layout, page, ..Case::new(&tokens, [kv_heads, group], columns) };
            Both { prompts, tokens }
        },
    )
}

impl Both {
    fn halves<T: Cached>(&self) -> [Given; 2] {
        let short = self.prompts.varlen::<T>(false).scalar("tile", Scalar::Choice("short"));
        [short, self.tokens.decode::<T, T>()]
    }

    fn given<T: Cached>(&self) -> Given {
        let [prompts, tokens] = self.halves::<T>();
        let of = |given: &Given, from: &str| given.get(from).clone();
        let tensors = vec![
            ("q_prefill", of(&prompts, "q")),
            ("k_prefill", of(&prompts, "k")),
            ("v_prefill", of(&prompts, "v")),
            ("cu_seqlens_q", of(&prompts, "cu_seqlens_q")),
            ("cu_seqlens_k", of(&prompts, "cu_seqlens_k")),
            ("q_decode", of(&tokens, "q")),
            ("k_cache", of(&tokens, "k_cache")),
            ("v_cache", of(&tokens, "v_cache")),
            ("block_table", of(&tokens, "block_table")),
            ("seq_lens", of(&tokens, "seq_lens")),
        ];
        let wanted = vec!["lse_prefill", "lse_decode"];
        Given { op: "pod_attn", tensors, scalars: vec![self.tokens.layout()], wanted }
    }
}

/// Options that the halves have, too.
fn with_options(given: Given, bits: u32) -> Given {
    let windowed = |given: Given| match given.op {
        "mha_varlen" => given.scalar("window_left", Scalar::Int(20)),
        _ => given.scalar("window", Scalar::Int(20)),
    };
    let given = if maybe(bits, 0) { windowed(given) } else { given };
    let given = if maybe(bits, 1) { given.scalar("scale", Scalar::Float(0.2)) } else { given };
    match bits >> 2 & 3 {
        1 if given.op != "mha_varlen" => given.scalar("nsplit", Scalar::Count(3)),
        2 if given.op != "mha_varlen" => given.scalar("keys_per_split", Scalar::Count(64)),
        _ => given,
    }
}

fn mixed(given: Given, bits: u32) -> Given {
    let [prompts, tokens] = [[0, 0], [1, 0], [0, 1], [5, 2]][(bits >> 4 & 3) as usize];
    given.scalar("prefill_blocks", Scalar::Count(prompts)).scalar("decode_blocks", Scalar::Count(tokens))
}

/// Outputs by name, on each device.
fn outputs(call: &HostCall) -> Vec<Vec<(&'static str, HostTensor)>> {
    devices().iter().map(|gpu| call.operator().execute(gpu.stream(), call).unwrap()).collect()
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn matches_the_reference(both in drawn(), bits in any::<u32>()) {
        let given = if maybe(bits, 8) { both.given::<f16>() } else { both.given::<bf16>() };
        mixed(with_options(given, bits), bits).check();
    }

    /// Bit for bit the operators of the halves, whatever the mix.
    #[test]
    fn halves_are_as_by_themselves(both in drawn(), bits in any::<u32>()) {
        let got = outputs(&mixed(with_options(both.given::<bf16>(), bits), bits).call());
        for (half, given) in ["prefill", "decode"].into_iter().zip(both.halves::<bf16>()) {
            for (got, want) in got.iter().zip(outputs(&with_options(given, bits).call())) {
                for (name, want) in want {
                    let of = format!("{name}_{half}");
                    let got = &got.iter().find(|(name, _)| *name == of).unwrap().1;
                    prop_assert_eq!(got, &want, "{}", of);
                }
            }
        }
    }
}

/// More blocks of either kind than the other, in one launch: tickets are as those of `pa_decode`.
#[test]
fn long_lists_of_either_kind() {
    for (queries, tokens) in [(700, 1), (20, 20)] {
        let prompts = Case::new(&[[queries, queries]], [2, 4], [64, 64]);
        let tokens = Case::new(&vec![[1, 200]; tokens], [2, 4], [64, 64]);
        let both = Both { prompts, tokens };
        for bits in [0, 8, 0x10, 0x18, 0x28, 0x38] {
            let got = outputs(&mixed(with_options(both.given::<bf16>(), bits), bits).call());
            for (at, given) in both.halves::<bf16>().into_iter().enumerate() {
                for (got, want) in got.iter().zip(outputs(&with_options(given, bits).call())) {
                    assert_eq!(got[2 * at].1, want[0].1, "{queries} queries, {bits:#x}");
                }
            }
        }
    }
}

fn call(stream: &Stream, tensors: &mut Tensors, options: PodOptions) -> Result<()> {
    let qkv = Qkv::<bf16> {
        q: tensors.input("q_prefill"),
        k: tensors.input("k_prefill"),
        v: tensors.input("v_prefill"),
    };
    let cu_seqlens = SequenceStarts { q: tensors.input("cu_seqlens_q"), k: tensors.input("cu_seqlens_k") };
    let pages = Pages { block_table: tensors.input("block_table"), layout: KvLayout::Nhd };
    let inputs = PaDecodeInputs::<bf16, bf16> {
        q: tensors.input("q_decode"),
        cache: PagedKv { k_cache: tensors.input("k_cache"), v_cache: tensors.input("v_cache"), pages },
        seq_lens: tensors.input("seq_lens"),
    };
    let mut of = |out, lse| AttentionOutputs { out: tensors.output(out), lse: tensors.optional_output(lse) };
    let prefill = PodPrefill { qkv, cu_seqlens, outputs: of("out_prefill", "lse_prefill") };
    let outputs = of("out_decode", "lse_decode");
    let workspace = DecodeWorkspace { partials: tensors.optional_output("workspace"), tickets: None };
    pod_attn(stream, prefill, PodDecode { inputs, outputs, workspace }, &options)
}

#[test]
fn bad_calls_are_refused() {
    Refusals::new(PodOptions::default(), call)
        .input::<bf16>("q_prefill", [20, 4, 64])
        .input::<bf16>("k_prefill", [30, 2, 64])
        .input::<bf16>("v_prefill", [30, 2, 64])
        .input::<i32>("cu_seqlens_q", [3])
        .input::<i32>("cu_seqlens_k", [3])
        .input::<bf16>("q_decode", [2, 4, 64])
        .input::<bf16>("k_cache", [5, 16, 2, 64])
        .input::<bf16>("v_cache", [5, 16, 2, 64])
        .input::<i32>("block_table", [2, 3])
        .input::<i32>("seq_lens", [2])
        .output::<bf16>("out_prefill", [20, 4, 64])
        .output::<f32>("lse_prefill", [20, 4])
        .output::<bf16>("out_decode", [2, 4, 64])
        .output::<f32>("lse_decode", [2, 4])
        .output::<f32>("workspace", [4096])
        .accepts(|_| {})
        .accepts(|call| call.options.ratio = Some([3, 1]))
        .refuses(kind!(Argument), &["pod_attn: ratio: 0 : 0"], |call| call.options.ratio = Some([0, 0]))
        .refuses(kind!(Argument), &["pod_attn: scale: 0"], |call| call.options.scale = Some(0.0))
        .refuses(kind!(Argument), &["pod_attn: nsplit: 0"], |call| call.options.splits = Splits::Count(0))
        .refuses(kind!(Shape), &["pod_attn: k_prefill: shape [30, 2, 40]", "64 columns"], |call| {
            call.shape("k_prefill", [30, 2, 40]);
        })
        .refuses(kind!(Shape), &["pod_attn: out_prefill: shape [20, 4, 40]"], |call| {
            call.shape("out_prefill", [20, 4, 40]);
        })
        .refuses(kind!(Shape), &["pod_attn: lse_prefill: shape [4, 20]"], |call| {
            call.shape("lse_prefill", [4, 20]);
        })
        .refuses(kind!(Shape), &["pod_attn: cu_seqlens_k: shape [2]", "[3]"], |call| {
            call.shape("cu_seqlens_k", [2]);
        })
        .refuses(kind!(Shape), &["pod_attn: q_decode: shape [2, 3, 64]", "a multiple of 2"], |call| {
            call.shape("q_decode", [2, 3, 64]);
        })
        .refuses(kind!(Shape), &["pod_attn: out_decode: shape [3, 4, 64]"], |call| {
            call.shape("out_decode", [3, 4, 64]);
        })
        .refuses(kind!(Shape), &["pod_attn: seq_lens: shape [3]"], |call| call.shape("seq_lens", [3]))
        .refuses(kind!(Shape), &["pod_attn: workspace: shape [8]"], |call| {
            call.options.splits = Splits::KeysPerSplit(64);
            call.shape("block_table", [2, 9]);
            call.shape("workspace", [8]);
        })
        .refuses_other_devices()
        .refuses_overlaps();
}
