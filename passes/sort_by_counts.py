"""Order rows by their expert from the numbers of rows, instead of sorting what names each row's expert.

Rows that arrive by all-to-all come in blocks: from every rank those of the first expert, then those of the second. How
many there are of each is known, so where a row goes is a sum. A sort takes a dozen kernels, and the host that launches
them behind its read of those numbers keeps the device waiting.

Runs on the joint graph, behind `gather_gradients`, which knows permutations by their sort.

Before:  of_row = index(repeat(iota(experts), [ranks]), [repeat_interleave(counts, output_size=rows)])
         expert, order = sort(of_row)
After:   by_expert = reshape(permute(view(counts, [ranks, experts]), [1, 0]), [-1]);  ends = cumsum(by_expert)
         block = searchsorted(ends, iota(rows), right=True)
         order = iota(rows) + index(first_received - first_sorted, [block]);  expert = floor(block / ranks)

first_received and first_sorted are, for each block, the number of its first row in either order. The order is that of a
stable sort.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ndcompile.graphs.graph_edits import call, erase
from ndcompile.graphs.sorts import SORTS, is_ascending

aten, prims = torch.ops.aten, torch.ops.prims

VIEWS = {aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.alias.default}


def sort_by_counts(graph: fx.Graph) -> None:
    """Replace every ascending sort of blocks' numbers, of whose results only these are used."""
    for node in list(graph.nodes):
        if node.target in SORTS and (blocks := _blocks(node)):
            with graph.inserting_before(node):
                results = _sorted(graph, blocks, node)
            for user in list(node.users):
                user.replace_all_uses_with(results[user.args[1]])
                erase(user)


@dataclass(frozen=True)
class _Blocks:
    """counts: rows of each block, (ranks x experts). rows: their sum, as a number or a node."""

    counts: fx.Node
    rows: Any
    ranks: int
    experts: int


def _blocks(sort: fx.Node) -> _Blocks | None:
    """What a sort's keys are made of, if they number the blocks of rows."""
    if not is_ascending(sort) or any(user.target is not operator.getitem for user in sort.users):
        return None
    keys = sort.meta["val"][0]
    if keys.ndim != 1 or keys.dtype != torch.int64:
        return None
    index = _source(sort.args[0])
    if index.target is not aten.index.Tensor or len(index.args[1]) != 1:
        return None
    numbers, of_row = index.args[0], index.args[1][0]
    if numbers.target is not aten.repeat.default or of_row.target is not aten.repeat_interleave.Tensor:
        return None
    experts, (ranks, *more) = numbers.args[0], numbers.args[1]
    counts, rows = of_row.args[0], of_row.kwargs.get("output_size")
    from_zero = experts.target is prims.iota.default and (experts.kwargs["start"], experts.kwargs["step"]) == (0, 1)
    length = experts.args[0]
    if more or not from_zero or rows is None or not isinstance(length, int) or not isinstance(ranks, int):
        return None
    if counts.meta["val"].dtype != torch.int64 or tuple(counts.meta["val"].shape) != (ranks * length,):
        return None
    return _Blocks(counts, rows, ranks, length)


def _source(node: Any) -> Any:
    while node.target in VIEWS:
        node = node.args[0]
    return node


def _sorted(graph: fx.Graph, blocks: _Blocks, like: fx.Node) -> tuple[fx.Node, fx.Node]:
    """(expert of each row, order), where the graph is being written."""
    options = {"start": 0, "step": 1, "dtype": torch.int64, "device": blocks.counts.meta["val"].device}

    def new(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call(graph, target, args, like, **kwargs)

    def by_expert(of_block: fx.Node) -> fx.Node:
        turned = new(aten.permute.default, new(aten.view.default, of_block, [blocks.ranks, blocks.experts]), [1, 0])
        return new(aten.view.default, new(aten.clone.default, turned, memory_format=torch.contiguous_format), [-1])

    counts = by_expert(blocks.counts)
    ends = new(aten.cumsum.default, counts, 0)
    received = by_expert(new(aten.sub.Tensor, new(aten.cumsum.default, blocks.counts, 0), blocks.counts))
    moved = new(aten.sub.Tensor, received, new(aten.sub.Tensor, ends, counts))
    row = new(prims.iota.default, blocks.rows, **options, requires_grad=False)
    block = new(aten.searchsorted.Tensor, ends, row, right=True)
    order = new(aten.add.Tensor, row, new(aten.index.Tensor, moved, [block]))
    return new(aten.div.Tensor_mode, block, blocks.ranks, rounding_mode="floor"), order
