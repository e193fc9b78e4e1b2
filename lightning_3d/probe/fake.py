"""Parameters without data: the user's own module, its parameters FakeTensors, its batch real."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


class FakeParameters:
    """While open, every parameter of `module` is a FakeTensor parameter on `device`; nothing is copied.

    What does not derive from a parameter (batch, masks, positions, buffers) stays real, so code that looks at values
    of the batch works; buffers on the meta device have no values and become fake. Ties are kept. The CPU random state
    is put back at the end.

    Args:
        module: The user's module. A parameter that this rank does not hold (`local_shape` attribute) is probed with
            its local shape, not with the global one it shows.
        device: Device the parameters will have.
        buffers_of: Modules whose buffers are made fake too (those executed as one closed piece).

    Attributes:
        mode: The FakeTensorMode.
        names: `id(fake parameter)` -> name in `module`.
        swapped: (dictionary, key, original) of everything replaced.
    """

    def __init__(self, module: nn.Module, device: torch.device, buffers_of: Iterable[nn.Module] = ()) -> None:
        self.module, self.device, self._buffers_of = module, device, list(buffers_of)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.names: dict[int, str] = {}
        self.swapped: list[tuple[dict[str, Any], str, Any]] = []

    def __enter__(self) -> FakeParameters:
        names = {id(p): n for n, p in self.module.named_parameters()}
        fakes: dict[int, nn.Parameter] = {}
        closed = {id(m) for root in self._buffers_of for m in root.modules()}
        for module in self.module.modules():
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in fakes:
                    fakes[id(parameter)] = self._fake(parameter)
                self.swapped.append((module._parameters, key, parameter))
                module._parameters[key] = fakes[id(parameter)]
            if isinstance(module, nn.RNNBase):  # keeps a second list of its parameters
                self.swapped.append((module.__dict__, "_flat_weights", module._flat_weights))
                module.__dict__["_flat_weights"] = [module._parameters.get(n) for n in module._flat_weights_names]
            for key, buffer in module._buffers.items():
                if buffer is not None and (buffer.is_meta or id(module) in closed):
                    self.swapped.append((module._buffers, key, buffer))
                    module._buffers[key] = self._empty(buffer) if buffer.is_meta else self.mode.from_tensor(buffer)
        # `fakes` keeps the originals' ids alive through `swapped`
        self.names = {id(fakes[i]): name for i, name in names.items()}
        self._random_state = torch.get_rng_state()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for dictionary, key, original in reversed(self.swapped):
            dictionary[key] = original
        self.swapped.clear()
        torch.set_rng_state(self._random_state)

    def _fake(self, parameter: nn.Parameter) -> nn.Parameter:
        shape = getattr(parameter, "local_shape", None)
        if shape is None:
            data = self._empty(parameter)
        else:
            with self.mode:
                data = torch.empty(shape, dtype=parameter.dtype, device=self.device)
        fake = nn.Parameter(data, requires_grad=parameter.requires_grad)
        for attribute in ("placement", "global_shape"):
            if hasattr(parameter, attribute):
                setattr(fake, attribute, getattr(parameter, attribute))
        return fake

    def _empty(self, tensor: Tensor) -> Tensor:
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
