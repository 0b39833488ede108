"""Derived plans on real ranks, against the single-process model; all types, see `make derive`."""

import os

import pytest
import torch
import zoo
from matrix import sampled_rows
from saving_support import differing
from workers import TP2, mesh, size
from zoo_case import LIMIT, ZooCase, measure

import ndcompile

# gpt2: transposed weights, three fused parts. opt: code that reads the number of heads.
CASES = [("gpt2", "fsdp2_tp2"), ("opt", "tp2")]


@pytest.mark.parametrize(("model_type", "layout"), sampled_rows(CASES, 0))
def test_one_training_step(world, tmp_path, model_type, layout):
    zoo.build(model_type).save_pretrained(tmp_path)
    case = ZooCase(model_type, layout, backend="eager", plan="derive")
    for measured in world(size(zoo.LAYOUTS[layout]))(measure, case, str(tmp_path)):
        assert not measured.comparison.exceeding(LIMIT)
        assert measured.sharded > 0.9


def _generate(model_type, checkpoint):
    """12 greedy tokens behind prompts of which one is padded; of every tp rank."""
    config = {"tp_plan": "derive"}
    model = ndcompile.compile(
        zoo.on_meta(model_type), mesh(TP2), distributed_config=config, checkpoint=checkpoint, backend="eager"
    )
    return model.eval().generate(**_prompts(), **GREEDY)


GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "use_cache": True}


def _prompts():
    ids = torch.randint(5, 95, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.slow
def test_states_of_a_state_space_are_shards_in_the_cache_of_generate(world, tmp_path):
    model = zoo.build("mamba").eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # smaller ones say one token over and over
    model.save_pretrained(tmp_path)
    expected = model.generate(**_prompts(), **GREEDY)
    assert len(set(expected[:, 6:].flatten().tolist())) > 3
    for tokens in world(2)(_generate, "mamba", str(tmp_path)):
        assert torch.equal(tokens, expected)


def _save(model_type, layout, checkpoint, folder):
    config = {"tp_plan": "derive"}
    model = ndcompile.compile(
        zoo.on_meta(model_type), mesh(zoo.LAYOUTS[layout]), distributed_config=config, checkpoint=checkpoint
    )
    ndcompile.save_pretrained(model, folder)


def test_saved_files_are_those_of_transformers(ranks, tmp_path):
    zoo.build("gpt2").save_pretrained(tmp_path / "expected")
    ranks(_save, "gpt2", "fsdp2_tp2", str(tmp_path / "expected"), str(tmp_path / "saved"))
    assert sorted(os.listdir(tmp_path / "saved")) == sorted(os.listdir(tmp_path / "expected"))
    assert differing(tmp_path / "saved", tmp_path / "expected") == []
