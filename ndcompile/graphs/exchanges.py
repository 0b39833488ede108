"""Exchanges of tokens in a lowered graph, and which nodes around them do not depend on them.

A MoE layer has two by all-to-all: tokens go to the ranks of their experts, and results come back. In backward their
gradients go and come back in the same way. Nodes are told apart by what depends on what and by what parameters are, not
by sizes of tokens: ranks with other lengths of their sequences find the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import fx

from ndcompile.graphs.collective_chains import WAIT, collectives, gradient_reductions, weight_gathers

aten = torch.ops.aten

ALL_TO_ALL = collectives.all_to_all_single.default

PRODUCTS = (aten.mm.default, aten.addmm.default, aten._grouped_mm.default)
"""Operators that take long enough to hide an exchange."""

GRADIENT_BYTES = 512 * 2**20
"""Of gradients that are put off at most, to behind the start of one exchange. The gradient of a large vocabulary's
head, which holds on to that of all logits, is not among them."""

MOST = 16
"""Products that are moved into one exchange from in front of it, and from behind it."""


@dataclass(eq=False)
class Exchange:
    """One all-to-all of rows. fill: nodes to run while it is under way. after: nodes to place behind its wait."""

    start: fx.Node
    wait: fx.Node
    fill: list[fx.Node] = field(default_factory=list)
    after: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True)
class Loose:
    """Nodes in front of an exchange that it does not depend on, and that may run behind its start.

    roots: products, and starts of reductions of gradients, in order. follow: what depends on them, in order. held:
    both, and what only they need.
    """

    roots: list[fx.Node]
    follow: list[fx.Node]
    held: set[fx.Node]


class Surroundings:
    """A graph with its exchanges, in order, those of one layer together: [there, back]."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = [node for node in graph.nodes if node.op != "output"]
        self.at = {node: number for number, node in enumerate(self.nodes)}
        self.gathers = {n for g in weight_gathers(graph) for n in (*g.before, g.start, *g.results, *g.after)}
        self.reductions = {chain.start: chain for chain in gradient_reductions(graph)}
        self.layers = _layers([e for node in self.nodes if (e := _exchange(node))])
        self.walls = [self.at[node] for node in self.nodes if writes(node)]
        self.gradients = dependents([node for node in self.nodes if _is_tangent(node)], self.nodes)

    def before(self, node: fx.Node, since: fx.Node | None) -> list[fx.Node]:
        """The nodes between `since` (None: the first node) and `node`, from the last that writes on."""
        first = 0 if since is None else self.at[since] + 1
        first = max([first, *(wall + 1 for wall in self.walls if wall < self.at[node])])
        return self._movable(first, self.at[node])

    def behind(self, node: fx.Node, until: fx.Node | None) -> list[fx.Node]:
        """The nodes between `node` and `until` (None: the last node), up to the first that writes."""
        last = len(self.nodes) if until is None else self.at[until]
        last = min([last, *(wall for wall in self.walls if wall > self.at[node])])
        return self._movable(self.at[node] + 1, last)

    def between(self, first: fx.Node, last: fx.Node) -> list[fx.Node]:
        """The nodes from `first` to `last`, both among them."""
        return self.nodes[self.at[first] : self.at[last] + 1]

    def _movable(self, first: int, last: int) -> list[fx.Node]:
        nodes = self.nodes[first:last]
        return [node for node in nodes if node.op == "call_function" and node not in self.gathers]

    def loose(self, stretch: Sequence[fx.Node], start: fx.Node, taken: Collection[fx.Node], most: float) -> Loose:
        """What of a stretch in front of `start` may run behind it, the nearest nodes first.

        taken: nodes that have another place. most: bytes of gradients whose reductions may be put off. If it is a
        limit, so is MOST, of products that no reduction in the stretch waits for.
        """
        needed = ancestors([start], stretch)
        free = [n for n in stretch if n not in needed and n not in taken and self.alike(n, start)]
        reductions = [node for node in free if node in self.reductions]
        sizes = accumulate(self.reductions[node].size for node in reversed(reductions))
        near = {node for node, size in zip(reversed(reductions), sizes, strict=True) if size <= most}
        reduced, soon = ancestors(reductions, free), ancestors(near, free)
        others = [node for node in free if is_product(node) and node not in reduced]
        chosen = {*near, *(others if most == math.inf else others[-MOST:])}
        roots = [node for node in free if node in chosen or (is_product(node) and node in soon)]
        behind = dependents(roots, free).difference(roots)
        follow = [node for node in free if node in behind]
        return Loose(roots, follow, _only_for([*roots, *follow], free))

    def independent(self, layer: Sequence[Exchange], until: fx.Node | None) -> list[fx.Node]:
        """The first MOST products between a layer's last exchange and `until` that depend on none of its exchanges, nor
        on another collective behind them."""
        stretch = self.behind(layer[-1].wait, until)
        waits = [*(each.wait for each in layer), *(node for node in stretch if node.target is WAIT)]
        late = dependents(waits, self.nodes[self.at[layer[0].wait] : None if until is None else self.at[until]])
        start = layer[0].start
        return [n for n in stretch if is_product(n) and n not in late and self.alike(n, start)][:MOST]

    def alike(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether both compute gradients or neither does. A layer that is recomputed in backward must not begin before
        the gradients of the layer behind it are done: both layers' activations would be there."""
        return (one in self.gradients) == (other in self.gradients)


def is_product(node: fx.Node) -> bool:
    """Whether a node is a matrix product of some size; one of a single column is not."""
    if node.target not in PRODUCTS:
        return False
    shape = node.meta["val"].shape
    return not (isinstance(shape[-1], int) and shape[-1] == 1)


def ancestors(of: Iterable[fx.Node], among: Iterable[fx.Node]) -> set[fx.Node]:
    """`of`, and what they depend on directly or through others, `among` these."""
    allowed, waiting = among if isinstance(among, set) else set(among), list(of)
    found = set(waiting)
    while waiting:
        fresh = [each for each in waiting.pop().all_input_nodes if each in allowed and each not in found]
        found.update(fresh)
        waiting += fresh
    return found


def dependents(of: Iterable[fx.Node], among: Sequence[fx.Node]) -> set[fx.Node]:
    """`of`, and what depends on them directly or through others, `among` these, which are in order."""
    found = set(of)
    for node in among:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _only_for(roots: Iterable[fx.Node], among: Sequence[fx.Node]) -> set[fx.Node]:
    """`roots`, and the nodes that nothing `among` these uses but for them."""
    found, inside = set(roots), set(among)
    for node in reversed(among):
        users = [user for user in node.users if user in inside]
        if users and found.issuperset(users):
            found.add(node)
    return found


def waited_for(products: Sequence[fx.Node], among: Iterable[fx.Node]) -> set[fx.Node]:
    """The products that another one of them depends on, through nodes `among` these."""
    read = [node for product in products for node in product.all_input_nodes]
    return ancestors(set(read).intersection(inside := set(among)), inside).intersection(products)


def _exchange(node: fx.Node) -> Exchange | None:
    """The exchange that starts at a node, unless what it sends is indices or counts."""
    if node.target is not ALL_TO_ALL or not node.meta["val"].dtype.is_floating_point:
        return None
    waits = [user for user in node.users if user.target is WAIT]
    return Exchange(node, waits[0]) if len(waits) == 1 else None


def _layers(exchanges: Sequence[Exchange]) -> list[list[Exchange]]:
    """Exchanges there and back: two in a row with the same numbers of rows."""
    layers: list[list[Exchange]] = []
    for exchange in exchanges:
        last = layers[-1] if layers else []
        if len(last) == 1 and _rows(last[0]) == _rows(exchange):
            last.append(exchange)
        else:
            layers.append([exchange])
    return layers


def _rows(exchange: Exchange) -> frozenset[tuple]:
    receive, send = exchange.start.args[1:3]
    return frozenset([tuple(receive), tuple(send)])  # type: ignore[arg-type]


def _is_tangent(node: fx.Node) -> bool:
    """Whether a node is one of a backward graph's inputs from which gradients come, by AOTAutograd's name for them."""
    return node.op == "placeholder" and node.name.startswith("tangents")


def writes(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
