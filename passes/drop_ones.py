"""Drop products with ones and sums of one summand, which exchanged experts bring along.

Experts of transformers weight every row and sum the rows of a token. Rows that arrive by all-to-all come one by one,
and are weighted where they came from: here the weights are ones, and each sum has one summand. Left in, they are a pass
over all rows in memory.

Runs on the joint graph, in front of its partition.

Before:  w = index(view(expand(full([], 1), [rows, 1]), [rows]), [order]);  y = mul(x, unsqueeze(w, -1))
         z = sum(view(index(y, [inverse]), [rows, 1, width]), [1])
After:   z = squeeze(view(index(x, [inverse]), [rows, 1, width]), 1)

(Inductor's `remove_no_ops` knows what `full` makes and views of it, but not what an index picks from it.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ndcompile.graphs.graph_edits import call, erase
from ndcompile.private.tracing import statically_known_true

aten = torch.ops.aten

MOVES = {
    aten.alias.default,
    aten.clone.default,
    aten.expand.default,
    aten.index.Tensor,
    aten.reshape.default,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.view.default,
    torch.ops.prims.convert_element_type.default,
}
"""What makes a tensor of elements of its first operand."""


def drop_ones(graph: fx.Graph) -> None:
    """Replace each product with ones by its other factor, and each sum over a dim of one element by a view.

    What the graph returns stays: it has memory of its own.
    """
    ones: set[Any] = set()
    for node in list(graph.nodes):
        if (node.target is aten.full.default and node.args[1] == 1) or (node.target in MOVES and node.args[0] in ones):
            ones.add(node)
        elif node.target is aten.mul.Tensor and not _is_returned(node):
            _drop_product(node, ones)
        elif node.target is aten.sum.dim_IntList and not _is_returned(node):
            _drop_sum(graph, node)


def _drop_product(node: fx.Node, ones: set[Any]) -> None:
    left, right = node.args
    for factor, other in ((left, right), (right, left)):
        if other in ones and isinstance(factor, fx.Node) and _alike(factor, node):
            node.replace_all_uses_with(factor)
            erase(node)
            return


def _drop_sum(graph: fx.Graph, node: fx.Node) -> None:
    summed, dims, *keep = node.args
    value = summed.meta["val"]  # type: ignore[union-attr]
    if keep or node.kwargs or len(dims) != 1 or value.dtype != node.meta["val"].dtype:  # type: ignore[arg-type]
        return
    if value.ndim and statically_known_true(value.shape[dims[0]] == 1):  # type: ignore[index]
        with graph.inserting_before(node):
            node.replace_all_uses_with(call(graph, aten.squeeze.dim, (summed, dims[0]), node))  # type: ignore[index]
        erase(node)


def _is_returned(node: fx.Node) -> bool:
    """Whether the graph returns a node, or what may be a view of it."""
    return any(user.op == "output" or (user.target in MOVES and _is_returned(user)) for user in node.users)


def _alike(factor: fx.Node, product: fx.Node) -> bool:
    one, other = factor.meta["val"], product.meta["val"]
    same = one.ndim == other.ndim and all(
        statically_known_true(a == b) for a, b in zip(one.shape, other.shape, strict=True)
    )
    return same and one.dtype == other.dtype
