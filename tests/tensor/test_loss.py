from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.tensor import (
    Placement,
    ShardedTensor,
    TensorGroup,
    ThreadCommunicator,
    VocabParallelEmbedding,
    run_simulated,
    vocab_parallel_cross_entropy,
)
from lightning_3d.testing import relative_error

OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"ignore_index": 3},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": 2, "label_smoothing": 0.2, "reduction": "sum"},
    {"weight": True},
    {"weight": True, "label_smoothing": 0.3, "ignore_index": 1},
    {"weight": True, "reduction": "none", "label_smoothing": 0.1},
]


def case(vocabulary: int, form: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    shape = {"rows": (7, vocabulary), "images": (3, vocabulary, 4), "one": (vocabulary,)}[form]
    target_shape = {"rows": (7,), "images": (3, 4), "one": ()}[form]
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 3
    target = torch.randint(0, vocabulary, target_shape, generator=generator)
    target.view(-1)[0] = vocabulary - 1  # the last row that is not padding
    return x, target


@pytest.mark.parametrize("form", ["rows", "images", "one"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("vocabulary", [12, 13, 5])
def test_equals_cross_entropy(vocabulary: int, size: int, form: str) -> None:
    x, target = case(vocabulary, form)
    cut = Placement(0 if form == "one" else 1, (vocabulary,), -vocabulary % size)
    weight = torch.rand(vocabulary, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for options in [{**o, "weight": weight} if "weight" in o else o for o in OPTIONS]:
        original = x.clone().requires_grad_()
        want = F.cross_entropy(original, target, **options)
        want.sum().backward()

        def body(comm: ThreadCommunicator, options: dict[str, Any] = options) -> Any:
            leaf = cut.to_local(x, comm.rank, size).clone().requires_grad_()
            logits = ShardedTensor(leaf, cut, TensorGroup(comm))
            loss = F.cross_entropy(logits, target, **options)
            loss.sum().backward()
            again = vocab_parallel_cross_entropy(logits, target, **options)
            assert torch.equal(loss, again)
            return loss.detach(), leaf.grad, comm.ledger.total()

        ranks = run_simulated(size, body)
        gradient = torch.cat([r[1] for r in ranks], cut.dim)
        assert relative_error(gradient.narrow(cut.dim, 0, vocabulary), original.grad) < 1e-12
        assert not gradient.narrow(cut.dim, vocabulary, cut.padding).any(), "padding rows got a gradient"
        for loss, _, traffic in ranks:
            assert relative_error(loss, want) < 1e-12
            assert traffic.calls == 4  # two per call


def test_probabilities_gather() -> None:
    x, _ = case(12, "rows")
    soft = torch.softmax(torch.randn(7, 12, dtype=torch.float64), 1)
    forms: list[Any] = [
        lambda logits: F.cross_entropy(logits, soft),
        lambda logits: vocab_parallel_cross_entropy(logits, soft),
    ]
    for form in forms:
        original = x.clone().requires_grad_()
        want = form(original)
        want.backward()

        def body(comm: ThreadCommunicator, form: Any = form) -> Any:
            leaf = x.chunk(2, 1)[comm.rank].clone().requires_grad_()
            loss = form(ShardedTensor(leaf, Placement(1, (12,)), TensorGroup(comm)))
            loss.backward()
            return loss.detach(), leaf.grad

        quiet = form is forms[1]  # the public function gathers on purpose
        with nullcontext() if quiet else pytest.warns(UserWarning, match="no tensor-parallel form"):
            ranks = run_simulated(2, body)
        assert all(relative_error(loss, want) < 1e-12 for loss, _ in ranks)
        assert relative_error(torch.cat([g for _, g in ranks], 1), original.grad) < 1e-12


@pytest.mark.parametrize("autocast", [False, True])
def test_dtype_of_the_loss(autocast: bool) -> None:
    x, target = (t.bfloat16() if t.is_floating_point() else t for t in case(13, "rows"))
    cut = Placement(1, (13,), 1)

    def body(comm: ThreadCommunicator) -> Tensor:
        logits = ShardedTensor(cut.to_local(x, comm.rank, 2).clone(), cut, TensorGroup(comm))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return F.cross_entropy(logits, target)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        want = F.cross_entropy(x, target)
    exact = F.cross_entropy(x.double(), target).item()
    for got in run_simulated(2, body):
        assert got.dtype == want.dtype == (torch.float32 if autocast else torch.bfloat16)
        assert got.item() == pytest.approx(exact, rel=1e-6 if autocast else 1e-2)


def test_a_target_outside_of_the_vocabulary_fails() -> None:
    def body(comm: ThreadCommunicator) -> None:
        cut = Placement(1, (13,), 1)
        logits = ShardedTensor(torch.randn(3, 7), cut, TensorGroup(comm))
        F.cross_entropy(logits, torch.tensor([1, 2, 13]))  # the padding row

    with pytest.raises(RuntimeError, match="outside of the 13 classes"):
        run_simulated(2, body)


@pytest.mark.parametrize("vocabulary", [12, 13])
@pytest.mark.parametrize("padding_idx", [None, 0, -1])
def test_embedding(vocabulary: int, padding_idx: int | None) -> None:
    torch.manual_seed(0)
    whole = torch.nn.Embedding(vocabulary, 6, padding_idx, dtype=torch.float64)
    index = torch.tensor([[0, 3, vocabulary - 1], [3, 6, 7]])
    whole(index).pow(2).sum().backward()

    def body(comm: ThreadCommunicator) -> Any:
        torch.manual_seed(0)
        layer = VocabParallelEmbedding(vocabulary, 6, padding_idx, group=comm, dtype=torch.float64)
        out = layer(index)
        out.pow(2).sum().backward()
        with pytest.raises(IndexError):
            layer(torch.tensor([vocabulary]))
        return out.detach(), layer._parameters["weight"].grad

    ranks = run_simulated(2, body)
    assert all(relative_error(out, whole(index)) == 0 for out, _ in ranks)
    gradient = torch.cat([g for _, g in ranks])
    assert relative_error(gradient[:vocabulary], whole.weight.grad) < 1e-12
    assert not gradient[vocabulary:].any()
