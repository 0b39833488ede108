"""What a captured graph is specialised on: a change of any entry captures another graph, a change of none does not."""

import copy
import inspect

import models
import pytest
import torch

from ndcompile.capture.call import bind
from ndcompile.capture.signature import describe, model_state

IDS = models.token_ids(2, 8)


@pytest.fixture
def model():
    return models.build("llama", num_hidden_layers=1)


def state(model):
    return model_state(model)


def differing(before, after):
    return [name for (name, old), (_, new) in zip(before, after, strict=True) if old != new]


def test_nothing_changed_is_the_same_signature(model):
    assert state(model) == state(model)


def test_grad_mode(model):
    before = state(model)
    with torch.no_grad():
        assert differing(before, state(model)) == ["grad"]


def test_inference_mode(model):
    with torch.no_grad():
        before = state(model)
    with torch.inference_mode():
        assert differing(before, state(model)) == ["inference mode"]


def test_autocast_and_its_dtype(model):
    states = [state(model)]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            states.append(state(model))
    assert differing(states[0], states[1]) == ["autocast"]
    assert differing(states[1], states[2]) == ["autocast"]


def test_the_training_flag_of_the_model(model):
    before = state(model)
    assert differing(before, state(model.eval())) == ["training"]


@pytest.mark.parametrize("part", ["model.layers.0.mlp", "model.norm", "lm_head"])
def test_the_training_flag_of_any_module(model, part):
    before = state(model)
    model.get_submodule(part).eval()
    assert differing(before, state(model)) == ["training"]


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"])
def test_requires_grad_of_any_parameter(model, name):
    before = state(model)
    model.get_parameter(name).requires_grad_(False)
    assert differing(before, state(model)) == ["requires_grad"]


def test_the_dtype_of_a_parameter(model):
    before = state(model)
    model.lm_head.to(torch.bfloat16)
    assert differing(before, state(model)) == ["dtypes"]


def test_gradient_checkpointing(model):
    before = state(model)
    model.gradient_checkpointing_enable()
    assert differing(before, state(model)) == ["checkpointed layers"]


def test_gradient_checkpointing_means_nothing_without_gradients(model):
    with torch.no_grad():
        before = state(model)
        model.gradient_checkpointing_enable()
        assert state(model) == before


def test_the_attention_implementation(model):
    before = state(model)
    model.set_attn_implementation("eager")
    assert differing(before, state(model)) == ["attention"]


def test_the_experts_implementation(model):
    before = state(model)
    model.config._experts_implementation = "batched_mm"
    assert differing(before, state(model)) == ["experts"]


def test_the_deterministic_flag(model):
    before = state(model)
    torch.use_deterministic_algorithms(True)
    try:
        assert differing(before, state(model)) == ["deterministic"]
    finally:
        torch.use_deterministic_algorithms(False)


def key(model, *args, **kwargs):
    return bind(inspect.signature(model.forward), args, kwargs).key()


OTHER_ARGUMENTS = {
    "another argument": {"attention_mask": torch.ones_like(IDS)},
    "another dtype": {"input_ids": IDS.int()},
    "another rank": {"attention_mask": torch.ones(2, 1, 8, 8, dtype=torch.bool)},
    "a plain value": {"output_hidden_states": True},
    "another plain value": {"output_hidden_states": False},
    "a number of positions": {"logits_to_keep": 3},
    "a gradient of an input": {"inputs_embeds": torch.zeros(2, 8, 64, requires_grad=True), "input_ids": None},
    "no gradient of an input": {"inputs_embeds": torch.zeros(2, 8, 64), "input_ids": None},
    "another structure": {"attention_mask": {"full_attention": torch.ones_like(IDS)}},
}


def test_any_change_of_the_arguments_is_another_signature(model):
    keys = {"plain": key(model, input_ids=IDS)}
    keys |= {what: key(model, **{"input_ids": IDS} | change) for what, change in OTHER_ARGUMENTS.items()}
    assert len(set(keys.values())) == len(keys)


def test_other_values_and_sizes_of_batch_and_sequence_are_the_same_signature(model):
    assert key(model, input_ids=IDS, labels=IDS) == key(
        model, input_ids=models.token_ids(3, 5), labels=models.token_ids(3, 5)
    )


def test_an_argument_that_is_none_is_one_that_is_left_out(model):
    assert key(model, input_ids=IDS, labels=None) == key(model, input_ids=IDS)


def test_a_positional_argument_is_one_by_name(model):
    assert key(model, IDS) == key(model, input_ids=IDS)


def test_another_number_of_items_each_step_is_the_same_signature(model):
    assert key(model, input_ids=IDS, num_items_in_batch=3) == key(model, input_ids=IDS, num_items_in_batch=5)


def test_a_signature_is_described_line_by_line(model):
    lines = describe((key(model, input_ids=IDS), state(model)))
    assert "argument 0: (torch.int64, 'cpu', ('batch', 'sequence'), False)" in lines
    assert "training: True" in lines


def test_reading_the_state_changes_nothing(model):
    before = copy.deepcopy(model.config.to_dict())
    state(model)
    assert model.config.to_dict() == before


def test_token_ids_that_are_no_tensor_are_named(model):
    with pytest.raises(TypeError, match="input_ids is a list, not a tensor"):
        bind(inspect.signature(model.forward), ([[1, 2]],), {})
