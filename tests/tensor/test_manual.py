"""Manual optimization: the proof compares what `manual_backward` gets, and an experiment leaves no trace."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy, proof
from lightning_3d.errors import ParityError
from lightning_3d.probe import call_step
from lightning_3d.tensor import NothingToProve, ShardedTensor, plan_tensor_parallel, verify_tensor_plan
from lightning_3d.testing import full_parameters, relative_error, run_distributed
from tests.tensor.models import MLP, mean_square, values

Batch = dict[str, Tensor]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))


class GAN(pl.LightningModule):
    """Two optimizers that take turns, schedulers, clipping; what it returns is up to `returns`."""

    def __init__(self, returns: str = "nothing") -> None:
        super().__init__()
        torch.manual_seed(5)
        self.automatic_optimization = False
        self.G, self.D = network(), network()
        self.returns = returns

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (self.G, self.D)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]

    def training_step(self, x: Tensor) -> Any:
        losses = []
        for optimizer, scheduler, loss_of in zip(
            self.optimizers(), self.lr_schedulers(), (self.fool, self.tell), strict=True
        ):
            self.toggle_optimizer(optimizer)
            loss = loss_of(x)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.05, "value")
            optimizer.step()
            scheduler.step()
            self.untoggle_optimizer(optimizer)
            losses.append(loss)
        results = {"loss": losses[1], "detached": {"loss": losses[1].detach()}}
        return results.get(self.returns)

    def fool(self, x: Tensor) -> Tensor:
        # cumsum over cut features: the planner has to start again while D is frozen
        hidden = torch.cumsum(self.G[0](x.flip(1)), -1)
        return F.softplus(-self.D(self.G[2](hidden))).mean()

    def tell(self, x: Tensor) -> Tensor:
        return F.softplus(-self.D(x)).mean() + F.softplus(self.D(self.G(x.flip(1)).detach())).mean()


class OnlyOnShards(GAN):
    """Computes something else when it is cut."""

    def tell(self, x: Tensor) -> Tensor:
        return super().tell(x) * (2 if isinstance(self.D[0].weight, ShardedTensor) else 1)


class NoCopies(GAN):
    """Fails on any copy of it, so its plan is proved operation by operation."""

    def tell(self, x: Tensor) -> Tensor:
        if self.trainer.lightning_module is not self:
            raise RuntimeError("no copies, please")
        return super().tell(x)


def fit(module: type[GAN], returns: str, size: int, verify: bool | str = "auto") -> tuple[str, dict[str, Tensor]]:
    model = module(returns).double()
    strategy: Any = ThreeDStrategy(tensor_parallel_size=size, verify=verify) if size > 1 else "auto"
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=strategy,
        precision="64-true",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    try:
        trainer.fit(model, DataLoader(list(values(12, 8).double()), batch_size=4))
    except ParityError as error:
        return str(error), {}
    found = full_parameters(strategy) if size > 1 else dict(model.named_parameters())
    return "", {n: p.detach().clone() for n, p in found.items()}


def all_fits() -> list[tuple[str, dict[str, Tensor]]]:
    kinds = [(GAN, "nothing"), (GAN, "loss"), (GAN, "detached"), (NoCopies, "nothing"), (OnlyOnShards, "nothing")]
    found = [fit(kind, returns, 2) for kind, returns in kinds]
    with patch.object(proof, "_on_little", side_effect=RuntimeError("no tries, please")):
        return [*found, fit(OnlyOnShards, "loss", 2)]


def test_a_gan_trains_as_in_one_process_and_is_proved() -> None:
    _, want = fit(GAN, "nothing", 1)
    results = run_distributed(all_fits, 2, timeout=60)
    for rank in results:
        for message, got in rank[:4]:
            assert not message
            assert max(relative_error(got[n], want[n]) for n in want) < 1e-9
    # whatever goes wrong in the proof, which only rank 0 runs, all ranks say the same
    for case, text in (
        (4, r"tensor_parallel_plan={'D.0': 'replicate'}"),
        (5, "RuntimeError: no tries, please. If the step is right, train without the proof"),
    ):
        messages = {rank[case][0] for rank in results}
        assert len(messages) == 1
        assert text in messages.pop()


class Direct(pl.LightningModule):
    """Calls `backward` of the loss itself, or not at all."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.body, self.backward_called = MLP(8), backward

    def training_step(self, x: Tensor) -> None:
        loss = self.body(x.to(self.body.a.weight.dtype)).square().mean()
        if self.backward_called:
            loss.backward()


def training_step(module: Any) -> Any:
    return call_step(module, "training_step", values(3, 8), 0)


def test_a_step_that_calls_backward_itself() -> None:
    model = Direct(True)
    plan = plan_tensor_parallel(model.body, lambda m: m(values(3, 8)).sum(), 2)
    plan.decisions = {f"body.{n}": d for n, d in plan.decisions.items()}
    plan.shapes = {f"body.{n}": s for n, s in plan.shapes.items()}
    report = verify_tensor_plan(model, plan, training_step)
    assert report.worst < 1e-9
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(NothingToProve, match="NoneType"):
        verify_tensor_plan(Direct(False), plan, training_step)


def test_a_loss_without_a_graph() -> None:
    model = MLP()
    plan = plan_tensor_parallel(model, mean_square, 2)
    with pytest.raises(NothingToProve, match="no trainable parameter"):
        verify_tensor_plan(model, plan, lambda m: mean_square(m).detach())


def test_a_wrong_loss_is_advised_without_a_parameter() -> None:
    model = MLP()

    def constant(m: Any) -> Tensor:
        return mean_square(m) + (1.0 if isinstance(m.a.weight, ShardedTensor) else 0.0)

    plan = plan_tensor_parallel(model, mean_square, 2)
    report = verify_tensor_plan(model, plan, constant)
    assert report.first_difference is None
    with pytest.raises(ParityError, match=r"loss off by.*\(relative\)\. This is.*reads parameters in a way"):
        report.raise_if_wrong()
