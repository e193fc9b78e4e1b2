"""More kinds of modules a pipeline must take as they are: what `zoo.py` does not have.

Entries of `BREADTH` say how they may be cut: the most stages, and whether tensor parallelism applies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.pipeline.zoo import (
    VOCAB,
    Block,
    HuggingFace,
    Module,
    Reverse,
    _transformers,
    images,
    labelled,
    tokens,
    vectors,
)


# -- transformers
class NanoGPT(pl.LightningModule):
    """Loose position parameters and scales, a functional head on the tied embedding, everything in one ModuleDict."""

    def __init__(self, depth: int = 6, dim: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        parts: dict[str, nn.Module] = {
            "wte": nn.Embedding(VOCAB, dim),
            "drop": nn.Dropout(dropout),
            "h": nn.ModuleList(Block(dim, 4) for _ in range(depth)),
            "norm": nn.LayerNorm(dim),
        }
        self.transformer = nn.ModuleDict(parts)
        self.positions = nn.Parameter(torch.randn(1, 32, dim) * 0.1)
        self.scales = nn.ParameterList(torch.ones(dim) for _ in range(depth))
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.transformer["wte"](tokens) + self.positions[:, : tokens.shape[1]]
        x = self.transformer["drop"](x)
        for block, scale in zip(self.transformer["h"], self.scales, strict=True):
            x = x + F.dropout(block(x) * scale, self.dropout, self.training)
        return F.linear(self.transformer["norm"](x), self.transformer["wte"].weight)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        loss = F.cross_entropy(self(x).flatten(0, 1), y.flatten())
        self.log("loss", loss)
        return loss

    validation_step = training_step


class CompiledGPT(NanoGPT):
    """Blocks behind `torch.compile`, as a wrapper or in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__(depth=4)
        blocks = self.transformer["h"]
        assert isinstance(blocks, nn.ModuleList)
        for i, block in enumerate(blocks):
            if in_place:
                block.compile(backend="eager")
            else:
                blocks[i] = torch.compile(block, backend="eager")


class Autocast(NanoGPT):
    """Glue and blocks in bfloat16 where autocast says so; the parameters stay in float32."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().training_step(batch, batch_idx)


def bert(dropout: float = 0.0) -> nn.Module:
    t = _transformers()
    config = t.BertConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=6, num_attention_heads=4,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, max_position_embeddings=64,
    )  # fmt: skip
    return HuggingFace(t.BertForMaskedLM(config))


def vit() -> nn.Module:
    t = _transformers()
    config = t.ViTConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=6, num_attention_heads=4, image_size=8, patch_size=4,
        num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return HuggingFace(t.ViTForImageClassification(config))


def mixture(name: str, experts: str, **more: Any) -> nn.Module:
    """A mixture of experts whose router losses, collected from all layers, are part of the loss.

    "eager" experts find their tokens with `nonzero`; the default "grouped_mm" takes no float64.
    """
    t = _transformers()
    config = getattr(t, name + "Config")(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, output_router_logits=True, router_aux_loss_coef=0.5, max_position_embeddings=64, **more,
    )  # fmt: skip
    config._experts_implementation = experts
    return HuggingFace(getattr(t, name + "ForCausalLM")(config))


def albert() -> nn.Module:
    """One layer, called six times: cut between the calls, held by all stages."""
    t = _transformers()
    config = t.AlbertConfig(
        vocab_size=VOCAB, embedding_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=6,
        num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=64,
    )  # fmt: skip
    return HuggingFace(t.AlbertForMaskedLM(config))


def _llama() -> Any:
    t = _transformers()
    config = t.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return t.LlamaForCausalLM(config)


class AllHiddenStates(HuggingFace):
    """The list of all layers' states that the library collects, in the loss."""

    def __init__(self) -> None:
        super().__init__(_llama())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.model(**batch, output_hidden_states=True)
        assert len(out.hidden_states) == 7
        return out.loss + 0.01 * torch.stack(out.hidden_states).pow(2).mean()


def bert_checkpointed() -> nn.Module:
    """With the library's own activation checkpointing. (Llama would round in its recomputation, outside of `Lift`.)"""
    module = bert()
    model: Any = module.model
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    return module


class Seq2Seq(pl.LightningModule):
    """nn.TransformerEncoder and nn.TransformerDecoder over one embedding, masks and positions in glue code."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        options: dict[str, Any] = {"dropout": dropout, "batch_first": True, "norm_first": True}
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, 32, **options), 3, nn.LayerNorm(16), enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, **options), 3, nn.LayerNorm(16))

    def place(self, ids: Tensor) -> Tensor:
        angles = torch.arange(ids.shape[1], device=ids.device).double()[:, None] / torch.logspace(0, 2, 8).double()
        return self.embed(ids) * math.sqrt(16) + torch.cat([angles.sin(), angles.cos()], -1)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        padding = source == 0
        memory = self.encoder(self.place(source), src_key_padding_mask=padding)
        causal = torch.triu(torch.ones(target.shape[1], target.shape[1], dtype=torch.bool), 1)
        out = self.decoder(self.place(target), memory, tgt_mask=causal, memory_key_padding_mask=padding)
        return self.head(out)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        source, target = batch["input_ids"], batch["labels"]
        source = torch.cat([source, torch.zeros_like(source[:, :1])], 1)
        logits = self(source, target[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())

    validation_step = training_step


# -- others
class BasicBlock(nn.Module):
    def __init__(self, inp: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inp, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(inp, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        same = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += same
        return self.relu(out)


class ResNet(Module):
    """Shaped as torchvision's; its forward also reads what a feature extractor left on it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(4, 4, 1), BasicBlock(4, 4, 1))
        self.layer2 = nn.Sequential(BasicBlock(4, 6, 2), BasicBlock(6, 6, 1))
        self.layer3 = nn.Sequential(BasicBlock(6, 8, 2), BasicBlock(8, 8, 1))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class LSTM(pl.LightningModule):
    """Embedding, several recurrent layers that hand on (output, state), decoder; the state begins in the step."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 12)
        self.rnns = nn.ModuleList(nn.LSTM(12, 12, batch_first=True) for _ in range(4))
        self.drop, self.decode = nn.Dropout(dropout), nn.Linear(12, VOCAB)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        h = self.embed(x)
        state = (torch.zeros(1, len(x), 12).double(), torch.zeros(1, len(x), 12).double())
        for rnn in self.rnns:
            out, state = rnn(self.drop(h), state)
            h = h + out
        return F.nll_loss(self.decode(h).log_softmax(-1).flatten(0, 1), y.flatten()) + 0.1 * state[1].pow(2).mean()

    validation_step = training_step


class Auxiliary(Module):
    """Every block leaves a loss in a dict on itself, and a penalty in a list on the root."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.losses = nn.Linear(16, 16), {}

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.f(x))
            self.losses["spread"] = y.pow(2).mean()
            self.losses["rate"] = torch.sigmoid(y).mean((0, 1))
            return x + y

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(16, 16), nn.Linear(16, 5)
        self.blocks = nn.ModuleList(self.Block() for _ in range(6))
        self.penalties: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.penalties = []
        x = self.enter(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i % 2:
                self.penalties.append(x.abs().mean())
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for block in self.blocks:
            loss = loss + 0.1 * block.losses["spread"] + 0.05 * block.losses["rate"]
        self.log("penalty", sum(self.penalties) / len(self.penalties))
        return loss + 0.01 * torch.stack(self.penalties).sum()


class Checks(Module):
    """Asserts on values in blocks and between them, residuals and in-place writes in glue code, a kept number."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.g = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.g(F.gelu(self.f(x)))
            assert not torch.isnan(y).any(), "nan"
            if not torch.isfinite(y).all():
                raise ValueError("not finite")
            return y

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head, self.bias = nn.Linear(16, 16), nn.Linear(16, 5), nn.Parameter(torch.randn(16) * 0.1)
        self.blocks = nn.ModuleList(self.Block() for _ in range(5))
        self.last_norm = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x += self.bias
        gates = torch.zeros(x.shape[0], len(self.blocks), dtype=x.dtype, device=x.device)
        for j, block in enumerate(self.blocks):
            x = block(x) + x
            gates[:, j] = x.mean(-1)
            assert not torch.isnan(x).any(), "nan"
        self.last_norm = x.detach().norm().item()
        return self.head(x) + gates

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("norm", self.last_norm)
        return loss


class Adversarial(pl.LightningModule):
    """Domain-adversarial: a second head behind a reversed gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.classes = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))
        self.domains = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for layer in self.features:
            x = torch.tanh(layer(x))
        first, second = self.classes(x), self.domains(Reverse.apply(x))
        self.log("domain", F.cross_entropy(second, y % 2))
        return F.cross_entropy(first, y) + F.cross_entropy(second, y % 2)


class SimCLR(pl.LightningModule):
    """Two noisy views, one after the other, then a loss over all pairs of the microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)))
        self.projector = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        views = [batch[0] * 1.1, batch[0].roll(1, -1)]
        z = torch.cat([F.normalize(self.projector(self.encoder(view)), dim=-1) for view in views])
        similar = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        return F.cross_entropy(similar, torch.arange(len(z)).roll(len(z) // 2))


class Generative(pl.LightningModule):
    """A generator and two discriminators in one automatic loss; the fakes are seen once with and once without graph."""

    def __init__(self) -> None:
        super().__init__()

        def net(out: int) -> nn.Module:
            layers = [nn.Sequential(nn.Linear(16, 16), nn.LeakyReLU(0.2)) for _ in range(3)]
            return nn.Sequential(*layers, nn.Linear(16, out))

        self.generator, self.critics = net(16), nn.ModuleList([net(1), net(1)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        real = batch[0]
        fake = self.generator(real.flip(-1))
        loss = 0.1 * F.l1_loss(fake, real)
        for critic in self.critics:
            judged, honest = critic(fake.detach()), critic(real)
            loss = loss + F.softplus(judged).mean() + F.softplus(-honest).mean()
            loss = loss + 0.2 * F.softplus(-critic(fake)).mean()
        self.log("loss", loss)
        return loss


class OwnLoss(pl.LightningModule):
    """The model is no `forward`: the step calls `self.model.loss(...)`, which calls other methods."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.head = nn.Linear(16, 16), nn.Linear(16, 5)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6))

        def encode(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for block in self.blocks:
                x = x + block(x)
            return x

        def loss(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            h = self.encode(x)
            logits = self.head(h)
            parts = {"entropy": F.cross_entropy(logits, y), "size": h.pow(2).mean()}
            return parts["entropy"] + 0.01 * parts["size"], parts

    def __init__(self) -> None:
        super().__init__()
        self.model = self.Model()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, parts = self.model.loss(*batch)
        for name, value in parts.items():
            self.log(name, value)
        return loss


class UShape(Module):
    """Dicts go in and out of every block; the first half's results are used, in reverse, by the second half."""

    class Block(nn.Module):
        def __init__(self, joins: bool) -> None:
            super().__init__()
            self.f, self.joins = nn.Linear(32 if joins else 16, 16), joins

        def forward(self, state: dict[str, Any], skip: Tensor | None = None) -> dict[str, Any]:
            h = state["hidden"] if skip is None else torch.cat([state["hidden"], skip], -1)
            h = torch.tanh(self.f(h)).masked_fill(state["mask"], 0.0)
            return {**state, "hidden": h, "depth": state["depth"] + 1, "positions": state["positions"] + (h > 0).long()}

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(self.Block(False) for _ in range(4))
        self.up, self.head = nn.ModuleList(self.Block(True) for _ in range(4)), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        state = {"hidden": x, "mask": x > 1.5, "positions": torch.zeros_like(x).long(), "depth": 0, "note": None}
        skips = []
        for block in self.down:
            state = block(state)
            skips.append(state["hidden"])
        for block in self.up:
            state = block(state, skips.pop())
        assert state["depth"] == 8
        assert state["note"] is None
        return self.head(state["hidden"]) + state["positions"].double().mean()


# -- forms of batches
@dataclass
class Labelled:
    x: Tensor
    y: Tensor
    name: str = "all"
    nothing: None = None


class Graphs:
    """A batch class as users write them: tensors as attributes, and what Lightning asks for."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.size = x, y, "small"

    def to(self, device: Any) -> Graphs:
        return Graphs(self.x.to(device), self.y.to(device))

    def pin_memory(self) -> Graphs:
        return self

    @property
    def doubled(self) -> Tensor:
        return 2 * self.x


class AnyBatch(Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
        self.net = nn.Sequential(nn.Linear(16, 16), *blocks, nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, Labelled):
            assert batch.name == "all"
            assert batch.nothing is None
            batch = (batch.x, batch.y)
        elif isinstance(batch, Graphs):
            assert batch.size == "small"
            batch = (batch.doubled, batch.y)
        elif isinstance(batch, dict) and "samples" in batch:  # one tensor per sample, of different lengths
            batch = (torch.stack([s.mean(0) for s in batch["samples"]]), torch.stack(batch["labels"]))
        elif isinstance(batch, dict):
            assert batch["nothing"] is None
            assert batch["split"] == "train"
            assert len(batch["names"]) == len(batch["x"])
            numbers = torch.tensor([int(name) for name in batch["names"]])  # strings stay with their samples
            batch = (batch["x"], numbers)
        elif isinstance(batch, list):  # one (tensor, label) per sample
            batch = (torch.stack([x for x, _ in batch]), torch.tensor([y for _, y in batch]))
        return super().training_step(batch, batch_idx)


def _dict(n: int) -> Any:
    x, y = vectors(n)
    return {"x": x, "nothing": None, "names": [str(int(i)) for i in y], "split": "train", "nested": {"y": y}}


def _samples(n: int) -> Any:
    x, y = vectors(n)
    return {"samples": [row + torch.zeros(i % 3 + 1, 1) for i, row in enumerate(x)], "labels": list(y)}


def _pictures(n: int) -> Any:
    return images(n), torch.randint(0, 5, (n,))


def _pixels(n: int) -> Any:
    return {"pixel_values": images(n), "labels": torch.randint(0, 5, (n,))}


def _pairs(n: int) -> Any:
    return {"input_ids": torch.randint(1, VOCAB, (n, 8)), "labels": torch.randint(1, VOCAB, (n, 7))}


def _text(n: int) -> Any:
    ids = torch.randint(1, VOCAB, (n, 9))
    return {"input_ids": ids, "labels": ids}


# -- with random numbers
class DropoutGPT(NanoGPT):
    """Dropout in glue code, in modules, on attention weights, and noise of the step's own."""

    class Block(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.mlp = nn.Sequential(
                nn.LayerNorm(dim), nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim), nn.Dropout(0.2)
            )

        def forward(self, x: Tensor) -> Tensor:
            b, t, d = x.shape
            q, k, v = (z.view(b, t, 4, -1).transpose(1, 2) for z in self.qkv(self.norm(x)).chunk(3, -1))
            a = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)
            return self.mlp(x + self.out(a.transpose(1, 2).reshape(b, t, d)))

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.transformer["h"] = nn.ModuleList(self.Block(16) for _ in range(6))


@dataclass(frozen=True)
class Kind:
    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    stages: int = 4
    """The most windows it can be cut into, up to 8."""
    tensor: bool = False
    """Whether it is also run with tensor parallelism."""
    single: bool = False
    """In float32, without the lift to float64: what is tested is a lower precision. The order of all sums is kept."""


BREADTH: dict[str, Kind] = {
    "nanogpt": Kind(NanoGPT, tokens, 8, tensor=True),
    "compiled": Kind(lambda: CompiledGPT(False), tokens, tensor=True),
    "compiled_in_place": Kind(lambda: CompiledGPT(True), tokens),
    "autocast": Kind(Autocast, tokens, 8, single=True),
    "bert": Kind(bert, labelled, 8, tensor=True),
    "vit": Kind(vit, _pixels, 8, tensor=True),
    "mixtral": Kind(lambda: mixture("Mixtral", "eager", num_local_experts=4), _text, tensor=True),
    "mixtral_grouped": Kind(lambda: mixture("Mixtral", "grouped_mm", num_local_experts=4), _text, single=True),
    "qwen3_moe": Kind(
        lambda: mixture(
            "Qwen3Moe", "eager", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=4
        ),
        _text,
    ),
    "qwen2_moe": Kind(
        lambda: mixture(
            "Qwen2Moe", "eager", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
        ),
        _text,
    ),
    "albert": Kind(albert, labelled, 8, tensor=True),
    "all_hidden_states": Kind(AllHiddenStates, labelled, 8, tensor=True),
    "bert_checkpointed": Kind(bert_checkpointed, labelled, 8, tensor=True),
    "seq2seq": Kind(Seq2Seq, _pairs, 8, tensor=True),
    "resnet": Kind(ResNet, _pictures, 8),
    "lstm": Kind(LSTM, tokens),
    "auxiliary": Kind(Auxiliary, vectors, 8),
    "checks": Kind(Checks, vectors),
    "adversarial": Kind(Adversarial, vectors, 8),
    "simclr": Kind(SimCLR, vectors),
    "generative": Kind(Generative, vectors),
    "own_loss": Kind(OwnLoss, vectors, 8),
    "u_shape": Kind(UShape, vectors, 8),
    "batch_dict": Kind(AnyBatch, _dict),
    "batch_dataclass": Kind(AnyBatch, lambda n: Labelled(*vectors(n))),
    "batch_class": Kind(AnyBatch, lambda n: Graphs(*vectors(n))),
    "batch_samples": Kind(AnyBatch, _samples),
    "batch_list": Kind(AnyBatch, lambda n: [(x, int(y)) for x, y in zip(*vectors(n), strict=True)]),
}  # fmt: skip

RANDOM: dict[str, Kind] = {
    "gpt": Kind(DropoutGPT, tokens, 8, tensor=True),
    "bert": Kind(lambda: bert(0.2), labelled, 8),
    "seq2seq": Kind(lambda: Seq2Seq(0.2), _pairs, 8),
    "lstm": Kind(lambda: LSTM(0.3), tokens),
}
