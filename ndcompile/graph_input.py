"""What the placeholders of a captured graph stand for."""

from __future__ import annotations

from dataclasses import dataclass

PARAMETER, BUFFER, COORDINATE, SEEDS, ARGUMENT = "parameter", "buffer", "coordinate", "seeds", "argument"
CACHE, VARYING_CACHE = "cache", "varying cache"
"""Tensors of a key-value cache; the second differ between tp ranks."""


@dataclass(frozen=True)
class GraphInput:
    """`name` is an FQN for parameters and buffers, an axis for coordinates, a path for arguments and caches."""

    kind: str
    name: str
