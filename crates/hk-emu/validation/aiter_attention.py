"""AITER: attention. Arguments are in slots of 16 bytes, in the order of the structs of the host code."""

import numpy as np
from harness import Out, bf16, case, e4m3, e4m3fnuz, f32, starts_of, u32


def band(rows, columns, first, last):
    """Which keys j a query i sees: first <= j - i <= last."""
    distance = np.arange(columns)[None] - np.arange(rows)[:, None]
    return (first <= distance) & (distance <= last)


def causal(rows, columns):
    """The causal mask that ends at the last key."""
    return band(rows, columns, -rows, columns - rows)


def attention(q, k, v, scale, visible=None):
    """Softmax attention in f64: output, log of the sums, probabilities. q [b, s, h, d], k and v [b, t, kv heads, d]."""
    group = q.shape[2] // k.shape[2]
    q, k = q.astype(np.float64), np.repeat(k.astype(np.float64), group, 2)
    s = np.einsum("bshd,bthd->bhst", q, k) * scale
    if visible is not None:
        s = np.where(visible, s, -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    return weighed(p / total, v), (top + np.log(total))[..., 0], p / total


def weighed(p, v):
    """Values v [b, t, kv heads, d] with the weights p [b, h, s, t] of attention."""
    return np.einsum("bhst,bthd->bshd", p, np.repeat(v.astype(np.float64), p.shape[1] // v.shape[2], 2))


def strides(x):
    """Bytes from row to row, head to head and batch to batch of [b, s, h, d]."""
    b, h, s = x.strides[0], x.strides[2], x.strides[1]
    return [u32(s), u32(h), u32(b)]


def work_list(spans, rows, most, ranges, workgroups):
    """The work of a persistent kernel: pointers of the workgroups into it, and its items of eight words: sequence, first row
    of partial sums or -1, rows of queries, keys, how many keys follow (left 0), and one of `ranges`, heads.

    Keys of a sequence, `spans` [begin, end), are cut into parts of at most `most`; `rows` are those of its queries. The
    partial sums of a sequence that was cut come third, as (rows of queries, first rows of the sums), and fourth how many
    rows these are."""
    items, cut, used = [], [], 0
    for i, ((begin, end), (first, last)) in enumerate(zip(spans, rows)):
        starts = range(begin, end, most)
        partial = [used + (last - first) * j for j in range(len(starts))] if len(starts) > 1 else [-1]
        if len(starts) > 1:
            cut.append(((first, last), partial))
            used += (last - first) * len(starts)
        items += [(i, at, first, last, x, min(x + most, end), 0) for at, x in zip(partial, starts)]
    work = np.array([(*x, r) for r in ranges for x in items], np.int32)
    return np.linspace(0, len(work), workgroups + 1).astype(np.int32), work, cut, used


def merge(out, cut, partial, sums, total=None):
    """Output of all sequences in f64, from the rows that are complete and from partial sums [rows, heads, d] and the logs of
    their sums [rows, heads]. `total` receives the logs of the merged sums."""
    out = out.astype(np.float64)
    for (first, last), starts in cut:
        part = [np.stack([x.astype(np.float64)[at : at + last - first] for at in starts]) for x in (partial, sums)]
        weight = np.exp(part[1] - part[1].max(0))
        if total is not None:
            total[first:last] = part[1].max(0) + np.log(weight.sum(0))
        out[first:last] = (part[0] * weight[..., None]).sum(0) / weight.sum(0)[..., None]
    return out


def forward(run, file, lengths, heads=(4, 2), d=128, dv=128, masked=False, dtype=bf16, pad=None):
    """Flash attention; host code: mha_fwd.cu. `lengths` are the queries and keys of each sequence. With `pad`, sequences
    are packed (group mode), with so many rows between them. fp8 inputs have descale factors, and give bf16."""
    hq, hk = heads
    sq, sk = zip(*lengths)
    b, group, target = len(lengths), pad is not None, run.result.target
    run.result.size = f"q {', '.join(map(str, sq))}, k {', '.join(map(str, sk))}, heads {hq}/{hk}, dim {d}"
    first_q, first_k = (starts_of([n + (pad or 0) for n in x]) for x in (sq, sk))
    rows_q, rows_k = int(first_q[-1]), int(first_k[-1])
    q, k = run.normal(rows_q, hq, d).astype(dtype), run.normal(rows_k, hk, d).astype(dtype)
    v = run.normal(rows_k, hk, dv).astype(dtype)
    quantised = dtype != bf16
    scale = np.float32(d**-0.5)

    tile = 128 if d == 192 else 256
    tiles = -(-(rows_q if group else sq[0]) // tile)
    # Both ends of the triangle make one workgroup.
    pairs = -(-tiles // 2) if masked else tiles
    wide = target == "gfx942" and d == 192
    if group:
        grid = (hq, b, tiles if wide else pairs)
    else:
        grid = (hq, tiles, b) if wide else (pairs, hq, b)
    options = 0 if wide else 5 - 2 * (masked and hq % 8 != 0)
    size = q.itemsize

    def strides(x, n):
        row, head = x.shape[1] * x.shape[2] * x.itemsize, x.shape[2] * x.itemsize
        return [u32(row), u32(head), u32(0 if group else n * row)]

    out = Out("o", (rows_q, hq, dv), fill=0x7F)
    lse = Out("lse", (hq, rows_q) if group else (b, hq, sq[0]), np.float32, fill=0x7F)
    # A factor for each sequence and head of the keys; on gfx950, for each tensor.
    each = (b, hk) if target == "gfx942" else (1, 1)
    scales = [run.rng.uniform(0.5, 1.5, each).astype(np.float32) for _ in range(3)] if quantised else []
    starts = [starts_of(sq), starts_of(sk), first_q, first_k] if group else [None] * 4
    got = run.launch(
        f"fmha_v3_fwd/{file}.co",
        grid,
        256 if d == 192 else 512,
        [out, q, k, v, lse, f32(scale), u32(rows_q if group else sq[0])]
        + [strides(q, 0)[0], u32(tile * hq * d * size)] + strides(q, sq[0])[1:] + [u32(hq // hk)]
        + strides(k, sk[0]) + [u32(options), u32(1), u32(rows_k if group else sk[0]), u32(d), u32(dv), u32(hq)]
        + strides(v, sk[0]) + strides(np.empty(out.shape, bf16), sq[0])
        + starts[:2] + [u32(4 * lse.shape[-1])] + starts[2:]
        + (scales + ([u32(4 * hk), u32(4)] if each[0] > 1 else [u32(0)] * 2) * 3 if quantised else []),
    )
    o, o_want, bound, sums, sums_want, gaps = ([] for _ in range(6))
    for i, (m, n) in enumerate(lengths):
        part = [x[at[i] :][None, :rows] for x, at, rows in ((q, first_q, m), (k, first_k, n), (v, first_k, n))]
        if quantised:
            factors = [np.broadcast_to(x, (b, hk))[i] for x in scales]
            factors[0] = np.repeat(factors[0], hq // hk)
            part = [x.astype(np.float64) * f[:, None] for x, f in zip(part, factors)]
        want, log_sum, p = attention(*part, float(scale), causal(m, n) if masked else None)
        o.append(got["o"][first_q[i] :][:m])
        o_want.append(want[0])
        bound.append(weighed(p, np.abs(part[2]))[0])
        sums.append(got["lse"][:, first_q[i] :][:, :m] if group else got["lse"][i])
        sums_want.append(log_sum[0])
        gaps.append(got["o"][first_q[i] + m : first_q[i + 1]].view(np.uint16))
    # P is rounded before the second product, which moves each term by half a unit in the last place of its type (by a
    # whole one, to zero); so is o, which the fp8 kernels truncate. The rest is f32.
    last = 2.0**-4 if quantised else 2.0**-7 if "rtz" in file else 2.0**-8
    atol = (last + 2**-14) * np.concatenate(bound)
    run.compare("o", np.concatenate(o), np.concatenate(o_want), max(2**-7 * quantised, last * (not quantised)), atol)
    if not quantised:
        run.compare("lse", np.concatenate(sums, 1), np.concatenate(sums_want, 1), 1e-5, 1e-5)
    if pad:
        gap = np.concatenate(gaps)
        run.equal("rows between", gap, np.full_like(gap, 0x7F7F))


def forwards():
    """Every object of both targets: name, target, file and arguments of `forward`."""
    for mask in ("", "_causal"):
        for group in ("", "_group"):
            lengths = [(200, 200)] * 2
            if group:  # causal masks end at the last key
                lengths = [(200, 263), (1, 77), (129, 140)]
            more = dict(lengths=lengths, masked=bool(mask), pad=7 if group else None)
            kind = f"{', causal' if mask else ''}{', packed' if group else ''}"
            for gpu in ("MI300", "MI308"):
                where = "" if gpu == "MI300" else ", MI308"
                for d, name in ((128, "hd128"), (192, "hd192x128")):
                    for rounding in ("rtne", "rtna", "rtz"):
                        file = f"{gpu}/fwd_{name}_bf16{mask}_{rounding}{group}"
                        yield f"bf16, {name}{kind}, {rounding}{where}", "gfx942", file, dict(more, d=d)
                file = f"{gpu}/fwd_hd128_fp8{mask}{group}"
                yield f"fp8, hd128{kind}{where}", "gfx942", file, dict(more, dtype=e4m3fnuz)
            for name, d, dv, dtype in (
                ("hd128_bf16", 128, 128, bf16), ("hd192_hd128_bf16", 192, 128, bf16),
                ("hd128_fp8", 128, 128, e4m3), ("hd256_fp8", 256, 256, e4m3),
            ):
                file, (size, kind_of) = f"fwd_{name}{mask}{group}", name.rsplit("_", 1)
                yield f"{kind_of}, {size}{kind}", "gfx950", file, dict(more, d=d, dv=dv, dtype=dtype)


for name, target, file, more in forwards():
    case(f"flash attention forward, {name}", target)(lambda run, file=file, more=more: forward(run, file, **more))
