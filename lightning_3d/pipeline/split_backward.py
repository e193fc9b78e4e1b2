"""HOW is one backward done in two halves?  First the gradients the stage before waits for, the weights' later.

Zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", 2023) fill a stage's idle time with the gradients
of weights, which nobody waits for. The autograd graph of a window is divided at the matrix products: `input_half`
follows only the edges that lead to received values and remembers what arrived at every product; `weight_half` starts
again from there, and follows only the edges that lead to weights. Nothing is computed twice.

Custom autograd Functions that say so (`weights_can_wait`, the tensor-parallel column layers) leave their weights' part
themselves. What cannot be divided without doing work twice stays in the first half: weights used by anything else
(norms, other custom Functions, compiled blocks), and weights that are reached on several ways.
"""

from __future__ import annotations

from collections import Counter, defaultdict
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
        self._to_leaf = graph.to_leaf
        branches, now = graph.divide()
        half = self._half
        half.weights = [w for w in graph.weights_behind(b.edge.node for b in branches) if id(w) not in now]
        later = {id(w) for w in half.weights}
        ways: Counter[int] = Counter()
        behind: dict[Node, list[Tensor]] = defaultdict(list)
        for branch in branches:
            weights = graph.weights_behind([branch.edge.node])
            ways.update(id(w) for w in weights)
            if _can_wait(branch.product):
                self._waiting.append(branch.product)
            elif any(id(w) in later for w in weights):
                half.branches.setdefault(branch.product, []).append(branch.edge)
                behind[branch.product] += weights
        half.alone = {p: own for p, own in behind.items() if all(id(w) in later and ways[id(w)] == 1 for w in own)}
        # with `inputs` autograd skips what leads to the other weights
        self._inputs = [*wanted, *now.values()]

    def run(self, outputs: Sequence[tuple[GradientEdge, Tensor]]) -> WeightHalf:
        """Backward of the received values; their gradients are in `leaf.grad` afterwards. Returns the other half."""
        half = self._half
        half.parts = [(edge, g) for edge, g in outputs if edge.node not in self._to_leaf]
        rest = [(edge, g) for edge, g in outputs if edge.node in self._to_leaf]
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


class _Graph:
    """The autograd graph of one window.

    Attributes:
        to_leaf: Nodes from which a received value can be reached.
    """

    def __init__(self, roots: Sequence[Node], leaves: set[int]) -> None:
        self._edges: dict[Node, list[tuple[Node, int]]] = {}  # asked for once: each time costs a new Python object
        self._order = self._after_children(roots)
        self.to_leaf: set[Node] = set()
        self._variables: dict[Node, Tensor] = {}
        for node in self._order:
            edges = self._edges[node]
            if not edges and node.name() == _LEAF:
                variable = node.variable  # type: ignore[attr-defined]
                if id(variable) in leaves:
                    self.to_leaf.add(node)
                else:
                    self._variables[node] = variable
            elif any(child in self.to_leaf for child, _ in edges):
                self.to_leaf.add(node)

    def divide(self) -> tuple[list[_Branch], dict[int, Tensor]]:
        """The branches weights can wait on, and the weights (by id) that must be done in the first half."""
        parents: dict[tuple[Node, int], list[Node]] = defaultdict(list)
        others: set[tuple[Node, int]] = set()
        for node in self._order:
            to_leaf = node in self.to_leaf
            for child, number in self._edges[node]:
                if not to_leaf:
                    others.add((child, number))
                elif child not in self.to_leaf:
                    parents[child, number].append(node)
        good = {
            key: of[0]
            for key, of in parents.items()
            if len(of) == 1
            and (_is_product(of[0]) or _can_wait(of[0]))
            # hooks on an expression of weights that is also used elsewhere want the sum of all ways
            and (key not in others or key[0] in self._variables)
        }
        while True:
            now: dict[int, Tensor] = {}
            for child, number in parents:
                if (child, number) not in good:
                    now.update((id(w), w) for w in self.weights_behind([child]))
            # a custom Function leaves all of its weights or none
            torn = {node for node in good.values() if _can_wait(node) and any(id(w) in now for w in self._own(node))}
            if not torn:
                return [_Branch(parent, GradientEdge(*key)) for key, parent in good.items()], now
            good = {key: node for key, node in good.items() if node not in torn}

    def _own(self, node: Node) -> list[Tensor]:
        """Weights behind the branches of a node."""
        return self.weights_behind(child for child, _ in self._edges[node] if child not in self.to_leaf)

    def weights_behind(self, starts: Iterable[Node]) -> list[Tensor]:
        """Weights reached from nodes that no received value is reached from."""
        found = [node for node in self._after_children(list(starts)) if node in self._variables]
        return [self._variables[node] for node in found]

    def _after_children(self, roots: Sequence[Node]) -> list[Node]:
        """All nodes reached from the roots, every node after those it leads to."""
        order: list[Node] = []
        seen: set[Node] = set()
        stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
        while stack:
            node, done = stack.pop()
            if done:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                edges = self._edges.get(node)
                if edges is None:
                    edges = self._edges[node] = [(child, n) for child, n in node.next_functions if child is not None]
                if not edges:
                    order.append(node)
                    continue
                stack.append((node, True))
                stack.extend((child, False) for child, _ in edges if child not in seen)
        return order


def _is_product(node: Node) -> bool:
    return node.name().rstrip("0123456789") in _PRODUCT_NAMES


def _can_wait(node: Node) -> bool:
    return getattr(getattr(node, "_forward_cls", None), "weights_can_wait", False)


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
