"""WHICH weights could be cut?  Follow the user's code once, and decide each weight when it is first multiplied.

The first weight that meets a whole input is *assumed* column-parallel: its output becomes a `ShardedTensor`, and
the rules carry the cut through the user's own code. A weight that meets a cut input at its contraction is row-parallel.
What the rules cannot carry raises `Refuted`; the search (search.py) then changes the assumption and follows again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from lightning_3d.probe import VALUE_READS, Answers
from lightning_3d.tensor.beliefs import Again, Beliefs, Refuted
from lightning_3d.tensor.choices import Choices
from lightning_3d.tensor.decisions import Decision
from lightning_3d.tensor.facts import Facts
from lightning_3d.tensor.group import TensorGroup
from lightning_3d.tensor.operands import along_sequence, tensors_in
from lightning_3d.tensor.placement import Placement
from lightning_3d.tensor.registry import Args, Kwargs
from lightning_3d.tensor.resolve import reentered
from lightning_3d.tensor.sharded import ShardedTensor, is_sharded, merged_sources, storage_of, write_into_lent
from lightning_3d.tensor.weights import WEIGHT_OPS, grouped_mm

__all__ = ["Again", "Beliefs", "Follow", "Refuted"]

_SPLITS = frozenset(("view", "reshape", "unflatten"))
_LOSSES = frozenset(("cross_entropy", "nll_loss"))
_PICKS = frozenset(("__getitem__", "index_select"))


class Follow(Choices, TorchFunctionMode):
    """One run of the user's step.

    Args:
        facts, beliefs, names, group, smallest_vocabulary: See `Choices`.
        answers: Replies to reads of values that do not exist.

    Attributes:
        scored: Keys whose cut output a loss over classes took.
        extra: Key -> collectives that operations on its cut output need, beyond those of the pair.
        dealt: Keys whose output the code splits into heads, which the ranks share.
        pairs: Whole activation -> the weights of the pair that just made it.
        rows: Rows picked from a whole parameter (biases of experts) -> its key.
        storages: Storage of a parameter -> its key, to know it again inside of `torch.func` transforms.
        observe: Hears of every operation on cut tensors, before it happens.
    """

    observe: Callable[[Any, Args, Kwargs], None] | None = None

    def __init__(
        self,
        facts: Facts,
        beliefs: Beliefs,
        names: dict[int, str],
        group: TensorGroup,
        smallest_vocabulary: int,
        answers: Answers,
    ) -> None:
        TorchFunctionMode.__init__(self)
        Choices.__init__(self, facts, beliefs, names, group, smallest_vocabulary)
        self.answers = answers
        self.scored: set[str] = set()
        self.extra: Counter[str] = Counter()
        self.dealt: set[str] = set()
        self.pairs: MutableMapping[Tensor, frozenset[str]] = WeakIdKeyDictionary()
        self.rows: MutableMapping[Tensor, str] = WeakIdKeyDictionary()
        self.storages: dict[int, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        transform = active_transform()
        if transform is not None:
            self._leave_whole(transform, args, kwargs)
        if func in VALUE_READS:
            unknown = next((a for a in args if is_sharded(a) or isinstance(a, FakeTensor) or _is_meta(a)), None)
            if unknown is not None:
                return self.answers(func, unknown)
        name = getattr(func, "__name__", "")
        if name == "__set__" and func.__self__ is Tensor.grad and isinstance(args[0], nn.Parameter):
            return _set_gradient(args[0], args[1])
        if name == "multi_head_attention_forward":
            with self:
                return reentered(func)(*args, **kwargs)
        lent = write_into_lent(name, args, kwargs, func, self.group)
        if lent:
            raise Refuted(lent, f"{name} changes a part of it in place that had to be gathered")
        self.choose(name, args, kwargs)
        args, kwargs = tree_map_only(nn.Parameter, self._shown, (tuple(args), kwargs))
        if self.observe is not None and any(map(is_sharded, tensors_in(args, kwargs))):
            self.observe(func, args, kwargs)
        before = self.group.conversions + self.group.entries
        out = grouped_mm(func, args, kwargs) if "grouped_mm" in name else func(*args, **kwargs)
        if isinstance(out, Tensor) and (not is_sharded(out) or along_sequence(out)):
            self._trace_pair(name, args, kwargs, out)
            if name in _PICKS:
                self._trace_rows(args[0], out)
        elif name in _SPLITS and is_sharded(out) and out.ndim > args[0].ndim:
            self.dealt |= out.sources  # a cut dim became (heads, size of a head)
        if name in _LOSSES:
            self.scored |= merged_sources(tensors_in(args, kwargs))
        extra = self.group.conversions + self.group.entries - before
        if extra and name not in WEIGHT_OPS:
            self.extra.update(dict.fromkeys(merged_sources(tensors_in(args, kwargs)), extra))
        return out

    def _leave_whole(self, transform: str, args: Args, kwargs: Kwargs) -> None:
        """Nothing is cut inside of a transform of torch, which knows neither shards nor collectives.

        Raises:
            Refuted: Something that is used there is cut.
        """
        for leaf in tree_leaves((args, kwargs)):
            if not isinstance(leaf, Tensor):
                continue
            inner = unwrapped(leaf)
            reason = f"it is used inside of {transform}, which cannot be done on shards"
            if isinstance(inner, ShardedTensor):
                raise Refuted(inner.sources, reason)
            key = self.names.get(id(inner)) or self.storages.get(storage_of(inner))
            if key is None or key in self.beliefs.replicated:
                continue
            decided = self.decisions.get(key)
            if key in self.facts.demands or (decided is not None and decided.placement is not None):
                raise Refuted(frozenset([key]), reason)
            self.beliefs.replicated[key] = reason

    def _trace_pair(self, name: str, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        """Remember which weights a whole activation was just made of: a column and a row layer, then only scaling.

        If it is then added to a cut activation (a low-rank adapter beside a large layer), the smaller one gives way.
        """
        found = tensors_in(args, kwargs)
        multiplied = name in WEIGHT_OPS and self.last in self.decisions
        if multiplied and self.last is not None and self.decisions[self.last].kind == "row":
            sources = merged_sources(found)
            if self.last in sources:
                self.pairs[out] = sources
        elif len(found) == 1 and found[0] in self.pairs:
            self.pairs[out] = self.pairs[found[0]]

    def _trace_rows(self, table: Any, out: Tensor) -> None:
        """Remember what was picked from a table: if it meets a cut activation, the table is cut alike."""
        key = self.names.get(id(table)) if isinstance(table, nn.Parameter) else None
        if key is not None and table.ndim > 1 and out.ndim and out.shape[-1] == table.shape[-1]:
            self.rows[out] = key

    def follow_along(self, rows: Tensor, cut: Placement, sources: frozenset[str]) -> None:
        """`rows` of a table are combined with an activation cut along the features: cut the table like it.

        Raises:
            Again: The table is decided now, after rows of it had been used.
        """
        key = self.rows.get(rows)
        if key is None or key in self.decisions or key in self.beliefs.replicated or key in self.facts.demands:
            return
        of = ", ".join(sorted(sources))
        last = len(self.facts.shapes[key]) - 1
        self.decisions[key] = Decision("column", cut.at(last), f"its rows meet the cut output of {of}")
        raise Again

    # ------------------------------------------------------------ parameters
    def _shown(self, parameter: Any) -> Any:
        """A parameter as its decision shows it."""
        key = self.names.get(id(parameter))
        decision = self.decisions.get(key) if key is not None else None
        if key is None or decision is None or decision.placement is None:
            return parameter
        cut = decision.placement
        if parameter.shape[cut.dim] != cut.length:
            raise Refuted(frozenset([key]), f"{key}: its shape differs between blocks")
        shown = ShardedTensor(cut.to_local(parameter, 0, self.group.size), cut, self.group, frozenset([key]))
        with torch._C.DisableTorchFunction():  # this is no operation of the step
            if parameter.grad is not None:  # manual optimization looks at it
                shown.local.grad = cut.to_local(parameter.grad, 0, self.group.size)
        return shown


def _set_gradient(parameter: nn.Parameter, value: Tensor | None) -> None:
    """`p.grad = ...` in a step that is followed: there is a gradient of the parameter's shape, or none."""
    with torch._C.DisableTorchFunction():
        parameter.grad = None if value is None else torch.zeros_like(parameter)


def active_transform() -> str | None:
    """The transform of torch that is running: `torch.func.vmap`, `grad`, `jvp`, or forward-mode differentiation."""
    interpreter: Any = torch._C._functorch.peek_interpreter_stack()
    if interpreter is not None:
        return f"a torch.func transform ({interpreter.key().name})"
    return "forward-mode differentiation" if forward_ad._current_level >= 0 else None


def unwrapped(x: Tensor) -> Tensor:
    """The tensor a transform of torch has wrapped, however often."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def _is_meta(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_meta
