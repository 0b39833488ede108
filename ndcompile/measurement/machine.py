"""The ranks that measure together, and how long they take for a call."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ndcompile.errors import MeshError
from ndcompile.private.cuda import keep_busy

FEWEST, MOST = 2, 1000
"""Calls in a row that are timed."""
QUEUE, LAUNCH = 100, 150e-6
"""Calls that the host launches ahead of a GPU, and seconds that it may take for each."""


@dataclass(frozen=True)
class Machine:
    """device: this rank's. ranks, nodes: of the world. node: the group of this node's ranks; None on one node."""

    device: torch.device
    ranks: int
    nodes: int = 1
    node: dist.ProcessGroup | None = None

    @property
    def ranks_a_node(self) -> int:
        return self.ranks // self.nodes

    def spell(self) -> str:
        """Such as "8 ranks of NVIDIA H200, 2 nodes"."""
        card = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{ranks} of {card}, {'one node' if self.nodes == 1 else f'{self.nodes} nodes'}"

    def slowest(self, seconds: float) -> float:
        """The most of all ranks. Collective."""
        if self.ranks == 1:
            return seconds
        shared = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return float(shared)

    def seconds(self, call: Callable[[], object], at_least: float) -> float:
        """Seconds of a call, the mean of calls in a row that take `at_least` seconds together, behind as many to warm
        up: a device at the limit of its power lowers its clock only then. Of a GPU without the host, which in a step is
        ahead of it. Of the slowest rank, and as many calls on every rank. Collective."""
        self._time(call, 1)
        once = self.slowest(self._time(call, FEWEST))
        calls = min(MOST, max(FEWEST, math.ceil(at_least / max(once, 1e-9))))
        self._time(call, calls)
        return self.slowest(self._time(call, calls))

    def _time(self, call: Callable[[], object], calls: int) -> float:
        if self.device.type == "cuda":
            return self._time_on_gpu(call, calls)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls

    def _time_on_gpu(self, call: Callable[[], object], calls: int) -> float:
        """Between events, behind a kernel that keeps the GPU busy until the host has launched what is between them."""
        spans = []
        for first in range(0, calls, QUEUE):
            count = min(QUEUE, calls - first)
            keep_busy(count * LAUNCH)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(count):
                call()
            end.record()
            spans.append((start, end))
        torch.cuda.synchronize(self.device)
        return sum(start.elapsed_time(end) for start, end in spans) / 1e3 / calls

    def values(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random numbers: what a product of zeros takes says little, as it needs less power."""
        return torch.randn(shape, device=self.device).to(dtype)


def machine_of_world(device_type: str) -> Machine:
    """The running world as a machine. Collective: it makes a group for every node.

    Raises MeshError on every rank where nodes have different numbers of ranks.
    """
    ranks = dist.get_world_size()
    index = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(device_type, index) if device_type != "cpu" else torch.device("cpu")
    local = [0] * ranks
    dist.all_gather_object(local, int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks))))
    if len(set(local)) > 1 or ranks % local[0]:
        raise MeshError(
            f"The nodes have different numbers of ranks: LOCAL_WORLD_SIZE is {local} on ranks 0 to {ranks - 1}. "
            "Start as many on every node (torchrun --nproc-per-node)."
        )
    nodes = ranks // local[0]
    group = None
    if nodes > 1:
        starts = range(0, ranks, local[0])
        groups = [dist.new_group(list(range(start, start + local[0]))) for start in starts]
        group = groups[dist.get_rank() // local[0]]
    return Machine(device, ranks, nodes, group)
