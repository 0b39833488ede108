"""Damages to a finished graph, as a wrong pass would do them; each is undone when its context ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx

from ndcompile.mesh import StorageMesh
from ndcompile.operators.redistribute import all_to_all, average_gradient, divide_gradient, redistribute, unshard
from ndcompile.verify.verifier import SEEDED

PAIRS = [("I", "R"), ("P", "I"), ("P", "R")]
Damage = AbstractContextManager[None]


def damages(graph: fx.Graph, mesh: StorageMesh) -> Iterator[tuple[str, Damage]]:
    """Each node that moves values or gradients between ranks: removed, doubled, scaled by the size of its axis, taken
    for another. One of those that are alike in all layers."""
    seen = set()
    sizes = {axis.group: axis.size for axis in mesh.axes.values()}
    for node in [n for n in graph.nodes if n.target in KINDS]:
        custom = node.meta.get("custom") or {}
        module, parameter = re.sub(r"\d+", "*", custom.get("module", "")), re.sub(r"\d+", "*", _parameter(node))
        learns = node.meta["differentiable"]
        moves = node.args[3:5] if node.target is redistribute else ()
        key = (module, parameter, node.target, moves, learns, node.args[1] if node.target is not all_to_all else "")
        if key in seen or (moves == ("I", "R") and not learns):
            continue  # without a gradient I and R are one
        seen.add(key)
        title = f"{module or parameter} {node.target} {'->'.join(map(str, moves))}"
        size = sizes.get(node.args[3] if node.target is all_to_all else node.args[1], 2)
        yield f"{title} removed", _bypassed(node, node.args[0])
        if node.target is not unshard:  # a second gather would have other sizes
            yield f"{title} doubled", _followed(graph, node, node.target, node.args[1:])
        yield f"{title} scaled", _followed(graph, node, torch.ops.aten.mul.Tensor, (size,))
        for what, arguments in KINDS[node.target](node, learns, mesh):
            yield f"{title} {what}", _with_arguments(node, arguments)
    for node in [n for n in graph.nodes if n.target in SEEDED]:
        stream: Any = node.args[SEEDED[node.target]]
        yield f"{node} of the other stream", _with_arguments(stream, (*stream.args[:2], 1 - stream.args[2]))


Others = Iterator[tuple[str, tuple[Any, ...]]]


def _other_moves(node: fx.Node, learns: bool, mesh: StorageMesh) -> Others:
    pair = node.args[3:5]
    for other in PAIRS:
        if other != pair and pair in PAIRS and (learns or other[0] != pair[0]):
            yield f"taken for {other[0]}->{other[1]}", (*node.args[:3], *other, *node.args[5:])
    yield from _other_axes(node, learns, mesh)


def _other_axes(node: fx.Node, learns: bool, mesh: StorageMesh) -> Others:
    """Over another axis, of whatever size."""
    for axis in {axis.group: axis for axis in mesh.axes.values()}.values():
        if axis.group != node.args[1]:
            yield f"over {axis.name}", (node.args[0], axis.group, axis.size, *node.args[3:])


def _other_means(node: fx.Node, learns: bool, mesh: StorageMesh) -> Others:
    yield from _other_axes(node, learns, mesh)
    position = 6 if node.target is unshard else 3
    if learns:
        yield "by a sum", (*node.args[:position], "sum", *node.args[position + 1 :])


def _other_divisors(node: fx.Node, learns: bool, mesh: StorageMesh) -> Others:
    for divisor in (1, 2 * node.args[1]):
        yield f"by {divisor}", (node.args[0], divisor)


KINDS = {
    redistribute: _other_moves,
    unshard: _other_means,
    average_gradient: _other_means,
    divide_gradient: _other_divisors,
    all_to_all: lambda node, learns, mesh: iter(()),
}
"""Nodes between ranks -> what they may be taken for."""


def _parameter(node: fx.Node) -> str:
    while node.target in (unshard, average_gradient, divide_gradient):
        node = node.args[0]
    return node.meta["input"].name if node.op == "placeholder" else ""


@contextmanager
def _bypassed(node: fx.Node, source: fx.Node) -> Iterator[None]:
    """Users of `node` read `source` instead."""
    before = [(user, user.args, user.kwargs) for user in node.users if user is not source]
    for user, _, _ in before:
        user.replace_input_with(node, source)
    try:
        yield
    finally:
        for user, args, kwargs in before:
            user.args, user.kwargs = args, kwargs


@contextmanager
def _followed(graph: fx.Graph, node: fx.Node, target: Any, args: tuple[Any, ...]) -> Iterator[None]:
    """An operator on the value of `node`, in its place."""
    with graph.inserting_after(node):
        again = graph.call_function(target, (node, *args))
    again.meta.update(node.meta)
    if target is redistribute:  # as a pass that may make it would
        again.meta["made_by"] = "complete_boundaries"
    with _bypassed(node, again):
        yield
    graph.erase_node(again)


@contextmanager
def _with_arguments(node: fx.Node, arguments: tuple[Any, ...]) -> Iterator[None]:
    before = node.args
    node.args = arguments
    try:
        yield
    finally:
        node.args = before
