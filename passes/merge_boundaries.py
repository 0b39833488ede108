"""Merge equal boundaries of one value, and drop those that no gradient passes.

Before (q, k and v projections each enter shards from the same hidden states):

    a = redistribute(x, "tp", 2, "I", "R");  q = linear(a, wq)
    b = redistribute(x, "tp", 2, "I", "R");  k = linear(b, wk)

After (one node, so backward has one all-reduce, of the sum):

    a = redistribute(x, "tp", 2, "I", "R");  q = linear(a, wq);  k = linear(a, wk)
"""

from __future__ import annotations

import torch
from torch import fx

from ndcompile.graphs.pass_context import PassContext
from ndcompile.operators.redistribute import redistribute


def merge_boundaries(graph: fx.Graph, context: PassContext) -> None:
    """Only I -> R, whose forward is the identity, is touched."""
    first: dict[object, fx.Node] = {}
    region = 0  # a value that leaves a no_grad region is another value to autograd
    for node in list(graph.nodes):
        if node.target is torch._C._set_grad_enabled:
            region += 1
        if node.target is not redistribute or node.args[3:5] != ("I", "R"):
            continue
        source = node.args[0]
        if not source.meta["differentiable"]:
            kept = source
        else:
            kept = first.setdefault((region, node.args), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
