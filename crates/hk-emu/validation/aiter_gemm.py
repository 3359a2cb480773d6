"""AITER: matrix products and MoE gates. Arguments are in slots of 16 bytes, in the order of `KernelArgs` of the host code."""

import numpy as np
from harness import FP8, TARGETS, InOut, Out, bf16, case, e4m3fnuz, f32, u32


def shuffle(w, rows=16, bytes_per_k=32):
    """Weights as tiles of `rows` rows by `bytes_per_k` bytes; in a tile, 16 bytes of each row, then the next 16 bytes."""
    step = 16 // w.itemsize
    blocks = bytes_per_k // 16
    n, k = w.shape
    tiles = w.reshape(n // rows, rows, k // (blocks * step), blocks, step)
    return np.ascontiguousarray(tiles.transpose(0, 2, 3, 1, 4)).reshape(n, k)


def gate(run, tokens, experts, topk, dtype, renormalize, subm=4):
    """Softmax over the experts, the largest topk of it; host code: asm_topksoftmax.cu."""
    run.result.size = f"{tokens} x {experts}, top {topk}"
    logits = run.normal(tokens, experts, scale=2).astype(dtype)
    name = f"topksoftmax/topksoftmax_{subm}x{experts}x{topk}{'_bf16' if dtype == bf16 else ''}.co"
    out = run.launch(
        name,
        (-(-tokens // subm), 1, 1),
        256,
        [Out("ids", (tokens, topk), np.int32), Out("weights", (tokens, topk), np.float32), logits]
        + [u32(tokens), u32(experts), u32(topk), u32(renormalize), u32(4 * topk)],
    )
    x = logits.astype(np.float64)
    p = np.exp(x - x.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    ids = np.argsort(-p, axis=1, kind="stable")[:, :topk]
    want = np.take_along_axis(p, ids, 1)
    if renormalize:
        want = want / want.sum(1, keepdims=True)
    # Equal logits may come in any order; their weights are equal.
    picked = np.take_along_axis(x, out["ids"].astype(np.int64), 1)
    run.equal("experts", picked, np.take_along_axis(x, ids, 1))
    run.compare("weights", out["weights"], want, 1e-5, 1e-7)


for target in TARGETS:
    for subm, experts, topk in [(m, e, k) for m in (4, 12) for e, k in ((128, 4), (128, 6), (128, 8), (256, 6), (256, 8))] + [
        (4, 384, 8), (4, 640, 8),
    ]:
        for dtype, name in ((np.float32, "f32"), (bf16, "bf16")):
            case(f"MoE gate, {experts} experts, top {topk}, {subm} rows, {name}", target)(
                lambda run, a=(experts, topk, dtype, topk % 4 // 2, subm): gate(run, 37, *a)
            )


def top_k_rows(run, prefill):
    """The indices of the 2048 largest of a range of each row, in any order; host code: asm_topk_per_row_{decode,prefill}.cu."""
    rows, columns, k = 3, 5000, 2048
    run.result.size = f"{rows} x {columns}, top {k}"
    logits = run.normal(rows, columns)
    starts = np.array([0, 7, 100] if prefill else [0] * rows, np.int32)
    ends = np.array([5000, 3001, 1500], np.int32)
    name = "prefill" if prefill else "decode"
    ids = Out("ids", (rows, k), np.int32)
    values = Out("values", (rows, k), np.float32)
    out = run.launch(
        f"topk_per_row_{name}/asm_top_k_per_row_{name}.co",
        (rows, 1, 1),
        1024,
        [np.zeros(2 * k * rows, np.uint32), logits, starts, ends, ids, values, u32(columns), u32(1)]
        if prefill
        else [logits, ends, ids, u32(columns), u32(1), u32(1)],
        slot=0,
        more=("--allow-misaligned",),
    )
    for row, (start, end) in enumerate(zip(starts, ends)):
        want = np.argsort(-logits[row, start:end], kind="stable")[:k]
        want = np.sort(np.pad(want, (0, k - len(want)), constant_values=-1))
        run.equal(f"row {row}", np.sort(out["ids"][row]), want)


case("top 2048 of rows, C++", "gfx942")(lambda run: top_k_rows(run, False))
case("top 2048 of a range of rows, C++", "gfx942")(lambda run: top_k_rows(run, True))


def bf16_gemm(run, file, m, n, k, tile, shuffled=False, bias=False, out_dtype=np.float32, split=1):
    """d = a b^T (+ bias); host code: asm_gemm_a16w16.cu."""
    run.result.size = f"{m} x {n} x {k}" + (f", split K {split}" if split > 1 else "")
    a, b = run.normal(m, k, dtype=bf16), run.normal(n, k, dtype=bf16)
    bias_row = run.normal(n, dtype=bf16) if bias else None
    # Kernels that do not split K have no such argument.
    semaphore = [InOut("semaphore", np.zeros((16, 64), np.uint32))] if split > 1 else []
    row = n * np.dtype(out_dtype).itemsize
    out = run.launch(
        f"bf16gemm/{file}.co",
        (-(-n // tile[1]), -(-m // tile[0]), split),
        256,
        [Out("d", (m, n), out_dtype), None, a, shuffle(b) if shuffled else b, f32(1), f32(0)]
        + [u32(row), u32(0), u32(row), u32(0), u32(2 * k), u32(0), u32(2 * k), u32(0)]
        + [u32(m), u32(n), u32(k), u32(split), u32(int(out_dtype == bf16)), bias_row, u32(int(bias))]
        + semaphore,
    )
    want = a.astype(np.float64) @ b.astype(np.float64).T + (0 if bias_row is None else bias_row.astype(np.float64))
    if out_dtype == bf16:
        run.compare("d", out["d"], want, 2**-8, 1e-4 * k**0.5)  # rounded to nearest
    else:
        run.compare("d", out["d"], want, 1e-5, 1e-5 * k**0.5)


for target in TARGETS:
    for m in (32, 48, 64, 80, 96, 128, 160):
        shuffled_file = f"bf16gemm_fp32bf16_tn_{m}x64_bshuffle_splitk"
        # The last tile has a single row, or lacks one.
        rows = (m + 1, 2 * m - 1)[m // 16 % 2]
        if m != 80:
            case(f"bf16 GEMM {m} x 64, shuffled weights, bf16 out, bias", target)(
                lambda run, f=shuffled_file, m=m, rows=rows: bf16_gemm(run, f, rows, 192, 128, (m, 64), True, True, bf16)
            )
        case(f"bf16 GEMM {m} x 64, shuffled weights, split K with a semaphore", target)(
            lambda run, f=shuffled_file + "_clean", m=m, rows=rows: bf16_gemm(
                run, f, rows, 128, 320, (m, 64), True, False, np.float32, 5
            )
        )
        if m > 96:
            continue
        if m != 80:
            case(f"bf16 GEMM {m} x 64", target)(
                lambda run, f=f"bf16gemm_fp32bf16_tn_{m}x64_pf3_splitk", m=m, rows=rows: bf16_gemm(
                    run, f, rows, 128, 256, (m, 64)
                )
            )
        case(f"bf16 GEMM {m} x 64, split K with a semaphore, bias", target)(
            lambda run, f=f"bf16gemm_fp32bf16_tn_{m}x64_splitk_clean", m=m, rows=rows: bf16_gemm(
                run, f, rows, 128, 512, (m, 64), False, True, np.float32, 4
            )
        )
for name, shuffled in (("", False), ("_bpreshuffle", True)):
    case(f"bf16 GEMM 256 x 256{', shuffled weights' * shuffled}, bf16 out", "gfx950")(
        lambda run, f=f"bf16gemm_bf16_tn_256x256{name}", shuffled=shuffled: bf16_gemm(
            run, f, 300, 512, 256, (256, 256), shuffled, False, bf16
        )
    )


def compare_truncated(run, what, got, want, split, atol):
    """The kernels truncate to bf16. Each split-K slice is truncated and added to bf16 memory; slices are as large as sums."""
    slices = (split > 1) * split * 2**-7 * float(np.abs(want).max())
    run.compare(what, got, want, 2**-7, atol + slices)


def i8_gemm(run, m, n, k, tile, split=1):
    """c = (a b^T) * scale of the row * scale of the column + bias; host code: asm_gemm_a8w8.cu."""
    run.result.size = f"{m} x {n} x {k}" + (f", split K {split}" if split > 1 else "")
    a, b = run.integers(-128, 128, m, k, dtype=np.int8), run.integers(-128, 128, n, k, dtype=np.int8)
    sa, sb = (np.abs(run.normal(m, 1)) / 100).astype(np.float32), (np.abs(run.normal(1, n)) / 100).astype(np.float32)
    bias = run.normal(1, n)
    out = run.launch(
        f"i8gemm/I8gemm_bf16_perTokenI8_BpreShuffle_{tile[0]}x{tile[1]}.co",
        (n // tile[1] * split, -(-m // tile[0]), 1),
        256,
        [Out("c", (m, n), bf16, fill=0 if split > 1 else None), a, shuffle(b), sa, sb, bias]
        + [u32(m), u32(n), u32(k), u32(k), u32(k), u32(2 * n), u32(split)],
    )
    want = (a.astype(np.int64) @ b.astype(np.int64).T) * sa.astype(np.float64) * sb + bias
    compare_truncated(run, "c", out["c"], want, split, 1e-6)


for target in TARGETS:
    for m in (16, 32, 48, 64, 80, 96, 128, 160):
        case(f"i8 GEMM {m} x 128, scales per row and column", target)(
            lambda run, m=m: i8_gemm(run, m + 17, 256, 256, (m, 128))
        )
        case(f"i8 GEMM {m} x 128, split K", target)(lambda run, m=m: i8_gemm(run, 2 * m - 1, 128, 768, (m, 128), 3))
case("i8 GEMM 112 x 256, scales per row and column", "gfx942")(lambda run: i8_gemm(run, 150, 512, 384, (112, 256)))


def blockscale_gemm(run, m, n, k, tile, split=1):
    """c = sum over blocks of 128 k of (a b^T) * scale of row and block * scale of 128 columns and block; host code:
    asm_a8w8_blockscale_bpreshuffle.cu."""
    run.result.size = f"{m} x {n} x {k}" + (f", split K {split}" if split > 1 else "")
    fp8 = FP8[run.result.target]
    a, b = run.normal(m, k).astype(fp8), run.normal(n, k).astype(fp8)
    sa = (0.5 + run.rng.random((m, k // 128))).astype(np.float32)
    sb = (0.5 + run.rng.random((n // 128, k // 128))).astype(np.float32)
    out = run.launch(
        f"fp8gemm_blockscale/fp8gemm_bf16_blockscale_BpreShuffle_{tile[0]}x{tile[1]}.co",
        (n // tile[1] * split, -(-m // tile[0]), 1),
        256,
        [Out("c", (m, n), bf16, fill=0 if split > 1 else None), a, shuffle(b)]
        + [np.ascontiguousarray(sa.T), sb, np.zeros((1, n), np.float32)]
        + [u32(m), u32(n), u32(k), u32(k), u32(k), u32(2 * n), u32(split), u32(m), u32(n // 128), u32(k // 128)],
    )
    blocks = a.astype(np.float64).reshape(m, -1, 128), b.astype(np.float64).reshape(n, -1, 128)
    want = np.einsum("mbk,nbk,mb,nb->mn", *blocks, sa.astype(np.float64), np.repeat(sb, 128, 0).astype(np.float64))
    compare_truncated(run, "c", out["c"], want, split, 1e-4 * k**0.5)


for target in TARGETS:
    for m in (32, 48, 64, 80, 96, 128):
        case(f"fp8 block-scaled GEMM {m} x 128", target)(
            lambda run, m=m: blockscale_gemm(run, m + 17, 256, 256, (m, 128))
        )
        case(f"fp8 block-scaled GEMM {m} x 128, split K", target)(
            lambda run, m=m: blockscale_gemm(run, 2 * m - 1, 128, 768, (m, 128), 3)
        )


def flat_gemm(run, m, n, k):
    """The same with f16 out and scales of b as blocks of k by blocks of columns; host code: asm_flatmm_a8w8_blockscale.cu."""
    run.result.size = f"{m} x {n} x {k}"
    a, b = run.normal(m, k).astype(e4m3fnuz), run.normal(n, k).astype(e4m3fnuz)
    sa = (0.5 + run.rng.random((k // 128, m))).astype(np.float32)
    sb = (0.5 + run.rng.random((k // 128, n // 128))).astype(np.float32)
    pad = -m % 128  # the kernel works on whole tiles
    out = run.launch(
        "flatmm_uk_gfx9_f16f8_128x256x128_1x4x1_16x16x32.co",
        (n // 256, -(-m // 128), 1),
        256,
        [np.pad(a, ((0, pad), (0, 0))), shuffle(b), None, np.pad(sa.ravel(), (0, pad)), sb, None]
        + [Out("d", (m + pad, n), np.float16)] + [None] * 4 + [u32(k), u32(n), u32(m)] + [u32(0)] * 3,
        slot=0,
    )
    blocks = a.astype(np.float64).reshape(m, -1, 128), b.astype(np.float64).reshape(n, -1, 128)
    want = np.einsum("mbk,nbk,bm,bn->mn", *blocks, sa.astype(np.float64), np.repeat(sb, 128, 1).astype(np.float64))
    run.compare("d", out["d"][:m], want, 2**-11, 1e-4 * k**0.5)


case("fp8 block-scaled GEMM 128 x 256, f16 out", "gfx942")(lambda run: flat_gemm(run, 150, 512, 384))


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def unpack_fp4(x):
    """Two values of each byte, the low one first."""
    return FP4[np.stack([x & 15, x >> 4], -1).reshape(x.shape[0], -1)]


def shuffle_scales(s):
    """Scales of 1 x 32 blocks as tiles of 32 rows by 8 columns, padded to 256 rows."""
    rows, columns = -(-s.shape[0] // 256) * 256, -(-s.shape[1] // 8) * 8
    padded = np.full((rows, columns), 127, np.uint8)
    padded[: s.shape[0], : s.shape[1]] = s
    tiles = padded.reshape(rows // 32, 2, 16, columns // 8, 2, 4).transpose(0, 3, 5, 2, 4, 1)
    return np.ascontiguousarray(tiles).reshape(rows, columns)


def f4_gemm(run, m, n, k, tile, shuffled=True, split=0):
    """d = a b^T with fp4 values and e8m0 scales of 1 x 32 blocks; host code: asm_gemm_a4w4.cu. K is cut
    in 2**split slices."""
    run.result.size = f"{m} x {n} x {k}" + (f", split K {2**split}" if split else "")
    a, b = (run.integers(0, 256, rows, k // 2, dtype=np.uint8) for rows in (m, n))
    sa, sb = (run.integers(122, 133, rows, k // 32, dtype=np.uint8) for rows in (m, n))
    packed_a, packed_b = shuffle_scales(sa), shuffle_scales(sb)
    pad = 32 if shuffled else tile[0]  # rows are stored up to the next multiple
    out = run.launch(
        f"f4gemm/f4gemm_bf16_per1x32Fp4_{'' if shuffled else 'no'}BpreShuffle_{tile[0]}x{tile[1]}.co",
        (-(-n // tile[1]), -(-m // tile[0]), 2**split),
        256,
        [Out("d", (-(-m // pad) * pad, n), fill=0 if split else None), None, a, shuffle(b) if shuffled else b, f32(1), f32(0)]
        + [u32(0), u32(0), u32(n), u32(0), u32(k), u32(0), u32(k), u32(0), u32(m), u32(n), u32(k)]
        + [packed_a, packed_b, u32(packed_a.shape[1]), u32(0), u32(packed_b.shape[1]), u32(0)]
        + [u32(split)] * shuffled,
    )
    scale = lambda s: np.repeat(2.0 ** (s.astype(int) - 127), 32, 1)  # noqa: E731
    want = (unpack_fp4(a) * scale(sa)) @ (unpack_fp4(b) * scale(sb)).T
    largest = float(np.abs(want).max())
    slices = (split > 0) * 2**split * 2**-8 * largest  # each is rounded and added to bf16 memory
    run.compare("d", out["d"][:m], want, 2**-8, 1e-6 * largest + slices)


for m, ns in {
    32: range(128, 1025, 128), 64: range(128, 1025, 128), 96: range(128, 641, 128), 128: (128, 256, 384, 512),
    160: (128, 256, 384), 192: (128, 256), 224: (128, 256), 256: (128, 256),
}.items():
    for n in ns:
        case(f"fp4 GEMM {m} x {n}, scaled MFMA", "gfx950")(lambda run, m=m, n=n: f4_gemm(run, m + 18, n, 512, (m, n)))
case("fp4 GEMM 256 x 256, plain weights", "gfx950")(lambda run: f4_gemm(run, 274, 512, 512, (256, 256), shuffled=False))
for tile in ((256, 256), (128, 512)):
    case(f"fp4 GEMM {tile[0]} x {tile[1]}, split K", "gfx950")(
        lambda run, tile=tile: f4_gemm(run, tile[0] - 7, tile[1], 1024, tile, split=1)
    )
