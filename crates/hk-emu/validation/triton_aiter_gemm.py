"""GEMM in all precisions, by batches and groups, and of experts."""

import ml_dtypes
import numpy as np
from harness import FP8, InOut, Out, bf16, e4m3, starts_of
from triton_aiter import HALF_ULP, cdiv, f64, kernel, launch, register, strides

import triton.language as tl

# Tiles and options as in AITER's configurations of small M.
TILES = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 64, "GROUP_SIZE_M": 4, "cache_modifier": ".cg", "num_warps": 4, "num_stages": 2}
TILES |= {"waves_per_eu": 2, "matrix_instr_nonkdim": 16}


def tiles(m, n, splits=1):
    return (cdiv(m, TILES["BLOCK_SIZE_M"]) * cdiv(n, TILES["BLOCK_SIZE_N"]) * splits, 1, 1)


def run_gemm_a16w16(run, splits, mfma=16):
    m, n, k, part = 37, 150, 328, 128
    run.result.size = f"{m} x {n} x {k}" + (f", split K {splits}" if splits > 1 else "")
    a, b, bias = run.normal(m, k, dtype=bf16), run.normal(n, k, dtype=bf16), run.normal(n, dtype=bf16)
    shape = (splits, m, n)
    c = Out("c", shape, np.float32 if splits > 1 else bf16)
    args = [a, b, bias, c, m, n, k, k, 1, 1, k, *strides(c)]
    constants = TILES | {
        "BLOCK_SIZE_K": 64,
        "NUM_KSPLIT": splits,
        "matrix_instr_nonkdim": mfma,
        "SPLITK_BLOCK_SIZE": part if splits > 1 else k,
        "ADD_BIAS": splits == 1,
    }
    activation = {"activation": kernel(run, "activation:_gelu_tanh")[0], "use_activation": True}
    name = "gemm.basic.gemm_a16w16:_gemm_a16_w16_kernel"
    out = launch(run, name, tiles(m, n, splits), *args, SKIP_REDUCE=False, **activation, **constants)["c"]
    if splits > 1:
        args = [out, Out("c", (m, n)), bias, m, n, m * n, n, 1, n, 1]
        constants = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "ACTUAL_KSPLIT": splits, "MAX_KSPLIT": 4, "ADD_BIAS": True}
        out = launch(
            run,
            "common.splitk_reduce:_gemm_splitk_reduce_kernel",
            (cdiv(m, 16), cdiv(n, 64), 1),
            *args,
            **activation,
            **constants,
        )["c"]
    x = f64(a) @ f64(b).T + f64(bias)
    want = 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
    run.compare("c", out.reshape(m, n), want, HALF_ULP[bf16] + 1e-5, 1e-5 * k**0.5)


def run_gemm_a8w8(run, integers, mfma=16):
    m, n, k = 37, 150, 320
    run.result.size = f"{m} x {n} x {k}"
    dtype = np.int8 if integers else FP8[run.result.target]
    a, b = (
        run.integers(-127, 128, rows, k).astype(dtype) if integers else run.normal(rows, k).astype(dtype) for rows in (m, n)
    )
    a_scale, b_scale = (
        run.rng.uniform(0.01, 0.02, (m, 1)).astype(np.float32),
        run.rng.uniform(0.01, 0.02, (1, n)).astype(np.float32),
    )
    bias = run.normal(n, dtype=bf16)
    args = [a, b, a_scale, b_scale, bias, Out("c", (m, n)), m, n, k, k, 1, 1, k, 0, n, 1]
    constants = TILES | {
        "HAS_BIAS": True,
        "matrix_instr_nonkdim": mfma,
        "BLOCK_SIZE_K": 128,
        "NUM_KSPLIT": 1,
        "SPLITK_BLOCK_SIZE": k,
    }
    c = launch(run, "gemm.basic.gemm_a8w8:_gemm_a8w8_kernel", tiles(m, n), *args, **constants)["c"]
    x = f64(a) @ f64(b).T * a_scale * b_scale
    # bf16 before the bias and after it.
    run.compare("c", c, x + f64(bias), HALF_ULP[bf16] + 1e-5, float(HALF_ULP[bf16] * np.abs(x).max()))


def run_gemm_blockscale(run):
    m, n, k = 37, 200, 384
    run.result.size = f"{m} x {n} x {k}"
    dtype = FP8[run.result.target]
    a, b = run.normal(m, k).astype(dtype), run.normal(n, k).astype(dtype)
    a_scale = run.rng.uniform(0.5, 2, (m, k // 128)).astype(np.float32)
    b_scale = run.rng.uniform(0.5, 2, (cdiv(n, 128), k // 128)).astype(np.float32)
    args = [a, b, Out("c", (m, n)), a_scale, b_scale, m, n, k, k, 1, 1, k, 0, n, 1, *strides(a_scale), 1, k // 128]
    constants = TILES | {"GROUP_K": 128, "GROUP_N": 128, "BLOCK_SIZE_K": 128, "NUM_KSPLIT": 1, "SPLITK_BLOCK_SIZE": k}
    c = launch(run, "gemm.basic.gemm_a8w8_blockscale:_gemm_a8w8_blockscale_kernel", tiles(m, n), *args, **constants)["c"]
    a = f64(a) * a_scale.repeat(128, 1)
    b = f64(b) * b_scale.repeat(128, 0)[:n].repeat(128, 1)
    run.compare("c", c, a @ b.T, HALF_ULP[bf16] + 1e-5, 1e-5 * k**0.5)


def fp4(codes):
    """Values of packed fp4."""
    return f64(np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1).view(ml_dtypes.float4_e2m1fn))


def powers(e8m0):
    return np.exp2(f64(e8m0) - 127)


def run_gemm_mx(run, a_type, b_type, mfma):
    """MX formats with scales of blocks of 32, or else of rows of A and of blocks of 128 x 128 of B; MFMA of mfma x mfma."""
    m, n, k = 37, 150, 576 if a_type == b_type == "fp4" else 512  # fp8 has no masked loads along K
    run.result.size = f"{m} x {n} x {k}"

    def operand(rows, dtype):
        if dtype == "fp4":
            return run.integers(0, 256, rows, k // 2, dtype=np.uint8)
        return run.normal(rows, k).astype(e4m3)

    def exponents(*sizes):
        return run.integers(124, 131, *sizes, dtype=np.uint8)

    a, b = operand(m, a_type), operand(n, b_type)
    a_scale = run.rng.uniform(0.5, 2, (m, 1)).astype(np.float32) if a_type != b_type else exponents(m, k // 32)
    b_scale = exponents(n, k // 32) if b_type == "fp4" else exponents(cdiv(n, 128), cdiv(k, 128))
    args = [a, b, Out("c", (m, n)), a_scale, b_scale, m, n, a.shape[1], a.shape[1], 1, 1, b.shape[1], 0, n, 1]
    constants = TILES | {"BLOCK_SIZE_K": 256, "NUM_KSPLIT": 1, "SPLITK_BLOCK_SIZE": k, "matrix_instr_nonkdim": mfma}
    constants |= {"RAW_MASKED_LOADS": False} if a_type != b_type else {}
    name = f"gemm_a{'8' if a_type != b_type else 'fp8' if a_type == 'fp8' else 'fp4'}w{'fp8' if b_type == 'fp8' else 'fp4'}"
    c = launch(run, f"gemm.basic.{name}:_{name}_kernel", tiles(m, n), *args, *strides(a_scale, b_scale), **constants)["c"]
    a = fp4(a) if a_type == "fp4" else f64(a)
    b = fp4(b) if b_type == "fp4" else f64(b)
    a *= a_scale if a_type != b_type else powers(a_scale).repeat(32, 1)
    b *= powers(b_scale).repeat(32, 1) if b_type == "fp4" else powers(b_scale).repeat(128, 0)[:n].repeat(128, 1)[:, :k]
    run.compare("c", c, a @ b.T, HALF_ULP[bf16] + 1e-5, float(1e-6 * (np.abs(a) @ np.abs(b.T)).max()))


def run_batched_gemm(run):
    batch, m, n, k = 3, 37, 70, 136
    run.result.size = f"{batch} x {m} x {n} x {k}"
    a, b, bias = run.normal(batch, m, k, dtype=bf16), run.normal(batch, n, k, dtype=bf16), run.normal(batch, 1, n, dtype=bf16)
    c = Out("c", (batch, m, n))
    args = [a, b, c, bias, m, n, k, *strides(a), n * k, 1, k, *strides(c), 0, n]
    constants = {name: TILES[name] for name in TILES if name != "matrix_instr_nonkdim"}
    constants |= {"HAS_BIAS": True, "BLOCK_SIZE_K": 64, "NUM_KSPLIT": 1, "SPLITK_BLOCK_SIZE": k}
    grid = (batch, tiles(m, n)[0], 1)
    got = launch(run, "gemm.batched.batched_gemm_bf16:_batched_gemm_bf16_kernel", grid, *args, **constants)["c"]
    run.compare("c", got, f64(a) @ f64(b).swapaxes(1, 2) + f64(bias), HALF_ULP[bf16] + 1e-5, 1e-5 * k**0.5)


def run_grouped_gemm(run, stealing):
    """Groups of rows, one of them empty; tiles in turn, or from a counter."""
    rows, k, n, programs = (37, 0, 5, 40), 136, 100, 5
    run.result.size = f"{', '.join(map(str, rows))} rows, {k} x {n}"
    first = starts_of(rows)
    a, b, bias = (
        run.normal(first[-1], k, dtype=bf16),
        run.normal(len(rows), n, k, dtype=bf16),
        run.normal(len(rows), n, dtype=bf16),
    )
    counter = InOut("counter", np.array([programs], np.int32)) if stealing else None
    args = [a, b, np.array(rows, np.int32), Out("c", (int(first[-1]), n)), bias, counter, int(first[-1]), k, n, len(rows)]
    constants = {"TRANS_RHS": True, "BLOCK_SIZE_G": 4, "BLOCK_SIZE_M": 32, "BLOCK_SIZE_K": 64, "BLOCK_SIZE_N": 32}
    constants |= {"GROUP_SIZE": 1}
    constants |= {"GRID_DIM": programs, "USE_BIAS": True, "WORK_STEALING": stealing}
    out = launch(run, "gmm:gmm_kernel", (programs, 1, 1), *args, num_warps=4, num_stages=2, **constants)
    if stealing:
        run.equal("counter", out["counter"], [programs + sum(cdiv(m, 32) * cdiv(n, 32) for m in rows)])
    want = np.concatenate([f64(a[first[g] : first[g + 1]]) @ f64(b[g]).T + f64(bias[g]) for g in range(len(rows))])
    run.compare("c", out["c"], want, HALF_ULP[bf16] + 1e-5, 1e-5 * k**0.5)


def sorted_tokens(ids, experts, block):
    """Positions in `ids` by expert, each expert padded to whole blocks, and the experts of blocks."""
    flat, order, owners = ids.ravel(), [], []
    for expert in range(experts):
        mine = np.flatnonzero(flat == expert)
        blocks = cdiv(len(mine), block)
        order += [*mine, *[flat.size] * (blocks * block - len(mine))]
        owners += [expert] * blocks
    return np.array(order, np.int32), np.array(owners, np.int32)


MOE = (23, 6, 2, 16)  # tokens, experts, top, block


def routes(run):
    tokens, experts, top, block = MOE
    ids = np.stack([run.rng.permutation(experts - 1)[:top] for _ in range(tokens)]).astype(np.int32)  # the last has no tokens
    return ids, *sorted_tokens(ids, experts, block)


def run_moe_align(run):
    tokens, experts, top, block = MOE
    run.result.size = f"{tokens} tokens, {experts} experts, top {top}, blocks of {block}"
    ids, order, owners = routes(run)
    some = {"num_experts": experts}
    slices = some | {"numel": ids.size, "tokens_per_thread": cdiv(ids.size, experts)}
    name, grid = "moe.moe_align_block_size:_moe_align_block_size_stage", (experts, 1, 1)
    counts = launch(run, f"{name}1_kernel", grid, ids, InOut("n", np.zeros((experts + 1, experts), np.int32)), **slices)["n"]
    counts = launch(run, f"{name}2_kernel", grid, InOut("n", counts), **some)["n"]
    total, ends = Out("total", (1,), np.int32), InOut("ends", np.zeros(experts + 1, np.int32))
    out = launch(run, f"{name}3_kernel", (1, 1, 1), total, counts, ends, block_size=block, **some)
    run.equal("total", out["total"], [len(order)])
    spare = np.full(experts * block, ids.size, np.int32)  # as many more as there may be at most
    args = [ids, InOut("order", np.full(len(order) + len(spare), ids.size, np.int32))]
    args += [InOut("owners", np.full(len(owners) + experts, -7, np.int32))]
    out = launch(run, f"{name}4_kernel", grid, *args, InOut("n", counts), out["ends"], block_size=block, **slices)
    run.equal("order", out["order"], np.concatenate([order, spare]))
    run.equal("experts", out["owners"], np.concatenate([owners, np.full(experts, -7)]))


def run_moe_gemm(run, fp8):
    (tokens, experts, top, block), n, k = MOE, 200, 256
    run.result.size = f"{tokens} tokens, {experts} experts, top {top}, {n} x {k}"
    ids, order, owners = routes(run)
    dtype = FP8[run.result.target] if fp8 else bf16
    a, b = run.normal(tokens, k).astype(dtype), run.normal(experts, n, k).astype(dtype)
    a_scale = run.rng.uniform(0.5, 2, (tokens, k // 128)).astype(np.float32) if fp8 else None
    b_scale = run.rng.uniform(0.5, 2, (experts, cdiv(n, 128), k // 128)).astype(np.float32) if fp8 else None
    weights = run.rng.uniform(0, 1, ids.shape).astype(np.float32)
    owners[1] = -1  # an expert of another rank: zeros
    args = [a, b, Out("c", (tokens, top, n)), a_scale, b_scale, weights, order, owners, np.array([len(order)], np.int32)]
    args += [n, k, ids.size, k, 1, n * k, 1, k, n, 1]
    args += [*strides(a_scale), strides(b_scale)[0], 1, k // 128] if fp8 else [0] * 5
    constants = {"group_n": 128 * fp8, "group_k": 128 * fp8, "BLOCK_SIZE_M": block, "BLOCK_SIZE_N": 64}
    constants |= {"BLOCK_SIZE_K": 128 if fp8 else 64}
    constants |= {"GROUP_SIZE_M": 4, "MUL_ROUTED_WEIGHT": True, "top_k": top, "compute_type": tl.bfloat16}
    constants |= {"use_fp8_w8a8": fp8}
    constants |= {"use_int8_w8a16": False, "NUM_XCDS": 8}
    grid = (cdiv(len(order), block) * cdiv(n, 64) + 3, 1, 1)  # more blocks than there is work for
    options = {"num_warps": 4, "num_stages": 2, "waves_per_eu": 0, "matrix_instr_nonkdim": 16, "kpack": 1}
    c = launch(run, "moe.moe_op:_fused_moe_kernel", grid, *args, **constants, **options)["c"]
    a, b = f64(a, b)
    if fp8:
        a, b = a * a_scale.repeat(128, 1), b * b_scale.repeat(128, 1)[:, :n].repeat(128, 2)
    want = np.einsum("tk,tpnk->tpn", a, b[ids]) * weights[:, :, None]
    skipped = order[block : 2 * block]
    want.reshape(-1, n)[skipped[skipped < ids.size]] = 0
    run.compare("c", c, want, HALF_ULP[bf16] + 1e-5, 1e-5 * k**0.5)


def run_moe_int4(run):
    (tokens, experts, top, block), n, k, group = MOE, 96, 128, 64
    run.result.size = f"{tokens} tokens, {experts} experts, top {top}, {n} x {k}, groups of {group}"
    ids, order, owners = routes(run)
    a, b = run.normal(tokens, k, dtype=bf16), run.integers(0, 256, experts, n, k // 2, dtype=np.uint8)
    scales = run.rng.uniform(0.01, 0.1, (experts, n, k // group)).astype(bf16)
    zeros = run.integers(0, 256, experts, n // 2, k // group, dtype=np.uint8)
    weights = run.rng.uniform(0, 1, ids.shape).astype(np.float32)
    args = [a, b, Out("c", (tokens, top, n)), scales, zeros, weights, order, owners, np.array([len(order)], np.int32)]
    args += [len(order), ids.size]
    args += [
        k,
        1,
        n * k // 2,
        1,
        k // 2,
        n,
        1,
        *(strides(scales)[i] for i in (0, 2, 1)),
        *(strides(zeros)[i] for i in (0, 2, 1)),
    ]
    constants = {"N": n, "K": k, "group_size": group, "BLOCK_SIZE_M": block, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64}
    constants |= {"GROUP_SIZE_M": 1}
    constants |= {"MUL_ROUTED_WEIGHT": True, "top_k": top, "compute_type": tl.bfloat16, "has_zp": True}
    constants |= {"use_int4_w4a16": True}
    constants |= {"use_int8_w8a16": False, "NUM_XCDS": 8, "num_warps": 4, "num_stages": 2, "matrix_instr_nonkdim": 16}
    grid = (len(order) // block * (n // 32), 1, 1)
    c = launch(run, "moe.moe_op:_fused_moe_kernel_gptq_awq", grid, *args, **constants)["c"]
    b = np.stack([b & 15, b >> 4], -1).reshape(experts, n, k) - f64(
        np.stack([zeros & 15, zeros >> 4], 2).reshape(scales.shape)
    ).repeat(group, 2)
    b = f64((b * f64(scales).repeat(group, 2)).astype(bf16))
    want = np.einsum("tk,tpnk->tpn", f64(a), b[ids]) * weights[:, :, None]
    run.compare("c", c, want, HALF_ULP[bf16] + 1e-5, 1e-5 * k**0.5)


def run_sigmoid_top1(run):
    tokens, experts, dim = 32, 16, 200
    run.result.size = f"{tokens} x {experts} x {dim}"
    x, w = run.normal(tokens, dim, dtype=bf16), run.normal(dim, experts, dtype=bf16, scale=0.05)
    outs = [Out("ids", (tokens, 2), np.int32), Out("weights", (tokens, 2), np.float32)]
    args = [x, w, *outs, tokens, experts, dim, *strides(x, w, *outs)]
    constants = {"BLOCK_M": 16, "BLOCK_K": 64, "BLOCK_N": 16, "TOPK": 1, "FUSED_SHARED_EXPERTS": True}
    name = "moe.moe_routing_sigmoid_top1_fused:_routing_sigmoid_top1_kernel"
    out = launch(run, name, (tokens // 16, 1, 1), *args, num_warps=4, num_stages=1, **constants)
    gates = 1 / (1 + np.exp(-(f64(x) @ f64(w))))
    run.equal("ids", out["ids"], np.stack([gates.argmax(1), np.full(tokens, experts)], 1))
    run.compare("weights", out["weights"], np.stack([gates.max(1), np.ones(tokens)], 1), 1e-5, 0)


register(
    [
        ("GEMM a16w16, bias, gelu", lambda run: run_gemm_a16w16(run, 1)),
        ("GEMM a16w16, split K, bias, gelu", lambda run: run_gemm_a16w16(run, 3)),
        ("GEMM a8w8, i8, bias", lambda run: run_gemm_a8w8(run, True)),
        ("GEMM a8w8, fp8, bias", lambda run: run_gemm_a8w8(run, False)),
        ("GEMM a8w8, block scales", run_gemm_blockscale),
        ("GEMM a16w16, 32 x 32 MFMA", lambda run: run_gemm_a16w16(run, 1, 32)),
        ("GEMM a8w8, i8, 32 x 32 MFMA", lambda run: run_gemm_a8w8(run, True, 32)),
        ("GEMM a8w8, fp8, 32 x 32 MFMA", lambda run: run_gemm_a8w8(run, False, 32)),
        ("GEMM MX fp4", lambda run: run_gemm_mx(run, "fp4", "fp4", 16)),
        ("GEMM MX fp4, 32 x 32 MFMA", lambda run: run_gemm_mx(run, "fp4", "fp4", 32)),
        ("GEMM MX fp8", lambda run: run_gemm_mx(run, "fp8", "fp8", 16)),
        ("GEMM MX fp8, 32 x 32 MFMA", lambda run: run_gemm_mx(run, "fp8", "fp8", 32)),
        ("GEMM fp8 by MX fp4", lambda run: run_gemm_mx(run, "fp8", "fp4", 16)),
        ("GEMM fp8 by MX fp4, 32 x 32 MFMA", lambda run: run_gemm_mx(run, "fp8", "fp4", 32)),
        ("GEMM by batches", run_batched_gemm),
        ("GEMM by groups of rows", lambda run: run_grouped_gemm(run, False)),
        ("GEMM by groups of rows, work stealing", lambda run: run_grouped_gemm(run, True)),
        ("MoE gate, sigmoid and top-1", run_sigmoid_top1),
        ("MoE GEMM, int4 weights with zero points", run_moe_int4),
        ("MoE alignment in four stages", run_moe_align),
        ("MoE GEMM, bf16", lambda run: run_moe_gemm(run, False)),
        ("MoE GEMM, fp8, block scales", lambda run: run_moe_gemm(run, True)),
    ]
)
