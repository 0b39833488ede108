"""Derived plans on real ranks, against the single-process model; all types, see `make derive`."""

import os

import pytest
import zoo
from saving_support import differing
from workers import mesh, size
from zoo_case import LIMIT, ZooCase, measure

import ndcompile

# gpt2: transposed weights, three fused parts. opt: code that reads the number of heads.
CASES = [("gpt2", "fsdp2_tp2"), ("opt", "tp2")]


@pytest.mark.parametrize(("model_type", "layout"), CASES)
def test_one_training_step(world, tmp_path, model_type, layout):
    zoo.build(model_type).save_pretrained(tmp_path)
    case = ZooCase(model_type, layout, backend="eager", plan="derive")
    for measured in world(size(zoo.LAYOUTS[layout]))(measure, case, str(tmp_path)):
        assert not measured.comparison.exceeding(LIMIT)
        assert measured.sharded > 0.9


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
