"""Loss, every gradient and parameters after several steps against one process, for every layout of 2, 4 and 8 ranks.

Every layout is one launch with several cases; which microbatch counts and accumulations a layout gets rotates, so that
together every combination is covered. `make test-all` runs the full product.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest

from lightning_3d.testing import preload, run_distributed
from tests.strategy.fits import Case, differences, on_layout, one_process, with_a_dropped_collective

preload("transformers", "tests.models", "tests.strategy.fits")

MODELS = ["mlp", "gpt", "gpt_tied", "llama", "gpt2"]
MICROBATCHES: list[int | str] = [1, 2, 4, 5, "auto"]


def layouts(world: int) -> list[tuple[int, int, int]]:
    sizes = [1, 2, 4, 8]
    return [(tp, pp, dp) for tp, pp, dp in product(sizes, sizes, sizes) if tp * pp * dp == world]


def case_for(model: str, layout: tuple[int, int, int], accumulate: int, microbatches: int | str) -> Case:
    dp = layout[2]
    # uneven for 5 microbatches and for replicas whose samples have unequal numbers of targets
    samples = 10 * dp if microbatches == 5 else 8 * dp if dp > 2 else 16
    pp = layout[1]
    strategy = {"num_microbatches": microbatches} if pp > 1 else {}
    count = 4 * pp if microbatches == "auto" else int(microbatches)
    if 8 in (layout[0], pp):  # more heads and blocks
        model += "_8"
    return Case(
        model=model, accumulate=accumulate, samples=samples, steps=2, strategy=strategy,
        parts=(dp, count if pp > 1 else 1),
    )  # fmt: skip


@cache
def alone(key: tuple[Any, ...]) -> dict[str, Any]:
    case = Case(**dict(key))
    return run_distributed(one_process, 1, [case], init_process_group=False, timeout=120)[0][0]


def reference(case: Case) -> dict[str, Any]:
    values = {k: v for k, v in vars(case).items() if k != "strategy"}
    return alone(tuple(sorted(values.items())))


def check(layout: tuple[int, int, int], cases: list[Case], timeout: float = 240) -> None:
    tp, pp, dp = layout
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    ranks = run_distributed(
        on_layout, tp * pp * dp, cases, sizes, tp * pp * dp, init_process_group=False, timeout=timeout
    )
    for index, case in enumerate(cases):
        want = reference(case)
        for rank in (0, tp * pp * dp - 1):
            got = ranks[rank][index]
            wrong = {name: error for name, error in differences(got, want).items() if not error <= 1e-9}
            assert not wrong, (case, rank, dict(list(wrong.items())[:3]))
            assert got["replicas"] == 0.0, case
            assert got["rates"] == want["rates"]
        # the loss: the mean over replicas, and what was logged with sync_dist, on every rank
        replicas = [ranks[r][index]["losses"] for r in range(0, tp * pp * dp, tp * pp)]
        mean = [sum(column) / dp for column in zip(*replicas, strict=True)]
        assert mean == pytest.approx(want["losses"], rel=1e-9)
        for rank in ranks:
            assert rank[index]["metrics"] == pytest.approx(want["metrics"], rel=1e-9)


EVERY = [*layouts(2), *layouts(4), *layouts(8)]
QUICK = {*layouts(2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)}
"""Every axis alone and each pair; the others have as many ranks, and nothing else that is new."""
LONG = {(8, 1, 1), (1, 8, 1)}
"""Of these only some models at once: `test_every_combination` has all."""


@pytest.mark.parametrize(
    "layout",
    [pytest.param(s, marks=() if s in QUICK else pytest.mark.slow) for s in EVERY],
    ids=lambda s: "tp{}-pp{}-dp{}".format(*s),
)
def test_layout(layout: tuple[int, int, int]) -> None:
    every = EVERY
    turn = every.index(layout)
    cases = []
    for index, model in enumerate(MODELS):
        if layout in LONG and model in ("gpt", "mlp"):
            continue
        accumulate = 3 if (turn + index) % 3 == 0 else 1
        microbatches = MICROBATCHES[(turn + index) % len(MICROBATCHES)]
        cases.append(case_for(model, layout, accumulate, microbatches))
    check(layout, cases)


@pytest.mark.parametrize("axis", ["tp", "pp", "dp"])
def test_a_dropped_collective_is_seen(axis: str) -> None:
    """The parity test can fail: one all-reduce (or reduction) of an axis is left out."""
    layout = {"tp": (2, 1, 1), "pp": (1, 2, 1), "dp": (1, 1, 2)}[axis]
    case = Case(model="gpt_tied", samples=8, steps=1)
    tp, pp, _dp = layout
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    got = run_distributed(with_a_dropped_collective, 2, axis, case, sizes, init_process_group=False, timeout=60)[0]
    assert max(differences(got, reference(case)).values()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("layout", "microbatches"),
    [
        pytest.param(layout, count, id="tp{}-pp{}-dp{}-{}".format(*layout, count))
        for layout in [*layouts(2), *layouts(4), *layouts(8)]
        for count in (MICROBATCHES if layout[1] > 1 else ["auto"])
    ],
)
def test_every_combination(layout: tuple[int, int, int], microbatches: int | str, accumulate: int) -> None:
    check(layout, [case_for(model, layout, accumulate, microbatches) for model in MODELS], timeout=400)


def test_five_adamw_steps_with_clipping_validation_and_a_scheduler() -> None:
    cases = [
        Case(
            model=model, steps=5, samples=16, clip=0.3, optimizer="adamw", validate=True, accumulate=accumulate,
            parts=(2, 8),
        )
        for model, accumulate in (("gpt_tied", 1), ("llama", 2))
    ]  # fmt: skip
    check((2, 2, 2), cases)


@pytest.mark.parametrize(
    ("layout", "steps"),
    [((4, 1, 1), 5), ((4, 1, 2), 3), pytest.param((4, 2, 1), 3, marks=pytest.mark.slow)],
    ids=["tp4", "tp4 x dp2", "tp4 x pp2"],
)
def test_key_value_heads_that_ranks_share(layout: tuple[int, int, int], steps: int) -> None:
    """Two heads on four ranks, also fused with the queries: counted once in the norm, and the copies stay bit-equal."""
    dp, pp = layout[2], layout[1]
    cases = [
        Case(
            model=model, steps=steps, samples=16, clip=0.3, optimizer="adamw", parts=(dp, 8 if pp > 1 else 1),
            strategy={"zero_stage": 2} if dp > 1 and model == "phi3" else {},
        )
        for model in ("llama", "phi3")[: 1 + (dp * pp > 1)]
    ]  # fmt: skip
    check(layout, cases)
