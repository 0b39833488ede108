"""Make the router's auxiliary loss that of the global batch: sums over sums, both over all data ranks.

The loss is a product of means over tokens, so the mean of the ranks' losses is not the loss of the batch.

Before (made inside the model's `load_balancing_loss_func`):

    tokens_per_expert = div(tokens_per_expert_sum, total_rows)

After (backward of P -> R is an all-reduce too: the loss of every rank depends on the sum):

    numerator = redistribute(tokens_per_expert_sum, "fsdp", 4, "P", "R")
    denominator = redistribute(full([], total_rows), "fsdp", 4, "P", "R")
    tokens_per_expert = div(numerator, denominator)
"""

from __future__ import annotations

import torch
from torch import fx

from ndcompile.errors import VerifyError
from ndcompile.graphs.pass_context import PassContext
from ndcompile.mesh import Axis
from ndcompile.operators.redistribute import redistribute

aten = torch.ops.aten


def reduce_auxiliary_loss(graph: fx.Graph, context: PassContext) -> None:
    """Reduce both sides of every division, and every mean over tokens, of the auxiliary loss.

    Raises VerifyError for an auxiliary loss that has neither, whose global value is unknown.
    """
    axes = [axis for name in ("dp_replicate", "fsdp") if (axis := context.axis(name)) is not None]
    region = [node for node in graph.nodes if "auxiliary_loss" in node.meta.get("custom", {})]
    if not axes or not region:
        return
    means = [node for node in region if node.target in (aten.div.Tensor, aten.mean.dim)]
    for node in means:
        numerator, denominator = _as_sums(graph, node, context)
        for axis in axes:
            numerator, denominator = (_sum_over(graph, axis, x, node) for x in (numerator, denominator))
        with graph.inserting_before(node):
            global_mean = _call(graph, node, aten.div.Tensor, (numerator, denominator))
        node.replace_all_uses_with(global_mean)
        graph.erase_node(node)
    if not means:
        raise VerifyError(
            f"The auxiliary loss in module {region[0].meta['custom'].get('module')!r} is no ratio of sums over tokens, "
            "so its value over all data ranks is unknown. Use output_router_logits=False, or disable the pass "
            "'reduce_auxiliary_loss' to add each rank's own."
        )


def _as_sums(graph: fx.Graph, node: fx.Node, context: PassContext) -> tuple[fx.Node, fx.Node]:
    """The numerator and the denominator of a mean, as tensors that add up over ranks."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    with graph.inserting_before(node):
        if node.target is aten.div.Tensor:
            count = node.args[1]
            numerator = source
        else:
            count = _call(graph, node, aten.sym_size.int, (source, node.args[1][0]))  # type: ignore[index]
            count.meta["val"] = source.meta["val"].shape[node.args[1][0]]  # type: ignore[index]
            numerator = _call(graph, node, aten.sum.dim_IntList, node.args)
        if isinstance(count, fx.Node) and isinstance(count.meta["val"], torch.Tensor):
            return numerator, count
        total = graph.call_function(aten.full.default, ([], count), {"dtype": torch.float32, "device": _device(node)})
    total.meta.update(val=context.fake((), torch.float32), differentiable=False, custom=node.meta["custom"])
    return numerator, total


def _sum_over(graph: fx.Graph, axis: Axis, x: fx.Node, user: fx.Node) -> fx.Node:
    with graph.inserting_before(user):
        total = graph.call_function(redistribute, (x, axis.group, axis.size, "P", "R"))
    total.meta.update(x.meta, custom=user.meta["custom"])
    return total


def _call(graph: fx.Graph, like: fx.Node, target, args: tuple) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta.update(like.meta)
    return node


def _device(node: fx.Node) -> torch.device:
    return node.meta["val"].device
