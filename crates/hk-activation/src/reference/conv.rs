//! Depthwise causal convolution.

/// What [`causal_conv1d`] gives.
#[derive(Debug, Clone, PartialEq)]
pub struct CausalConv1d {
    /// `[channels, tokens]`
    pub y: Vec<f64>,
    /// `[channels, width - 1]`: the last tokens of the history and `x`, oldest first.
    pub state: Vec<f64>,
    /// `[channels, tokens]`: the sums of `|weight * h|` and `|bias|`, what errors are relative to.
    pub size: Vec<f64>,
}

/// One sequence: `y[c, t] = act(bias[c] + sum_j weight[c, j] * h[c, t - (width - 1) + j])`, where `h` is `history`,
/// `[channels, width - 1]`, followed by `x`, `[channels, tokens]`. `bias` is empty for none; `act` is silu or nothing.
///
/// # Panics
/// If the lengths do not fit `channels` and `width`.
pub fn causal_conv1d(
    x: &[f64],
    history: &[f64],
    weight: &[f64],
    bias: &[f64],
    channels: usize,
    width: usize,
    silu: bool,
) -> CausalConv1d {
    assert_eq!(weight.len(), channels * width, "weight is [channels, width]");
    assert_eq!(history.len(), channels * (width - 1), "history is [channels, width - 1]");
    let tokens = x.len() / channels;
    let mut out = CausalConv1d { y: Vec::new(), state: Vec::new(), size: Vec::new() };
    for c in 0..channels {
        let mut h = history[c * (width - 1)..][..width - 1].to_vec();
        h.extend(&x[c * tokens..][..tokens]);
        for window in h.windows(width) {
            let bias = bias.get(c).copied().unwrap_or(0.0);
            let terms = || window.iter().zip(&weight[c * width..]).map(|(h, w)| h * w);
            let sum = bias + terms().sum::<f64>();
            out.y.push(if silu { super::silu(sum) } else { sum });
            out.size.push(bias.abs() + terms().map(f64::abs).sum::<f64>());
        }
        out.state.extend(&h[tokens..]);
    }
    out
}
