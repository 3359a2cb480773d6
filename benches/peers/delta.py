"""The gated delta rule: over whole prompts in Triton, three kernels as crates/hk-gdr has them, with Triton's products and layouts; and
flash-linear-attention (`fla`) where it is installed, over prompts and token by token."""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

try:
    from fla.ops import gated_delta_rule as fla
except ImportError:
    fla = None

CHUNK = 64

if triton:

    @triton.jit
    def _normed(x, NORM: tl.constexpr):
        if NORM:
            wide = x.to(tl.float32)
            x = (wide * tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)[:, None]).to(x.dtype)
        return x

    @triton.jit
    def _rows(T, H: tl.constexpr, C: tl.constexpr):
        """Of the program's chunk: the first of all tokens, the tokens, and which are there."""
        chunks = tl.cdiv(T, C)
        batch, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
        t = chunk * C + tl.arange(0, C)
        return (batch * T + t).to(tl.int64), t < T

    @triton.autotune([triton.Config({}, num_warps=n) for n in (2, 4, 8)], key=["T"])
    @triton.jit
    def _prepare(
        k, v, g, beta, sums, w, u, T, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
        NORM: tl.constexpr,
    ):
        t, inside = _rows(T, H, C)
        head = tl.program_id(1)
        d, e, i = tl.arange(0, K), tl.arange(0, V), tl.arange(0, C)
        keys = tl.load(k + (t[:, None] * H + head // (HV // H)) * K + d[None, :], inside[:, None], 0.0)
        keys = _normed(keys, NORM)
        decay = tl.cumsum(tl.load(g + t * HV + head, inside, 0.0), 0)
        tl.store(sums + t * HV + head, decay, inside)
        weight = tl.load(beta + t * HV + head, inside, 0.0)
        below = i[:, None] > i[None, :]
        off = tl.where(below, decay[:, None] - decay[None, :], 0.0)
        a = tl.where(below, tl.dot(keys, tl.trans(keys)) * weight[:, None] * tl.exp(off), 0.0)
        # Row r of the inverse of I + A, less that of I, from the rows above.
        x = -a
        for r in range(1, C):
            row = tl.sum(tl.where((i == r)[:, None], x, 0.0), 0)
            row += tl.sum(row[:, None] * x, 0)
            x = tl.where((i == r)[:, None], row[None, :], x)
        x += (i[:, None] == i[None, :]).to(tl.float32)
        x = x.to(keys.dtype)
        values = tl.load(v + (t[:, None] * HV + head) * V + e[None, :], inside[:, None], 0.0)
        new = tl.dot(x, (values * weight[:, None]).to(keys.dtype))
        tl.store(u + (t[:, None] * HV + head) * V + e[None, :], new.to(keys.dtype), inside[:, None])
        new = tl.dot(x, (keys * (weight * tl.exp(decay))[:, None]).to(keys.dtype))
        tl.store(w + (t[:, None] * HV + head) * K + d[None, :], new.to(keys.dtype), inside[:, None])

    @triton.autotune(
        [triton.Config({"BV": b}, num_warps=n, num_stages=s) for b in (16, 32, 64) for n in (2, 4) for s in (2, 3)], key=["T"]
    )
    @triton.jit
    def _states(
        k, w, u, new, sums, h, last, T, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
        NORM: tl.constexpr, BV: tl.constexpr,
    ):
        batch, head = tl.program_id(0) // HV, tl.program_id(0) % HV
        d, e = tl.arange(0, K), tl.program_id(1) * BV + tl.arange(0, BV)
        state = tl.zeros([K, BV], tl.float32)
        chunks = tl.cdiv(T, C)
        for c in range(0, chunks):
            at = ((batch * chunks + c).to(tl.int64) * HV + head) * K * V
            tl.store(h + at + d[:, None] * V + e[None, :], state.to(k.dtype.element_ty))
            inside = c * C + tl.arange(0, C) < T
            t = (batch * T + c * C + tl.arange(0, C)).to(tl.int64)
            rows = tl.load(w + (t[:, None] * HV + head) * K + d[None, :], inside[:, None], 0.0)
            update = tl.load(u + (t[:, None] * HV + head) * V + e[None, :], inside[:, None], 0.0).to(tl.float32)
            update -= tl.dot(rows, state.to(rows.dtype))
            tl.store(new + (t[:, None] * HV + head) * V + e[None, :], update.to(rows.dtype), inside[:, None])
            decay = tl.load(sums + t * HV + head, inside, 0.0)
            final = tl.load(sums + (batch * T + tl.minimum(c * C + C, T) - 1).to(tl.int64) * HV + head)
            update *= tl.where(inside, tl.exp(final - decay), 0.0)[:, None]
            keys = tl.load(k + (t[:, None] * H + head // (HV // H)) * K + d[None, :], inside[:, None], 0.0)
            keys = _normed(keys, NORM)
            state = state * tl.exp(final) + tl.dot(tl.trans(keys), update.to(keys.dtype))
        tl.store(last + (batch * HV + head).to(tl.int64) * K * V + d[:, None] * V + e[None, :], state)

    @triton.autotune([triton.Config({"BV": b}, num_warps=n) for b in (64, 128) for n in (4, 8)], key=["T"])
    @triton.jit
    def _outputs(
        q, k, new, sums, h, o, T, scale, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
        NORM: tl.constexpr, BV: tl.constexpr,
    ):
        t, inside = _rows(T, H, C)
        head = tl.program_id(1)
        d, e, i = tl.arange(0, K), tl.program_id(2) * BV + tl.arange(0, BV), tl.arange(0, C)
        at = (t[:, None] * H + head // (HV // H)) * K + d[None, :]
        queries = _normed(tl.load(q + at, inside[:, None], 0.0), NORM)
        keys = _normed(tl.load(k + at, inside[:, None], 0.0), NORM)
        decay = tl.load(sums + t * HV + head, inside, 0.0)
        state = tl.load(h + (tl.program_id(0).to(tl.int64) * HV + head) * K * V + d[:, None] * V + e[None, :])
        y = tl.dot(queries, state) * tl.exp(decay)[:, None]
        upto = i[:, None] >= i[None, :]
        off = tl.where(upto, decay[:, None] - decay[None, :], 0.0)
        scores = tl.where(upto, tl.dot(queries, tl.trans(keys)) * tl.exp(off), 0.0)
        place = (t[:, None] * HV + head) * V + e[None, :]
        update = tl.load(new + place, inside[:, None], 0.0)
        y += tl.dot(scores.to(update.dtype), update)
        tl.store(o + place, (y * scale).to(update.dtype), inside[:, None])


def chunked(q, k, v, g, beta, norm):
    """o and the states after the last tokens, from states of zeros: [B, T, heads, dim]."""
    (batch, tokens, k_heads, k_dim), (heads, v_dim) = k.shape, v.shape[2:]
    chunks = triton.cdiv(tokens, CHUNK)
    sums = torch.empty_like(g)
    w, u = k.new_empty(batch, tokens, heads, k_dim), torch.empty_like(v)
    new, o = torch.empty_like(v), torch.empty_like(v)
    h = k.new_empty(batch, chunks, heads, k_dim, v_dim)
    last = torch.empty(batch, heads, k_dim, v_dim, device=k.device, dtype=torch.float32)
    sizes = dict(H=k_heads, HV=heads, K=k_dim, V=v_dim, C=CHUNK, NORM=norm)
    _prepare[(batch * chunks, heads)](k, v, g, beta, sums, w, u, tokens, **sizes)
    _states[lambda c: (batch * heads, v_dim // c["BV"])](k, w, u, new, sums, h, last, tokens, **sizes)
    _outputs[lambda c: (batch * chunks, heads, v_dim // c["BV"])](q, k, new, sums, h, o, tokens, k_dim**-0.5, **sizes)
    return o, last


def fla_chunked(q, k, v, g, beta, norm):
    return fla.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=norm, output_final_state=True)


def fla_recurrent(q, k, v, g, beta, initial_state, norm):
    return fla.fused_recurrent_gated_delta_rule(
        q, k, v, g, beta=beta, initial_state=initial_state, use_qk_l2norm_in_kernel=norm, output_final_state=True
    )


def reference(q, k, v, g, beta, norm, initial_state=None):
    """The same in the type of the operands, chunk by chunk, with a triangular solve."""
    group = v.shape[2] // k.shape[2]
    if norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (q, k))
    v, g, beta = (x.transpose(1, 2) for x in (v, g, beta))
    state = initial_state
    if state is None:
        state = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1], device=k.device, dtype=k.dtype)
    outputs = []
    for first in range(0, k.shape[2], CHUNK):
        of = slice(first, first + CHUNK)
        keys, queries, weight = k[:, :, of], q[:, :, of] * k.shape[-1] ** -0.5, beta[:, :, of, None]
        sums = g[:, :, of].cumsum(-1)
        decay = (sums[..., :, None] - sums[..., None, :]).tril().exp().tril()
        one = torch.eye(keys.shape[2], device=k.device, dtype=k.dtype)
        a = one + (keys @ keys.transpose(-1, -2) * decay * weight).tril(-1)
        rows = torch.cat([weight * v[:, :, of], weight * sums[..., None].exp() * keys], -1)
        u, w = torch.linalg.solve_triangular(a, rows, upper=False, unitriangular=True).split([v.shape[-1], k.shape[-1]], -1)
        new = u - w @ state
        y = sums[..., None].exp() * (queries @ state) + (queries @ keys.transpose(-1, -2) * decay) @ new
        outputs.append(y)
        left = (sums[..., -1:] - sums).exp()[..., None]
        state = sums[..., -1, None, None].exp() * state + keys.transpose(-1, -2) @ (left * new)
    return torch.cat(outputs, 2).transpose(1, 2), state
