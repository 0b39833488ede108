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

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ndcompile.graphs.graph_edits import call, erase
from ndcompile.graphs.repetition import is_view
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

    What the graph returns, or a view of it, stays: it has memory of its own. So does what is made of an input, which
    its owner may write to behind the graph.
    """
    returned, given = _returned(graph), _given(graph)
    ones: set[Any] = set()
    for node in list(graph.nodes):
        if (node.target is aten.full.default and node.args[1] == 1) or (node.target in MOVES and node.args[0] in ones):
            ones.add(node)
        elif node in returned:
            continue
        elif node.target is aten.mul.Tensor:
            _drop_product(node, ones, given)
        elif node.target is aten.sum.dim_IntList:
            _drop_sum(graph, node, given)


def _returned(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that the graph returns, and those of which it returns a view."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(user.op == "output" or (user in found and is_view(user)) for user in node.users):
            found.add(node)
    return found


def _given(graph: fx.Graph) -> set[fx.Node]:
    """Inputs of the graph, and views of them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or (is_view(node) and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def _drop_product(node: fx.Node, ones: set[Any], given: set[fx.Node]) -> None:
    left, right = node.args
    for factor, other in ((left, right), (right, left)):
        if other in ones and isinstance(factor, fx.Node) and factor not in given and _alike(factor, node):
            node.replace_all_uses_with(factor)
            erase(node)
            return


def _drop_sum(graph: fx.Graph, node: fx.Node, given: set[fx.Node]) -> None:
    """A sum of one summand is that, but for the sign of -0."""
    summed, dims, *more = node.args
    if more or node.kwargs or summed in given or not isinstance(dims, Sequence) or len(dims) != 1:
        return
    value = summed.meta["val"]  # type: ignore[union-attr]
    if value.ndim and statically_known_true(value.shape[dims[0]] == 1):
        with graph.inserting_before(node):
            view = call(graph, aten.squeeze.dim, (summed, dims[0]), node)
        if _alike(view, node):
            node.replace_all_uses_with(view)
            erase(node)
        else:
            graph.erase_node(view)


def _alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes have one dtype, of real floating point, and shape and strides."""
    left, right = one.meta["val"], other.meta["val"]
    if left.dtype != right.dtype or not left.dtype.is_floating_point or left.ndim != right.ndim:
        return False
    pairs = zip((*left.shape, *left.stride()), (*right.shape, *right.stride()), strict=True)
    return all(statically_known_true(a == b) for a, b in pairs)
