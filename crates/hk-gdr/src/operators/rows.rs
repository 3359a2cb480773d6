//! `l2norm`, `l2norm_bwd`, `chunk_local_cumsum`.

use super::recurrent::case;
use crate::cumsum::{Sizes, cumsum_sizes};
use crate::{CumsumOptions, TokenLayout, kernels, reference};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, HostCall, HostTensorF64, Named, Operator, Sample,
    Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Result, with_float};

const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];
const F32: &[DType] = &[DType::F32];
const ON: Scalar = Scalar::Bool(true);

pub(crate) const L2NORM: Operator = Operator {
    name: "l2norm",
    family: "hk-gdr",
    summary: "y = x rstd, rstd = 1 / sqrt(sum(x^2) + eps)",
    args: &[
        ArgSpec::input("x", FLOATS, 2, "[.., cols]").ranks(1, 4),
        ArgSpec::output("y", Tolerance::Elementwise, FLOATS, 2, "as x").ranks(1, 4),
        ArgSpec::output("rstd", Tolerance::Elementwise, F32, 1, "[rows]").optional(),
    ],
    scalars: &[ScalarSpec {
        name: "eps",
        default: Scalar::Float(1e-6),
        choices: &[],
        summary: "added to the sum of squares",
    }],
    kernels: &[&kernels::L2NORM],
    cases: &[case!("Qwen3-Next, q of 512 tokens"; ; x Bf16 [512, 16, 128])],
    bench: BenchSizes::Cases(&[case!("Qwen3-Next, q and k of 65536 tokens"; ; x Bf16 [65_536, 32, 128])]),
    corners: &[
        case!("128"; eps = Scalar::Float(0.5); x Bf16 [33, 120] rstd F32 [33]),
        case!("512"; ; x Bf16 [5, 264] rstd F32 [5]),
        case!("8192"; ; x Bf16 [2, 2056]),
        case!("long"; ; x Bf16 [2, 8200] rstd F32 [2]),
        case!("512 by elements"; ; x Bf16 [9, 61] rstd F32 [9]),
        case!("long by elements"; ; x Bf16 [2, 515] rstd F32 [2]),
        case!("128"; ; x F16 [17, 64]),
        case!("512"; ; x F16 [3, 512]),
        case!("8192"; ; x F16 [1, 520]),
        case!("long"; ; x F16 [1, 8208]),
        case!("512 by elements"; ; x F16 [2, 3, 3]),
        case!("long by elements"; ; x F16 [1, 1021]),
        case!("128"; ; x F32 [17, 60]),
        case!("512"; ; x F32 [3, 300]),
        case!("8192"; ; x F32 [1, 516]),
        case!("long"; ; x F32 [1, 8196]),
        case!("512 by elements"; ; x F32 [1]),
        case!("long by elements"; ; x F32 [1, 4099]),
    ],
    outputs: |call| {
        let x = call.get("x")?;
        let rows = rows_of(call, "x")?;
        check_eps(call)?;
        let mut made = vec![("y", x.clone())];
        if call.wants("rstd") {
            made.push(("rstd", TensorSpec::new(DType::F32, [rows])));
        }
        Ok(made)
    },
    run: |stream, call| {
        let (inputs, mut outputs) = call.split();
        let eps = inputs.float("eps")? as f32;
        with_float!("l2norm", "x", inputs.get("x")?.dtype(), T => {
            let y = outputs.take("y")?;
            crate::l2norm::<T>(stream, inputs.view("x")?, y, outputs.take_optional("rstd")?, eps)
        })
    },
    reference: |call| {
        let rows = rows_of(&call.spec(), "x")?;
        check_eps(&call.spec())?;
        let x = call.get("x")?;
        let cols = *x.shape().last().unwrap_or(&1);
        let (y, rstd) = reference::l2norm(&x.to_f64(), cols, call.float("eps")?);
        let mut made = vec![("y", HostTensorF64::new(x.shape(), y))];
        if call.wants("rstd") {
            made.push(("rstd", HostTensorF64::new([rows], rstd)));
        }
        Ok(made)
    },
    traffic: Traffic::once,
};

pub(crate) const L2NORM_BWD: Operator = Operator {
    name: "l2norm_bwd",
    family: "hk-gdr",
    summary: "dx = rstd (dy - y sum(dy y))",
    args: &[
        ArgSpec::input("y", FLOATS, 2, "[.., cols]")
            .ranks(1, 4)
            .sampled(Sample::Normal { mean: 0.0, deviation: 0.1 }),
        ArgSpec::input("rstd", F32, 1, "[rows]").sampled(Sample::Uniform { low: 0.1, high: 2.0 }),
        ArgSpec::input("dy", FLOATS, 2, "as y").ranks(1, 4),
        ArgSpec::output("dx", Tolerance::Reduction, FLOATS, 2, "as y").ranks(1, 4),
    ],
    scalars: &[],
    kernels: &[&kernels::L2NORM],
    cases: &[
        case!("Qwen3-Next, q of 512 tokens"; ; y Bf16 [512, 16, 128] rstd F32 [8192] dy Bf16 [512, 16, 128]),
    ],
    bench: BenchSizes::Cases(&[
        case!("Qwen3-Next, q and k of 65536 tokens"; ; y Bf16 [65_536, 32, 128] rstd F32 [2_097_152] dy Bf16 [65_536, 32, 128]),
    ]),
    corners: &[
        case!("128"; ; y Bf16 [33, 120] rstd F32 [33] dy Bf16 [33, 120]),
        case!("512"; ; y Bf16 [5, 264] rstd F32 [5] dy Bf16 [5, 264]),
        case!("8192"; ; y Bf16 [2, 2056] rstd F32 [2] dy Bf16 [2, 2056]),
        case!("long"; ; y Bf16 [2, 8200] rstd F32 [2] dy Bf16 [2, 8200]),
        case!("512 by elements"; ; y Bf16 [9, 61] rstd F32 [9] dy Bf16 [9, 61]),
        case!("long by elements"; ; y Bf16 [2, 515] rstd F32 [2] dy Bf16 [2, 515]),
        case!("128"; ; y F16 [17, 64] rstd F32 [17] dy F16 [17, 64]),
        case!("512"; ; y F16 [3, 512] rstd F32 [3] dy F16 [3, 512]),
        case!("8192"; ; y F16 [1, 520] rstd F32 [1] dy F16 [1, 520]),
        case!("long"; ; y F16 [1, 8208] rstd F32 [1] dy F16 [1, 8208]),
        case!("512 by elements"; ; y F16 [2, 3, 3] rstd F32 [6] dy F16 [2, 3, 3]),
        case!("long by elements"; ; y F16 [1, 1021] rstd F32 [1] dy F16 [1, 1021]),
        case!("128"; ; y F32 [17, 60] rstd F32 [17] dy F32 [17, 60]),
        case!("512"; ; y F32 [3, 300] rstd F32 [3] dy F32 [3, 300]),
        case!("8192"; ; y F32 [1, 516] rstd F32 [1] dy F32 [1, 516]),
        case!("long"; ; y F32 [1, 8196] rstd F32 [1] dy F32 [1, 8196]),
        case!("512 by elements"; ; y F32 [1] rstd F32 [1] dy F32 [1]),
        case!("long by elements"; ; y F32 [1, 4099] rstd F32 [1] dy F32 [1, 4099]),
    ],
    outputs: outputs_bwd,
    run: |stream, call| {
        let (inputs, mut outputs) = call.split();
        with_float!("l2norm_bwd", "y", inputs.get("y")?.dtype(), T => {
            let dx = outputs.take("dx")?;
            crate::l2norm_bwd::<T>(stream, inputs.view("y")?, inputs.view("rstd")?, inputs.view("dy")?, dx)
        })
    },
    reference: |call| {
        outputs_bwd(&call.spec())?;
        let y = call.get("y")?;
        let cols = *y.shape().last().unwrap_or(&1);
        let (rstd, dy) = (call.get("rstd")?.to_f64(), call.get("dy")?.to_f64());
        let (dx, size) = reference::l2norm_bwd(&y.to_f64(), &rstd, &dy, cols);
        let tolerance = Some(Tolerance::Sum { terms: 1e-6 });
        let dx = HostTensorF64 { tolerance, ..HostTensorF64::new(y.shape(), dx).with_magnitudes(size) };
        Ok(vec![("dx", dx)])
    },
    traffic: Traffic::once,
};

fn outputs_bwd(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let op = call.operator().name;
    let y = call.get("y")?;
    let rows = rows_of(call, "y")?;
    let dy = call.get("dy")?;
    if dy.dtype != y.dtype {
        return Err(Error::dtype(op, "dy", dy.dtype, format!("{} (dtype of y)", y.dtype)));
    }
    if dy.shape != y.shape {
        return Err(Error::shape(op, "dy", &dy.shape, format!("{:?} (shape of y)", y.shape)));
    }
    let rstd = call.get("rstd")?;
    if rstd.shape != [rows] {
        return Err(Error::shape(op, "rstd", &rstd.shape, format!("{:?}", [rows])));
    }
    Ok(vec![("dx", y.clone())])
}

/// Rows of a tensor with columns.
fn rows_of(call: &CallSpec, name: &'static str) -> Result<usize> {
    let shape = &call.get(name)?.shape;
    let (cols, rows) = (shape.last().copied().unwrap_or(1), shape[..shape.len() - 1].iter().product());
    if cols == 0 {
        return Err(Error::empty(call.operator().name, name, 1, &[rows, cols]));
    }
    Ok(rows)
}

fn check_eps(call: &CallSpec) -> Result<()> {
    let eps = call.float("eps")?;
    if !(eps >= 0.0 && eps.is_finite()) {
        return Err(Error::argument(call.operator().name, "eps", eps, "finite and not negative"));
    }
    Ok(())
}

pub(crate) const CHUNK_LOCAL_CUMSUM: Operator = Operator {
    name: "chunk_local_cumsum",
    family: "hk-gdr",
    summary: "y[t] = scale sum x[s], s in the chunk of t up to it, or from it on",
    args: &[
        ArgSpec::input("x", F32, 3, "[B, T, H], [B, T, H, S], packed [T, H], [T, H, S], or heads first")
            .ranks(2, 4),
        ArgSpec::input("cu_seqlens", &[DType::I32], 1, "[N + 1]")
            .sampled(Sample::Starts { rows: PACKED })
            .optional(),
        ArgSpec::output("y", Tolerance::Sum { terms: 1e-6 }, F32, 3, "as x").ranks(2, 4),
    ],
    scalars: &[
        ScalarSpec {
            name: "chunk_size",
            default: Scalar::Count(64),
            choices: &[],
            summary: "a power of two",
        },
        ScalarSpec {
            name: "reverse",
            default: Scalar::Bool(false),
            choices: &[],
            summary: "from the end of the chunk",
        },
        ScalarSpec {
            name: "scale",
            default: Scalar::Float(1.0),
            choices: &[],
            summary: "factor of the sums",
        },
        ScalarSpec {
            name: "layout",
            default: Scalar::Choice("tokens"),
            choices: &["tokens", "heads"],
            summary: "which of the two axes comes first",
        },
    ],
    kernels: &[&kernels::CUMSUM],
    cases: &[case!("Qwen3-Next, 2048 tokens"; ; x F32 [1, 2048, 32])],
    bench: BenchSizes::Cases(&[
        case!("Qwen3-Next, 65536 tokens"; ; x F32 [1, 65_536, 32]),
        case!("Qwen3-Next, 65536 tokens, heads first"; layout = Scalar::Choice("heads"); x F32 [1, 32, 65_536]),
    ]),
    corners: &[
        case!("batched"; chunk_size = Scalar::Count(16), reverse = ON, scale = Scalar::Float(1.5); x F32 [2, 70, 3]),
        case!("packed, of channels"; ; x F32 [190, 2, 20] cu_seqlens I32 [4]),
        case!("heads first"; layout = Scalar::Choice("heads"), chunk_size = Scalar::Count(32); x F32 [2, 3, 65]),
    ],
    outputs: |call| {
        cumsum(call)?;
        Ok(vec![("y", call.get("x")?.clone())])
    },
    run: |stream, call| {
        let (inputs, mut outputs) = call.split();
        let options = options(&inputs)?;
        let starts = inputs.optional_view("cu_seqlens")?;
        crate::chunk_local_cumsum(stream, inputs.view("x")?, starts, outputs.take("y")?, options)
    },
    reference: cumsum_reference,
    traffic: Traffic::once,
};

/// Tokens of the packed sequences of an example.
const PACKED: i64 = 190;

fn options<D: Described>(call: &Call<D>) -> Result<CumsumOptions> {
    Ok(CumsumOptions {
        chunk_size: call.size("chunk_size")?,
        reverse: call.bool("reverse")?,
        scale: call.float("scale")? as f32,
        layout: if call.choice("layout")? == "heads" { TokenLayout::Heads } else { TokenLayout::Tokens },
    })
}

fn cumsum<D: Described>(call: &Call<D>) -> Result<Sizes> {
    cumsum_sizes(call.get("x")?.shape(), call.optional("cu_seqlens").map(D::shape), options(call)?)
}

fn cumsum_reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let Sizes { batch, tokens, heads, inner, sequences } = cumsum(call)?;
    let CumsumOptions { chunk_size, reverse, scale, layout } = options(call)?;
    let x = call.get("x")?;
    let values = x.to_f64();
    let starts =
        call.optional("cu_seqlens").map(|t| t.to_f64().iter().map(|v| *v as i64).collect::<Vec<_>>());
    let mut y = vec![HostTensorF64::UNTOUCHED; values.len()];
    let mut size = vec![0.0; values.len()];
    let all = tokens as i64;
    let ranges: Vec<(usize, usize, bool)> = match &starts {
        None => vec![(0, tokens, false)],
        Some(s) => (0..sequences)
            .map(|n| {
                let low = s[n].clamp(0, all);
                (
                    low as usize,
                    s[n + 1].clamp(low, all) as usize,
                    s[n] < 0 || s[n + 1] < s[n] || s[n + 1] > all,
                )
            })
            .collect(),
    };
    for b in 0..batch {
        for h in 0..heads {
            for i in 0..inner {
                let at = |t: usize| match layout {
                    TokenLayout::Tokens => ((b * tokens + t) * heads + h) * inner + i,
                    TokenLayout::Heads => ((b * heads + h) * tokens + t) * inner + i,
                };
                for &(from, to, poison) in &ranges {
                    for first in (from..to).step_by(chunk_size) {
                        let chunk = first..to.min(first + chunk_size);
                        for t in chunk.clone() {
                            let part = if reverse { t..chunk.end } else { first..t + 1 };
                            let terms = || part.clone().map(|s| f64::from(scale) * values[at(s)]);
                            y[at(t)] = if poison { f64::NAN } else { terms().sum() };
                            size[at(t)] = terms().map(f64::abs).sum();
                        }
                    }
                }
            }
        }
    }
    Ok(vec![("y", HostTensorF64::new(x.shape(), y).with_magnitudes(size))])
}
