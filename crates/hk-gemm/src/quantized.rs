//! Activations that are quantized before they are multiplied: on their way, or ahead of the product.

use crate::config::{GemmConfig, GemmTile};
use crate::problem::{Product, To, outputs, packed};
use hk_core::{Element, Error, Float, Result, TensorView, TensorViewMut, check_aliases};
use std::marker::PhantomData;

/// Most rows that are quantized by each block on their way, rather than once ahead of the product.
pub(crate) const ROWS_ON_THEIR_WAY: usize = 32;

/// The codes `[.., M, K]` and scales `[.., M, groups]` of activations.
pub(crate) struct Quantized<Q, S> {
    codes: Vec<usize>,
    scales: Vec<usize>,
    types: PhantomData<(Q, S)>,
}

impl<Q: Element, S: Element> Quantized<Q, S> {
    /// Of activations `[.., M, K]`, with a scale for each `group` columns.
    pub fn new(shape: &[usize], group: usize) -> Self {
        let with = |last: usize| {
            let mut shape = shape.to_vec();
            if let Some(k) = shape.last_mut() {
                *k = last;
            }
            shape
        };
        let k = shape.last().copied().unwrap_or(0);
        Self { codes: with(k / packed::<Q>()), scales: with(k.div_ceil(group)), types: PhantomData }
    }

    /// f32 of the codes, and of the scales, each on 16 bytes.
    fn lens(&self) -> [usize; 2] {
        let all = |shape: &[usize]| shape.iter().fold(1, |n: usize, &len| n.saturating_mul(len));
        let room = |bytes: usize| bytes.div_ceil(16).saturating_mul(4);
        [all(&self.codes).saturating_mul(size_of::<Q>()), all(&self.scales).saturating_mul(size_of::<S>())]
            .map(room)
    }

    /// f32 of a workspace for both.
    pub fn len(&self) -> usize {
        let [codes, scales] = self.lens();
        codes.saturating_add(scales)
    }

    /// Whether `product`, whose kernels quantize activations on their way, is to be taken, and with which configuration.
    #[expect(clippy::option_option, reason = "whether, and the option of the call")]
    pub fn on_their_way<X: Element, W: Element>(
        &self,
        product: &Product<X, W>,
        workspace: Option<&TensorViewMut<f32>>,
    ) -> Result<Option<Option<GemmConfig>>> {
        let (vectors, m) = product.vectors()?;
        if m == 0 {
            return Ok(Some(None));
        }
        let config = product.options.config;
        let room = workspace.map_or(0, TensorViewMut::numel);
        let wanted = match config {
            Some(config) => product.serves(config.tile),
            None => m <= ROWS_ON_THEIR_WAY && product.serves(GemmTile::S32x32) || room < self.len(),
        };
        if !vectors || !wanted || !product.serves(GemmTile::S32x32) {
            return Ok(None);
        }
        // There are no kernels of more rows.
        let many = GemmConfig { tile: GemmTile::S32x32, splits: 1, group: 1 };
        Ok(Some(config.or_else(|| (m > ROWS_ON_THEIR_WAY).then_some(many))))
    }

    /// Codes, scales, and what is left of the workspace, for parts of K.
    pub fn places<'w, T: Element, Y: Float>(
        &self,
        op: &'static str,
        a: &TensorView<T>,
        to: &mut To<Y>,
        workspace: Option<TensorViewMut<'w, f32>>,
    ) -> Result<(TensorViewMut<'w, Q>, TensorViewMut<'w, S>, TensorViewMut<'w, f32>)> {
        const ARG: &str = "workspace";
        let room = workspace.as_ref().map_or(0, TensorViewMut::numel);
        let Some(workspace) = workspace.filter(|_| room >= self.len()) else {
            let want = format!("[{}] or longer, for the codes of a", self.len());
            return Err(Error::shape(op, ARG, [room], want));
        };
        workspace.dims::<1>(op, ARG)?;
        workspace.expect_contiguous(op, ARG)?;
        workspace.expect_aligned(op, ARG, 16)?;
        a.expect_unit_stride(op, "a")?;
        a.expect_aligned(op, "a", size_of::<T>() as u64)?;
        let outputs =
            [(("y", Some(&*to.y() as &dyn hk_core::Operand)), &[][..]), ((ARG, Some(&workspace)), &[])];
        check_aliases(op, &[("a", Some(a))], &outputs)?;
        let [codes, scales] = self.lens();
        let (codes, rest) = workspace.split_at(0, codes)?;
        let (scales, planes) = rest.split_at(0, scales)?;
        let codes = codes.cast::<Q>(op, ARG)?.reshape_front(op, ARG, &self.codes)?;
        Ok((codes, scales.cast::<S>(op, ARG)?.reshape_front(op, ARG, &self.scales)?, planes))
    }

    /// Calls `quantize(x, q, scale)` for each batch of rows: they need not follow each other as rows do.
    pub fn each_batch<'a, T: Element>(
        &self,
        op: &'static str,
        a: TensorView<'a, T>,
        mut codes: TensorViewMut<Q>,
        mut scales: TensorViewMut<S>,
        quantize: impl Fn(TensorView<'a, T>, TensorViewMut<Q>, TensorViewMut<S>) -> Result<()>,
    ) -> Result<()> {
        if outputs([1, a.numel(), 1]) == 0 {
            return Ok(());
        }
        let batches = if a.shape().len() == 3 { a.shape()[0] } else { 1 };
        for b in 0..batches {
            let (x, q, scale) = if a.shape().len() == 3 {
                let one = b..b + 1;
                (
                    a.slice(0, one.clone())?,
                    codes.reborrow().slice(0, one.clone())?,
                    scales.reborrow().slice(0, one)?,
                )
            } else {
                (a, codes.reborrow(), scales.reborrow())
            };
            quantize(x.flatten_rows(op, "a")?, q.flatten_rows(op, "a")?, scale.flatten_rows(op, "a")?)?;
        }
        Ok(())
    }
}
