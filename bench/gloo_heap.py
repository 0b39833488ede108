"""Several collectives at once on one gloo group corrupt the heap, without ndcompile.

    torchrun --nproc-per-node=4 bench/gloo_heap.py --at-once 6 --seconds 120

Prints how many all-gathers were done. With six at once a rank mostly dies ("malloc(): unaligned tcache chunk detected",
or a segmentation fault in a gloo thread) within two minutes on two cores, torch 2.13; with one or two none did.
This is why `passes/overlap_communication.py` keeps few under way on the CPU: see docs/speed.md, "Overlap and buckets".
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist

BATCH = 500
"""Rounds between two looks at the clock, which all ranks take from the first one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--elements", type=int, default=2000)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    start, done, over = time.monotonic(), 0, torch.zeros(1)
    while not over.item():
        for _ in range(BATCH):
            gather_at_once(arguments.at_once, arguments.elements)
        done += BATCH * arguments.at_once
        over.fill_(time.monotonic() - start > arguments.seconds)
        dist.broadcast(over, 0)
        if dist.get_rank() == 0:
            print(f"{done} all-gathers in {time.monotonic() - start:.0f} s", flush=True)
    dist.destroy_process_group()


def gather_at_once(number: int, elements: int) -> None:
    """Start `number` all-gathers, then wait for each and look at what came."""
    collectives, group = torch.ops._c10d_functional, dist.group.WORLD
    assert group is not None
    inputs = [torch.full((elements,), float(value)) for value in range(number)]
    started = [collectives.all_gather_into_tensor(each, group.size(), group.group_name) for each in inputs]
    for value, pending in enumerate(started):
        result = collectives.wait_tensor(pending)
        assert result[0] == value
        assert result[-1] == value


if __name__ == "__main__":
    main()
