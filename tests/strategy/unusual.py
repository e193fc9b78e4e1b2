"""What the ranks of a launch run for `test_unusual.py`: legal code around optimizers that is easily broken."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests import models
from tests.strategy.cases import trainer_for
from tests.strategy.zero_cases import Sizes, place, strategy_of, whole


class Validated(models.LitMLP):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ByHand(Validated):
    """Optimized by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class InTwoOptimizers(ByHand):
    """Some parameters are in both."""

    def configure_optimizers(self) -> Any:
        every = list(self.net.parameters())
        return torch.optim.SGD(every[:12], lr=0.1, momentum=0.9), torch.optim.Adam(every[6:], lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for factor, optimizer in enumerate(self.optimizers(), 1):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch) * factor)
            optimizer.step()


class WithoutSync(ByHand):
    """Every second batch steps; what is left at the end of an epoch is zeroed by Lightning before it validates."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        steps = batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=steps):
            self.manual_backward(self.loss(batch) / 2)
        if steps:
            optimizer.step()
            optimizer.zero_grad()


class ScheduleFree(torch.optim.Optimizer):
    """SGD whose parameters are one average in training and another one in evaluation (Defazio et al., 2024)."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "steps": 0, "training": True})

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def _move(self, training: bool) -> None:
        for group in self.param_groups:
            weight = 1 - group["beta"] if training else 1 - 1 / group["beta"]
            for parameter in group["params"] if group["training"] != training else ():
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], weight)
            group["training"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["steps"] += 1
            share = 1 / group["steps"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                z = self.state[parameter].setdefault("z", parameter.clone())
                parameter.lerp_(z, share)
                parameter.add_(parameter.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(parameter.grad, alpha=group["lr"])
        return loss


class Free(Validated):
    """Its hooks call the optimizer as its documentation asks."""

    def configure_optimizers(self) -> Any:
        return ScheduleFree(self.parameters())

    def on_train_epoch_start(self) -> None:
        self.optimizers().train()

    def on_validation_epoch_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.optimizers().eval()

    def on_validation_epoch_end(self) -> None:
        self.optimizers().train()


class Quantized(Validated):
    """A frozen matrix of integers, an empty parameter, a scalar, one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randint(-9, 9, (16, 16), dtype=torch.int8), requires_grad=False)
        self.nothing, self.scale = nn.Parameter(torch.empty(0)), nn.Parameter(torch.tensor(0.7))
        self.turned = nn.Parameter(torch.randn(16, 8).t())

    def loss(self, batch: Any) -> Tensor:
        x = self.net[:5](batch["x"])
        x = x + x @ (self.codes.to(x.dtype) * 0.01) * self.scale + batch["x"] @ self.turned
        return F.cross_entropy(self.net[5:](x), batch["y"])


class ZeroesInPlace(Validated):
    """Gradients stay tensors, so the second backward adds to zeros."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class NeedsAClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "no closure"
        return super().step(closure)


class WithClosure(Validated):
    def configure_optimizers(self) -> Any:
        return NeedsAClosure(self.parameters(), lr=0.1)


class MomentumEncoder(Validated):
    """A frozen copy follows the model, as MoCo and BYOL have it; with a pipeline it is on the stages of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(batch["x"]), self.teacher(batch["x"]) + F.one_hot(batch["y"], 5))

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for own, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            own.data = own.data * 0.9 + other.data * 0.1


class AverageOfTwo(Validated):
    """torch's average of a module that is registered twice, used in front of the model, and updated in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.ModuleDict({"net": self.net, "head": nn.Linear(5, 5)})
        self.average = AveragedModel(self.both, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        self.frozen = copy.deepcopy(self.both["head"]).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        x, average = batch["x"], self.average.module
        with torch.no_grad():
            target = average["head"](average["net"](x * 1.1))
        logits = self.both["head"](self.net(x))
        return F.mse_loss(logits, target + self.frozen(target)) + F.cross_entropy(logits, batch["y"])

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.average.update_parameters(self.both)
        with torch.no_grad():
            for own, other in zip(self.frozen.parameters(), self.both["head"].parameters(), strict=True):
                own.lerp_(other, 0.3)


class AverageToValidate(Validated):
    """Two averages that training steps do not use: torch's, and one by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        self.slow = copy.deepcopy(self.net).requires_grad_(False)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.average(batch["x"]) + self.slow(batch["x"])
        self.log("val_loss", F.cross_entropy(logits, batch["y"]), sync_dist=True)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update_parameters(self.net)
        for own, other in zip(self.slow.parameters(), self.net.parameters(), strict=True):
            own.lerp_(other, 0.1)


class OwnGradients(ByHand):
    """Gradients of two losses, combined by hand (as gradient surgery does) and put into `.grad`."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        parameters = list(self.parameters())
        both = (self.loss(batch), self.net(batch["x"]).square().mean())
        first, second = (torch.autograd.grad(loss, parameters) for loss in both)
        mean = getattr(self.trainer.strategy, "reduce", None) if self.trainer.world_size > 1 else None
        for parameter, one, other in zip(parameters, first, second, strict=True):
            parameter.grad = one + 0.3 * other if mean is None else mean(one + 0.3 * other)
        self.clip_gradients(optimizer, 0.2, "norm")
        optimizer.step()


class Adversary(Validated):
    """A backward for the input, whose gradients of the weights Lightning zeroes; another one between the steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        F.cross_entropy(self.net(x), batch["y"]).backward()
        return F.cross_entropy(self.net(x.detach() + 0.1 * x.grad.sign()), batch["y"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and getattr(getattr(self.trainer.strategy, "layout", None), "zero", 0) < 3:
            with torch.enable_grad():
                self.loss(batch).backward()


class SumOfBackwards(ByHand):
    """What the first backward left is reduced with the second."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        (0.1 * self.net(batch["x"]).square().mean()).backward()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class OwnBackward(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()


class TwoBackwards(Validated):
    def backward(self, loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


class Contrastive(Validated):
    """Its samples are compared with those of all replicas; a scale stays within its limits (as CLIP has it)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.4))

    def loss(self, batch: Any) -> Tensor:
        out = F.normalize(self.net(batch["x"]), dim=-1)
        everybody = self.all_gather(out, sync_grads=True).reshape(-1, 5)
        labels = self.all_gather(batch["y"]).flatten()
        right = (everybody.argmax(-1) == labels).double().mean()
        strategy = self.trainer.strategy
        shared = strategy.reduce(right) + strategy.reduce(out.detach().sum(), reduce_op="sum") / len(labels)
        strategy.barrier()
        kept = strategy.reduce_boolean_decision(True) and strategy.broadcast(True)
        likeness = everybody @ everybody.T * self.scale.exp()
        alike = F.normalize((labels[:, None] == labels).double(), p=1, dim=1)
        return F.cross_entropy(likeness, alike) * (1 + 0.1 * shared) + (0.0 if kept else 1.0)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.scale.clamp_(0.0, 0.41)


class Adapters(Validated):
    """S5: a frozen column and a frozen row layer, each with an adapter of rank 2."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.start = {name: p.detach().clone() for name, p in self.named_parameters()}
        self.adapters = nn.ModuleDict()
        for index in (2, 4):
            layer = self.net[index]
            down, up = nn.Linear(layer.in_features, 2, bias=False), nn.Linear(2, layer.out_features, bias=False)
            self.adapters[str(index)] = nn.Sequential(down, up)

    def loss(self, batch: Any) -> Tensor:
        h = batch["x"]
        for index, layer in enumerate(self.net):
            name = str(index)
            h = layer(h) + self.adapters[name](h) if name in self.adapters else layer(h)
        return F.cross_entropy(h, batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)

    def on_fit_end(self) -> None:
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        assert trained == {f"adapters.{name}" for name, _ in self.adapters.named_parameters()}
        held = getattr(self.trainer.strategy, "whole_state_dict", self.state_dict)()  # empty but on rank zero
        assert held or self.global_rank
        assert all(torch.equal(value, self.start[name].double()) for name, value in held.items() if name in self.start)


class Graph:
    """Nodes of all samples in one tensor: nothing can be cut off."""

    def __init__(self, nodes: Tensor, sample: Tensor, y: Tensor) -> None:
        self.nodes, self.sample, self.y = nodes, sample, y

    def to(self, device: Any) -> Graph:
        return Graph(self.nodes.to(device), self.sample.to(device), self.y.to(device))


class OnGraphs(Validated):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Graph:
        sizes = 1 + batch["y"] % 3  # another number of nodes in every batch
        sample = torch.arange(len(sizes)).repeat_interleave(sizes)
        return Graph(batch["x"][sample] * torch.arange(1, len(sample) + 1)[:, None] / 5, sample, batch["y"])

    def loss(self, batch: Any) -> Tensor:
        out = self.net(batch.nodes)
        return F.cross_entropy(out.new_zeros(len(batch.y), 5).index_add(0, batch.sample, out), batch.y)

    def log(self, *args: Any, **options: Any) -> None:
        super().log(*args, **options, batch_size=8)  # which Lightning cannot tell


class KnownByHooks(Validated):
    """Hooks keep what layers gave, in the module that made them: a copy's hooks, too, know that one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Tensor] = {}
        for number in (4, 8):
            self.net[number].register_forward_hook(lambda _, args, out, n=number: self.seen.update({n: out}))

    def loss(self, batch: Any) -> Tensor:
        self.seen.clear()
        return super().loss(batch) + self.seen[4].square().mean() + self.seen[8].abs().mean()


class OwnCollective(Validated):
    def loss(self, batch: Any) -> Tensor:
        out = self.net(batch["x"])
        if dist.is_initialized():
            everybody = [torch.empty_like(out) for _ in range(dist.get_world_size())]
            dist.all_gather(everybody, out.detach())
        return F.cross_entropy(out, batch["y"])


KINDS = {
    kind.__name__: kind
    for kind in (
        InTwoOptimizers,
        WithoutSync,
        Free,
        Quantized,
        ZeroesInPlace,
        WithClosure,
        MomentumEncoder,
        AverageOfTwo,
        AverageToValidate,
        OwnGradients,
        Adversary,
        SumOfBackwards,
        OwnBackward,
        TwoBackwards,
        Contrastive,
        Adapters,
        OnGraphs,
        KnownByHooks,
        OwnCollective,
    )
}


def fits(cases: list[tuple[str, Sizes]]) -> list[tuple[dict[str, Tensor], float]]:
    """Parameters after two epochs of five batches, and the validation's loss."""
    out = []
    for name, sizes in cases:
        strategy = strategy_of(sizes)
        trainer = trainer_for(strategy, max_epochs=2, use_distributed_sampler=False)
        torch.manual_seed(3)
        module = KINDS[name]().double()
        data = (models.loader("mlp", samples, 8, *place(strategy)) for samples in (40, 16))
        trainer.fit(module, *data)
        out.append((whole(strategy, module), float(trainer.callback_metrics["val_loss"])))
    return out
