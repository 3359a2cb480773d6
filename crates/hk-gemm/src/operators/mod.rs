//! The operators as data, for the `hk` program, the demo and the documentation.

mod a16w16;
mod a8w8;
mod choice;
mod deepgemm;
mod dual;
mod ff;
mod gmm;
mod quant_x;
mod quantized;

pub use choice::choices;

use choice::Describe;

use crate::gemm::plan::room_of;
use crate::reference;
use crate::reference::Sums;
use crate::{
    Activation, BlockShape, Determinism, FloatView, GemmConfig, GemmOptions, GemmProblem, GemmTile,
    GemmWeight, Precision, Prequant, gemm_workspace,
};
use hk_core::registry::{
    ArgSpec, Call, CallSpec, Described, HostCall, HostTensorF64, Inputs, Named, Operator, Outputs, Scalar,
    ScalarSpec, TensorSpec, Tolerance,
};
use hk_core::{DType, Element, Error, Result, Stream, TensorViewMut};

/// An operator, and how `hk inspect` describes its configurations, if it has any.
#[derive(Clone, Copy)]
struct Row {
    operator: Operator,
    problem: Option<Describe>,
}

impl Row {
    const fn new(operator: Operator, problem: Describe) -> Self {
        Self { operator, problem: Some(problem) }
    }

    const fn without_tiles(operator: Operator) -> Self {
        Self { operator, problem: None }
    }
}

const ROWS: &[&[Row]] = &[
    a16w16::ROWS,
    a8w8::ROWS,
    quantized::ROWS,
    quant_x::ROWS,
    dual::ROWS,
    deepgemm::ROWS,
    ff::ROWS,
    gmm::ROWS,
];

fn rows() -> impl Iterator<Item = &'static Row> {
    ROWS.iter().copied().flatten()
}

const COUNT: usize = {
    let (mut count, mut i) = (0, 0);
    while i < ROWS.len() {
        count += ROWS[i].len();
        i += 1;
    }
    count
};

/// The operators of this crate.
pub static OPERATORS: &[Operator] = &{
    let mut all = [ROWS[0][0].operator; COUNT];
    let (mut file, mut row, mut i) = (0, 0, 0);
    while i < COUNT {
        if row == ROWS[file].len() {
            (file, row) = (file + 1, 0);
        }
        all[i] = ROWS[file][row].operator;
        (row, i) = (row + 1, i + 1);
    }
    all
};

const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];

const fn y(rank: usize, shape: &'static str, terms: f64) -> ArgSpec {
    ArgSpec::output("y", Tolerance::Sum { terms }, FLOATS, rank, shape)
}

const BIAS: ArgSpec = ArgSpec::input("bias", FLOATS, 1, "[N]").optional();
const BATCHED_BIAS: ArgSpec = ArgSpec::input("bias", FLOATS, 2, "[batch, N]").ranks(2, 3).optional();

const Y_DTYPE: ScalarSpec = ScalarSpec {
    name: "y_dtype",
    default: Scalar::Choice("bf16"),
    choices: &["bf16", "f16", "f32"],
    summary: "type of y",
};
const ACTIVATION: ScalarSpec = ScalarSpec {
    name: "activation",
    default: Scalar::Choice("none"),
    choices: &["none", "silu", "gelu", "gelu_tanh", "relu", "tanh", "relu6"],
    summary: "function of the sum",
};
/// The choices of `tile`.
const TILE_NAMES: [&str; 1 + GemmTile::ALL.len()] = {
    let mut names = ["auto"; 1 + GemmTile::ALL.len()];
    let mut i = 0;
    while i < GemmTile::ALL.len() {
        names[i + 1] = GemmTile::ALL[i].name();
        i += 1;
    }
    names
};
const TILE: ScalarSpec = ScalarSpec {
    name: "tile",
    default: Scalar::Choice("auto"),
    choices: &TILE_NAMES,
    summary: "outputs of a block",
};
const SPLITS: ScalarSpec = ScalarSpec {
    name: "splits",
    default: Scalar::Int(1),
    choices: &[],
    summary: "split-K slices, if the tile is given",
};

const BATCH_INVARIANT: ScalarSpec = ScalarSpec {
    name: "batch_invariant",
    default: Scalar::Bool(false),
    choices: &[],
    summary: "a row of y is bitwise identical for every M and batch",
};
const SKIP_REDUCE: ScalarSpec = ScalarSpec {
    name: "skip_reduce",
    default: Scalar::Bool(false),
    choices: &[],
    summary: "y is f32 [splits, M, N], the partial sums of split-K slices",
};

const fn group(name: &'static str, summary: &'static str) -> ScalarSpec {
    ScalarSpec { name, default: Scalar::Int(128), choices: &[], summary }
}
const GROUP_N: ScalarSpec = group("group_n", "rows of w with one scale, a power of two");
const GROUP_K: ScalarSpec = group("group_k", "columns with one scale, a power of two");
const fn of_n(rows: i64) -> (&'static str, Scalar) {
    ("group_n", Scalar::Int(rows))
}
const fn of_k(columns: i64) -> (&'static str, Scalar) {
    ("group_k", Scalar::Int(columns))
}

/// Scalars of a case.
const fn tile(name: &'static str) -> (&'static str, Scalar) {
    ("tile", Scalar::Choice(name))
}
const fn splits(n: i64) -> (&'static str, Scalar) {
    ("splits", Scalar::Int(n))
}
const fn to(dtype: &'static str) -> (&'static str, Scalar) {
    ("y_dtype", Scalar::Choice(dtype))
}
const fn act(name: &'static str) -> (&'static str, Scalar) {
    ("activation", Scalar::Choice(name))
}

/// A case: `case!("label", a: Bf16 [16, 64], w: Bf16 [32, 64]; tile("16x16"))`.
macro_rules! case {
    ($label:expr, $($name:ident: $dtype:ident [$($n:expr),+]),+ $(; $($scalar:expr),+)?) => {
        hk_core::registry::Case {
            label: $label,
            tensors: &[$((stringify!($name), hk_core::DType::$dtype, &[$($n),+])),+],
            scalars: &[$($($scalar),+)?],
        }
    };
}
use case;

/// Squares, and the weights of Llama-3 8B for few and for many tokens; scales are one per row.
macro_rules! large {
    ($dtype:ident $(, $a_scale:ident, $w_scale:ident)?) => {
        large!(@ $dtype [$($a_scale $w_scale)?]
            1024 1024 1024,
            2048 2048 2048,
            4096 4096 4096,
            8192 8192 8192,
            1 6144 4096,
            1 28672 4096,
            1 4096 14336,
            16 6144 4096,
            16 28672 4096,
            16 4096 14336,
            32 6144 4096,
            32 28672 4096,
            32 4096 14336,
            64 6144 4096,
            64 28672 4096,
            64 4096 14336,
            128 6144 4096,
            128 28672 4096,
            128 4096 14336,
            256 6144 4096,
            256 28672 4096,
            256 4096 14336,
            512 6144 4096,
            512 28672 4096,
            512 4096 14336,
        )
    };
    (@ $dtype:ident $scales:tt $($m:literal $n:literal $k:literal,)+) => {
        [$(large!(@case $dtype $scales $m $n $k)),+]
    };
    (@case $dtype:ident [$($a_scale:ident $w_scale:ident)?] $m:literal $n:literal $k:literal) => {
        case!(
            concat!($m, " x ", $n, " x ", $k),
            a: $dtype [$m, $k], w: $dtype [$n, $k]
            $(, $a_scale: F32 [$m], $w_scale: F32 [$n])?
        )
    };
}
use large;

/// Runs `$body` with `$t` as the type of an input of 16-bit floats.
macro_rules! with_half {
    ($inputs:ident, $arg:literal, $t:ident => $body:expr) => {
        with_half!(@ $inputs, hk_core::registry::Described::dtype($inputs.get($arg)?), $arg, $t => $body)
    };
    (@ $inputs:ident, $dtype:expr, $arg:literal, $t:ident => $body:expr) => {
        match $dtype {
            hk_core::DType::Bf16 => {
                type $t = hk_core::bf16;
                $body
            }
            hk_core::DType::F16 => {
                type $t = hk_core::f16;
                $body
            }
            other => Err(hk_core::Error::dtype($inputs.operator().name, $arg, other, "bf16, f16")),
        }
    };
}
use with_half;

/// Runs `$body` with `$t` as the type of an input of int8 or fp8 codes.
macro_rules! with_codes {
    ($inputs:ident, $arg:literal, $t:ident => $body:expr) => {{
        let dtype = hk_core::registry::Described::dtype($inputs.get($arg)?);
        hk_core::with_quantized!($inputs.operator().name, $arg, dtype, $t => $body)
    }};
}
use with_codes;

/// A scalar `activation`, if the operator has one.
fn activation<V: Described>(call: &Call<V>) -> Option<Activation> {
    match call.choice("activation").unwrap_or("none") {
        "silu" => Some(Activation::Silu),
        "gelu" => Some(Activation::Gelu),
        "gelu_tanh" => Some(Activation::GeluTanh),
        "relu" => Some(Activation::Relu),
        "tanh" => Some(Activation::Tanh),
        "relu6" => Some(Activation::Relu6),
        _ => None,
    }
}

/// The options of a call.
fn options<V: Described>(call: &Call<V>) -> Result<GemmOptions> {
    let name = call.choice("tile")?;
    let tile = GemmTile::ALL.into_iter().find(|tile| tile.name() == name);
    // K is not split by operators without a workspace.
    let splits = call.int("splits").unwrap_or(1);
    let wrong = || Error::argument(call.operator().name, "splits", splits, "1 to 65535");
    let splits = u16::try_from(splits).map_err(|_| wrong())?.into();
    let config = tile.map(|tile| GemmConfig { tile, splits, group: 8 });
    let invariant = call.bool("batch_invariant").unwrap_or(false);
    let determinism = if invariant { Determinism::BatchInvariant } else { Determinism::SameCall };
    let skip_reduce = call.bool("skip_reduce").unwrap_or(false);
    if skip_reduce && config.is_none() && splits > 1 {
        // Where a slice ends follows from the tile.
        return Err(Error::argument(
            call.operator().name,
            "tile",
            "auto",
            "a tile, for skip_reduce with splits",
        ));
    }
    Ok(GemmOptions { activation: activation(call), config, skip_reduce, determinism })
}

/// The activations of a call, `a` or `x`: of fused GEMMs `a` is another tensor.
fn activations<V: Described>(call: &Call<V>) -> Result<&V> {
    call.optional("x").map_or_else(|| call.get("a"), Ok)
}

/// Columns of K in an element.
fn packed<V: Described>(tensor: &V) -> usize {
    if tensor.dtype() == DType::Fp4x2 { 2 } else { 1 }
}

/// Whether activations are quantized.
fn prequant<V: Described>(call: &Call<V>) -> Result<Prequant> {
    Ok(if call.bool("prequant")? { Prequant::Yes } else { Prequant::No })
}

/// Whether an output is added to.
fn accumulate<V: Described>(call: &Call<V>) -> Result<crate::Accumulate> {
    Ok(if call.bool("accumulate")? { crate::Accumulate::Add } else { crate::Accumulate::Overwrite })
}

/// The block shape of a call.
fn block_shape<V: Described>(call: &Call<V>) -> Result<BlockShape> {
    // A negative number becomes a large one, which is refused.
    let n = call.int("group_n").map_or(BlockShape::default().n, |n| n as usize);
    Ok(BlockShape { n, k: call.int("group_k")? as usize })
}

/// Batches, M, rows of w and K of a call.
fn sizes<V: Described>(call: &Call<V>) -> Result<[usize; 4]> {
    let (a, w) = (activations(call)?, call.get("w")?);
    let columns = |tensor: &V| tensor.shape().last().map_or(0, |n| n * packed(tensor));
    let k = columns(a);
    // Shuffled weights may be padded.
    let same_k = columns(w) == k || columns(w) > k && call.bool("w_shuffled").unwrap_or(false);
    match (a.shape(), w.shape()) {
        (&[m, _], &[n, _]) if same_k => Ok([1, m, n, k]),
        (&[batch, m, _], &[w_batch, n, _]) if batch == w_batch && same_k => Ok([batch, m, n, k]),
        // Rows that choose their matrix.
        (&[m, _], &[_, n, _]) if same_k && call.optional("m_group").is_some() => Ok([1, m, n, k]),
        (a, w) => Err(Error::shape(call.operator().name, "w", w, format!("batch and K of a, {a:?}"))),
    }
}

const W_SHUFFLED: ScalarSpec = ScalarSpec {
    name: "w_shuffled",
    default: Scalar::Bool(false),
    choices: &[],
    summary: "w is in the order of shuffle_weight",
};
const fn w_shuffled() -> (&'static str, Scalar) {
    ("w_shuffled", Scalar::Bool(true))
}

/// The weights of a call.
fn weight<'a, T: Element>(inputs: &Inputs<'a>) -> Result<GemmWeight<'a, T>> {
    weight_of(inputs, "w")
}

fn weight_of<'a, T: Element>(inputs: &Inputs<'a>, name: &'static str) -> Result<GemmWeight<'a, T>> {
    let view = inputs.view::<T>(name)?;
    Ok(if inputs.bool("w_shuffled")? { GemmWeight::Shuffled(view) } else { view.into() })
}

/// Their values, row by row.
fn weights(call: &HostCall) -> Result<Vec<f64>> {
    weights_of(call, "w")
}

fn weights_of(call: &HostCall, name: &'static str) -> Result<Vec<f64>> {
    let w = call.get(name)?;
    let values = w.to_f64();
    if !call.bool("w_shuffled")? {
        return Ok(values);
    }
    let w_k = w.shape().last().map_or(0, |n| n * packed(w));
    let a = call.optional("x_fp8").or(call.optional("x_fp4")).map_or_else(|| activations(call), Ok)?;
    let k = a.shape().last().map_or(0, |n| n * packed(a));
    let rows = reference::unshuffled(&values, w_k, 16 / w.dtype().size_bytes() * packed(w));
    // The padding is ignored.
    Ok(if w_k > k { rows.chunks(w_k).flat_map(|row| &row[..k]).copied().collect() } else { rows })
}

fn y_dtype<V: Described>(call: &Call<V>) -> Result<DType> {
    call.choice("y_dtype")?.parse()
}

fn y_spec(call: &CallSpec, gated: bool) -> Result<Named<TensorSpec>> {
    let [_, _, n, _] = sizes(call)?;
    let mut shape = activations(call)?.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = if gated { n / 2 } else { n };
    }
    let options = options(call)?;
    if options.skip_reduce {
        shape.insert(0, options.config.map_or(1, |config| config.splits));
    }
    Ok(vec![("y", TensorSpec::new(y_dtype(call)?, shape))])
}

fn y_outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    y_spec(call, false)
}

fn bias<'a>(inputs: &Inputs<'a>) -> Result<Option<FloatView<'a>>> {
    let Some(bias) = inputs.optional("bias") else { return Ok(None) };
    Ok(Some(match bias.dtype() {
        DType::Bf16 => FloatView::Bf16(inputs.view("bias")?),
        DType::F16 => FloatView::F16(inputs.view("bias")?),
        _ => FloatView::F32(inputs.view("bias")?),
    }))
}

/// Elements of the workspace of split-K slices that a call asks for, of batches, M and N, and of a second GEMM in its launch.
fn asked_slices<V: Described>(
    stream: &Stream,
    call: &Call<V>,
    options: &GemmOptions,
    sizes: [usize; 3],
    second: Option<usize>,
) -> Result<usize> {
    let info = stream.device().info();
    match options.config.map_or(0, |config| room_of(info, config, sizes, second)) {
        usize::MAX => {
            let what = format!("slices of {sizes:?} elements");
            Err(Error::too_large(call.operator().name, "workspace", what, usize::MAX as u64))
        }
        len => Ok(len),
    }
}

/// A workspace, if it is of use.
fn workspace<'a>(
    stream: &Stream,
    inputs: &Inputs,
    outputs_of: &mut Outputs<'a>,
    options: &GemmOptions,
    precision: Precision,
) -> Result<Option<TensorViewMut<'a, f32>>> {
    let [batch, m, n, k] = sizes(inputs)?;
    let len = match options.config {
        _ if options.skip_reduce => 0,
        Some(_) => asked_slices(stream, inputs, options, [batch, m, n], None)?,
        None => {
            let problem = GemmProblem::new(precision, m, n, k).batched(batch);
            gemm_workspace(stream.device().info(), &problem)
        }
    };
    if len == 0 { Ok(None) } else { outputs_of.workspace(stream, len).map(Some) }
}

fn optional_f64(call: &HostCall, name: &str) -> Vec<f64> {
    call.optional(name).map(|t| t.to_f64()).unwrap_or_default()
}

/// The reference's output: the sums with their bias and activation.
fn finished(call: &HostCall, sums: Sums) -> Result<Named<HostTensorF64>> {
    let [_, m, n, _] = sizes(call)?;
    let sums = sums.biased(&optional_f64(call, "bias"), [m, n]).activated(activation(call));
    as_y(call, sums, n)
}

fn as_y(call: &HostCall, sums: Sums, n: usize) -> Result<Named<HostTensorF64>> {
    let mut shape = activations(call)?.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = n;
    }
    Ok(vec![("y", HostTensorF64::new(shape, sums.values).with_magnitudes(sums.magnitudes))])
}
