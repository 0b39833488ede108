"""Run the collectives on large weights of a layer a few at a time: one launch, and no copy.

Runs on the lowered forward and backward graphs, behind `bucket_collectives`, which puts small ones into one tensor.

Before:  w0 = wait(all_gather(p0));  y0 = mm(x, w0);  w1 = wait(all_gather(p1));  y1 = mm(y0, w1)
After:   g0, g1 = all_gather_coalesced([p0, p1]);  w0 = wait(g0);  w1 = wait(g1);  y0 = mm(x, w0);  y1 = mm(y0, w1)

A kernel of NCCL needs multiprocessors, all of which a matrix product holds until it ends. So a collective that is
launched beside a product starts behind it, and of several collectives one runs a product: they queue up. Launched
together they are one kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable

from torch import fx

from ndcompile.graphs.collective_chains import TOGETHER, WAIT, Chain, gradient_reductions, weight_gathers
from ndcompile.graphs.graph_edits import call, raise_inputs

MOST = 256 * 2**20
"""Bytes of whole weights or gradients that are gathered or reduced together: half of what `overlap_communication`
keeps under way."""


def coalesce_collectives(graph: fx.Graph) -> None:
    """Put neighbours of one layer, kind, group and dtype together, up to MOST bytes."""
    for together in _neighbours(weight_gathers(graph)):
        first = _first(graph, [chain.start for chain in together])
        raise_inputs(graph, first, [given for chain in together for given in chain.start.all_input_nodes])
        _start(graph, together, first)
    for together in _neighbours(gradient_reductions(graph)):
        anchor = last = together[-1].start
        for chain in together:
            for node in chain.after:
                anchor.append(node)
                anchor = node
        _start(graph, together, last)


def _neighbours(chains: Iterable[Chain]) -> list[list[Chain]]:
    """Groups of two or more, each of one layer."""
    found: list[list[Chain]] = [[]]
    for chain in chains:
        last = found[-1]
        size = sum(each.size for each in last) + chain.size
        alone = chain.start.target not in TOGETHER
        if alone or (last and (_key(last[0].start) != _key(chain.start) or size > MOST)):
            found.append(last := [])
        if not alone:
            last.append(chain)
    return [chains for chains in found if len(chains) > 1]


def _key(start: fx.Node) -> Hashable:
    return (start.target, *start.args[1:], start.meta["val"].dtype, start.meta.get("custom", {}).get("layer"))


def _first(graph: fx.Graph, nodes: list[fx.Node]) -> fx.Node:
    wanted = set(nodes)
    return next(node for node in graph.nodes if node in wanted)


def _start(graph: fx.Graph, together: list[Chain], at: fx.Node) -> None:
    """Replace the starts of several collectives by one, where the start `at` is."""
    _, *settings = at.args
    with graph.inserting_before(at):
        given = [chain.start.args[0] for chain in together]
        start = call(graph, TOGETHER[at.target], (given, *settings), at)  # type: ignore[index]
        results = [call(graph, operator.getitem, (start, number), at) for number in range(len(together))]
    for chain, result in zip(together, results, strict=True):
        assert all(user.target is WAIT for user in chain.start.users)
        chain.start.replace_all_uses_with(result)
        graph.erase_node(chain.start)
