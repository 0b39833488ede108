"""`fsdp_cpu_offload` where the device is not the host: which nodes are where, and which process groups are refused.

The device is torch's meta device here, on which graphs can be made and differentiated, but not run.
"""

import json
import subprocess
import sys

import pytest

GRAPHS = """
import json
from collections import Counter
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
import models, ndcompile
from ndcompile.capture.call import bind
from ndcompile.mesh import StorageMesh
from ndcompile.model_calls import compiled_model

class OnMeta(StorageMesh):
    device = torch.device("meta")

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)

def devices(names, shape, held, **config):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = ndcompile.compile(models.on_meta("llama", num_hidden_layers=1), mesh, backend="aot_eager",
                              distributed_config={"fsdp_cpu_offload": True, **config})
    compiled = compiled_model(model)
    compiled.mesh = OnMeta(**vars(compiled.mesh))
    compiled.shadow.device = compiled.whole.device = compiled.mesh.device
    compiled.offloads, compiled.accumulation.active = True, held
    ids = torch.empty(2, 8, dtype=torch.int64)
    graphs = compiled.lower_only(bind(compiled.__signature__, (), {"input_ids": ids, "labels": ids.clone()}))
    found = {}
    for phase, graph in (("forward", graphs.forward.graph), ("backward", graphs.backward.graph)):
        tensors = [n for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        host = [n for n in tensors if n.meta["val"].device.type == "cpu"]
        found[phase] = Counter("weight" if n.op == "placeholder" else n.target._opname for n in host)
        users = {user.target._opname if user.op == "call_function" else "output" for n in host for user in n.users}
        found[phase + " users"] = sorted(users)
    return found

print(json.dumps({
    "fsdp": devices(("fsdp",), (4,), False),
    "mixed": devices(("dp_replicate", "fsdp"), (2, 2), False, fsdp_mixed_precision=True),
    "replicated": devices(("dp_replicate",), (4,), False),
    "held": devices(("fsdp",), (4,), True),
}))
"""

WEIGHTS = 12


@pytest.fixture(scope="module")
def graphs():
    return _json_of(GRAPHS)


def _json_of(script):
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=400, cwd="tests")
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("layout", ["fsdp", "mixed", "replicated"])
def test_only_weights_and_their_gradients_are_on_the_host(graphs, layout):
    found = graphs[layout]
    assert found["forward"] == {"weight": WEIGHTS}
    assert found["forward users"] == ["copy_to_device", "output"]  # saved for backward as they are
    assert set(found["backward"]) == {"weight", "copy_to_host"}
    assert found["backward"]["copy_to_host"] == WEIGHTS
    assert found["backward users"] == ["copy_to_device", "output"]


def test_gradients_that_no_sync_holds_stay_on_the_device(graphs):
    assert set(graphs["held"]["backward"]) == {"weight"}


GROUPS = """
import json
import torch.distributed as dist
from transformers.distributed import DistributedConfig
from ndcompile.errors import UnsupportedError
from ndcompile.mesh import backend_of
from ndcompile.refusals import check_offload

def answer(backend, offload=True, cuda_graphs=False):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        check_offload(DistributedConfig(fsdp_cpu_offload=offload, fsdp_size=1), "cuda", cuda_graphs)
        refusal = ""
    except UnsupportedError as error:
        refusal = str(error)
    known = [backend_of("cpu"), backend_of("cuda")]
    dist.destroy_process_group()
    return known, refusal

print(json.dumps([answer("cuda:gloo"), answer("cpu:gloo,cuda:gloo"), answer("gloo", cuda_graphs=True),
                  answer("cuda:gloo", offload=False)]))
"""


def test_groups_without_a_backend_for_host_memory_are_refused_with_the_remedy():
    device_only, both, recorded, off = _json_of(GROUPS)
    assert device_only[0] == [None, "gloo"]
    assert "'cuda:gloo', which has no backend for it" in device_only[1]
    assert 'init_process_group("cpu:gloo,cuda:nccl")' in device_only[1]
    assert both == [["gloo", "gloo"], ""]
    assert recorded[1].startswith("cuda_graphs=True cannot record the copies of fsdp_cpu_offload")
    assert off[1] == ""
