"""How long collectives take, and the latencies and the bandwidth of `inspection.links.FORMULA` that fit them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ndcompile.inspection.links import ALL_TO_ALL, RINGS
from ndcompile.measurement.compute import MIB
from ndcompile.measurement.machine import Machine

SIZES = {"cuda": (MIB // 4, 4 * MIB, 32 * MIB, 128 * MIB, 512 * MIB), "cpu": (MIB // 64, MIB // 4, MIB, 4 * MIB)}
"""Bytes of the larger side, by device type."""


@dataclass(frozen=True)
class Sample:
    """One collective as it was measured. nbytes: of the larger side."""

    kind: str
    nbytes: int
    ranks: int
    nodes: int
    seconds: float


@dataclass(frozen=True)
class Link:
    """Seconds of a launch and of a step from rank to rank, bytes a second."""

    launch: float
    step: float
    bandwidth: float


def sample(
    machine: Machine, group: dist.ProcessGroup | None, kinds: Sequence[str], sizes: Sequence[int], at_least: float
) -> list[Sample]:
    """Measure collectives of a group, one after the other. Collective."""
    ranks = dist.get_world_size(group)
    nodes = machine.nodes if group is None else 1
    return [
        Sample(kind, nbytes, ranks, nodes, machine.seconds(prepare(machine, group, kind, nbytes), at_least))
        for kind in kinds
        for nbytes in (size // ranks * ranks for size in sizes)
    ]


def prepare(
    machine: Machine, group: dist.ProcessGroup | None, kind: str, nbytes: int, wait: bool = True
) -> Callable[[], dist.Work | None]:
    """A call that runs one collective on tensors that are there already; it returns what it starts without `wait`."""
    dtype = torch.bfloat16 if machine.device.type != "cpu" else torch.float32  # gloo reduces bfloat16 a number a time
    ranks = dist.get_world_size(group)
    part = max(1, nbytes // dtype.itemsize // ranks)
    lengths = (part, part * ranks, part * ranks)
    small, whole, other = (torch.zeros(length, dtype=dtype, device=machine.device) for length in lengths)
    calls: dict[str, Callable[[], dist.Work | None]] = {
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, small, group, async_op=not wait),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(small, whole, group=group, async_op=not wait),
        "all_reduce": lambda: dist.all_reduce(whole, group=group, async_op=not wait),
        ALL_TO_ALL: lambda: dist.all_to_all_single(other, whole, group=group, async_op=not wait),
    }
    return calls[kind]


def fit_link(samples: Sequence[Sample]) -> Link:
    """The link inside a node, from all kinds of collectives of ranks of one node.

    Raises ValueError for samples that grow with neither bytes nor steps.
    """
    rows = []
    for each in samples:
        trips, steps = (RINGS[each.kind], each.ranks - 1) if each.kind in RINGS else (1, 1)
        moved = (each.ranks - 1) / each.ranks * each.nbytes
        rows.append([1.0, float(trips * steps), trips * moved])
    seconds = [each.seconds for each in samples]
    launch, step, inverse = nearest(rows, seconds, seconds)
    return Link(launch, step, _bandwidth(inverse))


def fit_network(samples: Sequence[Sample], link: Link) -> Link:
    """The network between nodes, of one rank, from rings over all ranks, where `link` is what is inside the nodes."""
    rows, left = [], []
    for each in samples:
        trips = RINGS[each.kind]
        moved = (each.ranks - 1) / each.ranks * each.nbytes
        rows.append([float(trips * (each.nodes - 1)), trips * moved])
        known = link.launch + trips * (each.ranks - each.nodes) * link.step
        left.append(each.seconds - known)
    step, inverse = nearest(rows, left, [each.seconds for each in samples])
    adapters = samples[0].ranks / samples[0].nodes  # a ring has those of all ranks of a node
    return Link(link.launch, step, _bandwidth(inverse) / adapters)


def _bandwidth(inverse: float) -> float:
    if inverse <= 0:
        raise ValueError(
            "Collectives took no longer with more bytes, so no bandwidth can be told: measure longer (--seconds), or "
            "on a machine that does nothing else."
        )
    return 1 / inverse


def nearest(rows: Sequence[Sequence[float]], seconds: Sequence[float], measured: Sequence[float]) -> list[float]:
    """Numbers >= 0, one a column, for which rows x numbers are nearest to the seconds, errors relative to `measured`.

    Least squares; columns whose number would be negative are left out, the most negative one first.
    """
    matrix, right = torch.tensor(rows, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)
    weight = 1 / torch.tensor(measured, dtype=torch.float64)
    matrix, right = matrix * weight[:, None], right * weight
    scale = matrix.abs().amax(0).clamp_min(1e-300)  # seconds and bytes differ by 1e12
    left = list(range(matrix.shape[1]))
    found: Tensor = torch.zeros(matrix.shape[1], dtype=torch.float64)
    while left:
        part = torch.linalg.lstsq(matrix[:, left] / scale[left], right[:, None], driver="gelsd").solution[:, 0]
        if part.min() >= 0:
            found[left] = part / scale[left]
            break
        del left[int(part.argmin())]
    return found.tolist()
