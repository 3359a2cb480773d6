"""Extracts the code objects that rows name from a clone of AITER: DIR/<co_rev>/<co_path>.

    python3 extract.py --rows ../data/calibration.csv --clone ~/aiter --out DIR

Needs the standard library and git. The clone must have the commits of the column co_rev.
"""

import argparse
import csv
import subprocess
import sys
from pathlib import Path


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True, help="CSV with the columns co_rev and co_path")
    parser.add_argument("--clone", type=Path, required=True, help="a clone of github.com/ROCm/aiter")
    parser.add_argument("--out", type=Path, required=True, help="directory of the objects, outside of this repository")
    args = parser.parse_args()
    with args.rows.open(newline="") as file:
        objects = sorted({(row["co_rev"], row["co_path"]) for row in csv.DictReader(file)})
    missing = 0
    for rev, path in objects:
        target = args.out / rev / path
        if target.exists():
            continue
        done = subprocess.run(["git", "-C", args.clone, "show", f"{rev}:{path}"], capture_output=True)
        if done.returncode != 0:
            missing += 1
            print(f"{rev}:{path}: {done.stderr.decode().strip()}", file=sys.stderr)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(done.stdout)
    print(f"{len(objects) - missing} of {len(objects)} objects in {args.out}")
    return missing != 0


if __name__ == "__main__":
    sys.exit(main())
