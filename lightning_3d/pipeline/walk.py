"""HOW does one stage walk its list of actions?  Receives, windows, sends: one batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_3d.comm import Ledger
from lightning_3d.pipeline.channels import Channels, Message
from lightning_3d.pipeline.events import TensorMeta, Vid
from lightning_3d.pipeline.execution import Live, Program, backward, differentiable, forward, trained_loss
from lightning_3d.pipeline.partition import Partition
from lightning_3d.pipeline.rng import Seeds
from lightning_3d.pipeline.schedule import Action
from lightning_3d.pipeline.stage import Logged

Recorder = Callable[[Action, float, float], None]


class Walk:
    """One batch on one stage.

    Args:
        program: What is executed.
        channels: Messages to the other stages.
        stage: This rank's stage.
        partitions: Per microbatch, how it is cut.
        steps: Per microbatch, a call of the user's step.
        seeds: Per microbatch.
        weights: Per microbatch, what its loss is multiplied with before the backward; None: no backward.
        scale: What every loss is multiplied with as well.
        step_name: For messages.
        ledger: Told which phase runs.
        recorder: Told when every action, and every wait, began and ended (`time.monotonic()`).

    Attributes:
        outputs, losses, logged: Per microbatch, filled on the last stage.
        live_peak: Largest number of live microbatches.
    """

    def __init__(
        self,
        program: Program,
        channels: Channels,
        stage: int,
        partitions: Sequence[Partition],
        steps: Sequence[Callable[[], Any]],
        seeds: Sequence[Seeds],
        weights: Sequence[float | Tensor] | None,
        scale: float | Tensor,
        step_name: str,
        ledger: Ledger,
        recorder: Recorder | None = None,
    ) -> None:
        self.program, self.channels, self.stage = program, channels, stage
        self.partitions, self.steps, self.seeds = partitions, steps, seeds
        self.weights, self.scale = weights, scale
        self.step_name, self.ledger, self.recorder = step_name, ledger, recorder
        count = len(partitions)
        self.outputs: list[Any] = [None] * count
        self.losses: list[Tensor | None] = [None] * count
        self.logged: list[list[Logged]] = [[] for _ in range(count)]
        self.live_peak = 0
        self._live: dict[tuple[int, int], Live] = {}

    def run(self, lists: Sequence[Sequence[Action]], before_last_backward: Callable[[], None] | None = None) -> None:
        """Walk this stage's list; `lists` holds every stage's, from which the order of messages follows."""
        mine = lists[self.stage]
        several = self.weights is not None and len(self.partitions) > 1
        self.program.step_values.begin(m for p in self.partitions for m in p.trace.step_metrics if several)
        last_backward = max((k for k, action in enumerate(mine) if action.kind == "B"), default=-1)
        expected = {s: self._messages_to_me(actions) for s, actions in enumerate(lists) if s != self.stage}
        self.channels.begin(expected, self._metas)
        try:
            for k, action in enumerate(mine):
                for ahead in mine[k : k + 2]:
                    for message, source in self._needs(ahead):
                        self.channels.prepare(message, source)
                hook = before_last_backward if k == last_backward else None
                self._execute(action, hook)
            self.channels.end()
            self.program.step_values.finish()
        except BaseException:
            self.channels.abandon()
            raise
        finally:
            self._live.clear()

    def _execute(self, action: Action, hook: Callable[[], None] | None) -> None:
        if action.kind == "F":
            with self.ledger.during("forward"):
                self._forward(action)
        else:
            with self.ledger.during("backward"):
                self._backward(action, hook)

    # -- messages
    def _messages_to_me(self, actions: Sequence[Action]) -> list[Message]:
        """What the stage with this list sends here, in its order."""
        out = []
        for action in actions:
            windows = self.partitions[action.microbatch].windows
            for message in self._sent_after(action):
                if windows[message.target].stage == self.stage:
                    out.append(message)
        return out

    def _sent_after(self, action: Action) -> list[Message]:
        kind, i, w = action
        partition = self.partitions[i]
        if kind == "F":
            return [Message("F", i, w, target) for target in sorted(partition.sends(w))]
        receives = partition.receives[w]
        return [Message("G", i, w, owner) for owner in receives if differentiable(partition, receives[owner])]

    def _needs(self, action: Action) -> list[tuple[Message, int]]:
        """Messages an action waits for, with the stage that sends them."""
        kind, i, w = action
        partition = self.partitions[i]
        if kind == "F":
            messages = [Message("F", i, owner, w) for owner in partition.receives[w]]
        else:
            sends = partition.sends(w)
            messages = [
                Message("G", i, target, w) for target in sorted(sends) if differentiable(partition, sends[target])
            ]
        return [(message, partition.windows[message.source].stage) for message in messages]

    def _vids(self, message: Message) -> list[Vid]:
        partition = self.partitions[message.microbatch]
        if message.kind == "F":
            return partition.receives[message.target][message.source]
        return differentiable(partition, partition.receives[message.source][message.target])

    def _metas(self, message: Message) -> list[TensorMeta]:
        meta = self.partitions[message.microbatch].trace.meta
        return [meta[vid] for vid in self._vids(message)]

    def _receive(self, action: Action) -> list[tuple[Vid, Tensor]]:
        needed = self._needs(action)
        start = time.monotonic()
        out = []
        for message, source in needed:
            out += list(zip(self._vids(message), self.channels.receive(message, source), strict=True))
        if needed:
            self._record(Action("wait", action.microbatch, action.stage), start)
        return out

    def _send(self, action: Action, values: dict[Vid, Tensor]) -> None:
        windows = self.partitions[action.microbatch].windows
        for message in self._sent_after(action):
            self.channels.send(message, windows[message.target].stage, [values[vid] for vid in self._vids(message)])

    # -- actions
    def _forward(self, action: Action) -> None:
        _, i, w = action
        partition = self.partitions[i]
        training = self.weights is not None
        received = {}
        for vid, tensor in self._receive(action):
            received[vid] = tensor.requires_grad_(training and partition.trace.meta[vid].requires_grad)
        start = time.monotonic()
        run, out = forward(self.program, partition, w, received, self.steps[i], self.seeds[i])
        live = Live(partition, w, run)
        if run.last:
            self.outputs[i], self.logged[i] = out, run.logged
            if training:
                loss = trained_loss(out, self.step_name)
                self.losses[i] = None if loss is None else loss.detach()
                live.loss = None if loss is None else loss * self._weight(i) * self.scale
                self.outputs[i] = _without_graph(out)
        self._send(action, run.captured)
        if training:
            self._live[i, w] = live
            self.live_peak = max(self.live_peak, len(self._live))
        else:
            run.release()
        self._record(action, start)

    def _weight(self, microbatch: int) -> float | Tensor:
        assert self.weights is not None
        return self.weights[microbatch]

    def _backward(self, action: Action, hook: Callable[[], None] | None) -> None:
        _, i, w = action
        gradients: dict[Vid, Tensor] = {}
        for vid, gradient in self._receive(action):
            gradients[vid] = gradients[vid] + gradient if vid in gradients else gradient
        self.channels.settle(i, w)
        start = time.monotonic()
        if hook is not None:
            hook()
        self._send(action, backward(self._live.pop((i, w)), gradients))
        self._record(action, start)

    def _record(self, action: Action, start: float) -> None:
        if self.recorder is not None:
            self.recorder(action, start, time.monotonic())


def _without_graph(out: Any) -> Any:
    from torch.utils._pytree import tree_map

    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, out)
