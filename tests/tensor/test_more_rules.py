"""Convolutions, channels, index tensors, triangular solves: values and gradients, for every way to cut the operands."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.tensor import Placement, ShardedTensor, TensorGroup, ThreadCommunicator, run_simulated, whole
from lightning_3d.testing import relative_error
from tests.tensor.helpers import compare

GATHERS = "ignore:.*no tensor-parallel form"
INDEX = torch.randint(0, 6, (2, 8, 6), generator=torch.Generator().manual_seed(3))
ROWS = torch.tensor([4, 0, 4])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def placements(shape: tuple[int, ...], size: int) -> list[Placement | None]:
    """All ways to cut a tensor of this shape over `size` ranks, with copies and halves, and not at all."""
    found: list[Placement | None] = [None]
    for dim, n in enumerate(shape):
        found += [Placement(dim, (n,))] if n % size == 0 else []
        found += [Placement(dim, (n // 2,) * 2)] if n % (2 * size) == 0 else []
        found += [Placement(dim, (n,), copies=2)] if size == 4 and n % 2 == 0 else []
    return found


Case = tuple[Callable[..., Tensor], list[tuple[int, ...]]]
CASES: dict[str, Case] = {
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(2, 8, 5, 4), (4, 8, 3, 3), (4,)]),
    "conv1d_unbatched": (lambda x, w, b: F.conv1d(x, w, b, stride=2), [(8, 6), (4, 8, 3), (4,)]),
    "conv2d_grouped": (lambda x, w, b: F.conv2d(x, w, b, groups=4), [(2, 8, 3, 3), (8, 2, 1, 1), (8,)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 4, w, b), [(2, 8, 6), (8,), (8,)]),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [(4, 8, 6), (8,), (8,)]),
    "pools": (lambda x: F.avg_pool2d(F.max_pool2d(x, 2), 2) + F.adaptive_avg_pool2d(x, 1), [(2, 8, 4, 4)]),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [(2, 4, 4, 4)]),
    "gather": (lambda x: x.gather(2, INDEX) + x.take_along_dim(INDEX[:, :, :1], 2), [(2, 8, 6)]),
    "scatter_add": (lambda x, y: x.scatter_add(2, INDEX, y) * 2, [(2, 8, 6), (2, 8, 6)]),
    "index_add": (lambda x, y: x.index_add(2, ROWS, y, alpha=3), [(2, 8, 6), (2, 8, 3)]),
    "index_copy": (lambda x, y: torch.index_copy(x, 2, ROWS[:2], y), [(2, 8, 6), (2, 8, 2)]),
    "positions": (lambda x: x[:, 2] + x[..., -1, :] * x[1, None, 5] + x.select(1, 0), [(2, 8, 6)]),
    "solve_triangular": (
        lambda a, b: torch.linalg.solve_triangular(a.tanh().tril(-1) + torch.eye(3).double(), b, upper=False),
        [(4, 3, 3), (4, 3, 8)],
    ),
    "inverse": (lambda a: torch.linalg.inv(a + 4 * torch.eye(4).double()), [(4, 4, 4)]),
}


@pytest.mark.filterwarnings(GATHERS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_any_placement_of_the_operands_is_exact(name: str, size: int) -> None:
    function, shapes = CASES[name]
    tensors = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    ways = [placements(shape, size) for shape in shapes]
    rng = random.Random(0)
    tried = 0
    while tried < 12:
        cuts = [rng.choice(options) for options in ways]
        if any(cuts):
            compare(function, tensors, cuts, size)
            tried += 1


@pytest.mark.parametrize("position", [0, 4, -1])
def test_one_row_of_a_padded_table(position: int) -> None:
    cut = Placement(0, (5,), padding=3)
    ranks = compare(lambda table: table[position] * 2, [draw(5, 6)], [cut], 4)
    assert {op for (_, _, op) in ranks[0].ledger.traffic} == {"all_reduce"}


CHANNELS, ROW = Placement(1, (8,)), Placement(0, (8,))
WITHOUT_GATHER: dict[str, tuple[Callable[..., Tensor], list[tuple[Tensor, Placement | None]], set[str]]] = {
    "column conv": (CASES["conv2d"][0], [(draw(2, 3, 4, 4), None), (draw(8, 3, 3, 3), ROW), (draw(8), ROW)], set()),
    "row conv": (
        lambda x, w: F.conv2d(x, w),
        [(draw(2, 8, 4, 4), CHANNELS), (draw(3, 8, 3, 3), CHANNELS)],
        {"all_reduce"},
    ),
    "depthwise conv": (
        lambda x, w: F.conv1d(x, w, groups=8),
        [(draw(2, 8, 4), CHANNELS), (draw(8, 1, 3), ROW)],
        set(),
    ),
    "group_norm": (
        lambda x, w: F.group_norm(x, 4, w, w),
        [(draw(2, 8, 4, 4), CHANNELS), (draw(8), ROW)],
        set(),
    ),
    "solve": (CASES["solve_triangular"][0], [(draw(4, 3, 3), Placement(0, (4,))), (draw(4, 3, 8), None)], set()),
    "index_add": (lambda y: torch.zeros(5, 8).double().index_add(0, ROWS, y), [(draw(3, 8), CHANNELS)], set()),
}


@pytest.mark.parametrize("name", WITHOUT_GATHER)
def test_the_forward_communicates_no_more_than_it_must(name: str) -> None:
    function, operands, expected = WITHOUT_GATHER[name]

    def body(comm: ThreadCommunicator) -> set[str]:
        group = TensorGroup(comm)
        with torch.no_grad():
            function(
                *(x if c is None else ShardedTensor(c.to_local(x, comm.rank, 2).clone(), c, group) for x, c in operands)
            )
        assert group.gathers == 0
        return {op for (_, _, op) in comm.ledger.traffic}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_simulated(2, body) == [expected] * 2


def test_running_statistics_of_cut_channels_are_whole_on_every_rank() -> None:
    x, cut = draw(4, 8, 6), Placement(1, (4, 4))
    want = [torch.zeros(8).double(), torch.ones(8).double()]
    F.batch_norm(x, *want, training=True)

    def body(comm: ThreadCommunicator) -> Any:
        buffers = [torch.zeros(8).double(), torch.ones(8).double()]
        F.batch_norm(
            ShardedTensor(cut.to_local(x, comm.rank, 2), cut, TensorGroup(comm)), *buffers, None, None, training=True
        )
        return buffers

    for got in run_simulated(2, body):
        torch.testing.assert_close(got, want)


def test_a_padded_dim_of_size_one_is_not_broadcast() -> None:
    """A gate with one output, cut over two ranks: one of them holds only padding."""
    one = Placement(1, (1,), padding=1)
    with pytest.warns(UserWarning, match="would be broadcast"):
        compare(lambda gate, x: gate.sigmoid() * x, [draw(5, 1), draw(5, 6)], [one, None], 2)


@pytest.mark.filterwarnings(GATHERS)
@pytest.mark.parametrize(("key_heads", "cut_keys"), [(4, True), (4, False), (2, False), (1, False)])
def test_queries_that_ranks_share(key_heads: int, cut_keys: bool) -> None:
    """Query heads held by two ranks each; keys held by one each, or whole on all."""
    q, k, v = draw(2, 4, 5, 8), draw(2, key_heads, 5, 8, seed=1), draw(2, key_heads, 5, 8, seed=2)
    gqa = key_heads < 4
    want = F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa)
    shared, own = Placement(1, (4,), copies=2), Placement(1, (4,))

    def body(comm: ThreadCommunicator) -> tuple[Tensor, bool]:
        group = TensorGroup(comm)
        query = ShardedTensor(shared.to_local(q, comm.rank, 4), shared, group)
        keys = [ShardedTensor(own.to_local(x, comm.rank, 4), own, group) if cut_keys else x for x in (k, v)]
        out = F.scaled_dot_product_attention(query, *keys, enable_gqa=gqa)
        dropped = F.scaled_dot_product_attention(query, *keys, dropout_p=0.5, enable_gqa=gqa)
        return whole(out) if isinstance(out, ShardedTensor) else out, isinstance(dropped, ShardedTensor)

    for got, own_masks in run_simulated(4, body):
        assert relative_error(got, want) < 1e-12
        assert not own_masks, "ranks that hold the same heads would draw different masks"
