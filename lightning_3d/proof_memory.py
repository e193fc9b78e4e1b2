"""WAS this model proved before?  Proofs are remembered on disk, by everything that could change their outcome."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import lightning_3d
from lightning_3d.probe import Content, Unknown
from lightning_3d.tensor import TensorPlan
from lightning_3d.tensor.registry import OWN_RULES, RULES

_log = logging.getLogger(__name__)


def memory_folder() -> Path:
    """`$LIGHTNING_3D_CACHE`, else the user's cache folder."""
    chosen = os.environ.get("LIGHTNING_3D_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_3d"


def recall(key: str) -> str | None:
    """What was proved of a model with this fingerprint, or None."""
    try:
        found = json.loads((memory_folder() / "proofs" / f"{key}.json").read_text())
        return str(found["proved"])
    except (OSError, ValueError, KeyError):
        return None


def remember(key: str, proved: str) -> None:
    """Keep the result of a proof; a folder that cannot be written to is no error."""
    try:
        folder = memory_folder() / "proofs"
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{key}.{os.getpid()}"
        partial.write_text(json.dumps({"proved": proved}))
        partial.replace(folder / f"{key}.json")
    except OSError as error:
        _log.debug(f"the proof is not remembered: {error}")


def fingerprint(module: nn.Module, plan: TensorPlan, batch: Any) -> str | None:
    """Equal for two models only if a proof of one is a proof of the other; None if that cannot be told.

    Taken into account: the plan and all shapes, the structure of the batch, all that the modules
    hold (numbers, configurations, functions) and all that their code names, by what it does (`probe.content`), sharding
    rules of the user, and the versions of torch and of this package, by its files.
    """
    content = Content()
    leaves, structure = tree_flatten(batch)
    shapes = [(tuple(x.shape), str(x.dtype)) if isinstance(x, Tensor) else type(x).__qualname__ for x in leaves]
    try:
        content.add(torch.__version__, _own_files(), repr(plan.to_dict()), plan.conversions, shapes)
        content.add(str(structure), module)
        for rules in (RULES, OWN_RULES):
            content.add([item for item in rules.items() if not item[1].__module__.startswith("lightning_3d.")])
    except Unknown as reason:
        _log.info(f"the tensor-parallel plan is proved anew in every run: the model holds, or its code names, {reason}")
        return None
    return content.hexdigest()[:32]


@functools.cache
def _own_files() -> str:
    digest = hashlib.sha256()
    room = Path(lightning_3d.__file__).parent
    for path in sorted([*room.glob("tensor/*.py"), *room.glob("probe/*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()
