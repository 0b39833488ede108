"""Gradients of weights that run beside the last large reduction."""

import torch
from collective_graphs import Graph

from ndcompile.passes.delay_weight_gradients import delay_weight_gradients

aten = torch.ops.aten
WRITE = aten.copy_.default


def backward(mib: float, layers: str = "ab", write: bool = False) -> Graph:
    """From the last layer to the first: gradients of a weight of 2 MiB and of its input; then that of the embedding."""
    g = Graph()
    g.layers, results = layers, []
    gradient = g.input("gradient", 2)
    for name in reversed(layers):
        saved = g.input(f"saved_{name}", 2)
        product = g.call(f"weight_{name}", aten.mm.default, saved, gradient)
        if write and name == layers[0]:
            g.call("write", WRITE, g.input("buffer", 2), product)
        results.append(g.reduced(name, product))
        gradient = g.call(f"input_{name}", aten.mm.default, gradient, g.input(f"used_{name}", 2))
    rows = int(mib * 2**20 / 2 / 1024)
    whole = g.call("whole", aten.repeat.default, gradient, [rows // 1024, 1])
    results.append(g.reduced("embedding", whole))
    g.graph.output(tuple(results))
    return g


def delayed(g: Graph) -> list[str]:
    """What stands behind the start of the embedding's reduction."""
    delay_weight_gradients(g.graph)
    names = g.names()
    return [name for name in names[names.index("scatter_embedding") + 1 :] if name != "wait_embedding"]


def test_the_nearest_gradients_of_weights_run_beside_the_last_reduction():
    assert delayed(backward(6)) == ["weight_a", "scatter_a", "wait_a"]


def test_as_many_are_put_off_as_a_larger_reduction_takes():
    assert delayed(backward(12)) == ["weight_b", "scatter_b", "wait_b", "weight_a", "scatter_a", "wait_a"]


def test_all_are_put_off_where_they_are_not_enough():
    assert delayed(backward(64)) == ["weight_b", "scatter_b", "wait_b", "weight_a", "scatter_a", "wait_a"]


def test_gradients_that_stand_behind_it_already_are_counted():
    g = backward(6)
    delay_weight_gradients(g.graph)
    assert delayed(g) == ["weight_a", "scatter_a", "wait_a"]


def with_tokens(mib: float) -> Graph:
    """A product of so many tokens, which no weight's gradient is, behind the embedding's reduction, and one before."""
    g = backward(12)
    output = g.graph.output_node()
    with g.graph.inserting_before(output):
        behind = g.use("behind", g.input("tokens", mib), g.input("weight", 2))
    start = next(node for node in g.graph.nodes if node.name == "scatter_embedding")
    with g.graph.inserting_before(start):
        before = g.use("before", g.input("more_tokens", mib), g.input("other_weight", 2))
    output.args = ((*output.args[0], behind, before),)
    return g


def test_the_order_does_not_depend_on_the_number_of_tokens():
    assert delayed(with_tokens(2)) == delayed(with_tokens(64))


def test_a_gradient_that_is_no_product_does_not_count():
    """It takes as long as memory does: beside it alone the reduction would stay exposed."""
    g = backward(6)
    output = g.graph.output_node()
    with g.graph.inserting_before(next(node for node in g.graph.nodes if node.name == "whole")):
        norm = g.gradient("norm", 2)
    output.args = ((*output.args[0], norm),)
    assert [name for name in delayed(g) if name.startswith(("weight", "grad"))] == ["weight_a", "grad_norm"]


def test_gradients_of_experts_that_nobody_reduces_count():
    g = Graph()
    rows, gradient = (g.call(f"turned_{n}", aten.view.default, g.input(n, 2), [1024, 1024]) for n in ("x", "dy"))
    ends = g.input("ends", 2 / 2**20 * 4, dtype=torch.int32)
    with g.mode:
        ends.meta["val"] = torch.empty(4, dtype=torch.int32)
    turned = g.call("transposed", aten.permute.default, rows, [1, 0])
    product = g.call("experts", aten._grouped_mm.default, turned, gradient, ends)
    last = g.reduced("embedding", g.call("whole", aten.repeat.default, g.input("dx", 2), [6, 1]))
    g.graph.output((product, last))
    assert "experts" in delayed(g)


def test_nothing_moves_over_a_node_that_writes():
    assert delayed(backward(12, write=True)) == []


def test_a_graph_that_reduces_nothing_stays_as_it_is():
    g = Graph()
    x = g.input("x", 2)
    g.graph.output((g.use("used", x, x),))
    delay_weight_gradients(g.graph)
    assert g.names() == ["used"]
