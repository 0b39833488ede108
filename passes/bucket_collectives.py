"""Merge small collectives on parameters: one all-gather for several weights, one reduction for several gradients.

Runs on the lowered forward and backward graphs.

Before:  w0 = wait(all_gather(p0));  w1 = wait(all_gather(p1))
After:   w = wait(all_gather(cat([p0, p1]))).view(ranks, -1);  w0 = w[:, :n0].reshape(...);  w1 = w[:, n0:].reshape(...)

A merged collective saves a launch, some 20 microseconds, and costs a copy of what it sends and receives. So only those
below `SMALL` are merged: a copy of so many bytes takes as long. (Inductor's `bucket_all_gathers_fx` merges all sizes.)
A bucket ends where a layer of the model does, so that graphs of layers which are alike stay alike, and are compiled
once (`reuse_layers`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable

import torch
from torch import fx

from ndcompile.graphs.collective_chains import REDUCTIONS, Chain, collectives, gradient_reductions, weight_gathers
from ndcompile.graphs.graph_edits import raise_inputs

aten = torch.ops.aten

SMALL = 32 * 2**20
"""Bytes of a whole weight or gradient up to which it is merged, and of a bucket."""


def bucket_collectives(graph: fx.Graph) -> None:
    """Merge neighbours of one kind, group and dtype until a bucket is full."""
    for bucket in _buckets(weight_gathers(graph), lambda chain: _key(chain.start)):
        _merge_gathers(graph, bucket)
    for bucket in _buckets(gradient_reductions(graph), lambda chain: _key(chain.start)):
        _merge_reductions(graph, bucket)
    for chain in gradient_reductions(graph):  # their all-reduces over dp_replicate
        inner = [node for node in chain.after if node.target in REDUCTIONS]
        parts = [Chain((), start, tuple(_between(start, chain.after)), _bytes(start)) for start in inner]
        for bucket in _buckets(parts, lambda part: _key(part.start)):
            _merge_reductions(graph, bucket)


def _key(start: fx.Node) -> Hashable:
    return (start.target, *start.args[1:], start.meta["val"].dtype)


def _layer(start: fx.Node) -> int | None:
    """Number of the layer whose weight is gathered, or whose gradient is reduced."""
    return start.meta.get("custom", {}).get("layer")


def _buckets(chains: Iterable[Chain], key: Callable[[Chain], Hashable]) -> list[list[Chain]]:
    """Groups of two or more, each of one layer where that is known."""
    open_buckets: dict[Hashable, list[Chain]] = {}
    buckets: list[list[Chain]] = []
    layer = None
    for chain in chains:
        if _layer(chain.start) != layer:
            open_buckets.clear()
            layer = _layer(chain.start)
        if chain.size > SMALL:
            continue
        bucket = open_buckets.get(key(chain))
        if bucket is None or sum(each.size for each in bucket) + chain.size > SMALL:
            buckets.append(bucket := [])
            open_buckets[key(chain)] = bucket
        bucket.append(chain)
    return [bucket for bucket in buckets if len(bucket) > 1]


def _merge_gathers(graph: fx.Graph, bucket: list[Chain]) -> None:
    starts = {chain.start for chain in bucket}
    first = next(node for node in graph.nodes if node in starts)
    raise_inputs(graph, first, [given for chain in bucket for given in chain.start.all_input_nodes])
    _, ranks, group = first.args
    with graph.inserting_before(first):
        flat = [_call(graph, aten.reshape.default, chain.start.args[0], [-1]) for chain in bucket]
        joined = _call(graph, aten.cat.default, flat)
        start = _call(graph, first.target, joined, ranks, group)
        start.meta["custom"] = dict(first.meta["custom"])
        whole = _call(graph, aten.reshape.default, _call(graph, collectives.wait_tensor.default, start), [ranks, -1])
        _split(graph, whole, bucket, [math.prod(node.meta["val"].shape) for node in flat])


def _merge_reductions(graph: fx.Graph, bucket: list[Chain]) -> None:
    """At the last of them; what follows the others moves behind it."""
    last = bucket[-1].start
    _, *settings = last.args
    ranks = settings[1] if last.target is collectives.reduce_scatter_tensor.default else 1
    anchor = last
    for chain in bucket:
        for node in chain.after:
            anchor.append(node)
            anchor = node
    with graph.inserting_before(last):
        flat = [_call(graph, aten.reshape.default, chain.start.args[0], [ranks, -1]) for chain in bucket]
        joined = _call(graph, aten.cat.default, flat, 1)
        start = _call(graph, last.target, joined, *settings)
        start.meta["custom"] = dict(last.meta.get("custom", {}))
        whole = _call(graph, collectives.wait_tensor.default, start)
        _split(graph, whole, bucket, [node.meta["val"].shape[1] for node in flat])


def _split(graph: fx.Graph, whole: fx.Node, bucket: list[Chain], sizes: list[int]) -> None:
    """Replace the result of every collective by its part of `whole`, along the last dim."""
    begin = 0
    for chain, size in zip(bucket, sizes, strict=True):
        part = _call(graph, aten.slice.Tensor, whole, 1, begin, begin + size)
        result = _call(graph, aten.reshape.default, part, list(chain.wait.meta["val"].shape))
        chain.wait.replace_all_uses_with(result)
        begin += size
    for chain in bucket:
        graph.erase_node(chain.wait)
        graph.erase_node(chain.start)


def _between(start: fx.Node, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Those of `nodes`, in their order, that depend on `start`."""
    found = {start}
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return [node for node in nodes if node in found and node is not start]


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.element_size()


def _call(graph: fx.Graph, target, *args) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.node.map_arg(args, lambda each: each.meta["val"]))
    return node
