"""Copy parameters that live in host memory to the device in front of their use, and their gradients back.

Before (all on the device):

    average = average_gradient(weight, "dp_replicate", 2, "sum")
    full = unshard(average, "fsdp", 4, dim, rows, dtype, "sum")
    y = linear(x, full)

After (`weight` on the host; backward of to_device copies what the ranks have reduced):

    shard = to_device(weight, "cuda:0")
    average = average_gradient(shard, "dp_replicate", 2, "sum")
    full = unshard(average, "fsdp", 4, dim, rows, dtype, "sum")
    y = linear(x, full)

What crosses the bus is a rank's shard, in the dtype in which it is stored: a cast on the host would make half the bytes
of a float32 weight, but in memory that is not pinned, from which a copy holds up the host, behind a kernel of the CPU.
Where nothing gathers a weight (no data axes), backward copies it again, and it is not kept either.
"""

from __future__ import annotations

from torch import fx

from ndcompile.capture.graph_input import PARAMETER
from ndcompile.graphs.pass_context import PassContext
from ndcompile.operators.host_copies import HOST, to_device
from ndcompile.passes.unshard_parameters import outside_no_grad
from ndcompile.plans.sharding_plan import FREE


def offload_parameters(graph: fx.Graph, context: PassContext) -> None:
    """Insert a node behind every parameter placeholder, where `context.offloads` says that they are on the host."""
    if not context.offloads:
        return
    position = {node: number for number, node in enumerate(graph.nodes)}
    outside = outside_no_grad(graph)
    for placeholder in graph.find_nodes(op="placeholder"):
        if placeholder.meta["input"].kind != PARAMETER:
            continue
        users = list(placeholder.users)
        if users:
            first_use = min(users, key=position.__getitem__)
            with graph.inserting_before(outside.get(first_use, first_use)):
                _copy(graph, placeholder, users, context)
        value = placeholder.meta["val"]
        placeholder.meta["val"] = context.fake(tuple(value.shape), value.dtype, value.requires_grad, HOST)


def _copy(graph: fx.Graph, placeholder: fx.Node, users: list[fx.Node], context: PassContext) -> None:
    entry = context.plan.by_name[placeholder.meta["input"].name]
    node = graph.call_function(to_device, (placeholder, context.mesh.device))
    node.meta["val"], node.meta["differentiable"] = placeholder.meta["val"], placeholder.meta["differentiable"]
    style = entry.fsdp_style if context.mesh.data_world_size > 1 else FREE
    node.meta["custom"] = {"module": entry.fqn.rpartition(".")[0], "unshard": style}
    for user in users:
        user.replace_input_with(placeholder, node)
