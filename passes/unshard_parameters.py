"""Give every use of a parameter the tp-local weight, gathered from the ranks' fsdp shards.

Before (placeholder in tp-local shape):

    y = linear(x, weight)

After (placeholder in storage shape; backward of unshard is a reduce-scatter, with dp_replicate an all-reduce after it):

    average = average_gradient(weight, "dp_replicate", 2, "sum")
    full = unshard(average, "fsdp", 4, dim, rows, dtype, "sum")
    y = linear(x, full)

A tied parameter is one placeholder, so it is gathered once and its gradient is reduced once. A parameter that fsdp
cannot shard (a scalar) is stored whole and only averages its gradient. Experts are gathered over efsdp; the ranks of
ep_rest, which sent them their tokens, have added to their gradient already, and a division makes the sum a mean.
"""

from __future__ import annotations

import math

import torch
from torch import fx
from torch.distributed.tensor import Shard

from ndcompile.graphs.pass_context import PassContext
from ndcompile.graphs.recompute import layer_of
from ndcompile.operators.redistribute import average_gradient, divide_gradient, unshard
from ndcompile.plans.sharding_plan import ParameterPlan


def unshard_parameters(graph: fx.Graph, context: PassContext) -> None:
    """Insert the chain behind every parameter placeholder that the data axes touch."""
    position = {node: number for number, node in enumerate(graph.nodes)}
    outside = outside_no_grad(graph)
    for placeholder in graph.find_nodes(op="placeholder"):
        if placeholder.meta["input"].kind == "parameter" and placeholder.users:
            first_use = min(placeholder.users, key=position.__getitem__)
            _unshard(graph, placeholder, outside.get(first_use, first_use), context)


def outside_no_grad(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Nodes of no_grad regions, each with the node that begins its region: a weight gathered behind that one would have
    no gradient from uses outside of it."""
    begin, found = None, {}
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            begin = None if node.args[0] else begin or node
        elif begin is not None:
            found[node] = begin
    return found


def _unshard(graph: fx.Graph, placeholder: fx.Node, first_use: fx.Node, context: PassContext) -> None:
    entry = context.plan.by_name[placeholder.meta["input"].name]
    full = placeholder.meta["val"]
    stored = context.stored_dtypes[entry.fqn]
    users = list(placeholder.users)
    with graph.inserting_before(first_use):
        chain = list(_chain(graph, placeholder, entry, full.dtype, stored != full.dtype, context))
    if not chain:
        return
    placeholder.meta["val"] = context.fake(entry.storage_shape, stored, full.requires_grad)
    module = entry.fqn.rpartition(".")[0]
    layer = layer_of(module, {name: number for number, name in enumerate(context.layers)})
    for node in chain:
        node.meta["val"], node.meta["differentiable"] = placeholder.meta["val"], full.requires_grad
        node.meta["custom"] = {"module": module, "unshard": entry.fsdp_style, "layer": layer}
    chain[-1].meta["val"] = full
    for user in users:
        user.replace_input_with(placeholder, chain[-1])


def _chain(graph, node: fx.Node, entry: ParameterPlan, dtype, cast: bool, context: PassContext):
    """The nodes from the stored shard to the weight as the model uses it, each behind the one before."""
    trainable = node.meta["val"].requires_grad
    sharded = isinstance(entry.fsdp, Shard)
    rest = context.mesh.size("ep_rest") if entry.expert else 1
    if trainable and rest > 1:
        yield (node := _append(graph, node, divide_gradient, (rest,)))
    for name in entry.data_axes[: 1 if sharded else 2]:
        if trainable and (axis := context.axis(name)) is not None:
            yield (node := _append(graph, node, average_gradient, (axis.group, axis.size, context.mean)))
    axis = context.axis(entry.data_axes[1])
    if sharded and axis is not None:
        parts = _parts(entry)
        args = (axis.group, axis.size, *_gather(entry), dtype, context.mean)
        yield _append(graph, node, unshard, args if parts is None else (*args, parts))
    elif cast:
        yield _append(graph, node, torch.ops.aten.to.dtype, (dtype,))


def _gather(entry: ParameterPlan) -> tuple[int, int]:
    """The dim of the gather and its size."""
    assert isinstance(entry.fsdp, Shard)
    return entry.fsdp.dim, entry.compute_shape[entry.fsdp.dim]


def _parts(entry: ParameterPlan) -> list[int] | None:
    """The sizes of two fused axes, where padding stands between the shards and not behind them."""
    even = _gather(entry)[1] % math.prod(entry.fsdp_sizes) == 0
    return None if even or len(entry.fsdp_sizes) == 1 else list(entry.fsdp_sizes)


def _append(graph: fx.Graph, node: fx.Node, target, args: tuple) -> fx.Node:
    return graph.call_function(target, (node, *args))
