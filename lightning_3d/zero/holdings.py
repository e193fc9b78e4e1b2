"""WHAT do the optimizers hold?  Which parameters go into which bucket, and what stands for them in the groups.

The user's optimizers stay; what their groups hold is exchanged by position. `Zero` adds when gradients are reduced.
"""

from __future__ import annotations

import abc
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.comm import Communicator
from lightning_3d.errors import ConfigurationError
from lightning_3d.zero.bucket import Bucket, Piece, Slot
from lightning_3d.zero.classify import check_fits, classify


@dataclass(frozen=True)
class Share:
    """What a rank holds of the model, and with whom.

    Args:
        parameters: Name -> parameter, all this rank holds, in the module's order.
        names: `id(parameter)` -> name for every parameter of the module, also those other stages hold.
        counted: Names of the parameters this rank counts in norms.
        data: The data-parallel axis.
        control: The same axis on the CPU, for flags that Python needs.
        shared: (axis over the holders, names) of parameters several pipeline stages use.
        cut: Names of the parameters that are divided over tp.
        parted: Other ranks of the replica hold other parameters (tensor or pipeline parallelism).
        windows: Name -> windows of this pipeline stage that use the parameter.
    """

    parameters: Mapping[str, nn.Parameter]
    names: Mapping[int, str]
    counted: set[str]
    data: Communicator
    control: Communicator
    shared: Sequence[tuple[Communicator, Sequence[str]]] = ()
    cut: Set[str] = frozenset()
    parted: bool = False
    windows: Mapping[str, Set[int]] = field(default_factory=dict)


class Holdings(abc.ABC):
    """The buckets, and the groups of the optimizers.

    Args:
        optimizers, share, stage, publish_later, bucket_bytes: As in `Zero`.
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
        bucket_bytes: int,
    ) -> None:
        self.optimizers = list(optimizers)
        self.data = share.data
        self.stage = stage if share.data.size > 1 else 0
        self.reduces_always = self.stage >= 2 and not keeps
        self._names, self._counted, self._windows = share.names, share.counted, share.windows
        self._parameters, self._cut, self._parted = share.parameters, share.cut, share.parted
        self._order = {id(p): i for i, p in enumerate(share.parameters.values())}
        self._held_names = {id(p): n for n, p in share.parameters.items()}
        self._holders = {name: axis for axis, group in share.shared for name in group}
        # with one replica and no pipeline a gradient is final where autograd puts it
        self.passive = share.data.size == 1 and not publish_later
        self._bucket_bytes = bucket_bytes
        self.buckets: list[Bucket] = []
        self.slots: dict[nn.Parameter, Slot] = {}
        self._of_optimizer: dict[Optimizer, list[Bucket]] = defaultdict(list)
        self._kinds: dict[Optimizer, str] = {}
        self._hooks: list[Any] = []
        self.group_names: dict[Optimizer, list[list[str]]] = {}

    @abc.abstractmethod
    def _on_gradient(self, slot: Slot) -> None:
        """A parameter got its gradient."""

    @abc.abstractmethod
    def _arm(self, buckets: list[Bucket] | None = None) -> None:
        """Begin to wait for gradients."""

    @abc.abstractmethod
    def _after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""

    def _take_over(self, optimizer: Optimizer) -> None:
        kind = self._kinds[optimizer] = classify(optimizer) if self.stage or self._parted else "elementwise"
        names = {self._names.get(id(p), "") for g in optimizer.param_groups for p in g["params"]}
        check_fits(type(optimizer).__name__, kind, self.data.size, self._parted, sorted(names & self._cut))
        self._adopt(optimizer)
        if self.stage:
            optimizer.register_step_pre_hook(lambda o, *_: self._reclaim(o))
            optimizer.register_step_post_hook(lambda o, *_: self._after_step(o))

    def release(self) -> None:
        """Take the hooks off the parameters (another `fit` builds its own buckets)."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    def _adopt(self, optimizer: Optimizer) -> None:
        """Give every trainable parameter of the groups that is not ours yet a place in a bucket.

        Also after `add_param_group`, and for parameters unfrozen later (a frozen one stays as it is until then).
        What other pipeline stages hold leaves the groups; `group_names` remembers it.
        """
        self._record_names(optimizer)
        for group in optimizer.param_groups:
            group["params"][:] = [p for p in group["params"] if isinstance(p, Piece) or id(p) in self._held_names]
        if self.passive:
            return
        new = [p for g in optimizer.param_groups for p in g["params"] if self._is_new(p)]
        runs: dict[Any, list[nn.Parameter]] = defaultdict(list)
        for parameter in sorted(new, key=lambda p: -self._order[id(p)]):
            holders = self._holders.get(self._held_names[id(parameter)])
            key: Any = (parameter.dtype, parameter.device, id(holders) if holders else None)
            if self.reduces_always:
                # by what gets its gradients together: of a split backward, matrices later than biases and norms
                key = (*key, frozenset(self._windows.get(self._held_names[id(parameter)], ())), parameter.ndim > 1)
            runs[key].append(parameter)
        for run in runs.values():
            self._of_optimizer[optimizer] += self._cut_into_buckets(optimizer, run)
        self.buckets.sort(key=lambda b: (b.holders is not None, -min(self._order[id(s.parameter)] for s in b.slots)))
        for group in optimizer.param_groups:
            self._replace_by_pieces(optimizer, group)
        self._arm()

    def _replace_by_pieces(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        before = list(group["params"])
        group["params"][:] = [self.slots[p].held if p in self.slots else p for p in before]
        for old, now in zip(before, group["params"], strict=True):
            if old is not now and old in optimizer.state:
                state = optimizer.state.pop(old)
                optimizer.state[now] = {key: _cut(self.slots[old], value) for key, value in state.items()}
        # torch picks foreach by exact type, which a Piece is not
        on_cuda = self.stage and group["params"] and group["params"][0].is_cuda
        if on_cuda and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True

    def _record_names(self, optimizer: Optimizer) -> None:
        """Names of all parameters of every group, in order, as one process would number them."""
        known = self.group_names.setdefault(optimizer, [])
        for index, group in enumerate(optimizer.param_groups):
            if index < len(known):
                continue
            for parameter in group["params"]:
                if id(parameter) not in self._names:
                    raise ConfigurationError(
                        f"{type(optimizer).__name__} holds a tensor of shape {tuple(parameter.shape)} that is not a "
                        "parameter of the LightningModule, so its gradient would not be reduced. Register it: "
                        "self.name = nn.Parameter(...)."
                    )
            known.append([self._names[id(p)] for p in group["params"]])

    def _is_new(self, parameter: nn.Parameter) -> bool:
        if self.passive:
            return id(parameter) not in self._held_names
        return parameter.requires_grad and not isinstance(parameter, Piece) and parameter not in self.slots

    def _cut_into_buckets(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> list[Bucket]:
        made: list[Bucket] = []
        run: list[nn.Parameter] = []
        for parameter in [*parameters, None]:
            full = run and (parameter is None or sum(p.nbytes for p in run) + parameter.nbytes > self._bucket_bytes)
            if full:
                named = [(n := self._held_names[id(p)], p, n in self._counted) for p in run]
                bucket = Bucket(
                    named,
                    self.data,
                    sharded=self.stage > 0,
                    whole=self._kinds[optimizer] == "whole",
                    holders=self._holders.get(named[0][0]),
                    windows=frozenset(self._windows.get(named[0][0], ())),
                )
                made.append(bucket)
                run = []
            if parameter is not None:
                run.append(parameter)
        for bucket in made:
            for slot in bucket.slots:
                self.slots[slot.parameter] = slot
                hook = slot.parameter.register_post_accumulate_grad_hook(lambda _, s=slot: self._on_gradient(s))
                self._hooks.append(hook)
        self.buckets += made
        return made

    def _reclaim(self, optimizer: Optimizer) -> None:
        for bucket in self._of_optimizer[optimizer]:
            bucket.reclaim()

    def names_of(self, optimizer: Optimizer) -> list[list[str]]:
        """Names of the parameters of every group, in order, as one process would number them."""
        self._record_names(optimizer)
        return self.group_names[optimizer]

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


def _cut(slot: Slot, value: Any) -> Any:
    """This rank's part of a full-size state tensor; anything else as it is."""
    if not isinstance(value, Tensor) or value.numel() != slot.numel or slot.held is slot.parameter:
        return value
    if slot.bucket.whole:
        return value if slot.owned else value.new_empty(0)
    part = value.detach().reshape(-1)[slot.low : slot.high].clone()
    return part.view(slot.held.shape) if not slot.shape else part
