"""WHAT has been built for this run?  The layout and the mesh once they are known, the engine once the module is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_3d.comm import ProcessCommunicator
from lightning_3d.engine import Engine
from lightning_3d.errors import ConfigurationError
from lightning_3d.layout import Layout
from lightning_3d.mesh import Mesh
from lightning_3d.zero import Zero

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object

_CHOSEN_LATER = (
    "layout='auto' is chosen in set-up, from the model and its first batch, so the sizes and the number of replicas "
    "are not known yet: they are from configure_optimizers on. If setup(), configure_model() or code before fit needs "
    "them, give the sizes (a run with 'auto' prints them)."
)


class Built(_Base):
    """The base of the strategy's parts."""

    _layout: Layout | None = None
    _world: ProcessCommunicator | None = None
    _mesh: Mesh | None = None
    _engine: Engine | None = None

    @property
    def layout(self) -> Layout:
        """The sizes of all axes; with `layout="auto"` there once they are chosen."""
        if self._layout is None:
            raise ConfigurationError(_CHOSEN_LATER)
        return self._layout

    @property
    def mesh(self) -> Mesh:
        """This rank's place and communicators; there once the processes run and the layout is known."""
        if self._mesh is None:
            raise ConfigurationError(
                "strategy.mesh is there only once the Trainer has started its processes (in setup hooks and later)."
                if self._layout is not None
                else _CHOSEN_LATER
            )
        return self._mesh

    @property
    def _all_ranks(self) -> ProcessCommunicator:
        """All processes; there before the mesh is."""
        assert self._world is not None
        return self._world

    @property
    def engine(self) -> Engine:
        """What was built for the module; there after set-up."""
        if self._engine is None:
            raise ConfigurationError("nothing is planned yet: this is there from on_fit_start on.")
        return self._engine

    @property
    def _zero(self) -> Zero:
        """There while fitting."""
        assert self.engine.zero is not None
        return self.engine.zero

    @property
    def _module(self) -> LightningModule:
        """The user's module, which the Trainer has connected."""
        assert self.lightning_module is not None
        return self.lightning_module
