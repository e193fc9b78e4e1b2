"""HOW does a user plan the model and data of a LightningCLI?  `python train.py plan --config mine.yaml`.

The model is built without values, the data give one batch, and both go through the planner's probe. What comes out can
be written as a file that `fit --config` takes. Nothing is trained, and no GPU is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jsonargparse import class_from_function  # type: ignore[attr-defined]
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI

from lightning_3d.arguments import check_effect
from lightning_3d.asked import Asked
from lightning_3d.choosing import (
    check_can_be_cut,
    check_steps_itself,
    given_by,
    plan_that_can_be_cut,
    refusal,
)
from lightning_3d.data import first_batch
from lightning_3d.deferred import building, reading_later
from lightning_3d.errors import ConfigurationError
from lightning_3d.pipeline import check_cut
from lightning_3d.planner import Plan, this_machine
from lightning_3d.planner.cluster import Cluster, cluster_of_file
from lightning_3d.planner.pricing import Priced
from lightning_3d.planner.recipes import recipe_of_run
from lightning_3d.planner.search import HEADROOM
from lightning_3d.planner.strategy_file import check_writable, write_strategy
from lightning_3d.planner.tables import explain_text, plan_text
from lightning_3d.planner.user_model import chain_of_module
from lightning_3d.settings import Settings
from lightning_3d.suitability import check_can_be_trained, check_is_python

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI as _Base
else:
    _Base = object

_CPU = torch.device("cpu")
_WITHOUT: dict[str, Any] = {
    "accelerator": "cpu",
    "barebones": False,
    "callbacks": [],
    "devices": 1,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "logger": False,
    "num_nodes": 1,
    "plugins": None,
    "precision": None,
    "profiler": None,
    "strategy": "auto",
    "sync_batchnorm": False,
}
"""What the Trainer of a plan has, whatever the configuration says: it is only there for hooks that look at it."""


@dataclass(frozen=True)
class Configured:
    """What the configuration says of the run that is planned.

    Attributes:
        strategy: Of the Trainer; sizes it gives stay given if its layout is "auto".
        precision, devices, num_nodes: Of the Trainer.
        callbacks: Of the Trainer.
        class_path: Of the strategy to write down.
    """

    strategy: Any
    precision: Any
    devices: Any
    num_nodes: int
    callbacks: tuple[Any, ...]
    class_path: str

    @property
    def asked(self) -> Asked:
        found = getattr(self.strategy, "_asked", None)
        return found if found is not None and found.automatic else Asked({}, automatic=True)

    @property
    def settings(self) -> Settings:
        """The strategy's; where it gives sizes that are planned anew, only what counts for memory."""
        found: Settings = getattr(self.strategy, "_settings", Settings())
        if getattr(self.strategy, "_asked", self.asked).automatic:
            return found
        return Settings(
            master_weights=found.master_weights,
            float32_gradients=found.float32_gradients,
            offload_optimizer=found.offload_optimizer,
        )

    @property
    def unified_precision(self) -> str:
        """As plugins call it: "bf16-mixed" for "bf16"."""
        text = str(self.precision or 32)
        return text if "-" in text else f"{text}-{'mixed' if text in ('16', 'bf16') else 'true'}"

    def device_count(self) -> int:
        """How many devices of this machine it runs on.

        Raises:
            ConfigurationError: On several machines: only this one can be measured.
        """
        if self.num_nodes > 1:
            raise ConfigurationError(
                f"the run is configured for {self.num_nodes} machines (trainer.num_nodes), and only this one can be "
                "measured. Describe them: --gpu a100-80gb --gpus 64 --gpus_per_node 8 --internode hdr200x8, or "
                "--cluster FILE.yaml (lightning-3d plan --calibrate writes one)."
            )
        devices = self.devices
        if isinstance(devices, (list, tuple)):
            return len(devices)
        text = str(devices)
        if text.isdigit() and int(text) > 0:
            return int(text)
        return max(1, torch.cuda.device_count())


class Planning:
    """What the Trainer of the command `plan` can do besides; its arguments are those of the command."""

    configured: Configured
    accumulate_grad_batches: int

    def plan(
        self,
        model: Any,
        datamodule: Any = None,
        gpus: int | None = None,
        gpu: str | None = None,
        gpus_per_node: int = 0,
        internode: str | None = None,
        cluster: str | None = None,
        headroom: float = HEADROOM,
        top: int = 12,
        explain: str | None = None,
        html: str | None = None,
        yaml: str | None = None,
    ) -> None:
        """Choose the layout for this model and its data: which fit, how fast, and why.

        Args:
            model: The LightningModule.
            datamodule: Its data, if they are not the model's own.
            gpus: How many GPUs; default: as configured.
            gpu: Which (a100-80gb, h100, b200, ...); default: this machine, measured in a few seconds.
            gpus_per_node: How many a machine has; 0: as usual for this GPU.
            internode: Network between machines, for example hdr200x8, ndr400x8, roce100x4.
            cluster: Instead, a YAML file that describes the machines.
            headroom: Share of the memory that must stay free.
            top: How many layouts are shown.
            explain: Price one layout, for example tp8-pp2-zero1-mbs2-full-sp.
            html: Also write a page with charts.
            yaml: Also write the best layout as a file for fit --config.

        Raises:
            ConfigurationError: The step cannot be looked at, or nothing fits.
        """
        if yaml is not None:
            check_writable(Path(yaml))
        where = _cluster(self.configured, gpus, gpu, gpus_per_node, internode, cluster)
        answer = _planned(self, model, datamodule, where, top, headroom)
        said = explain_text(answer.explain(explain), answer.best) if explain is not None else plan_text(answer)
        print(said, end="", flush=True)
        if html is not None:
            print(f"\nwritten: {answer.html(html)}")
        if yaml is not None:
            sizes = {"devices": where.gpus_per_node, "num_nodes": where.nodes}
            write_strategy(Path(yaml), answer.strategy_arguments(), self.configured.class_path, **sizes)
            print(f"\nwritten: {yaml}; use it: fit --config ... --config {yaml}")


class ThreeDCLIBase(_Base):
    """What both classes share; see `lightning_3d.ThreeDCLI`."""

    module_class: Any = LightningModule
    strategy_path = "lightning_3d.ThreeDStrategy"

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, and `plan`."""
        return {**LightningCLI.subcommands(), "plan": {"model", "datamodule"}}

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """A command is a method of the Trainer's class; what runs `fit` stays the user's class."""
        plain = self.trainer_class
        self.trainer_class = self._planning_class = _with_plan(plain)
        try:
            super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
        finally:
            self.trainer_class = plain

    def instantiate_classes(self) -> None:
        """For a plan the model is built without values."""
        if self.subcommand == "plan":
            self.parser.add_instantiator(_without_values, self.module_class, subclasses=True, prepend=True)
        super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """For a plan, one that needs nothing and trains nothing."""
        if self.subcommand != "plan":
            return super().instantiate_trainer(**kwargs)
        config = {**self._get(self.config_init, "trainer", default={}), **kwargs}
        trainer = self._planning_class(**{**config, **{k: v for k, v in _WITHOUT.items() if k in config}})
        callbacks = config.get("callbacks") or ()
        trainer.configured = Configured(
            config.get("strategy"),
            config.get("precision"),
            config.get("devices", "auto"),
            config.get("num_nodes", 1),
            tuple(callbacks) if isinstance(callbacks, (list, tuple)) else (callbacks,),
            self.strategy_path,
        )
        return trainer

    def plan(self, **arguments: Any) -> None:
        """Run the command; a wrong question gets an answer in place of a traceback."""
        try:
            self.trainer.plan(**arguments)  # type: ignore[attr-defined]
        except ConfigurationError as error:
            print(f"plan: {error}", file=sys.stderr)
            raise SystemExit(2) from None


class ThreeDCLI(ThreeDCLIBase, LightningCLI):
    """LightningCLI with one command more: `plan` chooses the layout for the configured model and data.

    Example::

        # train.py
        from lightning_3d import ThreeDCLI
        ThreeDCLI(MyModule, MyData)

        $ python train.py plan --config mine.yaml --gpu h100 --gpus 64 --yaml layout.yaml
        $ python train.py fit --config mine.yaml --config layout.yaml
    """


def _with_plan(trainer_class: Any) -> Any:
    """The Trainer's class (or what makes one), with the method `plan`."""
    base = trainer_class if isinstance(trainer_class, type) else class_from_function(trainer_class)
    return type(base.__name__, (Planning, base), {"__module__": base.__module__, "__doc__": base.__doc__})


def _without_values(class_type: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("applied_instantiation_links", None)
    with _no_values():
        return class_type(*args, **kwargs)


@contextmanager
def _no_values() -> Iterator[None]:
    with building(_CPU), reading_later():
        yield


def _cluster(
    configured: Configured,
    gpus: int | None,
    gpu: str | None,
    gpus_per_node: int,
    internode: str | None,
    file: str | None,
) -> Cluster:
    """Where the run will be: a file, a GPU of the table, or this machine.

    Raises:
        ConfigurationError: Something is missing.
    """
    if file is not None:
        said = {"gpu": gpu, "gpus_per_node": gpus_per_node, "internode": internode}
        return cluster_of_file(file, gpus, [name for name, value in said.items() if value], "--{}".format)
    if gpu is None:
        return this_machine(gpus or configured.device_count())
    count = gpus if gpus is not None else configured.device_count()
    return Cluster.of(gpu, count, gpus_per_node, internode)


def _planned(trainer: Any, model: Any, datamodule: Any, cluster: Cluster, keep: int, headroom: float) -> Plan:
    check_steps_itself(model)
    batch = _batch_of(trainer, model, datamodule)
    configured: Configured = trainer.configured
    settings, asked = configured.settings, configured.asked
    checks = refusal(
        partial(check_effect, settings=settings),
        partial(check_is_python, model),
        partial(check_can_be_cut, batch),
        lambda layout: check_can_be_trained(model, layout, configured.callbacks, settings.num_microbatches),
    )

    def check(best: Priced) -> None:
        candidate = best.run.candidate
        check_cut(model, batch, candidate.layout, candidate.microbatches, settings.pipeline_split)

    products, recipe = recipe_of_run(
        configured.unified_precision, settings.masters, settings.float32_gradients, settings.offload_optimizer
    )
    chain = chain_of_module(model, batch)
    return plan_that_can_be_cut(
        chain,
        cluster,
        given_by(asked, settings, chain.samples, checks),
        check,
        precision=products,
        recipe=recipe,
        accumulate=trainer.accumulate_grad_batches,
        keep=keep,
        headroom=headroom,
    )


def _batch_of(trainer: Any, model: Any, datamodule: Any) -> Any:
    """The first batch of the training loader, after the hooks of a run up to it."""
    owners = [owner for owner in (datamodule, model) if owner is not None]
    for owner in owners:
        owner.trainer = trainer
    for owner in owners:
        owner.prepare_data()
    for owner in owners:
        owner.setup("fit")
    with _no_values():
        model.configure_model()
    loaders = owners[0].train_dataloader()
    batch = first_batch(loaders)
    for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
        own = [owner for owner in owners if "DataHooks" not in getattr(owner, hook).__qualname__]
        batch = getattr(own[0], hook)(batch, 0) if own else batch
    return batch
