"""WHAT does a rank hold of the model, and with whom?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from torch import nn

from lightning_3d.comm import Communicator
from lightning_3d.tensor.placement import Placement
from lightning_3d.zero.units import Units


@dataclass(frozen=True)
class Share:
    """What a rank holds of the model, and with whom.

    Args:
        parameters: Name -> parameter, all this rank holds, in the module's order.
        names: `id(parameter)` -> name for every parameter of the module, also those other stages hold.
        counted: Names of the parameters this rank counts in norms.
        data: The data-parallel axis.
        control: The same axis on the CPU, for flags that Python needs.
        shared: (axis over the holders, names) of parameters several pipeline stages use.
        cut: Name -> how the parameter is cut, of those that are divided over tp, also what other stages hold.
        tensor: The tensor-parallel axis.
        parted: Other ranks of the replica hold other parameters (tensor or pipeline parallelism).
        windows: Name -> windows of this pipeline stage that use the parameter.
        units: Stage 3: what is gathered together.
    """

    parameters: Mapping[str, nn.Parameter]
    names: Mapping[int, str]
    counted: set[str]
    data: Communicator
    control: Communicator
    shared: Sequence[tuple[Communicator, Sequence[str]]] = ()
    cut: Mapping[str, Placement] = field(default_factory=dict)
    tensor: Communicator = field(default_factory=lambda: Communicator("tp"))
    parted: bool = False
    windows: Mapping[str, Set[int]] = field(default_factory=dict)
    units: Units | None = None
