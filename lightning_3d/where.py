"""WHICH line of the user's code does an error speak of?"""

from __future__ import annotations

import functools
import linecache
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any, NamedTuple

_HERE = str(Path(__file__).resolve().parent)
_STANDARD = str(Path(sysconfig.get_paths()["stdlib"]))
_PACKAGES = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "lightning_utilities")


class Place(NamedTuple):
    """A line of code."""

    file: str
    line: int
    function: str


class naming_the_line:
    """Errors of these kinds that are raised inside tell the innermost line of code that is neither ours nor torch's.

    If that line is in an installed package (a model library), the innermost line outside of packages is told, too.
    """

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and isinstance(error, self._kinds) and not getattr(error, "names_line", False):
            lines = lines_of(error)
            if lines:
                error.args = (f"{error}\n" + "\n".join(f"  in {line}" for line in lines),)
            error.names_line = True  # type: ignore[attr-defined]


def current_line() -> str:
    """The innermost line of the running code that is neither ours nor torch's; empty if there is none."""
    return next(iter(_lines(traceback.extract_stack())[:1]), "")


def current_place() -> Place:
    """As `current_line`, the innermost place also if it is in a package: cheap, and to be compared."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    line: int | None = frame.f_lineno
    return Place(frame.f_code.co_filename, line or 0, frame.f_code.co_name)


def lines_of(error: BaseException) -> list[str]:
    """The lines of code that are neither ours nor torch's an error came through: the user's, and a library's."""
    return _lines(traceback.extract_tb(error.__traceback__))


def is_ours(filename: str) -> bool:
    """A file of this package."""
    return filename.startswith(_HERE)


def is_torch(filename: str) -> bool:
    """A file of torch or of Python: neither ours nor the user's."""
    return not is_ours(filename) and _is_internal(filename)


def text_of(place: Place) -> str:
    """A place as other messages name it."""
    code = linecache.getline(place.file, place.line).strip()
    return f"{place.file}, line {place.line}, {place.function}: {code}"


def _lines(stack: traceback.StackSummary) -> list[str]:
    frames = [f for f in stack if not _is_internal(f.filename)]
    outside = [f for f in frames if "site-packages" not in f.filename]
    chosen = [*outside[-1:], *(frames[-1:] if frames and frames[-1] not in outside else [])]
    return [f"{f.filename}, line {f.lineno}, {f.name}: {f.line}" for f in chosen]


@functools.lru_cache(4096)
def _is_internal(filename: str) -> bool:
    if filename.startswith((_HERE, "<")):
        return True
    path = Path(filename)
    if "site-packages" in path.parts:
        return path.parts[path.parts.index("site-packages") + 1] in _PACKAGES
    return filename.startswith(_STANDARD)
