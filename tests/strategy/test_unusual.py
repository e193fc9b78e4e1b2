"""Legal code around optimizers that is easily broken: as in one process, or a refusal (S5, and cases of our own)."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_3d.testing import DistributedError, preload, relative_error
from tests.strategy import unusual
from tests.strategy.test_cases import launch, sizes

preload("tests.models", "tests.strategy.unusual")

SMALL = {"bucket_size_mb": 0.002}
STAGES = [sizes(zero_stage=stage, **SMALL) for stage in (1, 2, 3)]
ON_HOST, PIPELINE = sizes(offload_optimizer=True, **SMALL), sizes(1, 2, num_microbatches=2)
UNCUT = sizes(1, 2, num_microbatches=1)
CASES: dict[str, list[dict[str, Any]]] = {
    "InTwoOptimizers": [*STAGES, ON_HOST],
    "WithoutSync": STAGES[1:],
    "Free": [STAGES[0], STAGES[2], ON_HOST, PIPELINE],
    "Quantized": [STAGES[0], STAGES[2], PIPELINE],
    "ZeroesInPlace": [STAGES[0], ON_HOST, PIPELINE],
    "WithClosure": [sizes(zero_stage=0)],
    "Adversary": [sizes(zero_stage=0), *STAGES, ON_HOST],
    "SumOfBackwards": [sizes(zero_stage=0), *STAGES, ON_HOST],
    "OwnGradients": [sizes(zero_stage=0), *STAGES, sizes(2)],
    "MomentumEncoder": [STAGES[0], ON_HOST, sizes(2), PIPELINE, {**PIPELINE, "pipeline_split": ["net.9"]}],
    "AverageToValidate": [sizes(2), STAGES[0], PIPELINE],
    "AverageOfTwo": [sizes(2), STAGES[0], PIPELINE, {**PIPELINE, "pipeline_schedule": "zb_v"}],
    "Contrastive": [STAGES[0], STAGES[2], sizes(2), UNCUT],
    "Adapters": [sizes(2), STAGES[2], PIPELINE],
    "OnGraphs": [UNCUT],
    "KnownByHooks": [sizes(2)],
}


def test_equal_to_one_process() -> None:
    want = dict(zip(CASES, launch(unusual.fits, 1, [(name, None) for name in CASES])[0], strict=True))
    cases = [(name, layout) for name, layouts in CASES.items() for layout in layouts]
    for rank in launch(unusual.fits, 2, cases):
        for (name, layout), (parameters, loss) in zip(cases, rank, strict=True):
            expected, expected_loss = want[name]
            assert max(relative_error(parameters[n], p) for n, p in expected.items()) <= 1e-9, (name, layout)
            assert loss == pytest.approx(expected_loss, rel=1e-9), (name, layout)


@pytest.mark.parametrize(
    ("name", "layout", "message"),
    [
        ("WithClosure", STAGES[0], r"NeedsAClosure cannot step on two small tensors .*no closure.*zero_stage=0"),
        ("OwnGradients", ON_HOST, r"'net.*' was given a gradient .* offload_optimizer=False"),
        ("OwnBackward", STAGES[0], r"SGD stepped with gradients of 'net.*self.manual_backward\(loss\)"),
        ("OwnBackward", sizes(zero_stage=0), r"SGD stepped with gradients of 'net.*self.manual_backward\(loss\)"),
        ("TwoBackwards", STAGES[0], r"runs two backwards \(add the losses, and run one\)"),
        (
            "MomentumEncoder",
            {**PIPELINE, "pipeline_split": ["teacher.0"]},
            r"'teacher.*' was given data .* from parameter 'net.*copy\.deepcopy.*unless pipeline_split names",
        ),
        (
            "OwnCollective",
            sizes(2),
            r"torch.distributed itself \(allgather\), in .*unusual.*self.all_gather",
        ),
        ("MomentumEncoder", STAGES[2], r"'teacher.*' outside of a step.*whole_parameters"),
    ],
)
def test_what_is_refused(name: str, layout: dict[str, Any], message: str) -> None:
    with pytest.raises(DistributedError, match=message):
        launch(unusual.fits, 2, [(name, layout)])
