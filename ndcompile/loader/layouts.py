"""Where every rank of a mesh holds what, from plain numbers: no process group, no memory."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from ndcompile.loader.target import Target, buffer_targets
from ndcompile.parameters.layout import Box, boxes, local_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ndcompile.plans.sharding_plan import ShardingPlan


@dataclass(frozen=True)
class MeshShape:
    """Axes of a storage mesh in storage order, those of size 1 left out."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Storage coordinate of a rank, numbered as `init_mesh` numbers them: tp is the minor axis, then ep_rest."""
        index: dict[str, int] = {}
        for name in ("tp", "ep_rest", "efsdp", "fsdp", "dp_replicate"):
            if name in self.names:
                rank, index[name] = divmod(rank, self.sizes[self.names.index(name)])
        return tuple(index[name] for name in self.names)

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """Of every rank, in storage order."""
        return itertools.product(*map(range, self.sizes))

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))


def copies(placements: Sequence[Placement], mesh_shape: Sequence[int]) -> int:
    """How many ranks hold every element of a tensor with `placements`."""
    sizes = zip(placements, mesh_shape, strict=True)
    return math.prod(size for placement, size in sizes if isinstance(placement, Replicate))


def storage_axes(sizes: Mapping[str, int]) -> MeshShape:
    """The storage mesh of dp_replicate, fsdp, tp and ep, the number of expert shards; an absent size is 1.

    With ep, fsdp is two axes, ep_rest x efsdp with ep = tp x ep_rest.
    """
    given = {"dp_replicate": 1, "fsdp": 1, "tp": 1, "ep": 1, **sizes}
    axes = {"dp_replicate": given["dp_replicate"], "tp": given["tp"]}
    if given["ep"] > 1:
        rest = given["ep"] // given["tp"]
        axes |= {"ep_rest": rest, "efsdp": given["fsdp"] // rest}
    else:
        axes["fsdp"] = given["fsdp"]
    kept = {name: size for name, size in axes.items() if size > 1} or {"fsdp": 1}
    return MeshShape(tuple(kept), tuple(kept.values()))


def targets_without_memory(
    model: PreTrainedModel, plan: ShardingPlan, mesh: MeshShape, coordinate: tuple[int, ...]
) -> list[Target]:
    """What the rank at `coordinate` would fill, on the meta device: parameters as `plan` places them, and buffers.

    `model` is read for its buffers only.
    """
    targets = []
    for entry in plan.parameters:
        placements = entry.placements(mesh.names)
        shape = local_shape(entry.shape, placements, mesh.sizes, coordinate)
        local = torch.empty(shape, dtype=entry.dtype, device="meta")
        targets.append(Target(entry.fqn, local, entry.shape, placements, mesh.sizes, coordinate, entry.aliases))
    return targets + buffer_targets(model, mesh.sizes, coordinate)


@functools.lru_cache(1 << 16)
def boxes_of(
    shape: torch.Size, placements: tuple[Placement, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[Box, ...]:
    """`layout.boxes`, remembered: the layers of a model are alike."""
    return tuple(boxes(shape, placements, mesh_shape, coordinate))
