"""Run all benchmarks, print their tables, and write them to benchmarks/results.json and docs/benchmarks.md.

python benchmarks/run_all.py                       # all, a few minutes; writes
python benchmarks/run_all.py --only tensor_parallel --no-write
python benchmarks/run_all.py --smoke               # tiny sizes: do they run?  never writes
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # started as a file
    sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402

from benchmarks import (  # noqa: E402
    activation_memory,
    data_parallel,
    pipeline_bubble,
    pipeline_glue,
    setup_time,
    start_up_memory,
    tensor_overhead,
    tensor_parallel,
    zero_memory,
)
from benchmarks.common import Result, machine  # noqa: E402
from lightning_3d.observe import plain_table, show  # noqa: E402

BENCHMARKS: dict[str, Any] = {
    "data_parallel": data_parallel,
    "zero_memory": zero_memory,
    "tensor_parallel": tensor_parallel,
    "tensor_overhead": tensor_overhead,
    "pipeline_bubble": pipeline_bubble,
    "pipeline_glue": pipeline_glue,
    "activation_memory": activation_memory,
    "setup_time": setup_time,
    "start_up_memory": start_up_memory,
}
JSON, PAGE = Path("benchmarks/results.json"), Path("docs/benchmarks.md")


def run_benchmarks(names: Sequence[str], smoke: bool) -> dict[str, Result]:
    """Run them one after the other under a progress bar; print each one's tables when it is done."""
    console = Console(stderr=True)
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    results = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=sum(BENCHMARKS[n].PARTS for n in names))
        begun = 0

        def progress(what: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=what)
            begun += 1
            if not console.is_terminal:
                console.print(f"... {what}", highlight=False, soft_wrap=True)

        for name in names:
            load, began = os.getloadavg()[0], time.perf_counter()
            result = BENCHMARKS[name].run(smoke, progress)
            # what others did on the machine meanwhile cannot be told from what we did: only the load before is honest
            result.data |= {"load_before": load, "seconds": time.perf_counter() - began}
            results[name] = result
        bar.update(task, completed=begun, description="done")
    return results


def print_results(results: dict[str, Result], info: dict[str, Any]) -> None:
    """Tables that read without colour."""
    show(machine_text(info), "")
    for result in results.values():
        show(result.setting, "")
        for table in result.tables:
            show(
                plain_table(table.title, table.columns, table.rows, right=table.columns[1:], wrap=table.columns[:1]), ""
            )


def machine_text(info: dict[str, Any]) -> str:
    """One line about where the numbers come from."""
    return (
        f"{info['cpu']}, {info['cores']} cores, {info['backend']} on CPU, Python {info['python']}, "
        f"torch {info['torch']}, lightning {info['lightning']}, {info['date']}"
    )


def replace_section(page: str, name: str, text: str) -> str:
    """Put `text` between the markers of `name`.

    Raises:
        ValueError: The page has no such markers.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise ValueError(f"{PAGE} must have the markers {begin} and {end} exactly once.")
    return pattern.sub(lambda _: f"{begin}\n{text}\n{end}", page)


def write(results: dict[str, Result], info: dict[str, Any], root: Path) -> None:
    """Update results.json and the marked tables of the page; benchmarks that did not run keep theirs."""
    file, page = root / JSON, root / PAGE
    kept = json.loads(file.read_text()) if file.is_file() else {}
    text = page.read_text()
    for name, result in results.items():
        kept[name] = {"machine": info, **result.data}
        where = f"{machine_text(info)}; load of the machine before the run: {result.data['load_before']:.1f}."
        text = replace_section(text, name, f"{result.markdown()}\n\n{where}")
    file.write_text(json.dumps(kept, indent=1) + "\n")
    page.write_text(text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS), metavar="NAME")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, nothing is written")
    parser.add_argument("--no-write", action="store_true", help="only print")
    args = parser.parse_args(arguments)
    info = {**machine(), "date": time.strftime("%Y-%m-%d")}
    results = run_benchmarks(args.only, args.smoke)
    print_results(results, info)
    if not (args.smoke or args.no_write):
        write(results, info, ROOT)
        show(f"written: {JSON} and {PAGE}")


if __name__ == "__main__":
    main()
