//! The parameters of the prefill kernels, argument by argument, and their launch.

use super::extend::CustomMask;
use super::mha::SequenceStarts;
use super::options::{
    AttentionOptions, Bias, Descales, Dropout, Mask, check_fp8, check_scale, check_softcap,
};
use super::plan::{
    DenseKernel, DenseKeys, KEYS_OF_TILE, Plan, PromptKernel, QueryTile, Tiling, auto_splits, dense_rows,
    floats_per_row,
};
use crate::kernels::attention::{HeadRows, Hstu, KeyRows, KeysValues, Pages as PageTable, Params};
use crate::kv_cache::{CacheScales, CacheSizes, KvLayout, Strides, piece};
use bytemuck::Zeroable;
use hk_core::{
    Arch, DType, Element, Error, GlobalLayout, Kernel, KernelRef, Launch, LaunchConfig, NamedOperand, Result,
    Stream, TensorView, TensorViewMut, check_aliases,
};

/// Rows of packed or batched tensors that the kernels count: sums of two fit an `i32`.
const MOST_ROWS: u64 = (1 << 30) - 1;

/// Most bytes from a key to the next for which a tile lies within a window.
pub(crate) const MOST_STRIDE: i64 = 1 << 23;

/// Rows of a window into a page, `kPageRows` of `hip/keys.h`.
pub(crate) const WINDOW_OF_PAGE: u32 = 16;

/// Queries, keys and values, whose heads and columns fit each other.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    pub heads: usize,
    pub kv_heads: usize,
    pub dqk: usize,
    pub dv: usize,
}

/// Shapes without their rows: heads and columns.
pub(crate) fn check_heads(
    op: &'static str,
    [(q_arg, q), (k_arg, k), (v_arg, v)]: [(&'static str, &[usize]); 3],
    most: [usize; 2],
) -> Result<Heads> {
    let last = |shape: &[usize]| [shape[shape.len() - 2], shape[shape.len() - 1]];
    let ([heads, dqk], [kv_heads, columns], [v_heads, dv]) = (last(q), last(k), last(v));
    if columns != dqk {
        return Err(Error::shape(op, k_arg, k, format!("{dqk} columns (of {q_arg})")));
    }
    if v_heads != kv_heads {
        return Err(Error::shape(op, v_arg, v, format!("{kv_heads} heads (of {k_arg})")));
    }
    if heads != 0 && (kv_heads == 0 || !heads.is_multiple_of(kv_heads)) {
        return Err(Error::shape(op, q_arg, q, format!("a multiple of {kv_heads} heads (of {k_arg})")));
    }
    for (arg, shape, n, most) in [(q_arg, q, dqk, most[0]), (v_arg, v, dv, most[1])] {
        if n == 0 {
            return Err(Error::empty(op, arg, shape.len() - 1, shape));
        }
        if n > most {
            return Err(Error::shape(op, arg, shape, format!("at most {most} columns")));
        }
    }
    Ok(Heads { heads, kv_heads, dqk, dv })
}

/// Heads and columns of queries `q` and of a cache.
pub(crate) fn check_cache_heads(
    op: &'static str,
    q: &[usize],
    [k_arg, v_arg]: [&'static str; 2],
    CacheSizes { pages, tokens, heads, dqk, dv }: CacheSizes,
    most: [usize; 2],
) -> Result<Heads> {
    let (k, v) = ([pages, tokens, heads, dqk], [pages, tokens, heads, dv]);
    check_heads(op, [("q", q), (k_arg, &k), (v_arg, &v)], most)
}

/// Of `attention::ElementType`, see there.
pub(crate) const FP8: u32 = 1;
pub(crate) const I8: u32 = 2;
pub(crate) const F32: u32 = 3;
pub(crate) const F16: u32 = 4;

/// An element type that the kernels widen: `attention::ElementType` of `hip/problem.h`.
fn element_type<T: Element>(kernel: DType) -> u32 {
    match T::DTYPE {
        dtype if dtype == kernel => 0,
        DType::Fp8E4M3 | DType::Fp8E4M3Fnuz => FP8,
        DType::I8 => I8,
        _ => F32,
    }
}

/// Factors by batch and head: address and strides in elements.
pub(crate) type ByHead = (u64, i64, i64);

fn descale(of: &mut KeysValues, k: ByHead, v: ByHead) {
    (of.k.descale, of.k.descale_batch, of.k.descale_head) = k;
    (of.v.descale, of.v.descale_batch, of.v.descale_head) = v;
}

/// What an operator passes to the kernels.
pub(crate) struct Problem<'a> {
    pub(crate) op: &'static str,
    pub(crate) stream: &'a Stream,
    pub(crate) launch: Launch<'a>,
    pub(crate) kernel: DType,
    pub(crate) is_hstu: bool,
    /// Factors of the cache are those of tokens.
    pub(crate) token_scales: bool,
    /// Launches that come first, after all checks.
    first: Option<Box<dyn FnOnce() -> Result<()> + 'a>>,
    plan: Plan<'a>,
    pub(crate) params: Params,
}

impl<'a> Problem<'a> {
    /// For kernels of type `kernel`: `bf16`, `f16` or `f32`.
    pub fn new(op: &'static str, stream: &'a Stream, kernel: DType, heads: Heads) -> Self {
        let mut params = Params::zeroed();
        (params.heads, params.kv_heads) = (heads.heads as u32, heads.kv_heads as u32);
        params.group = (heads.heads / heads.kv_heads.max(1)).max(1) as u32;
        params.group_inverse = u32::MAX / params.group;
        params.dqk = heads.dqk as u32;
        params.dv = heads.dv as u32;
        params.scores.left = super::options::UNLIMITED;
        params.scores.right = super::options::UNLIMITED;
        Self {
            op,
            stream,
            launch: stream.launch(op),
            kernel,
            is_hstu: false,
            token_scales: false,
            first: None,
            plan: Plan { tiling: Tiling::Auto, workspace: None },
            params,
        }
    }

    /// Rows `[batch, row, head, column]` or `[row, head, column]`.
    pub fn rows<T: Element>(layout: &GlobalLayout) -> HeadRows {
        let [batch, row, head, _] = layout.strides().map(|s| s * size_of::<T>() as i64);
        HeadRows { data: layout.data(), batch, row, head }
    }

    fn check_type<T: Element>(&self, arg: &'static str) -> Result<()> {
        check_fp8(self.op, arg, T::DTYPE, self.stream.device().arch())
    }

    /// Whether `columns` elements at each row's start, and at multiples of it, are one access.
    pub fn vectorized<T: Element>(rows: &HeadRows, columns: usize, of: usize) -> u32 {
        let bytes = (columns * size_of::<T>()) as i64;
        let aligned = |n: i64| n % bytes == 0;
        let all = aligned(rows.data as i64) && aligned(rows.batch) && aligned(rows.row) && aligned(rows.head);
        u32::from(all && of.is_multiple_of(columns))
    }

    /// Columns of an access to inputs.
    pub fn vector(&self) -> usize {
        16 / self.kernel.size_bytes()
    }

    pub fn queries<T: Element>(&mut self, arg: &'static str, q: &TensorView<'a, T>) -> Result<()> {
        self.check_type::<T>(arg)?;
        q.expect_unit_stride(self.op, arg)?;
        q.expect_aligned(self.op, arg, size_of::<T>() as u64)?;
        let layout = self.launch.input(arg, q)?;
        self.params.q = Self::rows::<T>(&layout);
        self.params.q_type = element_type::<T>(self.kernel);
        self.params.q_vectorized =
            Self::vectorized::<T>(&self.params.q, self.vector(), self.params.dqk as usize);
        Ok(())
    }

    /// Fresh keys or values.
    pub fn key_rows<T: Element>(&mut self, arg: &'static str, rows: &TensorView<'a, T>) -> Result<KeyRows> {
        self.check_type::<T>(arg)?;
        rows.expect_unit_stride(self.op, arg)?;
        rows.expect_aligned(self.op, arg, size_of::<T>() as u64)?;
        let layout = self.launch.input(arg, rows)?;
        let HeadRows { data, batch, row, head } = Self::rows::<T>(&layout);
        Ok(KeyRows {
            data,
            batch,
            head,
            token: row,
            column: size_of::<T>() as i64,
            token_shift: 31,
            column_shift: 31,
            ..KeyRows::zeroed()
        })
    }

    /// Fresh keys and values `[batch, row, head, column]` or `[row, head, column]`.
    pub fn fresh<T: Element>(
        &mut self,
        (k_arg, k): (&'static str, &TensorView<'a, T>),
        (v_arg, v): (&'static str, &TensorView<'a, T>),
    ) -> Result<()> {
        let (k, v) = (self.key_rows(k_arg, k)?, self.key_rows(v_arg, v)?);
        let vector = self.vector();
        let fits = |rows: &KeyRows, of: u32| {
            let rows = HeadRows { data: rows.data, batch: rows.batch, row: rows.token, head: rows.head };
            Self::vectorized::<T>(&rows, vector, of as usize)
        };
        let vectorized = fits(&k, self.params.dqk) & fits(&v, self.params.dv);
        self.params.fresh = KeysValues { k, v, element: element_type::<T>(self.kernel), vectorized };
        Ok(())
    }

    fn cached_rows<C: Element>(
        &mut self,
        arg: &'static str,
        cache: &TensorView<'a, C>,
        s: Strides,
    ) -> Result<KeyRows> {
        self.check_type::<C>(arg)?;
        cache.expect_unit_stride(self.op, arg)?;
        cache.expect_aligned(self.op, arg, size_of::<C>() as u64)?;
        let element = size_of::<C>() as i64;
        let (column_shift, column_group, column) = match s.col_shift {
            0 => (31, 0, s.col * element),
            shift => (shift, s.col * element, element),
        };
        Ok(KeyRows {
            data: self.launch.input_address(arg, cache)?,
            batch: s.block * element,
            head: s.head * element,
            token_group: s.within * element,
            token: element,
            token_shift: s.within_shift,
            column_group,
            column,
            column_shift,
            ..KeyRows::zeroed()
        })
    }

    /// Keys and values of a cache, whose shapes the layout has checked.
    pub fn cache<C: Element>(
        &mut self,
        layout: KvLayout,
        (k_arg, k): (&'static str, &TensorView<'a, C>),
        (v_arg, v): (&'static str, &TensorView<'a, C>),
    ) -> Result<()> {
        let k = self.cached_rows(k_arg, k, layout.strides(k.layout(), false, piece::<C>()))?;
        let v = self.cached_rows(v_arg, v, layout.strides(v.layout(), true, piece::<C>()))?;
        let element = size_of::<C>() as i64;
        let vector = self.vector();
        let fits = |rows: &KeyRows, of: u32| {
            let bytes = vector as i64 * element;
            let all = [rows.data as i64, rows.batch, rows.head, rows.token_group, rows.column_group];
            all.iter().all(|n| n % bytes == 0) && (of as usize).is_multiple_of(vector)
        };
        let vectorized = fits(&k, self.params.dqk) && (v.column != element || fits(&v, self.params.dv));
        let vectorized = vectorized.into();
        self.params.cache = KeysValues { k, v, element: element_type::<C>(self.kernel), vectorized };
        Ok(())
    }

    /// The pages of sequences: rows of a table.
    pub fn block_table(
        &mut self,
        table: &TensorView<'a, i32>,
        sequences: usize,
        of: CacheSizes,
    ) -> Result<()> {
        let [rows, _] = table.dims(self.op, "block_table")?;
        if rows != sequences {
            let want = format!("{sequences} sequences");
            return Err(Error::shape(self.op, "block_table", table.shape(), want));
        }
        self.table("block_table", table, of)
    }

    /// The same of any number of rows.
    pub fn table(&mut self, arg: &'static str, table: &TensorView<'a, i32>, of: CacheSizes) -> Result<()> {
        table.expect_unit_stride(self.op, arg)?;
        table.expect_aligned(self.op, arg, 4)?;
        let layout = self.launch.input(arg, table)?;
        self.pages(layout.data(), layout.shape()[3], of)?;
        self.params.pages.row = layout.strides()[2];
        Ok(())
    }

    /// The pages of sequences: spans of a list, each a token.
    pub fn page_list(
        &mut self,
        (starts_arg, starts): (&'static str, &TensorView<'a, i32>),
        (list_arg, list): (&'static str, &TensorView<'a, i32>),
        of: CacheSizes,
    ) -> Result<()> {
        let starts = self.indices(starts_arg, starts)?;
        let width = self.count(list_arg, list.shape()[0])?;
        let list = self.indices(list_arg, list)?;
        self.pages(list, width, of)?;
        self.params.pages.starts = starts;
        self.params.sequences.cache_starts = starts;
        Ok(())
    }

    /// The pages of sequences, one after the other: rows of a table by key head, or one of all heads.
    pub fn page_lists(&mut self, table: &TensorView<'a, i32>, of: CacheSizes) -> Result<()> {
        let [lists, width] = table.dims(self.op, "block_table")?;
        if lists != 1 && lists != of.heads {
            let want = format!("[{}, {width}] (key heads) or [1, {width}]", of.heads);
            return Err(Error::shape(self.op, "block_table", table.shape(), want));
        }
        self.count("block_table", width)?;
        self.table("block_table", table, of)?;
        let pages = &mut self.params.pages;
        (pages.row, pages.head) = (0, if lists == 1 { 0 } else { pages.row });
        Ok(())
    }

    /// Each sequence has a page, of its own index.
    pub fn own_pages(&mut self, of: CacheSizes) -> Result<()> {
        self.pages(0, 1, of)
    }

    fn pages(&mut self, table: u64, width: u32, of: CacheSizes) -> Result<()> {
        let (n_pages, tokens) = (self.count("k_cache", of.pages)?, self.count("k_cache", of.tokens)?);
        // A table without entries is there: keys that it should have are missing.
        let table = table.max(size_of::<i32>() as u64);
        self.params.pages =
            PageTable { table, width, n_pages, tokens, inverse: u32::MAX / tokens, ..PageTable::zeroed() };
        Ok(())
    }

    /// Factors of the cache.
    pub fn cache_scales(&mut self, scales: &CacheScales<'a>, sequences: usize) -> Result<()> {
        let kv_heads = self.params.kv_heads as usize;
        let k = self.by_head("k_scale", scales.k, [sequences, kv_heads])?;
        let v = self.by_head("v_scale", scales.v, [sequences, kv_heads])?;
        descale(&mut self.params.cache, k, v);
        Ok(())
    }

    /// Factors of the cache, which may be those of tokens: `[pages, key heads, tokens]` of both.
    pub fn cache_or_token_scales(
        &mut self,
        scales: &CacheScales<'a>,
        sequences: usize,
        of: CacheSizes,
    ) -> Result<()> {
        let is_of_tokens =
            |scale: &Option<TensorView<f32>>| scale.as_ref().is_some_and(|s| s.shape().len() == 3);
        if !is_of_tokens(&scales.k) && !is_of_tokens(&scales.v) {
            return self.cache_scales(scales, sequences);
        }
        let mut by_head = |arg, scale: &Option<TensorView<'a, f32>>| {
            let shape = [of.pages, of.heads, of.tokens];
            let Some(scale) = scale.as_ref().filter(|s| s.shape() == shape) else {
                let got = scale.as_ref().map_or(&[][..], |s| s.shape());
                return Err(Error::shape(
                    self.op,
                    arg,
                    got,
                    format!("{shape:?} (factors of tokens, of both)"),
                ));
            };
            scale.expect_unit_stride(self.op, arg)?;
            if !scale.rows_aligned(16) {
                return Err(Error::stride(self.op, arg, scale.layout(), "rows on 16 bytes"));
            }
            let layout = self.launch.input(arg, scale)?;
            let [_, page, head, _] = layout.strides();
            Ok((layout.data(), page, head))
        };
        let (k, v) = (by_head("k_scale", &scales.k)?, by_head("v_scale", &scales.v)?);
        descale(&mut self.params.cache, k, v);
        self.token_scales = true;
        Ok(())
    }

    pub fn out<'t: 'a, T: Element>(
        &mut self,
        arg: &'static str,
        out: &mut TensorViewMut<'t, T>,
    ) -> Result<()> {
        self.check_type::<T>(arg)?;
        out.expect_unit_stride(self.op, arg)?;
        out.expect_aligned(self.op, arg, size_of::<T>() as u64)?;
        let layout = self.launch.output(arg, out)?;
        self.params.out = Self::rows::<T>(&layout);
        self.params.out_type = element_type::<T>(self.kernel);
        self.params.out_vectorized = Self::vectorized::<T>(&self.params.out, 4, self.params.dv as usize);
        Ok(())
    }

    /// `[batch, head, row]`, or `[row, head]` of packed rows.
    pub fn lse<'t: 'a>(&mut self, lse: Option<&mut TensorViewMut<'t, f32>>) -> Result<()> {
        let Some(lse) = lse else { return Ok(()) };
        lse.expect_aligned(self.op, "lse", 4)?;
        self.params.lse = Self::lse_rows(&self.launch.output("lse", lse)?, lse.shape().len() == 2);
        Ok(())
    }

    pub fn lse_rows(layout: &GlobalLayout, packed: bool) -> HeadRows {
        let s = layout.strides().map(|s| 4 * s);
        let [batch, row, head] = if packed { [0, s[2], s[3]] } else { [s[1], s[3], s[2]] };
        HeadRows { data: layout.data(), batch, row, head }
    }

    /// `f32` by batch and head, or `[1]`: address and strides in elements.
    pub fn by_head(
        &mut self,
        arg: &'static str,
        view: Option<TensorView<'a, f32>>,
        [batch, heads]: [usize; 2],
    ) -> Result<ByHead> {
        let Some(view) = view else { return Ok((0, 0, 0)) };
        view.expect_aligned(self.op, arg, 4)?;
        if view.shape() != [1] && view.shape() != [batch, heads] {
            let want = format!("[{batch}, {heads}] (sequences and heads) or [1]");
            return Err(Error::shape(self.op, arg, view.shape(), want));
        }
        let layout = self.launch.input(arg, &view)?;
        let [_, _, batch, head] = if view.shape().len() == 2 { layout.strides() } else { [0; 4] };
        Ok((layout.data(), batch, head))
    }

    pub fn descales(&mut self, descales: &Descales<'a>, sequences: usize) -> Result<()> {
        let (heads, kv_heads) = (self.params.heads as usize, self.params.kv_heads as usize);
        let q = self.by_head("q_descale", descales.q, [sequences, heads])?;
        (self.params.q_descale, self.params.q_descale_batch, self.params.q_descale_head) = q;
        let k = self.by_head("k_descale", descales.k, [sequences, kv_heads])?;
        let v = self.by_head("v_descale", descales.v, [sequences, kv_heads])?;
        for of in [&mut self.params.fresh, &mut self.params.cache] {
            descale(of, k, v);
        }
        Ok(())
    }

    pub fn mask(&mut self, mask: Mask) {
        [self.params.scores.left, self.params.scores.right] = mask.reach();
    }

    pub fn sink(&mut self, sink: Option<TensorView<'a, f32>>) -> Result<()> {
        let Some(sink) = sink else { return Ok(()) };
        sink.expect_shape(self.op, "sink", [self.params.heads as usize])?;
        sink.expect_contiguous(self.op, "sink")?;
        sink.expect_aligned(self.op, "sink", 4)?;
        self.params.scores.sink = self.launch.input("sink", &sink)?.data();
        Ok(())
    }

    pub fn alibi(&mut self, alibi: Option<TensorView<'a, f32>>, sequences: usize) -> Result<()> {
        let Some(alibi) = alibi else { return Ok(()) };
        let heads = self.params.heads as usize;
        if alibi.shape() != [heads] && alibi.shape() != [sequences, heads] {
            let want = format!("[{heads}] or [{sequences}, {heads}] (sequences and heads)");
            return Err(Error::shape(self.op, "alibi", alibi.shape(), want));
        }
        alibi.expect_unit_stride(self.op, "alibi")?;
        alibi.expect_aligned(self.op, "alibi", 4)?;
        let layout = self.launch.input("alibi", &alibi)?;
        self.params.scores.alibi = layout.data();
        self.params.scores.alibi_batch = layout.strides()[2];
        Ok(())
    }

    /// A bias `[queries, keys]` or `[sequences, heads, queries, keys]`.
    pub fn bias<T: Element>(
        &mut self,
        bias: Option<Bias<'a, T>>,
        sequences: usize,
        [queries, keys]: [usize; 2],
    ) -> Result<()> {
        fn own<'a, B: Element>(
            of: &mut Problem<'a>,
            bias: &TensorView<'a, B>,
            sizes: [usize; 4],
        ) -> Result<()> {
            let op = of.op;
            let fits = match bias.shape() {
                [rows, cols] => [*rows, *cols] == sizes[2..],
                [.., _, _] if bias.shape().len() == 4 => {
                    let axis = |(&n, size)| n == size || n == 1;
                    bias.shape().iter().zip(sizes).all(axis) && bias.shape()[3] == sizes[3]
                }
                _ => false,
            };
            if !fits {
                let want = format!(
                    "{sizes:?} (sequences, heads, queries, keys), all but the keys 1 or that, or {:?}",
                    &sizes[2..]
                );
                return Err(Error::shape(op, "bias", bias.shape(), want));
            }
            bias.expect_unit_stride(op, "bias")?;
            bias.expect_aligned(op, "bias", size_of::<B>() as u64)?;
            let layout = of.launch.input("bias", bias)?;
            let (shape, strides) = (layout.shape(), layout.strides());
            let stride =
                |axis: usize| if shape[axis] == 1 { 0 } else { strides[axis] * size_of::<B>() as i64 };
            let scores = &mut of.params.scores;
            scores.bias = HeadRows { data: layout.data(), batch: stride(0), head: stride(1), row: stride(2) };
            scores.bias_type = element_type::<B>(of.kernel);
            scores.bias_rows = if shape[2] == 1 { sizes[2] as u32 } else { shape[2] };
            scores.bias_cols = shape[3];
            Ok(())
        }
        let sizes = [sequences, self.params.heads as usize, queries, keys];
        match bias {
            None => Ok(()),
            Some(Bias::F32(bias)) => own(self, &bias, sizes),
            Some(Bias::Own(bias)) => own(self, &bias, sizes),
        }
    }

    pub fn dropout(&mut self, dropout: Option<Dropout>, longest: [usize; 2]) -> Result<()> {
        let Some(dropout) = dropout else { return Ok(()) };
        let scores = &mut self.params.scores;
        (scores.dropout, scores.kept) = dropout.threshold(self.op)?;
        (scores.seed, scores.offset) = (dropout.seed, dropout.offset);
        [scores.longest_q, scores.longest_k] = longest.map(|n| n as u32);
        Ok(())
    }

    /// The mask of `hstu_attn`, and its kernels.
    pub fn hstu(&mut self, hstu: Hstu) {
        self.params.hstu = hstu;
        self.is_hstu = true;
    }

    /// A bias `[queries, keys]` of the keys that are the sequence's queries.
    pub fn qq_bias(&mut self, bias: Option<TensorView<'a, f32>>) -> Result<()> {
        let Some(bias) = bias else { return Ok(()) };
        let [rows, cols] = bias.dims(self.op, "qq_bias")?;
        bias.expect_unit_stride(self.op, "qq_bias")?;
        bias.expect_aligned(self.op, "qq_bias", 4)?;
        let (bias_rows, bias_cols) = (self.count("qq_bias", rows)?, self.count("qq_bias", cols)?);
        let layout = self.launch.input("qq_bias", &bias)?;
        let row = 4 * layout.strides()[2];
        let scores = &mut self.params.scores;
        // Without entries it is there: each that is needed is missing.
        scores.bias = HeadRows { data: layout.data().max(4), row, ..HeadRows::zeroed() };
        scores.bias_type = element_type::<f32>(self.kernel);
        (scores.bias_rows, scores.bias_cols, scores.bias_fresh) = (bias_rows, bias_cols, 1);
        Ok(())
    }

    /// Masks of sequences, byte by byte.
    pub fn custom_mask(&mut self, mask: Option<&CustomMask<'a>>, sequences: usize) -> Result<()> {
        let Some(CustomMask { mask, indptr, skip_prefix }) = mask else { return Ok(()) };
        let [bytes] = mask.dims(self.op, "custom_mask")?;
        mask.expect_contiguous(self.op, "custom_mask")?;
        indptr.expect_shape(self.op, "mask_indptr", [sequences + 1])?;
        // Without bytes it is there: each that is needed is missing.
        let data = self.launch.input_address("custom_mask", mask)?.max(1);
        let starts = self.indices("mask_indptr", indptr)?;
        let scores = &mut self.params.scores;
        (scores.mask, scores.mask_starts, scores.mask_bytes) = (data, starts, bytes as u64);
        scores.mask_fresh_only = (*skip_prefix).into();
        Ok(())
    }

    /// A factor that outputs are divided by.
    pub fn out_scale(&mut self, scale: Option<TensorView<'a, f32>>) -> Result<()> {
        let Some(scale) = scale else { return Ok(()) };
        scale.expect_shape(self.op, "out_scale", [1])?;
        scale.expect_aligned(self.op, "out_scale", 4)?;
        self.params.out_scale = self.launch.input("out_scale", &scale)?.data();
        Ok(())
    }

    pub fn scale(&mut self, scale: Option<f32>) -> Result<()> {
        self.params.scores.scale = check_scale(self.op, scale, self.params.dqk as usize)?;
        Ok(())
    }

    pub fn softcap(&mut self, softcap: f32) -> Result<()> {
        self.params.scores.softcap = check_softcap(self.op, softcap)?;
        Ok(())
    }

    /// All options that dense and packed attention have.
    pub fn options<T: Element>(
        &mut self,
        options: &AttentionOptions<'a, T>,
        sequences: usize,
        longest: [usize; 2],
    ) -> Result<()> {
        self.scale(options.scale)?;
        self.softcap(options.softcap)?;
        self.mask(options.mask);
        self.sink(options.sink)?;
        self.alibi(options.alibi, sequences)?;
        self.bias(options.bias, sequences, longest)?;
        self.dropout(options.dropout, longest)?;
        self.descales(&options.descales, sequences)
    }

    /// Starts of packed sequences.
    pub fn starts(&mut self, starts: &SequenceStarts<'a>, total_k: usize) -> Result<()> {
        self.params.sequences.total_k = self.count("k", total_k)?;
        self.params.sequences.q_starts = self.indices("cu_seqlens_q", &starts.q)?;
        self.params.sequences.k_starts = self.indices("cu_seqlens_k", &starts.k)?;
        Ok(())
    }

    /// Starts of packed queries, and of keys that are in pages: `most` of a sequence.
    pub fn cached_starts(&mut self, starts: &SequenceStarts<'a>, most: usize) -> Result<()> {
        self.params.sequences.total_k = self.count("k", most)?;
        self.params.sequences.q_starts = self.indices("cu_seqlens_q", &starts.q)?;
        self.params.sequences.cache_starts = self.indices("cu_seqlens_k", &starts.k)?;
        Ok(())
    }

    /// Packed sequences that lie anywhere, keys as queries.
    pub fn spans(
        &mut self,
        start: &TensorView<'a, i32>,
        len: &TensorView<'a, i32>,
        rows: usize,
    ) -> Result<()> {
        let (start, len) = (self.indices("start", start)?, self.indices("len", len)?);
        let rows = self.count("q", rows)?;
        let s = &mut self.params.sequences;
        (s.q_starts, s.q_lens, s.total_q) = (start, len, rows);
        (s.k_starts, s.k_lens, s.total_k) = (start, len, rows);
        Ok(())
    }

    /// Sequences of `sq` packed queries each over packed keys of these lengths, one after the other.
    pub fn consecutive_keys(&mut self, lens: &TensorView<'a, i32>, [sq, total]: [usize; 2]) -> Result<()> {
        self.queries_of_each(sq);
        self.params.sequences.k_lens = self.indices("kv_lens", lens)?;
        self.params.sequences.total_k = self.count("k", total)?;
        self.params.sequences.k_consecutive = 1;
        Ok(())
    }

    /// A query of each sequence, whose keys are in a cache: so many.
    pub fn single_queries(&mut self, arg: &'static str, lens: &TensorView<'a, i32>) -> Result<()> {
        self.queries_of_each(1);
        self.params.sequences.total_lens = self.indices(arg, lens)?;
        Ok(())
    }

    /// Packed rows are those of sequences of `sq` queries each.
    pub fn queries_of_each(&mut self, sq: usize) {
        for rows in [&mut self.params.q, &mut self.params.out, &mut self.params.lse] {
            rows.batch = rows.row * sq as i64;
        }
    }

    /// A tensor of `i32`, contiguous.
    pub fn indices(&mut self, arg: &'static str, view: &TensorView<'a, i32>) -> Result<u64> {
        view.expect_contiguous(self.op, arg)?;
        view.expect_aligned(self.op, arg, 4)?;
        Ok(self.launch.input(arg, view)?.data())
    }

    /// How the work is cut, and memory for partial results: for calls that write all rows.
    pub fn plan(&mut self, plan: Plan<'a>) {
        self.plan = plan;
    }

    /// Tiles of query rows that do not depend on the call.
    pub fn tile(&mut self, tile: Option<QueryTile>) {
        self.plan.tiling = tile.map_or(Tiling::Auto, |tile| Tiling::Fixed { tile, keys_per_split: None });
    }

    /// The workspace of the plan, which then has none.
    pub fn take_workspace(&mut self) -> Option<TensorViewMut<'a, f32>> {
        self.plan.workspace.take()
    }

    /// Launches that come first, when nothing is left to refuse.
    pub fn first(&mut self, launches: impl FnOnce() -> Result<()> + 'a) {
        self.first = Some(Box::new(launches));
    }

    pub fn run_first(&mut self) -> Result<()> {
        self.first.take().map_or(Ok(()), |launches| launches())
    }

    pub fn params(&mut self) -> &mut Params {
        &mut self.params
    }

    /// Checks that outputs share no memory with inputs or each other.
    pub fn disjoint(&self, inputs: &[NamedOperand], outputs: &[NamedOperand]) -> Result<()> {
        let outputs: Vec<(NamedOperand, &[&'static str])> = outputs.iter().map(|&o| (o, &[][..])).collect();
        check_aliases(self.op, inputs, &outputs)
    }

    /// Rows that the kernels can count.
    pub fn count(&self, arg: &'static str, rows: usize) -> Result<u32> {
        if rows as u64 <= MOST_ROWS {
            return Ok(rows as u32);
        }
        Err(Error::too_large(self.op, arg, format!("{rows} rows"), MOST_ROWS))
    }

    /// Launches the kernels on `sequences` of `sq` queries.
    pub fn run_batched(mut self, sequences: usize, [sq, sk]: [usize; 2]) -> Result<()> {
        let (n, sq, sk) = (self.count("q", sequences)?, self.count("q", sq)?, self.count("k", sk)?);
        if n == 0 || sq == 0 || self.params.heads == 0 {
            return Ok(());
        }
        let s = &mut self.params.sequences;
        (s.n, s.sq, s.sk) = (n, sq, sk);
        let rows = self.count("q", (sq as usize).saturating_mul(self.params.group as usize))? as usize;
        let tiles_of_one = move |of_block: usize| rows.div_ceil(of_block);
        let tiles = move |of_block| tiles_of_one(of_block).saturating_mul(n as usize);
        let kernel = self.choose(tiles)?;
        self.params.sequences.tiles_of_one = tiles_of_one(kernel.rows) as u32;
        self.run(kernel, tiles(kernel.rows), n as usize * sq as usize, sk as usize)
    }

    /// Launches kernels of their own, of tall and of short tiles, on `sequences` of `sq` queries. Keys are not split.
    pub fn run_tiles<P: bytemuck::Pod>(
        mut self,
        sequences: usize,
        [sq, sk]: [usize; 2],
        [tall, short]: [KernelRef<P>; 2],
        of: impl FnOnce(Params) -> P,
    ) -> Result<()> {
        let (n, sq, sk) = (self.count("q", sequences)?, self.count("q", sq)?, self.count("k", sk)?);
        if n == 0 || sq == 0 || self.params.heads == 0 {
            return Ok(());
        }
        let rows = self.count("q", (sq as usize).saturating_mul(self.params.group as usize))? as usize;
        let info = self.stream.device().info();
        let [of_tall, of_short] = dense_rows(info.arch, DenseKeys::Fresh, self.params.dv as usize);
        let tiles = |of_block: usize| rows.div_ceil(of_block).saturating_mul(n as usize);
        let fills =
            tiles(of_tall).saturating_mul(self.params.kv_heads as usize) >= info.compute_units as usize;
        let (kernel, of_block) = match self.plan.tiling {
            Tiling::Auto if fills => (tall, of_tall),
            Tiling::Fixed { tile: QueryTile::Tall, .. } => (tall, of_tall),
            _ => (short, of_short),
        };
        let s = &mut self.params.sequences;
        (s.n, s.sq, s.sk, s.tiles_of_one) = (n, sq, sk, rows.div_ceil(of_block) as u32);
        self.launch(kernel, of, tiles(of_block), n as usize * sq as usize, sk as usize)
    }

    /// Launches the kernels on `sequences` of packed queries, `total_q` in all.
    pub fn run_packed(mut self, sequences: usize, total_q: usize) -> Result<()> {
        let (n, total) = (self.count("cu_seqlens_q", sequences)?, self.count("q", total_q)?);
        if n == 0 || total == 0 || self.params.heads == 0 {
            return Ok(());
        }
        let s = &mut self.params.sequences;
        (s.n, s.total_q) = (n, total);
        let rows = self.count("q", total_q.saturating_mul(self.params.group as usize))? as usize;
        let tiles = move |of_block: usize| rows / of_block + sequences;
        let kernel = self.choose(tiles)?;
        let sk = self.params.sequences.total_k as usize;
        self.run(kernel, tiles(kernel.rows), total_q, sk)
    }

    /// The parameters of a launch of short tiles over packed sequences, and its blocks, if a kernel for keys beside the queries serves it.
    pub fn short_tiles(&mut self, sequences: usize, total_q: usize) -> Result<Option<(Params, usize)>> {
        if self.dense_keys() != Some(DenseKeys::Fresh) {
            return Ok(None);
        }
        let (n, total) = (self.count("cu_seqlens_q", sequences)?, self.count("q", total_q)?);
        let rows = self.count("q", total_q.saturating_mul(self.params.group as usize))? as usize;
        let [_, of_block] =
            dense_rows(self.stream.device().arch(), DenseKeys::Fresh, self.params.dv as usize);
        let tiles = rows / of_block + sequences;
        let s = &mut self.params.sequences;
        (s.n, s.total_q, s.tiles) = (n, total, tiles as u32); // fewer than rows and sequences
        self.params.splits.count = 1;
        Ok(Some((self.params, tiles.saturating_mul(self.params.kv_heads as usize))))
    }

    /// Whether kernels of prompts that have rows in whole vectors serve the call.
    pub(crate) fn is_dense(&self) -> bool {
        self.dense_keys().is_some()
    }

    /// The dense kernels that serve the call: rows in whole vectors, pages of whole windows, no option that changes scores one by one.
    pub(super) fn dense_keys(&self) -> Option<DenseKeys> {
        let p = &self.params;
        let (paged, fresh) = (p.pages.table != 0, p.fresh.k.data != 0);
        let scores = &p.scores;
        let plain = scores.softcap == 0.0 && scores.scale > 0.0 && scores.dropout == 0;
        let none = |of: &[u64]| of.iter().all(|data| *data == 0);
        let fits = |stride: i64, columns: u32| (i64::from(columns)..=MOST_STRIDE).contains(&stride);
        let walks = |rows: &KeyRows, bytes: u32| fits(rows.token, bytes) || p.sequences.sk == 1;
        if self.is_hstu
            || self.kernel.size_bytes() != 2
            || !plain
            || !none(&[scores.alibi, scores.bias.data, scores.mask])
            || p.out_vectorized == 0
        {
            return None;
        }
        if p.q_type == FP8 {
            let aligned = |to: i64, of: [i64; 4]| of.iter().all(|n| n % to == 0);
            let rows = |k: &KeyRows| [k.data as i64, k.batch, k.head, k.token];
            let q = aligned(16, [p.q.data as i64, p.q.batch, p.q.row, p.q.head]);
            let columns = p.dqk.is_multiple_of(16) && p.dv.is_multiple_of(8);
            let own = p.fresh.element == FP8 && !paged && p.skip_single == 0;
            let keys = walks(&p.fresh.k, p.dqk) && aligned(16, rows(&p.fresh.k));
            let values = walks(&p.fresh.v, p.dv) && aligned(4, rows(&p.fresh.v));
            return (own && q && columns && keys && values).then_some(DenseKeys::Fp8);
        }
        let own = p.q_type == 0 && p.fresh.element == 0 && p.out_type == 0;
        let vectors =
            p.q_vectorized == 1 && (!fresh || p.fresh.vectorized == 1) && (!paged || p.cache.vectorized == 1);
        let plain = |rows: &KeyRows, columns: u32| walks(rows, 2 * columns) && rows.descale == 0;
        let keys = !fresh || (plain(&p.fresh.k, p.dqk) && plain(&p.fresh.v, p.dv));
        if !(own && vectors && keys && none(&[p.q_descale, p.out_scale])) {
            return None;
        }
        if !paged {
            return (p.skip_single == 0).then_some(DenseKeys::Fresh);
        }
        let (bytes, of) = match p.cache.element {
            0 => (2, DenseKeys::Paged),
            FP8 => (1, DenseKeys::PagedFp8),
            _ => return None,
        };
        // fp8 is loaded 16 columns at a time.
        let on_vectors = |rows: &KeyRows, columns: u32| {
            let vectors = [rows.data as i64, rows.batch, rows.head, rows.token_group, columns.into()];
            vectors.iter().all(|n| n % 16 == 0)
        };
        let in_rows = |rows: &KeyRows, columns: u32| {
            rows.token_shift == 0
                && rows.column == i64::from(bytes)
                && fits(rows.token_group, bytes * columns)
                && (bytes == 1 || rows.descale == 0)
                && (bytes == 2 || on_vectors(rows, columns))
        };
        let pages = p.pages.tokens.is_multiple_of(WINDOW_OF_PAGE);
        (pages && in_rows(&p.cache.k, p.dqk) && in_rows(&p.cache.v, p.dv)).then_some(of)
    }

    /// The kernel that serves the call; `tiles` of so many rows.
    fn choose(&mut self, tiles: impl Fn(usize) -> usize) -> Result<PromptKernel> {
        let columns = [self.params.dqk as usize, self.params.dv as usize];
        let info = self.stream.device().info();
        let keys = self.dense_keys();
        let dense = keys.and_then(|keys| PromptKernel::dense(info.arch, self.kernel, keys, columns));
        if keys == Some(DenseKeys::Fp8)
            && dense.is_some()
            && self.params.out_type == 0
            && self.kernel == DType::F16
        {
            self.params.out_type = F16;
        }
        if let Some(DenseKernel { mut tall, short }) = dense {
            // By warpgroups: 64 rows each, and one copies. The code object says how many there are.
            if (info.arch, keys) == (Arch::Sm90a, Some(DenseKeys::Fresh))
                && self.stream.kernel(tall.kernel)?.info().max_threads == 512
            {
                tall.rows = 192;
            }
            let fills =
                tiles(tall.rows).saturating_mul(self.params.kv_heads as usize) >= info.compute_units as usize;
            let chosen = match self.plan.tiling {
                Tiling::Auto if fills => tall,
                Tiling::Fixed { tile: QueryTile::Tall, .. } => tall,
                _ => short,
            };
            return Ok(chosen);
        }
        PromptKernel::general(self.kernel, self.is_hstu, columns).ok_or_else(|| {
            let [dqk, dv] = columns;
            let what = format!("{dqk} columns of keys and {dv} of values in {}", self.kernel);
            Error::unsupported(self.op, what, "no kernel is that wide")
        })
    }

    /// Decides on splits of the keys: their number and their keys.
    fn split(&mut self, tiles: usize, rows: usize, sk: usize) -> Result<()> {
        if let Some(workspace) = &self.plan.workspace {
            workspace.dims::<1>(self.op, "workspace")?;
            workspace.expect_contiguous(self.op, "workspace")?;
            workspace.expect_aligned(self.op, "workspace", 16)?;
        }
        let per_row = floats_per_row(self.params.dv as usize);
        let rows = rows.saturating_mul(self.params.heads as usize);
        let room =
            self.plan.workspace.as_ref().map_or(0, |w| w.numel()) / rows.saturating_mul(per_row).max(1);
        let (count, keys) = match self.plan.tiling {
            Tiling::Auto => {
                let blocks = tiles.saturating_mul(self.params.kv_heads as usize);
                auto_splits(self.stream.device().info(), blocks, sk, room)
            }
            Tiling::Fixed { keys_per_split: None, .. } => (1, sk),
            Tiling::Fixed { keys_per_split: Some(keys), .. } => {
                if keys == 0 || keys % KEYS_OF_TILE != 0 {
                    let want = format!("a multiple of {KEYS_OF_TILE}");
                    return Err(Error::argument(self.op, "keys_per_split", keys, want));
                }
                let count = sk.div_ceil(keys).max(1);
                if count > 1 && count > room {
                    let want = rows.saturating_mul(per_row).saturating_mul(count);
                    let got = self.plan.workspace.as_ref().map_or(0, |w| w.numel());
                    let want = format!("[{want}] or longer ({count} splits of {keys} keys)");
                    return Err(Error::shape(self.op, "workspace", [got], want));
                }
                (count, keys)
            }
        };
        self.params.splits.count = count as u32;
        if count <= 1 {
            return Ok(());
        }
        let too_large = || Error::too_large(self.op, "q", format!("{rows} rows by heads"), u32::MAX.into());
        self.params.splits.rows = u32::try_from(rows).map_err(|_| too_large())?;
        self.params.splits.keys = keys as u32;
        if let Some(workspace) = &mut self.plan.workspace {
            let address = self.launch.output_address("workspace", workspace)?;
            self.params.splits.acc = address;
            self.params.splits.sums = address + (4 * count * rows * (per_row - 2)) as u64;
        }
        Ok(())
    }

    fn run(self, kernel: PromptKernel, tiles: usize, rows: usize, sk: usize) -> Result<()> {
        self.launch(kernel.kernel, |params| params, tiles, rows, sk)
    }

    /// Launches `kernel`, which takes the parameters that `of` makes, on `tiles` of each key head, and the merge of splits.
    fn launch<P: bytemuck::Pod>(
        mut self,
        kernel: KernelRef<P>,
        of: impl FnOnce(Params) -> P,
        tiles: usize,
        rows: usize,
        sk: usize,
    ) -> Result<()> {
        self.split(tiles, rows, sk)?;
        let too_large = || Error::too_large(self.op, "q", format!("{tiles} tiles"), u32::MAX.into());
        self.params.sequences.tiles = u32::try_from(tiles).map_err(|_| too_large())?;
        let splits = self.params.splits.count as usize;
        let blocks = tiles.saturating_mul(self.params.kv_heads as usize).saturating_mul(splits);
        let kernel = self.stream.kernel(kernel)?;
        let merge = if splits > 1 { Some(self.merge()?) } else { None };
        let params = of(self.params);
        self.run_first()?;
        // SAFETY: the operators have checked rows, heads and columns of each tensor against each other; the kernels clamp lengths,
        // starts and pages, which are on the device, to the sizes of the tensors.
        unsafe { self.launch.run(&kernel, LaunchConfig::grid_1d(blocks), &params)? };
        merge.map_or(Ok(()), |merge| merge.run(&self.params))
    }

    /// The launch that merges the partial results of splits.
    pub fn merge(&self) -> Result<Merge<'a>> {
        let kernel = self.stream.kernel(match self.kernel {
            DType::F16 => Params::kernel("attention_merge_f16"),
            DType::F32 => Params::kernel("attention_merge_f32"),
            _ => Params::kernel("attention_merge_bf16"),
        })?;
        Ok(Merge { op: self.op, stream: self.stream, kernel })
    }
}

/// See [`Problem::merge`].
pub(crate) struct Merge<'a> {
    op: &'static str,
    stream: &'a Stream,
    kernel: Kernel<Params>,
}

impl Merge<'_> {
    /// The parameters are those of the launch whose results are merged.
    pub fn run(self, params: &Params) -> Result<()> {
        let blocks = (params.splits.rows as usize).div_ceil(256 / (params.dv as usize).div_ceil(4));
        // SAFETY: a thread for each four columns of the outputs; the partial results are within the workspace.
        unsafe { self.stream.launch(self.op).run(&self.kernel, LaunchConfig::grid_1d(blocks), params) }
    }
}
