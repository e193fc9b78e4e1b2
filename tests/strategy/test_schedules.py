"""Whole fits with every schedule, and with recomputed activations, against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_3d.errors import ConfigurationError
from lightning_3d.recompute import Recompute, check_choice, find_blocks
from lightning_3d.testing import preload, run_distributed
from tests import models
from tests.strategy.recomputes import differences
from tests.strategy.test_parity import case_for, check

preload("transformers", "tests.models", "tests.strategy.fits")

Sizes = tuple[int, int, int]


def on_layouts(fast: list[Sizes], slow: list[Sizes]) -> Any:
    """(tp, pp, dp) as the test's argument `layout`."""
    params = [*fast, *(pytest.param(layout, marks=pytest.mark.slow) for layout in slow)]
    return pytest.mark.parametrize("layout", params, ids=str)


INTERLEAVED = {"pipeline_schedule": "interleaved_1f1b", "virtual_pipeline_size": 2}
SCHEDULES: dict[str, dict[str, Any]] = {
    "looped": INTERLEAVED,
    "contiguous": {**INTERLEAVED, "virtual_pipeline_order": "contiguous"},
    "zb_h1": {"pipeline_schedule": "zb_h1"},
    "zb_v": {"pipeline_schedule": "zb_v"},
    "gpipe": {"pipeline_schedule": "gpipe"},
}


@on_layouts([(2, 2, 1), (1, 4, 1)], slow=[(1, 2, 1), (1, 2, 2)])
def test_every_schedule(layout: Sizes) -> None:
    cases = []
    for k, options in enumerate(SCHEDULES.values()):
        case = case_for(["gpt_tied", "llama", "gpt2"][k % 3], layout, 1 + k % 2, 4)
        if layout[1] == 4:  # two windows per stage need more blocks
            case = replace(case, model=case.model + "_8")
        cases.append(replace(case, strategy={**case.strategy, **options}))
    if layout[0] > 1:  # norms are let into the sharded region by windows that do not use them
        case = replace(case_for("llama", layout, 1, 4), steps=3)
        cases.append(replace(case, strategy={**case.strategy, **INTERLEAVED, "sequence_parallel": True}))
    check(layout, cases)


MODES: list[dict[str, Any]] = [
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": {"*blocks.1": "full", "*blocks.2": "selective"}},
]


@on_layouts([(1, 1, 2), (2, 2, 1)], slow=[(2, 1, 1), (1, 2, 1)])
def test_recomputed_activations_give_the_same_gradients(layout: Sizes) -> None:
    modes = [*MODES, {"activation_checkpointing": ["full", "none"][: layout[1]]}]
    cases = []
    for k, options in enumerate(modes):
        # three steps and more: by then tensor-parallel blocks run by their recorded programs
        case = replace(case_for("gpt", layout, 1, 4), steps=4)
        schedule = {"pipeline_schedule": "zb_h1"} if k == 1 and layout[1] > 1 else {}
        cases.append(replace(case, strategy={**case.strategy, **schedule, **options}))
    # its blocks fill a cache, which a block that runs again must find as it was
    case = case_for("llama", layout, 1, 4)
    cases.append(replace(case, strategy={**case.strategy, "activation_checkpointing": "full"}))
    check(layout, cases)


def test_dropout_draws_the_same_masks_again() -> None:
    sizes = [{}, {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}]
    cases = [(options, mode, mode == "full") for options in sizes for mode in ("full", "selective")]
    for rank in run_distributed(differences, 2, cases, init_process_group=False, timeout=120):
        assert rank == [0.0] * len(cases)


def _kept(mode: Any) -> tuple[int, int, torch.Tensor]:
    """Bytes autograd keeps after a forward, calls of a block's forward in all, and a gradient."""
    module = models.build("gpt")
    module.log = lambda *_, **__: None
    kept: dict[int, int] = {}
    calls = [0]
    for block in module.get_submodule(find_blocks(module)[0].rpartition(".")[0]).children():
        block.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    batch = next(iter(models.loader("gpt", 8, 8)))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), Recompute(module, mode).active():
        loss = module.training_step(batch, 0)
    loss.backward()
    return sum(kept.values()), calls[0], next(p.grad for p in module.parameters() if p.grad is not None)


def test_less_is_kept() -> None:
    plain, plain_calls, gradient = _kept(None)
    full, full_calls, same = _kept("full")
    torch.testing.assert_close(gradient, same, rtol=1e-12, atol=0)
    assert full < 0.5 * plain, (full, plain)
    assert plain_calls == full_calls, "hooks fire once"


def test_compiled_blocks_with_selective_recomputation_say_that_they_run_as_written() -> None:
    """Broken before: the compiler met them under a dispatch mode, and left them uncompiled for good."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    module = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2)))
    module[0] = torch.compile(module[0], backend=backend)
    x = torch.ones(2, 4)
    with pytest.warns(UserWarning, match=r"run uncompiled in training, with the same result: 0\. "):
        recompute = Recompute(module, {"0": "selective"})
    with recompute.active():
        module(x).sum().backward()
        assert not graphs
        with torch.no_grad():
            module(x)
    assert len(graphs) == 1


def test_what_cannot_be_recomputed_is_refused() -> None:
    module = models.build("gpt")
    with pytest.raises(ConfigurationError, match=r"'ful'.*Did you mean 'full'"):
        check_choice("ful", 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="3 modes, but there are 2"):
        check_choice(["full"] * 3, 2)
    with pytest.raises(ConfigurationError, match="fits no module"):
        Recompute(module, {"nothing.*": "full"})
    with pytest.raises(ConfigurationError, match="no blocks were found"):
        Recompute(torch.nn.Sequential(torch.nn.Linear(2, 2)), "full")
    block = find_blocks(module)[0]
    with pytest.raises(ConfigurationError, match="cut between pipeline stages"):
        Recompute(module, {block: "full"}, opened=[block])
