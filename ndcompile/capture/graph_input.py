"""What the placeholders of a captured graph stand for."""

from __future__ import annotations

from dataclasses import dataclass

PARAMETER, BUFFER, COORDINATE, SEEDS, ARGUMENT = "parameter", "buffer", "coordinate", "seeds", "argument"
CACHE, VARYING_CACHE = "cache", "varying cache"
"""Tensors of a key-value cache; the second differ between tp ranks."""
HELD = "held gradient"
"""A whole weight's gradient that waits for its reduction, see `accumulation.py`."""


@dataclass(frozen=True)
class GraphInput:
    """`name` is an FQN for parameters, buffers and held gradients, an axis for coordinates, else a path."""

    kind: str
    name: str
