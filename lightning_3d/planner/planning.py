"""WHICH layout for this job?  `plan(model, cluster, ...)`: the ranked answer, its reasons, its prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

from lightning_3d.errors import ConfigurationError
from lightning_3d.planner.candidate import Job, parse_candidate
from lightning_3d.planner.chain import Chain, ShapeChain
from lightning_3d.planner.cluster import Cluster, read_cluster
from lightning_3d.planner.constants import software_named
from lightning_3d.planner.given import Given
from lightning_3d.planner.hf_config import read_hf_config, shape_of_hf_config
from lightning_3d.planner.impossible import nothing_fits
from lightning_3d.planner.model import ModelShape
from lightning_3d.planner.presets import PRESETS, preset
from lightning_3d.planner.pricing import Priced, price
from lightning_3d.planner.reasons import not_here_yet, rejections
from lightning_3d.planner.recipes import recipe_named
from lightning_3d.planner.search import HEADROOM, LONG, Found, check_shapes, search
from lightning_3d.planner.step_time import Run


@dataclass(frozen=True)
class Plan:
    """The answer to "which layout?".

    Attributes:
        chain: The model.
        cluster: Where it runs.
        job: What is trained.
        found: Everything the search saw.
        beyond: The best layout that this version of the library cannot run yet, with the reason, if it is faster.
        given: What was not to be chosen. With `given.batch` the job's global batch is that of one replica, and every
            layout has its own.
    """

    chain: Chain
    cluster: Cluster
    job: Job
    found: Found
    beyond: tuple[Priced, str] | None = None
    given: Given = field(default_factory=Given)

    @property
    def ranked(self) -> list[Priced]:
        """Layouts that fit, best first."""
        return self.found.ranked

    @property
    def best(self) -> Priced:
        """The first of them."""
        return self.found.ranked[0]

    @cached_property
    def rejected(self) -> list[tuple[str, str]]:
        """The most tempting layouts that are out, with the reason in one sentence each."""
        reasons = rejections(self.found, self.best)
        if self.beyond is not None:
            other, why = self.beyond
            gain = 100 * (1 - other.seconds_per_sample / self.best.seconds_per_sample)
            reasons.append((str(other), f"would take {gain:.0f} % less time. {why}"))
        return reasons

    def explain(self, layout: str) -> Priced:
        """The price of any layout of the same job, whether it fits or not.

        Args:
            layout: For example "tp8-pp2-zero1-mbs2-full-sp"; dp follows from the number of GPUs.

        Raises:
            ConfigurationError: It cannot be read, or does not go with the model, the machines or the batch.
        """
        candidate = self.given.candidate(parse_candidate(layout, self.cluster.gpus), self.job)
        check_shapes(self.chain, self.cluster, candidate)
        return price(Run(self.chain, self.cluster, self.given.job_of(self.job, candidate.layout), candidate))

    def strategy_arguments(self, priced: Priced | None = None) -> dict[str, Any]:
        """The arguments of `ThreeDStrategy` for a layout (the best one): they can be written down in a YAML file.

        Raises:
            ConfigurationError: This version cannot run it: CP or EP, or recomputation of other frameworks.
        """
        candidate = (priced or self.best).run.candidate
        layout = candidate.layout
        layout.check_supported()
        if candidate.recompute not in ("none", "selective", "full"):
            raise ConfigurationError(
                f"{candidate}: recomputing {candidate.recompute!r} is priced for other frameworks; "
                "activation_checkpointing takes 'selective' and 'full', or names of modules. Choose one of them."
            )
        arguments: dict[str, Any] = {
            "tensor_parallel_size": layout.tp,
            "pipeline_parallel_size": layout.pp,
            "data_parallel_size": layout.dp,
            "zero_stage": layout.zero,
        }
        if layout.pp > 1:
            arguments["num_microbatches"] = candidate.microbatches
            arguments["pipeline_schedule"] = layout.schedule
        if layout.virtual > 1:
            arguments["virtual_pipeline_size"] = layout.virtual
        if layout.order != "looped":
            arguments["virtual_pipeline_order"] = layout.order
        if candidate.sequence_parallel:
            arguments["sequence_parallel"] = True
        if candidate.recompute != "none":
            arguments["activation_checkpointing"] = candidate.recompute
        return arguments

    def html(self, path: str | Path) -> Path:
        """Write a page with charts that needs nothing from outside. Returns its path."""
        from lightning_3d.planner.report import write_report

        return write_report(self, path)

    def __str__(self) -> str:
        from lightning_3d.planner.tables import plan_text

        return plan_text(self)


def plan(
    model: Any,
    cluster: Cluster | str | Path,
    *,
    global_batch: int,
    seq: int | None = None,
    precision: str = "bf16",
    recipe: str | None = None,
    software: str = "lightning_3d",
    keep: int = 12,
    headroom: float = HEADROOM,
) -> Plan:
    """Rank the layouts for a job: memory by part, seconds by part, and why others are out.

    Args:
        model: A name of `presets.PRESETS`, the path of a `config.json`, a Hugging Face config, a `ModelShape`, or a
            pair `(LightningModule, batch)`: then parameters, operations and activations are those of one step of it on
            the meta device.
        cluster: A `Cluster`, or the path of a YAML file that describes one.
        global_batch: Samples of an optimizer step, over all GPUs.
        seq: Tokens of a sample (for a module: of its batch).
        precision: Of matrix products: fp32, bf16, fp16, fp8, fp4.
        recipe: Bytes per parameter by name (`recipes.RECIPES`); default: those of this library in that precision.
        software: Whose way of running (`constants.SOFTWARE`); default: this library's.
        keep: How many layouts are ranked.
        headroom: Share of every GPU's memory that must stay free.

    Raises:
        ConfigurationError: A name is not known, or no layout fits; the error says how many GPUs would be enough.
    """
    check_shown(keep, headroom)
    if not isinstance(cluster, (Cluster, str, Path)):
        raise ConfigurationError(
            f"a cluster of type {type(cluster).__name__}: give Cluster.of('a100-80gb', 64, 8, 'hdr200x8'), or the path "
            "of a YAML file (docs/planner.md)."
        )
    place = cluster if isinstance(cluster, Cluster) else read_cluster(cluster)
    chain, length = chain_of(model, seq)
    if software == "lightning_3d" and place.gpu.generation == "cpu":
        software = "lightning_3d-cpu"
    software_named(software)
    place.gpu.peak(precision)
    ours = software.startswith("lightning_3d")
    bytes_of = recipe or _recipe_of(software, precision)
    recipe_named(bytes_of)
    job = Job(global_batch, length, precision, bytes_of, software)
    found = search(chain, place, job, keep, headroom, axes=() if ours else ("cp", "ep"))
    if not found.ranked:
        raise nothing_fits(chain, place, job, found)
    return Plan(chain, place, job, found, _beyond(chain, place, job, found) if ours else None)


def plan_batches(
    chain: Chain,
    cluster: Cluster,
    given: Given,
    *,
    precision: str,
    recipe: str,
    accumulate: int = 1,
    keep: int = 12,
    headroom: float = HEADROOM,
) -> Plan:
    """Rank the layouts of a run whose loader gives every replica `given.batch` samples, by samples per second.

    Args:
        chain: The model; `chain_of` makes one.
        cluster: Where it runs.
        given: The batch, and whatever else is not to be chosen.
        precision, recipe, keep, headroom: As in `plan`.
        accumulate: Batches whose gradients are added up before a step.

    Raises:
        ConfigurationError: No layout can be run, or none fits.
    """
    assert given.batch is not None
    check_shown(keep, headroom)
    software = "lightning_3d-cpu" if cluster.gpu.generation == "cpu" else "lightning_3d"
    cluster.gpu.peak(precision)
    recipe_named(recipe)
    seq: int = getattr(chain, "seq", 1)
    job = Job(given.batch * accumulate, seq, precision, recipe, software, accumulate)
    # also what is far from the best: somebody wants to know what else there is
    found = search(chain, cluster, job, keep, headroom, axes=(), given=given, close=inf)
    if not found.ranked:
        raise nothing_fits(chain, cluster, job, found, given)
    return Plan(chain, cluster, job, found, given=given)


def check_shown(keep: int, headroom: float) -> None:
    """Refuse numbers of layouts, and shares of memory, that leave nothing.

    Raises:
        ConfigurationError: They do.
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ConfigurationError(f"{keep!r} layouts cannot be shown (top, keep): at least 1 is needed.")
    if not isinstance(headroom, (int, float)) or not 0 <= headroom < 1:
        raise ConfigurationError(f"headroom is {headroom!r}; it is a share of the memory: 0.05 leaves 5 % free.")


def _recipe_of(software: str, precision: str) -> str:
    """Bytes per parameter if nobody says: this library's default in that precision, or the framework's."""
    if precision == "fp32":
        return "32-true"
    if software.startswith("lightning_3d"):
        return "16-mixed" if precision == "fp16" else "bf16-true"
    return "fsdp" if software.startswith(("fsdp", "torchtitan", "dtensor")) else "megatron"


def _beyond(chain: Chain, cluster: Cluster, job: Job, found: Found) -> tuple[Priced, str] | None:
    """What context or expert parallelism would bring, where they are worth a look."""
    experts = any(work.ep_calls or work.params.experts for work in chain.works(Run.probe_setting(job)))
    if job.seq < LONG and not experts:
        return None
    other = search(chain, cluster, job, 1, found.headroom, axes=("cp", "ep")).ranked
    if not other or other[0].seconds >= 0.98 * found.ranked[0].seconds:
        return None
    why = not_here_yet(other[0].run)
    return (other[0], why) if why else None


def chain_of(model: Any, seq: int | None) -> tuple[Chain, int]:
    """The blocks of whatever describes a model, and the length of a sample.

    Raises:
        ConfigurationError: It is not known what it is, or the length is missing.
    """
    if isinstance(model, tuple) and len(model) == 2:
        from lightning_3d.planner.user_model import chain_of_module

        chain = chain_of_module(*model)
        return chain, seq or chain.seq
    shape = _shape_of(model)
    if seq is None:
        raise ConfigurationError("the length of a sample is missing: give seq (on the command line --seq), in tokens.")
    return ShapeChain(shape), seq


def _shape_of(model: Any) -> ModelShape:
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, Mapping):
        return shape_of_hf_config(model)
    if hasattr(model, "to_dict"):
        return shape_of_hf_config(model.to_dict(), getattr(model, "_name_or_path", "") or "model")
    if isinstance(model, (str, Path)):
        text = str(model)
        if text.lower() not in PRESETS and (text.endswith(".json") or Path(text).exists()):
            return read_hf_config(text)
        return preset(text)
    raise ConfigurationError(
        f"a model of type {type(model).__name__} cannot be planned: give a name, the path of a config.json, a Hugging "
        "Face config, a ModelShape, or a pair (LightningModule, batch)."
    )
