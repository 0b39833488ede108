"""Sequence parallelism: norms and residuals between tensor-parallel regions run on shards of the sequence.

Before (every rank of the tp group normalizes all tokens):

    h = redistribute(linear(a, w_o), "tp", 2, "P", "I")
    x = add(x, h)
    n = mul(norm(x), weight)
    r = redistribute(n, "tp", 2, "I", "R");  up = linear(r, w_up)

After (an all-reduce has become a reduce-scatter and an all-gather, and what is between them and saved for backward is
1/2 as large; the weight's gradient is summed over tp):

    h = redistribute(linear(a, w_o), "tp", 2, "P", "S(1)", 4096)
    x = add(x, h)
    n = mul(norm(x), redistribute(weight, "tp", 2, "I", "R"))
    r = redistribute(n, "tp", 2, "S(1)", "R", 4096);  up = linear(r, w_up)

Exact by the types: a value of the region is S(1), and whatever is not known to work token by token gets it gathered.
Runs only with `enable_sequence_parallel` of DistributedConfig. A length that tp does not divide is padded with zeros in
the reduce-scatter, and the padding dropped in the all-gather: no value and no gradient of it is used.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, fx

from ndcompile.graphs.pass_context import PassContext
from ndcompile.mesh import Axis
from ndcompile.operators.redistribute import redistribute, shard
from ndcompile.passes.complete_boundaries import complete_boundaries
from ndcompile.verify.type_inference import moves_over, replicated_over_tp, varying_over_tp, written_memory

aten = torch.ops.aten

SEQUENCE = 1
"""Hidden states are (batch, sequence, width)."""

TOKEN_BY_TOKEN = {
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.dropout.default,
    aten.to.dtype,
    aten.type_as.default,
}
"""Operators that treat every element by itself, besides those that torch tags as pointwise."""

OVER_LAST_DIM = {
    aten.mean.dim: 1,
    aten.sum.dim_IntList: 1,
    aten.var.correction: 1,
    aten.softmax.int: 1,
    aten.layer_norm.default: None,
    aten.rms_norm.default: None,
}
"""Operators that may work within a token: the argument that must name the last dim alone, or None where the normalized
shape must have one dim."""


def shard_sequence(graph: fx.Graph, context: PassContext) -> None:
    """Move every region between P -> I and I -> R onto sequence shards, as far as it works token by token."""
    axis = context.axis("tp")
    if axis is None or not context.plan.sequence_parallel:
        return
    sharded = _region(graph, context, axis)
    sizes = {node: _full_size(graph, node) for node in sharded if moves_over(node, axis.group)}
    origin: dict[fx.Node, fx.Node] = {}  # the boundary that a value of the region comes from, which knows its sizes
    for node in sharded:
        origin[node] = node if node in sizes else next(origin[x] for x in node.all_input_nodes if x in origin)
    for node in sharded:
        if node in sizes:
            node.args = (node.args[0], axis.group, axis.size, "P", shard(SEQUENCE), sizes[node])
        else:
            _enter(graph, node, sharded, axis, context)
    for node in sharded:
        _leave(graph, node, sharded, sizes[origin[node]], origin[node], axis)
        node.meta["val"] = _local(node.meta["val"], SEQUENCE, axis.size, context)
    complete_boundaries(graph, context)


def _region(graph: fx.Graph, context: PassContext, axis: Axis) -> dict[fx.Node, None]:
    """The nodes to run on shards, in the graph's order: sums over tp, and what is computed from them token by token."""
    varying = varying_over_tp(graph, context.plan, axis.group)
    replicated, _ = replicated_over_tp(graph, varying, axis.group)
    excluded = varying | replicated | set(written_memory(graph))
    region: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node in excluded or not _is_hidden(node):
            continue
        if moves_over(node, axis.group):
            joins = node.args[3:5] == ("P", "I")
        else:
            joins = _works_by_token(node) and _continues(node, region, excluded)
        if joins:
            region[node] = None
    entries = [node for node in region if moves_over(node, axis.group)]
    for node in entries:  # a sum that nothing on shards follows stays an all-reduce
        if not any(user in region or _enters_shards(user, axis) for user in node.users):
            del region[node]
    return region


def _is_hidden(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, Tensor) and value.ndim == 3


def _works_by_token(node: fx.Node) -> bool:
    target = node.target
    if target in OVER_LAST_DIM:
        position = OVER_LAST_DIM[target]
        if position is None:
            return len(node.args[1]) == 1  # type: ignore[arg-type]
        return node.args[position] in (-1, 2, [-1], [2])
    if isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
        return not target._schema.is_mutable
    return target in TOKEN_BY_TOKEN or _takes_all(node)


def _takes_all(node: fx.Node) -> bool:
    """Whether a node is `x[:]`, which a capture with symbolic sizes keeps: no slice of a shard either."""
    if node.target is not aten.slice.Tensor or node.kwargs:
        return False
    return node.args[2:] in ((), (0,), (0, sys.maxsize), (0, sys.maxsize, 1))


def _continues(node: fx.Node, region: dict[fx.Node, None], excluded: set[fx.Node]) -> bool:
    """Whether one input is of the region, and the others can be used on shards of the sequence."""
    inputs = node.all_input_nodes
    return any(x in region for x in inputs) and not excluded & set(inputs) and all(_fits(x, node) for x in inputs)


def _fits(source: fx.Node, user: fx.Node) -> bool:
    """Whether an input is a tensor that meets the user's sequence dim with the same size, size 1, or not at all."""
    value, sequence = source.meta.get("val"), user.meta["val"].shape[SEQUENCE]
    if not isinstance(value, Tensor) or value.ndim > 3:
        return False
    return value.ndim < 2 or _same(value.shape[-2], 1) or _same(value.shape[-2], sequence)


def _same(size: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """Equal as they are written: asking whether symbols are equal would add a guard."""
    return str(size) == str(other)


def _enters_shards(node: fx.Node, axis: Axis) -> bool:
    return moves_over(node, axis.group) and node.args[3:5] == ("I", "R")


def _full_size(graph: fx.Graph, boundary: fx.Node) -> int | fx.Node:
    """The length of the whole sequence: a number, or the node that reads it where it is symbolic."""
    source = boundary.all_input_nodes[0]
    size = source.meta["val"].shape[SEQUENCE]
    if isinstance(size, int):
        return size
    with graph.inserting_before(boundary):
        node = graph.call_function(aten.sym_size.int, (source, SEQUENCE))
    node.meta.update(val=size, differentiable=False)
    return node


def _enter(graph: fx.Graph, node: fx.Node, sharded: dict[fx.Node, None], axis: Axis, context: PassContext) -> None:
    """Take this rank's tokens of the inputs that have all of them. The sequence is the last dim but one."""
    for source in node.all_input_nodes:
        value = source.meta["val"]
        if source in sharded or value.ndim < 2 or _same(value.shape[-2], 1):
            continue
        args = (source, axis.group, axis.size, "I", shard(value.ndim - 2), None, _coordinate(graph))
        with graph.inserting_before(node):
            moved = graph.call_function(redistribute, args)
        local = _local(value, value.ndim - 2, axis.size, context)
        moved.meta.update(source.meta, val=local, custom=dict(node.meta.get("custom", {})))
        node.replace_input_with(source, moved)


def _leave(
    graph: fx.Graph, node: fx.Node, sharded: dict[fx.Node, None], full: int | fx.Node, boundary: fx.Node, axis: Axis
) -> None:
    """Gather the tokens where the value enters tensor-parallel shards, and once for all other users."""
    gathered = None
    for user in list(node.users):
        if user in sharded:
            continue
        if _enters_shards(user, axis):
            user.args = (node, axis.group, axis.size, shard(SEQUENCE), "R", full)
        elif user.target is aten.sym_size.int and user.args[1] in (0, SEQUENCE):
            user.replace_input_with(node, boundary.all_input_nodes[0])
        else:
            if gathered is None:
                args = (node, axis.group, axis.size, shard(SEQUENCE), "I", full, _coordinate(graph))
                with graph.inserting_after(node):
                    gathered = graph.call_function(redistribute, args)
                gathered.meta.update(node.meta)
            user.replace_input_with(node, gathered)


def _coordinate(graph: fx.Graph) -> fx.Node:
    inputs = ((node, node.meta["input"]) for node in graph.find_nodes(op="placeholder"))
    return next(node for node, source in inputs if (source.kind, source.name) == ("coordinate", "tp"))


def _local(value: Tensor, dim: int, size: int, context: PassContext) -> Tensor:
    """The fake of one rank's shard."""
    shape = list(value.shape)
    shape[dim] = -(-shape[dim] // size)
    return context.fake(tuple(shape), value.dtype, value.requires_grad)
