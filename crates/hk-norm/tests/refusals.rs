//! Errors of each tensor of every operator: overlaps, other devices, strided columns, rows that are too long.

use hk_core::{Result, Stream};
use hk_norm::{
    FusedAddLayerNormOutputs, FusedAddRmsNormOutputs, FusedAddRmsNormPadOutputs, LayerNormOptions,
    LayerNormOutputs, LayerNormWeights, RmsNormOptions, RmsNormOutputs, RmsNormPadOptions,
};
use hk_testkit::{Refusals, Tensors, kind};

/// An operator on tensors of f32, by name: `x` of inputs, `y` of outputs and the like are `[rows, cols]`, weights `[cols]`,
/// `mean` and `rstd` `[rows]`.
struct Case {
    inputs: &'static [&'static str],
    outputs: &'static [&'static str],
    /// Which output may alias which input exactly.
    aliases: &'static [(&'static str, &'static str)],
    /// The input with any column stride.
    strided: Option<&'static str>,
    run: fn(&Stream, &mut Tensors) -> Result<()>,
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
        run: |stream, tensors| {
            let (x, weight) = (tensors.input::<f32>("x"), tensors.input::<f32>("weight"));
            let outputs = RmsNormOutputs { y: tensors.output("y"), rstd: Some(tensors.output("rstd")) };
            hk_norm::rmsnorm(stream, x, weight, outputs, RmsNormOptions::default())
        },
    },
    Case {
        inputs: &["x", "residual_in", "weight"],
        outputs: &["y", "residual_out", "rstd"],
        aliases: RESIDUAL,
        strided: None,
        run: |stream, tensors| {
            let (x, residual) = (tensors.input::<f32>("x"), tensors.input("residual_in"));
            let outputs = FusedAddRmsNormOutputs {
                y: tensors.output("y"),
                residual_out: tensors.output("residual_out"),
                rstd: Some(tensors.output("rstd")),
            };
            let weight = tensors.input::<f32>("weight");
            hk_norm::fused_add_rmsnorm(stream, x, residual, weight, outputs, RmsNormOptions::default())
        },
    },
    Case {
        inputs: &["x", "weight", "bias", "x_bias"],
        outputs: &["y", "mean", "rstd"],
        aliases: IN_PLACE,
        strided: None,
        run: |stream, tensors| {
            let outputs = LayerNormOutputs {
                y: tensors.output("y"),
                mean: Some(tensors.output("mean")),
                rstd: Some(tensors.output("rstd")),
            };
            let (x, weights) = (tensors.input("x"), weights(tensors));
            hk_norm::layernorm(stream, x, weights, outputs, LayerNormOptions::default())
        },
    },
    Case {
        inputs: &["x", "residual_in", "weight", "bias", "x_bias"],
        outputs: &["y", "residual_out", "mean", "rstd"],
        aliases: RESIDUAL,
        strided: None,
        run: |stream, tensors| {
            let outputs = FusedAddLayerNormOutputs {
                y: tensors.output("y"),
                residual_out: tensors.output("residual_out"),
                mean: Some(tensors.output("mean")),
                rstd: Some(tensors.output("rstd")),
            };
            let (x, residual, weights) = (tensors.input("x"), tensors.input("residual_in"), weights(tensors));
            let options = LayerNormOptions::default();
            hk_norm::fused_add_layernorm(stream, x, residual, weights, outputs, options)
        },
    },
    Case {
        inputs: &["x", "weight"],
        outputs: &["y"],
        aliases: &[],
        strided: Some("x"),
        run: |stream, tensors| {
            let (x, weight) = (tensors.input::<f32>("x"), tensors.input::<f32>("weight"));
            let options = RmsNormPadOptions::default();
            hk_norm::rmsnorm_pad(stream, x, weight, tensors.output("y"), options)
        },
    },
    Case {
        inputs: &["x", "residual_in", "weight"],
        outputs: &["y", "residual_out"],
        aliases: &[("x", "residual_out"), ("residual_in", "residual_out")],
        strided: Some("x"),
        run: |stream, tensors| {
            let (x, residual) = (tensors.input::<f32>("x"), tensors.input("residual_in"));
            let outputs = FusedAddRmsNormPadOutputs {
                y: tensors.output("y"),
                residual_out: tensors.output("residual_out"),
            };
            let (weight, options) = (tensors.input::<f32>("weight"), RmsNormPadOptions::default());
            hk_norm::fused_add_rmsnorm_pad(stream, x, residual, weight, outputs, options)
        },
    },
];

fn weights<'a>(tensors: &Tensors<'a>) -> LayerNormWeights<'a, f32> {
    LayerNormWeights {
        weight: Some(tensors.input("weight")),
        bias: Some(tensors.input("bias")),
        x_bias: Some(tensors.input("x_bias")),
    }
}

impl Case {
    /// The table of one row of `cols`.
    fn table(&self, cols: usize) -> Refusals<'static, ()> {
        let run = self.run;
        let mut table =
            Refusals::new((), move |stream: &Stream, tensors: &mut Tensors, ()| run(stream, tensors));
        for name in self.inputs {
            table = match *name {
                "x" | "residual_in" => table.input::<f32>(name, [1, cols]),
                _ => table.input::<f32>(name, [cols]),
            };
        }
        for name in self.outputs {
            table = match *name {
                "mean" | "rstd" => table.output::<f32>(name, [1]),
                _ => table.output::<f32>(name, [1, cols]),
            };
        }
        table.accepts(|_| {})
    }
}

/// Rows of one element, so that every output can alias every input: permitted aliases pass, others are errors.
#[test]
fn outputs_alias_only_the_permitted_inputs() {
    for case in &CASES {
        let mut table = case.table(1);
        for &input in case.inputs {
            for &output in case.outputs {
                table = if case.aliases.contains(&(input, output)) {
                    table.accepts(|call| call.overlap(input, output, 0))
                } else {
                    let names = format!("{input} and {output}");
                    table.refuses(kind!(Overlap), &[&names], |call| call.overlap(input, output, 0))
                };
            }
        }
    }
}

/// An output that begins one column behind an input, also one that it may alias.
#[test]
fn partial_overlaps_are_refused() {
    for case in &CASES {
        case.table(2).refuses_overlaps();
    }
}

#[test]
fn every_tensor_is_on_the_device_of_the_stream() {
    for case in &CASES {
        case.table(4).refuses_other_devices();
    }
}

/// Columns have unit stride in every tensor, except the input of the padded forms.
#[test]
fn strided_columns_are_refused() {
    for case in &CASES {
        let mut table = case.table(4);
        for &name in case.inputs.iter().chain(case.outputs) {
            table = match name {
                _ if case.strided == Some(name) => table.accepts(|call| call.strides(name, [8, 2])),
                // One element has no stride.
                "mean" | "rstd" => table,
                "weight" | "bias" | "x_bias" => {
                    table.refuses(kind!(Stride), &[name], |call| call.strides(name, [2]))
                }
                _ => table.refuses(kind!(Stride), &[name], |call| call.strides(name, [8, 2])),
            };
        }
    }
}

/// Rows have at most 2^29 - 1 columns, even in tensors without rows.
#[test]
fn rows_that_are_too_long_are_refused() {
    for case in &CASES {
        let parts = ["x", "536870912 columns", "536870911"];
        let _ = case.table(1).refuses(kind!(TooLarge), &parts, |call| call.shape("x", [0, 1 << 29]));
    }
}
