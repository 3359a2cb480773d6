//! Counted: bytes over the links, and how wide the accesses are.

use crate::common::{Ranks, integers, options};
use hk_comm::{
    Algorithm, AllReduceRmsNormOptions, AllReduceRmsNormOutputs, all_reduce_in_place, all_reduce_rmsnorm,
};
use hk_core::{Arch, Details, Fp8E4M3Fnuz, bf16};

fn details(counters: Option<hk_core::Counters>) -> Details {
    counters.and_then(|counters| counters.details).expect("the device counts them")
}

/// One-shot reads (w - 1) S from the other ranks, two-shot 2 (w - 1) / w S, all of it 16 bytes a lane; written to them are flags.
#[test]
fn bytes_over_links() {
    for world in [2, 4, 8] {
        let mut ranks = Ranks::with(Arch::Gfx942, world, "&details=true", &options());
        // Whole tiles, and rows of whole parts.
        let (rows, cols) = (world, 8192);
        let bytes = (rows * cols * size_of::<bf16>()) as u64;
        for (algorithm, barriers) in [(Algorithm::OneShot, 1), (Algorithm::TwoShot, 2)] {
            let want = match barriers {
                1 => (world as u64 - 1) * bytes,
                _ => 2 * (world as u64 - 1) * bytes / world as u64,
            };
            let counted = ranks.each(|rank, comm, stream| {
                let mut x = stream.upload(&integers::<bf16>(rank, rows * cols)).unwrap();
                let weight = stream.upload(&integers::<bf16>(3, cols)).unwrap();
                let mut residual = stream.upload(&integers::<bf16>(4, rows * cols)).unwrap();
                stream.take_counters().unwrap();
                all_reduce_in_place(comm, stream, x.view_mut([rows * cols]).unwrap(), algorithm).unwrap();
                let plain = details(stream.take_counters().unwrap());
                let out = x.view_mut([rows, cols]).unwrap();
                let (x, residual) = (out.alias(), residual.view_mut([rows, cols]).unwrap());
                let outputs =
                    AllReduceRmsNormOutputs::<_, Fp8E4M3Fnuz> { residual, out: Some(out), fp8: None };
                let options = AllReduceRmsNormOptions { algorithm, ..Default::default() };
                all_reduce_rmsnorm(comm, stream, x, weight.view([cols]).unwrap(), outputs, options).unwrap();
                [plain, details(stream.take_counters().unwrap())]
            });
            for counts in counted.into_iter().flatten() {
                assert_eq!(counts.peer_read_bytes, want, "{world} ranks, {algorithm:?}");
                assert_eq!(counts.peer_wide_bytes, want, "all of them wide");
                let flags = 4 * options().blocks.unwrap_or_default() * (world - 1) * barriers;
                assert_eq!(counts.peer_written_bytes, flags as u64);
                assert_eq!((counts.scratch_bytes, counts.lds_conflict_clocks), (0, 0));
            }
        }
    }
}
