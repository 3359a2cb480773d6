#!/usr/bin/env python3
"""Kernels of AITER's Triton set through Triton's HIP driver and launcher on emulated devices, against NumPy.

  triton_aiter_hip.py AITER [NAME ..]     AITER is a checkout of ROCm/aiter; cases whose names contain one of these

The cases are those of crates/hk-emu/validation, where `hk exec` launches them. Here Triton compiles, specializes, loads and
launches as it does on a GPU. Needs what triton_tutorials.py needs.
"""

import pathlib
import sys
import time

import numpy as np
import triton_numpy as gpu

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "hk-emu/validation"))

import harness  # noqa: E402
import triton_kernels  # noqa: E402

DRIVER = gpu.triton.runtime.driver.active


def launch(run, function, types, constants, grid, args, _attributes=None, options=None):
    """Launches a JIT function with the arguments of these parameters; the outputs by name."""
    gpu.triton.runtime.driver.set_active(DRIVER)
    buffers, outputs = {}, {}

    def value(arg):
        if isinstance(arg, str):
            kind, number = arg.split(":")
            return float(number) if kind.startswith("f") else int(number)
        if isinstance(arg, harness.Out):
            outputs[arg.name] = gpu.empty(arg.shape, arg.dtype)
            if arg.fill is not None:
                outputs[arg.name].fill(np.full(arg.shape, arg.fill, np.uint8).view(arg.dtype).reshape(arg.shape))
            return outputs[arg.name]
        data = arg.data if isinstance(arg, harness.InOut) else arg
        buffer = buffers.setdefault(id(data), data if data is None else gpu.array(data))
        if isinstance(arg, harness.InOut):
            outputs[arg.name] = buffer
        return buffer

    values = dict(zip(types, map(value, args), strict=True))
    compiled = function[grid](**values, **(constants | (options or {})))
    run.result.kernel = compiled.metadata.name
    return {name: buffer.numpy() for name, buffer in outputs.items()}


triton_kernels.launch = launch

import triton_aiter_attention  # noqa: E402, F401  (these register their cases)
import triton_aiter_gemm  # noqa: E402, F401
import triton_aiter_rows  # noqa: E402, F401


def main(aiter, names):
    passed = results = 0
    for number in range(gpu.device_count()):
        target = gpu.use(number)
        for name, of_target, function in harness.CASES:
            if of_target != target or (names and not any(part in name for part in names)):
                continue
            run = harness.Run(None, pathlib.Path(aiter) / "hsa", name, target)
            start = time.perf_counter()
            try:
                function(run)
            except gpu.Fault as fault:
                run.result.failure = str(fault)
                gpu.reset()
            gpu.triton.runtime.driver.set_active(DRIVER)
            worst = max((c.error for c in run.result.comparisons), default=0)
            verdict = f"ok: {worst:.0%} of tolerance" if run.result.passed() else f"FAILED {run.result.failure}"
            print(f"{name} ({target}, {run.result.size}): {verdict}; {time.perf_counter() - start:.1f} s", flush=True)
            passed, results = passed + bool(run.result.passed()), results + 1
    print(f"{passed} of {results} cases pass")
    return 0 if passed == results and results else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
