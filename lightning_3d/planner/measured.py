"""HOW FAST are the devices of this run, and the links between them?  Measured while all work, in seconds; remembered.

On one machine an all-reduce over all ranks gives the link. On several it gives the network, which is the slowest part
of its ring, and a copy between two devices gives the link inside.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from statistics import median

import torch

from lightning_3d.comm import Communicator
from lightning_3d.planner.calibrate import Rates, cluster_of, copy_rate, matmul_rate, memory_rate, reached
from lightning_3d.planner.cluster import Cluster
from lightning_3d.planner.collectives import Links
from lightning_3d.proof_memory import memory_folder

_log = logging.getLogger(__name__)
_WITHIN = 0.3
"""Seconds of a measurement on one device."""
_REPEATS = 4
_MEASUREMENTS = 3
"""The first so many runs measure, and the fastest counts: a machine that is busy with something else looks slow."""


def cluster_of_run(world: Communicator, device: torch.device, machines: int) -> tuple[Cluster, str]:
    """The devices of this run with their speed, and the memory that is left on the fullest of them.

    Speeds are measured in the first three runs per machine and number of processes, and the fastest are kept in
    `$LIGHTNING_3D_CACHE/machines`. Memory is looked at every time.

    Args:
        world: All ranks, neighbours on one machine.
        device: This rank's.
        machines: How many there are.

    Returns:
        The cluster, and where its speeds come from.

    Collectives over `world`: a broadcast and two all-gathers of a few numbers; where it is measured, a few
    all-reduces of 4 MB (CPU) or 64 MB.
    """
    file = memory_folder() / "machines" / f"{_key(world, device, machines)}.json"
    known: Known | None = world.broadcast_object(_recall(file) if world.rank == 0 else None, 0)
    if known is None or known.count < _MEASUREMENTS:
        known = _faster(known, Known(_measure(world, device, machines), 1, time.time()))
        kept = _remember(file, known) if world.rank == 0 else False
        where = "speeds measured now" + (f", the fastest of {known.count} runs" if known.count > 1 else "")
        where += f", kept in {file}" if kept else ""
    else:
        where = f"speeds measured {known.age}, the fastest of {known.count} runs (delete {file} to measure anew)"
    rates = known.rates
    cluster = cluster_of(device, rates, world.size, machines)
    return replace(cluster, reserve=max(world.all_gather_object(_used_by_others(device)))), where


@dataclass(frozen=True)
class Known:
    """What is remembered of a machine.

    Attributes:
        rates: The fastest of all measurements.
        count: How many there were.
        when: Seconds since 1970 of the last one.
    """

    rates: Rates
    count: int
    when: float

    @property
    def age(self) -> str:
        """In days or hours."""
        hours = max(0, int((time.time() - self.when) / 3600))
        number, unit = (hours // 24, "day") if hours >= 24 else (hours, "hour")
        return f"{number} {unit}{'s' if number > 1 else ''} ago" if number else "less than an hour ago"


def _faster(known: Known | None, new: Known) -> Known:
    if known is None:
        return new
    return Known(Rates(*map(max, known.rates, new.rates)), known.count + 1, new.when)


def _measure(world: Communicator, device: torch.device, machines: int) -> Rates:
    world.barrier()  # all work at the same time, as in a run
    mine = Rates(matmul_rate(device, _WITHIN), memory_rate(device, _WITHIN), copy_rate(device, _WITHIN))
    slowest = Rates(*(min(column) for column in zip(*world.all_gather_object(mine), strict=True)))
    link = slowest.link / reached(device).link
    if world.size == 1:
        return slowest._replace(link=link)
    traffic = _all_reduced(world, device)
    unit = Links(cluster_of(device, Rates(1.0, 1.0, 1.0, 1.0), world.size, machines))
    if machines == 1:
        return slowest._replace(link=traffic / unit.inside(world.size, "all_reduce"))
    return slowest._replace(link=link, network=traffic / (unit.constants.network * world.size / machines))


def _all_reduced(world: Communicator, device: torch.device) -> float:
    """Bytes per second that a rank sends in a large all-reduce: a ring sends `2 (n-1)/n` of the operand."""
    operand = torch.zeros((1 << 24) if device.type == "cuda" else (1 << 20), device=device)
    seconds = []
    for _ in range(_REPEATS):
        world.barrier()
        begin = time.perf_counter()
        world.all_reduce(operand)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    slowest = max(world.all_gather_object(median(seconds[1:])))
    return 2 * (world.size - 1) / world.size * operand.nbytes / slowest


def _used_by_others(device: torch.device) -> float:
    """Bytes of a GPU that this process cannot have (its own context counts as that of any run)."""
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return float(max(0, total - free - torch.cuda.memory_reserved(device) - _CONTEXT))


_CONTEXT = 1 << 30


def _key(world: Communicator, device: torch.device, machines: int) -> str:
    """What the speeds depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} cores"
    parts = (platform.node(), name, world.size, machines, torch.get_num_threads(), torch.__version__)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _recall(file: Path) -> Known | None:
    """What an earlier run wrote; a file that cannot be used is measured anew."""
    try:
        data = json.loads(file.read_text())
        known = Known(Rates(**data["rates"]), data["count"], data["when"])
        usable = all(isfinite(x) and x > 0 for x in (*known.rates[:3], known.count, known.when))
        return known if usable and isfinite(known.rates.network) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _remember(file: Path, known: Known) -> bool:
    """Whether it could be written; a folder that cannot be written to is no error."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        partial.write_text(json.dumps({"rates": known.rates._asdict(), "count": known.count, "when": known.when}))
        partial.replace(file)
    except OSError as error:
        _log.debug(f"the machine's speed is not remembered: {error}")
        return False
    return True
