"""WHICH activations are thrown away and computed again?  Activation checkpointing of the model's blocks.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; selective: Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022. "full" keeps a block's arguments and runs its forward a second time
in the backward. "selective" also keeps the results of matrix products, convolutions and attention, so that only what
costs little is computed twice. Gradients are the same; dropout draws the same masks again.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lightning_3d.errors import ConfigurationError, near, near_pattern
from lightning_3d.pipeline.compiled import Uncompiled
from lightning_3d.pipeline.holders import changed, holders, set_slots, slots
from lightning_3d.tensor.recorded.eager import compiled_modules, compilers_in_use
from lightning_3d.wrapping import wrapped_forwards

Mode = Literal["full", "selective", "none"]
Choice = None | Mode | Sequence[Mode] | Mapping[str, Mode]
_MODES = get_args(Mode)
_OURS = __name__.partition(".")[0] + "."
_aten = torch.ops.aten
_KINDS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention", "attention_math")
_ATTENTIONS = [f"_scaled_dot_product_{kind}" for kind in _KINDS]
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_scaled_mm", "_grouped_mm")
_SAVED = {getattr(_aten, name) for name in (*_PRODUCTS, *_ATTENTIONS) if hasattr(_aten, name)}


class Recompute:
    """The blocks of a module whose activations are recomputed on this rank.

    Args:
        module: The root module.
        choice: One mode for all blocks, one per pipeline stage, or patterns on module names to modes.
        stage, stages: This rank's pipeline stage, and how many there are.
        opened: Names of modules that are cut between stages; they are no blocks.

    Attributes:
        blocks: Name -> mode, of the blocks that are recomputed.

    Raises:
        ConfigurationError: The choice fits nothing, or not the number of stages.
    """

    def __init__(
        self, module: nn.Module, choice: Choice, stage: int = 0, stages: int = 1, opened: Iterable[str] = ()
    ) -> None:
        self._modules: list[tuple[nn.Module, Mode]] = []
        self.blocks: dict[str, Mode] = {}
        if choice is None:
            return
        for name, mode in _chosen(module, choice, stage, stages, set(opened)).items():
            if mode != "none":
                self.blocks[name] = mode
                self._modules.append((module.get_submodule(name), mode))
        _warn_of_compiled(module, [name for name, mode in self.blocks.items() if mode == "selective"])

    @contextmanager
    def active(self) -> Iterator[None]:
        """The blocks recompute while this is open (and later, in the backward of what ran in it)."""
        with wrapped_forwards((block, functools.partial(_recomputed, mode=mode)) for block, mode in self._modules):
            yield


def _recomputed(forward: Callable[..., Any], mode: Mode) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if mode == "selective":
            run = _Again(_as_written(functools.partial(forward, **kwargs)), (args, kwargs))
            return checkpoint(run, *args, use_reentrant=False, context_fn=_selective)
        run = _Again(functools.partial(forward, **kwargs), (args, kwargs))
        return checkpoint(run, *args, use_reentrant=False)

    return call


def _as_written(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Without torch.compile, which leaves for good what it first meets under a dispatch mode."""

    def call(*args: Any) -> Any:
        with Uncompiled(everywhere=True):
            return forward(*args)

    return call


def _warn_of_compiled(module: nn.Module, selective: Sequence[str]) -> None:
    compiled = {**compilers_in_use(module), **compiled_modules(module)}
    found = [path for path in compiled for name in selective if f"{path}.".startswith(f"{name}.")]
    if found:
        rank_zero_warn(
            f"compiled with torch.compile, but run uncompiled in training, with the same result: {', '.join(found)}. "
            "activation_checkpointing='selective' keeps the results of single operations, which compiled code does not "
            "show. With activation_checkpointing='full' they are compiled."
        )


class _Again:
    """A forward that finds everything as it was when it runs again.

    That is: lists, dicts and objects it was given (a cache), the user's torch-function modes around it, and the default
    dtype (`64-true`). (torch's checkpoint takes care of autocast and random numbers.)
    """

    def __init__(self, forward: Callable[..., Any], arguments: Any) -> None:
        self._forward = forward
        self._before = [(holder, slots(holder) or []) for holder in holders(arguments)]
        self._ran = False
        self._dtype = torch.get_default_dtype()
        self._modes = [m for m in _get_current_function_mode_stack() if not type(m).__module__.startswith(_OURS)]

    def __call__(self, *args: Any) -> Any:
        if not self._ran:
            self._ran = True
            out = self._forward(*args)
            self._before = [(h, old) for h, old in self._before if changed(old, slots(h) or [])]
            return out
        now = [(holder, slots(holder) or []) for holder, _ in self._before]
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        for holder, old in self._before:
            set_slots(holder, old)
        try:
            with ExitStack() as stack:
                for mode in self._modes:
                    stack.enter_context(mode)
                return self._forward(*args)
        finally:
            torch.set_default_dtype(dtype)
            for holder, content in now:
                set_slots(holder, content)


def _selective() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    keep = _Keep()
    return keep, _Reuse(keep)


class _Keep(TorchDispatchMode):
    """Remembers the results of the operations that cost much, in order.

    A result that is changed in place later is not used (torch's own modes notice that only if it is the same tensor,
    not a reshaped one): the partial product of a row-parallel layer, which the all-reduce makes whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[Any, list[Any]] = defaultdict(list)
        self._by_storage: dict[int, list[_Noted]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _SAVED:
            self.results[func].append(tree_map(self._note, out))
        elif func.namespace == "c10d" or func._schema.is_mutable:
            for x in tree_flatten((args, kwargs))[0]:
                for noted in self._by_storage.get(x.untyped_storage()._cdata, ()) if isinstance(x, Tensor) else ():
                    noted.unchanged = noted.unchanged and not _writes(func, x, args, kwargs)
        return out

    def _note(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        noted = _Noted(x.detach())
        self._by_storage[x.untyped_storage()._cdata].append(noted)
        return noted


def _writes(func: Any, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Whether an operation changes this argument of it in place."""
    if func.namespace == "c10d":  # their schemas do not say
        return "send" not in func.name()
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.is_write and any(x is tensor for x in tree_flatten(value)[0]):
            return True
    written = {a.name for a in func._schema.arguments if a.is_write}
    return any(x is tensor for name, value in (kwargs or {}).items() if name in written for x in tree_flatten(value)[0])


class _Reuse(TorchDispatchMode):
    """Returns what `_Keep` remembers instead of computing it again."""

    def __init__(self, keep: _Keep) -> None:
        super().__init__()
        self._keep = keep
        self._next: dict[Any, int] = defaultdict(int)

    def __enter__(self) -> Any:
        self._next.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _SAVED:
            number = self._next[func]
            self._next[func] = number + 1
            leaves, spec = tree_flatten(self._keep.results[func][number], lambda x: isinstance(x, _Noted))
            if all(x.unchanged for x in leaves if isinstance(x, _Noted)):
                return tree_unflatten([x.tensor.detach() if isinstance(x, _Noted) else x for x in leaves], spec)
        return func(*args, **(kwargs or {}))


@dataclass
class _Noted:
    """A tensor that was made, and whether it still is what it was."""

    tensor: Tensor
    unchanged: bool = True


def find_blocks(module: nn.Module) -> list[str]:
    """Names of the elements of lists and sequences that are made of several modules and have parameters.

    A container inside a container is opened: of a list of stages of blocks these are the blocks.
    """
    found: dict[int, str] = {}

    def visit(name: str, current: nn.Module) -> None:
        for key, child in current.named_children():
            path = f"{name}.{key}" if name else key
            container = isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
            made_of = [m for m in child.children() if next(m.parameters(), None) is not None]
            if isinstance(current, (nn.ModuleList, nn.Sequential)) and made_of and not container:
                found.setdefault(id(child), path)
            else:
                visit(path, child)

    visit("", module)
    return list(found.values())


def check_choice(choice: Choice, stages: int | None = None) -> None:
    """What can be said without the model.

    Args:
        choice: The user's.
        stages: How many there are; None: not known yet.

    Raises:
        ConfigurationError: An unknown mode, or a list of the wrong length.
    """
    if choice is None:
        return
    modes = check_modes(choice)
    if stages is not None and not isinstance(choice, (str, Mapping)) and len(modes) != stages:
        raise ConfigurationError(
            f"activation_checkpointing is a list of {len(modes)} modes, but there are {stages} pipeline stages: "
            "give one mode per stage, the stage with the embedding first, or a single mode for all of them."
        )
    for mode in modes:
        if mode not in _MODES:
            raise ConfigurationError(
                f"activation_checkpointing has the mode {mode!r}; it must be one of {', '.join(map(repr, _MODES))}."
                + near(str(mode), _MODES)
            )


def check_modes(choice: Any) -> list[Any]:
    """The modes in a choice that is given.

    Raises:
        ConfigurationError: It is of the wrong kind.
    """
    if isinstance(choice, Mapping) and choice:
        return list(choice.values())
    if isinstance(choice, str):
        return [choice]
    if isinstance(choice, Sequence) and choice:
        return list(choice)
    hint = {True: " For all blocks write 'full'.", False: " For none write None."}
    raise ConfigurationError(
        f"activation_checkpointing is {choice!r}; it must be 'full' or 'selective' (all blocks), a list with a mode "
        "for every pipeline stage, a dict of patterns on module names to modes ({'encoder.layers.*': 'full'}), or None."
        + (hint[choice] if isinstance(choice, bool) else "")
    )


def _chosen(module: nn.Module, choice: Choice, stage: int, stages: int, opened: set[str]) -> dict[str, Mode]:
    check_choice(choice, stages)
    if isinstance(choice, Mapping):
        return _matched(module, choice, opened)
    assert choice is not None
    mode: Mode = choice if isinstance(choice, str) else choice[stage]
    blocks = [name for name in find_blocks(module) if name not in opened]
    if not blocks:
        raise ConfigurationError(
            f"activation_checkpointing={choice!r}, but no blocks were found: none of the module's lists "
            "(nn.ModuleList, nn.Sequential) has elements made of several modules. Name what shall be recomputed: "
            'activation_checkpointing={"encoder.stage*": "full"}.'
        )
    return dict.fromkeys(blocks, mode)


def _matched(module: nn.Module, patterns: Mapping[str, Mode], opened: set[str]) -> dict[str, Mode]:
    names = [name for name, _ in module.named_modules() if name]
    found: dict[str, Mode] = {}
    for pattern, mode in patterns.items():
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            raise ConfigurationError(
                f"activation_checkpointing names {pattern!r}, which fits no module of the model."
                + near_pattern(pattern, names)
            )
        for name in hits:
            if name in opened:
                raise ConfigurationError(
                    f"activation_checkpointing names {name!r}, but this module is cut between pipeline stages, so it "
                    "cannot be recomputed as a whole. Name the modules inside it."
                )
            found[name] = mode
    inner = [n for n in found if any(n.startswith(f"{other}.") for other in found)]
    for name in inner:  # recomputed with the module around it
        del found[name]
    return found
