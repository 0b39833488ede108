"""The story of one name: what placed it, how its layout changes, which nodes the passes made for it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from torch import fx

from ndcompile.graphs.dump import dump
from ndcompile.inspection.ranks import held_lines
from ndcompile.inspection.report import BoundaryRow, ParameterRow, Report
from ndcompile.inspection.rules import generic
from ndcompile.inspection.trace import Traced
from ndcompile.loader.rank_reads import spell_bytes


def explain(report: Report, name: str, traced: Traced | None = None) -> str:
    """Text about a module, a parameter (by any of its names, or with `*` for the layers), or a graph node.

    Raises ValueError for other names. Lowered nodes are known while the graphs are, not to a plan read from a file.
    """
    parameters = [row for row in report.parameters if _of(row, name)]
    boundaries = [row for row in report.boundaries if _inside(row.module, generic(name)) and name]
    nodes = list(_node_lines(report, name, traced))
    if not (parameters or boundaries or nodes):
        raise ValueError(_unknown(report, name))
    lines = [f"{name} in {report.model}"]
    for row in parameters:
        lines += [*_parameter(row), *held_lines(report, row)]
    lines += [_boundary(row) for row in boundaries]
    module = _traced_name(report, name)
    for step in report.passes:
        changes = [text for text in step.changes if _names(text[2:], module)]
        if changes:
            lines += [f"pass {step.name}: {step.summary}", *(f"  {text}" for text in changes)]
    if module != name and parameters + boundaries:
        lines.append(f"(the nodes are those of {module}, which stands for it: the layers are alike)")
    return "\n".join(lines + nodes) + "\n"


def _of(row: ParameterRow, name: str) -> bool:
    names = (row.name, *row.fqns, *row.aliases)
    return any(_inside(fqn, name) for fqn in names)


def _inside(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def _parameter(row: ParameterRow) -> Iterator[str]:
    yield f"parameter {row.name} ({len(row.fqns)} of them), {row.dtype}"
    yield f"  rule: {row.rule}"
    if row.fsdp_rule:
        yield f"  after forward: {row.after_forward} the gathered weight, by {row.fsdp_rule}"
    yield f"  global {list(row.shape)} -> " + ", ".join(f"{axis} {place}" for axis, place in row.placements.items())
    yield f"  a rank stores {list(row.local_shape)}, and computes with {list(row.gathered_shape)}"


def _boundary(row: BoundaryRow) -> str:
    moves = [f"{phase} {kind}" for phase, kind in (("forward", row.forward), ("backward", row.backward)) if kind]
    return (
        f"boundary {row.module} on {row.axis}: {row.source} -> {row.destination}, {spell_bytes(row.nbytes)}, "
        f"{row.count} a step; {', '.join(moves) or 'no collective'}"
    )


def _names(text: str, module: str) -> bool:
    """Whether the line of a node is about `module`: the node's module, or the parameter that it is."""
    first, last = text.partition(" = ")[0], text.rsplit(" | ", 1)[-1]
    return _inside(last, module) or _inside(first, module)


def _node_lines(report: Report, name: str, traced: Traced | None) -> Iterator[str]:
    """Lines about the graph node `name`, in every graph that has one."""
    for step in report.passes:
        for text in step.changes:
            if text[2:].partition(" = ")[0] == name:
                yield f"pass {step.name}: {step.summary}\n  {text}"
    if traced is not None:
        graphs = {"behind the passes": traced.captured.module, "forward": traced.forward, "backward": traced.backward}
        for title, module in graphs.items():
            yield from _node_of(module.graph, name, title, traced)


def _node_of(graph: fx.Graph, name: str, title: str, traced: Traced) -> Iterator[str]:
    lines = dump(graph, traced.groups).splitlines()
    for node, line in zip(graph.nodes, lines, strict=True):
        if node.name == name:
            yield f"node of the graph {title}: {line}"
            users = ", ".join(user.name for user in node.users) or "nothing"
            yield f"  used by {users}; stands for {traced.times(node)}"
            if traced.proof is not None and node in traced.proof.facts:
                fact = traced.proof.facts[node]
                yield f"  along tp: {fact}, {fact.words()}"
            source = (node.meta.get("stack_trace") or "").strip().splitlines()
            if len(source) > 1:
                yield f"  {source[-2].strip()}"


def _traced_name(report: Report, name: str) -> str:
    """`name` with the layer that was traced in the place of one like it."""
    if not report.layer_list:
        return name
    found = re.match(rf"{re.escape(report.layer_list)}\.(\d+|\*)", name)
    if found is None:
        return name
    layer = max(map(int, report.layers.values())) if found[1] == "*" else report.layers.get(found[1], found[1])
    return f"{report.layer_list}.{layer}{name[found.end() :]}"


def _unknown(report: Report, name: str) -> str:
    known = {fqn for row in report.parameters for fqn in (row.name, *row.fqns, *row.aliases)}
    known |= {fqn.rpartition(".")[0] for fqn in known} | {row.module for row in report.boundaries}
    close = difflib.get_close_matches(name, sorted(known), n=5)
    return f"{name!r} is no module, parameter or node of this plan. " + (
        f"Close: {', '.join(close)}." if close else f"Names are like {report.parameters[0].name}."
    )
