"""WHICH partition does a microbatch get?  Every path a step takes is traced and cut once, and found again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_3d.errors import PipelineError
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline.atom_memory import AtomMemory
from lightning_3d.pipeline.batch_tree import signature
from lightning_3d.pipeline.changes import warn_of_changed_state
from lightning_3d.pipeline.costs import measure
from lightning_3d.pipeline.events import Trace
from lightning_3d.pipeline.execution import TRAINING, Program
from lightning_3d.pipeline.glue_state import GlueState, name_of
from lightning_3d.pipeline.looks import Looks, named_state, plain_state, watched
from lightning_3d.pipeline.partition import Held, Partition
from lightning_3d.pipeline.path import follows
from lightning_3d.pipeline.planning import Split, cut, make_plan
from lightning_3d.pipeline.rng import Randomness, Seeds
from lightning_3d.pipeline.trace import trace, without_inference_tensors
from lightning_3d.probe import agree, own_generators, probe_arguments, try_step

_SIGNATURES_KEPT = 256
_PATHS_KEPT = 8


class Plans:
    """The partitions of all steps of a module, by circumstances, shapes and path.

    Args:
        module: The root module, whole until `begin` has returned.
        mesh: This rank's place.
        tensor_group, forward_context, seed: As in `PipelineRunner`.
        microbatches: Per training batch, for a warning.

    Attributes:
        held: Which stages hold which parameter.
        program: What is executed.
        partitions: (circumstances, shapes) -> one partition per path.
    """

    held: Held
    program: Program

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        *,
        tensor_group: Any,
        forward_context: Callable[[], AbstractContextManager[Any]],
        seed: int,
        microbatches: int,
    ) -> None:
        self.module, self.mesh, self.seed, self._microbatches = module, mesh, seed, microbatches
        self._tensor_group, self._forward_context = tensor_group, forward_context
        self.partitions: dict[Any, list[Partition]] = {}
        self._modules = list(module.modules())  # found once: looked at in every batch
        self._memory = AtomMemory()
        self._randomness = Randomness(mesh.device, own_generators(module))
        self._warned = False

    def begin(self, step_name: str, microbatch: Any, split: Split, owners: Sequence[int]) -> Partition:
        """Trace the step that decides the cut, place the parameters, and cut it.

        Collectives: the placement of the first replica is broadcast over dp (a few KB), and what `find` does.

        Raises:
            PipelineError: The step cannot be cut as asked.
        """

        def tracer(atoms: Mapping[str, nn.Module]) -> Trace:
            return self._trace(step_name, microbatch, atoms, keep_arguments=split == "measured")

        plan = make_plan(self.module, self.mesh.layout.pp, split, tracer, owners, partial(measure, mesh=self.mesh))
        self._memory.learn(plan.atoms)
        state = GlueState(self.module, self.mesh.at.pp)
        self.program = Program(
            self.module, plan.atoms, self._randomness, self._tensor_group, self._forward_context, state
        )
        # batches differ between replicas; the placement of parameters must not
        self.held = Held(*self.mesh.data.broadcast_object(plan.held, 0))
        partition = self._agreed(step_name, plan.trace)
        self.partitions[self._circumstances(step_name), signature(microbatch)] = [partition]
        return partition

    def find(
        self, step_name: str, microbatches: Sequence[Any], args: tuple[Any, ...], seeds: Sequence[Seeds]
    ) -> tuple[list[Partition], Callable[[], None]]:
        """The partition of every microbatch of a batch; all ranks of a replica find the same ones.

        Collectives: over the replica an all-gather of 8 bytes on the CPU, and for every path that is new a digest.

        Returns:
            The partitions, and what is to be called before this rank waits for another one: it raises `PipelineError`
            if the ranks disagree, since they remember different things. Till then their answers may be under way.
        """
        circumstances = self._circumstances(step_name, args)
        found: list[Partition] = []
        before: dict[Any, tuple[int, Partition]] = {}
        while True:
            chosen = []
            for number in range(len(found), len(microbatches)):
                index, partition = self._known(
                    step_name, microbatches[number], args, seeds[number], circumstances, before
                )
                chosen.append(index)
                if partition is None:
                    break
                found.append(partition)
            agreed = self._compared(step_name, chosen)
            number = len(found)
            # a forward that talks to tensor-parallel peers would wait for one that has seen the error, and one that
            # changes state would change what the error tells
            early = self.mesh.replica_control.size == self.mesh.layout.pp and not any(p.trace.remembered for p in found)
            if number < len(microbatches) or not early:
                agreed()
            if number == len(microbatches):
                return found, agreed
            shape = signature(microbatches[number])
            new = self._trace(step_name, microbatches[number], self.program.atoms, args, seeds[number])
            known = self.partitions[circumstances, shape]
            known.append(self._agreed(step_name, new))
            found.append(known[-1])
            del known[:-_PATHS_KEPT]
            before[shape] = len(known) - 1, known[-1]
            while len(self.partitions) > _SIGNATURES_KEPT:
                self.partitions.pop(next(iter(self.partitions)))

    def _compared(self, step_name: str, chosen: Sequence[int]) -> Callable[[], None]:
        """A rank that alone has to plan would wait for the others for ever. Returns the call that waits and raises."""
        digest = torch.tensor([hash(tuple(chosen))])  # of numbers, so equal in every process
        digests = digest.new_empty(self.mesh.replica_control.size)
        work = self.mesh.replica_control.all_gather_start(digests, digest)

        def agreed() -> None:
            work.wait()
            if len(set(digests.tolist())) > 1:
                raise self._disagreement(step_name)

        return agreed

    def _disagreement(self, step_name: str) -> PipelineError:
        replica = self.mesh.replica_control
        states = replica.all_gather_object(named_state(self.module, self.program.open_modules))
        differing = [name for name in states[0] if any(other.get(name) != states[0][name] for other in states)]
        named = [f"{name} ({', '.join(sorted({str(s.get(name)) for s in states}))})" for name in differing[:5]]
        return PipelineError(
            f"the ranks of one replica take {step_name} for different paths, because it looks at things that differ "
            f"between them: {', '.join(named) or 'state that is not in attributes of its modules'}. Only the last "
            "stage runs a step to its end; what it remembers there reaches the other stages after the batch, if it is "
            "numbers, text, tensors, or lists and dicts of them, in attributes of a module. Keep it there, or change "
            "it in a hook (on_train_batch_end), which runs on every rank."
        )

    def _trace(
        self,
        step_name: str,
        microbatch: Any,
        atoms: Mapping[str, nn.Module],
        args: Sequence[Any] | None = None,
        seeds: Seeds | None = None,
        keep_arguments: bool = False,
    ) -> Trace:
        step = getattr(self.module, step_name)
        microbatch = without_inference_tensors(microbatch)
        looks = Looks()
        found = probe_arguments(step, microbatch) if args is None else (microbatch, *args)
        arguments = (found[0], *(watched(x, looks) for x in found[1:]))
        return trace(
            self.module,
            atoms,
            lambda: try_step(self.module, step_name, *arguments),
            self._tensor_group,
            name=step_name,
            randomness=self._randomness,
            forward_context=self._forward_context,
            seeds=seeds or Seeds(self.seed, 0, 0, self.mesh.at.dp),
            memory=self._memory,
            looks=looks,
            keep_arguments=keep_arguments,
        )

    def _agreed(self, step_name: str, found: Trace) -> Partition:
        if step_name == TRAINING and self._microbatches > 1 and not self._warned:
            self._warned = warn_of_changed_state(self.module, found, self._microbatches, self.program.open_modules)
        for event in found.events:
            event.arguments = None
        partition = cut(found, self.held, training=step_name == TRAINING)
        remembered = [name_of(piece, self.module) for piece in found.pieces]
        agree(f"the pipeline plan of {step_name}", (partition.plain(), remembered), self.mesh.replica)
        return partition

    def _circumstances(self, step_name: str, args: Sequence[Any] = ()) -> Any:
        """What a step's path may depend on, besides the microbatch: modes, frozen parameters, dataloader_idx."""
        with torch._C.DisableTorchFunctionSubclass():
            trainable = tuple(p.requires_grad for m in self._modules for p in m._parameters.values() if p is not None)
        modes = tuple(m.training for m in self._modules)
        others = tuple(signature(x) for x in args[1:])  # not batch_idx, which is another one every time
        return (step_name, torch.is_grad_enabled(), hash(trainable), hash(modes), others)

    def _known(
        self,
        step_name: str,
        microbatch: Any,
        args: Sequence[Any],
        seeds: Seeds,
        circumstances: Any,
        before: dict[Any, tuple[int, Partition]],
    ) -> tuple[int, Partition | None]:
        """The known partition for the path this microbatch takes, and its number; (-1, None) if there is none.

        Args:
            step_name: Name of the method.
            microbatch, args: What it gets.
            seeds: Of the microbatch.
            circumstances: Of the batch.
            before: Signature -> what was found for the microbatch before this one in the same batch; this one is added.
        """
        shape = signature(microbatch)
        last = before.get(shape)
        if last is not None and not last[1].trace.branch_point:  # nothing in it could take another path
            return last
        known = self.partitions.setdefault((circumstances, shape), [])
        state = None if last else plain_state(self.program.open_modules)
        for partition in sorted(known, key=lambda p: last is None or p is not last[1]):
            # Python state is that of the whole batch: the first of its microbatches is followed to the end
            whole = last is None and (
                partition.trace.looks_at_python
                or len(known) > 1
                or bool(partition.trace.carried)
                or partition.trace.python_state != state
            )
            if follows(
                self.program,
                partition.trace,
                lambda: try_step(self.module, step_name, microbatch, *args),
                seeds,
                whole=whole,
            ):
                index = known.index(partition)
                if last is None:
                    before[shape], partition.trace.python_state = (index, partition), state
                return index, partition
        return -1, None
