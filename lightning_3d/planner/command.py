"""WHAT does `lightning-3d plan` do?  Arguments to a plan, and the plan to text, a price, or a page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightning_3d.errors import ConfigurationError
from lightning_3d.planner.cluster import Cluster, cluster_of_file
from lightning_3d.planner.constants import SOFTWARE
from lightning_3d.planner.planning import plan
from lightning_3d.planner.recipes import RECIPES
from lightning_3d.planner.search import HEADROOM
from lightning_3d.planner.strategy_file import check_writable, write_strategy
from lightning_3d.planner.tables import explain_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    what = parser.add_argument_group("what is trained")
    what.add_argument("--model", help="a name (llama3-70b, gpt3-175b, ...) or the path of a Hugging Face config.json")
    what.add_argument(
        "--module",
        metavar="FILE.py:FACTORY",
        help="instead: a function without arguments that returns (LightningModule, batch); it is run without values",
    )
    what.add_argument("--global-batch", type=int, help="samples of an optimizer step, over all GPUs")
    what.add_argument("--seq", type=int, help="tokens of a sample")
    what.add_argument("--precision", default="bf16", help="fp32, bf16, fp16, fp8, fp4 (default: bf16)")
    what.add_argument("--recipe", help=f"bytes per parameter: {', '.join(RECIPES)}")
    what.add_argument("--software", default="lightning_3d", help=f"whose way of running: {', '.join(SOFTWARE)}")
    where = parser.add_argument_group("where")
    where.add_argument("--gpus", type=int, help="how many GPUs")
    where.add_argument("--gpu", help="which: a100-80gb, h100, b200, ...")
    where.add_argument("--gpus-per-node", type=int, default=0, help="how many a machine has (default: usual for it)")
    where.add_argument("--internode", help="network between machines, for example hdr200x8, ndr400x8, roce100x4")
    where.add_argument("--cluster", type=Path, metavar="FILE.yaml", help="instead: a description of the machines")
    where.add_argument("--headroom", type=float, default=HEADROOM, help="share of the memory that must stay free")
    out = parser.add_argument_group("what is shown")
    out.add_argument("--explain", metavar="LAYOUT", help="price one layout, for example tp8-pp2-zero1-mbs2-full-sp")
    out.add_argument("--top", type=int, default=12, help="how many layouts")
    out.add_argument("--html", type=Path, metavar="FILE.html", help="also write a page with charts")
    out.add_argument("--yaml", type=Path, metavar="FILE.yaml", help="also write the strategy's arguments")
    out.add_argument(
        "--calibrate", type=Path, nargs="?", const=Path("cluster.yaml"), metavar="FILE.yaml",
        help="measure this machine for half a minute and write its description (default: cluster.yaml)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> str:
    """The text to print.

    Raises:
        ConfigurationError: A flag is missing or wrong.
    """
    if args.calibrate is not None:
        from lightning_3d.planner.calibrate import calibrate

        return calibrate(args.calibrate)
    if args.yaml is not None:
        check_writable(args.yaml)
    answer = plan(
        _model(args),
        _cluster(args),
        global_batch=_needed(args, "global_batch"),
        seq=args.seq,
        precision=args.precision,
        recipe=args.recipe,
        software=args.software,
        keep=args.top,
        headroom=args.headroom,
    )
    said = explain_text(answer.explain(args.explain), answer.best) if args.explain is not None else str(answer)
    if args.html is not None:
        said += f"\nwritten: {answer.html(args.html)}\n"
    if args.yaml is not None:
        write_strategy(args.yaml, answer.strategy_arguments(), "lightning_3d.ThreeDStrategy")
        said += f"\nwritten: {args.yaml}\n"
    return said


def _model(args: argparse.Namespace) -> Any:
    if (args.model is None) == (args.module is None):
        raise ConfigurationError("give either --model NAME (or a config.json) or --module FILE.py:FACTORY.")
    if args.model is not None:
        return args.model
    from lightning_3d.cli import load_factory

    return load_factory(args.module)


def _cluster(args: argparse.Namespace) -> Cluster:
    if args.cluster is not None:
        said = [name for name in ("gpu", "gpus_per_node", "internode") if getattr(args, name)]
        return cluster_of_file(args.cluster, args.gpus, said, _flag)
    return Cluster.of(_needed(args, "gpu"), _needed(args, "gpus"), args.gpus_per_node, args.internode)


def _needed(args: argparse.Namespace, name: str) -> Any:
    value = getattr(args, name)
    if value is None:
        raise ConfigurationError(f"{_flag(name)} is missing; lightning-3d plan --help lists the flags.")
    return value


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
