"""WHO runs, and from when on does a rank know its place?

The processes are there from `setup_environment` on. The mesh is made as soon as the layout is known: at that moment, or
(`layout="auto"`) in set-up, once it is chosen (docs/decisions/0013). `_stand` is the one place for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states

from lightning_3d.arguments import check_machines
from lightning_3d.asked import Asked
from lightning_3d.built import Built
from lightning_3d.comm import world_communicator
from lightning_3d.data import random_state_kept
from lightning_3d.layout import Layout
from lightning_3d.mesh import Mesh
from lightning_3d.observe.failure import FailureWatch
from lightning_3d.observe.hang import HangReport
from lightning_3d.settings import Settings


class Processes(Built):
    """Ranks, their places, and who looks after them."""

    _allow_cross_node: bool
    _asked: Asked
    _settings: Settings

    def _init_processes(self) -> None:
        self._watch: FailureWatch | None = None
        self._hang: HangReport | None = None
        self._looking = False

    # -- places
    def set_world_ranks(self) -> None:
        """Called while the Trainer is made: the earliest place where the number of processes is known."""
        super().set_world_ranks()
        layout = self._asked.on(self.num_nodes * self.num_processes)
        if layout is not None:
            self._layout = layout
            self._check_machines(layout)

    def _check_machines(self, layout: Layout) -> None:
        check_machines(layout, self.num_nodes, self.num_processes, self._allow_cross_node)

    def setup_environment(self) -> None:
        # Lightning seeds again here so that ranks agree; ours agree later, and one process would not have drawn this
        with random_state_kept(_collect_rng_states, _set_rng_states):
            super().setup_environment()
        if self._world is None:
            self._world = world_communicator(self.root_device)
        if self._layout is not None:
            self._stand(self._layout, self._settings)
        elif self._watch is None:
            self._watch_failures("its place is not chosen yet")

    def _stand(self, layout: Layout, settings: Settings) -> None:
        """The layout is known: what depends on it is made. Collective over all ranks."""
        self._layout, self._settings = layout, settings
        if self._mesh is None:
            self._mesh = Mesh(layout, self.root_device, settings.timeout, self._all_ranks.ledger)
            self._stop_watching()  # which did not know the place
        if self._watch is None:  # after a teardown, too
            at = self._mesh.at
            self._watch_failures(f"data-parallel replica {at.dp}, stage {at.pp}, tensor-parallel rank {at.tp}")
        self._module._device_mesh = self._mesh.device_mesh
        if layout.dp == 1:
            # every rank reads the user's loader as it is; Lightning would shuffle it
            trainer: Any = self._module.trainer
            trainer._accelerator_connector.use_distributed_sampler = False

    @contextmanager
    def _looking_at_loaders(self) -> Iterator[None]:
        """Open while the layout is chosen by a batch: the loaders are made as for one replica."""
        self._looking = self._mesh is None
        try:
            yield
        finally:
            self._looking = False

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas: scale learning rates and count samples with it, not with the world size."""
        return 1 if self._looking else self.layout.dp

    @property
    def data_parallel_rank(self) -> int:
        """Which replica this rank belongs to."""
        return 0 if self._looking else self.mesh.at.dp

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self._mesh.at.dp if self._mesh is not None else 0}

    # -- failures
    def _watch_failures(self, where: str) -> None:
        """A rank that fails ends all of them."""
        world = self._all_ranks
        if world.size == 1:
            return
        self._watch = FailureWatch.on_default_group(world.rank, where)
        self._watch.start()
        if self._settings.hang_report_after is not None and self._mesh is not None:
            self._hang = HangReport.on_default_group(self._mesh, self._settings.hang_report_after)
            self._hang.start()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if self._hang is not None:
            self._hang.stop()
            self._hang = None

    def on_exception(self, exception: BaseException) -> None:
        if self._watch is not None:
            self._watch.report(exception)
