"""Make statistics over a sharded dim those of all tp ranks, and refuse what else reads along one.

Model code between plan modules runs on a rank's shards: a mean there is the mean of the shard, half of a fused
projection is half of the shard. Which dims are sharded is found by a second capture, see `sharded_dims.py`.

Before (hidden is sharded on its last dim):

    m = mean(hidden, [-1], True)

After (shards are equal, so the mean is the mean of the ranks' means; m is invariant from here on):

    m_0 = mean(hidden, [-1], True)
    m_1 = redistribute(m_0, "tp", 2, "P", "I")
    m = div(m_1, 2)

A deviation becomes the root of the mean square distance from such a mean.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import fx

from ndcompile.errors import VerifyError
from ndcompile.graphs.pass_context import PassContext
from ndcompile.mesh import Axis
from ndcompile.operators.redistribute import redistribute
from ndcompile.plans.sharding_plan import generic
from ndcompile.verify.fused_parameters import packed_values, parameters_before, parts_taken, rule_of
from ndcompile.verify.sharded_dims import SPLITS, Dims, argument, pair_nodes, reads_of_shards, sharded_dims

_logger = logging.getLogger("ndcompile.passes")

aten = torch.ops.aten


def reduce_statistics(graph: fx.Graph, context: PassContext) -> None:
    """Reduce means and deviations over sharded dims. Raises VerifyError for other operators that read along one.

    The exchange of tokens between experts is left alone: it takes a rank's part of the tokens on purpose, to sort them.
    """
    axis = context.axis("tp")
    whole = context.whole_graph() if axis is not None and context.whole_graph is not None else None
    if axis is None or whole is None:
        return
    pairs, other = pair_nodes(graph, whole)
    if other is not None and not _exchanged(other, context):
        raise VerifyError(
            f"{other.target} in module {_module(other)!r}{_line(other)} is not what the same code does without tp: it "
            f"depends on a size that tp={axis.size} cuts, a number of heads or a width. Keep the projections around it "
            "whole in tp_plan ('colwise_gather_output' in front, 'rowwise_split_input' behind), or, if it is right as "
            "it is, disable the pass 'reduce_statistics'."
        )
    dims = sharded_dims(pairs)
    packed = packed_values(graph, context.plan, dims)
    for node, read in reads_of_shards(graph, dims):
        source: Any = node.args[0]
        if (node.target in SPLITS and source in packed) or _exchanged(node, context):
            continue
        rewrite = STATISTICS.get(node.target)
        if rewrite is None or not _equal_shards(source, pairs[source], read, axis.size):
            raise VerifyError(_explain(node, read, source, axis.size, _override(node, dims)))
        with graph.inserting_before(node):
            result = rewrite(_Builder(graph, node, context, axis), read, pairs[source])
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        _logger.info("%s over a sharded dim in %s is reduced over tp", node.target, _module(node))


class _Builder:
    """Makes nodes in place of `node`, with its metadata."""

    def __init__(self, graph: fx.Graph, node: fx.Node, context: PassContext, axis: Axis) -> None:
        self.graph, self.node, self.context, self.axis = graph, node, context, axis
        self.source: fx.Node = node.args[0]  # type: ignore[assignment]

    def __call__(self, target: Any, *args: Any, shape: tuple[Any, ...] | None = None) -> fx.Node:
        made = self.graph.call_function(target, args)
        made.meta.update(self.node.meta)
        if shape is not None:
            made.meta["val"] = self.context.fake(shape, self.node.meta["val"].dtype)
        return made

    def mean(self, x: fx.Node, dims: list[int], keepdim: bool, shape: tuple[Any, ...]) -> fx.Node:
        """The mean over all ranks, invariant."""
        own = self(aten.mean.dim, x, dims, keepdim, shape=shape)
        total = self(redistribute, own, self.axis.group, self.axis.size, "P", "I", shape=shape)
        return self(aten.div.Tensor, total, self.axis.size, shape=shape)


def _mean(build: _Builder, read: set[int], whole: fx.Node) -> fx.Node:
    node, dims = build.node, _dims(build.node)
    return build.mean(build.source, dims, bool(argument(node, "keepdim")), tuple(node.meta["val"].shape))


def _deviation(build: _Builder, read: set[int], whole: fx.Node) -> fx.Node:
    """The root of the variance."""
    return build(aten.sqrt.default, _variance(build, read, whole))


def _variance(build: _Builder, read: set[int], whole: fx.Node) -> fx.Node:
    node, dims = build.node, _dims(build.node)
    shape = tuple(build.source.meta["val"].shape)
    kept = tuple(1 if dim in dims else size for dim, size in enumerate(shape))
    mean = build.mean(build.source, dims, True, kept)
    distance = build(aten.sub.Tensor, build.source, mean, shape=shape)
    square = build(aten.mul.Tensor, distance, distance, shape=shape)
    variance = build.mean(square, dims, bool(argument(node, "keepdim")), tuple(node.meta["val"].shape))
    count = prod(whole.meta["val"].shape[dim] for dim in dims)
    correction = _correction(node)
    return build(aten.mul.Tensor, variance, count / (count - correction)) if correction else variance


STATISTICS: dict[Any, Callable[[_Builder, set[int], fx.Node], fx.Node]] = {
    aten.mean.dim: _mean,
    aten.var.correction: _variance,
    aten.var.dim: _variance,
    aten.std.correction: _deviation,
    aten.std.dim: _deviation,
}


def _correction(node: fx.Node) -> float:
    """What the count of a variance is less by: 1 unless said otherwise."""
    unbiased, correction = argument(node, "unbiased"), argument(node, "correction")
    return float(unbiased) if unbiased is not None else 1 if correction is None else correction


def _dims(node: fx.Node) -> list[int]:
    ndim = node.args[0].meta["val"].ndim  # type: ignore[union-attr]
    given = argument(node, "dim")
    return sorted(dim % ndim for dim in given) if given else list(range(ndim))


def _equal_shards(local: fx.Node, whole: fx.Node, dims: set[int], ranks: int) -> bool:
    """Padding would count in a mean."""
    sizes = ((local.meta["val"].shape[dim], whole.meta["val"].shape[dim]) for dim in dims)
    return all(isinstance(own, int) and own * ranks == total for own, total in sizes)


def _override(node: fx.Node, dims: Dims) -> str:
    """The rule of tp_plan for the fused projection that a node splits: the nearest sharded parameter before it.

    A packed shard is of two parts, so more of them have to be gathered, which an expert's stacked weights cannot.
    """
    halves = parts_taken(node) == 2
    for fqn in parameters_before(node, dims)[:1]:
        if halves or rule_of(fqn) != fqn:
            style = "packed_colwise" if halves else "colwise_gather_output"
            return f"tp_plan={{{generic(rule_of(fqn))!r}: {style!r}}}"
    return "'packed_colwise' (two parts) or 'colwise_gather_output', in tp_plan"


def _explain(node: fx.Node, read: set[int], source: fx.Node, ranks: int, override: str) -> str:
    part = (
        "the parts of a shard are no shards of the parts. Give the fused projection before it another style, "
        + override
        if node.target in SPLITS
        else "each rank would see its own shard only. Gather before it ('colwise_gather_output'), and let the "
        "projection behind it take its part of a whole input ('rowwise_split_input') in tp_plan"
    )
    return (
        f"{node.target} in module {_module(node)!r}{_line(node)} reads along dim {sorted(read)[0]} of a value of shape "
        f"{tuple(source.meta['val'].shape)} on a rank, which tp_plan has sharded over tp={ranks}: {part}."
    )


def _line(node: fx.Node) -> str:
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    return f" ({lines[-2].strip()}: {lines[-1].strip()})" if len(lines) > 1 else ""


def _exchanged(node: fx.Node, context: PassContext) -> bool:
    """Whether a node is of experts that get their tokens by an exchange."""
    return any(f"{_module(node)}.".startswith(f"{experts.fqn}.") for experts in context.plan.experts)


def _module(node: fx.Node) -> str:
    return node.meta.get("custom", {}).get("module", "")
