"""How long collectives take, and the latencies and the bandwidth of `inspection.links.FORMULA` that fit them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ndcompile.inspection.links import ALL_TO_ALL, RINGS
from ndcompile.measurement.compute import MIB
from ndcompile.measurement.machine import Machine

collectives = torch.ops._c10d_functional

KINDS = (*RINGS, ALL_TO_ALL)
SIZES = {"cuda": (MIB // 4, 4 * MIB, 32 * MIB, 128 * MIB, 512 * MIB), "cpu": (MIB // 64, MIB // 4, MIB, 4 * MIB)}
"""Bytes of the larger side, by device type."""
ROUNDS = 20
"""Of a fit; after a few nothing changes."""
TOO_LITTLE = 0.01
"""A bandwidth that explains less than this part of the longest collective is none."""


@dataclass(frozen=True)
class Sample:
    """One collective as it was measured. nbytes: of the larger side. nodes: 1, or as many as ranks."""

    kind: str
    nbytes: int
    ranks: int
    nodes: int
    seconds: float

    @property
    def trips(self) -> int:
        return RINGS.get(self.kind, 1)

    @property
    def steps(self) -> int:
        """From rank to rank, one after the other."""
        return self.trips * (self.ranks - 1) if self.kind in RINGS else 1

    @property
    def moved(self) -> float:
        """Bytes that a rank sends."""
        return self.trips * (self.ranks - 1) / self.ranks * self.nbytes


@dataclass(frozen=True)
class Link:
    """Seconds of a launch and of a step from rank to rank, bytes a second."""

    launch: float
    step: float
    bandwidth: float


def sample(machine: Machine, group: dist.ProcessGroup, nodes: int, at_least: float) -> list[Sample]:
    """Measure collectives of a group, one after the other, while other groups measure theirs. Collective."""
    ranks = dist.get_world_size(group)
    found = []
    for kind in KINDS:
        for nbytes in (size // ranks * ranks for size in SIZES[machine.device.type]):
            start = prepare(machine, group, kind, nbytes)
            seconds = machine.seconds(lambda start=start: wait(start()), at_least)  # type: ignore[misc]
            found.append(Sample(kind, nbytes, ranks, nodes, seconds))
    return found


def prepare(machine: Machine, group: dist.ProcessGroup, kind: str, nbytes: int) -> Callable[[], Tensor]:
    """A call that starts one collective, by the operators that graphs call, and returns what `wait` waits for."""
    dtype = torch.bfloat16 if machine.device.type != "cpu" else torch.float32  # gloo reduces bfloat16 a number a time
    ranks, name = dist.get_world_size(group), group.group_name
    part = max(1, nbytes // dtype.itemsize // ranks)
    given = torch.zeros(part if kind == "all_gather_into_tensor" else part * ranks, dtype=dtype, device=machine.device)
    splits = [part] * ranks
    calls: dict[str, Callable[[], Tensor]] = {
        "all_gather_into_tensor": lambda: collectives.all_gather_into_tensor(given, ranks, name),
        "reduce_scatter_tensor": lambda: collectives.reduce_scatter_tensor(given, "sum", ranks, name),
        "all_reduce": lambda: collectives.all_reduce_(given, "sum", name),
        ALL_TO_ALL: lambda: collectives.all_to_all_single(given, splits, splits, name),
    }
    return calls[kind]


def wait(started: Tensor) -> Tensor:
    """Wait for what a call of `prepare` has started."""
    return collectives.wait_tensor(started)


def fit(samples: Sequence[Sample], launch: float | None = None) -> Link:
    """Launch, step and bandwidth of ranks of one node, or of one rank a node. launch: what is known already.

    Raises ValueError for seconds that do not grow with bytes, or are no seconds.
    """
    measured = [each.seconds for each in samples]
    if not measured or not all(math.isfinite(seconds) and seconds > 0 for seconds in measured):
        raise ValueError(f"Collectives took {measured} seconds. {_REMEDY}")
    rows = [[1.0, float(each.steps), each.moved] for each in samples]
    if launch is None:
        launch, step, inverse = nearest(rows, measured)
    else:
        step, inverse = nearest([row[1:] for row in rows], measured, launch)
    longest = max(samples, key=lambda each: each.moved)
    if inverse * longest.moved < TOO_LITTLE * longest.seconds:
        raise ValueError(f"Collectives took no longer with more bytes, so no bandwidth can be told. {_REMEDY}")
    return Link(launch, step, 1 / inverse)


_REMEDY = "Measure longer (--seconds), on a machine that does nothing else."


def nearest(rows: Sequence[Sequence[float]], measured: Sequence[float], known: float = 0.0) -> list[float]:
    """Numbers >= 0, one a column, for which known + rows x numbers is nearest to what was measured.

    Least squares of logarithms, so that twice as long counts as much as half as long, for large and small seconds
    alike: by Newton's steps, from the fit of relative errors.
    """
    matrix, right = torch.tensor(rows, dtype=torch.float64), torch.tensor(measured, dtype=torch.float64)
    found = _least_squares(matrix, right - known, right)
    for _ in range(ROUNDS):
        estimate = (known + matrix @ found).clamp_min(right.min() * 1e-3)
        found = _least_squares(matrix, estimate * (1 + (right / estimate).log()) - known, estimate)
    return found.tolist()


def _least_squares(matrix: Tensor, right: Tensor, unit: Tensor) -> Tensor:
    """Numbers >= 0 by least squares of errors over `unit`.

    Columns whose number would be negative are left out, the most negative one first.
    """
    weighted = matrix / unit[:, None]
    scale = weighted.abs().amax(0).clamp_min(1e-300)  # seconds and bytes differ by 1e12
    left = list(range(matrix.shape[1]))
    found = torch.zeros(matrix.shape[1], dtype=torch.float64)
    while left:
        scaled = torch.linalg.lstsq(weighted[:, left] / scale[left], (right / unit)[:, None], driver="gelsd").solution
        if scaled.min() >= 0:
            found[left] = scaled[:, 0] / scale[left]
            break
        del left[int(scaled[:, 0].argmin())]
    return found
