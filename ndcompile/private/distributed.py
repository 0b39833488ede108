"""Private symbols of torch.distributed: process groups, the store, packed placements, symmetric memory."""

from __future__ import annotations

import inspect
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch._C._distributed_c10d import Work
from torch.distributed._symmetric_memory import _pipelined_produce_and_all2all as produce_and_exchange
from torch.distributed._symmetric_memory import get_symm_mem_workspace
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_group as default_group
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.distributed_c10d import _register_process_group as register_process_group
from torch.distributed.distributed_c10d import _resolve_process_group as resolve_process_group
from torch.distributed.distributed_c10d import _unregister_process_group as unregister_process_group
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

CAN_KEEP_RANK_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters
"""torch 2.11 always sorts the ranks of a new group; later releases can keep the order of the mesh."""


try:
    from torch.distributed.tensor.placement_types import _StridedShardOffsetMode

    NO_OFFSETS: object = _StridedShardOffsetMode.NONE
    """How torch asks a packed placement for a size alone."""
except ImportError:  # torch 2.11 always asks for an offset too
    NO_OFFSETS = object()


def abort_group(group: dist.ProcessGroup, device_type: str) -> None:
    """Abort what a group does with tensors of a device. Its own `abort` asks all backends, of which not all can."""
    group._get_backend(torch.device(device_type)).abort()


def collectives_begun(group: dist.ProcessGroup) -> int:
    """How many collectives this rank has begun on a group. gloo and NCCL count them."""
    return group._get_sequence_number_for_group()  # type: ignore[attr-defined]


def mesh_without_groups(device_type: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh as rank 0 sees it, of which only names and shape can be asked: it has no process groups."""
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


fused_all_gather_matmul = torch.ops.symm_mem.fused_all_gather_matmul.default


fused_matmul_reduce_scatter = torch.ops.symm_mem.fused_matmul_reduce_scatter.default


def open_symmetric_memory(group: str) -> None:
    """Let the GPUs of a group read each other's memory: each maps a workspace of the others; collective.

    Raises what torch raises where they cannot, such as ranks of two hosts. Neither torch 2.11 nor 2.13 needs the group
    to be enabled for it. The workspace grows with what is exchanged.
    """
    get_symm_mem_workspace(group, min_size=2**20)  # type: ignore[arg-type]


def symmetric_zeros(size: int, device: torch.device) -> torch.Tensor:
    """Bytes that other GPUs can be let into, of no use to them yet."""
    own = symmetric.empty(size, dtype=torch.uint8, device=device).zero_()
    torch.get_device_module(device).synchronize(device)  # nobody may write a flag that is yet to be cleared
    return own


def share_symmetric(own: torch.Tensor, group: str) -> tuple[torch.Tensor, list[int], object]:
    """Let all ranks of a group map `symmetric_zeros`; collective. These, all ranks' addresses, what keeps them alive.

    Raises what torch raises where ranks cannot. Multicast is not used.
    """
    handle = symmetric.rendezvous(own, group)  # type: ignore[arg-type]
    ranks = range(handle.world_size)
    return own, [handle.get_buffer(rank, (len(own),), torch.uint8).data_ptr() for rank in ranks], handle


def time_out(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long a collective of a group may take on a device."""
    return group._get_backend(device).options._timeout


__all__ = [
    "CAN_KEEP_RANK_ORDER",
    "NO_OFFSETS",
    "StridedShard",
    "Work",
    "abort_group",
    "default_group",
    "default_store",
    "fused_all_gather_matmul",
    "fused_matmul_reduce_scatter",
    "mesh_without_groups",
    "open_symmetric_memory",
    "produce_and_exchange",
    "register_process_group",
    "resolve_process_group",
    "share_symmetric",
    "symmetric_zeros",
    "time_out",
    "unregister_process_group",
]
