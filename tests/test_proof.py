"""A proof is made once per model: what counts as the same model, and which batch it needs."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_3d.tensor.collectives as collectives
from lightning_3d import proof
from lightning_3d.probe import shorter_batches
from lightning_3d.proof import is_small, prove_plan
from lightning_3d.proof_memory import fingerprint, memory_folder, recall, remember
from lightning_3d.tensor import OperationReport, TensorReport, plan_tensor_parallel


class Net(nn.Module):
    def __init__(self, width: int = 16, scale: float = 1.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)
        self.scale = scale
        self.config = {"p": 0.5}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu() * self.scale)
        return y


class Same(Net):
    pass


def step_on(module: Any, batch: Any) -> Tensor:
    x = batch["x"].to(next(module.parameters()).dtype)
    loss: Tensor = module(x).square().mean()
    return loss


def key(module: nn.Module, batch: Any = None) -> str | None:
    batch = {"x": torch.ones(2, 8)} if batch is None else batch
    return fingerprint(module, plan_tensor_parallel(module, lambda m: step_on(m, batch), 2), batch)


def test_what_is_the_same_model() -> None:
    known = key(Net())
    assert key(Net()) == known  # other weights
    trained = Net()
    trained.eval()
    assert key(trained) == known
    changed = [Net(scale=2.0), Net(width=32), Same()]
    other_config = Net()
    other_config.config["p"] = 0.1
    for module in [*changed, other_config]:
        assert key(module) != known
    assert key(Net(), {"x": torch.ones(4, 8)}) != known


def scaled(by: float) -> Any:
    return lambda x: x * by


def quantized(x: Tensor) -> Tensor:
    return x / x.abs().amax().clamp(min=8.0)


def smooth(x: Tensor) -> Tensor:
    return x.tanh()


def chosen(x: Tensor) -> Tensor:
    return KINDS["now"](x)


KINDS: dict[str, Any] = {"now": smooth}


def test_functions_count_by_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function the module holds was no part of the key: a proof of one was taken for a proof of the other."""

    def with_function(function: Any, deep: bool = False) -> str | None:
        module: Any = Net()
        module.act = {"inner": [function]} if deep else function
        return key(module)

    assert with_function(smooth) == with_function(smooth)
    assert with_function(scaled(2.0)) == with_function(scaled(2.0))
    kinds: list[Any] = [smooth, quantized, scaled(2.0), scaled(3.0), chosen]
    kinds += [
        functools.partial(quantized),
        functools.partial(torch.clamp, min=0.5),
        functools.partial(torch.clamp, min=1),
    ]
    kinds += [torch.relu, torch.nn.functional.gelu, lambda x: x + 1, lambda x: x + 2, lambda x, y=(1,): x + y[0]]
    kinds += [Net(scale=2.0).forward, Net().forward]
    for deep in (False, True):
        keys = [with_function(kind, deep) for kind in kinds]
        assert None not in keys
        assert len(set(keys)) == len(kinds)
    before = with_function(chosen)
    monkeypatch.setitem(KINDS, "now", quantized)  # named by the code, not held
    assert with_function(chosen) != before
    monkeypatch.setattr(Net, "extra", staticmethod(quantized), raising=False)
    assert with_function(smooth) not in keys
    assert with_function(io.StringIO("what is it?")) is None  # nobody can tell: not remembered


def test_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    assert recall("a") is None
    remember("a", "proved")
    assert recall("a") == "proved"
    (memory_folder() / "proofs" / "a.json").write_text("{")
    assert recall("a") is None
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("LIGHTNING_3D_CACHE", str(blocked))
    remember("b", "proved")  # no folder can be made: no error
    assert recall("b") is None


def test_shorter_batches() -> None:
    batch = {"ids": torch.arange(4 * 101).reshape(4, 101), "image": torch.zeros(4, 3, 64, 64), "name": "x"}
    short, full = shorter_batches(batch)
    assert short["ids"].shape == (4, 16 + 101 % 16)
    assert torch.equal(short["ids"], batch["ids"][:, :21])
    assert short["image"].shape == (4, 3, 16, 16)
    assert short["name"] == "x"
    assert full is batch
    many = torch.zeros(100, 200)
    assert [b.shape for b in shorter_batches(many)] == [(20, 24), (20, 200), (100, 200)]
    small = torch.zeros(4, 5)
    assert list(shorter_batches(small)) == [small]


def test_a_step_that_needs_the_whole_batch() -> None:
    """The step refuses any shorter batch; the proof then uses what there is."""
    seen: list[tuple[int, ...]] = []

    def exacting(module: Any, batch: Any) -> Tensor:
        seen.append(tuple(batch["x"].shape))
        if batch["x"].shape[0] != 40:
            raise ValueError("40 samples, please")
        return step_on(module, batch)

    batch = {"x": torch.ones(40, 8)}
    module = Net()
    plan = plan_tensor_parallel(module, lambda m: exacting(m, batch), 2)
    for run in (True, False):
        seen.clear()
        report = prove_plan(module, plan, exacting, batch, run=run)
        assert report.ok
        assert isinstance(report, TensorReport if run else OperationReport)
        assert seen[0] == (24, 8)
        assert seen[-1] == (40, 8)


def test_which_models_are_run() -> None:
    assert is_small(Net())
    assert not is_small(copy.deepcopy(Net()).to("meta"))


def test_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"x": torch.ones(2, 8)}
    module = Net()
    plan = plan_tensor_parallel(module, lambda m: step_on(m, batch), 2)

    def proved(verify: bool | str) -> str:
        wrong, found = proof._proved(module, plan, step_on, batch, verify)
        assert not wrong
        assert found is not None
        return found

    assert proved("auto").startswith("proved equal to the original")
    assert proved("auto").endswith("(in an earlier run)")
    assert not proved(True).endswith("(in an earlier run)")
    monkeypatch.setattr(proof, "LARGEST_RUN", 0)
    module.scale = 2.0
    assert "kinds of operations proved equal" in proved("auto")


def test_what_is_wrong_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_forward(ctx: Any, x: Tensor, group: Any, fresh: bool) -> Tensor:
        ctx.group = group
        return x.clone()

    batch = {"x": torch.ones(2, 8)}
    module = Net()
    plan = plan_tensor_parallel(module, lambda m: step_on(m, batch), 2)
    with monkeypatch.context() as broken:
        broken.setattr(collectives._Reduce, "forward", staticmethod(no_forward))
        for _ in range(2):
            wrong, _ = proof._proved(module, plan, step_on, batch, "auto")
            assert "does not compute what the original does" in wrong
            assert "'replicate'" in wrong
    assert proof._proved(module, plan, step_on, batch, "auto")[0] == ""
