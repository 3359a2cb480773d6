//! SageAttention: int8 products of queries and keys, fp8 products of probabilities and values.

use super::mha::{AttentionOutputs, Qkv, check_batched};
use super::options::{AttentionElement, DeviceFp8, Mask, check_fp8, check_scale};
use super::plan::QueryTile;
use super::problem::{F16, F32, Heads, MOST_STRIDE, Problem, check_heads};
use crate::kernels::attention::{HeadRows, KeysValues, SageParams};
use crate::kernels::sage_quant::Params;
use crate::kv_cache::optional;
use bytemuck::Zeroable;
use hk_core::plan::rows::float_index;
use hk_core::{
    Arch, DType, Element, Error, Float, Fp8E4M3, Fp8E4M3Fnuz, Kernel, KernelRef, LaunchConfig, NamedOperand,
    Result, Stream, TensorView, TensorViewMut, check_aliases,
};

/// Entry points of tall and of short tiles.
type Tiles = [KernelRef<SageParams>; 2];
/// Those by the most columns; the second ones add `q_shift`.
const ATTENTION: [(usize, [Tiles; 2]); 2] = [
    (
        64,
        [
            [SageParams::kernel("prefill_sage_d64"), SageParams::kernel("prefill_sage_d64_small")],
            [
                SageParams::kernel("prefill_sage_smooth_d64"),
                SageParams::kernel("prefill_sage_smooth_d64_small"),
            ],
        ],
    ),
    (
        128,
        [
            [SageParams::kernel("prefill_sage_d128"), SageParams::kernel("prefill_sage_d128_small")],
            [
                SageParams::kernel("prefill_sage_smooth_d128"),
                SageParams::kernel("prefill_sage_smooth_d128_small"),
            ],
        ],
    ),
];
const STATS: [KernelRef<Params>; 3] =
    [Params::kernel("sage_stats_bf16"), Params::kernel("sage_stats_f16"), Params::kernel("sage_stats_f32")];
const FINISH: KernelRef<Params> = Params::kernel("sage_finish");
const QUANTIZE: [KernelRef<Params>; 3] = [
    Params::kernel("sage_quantize_bf16"),
    Params::kernel("sage_quantize_f16"),
    Params::kernel("sage_quantize_f32"),
];
/// Of queries less the mean of their block: the means, the quantization, and `q_shift`.
const SMOOTH: [[KernelRef<Params>; 3]; 3] = [
    [
        Params::kernel("sage_query_means_bf16"),
        Params::kernel("sage_quantize_smooth_bf16"),
        Params::kernel("sage_query_shifts_bf16"),
    ],
    [
        Params::kernel("sage_query_means_f16"),
        Params::kernel("sage_quantize_smooth_f16"),
        Params::kernel("sage_query_shifts_f16"),
    ],
    [
        Params::kernel("sage_query_means_f32"),
        Params::kernel("sage_quantize_smooth_f32"),
        Params::kernel("sage_query_shifts_f32"),
    ],
];

/// Columns of a head, at most.
pub(crate) const MOST_COLUMNS: usize = 128;
/// Quantized columns are multiples of this.
const COLUMNS: usize = 16;
/// Rows that share a factor, `hip/sage.h`.
const QUERIES_OF_BLOCK: usize = 256;
const KEYS_OF_BLOCK: usize = 128;
/// Rows of a block of `sage_stats`.
const ROWS_OF_CHUNK: usize = 512;

/// The sizes of a call of [`sage_attention`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SageProblem {
    /// Sequences.
    pub sequences: usize,
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// Queries of a sequence.
    pub queries: usize,
    /// Keys of a sequence.
    pub keys: usize,
    /// Columns of queries and keys.
    pub dqk: usize,
    /// Columns of values.
    pub dv: usize,
}

impl SageProblem {
    fn columns(&self) -> [usize; 2] {
        [self.dqk, self.dv].map(|n| n.next_multiple_of(COLUMNS))
    }

    /// Shapes of [`SageQuantized::q8`], [`k8`](SageQuantized::k8), [`v8`](SageQuantized::v8).
    pub fn rows(&self) -> [[usize; 4]; 3] {
        let Self { sequences, heads, kv_heads, queries, keys, .. } = *self;
        let [dqk, dv] = self.columns();
        [[sequences, queries, heads, dqk], [sequences, keys, kv_heads, dqk], [sequences, keys, kv_heads, dv]]
    }

    /// Shapes of [`SageQuantized::q_scale`], [`k_scale`](SageQuantized::k_scale), [`v_scale`](SageQuantized::v_scale).
    pub fn scales(&self) -> [[usize; 3]; 3] {
        let Self { sequences, heads, kv_heads, queries, keys, .. } = *self;
        [
            [sequences, heads, queries.div_ceil(QUERIES_OF_BLOCK)],
            [sequences, kv_heads, keys.div_ceil(KEYS_OF_BLOCK)],
            [sequences, kv_heads, self.columns()[1]],
        ]
    }

    /// Shape of [`SageQuantized::q_shift`].
    pub fn query_shifts(&self) -> [usize; 4] {
        let [[.., q_blocks], [.., k_blocks], _] = self.scales();
        [self.sequences, self.heads, q_blocks, k_blocks.saturating_mul(KEYS_OF_BLOCK)]
    }

    fn chunks(&self) -> usize {
        self.keys.div_ceil(ROWS_OF_CHUNK)
    }
}

fn elements(shape: &[usize]) -> usize {
    shape.iter().fold(1, |n, &len| n.saturating_mul(len))
}

/// Elements of the `f32` workspace of [`sage_quantize`].
pub fn sage_quantize_workspace(problem: &SageProblem) -> usize {
    // Of each key head: sums and maxima of chunks, a mean. Of each block of queries a mean.
    let rows = problem.chunks().saturating_mul(2).saturating_add(1);
    let of_keys = elements(&[problem.sequences, problem.kv_heads, rows, MOST_COLUMNS]);
    of_keys.saturating_add(elements(&problem.scales()[0]).saturating_mul(MOST_COLUMNS))
}

/// Elements of the `f32` workspace of [`sage_attention`]: that of [`sage_quantize`], and what it makes, with `q_shift` if `smooth_q`.
pub fn sage_workspace(problem: &SageProblem, smooth_q: bool) -> usize {
    let rows = problem.rows().map(|shape| floats::<i8>(&shape));
    let scales = problem.scales().map(|shape| floats::<f32>(&shape));
    let shift = floats::<f32>(&[problem.sequences, problem.heads, problem.queries]);
    let q_shift = if smooth_q { floats::<f32>(&problem.query_shifts()) } else { 0 };
    let all = [sage_quantize_workspace(problem), shift, q_shift].into_iter().chain(rows).chain(scales);
    all.fold(0, usize::saturating_add)
}

/// `f32` that a part of the workspace takes, on 16 bytes.
fn floats<T>(shape: &[usize]) -> usize {
    elements(shape).saturating_mul(size_of::<T>()).div_ceil(16).saturating_mul(4)
}

/// Queries, keys and values as [`sage_quantize`] makes them.
#[derive(Debug, Clone, Copy)]
pub struct SageQuantized<'a, F: DeviceFp8> {
    /// Queries, `[B, Sq, Hq, Dqk]`, `Dqk` a multiple of 16.
    pub q8: TensorView<'a, i8>,
    /// Factors of 256 queries each, `scale log2(e)` in them: `[B, Hq, ceil(Sq / 256)]`.
    pub q_scale: TensorView<'a, f32>,
    /// Keys, `[B, Sk, Hkv, Dqk]`.
    pub k8: TensorView<'a, i8>,
    /// Factors of 128 keys each, `[B, Hkv, ceil(Sk / 128)]`.
    pub k_scale: TensorView<'a, f32>,
    /// Values, `[B, Sk, Hkv, Dv]`, `Dv` a multiple of 16.
    pub v8: TensorView<'a, F>,
    /// Factors of columns, `[B, Hkv, Dv]`.
    pub v_scale: TensorView<'a, f32>,
    /// What is added to `lse`, `[B, Hq, Sq]`: `scale (q . mean of k)`, where the mean has been subtracted from keys.
    pub lse_shift: Option<TensorView<'a, f32>>,
    /// What is added to scores of a block of queries, in units of log2, [`SageProblem::query_shifts`]: `scale log2(e) (mean of q . k')`, where
    /// the mean of each block has been subtracted from its queries; 0 past the last key.
    pub q_shift: Option<TensorView<'a, f32>>,
}

/// The same to be written. All elements are.
#[derive(Debug)]
pub struct SageQuantizedMut<'a, F: DeviceFp8> {
    /// See [`SageQuantized::q8`]. Columns beyond those of the queries are 0.
    pub q8: TensorViewMut<'a, i8>,
    /// See [`SageQuantized::q_scale`].
    pub q_scale: TensorViewMut<'a, f32>,
    /// See [`SageQuantized::k8`].
    pub k8: TensorViewMut<'a, i8>,
    /// See [`SageQuantized::k_scale`].
    pub k_scale: TensorViewMut<'a, f32>,
    /// See [`SageQuantized::v8`].
    pub v8: TensorViewMut<'a, F>,
    /// See [`SageQuantized::v_scale`].
    pub v_scale: TensorViewMut<'a, f32>,
    /// See [`SageQuantized::lse_shift`]; `None`: not wanted.
    pub lse_shift: Option<TensorViewMut<'a, f32>>,
    /// See [`SageQuantized::q_shift`]; `None`: nothing is subtracted from queries.
    pub q_shift: Option<TensorViewMut<'a, f32>>,
}

impl<'a, F: DeviceFp8> SageQuantizedMut<'a, F> {
    /// The same as inputs.
    pub fn alias(&self) -> SageQuantized<'a, F> {
        SageQuantized {
            q8: self.q8.alias(),
            q_scale: self.q_scale.alias(),
            k8: self.k8.alias(),
            k_scale: self.k_scale.alias(),
            v8: self.v8.alias(),
            v_scale: self.v_scale.alias(),
            lse_shift: self.lse_shift.as_ref().map(TensorViewMut::alias),
            q_shift: self.q_shift.as_ref().map(TensorViewMut::alias),
        }
    }

    fn operands(&self) -> [NamedOperand<'_>; 8] {
        [
            ("q8", Some(&self.q8)),
            ("q_scale", Some(&self.q_scale)),
            ("k8", Some(&self.k8)),
            ("k_scale", Some(&self.k_scale)),
            ("v8", Some(&self.v8)),
            ("v_scale", Some(&self.v_scale)),
            ("lse_shift", optional(&self.lse_shift)),
            ("q_shift", optional(&self.q_shift)),
        ]
    }

    /// Parts of a workspace, and what is left of it.
    fn of_workspace(
        op: &'static str,
        mut rest: TensorViewMut<'a, f32>,
        problem: &SageProblem,
        [shift, smooth_q]: [bool; 2],
    ) -> Result<(Self, TensorViewMut<'a, f32>)> {
        fn take<'a, T: Element>(
            op: &'static str,
            from: TensorViewMut<'a, f32>,
            shape: &[usize],
        ) -> Result<(TensorViewMut<'a, T>, TensorViewMut<'a, f32>)> {
            let (part, rest) = from.split_at(0, floats::<T>(shape))?;
            Ok((part.cast(op, "workspace")?.reshape_front(op, "workspace", shape)?, rest))
        }
        // A tile of keys of a head is contiguous.
        let heads_first = |[b, s, h, d]: [usize; 4]| [b, h, s, d];
        let [q, k, v] = problem.rows().map(heads_first);
        let [q_factors, k_factors, v_factors] = problem.scales();
        let (q8, k8, v8, q_scale, k_scale, v_scale);
        (q8, rest) = take::<i8>(op, rest, &q)?;
        (k8, rest) = take::<i8>(op, rest, &k)?;
        (v8, rest) = take::<F>(op, rest, &v)?;
        (q_scale, rest) = take(op, rest, &q_factors)?;
        (k_scale, rest) = take(op, rest, &k_factors)?;
        (v_scale, rest) = take(op, rest, &v_factors)?;
        let mut lse_shift = None;
        if shift {
            let part;
            (part, rest) = take(op, rest, &[problem.sequences, problem.heads, problem.queries])?;
            lse_shift = Some(part);
        }
        let mut q_shift = None;
        if smooth_q {
            let part;
            (part, rest) = take(op, rest, &problem.query_shifts())?;
            q_shift = Some(part);
        }
        let (q8, k8, v8) = (q8.transpose(1, 2)?, k8.transpose(1, 2)?, v8.transpose(1, 2)?);
        Ok((Self { q8, q_scale, k8, k_scale, v8, v_scale, lse_shift, q_shift }, rest))
    }
}

/// Options of [`sage_attention`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SageOptions {
    /// Factor of the products; `None`: `1 / sqrt(Dqk)`.
    pub scale: Option<f32>,
    /// Which keys a query sees.
    pub mask: Mask,
    /// The mean of the keys of each head is subtracted before they are quantized: probabilities do not change, and what keys have in
    /// common takes no bits.
    pub smooth_k: bool,
    /// The mean of each block of 256 queries of a head is subtracted before they are quantized, and what it adds to scores is added in `f32`.
    pub smooth_q: bool,
    /// The tiles of query rows; `None`: those that suit the call and the device. The bits do not depend on it.
    pub tile: Option<QueryTile>,
}

impl Default for SageOptions {
    fn default() -> Self {
        Self { scale: None, mask: Mask::default(), smooth_k: true, smooth_q: false, tile: None }
    }
}

/// Quantizes queries, keys and values for [`sage_attention_quantized`].
///
/// ```text
/// k' = k - mean of k over the keys of its head, if smooth_k
/// q' = q - mean of q over the queries of its block, if q_shift is given;  q_shift = scale log2(e) (mean . k')
/// q8 = round(scale log2(e) q' / q_scale);  k8 = round(k' / k_scale);  v8 = fp8(v / v_scale);  lse_shift = scale (q . mean)
/// ```
///
/// Scales of `q` and `k` are `amax / 127` of blocks of 256 and 128 rows, those of `v` `amax` over the largest fp8 number of a column; 1 of
/// zeros. Ties of `q8` and `k8` are rounded away from zero. Sums are `f32`, in a fixed order. A block of `q` or `k` with a value that is not
/// finite has a scale of NaN.
///
/// | arg           | shape                      | dtype                 | layout                                        |
/// |---------------|----------------------------|-----------------------|-----------------------------------------------|
/// | `q`           | `[B, Sq, Hq, Dqk]`         | `bf16`, `f16`, `f32`  | unit stride on the columns                    |
/// | `k`           | `[B, Sk, Hkv, Dqk]`        | as `q`                | unit stride on the columns                    |
/// | `v`           | `[B, Sk, Hkv, Dv]`         | as `q`                | unit stride on the columns                    |
/// | `q8`, `k8`    | as `q`, `k`, see [`SageProblem::rows`] | `i8`      | unit stride on the columns, rows on 16 bytes  |
/// | `v8`          | as `v`, see [`SageProblem::rows`] | the device's fp8 e4m3 | unit stride on the columns, rows on 16 bytes |
/// | `q_scale`, `k_scale`, `v_scale` | [`SageProblem::scales`] | `f32`   | contiguous, on 16 bytes                       |
/// | `lse_shift`   | `[B, Hq, Sq]`              | `f32`                 | contiguous                                    |
/// | `q_shift`     | [`SageProblem::query_shifts`] | `f32`              | contiguous, on 16 bytes                       |
/// | `workspace`   | [`sage_quantize_workspace`] or more | `f32`        | contiguous, on 16 bytes                       |
///
/// `Dqk` and `Dv` are up to 128. Three launches, with `q_shift` five. Returns when they are queued.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align), [`Empty`](Error::Empty) if a tensor breaks the table,
/// [`Argument`](Error::Argument) for a scale that is 0 or not finite, [`Unsupported`](Error::Unsupported) for the fp8 of another device,
/// [`Overlap`](Error::Overlap) of outputs, [`TooLarge`](Error::TooLarge) beyond 2^30 - 1 rows, [`DeviceMismatch`](Error::DeviceMismatch),
/// and the errors of loading and launching a kernel. Nothing is written then.
///
/// Source: Zhang et al. 2024, "SageAttention", section 4.2; Zhang et al. 2024, "SageAttention2", section 3.3.
pub fn sage_quantize<'a, T: AttentionElement + Float, F: DeviceFp8>(
    stream: &'a Stream,
    inputs: Qkv<'a, T>,
    outputs: SageQuantizedMut<'a, F>,
    workspace: TensorViewMut<'a, f32>,
    scale: Option<f32>,
    smooth_k: bool,
) -> Result<()> {
    const OP: &str = "sage_quantize";
    let problem = check_inputs(OP, &inputs)?;
    check_quantized(OP, &outputs.alias(), &problem)?;
    let mut written: Vec<(NamedOperand, &[&'static str])> =
        outputs.operands().map(|named| (named, &[][..])).to_vec();
    written.push((("workspace", Some(&workspace)), &[]));
    check_aliases(OP, &operands(&inputs), &written)?;
    let workspace = expect_workspace(OP, workspace, sage_quantize_workspace(&problem))?;
    let scale = check_scale(OP, scale, problem.dqk)?;
    Quantization::new(OP, stream, &inputs, outputs, workspace, &problem, (scale, smooth_k))?.run()
}

/// Attention of what [`sage_quantize`] makes.
///
/// ```text
/// s_ij = q_scale k_scale (q8_i . k8_j) + q_shift_ij in units of log2;  masked: -inf
/// out_i = v_scale sum_j softmax(s)_ij v8_j;  lse_i = ln sum_j 2^s_ij + lse_shift_i
/// ```
///
/// | arg                        | shape                       | dtype                 | layout                                    |
/// |----------------------------|-----------------------------|-----------------------|-------------------------------------------|
/// | `q8`                       | `[B, Sq, Hq, Dqk]`          | `i8`                  | unit stride on the columns, rows on 16 bytes |
/// | `k8`                       | `[B, Sk, Hkv, Dqk]`         | `i8`                  | as `q8`, keys at most 2^23 bytes apart    |
/// | `v8`                       | `[B, Sk, Hkv, Dv']`         | the device's fp8 e4m3 | as `k8`                                   |
/// | `q_scale`, `k_scale`, `v_scale` | [`SageProblem::scales`] | `f32`                | contiguous, on 16 bytes                   |
/// | `lse_shift`                | `[B, Hq, Sq]`               | `f32`                 | contiguous                                |
/// | `q_shift`                  | [`SageProblem::query_shifts`] | `f32`               | contiguous, on 16 bytes                   |
/// | `out`                      | `[B, Sq, Hq, Dv]`           | `bf16`, `f16`, `f32`  | unit stride on the columns                |
/// | `lse`                      | `[B, Hq, Sq]`               | `f32`                 | any strides                               |
///
/// `Dqk` and `Dv'` are multiples of 16 up to 128, `Dv` is at most `Dv'` and above `Dv' - 16`. Products of `q8` and `k8` are exact.
/// Probabilities are rounded to fp8 (`bf16` on sm_90). Scales are not negative: a row that sees one that is, a NaN, or a product of two
/// above 2^100, is NaN.
/// Of the options, `scale`, `smooth_k` and `smooth_q` are those of the quantization, not used here.
///
/// A row without a visible key is 0, its `lse` -inf. One launch. Returns when it is queued.
///
/// # Errors
/// As [`sage_quantize`].
///
/// Source: Zhang et al. 2024, "SageAttention", algorithm 1.
pub fn sage_attention_quantized<'a, F: DeviceFp8, O: Float>(
    stream: &'a Stream,
    inputs: SageQuantized<'a, F>,
    outputs: AttentionOutputs<'a, O>,
    options: &SageOptions,
) -> Result<()> {
    const OP: &str = "sage_attention_quantized";
    let problem = check_outputs(OP, &inputs, &outputs)?;
    check_quantized(OP, &inputs, &problem)?;
    let read: [NamedOperand; 8] = [
        ("q8", Some(&inputs.q8)),
        ("q_scale", Some(&inputs.q_scale)),
        ("k8", Some(&inputs.k8)),
        ("k_scale", Some(&inputs.k_scale)),
        ("v8", Some(&inputs.v8)),
        ("v_scale", Some(&inputs.v_scale)),
        ("lse_shift", optional(&inputs.lse_shift)),
        ("q_shift", optional(&inputs.q_shift)),
    ];
    let written: [NamedOperand; 2] = [("out", Some(&outputs.out)), ("lse", optional(&outputs.lse))];
    check_aliases(OP, &read, &written.map(|named| (named, &[][..])))?;
    attention(OP, stream, &inputs, outputs, &problem, options)?.run(&problem)
}

/// Attention with quantized products: keys less their mean, and queries, in int8; probabilities and values in fp8.
///
/// ```text
/// s_ij = scale (q_i . k_j);  masked: -inf;  lse_i = ln sum_j exp(s_ij);  out_i = sum_j exp(s_ij - lse_i) v_j
/// ```
///
/// | arg         | shape                       | dtype                | layout                     |
/// |-------------|-----------------------------|----------------------|----------------------------|
/// | `q`         | `[B, Sq, Hq, Dqk]`          | `bf16`, `f16`, `f32` | unit stride on the columns |
/// | `k`         | `[B, Sk, Hkv, Dqk]`         | as `q`               | unit stride on the columns |
/// | `v`         | `[B, Sk, Hkv, Dv]`          | as `q`               | unit stride on the columns |
/// | `out`       | `[B, Sq, Hq, Dv]`           | `bf16`, `f16`, `f32` | unit stride on the columns |
/// | `lse`       | `[B, Hq, Sq]`               | `f32`                | any strides                |
/// | `workspace` | [`sage_workspace`] or more  | `f32`                | contiguous, on 16 bytes    |
///
/// `Hq` is a multiple of `Hkv`; `Dqk` and `Dv` are 1 to 128 and may differ. [`sage_quantize`] into the workspace, then
/// [`sage_attention_quantized`]: four launches, six with `smooth_q`, with the same bits as those two. `lse` is that of `k`, not of what is left of it without the mean.
///
/// Of normal data, `out` is within 6 % of exact attention in the 2-norm. A query or key that is not finite makes the rows of its block, or
/// those that see its block, NaN; with `smooth_k` such a key all rows of its head. A value that is not finite makes its column of its head NaN.
///
/// A row without a visible key is 0, its `lse` -inf. A sequence's bits do not depend on others, nor on the device's CUs. Returns when the launches
/// are queued, before they have run. Without queries, nothing is launched.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align), [`Empty`](Error::Empty) if a tensor breaks the table,
/// [`Argument`](Error::Argument) for a scale that is 0 or not finite, [`Overlap`](Error::Overlap) of outputs,
/// [`TooLarge`](Error::TooLarge) beyond 2^30 - 1 rows, [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a
/// kernel. Nothing is written then.
///
/// Source: Zhang et al. 2024, "SageAttention", algorithm 1; Zhang et al. 2024, "SageAttention2", section 3.3.
pub fn sage_attention<'a, T: AttentionElement + Float, O: Float>(
    stream: &'a Stream,
    inputs: Qkv<'a, T>,
    outputs: AttentionOutputs<'a, O>,
    workspace: TensorViewMut<'a, f32>,
    options: &SageOptions,
) -> Result<()> {
    match stream.device().arch() {
        Arch::Gfx942 => one_call::<T, O, Fp8E4M3Fnuz>(stream, inputs, outputs, workspace, options),
        _ => one_call::<T, O, Fp8E4M3>(stream, inputs, outputs, workspace, options),
    }
}

fn one_call<'a, T: AttentionElement + Float, O: Float, F: DeviceFp8>(
    stream: &'a Stream,
    inputs: Qkv<'a, T>,
    outputs: AttentionOutputs<'a, O>,
    workspace: TensorViewMut<'a, f32>,
    options: &SageOptions,
) -> Result<()> {
    const OP: &str = "sage_attention";
    check_batched(OP, &inputs, &outputs)?;
    let problem = check_inputs(OP, &inputs)?;
    let scale = check_scale(OP, options.scale, problem.dqk)?;
    let written: [NamedOperand; 3] =
        [("out", Some(&outputs.out)), ("lse", optional(&outputs.lse)), ("workspace", Some(&workspace))];
    check_aliases(OP, &operands(&inputs), &written.map(|named| (named, &[][..])))?;
    let mut workspace = expect_workspace(OP, workspace, sage_workspace(&problem, options.smooth_q))?;
    stream.launch(OP).output_address("workspace", &mut workspace)?;
    let shift = outputs.lse.is_some() && options.smooth_k;
    let parts = [shift, options.smooth_q];
    let (quantized, rest) = SageQuantizedMut::<F>::of_workspace(OP, workspace, &problem, parts)?;
    let mut attention = attention(OP, stream, &quantized.alias(), outputs, &problem, options)?;
    let first = Quantization::new(OP, stream, &inputs, quantized, rest, &problem, (scale, options.smooth_k))?;
    attention.problem.first(move || first.run());
    attention.run(&problem)
}

fn operands<'r, T: AttentionElement>(inputs: &'r Qkv<'_, T>) -> [NamedOperand<'r>; 3] {
    [("q", Some(&inputs.q)), ("k", Some(&inputs.k)), ("v", Some(&inputs.v))]
}

fn expect_workspace<'a>(
    op: &'static str,
    workspace: TensorViewMut<'a, f32>,
    len: usize,
) -> Result<TensorViewMut<'a, f32>> {
    let [given] = workspace.dims(op, "workspace")?;
    if given < len {
        return Err(Error::shape(op, "workspace", [given], format!("[{len}] or longer ({op}'s workspace)")));
    }
    workspace.expect_contiguous(op, "workspace")?;
    workspace.expect_aligned(op, "workspace", 16)?;
    Ok(workspace)
}

/// The sizes of `[B, S, H, D]`.
fn check_inputs<T: AttentionElement>(op: &'static str, inputs: &Qkv<T>) -> Result<SageProblem> {
    let Qkv { q, k, v } = inputs;
    let [sequences, queries, ..] = q.dims::<4>(op, "q")?;
    let [k_sequences, keys, ..] = k.dims::<4>(op, "k")?;
    v.dims::<4>(op, "v")?;
    let most = [MOST_COLUMNS; 2];
    let heads = check_heads(op, [("q", q.shape()), ("k", k.shape()), ("v", v.shape())], most)?;
    if k_sequences != sequences {
        return Err(Error::shape(op, "k", k.shape(), format!("{sequences} sequences (of q)")));
    }
    v.expect_shape(op, "v", [sequences, keys, heads.kv_heads, heads.dv])?;
    let Heads { heads, kv_heads, dqk, dv } = heads;
    Ok(SageProblem { sequences, heads, kv_heads, queries, keys, dqk, dv })
}

/// The sizes of quantized inputs and their outputs.
fn check_outputs<F: DeviceFp8, O: Element>(
    op: &'static str,
    inputs: &SageQuantized<F>,
    outputs: &AttentionOutputs<O>,
) -> Result<SageProblem> {
    let SageQuantized { q8, k8, v8, .. } = inputs;
    let [sequences, queries, ..] = q8.dims::<4>(op, "q8")?;
    let [_, keys, ..] = k8.dims::<4>(op, "k8")?;
    v8.dims::<4>(op, "v8")?;
    let most = [MOST_COLUMNS; 2];
    let of = check_heads(op, [("q8", q8.shape()), ("k8", k8.shape()), ("v8", v8.shape())], most)?;
    let [.., dv] = outputs.out.dims::<4>(op, "out")?;
    if !of.dqk.is_multiple_of(COLUMNS) {
        return Err(Error::shape(op, "q8", q8.shape(), format!("a multiple of {COLUMNS} columns")));
    }
    if dv == 0 || dv.next_multiple_of(COLUMNS) != of.dv {
        let want = format!("{} columns, rounded up to a multiple of {COLUMNS} (of v8)", of.dv);
        return Err(Error::shape(op, "out", outputs.out.shape(), want));
    }
    outputs.out.expect_shape(op, "out", [sequences, queries, of.heads, dv])?;
    if let Some(lse) = &outputs.lse {
        lse.expect_shape(op, "lse", [sequences, of.heads, queries])?;
    }
    Ok(SageProblem { sequences, heads: of.heads, kv_heads: of.kv_heads, queries, keys, dqk: of.dqk, dv })
}

/// Checks quantized tensors against the sizes.
fn check_quantized<F: DeviceFp8>(
    op: &'static str,
    of: &SageQuantized<F>,
    problem: &SageProblem,
) -> Result<()> {
    fn rows<T: Element>(
        op: &'static str,
        arg: &'static str,
        view: &TensorView<T>,
        shape: [usize; 4],
        keys: bool,
    ) -> Result<()> {
        view.expect_shape(op, arg, shape)?;
        view.expect_unit_stride(op, arg)?;
        view.expect_aligned(op, arg, 16)?;
        let on_16_bytes = (0..3).all(|axis| shape[axis] <= 1 || view.strides()[axis].is_multiple_of(16));
        if !on_16_bytes {
            return Err(Error::stride(op, arg, view.layout(), "rows on 16 bytes"));
        }
        if keys && shape[1] > 1 && !(shape[3]..=MOST_STRIDE as usize).contains(&view.strides()[1]) {
            let want = format!("keys that are {} to {MOST_STRIDE} bytes apart", shape[3]);
            return Err(Error::stride(op, arg, view.layout(), want));
        }
        Ok(())
    }
    let [q, k, v] = problem.rows();
    rows(op, "q8", &of.q8, q, false)?;
    rows(op, "k8", &of.k8, k, true)?;
    rows(op, "v8", &of.v8, v, true)?;
    let scales = [("q_scale", &of.q_scale), ("k_scale", &of.k_scale), ("v_scale", &of.v_scale)];
    for ((arg, view), shape) in scales.into_iter().zip(problem.scales()) {
        view.expect_shape(op, arg, shape)?;
        view.expect_contiguous(op, arg)?;
        view.expect_aligned(op, arg, 16)?;
    }
    if let Some(shift) = &of.lse_shift {
        shift.expect_shape(op, "lse_shift", [problem.sequences, problem.heads, problem.queries])?;
        shift.expect_contiguous(op, "lse_shift")?;
        shift.expect_aligned(op, "lse_shift", 4)?;
    }
    if let Some(shift) = &of.q_shift {
        shift.expect_shape(op, "q_shift", problem.query_shifts())?;
        shift.expect_contiguous(op, "q_shift")?;
        shift.expect_aligned(op, "q_shift", 16)?;
    }
    Ok(())
}

/// The launches of a quantization.
struct Quantization<'a> {
    op: &'static str,
    stream: &'a Stream,
    params: Params,
    heads: usize, // of keys, of all sequences
    stats: Kernel<Params>,
    finish: Kernel<Params>,
    quantize: Kernel<Params>,
    /// With `q_shift`: the means of blocks of queries, and the shifts.
    smooth: Option<[Kernel<Params>; 2]>,
}

impl<'a> Quantization<'a> {
    /// All tensors have been checked but for the strides of the inputs.
    fn new<T: AttentionElement + Float, F: DeviceFp8>(
        op: &'static str,
        stream: &'a Stream,
        inputs: &Qkv<'a, T>,
        mut outputs: SageQuantizedMut<'a, F>,
        mut workspace: TensorViewMut<'a, f32>,
        problem: &SageProblem,
        (scale, smooth): (f32, bool),
    ) -> Result<Self> {
        check_fp8(op, "v8", F::DTYPE, stream.device().arch())?;
        let mut launch = stream.launch(op);
        let vector = 16 / size_of::<T>();
        let mut rows = |arg, view: &TensorView<'a, T>, columns| -> Result<(HeadRows, u32)> {
            view.expect_unit_stride(op, arg)?;
            view.expect_aligned(op, arg, size_of::<T>() as u64)?;
            let rows = Problem::rows::<T>(&launch.input(arg, view)?);
            Ok((rows, Problem::vectorized::<T>(&rows, vector, columns)))
        };
        let SageProblem { sequences, heads, kv_heads, queries, keys, dqk, dv } = *problem;
        let (q, q_vectorized) = rows("q", &inputs.q, dqk)?;
        let (k, k_vectorized) = rows("k", &inputs.k, dqk)?;
        let (v, v_vectorized) = rows("v", &inputs.v, dv)?;
        let q8 = Problem::rows::<i8>(&launch.output("q8", &mut outputs.q8)?);
        let k8 = Problem::rows::<i8>(&launch.output("k8", &mut outputs.k8)?);
        let v8 = Problem::rows::<F>(&launch.output("v8", &mut outputs.v8)?);
        let partials = launch.output_address("workspace", &mut workspace)?;
        let lse_shift = match &mut outputs.lse_shift {
            Some(shift) if smooth => launch.output_address("lse_shift", shift)?,
            Some(_) => return Err(Error::argument(op, "lse_shift", "given", "none without smooth_k")),
            None => 0,
        };
        let q_shift = match &mut outputs.q_shift {
            Some(shift) => launch.output_address("q_shift", shift)?,
            None => 0,
        };
        let too_large = |arg, n: usize| Error::too_large(op, arg, format!("{n} rows"), (1 << 30) - 1);
        let count = |arg, n: usize| u32::try_from(n).ok().filter(|n| *n < 1 << 30).ok_or(too_large(arg, n));
        let [q_scales, k_scales, v_scales] = problem.scales();
        let of_heads = sequences.saturating_mul(kv_heads);
        let chunks = problem.chunks();
        count("k", of_heads.saturating_mul(chunks).saturating_mul(2))?;
        let mean = partials + (4 * 2 * MOST_COLUMNS * of_heads * chunks) as u64;
        let q_mean = mean + (4 * MOST_COLUMNS * of_heads) as u64;
        let params = Params {
            q,
            k,
            v,
            q8,
            k8,
            v8,
            q_scale: launch.output_address("q_scale", &mut outputs.q_scale)?,
            k_scale: launch.output_address("k_scale", &mut outputs.k_scale)?,
            v_scale: launch.output_address("v_scale", &mut outputs.v_scale)?,
            lse_shift,
            partials,
            mean,
            q_mean: if q_shift == 0 { 0 } else { q_mean },
            q_shift,
            scale,
            smooth: smooth.into(),
            heads: count("q", heads)?,
            kv_heads: count("k", kv_heads)?,
            group: (heads / kv_heads.max(1)).max(1) as u32,
            sq: count("q", queries)?,
            sk: count("k", keys)?,
            dqk: dqk as u32,
            dv: dv as u32,
            q_vectorized,
            k_vectorized,
            v_vectorized,
            q_blocks: q_scales[2] as u32,
            k_blocks: k_scales[2] as u32,
            v_columns: v_scales[2] as u32,
            chunks: chunks as u32,
            of_q: count("q", elements(&q_scales))?,
            of_k: count("k", elements(&k_scales))?,
        };
        let dtype = float_index(T::DTYPE);
        let [means, quantize_smooth, shifts] = SMOOTH[dtype];
        let smooth = match q_shift {
            0 => None,
            _ => Some([stream.kernel(means)?, stream.kernel(shifts)?]),
        };
        Ok(Self {
            op,
            stream,
            params,
            heads: of_heads,
            stats: stream.kernel(STATS[dtype])?,
            finish: stream.kernel(FINISH)?,
            quantize: stream.kernel(if smooth.is_some() { quantize_smooth } else { QUANTIZE[dtype] })?,
            smooth,
        })
    }

    fn run(self) -> Result<()> {
        let Self { op, stream, params, heads, stats, finish, quantize, smooth } = self;
        let [of_q, of_k] = [params.of_q as usize, params.of_k as usize];
        let [means, shifts] = match &smooth {
            Some([means, shifts]) => [Some((means, of_q)), Some((shifts, of_k))],
            None => [None, None],
        };
        let launches = [
            Some((&stats, heads * params.chunks as usize)),
            Some((&finish, heads)),
            means,
            Some((&quantize, of_q + 2 * of_k)),
            shifts,
        ];
        for (kernel, blocks) in launches.into_iter().flatten().filter(|(_, blocks)| *blocks > 0) {
            // SAFETY: the operators have checked all tensors against the sizes, and the workspace has room for the partial results of each
            // chunk and the means.
            unsafe { stream.launch(op).run(kernel, LaunchConfig::grid_1d(blocks), &params)? };
        }
        Ok(())
    }
}

/// A launch of attention.
struct Attention<'a> {
    problem: Problem<'a>,
    params: SageParams,
}

impl Attention<'_> {
    fn run(self, sizes: &SageProblem) -> Result<()> {
        let SageProblem { sequences, queries, keys, dqk, dv, .. } = *sizes;
        let params = self.params;
        let (_, kernels) =
            ATTENTION.into_iter().find(|(most, _)| dqk.max(dv) <= *most).unwrap_or(ATTENTION[1]);
        let kernels = kernels[usize::from(params.q_shift != 0)];
        self.problem.run_tiles(sequences, [queries, keys], kernels, move |all| SageParams { all, ..params })
    }
}

fn attention<'a, F: DeviceFp8, O: Float>(
    op: &'static str,
    stream: &'a Stream,
    of: &SageQuantized<'a, F>,
    outputs: AttentionOutputs<'a, O>,
    sizes: &SageProblem,
    options: &SageOptions,
) -> Result<Attention<'a>> {
    let SageProblem { heads, kv_heads, dv, .. } = *sizes;
    let [dqk, v_columns] = sizes.columns();
    let AttentionOutputs { mut out, mut lse } = outputs;
    let mut problem = Problem::new(op, stream, DType::Bf16, Heads { heads, kv_heads, dqk, dv });
    problem.params.q = Problem::rows::<i8>(&problem.launch.input("q8", &of.q8)?);
    let (k, v) = (problem.key_rows("k8", &of.k8)?, problem.key_rows("v8", &of.v8)?);
    problem.params.fresh = KeysValues { k, v, ..KeysValues::zeroed() };
    problem.out("out", &mut out)?;
    problem.params.out_type = match O::DTYPE {
        DType::F16 => F16,
        DType::F32 => F32,
        _ => 0,
    };
    // Runs of eight columns.
    problem.params.out_vectorized = Problem::vectorized::<O>(&problem.params.out, 8, dv);
    problem.lse(lse.as_mut())?;
    problem.mask(options.mask);
    problem.tile(options.tile);
    let [q_scales, k_scales, _] = sizes.scales();
    let mut address = |arg, view: &TensorView<'a, f32>| problem.launch.input_address(arg, view);
    let params = SageParams {
        q_scale: address("q_scale", &of.q_scale)?,
        k_scale: address("k_scale", &of.k_scale)?,
        v_scale: address("v_scale", &of.v_scale)?,
        lse_shift: match &of.lse_shift {
            Some(shift) => address("lse_shift", shift)?,
            None => 0,
        },
        q_shift: match &of.q_shift {
            Some(shift) => address("q_shift", shift)?,
            None => 0,
        },
        q_blocks: q_scales[2] as u32,
        k_blocks: k_scales[2] as u32,
        v_columns: v_columns as u32,
        ..SageParams::zeroed()
    };
    let rows = sizes.sequences.saturating_mul(heads).max(elements(&q_scales));
    if rows >= 1 << 30 {
        return Err(Error::too_large(
            op,
            "q",
            format!("{rows} sequences by heads and blocks"),
            (1 << 30) - 1,
        ));
    }
    Ok(Attention { problem, params })
}
