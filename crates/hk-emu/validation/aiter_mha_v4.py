"""AITER: flash attention forward in 8 bits and in MX formats, "MHA v4"; host code: asm_mha_v4_fwd.cu. Arguments are those
of the other forward kernels, in slots of 16 bytes."""

import ml_dtypes
import numpy as np
from aiter_attention import FP8, attention, weighed
from harness import Out, case, f32, u32


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


def values(run, b, sk, heads, d):
    """Values in MX fp4, a power of two for each channel and 32 keys: exact; packed in tiles of 128 keys, as
    [b, head, tile, 32 channels, half, key of the half, 16 bytes]; exponents. Keys of a half are permuted."""
    tiles = -(-sk // 128)
    _, exponent, exact = mx(run, (b, heads, d, tiles * 128), ml_dtypes.float4_e2m1fn, 6)
    exact[..., sk:] = 0
    stored = (exact.reshape(*exponent.shape, 32) / 2.0 ** (exponent.astype(int) - 127)[..., None]).astype(ml_dtypes.float4_e2m1fn)
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
        # The quantizer of q has multiplied by the scale of the softmax and log2(e). Kernels load exponents of whole tiles ahead.
        stored = (fp8, 448) if kind == "mxfp8" else (ml_dtypes.float4_e2m1fn, 6)
        (q, q_exponent, exact_q), (k, k_exponent, exact_k) = (mx(run, (b, n, heads, d), *stored) for n in (sq, sk))
        factors = [np.append(x, np.zeros(256 * heads * 4, np.uint8)) for x in (q_exponent, k_exponent)]
        steps = [u32(x) for n in (sq, sk) for x in (n * heads * 4, 4)]
        base = np.log(2)
        if kind != "mxfp8":
            # Keys in tiles of 128: [b, head, tile, 32 elements, key, 16 bytes].
            tiles, row = -(-sk // 128), d // 2
            q, k = nibbles(q), np.pad(nibbles(k), ((0, 0), (0, tiles * 128 - sk), (0, 0), (0, 0)))
            k = np.ascontiguousarray(k.reshape(b, tiles, 128, heads, 4, 16).transpose(0, 3, 1, 4, 2, 5))
            k_strides = [u32(64), u32(tiles * 8192), u32(heads * tiles * 8192)]
            v_factor = run.rng.uniform(0.5, 2, (b, heads, d)).astype(np.float32)
            v_steps = [u32(heads * d * 4), u32(d * 4)]
        if kind == "f4f4":
            exact_v, v, v_factor = values(run, b, sk, heads, d)
            v_strides, v_steps = k_strides, [u32(heads * tiles * 512), u32(tiles * 512)]
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
    if kind == "f4f4":
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
    ("gfx950", "fwd_hd128_f4f4", "f4f4"),
):
    case(f"flash attention forward, {kind}{'' if kind == 'f4f4' else ' and fp8'}, v4", target)(
        # With values in fp4, keys are whole tiles.
        lambda run, file=file, kind=kind: forward(run, file, kind, sk=384 if kind == "f4f4" else 263)
    )
