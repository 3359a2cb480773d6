//! Quantized rows of every kind: buffers, views, and the same from hk-quant.

use hk_comm::QuantizedRows;
use hk_core::quant::{BlockScale, GroupSize, Quantized, ScaleLayout};
use hk_core::{DeviceBuffer, E8M0, Fp4x2, Layout, Stream, TensorViewMut, bf16};
use hk_quant::{
    Fp8Scale, GroupScaleRule, MxOptions, NormMxfp4Options, NormRounding, NormRows, fused_rmsnorm_fp8_quant,
    fused_rmsnorm_mxfp4_quant,
};

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    PerToken,
    /// Columns of a group; scales in rows, or in columns.
    Groups(usize, bool),
    Mxfp4(BlockScale),
}

pub const KINDS: [Kind; 6] = [
    Kind::PerToken,
    Kind::Groups(128, false),
    Kind::Groups(64, true),
    Kind::Groups(32, false),
    Kind::Mxfp4(BlockScale::Even),
    Kind::Mxfp4(BlockScale::RoundUp),
];

impl Kind {
    /// Scales of a row.
    fn scales(self, cols: usize) -> usize {
        match self {
            Self::PerToken => 1,
            Self::Groups(group, _) => cols.div_ceil(group),
            Self::Mxfp4(_) => cols.div_ceil(32),
        }
    }
}

/// The outputs of one kind; those of the others are there and stay as they are.
pub struct Buffers<Q: Quantized> {
    kind: Kind,
    shape: [usize; 2],
    q8: DeviceBuffer<Q>,
    q4: DeviceBuffer<Fp4x2>,
    scale: DeviceBuffer<f32>,
    e8m0: DeviceBuffer<E8M0>,
}

impl<Q: Quantized> Buffers<Q> {
    pub fn new(stream: &Stream, kind: Kind, [rows, cols]: [usize; 2]) -> Self {
        let scales = rows * kind.scales(cols);
        Self {
            kind,
            shape: [rows, cols],
            q8: stream.alloc_zeroed(rows * cols).unwrap(),
            q4: stream.alloc_zeroed(rows * cols / 2).unwrap(),
            scale: stream.alloc_zeroed(scales).unwrap(),
            e8m0: stream.alloc_zeroed(scales).unwrap(),
        }
    }

    pub fn view(&mut self) -> QuantizedRows<'_, Q> {
        let [rows, cols] = self.shape;
        let scales = self.kind.scales(cols);
        let half = [rows, cols / 2];
        match self.kind {
            Kind::PerToken => QuantizedRows::PerToken {
                q: self.q8.view_mut([rows, cols]).unwrap(),
                scale: self.scale.view_mut([rows]).unwrap(),
            },
            Kind::Groups(group, by_columns) => QuantizedRows::Groups {
                q: self.q8.view_mut([rows, cols]).unwrap(),
                scale: in_order(&mut self.scale, [rows, scales], by_columns),
                group,
            },
            Kind::Mxfp4(mode) => QuantizedRows::Mxfp4 {
                q: self.q4.view_mut(half).unwrap(),
                scale: self.e8m0.view_mut([rows, scales]).unwrap(),
                mode,
            },
        }
    }

    /// The bytes of q and of the scales.
    pub fn read(&self, stream: &Stream) -> [Vec<u8>; 2] {
        let bytes = |b: &[u8]| b.to_vec();
        match self.kind {
            Kind::Mxfp4(_) => [
                bytes(bytemuck::cast_slice(&stream.download(&self.q4).unwrap())),
                bytes(bytemuck::cast_slice(&stream.download(&self.e8m0).unwrap())),
            ],
            _ => [
                bytes(bytemuck::cast_slice(&stream.download(&self.q8).unwrap())),
                bytes(bytemuck::cast_slice(&stream.download(&self.scale).unwrap())),
            ],
        }
    }

    /// What hk-quant makes of the rows `norm.x`.
    pub fn by_hk_quant(&mut self, stream: &Stream, norm: NormRows<bf16, bf16>) {
        let [rows, cols] = self.shape;
        let scales = self.kind.scales(cols);
        let half = [rows, cols / 2];
        let scale = match self.kind {
            Kind::PerToken => {
                Fp8Scale::PerToken { scale: self.scale.view_mut([rows]).unwrap(), smooth: None }
            }
            Kind::Groups(group, by_columns) => Fp8Scale::Group {
                size: match group {
                    32 => GroupSize::G32,
                    64 => GroupSize::G64,
                    128 => GroupSize::G128,
                    other => panic!("hk-quant has no groups of {other}"),
                },
                scale: in_order(&mut self.scale, [rows, scales], by_columns),
                rule: GroupScaleRule::Exact,
            },
            Kind::Mxfp4(mode) => {
                let mx = MxOptions { mode, scale_layout: ScaleLayout::RowMajor };
                let options = NormMxfp4Options { mx, rounding: NormRounding::F32 };
                let (q, scale) =
                    (self.q4.view_mut(half).unwrap(), self.e8m0.view_mut([rows, scales]).unwrap());
                return fused_rmsnorm_mxfp4_quant(stream, norm, None, q, scale, options).unwrap();
            }
        };
        let q = self.q8.view_mut([rows, cols]).unwrap();
        fused_rmsnorm_fp8_quant(stream, norm, None, q, scale, NormRounding::F32).unwrap();
    }
}

fn in_order(buffer: &mut DeviceBuffer<f32>, shape: [usize; 2], by_columns: bool) -> TensorViewMut<'_, f32> {
    let strides = if by_columns { [1, shape[0]] } else { [shape[1], 1] };
    buffer.view_mut_with(Layout::with_strides(shape, strides).unwrap(), 0).unwrap()
}
