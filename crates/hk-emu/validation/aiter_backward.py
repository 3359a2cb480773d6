"""AITER: attention backward. Arguments are in slots of 16 bytes, in the order of the structs of the host code, mha_bwd.cu."""

import numpy as np
from aiter_attention import attention, band, weighed
from harness import Out, bf16, case, f32, i32, starts_of, u32

MASKS = {"": 0, "_causal": 1, "_causal_br": 2, "_swa": 3}  # none; ends at the diagonal; at the last key; a window
WINDOW = 37, 5  # keys before and behind the diagonal that ends at the last key
SLACK = 64


def gradients(ds, p, q, k, do):
    """dq, dk and dv of one sequence, those of each query head."""
    over_q = lambda w, x: np.einsum("bhst,bshd->bthd", w, x)[0]  # noqa: E731
    return [weighed(ds, k)[0], over_q(ds, q), over_q(p, do)]


def backward(run, parts, dims, tile, lengths, pad=None, short=0, heads=(4, 2)):
    """dq, dk and dv by three kernels: sums of o do; dq dk dv; and, where dq is summed in another format, its conversion.

    `parts` of the name: type, mask, the format of the sums of dq, rounding, and the rest. `lengths` are the queries and keys
    of each sequence; with `pad`, sequences are packed (group mode), with so many rows between them. Heads have `short`
    elements fewer than the kernel is made for."""
    kind, mask, sums, rounding, _ = parts
    target, group, wide_sums = run.result.target, pad is not None, sums == "_a32"
    (hq, hk), (sq, sk), b = heads, zip(*lengths), len(lengths)
    padded, (d, dv) = dims, (x - short for x in dims)
    run.result.size = f"q {', '.join(map(str, sq))}, k {', '.join(map(str, sk))}, heads {hq}/{hk}, dim {d}"
    run.result.size += f"/{dv}" if dv != d else ""
    # The older kernels truncate to f16.
    nearest = target == "gfx950" and padded[1] == 128 and mask != "_swa"
    dtype, ulp = (np.float16, 2.0 ** -(10 + nearest)) if kind == "fp16" else (bf16, 2.0 ** -(8 - (rounding == "_rtz")))
    least = 2.0**-24 if kind == "fp16" else 0  # what f16 may lose of small values
    first_q, first_k = (starts_of([n + (pad or 0) for n in x]) for x in (sq, sk))
    rows_q, rows_k = int(first_q[-1]), int(first_k[-1])
    q, do = (run.normal(rows_q, hq, x).astype(dtype) for x in (d, dv))
    k, v = (run.normal(rows_k, hk, x).astype(dtype) for x in (d, dv))
    scale = float(np.float32(d**-0.5))

    o, lse, want, bound = np.zeros(do.shape, dtype), np.zeros((hq, rows_q), np.float32), [], []
    for i, (m, n) in enumerate(lengths):
        at_q, at_k = slice(first_q[i], first_q[i] + m), slice(first_k[i], first_k[i] + n)
        part = [x[None, at].astype(np.float64) for x, at in ((q, at_q), (k, at_k), (v, at_k), (do, at_q))]
        visible = {
            0: None, 1: band(m, n, -m, 0), 2: band(m, n, -m, n - m), 3: band(m, n, n - m - WINDOW[0], n - m + WINDOW[1]),
        }[MASKS[mask]]
        exact, log_sum, p = attention(*part[:3], scale, visible)
        o[at_q], lse[:, at_q] = exact[0], log_sum[0]
        dp = np.einsum("bshd,bthd->bhst", part[3], np.repeat(part[2], hq // hk, 2))
        delta = np.einsum("bshd,bshd->bhs", o[None, at_q].astype(np.float64), part[3])[..., None]
        ds = p * (dp - delta) * scale
        q_k_do = [part[j] for j in (0, 1, 3)]
        want.append(gradients(ds, p, *q_k_do))
        # P and dS are rounded before the products; before that, the terms of dS in f32.
        loose = ulp * np.abs(ds) + 2**-14 * p * (np.abs(dp) + np.abs(delta)) * scale + least
        bound.append(gradients(loose, (ulp + 2**-14) * p + least, *map(np.abs, q_k_do)))

    def strides(shape, n, size=2):
        """Bytes from head to head, sequence to sequence and row to row of [rows, heads, dim]."""
        row = shape[1] * shape[2] * size
        return [u32(shape[2] * size), u32(0 if group else n * row), u32(row)]

    folder, packed = "fmha_v3_bwd", "_group" if group else ""
    starts_q, starts_k = ([starts_of(x), y] if group else [None] * 2 for x, y in ((sq, first_q), (sk, first_k)))
    most_q, most_k = max(sq), max(sk)
    total_q, total_k = (rows_q, rows_k) if group else (sq[0], sk[0])
    by_head = [u32(4 * total_q), u32(0 if group else 4 * hq * total_q), u32(4)]
    # Kernels with a window read these beyond the last query, and multiply by zero: they must be finite.
    lse = np.append(lse if group else lse.reshape(hq, b, -1).transpose(1, 0, 2), np.zeros(SLACK, np.float32))
    delta = run.launch(
        f"{folder}/bwd_hd{padded[1]}_odo_{kind}{packed}.co",
        (-(-most_q // 128), hq, b),
        256,
        [o, do, Out("d", lse.shape, np.float32, fill=0x7F)] + strides(o.shape, sq[0]) * 2 + by_head
        + [u32(total_q), u32(dv)] + starts_q,
    )["d"]
    rows = np.concatenate([np.arange(first_q[i], first_q[i] + m) for i, m in enumerate(sq)])
    keys = np.concatenate([np.arange(first_k[i], first_k[i] + n) for i, n in enumerate(sk)])
    mine = delta[:-SLACK].reshape(hq, -1) if group else delta[:-SLACK].reshape(b, hq, -1).transpose(1, 0, 2).reshape(hq, -1)
    mine = mine[:, rows]
    terms = o.astype(np.float64)[rows] * do.astype(np.float64)[rows]
    run.compare("sum of o do", mine, terms.sum(2).T, 1e-6, 2**-20 * np.abs(terms).sum(2).T)

    # dq is summed by atomics: in f32, or in 16 bits, on gfx950 in an order of its own.
    convert = wide_sums or (target == "gfx950" and padded[0] != 64)
    acc_rows = total_q if wide_sums else -(-most_q // 16) * 16
    acc_dim = d if wide_sums else 192 if d == 192 else 128
    acc_batch = 1 if group and wide_sums else b
    acc = Out("dq", (acc_batch, hq, acc_rows, acc_dim), np.float32 if wide_sums else dtype, fill=0)
    dq = Out("dq", q.shape, dtype, fill=0x7F if convert else 0)
    dk, dv_ = (Out(x, (rows_k, hq, y), dtype, fill=0x7F) for x, y in (("dk", d), ("dv", dv)))
    tiles = -(-most_k // tile)
    # Both ends of the triangle make one workgroup.
    grid = -(-tiles // 2) if MASKS[mask] in (1, 2) else tiles
    file = f"bwd_hd{padded[0]}{'_128' if padded[1] != padded[0] else ''}_{''.join(parts)}{packed}.co"
    got = run.launch(
        f"{folder}/{file}",
        (grid, hq, b),
        256,
        [acc if convert else dq, dk, dv_, q, k, v, do, lse, delta, f32(scale), f32(np.log2(np.e)), u32(total_q)]
        + [u32(tile * hk * d * 2)] + strides(q.shape, sq[0]) + [u32(hq // hk)] + strides(k.shape, sk[0])
        + strides(dk.shape, sk[0])[2:] + [u32(total_k), u32(d), u32(dv), u32(hq)]
        + strides(v.shape, sk[0]) + strides(do.shape, sq[0]) + strides(dk.shape, sk[0])[:2] + strides(dv_.shape, sk[0])
        + [by_head[0], starts_q[0], starts_k[0], starts_q[1], starts_k[1], u32(most_q if wide_sums else acc_rows)]
        + [i32(1 + WINDOW[1] + sk[0] - sq[0]), i32(1 + WINDOW[0] + sq[0] - sk[0])],
    )
    if convert:
        size = np.dtype(acc.dtype).itemsize
        name = f"dq_convert_{kind}{rounding}" if wide_sums else "dq_shuffle"
        if target == "gfx950":
            name = name.removesuffix(rounding)
        done = run.launch(
            f"{folder}/bwd_hd{padded[0]}_{name}{packed}.co",
            (-(-most_q // 64), hq, b),
            256,
            [got["dq"], dq, u32(acc_rows * acc_dim * size), u32(hq * acc_rows * acc_dim * size * (acc_batch > 1))]
            + [u32(acc_dim * size)] + strides(q.shape, sq[0]) + [u32(total_q), u32(d)] + starts_q,
        )
        got = dict(got, dq=done["dq"])
    run.result.kernel = file

    for name, at, x, y in zip(("dq", "dk", "dv"), (rows, keys, keys), zip(*want), zip(*bound)):
        # Sums in 16 bits are rounded once for each tile of keys.
        atol = np.concatenate(y) * (1 + tiles * (name == "dq" and not wide_sums)) + least
        run.compare(name, got[name][at], np.concatenate(x), ulp, atol)
        if pad:
            gap = np.delete(got[name], at, 0).view(np.uint16)
            run.equal(f"{name} between", gap, np.full_like(gap, 0x7F7F if name != "dq" or convert else 0))


# Lengths for kernels that want them equal and whole tiles; for others, causal masks among them; and packed.
WHOLE, RAGGED, PACKED = [(320, 320)] * 2, [(100, 210)] * 2, [(100, 210), (1, 33), (70, 95)]


def objects():
    """Target, parts of the name, and arguments of `backward`."""
    types = {"gfx942": ["fp16", "bf16_rtne", "bf16_rtna", "bf16_rtz"], "gfx950": ["fp16", "bf16"]}
    narrow = ("_causal", "")
    all_causal = ("", "_causal", "_causal_br")
    # (dimensions), tile of keys, format of dq, what may be ragged, masks, packed
    table = [(t, (64, 64), 192, "_a16", "", narrow, False) for t in types]
    table += [(t, (64, 64), 192, "_a32", "_pssk", all_causal, group) for t in types for group in (False, True)]
    table += [(t, (192, 192), 64, "_a32", "_psskddv", all_causal, group) for t in types for group in (False, True)]
    table += [("gfx942", (128, 128), 192, sums, rest, masks, group) for sums, rest, masks, group in (
        ("_a16", "", narrow, False), ("_a16", "_pddv", narrow, False), ("_a32", "", narrow, False),
        ("_a32", "_psskddv", (*all_causal, "_swa"), False), ("_a32", "_pssk", all_causal, True),
        ("_a32", "_psskddv", all_causal, True),
    )]
    table += [("gfx950", (128, 128), 256, sums, "_psskddv", all_causal, group)
              for sums in ("_a16", "_a32") for group in (False, True)]
    table += [("gfx950", (128, 128), 192, "_a32", "_psskddv", ("_swa",), False)]
    table += [("gfx950", (192, 128), 192, sums, "_pssk", all_causal, False) for sums in ("_a16", "_a32")]
    for target, dims, tile, sums, rest, masks, group in table:
        for mask in masks:
            # What gfx950 has from gfx942 keeps its roundings.
            same = dims in ((64, 64), (192, 192)) or mask == "_swa"
            for kind in types["gfx942" if same else target]:
                kind, _, rounding = kind.partition("_")
                parts = (kind, mask, sums, f"_{rounding}" if rounding else "", rest)
                lengths = PACKED if group else RAGGED if "ssk" in rest else WHOLE
                if sums == "_a32" and not rest:
                    lengths = [(192, 192)] * 2
                short = 16 if "ddv" in rest else 0
                yield target, parts, dict(dims=dims, tile=tile, lengths=lengths, pad=5 if group else None, short=short)


for target, parts, more in objects():
    d, dv = more["dims"]
    kind, mask, sums, rounding, rest = parts
    text = f"{kind}, hd{d}{f'x{dv}' if dv != d else ''}{''.join(x.replace('_', ', ', 1) for x in (mask, sums, rest))}"
    text += (", packed" if more["pad"] else "") + rounding.replace("_", ", ")
    case(f"flash attention backward, {text}", target)(lambda run, parts=parts, more=more: backward(run, parts, **more))
