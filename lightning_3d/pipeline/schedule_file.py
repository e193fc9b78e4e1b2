"""HOW does a user bring a schedule of their own?  Action lists in a text or JSON file (no torch here).

The text format has one entry per pipeline rank; an action is kind, microbatch, dot, window; a line that begins with
spaces continues the one before, `#` begins a comment. (It is also valid YAML.)

    rank 0: F0.0 F1.0 B0.0 B1.0
    rank 1: F0.1 B0.1 F1.1 B1.1

A `.json` file holds the same: `{"rank 0": ["F0.0", "F1.0", ...], "rank 1": [...]}`. Number of ranks, windows and
microbatches, and which rank owns which window, follow from the lists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

from lightning_3d.errors import ConfigurationError
from lightning_3d.pipeline.action import Action, Kind, Lists
from lightning_3d.pipeline.check import ScheduleError, check

_ACTION = re.compile(r"([FBIW])(\d{1,9})\.(\d{1,9})")
_RANK = re.compile(r"rank +(\d{1,9})")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_PER_LINE = 16


@dataclass(frozen=True)
class ScheduleFile:
    """A proved schedule from a file.

    Attributes:
        path: Where it was read.
        stages: Number of pipeline ranks.
        microbatches: Number of microbatches it is made for; a batch must be cut into just as many.
        owners: Per window, the rank that runs it.
        lists: Per rank, its actions in order.
        peak_live: Per rank, the largest number of live windows (see `check.Report`).
    """

    path: Path
    stages: int
    microbatches: int
    owners: tuple[int, ...]
    lists: Lists
    peak_live: tuple[int, ...]


class _Word(NamedTuple):
    text: str
    line: int


class _Entry(NamedTuple):
    """What a file says about one rank: the words `rank 0`, and the actions."""

    name: _Word
    actions: list[_Word]


def load_schedule(path: str | Path) -> ScheduleFile:
    """Read and prove a schedule.

    Raises:
        ConfigurationError: The file cannot be read, or its schedule is wrong; the message names file, line and action.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the pipeline schedule {path} cannot be read: {error}.") from error
    entries = _json_entries(path, text) if path.suffix == ".json" else _text_entries(path, text)
    entries = _by_rank(path, entries)
    lists = tuple(tuple(_action(path, word) for word in entry.actions) for entry in entries)
    microbatches, windows = _sizes(path, entries, lists)
    try:
        report = check(lists, windows, microbatches)
    except ScheduleError as error:
        if error.rank is None:
            where = str(path)
        else:
            entry = entries[error.rank]
            word = entry.name if error.index is None else entry.actions[error.index]
            where = f"{path}:{word.line}"
        raise ConfigurationError(f"{where}: {_word(error.action)}: {error}") from error
    return ScheduleFile(path, len(lists), microbatches, report.owners, lists, report.peak_live)


def save_schedule(path: str | Path, lists: Sequence[Sequence[Action]]) -> Path:
    """Write a schedule as `load_schedule` reads it: JSON if the name ends in `.json`, else text."""
    path = Path(path)
    words = [[_word(action) for action in actions] for actions in lists]
    if path.suffix == ".json":
        text = ",\n".join(f'  "rank {rank}": {json.dumps(actions)}' for rank, actions in enumerate(words))
        path.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
        return path
    lines = ["# F forward, B backward, I and W its halves (gradient of inputs, of weights); then microbatch.window"]
    for rank, actions in enumerate(words):
        rows = [" ".join(actions[k : k + _PER_LINE]) for k in range(0, len(actions), _PER_LINE)]
        lines += [f"rank {rank}: {rows[0]}" if rows else f"rank {rank}:", *(f"  {row}" for row in rows[1:])]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _word(action: Action) -> str:
    return f"{action.kind}{action.microbatch}.{action.stage}"


def _text_entries(path: Path, text: str) -> list[_Entry]:
    entries: list[_Entry] = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].rstrip()
        if not content.strip():
            continue
        if not content[0].isspace():
            name, colon, content = content.partition(":")
            if not colon:
                raise _fault(path, _Word(name, number), "is not the beginning of a line of the form 'rank 0: F0.0 ...'")
            entries.append(_Entry(_Word(name.strip(), number), []))
        elif not entries:
            raise _fault(path, _Word(content.split()[0], number), "continues a line, but there is none before it")
        entries[-1].actions.extend(_Word(word, number) for word in content.split())
    return entries


def _json_entries(path: Path, text: str) -> list[_Entry]:
    try:
        pairs = json.loads(text, object_pairs_hook=lambda found: found)
    except ValueError as error:
        raise ConfigurationError(f"the pipeline schedule {path} is not valid JSON: {error}.") from error
    good = isinstance(pairs, list) and all(
        isinstance(pair, tuple) and isinstance(pair[1], list) and all(isinstance(a, str) for a in pair[1])
        for pair in pairs
    )
    if not good:
        raise ConfigurationError(
            f'the pipeline schedule {path} must be one object {{"rank 0": ["F0.0", ...], ...}}: a list of actions, as '
            "strings, for each rank."
        )
    # the parser keeps no positions, but strings come in the order in which it found them
    lines = (text.count("\n", 0, found.start()) + 1 for found in _STRING.finditer(text))
    return [
        _Entry(_Word(name, next(lines)), [_Word(action, next(lines)) for action in actions]) for name, actions in pairs
    ]


def _by_rank(path: Path, entries: Sequence[_Entry]) -> list[_Entry]:
    """The entries in the order of ranks 0, 1, 2, ..."""
    found: dict[int, _Entry] = {}
    for entry in entries:
        match = _RANK.fullmatch(entry.name.text)
        if match is None:
            raise _fault(path, entry.name, "should be 'rank' and a number, as in 'rank 0'")
        if int(match[1]) in found:
            first = found[int(match[1])].name.line
            raise _fault(path, entry.name, f"stands in line {first} already; a rank has one list")
        found[int(match[1])] = entry
    missing = next(rank for rank in range(len(found) + 1) if rank not in found)
    if not found or missing < len(found):
        raise ConfigurationError(
            f"{path}: there is no list for rank {missing}, but for {sorted(found)}. Ranks are counted from 0; one that "
            "owns nothing has an empty list."
        )
    return [found[rank] for rank in range(len(found))]


def _action(path: Path, word: _Word) -> Action:
    match = _ACTION.fullmatch(word.text)
    if match is None:
        raise _fault(path, word, "is no action: kind (F, B, I or W), microbatch, dot, window, as in F0.0")
    kind: Kind = next(k for k in get_args(Kind) if k == match[1])
    return Action(kind, int(match[2]), int(match[3]))


def _sizes(path: Path, entries: Sequence[_Entry], lists: Lists) -> tuple[int, int]:
    """Numbers of microbatches and windows: one more than the largest that is named."""
    placed = [pair for pair in zip(entries, lists, strict=True) if pair[1]]
    named = [pair for entry, actions in placed for pair in zip(actions, entry.actions, strict=True)]
    if not named:
        raise ConfigurationError(f"the pipeline schedule {path} has no actions.")
    last, at = max(named, key=lambda pair: pair[0].microbatch)
    last_window, at_window = max(named, key=lambda pair: pair[0].stage)
    microbatches, windows = last.microbatch + 1, last_window.stage + 1
    if microbatches * windows > len(named):  # more than half is missing: some number is a slip of the pen
        word = at if microbatches > windows else at_window
        raise _fault(
            path, word,
            f"makes a step of {microbatches} microbatches in {windows} windows, which has at least "
            f"{2 * microbatches * windows} actions, but the file has {len(named)}",
        )  # fmt: skip
    return microbatches, windows


def _fault(path: Path, word: _Word, what: str) -> ConfigurationError:
    return ConfigurationError(f"{path}:{word.line}: {word.text!r} {what}.")
