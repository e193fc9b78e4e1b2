"""ZeRO-3: what is gathered when, by which rank; against one process and `fully_shard`."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from lightning_3d.comm import Communicator, ProcessCommunicator
from lightning_3d.errors import ConfigurationError
from lightning_3d.tensor.recorded.eager import run_eagerly_around
from lightning_3d.testing import relative_error, run_distributed
from lightning_3d.zero import Share, Units, Zero, find_units

CPU = torch.device("cpu")
BUCKET = 2048


class Block(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)
        self.mode = mode

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Any:
        if self.mode in ("checkpoint inside", "adapter, checkpoint"):
            return checkpoint(self.inner, x, use_reentrant=False)
        if self.mode == "reentrant":
            return checkpoint(self.inner, x, use_reentrant=True)
        if self.mode == "dict":
            return {"odd": Odd(self.inner(x))}
        return self.inner(x)


class Odd:
    """No container that anybody could look into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Net(nn.Module):
    """A tied embedding and head, a large layer of its own, and four blocks that are called in the way of `mode`."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.large = nn.Linear(8, 64)
        self.small = nn.Linear(64, 8)  # as large
        blocks = [Block(mode) for _ in range(4)]
        self.blocks = nn.ModuleList(reversed(blocks) if mode == "reversed" else blocks)
        self.head = nn.Linear(8, 13)
        self.head.weight = self.embed.weight
        self.mode = mode
        self.meet: Callable[[], None] | None = None

    def forward(self, tokens: Tensor, step: int = 0, rank: int = 0) -> Tensor:
        x = self.small(torch.relu(self.large(self.embed(tokens))))
        blocks = list(self.blocks)
        if self.mode == "checkpoint around several":
            return self.head(checkpoint(self.run, blocks, x, use_reentrant=False))
        if self.mode == "functional":
            x = x + torch.func.jvp(blocks[0], (x.detach(),), (torch.ones_like(x),))[1]
        if self.mode == "reversed":
            blocks.reverse()
        if self.mode == "twice":
            blocks += blocks[:2]
        if self.mode == "shuffled":  # each replica in another order
            random.Random(10 * step + rank).shuffle(blocks)
        if self.mode == "opposite" and rank:
            blocks.reverse()
        if self.mode == "twice on one" and rank:
            blocks.insert(2, blocks[1])
        for number, block in enumerate(blocks):
            if self.mode.startswith("skips") and (number + rank + step) % 3 == 0:
                continue  # each replica others
            if self.mode == "checkpoint outside":
                x = checkpoint(block, x, use_reentrant=False)
            elif self.mode == "dict":
                x = block(x)["odd"].value
            else:
                x = block(x)
        if self.mode == "skips, meets" and self.meet is not None:
            self.meet()
        return self.head(x)

    def run(self, blocks: list[nn.Module], x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x

    def loss(self, tokens: Tensor, step: int = 0, rank: int = 0) -> Tensor:
        loss = nn.functional.cross_entropy(self(tokens, step, rank).flatten(0, 1), tokens.flatten())
        if self.mode == "reads":  # outside of the block's forward, and of everything's
            loss = loss + 0.1 * self.blocks[1].up.weight.pow(2).sum() + 0.1 * self.large.weight.abs().mean()
        return loss


def make(mode: str) -> Net:
    torch.manual_seed(5)
    net = Net(mode).double()
    for p in net.parameters():
        nn.init.normal_(p, std=0.4)
    if mode == "frozen block":
        net.blocks[2].requires_grad_(False)
    if mode == "frozen beginning":
        for part in (net.embed, net.large, net.small, *net.blocks[:3]):
            part.requires_grad_(False)
        net.head.weight = nn.Parameter(net.head.weight.detach().clone())
    if mode.startswith("adapter"):
        net.blocks.requires_grad_(False)
        for block in net.blocks:
            block.norm.requires_grad_(True)
    return net


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(0, 13, (3, 5), generator=torch.Generator().manual_seed(10 * step + rank))


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.05)


def axes() -> tuple[Communicator, Communicator, Communicator]:
    """Reductions, gathers, flags."""
    world = ProcessCommunicator("dp", dist.group.WORLD, CPU)
    return world, ProcessCommunicator("dp", dist.new_group(), CPU, world.ledger), ProcessCommunicator(
        "control", dist.new_group(), CPU
    )  # fmt: skip


def divide(net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Zero, Units]:
    data, gathers, control = axes()
    blocks = [f"blocks.{i}" for i in range(4)]
    names = find_units(net, blocks, BUCKET)
    assert set(names) == {*blocks, "large", "small"}
    units = Units({n: net.get_submodule(n) for n in names}, names.values(), gathers, control)
    named = dict(net.named_parameters())
    share = Share(named, {id(p): n for n, p in named.items()}, set(named), data, control, units=units)
    return Zero([optimizer], share, 3, bucket_bytes=BUCKET), units


def step_of(zero: Zero, units: Units, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    zero.begin()
    units.begin(training=True)
    with units.active():
        value = loss()
    zero.start_reducing()
    with zero.gathering_backward(last=True):
        value.backward()
    zero.finish()
    zero.publish()
    optimizer.step()


def train(mode: str, steps: int = 4) -> float:
    """Largest relative error of any parameter against one process on the whole batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    net, plain = make(mode), make(mode)
    optimizer, reference = optimizer_of(net), optimizer_of(plain)
    before = dict(net.named_parameters())
    zero, units = divide(net, optimizer)

    def meet() -> None:
        """A collective of user code in the step, as the strategy runs it."""
        units.before_collective()
        dist.barrier()

    net.meet = meet
    for step in range(steps):
        step_of(zero, units, lambda s=step: net.loss(batch(s, rank), s, rank), optimizer)
        reference.zero_grad()
        sum(plain.loss(batch(step, r), step, r) / world for r in range(world)).backward()
        reference.step()
        if mode == "edits":  # equal on all ranks
            with torch.no_grad(), units.all_whole():
                net.blocks[0].up.weight.clamp_(-0.3, 0.3)
                net.large.weight.data = net.large.weight.data * 0.9
            with torch.no_grad():
                plain.blocks[0].up.weight.clamp_(-0.3, 0.3)
                plain.large.weight.mul_(0.9)
        with torch.no_grad():
            units.begin(training=False)
            with units.active():
                out = net(batch(step, 7))
            units.end(close=True)
            assert relative_error(out, plain(batch(step, 7))) < 1e-9
    with units.all_whole():
        after = dict(net.named_parameters())
        assert all(after[n] is before[n] and type(after[n]) is nn.Parameter for n in before)
        return max(relative_error(after[n], p) for n, p in plain.named_parameters())


MODES = [
    "plain", "reversed", "twice", "skips", "skips, meets", "shuffled", "opposite", "checkpoint inside",
    "checkpoint outside", "checkpoint around several", "functional", "reentrant", "dict", "reads", "frozen block",
    "frozen beginning", "adapter", "adapter, checkpoint", "edits",
]  # fmt: skip


def train_all(modes: list[str]) -> dict[str, float]:
    return {mode: train(mode) for mode in modes}


def test_equals_one_process() -> None:
    for world, modes in ((2, MODES), (3, ["plain", "skips", "twice"])):
        for errors in run_distributed(train_all, world, modes, timeout=120):
            assert {mode: error for mode, error in errors.items() if not error <= 1e-9} == {}


def skips_in_stage(stage: int) -> float:
    """More buckets than may be under way, in replicas that leave out other blocks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    net, plain = make("skips"), make("skips")
    optimizer, reference = optimizer_of(net), optimizer_of(plain)
    data, _, control = axes()
    named = dict(net.named_parameters())
    share = Share(named, {id(p): n for n, p in named.items()}, set(named), data, control)
    zero = Zero([optimizer], share, stage, bucket_bytes=256)
    zero.begin()
    zero.start_reducing()
    net.loss(batch(0, rank), 0, rank).backward()
    zero.finish()
    zero.publish()
    optimizer.step()
    sum(plain.loss(batch(0, r), 0, r) / world for r in range(world)).backward()
    reference.step()
    return max(relative_error(named[n], p) for n, p in plain.named_parameters())


def test_replicas_that_leave_out_other_blocks_do_not_wait_for_each_other() -> None:
    for stage in (1, 2):
        assert max(run_distributed(skips_in_stage, 2, stage, timeout=60)) <= 1e-9


def against_fully_shard() -> float:
    rank = dist.get_rank()
    net, peer = make("plain"), make("plain")
    optimizer = optimizer_of(net)
    zero, units = divide(net, optimizer)
    for block in peer.blocks:
        fully_shard(block)
    fully_shard(peer)
    theirs = optimizer_of(peer)
    for step in range(4):
        step_of(zero, units, lambda s=step: net.loss(batch(s, rank)), optimizer)
        theirs.zero_grad()
        tokens = batch(step, rank)
        nn.functional.cross_entropy(peer(tokens).flatten(0, 1), tokens.flatten()).backward()
        theirs.step()
    with units.all_whole():
        ours = {n: p.detach().clone() for n, p in net.named_parameters()}
    return max(relative_error(ours[n], p.full_tensor()) for n, p in peer.named_parameters())


def test_equals_fully_shard() -> None:
    assert max(run_distributed(against_fully_shard, 2)) <= 1e-12


def memory() -> tuple[int, int, int, int, int]:
    """Bytes of all parameters and padding; of this rank's part between steps, the most in forward and in backward."""
    net = make("plain")
    optimizer = optimizer_of(net)
    total = sum(p.nbytes for p in net.parameters())
    zero, units = divide(net, optimizer)

    def held() -> int:
        found = [t for s in zero.storages for t in (s.flat, s.shard)]
        found += [p.data for p in net.parameters() if type(p) is nn.Parameter]
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}.values())

    peaks = {"forward": 0, "backward": 0}

    def look(phase: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            peaks[phase] = max(peaks[phase], held())

        return hook

    rest = held()
    for block in net.blocks:
        block.up.register_forward_hook(look("forward"))
        block.up.register_full_backward_hook(look("backward"))
    step_of(zero, units, lambda: net.loss(batch(0, dist.get_rank())), optimizer)
    assert held() == rest
    padding = sum(s.shard.nbytes * 2 - sum(slot.numel * 8 for slot in s.slots) for s in zero.storages)
    return total, padding, rest, peaks["forward"], peaks["backward"]


def test_memory_is_this_ranks_part_and_two_units() -> None:
    """The unit in use, the one that is fetched, and the root (here: the embedding)."""
    unit = sum(p.nbytes for p in Block("plain").double().parameters())
    net = make("plain")
    root = sum(p.nbytes for n, p in net.named_parameters() if not n.startswith(("blocks", "large", "small")))
    for total, padding, rest, forward, backward in run_distributed(memory, 2):
        assert rest <= total / 2 + padding
        assert forward <= rest + root + 2 * unit + padding
        assert backward <= rest + root + 2 * unit + padding


def overlap() -> tuple[list[bool], list[bool], list[bool]]:
    """In each block but the last to run: (the next is on its way in the forward, in the backward; reductions are)."""
    net = make("plain")
    optimizer = optimizer_of(net)
    zero, units = divide(net, optimizer)
    by_name = {unit.name: unit for unit in units.units}
    forward, backward, reductions = [], [], []

    def next_is_coming(number: int) -> bool:
        unit = by_name[f"blocks.{number}"]
        return unit.coming or unit.is_whole

    for number, block in enumerate(net.blocks):
        if number < 3:
            block.up.register_forward_hook(lambda *_, n=number: forward.append(next_is_coming(n + 1)))
        if number > 0:
            block.up.register_full_backward_hook(lambda *_, n=number: backward.append(next_is_coming(n - 1)))
        if number < 3:
            block.up.register_full_backward_hook(
                lambda *_, n=number: reductions.append(
                    all(b.launched for b in zero.buckets if f"blocks.{n + 1}" in b.slots[0].name)
                )
            )
    for _ in range(2):  # from the second step on the order is known
        forward.clear(), backward.clear(), reductions.clear()
        step_of(zero, units, lambda: net.loss(batch(0, dist.get_rank())), optimizer)
    return forward, backward, reductions


def test_gathers_and_reductions_overlap_computation() -> None:
    for found in run_distributed(overlap, 2):
        assert found == ([True] * 3, [True] * 3, [True] * 3)


def misuse() -> list[str]:
    net = make("plain")
    optimizer = optimizer_of(net)
    _, units = divide(net, optimizer)
    texts = []
    weight = net.blocks[1].up.weight
    assert weight.shape == (24, 8)
    assert weight.numel() == 192
    assert weight.requires_grad
    uses: list[Callable[[], Any]] = [
        lambda: weight.norm(),
        lambda: net.state_dict(),
        lambda: copy.deepcopy(net),
        lambda: weight.data.clamp_(0, 1),
        lambda: nn.init.zeros_(weight),
    ]
    for use in uses:
        try:
            with torch.no_grad():
                use()
        except ConfigurationError as error:
            texts.append(str(error))
    rank = dist.get_rank()
    units.begin(training=False)
    with units.active(), torch.no_grad():
        net(batch(0, 0))
        try:
            net.blocks[rank].up.weight.sum()  # another one on every rank, after it was released
        except ConfigurationError as error:
            texts.append(str(error))
    return texts


def twice_on_one(meets: bool) -> str:
    net = make("twice on one")
    optimizer = optimizer_of(net)
    zero, units = divide(net, optimizer)

    def loss() -> Tensor:
        value = net.loss(batch(0, 0), 0, dist.get_rank())
        if meets:
            units.before_collective()
            dist.barrier()
        return value

    try:
        step_of(zero, units, loss, optimizer)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_block_that_runs_twice_on_one_replica_is_refused_on_all() -> None:
    for meets in (False, True):
        for text in run_distributed(twice_on_one, 2, meets, timeout=30):
            assert "blocks.1 is needed once more in one step by some of them only" in text
            assert "zero_stage=2" in text


def test_reads_outside_of_steps_say_what_to_do() -> None:
    for texts in run_distributed(misuse, 2):
        assert len(texts) == 6
        assert all("whole_parameters()" in text for text in texts[:5])
        assert "'blocks.1.up.weight'" in texts[0]
        assert "blocks.0, blocks.1 is needed once more in one step by some" in texts[5]


def test_what_is_compiled_around_blocks_runs_uncompiled() -> None:
    net = make("plain")
    net.compile(backend="aot_eager")
    net.blocks[0].compile(backend="aot_eager")
    assert run_eagerly_around(net, net.blocks) == ["Net"]
    assert net._compiled_call_impl is None
    assert net.blocks[0]._compiled_call_impl is not None
    outer = nn.Sequential(torch.compile(make("plain"), backend="aot_eager"))
    assert run_eagerly_around(outer, outer[0]._orig_mod.blocks) == ["0"]
    assert outer(batch(0, 0)).equal(make("plain")(batch(0, 0)))
