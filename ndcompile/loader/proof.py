"""The proof that all ranks together load every tensor: from the files' bytes to the slices, each exactly once.

Three facts, each counted over all elements and none of them sampled:

    slices       the boxes of all ranks cover every global tensor, each element as often as it is replicated
    conversion   the pieces of every global tensor cover it once: each element comes from one place
    sources      every byte of a checkpoint tensor is used once, or dropped by a converter, which is told
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor.placement_types import Placement

from ndcompile.loader.assignment import Assignment, Source
from ndcompile.loader.catalog import Entry
from ndcompile.loader.coverage import Rectangle, Strided, count_uses, find_fault
from ndcompile.loader.headers import Block
from ndcompile.loader.layouts import MeshShape, boxes_of, copies


@dataclass(frozen=True)
class Proof:
    """What was counted, and `faults`, one line each; the plan is right if there are none.

    `unused` are keys of the checkpoint from which nothing is read, `dropped` those of which a converter drops a part,
    `whole` the tensors whose converter computes: of those only the slices are proven.
    """

    tensors: int
    slices: int
    pieces: int
    keys: int
    bytes_used: int
    faults: tuple[str, ...]
    unused: tuple[str, ...]
    dropped: tuple[str, ...]
    whole: tuple[str, ...]


def prove(assignment: Assignment, catalog: Mapping[str, Entry], mesh: MeshShape) -> Proof:
    """Count what every rank of `mesh` holds of the tensors of `assignment`, which may be that of any one rank."""
    whole = [(name, target) for group in assignment.whole for name, target in group.filled.items()]
    targets = [source.target for source in assignment.sources] + [target for _, target in whole]
    faults: list[str] = []
    slices, known = 0, dict[tuple[object, ...], tuple[int, str | None]]()
    for target in [*targets, *assignment.missing]:
        key = (target.shape, target.placements)
        if key not in known:
            held = rank_boxes(target.shape, target.placements, mesh)
            known[key] = len(held), find_fault(target.shape, held, copies(target.placements, mesh.sizes))
        count, fault = known[key]
        slices += count
        faults += [f"{target.fqn} {tuple(target.shape)} as {target.placements}: {fault}"] if fault else []
    for source in assignment.sources:
        held = [Rectangle(piece.start, piece.size) for piece in source.pieces]
        if (fault := find_fault(source.target.shape, held)) is not None:
            faults.append(f"{source.target.fqn} is not made of {len(held)} pieces of the checkpoint: {fault}")
    misused, dropped = _uses(assignment.sources)
    faults += misused
    used = {key for source in assignment.sources for key in source.keys}
    used |= {key for group in assignment.whole for key, _ in group.group.sources}
    return Proof(
        tensors=len(targets),
        slices=slices,
        pieces=sum(len(source.pieces) for source in assignment.sources),
        keys=len(used),
        bytes_used=sum(catalog[key].nbytes for key in used),
        faults=tuple(faults),
        unused=tuple(key for key in catalog if key not in used),
        dropped=tuple(dropped),
        whole=tuple(name for name, _ in whole),
    )


def rank_boxes(shape: torch.Size, placements: tuple[Placement, ...], mesh: MeshShape) -> list[Rectangle]:
    """The rectangles that all ranks of `mesh` hold of a tensor."""
    return [
        Rectangle(box.global_offset, box.size)
        for coordinate in mesh.coordinates()
        for box in boxes_of(shape, placements, mesh.sizes, coordinate)
    ]


def _uses(sources: Iterable[Source]) -> tuple[list[str], list[str]]:
    """What is wrong with blocks of which elements are used more than once, and blocks of which some are not used."""
    uses: dict[Block, list[Strided]] = {}
    readers: dict[Block, Counter[str]] = {}
    for source in sources:
        for piece in source.pieces:
            uses.setdefault(piece.block, []).append(Strided(piece.size, piece.offset, piece.strides))
            readers.setdefault(piece.block, Counter())[source.target.fqn] += 1
    faults, dropped = [], []
    for block, pieces in uses.items():
        elements = block.shape.numel()
        name = f"{block.key} in {block.file.name}"
        try:
            counts = count_uses(elements, pieces)
        except ValueError as error:
            faults.append(f"{name} becomes {', '.join(readers[block])}, but {error}")
            continue
        if often := {times: count for times, count in counts.items() if times > 1}:
            told = " and ".join(f"{count} are used {times} times" for times, count in often.items())
            faults.append(f"{name} becomes {', '.join(readers[block])}, but of its {elements} elements {told}")
        if 0 in counts:
            dropped.append(f"{name} ({counts[0]} of {elements} elements)")
    return faults, dropped
