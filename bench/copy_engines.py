"""Gathers and reductions by copy engines beside those of NCCL: are they right, how fast, and what do products lose?

    torchrun --nproc-per-node=2 bench/copy_engines.py [--out lines.jsonl] [--rounds 300]

First `rounds` collectives of random sizes and dtypes, under way several at once, some beside matrix products and some
with a rank that comes late: gathers must be bit-equal to NCCL's, reductions within 2^-7 (bfloat16) or 2^-20 (float32),
relative and absolute, of the sum in float64. Then 24 collectives of 54 MiB a rank: alone, and beside matrix products:
one begins in front of each and is waited for two products later, as in a step. Medians of 7; products are at the
limit of the GPU's power, so they vary by 1 to 2%.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from ndcompile.copy_engines.connect import connect
from ndcompile.mesh import storage_mesh
from ndcompile.plans.sharding_plan import ParameterPlan, ShardingPlan
from ndcompile.verify.agreement import Agreement

MIB = 2**20
SHARD = 54 * MIB
TIMES = 24


def products(a: Tensor, b: Tensor, out: Tensor, times: int) -> None:
    for _ in range(times):
        torch.mm(a, b, out=out)


class Bench:
    def __init__(self) -> None:
        rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(rank)
        self.device = torch.device("cuda", rank)
        dist.init_process_group("nccl", device_id=self.device)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.mesh = storage_mesh(init_device_mesh("cuda", (self.ranks,), mesh_dim_names=("fsdp",)))
        self.connection = connect(self.mesh, Agreement(self.mesh), self.plan())
        self.weight = self.connection.shards["a"].view(torch.bfloat16).normal_()
        (self.group,) = self.mesh.copies.values()
        tensor = lambda *shape: torch.randn(shape, device=self.device, dtype=torch.bfloat16)  # noqa: E731
        self.a, self.b, self.out = tensor(8192, 4096), tensor(4096, 14336), tensor(8192, 14336)
        self.shard, self.whole = tensor(SHARD // 2), tensor(self.ranks * SHARD // 2)
        self.other_shard, self.other_whole = torch.empty_like(self.shard), torch.empty_like(self.whole)

    def plan(self) -> ShardingPlan:
        """Two weights, whose shards all GPUs can read."""
        shape, other = torch.Size((self.ranks * SHARD // 2 // 4096, 4096)), (Replicate(), Shard(0), 1, (self.ranks,))
        weights = [ParameterPlan(name, (), shape, torch.bfloat16, *other, "", "free_full_weight") for name in "ab"]
        return ShardingPlan("bench", {"fsdp": self.ranks}, tuple(weights), ())

    def gather(self, results: list[Tensor], shards: list[Tensor]) -> Any:
        return self.group.allgather_into_tensor_coalesced(results, shards)

    def reduce(self, results: list[Tensor], gradients: list[Tensor], op: Any) -> Any:
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        return self.group.reduce_scatter_tensor_coalesced(results, gradients, options)

    # Are they right?

    def check(self, rounds: int) -> None:
        same = random.Random(0)
        own = random.Random(self.rank + 1)
        waiting: list[tuple[Any, Callable[[], None]]] = []
        for _ in range(rounds):
            dtype = same.choice([torch.bfloat16, torch.float32])
            limit = same.choice([64, 4096, 10**6, 2 * 10**7])
            sizes = [same.randrange(1, limit) for _ in range(same.choice([1, 1, 3, 6]))]
            if own.random() < 0.3:  # late
                torch.cuda._sleep(own.randrange(10**7))
            if same.random() < 0.3:
                products(self.a, self.b, self.out, 2)
            begin = self.check_gather if same.random() < 0.5 else self.check_reduction
            self.shares = not waiting and same.random() < 0.5  # a parameter is not written while others read it
            waiting.append(begin(sizes, dtype, same.choice([dist.ReduceOp.SUM, dist.ReduceOp.AVG])))
            while len(waiting) > same.randrange(4):
                work, compare = waiting.pop(0)
                work.wait()
                compare()
        for work, compare in waiting:
            work.wait()
            compare()
        torch.cuda.synchronize()

    def check_gather(self, sizes: list[int], dtype: torch.dtype, op: Any) -> tuple[Any, Callable[[], None]]:
        shards = [torch.randn(size, device=self.device).to(dtype) for size in sizes]
        if self.shares and dtype is torch.bfloat16:  # one that others read where it is
            shards[0] = self.weight[: sizes[0]].normal_()
        results = [torch.full((self.ranks * size,), torch.nan, device=self.device, dtype=dtype) for size in sizes]
        expected = [torch.empty_like(result) for result in results]
        for result, shard in zip(expected, shards, strict=True):
            dist.all_gather_into_tensor(result, shard)
        work = self.gather(results, shards)

        def compare() -> None:
            for result, right in zip(results, expected, strict=True):
                assert torch.equal(result, right)

        return work, compare

    def check_reduction(self, sizes: list[int], dtype: torch.dtype, op: Any) -> tuple[Any, Callable[[], None]]:
        gradients = [torch.randn(self.ranks * size, device=self.device).to(dtype) for size in sizes]
        results = [torch.full((size,), torch.nan, device=self.device, dtype=dtype) for size in sizes]
        expected = []
        for gradient in gradients:
            exact = gradient.double()
            part = exact.new_empty(len(exact) // self.ranks)
            dist.reduce_scatter_tensor(part, exact, op)
            expected.append(part.to(dtype))
        work = self.reduce(results, gradients, op)

        def compare() -> None:
            # float32 sums of few numbers, rounded to bfloat16, differ from the exact one by one rounding at most
            limit = {torch.bfloat16: 2**-7, torch.float32: 2**-20}[dtype]
            for result, right in zip(results, expected, strict=True):
                assert torch.allclose(result, right, rtol=limit, atol=limit)

        return work, compare

    # How fast?

    def time(self, collective: Callable[[], Any] | None, beside: bool) -> float:
        """Milliseconds until products and collectives end."""
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(4 * 10**7)  # so that the host is ahead
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        works: list[Any] = []
        for _ in range(TIMES):
            works += [collective()] if collective else []
            if beside:
                torch.mm(self.a, self.b, out=self.out)
            if len(works) > 2:
                works.pop(0).wait()
        if beside:
            products(self.a, self.b, self.out, 2)
        for work in works:
            work.wait()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def median(self, *args: Any) -> float:
        """Of the slowest rank."""
        for _ in range(2):
            self.time(*args)
        value = torch.tensor(statistics.median(self.time(*args) for _ in range(7)), device=self.device)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return value.item()

    def measure(self, name: str, collective: Callable[[], Any]) -> dict[str, Any]:
        for _ in range(5):
            self.time(None, True)
        alone, beside, products_alone = (
            self.median(*args) for args in ((collective, False), (collective, True), (None, True))
        )
        return {
            "collective": name,
            "ranks": self.ranks,
            "mib": SHARD // MIB,
            "alone_ms": round(alone / TIMES, 3),
            "gb_s": round((self.ranks - 1) * SHARD * TIMES / alone / 1e6, 1),
            "products_ms": round(products_alone, 2),
            "together_ms": round(beside, 2),
            "longer_ms": round((beside - products_alone) / TIMES, 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args()
    bench = Bench()
    bench.check(args.rounds)
    lines: list[dict[str, Any]] = [{"checked": args.rounds}]
    pairs = {
        "gather, NCCL": lambda: dist.all_gather_into_tensor(bench.other_whole, bench.shard, async_op=True),
        "gather, copies": lambda: bench.gather([bench.other_whole], [bench.shard]),
        "gather of a parameter, copies": lambda: bench.gather([bench.other_whole], [bench.weight]),
        "reduction, NCCL": lambda: dist.reduce_scatter_tensor(
            bench.other_shard, bench.whole, dist.ReduceOp.AVG, async_op=True
        ),
        "reduction, copies": lambda: bench.reduce([bench.other_shard], [bench.whole], dist.ReduceOp.AVG),
    }
    lines += [bench.measure(name, collective) for name, collective in pairs.items()]
    if bench.rank == 0:
        card = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
        text = "".join(json.dumps(line | card) + "\n" for line in lines)
        print(text, end="", flush=True)
        if args.out:
            with open(args.out, "a") as file:
                file.write(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
