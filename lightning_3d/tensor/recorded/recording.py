"""WHICH blocks are recorded, and when?  All repeated blocks of a model; learned in the first steps, used from then on.

Step 1 runs under the rules. At the beginning of step 2 the ranks compare which calls they have met; in step 2 those are
recorded and proved; from step 3 on they run as programs. New kinds of calls (another length, other flags) follow at the
next meeting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from lightning_3d.tensor.group import TensorGroup
from lightning_3d.tensor.layers import VocabParallelEmbedding
from lightning_3d.tensor.recorded.agreement import common, is_meeting
from lightning_3d.tensor.recorded.block import RecordedBlock
from lightning_3d.tensor.recorded.eager import compiled_modules, compilers

_NOTHING: Any = object()


class Recording:
    """The recorded blocks of one rewritten model on this rank.

    Args:
        module: The model, rewritten.
        group: Its tensor-parallel ranks.

    Attributes:
        blocks: Path -> block.
        step: Training steps begun so far.
    """

    def __init__(self, module: nn.Module, group: TensorGroup) -> None:
        self.group = group
        compiler = compilers(module)
        self.blocks = {
            name: RecordedBlock(name, block, group, compiler.get(id(block)))
            for name, block in recordable(module).items()
        }
        self.step = 0
        self._open = 0

    @contextmanager
    def running(self, begins: bool = False) -> Iterator[None]:
        """Blocks run by their programs while this is open; nothing stays on the module.

        Args:
            begins: A training step begins: nothing computed before is still needed.

        Collectives: with `begins`, at meetings, one exchange of small objects over the group.
        """
        if self._open:
            yield
            return
        self._open += 1
        before = {name: b.block.__dict__.get("forward", _NOTHING) for name, b in self.blocks.items()}
        try:
            for block in self.blocks.values():
                block.follow(block.block.forward)
                block.block.__dict__["forward"] = block
            if begins:
                self._begin()
            yield
        finally:
            self._open -= 1
            for name, forward in before.items():
                own = self.blocks[name].block.__dict__
                if forward is _NOTHING:
                    own.pop("forward", None)
                else:
                    own["forward"] = forward

    def _begin(self) -> None:
        self.step += 1
        for block in self.blocks.values():
            block.begin()
        if is_meeting(self.step):
            mine = [candidate for block in self.blocks.values() for candidate in block.candidates()]
            with self.group.comm.ledger.during("recording"):
                chosen = common(mine, self.group.comm)
            for name, kind in chosen:
                self.blocks[name].chosen.add(kind)

    def explain(self) -> str:
        """One line per block: its programs and how often they ran, or why there is none."""
        lines = []
        for name, block in self.blocks.items():
            if block.programs:
                lines.append(f"{name}: {len(block.programs)} programs, {block.replays} calls by them")
            else:
                why = "; ".join(dict.fromkeys(reason for reason, _ in block.refusals.values()))
                lines.append(f"{name}: under the rules{': ' + why if why else ''}")
        return "\n".join(lines)


def recordable(module: nn.Module) -> dict[str, nn.Module]:
    """What is worth recording, by path.

    Repeated blocks (equal elements of lists), embeddings cut over the tokens, and what the user compiled.
    """
    found = {path: child for path, child in compiled_modules(module).items() if child is not module}
    for path, child in module.named_modules():
        if isinstance(child, VocabParallelEmbedding) and child.tensor_group is not None:
            found[path] = child
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1:
            blocks = {f"{path}.{i}".lstrip("."): block for i, block in enumerate(child)}
            kinds = {(type(b), tuple((n, tuple(p.shape)) for n, p in b.named_parameters())) for b in blocks.values()}
            if len(kinds) == 1 and any(child[0].children()):
                found.update((p, b) for p, b in blocks.items() if not isinstance(b, OptimizedModule))
    once: dict[int, str] = {}
    return {path: block for path, block in found.items() if once.setdefault(id(block), path) == path}
