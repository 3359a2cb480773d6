//! SageAttention's quantization, in f64 and plain loops.

use crate::SageProblem;
use hk_core::{DType, Fp8E4M3, Fp8E4M3Fnuz};

/// What [`quantize`] is made of: rows `[B, S, H, D]`.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Queries.
    pub q: &'a [f64],
    /// Keys.
    pub k: &'a [f64],
    /// Values.
    pub v: &'a [f64],
    /// Factor of the products.
    pub scale: f64,
    /// Whether the mean of keys is subtracted.
    pub smooth_k: bool,
    /// Whether the mean of each block of queries is subtracted.
    pub smooth_q: bool,
}

/// Quantized queries, keys and values, see [`SageQuantized`](crate::SageQuantized).
#[derive(Debug, Clone, Default)]
pub struct Quantized {
    /// Integers.
    pub q8: Vec<f64>,
    /// Factors of blocks of queries.
    pub q_scale: Vec<f64>,
    /// Integers.
    pub k8: Vec<f64>,
    /// Factors of blocks of keys.
    pub k_scale: Vec<f64>,
    /// Numbers of fp8.
    pub v8: Vec<f64>,
    /// Factors of columns.
    pub v_scale: Vec<f64>,
    /// What LSE of the keys less their mean lacks.
    pub lse_shift: Vec<f64>,
    /// What scores of the queries less their mean lack, in units of log2: `[B, Hq, blocks, keys in 128s]`.
    pub q_shift: Vec<f64>,
}

/// `amax / most`; 1 of zeros, below 1e-30 that of 1e-30.
fn factor(amax: f64, most: f64) -> f64 {
    if amax == 0.0 { 1.0 } else { amax.max(1e-30) / most }
}

/// Rows `[B, S, H, D]` as int8 with a factor for each head and `of_block` rows: integers with `columns` columns, and factors `[B, H, blocks]`.
fn by_blocks(
    x: &[f64],
    [batch, rows, heads, cols]: [usize; 4],
    columns: usize,
    of_block: usize,
) -> (Vec<f64>, Vec<f64>) {
    let blocks = rows.div_ceil(of_block);
    let (mut codes, mut factors) =
        (vec![0.0; batch * rows * heads * columns], vec![0.0; batch * heads * blocks]);
    for b in 0..batch {
        for h in 0..heads {
            for block in 0..blocks {
                let of = block * of_block..rows.min((block + 1) * of_block);
                let row = |r: usize| &x[((b * rows + r) * heads + h) * cols..][..cols];
                let amax = of.clone().flat_map(|r| row(r).iter()).fold(0.0, |m: f64, x| m.max(x.abs()));
                let scale = factor(amax, 127.0);
                factors[(b * heads + h) * blocks + block] = scale;
                for r in of {
                    let to = &mut codes[((b * rows + r) * heads + h) * columns..][..cols];
                    to.iter_mut().zip(row(r)).for_each(|(to, x)| *to = (x / scale).round());
                }
            }
        }
    }
    (codes, factors)
}

/// Quantizes as [`sage_quantize`](crate::sage_quantize); `fp8` is the type of values.
pub fn quantize(problem: &SageProblem, inputs: &Inputs, fp8: DType) -> Quantized {
    let SageProblem { sequences, heads, kv_heads, queries, keys, dqk, dv } = *problem;
    let Inputs { q, k, v, scale, smooth_k, smooth_q } = *inputs;
    let [[.., qk_columns], _, [.., v_columns]] = problem.rows();
    let mut mean = vec![0.0; sequences * kv_heads * dqk];
    if smooth_k {
        for (i, x) in k.iter().enumerate() {
            let (row, c) = (i / dqk, i % dqk);
            let (b, h) = (row / kv_heads / keys, row % kv_heads);
            mean[(b * kv_heads + h) * dqk + c] += x / keys as f64;
        }
    }
    let mean_of = |b: usize, h: usize| &mean[(b * kv_heads + h) * dqk..][..dqk];
    let smooth: Vec<f64> = (k.iter().enumerate())
        .map(|(i, x)| {
            let row = i / dqk;
            x - mean_of(row / kv_heads / keys, row % kv_heads)[i % dqk]
        })
        .collect();
    let in_log2 = scale * std::f64::consts::LOG2_E;
    let group = heads / kv_heads.max(1);
    let [.., blocks, of_row] = problem.query_shifts();
    let mut q_mean = vec![0.0; sequences * heads * blocks * dqk];
    let mut q_shift = vec![0.0; sequences * heads * blocks * of_row];
    let block_of = |row: usize| {
        let (b, i, h) = (row / heads / queries, row / heads % queries, row % heads);
        ((b * heads + h) * blocks + i / 256, 256.min(queries - i / 256 * 256))
    };
    if smooth_q {
        for (i, x) in q.iter().enumerate() {
            let (block, rows) = block_of(i / dqk);
            q_mean[block * dqk + i % dqk] += x / rows as f64;
        }
        for (block, mean) in q_mean.chunks(dqk).enumerate() {
            let (b, h) = (block / blocks / heads, block / blocks % heads / group);
            for j in 0..keys {
                let key = &smooth[((b * keys + j) * kv_heads + h) * dqk..][..dqk];
                let dot: f64 = mean.iter().zip(key).map(|(q, k)| q * k).sum();
                q_shift[block * of_row + j] = in_log2 * dot;
            }
        }
    }
    let less = |(i, x): (usize, &f64)| x - q_mean[block_of(i / dqk).0 * dqk + i % dqk];
    let scaled: Vec<f64> = q.iter().enumerate().map(|x| less(x) * in_log2).collect();
    let (q8, q_scale) = by_blocks(&scaled, [sequences, queries, heads, dqk], qk_columns, 256);
    let (k8, k_scale) = by_blocks(&smooth, [sequences, keys, kv_heads, dqk], qk_columns, 128);

    let (most, round): (f64, fn(f32) -> f64) = match fp8 {
        DType::Fp8E4M3 => (448.0, |x| Fp8E4M3::from_f32_saturating(x).to_f32().into()),
        _ => (240.0, |x| Fp8E4M3Fnuz::from_f32_saturating(x).to_f32().into()),
    };
    let mut v_scale = vec![0.0; sequences * kv_heads * v_columns];
    let mut v8 = vec![0.0; sequences * keys * kv_heads * v_columns];
    for b in 0..sequences {
        for h in 0..kv_heads {
            for c in 0..v_columns {
                let at = |j: usize| {
                    if c < dv { v[((b * keys + j) * kv_heads + h) * dv + c] } else { 0.0 }
                };
                let of = factor((0..keys).fold(0.0, |m: f64, j| m.max(at(j).abs())), most);
                v_scale[(b * kv_heads + h) * v_columns + c] = of;
                for j in 0..keys {
                    v8[((b * keys + j) * kv_heads + h) * v_columns + c] = round((at(j) / of) as f32);
                }
            }
        }
    }

    let mut lse_shift = Vec::with_capacity(sequences * heads * queries);
    for b in 0..sequences {
        for h in 0..heads {
            for i in 0..queries {
                let row = &q[((b * queries + i) * heads + h) * dqk..][..dqk];
                let dot: f64 = row.iter().zip(mean_of(b, h / group)).map(|(q, m)| q * m).sum();
                lse_shift.push(scale * dot);
            }
        }
    }
    Quantized { q8, q_scale, k8, k_scale, v8, v_scale, lse_shift, q_shift }
}
