"""The same model built as usual, and with values that come later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_3d.deferred import building


def both(make: Callable[[], Any]) -> tuple[Any, Any]:
    """Built as usual, and with values that come later; from one seed, with equal random states afterwards."""
    torch.manual_seed(0)
    want = make()
    after = torch.get_rng_state()
    torch.manual_seed(0)
    with building(torch.device("cpu")):
        got = make()
    assert torch.equal(torch.get_rng_state(), after)
    return got, want
