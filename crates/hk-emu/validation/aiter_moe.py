"""AITER: fused mixture of experts. Arguments are in slots of 16 bytes, in the order of `KernelArgs` of the host code."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from aiter_gemm import shuffle, shuffle_scales
from harness import FP8, TARGETS, InOut, Out, bf16, case, silu, u32

fp4, int4 = ml_dtypes.float4_e2m1fn, ml_dtypes.int4
LARGEST = {np.int8: 127, FP8["gfx942"]: 240, FP8["gfx950"]: 448}


def gelu(x):
    return x / (1 + np.exp(-x * (1.5957691 + 0.0713548 * x * x)))


def routing(run, tokens, experts, topk, block):
    """Experts and weights of each token, and the tokens by expert in blocks: the token in the low 24 bits, its place
    among the token's experts above; an entry behind the last token pads."""
    ids = np.stack([run.rng.permutation(experts)[:topk] for _ in range(tokens)]).astype(np.int32)
    weights = run.rng.random((tokens, topk)).astype(np.float32)
    sorted_ids, sorted_weights, of_block = [], [], []
    for e in range(experts):
        rows = [(t, s) for t in range(tokens) for s in range(topk) if ids[t, s] == e]
        padding = -len(rows) % block
        of_block += [e] * ((len(rows) + padding) // block)
        sorted_ids += [t | s << 24 for t, s in rows] + [tokens | topk << 24] * padding
        sorted_weights += [weights[t, s] for t, s in rows] + [0.0] * padding
    return (ids, weights, np.array(sorted_ids, np.int32), np.array(sorted_weights, np.float32),
            np.array(of_block, np.int32), np.array([len(sorted_ids), tokens], np.int32))


@dataclass
class Scaled:
    """Quantized values, and the scales of groups of rows and columns."""

    q: np.ndarray
    step: np.ndarray
    group: tuple

    def real(self):
        step = np.repeat(np.repeat(self.step.astype(np.float64), self.group[0], -2), self.group[1], -1)
        return self.q.astype(np.float64) * step


def quantize(x, dtype, group, integer=np.rint, divide=False):
    """A scale for each `group` columns of a row: the largest value becomes the largest of the type. For fp4 a power of two,
    the largest becomes more than 3, and 6 at most. Kernels multiply by the largest of the type times the reciprocal, rounded
    twice, or by the rounded quotient: 16-bit values and their maximum often meet halfway between two quantized values."""
    parts = x.reshape(*x.shape[:-1], -1, group)
    top = np.abs(parts).max(-1, keepdims=True)
    if dtype == fp4:
        step = 2.0 ** (np.ceil(np.log2(top / 1.5)) - 2)
        q = parts / step
    else:
        largest = np.float32(LARGEST[dtype])
        step = (top / largest).astype(np.float32)
        factor = (largest / top).astype(np.float32) if divide else largest * (1 / top).astype(np.float32)
        q = parts.astype(np.float32) * factor
    q = (integer(q) if dtype == np.int8 else q).astype(dtype)
    return Scaled(q.reshape(x.shape), step[..., 0], (1, group))


def weights_of(run, experts, n, k, dtype, group):
    """Random weights of every expert; real ones are of about 1 / sqrt(k)."""
    size = {np.int8: 40, int4: 2}.get(dtype, 1)
    w = run.normal(experts, n, k, scale=size)
    if dtype in (np.int8, int4):
        w = np.clip(np.rint(w), *((-127, 127) if dtype == np.int8 else (-7, 7)))
    step = (0.5 + run.rng.random((experts, n // group[0], k // group[1]))) * k**-0.5 / size
    return Scaled(w.astype(dtype), (2.0 ** np.rint(np.log2(step)) if dtype == fp4 else step).astype(np.float32), group)


def packed(x):
    """Bytes; of fp4, two values in each, the low one first; of int4, the even ones of eight, then the odd ones."""
    if x.dtype not in (fp4, int4):
        return x
    if x.dtype == int4:
        x = x.reshape(*x.shape[:-1], -1, 4, 2).swapaxes(-1, -2).reshape(x.shape)
    bits = x.view(np.uint8) & 15
    return bits[..., ::2] | bits[..., 1::2] << 4


def e8m0(step):
    return (np.log2(step) + 127).astype(np.uint8)


def fused(run, file, tokens=None, experts=4, topk=2, dim=None, inter=None):
    """y = sum over a token's experts of weight * act(x w1^T) w2^T, as the name says. g1u1: two halves of w1, act of the first
    times the second. The hidden layer is quantized again, with a scale for each row of a tile. Host code: asm_fmoe.cu.

    blockscale: scales of 128 columns of x and of the hidden layer, and of 128 x 128 of weights. MXfp4: of 32 columns, e8m0.
    smf, multix: x (of each token and expert) and the hidden layer have factors for each column of each expert ("smooth
    quantization"). smf takes bf16 and quantizes it, 256 columns at a time; a16 and blockscaleBf16, 128, flat MXfp4, 32.
    tkw1: the weight comes before the activation. ps: a fixed number of workgroups takes the blocks in turn. flat: no
    sorting, a workgroup for each token and expert; emsort: the kernel sorts."""
    name = Path(file).stem
    has = lambda *words: any(re.search(f"(^|_){w}(_|$)", name) for w in words)  # noqa: E731
    tiles, sub = re.search(r"_(\d+)x(\d+)", name), re.search(r"subGU_(\d+)", name)
    block, tile = map(int, tiles.groups()) if tiles else (32, int(sub[1]) if sub else 512)
    half = np.float16 if has("fp16", "f16") else bf16  # of y
    if "noquant" in name or name in ("fmoe_b16", "fmoe_f16"):
        kind = bf16 if "noquant" in name else half
    else:
        kind = np.int8 if has("pertokenInt8", "int8") else fp4 if has("pertokenMXfp4", "mxfp4") else FP8[run.result.target]
    quantized = kind not in (bf16, half)
    flat, ps, smf, tkw1 = has("flat", "emsort"), has("ps", "psx", "emsort"), has("smf"), has("tkw1")
    columns = 128 if "blockscale" in name else 32 if kind == fp4 else None  # of a scale
    gates = 1 if has("g1u0") or not quantized else 2
    multix = has("multix", "int4fp8") or kind == np.int8 and gates == 1 and not smf
    wide = smf or has("a16", "blockscaleBf16") or kind == fp4 and flat
    act = gelu if has("gelu") or name in ("fmoe_b16", "fmoe_f16") else silu
    tokens = tokens or (70 if ps or block > 32 else 20)
    dim = dim or (2048 if kind == fp4 and flat else 1024 if has("opt") else 512)  # these need so many columns
    inter = inter or tile * (2 if ps or tile <= 256 else 1)
    run.result.size = f"{tokens} tokens, {experts} experts, top {topk}, dim {dim}, inner {inter}"

    ids, weights, sorted_ids, sorted_weights, of_block, valid = routing(run, tokens, experts, topk, block)
    rows, of_weights = gates * inter, int4 if has("int4fp8") else kind
    if quantized:
        group = 128 if columns == 128 else 1
        w1, w2 = (weights_of(run, experts, n, k, of_weights, (group, columns or k)) for n, k in ((rows, dim), (dim, inter)))
    else:
        w1, w2 = (Scaled(run.normal(experts, n, k, scale=k**-0.5, dtype=kind), np.ones((experts, 1, 1)), (n, k))
                  for n, k in ((rows, dim), (dim, inter)))
    smooth = [(0.5 + run.rng.random((experts, n))).astype(np.float32) for n in (dim, inter)] if smf or multix else None
    if has("int4fp8"):
        smooth = [np.ones_like(s) for s in smooth]  # not used
    x = run.normal(tokens, dim, dtype=bf16 if wide else kind if not quantized else np.float32)
    real = np.repeat(x.astype(np.float64)[:, None], topk, 1)  # of each token and place
    x_scale = smooth[0] if smf else None
    if smooth:
        real = real * smooth[0][ids]
    if quantized:
        integer = np.trunc if smf else np.rint
        xq = quantize(real, kind, 256 if smf else columns or dim, integer, divide=has("blockscaleBf16") and ps)
        real = xq.real()
        if multix:
            x, x_scale = xq.q.swapaxes(0, 1), xq.step.swapaxes(0, 1)
        elif not wide:
            x, x_scale = xq.q[:, 0], xq.step[:, 0].T
    scales = [w.step if quantized else None for w in (w1, w2)]
    if kind == fp4:
        scales = [np.stack([shuffle_scales(e8m0(s)) for s in w]) for w in scales]
        in_order = np.minimum(sorted_ids & 0xFFFFFF, tokens - 1)
        x_scale = None if wide else shuffle_scales(e8m0(xq.step[in_order, 0]))
    x = packed(np.ascontiguousarray(x))
    shuffled = [np.stack([shuffle(packed(e)) for e in w.q]) for w in (w1, w2)]

    n_tiles = inter // tile
    workgroups = 8 if ps else 0  # fewer than blocks, and as many for each of eight XCDs
    grid = (workgroups, 1, 1) if ps else (n_tiles, topk, tokens) if flat else (n_tiles, len(of_block), 1)
    y = InOut("y", np.zeros((tokens, dim), half))
    if flat:  # the kernel clears y, and counts in 8 bytes of each token behind it
        y = Out("y", (tokens * (dim + 4),), half)
        sorted_ids, sorted_weights = ids, weights
    # Some kernels prefetch behind the last row; what is there would show.
    slack = np.full((1 << 18) * (wide or gates == 1 or columns == 128), 0xFF, np.uint8)
    behind = lambda a: None if a is None else np.append(np.ascontiguousarray(a).view(np.uint8).ravel(), slack)  # noqa: E731
    stride = lambda s: 0 if s is None else s[0].nbytes  # noqa: E731
    inputs = [x, shuffled[0], valid, shuffled[1], x_scale, *scales, smooth[1] if smooth else None]
    out = run.launch(
        file,
        (grid[1], grid[0], 1) if smf else grid,
        256,
        [y] + [behind(a) for a in inputs + [sorted_ids, sorted_weights, of_block]]
        + [u32(n) for n in (dim, inter, tokens, experts, x.shape[-1] * x.itemsize)]
        + [u32(w[0, 0].nbytes) for w in shuffled] + [u32(2 * dim)] + [u32(w[0].nbytes) for w in shuffled]
        + [u32(stride(s)) for s in scales] + [u32(4 * inter), u32(topk)]
        # Kernels without a tile in the name have no such arguments.
        + [u32(n) for n in (workgroups // n_tiles * n_tiles, n_tiles) if tiles],
        # Of MXfp4, scales of every second tile of 128 columns begin within a dword.
        more=("--allow-misaligned",) if kind == fp4 and flat else (),
    )

    w1_real, w2_real = w1.real(), w2.real()
    want = np.zeros((tokens, dim))
    for t in range(tokens):
        for s, e in enumerate(ids[t]):
            h = w1_real[e] @ real[t, s] * (weights[t, s] if tkw1 else 1)
            h = act(h[:inter]) * (h[inter:] if gates == 2 else 1) * (smooth[1][e] if smooth else 1)
            if quantized:
                h = quantize(h[None], kind, columns or tile, np.trunc).real()[0]
            want[t] += (1 if tkw1 else weights[t, s]) * (w2_real[e] @ h)
    got = out["y"].ravel()[: tokens * dim].reshape(tokens, dim)
    # Each expert's (and tile's) share is rounded to 16 bits and added to 16-bit memory. f32 sums may put a value of the hidden
    # layer on the other side of a rounding boundary: one step of quantization, or one of bf16.
    parts, ulp = topk * n_tiles, 2**-11 if half == np.float16 else 2**-8
    run.compare("y", got, want, parts * ulp, (2**-6 if quantized else 2**-8) * float(np.abs(want).max()))


# Of both activations in turn: what kernels do, and tiles, some of them persistent.
FUSED = {
    "bf16_noquantBf16_g1u0_atm_inlv": ["1tg_32x512", "1tg_ps_32x512"],
    "bf16_noquantBf16_g1u0_vs_atm_inlv": ["1tg_32x512", "1tg_ps_32x512"],
    "fp16_noquantFp16_g1u0_vs_atm_inlv": ["1tg_32x512"],
    "fp16_noquantBf16_g1u0_vs_atm_inlv": ["1tg_ps_32x512"],
    "bf16_pertokenFp8_g1u1": ["1tg_32x256", "1tg_32x448", "1tg_ps_32x320"],
    "bf16_pertokenFp8_g1u1_vs": ["1tg_32x192", "1tg_32x512", "1tg_ps_32x128"],
    "bf16_pertokenFp8_g1u1_multix": ["1tg_32x320", "1tg_ps_32x192"],
    "bf16_pertokenFp8_g1u1_vs_multix": ["1tg_32x384", "1tg_ps_32x256"],
    "bf16_pertokenFp8_g1u1_smf": ["1tg_32x320", "1tg_32x512"],
    "bf16_pertokenFp8_g1u1_vs_smf": ["1tg_32x512"],
    "bf16_pertokenFp8_g1u1_vs_tkw1": ["1tg_32x256", "1tg_ps_32x384"],
    "fp16_pertokenFp8_g1u1_vs": ["1tg_32x256", "1tg_ps_32x448"],
    "fp16_pertokenFp8_g1u1_vs_multix": ["1tg_32x192"],
    "fp16_pertokenFp8_g1u1_vs_tkw1": ["1tg_32x320"],
    "bf16_pertokenInt8_g1u1": ["1tg_32x128", "1tg_ps_32x192"],
    "bf16_pertokenInt8_g1u1_vs": ["1tg_32x256", "1tg_ps_32x384"],
    "bf16_pertokenInt8_g1u1_multix": ["1tg_32x448"],
    "bf16_pertokenInt8_g1u1_vs_multix": ["1tg_32x192", "1tg_ps_32x128"],
    "bf16_pertokenInt8_g1u1_smf": ["1tg_32x320"],
    "bf16_pertokenInt8_g1u1_vs_smf": ["1tg_32x320"],
    "bf16_pertokenInt8_g1u0": ["1tg_32x320", "1tg_ps_32x128"],
    "bf16_pertokenInt8_g1u0_vs": ["1tg_32x256", "1tg_ps_32x192"],
    "bf16_pertokenInt8_g1u0_vs_smf": ["1tg_32x512"],
    "bf16_pertokenInt8_g1u0_vs_atm_opt": ["1tg_32x512", "1tg_ps_32x512"],
    "fp16_pertokenInt8_g1u1_vs": ["1tg_32x320", "1tg_ps_32x256"],
    "fp16_pertokenInt8_g1u0_vs": ["1tg_32x384"],
    "bf16_blockscaleFp8_g1u1_novs": ["1tg_32x256", "1tg_ps_32x256"],
    "bf16_blockscaleFp8_g1u1_vs": ["1tg_32x256", "1tg_ps_32x256"],
}
FILES = {
    "gfx942": [
        "fmoe_b16", "fmoe_f16", "fmoe_fp8_g1u1_multix_subGU_320", "fmoe_int8_g1u1_multix_subGU_256",
        "fmoe_int4fp8_g1u1_subGU_128_gelu", "fmoe_int4fp8_g1u1_subGU_256_gelu", "fmoe_int4fp8_g1u1_subGU_512_gelu",
        "fmoe/silu/fmoe_fp8_g1u1_subGU_192", "fmoe/gelu/fmoe_fp8_g1u1_subGU_384_gelu",
        "fmoe/silu/fmoe_fp8_g1u1_subGU_128_silu_tkw1", "fmoe/silu/fmoe_int8_g1u1_subGU_256",
        "fmoe/gelu/fmoe_int8_g1u0_subGU_192_gelu", "fmoe/fmoe_fp8_blockscale_g1u1_subGU_256",
        "fmoe/silu/fmoe_bf16_blockscaleFp8_g1u1_vs_silu_1tg_32x128", "fmoe/gelu/fmoe_bf16_blockscaleFp8_g1u1_gelu_1tg_32x256",
        "fmoe/silu/fmoe_bf16_blockscaleFp8_g1u1_vs_silu_1tg_64x256",
        "fmoe/gelu/fmoe_bf16_blockscaleFp8_g1u1_vs_gelu_1tg_psx_64x256",
        "fmoe/silu/fmoe_fp16_blockscaleFp8_g1u1_vs_silu_1tg_32x256",
        "fmoe/silu/fmoe_fp16_blockscaleFp8_g1u1_novs_silu_1tg_ps_32x256",
        "fmoe/silu/fmoe_bf16_a16_blockscaleFp8_g1u1_vs_silu_1tg_16x256",
        "fmoe/silu/fmoe_bf16_a16_blockscaleFp8_g1u1_vs_silu_1tg_ps_16x256",
        "fmoe/silu/fmoe_bf16_a16_blockscaleFp8_g1u1_vs_silu_1tg_16x128_pf3",
        "fmoe/silu/fmoe_bf16_a16_blockscaleFp8_g1u1_vs_silu_1tg_16x128_flat_pf3",
        "fmoe/silu/fmoe_bf16_a16_blockscaleFp8_g1u1_vs_silu_1tg_emsort_16x128_pf3",
    ],
    "gfx950": [
        "fmoe/silu/fmoe_bf16_blockscaleFp8_g1u1_vs_silu_32x384", "fmoe/silu/fmoe_bf16_blockscaleFp8_g1u1_novs_silu_32x384",
        "fmoe/gelu/fmoe_bf16_blockscaleFp8_g1u1_vs_gelu_1tg_64x384",
        "fmoe/silu/fmoe_bf16_blockscaleFp8_g1u1_vs_silu_1tg_ps_64x384",
        "fmoe/silu/fmoe_bf16_blockscaleFp8_g1u1_vs_silu_1tg_ps_64x256",
        "fmoe/gelu/fmoe_bf16_blockscaleFp8_g1u1_vs_gelu_1tg_ps_64x128",
        "fmoe/silu/fmoe_bf16_blockscaleFp8_g1u1_vs_silu_1tg_ps_32x128",
        "fmoe/silu/fmoe_bf16_blockscaleFp8_g1u1_vs_silu_1tg_pf2_16x128",
        "fmoe/gelu/fmoe_bf16_blockscaleFp8_g1u1_vs_gelu_1tg_pf2_16x256",
        "fmoe/silu/fmoe_bf16_blockscaleBf16_g1u1_ps_silu_32x128", "fmoe/gelu/fmoe_bf16_blockscaleBf16_g1u1_ps_gelu_32x256",
        "fmoe/gelu/fmoe_bf16_blockscaleBf16_g1u1_vs_1tg_gelu_16x128",
        "fmoe/silu/fmoe_bf16_blockscaleBf16_g1u1_vs_1tg_silu_16x256",
        "fmoe/silu/fmoe_bf16_blockscaleBf16_g1u1_flat_vs_silu_1x128",
        "fmoe/gelu/fmoe_bf16_blockscaleBf16_g1u1_flat_vs_gelu_1x256",
        "fmoe/silu/fmoe_bf16_pertokenMXfp4_g1u1_vs_silu_2tg_32x256",
        "fmoe/gelu/fmoe_bf16_pertokenMXfp4_g1u1_vs_gelu_1tg_32x512",
        "fmoe/silu/fmoe_bf16_pertokenMXfp4_g1u1_novs_silu_1tg_32x512",
        "fmoe/gelu/fmoe_bf16_pertokenMXfp4_g1u1_novs_gelu_2tg_32x256",
        "fmoe/silu/fmoe_bf16_pertokenMXfp4_g1u1_vs_silu_2tg_ps_32x256",
        "fmoe/silu/fmoe_bf16_pertokenMXfp4_g1u1_flat_novs_silu_16x128",
        "fmoe/gelu/fmoe_bf16_pertokenMXfp4_g1u1_flat_novs_gelu_16x256",
        "fmoe/silu/fmoe_fp16_pertokenMXfp4_g1u1_vs_silu_2tg_32x256",
        "fmoe/silu/fmoe_fp16_pertokenMXfp4_g1u1_novs_silu_1tg_ps_32x512", "fmoe/silu/fmoe_mxfp4_g1u1_vs_subGU_256",
    ],
}
for target in TARGETS:
    variants = [(kind, tile) for kind, tiles in FUSED.items() for tile in tiles]
    files = [f"fmoe/{act}/fmoe_{kind}_{act}_{tile}" for (kind, tile), act in zip(variants, ["silu", "gelu"] * len(variants))]
    for file in FILES[target] + files:
        case(f"fused MoE, {Path(file).stem[5:]}", target)(lambda run, file=file: fused(run, f"{file}.co"))


def stage1(run, kind, tile, prefetch, split=0, act=silu):
    """The first GEMM of two-stage MoE: h of each token and expert, act(gate) * up. doweight: the weight comes before the
    activation. blockscale: h in fp8, and behind it scales of 128 columns. In 2**split slices of K: the sums of gate and up
    in f32, no activation. Host code: asm_moe_2stage.cu."""
    block, n = tile
    of_target = run.folder / run.result.target
    (file,) = of_target.glob(f"fmoe_2stages/fmoe_stage1_bf16_{kind}_g1u1_{block}x{n}_*pf{prefetch}.co")
    dtype = np.int8 if kind == "pertokenInt8" else FP8[run.result.target]
    columns = 128 if "blockscale" in kind else None  # of a scale
    tokens, experts, topk, dim, inter = 20 if block < 64 else 90, 4, 2, 512, 2 * n
    run.result.size = f"{tokens} tokens, {experts} experts, top {topk}, dim {dim}, inner {inter}"
    run.result.size += f", split K {2**split}" if split else ""
    ids, weights, sorted_ids, sorted_weights, of_block, valid = routing(run, tokens, experts, topk, block)
    w = weights_of(run, experts, 2 * inter, dim, dtype, (columns or 1, columns or dim))
    x = quantize(run.normal(tokens, dim), dtype, columns or dim)
    shape, of_h = (tokens, topk, inter), dtype if columns else bf16
    scales = math.prod(shape) // 128 * 4 if columns else 0
    h = Out("h", (math.prod(shape) + scales,), of_h)
    if split:
        h = InOut("h", np.zeros((tokens, topk, 2 * inter), np.float32))
    slack = np.full(4096 * (split > 0), 0xFF, np.uint8)  # a slice prefetches behind its end; what is there would show
    behind = lambda a: np.append(np.ascontiguousarray(a).view(np.uint8).ravel(), slack)  # noqa: E731
    out = run.launch(
        file,
        (inter // n, len(of_block), 2**split),
        256,
        [h, behind(x.q), np.stack([shuffle(e) for e in w.q]), valid, behind(x.step.T), behind(w.step), None]
        + [sorted_ids, of_block]
        + [u32(a) for a in (dim, inter, tokens, experts, dim, dim, topk * inter * (8 if split else np.dtype(of_h).itemsize))]
        + [u32(a) for a in (2 * inter * dim, w.step[0].nbytes, 4 * inter, topk, split, int(act == gelu))]
        + [sorted_weights if "doweight" in kind else None],
    )["h"]
    want = np.einsum("eji,ti->tej", w.real(), x.real())[np.arange(tokens)[:, None], ids]
    if "doweight" in kind:
        want *= weights[..., None]
    if split:
        run.compare("h", out, want, 1e-5, 1e-5)
        return
    want = act(want[..., :inter]) * want[..., inter:]
    if not columns:
        run.compare("h", out.reshape(shape), want, 2**-8, 1e-5)  # rounded to nearest
        return
    step = out[math.prod(shape) :].view(np.float32).reshape(tokens, topk, -1)
    top = np.abs(want).reshape(*step.shape, 128).max(-1)
    run.compare("scales", step, top / 240, 1e-5, 0)  # on gfx950, too
    # Rounded to nearest with three bits behind the first; the smallest step is 2^-9 or, of fnuz, 2^-10.
    got = Scaled(out[: math.prod(shape)].reshape(shape), step, (1, 128)).real()
    run.compare("h", got, want, 2**-4, 2**-10 * float(step.max()) + 1e-5)


KINDS = ("pertokenFp8_doweight", "pertokenFp8", "pertokenInt8", "pertokenFp8_blockscale")
SHAPES = [(m, 128) for m in range(16, 161, 16)] + [(32, 256), (80, 256), (16, 512), (48, 512)]
for target in TARGETS:
    for i, kind in enumerate(KINDS):
        for j, tile in enumerate(SHAPES[i % 2 :: 2]):
            act = (silu, gelu)[j % 2]
            case(f"two-stage MoE, first GEMM, {kind} {tile[0]}x{tile[1]}, {act.__name__}", target)(
                lambda run, a=(kind, tile, 2 + j // 2 % 2), act=act: stage1(run, *a, act=act)
            )
    for kind in (KINDS[1], KINDS[3]):
        case(f"two-stage MoE, first GEMM, {kind} 32x128, split K", target)(
            lambda run, kind=kind: stage1(run, kind, (32, 128), 2, 1)
        )
