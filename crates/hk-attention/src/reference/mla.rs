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
    /// Output `[heads, dv]` and log-sum-exp `[heads]` of `q` `[heads, dqk]` over the rows that it sees; `None`: the pool lacks one of them.
    ///
    /// ```text
    /// s_j = scale (q . row_j);  s = softcap tanh(s / softcap);  lse = ln(sum_j exp(s_j));  out = sum_j exp(s_j - lse) row_j[..dv]
    /// ```
    pub fn run(&self, q: &[f64], rows: Option<&[&[f64]]>) -> (Vec<f64>, Vec<f64>) {
        let Some(rows) = rows else {
            return (vec![f64::NAN; self.heads * self.dv], vec![f64::NAN; self.heads]);
        };
        let (mut out, mut lse) = (vec![0.0; self.heads * self.dv], vec![f64::NEG_INFINITY; self.heads]);
        if rows.is_empty() {
            return (out, lse);
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
                let columns = out[head * self.dv..][..self.dv].iter_mut().zip(*row);
                columns.for_each(|(out, x)| *out += p * x);
            }
        }
        (out, lse)
    }
}
