"""HOW LONG does a collective take?  Latency and bandwidth of each level of links (no torch here).

A ring over n ranks sends `2 (n-1)/n V` (all-reduce) or `(n-1)/n V` (all-gather, reduce-scatter) bytes per rank
(Patarasuk and Yuan, 2009). Inside of a machine that goes at the link's speed; between machines each must carry the
ring's traffic through the network adapters of those of its GPUs that belong to the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from lightning_3d.planner.cluster import Cluster
from lightning_3d.planner.constants import GENERATIONS, Generation

SENT = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""What a rank sends, per byte of the full operand and (n-1)/n."""


@dataclass(frozen=True)
class Group:
    """Ranks that talk: how many, and how many of them share a machine (the fast link's domain)."""

    size: int
    local: int

    @property
    def nodes(self) -> int:
        """Over how many domains they are spread."""
        return ceil(self.size / self.local)


def group_of(cluster: Cluster, size: int, stride: int) -> Group:
    """The group of an axis: `size` ranks, each `stride` ranks from the next (ranks of a machine are neighbours)."""
    if stride >= cluster.domain:
        return Group(size, 1)
    return Group(size, max(1, min(size, cluster.domain // stride)))


@dataclass(frozen=True)
class Links:
    """The links of a cluster, with what its generation of GPUs reaches on them.

    Attributes:
        cluster: The machines.
        in_switch: Whether the switch of a machine sums, where it can (NVLink SHARP).
    """

    cluster: Cluster
    in_switch: bool = True

    @property
    def constants(self) -> Generation:
        """Measured shares of the peaks."""
        return GENERATIONS[self.cluster.gpu.generation]

    @property
    def _between(self) -> float:
        """Seconds of the smallest collective between two machines."""
        return self.cluster.latency or self.constants.network_latency

    def inside(self, local: int, op: str) -> float:
        """Bytes per second of a rank's traffic in one machine."""
        gpu, constants = self.cluster.gpu, self.constants
        speed = gpu.link
        if gpu.pair_link < gpu.link:  # no switch: a link for every pair of the group
            speed = min(gpu.link, gpu.pair_link * (local - 1))
        if self.in_switch and constants.in_switch and op == "all_reduce" and local > 4:
            return speed * constants.in_switch * 2 * (local - 1) / local  # each rank sends the operand once, whatever n
        return speed * constants.link

    def bandwidth(self, group: Group, op: str, rings: int = 0) -> float:
        """Bytes per second of a rank's traffic over a group."""
        inside = self.inside(group.local, op) if group.local > 1 else float("inf")
        if group.nodes == 1:
            return inside
        cluster = self.cluster
        network = cluster.nic_per_gpu * group.local
        if rings:
            network = min(network, cluster.nic * rings)
        return min(inside, network * self.constants.network)

    def seconds(self, op: str, payload: float, group: Group, rings: int = 0) -> float:
        """Seconds of one collective whose full operand has `payload` bytes."""
        if group.size == 1 or payload <= 0:
            return 0.0
        constants = self.constants
        traffic = SENT[op] * (group.size - 1) / group.size * payload
        latency = constants.latency * SENT[op] / 2
        if group.nodes > 1:
            latency += self._between * log2(group.nodes)
        ramp = constants.ramp * SENT[op] / 2 * payload / (payload + constants.ramp_bytes)
        return latency + ramp + traffic / self.bandwidth(group, op, rings)

    def message(self, payload: float, stride: int) -> float:
        """Seconds of one message between ranks that are `stride` apart."""
        cluster, constants = self.cluster, self.constants
        if stride < cluster.domain:
            return constants.latency / 4 + payload / (cluster.gpu.pair_link * constants.link)
        return self._between + payload / (cluster.nic_per_gpu * constants.network)
