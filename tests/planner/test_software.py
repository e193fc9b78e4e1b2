"""What frameworks do differently: gradients kept whole, parts held by every tensor-parallel rank, compiled losses."""

from __future__ import annotations

import pytest

from lightning_3d.layout import Layout
from lightning_3d.planner.candidate import Candidate, Job
from lightning_3d.planner.chain import ShapeChain
from lightning_3d.planner.cluster import Cluster, read_internode
from lightning_3d.planner.memory import StageMemory, memory
from lightning_3d.planner.presets import preset
from lightning_3d.planner.step_time import Run, step_time

MODEL = preset("llama3-8b")


def _run(software: str, dp: int, micro: int, tp: int = 1, pp: int = 1, recompute: str = "full") -> Run:
    layout = Layout(tp=tp, pp=pp, dp=dp, zero=3)
    cluster = Cluster.of("h200", tp * pp * dp, 8, "ndr400x8")
    job = Job(dp * micro, 4096, recipe="pure-bf16-float32-reduction", software=software)
    return Run(ShapeChain(MODEL), cluster, job, Candidate(layout, 1, micro, recompute, tp > 1 and pp == 1))


def _only(run: Run) -> StageMemory:
    (stage,) = memory(run).stages
    return stage


@pytest.mark.parametrize("dp", [2, 8])
def test_gradients_that_are_added_up_whole(dp: int) -> None:
    """FSDP2 without synchronisation until the last microbatch: float32, and not divided by the replicas."""
    assert _only(_run("dtensor", dp, 4)).gradients == pytest.approx(4 * MODEL.params, rel=1e-3)
    assert _only(_run("dtensor", dp, 1)).gradients == pytest.approx(2 * MODEL.params / dp, rel=1e-3)
    assert _only(_run("torchtitan", dp, 4)).gradients == pytest.approx(2 * MODEL.params / dp, rel=1e-3)
    whole, each = (step_time(_run(software, dp, 4)) for software in ("dtensor", "torchtitan"))
    assert whole.data + whole.data_hidden < each.data + each.data_hidden  # reduced once, gathered as often


def test_whole_gradients_in_a_pipeline_are_counted_once() -> None:
    run = _run("dtensor", 4, 4, pp=2)
    for stage in memory(run).stages:
        held = stage.gradients / 4
        assert stage.weights == pytest.approx(2 * held / 4)
        assert stage.buffers == pytest.approx(2 * held + run.software.buffers)  # gathered once: all parameters


def test_every_rank_holds_the_embedding() -> None:
    """In a pipeline the head, too, which every rank then computes whole."""
    rest = MODEL.params - 2 * MODEL.embedding_params
    for pp, heads in ((1, 1 / 4), (2, 1)):
        stages = memory(_run("dtensor", 1, 4, tp=4, pp=pp)).stages
        held = sum(stage.weights for stage in stages) / 2
        assert held == pytest.approx(rest / 4 + (1 + heads) * MODEL.embedding_params, rel=1e-3)
    divided, whole = (step_time(_run(software, 1, 4, tp=4, pp=2)) for software in ("torchtitan", "dtensor"))
    assert whole.compute > 1.2 * divided.compute


def test_a_compiled_loss_keeps_no_float32_logits() -> None:
    before, since = (_run(software, 8, 1, recompute="none") for software in ("torchtitan-compile", "torchtitan-2025"))
    assert _only(before).allocated - _only(since).allocated == pytest.approx(10 * 4096 * MODEL.vocab, rel=0.1)


def test_omni_path_is_priced_by_what_was_measured() -> None:
    rate, adapters = read_internode("opa100x4")
    assert adapters == 4
    assert rate * 0.64 == pytest.approx(5.07e9, rel=0.01)  # 0.64: what is reached of InfiniBand
