"""WHAT does the user's step do?  Runs it without data, and leaves the module as it was."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_map
from torchmetrics import Metric

from lightning_3d.errors import PipelineError
from lightning_3d.pipeline import sharding
from lightning_3d.pipeline.atom_memory import AtomMemory
from lightning_3d.pipeline.carried import Left
from lightning_3d.pipeline.compiled import Uncompiled
from lightning_3d.pipeline.events import Trace
from lightning_3d.pipeline.glue_state import Attributes, distinct
from lightning_3d.pipeline.looks import Looks, open_modules, plain_state, watching
from lightning_3d.pipeline.phantom import Phantom
from lightning_3d.pipeline.probe_run import TraceRun
from lightning_3d.pipeline.rng import Randomness, Seeds
from lightning_3d.probe import Answers, FakeParameters, ModuleState, python_state, retry, saved
from lightning_3d.probe.python_state import PythonState
from lightning_3d.where import naming_the_line

_log = logging.getLogger(__name__)

_OPERATIONS_PER_BYTE = {"cpu": 10.0}
_ON_ACCELERATORS = 100.0  # 100 to 300 TFLOP/s reached, 2 to 3 TB/s


def trace(
    module: nn.Module,
    atoms: Mapping[str, nn.Module],
    step: Callable[[], Any],
    group: Any = None,
    *,
    name: str = "training_step",
    randomness: Randomness | None = None,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    seeds: Seeds | None = None,
    memory: AtomMemory | None = None,
    looks: Looks | None = None,
    keep_arguments: bool = False,
) -> Trace:
    """Record the events of one step. Parameters need no data (a rank may have dropped them); nothing is sent.

    A step that changes attributes of its modules runs twice: when the second run changes nothing more, glue code caches
    something on its first call (a mask, lazily installed hooks); that warm state is kept, because later steps will find
    it too. Everything else of the module's state (attributes, hooks, objects and containers it holds, buffers of glue
    code, metric states, random generators, iterators) is put back.

    Args:
        module: The root module.
        atoms: Name -> module of its closed pieces.
        step: Calls the user's step method on a microbatch.
        group: Tensor-parallel group; it answers with shapes only meanwhile.
        name: Name of the step, for messages.
        randomness: The generators the step may draw from; default: the global ones for the first parameter's device.
        forward_context: Entered around the step (autocast).
        seeds: Of the microbatch, so that the trace takes the path the run will take; equal in a replica.
        memory: What equal atoms did in earlier traces; filled by this one.
        keep_arguments: Events keep what atoms are called with.
        looks: Told when the step looks at the Trainer; indices `step` passes may tell it, too.

    Raises:
        PipelineError: The step does something that cannot be cut into stages.
    """
    seeds = seeds or Seeds()
    randomness = randomness or Randomness(next((p.device for p in module.parameters()), torch.device("cpu")))
    grad_enabled = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    looks = looks or Looks()
    opened = open_modules(module, atoms.values())
    plain = plain_state(opened)

    in_atoms, read = (memory.changes, memory.read_later) if memory is not None else (set(), set())

    def once(around_atom: Callable[[], AbstractContextManager[Any]] = nullcontext, left: Left | None = None) -> Trace:
        looks.seen = False

        def run(answers: Answers) -> Trace:
            more = (memory, keep_arguments, around_atom, left)
            return _run(module, atoms, step, name, randomness, forward_context, seeds, more, answers)

        with watching(module, looks), naming_the_line(PipelineError):
            found = retry(run, (PipelineError,))
        found.looks_at_python, found.python_state = looks.seen, plain
        return found

    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(grad_enabled),
        sharding.dry(group),
        sharding.guarded(group),
        python_state(module) as python,
        Uncompiled(everywhere=True),
    ):
        state, contents = ModuleState(module), Contents(opened)
        attributes = Attributes(m for m in opened if not isinstance(m, Metric))
        try:
            first = once(partial(_noting_changes, python.pieces, in_atoms))
            if not state.changed() and not python.changed():
                first.pieces = [*attributes.changed()]
                contents.restore()
                return first
            left_first = Left(_changed(attributes, state, python, in_atoms), first, read)
            state.restore(_is_tracked)
            python.restore(_is_tracked)
            contents.restore()
            between, deeper = ModuleState(module), python.taken()
            second = once(partial(_noting_changes, python.changed(), in_atoms))
        except BaseException:
            state.restore()
            contents.restore()
            raise
        pieces = _changed(attributes, state, python, in_atoms)
        left = Left(pieces, second, read)
        state.restore(_is_tracked)
        python.restore(_is_tracked)
        warm = not (contents.restore() or between.changed() or python.changed_since(deeper))
        if warm:
            python.accept(lambda piece: saved.meaning(piece) not in in_atoms)
            # an atom that is remembered did not run twice
            state.restore(modules={m for atom in atoms.values() for m in atom.modules()}, hooks=False)
        else:
            state.restore()
        if left.vids:
            _read_left(left, lambda: once(left=left), module, opened, python)
    found = second if warm else first
    found.carried = left.carried(left if warm else left_first)
    found.warm, found.pieces = warm, distinct([*pieces, *(piece for piece, _ in found.carried)])
    return found


def _changed(
    attributes: Attributes, state: ModuleState, python: PythonState, in_atoms: set[Hashable]
) -> list[saved.Saved]:
    """What glue code has changed."""
    changed = [piece for piece in python.changed() if saved.meaning(piece) not in in_atoms]
    return [*attributes.changed(), *attributes.without(changed), *state.changed_hooks()]


def _read_left(
    left: Left, once: Callable[[], Trace], module: nn.Module, opened: list[nn.Module], python: PythonState
) -> None:
    """Run the step as the next one will find its state, to see what it reads of that; all is put back."""
    moment, state, contents = python.taken_down(), ModuleState(module), Contents(opened)
    left.put()
    try:
        once()
    except Exception:  # it has no values; what goes wrong in the next step with them says so itself
        _log.debug("what the next step reads was followed up to an error", exc_info=True)
    finally:
        moment()
        state.restore()
        contents.restore()


@contextmanager
def _noting_changes(pieces: list[saved.Saved], found: set[Hashable]) -> Iterator[None]:
    """What atoms change is theirs: the stage that runs them keeps it."""
    before = [piece.take() for piece in pieces]
    yield
    found |= {saved.meaning(p) for p, state in zip(pieces, before, strict=True) if not p.same(state)}


def _run(
    module: nn.Module,
    atoms: Mapping[str, nn.Module],
    step: Callable[[], Any],
    name: str,
    randomness: Randomness,
    forward_context: Callable[[], AbstractContextManager[Any]],
    seeds: Seeds,
    more: tuple[Any, ...],
    answers: Answers,
) -> Trace:
    """One run of the step with invented answers to value reads."""
    device = randomness.device
    result = Trace(name, _OPERATIONS_PER_BYTE.get(device.type, _ON_ACCELERATORS))
    result.sizes = {n: _local_size(p) for n, p in module.named_parameters()}
    with FakeParameters(module, device, atoms.values()) as fakes, randomness.window(seeds, 0):
        before = randomness.python_states()
        with forward_context():
            TraceRun(module, atoms, result, fakes, answers, randomness, seeds, *more).run(step)
        result.python_random = randomness.python_states() != before
    return result


def without_inference_tensors(batch: Any) -> Any:
    """Tensors made in inference mode cannot be used outside of it, where the trace runs."""
    if not any(isinstance(x, Tensor) and x.is_inference() for x in tree_flatten(batch)[0]):
        return batch
    with torch.inference_mode(False), torch.no_grad():
        return tree_map(lambda x: x.clone() if isinstance(x, Tensor) and x.is_inference() else x, batch)


def _local_size(parameter: nn.Parameter) -> int:
    shape = getattr(parameter, "local_shape", None)
    return parameter.numel() if shape is None else int(torch.Size(shape).numel())


def _is_tracked(value: Any) -> bool:
    return any(isinstance(sharding.local(x), (Phantom, FakeTensor)) for x in tree_flatten(value)[0])


class Contents:
    """Values of tensors that glue code may change in place: buffers and attributes of modules outside atoms."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found: dict[int, Tensor] = {}
        for m in modules:
            for x in tree_flatten([list(m._buffers.values()), _plain_attributes(m)])[0]:
                if isinstance(x, Tensor) and not isinstance(x, (nn.Parameter, Phantom, FakeTensor)):
                    found[id(x)] = x
        self._saved = [(x, x.detach().clone()) for x in found.values()]

    def restore(self) -> list[Tensor]:
        """Put the values back; returns the tensors that had changed."""
        changed = [(x, before) for x, before in self._saved if not torch.equal(x, before)]
        with torch.no_grad():
            for x, before in changed:
                x.copy_(before)
        return [x for x, _ in changed]


def _plain_attributes(module: nn.Module) -> list[Any]:
    return [v for k, v in module.__dict__.items() if k not in ("_parameters", "_buffers", "_modules")]
