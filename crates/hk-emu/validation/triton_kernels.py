"""Kernels that the package triton compiles for both targets, without a GPU."""

import os
import tempfile

import numpy as np
from harness import Out, bf16, case, e4m3, e4m3fnuz, f32, i32

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(tempfile.gettempdir(), "hk-validation-triton"))

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

FP8 = {"gfx942": ("fp8e4b8", e4m3fnuz), "gfx950": ("fp8e4nv", e4m3)}


def launch(run, function, types, constants, grid, args, attributes=None, options=None):
    """Compiles for the run's target and launches. Triton adds two pointers to scratch memory, which these do not use."""
    signature = types | {name: "constexpr" for name in constants}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("hip", run.result.target, 64), options=options)
    with tempfile.NamedTemporaryFile(suffix=".hsaco") as file:
        file.write(compiled.asm["hsaco"])
        file.flush()
        run.result.kernel = compiled.metadata.name
        block, lds = 64 * compiled.metadata.num_warps, compiled.metadata.shared
        return run.launch(file.name, grid, block, args + [None, None], slot=0, lds=lds)


@triton.jit
def vector_add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def softmax(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + at, mask=at < columns, other=-float("inf"))
    p = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * columns + at, p / tl.sum(p, 0), mask=at < columns)


@triton.jit
def matmul(a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, k, K):
        at = start + tl.arange(0, K)
        left = tl.load(a + rows[:, None] * k + at[None, :], mask=(rows[:, None] < m) & (at[None, :] < k), other=0.0)
        right = tl.load(b + at[:, None] * n + columns[None, :], mask=(at[:, None] < k) & (columns[None, :] < n), other=0.0)
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * n + columns[None, :], total, mask=(rows[:, None] < m) & (columns[None, :] < n))


@triton.jit
def flash(q, k, v, out, length, scale, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    head = tl.program_id(1) * length * D
    rows, d = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, D)
    mine = head + rows[:, None] * D + d[None, :]
    query = tl.load(q + mine, mask=rows[:, None] < length, other=0.0)
    top = tl.full((M,), -float("inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    o = tl.zeros((M, D), tl.float32)
    for start in range(0, length, N):
        keys = start + tl.arange(0, N)
        theirs = head + keys[:, None] * D + d[None, :]
        key = tl.load(k + theirs, mask=keys[:, None] < length, other=0.0)
        s = tl.dot(query, tl.trans(key)) * scale
        s = tl.where((keys[None, :] < length) & (keys[None, :] <= rows[:, None]), s, -float("inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.exp(s - higher[:, None])
        keep = tl.exp(top - higher)
        value = tl.load(v + theirs, mask=keys[:, None] < length, other=0.0)
        o = tl.dot(p.to(value.dtype), value, o * keep[:, None])
        total = total * keep + tl.sum(p, 1)
        top = higher
    tl.store(out + mine, o / total[:, None], mask=rows[:, None] < length)


def run_vector_add(run):
    n = 1000
    run.result.size = str(n)
    x, y = run.normal(n), run.normal(n)
    types = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}
    out = launch(run, vector_add, types, {"BLOCK": 256}, (4, 1, 1), [x, y, Out("out", (n,), np.float32), i32(n)])
    run.equal("out", out["out"], x + y)


def run_softmax(run):
    rows, columns = 5, 777
    run.result.size = f"{rows} x {columns}"
    x = run.normal(rows, columns, scale=3)
    types = {"x": "*fp32", "out": "*fp32", "columns": "i32"}
    out = launch(
        run, softmax, types, {"BLOCK": 1024}, (rows, 1, 1), [x, Out("out", (rows, columns), np.float32), i32(columns)]
    )
    p = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    run.compare("out", out["out"], p / p.sum(1, keepdims=True), 1e-5, 1e-9)


def run_matmul(run, triton_type, dtype):
    m, n, k = 70, 90, 160
    run.result.size = f"{m} x {n} x {k}"
    a, b = run.normal(m, k).astype(dtype), run.normal(k, n).astype(dtype)
    types = {"a": f"*{triton_type}", "b": f"*{triton_type}", "c": "*fp32", "m": "i32", "n": "i32", "k": "i32"}
    args = [a, b, Out("c", (m, n), np.float32), i32(m), i32(n), i32(k)]
    out = launch(run, matmul, types, {"M": 64, "N": 64, "K": 64}, (2, 2, 1), args)
    run.compare("c", out["c"], a.astype(np.float64) @ b.astype(np.float64), 1e-5, 1e-5 * k**0.5)


def run_flash(run):
    heads, length, d = 2, 150, 64
    run.result.size = f"{heads} heads, {length}, dim {d}"
    q, k, v = (run.normal(heads, length, d, dtype=bf16) for _ in range(3))
    types = {name: "*bf16" for name in ("q", "k", "v", "out")} | {"length": "i32", "scale": "fp32"}
    args = [q, k, v, Out("out", q.shape), i32(length), f32(d**-0.5)]
    out = launch(run, flash, types, {"D": d, "M": 64, "N": 32}, (-(-length // 64), heads, 1), args)
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s = np.where(np.tri(length) > 0, q @ k.transpose(0, 2, 1) * float(np.float32(d**-0.5)), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    run.compare("out", out["out"], p / p.sum(-1, keepdims=True) @ v, 2**-7, 2**-8)


for target in ("gfx942", "gfx950"):
    case("Triton: vector add, f32", target)(run_vector_add)
    case("Triton: softmax, f32", target)(run_softmax)
    case("Triton: GEMM, bf16", target)(lambda run: run_matmul(run, "bf16", bf16))
    case("Triton: GEMM, fp8", target)(lambda run: run_matmul(run, *FP8[run.result.target]))
    case("Triton: causal flash attention, bf16", target)(run_flash)
