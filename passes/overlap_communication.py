"""Start the gathers of weights ahead of their use, and wait for reduced gradients behind what is computed meanwhile.

Runs on the lowered forward and backward graphs.

Before:  w0 = wait(all_gather(p0));  y0 = mm(x, w0);  w1 = wait(all_gather(p1));  y1 = mm(y0, w1)
After:   g0 = all_gather(p0);  g1 = all_gather(p1);  w0 = wait(g0);  y0 = mm(x, w0);  w1 = wait(g1);  y1 = mm(y0, w1)

Before:  d1 = wait(reduce_scatter(g1));  g0 = mm(x, y0);  d0 = wait(reduce_scatter(g0));  return d0, d1
After:   r1 = reduce_scatter(g1);  g0 = mm(x, y0);  r0 = reduce_scatter(g0);  d1 = wait(r1);  d0 = wait(r0);  ...

Before:  s0 = copied(copy_to_device(p0));  g0 = all_gather(s0);  s1 = copied(copy_to_device(p1));  g1 = all_gather(s1)
After:   c0 = copy_to_device(p0);  s0 = copied(c0);  g0 = all_gather(s0);  c1 = copy_to_device(p1);  s1 = copied(c1)

A device runs a collective once what was launched before it is done. So the next gather starts where the current weight
is first used, and runs beside that product. How far ahead is a number of bytes: the new order is a function of the
graph and of the sizes of parameters, alike on all ranks whatever the lengths of their sequences, and it takes one walk
over the graph. A copy from host memory starts one gather ahead of its own: what is computed would wait, in front of a
gather, for the copy that it sends. (Inductor's `reorder_for_compute_comm_overlap` chooses by estimated run times,
does not run in its deterministic mode, and its time to compile grows with the square of the number of layers: see
docs/speed.md.)
"""

from __future__ import annotations

from collections import deque

from torch import fx

from ndcompile.graphs.collective_chains import (
    WAIT,
    Chain,
    by_first_use,
    gradient_reductions,
    weight_copies,
    weight_gathers,
)

AHEAD = 512 * 2**20
"""Bytes of whole weights that are gathered before their turn, and of whole gradients that are being reduced; at least
one of each. A product of 8,192 tokens takes about three times as long as the gather of its weight over NVLink."""

LARGE = AHEAD // 2
"""What a larger one counts for where smaller ones are under way: the head of a large vocabulary would have nothing to
hide behind if it could start only once all before it are done."""


def overlap_communication(graph: fx.Graph) -> None:
    """Put the nodes of the graph in the new order."""
    gathers = weight_gathers(graph)
    weights = by_first_use(graph, gathers + weight_copies(graph, gathers))
    order = _Order(weights, gradient_reductions(graph))
    for node in graph.nodes:
        if node.op != "output":
            order.visit(node)
    order.finish()
    output = graph.output_node()
    for node in order.nodes:
        output.prepend(node)


class _Order:
    """The new order so far, and the collectives under way."""

    def __init__(self, gathers: list[Chain], reductions: list[Chain]) -> None:
        self.nodes: dict[fx.Node, None] = {}
        self.gathers = gathers
        self.gather_of = {
            node: at for at, g in enumerate(gathers) for node in (*g.before, g.start, *g.results, *g.after)
        }
        self.started = self.copied = 0
        self.waited: set[int] = set()
        self.reductions = {chain.start: chain for chain in reductions}
        self.reduced = {node for chain in reductions for node in chain.after}
        self.under_way: deque[tuple[list[fx.Node], int]] = deque()

    def visit(self, node: fx.Node) -> None:
        """Place a node, unless it moves to where it is needed."""
        if node in self.gather_of or node in self.reduced:
            return
        for used in node.all_input_nodes:
            if used in self.gather_of:
                self._need(self.gather_of[used])
        if node in self.reductions:
            self._start()
        self.nodes[node] = None
        if node in self.reductions:
            chain = self.reductions[node]
            self._place(chain.results)
            self._under_way(list(chain.after), chain.size)

    def finish(self) -> None:
        """Place what only the graph's outputs need."""
        for at in range(len(self.gathers)):
            self._need(at)
        while self.under_way:
            self._complete_oldest()

    def _need(self, at: int) -> None:
        """Wait for a weight, behind the start of the next ones."""
        if at in self.waited:
            return
        self.waited.add(at)
        self._start(at)
        while self.copied < len(self.gathers) and self._may_copy():
            self._place(self.gathers[self.copied].copies)
            self.copied += 1
        self._place(self.gathers[at].after)

    def _start(self, at: int = -1) -> None:
        """Start gathers up to that of number `at`, and all that may start before their turn."""
        while self.started < len(self.gathers) and (self.started <= at or self._may_start()):
            chain = self.gathers[self.started]
            self._place([*chain.before, chain.start, *chain.results])
            self.started += 1

    def _may_start(self) -> bool:
        """Whether one more gather fits into the bytes ahead."""
        ahead = [self.gathers[i].size for i in range(self.started) if i not in self.waited]
        return not ahead or sum(ahead) + min(self.gathers[self.started].size, LARGE) <= AHEAD

    def _may_copy(self) -> bool:
        """Whether one more shard may be copied ahead of its gather: at least one, and as many bytes of weights as are
        gathered ahead."""
        ahead = [self.gathers[i].size for i in range(self.started, self.copied)]
        return not ahead or sum(ahead) + min(self.gathers[self.copied].size, LARGE) <= AHEAD

    def _under_way(self, after: list[fx.Node], size: int) -> None:
        self.under_way.append((after, size))
        while len(self.under_way) > 1 and self._bytes_under_way() > AHEAD:
            self._complete_oldest()

    def _bytes_under_way(self) -> int:
        oldest, *later = (size for _, size in self.under_way)
        return min(oldest, LARGE) + sum(later)

    def _complete_oldest(self) -> None:
        """Wait for the oldest reduction; if its result is reduced further, that is under way then."""
        after, size = self.under_way.popleft()
        further = _behind_further_waits(after)
        self._place([node for node in after if node not in further])
        if further:
            self._under_way([node for node in after if node in further], size)

    def _place(self, nodes) -> None:
        self.nodes.update(dict.fromkeys(nodes))


def _behind_further_waits(nodes: list[fx.Node]) -> set[fx.Node]:
    """Those of `nodes`, in order, that wait for a collective which one of them starts, or depend on such a wait."""
    found: set[fx.Node] = set()
    before: set[fx.Node] = set()
    for node in nodes:
        given = node.all_input_nodes
        if not found.isdisjoint(given) or (node.target is WAIT and given[0] in before):
            found.add(node)
        before.add(node)
    return found
