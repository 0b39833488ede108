"""Pieces: rectangles of a tensor and the places in files from which their elements come."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ndcompile.loader.catalog import Block, Entry


class Piece(NamedTuple):
    """The rectangle of a tensor at `start` with `size`; its element `i` is `offset + i . strides` in `block`.

    Offset and strides count elements of the stored dtype. Axes are few, so plain tuples are the fastest.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]
    block: Block
    offset: int
    strides: tuple[int, ...]


def pieces_of(entry: Entry) -> list[Piece]:
    """The checkpoint tensor `entry` as it is stored."""
    return [
        Piece(block.origin, tuple(block.shape), block, 0, row_major(block.shape))
        for block in entry.blocks
        if block.shape.numel()
    ]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def crop(pieces: Iterable[Piece], start: Sequence[int], size: Sequence[int]) -> Iterator[Piece]:
    """What `pieces` hold of the rectangle at `start` with `size`, with starts relative to it."""
    bounds = [(low, low + length) for low, length in zip(start, size, strict=True)]
    first_low, first_high = bounds[0] if bounds else (0, 1)
    for piece in pieces:
        # Most pieces lie elsewhere in the first dim (other experts): they are passed by at once.
        if piece.start and not first_low - piece.size[0] < piece.start[0] < first_high:
            continue
        offset, starts, sizes = piece.offset, [], []
        for first, length, stride, (low, high) in zip(piece.start, piece.size, piece.strides, bounds, strict=True):
            begin, end = max(first, low), min(first + length, high)
            if begin >= end:
                break
            offset += (begin - first) * stride
            starts.append(begin - low)
            sizes.append(end - begin)
        else:
            yield Piece(tuple(starts), tuple(sizes), piece.block, offset, piece.strides)
