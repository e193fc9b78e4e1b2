"""Public bug reports about pipelines as tests, and evaluation in every way the Trainer offers.

N1 N8 N20 T1 T2 S1 S2 H1 H4 H5 H6 H8 H9 H10 H11 L6 U10 U12.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_3d.errors import ConfigurationError
from lightning_3d.layout import Layout
from lightning_3d.materialize import materialize
from lightning_3d.mesh import Mesh
from lightning_3d.testing import DistributedError, preload, relative_error, run_distributed
from tests.pipeline.test_parity import compare
from tests.strategy import pipeline_cases
from tests.strategy.cases import clipped
from tests.strategy.fits import Case
from tests.strategy.test_cases import launch, sizes
from tests.strategy.test_parity import check

preload("tests.models", "tests.strategy.pipeline_cases", "tests.pipeline.zoo", "tests.pipeline.test_parity")

INTERLEAVED = {"pipeline_schedule": "interleaved_1f1b", "virtual_pipeline_size": 2}
LOOPED = sizes(1, 2, **INTERLEAVED)


def worst(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(relative_error(got[n], x) for n, x in want.items())


# -- E1: accumulation and microbatches
def test_gradients_do_not_depend_on_how_a_batch_is_divided() -> None:
    """N1, N8: microbatches x accumulation, with plain and interleaved schedules; gradients, not losses."""
    cases = [
        Case("mlp", accumulate=accumulate, steps=2, samples=8, strategy={"num_microbatches": count, **extra})
        for accumulate, extra in ((3, {}), (1, {}), (3, INTERLEAVED), (3, {"pipeline_schedule": "zb_h1"}))
        for count in ((1, 2, 4, 8) if accumulate == 3 and not extra else (4,))
    ]
    check((1, 2, 1), cases)


def test_the_norm_does_not_depend_on_how_a_batch_is_divided() -> None:
    cases = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 3), (2, 3), (8, 3)]
    for norms in launch(pipeline_cases.gradient_norms, 2, cases):
        assert norms == pytest.approx([norms[0]] * len(cases), rel=1e-9)


# -- E9: ties
def test_ties_with_several_windows_per_stage() -> None:
    """E9, T1: five steps bit-equal on both stages, equal to one process; the tie counts once in the clipping norm."""
    cases = [
        Case("gpt_tied", steps=5, samples=8, clip=0.3, strategy={"num_microbatches": 4, **extra})
        for extra in ({}, INTERLEAVED, {"pipeline_schedule": "zb_v"})
    ]
    check((1, 2, 1), cases)
    check((2, 2, 1), cases[1:2])
    ((want, parameters),) = launch(clipped, 1, [(None, "norm")])[0]
    for rank in launch(clipped, 2, [(LOOPED, "norm")]):
        assert rank[0][0] == pytest.approx(want, rel=1e-9)
        assert worst(rank[0][1], parameters) <= 1e-9


def test_ties_built_on_the_meta_device() -> None:
    """E9, T2, with several windows per stage and with tensor parallelism."""
    layouts = [LOOPED, sizes(2, 2), sizes(2, 2, **INTERLEAVED)]
    for rank in launch(pipeline_cases.tied_on_meta, 4, layouts):
        assert rank == [(True, 0.0)] * 3


# -- E10: buffers
def test_batch_norm_sees_microbatches() -> None:
    """E10, S1: the documented rule (statistics once per microbatch), one warning; several windows per stage, too."""
    for layout in (sizes(1, 2, num_microbatches=1), sizes(1, 2, num_microbatches=4), {**LOOPED, "num_microbatches": 4}):
        count = layout["num_microbatches"]
        ((want, _),) = launch(pipeline_cases.batch_norm, 1, None, count)
        ranks = launch(pipeline_cases.batch_norm, 2, layout, count)
        for state, _ in ranks:
            assert worst(state, want) <= 1e-9, layout
            assert int(state["net.0.1.num_batches_tracked"]) == 2 * count
        assert sum(len(messages) for _, messages in ranks) == (count > 1)


def test_buffers_no_checkpoint_holds_are_right_after_a_build_on_meta() -> None:
    """E10, S2: a table that is not persistent, and an integer buffer."""
    layouts = [sizes(1, 2), LOOPED, sizes(2, 2), sizes(1, 1), sizes(1, 2, zero_stage=3)]
    for rank in launch(pipeline_cases.buffers_after_meta, 4, layouts):
        for layout, (difference, kinds, loss) in zip(layouts, rank, strict=True):
            assert difference <= 1e-6, layout
            assert kinds == ["offsets integer", "table float"], layout
            assert 0.5 < loss < 5, layout


class Whole(torch.nn.Module):
    """`_init_weights` as many models have it: it knows the layers with parameters, and no tables."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.linear = torch.nn.Module(), torch.nn.Linear(4, 4)
        self.rotary.register_buffer("table", torch.full((4,), 0.25), persistent=False)

    def _init_weights(self, module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.02)


def test_a_buffer_that_nothing_initialises_is_refused() -> None:
    """S2: never the memory's old content."""
    with torch.device("meta"):
        module = Whole()
    with pytest.raises(ConfigurationError, match="table"):
        materialize(module, torch.device("cpu"))


# -- E12: what hangs elsewhere
def test_replicas_with_other_numbers_of_validation_batches() -> None:
    """H1: three batches on one replica and one on the other; with none, Lightning ends the fit and says why."""
    for metric, want, steps in launch(pipeline_cases.uneven_validation, 4, sizes(1, 2), 1):
        assert steps == 2
        assert metric == pytest.approx(want, rel=1e-9)
    with pytest.raises(DistributedError, match="`DataLoader` within local rank has zero length"):
        launch(pipeline_cases.uneven_validation, 4, sizes(1, 2), 0)


def test_a_replica_without_validation_batches() -> None:
    """H1, with Lightning's `allow_zero_length_dataloader_with_multiple_devices`."""
    arguments = (sizes(1, 2), 0, True)
    for metric, want, steps in launch(pipeline_cases.uneven_validation, 4, *arguments):
        assert steps == 2
        assert metric == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("how", ["large", "every_second", "leader_loss"])
def test_logging_in_some_steps_or_on_the_last_stage_reaches_every_rank(how: str) -> None:
    """H5."""
    (want,) = launch(pipeline_cases.logged, 1, None, how)
    # a branch on the loss is one on the loss of a microbatch
    one = {"num_microbatches": 1} if how == "large" else {}
    for layout in ({**sizes(1, 2), **one}, {**LOOPED, **one}):
        for got in launch(pipeline_cases.logged, 2, layout, how):
            assert got == [pytest.approx(x, rel=1e-9) for x in want]
    first, second = launch(pipeline_cases.logged, 2, sizes(1, 2, num_microbatches=4), how)
    assert first == second


def test_logging_on_one_rank_is_refused_at_set_up() -> None:
    """H5: `if self.global_rank == 0: self.log(..., sync_dist=True)` does not hang: the ranks' steps differ."""
    with pytest.raises(DistributedError, match=r"differs between the ranks .*global_rank == 0"):
        launch(pipeline_cases.logged, 2, sizes(1, 2), "leader")


@pytest.mark.parametrize("ranks", [(0,), (1,)])
def test_one_rank_that_wants_to_stop_ends_all(ranks: tuple[int, ...]) -> None:
    """H6: `trainer.should_stop = True` on one rank, in the middle of an epoch: the same step everywhere."""
    for world, layout in ((2, sizes(1, 2)), (4, sizes(1, 2))):
        found = run_distributed(pipeline_cases.stopped, world, layout, ranks, init_process_group=False, timeout=20)
        assert len(set(found)) == 1


def test_early_stopping_on_a_value_that_differs_per_replica() -> None:
    """H6: all ranks stop at the same step."""
    ranks = launch(pipeline_cases.stopped, 4, sizes(1, 2), "early")
    assert len(set(ranks)) == 1
    assert ranks[0][1] < 4


# -- E13: few microbatches, depths that do not divide
def test_any_number_of_microbatches_on_four_stages() -> None:
    """H4: fewer than stages, as many, more; also interleaved."""
    cases = [
        Case("mlp_8", steps=1, samples=6, strategy={"num_microbatches": count, **extra}, parts=(1, count))
        for count in (1, 2, 3, 5, 6)
        for extra in ({}, INTERLEAVED)
    ]
    check((1, 4, 1), cases)


def _depths(pp: int, virtual: int) -> list[dict[str, Any]]:
    from lightning_3d.pipeline.training_schedule import TrainingSchedule

    mesh = Mesh(Layout(pp=pp), torch.device("cpu"))
    schedule = TrainingSchedule("interleaved_1f1b" if virtual > 1 else "1f1b", pp, virtual)
    return [compare(mesh, name, samples=6, microbatches=3, schedule=schedule) for name in ("gpt5", "gpt7")]


@pytest.mark.parametrize(("pp", "virtual"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_the_stages_together_are_the_whole_module(pp: int, virtual: int) -> None:
    """L6: 5 and 7 blocks."""
    ranks = run_distributed(_depths, pp, pp, virtual, timeout=90)
    for results in zip(*ranks, strict=True):
        assert all(r["gradient"] <= 1e-9 and r["loss"] <= 1e-9 for r in results)
        assert sorted({n for r in results for n in r["held"]}) == sorted(results[0]["names"])
        assert sorted(n for r in results for n in r["counted"]) == sorted(results[0]["names"]), "each parameter once"


# -- unused, frozen and tiny
def test_stages_without_parameters_of_some_kind() -> None:
    """H8: a stage that is frozen, and one that holds a tiny norm; ZeRO-1 and clipping."""
    cases = [
        Case(name, steps=3, samples=16, clip=0.1, optimizer=optimizer, strategy={"pipeline_split": [split]})
        for name, split in (("frozen_start", "net.9"), ("tiny_end", "last"))
        for optimizer in ("sgd", "adamw")
    ]
    check((1, 2, 1), cases)
    check((1, 2, 2), cases[1::2])


def test_what_travels_beside_the_hidden_state() -> None:
    """H9, U10: masks, positions and None between the stages; a block that ignores its input on odd batches."""
    cases = [
        Case("passes", steps=4, samples=8, strategy={"num_microbatches": 1, **extra})
        for extra in ({}, INTERLEAVED, {"pipeline_schedule": "zb_h1"})
    ]
    check((1, 2, 1), cases)


def test_replicas_that_use_different_heads_in_one_step() -> None:
    """H10: the head a replica does not use counts as zero in the mean over the replicas."""
    cases = [
        Case("two_heads", steps=3, samples=16, parts=(2, 1), strategy={"zero_stage": zero, "num_microbatches": "auto"})
        for zero in range(4)
    ]
    check((1, 2, 2), cases)
    for case in cases:
        case.strategy.pop("num_microbatches")
    check((1, 1, 2), cases)


def test_ties_registered_in_another_order_on_every_rank() -> None:
    """H11: three tied pairs, five seeds. Right, or refused at set-up; not a hang, and no weights that change places."""
    ((want, _),) = launch(pipeline_cases.tied_in_any_order, 1, None, 0)
    for seed in range(5):
        try:
            ranks = launch(pipeline_cases.tied_in_any_order, 2, sizes(1, 2), seed)
        except DistributedError as error:
            if "order" not in str(error):
                raise
            continue
        for got, difference in ranks:
            assert difference == 0.0
            assert worst({n: got[n] for n in want}, want) <= 1e-9


# -- which goes with which
def test_outputs_meet_their_own_labels() -> None:
    """N20: samples of different lengths, microbatches padded to their own longest."""
    ((want, parameters),) = launch(pipeline_cases.pairs, 1, None)
    assert len(want) == 24
    for layout in (sizes(1, 2, num_microbatches=3), {**LOOPED, "num_microbatches": 4}):
        ranks = launch(pipeline_cases.pairs, 2, layout)
        seen = ranks[0][0]
        assert all(sorted(p) == sorted(want) for p, _ in ranks)  # what the step keeps for itself reaches every stage
        assert all(value == label and length == 2 + label % 5 for value, label, length in seen)
        for _, got in ranks:
            assert worst(got, parameters) <= 1e-9


@pytest.mark.parametrize(("virtual", "microbatches"), [(1, 4), (2, 8), (2, 3)])
def test_only_what_the_next_action_needs_is_waited_for(virtual: int, microbatches: int) -> None:
    """U12: a receive that was posted early holds back nothing; the order is the planned one."""
    for rank in run_distributed(pipeline_cases.waits, 2, virtual, microbatches, timeout=60):
        assert rank
        for waited, runs in rank:
            assert waited == runs


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
def test_combined_loaders(mode: str) -> None:
    ((want, steps),) = launch(pipeline_cases.combined, 1, None, mode)
    for layout in (sizes(1, 2), {**LOOPED, "num_microbatches": 4}):
        for got, count in launch(pipeline_cases.combined, 2, layout, mode):
            assert count == steps
            assert worst(got, want) <= 1e-9


def test_batches_of_a_class_of_the_users_own() -> None:
    ((want, expected),) = launch(pipeline_cases.of_a_class, 1, None)
    for got, predictions in launch(pipeline_cases.of_a_class, 2, sizes(1, 2, num_microbatches=4)):
        assert worst(got, want) <= 1e-9
        assert relative_error(predictions, expected) <= 1e-9


# -- evaluation
def test_evaluation_in_every_way() -> None:
    """Sanity check, validation in a fit, validate, test, predict: loaders, odd batches, limits, modes, results."""
    (want,) = launch(pipeline_cases.evaluated, 1, None)
    assert [len(x) for x in want["shape"]] == [3, 2]
    for layout in (sizes(1, 2), {**LOOPED, "num_microbatches": 3}):
        for got in launch(pipeline_cases.evaluated, 2, layout):
            for kind in ("validations", "validate", "test"):
                assert got[kind] == [pytest.approx(x, rel=1e-9) for x in want[kind]], kind
            for kind in ("shape", "single", "nothing", "steps", "training", "after"):
                assert got[kind] == want[kind], kind
            for kind in ("predictions", "classes"):
                for a, b in zip(got[kind], want[kind], strict=True):
                    assert relative_error(a, b) <= 1e-9
            assert worst(got["parameters"], want["parameters"]) <= 1e-9
            for what, training, gradients, _ in got["modes"]:
                assert (training, gradients) == ((True, True) if what == "train" else (False, False))
