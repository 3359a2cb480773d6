"""Kernels of AITER's Triton set, compiled by the package triton for both targets.

They are imported from the checkout whose folder `hsa` is given. Their modules also hold host code, which needs torch and a GPU;
stubs stand in for both.
"""

import importlib
import sys
import types

import ml_dtypes
import numpy as np
import triton_kernels
from harness import InOut, Out, bf16, case, e4m3, e4m3fnuz, f32

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

KERNELS = "aiter.ops.triton._triton_kernels"
FP8 = {"gfx942": e4m3fnuz, "gfx950": e4m3}
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
    options = {name: constants.pop(name) for name in OPTIONS if name in constants}
    constants |= {name: value for name, value in options.items() if name in function.arg_names}
    runtime = [p.name for p in function.params if p.name not in constants and p.name not in heuristics]
    runtime = [p for p in runtime if not function.params[function.arg_names.index(p)].is_constexpr]
    assert len(runtime) == len(args), f"{len(args)} arguments for {runtime}"
    values = dict(zip(runtime, args))
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
    kinds = {p: kinds[p] for p in function.arg_names if p in kinds}
    return triton_kernels.launch(run, function, kinds, constants, grid, passed, attributes, options)


def strides(*arrays):
    """Strides of arrays or outputs, in elements, as arguments."""
    return [int(np.prod(a.shape[i + 1 :], initial=1)) for a in arrays for i in range(len(a.shape))]


def f64(*arrays):
    return arrays[0].astype(np.float64) if len(arrays) == 1 else [a.astype(np.float64) for a in arrays]


def cdiv(a, b):
    return -(-a // b)


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def run_softmax(run, dtype):
    rows, columns = 5, 777
    run.result.size = f"{rows} x {columns}"
    x = run.normal(rows, columns, dtype=dtype, scale=3)
    out = launch(run, "softmax:_softmax_kernel_online", (rows, 1, 1), Out("out", x.shape, dtype), x, columns, columns, columns, BLOCK_SIZE=256)
    # The sum is f32; one rounding to the output.
    run.compare("out", out["out"], softmax(f64(x)), HALF_ULP[dtype] + 1e-5, 2**-24)


def run_silu_mul(run):
    rows, columns = 13, 333
    run.result.size = f"{rows} x {columns}"
    x = run.normal(rows, 2 * columns, dtype=bf16)
    out = Out("out", (rows, columns))
    args = [x, out, rows, columns, *strides(x, out)]
    got = launch(run, "activation:fused_silu_mul_kernel", (2, 2, 1), *args, BLOCK_M=8, BLOCK_N=256)
    a, b = f64(x)[:, :columns], f64(x)[:, columns:]
    run.compare("out", got["out"], silu(a) * b, 2 * HALF_ULP[bf16] + 2**-15, 1e-7)  # rounds after silu and after the product



def ranked(x, k):
    """The k greatest of each row, in order; the first of equals."""
    at = np.argsort(-f64(x), axis=1, kind="stable")[:, :k]
    return np.take_along_axis(f64(x), at, 1), at


def run_topk(run):
    rows, columns, k = 7, 200, 6
    run.result.size = f"{rows} x {columns}, top {k}"
    x = run.normal(rows, columns, dtype=bf16)  # has equal values
    outs = [Out("values", (rows, k), np.float32), Out("indices", (rows, k), np.int64)]
    constants = {"M": columns, "K": k, "BLOCK": 256, "FILL_VALUE": float(np.finfo(np.float32).min), "USE_TDM": False}
    out = launch(run, "topk:_topk_kernel", (rows, 1, 1), x, *outs, columns, k, k, **constants)
    values, at = ranked(x, k)
    run.equal("values", out["values"], values)
    run.equal("indices", out["indices"], at)


def run_topk_stages(run):
    rows, columns, k, chunk = 2, 2500, 12, 1024
    chunks = cdiv(columns, chunk)
    run.result.size = f"{rows} x {columns}, top {k} of {chunks} chunks"
    x = run.normal(rows, columns)
    constants = {"DESCENDING": True, "FILL_VALUE": float(np.finfo(np.float32).min), "USE_TDM": False}
    outs = [Out("values", (rows, chunks, k), np.float32), Out("indices", (rows, chunks, k), np.int64)]
    first = launch(run, "topk:topk_stage1_kernel", (rows, chunks, 1), *outs, x, k, N=columns, CHUNK_SIZE=chunk, **constants)
    outs = [Out("values", (rows, k), np.float32), Out("indices", (rows, k), np.int64)]
    constants |= {"k": k, "N": chunks * k, "BLOCK_SIZE": 64, "MASK_INDEX_VAL": -(2**31)}
    out = launch(run, "topk:topk_stage2_kernel", (rows, 1, 1), *outs, first["values"], first["indices"], **constants)
    values, at = ranked(x, k)
    run.equal("values", out["values"], values)
    run.equal("indices", out["indices"], at)


def compare_quantized(run, q, value):
    """Integers are truncated; fp8 rounds to nearest, subnormals to a multiple of the least."""
    if q.dtype == np.int8:
        run.compare("quantized", q + 0.5 * np.sign(value), value, 1e-5, 0.5)
    else:
        least = 2.0**-9 if q.dtype == e4m3 else 2.0**-10
        run.compare("quantized", f64(q), value, HALF_ULP[e4m3] + 1e-5, least / 2)


def quantum(dtype):
    return 127.0 if dtype == np.int8 else 240.0 if dtype == e4m3fnuz else 448.0


def layer_norm(x, w, b, eps):
    mean, variance = x.mean(1, keepdims=True), x.var(1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * w + b


def rms_norm(x, w, eps):
    return x / np.sqrt((x * x).mean(1, keepdims=True) + eps) * w


NORM = (5, 777, 1e-5)  # rows, columns, epsilon


def run_layer_norm(run):
    rows, columns, eps = NORM
    run.result.size = f"{rows} x {columns}"
    x = run.normal(rows, columns, dtype=np.float16) + np.float16(1)
    w, b = run.normal(columns, dtype=np.float16), run.normal(columns, dtype=np.float16)
    outs = [Out(name, (rows,), np.float32) for name in ("mean", "rstd")]
    args = [x, Out("y", x.shape, np.float16), w, b, *outs, columns, columns, rows, columns, eps]
    out = launch(run, "normalization.norm:_layernorm_kernel", (rows, 1, 1), *args, BLOCK_SIZE=512)
    x, w, b = f64(x, w, b)
    run.compare("mean", out["mean"], x.mean(1), 1e-5, 1e-6)
    run.compare("rstd", out["rstd"], (x.var(1) + eps) ** -0.5, 1e-5, 0)
    run.compare("y", out["y"], layer_norm(x, w, b, eps), HALF_ULP[np.float16] + 1e-5, 1e-5)


def run_quant_add_layer_norm(run):
    rows, columns, eps = NORM
    run.result.size = f"{rows} x {columns}"
    x, res = run.normal(rows, columns, dtype=np.float16), run.normal(rows, columns, dtype=np.float16)
    w, b = run.normal(columns, dtype=np.float16), run.normal(columns, dtype=np.float16)
    smooth = run.normal(columns) + 2
    args = [x, Out("q", x.shape, np.int8), res, Out("res", x.shape, np.float16), w, b, smooth, Out("scale", (rows,), np.float32)]
    args += [Out("aux", x.shape, np.float32), columns, columns, columns, rows, columns, eps]
    constants = {"DTYPE_MAX": 127.0, "IS_SMOOTH": True, "BLOCK_SIZE": 512}
    out = launch(run, "normalization.norm:_quant_fused_add_layernorm_kernel", (rows, 1, 1), *args, **constants)
    total = x + res
    run.equal("res", out["res"], total)
    y = layer_norm(*f64(total, w, b), eps) * smooth
    scale = np.abs(y).max(1) / 127
    run.compare("scale", out["scale"], scale, 1e-5, 0)
    run.compare("aux", out["aux"], y, 1e-5, 1e-5)
    compare_quantized(run, out["q"], y / scale[:, None])


def run_rms_norm(run, blocked):
    rows, columns, eps = NORM
    run.result.size = f"{rows} x {columns}"
    x, w = run.normal(rows, columns + 7, dtype=np.float16), run.normal(columns, dtype=np.float16)
    args = [x, Out("y", (rows, columns), np.float16), w, Out("rsigma", (rows,), np.float32), columns + 7, columns, rows, columns, eps]
    constants = {"BLOCK_SIZE": 256 if blocked else 1024, "USE_BLOCKED": blocked, "NUM_PRGMS": 3}
    out = launch(run, "normalization.rmsnorm:_rms_norm_kernel", (3, 1, 1), *args, **constants)
    x, w = f64(x[:, :columns], w)
    run.compare("rsigma", out["rsigma"], ((x * x).mean(1) + eps) ** -0.5, 1e-5, 0)
    run.compare("y", out["y"], rms_norm(x, w, eps), HALF_ULP[np.float16] + 1e-5, 2**-25)


def run_quant_add_rms_norm(run):
    rows, columns, eps = NORM
    run.result.size = f"{rows} x {columns}"
    fp8 = FP8[run.result.target]
    x, res = run.normal(rows, columns, dtype=bf16), run.normal(rows, columns, dtype=bf16)
    w = run.normal(columns, dtype=bf16)
    args = [x, Out("q", x.shape, fp8), res, Out("res", x.shape), None, Out("scale", (rows,), np.float32), w, Out("aux", x.shape, np.float32)]
    args += [columns, columns, columns, rows, columns, eps]
    constants = {"DTYPE_MAX": quantum(fp8), "IS_SMOOTH": False, "BLOCK_SIZE": 1024, "USE_BLOCKED": False, "NUM_PRGMS": 2}
    out = launch(run, "normalization.rmsnorm:_quant_fused_add_rmsnorm_kernel", (2, 1, 1), *args, **constants)
    run.equal("res", out["res"], x + res)
    y = rms_norm(*f64(x + res, w), eps)
    scale = np.abs(y).max(1) / quantum(fp8)
    run.compare("scale", out["scale"], scale, 1e-5, 0)
    compare_quantized(run, out["q"], y / scale[:, None])


def run_tensor_quant(run, integers):
    """The scale of the whole tensor by atomics, then the quantization by it."""
    rows, columns = 7, 300
    run.result.size = f"{rows} x {columns}"
    dtype = np.int8 if integers else FP8[run.result.target]
    x = run.normal(rows, columns, scale=5)
    scale = InOut("scale", np.zeros(1, np.float32))
    args, constants = [columns, columns], {"NUM_COL_POW2": 512}
    out = launch(run, "quant.quant:_dynamic_per_tensor_quant_fp8_i8_kernel", (rows, 1, 1), x, scale, *args, DTYPE_MAX=quantum(dtype), **constants)
    run.compare("scale", out["scale"], [np.abs(f64(x)).max() / quantum(dtype)], 1e-6, 0)
    args = [Out("q", x.shape, dtype), x, out["scale"], *args]
    q = launch(run, "quant.quant:_static_per_tensor_quant_fp8_i8_kernel", (rows, 1, 1), *args, **constants)["q"]
    compare_quantized(run, q, f64(x) / f64(out["scale"]))


def run_token_quant(run, integers):
    rows, columns = 7, 300
    run.result.size = f"{rows} x {columns}"
    dtype = np.int8 if integers else FP8[run.result.target]
    x = run.normal(rows, columns, scale=5)
    args = [Out("q", x.shape, dtype), Out("scale", (rows,), np.float32), x, columns, columns]
    constants = {"NUM_COL_POW2": 512, "DTYPE_MAX": quantum(dtype)}
    out = launch(run, "quant.quant:_dynamic_per_token_quant_fp8_i8_kernel", (rows, 1, 1), *args, **constants)
    scale = np.abs(f64(x)).max(1) / quantum(dtype)
    run.compare("scale", out["scale"], scale, 1e-6, 0)
    compare_quantized(run, out["q"], f64(x) / scale[:, None])


def mx_scales(x, top):
    """Blocks of 32 and the exponents of their scales for a type with the greatest exponent `top`; 1.75 and more rounds up."""
    blocks = f64(x).reshape(len(x), -1, 32)
    fraction, exponent = np.frexp(np.abs(blocks).max(-1))
    return blocks, exponent + (fraction >= 1.75 / 2) - 1 - top


def mxfp4(x):
    """Packed fp4 values and e8m0 scales; all steps are exact for bf16."""
    blocks, exponent = mx_scales(x, 2)
    q = np.clip(np.ldexp(blocks, -exponent[..., None]), -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    q = q.reshape(len(x), -1)
    return q[:, ::2] | q[:, 1::2] << 4, (exponent + 127).astype(np.uint8)


def run_mxfp4_quant(run):
    rows, columns = 37, 416
    run.result.size = f"{rows} x {columns}"
    x = run.normal(rows, columns, dtype=bf16) * np.exp2(run.integers(-9, 9, rows, 1)).astype(bf16)
    outs = [Out("q", (rows, columns // 2), np.uint8), Out("scales", (rows, columns // 32), np.uint8)]
    args = [x, *outs, *strides(x, *outs), rows, columns]
    constants = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 128, "NUM_ITER": 1, "NUM_STAGES": 1, "MXFP4_QUANT_BLOCK_SIZE": 32, "SCALING_MODE": 0}
    out = launch(run, "quant.quant:_dynamic_mxfp4_quant_kernel", (2, 4, 1), *args, **constants)
    q, scales = mxfp4(x)
    run.equal("q", out["q"], q)
    run.equal("scales", out["scales"], scales)


# Tiles and options as in AITER's configurations of small M.
TILES = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 64, "GROUP_SIZE_M": 4, "cache_modifier": ".cg", "num_warps": 4, "num_stages": 2}
TILES |= {"waves_per_eu": 2, "matrix_instr_nonkdim": 16}


def tiles(m, n, splits=1):
    return (cdiv(m, TILES["BLOCK_SIZE_M"]) * cdiv(n, TILES["BLOCK_SIZE_N"]) * splits, 1, 1)


def run_gemm_a16w16(run, splits):
    m, n, k, part = 37, 150, 328, 128
    run.result.size = f"{m} x {n} x {k}" + (f", split K {splits}" if splits > 1 else "")
    a, b, bias = run.normal(m, k, dtype=bf16), run.normal(n, k, dtype=bf16), run.normal(n, dtype=bf16)
    shape = (splits, m, n)
    c = Out("c", shape, np.float32 if splits > 1 else bf16)
    args = [a, b, bias, c, m, n, k, k, 1, 1, k, *strides(c)]
    constants = TILES | {"BLOCK_SIZE_K": 64, "NUM_KSPLIT": splits, "SPLITK_BLOCK_SIZE": part if splits > 1 else k, "ADD_BIAS": splits == 1}
    activation = {"activation": kernel(run, "activation:_gelu_tanh")[0], "use_activation": True}
    name = "gemm.basic.gemm_a16w16:_gemm_a16_w16_kernel"
    out = launch(run, name, tiles(m, n, splits), *args, SKIP_REDUCE=False, **activation, **constants)["c"]
    if splits > 1:
        args = [out, Out("c", (m, n)), bias, m, n, m * n, n, 1, n, 1]
        constants = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "ACTUAL_KSPLIT": splits, "MAX_KSPLIT": 4, "ADD_BIAS": True}
        out = launch(run, "common.splitk_reduce:_gemm_splitk_reduce_kernel", (cdiv(m, 16), cdiv(n, 64), 1), *args, **activation, **constants)["c"]
    x = f64(a) @ f64(b).T + f64(bias)
    want = 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
    run.compare("c", out.reshape(m, n), want, HALF_ULP[bf16] + 1e-5, 1e-5 * k**0.5)


def run_gemm_a8w8(run, integers):
    m, n, k = 37, 150, 320
    run.result.size = f"{m} x {n} x {k}"
    dtype = np.int8 if integers else FP8[run.result.target]
    a, b = (run.integers(-127, 128, rows, k).astype(dtype) if integers else run.normal(rows, k).astype(dtype) for rows in (m, n))
    a_scale, b_scale = run.rng.uniform(0.01, 0.02, (m, 1)).astype(np.float32), run.rng.uniform(0.01, 0.02, (1, n)).astype(np.float32)
    bias = run.normal(n, dtype=bf16)
    args = [a, b, a_scale, b_scale, bias, Out("c", (m, n)), m, n, k, k, 1, 1, k, 0, n, 1]
    constants = TILES | {"HAS_BIAS": True, "BLOCK_SIZE_K": 128, "NUM_KSPLIT": 1, "SPLITK_BLOCK_SIZE": k}
    c = launch(run, "gemm.basic.gemm_a8w8:_gemm_a8w8_kernel", tiles(m, n), *args, **constants)["c"]
    x = f64(a) @ f64(b).T * a_scale * b_scale
    # bf16 before the bias and after it.
    run.compare("c", c, x + f64(bias), HALF_ULP[bf16] + 1e-5, float(HALF_ULP[bf16] * np.abs(x).max()))


def run_gemm_blockscale(run):
    m, n, k = 37, 200, 384
    run.result.size = f"{m} x {n} x {k}"
    dtype = FP8[run.result.target]
    a, b = run.normal(m, k).astype(dtype), run.normal(n, k).astype(dtype)
    a_scale = run.rng.uniform(0.5, 2, (m, k // 128)).astype(np.float32)
    b_scale = run.rng.uniform(0.5, 2, (cdiv(n, 128), k // 128)).astype(np.float32)
    args = [a, b, Out("c", (m, n)), a_scale, b_scale, m, n, k, k, 1, 1, k, 0, n, 1, *strides(a_scale), 1, k // 128]
    constants = TILES | {"GROUP_K": 128, "GROUP_N": 128, "BLOCK_SIZE_K": 128, "NUM_KSPLIT": 1, "SPLITK_BLOCK_SIZE": k}
    c = launch(run, "gemm.basic.gemm_a8w8_blockscale:_gemm_a8w8_blockscale_kernel", tiles(m, n), *args, **constants)["c"]
    a = f64(a) * a_scale.repeat(128, 1)
    b = f64(b) * b_scale.repeat(128, 0)[:n].repeat(128, 1)
    run.compare("c", c, a @ b.T, HALF_ULP[bf16] + 1e-5, 1e-5 * k**0.5)


def fp4(codes, scales):
    """Values of packed fp4 with e8m0 scales of blocks of 32."""
    values = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1).view(ml_dtypes.float4_e2m1fn)
    return f64(values) * np.exp2(f64(scales) - 127).repeat(32, 1)


def run_gemm_fp4(run):
    m, n, k = 37, 150, 576
    run.result.size = f"{m} x {n} x {k}"
    a, b = (run.integers(0, 256, rows, k // 2, dtype=np.uint8) for rows in (m, n))
    a_scale, b_scale = (run.integers(124, 131, rows, k // 32, dtype=np.uint8) for rows in (m, n))
    args = [a, b, Out("c", (m, n)), a_scale, b_scale, m, n, k // 2, k // 2, 1, 1, k // 2, 0, n, 1, *strides(a_scale, b_scale)]
    constants = TILES | {"BLOCK_SIZE_K": 256, "NUM_KSPLIT": 1, "SPLITK_BLOCK_SIZE": k}
    c = launch(run, "gemm.basic.gemm_afp4wfp4:_gemm_afp4wfp4_kernel", tiles(m, n), *args, **constants)["c"]
    a, b = fp4(a, a_scale), fp4(b, b_scale)
    run.compare("c", c, a @ b.T, HALF_ULP[bf16], float(1e-6 * (np.abs(a) @ np.abs(b.T)).max()))



def rope(x, angles, neox):
    """Rotates pairs of the last axis, halves apart or neighbours, by angles [tokens, pairs]; x is [tokens, heads, dim]."""
    cos, sin = np.cos(f64(angles))[:, None], np.sin(f64(angles))[:, None]
    pairs = f64(x).reshape(*x.shape[:2], 2, -1) if neox else f64(x).reshape(*x.shape[:2], -1, 2).swapaxes(2, 3)
    a, b = pairs[:, :, 0], pairs[:, :, 1]
    out = np.stack([a * cos - b * sin, b * cos + a * sin], 2)
    return (out if neox else out.swapaxes(2, 3)).reshape(x.shape)


def run_rope(run):
    """Angles up to 1000, so that their reduction counts; the second half of the dims passes."""
    length, batch, heads, dim = 37, 2, 3, 64
    run.result.size = f"{length} x {batch} x {heads} x {dim}"
    x = run.normal(length, batch, heads, 2 * dim, dtype=bf16)
    angles = run.rng.uniform(-1000, 1000, (length, 1, 1, dim // 2)).astype(np.float32)
    out = Out("out", x.shape)
    constants = {"HAVE_NOPE": True, "NOPE_FIRST": False, "INPLACE": False, "REUSE_FREQS_FRONT_PART": True, "IS_NEOX": True}
    constants |= {"BLOCK_S": 32, "BLOCK_D": dim, "BLOCK_D_HALF": dim // 2}
    args = [x, angles, out, *strides(x, angles, out), length]
    got = launch(run, "rope.rope:_rope_kernel_sbhd_fwd", (batch, heads, cdiv(length, 32)), *args, **constants)["out"]
    want = rope(x[..., :dim].reshape(length, -1, dim), angles[:, 0, 0], True).reshape(length, batch, heads, dim)
    run.compare("rotated", got[..., :dim], want, HALF_ULP[bf16] + 1e-5, 1e-6)
    run.equal("rest", got[..., dim:], x[..., dim:])


def run_rope_cached(run, neox):
    tokens, heads, dim, longest = 37, 4, 64, 50
    run.result.size = f"{tokens} x {heads} x {dim}"
    x, y = (run.normal(tokens, heads, dim, dtype=bf16) for _ in range(2))
    angles = run.rng.uniform(-4, 4, (longest, dim // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    positions = run.integers(0, longest, tokens)
    outs = [Out("x", x.shape), Out("y", y.shape)]
    args = [x, y, cos, sin, positions, None, *outs, *strides(x, y, cos), 1, *strides(*outs), tokens]
    constants = {"HAVE_NOPE": False, "NOPE_FIRST": False, "INPLACE": False, "REUSE_FREQS_FRONT_PART": True, "IS_NEOX": neox}
    constants |= {"HAVE_POS": True, "HAVE_OFFS": False, "BLOCK_T": 32, "SPLIT_H_SIZE": 2, "BLOCK_D": dim, "BLOCK_D_HALF": dim // 2}
    grid = (heads // 2, cdiv(tokens, 32), 1)
    out = launch(run, "rope.rope:_rope_kernel_thd_cached_2c_fwd", grid, *args, num_stages=2, **constants)
    for name, data in ("x", x), ("y", y):
        run.compare(name, out[name], rope(data, angles[positions], neox), HALF_ULP[bf16] + 1e-5, 1e-6)


def run_cache_mla(run):
    """Scaled fp8 rows go to the slots of their tokens; a slot of -1 is skipped."""
    tokens, slots, nope, pe = 11, 20, 128, 64
    run.result.size = f"{tokens} of {slots} slots, dim {nope} + {pe}"
    fp8 = FP8[run.result.target]
    k, k_pe = run.normal(tokens, 1, nope, dtype=bf16), run.normal(tokens, 1, pe, dtype=bf16)
    mapping = run.rng.permutation(slots)[:tokens].astype(np.int64)
    mapping[3] = -1
    cache = run.normal(slots, 1, nope + pe).astype(fp8)
    args = [k, k_pe, InOut("cache", cache), mapping, *strides(k, k_pe, cache), np.array([0.37], np.float32)]
    constants = {"KH": 1, "BLOCK_D_nope": nope, "BLOCK_D_pe": pe, "HAVE_K_SCALE": True}
    out = launch(run, "kv_cache:_cat_and_cache_mla_kernel", (tokens, 1, 1), *args, **constants)["cache"]
    used = mapping >= 0
    rows = f64(np.concatenate([k, k_pe], 2))[used, 0] / float(np.float32(0.37))
    compare_quantized(run, out[mapping[used], 0], rows)
    rest = np.setdiff1d(np.arange(slots), mapping)
    run.equal("other slots", f64(out[rest]), f64(cache[rest]))


def attention(q, k, v, scale, seen=True, cap=0.0, sinks=None):
    """o[query, head, dim] of q[query, head, dim], k and v[key, group, dim]; sinks are logits of the heads without a value."""
    k, v = (x.repeat(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = np.einsum("qhd,khd->hqk", q, k) * scale
    s = np.where(seen, cap * np.tanh(s / cap) if cap else s, -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(f64(sinks)[:, None, None] - top))
    return np.einsum("hqk,khd->qhd", p / total, v)


def compare_attention(run, what, got, q, k, v, *args, **rest):
    """p and the output round to bf16: each p off by half a unit moves the output by that share of the mean |v| under p."""
    q, k, v = f64(q, k, v)
    spread = float(attention(q, k, np.abs(v), *args, **rest).max())
    run.compare(what, got, attention(q, k, v, *args, **rest), HALF_ULP[bf16] + 1e-5, HALF_ULP[bf16] * spread)


def pages(run, lengths, page):
    """A block table of shuffled pages, and their number."""
    count = sum(cdiv(n, page) for n in lengths) + 3
    free = list(run.rng.permutation(count))
    table = np.zeros((len(lengths), cdiv(max(lengths), page)), np.int32)
    for row, length in zip(table, lengths):
        for i in range(cdiv(length, page)):
            row[i] = free.pop()
    return table, count


LENGTHS = (150, 1, 67)


def run_paged_decode(run, heads, groups, fp8=False, splits=False):
    page, dim, part = 16, 64, 64
    run.result.size = f"{len(LENGTHS)} sequences of {', '.join(map(str, LENGTHS))}, heads {heads}/{groups}, dim {dim}"
    table, count = pages(run, LENGTHS, page)
    q = run.normal(len(LENGTHS), heads, dim, dtype=bf16)
    k, v = (run.normal(count, groups, page, dim).astype(FP8[run.result.target] if fp8 else bf16) for _ in range(2))
    k_scale, v_scale = (0.5, 2.0) if fp8 else (1.0, 1.0)
    lengths = np.array(LENGTHS, np.int32)
    out = Out("o", q.shape)
    inputs = [q, k, v, table, lengths]
    factors = [dim**-0.5, k_scale, v_scale]
    group = heads // groups
    dims = {"HEAD_SZ": dim, "HEAD_SZ_POW2": dim, "QUERY_GRP_SZ": group, "QUERY_GRP_SZ_POW2": 16}
    constants = {"compute_type": tl.bfloat16, "KV_BLK_SZ": page, "KV_BLK_SZ_POW2": page}
    name = "attention.pa_decode:_paged_attn_decode"
    if splits:
        parts = cdiv(max(LENGTHS), part)
        shape = (len(LENGTHS), groups, parts, group)
        outs = [Out("sums", shape, np.float32), Out("tops", shape, np.float32), Out("o", (*shape, dim))]
        args = [*outs, *inputs, *factors, None, *strides(outs[0])[:3], *strides(outs[2])[:4], *strides(q)[:2], *strides(k)[:3], table.shape[1]]
        grid = (len(LENGTHS), groups, parts)
        got = launch(run, f"{name}_v2_w_dot_kernel", grid, *args, SEQ_PARTITION_SZ=part, **constants, **dims)
        args = [out, got["sums"], got["tops"], got["o"], lengths, *strides(out)[:2], *strides(outs[0])[:3], *strides(outs[2])[:4]]
        constants = {"SEQ_PARTITION_SZ": part, "MAX_NUM_SEQ_PARTITIONS_POW2": 4}
        got = launch(run, f"{name}_v2_w_dot_reduce_kernel", grid[:2] + (1,), *args, **constants, **dims)["o"]
    else:
        args = [out, *inputs, None, *factors, *strides(out)[:2], *strides(q, k), table.shape[1]]
        got = launch(run, f"{name}_v1_w_dot_kernel", (len(LENGTHS), groups, 1), *args, **constants, **dims)["o"]
    for i, n in enumerate(LENGTHS):
        keys, values = (f64(x)[table[i]].swapaxes(1, 2).reshape(-1, groups, dim)[:n] for x in (k, v))
        compare_attention(run, f"o {i}", got[i : i + 1], q[i : i + 1], keys * k_scale, values * v_scale, dim**-0.5)


def starts(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def run_prefill(run):
    heads, groups, dim = 4, 2, 64
    run.result.size = f"{len(LENGTHS)} sequences of {', '.join(map(str, LENGTHS))}, heads {heads}/{groups}, dim {dim}"
    first = starts(LENGTHS)
    q = run.normal(first[-1], heads, dim, dtype=bf16)
    k, v = (run.normal(first[-1], groups, dim, dtype=bf16) for _ in range(2))
    out = Out("o", q.shape)
    at = [s for x in (q, k, v, out) for s in strides(x)[:2]]
    args = [q, k, v, dim**-0.5, first[:-1], np.array(LENGTHS, np.int32), out, *at]
    constants = {"kv_group_num": heads // groups, "BLOCK_M": 128, "BLOCK_DMODEL": dim, "BLOCK_N": 128, "IS_CAUSAL": True, "Lk": dim}
    grid = (len(LENGTHS), heads, cdiv(max(LENGTHS), 128))
    got = launch(run, "attention.prefill_attention:_fwd_kernel", grid, *args, num_warps=4, num_stages=1, **constants)["o"]
    for i, n in enumerate(LENGTHS):
        rows = slice(first[i], first[i + 1])
        compare_attention(run, f"o {i}", got[rows], q[rows], k[rows], v[rows], dim**-0.5, np.tri(n) > 0)


def run_unified_attention(run, segments):
    """Sequences with and without a context in a paged cache; a window and a soft cap in one pass, or by segments; sinks."""
    heads, groups, dim, page = 8, 2, 64, 16
    window, cap = (0, 0.0) if segments else (40, 5.0)
    queries = (33, 1, 20)
    lengths = np.array([150, 67, 20], np.int32)
    run.result.size = f"queries {queries}, keys {tuple(map(int, lengths))}, heads {heads}/{groups}, dim {dim}"
    table, count = pages(run, lengths, page)
    first = starts(queries)
    tokens, some = int(first[-1]), len(queries)
    q = run.normal(tokens, heads, dim, dtype=bf16)
    k, v = (run.normal(count, page, groups, dim, dtype=bf16) for _ in range(2))
    sinks = run.normal(heads)
    block_q = 16 * groups // heads
    out = Out("o", q.shape)
    inputs, factors = [q, k, v, sinks, table, lengths, None, None], [None, None, None, None, cap or None]
    caches = [0, *strides(k)[:3], *strides(v)[:3], first, some]
    sizes = {"HEAD_SIZE": dim, "HEAD_SIZE_PADDED": dim, "num_query_heads": heads, "TILE_SIZE": 32, "BLOCK_Q": block_q}
    constants = {"num_queries_per_kv": heads // groups, "BLOCK_SIZE": page, "USE_ALIBI_SLOPES": False, "USE_QQ_BIAS": False}
    constants |= {"USE_SOFTCAP": cap > 0, "USE_SINKS": True, "SLIDING_WINDOW": window, "stride_k_cache_3": 1, "stride_v_cache_3": 1}
    constants |= {"BLOCK_M": 16, "num_warps": 2, "num_stages": 2}
    limits = {"FP8_MIN": -448.0, "FP8_MAX": 448.0}
    name, blocks = "attention.unified_attention:", tokens // block_q + some
    at = [table.shape[1], *strides(q)[:2]]
    if segments:
        parts = [Out("part", (tokens, heads, segments, dim), np.float32)]
        parts += [Out(n, (tokens, heads, segments), np.float32) for n in ("top", "sum")]
        args = [*parts, *inputs, dim**-0.5, *factors, *at, *caches]
        constants |= {"NUM_SEGMENTS_PER_SEQ": segments, "waves_per_eu": 2} | sizes
        got = launch(run, f"{name}kernel_unified_attention_3d", (blocks, groups, segments), *args, **constants)
        args = [out, *(got[n.name] for n in parts), lengths, some, None, *strides(out)[:2], table.shape[1], first]
        got = launch(run, f"{name}reduce_segments", (tokens, heads, 1), *args, NUM_SEGMENTS_PER_SEQ=segments, **sizes, **limits)["o"]
    else:
        args = [out, *inputs, *factors, *at, *strides(out)[:2], *caches]
        got = launch(run, f"{name}kernel_unified_attention_2d", (groups, blocks, 1), *args, scale=dim**-0.5, **constants, **sizes, **limits)["o"]
    for i, n in enumerate(lengths):
        rows = slice(first[i], first[i + 1])
        keys, values = (x[table[i]].reshape(-1, groups, dim)[:n] for x in (k, v))
        distance = np.arange(n - queries[i], n)[:, None] - np.arange(n)
        seen = (distance >= 0) & (distance < (window or n))
        compare_attention(run, f"o {i}", got[rows], q[rows], keys, values, dim**-0.5, seen, cap=cap, sinks=sinks)


def run_mqa_logits(run):
    rows, keys, heads, dim = 5, 150, 32, 64
    run.result.size = f"{rows} x {keys}, heads {heads}, dim {dim}"
    fp8 = FP8[run.result.target]
    q, kv = run.normal(rows, heads, dim).astype(fp8), run.normal(keys, dim).astype(fp8)
    scales, weights = run.rng.uniform(0.5, 2, keys).astype(np.float32), run.normal(rows, heads)
    begin, end = run.integers(0, 40, rows), run.integers(100, keys + 1, rows)
    logits = InOut("logits", np.full((rows, keys), -np.inf, np.float32))
    args = [q, kv, scales, weights, begin, end, logits, rows, keys, heads * dim, dim, heads, keys, 1]
    constants = {"NUM_HEADS": heads, "HEAD_SIZE": dim, "stride_q_h": dim, "stride_q_d": 1, "stride_kv_d": 1, "stride_w_h": 1, "BLOCK_KV": 64}
    got = launch(run, "attention.fp8_mqa_logits:_fp8_mqa_logits_kernel", (rows, 1, 1), *args, **constants)["logits"]
    scores = np.maximum(np.einsum("rhd,kd->rhk", *f64(q, kv)) * scales, 0) * weights[:, :, None]
    at = np.arange(keys)
    want = np.where((at >= begin[:, None]) & (at < end[:, None]), scores.sum(1), -np.inf)
    run.compare("logits", got, want, 1e-5, float(1e-6 * np.abs(scores).sum(1).max()))


def run_causal_conv(run):
    """Sequences that begin with and without a state, one shorter than the state; states are updated."""
    dim, width, lengths = 300, 4, (21, 2, 8)
    run.result.size = f"{dim} channels, width {width}, {len(lengths)} sequences of {', '.join(map(str, lengths))}"
    first = starts(lengths)
    x, w, bias = run.normal(first[-1], dim, dtype=np.float16), run.normal(dim, width, dtype=np.float16), run.normal(dim, dtype=np.float16)
    states = run.normal(5, width - 1, dim, dtype=np.float16)
    lines, begun = np.array([4, 1, 2], np.int32), np.array([1, 1, 0], np.int8)
    args = [x, w, bias, InOut("states", states), lines, begun, first, Out("o", x.shape, np.float16), int(first[-1])]
    constants = {"dim": dim, "num_cache_lines": len(states), "stride_x_seq": 0, "stride_x_dim": 1, "stride_x_token": dim}
    constants |= {"stride_w_dim": width, "stride_w_width": 1, "stride_istate_seq": (width - 1) * dim, "stride_istate_dim": 1}
    constants |= {"stride_istate_token": dim, "stride_o_seq": 0, "stride_o_dim": 1, "stride_o_token": dim, "pad_slot_id": -1}
    constants |= {"HAS_BIAS": True, "KERNEL_WIDTH": width, "SILU_ACTIVATION": True, "HAS_INITIAL_STATES": True, "HAS_CACHE": True}
    constants |= {"IS_CONTINUOUS_BATCHING": True, "USE_PAD_SLOT": True, "NP2_STATELEN": 4, "BLOCK_M": 8, "BLOCK_N": 256}
    grid = (len(lengths), cdiv(max(lengths), 8), cdiv(dim, 256))
    out = launch(run, "conv.causal_conv1d:_causal_conv1d_fwd_kernel", grid, *args, num_stages=2, **constants)
    o, new = np.empty(x.shape), f64(states)
    spread = 0.0
    for i, line in enumerate(lines):
        past = np.concatenate([f64(states[line]) * begun[i], f64(x[first[i] : first[i + 1]])])
        terms = np.stack([past[j : j + lengths[i]] * f64(w)[:, j] for j in range(width)])
        o[first[i] : first[i + 1]] = silu(terms.sum(0) + f64(bias))
        spread = max(spread, float(np.abs(terms).sum(0).max()))
        new[line] = past[len(past) - width + 1 :]
    # Products round to f16; the slope of silu is below 1.1.
    run.compare("o", out["o"], o, HALF_ULP[np.float16] + 1e-5, 1.1 * HALF_ULP[np.float16] * spread)
    run.equal("states", f64(out["states"]), new)


def run_gated_delta_rule(run):
    heads, v_heads, k_dim, v_dim, lengths = 2, 4, 64, 48, (5, 1, 3)
    run.result.size = f"{len(lengths)} sequences of {', '.join(map(str, lengths))}, heads {heads}/{v_heads}, dim {k_dim}/{v_dim}"
    first = starts(lengths)
    tokens = int(first[-1])
    q, k = (run.normal(tokens, heads, k_dim, dtype=bf16) for _ in range(2))
    v, g = run.normal(tokens, v_heads, v_dim, dtype=bf16), -run.rng.uniform(0, 2, (tokens, v_heads)).astype(np.float32)
    beta, state = run.rng.uniform(0, 1, (tokens, v_heads)).astype(bf16), run.normal(len(lengths), v_heads, k_dim, v_dim)
    args = [q, k, v, g, None, None, beta, Out("o", v.shape), state, Out("state", state.shape, np.float32), first, k_dim**-0.5, tokens]
    constants = {"B": 1, "H": heads, "HV": v_heads, "K": k_dim, "V": v_dim, "BK": 64, "BV": 8, "IS_BETA_HEADWISE": True}
    constants |= {"USE_G": True, "USE_GK": False, "USE_GV": False, "USE_QK_L2NORM_IN_KERNEL": True}
    name = "gated_delta_rule.decode.fused_recurrent:_fused_recurrent_gated_delta_rule_fwd_kernel"
    out = launch(run, name, (v_dim // 8, len(lengths) * v_heads, 1), *args, num_warps=1, num_stages=3, **constants)
    q, k = (x.repeat(v_heads // heads, 1) / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6).repeat(v_heads // heads, 1) for x in f64(q, k))
    v, g, beta, state = f64(v, g, beta, state)
    o = np.empty(v.shape)
    for i in range(len(lengths)):
        for t in range(first[i], first[i + 1]):
            state[i] *= np.exp(g[t])[:, None, None]
            delta = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state[i], k[t]))
            state[i] += k[t][:, :, None] * delta[:, None]
            o[t] = np.einsum("hkv,hk->hv", state[i], q[t]) * k_dim**-0.5
    run.compare("o", out["o"], o, HALF_ULP[bf16] + 1e-5, 1e-6)
    run.compare("state", out["state"], state, 1e-5, 1e-5)


def sorted_tokens(ids, experts, block):
    """Positions in `ids` by expert, each expert padded to whole blocks, and the experts of blocks."""
    flat, order, owners = ids.ravel(), [], []
    for expert in range(experts):
        mine = np.flatnonzero(flat == expert)
        blocks = cdiv(len(mine), block)
        order += [*mine, *[flat.size] * (blocks * block - len(mine))]
        owners += [expert] * blocks
    return np.array(order, np.int32), np.array(owners, np.int32)


MOE = (23, 6, 2, 16)  # tokens, experts, top, block


def routes(run):
    tokens, experts, top, block = MOE
    ids = np.stack([run.rng.permutation(experts - 1)[:top] for _ in range(tokens)]).astype(np.int32)  # the last has no tokens
    return ids, *sorted_tokens(ids, experts, block)


def run_moe_align(run):
    tokens, experts, top, block = MOE
    run.result.size = f"{tokens} tokens, {experts} experts, top {top}, blocks of {block}"
    ids, order, owners = routes(run)
    some = {"num_experts": experts}
    slices = some | {"numel": ids.size, "tokens_per_thread": cdiv(ids.size, experts)}
    name, grid = "moe.moe_align_block_size:_moe_align_block_size_stage", (experts, 1, 1)
    counts = launch(run, f"{name}1_kernel", grid, ids, InOut("n", np.zeros((experts + 1, experts), np.int32)), **slices)["n"]
    counts = launch(run, f"{name}2_kernel", grid, InOut("n", counts), **some)["n"]
    total, ends = Out("total", (1,), np.int32), InOut("ends", np.zeros(experts + 1, np.int32))
    out = launch(run, f"{name}3_kernel", (1, 1, 1), total, counts, ends, block_size=block, **some)
    run.equal("total", out["total"], [len(order)])
    spare = np.full(experts * block, ids.size, np.int32)  # as many more as there may be at most
    args = [ids, InOut("order", np.full(len(order) + len(spare), ids.size, np.int32)), InOut("owners", np.full(len(owners) + experts, -7, np.int32))]
    out = launch(run, f"{name}4_kernel", grid, *args, InOut("n", counts), out["ends"], block_size=block, **slices)
    run.equal("order", out["order"], np.concatenate([order, spare]))
    run.equal("experts", out["owners"], np.concatenate([owners, np.full(experts, -7)]))


def run_moe_gemm(run, fp8):
    (tokens, experts, top, block), n, k = MOE, 200, 256
    run.result.size = f"{tokens} tokens, {experts} experts, top {top}, {n} x {k}"
    ids, order, owners = routes(run)
    dtype = FP8[run.result.target] if fp8 else bf16
    a, b = run.normal(tokens, k).astype(dtype), run.normal(experts, n, k).astype(dtype)
    a_scale = run.rng.uniform(0.5, 2, (tokens, k // 128)).astype(np.float32) if fp8 else None
    b_scale = run.rng.uniform(0.5, 2, (experts, cdiv(n, 128), k // 128)).astype(np.float32) if fp8 else None
    weights = run.rng.uniform(0, 1, ids.shape).astype(np.float32)
    owners[1] = -1  # an expert of another rank: zeros
    args = [a, b, Out("c", (tokens, top, n)), a_scale, b_scale, weights, order, owners, np.array([len(order)], np.int32)]
    args += [n, k, ids.size, k, 1, n * k, 1, k, n, 1]
    args += [*strides(a_scale), strides(b_scale)[0], 1, k // 128] if fp8 else [0] * 5
    constants = {"group_n": 128 * fp8, "group_k": 128 * fp8, "BLOCK_SIZE_M": block, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128 if fp8 else 64}
    constants |= {"GROUP_SIZE_M": 4, "MUL_ROUTED_WEIGHT": True, "top_k": top, "compute_type": tl.bfloat16, "use_fp8_w8a8": fp8}
    constants |= {"use_int8_w8a16": False, "NUM_XCDS": 8}
    grid = (cdiv(len(order), block) * cdiv(n, 64) + 3, 1, 1)  # more blocks than there is work for
    options = {"num_warps": 4, "num_stages": 2, "waves_per_eu": 0, "matrix_instr_nonkdim": 16, "kpack": 1}
    c = launch(run, "moe.moe_op:_fused_moe_kernel", grid, *args, **constants, **options)["c"]
    a, b = f64(a, b)
    if fp8:
        a, b = a * a_scale.repeat(128, 1), b * b_scale.repeat(128, 1)[:, :n].repeat(128, 2)
    want = np.einsum("tk,tpnk->tpn", a, b[ids]) * weights[:, :, None]
    skipped = order[block : 2 * block]
    want.reshape(-1, n)[skipped[skipped < ids.size]] = 0
    run.compare("c", c, want, HALF_ULP[bf16] + 1e-5, 1e-5 * k**0.5)



def run_flash_attention(run):
    batch, queries, keys, heads, groups, dim = 2, 100, 150, 4, 2, 64
    run.result.size = f"b {batch}, q {queries}, k {keys}, heads {heads}/{groups}, dim {dim}"
    q = run.normal(batch, queries, heads, dim, dtype=bf16)
    k, v = (run.normal(batch, keys, groups, dim, dtype=bf16) for _ in range(2))
    out, lse = Out("o", q.shape), Out("lse", (batch, heads, queries), np.float32)
    at = [s for x in (q, k, v) for s in np.array(strides(x))[[0, 2, 1, 3]]]
    args = [q, k, v, None, None, None, out, None, None, None, lse, None, *at, 0, 0, 0, *np.array(strides(out))[[0, 2, 1, 3]]]
    args += [0] * 6 + [*strides(lse), dim**-0.5, None, None, 0.0, 0, 0, queries, keys, batch]
    constants = {"IS_CAUSAL": True, "NUM_Q_HEADS": heads, "NUM_K_HEADS": groups, "PRELOAD_V": False, "BLOCK_M": 64, "BLOCK_N": 64}
    constants |= {"BLOCK_DMODEL": dim, "BLOCK_DMODEL_POW2": dim, "BLOCK_DMODEL_PE": 0, "RETURN_SCORES": False, "ENABLE_DROPOUT": False}
    constants |= {"IS_FP8": False, "FP8_MAX": 448.0, "VARLEN": False, "NUM_XCD": 8, "SWIZZLE": "default", "USE_INT64_STRIDES": True}
    constants |= {"ENABLE_SINK": False, "SLIDING_WINDOW": 0, "HEAD_STRIDE_ALIGNED_8": True}
    grid = (batch * heads * cdiv(queries, 64), 1, 1)
    got = launch(run, "attention.mha:_attn_fwd", grid, *args, num_warps=4, num_stages=1, waves_per_eu=2, **constants)
    seen = np.tri(queries, keys, keys - queries) > 0
    for i in range(batch):
        compare_attention(run, f"o {i}", got["o"][i], q[i], k[i], v[i], dim**-0.5, seen)
    s = np.einsum("bqhd,bkhd->bhqk", f64(q), f64(k).repeat(heads // groups, 2)) * dim**-0.5
    run.compare("lse", got["lse"], np.log(np.where(seen, np.exp(s), 0).sum(-1)), 1e-5, 1e-5)


def run_mla_decode(run):
    """Rope by quarter turns, which are exact, of the queries and of the last key."""
    lengths, heads, lora, pe, splits = (75, 1, 40), 16, 128, 64, 3
    run.result.size = f"{len(lengths)} sequences of {', '.join(map(str, lengths))}, heads {heads}, dim {lora} + {pe}, splits {splits}"
    first = starts(lengths)
    slots, batch = int(first[-1]) + 9, len(lengths)
    q, kv = run.normal(batch, heads, lora + pe, dtype=bf16), run.normal(slots, 1, lora + pe, dtype=bf16)
    turns = run.integers(0, 4, 100, pe // 2)
    cos_sin = np.concatenate([np.array([1, 0, -1, 0])[turns], np.array([0, 1, 0, -1])[turns]], 1).astype(bf16)
    positions = np.array(lengths, np.int64) + 4
    indices = run.rng.permutation(slots)[: first[-1]].astype(np.int32)
    scale = (lora + pe) ** -0.5
    part, last = Out("part", (batch, heads, splits, lora + 1), np.float32), Out("last", (batch, pe))
    args = [q, kv, kv, cos_sin, positions, scale, first, indices, part, last, *strides(q)[:2], lora + pe, lora + pe, *strides(part)[:3]]
    constants = {"rotary_dim": pe, "kv_lora_rank": lora, "qk_rope_head_dim": pe, "kv_group_num": heads, "q_head_num": heads, "batch": batch}
    constants |= {"BLOCK_C": lora, "BLOCK_R": pe, "BLOCK_N": 32, "BLOCK_H": 16, "NUM_KV_SPLITS": splits, "logit_cap": 0.0}
    constants |= {"USE_ROPE": True, "IS_NEOX_STYLE": True, "num_warps": 4, "num_stages": 1, "waves_per_eu": 2, "matrix_instr_nonkdim": 16}
    name = "attention.mla_decode_rope:_fwd"
    got = launch(run, f"{name}_grouped_kernel_stage1_rope", (batch * splits, 1, 1), *args, pe, cos_sin.shape[1], 1, **constants)
    out = Out("o", (batch, heads, lora))
    constants = {"NUM_KV_SPLITS": splits, "BLOCK_DV": lora, "Lv": lora, "batch": batch, "head_num": heads}
    o = launch(run, f"{name}_kernel_stage2", (batch * heads, 1, 1), got["part"], out, first, *strides(part)[:3], *strides(out)[:2], **constants)["o"]
    q_pe = rope(q[:, :, lora:], turns[positions] * (np.pi / 2), True).round(9)
    for i in range(batch):
        k = f64(kv[indices[first[i] : first[i + 1]]])
        k[-1:, :, lora:] = rope(k[-1:, :, lora:], turns[positions[i : i + 1]] * (np.pi / 2), True)
        run.compare(f"last key {i}", got["last"][i], k[-1, 0, lora:], 0, 1e-12)
        query = np.concatenate([f64(q)[i : i + 1, :, :lora], q_pe[i : i + 1]], 2)
        compare_attention(run, f"o {i}", o[i : i + 1], query, k, k[:, :, :lora], scale)


def run_conv2d(run):
    n, c, height, width, k, r, s, stride, pad = 2, 5, 11, 9, 35, 3, 3, 2, 1
    p, q = (height + 2 * pad - r) // stride + 1, (width + 2 * pad - s) // stride + 1
    run.result.size = f"{n} x {c} x {height} x {width}, {k} filters {r} x {s}, stride {stride}"
    x, w, bias = run.normal(n, c, height, width, dtype=bf16), run.normal(k, c, r, s, dtype=bf16), run.normal(k, dtype=bf16)
    flat = np.zeros((k, 64), bf16)
    flat[:, : c * r * s] = w.reshape(k, -1)
    args = [x, flat, bias, Out("y", (n, k, p, q)), n, stride, stride, pad, pad, 1, 1, n * p * q]
    constants = {"C": c, "H": height, "W_in": width, "K_out": k, "R": r, "S": s, "P": p, "Q": q, "K_pad": 64, "BLOCK_M": 32, "BLOCK_N": 32}
    constants |= {"BLOCK_K": 64, "GROUP_SIZE_M": 4, "HAS_BIAS": True, "ACTIVATION": "relu", "LAYOUT": "nchw"}
    grid = (cdiv(n * p * q, 32) * cdiv(k, 32), 1, 1)
    y = launch(run, "conv.conv_general:_conv2d_general_kernel", grid, *args, num_warps=4, num_stages=1, **constants)["y"]
    padded = np.pad(f64(x), ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (r, s), (2, 3))[:, :, ::stride, ::stride]
    want = np.einsum("ncpqrs,kcrs->nkpq", windows, f64(w)) + f64(bias)[:, None, None]
    run.compare("y", y, np.maximum(want, 0), HALF_ULP[bf16] + 1e-5, 1e-5)


def run_clamp_silu_mul(run):
    rows, columns, group, limit = 7, 384, 128, 1.5
    run.result.size = f"{rows} x {columns}, groups of {group}"
    fp8 = FP8[run.result.target]
    x, weights = run.normal(rows, 2 * columns, dtype=bf16), run.normal(rows, 1)
    outs = [Out("q", (rows, columns), fp8), Out("scales", (rows, columns // group), np.float32)]
    args = [x, *outs, weights, rows, columns, *strides(x, *outs, weights), limit]
    constants = {"BLOCK_SIZE_N": 512, "QUANT_BLOCK_SIZE": group, "SCALE_FMT": "fp32", "DTYPE_MAX": quantum(fp8), "DTYPE_MIN": -quantum(fp8)}
    constants |= {"HAVE_WEIGHTS": True, "WEIGHT_BROADCAST": True, "HAVE_SWIGLU_CLAMP": True, "HAS_QUANT": True, "ACTIVATION": "silu"}
    constants |= {"SHUFFLE": False, "SCALE_N_PAD": 0}
    out = launch(run, "fusions.fused_clamp_act_mul:_fused_clamp_silu_mul_kernel", (rows, 1, 1), *args, **constants)
    gate, up = f64(x)[:, :columns], f64(x)[:, columns:]
    y = silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit) * weights
    scales = np.abs(y).reshape(rows, -1, group).max(-1) / quantum(fp8)
    run.compare("scales", out["scales"], scales, 1e-5, 0)
    compare_quantized(run, out["q"], y / scales.repeat(group, 1))


def run_mxfp8_quant(run):
    """OCP fp8 on both targets; gfx942 converts to it in software."""
    rows, columns = 13, 416
    run.result.size = f"{rows} x {columns}"
    x = run.normal(rows, columns, dtype=bf16) * np.exp2(run.integers(-9, 9, rows, 1)).astype(bf16)
    outs = [Out("q", x.shape, e4m3), Out("scales", (rows, columns // 32), np.uint8)]
    args = [x, *outs, rows, columns, *strides(x, *outs)]
    constants = {"BLOCK_SIZE_N": 512, "QUANT_BLOCK_SIZE": 32, "NUM_PRGMS": 5}
    out = launch(run, "quant.quant:_dynamic_mxfp8_quant_kernel", (5, 1, 1), *args, **constants)
    blocks, exponent = mx_scales(x, 8)
    run.equal("q", f64(out["q"]).reshape(blocks.shape), f64(np.ldexp(blocks, -exponent[..., None]).astype(e4m3)))
    run.equal("scales", out["scales"], exponent + 127)


def run_moe_int4(run):
    (tokens, experts, top, block), n, k, group = MOE, 96, 128, 64
    run.result.size = f"{tokens} tokens, {experts} experts, top {top}, {n} x {k}, groups of {group}"
    ids, order, owners = routes(run)
    a, b = run.normal(tokens, k, dtype=bf16), run.integers(0, 256, experts, n, k // 2, dtype=np.uint8)
    scales = run.rng.uniform(0.01, 0.1, (experts, n, k // group)).astype(bf16)
    zeros = run.integers(0, 256, experts, n // 2, k // group, dtype=np.uint8)
    weights = run.rng.uniform(0, 1, ids.shape).astype(np.float32)
    args = [a, b, Out("c", (tokens, top, n)), scales, zeros, weights, order, owners, np.array([len(order)], np.int32), len(order), ids.size]
    args += [k, 1, n * k // 2, 1, k // 2, n, 1, *(strides(scales)[i] for i in (0, 2, 1)), *(strides(zeros)[i] for i in (0, 2, 1))]
    constants = {"N": n, "K": k, "group_size": group, "BLOCK_SIZE_M": block, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
    constants |= {"MUL_ROUTED_WEIGHT": True, "top_k": top, "compute_type": tl.bfloat16, "has_zp": True, "use_int4_w4a16": True}
    constants |= {"use_int8_w8a16": False, "NUM_XCDS": 8, "num_warps": 4, "num_stages": 2, "matrix_instr_nonkdim": 16}
    grid = (len(order) // block * (n // 32), 1, 1)
    c = launch(run, "moe.moe_op:_fused_moe_kernel_gptq_awq", grid, *args, **constants)["c"]
    b = np.stack([b & 15, b >> 4], -1).reshape(experts, n, k) - f64(np.stack([zeros & 15, zeros >> 4], 2).reshape(scales.shape)).repeat(group, 2)
    b = f64((b * f64(scales).repeat(group, 2)).astype(bf16))
    want = np.einsum("tk,tpnk->tpn", f64(a), b[ids]) * weights[:, :, None]
    run.compare("c", c, want, HALF_ULP[bf16] + 1e-5, 1e-5 * k**0.5)


def run_sigmoid_top1(run):
    tokens, experts, dim = 32, 16, 200
    run.result.size = f"{tokens} x {experts} x {dim}"
    x, w = run.normal(tokens, dim, dtype=bf16), run.normal(dim, experts, dtype=bf16, scale=0.05)
    outs = [Out("ids", (tokens, 2), np.int32), Out("weights", (tokens, 2), np.float32)]
    args = [x, w, *outs, tokens, experts, dim, *strides(x, w, *outs)]
    constants = {"BLOCK_M": 16, "BLOCK_K": 64, "BLOCK_N": 16, "TOPK": 1, "FUSED_SHARED_EXPERTS": True}
    name = "moe.moe_routing_sigmoid_top1_fused:_routing_sigmoid_top1_kernel"
    out = launch(run, name, (tokens // 16, 1, 1), *args, num_warps=4, num_stages=1, **constants)
    gates = 1 / (1 + np.exp(-(f64(x) @ f64(w))))
    run.equal("ids", out["ids"], np.stack([gates.argmax(1), np.full(tokens, experts)], 1))
    run.compare("weights", out["weights"], np.stack([gates.max(1), np.ones(tokens)], 1), 1e-5, 0)


def run_grouped_gemm(run, stealing):
    """Groups of rows, one of them empty; tiles in turn, or from a counter."""
    rows, k, n, programs = (37, 0, 5, 40), 136, 100, 5
    run.result.size = f"{', '.join(map(str, rows))} rows, {k} x {n}"
    first = starts(rows)
    a, b, bias = run.normal(first[-1], k, dtype=bf16), run.normal(len(rows), n, k, dtype=bf16), run.normal(len(rows), n, dtype=bf16)
    counter = InOut("counter", np.array([programs], np.int32)) if stealing else None
    args = [a, b, np.array(rows, np.int32), Out("c", (int(first[-1]), n)), bias, counter, int(first[-1]), k, n, len(rows)]
    constants = {"TRANS_RHS": True, "BLOCK_SIZE_G": 4, "BLOCK_SIZE_M": 32, "BLOCK_SIZE_K": 64, "BLOCK_SIZE_N": 32, "GROUP_SIZE": 1}
    constants |= {"GRID_DIM": programs, "USE_BIAS": True, "WORK_STEALING": stealing}
    out = launch(run, "gmm:gmm_kernel", (programs, 1, 1), *args, num_warps=4, num_stages=2, **constants)
    if stealing:
        run.equal("counter", out["counter"], [programs + sum(cdiv(m, 32) * cdiv(n, 32) for m in rows)])
    want = np.concatenate([f64(a[first[g] : first[g + 1]]) @ f64(b[g]).T + f64(bias[g]) for g in range(len(rows))])
    run.compare("c", out["c"], want, HALF_ULP[bf16] + 1e-5, 1e-5 * k**0.5)


def run_batched_gemm(run):
    batch, m, n, k = 3, 37, 70, 136
    run.result.size = f"{batch} x {m} x {n} x {k}"
    a, b, bias = run.normal(batch, m, k, dtype=bf16), run.normal(batch, n, k, dtype=bf16), run.normal(batch, 1, n, dtype=bf16)
    c = Out("c", (batch, m, n))
    args = [a, b, c, bias, m, n, k, *strides(a), n * k, 1, k, *strides(c), 0, n]
    constants = {name: TILES[name] for name in TILES if name != "matrix_instr_nonkdim"}
    constants |= {"HAS_BIAS": True, "BLOCK_SIZE_K": 64, "NUM_KSPLIT": 1, "SPLITK_BLOCK_SIZE": k}
    grid = (batch, tiles(m, n)[0], 1)
    got = launch(run, "gemm.batched.batched_gemm_bf16:_batched_gemm_bf16_kernel", grid, *args, **constants)["c"]
    run.compare("c", got, f64(a) @ f64(b).swapaxes(1, 2) + f64(bias), HALF_ULP[bf16] + 1e-5, 1e-5 * k**0.5)


CASES = [
    ("softmax, f16", lambda run: run_softmax(run, np.float16)),
    ("softmax, bf16", lambda run: run_softmax(run, bf16)),
    ("silu and multiply, bf16", run_silu_mul),
    ("top-k, bf16", run_topk),
    ("top-k in two stages, f32", run_topk_stages),
    ("layer norm, f16", run_layer_norm),
    ("add, layer norm, smooth i8", run_quant_add_layer_norm),
    ("RMS norm, f16", lambda run: run_rms_norm(run, False)),
    ("RMS norm by blocks, f16", lambda run: run_rms_norm(run, True)),
    ("add, RMS norm, fp8", run_quant_add_rms_norm),
    ("quantization per tensor, i8", lambda run: run_tensor_quant(run, True)),
    ("quantization per tensor, fp8", lambda run: run_tensor_quant(run, False)),
    ("quantization per token, i8", lambda run: run_token_quant(run, True)),
    ("quantization per token, fp8", lambda run: run_token_quant(run, False)),
    ("MX fp4 quantization", run_mxfp4_quant),
    ("GEMM a16w16, bias, gelu", lambda run: run_gemm_a16w16(run, 1)),
    ("GEMM a16w16, split K, bias, gelu", lambda run: run_gemm_a16w16(run, 3)),
    ("GEMM a8w8, i8, bias", lambda run: run_gemm_a8w8(run, True)),
    ("GEMM a8w8, fp8, bias", lambda run: run_gemm_a8w8(run, False)),
    ("GEMM a8w8, block scales", run_gemm_blockscale),
    ("GEMM MX fp4", run_gemm_fp4),
    ("rope with sin and cos, bf16", run_rope),
    ("rope by positions, halves", lambda run: run_rope_cached(run, True)),
    ("rope by positions, neighbours", lambda run: run_rope_cached(run, False)),
    ("MLA cache update, fp8", run_cache_mla),
    ("paged attention decode, GQA", lambda run: run_paged_decode(run, 8, 2)),
    ("paged attention decode, GQA, fp8 cache", lambda run: run_paged_decode(run, 8, 2, fp8=True)),
    ("paged attention decode, split, reduced", lambda run: run_paged_decode(run, 8, 2, splits=True)),
    ("prefill attention, causal", run_prefill),
    ("unified attention, window, soft cap, sinks", lambda run: run_unified_attention(run, 0)),
    ("unified attention by segments, sinks", lambda run: run_unified_attention(run, 4)),
    ("flash attention, causal", run_flash_attention),
    ("MLA decode with rope, split, reduced", run_mla_decode),
    ("MQA logits, fp8", run_mqa_logits),
    ("causal convolution with states, f16", run_causal_conv),
    ("gated delta rule, recurrent", run_gated_delta_rule),
    ("convolution, 2D, relu", run_conv2d),
    ("clamp, silu, multiply, fp8 by groups", run_clamp_silu_mul),
    ("MX fp8 quantization", run_mxfp8_quant),
    ("GEMM by batches", run_batched_gemm),
    ("GEMM by groups of rows", lambda run: run_grouped_gemm(run, False)),
    ("GEMM by groups of rows, work stealing", lambda run: run_grouped_gemm(run, True)),
    ("MoE gate, sigmoid and top-1", run_sigmoid_top1),
    ("MoE GEMM, int4 weights with zero points", run_moe_int4),
    ("MoE alignment in four stages", run_moe_align),
    ("MoE GEMM, bf16", lambda run: run_moe_gemm(run, False)),
    ("MoE GEMM, fp8, block scales", lambda run: run_moe_gemm(run, True)),
]
for target in ("gfx942", "gfx950"):
    for name, function in CASES:
        case(f"AITER Triton: {name}", target)(function)
