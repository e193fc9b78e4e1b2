"""WHICH command?  `lightning-3d demo | verify | explain | plan | checkpoint | timeline`.

The commands only read their arguments here; what they do is in the rooms they call.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_3d.errors import ConfigurationError, near
from lightning_3d.layout import Layout
from lightning_3d.observe import (
    ascii_timeline,
    balance,
    bubble,
    check_picture,
    draw_timeline,
    load_traces,
    save_chrome_trace,
    show,
    timeline_of,
)
from lightning_3d.planner.command import add_arguments as add_plan_arguments
from lightning_3d.planner.command import run as run_plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code: 0 good, 1 the answer is no, 2 the question was wrong."""
    args = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except ConfigurationError as error:
        print(f"lightning-3d {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightning-3d", description="Tools around lightning_3d.ThreeDStrategy.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train a GPT in 8 processes and in one, and compare")
    demo.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for pictures and results")
    demo.add_argument("--steps", type=int, help="optimizer steps of each run")
    demo.add_argument("--fast", action="store_true", help="a tiny model and few steps")
    demo.set_defaults(run=_demo)

    for name, text in (
        ("verify", "prove that a module computes the same under a layout"),
        ("explain", "show how a module would be cut under a layout"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument(
            "--module",
            required=True,
            metavar="FILE.py:FACTORY",
            help="a function without arguments that returns (LightningModule, batch)",
        )
        command.add_argument("--layout", required=True, help="for example tp2-pp2 or tp2-pp2-dp2-zero1-1f1b")
        command.set_defaults(run=_verify if name == "verify" else _explain)

    plan = commands.add_parser("plan", help="choose a layout: which fit, how fast, and why")
    add_plan_arguments(plan)
    plan.set_defaults(run=_plan)

    checkpoint = commands.add_parser("checkpoint", help="look into a checkpoint, or export it")
    actions = checkpoint.add_subparsers(dest="action", required=True, metavar="ACTION")
    inspect = actions.add_parser("inspect", help="list what a checkpoint directory holds")
    inspect.add_argument("path", type=Path)
    inspect.set_defaults(run=_inspect)
    export = actions.add_parser("export", help="write one file that plain Lightning or safetensors can read")
    export.add_argument("path", type=Path)
    export.add_argument("out", type=Path, help="a .ckpt or .safetensors file")
    export.add_argument(
        "--prefix", default="", help="only weights that begin with it, without it (.safetensors; for example model.)"
    )
    export.set_defaults(run=_export)

    timeline = commands.add_parser("timeline", help="draw the recorded pipeline of a run")
    timeline.add_argument("folder", type=Path, help="folder with trace_rank*.json")
    timeline.add_argument("--step", type=int, help="step to draw (default: the one of median length)")
    timeline.add_argument("--loop", default="train", help="train, validate, ...")
    timeline.add_argument("--picture", type=Path, help="also draw to this .png or .svg")
    timeline.add_argument("--chrome", type=Path, help="also write all steps for a trace viewer (Perfetto)")
    timeline.add_argument("--width", type=int, help="columns of the text (default: 100, or the terminal's if fewer)")
    timeline.set_defaults(run=_timeline)
    return parser


def _demo(args: argparse.Namespace) -> int:
    from lightning_3d.demo import run_demo

    return 0 if run_demo(args.output, steps=args.steps, fast=args.fast) else 1


def _verify(args: argparse.Namespace) -> int:
    import lightning_3d

    layout = Layout.parse(args.layout)
    module, batch = load_factory(args.module)
    report = lightning_3d.verify(module, batch, layout)
    show(str(report))
    return 0 if report.ok else 1


def _explain(args: argparse.Namespace) -> int:
    import lightning_3d

    layout = Layout.parse(args.layout)
    module, batch = load_factory(args.module)
    show(str(lightning_3d.explain(module, batch, layout)))
    return 0


def _plan(args: argparse.Namespace) -> int:
    print(run_plan(args), end="", flush=True)
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from lightning_3d.checkpoint import inspect_checkpoint

    show(str(inspect_checkpoint(args.path)))
    return 0


def _export(args: argparse.Namespace) -> int:
    from lightning_3d.checkpoint import export_checkpoint

    if args.path.is_file():
        raise ConfigurationError(
            f"{str(args.path)!r} is one file, so it is a plain checkpoint already: load_from_checkpoint and "
            "trainer.fit(..., ckpt_path=...) read it as it is. export makes such a file of a checkpoint directory."
        )
    export_checkpoint(args.path, args.out, args.prefix)
    show(f"wrote {args.out}")
    return 0


def _timeline(args: argparse.Namespace) -> int:
    if args.picture is not None:
        check_picture(args.picture)
    traces = load_traces(args.folder)
    timeline = timeline_of(traces, args.step, args.loop)
    show(f"batch {timeline.step} of {timeline.layout}, {1000 * timeline.seconds:.1f} ms")
    show(ascii_timeline(timeline, args.width), str(bubble(timeline)), str(balance(traces, args.loop)))
    if args.picture is not None:
        show(f"drawn in {draw_timeline(timeline, args.picture)}")
    if args.chrome is not None:
        show(f"for a trace viewer: {save_chrome_trace(traces, args.chrome)}")
    return 0


def load_factory(text: str) -> tuple[Any, Any]:
    """Call the factory named by `path/file.py:function` (or `package.module:function`).

    Returns:
        The module and the batch that the function returns.

    Raises:
        ConfigurationError: There is no such file or function, or it returns something else.
    """
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise ConfigurationError(
            f"--module is {text!r}; it must name a function in a file, like examples/train_gpt.py:sample."
        )
    namespace = vars(_import(where))
    function = namespace.get(name)
    if not callable(function):
        functions = [n for n, v in namespace.items() if callable(v) and not n.startswith("_")]
        raise ConfigurationError(f"{where} has no function {name!r}.{near(name, functions)}")
    made = function()
    if not isinstance(made, tuple) or len(made) != 2:
        raise ConfigurationError(
            f"{text} returned {type(made).__name__}; it must return a pair (LightningModule, batch), the batch as the "
            "module's dataloader would give it."
        )
    return made


def _import(where: str) -> Any:
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"cannot import {where!r}: {error}. Is it installed, or a file FILE.py?"
            ) from error
    path = Path(where)
    if not path.is_file():
        raise ConfigurationError(f"there is no file {where!r} (looked in {Path.cwd()}).")
    # the file may import its neighbours, as it can when it is run as a script
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
