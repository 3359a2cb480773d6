//! Workgroups that communicate: tickets, flags, and the order in which they get their turns.

use std::sync::LazyLock;

use crate::common::{Args, Random, Rig, options};
use hk_emu::{BlockOrder, Check, Counters, Fault, MachineOptions};
use proptest::prelude::*;

/// Split-K in small: each workgroup adds up its slice, the last one of a tile to arrive adds up the slices.
const SPLIT: &str = include_str!("kernels/split_k.hip");

struct Split {
    y: Vec<u32>,
    winners: Vec<u32>,
    counters: Counters,
}

/// Rows of a slice, slices of a tile, tiles.
type Size = [usize; 3];

/// The values that [`split`] adds up.
fn rows([n, slices, tiles]: Size) -> Vec<f32> {
    let mut random = Random(7);
    (0..64 * n * slices * tiles).map(|_| random.unit()).collect()
}

fn split(options: MachineOptions, image: &[u8], size: Size) -> Split {
    let [n, slices, tiles] = size;
    let rig = Rig::new(options, image);
    let y = rig.upload("y", &vec![0f32; tiles * 64]);
    let winner = rig.upload("winner", &vec![u32::MAX; tiles]);
    let args = Args::new()
        .push(rig.upload("x", &rows(size)))
        .push(rig.upload("partial", &vec![0f32; 64 * slices * tiles]))
        .push(rig.upload("tickets", &vec![0u32; tiles]))
        .push(y)
        .push(winner)
        .push(n as u32)
        .push(slices as u32);
    let counters = rig.launch("split", (slices * tiles) as u32, 64, &args).unwrap();
    Split { y: rig.download(y, tiles * 64), winners: rig.download(winner, tiles), counters }
}

/// One thread and several: same bits, same counters, and the same workgroup of each tile adds up.
#[test]
fn tickets_are_drawn_in_the_order_of_a_single_thread() {
    for cpu in ["gfx942", "gfx950"] {
        let image = crate::common::hip(cpu, "-O2", SPLIT);
        for details in [false, true] {
            let run =
                |threads| split(options(cpu).threads(Some(threads)).details(details), &image, [50, 8, 5]);
            let one = run(1);
            assert_eq!(one.winners, [7; 5], "workgroups come in order");
            for threads in [2, 3, 8, 8, 8] {
                let many = run(threads);
                assert_eq!(many.y, one.y, "{threads} threads");
                assert_eq!(many.winners, one.winners, "{threads} threads");
                assert_eq!(many.counters, one.counters, "{threads} threads");
            }
        }
    }
}

/// Split kernels of both targets, compiled once.
static IMAGES: LazyLock<[(&str, Vec<u8>); 2]> =
    LazyLock::new(|| ["gfx942", "gfx950"].map(|cpu| (cpu, crate::common::hip(cpu, "-O2", SPLIT))));

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// The last workgroup to arrive adds up the same slices in the same order, whichever it is.
    #[test]
    fn split_kernels_have_the_same_bits_in_both_orders(
        n in 1usize..60, slices in 1usize..10, tiles in 1usize..8, threads in 2usize..9,
    ) {
        let size = [n, slices, tiles];
        let x = rows(size);
        let sum = |block: usize, lane: usize| (0..n).fold(0f32, |sum, i| sum + x[(block * n + i) * 64 + lane]);
        let want: Vec<u32> = (0..64 * tiles)
            .map(|at| (0..slices).fold(0f32, |y, s| y + sum(at / 64 * slices + s, at % 64)).to_bits())
            .collect();
        for (cpu, image) in IMAGES.iter() {
            for order in [BlockOrder::Reproducible, BlockOrder::Arrival] {
                let options = options(cpu).threads(Some(threads)).block_order(order);
                let got = split(options, image, size);
                prop_assert_eq!(&got.y, &want, "{} {}", cpu, order);
                let last = slices as u32 - 1;
                prop_assert!(got.winners.iter().all(|&slice| slice <= last), "{:?}", got.winners);
                if order == BlockOrder::Reproducible {
                    prop_assert!(got.winners.iter().all(|&slice| slice == last), "{:?}", got.winners);
                }
                prop_assert_eq!(got.counters.waves, (slices * tiles) as u64);
            }
        }
    }
}

/// In order of arrival, too, each tile has one last workgroup, on any number of threads.
#[test]
fn tickets_in_order_of_arrival_give_the_same_bits() {
    let (cpu, image) = &IMAGES[0];
    let size = [50, 8, 5];
    let one = split(options(cpu).threads(Some(1)), image, size);
    for threads in [2, 8] {
        for _ in 0..4 {
            let options = options(cpu).threads(Some(threads)).block_order(BlockOrder::Arrival);
            let many = split(options, image, size);
            assert_eq!(many.y, one.y);
            assert!(many.winners.iter().all(|slice| *slice < 8), "{:?}", many.winners);
            assert_eq!(many.counters.waves, one.counters.waves);
        }
    }
}

/// Two workgroups meet before either ends: both are on host threads at the same time, in both orders.
#[test]
fn workgroups_with_tickets_run_at_the_same_time() {
    let source = r#"
      KERNEL void meet(u32 *tickets, volatile u32 *seen) {
        // Not atomic, so no turn is needed: only workgroups that run at the same time see each other's.
        if (TID == 0) {
          seen[BID] = 1;
          for (u32 i = 0; i < 100000000 && !seen[1 - BID]; i++) __builtin_amdgcn_s_sleep(1);
          seen[2 + BID] = seen[1 - BID];
          __hip_atomic_fetch_add(&tickets[0], 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
          seen[4 + BID] = __hip_atomic_fetch_add(&tickets[1], 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
        }
      }"#;
    // Volatile accesses have system scope; these are to be plain.
    let text = crate::common::text("gfx942", "-O2", source).replace(" sc0 sc1", "");
    let image = crate::common::link("gfx942", &text);
    for order in [BlockOrder::Reproducible, BlockOrder::Arrival] {
        let rig = Rig::new(options("gfx942").threads(Some(2)).block_order(order), &image);
        let (tickets, seen) = (rig.upload("tickets", &[0u32; 2]), rig.upload("seen", &[0u32; 6]));
        rig.launch("meet", 2, 64, &Args::new().push(tickets).push(seen)).unwrap();
        assert_eq!(rig.download::<u32>(tickets, 2), [2, 2]);
        let seen: Vec<u32> = rig.download(seen, 6);
        assert_eq!(seen[2..4], [1, 1], "{order}");
    }
}

/// Stream-K in small: workgroup 0 waits for the flags of all later ones, each of which draws a ticket first.
const FLAGS: &str = r#"
  #define AGENT __HIP_MEMORY_SCOPE_AGENT
  KERNEL void flags(u32 *tickets, u32 *flags, u32 *order, u32 *out, int n) {
    if (TID != 0) return;
    if (BID == 0) {
      u32 sum = 0;
      for (int i = 1; i < n; i++) {
        while (__hip_atomic_load(&flags[i], __ATOMIC_ACQUIRE, AGENT) == 0) SLEEP;
        sum += order[i];
      }
      out[0] = sum;
    } else {
      order[BID] = __hip_atomic_fetch_add(tickets, 1, __ATOMIC_RELAXED, AGENT);
      __hip_atomic_store(&flags[BID], 1, __ATOMIC_RELEASE, AGENT);
    }
  }"#;

fn flags(options: MachineOptions, image: &[u8], n: usize) -> Result<(Vec<u32>, Counters), Fault> {
    let rig = Rig::new(options, image);
    let order = rig.upload("order", &vec![0u32; n]);
    let out = rig.upload("out", &[0u32]);
    let args = Args::new()
        .push(rig.upload("tickets", &[0u32]))
        .push(rig.upload("flags", &vec![0u32; n]))
        .push(order)
        .push(out)
        .push(n as u32);
    let counters = rig.launch("flags", n as u32, 64, &args)?;
    assert_eq!(rig.download::<u32>(out, 1)[0] as usize, (n - 1) * (n - 2) / 2);
    Ok((rig.download(order, n), counters))
}

/// A workgroup may wait for later ones that the GPU holds beside it: 304 compute units have room.
#[test]
fn a_wait_for_a_resident_workgroup_makes_progress() {
    for sleep in ["__builtin_amdgcn_s_sleep(1)", "{}"] {
        let image = crate::common::hip_with("gfx942", "-O2", FLAGS, &[&format!("-DSLEEP={sleep}")]);
        let one = flags(options("gfx942").threads(Some(1)), &image, 200).unwrap();
        assert_eq!(one.0[1..], (0..199).collect::<Vec<u32>>());
        for threads in [2, 4] {
            let many = flags(options("gfx942").threads(Some(threads)), &image, 200).unwrap();
            assert_eq!(many, one, "{threads} threads");
        }
        let arrival = options("gfx942").threads(Some(2)).block_order(BlockOrder::Arrival);
        let (mut order, _) = flags(arrival, &image, 200).unwrap();
        order[1..].sort_unstable();
        assert_eq!(order, one.0);
    }
}

/// Each workgroup waits for the next one. The GPU holds some thousands of them: more cannot all be there.
#[test]
fn a_wait_for_a_workgroup_that_does_not_fit_is_a_deadlock() {
    let source = r#"
      #define AGENT __HIP_MEMORY_SCOPE_AGENT
      __shared__ u32 whole[16384];
      KERNEL void chain(u32 *flags, u32 *tickets, int n) {
        if (TID == 0) {
          whole[BID % 16384] = BID;
          if (BID < n - 1) while (__hip_atomic_load(&flags[BID + 1], __ATOMIC_ACQUIRE, AGENT) == 0) __builtin_amdgcn_s_sleep(1);
          __hip_atomic_fetch_add(tickets, whole[BID % 16384], __ATOMIC_RELAXED, AGENT);
          __hip_atomic_store(&flags[BID], __hip_atomic_fetch_add(tickets + 1, 1, __ATOMIC_RELAXED, AGENT) + 1, __ATOMIC_RELEASE, AGENT);
        }
      }"#;
    let image = crate::common::hip("gfx942", "-O2", source);
    for order in [BlockOrder::Reproducible, BlockOrder::Arrival] {
        for threads in [1, 2] {
            let chain = |n: usize| {
                let rig = Rig::new(options("gfx942").threads(Some(threads)).block_order(order), &image);
                let (flags, tickets) =
                    (rig.upload("flags", &vec![0u32; n]), rig.upload("tickets", &[0u32; 2]));
                rig.launch("chain", n as u32, 64, &Args::new().push(flags).push(tickets).push(n as u32))
            };
            // 64 KiB of LDS: one workgroup on each of 304 compute units.
            chain(304).unwrap_or_else(|fault| panic!("{order}, {threads} threads: {fault}"));
            let fault = chain(305).unwrap_err();
            let Fault::Sanitizer { check: Check::Barriers, what, site, .. } = &fault else {
                panic!("{fault}")
            };
            assert!(what.starts_with("deadlock"), "{fault}");
            assert!(what.contains("305 workgroups, and the GPU holds 304"), "{fault}");
            assert_eq!(site.workgroup, [0, 0, 0], "{order}, {threads} threads");
        }
    }
}

/// The fault of the lowest workgroup is reported, and the others do not hang in their turns.
#[test]
fn a_fault_ends_workgroups_that_wait_for_their_turn() {
    let source = r#"
      KERNEL void fault(u32 *tickets, u32 *out) {
        if (TID == 0 && BID == 3) out[1 << 30] = 1;
        u32 ticket = __hip_atomic_fetch_add(tickets, 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
        if (TID == 0 && BID == 5) out[1 << 30] = ticket;
        out[0] = ticket;
      }"#;
    let image = crate::common::hip("gfx942", "-O2", source);
    for threads in [1, 2, 8] {
        let rig = Rig::new(options("gfx942").threads(Some(threads)), &image);
        let args = Args::new().push(rig.upload("tickets", &[0u32])).push(rig.upload("out", &[0u32]));
        let fault = rig.launch("fault", 20, 64, &args).unwrap_err();
        let Fault::Memory { site, .. } = &fault else { panic!("{fault}") };
        assert_eq!(site.workgroup, [3, 0, 0], "{threads} threads");
    }
}

/// Float atomics round in the order of a single thread.
#[test]
fn float_atomics_add_up_in_order() {
    let source = r#"
      KERNEL void sum(const float *x, float *y, int n) {
        float sum = 0;
        for (int i = 0; i < n; i++) sum += x[BID * n + i];
        if (TID == 0) __builtin_amdgcn_global_atomic_fadd_f32((__attribute__((address_space(1))) float *)y, sum);
      }"#;
    let image = crate::common::hip("gfx942", "-O3", source);
    let mut random = Random(5);
    let x: Vec<f32> = (0..40 * 50).map(|_| random.unit() * 2f32.powi((random.next() % 20) as i32)).collect();
    let sum = |threads| {
        let rig = Rig::new(options("gfx942").threads(Some(threads)), &image);
        let (px, py) = (rig.upload("x", &x), rig.upload("y", &[0f32]));
        let counters = rig.launch("sum", 50, 64, &Args::new().push(px).push(py).push(40u32)).unwrap();
        (rig.download::<u32>(py, 1)[0], counters)
    };
    let one = sum(1);
    for threads in [2, 8, 8] {
        assert_eq!(sum(threads), one, "{threads} threads");
    }
}
