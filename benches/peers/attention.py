"""The peers of attention, by name: the backends of PyTorch's scaled_dot_product_attention (`flash`, `cudnn`, `efficient`,
`math`), FlexAttention under torch.compile (`flex`), and FlashInfer where it is installed (`flashinfer`)."""

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

try:
    import flashinfer
except ImportError:
    flashinfer = None


class Unserved(Exception):
    """No peer for these options."""


def mha(operands, scalars):
    """The f64 reference and the peers of a case, each of the tensors by name."""
    if set(operands) - {"q", "k", "v", "sink"} or scalars["softcap"] or scalars["dropout_p"]:
        raise Unserved("bias, alibi, descales, softcap, dropout")
    if operands["q"].dtype not in (torch.bfloat16, torch.float16):
        raise Unserved("dtype")
    case = Case(operands, scalars)
    return case.reference, case.functions()


def mha_bwd(operands, scalars):
    """The same of gradients: those of `dout` by autograd, of a forward pass that is not timed. Neither `out` nor `lse` are taken."""
    if set(operands) != {"q", "k", "v", "out", "lse", "dout"} or scalars["softcap"] or scalars["dropout_p"]:
        raise Unserved("packed sequences, alibi, sink, softcap, dropout")
    if operands["q"].dtype not in (torch.bfloat16, torch.float16):
        raise Unserved("dtype")
    case = Case(operands, scalars)
    functions = {name: case.gradients(of) for name, of in case.functions().items() if name not in ("flex", "flashinfer")}
    return case.reference_gradients, functions


def pa_decode(operands, scalars):
    """The same of a token of each sequence over pages that are rows of columns. The peers have the keys as dense tensors, gathered before
    they are timed; FlashInfer has the pages."""
    if set(operands) != {"q", "k_cache", "v_cache", "block_table", "seq_lens"} or scalars["layout"] != "nhd":
        raise Unserved("layouts, alibi, sink, scales")
    if scalars["softcap"] or scalars["window"] >= 0 or operands["k_cache"].dtype != operands["q"].dtype:
        raise Unserved("softcap, window, fp8 pages")
    case = Decode(operands, scalars)
    return case.reference, case.functions()


class Decode:
    """Sequences that have all tokens of their pages."""

    def __init__(self, operands, scalars):
        q, table = operands["q"], operands["block_table"]
        self.n, self.heads, columns = q.shape
        self.page, self.kv_heads = operands["k_cache"].shape[1:3]
        self.table, self.keys, self.scale = table, table.shape[1] * self.page, scalars["scale"] or columns**-0.5
        # [N, Hkv, S, D]
        self.k, self.v = (operands[name][table.long()].flatten(1, 2).transpose(1, 2) for name in ("k_cache", "v_cache"))
        self.operands = operands

    def reference(self, q, k_cache, v_cache, block_table, seq_lens):
        out = torch.empty_like(q)
        group = self.heads // self.kv_heads
        for n in range(self.n):
            for of in range(self.kv_heads):
                rows = slice(of * group, (of + 1) * group)
                scores = q[n, rows] @ self.k[n, of].double().t() * self.scale
                out[n, rows] = scores.softmax(-1) @ self.v[n, of].double()
        return (out,)

    def functions(self):
        flex = torch.compile(flex_attention, dynamic=False)
        functions = {"flex": lambda q, k, v: flex(q, k, v, scale=self.scale, enable_gqa=True)}
        for name, backend in {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}.items():
            functions[name] = self.sdpa(backend)
        functions = {name: self.dense(function) for name, function in functions.items()}
        if flashinfer:
            functions["flashinfer"] = self.flashinfer()
        return functions

    def dense(self, attend):
        def run(q, **_):
            return (attend(q[:, :, None], self.k, self.v).squeeze(2),)

        return run

    def sdpa(self, backend):
        def run(q, k, v):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=True)

        return run

    def flashinfer(self):
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=self.table.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        pages = self.table.shape[1]
        starts = torch.arange(self.n + 1, dtype=torch.int32, device=self.table.device) * pages
        last = torch.full((self.n,), self.page, dtype=torch.int32, device=self.table.device)
        q = self.operands["q"]
        wrapper.plan(
            starts, self.table.flatten(), last, self.heads, self.kv_heads, q.shape[2], self.page,
            sm_scale=self.scale, q_data_type=q.dtype,
        )

        def run(q, k_cache, v_cache, **_):
            return (wrapper.run(q, (k_cache, v_cache)),)

        return run


def mla_decode_rope(operands, scalars):
    """Latent attention of a token of each of as many sequences of one length. FlashInfer has latent and rotated columns in tensors of their
    own, taken apart before they are timed."""
    if set(operands) != {"q", "kv_pool", "kv_indptr", "kv_indices"} or scalars["softcap"] or not flashinfer:
        raise Unserved("blocks of keys, softcap, rotation, or FlashInfer is not installed")
    q, indices = operands["q"], operands["kv_indices"]
    (n, heads, columns), latent = q.shape, scalars["columns"]
    keys, scale = indices.shape[0] // n, scalars["scale"] or columns**-0.5
    starts = torch.arange(n + 1, dtype=torch.int32, device=q.device)
    rows = operands["kv_pool"].view(-1, 1, columns)
    parts = [part.contiguous() for of in (q, rows) for part in of.split((latent, columns - latent), -1)]

    def reference(q, **_):
        out = torch.empty(n, heads, latent, dtype=q.dtype, device=q.device)
        for i, of in enumerate(indices.view(n, keys).long()):
            k = rows[of, 0].double()
            out[i] = (q[i] @ k.t() * scale).softmax(-1) @ k[:, :latent]
        return (out,)

    @functools.cache  # planned in the first call, which is not timed
    def by(backend):
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend=backend)
        lengths = torch.full((n,), keys, dtype=torch.int32, device=q.device)
        wrapper.plan(
            starts, starts * keys, indices, lengths, heads, latent, columns - latent, 1, False, scale, q.dtype, rows.dtype
        )
        return wrapper

    backends = {f"flashinfer_{b}": lambda b=b, **_: (by(b).run(*parts),) for b in ("fa2", "fa3")}
    return reference, backends


class Case:
    """What the implementations share: sizes, scale, mask."""

    def __init__(self, operands, scalars):
        q, k, v = (operands[name] for name in "qkv")
        self.batch, self.sq, self.heads, self.dqk = q.shape
        self.sk, self.kv_heads, self.dv = k.shape[1], k.shape[2], v.shape[3]
        self.dtype, self.device = q.dtype, q.device
        self.scale = scalars["scale"] or self.dqk**-0.5
        self.causal, self.left = scalars["causal"], scalars["window_left"]
        self.right = 0 if self.causal else scalars["window_right"]
        self.sink = "sink" in operands

    def sees(self, i, j):
        """Whether query i sees key j, both tensors: the last query stands at the last key."""
        ahead = j - (i + self.sk - self.sq)
        visible = ahead <= (self.sk if self.right < 0 else self.right)
        return visible & (-ahead <= (self.sk if self.left < 0 else self.left))

    def reference(self, q, k, v, sink=None):
        """Head by head, some queries at a time: all scores in f64 would not fit."""
        out = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
        j = torch.arange(self.sk, device=q.device)
        for b in range(self.batch):
            for h in range(self.heads):
                of = h * self.kv_heads // self.heads
                for i in torch.arange(self.sq, device=q.device).split(2048):
                    scores = q[b, i, h] @ k[b, :, of].t() * self.scale
                    scores.masked_fill_(~self.sees(i[:, None], j), float("-inf"))
                    if sink is not None:
                        scores = torch.cat((scores, sink[h].expand(len(i), 1)), 1)
                    out[b, i, h] = scores.softmax(-1).nan_to_num_(0.0)[:, : self.sk] @ v[b, :, of]
        return (out,)

    def reference_gradients(self, q, k, v, dout, **_):
        """Head by head, some queries at a time."""
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        j = torch.arange(self.sk, device=q.device)
        for b in range(self.batch):
            for h in range(self.heads):
                of = h * self.kv_heads // self.heads
                for i in torch.arange(self.sq, device=q.device).split(2048):
                    scores = q[b, i, h] @ k[b, :, of].t() * self.scale
                    scores.masked_fill_(~self.sees(i[:, None], j), float("-inf"))
                    p = scores.softmax(-1).nan_to_num_(0.0)
                    dp = dout[b, i, h] @ v[b, :, of].t()
                    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * self.scale
                    dq[b, i, h] = ds @ k[b, :, of]
                    dk[b, :, of] += ds.t() @ q[b, i, h]
                    dv[b, :, of] += p.t() @ dout[b, i, h]
        return dq, dk, dv

    def gradients(self, forward):
        """The backward pass of `forward`, whose graph is made once for the same operands."""
        graphs = {}

        def run(q, k, v, dout, **_):
            key = tuple(x.data_ptr() for x in (q, k, v))
            if key not in graphs:
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                graphs[key] = leaves, forward(*leaves)[0]
            leaves, out = graphs[key]
            return torch.autograd.grad(out, leaves, dout, retain_graph=True)

        return run

    def functions(self):
        """The implementations that serve the case."""
        functions = {"flex": self.flex()}
        windowed = self.left >= 0 or (self.right >= 0 and not self.causal)
        # The mask of is_causal ends at the first key.
        if not (windowed or self.sink or (self.causal and self.sq != self.sk)):
            if self.dqk == self.dv:
                functions["flash"] = self.sdpa(SDPBackend.FLASH_ATTENTION)
            functions["cudnn"] = self.sdpa(SDPBackend.CUDNN_ATTENTION)
            if self.heads == self.kv_heads:
                functions["efficient"] = self.sdpa(SDPBackend.EFFICIENT_ATTENTION)
            functions["math"] = self.sdpa(SDPBackend.MATH)
        if flashinfer and not self.sink and (self.causal or self.right < 0):
            functions["flashinfer"] = self.flashinfer()
        return functions

    def sdpa(self, backend):
        def run(q, k, v):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(
                    q, k, v, is_causal=self.causal, scale=self.scale, enable_gqa=self.heads != self.kv_heads
                )
            return (out.transpose(1, 2),)

        return run

    @functools.cached_property
    def block_mask(self):
        if not self.causal and self.left < 0 and self.right < 0:
            return None
        return create_block_mask(lambda b, h, i, j: self.sees(i, j), None, None, self.sq, self.sk, device=self.device)

    def flex(self):
        attend = torch.compile(flex_attention, dynamic=False)

        def run(q, k, v, sink=None):
            out, lse = attend(
                *(x.transpose(1, 2) for x in (q, k, v)),
                block_mask=self.block_mask,
                scale=self.scale,
                enable_gqa=self.heads != self.kv_heads,
                return_lse=True,
            )
            if sink is not None:
                # A sink adds to the sum of exponentials.
                out = out * torch.sigmoid(lse - sink[:, None]).to(out.dtype)[..., None]
            return (out.transpose(1, 2),)

        return run

    def flashinfer(self):
        def starts(n):
            return torch.arange(self.batch + 1, dtype=torch.int32, device=self.device) * n

        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=self.device)
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(
            starts(self.sq),
            starts(self.sk),
            self.heads,
            self.kv_heads,
            self.dqk,
            head_dim_vo=self.dv,
            causal=self.causal,
            window_left=self.left,
            sm_scale=self.scale,
            q_data_type=self.dtype,
        )

        def run(q, k, v):
            out = wrapper.run(*(x.flatten(0, 1) for x in (q, k, v)))
            return (out.view(self.batch, self.sq, self.heads, self.dv),)

        return run
