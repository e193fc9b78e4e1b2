"""Where a trace is cut, what each window holds, receives and sends; the trace leaves the module as it was."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.errors import PipelineError
from lightning_3d.pipeline import find_atoms, trace
from lightning_3d.pipeline.atoms import check_split_names
from lightning_3d.pipeline.events import Event, NoCut, TensorMeta, Trace
from lightning_3d.pipeline.partition import (
    Held,
    automatic_starts,
    make_partition,
    named_starts,
    owned_windows,
    place_unused,
    stages_of_pieces,
    windows_from_starts,
)
from lightning_3d.pipeline.rng import Randomness
from tests.pipeline.zoo import GPT, MLP, HiddenStates, Module, UNet, batch_of, build


def _meta(elements: int) -> TensorMeta:
    return TensorMeta((elements,), (1,), torch.float32, torch.device("cpu"), True, wire=(elements,))


def _chain(flops: list[int], widths: list[int] | None = None) -> Trace:
    """Atoms a0, a1, ... each reading the one before."""
    made = Trace("training_step")
    for n, work in enumerate(flops):
        event = Event(f"atom:a{n}", "atom", reads={(n - 1, 0)} if n else set(), params={f"p{n}"}, flops=work)
        made.events.append(event)
        made.sizes[f"p{n}"] = 0
        made.meta[n, 0] = _meta((widths or [1] * len(flops))[n])
    made.final_reads = {(len(flops) - 1, 0)}
    return made


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_the_largest_cost_is_as_small_as_possible(stages: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        flops = torch.randint(1, 50, (7,), generator=generator).tolist()
        starts = automatic_starts(_chain(flops), stages)

        def largest(cuts: Any, flops: list[int] = flops) -> int:
            edges = [0, *cuts, len(flops)]
            return max(sum(flops[a:b]) for a, b in pairwise(edges))

        best = min(largest(cuts) for cuts in combinations(range(1, 7), stages - 1))
        assert starts[0] == 0
        assert largest(starts[1:]) == best


def test_ties_go_to_the_narrowest_boundary() -> None:
    made = _chain([1, 0, 0, 1], [9, 2, 5, 9])
    assert automatic_starts(made, 2) == [0, 2]


def test_no_cut_intervals_are_respected() -> None:
    made = _chain([1] * 6)
    made.no_cut.append(NoCut(1, 4, "one checkpoint"))
    assert automatic_starts(made, 2)[1] in (1, 5)
    with pytest.raises(PipelineError, match="one checkpoint"):
        make_partition(made, windows_from_starts(made, [0, 3]))
    made.no_cut.append(NoCut(0, 5, "all one"))
    with pytest.raises(PipelineError, match=r"offers only 1 piece: a0, a1, .*all one \(events 0 to 5\)"):
        automatic_starts(made, 2)


def test_messages_tell_parts_from_stages() -> None:
    module = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])
    with pytest.raises(PipelineError, match=r"4 parts on 2 stages have 3 boundaries: .* of every part but the first"):
        check_split_names(["1"], module, 4, 2)
    with pytest.raises(PipelineError, match=r"names 2 modules .* but 2 stages have 1 boundary: .* of every stage but"):
        check_split_names(["1", "2"], module, 2, 2)
    with pytest.raises(PipelineError, match=r"4 parts on 2 pipeline stages .*offers only 3 pieces.* virtual stages"):
        automatic_starts(_chain([1] * 3), 4, 2)
    with pytest.raises(PipelineError, match=r"4 pipeline stages .*offers only 3 pieces.* a smaller pipeline_parallel"):
        stages_of_pieces(_chain([1] * 3), range(4), 4)


def test_messages_go_straight_from_owner_to_user() -> None:
    made = _chain([1] * 4)
    made.events[3].reads.add((0, 0))  # a skip over two stages
    made.events[1].kind = "read"  # a value read again in every later window
    partition = make_partition(made, windows_from_starts(made, [0, 1, 2, 3]))
    assert partition.receives == [{}, {0: [(0, 0)]}, {0: [(0, 0)], 1: [(1, 0)]}, {0: [(0, 0)], 2: [(2, 0)]}]
    assert partition.sends(0) == {1: [(0, 0)], 2: [(0, 0)], 3: [(0, 0)]}
    assert partition.wanted(0) == [(0, 0)]
    assert [sorted(h) for h in partition.held] == [["p0"], ["p1"], ["p1", "p2"], ["p1", "p3"]]


def test_evaluation_follows_the_parameters() -> None:
    holders = {f"p{n}": (n // 2,) for n in range(4)}
    held = Held(2, holders, ("a0", "a1", "a2", "a3"), (0, 2))
    same = _chain([1] * 4)
    assert [(w.start, w.stage) for w in owned_windows(same, held)] == [(0, 0), (2, 1)]

    def walk(*atoms: int) -> list[tuple[int, int]]:
        made = _chain([1] * len(atoms))
        for event, atom in zip(made.events, atoms, strict=True):
            event.name, event.params = f"atom:a{atom}", {f"p{atom}"}
        windows = owned_windows(made, held)
        assert windows[-1].stage == 1
        assert windows[-1].stop == len(atoms)
        assert all(a.stop == b.start for a, b in pairwise(windows))
        return [(w.start, w.stage) for w in windows]

    extra = _chain([1] * 4)
    extra.events.append(
        Event("linear", "op", params={"p0"})
    )  # glue code uses a parameter of the first stage at the end
    assert [(w.start, w.stage) for w in owned_windows(extra, held)] == [(0, 0), (2, 1), (4, 0), (5, 1)]
    assert walk(0, 1, 2, 3, 0, 1, 2, 3) == [(0, 0), (2, 1), (4, 0), (6, 1)]
    assert walk(0, 1) == [(0, 0), (2, 1)]
    assert walk(2, 3) == [(0, 1)]
    assert walk(0, 3, 3) == [(0, 0), (1, 1)]
    made = _chain([1, 1])
    made.events[0].params = {"p1", "p2"}
    with pytest.raises(PipelineError, match=r"'p1' \(stage 0\), 'p2' \(stage 1\)"):
        owned_windows(made, held)


def test_unused_parameters_find_a_stage() -> None:
    made = _chain([1, 1])
    made.sizes = {"p0": 4, "p1": 4, **{f"copy.{i}": 10 for i in range(4)}, "loose": 1}
    held = [{"p0"}, {"p1"}]
    place_unused(made, held, [(f"copy.{i}", [f"copy.{i}"]) for i in range(4)])
    assert held == [{"p0", "copy.0", "copy.1"}, {"p1", "copy.2", "copy.3", "loose"}]
    made.sizes = {f"net.{i}": 1 for i in range(6)}
    held = [{"net.1", "net.2"}, {"net.4"}]  # skipped blocks stay in line
    place_unused(made, held, [(f"net.{i}", [f"net.{i}"]) for i in range(6)])
    assert held == [{"net.0", "net.1", "net.2", "net.3"}, {"net.4", "net.5"}]


def _traced(module: nn.Module, batch: Any, stages: int = 2) -> Trace:
    return trace(module, find_atoms(module, stages), lambda: module.training_step(batch, 0))


def test_split_by_name() -> None:
    made = _traced(build("mlp"), batch_of("mlp", 2), 4)
    names = made.call_names()
    assert named_starts(made, [names[3], names[5]]) == [0, made.calls()[3][0], made.calls()[5][0]]
    with pytest.raises(PipelineError, match="never calls it"):
        named_starts(made, ["net.8.7"])
    with pytest.raises(PipelineError, match=r"The order of training_step is net\.0"):
        named_starts(made, [names[5], names[3]])


class HeavyEnds(Module):
    """A large vocabulary: the head costs far more than a block, the embedding almost nothing to run (case M2)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4096, 16), nn.Linear(16, 4096)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())


def test_heavy_ends_are_counted_by_cost() -> None:
    made = _traced(build(HeavyEnds), torch.randint(0, 4096, (2, 8)))
    partition = make_partition(made, windows_from_starts(made, automatic_starts(made, 2)))
    assert partition.held[1] == {"head.weight", "head.bias"}
    costs = partition.cost()
    assert costs[0] < costs[1]
    assert sum(costs) == pytest.approx(sum(made.cost(event) for event in made.events))


@pytest.mark.parametrize("depth", [5, 7])
@pytest.mark.parametrize("stages", [2, 4])
def test_no_layer_is_dropped(depth: int, stages: int) -> None:
    """Case L6: depth not divisible by the stages."""
    module = build(lambda: GPT(depth=depth))
    made = _traced(module, batch_of("gpt", 2), stages)
    partition = make_partition(made, windows_from_starts(made, automatic_starts(made, stages)))
    names = [n for n, _ in module.named_parameters()]
    assert set().union(*partition.held) == set(names)
    single = [n for n in names if sum(n in h for h in partition.held) == 1]
    assert set(names) - set(single) == {"wte.weight", "scale"}


def test_u_shaped_skips_cross_as_values() -> None:
    made = _traced(build("unet"), batch_of("unet", 2), 4)
    partition = make_partition(made, windows_from_starts(made, named_starts(made, ["middle", "up2", "out"])))
    assert list(partition.receives[2]) == [0, 1]


class Counts(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps.add_(1)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("make", [MLP, GPT, UNet, HiddenStates, Counts])
def test_the_trace_leaves_no_trace(make: type[nn.Module]) -> None:
    name = {MLP: "mlp", GPT: "gpt", UNet: "unet", HiddenStates: "hidden_states", Counts: "mlp"}[make]
    module, batch = build(make), batch_of(name, 2)

    def attributes() -> dict[str, Any]:
        return {f"{n}.{k}": v for n, m in module.named_modules() for k, v in m.__dict__.items()}

    before, state = attributes(), {n: x.clone() for n, x in module.state_dict().items()}
    identities = {n: id(p) for n, p in module.named_parameters()}
    random_state = torch.get_rng_state()
    first = _traced(module, batch)
    assert torch.equal(torch.get_rng_state(), random_state)
    after = attributes()
    assert before.keys() == after.keys()
    assert all(before[k] is after[k] for k in before if not isinstance(before[k], (bool, int)))
    assert {n: id(p) for n, p in module.named_parameters()} == identities
    for n, x in module.state_dict().items():
        assert torch.equal(x, state[n]), n
    again = _traced(module, batch)
    assert repr(first.plain()) == repr(again.plain())


def test_a_step_that_fails_leaves_no_trace_either() -> None:
    class Fails(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.cache = self(batch[0])
            raise KeyError("user's mistake")

    module = build(Fails)
    with pytest.raises(KeyError, match="user's mistake"):
        _traced(module, batch_of("mlp", 2))
    assert not hasattr(module, "cache")
    assert "log" not in module.__dict__
    assert "forward" not in module.net[0].__dict__
    assert type(module.net[0].weight) is nn.Parameter


class Caches(MLP):
    """Makes a mask on its first call, like many transformers."""

    mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or self.mask.shape != x.shape:
            self.mask = torch.ones_like(x).triu()
        return super().forward(x * self.mask)


def test_what_the_first_call_caches_stays() -> None:
    module = build(Caches)
    made = _traced(module, batch_of("mlp", 2))
    assert made.warm
    assert "triu" not in [event.name for event in made.events]
    assert torch.equal(module.mask, torch.ones(2, 16).double().triu())


def test_parameters_may_be_without_data() -> None:
    real = _traced(build("gpt"), batch_of("gpt", 2))
    module = build("gpt")
    tied = module.head.weight is module.wte.weight
    assert tied
    for m in module.modules():
        for key, p in list(m._parameters.items()):
            if p is not None:
                m._parameters[key] = nn.Parameter(p.detach().to("meta"))
    module.head.weight = module.wte.weight
    batch = batch_of("gpt", 2)
    on_meta = trace(
        module,
        find_atoms(module, 2),
        lambda: module.training_step(batch, 0),
        randomness=Randomness(torch.device("cpu")),
    )
    assert repr(on_meta.plain()) == repr(real.plain())
    assert automatic_starts(on_meta, 2) == automatic_starts(real, 2)


def test_atoms_cover_every_parameter_once() -> None:
    for name in ("mlp", "gpt", "encoder", "unet", "hidden_states"):
        module = build(name)
        for stages in (1, 2, 4, 8):
            atoms = find_atoms(module, stages)
            inside = [id(m) for atom in atoms.values() for m in atom.modules()]
            assert len(inside) == len(set(inside)), "atoms do not contain each other"
            loose = {id(p) for m in module.modules() if id(m) not in inside for p in m._parameters.values()}
            covered = {id(p) for atom in atoms.values() for p in atom.parameters()}
            assert {id(p) for p in module.parameters()} <= covered | loose
