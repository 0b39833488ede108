"""Small graphs of gathered weights and reduced gradients, with fake values."""

from contextlib import nullcontext

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from ndcompile.graphs.collective_chains import collectives
from ndcompile.operators.host_copies import COPIED, COPY, HOST

MIB = 2**20
RANKS = 2


class Graph:
    """Nodes with fake values; sizes are those of whole weights and gradients, in MiB of bfloat16."""

    def __init__(self, device: str = "cpu") -> None:
        self.graph, self.mode, self.device = fx.Graph(), FakeTensorMode(), device

    def input(self, name: str, mib: float, dtype: torch.dtype = torch.bfloat16) -> fx.Node:
        first = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        with nullcontext() if first is None else self.graph.inserting_before(first):
            node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(int(mib * MIB / 2 / 1024), 1024, dtype=dtype, device=self.device)
        return node

    def call(self, name: str, target, *args) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        with self.mode:
            node.meta["val"] = target(*fx.node.map_arg(args, lambda each: each.meta["val"]))
        return node

    def copy(self, name: str, shard: fx.Node) -> fx.Node:
        return self.call(f"copied_{name}", COPIED, self.call(f"copy_{name}", COPY, shard, HOST))

    def weight(
        self, name: str, mib: float, group: str = "fsdp", dtype: torch.dtype = torch.bfloat16, on_host: bool = False
    ) -> fx.Node:
        shard = self.input(f"shard_{name}", mib / RANKS, dtype)
        return self.gathered(name, self.copy(name, shard) if on_host else shard, group)

    def gathered(self, name: str, shard: fx.Node, group: str = "fsdp") -> fx.Node:
        start = self.call(f"gather_{name}", collectives.all_gather_into_tensor.default, shard, RANKS, group)
        start.meta["custom"] = {"unshard": "free_full_weight"}
        return self.call(f"wait_{name}", collectives.wait_tensor.default, start)

    def gradient(self, name: str, mib: float, group: str = "fsdp") -> fx.Node:
        whole = self.call(f"grad_{name}", torch.ops.aten.mul.Tensor, self.input(f"saved_{name}", mib), 2)
        return self.reduced(name, whole, group)

    def reduced(self, name: str, whole: fx.Node, group: str = "fsdp") -> fx.Node:
        start = self.call(f"scatter_{name}", collectives.reduce_scatter_tensor.default, whole, "avg", RANKS, group)
        start.meta["custom"] = {"unshard": "free_full_weight"}
        return self.call(f"wait_{name}", collectives.wait_tensor.default, start)

    def use(self, name: str, x: fx.Node, weight: fx.Node) -> fx.Node:
        return self.call(name, torch.ops.aten.mm.default, x, weight)

    def names(self) -> list[str]:
        self.graph.lint()
        return [node.name for node in self.graph.nodes if node.op == "call_function"]


def forward(sizes: dict[str, float], device: str = "cpu", on_host: bool = False) -> Graph:
    """x @ w_a @ w_b ..., every weight gathered at its use, from a shard in host memory if asked for."""
    g = Graph(device)
    x = g.input("x", 2)
    for name, mib in sizes.items():
        weight = g.weight(name, mib, on_host=on_host)
        x = g.use(f"use_{name}", x, g.call(f"part_{name}", torch.ops.aten.slice.Tensor, weight, 0, 0, 1024))
    g.graph.output((x,))
    return g


def backward(sizes: dict[str, float], device: str = "cpu") -> Graph:
    """Gradients one after the other, each reduced at once."""
    g = Graph(device)
    g.graph.output(tuple(g.gradient(name, mib) for name, mib in sizes.items()))
    return g


def replicated_backward(mib: float) -> Graph:
    """Two gradients, each reduced over fsdp and then over dp_replicate."""
    g = Graph()
    results = []
    for name in ("a", "b"):
        scattered = g.gradient(name, mib)
        start = g.call(f"reduce_{name}", collectives.all_reduce.default, scattered, "avg", "dp_replicate")
        results.append(g.call(f"done_{name}", collectives.wait_tensor.default, start))
    g.graph.output(tuple(results))
    return g
