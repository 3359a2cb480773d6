"""Attention, dense, paged and latent, and the gated delta rule."""

import numpy as np
from harness import FP8, InOut, Out, bf16, silu, starts_of
from triton_aiter import HALF_ULP, cdiv, f64, launch, register, strides
from triton_aiter_rows import rope

import triton.language as tl


def attention(q, k, v, scale, seen=True, cap=0.0, sinks=None):
    """o[query, head, dim] of q[query, head, dim], k and v[key, group, dim]; sinks are logits of the heads without a value."""
    k, v = (x.repeat(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = np.einsum("qhd,khd->hqk", q, k) * scale
    s = np.where(seen, cap * np.tanh(s / cap) if cap else s, -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(f64(sinks)[:, None, None] - top))
    return np.einsum("hqk,khd->qhd", p / total, v)


def compare_attention(run, what, got, q, k, v, *args, **rest):
    """p and the output round to bf16: each p off by half a unit moves the output by that share of the mean |v| under p."""
    q, k, v = f64(q, k, v)
    spread = float(attention(q, k, np.abs(v), *args, **rest).max())
    run.compare(what, got, attention(q, k, v, *args, **rest), HALF_ULP[bf16] + 1e-5, HALF_ULP[bf16] * spread)


def pages(run, lengths, page):
    """A block table of shuffled pages, and their number."""
    count = sum(cdiv(n, page) for n in lengths) + 3
    free = list(run.rng.permutation(count))
    table = np.zeros((len(lengths), cdiv(max(lengths), page)), np.int32)
    for row, length in zip(table, lengths):
        for i in range(cdiv(length, page)):
            row[i] = free.pop()
    return table, count


LENGTHS = (150, 1, 67)


def run_paged_decode(run, heads, groups, fp8=False, splits=False):
    page, dim, part = 16, 64, 64
    run.result.size = f"{len(LENGTHS)} sequences of {', '.join(map(str, LENGTHS))}, heads {heads}/{groups}, dim {dim}"
    table, count = pages(run, LENGTHS, page)
    q = run.normal(len(LENGTHS), heads, dim, dtype=bf16)
    k, v = (run.normal(count, groups, page, dim).astype(FP8[run.result.target] if fp8 else bf16) for _ in range(2))
    k_scale, v_scale = (0.5, 2.0) if fp8 else (1.0, 1.0)
    lengths = np.array(LENGTHS, np.int32)
    out = Out("o", q.shape)
    inputs = [q, k, v, table, lengths]
    factors = [dim**-0.5, k_scale, v_scale]
    group = heads // groups
    dims = {"HEAD_SZ": dim, "HEAD_SZ_POW2": dim, "QUERY_GRP_SZ": group, "QUERY_GRP_SZ_POW2": 16}
    constants = {"compute_type": tl.bfloat16, "KV_BLK_SZ": page, "KV_BLK_SZ_POW2": page}
    name = "attention.pa_decode:_paged_attn_decode"
    if splits:
        parts = cdiv(max(LENGTHS), part)
        shape = (len(LENGTHS), groups, parts, group)
        outs = [Out("sums", shape, np.float32), Out("tops", shape, np.float32), Out("o", (*shape, dim))]
        args = [*outs, *inputs, *factors, None, *strides(outs[0])[:3], *strides(outs[2])[:4], *strides(q)[:2]]
        args += [*strides(k)[:3], table.shape[1]]
        grid = (len(LENGTHS), groups, parts)
        got = launch(run, f"{name}_v2_w_dot_kernel", grid, *args, SEQ_PARTITION_SZ=part, **constants, **dims)
        args = [out, got["sums"], got["tops"], got["o"], lengths, *strides(out)[:2], *strides(outs[0])[:3]]
        args += [*strides(outs[2])[:4]]
        constants = {"SEQ_PARTITION_SZ": part, "MAX_NUM_SEQ_PARTITIONS_POW2": 4}
        got = launch(run, f"{name}_v2_w_dot_reduce_kernel", grid[:2] + (1,), *args, **constants, **dims)["o"]
    else:
        args = [out, *inputs, None, *factors, *strides(out)[:2], *strides(q, k), table.shape[1]]
        got = launch(run, f"{name}_v1_w_dot_kernel", (len(LENGTHS), groups, 1), *args, **constants, **dims)["o"]
    for i, n in enumerate(LENGTHS):
        keys, values = (f64(x)[table[i]].swapaxes(1, 2).reshape(-1, groups, dim)[:n] for x in (k, v))
        compare_attention(run, f"o {i}", got[i : i + 1], q[i : i + 1], keys * k_scale, values * v_scale, dim**-0.5)


def run_prefill(run):
    heads, groups, dim = 4, 2, 64
    run.result.size = f"{len(LENGTHS)} sequences of {', '.join(map(str, LENGTHS))}, heads {heads}/{groups}, dim {dim}"
    first = starts_of(LENGTHS)
    q = run.normal(first[-1], heads, dim, dtype=bf16)
    k, v = (run.normal(first[-1], groups, dim, dtype=bf16) for _ in range(2))
    out = Out("o", q.shape)
    at = [s for x in (q, k, v, out) for s in strides(x)[:2]]
    args = [q, k, v, dim**-0.5, first[:-1], np.array(LENGTHS, np.int32), out, *at]
    constants = {"kv_group_num": heads // groups, "BLOCK_M": 128, "BLOCK_DMODEL": dim, "BLOCK_N": 128, "IS_CAUSAL": True}
    constants |= {"Lk": dim}
    grid = (len(LENGTHS), heads, cdiv(max(LENGTHS), 128))
    got = launch(run, "attention.prefill_attention:_fwd_kernel", grid, *args, num_warps=4, num_stages=1, **constants)["o"]
    for i, n in enumerate(LENGTHS):
        rows = slice(first[i], first[i + 1])
        compare_attention(run, f"o {i}", got[rows], q[rows], k[rows], v[rows], dim**-0.5, np.tri(n) > 0)


def run_flash_attention(run):
    batch, queries, keys, heads, groups, dim = 2, 100, 150, 4, 2, 64
    run.result.size = f"b {batch}, q {queries}, k {keys}, heads {heads}/{groups}, dim {dim}"
    q = run.normal(batch, queries, heads, dim, dtype=bf16)
    k, v = (run.normal(batch, keys, groups, dim, dtype=bf16) for _ in range(2))
    out, lse = Out("o", q.shape), Out("lse", (batch, heads, queries), np.float32)
    at = [s for x in (q, k, v) for s in np.array(strides(x))[[0, 2, 1, 3]]]
    args = [q, k, v, None, None, None, out, None, None, None, lse, None, *at, 0, 0, 0]
    args += [*np.array(strides(out))[[0, 2, 1, 3]]]
    args += [0] * 6 + [*strides(lse), dim**-0.5, None, None, 0.0, 0, 0, queries, keys, batch]
    constants = {"IS_CAUSAL": True, "NUM_Q_HEADS": heads, "NUM_K_HEADS": groups, "PRELOAD_V": False, "BLOCK_M": 64}
    constants |= {"BLOCK_N": 64}
    constants |= {"BLOCK_DMODEL": dim, "BLOCK_DMODEL_POW2": dim, "BLOCK_DMODEL_PE": 0, "RETURN_SCORES": False}
    constants |= {"ENABLE_DROPOUT": False}
    constants |= {"IS_FP8": False, "FP8_MAX": 448.0, "VARLEN": False, "NUM_XCD": 8, "SWIZZLE": "default"}
    constants |= {"USE_INT64_STRIDES": True}
    constants |= {"ENABLE_SINK": False, "SLIDING_WINDOW": 0, "HEAD_STRIDE_ALIGNED_8": True}
    grid = (batch * heads * cdiv(queries, 64), 1, 1)
    got = launch(run, "attention.mha:_attn_fwd", grid, *args, num_warps=4, num_stages=1, waves_per_eu=2, **constants)
    seen = np.tri(queries, keys, keys - queries) > 0
    for i in range(batch):
        compare_attention(run, f"o {i}", got["o"][i], q[i], k[i], v[i], dim**-0.5, seen)
    s = np.einsum("bqhd,bkhd->bhqk", f64(q), f64(k).repeat(heads // groups, 2)) * dim**-0.5
    run.compare("lse", got["lse"], np.log(np.where(seen, np.exp(s), 0).sum(-1)), 1e-5, 1e-5)


def run_flash_backward(run, causal):
    batch, queries, keys, heads, groups, dim = 2, 100, 150, 4, 2, 64
    run.result.size = f"b {batch}, q {queries}, k {keys}, heads {heads}/{groups}, dim {dim}"
    q, do = (run.normal(batch, queries, heads, dim, dtype=bf16) for _ in range(2))
    k, v = (run.normal(batch, keys, groups, dim, dtype=bf16) for _ in range(2))
    scale, group = dim**-0.5, heads // groups
    wide = [x.repeat(group, 2) for x in f64(k, v)]
    s = np.einsum("bqhd,bkhd->bhqk", f64(q), wide[0]) * scale
    s = np.where(np.tri(queries, keys, keys - queries) > 0, s, -np.inf) if causal else s
    lse = np.log(np.exp(s).sum(-1))
    p = np.exp(s - lse[..., None])
    o = np.einsum("bhqk,bkhd->bqhd", p, wide[1]).astype(bf16)
    by_head = [0, 2, 1, 3]  # strides of batch, head, token, dim
    at = {n: [strides(x)[i] for i in by_head] for n, x in (("q", q), ("k", k))}
    delta = Out("delta", lse.shape, np.float32)
    args = [o, do, delta, *at["q"], *at["q"], *strides(delta), 0, None, queries, None]
    sizes = {"BLOCK_D_MODEL": dim, "BLOCK_D_MODEL_POW2": dim}
    name, grid = "attention.mha_onekernel_bwd:", (cdiv(queries, 64), batch, heads)
    delta = launch(run, f"{name}_bwd_preprocess", grid, *args, BLOCK_M=64, IS_VARLEN=False, IS_FP8=False, **sizes)["delta"]
    sums = np.einsum("bqhd,bqhd->bhq", *f64(o, do))
    run.compare("delta", delta, sums, 1e-5, 1e-5)
    outs = [Out(n, x.shape) for n, x in (("dq", q), ("dk", k), ("dv", v))]
    args = [q, k, v, None, scale, do, *outs, None, lse.astype(np.float32), delta, *at["q"], *at["k"], *at["k"]]
    args += [*at["q"], *at["k"], *at["k"], *strides(lse), *at["q"], *[0] * 10, heads, groups, None, None, queries, keys]
    args += [None, 0.0, 0, 0, None, None, None, None, None]
    constants = {"BLOCK_M1": 32, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 32, "BLK_SLICE_FACTOR": 2, "HEAD_DIM": dim}
    constants |= {"ACTUAL_HEAD_DIM": dim, "PE_HEAD_DIM": 0, "ENABLE_DROPOUT": False, "IS_VARLEN": False, "USE_ALIBI": False}
    constants |= {"USE_EXP2": True, "IS_FP8": False, "FP8_MAX": 448.0, "DEBUG_TRITON": False, "DEBUG_TRITON_DETAIL": False}
    constants |= {"USE_INT64_STRIDES": True, "ENABLE_SINK": False, "SLIDING_WINDOW": 0, "num_warps": 4, "num_stages": 1}
    constants |= {"waves_per_eu": 1, "matrix_instr_nonkdim": 16}
    kernel = f"{name}bwd_kernel_{'causal' if causal else 'noncausal'}"
    got = launch(run, kernel, (groups, cdiv(keys, 64), batch), *args, **constants)
    ds = p * (np.einsum("bqhd,bkhd->bhqk", f64(do), wide[1]) - sums[..., None]) * scale

    def products(x, y, magnitude=lambda x: x):
        x, y = magnitude(x), magnitude(f64(y))
        return np.einsum("bhqk,bqhd->bkhd", x, y).reshape(batch, keys, groups, group, dim).sum(3)

    # p and the gradient of the scores round to bf16.
    for what, x, y in (("dk", ds, q), ("dv", p, do)):
        bound = HALF_ULP[bf16] * float(products(x, y, np.abs).max())
        run.compare(what, got[what], products(x, y), HALF_ULP[bf16] + 1e-5, bound)
    bound = HALF_ULP[bf16] * float(np.einsum("bhqk,bkhd->bqhd", np.abs(ds), np.abs(wide[0])).max())
    run.compare("dq", got["dq"], np.einsum("bhqk,bkhd->bqhd", ds, wide[0]), HALF_ULP[bf16] + 1e-5, bound)


def run_unified_attention(run, segments):
    """Sequences with and without a context in a paged cache; a window and a soft cap in one pass, or by segments; sinks."""
    heads, groups, dim, page = 8, 2, 64, 16
    window, cap = (0, 0.0) if segments else (40, 5.0)
    queries = (33, 1, 20)
    lengths = np.array([150, 67, 20], np.int32)
    run.result.size = f"queries {queries}, keys {tuple(map(int, lengths))}, heads {heads}/{groups}, dim {dim}"
    table, count = pages(run, lengths, page)
    first = starts_of(queries)
    tokens, some = int(first[-1]), len(queries)
    q = run.normal(tokens, heads, dim, dtype=bf16)
    k, v = (run.normal(count, page, groups, dim, dtype=bf16) for _ in range(2))
    sinks = run.normal(heads)
    block_q = 16 * groups // heads
    out = Out("o", q.shape)
    inputs, factors = [q, k, v, sinks, table, lengths, None, None], [None, None, None, None, cap or None]
    caches = [0, *strides(k)[:3], *strides(v)[:3], first, some]
    sizes = {"HEAD_SIZE": dim, "HEAD_SIZE_PADDED": dim, "num_query_heads": heads, "TILE_SIZE": 32, "BLOCK_Q": block_q}
    constants = {"num_queries_per_kv": heads // groups, "BLOCK_SIZE": page, "USE_ALIBI_SLOPES": False, "USE_QQ_BIAS": False}
    constants |= {"USE_SOFTCAP": cap > 0, "USE_SINKS": True, "SLIDING_WINDOW": window, "stride_k_cache_3": 1}
    constants |= {"stride_v_cache_3": 1}
    constants |= {"BLOCK_M": 16, "num_warps": 2, "num_stages": 2}
    limits = {"FP8_MIN": -448.0, "FP8_MAX": 448.0}
    name, blocks = "attention.unified_attention:", tokens // block_q + some
    at = [table.shape[1], *strides(q)[:2]]
    if segments:
        parts = [Out("part", (tokens, heads, segments, dim), np.float32)]
        parts += [Out(n, (tokens, heads, segments), np.float32) for n in ("top", "sum")]
        args = [*parts, *inputs, dim**-0.5, *factors, *at, *caches]
        constants |= {"NUM_SEGMENTS_PER_SEQ": segments, "waves_per_eu": 2} | sizes
        got = launch(run, f"{name}kernel_unified_attention_3d", (blocks, groups, segments), *args, **constants)
        args = [out, *(got[n.name] for n in parts), lengths, some, None, *strides(out)[:2], table.shape[1], first]
        got = launch(
            run, f"{name}reduce_segments", (tokens, heads, 1), *args, NUM_SEGMENTS_PER_SEQ=segments, **sizes, **limits
        )["o"]
    else:
        args = [out, *inputs, *factors, *at, *strides(out)[:2], *caches]
        got = launch(
            run,
            f"{name}kernel_unified_attention_2d",
            (groups, blocks, 1),
            *args,
            scale=dim**-0.5,
            **constants,
            **sizes,
            **limits,
        )["o"]
    for i, n in enumerate(lengths):
        rows = slice(first[i], first[i + 1])
        keys, values = (x[table[i]].reshape(-1, groups, dim)[:n] for x in (k, v))
        distance = np.arange(n - queries[i], n)[:, None] - np.arange(n)
        seen = (distance >= 0) & (distance < (window or n))
        compare_attention(run, f"o {i}", got[rows], q[rows], keys, values, dim**-0.5, seen, cap=cap, sinks=sinks)


def run_extend_attention(run):
    """New tokens see all of their prefix, scattered in a cache, and each other causally."""
    prefixes, lengths, heads, groups, dim, cap = (40, 0, 75), (70, 5, 1), 8, 2, 64, 5.0
    run.result.size = f"prefixes {prefixes}, new {lengths}, heads {heads}/{groups}, dim {dim}"
    first, before = starts_of(lengths), starts_of(prefixes)
    slots = int(before[-1]) + 9
    q = run.normal(first[-1], heads, dim, dtype=bf16)
    k, v = (run.normal(first[-1], groups, dim, dtype=bf16) for _ in range(2))
    old_k, old_v = (run.normal(slots, groups, dim, dtype=bf16) for _ in range(2))
    indices = run.rng.permutation(slots)[: before[-1]].astype(np.int32)
    out = Out("o", q.shape)
    at = [s for x in (q, k, v, out, old_k, old_v) for s in strides(x)[:2]]
    args = [q, k, v, out, old_k, old_v, first, before, indices, None, None, dim**-0.5, heads // groups, *at]
    constants = {"logit_cap": cap, "Lq": dim, "Lv": dim, "BLOCK_DMODEL": dim, "BLOCK_DPE": 0, "BLOCK_DV": dim}
    constants |= {"BLOCK_M": 32, "BLOCK_N": 32}
    constants |= {"USE_CUSTOM_MASK": False, "IS_CAUSAL": True, "SKIP_PREFIX_CUSTOM_MASK": True, "STORE_TRANSPOSE": True}
    constants |= {"NUM_Q_HEADS": heads, "NUM_BLOCKS": cdiv(max(lengths), 32), "NUM_XCDS": 8, "num_warps": 4}
    constants |= {"num_stages": 1, "waves_per_eu": 2}
    grid = (heads * cdiv(max(lengths), 32) * len(lengths), 1, 1)
    got = launch(run, "attention.extend_attention:_fwd_kernel", grid, *args, **constants)["o"]
    for i, n in enumerate(lengths):
        mine, theirs = slice(first[i], first[i + 1]), indices[before[i] : before[i + 1]]
        keys, values = (np.concatenate([a[theirs], b[mine]]) for a, b in ((old_k, k), (old_v, v)))
        seen = np.tri(n, prefixes[i] + n, prefixes[i]) > 0
        compare_attention(run, f"o {i}", got[mine], q[mine], keys, values, dim**-0.5, seen, cap=cap)


def run_lean_attention(run):
    """Stream-K: blocks share the tiles evenly; the first of an output tile waits for the partial sums of the others."""
    batch, rows, heads, groups, dim, tiles_of, programs = 2, 16, 2, 1, 64, 3, 5
    keys, per_head = 64 * tiles_of, batch * tiles_of
    most = cdiv(heads * per_head, programs)
    run.result.size = f"b {batch}, q {rows}, k {keys}, heads {heads}/{groups}, dim {dim}, {programs} blocks"
    q = run.normal(batch * rows, heads, dim, dtype=bf16)
    k, v = (run.normal(batch * keys, groups, dim, dtype=bf16) for _ in range(2))
    parts = [Out(name, (programs, rows), np.float32) for name in ("top", "sum")] + [
        Out("part", (programs, rows, dim), np.float32)
    ]
    out, ends = Out("o", q.shape), np.arange(tiles_of, per_head + 1, tiles_of, dtype=np.int32)
    args = [0, q, k, v, *parts, out, ends, InOut("locks", np.zeros(programs, np.int32)), *strides(q, k, v, out), rows]
    args += [*strides(parts[2]), dim**-0.5]
    constants = {"is_pod": False, "HEADS_PER_XCD": 0, "HEAD_DIM_ORIG": dim, "HEAD_DIM": dim, "BLOCK_M": rows}
    constants |= {"BLOCK_N": 64, "MASKED_BLOCKS": 0}
    constants |= {"XCD_REMAP": False, "NUM_XCDS": 8, "batch_size": batch, "causal": False, "num_m_blocks": 1}
    constants |= {"num_n_blocks": tiles_of}
    constants |= {"total_programs": programs, "high_load_wgs": heads * per_head - (most - 1) * programs}
    constants |= {"max_tiles_per_wg": most}
    constants |= {"tiles_per_head": per_head, "num_splits": 1 + (per_head + most - 3) // (most - 1)}
    constants |= {"max_output_tile_cnt": 6}
    constants |= {"gqa_group_size": heads // groups, "use_64_indexing": False, "RAGGED_BATCH": False, "num_warps": 4}
    constants |= {"num_stages": 1}
    got = launch(
        run, "attention.lean_atten:la_persistent", (programs, 1, 1), *args, **constants, waves_per_eu=2, matrix_instr_nonkdim=16
    )["o"]
    for i in range(batch):
        mine, theirs = slice(i * rows, (i + 1) * rows), slice(i * keys, (i + 1) * keys)
        compare_attention(run, f"o {i}", got[mine], q[mine], k[theirs], v[theirs], dim**-0.5)


def run_mla_decode(run):
    """Rope by quarter turns, which are exact, of the queries and of the last key."""
    lengths, heads, lora, pe, splits = (75, 1, 40), 16, 128, 64, 3
    run.result.size = (
        f"{len(lengths)} sequences of {', '.join(map(str, lengths))}, heads {heads}, dim {lora} + {pe}, splits {splits}"
    )
    first = starts_of(lengths)
    slots, batch = int(first[-1]) + 9, len(lengths)
    q, kv = run.normal(batch, heads, lora + pe, dtype=bf16), run.normal(slots, 1, lora + pe, dtype=bf16)
    turns = run.integers(0, 4, 100, pe // 2)
    cos_sin = np.concatenate([np.array([1, 0, -1, 0])[turns], np.array([0, 1, 0, -1])[turns]], 1).astype(bf16)
    positions = np.array(lengths, np.int64) + 4
    indices = run.rng.permutation(slots)[: first[-1]].astype(np.int32)
    scale = (lora + pe) ** -0.5
    part, last = Out("part", (batch, heads, splits, lora + 1), np.float32), Out("last", (batch, pe))
    args = [q, kv, kv, cos_sin, positions, scale, first, indices, part, last, *strides(q)[:2], lora + pe, lora + pe]
    args += [*strides(part)[:3]]
    constants = {"rotary_dim": pe, "kv_lora_rank": lora, "qk_rope_head_dim": pe, "kv_group_num": heads}
    constants |= {"q_head_num": heads, "batch": batch}
    constants |= {"BLOCK_C": lora, "BLOCK_R": pe, "BLOCK_N": 32, "BLOCK_H": 16, "NUM_KV_SPLITS": splits, "logit_cap": 0.0}
    constants |= {"USE_ROPE": True, "IS_NEOX_STYLE": True, "num_warps": 4, "num_stages": 1, "waves_per_eu": 2}
    constants |= {"matrix_instr_nonkdim": 16}
    name = "attention.mla_decode_rope:_fwd"
    got = launch(run, f"{name}_grouped_kernel_stage1_rope", (batch * splits, 1, 1), *args, pe, cos_sin.shape[1], 1, **constants)
    out = Out("o", (batch, heads, lora))
    constants = {"NUM_KV_SPLITS": splits, "BLOCK_DV": lora, "Lv": lora, "batch": batch, "head_num": heads}
    o = launch(
        run,
        f"{name}_kernel_stage2",
        (batch * heads, 1, 1),
        got["part"],
        out,
        first,
        *strides(part)[:3],
        *strides(out)[:2],
        **constants,
    )["o"]
    q_pe = rope(q[:, :, lora:], turns[positions] * (np.pi / 2), True).round(9)
    for i in range(batch):
        k = f64(kv[indices[first[i] : first[i + 1]]])
        k[-1:, :, lora:] = rope(k[-1:, :, lora:], turns[positions[i : i + 1]] * (np.pi / 2), True)
        run.compare(f"last key {i}", got["last"][i], k[-1, 0, lora:], 0, 1e-12)
        query = np.concatenate([f64(q)[i : i + 1, :, :lora], q_pe[i : i + 1]], 2)
        compare_attention(run, f"o {i}", o[i : i + 1], query, k, k[:, :, :lora], scale)


def run_mqa_logits(run):
    rows, keys, heads, dim = 5, 150, 32, 64
    run.result.size = f"{rows} x {keys}, heads {heads}, dim {dim}"
    fp8 = FP8[run.result.target]
    q, kv = run.normal(rows, heads, dim).astype(fp8), run.normal(keys, dim).astype(fp8)
    scales, weights = run.rng.uniform(0.5, 2, keys).astype(np.float32), run.normal(rows, heads)
    begin, end = run.integers(0, 40, rows), run.integers(100, keys + 1, rows)
    logits = InOut("logits", np.full((rows, keys), -np.inf, np.float32))
    args = [q, kv, scales, weights, begin, end, logits, rows, keys, heads * dim, dim, heads, keys, 1]
    constants = {"NUM_HEADS": heads, "HEAD_SIZE": dim, "stride_q_h": dim, "stride_q_d": 1, "stride_kv_d": 1}
    constants |= {"stride_w_h": 1, "BLOCK_KV": 64}
    got = launch(run, "attention.fp8_mqa_logits:_fp8_mqa_logits_kernel", (rows, 1, 1), *args, **constants)["logits"]
    scores = np.maximum(np.einsum("rhd,kd->rhk", *f64(q, kv)) * scales, 0) * weights[:, :, None]
    at = np.arange(keys)
    want = np.where((at >= begin[:, None]) & (at < end[:, None]), scores.sum(1), -np.inf)
    run.compare("logits", got, want, 1e-5, float(1e-6 * np.abs(scores).sum(1).max()))


def run_hstu_attention(run):
    """Attention with silu instead of softmax, causal, with targets that see only themselves of the targets."""
    lengths, targets, heads, dim, longest = (70, 33), (4, 7), 2, 64, 128
    run.result.size = f"{len(lengths)} sequences of {', '.join(map(str, lengths))}, heads {heads}, dim {dim}"
    first = starts_of(lengths)
    q, k, v = (run.normal(first[-1], heads, dim, dtype=bf16) for _ in range(3))
    out = Out("o", q.shape)
    at = [s for x in (q, k, v, out) for s in strides(x)[:2]]
    args = [q, k, v, None, first, np.array(targets, np.int32), out, *at, dim**-0.5, heads, longest, 0, 0, 0]
    constants = {"CAUSAL": True, "HAS_MULTIPLE_TARGETS": True, "IS_DELTA_Q": False, "ALLOW_TF32": False, "BLOCK_D_Q": dim}
    constants |= {"BLOCK_D_V": dim}
    constants |= {"BLOCK_M": 32, "BLOCK_N": 32, "HAS_CONTEXTUAL_SEQ_LEN": False, "HAS_MAX_ATTN_LEN": False}
    constants |= {"HAS_SORT_BY_LENGTH_INDICES": False}
    grid = (cdiv(max(lengths), 32), len(lengths) * heads, 1)
    got = launch(run, "attention.hstu_attention:_hstu_attn_fwd", grid, *args, num_warps=4, num_stages=1, **constants)["o"]
    for i, n in enumerate(lengths):
        rows = slice(first[i], first[i + 1])
        s = silu(np.einsum("qhd,khd->hqk", *f64(q[rows], k[rows])) * dim**-0.5) / longest
        at = np.minimum(np.arange(n), n - targets[i])  # targets share a position
        s = np.where((at[:, None] > at) | np.eye(n, dtype=bool), s, 0)
        o, spread = (np.einsum("hqk,khd->qhd", x, y) for x, y in ((s, f64(v[rows])), (np.abs(s), np.abs(f64(v[rows])))))
        run.compare(f"o {i}", got[rows], o, HALF_ULP[bf16] + 1e-5, HALF_ULP[bf16] * float(spread.max()))


def gated_delta_rule(q, k, v, g, beta, state, first, scale):
    """Outputs token by token and last states [head, k, v]; q and k are normalized, and repeated for the heads of v."""
    group = v.shape[1] // q.shape[1]
    q, k = ((x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)).repeat(group, 1) for x in f64(q, k))
    v, g, beta, state = f64(v, g, beta, state)
    o = np.empty(v.shape)
    for i in range(len(first) - 1):
        for t in range(first[i], first[i + 1]):
            state[i] *= np.exp(g[t])[:, None, None]
            delta = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state[i], k[t]))
            state[i] += k[t][:, :, None] * delta[:, None]
            o[t] = np.einsum("hkv,hk->hv", state[i], q[t]) * scale
    return o, state


def run_gated_delta_rule(run, gating):
    """With decay and beta given, or made by the kernel of the logits, its state then updated in place."""
    heads, v_heads, k_dim, v_dim, lengths = 2, 4, 64, 48, (5, 1, 3)
    run.result.size = (
        f"{len(lengths)} sequences of {', '.join(map(str, lengths))}, heads {heads}/{v_heads}, dim {k_dim}/{v_dim}"
    )
    first = starts_of(lengths)
    tokens, scale = int(first[-1]), k_dim**-0.5
    q, k = (run.normal(tokens, heads, k_dim, dtype=bf16) for _ in range(2))
    v, state = run.normal(tokens, v_heads, v_dim, dtype=bf16), run.normal(len(lengths), v_heads, k_dim, v_dim)
    constants = {"B": 1, "H": heads, "HV": v_heads, "K": k_dim, "V": v_dim, "BK": 64, "BV": 8}
    constants |= {"USE_QK_L2NORM_IN_KERNEL": True}
    constants |= {"num_warps": 1, "num_stages": 3}
    out = Out("o", v.shape)
    if gating:
        log_a, bias = run.normal(v_heads), run.normal(v_heads)
        a, b = (run.normal(tokens, v_heads, dtype=bf16, scale=8) for _ in range(2))
        lines = np.array([2, 0, 1], np.int32)
        args = [log_a, a, bias, 1.0, 20.0, q, k, v, b, out, InOut("state", state[np.argsort(lines)]), lines, first, scale]
        args += [tokens]
        name = "fused_sigmoid_gating_recurrent:fused_sigmoid_gating_delta_rule_update_kernel"
        grid = (1, v_dim // 8, len(lengths) * v_heads)
        g, beta = -np.exp(f64(log_a)) * np.log1p(np.exp(f64(a) + bias)), 1 / (1 + np.exp(-f64(b)))
    else:
        g, beta = (
            -run.rng.uniform(0, 2, (tokens, v_heads)).astype(np.float32),
            run.rng.uniform(0, 1, (tokens, v_heads)).astype(bf16),
        )
        lines = np.arange(len(lengths))
        args = [q, k, v, g, None, None, beta, out, state, Out("state", state.shape, np.float32), first, scale, tokens]
        constants |= {"IS_BETA_HEADWISE": True, "USE_G": True, "USE_GK": False, "USE_GV": False}
        name = "fused_recurrent:_fused_recurrent_gated_delta_rule_fwd_kernel"
        grid = (v_dim // 8, len(lengths) * v_heads, 1)
    got = launch(run, f"gated_delta_rule.decode.{name}", grid, *args, **constants)
    o, state = gated_delta_rule(q, k, v, g, beta, state, first, scale)
    run.compare("o", got["o"], o, HALF_ULP[bf16] + 1e-5, 1e-6)
    run.compare("state", got["state"][lines], state, 1e-5, 1e-5)


def run_chunk_states(run):
    batch, length, heads, dim, v_dim, chunk = 2, 150, 2, 128, 48, 64
    chunks = cdiv(length, chunk)
    run.result.size = f"{batch} x {length} x {heads}, dim {dim}/{v_dim}, chunks of {chunk}"
    k, w = (run.normal(batch, length, heads, dim, dtype=bf16, scale=0.1) for _ in range(2))
    v, h0 = run.normal(batch, length, heads, v_dim, dtype=bf16), run.normal(batch, heads, dim, v_dim)
    g = -run.rng.uniform(0, 0.05, (batch, length, heads)).astype(np.float32)
    for start in range(0, length, chunk):
        g[:, start : start + chunk] = np.cumsum(g[:, start : start + chunk], 1)
    outs = [Out("v", v.shape), Out("h", (batch, chunks, heads, dim, v_dim)), Out("last", h0.shape, np.float32)]
    args = [k, v, w, outs[0], g, None, outs[1], h0, outs[2], None, None, length]
    constants = {"H": heads, "K": dim, "V": v_dim, "BT": chunk, "BV": 32, "TRANSPOSE_STATE": False, "USE_EXP2": False}
    name = "gated_delta_rule.prefill.chunk_delta_h:chunk_gated_delta_rule_fwd_kernel_h_blockdim64"
    got = launch(run, name, (cdiv(v_dim, 32), batch * heads, 1), *args, num_warps=4, num_stages=2, **constants)
    k, w, v, g, h = f64(k, w, v, g, h0)
    # States and values round to bf16 for the products, each by its own error of uniform distribution: `off` is the variance
    # that makes of a state, and six standard deviations pass.
    noise, off = HALF_ULP[bf16] ** 2 / 3, np.zeros(h.shape)
    for i, start in enumerate(range(0, length, chunk)):
        at = slice(start, start + chunk)
        run.compare(f"h {i}", got["h"][:, i], h, HALF_ULP[bf16] + 1e-5, 6 * float(off.max()) ** 0.5 + 1e-6)
        value = v[:, at] - np.einsum("bthk,bhkv->bthv", w[:, at], h)
        moved = np.einsum("bthk,bhkv->bthv", w[:, at] ** 2, off + noise * h**2)
        run.compare(f"v {i}", got["v"][:, at], value, HALF_ULP[bf16] + 1e-5, 6 * float(moved.max()) ** 0.5)
        last = g[:, min(start + chunk, length) - 1]
        decay = np.exp(last[:, None] - g[:, at])[..., None]
        kept = np.exp(last)[:, :, None, None]
        h = h * kept + np.einsum("bthk,bthv->bhkv", k[:, at], value * decay)
        off = off * kept**2 + np.einsum("bthk,bthv->bhkv", k[:, at] ** 2, (moved + noise * value**2) * decay**2)
    run.compare("last", got["last"], h, 1e-5, 6 * float(off.max()) ** 0.5)


register(
    [
        ("paged attention decode, GQA", lambda run: run_paged_decode(run, 8, 2)),
        ("paged attention decode, GQA, fp8 cache", lambda run: run_paged_decode(run, 8, 2, fp8=True)),
        ("paged attention decode, split, reduced", lambda run: run_paged_decode(run, 8, 2, splits=True)),
        ("prefill attention, causal", run_prefill),
        ("unified attention, window, soft cap, sinks", lambda run: run_unified_attention(run, 0)),
        ("unified attention by segments, sinks", lambda run: run_unified_attention(run, 4)),
        ("flash attention, causal", run_flash_attention),
        ("flash attention backward", lambda run: run_flash_backward(run, False)),
        ("flash attention backward, causal", lambda run: run_flash_backward(run, True)),
        ("MLA decode with rope, split, reduced", run_mla_decode),
        ("MQA logits, fp8", run_mqa_logits),
        ("lean attention, stream-K", run_lean_attention),
        ("extend attention, soft cap", run_extend_attention),
        ("HSTU attention", run_hstu_attention),
        ("gated delta rule, recurrent", lambda run: run_gated_delta_rule(run, False)),
        ("gated delta rule, recurrent, gates of logits", lambda run: run_gated_delta_rule(run, True)),
        ("gated delta rule, states of chunks", run_chunk_states),
    ]
)
