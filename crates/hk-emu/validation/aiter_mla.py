"""AITER: MLA, attention with one latent key for all heads, whose first elements are the value. Arguments are in slots of 16
bytes, in the order of the structs of the host code, asm_mla.cu."""

import numpy as np
from aiter_attention import attention, causal, merge, weighed, work_list
from harness import FP8, TARGETS, Out, bf16, case, f32, starts_of, u32

D, DV = 576, 512


def latent(
    run, file, heads, queries, lengths, types, sub_q=128, mask=True, splits=2, least=16, rows=None, kv_scale=1.25
):
    """Decode of `queries` tokens of each sequence; host code: `mla_decode_stage1_asm_fwd`. Each split writes its part, of at
    least `least` keys, and the logarithm of its sum, in f32. `sub_q` rows (of heads and queries) make a workgroup. These
    kernels overwrite the size of a page by 1 key as soon as they have loaded it."""
    b, target = len(lengths), run.result.target
    run.result.size = f"{', '.join(map(str, lengths))} keys, {queries} queries, heads {heads}, splits {splits}"
    dtypes = [FP8[target] if x == "fp8" else bf16 for x in types]
    pages = starts_of(lengths)
    table = run.rng.permutation(pages[-1] + 5)[: pages[-1]].astype(np.int32)
    # Some kernels load whole tiles, beyond the queries and the last key. What they load there is NaN.
    q, kv = run.normal(b * queries + 64, heads, D), run.normal(len(table) + 6, 1, 1, D)
    q[b * queries :], kv[-1] = np.nan, np.nan
    q, kv = q.astype(dtypes[0]), kv.astype(dtypes[1])
    scales = [np.array([x], np.float32) if t == "fp8" else None for x, t in zip((0.75, kv_scale), types)]
    out = run.launch(
        f"mla/{file}.co",
        (-(-heads * queries // sub_q), b, splits),
        256,
        [Out("r", (b * queries, splits, heads, DV), np.float32), Out("lse", (b * queries, splits, heads), np.float32), q, kv]
        + [pages, table, np.ones(b, np.int32), f32(D**-0.5)]
        + [u32(rows or heads * queries), u32(splits), u32(q[:queries].nbytes), u32(kv[0].nbytes), u32(0)]
        + [starts_of([queries] * b), (np.arange(b + 1) * splits).astype(np.int32), None, *scales]
        + [u32(0), None, None, u32(1), u32(0)],
        trim=True,
    )
    # The host code's second stage: the splits, weighted by their sums.
    got = np.zeros((b * queries, heads, DV))
    for i, n in enumerate(lengths):
        used = min(splits, -(-n // least))
        for j in range(i * queries, (i + 1) * queries):
            lse = out["lse"][j, :used].astype(np.float64)
            weight = np.exp(lse - lse.max(0))
            got[j] = (out["r"][j, :used] * weight[..., None]).sum(0) / weight.sum(0)[..., None]
    compare(run, got, q, kv, scales, [table[x:y] for x, y in zip(pages, pages[1:])], lengths, queries, mask)


def persistent(run, file, heads, queries, types, lengths, mask=True, page=1, rows=None, kv_scale=1.25):
    """The same from a list of work, which cuts long sequences: these give partial sums. With "cprr" in its name a kernel has
    every second key of longer sequences, with "lse" it gives the logarithms of the sums, too. The list counts keys in pages,
    for some kernels in keys."""
    b, target = len(lengths), run.result.target
    run.result.size = f"{', '.join(map(str, lengths))} keys, {queries} queries, heads {heads}, page {page}"
    dtypes = [FP8[target] if x == "fp8" else bf16 for x in types]
    pages, own = starts_of([-(-n // page) for n in lengths]), starts_of([queries] * b)
    table = run.rng.permutation(pages[-1] + 5)[: pages[-1]].astype(np.int32)
    q, kv = run.normal(b * queries + 64, heads, D), run.normal(len(table) + 6, page, 1, D)
    q[b * queries :], kv[-1] = np.nan, np.nan
    q, kv = q.astype(dtypes[0]), kv.astype(dtypes[1])
    scales = [np.array([x], np.float32) if t == "fp8" else None for x, t in zip((0.75, kv_scale), types)]
    filled = np.array([(n - 1) % page + 1 for n in lengths], np.int32)
    spans = list(zip(pages, pages[1:]))
    pointers, work, cut, used = work_list(spans, list(zip(own, own[1:])), -(-128 // page), [0], 3)
    behind = pages[work[:, 0] + 1] - work[:, 5]
    work[:, 6] = np.where(behind > 0, (behind - 1) * page + filled[work[:, 0]], 0)
    if page > 1 and "_v3" not in file:
        ends = pages[:-1] * page + lengths
        work[:, 4:6] = np.minimum(work[:, 4:6] * page, ends[work[:, 0], None])
    world = 2 if "cprr" in file else 1
    everything = [n * world for n in lengths]  # this is rank 1 of 2
    out = run.launch(
        f"mla/{file}.co",
        (len(pointers) - 1, 1, 1),
        256,
        [Out("r", (used, heads, DV), np.float32), Out("sums", (used, heads), np.float32), q, kv, pages, table, filled]
        + [f32(D**-0.5), u32(rows or heads * queries), u32(1), u32(q[:queries].nbytes), u32(kv[0].nbytes)]
        + [u32(page.bit_length() - 1), own, [pointers, work, *["u64:0"] * 8], Out("o", (b * queries, heads, DV)), *scales]
        + [u32(1), Out("lse", (b * queries, heads), np.float32), starts_of(everything), u32(world), u32(world - 1)],
        trim=True,
    )
    total = out["lse"].astype(np.float64) if "_lse" in file and "lse" in out else None
    got = merge(out["o"], cut, out["r"], out["sums"], total)
    compare(run, got, q, kv, scales, [table[x:y] for x, y in spans], lengths, queries, mask, total, world)


def prefill(run, heads, lengths):
    """Causal, over packed sequences of queries and keys; host code: `mla_prefill_asm_fwd`."""
    queries, keys = zip(*lengths)
    run.result.size = f"q {', '.join(map(str, queries))}, k {', '.join(map(str, keys))}, heads {heads}"
    own, starts = starts_of(queries), starts_of(keys)
    table = run.rng.permutation(starts[-1] + 5)[: starts[-1]].astype(np.int32)
    q, kv = run.normal(own[-1], heads, D, dtype=bf16), run.normal(len(table) + 5, 1, 1, D, dtype=bf16)
    out = run.launch(
        f"mla/mla_pfl_bf16_a16w16_causal_subQ{heads}_mqa{heads}.co",
        (-(-max(queries) * heads // 128), len(lengths), 1),
        256,
        [Out("o", (own[-1], heads, DV)), Out("lse", (own[-1], heads), np.float32), q, kv, starts, table]
        + [np.ones(len(lengths), np.int32), f32(D**-0.5), u32(heads), u32(1), u32(q[0].nbytes), u32(kv[0].nbytes), u32(0)]
        + [own],
    )
    compare(run, out["o"], q, kv, [None, None], [table[x:y] for x, y in zip(starts, starts[1:])], keys, queries, True)


def fourth(run, splits, lengths, heads=64, d=512, wide=64):
    """Decode with a sink, "v4"; host code: asm_mla_v4.cu. A row is 448 values of fp8 with a power of two for each 64, twice
    each, behind them, and 64 values of bf16 in a tensor of their own. All are key and value."""
    b, narrow, fp8 = len(lengths), d - wide, FP8[run.result.target]
    run.result.size = f"{', '.join(map(str, lengths))} keys, heads {heads}, splits {splits}"
    pages = starts_of(lengths)
    table = run.rng.permutation(pages[-1] + 5)[: pages[-1]].astype(np.int32)
    packed, rest, exact = [], [], []
    for n in (b * heads, len(table) + 5):
        x, exponent = run.normal(n, narrow // 64, 64).astype(fp8), run.integers(-2, 3, n, narrow // 64, 1)
        bytes_ = np.zeros((n, d), np.uint8)
        bytes_[:, :narrow] = x.view(np.uint8).reshape(n, -1)
        bytes_[:, narrow : narrow + 2 * narrow // 64] = np.repeat(exponent[..., 0] + 127, 2, 1)
        packed.append(bytes_)
        rest.append(run.normal(n, wide, dtype=bf16))
        whole = (x.astype(np.float64) * 2.0**exponent).reshape(n, -1)
        exact.append(np.concatenate([whole, rest[-1].astype(np.float64)], 1))
    sink = run.normal(heads)
    out = run.launch(
        "mla_v4/mla_a8w8_qh64_qseqlen1_gqaratio64_nm.co",
        (-(-heads // 64), b, splits),
        256,
        [Out("r", (b, splits, heads, d), bf16 if splits == 1 else np.float32), Out("sums", (b, splits, heads), np.float32)]
        + [packed[0], packed[1], pages, table, np.ones(b, np.int32), f32(d**-0.5), u32(heads), u32(splits), u32(0), u32(d)]
        + [u32(0), starts_of([1] * b), (np.arange(b + 1) * splits).astype(np.int32), u32(int(splits == 1)), *rest, sink]
        + [None, u32(0)],
        trim=True,
    )
    q, want, bound, got = exact[0].reshape(b, heads, d), [], [], []
    for i in range(b):
        keys = exact[1][table[pages[i] : pages[i + 1]]][None, :, None]
        o, log_sum, p = attention(q[i : i + 1, None], keys, keys, d**-0.5)
        # The sink adds to the sum, and has no value.
        share = (1 / (1 + np.exp(sink.astype(np.float64) - log_sum[0, :, 0])))[:, None]
        want.append(o[0, 0] * share)
        # Products are of bf16.
        bound.append(weighed(p * (2**-8 + 2**-14), np.abs(keys))[0, 0] * share)
        got.append(out["r"][i, 0].astype(np.float64))
    run.compare("o", np.stack(got), np.stack(want), 2**-8, np.stack(bound))


def heads_prefill(run, mask, lengths, heads=2, d=192, dv=128, tile=256):
    """Prefill with keys and values of each head, in fp8, from a list of work; host code: `mla_prefill_ps_asm_fwd`. An item
    has a tile of queries, and its keys up to the causal border. The keys of a sequence's last tile are cut."""
    queries, keys = zip(*lengths)
    run.result.size = f"q {', '.join(map(str, queries))}, k {', '.join(map(str, keys))}, heads {heads}, dim {d}/{dv}"
    own, starts, dtype = starts_of(queries), starts_of(keys), FP8[run.result.target]
    table = run.rng.permutation(starts[-1] + 5)[: starts[-1]].astype(np.int32)
    q, k, v = (run.normal(n, heads, x).astype(dtype) for n, x in ((own[-1], d), (len(table) + 5, d), (len(table) + 5, dv)))
    items, cut, used = [], [], 0
    for i, (m, n) in enumerate(lengths):
        for first in range(0, m, tile):
            last = min(first + tile, m)
            seen = n - m + last if mask else n
            parts = [(x, min(x + 128, seen)) for x in range(0, seen, 128)] if last == m else [(0, seen)]
            rows = [tile * (used + j) for j in range(len(parts))] if len(parts) > 1 else [-1]
            if len(parts) > 1:
                cut.append(((own[i] + first, own[i] + last), rows))
                used += len(parts)
            for at, (x, y) in zip(rows, parts):
                items.append((i, at, own[i] + first, own[i] + last, starts[i] + x, starts[i] + y, seen - y))
    work = np.array([(*x, h | (h + 1) << 16) for h in range(heads) for x in items], np.int32)
    pointers = np.linspace(0, len(work), 4).astype(np.int32)
    scales = [np.array([x], np.float32) for x in (0.75, 1.25, 0.5)]
    out = run.launch(
        f"mla/mla_pfl_qh192_vh128_m32x8_n128x1_causal{int(mask)}.co",
        (len(pointers) - 1, 1, 1),
        512,
        [q, k, v, Out("o", (own[-1], heads, dv)), Out("part", (tile * used, heads, dv), np.float32)]
        + [Out("sums", (tile * used, heads), np.float32), pointers, work, own, starts, table, *scales, f32(d**-0.5)]
        + [u32(own[-1]), u32(heads), u32(len(k)), u32(len(table))],
    )
    q, k, v = (x.astype(np.float64) * y for x, y in zip((q, k, v), scales))
    want, bound = [], []
    for i, (m, n) in enumerate(lengths):
        pages = table[starts[i] : starts[i + 1]]
        mine, visible = q[None, own[i] : own[i + 1]], causal(m, n) if mask else None
        o, _, p = attention(mine, k[None, pages], v[None, pages], d**-0.5, visible)
        want.append(o[0])
        bound.append(weighed(p * (2**-4 + 2**-14) + 2**-10 * p.max(-1, keepdims=True), np.abs(v[None, pages]))[0])
    run.compare("o", merge(out["o"], cut, out["part"], out["sums"]), np.concatenate(want), 2**-7, np.concatenate(bound))


def compare(run, got, q, kv, scales, own, lengths, queries, mask, total=None, world=1):
    """Against attention over the pages `own` of each sequence. With a `world` of two, keys are the odd ones of all."""
    q, kv = (x.astype(np.float64) * (1 if y is None else y) for x, y in zip((q, kv), scales))
    # Probabilities are rounded: to bf16 perhaps truncated; e4m3 has 2^-9 or less as its smallest, for a largest of 1.
    loss, smallest = (2**-7, 0) if scales[1] is None else (2**-4, 2**-10)
    want, bound, sums = [], [], []
    counts = np.broadcast_to(queries, len(lengths))
    for i, (n, first, m) in enumerate(zip(lengths, starts_of(counts), counts)):
        keys = kv[own[i]].reshape(1, -1, 1, D)[:, :n]
        mine = q[None, first : first + m]
        visible = causal(m, n * world)[:, world - 1 :: world] if mask else None
        o, log_sum, p = attention(mine, keys, keys[..., :DV], D**-0.5, visible)
        sums.append(log_sum[0].T)
        want.append(o[0])
        bound.append(weighed(p * (loss + 2**-14) + smallest * p.max(-1, keepdims=True), np.abs(keys[..., :DV]))[0])
    run.compare("o", got, np.concatenate(want), 2**-7, np.concatenate(bound))
    if total is not None:
        run.compare("lse", total, np.concatenate(sums), 1e-5, 1e-5)


# Two splits leave tails of tiles of 16 to 128 keys.
LENGTHS = [300, 167]
BF16, FP8S = ("bf16", "bf16"), ("fp8", "fp8")


def objects():
    """Target, file, and arguments of `latent`, for decode without work lists."""
    wide = dict(sub_q=64, types=BF16)
    both = [
        ("mla_dec_stage1_bf16_a16w16_subQ16_mqa16", dict(heads=16, queries=1, types=BF16, sub_q=16, least=64)),
        ("mla_dec_stage1_bf16_a16w16_subQ128_mqa128", dict(heads=128, queries=1, types=BF16)),
        ("mla_a16w16_qh16_m16x4_n16x1_coex0_mask1", dict(heads=16, queries=3, types=BF16)),
        ("mla_a16w16_qh16_m32x4_n16x1_coex0_mask1", dict(heads=16, queries=7, types=BF16)),
        ("MLA_A16W16_1TG_4W_32mx1_16nx1_Coex0_Msk1_QH16", dict(wide, heads=32, queries=1)),
        ("MLA_A16W16_1TG_4W_64mx1_16nx1_Coex0_Msk1_QH16", dict(wide, heads=64, queries=1)),
        ("mla_a16w16_qh8_qseqlen1_gqaratio8_v3", dict(heads=8, queries=1, types=BF16, sub_q=8, least=64)),
        ("mla_a8w8_qh16_qseqlen1_gqaratio16", dict(heads=16, queries=1, types=FP8S, least=64)),
        ("mla_a8w8_qh16_qseqlen2_gqaratio16", dict(heads=16, queries=2, types=FP8S)),
        ("mla_a8w8_qh128_m32x4_n16x2_msk1", dict(heads=128, queries=1, types=FP8S, least=32)),
    ]
    for target in TARGETS:
        for file, more in both:
            yield target, file, more
    whole = dict(heads=16, queries=4, types=FP8S, sub_q=64)
    yield "gfx942", "mla_a8w8_qh64_qseqlen4_gqaratio16", dict(whole)
    yield "gfx942", "mla_a8w8_qh16_qseqlen4_gqaratio16", dict(whole)
    # Leaves the factor out of the values.
    more = dict(heads=8, queries=1, types=FP8S, sub_q=8, least=64, kv_scale=1)
    yield "gfx942", "mla_a8w8_qh8_qseqlen1_gqaratio8_v1", more
    whole["splits"] = 1  # those for gfx950 have no place for more
    # From three tiles of keys on, waves 2 and 3 reload registers from LDS before the MFMA that reads them.
    short = dict(whole, lengths=[167, 150])
    two = dict(heads=8, queries=2, types=BF16, sub_q=16, least=64, rows=8)
    one = dict(heads=64, queries=1, types=BF16, sub_q=64, least=32)
    for file, more in (
        ("mla_a8w8_qh8_qseqlen1_gqaratio8_v3", dict(heads=8, queries=1, types=FP8S, sub_q=8, least=64)),
        ("MLA_A16W16_1TG_4W_16mx4_32nx1_Coex0_Msk1_QH16", dict(wide, heads=32, queries=2)),
        ("mla_a16w16_qh64_qseqlen1_gqaratio64_v3", one),
        ("mla_a16w16_qh64_qseqlen1_gqaratio64_lse_v3", one),
        ("mla_a16w16_qh8_qseqlen2_gqaratio8", dict(two, mask=False)),
        ("mla_a16w16_qh8_qseqlen2_gqaratio8_causal", two),
        ("mla_a8w8_qh16_qseqlen1_gqaratio16_msk0", dict(heads=16, queries=1, types=FP8S, least=64)),
        ("mla_a8w8_qh64_qseqlen4_gqaratio16", short),
        ("mla_a8w8_qh64_qseqlen4_gqaratio16_msk0", dict(short, mask=False)),
        ("mla_a8w8_qh16_qseqlen4_gqaratio16", whole),
        ("mla_a8w8_qh16_qseqlen4_gqaratio16_msk0", dict(whole, mask=False)),
        ("mla_a8w8_qh32_qseqlen4_gqaratio32_msk0", dict(whole, heads=32, sub_q=128, mask=False)),
        ("mla_a8w8_qh32_qseqlen4_gqaratio32_msk0_v2", dict(whole, heads=32, sub_q=128, mask=False)),
        ("mla_a8w8_qh128_m32x4_n16x2_msk0", dict(heads=128, queries=1, types=FP8S, least=32)),
    ):
        yield "gfx950", file, more


def lists():
    """Target, file, and arguments of `persistent`."""
    mixed = ("bf16", "fp8")
    for target in TARGETS:
        yield target, "mla_a16w16_qh16_m16x4_n16x1_coex0_mask1_ps", dict(heads=16, queries=3, types=BF16)
        yield target, "mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps", dict(heads=16, queries=3, types=mixed)
        for queries in (1, 2, 4):
            # Those for four queries of gfx942, and what gfx950 has from them, leave the factor out of the values.
            more = dict(heads=16, queries=queries, types=FP8S, kv_scale=1 if (target, queries) == ("gfx942", 4) else 1.25)
            yield target, f"mla_a8w8_qh16_qseqlen{queries}_gqaratio16_ps", more
    four = dict(heads=16, queries=4, types=FP8S, page=16, kv_scale=1)
    yield "gfx942", "mla_a8w8_qh64_qseqlen4_gqaratio16_ps", four
    for lse in ("", "_lse"):
        # The length of the last page counts for every part of a sequence that is cut.
        more = dict(heads=64, queries=1, types=FP8S, page=64, lengths=[320, 100, 50])
        yield "gfx942", f"mla_a8w8_qh64_qseqlen1_gqaratio64{lse}_v3_ps", more
    yield "gfx942", "mla_a8w8_qh128_m32x4_n16x2_msk0_ps", dict(heads=128, queries=1, types=FP8S)
    yield "gfx942", "mla_dec_stage1_bf16_a16w16_subQ16_mqa16_ps", dict(heads=8, queries=2, types=BF16)

    yield "gfx950", "mla_a16w16_qh16_m16x4_n16x1_coex0_mask1_lse_ps", dict(heads=16, queries=3, types=BF16)
    yield "gfx950", "mla_a8w8_qh16_qseqlen2_gqaratio16_ps_page", dict(heads=16, queries=2, types=FP8S, page=16)
    yield "gfx950", "mla_a8w8_qh16_qseqlen4_gqaratio16_ps_page", four
    for lse in ("", "_lse"):
        yield "gfx950", f"mla_a16w16_qh16_qseqlen4_gqaratio16{lse}_ps", dict(heads=16, queries=4, types=BF16)
        yield "gfx950", f"mla_a8w8_qh32_qseqlen1_gqaratio32{lse}_ps", dict(heads=32, queries=1, types=FP8S)
        for mask in ("", "_msk0"):
            if mask or lse:
                more = dict(heads=16, queries=1, types=FP8S)
                yield "gfx950", f"mla_a8w8_qh16_qseqlen1_gqaratio16{mask}{lse}_ps", more
            more = dict(heads=8, queries=4, types=FP8S, mask=not mask)
            yield "gfx950", f"mla_a8w8_qh32_qseqlen4_gqaratio8{mask}{lse}_ps", more
            for round_robin in ("", "_cprr"):
                what = f"{mask}{lse}{round_robin}"
                more = dict(heads=32, queries=4, mask=not mask, rows=32)
                yield "gfx950", f"mla_a16w16_qh32_qseqlen4_gqaratio32{what}_ps", dict(more, types=BF16)
                yield "gfx950", f"mla_a8w8_qh32_qseqlen4_gqaratio32{what}_ps", dict(more, types=FP8S)
                more = dict(heads=64, queries=1, mask=not mask, types=BF16)
                yield "gfx950", f"mla_a16w16_qh64_qseqlen1_gqaratio64{what}_v3_ps", more
                more = dict(heads=16, queries=4, mask=not mask, types=FP8S, rows=16)
                yield "gfx950", f"mla_a8w8_qh16_qseqlen4_gqaratio16{what}_v3_ps", more
    yield "gfx950", "mla_a8w8_qh16_qseqlen4_gqaratio16_msk0_ps", dict(heads=16, queries=4, types=FP8S, mask=False)


for target in TARGETS:
    for heads in (16, 128):
        case(f"MLA prefill, bf16, heads {heads}", target)(
            lambda run, heads=heads: prefill(run, heads, [(40, 131), (19, 19), (1, 70)])
        )
case("MLA decode, fp8 and bf16, sink, v4", "gfx950")(lambda run: fourth(run, 1, [300, 167]))
for mask in (False, True):
    case(f"MLA prefill, fp8, heads of their own{', causal' if mask else ''}", "gfx950")(
        lambda run, mask=mask: heads_prefill(run, mask, [(300, 420), (70, 70), (1, 150)])
    )
for target, file, more in lists():
    case(f"MLA decode, {file.removeprefix('mla_')}", target)(
        lambda run, file=file, more=more: persistent(run, file, **{"lengths": [300, 167, 50], **more})
    )
for target, file, more in objects():
    case(f"MLA decode, {file.removeprefix('mla_')}", target)(
        lambda run, file=file, more=more: latent(run, file, **{"lengths": LENGTHS, **more})
    )
