"""DO all ranks do the same now?  A program may run only if every rank runs its own, and all were proved together."""

from __future__ import annotations

import hashlib

import torch

from lightning_3d.comm import Communicator

_STEPS = 8
_EVERY = 16


def is_meeting(step: int) -> bool:
    """Steps at whose beginning the ranks compare what they could record: the first few, then every 16th.

    Counted alike on all ranks, so that nobody has to ask for it.
    """
    return 1 < step <= _STEPS or step % _EVERY == 0


def common(mine: list[tuple[str, str]], comm: Communicator) -> set[tuple[str, str]]:
    """What all ranks have in their list.

    Collectives: one exchange of small objects over `comm`.
    """
    lists = comm.all_gather_object(mine)
    return set.intersection(*map(set, lists))


def all_agree(ok: bool, what: str, comm: Communicator, device: torch.device) -> bool:
    """Every rank says yes to the same.

    Collectives: one all-gather of 8 bytes over `comm`.
    """
    number = int.from_bytes(hashlib.sha256(what.encode()).digest()[:7], "big") if ok else -1
    votes = [int(v) for v in comm.all_gather(torch.tensor(number, device=device))]
    return votes[0] != -1 and len(set(votes)) == 1
