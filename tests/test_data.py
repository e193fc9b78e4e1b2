"""Loaders follow the replica; the first batch is read without side effects."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states, pl_worker_init_function
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from lightning_3d.comm import ProcessCommunicator
from lightning_3d.data import (
    batch_digest,
    check_equal_evaluation,
    first_batch,
    fit_loader_to_replicas,
    random_state_kept,
)
from lightning_3d.errors import ConfigurationError
from lightning_3d.testing import run_distributed

DATA = TensorDataset(torch.arange(10))


def test_the_first_batch_of_every_kind_of_loader() -> None:
    plain = DataLoader(DATA, batch_size=3)
    assert first_batch(plain)[0].tolist() == [0, 1, 2]
    assert first_batch(DataLoader(DATA, batch_size=3, num_workers=2))[0].tolist() == [0, 1, 2]
    assert first_batch(DataLoader(DATA, batch_size=None))[0].tolist() == 0
    assert [b[0].tolist() for b in first_batch([plain, plain])] == [[0, 1, 2]] * 2
    assert first_batch(CombinedLoader({"a": plain}))["a"][0].tolist() == [0, 1, 2]

    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(range(5))

    assert first_batch(DataLoader(Stream(), batch_size=2)).tolist() == [0, 1]
    with pytest.raises(ConfigurationError, match="no batch"):
        first_batch(DataLoader(DATA, batch_size=11, drop_last=True))


def test_looking_at_a_shuffled_batch_leaves_the_random_state() -> None:
    loader = DataLoader(DATA, batch_size=3, shuffle=True)
    torch.manual_seed(1)
    with random_state_kept(_collect_rng_states, _set_rng_states):
        seen = first_batch(loader)[0].tolist()
        random.random(), np.random.rand()
    after = next(iter(loader))[0].tolist()
    torch.manual_seed(1)
    assert after == next(iter(loader))[0].tolist()
    assert len(seen) == 3


def test_workers_and_samplers_follow_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    sampler = DistributedSampler(DATA, num_replicas=4, rank=3, shuffle=False)
    loader = DataLoader(DATA, batch_size=2, sampler=sampler)
    fit_loader_to_replicas(loader, 1, 2, 4, pl_worker_init_function)
    assert list(sampler) == [1, 3, 5, 7, 9]
    assert loader.worker_init_fn.keywords == {"rank": 1}
    untouched = DistributedSampler(DATA, num_replicas=2, rank=0, shuffle=False)
    fit_loader_to_replicas(DataLoader(DATA, sampler=untouched), 1, 2, 4, pl_worker_init_function)
    assert untouched.rank == 0
    assert fit_loader_to_replicas([1, 2], 0, 1, 1, pl_worker_init_function) == [1, 2]


def test_digest() -> None:
    a = {"x": torch.ones(3, 2), "n": None, "t": ["p", 1]}
    b = {"x": torch.ones(3, 2), "n": None, "t": ["p", 1]}
    assert batch_digest(a) == batch_digest(b)
    b["x"][0, 0] = 2
    assert batch_digest(a) != batch_digest(b)
    assert batch_digest(torch.ones(4)) != batch_digest(torch.ones(2, 2))


def unequal_evaluation() -> list[str]:
    control = ProcessCommunicator("control", dist.group.WORLD, torch.device("cpu"))
    check_equal_evaluation([3, 4], control)
    texts = []
    for counts in ([3, 4 + control.rank], [5] * control.rank):
        try:
            check_equal_evaluation(counts, control)
        except ConfigurationError as error:
            texts.append(str(error))
    return texts


def test_replicas_that_gather_together_evaluate_equally_often() -> None:
    for loaders, none in run_distributed(unequal_evaluation, 2):
        assert "have 3 + 4, 3 + 5 batches to evaluate" in loaders
        assert "zero_stage=2" in loaders
        assert "have no, 5 batches" in none
