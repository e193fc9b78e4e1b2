"""WAS this model proved before?  Proofs are remembered on disk, by everything that could change their outcome."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import lightning_3d
from lightning_3d.tensor import TensorPlan
from lightning_3d.tensor.registry import OWN_RULES, RULES

_log = logging.getLogger(__name__)
_NO_ATTRIBUTES = frozenset(("training", "_trainer", "_fabric", "_parameters", "_buffers", "_modules"))
_PRIMITIVES = (bool, int, float, str, type(None), torch.dtype)


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


def fingerprint(module: nn.Module, plan: TensorPlan, batch: Any) -> str:
    """Equal for two models only if a proof of one is a proof of the other.

    Taken into account: the plan and all shapes, the structure of the batch, the classes of all modules with the files
    they are written in, their plain attributes and those of objects they hold (a config), sharding rules of the user,
    and the versions of torch and of this package, by its files. Not: functions in other files that modules call.
    """
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        digest.update(repr(value).encode())

    add((torch.__version__, _own_files(), plan.to_dict(), plan.conversions))
    leaves, structure = tree_flatten(batch)
    add([(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x).__qualname__ for x in leaves])
    add(str(structure))
    for path, child in module.named_modules():
        add((path, type(child).__qualname__, [_file_digest(c) for c in type(child).__mro__]))
        add(sorted(_plain_attributes(child).items()))
        add([(n, tuple(b.shape), b.dtype) for n, b in child.named_buffers(recurse=False)])
    for rule in (*RULES.values(), *OWN_RULES.values()):
        if not rule.__module__.startswith("lightning_3d."):
            add(_file_digest(rule))
    return digest.hexdigest()[:32]


def _plain_attributes(child: nn.Module) -> dict[str, Any]:
    """Numbers, texts and the like that the module holds, and those of a config or dictionary it holds."""
    found: dict[str, Any] = {}
    for name, value in child.__dict__.items():
        if name in _NO_ATTRIBUTES or isinstance(value, (nn.Module, Tensor)):
            continue
        if isinstance(value, _PRIMITIVES) or (
            isinstance(value, (tuple, list)) and all(isinstance(v, _PRIMITIVES) for v in value)
        ):
            found[name] = repr(value)
        elif isinstance(value, dict) or hasattr(value, "__dict__"):
            inner = value if isinstance(value, dict) else vars(value)
            plain = {str(k): repr(v) for k, v in inner.items() if isinstance(v, _PRIMITIVES)}
            found[name] = (type(value).__qualname__, sorted(plain.items()))
    return found


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(v, _PRIMITIVES) for v in value)


@functools.cache
def _file_digest(of: Any) -> str:
    try:
        return hashlib.sha256(Path(inspect.getfile(of)).read_bytes()).hexdigest()[:16]
    except (TypeError, OSError):  # built in; or typed into a shell, which no other process can have seen
        builtin = getattr(of, "__module__", "builtins") == "builtins"
        return repr(of) if builtin else f"{os.getpid()} {id(of)}"


@functools.cache
def _own_files() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(lightning_3d.__file__).parent.glob("tensor/*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
