#!/usr/bin/env python3
"""Attention side by side in the emulator: AITER's hand-written forward objects and `mha`, on the same shapes.

  compare_attention.py --hk target/release/hk --aiter AITER/hsa [--param NAME=VALUE ..]

Both are compared with the f64 reference first. Prints clocks of a compute unit, by unit, for 1000 visible pairs of query and
key of a head: a block of 256 queries and 8192 keys has 2097 times as many. Needs numpy and ml_dtypes.
"""

import argparse
import json
import subprocess
import tempfile

import harness
import numpy as np
from aiter_attention import forward
from harness import FP8, bf16, write_safetensors

# Queries and keys, causal, columns of queries and of values, fp8 instead of bf16.
SHAPES = [
    ((256, 8192), False, 128, 128, False),
    ((2048, 2048), True, 128, 128, False),
    ((256, 8192), False, 192, 128, False),
    ((2048, 2048), True, 192, 128, False),
    ((256, 8192), False, 128, 128, True),
    ((256, 8192), False, 256, 256, True),
]
UNITS = ("matrix", "vector", "transcendental", "packed_f32", "lds", "memory")


def files(target, causal, d, dv, fp8):
    """AITER's objects: on gfx942 bf16 P is rounded to nearest even, or truncated."""
    mask = "_causal" if causal else ""
    if fp8:
        served = target == "gfx950" or d == 128
        return [f"{'MI300/' if target == 'gfx942' else ''}fwd_hd{d}_fp8{mask}"] if served else []
    if target == "gfx950":
        return [f"fwd_hd{d}{'_hd128' if d != dv else ''}_bf16{mask}"]
    return [f"MI300/fwd_hd{d}{'x128' if d != dv else ''}_bf16{mask}_{rounding}" for rounding in ("rtne", "rtz")]


def aiter(args, target, file, size, causal, d, dv, fp8):
    """What AITER's kernel executes."""
    run = harness.Run(args.hk, args.aiter, file, target)
    forward(run, file, [size], (1, 1), d, dv, causal, FP8[target] if fp8 else bf16)
    if not run.result.passed():
        raise SystemExit(f"{file}: wrong")
    return run.result.executed[0]


def ours(args, target, size, causal, d, dv, fp8):
    """The kernels of `mha`, and what they execute."""
    rng, (m, n), dtype = np.random.default_rng(1), size, FP8[target] if fp8 else bf16
    shapes = {"q": (1, m, 1, d), "k": (1, n, 1, d), "v": (1, n, 1, dv)}
    with tempfile.NamedTemporaryFile() as file:
        write_safetensors(file.name, {k: rng.standard_normal(s).astype(dtype) for k, s in shapes.items()})
        command = [args.hk, "run", "mha", "--in", file.name, "--device", f"emu:{target}", "--check", "--json"]
        for param in [f"causal={str(causal).lower()}", *args.param]:
            command += ["--param", param]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr.strip())
    report = json.loads(done.stdout)
    return ", ".join(k["kernel"] for k in report["kernels"]), dict(report["counters"], clocks=report["clocks"])


def pairs(size, causal):
    m, n = size
    return sum(n - m + i + 1 for i in range(m)) if causal else m * n


def row(what, kernel, executed, target, n):
    clocks = executed["clocks"]
    per = [f"{1000 * clocks[unit] / n:.0f}" for unit in UNITS]
    busiest = max(clocks[unit] for unit in ("matrix", "vector", "lds", "memory"))
    bound = clocks["matrix"] / sum(clocks[unit] for unit in ("matrix", "transcendental", "packed_f32"))
    details = executed["details"]
    conflicts = details["lds_clocks"] / max(details["lds_clocks"] - details["lds_conflict_clocks"], 1)
    shares = [f"{clocks['matrix'] / busiest:.0%}", f"{bound:.0%}", f"{conflicts:.2f}", f"{64 * executed['valu'] / n:.2f}"]
    return f"| {' | '.join([what, target, f'`{kernel}`', *per, *shares])} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hk", default="target/release/hk", help="the hk program")
    parser.add_argument("--aiter", required=True, help="the folder hsa of AMD's repository AITER")
    parser.add_argument("--param", default=[], action="append", help="a parameter of mha")
    args = parser.parse_args()
    head = ["queries x keys, type, columns", "target", "kernel", "matrix", "vector", "exp", "packed f32", "LDS", "memory"]
    head += ["matrix of busiest", "bound", "LDS conflicts", "VALU a score"]
    print(f"| {' | '.join(head)} |\n|{'---|' * 3}{'--:|' * (len(head) - 3)}")
    for size, causal, d, dv, fp8 in SHAPES:
        columns = str(d) if d == dv else f"{d} and {dv}"
        what = f"{size[0]} x {size[1]}{', causal' if causal else ''}, {'fp8' if fp8 else 'bf16'}, {columns}"
        for target in harness.TARGETS:
            shape, n = (size, causal, d, dv, fp8), pairs(size, causal)
            for file in files(target, *shape[1:]):
                print(row(what, f"AITER {file}", aiter(args, target, file, *shape), target, n), flush=True)
            kernel, executed = ours(args, target, *shape)
            print(row(what, kernel, executed, target, n), flush=True)


if __name__ == "__main__":
    main()
