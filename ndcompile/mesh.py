"""The storage mesh: the user's mesh with its axes in the order in which parameters are sharded.

TP comes before FSDP: a parameter is first cut by tp, what is left by fsdp, left to right. So one all-gather over fsdp
gives the TP-local weight, every shard is a rectangle, and stock optimizers, `clip_grad_norm_` and DCP take the
parameters as they are.

With expert parallelism fsdp is two axes, ep_rest x efsdp. The experts are cut by ep = tp x ep_rest and then by efsdp,
dense parameters by tp and then by ep_rest x efsdp: both are left to right, so one mesh serves both. Sixteen ranks,
fsdp=4, tp=4, ep=8:

    dense    tp (4)                     fsdp (4)
    mesh     tp (4)      ep_rest (2)    efsdp (2)
    experts  ep (8)                     efsdp (2)
"""

from __future__ import annotations

import dataclasses
import itertools
import math
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
from ndcompile.private.distributed import (
    CAN_KEEP_RANK_ORDER,
    abort_group,
    default_group,
    register_process_group,
    resolve_process_group,
    unregister_process_group,
)

USER_AXES = ("dp_replicate", "fsdp", "ep", "tp")
"""Names of a user's mesh. `init_mesh` numbers ranks in this order, as transformers does: neighbours share a tp group.

An axis "ep" holds the ranks of an expert group that have different batches: there are ep x tp expert shards."""
BOTH = "cpu:gloo,cuda:nccl"
"""Backends of a world whose parameters live in host memory: the norm of their gradients is reduced there."""
FUSED = {"fsdp": ("ep_rest", "efsdp"), "ep": ("tp", "ep_rest")}
"""Axes that are two axes of the storage mesh, the first one major."""


@dataclass(frozen=True)
class Axis:
    """One axis, or two fused. `group` is a name of its process group that is the same on every rank.

    by_rank: the group is in the order of global ranks instead of shards: the second of the two fused axes is major.
    """

    name: str
    size: int
    coordinate: int
    group: str
    by_rank: bool = False


@dataclass(frozen=True)
class StorageMesh:
    """Axes in storage order, size-1 axes left out of `device_mesh` but not of the questions one can ask.

    name: the same on all ranks. axes: those of `device_mesh`, and the fused ones. counter: numbers the models compiled
    on this mesh, alike on all ranks. left_for: why this rank left the groups, empty while it has them. copies: name of
    a group -> the one of the same ranks that copies, see copy_engines.
    """

    name: str
    device_mesh: DeviceMesh
    axes: Mapping[str, Axis]
    backend: str
    counter: Iterator[int] = field(default_factory=itertools.count)
    left_for: list[str] = field(default_factory=list)
    copies: dict[str, Any] = field(default_factory=dict)

    def size(self, name: str) -> int:
        """Size of an axis; an absent axis has size 1."""
        return self.axes[name].size if name in self.axes else 1

    def coordinate(self, name: str) -> int:
        return self.axes[name].coordinate if name in self.axes else 0

    @property
    def device(self) -> torch.device:
        """The device of this rank's parameters."""
        kind = self.device_mesh.device_type
        return (
            torch.device(kind, torch.get_device_module(kind).current_device()) if kind != "cpu" else torch.device(kind)
        )

    @property
    def data_rank(self) -> int:
        """In the order of the user's mesh, where ep_rest is the minor part of fsdp."""
        rank = self.coordinate("dp_replicate")
        parts = ("efsdp", "ep_rest")
        for name in parts if any(part in self.axes for part in parts) else ("fsdp",):
            rank = rank * self.size(name) + self.coordinate(name)
        return rank

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

    Raises MeshError when the sizes do not multiply to the world size, for several ranks in a process that no launcher
    started, or for a pipeline axis.
    """
    sizes = config_sizes(distributed_config)
    names = ("dp_replicate", "fsdp", "tp")
    world = math.prod(sizes[name] for name in names)
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_initialized():
        if world > 1 and "RANK" not in os.environ:
            raise MeshError(
                f"distributed_config asks for {world} ranks ({_spell(sizes, names)}), but this process is alone: there "
                f"is no RANK in its environment. Start the script with torchrun --nproc-per-node {world}."
            )
        _start_process_group(world, _backend(device_type, distributed_config.fsdp_cpu_offload))
    if world != dist.get_world_size():
        raise MeshError(
            f"distributed_config asks for {world} ranks ({_spell(sizes, names)}), but {dist.get_world_size()} are "
            "running. Start as many processes, or change the sizes."
        )
    return init_device_mesh(device_type, tuple(sizes[name] for name in names), mesh_dim_names=names)


def config_sizes(config: DistributedConfig) -> dict[str, int]:
    """Sizes that `config` asks for: dp_replicate, fsdp, tp, and ep, the number of expert shards."""
    if (config.pp_size or 1) > 1:
        raise MeshError(f"pp_size={config.pp_size}: pipeline parallelism is not supported. Use tp_size and fsdp_size.")
    sizes = {"dp_replicate": config.dp_replicate_size, "fsdp": config.fsdp_size, "tp": config.tp_size}
    return {name: size or 1 for name, size in sizes.items()} | {"ep": config.ep_size or 1}


def mesh_sizes(mesh: DeviceMesh, ep: int = 1) -> dict[str, int]:
    """Sizes of a user's mesh: dp_replicate, fsdp (over an "ep" axis too), tp, and ep, the number of expert shards.

    A 1-D mesh without names is tp. `ep` is what the config asks for; a mesh with an "ep" axis says it by itself.

    Raises MeshError for names that ndcompile does not know, for a mesh that does not span the world, and for an ep that
    is no multiple of tp or does not divide fsdp x tp.
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
    axes = dict.fromkeys(USER_AXES, 1) | dict(zip(names, mesh.shape, strict=True))
    sizes = {"dp_replicate": axes["dp_replicate"], "fsdp": axes["fsdp"] * axes["ep"], "tp": axes["tp"]}
    if "ep" in names:
        if ep not in (1, axes["ep"] * axes["tp"]):
            raise MeshError(
                f"The mesh has {axes['ep'] * axes['tp']} expert shards (ep={axes['ep']} x tp={axes['tp']}), but "
                f"distributed_config asks for ep_size={ep}. Make them agree, or leave ep_size out."
            )
        ep = axes["ep"] * axes["tp"]
    check_expert_size(sizes, ep)
    return sizes | {"ep": ep}


def check_expert_size(sizes: Mapping[str, int], ep: int) -> None:
    """Raises MeshError, with the legal sizes, for an ep that the mesh cannot have."""
    fsdp, tp = sizes["fsdp"], sizes["tp"]
    if ep > 1 and (ep % tp or (fsdp * tp) % ep):
        legal = [tp * k for k in range(1, fsdp + 1) if fsdp % k == 0 and tp * k > 1]
        raise MeshError(
            f"ep={ep} must be a multiple of tp={tp} and divide fsdp x tp = {fsdp * tp}. Legal sizes on this mesh: "
            f"{legal}."
        )


def storage_mesh(mesh: DeviceMesh, ep: int = 1) -> StorageMesh:
    """Permute the user's mesh by axis name into storage order and give every axis a process group of its own.

    ep: number of expert shards. Collective on first use of a layout: every rank creates the same groups in the same
    order.
    """
    sizes = mesh_sizes(mesh, ep)
    names = list(mesh.mesh_dim_names or ("tp",))
    ep, rest = sizes["ep"], max(sizes["ep"] // sizes["tp"], 1)
    storage = {"dp_replicate": sizes["dp_replicate"], "tp": sizes["tp"]}
    storage |= {"ep_rest": rest, "efsdp": sizes["fsdp"] // rest} if ep > 1 else {"fsdp": sizes["fsdp"]}
    ranks = mesh.mesh.permute([names.index(name) for name in USER_AXES if name in names]).cpu()
    ranks = ranks.reshape(sizes["dp_replicate"], sizes["fsdp"] // rest, rest, sizes["tp"]).permute(0, 3, 2, 1)
    kept = {name: size for name, size in storage.items() if size > 1} or {"fsdp": 1}
    return _mesh_of(ranks.reshape(list(kept.values())), tuple(kept), mesh.device_type, ep > 1)


@dataclass(frozen=True)
class World:
    """Storage meshes of a running world. A second model on the same mesh must reuse the groups, as communicators are
    scarce. A name is never used twice: the store remembers what was agreed under it."""

    meshes: dict[object, StorageMesh] = field(default_factory=dict)
    names: Iterator[int] = field(default_factory=itertools.count)


_worlds: WeakKeyDictionary[dist.ProcessGroup, World] = WeakKeyDictionary()
"""By default process group, with which the entry goes away."""


def _mesh_of(ranks: torch.Tensor, names: tuple[str, ...], device_type: str, experts: bool) -> StorageMesh:
    world = _worlds.setdefault(default_group(), World())
    key = (tuple(ranks.flatten().tolist()), tuple(ranks.shape), names, device_type, experts)
    if key not in world.meshes:
        world.meshes[key] = _create_mesh(ranks, names, device_type, f"nd{next(world.names)}", experts)
    return world.meshes[key]


def leave_groups(mesh: StorageMesh) -> None:
    """Close this rank's connections of every axis, so that ranks that wait for it in a collective of gloo fail at once.

    NCCL lets them wait for the time-out of the group: a kernel that has begun does not see that its peer left. The mesh
    and its models are of no use afterwards. A stream that waits for a flag of copy engines waits until their time-out
    ends the process: let go, it would send others what it never got. gloo has no abort: it closes when nothing refers
    to the group.
    """
    for world in _worlds.values():
        for key in [key for key, other in world.meshes.items() if other is mesh]:
            del world.meshes[key]
    names = {axis.group for axis in mesh.axes.values()}
    for copies in mesh.copies.values():
        unregister_process_group(copies.alias)
    mesh.copies.clear()
    groups = [resolve_process_group(name) for name in names]  # type: ignore[arg-type]
    for name in names:
        unregister_process_group(name)  # type: ignore[arg-type]
    getattr(mesh.device_mesh, "_pg_registry", {}).clear()
    while groups:
        group = groups.pop()
        if mesh.backend == "nccl":
            abort_group(group, mesh.device_mesh.device_type)
        dist.destroy_process_group(group)


def _create_mesh(
    ranks: torch.Tensor, names: tuple[str, ...], device_type: str, prefix: str, experts: bool
) -> StorageMesh:
    groups, axes = [], {}
    for name in names:
        group, axes[name] = _create_axis(ranks, names, name, (name,), prefix)
        groups.append(group)
    device_mesh = DeviceMesh.from_group(
        groups if len(groups) > 1 else groups[0], device_type, mesh=ranks, mesh_dim_names=names
    )
    present = {name: axis for name, axis in axes.items() if axis.size > 1}
    for fused, pair in FUSED.items() if experts else ():
        parts = tuple(part for part in pair if part in present)
        if len(parts) == 1:
            present[fused] = dataclasses.replace(present[parts[0]], name=fused)
        elif parts:
            present[fused] = _create_axis(ranks, names, fused, parts, prefix)[1]
    return StorageMesh(prefix, device_mesh, MappingProxyType(present), _backend_name(device_type, groups[0]))


def _create_axis(
    ranks: torch.Tensor, names: tuple[str, ...], name: str, parts: tuple[str, ...], prefix: str
) -> tuple[dist.ProcessGroup, Axis]:
    """The axis over the dims `parts` of `ranks`, the first one major; every rank takes part in creating every group."""
    rank = dist.get_rank()
    dims = [names.index(part) for part in parts]
    size = math.prod(ranks.shape[dim] for dim in dims)
    rows = ranks.movedim(dims, list(range(-len(dims), 0))).reshape(-1, size).tolist()
    by_rank = name == "ep" and not CAN_KEEP_RANK_ORDER and any(row != sorted(row) for row in rows)
    created = [_new_group(_by_position(row, parts, ranks, names) if by_rank else row, rank, name) for row in rows]
    coordinate = next(row.index(rank) for row in rows if rank in row)
    group = next(g for g in created if g is not None)
    alias = f"{prefix}.{name}"
    register_process_group(alias, group)  # type: ignore[arg-type]
    return group, Axis(name, size, coordinate, alias, by_rank)


def _by_position(row: list[int], parts: tuple[str, ...], ranks: torch.Tensor, names: tuple[str, ...]) -> list[int]:
    """A fused axis with its second part major: ascending where neighbours share a tp group."""
    major, minor = (ranks.shape[names.index(part)] for part in parts)
    return [row[first * minor + second] for second in range(minor) for first in range(major)]


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


def _start_process_group(world: int, backend: str) -> None:
    if world == 1 and "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    dist.init_process_group(backend)


def _backend(device_type: str, offload: bool) -> str:
    if device_type != "cuda":
        return "gloo"
    return BOTH if offload else "nccl"


def _backend_name(device_type: str, group: dist.ProcessGroup) -> str:
    return backend_of(device_type, group) or dist.get_backend(group)


def backend_of(device_type: str, group: dist.ProcessGroup | None = None) -> str | None:
    """Which backend communicates tensors of a device, in a group or in the default one; None for none.

    The name of a group with several, `dist.get_backend`, is that of none of them.
    """
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}.get(device_type)


def _spell(sizes: Mapping[str, int], names: tuple[str, ...]) -> str:
    return " x ".join(f"{name}={sizes[name]}" for name in names)
