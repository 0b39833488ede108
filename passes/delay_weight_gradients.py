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

from torch import fx

from ndcompile.graphs.collective_chains import Chain, gradient_reductions
from ndcompile.graphs.exchanges import ancestors, is_product, writes

SHARE = 3
"""Bytes that are reduced while as many bytes of a weight's gradient are multiplied."""


def delay_weight_gradients(graph: fx.Graph) -> None:
    """Put the nodes of the graph in the new order; a graph that reduces no gradient stays as it is."""
    if not (reductions := gradient_reductions(graph)):
        return
    last = _last_of_the_largest(reductions)
    for node in _delayed(graph, last):
        last.start.append(node)


def _last_of_the_largest(reductions: list[Chain]) -> Chain:
    return max(reversed(reductions), key=lambda chain: chain.size)


def _delayed(graph: fx.Graph, last: Chain) -> list[fx.Node]:
    """The nodes to place behind the start of a reduction, from the last to the first: from the first product that is
    put off on, all that the reduction does not need. So what depends on one of them is among them."""
    nodes = list(graph.nodes)
    at = nodes.index(last.start)
    needed = ancestors([last.start], nodes[:at])
    lacking = last.size // SHARE - sum(map(_product_bytes, nodes[at:]))
    found: list[fx.Node] = []
    delayed = 0
    for node in reversed(nodes[:at]):
        if lacking <= 0 or node.op != "call_function" or writes(node):
            break
        if node in needed:
            continue
        found.append(node)
        if size := _product_bytes(node):
            lacking -= size
            delayed = len(found)
    return found[:delayed]


def _product_bytes(node: fx.Node) -> int:
    """Bytes of a matrix product whose sizes are those of a weight; 0 for any other node."""
    if not is_product(node):
        return 0
    value = node.meta["val"]
    size = value.numel() * value.element_size()
    return size if isinstance(size, int) else 0
