#!/usr/bin/env python3
"""Validates the emulator on kernels that others wrote and run on hardware; VALIDATION.md has the results.

  validate.py --hk target/release/hk --aiter AITER/hsa [--only PART] [--markdown] [--sanitize NAMES]
              [--numerics NAME] [--skew CLOCKS]

Needs numpy and ml_dtypes; with triton, runs kernels that it compiles, too: ours and those of the checkout of AITER around
the folder hsa.
"""

import argparse
import re
import sys

import aiter_attention  # noqa: F401  (these register their cases)
import aiter_backward  # noqa: F401
import aiter_gemm  # noqa: F401
import aiter_mha_v4  # noqa: F401
import aiter_mla  # noqa: F401
import aiter_moe  # noqa: F401
import aiter_paged  # noqa: F401
import harness

try:
    import triton_aiter_attention  # noqa: F401
    import triton_aiter_gemm  # noqa: F401
    import triton_aiter_rows  # noqa: F401
    import triton_kernels  # noqa: F401
except ModuleNotFoundError as error:
    print(f"without Triton's kernels: {error}", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hk", default="target/release/hk", help="the hk program")
    parser.add_argument("--aiter", required=True, help="the folder hsa of AMD's repository AITER")
    parser.add_argument("--only", default="", help="cases whose name or target contains this")
    parser.add_argument("--markdown", action="store_true", help="print the table for VALIDATION.md")
    parser.add_argument("--numerics", default="fma", help="how matrix instructions add up: fma or cdna3-exact")
    parser.add_argument("--skew", help="clocks by which waves of a workgroup may be out of step")
    parser.add_argument("--sanitize", help="run under the emulator's sanitizers; what they report is a failure")
    args = parser.parse_args()
    options = [f"--numerics={args.numerics}"]
    options += [f"--sanitize={args.sanitize}"] if args.sanitize else []
    options += [f"--skew={args.skew}"] if args.skew else []
    results = []
    for name, target, function in harness.CASES:
        if args.only not in f"{name} {target}":
            continue
        run = harness.Run(args.hk, args.aiter, name, target, options)
        try:
            function(run)
        except RuntimeError as error:
            run.result.failure = str(error)
        results.append(run.result)
        report(run.result)
    if args.markdown:
        print(markdown(results))
    failed = [r for r in results if not r.passed()]
    print(f"{len(results) - len(failed)} of {len(results)} cases pass")
    return 1 if failed or not results else 0


def report(r):
    verdict = "ok" if r.passed() else f"FAILED {r.failure}"
    print(f"{r.name} ({r.target}, {r.size}): {verdict}", flush=True)
    for c in r.comparisons:
        print(f"  {c.what}: largest error {c.absolute:.3g}, {c.error:.0%} of {c.allowed}", flush=True)


def kind(name):
    """What a case's kernels are, without dtypes, options and tile sizes."""
    return re.sub(r" \d+ x \d+.*", "", name.split(",")[0])


def markdown(results):
    """A row for each kind of kernel."""
    lines = ["| kernel | cases gfx942 | gfx950 | kernels | largest error, of tolerance | instructions | MFMA |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for name in dict.fromkeys(kind(r.name) for r in results):
        group = [r for r in results if kind(r.name) == name]
        worst = max((c.error for r in group for c in r.comparisons), default=0)
        cases = [sum(r.target == target for r in group) for target in harness.TARGETS]
        kernels = len({(r.target, r.kernel) for r in group})
        counts = [f"{sum(n):,}".replace(",", " ") for n in ((r.instructions for r in group), (r.mfma for r in group))]
        lines.append(f"| {name} | {cases[0]} | {cases[1]} | {kernels} | {worst:.0%} | {counts[0]} | {counts[1]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
