"""HOW is one backward done in two halves?  First the gradients the stage before waits for, the weights' later.

Zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", 2023) fill a stage's idle time with the gradients
of weights, which nobody waits for. The autograd graph of a window is divided at the matrix products: `input_half`
follows only the edges that lead to received values and remembers what arrived at every product; `weight_half` starts
again from there, and follows only the edges that lead to weights. Nothing is computed twice.

Custom autograd Functions that say so (`weights_can_wait`, the tensor-parallel column layers) leave their weights' part
themselves. What cannot be divided without doing work twice stays in the first half: weights used by anything else
(norms, other custom Functions, compiled blocks), and weights that are reached on several ways. So do parts that no
received value is reached from, if a weight they share with the rest has a hook: it sees the sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

_PRODUCTS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Addbmm", "Addmv", "Mv", "Linear", "Convolution", "MkldnnConvolution")
_PRODUCT_NAMES = frozenset(f"{name}Backward" for name in _PRODUCTS)
_LEAF = "torch::autograd::AccumulateGrad"


class _Branch(NamedTuple):
    """An edge that leaves the way to the received values, towards weights."""

    product: Node
    edge: GradientEdge


@dataclass
class WeightHalf:
    """What is left to do for the weights of one window and microbatch.

    Attributes:
        branches: Per matrix product, the edges on which its weights wait.
        arrived: What the products' outputs were given in the first half.
        left: (node, first input, function) of custom Functions: the function gives the gradients of these inputs.
        parts: (start, gradient) of pieces of the graph that no received value is reached from.
        weights: Those the branches lead to.
        alone: Products all of whose weights are reached through one branch only -> these weights.
    """

    branches: dict[Node, list[GradientEdge]] = field(default_factory=dict)
    arrived: dict[Node, Sequence[Tensor | None]] = field(default_factory=dict)
    left: list[tuple[Any, int, Callable[[], Sequence[Tensor | None]]]] = field(default_factory=list)
    parts: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    alone: dict[Node, list[Tensor]] = field(default_factory=dict)

    def run(self) -> None:
        """Add the gradients of the weights to their `.grad`; hooks on the weights fire as in a plain backward."""
        starts: list[GradientEdge] = []
        gradients: list[Tensor] = []
        for product, edges in self.branches.items():
            given = self.arrived.get(product)
            if given is None:  # no gradient came this way
                continue
            outputs = [GradientEdge(product, k) for k, g in enumerate(given) if g is not None]
            arrived = [g for g in given if g is not None]
            handle = product.register_prehook(_replace_by(given))
            try:
                if product in self.alone:
                    backward_from(outputs, arrived, retain_graph=True, inputs=self.alone[product])
                    continue
                leaves = [e.node.variable for e in edges if e.node.name() == _LEAF]  # type: ignore[attr-defined]
                with _without_hooks(leaves):  # they fire in the backward below, on the sum of all ways
                    found = torch.autograd.grad(outputs, edges, arrived, retain_graph=True, allow_unused=True)
            finally:
                handle.remove()
            for edge, gradient in zip(edges, found, strict=True):
                if gradient is not None:
                    starts.append(edge)
                    gradients.append(gradient)
        captured = len(starts)
        for node, first, function in self.left:
            for number, of_weight in enumerate(function(), first):
                if of_weight is not None:
                    starts.append(GradientEdge(*node.next_functions[number]))
                    gradients.append(of_weight)
        if starts:
            with _once_hooked(starts[:captured], gradients[:captured]):
                backward_from(starts, gradients, retain_graph=True, inputs=self.weights)
        if self.parts:
            backward_from([s for s, _ in self.parts], [g for _, g in self.parts])
        self.branches.clear()
        self.alone.clear()
        self.arrived.clear()
        self.left.clear()
        self.parts.clear()


class Halves:
    """Which part of a window's graph belongs to which half; needs no gradient, so it can be found before one is there.

    Args:
        roots: Where the backward will begin.
        leaves: The received values.
    """

    def __init__(self, roots: Sequence[GradientEdge], leaves: Iterable[Tensor]) -> None:
        self.roots = [edge.node for edge in roots]
        self._half = WeightHalf()
        self._waiting: list[Any] = []
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        graph = _Graph(self.roots, {id(leaf) for leaf in wanted})
        self._first = graph.first
        branches, now = graph.divide()
        half = self._half
        later: dict[int, Tensor] = {}
        ways: dict[int, int] = {}
        alone: dict[Node, list[Tensor]] = {}
        for _, edge in branches:
            weights = graph.behind[edge.node]
            later.update(weights)
            for weight in weights:
                ways[weight] = ways.get(weight, 0) + 1
        for weight in now:
            later.pop(weight, None)
        half.weights = list(later.values())
        for product, edge in branches:
            weights = graph.behind[edge.node]
            if _can_wait(product):
                self._waiting.append(product)
            elif any(weight in later for weight in weights):
                half.branches.setdefault(product, []).append(edge)
                alone.setdefault(product, []).extend(weights.values())
        half.alone = {p: own for p, own in alone.items() if all(id(w) in later and ways[id(w)] == 1 for w in own)}
        # with `inputs` autograd skips what leads to the other weights
        self._inputs = [*wanted, *now.values()]

    def run(self, outputs: Sequence[tuple[GradientEdge, Tensor]]) -> WeightHalf:
        """Backward of the received values; their gradients are in `leaf.grad` afterwards. Returns the other half."""
        half = self._half
        half.parts = [(edge, g) for edge, g in outputs if edge.node not in self._first]
        rest = [(edge, g) for edge, g in outputs if edge.node in self._first]
        if not rest:
            return half
        for node in self._waiting:
            node.weights_later = half.left
        handles = [node.register_prehook(_remember(half.arrived, node)) for node in half.branches]
        try:
            backward_from([e for e, _ in rest], [g for _, g in rest], retain_graph=True, inputs=self._inputs)
        finally:
            for handle in handles:
                handle.remove()
            for node in self._waiting:
                node.weights_later = None
        return half


def input_half(outputs: Sequence[tuple[GradientEdge, Tensor]], leaves: Iterable[Tensor]) -> WeightHalf:
    """Backward of the received values; their gradients are in `leaf.grad` afterwards.

    Args:
        outputs: What the window made, as graph edges, with the gradient of each.
        leaves: The received values that want a gradient.

    Returns:
        The other half.
    """
    return Halves([edge for edge, _ in outputs], leaves).run(outputs)


def _remember(arrived: dict[Node, Any], node: Node) -> Callable[..., None]:
    def hook(gradients: Any) -> None:
        arrived[node] = gradients

    return hook


def _replace_by(given: Any) -> Callable[..., Any]:
    """Hooks on the product's output ran in the first half; whatever they do again now is undone."""

    def hook(gradients: Any) -> Any:
        return tuple(g if arriving is not None else None for g, arriving in zip(given, gradients, strict=True))

    return hook


@contextmanager
def _without_hooks(weights: Iterable[Tensor]) -> Iterator[None]:
    """A gradient that is only passed on does not count as one that arrives."""
    hooks = [(w._backward_hooks, dict(w._backward_hooks)) for w in weights if w._backward_hooks]
    for store, _ in hooks:
        store.clear()
    try:
        yield
    finally:
        for store, content in hooks:
            store.update(content)


@contextmanager
def _once_hooked(starts: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> Iterator[None]:
    """Hooks on an expression of weights ran when its gradient was found; what they do again at the start is undone."""
    found: dict[Node, dict[int, Tensor]] = defaultdict(dict)
    for edge, gradient in zip(starts, gradients, strict=True):
        if edge.node.name() != _LEAF:
            found[edge.node][edge.output_nr] = gradient
    handles = [node.register_prehook(_put_at(given)) for node, given in found.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _put_at(given: Mapping[int, Tensor]) -> Callable[..., Any]:
    def hook(gradients: Any) -> Any:
        return tuple(given.get(number, gradient) for number, gradient in enumerate(gradients))

    return hook


_Edge = tuple[Node, int]
"""A node, and which of its gradients arrives on this edge."""


class _Graph:
    """The autograd graph of one window. (It is looked at once per microbatch: what it does is written plainly.)

    Attributes:
        to_leaf: Nodes from which a received value can be reached.
        first: After `divide`, the roots whose backward belongs to the first half.
        behind: Every other node -> the weights that are reached from it, by id.
    """

    def __init__(self, roots: Sequence[Node], leaves: set[int]) -> None:
        self._edges: dict[Node, list[_Edge]] = {}  # asked for once: each time costs a new Python object
        self._roots, self._order = roots, _after_children(roots, self._edges)
        self.to_leaf: set[Node] = set()
        self.behind: dict[Node, dict[int, Tensor]] = {}
        self._weights: set[Node] = set()
        for node in self._order:
            edges = self._edges[node]
            if edges:
                below = [self.behind[child] for child, _ in edges if child not in self.to_leaf]
                if len(below) < len(edges):
                    self.to_leaf.add(node)
                else:
                    self.behind[node] = below[0] if len(below) == 1 else {k: w for of in below for k, w in of.items()}
            elif node.name() == _LEAF:
                variable = node.variable  # type: ignore[attr-defined]
                if id(variable) in leaves:
                    self.to_leaf.add(node)
                else:
                    self._weights.add(node)
                    self.behind[node] = {id(variable): variable}
            else:
                self.behind[node] = {}
        self.first = {root for root in roots if root in self.to_leaf}

    def divide(self) -> tuple[list[_Branch], dict[int, Tensor]]:
        """The branches weights can wait on, and the weights (by id) that must be done in the first half."""
        good: dict[_Edge, Node] = {}
        rest: set[_Edge] = set()
        for node in self._order:
            if node not in self.to_leaf:
                continue
            leaving = [edge for edge in self._edges[node] if edge[0] not in self.to_leaf]
            waits = bool(leaving) and (_is_product(node) or _can_wait(node))
            for edge in leaving:
                if waits and edge not in good and edge not in rest:
                    good[edge] = node
                else:
                    rest.add(edge)
        # Not what is also reached through an expression of weights: hooks on one want the sum of all ways, and what a
        # product gives to a weight would be found with what comes to it through the products below.
        others = {edge for node in self.behind for edge in self._edges[node]}
        rest |= {e for e, node in good.items() if e in others and not (e[0] in self._weights and _can_wait(node))}
        early: dict[int, Tensor] = {}
        if len(self.first) < len(set(self._roots)):
            early = self._hooked_parts({w for child, _ in [*good, *rest] for w in self.behind[child]})
        while True:
            for edge in rest:
                good.pop(edge, None)
            now = dict(early)
            for child, _ in rest:
                now.update(self.behind[child])
            # a custom Function leaves all of its weights or none
            torn = {node for node in good.values() if _can_wait(node) and any(w in now for w in self._own(node))}
            if not torn:
                return [_Branch(parent, GradientEdge(*edge)) for edge, parent in good.items()], now
            rest |= {edge for edge, node in good.items() if node in torn}

    def _hooked_parts(self, weights: set[int]) -> dict[int, Tensor]:
        """Weights (by id) of parts that share a weight with hooks with `weights`, or with another such part.

        A hook must see the sum, so these parts belong to the first half.
        """
        early: dict[int, Tensor] = {}
        parts = [root for root in self._roots if root in self.behind]
        while parts:
            found = [
                root
                for root in parts
                if any(x._backward_hooks and (w in weights or w in early) for w, x in self.behind[root].items())
            ]
            if not found:
                break
            for root in found:
                early.update(self.behind[root])
            self.first.update(found)
            parts = [root for root in parts if root not in self.first]
        return early

    def _own(self, node: Node) -> Iterator[int]:
        """Weights (by id) behind the branches of a node."""
        return (w for child, _ in self._edges[node] if child not in self.to_leaf for w in self.behind[child])


def _after_children(roots: Sequence[Node], edges: dict[Node, list[_Edge]]) -> list[Node]:
    """All nodes reached from the roots, every node after those it leads to. Fills in the edges of each."""
    order: list[Node] = []
    done: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node not in edges:
            edges[node] = found = [(child, n) for child, n in node.next_functions if child is not None]
            below = [child for child, _ in found if child not in edges]
            if below:
                stack += below
                continue
        stack.pop()
        if node not in done:
            done.add(node)
            order.append(node)
    return order


def _is_product(node: Node) -> bool:
    return node.name().rstrip("0123456789") in _PRODUCT_NAMES


def _can_wait(node: Node) -> bool:
    return getattr(getattr(node, "_forward_cls", None), "weights_can_wait", False)


def leads_back(tensor: Tensor) -> bool:
    """Whether a gradient of it goes anywhere. A view made under `no_grad` says it requires grad, and has no graph."""
    return tensor.requires_grad and not (tensor.grad_fn is None and tensor._is_view())


def edge_of(tensor: Tensor) -> GradientEdge:
    """Where the backward of a tensor begins; keeps the graph, but not the tensor's memory."""
    node: Any = tensor.grad_fn
    if node is None or not torch.is_grad_enabled():
        return torch.autograd.graph.get_gradient_edge(tensor)
    # Python's object of a custom Function does not keep its node alive; another node after it does
    owner = tensor.view_as(tensor).grad_fn if isinstance(node, torch._C._FunctionBase) else None
    return GradientEdge(node, tensor.output_nr, owner)


def backward_from(
    starts: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    *,
    retain_graph: bool = False,
    inputs: Sequence[Tensor] = (),
) -> None:
    """`torch.autograd.backward` from edges whose gradients are known to fit, without its checks: it runs per window.

    Args:
        starts, gradients: Where it begins, and with what.
        retain_graph: The graph is needed again.
        inputs: The leaves to add to; none given: all that are reached.
    """
    create_graph = False
    _engine_run_backward(
        tuple(starts), tuple(gradients), retain_graph, create_graph, tuple(inputs),
        allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip
