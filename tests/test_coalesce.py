"""Collectives on large weights of a layer, a few at a time."""

import torch
from collective_graphs import RANKS, Graph, backward, forward, replicated_backward
from torch import fx

from ndcompile.graphs.collective_chains import GATHER, TOGETHER, collectives
from ndcompile.passes.coalesce_collectives import coalesce_collectives
from ndcompile.passes.overlap_communication import overlap_communication

GATHERS = TOGETHER[GATHER]
SCATTERS = TOGETHER[collectives.reduce_scatter_tensor.default]


def together(g: Graph) -> list[list[str]]:
    """Names of what each collective of several tensors is given."""
    coalesce_collectives(g.graph)
    g.graph.lint()
    starts = [node for node in g.graph.nodes if node.target in (GATHERS, SCATTERS)]
    return [[given.name for given in start.args[0]] for start in starts]


def in_layers(g: Graph, layers: list[int]) -> Graph:
    starts = [node for node in g.graph.nodes if node.target in TOGETHER]
    for start, layer in zip(starts, layers, strict=True):
        start.meta["custom"] = {**start.meta.get("custom", {}), "layer": layer}
    return g


def test_weights_are_gathered_together_up_to_the_limit():
    g = forward({"a": 100, "b": 100, "c": 100, "d": 150, "head": 1024, "e": 10})
    assert together(g) == [["shard_a", "shard_b"], ["shard_c", "shard_d"]]


def test_gradients_are_reduced_together_when_the_last_of_them_is_there():
    g = backward({"a": 100, "b": 100, "c": 100})
    assert together(g) == [["grad_a", "grad_b"]]
    order = [name for name in g.names() if not name.startswith("getitem")]
    assert order == [
        *("grad_a", "grad_b", "reduce_scatter_tensor_coalesced_default", "wait_a", "wait_b"),
        *("grad_c", "scatter_c", "wait_c"),
    ]


def test_only_neighbours_of_one_layer_are_together():
    assert together(in_layers(forward(dict.fromkeys("abcd", 10)), [0, 0, 1, 1])) == [
        ["shard_a", "shard_b"],
        ["shard_c", "shard_d"],
    ]
    assert together(in_layers(backward(dict.fromkeys("abc", 10)), [1, 0, 0])) == [["grad_b", "grad_c"]]


def test_groups_and_dtypes_are_not_mixed():
    g = Graph()
    weights = [
        *(g.weight("a", 40), g.weight("b", 40)),
        *(g.weight("c", 40, group="efsdp"), g.weight("d", 40, dtype=torch.float16)),
    ]
    g.graph.output(tuple(weights))
    assert together(g) == [["shard_a", "shard_b"]]


def test_gathers_of_activations_stay():
    g = Graph()
    rows = [g.call(f"twice_{name}", torch.ops.aten.mul.Tensor, g.input(name, 2), 2) for name in "ab"]
    starts = [g.call(f"gather_{n}", collectives.all_gather_into_tensor.default, n, RANKS, "tp") for n in rows]
    g.graph.output(tuple(g.call(f"wait_{n}", collectives.wait_tensor.default, n) for n in starts))
    assert together(g) == []


def test_all_reduces_of_replicas_follow_gradients_that_are_reduced_together():
    g = replicated_backward(100)
    assert together(g) == [["grad_a", "grad_b"]]
    overlap_communication(g.graph)
    order = [name for name in g.names() if not name.startswith("getitem")]
    assert order == [
        *("grad_a", "grad_b", "reduce_scatter_tensor_coalesced_default"),
        *("wait_a", "reduce_a", "wait_b", "reduce_b", "done_a", "done_b"),
    ]


def test_reductions_of_replicas_wait_for_results_that_are_there():
    g, results = Graph(), []
    for name in "abcdef":
        start = g.call(f"reduce_{name}", collectives.all_reduce.default, g.gradient(name, 117), "avg", "dp_replicate")
        results.append(g.call(f"done_{name}", collectives.wait_tensor.default, start))
    g.graph.output(tuple(results))
    names = set(g.names())
    coalesce_collectives(g.graph)
    overlap_communication(g.graph)
    assert {name for name in names if not name.startswith("scatter")} <= set(g.names())  # which checks the order


def test_a_shard_that_is_read_in_front_of_its_gather_stays_there():
    g = Graph()
    shards = [g.call(f"cast_{name}", torch.ops.aten.neg.default, g.input(name, 20)) for name in "ab"]
    read = g.call("read", torch.ops.aten.sum.default, shards[1])
    gathered = [g.gathered(name, shard) for name, shard in zip("ab", shards, strict=True)]
    g.graph.output((*gathered, read))
    assert together(g) == [["cast_a", "cast_b"]]


def test_a_shard_that_is_made_behind_the_first_gather_moves_in_front_of_it():
    g = Graph()
    gathered = []
    for name in "ab":
        gathered.append(g.gathered(name, g.call(f"cast_{name}", torch.ops.aten.neg.default, g.input(name, 20))))
    g.graph.output(tuple(gathered))
    assert together(g) == [["cast_a", "cast_b"]]


def test_parts_of_one_shard_are_gathered_together():
    g = Graph()
    cast = g.call("cast", torch.ops.aten.neg.default, g.input("shard", 20))
    parts = [g.call("part_a", torch.ops.aten.relu.default, cast), g.call("part_b", torch.ops.aten.clone.default, cast)]
    g.graph.output(tuple(g.gathered(part.name, part) for part in parts))
    assert together(g) == [["part_a", "part_b"]]


def test_what_is_together_already_stays_as_it_is():
    g = forward(dict.fromkeys("abcde", 100))
    once = together(g)
    assert together(g) == once


def test_what_is_gathered_together_starts_ahead_and_is_waited_for_at_its_first_use():
    g = in_layers(forward({"a": 100, "b": 100, "c": 100, "d": 100}), [0, 0, 1, 1])
    coalesce_collectives(g.graph)
    overlap_communication(g.graph)
    names = [name for name in g.names() if not name.startswith(("getitem", "part"))]
    first, second = (node.name for node in g.graph.find_nodes(op="call_function", target=GATHERS))
    assert names == [first, second, "wait_a", "wait_b", "use_a", "use_b", "wait_c", "wait_d", "use_c", "use_d"]


def test_results_keep_their_shapes():
    g = forward({"a": 100, "b": 60})
    shapes = {node.name: node.meta["val"].shape for node in g.graph.nodes if node.name.startswith("wait")}
    coalesce_collectives(g.graph)
    for node in g.graph.nodes:
        if node.name in shapes:
            assert _value(node.all_input_nodes[0]).shape == shapes[node.name]


def _value(node: fx.Node) -> torch.Tensor:
    return node.meta["val"]
