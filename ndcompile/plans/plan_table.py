"""A sharding plan as a terminal table: one line for all layers that are placed alike."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from math import prod

from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from ndcompile.plans.sharding_plan import ParameterPlan, ShardingPlan


def plan_table(plan: ShardingPlan, width: int = 118) -> str:
    """Text of the plan, `width` columns at most."""
    mesh = " x ".join(f"{name}={size}" for name, size in plan.sizes.items() if size > 1) or "one rank"
    table = Table(title=f"{plan.model} on {mesh}", title_justify="left")
    table.add_column("parameter", overflow="fold")
    for column in ("n", "global shape", "tp", "fsdp", "local shape"):
        table.add_column(column, no_wrap=True)
    table.add_column("style", overflow="fold")
    table.add_column("after forward", width=7)
    for name, group in fold(plan).items():
        first = group[0]
        table.add_row(
            name + "".join(f"\n= {alias}" for alias in first.aliases),
            str(len(group)),
            _shape(first.shape),
            _placement(first.tp) + (" on ep" if first.expert else ""),
            _placement(first.fsdp) + (" on efsdp" if first.expert and _placement(first.fsdp) else ""),
            _shape(first.storage_shape),
            first.style if plan.sizes["tp"] > 1 or first.expert else "",
            first.fsdp_style.split("_")[0] if plan.sizes["fsdp"] > 1 else "",
        )
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    total = sum(prod(p.shape) for p in plan.parameters)
    local = sum(prod(p.storage_shape) for p in plan.parameters)
    console.print(f"{total:,} parameters, {local:,} on a rank; {len(plan.modules)} boundary modules")
    for line in [*map(str, plan.repairs), *count_lines(plan), *exchange_lines(plan)]:
        console.print(line)
    return console.file.getvalue()  # type: ignore[attr-defined]


def count_lines(plan: ShardingPlan) -> list[str]:
    """The integers of which a rank's code sees its share."""
    names = sorted({re.sub(r"\.\d+(?=\.)", ".*", name) for name in plan.local_counts})
    return [f"{name}: a rank's share of it" for name in names]


def exchange_lines(plan: ShardingPlan) -> list[str]:
    """How the experts get their tokens, one line for all layers that do it alike."""
    layers: dict[str, list[str]] = defaultdict(list)
    for experts in plan.experts:
        room = "" if experts.capacity is None else f", capacity {experts.capacity:g}"
        line = f"{experts.count} experts, {experts.local} on a rank: {experts.exchange}{room} ({experts.reason})"
        layers[line].append(experts.fqn)
    return [f"{re.sub(r'[.][0-9]+[.]', '.*.', names[0])} x {len(names)}: {line}" for line, names in layers.items()]


def fold(plan: ShardingPlan) -> dict[str, list[ParameterPlan]]:
    """Parameters that are placed alike under one name, with `*` for the number of the layer."""
    groups: dict[tuple[object, ...], list[ParameterPlan]] = defaultdict(list)
    for p in plan.parameters:
        name = re.sub(r"\.\d+\.", ".*.", p.fqn)
        groups[name, p.shape, str(p.tp), str(p.fsdp), p.style, p.fsdp_style, p.expert].append(p)
    folded: dict[str, list[ParameterPlan]] = {}
    for key, group in groups.items():
        name = str(key[0]) if len(group) > 1 else group[0].fqn
        folded[name if name not in folded else group[0].fqn] = group
    return folded


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _placement(placement: Placement) -> str:
    return "" if isinstance(placement, Replicate) else str(placement).replace("_", "")
