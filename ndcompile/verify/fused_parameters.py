"""Fused projections: which parameter a node takes apart, into how many parts, and whether its shards allow that.

Half of a rank's shard of a fused gate and up projection is no shard of the gate, unless each half was sharded by
itself ("packed").
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ndcompile.capture.graph_input import PARAMETER
from ndcompile.plans.sharding_plan import ShardingPlan
from ndcompile.private.distributed import StridedShard
from ndcompile.verify.sharded_dims import SPLITS, Dims


def packed_values(graph: fx.Graph, plan: ShardingPlan, dims: Dims) -> set[fx.Node]:
    """Nodes whose shards are a packed parameter's: several parts, each sharded by itself."""
    packed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            source = node.meta["input"]
            if source.kind == PARAMETER and isinstance(plan.by_name[source.name].tp, StridedShard):
                packed.add(node)
        elif node.target in SPLITS and node.args[0] in packed:
            continue  # its parts are plain shards
        elif node in dims and any(source in packed and source in dims for source in node.all_input_nodes):
            packed.add(node)
    return packed


def parameters_before(node: fx.Node, dims: Dims) -> list[str]:
    """FQNs of the sharded parameters that a sharded value is made of, the nearest first."""
    found, reached = [], [node]
    for each in reached:  # grows: breadth first
        if each.op == "placeholder" and each.meta["input"].kind == PARAMETER:
            found.append(each.meta["input"].name)
        reached += [source for source in each.all_input_nodes if source in dims and source not in reached]
    return found


def parts_taken(node: fx.Node) -> int:
    """Into how many equal parts a node of SPLITS takes its value apart; 0 for unequal ones."""
    parts = node.meta["val"]
    whole: Any = node.args[0].meta["val"]  # type: ignore[union-attr]
    if isinstance(parts, list | tuple):
        return len(parts) if len({part.shape for part in parts}) == 1 else 0
    number, rest = divmod(whole.numel(), parts.numel() or 1)  # a slice
    return number if rest == 0 else 0


def rule_of(fqn: str) -> str:
    """The module, or the parameter of its own, that a plan names to place a parameter."""
    return fqn.removesuffix(".weight").removesuffix(".bias")
