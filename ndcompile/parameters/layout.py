"""Which part of a global tensor a rank holds: pure functions of shape, placements and mesh coordinate.

No process group, no DeviceMesh: a layout is known for every rank of any mesh from plain numbers. Placements apply left
to right, each one to what the placements before it left over, as in DTensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ndcompile.private.distributed import StridedShard

Interval = tuple[int, int]
"""Half-open range of global indices along one dim."""


class Box(NamedTuple):
    """A rectangle that a rank holds: where it starts in the global and in the local tensor, and its size."""

    global_offset: tuple[int, ...]
    local_offset: tuple[int, ...]
    size: tuple[int, ...]


def intervals(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[tuple[Interval, ...], ...]:
    """Per dim of `shape`, the ascending global index ranges that the rank at `coordinate` holds.

    `Shard` follows `torch.chunk` (the last shards may be short or empty). `StridedShard(dim, split_factor=n)` is the
    packed layout: each of the n equal parts of `dim` is chunked over the axis, and the pieces are concatenated. It
    equals DTensor's layout where the axis divides the parts; DTensor's chunks of uneven parts would cross from one part
    into the next. A dim of which the rank holds nothing has an empty tuple.

    Raises ValueError for a placement that is no layout (Partial), a dim out of range, a coordinate outside the mesh, or
    a packed dim that does not consist of n equal parts.
    """
    if not len(placements) == len(mesh_shape) == len(coordinate):
        raise ValueError(
            f"{len(placements)} placements, mesh shape {tuple(mesh_shape)}, coordinate {tuple(coordinate)}"
        )
    held: list[tuple[Interval, ...]] = [((0, size),) if size else () for size in shape]
    for placement, axis_size, index in zip(placements, mesh_shape, coordinate, strict=True):
        if not 0 <= index < axis_size:
            raise ValueError(f"coordinate {tuple(coordinate)} lies outside the mesh {tuple(mesh_shape)}")
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | StridedShard):
            raise ValueError(f"{placement} is no layout of a stored tensor")
        dim = placement.dim
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f"{placement} does not fit a tensor of shape {tuple(shape)}")
        parts = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
        held[dim] = _take_shard(held[dim], parts, axis_size, index)
    return tuple(held)


def local_shape(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> torch.Size:
    """Shape of the tensor that the rank at `coordinate` holds."""
    return torch.Size(_length(held) for held in intervals(shape, placements, mesh_shape, coordinate))


def boxes(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> Iterator[Box]:
    """The rectangles that the rank at `coordinate` holds, in the order of its local tensor; they tile that tensor."""
    per_dim = []
    for held in intervals(shape, placements, mesh_shape, coordinate):
        local = itertools.accumulate((stop - start for start, stop in held), initial=0)
        per_dim.append([(start, offset, stop - start) for (start, stop), offset in zip(held, local, strict=False)])
    for combination in itertools.product(*per_dim):
        yield Box(
            tuple(start for start, _, _ in combination),
            tuple(offset for _, offset, _ in combination),
            tuple(size for _, _, size in combination),
        )


def narrow(tensor: torch.Tensor, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """View of the rectangle of `tensor` at `offset` with `size`."""
    for dim, (start, length) in enumerate(zip(offset, size, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _length(held: Sequence[Interval]) -> int:
    return sum(stop - start for start, stop in held)


def _take_shard(held: tuple[Interval, ...], parts: int, axis_size: int, index: int) -> tuple[Interval, ...]:
    """The shard `index` of `axis_size` of every one of `parts` equal parts of the positions in `held`."""
    total = _length(held)
    if total % parts:
        raise ValueError(f"a packed dim of size {total} does not consist of {parts} equal parts")
    part = total // parts
    chunk = -(-part // axis_size)
    start, stop = min(index * chunk, part), min((index + 1) * chunk, part)
    taken = (piece for p in range(parts) for piece in _take_range(held, p * part + start, p * part + stop))
    return _merge(taken)


def _take_range(held: tuple[Interval, ...], start: int, stop: int) -> Iterator[Interval]:
    """Global ranges of the local positions [start, stop) of the indices in `held`."""
    position = 0
    for first, last in held:
        low, high = max(start, position), min(stop, position + last - first)
        if low < high:
            yield first + low - position, first + high - position
        position += last - first


def _merge(pieces: Iterator[Interval]) -> tuple[Interval, ...]:
    """Join neighbours, so that one run of indices is one interval."""
    merged: list[Interval] = []
    for start, stop in pieces:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)
