"""The sharding plan as data: placements, shapes and errors, without ranks or weights."""

import models
import pytest
import torch
from style_units import UNITS, UnitConfig, UnitModel
from torch.distributed.tensor import Replicate, Shard
from transformers.distributed import DistributedConfig

from ndcompile.errors import PlanError
from ndcompile.plans.sharding_plan import build_plan
from ndcompile.private.distributed import StridedShard


def _plan(model, tp=1, fsdp=1, dp_replicate=1, ep=1, options=None, **config):
    sizes = {"dp_replicate": dp_replicate, "tp": tp, "fsdp": fsdp, "ep": ep}
    return build_plan(model, sizes, DistributedConfig(**config), **(options or {}))


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
    assert "which tp=2 does not divide. Legal tp sizes for UnitModel: [1, 3, 7, 21]" in message


def test_fused_heads_that_tp_does_not_divide():
    """12 slices of the head's width fit on three ranks; but four heads have their query, key and value side by side."""
    message = _error(_plan, models.on_meta("gpt_neox"), tp=3)
    assert "tp=3 does not divide the 4 heads of 'gpt_neox.layers.0.attention.query_key_value'" in message
    assert ", 3 fused projections of 16 features each. Legal tp sizes for GPTNeoXForCausalLM: [1, 2, 4]" in message
    assert _plan(models.on_meta("gpt_neox"), tp=4).sizes["tp"] == 4


@pytest.mark.parametrize(
    ("name", "overrides", "legal"),
    [
        ("mixtral", {}, [1, 2]),
        ("mixtral", {"intermediate_size": 129}, [1]),
        ("llama", {"intermediate_size": 129}, [1, 2]),
        ("llama", {"num_key_value_heads": 4}, [1, 2, 4]),
    ],
)
def test_the_legal_sizes_of_an_error_are_legal(name, overrides, legal):
    message = _error(_plan, models.on_meta(name, **overrides), tp=3)
    assert f"Legal tp sizes for {type(models.on_meta(name)).__name__}: {legal}" in message
    for tp in legal:
        _plan(models.on_meta(name, **overrides), tp=tp)


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


def _experts(fsdp, tp, ep, overrides=None, **kwargs):
    return _plan(models.on_meta("olmoe", **(overrides or {})), tp, fsdp, ep=ep, **kwargs)


def test_experts_are_cut_by_ep_and_then_by_efsdp():
    """8 experts, fsdp=4 x tp=2 and ep=4: ep_rest=2, efsdp=2."""
    plan = _experts(fsdp=4, tp=2, ep=4).by_name
    experts, dense = plan["model.layers.0.mlp.experts.down_proj"], plan["model.layers.0.self_attn.q_proj.weight"]
    axes = ("dp_replicate", "tp", "ep_rest", "efsdp")
    assert experts.placements(axes) == (Replicate(), Shard(0), Shard(0), Shard(0))
    assert (experts.compute_shape[0], experts.storage_shape[0]) == (2, 1)
    assert dense.placements(axes) == (Replicate(), Shard(0), Shard(0), Shard(0))
    assert (dense.compute_shape[0], dense.storage_shape[0]) == (32, 8)


def test_experts_that_efsdp_does_not_divide_are_cut_inside():
    """8 experts over ep=4 leave 2 a rank, which 4 ranks of efsdp share by rows: none of them is left without."""
    experts = _experts(fsdp=16, tp=1, ep=4).by_name["model.layers.0.mlp.experts.down_proj"]
    assert experts.fsdp == Shard(1)
    assert experts.storage_shape == (2, experts.shape[1] // 4, experts.shape[2])


def test_padding_between_nested_shards_is_counted():
    """10 rows over ep_rest=2 x efsdp=2 are 3, 2, 3, 2: every rank's buffer has 3."""
    plan = _plan(models.on_meta("olmoe", vocab_size=10), fsdp=4, ep=2)
    assert plan.by_name["lm_head.weight"].storage_shape[0] == 3


@pytest.mark.parametrize(
    ("fsdp", "tp", "ep", "options", "exchange", "reason"),
    [
        (4, 1, 4, {}, "all_to_all", "a token meets top_k=2 of ep=4 ranks"),
        (2, 1, 2, {}, "all_to_all", "ranks have batches of their own"),
        (1, 2, 2, {}, "all_reduce", "one batch on all ranks, and ep=2 <= top_k=2"),
        (1, 4, 4, {}, "all_to_all", "a token meets top_k=2 of ep=4 ranks"),
        (4, 1, 4, {"expert_capacity": 1.5}, "capacity", "asked for"),
    ],
)
def test_auto_chooses_the_exchange_and_says_why(fsdp, tp, ep, options, exchange, reason):
    plan = _experts(fsdp, tp, ep, options=options)
    assert {experts.exchange for experts in plan.experts} == {exchange}
    assert reason in plan.experts[0].reason
    assert f": {exchange}" in str(plan)
    assert len(plan.experts) == 3


def test_the_deprecated_flag_means_experts_only():
    """enable_expert_parallel=True is ep_size=tp_size with an empty tp_plan."""
    with pytest.warns(FutureWarning, match="enable_expert_parallel"):
        plan = _experts(fsdp=1, tp=2, ep=2, enable_expert_parallel=True, tp_size=2)
    assert plan.by_name["model.layers.0.self_attn.q_proj.weight"].tp == Replicate()
    assert plan.by_name["model.layers.0.mlp.experts.down_proj"].tp == Shard(0)


def test_an_ep_plan_override_can_leave_out_a_layer():
    rules = {f"model.layers.1.mlp.experts{name}": "replicate" for name in ("", ".gate_up_proj", ".down_proj")}
    with pytest.raises(PlanError, match="match nothing"):  # transformers' plans speak of all layers
        _experts(fsdp=2, tp=1, ep=2, ep_plan=rules)


def test_experts_whose_weights_stay_whole_are_refused():
    rules = {"model.layers.*.mlp.experts.down_proj": "replicate"}
    with pytest.raises(PlanError, match=r"'model.layers.0.mlp.experts.down_proj'\] must be 'grouped_gemm' too"):
        _experts(fsdp=2, tp=1, ep=2, ep_plan=rules)
