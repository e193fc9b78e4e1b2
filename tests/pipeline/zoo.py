"""Modules a pipeline must take as they are. Each entry makes a float64 module and a batch of n samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

VOCAB = 101


class Lift(TorchFunctionMode):
    """Float32 requests inside Hugging Face code become float64, so that their rounding does not hide errors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def up(x: Any) -> Any:
            return torch.float64 if isinstance(x, torch.dtype) and x in (torch.float32, torch.bfloat16) else x

        if getattr(func, "__name__", "") in ("float", "bfloat16"):
            return args[0].double()
        return func(*map(up, args), **{k: up(v) for k, v in (kwargs or {}).items()})


class Module(pl.LightningModule):
    """Supervised classification of `self(x)`, the way most user modules look."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        out = self(x)
        self.log("val_loss", F.cross_entropy(out, y), batch_size=len(y))
        self.log_dict({"accuracy": (out.argmax(-1) == y).double().mean()}, on_epoch=True)

    def predict_step(self, batch: Any) -> Any:
        out = self(batch[0])
        return {"classes": out.argmax(-1), "mean": out.mean(), "name": "net"}


class MLP(Module):
    def __init__(self, depth: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Dropout(dropout)) for _ in range(depth)]
        self.net = nn.Sequential(nn.Linear(16, 32), *blocks, nn.LayerNorm(32), nn.Linear(32, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(dim), nn.LayerNorm(dim), heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(pl.LightningModule):
    """Tied embedding, odd vocabulary, positions and loss in glue code."""

    def __init__(self, depth: int = 6, dim: int = 16, checkpoint: bool = False, functional_head: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, dim), nn.Embedding(32, dim)
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        self.head.weight = self.wte.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.checkpoint, self.functional_head = checkpoint, functional_head

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.shape[1] <= 32
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.checkpoint else block(x)
            x = x * self.scale
        x = self.norm(x)
        return F.linear(x, self.wte.weight) if self.functional_head else self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        tokens = batch["tokens"]
        self.log("early", tokens.double().mean())
        logits = self(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return {"loss": loss, "accuracy": (logits.argmax(-1) == tokens[:, 1:]).double().mean(), "logits": logits}

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)["loss"]


class HuggingFace(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.model(**batch)
        self.log("loss", out.loss)
        return out.loss

    validation_step = training_step


def _transformers() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def llama() -> nn.Module:
    t = _transformers()
    config = t.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return HuggingFace(t.LlamaForCausalLM(config))


def gpt2() -> nn.Module:
    t = _transformers()
    config = t.GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=6, n_head=4, n_positions=64, resid_pdrop=0.0, attn_pdrop=0.0,
        embd_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return HuggingFace(t.GPT2LMHeadModel(config))


def t5() -> nn.Module:
    t = _transformers()
    config = t.T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=32, num_layers=4, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return HuggingFace(t.T5ForConditionalGeneration(config))


class Encoder(Module):
    """nn.TransformerEncoder with a class token and a mask made in glue code."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.token = nn.Linear(16, 16), nn.Parameter(torch.randn(1, 1, 16))
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.unflatten(-1, (1, 16)).expand(-1, 4, -1))
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=torch.float64)
        return self.head(self.encoder(x, mask=mask)[:, -1])


class UNet(pl.LightningModule):
    """Skips over several stages, batch norm, in-place activations."""

    def __init__(self) -> None:
        super().__init__()

        def conv(i: int, o: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True))

        self.down1, self.down2, self.middle = conv(3, 6), conv(6, 8), conv(8, 12)
        self.up2, self.up1, self.out = conv(20, 8), conv(14, 6), nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        m = self.middle(F.max_pool2d(b, 2))
        u = self.up2(torch.cat([F.interpolate(m, scale_factor=2), b], 1))
        return self.out(self.up1(torch.cat([F.interpolate(u, scale_factor=2), a], 1)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch), batch)

    validation_step = training_step


class HiddenStates(Module):
    """A list of all hidden states, aux losses in attributes, a residual in glue code."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.f(x))
            self.aux = y.pow(2).mean()
            return y

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(self.Block() for _ in range(7)), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = []
        for block in self.blocks:
            x = x + block(x)
            self.hidden.append(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        loss = loss + 0.01 * torch.stack(self.hidden).norm(dim=-1).mean()
        return loss + 0.1 * sum(block.aux for block in self.blocks)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.3 * gradient


class VAE(pl.LightningModule):
    """Reparametrisation, reads of values, and a custom autograd Function in glue code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.mean, self.log_variance = nn.Linear(16, 8), nn.Linear(16, 8)
        self.decoder = nn.ModuleList([nn.Linear(8, 16), *(nn.Linear(16, 16) for _ in range(3))])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        h = x
        for layer in self.encoder:
            h = torch.tanh(layer(h))
        assert not torch.isnan(h).any(), "nan"
        mean, log_variance = self.mean(Reverse.apply(h)), self.log_variance(h)
        z = mean + 0.1 * (0.5 * log_variance).exp()
        for layer in self.decoder:
            z = torch.tanh(layer(z))
        self.log("spread", log_variance.exp().mean().item())
        return F.mse_loss(z, x) + 0.1 * (mean.pow(2) + log_variance.exp() - log_variance).mean()


class BatchNormNet(Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(6)]
        self.net = nn.Sequential(*layers, nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Masks(Module):
    """Blocks that take and hand on (hidden, bool mask, int positions, None); every second block ignores its input."""

    class Block(nn.Module):
        def __init__(self, ignore: bool) -> None:
            super().__init__()
            self.f, self.ignore = nn.Linear(16, 16), ignore

        def forward(self, h: Tensor, mask: Tensor, positions: Tensor, nothing: None) -> tuple[Any, ...]:
            y = torch.tanh(self.f(h.detach() if self.ignore else h)).masked_fill(mask, 0.0)
            return y, h > 0.5, positions + (y > 0).long(), nothing

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(i == 3) for i in range(6))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = (x, x > 1e9, torch.zeros_like(x).long(), None)
        for block in self.blocks:
            state = block(*state)
        return self.head(state[0]) + state[2].double().mean()


class FrozenStart(MLP):
    """A frozen first half: stage outputs that need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.net[:5]:
            layer.requires_grad_(False)


class Siamese(pl.LightningModule):
    """Both views through one network and its projection head: every module is called twice in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = MLP(6).net, nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 4))
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        one, two = (F.normalize(self.head(self.net(x)), dim=-1) for x in (batch[0], batch[0].flip(-1)))
        logits = one @ two.T / self.temperature
        loss = F.cross_entropy(logits, torch.arange(len(logits)))
        self.log("contrast", loss)
        return loss


class Tower(nn.Module):
    """A model that computes its own loss, in a method that is not `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MLP(5)

    def loss(self, x: Tensor, y: Tensor, smoothing: float) -> Tensor:
        return F.cross_entropy(self.model(x), y, label_smoothing=smoothing)


class SeveralForwards(pl.LightningModule):
    """Three forwards in one step, the second with gradients cut off, through a method of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        clean = self.tower.loss(x, y, 0.0)
        with torch.no_grad():
            target = self.tower.model(x * 0.9).softmax(-1)
        noisy = self.tower.model(x + 0.1)
        consistency = F.kl_div(noisy.log_softmax(-1), target, reduction="batchmean")
        self.log_dict({"clean": clean, "consistency": consistency})
        return {"loss": clean + 0.3 * consistency, "entropy": target.log().mean()}


def vectors(n: int) -> Any:
    return torch.randn(n, 16).double(), torch.randint(0, 5, (n,))


def tokens(n: int) -> Any:
    return {"tokens": torch.randint(1, VOCAB, (n, 9))}


def images(n: int) -> Any:
    return torch.randn(n, 3, 8, 8).double()


def labelled(n: int) -> Any:
    ids, mask = torch.randint(1, VOCAB, (n, 9)), torch.ones(n, 9, dtype=torch.long)
    mask[:, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def sequence_pairs(n: int) -> Any:
    return {"input_ids": torch.randint(1, VOCAB, (n, 8)), "labels": torch.randint(1, VOCAB, (n, 6))}


ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "mlp": (MLP, vectors),
    "gpt": (GPT, tokens),
    "gpt_functional_head": (lambda: GPT(functional_head=True), tokens),
    "gpt_checkpoint": (lambda: GPT(checkpoint=True), tokens),
    "llama": (llama, labelled),
    "gpt2": (gpt2, labelled),
    "t5": (t5, sequence_pairs),
    "encoder": (Encoder, vectors),
    "unet": (UNet, images),
    "hidden_states": (HiddenStates, vectors),
    "vae": (VAE, vectors),
    "batch_norm": (BatchNormNet, vectors),
    "masks": (Masks, vectors),
    "frozen_start": (FrozenStart, vectors),
    "siamese": (Siamese, vectors),
    "several_forwards": (SeveralForwards, vectors),
}


EXTRA: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "gpt5": (lambda: GPT(depth=5), tokens),
    "gpt7": (lambda: GPT(depth=7), tokens),
}


def build(make: str | Callable[[], nn.Module], seed: int = 0) -> Any:
    """The module in float64, the same every time, with biases and norms that are not trivial."""
    torch.manual_seed(seed)
    module = ({**ZOO, **EXTRA}[make][0] if isinstance(make, str) else make)().double().train()
    for parameter in module.parameters():
        if parameter.ndim < 2:
            parameter.data += 0.2 * torch.randn_like(parameter)
    for m in module.modules():  # buffers that are no float64 by .double() alone
        for key, buffer in list(m._buffers.items()):
            if buffer is not None and buffer.is_floating_point():
                m._buffers[key] = buffer.double()
    return module


def batch_of(name: str, n: int, seed: int = 5) -> Any:
    torch.manual_seed(seed)
    return {**ZOO, **EXTRA}[name][1](n)
