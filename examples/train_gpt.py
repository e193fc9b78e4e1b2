"""Train a small GPT, byte by byte, on the source files of Python's standard library (nothing is downloaded).

The module and the datamodule are ordinary Lightning: not one line of them knows about parallelism. What runs where is
chosen below, in `main`:

    python examples/train_gpt.py                                            # one process
    python examples/train_gpt.py --devices 8 --strategy 3d --tp 2 --pp 2    # 8 processes: TP 2 x PP 2 x DP 2, ZeRO-1
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 256  # bytes


class Attention(nn.Module):
    """Causal self-attention with one packed projection for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, sequence, width)
        batch, sequence, width = x.shape
        q, k, v = self.qkv(x).view(batch, sequence, 3, self.heads, width // self.heads).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (batch, head, sequence, width of a head)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, sequence, width))


class Block(nn.Module):
    """Attention and MLP, each with a norm before and a residual around."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Token and position embeddings, blocks, norm, head. `tied`: the head uses the token embedding's weight."""

    def __init__(self, width: int, layers: int, heads: int, sequence: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._initialize)
        if tied:
            self.head.weight = self.tokens.weight

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:  # (batch, sequence) -> (batch, sequence, vocabulary)
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GPTModule(L.LightningModule):
    """Next-byte prediction with AdamW (decay on matrices only), linear warm-up and cosine decay per step."""

    def __init__(
        self,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        sequence: int = 128,
        dropout: float = 0.0,
        tied: bool = False,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 10,
        decay_steps: int = 200,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT(width, layers, heads, sequence, dropout, tied)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, targets = batch
        logits = self.model(ids)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> dict[str, Any]:
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.hparams["weight_decay"]},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["learning_rate"], betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._learning_rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _learning_rate_factor(self, step: int) -> float:
        warmup, decay = self.hparams["warmup_steps"], self.hparams["decay_steps"]
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, decay - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


class Bytes(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive pieces of a text, with the same piece one byte later as the target."""

    def __init__(self, data: bytes, sequence: int) -> None:
        self.data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.sequence = sequence

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.sequence

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.sequence
        piece = self.data[start : start + self.sequence + 1].long()
        return piece[:-1], piece[1:]


class StandardLibraryText(L.LightningDataModule):
    """The running Python's own standard library as text: files in order of name, cut to `max_bytes`."""

    def __init__(self, batch_size: int = 16, sequence: int = 128, max_bytes: int = 1_000_000) -> None:
        super().__init__()
        self.batch_size, self.sequence, self.max_bytes = batch_size, sequence, max_bytes

    def setup(self, stage: str) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = bytearray()
        for file in sorted(folder.glob("*.py")):
            text += file.read_bytes()
            if len(text) >= self.max_bytes:
                break
        if len(text) < 100 * self.sequence:
            raise RuntimeError(f"only {len(text)} bytes of Python source in {folder}: is the standard library zipped?")
        text = text[: self.max_bytes]
        border = len(text) * 9 // 10
        self.train = Bytes(bytes(text[:border]), self.sequence)
        self.validation = Bytes(bytes(text[border:]), self.sequence)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.validation, batch_size=self.batch_size, drop_last=True)


def sample() -> tuple[GPTModule, tuple[Tensor, Tensor]]:
    """A module and a batch, for `lightning-3d verify|explain --module examples/train_gpt.py:sample`."""
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (8, 33))
    return GPTModule(width=64, layers=2, sequence=32), (ids[:, :-1], ids[:, 1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="auto", help="auto, cpu or gpu")
    parser.add_argument("--devices", type=int, default=1, help="processes on this machine")
    parser.add_argument("--strategy", default="auto", help="'3d', or any of Lightning's own strategies")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size (strategy 3d)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline-parallel size (strategy 3d)")
    parser.add_argument("--zero", type=int, default=1, help="ZeRO stage (strategy 3d)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per step and replica")
    parser.add_argument("--tied", action="store_true", help="the head shares the token embedding's weight")
    parser.add_argument("--fast", action="store_true", help="a tiny model and 4 steps: does it run?")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers.*")

    L.seed_everything(1234)
    if args.fast:
        args.steps = 4
        module = GPTModule(width=32, layers=2, sequence=32, tied=args.tied)
        data = StandardLibraryText(batch_size=8, sequence=32, max_bytes=100_000)
    else:
        module = GPTModule(decay_steps=args.steps, tied=args.tied)
        data = StandardLibraryText(batch_size=args.batch_size)

    strategy = args.strategy
    if strategy == "3d":
        from lightning_3d import ThreeDStrategy

        strategy = ThreeDStrategy(tensor_parallel_size=args.tp, pipeline_parallel_size=args.pp, zero_stage=args.zero)

    trainer = L.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=strategy,
        max_steps=args.steps,
        val_check_interval=max(1, args.steps // 4),
        check_val_every_n_epoch=None,
        limit_val_batches=4,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, data)
    if trainer.is_global_zero:
        metrics = {name: round(float(value), 3) for name, value in trainer.callback_metrics.items()}
        print(f"after {trainer.global_step} steps: {metrics}")


if __name__ == "__main__":
    main()
