"""Pieces the other way round: which part of a saved key a rank's rectangle of a parameter is.

A piece maps indices of the key to positions in the whole parameter. Where it steps along the parameter's dims, the
rectangles that ranks hold are rectangles of the key too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ndcompile.loader.pieces import Piece, row_major
from ndcompile.loader.reshaping import Inexpressible
from ndcompile.parameters.layout import Box, narrow


class Step(NamedTuple):
    """One dim of a key: its indices go along `dim` of the parameter, `stride` apart. None: it has size 1."""

    dim: int | None
    stride: int


class Mapped(NamedTuple):
    """A rectangle of a key at `start` with `size`, whose first element is `base` in the parameter."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    base: tuple[int, ...]
    steps: tuple[Step, ...]


def map_pieces(pieces: Iterable[Piece], shape: Sequence[int]) -> list[Mapped]:
    """`pieces` of a key in terms of the dims of the parameter of `shape`; no parameter's dim is used twice by one.

    Raises Inexpressible for a dim of the key that runs over the end of a row of the parameter.
    """
    return [mapped for piece in pieces for mapped in _separate(_map_piece(piece, shape))]


def _map_piece(piece: Piece, shape: Sequence[int]) -> Mapped:
    strides = row_major(shape)
    base, rest = [], piece.offset
    for stride in strides:
        index, rest = divmod(rest, max(stride, 1))
        base.append(index)
    last, steps = list(base), []
    for size, stride in zip(piece.size, piece.strides, strict=True):
        step = Step(None, 0) if size == 1 else _find_step(size, stride, last, shape, strides)
        if step.dim is not None:
            last[step.dim] += step.stride * (size - 1)
        steps.append(step)
    return Mapped(piece.start, piece.size, tuple(base), tuple(steps))


def _find_step(size: int, stride: int, last: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> Step:
    for dim, unit in enumerate(strides):
        if shape[dim] > 1 and stride and stride % unit == 0 and last[dim] + stride // unit * (size - 1) < shape[dim]:
            return Step(dim, stride // unit)
    raise Inexpressible(f"{size} elements, {stride} apart, go along no dim of a tensor of shape {tuple(shape)}")


def _separate(mapped: Mapped) -> Iterator[Mapped]:
    """Cut along the outer one of two dims of the key that go along the same dim of the parameter."""
    users: dict[int, int] = {}
    for axis, (dim, stride) in enumerate(mapped.steps):
        if dim is None:
            continue
        if dim in users:
            outer = axis if stride > mapped.steps[users[dim]].stride else users[dim]
            for index in range(mapped.size[outer]):
                yield from _separate(_fix(mapped, outer, index))
            return
        users[dim] = axis
    yield mapped


def _fix(mapped: Mapped, axis: int, index: int) -> Mapped:
    dim, stride = mapped.steps[axis]
    assert dim is not None
    return Mapped(
        _replace(mapped.start, axis, mapped.start[axis] + index),
        _replace(mapped.size, axis, 1),
        _replace(mapped.base, dim, mapped.base[dim] + index * stride),
        (*mapped.steps[:axis], Step(None, 0), *mapped.steps[axis + 1 :]),
    )


def _replace(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def scatter(mapped: Mapped, box: Box, local: Tensor) -> tuple[tuple[int, ...], Tensor] | None:
    """(offset in the key, view of `local`) of what a rank holds of `mapped`; None if that is nothing.

    box: a rectangle of the parameter, in `local`. The view has one dim for every dim of the key.
    """
    low = list(box.global_offset)
    start, size, index = list(mapped.start), list(mapped.size), [0] * len(low)
    strides = [1] * len(low)
    lengths = [1] * len(low)
    for dim, first in enumerate(mapped.base):
        axis = next((axis for axis, step in enumerate(mapped.steps) if step.dim == dim), None)
        high = low[dim] + box.size[dim]
        if axis is None:
            if not low[dim] <= first < high:
                return None
            index[dim] = first - low[dim]
            continue
        stride = strides[dim] = mapped.steps[axis].stride
        begin = max(-(-(low[dim] - first) // stride), 0)
        end = min(-(-(high - first) // stride), mapped.size[axis])
        if begin >= end:
            return None
        start[axis], size[axis] = start[axis] + begin, end - begin
        index[dim], lengths[dim] = first + begin * stride - low[dim], end - begin
    held = narrow(local, box.local_offset, box.size)
    held = held[tuple(slice(i, i + (n - 1) * s + 1, s) for i, n, s in zip(index, lengths, strides, strict=True))]
    # Dims that the key fixes have size 1 by now; one of them stands in for a dim of the key that has size 1.
    order = [step.dim for step in mapped.steps if step.dim is not None]
    rest = [dim for dim in range(held.ndim) if dim not in order]
    return tuple(start), held.permute(*order, *rest).reshape(size)
