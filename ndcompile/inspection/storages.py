"""Which nodes of a lowered graph hold memory, and until when.

AOTAutograd's graph is not what runs: inductor fuses pointwise operators and reductions, and only what another kernel
reads is written. Here operators that are connected without a kernel of another kind between them are one kernel, as in
`kernels`. What such a kernel keeps to itself is computed again where it is read, so its inputs live until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from ndcompile.graphs.saved_activations import is_view, names_memory
from ndcompile.inspection.kernels import Size, ends_kernel, fuses, made_in_place_of_use, name_of
from ndcompile.operators.host_copies import COPY

GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


@dataclass
class Storages:
    """The storages of a graph, in the order in which its nodes run.

    order: nodes; gathers of weights stand before the first use, reductions of gradients behind the gradient.
    owner: node -> the node whose memory it names. death: owner -> index in `order` of the last node that reads it;
    owners that are graph outputs are alive at the end. Owners without an entry are never written.
    """

    graph: fx.Graph
    size: Size = int
    order: list[fx.Node] = field(default_factory=list)
    owner: dict[fx.Node, fx.Node] = field(default_factory=dict)
    death: dict[fx.Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.order = _as_run(self.graph)
        self.made = made_in_place_of_use(self.graph, self.size)
        self._owners()
        self._deaths()

    def outputs(self) -> list[fx.Node]:
        """Owners of what the graph returns, once each."""
        returned = self.graph.output_node().all_input_nodes
        return list(dict.fromkeys(self.owner[node] for node in returned))

    def _owners(self) -> None:
        self.level: dict[fx.Node, int] = {}
        for node in self.order:
            sources = [self.owner[source] for source in node.all_input_nodes]
            self.owner[node] = sources[0] if names_memory(node) else node
            self.level[node] = max((self.level[s] + ends_kernel(s) for s in sources), default=0)

    def _deaths(self) -> None:
        number = {node: index for index, node in enumerate(self.order)}
        kept = set(self.outputs())
        read: dict[fx.Node, int] = {}
        for node in reversed(self.order):
            last = max((self._reads(user, number, read) for user in self._users(node)), default=number[node])
            read[node] = last
            written = self.owner[node] is node and (node in kept or not self._inside_kernel(node))
            if written and node.op != "output" and isinstance(node.meta.get("val"), Tensor):
                self.death[node] = len(self.order) if node in kept else last

    def _reads(self, user: fx.Node, number: dict[fx.Node, int], read: dict[fx.Node, int]) -> int:
        """When `user` reads its inputs: with the kernels that compute it again, if it is never written."""
        return read[user] if user in read and self._inside_kernel(user) else number[user]

    def _inside_kernel(self, node: fx.Node) -> bool:
        """Whether a node is computed and used by one fused kernel, so that it is never written."""
        if node.op != "call_function" or not fuses(node) or not node.users:
            return False
        if node in self.made:
            return True
        users = list(self._users(node))
        return all(
            user.op == "call_function" and fuses(user) and self.level[user] == self.level[node] for user in users
        )

    def _users(self, node: fx.Node) -> Iterator[fx.Node]:
        """Nodes that read a node's memory, through views and as sums in place left it."""
        for user in node.users:
            if self.owner[user] is self.owner[node]:
                yield from self._users(user)
            else:
                yield user


def _as_run(graph: fx.Graph) -> list[fx.Node]:
    """The nodes, gathers of weights right before their first use and reductions of gradients right behind the gradient.

    The graph has gathers in front and reductions at the end; inductor orders for the least memory.
    """
    late = _gathers(graph)
    early = {node for node in graph.nodes if (node.meta.get("custom") or {}).get("unshard") and node not in late}
    order: list[fx.Node] = []
    placed: set[fx.Node] = set()

    def place(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source in late and source not in placed:
                place(source)
        placed.add(node)
        order.append(node)
        for user in node.users:
            if user in early and user not in placed and placed.issuperset(user.all_input_nodes):
                place(user)

    for node in graph.nodes:
        if node not in late and node not in placed:
            place(node)
    return order


def _gathers(graph: fx.Graph) -> set[fx.Node]:
    """Gathers of inputs, copies of them from the host, and what is made of these alone by views and joins."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or not node.all_input_nodes:
            continue
        begins = (node.target is GATHER and _from_input(node.all_input_nodes[0])) or node.target is COPY
        joins = is_view(node) or name_of(node) in ("cat", "copied")
        if begins or (joins and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def _from_input(node: fx.Node) -> bool:
    """Whether a node is an input, perhaps cast or padded."""
    while len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"
