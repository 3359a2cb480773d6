//! Rows of activations that are quantized in the launch that places gates: `hip/lists_quantize.hip`.

use crate::kernels::lists_quantize::Params;
use crate::kernels::route::QuantizeRows;
use bytemuck::Zeroable;
use hk_core::plan::rows::float_index;
use hk_core::quant::{BlockRule, BlockScale, QuantFormat};
use hk_core::{Element, KernelRef, Result, Stream, TensorView, TensorViewMut, row_kernels};
use hk_gemm::Half;

/// By dtype, then what has a scale.
static KERNELS: [[KernelRef<Params>; 3]; 2] =
    row_kernels!(Params, "lists_quantize", ["bf16", "f16"], ["rows", "blocks", "mxfp4"]);

/// What has a scale.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Scaled {
    /// A row, as `per_token_quant`: f32 `[rows]`.
    Rows(QuantFormat),
    /// 128 columns, as `group_quant`: f32 `[rows, ceil(cols / 128)]`.
    Blocks(QuantFormat),
    /// 32 columns of mxfp4, as `dynamic_mxfp4_quant`: e8m0 `[rows, cols / 32]`; `cols` is a multiple of 32.
    Mxfp4,
}

/// Rows `[rows, cols]` and what they become. Made by [`RowsToQuantize::new`] alone, which bounds the kernel's accesses by the tensors.
pub(crate) struct RowsToQuantize {
    pub kernel: KernelRef<Params>,
    pub params: QuantizeRows,
    /// Rows.
    pub count: usize,
}

impl RowsToQuantize {
    /// Rows of `x` and `q` are on 16 bytes.
    pub fn new<T: Half, Q: Element, S: Element>(
        stream: &Stream,
        op: &'static str,
        scaled: Scaled,
        (x, mut q, mut scale): (TensorView<T>, TensorViewMut<Q>, TensorViewMut<S>),
    ) -> Result<Self> {
        let [rows, cols] = x.dims(op, "x")?;
        let none = QuantizeRows::zeroed();
        let (kernel, params) = match scaled {
            Scaled::Rows(format) => {
                scale.expect_shape(op, "scale", [rows])?;
                (0, QuantizeRows { format, ..none })
            }
            Scaled::Blocks(format) => {
                scale.expect_shape(op, "scale", [rows, cols.div_ceil(128)])?;
                (1, QuantizeRows { format, ..none })
            }
            Scaled::Mxfp4 => {
                scale.expect_shape(op, "scale", [rows, cols / 32])?;
                (2, QuantizeRows { rule: BlockRule::fp4(BlockScale::Even, 0), ..none })
            }
        };
        let packed = if matches!(scaled, Scaled::Mxfp4) { 2 } else { 1 };
        q.expect_shape(op, "q", [rows, cols / packed])?;
        scale.expect_contiguous(op, "scale")?;
        let mut launch = stream.launch(op);
        let params = QuantizeRows {
            x: launch.input("x", &x)?,
            q: launch.output("q", &mut q)?,
            scale: launch.output("scale", &mut scale)?,
            ..params
        };
        Ok(Self { kernel: KERNELS[float_index(T::DTYPE)][kernel], params, count: rows })
    }
}
