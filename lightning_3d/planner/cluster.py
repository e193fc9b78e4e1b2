"""WHERE does it run?  GPUs, machines and the network between them (no torch here)."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from lightning_3d.errors import ConfigurationError, near
from lightning_3d.planner.constants import GENERATIONS
from lightning_3d.planner.hardware import GB, Gpu, gpu_named

_RATES = {"edr": 100, "hdr": 200, "ndr": 400, "xdr": 800, "opa": 100, "roce": 0, "efa": 0, "eth": 0, "ib": 0}
"""Gbit/s of a network's name; 0: the number behind the name is the rate."""


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
        if self.gpus < 1:
            raise ConfigurationError(f"a cluster of {self.gpus} GPUs: at least 1 is needed.")
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
    match = re.fullmatch(r"([a-z]+)?(\d+)?(?:x(\d+))?", text.strip().lower())
    name = (match[1] or "ib") if match else ""
    if match is None or name not in _RATES or not (match[2] or _RATES[name]):
        raise ConfigurationError(
            f"--internode is {text!r}; it is written like hdr200x8: a network ({', '.join(_RATES)}), Gbit/s of one "
            f"adapter, and adapters per machine.{near(name, _RATES)}"
        )
    return float(match[2] or _RATES[name]) / 8 * GB, int(match[3] or 1)


_FILE_KEYS = {
    "gpu", "gpus", "gpus_per_node", "internode", "domain", "memory_gib", "peak_tflops", "peak_fp8_tflops",
    "memory_gb_per_s", "link_gb_per_s", "reserve_gib", "efficiency", "latency_us", "name",
    "generation",
}  # fmt: skip


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
    gpu = _own_gpu(gpu_named(str(data["gpu"])), data)
    cluster = Cluster.of(gpu, int(data["gpus"]), int(data.get("gpus_per_node", 0)), data.get("internode"))
    return replace(
        cluster,
        domain=int(data.get("domain", cluster.domain)),
        reserve=float(data.get("reserve_gib", 0)) * 2**30,
        efficiency=float(data.get("efficiency", 1)),
        latency=float(data.get("latency_us", 0)) * 1e-6,
    )


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
