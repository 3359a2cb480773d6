//! Grouped GEMMs of experts: `hip/experts*.hip`. The descriptor, its checks, the launch.

mod table;

pub use table::ExpertTile;

use crate::args::{MOST_EXPERTS, MOST_GATES, Vector};
use crate::kernels::experts::{Groups, Output, Params, Rows};
use crate::kernels::gemm::{BlockScale, Grid, MxScale, Operand};
use crate::kernels::hk::RowLayout;
use bytemuck::Zeroable;
use hk_core::plan::rows::float_index;
use hk_core::{
    Arch, DType, E8M0, Element, Error, Float, Launch, LaunchConfig, NamedOperand, Result, Stream, TensorView,
    TensorViewMut, check_aliases,
};
use hk_gemm::{Activation, BlockShape, FloatView, GemmWeight, MxScaleView};
use table::{LoopScales, TileKernel};

/// What a window of a kernel reaches, in bytes.
const WINDOW: usize = 1 << 31;
/// Columns whose int8 sums fit an i32.
const LONGEST_I8: usize = 1 << 17;
/// `gemm::Epilogue::kNone` and `experts::kNone` of the kernels.
const NO_ACTIVATION: u32 = 255;
/// Blocks of 16 x 32 that a CU holds, of eight waves; on sm_90 of four.
const fn blocks_per_cu(arch: Arch) -> usize {
    if arch.is_amd() { 2 } else { 4 }
}
/// Rows of a block of shuffled weights, bytes of a row's chunk.
const SHUFFLED: (usize, usize) = (16, 16);

/// Gates sorted by expert and padded to tiles, as [`moe_align_block_size`](crate::moe_align_block_size()) writes them. `y` has a row for
/// each gate; gates `t k ..` are of row `t` of `a`, or each gate has its own row of `a`.
#[derive(Debug, Clone, Copy)]
pub struct SortedRows<'a> {
    /// `[EM]`.
    pub sorted_token_ids: TensorView<'a, i32>,
    /// `[ceil(EM / block_size)]` or more. Rows of a tile whose expert is outside `w`'s become zero.
    pub expert_ids: TensorView<'a, i32>,
    /// `[1]`.
    pub num_tokens_post_padded: TensorView<'a, i32>,
    /// Slots of a list tile: 16, 32, 64, 128 or 256.
    pub block_size: usize,
    /// `[T, k]`: the ids that were sorted, of `0..E` with `E` given, so that rows of gates without an expert become zero; without it
    /// those rows are left as they are.
    pub topk_ids: Option<(TensorView<'a, i32>, usize)>,
}

/// Gates sorted by expert without padding, as [`moe_routing`](crate::moe_routing()) writes them. `y` has a row for each place.
#[derive(Debug, Clone, Copy)]
pub struct RaggedRows<'a> {
    /// `[G]`: the gate of each place, whose row of `a` is `gate / (G / rows of a)`; without it `a` has the order of the places.
    pub gather_indx: Option<TensorView<'a, i32>>,
    /// `[E + 1]`.
    pub token_offs_raw: TensorView<'a, i32>,
    /// `[tiles]`.
    pub block_pid_map: TensorView<'a, i32>,
    /// Rows of a list tile: 16, 32, 64, 128 or 256.
    pub block_m: usize,
    /// `[all experts]`: the matrix of `w` of each expert, negative for those that `w` lacks, whose rows are left as they are.
    /// Without: `w` has all experts.
    pub expert_map: Option<TensorView<'a, i32>>,
}

/// As many rows for each expert, of which the first are computed: `a` is `[E, rows, K]`, `y` `[E, rows, N]`.
#[derive(Debug, Clone, Copy)]
pub struct MaskedRows<'a> {
    /// `[E]`: rows of each expert; values outside `0..=rows` are clamped.
    pub counts: TensorView<'a, i32>,
}

/// Which rows an expert GEMM computes, and by which experts.
#[derive(Debug, Clone, Copy)]
pub enum ExpertRows<'a> {
    /// Of [`moe_align_block_size`](crate::moe_align_block_size()).
    Sorted(SortedRows<'a>),
    /// Of [`moe_routing`](crate::moe_routing()).
    Ragged(RaggedRows<'a>),
    /// Dispatched by expert.
    Masked(MaskedRows<'a>),
    /// All rows of `a`, by the one matrix of `w`.
    All {
        /// Rows of a tile at most: 16, 32, 64, 128 or 256.
        block: usize,
    },
}

/// The scales of an expert GEMM's operands.
#[derive(Debug, Clone, Copy)]
pub enum ExpertScales<'a> {
    /// None.
    None,
    /// f32 for rows.
    Rows {
        /// One for each row of `a`, or `[1]`; `None` for 16-bit activations.
        a: Option<TensorView<'a, f32>>,
        /// `[E, rows of w]`, or `[E]`, or `[1]`.
        w: TensorView<'a, f32>,
    },
    /// f32 for blocks: `a` `[groups of rows, groups of K]`, `w` `[E, groups of rows, groups of K]`, any strides.
    Blocks {
        /// Of `a`.
        a: TensorView<'a, f32>,
        /// Rows of `a` that share a scale, a power of two.
        a_rows: usize,
        /// Of `w`.
        w: TensorView<'a, f32>,
        /// Rows of `w` and columns that share a scale: powers of two, at least 16 rows and 128 columns.
        group: BlockShape,
    },
    /// Of unsigned weights (`u8`) of 16-bit activations, `(q - zero) scale`, one for `group` columns of each row.
    Groups {
        /// 8, or 4: two columns in a byte, the even one in the low half.
        bits: u32,
        /// Columns that share a scale: a power of two, at least 32.
        group: usize,
        /// `[E, N, groups]`, contiguous, of the type of `a` or f32.
        scale: FloatView<'a>,
        /// `[E, N, groups]`; of 4 bits `[E, N / 2, groups]`, the even row in the low half. Without: 128, of 4 bits 8.
        zero: Option<TensorView<'a, u8>>,
    },
    /// e8m0 for 32 columns of each row: of mxfp4 weights and of mxfp4 or fp8 activations, none of 16-bit activations; or of fp8
    /// weights and activations.
    Mx {
        /// Of `a` `[rows, K / 32]`, or shuffled; with fp8 optional.
        a: Option<MxScaleView<'a>>,
        /// Of `w` `[E, N, K / 32]`, or shuffled.
        w: MxScaleView<'a>,
        /// f32, one for each row of `a`, or `[1]`.
        a_rows: Option<TensorView<'a, f32>>,
        /// f32 `[E, N]`, `[E]` or `[1]`.
        w_rows: Option<TensorView<'a, f32>>,
    },
}

impl<'a> ExpertScales<'a> {
    /// Scales of whole rows: of `a`, of `w`.
    fn rows(&self) -> [Option<TensorView<'a, f32>>; 2] {
        match *self {
            Self::Rows { a, w } => [a, Some(w)],
            Self::Mx { a_rows, w_rows, .. } => [a_rows, w_rows],
            _ => [None, None],
        }
    }

    fn mx(&self) -> [Option<MxScaleView<'a>>; 2] {
        match *self {
            Self::Mx { a, w, .. } => [a, Some(w)],
            _ => [None, None],
        }
    }

    /// Elements of K in one of `w`.
    fn w_packed(&self, w: DType) -> usize {
        if matches!(self, Self::Groups { bits: 4, .. }) { 2 } else { packed(w) }
    }
}

/// Where the gates and values of a gated expert GEMM are among the rows of `w`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateOrder {
    /// All gates, then all values.
    Halves,
    /// A gate and its value are neighbours.
    Pairs,
}

/// A gated output, `activation(min(g, limit)) (clamp(v, -limit, limit) + add)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertGate {
    /// Order of the rows of `w`.
    pub order: GateOrder,
    /// Function of the gate.
    pub activation: Activation,
    /// SiLU's slope: `x / (1 + e^(-alpha x))`. Other functions take 1.
    pub alpha: f32,
    /// Bound of gate and value.
    pub limit: Option<f32>,
    /// Added to the value.
    pub add: f32,
}

impl ExpertGate {
    /// `silu(gate) * value`.
    pub const fn silu(order: GateOrder) -> Self {
        Self { order, activation: Activation::Silu, alpha: 1.0, limit: None, add: 0.0 }
    }

    /// The SwiGLU of GPT-OSS: alpha 1.702, limit 7, value + 1, in pairs.
    pub const fn swiglu_oai() -> Self {
        let silu = Self::silu(GateOrder::Pairs);
        Self { alpha: 1.702, limit: Some(7.0), add: 1.0, ..silu }
    }
}

/// Operands of an expert GEMM.
#[derive(Debug, Clone, Copy)]
pub struct ExpertInputs<'a, A: Element, W: Element> {
    /// `[rows, K]`; masked `[E, rows, K]`.
    pub a: TensorView<'a, A>,
    /// `[E, rows, K]`.
    pub w: GemmWeight<'a, W>,
    /// Of both.
    pub scales: ExpertScales<'a>,
    /// `[E, rows of w]`, contiguous: added after the scales.
    pub bias: Option<FloatView<'a>>,
    /// One for each gate: its weight.
    pub weights: Option<FloatView<'a>>,
}

impl<'a, A: Element, W: Element> ExpertInputs<'a, A, W> {
    /// Operands without scales, bias and weights.
    pub fn new(a: TensorView<'a, A>, w: impl Into<GemmWeight<'a, W>>) -> Self {
        Self { a, w: w.into(), scales: ExpertScales::None, bias: None, weights: None }
    }
}

/// The epilogue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpertEpilogue {
    pub gate: Option<ExpertGate>,
    /// Of outputs that are not gated.
    pub activation: Option<Activation>,
    /// The weight of the gate multiplies the sum, before scales, bias and activation; otherwise the output.
    pub weight_first: bool,
    /// Type to which gate and value are rounded before the activation.
    pub round: Option<DType>,
}

/// An expert GEMM.
pub(crate) struct ExpertGemm<'a, A: Element, W: Element> {
    pub op: &'static str,
    /// Names of the inputs `a`, `w`, `weights`, `y`.
    pub names: [&'static str; 4],
    pub inputs: ExpertInputs<'a, A, W>,
    pub rows: ExpertRows<'a>,
    pub epilogue: ExpertEpilogue,
    pub tile: Option<ExpertTile>,
    /// Rows of sorted gates whose tile has no expert are left as they are, not zeroed.
    pub keep: bool,
}

/// Runs `$body` for the view.
macro_rules! each_float {
    ($view:expr, $v:ident => $body:expr) => {
        match $view {
            FloatView::Bf16($v) => $body,
            FloatView::F16($v) => $body,
            FloatView::F32($v) => $body,
        }
    };
}
pub(crate) use each_float;

fn float_operand<'v>(view: &'v FloatView) -> &'v dyn hk_core::Operand {
    each_float!(view, v => v)
}

fn float_type(view: &FloatView) -> u32 {
    let dtype = match view {
        FloatView::Bf16(_) => DType::Bf16,
        FloatView::F16(_) => DType::F16,
        FloatView::F32(_) => DType::F32,
    };
    float_index(dtype) as u32
}

pub(crate) fn float_address<'l, 'a: 'l>(
    launch: &mut Launch<'l>,
    arg: &'static str,
    view: &Option<FloatView<'a>>,
) -> Result<u64> {
    let Some(view) = view else { return Ok(0) };
    each_float!(view, v => launch.input_address(arg, v))
}

/// Elements of K in one of a tensor.
const fn packed(dtype: DType) -> usize {
    if matches!(dtype, DType::Fp4x2) { 2 } else { 1 }
}

fn w_view<'v, 'a, W: Element>(w: &'v GemmWeight<'a, W>) -> &'v TensorView<'a, W> {
    match w {
        GemmWeight::Rows(view) | GemmWeight::Shuffled(view) => view,
    }
}

/// Sizes of a call.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    experts: usize,
    /// Rows of `a`, of each expert if masked.
    a_rows: usize,
    /// Rows of `y`, of each expert if masked.
    gates: usize,
    w_rows: usize,
    /// Columns of `y`.
    cols: usize,
    k: usize,
}

impl<'a, A: Element, W: Element> ExpertGemm<'a, A, W> {
    fn masked(&self) -> bool {
        matches!(self.rows, ExpertRows::Masked(_))
    }

    fn sizes<Y: Float>(&self, y: &TensorViewMut<Y>) -> Result<Sizes> {
        let (op, [a_name, w_name, _, y_name]) = (self.op, self.names);
        let (a, w) = (&self.inputs.a, w_view(&self.inputs.w));
        let [experts, w_rows, w_cols] = w.dims(op, w_name)?;
        let (lead, a_rows, a_cols) = if self.masked() {
            let [lead, rows, cols] = a.dims(op, a_name)?;
            (Some(lead), rows, cols)
        } else {
            let [rows, cols] = a.dims(op, a_name)?;
            (None, rows, cols)
        };
        if !(1..=MOST_EXPERTS).contains(&experts) {
            let want = format!("[1 to {MOST_EXPERTS}, N, K] (experts)");
            return Err(Error::shape(op, w_name, w.shape(), want));
        }
        let k = a_cols.saturating_mul(packed(A::DTYPE));
        let w_packed = self.inputs.scales.w_packed(W::DTYPE);
        if w_cols.saturating_mul(w_packed) != k {
            let cols = k / w_packed;
            return Err(Error::shape(op, w_name, w.shape(), format!("[E, N, {cols}] (K of {a_name})")));
        }
        if matches!(self.rows, ExpertRows::All { .. }) && experts != 1 {
            return Err(Error::shape(op, w_name, w.shape(), "[1, N, K] (for all rows)"));
        }
        if lead.is_some_and(|lead| lead != experts) {
            return Err(Error::shape(
                op,
                a_name,
                a.shape(),
                format!("[{experts}, rows, K] (experts of {w_name})"),
            ));
        }
        if k == 0 {
            return Err(Error::empty(op, a_name, a.shape().len() - 1, a.shape()));
        }
        let cols = match self.epilogue.gate {
            None => w_rows,
            Some(_) if w_rows % 2 == 0 => w_rows / 2,
            Some(_) => {
                return Err(Error::shape(op, w_name, w.shape(), "an even number of rows: gates and values"));
            }
        };
        let gates = if lead.is_some() {
            y.expect_shape(op, y_name, [experts, a_rows, cols])?;
            a_rows
        } else {
            let [gates, y_cols] = y.dims(op, y_name)?;
            if y_cols != cols {
                return Err(Error::shape(op, y_name, y.shape(), format!("[G, {cols}] (rows of {w_name})")));
            }
            if a_rows == 0 && gates > 0 || a_rows > 0 && !gates.is_multiple_of(a_rows) {
                let want = format!("[G, {cols}], G a multiple of {a_rows} (rows of {a_name})");
                return Err(Error::shape(op, y_name, y.shape(), want));
            }
            gates
        };
        for (arg, n) in [(y_name, gates), (a_name, a_rows), (w_name, w_rows), (a_name, k)] {
            if n > MOST_GATES {
                return Err(Error::too_large(op, arg, format!("an axis of {n}"), MOST_GATES as u64));
            }
        }
        Ok(Sizes { experts, a_rows, gates, w_rows, cols, k })
    }

    /// Layout of the operands: 16-byte rows that a window reaches.
    fn check_operands(&self, sizes: &Sizes, arch: Arch) -> Result<()> {
        let (op, [a_name, w_name, ..]) = (self.op, self.names);
        expect_encoding(op, A::DTYPE, arch)?;
        expect_encoding(op, W::DTYPE, arch)?;
        if A::DTYPE == DType::I8 && sizes.k > LONGEST_I8 {
            let want = format!("at most {LONGEST_I8}, so that sums fit i32");
            return Err(Error::argument(op, a_name, format!("{} columns", sizes.k), want));
        }
        let (a, w) = (&self.inputs.a, w_view(&self.inputs.w));
        let rows_on_16 =
            |arg: &'static str, shape: &[usize], strides: &[usize], element: usize, rows: usize| {
                let last = shape.len() - 1;
                if !(shape[last] * element).is_multiple_of(16) {
                    let want = format!("rows of a multiple of 16 bytes ({} elements)", 16 / element);
                    return Err(Error::shape(op, arg, shape, want));
                }
                let stride = if rows > 1 { strides[last - 1] } else { 0 };
                // With room for the rows of a tile past the last.
                let reach =
                    stride.saturating_mul(rows + 256).saturating_add(shape[last]).saturating_mul(element);
                if reach >= WINDOW {
                    return Err(Error::too_large(op, arg, format!("{reach} bytes of rows"), WINDOW as u64));
                }
                Ok(())
            };
        a.expect_unit_stride(op, a_name)?;
        rows_on_16(a_name, a.shape(), a.strides(), size_of::<A>(), sizes.a_rows)?;
        rows_on_16(w_name, w.shape(), w.strides(), size_of::<W>(), sizes.w_rows)?;
        for (arg, aligned, addr) in
            [(a_name, a.rows_aligned(16), a.addr()), (w_name, w.rows_aligned(16), w.addr())]
        {
            if !aligned {
                return Err(Error::Align { op, arg, addr, want: 16 });
            }
        }
        match &self.inputs.w {
            GemmWeight::Rows(w) => w.expect_unit_stride(op, w_name),
            GemmWeight::Shuffled(w) => {
                w.expect_contiguous(op, w_name)?;
                if !sizes.w_rows.is_multiple_of(SHUFFLED.0) || !w.shape()[2].is_multiple_of(32) {
                    let want = "[E, N, K], N a multiple of 16, K of 32 (shuffled)";
                    return Err(Error::shape(op, w_name, w.shape(), want));
                }
                Ok(())
            }
        }
    }

    /// Checks f32 scales of whole rows.
    fn check_row_scales(&self, sizes: &Sizes) -> Result<()> {
        let op = self.op;
        let [a, w] = self.inputs.scales.rows();
        if let Some(a) = a {
            let rows = sizes.a_rows * if self.masked() { sizes.experts } else { 1 };
            if a.numel() != 1 && a.numel() != rows {
                return Err(Error::shape(op, "a_scale", a.shape(), format!("[{rows}] (rows of a) or [1]")));
            }
            a.expect_packed(op, "a_scale")?;
        }
        if let Some(w) = w {
            let [experts, w_rows] = [sizes.experts, sizes.w_rows];
            let fits = match w.shape() {
                &[e] | &[e, 1] => e == experts || e == 1,
                shape => shape == [experts, w_rows] || shape == [experts, w_rows, 1],
            };
            if !fits {
                let want = format!("[{experts}, {w_rows}], [{experts}] or [1] (experts, rows of w)");
                return Err(Error::shape(op, "w_scale", w.shape(), want));
            }
            w.expect_packed(op, "w_scale")?;
        }
        Ok(())
    }

    fn check_scales(&self, sizes: &Sizes) -> Result<LoopScales> {
        let op = self.op;
        let half = |dtype: DType| matches!(dtype, DType::Bf16 | DType::F16);
        let (a_type, w_type) = (A::DTYPE, W::DTYPE);
        let refuse = |arg, got: &str| {
            Err(Error::argument(
                op,
                arg,
                got,
                format!("the scales of {a_type} by {w_type}, see ExpertScales"),
            ))
        };
        self.check_row_scales(sizes)?;
        match &self.inputs.scales {
            ExpertScales::None if half(w_type) => Ok(LoopScales::None),
            ExpertScales::None => refuse("scales", "none"),
            ExpertScales::Rows { a, .. } => match (w_type, a) {
                (DType::I8 | DType::Fp8E4M3 | DType::Fp8E4M3Fnuz, a) if a.is_none() == half(a_type) => {
                    Ok(LoopScales::None)
                }
                (DType::I8 | DType::Fp8E4M3 | DType::Fp8E4M3Fnuz, None) => refuse("a_scale", "none"),
                (DType::I8 | DType::Fp8E4M3 | DType::Fp8E4M3Fnuz, Some(_)) => refuse("a_scale", "given"),
                _ => refuse("scales", "scales of rows"),
            },
            ExpertScales::Blocks { a, a_rows, w, group } => {
                if half(w_type) || a_type != w_type || a_type == DType::Fp4x2 {
                    return refuse("scales", "scales of blocks");
                }
                for (arg, n, least) in
                    [("a_rows", *a_rows, 1), ("group.n", group.n, 16), ("group.k", group.k, 128)]
                {
                    if !n.is_power_of_two() || n < least || n > MOST_GATES {
                        return Err(Error::argument(op, arg, n, format!("a power of two, {least} or more")));
                    }
                }
                let groups = sizes.k.div_ceil(group.k);
                let mut want = vec![sizes.a_rows.div_ceil(*a_rows), groups];
                if self.masked() {
                    want.insert(0, sizes.experts);
                }
                let of_w = vec![sizes.experts, sizes.w_rows.div_ceil(group.n), groups];
                for (arg, view, want) in [("a_scale", a, want), ("w_scale", w, of_w)] {
                    view.expect_shape(op, arg, &want)?;
                    view.expect_aligned(op, arg, 4)?;
                    expect_spread(op, arg, view.shape(), view.strides(), WINDOW / 4)?;
                }
                Ok(LoopScales::Blocks)
            }
            ExpertScales::Groups { bits, group, scale, zero } => {
                if !half(a_type) || w_type != DType::U8 {
                    return refuse("scales", "scales of groups");
                }
                if !matches!(bits, 4 | 8) {
                    return Err(Error::argument(op, "bits", bits, "4 or 8"));
                }
                if !group.is_power_of_two() || *group < 32 || *group > MOST_GATES {
                    return Err(Error::argument(op, "group", group, "a power of two, 32 or more"));
                }
                if !sizes.k.is_multiple_of(*group) {
                    let want = format!("K a multiple of {group} (columns of a group)");
                    return Err(Error::shape(op, self.names[0], self.inputs.a.shape(), want));
                }
                let same = match scale {
                    FloatView::Bf16(_) => a_type == DType::Bf16,
                    FloatView::F16(_) => a_type == DType::F16,
                    FloatView::F32(_) => true,
                };
                if !same {
                    return Err(Error::argument(op, "w_scale", "16-bit floats of the other type", a_type));
                }
                let groups = sizes.k / group;
                each_float!(scale, v => {
                    v.expect_shape(op, "w_scale", [sizes.experts, sizes.w_rows, groups])?;
                    v.expect_packed(op, "w_scale")?;
                });
                if let Some(zero) = zero {
                    if *bits == 4 && !sizes.w_rows.is_multiple_of(2) {
                        return Err(Error::shape(op, "w_zero", zero.shape(), "an even number of rows of w"));
                    }
                    let rows = if *bits == 4 { sizes.w_rows / 2 } else { sizes.w_rows };
                    zero.expect_shape(op, "w_zero", [sizes.experts, rows, groups])?;
                    zero.expect_packed(op, "w_zero")?;
                }
                if sizes.w_rows.saturating_mul(groups) >= WINDOW / 8 {
                    return Err(Error::too_large(
                        op,
                        "w_scale",
                        format!("{groups} groups"),
                        (WINDOW / 8) as u64,
                    ));
                }
                Ok(if *bits == 4 { LoopScales::Groups4 } else { LoopScales::Groups8 })
            }
            ExpertScales::Mx { a, w, .. } => {
                let fits = match (a_type, w_type) {
                    (DType::Fp4x2, DType::Fp4x2) => a.is_some(),
                    (DType::Fp8E4M3 | DType::Fp8E4M3Fnuz, DType::Fp4x2) => true,
                    (DType::Bf16 | DType::F16, DType::Fp4x2) => a.is_none(),
                    (DType::Fp8E4M3 | DType::Fp8E4M3Fnuz, w) => a.is_some() && w == a_type,
                    _ => false,
                };
                if !fits {
                    return refuse("scales", if a.is_some() { "e8m0 of both" } else { "e8m0 of w" });
                }
                if !sizes.k.is_multiple_of(32) {
                    let want = "K a multiple of 32";
                    return Err(Error::shape(op, self.names[0], self.inputs.a.shape(), want));
                }
                let lead = self.masked().then_some(sizes.experts);
                if let Some(a) = a {
                    check_mx(op, "a_mx", a, lead, [sizes.a_rows, sizes.k / 32])?;
                }
                check_mx(op, "w_mx", w, Some(sizes.experts), [sizes.w_rows, sizes.k / 32])?;
                Ok(if a.is_some() { LoopScales::Mx } else { LoopScales::MxWeights })
            }
        }
    }

    /// Checks the lists; returns their tiles, and rows of a tile.
    fn check_rows(&self, sizes: &Sizes) -> Result<(usize, usize)> {
        let op = self.op;
        let block_of = |arg, block: usize| {
            if (16..=256).contains(&block) && block.is_power_of_two() {
                return Ok(());
            }
            Err(Error::argument(op, arg, block, "16, 32, 64, 128 or 256"))
        };
        let longer = |arg, view: &TensorView<i32>, least: usize, of: &str| {
            let [len] = view.dims(op, arg)?;
            if len < least {
                return Err(Error::shape(op, arg, [len], format!("[{least}] or longer ({of})")));
            }
            if len > MOST_GATES {
                return Err(Error::too_large(op, arg, format!("{len} elements"), MOST_GATES as u64));
            }
            view.expect_packed(op, arg)?;
            Ok(len)
        };
        match &self.rows {
            ExpertRows::Sorted(rows) => {
                block_of("block_size", rows.block_size)?;
                let len = longer(
                    "sorted_token_ids",
                    &rows.sorted_token_ids,
                    sizes.gates.next_multiple_of(rows.block_size),
                    "tiles of gates",
                )?;
                let whole = len.div_ceil(rows.block_size);
                longer("expert_ids", &rows.expert_ids, whole, "tiles of sorted_token_ids")?;
                rows.num_tokens_post_padded.expect_vector(op, "num_tokens_post_padded", 1, "one number")?;
                if let Some((ids, _)) = &rows.topk_ids {
                    if ids.numel() != sizes.gates {
                        let want = format!("{} ids (rows of y)", sizes.gates);
                        return Err(Error::shape(op, "topk_ids", ids.shape(), want));
                    }
                    ids.expect_packed(op, "topk_ids")?;
                }
                // Each tile has a gate; a list that ends within a tile has no more.
                Ok(((len / rows.block_size).min(sizes.gates), rows.block_size))
            }
            ExpertRows::Ragged(rows) => {
                block_of("block_m", rows.block_m)?;
                if let Some(gather) = &rows.gather_indx {
                    gather.expect_vector(op, "gather_indx", sizes.gates, "rows of y")?;
                } else if sizes.a_rows != sizes.gates {
                    let want = format!("{} rows (rows of y), without gather_indx", sizes.gates);
                    return Err(Error::shape(op, self.names[0], self.inputs.a.shape(), want));
                }
                let experts = rows.expert_map.map_or(sizes.experts, |map| map.numel());
                if !(1..=MOST_EXPERTS).contains(&experts) {
                    let want = format!("1 to {MOST_EXPERTS} experts");
                    return Err(Error::argument(op, "expert_map", experts, want));
                }
                if let Some(map) = &rows.expert_map {
                    map.expect_vector(op, "expert_map", experts, "experts")?;
                }
                rows.token_offs_raw.expect_vector(op, "token_offs_raw", experts + 1, "experts, and one")?;
                let tiles = longer("block_pid_map", &rows.block_pid_map, 0, "tiles")?;
                Ok((tiles.min(sizes.gates), rows.block_m))
            }
            ExpertRows::Masked(rows) => {
                rows.counts.expect_vector(op, "counts", sizes.experts, "experts of w")?;
                Ok((0, sizes.gates.next_power_of_two().clamp(16, 256)))
            }
            ExpertRows::All { block } => {
                block_of("block", *block)?;
                Ok((0, *block))
            }
        }
    }

    fn check_others(&self, sizes: &Sizes) -> Result<()> {
        let op = self.op;
        if let Some(bias) = &self.inputs.bias {
            let want = [sizes.experts, sizes.w_rows];
            each_float!(bias, v => {
                v.expect_shape(op, "bias", want)?;
                v.expect_packed(op, "bias")?;
            });
        }
        if let Some(weights) = &self.inputs.weights {
            let arg = self.names[2];
            if self.masked() {
                return Err(Error::argument(op, arg, "given", "none, for rows dispatched by expert"));
            }
            each_float!(weights, v => {
                if v.numel() != sizes.gates {
                    let want = format!("{} weights (rows of y)", sizes.gates);
                    return Err(Error::shape(op, arg, v.shape(), want));
                }
                v.expect_packed(op, arg)?;
            });
        }
        if let Some(gate) = &self.epilogue.gate {
            if gate.alpha != 1.0 && gate.activation != Activation::Silu {
                let want = format!("1, for {:?}", gate.activation);
                return Err(Error::argument(op, "alpha", gate.alpha, want));
            }
            if gate.limit.is_some_and(|limit| limit.is_nan() || limit < 0.0) {
                return Err(Error::argument(
                    op,
                    "limit",
                    gate.limit.unwrap_or_default(),
                    "0 or more, or none",
                ));
            }
        }
        Ok(())
    }

    fn check_aliases<Y: Float>(&self, y: &TensorViewMut<Y>) -> Result<()> {
        let [a_name, w_name, weights_name, y_name] = self.names;
        let ExpertInputs { a, w, scales, bias, weights } = &self.inputs;
        let mut inputs: Vec<NamedOperand> = vec![(a_name, Some(a)), (w_name, Some(w_view(w)))];
        let rows = scales.rows();
        let mx = scales.mx();
        inputs.extend([
            ("a_scale", rows[0].as_ref().map(|a| a as _)),
            ("w_scale", rows[1].as_ref().map(|w| w as _)),
            ("a_mx", mx[0].as_ref().map(|a| mx_view(a) as _)),
            ("w_mx", mx[1].as_ref().map(|w| mx_view(w) as _)),
        ]);
        match scales {
            ExpertScales::Blocks { a, w, .. } => {
                inputs.extend([("a_scale", Some(a as _)), ("w_scale", Some(w as _))]);
            }
            ExpertScales::Groups { scale, zero, .. } => inputs
                .extend([("w_scale", Some(float_operand(scale))), ("w_zero", zero.as_ref().map(|z| z as _))]),
            _ => {}
        }
        inputs.extend([
            ("bias", bias.as_ref().map(float_operand)),
            (weights_name, weights.as_ref().map(float_operand)),
        ]);
        match &self.rows {
            ExpertRows::Sorted(rows) => inputs.extend([
                ("sorted_token_ids", Some(&rows.sorted_token_ids as _)),
                ("expert_ids", Some(&rows.expert_ids as _)),
                ("num_tokens_post_padded", Some(&rows.num_tokens_post_padded as _)),
                ("topk_ids", rows.topk_ids.as_ref().map(|(ids, _)| ids as _)),
            ]),
            ExpertRows::Ragged(rows) => inputs.extend([
                ("gather_indx", rows.gather_indx.as_ref().map(|g| g as _)),
                ("token_offs_raw", Some(&rows.token_offs_raw as _)),
                ("block_pid_map", Some(&rows.block_pid_map as _)),
                ("expert_map", rows.expert_map.as_ref().map(|map| map as _)),
            ]),
            ExpertRows::Masked(rows) => inputs.push(("counts", Some(&rows.counts as _))),
            ExpertRows::All { .. } => {}
        }
        check_aliases(self.op, &inputs, &[((y_name, Some(y)), &[])])
    }

    /// Rows of an expert, of those that the lists know.
    fn mean_rows(&self, sizes: &Sizes) -> usize {
        match &self.rows {
            ExpertRows::Masked(_) | ExpertRows::All { .. } => sizes.gates,
            ExpertRows::Sorted(_) => sizes.gates / sizes.experts.max(1),
            ExpertRows::Ragged(rows) => sizes.gates / (rows.token_offs_raw.numel().max(2) - 1),
        }
    }

    /// Checks everything, and queues the kernel.
    pub fn run<Y: Float>(self, stream: &Stream, mut y: TensorViewMut<Y>) -> Result<()> {
        let (op, [a_name, w_name, weights_name, y_name]) = (self.op, self.names);
        let sizes = self.sizes(&y)?;
        let info = stream.device().info();
        self.check_operands(&sizes, info.arch)?;
        let scales = self.check_scales(&sizes)?;
        let (list_tiles, block) = self.check_rows(&sizes)?;
        self.check_others(&sizes)?;
        y.expect_unit_stride(op, y_name)?;
        y.expect_aligned(op, y_name, size_of::<Y>() as u64)?;
        self.check_aliases(&y)?;
        let Some(kernels) = table::kernels(A::DTYPE, W::DTYPE, scales) else {
            let what = format!("{} by {} with {scales:?} scales", A::DTYPE, W::DTYPE);
            return Err(Error::unsupported(op, what, "no kernel has these operands"));
        };
        let m_tiles = |m: usize| match self.rows {
            ExpertRows::Masked(_) | ExpertRows::All { .. } => sizes.experts * sizes.gates.div_ceil(m),
            _ => list_tiles * (block / m),
        };
        let chosen = match self.tile {
            None => {
                let floats = matches!(A::DTYPE, DType::Bf16 | DType::F16) && A::DTYPE == W::DTYPE;
                let warpgroups = floats || A::DTYPE == DType::I8 && scales == LoopScales::None;
                let two_rounds = m_tiles(128).saturating_mul(sizes.w_rows.div_ceil(256))
                    >= 2 * info.compute_units as usize;
                let mean = self.mean_rows(&sizes);
                table::choose(kernels, info.arch, warpgroups && two_rounds, block, mean)
            }
            Some(tile) => kernels.iter().find(|row| row.tile == tile && tile.shape().0 <= block),
        };
        let Some(&TileKernel { tile, kernel, packed }) = chosen else {
            let tiles: Vec<_> =
                kernels.iter().map(|row| row.tile).filter(|tile| tile.shape().0 <= block).collect();
            let got = self.tile.map_or("auto".into(), |tile| format!("{tile:?}"));
            return Err(Error::argument(
                op,
                "tile",
                got,
                format!("one of {tiles:?}, for list tiles of {block} rows"),
            ));
        };
        if sizes.gates == 0 || sizes.cols == 0 {
            return Ok(());
        }
        let (m, n) = tile.shape();
        let m_tiles = m_tiles(m);
        let n_tiles = sizes.w_rows.div_ceil(n);
        let blocks = m_tiles.saturating_mul(n_tiles);
        if blocks > MOST_GATES {
            return Err(Error::too_large(op, y_name, format!("{blocks} tiles"), MOST_GATES as u64));
        }
        if blocks == 0 {
            return Ok(());
        }

        let mut launch = stream.launch(op);
        let (a, w) = (self.inputs.a, w_view(&self.inputs.w));
        let mut params = Params::zeroed();
        params.a = operand(launch.input_address(a_name, &a)?, a.shape(), a.strides(), size_of::<A>(), false);
        let shuffled = matches!(self.inputs.w, GemmWeight::Shuffled(_));
        params.w =
            operand(launch.input_address(w_name, w)?, w.shape(), w.strides(), size_of::<W>(), shuffled);
        params.grid = Grid {
            m_tiles: m_tiles as u32,
            n_tiles: n_tiles as u32,
            group: (2048 / m) as u32,
            splits: 1,
            split_bytes: row_bytes::<A>(sizes.k),
            k_bytes: row_bytes::<A>(sizes.k),
            blocks: blocks as u32,
            tile_n: 0,
        };
        let mut out = self.output(&sizes);
        out.y = launch.output_address(y_name, &mut y)?;
        let strides = y.strides();
        out.y_row = if sizes.gates > 1 { strides[strides.len() - 2] as i64 } else { 0 };
        out.y_batch = if self.masked() && sizes.experts > 1 { strides[0] as i64 } else { 0 };
        out.y_type = float_index(Y::DTYPE) as u32;
        out.vectors = y.rows_aligned(16).into();
        out.bias = float_address(&mut launch, "bias", &self.inputs.bias)?;
        if let [a, Some(w)] = self.inputs.scales.rows() {
            out.w_rows = launch.input_address("w_scale", &w)?;
            let each = w.numel() / if w.shape()[0] == sizes.experts { sizes.experts } else { 1 };
            out.w_rows_step = (each > 1).into();
            out.w_rows_batch = if w.shape()[0] == sizes.experts { each as i64 } else { 0 };
            if let Some(a) = a {
                out.a_rows = launch.input_address("a_scale", &a)?;
                out.a_rows_step = (a.numel() > 1).into();
            }
        } else if let [Some(a), None] = self.inputs.scales.rows() {
            out.a_rows = launch.input_address("a_scale", &a)?;
            out.a_rows_step = (a.numel() > 1).into();
        }
        match &self.inputs.scales {
            ExpertScales::Blocks { a, a_rows, w, group } => {
                let columns = group.k * size_of::<A>();
                let address = launch.input_address("a_scale", a)?;
                params.a_scale = block_scale(address, a.shape(), a.strides(), *a_rows, columns);
                let address = launch.input_address("w_scale", w)?;
                params.w_scale = block_scale(address, w.shape(), w.strides(), group.n, columns);
            }
            ExpertScales::Groups { bits, group, scale, zero } => {
                let groups = sizes.k / group;
                let zero_rows = if *bits == 4 { sizes.w_rows / 2 } else { sizes.w_rows };
                params.groups = Groups {
                    scale: float_address(&mut launch, "w_scale", &Some(*scale))?,
                    zero: zero.as_ref().map_or(Ok(0), |z| launch.input_address("w_zero", z))?,
                    scale_batch: (sizes.w_rows * groups) as i64,
                    zero_batch: (zero_rows * groups) as i64,
                    scale_row: groups as u32,
                    zero_row: groups as u32,
                    scale_type: float_type(scale),
                    shift: (group * *bits as usize / 8).trailing_zeros(),
                    middle: 1 << (bits - 1),
                    pad: 0,
                };
            }
            ExpertScales::Mx { a, w, .. } => {
                if let Some(a) = a {
                    params.a_mx =
                        mx_scale(launch.input_address("a_mx", mx_view(a))?, a, sizes.k / 32, self.masked());
                }
                params.w_mx = mx_scale(launch.input_address("w_mx", mx_view(w))?, w, sizes.k / 32, true);
            }
            ExpertScales::None | ExpertScales::Rows { .. } => {}
        }
        params.out = out;
        let weights = float_address(&mut launch, weights_name, &self.inputs.weights)?;
        let per_token = if self.masked() { 1 } else { (sizes.gates / sizes.a_rows) as u32 };
        let mut rows = Rows {
            weights,
            weight_type: self.inputs.weights.as_ref().map_or(0, float_type),
            experts: sizes.experts as u32,
            gates: sizes.gates as u32,
            per_token,
            per_token_inverse: u32::MAX / per_token,
            tile_log2: block.trailing_zeros(),
            list_tiles: list_tiles as u32,
            tiles_of_expert: sizes.gates.div_ceil(m) as u32,
            ..Rows::zeroed()
        };
        match &self.rows {
            ExpertRows::Sorted(lists) => {
                rows.map = 0;
                rows.keep = self.keep.into();
                rows.list = launch.input_address("sorted_token_ids", &lists.sorted_token_ids)?;
                rows.tiles = launch.input_address("expert_ids", &lists.expert_ids)?;
                rows.ends = launch.input_address("num_tokens_post_padded", &lists.num_tokens_post_padded)?;
                if let Some((ids, experts)) = &lists.topk_ids {
                    rows.ids = launch.input_address("topk_ids", ids)?;
                    rows.all_experts = (*experts).min(u32::MAX as usize) as u32;
                }
            }
            ExpertRows::Ragged(lists) => {
                rows.map = 1;
                if let Some(gather) = &lists.gather_indx {
                    rows.list = launch.input_address("gather_indx", gather)?;
                }
                rows.tiles = launch.input_address("block_pid_map", &lists.block_pid_map)?;
                rows.ends = launch.input_address("token_offs_raw", &lists.token_offs_raw)?;
                rows.all_experts = sizes.experts as u32;
                if let Some(map) = &lists.expert_map {
                    rows.expert_map = launch.input_address("expert_map", map)?;
                    rows.all_experts = map.numel() as u32;
                }
            }
            ExpertRows::Masked(lists) => {
                rows.map = 2;
                rows.tiles = launch.input_address("counts", &lists.counts)?;
            }
            // As masked rows, without counts.
            ExpertRows::All { .. } => rows.map = 2,
        }
        params.rows = rows;
        // Blocks of the smallest tile are persistent.
        let most = if tile == ExpertTile::T16x32 {
            blocks_per_cu(info.arch) * info.compute_units as usize
        } else {
            blocks
        };
        let launched = blocks.min(most.max(1));
        let words = self.inputs.scales.mx().iter().flatten().all(|scale| packed_scales(scale, sizes.k));
        let kernel = stream.kernel(packed.filter(|_| words).unwrap_or(kernel))?;
        // SAFETY: the checks above make the tensors as large as `params` says; the kernel checks what the lists say against the
        // experts, the rows of `a` and the gates.
        unsafe { launch.run(&kernel, LaunchConfig::grid_1d(launched), &params) }
    }

    /// The epilogue's constants.
    fn output(&self, sizes: &Sizes) -> Output {
        let epilogue = &self.epilogue;
        let (order, activation, alpha, limit, value_add) = match epilogue.gate {
            None => (0, epilogue.activation, 1.0, f32::INFINITY, 0.0),
            Some(gate) => {
                let order = if gate.order == GateOrder::Halves { 1 } else { 2 };
                (order, Some(gate.activation), gate.alpha, gate.limit.unwrap_or(f32::INFINITY), gate.add)
            }
        };
        Output {
            cols: sizes.cols as u32,
            order,
            activation: activation.map_or(NO_ACTIVATION, |a| a as u32),
            alpha,
            limit,
            value_add,
            weight_first: epilogue.weight_first.into(),
            round_type: float_index(epilogue.round.unwrap_or(DType::F32)) as u32,
            bias_type: self.inputs.bias.as_ref().map_or(0, float_type),
            bias_batch: sizes.w_rows as i64,
            ..Output::zeroed()
        }
    }
}

/// Bytes of a row of K.
fn row_bytes<A: Element>(k: usize) -> u32 {
    (k / packed(A::DTYPE) * size_of::<A>()) as u32
}

fn operand(data: u64, shape: &[usize], strides: &[usize], element: usize, shuffled: bool) -> Operand {
    let rank = shape.len();
    let bytes = |axis: usize| if shape[axis] > 1 { (strides[axis] * element) as i64 } else { 0 };
    let row = bytes(rank - 2);
    let (row, block, chunk_shift) = if shuffled {
        (SHUFFLED.1 as i64, (SHUFFLED.0 * shape[rank - 1] * element) as i64, SHUFFLED.0.ilog2())
    } else {
        (row, 16 * row, 0)
    };
    let batch = if rank > 2 { bytes(rank - 3) } else { 0 };
    let layout = RowLayout { row, block, chunk_shift, stage_shift: 0 };
    Operand { data, batch, layout, rows: shape[rank - 2] as u32, pad: 0 }
}

fn block_scale(data: u64, shape: &[usize], strides: &[usize], rows: usize, columns: usize) -> BlockScale {
    let rank = shape.len();
    let bytes = |axis: usize| if shape[axis] > 1 { (strides[axis] * 4) as i64 } else { 0 };
    BlockScale {
        data,
        batch: if rank > 2 { bytes(rank - 3) } else { 0 },
        row: bytes(rank - 2) as u32,
        group: bytes(rank - 1) as u32,
        row_shift: rows.trailing_zeros(),
        group_shift: columns.trailing_zeros(),
    }
}

/// Refuses strides of the last two axes that a window does not reach, in elements.
fn expect_spread(
    op: &'static str,
    arg: &'static str,
    shape: &[usize],
    strides: &[usize],
    most: usize,
) -> Result<()> {
    let last = shape.len() - 2;
    let spread = strides[last..].iter().zip(&shape[last..]).map(|(s, n)| s.saturating_mul(n + 256));
    if spread.fold(0, usize::saturating_add) >= most {
        return Err(Error::too_large(op, arg, format!("strides {strides:?}"), most as u64));
    }
    Ok(())
}

fn mx_view<'v, 'a>(scale: &'v MxScaleView<'a>) -> &'v TensorView<'a, E8M0> {
    match scale {
        MxScaleView::Rows(view) | MxScaleView::Shuffled(view) => view,
    }
}

/// Bytes of shuffled scales of 32 rows.
fn strip(blocks: usize) -> usize {
    32 * blocks.next_multiple_of(8)
}

fn check_mx(
    op: &'static str,
    arg: &'static str,
    scale: &MxScaleView,
    lead: Option<usize>,
    [rows, blocks]: [usize; 2],
) -> Result<()> {
    let view = mx_view(scale);
    match scale {
        MxScaleView::Rows(_) => {
            let want: Vec<usize> = lead.into_iter().chain([rows, blocks]).collect();
            view.expect_shape(op, arg, want)?;
            expect_spread(op, arg, view.shape(), view.strides(), WINDOW)
        }
        MxScaleView::Shuffled(_) => {
            let least = rows.div_ceil(32).saturating_mul(strip(blocks));
            let fits = match (lead, view.shape()) {
                (None, [n]) => *n >= least,
                (Some(lead), [batch, n]) => *batch == lead && *n >= least,
                _ => false,
            };
            if !fits {
                let lead = lead.map_or(String::new(), |lead| format!("{lead}, "));
                let want =
                    format!("[{lead}{least}] or longer (shuffled scales of {rows} rows of {blocks} blocks)");
                return Err(Error::shape(op, arg, view.shape(), want));
            }
            if least >= WINDOW {
                return Err(Error::too_large(op, arg, format!("{least} bytes"), WINDOW as u64));
            }
            view.expect_contiguous(op, arg)
        }
    }
}

/// Whether the four scales of 128 columns can be loaded as one 32-bit word.
fn packed_scales(scale: &MxScaleView, k: usize) -> bool {
    match scale {
        MxScaleView::Rows(view) => {
            let unit = view.shape().last() == Some(&1) || view.strides().last() == Some(&1);
            unit && k.is_multiple_of(128) && view.rows_aligned(4)
        }
        MxScaleView::Shuffled(_) => false,
    }
}

/// `batched`: the first axis is the experts'.
fn mx_scale(data: u64, scale: &MxScaleView, blocks: usize, batched: bool) -> MxScale {
    let view = mx_view(scale);
    let (shape, strides) = (view.shape(), view.strides());
    let stride = |axis: usize| if shape[axis] > 1 { strides[axis] } else { 0 };
    let batch = if batched { stride(0) as i64 } else { 0 };
    match scale {
        MxScaleView::Rows(_) => {
            let (row, col) = (stride(shape.len() - 2) as u32, stride(shape.len() - 1) as u32);
            MxScale { data, batch, row: [row, 16 * row, 32 * row], block: [col, 4 * col, 8 * col] }
        }
        MxScaleView::Shuffled(_) => {
            MxScale { data, batch, row: [4, 1, strip(blocks) as u32], block: [64, 2, 256] }
        }
    }
}

/// Refuses the fp8 encoding that the matrix instructions of a target do not take.
fn expect_encoding(op: &'static str, dtype: DType, arch: Arch) -> Result<()> {
    if !dtype.is_fp8_of_another(arch) {
        return Ok(());
    }
    let reason = "expert GEMMs take fp8e4m3fnuz on gfx942, fp8e4m3 on gfx950 and sm_90";
    Err(Error::unsupported(op, format!("{dtype} on {arch}"), reason))
}
