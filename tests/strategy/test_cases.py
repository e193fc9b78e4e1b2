"""Public bug reports of other systems as tests (E4, E5, E9, N5, N16, C1, C2, C4-C6, T1, T2, D1, D4, D6, L4, L7, S6)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_3d.testing import preload, relative_error, run_distributed
from tests.strategy.cases import (
    Grouped,
    built_on_meta,
    clipped,
    groups_and_file,
    metrics,
    sample_ids,
    ten_steps,
    two_models,
)

preload("tests.models", "tests.strategy.cases")


def sizes(tp: int = 1, pp: int = 1, **more: Any) -> dict[str, Any]:
    return {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, **more}


def launch(function: Any, world: int, *args: Any) -> list[Any]:
    return run_distributed(function, world, *args, init_process_group=False, timeout=120)


def test_replicas_and_ties_are_bit_equal_after_ten_steps_whatever_the_seeds() -> None:
    """E5, N16, T1: norms and biases that stay whole, tied embeddings on two stages, replicas."""
    cases = [(m, s) for m in ("mlp", "gpt_tied") for s in (sizes(2), sizes(1, 2), sizes(2, 2), sizes(1, 1))]
    for rank in launch(ten_steps, 4, cases):
        for case, (difference, bad) in zip(cases, rank, strict=True):
            assert (difference, bad) == (0.0, 0.0), case


def test_a_tie_survives_the_meta_device() -> None:
    """E9, T2: one parameter after set-up and three steps, in every layout; the first loss is about ln(vocabulary)."""
    layouts = [sizes(2), sizes(1, 2), sizes(2, 2), sizes(1, 1), sizes(2, zero_stage=3, bucket_size_mb=0.002)]
    for rank in launch(built_on_meta, 4, layouts):
        for layout, (tied, difference, loss) in zip(layouts, rank, strict=True):
            assert tied, layout
            assert difference == 0.0, layout
            assert 3.0 < loss < 30.0, layout


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_one_clipping_norm_over_the_mesh(algorithm: str) -> None:
    """E4, C1, C2, C4, C5, C6: the tie and the replicated weights are counted once, all stages and shards are seen."""
    ((want_norm, want),) = launch(clipped, 1, [(None, algorithm)])[0]
    layouts = [
        sizes(2), sizes(1, 2), sizes(2, 2), sizes(1, 1), sizes(2, 1, zero_stage=0), sizes(1, 2, zero_stage=0),
        sizes(2, sequence_parallel=True), sizes(zero_stage=2), sizes(2, zero_stage=3), sizes(1, 2, zero_stage=3),
    ]  # fmt: skip
    for rank in launch(clipped, 4, [(layout, algorithm) for layout in layouts]):
        for layout, (norm, got) in zip(layouts, rank, strict=True):
            assert norm == pytest.approx(want_norm, rel=1e-9), layout
            wrong = {n: relative_error(got[n], p) for n, p in want.items() if not relative_error(got[n], p) <= 1e-9}
            assert not wrong, layout


KINDS = ["plain", "shuffled", "own_sampler", "batch_sampler", "stream"]


@pytest.mark.parametrize("layout", [sizes(2), sizes(1, 2)], ids=["tp2-dp2", "pp2-dp2"])
def test_samples_are_equal_in_a_replica_and_disjoint_between_replicas(layout: dict[str, Any]) -> None:
    """D1: each rank records the ids it was given."""
    ranks = launch(sample_ids, 4, layout, KINDS)
    for index, kind in enumerate(KINDS):
        (a, steps), b, c, d = ranks[0][index], *(r[index][0] for r in ranks[1:])
        assert a == b, kind
        assert c == d, kind
        assert sorted(a + c) == list(range(16)), kind
        # Lightning rebuilds a BatchSampler around a plain list with batches of one, under DDP too
        assert steps == (8 if kind == "batch_sampler" else 4), kind


@pytest.mark.parametrize("layout", [sizes(2), sizes(1, 2)], ids=["tp2", "pp2"])
def test_one_replica_reads_the_loader_as_it_is(layout: dict[str, Any]) -> None:
    """D4: the order of an unshuffled loader is kept; a shuffled one gives all ranks the same order."""
    first, second = launch(sample_ids, 2, layout, ["plain", "shuffled", "own_sampler"])
    assert first == second
    assert first[0][0] == list(range(16))
    assert sorted(first[1][0]) == list(range(16))
    assert first[1][0] != list(range(16))


def test_metrics_count_every_sample_once() -> None:
    """D6: sums, means with unequal batches, maxima and a torchmetrics accuracy."""
    want = launch(metrics, 1, None)[0]
    for layout, world in ((sizes(1), 2), (sizes(2), 2), (sizes(1, 2), 2), (sizes(2, 2), 4), (sizes(2), 4)):
        expected = dict(want)
        dp = world // (layout["tensor_parallel_size"] * layout["pipeline_parallel_size"])
        if dp > 1:  # not linear in the samples: the mean over replicas, as with DDP
            expected.pop("perplexity")
        for rank in launch(metrics, world, layout):
            assert {k: rank[k] for k in expected} == pytest.approx(expected, rel=1e-9), layout


def test_groups_by_dims_and_shapes_on_disk(tmp_path: Any) -> None:
    """L4, L7: the same names in the same groups; the padded vocabulary has its own shape in the file."""
    want = [[n for n, p in Grouped().named_parameters() if (p.ndim >= 2) == matrix] for matrix in (True, False)]
    for index, layout in enumerate((sizes(2), sizes(1, 2), sizes(2, zero_stage=0), sizes(zero_stage=3))):
        folder = tmp_path / str(index)
        folder.mkdir()
        for names in launch(groups_and_file, 2, layout, str(folder)):
            assert names == want, layout
        path = folder / "plain.ckpt"
        module = Grouped().double()
        module.load_state_dict(torch.load(path, weights_only=True)["state_dict"], strict=True)
        assert module.wte.weight.shape == (101, 16)


def test_two_fits_in_one_process_do_not_share_state() -> None:
    """S6: other head counts and layouts one after the other."""
    alone = [launch(two_models, 1, [(heads, 1, 1)])[0][0] for heads in (4, 2)]
    for losses in launch(two_models, 2, [(4, 2, 1), (2, 2, 1), (2, 1, 2), (4, 2, 1)]):
        assert losses == pytest.approx([alone[0], alone[1], alone[1], alone[0]], rel=1e-9)
