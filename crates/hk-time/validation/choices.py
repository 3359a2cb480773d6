"""Compares the tiles that hk-gemm chooses with the fastest of the modelled ones, and with the floor of a part.

    python3 choices.py --hk ../../../target/debug/hk [--part mi355x] [--ratio 1.1]
    python3 choices.py --hk ../../../target/debug/hk --floors [--family gemm_bf16] [--weights 8B] [--tiles] [--csv FILE]

Needs the standard library. Prints a line for each shape; the exit status is 1 if a choice takes longer than `ratio` times the
fastest tile.

`--floors` takes the weights of models at many M. The floor of a shape is a launch, plus the longer of its bytes at the rate of HBM
that is reached and its flops, with M a multiple of 16, at the clock of full matrix duty. The time is modelled once for all M
with the same tile, split-K slices, rows of tiles and, in fewer rows than a tile's, multiples of 16 up to 64 and of 64 beyond, at the largest
of them. `--tiles` models the other tiles, too. Beside the floor stands that of loads: a compute unit receives no more than it may have in
flight for each latency of memory, whatever the kernel, and loads the rows of both operands of its tile, and of slices a tile of sums.
"""

import argparse
import csv
import functools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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
TILES = ["256x256", "160x256", "96x256", "256x128", "128x256", "128x128", "96x128", "64x128", "64x64", "64x32"]

# N, K.
WEIGHTS = {
    "Llama-3 8B qkv": (6144, 4096), "Llama-3 8B o": (4096, 4096), "Llama-3 8B gate_up": (28672, 4096),
    "Llama-3 8B down": (4096, 14336), "Llama-3 70B qkv": (10240, 8192), "Llama-3 70B o": (8192, 8192),
    "Llama-3 70B gate_up": (57344, 8192), "Llama-3 70B down": (8192, 28672), "Qwen3 32B qkv": (10240, 5120),
    "Qwen3 32B o": (5120, 8192), "Qwen3 32B gate_up": (51200, 5120), "Qwen3 32B down": (5120, 25600),
    "DeepSeek-V3 q_b": (24576, 1536), "DeepSeek-V3 kv_b": (32768, 512), "DeepSeek-V3 o": (7168, 16384),
    "DeepSeek-V3 gate_up": (36864, 7168), "DeepSeek-V3 down": (7168, 18432),
}
ROWS = [1, 2, 8, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 127, 128, 129, 191, 192, 193, 255, 256, 257, 384, 511, 512,
        513, 1024, 1025, 2048, 2049, 4096, 4097, 8192]
# Peak TB/s, CUs, constants of the rate reached and of the clock at full matrix duty: `src/parts`.
PARTS = {"mi325x": (6.0, 304, "hbm_reach_gfx942", "matrix_clock_mi325x"),
         "mi355x": (8.0, 256, "hbm_reach_gfx950", "matrix_clock_mi355x")}
# Bits of an element, bytes of scales for an element, flops per clock of a CU.
ELEMENTS = {"gemm_bf16": (16, 0, {"mi325x": 2048, "mi355x": 4096}),
            "gemm_fp8_blockscale": (8, 4 / 128, {"mi325x": 4096, "mi355x": 8192}),
            "gemm_fp4_mx": (4, 1 / 32, {"mi355x": 16384})}
# Goals for time over the floor, at most of the points and at all, and over the time of the next M.
GOAL, WORST, STEP = 1.25, 1.6, 1.05


def call(family, part, m, n, k):
    """The operator and the arguments of a GEMM, as for AITER's rows."""
    return gemm({"family": family, "co_path": f"hsa/{TARGETS[part]}/", "M": m, "N": n, "K": k})


def compare(args):
    """The choices beside all tiles, at a few shapes; how many are slow."""
    worse = 0
    for part in args.part or TARGETS:
        for family, shapes in SHAPES.items():
            if family == "gemm_fp4_mx" and TARGETS[part] == "gfx942":
                continue
            for m, n, k in shapes:
                operator, given = call(family, part, m, n, k)
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


@functools.cache
def fitted():
    with (Path(__file__).parent / "../data/fitted.csv").open(newline="") as file:
        return {row["name"]: float(row["value"]) for row in csv.DictReader(file)}


def floor_of_loads(part, family, m, n, k):
    """Microseconds that no tile is faster than: whole tiles of up to 64 K outputs, shared by the compute units without a rest. Arguments and
    the first line take a latency each, and nothing is issued. Of slices each block stores its sums, waits for the others, and
    adds its share of all."""
    constants, cus = fitted(), PARTS[part][1]
    latency = constants["hbm_latency"]
    rate = constants["fill_bytes_" + TARGETS[part]] / latency
    best = float("inf")
    for tile_m in range(16, 513, 16):
        for tile_n in range(16, min(512, 65536 // tile_m) + 1, 16):
            tiles, rows = -(-m // tile_m) * -(-n // tile_n), min(tile_m, -(-m // 16) * 16) + tile_n
            for slices in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
                loads = rows * k / slices * ELEMENTS[family][0] / 8 / rate
                if slices > 1:
                    loads += 2 * latency + tile_m * tile_n * 4 / rate
                best = min(best, max(1.0, tiles * slices / cus) * loads)
    return constants["launch"] + (best + 2 * latency) / 1000


def floor(part, family, m, n, k):
    """Microseconds that nothing on the part is faster than."""
    constants = fitted()
    (peak, cus, reach, clock), (bits, scales, flops) = PARTS[part], ELEMENTS[family]
    moved = (m + n) * k * (bits / 8 + (scales if family == "gemm_fp4_mx" else 0)) + 2 * m * n
    if family == "gemm_fp8_blockscale":
        moved += (m + n / 128) * k * scales
    rows = -(-m // 16) * 16
    memory = moved / (peak * constants[reach] * 1e6)
    return constants["launch"] + max(memory, 2 * rows * n * k / (cus * flops[part] * constants[clock]))


def configurations(args, part, family, m, n, k):
    """Tiles with their splits that serve a shape, the chosen one first, and what their time depends on M by."""
    operator, given = call(family, part, m, n, k)
    cus = PARTS[part][1]
    done = subprocess.run([args.hk, "inspect", operator, "--device", f"emu:{TARGETS[part]}?cus={cus}", *given], capture_output=True,
                          text=True)
    rows = [[c.strip() for c in line.split("|")] for line in done.stdout.splitlines() if line.startswith("|")]
    if not rows:
        sys.exit(f"{operator} {m} {n} {k}: {done.stderr.strip()}")
    names = rows[0]
    found = []
    for row in rows[2:]:
        cell = dict(zip(names, row))
        # Names of tiles as `--param tile=` has them.
        tile = cell["tile"] + ("-twice" if cell["kernel"].endswith("_twice") else "")
        tile_m = int(tile.split("x")[0])
        rows = min(m, tile_m)
        step = 16 if rows <= 64 else 64
        configuration = (tile, int(cell["splits"]), -(-m // tile_m), -(-rows // step) * step)
        found.insert(0 if row[1] == "chosen" else len(found), configuration)
    return found


def sweep(args, part, family):
    """Times of the library's choices over M, beside the floor and the next M."""
    weights = {name: size for name, size in WEIGHTS.items() if not args.weights or any(w in name for w in args.weights)}
    points = [(name, m, *size) for name, size in weights.items() for m in ROWS if m <= args.most]
    chosen, largest = {}, {}
    for name, m, n, k in points:
        served = configurations(args, part, family, m, n, k)
        for configuration in served if args.tiles else served[:1]:
            key = (n, k, configuration)
            largest[key] = max(m, largest.get(key, 0))
        chosen[name, m] = served

    def model(key):
        n, k, (tile, splits, *_) = key
        operator, given = call(family, part, largest[key], n, k)
        given += ["--param", f"tile={tile}", "--param", f"splits={splits}"]
        own, why = ours(args.hk, part, operator, *given)
        return key, own if own else (float("inf"), why)

    with ThreadPoolExecutor(args.jobs) as pool:
        times = dict(pool.map(model, largest))
    rows = []
    for name, m, n, k in points:
        served = chosen[name, m]
        us, bound, *_ = times[n, k, served[0]]
        least = floor(part, family, m, n, k)
        loads = floor_of_loads(part, family, m, n, k)
        best = min(served if args.tiles else served[:1], key=lambda c: times[n, k, c][0])
        rows.append({"part": part, "family": family, "weights": name, "M": m, "N": n, "K": k, "tile": served[0][0],
                     "splits": served[0][1], "us": round(us, 2), "bound": bound, "floor": round(least, 2), "ratio": round(us / least, 3),
                     "loads": round(loads, 2), "of_loads": round(us / max(least, loads), 3),
                     "best": best[0], "best_splits": best[1], "best_us": round(times[n, k, best][0], 2)})
        print(", ".join(str(v) for v in rows[-1].values()), flush=True)
    share = [sum(r["ratio"] <= limit for r in rows) / len(rows) for limit in (GOAL, WORST)]
    ratios = sorted(r["ratio"] for r in rows)
    steps = [(a, b) for a, b in zip(rows, rows[1:]) if a["weights"] == b["weights"] and a["us"] > STEP * b["us"]]
    print(f"{part} {family}: {len(rows)} points, {len(largest)} modelled; <= {GOAL}: {share[0]:.1%}, <= {WORST}: {share[1]:.1%}; "
          f"median {ratios[len(ratios) // 2]:.2f}, most {ratios[-1]:.2f}; {len(steps)} times above {STEP} of the next M")
    beyond = [sum(r["loads"] > limit * r["floor"] for r in rows) / len(rows) for limit in (GOAL, WORST)]
    of_loads = sorted(r["of_loads"] for r in rows)
    print(f"  loads alone take more than {GOAL} of the floor at {beyond[0]:.1%} of the points, {WORST} at {beyond[1]:.1%}; "
          f"time over the longer of both: median {of_loads[len(of_loads) // 2]:.2f}, most {of_loads[-1]:.2f}")
    for a, b in steps:
        print(f"  {a['weights']}: M = {a['M']} {a['us']} us ({a['tile']}), M = {b['M']} {b['us']} us ({b['tile']})")
    if args.tiles:
        slow = [r for r in rows if r["us"] > STEP * r["best_us"]]
        print(f"  {len(slow)} choices above {STEP} of the best tile")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hk", type=Path, required=True)
    parser.add_argument("--part", choices=TARGETS, action="append")
    parser.add_argument("--ratio", type=float, default=1.1)
    parser.add_argument("--floors", action="store_true", help="over M, beside the floor and the next M")
    parser.add_argument("--family", choices=ELEMENTS, action="append", help="with --floors")
    parser.add_argument("--weights", action="append", help="with --floors: only weights whose name contains this")
    parser.add_argument("--most", type=int, default=8192, help="with --floors: the largest M")
    parser.add_argument("--tiles", action="store_true", help="with --floors: the other tiles, too")
    parser.add_argument("--jobs", type=int, default=1, help="with --floors: launches modelled at a time")
    parser.add_argument("--csv", type=Path, help="with --floors: the points as a table")
    args = parser.parse_args()
    if not args.floors:
        return compare(args)
    rows = []
    for part in args.part or PARTS:
        for family in args.family or ELEMENTS:
            if part in ELEMENTS[family][2]:
                rows += sweep(args, part, family)
    if args.csv and rows:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
