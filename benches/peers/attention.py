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
