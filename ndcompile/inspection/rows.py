"""The rows of a report, from the plan and the graphs of a traced step."""

from __future__ import annotations

import dataclasses
import importlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from ndcompile.graphs.saved_activations import saved_activations
from ndcompile.inspection.kernels import is_collective, name_of
from ndcompile.inspection.ranks import cut_dims
from ndcompile.inspection.report import BoundaryRow, CollectiveRow, ParameterRow, PassRow, SavedRow
from ndcompile.inspection.rules import Rules, generic
from ndcompile.inspection.trace import NodeLine, PassView, Traced, module_of, operator_of
from ndcompile.operators.redistribute import REDISTRIBUTE, all_to_all, average_gradient, redistribute, shard, unshard
from ndcompile.plans.plan_table import fold
from ndcompile.plans.sharding_plan import FREE
from ndcompile.private.distributed import StridedShard

SHORT = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
"""Names of collectives in reports."""
GATHER, REDUCE = "all_gather", "reduce_scatter"
COLLECTIVES = {"all_reduce", GATHER, REDUCE}


def parameter_rows(traced: Traced, rules: Rules) -> tuple[ParameterRow, ...]:
    """One row for all parameters that are placed alike, in the model's order."""
    axes = tuple(traced.mesh.device_mesh.mesh_dim_names or ())
    sizes, rows = traced.mesh.device_mesh.shape, []
    for name, group in fold(traced.plan).items():
        first = group[0]
        placements = dict(zip(axes, first.placements(axes), strict=True))
        cut_by, ranges = cut_dims(first.shape, placements, dict(zip(axes, sizes, strict=True)))
        rows.append(
            ParameterRow(
                name=name,
                fqns=tuple(p.fqn for p in group),
                aliases=first.aliases,
                shape=tuple(first.shape),
                dtype=spell(first.dtype),
                placements={axis: _placement(placement) for axis, placement in placements.items()},
                local_shape=tuple(first.storage_shape),
                rule=rules.placed(first),
                style=first.style,
                after_forward="free" if first.fsdp_style == FREE else "keep",
                expert=first.expert,
                fsdp_rule=rules.gathered(first) if traced.plan.sizes["fsdp"] > 1 else "",
                gathered_shape=tuple(first.compute_shape),
                trained=first.fqn not in traced.frozen,
                cut_by=cut_by,
                ranges=ranges,
            )
        )
    return tuple(rows)


def spell(dtype: Any) -> str:
    """A dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def _placement(placement: Placement) -> str:
    if isinstance(placement, Replicate):
        return "R"
    text = shard(placement.dim)  # type: ignore[attr-defined]
    return f"{text} x {placement.split_factor}" if isinstance(placement, StridedShard) else text


def boundary_rows(traced: Traced) -> tuple[BoundaryRow, ...]:
    """The distributed nodes of the graph behind the passes; those of one kind in all layers are one row."""
    counts: dict[BoundaryRow, int] = defaultdict(int)
    for node in traced.captured.module.graph.nodes:
        if (row := _boundary(traced, node)) is not None:
            counts[row] += traced.times(node)
    return tuple(dataclasses.replace(row, count=count) for row, count in counts.items())


def _boundary(traced: Traced, node: fx.Node) -> BoundaryRow | None:
    """The row of one distributed node, its count left open; None for other nodes."""
    group: Any = node.args[1] if len(node.args) > 1 else None
    if node.target is redistribute:
        source, destination = str(node.args[3]), str(node.args[4])
        move, back = (step.__name__ for step in REDISTRIBUTE[source[0], destination[0]])
        forward, backward = (name if name in COLLECTIVES else "" for name in (move, back))
    elif node.target is unshard:
        source, destination, forward, backward = shard(node.args[3]), "R", GATHER, REDUCE  # type: ignore[arg-type]
    elif node.target is average_gradient:
        source, destination, forward, backward = "I", "R", "", "all_reduce"
    elif node.target is all_to_all:
        source, destination, forward, backward = shard(0), shard(0), "all_to_all", "all_to_all"
        group = node.args[3]
    else:
        return None
    entering = node.all_input_nodes[0]
    backward = backward if entering.meta["differentiable"] else ""
    nbytes = traced.nbytes(entering.meta["val"])
    module = generic(module_of(node))
    return BoundaryRow(module, traced.groups[str(group)], source, destination, forward, backward, nbytes, 0)


def collective_rows(traced: Traced, seconds: Mapping[fx.Node, float]) -> tuple[CollectiveRow, ...]:
    """The collectives of the lowered graphs by kind, axis, phase and purpose. seconds: of a node, over all layers."""
    found: dict[tuple[str, str, int, str, str], list[tuple[int, int, float]]] = defaultdict(list)
    for phase, module in (("forward", traced.forward), ("backward", traced.backward)):
        for node in module.graph.nodes:
            if is_collective(node):
                kind = SHORT.get(name_of(node), name_of(node))
                axis = traced.groups[str(node.args[-1])]
                key = (kind, axis, traced.mesh.size(axis), phase, _purpose(traced, node, kind))
                times = traced.times(node)
                found[key].append((times, times * larger_side(traced, node), seconds.get(node, 0.0)))
    rows = []
    for (kind, axis, ranks, phase, purpose), nodes in found.items():
        count, nbytes = sum(n for n, _, _ in nodes), sum(n for _, n, _ in nodes)
        trips = 2 if kind == "all_reduce" else 1
        sent = trips * nbytes * (ranks - 1) // ranks
        rows.append(CollectiveRow(kind, axis, ranks, phase, purpose, count, nbytes, sent, sum(s for _, _, s in nodes)))
    return tuple(rows)


def saved_rows(traced: Traced) -> tuple[SavedRow, ...]:
    """What forward keeps for backward, those alike in all layers as one row, the largest first."""
    found: Counter[tuple[str, str, str, tuple[int, ...]]] = Counter()
    sizes: dict[tuple[str, str, str, tuple[int, ...]], int] = {}
    for node in saved_activations(traced.forward.graph, traced.backward.graph).values():
        value = node.meta["val"]
        shape = tuple(traced.size(length) for length in value.shape)
        key = (generic(module_of(node)), operator_of(node), spell(value.dtype), shape)
        found[key] += traced.times(node)
        sizes[key] = traced.nbytes(value)
    rows = [SavedRow(*key, nbytes=count * sizes[key], count=count) for key, count in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.nbytes))


def larger_side(traced: Traced, node: fx.Node) -> int:
    """Bytes of a collective: gathered, or not yet reduced or scattered."""
    values = [node.meta["val"], node.all_input_nodes[0].meta["val"]]
    return max(traced.nbytes(value) for value in values if isinstance(value, Tensor))


def _purpose(traced: Traced, node: fx.Node, kind: str) -> str:
    custom, module = node.meta.get("custom") or {}, module_of(node)
    if custom.get("unshard") or custom.get("parameter"):
        return "parameters" if kind == GATHER else "gradients"
    if any(module == e.fqn or module.startswith(e.fqn + ".") for e in traced.plan.experts):
        return "experts"
    return "other" if custom.get("auxiliary_loss") else "activations"


def pass_rows(traced: Traced) -> tuple[PassRow, ...]:
    """What each pass did; the first row is the captured graph."""
    rows = [PassRow("captured", "the forward of one rank", _operators(traced, traced.passes[0].lines).total(), {}, {})]
    for before, after in zip(traced.passes, traced.passes[1:], strict=False):
        changes = changed(before, after)
        added, removed = (_operators(traced, [line for sign, line in changes if sign == s]) for s in "+-")
        rows.append(
            PassRow(
                after.name,
                _summary(after.name),
                _operators(traced, after.lines).total(),
                dict(added),
                dict(removed),
                tuple(f"{sign} {line.text}" for sign, line in changes),
            )
        )
    return tuple(rows)


def _operators(traced: Traced, lines: Sequence[NodeLine]) -> Counter[str]:
    """How often each operator stands in the graph of the whole model; inputs and output are ""."""
    counts: Counter[str] = Counter()
    for line in lines:
        counts[line.operator] += traced.stack.count(line.module)
    return counts


def changed(before: PassView, after: PassView) -> list[tuple[str, NodeLine]]:
    """Nodes that a pass added (+), removed (-), or gave other inputs or another type (~), in the graph's order."""
    old, new = ({line.name: line for line in view.lines} for view in (before, after))
    same = {name for name in old.keys() & new.keys() if old[name].operator == new[name].operator}
    removed = [("-", line) for line in before.lines if line.name not in same]
    lines = [
        ("~" if n.name in same else "+", n) for n in after.lines if n.name not in same or n.text != old[n.name].text
    ]
    return removed + lines


def _summary(name: str) -> str:
    """The first sentence of a pass's file."""
    text = importlib.import_module(f"ndcompile.passes.{name}").__doc__ or ""
    return " ".join(text.split("\n\n")[0].split()).removesuffix(".")
