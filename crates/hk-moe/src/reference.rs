//! The operators again, in plain loops.

use crate::{Activation, ExpertGate, GateOrder, Scores, SlotOrder, Ties, TopkOptions, moe_bitmatrix_shape};
use hk_core::registry::dot;
use hk_core::{DType, Float, bf16, f16};
use hk_gemm::reference::activate;

/// What `moe_align_block_size` gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Aligned {
    /// Gates by expert, each expert padded to whole tiles; the number of gates where there is none.
    pub sorted_token_ids: Vec<i32>,
    /// The expert of each tile, -1 past the last.
    pub expert_ids: Vec<i32>,
    /// Length of the tiles together.
    pub num_tokens_post_padded: i32,
}

/// Gates of `topk_ids` by expert, into a list of `len` slots; ids outside `0..experts` are dropped.
pub fn moe_align_block_size(
    topk_ids: &[i32],
    experts: usize,
    block_size: usize,
    expert_map: Option<&[i32]>,
    len: usize,
    tiles: usize,
) -> Aligned {
    let none = topk_ids.len() as i32;
    let (mut sorted, mut expert_ids) = (Vec::new(), Vec::new());
    for expert in 0..experts {
        let gates = topk_ids.iter().enumerate().filter(|(_, id)| **id == expert as i32);
        sorted.extend(gates.map(|(gate, _)| gate as i32));
        sorted.resize(sorted.len().next_multiple_of(block_size), none);
        let local = expert_map.map_or(expert as i32, |map| map[expert].max(-1));
        expert_ids.resize(sorted.len() / block_size, local);
    }
    let padded = sorted.len() as i32;
    sorted.resize(len, none);
    expert_ids.resize(tiles, -1);
    Aligned { sorted_token_ids: sorted, expert_ids, num_tokens_post_padded: padded }
}

/// What `moe_topk` gives.
#[derive(Debug, Clone, PartialEq)]
pub struct Chosen {
    /// `[T, k]`.
    pub ids: Vec<i32>,
    /// `[T, k]`.
    pub weights: Vec<f64>,
}

/// The experts of each token. What is chosen by is in `f32`, as the operator's: `nudge` moves it relatively by up to as much, in ways
/// that differ from score to score, so that choices that depend on its rounding can be told.
pub fn moe_topk(
    logits: &[f64],
    experts: usize,
    bias: Option<&[f64]>,
    k: usize,
    options: &TopkOptions,
    nudge: f64,
) -> Chosen {
    let mut chosen = Chosen { ids: vec![], weights: vec![] };
    for row in logits.chunks(experts) {
        let scores: Vec<f64> = row.iter().map(|&x| score(x, options.scores)).collect();
        let keys: Vec<f32> = (0..experts)
            .map(|e| {
                let bias = bias.map_or(-0.0, |bias| bias[e]);
                let key = signed_sum(scores[e] as f32, bias as f32);
                let hash =
                    (row[e].to_bits() ^ bias.to_bits().rotate_left(17)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let direction = (hash >> 40) as f64 / f64::from(1 << 23) - 1.0;
                if nudge == 0.0 { key } else { (f64::from(key) * (1.0 + nudge * direction)) as f32 }
            })
            .collect();
        let open = open_experts(&keys, bias.is_some(), options);
        let ids = first_of(&keys, &open, k, options.ties);
        let ids = match options.order {
            SlotOrder::ByPreference => ids,
            SlotOrder::ByExpert => sorted(ids),
        };
        let softmax = |over: &[usize]| {
            let most = over.iter().map(|&e| scores[e]).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = over.iter().map(|&e| (scores[e] - most).exp()).sum();
            ids.iter().map(|&e| (scores[e] - most).exp() / sum).collect()
        };
        let mut weights: Vec<f64> = match options.scores {
            Scores::SoftmaxChosen => softmax(&ids),
            Scores::Softmax => softmax(&(0..experts).collect::<Vec<_>>()),
            _ => ids.iter().map(|&e| scores[e]).collect(),
        };
        if options.renormalize {
            let sum = weights.iter().sum::<f64>() + 1e-20;
            weights.iter_mut().for_each(|w| *w /= sum);
        }
        chosen.weights.extend(weights.iter().map(|w| w * f64::from(options.scaling)));
        chosen.ids.extend(ids.iter().map(|&e| e as i32));
    }
    chosen
}

fn score(x: f64, scores: Scores) -> f64 {
    match scores {
        _ if x.is_nan() => x,
        Scores::Logits | Scores::SoftmaxChosen | Scores::Softmax => x,
        Scores::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Scores::SqrtSoftplus => (x.max(0.0) + (-x.abs()).exp().ln_1p()).sqrt(),
    }
}

/// The sum; a NaN keeps its sign, and infinity - infinity is positive.
fn signed_sum(a: f32, b: f32) -> f32 {
    match a + b {
        sum if !sum.is_nan() => sum,
        _ if a.is_nan() => a,
        _ if b.is_nan() => b,
        _ => f32::NAN,
    }
}

/// The first `k` of the candidates, the best first.
fn first_of(keys: &[f32], candidates: &[usize], k: usize, ties: Ties) -> Vec<usize> {
    let mut order = candidates.to_vec();
    order.sort_by(|&a, &b| {
        let by_index = match ties {
            Ties::LowIndex => a.cmp(&b),
            Ties::HighIndex => b.cmp(&a),
        };
        keys[b].total_cmp(&keys[a]).then(by_index)
    });
    order.truncate(k);
    order
}

/// The experts of the groups that are kept.
fn open_experts(keys: &[f32], biased: bool, options: &TopkOptions) -> Vec<usize> {
    let Some(groups) = options.groups else { return (0..keys.len()).collect() };
    let size = keys.len() / groups.groups;
    let scores: Vec<f32> = keys
        .chunks(size)
        .map(|group| {
            let mut group = group.to_vec();
            group.sort_by(|a, b| b.total_cmp(a));
            if biased && size > 1 { signed_sum(group[0], group[1]) } else { group[0] }
        })
        .collect();
    let all: Vec<usize> = (0..groups.groups).collect();
    sorted(first_of(&scores, &all, groups.kept, options.ties))
        .into_iter()
        .flat_map(|group| group * size..(group + 1) * size)
        .collect()
}

fn sorted(mut all: Vec<usize>) -> Vec<usize> {
    all.sort_unstable();
    all
}

/// The bits of tokens' experts, `[words, rows]`: see `moe_bitmatrix_shape`.
pub fn moe_bitmatrix_of(ids: &[i32], k: usize, experts: usize) -> Vec<i32> {
    let [words, rows] = moe_bitmatrix_shape(ids.len() / k, experts);
    let mut bits = vec![0; words * rows];
    for (token, ids) in ids.chunks(k).enumerate() {
        for id in ids.iter().map(|&id| id as usize) {
            bits[id / 32 * rows + token] |= 1 << (id % 32);
        }
    }
    bits
}

/// How many tokens have each expert of a bitmatrix of `rows` rows a word, and how many before each part of `tokens`.
pub fn moe_bitmatrix(bits: &[i32], rows: usize, tokens: usize, part: usize) -> (Vec<i32>, Vec<i32>) {
    let words = bits.len() / rows.max(1);
    let mut hist = vec![0; 32 * words];
    let mut partials = vec![];
    for token in 0..tokens {
        if token % part == 0 {
            partials.extend(&hist);
        }
        for (expert, count) in hist.iter_mut().enumerate() {
            *count += bits[expert / 32 * rows + token] >> (expert % 32) & 1;
        }
    }
    (hist, partials)
}

/// What `moe_expt_data` gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expt {
    /// `[E + 1]`.
    pub token_offs_raw: Vec<i32>,
    /// `[E + 1]`.
    pub token_offs_pad: Vec<i32>,
    /// Tiles, -1 past the last.
    pub block_pid_map: Vec<i32>,
}

/// Offsets of experts in gates and in tiles, and a map of `len` tiles.
pub fn moe_expt_data(hist: &[i32], block_m: usize, len: usize) -> Expt {
    let mut all = Expt { token_offs_raw: vec![0], token_offs_pad: vec![0], block_pid_map: vec![] };
    let (mut gates, mut tiles) = (0, 0);
    for (expert, &n) in hist.iter().enumerate() {
        let of_expert = (n as usize).div_ceil(block_m) as i32;
        all.block_pid_map.extend((0..of_expert).map(|tile| tile << 16 | expert as i32));
        (gates, tiles) = (gates + n, tiles + of_expert);
        all.token_offs_raw.push(gates);
        all.token_offs_pad.push(tiles);
    }
    all.block_pid_map.resize(len, -1);
    all
}

/// What `moe_routing` gives beside the offsets.
#[derive(Debug, Clone, PartialEq)]
pub struct Sorted {
    /// Gates by expert.
    pub gather_indx: Vec<i32>,
    /// Place of each gate.
    pub scatter_indx: Vec<i32>,
    /// Weights by place.
    pub gate_scal: Vec<f64>,
    /// Gates of each expert.
    pub expt_hist: Vec<i32>,
}

/// The gates of a choice sorted by expert.
pub fn moe_sort(chosen: &Chosen, experts: usize) -> Sorted {
    let mut order: Vec<usize> = (0..chosen.ids.len()).collect();
    order.sort_by_key(|&gate| chosen.ids[gate]);
    let mut scatter = vec![0; order.len()];
    for (place, &gate) in order.iter().enumerate() {
        scatter[gate] = place as i32;
    }
    let mut hist = vec![0; experts];
    chosen.ids.iter().for_each(|&id| hist[id as usize] += 1);
    Sorted {
        gate_scal: order.iter().map(|&gate| chosen.weights[gate]).collect(),
        gather_indx: order.into_iter().map(|gate| gate as i32).collect(),
        scatter_indx: scatter,
        expt_hist: hist,
    }
}

/// The sum of the gates of each token, and the sums of the absolute terms.
pub fn moe_sum(
    x: &[f64],
    cols: usize,
    places: &[i32],
    k: usize,
    residual: Option<&[f64]>,
) -> (Vec<f64>, Vec<f64>) {
    let (mut y, mut magnitudes) = (vec![], vec![]);
    let rows = x.len() / cols.max(1);
    for (token, places) in places.chunks(k).enumerate() {
        for col in 0..cols {
            let inside = places.iter().filter(|&&place| place >= 0 && (place as usize) < rows);
            let terms = inside.map(|&place| x[place as usize * cols + col]);
            let all: Vec<f64> = terms.chain(residual.map(|r| r[token * cols + col])).collect();
            y.push(all.iter().sum());
            magnitudes.push(all.iter().map(|v| v.abs()).sum());
        }
    }
    (y, magnitudes)
}

/// The best expert of each token, and its weight: `x` is `[T, H]`, `w` is `[H, E]`. Sigmoids are compared in `f32`, where those of large
/// logits are 1.
pub fn moe_routing_sigmoid_top1_fused(x: &[f64], w: &[f64], cols: usize, shared: bool) -> Chosen {
    let mut chosen = Chosen { ids: vec![], weights: vec![] };
    let experts = w.len() / cols.max(1);
    for row in x.chunks(cols.max(1)) {
        let (mut best, mut most) = (0, 0.0f32);
        for e in 0..experts {
            let logit: f64 = row.iter().enumerate().map(|(h, x)| x * w[h * experts + e]).sum();
            let score = 1.0 / (1.0 + (-logit as f32).exp());
            if e == 0 || score > most || (score.is_nan() && !most.is_nan()) {
                (best, most) = (e, score);
            }
        }
        chosen.ids.push(best as i32);
        chosen.weights.push(f64::from(most));
        if shared {
            chosen.ids.push(experts as i32);
            chosen.weights.push(1.0);
        }
    }
    chosen
}

/// Error of a sum in `f32`, relative to its magnitude.
pub const EXPERT_TERMS: f64 = 1.0 / (1u64 << 17) as f64;

/// An expert GEMM in values: quantized operands as what they stand for.
#[derive(Debug, Clone)]
pub struct ExpertProblem<'a> {
    /// `[rows, k]`.
    pub a: &'a [f64],
    /// `[experts, w_rows, k]`.
    pub w: &'a [f64],
    /// Columns of both.
    pub k: usize,
    /// Rows of `w` of an expert.
    pub w_rows: usize,
    /// `[experts, w_rows]`.
    pub bias: Option<&'a [f64]>,
    /// For rows of `y`.
    pub weights: Option<&'a [f64]>,
    /// The weight multiplies the sum ahead of the bias and the activation.
    pub weight_first: bool,
    /// Gated outputs.
    pub gate: Option<ExpertGate>,
    /// Function of outputs that are not gated.
    pub activation: Option<Activation>,
    /// Type to which gate and value are rounded.
    pub round: Option<DType>,
}

/// Outputs of rows `[(row of a, expert)]`, and for each how far the same in `f32` can be off, in [`EXPERT_TERMS`]. Rows of no expert are
/// zero.
///
/// # Panics
/// If a slice is shorter.
pub fn expert_gemm(p: &ExpertProblem, rows: &[Option<(usize, usize)>]) -> (Vec<f64>, Vec<f64>) {
    let cols = if p.gate.is_some() { p.w_rows / 2 } else { p.w_rows };
    let (mut y, mut magnitudes) = (vec![], vec![]);
    for (index, row) in rows.iter().enumerate() {
        let Some((source, expert)) = *row else {
            y.extend(vec![0.0; cols]);
            magnitudes.extend(vec![0.0; cols]);
            continue;
        };
        let weight = p.weights.map_or(1.0, |weights| weights[index]);
        let (before, after) = if p.weight_first { (weight, 1.0) } else { (1.0, weight) };
        // The sum for a row of w, and its magnitude.
        let sum = |n: usize| {
            let at = expert * p.w_rows + n;
            let (value, magnitude) = dot(&p.a[source * p.k..][..p.k], &p.w[at * p.k..][..p.k]);
            let bias = p.bias.map_or(0.0, |bias| bias[at]);
            (value * before + bias, magnitude * before.abs() + bias.abs())
        };
        for col in 0..cols {
            let (value, magnitude) = match p.gate {
                None => {
                    let (x, magnitude) = sum(col);
                    (activate(p.activation, x), magnitude * if p.activation.is_some() { 1.13 } else { 1.0 })
                }
                Some(gate) => {
                    let (g, v) = match gate.order {
                        GateOrder::Halves => (sum(col), sum(cols + col)),
                        GateOrder::Pairs => (sum(2 * col), sum(2 * col + 1)),
                    };
                    gated(&gate, rounded(p.round, g), rounded(p.round, v))
                }
            };
            y.push(value * after);
            magnitudes.push(magnitude * after.abs());
        }
    }
    (y, magnitudes)
}

/// A sum rounded to a type. Another sum in `f32` can round to its other neighbour: that step is in the magnitude.
fn rounded(to: Option<DType>, (x, magnitude): (f64, f64)) -> (f64, f64) {
    let round = |x: f64| match to {
        Some(DType::Bf16) => <bf16 as Float>::from_f64(x).to_f64(),
        Some(DType::F16) => <f16 as Float>::from_f64(x).to_f64(),
        _ => x,
    };
    let reach = EXPERT_TERMS * magnitude;
    (round(x), (round(x + reach) - round(x - reach)) / EXPERT_TERMS + magnitude)
}

fn gated(gate: &ExpertGate, (g, of_g): (f64, f64), (v, of_v): (f64, f64)) -> (f64, f64) {
    let limit = gate.limit.map_or(f64::INFINITY, f64::from);
    // NaN stays NaN.
    let g = if g > limit { limit } else { g };
    let v = if v > limit {
        limit
    } else if v < -limit {
        -limit
    } else {
        v
    } + f64::from(gate.add);
    let alpha = f64::from(gate.alpha);
    let activated = if gate.activation == Activation::Silu {
        g / (1.0 + (-alpha * g).exp())
    } else {
        activate(Some(gate.activation), g)
    };
    // silu(alpha x) / alpha is as steep as silu.
    let farthest = v.abs() + EXPERT_TERMS * of_v;
    (activated * v, 1.13 * of_g * farthest + activated.abs() * (of_v + v.abs()))
}
