"""The order of collectives in inductor's code: ranks with other lengths of the sequence have the same one."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, re, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch._inductor.utils import run_and_get_code
import models, ndcompile, ndcompile.lowering.lower

CALL = re.compile(r"torch\\.ops\\._c10d_functional\\.(\\w+)\\.default\\(")
GIVEN = re.compile(r"primals_\\d+")
ndcompile.lowering.lower.LEFT_OUT_ON_CPU = ()
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)

def collectives(length, disabled=()):
    torch._dynamo.reset()
    model = ndcompile.compile(models.on_meta("llama", torch.float32, num_hidden_layers=2),
                              init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",)),
                              disable_passes=("bucket_collectives", *disabled))
    ndcompile.init_weights(model, 0)
    ids = torch.zeros(2, length, dtype=torch.int64)
    def step():
        model(input_ids=ids, labels=ids).loss.backward()
    _, codes = run_and_get_code(step)
    used = [[line.strip() for line in code.splitlines()] for code in codes]
    return [[line for line in code if CALL.search(line) or "wait_tensor" in line] for code in used]

def starts(codes):
    return [
        [[CALL.search(line)[1], *GIVEN.findall(line)] for line in code if "wait_tensor" not in line] for code in codes
    ]

short, long, plain = collectives(16), collectives(160), collectives(16, ("overlap_communication",))
print(json.dumps({"short": starts(short), "long": starts(long), "moved": short != plain}))
"""


@pytest.mark.slow
def test_the_order_of_collectives_does_not_depend_on_the_length() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=580, cwd="tests")
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["short"] == found["long"]
    gathered = {weight for _, *weights in found["short"][0] for weight in weights}
    assert len(gathered) > 15  # gathers are told apart by what they gather
    assert found["moved"]  # the schedule did something
