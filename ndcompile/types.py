"""Which values of a graph vary over tp: a small type inference that passes and the verifier share."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Replicate

from ndcompile.redistribute import redistribute
from ndcompile.sharding_plan import ShardingPlan

aten = torch.ops.aten

SHAPE_ONLY = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
}
"""Operators that read only the shape of their tensor, which is the same on all ranks."""


def varying_over_tp(graph: fx.Graph, plan: ShardingPlan) -> set[fx.Node]:
    """Nodes whose value differs between the ranks of a tp group.

    Shards and the rank's index vary; what is computed from them varies, until a redistribution makes it invariant.
    Sizes never vary: every rank computes in the same shapes.
    """
    varying: set[fx.Node] = set()
    for node in graph.nodes:
        if _varies(node, varying, plan):
            varying.add(node)
    return varying


def _varies(node: fx.Node, varying: set[fx.Node], plan: ShardingPlan) -> bool:
    if node.op == "placeholder":
        source = node.meta["input"]
        if source.kind == "parameter":
            return not isinstance(plan.by_name[source.name].tp, Replicate)
        return source.kind == "coordinate"
    if node.target in SHAPE_ONLY or not _holds_tensor(node):
        return False
    if node.target is redistribute:
        dst = node.args[4]
        return dst.startswith("S") if dst != "R" else node.args[0] in varying
    return any(source in varying for source in node.all_input_nodes)


def _holds_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor | tuple | list)
