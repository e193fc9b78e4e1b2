"""WHAT happens around an optimizer's step?  It is taken over once; then values are read before it, and gathered after.

Also around what some optimizers do to parameters outside of steps, and around `zero_grad`.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from lightning_3d.errors import ConfigurationError
from lightning_3d.zero.arranged import SparseGradients
from lightning_3d.zero.classify import Kind, check_fits, classify, takes_sparse_only
from lightning_3d.zero.groups import check_reduced, surround, surround_swaps
from lightning_3d.zero.holdings import Holdings, is_low
from lightning_3d.zero.joined import Joined
from lightning_3d.zero.offload import check_steps_on_host, follow
from lightning_3d.zero.piece import Piece
from lightning_3d.zero.storage import Storage

_divided: WeakSet[Optimizer] = WeakSet()
"""Optimizers whose state some run has divided."""


def check_is_nobodys(optimizer: Optimizer) -> None:
    """Refuse an optimizer that an earlier run has divided: this rank has a part of its state, cut for that run.

    Raises:
        ConfigurationError: With the way out.
    """
    if optimizer in _divided:
        raise ConfigurationError(
            f"configure_optimizers returned the {type(optimizer).__name__} of an earlier fit, whose state was divided "
            "over the ranks then. Make a new one in configure_optimizers; to go on with its state, save a checkpoint "
            "after the first fit and pass it as ckpt_path to the second."
        )


class Steps(Holdings):
    """Holdings whose optimizers step."""

    @abc.abstractmethod
    def _after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""

    def _take_over(self, optimizer: Optimizer) -> None:
        """Once per optimizer: what it may be given, its pieces, and what is done around its steps.

        Raises:
            ConfigurationError: It looks at more than this rank holds.
        """
        check_is_nobodys(optimizer)
        masters = self._masters and any(is_low(p) for g in optimizer.param_groups for p in g["params"])
        kind = self._kinds[optimizer] = self._kind_of(optimizer, masters)
        names = {self._names.get(id(p), "") for g in optimizer.param_groups for p in g["params"]}
        cut = sorted(names & self._cut.keys())
        replicas = self.data.size if self.stage else 1
        check_fits(type(optimizer).__name__, kind, replicas, self._parted, cut, masters, self._offload)
        if kind == "whole" and (self._cut or self.stage):
            self._arranged[optimizer] = Joined(optimizer, self._name_of, self._cut, self._tensor)
        if kind == "rows" and not self.passive:
            self._arranged[optimizer] = SparseGradients(optimizer, self.slots.get)
        if self._offload:
            check_steps_on_host(optimizer, {p.device for p in self._parameters.values()})
        self._adopt(optimizer)
        if optimizer in self._arranged or any(
            isinstance(p, Piece) for g in optimizer.param_groups for p in g["params"]
        ):
            _divided.add(optimizer)
        if not self.passive or optimizer in self._arranged:
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(lambda o, *_: self._stepped(o))
            surround_swaps(optimizer, self._before_swap, self._after_swap)
        if not self.passive:
            surround(optimizer, "zero_grad", lambda _: None, self._zeroed)

    def _kind_of(self, optimizer: Optimizer, masters: bool) -> Kind:
        """Where it gets all it would get alone, only what gradients it takes is to be known."""
        if self.stage or self._parted or masters or self._offload:
            return classify(optimizer)
        return "rows" if not self.passive and takes_sparse_only(optimizer) else "elementwise"

    def _name_of(self, held: nn.Parameter) -> str:
        return held.slot.name if isinstance(held, Piece) else self._names[id(held)]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._reclaim(optimizer)
        arranged = self._arranged.get(optimizer)
        return None if arranged is None else arranged.before_step(args, kwargs)

    def _before_swap(self, optimizer: Optimizer) -> None:
        self._reclaim(optimizer)
        if optimizer in self._arranged:
            self._arranged[optimizer].join()

    def _after_swap(self, optimizer: Optimizer) -> None:
        if optimizer in self._arranged:
            self._arranged[optimizer].part()
        self._after_step(optimizer)

    def _stepped(self, optimizer: Optimizer) -> None:
        left = [s.name for b in self._of_optimizer[optimizer] for s in b.slots if s in b.filled or s.has_stray]
        check_reduced(f"{type(optimizer).__name__} stepped", left)
        self._after_swap(optimizer)

    @abc.abstractmethod
    def _after_zeroing(self, optimizer: Optimizer) -> None:
        """An optimizer has zeroed what it holds of the gradients."""

    def _zeroed(self, optimizer: Optimizer) -> None:
        """What hooks see, and what a backward of user code left in the module's parameters, goes, too."""
        self._after_zeroing(optimizer)
        for bucket in self._of_optimizer[optimizer]:
            for slot in bucket.slots:
                if slot.has_stray:
                    slot.parameter.grad = None
                slot.stray = None

    def after_closure(self) -> None:
        """Lightning runs the step and its backward inside of `optimizer.step`: what they did to parameters counts."""
        if self.units is None:
            self.reclaim()
        else:
            self._follow(self.storages)

    def _reclaim(self, optimizer: Optimizer) -> None:
        if self.units is not None:
            self.units.end()
        self._reclaim_all([b.storage for b in self._of_optimizer[optimizer] if b.storage is not None])

    def reclaim(self) -> None:
        """Take over what user code did to parameters since the last step, for all optimizers."""
        for arranged in self._arranged.values():
            arranged.restore()  # of a step that failed
        self._reclaim_all(self.storages)

    def _reclaim_all(self, storages: Sequence[Storage]) -> None:
        for storage in storages:
            storage.reclaim()
        self._follow(storages)

    def _follow(self, storages: Sequence[Storage]) -> None:
        follow([storage.host for storage in storages if storage.host is not None])
