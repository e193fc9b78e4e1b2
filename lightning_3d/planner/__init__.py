"""WHICH layout, will it fit, how fast, and why?  Memory and time of layouts as arithmetic. How it works: README.md."""

from lightning_3d.planner.cluster import Cluster
from lightning_3d.planner.model import ModelShape
from lightning_3d.planner.planning import Plan, plan

__all__ = ["Cluster", "ModelShape", "Plan", "plan", "this_machine"]


def this_machine(devices: int) -> Cluster:
    """This machine with so many devices, measured in a few seconds (on the CPU they share its cores).

    Collectives: none.
    """
    from lightning_3d.planner.calibrate import measured_cluster

    return measured_cluster(devices)
