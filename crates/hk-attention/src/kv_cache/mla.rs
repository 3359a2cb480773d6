//! Checks and launch of the operators on the latent cache of multi-head latent attention.

use super::cache::{
    CacheElement, HeadElement, Heads as _, Jobs, PART, Strides, Tokens, check_scale, optional,
};
use crate::kernels::cache::{Common, Target};
use crate::kernels::kv_cache_rows::Params;
use hk_core::plan::rope::{Rope, RopeElement, RopeSource, RopeTables};
use hk_core::{
    Element, Error, IndexView, Kernel, Launch, NamedOperand, Result, Stream, TensorView, TensorViewMut,
    check_aliases,
};

/// The inputs of [`rope_cat_and_cache_mla`](crate::rope_cat_and_cache_mla()) and
/// [`fused_bmm_rope_kv_cache`](crate::fused_bmm_rope_kv_cache()).
#[derive(Debug, Clone, Copy)]
pub struct MlaInputs<'a, T: Element, R: Element> {
    /// The queries without position: `[tokens, q_heads, nope]`; of `fused_bmm_rope_kv_cache` `[q_heads, tokens, cols]`.
    pub q_nope: TensorView<'a, T>,
    /// `[tokens, q_heads, pe]`: the columns of queries to rotate.
    pub q_pe: TensorView<'a, T>,
    /// `[all, kv_heads, nope]`: the keys without position.
    pub k_nope: TensorView<'a, T>,
    /// `[all, kv_heads, pe]`: the columns of keys to rotate.
    pub k_pe: TensorView<'a, T>,
    /// Cosines, sines and positions `[tokens]`.
    pub tables: RopeTables<'a, R>,
    /// `[n]`, `tokens <= n <= all`: the slot of each token.
    pub slot_mapping: IndexView<'a>,
    /// `[1]`: the scale that keys are divided by before they are cached; 1 if left out.
    pub k_scale: Option<TensorView<'a, f32>>,
}

/// The outputs of [`rope_cat_and_cache_mla`](crate::rope_cat_and_cache_mla()) and
/// [`fused_bmm_rope_kv_cache`](crate::fused_bmm_rope_kv_cache()). The two types are those of the queries and of the cache.
#[derive(Debug)]
pub struct MlaOutputs<'a, T: Element, Q: Element, C: Element> {
    /// `[tokens, q_heads, nope + pe]`: the queries, columns without position first.
    pub q_out: TensorViewMut<'a, Q>,
    /// Shape of `k_pe`: the rotated keys of the tokens that have a slot; rows of other tokens are not written. May be
    /// exactly `k_pe`.
    pub k_pe_out: TensorViewMut<'a, T>,
    /// `[slots, kv_heads, nope + pe]`: the cache.
    pub kv_cache: TensorViewMut<'a, C>,
    /// `[head_tokens, q_heads, pe]`: a copy of the rotated columns of the first queries.
    pub q_pe_head: Option<TensorViewMut<'a, T>>,
    /// `[head_tokens, q_heads, nope]`, filled with zeros.
    pub nope_zeros: Option<TensorViewMut<'a, T>>,
}

/// A call without the queries that have no position.
pub(crate) struct Call<'a, T: Element, R: Element> {
    pub q_pe: TensorView<'a, T>,
    pub k_nope: TensorView<'a, T>,
    pub k_pe: TensorView<'a, T>,
    pub tables: RopeSource<'a, R>,
    pub slot_mapping: IndexView<'a>,
    pub k_scale: Option<TensorView<'a, f32>>,
    pub rope: Rope,
}

impl<'a, T: Element, R: Element> Call<'a, T, R> {
    pub fn new(inputs: MlaInputs<'a, T, R>, rope: Rope) -> Self {
        let MlaInputs { q_nope: _, q_pe, k_nope, k_pe, tables, slot_mapping, k_scale } = inputs;
        Self { q_pe, k_nope, k_pe, tables: tables.into(), slot_mapping, k_scale, rope }
    }
}

/// Sizes that the checks have found.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub tokens: usize,
    pub q_heads: usize,
    pub nope: usize,
    pub pe: usize,
    cached: usize,
    slots: usize,
}

impl<'a, T: HeadElement, R: RopeElement<T>> Call<'a, T, R> {
    /// Checks all but the queries without position, and that no output shares memory with `others`, the inputs of these.
    pub fn check<Q: CacheElement<T>, C: CacheElement<T>>(
        &self,
        op: &'static str,
        outputs: &MlaOutputs<'a, T, Q, C>,
        others: &[NamedOperand],
    ) -> Result<Sizes> {
        let Self { q_pe, k_nope, k_pe, tables, slot_mapping, k_scale, rope } = self;
        let MlaOutputs { q_out, k_pe_out, kv_cache, q_pe_head, nope_zeros } = outputs;
        let [tokens, q_heads, pe] = q_pe.dims(op, "q_pe")?;
        let [all, kv_heads, nope] = k_nope.dims(op, "k_nope")?;
        if pe == 0 {
            return Err(Error::empty(op, "q_pe", 2, q_pe.shape()));
        }
        if nope == 0 {
            return Err(Error::empty(op, "k_nope", 2, k_nope.shape()));
        }
        if kv_heads == 0 || !q_heads.is_multiple_of(kv_heads) {
            let want = format!("a number of heads that is a multiple of those of k_nope ({kv_heads})");
            return Err(Error::shape(op, "q_pe", q_pe.shape(), want));
        }
        q_pe.check(op, "q_pe", &[tokens, q_heads, pe], "itself")?;
        k_nope.check(op, "k_nope", &[all, kv_heads, nope], "itself")?;
        k_pe.check(op, "k_pe", &[all, kv_heads, pe], "tokens and heads of k_nope, columns of q_pe")?;
        rope.check(op, "q_pe", q_pe.shape(), pe)?;
        tables.check(op, rope, &[tokens])?;
        check_scale(op, "k_scale", k_scale.as_ref())?;
        q_out.check(
            op,
            "q_out",
            &[tokens, q_heads, nope + pe],
            "tokens and heads of q_pe, columns of both",
        )?;
        k_pe_out.check(op, "k_pe_out", k_pe.shape(), "shape of k_pe")?;
        let [slots, ..] = kv_cache.dims::<3>(op, "kv_cache")?;
        kv_cache.check(op, "kv_cache", &[slots, kv_heads, nope + pe], "heads of k_nope, columns of both")?;
        let mut head_tokens = None;
        for (name, head, cols) in [("q_pe_head", q_pe_head, pe), ("nope_zeros", nope_zeros, nope)] {
            let Some(head) = head else { continue };
            let [n, ..] = head.dims::<3>(op, name)?;
            if n > tokens || head_tokens.is_some_and(|other| other != n) {
                let want = format!("at most {tokens} tokens, as many in q_pe_head as in nope_zeros");
                return Err(Error::shape(op, name, head.shape(), want));
            }
            head_tokens = Some(n);
            head.check(op, name, &[n, q_heads, cols], "heads of q_pe")?;
        }
        let cached = slot_mapping.shape().first().copied().unwrap_or(0);
        Tokens { rotated: tokens, cached, blocks: slots, block: 1 }.check(op, slot_mapping, all)?;

        let mut inputs: Vec<NamedOperand> = vec![
            ("q_pe", Some(q_pe)),
            ("k_nope", Some(k_nope)),
            ("k_pe", Some(k_pe)),
            ("slot_mapping", Some(slot_mapping)),
            ("k_scale", optional(k_scale)),
        ];
        inputs.extend(tables.operands());
        inputs.extend(others);
        let outputs: [(NamedOperand, &[&str]); 5] = [
            (("q_out", Some(q_out)), &[]),
            (("k_pe_out", Some(k_pe_out)), &["k_pe"]),
            (("kv_cache", Some(kv_cache)), &[]),
            (("q_pe_head", optional(q_pe_head)), &[]),
            (("nope_zeros", optional(nope_zeros)), &[]),
        ];
        check_aliases(op, &inputs, &outputs)?;
        Ok(Sizes { tokens, q_heads, nope, pe, cached, slots })
    }

    /// Prepares the launch of everything but the GEMM: with `q_nope`, its copy to `q_out` and the zeros. Nothing is queued.
    pub fn prepare<Q: CacheElement<T>, C: CacheElement<T>>(
        self,
        op: &'static str,
        stream: &'a Stream,
        sizes: Sizes,
        q_nope: Option<TensorView<'a, T>>,
        outputs: MlaOutputs<'a, T, Q, C>,
    ) -> Result<Prepared<'a, T, Q>> {
        let Self { q_pe, k_nope, k_pe, tables, slot_mapping, k_scale, rope } = self;
        let MlaOutputs { q_out, k_pe_out, kv_cache, mut q_pe_head, mut nope_zeros } = outputs;
        let Sizes { tokens, nope, pe, cached, slots, .. } = sizes;
        let (mut q_nope_out, mut q_pe_out) = q_out.split_at(2, nope)?;
        let strides = Strides::per_row(kv_cache.layout());
        let (mut nope_cache, mut pe_cache) = kv_cache.split_at(2, nope)?;
        let vectors = nope.is_multiple_of(PART)
            && pe.is_multiple_of(PART)
            && tables.can_vectorize(&rope, PART)
            && [&q_pe, &k_nope, &k_pe].iter().all(|t| t.can_vectorize())
            && q_nope.as_ref().is_none_or(|t| t.can_vectorize())
            && [&q_nope_out, &q_pe_out].iter().all(|t| t.can_vectorize())
            && [&nope_cache, &pe_cache].iter().all(|t| t.can_vectorize())
            && k_pe_out.can_vectorize()
            && [&q_pe_head, &nope_zeros].iter().all(|t| t.as_ref().is_none_or(|t| t.can_vectorize()));
        let mut jobs = Jobs::new(op, stream, vectors);
        let kernel = jobs.kernel::<T>(stream)?;
        let mut launch = stream.launch(op);

        let q_target = Target::output::<Q>(&launch.output("q_out", &mut q_pe_out)?);
        let q_pe = launch.input("q_pe", &q_pe)?;
        match &mut q_pe_head {
            Some(head) => {
                let head = Target::output::<T>(&launch.output("q_pe_head", head)?);
                jobs.rotate(q_pe, &rope, &[q_target, head], false);
            }
            None => jobs.rotate(q_pe, &rope, &[q_target], false),
        }
        let scale = launch.optional_input("k_scale", k_scale.as_ref())?;
        let mut k_pe_out = k_pe_out.slice(0, 0..cached)?;
        let k_target = Target::output::<T>(&launch.output("k_pe_out", &mut k_pe_out)?);
        let cache = launch.output_address("kv_cache", &mut pe_cache)?;
        let k_pe = launch.input("k_pe", &k_pe.slice(0, 0..cached)?)?;
        jobs.rotate(k_pe, &rope, &[k_target, Target::cache::<C>(cache, strides, &scale)], false);

        if let Some(q_nope) = q_nope {
            let q_target = Target::output::<Q>(&launch.output("q_out", &mut q_nope_out)?);
            let q_nope = launch.input("q_nope", &q_nope)?;
            match &mut nope_zeros {
                Some(zeros) => {
                    let zeros = Target::zeros(&launch.output("nope_zeros", zeros)?);
                    jobs.copy(q_nope, &[q_target, zeros]);
                }
                None => jobs.copy(q_nope, &[q_target]),
            }
        }
        let cache = launch.output_address("kv_cache", &mut nope_cache)?;
        let k_nope = launch.input("k_nope", &k_nope.slice(0, 0..cached)?)?;
        jobs.copy(k_nope, &[Target::cache::<C>(cache, strides, &scale)]);

        let places = Tokens { rotated: tokens, cached, blocks: slots, block: 1 };
        let common = places.common(&mut launch, &rope, &tables, &slot_mapping)?;
        jobs.check()?;
        Ok(Prepared { q_nope_out, nope_zeros, jobs, launch, kernel, common })
    }
}

/// A launch of everything but the GEMM, and the outputs of the GEMM.
pub(crate) struct Prepared<'a, T: Element, Q: Element> {
    pub q_nope_out: TensorViewMut<'a, Q>,
    pub nope_zeros: Option<TensorViewMut<'a, T>>,
    jobs: Jobs,
    launch: Launch<'a>,
    kernel: Kernel<Params>,
    common: Common,
}

impl<T: Element, Q: Element> Prepared<'_, T, Q> {
    /// Queues the launch.
    pub fn run(self) -> Result<()> {
        let Self { jobs, launch, kernel, common, .. } = self;
        // SAFETY: `Call::check` makes every tensor of heads as long as the jobs' tokens, heads and columns say, the cache
        // as long as there are slots, heads and columns; the kernel checks positions and slots.
        unsafe { jobs.run(launch, &kernel, common) }
    }
}
