"""WHAT do the optimizers hold?  Which parameters go into which bucket, and what stands for them in the groups.

The user's optimizers stay; what their groups hold is exchanged by position. `Steps` adds what happens around their
steps, `Zero` when gradients are reduced.
"""

from __future__ import annotations

import abc
import weakref
from collections import defaultdict
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lightning_3d.comm import Communicator
from lightning_3d.errors import ConfigurationError
from lightning_3d.zero.arranged import Arranged
from lightning_3d.zero.bucket import Bucket
from lightning_3d.zero.classify import Kind
from lightning_3d.zero.groups import names_in, replace_by_pieces
from lightning_3d.zero.joined import Joined
from lightning_3d.zero.piece import Piece, Slot
from lightning_3d.zero.share import Share
from lightning_3d.zero.storage import Storage

_holds: MutableMapping[nn.Parameter, weakref.ref[Holdings]] = WeakIdKeyDictionary()
"""Who holds a parameter, of any run in this process."""


def release_former(parameters: Iterable[nn.Parameter]) -> None:
    """Take parameters back from the run that had them before, maybe of another strategy. Collective, with stage 3.

    Raises:
        ConfigurationError: A step of that run failed in the middle, so that nobody can gather them.
    """
    former = {id(h): h for p in parameters if (ref := _holds.pop(p, None)) is not None and (h := ref()) is not None}
    for holdings in former.values():
        if holdings.units is not None and holdings.units.is_open:
            raise ConfigurationError(
                "the parameters of this module are divided over the replicas (zero_stage=3) since a step of an earlier "
                "run failed, and cannot be put together. Build the module anew, and resume from a checkpoint."
            )
        holdings.release()


class Holdings(abc.ABC):
    """The buckets, and the groups of the optimizers.

    Args:
        optimizers, share, stage, publish_later, master_weights, float32_gradients, offload, bucket_bytes: As in `Zero`.
        keeps: See `Zero`; otherwise stage 2 gives parameters whose gradients do not come together buckets of their own.
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        share: Share,
        stage: int,
        *,
        publish_later: bool,
        keeps: bool,
        master_weights: bool,
        float32_gradients: bool,
        offload: bool,
        bucket_bytes: int,
    ) -> None:
        self.optimizers = list(optimizers)
        self.data = share.data
        self.stage = stage if share.data.size > 1 else 0
        self.reduces_always = self.stage >= 2 and not keeps
        self._names, self._counted, self._windows = share.names, share.counted, share.windows
        self._parameters, self._cut, self._parted = share.parameters, share.cut, share.parted
        self._tensor = share.tensor
        self._arranged: dict[Optimizer, Arranged] = {}  # those that need what they hold otherwise while they step
        self._order = {id(p): i for i, p in enumerate(share.parameters.values())}
        self._held_names = {id(p): n for n, p in share.parameters.items()}
        self._holders = {name: axis for axis, group in share.shared for name in group}
        self._masters, self._float32_gradients, self._bucket_bytes = master_weights, float32_gradients, bucket_bytes
        self._offload = offload
        converts = (master_weights or float32_gradients) and any(map(is_low, share.parameters.values()))
        # with one replica and no pipeline a gradient is final where autograd puts it
        self.passive = share.data.size == 1 and not publish_later and not converts and not offload
        self.units = share.units if self.stage == 3 else None
        self._owners = Communicator(share.data.axis) if not self.stage else share.data
        if self.units is not None:
            self._owners = self.units.data
        self.buckets: list[Bucket] = []
        self._frozen: list[Bucket] = []  # stage 3: divided, but in no optimizer's hands
        self.slots: dict[nn.Parameter, Slot] = {}
        self._of_optimizer: dict[Optimizer, list[Bucket]] = defaultdict(list)
        self._kinds: dict[Optimizer, Kind] = {}
        self._hooks: list[Any] = []
        self.group_names: dict[Optimizer, list[list[str]]] = {}
        for parameter in share.parameters.values():
            _holds[parameter] = weakref.ref(self)

    @abc.abstractmethod
    def _on_gradient(self, slot: Slot) -> None:
        """A parameter got its gradient."""

    @abc.abstractmethod
    def _arm(self, buckets: list[Bucket] | None = None) -> None:
        """Begin to wait for gradients."""

    def release(self) -> None:
        """Let go of the parameters: another run takes them over. In stage 3 all become whole (collective).

        What is asked of this run afterwards (a checkpoint) is answered from the parameters.
        """
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        if self.units is not None:
            self.units.end(close=True)
            for bucket in [*self.buckets, *self._frozen]:
                self._dissolve(bucket)
        for held in (self.buckets, self._frozen, self.slots, self._of_optimizer):
            held.clear()

    def _adopt(self, optimizer: Optimizer) -> None:
        """Give every trainable parameter of the groups that is not ours yet a place in a bucket.

        Also after `add_param_group`, and for parameters unfrozen later (a frozen one stays as it is until then).
        What other pipeline stages hold leaves the groups; `group_names` remembers it.
        """
        self._record_names(optimizer)
        for group in optimizer.param_groups:
            group["params"][:] = [p for p in group["params"] if isinstance(p, Piece) or id(p) in self._held_names]
        if not self.passive:
            self._make_pieces(optimizer)
        arranged = self._arranged.get(optimizer)
        if isinstance(arranged, Joined):
            arranged.deal()

    def _make_pieces(self, optimizer: Optimizer) -> None:
        new = [p for g in optimizer.param_groups for p in g["params"] if self._is_new(p)]
        thawed = {id(p) for p in new}
        for bucket in [b for b in self._frozen if any(id(s.parameter) in thawed for s in b.slots)]:
            self._frozen.remove(bucket)
            self._dissolve(bucket)
        runs: dict[Any, list[nn.Parameter]] = defaultdict(list)
        for parameter in sorted(new, key=lambda p: -self._order[id(p)]):
            holders = self._holders.get(self._held_names[id(parameter)])
            key: Any = (parameter.dtype, parameter.device, id(holders) if holders else None)
            if self.reduces_always:
                # by what gets its gradients together: of a split backward, matrices later than biases and norms
                key = (*key, frozenset(self._windows.get(self._held_names[id(parameter)], ())), parameter.ndim > 1)
            if self.units is not None:
                key = (*key, self.units.unit_of(self._held_names[id(parameter)]).index)
            runs[key].append(parameter)
        for run in runs.values():
            self._of_optimizer[optimizer] += self._watched_buckets(optimizer, run)
        self.buckets.sort(key=lambda b: (b.holders is not None, -min(self._order[id(s.parameter)] for s in b.slots)))
        for group in optimizer.param_groups:
            replace_by_pieces(optimizer, group, self.slots)
            for parameter in group["params"]:
                if isinstance(parameter, Piece):
                    self._share(optimizer, parameter.slot)
        self._arm()

    def _share(self, optimizer: Optimizer, slot: Slot) -> None:
        """A parameter that an optimizer steps, though another one may have it, too."""
        bucket, mine = slot.bucket, self._of_optimizer[optimizer]
        if bucket in mine:
            return
        kind = self._kinds[optimizer]
        if kind == "whole" and bucket.sharded and not bucket.whole:
            raise ConfigurationError(
                f"parameter {slot.name!r} is in two optimizers. {type(optimizer).__name__} looks at whole matrices, "
                f"the other one gets parts of them, divided over {self.data.size} replicas. List the optimizer that "
                "looks at whole matrices first in configure_optimizers, or use zero_stage=0."
            )
        if bucket.sparse != (kind == "rows"):
            raise ConfigurationError(
                f"parameter {slot.name!r} is in two optimizers, of which one takes sparse gradients only and the other "
                f"({type(optimizer).__name__}) {'too' if kind == 'rows' else 'does not'}. A gradient is one or the "
                "other here: give the parameter to one of them."
            )
        mine.append(bucket)

    def _record_names(self, optimizer: Optimizer) -> None:
        """Names of all parameters of every group, in order, as one process would number them."""
        known = self.group_names.setdefault(optimizer, [])
        for index, group in enumerate(optimizer.param_groups):
            if index >= len(known):
                known.append(names_in(optimizer, group, self._names))

    def _is_new(self, parameter: nn.Parameter) -> bool:
        if self.passive:
            return id(parameter) not in self._held_names
        return parameter.requires_grad and not isinstance(parameter, Piece) and parameter not in self.slots

    def _watched_buckets(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> list[Bucket]:
        made = self._cut_into_buckets(parameters, self._kinds[optimizer])
        for bucket in made:
            for slot in bucket.slots:
                self.slots[slot.parameter] = slot
                hook = slot.parameter.register_post_accumulate_grad_hook(lambda _, s=slot: self._on_gradient(s))
                self._hooks.append(hook)
        self.buckets += made
        return made

    def _cut_into_buckets(self, parameters: Sequence[nn.Parameter], kind: Kind = "elementwise") -> list[Bucket]:
        made: list[Bucket] = []
        run: list[nn.Parameter] = []
        for parameter in [*parameters, None]:
            full = run and (parameter is None or sum(p.nbytes for p in run) + parameter.nbytes > self._bucket_bytes)
            if full:
                made.append(self._bucket(run, kind))
                run = []
            if parameter is not None:
                run.append(parameter)
        return made

    def _bucket(self, parameters: Sequence[nn.Parameter], kind: Kind) -> Bucket:
        named = [(n := self._held_names[id(p)], p, n in self._counted) for p in parameters]
        first, parameter, _ = named[0]
        low = is_low(parameter)
        bucket = Bucket(
            named,
            self.data,
            self._owners,
            whole=kind in ("rows", "whole"),
            sparse=kind == "rows",
            holders=self._holders.get(first),
            windows=frozenset(self._windows.get(first, ())),
            master=low and self._masters and parameter.requires_grad,
            gradient_dtype=torch.float32 if low and self._float32_gradients else None,
            divided=self.units is not None,
            offload=self._offload and parameter.requires_grad,
        )
        if self.units is not None:
            assert bucket.storage is not None
            self.units.add(self.units.unit_of(first), bucket.storage)
        return bucket

    # -- stage 3: what is in no optimizer's hands
    def _divide_frozen(self) -> None:
        """Parameters that are not trained are divided, too. (A trained one that no optimizer has stays whole.)"""
        if self.units is None:
            return
        divided = {id(s.parameter) for bucket in [*self.buckets, *self._frozen] for s in bucket.slots}
        runs: dict[Any, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in self._parameters.items():
            if not parameter.requires_grad and id(parameter) not in divided:
                runs[parameter.dtype, parameter.device, self.units.unit_of(name).index].append(parameter)
        for run in runs.values():
            self._frozen += self._cut_into_buckets(run)

    def _dissolve(self, bucket: Bucket) -> None:
        """The parameters are whole and on their own again. Collective."""
        assert self.units is not None
        assert bucket.storage is not None
        self.units.remove(bucket.storage)
        bucket.storage.gather_start()
        bucket.storage.gather_wait()
        bucket.storage.dissolve()

    def loaded(self) -> None:
        """A checkpoint was read: in stage 3 into what the optimizers step on, else into the parameters."""
        for storage in self.storages:
            if storage.divided:
                storage.stepped()

    @property
    def stepped_in_float32(self) -> set[str]:
        """Names of the parameters, also of other stages, that get float32 masters if they have less precision."""
        if not self._masters:
            return set()
        return {name for groups in self.group_names.values() for group in groups for name in group}

    @property
    def storages(self) -> list[Storage]:
        """The memory of all parameters that are views of flat buffers."""
        return [b.storage for b in [*self.buckets, *self._frozen] if b.storage is not None]

    def slot_of(self, parameter: nn.Parameter) -> Slot | None:
        """The place of a parameter in a bucket, if it has one."""
        slot = self.slots.get(parameter)
        if slot is not None or not self._frozen:
            return slot
        return next((s for bucket in self._frozen for s in bucket.slots if s.parameter is parameter), None)

    def names_of(self, optimizer: Optimizer) -> list[list[str]]:
        """Names of the parameters of every group, in order, as one process would number them."""
        self._record_names(optimizer)
        return self.group_names[optimizer]

    def steps_whole(self, optimizer: Optimizer, name: str) -> bool | None:
        """Whether this rank steps the whole of a parameter of which it holds a part; None: every rank steps its part.

        False: another rank does, of this tensor-parallel axis.
        """
        arranged = self._arranged.get(optimizer)
        return arranged.steps(name) if isinstance(arranged, Joined) else None

    def regroup(self, optimizer: Optimizer, names: Sequence[Sequence[str]]) -> None:
        """Groups with these parameters: what a run had that added some during training (finetuning callbacks).

        Args:
            optimizer: One of the optimizers; its first groups may have been replaced by a callback.
            names: Names of every group's parameters, the groups it was built with first.
        """
        held = self._parameters
        options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        for index, group_names in enumerate(names):
            if index == len(optimizer.param_groups):
                optimizer.param_groups.append({**options})
            found = [held[name] for name in group_names if name in held]
            optimizer.param_groups[index]["params"] = found
        self.group_names[optimizer] = [list(group) for group in names]
        self._adopt(optimizer)


def is_low(parameter: Tensor) -> bool:
    """Whether a parameter has less than float32 precision."""
    return parameter.is_floating_point() and parameter.dtype.itemsize < 4
