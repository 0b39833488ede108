"""What each pass may make: nodes that the same code without tp does not have.

The proof takes no others, so that a pass cannot add to the program what its docstring does not say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx

from ndcompile.capture.opaque import is_opaque
from ndcompile.operators.chunked_loss import vocabulary_loss
from ndcompile.operators.host_copies import to_device
from ndcompile.operators.random_ops import attention_op, dropout_op
from ndcompile.operators.redistribute import average_gradient, divide_gradient, hold_gradient, redistribute, unshard
from ndcompile.proof.problem import Problem
from ndcompile.proof.use import tensor_of

aten = torch.ops.aten

MADE_BY: Mapping[str, frozenset[Any]] = {
    "reduce_statistics": frozenset(
        [redistribute, aten.mean.dim, aten.div.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.sqrt.default]
    ),
    "complete_boundaries": frozenset([redistribute]),
    "shard_sequence": frozenset([redistribute]),
    "reduce_auxiliary_loss": frozenset([redistribute, aten.div.Tensor, aten.full.default, aten.sum.dim_IntList]),
    "chunk_loss": frozenset([redistribute, vocabulary_loss, aten.div.Tensor, aten.ne.Scalar, aten.sum.default]),
    "seed_random_ops": frozenset([aten.select.int, dropout_op, attention_op]),
    "unshard_parameters": frozenset([unshard, average_gradient, divide_gradient, aten.to.dtype]),
    "offload_parameters": frozenset([to_device]),
    "hold_gradients": frozenset([hold_gradient]),
}
"""Name of a pass -> operators of the tensors that it computes; a pass that is not listed makes none."""


def run_marked(run: Callable[[fx.Graph, Any], None], graph: fx.Graph, context: Any) -> None:
    """Run a pass, and note in `meta["made_by"]` of every new node which one it was."""
    known = set(graph.nodes)
    run(graph, context)
    for node in graph.nodes:
        if node not in known:
            node.meta["made_by"] = run.__name__


def may_make(node: fx.Node) -> bool:
    """Whether a pass made the node, and may."""
    made_by = node.meta.get("made_by", "")
    seeded = is_opaque(node) and made_by == "seed_random_ops"
    return node.op == "placeholder" or seeded or node.target in MADE_BY.get(made_by, ())


def unknown_nodes(graph: fx.Graph, captured: Collection[fx.Node]) -> list[Problem]:
    """Values that were not captured, and that no pass makes."""
    return [
        Problem(node, "it was not captured, and no pass makes it", NO_SUCH_NODE, {})
        for node in graph.nodes
        if node not in captured and tensor_of(node) is not None and not may_make(node)
    ]


NO_SUCH_NODE = "What a pass may make is listed in ndcompile/proof/made.py."
