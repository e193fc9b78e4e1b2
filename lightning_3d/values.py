"""IS every argument of the strategy of the right kind?  Asked when it is made, before any process starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Backend

from lightning_3d.errors import ConfigurationError, near
from lightning_3d.settings import Settings
from lightning_3d.tensor.facts import DEMANDS


def check_flags(**flags: Any) -> None:
    """Arguments that are True or False.

    Raises:
        ConfigurationError: One of them is something else ("no" would count as True).
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise wrong(name, value, "True or False")


def check_processes(timeout: Any, backend: Any, bucket_size_mb: Any) -> None:
    """What torch would refuse later, in its own words.

    Raises:
        ConfigurationError: Names the argument and what it must be.
    """
    if not isinstance(timeout, timedelta):
        raise wrong("timeout", timeout, "a datetime.timedelta, for example timedelta(minutes=30)")
    if bucket_size_mb is not None and not (is_number(bucket_size_mb) and bucket_size_mb > 0):
        raise wrong("bucket_size_mb", bucket_size_mb, "a number of megabytes above 0, or None (chosen by device)")
    if backend is None:
        return
    known = [str(name) for name in Backend.backend_list]
    names = [part.rpartition(":")[2].lower() for part in backend.split(",")] if isinstance(backend, str) else [""]
    if any(name not in known for name in names):
        raise wrong(
            "process_group_backend",
            backend,
            f"None (chosen by device), or one of {', '.join(known)}",
            near(names[0], known),
        )


def check_values(settings: Settings) -> None:
    """Raise `ConfigurationError` for a setting of the wrong kind."""
    microbatches, least = settings.num_microbatches, settings.strict_tensor_parallel
    if microbatches != "auto":
        if isinstance(microbatches, bool) or not isinstance(microbatches, int):
            raise wrong("num_microbatches", microbatches, "'auto' or an integer")
        if microbatches < 1:
            raise ConfigurationError(f"num_microbatches is {microbatches}; it must be at least 1.")
    if not _is_split(settings.pipeline_split):
        raise wrong(
            "pipeline_split",
            settings.pipeline_split,
            "'auto', 'measured' or a list with the name of the first module of every part but the first, as "
            "named_modules() spells it (['layers.6', 'layers.12'] for three parts)",
        )
    seconds = settings.hang_report_after
    if seconds is not None and not (is_number(seconds) and seconds > 0):
        raise wrong("hang_report_after", seconds, "a number of seconds, or None (no report)")
    if not isinstance(settings.verify, bool) and settings.verify != "auto":
        raise wrong("verify", settings.verify, "'auto', True or False")
    if least is not None and not (is_number(least) and 0 <= least <= 1):
        raise wrong("strict_tensor_parallel", least, "a part of all parameters, a number from 0 to 1, or None")
    _check_plan(settings.tensor_parallel_plan)


def _check_plan(plan: Any) -> None:
    if isinstance(plan, str) and plan == "auto":
        return
    if not isinstance(plan, Mapping) or not all(isinstance(pattern, str) for pattern in plan):
        raise wrong(
            "tensor_parallel_plan",
            plan,
            f'"auto", or a dict of patterns on module names to one of {", ".join(DEMANDS)}, for example '
            '{"*.mlp.up": "column"}',
        )
    if not plan:
        raise wrong("tensor_parallel_plan", plan, '"auto" where nothing is demanded: an empty dict has no effect')
    for pattern, kind in plan.items():
        if kind not in DEMANDS:
            raise ConfigurationError(
                f"tensor_parallel_plan: {kind!r} for {pattern!r} is not one of {', '.join(DEMANDS)}."
                + near(str(kind), DEMANDS)
            )


def wrong(name: str, value: Any, expected: str, hint: str = "") -> ConfigurationError:
    """The error for a value of the wrong kind."""
    return ConfigurationError(f"{name} is {value!r}; it must be {expected}.{hint}")


def is_number(value: Any) -> bool:
    """An integer or float, and no flag."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_split(value: Any) -> bool:
    if isinstance(value, str):
        return value in ("auto", "measured")
    return isinstance(value, Sequence) and all(isinstance(name, str) for name in value)
