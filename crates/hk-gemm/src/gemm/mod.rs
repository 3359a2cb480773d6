//! GEMMs: the descriptor ([`desc`]), its checks, tile selection, plan and launches.

pub(crate) mod check;
pub(crate) mod desc;
pub(crate) mod launch;
pub(crate) mod operands;
pub(crate) mod params;
pub(crate) mod plan;
pub(crate) mod prequant;
pub(crate) mod select;
pub(crate) mod table;
pub(crate) mod two;

pub use desc::{Accumulate, Activation, BlockShape, Determinism, FuseType, GemmOptions};
pub use operands::{Addend, FloatView, GemmWeight, MxScaleView};
pub use plan::{GemmProblem, gemm_workspace};
pub use prequant::{Prequant, Quantizer};
pub use select::{GemmConfig, GemmTile};
pub use table::Precision;

use crate::element::{Half, PrequantWeight};
use desc::{Destination, GemmDesc, GroupScales, RowScales, arg};
use hk_core::{Element, Error, Float, Result, Stream, TensorView, TensorViewMut};
use table::Variant;

/// The scales of a GEMM's operands.
#[derive(Debug, Clone, Copy)]
pub enum GemmScales<'a> {
    /// f32 for each row: `a` `[M]`, `[M, 1]`, `[1, M]` or `[1]`, `w` likewise of `N`; with their batch axis first.
    Rows {
        /// Of `a`.
        a: TensorView<'a, f32>,
        /// Of `w`.
        w: TensorView<'a, f32>,
    },
    /// f32 for each block: `a` `[.., M, groups of K]`, `w` `[.., groups of N, groups of K]`.
    Blocks {
        /// Of `a`.
        a: TensorView<'a, f32>,
        /// Of `w`.
        w: TensorView<'a, f32>,
        /// Rows of `w` and columns that share a scale.
        group: BlockShape,
    },
    /// f32 for each block of `w` `[.., groups of N, groups of K]`; `a` is of 16-bit floats.
    WeightBlocks {
        /// Of `w`.
        w: TensorView<'a, f32>,
        /// Rows of `w` and columns that share a scale.
        group: BlockShape,
    },
    /// e8m0 for 32 columns of each row of both.
    Mx {
        /// Of `a`.
        a: MxScaleView<'a>,
        /// Of `w`.
        w: MxScaleView<'a>,
    },
    /// e8m0 for 32 columns of each row of `w`; f32 for rows of fp8 `a`, none for 16-bit floats.
    MxWeights {
        /// Of `a`.
        a: Option<TensorView<'a, f32>>,
        /// Of `w`.
        w: MxScaleView<'a>,
    },
}

/// A GEMM `y = activation(scales (a w^T) + bias)`, `a` `[M, K]` by `w` `[N, K]`, or a batch of them with one axis more.
///
/// ```
/// use hk_core::{Device, Result, bf16};
/// use hk_gemm::{Activation, Gemm};
///
/// # fn main() -> Result<()> {
/// # if std::env::var_os("HK_DEVICE").is_none() && hk_gemm::OPERATORS[0].kernels[0].images().is_empty() { return Ok(()) }
/// let stream = Device::open_default()?.create_stream()?;
/// let a = stream.upload(&[1.0, 2.0, 3.0].map(bf16::from_f32))?;
/// let w = stream.upload(&[1.0, 0.0, 0.0, -0.5, -0.5, -0.5].map(bf16::from_f32))?;
/// let mut y = stream.alloc_zeroed::<f32>(2)?;
/// Gemm::new(a.view([1, 3])?, w.view([2, 3])?).activation(Activation::Relu).run(&stream, y.view_mut([1, 2])?)?;
/// assert_eq!(stream.download(&y)?, [1.0, 0.0]);
/// # Ok(()) }
/// ```
///
/// | operands                         | scales                                   | kernels                                  |
/// |----------------------------------|------------------------------------------|------------------------------------------|
/// | `bf16`, `f16` by themselves      | none                                     | plain, [`gated`](Self::gated)            |
/// | `i8`, fp8 by themselves          | [`Rows`](GemmScales::Rows), [`Blocks`](GemmScales::Blocks) | plain                  |
/// | `bf16`, `f16` by `i8`, fp8       | [`WeightBlocks`](GemmScales::WeightBlocks) | plain, [`prequant`](Self::prequant)    |
/// | `bf16`, `f16` by `Fp4x2`         | [`MxWeights`](GemmScales::MxWeights)     | plain, [`prequant`](Self::prequant)      |
/// | fp8 by `Fp4x2`                   | [`MxWeights`](GemmScales::MxWeights)     | plain                                    |
/// | fp8, `Fp4x2` by themselves       | [`Mx`](GemmScales::Mx)                   | plain                                    |
///
/// Sums, scales, bias and activation are `f32` (sums of `i8` are `i32`), with one rounding, to the type of `y`. `y` and the
/// workspace share no memory with each other or with an input. The named functions of this crate are this builder with their
/// arguments checked; they have the formulas.
///
/// # Errors
/// [`run`](Self::run) answers [`Unsupported`](hk_core::Error::Unsupported) for operands, scales and epilogues without a kernel,
/// and otherwise as [`gemm_a16w16`](crate::gemm_a16w16()).
pub struct Gemm<'a, A: Element, W: Element> {
    desc: GemmDesc<'a, A, W>,
    workspace: Option<TensorViewMut<'a, f32>>,
}

impl<'a, A: Element, W: Element> Gemm<'a, A, W> {
    /// `a` by the transpose of `w`.
    pub fn new(a: TensorView<'a, A>, w: impl Into<GemmWeight<'a, W>>) -> Self {
        Self::named("gemm", a, w)
    }

    /// Under the name of an operator, for errors.
    pub(crate) fn named(op: &'static str, a: TensorView<'a, A>, w: impl Into<GemmWeight<'a, W>>) -> Self {
        Self { desc: GemmDesc::new(op, a, w), workspace: None }
    }

    /// Scales of the operands.
    pub fn scales(mut self, scales: GemmScales<'a>) -> Self {
        (self.desc.row_scales, self.desc.group_scales) = scales.split();
        self
    }

    /// `bias` `[N]`, or `[batch, N]`, contiguous.
    pub fn bias(mut self, bias: impl Into<Option<FloatView<'a>>>) -> Self {
        self.desc = self.desc.bias(bias.into());
        self
    }

    /// Rows of `w` are `N` gates, then `N` values: `y = activation(gates) * values`.
    pub fn gated(mut self) -> Self {
        self.desc.variant = Variant::Gated;
        self
    }

    /// Applied after the bias; of gated GEMMs to the gates.
    pub fn activation(mut self, activation: impl Into<Option<Activation>>) -> Self {
        self.desc.options.activation = activation.into();
        self
    }

    /// Tile, split-K and rasterization.
    pub fn config(mut self, config: impl Into<Option<GemmConfig>>) -> Self {
        self.desc.options.config = config.into();
        self
    }

    /// Which calls give bitwise identical rows.
    pub fn determinism(mut self, determinism: Determinism) -> Self {
        self.desc.options.determinism = determinism;
        self
    }

    /// All options at once.
    pub fn options(mut self, options: GemmOptions) -> Self {
        self.desc.options = options;
        self
    }

    /// `[n]`, contiguous, on 16 bytes: room for split-K slices and quantized activations, see [`gemm_workspace`].
    pub fn workspace(mut self, workspace: impl Into<Option<TensorViewMut<'a, f32>>>) -> Self {
        self.workspace = workspace.into();
        self
    }

    /// Checks the call and queues its kernels.
    ///
    /// # Errors
    /// See [`Gemm`]. Nothing is written then.
    pub fn run<Y: Float>(self, stream: &Stream, y: TensorViewMut<Y>) -> Result<()> {
        self.desc.run(stream, Destination::Store(y), self.workspace)
    }

    /// [`run`](Self::run), with the partial sums of split-K slices added to `y` by atomics, in any order: calls differ in their
    /// last bits.
    ///
    /// # Errors
    /// As [`run`](Self::run); [`Argument`](hk_core::Error::Argument) for an activation.
    pub fn run_atomic(self, stream: &Stream, y: TensorViewMut<f32>, accumulate: Accumulate) -> Result<()> {
        self.desc.options.expect_no_activation(self.desc.op)?;
        self.desc.run(stream, Destination::Atomic(y, accumulate), self.workspace)
    }

    pub(crate) fn desc(self) -> (GemmDesc<'a, A, W>, Option<TensorViewMut<'a, f32>>) {
        (self.desc, self.workspace)
    }
}

/// A [`Gemm`] of 16-bit activations that are quantized to the type of the weights, or not.
pub struct PrequantGemm<'a, A: Half, W: PrequantWeight> {
    gemm: Gemm<'a, A, W>,
    prequant: Prequant,
}

impl<'a, A: Half, W: PrequantWeight> Gemm<'a, A, W> {
    /// Quantizes `a` to the type of `w`, in the groups of the scales: in registers up to 32 rows, ahead of the GEMM for more.
    pub fn prequant(self, prequant: Prequant) -> PrequantGemm<'a, A, W> {
        PrequantGemm { gemm: self, prequant }
    }
}

impl<'a, A: Half, W: PrequantWeight> PrequantGemm<'a, A, W> {
    /// Checks the call and queues its kernels.
    ///
    /// # Errors
    /// As [`Gemm::run`]; [`Shape`](hk_core::Error::Shape) for a workspace without room for quantized activations where they
    /// cannot be quantized in registers.
    pub fn run<Y: Float>(self, stream: &Stream, y: TensorViewMut<Y>) -> Result<()> {
        let (desc, workspace) = self.gemm.desc();
        desc.run_prequant(self.prequant, stream, Destination::Store(y), workspace)
    }

    /// As [`Gemm::run_atomic`].
    ///
    /// # Errors
    /// As [`run`](Self::run) and [`Gemm::run_atomic`].
    pub fn run_atomic(self, stream: &Stream, y: TensorViewMut<f32>, accumulate: Accumulate) -> Result<()> {
        let (desc, workspace) = self.gemm.desc();
        desc.options.expect_no_activation(desc.op)?;
        desc.run_prequant(self.prequant, stream, Destination::Atomic(y, accumulate), workspace)
    }
}

impl<'a> GemmScales<'a> {
    /// The scales that int8 and fp8 have.
    pub(crate) fn expect_rows_or_blocks(&self, op: &'static str) -> Result<()> {
        match self {
            Self::Rows { .. } | Self::Blocks { .. } => Ok(()),
            _ => {
                let want = "GemmScales::Rows or GemmScales::Blocks";
                Err(Error::argument(op, "scales", format!("{self:?}"), want))
            }
        }
    }

    fn split(self) -> (RowScales<'a>, GroupScales<'a>) {
        let rows = |a, w| RowScales { a, w };
        match self {
            Self::Rows { a, w } => {
                (rows(Some(arg("a_scale", a)), Some(arg("w_scale", w))), GroupScales::None)
            }
            Self::Blocks { a, w, group } => {
                let (a, w) = (Some(arg("a_scale", a)), arg("w_scale", w));
                (RowScales::default(), GroupScales::Block { a, w, shape: group })
            }
            Self::WeightBlocks { w, group } => {
                (RowScales::default(), GroupScales::Block { a: None, w: arg("w_scale", w), shape: group })
            }
            Self::Mx { a, w } => {
                let (a, w) = (Some(arg("a_scale", a)), arg("w_scale", w));
                (RowScales::default(), GroupScales::Mx { a, w })
            }
            Self::MxWeights { a, w } => {
                let a = a.map(|a| arg("a_scale", a));
                (rows(a, None), GroupScales::Mx { a: None, w: arg("w_scale", w) })
            }
        }
    }
}
