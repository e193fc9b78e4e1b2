"""What the ranks of a launch run for `test_state_dicts.py`."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from lightning_3d import ThreeDStrategy
from lightning_3d.checkpoint import export_checkpoint
from lightning_3d.errors import ConfigurationError, TensorPlanError
from lightning_3d.tensor import StatePart
from tests import models
from tests.strategy.cases import trainer_for


def _message(action: Callable[[], Any]) -> str:
    try:
        action()
    except TensorPlanError as error:
        return str(error)
    return ""


def parts() -> dict[str, Any]:
    """What works with the entries of a cut module's state_dict, and what is refused."""
    strategy = ThreeDStrategy(tensor_parallel_size=2)
    trainer = trainer_for(strategy, max_steps=1)
    module = models.build("mlp")
    trainer.fit(module, models.loader("mlp", 8, 8))
    entries = module.state_dict()
    name = next(n for n, p in module.named_parameters() if hasattr(p, "placement"))
    part, parameter = entries[name], dict(module.named_parameters())[name]
    before = {k: v.clone() for k, v in entries.items()}
    for value in module.state_dict(keep_vars=True).values():
        value.data.mul_(2)
    module.load_state_dict(before)
    torch.save(module.net, io.BytesIO())
    twin = copy.deepcopy(module.net)
    return {
        "kept": [type(x).__name__ for x in (part.clone(), part.cpu() * 2, part.to(torch.float16), copy.deepcopy(part))],
        "plain": [type(x).__name__ for x in (part.sum(), part[0], entries["net.1.weight"], parameter.detach())],
        "loaded": all(torch.equal(v, before[k]) for k, v in module.state_dict().items()),
        "copied": all(torch.equal(p, q) for p, q in zip(twin.parameters(), module.net.parameters(), strict=True)),
        "inner": isinstance(module.net.state_dict()[name.removeprefix("net.")], StatePart),
        "name": name,
        "refused": [
            _message(action)
            for action in (
                lambda: torch.save(entries, io.BytesIO()),
                lambda: torch.save({k: v.cpu() for k, v in before.items()}, io.BytesIO()),
                lambda: torch.save(twin.state_dict(), io.BytesIO()),
                lambda: safetensors.torch.save({name: part}),
                lambda: np.asarray(part),
                lambda: part.double().numpy(),
            )
        ],
    }


def folder_for_hugging_face(cases: list[dict[str, Any]], folder: str) -> list[Any]:
    """Rank zero writes what `from_pretrained` reads, by both recipes of docs/checkpoint.md; what it then finds."""
    from transformers import LlamaForCausalLM

    out: list[Any] = []
    for index, sizes in enumerate(cases):
        strategy = ThreeDStrategy(**sizes)
        trainer = trainer_for(strategy, max_steps=1)
        module: Any = models.build("llama_full")
        trainer.fit(module, models.loader("llama_full", 8, 8))
        path = Path(folder) / str(index)
        weights = strategy.whole_state_dict()
        if trainer.is_global_zero:
            names = {key.removeprefix("model."): value for key, value in weights.items()}
            module.model.save_pretrained(path / "a", state_dict=names)
        trainer.save_checkpoint(path / "checkpoint")
        if not trainer.is_global_zero:
            out.append(len(weights))
            continue
        module.model.config.save_pretrained(path / "b")
        export_checkpoint(path / "checkpoint", path / "b" / "model.safetensors", prefix="model.")
        with pytest.raises(ConfigurationError, match=r"begin with model\."):
            export_checkpoint(path / "checkpoint", path / "c.safetensors", prefix="modle.")
        for kind in "ab":
            read = LlamaForCausalLM.from_pretrained(path / kind, dtype=torch.float64).state_dict()
            out.append(all(torch.equal(v, weights[f"model.{k}"]) for k, v in read.items()))
    return out
