"""Loading beside transformers: wall time, bytes, and memory of 4 gloo ranks on one host; one JSON line a case.

    python bench/load.py --folder FOLDER --out bench/load.jsonl

Writes two checkpoints into the folder when they are missing: dense (Llama, 2.2 GB of bf16 in 5 files) and moe
(Qwen3-MoE with 64 experts, 1.4 GB in 5 files). A case is CHECKPOINT:LAYOUT. Both systems build the model on the meta
device, shard it and fill it, in turn and in the same processes; the files are cold (dropped from the page cache, which
needs no root) or warm. Reported, as medians of the rounds:

    seconds       of the slowest rank, until the call returns
    used_seconds  until every element was read once: where a shard is rows of one tensor, transformers leaves it in a
                  map of the file, which is read at first use
    load_seconds  of ndcompile.load alone; the rest is building the model and its plan
    read_ratio    bytes that a rank asks for over the bytes of its shards, of the worst rank (ndcompile only: a map asks
                  for nothing)
    disk_ratio    cold, bytes that all ranks together got from the disk over the size of the checkpoint
    peak_mb       anonymous memory over the bytes of the shards, sampled every 5 ms, of the worst rank
    mapped_mb     bytes of the shards that are no memory of the process but a map of the file, of the worst rank
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

import ndcompile

RANKS = 4
LAYOUTS = {
    "fsdp4": {"fsdp": 4},
    "fsdp2-tp2": {"fsdp": 2, "tp": 2},
    "fsdp4-ep4": {"fsdp": 4, "ep": 4},
}
CASES = ["dense:fsdp4", "dense:fsdp2-tp2", "moe:fsdp4", "moe:fsdp4-ep4"]
SYSTEMS = ("transformers", "ndcompile")


def dense() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
    )


def moe() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        hidden_size=1024,
        intermediate_size=2048,
        moe_intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=64,
        vocab_size=32000,
        mlp_only_layers=[],
    )


def write(folder: Path) -> None:
    """Random weights, as save_pretrained writes them."""
    for name, config, size in (("dense", dense(), "500MB"), ("moe", moe(), "300MB")):
        if not (folder / name / "config.json").exists():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            model.save_pretrained(folder / name, max_shard_size=size)
            os.sync()


def load(folder: Path, layout: str, system: str) -> tuple[torch.nn.Module, int, float]:
    """The sharded model, the bytes that this rank asked for and the seconds of the load (0 where not known)."""
    sizes = LAYOUTS[layout]
    if system == "transformers":
        config = DistributedConfig(**{f"{axis}_size": size for axis, size in sizes.items()})
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, distributed_config=config), 0, 0.0
    axes = {axis: size for axis, size in sizes.items() if axis != "ep"}
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    # Two calls, because load reports the bytes.
    config = DistributedConfig(ep_size=sizes["ep"], fsdp_size=sizes["fsdp"]) if "ep" in sizes else DistributedConfig()
    ndcompile.compile(model, mesh, distributed_config=config)
    start = time.perf_counter()
    asked = ndcompile.load(model, folder).bytes_read
    return model, asked, time.perf_counter() - start


class PeakMemory:
    """Largest anonymous memory of this process while the block runs."""

    def __enter__(self) -> PeakMemory:
        self.stopped = threading.Event()
        self.before = self.peak = anonymous_memory()
        self.thread = threading.Thread(target=self._sample)
        self.thread.start()
        return self

    def _sample(self) -> None:
        while not self.stopped.wait(0.005):
            self.peak = max(self.peak, anonymous_memory())

    def __exit__(self, *_: object) -> None:
        self.peak = max(self.peak, anonymous_memory())
        self.stopped.set()
        self.thread.join()

    @property
    def growth(self) -> int:
        return self.peak - self.before


def anonymous_memory() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024


def disk_bytes() -> int:
    return int(Path("/proc/self/io").read_text().partition("\nread_bytes:")[2].split()[0])


def drop_from_cache(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(folder: Path, layout: str, system: str, cold: bool) -> dict[str, float]:
    """One load on this rank, and what it took."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    dist.barrier()  # no rank maps the files any more: mapped pages stay in the cache
    if cold and dist.get_rank() == 0:
        drop_from_cache(folder)
    dist.barrier()
    disk, start = disk_bytes(), time.perf_counter()
    with PeakMemory() as memory:
        model, asked, load_seconds = load(folder, layout, system)
    seconds = time.perf_counter() - start
    shards = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    held = sum(shard.nbytes for shard in shards)
    kept = anonymous_memory() - memory.before
    for shard in shards:
        shard.detach().contiguous().view(torch.int64).sum()
    return {
        "seconds": seconds,
        "used_seconds": time.perf_counter() - start,
        "load_seconds": load_seconds,
        "read_ratio": asked / held,
        "disk": disk_bytes() - disk,
        "peak_mb": (memory.growth - held) / 1e6,
        "mapped_mb": max(held - kept, 0) / 1e6,
    }


def run_case(case: str, folder: Path, rounds: int, out: str) -> None:
    """All rounds of one case, on the ranks of a running world."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    name, layout = case.split(":")
    size = sum(file.stat().st_size for file in (folder / name).glob("*.safetensors"))
    results: dict[tuple[str, str], list[list[Any]]] = {(s, t): [] for s in SYSTEMS for t in ("cold", "warm")}
    # The first round is not counted: it imports and starts what both systems need.
    for number in range(rounds + 1):
        for (system, state), measured in results.items():
            gathered: list[Any] = [None] * RANKS
            dist.all_gather_object(gathered, measure(folder / name, layout, system, state == "cold"))
            measured += [gathered] if number else []
    if dist.get_rank() == 0:
        for (system, state), measured in results.items():
            line = {"case": case, "system": system, "state": state} | _medians(measured, size)
            unwanted = {"disk_ratio"} if state == "warm" else set()
            unwanted |= {"read_ratio", "load_seconds"} if system == "transformers" else set()
            line = {key: value for key, value in line.items() if key not in unwanted}
            line |= {"rounds": rounds, "cores": os.cpu_count(), "torch": torch.__version__}
            print(json.dumps(line), flush=True)
            with open(out, "a") as file:
                file.write(json.dumps(line) + "\n")
    dist.destroy_process_group()


def _medians(measured: list[list[Any]], size: int) -> dict[str, float]:
    """Over the rounds, of the worst rank of each."""
    worst = {
        key: statistics.median(max(rank[key] for rank in ranks) for ranks in measured)
        for key in ("seconds", "used_seconds", "load_seconds", "read_ratio", "peak_mb", "mapped_mb")
    }
    disk = statistics.median(sum(rank["disk"] for rank in ranks) for ranks in measured)
    return {key: round(value, 3) for key, value in worst.items()} | {"disk_ratio": round(disk / size, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints are, or will be written")
    parser.add_argument("--out", default="load.jsonl")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", action="append", help=f"CHECKPOINT:LAYOUT; all by default: {', '.join(CASES)}")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_case(options.case[0], options.folder, options.rounds, options.out)
        return
    write(options.folder)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    for case in options.case or CASES:
        arguments = ["--folder", options.folder, "--out", options.out, "--rounds", options.rounds, "--case", case]
        # HF_HUB_OFFLINE: from_pretrained asks the Hub about other files of a folder.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run([*launcher, __file__, *map(str, arguments)], check=True, env=environment)


if __name__ == "__main__":
    main()
