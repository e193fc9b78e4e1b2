"""WHAT did the user compile?  Modules under `torch.compile` run eagerly once they are planned; how they were is kept.

A compiler cannot follow tensors that show another shape than they have. So a module that was compiled
(`torch.compile(block)`, `block.compile()`) is called eagerly from the moment it is planned, and what its user asked for
(backend, mode, options) is applied to the recorded program instead (compiled.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule, _TorchDynamoContext

_KEPT = "compiled_by_user"
Function = Callable[..., Any]


class UserCompiler:
    """What the user asked of `torch.compile` for one module; applies it to other functions.

    Args:
        context: Torch's own object behind a compiled module, with backend, mode and options in it.
    """

    def __init__(self, context: Any) -> None:
        self.context = context

    def __deepcopy__(self, memo: dict[int, Any]) -> UserCompiler:
        return self

    def __call__(self, function: Function) -> Function:
        compiled: Function = self.context(function)
        return compiled


class EagerModule(OptimizedModule):
    """What `torch.compile(module)` gave, once it is planned: calls the module itself."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _eager, (self._orig_mod, self.__dict__[_KEPT])


def _eager(original: nn.Module, compiler: UserCompiler) -> OptimizedModule:
    """A copy of an `EagerModule`."""
    module = OptimizedModule(original, compiler.context)
    run_eagerly(module)
    return module


def run_eagerly(module: nn.Module) -> None:
    """Let all compiled modules inside run uncompiled from now on, and remember how they were compiled."""
    for child in module.modules():
        if isinstance(child, OptimizedModule):
            if _KEPT not in child.__dict__:
                child.__dict__[_KEPT] = UserCompiler(child.dynamo_ctx)
                child.__dict__.pop("forward", None)
                object.__setattr__(child, "__class__", EagerModule)
        elif child.__dict__.get("_compiled_call_impl") is not None:
            context = _context_of(child.__dict__["_compiled_call_impl"])
            child.__dict__[_KEPT] = None if context is None else UserCompiler(context)
            child.__dict__["_compiled_call_impl"] = None
        elif child.__dict__.get("_compiler_ctx") is not None:
            _uncompile_steps(child)


@contextmanager
def eager_meanwhile(module: nn.Module) -> Iterator[None]:
    """Compiled modules run eagerly while this is open, whatever is planned inside; then they are compiled as before."""
    before = [(child, type(child), dict(child.__dict__)) for child in module.modules() if _is_compiled(child)]
    run_eagerly(module)
    try:
        yield
    finally:
        for child, kind, own in before:
            object.__setattr__(child, "__class__", kind)
            child.__dict__.clear()
            child.__dict__.update(own)


def _is_compiled(module: nn.Module) -> bool:
    own = module.__dict__
    marks = (own.get("_compiled_call_impl"), own.get("_compiler_ctx"))
    return isinstance(module, OptimizedModule) or any(mark is not None for mark in marks)


def run_eagerly_around(module: nn.Module, inner: Iterable[nn.Module]) -> list[str]:
    """Let modules that were compiled with one of `inner` inside run uncompiled; returns their names."""
    ids = {id(part) for part in inner}
    names = []
    for name, child in module.named_modules():
        own = child.__dict__
        if not any(id(part) in ids for part in child.modules() if part is not child):
            continue
        if isinstance(child, OptimizedModule):
            own[_KEPT] = UserCompiler(child.dynamo_ctx)
            own.pop("forward", None)
            object.__setattr__(child, "__class__", EagerModule)
        elif own.get("_compiled_call_impl") is not None:
            own["_compiled_call_impl"] = None
        elif own.get("_compiler_ctx") is not None:
            _uncompile_steps(child)
        else:
            continue
        names.append(name or type(child).__name__)
    return names


def compilers_in_use(module: nn.Module) -> dict[str, UserCompiler]:
    """Path -> the compiler of what runs compiled as a whole; the path of a wrapper is that of what it wraps."""
    found = {}
    for path, child in module.named_modules():
        own = child.__dict__
        if _KEPT in own or not _is_compiled(child):
            continue
        if isinstance(child, OptimizedModule):
            context = child.dynamo_ctx
        elif own.get("_compiled_call_impl") is not None:
            context = _context_of(own["_compiled_call_impl"])
        else:
            context = own["_compiler_ctx"]["dynamo_ctx"]
        if context is not None:
            found[path] = UserCompiler(context)
    return found


def _uncompile_steps(module: nn.Module) -> None:
    """A LightningModule that was given to the Trainer compiled: Lightning has replaced its steps on the instance."""
    own = module.__dict__
    kept = own["_compiler_ctx"]
    for name, original in kept.items():
        if name.startswith("original_"):
            step = name.removeprefix("original_")
            own.pop(step, None)
            if getattr(module, step, None) != original:  # it was on the instance before
                own[step] = original
    own[_KEPT] = UserCompiler(kept["dynamo_ctx"])
    own["_compiler_ctx"] = None


def _context_of(compiled: Any) -> Any:
    """The torch object that made a compiled function, which it keeps in its closure."""
    for cell in getattr(compiled, "__closure__", None) or ():
        if isinstance(cell.cell_contents, _TorchDynamoContext):
            return cell.cell_contents
    return None


def compilers(module: nn.Module) -> dict[int, UserCompiler | None]:
    """`id(module)` -> the compiler of a module that was compiled, itself or as part of a larger one."""
    found: dict[int, UserCompiler | None] = {}

    def visit(current: nn.Module, compiler: UserCompiler | None, inside: bool) -> None:
        if _KEPT in current.__dict__:
            compiler, inside = current.__dict__[_KEPT], True
        if inside:
            found.setdefault(id(current), compiler)
        for child in current.children():
            visit(child, compiler, inside)

    visit(module, None, False)
    return found


def compiled_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Path -> module (the original one) of everything the user compiled as a whole."""
    found = {}
    for path, child in module.named_modules():
        if _KEPT in child.__dict__:
            inner = isinstance(child, OptimizedModule)
            found[f"{path}._orig_mod".lstrip(".") if inner else path] = child._orig_mod if inner else child
    return found
