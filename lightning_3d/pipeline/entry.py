"""HOW does a received value enter a window's graph, and how do its gradients leave it?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_3d.pipeline.events import Vid
from lightning_3d.probe.intercept import original_apply

_FIRST = 2**63 - 1
"""Before everything else that is ready, in a backward."""


class Arrivals:
    """The gradients of a window's received values, delivered as soon as the last of them is there."""

    def __init__(self) -> None:
        self._gradients: dict[Vid, Tensor] = {}
        self._expected: dict[Vid, Tensor] = {}
        self._deliver: Callable[[dict[Vid, Tensor]], None] | None = None

    def expect(self, received: Mapping[Vid, Tensor], deliver: Callable[[dict[Vid, Tensor]], None]) -> None:
        """A backward begins.

        Args:
            received: The values; those that require grad get one.
            deliver: Given value -> gradient.
        """
        self._expected = {vid: leaf for vid, leaf in received.items() if leaf.requires_grad}
        self._deliver = deliver

    def arrive(self, vid: Vid, gradient: Tensor) -> None:
        """The gradient of one value is complete."""
        self._gradients[vid] = gradient
        if len(self._gradients) == len(self._expected):
            self._hand_over()

    def finish(self) -> None:
        """The backward has run: what did not get a gradient by now gets none."""
        if len(self._gradients) < len(self._expected):
            self._hand_over()
        self._gradients.clear()
        self._expected.clear()
        self._deliver = None

    def _hand_over(self) -> None:
        assert self._deliver is not None
        given = self._gradients
        self._deliver({vid: given[vid] if vid in given else torch.zeros_like(x) for vid, x in self._expected.items()})


class _Entry(torch.autograd.Function):
    """A non-leaf alias of a received leaf: in-place operations on it are legal, and nothing is copied.

    The leaf gets no gradient of its own: `Arrivals` gets it.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, arrivals: Arrivals, vid: Vid) -> Tensor:
        ctx.arrivals, ctx.vid = arrivals, vid
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        # autograd gives the same tensor to both sides of a sum; a weight over there (even a view of it) would take its
        # memory over, and the next microbatch would add to it while it is on its way
        ctx.arrivals.arrive(ctx.vid, gradient.clone() if _is_held(gradient) else gradient)
        return None, None, None


def _is_held(tensor: Any) -> bool:
    """Whether anything besides the caller has this tensor; yes, where torch cannot tell."""
    count = getattr(tensor, "_use_count", None)
    return count is None or count() > 1


def entry(leaf: Tensor, arrivals: Arrivals, vid: Vid) -> Tensor:
    """What user code works with instead of a received leaf that requires grad."""
    if torch.is_grad_enabled():
        found: Tensor = original_apply(_Entry, leaf, arrivals, vid)
    else:  # what is read under no_grad first may be used outside of it later
        with torch.enable_grad():
            found = original_apply(_Entry, leaf, arrivals, vid)
    # autograd runs what was made last first; but another stage waits for this gradient, and for no weight's
    node: Any = found.grad_fn
    if hasattr(node, "_set_sequence_nr"):  # without it the order is the usual one
        node._set_sequence_nr(_FIRST)
    return found
