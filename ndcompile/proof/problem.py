"""What is not proven of a node, and what it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from ndcompile.plans.sharding_plan import ShardingPlan


@dataclass(frozen=True)
class Problem:
    """What is not proven of a node: the reason, what repairs it, and what its operands are, in words."""

    node: fx.Node
    reason: str
    repair: str
    operands: Mapping[str, str]


def module_of(node: fx.Node) -> str:
    return (node.meta.get("custom") or {}).get("module", "")


def exchanged(node: fx.Node, plan: ShardingPlan) -> bool:
    """Whether a node is of experts that get their tokens by an exchange."""
    module = f"{module_of(node)}."
    return any(module.startswith(f"{experts.fqn}.") for experts in plan.experts)
