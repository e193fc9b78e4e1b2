"""The shortest way: import `lightning_3d`, and the Trainer knows the strategy by the name "3d".

The name stands for the defaults: no tensor or pipeline parallelism, data parallelism over all devices, ZeRO-1 (the
optimizer's state is shared by the replicas). For other sizes use a strategy object (train_gpt.py) or YAML (cli.yaml).

    python examples/by_name.py
"""

from __future__ import annotations

import argparse

import lightning.pytorch as L
from train_gpt import GPTModule, StandardLibraryText

import lightning_3d  # noqa: F401  (registers "3d")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="auto", help="auto, cpu or gpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--fast", action="store_true", help="a tiny model and 4 steps: does it run?")
    args = parser.parse_args()

    L.seed_everything(1234)
    size = {"width": 32, "layers": 2, "sequence": 32} if args.fast else {"width": 128, "layers": 4, "sequence": 128}
    trainer = L.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy="3d",
        max_steps=4 if args.fast else 100,
        limit_val_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(GPTModule(**size), StandardLibraryText(batch_size=8, sequence=size["sequence"], max_bytes=200_000))
    if trainer.is_global_zero:
        print(f"after {trainer.global_step} steps: train_loss {float(trainer.callback_metrics['train_loss']):.3f}")


if __name__ == "__main__":
    main()
