"""Bad input: a ValueError with the names, the numbers and the way out, on every rank, before any training step."""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelPruning, StochasticWeightAveraging
from torch import nn

from lightning_3d import Layout, ThreeDStrategy
from lightning_3d.deferred import building
from lightning_3d.deferred import tensor as deferred_tensor
from lightning_3d.errors import ConfigurationError, LayoutError, near_pattern
from lightning_3d.suitability import check_can_be_trained, check_is_python, check_owns_its_memory, warn_of_views
from lightning_3d.testing import DistributedError, preload, run_distributed
from tests import models

preload("tests.models")


TP2, PP2 = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tensor_paralel_size": 2}, ["tensor_paralel_size", "Did you mean 'tensor_parallel_size'"]),
        ({"num_microbatches": 4}, ["num_microbatches=4", "pipeline_parallel_size=1"]),
        ({"pipeline_schedule": "gpipe"}, ["pipeline_schedule='gpipe'", "pipeline_parallel_size=1"]),
        ({"pipeline_split": ["a"]}, ["pipeline_split", "pipeline_parallel_size=1"]),
        (
            {"pipeline_parallel_size": 2, "pipeline_split": None},
            ["pipeline_split is None", "'auto', 'measured' or a list"],
        ),
        ({"pipeline_parallel_size": 2, "pipeline_split": [4]}, ["pipeline_split is [4]", "named_modules()"]),
        ({"sequence_parallel": True}, ["sequence_parallel=True", "tensor_parallel_size=1"]),
        ({"tensor_parallel_plan": {"a": "row"}}, ["tensor_parallel_plan", "tensor_parallel_size=1"]),
        ({"strict_tensor_parallel": 0.5}, ["strict_tensor_parallel=0.5", "tensor_parallel_size=1"]),
        ({"tensor_parallel_size": 2, "strict_tensor_parallel": 90}, ["strict_tensor_parallel is 90", "from 0 to 1"]),
        ({"zero_stage": 4}, ["zero_stage is 4", "0, 1, 2 and 3"]),
        ({"zero_stage": True}, ["zero_stage is True", "0, 1, 2 and 3"]),
        ({"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved_1f1b"}, ["virtual_pipeline_size=2"]),
        ({"pipeline_parallel_size": 2, "pipeline_schedule": "1fb1"}, ["1fb1", "Did you mean '1f1b'"]),
        ({"pipeline_parallel_size": 2, "num_microbatches": 0}, ["num_microbatches is 0", "at least 1"]),
        ({"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}, ["virtual_pipeline_size=2"]),
        ({"context_parallel_size": 2}, ["context_parallel_size=2", "tensor_parallel_size"]),
        ({"expert_parallel_size": 2}, ["expert_parallel_size=2"]),
        ({"tensor_parallel_size": 0}, ["tensor_parallel_size is 0", "at least 1"]),
        ({"tensor_parallel_size": 2.0}, ["tensor_parallel_size is 2.0"]),
        ({"loss_weighting": "token"}, ["loss_weighting is 'token'", "'microbatch_mean'", "Did you mean 'tokens'"]),
        ({"verify": "no"}, ["verify is 'no'", "'auto', True or False"]),
        ({"loss_weighting": "tokens"}, ["loss_weighting='tokens'", "microbatch_mean"]),
        ({"activation_checkpointing": True}, ["activation_checkpointing is True", "'full'"]),
        ({"activation_checkpointing": False}, ["activation_checkpointing is False", "None"]),
        ({"activation_checkpointing": {}}, ["activation_checkpointing is {}"]),
        ({**TP2, "strict_tensor_parallel": "0.9"}, ["strict_tensor_parallel is '0.9'", "a number from 0 to 1"]),
        ({**TP2, "strict_tensor_parallel": True}, ["strict_tensor_parallel is True"]),
        ({**TP2, "tensor_parallel_plan": ["a"]}, ["tensor_parallel_plan is ['a']", "a dict of patterns"]),
        ({**TP2, "tensor_parallel_plan": {}}, ["tensor_parallel_plan is {}", "no effect"]),
        ({"timeout": 1800}, ["timeout is 1800", "timedelta"]),
        ({"process_group_backend": "foo"}, ["process_group_backend is 'foo'", "gloo"]),
        ({"save_distributed_checkpoint": "no"}, ["save_distributed_checkpoint is 'no'", "True or False"]),
        ({**TP2, "sequence_parallel": "yes"}, ["sequence_parallel is 'yes'"]),
        ({"bucket_size_mb": 0}, ["bucket_size_mb is 0", "above 0"]),
        ({"hang_report_after": "60"}, ["hang_report_after is '60'", "seconds"]),
        ({"verify": True}, ["verify=True has no effect"]),
        ({**PP2, "virtual_pipeline_order": "contiguous"}, ["virtual_pipeline_order='contiguous'", "no effect"]),
        ({**PP2, "pipeline_schedule": "nofile.txt"}, ["nofile.txt cannot be read"]),
        ({**PP2, "pipeline_split": ["a", "b"]}, ["names 2 modules", "2 parts", "1 borders"]),
        (
            {**PP2, "pipeline_schedule": "zb_v", "pipeline_split": ["a"]},
            ["names 1 modules", "4 parts (pipeline_parallel_size=2, 2 on each rank)", "3 borders"],
        ),
    ],
)
def test_constructor(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as error:
        ThreeDStrategy(**arguments)
    for word in words:
        assert word in str(error.value)


def test_a_file_says_what_must_fit_it(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("rank 0: F0.0 F1.0 B0.0 B1.0\nrank 1: F0.1 B0.1 F1.1 B1.1\n")
    ThreeDStrategy(**PP2, pipeline_schedule=str(path), process_group_backend="cpu:gloo,cuda:nccl")
    with pytest.raises(ConfigurationError, match=r"num_microbatches=3, but .* is made for 2 microbatches"):
        ThreeDStrategy(**PP2, pipeline_schedule=str(path), num_microbatches=3)
    with pytest.raises(ConfigurationError, match="has lists for 2 stages"):
        ThreeDStrategy(pipeline_parallel_size=4, pipeline_schedule=str(path))


def test_zero_bubble_with_recomputed_blocks_is_told() -> None:
    with pytest.warns(UserWarning, match=r"zb_h1.* a recomputed block cannot leave for later"):
        ThreeDStrategy(**PP2, pipeline_schedule="zb_h1", activation_checkpointing={"a": "full"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ThreeDStrategy(**PP2, pipeline_schedule="1f1b", activation_checkpointing="full")
        ThreeDStrategy(**PP2, pipeline_schedule="zb_h1", activation_checkpointing=["none", "none"])


def test_a_pattern_without_its_prefix_is_completed() -> None:
    names = ["gpt", "gpt.transformer.h.0", "gpt.transformer.h.1"]
    assert near_pattern("transformer.h.*", names) == " Did you mean 'gpt.transformer.h.*'?"
    assert "gpt.transformer.h.1" in near_pattern("transformr.h.1", names)


@pytest.mark.parametrize(
    ("arguments", "devices", "words"),
    [
        ({"tensor_parallel_size": 3}, 4, ["4 processes", "replicas of 3", "tensor_parallel_size"]),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 4}, 4, ["4 processes", "replicas of 8"]),
        ({"tensor_parallel_size": 2, "data_parallel_size": 4}, 4, ["needs 8 processes", "data_parallel_size='auto'"]),
    ],
)
def test_world_size(arguments: dict[str, Any], devices: int, words: list[str]) -> None:
    with pytest.raises(LayoutError) as error:
        pl.Trainer(accelerator="cpu", devices=devices, strategy=ThreeDStrategy(**arguments), logger=False)
    for word in words:
        assert word in str(error.value)


def test_tensor_parallel_across_machines() -> None:
    strategy = ThreeDStrategy(tensor_parallel_size=4)
    with pytest.raises(LayoutError, match="allow_cross_node_tensor_parallel"):
        pl.Trainer(accelerator="cpu", devices=2, num_nodes=2, strategy=strategy, logger=False)


def test_layout_text() -> None:
    assert Layout.parse("tp2-pp2-dp2-zero1-1f1b") == Layout(tp=2, pp=2, dp=2)
    assert str(Layout.parse("pp4-gpipe")) == "tp1-pp4-dp1-zero1-gpipe"
    for text in ("tp2-x3", "tp2-tp4", "tpp", ""):
        with pytest.raises(LayoutError):
            Layout.parse(text)


class Manual(models.LitMLP):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OneLayer(models.Lit):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 5)

    def loss(self, batch: Any) -> Any:
        return nn.functional.cross_entropy(self.layer(batch["x"]), batch["y"])


class SecondOrder(models.LitMLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class WholeMatrix(models.LitMLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


class Averaged(models.LitMLP):
    def configure_callbacks(self) -> Any:
        return [StochasticWeightAveraging(swa_lrs=0.1)]


class MovingAverage(models.LitMLP):
    def configure_callbacks(self) -> Any:
        return [EMAWeightAveraging()]


class GroupByRank(models.LitMLP):
    """Trains its last layer on one rank only, from the first epoch on."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[:-1].parameters(), 0.1)

    def on_train_epoch_start(self) -> None:
        if self.global_rank == 1:
            self.trainer.optimizers[0].add_param_group({"params": list(self.net[-1].parameters())})


class ThawedByRank(models.LitMLP):
    def configure_optimizers(self) -> Any:
        self.net[-1].requires_grad_(False)
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_train_epoch_start(self) -> None:
        self.net[-1].requires_grad_(self.global_rank == 0)


class Pruned(models.LitMLP):
    def configure_callbacks(self) -> Any:
        return [ModelPruning("l1_unstructured", amount=0.3)]


class RankBranch(models.LitGPT):
    """Reads divided logits on one rank only: a collective the others do not take part in."""

    samples = staticmethod(models.tokens)

    def forward(self, tokens: Any) -> Any:
        logits = super().forward(tokens)
        if self.global_rank == 0:
            logits.argmax(-1)
        return logits


class OptimizerReplaced(models.LitMLP):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.1)]


class SetUpAgain(models.LitMLP):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.strategy.setup_optimizers(self.trainer)


class OptimizerByRank(models.LitMLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(list(self.parameters())[: 3 + self.global_rank], lr=0.1)


class OwnSamples(models.LitMLP):
    """Every rank makes its own data, as a dataset that looks at the global rank does."""

    def train_dataloader(self) -> Any:
        data = models.vectors(16)
        data.columns["x"] = data.columns["x"] + self.global_rank
        return torch.utils.data.DataLoader(data, batch_size=8)


class Detached(models.LitMLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx).detach()


class LocalBatch(models.LitMLP):
    def train_dataloader(self) -> Any:
        @dataclasses.dataclass
        class Pair:
            x: torch.Tensor
            y: torch.Tensor

        def collate(samples: Any) -> Pair:
            return Pair(torch.stack([s["x"] for s in samples]), torch.stack([s["y"] for s in samples]))

        return torch.utils.data.DataLoader(models.vectors(16), batch_size=8, collate_fn=collate)


class OwnCopy(models.LitMLP):
    """Looks at its whole state before anything is trained."""

    def on_train_start(self) -> None:
        self.first = {k: v.clone() for k, v in self.state_dict().items()}


REFUSED: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "manual": (Manual, {"pipeline_parallel_size": 2}, ["Manual", "manual optimization", "pipeline_parallel_size=1"]),
    "pieces": (OneLayer, {"pipeline_parallel_size": 2}, ["layer", "2"]),
    "microbatches": (
        models.LitMLP,
        {"pipeline_parallel_size": 2, "num_microbatches": 9},
        ["num_microbatches=9", "8 samples"],
    ),
    "lbfgs": (SecondOrder, {"pipeline_parallel_size": 2}, ["LBFGS", "pipeline_parallel_size=1"]),
    "lbfgs_tp": (SecondOrder, {"tensor_parallel_size": 2}, ["LBFGS", "tensor or pipeline", "zero_stage=0"]),
    "adafactor": (
        WholeMatrix,
        {"tensor_parallel_size": 2, "offload_optimizer": True},
        ["Adafactor", "net.10.bias", "offload_optimizer=False"],
    ),
    "averaging": (Averaged, {"pipeline_parallel_size": 2}, ["StochasticWeightAveraging", "2 pipeline stages"]),
    "float32_gradients": (models.LitMLP, {"float32_gradients": True}, ["has no effect", "bf16-true"]),
    "master_weights": (models.LitMLP, {"master_weights": True}, ["master_weights=True has no effect", "bf16-true"]),
    "no_masters": (models.LitMLP, {"master_weights": False}, ["master_weights=False has no effect", "bf16-true"]),
    "ema": (MovingAverage, {"tensor_parallel_size": 2}, ["EMAWeightAveraging copies", "2 tensor-parallel ranks"]),
    "group_by_rank": (GroupByRank, {}, ["optimizer 0 trains parameter", "on ranks [1]", "groups are added"]),
    "group_by_rank_tp": (GroupByRank, {"tensor_parallel_size": 2}, ["optimizer 0 trains parameter", "on ranks [1]"]),
    "thawed_by_rank": (ThawedByRank, {"zero_stage": 3}, ["optimizer 0 trains parameter", "on ranks [0]"]),
    "optimizer_by_rank": (OptimizerByRank, {}, ["optimizer 0 trains parameter", "on ranks [1]", "same parameters"]),
    "optimizer_replaced": (OptimizerReplaced, {}, ["replaced while fit runs", "zero_stage=1", "add_param_group"]),
    "optimizers_set_up_again": (SetUpAgain, {"zero_stage": 3}, ["replaced while fit runs", "zero_stage=3"]),
    "averaging_zero3": (Averaged, {"zero_stage": 3}, ["StochasticWeightAveraging", "zero_stage=2"]),
    "pruning": (Pruned, {"tensor_parallel_size": 2}, ["ModelPruning", "zero_stage=0"]),
    "pruning_zero": (Pruned, {}, ["ModelPruning", "zero_stage=0"]),
    "rank": (RankBranch, {"tensor_parallel_size": 2}, ["differs between the ranks", "global_rank"]),
    "rank_pp": (RankBranch, {"pipeline_parallel_size": 2}, ["differs between the ranks", "global_rank"]),
    "detached": (Detached, {"pipeline_parallel_size": 2}, ["training_step", "does not require grad", "detach"]),
    "local": (LocalBatch, {"pipeline_parallel_size": 2}, ["cannot be pickled", "Pair", "top level of a module"]),
    "copy": (OwnCopy, {"pipeline_parallel_size": 2}, ["state_dict()", "net.", "trainer.save_checkpoint", "export"]),
    "samples": (OwnSamples, {"tensor_parallel_size": 2}, ["different batches", "distributed_sampler_kwargs"]),
    "plan": (
        models.LitMLP,
        {"tensor_parallel_size": 2, "tensor_parallel_plan": {"nett.2": "column"}},
        ["nett.2", "net.2"],
    ),
    "strict": (
        models.LitMLP,
        {"tensor_parallel_size": 2, "strict_tensor_parallel": 0.9, "tensor_parallel_plan": {"net.2": "replicate"}},
        ["at least 90.0%", "net.2.weight", "demanded by 'net.2'"],
    ),
    "split": (
        models.LitMLP,
        {"pipeline_parallel_size": 2, "pipeline_split": ["net.99"]},
        ["net.99", "net."],
    ),
}


def refuse(name: str) -> tuple[str, float]:
    make, arguments, _ = REFUSED[name]
    warnings.simplefilter("ignore")
    trainer = pl.Trainer(
        max_steps=1, accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), logger=False, precision="64-true",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        strategy=ThreeDStrategy(**arguments),
    )  # fmt: skip
    begin = time.monotonic()
    module = make()
    own = hasattr(type(module), "train_dataloader") and "train_dataloader" in vars(type(module))
    try:
        samples = getattr(module, "samples", models.vectors)(16)
        trainer.fit(module, None if own else torch.utils.data.DataLoader(samples, batch_size=8))
    except ValueError as error:
        assert trainer.global_step == 0
        return str(error), time.monotonic() - begin
    return "", 0.0


def resume_from_weights(path: str) -> str:
    trainer = pl.Trainer(
        max_steps=1, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, strategy=ThreeDStrategy(),
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    data = torch.utils.data.DataLoader(models.vectors(8), batch_size=8)
    with pytest.raises(ConfigurationError) as error:
        trainer.fit(models.LitMLP(), data, ckpt_path=path)
    return str(error.value)


def refuse_all(names: list[str]) -> list[tuple[str, float]]:
    return [refuse(name) for name in names]


def test_weights_alone_are_no_checkpoint_of_a_run(tmp_path: Path) -> None:
    torch.save(models.LitMLP().state_dict(), tmp_path / "weights.pt")
    (says,) = run_distributed(
        resume_from_weights, 1, str(tmp_path / "weights.pt"), init_process_group=False, timeout=60
    )
    assert "weights.pt is no checkpoint of a run: it holds the keys" in says
    assert "configure_model" in says


def test_every_rank_refuses_at_set_up() -> None:
    names = list(REFUSED)
    for rank in run_distributed(refuse_all, 2, names, init_process_group=False, timeout=120):
        for name, (message, seconds) in zip(names, rank, strict=True):
            assert message, f"{name} was not refused"
            for word in REFUSED[name][2]:
                assert word in message, (name, message)
            assert seconds < 20


def test_buffers_that_change_with_every_forward_are_named() -> None:
    net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), nn.InstanceNorm1d(3))
    net.automatic_optimization = True
    with pytest.warns(UserWarning, match="^SpectralNorm changes buffers .* num_microbatches=1"):
        check_can_be_trained(net, Layout(pp=2), [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_can_be_trained(net, Layout(dp=2), [])


class Failing(models.LitMLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.global_rank == 1:
            raise RuntimeError("the disk is full:\n\t0 bytes left")
        return loss


def fail(arguments: dict[str, Any], linger: bool) -> None:
    warnings.simplefilter("ignore")
    trainer = pl.Trainer(
        max_steps=4, accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), logger=False, precision="64-true",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        strategy=ThreeDStrategy(**arguments),
    )  # fmt: skip
    try:
        trainer.fit(Failing(), torch.utils.data.DataLoader(models.vectors(64), batch_size=8))
    except RuntimeError:
        if linger and trainer.global_rank == 1:
            time.sleep(4.5)  # its sockets stay open, so nothing but the report tells the others
        raise


@pytest.mark.parametrize(("arguments", "linger"), [({}, False), ({"tensor_parallel_size": 2}, True)])
def test_one_rank_that_fails_ends_all(arguments: dict[str, Any], linger: bool) -> None:
    begin = time.monotonic()
    with pytest.raises(DistributedError, match="the disk is full") as error:
        run_distributed(fail, 2, arguments, linger, init_process_group=False, timeout=60)
    assert time.monotonic() - begin < 30
    # rank 0 waits in a collective that never completes: it is ended by its own watch, not by the harness
    assert ("exit code 1 and no result" if linger else "another rank failed first") in str(error.value)
    assert linger or "failed: RuntimeError: the disk is full: 0 bytes left" in str(error.value)


def test_views_of_parameters_that_will_go_stale_are_named() -> None:
    module = nn.Module()
    module.layer = nn.Linear(3, 2)
    for made in (lambda x: list(x.chunk(2)), torch.from_dlpack, lambda x: torch.from_numpy(x.numpy())):
        module.layer.halves = made(module.layer.weight.detach())
        with pytest.warns(UserWarning, match=r"layer\.halves shares its memory with parameter 'layer\.weight'"):
            warn_of_views(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_views(nn.utils.spectral_norm(nn.Linear(3, 2)))
        warn_of_views(nn.LSTM(3, 2))
        sparse = nn.Linear(3, 2)
        sparse.mask = torch.eye(3).to_sparse()  # has no memory of its own kind to share
        warn_of_views(sparse)


@pytest.mark.parametrize("late", [False, True])
def test_parameters_that_share_memory_are_refused(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before they have values. Slices of one tensor that do not overlap (as cuDNN packs LSTMs) are no tie."""
    monkeypatch.setattr(deferred_tensor, "SMALLEST", 4)
    with building(torch.device("cpu")) if late else nullcontext():
        net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False), nn.Linear(5, 4))
        net[1].weight.data = net[0].weight.data
        flat = torch.zeros(2, 3, 4)
        apart = nn.ParameterList([nn.Parameter(flat[0]), nn.Parameter(flat[1])])
        tied = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
        tied[1].weight = tied[0].weight
        shown = [nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(4, 5, bias=False)) for _ in range(3)]
        shown[0][1].weight = nn.Parameter(torch.from_numpy(shown[0][0].weight.detach().numpy()))
        shown[1][1].weight = nn.Parameter(torch.from_dlpack(shown[1][0].weight.detach()))
        shown[2][1].weight = nn.Parameter(torch.empty(0).set_(shown[2][0].weight.detach().untyped_storage()))
    for module in (net, *shown):
        with pytest.raises(ConfigurationError, match=r"'0\.weight' and '1\.weight' are two objects that share memory"):
            check_owns_its_memory(module)
    check_owns_its_memory(apart)
    check_owns_its_memory(tied)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_nobody_can_follow_is_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3)), torch.jit.script(nn.GELU()))
    for layout in (Layout(tp=2), Layout(pp=2)):
        with pytest.raises(ConfigurationError, match=r"^1 was compiled by torch\.jit"):
            check_is_python(net, layout)
    check_is_python(net, Layout(dp=2, zero=3))
    check_is_python(net[2:], Layout(tp=2))
