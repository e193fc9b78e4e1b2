"""Boxes: every element of a global tensor in exactly one box, whatever the placement and the flat range."""

from __future__ import annotations

import pickle
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_3d.checkpoint import GlobalTensor, boxes_of, flat_boxes
from lightning_3d.tensor import Placement


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_flat_range_is_a_few_rectangles(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    low = data.draw(st.integers(0, whole.numel()))
    high = data.draw(st.integers(low, whole.numel()))
    found = []
    boxes = flat_boxes(shape, low, high)
    for offset, sizes, first in boxes:
        window = whole
        for dim, (start, length) in enumerate(zip(offset, sizes, strict=True)):
            window = window.narrow(dim, start, length)
        assert int(window.reshape(-1)[0]) == first
        found += window.reshape(-1).tolist()
    assert found == list(range(low, high))
    assert len(boxes) <= max(1, 2 * len(shape))


PLACEMENTS = [
    None,
    Placement(0, (6,)),
    Placement(1, (4,)),
    Placement(0, (2, 2, 2)),
    Placement(0, (4, 2)),
    Placement(0, (5,), padding=1),
]


@pytest.mark.parametrize(("placement", "ranks"), list(product(PLACEMENTS, [1, 3])))
def test_shards_of_shards_tile_the_global_tensor(placement: Placement | None, ranks: int) -> None:
    shape = (5, 4) if placement is not None and placement.padding else (6, 4)
    whole, size = torch.arange(float(torch.Size(shape).numel())).view(shape), 2
    assembled, seen = torch.full(shape, -1.0), torch.zeros(shape)
    for tp in range(size if placement is not None else 1):
        local = whole if placement is None else placement.to_local(whole, tp, size)
        flat = local.reshape(-1).clone()
        cuts = [flat.numel() * i // ranks for i in range(ranks + 1)]
        for low, high in pairwise(cuts):
            for offset, data in boxes_of(flat[low:high], local.shape, low, shape, placement, tp, size):
                index = tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))
                assembled[index] = data
                seen[index] += 1
    assert torch.equal(assembled, whole)
    assert bool((seen == 1).all())


def test_boxes_are_views_that_can_be_read_into() -> None:
    flat = torch.zeros(12)
    target = GlobalTensor((6, 4), boxes_of(flat, (3, 4), 0, (6, 4), Placement(0, (6,)), 1, 2), flat.dtype, flat.device)
    for _, data in target.boxes:
        data.fill_(7.0)
    assert flat.tolist() == [7.0] * 12
    assert target.full_tensor()[3:].tolist() == [[7.0] * 4] * 3


def test_a_global_tensor_refuses_to_be_a_tensor() -> None:
    part = GlobalTensor((2,), [((0,), torch.ones(2))], torch.float32, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="full_tensor"):
        part + 1
    with pytest.raises(RuntimeError, match="save_distributed_checkpoint=False"):
        pickle.dumps(part)
    flags = GlobalTensor((2,), [((0,), torch.tensor([True, False]))], torch.bool, torch.device("cpu"))
    assert flags.full_tensor().tolist() == [True, False]
