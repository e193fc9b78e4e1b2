"""HOW LONG does a block take, forward and backward?  Kernels and messages of one microbatch (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from lightning_3d.planner.collectives import Group, Links
from lightning_3d.planner.constants import STRAGGLERS, Software
from lightning_3d.planner.kernels import Kernels
from lightning_3d.planner.work import Work


@dataclass(frozen=True)
class Seconds:
    """Seconds of one microbatch in one block (or several: they add up).

    Attributes:
        forward: Computation of the forward.
        inputs: Computation of the gradients of the inputs.
        weights: Computation of the gradients of the weights.
        again: Computation of what the backward computes again.
        tp_forward, tp_backward: Tensor-parallel communication that nothing hides.
        cp, ep: Communication of the other axes, forward and backward together.
    """

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0
    again: float = 0.0
    tp_forward: float = 0.0
    tp_backward: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))

    def times(self, count: float) -> Seconds:
        """So many of it."""
        return Seconds(*(count * value for value in _values(self)))

    @property
    def compute(self) -> float:
        """Computation, forward and backward."""
        return self.forward + self.inputs + self.weights + self.again

    @property
    def whole_forward(self) -> float:
        """Everything in the forward."""
        return self.forward + self.tp_forward + (self.cp + self.ep) / 3

    @property
    def whole_inputs(self) -> float:
        """Everything in the backward but the gradients of the weights."""
        return self.inputs + self.again + self.tp_backward + (self.cp + self.ep) * 2 / 3


def _values(s: Seconds) -> tuple[float, ...]:
    return (s.forward, s.inputs, s.weights, s.again, s.tp_forward, s.tp_backward, s.cp, s.ep)


@dataclass(frozen=True)
class Speed:
    """What a block's seconds depend on besides its work.

    Attributes:
        kernels, links, software: The GPU, the links and the framework.
        tp, cp, ep: The groups of the axes.
        sp: Whether sequence parallelism is on (the same bytes, as gathers and scatters).
    """

    kernels: Kernels
    links: Links
    software: Software
    tp: Group
    cp: Group
    ep: Group
    sp: bool = False


def block_seconds(work: Work, speed: Speed, recompute: str = "none", launches: bool = True) -> Seconds:
    """Seconds of one microbatch in one block.

    Args:
        work: The block's.
        speed: How fast this is done.
        recompute: What its backward computes again; "half" is for the caller, who has two kinds of layers.
        launches: Whether the CPU's time to launch a layer is a lower bound.
    """
    kernels, software = speed.kernels, speed.software
    products = [kernels.matmul(r, i, c) for r, i, c in work.matmuls]
    inputs = sum(kernels.matmul(r, c, i) for r, i, c in work.matmuls)
    weights = sum(kernels.matmul(i, r, c) for r, i, c in work.matmuls)
    attention = software.attention * (software.ring if speed.cp.size > 1 else 1.0)
    core, core_backward = (seconds / attention for seconds in _attention(work, kernels))
    moved = kernels.move(work.moved * software.elementwise)
    forward = sum(products) + core + moved
    again = {
        "none": 0.0,
        "half": 0.0,
        "selective": moved if software.keeps_products else core if work.scores else 0.0,
        "alternate": sum(products) / 2 + moved,
        "full": forward,
    }[recompute]
    backward = inputs + core_backward + 2 * moved
    if launches:
        forward = max(forward, software.host) + software.sync
        again = max(again, software.host) + software.sync if recompute == "full" else again
        backward = max(backward, 1.5 * software.host - weights) + software.sync
    cluster = speed.links.cluster
    slow = (1 + STRAGGLERS * log2(cluster.nodes)) / (software.speed * cluster.efficiency)
    tp_forward, tp_backward = _tensor(work, speed)
    tp_backward += {"full": 1.0, "alternate": 0.5}.get(recompute, 0.0) * tp_forward
    ring = work.cp_payload * max(0, speed.cp.size - 1)
    cp = ep = 0.0
    if ring:
        one = speed.links.seconds("all_gather", work.cp_payload * speed.cp.size, speed.cp)
        cp = max(0.0, one - core) + max(0.0, 2 * one - core_backward)
    if work.ep_payload:
        one = work.ep_calls * speed.links.seconds("all_to_all", work.ep_payload * speed.ep.size, speed.ep)
        ep = one * (4 if recompute == "full" else 2) * 0.75
    return Seconds(
        forward * slow, backward * slow, weights * slow, again * slow, tp_forward * slow, tp_backward * slow, cp, ep
    )


def _attention(work: Work, kernels: Kernels) -> tuple[float, float]:
    if work.scores:
        return tuple(kernels.scores(work.attention, work.scores, work.head_dim, back) for back in (False, True))  # type: ignore[return-value]
    return tuple(kernels.attention(work.attention, work.head_dim, back) for back in (False, True))  # type: ignore[return-value]


def _tensor(work: Work, speed: Speed) -> tuple[float, float]:
    """Tensor-parallel seconds that nothing hides, forward and backward."""
    if not work.tp_calls or speed.tp.size == 1:
        return 0.0, 0.0
    links, software = speed.links, speed.software
    if speed.sp:
        one = sum(links.seconds(op, work.tp_payload, speed.tp) for op in ("all_gather", "reduce_scatter"))
    else:
        one = links.seconds("all_reduce", work.tp_payload, speed.tp)
    exposed = work.tp_calls * one * (1 - software.tensor_overlap)
    return exposed, exposed
