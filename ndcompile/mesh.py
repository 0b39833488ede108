"""The storage mesh: the user's mesh with its axes in the order in which parameters are sharded.

TP comes before FSDP: a parameter is first cut by tp, what is left by fsdp, left to right. So one all-gather over fsdp
gives the TP-local weight, every shard is a rectangle, and stock optimizers, `clip_grad_norm_` and DCP take the
parameters as they are.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.distributed import DistributedConfig

from ndcompile.errors import MeshError
from ndcompile.torch_private import (
    CAN_KEEP_RANK_ORDER,
    default_group,
    register_process_group,
    resolve_process_group,
    unregister_process_group,
)

AXES = ("dp_replicate", "tp", "fsdp")
"""Storage order."""
USER_AXES = ("dp_replicate", "fsdp", "tp")
"""The order in which `init_mesh` numbers ranks, as transformers does: neighbours share a tp group."""


@dataclass(frozen=True)
class Axis:
    """One axis of the storage mesh. `group` is a name of its process group that is the same on every rank."""

    name: str
    size: int
    coordinate: int
    group: str


@dataclass(frozen=True)
class StorageMesh:
    """Axes in storage order, size-1 axes left out of `device_mesh` but not of the questions one can ask.

    name: the same on all ranks. counter: numbers the models compiled on this mesh, alike on all ranks.
    """

    name: str
    device_mesh: DeviceMesh
    axes: Mapping[str, Axis]
    backend: str
    counter: Iterator[int] = field(default_factory=itertools.count)

    def size(self, name: str) -> int:
        """Size of an axis; an absent axis has size 1."""
        return self.axes[name].size if name in self.axes else 1

    def coordinate(self, name: str) -> int:
        return self.axes[name].coordinate if name in self.axes else 0

    @property
    def sizes(self) -> dict[str, int]:
        return {name: self.size(name) for name in AXES}

    @property
    def device(self) -> torch.device:
        """The device of this rank's parameters."""
        kind = self.device_mesh.device_type
        return (
            torch.device(kind, torch.get_device_module(kind).current_device()) if kind != "cpu" else torch.device(kind)
        )

    @property
    def data_rank(self) -> int:
        return self.coordinate("dp_replicate") * self.size("fsdp") + self.coordinate("fsdp")

    @property
    def data_world_size(self) -> int:
        return self.size("dp_replicate") * self.size("fsdp")

    @property
    def mean(self) -> str:
        """How a group takes a mean: NCCL reduces with `avg`; gloo sums, and the division is a node of the graph."""
        return "avg" if self.backend == "nccl" else "sum"


def init_mesh(distributed_config: DistributedConfig, device_type: str | None = None) -> DeviceMesh:
    """The mesh that `distributed_config` describes, ranks numbered as transformers numbers them.

    Starts a process group for a single process when none is running and the config asks for one rank.

    Raises MeshError when the sizes do not multiply to the world size, or for pipeline or expert axes.
    """
    sizes = config_sizes(distributed_config)
    world = sizes["dp_replicate"] * sizes["fsdp"] * sizes["tp"]
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_initialized():
        _start_process_group(world, device_type)
    if world != dist.get_world_size():
        raise MeshError(
            f"distributed_config asks for {world} ranks ({_spell(sizes)}), but {dist.get_world_size()} are running. "
            "Start as many processes, or change the sizes."
        )
    return init_device_mesh(device_type, tuple(sizes[a] for a in USER_AXES), mesh_dim_names=USER_AXES)


def config_sizes(config: DistributedConfig) -> dict[str, int]:
    """Sizes of the axes that `config` asks for."""
    if (config.pp_size or 1) > 1:
        raise MeshError(f"pp_size={config.pp_size}: pipeline parallelism is not supported. Use tp_size and fsdp_size.")
    if (config.ep_size or 1) > 1:
        raise MeshError(
            f"ep_size={config.ep_size}: expert parallelism is not supported yet. Use tp_size and fsdp_size."
        )
    return {"dp_replicate": config.dp_replicate_size or 1, "fsdp": config.fsdp_size or 1, "tp": config.tp_size or 1}


def mesh_sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Sizes of a user's mesh by axis name; a 1-D mesh without names is tp.

    Raises MeshError for names that ndcompile does not know, and for a mesh that does not span the world.
    """
    names = mesh.mesh_dim_names
    if names is None:
        if mesh.ndim != 1:
            raise MeshError(
                f"A mesh of shape {tuple(mesh.shape)} needs mesh_dim_names out of {USER_AXES}; "
                "only a 1-D mesh may have none (it means tp)."
            )
        names = ("tp",)
    if unknown := [name for name in names if name not in USER_AXES]:
        raise MeshError(f"Mesh axes {unknown} are unknown. Name the axes out of {USER_AXES}, in any order or subset.")
    if mesh.size() != dist.get_world_size():
        raise MeshError(
            f"The mesh {dict(zip(names, mesh.shape, strict=True))} has {mesh.size()} ranks, but the world has "
            f"{dist.get_world_size()}. ndcompile needs a mesh that spans the world."
        )
    return dict.fromkeys(USER_AXES, 1) | dict(zip(names, mesh.shape, strict=True))


def storage_mesh(mesh: DeviceMesh) -> StorageMesh:
    """Permute the user's mesh by axis name into storage order and give every axis a process group of its own.

    Collective on first use of a layout: every rank creates the same groups in the same order.
    """
    sizes = mesh_sizes(mesh)
    names = list(mesh.mesh_dim_names or ("tp",))
    kept = [name for name in AXES if sizes[name] > 1] or ["fsdp"]
    ranks = mesh.mesh.permute([names.index(n) for n in AXES if n in names])
    ranks = ranks.reshape([sizes[name] for name in kept]).cpu()
    return _mesh_of(ranks, tuple(kept), mesh.device_type)


_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[object, StorageMesh]] = WeakKeyDictionary()
"""Storage meshes of a running world. A second model on the same mesh must reuse the groups, as communicators are
scarce; the entry goes away with the default process group."""


def _mesh_of(ranks: torch.Tensor, names: tuple[str, ...], device_type: str) -> StorageMesh:
    known = _meshes.setdefault(default_group(), {})
    key = (tuple(ranks.flatten().tolist()), tuple(ranks.shape), names, device_type)
    if key not in known:
        known[key] = _create_mesh(ranks, names, device_type, f"nd{len(known)}")
    return known[key]


def leave_groups(mesh: StorageMesh) -> None:
    """Close this rank's connections of every axis, so that ranks that wait for it in a collective fail at once.

    The mesh and its models are of no use afterwards. gloo has no abort: it closes when nothing refers to the group.
    """
    for known in _meshes.values():
        for key in [key for key, other in known.items() if other is mesh]:
            del known[key]
    groups = [resolve_process_group(axis.group) for axis in mesh.axes.values()]  # type: ignore[arg-type]
    for axis in mesh.axes.values():
        unregister_process_group(axis.group)  # type: ignore[arg-type]
    getattr(mesh.device_mesh, "_pg_registry", {}).clear()
    while groups:
        group = groups.pop()
        if mesh.backend == "nccl":
            group.abort()
        dist.destroy_process_group(group)


def _create_mesh(ranks: torch.Tensor, names: tuple[str, ...], device_type: str, prefix: str) -> StorageMesh:
    rank = dist.get_rank()
    coordinate = (ranks == rank).nonzero()[0].tolist()
    groups, axes = [], {}
    for dim, name in enumerate(names):
        rows = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
        created = [_new_group(row, rank, name) for row in rows]  # every rank takes part in creating every group
        group = next(g for g in created if g is not None)
        alias = f"{prefix}.{name}"
        register_process_group(alias, group)  # type: ignore[arg-type]
        groups.append(group)
        axes[name] = Axis(name, ranks.shape[dim], coordinate[dim], alias)
    device_mesh = DeviceMesh.from_group(
        groups if len(groups) > 1 else groups[0], device_type, mesh=ranks, mesh_dim_names=names
    )
    present = {name: axis for name, axis in axes.items() if axis.size > 1}
    return StorageMesh(prefix, device_mesh, MappingProxyType(present), dist.get_backend(groups[0]))


def _new_group(row: list[int], rank: int, axis: str) -> dist.ProcessGroup | None:
    """Create one row's group; its rank order is the row's order, so that gathered shards come in layout order."""
    options: dict[str, Any] = {} if row == sorted(row) else {"sort_ranks": False}
    if options and not CAN_KEEP_RANK_ORDER:
        raise MeshError(
            f"Mesh axis {axis!r} runs over ranks {row}, which do not ascend; torch {torch.__version__} sorts the ranks "
            "of a group, so shards would come in the wrong order. Use ascending ranks, or torch 2.13 or newer."
        )
    group = dist.new_group(row, group_desc=f"ndcompile_{axis}", **options)
    return group if rank in row else None


def _start_process_group(world: int, device_type: str) -> None:
    if world == 1 and "RANK" not in os.environ:
        dist.init_process_group(_backend(device_type), store=dist.HashStore(), rank=0, world_size=1)
        return
    dist.init_process_group(_backend(device_type))


def _backend(device_type: str) -> str:
    return "nccl" if device_type == "cuda" else "gloo"


def _spell(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{name}={size}" for name, size in sizes.items())
