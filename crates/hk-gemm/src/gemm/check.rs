//! Checks of a GEMM: shapes, layouts, aliasing, configuration.

use super::desc::{Arg, Destination, GemmDesc, GroupScales, Grouping, LIMIT, VECTOR_GROUP};
use super::operands::{FloatView, MX_BLOCK, MxScaleView, check_shuffled};
use super::plan::{Plan, outputs};
use super::select::{GemmConfig, GemmTile, STAGE_BYTES};
use super::table::Eligible;
use hk_core::{
    Arch, DType, Element, Error, Float, NamedOperand, Result, Stream, TensorView, TensorViewMut,
    check_aliases,
};

/// Sizes of a GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    pub batch: usize,
    /// Matrices of w.
    pub matrices: usize,
    pub m: usize,
    /// Columns of the output: half the rows of gated weights.
    pub n: usize,
    pub k: usize,
}

impl Sizes {
    /// Elements of an output.
    pub fn outputs(&self) -> usize {
        outputs([self.batch, self.m, self.n])
    }
}

/// A call that has passed all checks, and how it is launched.
pub struct Checked<'t, 'a, Y: Float> {
    pub to: Destination<'t, 'a, Y>,
    pub sizes: Sizes,
    pub plan: Plan,
}

/// Rows that begin within 2 GiB of a tile's first one are reached by 32-bit offsets.
pub(crate) const WINDOW_BYTES: usize = 1 << 31;
/// Rows of a tile at most.
const TILE_ROWS: usize = 256;
/// The longest sum of int8 products that an i32 holds.
const LONGEST_I8: usize = (1 << 17) - 1;

/// Shape of an operand: `[batch, rows, cols]` or `[rows, cols]`.
fn matrix(op: &'static str, arg: &'static str, shape: &[usize], rank: usize) -> Result<[usize; 3]> {
    match (shape, rank) {
        (&[rows, cols], 2) => Ok([1, rows, cols]),
        (&[batch, rows, cols], 3) => Ok([batch, rows, cols]),
        _ => {
            Err(Error::shape(op, arg, shape, if rank == 2 { "[rows, cols]" } else { "[batch, rows, cols]" }))
        }
    }
}

pub(crate) fn erased<T: hk_core::Operand>(operand: Option<&T>) -> Option<&dyn hk_core::Operand> {
    operand.map(|t| t as &dyn hk_core::Operand)
}

fn erased_arg<T: hk_core::Operand>(arg: &Arg<T>) -> NamedOperand<'_> {
    (arg.name, Some(&arg.view))
}

/// Refuses the fp8 encoding that the matrix instructions of a target do not take.
pub(crate) fn expect_encoding(op: &'static str, dtype: DType, arch: Arch) -> Result<()> {
    if !dtype.is_fp8_of_another(arch) {
        return Ok(());
    }
    let reason = "GEMMs take fp8e4m3fnuz on gfx942, fp8e4m3 on gfx950 and sm_90";
    Err(Error::unsupported(op, format!("{dtype} on {arch}"), reason))
}

/// Refuses a K whose int8 sums may not fit an i32.
pub(crate) fn expect_i32_sums(op: &'static str, arg: &'static str, a: DType, k: usize) -> Result<()> {
    if a == DType::I8 && k > LONGEST_I8 {
        let want = format!("at most {LONGEST_I8}, so that sums fit i32");
        return Err(Error::argument(op, arg, format!("{k} columns"), want));
    }
    Ok(())
}

/// Checks a configuration that options ask for. `vectorized`: the operands' layout permits 16-byte loads.
pub(crate) fn check_config(
    op: &'static str,
    config: GemmConfig,
    eligible: &Eligible,
    vectorized: bool,
) -> Result<()> {
    if config.splits == 0 || config.splits > u16::MAX as usize {
        return Err(Error::argument(op, "splits", config.splits, "1 to 65535"));
    }
    if config.group == 0 {
        return Err(Error::argument(op, "group", config.group, "at least 1"));
    }
    if !vectorized && config.tile != GemmTile::Elements {
        let want = "GemmTile::Elements, as rows do not begin on 16 bytes, are no multiple of 16 bytes long, or lie too far apart, \
                    or groups have fewer than 16 columns";
        return Err(Error::argument(op, "tile", format!("{:?}", config.tile), want));
    }
    if !eligible.serves(config.tile) {
        let want = format!("one of {:?}", eligible.tiles().collect::<Vec<_>>());
        return Err(Error::argument(op, "tile", format!("{:?}", config.tile), want));
    }
    Ok(())
}

/// Checks that a workspace has room for the slices of a configuration.
pub(crate) fn check_room(op: &'static str, splits: usize, slice: usize, workspace: usize) -> Result<()> {
    if splits > 1 && slice > 0 && splits > workspace / slice {
        let want = format!("[{}] or longer ({splits} splits)", splits.saturating_mul(slice));
        return Err(Error::shape(op, "workspace", [workspace], want));
    }
    Ok(())
}

/// Layout and alignment of a workspace.
pub(crate) fn check_workspace(op: &'static str, workspace: &TensorViewMut<f32>) -> Result<()> {
    workspace.dims::<1>(op, "workspace")?;
    workspace.expect_contiguous(op, "workspace")?;
    workspace.expect_aligned(op, "workspace", 16)
}

impl<'a, A: Element, W: Element> GemmDesc<'a, A, W> {
    /// Rank of `a`.
    fn rank(&self) -> usize {
        self.a.view.shape().len()
    }

    pub fn sizes(&self) -> Result<Sizes> {
        let (op, a, w) = (self.op, &self.a, &self.w);
        let (rank, w_shape) = (self.rank().clamp(2, 3), w.view.view().shape());
        let chosen = matches!(self.grouping, Grouping::Rows(_));
        let [batch, m, a_cols] = matrix(op, a.name, a.view.shape(), rank)?;
        if w.view.shuffled() {
            check_shuffled(op, w.name, w_shape)?;
        }
        let [matrices, w_rows, w_cols] = matrix(op, w.name, w_shape, if chosen { 3 } else { rank })?;
        let [a_packed, w_packed] = Self::PACKED;
        let [k, w_k] = [a_cols.saturating_mul(a_packed), w_cols.saturating_mul(w_packed)];
        let same_k = w_k == k || w.view.shuffled() && w_k > k;
        if !same_k || !chosen && matrices != batch {
            let lead = match (rank, chosen) {
                (2, false) => String::new(),
                (_, true) => "matrices, ".into(),
                _ => format!("{batch}, "),
            };
            let why = if rank == 2 { "K of" } else { "batch and K of" };
            let cols = k / w_packed;
            return Err(Error::shape(op, w.name, w_shape, format!("[{lead}N, {cols}] ({why} {})", a.name)));
        }
        if self.gated() && w_rows % 2 != 0 {
            return Err(Error::shape(op, w.name, w_shape, "an even number of rows: gates, then values"));
        }
        for (arg, shape) in [(a.name, a.view.shape()), (w.name, w_shape)] {
            let axis = shape.iter().rev().take(2).position(|&n| n > LIMIT / 2);
            if let Some(axis) = axis {
                let what = format!("axis {} of shape {shape:?}", shape.len() - 1 - axis);
                return Err(Error::too_large(op, arg, what, (LIMIT / 2) as u64));
            }
        }
        let n = if self.gated() { w_rows / 2 } else { w_rows };
        Ok(Sizes { batch, matrices, m, n, k })
    }

    /// Whether the operands' layout permits 16-byte loads.
    pub fn vectorized(&self, sizes: &Sizes) -> bool {
        if sizes.k == 0 {
            // Nothing is loaded, whatever the alignment.
            return true;
        }
        let fits = |shape: &[usize], strides: &[usize], rows: usize, element: usize| {
            let row = shape.len() - 2;
            let stride = if shape[row] > 1 { strides[row] } else { 0 };
            rows.saturating_mul(stride).saturating_add(shape[row + 1]).saturating_mul(element) < WINDOW_BYTES
        };
        let ([a_packed, w_packed], w) = (Self::PACKED, self.w.view.view());
        // Values are reached from the gates' window.
        let w_rows = if self.gated() { sizes.n + TILE_ROWS } else { TILE_ROWS };
        self.group_scales.block().is_none_or(|shape| shape.k >= VECTOR_GROUP)
            && self.a.view.rows_aligned(16)
            && w.rows_aligned(16)
            && (sizes.k / a_packed * size_of::<A>()).is_multiple_of(16)
            && (sizes.k / w_packed * size_of::<W>()).is_multiple_of(16)
            && fits(self.a.view.shape(), self.a.view.strides(), TILE_ROWS, size_of::<A>())
            && fits(w.shape(), w.strides(), w_rows, size_of::<W>())
    }

    /// Whether operands are laid out for kernels by bulk tensor copies; `Job::bulk` says whether there is one.
    pub fn has_bulk(&self, sizes: &Sizes) -> bool {
        // Rows that overlap, such as one row as many, are none of a tensor map.
        let apart = |strides: &[usize]| strides[strides.len() - 2] >= sizes.k;
        matches!(self.grouping, Grouping::Batches)
            && sizes.matrices == 1
            && !self.w.view.shuffled()
            && apart(self.a.view.strides())
            && apart(self.w.view.view().strides())
    }

    /// Checks everything.
    pub fn check<'t, Y: Float>(
        &self,
        stream: &Stream,
        mut to: Destination<'t, 'a, Y>,
        workspace: Option<&TensorViewMut<f32>>,
    ) -> Result<Checked<'t, 'a, Y>> {
        let arch = stream.device().arch();
        expect_encoding(self.op, A::DTYPE, arch)?;
        expect_encoding(self.op, W::DTYPE, arch)?;
        let sizes = self.sizes()?;
        expect_i32_sums(self.op, self.a.name, A::DTYPE, sizes.k)?;
        if let Some(shape) = self.group_scales.block() {
            shape.check(self.op)?;
        }
        if self.options.skip_reduce {
            to = self.slices(to)?;
        }
        self.check_inputs(&sizes)?;
        self.check_output(&mut to, &sizes)?;
        if let Some(workspace) = workspace {
            check_workspace(self.op, workspace)?;
        }
        self.check_aliases(&mut to, workspace)?;
        let plan = self.plan(stream, &mut to, &sizes, workspace.map_or(0, TensorViewMut::numel))?;
        Ok(Checked { to, sizes, plan })
    }

    /// The destination of unsummed split-K slices.
    fn slices<'t, Y: Float>(&self, to: Destination<'t, 'a, Y>) -> Result<Destination<'t, 'a, Y>> {
        match to {
            Destination::Store(y)
                if !self.gated() && self.fusions.mul_add.is_none() && self.fusions.divisor.is_none() =>
            {
                if Y::DTYPE == DType::F32 {
                    Ok(Destination::Slices(y))
                } else {
                    Err(Error::dtype(self.op, self.y, Y::DTYPE, "f32 (skip_reduce)"))
                }
            }
            _ => Err(Error::argument(self.op, "skip_reduce", true, "false: this operator needs whole sums")),
        }
    }

    fn check_output<Y: Float>(&self, to: &mut Destination<Y>, sizes: &Sizes) -> Result<()> {
        let (op, arg) = (self.op, self.y);
        let &Sizes { batch, m, n, .. } = sizes;
        let whole = if self.rank() == 2 { vec![m, n] } else { vec![batch, m, n] };
        match to {
            Destination::Store(y) | Destination::Atomic(y, _) => y.expect_shape(op, arg, whole)?,
            Destination::Slices(y) => match y.shape() {
                [splits, rest @ ..] if *rest == whole[..] && (1..=u16::MAX as usize).contains(splits) => {}
                shape => {
                    return Err(Error::shape(op, arg, shape, format!("[split-K slices, then {whole:?}]")));
                }
            },
            Destination::SplitCat { c1, c2, cat } => {
                let fits = match (c1.shape(), c2.shape(), cat.shape()) {
                    (&[ym, yd, s13], &[rm, rd, s2], &[cm, cd, s3]) => {
                        [ym, rm, cm] == [m; 3]
                            && yd == rd
                            && rd == cd
                            && s13 >= s3
                            && n == yd * (s13 - s3 + s2)
                    }
                    _ => false,
                };
                if !fits {
                    let want = format!(
                        "[{m}, D, S1 + S3], beside c2 {:?} [{m}, D, S2] and y {:?} [{m}, D, S3], D (S1 + S2) = {n}",
                        c2.shape(),
                        cat.shape()
                    );
                    return Err(Error::shape(op, arg, c1.shape(), want));
                }
                cat.expect_rows(op, "y")?;
                c2.expect_unit_stride(op, "c2")?;
                c2.expect_aligned(op, "c2", size_of::<Y>() as u64)?;
            }
        }
        let y = to.y();
        y.expect_unit_stride(op, arg)?;
        y.expect_aligned(op, arg, size_of::<Y>() as u64)
    }

    /// Layout of operands, bias, scales, terms and lists.
    fn check_inputs(&self, sizes: &Sizes) -> Result<()> {
        let op = self.op;
        self.a.view.expect_unit_stride(op, self.a.name)?;
        self.w.view.check(op, self.w.name)?;
        self.a.view.expect_aligned(op, self.a.name, size_of::<A>() as u64)?;
        let [a_lead, w_lead] = [sizes.batch, sizes.matrices].map(|n| (self.rank() == 3).then_some(n));
        let w_lead = if matches!(self.grouping, Grouping::Rows(_)) { Some(sizes.matrices) } else { w_lead };
        if let Some(a) = &self.row_scales.a {
            check_row_scale(op, a, a_lead, sizes.m, "M")?;
        }
        if let Some(w) = &self.row_scales.w {
            check_row_scale(op, w, w_lead, sizes.n, "N")?;
        }
        match &self.group_scales {
            GroupScales::None => {}
            GroupScales::Block { a, w, shape } => {
                let groups = sizes.k.div_ceil(shape.k);
                if let Some(a) = a {
                    check_block_scale(op, a, a_lead, [sizes.m, groups], "M")?;
                }
                check_block_scale(op, w, w_lead, [sizes.n.div_ceil(shape.n), groups], "groups of N")?;
            }
            GroupScales::Mx { a, w } => {
                if !sizes.k.is_multiple_of(MX_BLOCK) {
                    return Err(Error::shape(op, self.a.name, self.a.view.shape(), "K a multiple of 32"));
                }
                if let Some(a) = a {
                    a.view.check(op, a.name, a_lead, [sizes.m, sizes.k])?;
                }
                w.view.check(op, w.name, w_lead, [sizes.n, sizes.k])?;
            }
        }
        if self.bytes(sizes.k) > LIMIT {
            let groups = self.group_scales.columns();
            let most = LIMIT / STAGE_BYTES * groups;
            let what = format!("{} columns in groups of {groups}", sizes.k);
            return Err(Error::too_large(op, self.a.name, what, most as u64));
        }
        if let Some(bias) = &self.bias {
            check_bias(op, bias, w_lead, sizes.n)?;
        }
        if let Some(list) = self.grouping.list() {
            let want = if matches!(self.grouping, Grouping::Masked(_)) { sizes.batch } else { sizes.m };
            list.view.expect_shape(op, list.name, [want])?;
            list.view.expect_contiguous(op, list.name)?;
            list.view.expect_aligned(op, list.name, 4)?;
        }
        if let Some(divisor) = &self.fusions.divisor {
            divisor.expect_shape(op, "y_scale", [1])?;
            divisor.expect_aligned(op, "y_scale", 4)?;
        }
        if let Some((_, a, b)) = &self.fusions.mul_add {
            a.check(op, "a", [sizes.m, sizes.n])?;
            b.check(op, "b", [sizes.m, sizes.n])?;
        }
        Ok(())
    }

    /// All that is read but `cat`.
    pub fn inputs(&self) -> Vec<NamedOperand<'_>> {
        let mut all = vec![erased_arg(&self.a), (self.w.name, Some(self.w.view.view()))];
        all.extend([&self.row_scales.a, &self.row_scales.w].into_iter().flatten().map(erased_arg));
        match &self.group_scales {
            GroupScales::None => {}
            GroupScales::Block { a, w, .. } => {
                all.extend(a.iter().chain([w]).map(erased_arg));
            }
            GroupScales::Mx { a, w } => {
                let operand = |arg: &Arg<MxScaleView<'a>>| arg.name;
                all.extend(a.iter().map(|a| (operand(a), Some(a.view.view() as &dyn hk_core::Operand))));
                all.push((operand(w), Some(w.view.view())));
            }
        }
        all.extend(self.bias.iter().map(|bias| (bias.name, Some(bias.view.operand()))));
        if let Some(list) = self.grouping.list() {
            all.push((list.name, Some(list.view)));
        }
        all.push(("y_scale", erased(self.fusions.divisor.as_ref())));
        if let Some((_, a, b)) = &self.fusions.mul_add {
            all.extend([("a", a.operand()), ("b", b.operand())]);
        }
        all
    }

    fn check_aliases<Y: Float>(
        &self,
        to: &mut Destination<Y>,
        workspace: Option<&TensorViewMut<f32>>,
    ) -> Result<()> {
        let (cat, c2) = match &*to {
            Destination::SplitCat { cat, c2, .. } => (Some(*cat), Some(c2.alias())),
            _ => (None, None),
        };
        let mut inputs = self.inputs();
        inputs.push(("y", cat.as_ref().map(FloatView::operand)));
        let outputs: [(NamedOperand, &[&'static str]); 3] = [
            ((self.y, Some(&*to.y())), &[]),
            (("c2", erased(c2.as_ref())), &[]),
            (("workspace", erased(workspace)), &[]),
        ];
        check_aliases(self.op, &inputs, &outputs)
    }
}

fn check_bias(op: &'static str, bias: &Arg<FloatView>, lead: Option<usize>, n: usize) -> Result<()> {
    let fits = match (lead, bias.view.shape()) {
        (None, [cols]) => *cols == n,
        (Some(lead), [b, cols] | [b, 1, cols]) => (*b, *cols) == (lead, n),
        _ => false,
    };
    if !fits {
        let want = match lead {
            None => format!("[{n}] (N)"),
            Some(lead) => format!("[{lead}, {n}] or [{lead}, 1, {n}] (batch and N)"),
        };
        return Err(Error::shape(op, bias.name, bias.view.shape(), want));
    }
    bias.view.expect_contiguous(op, bias.name)
}

/// One number, or `len`, for each of `lead` batches if there are any.
fn check_row_scale(
    op: &'static str,
    Arg { name, view }: &Arg<TensorView<f32>>,
    lead: Option<usize>,
    len: usize,
    letter: &str,
) -> Result<()> {
    let shape = view.shape();
    let (batched, rest) = match (lead, shape) {
        (Some(lead), [first, rest @ ..]) => (*first == lead, rest),
        (Some(_), []) => (false, shape),
        (None, _) => (true, shape),
    };
    let fits = match rest {
        [n] => *n == len,
        [a, b] => a * b == len && (*a == 1 || *b == 1),
        _ => false,
    };
    if view.numel() != 1 && !(batched && fits) {
        let batch = lead.map_or(String::new(), |lead| format!("{lead}, "));
        let want = format!("[{batch}{len}] ({letter}), [{batch}{len}, 1], [{batch}1, {len}] or one number");
        return Err(Error::shape(op, name, shape, want));
    }
    view.expect_contiguous(op, name)?;
    view.expect_aligned(op, name, 4)
}

fn check_block_scale(
    op: &'static str,
    Arg { name, view }: &Arg<TensorView<f32>>,
    lead: Option<usize>,
    want: [usize; 2],
    why: &str,
) -> Result<()> {
    let want: Vec<usize> = lead.into_iter().chain(want).collect();
    if view.shape() != want {
        return Err(Error::shape(op, name, view.shape(), format!("{want:?} ({why}, groups of K)")));
    }
    view.expect_aligned(op, name, 4)?;
    let last = want.len() - 2;
    let spread =
        view.strides()[last..].iter().zip(&want[last..]).map(|(s, n)| s.saturating_mul(n.saturating_sub(1)));
    if spread.fold(0, usize::saturating_add) > WINDOW_BYTES / 4 - 1 {
        let what = format!("strides {:?}", view.strides());
        return Err(Error::too_large(op, name, what, (WINDOW_BYTES / 4) as u64));
    }
    Ok(())
}
