"""Edits of lowered graphs that passes share: a new node with its value, nodes that move up or go."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx


def call(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, **kwargs: Any) -> fx.Node:
    """A new node with its fake value, of the module that `like` belongs to."""
    node = graph.call_function(target, args, kwargs)
    node.meta["custom"] = dict(like.meta.get("custom", {}))
    fakes = fx.node.map_arg(args, lambda each: each.meta["val"])
    mode = next((each.fake_mode for each in _tensors([fakes, like.meta.get("val")])), None)
    if mode is None:
        node.meta["val"] = target(*fakes, **kwargs)
    else:
        with mode, torch.no_grad():
            node.meta["val"] = target(*fakes, **kwargs)
    return node


def _tensors(values: Any) -> list[Any]:
    return [each for each in torch.utils._pytree.tree_leaves(values) if isinstance(each, Tensor)]


def raise_inputs(graph: fx.Graph, node: fx.Node, inputs: Iterable[fx.Node]) -> None:
    """Put what `inputs` are computed from in front of `node`."""
    position = {each: number for number, each in enumerate(graph.nodes)}
    waiting, behind = list(inputs), set()
    while waiting:
        each = waiting.pop()
        if position[each] > position[node] and each not in behind:
            behind.add(each)
            waiting += each.all_input_nodes
    for each in sorted(behind, key=position.__getitem__):
        node.prepend(each)


def erase(node: fx.Node, but: fx.Node | None = None) -> None:
    """Erase a node that nothing reads, and what only it read."""
    inputs = node.all_input_nodes
    if node.users or node is but or node.op != "call_function":
        return
    node.graph.erase_node(node)
    for each in inputs:
        erase(each, but)
