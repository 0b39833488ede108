"""Gradient checkpointing: layers are computed again in backward, and nothing else changes."""

import math

import models
import pytest
import torch
import workers
from matrix import sampled
from workers import FSDP2_TP2, size

import ndcompile
from ndcompile.model_calls import compiled_model

TWO = {"num_hidden_layers": 2}


def _saved_bytes(program):
    """What the forward graph hands to the backward graph, besides parameters and arguments, which live anyway."""
    forward = program.graphs.forward.graph
    outputs = forward.output_node().args[0]
    values = [n.meta["val"] for n in outputs[program.captured.output_spec.num_leaves :] if n.op != "placeholder"]
    return sum(math.prod(v.shape) * v.dtype.itemsize for v in values if isinstance(v, torch.Tensor))


def _step(model):
    rank = ndcompile.data_rank(model)
    ids = models.token_ids(2, 16, seed=rank)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {name: workers.full(p.grad).clone() for name, p in model.named_parameters()}
    model.zero_grad()
    program = list(compiled_model(model).signatures.values())[-1].programs[-1]
    return loss.item(), gradients, _saved_bytes(program)


def _both_ways(layout, checkpoint, overrides):
    model = workers.compiled("llama", layout, checkpoint, TWO | overrides, backend="aot_eager")
    compiled_model(model).seeds.steps = 0
    off = _step(model)
    compiled_model(model).seeds.steps = 0
    model.gradient_checkpointing_enable()
    return off, _step(model)


def _assert_recompute_changes_nothing(results):
    for (loss, gradients, saved), (loss_again, gradients_again, saved_less) in results:
        assert loss_again == loss
        assert all(torch.equal(gradients_again[name], gradients[name]) for name in gradients)
        assert saved_less < 0.6 * saved


@pytest.mark.parametrize("layout", sampled([(("fsdp", 2),), FSDP2_TP2], 0))
def test_saved_bytes_fall_and_gradients_are_the_same(world, checkpoint, layout):
    _assert_recompute_changes_nothing(world(size(layout))(_both_ways, layout, checkpoint("llama", **TWO), {}))


@pytest.mark.slow
def test_recompute_draws_the_same_dropout_again(ranks, checkpoint):
    overrides = {"attention_dropout": 0.1}
    _assert_recompute_changes_nothing(ranks(_both_ways, FSDP2_TP2, checkpoint("llama", **TWO), overrides))
