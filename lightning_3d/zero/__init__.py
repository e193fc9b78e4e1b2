"""WHO holds this number?  Gradient reduction and optimizer sharding over the data-parallel axis."""

from lightning_3d.zero.bucket import Bucket
from lightning_3d.zero.classify import classify
from lightning_3d.zero.engine import Zero
from lightning_3d.zero.groups import lend_swaps
from lightning_3d.zero.holdings import is_low, release_former
from lightning_3d.zero.norm import scale_gradients, total_norm
from lightning_3d.zero.offload import check_offload
from lightning_3d.zero.piece import Piece, Slot
from lightning_3d.zero.released import ReleasedParameter
from lightning_3d.zero.share import Share
from lightning_3d.zero.unit import find_units
from lightning_3d.zero.units import Units

__all__ = [
    "Bucket",
    "Piece",
    "ReleasedParameter",
    "Share",
    "Slot",
    "Units",
    "Zero",
    "check_offload",
    "classify",
    "find_units",
    "is_low",
    "lend_swaps",
    "release_former",
    "scale_gradients",
    "total_norm",
]
