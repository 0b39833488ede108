"""torch.compile(model, backend="ndcompile"): the same loss, gradients and collectives as ndcompile.compile."""

import json
import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch
import workers
from matrix import sampled, sampled_rows
from parity_case import Case, assert_parity
from transformers import AutoConfig, AutoModelForCausalLM
from workers import FSDP2_TP2, FSDP4, REPLICATE2_FSDP2, TP2, size

import ndcompile
from ndcompile.model_calls import compiled_model

# architecture: what is particular about it. gemma2: soft caps and a sliding window; gpt_neox: a fused projection;
#   mixtral: experts under tp; qwen3_moe: experts that are exchanged
CASES = [
    # model, layout, options
    ("gemma2", TP2, {}),
    ("gpt_neox", TP2, {}),
    ("qwen3", REPLICATE2_FSDP2, {}),
    ("mixtral", FSDP2_TP2, {}),
    ("qwen3_moe", FSDP4, {"distributed_config": {"fsdp_size": 4, "ep_size": 4}}),
]
ONE = {"num_hidden_layers": 1}
FSDP2 = (("fsdp", 2),)


def _collectives(model):
    return [signature.collectives for signature in compiled_model(model).signatures.values()]


@pytest.mark.slow
def test_one_training_step_through_dynamo_and_inductor(world, checkpoint):
    options = {"dynamo": True, "backend": "inductor"}
    case = Case("qwen3", FSDP2_TP2, padding=True, step=True, overrides=ONE, options=options)
    assert_parity(world(4), case, checkpoint("qwen3", **ONE))


def _both_front_ends(name, layout, checkpoint, overrides, options):
    results = []
    for dynamo in (False, True):
        model = workers.compiled(name, layout, checkpoint, overrides, dynamo=dynamo, **options)
        ids = models.token_ids(2, 8, seed=ndcompile.data_rank(model))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        results.append((loss.item(), [workers.full(p.grad) for p in model.parameters()], _collectives(model)))
    return results


@pytest.mark.parametrize(("model", "layout", "options"), sampled_rows(CASES, 3))
def test_both_front_ends_have_the_same_collectives_loss_and_gradients(world, checkpoint, model, layout, options):
    for (loss, gradients, collectives), (loss2, gradients2, collectives2) in world(size(layout))(
        _both_front_ends, model, layout, checkpoint(model, **ONE), ONE, options
    ):
        assert collectives2 == collectives
        assert len(collectives[0]) > 3
        assert loss2 == pytest.approx(loss, rel=1e-6)
        assert all(workers.error(b, a, 1e-3) < 1e-5 for a, b in zip(gradients, gradients2, strict=True))


def test_torch_finds_the_backend_without_an_import_of_ndcompile():
    code = "import sys, torch; print('ndcompile' in torch.compiler.list_backends(), 'ndcompile' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.split() == ["True", "False"]


def _lengths(dynamo, lengths, batches):
    """Losses and a gradient for many sizes, and how many programs they took."""
    model = workers.compiled("llama", FSDP2, None, ONE, dynamo=dynamo, backend="aot_eager")
    ndcompile.init_weights(model, 0)
    rank, results = ndcompile.data_rank(model), []
    for length, batch in zip(lengths, batches, strict=True):
        ids = models.token_ids(batch, length, seed=100 * rank + length)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        results.append((loss.item(), workers.full(model.lm_head.weight.grad).clone()))
        model.zero_grad()
    weights = {name: workers.full(p.detach()).clone() for name, p in model.named_parameters()}
    return results, sum(len(s.programs) for s in compiled_model(model).signatures.values()), weights


@pytest.mark.parametrize("dynamo", sampled([False, True], 1))
def test_ten_lengths_take_one_further_compile(world, dynamo):
    lengths, batches = [8, 13, 9, 21, 16, 11, 30, 12, 25, 17], [2] * 10
    outcome = world(2)(_lengths, dynamo, lengths, batches)
    assert all(programs == 2 for _, programs, _ in outcome)
    _assert_right(outcome, lengths, batches)


LENGTHS = [8, 13, 9]


def _lengths_with(dynamic):
    """Losses of one prepared model at many lengths, programs after each, and its weights."""
    model = models.build("llama", **ONE)
    ndcompile.prepare(model, workers.mesh(FSDP2), lowering="aot_eager")
    ndcompile.init_weights(model, 0)
    step = torch.compile(model, backend="ndcompile", fullgraph=True, dynamic=dynamic)
    results, programs = [], []
    for length in LENGTHS:
        ids = models.token_ids(2, length, seed=100 * ndcompile.data_rank(model) + length)
        loss = step(input_ids=ids, labels=ids).loss
        loss.backward()
        results.append((loss.item(), workers.full(model.lm_head.weight.grad).clone()))
        model.zero_grad()
        programs.append(sum(len(s.programs) for s in compiled_model(model).signatures.values()))
    return results, programs, {name: workers.full(p.detach()).clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("dynamic", "counts"), sampled_rows([(True, [1, 1, 1]), (False, [1, 2, 3])], 0))
def test_what_dynamic_says_of_sizes_holds(world, dynamic, counts):
    """dynamic=True makes floats symbolic too, such as the epsilon of a norm."""
    outcome = world(2)(_lengths_with, dynamic)
    assert [programs for _, programs, _ in outcome] == [counts] * 2
    _assert_right(outcome, LENGTHS, [2] * 3)


def _scaled(scales):
    model = _prepared()
    ids, losses, programs = models.token_ids(2, 8), [], []

    @torch.compile(backend="ndcompile", fullgraph=True, dynamic=True)
    def loss(ids, scale):
        return model(input_ids=ids).logits.float().pow(2).mean() * scale

    for scale in scales:
        losses.append(loss(ids, scale).item())
        programs.append(sum(len(s.programs) for s in compiled_model(model).signatures.values()))
    return losses, programs


def test_a_float_of_the_caller_compiles_again(world):
    for (one, three, again), programs in world(2)(_scaled, [1.5, 4.5, 1.5]):
        assert three == pytest.approx(3 * one, rel=1e-6)
        assert again == one
        assert programs == [1, 2, 2]


@pytest.mark.parametrize("dynamo", sampled([False, True], 1))
def test_sizes_of_one_are_right(world, dynamo):
    lengths, batches = [8, 2], [2, 1]
    _assert_right(world(2)(_lengths, dynamo, lengths, batches), lengths, batches)


def _assert_right(outcome, lengths, batches):
    plain = models.build("llama", **ONE)
    plain.load_state_dict(outcome[0][2])
    for step, (length, batch) in enumerate(zip(lengths, batches, strict=True)):
        plain.zero_grad()
        for rank, (results, _, _) in enumerate(outcome):
            ids = models.token_ids(batch, length, seed=100 * rank + length)
            expected = plain(input_ids=ids, labels=ids).loss
            (expected / 2).backward()
            assert results[step][0] == pytest.approx(expected.item(), rel=1e-5)
        assert workers.error(outcome[0][0][step][1], plain.lm_head.weight.grad) < 1e-5


def _empty(dynamo):
    model = workers.compiled("llama", FSDP2, None, ONE, dynamo=dynamo)
    ndcompile.init_weights(model, 0)
    model(input_ids=torch.zeros(0, 4, dtype=torch.int64))


@pytest.mark.parametrize("dynamo", [False, True])
def test_an_empty_batch_is_refused(world, dynamo):
    for _, message in world(2).errors(_empty, dynamo):
        assert "Empty input" in message


def _prepared(**options):
    model = models.build("llama", **ONE)
    return ndcompile.prepare(model, workers.mesh(FSDP2), lowering="eager", **options)


def _modes():
    """Everything that must compile again: training, grad mode, checkpointing; and a train step as one function."""
    model = _prepared()
    step = torch.compile(model, backend="ndcompile", fullgraph=True)
    ids = models.token_ids(2, 8, seed=ndcompile.data_rank(model))
    counts = []

    def programs():
        counts.append(sum(len(s.programs) for s in compiled_model(step).signatures.values()))

    step(input_ids=ids, labels=ids)
    programs()
    step(input_ids=ids, labels=ids)
    programs()
    model.eval()
    step(input_ids=ids, labels=ids)
    programs()
    with torch.no_grad():
        step(input_ids=ids, labels=ids)
    programs()
    model.train()
    model.gradient_checkpointing_enable()
    step(input_ids=ids, labels=ids)
    programs()
    return counts


def test_what_changes_the_graph_compiles_again(world):
    assert world(2)(_modes) == [[1, 1, 2, 3, 4]] * 2


def _own_loss():
    model = _prepared()
    ids = models.token_ids(2, 8, seed=ndcompile.data_rank(model))

    @torch.compile(backend="ndcompile", fullgraph=True)
    def loss(ids):
        return model(input_ids=ids).logits.float().pow(2).mean()

    value = loss(ids)
    value.backward()
    return value.item(), workers.full(model.lm_head.weight.grad)


def test_a_compiled_function_may_hold_more_than_the_model(world):
    outcome = world(2)(_own_loss)
    plain = models.build("llama", **ONE)
    for rank, (value, _) in enumerate(outcome):
        expected = plain(input_ids=models.token_ids(2, 8, seed=rank)).logits.pow(2).mean()
        (expected / 2).backward()
        assert value == pytest.approx(expected.item(), rel=1e-5)
    assert workers.error(outcome[0][1], plain.lm_head.weight.grad) < 1e-5


def _unprepared():
    model = models.build("llama", **ONE)
    torch.compile(model, backend="ndcompile", options={"mesh": workers.mesh(FSDP2)})(models.token_ids(2, 8))


def _other_options():
    model = _prepared()
    options = {"mesh": workers.mesh(FSDP2), "lowering": "inductor"}
    torch.compile(model, backend="ndcompile", options=options)(models.token_ids(2, 8))


def _eager_call():
    _prepared()(models.token_ids(2, 8))


def _foreign_parameter():
    model, scale = _prepared(), torch.nn.Parameter(torch.ones(()))
    function = torch.compile(lambda ids: model(ids).logits * scale, backend="ndcompile", fullgraph=True)
    function(models.token_ids(2, 8))


def _two_models():
    one, two = _prepared(), _prepared()
    function = torch.compile(lambda ids: one(ids).logits + two(ids).logits, backend="ndcompile", fullgraph=True)
    function(models.token_ids(2, 8))


def _dtype_changes():
    model = _prepared()
    function = torch.compile(model, backend="ndcompile")
    function(models.token_ids(2, 8))
    model.lm_head.weight.requires_grad_(False)
    function(models.token_ids(2, 8))


def _other_backend():
    torch.compile(_prepared(), backend="aot_eager")(models.token_ids(2, 8))


def _statistics():
    values = json.loads((Path(__file__).parents[1] / "zoo" / "configs.json").read_text())["gemma3n_text"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).eval()
    ndcompile.prepare(model, workers.mesh(TP2), lowering="eager")
    torch.compile(model, backend="ndcompile")(models.token_ids(2, 8))


def _generate():
    _prepared().generate(models.token_ids(2, 8))


MISTAKES = {
    _statistics: "takes statistics over values that tp shards",
    _generate: "a prepared model does not have. Use ndcompile.compile",
    _unprepared: "call ndcompile.prepare(model, mesh, checkpoint=...) first",
    _other_options: "options['lowering'] of torch.compile is 'inductor', but the model was prepared with 'eager'",
    _eager_call: 'torch.compile(model, backend="ndcompile")',
    _foreign_parameter: "a trainable parameter besides those of the prepared model",
    _two_models: "calls 2 prepared models",
    _dtype_changes: "torch.compiler.reset()",
    _other_backend: "Use that backend",
}


@pytest.mark.parametrize("mistake", sampled(MISTAKES, *range(1, 9)), ids=lambda f: f.__name__[1:])
def test_mistakes_are_explained(world, mistake):
    for _, message in world(2).errors(mistake):
        assert MISTAKES[mistake] in message
