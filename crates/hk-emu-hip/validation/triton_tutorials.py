#!/usr/bin/env python3
"""What Triton's tutorials 1 to 6 teach, with NumPy arrays, through Triton's HIP driver and launcher on emulated devices.

  triton_tutorials.py [NAME ..]     names contain one of these; HK_EMU_ARCH chooses the devices, HK_SANITIZE the checks

Needs triton, numpy, ml_dtypes and a C compiler; and `cargo xtask hip-runtime --release`.
"""

import sys
import time

import numpy as np
import triton_numpy as gpu

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

RNG = np.random.default_rng(1)


def normal(*shape, dtype=np.float32, scale=1.0):
    return (scale * RNG.standard_normal(shape)).astype(dtype)


def compare(what, got, want, rtol, atol):
    """Every element within atol + rtol |want|."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{what}: {got.shape} for {want.shape}"
    share = np.abs(got - want) / (atol + rtol * np.abs(want))
    worst = float(np.where(np.isnan(share), np.inf, share).max())
    assert worst <= 1, f"{what}: error of {worst:.2f} times the tolerance"
    return f"{what} {worst:.0%}"


# 1. Vector addition


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)


def vector_addition():
    n = 98_432
    x, y = normal(n), normal(n)
    out = gpu.empty((n,))
    add_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](gpu.array(x), gpu.array(y), out, n, BLOCK=1024)
    return [compare("sum", out.numpy(), x + y, 0, 1e-30)]


# 2. Fused softmax: as many programs as the device holds, each with a pipelined loop over rows


@triton.jit
def softmax_kernel(x, out, stride, rows, columns, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        values = tl.load(x + row * stride + at, at < columns, -float("inf"))
        p = tl.exp(values - tl.max(values, 0))
        tl.store(out + row * stride + at, p / tl.sum(p, 0), at < columns)


def softmax(x):
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def fused_softmax():
    rows, columns = 700, 781
    x = normal(rows, columns, scale=3)
    out = gpu.empty(x.shape)
    block = triton.next_power_of_2(columns)
    properties = triton.runtime.driver.active.utils.get_device_properties(gpu.device())
    compiled = softmax_kernel.warmup(gpu.array(x), out, columns, rows, columns, BLOCK=block, STAGES=2, num_warps=8, grid=(1,))
    compiled._init_handles()
    resident = min(properties["max_num_regs"] // (64 * max(compiled.n_regs, 1)), 32) // 8 or 1
    programs = min(rows, resident * properties["multiprocessor_count"])
    compiled[(programs, 1, 1)](gpu.array(x), out, columns, rows, columns, block, 2)
    return [compare("softmax", out.numpy(), softmax(x.astype(np.float64)), 1e-5, 1e-9)]


# 3. Matrix multiplication: blocks of rows share the columns in the cache; autotuned; a fused activation


@triton.jit
def leaky(x):
    return tl.where(x >= 0, x, 0.01 * x)


CONFIGS = [
    triton.Config({"M": m, "N": n, "K": k, "GROUP": 4, "matrix_instr_nonkdim": 16}, num_warps=4, num_stages=2)
    for m, n, k in [(64, 64, 32), (128, 64, 64)]
]


@triton.autotune(configs=CONFIGS, key=["m", "n", "k"])
@triton.jit
def matmul_kernel(
    a, b, c, m, n, k, stride_a, stride_b, stride_c,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    program, rows, columns = tl.program_id(0), tl.cdiv(m, M), tl.cdiv(n, N)
    first = program // (GROUP * columns) * GROUP
    height = min(rows - first, GROUP)
    row = first + program % (GROUP * columns) % height
    column = program % (GROUP * columns) // height
    at_m, at_n, at_k = row * M + tl.arange(0, M), column * N + tl.arange(0, N), tl.arange(0, K)
    left, right = a + (at_m % m)[:, None] * stride_a + at_k[None, :], b + at_k[:, None] * stride_b + (at_n % n)[None, :]
    total = tl.zeros((M, N), tl.float32)
    for step in range(0, k, K):
        x = tl.load(left + step, at_k[None, :] < k - step, 0.0)
        y = tl.load(right + step * stride_b, at_k[:, None] < k - step, 0.0)
        total = tl.dot(x, y, total)
    total = ACTIVATION(total)
    inside = (at_m[:, None] < m) & (at_n[None, :] < n)
    tl.store(c + at_m[:, None] * stride_c + at_n[None, :], total.to(c.dtype.element_ty), inside)


def matrix_multiplication():
    m, n, k = 300, 200, 280
    a, b = normal(m, k, dtype=np.float16), normal(k, n, dtype=np.float16)
    c = gpu.empty((m, n), np.float16)
    grid = lambda meta: (triton.cdiv(m, meta["M"]) * triton.cdiv(n, meta["N"]),)  # noqa: E731
    matmul_kernel[grid](gpu.array(a), gpu.array(b), c, m, n, k, k, n, n, ACTIVATION=leaky)
    want = a.astype(np.float64) @ b.astype(np.float64)
    return [compare("product", c.numpy(), np.where(want >= 0, want, 0.01 * want), 2**-11 + 1e-5, 1e-4)]


# 4. Low-memory dropout: the mask is a seed


@triton.jit
def dropout_kernel(x, out, n, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, at) > p
    tl.store(out + at, tl.where(keep, tl.load(x + at, at < n) / (1 - p), 0.0), at < n)


def philox(counter, seed):
    """First word of Philox 4x32-10 (Salmon et al. 2011) at these counters."""
    mask = np.uint64(0xFFFFFFFF)
    c = [counter.astype(np.uint64)] + [np.zeros(len(counter), np.uint64)] * 3
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        high, low = [np.uint64(factor) * word for factor, word in ((0xCD9E8D57, c[2]), (0xD2511F53, c[0]))]
        c = [high >> 32 ^ c[1] ^ np.uint64(key[0]), high & mask, low >> 32 ^ c[3] ^ np.uint64(key[1]), low & mask]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0].astype(np.uint32)


def low_memory_dropout():
    n, p, seed = 5000, 0.3, 123
    x, out = normal(n), gpu.empty((n,))
    dropout_kernel[(triton.cdiv(n, 1024),)](gpu.array(x), out, n, p, seed, BLOCK=1024)
    word = philox(np.arange(n), seed).astype(np.int32)
    uniform = np.where(word < 0, -1 - word, word).astype(np.float32) * np.float32(4.6566127342e-10)
    keep = uniform > np.float32(p)
    assert 0.6 < keep.mean() < 0.8
    return [compare("kept", out.numpy(), np.where(keep, x.astype(np.float64) / (1 - p), 0), 1e-6, 1e-30)]


# 5. Layer norm and its gradients: partial sums of weights' gradients under locks


@triton.jit
def layer_norm_kernel(x, y, w, b, mean, rstd, columns, eps, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < columns
    v = tl.load(x + row * columns + at, inside, 0.0).to(tl.float32)
    center = tl.sum(v, 0) / columns
    off = tl.where(inside, v - center, 0.0)
    scale = 1 / tl.sqrt(tl.sum(off * off, 0) / columns + eps)
    tl.store(mean + row, center)
    tl.store(rstd + row, scale)
    tl.store(y + row * columns + at, off * scale * tl.load(w + at, inside) + tl.load(b + at, inside), inside)


@triton.jit
def layer_norm_dx_kernel(dx, dy, dw, db, x, w, mean, rstd, locks, columns, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < columns
    scale = tl.load(rstd + row)
    hat = tl.where(inside, (tl.load(x + row * columns + at, inside, 0.0).to(tl.float32) - tl.load(mean + row)) * scale, 0.0)
    g = tl.load(dy + row * columns + at, inside, 0.0).to(tl.float32)
    wg = tl.load(w + at, inside, 0.0) * g
    tl.store(dx + row * columns + at, (wg - hat * tl.sum(hat * wg, 0) / columns - tl.sum(wg, 0) / columns) * scale, inside)
    group = row % GROUPS
    lock, count = locks + group, locks + GROUPS + group
    part_w, part_b = dw + group * columns + at, db + group * columns + at
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    sum_w, sum_b = g * hat, g
    if tl.load(count) == 0:
        tl.atomic_xchg(count, 1)
    else:
        sum_w += tl.load(part_w, inside)
        sum_b += tl.load(part_b, inside)
    tl.store(part_w, sum_w, inside)
    tl.store(part_b, sum_b, inside)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def column_sums_kernel(parts, out, rows, columns, M: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, rows, M):
        row = start + tl.arange(0, M)
        total += tl.load(parts + row[:, None] * columns + at[None, :], (row[:, None] < rows) & (at[None, :] < columns), 0.0)
    tl.store(out + at, tl.sum(total, 0), at < columns)


def layer_norm():
    rows, columns, eps, groups = 37, 500, 1e-5, 8
    x, dy = normal(rows, columns, dtype=np.float16), normal(rows, columns, dtype=np.float16)
    w, b = normal(columns), normal(columns)
    dx, dwx, dwy = gpu.array(x), gpu.array(w), gpu.array(dy)
    y, mean, rstd = gpu.empty(x.shape, np.float16), gpu.empty((rows,)), gpu.empty((rows,))
    layer_norm_kernel[(rows,)](dx, y, dwx, gpu.array(b), mean, rstd, columns, eps, BLOCK=512)
    gradient, parts = gpu.empty(x.shape, np.float16), [gpu.empty((groups, columns)) for _ in range(2)]
    locks = gpu.zeros((2 * groups,), np.int32)
    layer_norm_dx_kernel[(rows,)](gradient, dwy, *parts, dx, dwx, mean, rstd, locks, columns, GROUPS=groups, BLOCK=512)
    sums = [gpu.empty((columns,)) for _ in parts]
    for part, out in zip(parts, sums):
        column_sums_kernel[(triton.cdiv(columns, 128),)](part, out, groups, columns, M=8, N=128)
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    scale = (x.var(1, keepdims=True) + eps) ** -0.5
    hat = (x - x.mean(1, keepdims=True)) * scale
    want = (w * dy - hat * (hat * w * dy).mean(1, keepdims=True) - (w * dy).mean(1, keepdims=True)) * scale
    return [
        compare("y", y.numpy(), hat * w + b, 2**-11 + 1e-5, 1e-5),
        compare("dx", gradient.numpy(), want, 2**-11 + 1e-5, 1e-5),
        compare("dw", sums[0].numpy(), (dy * hat).sum(0), 1e-5, 1e-5),
        compare("db", sums[1].numpy(), dy.sum(0), 1e-5, 1e-5),
    ]


# 6. Fused attention and its gradients; the forward pass has tensor descriptors


@triton.jit
def attention_kernel(q, k, v, o, lse, length, scale, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    start, head = tl.program_id(0) * M, tl.program_id(1)
    base = head * length
    rows = start + tl.arange(0, M)
    query = q.load([base + start, 0])
    best = tl.full((M,), -float("inf"), tl.float32)
    total, acc = tl.zeros((M,), tl.float32), tl.zeros((M, D), tl.float32)
    log2e: tl.constexpr = 1.4426950408889634
    for at in range(0, start + M if CAUSAL else length, N):
        s = tl.dot(query, k.load([base + at, 0]).T) * (scale * log2e)
        if CAUSAL:
            s = tl.where(rows[:, None] >= (at + tl.arange(0, N))[None, :], s, -1e30)
        top = tl.maximum(best, tl.max(s, 1))
        p, shrink = tl.exp2(s - top[:, None]), tl.exp2(best - top)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(tl.float16), v.load([base + at, 0]), acc * shrink[:, None])
        best = top
    o.store([base + start, 0], (acc / total[:, None]).to(tl.float16))
    tl.store(lse + base + rows, best + tl.log2(total))


@triton.jit
def row_dots_kernel(o, do, delta, M: tl.constexpr, D: tl.constexpr):
    rows = tl.program_id(0) * M + tl.arange(0, M)
    at = rows[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(delta + rows, tl.sum(tl.load(o + at).to(tl.float32) * tl.load(do + at), 1))


@triton.jit
def attention_dkdv_kernel(
    q, k, v, do, lse, delta, dk, dv, length, scale, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr
):
    start, base = tl.program_id(0) * N, tl.program_id(1) * length
    keys, d = start + tl.arange(0, N), tl.arange(0, D)
    here = (base + keys)[:, None] * D + d[None, :]
    key, value = tl.load(k + here), tl.load(v + here)
    sum_k, sum_v = tl.zeros((N, D), tl.float32), tl.zeros((N, D), tl.float32)
    for at in range(start // M * M if CAUSAL else 0, length, M):
        rows = at + tl.arange(0, M)
        there = (base + rows)[:, None] * D + d[None, :]
        query, g = tl.load(q + there), tl.load(do + there)
        p = tl.exp2(tl.dot(key, query.T) * (scale * 1.4426950408889634) - tl.load(lse + base + rows)[None, :])
        if CAUSAL:
            p = tl.where(rows[None, :] >= keys[:, None], p, 0.0)
        sum_v = tl.dot(p.to(tl.float16), g, sum_v)
        ds = p * (tl.dot(value, g.T) - tl.load(delta + base + rows)[None, :])
        sum_k = tl.dot(ds.to(tl.float16), query, sum_k)
    tl.store(dk + here, (sum_k * scale).to(tl.float16))
    tl.store(dv + here, sum_v.to(tl.float16))


@triton.jit
def attention_dq_kernel(
    q, k, v, do, lse, delta, dq, length, scale, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr
):
    start, base = tl.program_id(0) * M, tl.program_id(1) * length
    rows, d = start + tl.arange(0, M), tl.arange(0, D)
    here = (base + rows)[:, None] * D + d[None, :]
    query, g = tl.load(q + here), tl.load(do + here)
    top, dots = tl.load(lse + base + rows), tl.load(delta + base + rows)
    total = tl.zeros((M, D), tl.float32)
    for at in range(0, start + M if CAUSAL else length, N):
        keys = at + tl.arange(0, N)
        there = (base + keys)[:, None] * D + d[None, :]
        key = tl.load(k + there)
        p = tl.exp2(tl.dot(query, key.T) * (scale * 1.4426950408889634) - top[:, None])
        if CAUSAL:
            p = tl.where(rows[:, None] >= keys[None, :], p, 0.0)
        ds = p * (tl.dot(g, tl.load(v + there).T) - dots[:, None])
        total = tl.dot(ds.to(tl.float16), key, total)
    tl.store(dq + here, (total * scale).to(tl.float16))


def fused_attention():
    heads, length, d, scale = 2, 192, 64, 0.125
    errors = []
    for causal in (False, True):
        q, k, v, do = [normal(heads, length, d, dtype=np.float16) for _ in range(4)]
        flat = [gpu.array(t.reshape(heads * length, d)) for t in (q, k, v, do)]
        o, lse = gpu.empty((heads * length, d), np.float16), gpu.empty((heads * length,))
        tiles = [TensorDescriptor(t, list(t.shape), list(t.strides), [64, d]) for t in (*flat[:3], o)]
        sizes = {"CAUSAL": causal, "M": 64, "N": 64, "D": d}
        grid = (length // 64, heads)
        attention_kernel[grid](*tiles, lse, length, scale, **sizes)
        delta = gpu.empty((heads * length,))
        row_dots_kernel[(heads * length // 64,)](o, flat[3], delta, M=64, D=d)
        dq, dk, dv = [gpu.empty(o.shape, np.float16) for _ in range(3)]
        attention_dkdv_kernel[grid](*flat, lse, delta, dk, dv, length, scale, **sizes)
        attention_dq_kernel[grid](*flat, lse, delta, dq, length, scale, **sizes)
        q, k, v, do = [t.astype(np.float64) for t in (q, k, v, do)]
        s = np.einsum("hqd,hkd->hqk", q, k) * scale
        p = softmax(np.where(np.tri(length, dtype=bool), s, -np.inf) if causal else s)
        dp = np.einsum("hqd,hkd->hqk", do, v)
        ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
        wants = [p @ v, ds @ k, np.einsum("hqk,hqd->hkd", ds, q), np.einsum("hqk,hqd->hkd", p, do)]
        # Probabilities and their gradients are fp16 in the products: 2^-11 of each of many terms of either sign.
        for name, got, want in zip(("o", "dq", "dk", "dv"), (o, dq, dk, dv), wants):
            errors.append(compare(f"{name}{' causal' if causal else ''}", got.numpy().reshape(want.shape), want, 1e-3, 1.5e-3))
    return errors


TUTORIALS = [vector_addition, fused_softmax, matrix_multiplication, low_memory_dropout, layer_norm, fused_attention]


def main(names):
    failed = ran = 0
    for number in range(gpu.device_count()):
        target = gpu.use(number)
        for i, tutorial in enumerate(TUTORIALS, 1):
            title = tutorial.__name__.replace("_", " ")
            if names and not any(name in title for name in names):
                continue
            start, ran = time.perf_counter(), ran + 1
            try:
                verdict = "ok: " + ", ".join(tutorial()) + " of tolerance"
            except (AssertionError, gpu.Fault) as error:
                verdict, failed = f"FAILED: {error}", failed + 1
                gpu.reset()
            print(f"{i}. {title} ({target}): {verdict}; {time.perf_counter() - start:.1f} s", flush=True)
    print(f"{ran - failed} of {ran} pass")
    return 0 if ran and not failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
