//! `chunk_scaled_dot_kkt`, `fused_cumsum_kkt`.

use super::recurrent::{case, size};
use super::solve::chunks;
use crate::kkt::{KktShapes, KktSizes, check_gates, sums_shape};
use crate::{FusedKktInputs, FusedKktOptions, GateBase, KktInputs, TokenLayout, kernels};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, Case, Described, HostCall, HostTensor, HostTensorF64, Named, Operator, Sample,
    Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic, dot,
};
use hk_core::{DType, Result, with_float};

const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];
const F32: &[DType] = &[DType::F32];

const K: ArgSpec = ArgSpec::input("k", FLOATS, 4, "[B, T, k_heads, K], or [T, k_heads, K] if packed")
    .ranks(3, 4)
    .sampled(Sample::Normal { mean: 0.0, deviation: 0.1 });
const BETA: ArgSpec = ArgSpec::input("beta", F32, 3, "[.., v_heads]")
    .ranks(2, 3)
    .sampled(Sample::Uniform { low: 0.0, high: 1.0 });
const STARTS: ArgSpec =
    ArgSpec::input("cu_seqlens", &[DType::I32], 1, "[N + 1]").sampled(Sample::StartsOf("k")).optional();
const A: ArgSpec =
    ArgSpec::output("a", Tolerance::Sum { terms: 1e-6 }, F32, 4, "[.., v_heads, C]").ranks(3, 4);
const CHUNK: ScalarSpec = size("chunk_size", 64, "tokens of a chunk: 16, 32 or 64");
const BASE: ScalarSpec = ScalarSpec {
    name: "base",
    default: Scalar::Choice("e"),
    choices: &["e", "2"],
    summary: "base of the logarithms g",
};

pub(crate) const CHUNK_SCALED_DOT_KKT: Operator = Operator {
    name: "chunk_scaled_dot_kkt",
    family: "hk-gdr",
    summary: "A[i, j] = beta_i exp(G_i - G_j) k_i k_j of the tokens j < i of a chunk",
    args: &[
        K,
        ArgSpec::input("g", F32, 3, "[.., v_heads]")
            .ranks(2, 3)
            .sampled(Sample::Uniform { low: -2.0, high: 0.0 })
            .optional(),
        BETA,
        STARTS,
        A,
    ],
    scalars: &[CHUNK, BASE],
    kernels: &[&kernels::KKT],
    cases: &[
        case!("Qwen3-Next, 512 tokens"; ; k Bf16 [1, 512, 16, 128] g F32 [1, 512, 32] beta F32 [1, 512, 32]),
    ],
    bench: BenchSizes::Cases(&[
        case!("Qwen3-Next, 8192 tokens"; ; k Bf16 [1, 8192, 16, 128] g F32 [1, 8192, 32] beta F32 [1, 8192, 32]),
    ]),
    corners: &[
        case!("64"; ; k Bf16 [2, 70, 1, 72] g F32 [2, 70, 2] beta F32 [2, 70, 2]),
        case!("32, packed"; chunk_size = C32, base = TWO; k Bf16 [100, 2, 40] g F32 [100, 2] beta F32 [100, 2] cu_seqlens I32 [4]),
        case!("16"; chunk_size = C16; k Bf16 [1, 17, 1, 128] beta F32 [1, 17, 1]),
        case!("64 by elements"; ; k Bf16 [1, 65, 1, 61] g F32 [1, 65, 1] beta F32 [1, 65, 1]),
        case!("32 by elements"; chunk_size = C32; k Bf16 [1, 33, 1, 3] beta F32 [1, 33, 1]),
        case!("16 by elements"; chunk_size = C16; k Bf16 [1, 20, 1, 33] beta F32 [1, 20, 1]),
        case!("64"; ; k F16 [1, 64, 1, 64] g F32 [1, 64, 1] beta F32 [1, 64, 1]),
        case!("32"; chunk_size = C32; k F16 [1, 40, 1, 16] beta F32 [1, 40, 1]),
        case!("16"; chunk_size = C16; k F16 [1, 16, 1, 8] beta F32 [1, 16, 2]),
        case!("64 by elements"; ; k F16 [1, 65, 1, 61] beta F32 [1, 65, 1]),
        case!("32 by elements"; chunk_size = C32; k F16 [1, 33, 1, 3] beta F32 [1, 33, 1]),
        case!("16 by elements"; chunk_size = C16; k F16 [1, 20, 1, 33] beta F32 [1, 20, 1]),
        case!("64"; ; k F32 [1, 66, 1, 100] g F32 [1, 66, 1] beta F32 [1, 66, 1]),
        case!("32"; chunk_size = C32; k F32 [1, 40, 1, 16] beta F32 [1, 40, 1]),
        case!("16"; chunk_size = C16; k F32 [1, 16, 1, 4] beta F32 [1, 16, 2]),
        case!("64 by elements"; ; k F32 [1, 65, 1, 61] beta F32 [1, 65, 1]),
        case!("32 by elements"; chunk_size = C32; k F32 [1, 33, 1, 3] beta F32 [1, 33, 1]),
        case!("16 by elements"; chunk_size = C16; k F32 [1, 20, 1, 33] beta F32 [1, 20, 1]),
    ],
    outputs: |call| {
        sizes(call)?;
        let shape = [&call.get("beta")?.shape[..], &[call.size("chunk_size")?]].concat();
        Ok(vec![("a", TensorSpec::new(DType::F32, shape))])
    },
    run: |stream, call| {
        let (inputs, mut outputs) = call.split();
        with_float!("chunk_scaled_dot_kkt", "k", inputs.get("k")?.dtype(), T => {
            let tensors = KktInputs::<T> {
                k: inputs.view("k")?,
                g: inputs.optional_view("g")?,
                beta: inputs.view("beta")?,
                cu_seqlens: inputs.optional_view("cu_seqlens")?,
                base: if inputs.choice("base")? == "2" { GateBase::Two } else { GateBase::Natural },
            };
            crate::chunk_scaled_dot_kkt(stream, tensors, outputs.take("a")?)
        })
    },
    reference: reference_of,
    traffic: Traffic::once,
};

pub(crate) const FUSED_CUMSUM_KKT: Operator = Operator {
    name: "fused_cumsum_kkt",
    family: "hk-gdr",
    summary: "sums of g, or of gk, in chunks, and chunk_scaled_dot_kkt with them",
    args: &[
        K,
        ArgSpec::input("g", F32, 3, "[.., v_heads]")
            .ranks(2, 3)
            .sampled(Sample::Uniform { low: -0.5, high: 0.0 })
            .optional(),
        ArgSpec::input("gk", F32, 4, "[.., v_heads, K], instead of g")
            .ranks(3, 4)
            .sampled(Sample::Uniform { low: -0.5, high: 0.0 })
            .optional(),
        BETA,
        STARTS,
        ArgSpec::output("sums", Tolerance::Sum { terms: 1e-6 }, F32, 3, "as g, or heads first; as gk")
            .ranks(2, 4),
        A,
    ],
    scalars: &[
        CHUNK,
        BASE,
        ScalarSpec {
            name: "layout",
            default: Scalar::Choice("tokens"),
            choices: &["tokens", "heads"],
            summary: "which of the two axes of sums comes first",
        },
    ],
    kernels: &[&kernels::KKT, &kernels::KKT_CHANNELS],
    cases: &[
        case!("Qwen3-Next, 512 tokens"; ; k Bf16 [1, 512, 16, 128] g F32 [1, 512, 32] beta F32 [1, 512, 32]),
        case!("Kimi Linear at TP8, 256 tokens, gates of channels"; ; k Bf16 [1, 256, 4, 128] gk F32 [1, 256, 4, 128]
            beta F32 [1, 256, 4]),
    ],
    bench: BenchSizes::Cases(&[
        case!("Qwen3-Next, 8192 tokens"; ; k Bf16 [1, 8192, 16, 128] g F32 [1, 8192, 32] beta F32 [1, 8192, 32]),
        case!("Kimi Linear, 8192 tokens, gates of channels"; ; k Bf16 [1, 8192, 32, 128] gk F32 [1, 8192, 32, 128]
            beta F32 [1, 8192, 32]),
    ]),
    corners: &[
        case!("64"; ; k Bf16 [2, 70, 1, 72] g F32 [2, 70, 2] beta F32 [2, 70, 2]),
        case!("64, gates of channels"; ; k Bf16 [2, 70, 1, 72] gk F32 [2, 70, 2, 72] beta F32 [2, 70, 2]),
        case!("32, packed, heads first"; chunk_size = C32, base = TWO, layout = Scalar::Choice("heads"); k F16 [100, 2, 40] g F32 [100, 2]
            beta F32 [100, 2] cu_seqlens I32 [4]),
        case!("16 by elements"; chunk_size = C16, base = TWO; k F32 [1, 20, 1, 33] g F32 [1, 20, 2] beta F32 [1, 20, 2]),
        case!("32, packed, gates of channels"; chunk_size = C32; k F16 [100, 2, 40] gk F32 [100, 4, 40] beta F32 [100, 4]
            cu_seqlens I32 [4]),
        case!("16, gates of channels"; chunk_size = C16; k F32 [1, 20, 1, 132] gk F32 [1, 20, 1, 132] beta F32 [1, 20, 1]),
        case!("64 by elements, gates of channels"; ; k Bf16 [1, 65, 1, 61] gk F32 [1, 65, 1, 61] beta F32 [1, 65, 1]),
        case!("32 by elements, gates of channels"; chunk_size = C32; k F16 [1, 33, 1, 3] gk F32 [1, 33, 1, 3] beta F32 [1, 33, 1]),
        case!("16 by elements, gates of channels"; chunk_size = C16; k F32 [1, 20, 1, 33] gk F32 [1, 20, 1, 33] beta F32 [1, 20, 1]),
    ],
    outputs: |call| {
        sizes(call)?;
        let shape = [&call.get("beta")?.shape[..], &[call.size("chunk_size")?]].concat();
        let (g, gk) = (call.optional("g"), call.optional("gk"));
        check_gates(call.operator().name, g.is_some(), gk.is_some(), fused_options(call)?)?;
        let sums = match gk {
            Some(gk) => gk.shape.to_vec(),
            None => sums_shape(&call.get("beta")?.shape, token_layout(call)?),
        };
        Ok(vec![("sums", TensorSpec::new(DType::F32, sums)), ("a", TensorSpec::new(DType::F32, shape))])
    },
    run: |stream, call| {
        let (inputs, mut outputs) = call.split();
        with_float!("fused_cumsum_kkt", "k", inputs.get("k")?.dtype(), T => {
            let tensors = FusedKktInputs::<T> {
                k: inputs.view("k")?,
                g: inputs.optional_view("g")?,
                gk: inputs.optional_view("gk")?,
                beta: inputs.view("beta")?,
                cu_seqlens: inputs.optional_view("cu_seqlens")?,
            };
            let options = fused_options(&inputs)?;
            crate::fused_cumsum_kkt(stream, tensors, outputs.take("sums")?, outputs.take("a")?, options)
        })
    },
    reference: reference_of,
    traffic: Traffic::once,
};

fn token_layout<D: Described>(call: &Call<D>) -> Result<TokenLayout> {
    Ok(if call.choice("layout")? == "heads" { TokenLayout::Heads } else { TokenLayout::Tokens })
}

fn fused_options<D: Described>(call: &Call<D>) -> Result<FusedKktOptions> {
    let base = if call.choice("base")? == "2" { GateBase::Two } else { GateBase::Natural };
    Ok(FusedKktOptions { base, layout: token_layout(call)? })
}

const C32: Scalar = Scalar::Count(32);
const C16: Scalar = Scalar::Count(16);
const TWO: Scalar = Scalar::Choice("2");

fn sizes<D: Described>(call: &Call<D>) -> Result<KktSizes> {
    let shape = |name| call.optional(name).map(D::shape);
    let shapes = KktShapes {
        op: call.operator().name,
        k: call.get("k")?.shape(),
        g: shape("g"),
        gk: shape("gk"),
        beta: call.get("beta")?.shape(),
        cu_seqlens: shape("cu_seqlens"),
    };
    shapes.check(call.size("chunk_size")?)
}

/// With gates of channels.
fn channels_reference(call: &HostCall, gk: &[f64]) -> Result<Named<HostTensorF64>> {
    let KktSizes { batch, tokens, k_heads, v_heads, k_dim, .. } = sizes(call)?;
    let chunk = call.size("chunk_size")?;
    let (k, beta) = (call.get("k")?.to_f64(), call.get("beta")?.to_f64());
    // Two operands are rounded, by half a step each, relatively, and absolutely where they are small; in units of the bound, 1e-6.
    let (relative, absolute) = match call.get("k")?.dtype() {
        DType::Bf16 => (2.0 * 2f64.powi(-8) * 1e6, 0.0),
        DType::F16 => (2.0 * 2f64.powi(-11) * 1e6, 2f64.powi(-25) * 1e6),
        _ => (1.0, 0.0),
    };
    let mut a = vec![HostTensorF64::UNTOUCHED; beta.len() * chunk];
    let (mut size, mut sums) = (vec![0.0; a.len()], vec![HostTensorF64::UNTOUCHED; gk.len()]);
    for (first, rows, poison) in chunks(call, batch, tokens, chunk) {
        for h in 0..v_heads {
            let key = |i: usize| &k[((first + i) * k_heads + h / (v_heads / k_heads)) * k_dim..][..k_dim];
            let gate = |i: usize| (first + i) * v_heads + h;
            for i in 0..rows {
                for d in 0..k_dim {
                    let before = if i > 0 { sums[gate(i - 1) * k_dim + d] } else { 0.0 };
                    let at = gate(i) * k_dim + d;
                    sums[at] = if poison { f64::NAN } else { before + gk[at] };
                }
                for j in 0..chunk {
                    let at = gate(i) * chunk + j;
                    a[at] = if poison { f64::NAN } else { 0.0 };
                    if j >= i || poison {
                        continue;
                    }
                    for d in 0..k_dim {
                        let (of_i, of_j) = (sums[gate(i) * k_dim + d], sums[gate(j) * k_dim + d]);
                        let (x, y) = (key(i)[d], key(j)[d]);
                        let term = beta[gate(i)] * x * y * (of_i - of_j).exp();
                        a[at] += term;
                        // The exponent errs by the rounding of what it is the difference of.
                        size[at] += term.abs() * (relative + 1.0 + of_i.abs())
                            + beta[gate(i)].abs() * absolute * (x.abs() + y.abs());
                    }
                }
            }
        }
    }
    let terms = sums.iter().map(|sum| sum.abs()).collect();
    let of_sums = HostTensorF64::new(call.get("gk")?.shape(), sums).with_magnitudes(terms);
    let shape = [call.get("beta")?.shape(), &[chunk]].concat();
    Ok(vec![("sums", of_sums), ("a", HostTensorF64::new(shape, a).with_magnitudes(size))])
}

fn reference_of(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let fused = call.operator().arg("sums").is_some();
    let (g, gk) = (call.optional("g"), call.optional("gk"));
    if fused {
        check_gates(call.operator().name, g.is_some(), gk.is_some(), fused_options(call)?)?;
    }
    if let Some(gk) = gk {
        return channels_reference(call, &gk.to_f64());
    }
    let KktSizes { batch, tokens, k_heads, v_heads, k_dim, .. } = sizes(call)?;
    let chunk = call.size("chunk_size")?;
    let two = call.choice("base")? == "2";
    let base: f64 = if two && !fused { 2.0 } else { std::f64::consts::E };
    let (k, beta) = (call.get("k")?.to_f64(), call.get("beta")?.to_f64());
    let mut g = g.map(HostTensor::to_f64);
    let mut a = vec![HostTensorF64::UNTOUCHED; beta.len() * chunk];
    let mut size = vec![0.0; a.len()];
    let mut sums = vec![HostTensorF64::UNTOUCHED; beta.len()];
    let mut terms_of_sums = vec![0.0; beta.len()];
    let heads_first = fused && token_layout(call)? == TokenLayout::Heads;
    for (first, rows, poison) in chunks(call, batch, tokens, chunk) {
        for h in 0..v_heads {
            let key = |i: usize| &k[((first + i) * k_heads + h / (v_heads / k_heads)) * k_dim..][..k_dim];
            let gate = |i: usize| (first + i) * v_heads + h;
            if let Some(g) = g.as_mut().filter(|_| fused) {
                for i in 0..rows {
                    g[gate(i)] += if i > 0 { g[gate(i - 1)] } else { 0.0 };
                    let (b, t) = ((first + i) / tokens, (first + i) % tokens);
                    let at = if heads_first { (b * v_heads + h) * tokens + t } else { gate(i) };
                    let sum = g[gate(i)] * if two { std::f64::consts::LOG2_E } else { 1.0 };
                    sums[at] = if poison { f64::NAN } else { sum };
                    terms_of_sums[at] = sum.abs();
                }
            }
            for i in 0..rows {
                for j in 0..chunk {
                    let at = gate(i) * chunk + j;
                    a[at] = if poison { f64::NAN } else { 0.0 };
                    if j < i && !poison {
                        let off = g.as_ref().map_or(0.0, |g| g[gate(i)] - g[gate(j)]);
                        let weight = beta[gate(i)] * base.powf(off);
                        let (sum, terms) = dot(key(i), key(j));
                        // The exponent errs by the rounding of what it is the difference of.
                        let of = g.as_ref().map_or(0.0, |g| if fused { g[gate(i)] } else { off });
                        (a[at], size[at]) = (weight * sum, weight * (terms + of.abs() * sum.abs()));
                    }
                }
            }
        }
    }
    let shape = [call.get("beta")?.shape(), &[chunk]].concat();
    let a = ("a", HostTensorF64::new(shape, a).with_magnitudes(size));
    if !fused {
        return Ok(vec![a]);
    }
    let shape = sums_shape(call.get("beta")?.shape(), token_layout(call)?);
    Ok(vec![("sums", HostTensorF64::new(shape, sums).with_magnitudes(terms_of_sums)), a])
}
