"""Prints the modelled times of `docs/performance.md`: this library's kernels, and AITER's at the same sizes.

    python3 table.py --hk ../../../target/debug/hk --objects DIR [--csv FILE]

Needs the standard library. DIR holds the code objects of `../data/calibration.csv`: `extract.py` makes it. The last table counts all GEMMs of
that file; `--csv` writes them one by one. mxfp4 has weights and scales in the pre-shuffled order, as AITER's kernels have.
"""

import argparse
import csv
import os
import re
import statistics
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROWS = Path(__file__).parent / "../data/calibration.csv"
FP8 = {"gfx942": "fp8e4m3fnuz", "gfx950": "fp8e4m3"}


def gemm(row):
    """The operator and the arguments of a GEMM of AITER's; None of other kernels."""
    m, n, k = (int(row[c]) for c in "MNK")
    family, fp8 = row["family"], FP8[row["co_path"].split("/")[1]]
    if family == "gemm_bf16":
        return "gemm_a16w16", arguments([f"a=bf16[{m},{k}]", f"w=bf16[{n},{k}]"])
    if family == "gemm_i8_ptpc":
        scales = [f"a_scale=f32[{m}]", f"w_scale=f32[{n}]"]
        return "gemm_a8w8", arguments([f"a=i8[{m},{k}]", f"w=i8[{n},{k}]", *scales])
    if family == "gemm_fp8_blockscale":
        scales = [f"a_scale=f32[{m},{k // 128}]", f"w_scale=f32[{-(-n // 128)},{k // 128}]"]
        return "gemm_a8w8_blockscale", arguments([f"a={fp8}[{m},{k}]", f"w={fp8}[{n},{k}]", *scales])
    if family == "gemm_fp4_mx":
        scales = [f"{of}_scale=e8m0[{-(-rows // 32) * -(-k // 256) * 256}]" for of, rows in (("a", m), ("w", n))]
        operands = [f"a=fp4e2m1x2[{m},{k // 2}]", f"w=fp4e2m1x2[{n},{k // 2}]", *scales]
        return "gemm_afp4wfp4", arguments(operands, ["scales_shuffled=true", "w_shuffled=true"])
    return None


def arguments(tensors, params=()):
    return [a for option, values in (("--tensor", tensors), ("--param", params)) for v in values for a in (option, v)]


def ours(hk, part, operator, *more):
    """Modelled microseconds of all launches of a call, and what bounds the longest."""
    done = subprocess.run([hk, "time", operator, "--part", part, *more], capture_output=True, text=True)
    if done.returncode != 0:
        return None, done.stderr.strip().splitlines()[-1]
    cells = [[c.strip() for c in line.split("|")] for line in done.stdout.splitlines() if line.startswith("| ")]
    launches = [(float(c[3]), c[4], c[1]) for c in cells if re.fullmatch(r"[\d.]+", c[3])]
    about = next(line for line in done.stdout.splitlines() if line.startswith(part))
    return (sum(us for us, *_ in launches), max(launches)[1], max(launches)[2], about.split(": ", 1)[1]), None


def of_row(hk, row):
    """`ours` for a row of AITER's."""
    operator, given = gemm(row)
    return ours(hk, part_of(row), operator, *given)


def part_of(row):
    return row["gpu"].rstrip("*").lower()


def count(times):
    """For each type and part, how this library's times compare with AITER's, and both with the floor. `times`: the row, AITER's and ours."""
    from choices import ELEMENTS, GOAL, PARTS, WORST, floor

    print("\n| type, part | GEMMs | to 1.05 of AITER | faster | median | worst | to 1.25 and 1.6 of the floor: AITER, measured | ours |")
    print("|---|--:|--:|--:|--:|---|---|---|")
    groups = {}
    for row, aiter, own in times:
        groups.setdefault((row["family"], part_of(row)), []).append((own / aiter, row, own))
    for (family, part), group in groups.items():
        ratios = [ratio for ratio, *_ in group]
        worst, row, _ = max(group, key=lambda of: of[0])
        near, faster = (sum(ratio <= most for ratio in ratios) for most in (1.05, 1.0))
        floors = "- | -"
        if part in PARTS and part in ELEMENTS.get(family, (0, 0, {}))[2]:
            least = [floor(part, family, *(int(row[c]) for c in "MNK")) for _, row, _ in group]

            def shares(of):
                return ", ".join(f"{sum(us <= most * l for us, l in zip(of, least)) / len(of):.0%}" for most in (GOAL, WORST))

            floors = f"{shares([float(row['measured_us']) for _, row, _ in group])} | {shares([own for *_, own in group])}"
        cells = [f"{family.removeprefix('gemm_')}, {part}", len(group), near, faster, f"{statistics.median(ratios):.2f}",
                 f"{worst:.2f} ({' x '.join(row[c] for c in 'MNK')})", floors]
        print(f"| {' | '.join(map(str, cells))} |")


def theirs(hk, rows, objects, out):
    """Modelled microseconds of rows by id."""
    with (out / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    subprocess.run([hk, "time", "--rows", out / "rows.csv", "--objects", objects, "--out", out / "out.csv"])
    with (out / "out.csv").open(newline="") as file:
        return {row["id"]: row["predicted_us"] for row in csv.DictReader(file)}


GEMMS = ["C082", "C084", "C097", "C107", "C122", "C009", "C036", "C045", "C204", "C222", "C230", "C051", "C058", "C142",
         "C152", "C172", "C190"]
MORE = [("rmsnorm", "4096 x 8192"), ("fused_add_rmsnorm", ""), ("layernorm", ""), ("silu_and_mul", ""), ("rope_cached", ""),
        ("softmax", ""), ("topk", "4096 x 1024"), ("per_token_quant", ""), ("dynamic_mxfp4_quant", ""), ("mha", "GQA 64/8"),
        ("pa_decode", ""), ("fused_moe", ""), ("chunk_gated_delta_rule", ""), ("top_k_top_p_sampling_from_probs", "")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hk", type=Path, required=True)
    parser.add_argument("--objects", type=Path, required=True, help="directory of AITER's code objects")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    with ROWS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if gemm(row)]
    modelled = theirs(args.hk, rows, args.objects, args.scratch)
    with ThreadPoolExecutor(args.jobs) as pool:
        found = dict(zip((row["id"] for row in rows), pool.map(lambda row: of_row(args.hk, row), rows)))
    print("| M x N x K | part | AITER, measured | AITER, modelled | this library, modelled | bound by | kernel |")
    print("|---|---|--:|--:|--:|---|---|")
    errors = {}
    for row in rows:
        part, (own, why) = part_of(row), found[row["id"]]
        if row["id"] not in GEMMS:
            continue
        if own:
            errors[part] = own[3]
        cells = [f"{own[0]:.1f}", own[1], f"`{own[2]}`"] if own else ["-", why, "-"]
        shape = " x ".join(row[c] for c in "MNK")
        name = row["family"].removeprefix("gemm_")
        print(f"| {shape}, {name} | {part} | {float(row['measured_us']):.1f} | {float(modelled[row['id']]):.1f} | {' | '.join(cells)} |")
    times = [(row, float(modelled[row["id"]]), found[row["id"]][0]) for row in rows]
    times = [(row, aiter, own[0]) for row, aiter, own in times if own]
    count(times)
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["id", "part", "family", "M", "N", "K", "measured_us", "aiter_us", "us", "kernel", "bound"])
            for row, aiter, own in times:
                names = [row["id"], part_of(row), row["family"], *(row[c] for c in "MNK"), row["measured_us"]]
                writer.writerow([*names, aiter, own, found[row["id"]][0][2], found[row["id"]][0][1]])
    print("\n| operator, case | part | modelled us | bound by | longest kernel |")
    print("|---|---|--:|---|---|")
    for operator, case in MORE:
        for part in ("mi325x", "mi355x"):
            own, why = ours(args.hk, part, operator, "--execute", *(["--case", case] if case else []))
            cells = [f"{own[0]:.1f}", own[1], f"`{own[2]}`"] if own else ["-", why, "-"]
            print(f"| `{operator}`{', ' if case else ''}{case} | {part} | {' | '.join(cells)} |")
    for part, about in sorted(errors.items()):
        print(f"\n{part}: {about}")


if __name__ == "__main__":
    main()
