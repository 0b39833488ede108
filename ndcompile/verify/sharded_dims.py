"""Which dims of a graph's values are sharded over tp: found by two captures, not by rules for operators.

One graph is in a rank's shapes, the other in global shapes. They have the same nodes, and a dim whose size differs is
sharded.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ndcompile.mesh import StorageMesh
from ndcompile.plans.sharding_plan import ShardingPlan
from ndcompile.verify.type_inference import written_memory

aten = torch.ops.aten

Dims = dict[fx.Node, frozenset[int]]


def unsharded(plan: ShardingPlan, mesh: StorageMesh) -> tuple[ShardingPlan, StorageMesh]:
    """The same boundaries on a tp axis of one rank: what is captured with them has the nodes of the rank's graph."""
    parameters = tuple(p if p.expert else dataclasses.replace(p, tp_size=1) for p in plan.parameters)
    axes = {**mesh.axes, "tp": dataclasses.replace(mesh.axes["tp"], size=1)}
    return dataclasses.replace(plan, parameters=parameters), dataclasses.replace(mesh, axes=axes)


def side_by_side(
    local: fx.Graph, whole: fx.Graph, leave_out: Callable[[fx.Node], bool] = lambda node: False
) -> Iterator[tuple[fx.Node, fx.Node] | tuple[fx.Node, None]]:
    """Every node of the rank's graph with its node of the global one, up to the first that differs by more than shapes,
    which comes with None.

    `x.contiguous()` is a node only where strides ask for one, and a dim of which a rank has one element (a head) asks
    for none: such a node is passed over in the global graph, and in the rank's is paired with the node of its operand.
    Not so where code writes into one of the two: then a copy is other code.
    """
    others = (node for node in whole.nodes if not leave_out(node))
    twin = next(others, None)
    written = {*written_memory(local), *written_memory(whole)}
    found: dict[fx.Node, fx.Node] = {}
    for own in (node for node in local.nodes if not leave_out(node)):
        while twin is not None and not _same_code(own, twin) and _only_copies(twin, written):
            twin = next(others, None)
        if twin is not None and _same_code(own, twin):
            found[own], twin = twin, next(others, None)
        elif _only_copies(own, written) and own.all_input_nodes[0] in found:
            found[own] = found[own.all_input_nodes[0]]
        else:
            yield own, None
            return
        yield own, found[own]


def _same_code(own: fx.Node, twin: fx.Node) -> bool:
    return (own.op, own.target) == (twin.op, twin.target)


def _only_copies(node: fx.Node, written: set[fx.Node]) -> bool:
    return node.target is aten.contiguous.default and not {node, *node.all_input_nodes} & written


def pair_nodes(local: fx.Graph, whole: fx.Graph) -> tuple[dict[fx.Node, fx.Node], fx.Node | None]:
    """See `side_by_side`. Returns the pairs, and the first node of the rank's graph that has none, if there is one."""
    pairs: dict[fx.Node, fx.Node] = {}
    for own, twin in side_by_side(local, whole):
        if twin is None:
            return pairs, own
        pairs[own] = twin
    return pairs, None


def sharded_dims(pairs: dict[fx.Node, fx.Node]) -> Dims:
    """Node -> dims that are smaller on the rank; nodes without one, and without a tensor, are left out."""
    dims = {}
    for node, twin in pairs.items():
        value: Any = node.meta.get("val")
        global_value: Any = twin.meta.get("val")
        if isinstance(value, list | tuple) and value:  # chunk, split: the parts are sharded alike
            value, global_value = value[0], global_value[0]
        if isinstance(value, Tensor) and isinstance(global_value, Tensor) and value.ndim == global_value.ndim:
            sizes = zip(value.shape, global_value.shape, strict=True)
            if found := frozenset(dim for dim, (own, total) in enumerate(sizes) if _differ(own, total)):
                dims[node] = found
    return dims


def _differ(own: Any, total: Any) -> bool:
    """Symbols of two captures have the same names, so their text is compared."""
    return str(own) != str(total)


def argument(node: fx.Node, name: str) -> Any:
    """An argument of an operator by name, or its default; None where it has neither."""
    schema = node.target._schema  # type: ignore[union-attr]
    for position, parameter in enumerate(schema.arguments):
        if parameter.name == name:
            if position < len(node.args):
                return node.args[position]
            return node.kwargs.get(name, parameter.default_value)
    return None


def _dims_of(name: str) -> Callable[[fx.Node, int], set[int]]:
    """The dims that an argument lists; all where it is None or empty."""

    def dims(node: fx.Node, ndim: int) -> set[int]:
        given = argument(node, name)
        listed = given if isinstance(given, list | tuple) else [] if given is None else [given]
        return {dim % ndim for dim in listed} or set(range(ndim))

    return dims


def _last_dims(node: fx.Node, ndim: int) -> set[int]:
    return set(range(ndim - len(argument(node, "normalized_shape")), ndim))


def _sliced(node: fx.Node, ndim: int) -> set[int]:
    """A slice with a step takes every other element of any shard, and one of everything takes everything."""
    start, end, step = (argument(node, name) for name in ("start", "end", "step"))
    everything = start in (None, 0) and end in (None, sys.maxsize)
    return set() if everything or step != 1 else {argument(node, "dim") % ndim}


def _classes(node: fx.Node, ndim: int) -> set[int]:
    return {1} if ndim > 1 else {0}


_ONE, _SEVERAL = _dims_of("dim"), _dims_of("dims")

READS_ALONG: dict[Any, Callable[[fx.Node, int], set[int]]] = {
    **dict.fromkeys(
        [
            aten.mean.dim, aten.std.correction, aten.std.dim, aten.var.correction, aten.var.dim,
            aten.var_mean.correction, aten.softmax.int, aten._softmax.default, aten.log_softmax.int,
            aten.logsumexp.default, aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default,
            aten.topk.default, aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argmax.default,
            aten.argmin.default, aten.max.dim, aten.min.dim, aten.amax.default, aten.amin.default, aten.median.dim,
            aten.prod.dim_int, aten.norm.ScalarOpt_dim, aten.linalg_vector_norm.default, aten.glu.default,
            aten.chunk.default, aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default,
            aten.unbind.int, aten.select.int, aten.narrow.default, aten.index_select.default, aten.gather.default,
        ],
        _ONE,
    ),
    aten.flip.default: _SEVERAL,
    aten.roll.default: _SEVERAL,
    aten.layer_norm.default: _last_dims,
    aten.rms_norm.default: _last_dims,
    aten.slice.Tensor: _sliced,
    aten.cross_entropy_loss.default: _classes,
}  # fmt: skip
"""Operators whose result depends on where along a dim a value stands, or on all values along it: on a shard they read
this rank's positions and values only. Sums are missing: a plan may close them with 'all_reduce', like a product."""

SPLITS = {
    aten.chunk.default, aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.slice.Tensor,
    aten.narrow.default,
}  # fmt: skip
"""Operators that take a fused value apart. Each part of a packed shard is a shard of the part."""


def reads_of_shards(graph: fx.Graph, dims: Dims) -> list[tuple[fx.Node, set[int]]]:
    """The nodes that read along a sharded dim of their first input, with these dims."""
    found = []
    for node in graph.nodes:
        rule = READS_ALONG.get(node.target)
        source = node.args[0] if node.args else None
        if rule is None or not isinstance(source, fx.Node) or source not in dims:
            continue
        if read := rule(node, source.meta["val"].ndim) & dims[source]:
            found.append((node, read))
    return found
