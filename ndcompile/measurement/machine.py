"""The ranks that measure together, and how long they take for a call."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ndcompile.errors import MeshError
from ndcompile.private.cuda import keep_busy

FEWEST, MOST = 2, 1000
"""Calls in a row that are timed."""
QUEUE, LAUNCH = 100, 150e-6
"""Calls that the host launches ahead of a GPU, and seconds that it may take for each."""

T = TypeVar("T")


@dataclass(frozen=True)
class Machine:
    """device: this rank's. ranks, nodes: of the world. ranks_a_node: that a node has room for, on GPUs one for each.

    inside: the group of this node's ranks. between: a group of one rank of each node. None where the world is that.
    """

    device: torch.device
    ranks: int
    nodes: int
    ranks_a_node: int
    inside: dist.ProcessGroup | None = None
    between: dist.ProcessGroup | None = None

    @property
    def started(self) -> int:
        """How many ranks of each node take part."""
        return self.ranks // self.nodes

    def spell(self) -> str:
        """Such as "16 ranks of NVIDIA H200 on 2 nodes"."""
        card = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{ranks} of {card} on {'one node' if self.nodes == 1 else f'{self.nodes} nodes'}"

    def values(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random numbers: what a product of zeros takes says little, as it needs less power."""
        return torch.randn(shape, device=self.device).to(dtype)

    def seconds(self, call: Callable[[], object], at_least: float) -> float:
        """Seconds of a call, the mean of calls in a row that take `at_least` seconds together, behind as many to warm
        up: a device at the limit of its power lowers its clock only then. Of a GPU without the host, which in a step is
        ahead of it. Of the slowest rank, and as many calls on every rank. Collective."""
        self._time(call, 1)
        once = self._slowest(self._time(call, FEWEST))
        calls = min(MOST, max(FEWEST, math.ceil(at_least / max(once, 1e-9))))
        self._time(call, calls)
        return self._slowest(self._time(call, calls))

    def _slowest(self, seconds: float) -> float:
        if self.ranks == 1:
            return seconds
        shared = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return float(shared)

    def _time(self, call: Callable[[], object], calls: int) -> float:
        if self.device.type == "cuda":
            return self._time_on_gpu(call, calls)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls

    def _time_on_gpu(self, call: Callable[[], object], calls: int) -> float:
        """Between events, behind a kernel that keeps the GPU busy until the host has launched what is between them."""
        together = torch.zeros(1, device=self.device)
        spans = []
        for first in range(0, calls, QUEUE):
            count = min(QUEUE, calls - first)
            keep_busy(count * LAUNCH)
            if self.ranks > 1:  # GPUs whose clocks differ leave that kernel at different times
                dist.all_reduce(together)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(count):
                call()
            end.record()
            spans.append((start, end))
        torch.cuda.synchronize(self.device)
        return sum(start.elapsed_time(end) for start, end in spans) / 1e3 / calls


def machine_of_world(device: torch.device) -> Machine:
    """The running world as a machine; ranks of one host name are of one node. Collective: it makes the groups.

    Raises MeshError on every rank where nodes have different numbers of ranks, or ranks that are no neighbours.
    """
    ranks = dist.get_world_size()
    hosts = [""] * ranks
    dist.all_gather_object(hosts, socket.gethostname())
    nodes = len(set(hosts))
    each = ranks // nodes
    if any(len(set(hosts[start : start + each])) > 1 for start in range(0, ranks, each)) or ranks % nodes:
        raise MeshError(
            f"{ranks} ranks are on {nodes} hosts, in the order {hosts}. Start as many on every host, and number those "
            "of a host one after the other, as torchrun does."
        )
    room = max(each, torch.cuda.device_count()) if device.type == "cuda" else each
    groups: dict[str, dist.ProcessGroup] = {}
    if nodes > 1:
        rows = [range(start, start + each) for start in range(0, ranks, each)]
        groups = {"inside": _mine(rows), "between": _mine([range(start, ranks, each) for start in range(each)])}
    return Machine(device, ranks, nodes, room, **groups)


def _mine(rows: list[range]) -> dist.ProcessGroup:
    """Every rank makes all groups, in the same order, and keeps its own."""
    made = [dist.new_group(list(row)) for row in rows]
    return next(group for group, row in zip(made, rows, strict=True) if dist.get_rank() in row)


def of_first_rank(make: Callable[[], T]) -> T:
    """What `make` returns on rank 0, on every rank; what it raises there is raised on all. Collective."""
    found: list[tuple[T | None, Exception | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            found = [(make(), None)]
        except (OSError, ValueError) as error:
            found = [(None, error)]
    dist.broadcast_object_list(found, src=0)
    value, raised = found[0]
    if raised is not None:
        raise raised
    return value  # type: ignore[return-value]


def own_device(kind: str) -> torch.device:
    """The device of this rank, by the LOCAL_RANK of its launcher.

    Raises MeshError for a node without as many GPUs, and for ranks whose launcher does not number them.
    """
    if kind == "cpu":
        return torch.device("cpu")
    text = os.environ.get("LOCAL_RANK", "0" if "RANK" not in os.environ else "")
    there = torch.cuda.device_count()
    if not text.isdigit():
        raise MeshError(f"LOCAL_RANK is {text!r}, and should be this rank's number on its node. Start with torchrun.")
    if int(text) >= there:
        remedy = "Start as many ranks a node, or measure the CPU with --device cpu." if there else "Use --device cpu."
        raise MeshError(f"Rank {text} of this node has no GPU: torch sees {there}. {remedy}")
    return torch.device("cuda", int(text))
