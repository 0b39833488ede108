"""Seconds of a collective: the formula of a ring, or of an exchange between all pairs, on the links of its axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ndcompile.inspection.rates import Rates
from ndcompile.mesh import Axis

RINGS = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_reduce": 2}
"""How often the whole tensor, less one rank's part, passes every rank."""
ALL_TO_ALL = "all_to_all_single"

FORMULA = (
    "ring: launch + trips x ((n - 1) / n x bytes / bandwidth + (n - nodes) x link step + (nodes - 1) x network step), "
    "2 trips for an all-reduce, else 1; bandwidth = min(link, network x n / nodes) between nodes. all-to-all: launch + "
    "step + max((k - 1) / n x bytes / link, (n - k) / n x bytes / network), k = n / nodes"
)


@dataclass(frozen=True)
class Group:
    """Ranks that communicate. nodes: how many nodes they are on, at most, for any group of the axis."""

    axis: str
    ranks: int
    nodes: int


def groups_of(axes: Mapping[str, Axis], ranks_a_node: int) -> dict[str, Group]:
    """Name of a process group, as collective nodes carry it -> its ranks. axes: of a storage mesh, fused ones too."""
    return {axis.group: Group(axis.name, axis.size, _nodes(axis, axes, ranks_a_node)) for axis in axes.values()}


def _nodes(axis: Axis, axes: Mapping[str, Axis], ranks_a_node: int) -> int:
    size = {name: entry.size for name, entry in axes.items()}
    tp, rest = size.get("tp", 1), size.get("ep_rest", 1)
    fsdp = size.get("fsdp", rest * size.get("efsdp", 1))
    stride = {"ep_rest": tp, "fsdp": tp, "efsdp": tp * rest, "dp_replicate": tp * fsdp}.get(axis.name, 1)
    world = tp * fsdp * size.get("dp_replicate", 1)
    starts = [rank for rank in range(world) if rank // stride % axis.size == 0]
    return max(len({(start + i * stride) // ranks_a_node for i in range(axis.size)}) for start in starts)


def collective_seconds(kind: str, nbytes: float, group: Group, rates: Rates) -> float:
    """Seconds of one collective by FORMULA.

    nbytes: of the larger side: gathered, or not yet reduced or scattered; of an all-to-all what a rank sends.

    Raises ValueError for a kind of collective that has no formula.
    """
    n, nodes = group.ranks, group.nodes
    if kind not in RINGS and kind != ALL_TO_ALL:
        raise ValueError(f"The time of the collective {kind!r} is not known: there is no formula for it.")
    if n == 1:
        return 0.0
    link, network = rates.link_bandwidth * rates.link_fraction, rates.network_bandwidth * rates.link_fraction
    if kind == ALL_TO_ALL:
        near = n / nodes
        step = rates.link_latency if nodes == 1 else rates.network_latency
        return rates.launch_latency + step + max((near - 1) / n * nbytes / link, (n - near) / n * nbytes / network)
    bandwidth = link if nodes == 1 else min(link, network * n / nodes)
    steps = (n - nodes) * rates.link_latency + (nodes - 1) * rates.network_latency
    return rates.launch_latency + RINGS[kind] * ((n - 1) / n * nbytes / bandwidth + steps)
