"""What the ranks of a launch run for `test_offload.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_3d import ThreeDStrategy
from tests import models
from tests.strategy import precisions
from tests.strategy.cases import trainer_for
from tests.strategy.zero_cases import place


class Module(models.LitGPT):
    """Three groups, of which one is empty, and a frozen block; its state says what the optimizer has."""

    kind = "adamw"

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        if self.kind == "adafactor":
            return torch.optim.Adafactor(self.parameters(), lr=0.01)
        matrices = [p for p in self.parameters() if p.ndim > 1]
        rest = [(n, p) for n, p in self.named_parameters() if p.ndim < 2]
        if self.kind == "sgd":
            return torch.optim.SGD(rest, lr=0.1, momentum=0.9)
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": []}, {"params": [p for _, p in rest]}]
        return torch.optim.AdamW(groups, lr=0.01, fused=self.kind == "fused")


def state_of(strategy: ThreeDStrategy, kind: str, resume: Any = None, **options: Any) -> dict[str, Tensor]:
    """Parameters and the optimizer's state of a run, whole."""
    from lightning_3d.checkpoint import whole_checkpoint

    trainer = trainer_for(
        strategy, use_distributed_sampler=False, max_epochs=-1, **{"limit_train_batches": 1, **options}
    )
    torch.manual_seed(3)
    module = Module().double()
    module.kind = kind
    trainer.fit(module, models.loader("gpt_tied", 16, 8, *place(strategy)), ckpt_path=resume)
    found = whole_checkpoint(trainer._checkpoint_connector.dump_checkpoint(), strategy.mesh.world)
    out = dict(found["state_dict"])
    for number, values in found["optimizer_states"][0]["state"].items() if out else ():
        out |= {f"{number} {key}": value for key, value in values.items() if isinstance(value, Tensor)}
    if "save" in options.get("default_root_dir", ""):
        trainer.save_checkpoint(Path(options["default_root_dir"]) / "run.ckpt")
    return out


def differences(cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[tuple[int, list[str], int]]:
    """Numbers of tensors (on rank zero), and those that are others with than without; bytes kept on the device."""
    out = []
    for kind, sizes, options in cases:
        strategy = ThreeDStrategy(bucket_size_mb=0.002, offload_optimizer=True, **sizes)
        with_it = state_of(strategy, kind, **{"max_steps": 4, "limit_train_batches": 2, **options})
        kept = strategy.memory_report()
        assert kept["offloaded"]
        without = state_of(
            ThreeDStrategy(bucket_size_mb=0.002, **sizes), kind, **{"max_steps": 4, "limit_train_batches": 2, **options}
        )
        assert with_it.keys() == without.keys()
        out.append((len(without), [n for n, v in without.items() if not torch.equal(v, with_it[n])], kept["optimizer"]))
    return out


def resumed(folder: str, before: dict[str, Any], after: dict[str, Any]) -> tuple[int, list[str]]:
    """Saved with the first layout after two steps and resumed with the second: against a run without a break."""
    whole = state_of(ThreeDStrategy(**before), "adamw", max_steps=4)
    state_of(ThreeDStrategy(**before), "adamw", max_steps=2, default_root_dir=f"{folder}/save")
    got = state_of(ThreeDStrategy(**after), "adamw", f"{folder}/save/run.ckpt", max_steps=4)
    return len(whole), [n for n, v in whole.items() if not torch.equal(v, got[n])]


def masters(cases: list[tuple[dict[str, Any], int]]) -> list[tuple[float, float]]:
    return precisions.masters_of([({**sizes, "offload_optimizer": True}, count) for sizes, count in cases])


class Coupled(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def coupled() -> None:
    trainer_for(ThreeDStrategy(offload_optimizer=True)).fit(Coupled().double(), models.loader("gpt_tied", 16, 8))
