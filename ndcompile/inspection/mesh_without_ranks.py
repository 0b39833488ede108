"""The storage mesh of a world that does not exist, for tracing: axes with sizes and names, but no process groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch

from ndcompile.loader.layouts import storage_axes
from ndcompile.mesh import FUSED, Axis, StorageMesh
from ndcompile.private.distributed import CAN_KEEP_RANK_ORDER, mesh_without_groups


def mesh_of_sizes(sizes: Mapping[str, int]) -> StorageMesh:
    """The storage mesh that rank 0 of a world of these sizes would see, without process groups, on the CPU.

    Means are taken as NCCL takes them, in the collective.
    """
    shape = storage_axes(sizes)
    rest = max(sizes["ep"] // sizes["tp"], 1)
    ranks = torch.arange(shape.ranks).reshape(sizes["dp_replicate"], sizes["fsdp"] // rest, rest, sizes["tp"])
    ranks = ranks.permute(0, 3, 2, 1).reshape(shape.sizes)
    present = {name: size for name, size in zip(shape.names, shape.sizes, strict=True) if size > 1}
    for fused, pair in FUSED.items() if sizes["ep"] > 1 else ():
        parts = [present[part] for part in pair if part in present]
        if parts:
            present[fused] = math.prod(parts)
    two = "tp" in present and "ep_rest" in present
    axes = {
        name: Axis(name, size, 0, f"plan.{name}", name == "ep" and two and not CAN_KEEP_RANK_ORDER)
        for name, size in present.items()
    }
    return StorageMesh("plan", mesh_without_groups("cpu", ranks, shape.names), MappingProxyType(axes), "nccl")
