"""A Hugging Face Llama in the usual LightningModule wrapper, trained with TP 2 x PP 2: nothing in the wrapper changes.

The model has random weights and a tiny configuration (grouped-query attention: 4 heads, 2 key-value heads).

    python examples/convert_existing.py
"""

from __future__ import annotations

import argparse

import lightning.pytorch as L
import torch
from torch import Tensor
from train_gpt import VOCABULARY, StandardLibraryText
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_3d import ThreeDStrategy


class LlamaModule(L.LightningModule):
    def __init__(self, config: LlamaConfig, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(config)
        self.learning_rate = learning_rate

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=batch[0], labels=batch[0]).loss, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="auto", help="auto, cpu or gpu")
    parser.add_argument("--fast", action="store_true", help="a tiny model and 4 steps: does it run?")
    args = parser.parse_args()

    L.seed_everything(1234)
    width, layers, sequence = (32, 2, 32) if args.fast else (128, 4, 128)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=sequence,
        use_cache=False,
    )
    trainer = L.Trainer(
        accelerator=args.accelerator,
        devices=4,
        strategy=ThreeDStrategy(tensor_parallel_size=2, pipeline_parallel_size=2),
        max_steps=4 if args.fast else 100,
        limit_val_batches=2,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(LlamaModule(config), StandardLibraryText(batch_size=8, sequence=sequence, max_bytes=200_000))
    if trainer.is_global_zero:
        print(f"after {trainer.global_step} steps: train_loss {float(trainer.callback_metrics['train_loss']):.3f}")


if __name__ == "__main__":
    main()
