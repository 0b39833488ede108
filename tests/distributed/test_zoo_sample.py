"""A sample of the zoo that together has every style of the plans and every kind of layer; `make zoo` runs all of it."""

import pytest
import zoo
from matrix import sampled_rows
from workers import size
from zoo_case import LIMIT, ZooCase, measure

# What is particular. mamba2: a chunked state space. bloom: an autograd Function. emu3: a nested config. apertus:
# parameters of an activation. phi3: fused projections, gathered. gpt_oss: sinks and interleaved gates. dots3_note: an
# indexer under no_grad, latent attention. llama4: chunked attention, stacked experts. lfm2: convolutions. jamba: scans.
# deepseek_v3: grouped routing and shared experts. qwen3_moe: exchanged experts. hrm_text: weights whose first use is
# under no_grad. inkling_text: a plan whose fused projection is repaired, a norm within the embedding.
CASES = [
    ("mamba2", "fsdp4"),
    ("bloom", "fsdp4"),
    ("emu3", "replicate2_fsdp2"),
    ("hrm_text", "fsdp4"),
    ("apertus", "tp2"),
    ("phi3", "tp2"),
    ("gpt_oss", "tp2"),
    ("dots3_note", "tp2"),
    ("llama4", "tp2"),
    ("lfm2", "tp2"),
    ("jamba", "tp2"),
    ("deepseek_v3", "fsdp2_tp2"),
    ("qwen3_moe", "fsdp2_tp2_ep2"),
    ("inkling_text", "tp2"),
]
KEPT = [number for number, (name, _) in enumerate(CASES) if name not in ("dots3_note", "bloom")]


@pytest.mark.parametrize(("model_type", "layout"), sampled_rows(CASES, *KEPT))
def test_one_training_step(world, tmp_path, model_type, layout):
    zoo.build(model_type).save_pretrained(tmp_path)
    case = ZooCase(model_type, layout, backend="eager")
    for measured in world(size(zoo.LAYOUTS[layout]))(measure, case, str(tmp_path)):
        assert not measured.comparison.exceeding(LIMIT)
