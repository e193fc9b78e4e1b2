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
from dataclasses import replace
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


def cluster_of_run(world: Communicator, device: torch.device, machines: int) -> tuple[Cluster, str]:
    """The devices of this run with their speed, and the memory that is left on the fullest of them.

    Speeds are measured once per machine and number of processes, and kept in `$LIGHTNING_3D_CACHE/machines`. Memory is
    looked at every time.

    Args:
        world: All ranks, neighbours on one machine.
        device: This rank's.
        machines: How many there are.

    Returns:
        The cluster, and where its speeds come from.

    Collectives over `world`: a broadcast and two all-gathers of a few numbers; where nothing is remembered, a few
    all-reduces of 4 MB (CPU) or 64 MB.
    """
    file = memory_folder() / "machines" / f"{_key(world, device, machines)}.json"
    rates = world.broadcast_object(_recall(file) if world.rank == 0 else None, 0)
    where = f"speeds measured in an earlier run ({file})"
    if rates is None:
        rates = _measure(world, device, machines)
        kept = _remember(file, rates) if world.rank == 0 else False
        where = f"speeds measured now, kept in {file}" if kept else "speeds measured now"
    cluster = cluster_of(device, rates, world.size, machines)
    return replace(cluster, reserve=max(world.all_gather_object(_used_by_others(device)))), where


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


def _recall(file: Path) -> Rates | None:
    try:
        return Rates(**{name: float(value) for name, value in json.loads(file.read_text()).items()})
    except (OSError, ValueError, TypeError):
        return None


def _remember(file: Path, rates: Rates) -> bool:
    """Whether it could be written; a folder that cannot be written to is no error."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        partial.write_text(json.dumps(rates._asdict()))
        partial.replace(file)
    except OSError as error:
        _log.debug(f"the machine's speed is not remembered: {error}")
        return False
    return True
