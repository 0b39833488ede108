"""What a partitioned step keeps between forward and backward.

A saved tensor may be a view: what counts is the memory that it names, once. Parameters, buffers and inputs of the graph
are alive anyway, so they do not count; weights that are gathered for the step and kept (`keep_full_weight`) do.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

EXCHANGE = torch.ops._c10d_functional.all_to_all_single.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
VIEWS_IN_PARTS = {"split", "split_with_sizes", "unbind", "chunk", "unsafe_split"}
IN_PLACE = {"add_product"}
"""Operators that write to their first argument, and whose node stands for what it holds then."""


def saved_activations(forward: fx.Graph, backward: fx.Graph) -> dict[str, fx.Node]:
    """Name in the backward graph -> the node of the forward graph whose memory is kept for it, each memory once."""
    taken = {node.name for node in backward.find_nodes(op="placeholder")}
    saved: dict[fx.Node, str] = {}
    for node in forward.output_node().all_input_nodes:
        owner = owner_of(node)
        if node.name in taken and owner.op != "placeholder" and isinstance(owner.meta.get("val"), Tensor):
            saved.setdefault(owner, node.name)
    return {name: owner for owner, name in saved.items()}


def owner_of(node: fx.Node) -> fx.Node:
    """The node whose memory a node names."""
    while names_memory(node):
        node = node.all_input_nodes[0]
    return node


def names_memory(node: fx.Node) -> bool:
    """Whether the memory of a node is that of its first input."""
    return (is_view(node) and not own_part(node)) or getattr(node.target, "_opname", "") in IN_PLACE


def is_view(node: fx.Node) -> bool:
    """Whether a node only names (part of) what another one holds; a wait and the parts of a tuple do too."""
    if node.op != "call_function":
        return False
    target: Any = node.target
    if target in (operator.getitem, WAIT):
        return True
    return isinstance(target, torch._ops.OpOverload) and (target.is_view or target._opname == "_unsafe_view")


def own_part(node: fx.Node) -> bool:
    """Whether a node takes one of several tensors that an operator returned, each with memory of its own."""
    source = node
    while source.target is operator.getitem:
        source = source.all_input_nodes[0]
    return source is not node and not is_view(source) and getattr(source.target, "_opname", "") not in VIEWS_IN_PARTS


def nbytes(value: Tensor, rows: Mapping[Any, int]) -> int:
    """Bytes of a fake tensor at the sizes it was traced with; `rows` see `even_rows`."""
    return math.prod(number(length, rows) for length in value.shape) * value.dtype.itemsize


def number(size: Any, rows: Mapping[Any, int]) -> int:
    """A size as a number: that of the call that was traced, and of even routing where it depends on routing."""
    if isinstance(size, int):
        return size
    known = size.node.shape_env.backed_var_to_val
    return int(size.node.expr.subs(rows).subs(known))


def even_rows(graph: fx.Graph) -> dict[Any, int]:
    """Symbols of the numbers of rows that ranks exchange -> what they are when each expert is chosen equally often.

    Then a rank receives as many rows as it sends, and an equal part of them from every other.
    """
    rows: dict[Any, int] = {}
    for node in graph.find_nodes(op="call_function", target=EXCHANGE):
        sent, received = _rows(node.args[0]), _rows(node)
        if isinstance(received, int) or not _is_known(sent):
            continue
        sent = number(sent, rows)
        rows[received.node.expr] = sent
        splits = [_value(split) for part in node.args[1:3] for split in part]
        for split in splits:
            for symbol in [] if isinstance(split, int) else split.node.expr.free_symbols:
                rows.setdefault(symbol, sent // max(len(node.args[1]), 1))
    return rows


def _is_known(size: Any) -> bool:
    return isinstance(size, int) or size.node.expr.free_symbols <= size.node.shape_env.backed_var_to_val.keys()


def _rows(node: Any) -> Any:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value.shape[0]


def _value(split: Any) -> Any:
    return split.meta["val"] if isinstance(split, fx.Node) else split
