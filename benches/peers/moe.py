"""Mixture-of-experts layers: f64 references, a loop over experts in PyTorch, and a fused layer in Triton.

The layer in Triton: gates sorted by expert and padded to tiles, a gated GEMM that gathers rows of x, a GEMM that scatters rows
by gate, the sum over the gates of a token. Weights are bf16, fp8 with scales of 128 x 128 (activations of 1 x 128), or mxfp4 by
bf16. Choices of experts are by PyTorch in every peer; a loop over experts knows them on the host.
"""

import functools

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

FP8_MAX = 448.0
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
OAI_ALPHA, OAI_LIMIT = 1.702, 7.0


class Layer:
    """What a case says: the format of weights, the gate, how many experts a token has."""

    def __init__(self, operands, scalars):
        w1, scale = operands["w1"], operands.get("w1_scale")
        self.format = "plain" if scale is None else "mxfp4" if w1.dtype == torch.uint8 else "blocks"
        self.k = int(scalars["k"])
        self.oai = scalars["gate"] == "swiglu_oai"
        self.experts, rows, _ = w1.shape
        self.inner = rows // 2

    def choose(self, logits):
        """Experts of each token and their weights, softmax over the chosen."""
        values, ids = logits.float().topk(self.k, -1)
        return ids, values.softmax(-1)

    def gate(self, sums):
        if self.oai:
            g, v = sums[..., 0::2].clamp(max=OAI_LIMIT), sums[..., 1::2].clamp(-OAI_LIMIT, OAI_LIMIT)
            return g * torch.sigmoid(OAI_ALPHA * g) * (v + 1)
        g, v = sums.chunk(2, -1)
        return F.silu(g) * v


def quantized(x):
    """fp8 of groups of 128 columns, and their scales."""
    groups = x.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / FP8_MAX
    q = (groups / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return q.flatten(-2), scale.squeeze(-1)


def rounded(x):
    """What the quantized values of x stand for."""
    q, scale = quantized(x)
    return (q.float().unflatten(-1, (-1, 128)) * scale.unsqueeze(-1)).flatten(-2).to(x.dtype)


def weights(w, scale, dtype):
    """A matrix, or all of them, as what they stand for."""
    if scale is None:
        return w.to(dtype)
    if w.dtype == torch.uint8:
        values = torch.tensor(FP4 + tuple(-v for v in FP4), device=w.device, dtype=dtype)
        both = torch.stack((w & 15, w >> 4), -1).flatten(-2).int()
        exponent = scale.to(dtype).sub(127).exp2() if scale.dtype == torch.uint8 else scale.to(dtype)
        return values[both] * exponent.repeat_interleave(32, -1)
    rows, cols = w.shape[-2:]
    wide = scale.to(dtype).repeat_interleave(128, -2)[..., :rows, :]
    return w.to(dtype) * wide.repeat_interleave(128, -1)[..., :cols]


def reference(layer, dtype, **o):
    """In f64; activations that the layer quantizes, and h, are rounded as they are there."""
    x = o["x"]
    ids, chosen = layer.choose(o["logits"])
    y = torch.zeros_like(x)

    def mlp(x, w1, w2, scales, biases):
        if layer.format == "blocks":
            x = rounded(x)
        sums = x @ weights(w1, scales[0], torch.float64).mT
        h = layer.gate(sums if biases[0] is None else sums + biases[0]).to(dtype).double()
        if layer.format == "blocks":
            h = rounded(h)
        out = h @ weights(w2, scales[1], torch.float64).mT
        return out if biases[1] is None else out + biases[1]

    def of(name, expert):
        return o[name][expert] if name in o else None

    for expert in range(layer.experts):
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        scales, biases = ([of(f"w{i}_{what}", expert) for i in (1, 2)] for what in ("scale", "bias"))
        out = mlp(x[rows], o["w1"][expert], o["w2"][expert], scales, biases)
        y.index_add_(0, rows, out * chosen[rows, slots, None].double())
    if "shared_w1" in o:
        scales = [of(f"shared_w{i}_scale", 0) for i in (1, 2)]
        y += mlp(x, o["shared_w1"][0], o["shared_w2"][0], scales, (None, None))
    return (y,)


def loop(layer, of_experts, **o):
    """Each expert in turn by cuBLAS, of quantized weights after dequantizing them. `of_experts`: rows and slots of each, which the host
    knows before the call."""
    x = o["x"]
    _, chosen = layer.choose(o["logits"])
    y = torch.zeros(x.shape, device=x.device)

    def mlp(x, prefix, expert):
        def of(name):
            tensor = o.get(prefix + name)
            return None if tensor is None else tensor[expert]

        def linear(x, i):
            x = rounded(x) if layer.format == "blocks" else x
            out = x @ weights(of(f"w{i}"), of(f"w{i}_scale"), x.dtype).mT
            bias = of(f"w{i}_bias")
            return out if bias is None else out + bias.to(x.dtype)

        return linear(layer.gate(linear(x, 1)), 2)

    for expert, (rows, slots) in enumerate(of_experts):
        if len(rows):
            y.index_add_(0, rows, mlp(x[rows], "", expert) * chosen[rows, slots, None])
    if "shared_w1" in o:
        y += mlp(x, "shared_", 0)
    return (y.to(x.dtype),)


if triton:

    @triton.jit
    def _fp4(code):
        """The value of e2m1: of magnitudes from 2 on by their exponent and mantissa, 1 is a half."""
        magnitude = code & 7
        bits = ((magnitude >> 1) + 126) << 23 | (magnitude & 1) << 22
        value = tl.where(magnitude < 2, magnitude * 0.5, bits.to(tl.float32, bitcast=True))
        return tl.where(code > 7, -value, value)

    @triton.jit
    def _weights(w, scale, n, inside, k, K, FORMAT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
        """Columns k .. k + BK of rows n, [BK, BN]."""
        if FORMAT == "mxfp4":
            byte = k // 2 + tl.arange(0, BK // 2)
            packed = tl.load(w + n[:, None] * (K // 2) + byte[None, :], inside[:, None] & (byte < K // 2)[None, :], 0)
            packed = packed.to(tl.int32)
            values = tl.reshape(tl.join(_fp4(packed & 15), _fp4(packed >> 4)), (BN, BK))
            group = k // 32 + tl.arange(0, BK // 32)
            e8m0 = tl.load(scale + n[:, None] * (K // 32) + group[None, :], inside[:, None] & (group < K // 32)[None, :], 127)
            factor = (e8m0.to(tl.int32) << 23).to(tl.float32, bitcast=True)
            values = tl.reshape(values, (BN, BK // 32, 32)) * factor[:, :, None]
            return tl.trans(tl.reshape(values, (BN, BK)).to(tl.bfloat16))
        else:
            at = k + tl.arange(0, BK)
            return tl.load(w + n[None, :] * K + at[:, None], inside[None, :] & (at < K)[:, None], 0.0)

    @triton.jit
    def _product(
        sums, a, w, a_scale, w_scale, row, listed, n, inside, k, K, FORMAT: tl.constexpr, SUMS: tl.constexpr,
        BN: tl.constexpr, BK: tl.constexpr,
    ):
        b = _weights(w, w_scale, n, inside, k, K, FORMAT, BN, BK)
        if FORMAT == "blocks":
            of_a = tl.load(a_scale + row * (K // 128) + k // 128, listed, 0.0)
            of_w = tl.load(w_scale + n // 128 * (K // 128) + k // 128, inside, 0.0)
            if SUMS == "bf16":
                part = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
            else:
                part = tl.dot(a, b)
            return sums + part * of_a[:, None] * of_w[None, :]
        return tl.dot(a, b, sums)

    _CONFIGS = [
        triton.Config({"BN": bn, "BK": bk}, num_warps=warps, num_stages=stages)
        for bn, bk, warps, stages in [(32, 128, 4, 4), (64, 128, 4, 3), (64, 64, 4, 4), (128, 128, 8, 3), (128, 64, 8, 4)]
    ]

    def _prune(configs, named, **kwargs):
        # A tile of BK columns has one scale.
        wanted = [c for c in configs if kwargs["FORMAT"] != "blocks" or c.kwargs["BK"] == 128]
        return wanted if kwargs["BM"] > 16 else [c for c in wanted if c.kwargs["BN"] < 128]

    @triton.autotune(_CONFIGS, key=["N", "K", "gates", "BM", "FORMAT", "SUMS"], prune_configs_by={"early_config_prune": _prune})
    @triton.jit
    def _experts(
        a, w, a_scale, w_scale, bias, weight, slots, tile_expert, y, N, K, gates, experts, w_step, scale_step,
        PER: tl.constexpr, GATED: tl.constexpr, OAI: tl.constexpr, HAS_BIAS: tl.constexpr, FORMAT: tl.constexpr,
        SUMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ):
        """Rows of y for the gates of a tile: N columns, of a gated GEMM from 2 N rows of w."""
        n_tiles = tl.cdiv(N, BN)
        tile = tl.program_id(0) // n_tiles
        expert = tl.load(tile_expert + tile).to(tl.int64)
        if expert >= experts:
            return
        slot = tl.load(slots + tile * BM + tl.arange(0, BM)).to(tl.int64)
        listed = slot < gates
        row = slot // PER
        n = tl.program_id(0) % n_tiles * BN + tl.arange(0, BN)
        inside = n < N
        w += expert * w_step
        w_scale += expert * scale_step
        first = 2 * n if OAI else n
        second = 2 * n + 1 if OAI else N + n
        sums = tl.zeros([BM, BN], tl.float32)
        values = tl.zeros([BM, BN], tl.float32)
        for k in range(0, K, BK):
            at = k + tl.arange(0, BK)
            rows = tl.load(a + row[:, None] * K + at[None, :], listed[:, None] & (at < K)[None, :], 0.0)
            sums = _product(sums, rows, w, a_scale, w_scale, row, listed, first, inside, k, K, FORMAT, SUMS, BN, BK)
            if GATED:
                values = _product(values, rows, w, a_scale, w_scale, row, listed, second, inside, k, K, FORMAT, SUMS, BN, BK)
        if HAS_BIAS:
            bias += expert * N * (2 if GATED else 1)
            sums += tl.load(bias + first, inside, 0.0)[None, :]
            if GATED:
                values += tl.load(bias + second, inside, 0.0)[None, :]
        if OAI:
            sums = tl.minimum(sums, 7.0)
            values = tl.minimum(tl.maximum(values, -7.0), 7.0)
            sums = sums * tl.sigmoid(1.702 * sums) * (values + 1.0)
        elif GATED:
            sums = sums * tl.sigmoid(sums) * values
        else:
            sums *= tl.load(weight + slot, listed, 0.0)[:, None]
        tl.store(y + slot[:, None] * N + n[None, :], sums.to(y.dtype.element_ty), listed[:, None] & inside[None, :])

    @triton.jit
    def _quantize(x, q, scale, groups, GROUPS: tl.constexpr):
        group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
        at = group[:, None] * 128 + tl.arange(0, 128)[None, :]
        inside = group < groups
        v = tl.load(x + at, inside[:, None], 0.0).to(tl.float32)
        s = tl.maximum(tl.max(tl.abs(v), 1), 1e-10) / 448.0
        tl.store(q + at, (v / s[:, None]).to(q.dtype.element_ty), inside[:, None])
        tl.store(scale + group, s, inside)

    @triton.jit
    def _sum(x, shared, y, cols, K: tl.constexpr, HAS_SHARED: tl.constexpr, BLOCK: tl.constexpr):
        token = tl.program_id(0).to(tl.int64)
        col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = col < cols
        total = tl.zeros([BLOCK], tl.float32)
        for j in range(K):
            total += tl.load(x + (token * K + j) * cols + col, inside, 0.0).to(tl.float32)
        if HAS_SHARED:
            total += tl.load(shared + token * cols + col, inside, 0.0).to(tl.float32)
        tl.store(y + token * cols + col, total, inside)


def lists(ids, experts, block):
    """Gates by expert, each expert's padded to whole tiles with the number of gates; and the expert of each tile."""
    flat = ids.flatten()
    gates = flat.numel()
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat))
    order = flat.argsort(stable=True)
    padded = (counts + block - 1) // block * block
    ends = padded.cumsum(0)
    of = flat[order]
    place = (ends - padded)[of] + torch.arange(gates, device=ids.device) - (counts.cumsum(0) - counts)[of]
    tiles = min(gates, (gates + experts * (block - 1)) // block)
    slots = torch.full((tiles * block,), gates, dtype=torch.int32, device=ids.device)
    slots.scatter_(0, place, order.int())
    expert = torch.searchsorted(ends, torch.arange(tiles, device=ids.device) * block, right=True)
    return slots, expert.int()


def fused(layer, sums, **o):
    x, tokens = o["x"], o["x"].shape[0]
    ids, chosen = layer.choose(o["logits"])
    mean = tokens * layer.k // layer.experts
    block = min(max(triton.next_power_of_2(max(mean, 1)), 16), 128)

    def quantize(x):
        if layer.format != "blocks":
            return x, x
        q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        scale = torch.empty((x.shape[0], x.shape[1] // 128), device=x.device)
        groups = scale.numel()
        _quantize[(triton.cdiv(groups, 16),)](x, q, scale, groups, GROUPS=16)
        return q, scale

    def gemm(activations, prefix, i, tiles, weight, gated):
        (a, a_scale), (slots, expert, rows) = activations, tiles
        w, scale, bias = (o.get(f"{prefix}w{i}{what}") for what in ("", "_scale", "_bias"))
        gates = weight.numel()
        n = w.shape[1] // (2 if gated else 1)
        k = w.shape[2] * (2 if layer.format == "mxfp4" else 1)
        y = torch.empty((gates, n), dtype=torch.bfloat16, device=w.device)
        w_scale = w if scale is None else scale
        grid = lambda config: (len(expert) * triton.cdiv(n, config["BN"]),)
        _experts[grid](
            a, w, a_scale, w_scale, w if bias is None else bias, weight, slots, expert, y, n, k, gates, w.shape[0],
            w.stride(0), 0 if scale is None else scale.stride(0), PER=gates // a.shape[0], GATED=gated,
            OAI=gated and layer.oai, HAS_BIAS=bias is not None, FORMAT=layer.format, SUMS=sums, BM=rows,
        )
        return y

    a = quantize(x)
    tiles = (*lists(ids, layer.experts, block), block)
    h = gemm(a, "", 1, tiles, chosen, True)
    out = gemm(quantize(h), "", 2, tiles, chosen, False)
    shared = out
    if "shared_w1" in o:
        block = min(max(triton.next_power_of_2(tokens), 16), 128)
        slots = torch.arange(triton.cdiv(tokens, block) * block, device=x.device, dtype=torch.int32)
        every = (slots, torch.zeros(len(slots) // block, device=x.device, dtype=torch.int32), block)
        one = torch.ones(tokens, device=x.device)
        h = gemm(a, "shared_", 1, every, one, True)
        shared = gemm(quantize(h), "shared_", 2, every, one, False)
    y = torch.empty_like(x)
    grid = (tokens, triton.cdiv(x.shape[1], 1024))
    _sum[grid](out, shared, y, x.shape[1], K=layer.k, HAS_SHARED="shared_w1" in o, BLOCK=1024)
    return (y,)


def fused_moe(operands, scalars):
    """The reference, and the peers by name."""
    layer = Layer(operands, scalars)
    ids, _ = layer.choose(operands["logits"])
    of_experts = [(ids == expert).nonzero(as_tuple=True) for expert in range(layer.experts)]
    functions = {"torch": functools.partial(loop, layer, of_experts)}
    if triton:
        # fp8's warpgroup instructions sum some 14 bits; products of bf16 are those of fp8, exactly.
        names = {"triton": "bf16", "triton_fp8": "fp8"} if layer.format == "blocks" else {"triton": ""}
        functions |= {name: functools.partial(fused, layer, sums) for name, sums in names.items()}
    return functools.partial(reference, layer, operands["x"].dtype), functions
