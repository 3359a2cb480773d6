//! Softmax attention of one sequence.

use hk_core::registry::{dot, philox};

/// What a sequence's scores are made of. With `off = keys - queries`, query `i` stands at key `i + off`:
///
/// ```text
/// s_ij = scale (q_i . k_j);  s = softcap tanh(s / softcap);  s -= slope |i + off - j|;  s += bias_ij;  masked: -inf
/// m = max(s_i, sink);  l = sum_j exp(s_ij - m) + exp(sink - m);  p_ij = exp(s_ij - m) / l;  lse_i = m + ln l
/// out_i = sum_j keep_ij / (1 - dropout) p_ij v_j
/// ```
///
/// A row without a visible key is 0; its `lse` is the sink, or -inf without one. Values of keys that are not visible are not read.
#[derive(Clone, Copy, Default)]
pub struct Attention<'a> {
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Columns of queries and keys.
    pub dqk: usize,
    /// Columns of values.
    pub dv: usize,
    /// Factor of the products.
    pub scale: f64,
    /// 0: none.
    pub softcap: f64,
    /// Keys after the query's own place are masked.
    pub causal: bool,
    /// Keys before and after the query's own place that are visible; `None`: all.
    pub window: [Option<usize>; 2],
    /// `hidden(query, key)`: masked, beside causality and window.
    pub hidden: Option<&'a dyn Fn(usize, usize) -> bool>,
    /// A slope for each query head.
    pub alibi: Option<&'a [f64]>,
    /// `bias(head, query, key)`.
    pub bias: Option<&'a dyn Fn(usize, usize, usize) -> f64>,
    /// A logit for each query head, neither scaled nor of any value.
    pub sink: Option<&'a [f64]>,
    /// Which probabilities are dropped.
    pub dropout: Option<Dropout>,
    /// `only(query)`: its results are wanted. Those of other queries are 0.
    pub only: Option<&'a dyn Fn(usize) -> bool>,
}

/// Dropout with the counters of this library: they depend on indices alone, so that any tiles drop the same ones.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// The probability with which a key is dropped, in [0, 1).
    pub p: f64,
    /// Key of Philox4x32-10.
    pub seed: u64,
    /// Added to the counters.
    pub offset: u64,
    /// Index of the sequence in its batch.
    pub batch: usize,
    /// The longest sequences of the batch, queries and keys.
    pub longest: [usize; 2],
}

impl Dropout {
    /// Whether key `j` stays for query `i` of a head: `u >= p` of the word's upper 24 bits as `u` in [0, 1). A counter serves four
    /// neighbouring keys.
    pub fn keeps(&self, heads: usize, head: usize, i: usize, j: usize) -> bool {
        let [queries, keys] = self.longest;
        let row = (self.batch * heads + head) * queries + i;
        let counter = self.offset.wrapping_add((row * keys.div_ceil(4) + j / 4) as u64);
        let word = philox([counter as u32, (counter >> 32) as u32, 0, 0], self.seed)[j % 4];
        f64::from(word >> 8) / f64::from(1 << 24) >= self.p
    }
}

impl Attention<'_> {
    /// Whether query `i` sees key `j`.
    pub fn sees(&self, queries: usize, keys: usize, i: usize, j: usize) -> bool {
        let ahead = j as i64 - (i as i64 + keys as i64 - queries as i64);
        let [left, right] = self.window;
        (!self.causal || ahead <= 0)
            && left.is_none_or(|left| -ahead <= left as i64)
            && right.is_none_or(|right| ahead <= right as i64)
    }

    /// The score of key `j` for query `i` of a head, -inf if it is masked, and its derivative by the product of both before a softcap.
    fn score(
        &self,
        [queries, keys]: [usize; 2],
        [head, i, j]: [usize; 3],
        query: &[f64],
        key: &[f64],
    ) -> [f64; 2] {
        if !self.sees(queries, keys, i, j) || self.hidden.is_some_and(|hidden| hidden(i, j)) {
            return [f64::NEG_INFINITY, 0.0];
        }
        let (mut s, mut slope) = (self.scale * dot(query, key).0, self.scale);
        if self.softcap != 0.0 {
            let t = (s / self.softcap).tanh();
            (s, slope) = (self.softcap * t, slope * (1.0 - t * t));
        }
        let away = (i as f64 + keys as f64 - queries as f64 - j as f64).abs();
        s -= self.alibi.map_or(0.0, |slopes| slopes[head] * away);
        [s + self.bias.map_or(0.0, |bias| bias(head, i, j)), slope]
    }

    /// Output `[queries, heads, dv]` and log-sum-exp `[queries, heads]` of `q` `[queries, heads, dqk]`, `k` `[keys, kv_heads, dqk]` and `v`
    /// `[keys, kv_heads, dv]`.
    pub fn run(&self, q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let ([out, _], lse) = self.run_with_magnitudes(q, k, v);
        (out, lse)
    }

    /// [`run`](Self::run), and beside each output `sum_j |keep_ij / (1 - dropout) p_ij v_j|`: what rounded weights are an error of.
    pub fn run_with_magnitudes(&self, q: &[f64], k: &[f64], v: &[f64]) -> ([Vec<f64>; 2], Vec<f64>) {
        let rows = |x: &[f64], heads: usize| x.len() / (heads * self.dqk).max(1);
        let (queries, keys) = (rows(q, self.heads), rows(k, self.kv_heads));
        let (mut out, mut lse) = (vec![0.0; queries * self.heads * self.dv], vec![0.0; queries * self.heads]);
        let mut magnitudes = out.clone();
        for i in (0..queries).filter(|i| self.only.is_none_or(|only| only(*i))) {
            for head in 0..self.heads {
                let row = i * self.heads + head;
                let of = |j: usize| j * self.kv_heads + head / (self.heads / self.kv_heads);
                let query = &q[row * self.dqk..][..self.dqk];
                let scores: Vec<f64> = (0..keys)
                    .map(|j| {
                        self.score([queries, keys], [head, i, j], query, &k[of(j) * self.dqk..][..self.dqk])
                            [0]
                    })
                    .collect();
                let sink = self.sink.map_or(f64::NEG_INFINITY, |sink| sink[head]);
                let most = |m: f64, s: &f64| if m.is_nan() || s.is_nan() { f64::NAN } else { m.max(*s) };
                let top = scores.iter().fold(sink, most);
                lse[row] = top;
                if top == f64::NEG_INFINITY {
                    continue;
                }
                let total: f64 = scores.iter().map(|s| (s - top).exp()).sum::<f64>() + (sink - top).exp();
                lse[row] += total.ln();
                for (j, s) in scores.iter().enumerate().filter(|(_, s)| **s != f64::NEG_INFINITY) {
                    let kept = self.dropout.map_or(1.0, |dropout| {
                        if dropout.keeps(self.heads, head, i, j) { 1.0 / (1.0 - dropout.p) } else { 0.0 }
                    });
                    let p = kept * (s - top).exp() / total;
                    let value = &v[of(j) * self.dv..][..self.dv];
                    let sums = out[row * self.dv..].iter_mut().zip(&mut magnitudes[row * self.dv..]);
                    for ((y, magnitude), x) in sums.zip(value) {
                        *y += p * x;
                        *magnitude += (p * x).abs();
                    }
                }
            }
        }
        ([out, magnitudes], lse)
    }
}

/// Gradients of attention, of the shapes of what they are gradients of.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Gradients {
    /// Of queries.
    pub dq: Vec<f64>,
    /// Of keys.
    pub dk: Vec<f64>,
    /// Of values.
    pub dv: Vec<f64>,
    /// Of the sinks of heads.
    pub dsink: Vec<f64>,
}

/// The results of a forward pass, `out` `[queries, heads, dv]` and `lse` `[queries, heads]`, and the gradient of `out`.
#[derive(Debug, Clone, Copy)]
pub struct Results<'a> {
    /// Outputs.
    pub out: &'a [f64],
    /// Log-sum-exp of the scores.
    pub lse: &'a [f64],
    /// Gradients of the outputs.
    pub dout: &'a [f64],
}

impl Attention<'_> {
    /// Gradients of `sum out dout`, given what [`run`](Self::run) gave. With `p = exp(s - lse)`, `delta = dout . out` and what dropout keeps:
    ///
    /// ```text
    /// ds_ij = p_ij (keep_ij dout_i . v_j - delta_i);  dv_j = sum_i keep_ij p_ij dout_i
    /// dq_i = sum_j ds_ij s'_ij k_j;  dk_j = sum_i ds_ij s'_ij q_i;  dsink = -sum_i exp(sink - lse_i) delta_i
    /// ```
    ///
    /// Of queries that [`only`](Self::only) leaves out, and of keys that `only_key` does, there are none.
    pub fn backward(
        &self,
        q: &[f64],
        k: &[f64],
        v: &[f64],
        of: &Results,
        only_key: &dyn Fn(usize) -> bool,
    ) -> Gradients {
        let rows = |x: &[f64], heads: usize| x.len() / (heads * self.dqk).max(1);
        let (queries, keys) = (rows(q, self.heads), rows(k, self.kv_heads));
        let mut sums = Gradients {
            dq: vec![0.0; q.len()],
            dk: vec![0.0; k.len()],
            dv: vec![0.0; v.len()],
            dsink: vec![0.0; self.heads],
        };
        let add = |to: &mut [f64], factor: f64, x: &[f64]| {
            for (to, x) in to.iter_mut().zip(x) {
                *to += factor * x;
            }
        };
        for (i, head) in (0..queries).flat_map(|i| (0..self.heads).map(move |head| (i, head))) {
            let row = i * self.heads + head;
            let (query, lse) = (&q[row * self.dqk..][..self.dqk], of.lse[row]);
            let dout = &of.dout[row * self.dv..][..self.dv];
            let delta = dot(dout, &of.out[row * self.dv..][..self.dv]).0;
            let sink = self.sink.map_or(f64::NEG_INFINITY, |sink| sink[head]);
            if sink != f64::NEG_INFINITY {
                sums.dsink[head] -= (sink - lse).exp() * delta;
            }
            let all_keys = self.only.is_none_or(|only| only(i));
            for j in (0..keys).filter(|j| all_keys || only_key(*j)) {
                let at = j * self.kv_heads + head / (self.heads / self.kv_heads);
                let key = &k[at * self.dqk..][..self.dqk];
                let [s, slope] = self.score([queries, keys], [head, i, j], query, key);
                if s == f64::NEG_INFINITY || lse == f64::NEG_INFINITY {
                    continue;
                }
                let kept = self.dropout.map_or(1.0, |dropout| {
                    if dropout.keeps(self.heads, head, i, j) { 1.0 / (1.0 - dropout.p) } else { 0.0 }
                });
                let p = (s - lse).exp();
                let ds = p * (kept * dot(dout, &v[at * self.dv..][..self.dv]).0 - delta) * slope;
                if all_keys {
                    add(&mut sums.dq[row * self.dqk..][..self.dqk], ds, key);
                }
                if only_key(j) {
                    add(&mut sums.dv[at * self.dv..][..self.dv], kept * p, dout);
                    add(&mut sums.dk[at * self.dqk..][..self.dqk], ds, query);
                }
            }
        }
        sums
    }
}

/// Merges the attention of disjoint sets of keys, `(out [rows, dv], lse [rows])` each: `out = sum w_s out_s / sum w_s` with
/// `w_s = exp(lse_s - max lse)`. Parts whose `lse` is -inf weigh nothing.
pub fn merge(parts: &[(Vec<f64>, Vec<f64>)], dv: usize) -> (Vec<f64>, Vec<f64>) {
    let rows = parts.first().map_or(0, |(_, lse)| lse.len());
    let (mut out, mut lse) = (vec![0.0; rows * dv], vec![f64::NEG_INFINITY; rows]);
    for row in 0..rows {
        let top = parts.iter().fold(f64::NEG_INFINITY, |m, (_, lse)| m.max(lse[row]));
        if top == f64::NEG_INFINITY {
            continue;
        }
        let total: f64 = parts.iter().map(|(_, lse)| (lse[row] - top).exp()).sum();
        lse[row] = top + total.ln();
        for (part, of) in parts.iter().filter(|(_, lse)| lse[row] != f64::NEG_INFINITY) {
            let weight = (of[row] - top).exp() / total;
            for (y, x) in out[row * dv..][..dv].iter_mut().zip(&part[row * dv..]) {
                *y += weight * x;
            }
        }
    }
    (out, lse)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::f64::consts::SQRT_2;

    const Q: [f64; 4] = [1.0, 0.0, 0.0, 2.0];
    const K: [f64; 6] = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0];
    const V: [f64; 3] = [1.0, 2.0, 4.0];

    fn one_head() -> Attention<'static> {
        let scale = 0.5f64.sqrt();
        Attention { heads: 1, kv_heads: 1, dqk: 2, dv: 1, scale, ..Attention::default() }
    }

    fn close(got: &[f64], want: &[f64], within: f64) {
        assert_eq!(got.len(), want.len());
        for (x, y) in got.iter().zip(want) {
            assert!(x == y || (x - y).abs() <= within, "{got:?}, expected {want:?}");
        }
    }

    /// Two queries over three keys, six digits for each option.
    #[test]
    fn golden_values() {
        let causal = Attention { causal: true, ..one_head() };
        for (name, attention, out, lse) in [
            ("full", one_head(), [2.401112, 2.783233], [1.620621, 2.222080]),
            ("causal", causal, [1.330238, 2.783233], [1.107940, 2.222080]),
            ("itself", Attention { window: [Some(0), None], ..causal }, [2.0, 4.0], [0.0, SQRT_2]),
            (
                "and one before",
                Attention { window: [Some(1), None], ..causal },
                [1.330238, 3.0],
                [1.107940, 2.107361],
            ),
            ("sink", Attention { sink: Some(&[0.5]), ..causal }, [0.861291, 2.361285], [1.542622, 2.386487]),
            ("softcap", Attention { softcap: 1.0, ..causal }, [1.352319, 2.658843], [1.043217, 1.768560]),
            (
                "alibi",
                Attention { alibi: Some(&[0.5]), ..causal },
                [1.448408, 3.126532],
                [0.802053, 1.942467],
            ),
        ] {
            let got = attention.run(&Q, &K, &V);
            println!("{name}");
            close(&got.0, &out, 1e-6);
            close(&got.1, &lse, 1e-6);
        }
    }

    #[test]
    fn rows_without_keys_are_zero() {
        let beyond = Attention { window: [None, Some(0)], ..one_head() };
        // Five queries, three keys: the first two stand before all keys. Masked values are not read.
        let q = [1.0; 10];
        let (out, lse) = beyond.run(&q, &K, &[1.0, 2.0, f64::NAN]);
        close(&out[..3], &[0.0, 0.0, 1.0], 0.0);
        close(&lse[..2], &[f64::NEG_INFINITY; 2], 0.0);
        assert!(out[4].is_nan());
        let (out, lse) = Attention { sink: Some(&[0.25]), ..beyond }.run(&q, &[], &[]);
        assert_eq!((out, lse), (vec![0.0; 5], vec![0.25; 5]));
    }

    #[test]
    fn halves_of_the_keys_merge_to_the_whole() {
        let attention = Attention { heads: 2, sink: Some(&[-0.5, 2.0]), ..one_head() };
        let q = [1.0, -0.5, 0.25, 2.0, -1.0, 1.0, 0.5, 0.5];
        let first = attention.run(&q, &K[..2], &V[..1]);
        // One part carries the sink.
        let second = Attention { sink: None, ..attention }.run(&q, &K[2..], &V[1..]);
        let none = (vec![f64::NAN; 4], vec![f64::NEG_INFINITY; 4]);
        let (want, got) = (attention.run(&q, &K, &V), merge(&[first, none.clone(), second], 1));
        close(&got.0, &want.0, 1e-12);
        close(&got.1, &want.1, 1e-12);
        assert_eq!(merge(&[none.clone(), none], 1), (vec![0.0; 4], vec![f64::NEG_INFINITY; 4]));
    }

    #[test]
    fn heads_share_keys_and_bias_adds_up() {
        let bias = |head: usize, i: usize, j: usize| (head + 2 * i) as f64 - 0.5 * j as f64;
        let grouped = Attention { heads: 4, kv_heads: 2, bias: Some(&bias), ..one_head() };
        let q: Vec<f64> = (0..16).map(|n| 0.25 * f64::from(n) - 1.5).collect();
        let (k, v) = ([0.5, -1.0, 0.25, 0.75, 1.0, 0.5, -0.5, 0.0], [3.0, -1.0, 0.5, 2.0]);
        let (out, lse) = grouped.run(&q, &k, &v);
        for head in 0..4 {
            let of = |x: &[f64], heads: usize, head: usize, d: usize| -> Vec<f64> {
                x.chunks(heads * d).flat_map(|row| row[head * d..][..d].to_vec()).collect()
            };
            let own = |_: usize, i: usize, j: usize| bias(head, i, j);
            let single = Attention { bias: Some(&own), ..one_head() };
            let want = single.run(&of(&q, 4, head, 2), &of(&k, 2, head / 2, 2), &of(&v, 2, head / 2, 1));
            close(&of(&out, 4, head, 1), &want.0, 1e-12);
            close(&of(&lse, 4, head, 1), &want.1, 1e-12);
        }
    }

    #[test]
    fn dropout_keeps_its_share_and_leaves_lse() {
        let dropout = Dropout { p: 0.25, seed: 7, offset: 1 << 33, batch: 1, longest: [8, 4001] };
        let kept = (0..4000).filter(|j| dropout.keeps(2, 1, 3, *j)).count();
        assert!((2900..3100).contains(&kept), "{kept}");
        // Counters of neighbouring rows do not overlap, and the four words of one differ.
        let next: Vec<bool> = (0..64).map(|j| dropout.keeps(2, 1, 4, j)).collect();
        assert!((0..64).any(|j| dropout.keeps(2, 1, 3, j) != next[j]));
        let attention = Attention { dropout: Some(Dropout { longest: [2, 3], ..dropout }), ..one_head() };
        let (out, lse) = attention.run(&Q, &K, &V);
        let (whole, want) = one_head().run(&Q, &K, &V);
        assert_eq!(lse, want);
        assert!(out.iter().zip(&whole).all(|(x, y)| *x <= y / 0.75 + 1e-12));
        let nothing = Attention { dropout: Some(Dropout { p: 0.0, ..dropout }), ..one_head() };
        close(&nothing.run(&Q, &K, &V).0, &whole, 1e-15);
    }
}
