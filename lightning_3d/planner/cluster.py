"""WHERE does it run?  GPUs, machines and the network between them (no torch here)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

from lightning_3d.errors import ConfigurationError, near
from lightning_3d.planner.constants import GENERATIONS
from lightning_3d.planner.hardware import GB, GIB, Gpu, gpu_named

_RATES = {"edr": 100, "hdr": 200, "ndr": 400, "xdr": 800, "opa": 100, "roce": 0, "efa": 0, "eth": 0, "ib": 0}
"""Gbit/s of a network's name; 0: the number behind the name is the rate."""
_REACHED = {"opa": 0.63}
"""What NCCL reaches of an adapter's rate, relative to InfiniBand (the generation's `network`: 0.64). Omni-Path: an
all-reduce over 4 machines of 8 A100 ran at 5.07 of an adapter's 12.5 GB/s, 0.405 (bigscience-workshop/bigscience,
experiments/bandwidth)."""


@dataclass(frozen=True)
class Cluster:
    """A number of equal machines.

    Args:
        gpu: The GPU, or its name.
        gpus: How many there are.
        gpus_per_node: How many a machine has; 0: as usual for this GPU.
        domain: How many GPUs share the fast link; 0: those of a machine (72 for GB200 NVL72).
        nic: Bytes per second and direction of one network adapter; 0: as usual for this GPU.
        nics: Network adapters of a machine; 0: one per GPU.
        reserve: Bytes of every GPU that others use (a desktop, another job).
        efficiency: Share of the kernels' usual speed that these machines reach (power caps, old drivers).
        latency: Seconds of the smallest collective between machines; 0: as usual for this GPU's generation.
    """

    gpu: Gpu
    gpus: int
    gpus_per_node: int = 0
    domain: int = 0
    nic: float = 0.0
    nics: int = 0
    reserve: float = 0.0
    efficiency: float = 1.0
    latency: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.gpus, bool) or not isinstance(self.gpus, int) or self.gpus < 1:
            raise ConfigurationError(f"a cluster of {self.gpus!r} GPUs: a whole number of at least 1 is needed.")
        for name, means in (("gpus_per_node", "usual for this GPU"), ("domain", "those of a machine")):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be at least 1 (0: {means}).")
        if not (self.efficiency > 0 and self.latency >= 0 and 0 <= self.reserve < self.gpu.memory):
            raise ConfigurationError(
                f"efficiency {self.efficiency:g}, latency {self.latency:g} s, reserve {self.reserve / GIB:g} GiB: the "
                f"first must be above 0, the others not below it, and {self.gpu.name} has "
                f"{self.gpu.memory / GIB:.4g} GiB."
            )
        per_node = self.gpus_per_node or self.gpu.gpus_per_node
        object.__setattr__(self, "gpus_per_node", min(per_node, self.gpus))
        if self.gpus % self.gpus_per_node:
            raise ConfigurationError(
                f"{self.gpus} GPUs cannot stand in machines of {self.gpus_per_node}: {self.gpus} is not a multiple. "
                f"Give {self.gpus // self.gpus_per_node * self.gpus_per_node} GPUs, or another --gpus-per-node."
            )
        if not self.domain:
            domain = self.gpus_per_node if self.gpu.domain == self.gpu.gpus_per_node else self.gpu.domain
            object.__setattr__(self, "domain", domain)
        object.__setattr__(self, "nic", self.nic or self.gpu.nic)
        object.__setattr__(self, "nics", self.nics or self.gpus_per_node)

    @classmethod
    def of(
        cls, gpu: str | Gpu, gpus: int, gpus_per_node: int = 0, internode: str | None = None, reserve: float = 0.0
    ) -> Cluster:
        """A cluster out of names: `Cluster.of("a100-80gb", 64, 8, "hdr200x8")`.

        Raises:
            ConfigurationError: A name is unknown, or the machines do not come out even.
        """
        found = gpu if isinstance(gpu, Gpu) else gpu_named(gpu)
        nic, nics = read_internode(internode) if internode else (0.0, 0)
        return cls(found, gpus, gpus_per_node, nic=nic, nics=nics, reserve=reserve)

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return self.gpus // self.gpus_per_node

    @property
    def nic_per_gpu(self) -> float:
        """Bytes per second of network that a GPU has if all of its machine send."""
        return self.nic * self.nics / self.gpus_per_node

    def with_gpus(self, gpus: int) -> Cluster:
        """The same machines, more or fewer."""
        return replace(self, gpus=gpus)

    def __str__(self) -> str:
        nodes = f"{self.nodes} machine{'s' if self.nodes > 1 else ''} of {self.gpus_per_node}"
        network = f", {self.nics} x {self.nic / GB:.4g} GB/s between them" if self.nodes > 1 else ""
        return f"{self.gpus} x {self.gpu.name} ({nodes}{network})"


def read_internode(text: str) -> tuple[float, int]:
    """Rate of an adapter in bytes per second and adapters per machine: `hdr200x8`, `ndr400x4`, `roce100x4`, `opa100x4`.

    Raises:
        ConfigurationError: It cannot be read.
    """
    match = re.fullmatch(r"([a-z]+)?(\d+)?(?:x(\d+))?", str(text).strip().lower())
    name = (match[1] or "ib") if match else ""
    rate, count = (int(match[2] or _RATES.get(name, 0)), int(match[3] or 1)) if match else (0, 0)
    if name not in _RATES or not rate or not count:
        raise ConfigurationError(
            f"--internode is {text!r}; it is written like hdr200x8: a network ({', '.join(_RATES)}), Gbit/s of one "
            f"adapter, and adapters per machine.{near(name, _RATES)}"
        )
    return rate / 8 * GB * _REACHED.get(name, 1.0), count


_TEXTS = ("gpu", "internode", "name", "generation")
_WHOLE = ("gpus", "gpus_per_node", "domain")
_POSITIVE = ("memory_gib", "peak_tflops", "peak_fp8_tflops", "memory_gb_per_s", "link_gb_per_s", "efficiency")
_FILE_KEYS = {*_TEXTS, *_WHOLE, *_POSITIVE, "reserve_gib", "latency_us"}
_MOST_EFFICIENT = 2.0
"""A larger efficiency is a percentage that was meant as a share."""


def read_cluster(path: str | Path) -> Cluster:
    """A cluster out of a YAML file; keys: docs/planner.md.

    Raises:
        ConfigurationError: There is no such file, or a key is unknown or missing.
    """
    import yaml

    file = Path(path)
    if not file.is_file():
        raise ConfigurationError(f"there is no file {str(file)!r} with a description of the cluster.")
    try:
        data: Any = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{str(file)!r} is no YAML: {error}.") from error
    if not isinstance(data, dict):
        raise ConfigurationError(f"{str(file)!r} must hold keys and values, for example gpu: a100-80gb and gpus: 64.")
    for key in data:
        if key not in _FILE_KEYS:
            raise ConfigurationError(
                f"{str(file)!r}: {key!r} is not known.{near(str(key), _FILE_KEYS)} Keys are "
                f"{', '.join(sorted(_FILE_KEYS))}."
            )
    for key in ("gpu", "gpus"):
        if key not in data:
            raise ConfigurationError(f"{str(file)!r}: {key!r} is missing.")
    for key, value in data.items():
        wanted = _wrong(key, value)
        if wanted:
            raise ConfigurationError(f"{str(file)!r}: {key} is {value!r}; it must be {wanted}.")
    gpu = _own_gpu(gpu_named(data["gpu"]), data)
    cluster = Cluster.of(gpu, data["gpus"], data.get("gpus_per_node", 0), data.get("internode"))
    domain = data.get("domain", cluster.domain)
    if domain % cluster.gpus_per_node and cluster.gpus_per_node % domain:
        raise ConfigurationError(
            f"{str(file)!r}: domain is {domain}, but a machine has {cluster.gpus_per_node} GPUs: those that share the "
            "fast link are a part of a machine that divides it, or several whole machines (72 for an NVL72)."
        )
    return replace(
        cluster,
        domain=domain,
        reserve=float(data.get("reserve_gib", 0)) * 2**30,
        efficiency=float(data.get("efficiency", 1)),
        latency=float(data.get("latency_us", 0)) * 1e-6,
    )


def cluster_of_file(path: str | Path, gpus: int | None, said: Sequence[str], flag: Callable[[str], str]) -> Cluster:
    """A cluster file, of which a command line may say another number of GPUs.

    Args:
        path: The file.
        gpus: How many GPUs; None: as it says.
        said: What else the command line says, which is the file's to say.
        flag: How a name is written there.

    Raises:
        ConfigurationError: Both say something.
    """
    cluster = read_cluster(path)
    if said:
        flags = " and ".join(flag(name) for name in said)
        raise ConfigurationError(
            f"{flags} and a cluster file both describe the machines, and only --gpus goes with a file. Leave "
            f"{flags} out, or change {', '.join(repr(name) for name in said)} in {str(path)!r}."
        )
    return cluster if gpus is None else cluster.with_gpus(gpus)


def _wrong(key: str, value: Any) -> str | None:
    """What a value of a cluster file should be, if it is something else."""
    if key in _TEXTS:
        return None if isinstance(value, str) else "a text"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        return "a number, without its unit"
    if key in _WHOLE:
        return None if isinstance(value, int) and value >= 1 else "a whole number of at least 1"
    if key in _POSITIVE and value <= 0:
        return "above 0"
    if key == "efficiency" and value > _MOST_EFFICIENT:
        return "a share of the usual speed: 0.95, not 95"
    return "at least 0" if value < 0 else None


def _own_gpu(gpu: Gpu, data: dict[str, Any]) -> Gpu:
    """A GPU of the table with what the file says differently."""
    scale = {
        "memory_gib": ("memory", 2.0**30),
        "peak_tflops": ("bf16", 1e12),
        "peak_fp8_tflops": ("fp8", 1e12),
        "memory_gb_per_s": ("memory_bandwidth", GB),
        "link_gb_per_s": ("link", GB),
    }
    changes: dict[str, Any] = {field: float(data[key]) * unit for key, (field, unit) in scale.items() if key in data}
    if "link" in changes:
        changes["pair_link"] = changes["link"]
    if "name" in data:
        changes["name"] = str(data["name"])
    if "generation" in data:
        if data["generation"] not in GENERATIONS:
            raise ConfigurationError(
                f"generation {data['generation']!r} has no measured constants; known are {', '.join(GENERATIONS)}."
                + near(str(data["generation"]), GENERATIONS)
            )
        changes["generation"] = data["generation"]
    assert set(changes) <= {f.name for f in fields(Gpu)}
    return replace(gpu, **changes)
