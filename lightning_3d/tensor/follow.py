"""WHICH weights could be cut?  Follow the user's code once, and decide each weight when it is first multiplied.

The first weight that meets a whole input is *assumed* column-parallel: its output becomes a `ShardedTensor`, and
the rules carry the cut through the user's own code. A weight that meets a cut input at its contraction is row-parallel.
What the rules cannot carry raises `Refuted`; the search (search.py) then changes the assumption and follows again.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from lightning_3d.probe import VALUE_READS, Answers
from lightning_3d.tensor.decisions import Decision
from lightning_3d.tensor.facts import Facts
from lightning_3d.tensor.group import TensorGroup
from lightning_3d.tensor.operands import along_sequence, tensors_in
from lightning_3d.tensor.placement import NoRule, Placement
from lightning_3d.tensor.registry import Args, Kwargs, bind
from lightning_3d.tensor.resolve import reentered
from lightning_3d.tensor.rules_convolution import grouped_placement
from lightning_3d.tensor.sharded import ShardedTensor, is_sharded, merged_sources
from lightning_3d.tensor.weights import (
    CONVOLUTIONS,
    WEIGHT_OPS,
    base_parameter,
    dim_in_base,
    einsum_with_weight,
    feature_dim,
    grouped_mm,
    groups_of,
)

_SPLITS = frozenset(("view", "reshape", "unflatten"))
_LOSSES = frozenset(("cross_entropy", "nll_loss"))
_PICKS = frozenset(("__getitem__", "index_select"))


class Refuted(BaseException):
    """An assumption does not hold. Not an `Exception`: user code must not catch it.

    Args:
        keys: Parameters whose assumption is to blame.
        reason: What happened.
        hints: Segmentations that might work.
        kind: "layout" if another segmentation could help.
        heads: Number of attention heads the ranks cannot share, if that is why.
    """

    def __init__(
        self,
        keys: frozenset[str],
        reason: str,
        hints: Sequence[tuple[int, ...]] = (),
        kind: str = "op",
        heads: int | None = None,
    ) -> None:
        super().__init__(reason)
        self.keys, self.reason, self.hints, self.kind, self.heads = keys, reason, tuple(hints), kind, heads


class Again(BaseException):
    """A weight was decided after parts of it had been used: follow the code again, knowing the decision."""


class Beliefs:
    """What the search believes before a run.

    Attributes:
        replicated: Key -> why it stays whole.
        segments: Key -> segmentation to try.
        copies: Key -> number of ranks that share each of its chunks (fewer heads than ranks).
        pinned: Decisions of an earlier run that ended in `Again`.
    """

    def __init__(self) -> None:
        self.replicated: dict[str, str] = {}
        self.segments: dict[str, tuple[int, ...]] = {}
        self.copies: dict[str, int] = {}
        self.pinned: dict[str, Decision] = {}


class Follow(TorchFunctionMode):
    """One run of the user's step.

    Args:
        facts: Names and demands.
        beliefs: What earlier runs taught.
        names: `id` of the parameters in place now (fake ones) -> key.
        group: The dry group sharded activations of this run belong to.
        smallest_vocabulary: Embeddings and heads with fewer rows stay whole.
        answers: Replies to reads of values that do not exist.

    Attributes:
        decisions: Key -> decision.
        order: Keys in order of first use as a weight.
        used: Keys whose cut reached a row layer -> key of that layer.
        last: Key of the last weight used.
        scored: Keys whose cut output a loss over classes took.
        uses: Key -> how often it was used as a weight.
        extra: Key -> collectives that operations on its cut output need, beyond those of the pair.
        pairs: Whole activation -> the weights of the pair that just made it.
        rows: Rows picked from a whole parameter (biases of experts) -> its key.
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
        super().__init__()
        self.facts, self.beliefs, self.names, self.group = facts, beliefs, names, group
        self.smallest_vocabulary, self.answers = smallest_vocabulary, answers
        self.decisions: dict[str, Decision] = dict(beliefs.pinned)
        self.order: list[str] = []
        self.used: dict[str, str] = {}
        self.last: str | None = None
        self.scored: set[str] = set()
        self.uses: Counter[str] = Counter()
        self.extra: Counter[str] = Counter()
        self.dealt: set[str] = set()
        self.pairs: MutableMapping[Tensor, frozenset[str]] = WeakIdKeyDictionary()
        self.rows: MutableMapping[Tensor, str] = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if func in VALUE_READS:
            unknown = next((a for a in args if is_sharded(a) or isinstance(a, FakeTensor) or _is_meta(a)), None)
            if unknown is not None:
                return self.answers(func, unknown)
        name = getattr(func, "__name__", "")
        if name == "multi_head_attention_forward":
            with self:
                return reentered(func)(*args, **kwargs)
        if name == "embedding":
            self._decide_embedding(args, kwargs)
        elif name == "einsum":
            self._decide_einsum(args)
        elif groups_of(name, args, kwargs) > 1:
            self._decide_groups(args, kwargs)
        elif name in WEIGHT_OPS:
            self._decide(name, args, kwargs)
            self._decide_bias(name, args, kwargs)
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
        return ShardedTensor(cut.to_local(parameter, 0, self.group.size), cut, self.group, frozenset([key]))

    def _key(self, weight: Any) -> str | None:
        parameter = base_parameter(weight)
        return None if parameter is None else self.names.get(id(parameter))

    # ------------------------------------------------------------ decisions
    def _start(self, key: str) -> Decision | None:
        """Note the use of a weight; its decision if there is one, or if the search has settled it."""
        self.last = key
        self.uses[key] += 1
        if key not in self.order:
            self.order.append(key)
        if key in self.decisions:
            return self.decisions[key]
        if key in self.beliefs.replicated:
            self.decisions[key] = Decision("replicated", None, self.beliefs.replicated[key])
            return self.decisions[key]
        return None

    def _decide_embedding(self, args: Args, kwargs: Kwargs) -> None:
        table = base_parameter(args[1] if len(args) > 1 else kwargs.get("weight"))
        key = self._key(table)
        if key is None or table is None or self._start(key) is not None:
            return
        rows, demand = table.shape[0], self.facts.demands.get(key)
        if demand in ("column", "row"):
            raise Refuted(frozenset([key]), f"an embedding table can be 'vocab' or 'replicate', not {demand!r}")
        if demand is None and rows < self.smallest_vocabulary:
            reason = f"embedding of only {rows} rows"
            self.decisions[key] = Decision("replicated", None, reason)
        else:
            cut = Placement(0, (rows,), -rows % self.group.size)
            self.decisions[key] = Decision("vocab", cut, "embedding, cut over the tokens")

    def _decide(self, name: str, args: Args, kwargs: Kwargs) -> None:
        position, out_dim, in_dim = WEIGHT_OPS[name]
        weight: Any = args[position] if len(args) > position else kwargs.get("weight", kwargs.get("mat2"))
        x: Any = args[position - 1] if len(args) > position - 1 else kwargs.get("input")
        if is_sharded(weight):  # a part of a weight that is decided: experts[i]
            shown = self._key(weight.local)
            if shown is not None:
                self.uses[shown] += 1
                if is_sharded(x) and self.decisions[shown].kind == "row":
                    self.used.update((source, shown) for source in x.sources)
            return
        parameter = base_parameter(weight)
        key = self._key(weight)
        if parameter is None or key is None or parameter.ndim < 2:
            return
        before = self._start(key)
        if before is not None and before.kind != "row":
            return
        out, inner = dim_in_base(weight, parameter, out_dim), dim_in_base(weight, parameter, in_dim)
        if out is None or inner is None:
            self.decisions[key] = Decision("replicated", None, "reaches the matmul through a view that is not followed")
            return
        if is_sharded(x) and not along_sequence(x):
            self._meets_cut(key, x, feature_dim(name, x, weight), inner, before)
        elif before is not None:
            return
        elif self.facts.demands.get(key) == "row":
            self.decisions[key] = self._demanded_row(key, parameter.shape[inner], inner)
        else:
            head = weight is parameter and name == "linear"
            self.decisions[key] = self._meets_whole(key, parameter.shape[out], out, head)
        if weight is not parameter and self.decisions[key].placement is not None:
            raise Again

    def _decide_einsum(self, args: Args) -> None:
        """`einsum("btd,dhk->bthk", x, weight)`: outputs are the indices only the weight and the result have."""
        form = einsum_with_weight(args)
        if form is None:
            return
        weight, x, own, other, result = form
        key = self._key(weight)
        if key is None or weight.ndim < 2 or self._start(key) is not None:
            return
        demand = self.facts.demands.get(key)
        shared = [d for d, letter in enumerate(own) if letter in other and letter not in result]
        if isinstance(x, ShardedTensor) and not along_sequence(x):
            if demand in ("column", "vocab"):
                raise Refuted(x.sources, f"{key} is demanded as {demand!r}, and its input must be whole")
            inner = own.find(other[x.placement.dim])
            if inner in shared and not x.placement.padding and x.placement.copies == 1:
                self.used.update((source, key) for source in x.sources)
                self.decisions[key] = Decision("row", x.placement.at(inner), _reads(x.sources))
            return
        if demand == "row":
            if not shared:
                raise Refuted(frozenset([key]), "no index of it is summed over")
            self.decisions[key] = self._demanded_row(key, weight.shape[shared[0]], shared[0])
            return
        outputs = [d for d, letter in enumerate(own) if letter in result and letter not in other]
        if outputs:
            best = next((d for d in outputs if weight.shape[d] % self.group.size == 0), outputs[0])
            self.decisions[key] = self._meets_whole(key, weight.shape[best], best, head=False)

    def _decide_groups(self, args: Args, kwargs: Kwargs) -> None:
        """The weight and the bias of a grouped (depthwise) convolution are cut as the channels they meet."""
        given: dict[str, Any] = bind(("input", "weight", "bias"), args[:3], kwargs)
        x, weight, bias = given["input"], given["weight"], given.get("bias")
        if not isinstance(x, ShardedTensor) or x.placement.dim != feature_dim("conv1d", x, weight):
            return
        with contextlib.suppress(NoRule):
            cut = grouped_placement(x, weight, groups_of("conv1d", args, kwargs))
            for parameter in (weight, bias):
                key = self.names.get(id(parameter))
                if key is not None and key not in self.decisions | self.beliefs.replicated | self.facts.demands:
                    of = ", ".join(sorted(x.sources))
                    self.decisions[key] = Decision("column", cut, f"its groups meet the cut output of {of}")

    def _meets_cut(self, key: str, x: ShardedTensor, features: int, inner: int, before: Decision | None) -> None:
        """A weight on a cut input: row-parallel if the cut is along the contraction."""
        cut, demand = x.placement, self.facts.demands.get(key)
        if demand in ("column", "vocab"):
            raise Refuted(x.sources, f"{key} is demanded as {demand!r}, and its input must be whole")
        if cut.copies > 1:
            raise Refuted(x.sources, f"{key} would contract over a dim of which {cut.copies} ranks hold copies")
        if cut.dim == features and not cut.padding:
            self.used.update((source, key) for source in x.sources)
            if before is None:
                self.decisions[key] = Decision("row", cut.at(inner), _reads(x.sources))
            elif before.placement is None or not before.placement.like(cut):
                raise Refuted(x.sources, f"{key} reads inputs that are cut differently")
        elif before is None:
            if demand == "row":
                raise Refuted(frozenset([key]), f"its input is cut along dim {cut.dim}, not along the features")
            self.decisions[key] = Decision("replicated", None, "its input is cut along another dim than the features")

    def _demanded_row(self, key: str, width: int, inner: int) -> Decision:
        if width % self.group.size:
            raise Refuted(frozenset([key]), f"its {width} inputs are not divisible by {self.group.size} ranks")
        return Decision("row", Placement(inner, (width,)), "demanded; takes its part of a whole input")

    def _meets_whole(self, key: str, width: int, out: int, head: bool) -> Decision:
        """A weight on a whole input: assumed column-parallel, if its outputs can be dealt."""
        size, demand = self.group.size, self.facts.demands.get(key)
        copies = self.beliefs.copies.get(key, 1)
        if copies > 1:
            reason = f"every chunk is held by {copies} of the {size} ranks"
            return Decision("column", Placement(out, (width,), copies=copies), reason)
        if key in self.beliefs.segments:
            return Decision("column", Placement(out, self.beliefs.segments[key]))
        if width % size == 0:
            return Decision("column", Placement(out, (width,)))
        if head and (width >= self.smallest_vocabulary or demand == "vocab"):
            return Decision("column", Placement(out, (width,), -width % size))
        reason = f"its {width} outputs are not divisible by {size} ranks"
        if demand is not None:
            raise Refuted(frozenset([key]), reason)
        return Decision("replicated", None, reason)

    def _decide_bias(self, name: str, args: Args, kwargs: Kwargs) -> None:
        """The bias of a column layer is cut like the outputs."""
        if name == "linear" or name in CONVOLUTIONS:
            weight, bias = args[1] if len(args) > 1 else kwargs.get("weight"), None
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
        elif name == "addmm":
            weight, bias = args[2] if len(args) > 2 else kwargs.get("mat2"), args[0] if args else kwargs.get("input")
        else:
            return
        key = self._key(bias)
        if key is None:
            return
        self.uses[key] += 1
        if key in self.decisions:
            return
        if key in self.beliefs.replicated:  # refuted, or demanded
            self.decisions[key] = Decision("replicated", None, self.beliefs.replicated[key])
            return
        of = next(iter(weight.sources), None) if isinstance(weight, ShardedTensor) else self._key(weight)
        decision = self.decisions.get(of) if of is not None else None
        parameter = base_parameter(bias)
        if decision is None or decision.placement is None or decision.kind not in ("column", "vocab"):
            return
        if parameter is not None and parameter.ndim == 1 and parameter.shape[0] == decision.placement.length:
            self.decisions[key] = Decision("column", decision.placement.at(0), f"bias of {of}")
            if bias is not parameter:
                raise Again


def _is_meta(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_meta


def _reads(keys: frozenset[str]) -> str:
    return f"reads the cut output of {', '.join(sorted(keys))}"
