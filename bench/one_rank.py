"""One rank of a larger mesh, alone on one GPU: the memory of its training step, and the time of its kernels.

    python bench/one_rank.py --case ndcompile:tp=4 --batch 8 --out results.jsonl [--peak peak.txt]

The process group is torch's "fake" one: collectives return at once, and leave in their results what memory held. So
the step is that of rank 0 without its communication; losses mean nothing, and are not reported. Sizes, kernels and
allocations are those of the real step: fsdp=2 and tp=2 can be compared with what bench/train.py measures on two GPUs.
With fsdp no time is reported: gathered weights are what memory held, and products of zeros take less power.

Cases and options are those of bench/train.py. --peak lists what is allocated at the peak of one step: bytes, and the
line of inductor's code, or of Python, that allocated it.
"""

from __future__ import annotations

import argparse
import json
import linecache
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import train
import transformers
from torch.testing._internal.distributed.fake_pg import FakeStore

import ndcompile


def run(args: argparse.Namespace) -> dict[str, Any]:
    sizes = train.sizes_of(args.case)
    model = train.build_ndcompile(args, sizes)
    ndcompile.init_weights(model, 0)
    data_ranks = sizes.get("dp_replicate", 1) * sizes.get("fsdp", 1)
    vocabulary = train.config(args.model, args.layers).vocab_size
    ids = torch.randint(0, vocabulary, (args.batch // data_ranks, args.sequence), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    result: dict[str, Any] = {"case": args.case, "model": args.model, "one_rank": True}
    result |= {"loss_only": True} if args.loss_only else {}
    result |= {"layers": args.layers, "batch": args.batch}
    step = train.make_step(args, model, optimizer, ids, result)
    train.measure(step, 3, [])
    torch.cuda.reset_peak_memory_stats()
    median = statistics.median(train.measure(step, args.steps, []))
    peak = torch.cuda.max_memory_allocated()
    if args.peak:
        write_peak(step, args.peak)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    times = {"ms": round(median * 1e3, 1)} if sizes.get("fsdp", 1) == 1 else {}
    return result | times | {"peak_gb": round(peak / 1e9, 2), "card": torch.cuda.get_device_name()} | versions


def write_peak(step: Callable[[], object], path: str) -> None:
    """What one step has allocated of its own when it has most, largest first."""
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=1_000_000)
    step()
    torch.cuda.synchronize()
    events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    alive: dict[int, Any] = {}
    total = most = 0
    at_peak: list[Any] = []
    for event in events:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
            total += event["size"]
        elif event["action"] == "free_requested" and event["addr"] in alive:
            total -= alive.pop(event["addr"])["size"]
        if total > most and event["action"] == "alloc":
            most, at_peak = total, list(alive.values())
    with open(path, "w") as out:
        for event in sorted(at_peak, key=lambda event: -event["size"]):
            out.write(f"{event['size'] / 1e6:10.1f} MB  {origin(event['frames'])}\n")


def origin(frames: list[dict[str, Any]]) -> str:
    """The innermost line outside of torch."""
    own = [f for f in frames if "/torch/" not in f["filename"] and "??" not in f["filename"]]
    if not own:
        return "?"
    line = linecache.getline(own[0]["filename"], own[0]["line"]).strip()
    return f"{own[0]['filename'].rpartition('/')[2]}:{own[0]['line']}: {line}"


def main() -> None:
    parser = train.arguments(__doc__)
    parser.add_argument("--peak", help="file for a list of what is allocated at the peak")
    args = parser.parse_args()
    args.checkpoint = None
    transformers.logging.set_verbosity_error()
    torch.cuda.set_device(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(train.sizes_of(args.case).values()))
    result = run(args)
    print(json.dumps(result), flush=True)
    if args.out:
        with open(args.out, "a") as out:
            out.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
