#!/usr/bin/env python3
"""Compares the operators with JAX, which knows nothing of them: random cases through `hk run` and safetensors files.

  operators.py --hk target/release/hk [--cases N] [--only OPERATOR] [--seed N]

Needs jax, numpy, ml_dtypes. What JAX has as one function is taken from there (activations, softmax, top_k, convolution,
standardize, casts to fp8 and fp4); the rest is written in jax.numpy, all in f64.
"""

import argparse
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.append(str(Path(__file__).parents[2] / "hk-emu" / "validation"))
import harness  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

jax.config.update("jax_enable_x64", True)

harness.NUMPY.setdefault("F8_E8M0", np.dtype(np.uint8))  # the exponent plus 127
harness.SAFETENSORS.setdefault(np.dtype(ml_dtypes.float8_e8m0fnu), "F8_E8M0")
harness.SAFETENSORS.setdefault(np.dtype(ml_dtypes.float4_e2m1fn), "F4")

bf16 = ml_dtypes.bfloat16
FLOATS = [bf16, np.float16, np.float32]
FP8 = {"fp8e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "fp8e4m3fnuz": (ml_dtypes.float8_e4m3fnuz, 240.0)}
ELEMENTWISE = {bf16: (8e-3, 1e-6), np.float16: (1e-3, 1e-6), np.float32: (4e-6, 1e-6)}
REDUCTION = {bf16: (8e-3, 1e-5), np.float16: (1e-3, 1e-5), np.float32: (1e-5, 1e-6)}
EXACT = (0.0, 0.0)

CASES = {}

# Operators that have no case, and why. A test of hk-cli compares the names with those of the registry.
NOT_COMPARED = {
    "gemm_a16wfp4_atomic": "its sums are those of gemm_a16wfp4, of activations quantized on the fly: see fused_gemm_a16w16_quant_x",
    "batched_gemm_a16wfp4": "quantizes activations on the fly; its GEMM is that of batched_gemm_afp4wfp4",
    "batched_gemm_a8w8_ptgq": "quantizes activations on the fly, and a value on a tie of two quantized values changes a sum; its GEMM is that of batched_gemm_a8w8, its quantization those of group_quant",
    "fused_rmsnorm_mxfp4_quant": "a norm in f32 on a tie of two quantized values falls to either; its norm is that of rmsnorm, its quantization those of dynamic_mxfp4_quant",
    "moe_align_block_size": "lists of integers, exact by the registry's reference; JAX has no such function",
    "moe_routing": "lists of integers, exact by the registry's reference; its choice is that of moe_topk",
    "moe_bitmatrix": "counts, exact by the registry's reference",
    "moe_expt_data": "lists of integers, exact by the registry's reference; JAX has no such function",
    "shuffle_scales": "an order of bytes, exact by the registry's reference; NumPy has none of its own",
    "unshuffle_scales": "the inverse of shuffle_scales",
    "shuffle_weight": "an order of bytes, exact by the registry's reference; NumPy has none of its own",
    "unshuffle_weight": "the inverse of shuffle_weight",
}


def case(function):
    """Registers a function that makes a case: (inputs, parameters, {output: (expected, (rtol, atol))}, wanted outputs)."""
    CASES[function.__name__] = function
    return function


class Draw:
    def __init__(self, rng, device):
        self.rng, self.device = rng, device

    def dtype(self):
        return FLOATS[self.rng.integers(len(FLOATS))]

    def size(self, most):
        """Small sizes, powers of two and their neighbours, and others."""
        kind = self.rng.integers(3)
        if kind == 0:
            return int(self.rng.integers(1, min(most, 17) + 1))
        if kind == 1:
            n = 2 ** int(self.rng.integers(0, int(np.log2(most)) + 1)) + int(self.rng.integers(-1, 2))
            return int(np.clip(n, 1, most))
        return int(self.rng.integers(1, most + 1))

    def pick(self, *options):
        return options[self.rng.integers(len(options))]

    def normal(self, shape, dtype, scale=1.0, shift=0.0):
        return (self.rng.standard_normal(shape) * scale + shift).astype(dtype)

    def integers(self, low, high, shape, dtype=np.int32):
        return self.rng.integers(low, high, shape).astype(dtype)


def f64(x):
    # What is differentiated has f64 already.
    return x if isinstance(x, jax.core.Tracer) else jnp.asarray(np.asarray(x).astype(np.float64))


def matrix(d, cols=5000):
    return d.size(40), d.size(cols)


# Norms


def rms(x, weight, eps):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


@case
def rmsnorm(d):
    t, (rows, cols) = d.dtype(), matrix(d)
    x, w, eps = d.normal((rows, cols), t, 2), d.normal(cols, t, 0.25, 1), d.pick(1e-6, 1e-5)
    return {"x": x, "weight": w}, {"eps": eps}, {"y": (rms(f64(x), f64(w), eps), REDUCTION[t])}, []


@case
def fused_add_rmsnorm(d):
    t, (rows, cols) = d.dtype(), matrix(d)
    x, r, w = d.normal((rows, cols), t), d.normal((rows, cols), t), d.normal(cols, t, 0.25, 1)
    s = (x.astype(np.float32) + r.astype(np.float32)).astype(t)
    want = {"residual_out": (f64(s), EXACT), "y": (rms(f64(s), f64(w), 1e-6), REDUCTION[t])}
    return {"x": x, "residual_in": r, "weight": w}, {}, want, []


@case
def layernorm(d):
    t, (rows, cols) = d.dtype(), matrix(d)
    x, w, b = d.normal((rows, cols), t, 2, 0.5), d.normal(cols, t, 0.25, 1), d.normal(cols, t)
    y = jax.nn.standardize(f64(x), axis=-1, epsilon=1e-5) * f64(w) + f64(b)
    rtol, atol = REDUCTION[t]
    size = float(jnp.max(jnp.abs(y))) + 1 if t == np.float32 else 1.0
    return {"x": x, "weight": w, "bias": b}, {"eps": 1e-5}, {"y": (y, (rtol, atol * size))}, []


@case
def rmsnorm_pad(d):
    t, (rows, cols), multiple = d.dtype(), matrix(d), d.pick(16, 256)
    x, w = d.normal((rows, cols), t, 2), d.normal(cols, t, 0.25, 1)
    y = jnp.pad(rms(f64(x), f64(w), 1e-6), ((0, 0), (0, -cols % multiple)))
    return {"x": x, "weight": w}, {"pad_multiple": multiple}, {"y": (y, REDUCTION[t])}, []


@case
def fused_add_rmsnorm_pad(d):
    t, (rows, cols) = d.dtype(), matrix(d)
    x, r, w = d.normal((rows, cols), t), d.normal((rows, cols), t), d.normal(cols, t, 0.25, 1)
    s = x.astype(np.float32) + r.astype(np.float32)
    want = {"residual_out": (f64(s.astype(t)), EXACT), "y": (rms(f64(s), f64(w), 1e-6), REDUCTION[t])}
    return {"x": x, "residual_in": r, "weight": w}, {}, want, []


@case
def fused_add_layernorm(d):
    t, (rows, cols) = d.dtype(), matrix(d)
    x, r, w = d.normal((rows, cols), t), d.normal((rows, cols), t), d.normal(cols, t, 0.25, 1)
    s = (x.astype(np.float32) + r.astype(np.float32)).astype(t)
    y = jax.nn.standardize(f64(s), axis=-1, epsilon=1e-5) * f64(w)
    rtol, atol = REDUCTION[t]
    size = float(jnp.max(jnp.abs(y))) + 1 if t == np.float32 else 1.0
    want = {"residual_out": (f64(s), EXACT), "y": (y, (rtol, atol * size))}
    return {"x": x, "residual_in": r, "weight": w}, {"eps": 1e-5}, want, []


# Activations

UNARY = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
}


def unary(name):
    def make(d):
        t, shape = d.dtype(), matrix(d)
        x = d.normal(shape, t, d.pick(1, 10))
        return {"x": x}, {}, {"y": (UNARY[name](f64(x)), ELEMENTWISE[t])}, []

    return make


def gated(name):
    def make(d):
        t, (rows, cols) = d.dtype(), matrix(d, 3000)
        x = d.normal((rows, 2 * cols), t, 2)
        a, b = f64(x[:, :cols]), f64(x[:, cols:])
        return {"x": x}, {}, {"y": (UNARY[name](a) * b, ELEMENTWISE[t])}, []

    return make


CASES["silu"] = unary("silu")
CASES["gelu"] = unary("gelu")
CASES["gelu_tanh"] = unary("gelu_tanh")
CASES["relu"] = unary("relu")
CASES["tanh"] = unary("tanh")
CASES["silu_and_mul"] = gated("silu")
CASES["gelu_and_mul"] = gated("gelu")
CASES["gelu_tanh_and_mul"] = gated("gelu_tanh")


@case
def swiglu_oai_and_mul(d):
    t, (rows, cols) = d.dtype(), matrix(d, 3000)
    x = d.normal((rows, 2 * cols), t, 4)
    a, b = jnp.minimum(f64(x[:, :cols]), 7.0), jnp.clip(f64(x[:, cols:]), -7.0, 7.0)
    return {"x": x}, {}, {"y": (a * jax.nn.sigmoid(1.702 * a) * (b + 1), ELEMENTWISE[t])}, []


@case
def fused_mul_add(d):
    t, shape = d.dtype(), matrix(d)
    x, a, b = d.normal(shape, t), d.normal(shape, t), d.normal(d.pick(shape, (1,)), t)
    rtol, atol = ELEMENTWISE[t]
    product = f64(a) * f64(x)
    size = float(jnp.max(jnp.abs(product))) + 1
    return {"x": x, "a": a, "b": b}, {}, {"y": (product + f64(b), (rtol, atol + rtol * size))}, []


@case
def softmax(d):
    t, (rows, cols) = d.dtype(), (d.size(8), d.size(40000))
    x = d.normal((rows, cols), t, d.pick(1, 8))
    bounds = {bf16: ELEMENTWISE[bf16], np.float16: ELEMENTWISE[np.float16], np.float32: (1e-5, 1e-7)}[t]
    return {"x": x}, {}, {"y": (jax.nn.softmax(f64(x), axis=-1), bounds)}, []


@case
def topk(d):
    t, (rows, cols) = d.dtype(), (d.size(8), d.size(9000))
    x, k = d.normal((rows, cols), t), d.size(min(cols, 300))
    # Equal values: JAX, too, gives the lower index first.
    values, indices = jax.lax.top_k(f64(x), k)
    return {"x": x}, {"k": k}, {"values": (values, EXACT), "indices": (indices, EXACT)}, []


@case
def moe_topk(d):
    t, (tokens, experts) = d.dtype(), (d.size(12), d.size(1024))
    logits, k = d.normal((tokens, experts), t, 2), d.size(min(experts, 32))
    # Equal logits: JAX gives the lower index first.
    _, ids = jax.lax.top_k(f64(logits), k)
    weights = jnp.take_along_axis(jax.nn.softmax(f64(logits), axis=-1), ids, axis=-1)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    parameters = {"k": k, "scores": "softmax", "renormalize": "true", "ties": "low", "order": "preference"}
    return {"logits": logits}, parameters, {"weights": (weights, ELEMENTWISE[t]), "ids": (ids, EXACT)}, []


@case
def moe_routing_sigmoid_top1_fused(d):
    tokens, cols, experts = d.size(40), d.size(1500), d.size(300)
    # Sums of few eighths: exact, and often equal.
    t = [jnp.bfloat16, jnp.float16][int(d.integers(0, 2, ()))]
    eighths = lambda *shape: jnp.asarray(d.integers(-4, 5, shape) / 8).astype(t)
    x, w = eighths(tokens, cols), eighths(cols, experts)
    logits = (f64(x) @ f64(w)).astype(jnp.float32)
    scores = 1 / (1 + jnp.exp(-logits))
    ids = jnp.argmax(scores, axis=-1)[:, None]
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    return {"x": x, "w": w}, {}, {"weights": (weights, (1e-6, 1e-7)), "ids": (ids, EXACT)}, []


@case
def moe_sum(d):
    t, tokens, k, cols = d.dtype(), d.size(20), d.size(32), d.size(3000)
    x, residual = d.normal((tokens * k, cols), t), d.normal((tokens, cols), t)
    y = jnp.sum(f64(x).reshape(tokens, k, cols), axis=1) + f64(residual)
    rtol, atol = ELEMENTWISE[t]
    return {"x": x, "residual": residual}, {"k": k}, {"y": (y, (rtol, atol + 3e-5))}, []


@case
def causal_conv1d_fwd(d):
    t, batch, channels, tokens, width = d.dtype(), d.size(3), d.size(200), d.size(100), int(d.integers(2, 5, ()))
    x, w, b = d.normal((batch, channels, tokens), t), d.normal((channels, width), t), d.normal(channels, t)
    y = jax.lax.conv_general_dilated(
        f64(x), f64(w)[:, None, :], (1,), [(width - 1, 0)], feature_group_count=channels
    ) + f64(b)[None, :, None]
    silu = d.pick("none", "silu")
    bounds = {bf16: (8e-3, 8e-3), np.float16: (1e-3, 1e-3), np.float32: (1e-5, 1e-5)}[t]
    want = jax.nn.silu(y) if silu == "silu" else y
    return {"x": x, "weight": w, "bias": b}, {"activation": silu}, {"y": (want, bounds)}, []


@case
def causal_conv1d_update(d):
    t, batch, channels, width = d.dtype(), d.size(8), d.size(200), int(d.integers(2, 5, ()))
    x, w, b = d.normal((batch, channels), t), d.normal((channels, width), t), d.normal(channels, t)
    states = d.normal((batch, channels, width - 1), t)
    window = jnp.concatenate([f64(states), f64(x)[..., None]], axis=-1)
    y = jax.lax.conv_general_dilated(window, f64(w)[:, None, :], (1,), [(0, 0)], feature_group_count=channels)
    bounds = {bf16: (8e-3, 8e-3), np.float16: (1e-3, 1e-3), np.float32: (1e-5, 1e-5)}[t]
    want = {"y": (y[..., 0] + f64(b), bounds), "conv_states": (window[..., 1:], EXACT)}
    return {"x": x, "weight": w, "bias": b, "conv_states": states}, {}, want, []


# Gated delta rule


def delta_rule(q, k, v, g, gk, beta, state, scale, l2norm):
    """q, k [N, T, Hv, K], v [N, T, Hv, V], g and beta [N, T, Hv], gk [N, T, Hv, K], state [N, Hv, K, V]: o, the last state."""
    if l2norm:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))

    def step(s, at):
        q, k, v, g, gk, beta = at
        s = s * jnp.exp(g)[..., None, None] * jnp.exp(gk)[..., None]
        d = beta[..., None] * (v - jnp.einsum("nhkv,nhk->nhv", s, k))
        s = s + k[..., None] * d[..., None, :]
        return s, scale * jnp.einsum("nhkv,nhk->nhv", s, q)

    state, o = jax.lax.scan(step, state, tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, gk, beta)))
    return jnp.moveaxis(o, 0, 1), state


def rms_bound(t, x):
    """One rounding to the type, and errors of sums relative to the size of all."""
    return {bf16: 1 / 256, np.float16: 1 / 2048, np.float32: 2e-6}[t], 2e-5 * float(jnp.sqrt(jnp.mean(x * x))) + 1e-7


def delta_case(d, computed, together):
    t, n, tokens = d.dtype(), d.size(4), d.size(6)
    k_heads, group = d.size(3), d.size(3)
    heads, (dim, v_dim) = k_heads * group, d.pick((16, 16), (64, 40), (128, 64), (d.size(130), d.size(60)))
    layout, l2norm, channels = d.pick("kv", "vk"), bool(d.pick(0, 1)), bool(d.pick(0, 1))
    width = 1.0 if l2norm else dim**-0.5
    q, k = d.normal((n, tokens, k_heads, dim), t, width), d.normal((n, tokens, k_heads, dim), t, width)
    v, state = d.normal((n, tokens, heads, v_dim), t), d.normal((n, heads, dim, v_dim), np.float32)
    gate = (heads, dim) if channels else (heads,)
    parameters = {"layout": layout, "qk_l2norm": str(l2norm).lower()}
    inputs = {"initial_state": np.ascontiguousarray(state if layout == "kv" else state.swapaxes(2, 3))}
    if computed:
        a, b = d.normal((n, tokens, *gate), t, 2.0), d.normal((n, tokens, heads), t, 2.0)
        a_log, bias = d.normal(heads, np.float32), d.normal(gate, d.pick(t, np.float32))
        rate = jnp.exp(f64(a_log))[:, None] if channels else jnp.exp(f64(a_log))
        g, beta = -rate * jax.nn.softplus(f64(a) + f64(bias)), jax.nn.sigmoid(f64(b))
        inputs |= {"A_log": a_log, "a": a, "b": b, "dt_bias": bias}
    else:
        gates = -np.abs(d.normal((n, tokens, *gate), np.float32, 0.3))
        beta = 1 / (1 + np.exp(-d.normal((n, tokens, heads), np.float32)))
        inputs |= {"gk" if channels else "g": gates, "beta": beta}
        g, beta = f64(gates), f64(beta)
    if together:
        flat = [x.reshape(n, tokens, -1) for x in (q, k, v)]
        inputs["qkv"] = np.concatenate(flat, axis=-1)
        parameters |= {"k_heads": k_heads, "k_dim": dim, "v_dim": v_dim}
    else:
        inputs |= {"q": q, "k": k, "v": v}
    zero = jnp.zeros((n, tokens, heads))
    gk = g if channels else jnp.zeros((n, tokens, heads, dim))
    of_head = [f64(np.repeat(x, group, axis=2)) for x in (q, k)]
    o, last = delta_rule(*of_head, f64(v), zero if channels else g, gk, beta, f64(state), dim**-0.5, l2norm)
    last = last if layout == "kv" else last.swapaxes(2, 3)
    want = {"o": (o, rms_bound(t, o)), "final_state": (last, rms_bound(np.float32, last))}
    return inputs, parameters, want, ["final_state"]


@case
def fused_recurrent(d):
    return delta_case(d, False, False)


@case
def fused_sigmoid_gating_recurrent(d):
    return delta_case(d, True, False)


@case
def fused_rearrange_sigmoid_gdr(d):
    return delta_case(d, True, True)


@case
def fused_gdn_gating_prefill(d):
    rows, heads, t = d.size(300), d.size(40), d.dtype()
    a_log, a, b = d.normal(heads, np.float32), d.normal((rows, heads), t, 4.0), d.normal((rows, heads), t, 3.0)
    bias = d.normal(heads, d.pick(t, np.float32))
    g = -jnp.exp(f64(a_log)) * jax.nn.softplus(f64(a) + f64(bias))
    inputs = {"A_log": a_log, "a": a, "b": b, "dt_bias": bias}
    return inputs, {}, {"g": (g, (2e-5, 1e-37)), "beta": (jax.nn.sigmoid(f64(b)), (2e-5, 1e-37))}, []


@case
def fused_qkvzba_split(d):
    t, tokens, k_heads, group = d.dtype(), d.size(9), d.size(3), d.size(3)
    k, v = d.pick((16, 24), (d.size(20), d.size(20)))
    heads = [d.normal((tokens, k_heads, n), t) for n in (k, k, group * v, group * v)]
    gates = [d.normal((tokens, k_heads, group), t) for _ in range(2)]
    rows = [x.reshape(tokens, -1) for x in heads + gates]
    inputs = {name: np.concatenate(x, axis=-1).reshape(tokens, -1) for name, x in [("mixed_qkvz", heads), ("mixed_ba", gates)]}
    want = {"qkv": np.concatenate(rows[:3], axis=-1), "z": rows[3].reshape(tokens, -1, v), "b": rows[4], "a": rows[5]}
    parameters = {"k_heads": k_heads, "v_heads": k_heads * group, "k_dim": k, "v_dim": v}
    return inputs, parameters, {name: (f64(x), EXACT) for name, x in want.items()}, []


def split_conv(d, t, y):
    """The channels of y, [.., channels], to q, k and v."""
    key = int(d.integers(0, y.shape[-1] // 2 + 1, ()))
    bounds = {bf16: (8e-3, 8e-3), np.float16: (1e-3, 1e-3), np.float32: (1e-5, 1e-5)}[t]
    parts = jnp.split(y, [key, 2 * key], axis=-1)
    return {"key_dim": key}, {name: (part, bounds) for name, part in zip("qkv", parts)}


@case
def causal_conv1d_fwd_split_qkv(d):
    t, channels, tokens, width = d.dtype(), d.size(200), d.size(100), int(d.integers(2, 5, ()))
    x, w, b = d.normal((tokens, channels), t), d.normal((channels, width), t), d.normal(channels, t)
    y = jax.lax.conv_general_dilated(
        f64(x).T[None], f64(w)[:, None, :], (1,), [(width - 1, 0)], feature_group_count=channels
    )[0].T + f64(b)
    parameters, want = split_conv(d, t, y)
    starts = np.array([0, tokens], np.int32)
    return {"x": x, "weight": w, "bias": b, "query_start_loc": starts}, parameters, want, []


@case
def causal_conv1d_update_split_qkv(d):
    t, batch, channels, width = d.dtype(), d.size(8), d.size(200), int(d.integers(2, 5, ()))
    x, w, b = d.normal((batch, channels), t), d.normal((channels, width), t), d.normal(channels, t)
    states = d.normal((batch, channels, width - 1), t)
    window = jnp.concatenate([f64(states), f64(x)[..., None]], axis=-1)
    y = jax.lax.conv_general_dilated(window, f64(w)[:, None, :], (1,), [(0, 0)], feature_group_count=channels)
    parameters, want = split_conv(d, t, y[..., 0] + f64(b))
    want["conv_states"] = (window[..., 1:], EXACT)
    return {"x": x, "weight": w, "bias": b, "conv_states": states}, parameters, want, []


@case
def l2norm(d):
    t, (rows, cols) = d.dtype(), matrix(d)
    x = f64(a := d.normal((rows, cols), t, 2))
    y = x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
    return {"x": a}, {}, {"y": (y, REDUCTION[t])}, []


@case
def l2norm_bwd(d):
    rows, cols = matrix(d)
    x, dy = d.normal((rows, cols), np.float32), d.normal((rows, cols), np.float32)
    norm = lambda x: x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)  # noqa: E731
    y, gradient = jax.vjp(norm, f64(x))
    rstd = (1 / np.sqrt((x.astype(np.float64) ** 2).sum(-1) + 1e-6)).astype(np.float32)
    (dx,) = gradient(f64(dy))
    # Errors are relative to what cancels out.
    bound = 1e-5 * float(jnp.max(jnp.abs(f64(dy)) * f64(rstd)[:, None])) + 1e-9
    return {"y": np.asarray(y, np.float32), "rstd": rstd, "dy": dy}, {}, {"dx": (dx, (1e-5, bound))}, []


@case
def chunk_local_cumsum(d):
    batch, tokens, heads, chunk = d.size(3), d.size(200), d.size(20), 2 ** int(d.integers(0, 8, ()))
    x, reverse = d.normal((batch, tokens, heads), np.float32), bool(d.pick(0, 1))
    padded = jnp.pad(f64(x), ((0, 0), (0, -tokens % chunk), (0, 0))).reshape(batch, -1, chunk, heads)
    sums = jnp.flip(jnp.cumsum(jnp.flip(padded, 2), 2), 2) if reverse else jnp.cumsum(padded, 2)
    y = sums.reshape(batch, -1, heads)[:, :tokens]
    bound = 1e-6 * float(jnp.max(jnp.sum(jnp.abs(padded), 2)))
    return {"x": x}, {"chunk_size": chunk, "reverse": str(reverse).lower()}, {"y": (y, (3e-7, bound))}, []


@case
def chunk_scaled_dot_kkt(d):
    t, batch, tokens, k_heads, group = d.dtype(), d.size(2), d.size(150), d.size(3), d.size(3)
    chunk, dim, base = d.pick(16, 32, 64), d.pick(16, 64, 128, d.size(200)), d.pick("e", "2")
    k, shape = d.normal((batch, tokens, k_heads, dim), t, dim**-0.5), (batch, tokens, k_heads * group)
    g = np.cumsum(-np.abs(d.normal(shape, np.float32, 0.1)), axis=1, dtype=np.float32)
    beta = d.normal(shape, np.float32, 0.2, 0.5)
    keys = f64(np.repeat(k, group, axis=2))
    products = jnp.einsum("bihk,bjhk->bihj", keys, keys)
    off = f64(g)[..., None] - jnp.moveaxis(f64(g), 1, 2)[:, None]
    rows = jnp.arange(tokens)
    lower = (rows[:, None] > rows) & (rows[:, None] // chunk == rows // chunk)
    power = jnp.where(lower[None, :, None], off * (1 if base == "e" else np.log(2)), 0)
    a = jnp.where(lower[None, :, None], f64(beta)[..., None] * jnp.exp(power) * products, 0)
    # The columns of a row's chunk.
    columns = rows[:, None] // chunk * chunk + jnp.arange(chunk)
    a = jnp.where((columns < tokens)[None, :, None], jnp.take_along_axis(a, jnp.minimum(columns, tokens - 1)[None, :, None], -1), 0)
    return {"k": k, "g": g, "beta": beta}, {"chunk_size": chunk, "base": base}, {"a": (a, (3e-6, 3e-6))}, []


@case
def solve_tril(d):
    batch, tokens, heads, chunk, dtype = d.size(2), d.size(150), d.size(3), d.pick(16, 32, 64), d.pick("f32", "bf16", "f16")
    a = d.normal((batch, tokens, heads, chunk), np.float32, 0.1)
    rows = -tokens % chunk + tokens
    padded = jnp.pad(f64(a), ((0, 0), (0, rows - tokens), (0, 0), (0, 0)))
    blocks = padded.reshape(batch, -1, chunk, heads, chunk).transpose(0, 1, 3, 2, 4)
    x = jnp.linalg.inv(jnp.eye(chunk) + jnp.tril(blocks, -1))
    x = x.transpose(0, 1, 3, 2, 4).reshape(batch, rows, heads, chunk)[:, :tokens]
    t = {"f32": np.float32, "bf16": bf16, "f16": np.float16}[dtype]
    return {"a": a}, {"x_dtype": dtype}, {"x": (x, rms_bound(t, x))}, []


def by_chunks(x, chunk):
    """[B, T, ..] to [B, chunks, C, ..], zeros past the last token."""
    x = jnp.pad(x, [(0, -n % chunk if axis == 1 else 0) for axis, n in enumerate(x.shape)])
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:])


def by_tokens(x, tokens):
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :tokens]


def chunk_bound(t, x):
    """Operands of products rounded to the type: relative to an element, and to the size of all."""
    relative, absolute = {bf16: (1 / 64, 3e-2), np.float16: (1 / 512, 4e-3), np.float32: (1e-5, 1e-5)}[t]
    return relative, absolute * float(jnp.sqrt(jnp.mean(x * x))) + 1e-7


def chunk_draw(d, *names):
    """Operands of a call in chunks, and the same in f64: by chunks, keys for each value head. `sums`: of the gates in chunks."""
    t, batch, tokens, chunk = d.dtype(), d.size(2), d.size(150), d.pick(16, 32, 64)
    k_heads, group, (dim, v_dim) = d.size(2), d.size(2), d.pick((16, 16), (64, 40), (128, 64), (60 + d.size(70), d.size(60)))
    heads = k_heads * group
    shapes = {"q": (k_heads, dim), "k": (k_heads, dim), "v": (heads, v_dim), "u": (heads, v_dim), "v_new": (heads, v_dim)}
    shapes |= {"w": (heads, dim), "g": (heads,), "sums": (heads,), "beta": (heads,)}
    given, of_head = {}, {}
    for name in names:
        shape = (batch, tokens, *shapes[name])
        x = d.normal(shape, np.float32, dim**-0.5 if name in "qkw" else 0.3 if name in ("g", "sums") else 1.0)
        if name in ("g", "sums"):
            x = -np.abs(x)
            if name == "sums":
                x = np.asarray(by_tokens(jnp.cumsum(by_chunks(f64(x), chunk), 2), tokens), np.float32)
        elif name == "beta":
            x = 1 / (1 + np.exp(-x))
        else:
            x = x.astype(t)
        given["g" if name == "sums" else name] = x
        of_head["g" if name == "sums" else name] = by_chunks(f64(np.repeat(x, group, axis=2) if name in ("q", "k") else x), chunk)
    return t, chunk, tokens, given, of_head


def below(chunk, inclusive=False):
    return jnp.tril(jnp.ones((chunk, chunk), bool), 0 if inclusive else -1)


def decays(g, lower):
    """exp(G_i - G_j), [B, chunks, heads, C, C]."""
    off = jnp.moveaxis(g, 2, -1)
    return jnp.where(lower, jnp.exp(jnp.where(lower, off[..., :, None] - off[..., None, :], 0)), 0)


def wy(x, beta, g, k, v):
    w = jnp.einsum("bnhij,bnjh,bnjhd->bnihd", x, beta * jnp.exp(g), k)
    return w, jnp.einsum("bnhij,bnjh,bnjhd->bnihd", x, beta, v)


@case
def fused_cumsum_kkt(d):
    t, chunk, tokens, given, x = chunk_draw(d, "k", "g", "beta")
    base, layout = d.pick("e", "2"), d.pick("tokens", "heads")
    g = jnp.cumsum(x["g"], 2)
    products = jnp.einsum("bnihd,bnjhd->bnhij", x["k"], x["k"]) * decays(g, below(chunk))
    a = by_tokens(jnp.moveaxis(products, 2, 3) * x["beta"][..., None], tokens)
    sums = by_tokens(g, tokens) * (1 if base == "e" else np.log2(np.e))
    sums = sums if layout == "tokens" else jnp.moveaxis(sums, 1, 2)
    parameters = {"chunk_size": chunk, "base": base, "layout": layout}
    return given, parameters, {"sums": (sums, (1e-6, 1e-6)), "a": (a, (1e-5, 1e-5))}, []


@case
def wy_representation(d):
    t, chunk, tokens, given, x = chunk_draw(d, "k", "v", "g", "beta")
    g = jnp.cumsum(x["g"], 2)
    a = jnp.einsum("bnihd,bnjhd->bnhij", x["k"], x["k"]) * decays(g, below(chunk)) * jnp.moveaxis(x["beta"], 2, 3)[..., None]
    w, u = (by_tokens(y, tokens) for y in wy(jnp.linalg.inv(jnp.eye(chunk) + a), x["beta"], g, x["k"], x["v"]))
    want = {"sums": (by_tokens(g, tokens), (1e-6, 1e-6)), "w": (w, chunk_bound(t, w)), "u": (u, chunk_bound(t, u))}
    return given, {"chunk_size": chunk}, want, []


@case
def recompute_w_u(d):
    t, chunk, tokens, given, x = chunk_draw(d, "k", "v", "sums", "beta")
    inverse = d.normal((*given["beta"].shape, chunk), t, 0.2)
    lower = jnp.where(below(chunk, True), jnp.moveaxis(by_chunks(f64(inverse), chunk), 3, 2), 0)
    w, u = (by_tokens(y, tokens) for y in wy(lower, x["beta"], x["g"], x["k"], x["v"]))
    return given | {"x": inverse}, {}, {"w": (w, chunk_bound(t, w)), "u": (u, chunk_bound(t, u))}, []


@case
def chunk_delta_h(d):
    t, chunk, tokens, given, x = chunk_draw(d, "k", "w", "u", "sums")
    batch, _, heads, dim = given["w"].shape
    state = d.normal((batch, heads, dim, given["u"].shape[-1]), np.float32)
    layout, h_layout = d.pick("kv", "vk"), d.pick("kv", "vk")
    h, new, last = [], [], f64(state)
    for c in range(x["k"].shape[1]):
        rows = min(chunk, tokens - c * chunk)
        k, w, u, g = (x[name][:, c, :rows] for name in ("k", "w", "u", "g"))
        h.append(last)
        new.append(u - jnp.einsum("bthk,bhkv->bthv", w, last))
        weights = jnp.exp(g[:, -1:] - g)
        last = jnp.exp(g[:, -1])[..., None, None] * last + jnp.einsum("bth,bthk,bthv->bhkv", weights, k, new[-1])
    h, new = jnp.stack(h, 1), jnp.concatenate(new, 1)
    stored = lambda x, layout: x if layout == "kv" else x.swapaxes(-1, -2)
    want = {name: (y, chunk_bound(t, y)) for name, y in (("h", stored(h, h_layout)), ("v_new", new), ("final_state", stored(last, layout)))}
    given |= {"initial_state": np.ascontiguousarray(stored(state, layout))}
    parameters = {"chunk_size": chunk, "layout": layout, "h_layout": h_layout}
    return given, parameters, want, ["h", "v_new", "final_state"]


@case
def chunk_o(d):
    t, chunk, tokens, given, x = chunk_draw(d, "q", "k", "v_new", "sums")
    batch, _, heads, v_dim = given["v_new"].shape
    h_layout, dim = d.pick("kv", "vk"), given["q"].shape[-1]
    h = d.normal((batch, x["q"].shape[1], heads, dim, v_dim), t, 0.1)
    scores = jnp.einsum("bnihd,bnjhd->bnhij", x["q"], x["k"]) * decays(x["g"], below(chunk, True))
    o = jnp.einsum("bnihk,bnhkv->bnihv", x["q"] * jnp.exp(x["g"])[..., None], f64(h))
    o = by_tokens(o + jnp.einsum("bnhij,bnjhv->bnihv", scores, x["v_new"]), tokens) * dim**-0.5
    given |= {"h": h if h_layout == "kv" else np.ascontiguousarray(h.swapaxes(-1, -2))}
    return given, {"chunk_size": chunk, "h_layout": h_layout}, {"o": (o, chunk_bound(t, o))}, []


@case
def chunk_gated_delta_rule(d):
    t, chunk, tokens, given, _ = chunk_draw(d, "q", "k", "v", "g", "beta")
    layout, l2norm, channels = d.pick("kv", "vk"), bool(d.pick(0, 1)), bool(d.pick(0, 1))
    (batch, _, heads, v_dim), dim = given["v"].shape, given["q"].shape[-1]
    state = d.normal((batch, heads, dim, v_dim), np.float32)
    of_head = [f64(np.repeat(given[name], heads // given["k"].shape[2], axis=2)) for name in ("q", "k")]
    gk = jnp.zeros((batch, tokens, heads, dim))
    if channels:
        given["gk"] = -np.abs(d.normal(gk.shape, np.float32, 0.3))
        gk = f64(given["gk"])
    g = jnp.zeros((batch, tokens, heads)) if channels else f64(given["g"])
    o, last = delta_rule(*of_head, f64(given["v"]), g, gk, f64(given["beta"]), f64(state), dim**-0.5, l2norm)
    if channels:
        del given["g"]
    last = last if layout == "kv" else last.swapaxes(2, 3)
    given |= {"initial_state": np.ascontiguousarray(state if layout == "kv" else state.swapaxes(2, 3))}
    parameters = {"chunk_size": chunk, "layout": layout, "qk_l2norm": str(l2norm).lower()}
    want = {"o": (o, chunk_bound(t, o)), "final_state": (last, chunk_bound(t, last))}
    return given, parameters, want, ["final_state"]


def starts_of(d):
    lens = d.integers(0, 300, d.size(40)) * d.integers(0, 3, ())
    return lens.astype(d.pick(np.int32, np.int64)), np.concatenate([[0], np.cumsum(lens)])


def of_starts(d, make):
    """An operator of starts: `make(starts, chunk)` gives parameters and results."""
    lens, starts = starts_of(d)
    parameters, want = make(starts, 2 ** int(d.integers(0, 8, ())))
    return {"cu_seqlens": starts.astype(lens.dtype)}, parameters, {name: (f64(x), EXACT) for name, x in want.items()}, []


def chunks_of(starts, chunk):
    return -(-np.diff(starts) // chunk)


@case
def bf16_to_float(d):
    x = d.normal(d.size(9000), bf16, 3.0)
    return {"x": x}, {}, {"y": (f64(x), EXACT)}, []


@case
def float_to_bf16(d):
    x = d.normal(d.size(9000), np.float32, 3.0)
    return {"x": x}, {}, {"y": (f64(x.astype(bf16)), EXACT)}, []


@case
def abs_diff(d):
    t, n = d.dtype(), d.size(9000)
    x, y = d.normal(n, t), d.normal(n, t)
    return {"x": x, "y": y}, {}, {"diff": (jnp.abs(f64(x) - f64(y)), ELEMENTWISE[np.float32])}, []


@case
def squared_diff(d):
    t, n = d.dtype(), d.size(9000)
    x, y = d.normal(n, t), d.normal(n, t)
    return {"x": x, "y": y}, {}, {"diff": ((f64(x) - f64(y)) ** 2, ELEMENTWISE[np.float32])}, []


@case
def sum_reduce(d):
    x = d.normal(d.size(60_000), d.dtype())
    return {"x": x}, {}, {"y": (jnp.sum(f64(x))[None], (0.0, 1e-6 * float(jnp.sum(jnp.abs(f64(x))))))}, []


@case
def max_reduce(d):
    x = d.normal(d.size(60_000), d.dtype())
    return {"x": x}, {}, {"y": (jnp.max(f64(x))[None], EXACT)}, []


@case
def prepare_lens(d):
    return of_starts(d, lambda starts, _: ({}, {"lens": np.diff(starts)}))


@case
def prepare_cu_seqlens_from_lens(d):
    lens, starts = starts_of(d)
    return {"lens": lens}, {}, {"cu_seqlens": (f64(starts), EXACT)}, []


@case
def prepare_position_ids(d):
    def make(starts, _):
        ids = np.concatenate([np.arange(n) for n in np.diff(starts)])
        return {"tokens": starts[-1]}, {"position_ids": ids}

    return of_starts(d, make)


@case
def prepare_sequence_ids(d):
    def make(starts, _):
        return {"tokens": starts[-1]}, {"sequence_ids": np.repeat(np.arange(len(starts) - 1), np.diff(starts))}

    return of_starts(d, make)


@case
def prepare_chunk_offsets(d):
    def make(starts, chunk):
        return {"chunk_size": chunk}, {"offsets": np.concatenate([[0], np.cumsum(chunks_of(starts, chunk))])}

    return of_starts(d, make)


@case
def gpu_prepare_chunk_indices(d):
    def make(starts, chunk):
        chunks = chunks_of(starts, chunk)
        rows = [(n, c) for n, count in enumerate(chunks) for c in range(count)]
        capacity = int(starts[-1]) // chunk + len(chunks)
        indices = np.array(rows + [(-1, -1)] * (capacity - len(rows))).reshape(-1, 2)
        return {"chunk_size": chunk, "capacity": capacity}, {"indices": indices, "count": np.array([len(rows)])}

    return of_starts(d, make)


@case
def get_max_num_splits(d):
    return of_starts(d, lambda starts, chunk: ({"chunk_size": chunk}, {"splits": chunks_of(starts, chunk).max(keepdims=True)}))


# Rotations


def rotate(x, cos, sin, interleaved):
    """x [tokens, heads, dim], tables [tokens, dim / 2]."""
    c, s = cos[:, None, :], sin[:, None, :]
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return jnp.stack([a * c - b * s, b * c + a * s], axis=-1).reshape(x.shape)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1)


def tables(positions, dim, theta=1e4):
    angles = np.arange(positions)[:, None] * theta ** (-np.arange(dim // 2) / (dim // 2))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def bounds_of_rotation(t, x):
    rtol, atol = ELEMENTWISE[t]
    return rtol, atol + rtol * float(jnp.max(jnp.abs(f64(x))))


@case
def rope_cached(d):
    t, tokens, heads, dim = d.dtype(), d.size(30), d.size(9), 2 * d.size(80)
    style = d.pick("neox", "interleaved")
    x, (cos, sin) = d.normal((tokens, heads, dim), t), tables(64, dim)
    at = d.integers(0, 64, tokens)
    y = rotate(f64(x), f64(cos)[at], f64(sin)[at], style == "interleaved")
    inputs = {"x": x, "cos": cos, "sin": sin, "positions": at}
    return inputs, {"style": style, "layout": "thd", "rotary": dim}, {"y": (y, bounds_of_rotation(t, x))}, []


@case
def rope_freqs(d):
    t, tokens, heads, dim = d.dtype(), d.size(30), d.size(9), 2 * d.size(80)
    x, angles = d.normal((tokens, heads, dim), t), d.normal((tokens, dim // 2), np.float32, 1e3)
    y = rotate(f64(x), jnp.cos(f64(angles)), jnp.sin(f64(angles)), False)
    return {"x": x, "angles": angles}, {"rotary": dim}, {"y": (y, bounds_of_rotation(t, x))}, []


@case
def rope_qk(d):
    t, tokens, kv, group, dim = d.dtype(), d.size(30), d.size(4), d.size(4), 2 * d.size(80)
    q, k, (cos, sin) = d.normal((tokens, kv * group, dim), t), d.normal((tokens, kv, dim), t), tables(64, dim)
    want = {
        "q_out": (rotate(f64(q), f64(cos)[:tokens], f64(sin)[:tokens], True), bounds_of_rotation(t, q)),
        "k_out": (rotate(f64(k), f64(cos)[:tokens], f64(sin)[:tokens], True), bounds_of_rotation(t, k)),
    }
    return {"q": q, "k": k, "cos": cos, "sin": sin}, {"rotary": dim, "style": "interleaved"}, want, []


@case
def qk_rope_cat(d):
    t, tokens, kv, group, nope, pe = d.dtype(), d.size(20), d.size(3), d.size(3), d.size(130), 2 * d.size(32)
    parts = [d.normal((tokens, h, w), t) for h in (kv * group, kv) for w in (nope, pe)]
    (cos, sin), at = tables(64, pe), d.integers(0, 64, tokens)
    turned = [rotate(f64(p), f64(cos)[at], f64(sin)[at], False) for p in parts[1::2]]
    want = {
        name: (jnp.concatenate([f64(plain), pe_out], axis=-1), bounds_of_rotation(t, plain))
        for name, plain, pe_out in zip(("q_out", "k_out"), parts[0::2], turned)
    }
    inputs = dict(zip(("q_nope", "q_pe", "k_nope", "k_pe"), parts)) | {"cos": cos, "sin": sin, "positions": at}
    return inputs, {}, want, []


def latent(d, t):
    """Inputs of the operators on latent caches, of one key head, without the queries' first part; and what they give."""
    tokens, heads, nope, pe = d.size(8), d.pick(2, 4, 16), 16 * d.size(8), 2 * d.size(32)
    q_pe, k_nope, k_pe = d.normal((tokens, heads, pe), t), d.normal((tokens, 1, nope), t), d.normal((tokens, 1, pe), t)
    cache, (cos, sin), at = d.normal((32, 1, nope + pe), t), tables(64, pe), d.integers(0, 64, tokens)
    slots = d.rng.permutation(32)[:tokens].astype(np.int64)
    q_turned, k_turned = (rotate(f64(x), f64(cos)[at], f64(sin)[at], True) for x in (q_pe, k_pe))
    stored = np.array(f64(cache))
    stored[slots] = np.concatenate([np.array(f64(k_nope)), np.array(k_turned)], axis=-1)
    bounds = bounds_of_rotation(t, np.concatenate([q_pe.ravel(), k_pe.ravel()]))
    inputs = {"q_pe": q_pe, "k_nope": k_nope, "k_pe": k_pe, "cos": cos, "sin": sin, "positions": at}
    inputs |= {"slot_mapping": slots, "kv_cache": cache}
    return inputs, q_turned, {"k_pe_out": (k_turned, bounds), "kv_cache": (stored, bounds)}, bounds, (tokens, heads, nope)


@case
def rope_cat_and_cache_mla(d):
    t = d.pick(bf16, np.float16)
    inputs, q_turned, want, bounds, shape = latent(d, t)
    q_nope = d.normal(shape, t)
    want["q_out"] = (jnp.concatenate([f64(q_nope), q_turned], axis=-1), bounds)
    return {"q_nope": q_nope} | inputs, {"style": "interleaved"}, want, []


@case
def fused_bmm_rope_kv_cache(d):
    t, inner = d.pick(bf16, np.float16), 8 * d.size(16)
    inputs, q_turned, want, bounds, (tokens, heads, nope) = latent(d, t)
    q, w = d.normal((heads, tokens, inner), t), d.normal((heads, nope, inner), t)
    product = jnp.einsum("htp,hnp->thn", f64(q), f64(w))
    size = float(jnp.max(jnp.einsum("htp,hnp->thn", jnp.abs(f64(q)), jnp.abs(f64(w)))))
    rtol, atol = bounds
    want["q_out"] = (jnp.concatenate([product, q_turned], axis=-1), (rtol, atol + 2**-8 * size / np.sqrt(inner)))
    return {"q_nope": q, "w": w} | inputs, {"style": "interleaved"}, want, []


@case
def fused_qkv_split_qk_rope(d):
    t, tokens, kv, group, dim = d.dtype(), d.size(20), d.size(4), d.size(4), 2 * d.size(64)
    heads, style = kv * group, d.pick("neox", "interleaved")
    qkv, (cos, sin) = d.normal((tokens, (heads + 2 * kv) * dim), t), tables(64, dim)
    at = d.integers(0, 64, tokens)
    all_heads = f64(qkv).reshape(tokens, heads + 2 * kv, dim)
    rotated = rotate(all_heads, f64(cos)[at], f64(sin)[at], style == "interleaved")
    b = bounds_of_rotation(t, qkv)
    want = {"q": (rotated[:, :heads], b), "k": (rotated[:, heads : heads + kv], b), "v": (all_heads[:, heads + kv :], EXACT)}
    parameters = {"style": style, "q_heads": heads, "kv_heads": kv, "head_dim": dim, "rotary": dim}
    return {"qkv": qkv, "cos": cos, "sin": sin, "positions": at}, parameters, want, []


@case
def qk_cat(d):
    t, tokens, kv, group = d.dtype(), d.size(20), d.size(4), d.size(4)
    one, two, heads = d.size(130), d.size(130), kv * group
    q1, q2 = d.normal((tokens, heads, one), t), d.normal((tokens, heads, two), t)
    k1, k2 = d.normal((tokens, kv, one), t), d.normal((tokens, kv, two), t)
    want = {
        "q_out": (jnp.concatenate([f64(q1), f64(q2)], axis=-1), EXACT),
        "k_out": (jnp.concatenate([f64(k1), f64(k2)], axis=-1), EXACT),
    }
    return {"q1": q1, "q2": q2, "k1": k1, "k2": k2}, {}, want, []


@case
def rope_reshape_and_cache(d):
    t, tokens, kv, group, dim = d.pick(bf16, np.float16), d.size(12), d.size(3), d.size(3), 2 * d.size(64)
    blocks, size = 5, 4
    q, k, v = (d.normal((tokens, h, dim), t) for h in (kv * group, kv, kv))
    caches = [d.normal((blocks, size, kv, dim), t) for _ in range(2)]
    (cos, sin), at = tables(64, dim), d.integers(0, 64, tokens)
    slots = d.rng.permutation(blocks * size)[:tokens].astype(np.int64)
    slots[d.rng.random(tokens) < 0.2] = -1
    q_out = rotate(f64(q), f64(cos)[at], f64(sin)[at], False)
    k_out = rotate(f64(k), f64(cos)[at], f64(sin)[at], False)
    key, value = (np.array(f64(c)).reshape(blocks * size, kv, dim) for c in caches)
    used = slots >= 0
    key[slots[used]], value[slots[used]] = np.array(k_out)[used], np.array(f64(v))[used]
    b = bounds_of_rotation(t, k)
    want = {
        "q_out": (q_out, bounds_of_rotation(t, q)),
        "k_out": (k_out, b),
        "key_cache": (key.reshape(caches[0].shape), b),
        "value_cache": (value.reshape(caches[1].shape), EXACT),
    }
    inputs = {"q": q, "k": k, "v": v, "cos": cos, "sin": sin, "positions": at, "slot_mapping": slots}
    return inputs | {"key_cache": caches[0], "value_cache": caches[1]}, {}, want, []


# Attention

ATTENTION = {bf16: (1e-2, 1e-2), np.float16: (2e-3, 2e-3), np.float32: (1e-4, 2e-5)}
LSE = (1e-4, 1e-4)


def attention(q, k, v, scale=0.0, causal=False, left=-1, right=-1, softcap=0.0, alibi=None, bias=None, sink=None, visible=None):
    """A sequence: q [queries, heads, columns], k and v [keys, kv heads, columns]; outputs as q, log-sum-exp [queries, heads]."""
    (queries, heads, columns), keys = q.shape, k.shape[0]
    k, v = (jnp.repeat(f64(x), heads // x.shape[1], axis=1) for x in (k, v))
    s = jnp.einsum("ihc,jhc->hij", f64(q), k) * (scale or columns**-0.5)
    if softcap:
        s = softcap * jnp.tanh(s / softcap)
    ahead = np.arange(keys)[None, :] - np.arange(queries)[:, None] - (keys - queries)
    if alibi is not None:
        s = s - f64(alibi)[:, None, None] * np.abs(ahead)
    if bias is not None:
        s = s + f64(bias)
    seen = np.ones_like(ahead, dtype=bool) if visible is None else np.array(visible)
    if causal:
        seen &= ahead <= 0
    if left >= 0:
        seen &= ahead >= -left
    if right >= 0:
        seen &= ahead <= right
    s = jnp.where(seen, s, -jnp.inf)
    if sink is not None:
        s = jnp.concatenate([s, jnp.broadcast_to(f64(sink)[:, None, None], (heads, queries, 1))], axis=-1)
    if s.shape[-1] == 0:
        return jnp.zeros((queries, heads, v.shape[2])), jnp.full((queries, heads), -jnp.inf)
    lse = jax.scipy.special.logsumexp(s, axis=-1)
    p = jnp.exp(s - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None])[..., :keys]
    return jnp.einsum("hij,jhc->ihc", p, v), lse.T


def heads_of(d):
    kv = d.size(3)
    return kv * d.size(4), kv, d.pick(d.size(256), 64, 128), d.pick(d.size(256), 64, 128)


def qkv(d, t, rows, keys):
    heads, kv, dqk, dv = heads_of(d)
    return {"q": d.normal((*rows, heads, dqk), t), "k": d.normal((*keys, kv, dqk), t), "v": d.normal((*keys, kv, dv), t)}


def sequences(inputs, parts, **options):
    """Outputs and log-sum-exp of packed sequences, each by its rows of queries and of keys, in the order of the queries."""
    one = [attention(inputs["q"][q], inputs["k"][k], inputs["v"][v], **options) for q, k, v in ((q, k, k) for q, k in parts)]
    return [jnp.concatenate(x, axis=0) for x in zip(*one)]


def cuts(d, n, most):
    """Starts of n sequences."""
    return np.concatenate([[0], np.cumsum(d.integers(0, most, n))]).astype(np.int32)


def slices(starts):
    return [slice(a, b) for a, b in zip(starts[:-1], starts[1:])]


def scores(d):
    """Parameters of a call, and the same as arguments of `attention`."""
    scale, softcap = d.pick(0.0, 0.125), d.pick(0.0, 20.0)
    causal, left, right = d.pick(False, True), d.pick(-1, 0, d.size(60)), d.pick(-1, d.size(9))
    parameters = {"scale": scale, "softcap": softcap, "window_left": left, "window_right": right}
    options = {"scale": scale, "softcap": softcap, "left": left, "right": right, "causal": causal}
    return parameters | {"causal": str(causal).lower()}, options


@case
def mha(d):
    t, batch, queries, keys = d.dtype(), d.size(3), d.size(140), d.size(140)
    inputs, (parameters, options) = qkv(d, t, (batch, queries), (batch, keys)), scores(d)
    heads = inputs["q"].shape[2]
    inputs["sink"] = d.normal(heads, np.float32)
    inputs["alibi"] = np.abs(d.normal((batch, heads), np.float32))
    inputs["bias"] = d.normal((batch, heads, queries, keys), d.pick(np.float32, t))
    parts = [
        attention(*(inputs[x][n] for x in "qkv"), **options, alibi=inputs["alibi"][n], bias=inputs["bias"][n], sink=inputs["sink"])
        for n in range(batch)
    ]
    out, lse = (jnp.stack(x) for x in zip(*parts))
    return inputs, parameters, {"out": (out, ATTENTION[t]), "lse": (jnp.swapaxes(lse, 1, 2), LSE)}, ["lse"]


GRADIENT = {bf16: (2.5e-2, 2.5e-2), np.float16: (5e-3, 5e-3), np.float32: (1e-3, 1e-4)}


def gradients(d, schedules):
    """By reverse-mode differentiation of the forward pass."""
    t, batch, queries, keys = d.dtype(), d.size(3), d.size(140), d.size(140)
    inputs, (parameters, options) = qkv(d, t, (batch, queries), (batch, keys)), scores(d)
    inputs["sink"] = d.normal(inputs["q"].shape[2], np.float32)
    alibi = np.abs(d.normal((batch, inputs["q"].shape[2]), np.float32))

    def forward(q, k, v, sink):
        parts = [attention(q[n], k[n], v[n], **options, alibi=alibi[n], sink=sink) for n in range(batch)]
        out, lse = (jnp.stack(x) for x in zip(*parts))
        return out, jnp.swapaxes(lse, 1, 2)

    out, back, lse = jax.vjp(forward, *(f64(inputs[x]) for x in ("q", "k", "v", "sink")), has_aux=True)
    inputs |= {"alibi": alibi, "dout": d.normal(out.shape, t)}
    dq, dk, dv, dsink = back(f64(inputs["dout"]))
    inputs |= {"out": np.asarray(out).astype(t), "lse": np.asarray(lse).astype(np.float32)}
    want = {name: (x, GRADIENT[t]) for name, x in (("dq", dq), ("dk", dk), ("dv", dv))}
    # A sum over all rows of rounded outputs.
    want["dsink"] = (dsink, (GRADIENT[t][0], 4 * GRADIENT[t][1]))
    return inputs, parameters | schedules, want, []


@case
def mha_onekernel_bwd(d):
    return gradients(d, {})


@case
def flash_attn_bwd(d):
    return gradients(d, {"schedule": d.pick("split", "fused")})


@case
def mha_fused_bwd(d):
    return gradients(d, {"dq_sums": d.pick("ordered", "atomic")})


@case
def mha_varlen(d):
    t, n = d.dtype(), d.size(4)
    q, k = cuts(d, n, 90), cuts(d, n, 120)
    inputs, (parameters, options) = qkv(d, t, (q[-1],), (k[-1],)), scores(d)
    inputs["sink"] = d.normal(inputs["q"].shape[1], np.float32)
    out, lse = sequences(inputs, zip(slices(q), slices(k)), **options, sink=inputs["sink"])
    want = {"out": (out, ATTENTION[t]), "lse": (lse, LSE)}
    return inputs | {"cu_seqlens_q": q, "cu_seqlens_k": k}, parameters, want, ["lse"]


@case
def prefill_attn(d):
    t, starts, causal = d.dtype(), cuts(d, d.size(5), 90), d.pick(False, True)
    order, inputs = d.rng.permutation(len(starts) - 1), qkv(d, t, (starts[-1],), (starts[-1],))
    out, lse = sequences(inputs, zip(slices(starts), slices(starts)), causal=causal)
    inputs |= {"start": starts[:-1][order], "len": np.diff(starts)[order]}
    parameters = {"max_len": 90, "causal": str(causal).lower()}
    return inputs, parameters, {"out": (out, ATTENTION[t]), "lse": (lse, LSE)}, ["lse"]


@case
def flash_attn_fwd_prefill(d):
    t, n = d.dtype(), d.size(4)
    q, k = cuts(d, n, 90), cuts(d, n, 120)
    inputs, (parameters, options) = qkv(d, t, (q[-1],), (k[-1],)), scores(d)
    del parameters["softcap"], options["softcap"]
    used = np.array([d.rng.integers(0, b - a + 1) for a, b in zip(k[:-1], k[1:])], dtype=np.int32)
    inputs["alibi"] = np.abs(d.normal(inputs["q"].shape[1], np.float32))
    parts = zip(slices(q), (slice(a, a + m) for a, m in zip(k, used)))
    out, lse = sequences(inputs, parts, **options, alibi=inputs["alibi"])
    inputs |= {"cu_seqlens_q": q, "cu_seqlens_k": k, "seqused_k": used}
    return inputs, parameters, {"out": (out, ATTENTION[t]), "lse": (lse.T, LSE)}, ["lse"]


@case
def lean_atten(d):
    t, batch, queries, causal, scale = d.dtype(), d.size(4), d.size(40), d.pick(False, True), d.pick(0.0, 0.25)
    k = cuts(d, batch, 150)
    inputs = qkv(d, t, (batch * queries,), (k[-1],))
    rows = slices(np.arange(batch + 1) * queries)
    out, lse = sequences(inputs, zip(rows, slices(k)), causal=causal, scale=scale)
    want = {"out": (out, ATTENTION[t]), "lse": (lse, LSE)}
    return inputs | {"kv_lens": np.diff(k)}, {"causal": str(causal).lower(), "scale": scale}, want, ["lse"]


@case
def lean_atten_paged(d):
    t, batch, queries, causal, page = d.dtype(), d.size(4), d.pick(1, 2, 7), d.pick(False, True), d.pick(1, 5, 16, 64)
    k, pages = cuts(d, batch, 150), d.pick(7, 40)
    counts = [-(-(b - a) // page) for a, b in zip(k[:-1], k[1:])]
    heads, kv, dqk, dv = heads_of(d)
    lists = d.pick(1, kv)
    q = d.normal((heads, batch * queries, dqk), t)
    caches = [d.normal((kv, pages * page, columns), t) for columns in (dqk, dv)]
    table = d.rng.integers(0, pages, (lists, sum(counts) + d.size(3) - 1)).astype(np.int32)
    out, lse = [], []
    for n, first in enumerate(np.cumsum([0, *counts[:-1]])):
        j = np.arange(k[n + 1] - k[n])
        slots = [table[h % lists, first + j // page] * page + j % page for h in range(kv)]
        rows = [np.stack([cache[h, slots[h]] for h in range(kv)], axis=1) for cache in caches]
        o, l = attention(q[:, n * queries : (n + 1) * queries].swapaxes(0, 1), *rows, causal=causal)
        out.append(jnp.swapaxes(o, 0, 1)), lse.append(l.T)
    out, lse = (jnp.concatenate(x, axis=1) for x in (out, lse))
    inputs = {"q": q, "k_cache": caches[0], "v_cache": caches[1], "block_table": table, "kv_lens": np.diff(k)}
    parameters = {"causal": str(causal).lower(), "page": page, "programs": d.pick(0, 1, 3)}
    return inputs, parameters, {"out": (out, ATTENTION[t]), "lse": (lse, LSE)}, ["lse"]


@case
def fp8_mqa_logits(d):
    queries, heads, columns, keys = d.size(20), d.size(100), 16 * d.size(16), d.size(400)
    t = fp8(d)
    q, k = (d.normal(of, np.float32).astype(t) for of in ((queries, heads, columns), (keys, columns)))
    scale, weights = np.abs(d.normal(keys, np.float32)), d.normal((queries, heads), np.float32)
    starts, ends = d.integers(-3, keys, queries), d.integers(0, keys + 9, queries)
    products = jax.nn.relu(jnp.einsum("ihc,jc->ihj", f64(q), f64(k)))
    out = jnp.einsum("ihj,ih->ij", products, f64(weights)) * f64(scale)
    off = jnp.einsum("ihj,ih->ij", products, jnp.abs(f64(weights))) * f64(scale)
    at = np.arange(keys)
    seen = (at >= starts[:, None]) & (at < ends[:, None])
    inputs = {"q": q, "k": k, "k_scale": scale, "weights": weights, "starts": starts, "ends": ends}
    return inputs, {}, {"out": (jnp.where(seen, out, -jnp.inf), (1e-6, np.asarray(off) * 1e-5 + 1e-9))}, []


@case
def pa_mqa_logits(d):
    n, of_one, heads, columns = d.size(3), d.size(4), d.size(100), 16 * d.size(16)
    tokens, width, longest = d.pick(1, 16, 64), d.size(8), d.size(300)
    pages = n * width
    t = fp8(d)
    q, k = (d.normal(of, np.float32).astype(t) for of in ((n, of_one, heads, columns), (pages, tokens, columns)))
    scale, weights = np.abs(d.normal((pages, tokens), np.float32)), d.normal((n * of_one, heads), np.float32)
    table = d.rng.permutation(pages).astype(np.int32).reshape(n, width)
    lens = d.integers(0, width * tokens + 1, n)
    longest = min(longest, width * tokens)
    keys, scales = (f64(x)[table].reshape(n, width * tokens, -1)[:, :longest] for x in (k, scale))
    products = jax.nn.relu(jnp.einsum("brhc,bjc->brhj", f64(q), keys))
    each = f64(weights).reshape(n, of_one, heads)
    out, off = (jnp.einsum("brhj,brh->brj", products, w) * scales[:, None, :, 0] for w in (each, jnp.abs(each)))
    last = lens[:, None] - of_one + np.arange(of_one)
    seen = np.arange(longest) <= last[:, :, None]
    out, off = (x.reshape(n * of_one, longest) for x in (jnp.where(seen, out, -jnp.inf), off))
    inputs = {"q": q, "k": k, "k_scale": scale, "weights": weights, "context_lens": lens, "block_table": table}
    return inputs, {"max_len": longest}, {"out": (out, (1e-6, np.asarray(off) * 1e-5 + 1e-9))}, []


def sage_inputs(d, queries, keys):
    kv, dqk, dv, t = d.size(3), d.pick(d.size(128), 64, 128), d.pick(d.size(128), 64, 128), d.dtype()
    shapes = {"q": (queries, kv * d.size(4), dqk), "k": (keys, kv, dqk), "v": (keys, kv, dv)}
    return {name: d.normal((1, *shape), t) for name, shape in shapes.items()}


@case
def sage_attention(d):
    """Exact attention."""
    inputs, (parameters, options) = sage_inputs(d, d.size(140), d.size(140)), scores(d)
    del parameters["softcap"], options["softcap"]
    out, lse = attention(*(inputs[x][0] for x in "qkv"), **options)
    off = 8e-2 * max(1, options["scale"] * inputs["q"].shape[-1] ** 0.5)
    return inputs, parameters, {"out": (out[None], (0.15, 0.15)), "lse": (lse.T[None], (1e-2, off))}, ["lse"]


@case
def sage_quantize(d):
    inputs = sage_inputs(d, d.size(600), d.size(300))
    q, k, v = (np.asarray(f64(inputs[x][0])) for x in "qkv")

    def by_blocks(x, rows):
        blocks = [x[at : at + rows] for at in range(0, len(x), rows)]
        scales = np.array([np.abs(block).max(axis=(0, 2)) for block in blocks]) / 127
        codes = np.concatenate([block / of[:, None] for block, of in zip(blocks, scales)])
        return np.sign(codes) * np.floor(np.abs(codes) + 0.5), scales.T

    def in_16s(x):
        return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 16)])

    mean, scale = k.mean(axis=0), q.shape[-1] ** -0.5
    (q8, q_scale), (k8, k_scale) = by_blocks(q * (scale * np.log2(np.e)), 256), by_blocks(k - mean, 128)
    fnuz = fp8(d) == ml_dtypes.float8_e4m3fnuz
    v_scale = np.abs(v).max(axis=0) / (240 if fnuz else 448)
    v8, neighbour = quantize(v, v_scale, "fp8e4m3fnuz" if fnuz else "fp8e4m3")
    shift = scale * np.einsum("ihc,hc->hi", q, np.repeat(mean, q.shape[1] // k.shape[1], axis=0))
    padded_scale = np.pad(v_scale, [(0, 0), (0, -v.shape[-1] % 16)], constant_values=1)
    want = {
        "q8": (in_16s(q8), (0, 1)),
        "q_scale": (q_scale, (1e-5, 0)),
        "k8": (in_16s(k8), (0, 1)),
        "k_scale": (k_scale, (1e-5, 0)),
        "v8": (in_16s(np.asarray(v8)), neighbour),
        "v_scale": (padded_scale, (1e-5, 0)),
        "lse_shift": (shift, (1e-4, 1e-5)),
    }
    parameters = {"fp8": "fp8e4m3fnuz" if fnuz else "fp8e4m3"}
    return inputs, parameters, {name: (x[None], off) for name, (x, off) in want.items()}, ["lse_shift"]


def tokens_of(d):
    """Inputs and parameters of hstu_attn, and per sequence its rows, factors of activations and what sees what."""
    t, starts, causal = d.dtype(), cuts(d, d.size(4), 100), d.pick(False, True)
    context, reach, heads, columns = d.pick(0, 1, 4), d.pick(0, 7), d.size(4), d.size(200)
    inputs = {name: d.normal((starts[-1], heads, columns), t) for name in "qkv"}
    targets = np.array([d.rng.integers(0, b - a + 1) for a, b in zip(starts[:-1], starts[1:])], dtype=np.int32)
    masks = []
    for rows, n in zip(slices(starts), targets):
        length = rows.stop - rows.start
        limit = length - n - (context - 1 if context else 0)
        place = np.arange(length)
        place = np.minimum(np.maximum(place - context + 1, 0) if context else place, limit)
        away = place[:, None] - place[None, :]
        away = away if causal else np.abs(away)
        seen = (np.eye(length, dtype=bool) | (away > 0)) & ((reach == 0) | (away <= reach))
        seen |= (context > 0) & (place[:, None] == 0) & (place[None, :] < limit)
        masks.append((rows, seen))
    parameters = {"alpha": float(columns**-0.5), "max_len": 100, "causal": str(causal).lower()}
    parameters |= {"contextual_len": context, "max_attn_len": reach}
    return t, inputs | {"seq_offsets": starts, "num_targets": targets}, parameters, masks


def activations(q, k, alpha, seen):
    return jax.nn.silu(jnp.einsum("ihc,jhc->hij", q, k) * alpha) * seen / 100


@case
def hstu_attn(d):
    t, inputs, parameters, masks = tokens_of(d)
    q, k, v = (f64(inputs[x]) for x in "qkv")
    out, off = [], []
    for rows, seen in masks:
        p = activations(q[rows], k[rows], parameters["alpha"], seen)
        out.append(jnp.einsum("hij,jhc->ihc", p, v[rows]))
        off.append(jnp.einsum("hij,jhc->ihc", jnp.abs(p), jnp.abs(v[rows])))
    step = {bf16: 2**-8, np.float16: 2**-11, np.float32: 2**-16}[t]
    out, off = jnp.concatenate(out), np.asarray(jnp.concatenate(off)) * step + 1e-7
    return inputs, parameters, {"out": (out, (step, off))}, []


@case
def hstu_attn_bwd(d):
    t, inputs, parameters, masks = tokens_of(d)

    def forward(q, k, v):
        of = lambda rows, seen: activations(q[rows], k[rows], parameters["alpha"], seen)
        return jnp.concatenate([jnp.einsum("hij,jhc->ihc", of(*part), v[part[0]]) for part in masks])

    out, back = jax.vjp(forward, *(f64(inputs[x]) for x in "qkv"))
    inputs["dout"] = d.normal(out.shape, t)
    want = zip(("dq", "dk", "dv"), back(f64(inputs["dout"])))
    return inputs, parameters, {name: (x, GRADIENT[t]) for name, x in want}, []


LAYOUTS = ["nhd", "hnd", "paged", "paged_shuffled"]


def in_pages(x, layout, values):
    """Rows [pages, tokens, heads, dim] in the layout."""
    pages, tokens, heads, dim = x.shape
    piece = 16 // x.dtype.itemsize
    if layout == "nhd":
        return x
    if layout == "hnd":
        return x.transpose(0, 2, 1, 3).copy()
    if not values:
        return x.reshape(pages, tokens, heads, dim // piece, piece).transpose(0, 2, 3, 1, 4).copy()
    if layout == "paged":
        return x.transpose(0, 2, 3, 1).copy()
    return x.reshape(pages, tokens // piece, piece, heads, dim).transpose(0, 3, 1, 4, 2).copy()


class Paged:
    """Sequences of queries and keys, which are in pages: other slots are NaN."""

    def __init__(self, d, t, dim, single=False):
        self.kv, self.group = d.size(2), d.pick(1, 2, 3, 6)
        self.layout = d.pick(*LAYOUTS)
        self.dim = -(-dim // 16) * 16 if "paged" in self.layout else dim
        tokens = d.pick(16, 64) if self.layout == "paged_shuffled" else d.pick(1, 3, 16, 64)
        self.queries = [1 if single else d.pick(0, 1, 2, 17, 65) for _ in range(d.size(3))]
        self.keys = [n + d.pick(0, 1, 15, 33, 64) for n in self.queries]
        counts = [-(-n // tokens) for n in self.keys]
        pages, total = sum(counts) + 2, sum(self.queries)
        order = iter(d.rng.permutation(pages).astype(np.int32))
        self.table = np.full((len(counts), max(counts) + 1), -1, np.int32)
        caches = [np.full((pages, tokens, self.kv, self.dim), np.nan, t) for _ in range(2)]
        self.k, self.v = ([d.normal((n, self.kv, self.dim), t) for n in self.keys] for _ in range(2))
        for n, count in enumerate(counts):
            self.table[n, :count] = [next(order) for _ in range(count)]
            for j in range(self.keys[n]):
                for cache, rows in zip(caches, (self.k, self.v)):
                    cache[self.table[n, j // tokens], j % tokens] = rows[n][j]
        self.q = d.normal((total, self.kv * self.group, self.dim), t)
        self.starts = np.cumsum([0, *self.queries]).astype(np.int32)
        self.caches = [in_pages(cache, self.layout, i == 1) for i, cache in enumerate(caches)]

    def inputs(self, lens):
        tensors = {"q": self.q, "k_cache": self.caches[0], "v_cache": self.caches[1], "block_table": self.table}
        return tensors | {"cu_seqlens_q": self.starts, lens: np.array(self.keys, np.int32)}

    def fresh(self):
        """Keys and values of the queries."""
        last = ([x[n - m :] for x, n, m in zip(of, self.keys, self.queries)] for of in (self.k, self.v))
        return [np.concatenate(rows) for rows in last]

    def outputs(self, **options):
        """Output and log-sum-exp; options by sequence where they are functions."""
        found = []
        for n, (k, v) in enumerate(zip(self.k, self.v)):
            q = self.q[self.starts[n] : self.starts[n + 1]]
            given = {name: of(n) if callable(of) else of for name, of in options.items()}
            found.append(attention(f64(q), f64(k), f64(v), **{"causal": True} | given))
        return [jnp.concatenate(of) for of in zip(*found)]


@case
def unified_attn(d):
    t = d.dtype()
    paged = Paged(d, t, d.pick(16, 40, 64, 128))
    heads = paged.kv * paged.group
    window, softcap = d.pick(-1, 0, 20), d.pick(0.0, 2.0)
    extra = {"alibi": d.rng.random(heads).astype(np.float32), "sink": d.normal(heads, np.float32)}
    extra["qq_bias"] = d.normal((65, 65), np.float32)
    extra = {name: tensor for name, tensor in extra.items() if d.pick(True, False)}

    def bias(n):
        if "qq_bias" not in extra:
            return 0.0
        queries, keys = paged.queries[n], paged.keys[n]
        return jnp.pad(f64(extra["qq_bias"][:queries, :queries]), ((0, 0), (keys - queries, 0)))

    out, lse = paged.outputs(
        left=window,
        softcap=softcap,
        alibi=extra.get("alibi"),
        sink=extra.get("sink"),
        bias=bias,
    )
    parameters = {"layout": paged.layout, "window": window, "softcap": softcap}
    return paged.inputs("seqused_k") | extra, parameters, {"out": (out, ATTENTION[t]), "lse": (lse, LSE)}, ["lse"]


@case
def pa_decode(d):
    t = d.dtype()
    paged = Paged(d, t, d.pick(16, 40, 64, 128), single=True)
    window, softcap, splits = d.pick(-1, 0, 20), d.pick(0.0, 2.0), d.pick(0, 1, 3)
    heads = paged.kv * paged.group
    extra = {"alibi": d.rng.random(heads).astype(np.float32), "sink": d.normal(heads, np.float32)}
    extra = {name: tensor for name, tensor in extra.items() if d.pick(True, False)}
    out, lse = paged.outputs(left=window, softcap=softcap, alibi=extra.get("alibi"), sink=extra.get("sink"))
    inputs = paged.inputs("seq_lens") | extra
    del inputs["cu_seqlens_q"]
    parameters = {"layout": paged.layout, "window": window, "softcap": softcap, "nsplit": splits}
    return inputs, parameters, {"out": (out, ATTENTION[t]), "lse": (lse, LSE)}, ["lse"]


@case
def flash_attn_fwd_decode(d):
    t, n, queries, new = d.pick(bf16, np.float16), d.size(3), d.pick(1, 2, 5, 20), d.pick(1, 3)
    heads, kv, dqk, dv = heads_of(d)
    dqk = max(dqk, 2)
    lens, paged = d.integers(0, 90, n), d.pick(False, True)
    most = int(lens.max()) + new
    size = d.pick(1, 16, 48) if paged else most + 2
    width = -(-most // size)
    table = d.rng.permutation(n * width + 1)[: n * width].reshape(n, width).astype(np.int32)
    caches = [d.normal((n * width + 1, size, kv, columns), t) for columns in (dqk, dv)]
    q, k, v = d.normal((n, queries, heads, dqk), t), d.normal((n, new, kv, dqk), t), d.normal((n, new, kv, dv), t)
    pairs, style, advance = d.pick(dqk // 2, d.size(dqk // 2)), d.pick("neox", "interleaved"), d.pick(False, True)
    cos, sin = (of.astype(t) for of in tables(120, 2 * pairs))
    parameters, options = scores(d)

    def turned(x, first):
        """At positions from `first` on."""
        at = first + np.arange(len(x))
        part = rotate(f64(x)[..., : 2 * pairs], f64(cos)[at], f64(sin)[at], style == "interleaved")
        return jnp.concatenate([part, f64(x)[..., 2 * pairs :]], axis=-1)

    after, found, turned_q = [np.array(f64(cache)) for cache in caches], [], []
    for i in range(n):
        at = np.arange(lens[i] + new)
        slots = table[i][at // size] * size + at % size
        for cache, rows in zip(after, (turned(k[i], lens[i]), f64(v[i]))):
            flat = cache.reshape(-1, *cache.shape[2:])
            flat[slots[lens[i] :]] = np.array(rows)
        of_k, of_v = (f64(cache.reshape(-1, *cache.shape[2:])[slots].astype(t)) for cache in after)
        turned_q.append(turned(q[i], lens[i]))
        found.append(attention(f64(np.array(turned_q[-1]).astype(t)), of_k, of_v, **options))
    out, lse = (jnp.stack(of) for of in zip(*found))
    want = {
        "out": (out, ATTENTION[t]),
        "lse": (jnp.swapaxes(lse, 1, 2), LSE),
        "q_rotated": (jnp.stack(turned_q), bounds_of_rotation(t, q)),
        "k_cache": (after[0], bounds_of_rotation(t, caches[0])),
        "v_cache": (after[1], EXACT),
        "cache_seqlens": (lens + new if advance else lens, EXACT),
    }
    wanted = ["lse", "q_rotated"]
    if not advance:
        want["seqlens_out"] = (lens + new, EXACT)
        wanted.append("seqlens_out")
    inputs = {"q": q, "k_cache": caches[0], "v_cache": caches[1], "cache_seqlens": lens, "k_new": k, "v_new": v}
    inputs |= {"cos": cos, "sin": sin} | ({"block_table": table} if paged else {"cache_batch_idx": table[:, 0].copy()})
    parameters |= {"style": style, "advance": str(advance).lower(), "nsplit": d.pick(0, 1, 3)}
    return inputs, parameters, want, wanted


@case
def pod_attn(d):
    t = d.dtype()
    paged = Paged(d, t, d.pick(16, 40, 64, 128), single=True)
    heads, n, window = paged.kv * paged.group, d.size(3), d.pick(-1, 0, 20)
    q, k = cuts(d, n, 90), cuts(d, n, 120)
    prompts = {"q": d.normal((q[-1], heads, paged.dim), t)}
    prompts |= {name: d.normal((k[-1], paged.kv, paged.dim), t) for name in "kv"}
    out, lse = sequences(prompts, zip(slices(q), slices(k)), causal=True, left=window)
    tokens = paged.inputs("seq_lens")
    del tokens["cu_seqlens_q"]
    inputs = {f"{name}_prefill": tensor for name, tensor in prompts.items()} | tokens
    inputs |= {"cu_seqlens_q": q, "cu_seqlens_k": k, "q_decode": inputs.pop("q")}
    want = {"out_prefill": (out, ATTENTION[t]), "lse_prefill": (lse, LSE)}
    out, lse = paged.outputs(left=window)
    want |= {"out_decode": (out, ATTENTION[t]), "lse_decode": (lse, LSE)}
    parameters = {"layout": paged.layout, "window": window, "nsplit": d.pick(0, 1, 3), "prefill_blocks": d.pick(0, 1, 2)}
    return inputs, parameters | {"decode_blocks": d.pick(0, 1, 3)}, want, ["lse_prefill", "lse_decode"]


@case
def merge_attn_states(d):
    t, tokens, heads, dim = d.dtype(), d.size(9), d.size(5), d.pick(7, 16, 64, 128)
    inputs = {f"out_{x}": d.normal((tokens, heads, dim), t) for x in "ab"}
    sums = {f"lse_{x}": d.normal((tokens, heads), np.float32) for x in "ab"}
    of = [f64(sums["lse_a"]), f64(sums["lse_b"])]
    lse = jnp.logaddexp(*of)
    out = sum(jnp.exp(s - lse)[..., None] * f64(inputs[f"out_{x}"]) for s, x in zip(of, "ab"))
    return inputs | sums, {}, {"out": (out, ATTENTION[t]), "lse": (lse, LSE)}, ["lse"]


def prefill_over_pages(single_cached):
    def make(d):
        t = d.dtype()
        paged, window = Paged(d, t, d.pick(16, 40, 64, 128)), d.pick(-1, 0, 20)
        alibi = d.rng.random(paged.kv * paged.group).astype(np.float32)
        out, _ = paged.outputs(left=window, alibi=alibi)
        k, v = paged.fresh()
        if single_cached:
            alone = np.repeat(np.array(paged.queries) == 1, paged.queries)
            k[alone], v[alone] = np.nan, np.nan
        inputs = paged.inputs("seq_lens") | {"k": k, "v": v, "alibi": alibi}
        return inputs, {"layout": paged.layout, "window": window}, {"out": (out, ATTENTION[t])}, []

    return make


CASES["pa_prefill"] = prefill_over_pages(False)
CASES["chunked_pa_prefill"] = prefill_over_pages(True)


def latent_rows(d, rows):
    """Type, columns of values, a pool [rows, columns], its elements in f64 and a factor of them; the inputs beside."""
    c, t = d.pick(256, 512), d.pick(bf16, np.float16)
    dim = c + d.pick(0, 7, 64, 127)
    kind = d.pick("own", "fp8", "packed")
    if kind == "own":
        pool = d.normal((rows, dim), t)
        return t, c, pool, f64(pool), 1.0, {}
    if kind == "fp8":
        pool = d.normal((rows, dim), np.float32).astype(fp8(d))
        scale = np.array([0.7], np.float32)
        return t, c, pool, f64(pool), float(scale[0]), {"kv_scale": scale}
    values = d.normal((rows, 512), np.float32).astype(fp8(d))
    factors = d.rng.uniform(0.5, 2.0, (rows, 4)).astype(np.float32)
    beside = d.normal((rows, 64), bf16)
    pool = np.concatenate([np.ascontiguousarray(x).view(np.uint8) for x in (values, factors, beside)], axis=-1)
    widened = (values.astype(np.float32) * np.repeat(factors, 128, axis=-1)).astype(bf16)
    return bf16, 512, pool.view(fp8(d)), jnp.concatenate([f64(widened), f64(beside)], axis=-1), 1.0, {}


@case
def mla_decode_rope(d):
    turns = d.pick(False, True)
    queries = [1 if turns else d.pick(0, 1, 3) for _ in range(d.size(3))]
    keys = [n + d.pick(0, 1, 31, 70) for n in queries]
    starts, indptr = (np.cumsum([0, *of]).astype(np.int32) for of in (queries, keys))
    t, c, pool, rows, factor, inputs = latent_rows(d, indptr[-1] + 5)
    dim, heads = rows.shape[-1], d.pick(1, 16, 20)
    slots = d.rng.permutation(indptr[-1] + 5)[: indptr[-1]].astype(np.int32)
    rotary, scalars, wanted = (dim - c) // 2 * 2, {"columns": c}, ["lse"]
    rotates = turns and rotary > 0
    q, found, beside = d.normal((starts[-1], heads, dim), t), [], []
    if rotates:
        cos, sin = tables(64, rotary)
        at, style = d.integers(0, 64, len(queries)), d.pick("neox", "interleaved")
        inputs |= {"cos_sin": np.concatenate([cos, sin], axis=-1), "positions": at.astype(np.int32)}
        scalars["style"] = style
        wanted = ["lse", "k_pe_out"]
    else:
        inputs["cu_seqlens_q"] = starts

    def turned(x, i):
        """The columns from c on, at the position of sequence i, rounded."""
        part = rotate(x[..., c : c + rotary], f64(cos)[at[i]][None], f64(sin)[at[i]][None], style == "interleaved")
        return jnp.concatenate([x[..., :c], f64(np.array(part).astype(t)), x[..., c + rotary :]], axis=-1)

    for i in range(len(queries)):
        of_q, of_k = f64(q[starts[i] : starts[i + 1]]), rows[slots[indptr[i] : indptr[i + 1]], None]
        if rotates:
            of_q = turned(of_q, i)
            of_k = jnp.concatenate([of_k[:-1], turned(of_k[-1:], i)])
            beside.append(factor * of_k[-1:, 0, c:])
        of_k = factor * of_k
        found.append(attention(of_q, of_k, of_k[..., :c], causal=True))
    out, lse = (jnp.concatenate(of) for of in zip(*found))
    inputs |= {"q": q, "kv_pool": pool[:, None, None], "kv_indptr": indptr, "kv_indices": slots}
    want = {"out": (out, ATTENTION[t]), "lse": (lse, LSE)}
    if rotates:
        want["k_pe_out"] = (jnp.concatenate(beside), bounds_of_rotation(t, rows))
    return inputs, scalars, want, wanted


@case
def unified_attn_sparse_mla(d):
    total, topk, heads = d.size(3), d.pick(1, 33, 64, 78), d.pick(1, 16, 20)
    t, c, cache, rows, factor, inputs = latent_rows(d, 48)
    lists = d.integers(-1, 48, (total, topk), np.int32)
    lists[:, 0] = 5
    q, found = d.normal((total, heads, rows.shape[-1]), t), []
    for i in range(total):
        seen = factor * rows[lists[i][lists[i] >= 0], None]
        found.append(attention(f64(q[i : i + 1]), seen, seen[..., :c]))
    out, lse = (jnp.concatenate(of) for of in zip(*found))
    inputs |= {"q": q, "kv_cache": cache.reshape(3, 16, 1, -1), "topk_indices": lists}
    return inputs, {"columns": c}, {"out": (out, ATTENTION[t]), "lse": (lse, LSE)}, ["lse"]


@case
def extend_attn(d):
    t, kv, group, dim, out_dim = d.dtype(), d.size(2), d.pick(1, 2, 3), d.pick(16, 17, 64, 192), d.pick(13, 64, 128)
    if t != np.float32 and d.pick(False, False, True):
        dim, out_dim = 576, 512
    new, before = ([d.pick(*of) for _ in range(d.size(3))] for of in ((0, 1, 17, 65), (0, 1, 33, 64)))
    n = min(len(new), len(before))
    new, before = new[:n], before[:n]
    total, cached = sum(new), sum(before)
    q = d.normal((total, kv * group, dim), t)
    fresh = [d.normal((total, kv, columns), t) for columns in (dim, out_dim)]
    slots = d.rng.permutation(cached + 5)[:cached].astype(np.int32)
    pools = [np.full((cached + 5, kv, columns), np.nan, t) for columns in (dim, out_dim)]
    for pool in pools:
        pool[slots] = d.normal((cached, *pool.shape[1:]), t)
    at, from_ = np.cumsum([0, *new]), np.cumsum([0, *before])
    masks = [d.integers(0, 2, (m, p + m), np.uint8) for m, p in zip(new, before)]
    masked, causal, skip, softcap = (d.pick(*of) for of in ((True, False), (True, False), (True, False), (0.0, 2.0)))
    found = []
    for i in range(n):
        rows = slice(at[i], at[i + 1])
        k, v = (np.concatenate([pool[slots[from_[i] : from_[i + 1]]], x[rows]]) for pool, x in zip(pools, fresh))
        visible = masks[i] != 0
        visible[:, : before[i]] |= skip
        options = {"visible": visible} if masked else {}
        found.append(attention(f64(q[rows]), f64(k), f64(v), causal=causal, softcap=softcap, **options))
    out, lse = (jnp.concatenate(of) for of in zip(*found))
    inputs = {"q": q, "k_ext": fresh[0], "v_ext": fresh[1], "k_pool": pools[0], "v_pool": pools[1], "kv_indices": slots}
    inputs |= {"qo_indptr": at.astype(np.int32), "kv_indptr": from_.astype(np.int32)}
    if masked:
        inputs["custom_mask"] = np.concatenate([mask.ravel() for mask in masks])
        inputs["mask_indptr"] = np.cumsum([0, *(mask.size for mask in masks)]).astype(np.int32)
    parameters = {"causal": str(causal).lower(), "softcap": softcap}
    parameters |= {"skip_prefix_mask": str(skip).lower()} if masked else {}
    return inputs, parameters, {"out": (out, ATTENTION[t]), "lse": (lse, LSE)}, ["lse"]


# Quantization. Quantized values are compared in f64: a value on a tie may fall to either side.


def quantize(x, scale, output):
    """x / scale as JAX rounds it to the type, in f64; and the distance to the neighbouring quantized value."""
    scaled = x * (1 / scale)
    if output == "i8":
        return jnp.round(jnp.clip(scaled, -127, 127)), (0.0, 1.0)
    dtype, largest = FP8[output]
    return jnp.clip(scaled, -largest, largest).astype(dtype).astype(jnp.float64), (1 / 8, 2**-9)


@case
def per_token_quant(d):
    t, (rows, cols) = d.dtype(), matrix(d)
    x, output = d.normal((rows, cols), t, 3), d.pick("i8", *FP8)
    largest = 127.0 if output == "i8" else FP8[output][1]
    scale = jnp.max(jnp.abs(f64(x)), axis=-1).astype(jnp.float32) / jnp.float32(largest)
    q, neighbour = quantize(f64(x), f64(scale)[:, None], output)
    return {"x": x}, {"output": output}, {"scale": (scale, (2e-7, 0)), "q": (q, neighbour)}, []


@case
def per_tensor_quant_dynamic(d):
    t, (rows, cols) = d.dtype(), matrix(d)
    x, output = d.normal((rows, cols), t, 3), d.pick(*FP8)
    scale = jnp.max(jnp.abs(f64(x))).astype(jnp.float32).reshape(1) / jnp.float32(FP8[output][1])
    q, neighbour = quantize(f64(x), f64(scale), output)
    return {"x": x}, {"output": output}, {"scale": (scale, (2e-7, 0)), "q": (q, neighbour)}, []


@case
def group_quant(d):
    t, rows, groups, group = d.dtype(), d.size(30), d.size(20), d.pick(32, 64, 128)
    x, output = d.normal((rows, groups * group), t, 3), d.pick(*FP8)
    parts = f64(x).reshape(rows, groups, group)
    scale = jnp.max(jnp.abs(parts), axis=-1).astype(jnp.float32) / jnp.float32(FP8[output][1])
    q, neighbour = quantize(parts, f64(scale)[..., None], output)
    parameters = {"output": output, "group": group}
    return {"x": x}, parameters, {"scale": (scale, (2e-7, 0)), "q": (q.reshape(x.shape), neighbour)}, []


@case
def dynamic_mxfp4_quant(d):
    t, rows, blocks = d.dtype(), d.size(30), d.size(20)
    x = d.normal((rows, blocks * 32), t, 3)
    parts = f64(x).reshape(rows, blocks, 32)
    # The smallest power of two that leaves nothing above 6.
    exponent = np.ceil(np.log2(np.asarray(jnp.max(jnp.abs(parts), axis=-1) / 6.0)))  # exact for powers of two
    q = (parts / 2.0 ** exponent[..., None]).astype(ml_dtypes.float4_e2m1fn).astype(jnp.float64)
    want = {"scale": (exponent + 127, EXACT), "q": (q.reshape(x.shape), EXACT)}
    return {"x": x}, {"mode": "round_up"}, want, []


@case
def smoothquant(d):
    t, (rows, cols) = d.dtype(), matrix(d)
    x, smooth = d.normal((rows, cols), t, 3), (0.25 + d.rng.random(cols)).astype(np.float32)
    z = f64((x.astype(np.float32) * smooth).astype(np.float32))
    scale = jnp.max(jnp.abs(z), axis=-1).astype(jnp.float32) / jnp.float32(127)
    q, neighbour = quantize(z, f64(scale)[:, None], "i8")
    return {"x": x, "smooth": smooth}, {"output": "i8"}, {"scale": (scale, (2e-7, 0)), "q": (q, neighbour)}, []


@case
def moe_smoothquant(d):
    t, tokens, experts, topk, cols = d.dtype(), d.size(12), d.size(6), d.size(3), d.size(3000)
    x, ids = d.normal((tokens, cols), t, 3), d.integers(0, experts, (tokens, topk))
    smooth = (0.25 + d.rng.random((experts, cols))).astype(np.float32)
    z = f64((x.astype(np.float32)[:, None, :] * smooth[ids]).astype(np.float32)).reshape(tokens * topk, cols)
    scale = jnp.max(jnp.abs(z), axis=-1).astype(jnp.float32) / jnp.float32(127)
    q, neighbour = quantize(z, f64(scale)[:, None], "i8")
    inputs = {"x": x, "smooth": smooth, "topk_ids": ids}
    return inputs, {"output": "i8"}, {"scale": (scale, (2e-7, 0)), "q": (q, neighbour)}, []


def with_given_scale(d):
    t, (rows, cols) = d.dtype(), matrix(d)
    x, output, scale = d.normal((rows, cols), t, 3), d.pick(*FP8), np.float32([d.pick(0.003, 0.01, 0.5)])
    q, neighbour = quantize(f64(x), f64(scale), output)
    return {"x": x, "scale": scale}, {"output": output}, {"q": (q, neighbour)}, []


CASES["per_tensor_quant_static"] = with_given_scale
CASES["downcast_to_static_fp8"] = with_given_scale


@case
def downcast_to_mxfp(d):
    t, rows, blocks = d.pick(bf16, np.float16), d.size(30), d.size(20)
    x = d.normal((rows, blocks * 32), t, 3)
    parts = f64(x).reshape(rows, blocks, 32)
    exponent = np.ceil(np.log2(np.asarray(jnp.max(jnp.abs(parts), axis=-1) / 448.0)))  # exact for powers of two
    q = (parts / 2.0 ** exponent[..., None]).astype(ml_dtypes.float8_e4m3fn).astype(jnp.float64)
    want = {"scale": (exponent + 127, EXACT), "q": (q.reshape(x.shape), EXACT)}
    return {"x": x}, {"element": "fp8e4m3", "mode": "round_up"}, want, []


@case
def upcast_from_mxfp(d):
    rows, blocks = d.size(30), d.size(20)
    q = d.normal((rows, blocks * 32), np.float32, 30).astype(ml_dtypes.float8_e4m3fn)
    exponent = d.integers(110, 140, (rows, blocks), np.uint8).view(ml_dtypes.float8_e8m0fnu)
    out = f64(q).reshape(rows, blocks, 32) * f64(exponent)[..., None]
    return {"q": q, "scale": exponent}, {}, {"out": (out.reshape(q.shape), ELEMENTWISE[bf16])}, []


def quantized_norm(d, t):
    (rows, cols) = matrix(d)
    x, w = d.normal((rows, cols), t, 2), d.normal(cols, t, 0.25, 1)
    return x, w, rms(f64(x), f64(w), 1e-6)


@case
def fused_rmsnorm_fp8_quant(d):
    t, output = d.dtype(), d.pick(*FP8)
    x, w, y = quantized_norm(d, t)
    scale = jnp.max(jnp.abs(y), axis=-1) / FP8[output][1]
    q, neighbour = quantize(y, scale[:, None], output)
    want = {"scale": (scale, (1e-5, 0)), "q": (q, neighbour), "out": (y, REDUCTION[t])}
    return {"x": x, "weight": w}, {"output": output}, want, ["out"]


def other_fp8(d, given, wanted, factor):
    """The same bytes mean `factor` times as much in the other type, where they mean anything."""
    rows, cols = matrix(d, 600)
    q = d.normal((rows, cols), np.float32, 20).astype(given)
    scale = np.float32([d.pick(0.003, 0.5, 2.0)])
    values = jnp.clip(f64(q) * factor, -float(ml_dtypes.finfo(wanted).max), float(ml_dtypes.finfo(wanted).max))
    return {"q": q, "scale": scale}, {}, {"out": (values, EXACT), "scale_out": (f64(scale) / factor, EXACT)}, []


@case
def fp8_ocp_to_fnuz(d):
    return other_fp8(d, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, 0.5)


@case
def fp8_fnuz_to_ocp(d):
    return other_fp8(d, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e4m3fn, 2.0)


# Sampling: the filters by sorting, the draws by cumulative sums.


@case
def greedy_sample(d):
    t, rows, vocab = d.dtype(), d.size(8), d.size(40000)
    logits = d.normal((rows, vocab), t, 3)
    return {"x": logits}, {}, {"ids": (jnp.argmax(f64(logits), axis=-1), EXACT)}, []


def drawn(probs, kept, u):
    p = jnp.where(kept, probs, 0.0)
    prefix = jnp.cumsum(p, axis=-1)
    return jnp.argmax((prefix >= u[:, None] * prefix[:, -1:]) & (p > 0), axis=-1)


def probabilities(d, rows, vocab):
    return np.asarray(jax.nn.softmax(jnp.asarray(d.rng.standard_normal((rows, vocab)) * 2), axis=-1)).astype(np.float32)


@case
def top_k_sampling_from_probs(d):
    rows, vocab = d.size(8), d.size(30000)
    probs, u, k = probabilities(d, rows, vocab), d.rng.random(rows).astype(np.float32), d.size(min(vocab, 500))
    last = jax.lax.top_k(f64(probs), k)[0][:, -1:]
    ids = drawn(f64(probs), f64(probs) >= last, f64(u))
    return {"probs": probs, "uniform": u}, {"k": k}, {"ids": (ids, EXACT)}, []


@case
def top_p_sampling_from_probs(d):
    rows, vocab, p = d.size(8), d.size(30000), d.pick(0.1, 0.5, 0.9)
    probs, u = probabilities(d, rows, vocab), d.rng.random(rows).astype(np.float32)
    falling = -jnp.sort(-f64(probs), axis=-1)
    before = jnp.cumsum(falling, axis=-1) - falling
    last = jnp.min(jnp.where(before < np.float32(p), falling, jnp.inf), axis=-1, keepdims=True)
    ids = drawn(f64(probs), f64(probs) >= last, f64(u))
    return {"probs": probs, "uniform": u}, {"p": p}, {"ids": (ids, EXACT)}, []


@case
def min_p_sampling_from_probs(d):
    rows, vocab, min_p = d.size(8), d.size(30000), d.pick(0.01, 0.1)
    probs, u = probabilities(d, rows, vocab), d.rng.random(rows).astype(np.float32)
    kept = f64(probs) >= np.float64(np.float32(min_p)) * jnp.max(f64(probs), axis=-1, keepdims=True)
    return {"probs": probs, "uniform": u}, {"min_p": min_p}, {"ids": (drawn(f64(probs), kept, f64(u)), EXACT)}, []


@case
def top_k_renorm_probs(d):
    rows, vocab = d.size(8), d.size(30000)
    probs, k = probabilities(d, rows, vocab), d.size(min(vocab, 500))
    kept = jnp.where(f64(probs) >= jax.lax.top_k(f64(probs), k)[0][:, -1:], f64(probs), 0.0)
    y = kept / jnp.sum(kept, axis=-1, keepdims=True)
    return {"probs": probs}, {"k": k}, {"y": (y, (1e-5, 1e-7))}, []


@case
def random_sample(d):
    rows, vocab = d.size(8), d.size(20000)
    logits, e = d.normal((rows, vocab), np.float32, 3), d.rng.exponential(size=(rows, vocab)).astype(np.float32)
    ids = jnp.argmax(jax.nn.softmax(f64(logits) / 0.75, axis=-1) / (f64(e) + 1e-10), axis=-1)
    return {"logits": logits, "exponentials": e}, {"temperature": 0.75}, {"ids": (ids, EXACT)}, []


@case
def mixed_sample(d):
    rows, vocab = d.size(8), d.size(20000)
    logits, e = d.normal((rows, vocab), np.float32, 3), d.rng.exponential(size=(rows, vocab)).astype(np.float32)
    temperature = d.rng.choice(np.float32([0, 0.5, 1.25]), rows)
    scaled = f64(logits) / jnp.where(temperature == 0, 1.0, f64(temperature))[:, None]
    drawn_ids = jnp.argmax(jax.nn.softmax(scaled, axis=-1) / (f64(e) + 1e-10), axis=-1)
    ids = jnp.where(temperature == 0, jnp.argmax(f64(logits), axis=-1), drawn_ids)
    return {"logits": logits, "exponentials": e, "temperature": temperature}, {}, {"ids": (ids, EXACT)}, []


@case
def top_k_top_p_sampling_from_probs(d):
    rows, vocab, p = d.size(8), d.size(30000), d.pick(0.1, 0.5, 0.9)
    probs, u, k = probabilities(d, rows, vocab), d.rng.random(rows).astype(np.float32), d.size(min(vocab, 500))
    falling = -jnp.sort(-f64(probs), axis=-1)
    before = jnp.cumsum(falling, axis=-1) - falling
    last = jnp.min(jnp.where(before < np.float32(p), falling, jnp.inf), axis=-1, keepdims=True)
    kept = (f64(probs) >= last) & (f64(probs) >= falling[:, k - 1 : k])
    return {"probs": probs, "uniform": u}, {"k": k, "p": p}, {"ids": (drawn(f64(probs), kept, f64(u)), EXACT)}, []


@case
def sample_from_logits(d):
    rows, vocab, k = d.size(8), d.size(30000), d.size(100)
    logits, u = d.normal((rows, vocab), np.float32, 3), d.rng.random(rows).astype(np.float32)
    probs = jax.nn.softmax(f64(logits) / 1.25, axis=-1)
    kept = probs >= jax.lax.top_k(probs, min(k, vocab))[0][:, -1:]
    parameters = {"temperature": 1.25, "k": k, "p": 1.0}
    return {"logits": logits, "uniform": u}, parameters, {"ids": (drawn(probs, kept, f64(u)), EXACT)}, []


# GEMMs: y within half a unit in its last place, and a share of the terms' magnitudes.

Y_TYPES = {"bf16": 2.0**-8, "f16": 2.0**-10, "f32": 0.0}


def gemm_sizes(d, rows=70, cols=150, terms=700):
    return d.size(rows), d.size(cols), d.size(terms)


def near(y, magnitude, rtol):
    """Sums of terms in f32, rounded once."""
    return y, (rtol, np.asarray(magnitude) * 2.0**-16 + (2.0**-24 if rtol == Y_TYPES["f16"] else 1e-37))


def gemm(a, w, y_dtype, finish=lambda y: y, spec="...mk,...nk->...mn"):
    sums, magnitudes = jnp.einsum(spec, a, w), jnp.einsum(spec, jnp.abs(a), jnp.abs(w))
    return near(finish(sums), jnp.abs(finish(magnitudes)), Y_TYPES[y_dtype])


def fp8(d):
    return ml_dtypes.float8_e4m3fn if d.device.endswith("gfx950") else ml_dtypes.float8_e4m3fnuz


def quantized(d, shape):
    t = d.pick(np.int8, fp8(d))
    return d.integers(-127, 128, shape, np.int8) if t == np.int8 else d.normal(shape, np.float32, 30).astype(t)


def scale(d, *shape):
    return (0.001 + 0.02 * d.rng.random(shape)).astype(np.float32)


def pairs(x, axis=-1):
    """Neighbours of an axis in a byte, the even one low."""
    return x.take(range(0, x.shape[axis], 2), axis) | x.take(range(1, x.shape[axis], 2), axis) << 4


def single(x):
    """Packed fp4 as single values."""
    return np.stack([x & 15, x >> 4], axis=-1).reshape(*x.shape[:-1], -1).view(ml_dtypes.float4_e2m1fn)


def exponents(d, *shape, high=136):
    """e8m0 scales of 32 columns of each row."""
    *lead, k = shape
    return d.integers(118, high, (*lead, k // 32), np.uint8).view(ml_dtypes.float8_e8m0fnu)


def mxfp4(d, *shape, high=136):
    """Packed quantized values, scales, and what they stand for."""
    quantized, scales = d.integers(0, 16, shape, np.uint8), exponents(d, *shape, high=high)
    value = quantized.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * np.repeat(f64(scales), 32, axis=-1)
    return pairs(quantized), scales, jnp.asarray(value)


@case
def gemm_a16w16(d):
    (m, n, k), t, y = gemm_sizes(d), d.pick(bf16, np.float16), d.pick(*Y_TYPES)
    a, w, bias = d.normal((m, k), t), d.normal((n, k), t), d.normal(n, t)
    return {"a": a, "w": w, "bias": bias}, {"y_dtype": y}, {"y": gemm(f64(a), f64(w), y, lambda s: s + f64(bias))}, []


@case
def gemm_a16w16_gated(d):
    (m, n, k), t = gemm_sizes(d), d.pick(bf16, np.float16)
    a, w = d.normal((m, k), t), d.normal((2 * n, k), t)
    gate, value = f64(a) @ f64(w[:n]).T, f64(a) @ f64(w[n:]).T
    magnitude = jnp.abs(f64(a)) @ jnp.abs(f64(w)).T
    error = magnitude[:, :n] * (jnp.abs(value) + 1) + jnp.abs(gate) * magnitude[:, n:]
    return {"a": a, "w": w}, {"activation": "silu"}, {"y": near(jax.nn.silu(gate) * value, error, Y_TYPES["bf16"])}, []


@case
def batched_gemm_bf16(d):
    (m, n, k), b = gemm_sizes(d), d.size(4)
    a, w = d.normal((b, m, k), bf16), d.normal((b, n, k), bf16)
    return {"a": a, "w": w}, {}, {"y": gemm(f64(a), f64(w), "bf16")}, []


@case
def gemm_a8w8(d):
    (m, n, k), y = gemm_sizes(d), d.pick(*Y_TYPES)
    a = quantized(d, (m, k))
    w, a_scale, w_scale = d.normal((n, k), np.float32, 30).astype(a.dtype), scale(d, m), scale(d, n)
    want = gemm(f64(a) * f64(a_scale)[:, None], f64(w) * f64(w_scale)[:, None], y)
    return {"a": a, "w": w, "a_scale": a_scale, "w_scale": w_scale}, {"y_dtype": y}, {"y": want}, []


def blocks(x, scales, rows):
    """Times the scale of each `rows` by 128."""
    of_rows = jnp.repeat(f64(scales), rows, axis=-2)[..., : x.shape[-2], :]
    return f64(x) * jnp.repeat(of_rows, 128, axis=-1)[..., : x.shape[-1]]


@case
def gemm_a8w8_blockscale(d):
    m, n, k = gemm_sizes(d)
    a = quantized(d, (m, k))
    w, groups = d.normal((n, k), np.float32, 30).astype(a.dtype), -(-k // 128)
    a_scale, w_scale = scale(d, m, groups), scale(d, -(-n // 128), groups)
    want = gemm(blocks(a, a_scale, 1), blocks(w, w_scale, 128), "bf16")
    return {"a": a, "w": w, "a_scale": a_scale, "w_scale": w_scale}, {}, {"y": want}, []


@case
def gemm_a16w8_blockscale(d):
    (m, n, k), t = gemm_sizes(d), d.pick(bf16, np.float16)
    a, w, w_scale = d.normal((m, k), t), quantized(d, (n, k)), scale(d, -(-n // 128), -(-k // 128))
    return {"a": a, "w": w, "w_scale": w_scale}, {}, {"y": gemm(f64(a), blocks(w, w_scale, 128), "bf16")}, []


@case
def gemm_a16wfp4(d):
    (m, n, k), t = gemm_sizes(d, terms=20), d.pick(bf16, np.float16)
    a, (w, w_scale, value) = d.normal((m, 32 * k), t), mxfp4(d, n, 32 * k)
    return {"a": a, "w": w, "w_scale": w_scale}, {"prequant": "false"}, {"y": gemm(f64(a), value, "bf16")}, []


@case
def gemm_a8wfp4(d):
    m, n, k = gemm_sizes(d, terms=20)
    a, a_scale = d.normal((m, 32 * k), np.float32, 30).astype(fp8(d)), scale(d, m)
    w, w_scale, value = mxfp4(d, n, 32 * k)
    want = gemm(f64(a) * f64(a_scale)[:, None], value, "bf16")
    return {"a": a, "w": w, "a_scale": a_scale, "w_scale": w_scale}, {}, {"y": want}, []


@case
def gemm_afp4wfp4(d):
    m, n, k = gemm_sizes(d, terms=20)
    (a, a_scale, x), (w, w_scale, value) = mxfp4(d, m, 32 * k), mxfp4(d, n, 32 * k)
    return {"a": a, "w": w, "a_scale": a_scale, "w_scale": w_scale}, {}, {"y": gemm(x, value, "bf16")}, []


@case
def gemm_a16w16_atomic(d):
    (m, n, k), t = gemm_sizes(d), d.pick(bf16, np.float16)
    a, w, y = d.normal((m, k), t), d.normal((n, k), t), d.normal((m, n), np.float32)
    sums, size = f64(a) @ f64(w).T + f64(y), jnp.abs(f64(a)) @ jnp.abs(f64(w)).T + jnp.abs(f64(y))
    return {"a": a, "w": w, "y": y}, {"accumulate": "true"}, {"y": near(sums, size, Y_TYPES["f32"])}, []


@case
def gemm_a8w8_per_token_scale(d):
    m, n, k = gemm_sizes(d)
    a = quantized(d, (m, k))
    w, a_scale, w_scale = d.normal((n, k), np.float32, 30).astype(a.dtype), scale(d, m, 1), scale(d, n, 1)
    want = gemm(f64(a) * f64(a_scale), f64(w) * f64(w_scale), "bf16")
    return {"a": a, "w": w, "a_scale": a_scale, "w_scale": w_scale}, {}, {"y": want}, []


@case
def batched_gemm_a8w8(d):
    (m, n, k), b = gemm_sizes(d), d.size(4)
    a = quantized(d, (b, m, k))
    w, a_scale, w_scale = d.normal((b, n, k), np.float32, 30).astype(a.dtype), scale(d, b, m), scale(d, b, n)
    want = gemm(f64(a) * f64(a_scale)[..., None], f64(w) * f64(w_scale)[..., None], "bf16")
    return {"a": a, "w": w, "a_scale": a_scale, "w_scale": w_scale}, {}, {"y": want}, []


@case
def batched_gemm_afp4wfp4(d):
    (m, n, k), b = gemm_sizes(d, terms=20), d.size(4)
    (a, a_scale, x), (w, w_scale, value) = mxfp4(d, b, m, 32 * k), mxfp4(d, b, n, 32 * k)
    return {"a": a, "w": w, "a_scale": a_scale, "w_scale": w_scale}, {}, {"y": gemm(x, value, "bf16")}, []


def mxfp8(d, rows, k):
    """Quantized values, scales, and what they stand for."""
    quantized = d.normal((rows, k), np.float32, 30).astype(fp8(d))
    scales = exponents(d, rows, k)
    return quantized, scales, f64(quantized) * jnp.repeat(f64(scales), 32, axis=-1)


@case
def gemm_afp8wfp8(d):
    m, n, k = gemm_sizes(d, terms=20)
    (a, a_scale, x), (w, w_scale, value) = mxfp8(d, m, 32 * k), mxfp8(d, n, 32 * k)
    return {"a": a, "w": w, "a_scale": a_scale, "w_scale": w_scale}, {}, {"y": gemm(x, value, "bf16")}, []


def block_scaled(d, m, n, k):
    """Inputs of a GEMM of fp8 in blocks, and what they stand for."""
    x, w, groups = d.normal((m, k), np.float32, 30).astype(fp8(d)), d.normal((n, k), np.float32, 30).astype(fp8(d)), -(-k // 128)
    x_scale, w_scale = scale(d, m, groups), scale(d, -(-n // 128), groups)
    return x, w, x_scale, w_scale, blocks(x, x_scale, 1), blocks(w, w_scale, 128)


@case
def fused_gemm_a8w8_blockscale_a16w16(d):
    (m, n, k), n2 = gemm_sizes(d), d.size(150)
    x, w, x_scale, w_scale, xs, ws = block_scaled(d, m, n, k)
    x2, w2 = d.normal((m, k), bf16), d.normal((n2, k), bf16)
    inputs = {"x_fp8": x, "w_fp8": w, "x_scale": x_scale, "w_scale": w_scale, "x_bf16": x2, "w_bf16": w2}
    return inputs, {}, {"y1": gemm(xs, ws, "bf16"), "y2": gemm(f64(x2), f64(w2), "bf16")}, []


@case
def fused_gemm_afp4wfp4_a16w16(d):
    (m, n, k), n2 = gemm_sizes(d, terms=20), d.size(150)
    (x, x_scale, xs), (w, w_scale, ws) = mxfp4(d, m, 32 * k), mxfp4(d, n, 32 * k)
    x2, w2 = d.normal((m, 32 * k), bf16), d.normal((n2, 32 * k), bf16)
    inputs = {"x_fp4": x, "w_fp4": w, "x_scale": x_scale, "w_scale": w_scale, "x_bf16": x2, "w_bf16": w2}
    return inputs, {}, {"y1": gemm(xs, ws, "bf16"), "y2": gemm(f64(x2), f64(w2), "bf16")}, []


def mul_add(d, xs, ws):
    """The factor, the term, and y = a * x w^T + b."""
    m, n = xs.shape[0], ws.shape[0]
    a, b = d.normal(d.pick((m, n), (1,)), np.float32), d.normal((m, n), np.float32)
    sums, size = xs @ ws.T, jnp.abs(xs) @ jnp.abs(ws).T
    y = near(f64(a) * sums + f64(b), jnp.abs(f64(a)) * size + jnp.abs(f64(b)), Y_TYPES["bf16"])
    return a, b, y


@case
def fused_gemm_a8w8_blockscale_mul_add(d):
    x, w, x_scale, w_scale, xs, ws = block_scaled(d, *gemm_sizes(d))
    a, b, y = mul_add(d, xs, ws)
    return {"x": x, "w": w, "x_scale": x_scale, "w_scale": w_scale, "a": a, "b": b}, {}, {"y": y}, []


@case
def fused_gemm_afp4wfp4_mul_add(d):
    m, n, k = gemm_sizes(d, terms=20)
    (x, x_scale, xs), (w, w_scale, ws) = mxfp4(d, m, 32 * k), mxfp4(d, n, 32 * k)
    a, b, y = mul_add(d, xs, ws)
    return {"x": x, "w": w, "x_scale": x_scale, "w_scale": w_scale, "a": a, "b": b}, {}, {"y": y}, []


def split_cat(d, xs, ws, groups, s1, s2):
    """The tensor that is appended, and both outputs."""
    m, s3 = xs.shape[0], d.size(40)
    y = d.normal((m, groups, s3), bf16)
    sums, (rtol, size) = gemm(xs, ws, "bf16")
    sums, size = (v.reshape(m, groups, s1 + s2) for v in (sums, size))
    c1 = jnp.concatenate([sums[..., :s1], f64(y)], axis=-1)
    size1 = np.concatenate([size[..., :s1], np.zeros(y.shape)], axis=-1)
    return y, {"c1": (c1, (rtol, size1)), "c2": (sums[..., s1:], (rtol, size[..., s1:]))}


@case
def fused_gemm_a8w8_blockscale_split_cat(d):
    (m, _, k), groups, s1, s2 = gemm_sizes(d), d.size(4), d.size(40), d.size(40)
    x, w, x_scale, w_scale, xs, ws = block_scaled(d, m, groups * (s1 + s2), k)
    y, want = split_cat(d, xs, ws, groups, s1, s2)
    return {"x": x, "w": w, "x_scale": x_scale, "w_scale": w_scale, "y": y}, {"s1": s1}, want, []


@case
def fused_gemm_afp4wfp4_split_cat(d):
    (m, _, k), groups, s1, s2 = gemm_sizes(d, terms=20), d.size(4), d.size(40), d.size(40)
    (x, x_scale, xs), (w, w_scale, ws) = mxfp4(d, m, 32 * k), mxfp4(d, groups * (s1 + s2), 32 * k)
    y, want = split_cat(d, xs, ws, groups, s1, s2)
    return {"x": x, "w": w, "x_scale": x_scale, "w_scale": w_scale, "y": y}, {"s1": s1}, want, []


@case
def fused_gemm_a16w16_quant_x(d):
    m, n, k = gemm_sizes(d, terms=20)
    x, w = d.normal((m, 32 * k), bf16), d.normal((n, 32 * k), bf16)
    parts = f64(x).reshape(m, k, 32)
    exponent = np.ceil(np.log2(np.asarray(jnp.max(jnp.abs(parts), axis=-1) / 448.0)))  # exact for powers of two
    q = (parts / 2.0 ** exponent[..., None]).astype(ml_dtypes.float8_e4m3fn).astype(jnp.float64)
    want = {"y": gemm(f64(x), f64(w), "bf16"), "x_quant": (q.reshape(x.shape), EXACT), "x_scale": (exponent + 127, EXACT)}
    return {"x": x, "w": w}, {"element": "fp8e4m3", "mode": "round_up"}, want, []


def feed_forward(d, name, hidden):
    """y = h w_down of the hidden values h, which are rounded once."""
    (m, inner, k), t = gemm_sizes(d, cols=90, terms=300), d.pick(bf16, np.float16)
    parts = 2 if name == "gated" else 1
    x, w_up, w_down = d.normal((m, k), t), d.normal((parts * inner, k), t, 0.1), d.normal((inner, k), t, 0.1)
    h = hidden(f64(x), f64(w_up), inner)
    rtol = {bf16: 2.0**-8, np.float16: 2.0**-11}[t]
    size = (jnp.abs(h) + 1e-3) @ jnp.abs(f64(w_down))
    y = (h @ f64(w_down), (rtol, np.asarray(size) * 2 * rtol))
    return {"x": x, "w_up": w_up, "w_down": w_down}, {"activation": "silu"}, {"y": y}, []


@case
def ff_fused_gated(d):
    return feed_forward(d, "gated", lambda x, w, n: jax.nn.silu(x @ w[:n].T) * (x @ w[n:].T))


@case
def ff_fused_ungated(d):
    return feed_forward(d, "ungated", lambda x, w, n: jax.nn.silu(x @ w.T))


def grouped(x, w, y, group_of, rtol):
    """Rows of x by the matrix of their group, at its index; rows of none keep y."""
    has = group_of >= 0
    of_row = w[np.maximum(group_of, 0)]
    sums = jnp.einsum("rk,rnk->rn", x, of_row)
    size = jnp.einsum("rk,rnk->rn", jnp.abs(x), jnp.abs(of_row))
    return near(jnp.where(has[:, None], sums, f64(y)), jnp.where(has[:, None], size, 0.0), rtol)


def masked(d, quantized):
    (m, n, k), g = gemm_sizes(d, rows=40, terms=200), d.size(4)
    t = fp8(d) if quantized else bf16
    a, w = d.normal((g, m, k), np.float32, 3).astype(t), d.normal((g, n, k), np.float32, 3).astype(t)
    rows, y = d.integers(0, m + 1, g), d.normal((g, m, n), bf16)
    a_scale, w_scale = scale(d, g, m), scale(d, g, n)
    x, v = (f64(a) * f64(a_scale)[..., None], f64(w) * f64(w_scale)[..., None]) if quantized else (f64(a), f64(w))
    group_of = np.where(np.arange(m)[None, :] < rows[:, None], np.arange(g)[:, None], -1).ravel()
    want, (rtol, size) = grouped(x.reshape(g * m, k), v, y.reshape(g * m, n), group_of, Y_TYPES["bf16"])
    inputs = {"a": a, "w": w, "masked_m": rows, "y": y} | ({"a_scale": a_scale, "w_scale": w_scale} if quantized else {})
    return inputs, {}, {"y": (want.reshape(y.shape), (rtol, size.reshape(y.shape)))}, []


def contiguous(d, quantized):
    (m, n, k), g = gemm_sizes(d, rows=300, terms=200), d.size(4)
    t = fp8(d) if quantized else bf16
    a, w = d.normal((m, k), np.float32, 3).astype(t), d.normal((g, n, k), np.float32, 3).astype(t)
    # Each 128 rows are of one group, or of none.
    group_of, y = np.repeat(d.integers(0, g, -(-m // 128)), 128)[:m], d.normal((m, n), bf16)
    group_of[d.rng.random(m) < 0.2] = -1
    a_scale, w_scale = scale(d, m), scale(d, g, n)
    x, v = (f64(a) * f64(a_scale)[:, None], f64(w) * f64(w_scale)[..., None]) if quantized else (f64(a), f64(w))
    inputs = {"a": a, "w": w, "m_group": group_of, "y": y} | ({"a_scale": a_scale, "w_scale": w_scale} if quantized else {})
    return inputs, {}, {"y": grouped(x, v, y, group_of, Y_TYPES["bf16"])}, []


# Experts of mixture-of-experts layers.


def experts(d, x, w, expert_of, token_of, y_dtype, finish=lambda y: y, bias=None, before=None):
    """Rows of x by the matrices of their experts; rows of none are zero. `finish` takes sums, and magnitudes."""
    has = expert_of >= 0
    rows = jnp.where(has[:, None], x[token_of], 0.0)
    of_row = w[np.maximum(expert_of, 0)]
    sums = jnp.einsum("rk,rnk->rn", rows, of_row)
    size = jnp.einsum("rk,rnk->rn", jnp.abs(rows), jnp.abs(of_row))
    if before is not None:
        sums, size = sums * before[:, None], size * jnp.abs(before)[:, None]
    if bias is not None:
        added = jnp.where(has[:, None], bias[np.maximum(expert_of, 0)], 0.0)
        sums, size = sums + added, size + jnp.abs(added)
    return sums, size


def expert_sizes(d, unit):
    """Tokens, choices, experts, rows and columns of weights."""
    return d.size(70), d.size(4), d.size(6), d.size(100), unit * d.size(20)


GROUP = 32


def grouped_weights(d, bits, shape, t):
    """(q - zero) scale of groups of columns, rounded to the type of the activations."""
    e, n, k = shape
    q, s = d.integers(0, 2**bits, shape, np.uint8), scale(d, e, n, k // GROUP)
    given = n % 2 == 0 and d.pick(0, 1)
    zero = d.integers(0, 2**bits, s.shape, np.uint8) if given else np.full(s.shape, 2 ** (bits - 1), np.uint8)
    wide = [np.repeat(x.astype(np.float32), GROUP, axis=-1) for x in (zero, s)]
    value = ((q.astype(np.float32) - wide[0]) * wide[1]).astype(t)
    inputs = {"": pairs(q) if bits == 4 else q, "_scale": s}
    return inputs | ({"_zero": pairs(zero, 1) if bits == 4 else zero} if given else {}), f64(value)


def of_kind(d, kind, shape):
    """An operand `[.., rows, k]`: inputs by suffix, and what they stand for."""
    if kind == "half":
        x = d.normal(shape, bf16)
        return {"": x}, f64(x)
    if kind == "mxfp4":
        packed, scales, value = mxfp4(d, *shape)
        return {"": packed, "_mx": scales}, value
    if kind == "mxfp8":
        x, scales = d.normal(shape, np.float32, 30).astype(fp8(d)), exponents(d, *shape)
        return {"": x, "_mx": scales}, f64(x) * jnp.repeat(f64(scales), 32, axis=-1)
    if kind == "int8":
        x, s = d.integers(-127, 128, shape, np.int8), scale(d, *shape[:-1])
        return {"": x, "_scale": s}, f64(x) * f64(s)[..., None]
    if kind in ("int8 groups", "int4 groups"):
        return grouped_weights(d, 4 if kind == "int4 groups" else 8, shape, bf16)
    if kind == "blocks":
        x = d.normal(shape, np.float32, 30).astype(fp8(d))
        rows = 128 if len(shape) == 3 else 1
        s = scale(d, *shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // 128))
        return {"": x, "_scale": s}, blocks(x, s, rows)
    x, s = d.normal(shape, np.float32, 30).astype(fp8(d)), scale(d, *shape[:-1])
    return {"": x, "_scale": s}, f64(x) * f64(s)[..., None]


def silu_pairs(gate, value, sizes):
    """silu(gate) * value, and how far it is off."""
    of_gate, of_value = sizes
    return jax.nn.silu(gate) * value, 1.13 * of_gate * (jnp.abs(value) + 1) + jnp.abs(gate) * of_value


def sorted_experts(d, kind, finish, unit=16, of_a=None):
    """`kind`: of w, and of a unless it has one of its own."""
    (tokens, choices, e, n, k), block = expert_sizes(d, unit), d.pick(16, 64, 128)
    rows = 2 * n if finish == "silu" else n
    (a, x), (w, v) = of_kind(d, of_a or kind, (tokens, k)), of_kind(d, kind, (e, rows, k))
    ids = d.integers(-1, e + 1, (tokens, choices))
    weights = d.normal((tokens, choices), np.float32)
    inputs = {"a" + name: t for name, t in a.items()} | {"w" + name: t for name, t in w.items()}
    inputs |= {"topk_ids": ids} | ({} if finish == "gelu" else {"topk_weights": weights})
    expert_of = np.where((ids >= 0) & (ids < e), ids, -1).ravel()
    before = None if finish == "gelu" else f64(weights).ravel()
    sums, size = experts(d, x, v, expert_of, np.arange(tokens * choices) // choices, "f32", before=before)
    if finish == "silu":
        # Gates and values are rounded to f32, which y is.
        sums, size = silu_pairs(sums[:, :n], sums[:, n:], (size[:, :n], size[:, n:]))
    elif finish == "gelu":
        sums, size = jax.nn.gelu(sums, approximate=True), 1.13 * size
    parameters = {"block_size": block, "y_dtype": "f32"} | ({"group_k": GROUP} if "groups" in kind else {})
    return inputs, parameters, {"y": near(sums, size, Y_TYPES["f32"])}, []


def routed_experts(d, kind, unit=16, of_a=None):
    (tokens, _, e, n, k), block = expert_sizes(d, unit), d.pick(16, 64, 128)
    choices = d.size(min(e, 4))
    (a, x), (w, v) = of_kind(d, of_a or kind, (tokens, k)), of_kind(d, kind, (e, 2 * n, k))
    logits, bias = d.normal((tokens, e), np.float32, 2), d.normal((e, 2 * n), np.float32)
    # Experts of a token in ascending order, then all gates by expert.
    ids = np.sort(np.argsort(-logits, axis=-1, kind="stable")[:, :choices], axis=-1)
    gammas = jax.nn.softmax(f64(np.take_along_axis(logits, ids, axis=-1)), axis=-1).ravel()
    order = np.argsort(ids.ravel(), kind="stable")
    inputs = {"a" + name: t for name, t in a.items()} | {"w" + name: t for name, t in w.items()}
    inputs |= {"logits": logits, "bias": bias}
    sums, size = experts(d, x, v, ids.ravel()[order], order // choices, "f32", bias=f64(bias))
    y, size = silu_pairs(sums[:, ::2], sums[:, 1::2], (size[:, ::2], size[:, 1::2]))
    of_row = gammas[order][:, None]
    parameters = {"k": choices, "block_m": block, "gate": "silu", "y_dtype": "f32"}
    return inputs, parameters, {"y": near(y * of_row, size * of_row, Y_TYPES["f32"])}, []


def plain_experts(d, finish):
    """Operands of one kind, or 16-bit floats by weights that are narrower."""
    narrow = ["int8", "int8 groups", "int4 groups"]
    kind = d.pick("half", "rows", *([] if finish == "gelu" else ["blocks"]), *narrow)
    return sorted_experts(d, kind, finish, *((32, "half") if kind in narrow else ()))


def by_mxfp4(d, finish):
    return sorted_experts(d, "mxfp4", finish, 32, d.pick("half", "rows", "mxfp8", "mxfp4"))


CASES["moe_op"] = lambda d: plain_experts(d, "none")
CASES["moe_op_gelu"] = lambda d: plain_experts(d, "gelu")
CASES["moe_op_silu_fused"] = lambda d: plain_experts(d, "silu")
CASES["moe_op_mxfp4"] = lambda d: by_mxfp4(d, "none")
CASES["moe_op_mxfp4_silu_fused"] = lambda d: by_mxfp4(d, "silu")
CASES["moe_op_gemm_a8w8"] = lambda d: routed_experts(d, *d.pick(("rows",), ("mxfp8", 32)))
CASES["moe_op_gemm_a8w8_blockscale"] = lambda d: routed_experts(d, "blocks")
CASES["moe_op_gemm_a4w4"] = lambda d: routed_experts(d, "mxfp4", 32)


CASES["moe_op_gemm_a8w4"] = lambda d: routed_experts(d, "mxfp4", 32, d.pick("rows", "mxfp8"))


def layer(d, x, w1, w2, ids, weights, t):
    """Outputs of the gates of a layer, and how far they are off. `h` is rounded to t."""
    tokens, choices = ids.shape
    inner, steps = w2.shape[-1], {bf16: 2.0**-8, np.float16: 2.0**-11}[t]
    expert_of = np.where((ids >= 0) & (ids < len(w1)), ids, -1).ravel()
    sums, size = experts(d, f64(x), f64(w1), expert_of, np.arange(tokens * choices) // choices, "f32")
    h, off = silu_pairs(sums[:, :inner], sums[:, inner:], (size[:, :inner], size[:, inner:]))
    off = off * 2.0**-16 + jnp.abs(h) * steps
    every = np.arange(len(expert_of))
    y, _ = experts(d, h, f64(w2), expert_of, every, "f32")
    _, off = experts(d, off + jnp.abs(h) * 2.0**-16, f64(w2), expert_of, every, "f32")
    return y * f64(weights).reshape(-1, 1), off * jnp.abs(f64(weights)).reshape(-1, 1), steps


def layer_inputs(d, unit=8):
    (tokens, choices, e, _, k), inner, t = expert_sizes(d, unit), unit * d.size(12), d.pick(bf16, np.float16)
    x, w1, w2 = d.normal((tokens, k), t), d.normal((e, 2 * inner, k), t, 0.2), d.normal((e, k, inner), t, 0.2)
    ids, weights = d.integers(-1, e + 1, (tokens, choices)), d.rng.random((tokens, choices)).astype(np.float32)
    return x, w1, w2, ids, weights, t


@case
def moe_op_e2e(d):
    x, w1, w2, ids, weights, t = layer_inputs(d)
    y, off, _ = layer(d, x, w1, w2, ids, weights, t)
    inputs = {"x": x, "w1": w1, "w2": w2, "topk_ids": ids, "topk_weights": weights}
    return inputs, {"block_size": d.pick(16, 64), "y_dtype": "f32"}, {"y": (y, (1e-6, np.asarray(off) + 1e-6))}, []


@case
def fused_moe(d):
    """Activations are not quantized: a value on a tie of two quantized ones would change a sum."""
    kind = d.pick("half", "mxfp4", "int8 groups", "int4 groups")
    x, w1, w2, ids, weights, t = layer_inputs(d, 8 if kind == "half" else 32)
    values, inputs, parameters = [w1, w2], {"w1": w1, "w2": w2}, {}
    if kind == "mxfp4":
        packed = [mxfp4(d, *w.shape, high=124) for w in values]
        # U8 would be groups of int8.
        inputs = {f"w{i + 1}": single(w[0]) for i, w in enumerate(packed)}
        inputs |= {f"w{i + 1}_scale": w[1] for i, w in enumerate(packed)}
        values, parameters = [w[2] for w in packed], {"activations": "half"}
    elif kind != "half":
        packed = [grouped_weights(d, 4 if "4" in kind else 8, w.shape, t) for w in values]
        inputs = {f"w{i + 1}{name}": x for i, (w, _) in enumerate(packed) for name, x in w.items()}
        values = [value for _, value in packed]
    y, off, steps = layer(d, x, *values, ids, weights, t)
    residual = d.normal(x.shape, t)
    of_token = lambda v: v.reshape(*ids.shape, -1).sum(axis=1)
    error = np.asarray(of_token(off + jnp.abs(y) * steps)) + 1e-6
    inputs |= {"x": x, "topk_ids": ids, "topk_weights": weights, "residual": residual}
    return inputs, parameters, {"y": (of_token(y) + f64(residual), (2 * steps, error))}, []


@case
def deepgemm_masked(d):
    return masked(d, False)


@case
def deepgemm_masked_a8w8(d):
    return masked(d, True)


@case
def deepgemm_contiguous(d):
    return contiguous(d, False)


@case
def deepgemm_contiguous_a8w8(d):
    return contiguous(d, True)


def transposed_groups(d):
    """out[g] = lhs[:, rows of g] rhs[rows of g]."""
    (m, n, k), groups, t = gemm_sizes(d, rows=200, terms=150), d.size(5), d.pick(bf16, np.float16)
    sizes = d.rng.multinomial(m, np.full(groups, 1.0 / groups)).astype(np.int32)
    lhs, rhs, out = d.normal((k, m), t), d.normal((m, n), t), d.normal((groups, k, n), t)
    ends = np.cumsum(sizes)
    pairs = [(f64(lhs)[:, e - s : e], f64(rhs)[e - s : e]) for s, e in zip(sizes, ends)]
    sums = jnp.stack([a @ b for a, b in pairs])
    size = jnp.stack([jnp.abs(a) @ jnp.abs(b) for a, b in pairs])
    inputs = {"lhs": lhs, "rhs": rhs, "group_sizes": sizes, "out": out}
    return inputs, {}, {"out": near(sums, size, Y_TYPES["bf16" if t == bf16 else "f16"])}, []


@case
def ptgmm(d):
    return transposed_groups(d)


@case
def nptgmm(d):
    return transposed_groups(d)


@case
def gmm(d):
    (m, n, k), groups, t = gemm_sizes(d, rows=200, terms=150), d.size(5), d.pick(bf16, np.float16)
    sizes = d.rng.multinomial(m, np.full(groups, 1.0 / groups)).astype(np.int32)
    lhs, rhs = d.normal((m, k), t), d.normal((groups, k, n), t)
    of_row = f64(rhs)[np.repeat(np.arange(groups), sizes)]
    want = gemm(f64(lhs), of_row, "bf16" if t == bf16 else "f16", spec="mk,mkn->mn")
    return {"lhs": lhs, "rhs": rhs, "group_sizes": sizes, "out": np.zeros((m, n), t)}, {}, {"out": want}, []


def run(hk, device, name, inputs, parameters, wanted):
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "in.safetensors", Path(folder) / "out.safetensors"
        harness.write_safetensors(given, inputs)
        command = [hk, "run", name, "--in", given, "--out", out, "--device", device]
        command += [f"--param={k}={v!r}" if isinstance(v, float) else f"--param={k}={v}" for k, v in parameters.items()]
        command += [f"--want={w}" for w in wanted]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(result.stderr.strip())
        return harness.read_safetensors(out)


def values(tensor, like):
    """A tensor in f64; packed fp4 becomes single values."""
    if tensor.dtype == np.uint8 and tensor.size * 2 == np.size(like):
        return single(tensor).reshape(np.shape(like)).astype(np.float64)
    return tensor.astype(np.float64)


class Tally:
    def __init__(self):
        self.cases, self.failed, self.absolute, self.relative, self.share = 0, 0, 0.0, 0.0, 0.0
        self.elements, self.differ = 0, 0

    def compare(self, got, want, rtol, atol):
        with np.errstate(invalid="ignore"):  # of equal infinities
            error = np.abs(got - want)
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        error = np.where(same, 0.0, error)
        self.elements += error.size
        self.differ += int((~same).sum())
        self.absolute = max(self.absolute, float(error.max(initial=0)))
        self.relative = max(self.relative, float((error / np.maximum(np.abs(want), 1e-3)).max(initial=0)))
        bound = rtol * np.abs(want) + atol
        share = np.where(error == 0, 0.0, error / np.maximum(bound, 1e-300))
        self.share = max(self.share, float(share.max(initial=0)))
        return bool((error <= bound).all())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hk", default="target/release/hk", help="the hk program")
    parser.add_argument("--cases", type=int, default=12, help="of each operator, half on each target")
    parser.add_argument("--only", default="", help="operators whose name contains this")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    tallies = defaultdict(Tally)
    for name, make in CASES.items():
        if args.only not in name:
            continue
        for i in range(args.cases):
            device = ["emu:gfx942", "emu:gfx950"][i % 2]
            draw = Draw(np.random.default_rng([args.seed, i, *name.encode()]), device)
            inputs, parameters, want, wanted = make(draw)
            tally = tallies[name]
            tally.cases += 1
            shapes = {k: (str(v.dtype), v.shape) for k, v in inputs.items()}
            try:
                got = run(args.hk, device, name, inputs, parameters, wanted)
            except RuntimeError as error:
                tally.failed += 1
                print(f"{name} {i} {shapes} {parameters} on {device}: {error}", flush=True)
                continue
            good = True
            for output, (expected, (rtol, atol)) in want.items():
                expected = np.asarray(expected, dtype=np.float64)
                actual = values(got[output], expected).reshape(expected.shape)
                if not tally.compare(actual, expected, rtol, atol):
                    good = False
                    print(f"{name} {i} {shapes} {parameters} on {device}: {output} is off", flush=True)
            tally.failed += not good
    print("| operator | cases | failed | elements | not equal to f64 | largest error | largest relative | of tolerance |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, t in tallies.items():
        print(
            f"| {name} | {t.cases} | {t.failed} | {t.elements} | {t.differ} | {t.absolute:.2g} | {t.relative:.2g} | {t.share:.0%} |"
        )
    cases, failed = (sum(getattr(t, what) for t in tallies.values()) for what in ("cases", "failed"))
    print(f"{cases - failed} of {cases} cases are within tolerance")
    return 1 if failed or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
