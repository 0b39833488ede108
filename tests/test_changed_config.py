"""What a config says of code and outputs may change after compile: the next call captures what it says now."""

import models
import pytest
import torch

import ndcompile
from ndcompile.model_calls import compiled_model

ONE = {"num_hidden_layers": 1}
IDS = models.token_ids(2, 8)


def _pair(name):
    return models.build(name, **ONE).eval(), ndcompile.compile(models.build(name, **ONE).eval(), backend="aot_eager")


def _operators(model):
    """Of every graph, in the order of the captures."""
    programs = [signature.programs[0] for signature in compiled_model(model).signatures.values()]
    return [{str(node.target) for node in program.captured.module.graph.nodes} for program in programs]


def _fused_attention(model):
    return [any("scaled_dot_product" in name for name in operators) for operators in _operators(model)]


def _by_config(model):
    model.config._attn_implementation = "eager"


def _by_method(model):
    model.set_attn_implementation("eager")


@pytest.mark.parametrize("change", [_by_config, _by_method])
def test_the_attention_implementation(change):
    reference, model = _pair("llama")
    model(input_ids=IDS)
    change(model), change(reference)
    output = model(input_ids=IDS, output_attentions=True)
    expected = reference(input_ids=IDS, output_attentions=True)
    torch.testing.assert_close(output.attentions[0], expected.attentions[0])
    model.config._attn_implementation = "sdpa"
    model(input_ids=IDS, output_hidden_states=True)
    assert _fused_attention(model) == [True, False, True]


def _by_experts_method(model):
    model.set_experts_implementation("batched_mm")


def _by_experts_config(model):
    model.config._experts_implementation = "batched_mm"


@pytest.mark.parametrize("change", [_by_experts_config, _by_experts_method])
def test_the_experts_implementation(change):
    reference, model = _pair("olmoe")
    assert model.config._experts_implementation != "batched_mm"
    model(input_ids=IDS)
    change(model)
    logits = model(input_ids=IDS).logits
    first, second = _operators(model)
    assert first != second
    torch.testing.assert_close(logits, reference(input_ids=IDS).logits)


def test_outputs_that_the_config_asks_for():
    reference, model = _pair("llama")
    assert model(input_ids=IDS).hidden_states is None
    model.config.output_hidden_states = reference.config.output_hidden_states = True
    states, expected = model(input_ids=IDS).hidden_states, reference(input_ids=IDS).hidden_states
    assert len(states) == len(expected) == 2
    torch.testing.assert_close(states[1], expected[1])
    model.config.output_hidden_states = False
    assert model(input_ids=IDS).hidden_states is None


def test_router_logits_that_the_config_asks_for():
    reference, model = _pair("mixtral")
    model(input_ids=IDS, labels=IDS)
    model.config.output_router_logits = reference.config.output_router_logits = True
    output, expected = model(input_ids=IDS, labels=IDS), reference(input_ids=IDS, labels=IDS)
    torch.testing.assert_close(output.router_logits[0], expected.router_logits[0])
    torch.testing.assert_close(output.loss, expected.loss)
