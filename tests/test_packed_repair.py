"""A tp_plan that shards a fused projection as one is repaired where that is proven, and says so."""

import logging

import models
from torch.distributed.tensor import Shard
from transformers.distributed import DistributedConfig

import ndcompile
from ndcompile.plans.packed_repair import repaired_plan
from ndcompile.private.distributed import StridedShard

SIZES = {"dp_replicate": 1, "fsdp": 2, "tp": 2, "ep": 1}
RULE, WEIGHT = "model.layers.*.mlp.gate_up_proj", "model.layers.0.mlp.gate_up_proj.weight"


def _model():
    """Phi3 splits its gate_up_proj in halves; here its class is taken to have another plan."""
    model = models.on_meta("phi3", num_hidden_layers=1)
    model._tp_plan = dict(model.tp_plan) | {RULE: "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
    return model


def test_the_parts_of_a_fused_projection_are_packed(caplog):
    with caplog.at_level(logging.WARNING, "ndcompile.plan"):
        plan = repaired_plan(_model(), SIZES, DistributedConfig())
    assert plan.by_name[WEIGHT].tp == StridedShard(0, split_factor=2)
    expected = f"tp_plan['{RULE}'] is 'packed_colwise', not 'colwise': 'model.layers.*.mlp' takes 2 fused projections"
    assert [str(repair).startswith(expected) for repair in plan.repairs] == [True]
    assert expected in caplog.text
    assert " ".join(str(plan).split()).count("takes 2 fused projections apart") == 1


def test_a_plan_shows_and_explains_a_repair():
    plan = ndcompile.plan(_model(), DistributedConfig(tp_size=2), seq_len=8)
    assert "Repaired: tp_plan" in " ".join(str(plan).split())
    assert f"rule: repaired: tp_plan['{RULE}'] is 'packed_colwise'" in plan.explain(WEIGHT)


def test_a_rule_of_the_caller_and_an_unproven_plan_stay():
    own = repaired_plan(_model(), SIZES, DistributedConfig(tp_plan={RULE: "colwise"}))
    off = repaired_plan(_model(), SIZES, DistributedConfig(), verify="off")
    for plan in (own, off):
        assert (plan.by_name[WEIGHT].tp, plan.repairs) == (Shard(0), ())


def test_a_repair_that_is_not_proven_is_none():
    """The output projection sums halves that nothing has cut."""
    model = _model()
    model._tp_plan |= {"model.norm": "all_reduce"}
    assert repaired_plan(model, SIZES, DistributedConfig()).repairs == ()
