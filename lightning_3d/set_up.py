"""WHAT happens in `setup`?  The module is looked at, made equal on all ranks and cut; optimizers are divided."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.arguments import check_effect
from lightning_3d.choosing import Chosen, Question, check_can_be_cut, check_can_choose, choose, refusal
from lightning_3d.data import broadcast_batch, first_batch, random_state_kept
from lightning_3d.engine import Engine
from lightning_3d.errors import ConfigurationError
from lightning_3d.gradients import clip, norm_of, norms_of, norms_while_planned
from lightning_3d.layout import Layout
from lightning_3d.norms import GlobalGradNorm, GlobalTorchNorm
from lightning_3d.observe import show
from lightning_3d.observe.metrics import attach_metrics
from lightning_3d.observe.relay import Relay
from lightning_3d.observe.results import join_results
from lightning_3d.precision import make_clipping_global, make_scaler_global
from lightning_3d.probe import agree, metrics_alone
from lightning_3d.recompute import find_blocks
from lightning_3d.saving import Saving, unwrapped
from lightning_3d.settings import Settings
from lightning_3d.skipping import Skips, let_steps_be_skipped
from lightning_3d.start_up import (
    building_model,
    divides_parameters,
    finish,
    forget_values,
    materialize_meta,
    settle,
    warn_of_zeros,
    without_values,
)
from lightning_3d.stopping import may_stop, stop_together
from lightning_3d.suitability import (
    BACKWARD_HOOKS,
    GRADIENT_HOOKS,
    check_can_be_trained,
    check_is_made,
    check_is_python,
    check_is_whole,
    check_owns_its_memory,
    is_overridden,
    warn_of_views,
)
from lightning_3d.surroundings import Surroundings
from lightning_3d.tensor.recorded.eager import eager_meanwhile, run_eagerly_around
from lightning_3d.zero import check_offload, lend_swaps, release_former

_STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}


class SetUp(Saving):
    """From `connect` to the first step."""

    package: str
    chosen: Chosen | None = None
    """What `layout="auto"` came to, and why; there from `configure_optimizers` on."""
    _accumulating: bool
    _first_batch: Any = None
    _norms: list[GlobalTorchNorm | GlobalGradNorm]
    _planning: bool
    _relay: Relay | None
    _skips: Skips | None
    _surroundings: Surroundings

    def connect(self, model: Any) -> None:
        if not any(f"{c.__module__}".startswith(self.package + ".") for c in type(model).__mro__):
            raise ConfigurationError(
                f"{type(model).__name__} is no LightningModule of `{self.package}`, for which this {self!r} is."
            )
        super().connect(model)

    def setup(self, trainer: Any) -> None:
        """Plan, prove and cut the module the first time; connect optimizers and a checkpoint every time."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self._module
        self._surroundings.clear()
        fitting = trainer.state.fn == "fit"
        first = self._engine is None or self._engine.module is not module
        if first:
            self._prepare(module)
        if self._mesh is None:
            self._stand(*self._choose(trainer, module))
        if first:
            check_is_python(module, self.layout)
        if fitting:
            check_can_be_trained(module, self.layout, trainer.callbacks, self._settings.num_microbatches)
        if first:
            empty = without_values(module)
            self._equalize(module)
            warn_of_zeros(empty if self._pending is None else ())
        if fitting:
            self.setup_optimizers(trainer)
        if first:
            self._build(trainer, module)
        if self._hang is not None:
            self._hang.follow(self.engine.runner)
        if first and self._pending is not None and self._pending[1]:
            forget_values(module)
        if first and self.mesh.layout.zero < 3:
            finish(module, self.optimizers)
        if fitting:
            self._divide_optimizers(trainer, module)
        if first:
            finish(module, self.optimizers)  # in stage 3 what ZeRO did not take
        self.setup_precision_plugin()
        for wrapper in self._lightning_optimizers:
            lend_swaps(unwrapped(wrapper), wrapper)
        make_clipping_global(self.precision_plugin, self._clip, self._collect)
        make_scaler_global(self.precision_plugin, self.mesh.world, self.mesh.device, self._collect, self._unscaled)
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            # tensors made in inference mode (buffers, caches) could not be used by a later `fit`
            loop.inference_mode = False
        self._let_ranks_agree(trainer, module)
        self._load_pending(fitting)
        self._surroundings.begin(trainer, module, self.mesh.layout)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Around `configure_model`, and `Trainer.init_module`: large parameters get their values when they are cut."""
        with (
            super().tensor_init_context(empty_init),
            building_model(self._may_divide, self.root_device, self._world),
        ):
            yield

    @property
    def _may_divide(self) -> bool:
        """Whether a rank keeps less than the whole model. While the layout is not chosen it may."""
        if self._layout is None:
            return self.num_nodes * self.num_processes > 1
        return divides_parameters(self._layout)

    def _prepare(self, module: nn.Module) -> None:
        """A module this strategy has not seen: what does not depend on the layout."""
        layout = self._layout
        release_former(module.parameters())
        check_is_made(module)
        check_is_whole(module)
        if layout is None or layout.replica_size > 1 or (layout.dp > 1 and layout.zero):
            check_owns_its_memory(module)
            warn_of_views(module)
        self._check_order(module)
        materialize_meta(module, self._may_divide, self.root_device)
        self.precision_plugin.convert_module(module)
        self.model_to_device()

    def _divide_optimizers(self, trainer: Any, module: Any) -> None:
        """Over the replicas; hooks and functions of the user that look at gradients find whole ones."""
        watched = not module.automatic_optimization or is_overridden(module, trainer.callbacks, GRADIENT_HOOKS)
        keeps = trainer.accumulate_grad_batches > 1 and is_overridden(module, trainer.callbacks, BACKWARD_HOOKS)
        if keeps and self.mesh.layout.zero > 1:
            rank_zero_info(
                "lightning_3d: on_after_backward is overridden, so gradients are kept whole while batches are "
                "accumulated, as with zero_stage=1. Use on_before_optimizer_step to keep this rank's part only."
            )
        if self._settings.offload_optimizer:
            check_offload(self.optimizers, self.mesh.device, getattr(self.precision_plugin, "scaler", None))
        # by hand, batches are accumulated where `sync_grad=False`, and zeroed by whoever likes
        self._check_optimizers()
        self.engine.shard(self.optimizers, watched, keeps or not module.automatic_optimization)
        self._norms = [
            GlobalTorchNorm(partial(norm_of, self.engine)),
            GlobalGradNorm(self.package, lambda m, p: norms_of(self.engine, m, p, not self._accumulating)),
        ]
        for norm in self._norms:
            norm.install()
        self._skips = None
        if module.automatic_optimization and (self.engine.runner is not None or self.mesh.layout.dp == 1):
            self._skips = Skips(self.mesh.control)
            let_steps_be_skipped(trainer)

    def _let_ranks_agree(self, trainer: Any, module: Any) -> None:
        """On what Lightning's loops decide on each rank by itself."""
        if self.mesh.layout.dp > 1:
            join_results(trainer, module, self.mesh.control, self.reduce)
        if self.mesh.layout.world_size > 1 and may_stop(module, trainer.callbacks):
            stop_together(trainer, partial(self.reduce_boolean_decision, all=False))

    def _clip(self, optimizer: Any, max_norm: float) -> None:
        clip(self.engine, getattr(optimizer, "_optimizer", optimizer), max_norm)

    def _unscaled(self, optimizer: Optimizer, factor: Tensor) -> None:
        self._zero.unscaled(unwrapped(optimizer), factor)

    def _collect(self) -> None:
        if self._engine is not None and self._engine.zero is not None:
            self._zero.shown.collect()
            self._zero.after_closure()

    def _equalize(self, module: nn.Module) -> None:
        """Rank zero's weights, buffers and random state everywhere (scripts may not seed)."""
        if self.layout.dp > 1 and self.layout.zero == 3:
            _uncompile_around_blocks(module)
        if self._layer_sync is not None:
            nn.SyncBatchNorm.convert_sync_batchnorm(module, self.mesh.data.group)
        world = self.mesh.world
        settle(module, self.mesh.layout, world, self._settings.verify is True)
        _set_rng_states(world.broadcast_object(_collect_rng_states(include_cuda=False), 0))

    def _choose(self, trainer: Any, module: Any) -> tuple[Layout, Settings]:
        """The layout that was left open: the best one of those that this run could be set up with."""
        check_can_choose(trainer, module)
        self._first_batch = batch = self._peek(trainer, "training_step")
        question = Question(
            module,
            batch,
            self._all_ranks,
            self.root_device,
            machines=self.num_nodes,
            accumulate=trainer.accumulate_grad_batches,
            precision=str(self.precision_plugin.precision),
            asked=self._asked,
            settings=self._settings,
            refuses=refusal(
                self._check_machines,
                partial(check_effect, settings=dataclasses.replace(self._settings, verify="auto")),
                partial(check_is_python, module),
                partial(check_can_be_cut, batch),
                lambda layout: check_can_be_trained(module, layout, trainer.callbacks, self._settings.num_microbatches),
            ),
        )
        with (
            random_state_kept(_collect_rng_states, _set_rng_states),
            self._following_steps(),
            eager_meanwhile(module),
            metrics_alone(module),
            self.precision_plugin.forward_context(),
        ):
            self.chosen = choose(question)
        if self.is_global_zero:
            show(self.chosen.text)
        return self.chosen.layout, self.chosen.settings(self._settings)

    @property
    def choice(self) -> tuple[Layout, Settings, Chosen | None]:
        """What another process needs to know of the layout."""
        return self.layout, self._settings, self.chosen

    @choice.setter
    def choice(self, found: tuple[Layout, Settings, Chosen | None]) -> None:
        self._layout, self._settings, self.chosen = found

    def freeze(self, path: str | Path) -> Path:
        """Write what `layout="auto"` came to as a file that LightningCLI takes (`fit --config FILE`); see `chosen`.

        Args:
            path: A .yaml file; rank zero writes it.

        Raises:
            ConfigurationError: Nothing was chosen (yet).
        """
        if self.chosen is None:
            raise ConfigurationError(
                "there is no choice to freeze: it is made in set-up (from on_fit_start on), with layout='auto'."
            )
        file = Path(path)
        if self.is_global_zero:
            where = "lightning_3d" if self.package == "lightning.pytorch" else "lightning_3d.pytorch_lightning"
            self.chosen.write(file, f"{where}.ThreeDStrategy")
        return file

    def _check_order(self, module: nn.Module) -> None:
        """Ranks pair parameters, buffers and optimizer groups by their order."""
        tensors = [*module.named_parameters(), *module.named_buffers()]
        try:
            agree("the order of parameters", [(n, tuple(x.shape)) for n, x in tensors], self._all_ranks)
        except ConfigurationError:
            raise ConfigurationError(
                f"the parameters and buffers of {type(module).__name__} are registered in another order, or with other "
                "shapes, on some ranks than on rank 0, so weights would change places. Look for modules made while "
                "going through a set (its order differs between processes), and for code that depends on the rank."
            ) from None

    def _check_optimizers(self) -> None:
        """Ranks reduce together what their optimizers train; the order is each rank's own.

        Groups that are added during training are compared when the next epoch begins, and at the end.

        Collectives: one all-gather of 8 bytes over all ranks.
        """
        zero, names, parameters = self.engine.zero, self.engine.names, self.engine.parameters
        trained: list[tuple[int, str]] = []
        for index, optimizer in enumerate(map(unwrapped, self.optimizers)):
            if zero is not None:
                found = [name for group in zero.names_of(optimizer) for name in group]
            else:
                found = [names[id(p)] for g in optimizer.param_groups for p in g["params"] if id(p) in names]
            trained += [(index, name) for name in found if parameters[name].requires_grad]
        trained.sort()
        try:
            agree("what optimizers train", trained, self.mesh.world)
        except ConfigurationError:
            ranks = self.mesh.world.all_gather_object(trained)
            index, name = next(each for found in ranks for each in found if any(each not in other for other in ranks))
            having = [rank for rank, found in enumerate(ranks) if (index, name) in found]
            raise ConfigurationError(
                f"optimizer {index} trains parameter {name!r} on ranks {having} and not on the other ones, so they "
                "would wait for each other's gradients. All ranks must optimize the same parameters. Look in "
                "configure_optimizers, where groups are added and where requires_grad is set, for code that depends "
                "on the rank or on random numbers that are not seeded."
            ) from None

    def _build(self, trainer: Any, module: Any) -> None:
        settings = dataclasses.replace(self._settings, forward_context=lambda: self.precision_plugin.forward_context())
        engine = Engine(module, self.mesh, settings)
        step_name = _STEPS[trainer.state.fn.value]
        batch = self._peek(trainer, step_name) if engine.layout.replica_size > 1 else None
        self._first_batch = None
        with self._following_steps():
            engine.cut(step_name, batch)
        rank_zero_info(engine.summary())
        self._engine = engine
        self._relay = Relay(self.mesh.replica, self.mesh.replica_control, self.mesh.device)
        attach_metrics(module, self.mesh, self._relay)

    @contextmanager
    def _following_steps(self) -> Iterator[None]:
        """Steps of the user run without values meanwhile: nothing is stepped, and norms are those of fakes."""
        norms = GlobalGradNorm(self.package, norms_while_planned)
        self._planning = True
        norms.install()
        try:
            yield
        finally:
            norms.remove()
            self._planning = False

    def _peek(self, trainer: Any, step_name: str) -> Any:
        """The first batch of rank zero, moved and converted as Lightning will, the same on all ranks."""
        if self._first_batch is not None:  # the layout was chosen by it
            return self._first_batch
        loop = getattr(trainer, f"{trainer.state.fn.value}_loop")
        with random_state_kept(_collect_rng_states, _set_rng_states), self._looking_at_loaders():
            loaders = loop._data_source.dataloader()
            if step_name != "training_step" and isinstance(loaders, Sequence):
                loaders = loaders[0]
            batch = first_batch(loaders)
        batch = broadcast_batch(batch, self._all_ranks)
        batch = self.precision_plugin.convert_input(batch)
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self.batch_to_device(batch, dataloader_idx=0)

    @property
    def optimizers(self) -> list[Optimizer]:
        found: list[Optimizer] = super().optimizers
        return found

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        """Lightning's loop sets them once per run; `trainer.optimizers = ...` in a hook comes here, too."""
        if not {id(unwrapped(each)) for each in optimizers} <= {id(unwrapped(each)) for each in self.optimizers}:
            self._check_replaceable()
        lightnings: Any = super(SetUp, type(self)).optimizers
        lightnings.fset(self, optimizers)

    def _check_replaceable(self) -> None:
        if not self._is_set_up or self._engine is None or self._engine.zero is None:
            return
        layout = self.mesh.layout
        shared = layout.dp > 1 and layout.zero > 0
        if shared or any(slot.held is not slot.parameter for slot in self._zero.slots.values()):
            why = f"zero_stage={layout.zero} has divided their state" if shared else "they step on copies of parameters"
            raise ConfigurationError(
                f"the optimizers were replaced while fit runs, but {why} at its start, and new ones would get no "
                "gradients. Change the ones there are: learning rates and other numbers in `optimizer.param_groups`, "
                "`optimizer.add_param_group(...)`, `optimizer.state.clear()` to begin anew. Or call trainer.fit once "
                "per optimizer, or use zero_stage=0 (with precision='bf16-true' also master_weights=False)."
            )

    def setup_optimizers(self, trainer: Any) -> None:
        self._check_replaceable()
        if self._engine is not None and self._engine.zero is not None:
            self._zero.release()
        super().setup_optimizers(trainer)


def _uncompile_around_blocks(module: nn.Module) -> None:
    blocks = [module.get_submodule(name) for name in find_blocks(module)]
    names = run_eagerly_around(module, blocks)
    if names:
        rank_zero_warn(
            f"{', '.join(names)} was compiled with all its blocks; with zero_stage=3 it runs uncompiled, since "
            "parameters come and go between blocks. Compile the blocks: block.compile()."
        )
