"""Training steps on the CPU beside transformers eager: both models in the same processes, a step of each in turn.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node=4 bench/train_cpu.py --model smollm2 --layout fsdp=4 --out results.jsonl
    OMP_NUM_THREADS=1 torchrun --nproc-per-node=4 bench/train_cpu.py --model llama --layout fsdp=2,tp=2 --out ...

Models: smollm2 has the sizes of SmolLM2-135M, llama is a small one; weights and tokens are random, both start from the
same checkpoint, float32, gloo. A step is forward, backward and AdamW. Reported: median and minimum milliseconds of both
over the slowest rank, their ratio (transformers over ndcompile), seconds to the first step, losses of the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig

import ndcompile

SIZES: dict[str, dict[str, Any]] = {
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "llama": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 16384,
        "tie_word_embeddings": False,
    },
}


def checkpoint(model: str, folder: str) -> str:
    """Random weights, written by rank 0 to a folder that all ranks know."""
    shared = [folder]
    dist.broadcast_object_list(shared)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = LlamaConfig(**SIZES[model], use_cache=False, dtype="float32")
        AutoModelForCausalLM.from_config(config).save_pretrained(shared[0])
    dist.barrier()
    return shared[0]


def with_ndcompile(folder: str, layout: dict[str, int]) -> Any:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(folder))
    return ndcompile.compile(model.train(), distributed_config=asked(layout), checkpoint=folder)


def with_transformers(folder: str, layout: dict[str, int]) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=asked(layout)).train()


def asked(layout: dict[str, int]) -> DistributedConfig:
    return DistributedConfig(**{"fsdp_size": 1, "tp_size": 1} | {f"{axis}_size": size for axis, size in layout.items()})


def make_step(model: Any, ids: torch.Tensor) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()

    return step


def timed(step: Callable[[], float]) -> tuple[float, float]:
    """Seconds until the slowest rank is done, and the loss."""
    dist.barrier()
    start = time.perf_counter()
    loss = step()
    dist.barrier()
    return time.perf_counter() - start, loss


def run(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    layout = {axis: int(size) for axis, size in (part.split("=") for part in args.layout.split(","))}
    folder = checkpoint(args.model, folder)
    generator = torch.Generator().manual_seed(dist.get_rank() // layout.get("tp", 1))
    ids = torch.randint(0, SIZES[args.model]["vocab_size"], (args.batch, args.sequence), generator=generator)
    systems = {"ndcompile": with_ndcompile, "transformers": with_transformers}
    steps = {name: make_step(build(folder, layout), ids) for name, build in systems.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    for _ in range(1 + args.warm_up + args.steps):
        for name, step in steps.items():
            taken[name].append(timed(step))
    result: dict[str, Any] = {
        "model": args.model,
        "layout": args.layout,
        "batch": args.batch,
        "sequence": args.sequence,
    }
    for name, times in taken.items():
        milliseconds = [1e3 * seconds for seconds, _ in times[1 + args.warm_up :]]
        result[f"{name}_ms"] = round(statistics.median(milliseconds), 1)
        result[f"{name}_min_ms"] = round(min(milliseconds), 1)
        result[f"{name}_first_s"] = round(times[0][0], 1)
    result["ratio"] = round(result["transformers_ms"] / result["ndcompile_ms"], 2)
    result["losses"] = {name: [round(loss, 4) for _, loss in times] for name, times in taken.items()}
    return result | {"cores": os.cpu_count(), "torch": torch.__version__, "transformers": transformers.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="smollm2")
    parser.add_argument("--layout", default="fsdp=4")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a data rank")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--out", help="file to append the line to")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo", timeout=timedelta(minutes=20))
    with tempfile.TemporaryDirectory() as folder:
        result = run(args, folder)
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
        if args.out:
            with open(args.out, "a") as out:
                out.write(json.dumps(result) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
