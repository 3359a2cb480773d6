"""AITER: paged attention decode. Arguments are in slots of 16 bytes, in the order of the structs of the host code,
asm_pa.cu."""

import numpy as np
from aiter_attention import attention, causal, merge, weighed, work_list
from harness import FP8, TARGETS, Out, bf16, case, f32, starts_of, u32

TYPES = {"bf16": bf16, "fp16": np.float16}
LARGEST = {"gfx942": 240, "gfx950": 448, "Int8": 127}


def quantized(x, kind, dtype, largest, axis=-1):
    """x with a factor for each row, as the kernels make it: values, to i8 truncated, and factors."""
    factor = np.abs(x).max(axis, keepdims=True) / np.float32(largest)
    q = x / factor
    return (np.trunc(q) if kind == "Int8" else q).astype(dtype), factor.astype(np.float32)


def cache(run, blocks, kv_heads, block, d, kind, dtype, target, axis=-1):
    """Keys and values [block, head, key, d], quantized per token or page unless `dtype` is that of q; those as the kernels
    want them: keys [block, head, d / x, key, x], values [block, head, key / x, d, x]; and the factors."""
    exact, packed, factors = [], [], []
    for i in range(2):
        x = run.normal(blocks, kv_heads, block, d)
        if kind != "noquant":
            x = x * run.rng.uniform(0.5, 2, (blocks, kv_heads, block, 1))
            x, factor = quantized(x, kind, dtype, LARGEST.get(kind) or LARGEST[target], axis)
            factors.append(factor)
        x = x.astype(dtype)
        each = 16 // x.itemsize
        order = ((blocks, kv_heads, block, d // each, each), (0, 1, 3, 2, 4)) if i == 0 else (
            (blocks, kv_heads, block // each, each, d), (0, 1, 2, 4, 3))
        packed.append(np.ascontiguousarray(x.reshape(order[0]).transpose(order[1])))
        exact.append(x.astype(np.float64) * (factors[i] if factors else 1))
    return exact, packed, factors or [None, None]


def compare(run, got, q, keys, factors, kind, loss, pages, lengths, queries, masked=True):
    """Against attention over each sequence's keys; `keys` are those of all pages, [page, head, key, d], `loss` the relative
    error of rounded probabilities."""
    want, bound, first = [], [], 0
    for mine, n, m in zip(pages, lengths, queries):
        flat = lambda x: x[mine].transpose(0, 2, 1, 3).reshape(1, -1, x.shape[1], x.shape[3])[:, :n]  # noqa: E731
        k, v = map(flat, keys)
        o, _, p = attention(q[None, first : first + m], k, v, q.shape[-1] ** -0.5, causal(m, n) if masked else None)
        lost = p * loss
        if kind == "Int8":
            # Probabilities times the factors of V are truncated to steps of 1/127 of their largest.
            weight = np.repeat(flat(factors[1])[..., 0].transpose(0, 2, 1), p.shape[1] // v.shape[2], 1)[:, :, None]
            lost = np.minimum(p, (p * weight).max(-1, keepdims=True) / 127 / weight)
        want.append(o[0])
        bound.append(weighed(lost + 2**-14 * p, np.abs(v))[0])
        first += m
    dtype = 2**-10 if q.dtype == np.float16 else 2**-7  # o is truncated
    run.compare("o", got, np.concatenate(want), dtype, np.concatenate(bound))


def paged(run, file, group, lengths, queries, block=16, kv_heads=2, d=128):
    """Decode of `queries` tokens of each sequence over `lengths` keys in pages of `block`."""
    name, kind = file.split("_")[1], next(x for x in ("noquant", "Fp8", "Int8") if x in file)
    heads, target = group * kv_heads, run.result.target
    run.result.size = f"{', '.join(map(str, lengths))} keys, {', '.join(map(str, queries))} queries, heads {heads}/{kv_heads}"
    most = max(-(-n // block) for n in lengths)
    pages = run.rng.permutation(len(lengths) * most + 3)[: len(lengths) * most].reshape(-1, most).astype(np.int32)
    dtype = {"noquant": TYPES[name], "Int8": np.int8, "Fp8": FP8[target]}[kind]
    keys, packed, factors = cache(run, pages.size + 3, kv_heads, block, d, kind, dtype, target)
    q = run.normal(sum(queries), heads, d).astype(TYPES[name])
    starts = starts_of(queries)
    args = (
        [Out("o", q.shape, q.dtype), q, *packed, pages, np.array(lengths, np.int32), *factors]
        + [f32(np.log2(np.e) / d**0.5), u32(most), u32(kv_heads), u32(q[0].nbytes)]
        + [u32(packed[0][0].nbytes), u32(packed[0][0, 0].nbytes), u32(max(queries) - 1), u32(group), starts]
    )
    out = run.launch(f"pa/{file}.co", (kv_heads, len(lengths), 1), 256, args, trim=True)
    if kind != "noquant":
        # The kernels quantize q, too.
        q, factor = quantized(q.astype(np.float32), kind, dtype, LARGEST.get(kind) or LARGEST[target])
        q = (q.astype(np.float32) * factor)
    loss = 2.0**-4 if kind == "Fp8" and "uhp" not in file else 2.0**-10 if name == "fp16" and kind == "noquant" else 2.0**-7
    compare(run, out["o"], q, keys, factors, kind, loss, pages, lengths, queries, "msk0" not in file)


def persistent(run, file, group, lengths, queries, block, kv_heads=2, d=128):
    """The same from a list of work, which cuts long sequences: these give partial sums; host code: `pa_ps_fwd`."""
    heads, target, dtype = group * kv_heads, run.result.target, FP8[run.result.target]
    run.result.size = f"{', '.join(map(str, lengths))} keys, {', '.join(map(str, queries))} queries, heads {heads}/{kv_heads}"
    pages, rows = starts_of([-(-x // block) for x in lengths]), starts_of(queries)
    table = run.rng.permutation(pages[-1] + 3)[: pages[-1]].astype(np.int32)
    axis = (2, 3) if "perblock" in file else -1
    keys, packed, factors = cache(run, table.size + 3, kv_heads, block, d, "Fp8", dtype, target, axis)
    q = run.normal(rows[-1], heads, d, dtype=bf16)
    spans, own = (list(zip(x, x[1:])) for x in (pages, rows))
    ranges = [i * group | (i + 1) * group << 16 for i in range(kv_heads)]
    pointers, work, cut, used = work_list(spans, own, 2, ranges, 3)
    out = run.launch(
        f"pa/{file}.co",
        (len(pointers) - 1, 1, 1),
        256,
        [Out("o", q.shape), q, *packed, table, np.array(lengths, np.int32), *factors]
        + [f32(np.log2(np.e) / d**0.5), u32(kv_heads), u32(q[0].nbytes), u32(packed[0][0].nbytes)]
        + [u32(packed[0][0, 0].nbytes), u32(max(queries) - 1), u32(group), rows, pages, pointers, work]
        + [Out("part", (used, heads, d), np.float32), Out("sums", (used, heads), np.float32)]
        + [u32(factors[0][0, 0].nbytes), u32(factors[0][0].nbytes)],
        trim=True,
    )
    # On both targets, kernels for a factor per page scale q to 240.
    q, factor = quantized(q.astype(np.float32), "Fp8", dtype, LARGEST["gfx942" if "perblock" in file else target])
    got = merge(out["o"], cut, out["part"], out["sums"])
    own = [table[begin:end] for begin, end in spans]
    compare(run, got, q.astype(np.float32) * factor, keys, factors, "Fp8", 2.0**-4, own, lengths, queries)


# The lengths leave tails of a page and of a tile of 256 keys.
DECODE = dict(lengths=[300, 37, 1], queries=[1] * 3)


def objects():
    """Target, file, and arguments of `paged`."""
    for target in TARGETS:
        for name in TYPES:
            for kind in ("noquant", "pertokenFp8", "pertokenInt8"):
                for group in (8, 16):
                    one = f"pa_{name}_{kind}_gqa{group}"
                    for more in ("", "_hp", "_uhp") if (kind, group) == ("pertokenFp8", 8) else ("",):
                        yield target, f"{one}_{'1' if kind == 'noquant' else '2'}tg_4w{more}", dict(DECODE, group=group)
                    if (kind, group) != ("noquant", 16):
                        for mask in (0, 1):
                            queries = [2, 1, 2] if group == 8 else [1] * 3
                            more = dict(group=group, lengths=[300, 37, 2], queries=queries)
                            yield target, f"{one}_1tg_4w_mtp_msk{mask}", more
    for n in range(1, 5):
        more = dict(group=10, block=1024, lengths=[1050, 37, 600], queries=[n] * 3)
        yield "gfx942", f"pa_bf16_pertokenFp8_gqa10_1tg_4w_qlen{n}_msk1", more


    for target in TARGETS:
        for kind, block in (("perblockFp8_blk256", 256), ("perblockFp8_blk1024", 1024), ("pertokenFp8_gqa16", 1024)):
            # Heads and queries fill the tile of rows, or all but the last.
            for rows, group, n in ((16, 8, 2), (32, 8, 4), (40, 10, 4), (48, 16, 3), (64, 16, 4)):
                more = dict(group=group, block=block, lengths=[4 * block + 50, 37, 2 * block - 1], queries=[n] * 3)
                yield target, f"pa_bf16_{kind}_1tg_4w_qlen{rows}_msk1_ps", more


for target, file, more in objects():
    text = file.removeprefix("pa_").replace("_gqa", ", gqa").replace("_1tg_4w", "").replace("_2tg_4w", "")
    case(f"paged attention decode, {text.replace('_', ', ')}", target)(
        lambda run, file=file, more=more: (persistent if "_ps" in file else paged)(run, file, **more)
    )
