"""Small graphs with values, as AOTAutograd's lowered graphs have, and round rates to time them by."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from ndcompile.inspection.rates import Rates

c10d = torch.ops._c10d_functional

RATES = Rates(
    "round",
    {"float32": 1e12, "bfloat16": 2e12},
    memory_bandwidth=1e9,
    link_bandwidth=1e8,
    link_latency=1e-6,
    network_bandwidth=1e7,
    network_latency=1e-5,
    ranks_a_node=8,
    launch_latency=0.0,
    matmul_fraction=0.5,
    attention_fraction=0.25,
    memory_fraction=1.0,
    link_fraction=1.0,
)


class Program:
    """A graph with values, written line by line."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder("x")
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        return node

    def call(self, target: Callable, *args: object, shape: tuple[int, ...] | None = None, module: str = "") -> fx.Node:
        node = self.graph.call_function(target, args)
        values = fx.map_arg(args, lambda n: n.meta["val"])
        like = node.all_input_nodes[0].meta["val"] if node.all_input_nodes else None
        node.meta["val"] = target(*values).to("meta") if shape is None else like.new_empty(shape)
        node.meta["custom"] = {"module": module}
        return node

    def reduce(self, x: fx.Node) -> fx.Node:
        return self.call(c10d.all_reduce.default, x, "sum", "g", shape=tuple(x.meta["val"].shape))

    def wait(self, x: fx.Node) -> fx.Node:
        return self.call(c10d.wait_tensor.default, x, shape=tuple(x.meta["val"].shape))

    def returns(self, *nodes: fx.Node) -> fx.Graph:
        self.graph.output(nodes)
        return self.graph
