"""Rates of one rank's kernels: matrix products, attention, and what memory bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from ndcompile.measurement.machine import Machine

MIB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """What is measured: products of an MLP (tokens x width, four times as wide inside), causal attention (heads of 128)
    over a sequence, and sums of tensors of so many bytes. dtypes: of products."""

    tokens: int
    width: int
    heads: int
    sequence: int
    memory: int
    dtypes: tuple[torch.dtype, ...]


SIZES = {
    "cuda": Sizes(8192, 4096, 32, 4096, 1024 * MIB, (torch.bfloat16, torch.float16, torch.float32)),
    "cpu": Sizes(512, 512, 4, 512, 64 * MIB, (torch.bfloat16, torch.float32)),
}
"""By device type. On a GPU those of a large model's layer, on the CPU small enough for seconds, and too large for its
caches."""
HEAD = 128


def products(machine: Machine, dtype: torch.dtype, sizes: Sizes, at_least: float) -> float:
    """Floating point operations a second of an MLP's products: two of forward, and the gradient of a weight.

    Collective, as the following are: the slowest rank counts.
    """
    tokens, width = sizes.tokens, sizes.width
    narrow, wide = machine.values(tokens, width, dtype=dtype), machine.values(tokens, 4 * width, dtype=dtype)
    up, down = machine.values(width, 4 * width, dtype=dtype), machine.values(4 * width, width, dtype=dtype)
    outputs = torch.empty_like(wide), torch.empty_like(narrow), torch.empty_like(up)

    def call() -> None:
        torch.mm(narrow, up, out=outputs[0])
        torch.mm(wide, down, out=outputs[1])
        torch.mm(narrow.t(), wide, out=outputs[2])

    return 3 * 2 * tokens * width * 4 * width / machine.seconds(call, at_least)


def attention(machine: Machine, sizes: Sizes, at_least: float) -> float:
    """Floating point operations a second of causal attention, forward and backward, in the first of the dtypes.

    Counted as `inspection.kernels.flops` counts: two products forward and five backward, half of each masked.
    """
    shape = (1, sizes.heads, sizes.sequence, HEAD)
    query, key, value = (machine.values(*shape, dtype=sizes.dtypes[0]).requires_grad_() for _ in range(3))
    gradient = machine.values(*shape, dtype=sizes.dtypes[0])

    def call() -> None:
        output = scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(output, (query, key, value), gradient)

    one_product = 2 * sizes.heads * sizes.sequence**2 * HEAD / 2
    return 7 * one_product / machine.seconds(call, at_least)


def memory(machine: Machine, sizes: Sizes, at_least: float) -> float:
    """Bytes a second that a sum of two tensors reads and writes."""
    left, right = (torch.ones(sizes.memory // 4, device=machine.device) for _ in range(2))
    result = torch.empty_like(left)
    return 3 * left.nbytes / machine.seconds(lambda: torch.add(left, right, out=result), at_least)
