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
from harness import InOut, Out, bf16, case, e4m3, e4m3fnuz, f32, i32

import triton
import triton.language as tl

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


class Stub(types.ModuleType):
    """A module without contents: any attribute, call or base class of it will do."""

    __version__ = "0"
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, Stub(f"{self.__name__}.{name}"))
        return getattr(self, name)

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


def kernel(run, name):
    """The kernel `module:function` as a JIT function, and its heuristics."""
    if "aiter" not in sys.modules:
        for stub in ("torch", "packaging", "packaging.version"):
            sys.modules.setdefault(stub, Stub(stub))
        # Packages as bare folders, so that their __init__.py do not load all of the library.
        for package in ("aiter", "aiter.ops", "aiter.ops.triton", KERNELS, f"{KERNELS}.gated_delta_rule"):
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = [str(run.folder.parent.joinpath(*package.split(".")))]
        sys.modules["aiter.ops.triton.utils._triton.arch_info"] = Stub("arch_info")
        triton.autotune = lambda **_: lambda function: function  # asks for a GPU
    module, name = name.split(":")
    function = getattr(importlib.import_module(f"{KERNELS}.{module}"), name)
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
        if key not in values:
            constants.setdefault(key, parameter.default)
        elif value is None or (isinstance(value, (int, np.integer)) and value == 1 and not parameter.do_not_specialize):
            constants[key] = value
        elif isinstance(value, float):
            kinds[key] = "fp32"
            passed.append(f32(value))
        elif isinstance(value, (int, np.integer)):
            kinds[key] = "i32"
            passed.append(i32(value))
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


def mxfp4(x):
    """Packed fp4 values and e8m0 scales of blocks of 32; all steps are exact for bf16."""
    blocks = f64(x).reshape(len(x), -1, 32)
    fraction, exponent = np.frexp(np.abs(blocks).max(-1))
    exponent += (fraction >= 1.75 / 2) - 3  # a fraction of 1.75 or more rounds up; fp4 ends at 1.5 * 2^2
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
]
for target in ("gfx942", "gfx950"):
    for name, function in CASES:
        case(f"AITER Triton: {name}", target)(function)
