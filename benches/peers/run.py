#!/usr/bin/env python3
"""Measures this library and its peers on the same NVIDIA GPU, operator by operator within the same minutes.

    cargo build --release -p hk-cli --features cuda      # with HK_TARGETS=gfx942,gfx950,sm_90
    python3 benches/peers/run.py --hk target/release/hk --out results
    python3 benches/peers/run.py --hk target/release/hk --out results --op rmsnorm --op softmax --set large

Needs PyTorch with CUDA and Triton; FlashInfer and flash-linear-attention are measured where they are installed. The cases are
those of `hk bench --list`, so that shapes and names are the same. Each result is compared with f64 before it is timed. Written
to the directory of --out: hk.csv and peers.csv as measured, table.csv and table.md with the ratios, plot.svg, failures.txt.
Device times are those of `hk bench --help` and timing.py; `ratio` is the peer's device time over this library's.
"""

import argparse
import csv
import datetime
import json
import pathlib
import subprocess
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import operators  # noqa: E402
import timing  # noqa: E402

COLUMNS = ["operator", "case", "dtype", "peer", "device_us", "cached_us", "launch_us", "host_us", "method"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hk", required=True, type=pathlib.Path, help="the hk program")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="directory for the results")
    parser.add_argument("--op", action="append", default=[], help="only this operator (may be repeated)")
    parser.add_argument("--case", help="only cases whose name contains this")
    parser.add_argument("--set", default="all", choices=["models", "large", "all"], help="which sizes")
    parser.add_argument("--device", default="cuda:0", help="the GPU")
    parser.add_argument("--peers", help="only these peers, such as torch,triton,flash")
    parser.add_argument("--samples", type=int, default=100, help="passes that are timed")
    parser.add_argument("--minutes", type=float, default=60, help="begin no operator after this time")
    parser.add_argument("--no-hk", action="store_true", help="keep hk.csv of an earlier run")
    parser.add_argument("--check-only", action="store_true", help="compare the peers with f64 and time nothing")
    return parser.parse_args()


def listed(args):
    command = [args.hk, "bench", "--list", "--set", args.set]
    for op in args.op:
        command += ["--op", op]
    if args.case:
        command += ["--case", args.case]
    cases = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    by_operator = {}
    for case in cases:
        by_operator.setdefault(case["operator"], []).append(case)
    return by_operator


def run_hk(args, operator, rows, failures):
    """Measures this library; adds its rows to those of earlier operators."""
    part = args.out / "part.csv"
    part.unlink(missing_ok=True)
    command = [args.hk, "bench", "--op", operator, "--set", args.set, "--device", args.device, "--csv", part]
    command += ["--samples", str(args.samples)] + (["--case", args.case] if args.case else [])
    result = subprocess.run(command, capture_output=True, text=True)
    sys.stderr.write(result.stderr)
    if result.returncode:
        failures.append(f"hk bench --op {operator}: {result.stderr.strip().splitlines()[-1:]}\n{result.stderr}")
    if part.exists():
        with part.open(newline="") as file:
            rows += list(csv.DictReader(file))
        part.unlink()


def run_peers(args, case, rows, failures):
    key = {k: case[k] for k in ("operator", "case", "dtype")}
    name = " ".join(key.values())
    torch._dynamo.reset()
    try:
        peer = operators.peer(case, "cuda" if torch.cuda.is_available() else "cpu")
    except operators.Unserved:
        return
    except torch.OutOfMemoryError as error:
        failures.append(f"{name}: {error}")
        return
    for which, function in peer.functions.items():
        if args.peers and which not in args.peers.split(","):
            continue
        try:
            peer.check(peer, function(**peer.operands))
            times = {} if args.check_only else timing.measure(function, peer.operands, args.samples)
        except Exception as error:
            failures.append(f"{name}: {which}: {type(error).__name__}: {error}")
            print(f"{name}: {which}: FAILED", file=sys.stderr)
            continue
        rows.append({**key, "peer": which, **times})
        told = f"{times['device_us']:.2f} us ({times['method']})" if times else "agrees with f64"
        print(f"{name}: {which}: {told}", file=sys.stderr)
    del peer
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def write(path, rows):
    columns = list(rows[0]) if path.name == "hk.csv" else COLUMNS
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def main():
    args = arguments()
    args.hk = args.hk.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    if torch.cuda.is_available():
        torch.cuda.set_device(args.device)
        about = [torch.cuda.get_device_name(), f"PyTorch {torch.__version__}"]
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.split()
        about.append(f"driver {driver[0] if driver else 'unknown'}")
    else:
        about = ["no GPU"]
    about.append(datetime.date.today().isoformat())
    print(", ".join(about), file=sys.stderr)
    start = time.monotonic()
    ours, theirs, failures = [], [], []
    for operator, cases in listed(args).items():
        if time.monotonic() - start > 60 * args.minutes:
            failures.append(f"{operator}: not measured, the time is over")
            continue
        if not args.no_hk:
            run_hk(args, operator, ours, failures)
            if ours:
                write(args.out / "hk.csv", ours)
        for case in cases:
            run_peers(args, case, theirs, failures)
        # After every operator, so that a run that is cut short leaves what it has.
        write(args.out / "peers.csv", theirs)
        (args.out / "failures.txt").write_text("\n".join(failures) + ("\n" if failures else ""))
    if args.check_only or not (args.out / "hk.csv").exists():
        return 1 if failures else 0
    out = args.out
    command = [args.hk, "bench", "--from", out / "hk.csv", "--peers", out / "peers.csv", "--csv", out / "table.csv"]
    table = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (out / "table.md").write_text(f"{', '.join(about)}\n\n{table}")
    print(table)
    plot = subprocess.run(command + ["--plot", out / "plot.svg"], capture_output=True, text=True)
    if plot.returncode:
        failures.append(plot.stderr)
    if failures:
        print("\n".join(failures), file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
