"""Plans for the batch that a loader gives one replica: what is compared, what stays as it is given, what is left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_3d.choosing import plan_that_can_be_cut
from lightning_3d.errors import ConfigurationError
from lightning_3d.layout import Layout
from lightning_3d.planner import Cluster
from lightning_3d.planner.candidate import Candidate, Job
from lightning_3d.planner.given import Given
from lightning_3d.planner.memory import memory
from lightning_3d.planner.planning import Plan, plan_batches
from lightning_3d.planner.pricing import Priced
from lightning_3d.planner.recipes import recipe_named, recipe_of_run
from lightning_3d.planner.step_time import Run, step_time
from lightning_3d.planner.user_model import ModuleChain, chain_of_module
from lightning_3d.tensor.recorded.eager import eager_meanwhile
from tests import models

CLUSTER = Cluster.of("a100-80gb", 4, 4)
JOB: dict[str, Any] = {"precision": "bf16", "recipe": "bf16-true"}


@pytest.fixture(scope="module")
def chain() -> ModuleChain:
    return chain_of_module(models.LitGPT(tied=False, depth=6), {"tokens": torch.zeros(12, 9, dtype=torch.long)})


def candidates(plan: Plan) -> list[Candidate]:
    return [p.run.candidate for p in plan.ranked]


def test_the_batch_is_that_of_one_replica(chain: ModuleChain) -> None:
    plan = plan_batches(chain, CLUSTER, Given(batch=12), accumulate=3, keep=99, **JOB)
    for p in plan.ranked:
        candidate, dp = p.run.candidate, p.run.candidate.layout.dp
        assert p.run.job.global_batch == 12 * dp * 3
        assert candidate.micro_batch * candidate.microbatches == 12
        assert candidate.microbatches == 1 or candidate.layout.pp > 1
    assert {c.microbatches for c in candidates(plan)} >= {1, 2, 4}
    speeds = [p.samples_per_second for p in plan.ranked]
    assert speeds == sorted(speeds, reverse=True)
    named = plan.explain("tp2-pp2-sp")
    assert (named.run.candidate.micro_batch, named.run.job.global_batch) == (2, 36)  # of "auto": at most 8 microbatches


@pytest.mark.parametrize(
    ("given", "holds"),
    [
        (Given(tp=2, zero=0), lambda c: (c.layout.tp, c.layout.zero) == (2, 0)),
        (Given(dp=1, sequence_parallel=False), lambda c: c.layout.dp == 1 and not c.sequence_parallel),
        (Given(microbatches=5, pp=2), lambda c: (c.microbatches, c.micro_batch, c.layout.pp) == (5, 3, 2)),
        (Given(schedule="gpipe"), lambda c: c.layout.pp > 1 and c.layout.schedule == "gpipe"),
        (Given(virtual=2), lambda c: c.layout.pp > 1 and c.layout.virtual == 2),
        (Given(recompute="full"), lambda c: c.recompute == "full"),
        (Given(order="contiguous", pp=2), lambda c: c.layout.order == "contiguous"),
    ],
)
def test_what_is_given_stays(chain: ModuleChain, given: Given, holds: Any) -> None:
    one_stage = "schedule and parts need a pipeline"
    needs = given.schedule is not None or given.virtual is not None

    def refuses(layout: Layout) -> str | None:
        return one_stage if needs and layout.pp == 1 else None

    plan = plan_batches(chain, CLUSTER, replace(given, batch=12, refuses=refuses), **JOB)
    assert all(holds(c) for c in candidates(plan))


def test_accumulated_batches_fill_the_pipeline_anew(chain: ModuleChain) -> None:
    layout = Layout(tp=1, pp=2, dp=2)
    candidate = Candidate(layout, 3, 4)
    one, four = (Run(chain, CLUSTER, Job(24 * n, 9, "bf16", "bf16-true", accumulate=n), candidate) for n in (1, 4))
    times = [step_time(run) for run in (one, four)]
    for part in ("compute", "bubble", "pipeline"):
        assert getattr(times[1], part) == pytest.approx(4 * getattr(times[0], part))
    assert (times[1].data, times[1].optimizer) == (times[0].data, times[0].optimizer)
    whole = [replace(run, candidate=Candidate(Layout(dp=4), 12, 1)) for run in (one, four)]
    kept, added = (memory(run).peak.gradients for run in whole)
    assert added == kept  # so few that all of them are under way


def test_what_is_refused_is_told(chain: ModuleChain) -> None:
    def refuses(layout: Layout) -> str | None:
        return "pipelines are out" if layout.pp > 1 else None

    plan = plan_batches(chain, CLUSTER, Given(batch=12, refuses=refuses), **JOB)
    assert all(c.layout.pp == 1 for c in candidates(plan))
    assert any(why == "pipelines are out." for _, why in plan.rejected)
    with pytest.raises(ConfigurationError, match=r"no layout with pp 2 can train .*\n.* pipelines are out\."):
        plan_batches(chain, CLUSTER, Given(batch=12, pp=2, refuses=refuses), **JOB)
    small = replace(CLUSTER, gpu=replace(CLUSTER.gpu, memory=float(1 << 20)))
    with pytest.raises(ConfigurationError, match="one layer does not fit"):
        plan_batches(chain, small, Given(batch=12), **JOB)


def test_bytes_of_a_run() -> None:
    assert recipe_of_run("bf16-true", True, False, False) == ("bf16", "bf16-true")
    assert recipe_of_run("bf16-true", False, False, False) == ("bf16", "pure-bf16")
    assert recipe_of_run("16-mixed", True, False, True) == ("fp16", "16-mixed-offloaded")
    assert recipe_of_run("64-true", True, False, False) == ("fp64", "64-true")
    assert recipe_named("bf16-true-offloaded").total == 4


def test_frozen_parameters_have_no_gradient_and_no_optimizer() -> None:
    module, batch = models.LitGPT(tied=False, depth=6), {"tokens": torch.zeros(4, 9, dtype=torch.long)}
    module.blocks.requires_grad_(False)
    run = Run(chain_of_module(module, batch), CLUSTER, Job(16, 9), Candidate(Layout(dp=4, zero=0), 4, 1))
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    peak, everything = memory(run).peak, sum(p.numel() for p in module.parameters())
    assert (peak.weights, peak.gradients, peak.optimizer) == (2 * everything, 2 * trained, 12 * trained)


def test_planning_leaves_compiled_blocks_compiled() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].compile(backend="eager")
    whole = torch.compile(module, backend="eager")
    before = type(whole), module[0].__dict__["_compiled_call_impl"], dict(whole.__dict__)
    with eager_meanwhile(whole):
        assert module[0].__dict__["_compiled_call_impl"] is None
        assert type(whole) is not before[0]
    assert (type(whole), module[0].__dict__["_compiled_call_impl"]) == before[:2]
    assert whole.__dict__.keys() == before[2].keys()


def test_the_next_best_is_taken_where_the_step_cannot_be_cut(chain: ModuleChain) -> None:
    asked: list[int] = []

    def check(best: Priced) -> None:
        layout = best.run.candidate.layout
        asked.append(layout.pp * layout.virtual)
        if asked[-1] > 2:
            raise ConfigurationError("the step has two pieces. No more.")

    given = Given(batch=12, refuses=lambda layout: "stages are wanted" if layout.pp == 1 else None)
    plan = plan_that_can_be_cut(chain, CLUSTER, given, check, **JOB)
    best = plan.best.run.candidate.layout
    assert (best.pp, best.virtual, asked[-1]) == (2, 1, 2)
    assert asked == sorted(asked, reverse=True), "what has as many parts or more is not asked again"
    assert ("the step has two pieces." in dict(plan.rejected).values()) == (len(asked) > 1)
    with pytest.raises(ConfigurationError, match="the step has two pieces"):
        plan_that_can_be_cut(chain, CLUSTER, replace(given, pp=4), check, **JOB)
