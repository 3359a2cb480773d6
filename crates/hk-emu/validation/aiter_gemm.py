"""AITER: matrix products and MoE gates. Arguments are in slots of 16 bytes, in the order of `KernelArgs` of the host code."""

import numpy as np
from harness import InOut, Out, bf16, case, e4m3, e4m3fnuz, f32, u32

FP8 = {"gfx942": e4m3fnuz, "gfx950": e4m3}
TARGETS = ("gfx942", "gfx950")


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
    case("MoE gate, softmax and top-k, f32", target)(lambda run: gate(run, 37, 128, 8, np.float32, 1))
    case("MoE gate, softmax and top-k, bf16", target)(lambda run: gate(run, 30, 256, 6, bf16, 0, subm=12))


def top_k_rows(run):
    """The indices of the 2048 largest of each row, in any order; host code: asm_topk_per_row_decode.cu."""
    rows, columns, k = 3, 5000, 2048
    run.result.size = f"{rows} x {columns}, top {k}"
    logits = run.normal(rows, columns)
    lengths = np.array([5000, 3001, 1500], np.int32)
    out = run.launch(
        "topk_per_row_decode/asm_top_k_per_row_decode.co",
        (rows, 1, 1),
        1024,
        [logits, lengths, Out("ids", (rows, k), np.int32), u32(columns), u32(1), u32(1)],
        slot=0,
        more=("--allow-misaligned",),
    )
    for row, n in enumerate(lengths):
        want = np.sort(np.argsort(-logits[row, :n], kind="stable")[:k])
        run.equal(f"row {row}", np.sort(out["ids"][row])[k - len(want) :], want)


case("top 2048 of rows, C++", "gfx942")(top_k_rows)


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
        run.compare("d", out["d"], want, 2**-7, 1e-4 * k**0.5)
    else:
        run.compare("d", out["d"], want, 1e-5, 1e-5 * k**0.5)


for target in TARGETS:
    case("bf16 GEMM", target)(
        lambda run: bf16_gemm(run, "bf16gemm_fp32bf16_tn_48x64_pf3_splitk", 70, 128, 256, (48, 64))
    )
    case("bf16 GEMM, shuffled weights, bf16 out, bias", target)(
        lambda run: bf16_gemm(
            run, "bf16gemm_fp32bf16_tn_64x64_bshuffle_splitk", 64, 192, 128, (64, 64), True, True, bf16
        )
    )
    case("bf16 GEMM, split K with a semaphore", target)(
        lambda run: bf16_gemm(
            run, "bf16gemm_fp32bf16_tn_32x64_splitk_clean", 33, 128, 512, (32, 64), False, False, np.float32, 4
        )
    )


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
    run.compare("c", out["c"], want, 2**-7 * split, 1e-6)


for target in TARGETS:
    case("i8 GEMM, scales per row and column", target)(lambda run: i8_gemm(run, 50, 256, 256, (32, 128)))
    case("i8 GEMM, 128 x 128", target)(lambda run: i8_gemm(run, 130, 128, 256, (128, 128)))


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
    run.compare("c", out["c"], want, 2**-7 * split, 1e-4 * k**0.5)


for target in TARGETS:
    case("fp8 block-scaled GEMM", target)(lambda run: blockscale_gemm(run, 40, 256, 256, (32, 128)))


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


def f4_gemm(run, m, n, k, tile):
    """d = a b^T with fp4 values and e8m0 scales of 1 x 32 blocks; host code: asm_gemm_a4w4.cu."""
    run.result.size = f"{m} x {n} x {k}"
    a, b = (run.integers(0, 256, rows, k // 2, dtype=np.uint8) for rows in (m, n))
    sa, sb = (run.integers(122, 133, rows, k // 32, dtype=np.uint8) for rows in (m, n))
    packed_a, packed_b = shuffle_scales(sa), shuffle_scales(sb)
    out = run.launch(
        f"f4gemm/f4gemm_bf16_per1x32Fp4_BpreShuffle_{tile[0]}x{tile[1]}.co",
        (-(-n // tile[1]), -(-m // tile[0]), 1),
        256,
        [Out("d", (-(-m // 32) * 32, n)), None, a, shuffle(b), f32(1), f32(0)]
        + [u32(0), u32(0), u32(n), u32(0), u32(k), u32(0), u32(k), u32(0), u32(m), u32(n), u32(k)]
        + [packed_a, packed_b, u32(packed_a.shape[1]), u32(0), u32(packed_b.shape[1]), u32(0), u32(0)],
    )
    scale = lambda s: np.repeat(2.0 ** (s.astype(int) - 127), 32, 1)  # noqa: E731
    want = (unpack_fp4(a) * scale(sa)) @ (unpack_fp4(b) * scale(sb)).T
    run.compare("d", out["d"][:m], want, 2**-7, 1e-6 * float(np.abs(want).max()))


case("fp4 GEMM, scaled MFMA", "gfx950")(lambda run: f4_gemm(run, 50, 256, 512, (32, 128)))
case("fp4 GEMM, 256 x 256", "gfx950")(lambda run: f4_gemm(run, 256, 256, 512, (256, 256)))
