"""Ordinary LightningModules for parity tests: biases and norms not trivial, losses over unequal numbers of targets."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB = 101


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout, self.heads = nn.Dropout(dropout), heads

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            z.view(b, t, self.heads, d // self.heads).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.dropout(self.out(a))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


def parts_of(batch: dict[str, Tensor], replicas: int, microbatches: int) -> list[tuple[float, dict[str, Tensor]]]:
    """(share, microbatch): how a global batch is dealt to replicas (in turn) and cut (in order) by the default rule."""
    size = len(next(iter(batch.values())))
    out = []
    for replica in range(replicas):
        mine = {k: v[replica::replicas] for k, v in batch.items()}
        count = size // replicas
        cuts = [count * i // min(microbatches, count) for i in range(min(microbatches, count) + 1)]
        for begin, end in itertools.pairwise(cuts):
            out.append(((end - begin) / size, {k: v[begin:end] for k, v in mine.items()}))
    return out


class Lit(pl.LightningModule):
    optimizer = "sgd"
    lr = 0.1
    parts: tuple[int, int] = (1, 1)
    """The reference of a parallel run: (replicas, microbatches) whose losses are averaged by their samples."""

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        if self.optimizer == "adafactor":
            return torch.optim.Adafactor(self.parameters(), lr=self.lr)
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        rest = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.mean_loss(batch, self.parts[0], 1)
        self.log("val_loss", loss, sync_dist=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.mean_loss(batch, *self.parts)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        return loss

    def mean_loss(self, batch: Any, replicas: int, microbatches: int) -> Tensor:
        if replicas == microbatches == 1:
            return self.loss(batch)
        return torch.stack([w * self.loss(part) for w, part in parts_of(batch, replicas, microbatches)]).sum()

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError


class LitMLP(Lit):
    def __init__(self, dim: int = 16, depth: int = 4) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(8, dim)]
        for _ in range(depth):
            layers += [nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)]
        self.net = nn.Sequential(*layers, nn.Linear(dim, 5))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["y"])


class LitNarrow(LitMLP):
    """Cut over two ranks, a weight of (2, 8) is as large as a moment over its columns."""

    def __init__(self) -> None:
        super().__init__(depth=0)
        self.net = nn.Sequential(nn.Linear(8, 2), nn.GELU(), nn.Linear(2, 5))


class LitGPT(Lit):
    def __init__(self, tied: bool = True, depth: int = 4, dim: int = 16, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, dim), nn.Embedding(32, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: Any) -> Tensor:
        tokens = batch["tokens"]
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class LiftToDouble(TorchFunctionMode):
    """Code that asks for float32 inside gets float64, so that its rounding does not hide errors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def up(value: Any) -> Any:
            single = isinstance(value, torch.dtype) and value in (torch.float32, torch.bfloat16)
            return torch.float64 if single else value

        if getattr(func, "__name__", "") in ("float", "bfloat16"):
            return args[0].double()
        return func(*[up(a) for a in args], **{k: up(v) for k, v in (kwargs or {}).items()})


class LitHF(Lit):
    """The usual wrapper around a Hugging Face model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, batch: Any) -> Tensor:
        with LiftToDouble():
            return self.model(**batch).loss


def llama(heads: int = 4, depth: int = 4) -> LitHF:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=depth, num_attention_heads=heads,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return LitHF(LlamaForCausalLM(config))


def gpt2(heads: int = 4, depth: int = 4) -> LitHF:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=depth, n_head=heads, n_positions=64, resid_pdrop=0.0, attn_pdrop=0.0,
        embd_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LitHF(GPT2LMHeadModel(config))


def phi3() -> LitHF:
    """Fused q, k, v with two key/value heads."""
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False, pad_token_id=0, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return LitHF(Phi3ForCausalLM(config))


class Samples(Dataset):
    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {k: v[i] for k, v in self.columns.items()}


def vectors(n: int) -> Samples:
    g = torch.Generator().manual_seed(7)
    return Samples({"x": torch.randn(n, 8, generator=g).double(), "y": torch.randint(0, 5, (n,), generator=g)})


def tokens(n: int) -> Samples:
    g = torch.Generator().manual_seed(7)
    return Samples({"tokens": torch.randint(1, VOCAB, (n, 9), generator=g)})


def labelled(n: int) -> Samples:
    """Right-padded sequences: every sample has another number of targets."""
    g = torch.Generator().manual_seed(7)
    ids = torch.randint(1, VOCAB, (n, 9), generator=g)
    lengths = torch.randint(3, 10, (n,), generator=g)
    mask = (torch.arange(9) < lengths[:, None]).long()
    return Samples({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})


def full(n: int) -> Samples:
    """Sequences of one length: the mean over parts of a batch is the mean over the batch."""
    ids = tokens(n).columns["tokens"]
    return Samples({"input_ids": ids, "labels": ids})


MODELS: dict[str, tuple[Callable[[], Lit], Callable[[int], Samples]]] = {
    "mlp": (LitMLP, vectors),
    "narrow": (LitNarrow, vectors),
    "gpt": (lambda: LitGPT(tied=False), tokens),
    "gpt_tied": (LitGPT, tokens),
    "llama": (llama, labelled),
    "llama_full": (llama, full),
    "gpt2": (gpt2, labelled),
    "phi3": (phi3, labelled),
    "phi3_full": (phi3, full),
}
# enough heads and blocks for eight ranks along one axis
MODELS |= {
    "mlp_8": (lambda: LitMLP(depth=8), vectors),
    "gpt_8": (lambda: LitGPT(tied=False, depth=8, heads=8), tokens),
    "gpt_tied_8": (lambda: LitGPT(depth=8, heads=8), tokens),
    "llama_8": (lambda: llama(8, 8), labelled),
    "gpt2_8": (lambda: gpt2(8, 8), labelled),
}


def build(name: str) -> Lit:
    """The model in float64 with non-trivial biases and norms, the same every time."""
    torch.manual_seed(11)
    model = MODELS[name][0]().double()
    generator = torch.Generator().manual_seed(12)
    for parameter in model.parameters():
        spread = 0.3 if parameter.ndim < 2 else 0.15
        offset = 1.0 if parameter.ndim < 2 and float(parameter.detach().mean()) > 0.5 else 0.0
        parameter.data = offset + spread * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.double()
    return model


def loader(name: str, samples: int, batch: int, replica: int = 0, replicas: int = 1) -> DataLoader:
    """Batches in order; replica r of n reads samples r, r + n, ... of every global batch."""
    data = MODELS[name][1](samples)
    sampler = DistributedSampler(data, replicas, replica, shuffle=False) if replicas > 1 else None
    return DataLoader(data, batch_size=batch // replicas, sampler=sampler, shuffle=False)
