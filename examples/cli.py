"""LightningCLI: the layout is part of the configuration file, the code knows nothing of it.

python examples/cli.py fit --config examples/cli.yaml
python examples/cli.py fit --config examples/cli.yaml --trainer.strategy.init_args.pipeline_parallel_size=1
"""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI
from train_gpt import GPTModule, StandardLibraryText


def main() -> None:
    LightningCLI(GPTModule, StandardLibraryText, save_config_callback=None)


if __name__ == "__main__":
    main()
