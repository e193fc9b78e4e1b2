"""Tensor and pipeline parallelism together: sharded values cross stages, gradients equal one process (float64)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.layout import Layout
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline import PipelineRunner
from lightning_3d.pipeline.microbatch import split_with_sizes
from lightning_3d.tensor import TensorGroup, plan_tensor_parallel, rewrite
from lightning_3d.testing import preload, relative_error, run_distributed
from tests.pipeline import reference
from tests.pipeline.zoo import GPT, VOCAB, ZOO, Lift, Module, build, tokens, vectors

preload("transformers", "tests.pipeline.zoo", "lightning_3d.pipeline", "lightning_3d.tensor")
TOLERANCE = 1e-9


class Chain(Module):
    """Column and row layers as bare siblings: a cut may fall between them, and hidden features cross sharded."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(16, 32)]
        for _ in range(3):
            layers += [nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.LayerNorm(32)]
        self.net = nn.Sequential(*layers, nn.Linear(32, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class EarlyHead(GPT):
    """Sharded, padded logits of an early head reach the last stage; values of them are read on the way."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch["tokens"][:, :-1], batch["tokens"][:, 1:].flatten()
        h = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        early = self.head(self.blocks[0](h))
        self.log("read", early.detach().tolist()[0][0][VOCAB - 1])
        assert not torch.isnan(early).any()
        for block in self.blocks:
            h = block(h)
        loss = F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y)
        return loss + 0.3 * F.cross_entropy(early.flatten(0, 1), y)


class ReadsLogits(GPT):
    """Metrics on sharded logits in glue code, returned whole."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        out = super().training_step(batch, batch_idx)
        self.log("peak", out["logits"].softmax(-1).amax().item())
        return out


CASES: dict[str, tuple[Any, Any]] = {
    "gpt": ZOO["gpt"],
    "gpt_checkpoint": ZOO["gpt_checkpoint"],
    "chain": (Chain, vectors),
    "early_head": (EarlyHead, tokens),
    "reads_logits": (ReadsLogits, tokens),
    "t5": ZOO["t5"],
}


def _one(mesh: Mesh, name: str) -> dict[str, Any]:
    make, batch_of = CASES[name]
    module, plain = build(make), build(make)
    torch.manual_seed(5)
    batch = batch_of(7)
    cut, sizes = split_with_sizes(batch, 3)
    with Lift():
        plan = plan_tensor_parallel(module, lambda m: m.training_step(cut[0], 0), mesh.layout.tp)
    group = TensorGroup(mesh.tensor)
    rewrite(module, plan, group)
    between = [["net.7"], ["net.3", "net.7", "net.11"]][mesh.layout.pp // 4]  # row layers: their input arrives sharded
    runner = PipelineRunner(
        module, mesh, num_microbatches=3, tensor_group=group, forward_context=Lift,
        split=between if name == "chain" else "auto",
    )  # fmt: skip
    partition = runner.setup("training_step", batch)
    crossing = {v for owners in partition.receives for vids in owners.values() for v in vids}
    sharded = [v for v in crossing if partition.trace.meta[v].placement is not None]
    result = runner.train_step(batch, 0)
    runner.reduce_shared()
    loss, _ = reference.train(plain, cut, [s / sum(sizes) for s in sizes])
    want = dict(plain.named_parameters())
    worst = (0.0, "")
    for n, p in runner.parameters.items():
        gradient = want[n].grad
        cutting = getattr(p, "placement", None)
        if cutting is not None and gradient is not None:
            gradient = cutting.to_local(gradient, mesh.tensor.rank, mesh.tensor.size)
        worst = max(worst, (relative_error(p.grad, gradient), n))
    out = {"gradient": worst, "sharded": len(sharded), "fraction": plan.sharded_fraction, "loss": 0.0}
    if mesh.is_last_stage:
        assert result.loss is not None
        out["loss"] = relative_error(result.loss, loss)
        if "logits" in (result.outputs if isinstance(result.outputs, dict) else {}):
            assert result.outputs["logits"].shape == (7, 8, VOCAB)
            assert type(result.outputs["logits"]) is Tensor
    return out


def _rank(tp: int, pp: int, names: list[str]) -> dict[str, dict[str, Any]]:
    mesh = Mesh(Layout(tp=tp, pp=pp), torch.device("cpu"))
    return {name: _one(mesh, name) for name in names}


@pytest.mark.parametrize(("tp", "pp", "names"), [(2, 2, list(CASES)), (2, 4, ["gpt", "chain"])])
def test_gradients_equal_one_process(tp: int, pp: int, names: list[str]) -> None:
    for rank in run_distributed(_rank, tp * pp, tp, pp, names, timeout=120):
        for name, result in rank.items():
            assert result["gradient"][0] <= TOLERANCE, (name, result)
            assert result["loss"] <= TOLERANCE, (name, result)
            assert result["fraction"] > 0.5, (name, result)
            assert (result["sharded"] > 0) == (name in ("chain", "early_head")), (name, result)
