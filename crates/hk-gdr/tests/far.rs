//! Slots and tokens that are far apart: with `HK_FULL=1` beyond 32 bits of bytes, which the emulator has to have in memory;
//! otherwise as far as is quick.

use hk_core::{Layout, bf16};
use hk_gdr::{
    Gates, RecurrentInputs, RecurrentOptions, States, abs_diff, bf16_to_float, float_to_bf16, fused_recurrent,
};
use hk_testkit::{self as kit, Fill};

#[test]
fn slots_and_tokens_far_apart() {
    const DIM: usize = 16;
    // Of f32, and of twice as many bf16.
    let stride = if kit::full() { (1 << 29) + 8 } else { (1 << 20) + 8 };
    let x: Vec<bf16> = Fill::Normal.elements(2 * DIM, 1);
    let state: Vec<bf16> = Fill::Normal.elements(DIM * DIM, 2);
    let wide = |x: &[bf16]| x.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
    let options = RecurrentOptions { qk_l2norm: true, ..Default::default() };
    for gpu in kit::devices() {
        let stream = gpu.stream();
        let near = gpu.upload(&x, [2, 1, DIM]);
        let starts = gpu.upload(&[0, 2], [2]);
        let initial = gpu.upload(&wide(&state), [1, 1, DIM, DIM]);
        let (mut o, mut last) = (gpu.poisoned::<bf16>([2, 1, DIM]), gpu.poisoned::<f32>([1, 1, DIM, DIM]));
        let inputs = |x| RecurrentInputs {
            q: x,
            k: x,
            v: x,
            gates: Gates::default(),
            cu_seqlens: Some(starts.view()),
        };
        let states = States::Dense { initial: Some(initial.view()), last: Some(last.view_mut()) };
        fused_recurrent(stream, inputs(near.view()), states, o.view_mut(), options).unwrap();
        let want = gpu.download(&o).data;

        // The second token, and the second slot, behind a gap.
        let mut tokens = stream.alloc_zeroed::<bf16>(2 * stride + DIM).unwrap();
        let far_tokens = Layout::with_strides([2, 1, DIM], [2 * stride, DIM, 1]).unwrap();
        for (t, row) in x.chunks(DIM).enumerate() {
            let (row, to) = (gpu.upload(&wide(row), [DIM]), Layout::contiguous([DIM]).unwrap());
            float_to_bf16(stream, row.view(), tokens.view_mut_with(to, t * 2 * stride).unwrap()).unwrap();
        }
        let mut pool = stream.alloc_zeroed::<f32>(stride + DIM * DIM).unwrap();
        let far_slots = Layout::with_strides([2, 1, DIM, DIM], [stride, DIM * DIM, DIM, 1]).unwrap();
        let slot = Layout::contiguous([DIM * DIM]).unwrap();
        let stored = gpu.upload(&state, [DIM * DIM]);
        bf16_to_float(stream, stored.view(), pool.view_mut_with(slot, stride).unwrap()).unwrap();
        let indices = gpu.upload(&[1], [1]);
        let states = States::Pool {
            pool: pool.view_mut_with(far_slots, 0).unwrap(),
            indices: indices.view(),
            accepted: None,
        };
        let mut o = gpu.poisoned::<bf16>([2, 1, DIM]);
        let far = tokens.view_with(far_tokens, 0).unwrap();
        fused_recurrent(stream, inputs(far), states, o.view_mut(), options).unwrap();
        assert!(gpu.download(&o).data == want);
        let (last, kept) =
            (last.view().flatten("test", "last").unwrap(), pool.view_with(slot, stride).unwrap());
        let mut diff = gpu.poisoned::<f32>([DIM * DIM]);
        abs_diff(stream, kept, last, diff.view_mut()).unwrap();
        assert!(gpu.download(&diff).data.iter().all(|x| *x == 0.0));
    }
}
