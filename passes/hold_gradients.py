"""Gradient accumulation: keep whole gradients on the rank, or add those that were kept before the ranks reduce.

Before:

    full = unshard(weight, "fsdp", 4, dim, rows, dtype, "sum")
    y = linear(x, full)

After, under `no_sync` (`held_weight` is a graph input whose gradient is kept; none reaches the unshard node):

    full = unshard(weight, "fsdp", 4, dim, rows, dtype, "sum")
    keep = hold_gradient(full, held_weight)
    y = linear(x, keep)

After, in the first call behind it (backward reduces the sum of gradient and `held_weight`):

    full = unshard(weight, "fsdp", 4, dim, rows, dtype, "sum", None, held_weight)
    y = linear(x, full)

A parameter whose gradient no data axis reduces is left alone.
"""

from __future__ import annotations

from torch import fx

from ndcompile.capture.graph_input import HELD, PARAMETER, GraphInput
from ndcompile.graphs.pass_context import PassContext
from ndcompile.operators.host_copies import to_device
from ndcompile.operators.redistribute import average_gradient, divide_gradient, hold_gradient, unshard
from ndcompile.runtime.accumulation import HOLD, REDUCED, holder

CHAIN = (to_device, divide_gradient, average_gradient, unshard)
REDUCE = (average_gradient, unshard)


def hold_gradients(graph: fx.Graph, context: PassContext) -> None:
    """Insert a graph input for every parameter that the ranks reduce, as `context.gradients` says."""
    if context.gradients == REDUCED:
        return
    for placeholder in graph.find_nodes(op="placeholder"):
        if placeholder.meta["input"].kind != PARAMETER or not placeholder.meta["differentiable"]:
            continue
        chain = _chain(placeholder)
        reducing = [node for node in chain if node.target in REDUCE]
        if not reducing or not chain[-1].users:
            continue
        if context.gradients == HOLD:
            _hold(graph, chain[-1], _held_input(graph, placeholder, context))
        else:
            node = reducing[-1]
            held = _held_input(graph, placeholder, context)
            node.kwargs = {**node.kwargs, "held": held}


def _chain(placeholder: fx.Node) -> list[fx.Node]:
    """What stands between a stored parameter and its uses."""
    nodes, node = [], placeholder
    while len(node.users) == 1 and (user := next(iter(node.users))).target in CHAIN:
        nodes.append(node := user)
    return nodes


def _hold(graph: fx.Graph, full: fx.Node, held: fx.Node) -> None:
    users = list(full.users)
    with graph.inserting_after(full):
        node = graph.call_function(hold_gradient, (full, held))
    node.meta.update(full.meta)
    for user in users:
        user.replace_input_with(full, node)


def _held_input(graph: fx.Graph, parameter: fx.Node, context: PassContext) -> fx.Node:
    entry = context.plan.by_name[parameter.meta["input"].name]
    learns = context.gradients == HOLD
    with graph.inserting_after(parameter):
        node = graph.placeholder(f"held_{parameter.name}")
    shape, dtype = tuple(entry.compute_shape), context.stored_dtypes[entry.fqn]
    with context.fake_mode:  # strides too are those of the call: inductor asserts them
        fake = holder(shape, dtype, context.mesh.device).requires_grad_(True) if learns else context.fake(shape, dtype)
    node.meta.update(input=GraphInput(HELD, entry.fqn), val=fake, differentiable=learns)
    return node
