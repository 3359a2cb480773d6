"""Kernels over rows: softmax, activations, top-k, normalization, quantization, rope, convolution."""

import ml_dtypes
import numpy as np
from harness import FP8, InOut, Out, bf16, e4m3, silu, starts_of
from triton_aiter import HALF_ULP, cdiv, compare_quantized, f64, launch, quantum, register, strides


def softmax(x):
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def run_softmax(run, dtype):
    rows, columns = 5, 777
    run.result.size = f"{rows} x {columns}"
    x = run.normal(rows, columns, dtype=dtype, scale=3)
    out = launch(
        run,
        "softmax:_softmax_kernel_online",
        (rows, 1, 1),
        Out("out", x.shape, dtype),
        x,
        columns,
        columns,
        columns,
        BLOCK_SIZE=256,
    )
    # The sum is f32; one rounding to the output.
    run.compare("out", out["out"], softmax(f64(x)), HALF_ULP[dtype] + 1e-5, 2**-24)


def run_silu_mul(run):
    rows, columns = 13, 333
    run.result.size = f"{rows} x {columns}"
    x = run.normal(rows, 2 * columns, dtype=bf16)
    out = Out("out", (rows, columns))
    args = [x, out, rows, columns, *strides(x, out)]
    got = launch(run, "activation:fused_silu_mul_kernel", (2, 2, 1), *args, BLOCK_M=8, BLOCK_N=256)
    a, b = f64(x)[:, :columns], f64(x)[:, columns:]
    run.compare("out", got["out"], silu(a) * b, 2 * HALF_ULP[bf16] + 2**-15, 1e-7)  # rounds after silu and after the product


def run_clamp_silu_mul(run):
    rows, columns, group, limit = 7, 384, 128, 1.5
    run.result.size = f"{rows} x {columns}, groups of {group}"
    fp8 = FP8[run.result.target]
    x, weights = run.normal(rows, 2 * columns, dtype=bf16), run.normal(rows, 1)
    outs = [Out("q", (rows, columns), fp8), Out("scales", (rows, columns // group), np.float32)]
    args = [x, *outs, weights, rows, columns, *strides(x, *outs, weights), limit]
    constants = {"BLOCK_SIZE_N": 512, "QUANT_BLOCK_SIZE": group, "SCALE_FMT": "fp32", "DTYPE_MAX": quantum(fp8)}
    constants |= {"DTYPE_MIN": -quantum(fp8)}
    constants |= {"HAVE_WEIGHTS": True, "WEIGHT_BROADCAST": True, "HAVE_SWIGLU_CLAMP": True, "HAS_QUANT": True}
    constants |= {"ACTIVATION": "silu"}
    constants |= {"SHUFFLE": False, "SCALE_N_PAD": 0}
    out = launch(run, "fusions.fused_clamp_act_mul:_fused_clamp_silu_mul_kernel", (rows, 1, 1), *args, **constants)
    gate, up = f64(x)[:, :columns], f64(x)[:, columns:]
    y = silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit) * weights
    scales = np.abs(y).reshape(rows, -1, group).max(-1) / quantum(fp8)
    run.compare("scales", out["scales"], scales, 1e-5, 0)
    compare_quantized(run, out["q"], y / scales.repeat(group, 1))


def ranked(x, k):
    """The k greatest of each row, in order; the first of equals."""
    at = np.argsort(-f64(x), axis=1, kind="stable")[:, :k]
    return np.take_along_axis(f64(x), at, 1), at


def run_topk(run):
    rows, columns, k = 7, 200, 6
    run.result.size = f"{rows} x {columns}, top {k}"
    x = run.normal(rows, columns, dtype=bf16)  # has equal values
    outs = [Out("values", (rows, k), np.float32), Out("indices", (rows, k), np.int64)]
    constants = {"M": columns, "K": k, "BLOCK": 256, "FILL_VALUE": float(np.finfo(np.float32).min), "USE_TDM": False}
    out = launch(run, "topk:_topk_kernel", (rows, 1, 1), x, *outs, columns, k, k, **constants)
    values, at = ranked(x, k)
    run.equal("values", out["values"], values)
    run.equal("indices", out["indices"], at)


def run_topk_stages(run):
    rows, columns, k, chunk = 2, 2500, 12, 1024
    chunks = cdiv(columns, chunk)
    run.result.size = f"{rows} x {columns}, top {k} of {chunks} chunks"
    x = run.normal(rows, columns)
    constants = {"DESCENDING": True, "FILL_VALUE": float(np.finfo(np.float32).min), "USE_TDM": False}
    outs = [Out("values", (rows, chunks, k), np.float32), Out("indices", (rows, chunks, k), np.int64)]
    first = launch(run, "topk:topk_stage1_kernel", (rows, chunks, 1), *outs, x, k, N=columns, CHUNK_SIZE=chunk, **constants)
    outs = [Out("values", (rows, k), np.float32), Out("indices", (rows, k), np.int64)]
    constants |= {"k": k, "N": chunks * k, "BLOCK_SIZE": 64, "MASK_INDEX_VAL": -(2**31)}
    out = launch(run, "topk:topk_stage2_kernel", (rows, 1, 1), *outs, first["values"], first["indices"], **constants)
    values, at = ranked(x, k)
    run.equal("values", out["values"], values)
    run.equal("indices", out["indices"], at)


def layer_norm(x, w, b, eps):
    mean, variance = x.mean(1, keepdims=True), x.var(1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * w + b


def rms_norm(x, w, eps):
    return x / np.sqrt((x * x).mean(1, keepdims=True) + eps) * w


NORM = (5, 777, 1e-5)  # rows, columns, epsilon


def run_layer_norm(run):
    rows, columns, eps = NORM
    run.result.size = f"{rows} x {columns}"
    x = run.normal(rows, columns, dtype=np.float16) + np.float16(1)
    w, b = run.normal(columns, dtype=np.float16), run.normal(columns, dtype=np.float16)
    outs = [Out(name, (rows,), np.float32) for name in ("mean", "rstd")]
    args = [x, Out("y", x.shape, np.float16), w, b, *outs, columns, columns, rows, columns, eps]
    out = launch(run, "normalization.norm:_layernorm_kernel", (rows, 1, 1), *args, BLOCK_SIZE=512)
    x, w, b = f64(x, w, b)
    run.compare("mean", out["mean"], x.mean(1), 1e-5, 1e-6)
    run.compare("rstd", out["rstd"], (x.var(1) + eps) ** -0.5, 1e-5, 0)
    run.compare("y", out["y"], layer_norm(x, w, b, eps), HALF_ULP[np.float16] + 1e-5, 1e-5)


def run_quant_add_layer_norm(run):
    rows, columns, eps = NORM
    run.result.size = f"{rows} x {columns}"
    x, res = run.normal(rows, columns, dtype=np.float16), run.normal(rows, columns, dtype=np.float16)
    w, b = run.normal(columns, dtype=np.float16), run.normal(columns, dtype=np.float16)
    smooth = run.normal(columns) + 2
    args = [x, Out("q", x.shape, np.int8), res, Out("res", x.shape, np.float16), w, b, smooth]
    args += [Out("scale", (rows,), np.float32)]
    args += [Out("aux", x.shape, np.float32), columns, columns, columns, rows, columns, eps]
    constants = {"DTYPE_MAX": 127.0, "IS_SMOOTH": True, "BLOCK_SIZE": 512}
    out = launch(run, "normalization.norm:_quant_fused_add_layernorm_kernel", (rows, 1, 1), *args, **constants)
    total = x + res
    run.equal("res", out["res"], total)
    y = layer_norm(*f64(total, w, b), eps) * smooth
    scale = np.abs(y).max(1) / 127
    run.compare("scale", out["scale"], scale, 1e-5, 0)
    run.compare("aux", out["aux"], y, 1e-5, 1e-5)
    compare_quantized(run, out["q"], y / scale[:, None])


def run_rms_norm(run, blocked):
    rows, columns, eps = NORM
    run.result.size = f"{rows} x {columns}"
    x, w = run.normal(rows, columns + 7, dtype=np.float16), run.normal(columns, dtype=np.float16)
    args = [x, Out("y", (rows, columns), np.float16), w, Out("rsigma", (rows,), np.float32), columns + 7, columns, rows]
    args += [columns, eps]
    constants = {"BLOCK_SIZE": 256 if blocked else 1024, "USE_BLOCKED": blocked, "NUM_PRGMS": 3}
    out = launch(run, "normalization.rmsnorm:_rms_norm_kernel", (3, 1, 1), *args, **constants)
    x, w = f64(x[:, :columns], w)
    run.compare("rsigma", out["rsigma"], ((x * x).mean(1) + eps) ** -0.5, 1e-5, 0)
    run.compare("y", out["y"], rms_norm(x, w, eps), HALF_ULP[np.float16] + 1e-5, 2**-25)


def run_quant_add_rms_norm(run):
    rows, columns, eps = NORM
    run.result.size = f"{rows} x {columns}"
    fp8 = FP8[run.result.target]
    x, res = run.normal(rows, columns, dtype=bf16), run.normal(rows, columns, dtype=bf16)
    w = run.normal(columns, dtype=bf16)
    args = [x, Out("q", x.shape, fp8), res, Out("res", x.shape), None, Out("scale", (rows,), np.float32), w]
    args += [Out("aux", x.shape, np.float32)]
    args += [columns, columns, columns, rows, columns, eps]
    constants = {"DTYPE_MAX": quantum(fp8), "IS_SMOOTH": False, "BLOCK_SIZE": 1024, "USE_BLOCKED": False, "NUM_PRGMS": 2}
    out = launch(run, "normalization.rmsnorm:_quant_fused_add_rmsnorm_kernel", (2, 1, 1), *args, **constants)
    run.equal("res", out["res"], x + res)
    y = rms_norm(*f64(x + res, w), eps)
    scale = np.abs(y).max(1) / quantum(fp8)
    run.compare("scale", out["scale"], scale, 1e-5, 0)
    compare_quantized(run, out["q"], y / scale[:, None])


def run_tensor_quant(run, integers):
    """The scale of the whole tensor by atomics, then the quantization by it."""
    rows, columns = 7, 300
    run.result.size = f"{rows} x {columns}"
    dtype = np.int8 if integers else FP8[run.result.target]
    x = run.normal(rows, columns, scale=5)
    scale = InOut("scale", np.zeros(1, np.float32))
    args, constants = [columns, columns], {"NUM_COL_POW2": 512}
    out = launch(
        run,
        "quant.quant:_dynamic_per_tensor_quant_fp8_i8_kernel",
        (rows, 1, 1),
        x,
        scale,
        *args,
        DTYPE_MAX=quantum(dtype),
        **constants,
    )
    run.compare("scale", out["scale"], [np.abs(f64(x)).max() / quantum(dtype)], 1e-6, 0)
    args = [Out("q", x.shape, dtype), x, out["scale"], *args]
    q = launch(run, "quant.quant:_static_per_tensor_quant_fp8_i8_kernel", (rows, 1, 1), *args, **constants)["q"]
    compare_quantized(run, q, f64(x) / f64(out["scale"]))


def run_token_quant(run, integers):
    rows, columns = 7, 300
    run.result.size = f"{rows} x {columns}"
    dtype = np.int8 if integers else FP8[run.result.target]
    x = run.normal(rows, columns, scale=5)
    args = [Out("q", x.shape, dtype), Out("scale", (rows,), np.float32), x, columns, columns]
    constants = {"NUM_COL_POW2": 512, "DTYPE_MAX": quantum(dtype)}
    out = launch(run, "quant.quant:_dynamic_per_token_quant_fp8_i8_kernel", (rows, 1, 1), *args, **constants)
    scale = np.abs(f64(x)).max(1) / quantum(dtype)
    run.compare("scale", out["scale"], scale, 1e-6, 0)
    compare_quantized(run, out["q"], f64(x) / scale[:, None])


def mx_scales(x, top):
    """Blocks of 32 and the exponents of their scales for a type with the greatest exponent `top`; 1.75 and more rounds up."""
    blocks = f64(x).reshape(len(x), -1, 32)
    fraction, exponent = np.frexp(np.abs(blocks).max(-1))
    return blocks, exponent + (fraction >= 1.75 / 2) - 1 - top


def mxfp4(x):
    """Packed fp4 values and e8m0 scales; all steps are exact for bf16."""
    blocks, exponent = mx_scales(x, 2)
    q = np.clip(np.ldexp(blocks, -exponent[..., None]), -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    q = q.reshape(len(x), -1)
    return q[:, ::2] | q[:, 1::2] << 4, (exponent + 127).astype(np.uint8)


def run_mxfp4_quant(run):
    rows, columns = 37, 416
    run.result.size = f"{rows} x {columns}"
    x = run.normal(rows, columns, dtype=bf16) * np.exp2(run.integers(-9, 9, rows, 1)).astype(bf16)
    outs = [Out("q", (rows, columns // 2), np.uint8), Out("scales", (rows, columns // 32), np.uint8)]
    args = [x, *outs, *strides(x, *outs), rows, columns]
    constants = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 128, "NUM_ITER": 1, "NUM_STAGES": 1, "MXFP4_QUANT_BLOCK_SIZE": 32}
    constants |= {"SCALING_MODE": 0}
    out = launch(run, "quant.quant:_dynamic_mxfp4_quant_kernel", (2, 4, 1), *args, **constants)
    q, scales = mxfp4(x)
    run.equal("q", out["q"], q)
    run.equal("scales", out["scales"], scales)


def run_mxfp8_quant(run):
    """OCP fp8 on both targets; gfx942 converts to it in software."""
    rows, columns = 13, 416
    run.result.size = f"{rows} x {columns}"
    x = run.normal(rows, columns, dtype=bf16) * np.exp2(run.integers(-9, 9, rows, 1)).astype(bf16)
    outs = [Out("q", x.shape, e4m3), Out("scales", (rows, columns // 32), np.uint8)]
    args = [x, *outs, rows, columns, *strides(x, *outs)]
    constants = {"BLOCK_SIZE_N": 512, "QUANT_BLOCK_SIZE": 32, "NUM_PRGMS": 5}
    out = launch(run, "quant.quant:_dynamic_mxfp8_quant_kernel", (5, 1, 1), *args, **constants)
    blocks, exponent = mx_scales(x, 8)
    run.equal("q", f64(out["q"]).reshape(blocks.shape), f64(np.ldexp(blocks, -exponent[..., None]).astype(e4m3)))
    run.equal("scales", out["scales"], exponent + 127)


def rope(x, angles, neox):
    """Rotates pairs of the last axis, halves apart or neighbours, by angles [tokens, pairs]; x is [tokens, heads, dim]."""
    cos, sin = np.cos(f64(angles))[:, None], np.sin(f64(angles))[:, None]
    pairs = f64(x).reshape(*x.shape[:2], 2, -1) if neox else f64(x).reshape(*x.shape[:2], -1, 2).swapaxes(2, 3)
    a, b = pairs[:, :, 0], pairs[:, :, 1]
    out = np.stack([a * cos - b * sin, b * cos + a * sin], 2)
    return (out if neox else out.swapaxes(2, 3)).reshape(x.shape)


def run_rope(run):
    """Angles up to 1000, so that their reduction counts; the second half of the dims passes."""
    length, batch, heads, dim = 37, 2, 3, 64
    run.result.size = f"{length} x {batch} x {heads} x {dim}"
    x = run.normal(length, batch, heads, 2 * dim, dtype=bf16)
    angles = run.rng.uniform(-1000, 1000, (length, 1, 1, dim // 2)).astype(np.float32)
    out = Out("out", x.shape)
    constants = {"HAVE_NOPE": True, "NOPE_FIRST": False, "INPLACE": False, "REUSE_FREQS_FRONT_PART": True, "IS_NEOX": True}
    constants |= {"BLOCK_S": 32, "BLOCK_D": dim, "BLOCK_D_HALF": dim // 2}
    args = [x, angles, out, *strides(x, angles, out), length]
    got = launch(run, "rope.rope:_rope_kernel_sbhd_fwd", (batch, heads, cdiv(length, 32)), *args, **constants)["out"]
    want = rope(x[..., :dim].reshape(length, -1, dim), angles[:, 0, 0], True).reshape(length, batch, heads, dim)
    run.compare("rotated", got[..., :dim], want, HALF_ULP[bf16] + 1e-5, 1e-6)
    run.equal("rest", got[..., dim:], x[..., dim:])


def run_rope_cached(run, neox):
    tokens, heads, dim, longest = 37, 4, 64, 50
    run.result.size = f"{tokens} x {heads} x {dim}"
    x, y = (run.normal(tokens, heads, dim, dtype=bf16) for _ in range(2))
    angles = run.rng.uniform(-4, 4, (longest, dim // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    positions = run.integers(0, longest, tokens)
    outs = [Out("x", x.shape), Out("y", y.shape)]
    args = [x, y, cos, sin, positions, None, *outs, *strides(x, y, cos), 1, *strides(*outs), tokens]
    constants = {"HAVE_NOPE": False, "NOPE_FIRST": False, "INPLACE": False, "REUSE_FREQS_FRONT_PART": True, "IS_NEOX": neox}
    constants |= {"HAVE_POS": True, "HAVE_OFFS": False, "BLOCK_T": 32, "SPLIT_H_SIZE": 2, "BLOCK_D": dim}
    constants |= {"BLOCK_D_HALF": dim // 2}
    grid = (heads // 2, cdiv(tokens, 32), 1)
    out = launch(run, "rope.rope:_rope_kernel_thd_cached_2c_fwd", grid, *args, num_stages=2, **constants)
    for name, data in ("x", x), ("y", y):
        run.compare(name, out[name], rope(data, angles[positions], neox), HALF_ULP[bf16] + 1e-5, 1e-6)


def run_cache_mla(run):
    """Scaled fp8 rows go to the slots of their tokens; a slot of -1 is skipped."""
    tokens, slots, nope, pe = 11, 20, 128, 64
    run.result.size = f"{tokens} of {slots} slots, dim {nope} + {pe}"
    fp8 = FP8[run.result.target]
    k, k_pe = run.normal(tokens, 1, nope, dtype=bf16), run.normal(tokens, 1, pe, dtype=bf16)
    mapping = run.rng.permutation(slots)[:tokens].astype(np.int64)
    mapping[3] = -1
    cache = run.normal(slots, 1, nope + pe).astype(fp8)
    args = [k, k_pe, InOut("cache", cache), mapping, *strides(k, k_pe, cache), np.array([0.37], np.float32)]
    constants = {"KH": 1, "BLOCK_D_nope": nope, "BLOCK_D_pe": pe, "HAVE_K_SCALE": True}
    out = launch(run, "kv_cache:_cat_and_cache_mla_kernel", (tokens, 1, 1), *args, **constants)["cache"]
    used = mapping >= 0
    rows = f64(np.concatenate([k, k_pe], 2))[used, 0] / float(np.float32(0.37))
    compare_quantized(run, out[mapping[used], 0], rows)
    rest = np.setdiff1d(np.arange(slots), mapping)
    run.equal("other slots", f64(out[rest]), f64(cache[rest]))


def run_causal_conv(run):
    """Sequences that begin with and without a state, one shorter than the state; states are updated."""
    dim, width, lengths = 300, 4, (21, 2, 8)
    run.result.size = f"{dim} channels, width {width}, {len(lengths)} sequences of {', '.join(map(str, lengths))}"
    first = starts_of(lengths)
    x, w, bias = (
        run.normal(first[-1], dim, dtype=np.float16),
        run.normal(dim, width, dtype=np.float16),
        run.normal(dim, dtype=np.float16),
    )
    states = run.normal(5, width - 1, dim, dtype=np.float16)
    lines, begun = np.array([4, 1, 2], np.int32), np.array([1, 1, 0], np.int8)
    args = [x, w, bias, InOut("states", states), lines, begun, first, Out("o", x.shape, np.float16), int(first[-1])]
    constants = {"dim": dim, "num_cache_lines": len(states), "stride_x_seq": 0, "stride_x_dim": 1, "stride_x_token": dim}
    constants |= {"stride_w_dim": width, "stride_w_width": 1, "stride_istate_seq": (width - 1) * dim}
    constants |= {"stride_istate_dim": 1}
    constants |= {"stride_istate_token": dim, "stride_o_seq": 0, "stride_o_dim": 1, "stride_o_token": dim}
    constants |= {"pad_slot_id": -1}
    constants |= {"HAS_BIAS": True, "KERNEL_WIDTH": width, "SILU_ACTIVATION": True, "HAS_INITIAL_STATES": True}
    constants |= {"HAS_CACHE": True}
    constants |= {"IS_CONTINUOUS_BATCHING": True, "USE_PAD_SLOT": True, "NP2_STATELEN": 4, "BLOCK_M": 8, "BLOCK_N": 256}
    grid = (len(lengths), cdiv(max(lengths), 8), cdiv(dim, 256))
    out = launch(run, "conv.causal_conv1d:_causal_conv1d_fwd_kernel", grid, *args, num_stages=2, **constants)
    o, new = np.empty(x.shape), f64(states)
    spread = 0.0
    for i, line in enumerate(lines):
        past = np.concatenate([f64(states[line]) * begun[i], f64(x[first[i] : first[i + 1]])])
        terms = np.stack([past[j : j + lengths[i]] * f64(w)[:, j] for j in range(width)])
        o[first[i] : first[i + 1]] = silu(terms.sum(0) + f64(bias))
        spread = max(spread, float(np.abs(terms).sum(0).max()))
        new[line] = past[len(past) - width + 1 :]
    # Products round to f16; the slope of silu is below 1.1.
    run.compare("o", out["o"], o, HALF_ULP[np.float16] + 1e-5, 1.1 * HALF_ULP[np.float16] * spread)
    run.equal("states", f64(out["states"]), new)


def run_conv2d(run):
    n, c, height, width, k, r, s, stride, pad = 2, 5, 11, 9, 35, 3, 3, 2, 1
    p, q = (height + 2 * pad - r) // stride + 1, (width + 2 * pad - s) // stride + 1
    run.result.size = f"{n} x {c} x {height} x {width}, {k} filters {r} x {s}, stride {stride}"
    x, w, bias = run.normal(n, c, height, width, dtype=bf16), run.normal(k, c, r, s, dtype=bf16), run.normal(k, dtype=bf16)
    flat = np.zeros((k, 64), bf16)
    flat[:, : c * r * s] = w.reshape(k, -1)
    args = [x, flat, bias, Out("y", (n, k, p, q)), n, stride, stride, pad, pad, 1, 1, n * p * q]
    constants = {"C": c, "H": height, "W_in": width, "K_out": k, "R": r, "S": s, "P": p, "Q": q, "K_pad": 64}
    constants |= {"BLOCK_M": 32, "BLOCK_N": 32}
    constants |= {"BLOCK_K": 64, "GROUP_SIZE_M": 4, "HAS_BIAS": True, "ACTIVATION": "relu", "LAYOUT": "nchw"}
    grid = (cdiv(n * p * q, 32) * cdiv(k, 32), 1, 1)
    y = launch(run, "conv.conv_general:_conv2d_general_kernel", grid, *args, num_warps=4, num_stages=1, **constants)["y"]
    padded = np.pad(f64(x), ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (r, s), (2, 3))[:, :, ::stride, ::stride]
    want = np.einsum("ncpqrs,kcrs->nkpq", windows, f64(w)) + f64(bias)[:, None, None]
    run.compare("y", y, np.maximum(want, 0), HALF_ULP[bf16] + 1e-5, 1e-5)


register(
    [
        ("softmax, f16", lambda run: run_softmax(run, np.float16)),
        ("softmax, bf16", lambda run: run_softmax(run, bf16)),
        ("silu and multiply, bf16", run_silu_mul),
        ("top-k, bf16", run_topk),
        ("top-k in two stages, f32", run_topk_stages),
        ("layer norm, f16", run_layer_norm),
        ("add, layer norm, smooth i8", run_quant_add_layer_norm),
        ("RMS norm, f16", lambda run: run_rms_norm(run, False)),
        ("RMS norm by blocks, f16", lambda run: run_rms_norm(run, True)),
        ("add, RMS norm, fp8", run_quant_add_rms_norm),
        ("quantization per tensor, i8", lambda run: run_tensor_quant(run, True)),
        ("quantization per tensor, fp8", lambda run: run_tensor_quant(run, False)),
        ("quantization per token, i8", lambda run: run_token_quant(run, True)),
        ("quantization per token, fp8", lambda run: run_token_quant(run, False)),
        ("MX fp4 quantization", run_mxfp4_quant),
        ("rope with sin and cos, bf16", run_rope),
        ("rope by positions, halves", lambda run: run_rope_cached(run, True)),
        ("rope by positions, neighbours", lambda run: run_rope_cached(run, False)),
        ("MLA cache update, fp8", run_cache_mla),
        ("causal convolution with states, f16", run_causal_conv),
        ("convolution, 2D, relu", run_conv2d),
        ("clamp, silu, multiply, fp8 by groups", run_clamp_silu_mul),
        ("MX fp8 quantization", run_mxfp8_quant),
    ]
)
