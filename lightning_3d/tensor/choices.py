"""WHAT becomes of a weight when it is first used?  Column on a whole input, row on a cut one, or as what it meets."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from typing import Any

from lightning_3d.tensor.beliefs import Again, Beliefs, Refuted
from lightning_3d.tensor.decisions import Decision
from lightning_3d.tensor.facts import Facts
from lightning_3d.tensor.group import TensorGroup
from lightning_3d.tensor.operands import along_sequence
from lightning_3d.tensor.placement import NoRule, Placement
from lightning_3d.tensor.registry import Args, Kwargs, bind
from lightning_3d.tensor.rules_convolution import grouped_placement
from lightning_3d.tensor.sharded import ShardedTensor, is_sharded
from lightning_3d.tensor.weights import (
    CONVOLUTIONS,
    WEIGHT_OPS,
    base_parameter,
    dim_in_base,
    einsum_with_weight,
    feature_dim,
    groups_of,
)


class Choices:
    """The decisions of one run of the user's step, made in the order of execution.

    Args:
        facts: Names and demands.
        beliefs: What earlier runs taught.
        names: `id` of the parameters in place now (fake ones) -> key.
        group: The dry group sharded activations of this run belong to.
        smallest_vocabulary: Embeddings and heads with fewer rows stay whole.

    Attributes:
        decisions: Key -> decision.
        order: Keys in order of first use as a weight.
        used: Keys whose cut reached a row layer -> key of that layer.
        last: Key of the last weight used.
        uses: Key -> how often it was used as a weight.
    """

    def __init__(
        self, facts: Facts, beliefs: Beliefs, names: dict[int, str], group: TensorGroup, smallest_vocabulary: int
    ) -> None:
        self.facts, self.beliefs, self.names, self.group = facts, beliefs, names, group
        self.smallest_vocabulary = smallest_vocabulary
        self.decisions: dict[str, Decision] = dict(beliefs.pinned)
        self.order: list[str] = []
        self.used: dict[str, str] = {}
        self.last: str | None = None
        self.uses: Counter[str] = Counter()

    def choose(self, name: str, args: Args, kwargs: Kwargs) -> None:
        """Decide the parameters an operation uses as weights, where they are not decided yet."""
        if name == "embedding":
            self._decide_embedding(args, kwargs)
        elif name == "einsum":
            self._decide_einsum(args)
        elif groups_of(name, args, kwargs) > 1:
            self._decide_groups(args, kwargs)
        elif name in WEIGHT_OPS:
            self._decide(name, args, kwargs)
            self._decide_bias(name, args, kwargs)

    def _key(self, weight: Any) -> str | None:
        parameter = base_parameter(weight)
        return None if parameter is None else self.names.get(id(parameter))

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
                self.last = shown
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
            return self._shared(width, out, copies)
        if key in self.beliefs.segments:
            cut = Placement(out, self.beliefs.segments[key], shares=self.beliefs.shares.get(key, ()))
            return Decision("column", cut)
        if width % size == 0:
            return Decision("column", Placement(out, (width,)))
        if head and (width >= self.smallest_vocabulary or demand == "vocab"):
            return Decision("column", Placement(out, (width,), -width % size))
        reason = f"its {width} outputs are not divisible by {size} ranks"
        if demand is not None:
            raise Refuted(frozenset([key]), reason)
        groups = math.gcd(width, size)
        if groups > 1:  # few key/value heads, narrow ones; a pair of layers will refute it
            return self._shared(width, out, size // groups)
        return Decision("replicated", None, reason)

    def _shared(self, width: int, out: int, copies: int) -> Decision:
        reason = f"every chunk is held by {copies} of the {self.group.size} ranks"
        return Decision("column", Placement(out, (width,), copies=copies), reason)

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
        of = min(weight.sources, default=None) if isinstance(weight, ShardedTensor) else self._key(weight)
        decision = self.decisions.get(of) if of is not None else None
        parameter = base_parameter(bias)
        if decision is None or decision.placement is None or decision.kind not in ("column", "vocab"):
            return
        if parameter is not None and parameter.ndim == 1 and parameter.shape[0] == decision.placement.length:
            self.decisions[key] = Decision("column", decision.placement.at(0), f"bias of {of}")
            if bias is not parameter:
                raise Again


def _reads(keys: frozenset[str]) -> str:
    return f"reads the cut output of {', '.join(sorted(keys))}"
