//! What every operator refuses of each of its tensors: memory shared with another, another device, columns that are apart, rows
//! that are too long.

use hk_core::{Layout, Result, Stream, TensorView, TensorViewMut};
use hk_norm::{LayerNormVectors, RmsNormOptions};
use hk_testkit::{self as kit, Gpu, Place, Tensor, assert_error, kind};

type Inputs<'a> = Vec<TensorView<'a, f32>>;
type Outputs<'a> = Vec<TensorViewMut<'a, f32>>;

/// An operator on one row; its tensors by name. Of these, `mean` and `rstd` have one element, all others a row's.
struct Case {
    inputs: &'static [&'static str],
    outputs: &'static [&'static str],
    /// Which output may lie exactly on which input.
    aliases: &'static [(&'static str, &'static str)],
    /// The input whose columns may be apart.
    strided: Option<&'static str>,
    run: fn(&Stream, Inputs, Outputs) -> Result<()>,
}

const IN_PLACE: &[(&str, &str)] = &[("x", "y")];
const RESIDUAL: &[(&str, &str)] =
    &[("x", "y"), ("residual_in", "y"), ("x", "residual_out"), ("residual_in", "residual_out")];

const CASES: [Case; 6] = [
    Case {
        inputs: &["x", "weight"],
        outputs: &["y", "rstd"],
        aliases: IN_PLACE,
        strided: None,
        run: |stream, inputs, outputs| {
            let ([x, weight], [y, rstd]) = (all(inputs), all(outputs));
            hk_norm::rmsnorm(stream, x, weight, y, Some(rstd), RmsNormOptions::default())
        },
    },
    Case {
        inputs: &["x", "residual_in", "weight"],
        outputs: &["y", "residual_out", "rstd"],
        aliases: RESIDUAL,
        strided: None,
        run: |stream, inputs, outputs| {
            let ([x, residual, weight], [y, out, rstd]) = (all(inputs), all(outputs));
            let options = RmsNormOptions::default();
            hk_norm::fused_add_rmsnorm(stream, x, residual, weight, y, out, Some(rstd), options)
        },
    },
    Case {
        inputs: &["x", "weight", "bias", "x_bias"],
        outputs: &["y", "mean", "rstd"],
        aliases: IN_PLACE,
        strided: None,
        run: |stream, inputs, outputs| {
            let ([x, weight, bias, x_bias], [y, mean, rstd]) = (all(inputs), all(outputs));
            hk_norm::layernorm(stream, x, vectors(weight, bias, x_bias), y, Some(mean), Some(rstd), 1e-5)
        },
    },
    Case {
        inputs: &["x", "residual_in", "weight", "bias", "x_bias"],
        outputs: &["y", "residual_out", "mean", "rstd"],
        aliases: RESIDUAL,
        strided: None,
        run: |stream, inputs, outputs| {
            let ([x, residual, weight, bias, x_bias], [y, out, mean, rstd]) = (all(inputs), all(outputs));
            let (vectors, mean, rstd) = (vectors(weight, bias, x_bias), Some(mean), Some(rstd));
            hk_norm::fused_add_layernorm(stream, x, residual, vectors, y, out, mean, rstd, 1e-5)
        },
    },
    Case {
        inputs: &["x", "weight"],
        outputs: &["y"],
        aliases: &[],
        strided: Some("x"),
        run: |stream, inputs, outputs| {
            let ([x, weight], [y]) = (all(inputs), all(outputs));
            hk_norm::rmsnorm_pad(stream, matrix(x), weight, row(y)?, 1e-6, 0)
        },
    },
    Case {
        inputs: &["x", "residual_in", "weight"],
        outputs: &["y", "residual_out"],
        aliases: &[("x", "residual_out"), ("residual_in", "residual_out")],
        strided: Some("x"),
        run: |stream, inputs, outputs| {
            let ([x, residual, weight], [y, out]) = (all(inputs), all(outputs));
            let (x, residual) = (matrix(x), matrix(residual));
            let (y, out) = (row(y)?, row(out)?);
            hk_norm::fused_add_rmsnorm_pad(stream, x, residual, weight, y, out, 1e-6, 0)
        },
    },
];

fn all<T, const N: usize>(tensors: Vec<T>) -> [T; N] {
    tensors.try_into().unwrap_or_else(|_| panic!("as many tensors as the operator has"))
}

/// A row as a matrix, whatever its strides.
fn matrix(x: TensorView<f32>) -> TensorView<f32> {
    x.flatten_rows("test", "x").unwrap_or_else(|_| x.broadcast([1, x.numel()]).unwrap())
}

/// A row as a matrix.
fn row(y: TensorViewMut<f32>) -> Result<TensorViewMut<f32>> {
    y.flatten_rows("test", "y")
}

fn vectors<'a>(
    weight: TensorView<'a, f32>,
    bias: TensorView<'a, f32>,
    x_bias: TensorView<'a, f32>,
) -> LayerNormVectors<'a, f32> {
    LayerNormVectors { weight: Some(weight), bias: Some(bias), x_bias: Some(x_bias) }
}

impl Case {
    /// The tensors for rows of `cols`, those of name `elsewhere` on the other device.
    fn tensors(&self, gpus: [&Gpu; 2], cols: usize, elsewhere: &str) -> [Vec<Tensor<f32>>; 2] {
        [self.inputs, self.outputs].map(|names| {
            let tensor = |name: &&str| {
                let n = if matches!(*name, "mean" | "rstd") { 1 } else { cols };
                gpus[usize::from(*name == elsewhere)].upload(&vec![1.0; n], [n])
            };
            names.iter().map(tensor).collect()
        })
    }

    /// Every pair of an input and an output.
    fn pairs(&self) -> impl Iterator<Item = (usize, usize, bool)> {
        let allowed = |i: usize, o: usize| self.aliases.contains(&(self.inputs[i], self.outputs[o]));
        (0..self.inputs.len()).flat_map(move |i| (0..self.outputs.len()).map(move |o| (i, o, allowed(i, o))))
    }
}

fn views(tensors: &[Tensor<f32>]) -> Inputs<'_> {
    tensors.iter().map(Tensor::view).collect()
}

fn views_mut(tensors: &mut [Tensor<f32>]) -> Outputs<'_> {
    tensors.iter_mut().map(Tensor::view_mut).collect()
}

/// Rows of one element, so that every tensor can lie on every other: exactly where that is allowed, else it is refused.
#[test]
fn outputs_lie_on_inputs_only_where_they_may() {
    let gpu = &kit::devices()[0];
    for case in &CASES {
        for (i, o, allowed) in case.pairs() {
            let [inputs, mut outputs] = case.tensors([gpu, gpu], 1, "");
            let mut shared = gpu.upload(&[1.0], [1]);
            let over = shared.view_mut();
            let mut input_views = views(&inputs);
            input_views[i] = over.alias();
            let mut output_views = views_mut(&mut outputs);
            output_views[o] = over;
            let result = (case.run)(gpu.stream(), input_views, output_views);
            if allowed {
                result.unwrap();
                continue;
            }
            let names = format!("{} and {}", case.inputs[i], case.outputs[o]);
            assert_error(result, kind!(Overlap), &[&names]);
            gpu.assert_untouched(&shared);
            outputs.iter().for_each(|t| gpu.assert_untouched(t));
        }
    }
}

/// An output that begins one column behind the input that it may lie on.
#[test]
fn outputs_do_not_lie_beside_their_inputs() {
    let gpu = &kit::devices()[0];
    for case in &CASES {
        for (i, o, _) in case.pairs().filter(|(.., allowed)| *allowed) {
            let [inputs, mut outputs] = case.tensors([gpu, gpu], 2, "");
            let mut shared = gpu.upload(&[1.0; 3], [3]);
            let whole = shared.view_mut();
            let mut input_views = views(&inputs);
            input_views[i] = whole.alias().slice(0, 0..2).unwrap();
            let mut output_views = views_mut(&mut outputs);
            output_views[o] = whole.slice(0, 1..3).unwrap();
            let result = (case.run)(gpu.stream(), input_views, output_views);
            let names = format!("{} and {}", case.inputs[i], case.outputs[o]);
            assert_error(result, kind!(Overlap), &[&names]);
            gpu.assert_untouched(&shared);
        }
    }
}

#[test]
fn every_tensor_is_on_the_device_of_the_stream() {
    let (gpu, other) = (Gpu::open("emu:gfx942"), Gpu::open("emu:gfx950"));
    for case in &CASES {
        for &name in case.inputs.iter().chain(case.outputs) {
            let [inputs, mut outputs] = case.tensors([&gpu, &other], 4, name);
            let result = (case.run)(gpu.stream(), views(&inputs), views_mut(&mut outputs));
            assert_error(result, kind!(DeviceMismatch), &[name, "emu:gfx942", "emu:gfx950"]);
        }
    }
}

/// Columns are next to each other in every tensor but the input of the padded forms.
#[test]
fn columns_that_are_apart_are_refused() {
    let gpu = &kit::devices()[0];
    let apart = || Place::new(Layout::with_strides([4], [2]).unwrap());
    for case in &CASES {
        for (i, &name) in case.inputs.iter().enumerate() {
            let [mut inputs, mut outputs] = case.tensors([gpu, gpu], 4, "");
            inputs[i] = gpu.upload(&[1.0; 4], apart());
            let result = (case.run)(gpu.stream(), views(&inputs), views_mut(&mut outputs));
            if case.strided == Some(name) {
                result.unwrap();
            } else {
                assert_error(result, kind!(Stride), &[name]);
                outputs.iter().for_each(|t| gpu.assert_untouched(t));
            }
        }
        // Here a row becomes a matrix only if its columns are next to each other.
        if case.strided.is_some() {
            continue;
        }
        for (o, &name) in case.outputs.iter().enumerate().filter(|(_, n)| !matches!(**n, "mean" | "rstd")) {
            let [inputs, mut outputs] = case.tensors([gpu, gpu], 4, "");
            outputs[o] = gpu.upload(&[1.0; 4], apart());
            let result = (case.run)(gpu.stream(), views(&inputs), views_mut(&mut outputs));
            assert_error(result, kind!(Stride), &[name]);
            outputs.iter().for_each(|t| gpu.assert_untouched(t));
        }
    }
}

/// What has one element a row is next to each other.
#[test]
fn values_of_rows_that_are_apart_are_refused() {
    let gpu = &kit::devices()[0];
    let (x, w) = (gpu.upload(&[1.0f32; 12], [3, 4]), gpu.upload(&[1.0f32; 4], [4]));
    let mut y = gpu.poisoned::<f32>([3, 4]);
    let mut apart = gpu.poisoned::<f32>(Place::new(Layout::with_strides([3], [2]).unwrap()));
    let options = RmsNormOptions::default();
    let (stream, none) = (gpu.stream(), LayerNormVectors::<f32>::default());
    let result = hk_norm::rmsnorm(stream, x.view(), w.view(), y.view_mut(), Some(apart.view_mut()), options);
    assert_error(result, kind!(Stride), &["rmsnorm: rstd"]);
    let result = hk_norm::layernorm(stream, x.view(), none, y.view_mut(), Some(apart.view_mut()), None, 1e-5);
    assert_error(result, kind!(Stride), &["layernorm: mean"]);
    let result = hk_norm::layernorm(stream, x.view(), none, y.view_mut(), None, Some(apart.view_mut()), 1e-5);
    assert_error(result, kind!(Stride), &["layernorm: rstd"]);
    gpu.assert_untouched(&y);
    gpu.assert_untouched(&apart);
}

/// The longest rows are of 2^29 - 1 columns; that there are none of them makes no difference.
#[test]
fn rows_that_are_too_long_are_refused() {
    let gpu = &kit::devices()[0];
    for case in &CASES {
        let [mut inputs, mut outputs] = case.tensors([gpu, gpu], 1, "");
        inputs[0] = gpu.upload(&[], [0, 1 << 29]);
        let result = (case.run)(gpu.stream(), views(&inputs), views_mut(&mut outputs));
        assert_error(result, kind!(TooLarge), &["x", "536870912 columns", "536870911"]);
    }
}
