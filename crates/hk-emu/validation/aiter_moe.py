"""AITER: fused mixture of experts. Arguments are in slots of 16 bytes, in the order of `KernelArgs` of asm_fmoe.cu."""

import numpy as np
from aiter_gemm import FP8, shuffle
from harness import IN_STEP, InOut, bf16, case, u32

BLOCK = 32


def routing(run, tokens, experts, topk):
    """Experts and weights of each token, and the tokens by expert in blocks of 32: the token in the low 24 bits, its place
    among the token's experts above; an entry behind the last token pads."""
    ids = np.stack([run.rng.permutation(experts)[:topk] for _ in range(tokens)])
    weights = run.rng.random((tokens, topk)).astype(np.float32)
    sorted_ids, sorted_weights, of_block = [], [], []
    for e in range(experts):
        rows = [(t, s) for t in range(tokens) for s in range(topk) if ids[t, s] == e]
        padding = -len(rows) % BLOCK
        of_block += [e] * ((len(rows) + padding) // BLOCK)
        sorted_ids += [t | s << 24 for t, s in rows] + [tokens | topk << 24] * padding
        sorted_weights += [weights[t, s] for t, s in rows] + [0.0] * padding
    return (ids, weights, np.array(sorted_ids, np.int32), np.array(sorted_weights, np.float32),
            np.array(of_block, np.int32), np.array([len(sorted_ids), tokens], np.int32))


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return x / (1 + np.exp(-x * (1.5957691 + 0.0713548 * x * x)))


def fused(run, file, tokens, experts, topk, dim, inter, tile, quantised, kernel=None, act=silu, more=()):
    """y = sum over a token's experts of weight * act(x w1^T) w2^T. fp8: two halves of w1, act of the first times the second,
    rounded to fp8 with a scale for each row of a tile."""
    run.result.size = f"{tokens} tokens, {experts} experts, top {topk}, dim {dim}, inner {inter}"
    fp8 = FP8[run.result.target]
    top = float(np.finfo(np.float32).max) if not quantised else (240.0 if run.result.target == "gfx942" else 448.0)
    kind, rows = (fp8, 2 * inter) if quantised else (bf16, inter)
    x = run.normal(tokens, dim, dtype=kind)
    w1 = run.normal(experts, rows, dim, scale=1 if quantised else dim**-0.5).astype(kind)
    w2 = run.normal(experts, dim, inter, scale=1 if quantised else inter**-0.5).astype(kind)
    ids, weights, sorted_ids, sorted_weights, of_block, valid = routing(run, tokens, experts, topk)
    scales = [None] * 3
    if quantised:
        scales = [(0.5 + run.rng.random((n, m))).astype(np.float32) / d**0.5
                  for n, m, d in ((tokens, 1, 1), (experts, rows, dim), (experts, dim, inter))]
    packed = [np.stack([shuffle(w) for w in ws]) for ws in (w1, w2)]
    size = np.dtype(kind).itemsize
    y = InOut("y", np.zeros((tokens, dim), bf16))
    out = run.launch(
        file,
        (-(-inter // tile), len(of_block), 1),
        256,
        [y, x, packed[0], valid, packed[1], *scales, None, sorted_ids, sorted_weights, of_block]
        + [u32(n) for n in (dim, inter, tokens, experts, dim * size, dim * size, inter * size, 2 * dim)]
        + [u32(rows * dim * size), u32(dim * inter * size)]
        + [u32(4 * rows if quantised else 0), u32(4 * dim if quantised else 0), u32(4 * inter), u32(topk)]
        # Only later kernels have these.
        + ([u32(0), u32(-(-inter // tile))] if quantised else []),
        kernel=kernel,
        more=more,
    )
    want = np.zeros((tokens, dim))
    for t in range(tokens):
        for s, e in enumerate(ids[t]):
            h = w1[e].astype(np.float64) @ x[t].astype(np.float64)
            if quantised:
                h *= scales[0][t] * scales[1][e]
                h = act(h[:inter]) * h[inter:]
                parts = h.reshape(-1, tile)
                step = np.abs(parts).max(1, keepdims=True) / top
                h = ((parts / step).astype(np.float32).astype(fp8).astype(np.float64) * step).reshape(-1)
            else:
                h = act(h)
            part = w2[e].astype(np.float64) @ h
            want[t] += weights[t, s] * part * (scales[2][e] if quantised else 1)
    # Each expert's (and tile's) share is added to bf16 memory.
    parts = topk * -(-inter // tile)
    run.compare("y", out["y"], want, parts * 2**-8, (2**-6 if quantised else 2**-8) * float(np.abs(want).max()))


# These clear LDS that other waves may still read: no barrier is between.
case("fused MoE, bf16, gelu", "gfx942")(
    lambda run: fused(run, "fmoe_b16.co", 20, 4, 2, 512, 512, 512, False, act=gelu, more=IN_STEP)
)
for target in ("gfx942", "gfx950"):
    case("fused MoE, bf16, silu, VSKIP", target)(
        lambda run: fused(
            run, "fmoe/silu/fmoe_bf16_noquantBf16_g1u0_vs_atm_inlv_silu_1tg_32x512.co", 20, 4, 2, 512, 512, 512, False,
            more=IN_STEP,
        )
    )
for target in ("gfx942", "gfx950"):
    case("fused MoE, fp8 with scales per token", target)(
        lambda run: fused(
            run, "fmoe/silu/fmoe_bf16_pertokenFp8_g1u1_silu_1tg_32x256.co", 20, 4, 2, 512, 256, 256, True
        )
    )
    case("fused MoE, fp8, VSKIP", target)(
        lambda run: fused(
            run, "fmoe/silu/fmoe_bf16_pertokenFp8_g1u1_vs_silu_1tg_32x256.co", 40, 4, 2, 512, 512, 256, True
        )
    )
