//! Operands that are more than a tensor: weights, scales, terms of any float type.

use super::params::{CHUNK, MxScale, SHUFFLED_ROWS, Term};
use super::table::MxOrder;
use hk_core::plan::rows::float_index;
use hk_core::{DType, E8M0, Element, Error, Launch, Operand, Result, TensorView, bf16, f16};

/// A tensor of any float type.
#[derive(Debug, Clone, Copy)]
pub enum FloatView<'a> {
    /// Of `bf16`.
    Bf16(TensorView<'a, bf16>),
    /// Of `f16`.
    F16(TensorView<'a, f16>),
    /// Of `f32`.
    F32(TensorView<'a, f32>),
}

impl<'a> From<TensorView<'a, bf16>> for FloatView<'a> {
    fn from(view: TensorView<'a, bf16>) -> Self {
        Self::Bf16(view)
    }
}
impl<'a> From<TensorView<'a, f16>> for FloatView<'a> {
    fn from(view: TensorView<'a, f16>) -> Self {
        Self::F16(view)
    }
}
impl<'a> From<TensorView<'a, f32>> for FloatView<'a> {
    fn from(view: TensorView<'a, f32>) -> Self {
        Self::F32(view)
    }
}

/// Runs `$body` for the view.
macro_rules! each_float {
    ($self:expr, $view:ident => $body:expr) => {
        match $self {
            FloatView::Bf16($view) => $body,
            FloatView::F16($view) => $body,
            FloatView::F32($view) => $body,
        }
    };
}

/// Alignment to elements.
fn expect_aligned<T: Element>(op: &'static str, arg: &'static str, view: &TensorView<T>) -> Result<()> {
    view.expect_aligned(op, arg, size_of::<T>() as u64)
}

impl<'a> FloatView<'a> {
    pub(crate) fn operand(&self) -> &dyn Operand {
        each_float!(self, view => view as &dyn Operand)
    }

    pub(crate) fn shape(&self) -> &[usize] {
        each_float!(self, view => view.shape())
    }

    pub(crate) fn strides(&self) -> &[usize] {
        each_float!(self, view => view.strides())
    }

    pub(crate) fn type_index(&self) -> u32 {
        let dtype = match self {
            Self::Bf16(_) => bf16::DTYPE,
            Self::F16(_) => f16::DTYPE,
            Self::F32(_) => f32::DTYPE,
        };
        float_index(dtype) as u32
    }

    pub(crate) fn rows_aligned(&self, bytes: u64) -> bool {
        each_float!(self, view => view.rows_aligned(bytes))
    }

    /// Unit stride on the last axis, and alignment to elements.
    pub(crate) fn expect_rows(&self, op: &'static str, arg: &'static str) -> Result<()> {
        each_float!(self, view => {
            view.expect_unit_stride(op, arg)?;
            expect_aligned(op, arg, view)
        })
    }

    pub(crate) fn expect_contiguous(&self, op: &'static str, arg: &'static str) -> Result<()> {
        each_float!(self, view => {
            view.expect_contiguous(op, arg)?;
            expect_aligned(op, arg, view)
        })
    }

    pub(crate) fn address<'l>(&self, launch: &mut Launch<'l>, arg: &'static str) -> Result<u64>
    where
        'a: 'l,
    {
        each_float!(self, view => Ok(launch.input(arg, view)?.data()))
    }
}

/// A number for all outputs, or one for each: a tensor `[M, N]` with unit stride on `N`, or `[1]`.
#[derive(Debug, Clone, Copy)]
pub enum Addend<'a> {
    /// For all.
    Value(f32),
    /// `[M, N]`, or one element.
    Tensor(FloatView<'a>),
}

impl From<f32> for Addend<'_> {
    fn from(value: f32) -> Self {
        Self::Value(value)
    }
}
impl<'a, V: Into<FloatView<'a>>> From<V> for Addend<'a> {
    fn from(view: V) -> Self {
        Self::Tensor(view.into())
    }
}

impl<'a> Addend<'a> {
    pub(crate) fn operand(&self) -> Option<&dyn Operand> {
        match self {
            Self::Value(_) => None,
            Self::Tensor(view) => Some(view.operand()),
        }
    }

    pub(crate) fn check(&self, op: &'static str, arg: &'static str, [m, n]: [usize; 2]) -> Result<()> {
        let Self::Tensor(view) = self else { return Ok(()) };
        let one = view.shape().iter().product::<usize>() == 1;
        if !one && view.shape() != [m, n] {
            return Err(Error::shape(op, arg, view.shape(), format!("[{m}, {n}] (M, N), or one element")));
        }
        view.expect_rows(op, arg)
    }

    pub(crate) fn term<'l>(&self, launch: &mut Launch<'l>, arg: &'static str) -> Result<Term>
    where
        'a: 'l,
    {
        let none = Term { data: 0, row: 0, value: 0.0, r#type: 0, step: 0, vectors: 0 };
        match self {
            &Self::Value(value) => Ok(Term { value, ..none }),
            Self::Tensor(view) => Ok(Term {
                data: view.address(launch, arg)?,
                row: view.strides().iter().rev().nth(1).map_or(0, |&stride| stride as i64),
                r#type: view.type_index(),
                step: (view.shape().iter().product::<usize>() != 1).into(),
                vectors: view.rows_aligned(16).into(),
                ..none
            }),
        }
    }
}

/// The weights of a GEMM, `[N, K]` or `[batch, N, K]`.
#[derive(Debug, Clone, Copy)]
pub enum GemmWeight<'a, T: Element> {
    /// Rows of K: unit stride on `K`, any other strides.
    Rows(TensorView<'a, T>),
    /// The order that matrix instructions read, made by [`shuffle_weight`](crate::shuffle_weight): contiguous, 16-byte
    /// aligned, `N` a multiple of 16, `K` of 32 elements (of fp4: 32 bytes). `K` may be longer than that of the activations;
    /// the padding is ignored.
    ///
    /// Blocks of 16 rows hold the 16-byte chunks of their rows side by side: with chunks of `c` elements, element `(n, k)` is
    /// at `(n / 16) 16 K + (k / c) 16 c + (n % 16) c + k % c`.
    Shuffled(TensorView<'a, T>),
}

/// Checks the shape of shuffled weights.
pub(crate) fn check_shuffled(op: &'static str, arg: &'static str, shape: &[usize]) -> Result<()> {
    match shape {
        [.., n, k] if n.is_multiple_of(SHUFFLED_ROWS) && k.is_multiple_of(32) && shape.len() <= 3 => Ok(()),
        _ => Err(Error::shape(
            op,
            arg,
            shape,
            "[N, K] or [batch, N, K], N a multiple of 16, K of 32 (shuffled)",
        )),
    }
}

impl<'a, T: Element> From<TensorView<'a, T>> for GemmWeight<'a, T> {
    fn from(view: TensorView<'a, T>) -> Self {
        Self::Rows(view)
    }
}

impl<'a, T: Element> GemmWeight<'a, T> {
    pub(crate) fn view(&self) -> &TensorView<'a, T> {
        match self {
            Self::Rows(view) | Self::Shuffled(view) => view,
        }
    }

    pub(crate) fn shuffled(&self) -> bool {
        matches!(self, Self::Shuffled(_))
    }

    /// Layout and alignment.
    pub(crate) fn check(&self, op: &'static str, arg: &'static str) -> Result<()> {
        match self {
            Self::Rows(view) => {
                view.expect_unit_stride(op, arg)?;
                view.expect_aligned(op, arg, size_of::<T>() as u64)
            }
            Self::Shuffled(view) => {
                check_shuffled(op, arg, view.shape())?;
                view.expect_contiguous(op, arg)?;
                view.expect_aligned(op, arg, CHUNK as u64)
            }
        }
    }
}

/// Elements of K in one of a tensor.
pub(crate) const fn packed<T: Element>() -> usize {
    if matches!(T::DTYPE, DType::Fp4x2) { 2 } else { 1 }
}

/// Scales of mxfp4 and mxfp8, e8m0: one for each 32 columns of each row, `[.., rows, K / 32]`.
#[derive(Debug, Clone, Copy)]
pub enum MxScaleView<'a> {
    /// Any strides.
    Rows(TensorView<'a, E8M0>),
    /// In the order of [`ScaleLayout::Shuffled950`](hk_core::quant::ScaleLayout::Shuffled950): `[n]`, or `[batch, n]`,
    /// contiguous, with rows padded to a multiple of 32 at least.
    Shuffled(TensorView<'a, E8M0>),
}

impl<'a> From<TensorView<'a, E8M0>> for MxScaleView<'a> {
    fn from(view: TensorView<'a, E8M0>) -> Self {
        Self::Rows(view)
    }
}

/// Columns of a scale.
pub(crate) const MX_BLOCK: usize = 32;

/// Bytes of shuffled scales of 32 rows.
fn strip(blocks: usize) -> usize {
    32 * blocks.next_multiple_of(8)
}

impl<'a> MxScaleView<'a> {
    pub(crate) fn view(&self) -> &TensorView<'a, E8M0> {
        match self {
            Self::Rows(view) | Self::Shuffled(view) => view,
        }
    }

    /// `lead`: batches, if tensors have them.
    pub(crate) fn check(
        &self,
        op: &'static str,
        arg: &'static str,
        lead: Option<usize>,
        [rows, k]: [usize; 2],
    ) -> Result<()> {
        let blocks = k / MX_BLOCK;
        let shape = self.view().shape();
        match self {
            Self::Rows(view) => {
                let want: Vec<usize> = lead.into_iter().chain([rows, blocks]).collect();
                if shape != want {
                    return Err(Error::shape(
                        op,
                        arg,
                        shape,
                        format!("{want:?} (rows, blocks of 32 columns)"),
                    ));
                }
                let axes = view.strides().iter().zip(shape).rev().take(2);
                let spread = axes.map(|(s, n)| s.saturating_mul(n.next_multiple_of(64)));
                if spread.fold(0, usize::saturating_add) >= 1 << 31 {
                    return Err(Error::too_large(op, arg, format!("strides {:?}", view.strides()), 1 << 31));
                }
                Ok(())
            }
            Self::Shuffled(view) => {
                let least = rows.div_ceil(32).saturating_mul(strip(blocks));
                let fits = match (lead, shape) {
                    (None, [n]) => *n >= least,
                    (Some(lead), [batch, n]) => *batch == lead && *n >= least,
                    _ => false,
                };
                if !fits {
                    let lead = lead.map_or(String::new(), |lead| format!("{lead}, "));
                    let want = format!(
                        "[{lead}{least}] or longer (shuffled scales of {rows} rows of {blocks} blocks)"
                    );
                    return Err(Error::shape(op, arg, shape, want));
                }
                if least >= 1 << 31 {
                    return Err(Error::too_large(op, arg, format!("{least} bytes"), 1 << 31));
                }
                view.expect_contiguous(op, arg)
            }
        }
    }

    /// The order in which kernels can load them.
    pub(crate) fn order(&self, k: usize) -> MxOrder {
        let view = self.view();
        let unit = view.shape().last() == Some(&1) || view.strides().last() == Some(&1);
        if unit && view.rows_aligned(4) {
            MxOrder::of(matches!(self, Self::Shuffled(_)), k)
        } else {
            MxOrder::Any
        }
    }

    pub(crate) fn params<'l>(&self, launch: &mut Launch<'l>, arg: &'static str, k: usize) -> Result<MxScale>
    where
        'a: 'l,
    {
        let layout = launch.input(arg, self.view())?;
        let ([_, batches, rows, cols], [_, batch, row, col]) = (layout.shape(), layout.strides());
        // The stride of a single row or column is arbitrary.
        let stride = |n: u32, stride: i64| if n > 1 { stride as u32 } else { 0 };
        Ok(match self {
            Self::Rows(_) => {
                let (row, col) = (stride(rows, row), stride(cols, col));
                MxScale {
                    data: layout.data(),
                    batch: if batches > 1 { batch } else { 0 },
                    row: [row, 16 * row, 32 * row],
                    block: [col, 4 * col, 8 * col],
                }
            }
            Self::Shuffled(_) => MxScale {
                data: layout.data(),
                // Batches are the rows of a tensor of two axes.
                batch: if rows > 1 { row } else { 0 },
                row: [4, 1, strip(k / MX_BLOCK) as u32],
                block: [64, 2, 256],
            },
        })
    }
}
