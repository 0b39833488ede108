"""What the proof costs beside lowering, in CPU time: a line of JSON a model and backend, which PROOF.md shows.

    python tests/proof_cost.py --types llama,qwen3_moe --backends aot_eager,inductor

Needs tests, tests/distributed and tests/zoo in PYTHONPATH. Without caches, and for inductor without the time of its
compiler, which runs in other processes.
"""

from __future__ import annotations

import argparse
import json
import time

import proof_zoo
import torch
import torch._inductor.config
import torch.distributed as dist
import transformers
from proof_report import COST
from torch.testing._internal.distributed.fake_pg import FakeStore

from ndcompile.graphs.pass_context import PassContext
from ndcompile.lowering.lower import lower
from ndcompile.pipeline import run_passes
from ndcompile.proof.check import Prover

TYPES = "llama,qwen3_moe,gemma3n_text,deepseek_v2,qwen2_moe,mixtral,gpt_oss,phi3,gemma3_text,deepseek_v3"


def measure(model_type: str, backend: str, tp: int = 2) -> dict[str, object]:
    """CPU seconds of all proofs of a training step on fsdp=2 x tp, of the second capture, and of lowering."""
    captured, context = proof_zoo.captured(model_type, tp, sizes={"fsdp": 2})
    register_groups(context)
    started = time.process_time()
    assert context.whole_graph is not None
    context.whole_graph()
    seconds = {"second capture": time.process_time() - started, "proof": 0.0}
    check, begin = Prover.check, Prover.__init__

    def timed(method):
        def call(*args, **kwargs):
            start = time.process_time()
            try:
                return method(*args, **kwargs)
            finally:
                seconds["proof"] += time.process_time() - start

        return call

    Prover.check, Prover.__init__ = timed(check), timed(begin)  # type: ignore[method-assign]
    try:
        run_passes(captured, context)
    finally:
        Prover.check, Prover.__init__ = check, begin  # type: ignore[method-assign]
    started = time.process_time()
    with torch._inductor.config.patch(force_disable_caches=True):
        lower(captured, backend, alike=True)
    seconds["lowering"] = time.process_time() - started
    return {"model": model_type, "backend": backend, "nodes": len(captured.module.graph.nodes), **seconds}


def register_groups(context: PassContext) -> None:
    """Inductor looks up the groups of collectives by name: give it some that send nothing."""
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        for axis in context.mesh.axes.values():
            group = dist.new_group(list(range(axis.size)))
            torch._C._distributed_c10d._register_process_group(axis.group, group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default=TYPES)
    parser.add_argument("--backends", default="aot_eager")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    for backend in options.backends.split(","):
        for model_type in options.types.split(","):
            line = measure(model_type, backend)
            print(line, flush=True)
            with COST.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
