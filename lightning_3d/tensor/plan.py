"""HOW should an unmodified model be cut?  Assume, follow the user's code, refute, repeat.

Greedy in execution order: `follow.Follow` assumes every weight that meets a whole input to be column-parallel. What the
rules cannot carry refutes an assumption: another segmentation of that weight is tried (a fused q|k|v), else it stays
whole. Every refutation removes one (weight, segmentation), and they occur early in the forward, so this ends soon.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves

from lightning_3d.errors import TensorPlanError
from lightning_3d.probe import Answers, FakeParameters, ModuleState, intercept_functions, retry
from lightning_3d.tensor.decisions import Decision, TensorPlan
from lightning_3d.tensor.facts import Facts, gather_facts
from lightning_3d.tensor.follow import Again, Beliefs, Follow, Refuted
from lightning_3d.tensor.functions import function_guard
from lightning_3d.tensor.group import dry_group
from lightning_3d.tensor.placement import NoRule
from lightning_3d.tensor.replica import silence_logging
from lightning_3d.tensor.sharded import ShardedTensor, along_sequence, is_sharded

Step = Callable[[Any], Any]
_NEEDS_VALUES = (DynamicOutputShapeException, DataDependentOutputException)
_ENOUGH = 0.95
_MOST_RUNS = 400


def plan_tensor_parallel(
    module: nn.Module,
    step: Step,
    size: int,
    *,
    overrides: Mapping[str, str] | None = None,
    sequence: bool = False,
    strict: float | None = None,
    smallest_vocabulary: int = 65,
    device: torch.device | None = None,
) -> TensorPlan:
    """Decide how every parameter of `module` is cut over `size` ranks.

    Nothing is computed: parameters are fake while `step` runs, values that do not depend on them stay real, and the
    module and the random state are left as they were. The plan does not depend on the rank.

    Args:
        module: The whole model, on any device (also meta).
        step: Runs the user's step on a real batch: `lambda m: m.training_step(batch, 0)`. It must be repeatable.
        size: Number of tensor-parallel ranks.
        overrides: Pattern (fnmatch, on parameter names and module paths) -> "column", "row", "vocab" or "replicate".
            The last pattern that matches a parameter counts.
        sequence: Cut activations between blocks along dim -2 (sequence parallelism).
        strict: Least fraction of the parameters that must be cut.
        smallest_vocabulary: Embeddings and heads with fewer rows stay whole.
        device: Where the fake parameters are; default: where the module's parameters are (meta: CPU).

    Returns:
        The plan; whatever could not be cut is "replicated", with the reason.

    Raises:
        TensorPlanError: An override matches nothing or is refuted by the user's code, a parameter is already cut, less
            than `strict` could be cut, or shapes depend on values that a meta model does not have.

    Collectives: none.
    """
    begin = time.perf_counter()
    facts = gather_facts(module, overrides or {})
    if device is None:
        device = next((p.device for p in facts.names.values() if not p.is_meta), torch.device("cpu"))
    best: TensorPlan | None = None
    runs = 0
    for relaxed in (False, True):
        search = _Search(module, step, size, facts, sequence, not relaxed, smallest_vocabulary, device)
        plan = search.run()
        runs += plan.runs
        # first without reductions over cut features: a norm between two linears breaks their pair. Only if that leaves
        # much whole, with them (a norm over all heads costs one small all-reduce)
        if best is None or plan.sharded_fraction > best.sharded_fraction + 0.01:
            best = plan
        if best.sharded_fraction >= _ENOUGH:
            break
    assert best is not None
    best.runs, best.seconds = runs, time.perf_counter() - begin
    if strict is not None and best.sharded_fraction < strict:
        raise TensorPlanError(
            f"only {best.sharded_fraction:.1%} of the parameters can be cut over {size} tensor-parallel ranks; at "
            f"least {strict:.1%} was asked for. What stays whole, and why:\n"
            + "\n".join(f"  {r.pattern} {r.shape}: {r.reason}" for r in best.rows() if r.kind == "replicated")
        )
    return best


class _Search:
    """All runs of one pass."""

    def __init__(
        self,
        module: nn.Module,
        step: Step,
        size: int,
        facts: Facts,
        sequence: bool,
        strict: bool,
        smallest_vocabulary: int,
        device: torch.device,
    ) -> None:
        self.module, self.step, self.facts, self.device = module, step, facts, device
        self.smallest_vocabulary = smallest_vocabulary
        self.group = dry_group(size, sequence_dim=-2 if sequence else None)
        self.group.strict = strict
        self.group.on_gather, self.group.on_whole = self._on_gather, self._on_whole
        self.beliefs = Beliefs()
        self.tried: dict[str, list[tuple[int, ...]]] = {}
        self.history: dict[str, list[str]] = {}
        self.not_heads: set[str] = set()
        self.heads: set[str] = set()
        self.delivered: set[str] = set()  # sources of activations that were gathered
        self.follow: Follow
        self.runs = 0
        self.used_values = False
        for key, demand in facts.demands.items():
            if demand == "replicate":
                self.beliefs.replicated[key] = f"demanded by {facts.demanded_by[key]!r}"

    # ------------------------------------------------------------ runs
    def run(self) -> TensorPlan:
        """Follow until nothing is refuted."""
        with ExitStack() as stack:
            stack.enter_context(_untouched(self.module))
            fakes = stack.enter_context(FakeParameters(self.module, self.device))
            try:
                return self._settle({i: self.facts.key_of[id(self.facts.names[n])] for i, n in fakes.names.items()})
            except _NEEDS_VALUES as error:
                reason = error
        meta = next((n for n, p in self.facts.names.items() if p.is_meta), None)
        if meta is not None:
            raise TensorPlanError(
                f"the step has shapes that depend on values ({reason}), so planning needs real parameters, but {meta} "
                "is on the meta device. Materialise the model, or exclude the module with an override 'replicate'."
            ) from reason
        self.used_values = True
        with _untouched(self.module):
            return self._settle({id(p): self.facts.key_of[id(p)] for p in self.facts.names.values()})

    def _settle(self, names: dict[int, str]) -> TensorPlan:
        state = ModuleState(self.module)
        while True:
            self.runs += 1
            assert self.runs <= _MOST_RUNS, "the tensor planner does not come to an end"
            self.heads.clear()
            self.group.conversions = 0
            self.delivered.clear()
            try:
                retry(lambda answers: self._once(names, answers), (*_NEEDS_VALUES, TensorPlanError))
                self._check_ends()
            except Again:
                self.beliefs.pinned = dict(self.follow.decisions)
                continue
            except Refuted as refuted:
                self.beliefs.pinned = {}
                self._learn(refuted)
                continue
            finally:
                state.restore()
            return self._plan()

    def _once(self, names: dict[int, str], answers: Answers) -> None:
        """One run of the user's step."""
        self.follow = Follow(self.facts, self.beliefs, names, self.group, self.smallest_vocabulary, answers)
        with warnings.catch_warnings(), intercept_functions(function_guard, 1), self.follow:
            warnings.simplefilter("ignore")
            output = self.step(self.module)
        if isinstance(output, Mapping):
            output = dict(output)
        for leaf in tree_leaves(output):
            if is_sharded(leaf) and not along_sequence(leaf):
                self.heads |= leaf.sources

    # ------------------------------------------------------------ refutation
    def _on_gather(self, sources: frozenset[str], name: str, why: NoRule, operands: Sequence[ShardedTensor]) -> None:
        """An operation without a rule met a cut activation."""
        blamed = frozenset(sources)
        if not blamed:  # only sequence parallelism: gathering is right
            return
        if len(blamed) == 1 and self._may_end_here(next(iter(blamed)), why):
            self.heads |= blamed
            return
        pair = self.follow.pairs.get(why.partner, frozenset()) if why.partner is not None else frozenset()
        groups = {x.sources for x in operands if x.sources}
        if pair and sum(map(self.facts.elements, pair)) < sum(map(self.facts.elements, blamed)):
            blamed = frozenset(k for k in pair if self.follow.decisions[k].kind == "column")
        elif len(groups) > 1:  # operands disagree: give up the cheapest first (key/value heads before the query)
            free = [g for g in groups if not g & self.facts.demands.keys()] or list(groups)
            blamed = min(free, key=lambda g: sum(map(self.facts.elements, g)))
        shapes = ", ".join(str(tuple(x.shape)) for x in operands)
        raise Refuted(self._culprit(blamed), f"{name} of {shapes}: {why}", why.hints, why.kind)

    def _on_whole(self, cut: ShardedTensor, gathered: Tensor) -> None:
        self.delivered |= cut.sources
        if cut in self.follow.pairs:
            self.follow.pairs[gathered] = self.follow.pairs[cut]

    def _culprit(self, blamed: frozenset[str]) -> frozenset[str]:
        """Of several assumptions that met: the earliest one the user did not demand; the later get another chance."""
        free = blamed - self.facts.demands.keys() or blamed
        order = self.follow.order
        return frozenset([min(free, key=lambda k: order.index(k) if k in order else len(order))])

    def _may_end_here(self, key: str, why: NoRule) -> bool:
        """Cut logits may be gathered: the vocabulary, or the last weight with many outputs."""
        if self.follow.decisions[key].kind == "vocab":
            return True
        last = self.follow.last == key and key not in self.not_heads
        return last and self._like_head(key) and why.kind != "layout" and why.partner is None

    def _like_head(self, key: str) -> bool:
        decision, shape = self.follow.decisions[key], self.facts.shapes[key]
        if decision.kind == "vocab" or self.facts.demands.get(key) == "vocab":
            return True
        assert decision.placement is not None
        return len(shape) == 2 and shape[decision.placement.dim] >= 2 * shape[1 - decision.placement.dim]

    def _check_ends(self) -> None:
        """Every column weight must have reached a row weight, unless it is a head."""
        follow = self.follow
        ends = {k for k in self.heads if follow.decisions[k].kind != "vocab"}
        wrong = {k for k in ends if follow.last != k or not self._like_head(k)}
        self.not_heads |= wrong
        columns = {k for k, d in follow.decisions.items() if d.kind == "column" and k in follow.order}
        delivered = {k for k in self.delivered if k in self.facts.demands}
        lonely = {
            k
            for k in columns - follow.used.keys() - self.heads - delivered
            if not (follow.last == k and self._like_head(k))
        }
        unmet = (wrong - delivered) or lonely
        if unmet:
            raise Refuted(frozenset(unmet), "its cut output never reaches a row-parallel layer")
        for key, demand in self.facts.demands.items():
            if demand != "replicate" and key not in follow.order:
                raise TensorPlanError(
                    f"override {self.facts.demanded_by[key]!r}: {demand!r}, but {_plain(key)} "
                    f"{self.facts.shapes[key]} is not used as the weight of a matrix product or an embedding in this "
                    "step. Only 'replicate' is possible for it."
                )

    def _learn(self, refuted: Refuted) -> None:
        """Another segmentation of the blamed weights, else they stay whole."""
        for key in refuted.keys:
            decision = self.follow.decisions.get(key)
            segments = self._other_segments(key, decision, refuted)
            self.history.setdefault(key, []).append(refuted.reason)
            if segments is not None:
                self.tried.setdefault(key, []).append(segments)
                self.beliefs.segments[key] = segments
                continue
            demand = self.facts.demands.get(key)
            if demand not in (None, "replicate"):
                raise TensorPlanError(
                    f"override {self.facts.demanded_by[key]!r}: {demand!r} cannot be done for {_plain(key)} of shape "
                    f"{self.facts.shapes[key]} over {self.group.size} ranks: {refuted.reason}. Remove the override, or "
                    "use 'replicate'."
                )
            self.beliefs.segments.pop(key, None)
            self.beliefs.replicated[key] = "; then ".join(dict.fromkeys(self.history[key]))

    def _other_segments(self, key: str, decision: Decision | None, refuted: Refuted) -> tuple[int, ...] | None:
        if refuted.kind != "layout" or decision is None or decision.placement is None or decision.kind != "column":
            return None
        n, size = decision.placement.length, self.group.size
        for segments in [*refuted.hints, (n // 3,) * 3, (n // 2,) * 2]:
            fits = sum(segments) == n and all(s and s % size == 0 for s in segments)
            if fits and segments != (n,) and segments not in self.tried.get(key, []):
                return segments
        return None

    # ------------------------------------------------------------ result
    def _plan(self) -> TensorPlan:
        plan = TensorPlan(
            self.group.size,
            sequence=self.group.sequence_dim is not None,
            runs=self.runs,
            conversions=self.group.conversions,
            used_values=self.used_values,
        )
        first: dict[int, str] = {}
        for name, parameter in self.facts.names.items():
            if first.setdefault(id(parameter), name) != name:
                plan.aliases[name] = first[id(parameter)]
            plan.decisions[name] = self._decision(self.facts.key_of[id(parameter)])
            plan.shapes[name] = tuple(parameter.shape)
            plan.patterns[name] = self.facts.patterns[name]
        return plan

    def _decision(self, key: str) -> Decision:
        decision = self.follow.decisions.get(key)
        if decision is None:
            reason = self.beliefs.replicated.get(key, "")
            if not reason and len(self.facts.shapes[key]) > 1:
                reason = "not used as a weight of a matrix product in this step"
            return Decision("replicated", None, _plain(reason))
        reason = decision.reason
        if decision.kind == "column" and not reason:
            target = self.follow.used.get(key)
            reason = f"feeds {target}" if target else "logits stay cut"
        return Decision(decision.kind, decision.placement, _plain(reason))


def _plain(text: str) -> str:
    """Without the marks that keep demanded parameters apart."""
    for kind in ("column", "row", "vocab", "replicate"):
        text = text.replace(f" [{kind}]", "")
    return text


@contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    """Module state, buffers and random state as before; a LightningModule's `log` does nothing meanwhile."""
    state = ModuleState(module)
    buffers: list[tuple[Tensor, int, Tensor]] = [
        (b, b._version, b.detach().clone()) for b in module.buffers() if not b.is_meta and not b.is_inference()
    ]
    devices = {b.device for b in (*module.buffers(), *module.parameters()) if b.device.type == "cuda"}
    with torch.random.fork_rng(devices=[d.index for d in devices]):
        silence_logging(module)
        try:
            yield
        finally:
            state.restore()
            with torch.no_grad():
                for buffer, version, value in buffers:
                    if buffer._version != version:
                        buffer.copy_(value)
