"""A training state saved on one mesh and loaded on another is the same, bit by bit. `make parity` has all pairs."""

import itertools

import checkpoint_case
import pytest
from checkpoint_case import LAYOUTS
from matrix import sampled_rows
from workers import size

CHAIN = ["fsdp4", "tp2 x fsdp2", "ep4", "1 process", "dp_replicate2 x fsdp2", "tp2 x ep4 (8 ranks)", "fsdp4"]
"""Every layout is saved once, and loaded from another once."""


@pytest.mark.parametrize(("source", "target"), sampled_rows(itertools.pairwise(CHAIN), 1, 2), ids=str)
def test_model_and_optimizer_are_the_same_bits_on_another_mesh(source, target, world, checkpoint, tmp_path):
    name, layouts = "mixtral", (LAYOUTS[source], LAYOUTS[target])
    folder = checkpoint(name, **checkpoint_case.OVERRIDES)
    saved = world(size(layouts[0]))(checkpoint_case.save, name, layouts[0], folder, str(tmp_path))
    loaded = world(size(layouts[1]))(checkpoint_case.load, name, layouts[1], str(tmp_path))
    assert saved[0].keys() > dict.fromkeys(["lm_head.weight", "model.embed_tokens.weight exp_avg"]).keys()
    for result in loaded:
        assert checkpoint_case.differing(saved[0], result) == []
