"""Prints the modelled times of `docs/performance.md`: this library's kernels, and AITER's at the same sizes.

    python3 table.py --hk ../../../target/debug/hk --objects DIR

Needs the standard library. DIR holds the code objects of `../data/calibration.csv`: `extract.py` makes it.
"""

import argparse
import csv
import re
import subprocess
from pathlib import Path

ROWS = Path(__file__).parent / "../data/calibration.csv"
FP8 = {"gfx942": "fp8e4m3fnuz", "gfx950": "fp8e4m3"}


def gemm(row):
    """The operator and the tensors of a GEMM of AITER's."""
    m, n, k = (int(row[c]) for c in "MNK")
    family, fp8 = row["family"], FP8[row["co_path"].split("/")[1]]
    if family == "gemm_bf16":
        return "gemm_a16w16", [f"a=bf16[{m},{k}]", f"w=bf16[{n},{k}]"]
    if family == "gemm_i8_ptpc":
        scales = [f"a_scale=f32[{m}]", f"w_scale=f32[{n}]"]
        return "gemm_a8w8", [f"a=i8[{m},{k}]", f"w=i8[{n},{k}]", *scales]
    if family == "gemm_fp8_blockscale":
        scales = [f"a_scale=f32[{m},{k // 128}]", f"w_scale=f32[{-(-n // 128)},{k // 128}]"]
        return "gemm_a8w8_blockscale", [f"a={fp8}[{m},{k}]", f"w={fp8}[{n},{k}]", *scales]
    if family == "gemm_fp4_mx":
        scales = [f"a_scale=e8m0[{m},{k // 32}]", f"w_scale=e8m0[{n},{k // 32}]"]
        return "gemm_afp4wfp4", [f"a=fp4e2m1x2[{m},{k // 2}]", f"w=fp4e2m1x2[{n},{k // 2}]", *scales]
    return None


def ours(hk, part, operator, *more):
    """Modelled microseconds of all launches of a call, and what bounds the longest."""
    done = subprocess.run([hk, "time", operator, "--part", part, *more], capture_output=True, text=True)
    if done.returncode != 0:
        return None, done.stderr.strip().splitlines()[-1]
    cells = [[c.strip() for c in line.split("|")] for line in done.stdout.splitlines() if line.startswith("| ")]
    launches = [(float(c[3]), c[4], c[1]) for c in cells if re.fullmatch(r"[\d.]+", c[3])]
    about = next(line for line in done.stdout.splitlines() if line.startswith(part))
    return (sum(us for us, *_ in launches), max(launches)[1], max(launches)[2], about.split(": ", 1)[1]), None


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
    args = parser.parse_args()
    with ROWS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["id"] in GEMMS]
    modelled = theirs(args.hk, rows, args.objects, args.scratch)
    print("| M x N x K | part | AITER, measured | AITER, modelled | this library, modelled | bound by | kernel |")
    print("|---|---|--:|--:|--:|---|---|")
    errors = {}
    for row in rows:
        operator, tensors = gemm(row)
        part = row["gpu"].rstrip("*").lower()
        own, why = ours(args.hk, part, operator, *(a for t in tensors for a in ("--tensor", t)))
        if own:
            errors[part] = own[3]
        cells = [f"{own[0]:.1f}", own[1], f"`{own[2]}`"] if own else ["-", why, "-"]
        shape = " x ".join(row[c] for c in "MNK")
        name = row["family"].removeprefix("gemm_")
        print(f"| {shape}, {name} | {part} | {float(row['measured_us']):.1f} | {float(modelled[row['id']]):.1f} | {' | '.join(cells)} |")
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
