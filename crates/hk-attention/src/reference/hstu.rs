//! Pointwise attention of one sequence.

use hk_core::registry::dot;

/// `out_i = sum_j silu(alpha q_i . k_j) / max_len v_j` over the tokens `j` that `i` sees ([`sees`](Hstu::sees)).
#[derive(Debug, Clone, Copy)]
pub struct Hstu {
    /// Heads of queries, keys and values.
    pub heads: usize,
    /// Columns of queries and keys.
    pub dqk: usize,
    /// Columns of values.
    pub dv: usize,
    /// Factor of the products.
    pub alpha: f64,
    /// Divisor of the activations.
    pub max_len: f64,
    /// Tokens see those before them only.
    pub causal: bool,
    /// How far tokens see; 0: any distance.
    pub max_attn_len: i64,
    /// Tokens at the start that see all but targets.
    pub contextual_len: i64,
    /// Tokens at the end that are targets.
    pub targets: i64,
    /// How far activations may be off once they are rounded: relative, absolute.
    pub rounding: [f64; 2],
}

impl Hstu {
    /// Whether token `i` of `len` sees token `j`.
    pub fn sees(&self, len: usize, i: usize, j: usize) -> bool {
        let context = self.contextual_len;
        let limit = len as i64 - self.targets - if context > 0 { context - 1 } else { 0 };
        let id = |t: usize| {
            let t = if context > 0 { (t as i64 - context + 1).max(0) } else { t as i64 };
            t.min(limit)
        };
        let (of_query, of_key) = (id(i), id(j));
        let away = if self.causal { of_query - of_key } else { (of_query - of_key).abs() };
        (i == j || away > 0) && (self.max_attn_len == 0 || away <= self.max_attn_len)
            || context > 0 && of_query == 0 && of_key < limit
    }

    /// Output `[tokens, heads, dv]` of `q`, `k` `[tokens, heads, dqk]` and `v` `[tokens, heads, dv]`, and how far sums in `f32` of
    /// rounded activations may be off.
    pub fn run(&self, q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let ulp = 2f64.powi(-24);
        let [relative, absolute] = self.rounding;
        let len = q.len() / (self.heads * self.dqk).max(1);
        let (mut out, mut off) =
            (vec![0.0; len * self.heads * self.dv], vec![0.0; len * self.heads * self.dv]);
        for (i, head) in (0..len).flat_map(|i| (0..self.heads).map(move |h| (i, h))) {
            let row = |j: usize| j * self.heads + head;
            for j in (0..len).filter(|&j| self.sees(len, i, j)) {
                let (sum, terms) =
                    dot(&q[row(i) * self.dqk..][..self.dqk], &k[row(j) * self.dqk..][..self.dqk]);
                let x = self.alpha * sum;
                let silu = x / (1.0 + (-x).exp());
                // The slope of silu is at most 1.1.
                let of_x = 1.1 * self.alpha.abs() * terms * (self.dqk + 4) as f64 * ulp;
                let of_sum = (len as f64 + 8.0 + 4.0 * x.abs()) * ulp;
                let of_silu = of_x + absolute + silu.abs() * (relative + of_sum);
                for c in 0..self.dv {
                    let value = v[row(j) * self.dv + c] / self.max_len;
                    out[row(i) * self.dv + c] += silu * value;
                    off[row(i) * self.dv + c] += of_silu * value.abs();
                }
            }
        }
        (out, off)
    }
}

impl Hstu {
    /// Gradients of `sum out dout` by `q`, `k` and `v`: with `x = alpha q_i . k_j` and `f = 1 / (1 + exp(-x))`, the slope of `silu(x)` is
    /// `f (1 + x (1 - f))`.
    pub fn backward(&self, q: &[f64], k: &[f64], v: &[f64], dout: &[f64]) -> [Vec<f64>; 3] {
        let len = q.len() / (self.heads * self.dqk).max(1);
        let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| vec![0.0; x.len()]);
        let add = |to: &mut [f64], factor: f64, x: &[f64]| {
            for (to, x) in to.iter_mut().zip(x) {
                *to += factor * x;
            }
        };
        for (i, head) in (0..len).flat_map(|i| (0..self.heads).map(move |h| (i, h))) {
            let of = |row: usize, width: usize| {
                (row * self.heads + head) * width..(row * self.heads + head + 1) * width
            };
            for j in (0..len).filter(|&j| self.sees(len, i, j)) {
                let (query, key, d) = (&q[of(i, self.dqk)], &k[of(j, self.dqk)], &dout[of(i, self.dv)]);
                let x = self.alpha * dot(query, key).0;
                let f = 1.0 / (1.0 + (-x).exp());
                let ds = self.alpha * dot(d, &v[of(j, self.dv)]).0 * f * (1.0 + x * (1.0 - f)) / self.max_len;
                add(&mut dq[of(i, self.dqk)], ds, key);
                add(&mut dk[of(j, self.dqk)], ds, query);
                add(&mut dv[of(j, self.dv)], x * f / self.max_len, d);
            }
        }
        [dq, dk, dv]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(hstu: Hstu, len: usize) -> Vec<String> {
        let row = |i| (0..len).map(|j| if hstu.sees(len, i, j) { '1' } else { '.' }).collect();
        (0..len).map(row).collect()
    }

    #[test]
    fn masks() {
        let plain = Hstu {
            heads: 1,
            dqk: 1,
            dv: 1,
            alpha: 1.0,
            max_len: 1.0,
            causal: true,
            max_attn_len: 0,
            contextual_len: 0,
            targets: 2,
            rounding: [0.0; 2],
        };
        // The second target does not see the first.
        let lower =
            ["1.......", "11......", "111.....", "1111....", "11111...", "111111..", "1111111.", "111111.1"];
        assert_eq!(seen(plain, 8), lower);
        let both = Hstu { causal: false, ..plain };
        assert_eq!(seen(both, 6), ["111111", "111111", "111111", "111111", "11111.", "1111.1"]);
        // Two tokens of context see all but the target; the others see two tokens back, of which the context is one.
        let context = Hstu { contextual_len: 2, max_attn_len: 2, targets: 1, ..plain };
        assert_eq!(seen(context, 6), ["11111.", "11111.", "111...", "1111..", "..111.", "...111"]);
    }
}
