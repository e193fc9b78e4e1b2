"""Any batch is cut along its samples, and put together again."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, default_collate

from lightning_3d import ThreeDStrategy
from lightning_3d.errors import PipelineError
from lightning_3d.pipeline import microbatch as microbatch_room
from lightning_3d.pipeline.batch_tree import signature
from lightning_3d.pipeline.merge import merge
from lightning_3d.pipeline.microbatch import split, split_with_sizes
from lightning_3d.pipeline.samples import Memory, batch_size, describe_size
from lightning_3d.testing import full_parameters, preload, relative_error, run_distributed
from tests import models
from tests.strategy.cases import trainer_for

preload("tests.models", "tests.strategy.cases")

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
        (([_x(i + 1, 4) for i in range(6)], _x(6)), 6),  # ragged samples
        ({"seqs": [_x(i + 1, 4) for i in range(6)], "y": _x(6)}, 6),
        ({"seqs": [_x(i + 1, 4) for i in range(6)], "labels": [torch.tensor(i) for i in range(6)], "y": _x(6)}, 6),
        (([_x(i + 1, 4) for i in range(6)], [_x(i + 1) for i in range(6)]), 6),
        # torchvision: target dicts that could be batches, beside the images
        (([_x(3, 8, 4 + i) for i in range(6)], [{"boxes": _x(i, 4), "labels": _x(i)} for i in range(6)]), 6),
        (([_x(3, 8, 8)] * 2, [{"boxes": _x(5, 4), "labels": _x(5)}] * 2), 2),
        (({"x": _x(6, 2), "y": _x(6)}, {"weights": _x(3), "name": "a"}), 6),
        ([{"x": _x(6, 2), "y": _x(6)}, {"none": None, "names": list("abcdef"), "tag": "train"}], 6),
        ([{"x": _x(6, 2), "y": _x(6)}, {"x": _x(6, 2), "y": _x(6)}], 6),  # two loaders
        # stacked images, and as many boxes in each of them
        ((_x(6, 3, 8, 8), [{"boxes": _x(2, 4), "labels": _x(2)} for _ in range(6)]), 6),
        ({"images": _x(6, 3, 8, 8), "targets": tuple({"boxes": _x(2, 4), "labels": _x(2)} for _ in range(6))}, 6),
        ({"x": _x(2, 8), "targets": [(_x(1, 4), _x(1))] * 2}, 2),
        ({"weights": torch.ones(2), "loaders": [{"x": _x(6, 2), "y": _x(6)}] * 2}, 6),
        ({"x": _x(6, 2), "table": _x(1, 4), "y": _x(6)}, 6),
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


def test_ragged_samples_and_targets_stay_together() -> None:
    seqs = [torch.full((i % 3 + 1, 4), float(i)) for i in range(8)]
    for part in split({"seqs": seqs, "y": _x(8)}, 3):
        assert [int(s[0, 0]) for s in part["seqs"]] == part["y"].tolist()
    images = [torch.full((3, 4, 4 + i), i) for i in range(6)]
    targets = [{"boxes": torch.full((i + 1, 4), i), "labels": torch.full((i + 1,), i)} for i in range(6)]
    for pictures, boxes in split((images, targets), 4):
        assert [int(x[0, 0, 0]) for x in pictures] == [int(t["labels"][0]) for t in boxes]


def _two(a: int, b: int) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(a)
    return [{"x": torch.randn(n, 3, generator=g), "y": torch.randn(n, generator=g)} for n in (a, b)]


@pytest.mark.parametrize("shape", ["list", "tuple", "dict", "lists", "unlike"])
@pytest.mark.parametrize(("a", "b", "count"), [(8, 4, 2), (8, 4, 3), (4, 12, 4), (9, 6, 2), (8, 5, 2)])
def test_parts_of_different_sizes_are_cut_in_proportion(shape: str, a: int, b: int, count: int) -> None:
    """What several loaders give: the mean over each part, and over all samples, is the mean of the microbatches'."""
    batch: Any = _two(a, b)
    if shape == "unlike":
        del batch[1]["y"]
        batch[1]["mask"] = torch.ones(b)
    whole = torch.cat([p["x"] for p in batch])
    means = batch[0]["x"].mean() + 2 * batch[1]["x"].mean()
    make = {"tuple": tuple, "lists": lambda z: [list(p.values()) for p in z]}.get(shape, lambda z: z)
    batch = {"a": batch[0], "b": batch[1]} if shape in ("dict", "unlike") else make(batch)
    pieces = (lambda p: list(p.values())) if isinstance(batch, dict) else list
    parts, sizes = split_with_sizes(batch, count)
    assert len(parts) == min(count, batch_size(batch))
    seen = means_seen = all_seen = 0.0
    for part, size in zip(parts, sizes, strict=True):
        xs = [p[0] if isinstance(p, list) else p["x"] for p in pieces(part)]
        weight = size / sum(sizes)
        seen += sum(map(len, xs))
        means_seen += weight * (xs[0].mean() + 2 * xs[1].mean())
        all_seen += weight * torch.cat(xs).mean()
    assert seen == a + b
    torch.testing.assert_close(means_seen, means)
    torch.testing.assert_close(all_seen, whole.mean())
    names = ("'a'", "'b'") if isinstance(batch, dict) else (0, 1)
    assert f"{a} samples in batch[{names[0]}], {b} samples in batch[{names[1]}]" in describe_size(batch)


def test_one_size_is_one_number() -> None:
    assert describe_size(_two(4, 4)) == describe_size({"x": _x(4)}) == "4 samples"
    assert describe_size(_x(1)) == "1 sample"


@pytest.mark.parametrize(
    "batch",
    [
        [_x(8, 3), _x(4, 3)],  # two batches, or two samples
        [_x(i + 1, 4) for i in range(6)],
        [{"x": _x(8, 3)}, {"x": _x(4, 3)}],
        [{"ids": _x(5), "mask": _x(5), "id": 1}, {"ids": _x(7), "mask": _x(7), "id": 2}],
        {"x": _x(8, 3), "table": _x(5)},
        (_x(8, 3), _x(5)),
        (_x(4, 3, 8, 8), _x(9, 6)),  # images, and the boxes of all of them
        {"multi": _two(8, 4)},
    ],
)
def test_what_can_be_read_in_two_ways_is_refused(batch: Any) -> None:
    with pytest.raises(PipelineError, match=r"cannot tell how many samples the batch has: .*batch"):
        split(batch, 2)


def test_what_was_whole_stays_whole() -> None:
    """Five class weights beside 8 samples, and in the last batch beside 5."""
    memory: Memory = {}

    def batch(n: int) -> dict[str, Any]:
        return {"x": _x(n, 2), "y": _x(n), "weights": _x(5), "views": [_x(n, 2), _x(n, 2)], "size": (7, 7)}

    for n in (8, 5, 2, 1, 8):
        parts, _ = split_with_sizes(batch(n), 2, memory)
        for part in parts:
            assert len(part["weights"]) == 5
            assert len(part["views"]) == len(part["size"]) == 2
        assert torch.cat([p["x"] for p in parts]).shape == (n, 2)
        assert torch.cat([p["views"][1] for p in parts]).shape == (n, 2)
    assert split({"x": _x(5), "w": _x(3)} | {"y": _x(5)}, 2)[0]["w"].shape == (3,)


def test_known_tables_have_no_vote() -> None:
    memory: Memory = {}
    batch = {"x": _x(8), "y": _x(8), "z": _x(8), "a": _x(5), "b": _x(5)}
    split_with_sizes(batch, 2, memory)
    less = {"x": _x(3), "a": _x(5), "b": _x(5)}
    assert batch_size(less) == 5
    assert batch_size(less, memory) == 3


def test_a_table_that_was_cut_is_found_out() -> None:
    memory: Memory = {}
    split_with_sizes({"lam": _x(8), "x": _x(8), "y": _x(8)}, 2, memory)
    with pytest.raises(PipelineError, match=r"batch\['lam'\].*earlier steps.*table\[None\]"):
        split_with_sizes({"lam": _x(8), "x": _x(4), "y": _x(4)}, 2, memory)
    memory = {}
    for n in (8, 1, 4):  # the way out, also beside one sample
        for part in split_with_sizes({"lam": _x(1, 8), "x": _x(n), "y": _x(n)}, 2, memory)[0]:
            assert part["lam"].shape == (1, 8)


def test_targets_that_look_like_a_batch_stay_with_their_images() -> None:
    """In the second batch both images have two boxes, so that the targets alone could be batches of two."""
    memory: Memory = {}
    for boxes in ((1, 4), (2, 2)):
        targets = [{"boxes": _x(n, 4), "labels": _x(n)} for n in boxes]
        parts = split_with_sizes(([_x(3, 8, 8), _x(3, 8, 9)], targets), 2, memory)[0]
        assert [(len(i), len(t), len(t[0]["boxes"])) for i, t in parts] == [(1, 1, n) for n in boxes]


def test_targets_stay_with_stacked_images_from_the_first_batch_on() -> None:
    targets = [{"boxes": torch.full((2, 4), i), "labels": torch.full((2,), i)} for i in range(6)]
    for images, part in split((_x(6, 3, 8), targets), 3):
        assert [int(x[0, 0]) for x in images] == [int(t["labels"][0]) for t in part]
        assert all(len(t["boxes"]) == 2 for t in part)


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
        ({"x": _x(4), "graph": Opaque(_x(4))}, "Opaque.*num_microbatches=1"),
        (Opaque(_x(4)), "Opaque.*num_microbatches=1"),
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
    graphs = [Opaque(_x(3)), Opaque(_x(3) + 1), Opaque(_x(4))]
    graphs[2].itself = graphs[2]  # type: ignore[attr-defined]
    assert signature(graphs[0]) == signature(graphs[1]) != signature(graphs[2])


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


# -- in a run: (collate_fn, logits and targets of a batch), equal to one process
class Fit(models.LitMLP):
    case = ""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.case == "loaders":  # the mean over both together, and the second once more
            x, y = (torch.cat([part[k] for part in batch]) for k in "xy")
            logits = self.net(x)
            n = len(batch[0]["x"])
            loss = F.cross_entropy(logits, y) + F.cross_entropy(logits[n:], y[n:])
        elif self.case == "ragged":
            x = torch.stack([s.mean(0) for s in batch["seqs"]])
            loss = F.cross_entropy(self.net(x), batch["y"])
        elif self.case == "whole":
            loss = self.loss(batch) * batch["lam"][0, 3]
        else:
            assert not isinstance(batch[1], dict) or batch[1]["name"] == "a"
            loss = self.loss(batch[0]) * batch[1]["weights"].mean()
        self.log("loss", loss)
        return loss


COLLATE: dict[str, Any] = {
    "loaders": default_collate,
    "ragged": lambda it: {
        "seqs": [s["x"][None] * torch.arange(1.0, 2 + i % 3)[:, None] for i, s in enumerate(it)],
        "y": torch.stack([s["y"] for s in it]),
    },
    "whole": lambda it: default_collate(it) | {"lam": torch.arange(8.0)[None]},
    "meta": lambda it: (default_collate(it), {"weights": torch.arange(3.0), "name": "a"}),
    "notes": lambda it: [default_collate(it), {"weights": torch.ones(3), "name": "a", "names": ["s"] * len(it)}],
}


def _fits(sizes: dict[str, Any] | None) -> list[tuple[dict[str, Tensor], float]]:
    out = []
    for case, collate in COLLATE.items():
        strategy: Any = "auto" if sizes is None else ThreeDStrategy(**sizes)
        trainer = trainer_for(strategy, use_distributed_sampler=False, limit_val_batches=0)
        torch.manual_seed(4)
        module = Fit().double()
        module.case = case
        loader: Any = DataLoader(models.vectors(20), batch_size=8, collate_fn=collate)  # 8, 8 and 4
        if case == "loaders":
            loader = [DataLoader(models.vectors(n), batch_size=b) for n, b in ((20, 8), (12, 4))]  # 8 and 4, 4 and 4
        trainer.fit(module, loader)
        found = dict(module.named_parameters()) if sizes is None else full_parameters(strategy)
        out.append(({n: p.detach().clone() for n, p in found.items()}, float(trainer.callback_metrics["loss"])))
    return out


def test_batches_of_every_form_train_like_one_process() -> None:
    want = run_distributed(_fits, 1, None, init_process_group=False, timeout=120)[0]
    for count in (3, "auto"):
        sizes = {"pipeline_parallel_size": 2, "num_microbatches": count}
        for rank in run_distributed(_fits, 2, sizes, init_process_group=False, timeout=120):
            for case, (parameters, loss), (found, logged) in zip(COLLATE, want, rank, strict=True):
                assert logged == pytest.approx(loss, rel=1e-9), (case, count)
                worst = max(relative_error(found[n], p) for n, p in parameters.items())
                assert worst <= 1e-9, (case, count, worst)


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_the_short_way_cuts_as_the_rules_do(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of tensors alone; also after one in which a tensor was no part of the samples, and where a list is as
    long as the batch."""

    def batch(*sizes: int) -> Any:
        tensors = [torch.arange(2.0 * n).view(n, 2) for n in sizes]
        return dict(zip("abc", tensors, strict=False)) if kind is dict else kind(tensors)

    def cut_all() -> tuple[Memory, list[Any]]:
        memory: Memory = {}
        batches = [batch(8, 8), batch(8, 8, 5), batch(5, 5, 5), batch(3, 3, 3), batch(1, 1)]
        return memory, [split_with_sizes(each, 4, memory) for each in batches]

    memory, short = cut_all()
    monkeypatch.setattr(microbatch_room, "common_size", lambda _: None)
    expected_memory, long = cut_all()
    assert memory == expected_memory
    for (cut, sizes), (expected, expected_sizes) in zip(short, long, strict=True):
        assert sizes == expected_sizes
        assert [signature(x) for x in cut] == [signature(x) for x in expected]
        for a, b in zip(cut, expected, strict=True):
            values = zip(*(x.values() if kind is dict else x for x in (a, b)), strict=True)
            assert all(torch.equal(x, y) for x, y in values)
