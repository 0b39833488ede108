"""The rules of a user's plan for an ordinary nn.Module."""

import plain_model
import pytest
from torch.distributed.tensor import Replicate, Shard
from transformers.distributed import DistributedConfig

from ndcompile.errors import PlanError
from ndcompile.plans.sharding_plan import build_plan
from ndcompile.private.distributed import StridedShard

FSDP2_TP2 = {"dp_replicate": 1, "fsdp": 2, "tp": 2}


def plan(**rules):
    return build_plan(plain_model.build(), FSDP2_TP2, DistributedConfig(**rules))


def test_rules_place_the_parameters_of_every_layer():
    placed = {name: p.tp for name, p in plan(tp_plan=plain_model.TP_PLAN).by_name.items()}
    for layer in ("layers.0", "layers.1"):
        assert placed[f"{layer}.query.weight"] == placed[f"{layer}.query.bias"] == Shard(0)
        assert placed[f"{layer}.out.weight"] == Shard(1)
        assert placed[f"{layer}.out.bias"] == placed[f"{layer}.scale"] == Replicate()
        assert isinstance(placed[f"{layer}.gate_up.weight"], StridedShard)


def test_layers_of_a_module_list_are_gathered_again_without_an_fsdp_plan():
    styles = {name: p.fsdp_style for name, p in plan(tp_plan=plain_model.TP_PLAN).by_name.items()}
    assert styles["layers.1.query.weight"] == "free_full_weight"
    assert styles["head.weight"] == "keep_full_weight"


def test_an_fsdp_plan_of_the_user_wins():
    rules = {"layers.0": "keep_full_weight", "head": "free_full_weight"}
    styles = {name: p.fsdp_style for name, p in plan(tp_plan=plain_model.TP_PLAN, fsdp_plan=rules).by_name.items()}
    assert styles["layers.0.query.weight"] == "keep_full_weight"
    assert styles["head.weight"] == "free_full_weight"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({}, r"tp=2, but PlainModel is no transformers model and has no plan\. Pass one"),
        (
            {"tp_plan": {"layers.*.quer": "colwise"}},
            r"tp_plan keys \['layers\.\*\.quer'\] match no module or parameter",
        ),
        ({"tp_plan": {"head": "colwize"}}, r"tp_plan names unknown styles \['colwize'\]\. Known styles: "),
        (
            {"tp_plan": plain_model.TP_PLAN, "fsdp_plan": {"head": "free"}},
            r"fsdp_plan names unknown styles \['free'\]\. Known styles: \['free_full_weight', 'keep_full_weight'\]",
        ),
    ],
)
def test_a_rule_without_effect_is_refused(rules, message):
    with pytest.raises(PlanError, match=message):
        plan(**rules)
