"""A schedule of one's own is read as it was written, and every mistake in it is named with file, line and action."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_3d.errors import ConfigurationError
from lightning_3d.pipeline.check import check
from lightning_3d.pipeline.schedule import NAMES, chain_lists, placement, schedule_lists
from lightning_3d.pipeline.schedule_file import load_schedule, save_schedule

GOOD = """\
# two ranks, 1F1B

rank 1: F0.1 B0.1   # the last one first: ranks may come in any order
  F1.1 B1.1
rank 0: F0.0 F1.0 B0.0 B1.0
"""


@pytest.mark.parametrize("suffix", ["txt", "yaml", "json"])
def test_what_is_saved_is_read(tmp_path: Path, suffix: str) -> None:
    for name, p, m in product(NAMES, (1, 2, 3), (1, 4, 7)):
        v = 2 if name in ("interleaved_1f1b", "zb_v") else 1
        lists = schedule_lists(name, p, m, v)
        found = load_schedule(save_schedule(tmp_path / f"own.{suffix}", lists))
        assert found.lists == lists
        assert (found.stages, found.microbatches, found.owners) == (p, m, placement(name, p, v))
        assert found.peak_live == check(lists, p * v, m).peak_live


def test_a_rank_may_own_nothing(tmp_path: Path) -> None:
    lists = chain_lists([0, 2, 0], 4, 3)
    for suffix in ("txt", "json"):
        found = load_schedule(save_schedule(tmp_path / f"own.{suffix}", lists))
        assert (found.lists, found.stages, found.owners) == (lists, 4, (0, 2, 0))


def test_comments_continued_lines_and_any_order_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text(GOOD)
    assert load_schedule(path).lists == schedule_lists("1f1b", 2, 2)
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"rank 1": ["F0.1", "B0.1"], "rank 0": ["F0.0", "B0.0"]}))
    assert load_schedule(path).lists == schedule_lists("1f1b", 2, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("F1.1 B1.1", "F1.1"), r"own.txt:3: B1.1: .*B1 of stage 1 never runs in the list of rank 1"),
        (("F1.1 B1.1", "F1.1 B1.1 B1.1"), r"own.txt:4: B1.1: .*runs twice"),
        (("F1.1 B1.1", "B1.1 F1.1"), r"own.txt:4: B1.1: .*needs F1 of stage 1; that runs only later"),
        (("F0.1 B0.1", "F0.1 I0.1"), r"own.txt:3: W0.1: .*W0 of stage 1 never runs"),
        (("F0.1 B0.1", "F0.1 W0.1 I0.1"), r"own.txt:3: W0.1: .*needs I0 of stage 1"),
        (("F0.1 B0.1", "F0.1 B0.1 W0.1"), r"own.txt:3: W0.1: .*beside another backward"),
        (("F1.1 B1.1", "F1.1 B1.1 F0.0"), r"own.txt:4: F0.0: .*window 0 on ranks 0 and 1"),
        (("F0.0 F1.0 B0.0", "F0.0 B0.0 F1.0"), None),
        (("F0.1 B0.1", "X0.1 B0.1"), r"own.txt:3: 'X0.1' is no action.*as in F0.0"),
        (("F0.1 B0.1", "wait0.1"), r"own.txt:3: 'wait0.1' is no action"),
        (("F0.1 B0.1", "F0.-1"), r"own.txt:3: 'F0.-1' is no action"),
        (("F0.1 B0.1", "F70000.1 B0.1"), r"own.txt:3: 'F70000.1' makes a step of 70001 microbatches in 2 windows"),
        (("F0.1 B0.1", "F0.999999999 B0.1"), r"own.txt:3: 'F0.999999999' makes a step of 2 microbatches"),
        (("rank 0", "rank 1"), r"own.txt:5: 'rank 1' stands in line 3 already"),
        (("rank 0", "rank 2"), r"no list for rank 0, but for \[1, 2\]"),
        (("rank 0", "stage 0"), r"own.txt:5: 'stage 0' should be 'rank' and a number"),
        (("rank 0:", "rank 0"), r"own.txt:5: 'rank 0 F0.0 F1.0 B0.0 B1.0' is not the beginning"),
        ((GOOD, "  F0.0"), r"own.txt:1: 'F0.0' continues a line, but there is none"),
        ((GOOD, ""), r"no list for rank 0, but for \[\]"),
        ((GOOD, "rank 0:"), r"own.txt has no actions"),
    ],
)
def test_mistakes_name_file_line_and_action(tmp_path: Path, change: tuple[str, str], message: str | None) -> None:
    path = tmp_path / "own.txt"
    assert change[0] in GOOD
    path.write_text(GOOD.replace(*change))
    if message is None:
        load_schedule(path)
        return
    with pytest.raises(ConfigurationError, match=message):
        load_schedule(path)


def test_a_deadlock_is_named(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("rank 0: F0.0 B0.0 F1.0 B1.0\nrank 1: F1.1 B1.1\n  F0.1 B0.1\n")
    with pytest.raises(ConfigurationError, match=r"own.txt:1: B0.0: the schedule deadlocks: .*rank 1 waits at F1 of"):
        load_schedule(path)


def test_mistakes_in_json_have_lines_too(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    text = '{\n "rank 0": ["F0.0",\n  "B0.0"],\n "rank 1": ["F0.1", "B0.1"]\n}'
    path.write_text(text)
    assert load_schedule(path).microbatches == 1
    for old, new, message in (
        ('"B0.0"', '"B1.0"', r"own.json:2: F1.0: .*B1 of stage 0, which needs F1 of stage 0; that runs never"),
        ('"B0.0"', '"C0.0"', r"own.json:3: 'C0.0' is no action"),
        ('"B0.0"', "7", r'must be one object \{"rank 0": \["F0.0"'),
        ('"B0.0"', '"B0.0", "B0.0"', r"own.json:3: B0.0: .*runs twice"),
        ("rank 1", "rank 0", r"own.json:4: 'rank 0' stands in line 2 already"),
        ("]\n}", "]\n", "not valid JSON"),
        (text, "[]", "no list for rank 0"),
        (text, "[1]", "must be one object"),
        (text, '"F0.0"', "must be one object"),
    ):
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises(ConfigurationError, match=message):
            load_schedule(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"own.txt cannot be read: .*No such file"):
        load_schedule(tmp_path / "own.txt")


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet='rank 01:FBIW.\n#{}[]",x', max_size=60), st.sampled_from(["txt", "json"]))
def test_any_text_is_a_schedule_or_a_configuration_error(
    tmp_path_factory: pytest.TempPathFactory, text: str, suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"any.{suffix}"
    path.write_text(text)
    message = str(path)
    try:
        load_schedule(path)
    except ConfigurationError as error:
        message = str(error)
    assert str(path) in message
