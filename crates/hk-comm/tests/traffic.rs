//! Counted: bytes over the links, and how wide the accesses are.

use crate::common::{Ranks, integers, options};
use hk_comm::{
    Algorithm, NormOptions, NormOutputs, all_gather, all_reduce_in_place, all_reduce_rmsnorm, reduce_scatter,
    reduce_scatter_rmsnorm,
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
                let outputs = NormOutputs::<_, Fp8E4M3Fnuz> { residual, out: Some(out), quantized: None };
                let (weight, options) = (weight.view([cols]).unwrap(), NormOptions::default());
                all_reduce_rmsnorm(comm, stream, x, weight, outputs, options, algorithm).unwrap();
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

/// Reduce-scatter, alone and with a norm, reads `(w - 1) / w S`, all-gather of a part as much; 16 bytes a lane, and 1 byte where a part is
/// no whole packets.
#[test]
fn bytes_of_halves() {
    for world in [2, 4, 8] {
        let mut ranks = Ranks::with(Arch::Gfx942, world, "&details=true", &options());
        let (rows, cols) = (3, 1024);
        let part = (rows * cols * size_of::<bf16>()) as u64;
        let counted = ranks.each(|rank, comm, stream| {
            let x = stream.upload(&integers::<bf16>(rank, world * rows * cols)).unwrap();
            let weight = stream.upload(&integers::<bf16>(3, cols)).unwrap();
            let [mut y, mut residual] =
                [4, 5].map(|n| stream.upload(&integers::<bf16>(n, rows * cols)).unwrap());
            let mut whole = stream.alloc_zeroed::<bf16>(world * rows * cols).unwrap();
            stream.take_counters().unwrap();
            let take = || details(stream.take_counters().unwrap());
            let all = [world * rows, cols];
            reduce_scatter(comm, stream, x.view(all).unwrap(), y.view_mut([rows, cols]).unwrap()).unwrap();
            let scattered = take();
            all_gather(comm, stream, y.view([rows, cols]).unwrap(), whole.view_mut(all).unwrap()).unwrap();
            let gathered = take();
            let outputs = NormOutputs::<_, Fp8E4M3Fnuz> {
                residual: residual.view_mut([rows, cols]).unwrap(),
                out: Some(y.view_mut([rows, cols]).unwrap()),
                quantized: None,
            };
            let (x, weight) = (x.view(all).unwrap(), weight.view([cols]).unwrap());
            reduce_scatter_rmsnorm(comm, stream, x, weight, outputs, NormOptions::default()).unwrap();
            let normed = take();
            let (odd, mut odds) =
                (stream.alloc_zeroed::<u8>(13).unwrap(), stream.alloc_zeroed::<u8>(13 * world));
            let odds = odds.as_mut().unwrap().view_mut([13 * world]).unwrap();
            all_gather(comm, stream, odd.view([13]).unwrap(), odds).unwrap();
            ([scattered, gathered, normed], take())
        });
        for (counts, bytes) in counted {
            let peers = world as u64 - 1;
            // A block for 512 packets, or for a row.
            for (counts, blocks) in counts.into_iter().zip([1, 1, 2]) {
                assert_eq!((counts.peer_read_bytes, counts.peer_wide_bytes), (peers * part, peers * part));
                assert_eq!(counts.peer_written_bytes, 4 * blocks * peers);
                assert_eq!((counts.scratch_bytes, counts.lds_conflict_clocks), (0, 0));
            }
            assert_eq!((bytes.peer_read_bytes, bytes.peer_wide_bytes), (peers * 13, 0));
        }
    }
}
