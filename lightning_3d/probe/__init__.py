"""WHAT does one step do?  Run the user's step once, with fake parameters and real batch values; leave no trace."""

from lightning_3d.probe.agree import agree
from lightning_3d.probe.alone import is_tried_alone, tried_alone
from lightning_3d.probe.content import Content, Unknown
from lightning_3d.probe.copies import copies_in
from lightning_3d.probe.fake import FakeParameters
from lightning_3d.probe.intercept import intercept_functions
from lightning_3d.probe.python_state import PythonState, common_state, own_generators, python_state
from lightning_3d.probe.reads import VALUE_READS, Answers, retry
from lightning_3d.probe.shared_patch import SharedPatch
from lightning_3d.probe.short import shorter_batches
from lightning_3d.probe.state import ModuleState
from lightning_3d.probe.step import (
    call_step,
    metrics_alone,
    own_named_parameters,
    own_parameters,
    parameters_shown,
    probe_arguments,
    try_step,
)

__all__ = [
    "VALUE_READS",
    "Answers",
    "Content",
    "FakeParameters",
    "ModuleState",
    "PythonState",
    "SharedPatch",
    "Unknown",
    "agree",
    "call_step",
    "common_state",
    "copies_in",
    "intercept_functions",
    "is_tried_alone",
    "metrics_alone",
    "own_generators",
    "own_named_parameters",
    "own_parameters",
    "parameters_shown",
    "probe_arguments",
    "python_state",
    "retry",
    "shorter_batches",
    "tried_alone",
    "try_step",
]
