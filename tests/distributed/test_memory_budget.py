"""A budget of saved bytes: layers are recomputed until what forward keeps fits, and nothing else changes."""

import re

import models
import pytest
import torch
import workers
from workers import FSDP2_TP2

import ndcompile
from ndcompile.graphs.saved_activations import even_rows, nbytes, saved_activations
from ndcompile.model_calls import compiled_model

FSDP2 = (("fsdp", 2),)
LAYERS = {"num_hidden_layers": 2}
SHAPE = (2, 16)


def _compiled(layout, checkpoint, budget, name="llama", **options):
    options = {"backend": "aot_eager", **options}
    return workers.compiled(name, layout, checkpoint, LAYERS, memory_budget=budget, **options)


def _loss(model, shape=SHAPE):
    ids = models.token_ids(*shape, seed=ndcompile.data_rank(model))
    return model(input_ids=ids, labels=ids).loss


def _program(model):
    return list(compiled_model(model).signatures.values())[-1].programs[-1]


def _saved(model):
    graphs = _program(model).graphs
    saved = saved_activations(graphs.forward.graph, graphs.backward.graph)
    rows = even_rows(graphs.forward.graph)
    return sum(nbytes(node.meta["val"], rows) for node in saved.values())


def _collectives(model):
    return {name: dict(counts) for name, counts in _program(model).graphs.collective_counts().items()}


def _step(model, shape=SHAPE):
    _loss(model, shape).backward()
    gradients = {name: workers.full(p.grad).clone() for name, p in model.named_parameters()}
    return _saved(model), _collectives(model), gradients


def _error(layout, checkpoint, budget, shapes=(SHAPE,), **options):
    """What the calls raise, on a rank; each rank takes the shape of its number."""
    model = _compiled(layout, checkpoint, budget, **options)
    try:
        _loss(model, shapes[torch.distributed.get_rank() % len(shapes)])
    except ndcompile.NdcompileError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _one_step(layout, checkpoint, budget, options):
    with torch._inductor.config.patch(force_disable_caches=True):  # a cached program has no graphs to look at
        return _step(_compiled(layout, checkpoint, budget, **options))


def _assert_budgets_hold(pool, layout, checkpoint, shares, name="llama", **options):
    """Steps without a budget, and with some between all and the least that is possible: a share of what is between."""
    folder, options = checkpoint(name, **LAYERS), {"name": name, **options}
    free = pool(_one_step, layout, folder, None, options)
    least = int(re.search(r"\((\d+) bytes\)", pool(_least_error, layout, folder, options)[0])[1])
    assert least < 0.7 * free[0][0]
    for budget in (least + int(share * (free[0][0] - least)) for share in shares):
        steps = pool(_one_step, layout, folder, budget, options)
        for (_, collectives, gradients), (saved, others, recomputed) in zip(free, steps, strict=True):
            assert least <= saved <= budget
            if saved > least:
                assert others == collectives  # they are recomputed last
            errors = {name: workers.error(recomputed[name], gradients[name]) for name in gradients}
            assert max(errors.values()) < workers.LIMIT


def _least_error(layout, checkpoint, options):
    return _error(layout, checkpoint, 1, **options)


def test_saved_bytes_fit_and_gradients_are_the_same_on_fsdp(world, checkpoint):
    _assert_budgets_hold(world(2), FSDP2, checkpoint, (0.3,))


@pytest.mark.slow
def test_saved_bytes_fit_and_gradients_are_the_same_on_fsdp_and_tp(ranks, checkpoint):
    _assert_budgets_hold(ranks, FSDP2_TP2, checkpoint, (0.7, 0))


@pytest.mark.slow
def test_saved_bytes_fit_with_inductor(world, checkpoint):
    """Inductor rewrites the joint graph before it is partitioned."""
    layout, folder = (("fsdp", 1),), checkpoint("llama", **LAYERS)
    ((free, _, gradients),) = world(1)(_one_step, layout, folder, None, {})
    budget = int(0.7 * free)
    ((saved, _, recomputed),) = world(1)(_one_step, layout, folder, budget, {"backend": "inductor"}, timeout=280)
    assert saved <= budget
    assert max(workers.error(recomputed[name], gradients[name]) for name in gradients) < workers.LIMIT


@pytest.mark.slow
def test_saved_bytes_fit_with_experts(world, checkpoint):
    config = {"fsdp_size": 2, "ep_size": 2}
    _assert_budgets_hold(world(2), FSDP2, checkpoint, (0.5, 0), "qwen3_moe", distributed_config=config)


def test_too_small_a_budget_names_the_least_on_every_rank(world, checkpoint):
    errors = world(2)(_error, FSDP2, checkpoint("llama", **LAYERS), "1kB", ((2, 16), (2, 24)))
    assert len(set(errors)) == 1
    assert "PlanError: memory_budget=1 kB is too small: rank 1 keeps" in errors[0]  # the one with more tokens
    assert "Raise the budget" in errors[0]


def _with_other_lengths(checkpoint, budget):
    """Ranks with other sequence lengths; then the number of a rank's bytes, and what it recomputes."""
    model = _compiled(FSDP2, checkpoint, budget)
    _step(model, (2, 16 if ndcompile.data_rank(model) else 24))
    signature = list(compiled_model(model).signatures.values())[-1]
    order = [node.target._opname for node in _gathers(_program(model))]
    return _saved(model), signature.recompute, order


def _gathers(program):
    gather = torch.ops._c10d_functional.all_gather_into_tensor.default
    return program.graphs.backward.graph.find_nodes(op="call_function", target=gather)


@pytest.mark.slow
def test_ranks_with_other_lengths_recompute_the_same(world, checkpoint):
    folder = checkpoint("llama", **LAYERS)
    (longer, _, _), (shorter, _, _) = world(2)(_with_other_lengths, folder, "1GB")
    budget = (longer + shorter) // 2  # one of them would fit without recomputing
    (saved, stages, order), (_, others, other_order) = world(2)(_with_other_lengths, folder, budget)
    assert saved <= budget
    assert stages == others != (0, 0)
    assert order == other_order


def _grown(checkpoint):
    model = _compiled(FSDP2, checkpoint, None)
    _step(model)
    model = _compiled(FSDP2, checkpoint, _saved(model) - 1)
    _step(model)
    try:
        _step(model, (2, 32))
    except ndcompile.PlanError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_later_sizes_that_need_more_recomputing_are_refused(world, checkpoint):
    for error in world(2)(_grown, checkpoint("llama", **LAYERS)):
        assert "Let the first batch be the largest one" in error


def _beside_checkpointing(checkpoint):
    """The first layer checkpointed by transformers, the others by the budget."""
    model = _compiled(FSDP2, checkpoint, None)
    free = _step(model)
    model = _compiled(FSDP2, checkpoint, int(0.7 * free[0]))
    model.model.layers[0].gradient_checkpointing = True
    model.model.layers[0]._gradient_checkpointing_func = torch.utils.checkpoint.checkpoint
    saved, _, gradients = _step(model)
    signature = list(compiled_model(model).signatures.values())[-1]
    same = all(torch.equal(gradients[name], free[2][name]) for name in gradients)
    return saved <= int(0.7 * free[0]), len(signature.recompute), same


@pytest.mark.slow
def test_gradient_checkpointing_beside_it(world, checkpoint):
    assert world(2)(_beside_checkpointing, checkpoint("llama", **LAYERS)) == [(True, 1, True)] * 2


def _cache_keys(checkpoint):
    tags = []
    for budget in (None, "1GB", 250_000):
        model = _compiled(FSDP2, checkpoint, budget)
        _loss(model)
        tags.append(_program(model).graphs.uuid())
    return tags


@pytest.mark.slow
def test_the_choice_is_part_of_cache_keys(world, checkpoint):
    for none, enough, little in world(2)(_cache_keys, checkpoint("llama", **LAYERS)):
        assert none == enough != little


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_budget": "much"}, "give a number and a unit"),
        ({"memory_budget": 0}, "give a number and a unit"),
        ({"memory_budget": "1GB", "backend": "eager"}, "recomputes nothing"),
    ],
)
def test_budgets_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        ndcompile.compile(models.on_meta("llama"), **options)
