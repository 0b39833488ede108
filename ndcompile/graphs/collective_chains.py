"""Gathers of weights and reductions of gradients in a lowered graph, each with the nodes that belong to it alone.

What depends on nothing but a parameter may move as one: from the stored shard to the all-gather (`before`, `start`),
and from its wait to the first use (`after`). So may the copy of a parameter in host memory that nothing gathers. In the
same way all that follows the start of a gradient's reduction, if it ends in an output of the graph, may wait until the
reduction is done.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from ndcompile.operators.host_copies import COPY

collectives = torch.ops._c10d_functional

GATHER = collectives.all_gather_into_tensor.default
REDUCE_SCATTER = collectives.reduce_scatter_tensor.default
WAIT = collectives.wait_tensor.default
TOGETHER = {
    GATHER: collectives.all_gather_into_tensor_coalesced.default,
    REDUCE_SCATTER: collectives.reduce_scatter_tensor_coalesced.default,
}
"""Collective -> the same of several tensors at once, whose results are a list."""
GATHERS = (GATHER, TOGETHER[GATHER])
REDUCTIONS = (REDUCE_SCATTER, TOGETHER[REDUCE_SCATTER], collectives.all_reduce.default)


@dataclass(frozen=True, eq=False)
class Chain:
    """One collective, or copy. `size`: bytes of the whole weights or gradients, of which the other side are shards.
    `results`: what is taken from the list that a collective of several tensors starts."""

    before: tuple[fx.Node, ...]
    start: fx.Node
    after: tuple[fx.Node, ...]
    size: int
    results: tuple[fx.Node, ...] = ()

    @property
    def wait(self) -> fx.Node:
        return self.after[0]

    @property
    def copies(self) -> list[fx.Node]:
        """The starts of copies from host memory, which need nothing but parameters."""
        return [node for node in (*self.before, self.start) if node.target is COPY]


def weight_gathers(graph: fx.Graph) -> list[Chain]:
    """All-gathers of parameters, in the order in which their weights are first used."""
    position = {node: number for number, node in enumerate(graph.nodes)}
    chains = []
    for start in (node for node in graph.nodes if node.target in GATHERS):
        before = _from_placeholders(start)
        size = _bytes(start)
        if "unshard" in start.meta.get("custom", {}) and before is not None and size is not None:
            results, after = _behind(start, position)
            chains.append(Chain(tuple(sorted(before, key=position.__getitem__)), start, after, size, results))
    return by_first_use(graph, chains)


def weight_copies(graph: fx.Graph, gathers: list[Chain]) -> list[Chain]:
    """Copies of parameters from host memory that belong to none of the `gathers`, in the order of their first use."""
    position = {node: number for number, node in enumerate(graph.nodes)}
    gathered = {node for chain in gathers for node in chain.copies}
    chains = []
    for start in graph.find_nodes(op="call_function", target=COPY):
        size, after = _bytes(start), sorted(_dependents(start), key=position.__getitem__)
        if start not in gathered and size is not None and after:
            chains.append(Chain((), start, tuple(after), size))
    return by_first_use(graph, chains)


def by_first_use(graph: fx.Graph, chains: list[Chain]) -> list[Chain]:
    """Chains in the order in which other nodes use their results."""
    position = {node: number for number, node in enumerate(graph.nodes)}
    return sorted(chains, key=lambda chain: min(map(position.__getitem__, _users(chain)), default=len(position)))


def gradient_reductions(graph: fx.Graph) -> list[Chain]:
    """Reduce-scatters and all-reduces of parameters' gradients whose results go to outputs of the graph and nowhere
    else, in their order.

    Not of other gradients, such as those of embeddings that a caller gives: their sizes are those of a rank's tokens,
    and what is moved must not depend on these. A reduction of a reduction's result (the all-reduce of dp_replicate) is
    part of the first one's chain.
    """
    position = {node: number for number, node in enumerate(graph.nodes)}
    chains: list[Chain] = []
    inside: set[fx.Node] = set()
    for start in graph.nodes:
        if start.target not in REDUCTIONS or start in inside or not _is_of_parameter(start):
            continue
        sizes = [_bytes(given) for given in start.all_input_nodes]
        known = [size for size in sizes if size is not None]
        results, after = _behind(start, position)
        chain = Chain((), start, after, sum(known), results)
        if after and len(known) == len(sizes) and all(user.op == "output" for user in _users(chain)):
            chains.append(chain)
            inside |= set(after)
    return chains


def _users(chain: Chain) -> set[fx.Node]:
    """The nodes outside of the chain that use its results."""
    return {user for node in chain.after for user in node.users} - set(chain.after)


def _from_placeholders(start: fx.Node) -> set[fx.Node] | None:
    """The nodes between placeholders and `start`; None if something else comes into it, such as an activation."""
    found: set[fx.Node] = set()
    waiting = list(start.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder" or node in found:
            continue
        if not node.all_input_nodes or node.target in (*GATHERS, *REDUCTIONS):
            return None
        found.add(node)
        waiting.extend(node.all_input_nodes)
    return found


def _is_of_parameter(start: fx.Node) -> bool:
    """Whether a reduction came from the gather of a parameter, or from the sum of its gradient over tp."""
    return not {"unshard", "parameter"}.isdisjoint(start.meta.get("custom", {}))


def _behind(start: fx.Node, position: dict[fx.Node, int]) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """What is taken from a start's list, and all that follows, in order."""
    several = start.target in TOGETHER.values()
    results = [user for user in start.users if several and user.target is operator.getitem]
    after = _dependents(start).difference(results)
    return tuple(sorted(results, key=position.__getitem__)), tuple(sorted(after, key=position.__getitem__))


def _dependents(start: fx.Node) -> set[fx.Node]:
    """All nodes that depend on `start` and on nothing else, the output excepted."""
    found = {start}
    waiting = [start]
    while waiting:
        for user in waiting.pop().users:
            if user not in found and user.op != "output" and found.issuperset(user.all_input_nodes):
                found.add(user)
                waiting.append(user)
    return found - {start}


def _bytes(node: fx.Node) -> int | None:
    """The size of a node's tensors; None where it is symbolic, so that ranks could disagree about it."""
    values = node.meta["val"] if isinstance(node.meta["val"], list | tuple) else [node.meta["val"]]
    size = sum(value.numel() * value.element_size() for value in values)
    return size if isinstance(size, int) else None
