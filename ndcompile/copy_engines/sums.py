"""The sum of a rank's own row of a gradient and of the rows that others sent, in one kernel.

Triton comes with torch for CUDA alone, so this file is imported when GPUs are connected.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _add_rows(result, own, others, length, stride, scale, ranks: tl.constexpr, rank: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < length
    total = tl.zeros([block], tl.float32)
    for each in tl.static_range(ranks):
        if each == rank:
            row = tl.load(own + at, mask=inside)
        else:
            row = tl.load(others + (each - rank - 1 + ranks) % ranks * stride + at, mask=inside)
        total += row.to(tl.float32)
    tl.store(result + at, (total * scale).to(result.dtype.element_ty), mask=inside)


def add_rows(result: Tensor, own: Tensor, others: Tensor, rank: int, mean: bool) -> None:
    """See `protocol.Lanes.add`. result, own: (length,), others: (ranks - 1, length), contiguous in the last dim.

    Each element is the sum of float32 values in the order of ranks, so all ranks would compute the same bits.
    """
    ranks, (length,) = len(others) + 1, result.shape
    grid = (triton.cdiv(length, BLOCK),)
    scale = 1 / ranks if mean else 1.0
    _add_rows[grid](result, own, others, length, others.stride(0), scale, ranks, rank, BLOCK)
