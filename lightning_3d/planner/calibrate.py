"""HOW FAST is this machine?  Its matrix products, memory and links measured in half a minute, as a cluster file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_3d.errors import ConfigurationError
from lightning_3d.planner.cluster import Cluster
from lightning_3d.planner.constants import GENERATIONS, Generation
from lightning_3d.planner.hardware import GB, GIB, Gpu, gpus

_SECONDS = 1.0
"""Seconds of each measurement, unless somebody is in a hurry."""


def calibrate(path: Path) -> str:
    """Measure this machine and write its description. Returns what was found, as text.

    Raises:
        ConfigurationError: The file cannot be written there.
    """
    import yaml

    if path.suffix not in (".yaml", ".yml") or not path.resolve().parent.is_dir():
        raise ConfigurationError(f"--calibrate writes a .yaml file into a folder that exists, not {str(path)!r}.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else max(1, os.cpu_count() or 1)
    cluster = measured_cluster(count)
    gpu = cluster.gpu
    data = {
        "name": gpu.name,
        "gpu": _base().name,
        "generation": gpu.generation,
        "gpus": cluster.gpus,
        "gpus_per_node": cluster.gpus_per_node,
        "memory_gib": round(gpu.memory / GIB, 2),
        "peak_tflops": float(f"{gpu.bf16 / 1e12:.4g}"),
        "memory_gb_per_s": float(f"{gpu.memory_bandwidth / GB:.4g}"),
        "link_gb_per_s": float(f"{gpu.link / GB:.4g}"),
    }
    path.write_text("# measured by lightning-3d plan --calibrate\n" + yaml.safe_dump(data, sort_keys=False))
    lines = [f"{key}: {value}" for key, value in data.items()]
    if torch.cuda.is_available() and _known() is None:
        lines.append(f"this device is not in the table: what it reaches of these is taken from {_base().name}")
    return "\n".join([*lines, f"written: {path}", f"use it: lightning-3d plan --cluster {path} ...", ""])


class Rates(NamedTuple):
    """What one device reaches while all of them work.

    Attributes:
        products: Operations per second of a large matrix product.
        memory: Bytes per second of reading and writing memory.
        link: Bytes per second and direction to a neighbour in the machine, as a peak: what is reached of it is known.
        network: The same of one adapter between machines; 0: not measured.
    """

    products: float
    memory: float
    link: float
    network: float = 0.0


def measured_cluster(processes: int) -> Cluster:
    """This machine as a cluster of so many devices (on the CPU they share its cores).

    Raises:
        ConfigurationError: None.

    Collectives: none; links are measured as copies (between GPUs where there are two, otherwise in memory).
    """
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise ConfigurationError(f"this machine as {processes!r} devices: a whole number of at least 1 is needed.")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    share = 1.0 if device.type == "cuda" else min(1.0, (os.cpu_count() or 1) / processes)
    products, moved, link = matmul_rate(device), memory_rate(device), copy_rate(device) * share
    if device.type == "cuda":
        link /= reached(device).link
    return cluster_of(device, Rates(products * share, moved * share, link), processes)


def cluster_of(device: torch.device, rates: Rates, processes: int, machines: int = 1) -> Cluster:
    """So many devices like this one, of these rates."""
    base, constants, each = _base(), reached(device), processes // machines
    gpu: Gpu = replace(
        base,
        name=torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU of {os.cpu_count()} cores, shared by {each}",
        bf16=rates.products / constants.matmul,  # the planner multiplies by what its generation reaches
        memory=float(_capacity(device)) / (1 if device.type == "cuda" else each),
        memory_bandwidth=rates.memory / constants.memory,
        link=rates.link,
        pair_link=rates.link,
        domain=each,
        gpus_per_node=each,
        generation=base.generation if device.type == "cuda" else "cpu",
    )
    return Cluster(gpu, processes, each, domain=each, nic=rates.network)


def reached(device: torch.device) -> Generation:
    """What devices of this kind reach of their peaks."""
    return GENERATIONS["cpu" if device.type == "cpu" else _base().generation]


def _known() -> Gpu | None:
    """The card of the table that this device is; a CPU is none, and has constants of its own."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_name(0).upper()
    return next((gpu for key, gpu in gpus().items() if key.split("-")[0] in found), None)


def _base() -> Gpu:
    """What the description begins with: the card, or an A100."""
    return _known() or gpus()["A100-80GB-SXM"]


def _capacity(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(physical, _container_limit() or physical)


def _container_limit() -> int | None:
    """What a container may use of the machine's memory, where that is said."""
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(file).read_text())
        except (OSError, ValueError):  # not there, or "max"
            continue
    return None


def matmul_rate(device: torch.device, within: float | None = None) -> float:
    """Operations per second of a large matrix product."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * size**3 / _seconds(lambda: a @ b, device, within)


def memory_rate(device: torch.device, within: float | None = None) -> float:
    """Bytes per second of reading and writing memory."""
    x = torch.zeros((1 << 28) if device.type == "cuda" else (1 << 24), device=device)
    return 2.0 * x.nbytes / _seconds(lambda: x.add_(1.0), device, within)


def copy_rate(device: torch.device, within: float | None = None) -> float:
    """Bytes per second from one device to the next.

    Where there is one device, a quarter of a copy in memory: into the socket and out of it, each read and written.
    """
    count = 1 << 26 if device.type == "cuda" else 1 << 22
    x = torch.zeros(count, device=device)
    other = torch.device("cuda", 1) if device.type == "cuda" and torch.cuda.device_count() > 1 else device
    y = torch.empty_like(x, device=other)
    return x.nbytes / _seconds(lambda: y.copy_(x), device, within) / (1 if other != device else 4)


def _seconds(call: Callable[[], Tensor], device: torch.device, within: float | None) -> float:
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < (_SECONDS if within is None else within):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
