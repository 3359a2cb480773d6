//! Row strides beyond 32 bits, in elements and in bytes: with `HK_FULL=1` more than 4 GiB, which the
//! emulator has to have in memory; otherwise as far as is quick.

use hk_activation::{
    ConvActivation, ConvInputs, ConvOutputs, QkvOutputs, TopkOrder, TopkOutputs, causal_conv1d_fwd,
    fused_qkv_split_qk_rope, relu, rope_cached, silu, silu_and_mul, softmax, topk,
};
use hk_core::plan::rope::{
    Positions, Rope, RopeDirection, RopeLayout, RopeSpan, RopeStyle, RopeTableWidth, RopeTables,
};
use hk_core::{Layout, TensorView, TensorViewMut, bf16};
use hk_testkit::{self as kit, Fill, Gpu};

const COLS: usize = 48;

/// An operator from two rows of 48 columns to two rows.
type Call = fn(&Gpu, TensorView<bf16>, TensorViewMut<bf16>);

/// Each with the columns of its results.
const CALLS: &[(&str, usize, Call)] = &[
    ("silu", COLS, |gpu, x, y| silu(gpu.stream(), x, y).unwrap()),
    ("silu_and_mul", COLS / 2, |gpu, x, y| silu_and_mul(gpu.stream(), x, y, 0.0).unwrap()),
    ("softmax", COLS, |gpu, x, y| softmax(gpu.stream(), x, y, None).unwrap()),
    ("topk, lists", 8, top),
    ("topk, selected", 20, top),
    ("rope_cached", COLS, |gpu, x, y| {
        let (x, y) = (x.split_axis(1, COLS).unwrap(), y.split_axis(1, COLS).unwrap());
        with_tables(gpu, COLS, |tables, rope| {
            rope_cached(gpu.stream(), x, tables, y, rope, RopeLayout::Thd).unwrap();
        });
    }),
    ("fused_qkv_split_qk_rope", COLS / 3, |gpu, x, y| {
        let (mut k, mut v) = (gpu.poisoned::<bf16>([2, 1, 16]), gpu.poisoned::<bf16>([2, 1, 16]));
        let q = y.split_axis(1, 16).unwrap();
        with_tables(gpu, 16, |tables, rope| {
            let outputs = QkvOutputs { q, k: k.view_mut(), v: v.view_mut() };
            fused_qkv_split_qk_rope(gpu.stream(), x, tables, outputs, rope).unwrap();
        });
    }),
    ("causal_conv1d_fwd, channels together", COLS, |gpu, x, y| {
        let (x, y) = (x.transpose(0, 1).unwrap(), y.transpose(0, 1).unwrap());
        convolve(gpu, x, None, y);
    }),
    ("causal_conv1d_fwd, tokens together", COLS, |gpu, x, y| convolve(gpu, x, None, y)),
    ("causal_conv1d_fwd, states", COLS, |gpu, x, mut y| {
        // A token of two sequences; the rows are their states, which then hold the token.
        relu(gpu.stream(), x, y.reborrow()).unwrap();
        let tokens = gpu.upload(&[bf16::ONE; 2 * COLS], [COLS, 2]);
        let mut results = gpu.poisoned::<bf16>([COLS, 2]);
        convolve(gpu, tokens.view(), Some(y.split_axis(1, 1).unwrap()), results.view_mut());
    }),
];

fn top(gpu: &Gpu, x: TensorView<bf16>, y: TensorViewMut<bf16>) {
    let mut indices = gpu.poisoned::<i32>([2, y.shape()[1]]);
    let outputs = TopkOutputs { values: y, indices: indices.view_mut() };
    topk(gpu.stream(), x, outputs, None, TopkOrder::Largest).unwrap();
}

fn with_tables(gpu: &Gpu, rotary: usize, call: impl FnOnce(RopeTables<f32>, Rope)) {
    let angles: Vec<f32> = (0..rotary).map(|i| i as f32 / 3.0).collect();
    let table = |f: fn(f32) -> f32| angles.iter().map(|&a| f(a)).collect::<Vec<_>>();
    let cos = gpu.upload(&table(f32::cos), [2, rotary / 2]);
    let sin = gpu.upload(&table(f32::sin), [2, rotary / 2]);
    let (style, span) = (RopeStyle::Neox, RopeSpan::First);
    let rope = Rope { style, table: RopeTableWidth::Half, rotary, span, direction: RopeDirection::Forward };
    let positions = Positions::Index;
    call(RopeTables { cos: cos.view(), sin: sin.view(), positions, offsets: None }, rope);
}

/// Of `[channels, tokens]`: one sequence, or with states one of each token.
fn convolve(gpu: &Gpu, x: TensorView<bf16>, states: Option<TensorViewMut<bf16>>, y: TensorViewMut<bf16>) {
    let [channels, tokens] = [x.shape()[0], x.shape()[1]];
    let weight = gpu.upload(&Fill::Normal.elements::<bf16>(channels * 2, 5), [channels, 2]);
    let starts = if states.is_some() { vec![0, 1, 2] } else { vec![0, tokens as i32] };
    let starts = gpu.upload(&starts, [starts.len()]);
    let inputs = ConvInputs { query_start_loc: Some(starts.view()), ..ConvInputs::new(x, weight.view()) };
    let outputs = ConvOutputs { y, conv_states: states };
    causal_conv1d_fwd(gpu.stream(), inputs, outputs, ConvActivation::None).unwrap();
}

#[test]
fn rows_far_apart() {
    let stride = if kit::full() { (1 << 31) + 8 } else { (1 << 22) + 8 };
    let x = Fill::Normal.elements::<bf16>(2 * COLS, 9);
    for gpu in kit::devices() {
        let stream = gpu.stream();
        let far = |cols| Layout::with_strides([2, cols], [stride, 1]).unwrap();
        let mut wide = stream.alloc_zeroed::<bf16>(stride + COLS).unwrap();
        for &(name, cols, call) in CALLS {
            let positive: Vec<bf16> = x.iter().map(|v| bf16::from_f32(v.to_f32().abs())).collect();
            let near = gpu.upload(&positive, [2, COLS]);
            let mut want = gpu.poisoned::<bf16>([2, cols]);
            call(&gpu, near.view(), want.view_mut());

            relu(stream, near.view(), wide.view_mut_with(far(COLS), 0).unwrap()).unwrap();
            let mut got = gpu.poisoned::<bf16>([2, cols]);
            call(&gpu, wide.view_with(far(COLS), 0).unwrap(), got.view_mut());
            assert_eq!(gpu.download(&got).data, gpu.download(&want).data, "{name} from rows far apart");

            call(&gpu, near.view(), wide.view_mut_with(far(cols), 0).unwrap());
            relu(stream, wide.view_with(far(cols), 0).unwrap(), got.view_mut()).unwrap();
            let mut positive = gpu.poisoned::<bf16>([2, cols]);
            relu(stream, want.view(), positive.view_mut()).unwrap();
            assert_eq!(gpu.download(&got).data, gpu.download(&positive).data, "{name} to rows far apart");
        }
    }
}
