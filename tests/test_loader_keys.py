"""Ties, heads, and keys that a checkpoint lacks or has too many."""

from __future__ import annotations

import logging

import pytest
import torch
from loader_support import assert_holds, on_meta, rewrite, targets_of, tiny_model
from transformers import AutoModel, AutoModelForSequenceClassification

from ndcompile.loader import CheckpointError, load_into

LAST = ((2, 3), (1, 2))


@pytest.fixture
def llama(tmp_path):
    """A tiny Llama, untied, saved as one file."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    return model


def without(*names):
    return lambda tensors: {key: value for key, value in tensors.items() if key not in names}


def tensors_of(targets):
    return {target.fqn: target.tensor for target in targets}


@pytest.mark.parametrize("stored", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_tensor_is_found_under_any_of_its_names(tmp_path, stored):
    model = tiny_model("qwen2")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {stored if "embed" in key else key: value for key, value in tensors.items()})
    meta = on_meta(model)
    targets = targets_of(meta, *LAST)
    assert load_into(meta, targets, tmp_path).missing_keys == ()
    assert_holds(targets, model.state_dict())


def test_the_targets_own_name_wins_and_an_unequal_alias_is_told(tmp_path, caplog):
    model = tiny_model("qwen2")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    meta = on_meta(model)
    targets = targets_of(meta)
    with caplog.at_level(logging.WARNING, "ndcompile.loader"):
        load_into(meta, targets, tmp_path)
    assert_holds(targets, model.state_dict())
    (record,) = caplog.records
    assert "both are present in the checkpoint with different values" in record.getMessage()


def test_an_equal_alias_is_no_news(tmp_path, caplog):
    model = tiny_model("qwen2")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    meta = on_meta(model)
    with caplog.at_level(logging.WARNING, "ndcompile.loader"):
        load_into(meta, targets_of(meta), tmp_path)
    assert caplog.records == []


def test_a_base_model_checkpoint_loads_into_a_head_model_and_the_head_is_initialised(llama, tmp_path):
    llama.model.save_pretrained(tmp_path)
    meta = on_meta(llama)
    targets = targets_of(meta, *LAST)
    report = load_into(meta, targets, tmp_path)
    assert report.missing_keys == ("lm_head.weight",)
    assert_holds([target for target in targets if target.fqn != "lm_head.weight"], llama.state_dict())
    assert 0 < tensors_of(targets)["lm_head.weight"].std() < 0.1


def test_a_head_model_checkpoint_loads_into_its_base_model(llama, tmp_path):
    with torch.device("meta"):
        base = AutoModel.from_config(llama.config, dtype=torch.float32)
    targets = targets_of(base, *LAST)
    assert load_into(base, targets, tmp_path).unexpected_keys == ("lm_head.weight",)
    assert_holds(targets, llama.model.state_dict())


def test_a_lost_head_of_a_head_model_checkpoint_is_an_error(llama, tmp_path):
    rewrite(tmp_path, without("lm_head.weight"))
    meta = on_meta(llama)
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 21 tensors of LlamaForCausalLM: lm_head.weight"):
        load_into(meta, targets_of(meta), tmp_path)


def test_missing_parameters_are_named_with_the_remedy(llama, tmp_path):
    lost = ("model.layers.0.mlp.up_proj.weight", "model.norm.weight")
    rewrite(tmp_path, without(*lost))
    meta = on_meta(llama)
    with pytest.raises(CheckpointError, match=r"(?s)0.mlp.up_proj.weight, model.norm.weight.*strict=False"):
        load_into(meta, targets_of(meta), tmp_path)


def test_misspelt_keys_are_named_beside_the_missing_ones(llama, tmp_path):
    rewrite(tmp_path, lambda tensors: {key.replace("model.norm", "model.norn"): v for key, v in tensors.items()})
    meta = on_meta(llama)
    with pytest.raises(CheckpointError, match=r"(?s)model.norm.weight.*does not know: model.norn.weight"):
        load_into(meta, targets_of(meta), tmp_path)


def test_a_checkpoint_of_another_model_is_refused_even_when_not_strict(llama, tmp_path):
    rewrite(tmp_path, lambda tensors: {f"other.{key}": value for key, value in tensors.items()})
    meta = on_meta(llama)
    with pytest.raises(CheckpointError, match=r"no key of the checkpoint .* belongs to LlamaForCausalLM"):
        load_into(meta, targets_of(meta), tmp_path, strict=False)


def test_missing_parameters_are_initialised_alike_on_every_mesh(llama, tmp_path):
    lost = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight")
    rewrite(tmp_path, without(*lost))
    meta = on_meta(llama)
    whole = targets_of(meta)
    torch.manual_seed(1)
    assert load_into(meta, whole, tmp_path, strict=False).missing_keys == lost
    values = tensors_of(whole)
    torch.manual_seed(2)
    for coordinate in [(0, 0), (1, 2)]:
        targets = targets_of(meta, (2, 3), coordinate)
        load_into(meta, targets, tmp_path, strict=False)
        assert_holds(targets, values)
    first, second, norm = (values[name] for name in lost)
    assert abs(first.std() / llama.config.initializer_range - 1) < 0.1
    assert not torch.equal(first, second)
    assert (norm == 1).all()


def test_initialising_missing_parameters_leaves_the_random_state_alone(llama, tmp_path):
    rewrite(tmp_path, without("model.norm.weight", "lm_head.weight"))
    meta = on_meta(llama)
    before = torch.get_rng_state()
    load_into(meta, targets_of(meta), tmp_path, strict=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_initialisation_set_by_an_outer_module_is_found(tmp_path):
    # GPT-2 scales c_proj by depth in the initialisation of the whole model.
    model = tiny_model("gpt2", num_hidden_layers=8)
    model.save_pretrained(tmp_path)
    lost = [key for key in model.state_dict() if key.endswith("mlp.c_proj.weight")]
    rewrite(tmp_path, without(*lost))
    meta = on_meta(model)
    targets = targets_of(meta)
    load_into(meta, targets, tmp_path, strict=False)
    std = torch.stack([tensors_of(targets)[name] for name in lost]).std()
    assert abs(std / (model.config.initializer_range / 4) - 1) < 0.05


def test_missing_and_unexpected_keys_are_reported_once_as_transformers_words_it(llama, tmp_path, caplog):
    rewrite(tmp_path, lambda tensors: without("model.norm.weight")(tensors) | {"extra": torch.zeros(1)})
    meta = on_meta(llama)
    with caplog.at_level(logging.WARNING, "ndcompile.loader"):
        for coordinate in [(0, 0), (0, 1), (1, 0), (1, 1)]:
            report = load_into(meta, targets_of(meta, (2, 2), coordinate), tmp_path, strict=False)
            assert (report.missing_keys, report.unexpected_keys) == (("model.norm.weight",), ("extra",))
    (record,) = caplog.records
    text = record.getMessage()
    assert "LOAD REPORT" in text
    assert "newly initialized because missing from the checkpoint" in text
    assert "UNEXPECTED" in text


def test_keys_that_are_left_over_are_refused_with_their_files(llama, tmp_path):
    llama.config.num_hidden_layers = 1
    meta = on_meta(llama)
    message = (
        r"holds 9 keys that LlamaForCausalLM does not know: model.layers.1.input_layernorm.weight \(32,\) in model"
    )
    with pytest.raises(CheckpointError, match=message):
        load_into(meta, targets_of(meta), tmp_path)
    assert len(load_into(meta, targets_of(meta), tmp_path, strict=False).unexpected_keys) == 9


@pytest.mark.parametrize("part", ["whole", "base"])
def test_a_base_model_leaves_out_heads_but_no_layers(llama, tmp_path, part):
    (llama if part == "whole" else llama.model).save_pretrained(tmp_path)
    llama.config.num_hidden_layers = 1
    with torch.device("meta"):
        base = AutoModel.from_config(llama.config, dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"holds 9 keys that LlamaModel does not know: .*layers.1"):
        load_into(base, targets_of(base), tmp_path)


def test_keys_that_the_model_ignores_are_not_reported(llama, tmp_path, caplog):
    rewrite(tmp_path, lambda tensors: tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    meta = on_meta(llama)
    with caplog.at_level(logging.WARNING, "ndcompile.loader"):
        assert load_into(meta, targets_of(meta), tmp_path).unexpected_keys == ()
    assert caplog.records == []


def test_a_missing_parameter_that_the_model_ignores_is_initialised_without_error(llama, tmp_path):
    rewrite(tmp_path, without("lm_head.weight"))
    meta = on_meta(llama)
    meta._keys_to_ignore_on_load_missing = {r"lm_head\.weight"}
    targets = targets_of(meta)
    assert load_into(meta, targets, tmp_path).missing_keys == ()
    assert tensors_of(targets)["lm_head.weight"].std() > 0


def test_a_missing_persistent_buffer_gets_its_initial_value(tmp_path):
    model = tiny_model("deepseek_v3")
    model.save_pretrained(tmp_path)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    rewrite(tmp_path, without(name))
    meta = on_meta(model)
    targets = targets_of(meta)
    assert load_into(meta, targets, tmp_path).missing_keys == (name,)
    assert torch.equal(tensors_of(targets)[name], torch.zeros(4))


def test_a_missing_tensor_that_the_model_does_not_initialise_is_an_error(tmp_path):
    # transformers leaves such a tensor as the memory happens to be.
    model = tiny_model("apertus")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, without("model.layers.0.mlp.act_fn.beta"))
    meta = on_meta(model)
    with pytest.raises(CheckpointError, match=r"act_fn\.beta has no value: no checkpoint has it"):
        load_into(meta, targets_of(meta), tmp_path, strict=False)


def test_a_new_classification_head_needs_strict_false(llama, tmp_path):
    with torch.device("meta"):
        meta = AutoModelForSequenceClassification.from_config(llama.config, dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"score.weight"):
        load_into(meta, targets_of(meta), tmp_path)
    report = load_into(meta, targets_of(meta), tmp_path, strict=False)
    assert (report.missing_keys, report.unexpected_keys) == (("score.weight",), ("lm_head.weight",))


def test_a_missing_tied_tensor_is_reported_under_all_its_names_and_initialised_once(tmp_path):
    model = tiny_model("qwen2")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, without("model.embed_tokens.weight"))
    meta = on_meta(model)
    targets = targets_of(meta)
    report = load_into(meta, targets, tmp_path, strict=False)
    assert report.missing_keys == ("lm_head.weight", "model.embed_tokens.weight")
    assert abs(tensors_of(targets)["model.embed_tokens.weight"].std() / model.config.initializer_range - 1) < 0.1
