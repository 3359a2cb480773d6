//! The operators as data, for the `hk` program, the demo and the documentation.

mod a16w16;
mod a8w8;

use crate::{Activation, GemmConfig, GemmOptions, GemmTile, Precision, gemm_workspace, reference};
use hk_core::registry::{
    ArgSpec, Call, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named, Operator, Outputs, Scalar,
    ScalarSpec, TensorSpec, Tolerance,
};
use hk_core::{DType, Element, Error, Float, Result, Stream, TensorView, TensorViewMut, bf16, f16};

/// The operators of this crate.
pub static OPERATORS: &[Operator] = &[
    a16w16::GEMM_A16W16,
    a16w16::GEMM_A16W16_ATOMIC,
    a16w16::GEMM_A16W16_GATED,
    a16w16::BATCHED_GEMM_BF16,
    a8w8::GEMM_A8W8,
    a8w8::GEMM_A8W8_PER_TOKEN_SCALE,
    a8w8::GEMM_A8W8_BLOCKSCALE,
    a8w8::BATCHED_GEMM_A8W8,
];

const HALVES: &[DType] = &[DType::Bf16, DType::F16];
const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];

/// `y` and `bias` of products with this many leading axes.
const fn y(rank: usize, shape: &'static str, terms: f64) -> ArgSpec {
    ArgSpec::output("y", Tolerance::Sum { terms }, FLOATS, rank, shape)
}

/// Errors of sums in f32, in terms of the magnitudes of what is added: of 16-bit floats, of int8, of fp8.
const TERMS_16: f64 = 1.0 / (1u64 << 18) as f64;
const TERMS_I8: f64 = 1.0 / (1u64 << 22) as f64;
const TERMS_8: f64 = 1.0 / (1u64 << 16) as f64;

const BIAS: ArgSpec = ArgSpec::input("bias", FLOATS, 1, "[N]").optional();

const Y_DTYPE: ScalarSpec = ScalarSpec {
    name: "y_dtype",
    default: Scalar::Choice("bf16"),
    choices: &["bf16", "f16", "f32"],
    summary: "type of y",
};
const ACTIVATION: ScalarSpec = ScalarSpec {
    name: "activation",
    default: Scalar::Choice("none"),
    choices: &["none", "silu", "gelu", "gelu_tanh", "relu", "tanh"],
    summary: "function of the sum",
};
const TILE: ScalarSpec = ScalarSpec {
    name: "tile",
    default: Scalar::Choice("auto"),
    choices: &[
        "auto", "256x256", "256x128", "128x128", "64x64", "elements", "16x16", "16x32", "32x32", "64x32",
    ],
    summary: "outputs of a block",
};
const SPLITS: ScalarSpec = ScalarSpec {
    name: "splits",
    default: Scalar::Int(1),
    choices: &[],
    summary: "parts of K, if the tile is given",
};

/// The options of a call.
fn options<V: Described>(call: &Call<V>, op: &'static str) -> Result<GemmOptions> {
    let activation = match call.choice("activation").unwrap_or("none") {
        "silu" => Some(Activation::Silu),
        "gelu" => Some(Activation::Gelu),
        "gelu_tanh" => Some(Activation::GeluTanh),
        "relu" => Some(Activation::Relu),
        "tanh" => Some(Activation::Tanh),
        _ => None,
    };
    let tile = match call.choice("tile")? {
        "256x256" => Some(GemmTile::T256x256),
        "256x128" => Some(GemmTile::T256x128),
        "128x128" => Some(GemmTile::T128x128),
        "64x64" => Some(GemmTile::T64x64),
        "elements" => Some(GemmTile::Elements),
        "16x16" => Some(GemmTile::S16x16),
        "16x32" => Some(GemmTile::S16x32),
        "32x32" => Some(GemmTile::S32x32),
        "64x32" => Some(GemmTile::S64x32),
        _ => None,
    };
    let splits = call.int("splits")?;
    let splits =
        usize::try_from(splits).map_err(|_| Error::argument(op, "splits", splits, "a number from 1 on"))?;
    Ok(GemmOptions { activation, config: tile.map(|tile| GemmConfig { tile, splits, group: 8 }) })
}

/// The spec of `y`, `[.., M, N]`.
fn y_spec<V: Described>(call: &Call<V>, gated: bool) -> Result<Vec<(&'static str, TensorSpec)>> {
    let (a, w) = (call.get("a")?.shape(), call.get("w")?.shape());
    let dtype = call.choice("y_dtype")?.parse()?;
    let mut shape = a.to_vec();
    let n = w.iter().rev().nth(1).copied().unwrap_or(0);
    if let Some(last) = shape.last_mut() {
        *last = if gated { n / 2 } else { n };
    }
    Ok(vec![("y", TensorSpec::new(dtype, shape))])
}

/// A workspace, if it is of use.
fn workspace<'a>(
    stream: &Stream,
    inputs: &Inputs,
    outputs: &mut Outputs<'a>,
    options: &GemmOptions,
    precision: Precision,
) -> Result<Option<TensorViewMut<'a, f32>>> {
    let shapes = (inputs.get("a")?.shape(), inputs.get("w")?.shape());
    let [batch, m, n, k] = match shapes {
        (&[m, k], &[n, _]) => [1, m, n, k],
        (&[batch, m, k], &[_, n, _]) => [batch, m, n, k],
        _ => return Ok(None),
    };
    let len = match options.config {
        Some(config) if config.splits > 1 => config.splits.saturating_mul(batch * m * n),
        Some(_) => 0,
        None => gemm_workspace(stream.device().info(), precision, [batch, m, n, k]),
    };
    if len == 0 { Ok(None) } else { outputs.workspace(stream, len).map(Some) }
}

/// The reference's outputs: the sums with their bias and activation.
fn finished<V: Described>(call: &Call<V>, op: &'static str, mut sums: reference::Sums, bias: &[f64], shape: Vec<usize>) -> Result<HostTensorF64> {
    let n = shape.last().copied().unwrap_or(1).max(1);
    let activation = options(call, op)?.activation;
    for (i, (value, magnitude)) in sums.values.iter_mut().zip(&mut sums.magnitudes).enumerate() {
        let bias = bias.get(i % n).copied().unwrap_or(0.0);
        *value = reference::activate(activation, *value + bias);
        *magnitude = reference::STEEPEST * (*magnitude + bias.abs());
    }
    Ok(HostTensorF64 { shape, values: sums.values, magnitudes: sums.magnitudes })
}
