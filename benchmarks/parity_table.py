"""Largest relative errors against one process, per model and layout, and per ZeRO stage; rewrites docs/results.md.

The same runs as tests/strategy/test_parity.py: float64, SGD, every gradient gathered to its full shape, a real
`Trainer.fit` on gloo processes. `python -m benchmarks.parity_table`; about twelve minutes on two cores.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

from lightning_3d.testing import preload, run_distributed
from tests.strategy.fits import Case, differences, on_layout, one_process
from tests.strategy.test_parity import MODELS, case_for, layouts

ROOT = Path(__file__).resolve().parent.parent


def layout_table() -> list[str]:
    """Gradients of the first step, in every layout of up to 8 ranks."""
    lines = ["| layout | " + " | ".join(MODELS) + " |", "|---|" + "---|" * len(MODELS)]
    for layout in [*layouts(2), *layouts(4), *layouts(8)]:
        cases = [case_for(model, layout, 1, 4) for model in MODELS]
        worst = [largest(found, "gradients") for found in errors(layout, cases)]
        lines.append(row(layout_name(layout), worst))
    return lines


def stage_table() -> list[str]:
    """Gradients of the first and parameters after the second step, two batches accumulated, clipped, by ZeRO stage."""
    shapes = [(1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 2)]
    lines = ["| stage, optimizer | " + " | ".join(map(layout_name, shapes)) + " |", "|---|" + "---|" * len(shapes)]
    for stage, optimizer in product(range(4), ("sgd", "adamw")):
        worst = []
        for shape in shapes:
            cases = [
                replace(c, clip=0.5, optimizer=optimizer, strategy={**c.strategy, "zero_stage": stage})
                for c in (case_for(model, shape, 2, 4) for model in MODELS)
            ]
            worst.append(max(largest(found, "") for found in errors(shape, cases)))
        lines.append(row(f"{stage}, {'SGD with momentum' if optimizer == 'sgd' else 'AdamW'}", worst))
    return lines


def errors(layout: tuple[int, int, int], cases: list[Case]) -> list[dict[str, float]]:
    """Relative errors of every case, against the same case in one process."""
    tp, pp, dp = layout
    world = tp * pp * dp
    alone = [replace(case, strategy={}) for case in cases]
    want = run_distributed(one_process, 1, alone, init_process_group=False, timeout=120)[0]
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    got = run_distributed(on_layout, world, cases, sizes, world, init_process_group=False, timeout=240)[0]
    return [differences(g, w) for g, w in zip(got, want, strict=True)]


def largest(found: dict[str, float], kind: str) -> float:
    return max(error for name, error in found.items() if name.startswith(kind))


def layout_name(layout: tuple[int, int, int]) -> str:
    return " ".join(f"{axis}{n}" for axis, n in zip(("tp", "pp", "dp"), layout, strict=True))


def row(name: str, values: list[float]) -> str:
    line = f"| {name} | " + " | ".join(f"{error:.1e}" for error in values) + " |"
    print(line, flush=True)
    return line


def main() -> None:
    preload("transformers", "tests.models", "tests.strategy.fits")
    page = ROOT / "docs" / "results.md"
    for marker, table in (("parity", layout_table), ("stages", stage_table)):
        begin, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
        new = "\n".join([begin, *table(), end])
        text, places = re.subn(f"{begin}.*?{end}", lambda _, new=new: new, page.read_text(), flags=re.S)
        if places != 1:
            raise ValueError(f"{page} must have the markers {begin} and {end} exactly once.")
        page.write_text(text)


if __name__ == "__main__":
    main()
