//! Gradients of attention without softmax.

use super::{
    BackwardSchedule, Blocks, Kernels, Schedule, Sizes, rows_in, rows_out, table, vectorize_outputs,
};
use crate::kernels::backward::Params;
use crate::kv_cache::optional;
use crate::prefill::{Problem, check_heads};
use crate::{AttentionElement, HstuOptions, HstuSequences};
use bytemuck::Zeroable;
use hk_core::{Error, Float, NamedOperand, Result, Stream, TensorView, TensorViewMut};

static KERNELS: Kernels = [
    table!("hstu_bf16": "64" 64 64, "128" 128 128, "256" 256 256),
    table!("hstu_f16": "64" 64 64, "128" 128 128, "256" 256 256),
    table!("hstu_f32": "64" 64 64, "128" 128 128, "256" 256 256),
];

/// What gradients of [`hstu_attn`](crate::hstu_attn) are made of: its inputs, and the gradient of its output.
#[derive(Debug, Clone, Copy)]
pub struct HstuGradientInputs<'a, T: AttentionElement> {
    /// Queries, `[rows, H, Dqk]`.
    pub q: TensorView<'a, T>,
    /// Keys, `[rows, H, Dqk]`.
    pub k: TensorView<'a, T>,
    /// Values, `[rows, H, Dv]`.
    pub v: TensorView<'a, T>,
    /// The gradient of the output, `[rows, H, Dv]`.
    pub dout: TensorView<'a, T>,
}

/// Gradients of [`hstu_attn`](crate::hstu_attn), of the shapes of what they are gradients of. All elements are written.
#[derive(Debug)]
pub struct HstuGradients<'a, T: AttentionElement> {
    /// Of queries.
    pub dq: TensorViewMut<'a, T>,
    /// Of keys.
    pub dk: TensorViewMut<'a, T>,
    /// Of values.
    pub dv: TensorViewMut<'a, T>,
}

/// Gradients of [`hstu_attn`](crate::hstu_attn), whose masks and options these are. Over the tokens `j` that `i` sees, with `x = alpha q_i . k_j` and
/// `f = 1 / (1 + exp(-x))`:
///
/// ```text
/// ds_ij = (dout_i . v_j) f (1 + x (1 - f)) / max_len
/// dq_i = alpha sum_j ds_ij k_j;  dk_j = alpha sum_i ds_ij q_i;  dv_j = sum_i x f / max_len dout_i
/// ```
///
/// | arg           | shape             | dtype                | layout                     |
/// |---------------|-------------------|----------------------|----------------------------|
/// | `q`, `k`      | `[rows, H, Dqk]`  | `bf16`, `f16`, `f32` | unit stride on the columns |
/// | `v`, `dout`   | `[rows, H, Dv]`   | as `q`               | unit stride on the columns |
/// | `dq`, `dk`    | `[rows, H, Dqk]`  | as `q`               | unit stride on the columns |
/// | `dv`          | `[rows, H, Dv]`   | as `q`               | unit stride on the columns |
///
/// Sums are `f32`; `ds max_len` and `x f` are rounded to the type of the inputs before they are multiplied; results are rounded once. No atomics:
/// the same call gives the same bits. Where `hstu_attn` makes NaN of offsets and targets, gradients are NaN.
///
/// One launch. Returns when it is queued. No tensor may share memory with an output.
///
/// # Errors
/// As [`hstu_attn`](crate::hstu_attn).
///
/// Source: Zhai et al. 2024, "Actions Speak Louder than Words" (HSTU), equation 2.
pub fn hstu_attn_bwd<'a, T: AttentionElement + Float>(
    stream: &'a Stream,
    inputs: HstuGradientInputs<'a, T>,
    sequences: HstuSequences<'a>,
    gradients: HstuGradients<'a, T>,
    options: HstuOptions,
) -> Result<()> {
    const OP: &str = "hstu_attn_bwd";
    let HstuGradientInputs { q, k, v, dout } = inputs;
    let HstuGradients { mut dq, mut dk, mut dv } = gradients;
    let [rows, ..] = q.dims::<3>(OP, "q")?;
    let heads = check_heads(OP, [("q", q.shape()), ("k", k.shape()), ("v", v.shape())], [256, 256])?;
    k.expect_shape(OP, "k", q.shape())?;
    let of_values = [rows, heads.heads, heads.dv];
    v.expect_shape(OP, "v", of_values)?;
    dout.expect_shape(OP, "dout", of_values)?;
    dq.expect_shape(OP, "dq", q.shape())?;
    dk.expect_shape(OP, "dk", q.shape())?;
    dv.expect_shape(OP, "dv", of_values)?;
    let n = sequences.check(OP)?;
    options.check(OP)?;
    let mut problem = Problem::new(OP, stream, T::DTYPE, heads);
    let HstuSequences { seq_offsets, num_targets } = sequences;
    let operands: [NamedOperand; 6] = [
        ("q", Some(&q)),
        ("k", Some(&k)),
        ("v", Some(&v)),
        ("dout", Some(&dout)),
        ("seq_offsets", Some(&seq_offsets)),
        ("num_targets", optional(&num_targets)),
    ];
    problem.disjoint(&operands, &[("dq", Some(&dq)), ("dk", Some(&dk)), ("dv", Some(&dv))])?;
    if heads.heads == 0 {
        return Ok(());
    }
    problem.queries("q", &q)?;
    problem.fresh(("k", &k), ("v", &v))?;
    let dout = rows_in(&mut problem, "dout", &dout)?;
    let mut params = Params { dout, ..Params::zeroed() };
    params.dq = rows_out(&mut problem, "dq", &mut dq)?;
    params.dk = rows_out(&mut problem, "dk", &mut dk)?;
    params.dv = rows_out(&mut problem, "dv", &mut dv)?;
    params.dout_vectorized = Problem::vectorized::<T>(&dout, problem.vector(), heads.dv);
    vectorize_outputs::<T>(&mut params, heads, problem.vector());
    problem.hstu_sequences(&sequences, &options)?;
    let sizes = Sizes { sequences: n, sq: rows, sk: rows, packed: true };
    if rows > 0 && n == 0 {
        return Err(Error::shape(OP, "seq_offsets", [1], format!("[sequences + 1], of {rows} rows")));
    }
    let main = Blocks::new(&mut problem, &mut params, &sizes, heads, &KERNELS, None)?;
    main.run(problem, params, Schedule::TwoPasses(BackwardSchedule::Fused))
}
