"""Do all ranks see the same?  One small comparison, before anything that would hang if they did not."""

from __future__ import annotations

import hashlib

import torch

from lightning_3d.comm import Communicator, ProcessCommunicator
from lightning_3d.errors import ConfigurationError


def agree(what: str, value: object, group: Communicator) -> None:
    """Raise the same error on every rank of `group` unless `repr(value)` is equal on all of them.

    Collectives: one all-gather of 8 bytes over `group`.

    Raises:
        ConfigurationError: The ranks differ; the message says which ones.
    """
    digest = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")
    device = group.device if isinstance(group, ProcessCommunicator) else torch.device("cpu")
    digests = [int(d) for d in group.all_gather(torch.tensor(digest, device=device))]
    if len(set(digests)) > 1:
        others = [rank for rank, d in enumerate(digests) if d != digests[0]]
        raise ConfigurationError(
            f"{what} differs between the ranks of one {group.axis} group: ranks {others} disagree with rank 0. All "
            "of them run the same step on the same batch, so it must take the same path. Look for a branch on the "
            "rank (`if self.global_rank == 0:`), for a loader that gives them other samples, or for randomness that "
            "is not seeded."
        )
