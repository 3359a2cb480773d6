//! The expert GEMMs over sorted gates: `moe_op`, `moe_op_gelu`, `moe_op_silu_fused`.

use crate::experts::{
    ExpertEpilogue, ExpertGate, ExpertGemm, ExpertInputs, ExpertRows, ExpertTile, GateOrder, MaskedRows,
    SortedRows,
};
use hk_core::{DType, Element, Float, Result, Stream, TensorViewMut};
use hk_gemm::Activation;

pub(crate) const NAMES: [&str; 4] = ["a", "w", "topk_weights", "y"];

/// The GEMM of each gate with its expert's matrix: `y[g] = topk_weights[g] scales (a[row(g)] w[e(g)]^T) + bias[e(g)]`.
///
/// | arg                   | shape                     | dtype                      | layout                                     |
/// |-----------------------|---------------------------|----------------------------|--------------------------------------------|
/// | `inputs.a`            | `[T, K]` or `[T k, K]`    | `bf16`, `f16`, `i8`, fp8   | unit stride on `K`, rows on 16 bytes       |
/// | `inputs.w`            | `[E, N, K]`               | as `a`                     | the same, or shuffled                      |
/// | `inputs.scales`       | see [`ExpertScales`](crate::ExpertScales) | `f32`      |                                            |
/// | `inputs.bias`         | `[E, N]`                  | `bf16`, `f16`, `f32`       | optional, contiguous                       |
/// | `inputs.weights`      | `[T, k]`, `topk_weights`  | `bf16`, `f16`, `f32`       | optional, contiguous                       |
/// | `rows`                | see [`SortedRows`]        | `i32`                      | contiguous                                 |
/// | `y`                   | `[T k, N]`                | `bf16`, `f16`, `f32`       | unit stride on `N`, any row stride         |
///
/// Gate `g = t k + j` is choice `j` of token `t`; with `T` rows in `a` row `g / k` is its own, with `T k` rows row `g`. The weight
/// multiplies the sum before scales and bias; all in `f32` (sums of `i8` in `i32`), rounded once. Rows of gates that the map of
/// experts leaves out become zero, and with [`SortedRows::topk_ids`] those of ids outside the experts, too. A row of `y` has the same bits
/// wherever its gate is listed. What the lists say is checked on the device: a gate or an expert that does not exist is skipped; a gate
/// that is listed twice is written twice.
///
/// One launch. Returns when it is queued. No gates or columns: nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks the table, rows of `a` or `w` are not
/// multiples of 16 bytes, or scales do not fit; [`Argument`](hk_core::Error::Argument) for scales that the types do not have, a list tile other than
/// 16, 32, 64, 128 or 256 rows, a `tile` that does not fit it; [`Unsupported`](hk_core::Error::Unsupported) for types without a kernel and fp8 of
/// the other target; [`TooLarge`](hk_core::Error::TooLarge) for `a`, or a matrix of `w`, of 2 GiB or more;
/// [`Overlap`](hk_core::Error::Overlap), [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is
/// written then.
///
/// Source: AITER, operator moe_op.
pub fn moe_op<A: Element, W: Element, Y: Float>(
    stream: &Stream,
    inputs: ExpertInputs<A, W>,
    rows: SortedRows,
    y: TensorViewMut<Y>,
    tile: Option<ExpertTile>,
) -> Result<()> {
    run(stream, "moe_op", inputs, rows, plain(false), y, tile)
}

/// [`moe_op`](moe_op()) with tanh's GELU after scales and bias. `gelu`: whether it is applied; by default only without
/// `topk_weights`.
///
/// # Errors
/// As [`moe_op`](moe_op()).
///
/// Source: AITER, operator moe_op_gelu.
pub fn moe_op_gelu<A: Element, W: Element, Y: Float>(
    stream: &Stream,
    inputs: ExpertInputs<A, W>,
    rows: SortedRows,
    y: TensorViewMut<Y>,
    gelu: Option<bool>,
    tile: Option<ExpertTile>,
) -> Result<()> {
    let epilogue = plain(gelu.unwrap_or(inputs.weights.is_none()));
    run(stream, "moe_op_gelu", inputs, rows, epilogue, y, tile)
}

/// [`moe_op`](moe_op()) with gated outputs: the first half of the rows of `w` `[E, 2 N, K]` are gates, the others values, and
/// `y = silu(gate) * value`, both rounded to the type of `y` before it. The weight multiplies both.
///
/// # Errors
/// As [`moe_op`](moe_op()), [`Shape`](hk_core::Error::Shape) for an odd number of rows.
///
/// Source: AITER, operator moe_op_silu_fused.
pub fn moe_op_silu_fused<A: Element, W: Element, Y: Float>(
    stream: &Stream,
    inputs: ExpertInputs<A, W>,
    rows: SortedRows,
    y: TensorViewMut<Y>,
    tile: Option<ExpertTile>,
) -> Result<()> {
    run(stream, "moe_op_silu_fused", inputs, rows, silu_fused(Y::DTYPE), y, tile)
}

/// [`moe_op`](moe_op()) of rows that are dispatched by expert: `y[e, r] = scales (a[e, r] w[e]^T) + bias[e]` for the first `counts[e]`
/// rows of each expert, or `gate` of it. Other rows are neither read nor written. `a` is `[E, rows, K]`, `y` `[E, rows, N]`; scales of rows
/// of `a` are `[E rows]`, of blocks `[E, rows, groups of K]`.
///
/// # Errors
/// As [`moe_op`](moe_op()).
pub fn moe_op_masked<A: Element, W: Element, Y: Float>(
    stream: &Stream,
    inputs: ExpertInputs<A, W>,
    rows: MaskedRows,
    y: TensorViewMut<Y>,
    gate: Option<ExpertGate>,
    tile: Option<ExpertTile>,
) -> Result<()> {
    let epilogue = ExpertEpilogue { gate, activation: None, weight_first: true, round: None };
    let rows = ExpertRows::Masked(rows);
    ExpertGemm { op: "moe_op_masked", names: NAMES, inputs, rows, epilogue, tile, keep: false }.run(stream, y)
}

/// The epilogue of `moe_op` and, with GELU, of `moe_op_gelu`.
pub(crate) const fn plain(gelu: bool) -> ExpertEpilogue {
    let activation = if gelu { Some(Activation::GeluTanh) } else { None };
    ExpertEpilogue { gate: None, activation, weight_first: true, round: None }
}

/// The epilogue of `moe_op_silu_fused`.
pub(crate) const fn silu_fused(round: DType) -> ExpertEpilogue {
    let gate = Some(ExpertGate::silu(GateOrder::Halves));
    ExpertEpilogue { gate, activation: None, weight_first: true, round: Some(round) }
}

pub(crate) fn run<A: Element, W: Element, Y: Float>(
    stream: &Stream,
    op: &'static str,
    inputs: ExpertInputs<A, W>,
    rows: SortedRows,
    epilogue: ExpertEpilogue,
    y: TensorViewMut<Y>,
    tile: Option<ExpertTile>,
) -> Result<()> {
    ExpertGemm { op, names: NAMES, inputs, rows: ExpertRows::Sorted(rows), epilogue, tile, keep: false }
        .run(stream, y)
}
