"""WHAT is compiled in a pipeline?  What the user compiled inside the pieces (torch.compile), and nothing around them.

A loss or a sampler in glue code is made of events: a compiler would follow the interpreter, anew in every step. And
while a step is planned nothing may be compiled at all: what a compiler first meets under torch's dispatch modes, it
leaves uncompiled for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch._dynamo.eval_frame
import torch._functorch.config
from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.eval_frame import DynamoStance, OptimizedModule
from torch._dynamo.external_utils import wrap_inline

from lightning_3d.tensor.recorded.eager import compilers_in_use

# torch's switch is set here, not by `torch.compiler.set_stance`: that takes microseconds, and every call counts
_dynamo: Any = torch._dynamo.eval_frame
_PIECES = DynamoStance("force_eager")
_NOWHERE = DynamoStance("force_eager")


class _Around:
    """What the switch said around glue code."""

    stance: Any = None


class Uncompiled:
    """While open, functions the user compiled with `torch.compile` run as they are written.

    Args:
        everywhere: In the pieces, too (see `enter_piece`).
    """

    def __init__(self, everywhere: bool = False) -> None:
        self._everywhere = everywhere

    def __enter__(self) -> None:
        self._before = before = _dynamo._stance
        if self._everywhere:
            _dynamo._stance = _NOWHERE
        elif before is not _NOWHERE and before is not _PIECES:
            _dynamo._stance, _Around.stance = _PIECES, before

    def __exit__(self, *_: object) -> None:
        _dynamo._stance = self._before


def enter_piece() -> bool:
    """A piece runs: what is compiled in it counts, until `leave_piece` if this returns True."""
    if _dynamo._stance is not _PIECES:
        return False
    _dynamo._stance = _Around.stance
    return True


def leave_piece() -> None:
    """Back to glue code."""
    _dynamo._stance = _PIECES


def compile_pieces(module: nn.Module, atoms: Mapping[str, nn.Module]) -> None:
    """What the user compiled as a whole, and was cut, has its pieces compiled instead, with the same options."""
    for path, compiler in reversed(compilers_in_use(module).items()):  # the innermost first
        whole = module.get_submodule(path)
        inside = {id(part) for part in whole.modules() if part is not whole}
        for atom in atoms.values():
            compiled = isinstance(atom, OptimizedModule) or atom.__dict__.get("_compiled_call_impl") is not None
            if id(atom) in inside and not compiled and next(atom.parameters(), None) is not None:
                # of torch's own modules dynamo follows only what is called inside of something else
                own = trace_rules.check(atom.forward)
                atom._compiled_call_impl = compiler(wrap_inline(atom._call_impl) if own else atom._call_impl)


def keep_graphs() -> None:
    """The backward of compiled code may run in a graph that is kept; to be called before it is compiled.

    Otherwise it gives the memory of its saved tensors away, and torch refuses to run it. In a divided backward
    (`split_backward`) the graph is kept for the matrix products; compiled code runs once even so.
    """
    config: Any = torch._functorch.config
    config.donated_buffer = False
    entry = getattr(config, "_config", {}).get("donated_buffer")
    if entry is not None:  # for autograd's threads: what is set counts in one thread
        entry.default = False
