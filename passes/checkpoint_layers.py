"""Recompute the activations of layers with gradient checkpointing in backward.

Before:  h = linear(x, w)                           {module: model.layers.0.mlp.up_proj}
After:   h = linear(x, w)                           {..., recompute: MUST_RECOMPUTE, ac_graph_id: 1}

The partitioner saves what crosses from one layer to the next (another `ac_graph_id`) and recomputes the rest. The tags
work alike for every front end: only module names are needed.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ndcompile.pass_context import PassContext
from ndcompile.redistribute import all_to_all
from ndcompile.routing_checks import CHECKED_SPLITS

READ_BY_THE_HOST = {all_to_all, CHECKED_SPLITS, torch.ops.aten._local_scalar_dense.default}
"""Numbers of rows that experts exchange: some integers, for which backward need not wait for the host again."""


def checkpoint_layers(graph: fx.Graph, context: PassContext) -> None:
    """Tag every node made inside a checkpointed layer."""
    layers = {name: number for number, name in enumerate(context.checkpointed, start=1)}
    if not layers:
        return
    for node in graph.nodes:
        number = _layer(node.meta.get("custom", {}).get("module", ""), layers)
        if node.op == "call_function" and number is not None and "unshard" not in node.meta["custom"]:
            keep = node.target in READ_BY_THE_HOST and not node.meta["differentiable"]
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = number


def _layer(module: str, layers: dict[str, int]) -> int | None:
    parts = module.split(".")
    names = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((layers[name] for name in names if name in layers), None)
