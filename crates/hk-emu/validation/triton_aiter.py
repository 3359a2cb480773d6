"""Kernels of AITER's Triton set, compiled by the package triton for both targets.

They are imported from the checkout whose folder `hsa` is given. Their modules also hold host code, which needs torch and a GPU;
stubs stand in for both.
"""

import importlib
import sys
import types

import numpy as np
import triton_kernels
from harness import TARGETS, InOut, bf16, case, e4m3, e4m3fnuz, f32

import triton
from triton.backends.compiler import GPUTarget

KERNELS = "aiter.ops.triton._triton_kernels"
POINTERS = {
    np.dtype(t): f"*{name}"
    for t, name in [
        (np.float32, "fp32"), (np.float16, "fp16"), (bf16, "bf16"), (e4m3, "fp8e4nv"), (e4m3fnuz, "fp8e4b8"),
        (np.int8, "i8"), (np.uint8, "u8"), (np.int32, "i32"), (np.int64, "i64"),
    ]
}
OPTIONS = ("num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim", "kpack")
# Relative error of one rounding to nearest.
HALF_ULP = {bf16: 2**-8, np.float16: 2**-11, e4m3: 2**-4, e4m3fnuz: 2**-4}


class Stub:
    """Any attribute, call or base class of it will do."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub()

    def __call__(self, *args, **_):
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __or__(self, _):
        return self

    def __lt__(self, _):
        return False

    def __ge__(self, _):
        return True

    def __mro_entries__(self, _):
        return (object,)

    __ror__ = __or__


def module(name, **contents):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__dict__.update(contents)


def kernel(run, name):
    """The kernel `module:function` as a JIT function, and its heuristics."""
    if "aiter" not in sys.modules:
        for stub in ("torch", "torch.nn", "torch.nn.functional", "packaging", "packaging.version"):
            module(stub, __version__="0", __path__=[], __getattr__=Stub().__getattr__)
        limits = types.SimpleNamespace(min=-448.0, max=448.0)
        sys.modules["torch"].__dict__.update(Tensor=object, finfo=lambda _: limits)
        # Packages as bare folders, so that their __init__.py do not load all of the library.
        for package in ("aiter", "aiter.ops", "aiter.ops.triton", KERNELS, f"{KERNELS}.gated_delta_rule"):
            module(package, __path__=[str(run.folder.parent.joinpath(*package.split(".")))])
        driver = Stub()
        driver.get_current_target = lambda: GPUTarget("hip", run.result.target, 64)
        triton.runtime.driver.set_active(driver)
        triton.autotune = lambda **_: lambda function: function  # asks for a GPU
    place, name = name.split(":")
    function = getattr(importlib.import_module(f"{KERNELS}.{place}"), name)
    heuristics = {}
    while not isinstance(function, triton.JITFunction):
        heuristics |= getattr(function, "values", {})
        function = function.fn
    return function, heuristics


def launch(run, name, grid, *args, **constants):
    """Launches with the arguments of the parameters that are not `constexpr`, specialized as Triton's launcher does it:
    1 and None are constants; pointers and multiples of 16 are aligned, and buffers are below 2 GiB."""
    function, heuristics = kernel(run, name)
    options = {key: constants.pop(key) for key in OPTIONS if key in constants}
    constants |= {key: value for key, value in options.items() if key in function.arg_names}
    fixed = constants.keys() | heuristics.keys()
    names = [p.name for p in function.params if not p.is_constexpr and p.name not in fixed]
    values = dict(zip(names, args, strict=True))
    for key, rule in heuristics.items():
        constants.setdefault(key, rule(values | constants))
    kinds, attributes, passed = {}, {}, []
    for parameter in function.params:
        key, value = parameter.name, values.get(parameter.name)
        value = int(value) if isinstance(value, np.integer) else value
        if key not in values:
            constants.setdefault(key, parameter.default)
        elif value is None or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            constants[key] = value
        elif isinstance(value, float):
            kinds[key] = "fp32"
            passed.append(f32(value))
        elif isinstance(value, int):
            kinds[key] = "i64" if parameter.annotation_type == "i64" else "i32"
            passed.append(f"{kinds[key]}:{value}")
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(parameter.num,)] = [["tt.divisibility", 16]]
        else:
            data = value.data if isinstance(value, InOut) else value
            kinds[key] = POINTERS[np.dtype(data.dtype)]
            passed.append(value)
            attributes[(parameter.num,)] = [["tt.divisibility", 16], ["tt.pointer_range", 32]]
    return triton_kernels.launch(run, function, kinds, constants, grid, passed, attributes, options)


def strides(*arrays):
    """Strides of arrays or outputs, in elements, as arguments."""
    return [int(np.prod(a.shape[i + 1 :], initial=1)) for a in arrays for i in range(len(a.shape))]


def f64(*arrays):
    return arrays[0].astype(np.float64) if len(arrays) == 1 else [a.astype(np.float64) for a in arrays]


def cdiv(a, b):
    return -(-a // b)


def quantum(dtype):
    return 127.0 if dtype == np.int8 else 240.0 if dtype == e4m3fnuz else 448.0


def compare_quantized(run, q, value):
    """Integers are truncated: moved by a half, they are within a half. fp8 rounds to nearest, also its subnormals."""
    if q.dtype == np.int8:
        run.compare("quantized", q + 0.5 * np.sign(value), value, 1e-5, 0.5)
    else:
        least = 2.0**-9 if q.dtype == e4m3 else 2.0**-10
        run.compare("quantized", f64(q), value, HALF_ULP[e4m3] + 1e-5, least / 2)


def register(cases):
    for target in TARGETS:
        for name, function in cases:
            case(f"AITER Triton: {name}", target)(function)
