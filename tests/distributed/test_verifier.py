"""The verifier finds what a wrong pass would do to a graph, and names node, module and remedy."""

import re

import models
import pytest
import torch
import workers
from torch import fx
from workers import FSDP2_TP2

from ndcompile.capture.call import bind
from ndcompile.capture.capture import capture
from ndcompile.errors import VerifyError
from ndcompile.model_calls import compiled_model
from ndcompile.operators.redistribute import all_to_all, divide_gradient, redistribute, unshard
from ndcompile.pipeline import run_passes
from ndcompile.verify.verifier import verify

ONE = {"num_hidden_layers": 1}


def _node(graph, target, module=""):
    return next(
        n for n in graph.nodes if n.target is target and n.meta.get("custom", {}).get("module", "").endswith(module)
    )


def _bypass(graph, node):
    """What used the node uses its input instead."""
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def _other_group(graph):
    """A collective over a group that is no axis."""
    node = _node(graph, redistribute)
    node.args = (node.args[0], "world", *node.args[2:])


def _other_size(graph):
    node = _node(graph, unshard)
    node.args = (*node.args[:2], 4, *node.args[3:])


def _no_sum(graph):
    """The all-reduce behind the last rowwise projection is lost, so that the output is partial."""
    node = next(n for n in reversed(graph.nodes) if n.target is redistribute)
    _bypass(graph, node)


def _no_gradient_sum(graph):
    """The I -> R node in front of the MLP is lost, so that its input's gradient stays partial."""
    node = next(n for n in graph.nodes if n.target is redistribute and n.args[3:5] == ("I", "R"))
    _bypass(graph, node)


def _no_unshard(graph):
    node = _node(graph, unshard, "lm_head")
    _bypass(graph, node)


DAMAGES = {
    _other_group: r"runs over 'world' of size 2; axes are",
    _other_size: r"in module 'model.embed_tokens' runs over '.*fsdp' of size 4; axes are",
    _no_sum: r"An output of the model, '.*' in module 'lm_head'.* is a shard or a partial sum over tp\. Add a tp_plan",
    _no_gradient_sum: r"is used on shards by .*: its gradient would be partial",
    _no_unshard: r"The gradient of parameter 'lm_head.weight' is averaged over \[\], but its data axes are \['.*\.fsdp",
}


def _no_division(graph):
    """An expert's gradient stays a sum over the ranks that sent it tokens."""
    node = _node(graph, divide_gradient)
    _bypass(graph, node)


def _divided_twice(graph):
    node = _node(graph, divide_gradient)
    with graph.inserting_after(node):
        again = graph.call_function(divide_gradient, (node, 2))
    again.meta.update(node.meta)
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)


def _exchange_over_tp_only(graph):
    """Half of the experts' ranks are left out of the exchange."""
    node = _node(graph, all_to_all, "experts")
    tp = next(n.args[1] for n in graph.nodes if n.target is redistribute)
    node.args = (*node.args[:3], tp)


def _tokens_stay_apart(graph):
    """The rows of the tp ranks are not joined behind the experts."""
    node = next(n for n in graph.nodes if n.target is redistribute and n.args[3:5] == ("S(0)", "I"))
    _bypass(graph, node)


EXPERT_DAMAGES = {
    _no_division: r"The gradient of parameter '.*experts\..*' is divided by \[\], but it is a sum over 2 data ranks",
    _divided_twice: r"The gradient of parameter '.*experts\..*' is divided by \[2, 2\], but it is a sum over 2 data",
    _exchange_over_tp_only: r"in module 'model.layers.0.mlp.experts'.* has 4 parts over '.*\.tp'; axes are",
    _tokens_stay_apart: r"'model.layers.0.post_attention_layernorm'.*its gradient would be partial",
}
ALL = {"llama": DAMAGES, "qwen3_moe": EXPERT_DAMAGES}
LAYOUTS = {"llama": FSDP2_TP2, "qwen3_moe": (("ep", 2), ("tp", 2))}


def _messages(name):
    """What the verifier says of each damage to one captured graph."""
    compiled = compiled_model(workers.compiled(name, LAYOUTS[name], None, ONE))
    ids = models.token_ids(2, 8)
    captured = capture(compiled.shadow, compiled.model, bind(compiled.__signature__, (ids,), {}), False)
    context = compiled.pass_context(captured)
    run_passes(captured, context)
    found = {}
    for damage in ALL[name]:
        graph = fx.Graph()
        output = graph.graph_copy(captured.module.graph, {})
        graph.output(output)
        graph.output_node().meta.update(captured.module.graph.output_node().meta)
        verify(graph, context)
        damage(graph)
        try:
            verify(graph, context)
        except VerifyError as error:
            found[damage.__name__] = str(error)
    return found


@pytest.fixture(scope="module")
def messages(ranks):
    return {name: ranks(_messages, name)[0] for name in ALL}


@pytest.mark.parametrize(
    ("name", "damage"),
    [(name, damage) for name, damages in ALL.items() for damage in damages],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_damaged_graph_is_refused(name, damage, messages):
    assert re.search(ALL[name][damage], messages[name].get(damage.__name__, "accepted"))


def _attentions():
    model = workers.compiled("llama", FSDP2_TP2, None, ONE | {"attn_implementation": "eager"})
    compiled_model(model).store.materialize()
    for buffer in model.buffers():
        torch.nn.init.zeros_(buffer)
    model(input_ids=models.token_ids(2, 8), output_attentions=True)


def test_attentions_are_per_head_and_refused_by_name_under_tp(ranks):
    for kind, message in ranks.errors(_attentions):
        assert kind == "VerifyError", message
        assert "do not ask for it (output_attentions is per head)" in message
