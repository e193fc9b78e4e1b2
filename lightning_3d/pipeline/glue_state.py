"""WHAT does glue code remember, and when?  Python state over the windows, microbatches and stages of a batch.

Every stage runs the step's glue code up to the end of its windows. So state that glue code changes (a counter, a list,
a running mean) is changed on every stage that gets there, and once for each of a rank's windows. Here it is changed
once per microbatch on a rank, every window of a microbatch finds what its first window found, and after the batch all
stages have what the last stage has, which alone runs the steps to their end.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from lightning_3d.comm import Communicator
from lightning_3d.errors import PipelineError
from lightning_3d.pipeline.carried import Beginnings
from lightning_3d.pipeline.looks import NOT_THE_USERS
from lightning_3d.pipeline.phantom import Phantom
from lightning_3d.pipeline.probe_before import kept_tensors
from lightning_3d.probe import saved

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_STANDARD = frozenset(nn.Module().__dict__)
_LEADER = 0
"""Index in the replica of a rank of the last stage."""


def holds_phantom(value: Any) -> bool:
    """A value that stands for one of another stage, however deep in lists and dictionaries."""
    return any(isinstance(x, Phantom) for x in tree_flatten(value)[0])


def name_of(piece: saved.Saved, root: nn.Module) -> str:
    """For messages and digests: the attribute, or the kind of thing."""
    if isinstance(piece, saved.SmallTensor):
        return next((n for n, x in kept_tensors(root).items() if x is piece.tensor), "a tensor")
    if not isinstance(piece, saved.Held):
        return type(piece).__name__
    homes = ((n, space) for n, m in root.named_modules() for space in (m.__dict__, m._buffers))
    owner = next((n for n, space in homes if space is piece.space), "")
    return f"{owner}.{piece.key}" if owner else piece.key


class Attributes:
    """The attributes and buffers of modules, as they are now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._spaces = [space for m in modules for space in (m.__dict__, m._buffers)]
        self._before = {(id(piece.space), piece.key): (piece, piece.take()) for piece in self._all()}

    def _all(self) -> Iterator[saved.Held]:
        for space in self._spaces:
            yield from (saved.Held(space, key) for key in space if key not in NOT_THE_USERS and key not in _STANDARD)

    def changed(self) -> list[saved.Saved]:
        """Those that are others now, or have other contents, or did not exist."""
        new = [piece for piece in self._all() if (id(piece.space), piece.key) not in self._before]
        return [*(piece for piece, before in self._before.values() if not piece.same(before)), *new]

    def without(self, pieces: Iterable[saved.Saved]) -> list[saved.Saved]:
        """Those of `pieces` that are not the contents of an attribute."""
        inside = {id(piece.space[piece.key]) for piece in self._all()}
        return [p for p in pieces if not any(id(x) in inside for x in vars(p).values())]


def distinct(pieces: Iterable[saved.Saved]) -> list[saved.Saved]:
    """Without those that mean the same thing."""
    return list({saved.meaning(piece): piece for piece in pieces}.values())


class GlueState:
    """The Python state of one batch on one rank.

    Args:
        root: For messages.
        stage: This rank's stage; None: all windows of a microbatch run here, one after the other.
    """

    def __init__(self, root: nn.Module, stage: int | None) -> None:
        self._root, self._stage = root, stage
        # microbatch -> piece -> (as the first window that changed it found it, as that window left it)
        self._versions: dict[int, dict[int, tuple[Any, Any]]] = {}
        self._names: dict[int, str] = {}  # of pieces, which their traces keep alive
        self._beginnings = Beginnings()

    def begin(self) -> None:
        """A batch begins; one that failed may have left something."""
        self._versions.clear()
        self._beginnings.clear()

    @contextmanager
    def window(self, partition: Any, window: int, microbatch: int) -> Iterator[None]:
        """Around a forward of one window.

        Raises:
            PipelineError: Two windows of this rank change the same state.
        """
        pieces: Sequence[saved.Saved] = partition.trace.remembered
        if not pieces:
            yield
            return
        last = window == len(partition.windows) - 1
        with self._beginnings.window(partition.carried, last), self._in_order(partition, window, microbatch):
            yield

    @contextmanager
    def _in_order(self, partition: Any, window: int, microbatch: int) -> Iterator[None]:
        pieces: Sequence[saved.Saved] = partition.trace.remembered
        carried = {id(piece) for piece in partition.carried}
        mine = [w.number for w in partition.windows if self._stage in (None, w.stage)]
        versions = self._versions.setdefault(microbatch, {})
        # where other microbatches ran in between
        present = {k: pieces[k].take() for k in versions} if self._stage is not None else {}
        for k, (found, _) in versions.items():
            pieces[k].put(found)
        before = {k: x.take() for k, x in enumerate(pieces) if k not in versions and id(x) not in carried}
        last = window == len(partition.windows) - 1
        try:
            yield
            for k in present:
                now = _content(pieces[k], pieces[k].take())
                # values of the step itself (losses that blocks collect) are made anew by every step
                known = (_content(pieces[k], state) for state in versions[k])
                same = _is_of_the_step(now) or any(_alike(now, state) for state in known)
                if not same and not self._is_half(partition, pieces[k], window):
                    raise self._changed_twice(partition, pieces[k])
        finally:
            for k, found in before.items():
                if not last or k >= len(partition.trace.pieces):  # what glue keeps at the end is an error if it is used
                    _drop_phantoms(pieces[k], found)
                if not pieces[k].same(found):
                    versions[k] = (found, _copied(pieces[k].take()))
            for k, now in present.items():
                pieces[k].put(now)
            if window == mine[-1]:
                del self._versions[microbatch]

    def _is_half(self, partition: Any, piece: saved.Saved, window: int) -> bool:
        """A buffer another window writes values into: what ran here is the part of that change that needs none."""
        if id(piece) not in self._names:
            self._names[id(piece)] = name_of(piece, self._root)
        name = self._names[id(piece)]
        home = partition.buffers.get(name, window)
        writes = partition.windows[home]
        return home != window and all(writes.start <= n < writes.stop for n in partition.trace.buffer_reads[name])

    def _changed_twice(self, partition: Any, piece: saved.Saved) -> PipelineError:
        return PipelineError(
            f"{partition.trace.step} changes {name_of(piece, self._root)} at two places that lie in two parts of the "
            f"model on stage {self._stage}, between which other microbatches run, so no order of the changes is that "
            "of one process. Change it at one place, or give every stage one part (pipeline_schedule '1f1b' or "
            "'zb_h1')."
        )


@contextmanager
def put_back(pieces: Sequence[saved.Saved]) -> Iterator[None]:
    """What runs inside is not remembered."""
    before = [piece.take() for piece in pieces]
    try:
        yield
    finally:
        for piece, state in zip(pieces, before, strict=True):
            piece.put(state)


class Spread:
    """After a batch every stage remembers what the last stage does.

    Args:
        pieces: What the batch's steps may change; in the same order on all ranks.
        replica: The replica's axis on the CPU.
        device: Where tensors go.
    """

    def __init__(self, pieces: Sequence[saved.Saved], replica: Communicator, device: torch.device) -> None:
        self._pieces, self._replica, self._device = pieces, replica, device
        leads = replica.rank == _LEADER
        self._before = [_copied(piece.take()) for piece in pieces] if leads else []

    def finish(self) -> None:
        """Collectives: a broadcast of what has changed, pickled, over the replica, if anything may change."""
        if not self._pieces:
            return
        message: list[Any] = []
        if self._replica.rank == _LEADER:
            message = [_news(p, before) for p, before in zip(self._pieces, self._before, strict=True)]
        for piece, news in zip(self._pieces, self._replica.broadcast_object(message, _LEADER), strict=True):
            if news is not None and self._replica.rank != _LEADER:
                begins, state = news
                moves = not isinstance(piece, saved.Generator)
                _take_over(piece, begins, tree_map(self._moved, state) if moves else state)

    def _moved(self, x: Any) -> Any:
        return x.to(self._device) if isinstance(x, Tensor) else x


def _news(piece: saved.Saved, before: Any) -> tuple[int, Any] | None:
    """(elements of a list that stay, those that follow) or (0, all of the state); None: nothing new, or not plain."""
    if piece.same(before):
        return None
    now, then, begins = _content(piece, piece.take()), _content(piece, before), 0
    if isinstance(now, list) and isinstance(then, list) and len(now) >= len(then):
        begins = len(then) if all(x is y for x, y in zip(now, then, strict=False)) else 0
    new = now[begins:] if begins else now
    if not isinstance(piece, saved.Generator) and not all(type(x) in (*_PLAIN, Tensor) for x in tree_flatten(new)[0]):
        return None
    return begins, tree_map(lambda x: x.detach().cpu() if isinstance(x, Tensor) else x, new)


def _take_over(piece: saved.Saved, begins: int, state: Any) -> None:
    place: saved.Saved | None = piece
    if isinstance(piece, saved.Held):
        value = piece.space.get(piece.key)
        place = saved.inside_of(value)
        fits = not isinstance(value, Tensor) or (isinstance(state, Tensor) and value.shape == state.shape)
        if place is None or not fits:
            piece.space[piece.key] = state
            return
    assert place is not None
    if begins:
        state = [*place.take()[:begins], *state]
    place.put((None, state) if isinstance(place, saved.SmallTensor) else state)


def _drop_phantoms(piece: saved.Saved, before: Any) -> None:
    """Put back what of a piece stands for values of other stages."""
    now = piece.take()
    if not holds_phantom(now if isinstance(now, (list, tuple, dict)) else [now]):
        return
    if isinstance(piece, saved.Names):
        kept = {k: v for k, v in now.items() if not holds_phantom(v)}
        piece.put({**kept, **{k: v for k, v in before.items() if k in now and k not in kept}})
    else:
        piece.put(before)


def _content(piece: saved.Saved, state: Any) -> Any:
    """What is compared and sent of a state."""
    if isinstance(piece, saved.Held) and isinstance(state, tuple):
        value, contents = state
        state = value if contents is None else contents
    return state[1] if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], Tensor) else state


def _is_of_the_step(content: Any) -> bool:
    return any(isinstance(x, Tensor) and (isinstance(x, Phantom) or x.requires_grad) for x in tree_flatten(content)[0])


def _copied(state: Any) -> Any:
    return copy.copy(state) if isinstance(state, (list, dict, set)) else state


def _alike(a: Any, b: Any) -> bool:
    """The same, as far as it can be compared."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return isinstance(a, Phantom) or isinstance(b, Phantom) or (a.shape == b.shape and bool(torch.equal(a, b)))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_alike(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[k], b[k]) for k in a)
    if isinstance(a, _PLAIN) or isinstance(b, _PLAIN):
        return type(a) is type(b) and bool(a == b)
    return a is b or type(a) is type(b)
