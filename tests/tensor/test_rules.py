from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.tensor import (
    NoRule,
    Placement,
    ShardedTensor,
    TensorGroup,
    ThreadCommunicator,
    map_local,
    register_rule,
    run_simulated,
    whole,
)
from lightning_3d.tensor.registry import OWN_RULES, RULES, cached_handlers
from tests.tensor.helpers import Refused, compare, random_factors, reassembled, refusing_groups, shards

Op = Callable[[Tensor], Tensor]


def one_op(x: Tensor, cut_dim: int, rng: random.Random) -> tuple[str, Op]:
    """A random operation that fits the global `x`."""
    n, d = x.ndim, rng.randrange(x.ndim)
    kind = rng.random()
    if kind < 0.2 or (kind < 0.5 and n == 3):
        ops = _indexed(x, d) if kind < 0.2 else _channelled(x, d)
        name = rng.choice(list(ops))
        return name, ops[name]
    length = x.shape[d]
    e = rng.randrange(n)
    at = (slice(None),) * d
    start = rng.randrange(length)
    stop, step, chosen = rng.randrange(start + 1, length + 1), rng.choice([1, 1, 2]), rng.randrange(length)
    shape, order = random_factors(x.numel(), rng), rng.sample(range(n), n)
    cutting = [k for k in (start, length - start) if k]
    piece, repeats = rng.randrange(len(cutting)), [1] * n
    repeats[d] = 2
    other = torch.randn([k if rng.random() < 0.6 else 1 for k in x.shape])
    mask = torch.rand(x.shape[d:]) > 0.5
    index = torch.randint(0, length, (2, 3))
    count = rng.choice([2, 3])
    ops = {
        "view": lambda t: t.reshape(shape),
        "permute": lambda t: t.permute(order),
        "transpose": lambda t: t.transpose(d, e),
        "movedim": lambda t: t.movedim(d, e),
        "unsqueeze": lambda t: t.unsqueeze(d),
        "squeeze": lambda t: t.squeeze(),
        "split": lambda t: t.split(cutting, d)[piece],
        "chunk": lambda t: t.chunk(count, d)[0],
        "tensor_split": lambda t: t.tensor_split(count, d)[-1],
        "slice": lambda t: t[(*at, slice(start, stop, step))],
        "select": lambda t: t[(*at, chosen, None)],
        "index": lambda t: t[(*at, index)],
        "index_select": lambda t: t.index_select(d, index[0]),
        "ellipsis": lambda t: t[..., None, :],
        "gelu": F.gelu,
        "glu": lambda t: F.glu(t, d) if length % 2 == 0 else t.relu(),
        "cat": lambda t: torch.cat([t, t * 2], d),
        "stack": lambda t: torch.stack([t, -t], d),
        "repeat": lambda t: t.repeat(repeats),
        "repeat_interleave": lambda t: t.repeat_interleave(2, d),
        "flatten": lambda t: t.flatten(min(d, e), max(d, e)),
        "unflatten": lambda t: t.unflatten(d, (2, -1)) if length % 2 == 0 else t,
        "square": lambda t: t * t + t,
        "add": lambda t: t + other,
        "where": lambda t: torch.where(other > 0, t, other * 2),
        "masked_fill": lambda t: t.masked_fill(mask, 0.5),
        "softmax": lambda t: t.softmax(d),
        "sum": lambda t: t.sum(d, keepdim=True) if d != cut_dim else t.amax(d),
        "var": lambda t: t.var(d, True) if length > 1 else t,
        "topk": lambda t: t.topk(stop, d).values,
        "sort": lambda t: t.sort(d).values,
        "max": lambda t: t.max(d, True)[0],
        "norm": lambda t: t.norm(dim=d, keepdim=bool(e % 2)),
        "unbind": lambda t: t.unbind(d)[chosen],
        "expand": lambda t: t.unsqueeze(d).expand(*t.shape[:d], 3, *t.shape[d:]),
        "flip": lambda t: t.flip(d),
        "roll": lambda t: t.roll(1, d),
        "pad": lambda t: F.pad(t, (1, 2)),
        "assign": lambda t: assigned(t, (*at, chosen), 3.0),
        "assign_slice": lambda t: assigned(t, (*at, slice(start, stop)), t[(*at, slice(start, stop))] * 2),
        "in_place": lambda t: t.clone().mul_(2).add_(t),
        "half": lambda t: t.to(torch.bfloat16).float(),
    }
    name = rng.choice(list(ops))
    return name, ops[name]


def _indexed(x: Tensor, d: int) -> dict[str, Op]:
    """Picking and placing along dim `d` by index tensors."""
    length = x.shape[d]
    everywhere = torch.randint(0, length, x.shape)
    rows = torch.randperm(length)
    other = torch.randn(x.shape)
    return {
        "multiply": lambda t: torch.multiply(t, other).absolute().negative(),
        "gather": lambda t: t.gather(d, everywhere),
        "take_along_dim": lambda t: torch.take_along_dim(t, everywhere, dim=d),
        "scatter": lambda t: torch.scatter(t, d, everywhere, 2.0),
        "scatter_add": lambda t: t.scatter_add(d, everywhere, t * 2),
        "scatter_add_to_whole": lambda t: torch.zeros(x.shape).scatter_add(d, everywhere, t),
        "scatter_reduce": lambda t: t.scatter_reduce(d, everywhere, other, reduce="amax"),
        "scatter_in_place": lambda t: t.clone().scatter_add_(d, everywhere, other),
        "index_add": lambda t: t.index_add(d, rows, t, alpha=2),
        "index_add_to_whole": lambda t: other.index_add(d, rows, t),
        "index_copy": lambda t: t.index_copy(d, rows, other),
        "index_fill": lambda t: t.index_fill(d, rows[:1], 3.0),
    }


def _channelled(x: Tensor, d: int) -> dict[str, Op]:
    """What acts on (batch, channels, length), and on batches of matrices."""
    _, channels, length = x.shape
    chosen = 1 + d % 2
    group = max(k for k in range(1, channels + 1) if channels % (2 * k) == 0) if channels % 2 == 0 else 1
    depthwise = 0.5 * torch.randn(channels * chosen, 1, 1)
    grouped = 0.5 * torch.randn(channels, channels // group, 1) / (channels // group)
    mixing = torch.randn(4, channels, 1) / channels
    scale = torch.rand(channels) + 0.5
    lower = torch.eye(length) + 0.1 * torch.randn(length, length).tril(-1) / length
    triangle = torch.eye(channels) + 0.1 * torch.randn(channels, channels).tril(-1) / channels
    return {
        "conv_depthwise": lambda t: F.conv1d(t, depthwise, groups=channels),
        "conv_grouped": lambda t: F.conv1d(t, grouped, scale, groups=group),
        "conv_mixing": lambda t: F.conv1d(t, mixing),
        "group_norm": lambda t: F.group_norm(t, group, scale, scale * 2),
        "batch_norm": lambda t: F.batch_norm(t, None, None, scale, scale * 2, True) if length > 1 else t,
        "avg_pool": lambda t: F.avg_pool1d(t, 2 - length % 2),
        "max_pool": lambda t: F.max_pool1d(t, chosen if length > 1 else 1),
        "adaptive_pool": lambda t: F.adaptive_avg_pool1d(t, 2),
        "interpolate": lambda t: F.interpolate(t, scale_factor=2.0),
        "solve": lambda t: torch.linalg.solve_triangular(triangle, t, upper=False),
        "solve_right": lambda t: torch.linalg.solve_triangular(lower, t, upper=False, left=False),
        "matrix_exp": lambda t: torch.matrix_exp(t.tanh() / 4) if channels == length else t,
    }


def assigned(x: Tensor, index: Any, value: Any) -> Tensor:
    x = x.clone()
    x[index] = value
    return x


def chain(seed: int) -> tuple[int, int]:
    """A random chain of operations on every rank: each one refuses, or equals the global operation."""
    rng = random.Random(seed)
    size = rng.choice([2, 3, 4])
    torch.manual_seed(seed)
    u = 4 * size
    segments = rng.choice([(2 * u,), (u, u), (u, u, u), (u, u // 2, u // 2), (3 * u,)])
    x = torch.randn(2, 3, sum(segments))
    copies = rng.choice([n for n in range(1, size + 1) if size % n == 0])
    parts: list[Any] = shards(x, Placement(2, segments, copies=copies), refusing_groups(size))
    equal = refused = 0
    for _ in range(12):
        name, op = one_op(x, parts[0].placement.dim, rng)
        want = op(x)
        if want.numel() > 20000 or want.ndim > 8 or want.ndim == 0:
            continue
        try:
            got = [op(part) for part in parts]
        except Refused:
            refused += 1
            continue
        assert all(isinstance(g, ShardedTensor) and g.shape == want.shape for g in got), (seed, name, got[0])
        torch.testing.assert_close(reassembled(got, size), want, msg=lambda m, n=name: f"seed {seed}, {n}: {m}")
        x, parts, equal = want, got, equal + 1
        if x.numel() < 2:
            break
    return equal, refused


@pytest.mark.parametrize("block", range(4))
def test_chains_of_operations_equal_the_global_ones(block: int) -> None:
    counts = [chain(seed) for seed in range(block * 400, (block + 1) * 400)]
    equal, refused = sum(c[0] for c in counts), sum(c[1] for c in counts)
    assert equal > 1800, "the fuzz hardly tests anything"
    assert refused < equal


def rows(n: int) -> Placement:
    return Placement(0, (n,))


Q = torch.randn(2, 4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
K = torch.randn(2, 4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
HEADS, FEATURES = Placement(1, (4,)), Placement(3, (8,))
PRODUCTS: list[tuple[Callable[..., Tensor], Placement | None, Placement | None]] = [
    (lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k), HEADS, HEADS),
    (lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k), FEATURES, FEATURES),
    (lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k), HEADS, None),
    (lambda q, k: torch.einsum("bhqd,bhqd->bq", q, k), HEADS, HEADS),
    (lambda q, k: q @ k.transpose(-1, -2), HEADS, HEADS),
    (lambda q, k: q @ k.transpose(-1, -2), HEADS, None),
    (lambda q, k: q @ k.transpose(-1, -2), None, HEADS),
    (lambda q, k: q @ k.transpose(-1, -2), FEATURES, FEATURES),
    (lambda q, k: q @ k.transpose(-1, -2), FEATURES, None),
    (lambda q, k: q.flatten(2) @ k.flatten(2).transpose(1, 2), HEADS, None),
    (lambda q, k: torch.bmm(q[0], k[0].mT), Placement(1, (4,)), Placement(1, (4,))),
    (lambda q, k: torch.baddbmm(q[0] @ k[0].mT, q[0], k[0].mT, beta=0.5, alpha=2), HEADS, HEADS),
    (lambda q, k: F.scaled_dot_product_attention(q, k, k * 2, is_causal=True), HEADS, HEADS),
    (lambda q, k: F.scaled_dot_product_attention(q, k[:, :2], k[:, 2:], enable_gqa=True), HEADS, None),
    (lambda q, k: F.scaled_dot_product_attention(q, k, k, attn_mask=q[:, :, :, :5]), HEADS, None),
    (lambda q, k: torch.addmm(q[0, 0, 0, :5], q[0, 0], k[0, 0].t(), beta=3, alpha=2), None, FEATURES),
]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", range(len(PRODUCTS)))
def test_products_and_their_gradients(case: int, size: int) -> None:
    function, cut_q, cut_k = PRODUCTS[case]
    compare(function, [Q, K], [cut_q, cut_k], size)


POINTWISE: list[Callable[..., Tensor]] = [
    lambda x, y: x + y,
    lambda x, y: x * y[0],
    lambda x, y: torch.addcmul(x, y, y[:, :1], value=2),
    lambda x, y: F.layer_norm(x, (6,), y[0, 0], y[1, 1]) if x.ndim == 3 else x,
    lambda x, y: (x * 2).softmax(-1) @ y.transpose(1, 2),
    lambda x, y: x.sum() * y.mean(),
    lambda x, y: x.mean((1, 2)) + y.sum((1, 2)),
    lambda x, y: torch.cat([x, y], 2),
    lambda x, y: torch.stack([x, y * 2], 0),
    lambda x, y: F.normalize(x, dim=-1) + y,
    lambda x, y: x.cumsum(1) + y,  # along the cut dim: gathers
    lambda x, y: torch.where(x > 0, x, y),
    lambda x, y: assigned(x, (0, slice(None), slice(1, 3)), y[0, :, 1:3]),
    lambda x, y: assigned(y, (0,), x[0] * 2),  # a whole tensor takes a cut one: gathers
    lambda x, y: y.clone().add_(x),
]


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("cut", [Placement(1, (8,)), Placement(1, (4, 4)), Placement(0, (2,)), Placement(2, (6,))])
def test_depthwise_convolution(cut: Placement, repeats: int) -> None:
    generator = torch.Generator().manual_seed(9)
    x, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        for shape in ((2, 8, 6), (8 * repeats, 1, 3), (8 * repeats,))
    )

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv1d(x, w, b, padding=1, groups=8) + F.conv1d(x, weight=w, padding=1, groups=8)

    with pytest.warns(UserWarning, match="conv1d over the cut dim") if cut.dim == 2 else nullcontext():
        compare(function, [x, weight, bias], [cut, None, None], 2)


REDUCTIONS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.softmax(1),
    lambda x: F.log_softmax(x, dim=1),
    lambda x: torch.softmax(x.float(), 1, torch.float64),
    lambda x: x.logsumexp(1),
    lambda x: torch.logsumexp(x, 1, keepdim=True),
    lambda x: F.nll_loss(x.log_softmax(1), torch.tensor([[0, 4, 1, 2, 4, 3]] * 2), ignore_index=3),
    lambda x: F.nll_loss(x.log_softmax(1), torch.tensor([[0, 4, 1, 2, 4, 3]] * 2), reduction="none"),
    lambda x: x.softmax(1) + x.abs().max(),
    lambda x: x.sum(1),
    lambda x: x.mean((0, 1), keepdim=True),
    lambda x: x.amax(1),
    lambda x: x.amin((0, 1), keepdim=True),
    lambda x: x.round().max(),
    lambda x: x * (x > 2).any().double(),
    lambda x: x * (x > -9).all(1).double()[:, None],
]


@pytest.mark.parametrize("case", range(len(REDUCTIONS)))
@pytest.mark.parametrize("padded", [False, True])
def test_reductions_along_the_cut_dim(case: int, padded: bool) -> None:
    length = 5 if padded else 8
    x = torch.randn(2, length, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) * 3
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare(REDUCTIONS[case], [x], [Placement(1, (length,), -length % 4)], 4)
    gathered = {str(w.message).split()[0] for w in caught}
    if case < 7:
        assert gathered <= {"sum"}, "the softmax family never gathers (the test's own sum of padded rows does)"


RANKINGS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x * (x.argmax(1, keepdim=True) - x.argmin(1)[:, None]),
    lambda x: x.max(1).values * x.max(dim=1, keepdim=True)[1][:, 0],
    lambda x: torch.min(x.round(), 1).values + torch.min(x.round(), dim=1).indices,
    lambda x: x * torch.masked_fill(x, x < 1.0, float("-inf")).argmax(1)[:, None],
    lambda x: (
        x * x.detach().topk(3, dim=1).values.sum(1, keepdim=True) * x.detach().topk(3, dim=1).indices.sum(1, True)
    ),
    lambda x: x * x.detach().topk(2, 1, False)[1][:, 1:],
]


@pytest.mark.parametrize("case", range(len(RANKINGS)))
@pytest.mark.parametrize("padded", [False, True])
def test_rankings_along_the_cut_dim(case: int, padded: bool) -> None:
    """Also of equal elements, of rows that are masked out, and of masks on the ranks' first elements."""
    length = 5 if padded else 8
    x = torch.randn(2, length, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) * 3
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare(RANKINGS[case], [x], [Placement(1, (length,), -length % 4)], 4)
    gathered = {str(w.message).split()[0] for w in caught}
    assert gathered - {"sum"} == ({"topk"} if padded and case >= 4 else set())  # "sum": the test's own, of padded rows


def test_candidates_are_gathered_in_place_of_logits() -> None:
    logits = torch.randn(3, 4000)

    def body(comm: ThreadCommunicator) -> tuple[Tensor, int]:
        cut = Placement(1, (4000,))
        part = ShardedTensor(cut.to_local(logits, comm.rank, 4).clone(), cut, TensorGroup(comm))
        best = part.argmax(-1)
        return best, sum(t.elements for t in comm.ledger.traffic.values())

    for best, elements in run_simulated(4, body):
        assert torch.equal(best, logits.argmax(-1))
        assert elements <= 3 * 2 * 4


@pytest.mark.filterwarnings("ignore:.*no tensor-parallel form")
@pytest.mark.parametrize("case", range(len(POINTWISE)))
@pytest.mark.parametrize("both", [True, False])
def test_cut_with_whole_operands_and_their_gradients(case: int, both: bool) -> None:
    x, y = (torch.randn(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (3, 4))
    cut = Placement(1, (4,))
    compare(POINTWISE[case], [x, y], [cut, cut if both else None], 2)


def test_gathering_warns_once_and_is_counted() -> None:
    x = torch.randn(4, 6)
    group = TensorGroup(ThreadCommunicator.ring(1)[0], dry=True)
    group.dry = True
    part = ShardedTensor(x, rows(4), group)
    part.cumsum(0)
    part.cumsum(0)
    assert group.gathers == 2

    def body(comm: ThreadCommunicator) -> Tensor:
        return ShardedTensor(x.chunk(2)[comm.rank], rows(4), TensorGroup(comm), frozenset(["fc.weight"])).cumsum(0)

    with pytest.warns(UserWarning, match=r"cumsum has no tensor-parallel form.*come from fc.weight") as record:
        assert all(torch.equal(got, x.cumsum(0)) for got in run_simulated(2, body))
    assert len(record) == 1  # from the first rank only


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda x: torch.add(x, 1, out=torch.empty(4, 6)), "add"),
        (lambda x: x.data_ptr(), "data_ptr"),
        (lambda x: x.stride(), "stride"),
        (lambda x: x.untyped_storage(), "untyped_storage"),
        (lambda x: x.as_strided((1,), (1,)), "as_strided"),
        (lambda x: setattr(x, "data", torch.zeros(4, 6)), "data"),
    ],
)
def test_what_reaches_for_storage_is_refused_by_name(operation: Callable[[Tensor], Any], name: str) -> None:
    group = refusing_groups(2)[0]
    group.on_gather = None
    x = ShardedTensor(torch.randn(2, 6), rows(4), group, frozenset(["mlp.fc.weight"]))
    with pytest.raises(RuntimeError, match=rf"^{name} on a tensor-parallel activation.*mlp\.fc\.weight"):
        operation(x)


def test_nothing_slips_below_the_rules() -> None:
    x = ShardedTensor(torch.randn(2, 6), rows(4), refusing_groups(2)[0])
    with pytest.raises(RuntimeError, match="below the sharding rules"), torch._C.DisableTorchFunctionSubclass():
        torch.exp(x)


def test_values_are_read_from_the_whole_tensor() -> None:
    x = torch.randn(4, 2)

    def body(comm: ThreadCommunicator) -> Any:
        part = ShardedTensor(x.chunk(2)[comm.rank], rows(4), TensorGroup(comm))
        return part.tolist(), (part > 0).any().item(), float(part.sum()), f"{part.shape}", bool(part.numel())

    with pytest.warns(UserWarning, match="no tensor-parallel form"):
        ranks = run_simulated(2, body)
    for got in ranks:
        assert got[:2] == (x.tolist(), bool((x > 0).any()))
        assert got[2] == pytest.approx(x.sum().item(), rel=1e-6)


def test_metadata_shows_the_global_tensor() -> None:
    x = ShardedTensor(torch.randn(2, 6, requires_grad=True), rows(4), refusing_groups(2)[0])
    assert x.shape == (4, 6)
    assert (x.ndim, x.dim(), len(x), x.numel(), x.size(0), x.size(-1)) == (2, 2, 4, 24, 4, 6)
    assert x.dtype == torch.float32
    assert x.requires_grad
    assert x.is_leaf
    assert x.is_floating_point()
    assert isinstance(x, Tensor)
    assert whole(x.mT).shape == (6, 4)


@pytest.fixture
def rules_as_before() -> Any:
    before = dict(RULES), dict(OWN_RULES)
    yield
    for table, kept in zip((RULES, OWN_RULES), before, strict=True):
        table.clear()
        table.update(kept)
    cached_handlers.clear()


@pytest.mark.usefixtures("rules_as_before")
def test_users_can_register_rules() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)

    @register_rule("cumsum")
    def refused(func: Any, args: Any, kwargs: Any) -> Any:
        raise NoRule("never")

    @register_rule(torch.special.i0, torch.Tensor.i0)
    def bessel(func: Any, args: Any, kwargs: Any) -> Any:
        return map_local(torch.special.i0, args[0])

    comm = compare(lambda t: torch.special.i0(t) * t, [x], [rows(4)], 2)
    assert comm[0].ledger.total(op="all_gather").calls == 0
    part = shards(x, Placement(1, (6,)), refusing_groups(2))[0]
    with pytest.raises(Refused):
        part.cumsum(0)
