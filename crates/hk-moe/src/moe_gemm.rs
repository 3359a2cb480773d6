//! The expert GEMMs over ragged gates, and those by mxfp4: `moe_op_gemm_*`, `moe_op_mxfp4*`.

use crate::experts::{
    ExpertEpilogue, ExpertGate, ExpertGemm, ExpertInputs, ExpertRows, ExpertScales, ExpertTile, RaggedRows,
    SortedRows,
};
use crate::moe_op::{NAMES, plain, run, silu_fused};
use hk_core::{Element, Error, Float, Fp4x2, Result, Stream, TensorViewMut};
use hk_gemm::Int8OrFp8;

/// The GEMM of each place's row with its expert's matrix, of `i8` or fp8 with scales of rows, or of mxfp8:
/// `y[p] = gammas[p] gate(a_scale[row(p)] w_scale[e(p)] (a[row(p)] w[e(p)]^T) + bias[e(p)])`.
///
/// | arg                   | shape                    | dtype                  | layout                                        |
/// |-----------------------|--------------------------|------------------------|-----------------------------------------------|
/// | `inputs.a`            | `[T, K]` or `[G, K]`     | `i8`, fp8              | unit stride on `K`, rows on 16 bytes          |
/// | `inputs.w`            | `[E, N, K]`              | as `a`                 | the same, or shuffled                         |
/// | `inputs.scales`       | [`ExpertScales::Rows`], [`ExpertScales::Mx`] | `f32`, `e8m0` |                                        |
/// | `inputs.bias`         | `[E, N]`                 | `bf16`, `f16`, `f32`   | optional, contiguous                          |
/// | `inputs.weights`      | `[G]`, `gammas` by place | `bf16`, `f16`, `f32`   | optional, contiguous                          |
/// | `rows`                | see [`RaggedRows`]       | `i32`                  | contiguous                                    |
/// | `y`                   | `[G, N]`, gated `[G, N / 2]` | `bf16`, `f16`, `f32` | unit stride on `N`, any row stride          |
///
/// Rows of `y` are in the order of the places, as [`moe_sum`](crate::moe_sum()) takes them with `places`. Sums in `f32` (of `i8` in
/// `i32`), rounded once; with a `gate` there is no rounding ahead of it. Places in no expert's rows are left as they are. A row of `y` has
/// the same bits whether `a` is gathered or comes gathered. What the lists say is checked on the device: rows that do not exist are
/// skipped.
///
/// One launch. Returns when it is queued. No gates or columns: nothing is launched.
///
/// # Errors
/// As [`moe_op`](crate::moe_op()); [`Argument`](Error::Argument) for other scales.
///
/// Source: AITER, operator moe_op_gemm_a8w8.
pub fn moe_op_gemm_a8w8<C: Int8OrFp8, Y: Float>(
    stream: &Stream,
    inputs: ExpertInputs<C, C>,
    rows: RaggedRows,
    gate: Option<ExpertGate>,
    y: TensorViewMut<Y>,
    tile: Option<ExpertTile>,
) -> Result<()> {
    const OP: &str = "moe_op_gemm_a8w8";
    let fits = |s: &ExpertScales| matches!(s, ExpertScales::Rows { .. } | ExpertScales::Mx { .. });
    expect(OP, "ExpertScales::Rows or ExpertScales::Mx", &inputs.scales, fits)?;
    ragged(stream, OP, inputs, rows, gate, y, tile)
}

/// [`moe_op_gemm_a8w8`](moe_op_gemm_a8w8()) with [`ExpertScales::Blocks`]: each 128 columns of `a` and `w` are scaled as they are summed.
///
/// # Errors
/// As [`moe_op_gemm_a8w8`](moe_op_gemm_a8w8()).
///
/// Source: AITER, operator moe_op_gemm_a8w8_blockscale.
pub fn moe_op_gemm_a8w8_blockscale<C: Int8OrFp8, Y: Float>(
    stream: &Stream,
    inputs: ExpertInputs<C, C>,
    rows: RaggedRows,
    gate: Option<ExpertGate>,
    y: TensorViewMut<Y>,
    tile: Option<ExpertTile>,
) -> Result<()> {
    const OP: &str = "moe_op_gemm_a8w8_blockscale";
    expect(OP, "ExpertScales::Blocks", &inputs.scales, |s| matches!(s, ExpertScales::Blocks { .. }))?;
    ragged(stream, OP, inputs, rows, gate, y, tile)
}

/// [`moe_op_gemm_a8w8`](moe_op_gemm_a8w8()) of fp8 by mxfp4, with [`ExpertScales::Mx`]: e8m0 scales of `w`, and e8m0 scales or f32
/// scales of rows of `a`. Without a block-scaled instruction (gfx942, sm_90) both become bf16, exactly unless a scaled value leaves the range
/// of bf16.
///
/// # Errors
/// As [`moe_op_gemm_a8w8`](moe_op_gemm_a8w8()); [`Shape`](Error::Shape) for a `K` that 32 does not divide.
///
/// Source: AITER, operator moe_op_gemm_a8w4.
pub fn moe_op_gemm_a8w4<A: Int8OrFp8, Y: Float>(
    stream: &Stream,
    inputs: ExpertInputs<A, Fp4x2>,
    rows: RaggedRows,
    gate: Option<ExpertGate>,
    y: TensorViewMut<Y>,
    tile: Option<ExpertTile>,
) -> Result<()> {
    const OP: &str = "moe_op_gemm_a8w4";
    expect(OP, "ExpertScales::Mx", &inputs.scales, |s| matches!(s, ExpertScales::Mx { .. }))?;
    ragged(stream, OP, inputs, rows, gate, y, tile)
}

/// [`moe_op_gemm_a8w4`](moe_op_gemm_a8w4()) of mxfp4 by mxfp4.
///
/// # Errors
/// As [`moe_op_gemm_a8w4`](moe_op_gemm_a8w4()).
///
/// Source: AITER, operator moe_op_gemm_a4w4.
pub fn moe_op_gemm_a4w4<Y: Float>(
    stream: &Stream,
    inputs: ExpertInputs<Fp4x2, Fp4x2>,
    rows: RaggedRows,
    gate: Option<ExpertGate>,
    y: TensorViewMut<Y>,
    tile: Option<ExpertTile>,
) -> Result<()> {
    const OP: &str = "moe_op_gemm_a4w4";
    expect(OP, "ExpertScales::Mx", &inputs.scales, |s| matches!(s, ExpertScales::Mx { .. }))?;
    ragged(stream, OP, inputs, rows, gate, y, tile)
}

/// [`moe_op`](crate::moe_op()) by mxfp4 weights, with [`ExpertScales::Mx`]: `a` is mxfp4, fp8, `bf16` or `f16`.
///
/// # Errors
/// As [`moe_op_gemm_a8w4`](moe_op_gemm_a8w4()).
///
/// Source: AITER, operator moe_op_mxfp4.
pub fn moe_op_mxfp4<A: Element, Y: Float>(
    stream: &Stream,
    inputs: ExpertInputs<A, Fp4x2>,
    rows: SortedRows,
    y: TensorViewMut<Y>,
    tile: Option<ExpertTile>,
) -> Result<()> {
    run(stream, "moe_op_mxfp4", inputs, rows, plain(false), y, tile)
}

/// [`moe_op_silu_fused`](crate::moe_op_silu_fused()) by mxfp4 weights, as [`moe_op_mxfp4`](moe_op_mxfp4()).
///
/// # Errors
/// As [`moe_op_mxfp4`](moe_op_mxfp4()).
///
/// Source: AITER, operator moe_op_mxfp4_silu_fused.
pub fn moe_op_mxfp4_silu_fused<A: Element, Y: Float>(
    stream: &Stream,
    inputs: ExpertInputs<A, Fp4x2>,
    rows: SortedRows,
    y: TensorViewMut<Y>,
    tile: Option<ExpertTile>,
) -> Result<()> {
    run(stream, "moe_op_mxfp4_silu_fused", inputs, rows, silu_fused(Y::DTYPE), y, tile)
}

fn expect(
    op: &'static str,
    want: &str,
    scales: &ExpertScales,
    fits: fn(&ExpertScales) -> bool,
) -> Result<()> {
    if fits(scales) { Ok(()) } else { Err(Error::argument(op, "scales", format!("{scales:?}"), want)) }
}

/// The epilogue over ragged rows.
pub(crate) const fn gated(gate: Option<ExpertGate>) -> ExpertEpilogue {
    ExpertEpilogue { gate, activation: None, weight_first: false, round: None }
}

fn ragged<A: Element, W: Element, Y: Float>(
    stream: &Stream,
    op: &'static str,
    inputs: ExpertInputs<A, W>,
    rows: RaggedRows,
    gate: Option<ExpertGate>,
    y: TensorViewMut<Y>,
    tile: Option<ExpertTile>,
) -> Result<()> {
    let names = ["a", "w", "gammas", NAMES[3]];
    let epilogue = gated(gate);
    ExpertGemm { op, names, inputs, rows: ExpertRows::Ragged(rows), epilogue, tile, keep: false }
        .run(stream, y)
}
