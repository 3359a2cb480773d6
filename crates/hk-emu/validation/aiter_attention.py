"""AITER: attention. Arguments are in slots of 16 bytes, in the order of the structs of the host code."""

import numpy as np
from harness import IN_STEP, Out, bf16, case, e4m3, e4m3fnuz, f32, u32

TARGETS = ("gfx942", "gfx950")
FP8 = {"gfx942": e4m3fnuz, "gfx950": e4m3}


def attention(q, k, v, scale, causal):
    """Softmax attention in f64. q [b, s, h, d], k and v [b, t, kv heads, d]. The causal mask ends at the last key."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    s = np.einsum("bshd,bthd->bhst", q, k) * scale
    if causal:
        rows, columns = np.arange(s.shape[2])[:, None], np.arange(s.shape[3])[None]
        s = np.where(columns > rows + s.shape[3] - s.shape[2], -np.inf, s)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    return np.einsum("bhst,bthd->bshd", p / total, v), (top + np.log(total))[..., 0], p / total


def strides(x):
    """Bytes from row to row, head to head and batch to batch of [b, s, h, d]."""
    b, h, s = x.strides[0], x.strides[2], x.strides[1]
    return [u32(s), u32(h), u32(b)]


def forward(run, file, b, sq, sk, hq, hk, d, causal, tile=256, dv=128, dtype=bf16, more=()):
    """Flash attention; host code: mha_fwd.cu. fp8 inputs have a scale for each tensor, and give bf16."""
    run.result.size = f"b {b}, q {sq}, k {sk}, heads {hq}/{hk}, dim {d}"
    q, k = run.normal(b, sq, hq, d).astype(dtype), run.normal(b, sk, hk, d).astype(dtype)
    v = run.normal(b, sk, hk, dv).astype(dtype)
    quantised = dtype != bf16
    scales = [np.array([x], np.float32) for x in (0.75, 1.25, 0.5)] if quantised else []
    scale = np.float32(d**-0.5)
    # Both ends of the triangle make one workgroup.
    tiles = -(-sq // tile)
    wide = run.result.target == "gfx942" and d == 192
    grid = (hq, tiles, b) if wide else (-(-tiles // (2 if causal else 1)), hq, b)
    options = 0 if wide else 5 - 2 * (causal and hq % 8 != 0)
    out = run.launch(
        f"fmha_v3_fwd/{file}.co",
        grid,
        256 if d == 192 else 512,
        [Out("o", (b, sq, hq, dv)), q, k, v, Out("lse", (b, hq, sq), np.float32), f32(scale), u32(sq)]
        + [strides(q)[0], u32(tile * q.strides[1])] + strides(q)[1:] + [u32(hq // hk)]
        + strides(k) + [u32(options), u32(1), u32(sk), u32(d), u32(dv), u32(hq)]
        + strides(v) + [u32(2 * hq * dv), u32(2 * dv), u32(2 * sq * hq * dv), None, None, u32(4 * sq)]
        + ([None, None, *scales] + [u32(0)] * 6 if quantised else []),
        more=more,
    )
    if quantised:
        q, k, v = (x.astype(np.float64) * y for x, y in zip((q, k, v), scales))
    o, lse, _ = attention(q, k, v, float(scale), causal)
    if quantised:
        # P is rounded to fp8.
        run.compare("o", out["o"], o, 2**-4, 2**-6)
        return
    # P is rounded to bf16 before the second product; to zero, it is twice as far off.
    run.compare("o", out["o"], o, 2**-6 if "rtz" in file else 2**-7, 2**-8)
    run.compare("lse", out["lse"], lse, 1e-5, 1e-4)


for suffix, causal in (("", False), ("_causal", True)):
    for rounding in ("rtne", "rtz"):
        case(f"flash attention forward, bf16{', causal' if causal else ''}, {rounding}", "gfx942")(
            lambda run, file=f"MI300/fwd_hd128_bf16{suffix}_{rounding}", causal=causal: forward(
                run, file, 2, 200, 200, 2, 1, 128, causal
            )
        )
    case(f"flash attention forward, bf16{', causal' if causal else ''}", "gfx950")(
        lambda run, file=f"fwd_hd128_bf16{suffix}", causal=causal: forward(run, file, 2, 200, 200, 2, 1, 128, causal)
    )
    for target, folder in (("gfx942", "MI300/"), ("gfx950", "")):
        case(f"flash attention forward, fp8{', causal' if causal else ''}", target)(
            lambda run, file=f"{folder}fwd_hd128_fp8{suffix}", causal=causal: forward(
                run, file, 2, 200, 200, 2, 1, 128, causal, dtype=FP8[run.result.target],
                more=IN_STEP if run.result.target == "gfx950" else (),
            )
        )


def paged(run, heads, kv_heads, lengths, block=16, d=128):
    """Decode over pages of 16 keys, bf16; host code: asm_pa.cu, `pa_fwd`."""
    run.result.size = f"{len(lengths)} sequences of {', '.join(map(str, lengths))}, heads {heads}/{kv_heads}"
    most = max(-(-n // block) for n in lengths)
    blocks = len(lengths) * most + 3
    q = run.normal(len(lengths), heads, d, dtype=bf16)
    k, v = (run.normal(blocks, kv_heads, block, d, dtype=bf16) for _ in range(2))
    table = run.rng.permutation(blocks)[: len(lengths) * most].reshape(len(lengths), most).astype(np.int32)
    # Keys: [block, head, d / 8, 16, 8]. Values: [block, head, 16 / 8, d, 8].
    packed_k = np.ascontiguousarray(k.reshape(blocks, kv_heads, block, d // 8, 8).transpose(0, 1, 3, 2, 4))
    packed_v = np.ascontiguousarray(v.reshape(blocks, kv_heads, block // 8, 8, d).transpose(0, 1, 2, 4, 3))
    out = run.launch(
        f"pa/pa_bf16_noquant_gqa{heads // kv_heads}_1tg_4w.co",
        (kv_heads, len(lengths), 1),
        256,
        [Out("o", (len(lengths), heads, d)), q, packed_k, packed_v, table, np.array(lengths, np.int32), None, None]
        + [f32(np.log2(np.e) / d**0.5), u32(most), u32(kv_heads), u32(2 * heads * d)]
        + [u32(2 * kv_heads * block * d), u32(2 * block * d), u32(0), u32(heads // kv_heads)],
    )
    want = []
    for i, n in enumerate(lengths):
        keys, values = (x[table[i]].transpose(0, 2, 1, 3).reshape(1, -1, kv_heads, d)[:, :n] for x in (k, v))
        want.append(attention(q[i : i + 1, None], keys, values, d**-0.5, False)[0][0, 0])
    run.compare("o", out["o"], np.stack(want), 2**-7, 2**-8)


for target in TARGETS:
    case("paged attention decode, bf16", target)(lambda run: paged(run, 16, 2, [300, 37, 1]))


def backward(run, rounding, b, sq, sk, hq, hk, d=128):
    """Flash attention backward with f32 atomics on dq: sum of o do, then dq dk dv, then dq to bf16; host code:
    mha_bwd.cu."""
    run.result.size = f"b {b}, q {sq}, k {sk}, heads {hq}/{hk}, dim {d}"
    q, do = (run.normal(b, sq, hq, d, dtype=bf16) for _ in range(2))
    k, v = (run.normal(b, sk, hk, d, dtype=bf16) for _ in range(2))
    scale = float(np.float32(d**-0.5))
    o, lse, p = attention(q, k, v, scale, False)
    o = o.astype(bf16)
    folder = "fmha_v3_bwd"
    lengths = [u32(sq), u32(d), None, None]
    row = [u32(4 * sq), u32(4 * sq * hq), u32(4)]
    heads = lambda x: [strides(x)[1], strides(x)[2], strides(x)[0]]  # noqa: E731
    odo = run.launch(
        f"{folder}/bwd_hd128_odo_bf16.co",
        (-(-sq // 128), hq, b),
        256,
        [o, do, Out("d", (b, hq, sq), np.float32)] + heads(o) + heads(do) + row + lengths,
    )["d"]
    run.compare("sum of o do", odo, np.einsum("bshd,bshd->bhs", *(x.astype(np.float64) for x in (o, do))), 1e-5, 1e-4)

    tile = 192 if run.result.target == "gfx942" else 256
    # dk and dv of each query head; the host code sums those of a group.
    dk, dv = (Out(name, (b, sk, hq, d)) for name in ("dk", "dv"))
    wide = np.empty((b, sk, hq, d), bf16)
    out = run.launch(
        f"{folder}/bwd_hd128_bf16_a32{rounding}_psskddv.co",
        (-(-sk // tile), hq, b),
        256,
        [Out("dq", (b, hq, sq, d), np.float32, fill=0), dk, dv, q, k, v, do, lse.astype(np.float32), odo]
        + [f32(scale), f32(np.log2(np.e)), u32(sq), u32(tile * k.strides[1])] + heads(q) + [u32(hq // hk)]
        + heads(k) + [strides(wide)[0], u32(sk), u32(d), u32(d), u32(hq)]
        + heads(v) + heads(do) + heads(wide)[:2] + heads(wide)
        + [u32(4 * sq), None, None, None, None, u32(sq), u32(0), u32(0)],
    )
    done = run.launch(
        f"{folder}/bwd_hd128_dq_convert_bf16{rounding}.co",
        (-(-sq // 64), hq, b),
        256,
        [out["dq"], Out("dq16", (b, sq, hq, d)), u32(4 * sq * d), u32(4 * sq * hq * d if b > 1 else 0), u32(4 * d)]
        + heads(q) + lengths,
    )
    run.result.kernel = f"bwd_hd128_bf16_a32{rounding}_psskddv.co"

    group = hq // hk
    wide_q, wide_do = (x.astype(np.float64) for x in (q, do))
    wide_k, wide_v = (np.repeat(x.astype(np.float64), group, 2) for x in (k, v))
    dp = np.einsum("bshd,bthd->bhst", wide_do, wide_v)
    ds = p * (dp - np.einsum("bshd,bshd->bhs", o.astype(np.float64), wide_do)[..., None]) * scale
    # P and dS are rounded to bf16 before the products, so errors go with the size of the sums.
    for name, got, want in [
        ("dq", done["dq16"], np.einsum("bhst,bthd->bshd", ds, wide_k)),
        ("dk", out["dk"], np.einsum("bhst,bshd->bthd", ds, wide_q)),
        ("dv", out["dv"], np.einsum("bhst,bshd->bthd", p, wide_do)),
    ]:
        run.compare(name, got, want, 2**-7, 2**-8 * float(np.abs(want).max()))


case("flash attention backward, bf16", "gfx942")(lambda run: backward(run, "_rtne", 2, 100, 210, 2, 1))
case("flash attention backward, bf16", "gfx950")(lambda run: backward(run, "", 2, 100, 280, 2, 1))


def latent(run, file, lengths, splits, dtype=bf16, heads=16, d=576, dv=512):
    """MLA decode: one latent key for all heads, whose first `dv` elements are the value; host code: asm_mla.cu,
    `mla_decode_stage1_asm_fwd`. Each split writes its share and the logarithm of its sum, in f32."""
    run.result.size = f"{len(lengths)} sequences of {', '.join(map(str, lengths))}, heads {heads}, splits {splits}"
    b = len(lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    pages = int(starts[-1]) + 5
    q, kv = run.normal(b, heads, d).astype(dtype), run.normal(pages, 1, 1, d).astype(dtype)
    table = run.rng.permutation(pages)[: starts[-1]].astype(np.int32)
    scale = float(np.float32(d**-0.5))
    quantised = dtype != bf16
    scales = [np.array([x], np.float32) for x in (0.75, 1.25)] if quantised else []
    # Kernels for bf16 have no more arguments than those below.
    more = [np.arange(b + 1, dtype=np.int32), (np.arange(b + 1) * splits).astype(np.int32), None, *scales]
    size = np.dtype(dtype).itemsize
    out = run.launch(
        f"mla/{file}.co",
        (1, b, splits),
        256,
        [Out("r", (b, splits, heads, dv), np.float32), Out("lse", (b, splits, heads), np.float32), q, kv]
        + [starts, table, np.ones(b, np.int32), f32(scale), u32(heads), u32(splits)]
        + [u32(size * heads * d), u32(size * d), u32(0)]
        + (more if quantised else []),
        more=IN_STEP if quantised else (),
    )
    # The host code's second stage: the splits, weighted by their sums.
    lse = out["lse"].astype(np.float64)
    weight = np.exp(lse - lse.max(1, keepdims=True))
    o = (out["r"] * weight[..., None]).sum(1) / weight.sum(1)[..., None]
    q, kv = (x.astype(np.float64) * (y if quantised else 1) for x, y in zip((q, kv), scales or (1, 1)))
    want = []
    for i, n in enumerate(lengths):
        keys = kv[table[starts[i] : starts[i + 1]], 0].reshape(1, n, 1, d)
        want.append(attention(q[i : i + 1, None], keys, keys[..., :dv], scale, False)[0][0, 0])
    run.compare("o", o, np.stack(want), *((2**-4, 2**-5) if quantised else (2**-7, 2**-8)))


for target in TARGETS:
    case("MLA decode, bf16", target)(
        lambda run: latent(run, "mla_dec_stage1_bf16_a16w16_subQ16_mqa16", [200, 67], 2)
    )
    case("MLA decode, fp8", target)(
        lambda run: latent(run, "mla_a8w8_qh16_qseqlen1_gqaratio16", [200, 140], 2, FP8[run.result.target])
    )
