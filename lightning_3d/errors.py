"""WHAT does the user read when something is wrong?  The errors of this package.

Two kinds only: a user's mistake is a `ValueError` (found, expected, why, what to do), our own is an `assert`.
What can only be seen while training runs (another rank failed, the step took another path) is a `RuntimeError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase


class ConfigurationError(ValueError):
    """A setting, or a combination of settings, cannot work. Raised before any training step, on every rank."""


class LayoutError(ConfigurationError):
    """The sizes of the mesh axes do not fit the number of processes, or each other."""


class TensorPlanError(ConfigurationError):
    """The model cannot be cut over the tensor-parallel axis the way it was asked for."""


class PipelineError(ConfigurationError):
    """The model, or the user's step, cannot be cut into the pipeline stages that were asked for."""


class ParityError(ConfigurationError):
    """The rewritten model does not compute what the original computes; training must not start."""


class DivergedError(RuntimeError):
    """A step took another path through the model than the one the stages were planned for."""


def not_yet(what: str, instead: str) -> ConfigurationError:
    """The error for a value that is part of the interface but not built in this version."""
    return ConfigurationError(f"{what} is not supported in this version of lightning_3d yet. {instead}")


def near(name: str, known: Iterable[str], count: int = 3) -> str:
    """`" Did you mean 'a' or 'b'?"` for the closest known names, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=count, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""


def near_pattern(pattern: str, names: Iterable[str]) -> str:
    """As `near`, for a pattern on names: the same pattern behind a prefix if that fits (`model.h.*` for `h.*`)."""
    names = list(names)
    hit = next((name for name in names if fnmatchcase(name, f"*.{pattern}")), None)
    if hit is None:
        return near(pattern, names)
    parts = hit.split(".")
    starts = (".".join(parts[:n]) for n in range(1, len(parts)))
    prefix = next(start for start in starts if fnmatchcase(hit, f"{start}.{pattern}"))
    return f" Did you mean '{prefix}.{pattern}'?"
