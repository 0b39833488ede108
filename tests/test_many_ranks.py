"""One process stands for rank 0 of 512: plan, capture and lowering need neither weights nor other ranks."""

import json
import subprocess
import sys

SCRIPT = """
import json, resource, time
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM
import ndcompile

torch.set_num_threads(1)
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=512)
mesh = init_device_mesh("cpu", (64, 8), mesh_dim_names=("fsdp", "tp"))
config = LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=4, num_attention_heads=64,
                     num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192)
with torch.device("meta"):
    model = LlamaForCausalLM(config)
start = time.perf_counter()
model = ndcompile.compile(model.train(), mesh, backend="aot_eager")
graphs = ndcompile.lower_only(model, batch=1, sequence=4096)
print(json.dumps({
    "seconds": time.perf_counter() - start,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "counts": {name: dict(counter) for name, counter in graphs.collective_counts().items()},
    "parameters": sum(p.numel() for p in model.parameters()),
    "local": sum(p.to_local().numel() for p in model.parameters()),
}))
"""


def test_512_ranks_lower_in_one_process_without_weights() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["peak_bytes"] < 2e9
    assert result["parameters"] > 5e9
    assert result["local"] * 512 < result["parameters"] * 1.02  # norms are replicated over tp
    layers, weights = 4, 4 * 9 + 3
    forward, backward = result["counts"]["forward"], result["counts"]["backward"]
    assert forward["all_gather_into_tensor"] == weights + 1  # every weight once, and the logits over tp
    assert forward["all_reduce"] == 2 * layers + 1  # attention and MLP outputs, embedding
    assert backward["reduce_scatter_tensor"] == weights
    assert backward["all_reduce"] == 2 * layers + 1  # inputs of attention, MLP and the head
