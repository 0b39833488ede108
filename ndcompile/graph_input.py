"""What the placeholders of a captured graph stand for."""

from __future__ import annotations

from dataclasses import dataclass

PARAMETER, BUFFER, COORDINATE, SEEDS, ARGUMENT = "parameter", "buffer", "coordinate", "seeds", "argument"


@dataclass(frozen=True)
class GraphInput:
    """`name` is an FQN for parameters and buffers, an axis for coordinates, a path for arguments."""

    kind: str
    name: str
