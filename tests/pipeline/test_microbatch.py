"""Any batch is cut along its samples, and put together again."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lightning_3d.errors import PipelineError
from lightning_3d.pipeline.microbatch import batch_size, merge, signature, split, split_with_sizes

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Data:
    x: Tensor
    note: str
    nothing: None = None


class Encoding(UserDict):
    """Like transformers.BatchEncoding."""


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def _x(n: int, *shape: int) -> Tensor:
    return torch.arange(n).view(n, *[1] * len(shape)).expand(n, *shape).clone()


def test_sizes_differ_by_at_most_one_and_keep_the_order() -> None:
    for n in range(1, 14):
        for count in range(1, 9):
            parts, sizes = split_with_sizes(_x(n), count)
            assert len(parts) == min(n, count)
            assert [len(p) for p in parts] == sizes
            assert max(sizes) - min(sizes) <= 1
            assert torch.cat(parts).tolist() == list(range(n))


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (_x(6), 6),
        ([_x(2, 3), _x(2)], 2),  # a list of two tensors of two samples is no list of samples
        ((_x(6, 3), _x(6)), 6),
        ({"ids": _x(6, 3), "weights": _x(4), "texts": list("abcdef"), "n": 7, "no": None}, 6),
        ((_x(3, 2), _x(3), _x(5)), 3),  # a table besides the samples
        (Pair(_x(6, 3), _x(6)), 6),
        (Data(_x(6), "all"), 6),
        (Encoding(ids=_x(6, 2), mask=_x(6, 2)), 6),
        (OrderedDict(x=_x(6)), 6),
        ([_x(6, 3, 8, 8), _x(6, 3, 4, 4)], 6),  # views of the same samples, of different sizes
        (([_x(6, 3, 8, 8), _x(6, 3, 4, 4)], _x(6)), 6),
        ((tuple(_x(3, 8, 4 + i) for i in range(6)), tuple({"boxes": _x(i + 1, 4), "id": i} for i in range(6))), 6),
        ([(_x(3, 4, 4), i) for i in range(6)], 6),
        ([{"x": _x(3), "label": torch.tensor(i)} for i in range(6)], 6),
        ([_x(i + 1, 4) for i in range(6)], 6),  # ragged samples
        (([_x(3, 8, 8) for _ in range(6)], _x(6)), 6),
        (list("abcdef"), 6),
        ({"image": np.zeros((6, 2)), "size": (224, 224)}, 6),
        ([Opaque(_x(3)) for _ in range(6)], 6),
    ],
)
def test_batch_size(batch: Any, size: int) -> None:
    assert batch_size(batch) == size
    parts, sizes = split_with_sizes(batch, 4)
    assert len(parts) == min(4, size)
    assert sum(sizes) == size
    for part, n in zip(parts, sizes, strict=True):
        assert batch_size(part) in (n, size) or n == 1
        assert type(part) is type(batch)


def test_labels_stay_with_their_samples() -> None:
    """Case N20: every part pairs each sample with its own label."""
    n = 7
    batch = {
        "x": _x(n, 3),
        "y": _x(n),
        "names": [str(i) for i in range(n)],
        "images": tuple(torch.full((3, i + 1, 2), i) for i in range(n)),
        "targets": tuple({"id": i, "boxes": torch.full((i, 4), i)} for i in range(n)),
        "nested": {"array": np.arange(n)},
        "table": torch.ones(4, 2),
    }
    seen = []
    for part in split(batch, 3):
        ids = part["y"].tolist()
        assert part["x"][:, 0].tolist() == ids
        assert [int(s) for s in part["names"]] == ids
        assert [int(i[0, 0, 0]) for i in part["images"]] == ids
        assert [t["id"] for t in part["targets"]] == ids
        assert part["nested"]["array"].tolist() == ids
        assert part["table"].shape == (4, 2)
        seen += ids
    assert seen == list(range(n))


def test_structures_keep_their_class() -> None:
    part = split({"e": Encoding(ids=_x(4)), "d": Data(_x(4), "note"), "p": Pair(_x(4), None)}, 2)[1]
    assert type(part["e"]) is Encoding
    assert part["e"]["ids"].tolist() == [2, 3]
    assert part["d"] == Data(part["d"].x, "note")
    assert part["p"].x.tolist() == [2, 3]
    original = Encoding(ids=_x(4))
    split(original, 2)
    assert len(original["ids"]) == 4


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (None, "batch dim"),
        ({"n": 3}, "batch dim"),
        ({"x": _x(4), "graph": Opaque(_x(4))}, "Opaque"),
        (pack_sequence([_x(3), _x(2)]), "PackedSequence"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch: Any, words: str) -> None:
    with pytest.raises(PipelineError, match=words):
        split(batch, 2)


def test_signature_is_shape_not_content() -> None:
    assert signature({"x": _x(3), "t": ["a"]}) == signature({"x": _x(3) + 1, "t": ["b"]})
    assert signature({"x": _x(3)}) != signature({"x": _x(4)})
    assert signature({"x": _x(3)}) != signature({"x": _x(3).double()})
    assert signature((_x(3), True)) != signature((_x(3), False))
    assert signature((_x(3), 1.0)) == signature((_x(3), 2.0))
    assert signature([_x(3)]) != signature((_x(3),))
    hash(signature({"x": [Pair(_x(2), None), np.zeros(3)]}))


def test_outputs_are_merged() -> None:
    sizes, weights = [2, 1], [2 / 3, 1 / 3]
    outs = [
        {"loss": torch.tensor(3.0), "logits": _x(2, 5), "ids": ["a", "b"], "acc": 0.5, "n": 7, "odd": _x(4)},
        {"loss": torch.tensor(6.0), "logits": _x(1, 5), "ids": ["c"], "acc": 2.0, "n": 7, "odd": _x(4)},
    ]
    merged = merge(outs, sizes, weights)
    assert merged["loss"].item() == pytest.approx(4.0)
    assert merged["logits"].shape == (3, 5)
    assert merged["ids"] == ["a", "b", "c"]
    assert merged["acc"] == pytest.approx(1.0)
    assert merged["n"] == 7
    assert [tuple(x.shape) for x in merged["odd"]] == [(4,), (4,)]
    assert merge([None, None], sizes, weights) is None
    assert merge([_x(2), _x(1)], sizes, weights).shape == (3,)
    tuples = merge([(_x(2), _x(2)), (_x(1), _x(1))], sizes, weights)
    assert [x.shape for x in tuples] == [(3,), (3,)]
    assert merge([torch.tensor(2), torch.tensor(5)], sizes, weights).item() == pytest.approx(3.0)
    samples = merge([[{"a": 1}, {"a": 2}], [{"a": 3}]], sizes, weights)
    assert samples == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_cutting_and_merging_gives_the_batch_back() -> None:
    batch = {"x": torch.randn(7, 3), "pair": (torch.randn(7), torch.randn(7, 2)), "names": [f"{i}" for i in range(7)]}
    parts, sizes = split_with_sizes(batch, 3)
    again = merge(parts, sizes, [s / 7 for s in sizes])
    assert torch.equal(again["x"], batch["x"])
    assert torch.equal(again["pair"][1], batch["pair"][1])
    assert again["names"] == batch["names"]
