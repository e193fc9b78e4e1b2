"""WHAT do the rules come to?  The local program of a block, recorded once, proved, and run in their place."""

from lightning_3d.tensor.recorded.recording import Recording

__all__ = ["Recording"]
