"""WHY is there no answer?  No layout fits, or none of those that are left by what is given (no torch here)."""

from __future__ import annotations

from lightning_3d.errors import ConfigurationError
from lightning_3d.planner.candidate import Job
from lightning_3d.planner.chain import Chain
from lightning_3d.planner.cluster import Cluster
from lightning_3d.planner.given import Given
from lightning_3d.planner.reasons import LEAST, too_large_because
from lightning_3d.planner.recipes import recipe_named
from lightning_3d.planner.search import HEADROOM, Found, least_gpus


def nothing_fits(
    chain: Chain, cluster: Cluster, job: Job, found: Found, given: Given | None = None
) -> ConfigurationError:
    """The error for a search that found nothing: what was in the way, and how many GPUs would be enough."""
    if given is not None and (str(given) or not found.too_large):
        return _nothing_left(chain, cluster, found, given)
    needed = least_gpus(chain, cluster, job)
    states = chain.params * recipe_named(job.recipe).total / 2**30
    head = (
        f"{chain.name} does not fit on {cluster.gpus} x {cluster.gpu.name}: its model states alone are "
        f"{states:,.0f} GiB ({chain.params / 1e9:.4g} billion parameters x {recipe_named(job.recipe).total:g} bytes), "
        f"and all GPUs together have {cluster.gpus * (cluster.gpu.memory - cluster.reserve) / 2**30:,.0f} GiB"
    )
    if needed is None:
        return ConfigurationError(f"{head}. No number of these GPUs is enough: one layer does not fit a GPU.")
    if needed <= cluster.gpus and given is not None:
        return _nothing_left(chain, cluster, found, given)
    if needed <= cluster.gpus:
        skipped = found.counted["batch not divisible by dp"]
        return ConfigurationError(
            f"{chain.name} fits on {needed} x {cluster.gpu.name}, but no layout of {cluster.gpus} divides the global "
            f"batch of {job.global_batch} ({skipped} sizes were left out for it). Choose a global batch that is a "
            f"multiple of {cluster.gpus}."
        )
    return ConfigurationError(
        f"{head}, of which every GPU needs a part for activations. It needs at least {needed} GPUs of this kind: full "
        f"recomputation, microbatches of one sample, {100 * HEADROOM:.0f} % of the memory left free. Or choose a GPU "
        "with more memory, a shorter --seq, or a recipe with fewer bytes per parameter."
    )


def _nothing_left(chain: Chain, cluster: Cluster, found: Found, given: Given) -> ConfigurationError:
    """What is given, or cannot be run, leaves no layout that fits."""
    said = f" with {given}" if str(given) else ""
    reasons = [f"{run.candidate}: {too_large_because(needed)} {LEAST}" for _, run, needed in found.too_large[:3]]
    reasons += [f"{sizes}: {why}." for sizes, why in found.reasons_once()[:5]]
    listed = "\n  ".join(reasons or ["no sizes are left."])
    return ConfigurationError(
        f"no layout{said} can train {chain.name} with batches of {given.batch} samples per replica on {cluster.gpus} x "
        f"{cluster.gpu.name}:\n  {listed}\nLeave more of the arguments open, or use a smaller batch or more devices."
    )
