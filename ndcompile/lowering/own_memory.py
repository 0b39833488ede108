"""Gradients in memory of their own.

AOTAutograd merges equal nodes. Where two parameters have the same gradient (biases of branches that are added up),
their reductions become one; the two waits for it stay, and return one tensor twice. Each parameter would then hold the
other's gradient, and `clip_grad_norm_`, which scales in place, would scale it twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ndcompile.graphs.graph_edits import call
from ndcompile.graphs.saved_activations import WAIT, owner_of

Extent = tuple[int, int] | None
"""First and last element in the memory that a tensor is a view of; None where sizes are symbolic."""


def wait_once(graph: fx.Graph) -> None:
    """One wait for each collective: what reads the others reads the first."""
    first: dict[fx.Node, fx.Node] = {}
    for wait in graph.find_nodes(op="call_function", target=WAIT):
        kept = first.setdefault(wait.args[0], wait)
        if kept is not wait:
            wait.replace_all_uses_with(kept)
            graph.erase_node(wait)


def separate_gradients(backward: fx.Graph) -> None:
    """Copy a gradient that shares memory with one before it, or with an input, such as the caller's own tensor.

    Before:  w = wait(all_reduce(g));  return (w, w)
    After:   w = wait(all_reduce(g));  c = clone(w);  return (w, c)
    """
    taken: dict[fx.Node, list[Extent]] = {}
    results: list[Any] = list(backward.output_node().args[0])  # type: ignore[arg-type]
    for index, node in enumerate(results):
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), Tensor):
            continue
        owner, extent = owner_of(node), _extent(node.meta["val"])
        extents = taken.setdefault(owner, [])
        if owner.op == "placeholder" or any(_overlap(extent, other) for other in extents):
            with backward.inserting_before(backward.output_node()):
                results[index] = call(backward, torch.ops.aten.clone.default, (node,), like=node)
        else:
            extents.append(extent)
    backward.output_node().args = (tuple(results),)


def _extent(value: Tensor) -> Extent:
    first = value.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (first, last) if isinstance(last, int) and isinstance(first, int) else None


def _overlap(one: Extent, other: Extent) -> bool:
    return one is None or other is None or (one[0] <= other[1] and other[0] <= one[1])
