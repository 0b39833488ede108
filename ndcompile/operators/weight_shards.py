"""A weight from the gathered shards of all ranks, and back: a few views, however many ranks there are.

Ranks on one axis cut a dim as `torch.chunk` does. Those on two axes cut it twice: the outer axis into parts, the inner
one each part into shards. Every shard is padded at its end to the rows of the largest one, so padding stands behind the
rows of each part: full parts are alike, one may hold less, and those behind it hold nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def join(gathered: Tensor, dim: int, full: int, sizes: tuple[int, int]) -> Tensor:
    """The `full` rows of `dim` of shards that were concatenated on the first dim, without their padding.

    sizes: of the outer and the inner axis.
    """
    if dim == 0 and sizes[0] == 1:
        return gathered.narrow(0, 0, full)
    outer, inner = sizes
    shards = gathered.unflatten(0, (outer, inner, gathered.shape[0] // (outer * inner)))
    shards = shards.movedim((0, 1), (dim, dim + 1))
    joined, begin = [], 0
    for count, rows in _parts(full, outer):
        part = shards.narrow(dim, begin, count).narrow(dim + 2, 0, _ceil(rows, inner))
        joined.append(part.flatten(dim + 1, dim + 2).narrow(dim + 1, 0, rows).flatten(dim, dim + 1))
        begin += count
    return joined[0] if len(joined) == 1 else torch.cat(joined, dim)


def cut(x: Tensor, dim: int, sizes: tuple[int, int]) -> Tensor:
    """The inverse of `join`: padded shards of `dim` of all ranks, concatenated on the first dim."""
    outer, inner = sizes
    if dim == 0 and outer == 1:
        return pad_to(x, 0, inner * _ceil(x.shape[0], inner))
    width, shards, begin = _ceil(_ceil(x.shape[dim], outer), inner), [], 0
    for count, rows in _parts(x.shape[dim], outer):
        part = x.narrow(dim, begin, count * rows).unflatten(dim, (count, rows))
        part = pad_to(part, dim + 1, inner * _ceil(rows, inner)).unflatten(dim + 1, (inner, _ceil(rows, inner)))
        shards.append(pad_to(part, dim + 2, width))
        begin += count * rows
    whole = shards[0] if len(shards) == 1 else torch.cat(shards, dim)
    return pad_to(whole, dim, outer).movedim((dim, dim + 1), (0, 1)).flatten(0, 2)


def pad_to(x: Tensor, dim: int, size: int) -> Tensor:
    """`x` with zeros behind it, `size` along `dim`."""
    if isinstance(x.shape[dim], int) and x.shape[dim] == size:
        return x
    return torch.nn.functional.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, size - x.shape[dim]])


def _parts(full: int, outer: int) -> list[tuple[int, int]]:
    """How many parts hold how many rows each, without those that hold none."""
    rows = _ceil(full, outer)
    whole, rest = divmod(full, rows)
    return [(whole, rows), *([(1, rest)] if rest else [])]


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)
