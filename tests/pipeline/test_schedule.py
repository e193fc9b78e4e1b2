"""Every schedule is complete, ordered, free of deadlock, and holds as many microbatches as theory says."""

from __future__ import annotations

from itertools import product

import pytest

from lightning_3d.errors import ConfigurationError
from lightning_3d.pipeline.check import check
from lightning_3d.pipeline.schedule import SCHEDULES, Action, forward_only, schedule_named

SIZES = list(product(range(1, 17), range(1, 17)))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_all_sizes(name: str) -> None:
    for p, m in SIZES:
        report = check([SCHEDULES[name](p, m, rank) for rank in range(p)], p, m)
        live = {"gpipe": lambda s, m=m: m, "1f1b": lambda s, p=p, m=m: min(p - s, m)}[name]
        assert report.peak_live == tuple(live(s) for s in range(p)), (name, p, m)
        assert len(report.order) == 2 * p * m


def test_backwards_run_in_order_of_microbatches() -> None:
    """So that gradients are added in the same order on every stage (and bit-equal for shared parameters)."""
    for name, (p, m) in product(SCHEDULES, SIZES):
        for rank in range(p):
            actions = SCHEDULES[name](p, m, rank)
            for kind in "FB":
                assert [a.microbatch for a in actions if a.kind == kind] == list(range(m))


@pytest.mark.parametrize("owners", [[0], [0, 1], [0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 0, 1, 2, 0], [0, 2], [1, 0, 1]])
def test_evaluation_chains(owners: list[int]) -> None:
    ranks = max(owners) + 1
    for m in range(1, 17):
        report = check([forward_only(owners, m, r) for r in range(ranks)], len(owners), m, backward=False)
        assert len(report.order) == m * len(owners)


def test_wrong_schedules_are_refused() -> None:
    good = [SCHEDULES["1f1b"](2, 3, rank) for rank in range(2)]
    with pytest.raises(ConfigurationError, match="never runs"):
        check([good[0][:-1], good[1]], 2, 3)
    with pytest.raises(ConfigurationError, match="runs twice"):
        check([good[0] + good[0][-1:], good[1]], 2, 3)
    with pytest.raises(ConfigurationError, match="does not belong"):
        check([[*good[0], Action("F", 9, 0)], good[1]], 2, 3)
    with pytest.raises(ConfigurationError, match="on ranks 0 and 1"):
        check([good[0][:-1], [*good[1], good[0][-1]]], 2, 3)
    backward_first = [a for a in good[0] if a.kind == "B"] + [a for a in good[0] if a.kind == "F"]
    with pytest.raises(ConfigurationError, match=r"deadlocks: rank 0 waits at B0 of stage 0"):
        check([backward_first, good[1]], 2, 3)


def test_unknown_name() -> None:
    with pytest.raises(ConfigurationError, match="'gpipe'"):
        schedule_named("gpip")
