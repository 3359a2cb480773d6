//! The operators again, in f64 and plain loops.

/// The sizes and options of a value head's recurrence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Head {
    /// Elements of a key.
    pub k_dim: usize,
    /// Elements of a value.
    pub v_dim: usize,
    /// Factor of the output.
    pub scale: f64,
    /// Whether queries and keys are divided by `sqrt(sum of squares + 1e-6)`.
    pub l2norm: bool,
}

/// What a token gives to a value head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Token<'a> {
    /// `[K]`.
    pub q: &'a [f64],
    /// `[K]`.
    pub k: &'a [f64],
    /// `[V]`.
    pub v: &'a [f64],
    /// Logarithm of the decay of the state.
    pub g: f64,
    /// `[K]` or empty: of its rows.
    pub gk: &'a [f64],
    /// `[V]` or empty: of its columns.
    pub gv: &'a [f64],
    /// `[V]`, or `[1]` for all columns: weight of the update.
    pub beta: &'a [f64],
}

impl Head {
    /// One token: updates `state`, `[K, V]`, and gives the output, `[V]`. A gate that is not 0 or less makes what it decays NaN.
    pub fn step(&self, state: &mut [f64], token: &Token) -> Vec<f64> {
        let &Token { q, k, v, g, gk, gv, beta } = token;
        let normalised = |x: &[f64]| {
            let norm = if self.l2norm { (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt() } else { 1.0 };
            x.iter().map(|x| x / norm).collect::<Vec<_>>()
        };
        let (q, k) = (normalised(q), normalised(k));
        let decay = |g: f64| if g <= 0.0 { g.exp() } else { f64::NAN };
        let n = self.v_dim;
        for (i, row) in state.chunks_mut(n).enumerate() {
            let of_row = decay(g) * gk.get(i).map_or(1.0, |g| decay(*g));
            for (j, s) in row.iter_mut().enumerate() {
                *s *= of_row * gv.get(j).map_or(1.0, |g| decay(*g));
            }
        }
        let along =
            |state: &[f64], x: &[f64], j: usize| (0..x.len()).map(|i| state[i * n + j] * x[i]).sum::<f64>();
        for j in 0..n {
            let d = beta[j % beta.len()] * (v[j] - along(state, &k, j));
            (0..k.len()).for_each(|i| state[i * n + j] += k[i] * d);
        }
        (0..n).map(|j| self.scale * along(state, &q, j)).collect()
    }
}

/// `ln(1 + exp(beta x)) / beta`, or `x` where `beta x` is above the threshold.
pub fn softplus(x: f64, beta: f64, threshold: f64) -> f64 {
    if beta * x > threshold { x } else { (beta * x).exp().ln_1p() / beta }
}

/// The logarithm of a decay: `-exp(a_log) softplus(x)`.
pub fn log_decay(x: f64, a_log: f64, beta: f64, threshold: f64) -> f64 {
    -a_log.exp() * softplus(x, beta, threshold)
}

/// `1 / (1 + exp(-x))`.
pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
