"""Dropout whose mask is a function of a seed and the element's index, not of a generator's state.

All ranks that hold the same seed draw the same mask, recomputation in backward draws it again, and inductor and eager
agree, because the mask is plain integer arithmetic in the graph. The mixer is a 32-bit finalizer of the kind
evaluated in https://github.com/skeeto/hash-prospector, in int64 so that products do not overflow.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BITS = 0xFFFFFFFF


def keep_mask(like: Tensor, p: float, seed: Tensor, salt: int) -> Tensor:
    """Boolean mask of `like`'s shape, False with probability `p`. `seed`: 0-dim int64 below 2**32; `salt` of the op."""
    index = torch.arange(like.numel(), device=like.device).view(like.shape)
    first = _mix(seed.to(like.device) ^ _mix_int(2 * salt + 1))
    second = _mix(first ^ _mix_int(2 * salt + 2))
    return _mix(_mix((index + first) & _BITS) ^ second) >= int(p * 2**32)


def dropout(x: Tensor, p: float, seed: Tensor, salt: int) -> Tensor:
    """`torch.nn.functional.dropout` in training."""
    if p >= 1.0:
        return x * 0.0
    return torch.where(keep_mask(x, p, seed, salt), x, 0.0) / (1.0 - p)


def attention_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
    seed: Tensor,
    salt: int,
) -> Tensor:
    """`scaled_dot_product_attention` with dropout on the attention weights.

    Shapes (batch, heads, query length, head dim) and (batch, kv heads, key length, head dim); kv heads are repeated.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-2, -1) * (scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    if is_causal:
        rows, columns = (torch.arange(n, device=query.device) for n in scores.shape[-2:])
        scores = scores.masked_fill(rows.unsqueeze(-1) < columns, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    if mask is not None and mask.dtype == torch.bool:  # rows that may attend to nothing give zero, as sdpa does
        weights = torch.where(mask.any(-1, keepdim=True), weights, 0.0)
    return dropout(weights, p, seed, salt) @ value


def stream_seed(base: int, step: int, *coordinates: int) -> int:
    """Seed of one step's stream on one rank: below 2**32, different for other steps and coordinates."""
    state = _mix_int(base & _BITS) ^ _mix_int((base >> 32) & _BITS)
    for number in (step, *coordinates):
        state = _mix_int((state * 31 + number + 1) & _BITS)
    return state


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _BITS
    x = x ^ (x >> 15)
    x = (x * 0x31848BAB) & _BITS
    return x ^ (x >> 14)


def _mix_int(x: int) -> int:
    x ^= x >> 16
    x = (x * 0x7FEB352D) & _BITS
    x ^= x >> 15
    x = (x * 0x31848BAB) & _BITS
    return x ^ (x >> 14)


_library = torch.library.Library("ndcompile", "FRAGMENT")
_library.define("dropout(Tensor x, float p, Tensor seed, int salt) -> Tensor")
_library.define(
    "attention_with_dropout(Tensor query, Tensor key, Tensor value, Tensor? mask, float p, bool is_causal,"
    " float? scale, Tensor seed, int salt) -> Tensor"
)
_library.impl("dropout", dropout, "CompositeImplicitAutograd")
_library.impl("attention_with_dropout", attention_with_dropout, "CompositeImplicitAutograd")

dropout_op = torch.ops.ndcompile.dropout.default
attention_op = torch.ops.ndcompile.attention_with_dropout.default
