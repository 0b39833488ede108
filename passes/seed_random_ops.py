"""Replace random operators by ones that draw from an explicit seed, chosen by the type of their input.

Before:

    h = aten.dropout(x, 0.1, True)

After (x invariant over tp: all ranks of the group draw the same mask; a varying x would take `seed_1`):

    seed_0 = select(seeds, 0, 0)
    h = ndcompile.dropout(x, 0.1, seed_0, 7)

`seeds` is a new graph input: int64 (2,), for invariant and for varying values. Data ranks are given different seeds.
"""

from __future__ import annotations

import torch
from torch import fx

from ndcompile.capture.graph_input import GraphInput
from ndcompile.capture.opaque import is_opaque
from ndcompile.errors import VerifyError
from ndcompile.graphs.pass_context import PassContext
from ndcompile.operators.random_ops import attention_op, dropout_op
from ndcompile.verify.type_inference import varying_over_tp

aten = torch.ops.aten


def seed_random_ops(graph: fx.Graph, context: PassContext) -> None:
    """Rewrite dropout and attention with dropout, and give opaque modules a seed; refuse what else is random on tp."""
    tp = context.axis("tp")
    varying = varying_over_tp(graph, context.plan, tp.group) if tp is not None else set()
    for salt, node in enumerate(list(graph.nodes)):
        if node.target is aten.dropout.default:
            x, p, training = node.args
            if training and p:
                seed = _seed(graph, node, varying, context)
                _replace(graph, node, dropout_op, (x, p, seed, salt))
            else:
                node.replace_all_uses_with(x)
                graph.erase_node(node)
        elif node.target is aten.scaled_dot_product_attention.default:
            if not _argument(node, 4, "dropout_p", 0.0):
                continue
            query, key, value = node.args[:3]
            mask, p = _argument(node, 3, "attn_mask", None), _argument(node, 4, "dropout_p", 0.0)
            causal, scale = _argument(node, 5, "is_causal", False), node.kwargs.get("scale")
            seed = _seed(graph, node, varying, context)
            _replace(graph, node, attention_op, (query, key, value, mask, p, causal, scale, seed, salt))
        elif is_opaque(node):
            _replace(graph, node, node.target, (_seed(graph, node, varying, context), salt, *node.args[2:]))
        elif tp is not None and _is_random(node):
            raise VerifyError(
                f"{node.target} in {node.meta.get('custom', {}).get('module', '')!r} is random, and whether the ranks "
                "of a tp group must draw alike is unknown. Known are dropout and attention dropout: use tp=1."
            )


def _seed(graph: fx.Graph, node: fx.Node, varying: set[fx.Node], context: PassContext) -> fx.Node:
    with graph.inserting_before(node):
        seeds = _seeds_input(graph, context)
        seed = graph.call_function(aten.select.int, (seeds, 0, int(node in varying)))
    seed.meta.update(val=context.fake((), torch.int64), differentiable=False)
    return seed


def _seeds_input(graph: fx.Graph, context: PassContext) -> fx.Node:
    placeholders = graph.find_nodes(op="placeholder")
    for placeholder in placeholders:
        if placeholder.meta["input"].kind == "seeds":
            return placeholder
    with graph.inserting_after(placeholders[-1]):
        seeds = graph.placeholder("seeds")
    seeds.meta.update(input=GraphInput("seeds", "seeds"), val=context.fake((2,), torch.int64), differentiable=False)
    return seeds


def _replace(graph: fx.Graph, node: fx.Node, target: object, args: tuple) -> None:
    with graph.inserting_before(node):
        replacement = graph.call_function(target, args)  # type: ignore[arg-type]
    replacement.meta.update(node.meta)
    node.replace_all_uses_with(replacement)
    graph.erase_node(node)


def _argument(node: fx.Node, position: int, name: str, default: object):
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def _is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
