"""WHAT is in a checkpoint directory, and how does it leave it?  One process, no GPUs, no layout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_3d.checkpoint.load import PATH_KEY, _read, read_rest
from lightning_3d.checkpoint.save import FORMAT_KEY
from lightning_3d.checkpoint.state import numbered_groups
from lightning_3d.errors import ConfigurationError, near


def inspect_checkpoint(path: str | os.PathLike[str]) -> str:
    """A printable description: step, tensors with shapes and types, optimizer state, what else is stored."""
    if Path(path).is_file():
        return _describe_file(Path(path))
    rest = read_rest(path, weights_only=True) if not (Path(path) / "extra.pt").is_file() else _safe_part(path)
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {k: m for k, m in metadata.items() if isinstance(m, TensorStorageMetadata)}
    model = {k[len("model.") :]: m for k, m in tensors.items() if k.startswith("model.")}
    optimizer = {k: m for k, m in tensors.items() if k.startswith("optimizer_")}
    lines = [f"{path}: epoch {rest.get('epoch')}, global step {rest.get('global_step')}"]
    lines.append(f"model: {len(model)} tensors, {_bytes(model.values())}")
    width = max((len(k) for k in model), default=0)
    lines += [f"  {k:<{width}}  {tuple(m.size)!s:<20} {m.properties.dtype}" for k, m in sorted(model.items())]
    lines.append(f"optimizers: {len(optimizer)} tensors, {_bytes(optimizer.values())}")
    others = sorted(set(rest) - {"state_dict", "optimizer_states", PATH_KEY, FORMAT_KEY})
    lines.append(f"also stored: {', '.join(others)}")
    return "\n".join(lines)


def export_checkpoint(path: str | os.PathLike[str], out: str | os.PathLike[str], prefix: str = "") -> Path:
    """Write a checkpoint directory as one plain file.

    Args:
        path: The directory.
        out: A `.ckpt` file (as Lightning writes on one device, with optimizer states) or `.safetensors` (weights).
        prefix: Write only the weights whose names begin with it, without it: with `"model."` those of `self.model`,
            under the names it has by itself. Only for `.safetensors`.

    Returns:
        The file.

    Raises:
        ConfigurationError: The ending is neither of the two, or nothing begins with the prefix.
    """
    target = Path(out)
    if target.suffix not in (".ckpt", ".safetensors"):
        raise ConfigurationError(f"cannot export to {target.name!r}: the name must end in .ckpt or .safetensors.")
    if target.suffix == ".safetensors":
        from safetensors.torch import save_file

        weights = {k: v.contiguous().clone() for k, v in _below(prefix, _model(path)).items()}
        save_file(weights, target, metadata={"format": "pt"})  # Hugging Face reads no file without it
        return target
    if prefix:
        raise ConfigurationError(
            f"prefix {prefix!r} with {target.name!r}: a .ckpt is read by the LightningModule and keeps its names. "
            "Export to .safetensors."
        )
    checkpoint = read_rest(path, weights_only=False)
    checkpoint.pop(PATH_KEY)
    checkpoint.pop(FORMAT_KEY)
    checkpoint["state_dict"] = {**_model(path), **checkpoint["state_dict"]}
    states = checkpoint["optimizer_states"]
    checkpoint["optimizer_states"] = [_optimizer(path, index, entry) for index, entry in enumerate(states)]
    torch.save(checkpoint, target)
    return target


def _describe_file(path: Path) -> str:
    """A plain Lightning file; only what `weights_only` allows is read."""
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise ConfigurationError(
            f"{path} is a plain file that holds objects of other classes, so it can only be read by unpickling, which "
            "can run code. Load it with torch.load(..., weights_only=False) if you trust it."
        ) from error
    model = content.get("state_dict", content)
    tensors = {k: v for k, v in model.items() if isinstance(v, Tensor)}
    width = max((len(k) for k in tensors), default=0)
    lines = [f"{path} (a plain file): epoch {content.get('epoch')}, global step {content.get('global_step')}"]
    lines.append(f"model: {len(tensors)} tensors, {sum(t.nbytes for t in tensors.values()) / 2**20:.2f} MiB")
    lines += [f"  {k:<{width}}  {tuple(t.shape)!s:<20} {t.dtype}" for k, t in sorted(tensors.items())]
    lines.append(f"optimizers: {len(content.get('optimizer_states', []))}")
    return "\n".join(lines)


def _safe_part(path: str | os.PathLike[str]) -> dict[str, Any]:
    rest: dict[str, Any] = torch.load(Path(path) / "meta.pt", weights_only=True, map_location="cpu")
    return rest


def _bytes(metas: Any) -> str:
    total = sum(m.size.numel() * m.properties.dtype.itemsize for m in metas)
    return f"{total / 2**20:.2f} MiB"


def _whole_tensors(path: str | os.PathLike[str], prefix: str) -> dict[str, Tensor]:
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(meta.size, dtype=meta.properties.dtype)
        for key, meta in metadata.items()
        if key.startswith(prefix) and isinstance(meta, TensorStorageMetadata)
    }
    _read(tensors, os.fspath(path))
    return {key[len(prefix) :]: tensor for key, tensor in tensors.items()}


def _model(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    return _whole_tensors(path, "model.")


def _below(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {key[len(prefix) :]: value for key, value in weights.items() if key.startswith(prefix)}
    if not found:
        firsts = sorted({f"{key.split('.')[0]}." for key in weights if "." in key})
        raise ConfigurationError(
            f"no weight of the checkpoint begins with {prefix!r}; they begin with {', '.join(firsts)}."
            + near(prefix, firsts)
        )
    return found


def _optimizer(path: str | os.PathLike[str], index: int, entry: dict[str, Any]) -> dict[str, Any]:
    groups, numbers = numbered_groups(entry["param_groups"])
    state: dict[int, dict[str, Any]] = {numbers[n]: dict(v) for n, v in entry["plain_state"].items()}
    for name, tensor in _whole_tensors(path, f"optimizer_{index}.state.").items():
        parameter, _, key = name.rpartition(".")
        state.setdefault(numbers[parameter], {})[key] = tensor
    return {"state": dict(sorted(state.items())), "param_groups": groups}
