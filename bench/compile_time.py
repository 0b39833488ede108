"""Seconds of the first step by stage, milliseconds of later ones, peak memory: one JSON line for a number of layers.

    python bench/compile_time.py --layers 8,16,32 --device cuda --widths 8b [--fsdp 2] [--disable PASS ...] [--warm]

Every line is a process of its own whose caches are empty; with --warm a second process finds those of the first one.
One process stands for a rank: its process group is torch's fake one, which sends nothing. So with --fsdp 2 or --tp 2
the graphs are those of a rank among two, collectives included, and a step takes the time of its computation. Values
are those of a model only with neither: losses of two runs are to be compared only then.

Stages are exclusive and add up to `lowering_s`, what AOTAutograd and inductor take for forward and backward: what
torch's own timers (`torch._dynamo.utils.dynamo_timed`) measure, less what they measure inside of it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

WIDTHS = {
    "small": {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
}
VOCABULARY = {"small": 1024, "8b": 128256}


@contextmanager
def stages() -> Iterator[dict[str, float]]:
    """While active, the dict fills with exclusive seconds of torch's timed phases."""
    import torch._dynamo.utils as utils

    seconds: dict[str, float] = defaultdict(float)
    inside: list[float] = []
    original = utils.dynamo_timed

    @contextmanager
    def timed(key: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        inside.append(0.0)
        began = time.perf_counter()
        try:
            with original(key, *args, **kwargs) as entered:
                yield entered
        finally:
            took = time.perf_counter() - began
            seconds[key] += took - inside.pop()
            if inside:
                inside[-1] += took

    loaded = [m for m in list(sys.modules.values()) if getattr(m, "dynamo_timed", None) is original]
    for module in loaded:
        module.dynamo_timed = timed  # type: ignore[attr-defined]
    try:
        yield seconds
    finally:
        for module in loaded:
            module.dynamo_timed = original  # type: ignore[attr-defined]


def build(args: argparse.Namespace, layers: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    import ndcompile

    config = LlamaConfig(
        **WIDTHS[args.widths],
        vocab_size=VOCABULARY[args.widths],
        num_hidden_layers=layers,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        use_cache=False,
    )
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    mesh = torch.distributed.init_device_mesh(args.device, (args.fsdp, args.tp), mesh_dim_names=("fsdp", "tp"))
    model = ndcompile.compile(
        model.train(), mesh, disable_passes=args.disable, loss_only=args.loss_only, backend=args.backend
    )
    ndcompile.init_weights(model, 0)
    return model


def start(args: argparse.Namespace, layers: int) -> dict[str, Any]:
    """One start in this process."""
    import torch
    import torch._inductor.compile_fx
    import torch._inductor.metrics as metrics
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ndcompile.model_calls import compiled_model

    if args.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.fsdp * args.tp)
    model = build(args, layers)
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY[args.widths], (args.batch, args.sequence)).to(args.device)
    parameters = list(model.parameters())

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        result = loss.item()
        for parameter in parameters:
            parameter.grad = None
        return result

    with profiled(args.cprofile), stages() as seconds:
        began = time.perf_counter()
        loss = step()
        first = time.perf_counter() - began
    programs = [program for signature in compiled_model(model).signatures.values() for program in signature.programs]
    ours = {f"{name}_s": round(value, 2) for program in programs for name, value in program.seconds.items()}
    times, peak = measure(step, args)
    top = sorted(seconds.items(), key=lambda item: -item[1])
    return {
        "layers": layers,
        "device": args.device,
        "widths": args.widths,
        "fsdp": args.fsdp,
        "tp": args.tp,
        "disabled": args.disable,
        "first_s": round(first, 2),
        **ours,
        "stages_s": {name: round(value, 2) for name, value in top if value >= 0.05},
        "kernels": metrics.generated_kernel_count,
        "ms": round(statistics.median(times) * 1e3, 2),
        "min_ms": round(min(times) * 1e3, 2),
        "peak_gb": peak,
        "loss": loss,
        "torch": torch.__version__,
    }


@contextmanager
def profiled(path: str | None) -> Iterator[None]:
    """Write cProfile's statistics to `path`, if there is one."""
    if path is None:
        yield
        return
    import cProfile

    with cProfile.Profile() as profile:
        yield
    profile.dump_stats(path)


def measure(step: Callable[[], Any], args: argparse.Namespace) -> tuple[list[float], float]:
    """Seconds of steps, and the most memory meanwhile: on a GPU of tensors, on the CPU of the process ever."""
    import torch

    def synchronize() -> None:
        if args.device == "cuda":
            torch.cuda.synchronize()

    step()
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(args.steps):
        synchronize()
        began = time.perf_counter()
        step()
        synchronize()
        times.append(time.perf_counter() - began)
    if args.device == "cuda":
        return times, round(torch.cuda.max_memory_allocated() / 1e9, 3)
    return times, round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="4,8")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--widths", choices=tuple(WIDTHS), default="small")
    parser.add_argument("--fsdp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, help="64, and 4096 on a GPU")
    parser.add_argument("--loss-only", action="store_true")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--disable", nargs="*", default=[], help="passes of ndcompile to leave out")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm", action="store_true", help="a second start on the caches of the first one")
    parser.add_argument("--cprofile", help="file for cProfile's statistics of the first step, which it slows down")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", help="file to append the lines to")
    args = parser.parse_args()
    args.sequence = args.sequence or (4096 if args.device == "cuda" else 64)
    if args.one is not None:
        print(json.dumps(start(args, args.one)), flush=True)
        return
    for layers in map(int, args.layers.split(",")):
        with tempfile.TemporaryDirectory() as cache:
            for warm in (False, True)[: 1 + args.warm]:
                command = [sys.executable, __file__, *sys.argv[1:], "--one", str(layers)]
                environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
                run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                line = json.dumps({**json.loads(run.stdout.splitlines()[-1]), "warm": warm})
                print(line, flush=True)
                if args.out:
                    with open(args.out, "a") as out:
                        out.write(line + "\n")


if __name__ == "__main__":
    main()
