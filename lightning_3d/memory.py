"""HOW MUCH memory does this rank hold for the model?"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.engine import Engine


def memory_report(engine: Engine, optimizers: Sequence[Optimizer]) -> dict[str, int]:
    """Bytes this rank holds: parameters, gradients (largest so far in full-size buffers, plus shards), optimizer.

    Float32 copies of parameters count as the optimizer's.
    """
    seen: set[int] = set()

    def storage(tensor: Tensor) -> int:
        data = tensor.untyped_storage()
        if data.data_ptr() in seen or not data.nbytes():
            return 0
        seen.add(data.data_ptr())
        return data.nbytes()

    zero = engine.zero
    storages = zero.storages if zero is not None else []
    parameters = sum(storage(s.flat) + storage(s.shard) for s in storages)
    in_buckets = {id(slot.parameter) for s in storages for slot in s.slots}
    parameters += sum(storage(p.data) for p in engine.held.values() if id(p) not in in_buckets)
    gradients = 0
    if zero is not None:
        held = [slot.held for s in storages for slot in s.slots]
        gradients = zero.gradient_peak + sum(storage(p.grad) for p in held if p.grad is not None)
        shown = zero.passive or zero.shown.wanted
        gradients += sum(storage(p.grad) for p in engine.held.values() if p.grad is not None and shown)
    state = sum(storage(v) for o in optimizers for s in o.state.values() for v in s.values() if isinstance(v, Tensor))
    state += sum(storage(s.master) for s in storages if s.has_master)
    return {"parameters": parameters, "gradients": gradients, "optimizer": state}
