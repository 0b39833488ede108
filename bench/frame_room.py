"""What chunks of CPython's stack cost a trace: capture, passes and AOTAutograd of a small Llama on 2x2 fake ranks.

Called at several depths, with and without `ndcompile.private.python.with_room_for_frames`. Prints JSON lines.

    python bench/frame_room.py
"""

from __future__ import annotations

import json
import platform
import resource
from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

import ndcompile
from ndcompile.capture.call import bind
from ndcompile.model_calls import compiled_model
from ndcompile.private.python import keeping_garbage

CONFIG = LlamaConfig(
    num_hidden_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
)


def at_depth(depth: int, function: Callable[[], object]) -> object:
    return function() if depth == 0 else at_depth(depth - 1, function)


def best_of(runs: int, depth: int, function: Callable[[], object]) -> tuple[float, int]:
    """Seconds of the fastest run, and the fewest page faults of one."""
    seconds, faults = [], []
    for _ in range(runs):
        before, started = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, perf_counter()
        at_depth(depth, function)
        seconds.append(perf_counter() - started)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(seconds), min(faults)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    ndcompile.compile(model, mesh, backend="aot_eager")
    trace = type(compiled_model(model)).lower_only.__wrapped__  # type: ignore[attr-defined]

    def plain() -> None:
        with keeping_garbage():
            trace(compiled_model(model), call)

    call = bind(compiled_model(model).__signature__, (torch.zeros(2, 8, dtype=torch.int64),), {})
    at_depth(0, plain)
    for depth in range(0, 60, 10):
        line: dict[str, object] = {"python": platform.python_version(), "torch": torch.__version__, "depth": depth}
        for name, function in (("plain", plain), ("room", lambda: compiled_model(model).lower_only(call))):
            seconds, faults = best_of(5, depth, function)
            line |= {f"{name}_s": round(seconds, 3), f"{name}_page_faults": faults}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
