"""The tensors that this rank must fill."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from ndcompile.parameters.layout import boxes, local_shape, narrow


@dataclass(frozen=True, eq=False)
class Target:
    """One tensor this rank must fill: its part of the global tensor `fqn`.

    `tensor` is the local destination: memory of the local shape on any device, possibly a non-contiguous view, possibly
    empty; on the meta device it can be planned but not loaded. Its dtype wins over the checkpoint's. `shape` is the
    global shape. `aliases` are the other names of a tied tensor.
    """

    fqn: str
    tensor: torch.Tensor
    shape: torch.Size
    placements: tuple[Placement, ...]
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        expected = local_shape(self.shape, self.placements, self.mesh_shape, self.coordinate)
        if self.tensor.shape != expected:
            raise ValueError(f"{self.fqn}: local shape {tuple(self.tensor.shape)}, its layout says {tuple(expected)}")

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of the tensor, its own first."""
        return (self.fqn, *self.aliases)

    def rectangles(self, tensor: torch.Tensor | None = None) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """(global offset, view of `tensor`, by default the destination) of every rectangle this rank holds."""
        local = (self.tensor if tensor is None else tensor).detach()
        for box in boxes(self.shape, self.placements, self.mesh_shape, self.coordinate):
            yield box.global_offset, narrow(local, box.local_offset, box.size)

    def fill(self, value: torch.Tensor) -> None:
        """Copy this rank's part of the global tensor `value`."""
        for offset, view in self.rectangles():
            view.copy_(narrow(value, offset, view.shape))


def buffer_targets(model: nn.Module, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> list[Target]:
    """Targets that fill the buffers which `model` saves, replicated; shared ones once.

    The buffers need memory: see `materialize_buffers`.
    """
    saved = model.state_dict(keep_vars=True).keys()
    names: dict[int, list[str]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in saved:
            names.setdefault(id(buffer), []).append(name)
    placements = (Replicate(),) * len(mesh_shape)
    return [
        Target(fqn, buffer := model.get_buffer(fqn), buffer.shape, placements, mesh_shape, coordinate, tuple(aliases))
        for fqn, *aliases in names.values()
    ]
