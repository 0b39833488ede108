"""Gather the gradients of rows that were put in another order, instead of adding them to zeros.

A MoE layer sorts its (token, expert) pairs by expert, and the results back. Autograd does not know that such an index
is a permutation: the gradient of each move is added, row by row and with atomics on a GPU, to a tensor of zeros, though
every row is met once, or k times where each token goes to k experts.

Runs on the joint graph, in front of its partition. p is a permutation of the n = tokens x k pairs.

Before:  p = sort(experts)[1];  rows = index(x, [floor(p / k)])
         g = index_put(full([tokens, width], 0), [floor(p / k)], grad, accumulate=True)

After:   p = sort(experts)[1];  rows = index(x, [floor(p / k)])
         inverse = index_put(empty_like(p), [p], iota(n))
         g = sum(view(index(grad, [inverse]), [tokens, k, width]), [1])

An inverse that the graph has is used: p, where the index is sort(p)[1] or what index_put made of it. A sum of k rows is
rounded once, in place of k times.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ndcompile.graphs.graph_edits import call, erase
from ndcompile.graphs.sorts import SORTS, is_ascending
from ndcompile.private.tracing import statically_known_true

aten = torch.ops.aten

SAME = {aten.view.default, aten.reshape.default, aten.alias.default, aten.clone.default}


def gather_gradients(graph: fx.Graph) -> None:
    """Rewrite every sum into zeros whose index is a permutation of its rows, or one divided by a number."""
    inverses = _permutations(graph)
    before: set[fx.Node] = set()
    for node in list(graph.nodes):
        before.add(node)
        if node.target is aten.index_put.default and _adds_rows_to_zeros(node):
            moved, times = _divided(node.args[1][0])
            if moved in inverses and _meets_every_row(node, moved, times):
                inverse = inverses[moved]
                if inverse is None or inverse not in before:
                    inverse = inverses[moved] = _invert(graph, moved)
                    before.add(inverse)
                with graph.inserting_before(node):
                    node.replace_all_uses_with(_gathered(graph, node, inverse, times))
                erase(node)


def _permutations(graph: fx.Graph) -> dict[fx.Node | None, fx.Node | None]:
    """1-D permutations of the graph -> their inverses, None where the graph has none."""
    found: dict[fx.Node | None, fx.Node | None] = {}
    for node in graph.nodes:
        if _is_order(node):
            sorted_by = _source(node.args[0].args[0]) if is_ascending(node.args[0]) else None
        elif _is_written(node) and _source(node.args[1][0]) in found:
            sorted_by = _source(node.args[1][0])
        else:
            continue
        found[node] = sorted_by if sorted_by in found else None
        if sorted_by in found and found[sorted_by] is None:
            found[sorted_by] = node
    return found


def _is_order(node: fx.Node) -> bool:
    """The second result of a sort along the only dim: of a permutation, in ascending order, it is the inverse."""
    source: Any = node.args[0] if node.target is operator.getitem and node.args[1] == 1 else None
    return source is not None and source.target in SORTS and node.meta["val"].ndim == 1


def _is_written(node: fx.Node) -> bool:
    """index_put(anything, [p], iota(n)): the inverse of p, if p is a permutation of all n."""
    args: Any = node.args
    if node.target is not aten.index_put.default or node.kwargs or len(args) != 3 or len(args[1]) != 1:
        return False
    base, (index,), values = args
    counts = values.target is torch.ops.prims.iota.default and (values.kwargs["start"], values.kwargs["step"]) == (0, 1)
    if not counts or any(each.meta["val"].ndim != 1 for each in (base, index)):
        return False
    if base.meta["val"].dtype != torch.int64:  # what does not hold every number of a row is no index
        return False
    sizes = [each.meta["val"].shape[0] for each in (base, index, values)]
    return _same_size(sizes[0], sizes[1]) and _same_size(sizes[1], sizes[2])


def _adds_rows_to_zeros(node: fx.Node) -> bool:
    """Of floating point alone: a sum of integers wraps, and one of booleans is another thing than `aten.sum`."""
    args: Any = node.args
    if len(args) < 4 or args[3] is not True or len(args[1]) != 1 or args[1][0].meta["val"].ndim != 1:
        return False
    zeros, values, made = args[0], args[2].meta["val"], node.meta["val"]
    return (
        zeros.target is aten.full.default
        and zeros.args[1] == 0
        and made.dtype == values.dtype
        and made.dtype.is_floating_point
        and made.ndim == values.ndim
        and all(map(_same_size, made.shape[1:], values.shape[1:]))
    )


def _divided(index: fx.Node) -> tuple[fx.Node, int]:
    """(p, k) of an index floor(p / k); k is 1 where nothing divides."""
    index = _source(index)
    if index.target is aten.div.Tensor_mode and index.kwargs.get("rounding_mode") == "floor":
        moved, times = index.args
        if isinstance(moved, fx.Node) and isinstance(times, int) and times > 0:
            return _source(moved), times
    return index, 1


def _source(node: Any) -> fx.Node:
    """What a 1-D value is a view or a copy of, as long as that has one dim too."""
    while node.target in SAME and node.args[0].meta["val"].ndim == 1:
        node = node.args[0]
    return node


def _meets_every_row(node: fx.Node, moved: fx.Node, times: int) -> bool:
    """Whether the permutation divided by `times` names each row of the result that often."""
    rows, values, pairs = (each.meta["val"].shape[0] for each in (node, node.args[2], moved))  # type: ignore[union-attr]
    return _same_size(rows * times, pairs) and _same_size(values, pairs)


def _same_size(left: Any, right: Any) -> bool:
    return bool(statically_known_true(left == right))


def _invert(graph: fx.Graph, moved: fx.Node) -> fx.Node:
    """The inverse of a permutation, made where that is."""
    with graph.inserting_after(moved):
        size: Any = moved.meta["val"].shape[0]
        if not isinstance(size, int):
            size = call(graph, aten.sym_size.int, (moved, 0), moved)
        if isinstance(size, fx.Node) and isinstance(known := size.meta["val"], int):  # a symbol with one value by now
            erase(size)
            size = known
    with graph.inserting_after(size if isinstance(size, fx.Node) else moved):
        counted = call(graph, torch.ops.prims.iota.default, (size,), moved, **_iota_options(moved))
    with graph.inserting_after(counted):
        empty = call(graph, aten.empty_like.default, (moved,), moved)
    with graph.inserting_after(empty):
        return call(graph, aten.index_put.default, (empty, [moved], counted), moved)


def _iota_options(like: fx.Node) -> dict[str, Any]:
    return {"start": 0, "step": 1, "dtype": torch.int64, "device": like.meta["val"].device, "requires_grad": False}


def _gathered(graph: fx.Graph, node: fx.Node, inverse: fx.Node, times: int) -> fx.Node:
    """What the sum into zeros makes, of its rows in the order of the inverse."""
    moved = call(graph, aten.index.Tensor, (node.args[2], [inverse]), node)
    if times == 1:
        return moved
    rows, *rest = node.args[0].args[0]  # type: ignore[union-attr,misc]
    parts = call(graph, aten.view.default, (moved, [rows, times, *rest]), node)
    return call(graph, aten.sum.dim_IntList, (parts, [1]), node)
