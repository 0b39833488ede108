"""The sharding plan as data: placements, shapes and errors, without ranks or weights."""

import models
import pytest
import torch
from style_units import UNITS, UnitConfig, UnitModel
from torch.distributed.tensor import Replicate, Shard
from transformers.distributed import DistributedConfig

from ndcompile.errors import PlanError
from ndcompile.sharding_plan import build_plan
from ndcompile.torch_private import StridedShard


def _plan(model, tp=1, fsdp=1, dp_replicate=1, **config):
    sizes = {"dp_replicate": dp_replicate, "tp": tp, "fsdp": fsdp}
    return build_plan(model, sizes, DistributedConfig(**config))


def _unit_plan(unit, width=20, tp=2, fsdp=1, plan=None):
    with torch.device("meta"):
        model = UnitModel(UnitConfig(unit=unit, width=width))
    fsdp_plan = {"": "free_full_weight"} if fsdp > 1 else None
    return _plan(model, tp, fsdp, tp_plan=UNITS[unit].plan if plan is None else plan, fsdp_plan=fsdp_plan).by_name


def test_llama_placements_on_two_axes():
    plan = _plan(models.on_meta("llama"), tp=2, fsdp=2).by_name
    expected = {
        "model.embed_tokens.weight": (Shard(0), Shard(0)),
        "model.layers.0.self_attn.q_proj.weight": (Shard(0), Shard(0)),
        "model.layers.0.self_attn.o_proj.weight": (Shard(1), Shard(0)),
        "model.layers.2.mlp.down_proj.weight": (Shard(1), Shard(0)),
        "model.norm.weight": (Replicate(), Shard(0)),
        "lm_head.weight": (Shard(0), Shard(0)),
    }
    assert {name: (plan[name].tp, plan[name].fsdp) for name in expected} == expected


def test_an_absent_axis_leaves_parameters_whole():
    for parameter in _plan(models.on_meta("llama")).parameters:
        assert (parameter.tp, parameter.fsdp) == (Replicate(), Replicate())
        assert parameter.storage_shape == parameter.shape


def test_a_bias_of_rowwise_is_replicated_and_one_of_colwise_is_not():
    plan = _unit_plan("mlp")
    assert plan["unit.up.bias"].tp == Shard(0)
    assert plan["unit.down.bias"].tp == Replicate()


def test_packed_weights_shard_each_half():
    plan = _unit_plan("packed")
    assert plan["unit.gate_up.weight"].tp == StridedShard(0, split_factor=2)
    assert plan["unit.gate_up.bias"].tp == StridedShard(0, split_factor=2)
    assert plan["unit.gate_up.weight"].compute_shape == (20, 12)
    assert _unit_plan("packed_input")["unit.down.weight"].tp == StridedShard(1, split_factor=2)


def test_stacked_experts_shard_the_width_of_every_expert():
    plan = _unit_plan("experts")
    assert plan["unit.experts.gate_up_proj"].tp == StridedShard(1, split_factor=2)
    assert plan["unit.experts.down_proj"].tp == Shard(2)
    assert plan["unit.experts.gate_up_proj"].compute_shape == (2, 20, 12)


def test_fsdp_takes_the_first_dim_that_tp_leaves_alone_where_tp_is_uneven_or_packed():
    """Nested padding would sit in the middle, and differ between tp ranks."""
    assert _unit_plan("mlp", fsdp=2)["unit.up.weight"].fsdp == Shard(0)
    uneven = _unit_plan("mlp", width=21, fsdp=2)["unit.up.weight"]
    assert (uneven.tp, uneven.fsdp) == (Shard(0), Shard(1))
    assert _unit_plan("packed", fsdp=2)["unit.gate_up.weight"].fsdp == Shard(1)


def test_what_fsdp_cannot_shard_is_replicated():
    plan = _unit_plan("mlp", width=21, fsdp=2)
    assert plan["unit.up.bias"].fsdp == Replicate()


@pytest.mark.parametrize(("width", "compute", "storage"), [(20, 10, 5), (21, 11, 11), (22, 11, 6)])
def test_uneven_shards_are_padded_to_the_largest(width, compute, storage):
    weight = _unit_plan("mlp", width=width, fsdp=2)["unit.up.weight"]
    assert weight.compute_shape == (compute, 12)
    assert weight.storage_shape[0] == storage


def test_tied_parameters_are_one_entry_with_both_names():
    plan = _plan(models.on_meta("llama", tie_word_embeddings=True), tp=2)
    entry = plan.by_name["lm_head.weight"]
    assert entry is plan.by_name["model.embed_tokens.weight"]
    assert (entry.fqn, entry.aliases) == ("model.embed_tokens.weight", ("lm_head.weight",))


def test_the_last_layer_of_the_fsdp_plan_keeps_its_weights():
    styles = {p.fqn: p.fsdp_style for p in _plan(models.on_meta("llama"), fsdp=4).parameters}
    assert styles["model.layers.0.mlp.up_proj.weight"] == "free_full_weight"
    assert styles["lm_head.weight"] == "keep_full_weight"


def test_an_override_replaces_one_rule():
    config = {"tp_plan": {"model.layers.*.mlp.up_proj": "replicate"}}
    plan = _plan(models.on_meta("llama"), tp=2, **config).by_name
    assert plan["model.layers.1.mlp.up_proj.weight"].tp == Replicate()
    assert plan["model.layers.1.mlp.gate_proj.weight"].tp == Shard(0)


def _error(call, *args, **kwargs):
    with pytest.raises(PlanError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_heads_that_tp_does_not_divide():
    message = _error(_plan, models.on_meta("llama"), tp=4)
    assert "tp=4 does not divide the 2 heads of 'model.layers.0.self_attn.k_proj'" in message
    assert "Legal tp sizes for LlamaForCausalLM: [1, 2]" in message
    assert "tp_plan={'model.layers.*.self_attn.k_proj': 'colwise_gather_output'} and a 'rowwise_split" in message


def test_packed_parts_that_tp_does_not_divide():
    message = _error(_unit_plan, "packed", width=21)
    assert "'unit.gate_up.weight' (packed_colwise) has size 42 on dim 0, 2 packed parts of 21" in message
    assert "which tp=2 does not divide. Legal tp sizes for it: [1, 3, 7, 21]" in message


def test_experts_that_tp_does_not_divide():
    message = _error(_unit_plan, "experts", width=21, plan={"unit.experts.down_proj": "rowwise"})
    assert "'unit.experts.down_proj' (rowwise) has size 21 on dim 2, which tp=2 does not divide" in message


def test_tied_parameters_with_two_placements():
    plan = {"model.embed_tokens": "embedding_colwise"}
    message = _error(_plan, models.on_meta("llama", tie_word_embeddings=True), tp=2, tp_plan=plan)
    assert "'model.embed_tokens.weight' and 'lm_head.weight' are one tied tensor" in message
    assert "'embedding_colwise'" in message
    assert "'colwise_gather_output'" in message


def test_unknown_styles():
    message = _error(_plan, models.on_meta("llama"), tp=2, tp_plan={"lm_head": "diagonal"})
    assert "unknown styles ['diagonal']" in message
    assert "'colwise_gather_output'" in message


def test_keys_that_match_nothing():
    message = _error(_plan, models.on_meta("llama"), tp=2, tp_plan={"model.layers.*.mlp.upproj": "colwise"})
    assert "['model.layers.*.mlp.upproj'] match nothing in LlamaForCausalLM" in message


def test_a_model_without_a_plan():
    with torch.device("meta"):
        model = UnitModel(UnitConfig(unit="mlp"))
    message = _error(_plan, model, tp=2)
    assert "UnitModel has no tensor-parallel plan, but tp=2" in message
    assert "DistributedConfig(tp_plan={" in message
    assert "use fsdp only" in message
