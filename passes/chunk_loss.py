"""Compute the loss a chunk of tokens at a time, on shards of the vocabulary, where nobody else reads the logits.

Before (the logits of all tokens, in float32; under tp gathered from all ranks):

    r = redistribute(hidden, "tp", 2, "I", "R")
    shard = linear(r, weight)
    logits = redistribute(shard, "tp", 2, "S(-1)", "I", 128256, coordinate)
    loss = cross_entropy_loss(view(to(logits, float32), [-1, 128256]), labels)

After (logits of one chunk exist; the ranks exchange two numbers a token):

    r = redistribute(hidden, "tp", 2, "I", "R")
    part = vocabulary_loss(r, "tp", 2, weight, None, labels, 128256, -100, 4, float32, [], [], coordinate)
    total = redistribute(part, "tp", 2, "P", "I")
    loss = div(total, sum(ne(labels, -100)))

Only heads whose logits go to one cross entropy alone are rewritten: those of a model that returns its logits stay, see
`loss_only` of `ndcompile.compile`.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ndcompile.graphs.pass_context import PassContext
from ndcompile.operators.chunked_loss import vocabulary_loss
from ndcompile.operators.redistribute import redistribute
from ndcompile.private.tracing import size_hint

_logger = logging.getLogger("ndcompile.passes")

aten = torch.ops.aten

SAME_VALUES = {aten.alias.default, aten.clone.default, aten.contiguous.default, aten.to.dtype}
FLATTENING = {aten.view.default, aten.reshape.default}
STEPS = {aten.mul.Tensor: "mul", aten.div.Tensor: "div", aten.tanh.default: "tanh"}
"""Operators of `chunked_loss.ELEMENTWISE`, if their other operand is a number."""
MEAN, SUM = 1, 2
"""`reduction` of aten.cross_entropy_loss."""


@dataclass
class Head:
    """What leads from a head's matrix product to its logits, in reverse order while it is being read."""

    linear: fx.Node
    gather: fx.Node | None = None
    names: list[str] = field(default_factory=list)
    constants: list[float] = field(default_factory=list)


def chunk_loss(graph: fx.Graph, context: PassContext) -> None:
    """Rewrite every cross entropy whose logits have no other use."""
    for node in graph.find_nodes(op="call_function", target=aten.cross_entropy_loss.default):
        head = _head_of(node)
        if head is not None and _plain(node):
            _rewrite(graph, node, head, context)
        else:
            _logger.info("%s reads logits that have other uses or an unknown form: they are computed whole", node)


def _head_of(loss: fx.Node) -> Head | None:
    """Go up from the loss's logits to the matrix product; None if anything on the way has another user or meaning."""
    node: Any = loss.args[0]
    names: list[str] = []
    constants: list[float] = []
    gather = None
    while isinstance(node, fx.Node) and len(node.users) == 1 and node.op == "call_function":
        if node.target is aten.linear.default:
            return Head(node, gather, names[::-1], constants[::-1])
        if node.target is redistribute and gather is None and _gathers_last_dim(node):
            gather = node
        elif node.target in STEPS and gather is None and all(isinstance(c, int | float) for c in node.args[1:]):
            names.append(STEPS[node.target])
            constants.append(float(node.args[1]) if len(node.args) > 1 else 0.0)  # type: ignore[arg-type]
        elif node.target not in SAME_VALUES and not (node.target in FLATTENING and _keeps_last_dim(node)):
            return None
        node = node.args[0]
    return None


def _gathers_last_dim(node: fx.Node) -> bool:
    last = f"S({node.meta['val'].ndim - 1})"
    return node.args[4] == "I" and node.args[3] in ("S(-1)", last)


def _keeps_last_dim(node: fx.Node) -> bool:
    return node.meta["val"].shape[-1] == node.args[0].meta["val"].shape[-1]  # type: ignore[union-attr]


def _plain(loss: fx.Node) -> bool:
    """Labels are class numbers of tokens (1-D), without weights or smoothing, and the result is one number."""
    labels = loss.args[1].meta["val"]  # type: ignore[union-attr]
    return (
        labels.ndim == 1
        and not labels.is_floating_point()
        and _argument(loss, 2, "weight", None) is None
        and _argument(loss, 3, "reduction", MEAN) in (MEAN, SUM)
        and _argument(loss, 5, "label_smoothing", 0.0) == 0.0
    )


def _rewrite(graph: fx.Graph, loss: fx.Node, head: Head, context: PassContext) -> None:
    hidden, weight, *bias = head.linear.args
    labels, ignored = loss.args[1], _argument(loss, 4, "ignore_index", -100)
    group: Any = ""
    size: Any = 1
    full, coordinate = weight.meta["val"].shape[0], None  # type: ignore[union-attr]
    if head.gather is not None:
        _, group, size, _, _, full, coordinate = head.gather.args
    chunks = _chunks(hidden.meta["val"])  # type: ignore[union-attr]
    dtype = loss.args[0].meta["val"].dtype  # type: ignore[union-attr]
    args = (hidden, group, size, weight, *(bias or [None]), labels, full, ignored, chunks, dtype, head.names)
    with graph.inserting_before(loss):
        total = _call(graph, loss, vocabulary_loss, (*args, head.constants, coordinate), context)
        total.meta["custom"] = head.linear.meta.get("custom", {})
        if head.gather is not None:
            total = _call(graph, loss, redistribute, (total, group, size, "P", "I"), context)
        if _argument(loss, 3, "reduction", MEAN) == MEAN:
            total = _call(graph, loss, aten.div.Tensor, (total, _count(graph, labels, ignored, context)), context)
    total.meta["val"] = loss.meta["val"]  # the same memory: a model may add to its loss in place
    loss.replace_all_uses_with(total)
    graph.eliminate_dead_code()


def _count(graph: fx.Graph, labels: Any, ignored: int, context: PassContext) -> fx.Node:
    """How many labels have a loss."""
    counted = graph.call_function(aten.ne.Scalar, (labels, ignored))
    tokens = tuple(labels.meta["val"].shape)
    counted.meta.update(labels.meta, val=context.fake(tokens, torch.bool), differentiable=False)
    count = graph.call_function(aten.sum.default, (counted,))
    count.meta.update(counted.meta, val=context.fake((), torch.int64))
    return count


def _chunks(hidden: torch.Tensor) -> int:
    """Parts of width / 2 tokens: a chunk's logits and their gradient then take as much memory as the weight's gradient,
    and the products stay large. Counted for the captured sizes, also where they are symbolic."""
    tokens = size_hint(hidden.numel() // hidden.shape[-1])
    return min(max(1, math.ceil(tokens / max(1, hidden.shape[-1] // 2))), tokens)


def _call(graph: fx.Graph, loss: fx.Node, target: Any, args: tuple, context: PassContext) -> fx.Node:
    """A node that makes a number like the loss."""
    node = graph.call_function(target, args)
    value = loss.meta["val"]
    node.meta.update(loss.meta, val=context.fake((), value.dtype, value.requires_grad))
    return node


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)
