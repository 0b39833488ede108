"""Views of pieces: the same elements under another shape.

A view merges neighbouring dims, or splits one, or both. A rectangle stays one where the file has the elements in the
view's order; otherwise it is cut into several.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ndcompile.loader.pieces import Piece

MAX_PIECES = 1 << 17
"""A tensor of more pieces is cheaper to convert whole than to plan."""


class Inexpressible(Exception):
    """The converter computes something, or looks at values: its group has to be materialized."""


def view_pieces(pieces: Iterable[Piece], old: Sequence[int], new: Sequence[int]) -> list[Piece]:
    """`pieces` of a tensor of shape `old` as pieces of its view of shape `new`.

    Raises Inexpressible if they would be too many.
    """
    groups = _match_dims(old, new)
    viewed: list[Piece] = []
    for piece in pieces:
        viewed += _view_piece(piece, old, new, groups)
        if len(viewed) > MAX_PIECES:
            raise Inexpressible(f"a view of {tuple(old)} as {tuple(new)} in more than {MAX_PIECES} pieces")
    return viewed


def _match_dims(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of dims of both shapes with equal products, outermost first; dims of size 1 are in no run."""
    olds, news = ([dim for dim, size in enumerate(shape) if size != 1] for shape in (old, new))
    groups = []
    while olds or news:
        taken, made = [olds.pop(0)], [news.pop(0)]
        held, wanted = old[taken[0]], new[made[0]]
        while held != wanted:
            if held < wanted:
                taken.append(olds.pop(0))
                held *= old[taken[-1]]
            else:
                made.append(news.pop(0))
                wanted *= new[made[-1]]
        groups.append((taken, made))
    return groups


class _Run(NamedTuple):
    """A range of one dim: indices start to start + size, `stride` elements apart in the file."""

    start: int
    size: int
    stride: int


def _view_piece(
    piece: Piece, old: Sequence[int], new: Sequence[int], groups: list[tuple[list[int], list[int]]]
) -> Iterator[Piece]:
    per_group = []
    for taken, made in groups:
        runs = [_Run(piece.start[dim], piece.size[dim], piece.strides[dim]) for dim in taken]
        sizes = [new[dim] for dim in made]
        merged = _merge(runs, [old[dim] for dim in taken])
        per_group.append(
            [(shift + more, box) for shift, run in merged for more, box in _spread(run, run.start, run.size, sizes)]
        )
    order = [dim for _, made in groups for dim in made]
    for combination in itertools.product(*per_group):
        boxes = dict(zip(order, itertools.chain.from_iterable(box for _, box in combination), strict=True))
        runs = [boxes.get(dim, _Run(0, 1, 0)) for dim in range(len(new))]
        start, size, strides = zip(*runs, strict=True) if runs else ((), (), ())
        yield Piece(start, size, piece.block, piece.offset + sum(shift for shift, _ in combination), strides)


def _merge(runs: Sequence[_Run], sizes: Sequence[int]) -> list[tuple[int, _Run]]:
    """A rectangle over dims of `sizes` as ranges of the dim that they flatten to, each with the shift of its offset.

    One range where the file has the same order, else one for every index of an outer dim.
    """
    merged = [(0, runs[-1])]
    inner = sizes[-1]
    for (start, size, stride), full in zip(reversed(runs[:-1]), reversed(sizes[:-1]), strict=True):
        if size == 1:
            merged = [(shift, run._replace(start=start * inner + run.start)) for shift, run in merged]
        elif len(merged) == 1 and merged[0][1].size == inner and stride == inner * merged[0][1].stride:
            merged = [(0, _Run(start * inner, size * inner, merged[0][1].stride))]
        elif len(merged) * size > MAX_PIECES:
            raise Inexpressible(f"a view that cuts one piece into more than {MAX_PIECES}")
        else:
            merged = [
                (shift + index * stride, run._replace(start=(start + index) * inner + run.start))
                for index in range(size)
                for shift, run in merged
            ]
        inner *= full
    return merged


def _spread(run: _Run, start: int, size: int, sizes: Sequence[int]) -> Iterator[tuple[int, tuple[_Run, ...]]]:
    """The indices start to start + size of `run` as rectangles over dims of `sizes`, with the shift of their offset."""
    inner = math.prod(sizes[1:])
    if inner == 1:
        # Behind the first dim only dims of size 1 could follow, which are in no group.
        yield (start - run.start) * run.stride, (_Run(start, size, run.stride),)
        return
    end = start + size
    whole_start, whole_end = -(-start // inner) * inner, end // inner * inner
    strides = [run.stride * math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    if whole_start < whole_end:
        outer = _Run(whole_start // inner, (whole_end - whole_start) // inner, strides[0])
        rest = (_Run(0, length, stride) for length, stride in zip(sizes[1:], strides[1:], strict=True))
        yield (whole_start - run.start) * run.stride, (outer, *rest)
    ragged = (
        [(start, min(whole_start, end)), (max(whole_end, start), end)] if whole_start <= whole_end else [(start, end)]
    )
    for low, high in ragged:
        if low < high:
            row = low // inner
            inside = _Run(run.start - row * inner, run.size, run.stride)
            for shift, box in _spread(inside, low - row * inner, high - low, sizes[1:]):
                yield shift, (_Run(row, 1, strides[0]), *box)
