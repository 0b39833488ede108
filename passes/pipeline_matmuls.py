"""Async tensor parallelism: sequence shards are gathered and reduced piece by piece, beside the matrix products.

Runs on the lowered forward and backward graphs, with `async_tp=True`, before the passes that move collectives.

Before:  x = cat(split(wait(all_gather(shard))), 1);  q = x @ w_q;  k = x @ w_k
After:   x, (q, k) = symm_mem.fused_all_gather_matmul(shard, [w_q, w_k], 1, group)

Before:  s = wait(reduce_scatter(cat(split(a @ w_o, 1))))
After:   s = symm_mem.fused_matmul_reduce_scatter(a, w_o, "sum", 1, group)

Before:  s = wait(reduce_scatter(cat(split(dq @ w_q + dk @ w_k, 1))))
After:   s = matmuls_reduce_scatter([dq, dk], [w_q, w_k], 1, group)              see ndcompile/matmul_scatter.py

A rank multiplies its own tokens while it fetches those of the next rank through symmetric memory, and fetches the next
rank's part of a sum while it computes its own. x is returned where something else reads it, such as the gradient of a
weight in backward. A cast between gather and product is made before the gather; one between products and reduction is
made in it. Padding goes in front of the products. What is gathered or reduced for other nodes stays as it is.

Which collectives are rewritten is a function of the graph, and so the same on all ranks of a tp group.
"""

from __future__ import annotations

import logging
import math
import operator
from typing import Any

import torch
from torch import fx

from ndcompile.graphs.collective_chains import GATHER
from ndcompile.graphs.graph_edits import call, erase, raise_inputs
from ndcompile.graphs.sequence_products import (
    CAST,
    REDUCE_SCATTER,
    RESHAPES,
    Gather,
    Product,
    Scatter,
    gathers,
    given,
    is_static,
    scatters,
)
from ndcompile.operators.matmul_scatter import matmuls_reduce_scatter
from ndcompile.private.distributed import fused_all_gather_matmul, fused_matmul_reduce_scatter
from ndcompile.private.inductor import force_stride_order, tensor_updater

aten = torch.ops.aten
_logger = logging.getLogger("ndcompile.passes")


def pipeline_matmuls(graph: fx.Graph, group: str) -> None:
    """Rewrite what is gathered for matrix products and reduced behind them over the process group named `group`."""
    total = {target: _over(graph, target, group) for target in (GATHER, REDUCE_SCATTER)}
    symbolic = any(not is_static(node) for nodes in total.values() for node in nodes)
    with tensor_updater(graph) as follows:
        found = [*gathers(graph, group)]
        for gather in found:
            _fuse_gather(graph, gather, group, as_before=not follows)
        reduced = [*scatters(graph, group)]
        for scatter in reduced:
            _fuse_scatter(graph, scatter, group)
    _logger.log(
        logging.INFO if found or reduced or not any(total.values()) else logging.WARNING,
        "async_tp: %d of %d all-gathers and %d of %d reduce-scatters over %s run beside matrix products%s",
        *(len(found), len(total[GATHER]), len(reduced), len(total[REDUCE_SCATTER]), group),
        "; symbolic sizes never do: compile with dynamic=False" if symbolic else "",
    )


def _fuse_gather(graph: fx.Graph, gather: Gather, group: str, as_before: bool) -> None:
    """as_before: copy results to the strides that the nodes behind them were traced with. Inductor, which follows what
    strides become, needs no copy."""
    start = gather.start

    def tokens(result: fx.Node) -> fx.Node:
        if gather.trim is not None:
            result = call(graph, aten.slice.Tensor, (result, *gather.trim), start)
        return call(graph, aten.contiguous.default, (result,), start) if as_before else result

    with graph.inserting_before(start):
        shard = given(start)[0]
        if gather.dtype is not None:
            shard = call(graph, CAST, (shard, gather.dtype), start)
        shard = _tokens_first(graph, shard, gather.dim, start)
        weights = [product.weight for product in gather.products]
        fused = call(graph, fused_all_gather_matmul, (shard, weights, gather.dim, group), start)
        raise_inputs(graph, fused, [*weights, *(each.bias for each in gather.products if each.bias is not None)])
        results = call(graph, operator.getitem, (fused, 1), start)
        for number, product in enumerate(gather.products):
            _replace(graph, product, tokens(call(graph, operator.getitem, (results, number), start)))
        whole = tokens(call(graph, operator.getitem, (fused, 0), start))
    gather.whole.replace_all_uses_with(whole)
    erase(gather.whole)
    for product in gather.products:
        erase(product.node, but=whole)
    if not whole.users:  # then it need not be kept
        erase(whole, but=fused)
        fused.kwargs = {"return_A": False}
        fused.meta["val"] = (None, fused.meta["val"][1])


def _fuse_scatter(graph: fx.Graph, scatter: Scatter, group: str) -> None:
    start, dim = scatter.start, scatter.dim
    with graph.inserting_before(start):
        tokens = []
        for product in scatter.products:
            each = _tokens(graph, product.rows, scatter.summed.meta["val"].shape[:-1])
            if scatter.padding is not None:
                each = call(graph, aten.constant_pad_nd.default, (each, *scatter.padding), start)
            tokens.append(_tokens_first(graph, each, dim, start))
        weights = [product.weight for product in scatter.products]
        if len(tokens) == 1 and scatter.dtype is None:
            args: tuple[Any, ...] = (tokens[0], weights[0], "sum", dim, group)
            fused = call(graph, fused_matmul_reduce_scatter, args, start)
        else:
            dtype = scatter.dtype or scatter.summed.meta["val"].dtype
            fused = call(graph, matmuls_reduce_scatter, (tokens, weights, dim, group, dtype), start)
    scatter.wait.replace_all_uses_with(fused)
    erase(scatter.wait)


def _over(graph: fx.Graph, target: Any, group: str) -> list[fx.Node]:
    return [node for node in graph.find_nodes(op="call_function", target=target) if group in node.args]


def _replace(graph: fx.Graph, product: Product, result: fx.Node) -> None:
    """Let the users of a product of rows read `result`, the same product of tokens, instead."""
    if product.bias is not None:
        result = call(graph, aten.add.Tensor, (result, product.bias), product.node)
    shape = result.meta["val"].shape
    for user in list(product.node.users):
        if user.target not in RESHAPES:
            rows = call(graph, aten.reshape.default, (result, list(product.node.meta["val"].shape)), product.node)
            user.replace_input_with(product.node, rows)
        elif user.meta["val"].shape == shape:
            user.replace_all_uses_with(result)
            graph.erase_node(user)
        else:
            user.replace_input_with(product.node, result)


def _tokens(graph: fx.Graph, rows: fx.Node, shape: torch.Size) -> fx.Node:
    """The value whose rows a product reads, (batch, sequence, width), where `shape` is (batch, sequence)."""
    if rows.target in RESHAPES and given(rows)[0].meta["val"].shape[:-1] == shape:
        return given(rows)[0]
    return call(graph, aten.reshape.default, (rows, [*shape, rows.meta["val"].shape[-1]]), rows)


def _tokens_first(graph: fx.Graph, x: fx.Node, dim: int, like: fx.Node) -> fx.Node:
    """`x` in memory with `dim` outermost, as the fused operators read it: they would copy another one. Where `x` is
    computed by inductor, it is written so at once."""
    value = x.meta["val"]
    order = [dim, *(each for each in range(value.ndim) if each != dim)]
    strides = {each: math.prod(value.shape[i] for i in order[at + 1 :]) for at, each in enumerate(order)}
    if all(size == 1 or value.stride(each) == strides[each] for each, size in enumerate(value.shape)):
        return x
    return call(graph, force_stride_order, (x, [strides[each] for each in range(value.ndim)]), like)
