//! The launches of a GEMM: kernel arguments, main kernel, reduction of split-K slices.

use super::check::{Checked, Sizes};
use super::desc::{Accumulate, Destination, GemmDesc, GroupScales, Grouping};
use super::operands::MxScaleView;
use super::params::{
    BlockParams, BlockScale, BulkParams, Epilogue, Fusion, Grid, Groups, MixedParams, NO_ACTIVATION, Operand,
    Output, Params, ReduceParams, SplitK,
};
use super::plan::{Plan, outputs};
use super::select::{GemmTile, STAGE_BYTES};
use super::table::{Kernels, MxOrder, TileKernel, bulk_kernel};
use crate::kernels::hk::TensorMap as HkTensorMap;
use bytemuck::{Pod, Zeroable};
use hk_core::plan::arrive::next_mark;
use hk_core::quant::BlockRule;
use hk_core::{
    Element, Error, Float, Kernel, KernelRef, Launch, LaunchConfig, Result, Stream, TensorMap, TensorView,
    TensorViewMut,
};

/// What an epilogue does with sums: `StoreMode` in `hip/include/gemm/args.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Store {
    Round = 0,
    Slice = 1,
    Add = 2,
}

/// The parameters of a main kernel.
pub enum KernelArgs {
    Plain(Params),
    Block(BlockParams),
    Mixed(MixedParams),
}

/// The kernels of `hip/reduce.hip`.
pub(crate) const REDUCE: KernelRef<ReduceParams> = ReduceParams::kernel("gemm_reduce");
const ZERO: KernelRef<ReduceParams> = ReduceParams::kernel("gemm_zero");
/// `Fusion::Kind::SplitCat` in `hip/include/gemm/args.h`.
const SPLIT_CAT: u32 = 3;
/// How `a` is quantized to mxfp4.
const MX_RULE: BlockRule = BlockRule::fp4(hk_core::quant::BlockScale::Even, 0);
/// Outputs of a lane, threads of a block, and blocks a CU, of `hip/reduce.hip`.
pub(crate) const REDUCED_PART: usize = 8;
pub(crate) const REDUCE_THREADS: usize = 256;
pub(crate) const REDUCE_BLOCKS_PER_CU: usize = 8;

/// The store mode of the main kernel, and the slices of the workspace that it writes, if it writes any.
pub(crate) fn store_mode<'w, Y: Float>(
    checked: &Checked<Y>,
    slices: Option<TensorViewMut<'w, f32>>,
) -> (Store, Option<TensorViewMut<'w, f32>>) {
    if matches!(checked.to, Destination::Slices(_)) {
        return (Store::Slice, slices);
    }
    let slices = slices.filter(|_| checked.plan.splits > 1 && checked.sizes.outputs() > 0);
    (if slices.is_some() { Store::Slice } else { Store::Round }, slices)
}

impl<'a, A: Element, W: Element> GemmDesc<'a, A, W> {
    /// Checks everything, and launches the GEMM. `workspace`: f32 for the partial sums of split-K slices.
    pub fn run<Y: Float>(
        self,
        stream: &Stream,
        to: Destination<'_, 'a, Y>,
        workspace: Option<TensorViewMut<f32>>,
    ) -> Result<()> {
        let checked = self.check(stream, to, workspace.as_ref())?;
        self.launch(stream, checked, workspace)
    }

    /// Launches what has been checked, with the same workspace.
    pub fn launch<Y: Float>(
        &self,
        stream: &Stream,
        Checked { mut to, sizes, plan }: Checked<'_, 'a, Y>,
        workspace: Option<TensorViewMut<f32>>,
    ) -> Result<()> {
        if sizes.outputs() == 0 || to.y().numel() == 0 {
            return Ok(());
        }
        match (&mut to, workspace.filter(|_| plan.splits > 1)) {
            (Destination::Atomic(_, accumulate), _) => {
                let add = *accumulate == Accumulate::Add;
                if !add && plan.splits > 1 {
                    self.reduce(stream, &mut to, &sizes, None)?;
                }
                let store = if add || plan.splits > 1 { Store::Add } else { Store::Round };
                self.multiply(stream, &mut to, &sizes, &plan, store, None)
            }
            (Destination::Slices(_), _) => self.multiply(stream, &mut to, &sizes, &plan, Store::Slice, None),
            (_, Some(mut slices)) => {
                self.multiply(stream, &mut to, &sizes, &plan, Store::Slice, Some(slices.reborrow()))?;
                self.reduce_slices(stream, &mut to, &sizes, &plan, slices)
            }
            (_, None) => self.multiply(stream, &mut to, &sizes, &plan, Store::Round, None),
        }
    }

    /// The kernel of a tile, among the `rows` of its family.
    pub fn kernel<P: Pod>(
        &self,
        stream: &Stream,
        rows: &'static [TileKernel<P>],
        tile: GemmTile,
        k: usize,
    ) -> Result<Kernel<P>> {
        let Some(row) = TileKernel::find(rows, tile) else {
            return Err(Error::argument(self.op, "tile", format!("{tile:?}"), "a tile that has a kernel"));
        };
        let scales = match &self.group_scales {
            GroupScales::Mx { a, w } => {
                let order = w.view.order(k);
                let same = a.as_ref().is_none_or(|a| a.view.order(k) == order);
                if same { order } else { MxOrder::Any }
            }
            _ => MxOrder::Any,
        };
        stream.kernel(row.kernel(scales))
    }

    /// The main kernel. `slices`: where the partial sums of split-K slices go, if not to the output.
    fn multiply<Y: Float>(
        &self,
        stream: &Stream,
        to: &mut Destination<'_, 'a, Y>,
        sizes: &Sizes,
        plan: &Plan,
        store: Store,
        mut slices: Option<TensorViewMut<f32>>,
    ) -> Result<()> {
        let mut launch = stream.launch(self.op);
        let args = self.args(&mut launch, to, sizes, plan, store, slices.as_mut())?;
        let (grid, tile) = (LaunchConfig::grid_1d(plan.blocks), plan.config.tile);
        // SAFETY: the checks make operands, scales, vectors, lists and outputs as long as M, N and K, which the tiles cover and
        // the kernel bounds its accesses by; the workspace has room for as many slices.
        unsafe {
            match (&args, &plan.eligible.family.kernels) {
                (KernelArgs::Plain(params), Kernels::Params(_)) if plan.bulk => {
                    let kernel = bulk_kernel(A::DTYPE, tile).ok_or_else(|| self.no_kernel())?;
                    let params = self.bulk_params(&launch, params, plan)?;
                    launch.run(&stream.kernel(kernel)?, grid, &params)
                }
                (KernelArgs::Plain(params), Kernels::Params(rows)) => {
                    launch.run(&self.kernel(stream, rows, tile, sizes.k)?, grid, params)
                }
                (KernelArgs::Block(params), Kernels::BlockParams(rows)) => {
                    launch.run(&self.kernel(stream, rows, tile, sizes.k)?, grid, params)
                }
                (KernelArgs::Mixed(params), Kernels::MixedParams(rows)) => {
                    launch.run(&self.kernel(stream, rows, tile, sizes.k)?, grid, params)
                }
                _ => Err(self.no_kernel()),
            }
        }
    }

    /// The parameters of kernels by bulk tensor copies.
    fn bulk_params(&self, launch: &Launch, params: &Params, plan: &Plan) -> Result<BulkParams> {
        let columns = STAGE_BYTES * 2 / size_of::<A>();
        let (rows, width) = (plan.config.tile.shape().0 as u32, plan.tile_n as u32);
        let Params { a, w, grid, .. } = params;
        let (k, stride) =
            (u64::from(grid.k_bytes) / size_of::<A>() as u64, [a, w].map(|x| x.layout.row as u64));
        let of_a = TensorMap {
            dtype: A::DTYPE,
            data: a.data,
            sizes: &[k, u64::from(a.rows)],
            strides: &stride[..1],
            tile: &[columns as u32, rows],
            long_reads: false,
        };
        // `WarpgroupRows::of_mma` in `hk/warpgroup.h`.
        let of_w = TensorMap {
            data: w.data,
            sizes: &[k, 2, 4, 2, u64::from(w.rows) / 16],
            strides: &[1, 4, 2, 16].map(|rows| rows * stride[1]),
            tile: &[columns as u32, 2, 4, 2, width / 16],
            long_reads: true,
            ..of_a
        };
        let map = |arg, tensor| Ok::<_, Error>(HkTensorMap { word: launch.tensor_map(arg, tensor)? });
        Ok(BulkParams {
            a: map(self.a.name, &of_a)?,
            w: map(self.w.name, &of_w)?,
            gemm: *params,
            pad: [0; 3],
        })
    }

    /// For parameters that no kernel of the family takes.
    pub fn no_kernel(&self) -> Error {
        Error::unsupported(self.op, "its operands", "no kernel takes them with this epilogue")
    }

    /// The parameters of the main kernel.
    pub fn args<'l, Y: Float>(
        &self,
        launch: &mut Launch<'l>,
        to: &'l mut Destination<'_, 'a, Y>,
        sizes: &Sizes,
        plan: &Plan,
        store: Store,
        slices: Option<&'l mut TensorViewMut<'_, f32>>,
    ) -> Result<KernelArgs>
    where
        'a: 'l,
    {
        let meet = plan.meet.filter(|_| slices.is_some());
        let partial = slices.is_some() && meet.is_none();
        let store = if meet.is_some() { Store::Round } else { store };
        let mut split_k = SplitK::zeroed();
        let (out, fusion) = match slices {
            Some(slices) if let Some(meet) = meet => {
                let partials = launch.output_address("workspace", slices)?;
                let (stride, mark) = ((meet.slice * size_of::<f32>()) as i64, next_mark());
                let flags = partials + (plan.splits * meet.slice * size_of::<f32>()) as u64;
                split_k = SplitK { partials, stride, flags, mark };
                self.output(launch, to)?
            }
            Some(slices) => {
                let data = launch.output_address("workspace", slices)?;
                let rows = [sizes.m, self.columns(sizes)];
                (Output::slices(data, rows, self.slice(sizes)), Fusion::zeroed())
            }
            None => self.output(launch, to)?,
        };
        let mut epilogue = self.epilogue(launch, sizes, &out, store, [!partial, true])?;
        epilogue.plain = epilogue.is_plain(&fusion).into();
        let (stage_shift, w) = (self.stage_shift(), &self.w.view);
        let common = Params {
            a: Operand::new(&launch.input(self.a.name, &self.a.view)?, size_of::<A>(), false, stage_shift),
            w: Operand::new(&launch.input(self.w.name, w.view())?, size_of::<W>(), w.shuffled(), stage_shift),
            grid: Grid {
                m_tiles: plan.m_tiles as u32,
                n_tiles: plan.n_tiles as u32,
                group: plan.config.group.clamp(1, plan.m_tiles) as u32,
                splits: plan.splits as u32,
                split_bytes: plan.split_bytes as u32,
                k_bytes: self.bytes(sizes.k) as u32,
                blocks: plan.blocks as u32,
                tile_n: plan.tile_n as u32,
            },
            epilogue,
            split_k,
        };
        let Params { a, w, grid, .. } = common;
        let mixed = MixedParams { a, w, grid, epilogue, fusion, split_k, ..MixedParams::zeroed() };
        Ok(match &self.group_scales {
            GroupScales::None => KernelArgs::Plain(common),
            GroupScales::Block { a: Some(of_a), w: of_w, shape } => {
                let bytes = shape.k << stage_shift;
                let a_scale = BlockScale::new(&launch.input(of_a.name, &of_a.view)?, 1, bytes);
                let w_scale = BlockScale::new(&launch.input(of_w.name, &of_w.view)?, shape.n, bytes);
                KernelArgs::Block(BlockParams { a, w, grid, epilogue, a_scale, w_scale, fusion, split_k })
            }
            GroupScales::Block { a: None, w: of_w, shape } => {
                let bytes = (shape.k << stage_shift) * size_of::<A>();
                let w_scale = BlockScale::new(&launch.input(of_w.name, &of_w.view)?, shape.n, bytes);
                KernelArgs::Mixed(MixedParams { w_scale, ..mixed })
            }
            GroupScales::Mx { a: of_a, w: of_w } => {
                let mut params = MixedParams { rule: MX_RULE, ..mixed };
                let mut scale = |name, view: &MxScaleView<'a>| view.params(launch, name, sizes.k);
                if let Some(of_a) = of_a {
                    params.a_mx = scale(of_a.name, &of_a.view)?;
                }
                params.w_mx = scale(of_w.name, &of_w.view)?;
                KernelArgs::Mixed(params)
            }
        })
    }

    /// Sums the split-K slices of a launch whose blocks have not.
    pub fn reduce_slices<Y: Float>(
        &self,
        stream: &Stream,
        to: &mut Destination<'_, 'a, Y>,
        sizes: &Sizes,
        plan: &Plan,
        slices: TensorViewMut<f32>,
    ) -> Result<()> {
        if plan.meet.is_some() {
            return Ok(());
        }
        self.reduce(stream, to, sizes, Some((slices, plan.splits)))
    }

    /// A kernel of `hip/reduce.hip`: sums so many split-K slices; without any, writes zeros.
    fn reduce<Y: Float>(
        &self,
        stream: &Stream,
        to: &mut Destination<'_, 'a, Y>,
        sizes: &Sizes,
        slices: Option<(TensorViewMut<f32>, usize)>,
    ) -> Result<()> {
        let kernel = if slices.is_some() { REDUCE } else { ZERO };
        let mut launch = stream.launch(self.op);
        let (from, splits) = match slices {
            Some((mut slices, splits)) => {
                let data = launch.output_address("workspace", &mut slices)?;
                (Output::slices(data, [sizes.m, self.columns(sizes)], self.slice(sizes)), splits)
            }
            None => (Output::slices(0, [0, 0], 0), 0),
        };
        let (out, fusion) = self.output(&mut launch, to)?;
        let parts = sizes.n.div_ceil(REDUCED_PART);
        let params = ReduceParams {
            epilogue: self.epilogue(&mut launch, sizes, &out, Store::Round, [splits > 0, false])?,
            fusion,
            partials: from.data,
            split: from.split,
            batch: from.batch,
            row: from.row,
            splits: splits as u32,
            parts: parts as u32,
            batches: sizes.batch as u32,
            gated: self.gated().into(),
            vectors: from.vectors.into(),
            pad: 0,
        };
        let threads = outputs([sizes.batch, sizes.m, parts]);
        let most = stream.device().info().compute_units as usize * REDUCE_BLOCKS_PER_CU;
        // SAFETY: y and the slices are as long as batch, M and N, which the kernels cover whatever the grid.
        unsafe {
            launch.run(
                &stream.kernel(kernel)?,
                LaunchConfig::grid_1d(threads.div_ceil(REDUCE_THREADS).min(most)),
                &params,
            )
        }
    }

    /// The output, and what the epilogue fuses.
    fn output<'l, Y: Float>(
        &self,
        launch: &mut Launch<'l>,
        to: &'l mut Destination<'_, 'a, Y>,
    ) -> Result<(Output, Fusion)>
    where
        'a: 'l,
    {
        let mut fusion = Fusion::zeroed();
        if let Some(divisor) = &self.fusions.divisor {
            fusion.divisor = launch.input("y_scale", divisor)?.data();
        }
        if let Some((kind, a, b)) = &self.fusions.mul_add {
            fusion.kind = *kind as u32;
            fusion.a = a.term(launch, "a")?;
            fusion.b = b.term(launch, "b")?;
        }
        if let Destination::SplitCat { c1, c2, cat } = to {
            let stride = |strides: &[usize], axis: usize| strides[axis] as i64;
            let (c1_strides, c2_strides, cat_strides) = (c1.strides(), c2.strides(), cat.strides());
            let [head, tail, extra] = [c1.shape()[2] - cat.shape()[2], c2.shape()[2], cat.shape()[2]];
            fusion.kind = SPLIT_CAT;
            fusion.y_head = stride(c1_strides, 1);
            (fusion.rest_row, fusion.rest_head) = (stride(c2_strides, 0), stride(c2_strides, 1));
            (fusion.cat_row, fusion.cat_head) = (stride(cat_strides, 0), stride(cat_strides, 1));
            [fusion.head, fusion.tail, fusion.extra] = [head as u32, tail as u32, extra as u32];
            fusion.cat_type = cat.type_index();
            let eights = |n: usize| n.is_multiple_of(REDUCED_PART);
            let whole = eights(head) && eights(tail) && c1.rows_aligned(16) && c2.rows_aligned(16);
            fusion.whole = (whole && cat.rows_aligned(16)).into();
            let row = stride(c1_strides, 0);
            fusion.rest = launch.output("c2", &mut c2.reborrow())?.data();
            fusion.cat = cat.address(launch, "y")?;
            let out = Output::new::<Y>(&launch.output(self.y, &mut c1.reborrow())?, false);
            return Ok((Output { row, ..out }, fusion));
        }
        // Slices are the first axis, whatever the rank.
        let slices = matches!(to, Destination::Slices(_));
        let y = to.y();
        let (aligned, first) = (y.rows_aligned(16), y.strides()[0] as i64);
        let out = Output::new::<Y>(&launch.output(self.y, &mut y.reborrow())?, aligned);
        Ok((Output { split: if slices { first } else { 0 }, ..out }, fusion))
    }

    fn epilogue<'l>(
        &self,
        launch: &mut Launch<'l>,
        sizes: &Sizes,
        out: &Output,
        store: Store,
        [with_bias, with_scales]: [bool; 2],
    ) -> Result<Epilogue>
    where
        'a: 'l,
    {
        let mut e = Epilogue {
            y: out.data,
            y_batch: out.batch,
            y_row: out.row,
            y_split: out.split,
            rows: sizes.m as u32,
            cols: sizes.n as u32,
            y_type: out.type_,
            store: store as u32,
            activation: self.options.activation.map_or(NO_ACTIVATION, |a| a as u32),
            vectors: out.vectors.into(),
            ..Epilogue::zeroed()
        };
        if let Some(bias) = self.bias.as_ref().filter(|_| with_bias) {
            e.bias = bias.view.address(launch, bias.name)?;
            e.bias_type = bias.view.type_index();
            e.bias_batch = sizes.n as i64;
        }
        let step = |t: &TensorView<f32>| u32::from(t.numel() != 1);
        if let Some(a) = self.row_scales.a.as_ref().filter(|_| with_scales) {
            e.a_scale_step = step(&a.view);
            e.a_scale_batch = i64::from(e.a_scale_step) * sizes.m as i64;
            e.a_scale = launch.input(a.name, &a.view)?.data();
        }
        if let Some(w) = self.row_scales.w.as_ref().filter(|_| with_scales) {
            e.w_scale_step = step(&w.view);
            e.w_scale_batch = i64::from(e.w_scale_step) * sizes.n as i64;
            e.w_scale = launch.input(w.name, &w.view)?.data();
        }
        let kind = match self.grouping {
            Grouping::Batches => 0,
            Grouping::Masked(_) => 1,
            Grouping::Rows(_) => 2,
        };
        let data = match self.grouping.list() {
            Some(list) => launch.input(list.name, list.view)?.data(),
            None => 0,
        };
        e.groups = Groups { data, kind, matrices: sizes.matrices as u32 };
        Ok(e)
    }
}
