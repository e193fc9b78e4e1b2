"""HOW is one layer cut?  Tensor parallelism of an unmodified model."""

from lightning_3d.tensor import (  # noqa: F401  (registers the rules)
    rules_attention,
    rules_autograd,
    rules_channels,
    rules_convolution,
    rules_elementwise,
    rules_linear_algebra,
    rules_matmul,
    rules_pieces,
    rules_random,
    rules_reductions,
    rules_scatter,
    rules_softmax,
    rules_views,
    rules_vocab,
)
from lightning_3d.tensor.decisions import Decision, PlanRow, TensorPlan
from lightning_3d.tensor.functions import function_guard
from lightning_3d.tensor.group import TensorGroup, dry_group
from lightning_3d.tensor.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from lightning_3d.tensor.loss import vocab_parallel_cross_entropy
from lightning_3d.tensor.operation_proof import OperationReport, prove_operations
from lightning_3d.tensor.placement import NoRule, Placement
from lightning_3d.tensor.plan import plan_tensor_parallel
from lightning_3d.tensor.registry import register_rule
from lightning_3d.tensor.rewrite import cut_optimizer_state, original_class, rewrite
from lightning_3d.tensor.sharded import ShardedTensor, local, map_local, placement, whole, wrap
from lightning_3d.tensor.simulate import ThreadCommunicator, run_simulated
from lightning_3d.tensor.state_part import StatePart, mark_state_dicts
from lightning_3d.tensor.verify import NothingToProve, TensorReport, verify_tensor_plan

__all__ = [
    "ColumnParallelLinear",
    "Decision",
    "NoRule",
    "NothingToProve",
    "OperationReport",
    "Placement",
    "PlanRow",
    "RowParallelLinear",
    "ShardedTensor",
    "StatePart",
    "TensorGroup",
    "TensorPlan",
    "TensorReport",
    "ThreadCommunicator",
    "VocabParallelEmbedding",
    "cut_optimizer_state",
    "dry_group",
    "function_guard",
    "local",
    "map_local",
    "mark_state_dicts",
    "original_class",
    "placement",
    "plan_tensor_parallel",
    "prove_operations",
    "register_rule",
    "rewrite",
    "run_simulated",
    "verify_tensor_plan",
    "vocab_parallel_cross_entropy",
    "whole",
    "wrap",
]
