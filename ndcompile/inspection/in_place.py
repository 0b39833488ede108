"""Sums in place, as inductor runs them, in a graph that AOTAutograd made functional."""

from __future__ import annotations

from torch import fx

from ndcompile.operators.chunked_loss import ADD_PRODUCT
from ndcompile.private.tracing import auto_functionalized


def sum_in_place(graph: fx.Graph) -> None:
    """Give the operator of a loss in chunks, which adds to its first argument, back its own form.

    Before: auto_functionalized_v2(add_product, left=l, right=r, _all_bases=[total]) and what takes number 1 of it.
    After: add_product(total, l, r), whose memory is that of `total`. Only shapes and sizes are asked of it.
    """
    for call in graph.find_nodes(op="call_function", target=auto_functionalized):
        if call.args[0] is not ADD_PRODUCT:
            continue
        for result in list(call.users):
            if result.users:
                result.target = ADD_PRODUCT
                result.args = (*call.kwargs["_all_bases"], call.kwargs["left"], call.kwargs["right"])
            else:
                graph.erase_node(result)
        graph.erase_node(call)
