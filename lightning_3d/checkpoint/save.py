"""HOW is a run written?  A directory, written beside its name and renamed when it is complete.

epoch=1.ckpt/
  __0_0.distcp ... .metadata     torch.distributed.checkpoint: model.<name>, optimizer_<i>.state.<name>.<key>
  meta.pt                        everything else that plain `torch.load(weights_only=True)` can read
  extra.pt                       what it cannot (objects of the user's classes), only if there is any
"""

from __future__ import annotations

import io
import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_3d.checkpoint.boxes import GlobalTensor
from lightning_3d.checkpoint.state import RunState, numbered_groups, parameter_groups
from lightning_3d.comm import Communicator
from lightning_3d.errors import ConfigurationError

FORMAT_KEY, FORMAT = "lightning_3d_format", 1


def optimizer_entry(state: RunState, optimizer: Optimizer) -> dict[str, Any]:
    """What stands for an optimizer in the checkpoint Lightning collects; `save_directory` takes it apart."""
    return {
        "state": state.optimizer(optimizer),
        "param_groups": parameter_groups(optimizer, state.group_names(optimizer)),
        "named": True,
    }


def save_directory(checkpoint: dict[str, Any], path: str | os.PathLike[str], world: Communicator) -> None:
    """Write a checkpoint directory. Collective over all ranks; every rank writes only what it holds.

    An existing checkpoint of that name stays readable until the new one is complete.

    Args:
        checkpoint: What Lightning collected, with `GlobalTensor`s for what is distributed.
        path: Its name.
        world: All ranks.

    Raises:
        ConfigurationError: The path is no local path.
    """
    path = world.broadcast_object(os.fspath(path), 0)
    if "://" in path:
        raise ConfigurationError(
            f"cannot write a distributed checkpoint to {path!r}: only local (or shared) directories are supported. "
            "Set default_root_dir or ModelCheckpoint(dirpath=...) to one, or save_distributed_checkpoint=False."
        )
    final = Path(path)
    partial = final.with_name(f".{final.name}.partial")
    if world.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    world.barrier()
    tensors, rest = _separate(checkpoint)
    rest = _gathered(rest, world)
    rest["optimizer_states"] = _complete(rest.get("optimizer_states", []), world)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is (unavailable|disabled).*")
        dcp_save(tensors, storage_writer=FileSystemWriter(partial), no_dist=world.size == 1)
    if world.rank == 0:
        _write_rest(rest, partial)
        _replace(partial, final)
    world.barrier()


def _separate(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Distributed tensors by their name in the file, and the checkpoint without them."""
    rest = dict(checkpoint)
    tensors: dict[str, Any] = {}
    model = rest.pop("state_dict", {})
    rest["state_dict_rest"] = {}
    for key, value in model.items():
        if isinstance(value, GlobalTensor):
            if value.boxes:
                tensors[f"model.{key}"] = value
        elif isinstance(value, Tensor):  # put there by a callback, equal on all ranks: DCP keeps one
            tensors[f"model.{key}"] = value
        else:
            rest["state_dict_rest"][key] = value
    optimizers = []
    for index, entry in enumerate(rest.pop("optimizer_states", [])):
        plain: dict[str, dict[str, Any]] = {}
        for name, values in entry["state"].items():
            for key, value in values.items():
                if isinstance(value, GlobalTensor):
                    if value.boxes:
                        tensors[f"optimizer_{index}.state.{name}.{key}"] = value
                else:
                    plain.setdefault(name, {})[key] = value
        optimizers.append({"param_groups": entry["param_groups"], "plain_state": plain})
    rest["optimizer_states"] = optimizers
    rest[FORMAT_KEY] = FORMAT
    return tensors, rest


def _complete(optimizers: Sequence[dict[str, Any]], world: Communicator) -> list[dict[str, Any]]:
    """Python numbers in optimizer states, from all ranks."""
    everybody = world.all_gather_object([o["plain_state"] for o in optimizers])
    out = []
    for index, entry in enumerate(optimizers):
        merged = {name: values for rank in everybody for name, values in rank[index].items()}
        out.append({**entry, "plain_state": merged})
    return out


def _write_rest(rest: dict[str, Any], folder: Path) -> None:
    safe: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for key, value in rest.items():
        (safe if _loads_safely(value) else extra)[key] = value
    torch.save(safe, folder / "meta.pt")
    if extra:
        torch.save(extra, folder / "extra.pt")


def _loads_safely(value: Any) -> bool:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except Exception:  # whatever the unpickler refuses goes into the file that says so
        return False
    return True


def _replace(partial: Path, final: Path) -> None:
    """Give the complete checkpoint its name; the one that had it is removed only afterwards."""
    old = final.with_name(f".{final.name}.old")
    if old.exists():
        shutil.rmtree(old)
    if final.exists() or final.is_symlink():
        if final.is_dir() and not final.is_symlink():
            os.replace(final, old)
        else:
            final.unlink()
    os.replace(partial, final)
    shutil.rmtree(old, ignore_errors=True)


def whole_checkpoint(checkpoint: dict[str, Any], world: Communicator) -> dict[str, Any]:
    """The checkpoint a single device would have written, tensors on the CPU of rank 0. Collective over all ranks.

    One tensor at a time is assembled on every rank and kept on rank 0 only.
    """
    parts = {key: checkpoint[key] for key in ("state_dict", "optimizer_states") if key in checkpoint}
    rest = _gathered({key: value for key, value in checkpoint.items() if key not in parts}, world)
    if "state_dict" in parts:
        rest["state_dict"] = _whole(parts["state_dict"], world)
    if "optimizer_states" in parts:
        rest["optimizer_states"] = [_whole_optimizer(entry, world) for entry in parts["optimizer_states"]]
    return rest


def _gathered(rest: dict[str, Any], world: Communicator) -> dict[str, Any]:
    """Distributed tensors that a callback put elsewhere in the checkpoint, whole, on the CPU of rank 0."""

    def gather(value: GlobalTensor) -> Tensor | None:
        full = value.full_tensor()
        return full.cpu() if world.rank == 0 else None

    return {key: tree_map_only(GlobalTensor, gather, value) for key, value in rest.items()}


def _whole(entries: dict[str, Any], world: Communicator) -> dict[str, Any]:
    out = {}
    for key, value in entries.items():
        if isinstance(value, GlobalTensor):
            full = value.full_tensor()
            value = full.cpu() if world.rank == 0 else None
        out[key] = value
    return out if world.rank == 0 else {}


def _whole_optimizer(entry: dict[str, Any], world: Communicator) -> dict[str, Any]:
    groups, numbers = numbered_groups(entry["param_groups"])
    mine = {
        name: {key: _description(value) for key, value in values.items()} for name, values in entry["state"].items()
    }
    everybody = world.all_gather_object(mine)
    state: dict[int, dict[str, Any]] = {}
    for name in numbers:
        known = [(rank, e[name]) for rank, e in enumerate(everybody) if name in e]
        if not known:
            continue
        merged: dict[str, Any] = {}
        for key in known[0][1]:
            merged[key] = _collect(entry["state"].get(name, {}).get(key), [(r, d[key]) for r, d in known], world)
        if world.rank == 0:
            state[numbers[name]] = merged
    return {"state": state, "param_groups": groups}


def _description(value: Any) -> tuple[Any, ...]:
    if isinstance(value, GlobalTensor):
        writes = bool(value.boxes)
        return ("tensor", tuple(value.shape), value.dtype, value._assemble is not None, writes)
    return ("plain", value)


def _collect(mine: Any, known: list[tuple[int, tuple[Any, ...]]], world: Communicator) -> Any:
    """One state value on rank 0: a sum of disjoint parts, or the one copy of who owns it."""
    kind = known[0][1]
    if kind[0] == "plain":
        return kind[1]
    _, shape, dtype, cut, _ = kind
    device = getattr(world, "device", torch.device("cpu"))
    if cut:
        if isinstance(mine, GlobalTensor):
            whole = mine.full_tensor()
        else:
            whole = GlobalTensor(shape, [], dtype, device, world.all_reduce).full_tensor()
        return whole.cpu() if world.rank == 0 else None
    owner = next(rank for rank, d in known if d[4])
    whole = torch.empty(shape, dtype=dtype, device=device)
    if world.rank == owner:
        whole.copy_(mine.boxes[0][1])
    return world.broadcast(whole, owner).cpu() if world.rank == 0 else world.broadcast(whole, owner)
