"""Compares the tiles that hk-gemm chooses with the fastest of the modelled ones.

    python3 choices.py --hk ../../../target/debug/hk [--part mi355x] [--ratio 1.1]

Needs the standard library. Prints a line for each shape; the exit status is 1 if a choice takes longer than `ratio` times the
fastest tile.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from table import gemm, ours

TARGETS = {"mi308x": "gfx942", "mi325x": "gfx942", "mi355x": "gfx950"}
SHAPES = {
    "gemm_bf16": [(64, 28672, 4096), (64, 6144, 4096), (64, 4096, 14336), (65, 28672, 4096), (256, 6144, 4096), (512, 4096, 14336),
                  (4096, 7168, 512), (593, 37888, 5120)],
    "gemm_fp8_blockscale": [(64, 7168, 2304), (160, 7168, 2304), (192, 2048, 2048), (368, 6144, 4096), (512, 4608, 7168),
                            (512, 8192, 3072), (4096, 4096, 7168)],
    "gemm_i8_ptpc": [(192, 8192, 1024), (4096, 5120, 1280)],
    "gemm_fp4_mx": [(64, 16384, 512), (192, 51200, 5120), (1600, 8192, 1024)],
}
TILES = ["256x256", "256x128", "128x128", "64x64", "64x32"]


def tensors(family, part, m, n, k):
    """The operator and the tensors of a GEMM, as for AITER's rows."""
    row = {"family": family, "co_path": f"hsa/{TARGETS[part]}/", "M": m, "N": n, "K": k}
    operator, tensors = gemm(row)
    return operator, [a for t in tensors for a in ("--tensor", t)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hk", type=Path, required=True)
    parser.add_argument("--part", choices=TARGETS, action="append")
    parser.add_argument("--ratio", type=float, default=1.1)
    args = parser.parse_args()
    worse = 0
    for part in args.part or TARGETS:
        for family, shapes in SHAPES.items():
            if family == "gemm_fp4_mx" and TARGETS[part] == "gfx942":
                continue
            for m, n, k in shapes:
                operator, given = tensors(family, part, m, n, k)
                chosen, why = ours(args.hk, part, operator, *given)
                if not chosen:
                    sys.exit(f"{operator} {m} {n} {k}: {why}")
                times = {}
                for tile in TILES:
                    if tile == "64x32" and m > 64:
                        continue
                    other, _ = ours(args.hk, part, operator, *given, "--param", f"tile={tile}")
                    if other:
                        times[tile] = other[0]
                best = min(times, key=times.get)
                ratio = chosen[0] / min(times[best], chosen[0])
                worse += ratio > args.ratio
                print(f"{part} {operator} {m} x {n} x {k}: {chosen[2]} {chosen[0]:.1f} us, {best} {times[best]:.1f} us, {ratio:.2f}",
                      flush=True)
    print(f"{worse} choices above {args.ratio}")
    return worse > 0


if __name__ == "__main__":
    sys.exit(main())
