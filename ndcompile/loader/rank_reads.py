"""Which rank reads how many bytes of which file: planned for any mesh, without process group and without memory."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ndcompile.loader.assignment import Assignment, Source, WholeGroup
from ndcompile.loader.catalog import Entry
from ndcompile.loader.layouts import MeshShape, boxes_of
from ndcompile.loader.reading import plan_reads, planned_bytes
from ndcompile.parameters.layout import Box


@dataclass(frozen=True)
class RankReads:
    """What one rank reads: bytes by file, gaps between near runs included, and `needed`, the bytes of its slices."""

    rank: int
    coordinate: tuple[int, ...]
    files: Mapping[Path, int]
    needed: int

    @property
    def total(self) -> int:
        return sum(self.files.values())


@dataclass(frozen=True)
class ReadPlan:
    """What ranks of `mesh` read to load `model`. Prints as a table of ranks and files."""

    model: str
    mesh: MeshShape
    ranks: tuple[RankReads, ...]

    def __str__(self) -> str:
        files = sorted({file for reads in self.ranks for file in reads.files})
        table = Table(title=f"{self.model} on {self.mesh}: bytes read by each rank", title_justify="left")
        columns = [file.name for file in files] if len(files) <= 4 else [f"{len(files)} files"]
        for column in ("rank", "coordinate", *columns, "all", "over its slices"):
            table.add_column(column, justify="right")
        for reads in self.ranks:
            ratio = reads.total / reads.needed if reads.needed else 1.0
            cells = (
                [spell_bytes(reads.files.get(file, 0)) for file in files]
                if len(files) <= 4
                else [str(len(reads.files))]
            )
            where = ", ".join(map(str, reads.coordinate))
            table.add_row(str(reads.rank), where, *cells, spell_bytes(reads.total), f"{ratio:.3f}")
        console = Console(file=io.StringIO(), width=118)
        console.print(table)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in text.splitlines())


def rank_reads(
    assignment: Assignment, catalog: Mapping[str, Entry], mesh: MeshShape, ranks: Iterable[int] | None = None
) -> tuple[RankReads, ...]:
    """What `ranks` of `mesh`, all by default, read of the tensors of `assignment`, which may be that of any rank."""
    known: dict[tuple[Source, tuple[Box, ...]], Sequence[tuple[Path, int, int]]] = {}
    result = []
    for rank in range(mesh.ranks) if ranks is None else ranks:
        coordinate = mesh.coordinate(rank)
        files: Counter[Path] = Counter()
        needed = 0
        for source in assignment.sources:
            target = source.target
            held = boxes_of(target.shape, target.placements, mesh.sizes, coordinate)
            if (source, held) not in known:
                known[source, held] = _bytes_of(source, held)
            for file, planned, exact in known[source, held]:
                files[file] += planned
                needed += exact
        for group in assignment.whole:
            if any(boxes_of(t.shape, t.placements, mesh.sizes, coordinate) for t in group.filled.values()):
                files.update(_whole_bytes(group, catalog))
                needed += _needed_of_whole(group, mesh, coordinate)
        result.append(RankReads(rank, coordinate, dict(files), needed))
    return tuple(result)


def _bytes_of(source: Source, held: Sequence[Box]) -> list[tuple[Path, int, int]]:
    """(file, bytes read, bytes needed) for the boxes `held` of a tensor."""
    dtype = source.target.tensor.dtype
    rectangles = [(box.global_offset, torch.empty(box.size, dtype=dtype, device="meta")) for box in held]
    by_file: dict[Path, tuple[int, int]] = {}
    for read in plan_reads(source.pieces, rectangles):
        planned, exact = by_file.get(read.file, (0, 0))
        by_file[read.file] = planned + planned_bytes(read), exact + read.nbytes
    return [(file, planned, exact) for file, (planned, exact) in by_file.items()]


def _whole_bytes(group: WholeGroup, catalog: Mapping[str, Entry]) -> Counter[Path]:
    files: Counter[Path] = Counter()
    for key, _ in group.group.sources:
        for block in catalog[key].blocks:
            files[block.file] += block.nbytes
    return files


def _needed_of_whole(group: WholeGroup, mesh: MeshShape, coordinate: tuple[int, ...]) -> int:
    """Bytes of a rank's slices of what `group` makes."""
    held = (
        (target, box)
        for target in group.filled.values()
        for box in boxes_of(target.shape, target.placements, mesh.sizes, coordinate)
    )
    return sum(torch.Size(box.size).numel() * target.tensor.dtype.itemsize for target, box in held)


def spell_bytes(count: int) -> str:
    """A number of bytes with four digits or fewer."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.4g} {unit}" if count < 1000 * size else f"{count / size:.0f} {unit}"
    return f"{count} B"
