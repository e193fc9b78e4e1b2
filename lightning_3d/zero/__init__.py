"""WHO holds this number?  Gradient reduction and optimizer sharding over the data-parallel axis."""

from lightning_3d.zero.bucket import Bucket, Piece, Slot
from lightning_3d.zero.classify import classify
from lightning_3d.zero.engine import Zero
from lightning_3d.zero.holdings import Share
from lightning_3d.zero.norm import scale_gradients, total_norm

__all__ = ["Bucket", "Piece", "Share", "Slot", "Zero", "classify", "scale_gradients", "total_norm"]
