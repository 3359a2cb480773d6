//! Arguments, options and references that the entries of attention share.

use super::common::{integers, layout};
use crate::reference::attention::{Attention, Dropout as HostDropout};
use crate::{
    AttentionElement, AttentionOptions, AttentionProblem, Bias, Descales, Dropout, Mask, Pages, QueryTile,
    Tiling, attention_workspace,
};
use hk_core::registry::{
    ArgSpec, Call, Described, HostCall, HostTensorF64, Inputs, Named, Outputs, Sample, Scalar, ScalarSpec,
    Tolerance,
};
use hk_core::{DType, Error, Result, Stream, TensorView, TensorViewMut};
use std::ops::Range;

/// Types of queries, keys and values.
pub(super) const QKV: &[DType] = &[DType::Bf16, DType::F16, DType::F32, DType::Fp8E4M3, DType::Fp8E4M3Fnuz];
/// Types of outputs: fp8 inputs have `bf16` ones.
pub(super) const OUT: &[DType] = &[DType::Bf16, DType::F16, DType::F32];

pub(super) const F32: &[DType] = &[DType::F32];
const BIAS: &[DType] = &[DType::F32, DType::Bf16, DType::F16];

/// Log-sum-exp, in f32: products of 16-bit or 32-bit inputs, summed in f32.
pub(super) const LSE: Tolerance = Tolerance::Within { rtol: 1e-4, atol: 1e-4 };

pub(super) const ALIBI: ArgSpec = ArgSpec::input("alibi", F32, 1, "[Hq] or [sequences, Hq]")
    .ranks(1, 2)
    .sampled(Sample::Uniform { low: 0.01, high: 0.5 })
    .optional();
pub(super) const BIAS_ARG: ArgSpec =
    ArgSpec::input("bias", BIAS, 2, "[Sq, Sk] or [sequences, Hq, Sq, Sk]").ranks(2, 4).optional();
pub(super) const SINK: ArgSpec = ArgSpec::input("sink", F32, 1, "[Hq]").optional();
const DESCALE: Sample = Sample::Uniform { low: 0.5, high: 2.0 };
pub(super) const Q_DESCALE: ArgSpec =
    ArgSpec::input("q_descale", F32, 1, "[sequences, Hq] or [1]").ranks(1, 2).sampled(DESCALE).optional();
pub(super) const K_DESCALE: ArgSpec =
    ArgSpec::input("k_descale", F32, 1, "[sequences, Hkv] or [1]").ranks(1, 2).sampled(DESCALE).optional();
pub(super) const V_DESCALE: ArgSpec = ArgSpec { name: "v_descale", ..K_DESCALE };

pub(super) const SCALE: ScalarSpec = ScalarSpec {
    name: "scale",
    default: Scalar::Float(0.0),
    choices: &[],
    summary: "factor of q . k; 0: 1 / sqrt(Dqk)",
};
pub(super) const CAUSAL: ScalarSpec = ScalarSpec {
    name: "causal",
    default: Scalar::Bool(false),
    choices: &[],
    summary: "keys after the query's own place are masked",
};
pub(super) const WINDOW_LEFT: ScalarSpec = ScalarSpec {
    name: "window_left",
    default: Scalar::Int(-1),
    choices: &[],
    summary: "visible keys before the query's own place; -1: all",
};
pub(super) const WINDOW_RIGHT: ScalarSpec = ScalarSpec {
    name: "window_right",
    summary: "visible keys after the query's own place; -1: all",
    ..WINDOW_LEFT
};
/// Of operators that are causal.
pub(super) const WINDOW: ScalarSpec = ScalarSpec { name: "window", ..WINDOW_LEFT };
pub(super) const SOFTCAP: ScalarSpec = ScalarSpec {
    name: "softcap",
    default: Scalar::Float(0.0),
    choices: &[],
    summary: "c > 0: scores become c tanh(s / c)",
};
pub(super) const DROPOUT_P: ScalarSpec = ScalarSpec {
    name: "dropout_p",
    default: Scalar::Float(0.0),
    choices: &[],
    summary: "probability with which a key is dropped",
};
pub(super) const SEED: ScalarSpec = ScalarSpec {
    name: "seed",
    default: Scalar::Count(0),
    choices: &[],
    summary: "key of the random numbers of dropout",
};
pub(super) const OFFSET: ScalarSpec =
    ScalarSpec { name: "offset", summary: "added to the counters of dropout", ..SEED };

pub(super) const KEYS_PER_SPLIT: ScalarSpec = ScalarSpec {
    name: "keys_per_split",
    default: Scalar::Count(0),
    choices: &[],
    summary: "with a given tile: keys of a split; 0: one split",
};
pub(super) const TILE: ScalarSpec = ScalarSpec {
    name: "tile",
    default: Scalar::Choice("auto"),
    choices: &["auto", "short", "tall"],
    summary: "tile and splits that suit the call and the device, or batch-invariant ones",
};

pub(super) const QUERY_TILE: ScalarSpec = ScalarSpec {
    summary: "tiles of query rows that suit the call and the device, or batch-invariant ones",
    ..TILE
};

/// Scalars of `mha` and `mha_varlen`.
pub(super) const SCALARS: &[ScalarSpec] =
    &[SCALE, CAUSAL, WINDOW_LEFT, WINDOW_RIGHT, SOFTCAP, DROPOUT_P, SEED, OFFSET, TILE, KEYS_PER_SPLIT];

fn has<V: Described>(call: &Call<V>, name: &str) -> bool {
    call.operator().scalars.iter().any(|s| s.name == name)
}

pub(super) fn float<V: Described>(call: &Call<V>, name: &str) -> Result<f32> {
    if has(call, name) { Ok(call.float(name)? as f32) } else { Ok(0.0) }
}

/// Keys on one side of the query's own place.
pub(super) fn window<V: Described>(call: &Call<V>, name: &'static str) -> Result<Option<u32>> {
    if !has(call, name) {
        return Ok(None);
    }
    match call.int(name)? {
        -1 => Ok(None),
        keys => u32::try_from(keys).map(Some).map_err(|_| {
            Error::argument(call.operator().name, name, keys, "-1 (all keys) or a number of keys")
        }),
    }
}

pub(super) fn mask<V: Described>(call: &Call<V>) -> Result<Mask> {
    if has(call, "window") {
        return Ok(Mask { causal: true, left: window(call, "window")?, right: None });
    }
    let causal = has(call, "causal") && call.bool("causal")?;
    Ok(Mask { causal, left: window(call, "window_left")?, right: window(call, "window_right")? })
}

pub(super) fn scale<V: Described>(call: &Call<V>) -> Result<Option<f32>> {
    Ok(Some(float(call, "scale")?).filter(|scale| *scale != 0.0))
}

pub(super) fn dropout<V: Described>(call: &Call<V>) -> Result<Option<Dropout>> {
    let p = float(call, "dropout_p")?;
    if p == 0.0 {
        return Ok(None);
    }
    Ok(Some(Dropout { p, seed: call.count("seed")?, offset: call.count("offset")? }))
}

pub(super) fn descales<'a>(inputs: &Inputs<'a>) -> Result<Descales<'a>> {
    let view = |name| inputs.optional_view::<f32>(name);
    Ok(Descales { q: view("q_descale")?, k: view("k_descale")?, v: view("v_descale")? })
}

/// The options that a call gives.
pub(super) fn options<'a, T: AttentionElement>(inputs: &Inputs<'a>) -> Result<AttentionOptions<'a, T>> {
    let bias = match inputs.optional("bias").map(Described::dtype) {
        None => None,
        Some(DType::F32) => Some(Bias::F32(inputs.view("bias")?)),
        Some(_) => Some(Bias::Own(inputs.view::<T>("bias")?)),
    };
    Ok(AttentionOptions {
        scale: scale(inputs)?,
        mask: mask(inputs)?,
        softcap: float(inputs, "softcap")?,
        alibi: inputs.optional_view("alibi")?,
        bias,
        sink: inputs.optional_view("sink")?,
        dropout: dropout(inputs)?,
        descales: descales(inputs)?,
        tiling: tiling(inputs)?,
        pages: match inputs.optional_view("block_table")? {
            Some(block_table) => Some(Pages { block_table, layout: layout(inputs)? }),
            None => None,
        },
    })
}

/// The tiles of query rows.
pub(super) fn query_tile<V: Described>(call: &Call<V>) -> Result<Option<QueryTile>> {
    Ok(match call.choice("tile")? {
        "short" => Some(QueryTile::Short),
        "tall" => Some(QueryTile::Tall),
        "few" => Some(QueryTile::Few),
        _ => None,
    })
}

/// How the work is cut.
pub(super) fn tiling<V: Described>(call: &Call<V>) -> Result<Tiling> {
    if !has(call, "tile") {
        return Ok(Tiling::Auto);
    }
    let keys = call.size("keys_per_split")?;
    let keys_per_split = Some(keys).filter(|keys| *keys != 0);
    let Some(tile) = query_tile(call)? else {
        if keys == 0 {
            return Ok(Tiling::Auto);
        }
        let op = call.operator().name;
        return Err(Error::argument(op, "keys_per_split", keys, "0 unless a tile is given"));
    };
    if !keys.is_multiple_of(64) {
        return Err(Error::argument(call.operator().name, "keys_per_split", keys, "a multiple of 64"));
    }
    Ok(Tiling::Fixed { tile, keys_per_split })
}

/// The workspace that suits the call.
pub(super) fn workspace<'a>(
    stream: &Stream,
    outputs: &mut Outputs<'a>,
    problem: AttentionProblem,
    tiling: Tiling,
) -> Result<Option<TensorViewMut<'a, f32>>> {
    let len = attention_workspace(stream.device().info(), &problem, tiling);
    if len == 0 { Ok(None) } else { outputs.workspace(stream, len).map(Some) }
}

/// `i32` of an input.
pub(super) fn indices<'a>(inputs: &Inputs<'a>, name: &'static str) -> Result<TensorView<'a, i32>> {
    inputs.view(name)
}

/// A sequence of a call: its rows of `q`, and of `k` and `v` in ascending order; `None`: its output is NaN.
pub(super) struct Sequence {
    pub queries: Range<usize>,
    pub keys: Option<Vec<usize>>,
}

/// Rows of keys and values `[rows, heads, columns]`.
pub(super) struct HostRows {
    pub k: Vec<f64>,
    pub v: Vec<f64>,
}

/// What a call adds to scores.
struct Biases {
    bias: Option<(Vec<usize>, Vec<f64>)>,
    /// Of queries among each other.
    qq: Option<(Vec<usize>, Vec<f64>)>,
}

impl Biases {
    fn of(call: &HostCall) -> Self {
        let values = |name: &str| call.optional(name).map(|t| (t.shape().to_vec(), t.to_f64()));
        Self { bias: values("bias"), qq: values("qq_bias") }
    }

    fn any(&self) -> bool {
        self.bias.is_some() || self.qq.is_some()
    }

    /// What is added to the score of query `i` of `queries` and key `j` of `keys`; NaN where a tensor lacks it.
    fn at(&self, [n, queries, keys]: [usize; 3], [head, i, j]: [usize; 3]) -> f64 {
        let mut sum = 0.0;
        if let Some((shape, values)) = &self.bias {
            let at = match shape[..] {
                [_, cols] => i * cols + j,
                [b, h, rows, cols] => {
                    let pick = |n: usize, of: usize| if of == 1 { 0 } else { n };
                    ((pick(n, b) * h + pick(head, h)) * rows + pick(i, rows)) * cols + j
                }
                _ => 0,
            };
            sum += values[at];
        }
        if let (Some((shape, values)), Some(col)) = (&self.qq, (j + queries).checked_sub(keys)) {
            let there = i < shape[0] && col < shape[1];
            sum += if there { values[i * shape[1] + col] } else { f64::NAN };
        }
        sum
    }
}

/// Bytes that hide keys from queries.
pub(super) struct HostMask {
    bytes: Vec<f64>,
    starts: Vec<i64>,
    skip_prefix: bool,
}

impl HostMask {
    pub fn of(call: &HostCall) -> Result<Option<Self>> {
        let (Some(mask), Some(starts)) = (call.optional("custom_mask"), call.optional("mask_indptr")) else {
            return Ok(None);
        };
        let skip_prefix = call.bool("skip_prefix_mask")?;
        Ok(Some(Self { bytes: mask.to_f64(), starts: integers(starts), skip_prefix }))
    }

    /// The bytes of a sequence, if it has them.
    pub fn of_sequence(&self, [n, queries, keys]: [usize; 3]) -> Option<&[f64]> {
        self.bytes.get(usize::try_from(self.starts[n]).ok()?..)?.get(..queries * keys)
    }

    fn hides(&self, sizes @ [_, queries, keys]: [usize; 3], [i, j]: [usize; 2]) -> bool {
        let prefix = self.skip_prefix && j + queries < keys;
        !prefix && self.of_sequence(sizes).is_some_and(|bytes| bytes[i * keys + j] == 0.0)
    }
}

/// The outputs of attention of these sequences: `out` with the magnitudes of its terms, and `lse`, by rows of `q` `[rows, Hq, Dqk]`.
/// Rows of no sequence are untouched; of calls beyond the limit of the reference also those between some of each sequence, of which
/// the last query is one.
/// `longest`: rows that counters of dropout are made of.
pub(super) fn attend(
    call: &HostCall,
    [heads, kv_heads, dqk, dv]: [usize; 4],
    q: &[f64],
    rows: &HostRows,
    sequences: &[Sequence],
    longest: [usize; 2],
) -> Result<([Vec<f64>; 2], Vec<f64>)> {
    let values = |name: &str| call.optional(name).map(|t| (t.shape().to_vec(), t.to_f64()));
    // A value by sequence and head, of a tensor that may lack either.
    let by_head = |of: &Option<(Vec<usize>, Vec<f64>)>, n: usize, head: usize, heads: usize| {
        of.as_ref().map_or(1.0, |(shape, values)| match shape.len() {
            2 => values[n * heads + head],
            _ if values.len() == 1 => values[0],
            _ => values[head],
        })
    };
    let [q_scale, k_scale, v_scale] = ["q_descale", "k_descale", "v_descale"].map(values);
    let (alibi, sink, bias) = (values("alibi"), values("sink"), Biases::of(call));
    let (mask, hidden) = (mask(call)?, HostMask::of(call)?);
    let softcap = float(call, "softcap")?;
    let out_scale = values("out_scale").map_or(1.0, |(_, scale)| scale[0]);
    let scale = scale(call)?.map_or(1.0 / (dqk as f64).sqrt(), f64::from);
    let total = q.len() / (heads * dqk).max(1);
    if total == 0 {
        return Ok(([vec![], vec![]], vec![]));
    }
    let mut out = vec![HostTensorF64::UNTOUCHED; total * heads * dv];
    let mut magnitudes = vec![0.0; total * heads * dv];
    let mut lse = vec![HostTensorF64::UNTOUCHED; total * heads];
    let keys: usize = sequences.iter().filter_map(|s| s.keys.as_ref()).map(Vec::len).sum();
    let of_queries = 2 * (keys * heads * (dqk + dv)) as u64;
    let most = usize::try_from(call.reference_limit() / of_queries.max(1)).unwrap_or(usize::MAX).max(1);
    for (n, Sequence { queries, keys }) in sequences.iter().enumerate() {
        let [of_y, of_sums] = [heads * dv, heads].map(|width| queries.start * width..queries.end * width);
        let of_magnitudes = &mut magnitudes[of_y.clone()];
        let (of_out, of_lse) = (&mut out[of_y], &mut lse[of_sums]);
        let Some(keys) = keys else {
            of_out.fill(f64::NAN);
            of_lse.fill(f64::NAN);
            continue;
        };
        let scaled = |values: &[f64], heads: usize, columns: usize, by: &Option<(Vec<usize>, Vec<f64>)>| {
            let mut values = values.to_vec();
            for (i, head) in values.chunks_mut(columns).enumerate() {
                head.iter_mut().for_each(|x| *x *= by_head(by, n, i % heads, heads));
            }
            values
        };
        let gather = |values: &[f64], columns: usize| -> Vec<f64> {
            let width = kv_heads * columns;
            keys.iter().flat_map(|row| values[row * width..][..width].to_vec()).collect()
        };
        let q = scaled(&q[queries.start * heads * dqk..queries.end * heads * dqk], heads, dqk, &q_scale);
        let k = scaled(&gather(&rows.k, dqk), kv_heads, dqk, &k_scale);
        let v = scaled(&gather(&rows.v, dv), kv_heads, dv, &v_scale);
        let slopes: Option<Vec<f64>> =
            alibi.is_some().then(|| (0..heads).map(|head| by_head(&alibi, n, head, heads)).collect());
        let sizes = [n, queries.len(), keys.len()];
        let of_bias = |head: usize, i: usize, j: usize| bias.at(sizes, [head, i, j]);
        let is_hidden = |i: usize, j: usize| hidden.as_ref().is_some_and(|mask| mask.hides(sizes, [i, j]));
        let step = queries.len().div_ceil(most).max(1);
        let only = |i: usize| (queries.len() - 1 - i).is_multiple_of(step);
        let attention = Attention {
            heads,
            kv_heads,
            dqk,
            dv,
            scale,
            softcap: softcap.into(),
            causal: mask.causal,
            window: [mask.left, mask.right].map(|keys| keys.map(|n| n as usize)),
            alibi: slopes.as_deref(),
            bias: bias.any().then_some(&of_bias),
            hidden: hidden.is_some().then_some(&is_hidden),
            sink: sink.as_ref().map(|(_, values)| &values[..]),
            dropout: dropout(call)?.map(|Dropout { p, seed, offset }| HostDropout {
                p: p.into(),
                seed,
                offset,
                batch: n,
                longest,
            }),
            only: Some(&only),
        };
        let ([y, terms], sums) = attention.run_with_magnitudes(&q, &k, &v);
        for i in (0..queries.len()).filter(|i| only(*i)) {
            let [of_y, of_sums] = [heads * dv, heads].map(|width| i * width..(i + 1) * width);
            for at in of_y {
                [of_out[at], of_magnitudes[at]] = [y[at] / out_scale, terms[at] / out_scale.abs()];
            }
            of_lse[of_sums.clone()].copy_from_slice(&sums[of_sums]);
        }
    }
    Ok(([out, magnitudes], lse))
}

/// Swaps the last two of three axes.
pub(super) fn transposed(values: &[f64], [batch, rows, cols]: [usize; 3]) -> Vec<f64> {
    let mut out = Vec::with_capacity(values.len());
    for b in 0..batch {
        for c in 0..cols {
            out.extend((0..rows).map(|r| values[(b * rows + r) * cols + c]));
        }
    }
    out
}

/// The rows of packed sequences, by their starts; `None` if these do not rise from 0 to `total`.
pub(super) fn packed(starts: &[i64], total: usize) -> Option<Vec<Range<usize>>> {
    let ends = starts.first() == Some(&0) && starts.last() == Some(&(total as i64));
    let rising = starts.windows(2).all(|pair| pair[0] <= pair[1]);
    (ends && rising).then(|| starts.windows(2).map(|pair| pair[0] as usize..pair[1] as usize).collect())
}

/// The rows of one sequence of keys, by the starts; `None` if there are no such rows.
pub(super) fn keys_of(starts: &[i64], n: usize, total: usize) -> Option<Vec<usize>> {
    let (first, end) = (starts[n], starts[n + 1]);
    (0 <= first && first <= end && end <= total as i64).then(|| (first as usize..end as usize).collect())
}

/// The outputs by name, `out` with the magnitudes of its terms, `lse` if the call asks for it. Weights of fp8 values may be fp8.
pub(super) fn outputs(
    call: &HostCall,
    (shape, [out, magnitudes]): (Vec<usize>, [Vec<f64>; 2]),
    lse: (Vec<usize>, Vec<f64>),
) -> Named<HostTensorF64> {
    let fp8 = call.get("q").is_ok_and(|q| matches!(q.dtype(), DType::Fp8E4M3 | DType::Fp8E4M3Fnuz));
    let tolerance = fp8.then_some(Tolerance::AttentionFp8);
    let out = HostTensorF64::new(shape, out).with_magnitudes(magnitudes);
    let mut outputs = vec![("out", HostTensorF64 { tolerance, ..out })];
    if call.wants("lse") {
        outputs.push(("lse", HostTensorF64::new(lse.0, lse.1)));
    }
    outputs
}
