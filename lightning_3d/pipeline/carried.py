"""WHAT of the middle of the model does the next step read?  `self.last_hidden = h.detach()`, read by the next batch.

Such a value is computed by one stage, and the next step may need it on any. Whether it is read at all is found out when
the step is traced: once more, as the next step will find its state. What is read there goes to the last stage like a
result of the step, and from there to all (`glue_state.Spread`): in the next step it is a value every rank knows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from lightning_3d.errors import PipelineError
from lightning_3d.pipeline.events import Event, Trace, Vid
from lightning_3d.pipeline.phantom import Phantom
from lightning_3d.probe import saved


class Left:
    """Pieces of state in which one run of the step has left values of the model, and that state.

    Args:
        pieces: What the run changed in glue code.
        trace: Of the run; atoms leave tensors in attributes, too.
        read: What steps are known to read of another (`saved.meaning`); extended.
    """

    def __init__(self, pieces: Iterable[saved.Saved], trace: Trace, read: set[Hashable]) -> None:
        in_atoms = ((m, name) for event in trace.events for m, name in event.attributes)
        found = [*pieces, *(saved.Held(m.__dict__, name) for m, name in in_atoms)]
        self._state = {saved.meaning(p): (p, p.take()) for p in found}
        self.vids: dict[Hashable, set[Vid]] = {}
        for key, (_, state) in self._state.items():
            vids = {x.vid for x in tree_flatten(state)[0] if isinstance(x, Phantom)}
            if vids:
                self.vids[key] = vids
        self._read = read
        self._watched: dict[int, tuple[Tensor, Hashable]] = {}

    def put(self) -> None:
        """The state the next step begins with; shapes without values stand for what was left."""
        for key, (piece, state) in self._state.items():
            replace_phantoms(piece, state, lambda x, key=key: self._shape(x, key))  # type: ignore[misc]

    def _shape(self, x: Phantom, key: Hashable) -> Tensor:
        made = torch.zeros((), dtype=x.dtype, device=x.device).expand(tuple(x.size()))
        self._watched[id(made)] = (made, key)
        return made

    def note(self, leaves: Iterable[Any]) -> None:
        """An event of glue code reads these."""
        for x in leaves:
            if id(x) in self._watched:
                self._read.add(self._watched[id(x)][1])

    def carried(self, of: Left) -> list[tuple[saved.Saved, frozenset[Vid]]]:
        """The pieces that were read, and the values that run `of` left in them."""
        return [(self._state[key][0], frozenset(of.vids[key])) for key in self.vids if key in self._read & set(of.vids)]


def replace_phantoms(piece: saved.Saved, state: Any, by: Callable[[Phantom], Any]) -> None:
    """Put a state in place, with something else for each value of another stage."""

    def replaced(x: Any) -> Any:
        return by(x) if isinstance(x, Phantom) else x

    if not any(isinstance(x, Phantom) for x in tree_flatten(state)[0]):
        piece.put(state)
    elif not isinstance(piece, saved.Held):
        piece.put(tree_map(replaced, state))
    else:
        value, contents = state
        inside = saved.inside_of(value)
        piece.space[piece.key] = value if inside is not None else tree_map(replaced, value)
        if inside is not None:
            inside.put(tree_map(replaced, contents))


class Beginnings:
    """What the steps of one batch find of carried state: what the batch before left, in every microbatch and window."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}

    def clear(self) -> None:
        """A batch begins."""
        self._found.clear()

    @contextmanager
    def window(self, pieces: Iterable[saved.Saved], last: bool) -> Iterator[None]:
        """Around one window; what the last one leaves stays, for the next batch."""
        pieces = list(pieces)
        before = [(piece, piece.take()) for piece in pieces]
        for piece, state in before:
            piece.put(self._found.setdefault(saved.meaning(piece), state))
        try:
            yield
        finally:
            if not last:
                for piece, state in before:
                    piece.put(state)


def check_is_of_this_step(x: Phantom, run: object, event: Event, root: nn.Module, step: str) -> None:
    """A value that an earlier step left, where nothing has told that it would be read.

    Raises:
        PipelineError: Names the event and the attribute.
    """
    if x.run is run:
        return
    places = (
        f"{name}.{key}".lstrip(".")
        for name, m in root.named_modules()
        for key, value in m.__dict__.items()
        if any(y is x for y in tree_flatten(value)[0])
    )
    where = next(places, None)
    kept = f" and kept in {where!r}" if where else ""
    raise PipelineError(
        f"{event.name} in {step} uses a value that an earlier step computed{kept}. "
        "It exists on one stage of the pipeline only. Where each step reads what the step before left in an attribute "
        "of a module (a tensor, or lists and dicts of them), all stages get it; this was not read there when the step "
        "was planned. Read it in every step (compute with it outside of the `if`, and multiply by 0.0 until it shall "
        "count), or keep it in a registered buffer that is changed in place (self.mean.lerp_(x.mean(0), 0.1))."
    )
