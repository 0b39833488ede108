"""Every rank of every layout holds, bit by bit, its slices of what a single process loads with from_pretrained."""

from __future__ import annotations

import pytest
import torch
from loader_support import assert_holds, in_memory, on_meta, tiny_model
from transformers import AutoModelForCausalLM

from ndcompile.loader import load_into
from ndcompile.loader.planning import plan_loading

DENSE = ["llama", "phi3", "gemma3_text"]
EXPERTS = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "ernie4_5_moe"]
LAYOUTS = {
    "fsdp4": {"fsdp": 4},
    "tp2 x fsdp2": {"tp": 2, "fsdp": 2},
    "dp_replicate2 x fsdp2": {"dp_replicate": 2, "fsdp": 2},
}
EXPERT_LAYOUTS = {
    "ep4": {"fsdp": 4, "ep": 4},
    "ep2 x efsdp2, tp2": {"tp": 2, "fsdp": 2, "ep": 2},
    "ep4 x efsdp2, tp2": {"tp": 2, "fsdp": 4, "ep": 4},
}
CASES = [(name, layout) for name in DENSE + EXPERTS for layout in LAYOUTS]
CASES += [(name, layout) for name in EXPERTS for layout in EXPERT_LAYOUTS]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(model_type)`: folder, tiny model on the meta device, and what from_pretrained loads."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model = tiny_model(name, **({"num_experts": 4} if name == "qwen3_moe" else {}))
            model.save_pretrained(folder, max_shard_size="30KB")
            full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
            made[name] = folder, on_meta(model), full
        return made[name]

    return get


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_slices_equal_those_of_from_pretrained(saved, name, layout):
    folder, model, full = saved(name)
    plan = plan_loading(model, folder, (LAYOUTS | EXPERT_LAYOUTS)[layout])
    assert plan.proof().faults == ()
    for coordinate in plan.mesh.coordinates():
        targets = [in_memory(source.target, coordinate) for source in plan.assignment.sources]
        load_into(model, targets, folder)
        assert_holds(targets, full)
