"""How long a job takes to its first step, the first time and again: what the caches of inductor and AOTAutograd save.

    python bench/start.py [--layers 4] [--hidden 256] [--out bench/start-....jsonl]

Every start is a process of its own with two ranks (fsdp=2, gloo on the CPU), from building the model to the end of the
first backward. The second start of a pair finds the cache folder that the first one left. One JSON line a start.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FRONT_ENDS = ("ndcompile.compile", "torch.compile")
MODELS = ("llama", "qwen3_moe")


def rank_main(front_end: str, kind: str, layers: int, hidden: int) -> None:
    """One start, on one rank; rank 0 prints the figures."""
    import torch
    import torch.distributed as dist
    import transformers
    from torch._dynamo.utils import counters
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoConfig, AutoModelForCausalLM

    import ndcompile

    dist.init_process_group("gloo")
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers, "vocab_size": 1024}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden} if kind != "llama" else {}
    config = AutoConfig.for_model(kind, **sizes, **heads, **experts)
    options = {"distributed_config": {"fsdp_size": 2, "ep_size": 2}} if experts else {}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    start = time.perf_counter()
    if front_end == "torch.compile":
        ndcompile.prepare(model, mesh, **options)
        model.compile(backend="ndcompile", fullgraph=True)
    else:
        ndcompile.compile(model, mesh, **options)
    ndcompile.init_weights(model, 0)
    ids = torch.randint(0, 1024, (2, 128), generator=torch.Generator().manual_seed(dist.get_rank()))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    hits = {name: counters[part][name] for part, name in (("aot_autograd", "autograd_cache_hit"),)}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": round(time.perf_counter() - start, 1), "loss": loss.item(), **hits, **versions}))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", nargs=2, metavar=("FRONT_END", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(*options.rank, options.layers, options.hidden)
        return
    lines = []
    for kind in MODELS:
        for front_end in FRONT_ENDS:
            with tempfile.TemporaryDirectory() as folder:
                for start in ("first", "second"):
                    line = _start(front_end, kind, options, folder)
                    lines.append({"model": kind, "front_end": front_end, "start": start, **line})
                    print(json.dumps(lines[-1]), flush=True)
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _start(front_end: str, kind: str, options: argparse.Namespace, folder: str) -> dict[str, object]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    command += ["--layers", str(options.layers), "--hidden", str(options.hidden), "--rank", front_end, kind]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr)
    return json.loads(run.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
