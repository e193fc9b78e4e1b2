"""HOW does one stage walk its list of actions?  Receives, windows, sends: one batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor

from lightning_3d.comm import Ledger
from lightning_3d.pipeline.channels import Channels
from lightning_3d.pipeline.events import Vid
from lightning_3d.pipeline.execution import (
    Live,
    Program,
    backward,
    backward_of_weights,
    divide,
    forward,
    trained_loss,
)
from lightning_3d.pipeline.partition import Partition
from lightning_3d.pipeline.results import detached
from lightning_3d.pipeline.rng import Seeds
from lightning_3d.pipeline.routes import Routes
from lightning_3d.pipeline.schedule import Action
from lightning_3d.pipeline.stage import Logged

Recorder = Callable[[Action, Any, Any], None]


class Walk:
    """One batch on one stage. `lists` of `run` name windows; several of them may be this stage's.

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
        recorder: Told when every action, and every wait, began and ended: in marks of its own (`recorder.mark()`) if it
            makes some, else in seconds of `time.monotonic()`.
        on_action: Called with every action before it begins, and with None after the last.
        agreed: Called once, before anything is sent or received; may raise.

    Attributes:
        outputs, losses, logged: Per microbatch, filled where the last window runs.
        live_peak: Largest number of live forwards (microbatches; with several windows per stage, of windows).
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
        on_action: Callable[[Action | None], None] | None = None,
        agreed: Callable[[], None] | None = None,
    ) -> None:
        self._agreed = agreed
        self.program, self.channels, self.stage = program, channels, stage
        self.partitions, self.steps, self.seeds = partitions, steps, seeds
        self.weights, self.scale = weights, scale
        self.step_name, self.ledger, self.recorder, self.on_action = step_name, ledger, recorder, on_action
        self._now: Callable[[], Any] = getattr(recorder, "mark", time.monotonic) if recorder is not None else _never
        count = len(partitions)
        self.outputs: list[Any] = [None] * count
        self.losses: list[Tensor | None] = [None] * count
        self.logged: list[list[Logged]] = [[] for _ in range(count)]
        self.live_peak = 0
        self._live: dict[tuple[int, int], Live] = {}
        self._posted = self._number = 0

    def run(
        self,
        routes: Routes,
        before_last_backward: Callable[[], None] | None = None,
        around_backward: Callable[[int], AbstractContextManager[None]] | None = None,
    ) -> None:
        """Walk this stage's list.

        Args:
            routes: Of this batch.
            before_last_backward: Called before the last action that gives gradients of weights.
            around_backward: Entered, with the window, around every action that completes gradients of a window.
        """
        mine = routes.lists[self.stage]
        self._routes, self._around_backward = routes, around_backward
        several = self.weights is not None and len(self.partitions) > 1
        self.program.step_values.begin(m for p in self.partitions for m in p.trace.step_metrics if several)
        # only these give gradients of weights
        last_backward = max((k for k, action in enumerate(mine) if action.kind in ("B", "W")), default=-1)
        if not self.channels.knows(routes):  # `begin` waits for other stages
            self._settle()
        self.channels.begin(routes)
        try:
            if mine and routes.needs[mine[0]]:  # it waits anyway: the stage that begins may need this core till then
                self._settle()
            with self.program.run():
                for k, action in enumerate(mine):
                    self._number = k
                    if self._posted < routes.due[k] and not routes.needs[action]:
                        self._post(routes.due[k])
                    if self.on_action is not None:
                        self.on_action(action)
                    self._execute(action, before_last_backward if k == last_backward else None)
            self._settle()
            self.channels.end()
            self.program.step_values.finish()
        except BaseException:
            self.channels.abandon()
            raise
        finally:
            self._live.clear()
            if self.on_action is not None:
                self.on_action(None)

    def _execute(self, action: Action, hook: Callable[[], None] | None) -> None:
        before = self.ledger.phase
        self.ledger.phase = "forward" if action.kind == "F" else "backward"
        try:
            if action.kind == "F":
                self._forward(action)
                return
            run = self._backward_of_weights if action.kind == "W" else self._backward
            if self._around_backward is None or action.kind == "I":
                run(action, hook)
                return
            with self._around_backward(action[2]):
                run(action, hook)
        finally:
            self.ledger.phase = before

    # -- messages
    def _receive(self, action: Action) -> list[tuple[Vid, Tensor]]:
        needed = self._routes.needs[action]
        if not needed:
            return []
        if self._agreed is not None:
            self._settle()
        if self._posted < self._routes.due[self._number]:
            self._post(self._routes.due[self._number])
        if self._posted < self._routes.ahead[self._number] and not self.channels.arrived(needed):
            self._post(self._routes.ahead[self._number])
        start = self._now()
        out: list[tuple[Vid, Tensor]] = []
        for parcel in needed:
            out.extend(zip(parcel.vids, self.channels.receive(parcel), strict=True))
        if self.recorder is not None:
            self._record(Action("wait", action.microbatch, action.stage), start)
        return out

    def _post(self, count: int) -> None:
        """Post receives till there are so many, which takes a while: best when this stage has to wait anyway."""
        self._settle()
        self.channels.post(self._routes.posts[self._posted : count])
        self._posted = count

    def _settle(self) -> None:
        """Stages that cannot begin yet wait here, and the first one has a forward behind it: nobody loses time."""
        if self._agreed is not None:
            agreed, self._agreed = self._agreed, None
            agreed()

    def _send(self, action: Action, values: Mapping[Vid, Tensor]) -> None:
        if self._agreed is not None:
            self._settle()
        for parcel in self._routes.sends[action]:
            self.channels.send(parcel, [values[vid] for vid in parcel.vids])

    # -- actions
    def _forward(self, action: Action) -> None:
        _, i, w = action
        partition = self.partitions[i]
        training = self.weights is not None
        meta = partition.trace.meta
        start = self._now()

        def fetch() -> dict[Vid, Tensor]:
            nonlocal start
            values = self._receive(action)
            start = self._now() if values else start
            return {vid: x.requires_grad_(training and meta[vid].requires_grad) for vid, x in values}

        deliver = partial(self._send, action)
        run, out = forward(self.program, partition, w, {}, self.steps[i], self.seeds[i], fetch, deliver)
        live = Live(partition, w, run)
        if run.last:
            self.outputs[i], self.logged[i] = out, run.logged
            if training:
                loss = trained_loss(out, self.step_name)
                self.losses[i] = None if loss is None else loss.detach()
                live.loss, live.factors = loss, (self._weight(i), self.scale)
                self.outputs[i] = detached(out)
        if not run.delivered:
            self._send(action, run.captured)
        run.captured.clear()
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
        live = self._live[i, w] if action.kind == "I" else self._live.pop((i, w))
        if action.kind == "I":  # while the gradients are under way
            divide(live, dict.fromkeys(vid for parcel in self._routes.needs[action] for vid in parcel.vids))
        gradients: dict[Vid, Tensor] = {}
        for vid, gradient in self._receive(action):
            gradients[vid] = gradients[vid] + gradient if vid in gradients else gradient
        start = self._now()
        if hook is not None:
            hook()
        backward(live, gradients, partial(self._send, action), weights_later=action.kind == "I")
        self._record(action, start)

    def _backward_of_weights(self, action: Action, hook: Callable[[], None] | None) -> None:
        start = self._now()
        if hook is not None:
            hook()
        backward_of_weights(self._live.pop(action[1:]))
        self._record(action, start)

    def _record(self, action: Action, start: Any) -> None:
        if self.recorder is not None:
            self.recorder(action, start, self._now())


def _never() -> None:
    """Nobody wants to know the time."""
