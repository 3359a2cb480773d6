"""Runs kernels of foreign code objects with `hk exec` and compares their outputs with references.

A case is a function with the decorator `case`. It makes inputs, launches kernels with `Run.launch`, and compares with
`Run.compare`. Needs numpy and ml_dtypes.
"""

import json
import math
import struct
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np

bf16 = ml_dtypes.bfloat16
e4m3 = ml_dtypes.float8_e4m3fn
e4m3fnuz = ml_dtypes.float8_e4m3fnuz

SAFETENSORS = {
    np.dtype(t): name
    for t, name in [
        (np.float32, "F32"), (np.float16, "F16"), (bf16, "BF16"), (np.int8, "I8"), (np.uint8, "U8"),
        (np.int16, "I16"), (np.int32, "I32"), (np.uint32, "U32"), (np.int64, "I64"), (np.uint64, "U64"),
        (e4m3, "F8_E4M3"), (e4m3fnuz, "F8_E4M3FNUZ"),
    ]
}
NUMPY = {name: t for t, name in SAFETENSORS.items()}

TARGETS = ("gfx942", "gfx950")
FP8 = {"gfx942": e4m3fnuz, "gfx950": e4m3}  # of a target


def silu(x):
    return x / (1 + np.exp(-x))


def starts_of(lengths):
    """Where sequences of these lengths begin, one behind the other, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def write_safetensors(path, tensors):
    header, blobs, at = {}, [], 0
    for name, t in tensors.items():
        blob = np.ascontiguousarray(t).tobytes()
        if SAFETENSORS[t.dtype] == "F4":
            nibbles = np.frombuffer(blob, np.uint8)
            blob = (nibbles[::2] | nibbles[1::2] << 4).tobytes()
        header[name] = {"dtype": SAFETENSORS[t.dtype], "shape": t.shape, "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def read_safetensors(path):
    data = Path(path).read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + n])
    header.pop("__metadata__", None)
    tensors = {}
    for name, t in header.items():
        begin, end = (8 + n + at for at in t["data_offsets"])
        tensors[name] = np.frombuffer(data[begin:end], NUMPY[t["dtype"]]).reshape(t["shape"])
    return tensors


@dataclass
class Out:
    """A buffer that a kernel fills; poison before, or this byte."""

    name: str
    shape: tuple
    dtype: type = bf16
    fill: int | None = None


@dataclass
class InOut:
    """A buffer that a kernel updates."""

    name: str
    data: np.ndarray


def u32(value):
    return f"u32:{value}"


def i32(value):
    return f"i32:{value}"


def f32(value):
    return f"f32:{float(np.float32(value))!r}"


@dataclass
class Comparison:
    what: str
    error: float  # the worst, as a multiple of what is allowed
    absolute: float
    allowed: str


@dataclass
class Result:
    name: str
    target: str
    size: str = ""
    kernel: str = ""
    instructions: int = 0
    mfma: int = 0
    executed: list = field(default_factory=list)  # what `hk exec --json` prints of each launch
    comparisons: list = field(default_factory=list)
    failure: str = ""

    def passed(self):
        return not self.failure and self.comparisons and all(c.error <= 1 for c in self.comparisons)


CASES = []


def case(name, target):
    def register(function):
        CASES.append((name, target, function))
        return function

    return register


class Run:
    """One case: its launches and comparisons."""

    def __init__(self, hk, folder, name, target, options=()):
        self.hk = hk
        self.options = options  # of every launch
        self.folder = Path(folder)  # of the code objects, one folder for each target
        self.result = Result(name, target)
        self.rng = np.random.default_rng(1)

    def normal(self, *shape, dtype=np.float32, scale=1.0):
        return (self.rng.standard_normal(shape) * scale).astype(dtype)

    def integers(self, low, high, *shape, dtype=np.int32):
        return self.rng.integers(low, high, shape).astype(dtype)

    def slots(self, path, slot):
        """How many slots the arguments of a file's only kernel have."""
        done = subprocess.run([self.hk, "exec", path, "--list", "--json"], capture_output=True, text=True, check=True)
        return json.loads(done.stdout)[0]["argument_bytes"] // slot

    def launch(self, file, grid, block, args, slot=16, kernel=None, more=(), lds=0, trim=False):
        """Runs the only kernel of a file, or the one named. Arguments are arrays, `Out`, `InOut`, scalars, None (null), lists
        (a table of such), or pairs of a byte offset and one of these. With `trim`, those that the kernel has no slots for
        are left out."""
        path = self.folder / self.result.target / file  # or the file itself, if its path is absolute
        inputs = {}

        def text_of(arg):
            if isinstance(arg, tuple):
                return f"@{arg[0]}={text_of(arg[1])}"
            if isinstance(arg, list):
                return "at:" + ";".join(map(text_of, arg))
            if arg is None:
                return "null"
            if isinstance(arg, str):
                return arg
            if isinstance(arg, Out):
                shape = ",".join(map(str, arg.shape))
                text = f"out:{arg.name}={SAFETENSORS[np.dtype(arg.dtype)]}[{shape}]"
                return text + ("" if arg.fill is None else f",fill={arg.fill}")
            output = isinstance(arg, InOut)
            data = arg.data if output else arg
            known = next((n for n, t in inputs.items() if t is data), None)
            name = known or (arg.name if output else f"t{len(inputs)}")
            inputs[name] = data
            return f"inout:#{name}" if output else f"#{name}"

        texts = list(map(text_of, args[: self.slots(path, slot)] if trim else args))
        with tempfile.TemporaryDirectory() as folder:
            write_safetensors(f"{folder}/in", inputs)
            Path(f"{folder}/args").write_text(json.dumps(texts))
            command = [self.hk, "exec", path, "--grid", ",".join(map(str, grid)), "--block", str(block), "--json"]
            command += ["--in", f"{folder}/in", "--out", f"{folder}/out", "--args", f"{folder}/args", "--dynamic-lds", str(lds), *more]
            command += self.options
            command += ["--slot", str(slot)] if slot else []
            command += ["--kernel", kernel] if kernel else []
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(done.stderr.strip())
            counters = json.loads(done.stdout)
            self.result.executed.append(counters)
            self.result.kernel = self.result.kernel or path.name
            self.result.instructions += counters["instructions"]
            self.result.mfma += counters["mfma"]
            return read_safetensors(f"{folder}/out")

    def compare(self, what, got, want, rtol, atol):
        """Every element within atol + rtol |want|. An equal pair of infinities passes; a NaN never. `atol` may be an array,
        a bound for each element; the largest is reported."""
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert got.shape == want.shape, f"{what}: {got.shape} and {want.shape}"
        with np.errstate(invalid="ignore", divide="ignore"):
            error = np.where(got == want, 0, np.abs(got - want))
            share = np.where(error == 0, 0, error / (atol + rtol * np.abs(want)))
        share = np.where(np.isnan(share), np.inf, share)
        most = float(np.max(atol))
        allowed = " + ".join([f"{most:.2g}"] * (most > 0) + [f"{rtol:.2g} x"] * (rtol > 0)) or "0"
        worst = float(share.max())
        self.result.comparisons.append(Comparison(what, worst, float(np.nanmax(error)), allowed))
        if worst > 1:
            at = np.unravel_index(share.argmax(), share.shape)
            bad = int((share > 1).sum())
            print(f"  {what}: {bad} of {share.size} bad; worst at {tuple(map(int, at))}: {got[at]} for {want[at]}")

    def equal(self, what, got, want):
        """Every element equal."""
        got, want = np.asarray(got), np.asarray(want)
        assert got.shape == want.shape, f"{what}: {got.shape} and {want.shape}"
        bad = got != want
        worst = math.inf if bad.any() else 0.0
        self.result.comparisons.append(Comparison(what, worst, float(bad.sum()), "equal"))
        if bad.any():
            at = np.unravel_index(bad.argmax(), bad.shape)
            print(f"  {what}: {int(bad.sum())} of {bad.size} differ, first {tuple(map(int, at))}: {got[at]}, {want[at]}")
