"""WHAT does one step of a user's module do, piece by piece?  Run once without values: parameters fake, batch real.

This file and `user_model.py` are the only ones of the planner that import torch.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_3d.errors import ConfigurationError
from lightning_3d.pipeline import batch_size, find_atoms
from lightning_3d.probe import VALUE_READS, Answers, FakeParameters, retry, try_step
from lightning_3d.tensor.untouched import quiet_failures, untouched

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Product:
    """A matrix product: rows, inner dimension, columns, and the parameter it multiplies with (None: activations)."""

    rows: int
    inner: int
    columns: int
    parameter: str | None


@dataclass
class Recorded:
    """What one piece did in the forward of one batch.

    Attributes:
        name: Of the module.
        parameters: Elements of those it uses first, by name.
        frozen: Names of those of them that are not trained.
        products: Its matrix products.
        attention: Operations of fused attention, and of it what a causal mask skips.
        head_dim: Size of a head there.
        moved: Elements that other operations write.
        saved: Elements of floating point kept for the backward, by the number of elements of the tensor.
        entry: Elements of its input.
        looked_up: Elements that its embedding gives.
        ends: It is the last piece, with the loss.
    """

    name: str
    parameters: dict[str, int] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    products: list[Product] = field(default_factory=list)
    attention: float = 0.0
    head_dim: int = 128
    moved: float = 0.0
    saved: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    entry: int = 0
    looked_up: int = 0
    ends: bool = False

    def signature(self) -> tuple[object, ...]:
        """Pieces with equal ones did the same."""
        products = tuple((p.rows, p.inner, p.columns) for p in self.products)
        names = tuple(sorted((size, name in self.frozen) for name, size in self.parameters.items()))
        return names, products, self.attention, self.moved, tuple(sorted(self.saved.items())), self.entry


def record(module: nn.Module, batch: Any, device: torch.device = _CPU) -> list[Recorded]:
    """The pieces of a module in the order they ran; what runs between two belongs to the one before.

    Args:
        module: A LightningModule with `training_step`, whole, on any device (also meta); it is left as it was.
        batch: A batch as the training loader gives it, on `device`.
        device: Where the module's buffers are.

    Raises:
        ConfigurationError: The step cannot be run without values.

    Collectives: none.
    """
    if not isinstance(module, nn.Module) or not callable(getattr(module, "training_step", None)):
        raise ConfigurationError(
            f"a {type(module).__name__} cannot be planned as a module: a LightningModule with a training_step is "
            "expected, as the first of the pair (module, batch)."
        )
    atoms = find_atoms(module, _longest_chain(module))
    try:
        with untouched(module) as start, quiet_failures(), FakeParameters(module, device) as fakes:

            def once(answers: Answers) -> list[Recorded]:
                start.restore()
                return _Recorder(module, atoms, fakes.names, answers).run(batch)

            return retry(once)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"training_step of {type(module).__name__} cannot be run on shapes alone ({type(error).__name__}: "
            f"{error!s:.200}). To be planned, the step must not need values of weights or activations; plan it by its "
            "sizes instead (--model with a config.json)."
        ) from error


def _longest_chain(module: nn.Module) -> int:
    """Elements of the longest list of modules: for so many stages the module is opened, so its elements are pieces."""
    chains = (m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)))
    return max([2, *(sum(1 for child in m if any(True for _ in child.parameters())) for m in chains)])


class _Recorder(TorchDispatchMode):
    """One run of the step; `self.pieces` fills up."""

    def __init__(
        self, module: nn.Module, atoms: Mapping[str, nn.Module], names: dict[int, str], answers: Answers
    ) -> None:
        super().__init__()
        self.module, self.atoms, self.names, self.answers = module, atoms, names, answers
        self.pieces = [Recorded("")]
        self.seen: set[str] = set()
        self.frozen: set[str] = set()
        self.storages: dict[int, str] = {}
        self.known: set[int] = set()
        self.kept: list[Any] = []  # alive, so that storages are told apart

    def run(self, batch: Any) -> list[Recorded]:
        parameters = dict(self.module.named_parameters())
        self.frozen = {name for name, p in parameters.items() if not p.requires_grad}
        self.storages = {_storage(p): name for name, p in parameters.items() if _is_fake(p)}
        with ExitStack() as stack:
            for name, atom in self.atoms.items():
                handle = atom.register_forward_pre_hook(self._enter(name), with_kwargs=True)
                stack.callback(handle.remove)
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, lambda packed: packed))
            stack.enter_context(_Reads(self.answers))
            stack.enter_context(self)
            try_step(self.module, "training_step", batch, 0)
        pieces = [piece for piece in self.pieces if piece.parameters or piece.products or piece.moved]
        if not pieces:
            raise ConfigurationError(
                f"training_step of {type(self.module).__name__} uses no parameters in its first batch, so there is "
                "nothing to divide. If it skips some batches (returns None), let the first one be computed."
            )
        return pieces

    def _enter(self, name: str) -> Any:
        def hook(atom: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            piece = Recorded(name)
            inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point()]
            piece.entry = max((x.numel() for x in inputs), default=0)
            self.pieces.append(piece)

        return hook

    def _save(self, tensor: Tensor) -> Tensor:
        key = _storage(tensor)
        if key not in self.storages and key not in self.known and tensor.is_floating_point():
            self.known.add(key)
            self.kept.append(tensor)
            self.pieces[-1].saved[tensor.numel()] += tensor.numel()
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            out = func(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException):
            out = _on_ones(func, args, kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self._use(tensors)
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if not any(_is_fake(x) for x in (*tensors, *outputs)):
            return out
        piece, name = self.pieces[-1], func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            left, right = tensors[-2:]
            batch = left.shape[0] if left.ndim == 3 else 1
            rows, inner, columns = batch * left.shape[-2], left.shape[-1], right.shape[-1]
            weight = next((self.storages[_storage(x)] for x in (right, left) if _storage(x) in self.storages), None)
            piece.products.append(Product(rows, inner, columns, weight))
        elif "scaled_dot_product" in name or "flash_attention" in name or "efficient_attention" in name:
            query, key = tensors[0], tensors[1]
            causal = any(x is True for x in args) or bool((kwargs or {}).get("is_causal"))
            piece.attention += (0.5 if causal else 1.0) * 4.0 * query.numel() * key.shape[-2]
            piece.head_dim = query.shape[-1]
        elif not func.is_view:
            piece.moved += sum(x.numel() for x in outputs)
        return out

    def _use(self, tensors: list[Tensor]) -> None:
        for x in tensors:
            name = self.storages.get(_storage(x)) if _is_fake(x) else None
            if name is not None and name not in self.seen:
                self.seen.add(name)
                self.pieces[-1].frozen |= {name} & self.frozen
                self.pieces[-1].parameters[name] = x.untyped_storage().nbytes() // x.element_size()


def _on_ones(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation whose result's shape depends on values (a metric's `bincount`, `x[mask]`), as if all were one."""
    mode = next(x.fake_mode for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor))

    def real(x: Any) -> Any:
        return torch.ones(x.shape, dtype=x.dtype, device=x.device) if isinstance(x, FakeTensor) else x

    out = func(*tree_map(real, args), **tree_map(real, kwargs))
    return tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, out)


class _Reads(TorchFunctionMode):
    """Reads of values that do not exist get invented answers."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self.answers = answers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in VALUE_READS and args and _is_fake(args[0]):
            return self.answers(func, args[0])
        return func(*args, **(kwargs or {}))


def _is_fake(x: Any) -> bool:
    return isinstance(x, FakeTensor) or (isinstance(x, nn.Parameter) and isinstance(x.data, FakeTensor))


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def tokens_of(batch: Any) -> tuple[int, int]:
    """Samples of a batch, and tokens of a sample (the second dim of its first integer tensor; 1 without).

    Raises:
        ConfigurationError: It holds no tensor with a batch dim.
    """
    tensors = [x for x in tree_leaves(batch) if isinstance(x, Tensor) and x.ndim]
    if not tensors:
        raise ConfigurationError("the batch holds no tensor with a batch dim, so its number of samples is not known.")
    ids = next((x for x in tensors if not x.is_floating_point() and x.ndim >= 2), None)
    try:
        samples = batch_size(batch)
    except ConfigurationError:  # it cannot be cut (a graph); what a pipeline needs, other layouts do not
        samples = tensors[0].shape[0]
    return samples, (ids.shape[1] if ids is not None else 1)
