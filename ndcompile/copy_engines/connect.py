"""What `copy_engines=True` asks of mesh and GPUs, and the opening of the memory that ranks share."""

from __future__ import annotations

import itertools
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

from ndcompile.copy_engines.group import CopyGroup
from ndcompile.copy_engines.protocol import SLOT, Exchanges, Lanes, Layout, Memory, aligned
from ndcompile.copy_engines.watch import Watch
from ndcompile.errors import UnsupportedError
from ndcompile.mesh import StorageMesh
from ndcompile.plans.sharding_plan import ParameterPlan, ShardingPlan
from ndcompile.private.cuda import why_no_copies
from ndcompile.private.distributed import (
    register_process_group,
    resolve_process_group,
    share_symmetric,
    symmetric_zeros,
    time_out,
)
from ndcompile.verify.agreement import Agreement

AXES = ("fsdp", "efsdp")
"""Axes over which weights are gathered."""
WITHOUT = "or compile without copy_engines."

T = TypeVar("T")
Key = tuple[str, str]
"""What memory is for, and the group whose ranks share it."""


def check_copy_engines(device_type: str, fsdp: int) -> None:
    """Raises UnsupportedError for a mesh on which nothing could be copied. fsdp: size of the axis."""
    if device_type != "cuda":
        raise UnsupportedError(
            f"copy_engines=True needs a mesh of CUDA devices, whose GPUs copy from each other's memory; this one is on "
            f"{device_type!r}. Build the mesh with init_device_mesh('cuda', ...), {WITHOUT}"
        )
    if fsdp < 2:
        raise UnsupportedError(
            "copy_engines=True needs an fsdp axis of at least 2 ranks, over which weights are gathered; this mesh has "
            f"none. Give the mesh an axis 'fsdp', {WITHOUT}"
        )


@dataclass(frozen=True)
class Connection:
    """copies: group of an axis -> the group of the same ranks that copies. shards: FQN -> bytes for a parameter's shard
    that the ranks of its group can read; arenas: what these are parts of."""

    copies: Mapping[str, str] = field(default_factory=dict)
    shards: Mapping[str, Tensor] = field(default_factory=dict)
    arenas: tuple[Memory, ...] = ()


@dataclass(frozen=True)
class Machine:
    """What shares memory, and what copies: GPUs, or in tests processes on the host.

    allocate: zeros (bytes, device), of this rank alone. share: collective of a group, whose ranks then reach each
    other's.
    """

    allocate: Callable[[int, torch.device], Tensor]
    share: Callable[[Tensor, str], Memory]
    lanes: Callable[[torch.device], Lanes]


def connect(mesh: StorageMesh, agreement: Agreement, plan: ShardingPlan) -> Connection:
    """Let the GPUs of every group that gathers weights copy. Collective; models on one mesh share its groups.

    Raises UnsupportedError, on all ranks, where a group's GPUs cannot reach each other or have no memory left.
    """
    if mesh.backend == "fake":
        return Connection()
    groups = [mesh.axes[name].group for name in AXES if mesh.size(name) > 1]
    _check_reach(groups, mesh.device, agreement)
    from ndcompile.copy_engines.lanes import StreamLanes  # needs Triton, which a torch without CUDA lacks

    torch.cuda.empty_cache()  # what torch's allocator keeps is not there for others
    gpus = Machine(symmetric_zeros, lambda own, group: Memory(*share_symmetric(own, group)), StreamLanes)
    return open_groups(mesh, agreement, plan, gpus)


def open_groups(
    mesh: StorageMesh, agreement: Agreement, plan: ShardingPlan, machine: Machine, slot: int = SLOT
) -> Connection:
    """`connect` behind its checks. slot: see `Layout`; that of the first model on a mesh counts."""
    opened = {mesh.axes[name].group: _entries(plan, name) for name in AXES if mesh.size(name) > 1}
    places = {group: _places(entries) for group, entries in opened.items()}
    layouts = {group: Layout(_base(group).size(), slot) for group in opened if group not in mesh.copies}
    wanted = {("slots", group): layout.size for group, layout in layouts.items()}
    wanted |= {("arena", group): ends[-1] for group, ends in places.items() if ends[-1] and not plan.cpu_offload}

    own = _all_or_none(
        agreement,
        "memory",
        lambda: {key: machine.allocate(size, mesh.device) for key, size in wanted.items()},
        f"{sum(wanted.values())} bytes could not be allocated on every GPU of an fsdp group",
        "Give other processes on the GPUs less",
    )
    shared = _all_or_none(
        agreement,
        "shared",
        lambda: {key: machine.share(tensor, key[1]) for key, tensor in own.items()},
        "memory that the GPUs of an fsdp group share could not be opened",
        "Look for what keeps processes from sharing memory of GPUs (a container's limits)",
    )

    for group, layout in layouts.items():
        exchanges = Exchanges(_base(group).rank(), layout, shared["slots", group], machine.lanes(mesh.device))
        watch = Watch(group, mesh.device, time_out(_base(group), mesh.device))
        mesh.copies[group] = CopyGroup(copying(group), exchanges, watch)
        register_process_group(copying(group), mesh.copies[group])  # type: ignore[arg-type]
    arenas = {group: memory for (kind, group), memory in shared.items() if kind == "arena"}
    shards = {}
    for group, arena in arenas.items():
        mesh.copies[group].exchanges.arenas.add(arena)
        for entry, at in zip(opened[group], places[group], strict=False):
            shards[entry.fqn] = arena.own[at : at + _stored_bytes(entry)]
    return Connection({group: copying(group) for group in opened}, shards, tuple(arenas.values()))


def _all_or_none(
    agreement: Agreement, name: str, work: Callable[[], dict[Key, T]], what: str, remedy: str
) -> dict[Key, T]:
    """Do `work` on all ranks; raises UnsupportedError on all of them if it fails on one."""
    found, error = {}, None
    try:
        found = work()
    except RuntimeError as raised:  # torch.OutOfMemoryError is one
        error = f"rank {agreement.rank}: {raised}"
    errors = agreement.exchange(f"copy_engines/{name}", error)
    if (first := next(filter(None, errors), None)) is not None:
        raise UnsupportedError(f"copy_engines=True: {what}: {first} {remedy}, {WITHOUT}")
    return found


def _base(group: str) -> dist.ProcessGroup:
    return resolve_process_group(group)  # type: ignore[arg-type]


def _entries(plan: ShardingPlan, axis: str) -> list[ParameterPlan]:
    """The parameters that are gathered over an axis."""
    return [entry for entry in plan.parameters if _gathered_over(entry) == axis]


def _places(entries: Sequence[ParameterPlan]) -> list[int]:
    """Where in an arena each parameter begins, and the end."""
    return list(itertools.accumulate((aligned(_stored_bytes(entry)) for entry in entries), initial=0))


def copying(group: str) -> str:
    """The name of the group that copies."""
    return f"{group}.copies"


def _gathered_over(entry: ParameterPlan) -> str | None:
    """The axis over which a parameter is gathered."""
    if not isinstance(entry.fsdp, Shard):
        return None
    return "efsdp" if entry.expert else "fsdp"


def _stored_bytes(entry: ParameterPlan) -> int:
    return math.prod(entry.storage_shape) * entry.dtype.itemsize


Device = tuple[str, str, str | None]
"""Host, the GPU's uuid, and why the rank cannot copy."""


def _check_reach(groups: list[str], device: torch.device, agreement: Agreement) -> None:
    """All ranks raise the same error, before any of them waits for another one's memory."""
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    own = torch.cuda.current_device() if device.index is None else device.index
    found = agreement.exchange("copy_engines/devices", [socket.gethostname(), uuids[own], why_no_copies()])
    devices = [(host, uuid, problem) for host, uuid, problem in found]

    def reach(uuid: str) -> bool | None:
        return torch.cuda.can_device_access_peer(own, uuids.index(uuid)) if uuid in uuids else None

    members = [dist.get_process_group_ranks(_base(group)) for group in groups]
    problems = [why_unreachable(devices, dist.get_rank(), ranks, reach) for ranks in members]
    every = agreement.exchange("copy_engines/reach", next(filter(None, problems), None))
    if (first := next(filter(None, every), None)) is not None:
        raise UnsupportedError(
            f"copy_engines=True: the GPUs of an fsdp group cannot copy from each other: {first}. Keep an fsdp group on "
            f"linked GPUs of one host (with dp_replicate over hosts), {WITHOUT}"
        )


def why_unreachable(
    devices: Sequence[Device], rank: int, group: Sequence[int], reach: Callable[[str], bool | None]
) -> str | None:
    """What keeps a rank from the memory of the others of its group; None for nothing that can be known beforehand.

    devices: of all ranks. reach: whether this rank's GPU can read another one; None for one that it does not see.
    """
    here, own, problem = devices[rank]
    if problem is not None:
        return f"on rank {rank} {problem}"
    for other in group:
        host, uuid, _ = devices[other]
        if host != here:
            return f"rank {rank} is on host {here}, and rank {other} of its fsdp group on {host}"
        if other == rank:
            continue
        if uuid == own:
            return f"ranks {rank} and {other} use one GPU (call torch.cuda.set_device before ndcompile.compile)"
        if (reached := reach(uuid)) is None:
            return (
                f"rank {rank} does not see the GPU of rank {other} (let CUDA_VISIBLE_DEVICES name all GPUs of the host)"
            )
        if not reached:
            return f"the GPU of rank {rank} cannot reach the memory of that of rank {other}"
    return None
