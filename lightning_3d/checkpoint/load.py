"""HOW is a run read back?  Only the boxes this rank needs, from a directory; or its part of a plain file."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.optim import Optimizer

from lightning_3d.checkpoint.boxes import GlobalTensor
from lightning_3d.checkpoint.save import FORMAT, FORMAT_KEY
from lightning_3d.checkpoint.state import ParameterRecord, RunState, StatePart, low_of
from lightning_3d.errors import ConfigurationError, near

PATH_KEY = "lightning_3d_path"


def is_directory_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a checkpoint written by `save_directory`."""
    return (Path(path) / "meta.pt").is_file() and (Path(path) / ".metadata").is_file()


def read_rest(path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
    """Everything of a checkpoint directory but the distributed tensors, as Lightning's loops expect it.

    Args:
        path: The directory.
        weights_only: As in `torch.load`, for the part that holds objects of other classes.

    Raises:
        ConfigurationError: It is no such directory, or holds objects that `weights_only` forbids.
    """
    folder = Path(path)
    if not folder.exists():
        raise ConfigurationError(f"there is no checkpoint {folder}: no file or directory of that name.")
    if not is_directory_checkpoint(folder):
        found = sorted(p.name for p in folder.iterdir())[:5] if folder.is_dir() else "nothing"
        raise ConfigurationError(
            f"{folder} is not a complete checkpoint: expected a file, or a directory with meta.pt and .metadata, "
            f"found {found}. A save that was interrupted leaves no directory of that name; look for an older one."
        )
    checkpoint: dict[str, Any] = torch.load(folder / "meta.pt", weights_only=True, map_location="cpu")
    if checkpoint.get(FORMAT_KEY) != FORMAT:
        raise ConfigurationError(
            f"{folder} has checkpoint format {checkpoint.get(FORMAT_KEY)!r}; this version reads format {FORMAT}."
        )
    if (folder / "extra.pt").is_file():
        try:
            checkpoint.update(torch.load(folder / "extra.pt", weights_only=weights_only, map_location="cpu"))
        except Exception as error:
            raise ConfigurationError(
                f"{folder} holds objects of other classes (hyper-parameters, callback state) that are read by "
                "unpickling, which can run code. If you trust the file, pass weights_only=False to trainer.fit / "
                f"validate / test. The loader said: {str(error).splitlines()[0]}"
            ) from error
    checkpoint["state_dict"] = checkpoint.pop("state_dict_rest")
    checkpoint[PATH_KEY] = str(folder)
    return checkpoint


def read_model(path: str) -> dict[str, Tensor]:
    """All parameters and buffers of a checkpoint directory, whole, on the CPU of this rank."""
    stored = _stored(path, "model.")
    whole = {f"model.{k}": torch.empty(m.size, dtype=m.properties.dtype) for k, m in stored.items()}
    _read(whole, path)
    return {key.removeprefix("model."): value for key, value in whole.items()}


def load_model_directory(state: RunState, path: str, strict: bool = True) -> None:
    """Read this rank's part of the parameters and buffers. Collective over all ranks.

    Raises:
        ConfigurationError: With `strict`: keys are missing, unexpected, or of another shape.
    """
    stored = _stored(path, "model.")
    wanted = {k: v for k, v in state.model(whole=True).items() if isinstance(v, GlobalTensor)}
    problems = [f"missing {k!r}{near(k, stored)}" for k in wanted if k not in stored]
    problems += [f"unexpected {k!r}" for k in stored if k not in wanted]
    shapes = [
        f"{k!r} is {tuple(stored[k].size)} in the file, {tuple(v.shape)} in the model"
        for k, v in wanted.items()
        if k in stored and tuple(stored[k].size) != tuple(v.shape)
    ]
    if shapes or (strict and problems):
        listed = "; ".join((shapes + problems)[:8])
        raise ConfigurationError(
            f"the checkpoint {path} does not fit the model: {listed}. Set strict_loading=False on the "
            "LightningModule to load what fits by name; shapes must agree."
        )
    read = {f"model.{k}": v for k, v in wanted.items() if k in stored and v.boxes}
    _read(read, path)


def load_masters(state: RunState, checkpoint: Mapping[str, Any]) -> None:
    """Give float32 masters the precision that their (loaded) parameters have not.

    Where a parameter is not what the checkpoint says any more, its master follows the parameter.

    Args:
        state: The run's.
        checkpoint: What Lightning loaded: it names a directory, or holds a whole `state_dict`.
    """
    rooms = state.masters()
    if not rooms:
        return
    if PATH_KEY in checkpoint:
        stored = _stored(checkpoint[PATH_KEY], "model.")
        rooms = {name: room for name, room in rooms.items() if name in stored}
        _read({f"model.{name}": target for name, (target, _, _) in rooms.items()}, checkpoint[PATH_KEY])
    else:
        full = checkpoint["state_dict"]
        rooms = {name: room for name, room in rooms.items() if name in full}
        for name, (target, _, _) in rooms.items():
            _copy_boxes(full[name], target)
    with torch.no_grad():
        for _, slot, room in rooms.values():
            storage = slot.bucket.storage
            assert storage is not None
            now = slot.part(storage.shard).to(room.device)
            slot.value.copy_(torch.where(room.to(now.dtype) == now, room, now.float()))


def load_optimizer_directory(
    state: RunState, optimizers: Sequence[Optimizer], saved: Sequence[Mapping[str, Any]], path: str
) -> None:
    """Make the optimizers' states from the names in the file and read this rank's part. Collective over all ranks."""
    _check_count(optimizers, saved)
    for index, (optimizer, entry) in enumerate(zip(optimizers, saved, strict=True)):
        _regroup(state, optimizer, [list(group["params"]) for group in entry["param_groups"]])
        prefix = f"optimizer_{index}.state."
        stored = _stored(path, prefix)
        read: dict[str, Tensor] = {}
        optimizer.state.clear()
        for record, held in state._optimized(optimizer):
            which = state.state_of(optimizer, record, held)
            if which == "none":
                continue
            values: dict[str, Any] = dict(entry["plain_state"].get(record.name, {}))
            for name, meta in stored.items():
                parameter, _, key = name.rpartition(".")
                if parameter == record.name:
                    cut = which == "part" and tuple(meta.size) == record.global_shape
                    values[key] = read_into = _empty_state(held, meta, cut)
                    read[prefix + name] = _target(state, record, read_into) if cut else read_into
            if values:
                optimizer.state[held] = values
        _read(read, path)
        _restore_groups(optimizer, entry["param_groups"])


def _regroup(state: RunState, optimizer: Optimizer, saved: list[list[str]]) -> None:
    """Make the groups that a saved run had; it may have added some to those it began with (finetuning callbacks).

    Raises:
        ConfigurationError: The run began with other groups.
    """
    assert state.zero is not None
    names = state.group_names(optimizer)
    if saved[: len(names)] != names:
        sizes, own = [len(group) for group in saved], [len(group) for group in names]
        raise ConfigurationError(
            f"the checkpoint's parameter groups of {type(optimizer).__name__} have {sizes} parameters, those of the "
            f"run have {own}"
            + (", or others" if sizes == own else "")
            + ". Use the configure_optimizers (and finetuning callbacks) it was saved with."
        )
    state.zero.regroup(optimizer, saved)


def _empty_state(held: nn.Parameter, meta: TensorStorageMetadata, cut: bool) -> Tensor:
    shape = held.shape if cut else meta.size
    # a counter stays where torch's optimizers keep it: on the CPU
    device = held.device if len(meta.size) else torch.device("cpu")
    return torch.zeros(shape, dtype=meta.properties.dtype, device=device)


def _target(state: RunState, record: ParameterRecord, value: Tensor) -> Tensor:
    low = low_of(record.slot)
    return GlobalTensor(record.global_shape, state.boxes(record, value.view(-1), low), value.dtype, value.device, None)


def load_model_file(state: RunState, full: Mapping[str, Any], strict: bool = True) -> None:
    """Copy this rank's part out of a plain, whole `state_dict` into the (already cut) module.

    Raises:
        ConfigurationError: As `load_model_directory`.
    """
    wanted = {k: v for k, v in state.model(whole=True).items() if isinstance(v, GlobalTensor)}
    problems = [f"missing {k!r}{near(k, full)}" for k in wanted if k not in full]
    problems += [f"unexpected {k!r}" for k in full if k not in wanted and isinstance(full[k], Tensor)]
    shapes = [
        f"{k!r} is {tuple(full[k].shape)} in the file, {tuple(v.shape)} in the model"
        for k, v in wanted.items()
        if k in full and tuple(full[k].shape) != tuple(v.shape)
    ]
    if shapes or (strict and problems):
        raise ConfigurationError(
            f"the state_dict does not fit the model: {'; '.join((shapes + problems)[:8])}. Set strict_loading=False "
            "on the LightningModule to load what fits by name; shapes must agree."
        )
    with torch.no_grad():
        for key, target in wanted.items():
            if key in full:
                _copy_boxes(full[key], target)


def load_optimizer_file(state: RunState, optimizers: Sequence[Optimizer], saved: Sequence[Mapping[str, Any]]) -> None:
    """Cut plain optimizer states (numbered parameters, whole tensors) to this rank's part."""
    _check_count(optimizers, saved)
    for optimizer, entry in zip(optimizers, saved, strict=True):
        names = state.group_names(optimizer)
        counts = [len(group["params"]) for group in entry["param_groups"]]
        if counts != [len(group) for group in names]:
            raise ConfigurationError(
                f"the checkpoint's parameter groups of {type(optimizer).__name__} have {counts} parameters, those of "
                f"the run have {[len(group) for group in names]}. Use the configure_optimizers (and finetuning "
                "callbacks) it was saved with."
            )
        assert state.zero is not None
        state.zero.regroup(optimizer, names)  # a callback may have put whole parameters into them
        numbers = {
            name: number
            for group, ids in zip(names, (g["params"] for g in entry["param_groups"]), strict=True)
            for name, number in zip(group, ids, strict=True)
        }
        optimizer.state.clear()
        for record, held in state._optimized(optimizer):
            values = entry["state"].get(numbers[record.name], {})
            which = state.state_of(optimizer, record, held)
            if values and which != "none":
                optimizer.state[held] = {k: _cut(state, record, held, value, which) for k, value in values.items()}
        _restore_groups(optimizer, entry["param_groups"])


def _cut(state: RunState, record: ParameterRecord, held: nn.Parameter, value: Any, which: StatePart) -> Any:
    if not isinstance(value, Tensor):
        return value
    if which == "whole" or tuple(value.shape) != record.global_shape or (value.ndim == 0 and held.ndim != 0):
        return value.to(held.device if value.ndim else "cpu", copy=True)  # a counter stays on the CPU
    low = low_of(record.slot)
    out = torch.zeros(held.shape, dtype=value.dtype, device=held.device)
    boxes = state.boxes(record, out.view(-1), low)
    _copy_boxes(value, GlobalTensor(record.global_shape, boxes, value.dtype, held.device, None))
    return out


def _copy_boxes(full: Tensor, target: GlobalTensor) -> None:
    for offset, data in target.boxes:
        window = full
        for dim, (start, length) in enumerate(zip(offset, data.shape, strict=True)):
            window = window.narrow(dim, start, length)
        data.copy_(window)


def _stored(path: str, prefix: str) -> dict[str, TensorStorageMetadata]:
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        key[len(prefix) :]: meta
        for key, meta in metadata.items()
        if key.startswith(prefix) and isinstance(meta, TensorStorageMetadata)
    }


def _read(tensors: dict[str, Any], path: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is (unavailable|disabled).*")
        dcp_load(tensors, storage_reader=FileSystemReader(path), no_dist=True)


def _check_count(optimizers: Sequence[Optimizer], saved: Sequence[Any]) -> None:
    if len(optimizers) != len(saved):
        raise ConfigurationError(
            f"the checkpoint holds the state of {len(saved)} optimizers, configure_optimizers returned "
            f"{len(optimizers)}. Load the weights alone with load_state_dict, or use the module it was saved from."
        )


def _restore_groups(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """The options of every group; which parameters are in them is settled."""
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})
