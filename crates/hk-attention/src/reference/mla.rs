//! Attention over latent rows of one query.

use hk_core::registry::dot;

/// Sizes and options of [`Latent::run`].
#[derive(Debug, Clone, Copy)]
pub struct Latent {
    /// Query heads.
    pub heads: usize,
    /// Columns of queries and rows.
    pub dqk: usize,
    /// Columns of values, the first ones of a row.
    pub dv: usize,
    /// Factor of the products.
    pub scale: f64,
    /// 0: none.
    pub softcap: f64,
}

impl Latent {
    /// Output `[heads, dv]`, the magnitudes of its terms, and log-sum-exp `[heads]` of `q` `[heads, dqk]` over the rows that it sees; `None`: the pool lacks one of them.
    ///
    /// ```text
    /// s_j = scale (q . row_j);  s = softcap tanh(s / softcap);  lse = ln(sum_j exp(s_j));  out = sum_j exp(s_j - lse) row_j[..dv]
    /// ```
    pub fn run(&self, q: &[f64], rows: Option<&[&[f64]]>) -> ([Vec<f64>; 2], Vec<f64>) {
        let Some(rows) = rows else {
            let nan = || vec![f64::NAN; self.heads * self.dv];
            return ([nan(), nan()], vec![f64::NAN; self.heads]);
        };
        let (mut out, mut lse) = (vec![0.0; self.heads * self.dv], vec![f64::NEG_INFINITY; self.heads]);
        let mut magnitudes = out.clone();
        if rows.is_empty() {
            return ([out, magnitudes], lse);
        }
        for (head, query) in q.chunks(self.dqk).enumerate() {
            let scores: Vec<f64> = rows
                .iter()
                .map(|row| {
                    let s = self.scale * dot(query, row).0;
                    if self.softcap == 0.0 { s } else { self.softcap * (s / self.softcap).tanh() }
                })
                .collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            lse[head] = top + scores.iter().map(|s| (s - top).exp()).sum::<f64>().ln();
            for (row, s) in rows.iter().zip(&scores) {
                let p = (s - lse[head]).exp();
                let sums = out[head * self.dv..][..self.dv].iter_mut().zip(&mut magnitudes[head * self.dv..]);
                for ((out, magnitude), x) in sums.zip(*row) {
                    *out += p * x;
                    *magnitude += (p * x).abs();
                }
            }
        }
        ([out, magnitudes], lse)
    }
}
