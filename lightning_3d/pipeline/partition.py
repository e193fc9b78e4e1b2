"""WHO runs which part of the step?  Cuts a trace into windows and says what each holds, receives and sends."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_3d.errors import PipelineError, near
from lightning_3d.pipeline.events import Event, Trace, Vid
from lightning_3d.probe.saved import Saved

_LINK = 10.0  # a byte between stages costs as much as so many in memory


class Window(NamedTuple):
    """Events `start <= n < stop` of a step, run by one stage."""

    number: int
    start: int
    stop: int
    stage: int


@dataclass
class Partition:
    """A trace, cut.

    Attributes:
        trace: What is cut.
        windows: The chain of windows. A stage has several of them with virtual chunks, and in a step that walks
            through the model several times.
        held: Per stage, the parameters its windows use.
        receives: Per window, the values it needs from each earlier window: {owner window: [values]}.
        buffers: Registered buffers (and tensors in attributes) glue code changes -> the window that keeps them current.
        carried: State in which windows before the last leave values that the next step reads.
    """

    trace: Trace
    windows: list[Window]
    held: list[set[str]]
    receives: list[dict[int, list[Vid]]]
    buffers: dict[str, int] = field(default_factory=dict)
    carried: list[Saved] = field(default_factory=list)
    _wanted: dict[int, dict[int, list[Vid]]] = field(default_factory=dict, repr=False)

    @property
    def stages(self) -> int:
        return len(self.held)

    def cost(self) -> list[float]:
        """Work of every window."""
        events = self.trace.events
        return [sum(self.trace.cost(event) for event in events[w.start : w.stop]) for w in self.windows]

    def sends(self, window: int) -> dict[int, list[Vid]]:
        """Later window -> values that this window sends there."""
        return {w: owners[window] for w, owners in enumerate(self.receives) if window in owners}

    def wanted(self, window: int) -> list[Vid]:
        """All values of a window that others need."""
        return sorted({vid for vids in self.sends(window).values() for vid in vids})

    def wanted_by_event(self, window: int) -> dict[int, list[Vid]]:
        """Event -> values of it that other windows need."""
        if window not in self._wanted:
            found: dict[int, list[Vid]] = {}
            for vid in self.wanted(window):
                found.setdefault(vid[0], []).append(vid)
            self._wanted[window] = found
        return self._wanted[window]

    def plain(self) -> object:
        """What must be equal on all ranks of a replica."""
        return (self.trace.plain(), self.windows, self.receives, [sorted(names) for names in self.held])


def windows_from_starts(trace: Trace, starts: Sequence[int], owners: Sequence[int] | None = None) -> list[Window]:
    """Windows beginning at the given events (the first at 0), the i-th run by stage `owners[i]` (default: i)."""
    stops = [*starts[1:], len(trace.events)]
    owners = range(len(starts)) if owners is None else owners
    bounds = zip(starts, stops, owners, strict=True)
    return [Window(i, start, stop, stage) for i, (start, stop, stage) in enumerate(bounds)]


def make_partition(trace: Trace, windows: list[Window], stages: int | None = None) -> Partition:
    """What every window holds, receives and sends.

    Raises:
        PipelineError: A boundary lies where none may, or a buffer is written and read in different stages.
    """
    stages = stages or max(w.stage for w in windows) + 1
    window_of = [w.number for w in windows for _ in range(w.start, w.stop)]
    for window in windows[1:]:
        reason = trace.forbidden(window.start)
        if reason is not None:
            raise PipelineError(
                f"stage {window.stage} would begin at {trace.events[window.start].name} (event {window.start}), but "
                f"no stage may begin there: {reason}."
            )
    need: list[set[Vid]] = [set() for _ in windows]
    held: list[set[str]] = [set() for _ in range(stages)]
    for n, event in enumerate(trace.events):
        # a Python value read from a tensor is read again, for real, in every later window
        runs_in = range(window_of[n], len(windows)) if event.kind == "read" else (window_of[n],)
        for w in runs_in:
            need[w] |= event.reads
            held[windows[w].stage] |= event.params
    need[-1] |= trace.last_reads
    receives = []
    for window in windows:
        owners: dict[int, list[Vid]] = {}
        for vid in sorted(need[window.number]):
            if window_of[vid[0]] < window.number:
                owners.setdefault(window_of[vid[0]], []).append(vid)
        receives.append(dict(sorted(owners.items())))
    carried = [piece for piece, vids in trace.carried if any(window_of[n] < len(windows) - 1 for n, _ in vids)]
    return Partition(trace, windows, held, receives, _buffer_windows(trace, window_of, windows), carried)


def _buffer_windows(trace: Trace, window_of: list[int], windows: list[Window]) -> dict[str, int]:
    for name, written in trace.buffer_writes.items():
        for read in trace.buffer_reads.get(name, ()):
            stages = windows[window_of[read]].stage, windows[window_of[written]].stage
            if stages[0] != stages[1]:
                raise PipelineError(
                    f"buffer {name!r} is read in stage {stages[0]} and written in stage {stages[1]} of one step. Keep "
                    "both in one module, or choose pipeline_split so that one stage runs both."
                )
    return {name: window_of[n] for name, n in trace.buffer_writes.items()}


# -- where to cut for training
def automatic_starts(trace: Trace, parts: int, stages: int | None = None) -> list[int]:
    """Contiguous parts of the atom calls with the smallest largest cost; ties by the bytes that cross.

    Raises:
        PipelineError: The model offers fewer pieces than parts; the message names them.
    """
    calls = trace.calls()
    legal = [i for i, (n, _) in enumerate(calls) if i and trace.forbidden(n) is None]
    if len(legal) < parts - 1:
        raise _too_few_pieces(trace, parts, stages or parts, len(legal) + 1)
    points = [0, *legal, len(calls)]
    before = [0.0]
    for first, last in itertools.pairwise(points):
        # what glue code does between two atoms belongs to the piece before it
        begin = calls[first][0] if first else 0
        stop = calls[last][0] if last < len(calls) else len(trace.events)
        before.append(before[-1] + sum(trace.cost(event) for event in trace.events[begin:stop]))
    crossing = [0.0, *(float(trace.live_bytes(calls[i][0])) for i in legal), 0.0]
    chosen = smallest_maximum(before, crossing, parts, 2 * _LINK * trace.operations_per_byte)
    return [0, *(calls[points[i]][0] for i in chosen)]


def smallest_maximum(before: list[float], crossing: list[float], parts: int, toll: float = 0.0) -> list[int]:
    """Inner boundaries of the best contiguous partition.

    Args:
        before: Cost of everything before each point.
        crossing: Bytes that cross a boundary at each point; they decide between equal partitions.
        parts: How many parts.
        toll: Cost of a byte for the parts on both sides of a boundary.
    """
    end = len(before) - 1
    best: dict[tuple[int, int], tuple[float, float, list[int]]] = {(0, 0): (0.0, 0.0, [])}
    for k in range(1, parts + 1):
        for b in range(k, end + 1):
            options = []
            for a in range(k - 1, b):
                if (k - 1, a) in best:
                    largest, sent, cuts = best[k - 1, a]
                    work = before[b] - before[a] + toll * (crossing[a] + crossing[b])
                    options.append((max(largest, work), sent + crossing[a], [*cuts, a]))
            if options:
                best[k, b] = min(options, key=lambda option: option[:2])
    return best[parts, end][2][1:]


def stages_of_pieces(
    trace: Trace, owners: Sequence[int], stages: int | None = None, follows: Mapping[str, str] | None = None
) -> dict[str, tuple[int, ...]]:
    """Parameter -> stages, for a step that calls its pieces several times: each piece once, by the cost of all calls.

    Pieces are dealt to the windows in the order of their first call; parameters of glue code go to the piece called
    before. What several pieces use (a tied embedding and head) is held by the stages of all of them.

    `follows`: piece -> the one whose stage it gets, and whose cost it adds to.

    Raises:
        PipelineError: Fewer pieces than windows.
    """
    follows = follows or {}
    names = list(dict.fromkeys(name for name in trace.call_names() if name not in follows))
    if len(names) < len(owners):
        raise _too_few_pieces(trace, len(owners), stages or len(owners), len(names))
    costs = dict.fromkeys(names, 0.0)
    piece_of: dict[str, str] = {}
    current = names[0]
    for event in trace.events:
        current = follows.get(event.atom, event.atom) if event.kind == "atom" else current
        costs[current] += trace.cost(event)
        known = [piece_of[n] for n in sorted(event.params) if n in piece_of]
        for name in event.params:
            piece_of.setdefault(name, known[0] if known and event.kind != "atom" else current)
    before = [0.0, *itertools.accumulate(costs[name] for name in names)]
    bounds = [0, *smallest_maximum(before, [0.0] * len(before), len(owners)), len(names)]
    stage_of = {name: owners[part] for part, (a, b) in enumerate(itertools.pairwise(bounds)) for name in names[a:b]}
    holders = {name: {stage_of[piece]} for name, piece in piece_of.items()}
    for _, event in trace.calls():
        for name in event.params:
            holders[name].add(stage_of[follows.get(event.atom, event.atom)])
    return {name: tuple(sorted(stages)) for name, stages in holders.items()}


def named_starts(trace: Trace, names: list[str]) -> list[int]:
    """Stage boundaries at the first call of, or inside, each named module.

    Raises:
        PipelineError: The step calls no such module, the names are in another order than the calls, or no stage may
            begin there.
    """
    calls = trace.calls()
    starts = [0]
    for name in names:
        found = [n for n, event in calls if event.atom == name or event.atom.startswith(name + ".")]
        if not found:
            raise PipelineError(
                f"pipeline_split names {name!r}, but {trace.step} never calls it as one of its pieces: "
                f"{', '.join(dict.fromkeys(trace.call_names()))}." + near(name, trace.call_names())
            )
        if found[0] <= starts[-1]:
            raise PipelineError(
                f"pipeline_split: {name!r} is called before, or together with, the module named in front of it, or "
                f"nothing is called before it. The order of {trace.step} is {', '.join(trace.call_names())}."
            )
        starts.append(found[0])
    return starts


def _too_few_pieces(trace: Trace, parts: int, stages: int, pieces: int) -> PipelineError:
    reasons = list(dict.fromkeys(f"{n.why} (events {n.first} to {n.last})" for n in trace.no_cut))
    why = f" No boundary is possible inside: {'; '.join(reasons)}." if reasons else ""
    names = ", ".join(trace.call_names()) or "no module with parameters is called"
    asked, instead = f"{stages} pipeline stages (pipeline_parallel_size)", "a smaller pipeline_parallel_size"
    if parts > stages:
        asked = f"{parts} parts on {stages} pipeline stages (several on each: virtual_pipeline_size, zb_v)"
        instead = "smaller sizes, a schedule without virtual stages"
    return PipelineError(
        f"{asked} were asked for, but {trace.step} offers only {pieces} piece{'s' if pieces > 1 else ''}: "
        f"{names}.{why} Use {instead}, or give the model more modules that are called one after the other."
    )


# -- where to cut any step, once parameters have their stages
class Held(NamedTuple):
    """Which stages hold which parameter, and how training cut the calls of the atoms.

    Attributes:
        stages: Number of stages.
        holders: Name of a parameter -> stages that hold it.
        call_names: Atoms in the order of their calls when the model was cut.
        start_calls: Index of the call every window began with.
        owners: Stage of every window; one entry per stage of a plain pipeline.
    """

    stages: int
    holders: Mapping[str, tuple[int, ...]]
    call_names: tuple[str, ...] = ()
    start_calls: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()


def owned_windows(trace: Trace, held: Held) -> list[Window]:
    """Windows for a step whose parameters already have their stages.

    The same calls as when the model was cut: the same boundaries. Otherwise a new window begins at the first event
    that needs a parameter the current stage does not hold; the walk is always forwards, from the last stage back to
    the first, so a step that calls the model twice becomes the chain 0, 1, 0, 1.

    Raises:
        PipelineError: One event needs parameters that no single stage holds.
    """
    calls = trace.calls()
    if tuple(trace.call_names()) == held.call_names:
        windows = windows_from_starts(trace, [0, *(calls[i][0] for i in held.start_calls[1:])], held.owners or None)
        if all(_holds_all(event, w.stage, held) for w in windows for event in trace.events[w.start : w.stop]):
            return windows
    stage = held.owners[0] if held.owners else 0
    starts = [(0, stage)]
    for n, event in enumerate(trace.events):
        allowed = _allowed(event, held)
        if allowed is None or stage in allowed:
            continue
        stage = min(allowed, key=lambda s: (s - stage) % held.stages)
        starts.append((n, stage))
    # the first window begins with the first parameter that is used, the last one ends on the last stage
    if len(starts) > 1 and not any(e.params for e in trace.events[: starts[1][0]]):
        starts = [(0, starts[1][1]), *starts[2:]]
    if starts[-1][1] != held.stages - 1:
        starts.append((len(trace.events), held.stages - 1))
    stops = [n for n, _ in starts[1:]] + [len(trace.events)]
    return [Window(i, n, stop, s) for i, ((n, s), stop) in enumerate(zip(starts, stops, strict=True))]


def _holds_all(event: Event, stage: int, held: Held) -> bool:
    return event.kind == "local" or all(stage in held.holders[name] for name in event.params)


def _allowed(event: Event, held: Held) -> set[int] | None:
    """Stages that can run an event; None: all."""
    if not event.params or event.kind == "local":
        return None
    allowed = set(range(held.stages))
    for name in event.params:
        allowed &= set(held.holders[name])
    if not allowed:
        where = ", ".join(f"{name!r} (stage {held.holders[name][0]})" for name in sorted(event.params)[:6])
        raise PipelineError(
            f"{event.name} needs parameters of several pipeline stages at once: {where}. Put them into one module that "
            "both the training and the evaluation step call."
        )
    return allowed


def place_unused(trace: Trace, held: list[set[str]], pieces: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Give the parameters that the step never uses to stages, so that nothing is lost (frozen copies, EMA weights).

    A piece next to used ones (a block that LayerDrop skipped) goes where its neighbour is, so that using it later does
    not change the order of the stages. Other pieces are shared out evenly by size, in order of registration; what is in
    no piece goes to the last stage.

    Args:
        trace: With the sizes of all parameters.
        held: Per stage, the names; extended in place.
        pieces: (name, parameter names) of every piece, in order of registration.
    """
    missing = set(trace.sizes) - set().union(*held)
    alone: list[list[str]] = []
    neighbours: dict[str, int] = {}
    for name, parameters in pieces:
        parent = name.rpartition(".")[0]
        if missing.isdisjoint(parameters):
            neighbours[parent] = next(s for s, names in enumerate(held) if not names.isdisjoint(parameters))
        elif parent in neighbours or _has_used_sibling(parent, pieces, missing):
            held[neighbours.get(parent, 0)].update(missing.intersection(parameters))
        else:
            alone.append([n for n in parameters if n in missing])
    total = sum(trace.sizes[n] for names in alone for n in names)
    running = 0
    for names in alone:
        size = sum(trace.sizes[n] for n in names)
        stage = min(len(held) - 1, int(len(held) * (running + size / 2) / total)) if total else 0
        running += size
        held[stage].update(set(names) - set().union(*held))
    held[-1] |= set(trace.sizes) - set().union(*held)


def _has_used_sibling(parent: str, pieces: Sequence[tuple[str, Sequence[str]]], missing: set[str]) -> bool:
    return any(name.rpartition(".")[0] == parent and missing.isdisjoint(names) for name, names in pieces)
