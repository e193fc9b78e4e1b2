"""WHO is to blame, and what next?  The search for a plan: follow the user's step, refute, believe something else.

Every refutation removes one (weight, segmentation) and every run that is repeated has decided one weight more, so the
search comes to an end; refutations come early in the forward, so most runs are short.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves

from lightning_3d.errors import TensorPlanError
from lightning_3d.probe import Answers, ModuleState, PythonState, intercept_functions, own_parameters, retry
from lightning_3d.tensor.decisions import Decision, TensorPlan
from lightning_3d.tensor.facts import Facts
from lightning_3d.tensor.follow import Again, Beliefs, Follow, Refuted
from lightning_3d.tensor.functions import function_guard
from lightning_3d.tensor.group import dry_group
from lightning_3d.tensor.operands import along_sequence
from lightning_3d.tensor.placement import NoRule
from lightning_3d.tensor.sharded import ShardedTensor, is_sharded, storage_of

Step = Callable[[Any], Any]
_MOST_EXTRA = 8  # collectives per use of a weight, beyond those of its pair
LONELY = "its cut output never reaches a row-parallel layer"
FATAL = (DynamicOutputShapeException, DataDependentOutputException, TensorPlanError)
"""Errors that no other answer to a value read cures."""


class Search:
    """What is believed, and the runs that change it.

    Args:
        module: The model, whole.
        step: Runs the user's step.
        size: Number of ranks.
        facts: Names and demands.
        sequence: Row layers leave their output cut along the sequence.
        strict: No reductions over cut features.
        smallest_vocabulary: Embeddings and heads with fewer rows stay whole.
    """

    def __init__(
        self,
        module: nn.Module,
        step: Step,
        size: int,
        facts: Facts,
        sequence: bool,
        strict: bool,
        smallest_vocabulary: int,
    ) -> None:
        self.module, self.step, self.facts = module, step, facts
        self.smallest_vocabulary = smallest_vocabulary
        self.group = dry_group(size, sequence_dim=-2 if sequence else None)
        self.group.strict = strict
        self.group.on_gather, self.group.on_whole = self._on_gather, self._on_whole
        self.beliefs = Beliefs()
        self.tried: dict[str, list[tuple[int, ...]]] = {}
        self.later: dict[str, list[tuple[int, ...]]] = {}  # what hints could mean, too
        self.history: dict[str, list[str]] = {}
        self.heads_of: dict[str, int] = {}  # weights whose attention heads the ranks cannot share
        self.shared: set[str] = set()  # weights whose chunks were once shared by groups of ranks
        self.gathered: dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {}  # and what was tried of that
        self.fused: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # segments, shares to try at last
        self.not_heads: set[str] = set()
        self.heads: set[str] = set()
        self.delivered: set[str] = set()  # sources of activations that were gathered
        self.follow: Follow
        self.runs = 0
        for key, demand in facts.demands.items():
            if demand == "replicate":
                self.beliefs.replicated[key] = f"demanded by {facts.demanded_by[key]!r}"

    # ------------------------------------------------------------ runs
    def settle(self, names: dict[int, str], start: PythonState) -> TensorPlan:
        """Follow until nothing is refuted.

        Args:
            names: `id` of the parameters that are in place now -> key.
            start: The Python state every run begins with.
        """
        state = ModuleState(self.module)
        while True:
            self.runs += 1
            self.heads.clear()
            self.group.conversions = 0
            self.group.lent.clear()
            self.delivered.clear()
            try:
                retry(lambda answers: self._once(names, start, answers), FATAL)
                self._check_ends()
            except Again:
                pinned = dict(self.follow.decisions)
                if pinned == self.beliefs.pinned:
                    raise _no_end(pinned.keys() & self.follow.order[-1:], "it is decided again and again") from None
                self.beliefs.pinned = pinned
                continue
            except Refuted as refuted:
                self.beliefs.pinned = {}
                if not refuted.keys - self.beliefs.replicated.keys():
                    raise _no_end(refuted.keys, refuted.reason) from None
                self._learn(refuted)
                continue
            finally:
                state.restore()
            return self._plan()

    def _once(self, names: dict[int, str], start: PythonState, answers: Answers) -> None:
        """One run of the user's step."""
        start.restore()
        self.follow = Follow(self.facts, self.beliefs, names, self.group, self.smallest_vocabulary, answers)
        self.follow.storages = {storage_of(p): names[id(p)] for p in own_parameters(self.module) if id(p) in names}
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
        if len(blamed) == 1 and not why.fatal and self._may_end_here(next(iter(blamed)), why):
            self.heads |= blamed
            return
        if why.partner is not None:
            self.follow.follow_along(why.partner, operands[0].placement, operands[0].sources)
        pair = self.follow.pairs.get(why.partner, frozenset()) if why.partner is not None else frozenset()
        groups = list(dict.fromkeys(x.sources for x in operands if x.sources))  # sets of names differ in order by rank
        if pair and sum(map(self.facts.elements, pair)) < sum(map(self.facts.elements, blamed)):
            blamed = frozenset(k for k in pair if self.follow.decisions[k].kind == "column")
        elif len(groups) > 1:  # operands disagree: give up the cheapest first (key/value heads before the query)
            free = [g for g in groups if not g & self.facts.demands.keys()] or groups
            curable = [g for g in free if any(self._untried(k, why, guesses=False) for k in self._culprit(g))]
            blamed = min(curable or free, key=lambda g: sum(map(self.facts.elements, g)))
        shapes = ", ".join(str(tuple(x.shape)) for x in operands)
        lengths = frozenset(x.placement.length for x in operands if x.sources & blamed)
        raise Refuted(self._culprit(blamed), f"{name} of {shapes}: {why}", why.hints, why.kind, why.heads, lengths)

    def _untried(self, key: str, why: NoRule | Refuted, guesses: bool) -> list[tuple[int, ...]]:
        """Segmentations of a column weight that hints (or guesses: thirds, halves) suggest and that were not tried."""
        decision = self.follow.decisions.get(key)
        if why.kind != "layout" or decision is None or decision.placement is None or decision.kind != "column":
            return []
        n, size = decision.placement.length, self.group.size
        # heads that cannot be dealt: cutting each of them would cost a sum over all attention scores
        fitted = _fitted if why.heads is None else _only_whole
        found = [segments for hint in why.hints for segments in fitted(hint, decision.placement.segments)]
        found += [(n // 3,) * 3, (n // 2,) * 2] if guesses else []
        known = [(n,), *self.tried.get(key, [])]
        return [s for s in found if sum(s) == n and all(k and k % size == 0 for k in s) and s not in known]

    def _on_whole(self, cut: ShardedTensor, gathered: Tensor) -> None:
        self.delivered |= cut.sources
        if cut in self.follow.pairs:
            self.follow.pairs[gathered] = self.follow.pairs[cut]

    def _culprit(self, blamed: frozenset[str]) -> frozenset[str]:
        """Of several assumptions that met: the earliest one the user did not demand; the later get another chance."""
        free = blamed - self.facts.demands.keys() or blamed
        order = self.follow.order
        return frozenset([min(free, key=lambda k: (order.index(k) if k in order else len(order), k))])

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

    def _scored_head(self, key: str) -> bool:
        """A loss took its cut logits, and they are many."""
        decision = self.follow.decisions[key]
        enough = decision.placement is not None and decision.placement.length >= self.smallest_vocabulary
        return enough and key in self.follow.scored

    def _check_ends(self) -> None:
        """Every column weight must have reached a row weight, unless it is a head."""
        follow = self.follow
        ends = {k for k in self.heads if follow.decisions[k].kind != "vocab" and not self._scored_head(k)}
        wrong = {k for k in ends if follow.last != k or not self._like_head(k)}
        self.not_heads |= wrong
        columns = {k for k, d in follow.decisions.items() if d.kind == "column" and k in follow.order}
        delivered = {k for k in self.delivered if k in self.facts.demands}
        lonely = {
            k
            for k in columns - follow.used.keys() - self.heads - delivered
            if not (follow.last == k and self._like_head(k)) and not self._scored_head(k)
        }
        unmet = (wrong - delivered) or lonely
        if unmet:
            raise Refuted(frozenset(unmet), LONELY)
        # code that steps through a sequence with a cut state would communicate at every step
        costly = {
            k
            for k, n in follow.extra.items()
            if n > _MOST_EXTRA * max(1, follow.uses[k]) and k not in self.facts.demands
        }
        if costly:
            key = next(iter(self._culprit(frozenset(costly))))
            count = follow.extra[key] / max(1, follow.uses[key])
            raise Refuted(frozenset([key]), f"its cut output would need about {count:.0f} more collectives each time")
        for key, demand in self.facts.demands.items():
            if demand != "replicate" and key not in follow.order:
                raise TensorPlanError(
                    f"override {self.facts.demanded_by[key]!r}: {demand!r}, but {_plain(key)} "
                    f"{self.facts.shapes[key]} is not used as the weight of a matrix product or an embedding in this "
                    "step. Only 'replicate' is possible for it."
                )

    def _learn(self, refuted: Refuted) -> None:
        """Another segmentation of the blamed weights, else they stay whole."""
        for key in sorted(refuted.keys):
            decision = self.follow.decisions.get(key)
            others = self._untried(key, refuted, guesses=True)
            self.history.setdefault(key, self._uneven(decision)).append(refuted.reason)
            if refuted.heads is not None:
                self.heads_of[key] = refuted.heads
            shares = self._shared_pieces(key, decision, refuted)
            if shares is not None and refuted.heads is not None:
                self._believe_shares(key, *shares)
                continue
            if shares is not None:
                self.fused.setdefault(key, shares)
            copies = self._shared_chunks(key, decision, refuted)
            if copies is not None:
                self.beliefs.copies[key] = copies
                self.beliefs.segments.pop(key, None)
                self.beliefs.shares.pop(key, None)
                continue
            if others:
                self.later.setdefault(key, []).extend(self._untried(key, refuted, guesses=False)[1:])
            others = others or [s for s in self.later.get(key, ()) if s not in self.tried[key]]
            if others:
                self.tried.setdefault(key, []).append(others[0])
                self.beliefs.segments[key] = others[0]
                self.beliefs.copies.pop(key, None)
                self.beliefs.shares.pop(key, None)
                continue
            if key in self.fused:
                self._believe_shares(key, *self.fused.pop(key))
                continue
            demand = self.facts.demands.get(key)
            if demand not in (None, "replicate"):
                raise TensorPlanError(
                    f"override {self.facts.demanded_by[key]!r}: {demand!r} cannot be done for {_plain(key)} of shape "
                    f"{self.facts.shapes[key]} over {self.group.size} ranks: {refuted.reason}. Remove the override, or "
                    "use 'replicate'."
                )
            self.beliefs.segments.pop(key, None)
            self.beliefs.copies.pop(key, None)
            self.beliefs.shares.pop(key, None)
            self.beliefs.replicated[key] = "; then ".join(dict.fromkeys(self.history[key]))

    def _uneven(self, decision: Decision | None) -> list[str]:
        """Why chunks were shared before anything was refuted."""
        cut = None if decision is None else decision.placement
        if cut is None or cut.copies == 1 or cut.length % self.group.size == 0:
            return []
        return [f"its {cut.length} outputs are not divisible by {self.group.size} ranks"]

    def _shared_chunks(self, key: str, decision: Decision | None, refuted: Refuted) -> int | None:
        """Ranks per chunk, if the heads are too few for all ranks but can be dealt to groups of them."""
        heads, size = refuted.heads, self.group.size
        if heads is None or decision is None or decision.placement is None or decision.kind != "column":
            return None
        groups = math.gcd(heads, size)
        if groups in (1, size) or key in self.shared or decision.placement.length % groups:
            return None
        self.shared.add(key)
        return size // groups

    def _shared_pieces(
        self, key: str, decision: Decision | None, refuted: Refuted
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """(segments, shares): of a fused projection the small pieces (keys and values) are to be held together."""
        cut = None if decision is None or decision.kind != "column" else decision.placement
        if cut is None or cut.copies > 1 or cut.padding:
            return None
        groups = 1 if refuted.heads is None else math.gcd(refuted.heads, self.group.size)
        largest, count = max(cut.segments), Counter(cut.segments)
        small = {n for n in refuted.lengths if 2 * n <= largest and (count[n] > 1 or refuted.heads is not None)}
        before = cut.shares or (1,) * len(cut.segments)
        shares = tuple(
            self.group.size // groups if n in small else s for n, s in zip(cut.segments, before, strict=True)
        )
        if shares == before or (cut.segments, shares) in self.gathered.setdefault(key, set()):
            return None
        return cut.segments, shares

    def _believe_shares(self, key: str, segments: tuple[int, ...], shares: tuple[int, ...]) -> None:
        self.gathered[key].add((segments, shares))
        self.beliefs.segments[key], self.beliefs.shares[key] = segments, shares
        self.beliefs.copies.pop(key, None)

    # ------------------------------------------------------------ result
    def _plan(self) -> TensorPlan:
        plan = TensorPlan(
            self.group.size,
            sequence=self.group.sequence_dim is not None,
            runs=self.runs,
            conversions=self.group.conversions,
        )
        used = self.follow.decisions.keys() | self.follow.uses.keys()
        first: dict[int, str] = {}
        for name, parameter in self.facts.names.items():
            if first.setdefault(id(parameter), name) != name:
                plan.aliases[name] = first[id(parameter)]
            plan.decisions[name] = self._decision(self.facts.key_of[id(parameter)])
            plan.shapes[name] = tuple(parameter.shape)
            plan.patterns[name] = self.facts.patterns[name]
            if self.facts.key_of[id(parameter)] in self.follow.dealt:
                plan.dealt.add(name)
            if self.facts.key_of[id(parameter)] in used:
                plan.used.add(name)
        return plan

    def _decision(self, key: str) -> Decision:
        decision = self.follow.decisions.get(key)
        if decision is None:
            reason = self.beliefs.replicated.get(key, "")
            if not reason and len(self.facts.shapes[key]) > 1:
                reason = "not used as a weight of a matrix product in this step"
            return Decision("replicated", None, _plain(reason), self.heads_of.get(key))
        heads = self.heads_of.get(key) if decision.placement is None else None
        reason = decision.reason
        if decision.kind == "column" and not reason:
            target = self.follow.used.get(key)
            reason = f"feeds {target}" if target else "logits stay cut"
            cut = decision.placement
            if cut is not None and cut.shares:
                pieces = [(n, s) for n, s in zip(cut.segments, cut.shares, strict=True) if s > 1]
                sizes, ranks = "+".join(str(n) for n, _ in pieces), " and ".join(sorted({str(s) for _, s in pieces}))
                reason += f"; outputs of too few heads ({sizes}) are gathered by groups of {ranks} ranks"
        return Decision(decision.kind, decision.placement, _plain(reason), heads)


def _fitted(hint: tuple[int, ...], segments: tuple[int, ...]) -> list[tuple[int, ...]]:
    """What a hint about (a part of) an activation means for the weight that made it, which is cut in `segments`.

    The activation may be the whole output; a view of it in larger units (heads); or one of its segments.
    """
    total, whole = sum(hint), sum(segments)
    if not total:
        return []
    if total == whole:
        return [hint]
    within = [(*segments[:i], *hint, *segments[i + 1 :]) for i, n in enumerate(segments) if n == total]
    return within + ([tuple(n * (whole // total) for n in hint)] if whole % total == 0 else [])


def _only_whole(hint: tuple[int, ...], segments: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [hint] if sum(hint) == sum(segments) else []


def _no_end(keys: Iterable[str], reason: str) -> TensorPlanError:
    """The rules contradict each other about parameters that are whole already: nothing is left to change."""
    names = sorted(map(_plain, keys))
    module = names[0].rpartition(".")[0] or names[0]
    return TensorPlanError(
        f"no tensor-parallel plan was found: {', '.join(names)} should stay whole, but is still cut ({reason}). Leave "
        f"the module around it whole with tensor_parallel_plan={{{module!r}: 'replicate'}}, and please report it."
    )


def _plain(text: str) -> str:
    """Without the marks that keep demanded parameters apart."""
    for kind in ("column", "row", "vocab", "replicate"):
        text = text.replace(f" [{kind}]", "")
    return text
