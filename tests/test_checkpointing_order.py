"""Gradient checkpointing may be switched on before compile, as usual, or after it: the graphs are the same."""

import models
import pytest
import torch

import ndcompile
from ndcompile.errors import UnsupportedError
from ndcompile.model_calls import compiled_model
from ndcompile.refusals import check_model

ONE = {"num_hidden_layers": 1}
IDS = models.token_ids(2, 8)


def _step(model):
    model(input_ids=IDS, labels=IDS).loss.backward()
    (signature,) = compiled_model(model).signatures.values()
    saved = [node.name for node in signature.programs[0].graphs.forward.graph.output_node().args[0]]
    return {name: p.grad.to_local() for name, p in model.named_parameters()}, saved


def _before(model):
    model.gradient_checkpointing_enable()
    return ndcompile.compile(model, backend="aot_eager")


def _after(model):
    model = ndcompile.compile(model, backend="aot_eager")
    model.gradient_checkpointing_enable()
    return model


def test_both_orders_give_the_same_graphs_and_the_gradients_of_the_model():
    reference = models.build("llama", **ONE)
    reference(input_ids=IDS, labels=IDS).loss.backward()
    plain = _step(ndcompile.compile(models.build("llama", **ONE), backend="aot_eager"))
    first, saved_first = _step(_before(models.build("llama", **ONE)))
    second, saved_second = _step(_after(models.build("llama", **ONE)))
    assert saved_first == saved_second
    assert len(saved_first) < len(plain[1])
    for name, parameter in reference.named_parameters():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], parameter.grad)


def test_it_can_be_switched_off_again():
    model = _before(models.build("llama", **ONE))
    model.gradient_checkpointing_disable()
    _, saved = _step(model)
    assert saved == _step(ndcompile.compile(models.build("llama", **ONE), backend="aot_eager"))[1]


@pytest.mark.parametrize("enable", ["gradient_checkpointing_enable", "enable_input_require_grads"])
def test_a_hook_of_the_user_beside_that_of_transformers_is_refused(enable):
    model = models.on_meta("llama", **ONE)
    getattr(model, enable)()
    check_model(model)
    model.model.embed_tokens.register_forward_hook(lambda *args: None)
    with pytest.raises(UnsupportedError, match=r"Module 'model\.embed_tokens' has hooks"):
        check_model(model)
