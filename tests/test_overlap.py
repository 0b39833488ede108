"""The passes on lowered graphs, each on a small graph: what moves, what is merged, and what stays."""

from itertools import groupby

import torch
from collective_graphs import MIB, RANKS, Graph, backward, forward, replicated_backward
from torch import fx

from ndcompile.graphs.collective_chains import GATHER, collectives
from ndcompile.operators.host_copies import BACK
from ndcompile.passes import reuse_layers
from ndcompile.passes.bucket_collectives import bucket_collectives
from ndcompile.passes.overlap_communication import overlap_communication
from ndcompile.private.inductor import invoke_subgraph


def test_the_next_gather_starts_before_the_wait_for_the_current_weight():
    g = forward({"a": 300, "b": 300})
    overlap_communication(g.graph)
    assert g.names() == ["gather_a", "gather_b", "wait_a", "part_a", "use_a", "wait_b", "part_b", "use_b"]


def test_a_copy_from_the_host_starts_one_gather_ahead_of_its_own():
    g = forward({"a": 2048, "b": 2048, "c": 2048, "d": 2048}, on_host=True)
    overlap_communication(g.graph)
    starts = [name for name in g.names() if name.startswith(("copy", "gather", "use"))]
    assert starts[:4] == ["copy_a", "gather_a", "copy_b", "gather_b"]
    assert starts[4:] == ["copy_c", "use_a", "gather_c", "copy_d", "use_b", "gather_d", "use_c", "use_d"]


def test_a_weight_that_nothing_gathers_is_copied_ahead():
    g = Graph()
    x = g.input("x", 2)
    for name in "abc":
        weight = g.copy(name, g.input(f"weight_{name}", 2048))
        x = g.use(f"use_{name}", x, g.call(f"part_{name}", torch.ops.aten.slice.Tensor, weight, 0, 0, 1024))
    g.graph.output((x,))
    overlap_communication(g.graph)
    moved = [name for name in g.names() if not name.startswith("part")]
    assert moved == ["copy_a", "copy_b", "copy_c", "copied_a", "use_a", "copied_b", "use_b", "copied_c", "use_c"]


def test_a_reduced_gradient_is_copied_to_the_host_when_it_is_waited_for():
    g = Graph()
    results = [g.call(f"back_{name}", BACK, g.gradient(name, 2048)) for name in "ab"]
    g.graph.output(tuple(results))
    overlap_communication(g.graph)
    assert g.names() == [
        *("grad_a", "scatter_a", "grad_b", "scatter_b", "wait_a", "back_a"),
        *("wait_b", "back_b"),
    ]


def test_copied_shards_are_gathered_in_one_bucket():
    g = forward({"a": 2, "b": 2}, on_host=True)
    bucket_collectives(g.graph)
    gathers = g.graph.find_nodes(op="call_function", target=collectives.all_gather_into_tensor.default)
    copies = [name for name in g.names() if name.startswith("cop")]
    assert (len(gathers), copies) == (1, ["copy_a", "copied_a", "copy_b", "copied_b"])


def test_gathers_ahead_are_bounded_in_bytes():
    g = forward({"a": 300, "b": 300, "c": 200, "d": 200})
    overlap_communication(g.graph)
    starts = [name for name in g.names() if name.startswith(("gather", "use"))]
    assert starts == ["gather_a", "gather_b", "gather_c", "use_a", "gather_d", "use_b", "use_c", "use_d"]


def test_one_gather_is_ahead_however_large():
    g = forward({"a": 2048, "b": 2048, "c": 2048})
    overlap_communication(g.graph)
    starts = [name for name in g.names() if name.startswith(("gather", "use"))]
    assert starts == ["gather_a", "gather_b", "use_a", "gather_c", "use_b", "use_c"]


def test_a_weight_larger_than_the_limit_starts_while_small_ones_are_ahead():
    g = forward({"a": 200, "b": 200, "head": 1024})
    overlap_communication(g.graph)
    starts = [name for name in g.names() if name.startswith(("gather", "use"))]
    assert starts == ["gather_a", "gather_b", "gather_head", "use_a", "use_b", "use_head"]


def test_weights_are_waited_for_in_the_order_of_their_use():
    g = Graph()
    x = g.input("x", 2)
    a, b = g.weight("a", 2), g.weight("b", 2)
    used = g.use("use_a", g.use("use_b", x, b), a)
    g.graph.output((used,))
    overlap_communication(g.graph)
    assert g.names() == ["gather_b", "gather_a", "wait_b", "use_b", "wait_a", "use_a"]


def test_gathers_of_activations_stay():
    g = Graph()
    x = g.input("x", 2)
    y = g.call("double", torch.ops.aten.mul.Tensor, x, 2)
    gathered = g.call("gather_y", collectives.all_gather_into_tensor.default, y, RANKS, "tp")
    g.graph.output((g.call("wait_y", collectives.wait_tensor.default, gathered),))
    overlap_communication(g.graph)
    assert g.names() == ["double", "gather_y", "wait_y"]


def test_a_gradient_is_waited_for_behind_what_is_computed_meanwhile():
    g = backward({"a": 300, "b": 300, "c": 300})
    overlap_communication(g.graph)
    assert g.names() == [
        "grad_a", "scatter_a", "grad_b", "scatter_b", "wait_a", "grad_c", "scatter_c", "wait_b", "wait_c",
    ]  # fmt: skip


def test_one_reduction_is_under_way_however_large():
    g = backward({"a": 2048, "b": 2048})
    overlap_communication(g.graph)
    assert g.names() == ["grad_a", "scatter_a", "grad_b", "scatter_b", "wait_a", "wait_b"]


def test_a_gradient_larger_than_the_limit_is_under_way_beside_small_ones():
    g = backward({"head": 1024, "a": 100, "b": 100, "c": 100})
    overlap_communication(g.graph)
    assert g.names() == [
        *("grad_head", "scatter_head", "grad_a", "scatter_a", "grad_b", "scatter_b", "grad_c", "scatter_c"),
        *("wait_head", "wait_a", "wait_b", "wait_c"),
    ]


def test_weights_that_are_needed_next_are_gathered_in_front_of_a_reduction():
    g = Graph()
    gradient = g.gradient("head", 1024)
    used = g.use(
        "use_a", g.input("x", 2), g.call("part_a", torch.ops.aten.slice.Tensor, g.weight("a", 100), 0, 0, 1024)
    )
    g.graph.output((gradient, used))
    overlap_communication(g.graph)
    assert g.names() == ["grad_head", "gather_a", "scatter_head", "wait_a", "part_a", "use_a", "wait_head"]


def test_the_all_reduce_of_replicas_starts_with_its_reduced_gradient_and_is_waited_for_last():
    g = replicated_backward(300)
    overlap_communication(g.graph)
    assert g.names() == [
        "grad_a", "scatter_a", "grad_b", "scatter_b", "wait_a", "reduce_a", "wait_b", "reduce_b", "done_a", "done_b",
    ]  # fmt: skip


def test_gradients_of_what_a_caller_gives_are_waited_for_at_once():
    """Their sizes differ between ranks, which must agree on what moves."""
    g = backward({"a": 300, "inputs": 300, "b": 300})
    (start,) = (node for node in g.graph.nodes if node.name == "scatter_inputs")
    start.meta["custom"] = {"module": "model"}
    overlap_communication(g.graph)
    names = g.names()
    assert names.index("wait_inputs") == names.index("scatter_inputs") + 1


def test_a_reduction_that_is_used_is_not_put_off():
    g = Graph()
    x = g.input("x", 2)
    start = g.call("reduce", collectives.all_reduce.default, x, "sum", "tp")
    whole = g.call("wait", collectives.wait_tensor.default, start)
    y = g.call("use", torch.ops.aten.add.Tensor, whole, x)
    g.graph.output((g.call("later", torch.ops.aten.mul.Tensor, y, 2),))
    overlap_communication(g.graph)
    assert g.names() == ["reduce", "wait", "use", "later"]


def _kinds(g: Graph) -> list[str]:
    g.graph.lint()
    started = (*(getattr(collectives, name).default for name in KINDS),)
    return [str(node.target.name()).partition("::")[2] for node in g.graph.nodes if node.target in started]


KINDS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


def test_small_gathers_become_one_and_large_ones_stay():
    g = forward({"a": 4, "big": 64, "b": 6})
    bucket_collectives(g.graph)
    gathers = [node for node in g.graph.nodes if node.target is collectives.all_gather_into_tensor.default]
    assert [node.meta["val"].numel() * 2 for node in gathers] == [10 * MIB, 64 * MIB]
    assert all(node.meta["val"].shape == (1024, 1024) for node in g.graph.nodes if node.name.startswith("part"))


def test_a_bucket_is_no_larger_than_its_limit():
    g = forward(dict.fromkeys("abcd", 12))
    bucket_collectives(g.graph)
    gathers = [node for node in g.graph.nodes if node.target is collectives.all_gather_into_tensor.default]
    assert [node.meta["val"].numel() * 2 for node in gathers] == [24 * MIB, 24 * MIB]


def test_a_bucket_of_weights_ends_with_its_layer():
    g = forward(dict.fromkeys("abcdef", 2), "meta")
    for number, start in enumerate(g.graph.find_nodes(op="call_function", target=GATHER)):
        start.meta["custom"]["layer"] = number // 2
    bucket_collectives(g.graph)
    gathers = g.graph.find_nodes(op="call_function", target=GATHER)
    assert [node.meta["val"].numel() * 2 for node in gathers] == [4 * MIB] * 3


def test_a_bucket_of_gradients_ends_with_its_layer():
    g = backward(dict.fromkeys("abcdef", 2), "meta")
    starts = g.graph.find_nodes(op="call_function", target=collectives.reduce_scatter_tensor.default)
    for number, start in enumerate(starts):
        start.meta["custom"]["layer"] = number // 2
    bucket_collectives(g.graph)
    assert _kinds(g) == ["reduce_scatter_tensor"] * 3


def test_layers_of_small_weights_are_compiled_once(monkeypatch):
    monkeypatch.setattr(reuse_layers, "LEAST", 4)
    g = forward({f"{kind}{layer}": 2 for layer in range(6) for kind in "ab"}, "meta")
    for number, start in enumerate(g.graph.find_nodes(op="call_function", target=GATHER)):
        start.meta["custom"]["layer"] = number // 2
    bucket_collectives(g.graph)
    overlap_communication(g.graph)
    module = fx.GraphModule(torch.nn.Module(), g.graph)
    reuse_layers.reuse_layers(module.graph)
    calls = module.graph.find_nodes(op="call_function", target=invoke_subgraph)
    assert [len(list(same)) for _, same in groupby(call.args[1] for call in calls)] == [6, 6]  # gathers ahead, products


def test_groups_and_dtypes_are_not_mixed():
    g = Graph()
    weights = [
        g.weight("a", 2),
        g.weight("b", 2, group="efsdp"),
        g.weight("c", 2, dtype=torch.float16),
        g.weight("d", 2),
    ]
    g.graph.output(tuple(weights))
    bucket_collectives(g.graph)
    gathers = [node for node in g.graph.nodes if node.target is collectives.all_gather_into_tensor.default]
    assert [(node.args[2], node.meta["val"].numel() // (MIB // 2)) for node in gathers] == [
        ("fsdp", 4),
        ("efsdp", 2),
        ("fsdp", 2),
    ]


def test_small_gradients_are_reduced_as_one():
    g = backward({"a": 4, "big": 64, "b": 6})
    shapes = [node.meta["val"].shape for node in g.graph.output_node().all_input_nodes]
    bucket_collectives(g.graph)
    assert _kinds(g) == ["reduce_scatter_tensor", "reduce_scatter_tensor"]
    assert [node.meta["val"].shape for node in g.graph.output_node().all_input_nodes] == shapes


def test_the_all_reduces_of_a_bucket_become_one_too():
    g = replicated_backward(4)
    bucket_collectives(g.graph)
    assert _kinds(g) == ["reduce_scatter_tensor", "all_reduce"]
