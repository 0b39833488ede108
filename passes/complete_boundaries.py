"""Give a missing gradient reduction to invariant values that are used together with shards.

Before (a replicated parameter of an activation between a colwise and a rowwise projection, which no plan rule names):

    up = linear(x, w_up)            varies over tp
    act = mul(up, alpha)            alpha is invariant: every rank has only its own shard's part of alpha's gradient

After:

    alpha_r = redistribute(alpha, "tp", 2, "I", "R")       backward: all-reduce
    act = mul(up, alpha_r)

A value that is invariant needs this node wherever it meets a varying one, so inserting it is exact. An I -> R node of
the plan whose value does not stay with shards (it is concatenated with an invariant value, say) is withdrawn, and
inserted where the shards are met.
"""

from __future__ import annotations

import logging

import torch
from torch import fx

from ndcompile.graphs.pass_context import PassContext
from ndcompile.operators.redistribute import redistribute
from ndcompile.verify.type_inference import moves_over, replicated_over_tp, varying_over_tp

_logger = logging.getLogger("ndcompile.passes")

aten = torch.ops.aten

LAYOUT_OPS = {
    aten.contiguous.default,
    aten.expand.default,
    aten.reshape.default,
    aten.to.dtype,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
}
"""Before these a value is no larger than after them, or only laid out otherwise: the cheaper place for a sum."""


def complete_boundaries(graph: fx.Graph, context: PassContext) -> None:
    """Insert I -> R before every node that mixes varying and differentiable invariant inputs."""
    axis = context.axis("tp")
    if axis is None:
        return
    varying = varying_over_tp(graph, context.plan, axis.group)
    withdraw_mixed(graph, varying, axis.group)
    replicated, _ = replicated_over_tp(graph, varying, axis.group)
    for node in list(graph.nodes):
        for source in unreduced_inputs(node, varying, replicated, axis.group):
            source, user = _before_layout(source, node)
            with graph.inserting_before(user):
                moved = graph.call_function(redistribute, (source, axis.group, axis.size, "I", "R"))
            moved.meta.update(source.meta, custom=dict(user.meta.get("custom", {})))
            user.replace_input_with(source, moved)
            replicated.add(moved)
            _logger.info("%s enters shards at %s without a rule of the tp_plan: its gradient is summed", source, node)


def unreduced_inputs(node: fx.Node, varying: set[fx.Node], replicated: set[fx.Node], tp: str) -> list[fx.Node]:
    """Differentiable inputs, invariant over the group `tp`, of a node whose gradient is partial."""
    moves = moves_over(node, tp)
    enters = moves and node.args[3] == "I"
    partial = node.args[3] != "I" if moves else node in varying
    if enters or not partial or not node.meta["differentiable"]:
        return []
    return [
        source
        for source in node.all_input_nodes
        if source.meta["differentiable"] and source not in varying and source not in replicated
    ]


def withdraw_mixed(graph: fx.Graph, varying: set[fx.Node], tp: str) -> None:
    """Erase the I -> R nodes whose values meet invariant ones, until none does."""
    while True:
        replicated, mixed = replicated_over_tp(graph, varying, tp)
        origins = {origin for node in mixed for origin in _origins(node, replicated, tp)}
        if not origins:
            return
        for origin in origins:
            origin.replace_all_uses_with(origin.all_input_nodes[0])
            graph.erase_node(origin)


def _origins(node: fx.Node, replicated: set[fx.Node], tp: str) -> set[fx.Node]:
    """The I -> R nodes that made the R inputs of a node."""
    origins, stack = set(), [source for source in node.all_input_nodes if source in replicated]
    while stack:
        found = stack.pop()
        if not moves_over(found, tp):
            stack += [source for source in found.all_input_nodes if source in replicated]
        elif found.args[3] == "I":
            origins.add(found)
    return origins


def _before_layout(source: fx.Node, user: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Go up from `source` over layout operators that only lead to `user`."""
    while source.target in LAYOUT_OPS and len(source.users) == 1:
        source, user = source.all_input_nodes[0], source
    return source, user
