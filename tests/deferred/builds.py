"""What the ranks of a launch run for `test_start_up.py`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

import lightning_3d.deferred.tensor
import lightning_3d.start_up
from lightning_3d import ThreeDStrategy
from lightning_3d.deferred import is_deferred
from lightning_3d.deferred.files import read_tensor
from lightning_3d.testing import full_parameters
from tests import models
from tests.strategy.cases import trainer_for


def large_from(elements: int) -> None:
    """Tensors of tests count as large."""
    lightning_3d.deferred.tensor.SMALLEST = elements
    lightning_3d.start_up.LARGEST_RUN = 0


class Late(models.Lit):
    """Builds `make()` in configure_model; counts the parameters that have no values then."""

    def __init__(self, make: Callable[[], nn.Module], optimizer: str = "sgd") -> None:
        super().__init__()
        self.make, self.kind = make, optimizer
        self.inner: Any = None
        self.late = 0

    def configure_model(self) -> None:
        if self.inner is None:
            self.inner = self.make()
            self.late = sum(is_deferred(p) or p.is_meta for p in self.inner.parameters())

    def loss(self, batch: Any) -> Tensor:
        return self.inner.loss(batch)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.kind == "adagrad":  # has its state before the first step
            return torch.optim.Adagrad(trained, lr=0.1, initial_accumulator_value=0.5)
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


class Validated(Late):
    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


class Initialised(models.LitGPT):
    """With an initialisation of its own over the layers'; tensors computed from others; scaled rows; a large buffer."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.apply(self._init)
        with torch.no_grad():
            for block in self.blocks[1:]:
                block.up.weight.copy_(self.blocks[0].up.weight * 0.5)
            self.wpe.weight[1:3].mul_(float(self.wpe.weight.norm()))
        self.register_buffer("shift", torch.rand(VOCABULARY, 1) * 0.1, persistent=False)
        self.blocks[1].down.weight.requires_grad_(False)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0.0, 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.shift[:, 0]


VOCABULARY = models.VOCAB


def on_meta() -> nn.Module:
    """As one process cannot run it: its reference is the same model with values."""
    with torch.device("meta"):
        return models.LitGPT(depth=4)


def adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    whole = models.llama()
    whole.model = get_peft_model(whole.model, LoraConfig(r=4, target_modules=["q_proj", "o_proj", "up_proj"]))
    return whole


MAKES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "own": (Initialised, "gpt_tied"),
    "meta": (on_meta, "gpt_tied"),
    "llama": (models.llama, "llama_full"),
    "gpt2": (models.gpt2, "llama_full"),
    "lora": (adapted, "llama_full"),
}
REFERENCES = {on_meta: lambda: models.LitGPT(depth=4)}


class Look(pl.Callback):
    """The whole weights before the first step, and the losses."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.losses: list[float] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.weights = whole_weights(trainer, module)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def whole_weights(trainer: Any, module: nn.Module) -> dict[str, Tensor]:
    if isinstance(trainer.strategy, ThreeDStrategy):
        return {n: p.clone() for n, p in full_parameters(trainer.strategy).items()}
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def data_for(name: str, strategy: Any) -> Any:
    replicas = 1 if isinstance(strategy, str) else strategy.layout.dp
    replica = int(os.environ["RANK"]) // (int(os.environ["WORLD_SIZE"]) // replicas)
    return models.loader(MAKES[name][1], 16, 8, replica, replicas)


def fitted(
    make: Callable[[], nn.Module], name: str, sizes: dict[str, Any] | None, optimizer: str = "sgd", seed: int = 5,
    **options: Any,
) -> tuple[pl.Trainer, Late, Look]:  # fmt: skip
    strategy: Any = "auto" if sizes is None else ThreeDStrategy(**sizes)
    look = Look()
    trainer = trainer_for(strategy, max_steps=2, max_epochs=-1, callbacks=[look], use_distributed_sampler=False)
    torch.manual_seed(seed)
    module = Late(make, optimizer)
    trainer.fit(module, data_for(name, strategy), **options)
    return trainer, module, look


def built(cases: list[tuple[str, dict[str, Any] | None, str]]) -> list[tuple[dict[str, Tensor], list[float], int]]:
    """(weights at the start, losses, number of parameters that came later) of every case."""
    large_from(64)
    out = []
    for name, sizes, optimizer in cases:
        make = MAKES[name][0]
        _, module, look = fitted(REFERENCES.get(make, make) if sizes is None else make, name, sizes, optimizer)
        out.append((look.weights, look.losses, module.late))
    return out


def unseeded(layouts: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Every rank has another random state. What rank zero would have drawn, first."""
    large_from(64)
    torch.manual_seed(100)
    torch.set_default_dtype(torch.float64)
    out = [{f"inner.{n}": p.detach().clone() for n, p in Initialised().named_parameters()}]
    torch.set_default_dtype(torch.float32)
    rank = int(os.environ["RANK"])
    for sizes in layouts:
        out.append(fitted(Initialised, "own", sizes, seed=100 + rank)[2].weights)
        # and where the model is built before the processes know of one another
        strategy = ThreeDStrategy(**sizes)
        look = Look()
        trainer = trainer_for(strategy, max_steps=1, max_epochs=-1, callbacks=[look], use_distributed_sampler=False)
        torch.manual_seed(100 + rank)
        with trainer.init_module():
            module = Late(lambda: models.LitMLP())
            module.inner = Initialised()
        trainer.fit(module, data_for("own", strategy))
        out.append(look.weights)
    return out


def loaded(layouts: list[dict[str, Any]], folder: Path) -> list[list[tuple[str, bool]]]:
    """Saved by one layout (as a directory, the next as a file), read into models whose values come later by the next.

    Returns:
        (what was done, are the weights the saved ones) for every layout.
    """
    large_from(64)
    out = []
    for index, sizes in enumerate(layouts):
        plain, following = bool(index % 2), layouts[(index + 1) % len(layouts)]
        trainer, module, _ = fitted(Initialised, "own", {**sizes, "save_distributed_checkpoint": not plain}, seed=7)
        path = str(folder / f"{index}.ckpt")
        trainer.save_checkpoint(path)
        want, found = whole_weights(trainer, module), []
        for what in ("resume", "validate"):
            strategy, other = ThreeDStrategy(**following), Validated(Initialised)
            trainer = trainer_for(strategy, max_steps=2, max_epochs=-1, use_distributed_sampler=False)
            torch.manual_seed(1)
            if what == "resume":
                trainer.fit(other, data_for("own", strategy), ckpt_path=path)
            else:
                trainer.validate(other, data_for("own", strategy), ckpt_path=path, verbose=False)
            found.append((f"{what}, plain={plain}", _equal(whole_weights(trainer, other), want)))
        out.append(found)
    return out


def _equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[n], w) for n, w in want.items())


_read: list[str] = []


def _counting(path: str, name: str) -> Tensor:
    _read.append(name)
    return read_tensor(path, name)


def from_folder(layouts: list[dict[str, Any]], folder: str) -> list[tuple[bool, int, int]]:
    """(weights are the folder's, how many came later, how many tensors this rank has read) of every layout."""
    import transformers

    from lightning_3d.deferred import files

    large_from(64)
    files.read_tensor = _counting
    want = transformers.AutoModelForCausalLM.from_pretrained(folder).double().state_dict()
    out = []
    for sizes in layouts:
        _read.clear()

        def make() -> nn.Module:
            return models.LitHF(transformers.AutoModelForCausalLM.from_pretrained(folder, use_cache=False))

        _, module, look = fitted(make, "llama", sizes)
        got = {n.removeprefix("inner.model."): p for n, p in look.weights.items()}
        out.append((all(torch.equal(p, want[n]) for n, p in got.items()), module.late, len(_read)))
    files.read_tensor = read_tensor
    return out


def eager_costs(sizes: dict[str, Any]) -> list[str]:
    """What is said when a large model was built in __init__."""
    large_from(64)
    lightning_3d.start_up.LARGEST_RUN = 100
    said: list[str] = []
    lightning_3d.start_up.rank_zero_info = said.append
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_for(ThreeDStrategy(**sizes), max_steps=1, max_epochs=-1)
        trainer.fit(models.LitGPT(), models.loader("gpt_tied", 16, 8))
    return said
