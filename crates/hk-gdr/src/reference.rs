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

/// Rows over their 2-norm, and the reciprocals of the roots.
pub fn l2norm(x: &[f64], cols: usize, eps: f64) -> (Vec<f64>, Vec<f64>) {
    let rstd: Vec<f64> =
        x.chunks(cols).map(|row| 1.0 / (row.iter().map(|x| x * x).sum::<f64>() + eps).sqrt()).collect();
    let y = x.chunks(cols).zip(&rstd).flat_map(|(row, rstd)| row.iter().map(move |x| x * rstd)).collect();
    (y, rstd)
}

/// The gradient of [`l2norm`], and of each element the sum of its terms' absolute values.
pub fn l2norm_bwd(y: &[f64], rstd: &[f64], dy: &[f64], cols: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut dx, mut size) = (Vec::new(), Vec::new());
    for ((y, dy), rstd) in y.chunks(cols).zip(dy.chunks(cols)).zip(rstd) {
        let terms = || y.iter().zip(dy).map(|(y, dy)| y * dy);
        let (sum, absolute) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
        for (y, dy) in y.iter().zip(dy) {
            dx.push(rstd * (dy - y * sum));
            size.push(rstd * (dy.abs() + y.abs() * absolute));
        }
    }
    (dx, size)
}

/// Lengths of packed sequences.
pub fn prepare_lens(cu_seqlens: &[i64]) -> Vec<i64> {
    cu_seqlens.windows(2).map(|ends| ends[1].wrapping_sub(ends[0])).collect()
}

/// Their starts from their lengths, of which a negative one counts as 0.
pub fn prepare_cu_seqlens_from_lens(lens: &[i64]) -> Vec<i64> {
    let mut starts = vec![0i64];
    lens.iter().for_each(|len| starts.push(starts[starts.len() - 1].wrapping_add(*len.max(&0))));
    starts
}

/// Of each token the number of its sequence: the last that begins at or before it.
pub fn sequence_ids(cu_seqlens: &[i64], tokens: usize) -> Vec<i64> {
    let last = cu_seqlens.len().saturating_sub(2);
    let of = |t: usize| cu_seqlens[..=last].iter().rposition(|start| *start <= t as i64).unwrap_or(0);
    (0..tokens).map(|t| of(t) as i64).collect()
}

/// Of each token its place in that sequence.
pub fn position_ids(cu_seqlens: &[i64], tokens: usize) -> Vec<i64> {
    let ids = sequence_ids(cu_seqlens, tokens);
    ids.iter().enumerate().map(|(t, n)| (t as i64).wrapping_sub(cu_seqlens[*n as usize])).collect()
}

/// Chunks before each sequence, and of all.
pub fn chunk_offsets(cu_seqlens: &[i64], chunk_size: usize) -> Vec<i64> {
    let chunks = |len: i64| (len.max(0) as u64).div_ceil(chunk_size as u64) as i64;
    let counts: Vec<i64> = prepare_lens(cu_seqlens).into_iter().map(chunks).collect();
    prepare_cu_seqlens_from_lens(&counts)
}

/// Sequence and chunk of the sequence, of the first `most` chunks in order.
pub fn chunk_indices(cu_seqlens: &[i64], chunk_size: usize, most: usize) -> Vec<[i64; 2]> {
    let offsets = chunk_offsets(cu_seqlens, chunk_size);
    let rows = offsets.windows(2).enumerate();
    let of =
        |(n, ends): (usize, &[i64])| (0..ends[1].wrapping_sub(ends[0])).map(move |chunk| [n as i64, chunk]);
    rows.flat_map(of).take(most).collect()
}

/// `(I + A)^-1` of a strictly lower triangular matrix of `rows` rows of `cols` columns each, of which the first `rows` count; what is on
/// and above the diagonal is not read.
pub fn solve_tril(a: &[f64], rows: usize, cols: usize) -> Vec<f64> {
    let mut x = vec![0.0; rows * cols];
    for i in 0..rows {
        x[i * cols + i] = 1.0;
        for j in 0..i {
            let factor = a[i * cols + j];
            (0..=j).for_each(|c| x[i * cols + c] -= factor * x[j * cols + c]);
        }
    }
    x
}

/// A value head's tokens of a chunk, by rows: what each function reads of it.
#[derive(Debug, Clone, Default)]
pub struct ChunkHead<'a> {
    /// `[K]` each.
    pub q: Vec<&'a [f64]>,
    /// `[K]` each.
    pub k: Vec<&'a [f64]>,
    /// `[V]` each; of [`states`](Self::states) `u`, of [`outputs`](Self::outputs) `v_new`.
    pub v: Vec<&'a [f64]>,
    /// `[K]` each.
    pub w: Vec<&'a [f64]>,
    /// Factors of decay, from the first token of the chunk on: `exp(G)`.
    pub decay: Vec<f64>,
    /// `[K]` each, or empty: those of channels, instead. Keys of [`states`](Self::states) have theirs then.
    pub channels: Vec<Vec<f64>>,
    /// Weights of the updates.
    pub beta: Vec<f64>,
}

impl ChunkHead<'_> {
    /// The factor of decay of a channel.
    fn of_channel(&self, i: usize, d: usize) -> f64 {
        self.channels.get(i).map_or(self.decay[i], |channels| channels[d])
    }

    /// `sum_d x_d k_jd exp(G_id - G_jd)`.
    fn score(&self, x: &[f64], i: usize, j: usize) -> f64 {
        let term = |(d, (x, k)): (usize, (&f64, &f64))| x * k * self.of_channel(i, d) / self.of_channel(j, d);
        x.iter().zip(self.k[j]).enumerate().map(term).sum()
    }

    /// The inverse of `I + A`, `A_ij = beta_i exp(G_i - G_j) k_i k_j` for `j < i`: rows of as many columns.
    pub fn inverse(&self) -> Vec<f64> {
        let n = self.k.len();
        let a: Vec<f64> = (0..n * n)
            .map(|at| (at / n, at % n))
            .map(|(i, j)| if j < i { self.beta[i] * self.score(self.k[i], i, j) } else { 0.0 })
            .collect();
        solve_tril(&a, n, n)
    }

    /// `w = X diag(beta exp(G)) K` and `u = X diag(beta) V`, of rows of `X` of `cols` columns each.
    pub fn wy(&self, x: &[f64], cols: usize) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
        let times = |of: &[&[f64]], weight: &dyn Fn(usize, usize) -> f64| {
            let row = |i: usize| {
                let element = |c: usize| (0..=i).map(|j| x[i * cols + j] * weight(j, c) * of[j][c]).sum();
                (0..of[i].len()).map(element).collect()
            };
            (0..of.len()).map(row).collect()
        };
        let of_keys = |j: usize, d: usize| self.beta[j] * self.of_channel(j, d);
        (times(&self.k, &of_keys), times(&self.v, &|j, _| self.beta[j]))
    }

    /// Updates a state, `[K, V]`, by the chunk; gives `v_new = u - w H`.
    pub fn states(&self, state: &mut [f64]) -> Vec<Vec<f64>> {
        let n = self.v.first().map_or(1, |row| row.len());
        let minus = |i: usize, c: usize| {
            self.v[i][c] - self.w[i].iter().enumerate().map(|(r, w)| w * state[r * n + c]).sum::<f64>()
        };
        let new: Vec<Vec<f64>> = (0..self.v.len()).map(|i| (0..n).map(|c| minus(i, c)).collect()).collect();
        let last = self.decay.len().saturating_sub(1);
        for (at, s) in state.iter_mut().enumerate() {
            let (r, c) = (at / n, at % n);
            let own =
                |i: usize| if self.channels.is_empty() { self.decay[last] / self.decay[i] } else { 1.0 };
            *s *= if new.is_empty() { 1.0 } else { self.of_channel(last, r) };
            *s += (0..new.len()).map(|i| own(i) * self.k[i][r] * new[i][c]).sum::<f64>();
        }
        new
    }

    /// `o_i = scale (exp(G_i) H^T q_i + sum_{j <= i} exp(G_i - G_j) (q_i k_j) v_new_j)`, of a state `[K, V]`.
    pub fn outputs(&self, state: &[f64], scale: f64) -> Vec<Vec<f64>> {
        let n = self.v.first().map_or(1, |row| row.len());
        let row = |i: usize| {
            let q = self.q[i];
            let scores: Vec<f64> = (0..=i).map(|j| self.score(q, i, j)).collect();
            let decayed: Vec<f64> = q.iter().enumerate().map(|(r, q)| self.of_channel(i, r) * q).collect();
            let of = |c: usize| {
                let of_state: f64 = decayed.iter().enumerate().map(|(r, q)| q * state[r * n + c]).sum();
                scale * (of_state + scores.iter().zip(&self.v).map(|(score, v)| score * v[c]).sum::<f64>())
            };
            (0..n).map(of).collect()
        };
        (0..self.q.len()).map(row).collect()
    }
}
