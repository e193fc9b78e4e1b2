"""HOW is a choice written down?  A YAML file for LightningCLI with the arguments of the strategy (no torch here)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_3d.errors import ConfigurationError


def check_writable(path: Path) -> None:
    """Refuse a name that cannot be written, before anything is computed for it.

    Raises:
        ConfigurationError: It is no .yaml file in a folder that exists.
    """
    if path.suffix not in (".yaml", ".yml") or not path.resolve().parent.is_dir():
        raise ConfigurationError(f"a layout is written into a .yaml file in a folder that exists, not {str(path)!r}.")


def write_strategy(path: Path, arguments: Mapping[str, Any], class_path: str, **trainer: Any) -> None:
    """A file that LightningCLI takes beside another one: `fit --config mine.yaml --config this.yaml`.

    Args:
        path: A .yaml file.
        arguments: Of the strategy.
        class_path: Of the strategy.
        **trainer: More arguments of the Trainer.

    Raises:
        ConfigurationError: It cannot be written there.
    """
    import yaml

    check_writable(path)
    plain = {name: _plain(value) for name, value in arguments.items()}
    strategy = {"class_path": class_path, "init_args": {"layout": None, **plain}}
    path.write_text(yaml.safe_dump({"trainer": {**trainer, "strategy": strategy}}, sort_keys=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
