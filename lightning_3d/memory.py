"""HOW MUCH memory does this rank hold for the model?"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.engine import Engine


def memory_report(engine: Engine, optimizers: Sequence[Optimizer]) -> dict[str, int]:
    """Bytes this rank holds: parameters, gradients (largest so far in full-size buffers, plus shards), optimizer.

    Float32 copies of parameters count as the optimizer's. With `offload_optimizer`, what is in the host's memory
    (state, copies of parameters, their gradients) counts as offloaded, and not as the others.
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
    gradients = offloaded = 0
    on_host = {id(slot.held) for s in storages if s.host is not None for slot in s.slots}
    if zero is not None:
        held = [slot.held for s in storages for slot in s.slots]
        offloaded += sum(storage(p.grad) for p in held if p.grad is not None and id(p) in on_host)
        gradients = zero.gradient_peak + sum(storage(p.grad) for p in held if p.grad is not None)
        shown = zero.passive or zero.shown.wanted
        gradients += sum(storage(p.grad) for p in engine.held.values() if p.grad is not None and shown)
    state = 0
    for optimizer in optimizers:
        for parameter, values in optimizer.state.items():
            found = sum(storage(v) for v in values.values() if isinstance(v, Tensor))
            offloaded += found if id(parameter) in on_host else 0
            state += 0 if id(parameter) in on_host else found
    offloaded += sum(storage(s.master) for s in storages if s.host is not None)
    state += sum(storage(s.master) for s in storages if s.has_master)
    return {"parameters": parameters, "gradients": gradients, "optimizer": state, "offloaded": offloaded}
