"""Every gradient of every model, in processes over gloo, equal to one process on the same microbatches (float64)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from lightning_3d.layout import Layout
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline import PipelineRunner, is_absent
from lightning_3d.pipeline.microbatch import split as split_batch
from lightning_3d.pipeline.microbatch import split_with_sizes
from lightning_3d.testing import preload, relative_error, run_distributed
from tests.pipeline import reference
from tests.pipeline.zoo import ZOO, Lift, batch_of, build

preload("transformers", "tests.pipeline.zoo", "lightning_3d.pipeline")
TOLERANCE = 1e-9
# BatchNorm sees microbatches, so every model is compared with the same microbatches


def _part_of(batch: Any, replica: int, replicas: int) -> Any:
    return split_batch(batch, replicas)[replica]


def compare(
    mesh: Mesh, name: str, *, samples: int, microbatches: int, schedule: Any, split: Any = "auto"
) -> dict[str, Any]:
    """One train step of one model, checked on every rank."""
    dp = mesh.layout.dp
    module, plain = build(name), build(name)
    whole = batch_of(name, samples * dp)
    runner = PipelineRunner(
        module, mesh, schedule=schedule, num_microbatches=microbatches, split=split, forward_context=Lift
    )
    mine = _part_of(whole, mesh.at.dp, dp)
    runner.setup("training_step", mine)
    state = torch.get_rng_state()
    result = runner.train_step(mine, 0, scale=1 / dp)
    assert torch.equal(state, torch.get_rng_state()), "the default generator must stay in step"
    runner.reduce_shared()
    for parameter in runner.parameters.values():
        if parameter.grad is not None:
            mesh.data.all_reduce(parameter.grad)
    losses = []
    for replica in range(dp):
        cut, sizes = split_with_sizes(_part_of(whole, replica, dp), microbatches)
        loss, logs = reference.train(plain, cut, [s / sum(sizes) / dp for s in sizes])
        losses.append(loss * dp)
        if replica == mesh.at.dp:
            my_logs = logs
    worst, where = reference.worst_gradient(dict(runner.parameters), plain)
    loss_error = 0.0
    if mesh.is_last_stage:
        assert result.loss is not None
        loss_error = relative_error(result.loss, losses[mesh.at.dp])
        assert [n for n, *_ in result.logs] == list(dict.fromkeys(n for n, _ in my_logs))
        for entry in result.logs:
            want = [v for n, v in my_logs if n == entry.name]
            assert [float(v) for v in entry.values] == pytest.approx(want, rel=1e-9, abs=1e-12)
    else:
        assert result.loss is None
        assert not result.logs
    _check_held(runner)
    assert "forward" not in module.__dict__
    assert "log" not in module.__dict__
    return {
        "gradient": worst, "where": where, "loss": loss_error, "held": sorted(runner.parameters),
        "counted": sorted(runner.counted), "peak": runner.live_peak, "names": runner.names,
    }  # fmt: skip


def _check_held(runner: PipelineRunner) -> None:
    for name, parameter in runner.module.named_parameters():
        assert is_absent(parameter) == (name not in runner.parameters)
        if is_absent(parameter):
            assert parameter.grad is None
            assert parameter.untyped_storage().nbytes() <= 8


def _rank(pp: int, dp: int, cases: list[tuple[str, int, int, str]]) -> list[dict[str, Any]]:
    mesh = Mesh(Layout(pp=pp, dp=dp), torch.device("cpu"))
    return [
        compare(mesh, name, samples=samples, microbatches=microbatches, schedule=schedule)
        for name, samples, microbatches, schedule in cases
    ]


def _cases(models: list[str], varied: list[str]) -> list[tuple[str, int, int, str]]:
    cases = [(name, 8, 4, "1f1b") for name in models]
    for name in varied:
        cases += [(name, 8, 1, "1f1b"), (name, 8, 2, "1f1b"), (name, 8, 5, "gpipe"), (name, 7, 4, "1f1b")]
        cases += [(name, 8, 4, "gpipe"), (name, 3, 5, "1f1b")]
    return cases


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (4, 1), (2, 2)])
def test_gradients_equal_one_process(pp: int, dp: int) -> None:
    fewer = ["mlp", "gpt", "llama", "t5", "unet", "batch_norm"]
    models = list(ZOO) if (pp, dp) != (2, 2) else fewer
    cases = _cases(models, ["mlp", "gpt"] if dp == 1 else ["gpt"])
    ranks = run_distributed(_rank, pp * dp, pp, dp, cases, timeout=120)
    for k, (name, samples, microbatches, schedule) in enumerate(cases):
        results = [rank[k] for rank in ranks]
        label = f"{name} pp={pp} dp={dp} m={microbatches} of {samples} {schedule}"
        for result in results:
            assert result["gradient"] <= TOLERANCE, f"{label}: {result['where']} off by {result['gradient']:.1e}"
            assert result["loss"] <= TOLERANCE, label
        everything = results[0]["names"]
        assert sorted({n for r in results for n in r["held"]}) == sorted(everything), f"{label}: a parameter is lost"
        counted = [n for r in results for n in r["counted"]]
        assert sorted(counted) == sorted(everything * dp), f"{label}: every parameter counts once"
        count = min(microbatches, samples)
        if name in ("siamese", "several_forwards"):  # a stage has several windows
            continue
        peaks = [count if schedule == "gpipe" else min(pp - s, count) for s in reversed(range(pp))] * dp
        assert [r["peak"] for r in results] == peaks, label


def _several_steps(pp: int) -> dict[str, Any]:
    """Changing lengths and sizes with optimizer steps in between, and accumulation over batches (case N1)."""
    mesh = Mesh(Layout(pp=pp), torch.device("cpu"))
    out: dict[str, Any] = {}
    module, plain = build("gpt"), build("gpt")
    runner = PipelineRunner(module, mesh, num_microbatches=4)
    runner.setup("training_step", batch_of("gpt", 8))
    # all parameters, absent ones included: names and groups are those of one process
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for k, (samples, length) in enumerate([(8, 9), (8, 12), (3, 7), (8, 9), (6, 12)]):
        batch = tree_map(lambda x: x, {"tokens": torch.randint(1, 101, (samples, length), generator=_generator(k))})
        runner.train_step(batch, k, scale=0.5)
        cut, sizes = split_with_sizes(batch, 4)
        reference.train(plain, cut, [0.5 * s / samples for s in sizes])
        if k % 2:
            runner.reduce_shared()
            out[f"gradient {k}"] = reference.worst_gradient(dict(runner.parameters), plain)[0]
            for o in (optimizer, other):
                o.step()
                o.zero_grad()
            want = dict(plain.named_parameters())
            out[f"weights {k}"] = max(relative_error(p, want[n]) for n, p in runner.parameters.items())
    out["state"] = len(optimizer.state_dict()["state"]), len(runner.parameters)
    out["traces"] = len(runner.plans.partitions)
    return out


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_changing_batches_accumulation_and_optimizer_steps() -> None:
    for result in run_distributed(_several_steps, 2, 2, timeout=60):
        state, held = result.pop("state")
        assert state == held, "the optimizer keeps state for held parameters only"
        # microbatches of 2, 2 (longer), 1 (shorter), 1 and 2 (longer) samples
        assert result.pop("traces") == 4
        assert max(result.values()) <= TOLERANCE, result


def _evaluations(pp: int) -> list[dict[str, Any]]:
    mesh = Mesh(Layout(pp=pp), torch.device("cpu"))
    return [_evaluation(mesh, name) for name in ("mlp", "gpt", "batch_norm", "t5")]


def _evaluation(mesh: Mesh, name: str) -> dict[str, Any]:
    module, plain = build(name), build(name)
    runner = PipelineRunner(module, mesh, num_microbatches=3, evaluation_microbatches=3, forward_context=Lift)
    batch = batch_of(name, 8)
    runner.setup("training_step", batch)
    module.eval()
    plain.eval()
    cut, sizes = split_with_sizes(batch, 3)
    out: dict[str, Any] = {"name": name}
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            result = runner.evaluate("validation_step", batch, 3)
        logs: list[tuple[str, float, dict[str, Any]]] = []
        plain.log = lambda n, v, *a, logs=logs, **k: logs.append((n, float(v), k))
        plain.log_dict = lambda d, *a, logs=logs, **k: logs.extend((n, float(v), k) for n, v in d.items())
        with torch.no_grad(), Lift():
            want = [plain.validation_step(m, 3) for m in cut]
        if not mesh.is_last_stage:
            assert result.outputs is None
            continue
        if want[0] is not None:
            mean = sum(w * s for w, s in zip(want, sizes, strict=True)) / sum(sizes)
            out["outputs"] = relative_error(result.outputs, mean)
        for entry in result.logs:
            values = [v for n, v, _ in logs if n == entry.name]
            assert [float(v) for v in entry.values] == pytest.approx(values, rel=1e-9)
            if entry.name == "val_loss":  # logged with batch_size=...
                assert entry.weights == list(sizes)
                assert entry.kwargs == {"batch_size": 8}
            if entry.name == "accuracy":
                assert entry.kwargs == {"on_epoch": True}
    if name == "mlp":
        with torch.inference_mode():
            result = runner.evaluate("predict_step", batch, 0, 0)
        if mesh.is_last_stage:
            want_all = plain.predict_step(batch)
            assert torch.equal(result.outputs["classes"], want_all["classes"])
            assert result.outputs["name"] == "net"
            out["predict"] = relative_error(result.outputs["mean"], want_all["mean"])
    # training still works, and has not been touched
    module.train()
    plain.train()
    runner.train_step(batch, 0)
    runner.reduce_shared()
    reference.train(plain, cut, [s / sum(sizes) for s in sizes])
    out["gradient"] = reference.worst_gradient(dict(runner.parameters), plain)[0]
    return out


@pytest.mark.parametrize("pp", [2, 4])
def test_evaluation_equals_one_process(pp: int) -> None:
    for rank in run_distributed(_evaluations, pp, pp, timeout=90):
        for result in rank:
            errors = {k: v for k, v in result.items() if k != "name"}
            assert max(errors.values()) <= TOLERANCE, result
