"""The ledger against the formulas: what a step of each kind of parallelism communicates, exactly."""

from __future__ import annotations

from typing import Any

from lightning_3d.testing import preload, run_distributed
from tests.strategy.ledgers import DIM, LENGTH, SAMPLES, count_all

preload("tests.models", "tests.strategy.ledgers")
DOUBLE = 8
ACTIVATION = SAMPLES * LENGTH * DIM
"""Elements of one hidden state: batch x sequence x hidden."""


def launch(world: int, cases: list[tuple[dict[str, Any], int]]) -> list[list[dict[str, Any]]]:
    return run_distributed(count_all, world, cases, init_process_group=False, timeout=120)


def select(
    counted: dict[str, Any], axis: str, op: str | None = None, phase: str | None = None
) -> tuple[int, int, int, float]:
    found = [
        t for (p, a, o), t in counted["traffic"].items()
        if a == axis and (op is None or o == op) and (phase is None or p == phase)
    ]  # fmt: skip
    return tuple(sum(column) for column in zip(*found, strict=True)) if found else (0, 0, 0, 0.0)  # type: ignore[return-value]


def test_tensor_parallel_all_reduces() -> None:
    """Per block 2 forward and 2 backward of batch x sequence x hidden; besides, the embedding, the head, the loss."""
    cases = [({"tensor_parallel_size": 2}, depth) for depth in (2, 4)]
    for two, four in launch(2, cases):
        for counted, depth in ((two, 2), (four, 4)):
            tokens = SAMPLES * LENGTH
            calls, elements, payload, wire = select(counted, "tp", "all_reduce", "forward")
            # embedding, 2 per block; the loss reduces the maximum, and the sum and the target's logit together
            assert calls == 1 + 2 * depth + 2
            assert elements == (1 + 2 * depth) * ACTIVATION + 3 * tokens
            assert payload == elements * DOUBLE
            assert wire == payload * 2 * (2 - 1) / 2
            calls, elements, _, _ = select(counted, "tp", "all_reduce", "backward")
            assert (calls, elements) == (2 * depth + 1, (2 * depth + 1) * ACTIVATION)  # and the head's input
            assert select(counted, "tp")[0] == (1 + 2 * depth + 2) + (2 * depth + 1)
        difference = [b - a for a, b in zip(select(two, "tp"), select(four, "tp"), strict=True)]
        assert difference[:2] == [2 * 4, 2 * 4 * ACTIVATION]


def test_pipeline_messages() -> None:
    """Only the hidden state crosses the border: once per microbatch each way. The tie is summed once per step."""
    ranks = launch(2, [({"pipeline_parallel_size": 2, "num_microbatches": 4}, 4)])
    last, first = ranks[0][0], ranks[1][0]  # global rank 0 is the last stage
    for counted in (first, last):
        assert select(counted, "pp", "send")[:3] == (4, ACTIVATION, ACTIVATION * DOUBLE)
        assert select(counted, "pp", "recv")[:3] == (4, ACTIVATION, ACTIVATION * DOUBLE)
    tied = 101 * DIM
    for counted in (first, last):
        calls, elements, _, _ = select(counted, "pp", "all_reduce")
        # the gradient of the tied embedding, and a byte each that says whether it and its bucket were used
        assert calls == 2
        assert elements == tied + 2
        assert {a for _, a, _ in counted["traffic"]} <= {"pp", "control", "replica"}


def test_data_parallel_traffic() -> None:
    """Once per optimizer step, 2 (n-1)/n of the parameters' bytes, in every ZeRO stage."""
    for n in (2, 4):
        for zero, sharded in launch(n, [({"zero_stage": 0}, 4), ({"zero_stage": 1}, 4)]):
            for counted in (zero, sharded):
                assert 0 <= counted["padded"] - counted["parameters"] < 16 * n * counted["buckets"]
            assert select(zero, "dp", "all_reduce")[1] == zero["padded"]
            assert select(zero, "dp")[3] == 2 * (n - 1) / n * zero["padded"] * DOUBLE
            assert select(sharded, "dp", "reduce_scatter")[1] == sharded["padded"]
            assert select(sharded, "dp", "all_gather")[1] == sharded["padded"]
            assert select(sharded, "dp")[3] == 2 * (n - 1) / n * sharded["padded"] * DOUBLE
            assert select(sharded, "dp", "all_gather", "optimizer")[0] == sharded["buckets"]


def test_stage_three_gathers_blocks_twice() -> None:
    """All parameters for the forward, all blocks but the last (it is still there) for the backward; reduced once."""
    for n in (2, 4):
        for (counted,) in launch(n, [({"zero_stage": 3}, 4)]):
            padded, again = counted["padded"], counted["again"]
            assert 0 < again < padded
            assert select(counted, "dp", "reduce_scatter")[1] == padded
            assert select(counted, "dp", "all_gather", "gather")[1] == padded + again
            assert select(counted, "dp")[3] == (n - 1) / n * (2 * padded + again) * DOUBLE


def test_axes_do_not_disturb_each_other() -> None:
    """In a mesh of all three, each axis carries what it carries alone (activations of one replica's samples)."""
    layout = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2}
    ranks = launch(8, [(layout, 4)])
    total = [sum(column) for column in zip(*(select(r[0], "tp", "all_reduce") for r in ranks[:4]), strict=True)]
    tokens = SAMPLES * LENGTH
    # summed over the two stages and two peers: 4 blocks of 4, embedding, head, loss; calls once per microbatch
    assert total[0] == 2 * 2 * (4 * 4 + 1 + 1 + 2)
    assert total[1] == 2 * ((4 * 4 + 2) * ACTIVATION + 3 * tokens)
    for rank in ranks:
        counted = rank[0]
        assert select(counted, "dp")[3] == 2 * (2 - 1) / 2 * counted["padded"] * DOUBLE
        assert select(counted, "pp", "send")[:2] == (2, ACTIVATION)
