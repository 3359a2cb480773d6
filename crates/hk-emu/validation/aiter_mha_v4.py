"""AITER: flash attention forward in 8 bits and in MX formats, "MHA v4"; host code: asm_mha_v4_fwd.cu. Arguments are those
of the other forward kernels, in slots of 16 bytes."""

import ml_dtypes
import numpy as np
from aiter_attention import attention, weighed
from harness import FP8, Out, case, f32, u32


def mx(run, shape, dtype, largest):
    """Values of a power of two for each 32: stored, exponents, and exact."""
    x = run.normal(*shape[:-1], shape[-1] // 32, 32)
    exponent = np.floor(np.log2(np.abs(x).max(-1, keepdims=True) / largest)).astype(int)
    exponent += run.integers(-1, 2, *exponent.shape)
    stored = np.clip(x * 2.0**-exponent, -largest, largest).astype(dtype)
    exact = stored.astype(np.float64) * 2.0**exponent
    return stored.reshape(shape), (exponent[..., 0] + 127).astype(np.uint8), exact.reshape(shape)


def nibbles(x):
    bits = x.view(np.uint8)
    return np.ascontiguousarray(bits[..., ::2] | bits[..., 1::2] << 4)


def sextets(x):
    """Values of six bits, 32 in 24 bytes."""
    bits = x.view(np.uint8)[..., None] >> np.arange(6, dtype=np.uint8) & 1
    return np.packbits(bits.reshape(*x.shape[:-1], -1), -1, bitorder="little")


def fp6_keys(k, exponents, heads):
    """Keys of fp6, [b, tile, 128, head, 4, 24 bytes], in tiles: the first 16 bytes, the last 8, a gap, and exponents
    [b, tile, 128, head, 4], twice: the second time from the second on."""
    b, tiles = k.shape[:2]
    out = np.zeros((b, heads, tiles, 17408), np.uint8)
    split = k.reshape(b, tiles, 4, 32, heads, 4, 24).transpose(0, 4, 1, 2, 5, 3, 6)
    for at, part in ((0, split[..., :16]), (8192, split[..., 16:])):
        part = part.reshape(b, heads, tiles, -1)
        out[..., at : at + part.shape[-1]] = part

    def order(x):
        x = x.reshape(b, tiles, 4, 2, 16, heads, 4).transpose(0, 5, 1, 3, 4, 2, 6)
        return x.reshape(b, heads, tiles, -1)

    shifted = np.roll(exponents.transpose(0, 3, 1, 2, 4).reshape(b, heads, -1), -1, -1)
    shifted = shifted.reshape(b, heads, tiles, 128, 4).transpose(0, 2, 3, 1, 4)
    out[..., 16384:16896], out[..., 16896:] = order(exponents), order(shifted)
    return np.append(out, np.zeros(256, np.uint8))


def values(run, b, sk, heads, d):
    """Values in MX fp4, a power of two for each channel and 32 keys: exact; packed in tiles of 128 keys, as
    [b, head, tile, 32 channels, half, key of the half, 16 bytes]; exponents. Keys of a half are permuted."""
    tiles = -(-sk // 128)
    _, exponent, exact = mx(run, (b, heads, d, tiles * 128), ml_dtypes.float4_e2m1fn, 6)
    exact[..., sk:] = 0
    stored = exact.reshape(*exponent.shape, 32) / 2.0 ** (exponent.astype(int) - 127)[..., None]
    stored = stored.astype(ml_dtypes.float4_e2m1fn)
    s = np.arange(64)
    order = np.argsort(32 * (s // 32) + 4 * (s % 32 // 8) + 16 * (s // 4 % 2) + s % 4)
    split = stored.reshape(b, heads, d // 32, 32, tiles, 2, 64)[..., order].transpose(0, 1, 4, 2, 5, 6, 3)
    # Exponents: [b, head, tile, 32 keys, pair of channels, which of them, 32 channels].
    exponents = exponent.reshape(b, heads, d // 32, 16, 2, tiles, 4).transpose(0, 1, 5, 6, 3, 4, 2)
    return exact[..., :sk].transpose(0, 3, 1, 2), nibbles(np.ascontiguousarray(split)), np.ascontiguousarray(exponents)


def forward(run, file, kind, b=2, sq=200, sk=263, heads=3, d=128):
    """Queries and keys in int8 or fp8 with a factor for each tensor, or in MX formats; values in fp8."""
    target = run.result.target
    fp8 = FP8[target]
    run.result.size = f"b {b}, q {sq}, k {sk}, heads {heads}, dim {d}"
    v, v_factor = run.normal(b, sk, heads, d).astype(fp8), np.array([0.5], np.float32)
    scale = np.float32(d**-0.5)

    def strides(row, rows):
        """Bytes from row to row, head to head and batch to batch of [b, rows, heads, row bytes]."""
        return [u32(heads * row), u32(row), u32(rows * heads * row)]

    k_strides, v_strides, v_steps, row = strides(d, sk), strides(d, sk), [u32(0), u32(0)], d
    if kind != "i8" and kind != "fp8":
        # The quantizer of q has multiplied by the scale of the softmax and log2(e). Kernels load exponents ahead.
        stored = {"mxfp8": (fp8, 448), "mxfp6": (ml_dtypes.float6_e2m3fn, 7.5)}.get(kind, (ml_dtypes.float4_e2m1fn, 6))
        stored = (ml_dtypes.float6_e2m3fn, 7.5) if kind == "f6f4" else stored
        (q, q_exponent, exact_q), (k, k_exponent, exact_k) = (mx(run, (b, n, heads, d), *stored) for n in (sq, sk))
        factors = [np.append(x, np.zeros(256 * heads * 4, np.uint8)) for x in (q_exponent, k_exponent)]
        steps = [u32(x) for n in (sq, sk) for x in (n * heads * 4, 4)]
        base = np.log(2)
        tiles = -(-sk // 128)
        if stored[1] == 7.5:
            row = d * 6 // 8
            pad = lambda x: np.pad(x, ((0, 0), (0, tiles * 128 - sk), (0, 0), (0, 0)))  # noqa: E731
            q, k = sextets(q), pad(sextets(k)).reshape(b, tiles, 128, heads, 4, 24)
            k = fp6_keys(k, pad(k_exponent).reshape(b, tiles, 128, heads, 4), heads)
            k_strides = [u32(136), u32(tiles * 17408), u32(heads * tiles * 17408)]
        elif kind != "mxfp8":
            # Keys in tiles of 128: [b, head, tile, 32 elements, key, 16 bytes].
            row = d // 2
            q, k = nibbles(q), np.pad(nibbles(k), ((0, 0), (0, tiles * 128 - sk), (0, 0), (0, 0)))
            k = np.ascontiguousarray(k.reshape(b, tiles, 128, heads, 4, 16).transpose(0, 3, 1, 4, 2, 5))
            k_strides = [u32(64), u32(tiles * 8192), u32(heads * tiles * 8192)]
        if kind != "mxfp8":
            v_factor = run.rng.uniform(0.5, 2, (b, heads, d)).astype(np.float32)
            v_steps = [u32(heads * d * 4), u32(d * 4)]
        if kind.endswith("f4"):
            exact_v, v, v_factor = values(run, b, sk, heads, d)
            v_strides = [u32(64), u32(tiles * 8192), u32(heads * tiles * 8192)]
            v_steps = [u32(heads * tiles * 512), u32(tiles * 512)]
            v_factor = np.append(v_factor, np.zeros(2 * 512, np.uint8))
    else:
        dtype, spread, factors = (np.int8, 35, (0.03, 0.02)) if kind == "i8" else (fp8, 1, (0.75, 1.25))
        factors = [np.array([x], np.float32) for x in factors]
        q, k = (run.normal(b, n, heads, d, scale=spread).astype(dtype) for n in (sq, sk))
        exact_q, exact_k = (x.astype(np.float64) * y for x, y in zip((q, k), factors))
        base, steps = float(scale), [u32(0)] * 4
    q_strides = strides(row, sq)
    out = run.launch(
        f"fmha_v4_fwd/{file}.co",
        (-(-sq // 256), heads, b),
        512,
        [Out("o", (b, sq, heads, d)), q, k, v, None, f32(scale), u32(sq), q_strides[0], u32(256 * heads * row)]
        + q_strides[1:] + [u32(1)] + k_strides + [u32(5), u32(0), u32(sk), u32(d), u32(d), u32(heads)] + v_strides
        + strides(2 * d, sq) + [None, None, u32(0), None, None, *factors, v_factor] + steps
        + v_steps,
        # Each wave loads the exponents of its 32 elements from the first byte on, four at a time.
        more=("--allow-misaligned",) if kind in ("mxfp4", "f4f4") else (),
    )
    if kind.endswith("f4"):
        v = exact_v
    else:
        v = v.astype(np.float64) * (v_factor[:, None] if v_factor.size > 1 else v_factor)
    o, _, p = attention(exact_q, exact_k, v, base)
    # P is rounded to e4m3, small ones to steps of it; o is truncated.
    bound = weighed(p * (2**-4 + 2**-14) + 2**-10 * p.max(-1, keepdims=True), np.abs(v))
    run.compare("o", out["o"], o, 2**-7, bound)


for target, file, kind in (
    ("gfx942", "MI300/fwd_hd128_i8fp8", "i8"), ("gfx950", "fwd_hd128_i8fp8", "i8"),
    ("gfx950", "fwd_hd128_fp8", "fp8"), ("gfx950", "fwd_hd128_mxfp8", "mxfp8"), ("gfx950", "fwd_hd128_mxfp4", "mxfp4"),
    ("gfx950", "fwd_hd128_f4f4", "f4f4"), ("gfx950", "fwd_hd128_mxfp6", "mxfp6"), ("gfx950", "fwd_hd128_f6f4", "f6f4"),
):
    case(f"flash attention forward, {kind}{'' if kind.endswith('f4') else ' and fp8'}, v4", target)(
        # With values in fp4, keys are whole tiles.
        lambda run, file=file, kind=kind: forward(run, file, kind, sk=384 if kind.endswith("f4") else 263)
    )
