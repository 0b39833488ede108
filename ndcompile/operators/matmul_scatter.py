"""One operator: a sum of matrix products, reduce-scattered over a group while it is computed.

    matmuls_reduce_scatter([a, b], [v, w], dim, group, dtype)  =  reduce_scatter((a @ v + b @ w).to(dtype), dim, group)

The gradient of what q, k and v read is such a sum, and torch's `symm_mem.fused_matmul_reduce_scatter` takes one product
alone. On CUDA this operator runs through the same pipeline of torch: the part of another rank is computed first and
fetched by that rank through symmetric memory while the next one is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ndcompile.operators.redistribute import Step, reduce_scatter
from ndcompile.private.distributed import produce_and_exchange, resolve_process_group


def _at_once(tokens: Sequence[Tensor], weights: Sequence[Tensor], dim: int, group: str, dtype: torch.dtype) -> Tensor:
    """The definition: products, their sum, and a reduce-scatter of its own."""
    product = torch.matmul(tokens[0], weights[0])
    for each, weight in zip(tokens[1:], weights[1:], strict=True):
        product = product + torch.matmul(each, weight)
    return reduce_scatter(product.to(dtype), Step(group, _size(group), dim, product.shape[dim], None))


def _pipelined(tokens: Sequence[Tensor], weights: Sequence[Tensor], dim: int, group: str, dtype: torch.dtype) -> Tensor:
    """As `_fused_matmul_reduce_scatter_impl` of torch/distributed/_symmetric_memory/__init__.py, of several products.

    A rank's part of the sum is rounded to the dtype of the products as each of them is added; the parts of all ranks
    are added in float32 and rounded to `dtype` once.
    """
    size = _size(group)
    first = tokens[0].movedim(dim, 0)
    rows = [each.movedim(dim, 0).flatten(0, -2).chunk(size) for each in tokens]

    def part(rank: int, out: Tensor) -> None:
        torch.mm(rows[0][rank], weights[0], out=out)
        for each, weight in zip(rows[1:], weights[1:], strict=True):
            out.addmm_(each[rank], weight)

    parts = first.new_empty(first[..., 0].numel(), weights[0].shape[1])
    produce_and_exchange(part, parts, group)  # type: ignore[arg-type]
    by_rank = parts.view(size, first.shape[0] // size, *first.shape[1:-1], -1)
    return by_rank.movedim(1, dim + 1).sum(dim=0, dtype=dtype)


def _shape(tokens: Sequence[Tensor], weights: Sequence[Tensor], dim: int, group: str, dtype: torch.dtype) -> Tensor:
    shape = [*tokens[0].shape[:-1], weights[0].shape[1]]
    shape[dim] //= _size(group)
    return tokens[0].new_empty(shape, dtype=dtype)


def _size(group: str) -> int:
    return resolve_process_group(group).size()  # type: ignore[arg-type]


_library = torch.library.Library("ndcompile", "FRAGMENT")
_library.define(
    "matmuls_reduce_scatter(Tensor[] tokens, Tensor[] weights, int dim, str group, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.impl("matmuls_reduce_scatter", _at_once, "CPU")
_library.impl("matmuls_reduce_scatter", _pipelined, "CUDA")
_library.impl("matmuls_reduce_scatter", _shape, "Meta")

matmuls_reduce_scatter = torch.ops.ndcompile.matmuls_reduce_scatter.default
