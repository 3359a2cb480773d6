//! `lean_atten_paged` on the emulated GPUs (and real ones where there are some) against its f64 reference.

use crate::common::attention::{Builder, CAUSAL, HEADS};
use hk_attention::{
    AttentionOutputs, AttentionProblem, CacheScales, LeanOptions, LeanPagedInputs, Programs,
    lean_atten_paged, lean_paged_workspace,
};
use hk_core::registry::{HostTensor, Scalar};
use hk_core::{DType, bf16};
use hk_testkit::{self as kit, Fill, Gpu, Refusals, kind};
use proptest::prelude::*;

const OP: &str = "lean_atten_paged";
const TYPES: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];
const COLUMNS: [[usize; 2]; 6] = [[64, 64], [40, 40], [128, 128], [33, 17], [96, 80], [256, 256]];

/// Pages of the lists of `lens`, one sequence after the other.
fn pages_of(lens: &[i32], page: usize) -> usize {
    lens.iter().map(|len| usize::try_from(*len).unwrap_or(0).div_ceil(page)).sum()
}

/// A call whose table has `more` pages than are used.
fn call(
    dtype: DType,
    cache: DType,
    [sq, pages, page]: [usize; 3],
    lens: &[i32],
    [heads, kv_heads, dqk, dv]: [usize; 4],
    lists: usize,
    more: i64,
) -> Builder {
    let width = usize::try_from(pages_of(lens, page) as i64 + more).unwrap();
    Builder::new(OP)
        .tensor("q", dtype, [heads, sq * lens.len(), dqk])
        .tensor("k_cache", cache, [kv_heads, pages * page + page / 2, dqk])
        .tensor("v_cache", cache, [kv_heads, pages * page + page / 2, dv])
        .tensor("block_table", DType::I32, [lists, width])
        .integers("kv_lens", lens)
        .scalar("page", Scalar::Count(page as u64))
        .want("lse")
}

/// Ragged keys, none among them, in pages of every kind of size; lists by head or for all; one and more programs.
#[test]
fn ragged_keys() {
    let mut n = 0;
    for lens in [&[1, 65, 0, 129][..], &[300], &[], &[0, 0], &[16, 32, 15]] {
        for page in [1, 5, 16, 48, 64] {
            let ([heads, kv_heads], [dqk, dv], dtype) = (HEADS[n % 4], COLUMNS[n % 6], TYPES[n % 3]);
            let (sq, lists) = ([1, 2, 40][n % 3], if n.is_multiple_of(2) { 1 } else { kv_heads });
            let columns = [heads, kv_heads, dqk, dv];
            let call = call(dtype, dtype, [sq, 16, page], lens, columns, lists, n as i64 % 3);
            let programs = [1, 3, 7, 40, 0][n % 5];
            let call = call.scalars(&[
                ("causal", Scalar::Bool(n % 4 > 1)),
                ("scale", Scalar::Float([0.0, 0.25][n % 2])),
                ("programs", Scalar::Count(programs)),
            ]);
            call.check(
                &format!("{sq} queries, keys {lens:?}, pages of {page}, {programs} programs"),
                n as u64,
            );
            n += 1;
        }
    }
}

/// Caches of one byte, with factors of sequences and heads.
#[test]
fn quantized_caches() {
    for (n, cache) in [DType::I8, DType::Fp8E4M3, DType::Fp8E4M3Fnuz].into_iter().enumerate() {
        for dtype in TYPES {
            let call = call(dtype, cache, [2, 16, 16], &[70, 33], [4, 2, 64, 48], 2, 0);
            let call = call.f32("k_scale", [2, 2]).f32("v_scale", [1]).scalars(&[CAUSAL]);
            call.scalar("programs", Scalar::Count(3)).check(&format!("{dtype}, {cache}"), n as u64);
        }
    }
}

/// More sequences than a wave has lanes.
#[test]
fn many_sequences() {
    let lens: Vec<i32> = (0..100).map(|i| i * 7 % 40).collect();
    for programs in [1, 9, 150] {
        let call = call(DType::Bf16, DType::Bf16, [1, 16, 16], &lens, [4, 2, 32, 32], 2, 3);
        call.scalar("programs", Scalar::Count(programs)).check(&format!("{programs} programs"), 1);
    }
}

/// NaN: from the first sequence on whose pages are not all in the list, and of what sees a key without a page.
#[test]
fn lengths_and_pages_are_not_trusted() {
    let sizes = [4, 2, 64, 64];
    for lens in [[20, 30, 17], [20, -1, 3], [i32::MIN, 0, 0], [20, i32::MAX, 9], [1 << 30, 5, 5]] {
        for (dtype, programs) in [(DType::Bf16, 1), (DType::F16, 4), (DType::F32, 3)] {
            let call = Builder::new(OP)
                .tensor("q", dtype, [sizes[0], 6, 64])
                .tensor("k_cache", dtype, [2, 64, 64])
                .tensor("v_cache", dtype, [2, 64, 64])
                .tensor("block_table", DType::I32, [1, 5])
                .integers("kv_lens", &lens)
                .want("lse")
                .scalar("programs", Scalar::Count(programs));
            call.check(&format!("{dtype}, keys {lens:?}, {programs} programs"), 1);
        }
    }
    for dtype in TYPES {
        for missing in [-1, 16, i32::MIN, i32::MAX] {
            let mut call = call(dtype, dtype, [1, 16, 16], &[40, 90], sizes, 1, 0)
                .scalar("programs", Scalar::Count(3))
                .call(2);
            let table = [0, 1, 2, 3, 4, missing, 6, 7, 8];
            call.set("block_table", HostTensor::new([1, 9], &table).unwrap()).unwrap();
            crate::common::attention::check(&format!("{dtype}, page {missing}"), &call);
        }
    }
}

proptest! {
    #![proptest_config(kit::config())]

    /// Any shapes, pages and number of programs.
    #[test]
    fn matches_the_reference(
        lens in prop::collection::vec(0..200i32, 0..5),
        page in prop::sample::select(vec![1usize, 3, 16, 32, 80, 256]),
        sq in 1..5usize,
        group in 1..9usize,
        kv_heads in 1..4usize,
        columns in prop::sample::select(COLUMNS.to_vec()),
        shared: bool,
        causal: bool,
        programs in 0..20u64,
        dtype in prop::sample::select(TYPES.to_vec()),
        seed: u64,
    ) {
        let sizes = [group * kv_heads, kv_heads, columns[0], columns[1]];
        let lists = if shared { 1 } else { kv_heads };
        let call = call(dtype, dtype, [sq, 16, page], &lens, sizes, lists, 1);
        let call = call.scalars(&[("causal", Scalar::Bool(causal)), ("programs", Scalar::Count(programs))]);
        call.check("any", seed);
    }
}

/// `k`, `v` and the table of a call, on the host.
struct Pool {
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
    table: Vec<i32>,
}

impl Pool {
    const LENS: [i32; 3] = [70, 0, 129];

    fn new() -> Self {
        let draw = |n: usize, seed| Fill::Normal.elements::<bf16>(n, seed);
        Self {
            q: draw(4 * 3 * 64, 1),
            k: draw(2 * 16 * 16 * 64, 2),
            v: draw(2 * 16 * 16 * 64, 3),
            table: (0..14).collect(),
        }
    }

    /// Page `p` moved to `p * 5 % 16`, for both heads.
    fn permuted(&self) -> Self {
        let to = |page: usize| page * 5 % 16;
        let moved = |from: &[bf16]| {
            let mut all = from.to_vec();
            for (head, page) in (0..2).flat_map(|head| (0..16).map(move |page| (head, page))) {
                let at = |page: usize| (head * 16 + page) * 16 * 64;
                all[at(to(page))..][..16 * 64].copy_from_slice(&from[at(page)..][..16 * 64]);
            }
            all
        };
        let table = self.table.iter().map(|page| to(*page as usize) as i32).collect();
        Self { q: self.q.clone(), k: moved(&self.k), v: moved(&self.v), table }
    }

    fn run(&self, gpu: &Gpu, programs: Programs) -> Vec<u16> {
        let (q, table) = (gpu.upload(&self.q, [4, 3, 64]), gpu.upload(&self.table, [1, 14]));
        let (k, v) = (gpu.upload(&self.k, [2, 256, 64]), gpu.upload(&self.v, [2, 256, 64]));
        let lens = gpu.upload(&Self::LENS, [3]);
        let problem =
            AttentionProblem { sequences: 3, heads: 4, kv_heads: 2, queries: 3, keys: 14 * 16, dv: 64 };
        let len = lean_paged_workspace(gpu.stream().device().info(), &problem, programs);
        let (mut out, mut workspace) = (gpu.poisoned::<bf16>([4, 3, 64]), gpu.poisoned::<f32>([len]));
        let inputs = LeanPagedInputs {
            q: q.view(),
            k_cache: k.view(),
            v_cache: v.view(),
            page: 16,
            block_table: table.view(),
            kv_lens: lens.view(),
            scales: CacheScales::default(),
        };
        let outputs = AttentionOutputs { out: out.view_mut(), lse: None };
        let options = LeanOptions { programs, ..LeanOptions::default() };
        lean_atten_paged(gpu.stream(), inputs, outputs, Some(workspace.view_mut()), &options).unwrap();
        gpu.assert_guards(&out);
        gpu.assert_guards(&workspace);
        gpu.download(&out).iter().map(|x| x.to_bits()).collect()
    }
}

/// Where pages lie does not change a bit, nor what the workspace held.
#[test]
fn pages_anywhere() {
    let pool = Pool::new();
    for gpu in kit::devices() {
        for programs in [Programs::Auto, Programs::Count(1), Programs::Count(5)] {
            let want = pool.run(&gpu, programs);
            assert_eq!(pool.permuted().run(&gpu, programs), want, "{programs:?} on {}", gpu.spec());
            assert_eq!(pool.run(&gpu, programs), want, "{programs:?} again on {}", gpu.spec());
        }
    }
}

#[test]
fn bad_calls_are_refused() {
    Refusals::new((16, 2), |stream, tensors, (page, programs)| {
        let inputs = LeanPagedInputs::<bf16, bf16> {
            q: tensors.input("q"),
            k_cache: tensors.input("k_cache"),
            v_cache: tensors.input("v_cache"),
            page,
            block_table: tensors.input("block_table"),
            kv_lens: tensors.input("kv_lens"),
            scales: CacheScales {
                k: tensors.optional_input("k_scale"),
                v: tensors.optional_input("v_scale"),
            },
        };
        let outputs = AttentionOutputs { out: tensors.output("out"), lse: tensors.optional_output("lse") };
        let options = LeanOptions { programs: Programs::Count(programs), ..LeanOptions::default() };
        lean_atten_paged(stream, inputs, outputs, tensors.optional_output("workspace"), &options)
    })
    .input::<bf16>("q", [4, 6, 8])
    .input::<bf16>("k_cache", [2, 64, 8])
    .input::<bf16>("v_cache", [2, 64, 6])
    .input::<i32>("block_table", [2, 5])
    .input::<i32>("kv_lens", [2])
    .input::<f32>("k_scale", [2, 2])
    .input::<f32>("v_scale", [1])
    .output::<bf16>("out", [4, 6, 6])
    .output::<f32>("lse", [4, 6])
    .output::<f32>("workspace", [256])
    .accepts(|_| {})
    .accepts(|call| {
        call.options.1 = 1;
        call.without("workspace");
        call.without("lse");
        call.shape("block_table", [1, 5]);
    })
    .refuses(kind!(Shape), &["lean_atten_paged: workspace: shape [0]", "[256] or longer"], |call| {
        call.without("workspace")
    })
    .refuses(kind!(Argument), &["lean_atten_paged: page: 0", "1 slot or more"], |call| call.options.0 = 0)
    .refuses(kind!(Argument), &["lean_atten_paged: programs: 0", "1 to 65536"], |call| call.options.1 = 0)
    .refuses(kind!(Shape), &["lean_atten_paged: block_table: shape [3, 5]", "[2, 5]", "[1, 5]"], |call| {
        call.shape("block_table", [3, 5]);
    })
    .refuses(kind!(Shape), &["lean_atten_paged: q: shape [4, 6, 8]", "a multiple of 4 rows"], |call| {
        call.shape("kv_lens", [4]);
    })
    .refuses(kind!(Shape), &["lean_atten_paged: v_cache: shape [2, 60, 6]", "[2, 64, 6]"], |call| {
        call.shape("v_cache", [2, 60, 6]);
    })
    .refuses(kind!(Shape), &["lean_atten_paged: k_cache", "8 columns"], |call| {
        call.shape("k_cache", [2, 64, 7])
    })
    .refuses(kind!(Shape), &["lean_atten_paged: k_scale: shape [2]", "[2, 2]"], |call| {
        call.shape("k_scale", [2]);
    })
    .refuses(kind!(Shape), &["lean_atten_paged: lse: shape [6, 4]", "[4, 6]"], |call| {
        call.shape("lse", [6, 4])
    })
    .refuses(kind!(Shape), &["lean_atten_paged: out: shape [6, 4, 6]"], |call| call.shape("out", [6, 4, 6]))
    .refuses(kind!(Stride), &["lean_atten_paged: block_table"], |call| call.strides("block_table", [10, 2]))
    .refuses(kind!(Stride), &["lean_atten_paged: kv_lens", "contiguous"], |call| call.strides("kv_lens", [2]))
    .refuses_other_devices()
    .refuses_overlaps();
}
