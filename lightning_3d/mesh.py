"""WHICH rank?  Layout -> coordinates, groups, DeviceMesh: the only rank arithmetic.

Order of axes (outermost first): dp, pp, cp, tp. Tensor-parallel peers have neighbouring ranks and so share a machine.
The pipeline coordinate is *reversed*: the last stage holds the lowest ranks, so global rank 0 is where the loss is,
and with it everything Lightning does on rank zero (loggers, progress bar, returned predictions).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.comm import Communicator, Ledger, ProcessCommunicator, world_communicator
from lightning_3d.layout import AXES, Layout


@dataclass(frozen=True)
class Coordinate:
    """Where a rank stands: `pp` is the stage, 0 is the first part of the model."""

    dp: int
    pp: int
    cp: int
    tp: int


def rank_of(layout: Layout, at: Coordinate) -> int:
    """The global rank at a coordinate."""
    reversed_stage = layout.pp - 1 - at.pp
    return ((at.dp * layout.pp + reversed_stage) * layout.cp + at.cp) * layout.tp + at.tp


def coordinate_of(layout: Layout, rank: int) -> Coordinate:
    """The coordinate of a global rank."""
    rest, tp = divmod(rank, layout.tp)
    rest, cp = divmod(rest, layout.cp)
    dp, reversed_stage = divmod(rest, layout.pp)
    return Coordinate(dp, layout.pp - 1 - reversed_stage, cp, tp)


def coordinates(layout: Layout) -> Iterator[Coordinate]:
    """All coordinates, dp outermost."""
    for dp, pp, cp, tp in product(range(layout.dp), range(layout.pp), range(layout.cp), range(layout.tp)):
        yield Coordinate(dp, pp, cp, tp)


def _new_group(ranks: list[int], timeout: timedelta | None, backend: str | None = None) -> Any:
    """A group that is not bound to the GPU, as Lightning binds the default group, which others inherit.

    On a bound group NCCL runs all that a rank sends and receives in one order: a receive that is posted ahead would
    hold up the sends to other ranks, and stages would wait for each other for ever. And groups under a bound one are
    split off its NCCL communicator by all ranks together, which hangs if they are gloo's.
    """
    world = dist.group.WORLD
    assert world is not None
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        return dist.new_group(ranks, timeout=timeout, backend=backend)
    finally:
        world.bound_device_id = bound


class Mesh:
    """This rank's place in the layout and its communicators.

    Making one is collective over all ranks: every group is created on every rank, in one order.

    Args:
        layout: The sizes; `layout.world_size` must be the number of processes.
        device: This rank's device (on CUDA it must already be the current device).
        timeout: How long a collective may wait before the process group gives up.
        ledger: Counts the communication of all axes.

    Attributes:
        tensor: Communicator over tp.
        data: Communicator over dp.
        pipeline: Communicator over pp; `peer(stage)` is a stage's index in it, the last stage has index 0.
        forward, backward: Point-to-point communicators over pp, for messages to later and to earlier stages (NCCL runs
            what two ranks do on one communicator in order, so sends and receives must not share one).
        replica: Communicator over all ranks that hold one copy of the model; index 0 is on the last stage.
        world: Communicator over all ranks.
        control, replica_control: Communicators over dp and over the replica whose tensors live on the CPU, for what
            Python decides on (no device synchronisation).
        device_mesh: `DeviceMesh` with axes dp, pp, cp, tp; its pp coordinate counts from the last stage.
    """

    def __init__(
        self, layout: Layout, device: torch.device, timeout: timedelta | None = None, ledger: Ledger | None = None
    ) -> None:
        layout.check_world_size(dist.get_world_size())
        self.layout, self.device, self.timeout = layout, device, timeout
        self.ledger = ledger if ledger is not None else Ledger()
        self.rank = dist.get_rank()
        self.at = coordinate_of(layout, self.rank)
        lines = {axis: self._lines([axis], axis) for axis in AXES}
        self.tensor, self.data, self.pipeline = lines["tp"], lines["dp"], lines["pp"]
        self.context = lines["cp"]
        # ZeRO-3 gathers while reductions are under way, and a rank may be further ahead with one than with the other
        self.gathers = self._lines(["dp"], "dp") if layout.zero == 3 else self.data
        if layout.pp > 1:
            self.forward, self.backward = self._lines(["pp"], "pp"), self._lines(["pp"], "pp")
        else:
            self.forward = self.backward = self.pipeline
        self.replica = self._lines(["pp", "cp", "tp"], "replica")
        self.world = world_communicator(device, self.ledger)
        # groups of their own on the CPU, too: flags are exchanged while reductions are under way, of which a rank may
        # have started more than another
        self.control = self._lines(["dp"], "control", backend="gloo")
        self.replica_control = self._lines(["pp", "cp", "tp"], "control", backend="gloo")
        self._holders: dict[tuple[int, ...], Communicator] = {}
        self._parts: dict[int, Communicator] = {}
        self.device_mesh = DeviceMesh.from_group(
            [lines[axis].group for axis in AXES],
            device.type,
            mesh=torch.arange(layout.world_size).view([getattr(layout, axis) for axis in AXES]),
            mesh_dim_names=AXES,
        )

    @property
    def is_last_stage(self) -> bool:
        return self.at.pp == self.layout.pp - 1

    @property
    def is_first_stage(self) -> bool:
        return self.at.pp == 0

    def holders(self, stages: tuple[int, ...]) -> Communicator:
        """Communicator over the given stages at this (dp, cp, tp), for parameters that several stages use.

        Collective over all ranks the first time a set of stages is asked for, in the same order everywhere; ranks of
        other stages get an axis of size one.
        """
        if stages not in self._holders:
            mine = self._groups(["pp"], "pp", stages)
            self._holders[stages] = mine or Communicator("pp", ledger=self.ledger)
        return self._holders[stages]

    def tensor_part(self, count: int) -> Communicator:
        """Communicator over this rank and its tensor-parallel neighbours, `count` of them (a divisor of tp).

        Collective over all ranks the first time a count is asked for, in the same order everywhere.
        """
        if count not in self._parts:
            mine: ProcessCommunicator | None = None
            for start in range(0, self.layout.world_size, count):  # tp is the innermost axis
                ranks = list(range(start, start + count))
                group = _new_group(ranks, self.timeout)
                if self.rank in ranks:
                    mine = ProcessCommunicator("tp", group, self.device, self.ledger)
            assert mine is not None
            self._parts[count] = mine
        return self._parts[count]

    def peer(self, stage: int) -> int:
        """Index of a stage in `pipeline`, `forward` and `backward` (groups are in order of global rank)."""
        return self.layout.pp - 1 - stage

    def _lines(self, axes: list[str], name: str, backend: str | None = None) -> ProcessCommunicator:
        """Make a group for every line along `axes` (all ranks that agree in the other axes); return this rank's."""
        mine = self._groups(axes, name, tuple(range(self.layout.pp)), backend)
        assert mine is not None
        return mine

    def _groups(
        self, axes: list[str], name: str, stages: tuple[int, ...], backend: str | None = None
    ) -> ProcessCommunicator | None:
        members: dict[tuple[int, ...], list[int]] = {}
        for at in coordinates(self.layout):
            if at.pp in stages:
                key = tuple(getattr(at, axis) for axis in AXES if axis not in axes)
                members.setdefault(key, []).append(rank_of(self.layout, at))
        mine: ProcessCommunicator | None = None
        for ranks in members.values():
            group = _new_group(sorted(ranks), self.timeout, backend)
            if self.rank in ranks:
                device = torch.device("cpu") if backend == "gloo" else self.device
                mine = ProcessCommunicator(name, group, device, self.ledger)
        return mine
