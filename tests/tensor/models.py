"""Models the tests cut: name -> (how to build it, how to run its step). Small, ordinary user code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[Any], Tensor]
VOCABULARY = 101  # odd: not divisible by 2 or 4


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def tokens(vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(2))


def like(model: nn.Module, x: Tensor) -> Tensor:
    return x.to(next(model.parameters()).dtype)


class MLP(nn.Module):
    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.c, self.d = nn.Linear(d, 2 * d), nn.Linear(2 * d, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(F.relu(self.c(self.b(F.gelu(self.a(x))))))


class Gated(nn.Module):
    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(d), nn.Dropout(0.0)
        self.gate, self.up = nn.Linear(d, 4 * d, bias=False), nn.Linear(d, 4 * d, bias=False)
        self.down = nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.dropout(self.down(F.silu(self.gate(y)) * self.up(y)))


class GatedFused(nn.Module):
    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(d, 8 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Attention(nn.Module):
    """nanoGPT: fused q, k, v from one linear, split in the forward."""

    def __init__(self, d: int, heads: int, kv_heads: int | None, flash: bool, p: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.flash, self.p = heads, kv_heads or heads, flash, p
        self.size = d // heads
        self.c_attn = nn.Linear(d, d + 2 * self.kv_heads * self.size)
        self.c_proj = nn.Linear(d, d)
        self.attn_dropout, self.resid_dropout = nn.Dropout(p), nn.Dropout(p)
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        kv = self.kv_heads * self.size
        q, k, v = self.c_attn(x).split([c, kv, kv], dim=2)
        q = q.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        k, v = (z.view(b, t, self.kv_heads, self.size).transpose(1, 2) for z in (k, v))
        if self.kv_heads != self.heads and not self.flash:
            k, v = (z.repeat_interleave(self.heads // self.kv_heads, dim=1) for z in (k, v))
        if self.flash:
            p = self.p if self.training else 0
            gqa = self.kv_heads != self.heads
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=gqa)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(scores, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(b, t, c)
        return self.resid_dropout(self.c_proj(y))


class Block(nn.Module):
    def __init__(self, d: int, heads: int, kv_heads: int | None, flash: bool, p: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = Attention(d, heads, kv_heads, flash, p)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(d, 4 * d), "gelu": nn.GELU(), "c_proj": nn.Linear(4 * d, d), "dropout": nn.Dropout(p)}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        m = self.mlp
        return x + m.dropout(m.c_proj(m.gelu(m.c_fc(self.ln_2(x)))))


class NanoGPT(nn.Module):
    def __init__(
        self,
        vocabulary: int = VOCABULARY,
        d: int = 32,
        heads: int = 4,
        kv_heads: int | None = None,
        layers: int = 2,
        flash: bool = True,
        tie: bool = True,
        p: float = 0.0,
    ) -> None:
        super().__init__()
        blocks = nn.ModuleList([Block(d, heads, kv_heads, flash, p) for _ in range(layers)])
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, d),
                "wpe": nn.Embedding(64, d),
                "drop": nn.Dropout(p),
                "h": blocks,
                "ln_f": nn.LayerNorm(d),
            }
        )
        self.lm_head = nn.Linear(d, vocabulary, bias=False)
        if tie:
            self.transformer.wte.weight = self.lm_head.weight

    def forward(self, index: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        position = torch.arange(0, index.size(1), dtype=torch.long, device=index.device)
        t = self.transformer
        x = t.drop(t.wte(index) + t.wpe(position))
        for block in t.h:
            x = block(x)
        logits = self.lm_head(t.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class TimmAttention(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, d // heads
        self.scale = self.head_dim**-0.5
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        attention = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attention @ v).transpose(1, 2).reshape(b, n, c))


class LayerScale(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(0.1 * torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class TimmBlock(nn.Module):
    def __init__(self, d: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = TimmAttention(d, heads)
        self.ls1, self.ls2 = LayerScale(d), LayerScale(d)
        self.fc1, self.fc2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.fc2(F.gelu(self.fc1(self.norm2(x)))))


class Odd(nn.Module):
    """LayerNorm, a scan and a flip between linears (not cuttable), and one legal pair at the end."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.a, self.ln, self.b = nn.Linear(d, 4 * d), nn.LayerNorm(4 * d), nn.Linear(4 * d, d)
        self.c, self.d = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.e, self.f = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.g, self.h = nn.Linear(d, d), nn.Linear(d, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.ln(self.a(x)))
        y = y + self.d(torch.cumsum(self.c(y), -1))
        y = y + self.f(torch.flip(self.e(y), [-1]))
        y = self.g(y) * x
        return self.h(y / y.norm(dim=-1, keepdim=True))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


class CustomFunction(nn.Module):
    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Square.apply(self.a(x)))


class Adapted(nn.Module):
    """A frozen linear with a trained low-rank adapter (LoRA)."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x)) * 2.0


class LoRA(nn.Module):
    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.up, self.down = Adapted(d, 4 * d), Adapted(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class AdaptedByHand(nn.Module):
    """The same with matrices of its own, used by `x @ a.T @ b.T`."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Parameter(values(rank, inputs)), nn.Parameter(0.1 * values(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.lora_a.T @ self.lora_b.T) * 2.0


class LoRAByHand(LoRA):
    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.up, self.down = AdaptedByHand(d, 4 * d), AdaptedByHand(4 * d, d)


class Conv1DNet(nn.Module):
    """Weights stored (in, out), as in the first GPT-2: cut without any special class."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(0.1 * values(d, 4 * d)), nn.Parameter(values(4 * d))
        self.w2, self.b2 = nn.Parameter(0.1 * values(4 * d, d)), nn.Parameter(values(d))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.addmm(self.b1, x.flatten(0, -2), self.w1)
        return torch.addmm(self.b2, F.gelu(h), self.w2).view(x.shape)


class Einsum(nn.Module):
    """Attention written with einsum and weights kept per head, in a ParameterList."""

    def __init__(self, d: int = 32, heads: int = 4) -> None:
        super().__init__()
        size = d // heads
        self.qkv = nn.ParameterList([nn.Parameter(0.3 * torch.randn(d, heads, size)) for _ in range(3)])
        self.out = nn.Parameter(0.3 * torch.randn(heads, size, d))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,dhk->bhtk", x, w) for w in self.qkv)
        weights = torch.einsum("bhqk,bhsk->bhqs", q, k).softmax(-1)
        y = torch.einsum("bhqs,bhsk->bqhk", weights, v)
        return x + torch.einsum("bqhk,hkd->bqd", y, self.out)


class CrossAttention(nn.Module):
    """nn.TransformerDecoder: packed in-projection, self- and cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x, x[:, :5] * 2)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def mean_square(model: Any) -> Tensor:
    return model(like(model, values(2, 6, 32))).pow(2).mean()


def next_token(model: Any) -> Tensor:
    index = tokens(VOCABULARY, 2, 9)
    return model(index[:, :-1], index[:, 1:].contiguous())[1]


PLAIN: dict[str, tuple[Callable[[], nn.Module], Step, float]] = {
    # name: (build, step, least fraction that must be cut at tp=2)
    "mlp": (MLP, mean_square, 0.99),
    "gated": (Gated, mean_square, 0.99),
    "gated_fused": (GatedFused, mean_square, 0.99),
    "nanogpt": (NanoGPT, next_token, 0.91),
    "nanogpt_manual": (lambda: NanoGPT(flash=False, tie=False), next_token, 0.92),
    "nanogpt_gqa": (lambda: NanoGPT(kv_heads=2), next_token, 0.90),
    "timm": (lambda: nn.Sequential(TimmBlock(), TimmBlock()), mean_square, 0.97),
    "encoder": (encoder, mean_square, 0.97),
    "decoder": (CrossAttention, mean_square, 0.97),
    "odd": (Odd, mean_square, 0.65),
    "custom_function": (CustomFunction, mean_square, 0.98),
    "lora": (LoRA, mean_square, 0.95),
    "lora_by_hand": (LoRAByHand, mean_square, 0.95),
    "conv1d": (Conv1DNet, mean_square, 0.99),
    "einsum": (lambda: nn.Sequential(nn.LayerNorm(32), Einsum()), mean_square, 0.98),
}
