"""WHAT can a GPU do?  Peaks, memory and links out of `data/hardware.csv`, which names their sources."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from lightning_3d.errors import ConfigurationError, near

GB, GIB = 1e9, 2.0**30
TERA = 1e12

_SPELLINGS = {
    "v100": "V100-32GB-SXM",
    "v100-32gb": "V100-32GB-SXM",
    "a100": "A100-80GB-SXM",
    "a100-40gb": "A100-40GB-SXM",
    "a100-80gb": "A100-80GB-SXM",
    "h100": "H100-80GB-SXM",
    "h100-80gb": "H100-80GB-SXM",
    "h100-96gb": "H100-96GB-SXM-HBM2e",
    "h200": "H200-141GB-SXM",
    "h200-141gb": "H200-141GB-SXM",
    "b200": "B200-SXM",
    "b300": "B300-SXM",
    "rtx4090": "RTX4090-24GB",
    "4090": "RTX4090-24GB",
}
_UNSAID_GIB = {
    "H100-80GB-PCIe": 79.14,
    "H100-94GB-SXM-HBM2e": 93.0,
    "GB200": 184.0,
    "B300-SXM": 267.0,
    "GB300": 276.0,
    "MI325X": 255.0,
}
"""What torch would see of cards that no public message names: nominal size, less what alike cards keep (presumed)."""
_UNSAID_TB_PER_S = {"H100-94GB-SXM-HBM2e": 2.4, "GB300": 8.0}


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        name: Its key in the table.
        generation: Which set of measured constants it uses (`constants.py`).
        bf16, fp8, fp4: Dense peaks in operations per second; 0: it has none.
        memory: Bytes that torch sees.
        memory_bandwidth: Bytes per second.
        link: Bytes per second and direction to its neighbours in the machine, all together.
        pair_link: The same to one neighbour (smaller without a switch).
        switched: Whether all GPUs of a machine are joined by a switch (or all pairs by links).
        gpus_per_node: How many a machine usually has.
        domain: How many GPUs share the fast link.
        nic: Bytes per second of a usual network adapter per GPU.
    """

    name: str
    generation: str
    bf16: float
    fp8: float
    fp4: float
    memory: float
    memory_bandwidth: float
    link: float
    pair_link: float
    switched: bool
    gpus_per_node: int
    domain: int
    nic: float

    def peak(self, precision: str) -> float:
        """Operations per second of matrix products in a precision (`fp16` and `bf16` are one).

        Raises:
            ConfigurationError: The card has no such precision.
        """
        single = self.bf16 if self.generation == "cpu" else self.bf16 / 8  # a CPU has no faster half precision
        peak = {
            "fp64": single / 2,
            "fp32": single,
            "bf16": self.bf16,
            "fp16": self.bf16,
            "fp8": self.fp8,
            "fp4": self.fp4,
        }
        peak["fp8-rowwise"] = self.fp8
        if precision not in peak:
            raise ConfigurationError(
                f"precision {precision!r} is not known; known are {', '.join(peak)}.{near(str(precision), peak)} "
                "What is stored per parameter (bf16-mixed, bf16-true, ...) is the recipe."
            )
        if not peak[precision] or (precision == "bf16" and self.generation == "volta"):
            others = "fp16" if self.generation == "volta" else "bf16 or fp16"
            raise ConfigurationError(f"{self.name} has no fast {precision}; choose {others}.")
        return peak[precision]


@lru_cache(maxsize=1)
def gpus() -> dict[str, Gpu]:
    """All GPUs of the table, by name."""
    text = (resources.files("lightning_3d.planner") / "data" / "hardware.csv").read_text()
    return {row["gpu_key"]: _gpu(row) for row in csv.DictReader(text.splitlines())}


def gpu_named(name: str) -> Gpu:
    """The GPU of this name, or of a common spelling of it (`a100-80gb`).

    Raises:
        ConfigurationError: There is none.
    """
    known = gpus()
    lower = {key.lower(): key for key in known}
    key = str(name).strip().lower().replace("_", "-")
    found = _SPELLINGS.get(key) or lower.get(key)
    if found is None:
        spellings = [*lower, *_SPELLINGS]
        raise ConfigurationError(
            f"GPU {name!r} is not in the table.{near(key, spellings)} Known are {', '.join(known)}. Describe one of "
            "your own in a file: --cluster FILE.yaml (docs/planner.md)."
        )
    return known[found]


def _gpu(row: dict[str, str]) -> Gpu:
    name = row["gpu_key"]
    number = {key: float(value) if _is_number(value) else 0.0 for key, value in row.items()}
    memory = number["mem_gib_seen_by_torch"] or _UNSAID_GIB[name]
    link, pair = number["intra_uni_gbs"], number["pair_uni_gbs"]
    typical = row["gpus_per_node_typical"]
    per_node = 4 if typical.startswith("4 per tray") else 8
    return Gpu(
        name=name,
        generation=_generation(name),
        bf16=(number["bf16_dense_tflops"] or number["fp16_dense_tflops"]) * TERA,
        fp8=number["fp8_dense_tflops"] * TERA,
        fp4=_fp4(name) * number["fp8_dense_tflops"] * TERA,
        memory=memory * GIB,
        memory_bandwidth=(number["mem_tb_per_s"] or _UNSAID_TB_PER_S[name]) * 1e12,
        link=link * GB,
        pair_link=(pair or link) * GB,
        switched="PCIe" not in row["intra_link"],
        gpus_per_node=per_node,
        domain=72 if name.startswith("GB") else per_node,
        nic=(number["typical_nic_gbit_per_gpu"] or 200) / 8 * GB,
    )


def _fp4(name: str) -> float:
    """The fp4 peak relative to fp8: Blackwell has twice, Blackwell Ultra three times as much (vendor's figures)."""
    return {"blackwell": 2.0, "blackwell_ultra": 3.0}.get(_generation(name), 0.0)


def _generation(name: str) -> str:
    for start, generation in (
        ("V100", "volta"),
        ("A100", "ampere"),
        ("H", "hopper"),
        ("B3", "blackwell_ultra"),
        ("GB3", "blackwell_ultra"),
        ("B", "blackwell"),
        ("GB", "blackwell"),
        ("MI", "cdna3"),
    ):
        if name.startswith(start):
            return "hopper_500w" if "HBM2e" in name else generation
    return "ada"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
