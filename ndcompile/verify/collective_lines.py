"""What ranks compare of a graph before its first run: a line for each node that talks to other ranks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ndcompile.capture.opaque import is_opaque
from ndcompile.operators.chunked_loss import vocabulary_loss
from ndcompile.operators.redistribute import all_to_all, average_gradient, pair, redistribute, unshard


def collective_lines(graph: fx.Graph, axes: Mapping[str, str]) -> list[str]:
    """The graph's distributed nodes as lines: operator, axis, types, dtype, shape.

    axes: group name -> axis name. Sizes of activations are left out: data ranks may have other batch sizes and lengths.
    """
    return [
        _name_of(node) if is_opaque(node) else _line_of(node, axes)
        for node in graph.nodes
        if node.target in DISTRIBUTED or is_opaque(node)
    ]


def _name_of(node: fx.Node) -> str:
    """An opaque module is called by the name of its operator: one rank's compiled code must mean the same on others."""
    return f"{node.target._opname} of {node.meta.get('custom', {}).get('module', '')!r}"  # type: ignore[union-attr]


DISTRIBUTED = (redistribute, unshard, average_gradient, all_to_all, vocabulary_loss)


def _line_of(node: fx.Node, axes: Mapping[str, str]) -> str:
    value, module = node.meta["val"], node.meta.get("custom", {}).get("module", "")
    group, details, shape = node.args[1], list(node.args[3:]), str(tuple(value.shape))
    if node.target is redistribute:
        details, shape = list(pair(node)), f"{value.ndim} dims"
    elif node.target is all_to_all:
        group, details, shape = node.args[3], [], f"{value.ndim} dims"
    elif node.target is vocabulary_loss:  # the number of chunks is that of a rank's tokens
        details = list(node.args[6:8])
    plain = ", ".join(str(detail) for detail in details if isinstance(detail, str | int))
    name = node.target._opname  # type: ignore[union-attr]
    return f"{name} over {axes.get(str(group), group)} ({plain}) {value.dtype} {shape} in {module!r}"
