"""`print(model.sharding_plan)`; `UPDATE_GOLDEN=1 pytest tests/test_plan_table.py` writes the golden file anew."""

import os
from pathlib import Path

import models
from transformers.distributed import DistributedConfig

from ndcompile.plans.sharding_plan import build_plan

GOLDEN = Path(__file__).parent / "golden" / "plan" / "sharding_plan.txt"


def test_a_sharding_plan_prints_as_a_table():
    sizes = {"dp_replicate": 1, "fsdp": 2, "tp": 2, "ep": 1}
    text = str(build_plan(models.on_meta("qwen3_moe", num_hidden_layers=2), sizes, DistributedConfig())) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    rows = [line for line in text.splitlines() if line.startswith("│")]
    assert all(line.endswith("│") for line in rows)
    assert max(map(len, text.splitlines())) <= 118
