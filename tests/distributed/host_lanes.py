"""The protocol of copy engines between processes: memory of the host in the place of GPUs that reach each other's.

Operations are done when they are given, which is one of the orders in which a GPU may do them.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from ndcompile import compiler
from ndcompile.copy_engines import connect
from ndcompile.copy_engines.connect import Machine
from ndcompile.copy_engines.protocol import Memory
from ndcompile.private.distributed import resolve_process_group

_numbers = itertools.count()


class Done:
    def query(self):
        return True


class HostLanes:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def copy(self, lane, copies):
        for to, source, size in copies:
            ctypes.memmove(to, source, size)

    def tell(self, lane, flags, value):
        for flag in flags:
            ctypes.c_int32.from_address(flag).value = value

    def hear(self, lane, flags, value):
        deadline = time.monotonic() + 60
        while any(ctypes.c_int32.from_address(flag).value < value for flag in flags):
            assert time.monotonic() < deadline, "a flag was not told"
            time.sleep(0)

    def add(self, lane, result, own, others, rank, mean):
        split = len(others) - rank
        rows = [*others[split:], own, *others[:split]]
        total = sum(row.float() for row in rows)
        result.copy_(total / len(rows) if mean else total)

    def mark(self, lane):
        return Done()

    def behind(self, lane, mark):
        pass


def allocate(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def share(own: torch.Tensor, group: str) -> Memory:
    """A file in memory for every rank, which all of the group map."""
    base = resolve_process_group(group)
    ranks = dist.get_process_group_ranks(base)
    names: list = [None] * len(ranks)
    name = f"/dev/shm/ndcompile-{dist.get_rank()}-{time.monotonic_ns()}-{next(_numbers)}"
    torch.from_file(name, shared=True, size=len(own), dtype=torch.uint8).zero_()
    dist.all_gather_object(names, name, group=base)
    maps = [torch.from_file(each, shared=True, size=len(own), dtype=torch.uint8) for each in names]
    dist.barrier(base)
    Path(name).unlink()
    return Memory(maps[ranks.index(dist.get_rank())], [each.data_ptr() for each in maps], maps)


HOST = Machine(allocate, share, HostLanes)


@contextmanager
def host_instead_of_gpus(machine: Machine = HOST, slot: int = 8192) -> Iterator[None]:
    """While active, `copy_engines=True` is taken on a mesh of CPUs. slot: small, so that there are chunks."""

    def connected(mesh, agreement, plan):
        return connect.open_groups(mesh, agreement, plan, machine, slot)

    with mock.patch.multiple(compiler, check_copy_engines=lambda *_: None, connect=connected):
        yield
