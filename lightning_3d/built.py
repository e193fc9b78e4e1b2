"""WHAT has been built for this run?  The mesh once the processes run, the engine once the module is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_3d.engine import Engine
from lightning_3d.errors import ConfigurationError
from lightning_3d.mesh import Mesh
from lightning_3d.zero import Zero

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


class Built(_Base):
    """The base of the strategy's parts."""

    _mesh: Mesh | None = None
    _engine: Engine | None = None

    @property
    def mesh(self) -> Mesh:
        """This rank's place and communicators; there once the processes run."""
        if self._mesh is None:
            raise ConfigurationError(
                "strategy.mesh is there only once the Trainer has started its processes (in setup hooks and later)."
            )
        return self._mesh

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
