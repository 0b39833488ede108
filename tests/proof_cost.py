"""What the proof costs beside lowering: a line of JSON a model and backend, which PROOF.md shows.

    python tests/proof_cost.py --types llama,qwen3_moe --backends aot_eager

Needs tests, tests/distributed and tests/zoo in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import time

import proof_zoo
import transformers
from proof_report import COST

from ndcompile.lower import lower
from ndcompile.pipeline import run_passes
from ndcompile.proof.check import Prover


def measure(model_type: str, backend: str, tp: int = 2) -> dict[str, object]:
    """Seconds of all proofs of a training step on fsdp=2 x tp, of the second capture, and of lowering."""
    captured, context = proof_zoo.captured(model_type, tp, sizes={"fsdp": 2})
    started = time.perf_counter()
    assert context.whole_graph is not None
    context.whole_graph()
    seconds = {"second capture": time.perf_counter() - started, "proof": 0.0}
    check, begin = Prover.check, Prover.__init__

    def timed(method):
        def call(*args, **kwargs):
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                seconds["proof"] += time.perf_counter() - start

        return call

    Prover.check, Prover.__init__ = timed(check), timed(begin)  # type: ignore[method-assign]
    try:
        run_passes(captured, context)
    finally:
        Prover.check, Prover.__init__ = check, begin  # type: ignore[method-assign]
    started = time.perf_counter()
    lower(captured, backend, alike=True)
    seconds["lowering"] = time.perf_counter() - started
    return {"model": model_type, "backend": backend, "nodes": len(captured.module.graph.nodes), **seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default="llama,qwen3_moe,gemma3n_text,deepseek_v2")
    parser.add_argument("--backends", default="aot_eager", help="inductor needs process groups, and has none here")
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
