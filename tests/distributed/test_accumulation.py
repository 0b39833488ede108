"""`ndcompile.no_sync`: micro-batches whose gradients stay on the rank until the last one reduces them all."""

import functools

import models
import pytest
import torch
import workers
from matrix import sampled_rows
from workers import FSDP2_TP2, REPLICATE2_FSDP2

import ndcompile
from ndcompile.capture.graph_input import HELD
from ndcompile.model_calls import compiled_model

ONE = {"num_hidden_layers": 1}
FSDP2_EP2 = (("fsdp", 2), ("ep", 2))
SUMS = 2e-6
"""float32 sums in another order: held gradients are added before the ranks reduce, others after."""


def _batch(rank, seed):
    ids = models.token_ids(2, 8, seed=10 * seed + rank)
    return {"input_ids": ids, "labels": ids}


def _losses(name, layout, path, **options):
    model = workers.compiled(name, layout, path, ONE, **options)
    return model, lambda seed: model(**_batch(ndcompile.data_rank(model), seed)).loss


def _gradients(model):
    gradients = {n: None if p.grad is None else workers.full(p.grad).clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return gradients


def _accumulate(name, layout, path, options):
    model, loss = _losses(name, layout, path, **options)
    for seed in range(3):
        loss(seed).backward()
    expected = _gradients(model)
    with ndcompile.no_sync(model):
        loss(0).backward()
        loss(1).backward()
    without_data_axes = [n for n, p in model.named_parameters() if p.grad is not None]
    loss(2).backward()
    held = workers.gradient_errors(model, expected)
    model.zero_grad()
    for seed in range(3):
        loss(seed).backward()
    return held, without_data_axes, workers.gradient_errors(model, expected)


CASES = [
    ("llama", FSDP2_TP2, {}),
    ("llama", REPLICATE2_FSDP2, {"backend": "aot_eager"}),
    ("llama", (("dp_replicate", 4),), {}),
    ("qwen3_moe", FSDP2_EP2, {}),
]


@pytest.mark.parametrize(("name", "layout", "options"), sampled_rows(CASES, 0, 3))
def test_held_gradients_are_added_to_the_step_that_reduces(ranks, checkpoint, name, layout, options):
    for held, early, after in ranks(_accumulate, name, layout, checkpoint(name, **ONE), options):
        assert max(held.values()) < SUMS
        assert early == []  # every parameter of these has a data axis
        assert max(after.values()) == 0  # nothing is left over for the next step


def test_a_parameter_that_no_data_axis_reduces_has_its_gradient_at_once(world, checkpoint):
    layout = (("tp", 2),)
    for held, early, _ in world(2)(_accumulate, "llama", layout, checkpoint("llama", **ONE), {}):
        assert len(early) == len(held)
        assert max(held.values()) < SUMS


def _collectives_of_backward(path):
    model, loss = _losses("llama", (("fsdp", 4),), path, backend="aot_eager")
    with model.no_sync():
        loss(0).backward()
    loss(1).backward()
    signatures = compiled_model(model).signatures.values()
    return [dict(s.programs[0].graphs.collective_counts()["backward"]) for s in signatures]


def test_a_backward_under_no_sync_gathers_as_ever_and_reduces_nothing(ranks, checkpoint):
    for held, reduced in ranks(_collectives_of_backward, checkpoint("llama", **ONE)):
        assert reduced.pop("reduce_scatter_tensor") > 0
        assert held == reduced


def _precisions(path):
    policy = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    config = {"fsdp_size": 4, "fsdp_mixed_precision": policy}
    model, loss = _losses("llama", (("fsdp", 4),), path, distributed_config=config)
    with ndcompile.no_sync(model):
        loss(0).backward()
    held = compiled_model(model).accumulation.held.sums
    return {gradient.dtype for gradient in held.values()}


def test_gradients_are_held_in_the_dtype_that_parameters_are_stored_in(ranks, checkpoint):
    assert ranks(_precisions, checkpoint("llama", **ONE)) == [{torch.float32}] * 4


def _strides(path):
    """Of all inputs of kind HELD: what each graph was compiled for, and what it is given."""
    model, loss = _losses("llama", (("fsdp", 4),), path)
    compiled, found = compiled_model(model), []

    def compare():
        programs = [program for signature in compiled.signatures.values() for program in signature.programs]
        program = programs[-1]
        given = compiled.accumulation.inputs(program.inputs, compiled.store)
        placeholders = zip(program.inputs, program.captured.placeholders, strict=True)
        fakes = {spec.name: node.meta["val"] for spec, node in placeholders if spec.kind == HELD}
        found.extend((fakes[name].stride(), given[name].stride()) for name in given)

    with ndcompile.no_sync(model):
        last = loss(0)
        compare()
        last.backward()
    last = loss(1)
    compare()
    last.backward()
    return found


def test_held_inputs_have_the_strides_that_the_graphs_were_compiled_for(ranks, checkpoint):
    """Inductor of torch 2.11 asserts them, that of 2.13 relies on them."""
    for found in ranks(_strides, checkpoint("llama", **ONE)):
        assert {traced for traced, _ in found} >= {(0, 0), (64, 1)}
        assert all(traced == given for traced, given in found)


def _mistakes(path):
    """What each use raises that would lose gradients, or count them twice."""
    model, loss = _losses("llama", (("fsdp", 4),), path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def held():
        with ndcompile.no_sync(model):
            loss(0).backward()

    def step_while_held():
        held()
        optimizer.step()

    def two_forwards_before_backward():
        held()
        first, second = loss(1), loss(2)
        first.backward()
        second.backward()

    def more_held_after_the_forward():
        held()
        last = loss(1)
        held()
        last.backward()

    messages = {}
    for mistake in (step_while_held, two_forwards_before_backward, more_held_after_the_forward):
        try:
            mistake()
        except ndcompile.NdcompileError as error:
            messages[mistake.__name__] = str(error)
        ndcompile.drop_held_gradients(model)
        model.zero_grad()
    loss(1).backward()
    optimizer.step()
    return messages


@functools.cache
def _messages(ranks, path):
    return ranks(_mistakes, path)[0]


MISTAKES = {
    "step_while_held": "is still held by no_sync: this step would miss it",
    "two_forwards_before_backward": "were added by another backward",
    "more_held_after_the_forward": "came after this forward",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_would_lose_held_gradients_raises(ranks, checkpoint, mistake):
    assert MISTAKES[mistake] in _messages(ranks, checkpoint("llama", **ONE))[mistake]


def _other_losses(path):
    """Evaluation between the micro-batches, with gradients and without."""
    model, loss = _losses("llama", (("fsdp", 4),), path)
    loss(0).backward()
    loss(1).backward()
    expected = _gradients(model)
    with ndcompile.no_sync(model):
        loss(0).backward()
    loss(2)  # no backward
    with torch.no_grad():
        loss(2)
    loss(1).backward()
    return workers.gradient_errors(model, expected)


def test_a_forward_without_backward_takes_nothing_of_what_is_held(ranks, checkpoint):
    for errors in ranks(_other_losses, checkpoint("llama", **ONE)):
        assert max(errors.values()) < SUMS
