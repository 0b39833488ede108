"""Symbolic tensors: what a converter does to a checkpoint's tensors, recorded as rectangles instead of computed.

A `SymbolicTensor` has a shape and a dtype but no data. It consists of pieces: rectangles that tile it, each with the
place in a file from which its elements come. transformers' own conversion operations run on it as on any tensor; every
operator that only moves elements gives another symbolic tensor, and every other raises Inexpressible.

    gate, up: (64, 32) per expert    stack, cat    experts.gate_up_proj: (4, 128, 32) of 8 pieces,
    4 experts, 8 keys               ---------->    piece [2:3, 64:128, :] is key experts.2.up_proj.weight from byte 0
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ndcompile.loader.catalog import Entry
from ndcompile.loader.pieces import Piece, crop, pieces_of
from ndcompile.loader.reshaping import Inexpressible, view_pieces


class SymbolicTensor(torch.Tensor):
    """A tensor without data that knows where its elements come from: `pieces` tile it."""

    pieces: list[Piece]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, pieces: Iterable[Piece]) -> SymbolicTensor:
        return torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=torch.device("cpu"))

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, pieces: Iterable[Piece]) -> None:
        self.pieces = list(pieces)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"SymbolicTensor({tuple(self.shape)}, {self.dtype}, {len(self.pieces)} pieces)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        operator = _OPERATORS.get(func.overloadpacket.__name__)
        if operator is None:
            raise Inexpressible(f"{func.overloadpacket} does more than move elements")
        return operator(*args, **(kwargs or {}))


def symbol_of(entry: Entry, dtype: torch.dtype | None = None) -> SymbolicTensor:
    """The checkpoint tensor `entry` as a symbolic tensor, of `dtype` if it is cast before anything else happens."""
    return SymbolicTensor(entry.shape, dtype or entry.dtype, pieces_of(entry))


def _index(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


def _cat(tensors: Sequence[Any], dim: int = 0) -> SymbolicTensor:
    first = tensors[0]
    dim, offset, pieces = _index(dim, first.ndim), 0, []
    for tensor in tensors:
        if not isinstance(tensor, SymbolicTensor) or tensor.dtype != first.dtype:
            raise Inexpressible("cat of tensors that are not all from the checkpoint, in one dtype")
        if [*tensor.shape[:dim], *tensor.shape[dim + 1 :]] != [*first.shape[:dim], *first.shape[dim + 1 :]]:
            raise ValueError(f"cannot concatenate {tuple(tensor.shape)} to {tuple(first.shape)} on dim {dim}")
        for piece in tensor.pieces:
            start = (*piece.start[:dim], piece.start[dim] + offset, *piece.start[dim + 1 :])
            pieces.append(piece._replace(start=start))
        offset += tensor.shape[dim]
    return SymbolicTensor((*first.shape[:dim], offset, *first.shape[dim + 1 :]), first.dtype, pieces)


def _stack(tensors: Sequence[Any], dim: int = 0) -> SymbolicTensor:
    if not all(isinstance(tensor, SymbolicTensor) for tensor in tensors):
        raise Inexpressible("stack of tensors that are not all from the checkpoint")
    if len(shapes := {tensor.shape for tensor in tensors}) > 1:
        raise ValueError(f"tensors of different shapes are stacked: {', '.join(str(tuple(s)) for s in sorted(shapes))}")
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim)


def _unsqueeze(tensor: SymbolicTensor, dim: int) -> SymbolicTensor:
    dim = _index(dim, tensor.ndim + 1)

    def insert(values: Sequence[int], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim:])

    pieces = (
        Piece(insert(p.start, 0), insert(p.size, 1), p.block, p.offset, insert(p.strides, 0)) for p in tensor.pieces
    )
    return SymbolicTensor(insert(tensor.shape, 1), tensor.dtype, pieces)


def _squeeze(tensor: SymbolicTensor, dim: int | Sequence[int] | None = None) -> SymbolicTensor:
    asked = range(tensor.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    dropped = {_index(d, tensor.ndim) for d in asked}
    kept = [d for d in range(tensor.ndim) if d not in dropped or tensor.shape[d] != 1]
    return _take_dims(tensor, kept)


def _take_dims(tensor: SymbolicTensor, dims: Sequence[int]) -> SymbolicTensor:
    """The tensor with `dims` in this order; dims that are left out have size 1."""

    def take(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values[dim] for dim in dims)

    pieces = (Piece(take(p.start), take(p.size), p.block, p.offset, take(p.strides)) for p in tensor.pieces)
    return SymbolicTensor(take(tensor.shape), tensor.dtype, pieces)


def _permute(tensor: SymbolicTensor, dims: Sequence[int]) -> SymbolicTensor:
    return _take_dims(tensor, [_index(dim, tensor.ndim) for dim in dims])


def _transpose(tensor: SymbolicTensor, first: int = 0, second: int = 1) -> SymbolicTensor:
    dims = list(range(tensor.ndim))
    if dims:
        first, second = _index(first, tensor.ndim), _index(second, tensor.ndim)
        dims[first], dims[second] = dims[second], dims[first]
    return _take_dims(tensor, dims)


def _narrow(tensor: SymbolicTensor, dim: int, start: int, length: int) -> SymbolicTensor:
    starts, size = [0] * tensor.ndim, list(tensor.shape)
    starts[dim], size[dim] = start, length
    return SymbolicTensor(size, tensor.dtype, crop(tensor.pieces, starts, size))


def _slice(
    tensor: SymbolicTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> SymbolicTensor:
    if step != 1:
        raise Inexpressible("slice with a step")
    dim = _index(dim, tensor.ndim)
    first, last, _ = slice(start, end).indices(tensor.shape[dim])
    return _narrow(tensor, dim, first, max(last - first, 0))


def _select(tensor: SymbolicTensor, dim: int, index: int) -> SymbolicTensor:
    dim = _index(dim, tensor.ndim)
    return _squeeze(_narrow(tensor, dim, _index(index, tensor.shape[dim]), 1), dim)


def _split(tensor: SymbolicTensor, sizes: int | Sequence[int], dim: int = 0) -> list[SymbolicTensor]:
    dim = _index(dim, tensor.ndim)
    total = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, total, sizes)] or [0]
    starts = itertools.accumulate(sizes, initial=0)
    return [_narrow(tensor, dim, start, size) for start, size in zip(starts, sizes, strict=False)]


def _unbind(tensor: SymbolicTensor, dim: int = 0) -> list[SymbolicTensor]:
    dim = _index(dim, tensor.ndim)
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _same(tensor: SymbolicTensor, *, memory_format: object = None) -> SymbolicTensor:
    return SymbolicTensor(tensor.shape, tensor.dtype, tensor.pieces)


def _to_copy(tensor: SymbolicTensor, *, dtype: torch.dtype | None = None, **_: object) -> SymbolicTensor:
    if dtype not in (None, tensor.dtype):
        raise Inexpressible(f"a cast from {tensor.dtype} to {dtype}")
    return _same(tensor)


def _view(tensor: SymbolicTensor, shape: Sequence[int]) -> SymbolicTensor:
    sizes = list(shape)
    if -1 in sizes:
        sizes[sizes.index(-1)] = tensor.numel() // -math.prod(sizes)
    if tensor.numel() == 0:
        return SymbolicTensor(sizes, tensor.dtype, ())
    return SymbolicTensor(sizes, tensor.dtype, view_pieces(tensor.pieces, tensor.shape, sizes))


_OPERATORS: dict[str, Callable[..., Any]] = {
    "alias": _same,
    "cat": _cat,
    "clone": _same,
    "detach": _same,
    "permute": _permute,
    "select": _select,
    "slice": _slice,
    "split": _split,
    "split_with_sizes": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "t": _transpose,
    "transpose": _transpose,
    "unbind": _unbind,
    "unsqueeze": _unsqueeze,
    "view": _view,
    "_reshape_alias": lambda tensor, shape, strides: _view(tensor, shape),
    "_to_copy": _to_copy,
    "_unsafe_view": _view,
}
