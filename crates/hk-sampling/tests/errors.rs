//! What the operators refuse, and that they then touch nothing.

mod common;

use common::none;
use hk_core::{Device, Layout, Result, TensorView, TensorViewMut, bf16};
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

#[test]
fn rows_too_long() {
    let gpu = &kit::devices()[0];
    let cols = 1 << 24;
    let x = gpu.stream().alloc_zeroed::<bf16>(cols).unwrap();
    let mut ids = gpu.poisoned::<i32>([1]);
    let mut empty = gpu.stream().alloc_zeroed::<u8>(0).unwrap();
    let scratch = empty.view_mut([0]).unwrap();
    let result =
        hk_sampling::greedy_sample(gpu.stream(), x.view([1, cols]).unwrap(), None, ids.view_mut(), scratch);
    assert_error(result, kind!(TooLarge), &["x", "16777216 columns", "16777215"]);
    let scratch = empty.view_mut([0]).unwrap();
    let (samples, draw) = (ids.view_mut().into(), Draw::default());
    let x = x.view([1, cols]).unwrap();
    let result =
        hk_sampling::min_p_sampling_from_probs(gpu.stream(), x, None, samples, scratch, 0.1.into(), draw);
    assert_error(result, kind!(TooLarge), &["probs", "16777216 columns"]);
    gpu.assert_untouched(&ids);
}

#[test]
fn workspaces() {
    let gpu = &kit::devices()[0];
    let cols = 9000;
    assert_eq!((sampling_workspace(3, 8192), race_workspace(3, 8192)), (0, 0));
    assert_eq!(sampling_workspace(64, cols), sampling_workspace(1000, cols));
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
