"""enable_sequence_parallel: norms and residuals on shards of the sequence, and still the single-process model."""

from collections import Counter

import models
import pytest
import torch
import workers
from matrix import sampled
from parity_case import Case, assert_parity, batch
from workers import FSDP2_TP2, TP2

import ndcompile
from ndcompile.model_calls import compiled_model
from ndcompile.operators.redistribute import pair, redistribute
from ndcompile.verify.type_inference import moves_over

ONE = {"num_hidden_layers": 1}
SEQUENCE_PARALLEL = {"distributed_config": {"enable_sequence_parallel": True}}


def _case(model, layout=TP2, **changes):
    given = {"padding": True, "overrides": ONE}
    options = SEQUENCE_PARALLEL | changes.pop("options", {})
    return Case(model, layout, **(given | changes), options=options)


@pytest.mark.parametrize(
    "case",
    sampled(
        [
            _case("llama", FSDP2_TP2, step=True, overrides={"num_hidden_layers": 2}),
            _case("qwen3", shape=(2, 13)),  # uneven: the shards are padded
            _case("gemma2", FSDP2_TP2, ragged=True),
            _case("gpt_neox", options={"backend": "aot_eager"}),  # parallel residual: two biases with one gradient
            _case("phi3", (("tp", 4),), shape=(2, 5)),  # the last rank has no token
            _case("glm4", options={"loss_only": True}),
            _case("qwen2", options={"dynamic": True}, shape=(2, 13)),
            _case("mixtral", options={"loss_only": True}),
            _case("deepseek_v2"),
            _case("llama", options={"backend": "inductor", "loss_only": True}, shape=(2, 13)),
        ],
        1,
        2,
        3,
        4,
        5,
    ),
    ids=lambda case: f"{case.model}-{case.shape[1]}",
)
def test_parity(world, checkpoint, case):
    assert_parity(world(workers.size(case.layout)), case, checkpoint(case.model, **case.overrides))


def _boundaries(checkpoint, layers, options):
    """The tp boundaries of the captured graph, and the shapes of the norms' results."""
    model = workers.compiled("llama", TP2, checkpoint, {"num_hidden_layers": layers}, **options)
    model(**batch(_case("llama"), 0))
    compiled = compiled_model(model)
    (signature,) = compiled.signatures.values()
    graph = signature.programs[0].captured.module.graph
    pairs = Counter(pair(node) for node in graph.nodes if moves_over(node, compiled.mesh.axes["tp"].group))
    norms = [node for node in graph.nodes if node.target is torch.ops.aten.rsqrt.default]
    return pairs, {tuple(node.meta["val"].shape) for node in norms}


@pytest.mark.parametrize("layers", sampled([1, 2], 1))
def test_no_activation_is_all_reduced(world, checkpoint, layers):
    """Per layer two reduce-scatters and two all-gathers, and one of each at the ends of the model; I -> R is left for
    the weights of two norms a layer and the last one."""
    folder = checkpoint("llama", num_hidden_layers=layers)
    for pairs, shapes in world(2)(_boundaries, folder, layers, SEQUENCE_PARALLEL):
        assert pairs == {
            ("P", "S(1)"): 2 * layers + 1,
            ("S(1)", "R"): 2 * layers + 1,
            ("I", "R"): 2 * layers + 1,
            ("S(-1)", "I"): 1,  # logits
        }
        assert shapes == {(2, 6, 1)}


def test_the_pass_can_be_disabled(world, checkpoint):
    options = SEQUENCE_PARALLEL | {"disable_passes": ["shard_sequence"]}
    for pairs, shapes in world(2)(_boundaries, checkpoint("llama", **ONE), 1, options):
        assert ("P", "S(1)") not in pairs
        assert shapes == {(2, 12, 1)}


def _lengths(checkpoint, lengths):
    """Losses of one model at these lengths, and how many graphs it took."""
    model = workers.compiled("llama", TP2, checkpoint, ONE, **SEQUENCE_PARALLEL)
    losses = [model(**batch(_case("llama", shape=(2, length)), 0)).loss.item() for length in lengths]
    (signature,) = compiled_model(model).signatures.values()
    return losses, len(signature.programs)


def test_other_lengths_are_one_more_graph(world, checkpoint):
    """It has symbolic sizes, in which `x[:]` is a node."""
    lengths = (12, 16, 13)
    reference = models.build("llama", **ONE)
    expected = [reference(**batch(_case("llama", shape=(2, length)), 0)).loss.item() for length in lengths]
    for losses, graphs in world(2)(_lengths, checkpoint("llama", **ONE), lengths):
        assert losses == pytest.approx(expected, rel=workers.LIMIT)
        assert graphs == 2


def _hidden_states(checkpoint):
    model = workers.compiled("llama", TP2, checkpoint, {}, **SEQUENCE_PARALLEL)
    model.gradient_checkpointing_enable()
    output = model(**batch(_case("llama", shape=(2, 13)), 0), output_hidden_states=True)
    output.loss.backward()
    return [h.detach() for h in output.hidden_states], workers.full(model.model.norm.weight.grad)


def test_hidden_states_are_whole_and_layers_may_be_checkpointed(world, checkpoint):
    reference = models.build("llama")
    expected = reference(**batch(_case("llama", shape=(2, 13)), 0), use_cache=False, output_hidden_states=True)
    expected.loss.backward()
    for states, gradient in world(2)(_hidden_states, checkpoint("llama")):
        assert len(states) == len(expected.hidden_states)
        for state, other in zip(states, expected.hidden_states, strict=True):
            assert workers.error(state, other.detach()) < workers.LIMIT
        assert workers.error(gradient, reference.model.norm.weight.grad) < workers.LIMIT


def _without_tp(checkpoint):
    model = workers.compiled("llama", (("fsdp", 2),), checkpoint, ONE, **SEQUENCE_PARALLEL)
    model(**batch(_case("llama"), ndcompile.data_rank(model)))
    (signature,) = compiled_model(model).signatures.values()
    return [n.target for n in signature.programs[0].captured.module.graph.nodes].count(redistribute)


def test_without_tp_nothing_changes(world, checkpoint):
    assert world(2)(_without_tp, checkpoint("llama", **ONE)) == [0, 0]
