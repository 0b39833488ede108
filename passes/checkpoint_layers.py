"""Recompute the activations of layers with gradient checkpointing in backward.

Before:  h = linear(x, w)                           {module: model.layers.0.mlp.up_proj}
After:   h = linear(x, w)                           {..., recompute: MUST_RECOMPUTE, ac_graph_id: 1}

The partitioner saves what crosses from one layer to the next (another `ac_graph_id`) and recomputes the rest. The tags
work alike for every front end: only module names are needed.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ndcompile.graphs.pass_context import PassContext
from ndcompile.graphs.recompute import OUTSIDE, READ_BY_THE_HOST, layer_of


def checkpoint_layers(graph: fx.Graph, context: PassContext) -> None:
    """Tag every node made inside a checkpointed layer."""
    layers = {name: number for number, name in enumerate(context.checkpointed, start=1)}
    if not layers:
        return
    for node in graph.nodes:
        number = layer_of(node.meta.get("custom", {}).get("module", ""), layers)
        if node.op == "call_function" and number != OUTSIDE and "unshard" not in node.meta["custom"]:
            keep = node.target in READ_BY_THE_HOST and not node.meta["differentiable"]
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = number
