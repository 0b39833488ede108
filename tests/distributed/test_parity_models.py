"""Loss, every gradient and one AdamW step equal the single-process model's: architectures against layouts.

The table has every architecture, every axis with padding masks and without, and tied and untied weights.
`make parity` runs the full product.
"""

import pytest
from matrix import sampled_rows
from parity_case import Case, assert_parity
from workers import FSDP2_TP2, REPLICATE2_FSDP2, REPLICATE2_TP2, TP2, size

FSDP2 = (("fsdp", 2),)

# architecture: what is particular about it under tp
#   qwen3: q and k norms; qwen2, glm4: biases; gemma2: soft caps, sliding window; phi3, gpt_neox: fused projections;
#   mixtral: experts
CASES = [
    # model, layout, padding, tied
    ("llama", FSDP2_TP2, True, False),
    ("qwen3", REPLICATE2_TP2, False, True),
    ("qwen2", TP2, True, True),
    ("gemma2", FSDP2, False, True),
    ("phi3", TP2, False, False),
    ("gpt_neox", TP2, True, False),
    ("glm4", TP2, True, False),
    ("mixtral", REPLICATE2_FSDP2, False, False),
]


@pytest.mark.parametrize(("model", "layout", "padding", "tied"), sampled_rows(CASES, 0, 3, 4, 5))
def test_one_training_step(world, checkpoint, model, layout, padding, tied):
    layers = 2 if model == "gemma2" else 1  # both kinds of attention
    overrides = {"num_hidden_layers": layers, "tie_word_embeddings": tied}
    case = Case(model, layout, padding=padding, step=True, overrides=overrides, options={"backend": "aot_eager"})
    assert_parity(world(size(layout)), case, checkpoint(model, **overrides))


@pytest.mark.slow  # in the sample a dense model goes through inductor in test_schedule.py, with passes that GPUs have
@pytest.mark.parametrize(("model", "layout"), [("qwen3", TP2), ("qwen3", FSDP2_TP2)])
def test_one_training_step_through_inductor(world, checkpoint, model, layout):
    overrides = {"num_hidden_layers": 1}
    case = Case(model, layout, padding=True, step=True, overrides=overrides, options={"backend": "inductor"})
    assert_parity(world(size(layout)), case, checkpoint(model, **overrides))
