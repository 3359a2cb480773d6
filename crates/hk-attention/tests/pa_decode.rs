//! `pa_decode` on the emulated GPUs (and real ones where there are some): against its f64 reference, and against itself with the work cut
//! in other ways.

use crate::paged::{Cached, Case, Given, LAYOUTS, ints, maybe, with_options};
use hk_attention::{
    AttentionOutputs, CacheScales, DecodeWorkspace, KvLayout, PaDecodeInputs, PaDecodeOptions, PagedElement,
    PagedKv, Pages, Splits, Tickets, pa_decode,
};
use hk_core::registry::{Described, HostTensor, Scalar, TensorSpec};
use hk_core::{Arch, DType, Fp8E4M3, Fp8E4M3Fnuz, Result, Stream, TensorView, bf16, f16};
use hk_testkit::{
    Call, CallElement, Fill, Gpu, Refusals, Tensor, Tensors, config, devices, kind, proptest::prelude::*,
    proptest::sample::select,
};

/// Keys of sequences, at the borders of steps, pages and splits.
fn lens() -> impl Strategy<Value = Vec<[usize; 2]>> {
    let keys = select(vec![0usize, 1, 2, 15, 16, 17, 31, 33, 64, 127, 128, 129, 200, 257, 400, 700]);
    prop::collection::vec(keys.prop_map(|keys| [1, keys]), 1..4)
}

fn cases() -> impl Strategy<Value = Case> {
    let heads = (1usize..3, select(vec![1usize, 2, 3, 8, 16, 20, 40, 64, 130]));
    let columns = select(vec![
        [64, 64],
        [128, 128],
        [128, 128],
        [256, 256],
        [16, 16],
        [40, 24],
        [80, 128],
        [192, 128],
        [48, 208],
        [17, 17],
    ]);
    let pages = (select(LAYOUTS.to_vec()), select(vec![1usize, 3, 8, 16, 16, 48, 64, 128]));
    (lens(), heads, columns, pages, any::<u32>(), any::<u32>()).prop_map(
        |(lens, (kv_heads, group), mut columns, (layout, mut page), seed, order)| {
            if matches!(layout.1, KvLayout::Paged | KvLayout::PagedShuffled) {
                columns = columns.map(|n: usize| n.next_multiple_of(16));
            }
            if layout.1 == KvLayout::PagedShuffled {
                page = page.next_multiple_of(16);
            }
            Case { lens, kv_heads, group, columns, layout, page, seed: seed.into(), order: order.into() }
        },
    )
}

fn splits() -> impl Strategy<Value = Option<(&'static str, u64)>> {
    let counts = select(vec![1u64, 2, 3, 7, 40]).prop_map(|n| Some(("nsplit", n)));
    prop_oneof![Just(None), counts, select(vec![64u64, 128, 320]).prop_map(|n| Some(("keys_per_split", n)))]
}

fn split(given: Given, splits: Option<(&'static str, u64)>) -> Given {
    splits.into_iter().fold(given, |given, (name, n)| given.scalar(name, Scalar::Count(n)))
}

/// With factors of tokens instead of others.
fn of_tokens(case: &Case, given: Given, bits: u32) -> Given {
    let window = if maybe(bits, 16) { [0, 7, 40, 127][(bits >> 14 & 3) as usize] } else { usize::MAX };
    let scale = if given.get("k_cache").dtype() == DType::I8 { 1.0 / 32.0 } else { 1.0 };
    let [pages, width] = [given.get("k_cache").shape()[0], given.get("block_table").shape()[1]];
    let table = given.get("block_table").elements::<i32>().unwrap();
    let shape = [pages, case.kv_heads, case.page];
    let mut of_all = given;
    for (name, seed) in [("k_scale", 8), ("v_scale", 9)] {
        let drawn: Vec<f32> = Fill::Normal.elements(shape.iter().product(), seed);
        let mut scales = vec![f32::NAN; drawn.len()];
        for (n, [_, keys]) in case.lens.iter().enumerate() {
            for key in keys.saturating_sub(window.saturating_add(1))..*keys {
                let page = table[n * width + key / case.page] as usize;
                for head in 0..case.kv_heads {
                    let at = (page * case.kv_heads + head) * case.page + key % case.page;
                    scales[at] = scale * (1.0 + 0.5 * drawn[at]);
                }
            }
        }
        of_all = of_all.with(name, HostTensor::new(shape, &scales).unwrap());
    }
    of_all
}

proptest! {
    #![proptest_config(config())]

    /// Options alone and together, types, layouts, splits; slots that no sequence has spoil nothing.
    #[test]
    fn matches_the_reference(case in cases(), bits in any::<u32>(), splits in splits()) {
        let of = match bits >> 26 & 7 {
            0 => Case::decode::<f16, i8>,
            1 => Case::decode::<f32, f32>,
            2 => Case::decode::<bf16, i8>,
            3 | 4 => Case::decode::<f16, f16>,
            _ => Case::decode::<bf16, bf16>,
        };
        split(with_options(&case, of(&case), bits), splits).check();
    }

    /// The fp8 of each device.
    #[test]
    fn fp8_matches_the_reference(case in cases(), bits in any::<u32>(), splits in splits()) {
        for gpu in devices() {
            let fnuz = gpu.arch() == Arch::Gfx942;
            let of = match (bits >> 28 & 3, fnuz) {
                (0, true) => Case::decode::<Fp8E4M3Fnuz, Fp8E4M3Fnuz>,
                (0, false) => Case::decode::<Fp8E4M3, Fp8E4M3>,
                (1, true) => Case::decode::<f16, Fp8E4M3Fnuz>,
                (1, false) => Case::decode::<f16, Fp8E4M3>,
                (_, true) => Case::decode::<bf16, Fp8E4M3Fnuz>,
                (_, false) => Case::decode::<bf16, Fp8E4M3>,
            };
            let mut given = split(with_options(&case, of(&case), bits), splits);
            if maybe(bits, 25) {
                let output = Scalar::Choice(if fnuz { "fp8e4m3fnuz" } else { "fp8e4m3" });
                // Outputs of many keys are small: not among the subnormal numbers of fp8.
                let scale = HostTensor::new([1], &[0.25f32]).unwrap();
                given = given.scalar("output", output).with("out_scale", scale);
            }
            given.check_on(&gpu);
        }
    }

    /// Factors of tokens; those of slots that no query sees are NaN.
    #[test]
    fn factors_of_tokens_match_the_reference(case in cases(), bits in any::<u32>(), splits in splits()) {
        let layout = LAYOUTS[usize::from(maybe(bits, 24))];
        let columns = case.columns.map(|n| n.next_multiple_of(16));
        let case = Case { layout, page: case.page.next_multiple_of(16), columns, ..case };
        for gpu in devices() {
            let of = match (bits >> 28 & 3, gpu.arch() == Arch::Gfx942) {
                (0, _) => Case::decode::<f16, i8>,
                (1, _) => Case::decode::<bf16, i8>,
                (2, true) => Case::decode::<f16, Fp8E4M3Fnuz>,
                (2, false) => Case::decode::<f16, Fp8E4M3>,
                (_, true) => Case::decode::<bf16, Fp8E4M3Fnuz>,
                (_, false) => Case::decode::<bf16, Fp8E4M3>,
            };
            let given = split(with_options(&case, of(&case), bits & !0xcc), splits);
            of_tokens(&case, given, bits).check_on(&gpu);
        }
    }

    #[test]
    fn pages_in_any_order_are_the_same(case in cases(), order in any::<u32>(), splits in splits()) {
        let other = Case { order: order.into(), ..case.clone() };
        prop_assert_eq!(
            split(case.decode::<bf16, bf16>(), splits).outs(),
            split(other.decode::<bf16, bf16>(), splits).outs()
        );
    }

    /// The last token of a prompt.
    #[test]
    fn one_split_is_as_a_prompt(case in cases(), bits in any::<u32>()) {
        // Without a bias of queries, and factors of other names.
        let bits = bits & !0xfc;
        let prompt = with_options(&case, case.unified::<bf16, bf16>(), bits);
        let prompt = prompt.scalar("tile", Scalar::Choice("short"));
        let decode = with_options(&case, case.decode::<bf16, bf16>(), bits);
        for (prompt, decode) in prompt.outs().iter().zip(decode.outs()) {
            for (x, y) in prompt.to_f64().into_iter().zip(decode.to_f64()) {
                prop_assert!((x - y).abs() <= 1e-2 + 1e-2 * x.abs(), "{} {}", x, y);
            }
        }
    }
}

/// The outputs and log-sum-exps of a case in bf16 with so many splits.
struct Run<'a> {
    gpu: &'a Gpu,
    case: &'a Case,
    splits: Splits,
    window: Option<u32>,
}

/// The tensors of a run, but for the lengths of its sequences.
struct Memory {
    q: Tensor<bf16>,
    k: Tensor<bf16>,
    v: Tensor<bf16>,
    table: Tensor<i32>,
    out: Tensor<bf16>,
    lse: Tensor<f32>,
    partials: Tensor<f32>,
}

impl Run<'_> {
    fn memory(&self) -> Memory {
        let Self { gpu, case, .. } = *self;
        let given = case.decode::<bf16, bf16>();
        let cache = |name: &str| {
            let cache = given.get(name);
            let shape: [usize; 4] = cache.shape().try_into().unwrap();
            gpu.upload(&cache.elements::<bf16>().unwrap(), shape)
        };
        let (n, heads) = (case.lens.len(), case.kv_heads * case.group);
        let q = given.get("q").elements::<bf16>().unwrap();
        let table = given.get("block_table").elements::<i32>().unwrap();
        Memory {
            q: gpu.upload(&q, [n, heads, case.columns[0]]),
            k: cache("k_cache"),
            v: cache("v_cache"),
            table: gpu.upload(&table, [n, table.len() / n]),
            out: gpu.poisoned([n, heads, case.columns[1]]),
            lse: gpu.poisoned([n, heads]),
            partials: gpu.poisoned([200 * n * heads * (case.columns[1] + 8)]),
        }
    }

    fn call(&self, on: &mut Memory, seq_lens: TensorView<i32>, tickets: Option<&mut Tickets>) -> Result<()> {
        let Self { gpu, case, splits, window } = *self;
        let pages = Pages { block_table: on.table.view(), layout: case.layout.1 };
        let cache = PagedKv { k_cache: on.k.view(), v_cache: on.v.view(), pages };
        let inputs = PaDecodeInputs { q: on.q.view(), cache, seq_lens };
        let outputs = AttentionOutputs { out: on.out.view_mut(), lse: Some(on.lse.view_mut()) };
        let workspace = DecodeWorkspace { partials: Some(on.partials.view_mut()), tickets };
        let options = PaDecodeOptions { splits, window, ..PaDecodeOptions::default() };
        pa_decode(gpu.stream(), inputs, outputs, workspace, &options)
    }

    fn results(&self, of: &Memory) -> (Vec<bf16>, Vec<f32>) {
        self.gpu.assert_guards(&of.out);
        self.gpu.assert_guards(&of.lse);
        (self.gpu.download(&of.out).data, self.gpu.download(&of.lse).data)
    }

    fn run(&self, tickets: Option<&mut Tickets>) -> (Vec<bf16>, Vec<f32>) {
        let lens: Vec<i32> = self.case.lens.iter().map(|[_, keys]| *keys as i32).collect();
        self.run_with(&lens, tickets)
    }

    fn run_with(&self, lens: &[i32], tickets: Option<&mut Tickets>) -> (Vec<bf16>, Vec<f32>) {
        let (mut memory, lens) = (self.memory(), self.gpu.upload(lens, [lens.len()]));
        self.call(&mut memory, lens.view(), tickets).unwrap();
        self.results(&memory)
    }
}

/// A graph has the bits of a call with the lengths that are on the device when it is launched; those beyond the block table are NaN.
#[test]
fn graphs_follow_the_lengths() {
    let case = Case::new(&[[1, 700], [1, 40], [1, 129]], [2, 4], [128, 128]);
    for gpu in &devices() {
        let run = Run { gpu, case: &case, splits: Splits::KeysPerSplit(128), window: None };
        let (stream, mut tickets) = (gpu.stream(), Tickets::new(gpu.stream()).unwrap());
        let mut memory = run.memory();
        let mut lens = stream.upload(&[1i32; 3]).unwrap();
        run.call(&mut memory, lens.view([3]).unwrap(), Some(&mut tickets)).unwrap();
        let call = || run.call(&mut memory, lens.view([3]).unwrap(), Some(&mut tickets));
        let graph = stream.capture(call).unwrap();
        for of in [[700, 40, 129], [1, 0, 128], [129, 40, 1], [i32::MAX, 40, -1]] {
            stream.copy(&stream.upload(&of).unwrap(), &mut lens).unwrap();
            // SAFETY: all tensors are alive, and only this thread uses them.
            unsafe { graph.launch(stream).unwrap() };
            let (got, want) = (run.results(&memory), run.run_with(&of, None));
            let bits = |(out, lse): &(Vec<bf16>, Vec<f32>)| {
                let out: Vec<_> = out.iter().map(|x| x.to_bits()).collect();
                (out, lse.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
            };
            assert_eq!(bits(&got), bits(&want), "{of:?} on {}", gpu.spec());
            let poisoned = of.map(|len| !(0..=2048).contains(&len));
            for (rows, poisoned) in got.1.chunks(8).zip(poisoned) {
                assert!(rows.iter().all(|lse| lse.is_nan() == poisoned), "{of:?} on {}", gpu.spec());
            }
        }
    }
}

/// The last block to arrive merges to the bits of a second launch, and leaves its counters at zero: of a few splits, of 125, and of 128,
/// as many as one launch merges. 129 take a second one, whether there are counters or not.
#[test]
fn one_launch_has_the_bits_of_two() {
    let few =
        [([128, 128], 8), ([64, 64], 1), ([256, 256], 3), ([80, 72], 20), ([128, 128], 64), ([256, 256], 40)];
    let ways = [
        Splits::Count(3),
        Splits::Count(11),
        Splits::KeysPerSplit(64),
        Splits::KeysPerSplit(320),
        Splits::Auto,
    ];
    let few = few.into_iter().flat_map(|of| ways.map(|splits| (of, 700, splits, &[None, Some(300)][..])));
    let many = [8000, 8192, 8193].map(|keys| (([64, 64], 3), keys, Splits::KeysPerSplit(64), &[None][..]));
    let devices = devices();
    for ((columns, group), keys, splits, windows) in few.chain(many) {
        let case = Case::new(&[[1, keys], [1, 0], [1, 129]], [1, group], columns);
        for (gpu, window) in devices.iter().flat_map(|gpu| windows.iter().map(move |window| (gpu, *window))) {
            let mut tickets = Tickets::new(gpu.stream()).unwrap();
            let run = Run { gpu, case: &case, splits, window };
            let two = run.run(None);
            let label = format!("{columns:?} {splits:?} {window:?} on {}", gpu.spec());
            assert_eq!(run.run(Some(&mut tickets)), two, "{label}");
            assert_eq!(run.run(Some(&mut tickets)), two, "{label}");
        }
    }
}

/// A number of splits or of keys is batch-invariant, whatever the width of the table.
#[test]
fn a_sequence_is_the_same_in_any_batch() {
    let lens = [[1, 300], [1, 33], [1, 1000], [1, 0], [1, 129]];
    let case = Case::new(&lens, [2, 6], [128, 128]);
    for gpu in &devices() {
        let mut tickets = Tickets::new(gpu.stream()).unwrap();
        for splits in [Splits::Count(4), Splits::KeysPerSplit(64), Splits::KeysPerSplit(192)] {
            let (all, of_lse) = Run { gpu, case: &case, splits, window: None }.run(Some(&mut tickets));
            for n in 0..lens.len() {
                // The elements of a sequence follow from its place.
                let mut alone = vec![[1, 0]; n];
                alone.push(lens[n]);
                let alone = Case { lens: alone, order: 9, ..case.clone() };
                let (out, lse) = Run { gpu, case: &alone, splits, window: None }.run(Some(&mut tickets));
                assert_eq!(out[n * 12 * 128..], all[n * 12 * 128..(n + 1) * 12 * 128], "{splits:?} {n}");
                assert_eq!(lse[n * 12..], of_lse[n * 12..(n + 1) * 12]);
            }
        }
    }
}

/// Blocks of 64 rows, and of 32, have the bits of those of 16.
#[test]
fn heads_have_the_bits_of_smaller_groups() {
    for columns in [[128, 128], [64, 64], [192, 256]] {
        let case = |group| Case::new(&[[1, 300], [1, 129], [1, 1]], [1, group], columns);
        let (all, few) = (case(40), case(8));
        for gpu in &devices() {
            let run = |case| Run { gpu, case, splits: Splits::KeysPerSplit(128), window: None };
            let (out, lse) = run(&all).run(None);
            let q = all.decode::<bf16, bf16>().get("q").elements::<bf16>().unwrap();
            for first in (0..40).step_by(8) {
                let [of_q, of_out, of_lse] = [columns[0], columns[1], 1]
                    .map(|row| move |n: usize| (n * 40 + first) * row..(n * 40 + first + 8) * row);
                let heads: Vec<bf16> = (0..3).flat_map(|n| q[of_q(n)].to_vec()).collect();
                let mut memory = run(&few).memory();
                memory.q = gpu.upload(&heads, [3, 8, columns[0]]);
                let lens = gpu.upload(&[300, 129, 1], [3]);
                run(&few).call(&mut memory, lens.view(), None).unwrap();
                let (few_out, few_lse) = run(&few).results(&memory);
                let want: Vec<bf16> = (0..3).flat_map(|n| out[of_out(n)].to_vec()).collect();
                assert_eq!(few_out, want, "{columns:?} {first} on {}", gpu.spec());
                let want: Vec<f32> = (0..3).flat_map(|n| lse[of_lse(n)].to_vec()).collect();
                assert_eq!(few_lse, want, "{columns:?} {first} on {}", gpu.spec());
            }
        }
    }
}

/// Calls over fp8 of the device's own format.
fn over_fp8<T: Cached>(gpu: &Gpu) -> fn(&Case) -> Given {
    match gpu.arch() {
        Arch::Gfx942 => Case::decode::<T, Fp8E4M3Fnuz>,
        _ => Case::decode::<T, Fp8E4M3>,
    }
}

/// Checks a call of some 300 keys against the reference. Of a cache other than int8, which is widened in other ways in blocks of 16 rows, its first
/// four heads have the bits that they have alone.
fn check_first_heads(gpu: &Gpu, case: &Case, given: impl Fn(&Case) -> Given) {
    let given = |case: &Case| given(case).scalar("keys_per_split", Scalar::Count(128));
    let all = given(case);
    all.check_on(gpu);
    if all.get("k_cache").dtype() == DType::I8 {
        return;
    }
    let out = |given: &Given| {
        let call = given.call();
        call.operator().execute(gpu.stream(), &call).unwrap()[0].1.to_f64()
    };
    let (q, n) = (all.get("q"), case.lens.len());
    let first = q.bytes().chunks(q.bytes().len() / n).flat_map(|q| q[..q.len() / case.group * 4].to_vec());
    let few_q = HostTensor::from_bytes(TensorSpec::new(q.dtype(), [n, 4, case.columns[0]]), first.collect());
    let few = out(&given(&Case { group: 4, ..case.clone() }).with("q", few_q.unwrap()));
    let all = out(&all);
    for (all, few) in all.chunks(all.len() / n).zip(few.chunks(few.len() / n)) {
        assert_eq!(all[..few.len()], *few, "{case:?} on {}", gpu.spec());
    }
}

const SOME_KEYS: [[usize; 2]; 3] = [[1, 300], [1, 129], [1, 0]];

/// Over pages with factors of tokens, too, rows of blocks of 64, and of 32, have the bits of those of 16.
#[test]
fn heads_with_factors_of_tokens_have_the_bits_of_smaller_groups() {
    for gpu in devices() {
        let fp8 = [over_fp8::<bf16>(&gpu), over_fp8::<f16>(&gpu)];
        for of in fp8.into_iter().chain([Case::decode::<bf16, i8>, Case::decode::<f16, i8>]) {
            for (columns, group) in [([64, 64], 64), ([128, 128], 40), ([80, 112], 100), ([192, 256], 32)] {
                let case = Case::new(&SOME_KEYS, [1, group], columns);
                check_first_heads(&gpu, &case, |case| of_tokens(case, of(case), 0));
            }
        }
    }
}

/// And over pieces of 16 bytes.
#[test]
fn heads_over_pieces_have_the_bits_of_smaller_groups() {
    for gpu in devices() {
        let fp8 = [over_fp8::<bf16>(&gpu), over_fp8::<f16>(&gpu)];
        let of_16_bits = [Case::decode::<bf16, bf16>, Case::decode::<f16, f16>];
        let of_int8 = [Case::decode::<bf16, i8>, Case::decode::<f16, i8>];
        for of in fp8.into_iter().chain(of_16_bits).chain(of_int8) {
            for (columns, group, layout) in [([64, 64], 32, 3), ([128, 128], 40, 2), ([80, 112], 17, 2)] {
                let case = Case { layout: LAYOUTS[layout], ..Case::new(&SOME_KEYS, [1, group], columns) };
                check_first_heads(&gpu, &case, of);
            }
        }
    }
}

/// As many heads as a block has rows load keys, values and their factors as often as one head does.
#[test]
fn heads_of_a_block_load_the_keys_once() {
    for gpu in devices() {
        let fp8 = over_fp8::<bf16>(&gpu);
        for (of, columns, group, pieces) in [
            (fp8, 64, 64, false),
            (fp8, 128, 64, false),
            (Case::decode::<f16, i8>, 256, 32, false),
            (fp8, 64, 32, true),
            (Case::decode::<bf16, bf16>, 128, 32, true),
        ] {
            let read = |group| {
                let layout = LAYOUTS[if pieces { 2 } else { 0 }];
                let case = Case { layout, ..Case::new(&[[1, 700]], [1, group], [columns; 2]) };
                let given = if pieces { of(&case) } else { of_tokens(&case, of(&case), 0) };
                let call = given.scalar("nsplit", Scalar::Count(1)).call();
                gpu.stream().take_counters().unwrap();
                call.operator().execute(gpu.stream(), &call).unwrap();
                gpu.stream().take_counters().unwrap().map(|counters| counters.global_read_bytes)
            };
            if let (Some(one), Some(all)) = (read(1), read(group)) {
                let queries = (group * columns * 2) as u64;
                assert!(
                    all < one + one / 10 + queries,
                    "{all}, {one} of one head of {columns} on {}",
                    gpu.spec()
                );
            }
        }
    }
}

/// Rows of a sequence without keys are 0, their log-sum-exp -inf, or the sink.
#[test]
fn no_keys() {
    let case = Case::new(&[[1, 0], [1, 0]], [1, 4], [128, 128]);
    for gpu in &devices() {
        let (out, lse) = Run { gpu, case: &case, splits: Splits::Count(4), window: None }.run(None);
        assert!(out.iter().all(|x| x.to_f32() == 0.0) && lse.iter().all(|x| *x == f32::NEG_INFINITY));
    }
    case.decode::<bf16, bf16>().floats("sink", &[4], 3).check();
    let nothing = Case::new(&[], [1, 2], [64, 64]);
    nothing.decode::<bf16, bf16>().check();
}

/// The rows that a mistake on the device makes NaN, and no other.
#[test]
fn what_is_not_there_is_nan() {
    // Keys 0 to 299 and 0 to 39, in pages of 16.
    let case = Case::new(&[[1, 300], [1, 40], [1, 20]], [2, 2], [64, 64]);
    for splits in [None, Some(("keys_per_split", 64)), Some(("nsplit", 3))] {
        let given = || split(case.decode::<bf16, bf16>(), splits);
        let width = given().get("block_table").shape()[1];
        let page =
            |n: usize, page: usize, entry: i32| move |table: &mut [i32]| table[n * width + page] = entry;
        assert_eq!(given().poisoned_rows(), [0; 0]);
        for entry in [-1, i32::MIN, 1 << 20, i32::MAX] {
            assert_eq!(given().changed("block_table", page(0, 3, entry)).poisoned_rows(), [0]);
            assert_eq!(given().changed("block_table", page(1, 2, entry)).poisoned_rows(), [1]);
            // Behind the last key.
            assert_eq!(given().changed("block_table", page(1, 3, entry)).poisoned_rows(), [0; 0]);
        }
        // Before the window.
        let windowed =
            |keys| given().scalar("window", Scalar::Int(keys)).changed("block_table", page(1, 0, -1));
        assert_eq!(windowed(23).poisoned_rows(), [0; 0]);
        assert_eq!(windowed(24).poisoned_rows(), [1]);
        for len in [-1, i32::MIN, width as i32 * 16 + 1, i32::MAX] {
            assert_eq!(given().changed("seq_lens", |lens| lens[1] = len).poisoned_rows(), [1], "{len}");
        }
        let narrow = given().with("block_table", HostTensor::new([3, 0], &[0i32; 0]).unwrap());
        assert_eq!(narrow.poisoned_rows(), [0, 1, 2]);
        let cache = || HostTensor::new([0, 16, 2, 64], &[bf16::ONE; 0]).unwrap();
        assert_eq!(given().with("k_cache", cache()).with("v_cache", cache()).poisoned_rows(), [0, 1, 2]);
    }
    let none = case.decode::<bf16, bf16>().with("seq_lens", ints(&[0, 0, 0]));
    assert_eq!(none.poisoned_rows(), [0; 0]);
}

/// Keys that are not seen may hold anything, those of the window's first page and step, too.
#[test]
fn keys_before_the_window_are_not_read() {
    for (columns, group, keys, window) in [(64, 1, 200, 29), (128, 4, 333, 100), (256, 2, 700, 77)] {
        let case = Case::new(&[[1, keys]], [1, group], [columns, 64]);
        let given = |unseen: bool| {
            let mut given = case.decode::<bf16, bf16>().scalar("window", Scalar::Int(window as i64));
            let table = given.get("block_table").elements::<i32>().unwrap();
            for (name, columns) in [("k_cache", columns), ("v_cache", 64)].into_iter().filter(|_| unseen) {
                let cache = given.get(name);
                let (shape, mut values) = (cache.shape().to_vec(), cache.elements::<bf16>().unwrap());
                for key in 0..keys - 1 - window {
                    let slot = table[key / 16] as usize * 16 + key % 16;
                    values[slot * columns..][..columns].fill(bf16::NAN);
                }
                given = given.with(name, HostTensor::new(shape, &values).unwrap());
            }
            given
        };
        assert_eq!(given(true).outs(), given(false).outs());
        given(true).check();
    }
}

/// Scores over bytes have the bits of q: small columns beside large ones, with a scale that shows them in the LSE.
#[test]
fn queries_over_bytes_keep_their_bits() {
    for group in [8, 64] {
        let case = Case::new(&[[1, 33]], [2, group], [192, 128]);
        for of in [Case::decode::<f16, i8>, Case::decode::<bf16, i8>] {
            of(&case).scalar("scale", Scalar::Float(0.25)).check();
        }
        // A column of some 64 times the others, against keys that are zero there.
        let given = Case::decode::<f16, i8>(&case);
        let [mut q, mut k] = ["q", "k_cache"].map(|name| given.get(name).clone());
        let mut of_q = q.elements::<f16>().unwrap();
        of_q.iter_mut().step_by(192).for_each(|q| *q = f16::from_f32(64.0));
        q = HostTensor::new(q.shape(), &of_q).unwrap();
        let mut of_k = k.elements::<i8>().unwrap();
        of_k.iter_mut().step_by(192).for_each(|k| *k = 0);
        k = HostTensor::new(k.shape(), &of_k).unwrap();
        given.with("q", q).with("k_cache", k).check();
    }
}

/// Over bytes a row of queries has a unit: powers of two of all queries and of the factor cancel bit for bit. A row that is not finite is
/// NaN, alone.
#[test]
fn queries_over_bytes_have_a_unit() {
    for (gpu, group) in devices().iter().flat_map(|gpu| [(gpu, 8), (gpu, 40)]) {
        let case = Case::new(&[[1, 300], [1, 40]], [1, group], [128, 128]);
        let fp8 = over_fp8::<bf16>(gpu);
        for of in [fp8, Case::decode::<bf16, i8>] {
            let out = |power: i32, change: &dyn Fn(&mut [bf16])| {
                let given = of(&case).scalar("scale", Scalar::Float(0.125 * f64::exp2((-power).into())));
                let (shape, mut q) =
                    (given.get("q").shape().to_vec(), given.get("q").elements::<bf16>().unwrap());
                q.iter_mut().for_each(|q| *q = bf16::from_f32(q.to_f32() * f32::exp2(power as f32)));
                change(&mut q);
                let call = given.with("q", HostTensor::new(shape, &q).unwrap()).call();
                let outputs = call.operator().execute(gpu.stream(), &call).unwrap();
                outputs[0].1.elements::<bf16>().unwrap()
            };
            let want = out(0, &|_| ());
            assert!(want.iter().all(|x| x.is_finite()));
            for power in [-60, 5, 60] {
                assert_eq!(out(power, &|_| ()), want, "2^{power}, {group} heads on {}", gpu.spec());
            }
            for x in [bf16::INFINITY, bf16::NAN] {
                let got = out(0, &|q| q[3 * 128 + 77] = x);
                for (head, (got, want)) in got.chunks(128).zip(want.chunks(128)).enumerate() {
                    let alike = if head == 3 { got.iter().all(|x| x.is_nan()) } else { got == want };
                    assert!(alike, "head {head} beside {x}, {group} heads on {}", gpu.spec());
                }
            }
        }
    }
}

/// Factors of values may have any size: powers of two of all of them are those of the outputs, bit for bit.
#[test]
fn factors_of_values_have_any_size() {
    for gpu in devices() {
        let case = Case::new(&[[1, 300], [1, 40]], [2, 8], [128, 128]);
        let fp8 = over_fp8::<bf16>(&gpu);
        for of in [fp8, Case::decode::<bf16, i8>] {
            let out = |power: i32| {
                let given = of_tokens(&case, of(&case), 0);
                let (shape, mut scales) =
                    (given.get("v_scale").shape().to_vec(), given.get("v_scale").elements::<f32>().unwrap());
                scales.iter_mut().for_each(|scale| *scale *= f32::exp2(power as f32));
                let call = given.with("v_scale", HostTensor::new(shape, &scales).unwrap()).call();
                call.operator().execute(gpu.stream(), &call).unwrap()[0].1.to_f64()
            };
            let want = out(0);
            assert!(want.iter().all(|x| x.is_finite()));
            for power in [-40, 40] {
                let expected: Vec<f64> = want.iter().map(|x| x * f64::exp2(power.into())).collect();
                assert_eq!(out(power), expected, "2^{power} on {}", gpu.spec());
            }
        }
    }
}

type Options = (KvLayout, Option<f32>, f32, Splits);
const OPTIONS: Options = (KvLayout::Nhd, None, 0.0, Splits::Count(2));

fn call<C: PagedElement<bf16> + CallElement>(
    stream: &Stream,
    tensors: &mut Tensors,
    (layout, scale, softcap, splits): Options,
) -> Result<()> {
    let pages = Pages { block_table: tensors.input("block_table"), layout };
    let inputs = PaDecodeInputs::<bf16, C> {
        q: tensors.input("q"),
        cache: PagedKv { k_cache: tensors.input("k_cache"), v_cache: tensors.input("v_cache"), pages },
        seq_lens: tensors.input("seq_lens"),
    };
    let options = PaDecodeOptions {
        scale,
        softcap,
        splits,
        window: None,
        alibi: tensors.optional_input("alibi"),
        sink: tensors.optional_input("sink"),
        scales: CacheScales { k: tensors.optional_input("k_scale"), v: tensors.optional_input("v_scale") },
        out_scale: tensors.optional_input("out_scale"),
    };
    let outputs =
        AttentionOutputs::<bf16> { out: tensors.output("out"), lse: tensors.optional_output("lse") };
    let workspace = DecodeWorkspace { partials: tensors.optional_output("workspace"), tickets: None };
    pa_decode(stream, inputs, outputs, workspace, &options)
}

#[test]
fn errors() {
    let splits = |splits: Splits| move |call: &mut Call<Options>| call.options.3 = splits;
    Refusals::new(OPTIONS, call::<bf16>)
        .input::<bf16>("q", [3, 4, 32])
        .input::<bf16>("k_cache", [5, 64, 2, 32])
        .input::<bf16>("v_cache", [5, 64, 2, 16])
        .input::<i32>("block_table", [3, 4])
        .input::<i32>("seq_lens", [3])
        .input::<f32>("alibi", [4])
        .input::<f32>("sink", [4])
        .input::<f32>("k_scale", [1])
        .input::<f32>("v_scale", [3, 2])
        .input::<f32>("out_scale", [1])
        .output::<bf16>("out", [3, 4, 16])
        .output::<f32>("lse", [3, 4])
        .output::<f32>("workspace", [2 * 3 * 4 * 18])
        .accepts(|_| {})
        .accepts(splits(Splits::KeysPerSplit(128)))
        .refuses(kind!(Shape), &["q: shape [3, 3, 32]", "multiple of 2"], |c| c.shape("q", [3, 3, 32]))
        .refuses(kind!(Shape), &["k_cache", "of q"], |c| c.shape("q", [3, 4, 33]))
        .refuses(kind!(Shape), &["q", "256 columns"], |c| {
            c.shape("q", [3, 4, 264]);
            c.shape("k_cache", [5, 64, 2, 264]);
        })
        .refuses(kind!(Shape), &["v_cache: shape [5, 64, 1, 16]"], |c| c.shape("v_cache", [5, 64, 1, 16]))
        .refuses(kind!(Empty), &["k_cache"], |c| c.shape("k_cache", [5, 0, 2, 32]))
        .refuses(kind!(Shape), &["k_cache", "5 axes, for Paged"], |c| c.options.0 = KvLayout::Paged)
        .refuses(kind!(Shape), &["block_table", "3 sequences"], |c| c.shape("block_table", [2, 4]))
        .refuses(kind!(Stride), &["block_table"], |c| c.strides("block_table", [1, 3]))
        .refuses(kind!(Stride), &["q"], |c| c.strides("q", [256, 64, 2]))
        .refuses(kind!(Shape), &["seq_lens"], |c| c.shape("seq_lens", [4]))
        .refuses(kind!(Shape), &["alibi"], |c| c.shape("alibi", [2]))
        .refuses(kind!(Shape), &["sink"], |c| c.shape("sink", [2]))
        .refuses(kind!(Shape), &["k_scale"], |c| c.shape("k_scale", [2]))
        .refuses(kind!(Shape), &["v_scale"], |c| c.shape("v_scale", [2, 4]))
        .refuses(kind!(Unsupported), &["factors of tokens", "fp8 or int8"], |c| {
            c.shape("k_scale", [5, 2, 64]);
            c.shape("v_scale", [5, 2, 64]);
        })
        .refuses(kind!(Shape), &["out_scale"], |c| c.shape("out_scale", [2]))
        .refuses(kind!(Shape), &["out: shape [3, 4, 32]"], |c| c.shape("out", [3, 4, 32]))
        .refuses(kind!(Shape), &["lse"], |c| c.shape("lse", [4, 3]))
        .refuses(kind!(Shape), &["workspace", "432", "2 splits"], |c| c.shape("workspace", [431]))
        .refuses(kind!(Shape), &["workspace", "864", "4 splits"], splits(Splits::KeysPerSplit(64)))
        .refuses(kind!(Shape), &["workspace"], |c| c.shape("workspace", [2, 216]))
        .refuses(kind!(Stride), &["workspace"], |c| c.strides("workspace", [2]))
        .refuses(kind!(Argument), &["scale"], |c| c.options.1 = Some(0.0))
        .refuses(kind!(Argument), &["softcap"], |c| c.options.2 = -1.0)
        .refuses(kind!(Argument), &["nsplit"], splits(Splits::Count(0)))
        .refuses(kind!(Argument), &["nsplit"], splits(Splits::Count(65537)))
        .refuses(kind!(Argument), &["keys_per_split", "multiple of 64"], splits(Splits::KeysPerSplit(96)))
        .refuses(kind!(Argument), &["keys_per_split"], splits(Splits::KeysPerSplit(0)))
        .refuses_overlaps()
        .refuses_other_devices();
    Refusals::new(OPTIONS, call::<i8>)
        .input::<bf16>("q", [3, 4, 32])
        .input::<i8>("k_cache", [5, 64, 2, 32])
        .input::<i8>("v_cache", [5, 64, 2, 16])
        .input::<i32>("block_table", [3, 4])
        .input::<i32>("seq_lens", [3])
        .input::<f32>("k_scale", [5, 2, 64])
        .input::<f32>("v_scale", [5, 2, 64])
        .output::<bf16>("out", [3, 4, 16])
        .output::<f32>("workspace", [2 * 3 * 4 * 18])
        .accepts(|_| {})
        .refuses(kind!(Shape), &["v_scale: shape [1]", "[5, 2, 64]", "of both"], |c| c.shape("v_scale", [1]))
        .refuses(kind!(Shape), &["k_scale: shape [5, 64, 2]", "[5, 2, 64]"], |c| {
            c.shape("k_scale", [5, 64, 2]);
        })
        .refuses(kind!(Stride), &["k_scale", "16 bytes"], |c| c.strides("k_scale", [132, 66, 1]))
        .refuses(kind!(Unsupported), &["factors of tokens", "pages of 16"], |c| {
            c.shape("k_cache", [5, 8, 2, 32]);
            c.shape("v_cache", [5, 8, 2, 16]);
            c.shape("k_scale", [5, 2, 8]);
            c.shape("v_scale", [5, 2, 8]);
        })
        .refuses_other_devices()
        .refuses_overlaps();
}
