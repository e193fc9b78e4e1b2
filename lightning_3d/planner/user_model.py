"""HOW is a user's module planned?  Its recorded pieces are the chain; its tensor plan says what TP divides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_3d.errors import ConfigurationError
from lightning_3d.planner.module_probe import Product, Recorded, record, tokens_of
from lightning_3d.planner.step_time import Run, windows_of
from lightning_3d.planner.traffic import StageTraffic, data_bytes, message_bytes, tensor_bytes
from lightning_3d.planner.work import Matmul, Params, Setting, Work, share
from lightning_3d.probe import try_step
from lightning_3d.tensor import TensorPlan, plan_tensor_parallel

_ENOUGH = 0.9
"""A tensor-parallel size that divides less than this of what size 2 divides is not offered."""


@dataclass(frozen=True, eq=False)
class ModuleChain:
    """A module as a chain of pieces.

    Attributes:
        name: Class of the module.
        pieces: What one piece of each kind did, for `samples` samples of `seq` tokens.
        kinds: The kind of each piece, in order.
        chain: The pieces themselves, in order.
        samples, seq: Of the batch that was recorded.
        params: All parameters, shared ones once.
        order: Names of the parameters as they are registered.
        plan_for: The tensor-parallel plan for a size, made when it is asked for.
    """

    name: str
    pieces: tuple[Recorded, ...]
    kinds: tuple[int, ...]
    samples: int
    seq: int
    params: int
    order: tuple[str, ...]
    chain: tuple[Recorded, ...]
    plan_for: Callable[[int], TensorPlan]
    _plans: dict[int, TensorPlan | str] = field(default_factory=dict)
    _works: dict[Setting, tuple[Work, ...]] = field(default_factory=dict)

    tied = False  # a shared weight is counted where it is used first
    embedding_params = 0

    @property
    def hidden(self) -> int:
        """Elements per token of what enters the pieces in the middle."""
        middle = self.pieces[self.kinds[len(self.kinds) // 2]]
        return max(1, middle.entry // (self.samples * self.seq))

    def flops_per_token(self, seq: int, *, causal: bool, embeddings: bool = False) -> float:
        """Three times the recorded forward; `causal` counts what causal attention computes (else all of it)."""
        total = 0.0
        for kind in self.kinds:
            piece = self.pieces[kind]
            total += sum(2.0 * p.rows * p.inner * p.columns for p in piece.products)
            total += piece.attention * (1.0 if causal else 2.0)
        return 3 * total / (self.samples * self.seq)

    def check(self, tp: int, cp: int, ep: int) -> str | None:
        if ep > 1:
            return f"EP={ep}: experts of a module are not looked at"
        if cp > 1:
            return f"CP={cp}: context parallelism of a module is not looked at"
        if tp == 1:
            return None
        plan = self._tensor_plan(tp)
        if isinstance(plan, str):
            return f"TP={tp}: {plan}"
        two = self._tensor_plan(2)
        most = two.sharded_fraction if isinstance(two, TensorPlan) else 1.0
        if not plan.sharded_fraction:
            return f"TP={tp} divides nothing"
        if plan.sharded_fraction < _ENOUGH * most:
            return f"TP={tp} divides {plan.sharded_fraction:.0%} of the parameters, TP=2 {most:.0%}"
        return None

    def _tensor_plan(self, tp: int) -> TensorPlan | str:
        if tp not in self._plans:
            try:
                self._plans[tp] = self.plan_for(tp)
            except ConfigurationError as error:
                self._plans[tp] = str(error)
        return self._plans[tp]

    def works(self, at: Setting) -> tuple[Work, ...]:
        if at not in self._works:
            plan = self._tensor_plan(at.tp) if at.tp > 1 else None
            decisions = plan.decisions if isinstance(plan, TensorPlan) else {}
            kinds = {name: d.kind for name, d in decisions.items()}
            self._works[at] = tuple(self._work(piece, at, kinds) for piece in self.pieces)
        return self._works[at]

    def _work(self, piece: Recorded, at: Setting, kinds: Mapping[str, str]) -> Work:
        scale = at.samples / self.samples / at.cp * (at.seq / self.seq)
        cut = {name for name, kind in kinds.items() if kind in ("column", "row", "vocab")}
        rows = [p for p in piece.products if kinds.get(p.parameter or "") == "row"]
        vocab = [n for n in piece.parameters if kinds.get(n) == "vocab"]
        divides = at.tp if any(p.parameter in cut for p in piece.products) else 1
        whole, inside = 0.0, 0.0
        for size, elements in piece.saved.items():
            if size == piece.entry or divides == 1:
                whole += elements
            else:
                inside += elements / divides
        largest = float(max(piece.saved, default=0))  # of the last piece: logits, which are divided like its products
        largest /= divides if largest != piece.entry else 1
        entry = piece.entry * scale * at.width / (at.tp if at.sp else 1)
        kept = (whole / (at.tp if at.sp and divides > 1 else 1) + inside) * scale * at.width
        products = sum(p.rows * p.columns for p in piece.products) / divides * scale * at.width
        params = {name: size / (at.tp if name in cut else 1) for name, size in piece.parameters.items()}
        return Work(
            matmuls=tuple(_matmul(p, scale, at.tp, kinds) for p in piece.products),
            attention=piece.attention * scale * (at.seq / self.seq) / divides,
            head_dim=piece.head_dim,
            moved=2.0 * piece.moved * scale * at.width / divides,
            tp_payload=max([p.rows * p.columns for p in rows] + [piece.entry if vocab else 0]) * scale * at.width,
            tp_calls=(len(rows) + len(vocab)) if at.tp > 1 else 0,
            kept=kept,
            kept_selective=min(kept, entry + products),
            kept_alternate=min(kept, entry + products / 2),
            passing=largest * scale * max(0.0, at.logits - 4) if piece is self.pieces[-1] else 0.0,
            entry=entry,
            params=Params(sum(params.values()), frozen=sum(params[name] for name in piece.frozen)),
        )


def _matmul(p: Product, scale: float, tp: int, kinds: Mapping[str, str]) -> Matmul:
    kind = kinds.get(p.parameter or "", "")
    rows = max(1, round(p.rows * scale))
    if p.parameter is None and kinds:
        rows = share(rows, tp)
    columns = share(p.columns, tp) if kind in ("column", "vocab") else p.columns
    return rows, share(p.inner, tp) if kind == "row" else p.inner, columns


def chain_of_module(
    module: Any,
    batch: Any,
    device: torch.device | None = None,
    *,
    overrides: Mapping[str, str] | None = None,
    strict: float | None = None,
) -> ModuleChain:
    """A module's chain: repeated pieces in the middle, everything before and after them at the ends.

    Args:
        module: A LightningModule with `training_step`; it may be on the meta device, and is left as it was.
        batch: A batch as the training loader gives it.
        device: Where the batch and the module's buffers are; default: the CPU.
        overrides, strict: As in `plan_tensor_parallel`.

    Raises:
        ConfigurationError: The step cannot be run without values.

    Collectives: none.
    """
    pieces = record(module, batch, device or torch.device("cpu"))
    samples, seq = tokens_of(batch)
    first, stop = _middle(pieces)
    chain = [_joined(pieces[:first]), *pieces[first:stop], _joined(pieces[stop:])]
    chain[0].looked_up = pieces[first].entry if first < len(pieces) else 0
    chain[-1].ends = True
    kinds: list[int] = []
    distinct: dict[object, int] = {}
    of_kind: list[Recorded] = []
    for number, piece in enumerate(chain):
        key = ("end", number) if number in (0, len(chain) - 1) else piece.signature()
        if key not in distinct:
            distinct[key] = len(of_kind)
            of_kind.append(piece)
        kinds.append(distinct[key])
    of_kind[kinds[-1]] = last = chain[-1]
    assert last is of_kind[-1]

    def plan_for(tp: int) -> TensorPlan:
        def step(m: nn.Module) -> Any:
            return try_step(m, "training_step", batch, 0)

        return plan_tensor_parallel(module, step, tp, overrides=overrides, strict=strict)

    count = sum(p.numel() for p in dict.fromkeys(nn.Module.parameters(module)))
    order = tuple(name for name, _ in nn.Module.named_parameters(module))
    name = type(module).__name__
    return ModuleChain(name, tuple(of_kind), tuple(kinds), samples, seq, count, order, tuple(chain), plan_for)


def traffic(run: Run, width: int, bucket_bytes: int = 4 << 20) -> list[StageTraffic]:
    """Bytes that the ledger will count in a training step, per rank of each pipeline stage.

    Args:
        run: Of a `ModuleChain`; one window per rank, ZeRO 0 or 1, no sequence parallelism.
        width: Bytes of an element.
        bucket_bytes: Of `ThreeDStrategy(bucket_size_mb=...)`; the default is that of the CPU.

    Raises:
        ConfigurationError: The chain is no module's, or the layout is not counted.
    """
    chain, layout, m = run.chain, run.candidate.layout, run.candidate.microbatches
    if not isinstance(chain, ModuleChain) or layout.virtual > 1 or layout.zero > 1 or run.candidate.sequence_parallel:
        raise ConfigurationError(f"the traffic of {run.candidate} is not counted: ZeRO 0 and 1, one window per rank.")
    plan = chain._tensor_plan(layout.tp) if layout.tp > 1 else None
    kinds = {name: d.kind for name, d in plan.decisions.items()} if isinstance(plan, TensorPlan) else {}
    scale = run.candidate.micro_batch / chain.samples
    stages = windows_of(run)
    found = []
    for number, blocks in enumerate(stages):
        pieces = [chain.chain[block] for block in blocks]
        names = {name for piece in pieces for name in piece.parameters if name not in piece.frozen}
        sizes = [_local(name, pieces, kinds, layout.tp) for name in chain.order if name in names]
        forward = backward = 0.0
        for piece in pieces:
            ahead, back = _reduced(piece, kinds)
            forward, backward = forward + ahead, backward + back
        borders = (number > 0) + (number < len(stages) - 1)
        hidden = chain.chain[len(chain.chain) // 2].entry * scale
        found.append(
            StageTraffic(
                tp=tensor_bytes(forward * scale * m, backward * scale * m, width, layout.tp),
                pp=message_bytes(hidden, width, borders * m),
                dp=data_bytes(sizes, width, bucket_bytes, layout.dp, layout.zero),
            )
        )
    return found


def _local(name: str, pieces: list[Recorded], kinds: Mapping[str, str], tp: int) -> int:
    size = next(piece.parameters[name] for piece in pieces if name in piece.parameters)
    return size // tp if kinds.get(name, "replicated") != "replicated" else size


def _reduced(piece: Recorded, kinds: Mapping[str, str]) -> tuple[float, float]:
    """Elements all-reduced over tp: a row layer sums its output, the pair's input in the backward.

    An embedding cut by tokens sums what it looks up, and a head its input's gradient; a loss over cut classes reduces
    three numbers per token (the maximum, the sum of exponentials, the target's logit).
    """
    rows = sum(float(p.rows * p.columns) for p in piece.products if kinds.get(p.parameter or "") == "row")
    forward, backward = rows, rows
    multiplied = {p.parameter for p in piece.products}
    for name in piece.parameters:
        if kinds.get(name) == "vocab" and name not in multiplied:
            forward += piece.looked_up
    for p in piece.products:
        if kinds.get(p.parameter or "") in ("vocab", "column") and piece.ends:
            forward, backward = forward + 3.0 * p.rows, backward + float(p.rows * p.inner)
    return forward, backward


def _middle(pieces: list[Recorded]) -> tuple[int, int]:
    """Where the run of repeated pieces begins and ends; without one, all but the first and the last."""
    groups: dict[object, list[int]] = {}
    for number, piece in enumerate(pieces):
        groups.setdefault((tuple(sorted(piece.parameters.values())), len(piece.products)), []).append(number)
    numbers = max(groups.values(), key=len)
    if len(numbers) < 2:
        return (1, len(pieces) - 1) if len(pieces) > 2 else (len(pieces), len(pieces))
    return numbers[0], numbers[-1] + 1


def _joined(pieces: list[Recorded]) -> Recorded:
    """Several pieces as one."""
    joined = Recorded(", ".join(p.name for p in pieces if p.name))
    for piece in pieces:
        joined.parameters.update(piece.parameters)
        joined.frozen |= piece.frozen
        joined.products += piece.products
        joined.attention += piece.attention
        joined.moved += piece.moved
        for size, elements in piece.saved.items():
            joined.saved[size] += elements
    joined.entry = pieces[0].entry if pieces else 0
    return joined
