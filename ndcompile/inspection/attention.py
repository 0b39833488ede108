"""Attention as GPUs run it, in a graph that is traced on the CPU.

On the CPU there is no fused kernel for values that are narrower than the keys (multi-head latent attention), so the
matrix of all scores would be counted, which GPUs never write: there `scaled_dot_product_attention` takes the memory
efficient kernel.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

aten = torch.ops.aten


def fuse_attention(graph: fx.Graph) -> None:
    """Replace attention that only GPUs fuse by the operator that they run. Only shapes are asked of it."""
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        query, key, value = (source.meta["val"] for source in node.args[:3])
        if query.shape[-1] == value.shape[-1] or query.shape[-3] != key.shape[-3]:
            continue
        given = _arguments(node)
        inputs = (*node.args[:3], given["attn_mask"], True, given["dropout_p"], given["is_causal"])
        with graph.inserting_before(node):
            fused = graph.call_function(aten._scaled_dot_product_efficient_attention.default, inputs)
            fused.kwargs = {"scale": given["scale"]}
            output = graph.call_function(operator.getitem, (fused, 0))
        fused.meta, output.meta = dict(node.meta), dict(node.meta)
        node.replace_all_uses_with(output)
        graph.erase_node(node)


def _arguments(node: fx.Node) -> dict[str, fx.node.Argument]:
    """The arguments of an operator by name, defaults included."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = {a.name: value for a, value in zip(schema, node.args, strict=False)}
    return {a.name: a.default_value for a in schema} | given | node.kwargs
