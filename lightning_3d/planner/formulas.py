"""WHAT do the papers' own formulas say?  Closed forms, to check the planner and the published tables with (no torch).

The planner itself counts block by block (`memory.py`); these are what the sources print.
"""

from __future__ import annotations

from lightning_3d.planner.model import ModelShape
from lightning_3d.planner.recipes import RECIPES, states


def zero_states(params: float, dp: int, zero: int) -> float:
    """Bytes of model states per device (Rajbhandari et al. 2020, Table 1; K = 12)."""
    return states(params, RECIPES["zero-paper"], zero, dp).total


def largest_model(memory: float, tp: int, dp: int, zero: int) -> float:
    """Parameters whose states alone fill `memory` bytes per device (the same, Table 2)."""
    return memory * tp / zero_states(1.0, dp, zero)


def deepspeed_estimate(params: float, largest_layer: float, gpus: int, zero: int, offload: str = "none") -> float:
    """Bytes per GPU that DeepSpeed's estimators print for ZeRO 2 and 3.

    Args:
        params: Parameters of the model.
        largest_layer: Parameters of its largest layer (ZeRO 3).
        gpus: Number of GPUs.
        zero: Stage, 2 or 3.
        offload: What is kept on the host: "none", "optimizer" or "parameters" (both).
    """
    if zero == 2:
        return 2 * params + (0.0 if offload != "none" else 18 * params / gpus)
    shared = {"none": 18 * params / gpus, "optimizer": 2 * params / gpus, "parameters": 0.0}[offload]
    return 4 * largest_layer + shared


def layer_activations(
    seq: int, batch: int, hidden: int, heads: int, tp: int = 1, sp: bool = False, recompute: str = "none"
) -> float:
    """Bytes of one layer's activations (Korthikanti et al. 2022, eq. 1 to 6): GELU, dropout, scores in memory."""
    unit = float(seq) * batch * hidden
    scores = 0.0 if recompute == "selective" else 5 * heads * seq / hidden
    if recompute == "full":
        return 2 * unit / (tp if sp else 1)
    return unit / tp * (34 + scores) if sp else unit * (10 + 24 / tp + scores / tp)


def interleaved_factor(stages: int, virtual: int) -> float:
    """Activation memory of interleaved 1F1B relative to 1F1B (the same, section 4.2.3)."""
    return 1 + (stages - 1) / (stages * virtual)


def megatron_activations(model: ModelShape, seq: int, batch: int, tp: int, pp: int, virtual: int, sp: bool) -> float:
    """Bytes of activations of the first stage that Megatron-LM's estimator prints."""
    tokens, h = float(seq) * batch, model.hidden
    inputs = 8 * tokens * pp + tokens * h * pp
    more = interleaved_factor(pp, virtual) if virtual > 1 else 1.0
    if sp:
        layers = tokens * (18 * h + 4 * model.ffn) * model.layers
        head = 4 * tokens * (h + model.vocab) if pp == 1 else 0.0
        return ((layers + inputs) * more + head) / tp
    layers = tokens * h * (10 + 24 / tp) * model.layers
    head = 2 * tokens * (model.vocab / tp + h) if pp == 1 else 0.0
    return 1.05 * ((layers + inputs) * more + head)


def megatron_states(model: ModelShape, tp: int, pp: int, dp: int, distributed: bool) -> float:
    """Bytes of weights and optimizer of the largest shard, as the same estimator counts them (no biases of layers)."""
    norm = 1 if model.gated else 2
    layer = sum(rows * columns for rows, columns in model.attention_matrices) + model.mlp_params(model.ffn)
    block = model.layers * (layer + 2 * norm * model.hidden) + norm * model.hidden
    shard = block / pp + model.embedding_params * (2 if pp == 1 and not model.tied else 1)
    return shard / tp * (6 + 12 / dp if distributed else 18)


def gpipe_speedup(stages: int, microbatches: int) -> float:
    """Throughput of GPipe relative to one device (Huang et al. 2019): `K M / (M + K - 1)`."""
    return stages * microbatches / (microbatches + stages - 1)
