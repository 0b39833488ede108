"""Compute while tokens are under way to their experts and back, and while the host reads how many they are.

Runs on the lowered forward and backward graphs, in front of `overlap_communication`.

Before:  a = wait(all_to_all(rows));  y = experts(a);  b = wait(all_to_all(y));  s = down(up(x));  return b + s
After:   r = all_to_all(rows);  u = up(x);  a = wait(r);  y = experts(a);
         t = all_to_all(y);  s = down(u);  b = wait(t);  return b + s

Before:  g = wait(all_to_all(d));  dw = grouped_mm(g.t(), h);  dh = grouped_mm(g, w.t());  e = wait(all_to_all(dh))
After:   g = wait(all_to_all(d));  dh = grouped_mm(g, w.t());
         r = all_to_all(dh);  dw = grouped_mm(g.t(), h);  e = wait(r)

Before:  host = to_cpu(counts);  sizes = checked_splits(host);  r = all_to_all(hidden[order], sizes)
After:   c = start_host_read(counts);  rows = hidden[order];
         sizes = checked_splits(end_host_read(c, counts, [rows]));  r = all_to_all(rows, sizes)

Before:  a = wait(all_to_all(rows));  order = sort(expert_of_each_row);  y = experts(a[order])
After:   r = all_to_all(rows);  order = sort(expert_of_each_row);  a = wait(r);  y = experts(a[order])

What runs beside an exchange are matrix products that do not depend on it, and what only they need:

- between an exchange and the one back: what the latter does not need, that is the gradients of the experts' weights;
- in front of a layer's first exchange: shared experts that come before the router; in backward gradients of weights
  that are computed there, whose reductions then start behind the exchange;
- behind a layer's last exchange: shared experts that come after the routed ones, or their gradients.

If the exchange back has products of its own, all others go beside the first one. Otherwise, in forward, those that
another one waits for go beside the first, and the last of them beside the second. Nothing moves further than to the
nearest layer with exchanges, and no layer is recomputed earlier, so that memory is held for no longer than that.
Element-by-element operators at the end stay where they are, where they are fused with what uses them. The order depends
on the graph's structure and on sizes of parameters alone, so that collectives have the same order on all ranks,
whatever the lengths of their sequences.
"""

from __future__ import annotations

import math

from torch import Tensor, fx

from ndcompile.graphs.exchanges import GRADIENT_BYTES, Exchange, Surroundings, ancestors, dependents, waited_for
from ndcompile.operators.host_reads import host_reads, launch_before, part_copy_from_read


def overlap_dispatch(graph: fx.Graph) -> None:
    """Put the nodes of the graph in the new order; a graph without exchanges of tokens stays as it is."""
    if not Surroundings(graph).layers:
        return
    held = {wait for read in host_reads(graph) for wait in part_copy_from_read(graph, read)}
    around = Surroundings(graph)
    since: fx.Node | None = None
    for layer, behind in zip(around.layers, [*around.layers[1:], None], strict=True):
        _fill(around, layer, since, behind[0].start if behind else None, held)
        since = layer[-1].wait
    _reorder(graph, around, held)


def _fill(
    around: Surroundings, layer: list[Exchange], since: fx.Node | None, until: fx.Node | None, held: set[fx.Node]
) -> None:
    """Choose what runs beside the exchanges of a layer; its neighbours' end at `since` and begin at `until`.

    held: gets the nodes that are not to be placed where they are.
    """
    first, last = layer[0], layer[-1]
    if first is not last:
        loose = around.loose(around.before(last.start, first.wait), last.start, held, most=math.inf)
        last.fill, last.after = loose.roots, loose.follow
        held |= loose.held
    loose = around.loose(around.before(first.start, since), first.start, held, most=GRADIENT_BYTES)
    products = [*loose.roots, *around.independent(layer, until)]
    late: set[fx.Node] = set()
    if first is not last and not last.fill and not any(node in around.reductions for node in products):
        ordered = sorted(products, key=around.at.__getitem__)
        needed = waited_for(products, around.between(ordered[0], ordered[-1]) if products else [])
        late = set(products) - needed if needed else set(products) - set(loose.roots)
    later = dependents(late, loose.follow)
    first.fill += [node for node in products if node not in late]
    last.fill += [node for node in products if node in late]
    first.after += [node for node in loose.follow if node not in later | ancestors(late, loose.follow)]
    last.after += [node for node in loose.follow if node in later]
    held |= loose.held | set(products)


def _reorder(graph: fx.Graph, around: Surroundings, held: set[fx.Node]) -> None:
    rows, numbers = _rows_of_reads(graph, around), _numbers_of_rows(around, held)
    exchange = {each.wait: each for layer in around.layers for each in layer}
    placed: dict[fx.Node, None] = {}
    for node in around.nodes:
        if node in around.gathers or node in held:
            continue
        fill = exchange[node].fill if node in exchange else rows.get(node, [])
        after = exchange[node].after if node in exchange else []
        for each in (*numbers.get(node, []), *sorted(fill, key=around.at.__getitem__), node, *after):
            _place(each, placed)
    for node in around.nodes:
        _place(node, placed)
    output = graph.output_node()
    for node in placed:
        output.prepend(node)


def _rows_of_reads(graph: fx.Graph, around: Surroundings) -> dict[fx.Node, list[fx.Node]]:
    """A read of the host -> the rows that the exchange behind it sends: they are put together in front of it."""
    found, starts = {}, [each.start for layer in around.layers for each in layer]
    for read in host_reads(graph):
        behind = [start for start in starts if around.at[start] > around.at[read]]
        if behind and read not in ancestors([rows := behind[0].all_input_nodes[0]], around.between(read, rows)):
            found[read] = [rows]
            launch_before(read, [rows])
    return found


def _numbers_of_rows(around: Surroundings, held: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """The wait for a layer's rows -> the integers behind it that do not depend on it: which expert each row goes to, in
    which order, and how many there are of each."""
    found = {}
    for layer in around.layers:
        behind = around.before(layer[-1].start, layer[0].wait) if len(layer) > 1 else []
        late = dependents([layer[0].wait], behind)
        found[layer[0].wait] = [n for n in behind if _holds_integers(n) and n not in late and n not in held]
    return found


def _holds_integers(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not value.dtype.is_floating_point


def _place(node: fx.Node, placed: dict[fx.Node, None]) -> None:
    """Place a node behind what it depends on, which is placed now where it was not yet."""
    waiting = [node]
    while waiting:
        missing = [each for each in waiting[-1].all_input_nodes if each not in placed]
        waiting += reversed(missing)
        if not missing:
            placed[waiting.pop()] = None
