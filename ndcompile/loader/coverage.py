"""Whether rectangles tile a tensor, and strided pieces a file's tensor: every element the right number of times."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Rectangle(NamedTuple):
    """A rectangle of a tensor."""

    start: tuple[int, ...]
    size: tuple[int, ...]


class Strided(NamedTuple):
    """Elements of a flat block: `offset + i . strides` for every index `i` below `size`."""

    size: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


def find_fault(shape: Sequence[int], boxes: Iterable[Rectangle], times: int = 1) -> str | None:
    """None if every element of a tensor of `shape` lies in exactly `times` of `boxes`, else where not.

    The boxes' edges cut the tensor into cells; within a cell all elements are alike, so counting cells is a proof.
    """
    boxes = [box for box in boxes if math.prod(box.size)]
    for box in boxes:
        if any(first < 0 or first + length > full for first, length, full in zip(*box, shape, strict=True)):
            return f"{_spell(box)} lies outside of {tuple(shape)}"
    edges = [
        sorted({0, full, *(b.start[dim] for b in boxes), *(b.start[dim] + b.size[dim] for b in boxes)})
        for dim, full in enumerate(shape)
    ]
    if not math.prod(shape):
        return None
    counts = np.zeros([len(cuts) - 1 for cuts in edges], dtype=np.int32)
    for box in boxes:
        cells = tuple(
            slice(bisect_left(cuts, first), bisect_left(cuts, first + length))
            for cuts, first, length in zip(edges, box.start, box.size, strict=True)
        )
        counts[cells] += 1
    wrong = np.argwhere(counts != times)
    if not len(wrong):
        return None
    cell = [int(index) for index in wrong[0]]
    start = tuple(cuts[index] for cuts, index in zip(edges, cell, strict=True))
    size = tuple(cuts[index + 1] - cuts[index] for cuts, index in zip(edges, cell, strict=True))
    return f"{_spell(Rectangle(start, size))} is covered {int(counts[tuple(cell)])} times, not {times}"


def count_uses(elements: int, pieces: Iterable[Strided]) -> dict[int, int]:
    """How many of the `elements` of a flat block are in how many of `pieces`: {times: elements}.

    Counted in units of the longest run that divides all pieces: a matrix that is read by rows is counted by rows.
    Raises ValueError for a piece that asks for elements outside of the block.
    """
    plain = [_drop_unit_dims(piece) for piece in pieces if math.prod(piece.size)]
    unit = elements
    for piece in plain:
        last = piece.offset + sum(stride * (size - 1) for stride, size in zip(piece.strides, piece.size, strict=True))
        if piece.offset < 0 or last >= elements:
            raise ValueError(f"elements {piece.offset} to {last} of {elements} are asked for")
        run, outer = _runs(piece)
        unit = math.gcd(unit, run, piece.offset, *(stride for stride, _ in outer))
    if not elements:
        return {}
    counts = np.zeros(elements // unit, dtype=np.uint16)
    for piece in plain:
        np.add.at(counts, _units(piece, unit), 1)
    times, cells = np.unique(counts, return_counts=True)
    return {int(n): int(count) * unit for n, count in zip(times, cells, strict=True)}


def _drop_unit_dims(piece: Strided) -> Strided:
    kept = [dim for dim, size in enumerate(piece.size) if size != 1]
    return Strided(tuple(piece.size[d] for d in kept), piece.offset, tuple(piece.strides[d] for d in kept))


def _runs(piece: Strided) -> tuple[int, list[tuple[int, int]]]:
    """Length of one contiguous run, and (stride, size) of the dims over which runs repeat."""
    dims, run = sorted(zip(piece.strides, piece.size, strict=True)), 1
    while dims and dims[0][0] == run:
        run *= dims.pop(0)[1]
    return run, dims


def _units(piece: Strided, unit: int) -> np.ndarray:
    """Indices of the units of `unit` elements that the piece consists of."""
    run, outer = _runs(piece)
    index = np.arange(run // unit)
    for stride, size in outer:
        index = np.add.outer(np.arange(size) * (stride // unit), index).ravel()
    return index + piece.offset // unit


def _spell(box: Rectangle) -> str:
    return "[" + ", ".join(f"{start}:{start + size}" for start, size in zip(*box, strict=True)) + "]"
