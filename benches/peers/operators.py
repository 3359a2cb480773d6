"""The operators that have peers: for each, the f64 reference and the implementations, for one case of `hk bench --list`.

An implementation takes the operands by name and gives a tuple of tensors. `torch` is eager PyTorch (of matrix products
cuBLAS), `compile` the same function under torch.compile, `triton` a kernel of kernels.py. Those of attention are in
attention.py, layers of experts in moe.py, the gated delta rule in delta.py.
"""

import functools
import math

import torch
import torch.nn.functional as F

import attention
import delta
import moe
from attention import Unserved

try:
    import kernels
except ImportError:
    kernels = None

DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i8": torch.int8,
    "i32": torch.int32,
    "i64": torch.int64,
    "fp8e4m3": torch.float8_e4m3fn,
    "fp4e2m1x2": torch.uint8,
    "e8m0": torch.uint8,
}


class Peer:
    """An operator's case: operands, reference, implementations."""

    def __init__(self, operands, reference, torch_=None, triton=None, check=None, compiled=True, functions=()):
        self.operands = operands
        self.reference = reference
        self.check = check or close
        self.functions = dict(functions)
        if torch_ is None:
            return
        self.functions["torch"] = torch_
        if compiled:
            self.functions["compile"] = torch.compile(torch_, dynamic=False)
        if triton and kernels:
            self.functions["triton"] = triton


def close(peer, got, by_rows=False, chained=False):
    """Every element within a few roundings of bf16 (of the terms, too, as eager PyTorch rounds in between). `by_rows`: where rows
    differ in size, as those of attention by the number of their keys. `chained`: of products of rounded products, one after another."""
    for g, want in zip(got, peer.reference(**{k: wide(v) for k, v in peer.operands.items()}), strict=True):
        if g.shape != want.shape:
            raise AssertionError(f"shape {tuple(g.shape)}, expected {tuple(want.shape)}")
        error = (g.double() - want).abs_()
        rms = want.square().mean().sqrt()
        size = want.square().mean(-1, keepdim=True).sqrt() if by_rows else rms
        bad = int((error > want.abs() / 32 + size / (16 if chained else 64)).sum())
        share = float(error.square().mean().sqrt() / rms) if rms > 0 else float(error.max())
        # NaN is in neither comparison.
        if bad or not share < 1 / 64:
            raise AssertionError(f"{bad} of {g.numel()} elements are wrong, relative error {share:.2e}")


def wide(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def tensor(spec, generator, device):
    """Random elements of a tensor of a case; GEMMs of 8-bit tensors have scales of about 1."""
    shape, dtype = spec["shape"], DTYPES.get(spec["dtype"])
    if dtype is None:
        raise Unserved(spec["dtype"])
    if spec["dtype"] == "fp4e2m1x2":
        return torch.randint(256, shape, generator=generator, device=device, dtype=dtype)
    if spec["dtype"] == "e8m0":
        return torch.randint(118, 126, shape, generator=generator, device=device, dtype=dtype)
    if spec["name"].endswith("_scale"):
        return torch.rand(shape, generator=generator, device=device) / 64 + 1 / 128
    if spec["name"] == "probs":
        return torch.randn(shape, generator=generator, device=device).mul_(2).softmax(-1).to(dtype)
    if spec["name"] == "block_table":
        return torch.randperm(shape[0] * shape[1], generator=generator, device=device, dtype=dtype).view(shape)
    if spec["name"] == "kv_indices":
        return torch.randperm(shape[0], generator=generator, device=device, dtype=dtype)
    if spec["name"] in ("seq_lens", "kv_indptr"):
        return torch.zeros(shape, device=device, dtype=dtype)  # the peers know them
    if spec["name"] == "g":
        return -torch.rand(shape, generator=generator, device=device)
    if spec["name"] == "beta":
        return torch.rand(shape, generator=generator, device=device)
    if not dtype.is_floating_point:
        raise Unserved(spec["name"])
    values = torch.empty(shape, dtype=torch.bfloat16 if dtype.itemsize == 1 else dtype, device=device)
    return values.normal_(generator=generator).to(dtype)


def peer(case, device):
    """The peers of a case.

    Raises Unserved if there is none."""
    make = OPERATORS.get(case["operator"])
    if make is None or not set(case["wanted"]) <= OPTIONAL.get(case["operator"], set()):
        raise Unserved(case["operator"])
    generator = torch.Generator(device).manual_seed(1)
    operands = {spec["name"]: tensor(spec, generator, device) for spec in case["tensors"]}
    return make(operands, case["scalars"])


def rmsnorm(operands, scalars):
    eps = plain_norm(scalars)

    def reference(x, weight):
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight,)

    def eager(x, weight):
        return (F.rms_norm(x, x.shape[-1:], weight, eps),)

    return Peer(operands, reference, eager, lambda x, weight: (kernels.rmsnorm(x, weight, eps),))


def plain_norm(scalars):
    if scalars["weight_offset"] not in (0, "0", 0.0) or scalars["round_mode"] != "f32":
        raise Unserved("weight_offset, round_mode")
    return scalars["eps"]


def fused_add_rmsnorm(operands, scalars):
    eps = plain_norm(scalars)

    def reference(x, residual_in, weight):
        total = (x + residual_in).to(operands["x"].dtype).double()
        return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight, total

    def eager(x, residual_in, weight):
        total = x + residual_in
        return F.rms_norm(total, x.shape[-1:], weight, eps), total

    return Peer(
        operands, reference, eager, lambda x, residual_in, weight: kernels.rmsnorm(x, weight, eps, residual_in)
    )


def layernorm(operands, scalars):
    eps = scalars["eps"]
    if set(operands) != {"x", "weight", "bias"}:
        raise Unserved("weight or bias")

    def eager(x, weight, bias):
        return (F.layer_norm(x, x.shape[-1:], weight, bias, eps),)

    return Peer(operands, eager, eager, lambda x, weight, bias: (kernels.layernorm(x, weight, bias, eps),))


def softmax(operands, scalars):
    dtype = operands["x"].dtype if scalars["y_dtype"] == "as_x" else DTYPES[scalars["y_dtype"]]

    def reference(x):
        return (torch.softmax(x, -1),)

    def eager(x):
        return (torch.softmax(x, -1, dtype=dtype),)

    return Peer(operands, reference, eager, lambda x: (kernels.softmax(x, dtype),))


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def activation(kind, gated):
    function = ACTIVATIONS[kind]

    def make(operands, scalars):
        if scalars["y_dtype"] != "as_x" or scalars.get("limit", 0.0) != 0.0:
            raise Unserved("y_dtype, limit")

        def eager(x):
            if not gated:
                return (function(x),)
            a, b = x.chunk(2, -1)
            return (function(a) * b,)

        return Peer(operands, eager, eager, lambda x: (kernels.activation(x, kind, gated),))

    return make


def rope_cached(operands, scalars):
    x, cos = operands["x"], operands["cos"]
    whole = scalars["rotary"] == x.shape[-1] and scalars["table"] == "half" and scalars["style"] == "neox"
    if not whole or scalars["inverse"] or set(operands) != {"x", "cos", "sin"}:
        raise Unserved("style, table, span, positions")
    layout = scalars["layout"]
    axis = {"thd": 0, "bshd": 1, "sbhd": 0, "bhsd": 2}[layout]
    if cos.shape[0] != x.shape[axis]:
        raise Unserved("positions")
    shape = [1] * x.dim()
    shape[axis], shape[-1] = x.shape[axis], x.shape[-1] // 2
    inner = math.prod(x.shape[axis + 1 : -1])

    def eager(x, cos, sin):
        a, b = x.chunk(2, -1)
        cos, sin = cos.view(shape), sin.view(shape)
        return (torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype),)

    return Peer(operands, eager, eager, lambda x, cos, sin: (kernels.rope(x, cos, sin, inner),))


def per_token_quant(operands, scalars):
    if set(operands) != {"x"} or scalars["output"] not in DTYPES:
        raise Unserved("output, scale_ub")
    dtype = DTYPES[scalars["output"]]
    most = 127.0 if dtype == torch.int8 else 448.0

    def eager(x):
        scale = x.abs().amax(-1, keepdim=True).float() / most
        q = (x.float() / scale).clamp(-most, most)
        return (q.round() if dtype == torch.int8 else q).to(dtype), scale.flatten()

    def check(peer, got):
        x = peer.operands["x"].double().flatten(0, -2)
        q, scale = got[0].double().flatten(0, -2), got[1].double()[:, None]
        want = x.abs().amax(-1, keepdim=True) / most
        # Half a step: of integers everywhere the same, of floats relative, and that of the subnormals near zero.
        bound = scale * 0.502 if dtype == torch.int8 else x.abs() / 15.9 + scale / 1000
        wrong = int(((q * scale - x).abs() > bound).sum()) + int(((scale - want).abs() > want * 1e-2).sum())
        if wrong or not bool(torch.isfinite(q).all()):
            raise AssertionError(f"{wrong} of {q.numel()} elements are wrong")

    return Peer(operands, None, eager, lambda x: kernels.quant(x, dtype, most), check)


def topk(operands, scalars):
    k, largest = scalars["k"], scalars["largest"]

    def eager(x):
        return tuple(torch.topk(x, k, -1, largest=largest, sorted=True))

    def check(peer, got):
        # Which of equal elements comes first is not the same everywhere.
        x, (values, indices) = peer.operands["x"], got
        want = x.double().sort(-1, descending=largest).values[..., :k]
        if not torch.equal(values.double(), want) or not torch.equal(x.gather(-1, indices), values):
            raise AssertionError("other elements than the sorted ones")

    return Peer(operands, None, eager, check=check)


def greedy_sample(operands, scalars):
    if set(operands) != {"x"}:
        raise Unserved("row_index")

    def eager(x):
        return (torch.argmax(x, -1),)

    def check(peer, got):
        x = peer.operands["x"]
        if not torch.equal(x.gather(-1, got[0][:, None]), x.amax(-1, keepdim=True)):
            raise AssertionError("not the largest")

    return Peer(operands, None, eager, check=check)


def sampling(kinds):
    """A token of those that top-k, top-p and min-p keep: by a sort, sums, and a race of exponentials."""

    def make(operands, scalars):
        if set(operands) != {"probs"} or scalars.get("order", "joint") == "top_k_first":
            raise Unserved("order, row_index, bounds by row")
        k = scalars["k"] if "k" in kinds else None
        p = scalars["p"] if "p" in kinds else None
        least = scalars.get("min_p", 0.0) if "min_p" in kinds else 0.0

        def kept(values):
            """Of sorted probabilities, those that are kept."""
            keep = torch.ones_like(values, dtype=torch.bool)
            if p is not None:
                # The first that together have p.
                keep &= values.cumsum(-1) - values < p
            if least:
                keep &= values >= least * values[:, :1]
            if k is not None and k > 0:
                keep &= torch.arange(values.shape[-1], device=values.device) < k
            return keep

        def eager(probs):
            values, tokens = probs.float().sort(-1, descending=True)
            race = (values * kept(values)) / torch.empty_like(values).exponential_()
            return (tokens.gather(-1, race.argmax(-1, keepdim=True))[:, 0],)

        def check(peer, got):
            values = peer.operands["probs"].double().sort(-1, descending=True).values
            least = torch.where(kept(values), values, 2.0).amin(-1)
            chosen = peer.operands["probs"].double().gather(-1, got[0][:, None])[:, 0]
            # In f32 the sums end at another of nearly equal ones.
            if bool((chosen < least * 0.99).any()):
                raise AssertionError("a token that is not kept")

        return Peer(operands, None, eager, check=check)

    return make


def gemm_a16w16(operands, scalars):
    if set(operands) != {"a", "w"} or scalars["y_dtype"] != "bf16" or operands["a"].dtype != torch.bfloat16:
        raise Unserved("bias, y_dtype")
    if scalars["activation"] != "none" or scalars["w_shuffled"]:
        raise Unserved("activation, w_shuffled")

    def eager(a, w):
        return (torch.matmul(a, w.t()),)

    return Peer(operands, eager, eager, compiled=False)


def gemm_a8w8(operands, scalars):
    a, w = operands["a"], operands["w"]
    if set(operands) != {"a", "w", "a_scale", "w_scale"} or a.dtype != torch.float8_e4m3fn:
        raise Unserved("bias, int8")
    if scalars["y_dtype"] != "bf16" or scalars["activation"] != "none" or scalars["w_shuffled"]:
        raise Unserved("y_dtype, activation, w_shuffled")
    if operands["a_scale"].numel() != a.shape[0] or operands["w_scale"].numel() != w.shape[0]:
        raise Unserved("scales")

    def reference(a, w, a_scale, w_scale):
        return ((a @ w.t()) * a_scale.view(-1, 1) * w_scale.view(1, -1),)

    def eager(a, w, a_scale, w_scale):
        y = torch._scaled_mm(
            a, w.t(), scale_a=a_scale.view(-1, 1), scale_b=w_scale.view(1, -1), out_dtype=torch.bfloat16
        )
        return (y,)

    return Peer(operands, reference, eager, compiled=False)


def mha(operands, scalars):
    reference, functions = attention.mha(operands, scalars)
    return Peer(operands, reference, functions=functions, check=functools.partial(close, by_rows=True))


def mha_bwd(operands, scalars):
    reference, functions = attention.mha_bwd(operands, scalars)
    return Peer(operands, reference, functions=functions, check=functools.partial(close, by_rows=True, chained=True))


def pa_decode(operands, scalars):
    reference, functions = attention.pa_decode(operands, scalars)
    return Peer(operands, reference, functions=functions, check=functools.partial(close, by_rows=True))


def mla_decode_rope(operands, scalars):
    reference, functions = attention.mla_decode_rope(operands, scalars)
    return Peer(operands, reference, functions=functions, check=functools.partial(close, by_rows=True))


def chunk_gated_delta_rule(operands, scalars):
    if set(operands) != {"q", "k", "v", "g", "beta"} or operands["q"].dtype != torch.bfloat16 or operands["q"].dim() != 4:
        raise Unserved("gates of rows, states, packed sequences")
    if scalars["chunk_size"] != delta.CHUNK or scalars["scale"] != 0 or not delta.triton:
        raise Unserved("chunk_size, scale")
    norm = scalars["qk_l2norm"] in (True, "true")
    functions = {"triton": functools.partial(delta.chunked, norm=norm)}
    if delta.fla:
        functions["fla"] = functools.partial(delta.fla_chunked, norm=norm)
    check = functools.partial(close, chained=True)
    return Peer(operands, functools.partial(delta.reference, norm=norm), functions=functions, check=check)


def fused_recurrent(operands, scalars):
    if set(operands) != {"q", "k", "v", "g", "beta", "initial_state"} or scalars["layout"] != "kv" or scalars["scale"] != 0:
        raise Unserved("gates of rows, pools of states, layout, scale")
    if not delta.fla:
        raise Unserved("flash-linear-attention is not installed")
    norm = scalars["qk_l2norm"] in (True, "true")
    functions = {"fla": functools.partial(delta.fla_recurrent, norm=norm)}
    return Peer(operands, functools.partial(delta.reference, norm=norm), functions=functions)


def fused_moe(operands, scalars):
    allowed = {"x", "logits"} | {f"w{i}{what}" for i in (1, 2) for what in ("", "_scale", "_bias")}
    allowed |= {f"shared_w{i}{what}" for i in (1, 2) for what in ("", "_scale")}
    scales = operands.get("w1_scale")
    if not set(operands) <= allowed or operands["x"].dtype != torch.bfloat16 or "logits" not in operands:
        raise Unserved("choices, expert_map, residual")
    if operands["w1"].dtype not in (torch.bfloat16, torch.float8_e4m3fn, torch.uint8):
        raise Unserved("type of weights")
    if scales is not None and (scales.dim() != 3 or scales.dtype not in (torch.float32, torch.uint8)):
        raise Unserved("scales of rows")
    if scalars["scores"] != "softmax_chosen" or scalars["scaling"] != 1 or scalars["gate"] not in ("silu", "swiglu_oai"):
        raise Unserved("scores, scaling, gate")
    if operands["w1"].dtype == torch.uint8 and scalars["activations"] != "half" or scalars["y_dtype"] != "auto":
        raise Unserved("activations, y_dtype")
    reference, functions = moe.fused_moe(operands, scalars)
    return Peer(operands, reference, functions=functions)


# Outputs that may be asked for and that the peers give.
OPTIONAL = {"chunk_gated_delta_rule": {"final_state"}, "fused_recurrent": {"final_state"}}

OPERATORS = {
    "rmsnorm": rmsnorm,
    "fused_add_rmsnorm": fused_add_rmsnorm,
    "layernorm": layernorm,
    "softmax": softmax,
    "silu": activation("silu", False),
    "gelu": activation("gelu", False),
    "gelu_tanh": activation("gelu_tanh", False),
    "silu_and_mul": activation("silu", True),
    "gelu_and_mul": activation("gelu", True),
    "gelu_tanh_and_mul": activation("gelu_tanh", True),
    "rope_cached": rope_cached,
    "per_token_quant": per_token_quant,
    "topk": topk,
    "greedy_sample": greedy_sample,
    "top_k_sampling_from_probs": sampling({"k"}),
    "top_p_sampling_from_probs": sampling({"p"}),
    "top_k_top_p_sampling_from_probs": sampling({"k", "p", "min_p"}),
    "gemm_a16w16": gemm_a16w16,
    "gemm_a8w8": gemm_a8w8,
    "mha": mha,
    "mha_onekernel_bwd": mha_bwd,
    "flash_attn_bwd": mha_bwd,
    "mha_fused_bwd": mha_bwd,
    "pa_decode": pa_decode,
    "mla_decode_rope": mla_decode_rope,
    "chunk_gated_delta_rule": chunk_gated_delta_rule,
    "fused_recurrent": fused_recurrent,
    "fused_moe": fused_moe,
}
