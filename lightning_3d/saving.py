"""HOW do Lightning's checkpoint hooks reach the checkpoint room?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_3d.deferred import is_deferred
from lightning_3d.errors import ConfigurationError
from lightning_3d.processes import Processes


class Saving(Processes):
    """Saves and loads; the checkpoint room is imported when it is needed."""

    _save_distributed: bool

    def _init_saving(self) -> None:
        self._pending: tuple[dict[str, Any], bool] | None = None
        self._is_set_up = False
        self._precise: Mapping[str, Any] | None = None  # holds more digits than low-precision parameters took

    # -- saving
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._engine is None:
            return super().lightning_module_state_dict()
        return self.engine.state().model()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        from lightning_3d.checkpoint import optimizer_entry

        return optimizer_entry(self.engine.state(), unwrapped(optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a directory (or a plain file on rank zero); collective over all ranks."""
        from lightning_3d.checkpoint import save_directory, whole_checkpoint

        if self._save_distributed:
            if storage_options is not None:
                raise ConfigurationError(
                    "storage_options go to a CheckpointIO plugin, but distributed checkpoints are directories written "
                    "by all ranks. Set save_distributed_checkpoint=False to write one file through the plugin."
                )
            save_directory(checkpoint, filepath, self.mesh.world)
            return
        plain = whole_checkpoint(checkpoint, self.mesh.world)
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(plain, filepath, storage_options=storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        self.barrier()  # the others may still be reading it (`Tuner.lr_find`)
        super().remove_checkpoint(filepath)

    # -- loading
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        from lightning_3d.checkpoint import read_rest

        path = self.broadcast(checkpoint_path)
        if Path(path).is_dir():
            return read_rest(path, weights_only)
        if type(self.checkpoint_io).__name__ == "TorchCheckpointIO" and is_zipfile(path):
            # a memory map: every rank reads the bytes of its part; what others may keep is no part of the file
            loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
            return {
                k: v if k in ("state_dict", "optimizer_states") else _in_memory(v)
                for k, v in _of_a_run(loaded, path).items()
            }
        return _of_a_run(super().load_checkpoint(path, weights_only), path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._load_model(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        from lightning_3d.checkpoint import PATH_KEY, load_optimizer_directory, load_optimizer_file

        optimizers = [unwrapped(o) for o in self.optimizers]
        saved = checkpoint["optimizer_states"]
        if PATH_KEY in checkpoint:
            load_optimizer_directory(self.engine.state(), optimizers, saved, checkpoint[PATH_KEY])
        else:
            load_optimizer_file(self.engine.state(), optimizers, saved)

    def _load_pending(self, fitting: bool) -> None:
        if self._pending is not None:
            checkpoint, strict = self._pending
            self._pending = None
            self._load_model(checkpoint, strict)
        self._is_set_up = True
        precise, self._precise = self._precise, None
        if precise is not None and fitting:
            self._load_masters(precise)

    def _load_masters(self, checkpoint: Mapping[str, Any]) -> None:
        from lightning_3d.checkpoint import load_masters

        if self._settings.masters:
            load_masters(self.engine.state(), checkpoint)

    def _load_model(self, checkpoint: Any, strict: bool) -> None:
        """Weights from a directory or a plain state_dict; kept for `setup` when the module is not cut yet."""
        from lightning_3d.checkpoint import PATH_KEY, load_model_directory, load_model_file, read_model

        if not self._is_set_up:  # its file is still there at the end of set-up
            self._precise = checkpoint
        if self._engine is None:
            module = self._module
            later = any(t.is_meta or is_deferred(t) for t in (*module.parameters(), *module.buffers()))
            # while the layout is not chosen every rank reads all: the module is whole, and may stay so
            parted = self._layout is not None and self._layout.replica_size > 1
            if later or (PATH_KEY in checkpoint and parted):
                self._pending = (dict(checkpoint), strict)
                return
            # now, as Lightning does: callbacks may change it again (averages)
            if PATH_KEY in checkpoint:
                checkpoint["state_dict"] = {**checkpoint["state_dict"], **read_model(checkpoint[PATH_KEY])}
            self.precision_plugin.convert_module(module)  # set-up would come too late: float64 would be rounded
            super().load_model_state_dict(checkpoint, strict)
        elif PATH_KEY in checkpoint:
            load_model_directory(self.engine.state(), checkpoint[PATH_KEY], strict)
        else:
            load_model_file(self.engine.state(), checkpoint["state_dict"], strict)
        if self._engine is not None and self._engine.zero is not None:
            self._engine.zero.loaded()
            if self._is_set_up:
                self._load_masters(checkpoint)


def _of_a_run(loaded: Any, path: Any) -> dict[str, Any]:
    """Refuse a file that holds weights alone, of which Lightning's own migration says `KeyError`."""
    if isinstance(loaded, dict) and "state_dict" in loaded:
        return loaded
    keys = [str(key) for key in loaded][:3] if isinstance(loaded, Mapping) else []
    holds = f"the keys {', '.join(keys)}, ..." if keys else f"a {type(loaded).__name__}"
    raise ConfigurationError(
        f"{path} is no checkpoint of a run: it holds {holds} and no 'state_dict' with optimizers and epoch beside it, "
        "which ckpt_path needs to go on. To begin with weights alone, load them in configure_model: "
        "self.load_state_dict(torch.load(path, mmap=True)), or load_file of safetensors."
    )


def _in_memory(value: Any) -> Any:
    return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, value)


def unwrapped(optimizer: Any) -> Optimizer:
    """The user's optimizer in Lightning's wrapper."""
    inner: Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return inner
