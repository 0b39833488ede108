"""Types over tp on small graphs: which gradients are partial, and where complete_boundaries sums them."""

from types import SimpleNamespace

import pytest
import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from ndcompile.capture.graph_input import PARAMETER, GraphInput
from ndcompile.capture.trace_graph import mark_differentiable
from ndcompile.errors import VerifyError
from ndcompile.operators.redistribute import redistribute
from ndcompile.passes.complete_boundaries import complete_boundaries
from ndcompile.verify.type_inference import varying_over_tp
from ndcompile.verify.verifier import check_gradients

AXIS = SimpleNamespace(group="tp", size=2)


def into(x):
    return redistribute(x, "tp", 2, "I", "R")


def _graph(function, invariant=1, sharded=1):
    """`function` of `invariant` replicated and `sharded` sharded parameters, as capture gives it, and its context."""
    examples = [torch.ones(4, 4, requires_grad=True) for _ in range(invariant + sharded)]
    graph = make_fx(function, tracing_mode="symbolic", pre_dispatch=True)(*examples).graph
    plan = {}
    for number, (node, example) in enumerate(zip(graph.find_nodes(op="placeholder"), examples, strict=True)):
        node.meta["input"], node.meta["val"] = GraphInput(PARAMETER, node.name), example
        plan[node.name] = SimpleNamespace(tp=Replicate() if number < invariant else Shard(0))
    mark_differentiable(graph)
    context = SimpleNamespace(plan=SimpleNamespace(by_name=plan), axis=lambda name: AXIS)
    return graph, context


def _sums(graph: fx.Graph) -> list[tuple[str, str]]:
    """Every I -> R node as (source, operator that uses it)."""
    moves = [node for node in graph.nodes if node.target is redistribute]
    return [(node.args[0].name, user.target._opname) for node in moves for user in node.users]


def _completed(function, invariant=1, sharded=1):
    graph, context = _graph(function, invariant, sharded)
    complete_boundaries(graph, context)
    check_gradients(graph, varying_over_tp(graph, context.plan, "tp"), "tp")
    return _sums(graph)


def test_an_invariant_value_gets_its_sum_where_it_meets_a_shard():
    assert _completed(lambda i, s: (i * 2) * s) == [("mul", "mul")]


def test_what_comes_from_a_sum_is_not_summed_again():
    assert _completed(lambda i, s: into(i).sin() * s) == [("i_1", "sin")]


def test_an_invariant_value_beside_a_summed_one_moves_the_sum_to_the_shard():
    """A sum upstream of the concatenation would leave the other part's gradient partial, or sum it twice."""
    assert _completed(lambda a, b, s: torch.cat([into(a), b]) * s.repeat(2, 1), invariant=2) == [("cat", "mul")]


def test_the_sum_comes_before_a_value_is_expanded():
    assert _completed(lambda i, s: i.unsqueeze(0).expand(8, 4, 4) * s) == [("i_1", "unsqueeze")]


def test_a_value_that_stays_invariant_is_not_summed():
    assert _completed(lambda i, s: (i.sin(), i.cos() * i)) == []


def test_a_buffer_of_which_a_part_was_written_with_shards_holds_shards():
    def keys(i, s):
        buffer = s.new_empty(4, 8)
        buffer[:, :4].copy_(s)
        buffer[:, 4:].copy_(i)
        return buffer.sin()

    assert _completed(keys) == [("i_1", "copy_")]


def test_sizes_and_fresh_tensors_are_not_differentiable():
    assert _completed(lambda i, s: s.view(i.shape[0], -1) + torch.zeros_like(i)) == []


def test_a_shard_that_is_taken_for_an_invariant_value_is_refused():
    graph, context = _graph(lambda i, s: into(s) * s)
    with pytest.raises(VerifyError, match="was given a shard or partial sum, 's_1'"):
        check_gradients(graph, varying_over_tp(graph, context.plan, "tp"), "tp")


def test_a_partial_gradient_is_refused():
    graph, context = _graph(lambda i, s: i * s)
    with pytest.raises(VerifyError, match="'i_1' is the same on all tp ranks but is used on shards by 'mul'"):
        check_gradients(graph, varying_over_tp(graph, context.plan, "tp"), "tp")
