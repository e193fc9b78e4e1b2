"""HOW MANY microbatches is a batch cut into?  The user's number, a schedule file's, or the documented rule."""

from __future__ import annotations

from typing import Any

from lightning_3d.errors import ConfigurationError
from lightning_3d.layout import Layout
from lightning_3d.pipeline.samples import batch_size, describe_size, parts_of
from lightning_3d.pipeline.training_schedule import TrainingSchedule


def count_microbatches(layout: Layout, asked: int | str, batch: Any) -> int:
    """Four times the stages, fewer where the batch has fewer samples, unless somebody says otherwise.

    Args:
        layout: With its schedule, which may be a file made for some number.
        asked: The user's number, or "auto".
        batch: A batch of one replica.

    Raises:
        ConfigurationError: The batch has fewer samples than that.
    """
    if asked == 1:
        return 1  # nothing is cut, so it need not be known where
    size = batch_size(batch)
    made_for = TrainingSchedule(layout.schedule, layout.pp, layout.virtual, layout.order).microbatches
    if asked == "auto" and made_for is None:
        return min(4 * layout.pp, size)
    count = made_for if made_for is not None else int(asked)
    if count > size:
        given, way = f"num_microbatches={count}", "lower num_microbatches, or leave it 'auto'"
        if made_for is not None:
            given, way = f"the schedule in {layout.schedule} has {count}", "or choose another schedule"
        larger = f"Raise the loader's batch_size to at least {count}"
        if parts_of(batch):
            larger = f"Give all loaders a batch_size that {count} divides"
        raise ConfigurationError(
            f"{given}, but a batch of one data-parallel replica has {describe_size(batch)}, so at most {size} "
            f"microbatches can be cut. {larger}, {way}."
        )
    return count
