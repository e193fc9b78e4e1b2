"""A step that is only tried cannot wait for others: every collective of torch's is refused, by whatever name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_3d.errors import ConfigurationError
from lightning_3d.mesh import world_communicator
from lightning_3d.probe import is_tried_alone, tried_alone
from lightning_3d.testing import run_distributed


def calls() -> dict[str, Callable[[], Any]]:
    x, two = torch.ones(2), torch.ones(4)
    both = [torch.ones(2), torch.ones(2)]
    return {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather(both, x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(two, x),
        "all_gather_object": lambda: dist.all_gather_object([None, None], 1),
        "all_to_all_single": lambda: dist.all_to_all_single(x, x.clone()),
        "broadcast": lambda: dist.broadcast(x, 0),
        "broadcast_object_list": lambda: dist.broadcast_object_list([1], 0),
        "reduce": lambda: dist.reduce(x, 0),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(x, two),
        "gather": lambda: dist.gather(x, both if dist.get_rank() == 0 else None),
        "scatter": lambda: dist.scatter(x, both if dist.get_rank() == 0 else None),
        "barrier": dist.barrier,
        "monitored_barrier": dist.monitored_barrier,
        "send": lambda: dist.send(x, 1 - dist.get_rank()),
        "recv": lambda: dist.recv(x, 1 - dist.get_rank()),
        "recv from anybody": lambda: dist.recv(x),
    }


def refused() -> int:
    """How many were refused; rank 1 tries nothing, so that what goes through would wait."""
    tried = calls() if dist.get_rank() == 0 else {}
    for call in tried.values():
        with tried_alone(), pytest.raises(ConfigurationError, match=r"self\.all_gather"):
            call()
    assert not is_tried_alone()
    world = world_communicator(torch.device("cpu"))
    with tried_alone():
        assert is_tried_alone()
        assert world.all_reduce(torch.ones(1)).item() == 2  # the library's own go on
    dist.all_reduce(torch.ones(1))  # and afterwards the user's
    return len(tried)


def test_collectives_of_torch_are_refused() -> None:
    assert run_distributed(refused, 2, timeout=30) == [16, 0]
