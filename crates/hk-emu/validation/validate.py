#!/usr/bin/env python3
"""Validates the emulator on kernels that others wrote and run on hardware; VALIDATION.md has the results.

  validate.py --hk target/release/hk --aiter AITER/hsa [--only PART] [--markdown] [--sanitize NAMES]
              [--numerics NAME]

Needs numpy and ml_dtypes; with triton, runs kernels that it compiles, too: ours and those of the checkout of AITER around
the folder hsa.
"""

import argparse
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


def markdown(results):
    lines = ["| kernel | target | size | largest error | of tolerance | tolerance | instructions | MFMA | options |"]
    lines.append("|---|---|---|---|---:|---|---:|---:|---|")
    for r in results:
        errors = "; ".join(f"{c.what} {c.absolute:.2g}" for c in r.comparisons) or r.failure.split(":")[0]
        share = max((c.error for c in r.comparisons), default=0)
        options = f"`{r.options}`" if r.options else ""
        allowed = "; ".join(dict.fromkeys(c.allowed for c in r.comparisons))
        lines.append(
            f"| {r.name} | {r.target} | {r.size} | {errors} | {share:.0%} | {allowed} | {r.instructions} | {r.mfma} | {options} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
