"""What a look at the pipeline costs per action, on the host: `python -m tests.observe.overhead`."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from lightning_3d.layout import Layout
from lightning_3d.mesh import coordinate_of
from lightning_3d.observe import TraceRecorder
from lightning_3d.observe.activity import Activity
from lightning_3d.pipeline.action import Action


def microseconds(function: Callable[[], Any], number: int = 20_000) -> float:
    return 1e6 * min(timeit.repeat(function, number=number, repeat=5)) / number


def main() -> None:
    layout, action, parcel = Layout(pp=2), Action("F", 0, 0), object()
    place: Any = SimpleNamespace(
        rank=1,
        layout=layout,
        at=coordinate_of(layout, 1),
        ledger=SimpleNamespace(traffic={}),
        device=torch.device("cpu"),
    )
    activity, recorder = Activity(place), TraceRecorder(wanted=lambda step: step == 1)

    def note() -> None:
        activity.begins(action)
        activity.waits(parcel)
        activity.waits(None)

    def record() -> None:
        recorder(action, recorder.mark(), recorder.mark())

    print(f"the note of an action and of one wait: {microseconds(note):.2f} us")
    print(f"the watch thread's look, once per second: {microseconds(activity.look, 2000):.1f} us")
    recorder.begin_step(0)
    print(f"a recorder in a step that is not wanted: {microseconds(record):.2f} us")
    recorder.begin_step(1)
    print(f"a recorder in a step that is: {microseconds(record):.2f} us")


if __name__ == "__main__":
    main()
