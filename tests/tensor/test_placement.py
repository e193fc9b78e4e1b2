from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_3d.tensor import NoRule, Placement
from lightning_3d.tensor.placement import view_placement


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], Placement, int]:
    size = draw(st.sampled_from([1, 2, 3, 4]))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    if draw(st.booleans()):
        length = draw(st.integers(1, 13))
        cut = Placement(dim, (length,), -length % size)
    else:
        segments = tuple(size * n for n in draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
        cut = Placement(dim, segments, copies=draw(st.sampled_from([n for n in (1, 2, 4) if size % n == 0])))
    shape[dim] = cut.length
    return tuple(shape), cut, size


@settings(deadline=None, max_examples=150)
@given(cut_tensors())
def test_shards_make_the_whole_again(case: tuple[tuple[int, ...], Placement, int]) -> None:
    shape, cut, size = case
    x = torch.arange(math.prod(shape)).view(shape)
    parts = [cut.to_local(x, rank, size) for rank in range(size)]
    assert all(tuple(p.shape) == cut.local_shape(shape, size) for p in parts)
    assert torch.equal(cut.to_global(parts, size), x)


@settings(deadline=None, max_examples=150)
@given(cut_tensors())
def test_rectangles_cover_every_element_once(case: tuple[tuple[int, ...], Placement, int]) -> None:
    shape, cut, size = case
    x = torch.arange(math.prod(shape)).view(shape)
    seen = torch.full(shape, -1)
    for rank in range(size):
        shard = cut.to_local(x, rank, size)
        for at_global, at_local, sizes in cut.rectangles(shape, rank, size):
            box = tuple(slice(a, a + n) for a, n in zip(at_global, sizes, strict=True))
            assert rank % cut.copies or (seen[box] == -1).all(), "two rectangles overlap"
            seen[box] = shard[tuple(slice(a, a + n) for a, n in zip(at_local, sizes, strict=True))]
    assert torch.equal(seen, x)


def test_rectangles_of_padding_are_empty() -> None:
    cut = Placement(0, (5,), 3)  # 8 rows over 4 ranks: rank 2 has one real row, rank 3 none
    assert cut.rectangles((5, 2), 2, 4) == [((4, 0), (0, 0), (1, 2))]
    assert cut.rectangles((5, 2), 3, 4) == []


def test_a_fused_projection_is_three_rectangles() -> None:
    cut = Placement(0, (8, 4, 4))
    assert cut.rectangles((16, 3), 1, 2) == [
        ((4, 0), (0, 0), (4, 3)),
        ((10, 0), (4, 0), (2, 3)),
        ((14, 0), (6, 0), (2, 3)),
    ]


@pytest.mark.parametrize(
    ("old", "cut", "new", "size", "want"),
    [
        ((2, 5, 32), Placement(2, (32,)), (2, 5, 4, 8), 2, Placement(2, (4,))),
        ((2, 5, 4, 8), Placement(2, (4,)), (2, 5, 32), 4, Placement(2, (32,))),
        ((2, 5, 96), Placement(2, (32, 32, 32)), (2, 5, 3, 4, 8), 2, Placement(3, (4,))),
        ((2, 5, 96), Placement(2, (96,)), (2, 5, 4, 3, 8), 2, Placement(2, (4,))),
        ((2, 4, 5, 8), Placement(1, (4,)), (8, 5, 8), 2, Placement(0, (4, 4))),
        ((2, 5, 101), Placement(2, (101,), 1), (10, 101), 2, Placement(1, (101,), 1)),
    ],
)
def test_the_cut_follows_a_view(
    old: tuple[int, ...], cut: Placement, new: tuple[int, ...], size: int, want: Placement
) -> None:
    assert view_placement(old, cut, new, size) == want


def test_a_view_that_splits_chunks_is_refused_with_a_better_segmentation() -> None:
    with pytest.raises(NoRule, match="whole chunks") as info:
        view_placement((2, 5, 96), Placement(2, (96,)), (2, 5, 3, 4, 8), 2)
    assert (32, 32, 32) in info.value.hints
    with pytest.raises(NoRule, match=r"7 is not divisible by 2"):
        view_placement((2, 5, 56), Placement(2, (56,)), (2, 5, 7, 8), 2)


def test_sequence_axis_survives_a_view() -> None:
    cut = view_placement((2, 8, 6), Placement(1, (8,), axis="sequence"), (16, 6), 2)
    assert cut == Placement(0, (8, 8), axis="sequence")
