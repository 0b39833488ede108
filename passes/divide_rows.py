"""Divide the rows that a gradient of experts is multiplied from, instead of the gradient.

The ranks that send an expert their tokens add to its gradient, and a division makes the sum a mean: a pass over the
gradients of all experts in memory. The gradients of the rows have just been computed, and their division runs in the
same kernel.

Runs on the joint graph, in front of its partition.

Before:  dw = div(permute(_grouped_mm(x.t(), g, ends), [0, 2, 1]), 2)
After:   dw = permute(_grouped_mm(x.t(), div(g, 2), ends), [0, 2, 1])

Only powers of two, which change the exponent of a number and nothing else, and not in float16, whose small numbers
would lose digits: so no result differs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ndcompile.graphs.exchanges import dependents, is_tangent
from ndcompile.graphs.graph_edits import call, erase

aten = torch.ops.aten

VIEWS = {aten.permute.default, aten.transpose.int, aten.view.default, aten.reshape.default}
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def divide_rows(graph: fx.Graph) -> None:
    """Move every division of a grouped product behind which nothing else reads it."""
    gradients: set[fx.Node] | None = None
    for node in graph.find_nodes(op="call_function", target=aten.div.Tensor):
        product = _product(node)
        if product is None or not _is_exact(node):
            continue
        if gradients is None:
            nodes = list(graph.nodes)
            gradients = dependents([each for each in nodes if is_tangent(each)], nodes)
        left, right, *rest = product.all_input_nodes
        rows = [each for each in (left, right) if each in gradients]
        if len(rows) == 1 and rest:
            _move(graph, node, product, rows[0])


def _product(node: fx.Node) -> fx.Node | None:
    """The grouped product whose result a node reads, through views, alone."""
    source: Any = node.args[0]
    while isinstance(source, fx.Node) and len(source.users) == 1:
        if source.target is aten._grouped_mm.default:
            return source
        if source.target not in VIEWS:
            return None
        source = source.args[0]
    return None


def _is_exact(node: fx.Node) -> bool:
    divisor = node.args[1]
    return (
        isinstance(divisor, int)
        and divisor > 0
        and divisor & (divisor - 1) == 0
        and node.meta["val"].dtype in DTYPES
        and node.meta["val"].dtype == node.args[0].meta["val"].dtype  # type: ignore[union-attr]
    )


def _move(graph: fx.Graph, node: fx.Node, product: fx.Node, rows: fx.Node) -> None:
    with graph.inserting_before(product):
        divided = call(graph, aten.div.Tensor, (rows, node.args[1]), rows)
    product.replace_input_with(rows, divided)
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    erase(node)
