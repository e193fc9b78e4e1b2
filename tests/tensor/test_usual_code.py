"""Steps people write: hooks on parameters, manual optimization, torch.func, assigned weights; against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

from lightning_3d.errors import ParityError
from lightning_3d.probe import intercept_functions
from lightning_3d.tensor import TensorGroup, function_guard, plan_tensor_parallel, rewrite, run_simulated
from tests.tensor.fitting import compare


def batches() -> list[Any]:
    return [(torch.randn(3, 5, 8).double(), torch.randn(3, 5, 8).double()) for _ in range(6)]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.middle(self.up(x)))
        return y


class Plain(pl.LightningModule):
    def __init__(self, block: Callable[[], nn.Module] = Residual) -> None:
        super().__init__()
        self.net = nn.Sequential(block(), block())

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Any:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Clipping(Plain):
    """Hooks registered before the model is cut: they clip by the norm, and mask by the global shape."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.net.parameters():
            parameter.register_hook(lambda g: g / (g.norm() + 1e-9))
        mask = torch.ones(32, 8).double()
        mask[:10] = 0
        self.net[0].up.weight.register_hook(lambda g: g * mask)  # type: ignore[union-attr]


class Pooled(Residual):
    def middle(self, h: Tensor) -> Tensor:
        pooled = F.max_pool1d(h.transpose(1, 2), 3, 1, 1).transpose(1, 2)
        return pooled + F.adaptive_max_pool1d(h.transpose(1, 2), 5).transpose(1, 2)


class Mapped(Residual):
    def middle(self, h: Tensor) -> Tensor:
        y: Tensor = vmap(lambda row: torch.tanh(row) * row.abs())(h)
        return y


class ByFunctions(Plain):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        if self.kind == "jvp":
            out, tangent = jvp(self.net, (x,), (y,))
            return out.square().mean() + tangent.square().mean()
        if self.kind == "forward":
            with forward_ad.dual_level():
                out, tangent = forward_ad.unpack_dual(self.net(forward_ad.make_dual(x, y)))
                return out.square().mean() + tangent.square().mean()
        parameters = {name: p.detach() for name, p in self.net.named_parameters()}

        def loss(p: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
            return F.mse_loss(functional_call(self.net, p, (a[None],)), b[None])

        each = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
        weights = sum(g.flatten(1).square().sum(1) for g in each.values())
        return ((self.net(x) - y).square().mean((1, 2)) / weights.sqrt()).mean()


class Manual(Plain):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.kind = kind

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Any:
        optimizer: Any = self.optimizers()
        if self.kind == "closure":
            losses = []

            def closure() -> Tensor:
                losses.append(F.mse_loss(self.net(batch[0]), batch[1]))
                optimizer.zero_grad()
                self.manual_backward(losses[-1])
                return losses[-1]

            optimizer.step(closure=closure)
            return losses[-1].detach()
        optimizer.zero_grad()
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.manual_backward(loss)
        norm = sum(p.grad.norm() ** 2 for p in self.net.parameters()).sqrt()  # type: ignore[union-attr]
        with torch.no_grad():
            for p in self.net.parameters():
                p.grad.mul_(1 / (1 + norm))  # type: ignore[union-attr]
        optimizer.step()
        return loss.detach()


class Assigning(Plain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            for block in self.net:
                block.up.weight.data = block.up.weight.data * 0.5
                block.up.bias.data = torch.linspace(0, 1, 32).double()


def pooled() -> Any:
    return Plain(Pooled)


def mapped() -> Any:
    return Plain(Mapped)


def by_jvp() -> Any:
    return ByFunctions("jvp")


def by_forward() -> Any:
    return ByFunctions("forward")


def per_sample() -> Any:
    return ByFunctions("vmap")


def norms() -> Any:
    return Manual("norm")


def closure() -> Any:
    return Manual("closure")


CUT: dict[str, Any] = {
    "hooks on parameters": Clipping,
    "max pooling": pooled,
    "gradients looked at": norms,
    "step with a closure": closure,
    "assigned weights": Assigning,
}
WHOLE: dict[str, Any] = {"vmap": mapped, "jvp": by_jvp, "forward mode": by_forward, "per sample": per_sample}


def test_against_one_process() -> None:
    """Each of them was wrong or failed before."""
    found = compare({name: (build, batches) for name, build in {**CUT, **WHOLE}.items()})
    for name, result in found.items():
        assert "error" not in result, (name, result["error"])
        assert result["worst"] < 1e-9, (name, result["worst"])
        assert len(result["cut"]) == (6 if name in CUT else 0), (name, result["cut"])
    assert ": 1 programs" in found["max pooling"]["recorded"]


@pytest.mark.parametrize("before", [None, 1.0])
def test_gradients_set_by_a_step_that_needs_values_are_put_back(before: float | None) -> None:
    """Broken before: planning ran on the real parameters, and left them gradients of zeros."""

    def step(m: Any) -> Tensor:
        out = m.net(batch[0])
        for p in m.parameters():
            p.grad = torch.ones_like(p)
        return out[out.sum(-1) > 0].square().mean()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    batch, model = batches()[0], Plain().double()
    held = [None if before is None else torch.full_like(p, before) for p in model.parameters()]
    for p, gradient in zip(model.parameters(), held, strict=True):
        p.grad = gradient
    assert plan_tensor_parallel(model, step, 2).used_values
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), held, strict=True))


def test_a_transform_is_named_in_the_plan() -> None:
    batch = batches()[0]
    plan = plan_tensor_parallel(Plain(Mapped).double(), lambda m: m.training_step(batch), 2)
    assert "torch.func transform" in plan.decisions["net.0.up.weight"].reason


def test_assigning_another_shape_or_dtype_names_the_parameter() -> None:
    torch.manual_seed(0)
    batch = batches()[0]

    def body(comm: Any) -> None:
        model = Plain().double()
        rewrite(model, plan_tensor_parallel(model, lambda m: m.training_step(batch), 2), TensorGroup(comm))
        up: Any = model.net[0].up  # type: ignore[union-attr]
        up.weight.data = torch.zeros(16, 8).double()  # the shard
        assert not up.weight.local.any()
        with pytest.raises(
            ValueError, match=r"net.0.up.weight.data is set to a torch.float64 tensor of shape \(5, 5\)"
        ):
            up.weight.data = torch.zeros(5, 5).double()
        with pytest.raises(ValueError, match=r"in torch\.float64"):
            up.weight.data = torch.zeros(32, 8).half()

    run_simulated(2, body)


class FewHeads(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(24)
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
        self.up, self.down = nn.Linear(24, 96), nn.Linear(96, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        y: Tensor = x + self.down(F.gelu(self.up(x)))
        return y


@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_heads_that_cannot_be_dealt_stay_whole_and_are_told(heads: int) -> None:
    """Broken before: refused, though nobody had demanded that attention is cut."""
    torch.manual_seed(0)
    model, x = FewHeads(heads).double(), torch.randn(2, 5, 24).double()

    def step(m: Any) -> Tensor:
        return m(x).square().mean()

    plan = plan_tensor_parallel(model, step, 4)
    assert plan.decisions["up.weight"].kind == "column"
    assert plan.decisions["qkv.weight"].kind == "replicated"
    assert "over 4 ranks" in plan.decisions["qkv.weight"].reason
    if plan.decisions["qkv.weight"].heads is not None:
        assert f"into {heads}" in " ".join(plan.whole_heads())


def test_ranks_that_do_not_meet_are_told_apart() -> None:
    """Broken before: a BrokenBarrierError without a word."""

    def body(comm: Any) -> None:
        if comm.rank:
            comm.barrier()

    with pytest.raises(ParityError, match="simulated tensor-parallel ranks 0 came to the end"):
        run_simulated(2, body, timeout=1.0)


def test_hooks_see_nothing_else_than_the_whole_gradient() -> None:
    torch.manual_seed(0)
    batch = batches()[0]
    seen: list[tuple[int, ...]] = []

    def body(comm: Any) -> None:
        model = Plain().double()
        model.net[0].up.weight.register_hook(lambda g: seen.append(tuple(g.shape)))  # type: ignore[union-attr]
        rewrite(model, plan_tensor_parallel(model, lambda m: m.training_step(batch), 2), TensorGroup(comm))
        with intercept_functions(function_guard, 1):
            model.training_step(batch).backward()

    run_simulated(2, body)
    assert seen == [(32, 8), (32, 8)]
