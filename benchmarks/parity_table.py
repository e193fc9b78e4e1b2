"""Largest relative gradient error against one process, per model and layout; rewrites the table in docs/results.md.

The same runs as tests/strategy/test_parity.py: float64, SGD, every gradient gathered to its full shape, a real
`Trainer.fit` on gloo processes. `python -m benchmarks.parity_table`; about four minutes on two cores.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from lightning_3d.testing import preload, run_distributed
from tests.strategy.fits import differences, on_layout, one_process
from tests.strategy.test_parity import MODELS, case_for, layouts

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- parity -->", "<!-- /parity -->"


def main() -> None:
    preload("transformers", "tests.models", "tests.strategy.fits")
    lines = ["| layout | " + " | ".join(MODELS) + " |", "|---|" + "---|" * len(MODELS)]
    for layout in [*layouts(2), *layouts(4), *layouts(8)]:
        tp, pp, dp = layout
        cases = [case_for(model, layout, 1, 4) for model in MODELS]
        alone = [replace(case, strategy={}) for case in cases]
        want = run_distributed(one_process, 1, alone, init_process_group=False, timeout=120)[0]
        sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
        world = tp * pp * dp
        got = run_distributed(on_layout, world, cases, sizes, world, init_process_group=False, timeout=240)[0]
        worst = [
            max(error for name, error in differences(g, w).items() if name.startswith("gradients"))
            for g, w in zip(got, want, strict=True)
        ]
        lines.append(f"| tp{tp} pp{pp} dp{dp} | " + " | ".join(f"{error:.1e}" for error in worst) + " |")
        print(lines[-1], flush=True)
    page = ROOT / "docs" / "results.md"
    table = "\n".join([BEGIN, *lines, END])
    page.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: table, page.read_text(), flags=re.S))


if __name__ == "__main__":
    main()
