"""Give a missing gradient reduction to invariant values that are used together with shards.

Before (a replicated parameter of an activation between a colwise and a rowwise projection, which no plan rule names):

    up = linear(x, w_up)            varies over tp
    act = mul(up, alpha)            alpha is invariant: every rank has only its own shard's part of alpha's gradient

After:

    alpha_r = redistribute(alpha, "tp", 2, "I", "R")       backward: all-reduce
    act = mul(up, alpha_r)

A value that is invariant needs this node wherever it meets a varying one, so inserting it is exact.
"""

from __future__ import annotations

import logging

import torch
from torch import fx

from ndcompile.pass_context import PassContext
from ndcompile.redistribute import redistribute
from ndcompile.types import varying_over_tp

_logger = logging.getLogger("ndcompile.passes")


def complete_boundaries(graph: fx.Graph, context: PassContext) -> None:
    """Insert I -> R before every node that mixes varying and differentiable invariant inputs."""
    axis = context.axis("tp")
    if axis is None:
        return
    varying = varying_over_tp(graph, context.plan)
    for node in list(graph.nodes):
        for source in unreduced_inputs(node, varying):
            with graph.inserting_before(node):
                moved = graph.call_function(redistribute, (source, axis.group, axis.size, "I", "R"))
            moved.meta.update(source.meta, custom=dict(node.meta.get("custom", {})))
            node.replace_input_with(source, moved)
            _logger.info("%s enters shards at %s without a rule of the tp_plan: its gradient is summed", source, node)


def unreduced_inputs(node: fx.Node, varying: set[fx.Node]) -> list[fx.Node]:
    """Differentiable invariant inputs of a node that varies: their gradient would stay partial."""
    if node not in varying or node.target is redistribute or not node.meta["differentiable"]:
        return []
    return [
        source
        for source in node.all_input_nodes
        if source not in varying
        and source.meta["differentiable"]
        and not (source.target is redistribute and source.args[4] == "R")
        and source.target is not torch.ops.aten.sym_size.int
    ]
