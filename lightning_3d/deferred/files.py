"""WHICH bytes of a weights file are read?  Those of this rank's part, when it is known.

Inside of `reading_later`, safetensors files are opened as usual and give tensors whose values come later. They are
memory maps: what is cut off is never read. `from_pretrained` of transformers and `safetensors.torch.load_file` get
them without knowing.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_3d.deferred.cell import Call
from lightning_3d.deferred.operations import defer
from lightning_3d.deferred.tensor import is_large
from lightning_3d.errors import ConfigurationError

_NAME = "safe_open"
_open_later = threading.local()


@contextmanager
def reading_later() -> Iterator[None]:
    """While open, this thread's `safe_open` gives files whose large tensors are read when they are needed."""
    try:
        import safetensors
    except ImportError:  # nobody here reads such files
        yield
        return
    original = safetensors.safe_open

    def open_file(filename: Any, framework: str = "pt", device: Any = "cpu", **options: Any) -> Any:
        opened = original(filename, framework, device=device, **options)
        later = getattr(_open_later, "depth", 0) > 0 and str(device) == "cpu"
        return File(opened, str(filename)) if later and framework in ("pt", "torch", "pytorch") else opened

    _open_later.depth = getattr(_open_later, "depth", 0) + 1
    _exchange(original, open_file)
    try:
        yield
    finally:
        _open_later.depth -= 1
        _exchange(open_file, original)


def _exchange(before: Callable[..., Any], now: Callable[..., Any]) -> None:
    """In every module that has imported it by name."""
    for module in list(sys.modules.values()):
        if vars(module).get(_NAME) is before if hasattr(module, "__dict__") else False:
            setattr(module, _NAME, now)


class Source:
    """A file as it is now; it may be deleted (temporary folders) before its tensors are read.

    Args:
        path: Where it is.
    """

    def __init__(self, path: str) -> None:
        self.path, self._is_open = path, False
        try:
            self._file = os.open(path, os.O_RDONLY)
            self._is_open = True
            weakref.finalize(self, os.close, self._file)
        except OSError:  # too many open files
            pass
        self._stamp = self._now()

    def readable(self) -> str:
        """A path at which these bytes are.

        Raises:
            ConfigurationError: They were changed.
        """
        if not self._is_open and not os.path.exists(self.path):
            raise ConfigurationError(
                f"{self.path} was deleted while a model was built from it. Its tensors are read when the model is set "
                "up, each rank its part, so it must stay until then."
            )
        if self._now() != self._stamp:
            raise ConfigurationError(
                f"{self.path} was written to after its tensors were loaded into a model that is being built. They are "
                "read when the model is set up, each rank its part, so the old ones are needed: write another file."
            )
        through = f"/proc/self/fd/{self._file}" if self._is_open else ""
        return through if through and os.path.exists("/proc/self/fd") else self.path

    def known_as(self) -> tuple[str, int]:
        """What copies of the file on other machines share."""
        return os.path.basename(self.path), self._stamp[0]

    def _now(self) -> tuple[int, int]:
        found = os.fstat(self._file) if self._is_open else os.stat(self.path)
        return found.st_size, found.st_mtime_ns

    def __reduce__(self) -> Any:
        return (Source, (self.path,))


class File:
    """A safetensors file; see safetensors' own `safe_open` for the methods.

    Args:
        opened: By safetensors.
        path: Where it is.
    """

    def __init__(self, opened: Any, path: str) -> None:
        self._opened, self._source = opened, Source(path)

    def __enter__(self) -> File:
        self._opened.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def get_tensor(self, name: str) -> Tensor:
        """One tensor, whole."""
        now: Tensor = self._opened.get_tensor(name)
        if not is_large(now):
            return now
        form = torch.empty_strided(now.shape, now.stride(), dtype=now.dtype, device="meta")
        return defer(Call(read_tensor, (self._source, name), {}), form, torch.device("cpu"))

    def get_tensors(self) -> dict[str, Tensor]:
        """All of them."""
        return {name: self.get_tensor(name) for name in self._opened.keys()}  # noqa: SIM118 (it is no dict)

    def get_slice(self, name: str) -> Slice:
        """One tensor, to be indexed."""
        return Slice(self, name)


class Slice:
    """A tensor in a file, before it is known which part is wanted.

    Args:
        file: The file.
        name: The tensor's.
    """

    def __init__(self, file: File, name: str) -> None:
        self._file, self._name, self._slice = file, name, file._opened.get_slice(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slice, name)

    def __getitem__(self, index: Any) -> Tensor:
        return self._file.get_tensor(self._name)[index]


def read_tensor(path: Source, name: str) -> Tensor:
    """A tensor of a safetensors file: a private map of its bytes, of which the used ones are read."""
    import safetensors

    depth = getattr(_open_later, "depth", 0)
    _open_later.depth = 0  # also while a model is built: its mean may be asked for
    try:
        with safetensors.safe_open(path.readable(), framework="pt", device="cpu") as opened:
            tensor: Tensor = opened.get_tensor(name)
    finally:
        _open_later.depth = depth
    return tensor
