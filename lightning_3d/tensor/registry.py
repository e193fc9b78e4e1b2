"""WHICH rule carries a cut through an operation?  The table of rules, open to users.

A rule is a function `rule(func, args, kwargs) -> result`. At least one tensor among the arguments is a `ShardedTensor`.
It computes with the local shards and wraps the result, or raises `NoRule` to say that these placements have no sharded
form. It must equal the global operation for whatever placements it accepts: the planner trusts it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[[Any, Args, Kwargs], Any]
R = TypeVar("R", bound=Rule)

RULES: dict[str, Rule] = {}
"""Rules by the name of the operation (`__name__`; dunder names without underscores)."""

OWN_RULES: dict[Any, Rule] = {}
"""Rules for one function object or one `autograd.Function` class; they win over rules by name."""

ANY_ARGUMENT: set[str] = set()
"""Rules that accept the sharded tensor in any argument. All others are called only if it is the first."""

cached_handlers: dict[Any, Rule] = {}
"""What `sharded` has resolved so far; a new rule empties it."""


def register_rule(*operations: Any, any_argument: bool = True) -> Callable[[R], R]:
    """Teach tensor parallelism a new operation.

    Args:
        *operations: What the rule is for: a function that torch-function overrides see (`F.gelu`, `torch.ops.my.op`), a
            subclass of `torch.autograd.Function` (called with its `apply`), or the name of a torch operation.
        any_argument: The sharded tensor may be in any argument. If False, the rule is used only for calls whose first
            argument is sharded.

    Example:
        A custom activation written as an `autograd.Function` that acts on each element alone::

            @register_rule(MyActivation)
            def _(func, args, kwargs):
                return map_local(lambda x: func(x, *args[1:], **kwargs), args[0])
    """
    assert operations, "register_rule needs at least one operation"

    def register(rule: R) -> R:
        for operation in operations:
            (RULES if isinstance(operation, str) else OWN_RULES)[operation] = rule
            if isinstance(operation, str):
                (ANY_ARGUMENT.add if any_argument else ANY_ARGUMENT.discard)(operation)
        cached_handlers.clear()
        return rule

    return register


def first(*names: str) -> Callable[[R], R]:
    """Register a rule by name that is only called when the first argument is the sharded one."""
    return register_rule(*names, any_argument=False)


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


def bind(names: tuple[str, ...], args: Args, kwargs: Kwargs) -> Kwargs:
    """All arguments by name."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def argument(args: Args, kwargs: Kwargs, index: int, name: str, default: Any = None) -> Any:
    """An argument that may be positional or by name."""
    return args[index] if len(args) > index else kwargs.get(name, default)
