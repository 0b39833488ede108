"""What kernels lose to a collective that runs beside them."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from ndcompile.measurement.collectives import prepare, wait
from ndcompile.measurement.compute import MIB, SIZES
from ndcompile.measurement.machine import Machine

GATHERED = {"cuda": 128 * MIB, "cpu": 4 * MIB}
"""Bytes of the all-gather, a layer's weight, by device type."""
ROOM = 4
"""Times as long as the collective alone run the products beside it: it may take two to three times as long there."""


def hidden_fraction(machine: Machine, group: dist.ProcessGroup, at_least: float) -> float:
    """Seconds that products lose to a second of an all-gather beside them, from 0 to 1. Collective.

    The second is the all-gather's own, when nothing runs beside it: that is how long the time model takes it to be.
    """
    sizes = SIZES[machine.device.type]
    left = machine.values(sizes.tokens, sizes.width, dtype=sizes.dtypes[0])
    right = machine.values(sizes.width, 4 * sizes.width, dtype=sizes.dtypes[0])
    result = torch.empty(sizes.tokens, 4 * sizes.width, dtype=left.dtype, device=machine.device)
    start = prepare(machine, group, "all_gather_into_tensor", GATHERED[machine.device.type])

    def product() -> None:
        torch.mm(left, right, out=result)

    alone = machine.seconds(lambda: wait(start()), at_least)
    count = max(1, math.ceil(ROOM * alone / machine.seconds(product, at_least)))

    def compute() -> None:
        for _ in range(count):
            product()

    def both() -> None:
        started = start()
        compute()
        wait(started)

    lost = machine.seconds(both, at_least) - machine.seconds(compute, at_least)
    return min(1.0, max(0.0, lost / alone))
