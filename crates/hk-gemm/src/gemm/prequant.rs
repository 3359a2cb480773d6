//! GEMMs of 16-bit floats by quantized weights: activations are taken as they are, quantized in registers (on the fly), or
//! quantized ahead of the GEMM, into the workspace.

use super::check::{check_workspace, expect_encoding};
use super::desc::{Destination, Determinism, GROUP, GemmDesc, GroupScales, arg};
use super::operands::{MX_BLOCK, packed};
use super::select::{GemmConfig, GemmTile};
use super::table::{Family, ScaleKind, Variant};
use crate::element::{Half, Int8OrFp8};
use crate::kernels::group_quant::Params;
use hk_core::quant::{BlockScale, GroupSize, ScaleLayout};
use hk_core::{
    DType, E8M0, Element, Error, Float, Fp4x2, LaunchConfig, Result, Stream, TensorView, TensorViewMut,
    check_aliases,
};
use hk_quant::{GroupOptions, MxOptions, dynamic_mxfp4_quant, group_quant};

/// Most rows that are quantized by each block in registers, rather than once ahead of the GEMM.
pub(crate) const ON_THE_FLY_ROWS: usize = 32;

/// Whether 16-bit activations are quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prequant {
    /// They are multiplied as they are, by dequantized weights.
    No,
    /// They are quantized to the type of the weights.
    Yes,
}

/// Shapes of quantized activations: values `[.., M, K]`, scales `[.., M, groups of K]`.
pub(crate) struct QuantizedSizes {
    values: Vec<usize>,
    scales: Vec<usize>,
    element: [usize; 2],
}

impl QuantizedSizes {
    /// Of activations `[.., M, K]`, with a scale for `columns` columns.
    pub fn new<Q: Element, S: Element>(shape: &[usize], columns: usize) -> Self {
        let with = |last: usize| {
            let mut shape = shape.to_vec();
            if let Some(k) = shape.last_mut() {
                *k = last;
            }
            shape
        };
        let k = shape.last().copied().unwrap_or(0);
        Self {
            values: with(k / packed::<Q>()),
            scales: with(k.div_ceil(columns)),
            element: [size_of::<Q>(), size_of::<S>()],
        }
    }

    /// f32 of the values, and of the scales, each on 16 bytes.
    fn lens(&self) -> [usize; 2] {
        let all = |shape: &[usize]| shape.iter().fold(1, |n: usize, &len| n.saturating_mul(len));
        let [value, scale] = self.element;
        [all(&self.values).saturating_mul(value), all(&self.scales).saturating_mul(scale)]
            .map(|bytes| bytes.div_ceil(16).saturating_mul(4))
    }

    /// f32 of a workspace for both.
    pub fn len(&self) -> usize {
        let [values, scales] = self.lens();
        values.saturating_add(scales)
    }
}

/// Weights that 16-bit activations are quantized to.
pub trait Quantizer: Element {
    /// Type of a scale.
    type Scale: Element;

    /// Columns of a group of activations.
    fn columns<A: Half>(gemm: &GemmDesc<A, Self>) -> usize;

    /// The GEMM of quantized activations.
    fn quantized<'a, A: Half>(
        gemm: &GemmDesc<'a, A, Self>,
        a: TensorView<'a, Self>,
        scales: TensorView<'a, Self::Scale>,
    ) -> GemmDesc<'a, Self, Self>;

    /// Quantizes rows of `a`.
    fn quantize<A: Half>(
        stream: &Stream,
        gemm: &GemmDesc<A, Self>,
        a: TensorView<A>,
        values: TensorViewMut<Self>,
        scales: TensorViewMut<Self::Scale>,
    ) -> Result<()>;
}

impl<C: Int8OrFp8> Quantizer for C {
    type Scale = f32;

    fn columns<A: Half>(gemm: &GemmDesc<A, C>) -> usize {
        gemm.group_scales.columns()
    }

    fn quantized<'a, A: Half>(
        gemm: &GemmDesc<'a, A, C>,
        a: TensorView<'a, C>,
        scales: TensorView<'a, f32>,
    ) -> GemmDesc<'a, C, C> {
        // Groups of w are as wide as those of a, or wider: both are read as the former.
        let group_scales = match gemm.group_scales {
            GroupScales::Block { w, shape, .. } => {
                GroupScales::Block { a: Some(arg("workspace", scales)), w, shape }
            }
            other => other,
        };
        with_activations(gemm, a, group_scales)
    }

    fn quantize<A: Half>(
        stream: &Stream,
        gemm: &GemmDesc<A, C>,
        a: TensorView<A>,
        q: TensorViewMut<C>,
        scale: TensorViewMut<f32>,
    ) -> Result<()> {
        let columns = Self::columns(gemm);
        let size = [GroupSize::G32, GroupSize::G64, GroupSize::G128]
            .into_iter()
            .find(|size| size.columns() == columns);
        match size {
            Some(group) => {
                group_quant(stream, a, q, scale, GroupOptions { group, ..GroupOptions::default() })
            }
            None => quantize_groups(stream, gemm.op, a, q, scale, columns),
        }
    }
}

impl Quantizer for Fp4x2 {
    type Scale = E8M0;

    fn columns<A: Half>(_: &GemmDesc<A, Self>) -> usize {
        MX_BLOCK
    }

    fn quantized<'a, A: Half>(
        gemm: &GemmDesc<'a, A, Self>,
        a: TensorView<'a, Self>,
        scales: TensorView<'a, E8M0>,
    ) -> GemmDesc<'a, Self, Self> {
        let group_scales = match gemm.group_scales {
            GroupScales::Mx { w, .. } => GroupScales::Mx { a: Some(arg("workspace", scales.into())), w },
            other => other,
        };
        with_activations(gemm, a, group_scales)
    }

    fn quantize<A: Half>(
        stream: &Stream,
        _: &GemmDesc<A, Self>,
        a: TensorView<A>,
        q: TensorViewMut<Self>,
        scale: TensorViewMut<E8M0>,
    ) -> Result<()> {
        let options = MxOptions { mode: BlockScale::Even, scale_layout: ScaleLayout::RowMajor };
        dynamic_mxfp4_quant(stream, a, q, scale, options)
    }
}

/// The same GEMM of other activations.
fn with_activations<'a, A: Element, W: Element, B: Element>(
    gemm: &GemmDesc<'a, A, W>,
    a: TensorView<'a, B>,
    group_scales: GroupScales<'a>,
) -> GemmDesc<'a, B, W> {
    let &GemmDesc { op, w, row_scales, bias, grouping, fusions, y, options, .. } = gemm;
    let (a, variant) = (arg(gemm.a.name, a), Variant::Plain);
    GemmDesc { op, a, w, row_scales, group_scales, bias, grouping, fusions, variant, y, options }
}

impl<'a, A: Half, W: Quantizer> GemmDesc<'a, A, W> {
    /// [`run`](Self::run), with activations quantized if asked for.
    pub fn run_prequant<Y: Float>(
        self,
        prequant: Prequant,
        stream: &Stream,
        to: Destination<'_, 'a, Y>,
        workspace: Option<TensorViewMut<'a, f32>>,
    ) -> Result<()> {
        match prequant {
            Prequant::No => self.run(stream, to, workspace),
            Prequant::Yes => self.run_quantized(stream, to, workspace),
        }
    }

    fn run_quantized<Y: Float>(
        mut self,
        stream: &Stream,
        mut to: Destination<'_, 'a, Y>,
        workspace: Option<TensorViewMut<'a, f32>>,
    ) -> Result<()> {
        expect_encoding(self.op, W::DTYPE, stream.device().arch())?;
        if let Some(shape) = self.group_scales.block() {
            shape.check(self.op)?;
        }
        let k = self.a.view.shape().last().copied().unwrap_or(0);
        if self.group_scales.kind() == ScaleKind::Mx && !k.is_multiple_of(MX_BLOCK) {
            return Err(Error::shape(self.op, self.a.name, self.a.view.shape(), "K a multiple of 32"));
        }
        if k == 0 || self.a.view.numel() == 0 {
            // Nothing to quantize: sums are zero, whatever the tile.
            self.options.config =
                self.options.config.map(|config| self.with_plain_tile(config)).transpose()?;
            return self.run(stream, to, workspace);
        }
        let sizes = QuantizedSizes::new::<W, W::Scale>(self.a.view.shape(), W::columns(&self));
        if let Some(config) = self.on_the_fly(&sizes, workspace.as_ref())? {
            self.options.config = config;
            self.variant = Variant::Prequant;
            return self.run(stream, to, workspace);
        }
        let (values, scales, slices) = self.places(&sizes, &mut to, workspace)?;
        let gemm = W::quantized(&self, values.alias(), scales.alias());
        let checked = gemm.check(stream, to, Some(&slices))?;
        self.quantize_batches(stream, values, scales)?;
        gemm.launch(stream, checked, Some(slices))
    }

    /// A configuration for kernels of unquantized activations, which have fewer tiles.
    fn with_plain_tile(&self, config: GemmConfig) -> Result<GemmConfig> {
        let kernels = |a: DType, variant: Variant| {
            let family = Family::find(a, W::DTYPE, self.group_scales.kind(), variant);
            family.is_some_and(|family| family.kernels.has(config.tile))
        };
        let other = [(A::DTYPE, Variant::Prequant), (W::DTYPE, Variant::Plain)];
        let tile = match self.eligible()?.serves(config.tile) {
            false if other.iter().any(|&(a, variant)| kernels(a, variant)) => GemmTile::T64x64,
            _ => config.tile,
        };
        Ok(GemmConfig { tile, ..config })
    }

    /// Whether activations are quantized in registers, and with which configuration.
    #[expect(clippy::option_option, reason = "whether, and the option of the call")]
    fn on_the_fly(
        &self,
        quantized: &QuantizedSizes,
        workspace: Option<&TensorViewMut<f32>>,
    ) -> Result<Option<Option<GemmConfig>>> {
        let sizes = self.sizes()?;
        // Kernels that quantize have one scale for 128 columns.
        if self.group_scales.block().is_some_and(|shape| shape.k != GROUP) {
            return Ok(None);
        }
        let Ok(eligible) = (Self { variant: Variant::Prequant, ..*self }).eligible() else { return Ok(None) };
        let config = self.options.config;
        let room = workspace.map_or(0, TensorViewMut::numel);
        let wanted = match config {
            Some(config) => eligible.serves(config.tile),
            None if self.options.determinism == Determinism::BatchInvariant => false,
            None => sizes.m <= ON_THE_FLY_ROWS || room < quantized.len(),
        };
        if !self.vectorized(&sizes) || !wanted || !eligible.serves(GemmTile::S32x32) {
            return Ok(None);
        }
        // No kernel has tiles of more rows.
        let many = GemmConfig { tile: GemmTile::S32x32, splits: 1, group: 1 };
        Ok(Some(config.or_else(|| (sizes.m > ON_THE_FLY_ROWS).then_some(many))))
    }

    /// Where quantized values and scales go, and what is left of the workspace for split-K slices.
    #[expect(clippy::type_complexity, reason = "three parts of a workspace")]
    fn places<'w, Y: Float>(
        &self,
        sizes: &QuantizedSizes,
        to: &mut Destination<Y>,
        workspace: Option<TensorViewMut<'w, f32>>,
    ) -> Result<(TensorViewMut<'w, W>, TensorViewMut<'w, W::Scale>, TensorViewMut<'w, f32>)> {
        const ARG: &str = "workspace";
        let (op, a) = (self.op, &self.a);
        let room = workspace.as_ref().map_or(0, TensorViewMut::numel);
        let Some(workspace) = workspace.filter(|_| room >= sizes.len()) else {
            let want = format!("[{}] or longer, for quantized {}", sizes.len(), a.name);
            return Err(Error::shape(op, ARG, [room], want));
        };
        check_workspace(op, &workspace)?;
        a.view.expect_unit_stride(op, a.name)?;
        a.view.expect_aligned(op, a.name, size_of::<A>() as u64)?;
        let outputs =
            [((self.y, Some(&*to.y() as &dyn hk_core::Operand)), &[][..]), ((ARG, Some(&workspace)), &[])];
        check_aliases(op, &[(a.name, Some(&a.view))], &outputs)?;
        let [values, scales] = sizes.lens();
        let (values, rest) = workspace.split_at(0, values)?;
        let (scales, slices) = rest.split_at(0, scales)?;
        let values = values.cast::<W>(op, ARG)?.reshape_front(op, ARG, &sizes.values)?;
        Ok((values, scales.cast::<W::Scale>(op, ARG)?.reshape_front(op, ARG, &sizes.scales)?, slices))
    }

    /// Quantizes each batch of rows: the stride between batches is free.
    fn quantize_batches(
        &self,
        stream: &Stream,
        mut values: TensorViewMut<W>,
        mut scales: TensorViewMut<W::Scale>,
    ) -> Result<()> {
        let (op, a) = (self.op, self.a.view);
        if a.numel() == 0 {
            return Ok(());
        }
        if a.shape().len() < 3 {
            return W::quantize(stream, self, a, values, scales);
        }
        for b in 0..a.shape()[0] {
            let rows = a.slice(0, b..b + 1)?.flatten_rows(op, self.a.name)?;
            let q = values.reborrow().slice(0, b..b + 1)?.flatten_rows(op, self.a.name)?;
            let scale = scales.reborrow().slice(0, b..b + 1)?.flatten_rows(op, self.a.name)?;
            W::quantize(stream, self, rows, q, scale)?;
        }
        Ok(())
    }
}

/// Waves of a block of `hip/group_quant.hip`, each with a group; blocks a CU.
const GROUPS_OF_BLOCK: usize = 4;
const BLOCKS_PER_CU: usize = 8;

/// [`group_quant`] of groups of any length.
fn quantize_groups<A: Half, C: Int8OrFp8>(
    stream: &Stream,
    op: &'static str,
    a: TensorView<A>,
    mut q: TensorViewMut<C>,
    mut scale: TensorViewMut<f32>,
    group: usize,
) -> Result<()> {
    let [rows, cols] = a.dims::<2>(op, "a")?;
    let kernel = if A::DTYPE == DType::F16 {
        const { Params::kernel("gemm_group_quant_f16") }
    } else {
        const { Params::kernel("gemm_group_quant_bf16") }
    };
    let mut launch = stream.launch(op);
    let groups = cols.div_ceil(group);
    let params = Params {
        x: launch.input("a", &a)?.data(),
        q: launch.output("workspace", &mut q)?.data(),
        scale: launch.output("workspace", &mut scale)?.data(),
        x_row: a.strides()[0] as i64,
        rows: rows as u64,
        cols: cols as u32,
        groups: groups as u32,
        group: group as u32,
        format: C::FORMAT,
        pad: 0,
    };
    let blocks = rows.saturating_mul(groups).div_ceil(GROUPS_OF_BLOCK);
    let most = stream.device().info().compute_units as usize * BLOCKS_PER_CU;
    // SAFETY: values and scales, which are contiguous, are as many as `a` has elements and groups; the kernel covers both,
    // whatever the grid.
    unsafe { launch.run(&stream.kernel(kernel)?, LaunchConfig::grid_1d(blocks.min(most)), &params) }
}
