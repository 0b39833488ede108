"""Types of a graph's values over tp: a small inference that passes and the verifier share.

varying: differs between the ranks of a tp group. replicated (R): equal on all, its gradient is partial and is summed by
the I -> R node that it comes from. Everything else is invariant (I): equal on all, and so must its gradient be.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Replicate

from ndcompile.capture.graph_input import COORDINATE, HELD, PARAMETER, VARYING_CACHE
from ndcompile.operators.redistribute import pair, redistribute
from ndcompile.plans.sharding_plan import ShardingPlan

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


def moves_over(node: fx.Node, group: str) -> bool:
    """Whether the node is a redistribution over `group`; to other axes' types it is an operator like any other."""
    return node.target is redistribute and node.args[1] == group


def varying_over_tp(graph: fx.Graph, plan: ShardingPlan, tp: str) -> set[fx.Node]:
    """Nodes whose value differs between the ranks of a tp group. `tp` is the group's name.

    Shards and the rank's index vary; what is computed from them varies, until a redistribution makes it invariant.
    Sizes never vary: every rank computes in the same shapes.
    """
    memory = written_memory(graph)
    varying: set[fx.Node] = set()
    written: set[int] = set()  # memory that holds something that varies
    while True:
        known = len(written)
        for node in graph.nodes:
            if _varies(node, varying, plan, tp) or memory.get(node) in written:
                varying.add(node)
                if node in memory:
                    written.add(memory[node])
        if len(written) == known:
            return varying


def written_memory(graph: fx.Graph) -> dict[fx.Node, int]:
    """The nodes whose memory an operator of the graph writes in place, with a number for each piece of memory.

    A write through one view is seen by the others, so nodes of one memory share a type.
    """
    written = {_storage(target) for node in graph.nodes for target in written_arguments(node)} - {None}
    keys = ((node, _storage(node)) for node in graph.nodes)
    return {node: key for node, key in keys if key is not None and key in written}


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operator writes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    given = [*node.args, *(node.kwargs.get(a.name) for a in node.target._schema.arguments[len(node.args) :])]
    arguments = zip(node.target._schema.arguments, given, strict=False)
    writes = [
        value for argument, value in arguments if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [value for value in writes if isinstance(value, fx.Node)]


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def replicated_over_tp(graph: fx.Graph, varying: set[fx.Node], tp: str) -> tuple[set[fx.Node], list[fx.Node]]:
    """Differentiable nodes of type R, and the nodes that mix R with I: no one type fits their gradient."""
    replicated: set[fx.Node] = set()
    mixed = []
    for node in graph.nodes:
        inputs = [source for source in node.all_input_nodes if source.meta["differentiable"]]
        found = [source for source in inputs if source in replicated]
        if moves_over(node, tp):
            if node.args[4] == "R" and node not in varying:
                replicated.add(node)
            if found and node.args[3] == "I":  # its backward gives an invariant gradient
                mixed.append(node)
        elif node.op == "output" or (found and len(found) < len(inputs) and node not in varying):
            mixed += [node] if found else []
        elif found and node not in varying and node.meta["differentiable"]:
            replicated.add(node)
    return replicated, mixed


def _varies(node: fx.Node, varying: set[fx.Node], plan: ShardingPlan, tp: str) -> bool:
    if node.op == "placeholder":
        source = node.meta["input"]
        if source.kind in (PARAMETER, HELD):
            return not isinstance(plan.by_name[source.name].tp, Replicate)
        return source.kind in (COORDINATE, VARYING_CACHE)
    if node.target in SHAPE_ONLY or not _holds_tensor(node):
        return False
    if moves_over(node, tp):
        src, dst = pair(node)
        return dst.startswith("S") or ((src, dst) == ("I", "R") and node.args[0] in varying)
    return any(source in varying for source in node.all_input_nodes)


def _holds_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor | tuple | list)
