#!/usr/bin/env python3
"""AITER's hand-written objects and our operators side by side in the emulator, on the same shapes.

  compare.py TABLE --hk target/release/hk --aiter AITER/hsa [--param NAME=VALUE ..]

TABLE is `forward`, `backward`, `decode`, `latent` or `moe`. Both are compared with the f64 reference first. Prints clocks of a
compute unit, by unit: of `forward` and `backward` for 1000 visible pairs of query and key of a head (a block of 256 queries and
8192 keys has 2097 times as many), else thousands for the whole call. Needs numpy and ml_dtypes.
"""

import argparse
import json
import subprocess
import tempfile

import harness
import numpy as np
from aiter_attention import attention, causal, forward
from aiter_backward import backward
from aiter_mla import latent
from aiter_moe import fused
from aiter_paged import paged
from harness import FP8, bf16, write_safetensors

UNITS = ("matrix", "vector", "transcendental", "packed_f32", "lds", "memory")


def run(args, target, operator, tensors, **params):
    """An operator of ours: its kernels, launches, and what all execute."""
    with tempfile.NamedTemporaryFile() as file:
        write_safetensors(file.name, tensors)
        command = [args.hk, "run", operator, "--in", file.name, "--device", f"emu:{target}", "--check", "--json"]
        for param in [f"{name}={value}" for name, value in params.items()] + args.param:
            command += ["--param", str(param)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr.strip())
    report = json.loads(done.stdout)
    launches = sum(k["launches"] for k in report["kernels"])
    executed = dict(report["counters"], clocks=report["clocks"])
    return ", ".join(k["kernel"] for k in report["kernels"]), launches, [executed]


def theirs(args, target, file, case, *more, **named):
    """A case of AITER's: its object, launches, and what each executes."""
    run = harness.Run(args.hk, args.aiter, file, target)
    case(run, *more, **named)
    if not run.result.passed():
        raise SystemExit(f"{file}: wrong")
    return f"AITER {file}", len(run.result.executed), run.result.executed


def pairs(size, masked):
    m, n = size
    return sum(n - m + i + 1 for i in range(m)) if masked else m * n


# Each table: rows of what, target, a unit of clocks, and a function of theirs or ours.


def forwards(args):
    """Queries and keys, causal, columns of queries and of values, fp8 instead of bf16."""
    for size, masked, d, dv, fp8 in [
        ((256, 8192), False, 128, 128, False),
        ((2048, 2048), True, 128, 128, False),
        ((256, 8192), False, 192, 128, False),
        ((2048, 2048), True, 192, 128, False),
        ((256, 8192), False, 128, 128, True),
        ((256, 8192), False, 256, 256, True),
    ]:
        columns = str(d) if d == dv else f"{d} and {dv}"
        what = f"{size[0]} x {size[1]}{', causal' if masked else ''}, {'fp8' if fp8 else 'bf16'}, {columns}"
        for target in harness.TARGETS:
            dtype, n = FP8[target] if fp8 else bf16, pairs(size, masked)
            for file in forward_files(target, masked, d, dv, fp8):
                yield what, target, n / 1000, theirs(args, target, file, forward, file, [size], (1, 1), d, dv, masked, dtype)
            rng, (m, keys) = np.random.default_rng(1), size
            shapes = {"q": (1, m, 1, d), "k": (1, keys, 1, d), "v": (1, keys, 1, dv)}
            tensors = {name: rng.standard_normal(s).astype(dtype) for name, s in shapes.items()}
            yield what, target, n / 1000, run(args, target, "mha", tensors, causal=str(masked).lower())


def forward_files(target, masked, d, dv, fp8):
    """AITER's objects: on gfx942 bf16 P is rounded to nearest even, or truncated."""
    mask = "_causal" if masked else ""
    if fp8:
        served = target == "gfx950" or d == 128
        return [f"{'MI300/' if target == 'gfx942' else ''}fwd_hd{d}_fp8{mask}"] if served else []
    if target == "gfx950":
        return [f"fwd_hd{d}{'_hd128' if d != dv else ''}_bf16{mask}"]
    return [f"MI300/fwd_hd{d}{'x128' if d != dv else ''}_bf16{mask}_{rounding}" for rounding in ("rtne", "rtz")]


def backwards(args):
    """Columns, causal; the sums of dq in f32. Theirs: sums of o do, gradients with atomics, conversion of dq."""
    size, heads = (1024, 1024), (1, 1)
    for d, masked in [(128, False), (128, True), (64, False)]:
        what, n = f"{size[0]} x {size[1]}{', causal' if masked else ''}, bf16, {d}", pairs(size, masked)
        for target in harness.TARGETS:
            rounding = "_rtne" if target == "gfx942" or d == 64 else ""
            parts = ("bf16", "_causal_br" if masked else "", "_a32", rounding, "_pssk" if d == 64 else "_psskddv")
            tile = 256 if target == "gfx950" and d == 128 else 192
            file = f"bwd_hd{d}_{''.join(parts)}"
            yield what, target, n / 1000, theirs(args, target, file, backward, parts, (d, d), tile, [size], heads=heads)
            rng = np.random.default_rng(1)
            q, k, v, dout = (rng.standard_normal((1, m, 1, d)).astype(bf16) for m in (*size, size[1], size[0]))
            out, lse, _ = attention(q, k, v, d**-0.5, causal(*size) if masked else None)
            tensors = {"q": q, "k": k, "v": v, "out": out.astype(bf16), "lse": lse.astype(np.float32), "dout": dout}
            for operator in ("mha_onekernel_bwd", "mha_fused_bwd"):
                yield what, target, n / 1000, run(args, target, operator, tensors, causal=str(masked).lower())


def decodes(args):
    """Pages of 16 tokens, 2 key heads, 8 query heads each; theirs have factors for each token, and quantize queries, too."""
    lengths, group, kv_heads, d, page = [4096] * 4, 8, 2, 128, 16
    pages = sum(lengths) // page
    for kind, files in (
        ("bf16", ["pa_bf16_noquant_gqa8_1tg_4w"]),
        ("fp8", ["pa_bf16_pertokenFp8_gqa8_2tg_4w"]),
    ):
        what = f"{len(lengths)} x {lengths[0]} keys, {kind}, heads {group * kv_heads}/{kv_heads}, {d}"
        for target in harness.TARGETS:
            for file in files:
                yield what, target, 1000, theirs(args, target, file, paged, file, group, lengths, [1] * 4, page, kv_heads, d)
            rng, dtype = np.random.default_rng(1), FP8[target] if kind == "fp8" else bf16
            cache = lambda: rng.standard_normal((pages, page, kv_heads, d)).astype(dtype)  # noqa: E731
            tensors = {
                "q": rng.standard_normal((len(lengths), group * kv_heads, d)).astype(bf16),
                "k_cache": cache(),
                "v_cache": cache(),
                "block_table": rng.permutation(pages).reshape(len(lengths), -1).astype(np.int32),
                "seq_lens": np.array(lengths, np.int32),
            }
            if kind == "fp8":
                tensors |= {"k_scale": np.ones(1, np.float32), "v_scale": np.ones(1, np.float32)}
            yield what, target, 1000, run(args, target, "pa_decode", tensors, keys_per_split=max(lengths))


def latents(args):
    """DeepSeek's latent attention, keys of a sequence in two splits; theirs need a second kernel to merge them, not counted."""
    lengths = [4096] * 2
    for heads, kind, file, more in [
        (16, "bf16", "mla_dec_stage1_bf16_a16w16_subQ16_mqa16", dict(sub_q=16, least=64)),
        (128, "bf16", "mla_dec_stage1_bf16_a16w16_subQ128_mqa128", {}),
        (16, "fp8", "mla_a8w8_qh16_qseqlen1_gqaratio16", dict(least=64)),
        (128, "fp8", "mla_a8w8_qh128_m32x4_n16x2_msk1", dict(least=32)),
    ]:
        what = f"{len(lengths)} x {lengths[0]} rows, {kind}, {heads} heads"
        for target in harness.TARGETS:
            yield what, target, 1000, theirs(
                args, target, file, latent, file, heads, 1, lengths, (kind, kind), splits=2, **more
            )
            rng, dtype = np.random.default_rng(1), FP8[target] if kind == "fp8" else bf16
            tensors = {
                "q": rng.standard_normal((len(lengths), heads, 576)).astype(bf16),
                "kv_pool": rng.standard_normal((sum(lengths), 1, 1, 576)).astype(dtype),
                "kv_indptr": harness.starts_of(lengths),
                "kv_indices": rng.permutation(sum(lengths)).astype(np.int32),
            }
            if kind == "fp8":
                tensors["kv_scale"] = np.ones(1, np.float32)
            params = dict(scale=576**-0.5, nsplit=2)
            yield what, target, 1000, run(args, target, "mla_decode_rope", tensors, **params)


def moes(args):
    """A whole layer, each expert with two tokens of eight; routing and quantization of the tokens are in ours, not in theirs."""
    tokens, experts, topk, dim, inner = 32, 8, 2, 2048, 1024
    for kind, file in [
        ("fp8 by token", "fmoe/silu/fmoe_bf16_pertokenFp8_g1u1_vs_silu_1tg_32x512"),
        ("fp8 by blocks", "fmoe/silu/fmoe_bf16_blockscaleFp8_g1u1_vs_silu_1tg_32x256"),
    ]:
        what = f"{tokens} tokens, top {topk} of {experts}, {dim} x {inner}, {kind}"
        for target in harness.TARGETS:
            shape = dict(tokens=tokens, experts=experts, topk=topk, dim=dim, inter=inner)
            yield what, target, 1000, theirs(args, target, file, fused, f"{file}.co", **shape)
            rng = np.random.default_rng(1)
            ids = np.stack([rng.permutation(experts)[:topk] for _ in range(tokens)])
            scale = lambda *s: rng.uniform(0.01, 0.02, s).astype(np.float32)  # noqa: E731
            of_w = [(experts, 2 * inner, dim), (experts, dim, inner)]
            scales = [s[:2] if "token" in kind else (s[0], s[1] // 128, s[2] // 128) for s in of_w]
            tensors = {
                "x": rng.standard_normal((tokens, dim)).astype(bf16),
                **{f"w{i + 1}": rng.standard_normal(s).astype(FP8[target]) for i, s in enumerate(of_w)},
                **{f"w{i + 1}_scale": scale(*s) for i, s in enumerate(scales)},
                "topk_ids": ids.astype(np.int32),
                "topk_weights": rng.random((tokens, topk)).astype(np.float32),
            }
            yield what, target, 1000, run(args, target, "fused_moe", tensors, k=topk)


TABLES = {"forward": forwards, "backward": backwards, "decode": decodes, "latent": latents, "moe": moes}


def row(what, target, unit, kernel, launches, executed, scores):
    total = {u: sum(e["clocks"][u] for e in executed) for u in UNITS}
    busiest = max(total[u] for u in ("matrix", "vector", "lds", "memory"))
    bound = total["matrix"] / max(sum(total[u] for u in ("matrix", "transcendental", "packed_f32")), 1)
    lds, conflicts = (sum(e["details"][k] for e in executed) for k in ("lds_clocks", "lds_conflict_clocks"))
    shares = [f"{total['matrix'] / busiest:.0%}", f"{bound:.0%}", f"{lds / max(lds - conflicts, 1):.2f}"]
    if scores:
        shares.append(f"{64 * sum(e['valu'] for e in executed) / (1000 * unit):.2f}")
    else:
        shares.append(f"{sum(e['global_read_bytes'] for e in executed) / 1e6:.1f}")
    digits = 0 if scores else 1
    per = [f"{total[u] / unit:.{digits}f}" for u in UNITS]
    return f"| {' | '.join([what, target, f'`{kernel}`', str(launches), *per, *shares])} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--hk", default="target/release/hk", help="the hk program")
    parser.add_argument("--aiter", required=True, help="the folder hsa of AMD's repository AITER")
    parser.add_argument("--param", default=[], action="append", help="a parameter of our operator")
    args = parser.parse_args()
    scores = args.table in ("forward", "backward")
    head = ["shape", "target", "kernels", "launches", "matrix", "vector", "exp", "packed f32", "LDS", "memory"]
    head += ["matrix of busiest", "bound", "LDS conflicts", "VALU a score" if scores else "MB read"]
    print(f"| {' | '.join(head)} |\n|{'---|' * 3}{'--:|' * (len(head) - 3)}")
    for what, target, unit, run_of in TABLES[args.table](args):
        print(row(what, target, unit, *run_of, scores), flush=True)


if __name__ == "__main__":
    main()
