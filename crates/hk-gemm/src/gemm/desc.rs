//! The descriptor of a GEMM: operands, scales, grouping, epilogue, destination.

use super::operands::{Addend, FloatView, GemmWeight, MxScaleView, packed};
use super::select::GemmConfig;
use super::table::{Eligible, Family, GROUPED_ROWS, ScaleKind, Variant};
use hk_core::{Element, Error, Float, Result, TensorView, TensorViewMut};

/// An activation function, in `f32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu = 0,
    /// `x (1 + erf(x / sqrt 2)) / 2`.
    Gelu = 1,
    /// `x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2`.
    GeluTanh = 2,
    /// `max(x, 0)`.
    Relu = 3,
    /// `tanh(x)`.
    Tanh = 4,
    /// `min(max(x, 0), 6)`.
    Relu6 = 5,
}

/// Which calls give bitwise identical rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Determinism {
    /// The same call gives the same bits. Tile and split-K follow from all sizes, so a row can change its last bits with `M`
    /// and with the batch.
    #[default]
    SameCall,
    /// A row of `y` is bitwise identical for every `M`, every batch size and with or without a workspace: the tile is 64 x 64
    /// (or its scalar form), K is not split, and activations are quantized ahead of the GEMM. Operands keep their dtype, `N`,
    /// `K` and alignment. A given [`GemmOptions::config`] is kept.
    BatchInvariant,
}

/// Whether an output is overwritten or added to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Accumulate {
    /// `y = ..`.
    #[default]
    Overwrite,
    /// `y += ..`.
    Add,
}

/// Options of a GEMM.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct GemmOptions {
    /// Applied after the bias.
    pub activation: Option<Activation>,
    /// Tile, split-K and rasterization; by default as suits the sizes and the device, see [`GemmConfig`].
    pub config: Option<GemmConfig>,
    /// Leaves the split-K slices unsummed: `y` is `f32` with a new first axis of any length `S`, and `y[s]` is the partial sum
    /// of slice `s` with all scales (zero beyond the last slice). The bias is part of slice 0. The activation is not applied.
    pub skip_reduce: bool,
    /// Which calls give bitwise identical rows.
    pub determinism: Determinism,
}

impl GemmOptions {
    /// Refuses an activation: it is not linear, so partial sums cannot have one.
    pub(crate) fn expect_no_activation(&self, op: &'static str) -> Result<()> {
        match self.activation {
            None => Ok(()),
            Some(activation) => Err(Error::argument(op, "activation", format!("{activation:?}"), "none")),
        }
    }
}

/// Rows of `w` and columns of K that share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockShape {
    /// Rows of `w`: a power of two.
    pub n: usize,
    /// Columns of `a` and `w`: a power of two. Fewer than 128 are slower; fewer than 16 take the scalar path.
    pub k: usize,
}

impl Default for BlockShape {
    /// 128 by 128.
    fn default() -> Self {
        Self { n: 128, k: 128 }
    }
}

/// Columns between two scalings of the sums; groups of fewer have kernels of their own.
pub(crate) const GROUP: usize = 128;
/// The fewest columns of a group that vectorized kernels serve.
pub(crate) const VECTOR_GROUP: usize = 16;
/// The longest row, in bytes, and the most outputs of an axis: kernels count them in 31 bits, with room for a tile.
pub(crate) const LIMIT: usize = (1 << 31) - 4096;

impl BlockShape {
    pub(crate) fn check(&self, op: &'static str) -> Result<()> {
        for (arg, n) in [("group.n", self.n), ("group.k", self.k)] {
            if !n.is_power_of_two() || n > LIMIT {
                return Err(Error::argument(op, arg, n, "a power of two"));
            }
        }
        Ok(())
    }

    pub(crate) const fn kind(&self) -> ScaleKind {
        if self.k < GROUP { ScaleKind::ShortBlock } else { ScaleKind::Block }
    }
}

/// How the two terms of a fused multiply-add meet the result `g` of a GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum FuseType {
    /// `a * g + b`.
    ScaleAdd = 1,
    /// `a * b + g`.
    AddProduct = 2,
}

/// A tensor, and the name of its argument for errors.
#[derive(Debug, Clone, Copy)]
pub struct Arg<V> {
    pub name: &'static str,
    pub view: V,
}

pub(crate) const fn arg<V>(name: &'static str, view: V) -> Arg<V> {
    Arg { name, view }
}

/// Scales of whole rows, which the epilogue applies: `[.., M]`, `[.., N]`, or one number.
#[derive(Debug, Clone, Copy, Default)]
pub struct RowScales<'a> {
    pub a: Option<Arg<TensorView<'a, f32>>>,
    pub w: Option<Arg<TensorView<'a, f32>>>,
}

/// Scales of groups of K, which the main loop applies.
#[derive(Debug, Clone, Copy)]
pub enum GroupScales<'a> {
    None,
    /// f32: of a `[.., M, groups of K]`, if it has any, and of w `[.., groups of N, groups of K]`.
    Block {
        a: Option<Arg<TensorView<'a, f32>>>,
        w: Arg<TensorView<'a, f32>>,
        shape: BlockShape,
    },
    /// e8m0, one for 32 columns of a row.
    Mx {
        a: Option<Arg<MxScaleView<'a>>>,
        w: Arg<MxScaleView<'a>>,
    },
}

impl GroupScales<'_> {
    pub fn kind(&self) -> ScaleKind {
        match self {
            Self::None => ScaleKind::None,
            Self::Block { shape, .. } => shape.kind(),
            Self::Mx { .. } => ScaleKind::Mx,
        }
    }

    /// Every split-K slice is a multiple of so many columns.
    pub fn columns(&self) -> usize {
        self.block().map_or(if matches!(self, Self::Mx { .. }) { GROUP } else { 1 }, |shape| shape.k)
    }

    /// The shape of a block of f32 scales.
    pub fn block(&self) -> Option<BlockShape> {
        match self {
            Self::Block { shape, .. } => Some(*shape),
            _ => None,
        }
    }
}

/// How rows of `a` choose among matrices `w`, on the device; `Grouping` in `hip/include/gemm/args.h`.
#[derive(Debug, Clone, Copy)]
pub enum Grouping<'a> {
    /// Batch b has matrix b.
    Batches,
    /// Batch b has matrix b, for its first `masked_m[b]` rows.
    Masked(TensorView<'a, i32>),
    /// Row m has matrix `m_group[m]`, or none.
    Rows(TensorView<'a, i32>),
}

impl<'a> Grouping<'a> {
    pub fn list(&self) -> Option<Arg<&TensorView<'a, i32>>> {
        match self {
            Self::Batches => None,
            Self::Masked(list) => Some(arg("masked_m", list)),
            Self::Rows(list) => Some(arg("m_group", list)),
        }
    }
}

/// What an epilogue fuses after the activation.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fusions<'a> {
    /// `y_scale`, a number to divide by.
    pub divisor: Option<TensorView<'a, f32>>,
    /// `a g + b`, or `a b + g`, of the result g.
    pub mul_add: Option<(FuseType, Addend<'a>, Addend<'a>)>,
}

/// Where results go.
#[expect(clippy::large_enum_variant, reason = "there is one of them at a time")]
pub enum Destination<'t, 'a, Y: Float> {
    /// `[.., M, N]`.
    Store(TensorViewMut<'t, Y>),
    /// `[M, N]`, to which blocks add their split-K partial sums with atomics.
    Atomic(TensorViewMut<'t, Y>, Accumulate),
    /// `[S, .., M, N]`: the partial sums of S split-K slices.
    Slices(TensorViewMut<'t, Y>),
    /// Rows of `N = D (S1 + S2)` columns: `c1` `[M, D, S1 + S3]`, whose last S3 columns are `cat`, and `c2` `[M, D, S2]`.
    SplitCat { c1: TensorViewMut<'t, Y>, c2: TensorViewMut<'t, Y>, cat: FloatView<'a> },
}

impl<'t, Y: Float> Destination<'t, '_, Y> {
    pub fn y(&mut self) -> &mut TensorViewMut<'t, Y> {
        match self {
            Self::Store(y) | Self::Atomic(y, _) | Self::Slices(y) | Self::SplitCat { c1: y, .. } => y,
        }
    }

    /// Whether partial sums meet in the output, without a workspace.
    pub fn atomic(&self) -> bool {
        matches!(self, Self::Atomic(..))
    }
}

/// A GEMM `[.., M, K]` by `[.., N, K]`.
#[derive(Clone, Copy)]
pub struct GemmDesc<'a, A: Element, W: Element> {
    pub op: &'static str,
    pub a: Arg<TensorView<'a, A>>,
    pub w: Arg<GemmWeight<'a, W>>,
    pub row_scales: RowScales<'a>,
    pub group_scales: GroupScales<'a>,
    pub bias: Option<Arg<FloatView<'a>>>,
    pub grouping: Grouping<'a>,
    pub fusions: Fusions<'a>,
    pub variant: Variant,
    /// Name of the output.
    pub y: &'static str,
    pub options: GemmOptions,
}

impl<'a, A: Element, W: Element> GemmDesc<'a, A, W> {
    /// Without scales, bias and fusions.
    pub fn new(op: &'static str, a: TensorView<'a, A>, w: impl Into<GemmWeight<'a, W>>) -> Self {
        Self {
            op,
            a: arg("a", a),
            w: arg("w", w.into()),
            row_scales: RowScales::default(),
            group_scales: GroupScales::None,
            bias: None,
            grouping: Grouping::Batches,
            fusions: Fusions::default(),
            variant: Variant::Plain,
            y: "y",
            options: GemmOptions::default(),
        }
    }

    pub fn options(self, options: GemmOptions) -> Self {
        Self { options, ..self }
    }

    pub fn bias(self, bias: Option<FloatView<'a>>) -> Self {
        Self { bias: bias.map(|bias| arg("bias", bias)), ..self }
    }

    /// The kernels for the operands, scales and epilogue.
    pub fn eligible(&self) -> Result<Eligible> {
        let kind = self.group_scales.kind();
        let Some(family) = Family::find(A::DTYPE, W::DTYPE, kind, self.variant) else {
            let what = format!("{} by {} ({})", A::DTYPE, W::DTYPE, scales_name(kind));
            let mut served: Vec<String> = Family::all()
                .filter(|family| (family.scales, family.variant) == (kind, self.variant))
                .map(|family| format!("{} by {}", family.a, family.w))
                .collect();
            served.dedup();
            let reason = format!("kernels with these scales and this epilogue take {}", served.join(", "));
            return Err(Error::unsupported(self.op, what, reason));
        };
        Ok(Eligible {
            family,
            max_rows: if matches!(self.grouping, Grouping::Rows(_)) { GROUPED_ROWS } else { usize::MAX },
            fine_scales: self.group_scales.block().is_some_and(|shape| shape.n < 4),
        })
    }

    pub fn gated(&self) -> bool {
        self.variant == Variant::Gated
    }

    /// Elements of K in one of `a`, and in one of `w`.
    pub const PACKED: [usize; 2] = [packed::<A>(), packed::<W>()];
}

const fn scales_name(kind: ScaleKind) -> &'static str {
    match kind {
        ScaleKind::None => "no scales or scales of rows",
        ScaleKind::Block => "block scales",
        ScaleKind::ShortBlock => "block scales of fewer than 128 columns",
        ScaleKind::Mx => "e8m0 scales of 32 columns",
    }
}
