//! Two GEMMs with the same M and K in one launch: quantized operands, and 16-bit floats.

use super::check::{Checked, check_config, check_room, check_workspace, erased};
use super::desc::{Destination, Determinism, GemmDesc, GemmOptions};
use super::launch::{KernelArgs, store_mode};
use super::params::{BlockAndPlain, MixedAndPlain};
use super::plan::{MOST_SPLITS, batch_invariant, slice_of_two};
use super::select::{GemmConfig, GemmTile, Job, Second};
use super::table::Kernels;
use crate::element::Half;
use hk_core::{
    Element, Error, Float, LaunchConfig, NamedOperand, Result, Stream, TensorViewMut, check_aliases,
};

/// Checks both GEMMs, and launches them. The options are the first one's.
pub(crate) fn run_two<'a, X: Element, W: Element, H: Half, Y1: Float, Y2: Float>(
    stream: &Stream,
    mut first: GemmDesc<'a, X, W>,
    mut second: GemmDesc<'a, H, H>,
    y1: TensorViewMut<Y1>,
    y2: TensorViewMut<Y2>,
    workspace: Option<TensorViewMut<f32>>,
) -> Result<()> {
    const WORKSPACE: &str = "workspace";
    let op = first.op;
    let options = first.options;
    options.expect_no_activation(op)?;
    let sizes = [first.sizes()?, second.sizes()?];
    let [(m, k), of_second] = sizes.map(|sizes| (sizes.m, sizes.k));
    if of_second != (m, k) {
        let want = format!("[{m}, {k}] (M and K of {})", first.a.name);
        return Err(Error::shape(op, second.a.name, second.a.view.shape(), want));
    }
    if let Some(workspace) = &workspace {
        check_workspace(op, workspace)?;
    }
    let inputs: Vec<NamedOperand> = first.inputs().into_iter().chain(second.inputs()).collect();
    let outputs: [(NamedOperand, &[&'static str]); 3] = [
        ((first.y, Some(&y1)), &[]),
        ((second.y, Some(&y2)), &[]),
        ((WORKSPACE, erased(workspace.as_ref())), &[]),
    ];
    check_aliases(op, &inputs, &outputs)?;

    // One configuration for both.
    let vectorized = first.vectorized(&sizes[0]) && second.vectorized(&sizes[1]);
    let eligible = first.eligible()?;
    let slices = [first.slice(&sizes[0]), second.slice(&sizes[1])];
    let space = workspace.as_ref().map_or(0, TensorViewMut::numel);
    let room = space / slice_of_two(slices).max(1);
    // Unsummed slices are as many as y1 and y2 have.
    let whole = options.skip_reduce;
    let config = match options.config {
        Some(config) => {
            check_config(op, config, &eligible, vectorized)?;
            if !whole {
                check_room(op, config.splits, slice_of_two(slices), space)?;
            }
            config
        }
        None if options.determinism == Determinism::BatchInvariant => batch_invariant(vectorized),
        None => {
            let job = Job {
                info: stream.device().info(),
                precision: eligible.family.precision,
                scales: eligible.family.scales,
                sizes: [1, m, sizes[0].n, k],
                vectorized,
                most_splits: if whole { 1 } else { room.clamp(1, MOST_SPLITS) },
                second: Some(Second { precision: H::PRECISION, n: sizes[1].n }),
            };
            job.choose(&eligible)
        }
    };
    let of = |tile: GemmTile, outputs: usize| {
        let splits = if whole || outputs == 0 { 1 } else { config.splits };
        GemmOptions { config: Some(GemmConfig { tile, splits, ..config }), ..options }
    };
    (first.options, second.options) =
        (of(config.tile, sizes[0].outputs()), of(config.tile.beside(), sizes[1].outputs()));
    let (slices1, slices2) = match workspace.filter(|_| !whole && config.splits > 1) {
        Some(workspace) => {
            // With room for flags both meet in this launch.
            let columns = [slices[0], slices[1]].map(|slice| slice / m.max(1));
            let tiles = [config.tile, config.tile.beside()];
            let meet = |i: usize| tiles[i].meet(stream.device().info(), [1, m, columns[i]], config.splits);
            let of_first = match (meet(0), meet(1)) {
                (Some(first), Some(second)) if first.len.saturating_add(second.len) <= space => first.len,
                _ => config.splits.saturating_mul(slices[0].next_multiple_of(4)),
            };
            let (first, second) = workspace.split_at(0, of_first)?;
            (Some(first), Some(second))
        }
        None => (None, None),
    };
    let mut checked1 = first.check(stream, Destination::Store(y1), slices1.as_ref())?;
    let mut checked2 = second.check(stream, Destination::Store(y2), slices2.as_ref())?;
    if whole && checked1.plan.splits != checked2.plan.splits {
        let want = format!("[{}, {m}, {}] (split-K slices as in y1)", checked1.plan.splits, sizes[1].n);
        return Err(Error::shape(op, second.y, checked2.to.y().shape(), want));
    }
    let blocks = checked1.plan.blocks + checked2.plan.blocks;
    if u32::try_from(blocks).is_err() {
        return Err(Error::too_large(op, first.y, format!("{blocks} tiles"), u32::MAX.into()));
    }
    if blocks == 0 {
        return Ok(());
    }

    let (store1, mut slices1) = store_mode(&checked1, slices1);
    let (store2, mut slices2) = store_mode(&checked2, slices2);
    let mut launch = stream.launch(op);
    let Checked { to, sizes: of_y, plan } = &mut checked1;
    let args1 = first.args(&mut launch, to, of_y, plan, store1, slices1.as_mut())?;
    let Checked { to, sizes: of_y, plan } = &mut checked2;
    let args2 = second.args(&mut launch, to, of_y, plan, store2, slices2.as_mut())?;
    let grid = LaunchConfig::grid_1d(blocks);
    // SAFETY: as for each GEMM by itself: the checks make its tensors as long as its tiles cover, and there is a block for each
    // tile of both.
    unsafe {
        match (args1, args2, &eligible.family.kernels) {
            (KernelArgs::Block(args1), KernelArgs::Plain(second), Kernels::BlockAndPlain(rows)) => {
                let kernel = first.kernel(stream, rows, config.tile, k)?;
                launch.run(&kernel, grid, &BlockAndPlain { first: args1, second })
            }
            (KernelArgs::Mixed(args1), KernelArgs::Plain(second), Kernels::MixedAndPlain(rows)) => {
                let kernel = first.kernel(stream, rows, config.tile, k)?;
                launch.run(&kernel, grid, &MixedAndPlain { first: args1, second })
            }
            _ => Err(first.no_kernel()),
        }?;
    }
    if let Some(slices) = slices1 {
        first.reduce_slices(stream, &mut checked1.to, &checked1.sizes, &checked1.plan, slices)?;
    }
    if let Some(slices) = slices2 {
        second.reduce_slices(stream, &mut checked2.to, &checked2.sizes, &checked2.plan, slices)?;
    }
    Ok(())
}
