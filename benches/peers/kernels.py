"""Triton kernels of row-wise operators: several short rows or one long row to a program, tuned per size."""

import torch
import triton
import triton.language as tl

INTERPRETED = not torch.cuda.is_available()


def _bench(call, quantiles):
    return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)


def tuned(*names):
    """Chooses, per size, how many rows a program has and how many warps."""
    configs = [
        triton.Config({"ROWS": rows}, num_warps=warps)
        for rows, warps in [(1, 1), (1, 4), (1, 8), (1, 16), (4, 4), (16, 4), (32, 8), (64, 8)]
    ]

    def prune(configs, named, **kwargs):
        elements = lambda c: kwargs["BLOCK"] * c.kwargs["ROWS"] / (32 * c.num_warps)
        return [c for c in configs if 4 <= elements(c) <= 64] or [max(configs, key=lambda c: c.num_warps)]

    if INTERPRETED:
        configs = configs[4:5]
    return triton.autotune(configs, key=list(names), prune_configs_by={"early_config_prune": prune}, do_bench=_bench)


@triton.jit
def _place(rows, cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    return row, col, (row < rows) & (col < cols)


@tuned("rows", "cols")
@triton.jit
def _rmsnorm(x, residual, weight, y, total, rows, cols, eps, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, col, inside = _place(rows, cols, ROWS, BLOCK)
    at = row * cols + col
    v = tl.load(x + at, inside, 0.0)
    if ADD:
        v = (v.to(tl.float32) + tl.load(residual + at, inside, 0.0).to(tl.float32)).to(v.dtype)
        tl.store(total + at, v, inside)
    v = v.to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 1) / cols + eps)
    w = tl.load(weight + col, col < cols, 0.0).to(tl.float32)
    tl.store(y + at, v * scale[:, None] * w, inside)


@tuned("rows", "cols")
@triton.jit
def _layernorm(x, weight, bias, y, rows, cols, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, col, inside = _place(rows, cols, ROWS, BLOCK)
    at = row * cols + col
    v = tl.load(x + at, inside, 0.0).to(tl.float32)
    v = tl.where(inside, v - (tl.sum(v, 1) / cols)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(v * v, 1) / cols + eps)
    w = tl.load(weight + col, col < cols, 0.0).to(tl.float32)
    b = tl.load(bias + col, col < cols, 0.0).to(tl.float32)
    tl.store(y + at, v * scale[:, None] * w + b, inside)


@tuned("rows", "cols")
@triton.jit
def _softmax(x, y, rows, cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, col, inside = _place(rows, cols, ROWS, BLOCK)
    at = row * cols + col
    v = tl.load(x + at, inside, float("-inf")).to(tl.float32)
    v = tl.where(row < rows, v, 0.0)  # rows past the end: no -inf - -inf
    e = tl.exp(v - tl.max(v, 1)[:, None])
    tl.store(y + at, e / tl.sum(e, 1)[:, None], inside)


@triton.jit
def _softmax_long(x, y, cols, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * cols
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(0, cols, BLOCK):
        col = i + tl.arange(0, BLOCK)
        v = tl.load(x + start + col, col < cols, float("-inf")).to(tl.float32)
        new = tl.maximum(tl.maximum(top, v), -3e38)
        total = total * tl.exp(top - new) + tl.exp(v - new)
        top = new
    most = tl.max(top, 0)
    scale = 1.0 / tl.sum(total * tl.exp(top - most), 0)
    for i in range(0, cols, BLOCK):
        col = i + tl.arange(0, BLOCK)
        v = tl.load(x + start + col, col < cols, float("-inf")).to(tl.float32)
        tl.store(y + start + col, tl.exp(v - most) * scale, col < cols)


@tuned("rows", "cols")
@triton.jit
def _quant(x, q, scales, rows, cols, most, INTEGERS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, col, inside = _place(rows, cols, ROWS, BLOCK)
    at = row * cols + col
    v = tl.load(x + at, inside, 0.0).to(tl.float32)
    scale = tl.max(tl.abs(v), 1)[:, None] / most
    v = v / tl.where(scale == 0.0, 1.0, scale)
    if INTEGERS:
        v = tl.floor(v + 0.5)
    tl.store(q + at, tl.clamp(v, -most, most).to(q.dtype.element_ty), inside)
    tl.store(scales + row, scale, row < rows)


@triton.jit
def _activate(v, KIND: tl.constexpr):
    if KIND == "silu":
        return v * tl.sigmoid(v)
    if KIND == "gelu":
        return 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    u = 0.7978845608028654 * (v + 0.044715 * v * v * v)
    return v * tl.sigmoid(2.0 * u)


@triton.autotune(
    [triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ([(1024, 4)] if INTERPRETED else [(512, 2), (1024, 4), (2048, 4), (4096, 8)])],
    key=["n", "cols"],
    do_bench=_bench,
)
@triton.jit
def _gated(x, y, n, cols, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """Elements of y in one line: short rows share a program."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    at = i + i // cols * cols if GATED else i
    v = _activate(tl.load(x + at, inside, 0.0).to(tl.float32), KIND)
    if GATED:
        v *= tl.load(x + at + cols, inside, 0.0).to(tl.float32)
    tl.store(y + i, v, inside)


@triton.autotune(
    [triton.Config({"ROWS": rows}, num_warps=warps) for rows, warps in ([(16, 4)] if INTERPRETED else [(4, 1), (8, 2), (16, 4), (32, 4), (64, 8)])],
    key=["heads", "positions"],
    do_bench=_bench,
)
@triton.jit
def _rope(x, cos, sin, y, rows, heads, positions, inner, HALF: tl.constexpr, ROWS: tl.constexpr):
    """Rows of 2 HALF columns; each `inner` consecutive rows share one of `positions` positions."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, HALF)[None, :]
    inside = row < rows
    position = row // inner % positions
    c = tl.load(cos + position * HALF + col, inside, 0.0).to(tl.float32)
    s = tl.load(sin + position * HALF + col, inside, 0.0).to(tl.float32)
    at = row * (2 * HALF) + col
    a = tl.load(x + at, inside, 0.0).to(tl.float32)
    b = tl.load(x + at + HALF, inside, 0.0).to(tl.float32)
    tl.store(y + at, a * c - b * s, inside)
    tl.store(y + at + HALF, b * c + a * s, inside)


def _rows(x):
    return x.numel() // x.shape[-1], x.shape[-1], triton.next_power_of_2(x.shape[-1])


def _grid(rows):
    return lambda meta: (triton.cdiv(rows, meta["ROWS"]),)


def rmsnorm(x, weight, eps, residual=None):
    rows, cols, block = _rows(x)
    y = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    other = x if residual is None else residual
    _rmsnorm[_grid(rows)](x, other, weight, y, total, rows, cols, eps, ADD=residual is not None, BLOCK=block)
    return y if residual is None else (y, total)


def layernorm(x, weight, bias, eps):
    rows, cols, block = _rows(x)
    y = torch.empty_like(x)
    _layernorm[_grid(rows)](x, weight, bias, y, rows, cols, eps, BLOCK=block)
    return y


def softmax(x, dtype):
    rows, cols, block = _rows(x)
    y = torch.empty_like(x, dtype=dtype)
    if block > 32768:
        _softmax_long[(rows,)](x, y, cols, BLOCK=8192, num_warps=16)
    else:
        _softmax[_grid(rows)](x, y, rows, cols, BLOCK=block)
    return y


def quant(x, dtype, most):
    rows, cols, block = _rows(x)
    q = torch.empty_like(x, dtype=dtype)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    _quant[_grid(rows)](x, q, scales, rows, cols, most, INTEGERS=dtype == torch.int8, BLOCK=block)
    return q, scales


def activation(x, kind, gated):
    rows, cols, _ = _rows(x)
    cols = cols // 2 if gated else cols
    y = x.new_empty(*x.shape[:-1], cols)
    _gated[lambda meta: (triton.cdiv(rows * cols, meta["BLOCK"]),)](x, y, rows * cols, cols, KIND=kind, GATED=gated)
    return y


def rope(x, cos, sin, inner):
    rows, cols, _ = _rows(x)
    y = torch.empty_like(x)
    _rope[_grid(rows)](x, cos, sin, y, rows, x.shape[1], cos.shape[0], inner, HALF=cols // 2)
    return y
