//! What the operators refuse, and that they then touch nothing.

mod common;

use common::none;
use hk_core::{Device, Layout, Result, Stream, TensorView, TensorViewMut};
use hk_sampling::{Draw, Filters, PerRow, Race, Samples, race_workspace, sampling_workspace};
use hk_testkit::{self as kit, Gpu, Place, assert_error, kind};

fn joint<'a>(
    gpu: &Gpu,
    probs: TensorView<'a, f32>,
    row_index: Option<TensorView<'a, i32>>,
    samples: impl Into<Samples<'a>>,
    filters: Filters<'a>,
    uniform: Option<TensorView<'a, f32>>,
) -> Result<()> {
    let draw = Draw { uniform, ..Default::default() };
    let mut empty = gpu.stream().alloc_zeroed::<u8>(0)?;
    let scratch = empty.view_mut([0])?;
    hk_sampling::top_k_top_p_sampling_from_probs(
        gpu.stream(),
        probs,
        row_index,
        samples.into(),
        scratch,
        filters,
        draw,
    )
}

#[test]
fn parameters_out_of_range() {
    let gpu = &kit::devices()[0];
    let x = gpu.upload(&[0.25f32; 12], [3, 4]);
    let mut ids = gpu.poisoned::<i32>([3]);
    let off = Filters::default;
    for k in [0, -1, i32::MIN] {
        let filters = Filters { k: Some(k.into()), ..off() };
        let result = joint(gpu, x.view(), None, ids.view_mut(), filters, None);
        let message = format!("top_k_top_p_sampling_from_probs: k: {k}, expected at least 1");
        assert_error(result, kind!(Argument), &[&message]);
    }
    for p in [0.0, -0.5, 1.000_000_1, f32::NAN, f32::INFINITY] {
        let filters = Filters { p: Some(p.into()), ..off() };
        let result = joint(gpu, x.view(), None, ids.view_mut(), filters, None);
        assert_error(result, kind!(Argument), &["p: ", &p.to_string(), "more than 0 and at most 1"]);
    }
    for p in [-1e-9, 1.5, f32::NAN] {
        let filters = Filters { min_p: Some(p.into()), ..off() };
        let result = joint(gpu, x.view(), None, ids.view_mut(), filters, None);
        assert_error(result, kind!(Argument), &["min_p: ", "from 0 to 1"]);
    }
    let mut empty = gpu.stream().alloc_zeroed::<u8>(0).unwrap();
    for t in [-1.0f32, -1e-30, f32::NAN] {
        let (stream, filters, draw, race) = (gpu.stream(), off(), Draw::default(), Race::default());
        let scratch = empty.view_mut([0]).unwrap();
        let samples = ids.view_mut().into();
        let result = hk_sampling::sample_from_logits(
            stream,
            x.view(),
            t.into(),
            none(),
            samples,
            scratch,
            filters,
            draw,
        );
        assert_error(result, kind!(Argument), &["sample_from_logits: temperature", "not negative"]);
        let scratch = empty.view_mut([0]).unwrap();
        let result =
            hk_sampling::random_sample(stream, x.view(), t.into(), None, ids.view_mut(), scratch, race);
        assert_error(result, kind!(Argument), &["random_sample: temperature"]);
        let scratch = empty.view_mut([0]).unwrap();
        let result =
            hk_sampling::mixed_sample(stream, x.view(), t.into(), None, ids.view_mut(), scratch, race);
        assert_error(result, kind!(Argument), &["mixed_sample: temperature"]);
    }
    let mut y = gpu.poisoned::<f32>([3, 4]);
    let scratch = empty.view_mut([0]).unwrap();
    let result = hk_sampling::top_k_renorm_probs(gpu.stream(), x.view(), y.view_mut(), scratch, 0.into());
    assert_error(result, kind!(Argument), &["top_k_renorm_probs: k: 0"]);
    gpu.assert_untouched(&y);
    gpu.assert_untouched(&ids);
}

#[test]
fn shapes() {
    let gpu = &kit::devices()[0];
    let x = gpu.upload(&[0.25f32; 12], [3, 4]);
    let mut ids = gpu.poisoned::<i32>([3]);
    let off = Filters::default;

    let flat = gpu.upload(&[0.25f32; 12], [12]);
    assert_error(
        joint(gpu, flat.view(), None, ids.view_mut(), off(), None),
        kind!(Shape),
        &["probs", "[12]"],
    );
    let none_wide = gpu.upload::<f32>(&[], [3, 0]);
    let result = joint(gpu, none_wide.view(), None, ids.view_mut(), off(), None);
    assert_error(result, kind!(Empty), &["probs", "[3, 0]"]);

    let mut short = gpu.poisoned::<i32>([2]);
    let result = joint(gpu, x.view(), None, short.view_mut(), off(), None);
    let message = "top_k_top_p_sampling_from_probs: ids: shape [2], expected [3] (outputs)";
    assert_error(result, kind!(Shape), &[message]);
    let index = gpu.upload(&[0, 1], [2]);
    let result = joint(gpu, x.view(), Some(index.view()), ids.view_mut(), off(), None);
    assert_error(result, kind!(Shape), &["ids: shape [3], expected [2] (outputs)"]);
    let square = gpu.upload(&[0, 1, 2, 0], [2, 2]);
    let result = joint(gpu, x.view(), Some(square.view()), ids.view_mut(), off(), None);
    assert_error(result, kind!(Shape), &["row_index", "[2, 2]"]);

    let mut mass = gpu.poisoned::<f32>([4]);
    let samples = Samples { mass: Some(mass.view_mut()), ..ids.view_mut().into() };
    assert_error(joint(gpu, x.view(), None, samples, off(), None), kind!(Shape), &["mass: shape [4]", "[3]"]);
    let mut count = gpu.poisoned::<i32>([1]);
    let samples = Samples { count: Some(count.view_mut()), ..ids.view_mut().into() };
    assert_error(
        joint(gpu, x.view(), None, samples, off(), None),
        kind!(Shape),
        &["count: shape [1]", "[3]"],
    );

    let (k, p) = (gpu.upload(&[1, 2], [2]), gpu.upload(&[0.5f32; 2], [2]));
    let filters = Filters { k: Some(k.view().into()), ..off() };
    let result = joint(gpu, x.view(), None, ids.view_mut(), filters, None);
    assert_error(result, kind!(Shape), &["k: shape [2], expected [3] (rows)"]);
    let filters = Filters { p: Some(p.view().into()), ..off() };
    let result = joint(gpu, x.view(), None, ids.view_mut(), filters, None);
    assert_error(result, kind!(Shape), &["p: shape [2], expected [3] (rows)"]);
    let filters = Filters { min_p: Some(p.view().into()), ..off() };
    let result = joint(gpu, x.view(), None, ids.view_mut(), filters, None);
    assert_error(result, kind!(Shape), &["min_p: shape [2]"]);
    let result = joint(gpu, x.view(), None, ids.view_mut(), off(), Some(p.view()));
    assert_error(result, kind!(Shape), &["uniform: shape [2], expected [3] (outputs)"]);

    let mut empty = gpu.stream().alloc_zeroed::<u8>(0).unwrap();
    let mut race = |t: PerRow<f32>, e: Option<TensorView<f32>>, ids: TensorViewMut<i32>| {
        let race = Race { exponentials: e, ..Default::default() };
        let scratch = empty.view_mut([0]).unwrap();
        hk_sampling::random_sample(gpu.stream(), x.view(), t, None, ids, scratch, race)
    };
    let result = race(p.view().into(), None, ids.view_mut());
    assert_error(result, kind!(Shape), &["temperature: shape [2], expected [3] (rows)"]);
    let e = gpu.upload(&[1.0f32; 9], [3, 3]);
    let result = race(1.0.into(), Some(e.view()), ids.view_mut());
    assert_error(
        result,
        kind!(Shape),
        &["exponentials: shape [3, 3], expected [3, 4] (outputs, columns of logits)"],
    );
    let result = race(1.0.into(), None, short.view_mut());
    assert_error(result, kind!(Shape), &["random_sample: ids: shape [2]"]);

    let mut y = gpu.poisoned::<f32>([4, 3]);
    let scratch = empty.view_mut([0]).unwrap();
    let result = hk_sampling::top_k_renorm_probs(gpu.stream(), x.view(), y.view_mut(), scratch, 1.into());
    assert_error(result, kind!(Shape), &["y: shape [4, 3], expected [3, 4] (shape of probs)"]);
    gpu.assert_untouched(&ids);
}

#[test]
fn layouts() {
    let gpu = &kit::devices()[0];
    let mut ids = gpu.poisoned::<i32>([3]);
    let off = Filters::default;
    let turned = gpu.upload(&[0.25f32; 12], [4, 3]);
    let turned = turned.view().transpose(0, 1).unwrap();
    assert_error(joint(gpu, turned, None, ids.view_mut(), off(), None), kind!(Stride), &["probs"]);
    let x = gpu.upload(&[0.25f32; 12], [3, 4]);
    let spread = Place::new(Layout::with_strides([3], [2]).unwrap());
    let index = gpu.upload(&[0, 1, 2], &spread);
    let result = joint(gpu, x.view(), Some(index.view()), ids.view_mut(), off(), None);
    assert_error(result, kind!(Stride), &["row_index"]);
    let mut spread_ids = gpu.poisoned::<i32>(&spread);
    let result = joint(gpu, x.view(), None, spread_ids.view_mut(), off(), None);
    assert_error(result, kind!(Stride), &["ids"]);
    let p = gpu.upload(&[0.5f32; 3], &spread);
    let filters = Filters { p: Some(p.view().into()), ..off() };
    assert_error(joint(gpu, x.view(), None, ids.view_mut(), filters, None), kind!(Stride), &["p"]);
    let result = joint(gpu, x.view(), None, ids.view_mut(), off(), Some(p.view()));
    assert_error(result, kind!(Stride), &["uniform"]);

    let one = gpu.upload(&[1.0f32], [1, 1]);
    let long = one.view().broadcast([1, 1]).unwrap();
    let other = Device::open("emu:gfx950").unwrap().create_stream().unwrap();
    let mut empty = gpu.stream().alloc_zeroed::<u8>(0).unwrap();
    let mut id = gpu.poisoned::<i32>([1]);
    let scratch = empty.view_mut([0]).unwrap();
    let result = hk_sampling::greedy_sample(&other, long, None, id.view_mut(), scratch);
    assert_error(result, kind!(DeviceMismatch), &["x", "emu:gfx942", "emu:gfx950"]);
    gpu.assert_untouched(&ids);
    gpu.assert_untouched(&id);
}

/// All operators, with what they call their first input, and the tokens that they take at most.
const ALL: [(&str, &str, usize); 9] = [
    ("greedy_sample", "x", MOST_IN_RACES),
    ("random_sample", "logits", MOST_IN_RACES),
    ("mixed_sample", "logits", MOST_IN_RACES),
    ("top_p_sampling_from_probs", "probs", MOST),
    ("top_k_sampling_from_probs", "probs", MOST),
    ("min_p_sampling_from_probs", "probs", MOST),
    ("top_k_top_p_sampling_from_probs", "probs", MOST),
    ("sample_from_logits", "logits", MOST),
    ("top_k_renorm_probs", "probs", MOST),
];
const MOST: usize = (1 << 24) - 1;
const MOST_IN_RACES: usize = (1 << 29) - 1;

/// Calls one of them, with good parameters; `ids` or `y` as it has them.
fn call(
    op: &str,
    stream: &Stream,
    x: TensorView<f32>,
    ids: TensorViewMut<i32>,
    y: TensorViewMut<f32>,
    w: TensorViewMut<u8>,
) -> Result<()> {
    use hk_sampling as ops;
    let (draw, race) = (Draw::default(), Race::default());
    match op {
        "greedy_sample" => ops::greedy_sample(stream, x, None, ids, w),
        "random_sample" => ops::random_sample(stream, x, 1.0.into(), None, ids, w, race),
        "mixed_sample" => ops::mixed_sample(stream, x, 1.0.into(), None, ids, w, race),
        "top_p_sampling_from_probs" => {
            ops::top_p_sampling_from_probs(stream, x, None, ids.into(), w, 0.5.into(), draw)
        }
        "top_k_sampling_from_probs" => {
            ops::top_k_sampling_from_probs(stream, x, None, ids.into(), w, 5.into(), draw)
        }
        "min_p_sampling_from_probs" => {
            ops::min_p_sampling_from_probs(stream, x, None, ids.into(), w, 0.5.into(), draw)
        }
        "top_k_top_p_sampling_from_probs" => {
            ops::top_k_top_p_sampling_from_probs(stream, x, None, ids.into(), w, Filters::default(), draw)
        }
        "sample_from_logits" => {
            ops::sample_from_logits(stream, x, 1.0.into(), None, ids.into(), w, Filters::default(), draw)
        }
        _ => ops::top_k_renorm_probs(stream, x, y, w, 5.into()),
    }
}

/// What every operator refuses, each with its own name and that of the argument.
#[test]
fn every_operator_checks_its_tensors() {
    let gpu = &kit::devices()[0];
    let cols = 9000;
    let x = gpu.upload(&vec![0.25f32; 2 * cols], [2, cols]);
    let flat = gpu.upload(&[0.25f32; 6], [6]);
    let empty = gpu.upload::<f32>(&[], [2, 0]);
    let one = gpu.upload(&[1.0f32], [1, 1]);
    let turned = gpu.upload(&[0.25f32; 6], [3, 2]);
    let other = Device::open("emu:gfx950").unwrap().create_stream().unwrap();
    let bytes = 2 * sampling_workspace(2, cols);
    let mut scratch = gpu.stream().alloc_zeroed::<u8>(bytes).unwrap();
    for (op, x_name, most) in ALL {
        let (mut ids, mut y) = (gpu.poisoned::<i32>([2]), gpu.poisoned::<f32>([2, cols]));
        let mut try_x = |x: TensorView<f32>, stream: &Stream| {
            let w = scratch.view_mut([bytes]).unwrap();
            call(op, stream, x, ids.view_mut(), y.view_mut(), w)
        };
        let name = format!("{op}: {x_name}: ");
        assert_error(try_x(flat.view(), gpu.stream()), kind!(Shape), &[&name, "[6]"]);
        assert_error(try_x(empty.view(), gpu.stream()), kind!(Empty), &[&name, "[2, 0]"]);
        let columns = turned.view().transpose(0, 1).unwrap();
        assert_error(try_x(columns, gpu.stream()), kind!(Stride), &[&name]);
        let long = one.view().broadcast([1, most + 1]).unwrap();
        let want = [&*name, &format!("{} columns", most + 1), &most.to_string()];
        assert_error(try_x(long, gpu.stream()), kind!(TooLarge), &want);
        let elsewhere = try_x(x.view(), &other);
        assert_error(elsewhere, kind!(DeviceMismatch), &[op, x_name, "emu:gfx942", "emu:gfx950"]);

        let (needed, from) = match most {
            MOST => (sampling_workspace(1, cols), "sampling_workspace"),
            _ => (race_workspace(2, cols), "race_workspace"),
        };
        let mut try_w = |layout: Layout, at: usize| {
            let w = scratch.view_mut_with(layout, at).unwrap();
            call(op, gpu.stream(), x.view(), ids.view_mut(), y.view_mut(), w)
        };
        let name = format!("{op}: workspace: ");
        let line = |len: usize| Layout::contiguous([len]).unwrap();
        let want = format!("shape [{}], expected [{needed}] or longer ({from})", needed - 1);
        assert_error(try_w(line(needed - 1), 0), kind!(Shape), &[&name, &want]);
        assert_error(try_w(line(needed), 8), kind!(Align), &[&name, "16 bytes"]);
        let spread = Layout::with_strides([needed], [2]).unwrap();
        assert_error(try_w(spread, 0), kind!(Stride), &[&name]);
        let square = Layout::contiguous([2, needed]).unwrap();
        assert_error(try_w(square, 0), kind!(Shape), &[&name]);
        gpu.assert_untouched(&ids);
        gpu.assert_untouched(&y);

        // What is written.
        let wide = Place::new(Layout::with_strides([2], [2]).unwrap());
        let (mut spread, mut more) = (gpu.poisoned::<i32>(&wide), gpu.poisoned::<i32>([3]));
        let (mut y_columns, mut y_more) = (gpu.poisoned::<f32>([cols, 2]), gpu.poisoned::<f32>([3, cols]));
        let w = scratch.view_mut([bytes]).unwrap();
        let result = call(op, gpu.stream(), x.view(), more.view_mut(), y_more.view_mut(), w);
        let output = if op == "top_k_renorm_probs" { "y" } else { "ids" };
        assert_error(result, kind!(Shape), &[op, output, "[3"]);
        let w = scratch.view_mut([bytes]).unwrap();
        let turned = y_columns.view_mut().transpose(0, 1).unwrap();
        let result = call(op, gpu.stream(), x.view(), spread.view_mut(), turned, w);
        assert_error(result, kind!(Stride), &[op, output]);
        gpu.assert_untouched(&spread);
        gpu.assert_untouched(&more);
        gpu.assert_untouched(&y_columns);
        gpu.assert_untouched(&y_more);
    }
}

#[test]
fn workspaces() {
    let gpu = &kit::devices()[0];
    let cols = 9000;
    assert_eq!((sampling_workspace(3, 8192), race_workspace(3, 8192)), (0, 0));
    assert_eq!(sampling_workspace(256, cols), sampling_workspace(1000, cols));
    let x = gpu.upload(&vec![0.25f32; cols], [1, cols]);
    let mut ids = gpu.poisoned::<i32>([1]);
    let needed = sampling_workspace(1, cols);
    let mut scratch = gpu.stream().alloc_zeroed::<u8>(needed + 32).unwrap();
    let mut call = |at: usize, len: usize, ids: TensorViewMut<i32>| {
        let scratch = scratch.view_mut([needed + 32]).unwrap().slice(0, at..at + len).unwrap();
        let draw = Draw::default();
        hk_sampling::top_p_sampling_from_probs(
            gpu.stream(),
            x.view(),
            None,
            ids.into(),
            scratch,
            0.5.into(),
            draw,
        )
    };
    let short = call(0, needed - 1, ids.view_mut());
    assert_error(short, kind!(Shape), &["workspace", &format!("[{needed}] or longer (sampling_workspace)")]);
    assert_error(call(8, needed, ids.view_mut()), kind!(Align), &["workspace", "16 bytes"]);
    gpu.assert_untouched(&ids);
    call(16, needed, ids.view_mut()).unwrap();

    let needed = race_workspace(1, cols);
    let mut scratch = gpu.stream().alloc_zeroed::<u8>(needed - 1).unwrap();
    let scratch = scratch.view_mut([needed - 1]).unwrap();
    let result = hk_sampling::greedy_sample(gpu.stream(), x.view(), None, ids.view_mut(), scratch);
    assert_error(result, kind!(Shape), &["workspace", "race_workspace"]);
}

#[test]
fn overlaps() {
    let gpu = &kit::devices()[0];
    let off = Filters::default;
    let x = gpu.upload(&[0.25f32; 12], [3, 4]);
    let mut index = gpu.upload(&[0, 1, 2, 0], [4]);
    let whole = index.view_mut();
    let part = whole.alias().slice(0, 0..3).unwrap();
    let ids = whole.slice(0, 1..4).unwrap();
    assert_error(joint(gpu, x.view(), Some(part), ids, off(), None), kind!(Overlap), &["row_index and ids"]);
    let whole = index.view_mut();
    let filters = Filters { k: Some(whole.alias().slice(0, 0..3).unwrap().into()), ..off() };
    let ids = whole.slice(0, 1..4).unwrap();
    assert_error(joint(gpu, x.view(), None, ids, filters, None), kind!(Overlap), &["k and ids"]);

    let mut ids = gpu.poisoned::<i32>([3]);
    let mut flat = gpu.upload(&[0.5f32; 12], [12]);
    let mass = flat.view_mut();
    let uniform = mass.alias().slice(0, 2..5).unwrap();
    let mass = mass.slice(0, 0..3).unwrap();
    let samples = Samples { mass: Some(mass), ..ids.view_mut().into() };
    let result = joint(gpu, x.view(), None, samples, off(), Some(uniform));
    assert_error(result, kind!(Overlap), &["uniform and mass"]);
    let mass = flat.view_mut();
    let p = mass.alias().slice(0, 2..5).unwrap();
    let samples = Samples { mass: Some(mass.slice(0, 0..3).unwrap()), ..ids.view_mut().into() };
    let filters = Filters { min_p: Some(p.into()), ..off() };
    let result = joint(gpu, x.view(), None, samples, filters, None);
    assert_error(result, kind!(Overlap), &["min_p and mass"]);
    let mut square = gpu.upload(&[0.25f32; 20], [4, 5]);
    let y = square.view_mut();
    let left = y.alias().slice(1, 0..4).unwrap();
    let right = y.slice(1, 1..5).unwrap();
    let mut empty = gpu.stream().alloc_zeroed::<u8>(0).unwrap();
    let scratch = empty.view_mut([0]).unwrap();
    let result = hk_sampling::top_k_renorm_probs(gpu.stream(), left, right, scratch, 1.into());
    assert_error(result, kind!(Overlap), &["probs and y"]);
    gpu.assert_untouched(&square);
    gpu.assert_untouched(&flat);
    gpu.assert_untouched(&ids);
}

/// Every output with every input whose elements are of its type: others cannot share memory in safe code, nor can two
/// outputs.
#[test]
fn outputs_share_no_memory_with_inputs() {
    let gpu = &kit::devices()[0];
    let (rows, cols) = (4, 4);
    for (input, output) in [
        ("row_index", "ids"),
        ("k", "ids"),
        ("row_index", "count"),
        ("k", "count"),
        ("logits", "mass"),
        ("temperature", "mass"),
        ("p", "mass"),
        ("min_p", "mass"),
        ("uniform", "mass"),
    ] {
        let mut ints = gpu.upload(&[0i32; 7], [7]);
        let mut floats = gpu.upload(&[0.5f32; 19], [19]);
        let (int_out, float_out) = (ints.view_mut(), floats.view_mut());
        // The input's last element is the output's first.
        let int_in = int_out.alias().slice(0, 0..rows).unwrap();
        let float_in = float_out.alias().slice(0, 0..rows).unwrap();
        let x = float_out.alias().slice(0, 0..rows * cols).unwrap().split_axis(0, cols).unwrap();
        let int_out = int_out.slice(0, 3..7).unwrap();
        let float_out = float_out.slice(0, if input == "logits" { 15..19 } else { 3..7 }).unwrap();

        let good = gpu.upload(&[0.5f32; 16], [rows, cols]);
        let mut ids = gpu.poisoned::<i32>([rows]);
        let mut samples = Samples::from(ids.view_mut());
        match output {
            "ids" => samples.ids = int_out,
            "count" => samples.count = Some(int_out),
            _ => samples.mass = Some(float_out),
        }
        let filters = Filters {
            k: (input == "k").then(|| int_in.into()),
            p: (input == "p").then(|| float_in.into()),
            min_p: (input == "min_p").then(|| float_in.into()),
            ..Default::default()
        };
        let temperature = if input == "temperature" { float_in.into() } else { 1.0.into() };
        let draw = Draw { uniform: (input == "uniform").then_some(float_in), ..Default::default() };
        let row_index = (input == "row_index").then_some(int_in);
        let x = if input == "logits" { x } else { good.view() };
        let mut empty = gpu.stream().alloc_zeroed::<u8>(0).unwrap();
        let w = empty.view_mut([0]).unwrap();
        let result = hk_sampling::sample_from_logits(
            gpu.stream(),
            x,
            temperature,
            row_index,
            samples,
            w,
            filters,
            draw,
        );
        assert_error(result, kind!(Overlap), &["sample_from_logits", &format!("{input} and {output}")]);
        gpu.assert_untouched(&ids);
    }
    for op in ["greedy_sample", "random_sample", "mixed_sample"] {
        let x = gpu.upload(&[0.5f32; 16], [rows, cols]);
        let mut ints = gpu.upload(&[0i32; 7], [7]);
        let out = ints.view_mut();
        let index = Some(out.alias().slice(0, 0..rows).unwrap());
        let ids = out.slice(0, 3..7).unwrap();
        let mut empty = gpu.stream().alloc_zeroed::<u8>(0).unwrap();
        let (w, race) = (empty.view_mut([0]).unwrap(), Race::default());
        let result = match op {
            "greedy_sample" => hk_sampling::greedy_sample(gpu.stream(), x.view(), index, ids, w),
            "random_sample" => {
                hk_sampling::random_sample(gpu.stream(), x.view(), 1.0.into(), index, ids, w, race)
            }
            _ => hk_sampling::mixed_sample(gpu.stream(), x.view(), 1.0.into(), index, ids, w, race),
        };
        assert_error(result, kind!(Overlap), &[op, "row_index and ids"]);
    }
}
