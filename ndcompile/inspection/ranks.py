"""Which part of every parameter which rank holds.

Ranks are numbered as `init_mesh` numbers them: neighbours share a tp group, then fsdp, then dp_replicate.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from torch.distributed.tensor.placement_types import Placement

from ndcompile.inspection.report import ParameterRow, Ranges, Report
from ndcompile.parameters.layout import intervals

SHOWN = 8
"""Lines of one dim in `explain`; the JSON has all of them."""


def rank_strides(sizes: Mapping[str, int]) -> dict[str, int]:
    """Storage axis -> how far apart its neighbours are: a rank's coordinate is rank // stride % size of the axis.

    sizes: of the user's axes.
    """
    tp, rest = sizes["tp"], max(sizes["ep"] // sizes["tp"], 1)
    return {"dp_replicate": tp * sizes["fsdp"], "tp": 1, "ep_rest": tp, "efsdp": tp * rest, "fsdp": tp}


def cut_dims(
    shape: Sequence[int], placements: Mapping[str, Placement], sizes: Mapping[str, int]
) -> tuple[tuple[tuple[str, ...], ...], tuple[Ranges, ...]]:
    """Per dim: the axes that cut it, in order, and what the ranks at each position along these hold of it.

    placements, sizes: by storage axis. Positions count as digits do, the last axis first.
    """
    axes, ranges = [], []
    for dim in range(len(shape)):
        here = [name for name, p in placements.items() if getattr(p, "dim", None) in (dim, dim - len(shape))]
        cutting = tuple(name for name in here if sizes[name] > 1)
        given = [placements[name] for name in cutting], [sizes[name] for name in cutting]
        positions = itertools.product(*(range(size) for size in given[1]))
        axes.append(cutting)
        ranges.append(tuple(intervals(shape, *given, position)[dim] for position in positions))
    return tuple(axes), tuple(ranges)


def rank_text(report: Report, rank: int) -> str:
    """The slices of one rank, a line for all layers that are alike.

    Raises ValueError for a rank outside of the mesh.
    """
    if not 0 <= rank < report.ranks:
        raise ValueError(f"rank {rank} is none of this mesh of {report.ranks} ranks: give 0 to {report.ranks - 1}.")
    where = ", ".join(f"{axis}={coordinate(report, axis, rank)}" for axis in report.storage) or "the only one"
    lines = [f"rank {rank} of {report.ranks} of {report.model}, at {where}"]
    for row in report.parameters:
        count = f" ({len(row.fqns)} of them)" if len(row.fqns) > 1 else ""
        lines.append(f"  {row.name}{count}: {_slices(report, row, rank)} of {list(row.shape)}, {row.dtype}")
    return "\n".join(lines) + "\n"


def coordinate(report: Report, axis: str, rank: int) -> int:
    """Where a rank stands along a storage axis."""
    return rank // report.rank_strides[axis] % report.storage[axis]


def held_lines(report: Report, row: ParameterRow) -> Iterator[str]:
    """Lines for `explain`: of each dim that is cut, index ranges and the ranks that hold them."""
    for dim, (axes, ranges) in enumerate(zip(row.cut_by, row.ranges, strict=True)):
        if not axes:
            continue
        yield f"  dim {dim} of {row.shape[dim]} is cut by {' x '.join(axes)}, without padding:"
        holders: dict[int, list[int]] = {}
        for rank in range(report.ranks):
            holders.setdefault(_position(report, axes, rank), []).append(rank)
        for position, held in enumerate(ranges[:SHOWN]):
            ranks = holders[position]
            yield f"    {_spell(held)} on rank{'s' if len(ranks) > 1 else ''} {_spell_ranks(ranks)}"
        if len(ranges) > SHOWN:
            yield f"    and {len(ranges) - SHOWN} more; ndcompile plan --rank N, and the JSON, tell each"


def _position(report: Report, axes: Sequence[str], rank: int) -> int:
    position = 0
    for axis in axes:
        position = position * report.storage[axis] + coordinate(report, axis, rank)
    return position


def _slices(report: Report, row: ParameterRow, rank: int) -> str:
    dims = zip(row.cut_by, row.ranges, strict=True)
    return f"[{', '.join(_spell(ranges[_position(report, axes, rank)]) for axes, ranges in dims)}]"


def _spell(held: Sequence[Sequence[int]]) -> str:
    """Ranges as Python's slices; of a packed dim there are several."""
    return " + ".join(f"{start}:{stop}" for start, stop in held) or "nothing"


def _spell_ranks(ranks: Sequence[int]) -> str:
    """Runs of ranks, the first few: 0-3, 8-11, ..."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    spelled = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(spelled[:SHOWN]) + (", ..." if len(spelled) > SHOWN else "")
