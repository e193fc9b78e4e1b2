"""HOW MUCH memory does this rank hold for the model?"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.engine import Engine


def memory_report(engine: Engine, optimizers: Sequence[Optimizer]) -> dict[str, int]:
    """Bytes this rank holds: parameters, gradients (largest so far in full-size buffers, plus shards), optimizer."""
    seen: set[int] = set()

    def storage(tensor: Tensor) -> int:
        data = tensor.untyped_storage()
        if data.data_ptr() in seen or not tensor.numel():
            return 0
        seen.add(data.data_ptr())
        return data.nbytes()

    parameters = sum(storage(p.data) for p in engine.held.values())
    zero = engine.zero
    gradients = 0
    if zero is not None:
        gradients = zero.gradient_peak + sum(
            storage(b.published) for b in zero.buckets if b.published is not None and b.sharded
        )
        shown = zero.passive or zero.shown.wanted
        gradients += sum(storage(p.grad) for p in engine.held.values() if p.grad is not None and shown)
    state = sum(storage(v) for o in optimizers for s in o.state.values() for v in s.values() if isinstance(v, Tensor))
    return {"parameters": parameters, "gradients": gradients, "optimizer": state}
