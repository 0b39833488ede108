"""Start the last large reduction of a gradient in front of gradients of weights that it does not need.

Runs on the lowered backward graph, in front of `overlap_communication`.

Before:  dw = mm(y.t(), g);  r = reduce_scatter(dw);  dx = mm(g, w.t());  de = embedding_backward(dx)
         s = reduce_scatter(de);  return wait(r), wait(s)
After:   dx = mm(g, w.t());  de = embedding_backward(dx);  s = reduce_scatter(de)
         dw = mm(y.t(), g);  r = reduce_scatter(dw);  return wait(r), wait(s)

The gradient of the embedding is the last that can be computed, and with a large vocabulary the largest: nothing is left
to run beside its reduction. Gradients of weights of the first layers wait for nothing but what was computed before, and
nothing waits for them but their reductions. They are put off, the last ones first, until as many bytes of them as a
third of that reduction's follow it: a product of 8,192 tokens takes about three times as long as its collective over
NVLink. What they read is held for as much longer, at the end of backward, where little else is.
"""

from __future__ import annotations

import torch
from torch import fx

from ndcompile.graphs.collective_chains import Chain, gradient_reductions
from ndcompile.graphs.exchanges import ancestors, is_product, writes

aten = torch.ops.aten

SHARE = 3
"""A reduction takes as long as the products of a third as many bytes of gradients."""

LAYOUT = {
    *(aten.view.default, aten.reshape.default, aten.permute.default, aten.t.default, aten.transpose.int),
    *(aten.cat.default, aten.clone.default, aten.alias.default, aten._to_copy.default),
    torch.ops.prims.convert_element_type.default,
}
"""What may stand between a product and the reduction of the gradient that it is."""


def delay_weight_gradients(graph: fx.Graph) -> None:
    """Put the nodes of the graph in the new order; a graph that reduces no gradient stays as it is."""
    if not (reductions := gradient_reductions(graph)):
        return
    last = _last_of_the_largest(reductions)
    for node in _delayed(graph, last, _weight_gradients(graph, reductions)):
        last.start.append(node)


def _last_of_the_largest(reductions: list[Chain]) -> Chain:
    return max(reversed(reductions), key=lambda chain: chain.size)


def _weight_gradients(graph: fx.Graph, reductions: list[Chain]) -> dict[fx.Node, int]:
    """Products that are gradients of weights -> their bytes: those that are reduced, and grouped ones of three dims.

    No other product counts, as the sizes of most depend on how many tokens a rank has, and ranks must agree.
    """
    waiting = [given for chain in reductions for given in chain.start.all_input_nodes]
    found = set(graph.find_nodes(op="call_function", target=aten._grouped_mm.default))
    while waiting:
        node = waiting.pop()
        if node.target in LAYOUT:
            waiting += node.all_input_nodes
        elif is_product(node):
            found.add(node)
    return {node: _bytes(node) for node in found if node.target is not aten._grouped_mm.default or _ndim(node) == 3}


def _ndim(node: fx.Node) -> int:
    return node.meta["val"].ndim


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.element_size()


def _delayed(graph: fx.Graph, last: Chain, products: dict[fx.Node, int]) -> list[fx.Node]:
    """The nodes to place behind the start of a reduction, from the last to the first: from the first product that is
    put off on, all that the reduction does not need. So what depends on one of them is among them."""
    nodes = list(graph.nodes)
    at = nodes.index(last.start)
    needed = ancestors([last.start], nodes[:at])
    lacking = last.size // SHARE - sum(products.get(node, 0) for node in nodes[at:])
    found: list[fx.Node] = []
    delayed = 0
    for node in reversed(nodes[:at]):
        if lacking <= 0 or node.op != "call_function" or writes(node):
            break
        if node in needed:
            continue
        found.append(node)
        if node in products:
            lacking -= products[node]
            delayed = len(found)
    return found[:delayed]
