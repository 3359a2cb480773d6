//! Errors of the operators. After an error every output is as it was.

use hk_core::{Device, Layout, Result, Stream, TensorView, TensorViewMut};
use hk_sampling::{Draw, Filters, PerRow, Race, SampledRows, Samples, race_workspace, sampling_workspace};
use hk_testkit::{self as kit, Call, CallElement, Place, Refusals, Tensors, assert_error, kind};

/// Parameters that are numbers, where a call has no tensor of them.
#[derive(Debug, Clone, Copy)]
struct Numbers {
    k: i32,
    p: f32,
    min_p: f32,
    temperature: f32,
}

const NUMBERS: Numbers = Numbers { k: 5, p: 0.5, min_p: 0.5, temperature: 1.0 };

fn per_row<'a, T: CallElement>(tensors: &Tensors<'a>, name: &str, number: T) -> PerRow<'a, T> {
    tensors.optional_input(name).map_or(PerRow::All(number), PerRow::Rows)
}

/// The errors of an operator on rows `[3, 4]`, every optional tensor given.
fn table<'f>(op: &'static str) -> Refusals<'f, Numbers> {
    let run = move |stream: &Stream, tensors: &mut Tensors, numbers: Numbers| {
        use hk_sampling as ops;
        let mut scratch = stream.alloc_zeroed::<u8>(0)?;
        let w = scratch.view_mut([0])?;
        let row_index = tensors.optional_input("row_index");
        let (k, p) = (per_row(tensors, "k", numbers.k), per_row(tensors, "p", numbers.p));
        let min_p = per_row(tensors, "min_p", numbers.min_p);
        let temperature = per_row(tensors, "temperature", numbers.temperature);
        let filters = Filters { k: Some(k), p: Some(p), min_p: Some(min_p), ..Default::default() };
        let draw = Draw { uniform: tensors.optional_input("uniform"), ..Default::default() };
        let race = Race { exponentials: tensors.optional_input("exponentials"), ..Default::default() };
        if op == "top_k_renorm_probs" {
            return ops::top_k_renorm_probs::<f32>(stream, tensors.input("probs"), tensors.output("y"), w, k);
        }
        let ids = tensors.output("ids");
        let x = tensors.input::<f32>(x_name(op));
        match op {
            "greedy_sample" => return ops::greedy_sample(stream, x, row_index, ids, w),
            "random_sample" => return ops::random_sample(stream, x, temperature, row_index, ids, w, race),
            "mixed_sample" => return ops::mixed_sample(stream, x, temperature, row_index, ids, w, race),
            _ => {}
        }
        let (mass, count) = (tensors.optional_output("mass"), tensors.optional_output("count"));
        let samples = Samples { ids, mass, count };
        match op {
            "top_p_sampling_from_probs" => {
                ops::top_p_sampling_from_probs(stream, x, row_index, samples, w, p, draw)
            }
            "top_k_sampling_from_probs" => {
                ops::top_k_sampling_from_probs(stream, x, row_index, samples, w, k, draw)
            }
            "min_p_sampling_from_probs" => {
                ops::min_p_sampling_from_probs(stream, x, row_index, samples, w, min_p, draw)
            }
            "top_k_top_p_sampling_from_probs" => {
                ops::top_k_top_p_sampling_from_probs(stream, x, row_index, samples, w, filters, draw)
            }
            _ => {
                let rows = SampledRows { temperature, row_index };
                ops::sample_from_logits(stream, x, rows, samples, w, filters, draw)
            }
        }
    };
    let mut table = Refusals::new(NUMBERS, run).input::<f32>(x_name(op), [3, 4]);
    for name in parameters(op) {
        table = if *name == "k" { table.input::<i32>(name, [3]) } else { table.input::<f32>(name, [3]) };
    }
    match op {
        "top_k_renorm_probs" => return table.output::<f32>("y", [3, 4]),
        "greedy_sample" => {}
        "random_sample" | "mixed_sample" => table = table.input::<f32>("exponentials", [3, 4]),
        _ => {
            table = table.input::<f32>("uniform", [3]).output::<f32>("mass", [3]).output::<i32>("count", [3]);
        }
    }
    table.input::<i32>("row_index", [3]).output::<i32>("ids", [3])
}

/// What the operator calls its first input.
fn x_name(op: &str) -> &'static str {
    ALL.iter().find(|(name, ..)| *name == op).expect("an operator").1
}

/// The parameters that can be tensors of one number per row.
fn parameters(op: &str) -> &'static [&'static str] {
    match op {
        "greedy_sample" => &[],
        "random_sample" | "mixed_sample" => &["temperature"],
        "top_p_sampling_from_probs" => &["p"],
        "top_k_sampling_from_probs" | "top_k_renorm_probs" => &["k"],
        "min_p_sampling_from_probs" => &["min_p"],
        "top_k_top_p_sampling_from_probs" => &["k", "p", "min_p"],
        _ => &["temperature", "k", "p", "min_p"],
    }
}

#[test]
fn parameters_out_of_range() {
    for (op, ..) in ALL {
        let mut table = table(op);
        let number = |name: &'static str, change: fn(&mut Numbers, f32), value: f32| {
            move |call: &mut Call<Numbers>| {
                call.without(name);
                change(&mut call.options, value);
            }
        };
        for name in parameters(op) {
            if *name == "k" {
                for k in [0, -1, i32::MIN] {
                    let message = format!("{op}: k: {k}, expected at least 1");
                    table = table.refuses(kind!(Argument), &[&message], |call| {
                        call.without("k");
                        call.options.k = k;
                    });
                }
                continue;
            }
            let (values, want, change): (&[f32], &str, fn(&mut Numbers, f32)) = match *name {
                "p" => {
                    let values = &[0.0, -0.5, 1.000_000_1, f32::NAN, f32::INFINITY];
                    (values, "more than 0 and at most 1", |numbers, p| numbers.p = p)
                }
                "min_p" => (&[-1e-9, 1.5, f32::NAN], "from 0 to 1", |numbers, p| numbers.min_p = p),
                _ => (&[-1.0, -1e-30, f32::NAN], "not negative", |numbers, t| numbers.temperature = t),
            };
            for &value in values {
                let at = format!("{op}: {name}: {value}");
                table = table.refuses(kind!(Argument), &[&at, want], number(name, change, value));
            }
        }
    }
}

#[test]
fn shapes() {
    for (op, x, _) in ALL {
        let name = |arg: &str| format!("{op}: {arg}: ");
        let mut table = table(op)
            .accepts(|_| {})
            .refuses(kind!(Shape), &[&name(x), "[12]"], |call| call.shape(x, [12]))
            .refuses(kind!(Empty), &[&name(x), "[3, 0]"], |call| call.shape(x, [3, 0]));
        for parameter in parameters(op) {
            let message = format!("{op}: {parameter}: shape [2], expected [3] (rows)");
            table =
                table
                    .accepts(|call| call.without(parameter))
                    .refuses(kind!(Shape), &[&message], |call| call.shape(parameter, [2]));
        }
        if op == "top_k_renorm_probs" {
            let message = "y: shape [4, 3], expected [3, 4] (shape of probs)";
            let _ = table.refuses(kind!(Shape), &[op, message], |call| call.shape("y", [4, 3]));
            continue;
        }
        let short = format!("{op}: ids: shape [2], expected [3] (outputs)");
        let long = format!("{op}: ids: shape [3], expected [2] (outputs)");
        table = table
            .accepts(|call| call.without("row_index"))
            .refuses(kind!(Shape), &[&short], |call| call.shape("ids", [2]))
            .refuses(kind!(Shape), &[&name("row_index"), "[2, 2]"], |call| call.shape("row_index", [2, 2]));
        if op == "greedy_sample" {
            let _ = table.refuses(kind!(Shape), &[&long], |call| call.shape("row_index", [2]));
        } else if parameters(op) == ["temperature"] {
            let message = "exponentials: shape [3, 3], expected [3, 4] (outputs, columns of logits)";
            let _ = table
                .accepts(|call| call.without("exponentials"))
                .refuses(kind!(Shape), &[&long], |call| call.shape("row_index", [2]))
                .refuses(kind!(Shape), &[op, message], |call| call.shape("exponentials", [3, 3]));
        } else {
            let uniform = "uniform: shape [2], expected [3] (outputs)";
            let _ = table
                .accepts(|call| ["uniform", "mass", "count"].iter().for_each(|name| call.without(name)))
                .refuses(kind!(Shape), &[&long], |call| {
                    call.without("uniform");
                    call.shape("row_index", [2]);
                })
                .refuses(kind!(Shape), &[op, uniform], |call| call.shape("uniform", [2]))
                .refuses(kind!(Shape), &[&name("mass"), "shape [4]", "[3]"], |call| call.shape("mass", [4]))
                .refuses(kind!(Shape), &[&name("count"), "shape [1]", "[3]"], |call| {
                    call.shape("count", [1])
                });
        }
    }
}

#[test]
fn layouts_devices_and_overlaps() {
    for (op, x, _) in ALL {
        let mut table = table(op).refuses(kind!(Stride), &[op, x], |call| call.strides(x, [1, 3]));
        let more: &[&str] = match op {
            "top_k_renorm_probs" => &[],
            "greedy_sample" | "random_sample" | "mixed_sample" => &["row_index", "ids"],
            _ => &["row_index", "ids", "uniform", "mass", "count"],
        };
        for name in parameters(op).iter().chain(more) {
            table = table.refuses(kind!(Stride), &[op, name], |call| call.strides(name, [2]));
        }
        if op == "top_k_renorm_probs" {
            table = table.accepts(|call| call.overlap("probs", "y", 0));
        }
        table.refuses_other_devices().refuses_overlaps();
    }
}

/// All operators, the name of their first input, and the most tokens per row.
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

/// Calls one of them with good parameters; its output is `ids` or `y`.
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
            ops::sample_from_logits(stream, x, 1.0.into(), ids.into(), w, Filters::default(), draw)
        }
        _ => ops::top_k_renorm_probs(stream, x, y, w, 5.into()),
    }
}

/// Errors of long rows and of workspaces name operator and argument.
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
    let bytes = 2 * sampling_workspace(gpu.stream().device().info(), 2, cols);
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
            MOST => (sampling_workspace(gpu.stream().device().info(), 1, cols), "sampling_workspace"),
            _ => (race_workspace(gpu.stream().device().info(), 2, cols), "race_workspace"),
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
    assert_eq!(
        (
            sampling_workspace(gpu.stream().device().info(), 3, 8192),
            race_workspace(gpu.stream().device().info(), 3, 8192)
        ),
        (0, 0)
    );
    assert_eq!(
        sampling_workspace(gpu.stream().device().info(), 256, cols),
        sampling_workspace(gpu.stream().device().info(), 1000, cols)
    );
    let x = gpu.upload(&vec![0.25f32; cols], [1, cols]);
    let mut ids = gpu.poisoned::<i32>([1]);
    let needed = sampling_workspace(gpu.stream().device().info(), 1, cols);
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

    let needed = race_workspace(gpu.stream().device().info(), 1, cols);
    let mut scratch = gpu.stream().alloc_zeroed::<u8>(needed - 1).unwrap();
    let scratch = scratch.view_mut([needed - 1]).unwrap();
    let result = hk_sampling::greedy_sample(gpu.stream(), x.view(), None, ids.view_mut(), scratch);
    assert_error(result, kind!(Shape), &["workspace", "race_workspace"]);
}
