"""Derived tp_plans: what is proposed, what the proof lets through, and what is refused."""

import json

import models
import plain_model
import proof_zoo
import pytest
import zoo
from transformers import GPT2Config
from transformers.distributed import DistributedConfig

import ndcompile
from ndcompile.cli import main
from ndcompile.derive import derive
from ndcompile.errors import PlanError, VerifyError
from ndcompile.pipeline import run_passes
from ndcompile.plans.sharding_plan import build_plan
from ndcompile.private.distributed import StridedShard

GPT2 = {
    "transformer.h.*.mlp.c_fc": "colwise_transposed",
    "transformer.h.*.mlp.c_proj": "rowwise_transposed",
    "transformer.h.*.attn.c_attn": "packed3_colwise_transposed",
    "transformer.h.*.attn.c_proj": "rowwise_transposed",
    "transformer.h.*.attn.split_size": "local_count",
    "transformer.wte": "embedding_rowwise",
    "lm_head": "colwise_gather_output",
}
OPT_ATTENTION = {
    "model.decoder.layers.*.self_attn.q_proj": "colwise",
    "model.decoder.layers.*.self_attn.k_proj": "colwise",
    "model.decoder.layers.*.self_attn.v_proj": "colwise",
    "model.decoder.layers.*.self_attn.out_proj": "rowwise",
}
SIZES = {"dp_replicate": 1, "fsdp": 1, "tp": 2}


def proven(model_type, plan, tp=2):
    captured, context = proof_zoo.captured(model_type, tp, plan)
    return run_passes(captured, context)


@pytest.fixture(scope="module")
def gpt2():
    return derive(zoo.on_meta("gpt2"), 2)


def test_transposed_weights_and_three_fused_parts_are_found(gpt2):
    assert gpt2.rules == GPT2
    assert gpt2.refused == {}


def test_the_share_of_sharded_parameters_is_told(gpt2):
    assert 0.9 < gpt2.sharded < 1


def test_a_derived_plan_prints_as_one_that_can_be_passed_back(gpt2):
    assert proven("gpt2", json.loads(str(gpt2)))


def test_a_number_of_heads_that_the_code_reads_becomes_a_share():
    rules = ndcompile.derive_tp_plan(zoo.on_meta("opt"), 2)
    assert OPT_ATTENTION.items() <= rules.items()
    assert [name for name, style in rules.items() if style == "local_count"] == [
        "model.decoder.layers.*.self_attn.num_heads"
    ]


def test_a_tied_bias_of_the_head_is_placed_like_the_head():
    rules = ndcompile.derive_tp_plan(zoo.on_meta("bert"), 2)
    assert rules["cls.predictions.decoder"] == "colwise_gather_output"
    assert rules["cls.predictions.bias"] == "colwise"


def test_a_norm_between_the_linears_is_cut_with_them():
    rules = ndcompile.derive_tp_plan(zoo.on_meta("bitnet"), 2)
    assert rules["model.layers.*.mlp.ffn_sub_norm.weight"] == "colwise"


def test_what_is_not_proven_is_left_whole_with_its_reason():
    """BLOOM's biases of positions are made for all heads."""
    found = derive(zoo.on_meta("bloom"), 2)
    assert found.rules["transformer.h.*.mlp.dense_h_to_4h"] == "colwise"
    assert "transformer.h.*.self_attention.dense" not in found.rules
    assert "is not proven over tp=2" in found.refused["transformer.h.*.self_attention.dense"]


def test_heads_that_tp_does_not_divide_stay_whole():
    rules = ndcompile.derive_tp_plan(zoo.on_meta("gpt2"), 3)
    assert "transformer.h.*.mlp.c_fc" in rules
    assert "transformer.h.*.attn.c_attn" not in rules


def test_frozen_models_are_derived_alike(gpt2):
    assert ndcompile.derive_tp_plan(zoo.on_meta("gpt2").requires_grad_(False), 2) == gpt2.rules


def test_layers_that_repeat_are_derived_once(gpt2):
    assert ndcompile.derive_tp_plan(zoo.on_meta("gpt2", n_layer=48), 2) == gpt2.rules


def test_a_model_with_a_plan_keeps_it():
    model = models.on_meta("llama", num_hidden_layers=1)
    config = ndcompile.derive.with_derived_plan(model, DistributedConfig(tp_plan="derive"), 2)
    assert build_plan(model, SIZES, config).by_name["model.layers.0.mlp.up_proj.weight"].style == "colwise"


def test_one_rank_needs_no_plan():
    config = ndcompile.derive.with_derived_plan(zoo.on_meta("gpt2"), DistributedConfig(tp_plan="derive"), 1)
    assert config.tp_plan is None
    with pytest.raises(ValueError, match="2 ranks or more"):
        ndcompile.derive_tp_plan(zoo.on_meta("gpt2"), 1)


def test_what_stays_whole_is_printed_with_its_reason(capsys):
    ndcompile.derive.with_derived_plan(zoo.on_meta("mpt"), DistributedConfig(tp_plan="derive"), 2)
    assert "left whole: transformer.blocks.*.attn.out_proj: 'reshape' in module" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["head_dim", "embed_dim"])
def test_the_proof_refuses_another_count_than_that_of_the_heads(count):
    rule = {f"model.decoder.layers.*.self_attn.{count}": "local_count"}
    with pytest.raises((VerifyError, ndcompile.CaptureError)):
        proven("opt", OPT_ATTENTION | rule)


def test_the_proof_refuses_fused_parts_that_are_cut_as_one():
    with pytest.raises(VerifyError):
        proven("gpt2", GPT2 | {"transformer.h.*.attn.c_attn": "colwise_transposed"})


def test_the_proof_refuses_interleaved_parts_that_are_cut_by_themselves():
    plan = {
        "gpt_neox_japanese.layers.*.attention.query_key_value": "packed3_colwise",
        "gpt_neox_japanese.layers.*.attention.dense": "rowwise",
        "gpt_neox_japanese.layers.*.attention.num_attention_heads": "local_count",
    }
    with pytest.raises((VerifyError, ndcompile.CaptureError)):
        proven("gpt_neox_japanese", plan)


def test_a_model_of_which_nothing_can_be_derived_is_refused_with_the_reasons():
    """BigBird makes its layers anew in its forward, with random numbers."""
    with pytest.raises(PlanError, match="No tp_plan can be derived for BigBirdForCausalLM on tp=2") as error:
        ndcompile.derive_tp_plan(zoo.on_meta("big_bird"), 2)
    assert "vocabulary: aten.uniform_.default in 'bert' is random" in str(error.value)


def test_a_module_that_is_one_opaque_node_stays_whole():
    rules = ndcompile.derive_tp_plan(zoo.on_meta("reformer"), 2)
    assert rules
    assert not any(".encoder" in name for name in rules)


def test_a_state_space_is_cut_by_its_channels():
    rules = ndcompile.derive_tp_plan(zoo.on_meta("mamba", num_hidden_layers=1), 2)
    mixer = "backbone.layers.*.mixer"
    assert rules[f"{mixer}.in_proj"] == "packed_colwise"
    assert rules[f"{mixer}.x_proj"] == rules[f"{mixer}.out_proj"] == "rowwise"
    assert rules[f"{mixer}.conv1d.weight"] == "first_dim"


def test_a_table_of_biases_per_head_is_cut_by_its_columns():
    rules = ndcompile.derive_tp_plan(zoo.on_meta("cpmant"), 2)
    assert rules["cpmant.position_bias.relative_attention_bias"] == "embedding_colwise"


def test_places_in_a_sequential_are_told_apart():
    rules = ndcompile.derive_tp_plan(zoo.on_meta("ctrl"), 2)
    assert rules["transformer.h.*.ffn.0"] == "colwise"
    assert rules["transformer.h.*.ffn.2"] == "rowwise"


def test_values_written_in_place_belong_to_a_pair():
    rules = ndcompile.derive_tp_plan(zoo.on_meta("rwkv", num_hidden_layers=1), 2)
    assert rules["rwkv.blocks.*.attention.value"] == rules["rwkv.blocks.*.attention.time_decay"] == "colwise"


def test_an_ordinary_module_is_refused():
    config = DistributedConfig(tp_plan="derive")
    with pytest.raises(PlanError, match="is no transformers model"):
        ndcompile.derive.with_derived_plan(plain_model.build(), config, 2)


def test_the_command_derives_prints_and_plans(tmp_path, capsys):
    GPT2Config(n_layer=3, n_embd=64, n_head=4, vocab_size=128).save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--tp", "2", "--seq", "16", "--derive"]) == 0
    printed = capsys.readouterr()
    assert '"transformer.h.*.attn.split_size": "local_count"' in printed.err
    assert "distributed_config.tp_plan['transformer.h.*.attn.c_proj']" in printed.out


def test_fused_parts_are_placed_each_by_itself():
    plan = build_plan(zoo.on_meta("gpt2"), SIZES, DistributedConfig(tp_plan=GPT2)).by_name
    assert plan["transformer.h.0.attn.c_attn.weight"].tp == StridedShard(1, split_factor=3)
    assert plan["transformer.h.0.attn.c_attn.bias"].tp == StridedShard(0, split_factor=3)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("transformer.h.*.attn.scaling", "is 0.25, of which tp=2 ranks have no equal whole share"),
        ("transformer.h.*.attn.no_such", "name no attribute of a module of GPT2LMHeadModel"),
        ("transformer.h.1.attn.layer_idx", "is 1, of which tp=2 ranks have no equal whole share"),
    ],
)
def test_a_count_that_cannot_be_shared_is_refused(rule, message):
    config = DistributedConfig(tp_plan=GPT2 | {rule: "local_count"})
    with pytest.raises(PlanError, match=message):
        build_plan(zoo.on_meta("gpt2"), SIZES, config)


def test_rules_of_ours_are_added_to_a_plan_of_transformers():
    """An empty tp_plan would mean no rule at all, and that is what is left for transformers here."""
    rule = {"model.layers.*.self_attn.num_key_value_groups": "local_count"}
    plan = build_plan(models.on_meta("llama"), SIZES, DistributedConfig(tp_plan=rule))
    assert plan.by_name["model.layers.0.mlp.up_proj.weight"].style == "colwise"
    assert plan.local_counts[0] == "model.layers.0.self_attn.num_key_value_groups"


def test_transposed_styles_are_for_transposed_weights():
    with pytest.raises(PlanError, match="Linear is no Conv1D of transformers"):
        proven("opt", {"model.decoder.layers.*.fc1": "colwise_transposed", "model.decoder.layers.*.fc2": "rowwise"})
