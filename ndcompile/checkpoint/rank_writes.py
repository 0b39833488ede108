"""What this rank writes: its rectangles of every key, each written by one of the ranks that hold it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from ndcompile.checkpoint.files import FilePlan
from ndcompile.checkpoint.reversal import SavedTensor
from ndcompile.checkpoint.scatter import Mapped, map_pieces, scatter
from ndcompile.checkpoint.writing import Write, plan_write
from ndcompile.loader.pieces import Piece
from ndcompile.loader.reshaping import Inexpressible
from ndcompile.parameters.layout import Box, boxes, narrow

if TYPE_CHECKING:
    from ndcompile.parameters.storage import ParameterStore


@dataclass(frozen=True)
class Source:
    """A tensor of the model: its whole shape, and the rectangles of `local` that this rank writes."""

    shape: torch.Size
    local: Tensor
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Destinations:
    """Where the tensors of the model go.

    moved: name -> the keys and rectangles of keys that its elements make up.
    computed: sets of names -> keys that are computed of these whole tensors, which pass through scratch files.
    """

    moved: Mapping[str, Sequence[tuple[SavedTensor, Mapped]]]
    computed: Mapping[frozenset[str], Sequence[SavedTensor]]

    @property
    def scratch(self) -> list[str]:
        """Names of the tensors in scratch files, in the files' order."""
        return sorted(frozenset().union(*self.computed))


def sources_of(store: ParameterStore, names: Mapping[str, Tensor]) -> dict[str, Source]:
    """The tensors in `names` as this rank holds them. Replicas take turns in writing."""
    slot_of = {name: slot for slot in store.slots for name in (slot.entry.fqn, *slot.entry.aliases)}
    _, mesh_shape, coordinate = store.layout(store.slots[0].entry)
    sources = {}
    for number, (name, tensor) in enumerate(names.items()):
        if (slot := slot_of.get(name)) is not None:
            local, shape, placements = slot.local, slot.entry.shape, store.layout(slot.entry)[0]
        else:
            local, shape, placements = tensor, tensor.shape, (Replicate(),) * len(mesh_shape)
        replica, replicas = 0, 1
        for placement, size, index in zip(placements, mesh_shape, coordinate, strict=True):
            if isinstance(placement, Replicate):
                replica, replicas = replica * size + index, replicas * size
        held = boxes(shape, placements, mesh_shape, coordinate) if number % replicas == replica else ()
        sources[name] = Source(shape, local.detach(), tuple(held))
    return sources


def find_destinations(tensors: Sequence[SavedTensor], shapes: Mapping[str, torch.Size]) -> Destinations:
    """Sort the keys of a folder by the tensors that they come from. Of shapes alone: the same on all ranks."""
    moved: dict[str, list[tuple[SavedTensor, Mapped]]] = {name: [] for name in shapes}
    computed: dict[frozenset[str], list[SavedTensor]] = {}
    for tensor in tensors:
        pieces: dict[str, list[Piece]] = {}
        for piece in tensor.pieces:
            pieces.setdefault(piece.block.key, []).append(piece)
        if tensor.computed_of:
            computed.setdefault(tensor.computed_of, []).append(tensor)
            continue
        try:
            found = {name: map_pieces(of_name, shapes[name]) for name, of_name in pieces.items()}
        except Inexpressible:
            computed.setdefault(frozenset(pieces), []).append(tensor)
            continue
        for name, mapped in found.items():
            moved[name] += [(tensor, piece) for piece in mapped]
    return Destinations(moved, computed)


def rank_writes(
    sources: Mapping[str, Source], destinations: Destinations, plan: FilePlan, folder: Path, scratch: Sequence[Path]
) -> Iterator[Write]:
    """All writes of this rank, to the files in `folder` and to the `scratch` files."""
    for name, source in sources.items():
        for box in source.boxes:
            for tensor, mapped in destinations.moved[name]:
                if (held := scatter(mapped, box, source.local)) is not None:
                    file, offset = plan.place[tensor.key]
                    yield plan_write(folder / file, offset, tensor.shape, *held)
    for path, name in zip(scratch, destinations.scratch, strict=True):
        source = sources[name]
        for box in source.boxes:
            view = narrow(source.local, box.local_offset, box.size)
            yield plan_write(path, 0, source.shape, box.global_offset, view)
