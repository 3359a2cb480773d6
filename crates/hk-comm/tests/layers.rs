//! Layers of models that are split between ranks: by tensors (the example) and by experts.

use crate::common::{Ranks, bits, random};
use hk_comm::{Algorithm, all_reduce_in_place};
use hk_core::{Arch, Float, bf16};
use hk_moe::{
    ExpertGate, FusedMoeInputs, FusedMoeProblem, FusedRouting, FusedScales, GateOrder, fused_moe,
    fused_moe_workspace,
};

#[path = "../examples/tensor_parallel.rs"]
mod tensor_parallel;

#[test]
fn tensor_parallel() {
    tensor_parallel::main().unwrap();
}

const TOKENS: usize = 12;
const HIDDEN: usize = 256;
const INNER: usize = 128;
const EXPERTS: usize = 16;

/// A layer of experts, a part of them on each rank; the sum of the ranks' parts, of all tokens.
fn experts(arch: Arch, world: usize, k: usize) -> Vec<Vec<f32>> {
    let local = EXPERTS / world;
    let scaled = |seed: u64, n: usize, by: f32| -> Vec<bf16> {
        random::<f32>(seed, n).iter().map(|v| bf16::from_f32(v * by)).collect()
    };
    let (w1, w2) = (scaled(2, EXPERTS * 2 * INNER * HIDDEN, 0.06), scaled(3, EXPERTS * HIDDEN * INNER, 0.1));
    let mut ranks = Ranks::new(arch, world);
    ranks.each(|rank, comm, stream| {
        let own = |w: &[bf16]| {
            let part = w.len() / world;
            stream.upload(&w[rank * part..(rank + 1) * part]).unwrap()
        };
        let (w1, w2) = (own(&w1), own(&w2));
        let x = stream.upload(&random::<bf16>(1, TOKENS * HIDDEN)).unwrap();
        // Different experts for each token; ranks have none of some tokens.
        let ids: Vec<i32> = (0..TOKENS * k).map(|i| ((i / k * 5 + i % k * 3) % EXPERTS) as i32).collect();
        let weights: Vec<f32> = random::<f32>(4, TOKENS * k).iter().map(|v| v.abs()).collect();
        let (ids, weights) = (stream.upload(&ids).unwrap(), stream.upload(&weights).unwrap());
        let of_expert = |expert: usize| if expert / local == rank { (expert % local) as i32 } else { -1 };
        let map = stream.upload(&(0..EXPERTS).map(of_expert).collect::<Vec<_>>()).unwrap();
        let problem =
            FusedMoeProblem { tokens: TOKENS, k, experts: EXPERTS, hidden: HIDDEN, inner: INNER, shared: 0 };
        let mut workspace = stream.alloc_zeroed::<u8>(fused_moe_workspace(&problem, None)).unwrap();
        let mut y = stream.upload(&vec![f32::NAN; TOKENS * HIDDEN]).unwrap();
        let inputs = FusedMoeInputs {
            x: x.view([TOKENS, HIDDEN]).unwrap(),
            w1: w1.view([local, 2 * INNER, HIDDEN]).unwrap().into(),
            w2: w2.view([local, HIDDEN, INNER]).unwrap().into(),
            scales: FusedScales::None,
            w1_bias: None,
            w2_bias: None,
            gate: ExpertGate::silu(GateOrder::Halves),
            routing: FusedRouting::Chosen {
                ids: ids.view([TOKENS, k]).unwrap(),
                weights: weights.view([TOKENS, k]).unwrap(),
                experts: EXPERTS,
            },
            expert_map: Some(map.view([EXPERTS]).unwrap()),
            shared: None,
            residual: None,
        };
        let bytes = workspace.len();
        let out = y.view_mut([TOKENS, HIDDEN]).unwrap();
        fused_moe(stream, inputs, out, workspace.view_mut([bytes]).unwrap()).unwrap();
        all_reduce_in_place(comm, stream, y.view_mut([TOKENS, HIDDEN]).unwrap(), Algorithm::Auto).unwrap();
        comm.check().unwrap();
        stream.download(&y).unwrap()
    })
}

/// Two experts of a token are summed alike wherever they are; of more, sums of `f32` differ in their order.
#[test]
fn expert_parallel() {
    for (arch, k) in [(Arch::Gfx942, 2), (Arch::Gfx950, 4)] {
        let alone = experts(arch, 1, k).remove(0);
        let size = alone.iter().fold(0f32, |size, v| size.max(v.abs()));
        assert!(size > 0.01, "there is something to compare: {size}");
        let ranks = experts(arch, 4, k);
        for rank in &ranks {
            assert_eq!(bits(rank), bits(&ranks[0]), "all ranks alike");
        }
        if k == 2 {
            assert_eq!(bits(&ranks[0]), bits(&alone));
        }
        for (got, want) in ranks[0].iter().zip(&alone) {
            assert!((got.to_f64() - want.to_f64()).abs() <= f64::from(size) * 1e-6, "{got}, expected {want}");
        }
    }
}
