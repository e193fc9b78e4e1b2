"""Sequence parallelism (N14, U2): equal to one process, also for odd lengths; the same bytes; smaller activations."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_3d.testing import preload, relative_error, run_distributed
from tests.strategy.fits import Case
from tests.strategy.ledgers import DIM, LENGTH, SAMPLES, count_all
from tests.strategy.sequences import LENGTHS, odd_lengths, saved_activations
from tests.strategy.test_ledger import ACTIVATION, DOUBLE, select
from tests.strategy.test_parity import check

preload("transformers", "tests.models", "tests.strategy.fits", "tests.strategy.ledgers", "tests.strategy.sequences")
ON = {"sequence_parallel": True}
OFF = {"record": False}  # what a recording itself communicates is not the subject


@pytest.mark.parametrize("layout", [(2, 1, 1), (2, 2, 1), (4, 1, 2)], ids=lambda s: "tp{}-pp{}-dp{}".format(*s))
def test_equal_to_one_process(layout: tuple[int, int, int]) -> None:
    """Norm gradients of all layers among them; `llama` and `gpt2` have nine tokens, which two ranks cannot share."""
    dp, pp = layout[2], layout[1]
    count = 4 if pp > 1 else 1
    strategy = {**ON, "num_microbatches": 4} if pp > 1 else ON
    cases = [
        Case(model=model, steps=3, samples=16, clip=0.3, strategy=strategy, parts=(dp, count))
        for model in ("gpt_tied", "gpt", "llama", "gpt2")
    ]
    check(layout, cases)


def test_batches_of_other_lengths() -> None:
    """7, 8, 5, 12 tokens in consecutive batches: those that cannot be shared are not cut along the sequence."""
    want = run_distributed(odd_lengths, 1, [None], init_process_group=False, timeout=60)[0][0]
    layouts = [{"tensor_parallel_size": 2, "pipeline_parallel_size": pp, **ON} for pp in (1, 2)]
    for layout in layouts:
        world = layout["tensor_parallel_size"] * layout["pipeline_parallel_size"]
        for rank in run_distributed(odd_lengths, world, [layout], init_process_group=False, timeout=120):
            losses, parameters = rank[0]
            assert losses == pytest.approx(want[0], rel=1e-9)
            assert len(losses) == len(LENGTHS)
            for name, parameter in want[1].items():
                assert relative_error(parameters[name], parameter) <= 1e-9, (layout, name)


def test_the_same_bytes_as_the_all_reduces() -> None:
    """Every all-reduce of an activation becomes a reduce-scatter and an all-gather of it: together as many bytes.

    More is sent only for what a cut residual needs: the gradients of norms and biases that are whole.
    """
    depth = 4
    options = {"tensor_parallel_size": 2, **OFF}
    cases = [(options, depth), ({**options, **ON}, depth)]
    plain, cut = run_distributed(count_all, 2, cases, init_process_group=False, timeout=120)[0]
    # forward: the embedding and 2 per block; backward: 2 per block and the head
    pairs = 2 * (1 + 2 * depth)
    assert select(plain, "tp", "all_reduce")[1] >= pairs * ACTIVATION
    moved: dict[str, Any] = {op: select(cut, "tp", op) for op in ("reduce_scatter", "all_gather")}
    positions = LENGTH * DIM  # the gradient of the position embeddings, of which every rank takes a part
    assert moved["reduce_scatter"][1] == moved["all_gather"][1] - positions == pairs * ACTIVATION
    wire = moved["reduce_scatter"][3] + moved["all_gather"][3]
    assert wire == (pairs * ACTIVATION * 2 + positions) * DOUBLE * (2 - 1) / 2
    losses = 3 * SAMPLES * LENGTH  # maximum, sum and target's logit per token
    assert select(cut, "tp", "all_reduce", "forward")[1] == losses
    # backward: all vectors that are whole, of all blocks, in one all-reduce
    assert select(cut, "tp", "all_reduce", "backward")[:2] == (1, depth * (2 * 2 + 2) * DIM + 2 * DIM)


def test_activations_of_norms_and_residuals_are_divided() -> None:
    """What autograd keeps between the pairs (inputs of norms, dropout masks) is half as much on two ranks.

    The inputs of column layers are kept whole: to gather them again in the backward would be one more all-gather each.
    """
    ((plain, inside), (cut, inside_cut)) = run_distributed(
        saved_activations, 2, [OFF, {**OFF, **ON}], init_process_group=False, timeout=120
    )[0]
    assert inside == inside_cut  # what lies between a column and a row layer was divided before
    inputs = (2 * 4 + 1) * ACTIVATION  # of qkv and up in every block, and of the head
    assert cut - inputs == (plain - inputs) / 2
