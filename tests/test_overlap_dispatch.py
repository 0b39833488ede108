"""The pass on small graphs: what moves beside an exchange of tokens, how far, and what the host reads meanwhile."""

import time
from contextlib import nullcontext

import collective_graphs
import pytest
import torch
from torch import fx

from ndcompile.graphs.collective_chains import collectives
from ndcompile.graphs.exchanges import ALL_TO_ALL, waited_for
from ndcompile.operators.host_reads import END_HOST_READ, START_HOST_READ
from ndcompile.operators.routing_checks import checked_splits
from ndcompile.passes.overlap_dispatch import overlap_dispatch

aten = torch.ops.aten
ROWS, WIDTH, RANKS = 8, 16, 2
EVEN = [ROWS // RANKS] * RANKS


class Graph(collective_graphs.Graph):
    """Nodes with fake values on a device; activations are (ROWS, WIDTH), weights (WIDTH, WIDTH)."""

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> fx.Node:
        first = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        with nullcontext() if first is None else self.graph.inserting_before(first):
            node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(*(shape or (ROWS, WIDTH)), dtype=dtype, device=self.device)
        return node

    def product(self, name: str, x: fx.Node, width: int = WIDTH) -> fx.Node:
        return self.call(name, aten.mm.default, x, self.input(f"weight_{name}", x.meta["val"].shape[1], width))

    def exchange(self, name: str, x: fx.Node) -> fx.Node:
        start = self.call(f"start_{name}", ALL_TO_ALL, x, EVEN, EVEN, "ep")
        return self.call(f"wait_{name}", collectives.wait_tensor.default, start)

    def reduced_gradient(self, name: str, x: fx.Node, y: fx.Node) -> fx.Node:
        gradient = self.call(f"grad_{name}", aten.mm.default, self.call(f"turned_{name}", aten.t.default, x), y)
        start = self.call(f"scatter_{name}", collectives.reduce_scatter_tensor.default, gradient, "avg", RANKS, "fsdp")
        start.meta["custom"] = {"unshard": "free_full_weight"}
        return self.call(f"done_{name}", collectives.wait_tensor.default, start)

    def scheduled(self, *results: fx.Node) -> list[str]:
        self.graph.output(results)
        overlap_dispatch(self.graph)
        self.graph.lint()
        return [node.name for node in self.graph.nodes if node.op == "call_function"]


def routed(g: Graph, x: fx.Node) -> fx.Node:
    return g.exchange("back", g.product("experts", g.exchange("there", x)))


def test_shared_experts_behind_the_routed_ones_are_split_over_both_exchanges():
    g = Graph()
    x = g.input("x")
    y = routed(g, x)
    shared = g.product("down", g.call("act", aten.relu.default, g.product("up", x)))
    assert g.scheduled(g.call("total", aten.add.Tensor, y, shared)) == [
        "start_there", "up", "wait_there", "experts", "start_back", "act", "down", "wait_back", "total",
    ]  # fmt: skip


def test_shared_experts_in_front_of_the_routed_ones_are_split_over_both_exchanges():
    g = Graph()
    x = g.input("x")
    shared = g.product("down", g.call("act", aten.relu.default, g.product("up", x)))
    assert g.scheduled(g.call("total", aten.add.Tensor, routed(g, x), shared)) == [
        "start_there", "up", "wait_there", "experts", "start_back", "act", "down", "wait_back", "total",
    ]  # fmt: skip


def test_element_by_element_operators_at_the_end_stay_with_what_uses_them():
    g = Graph()
    x = g.input("x")
    y = routed(g, x)
    shared = g.call("scale", aten.mul.Tensor, g.product("down", x), 2)
    order = g.scheduled(g.call("total", aten.add.Tensor, y, shared))
    assert order.index("down") < order.index("wait_back") < order.index("scale")


def test_the_gradient_of_experts_runs_beside_the_exchange_back():
    g = Graph()
    arrived = g.exchange("there", g.input("x"))
    weight = g.reduced_gradient("weight", arrived, g.input("saved"))
    y = g.exchange("back", g.product("to_tokens", arrived))
    assert g.scheduled(y, weight) == [
        "start_there", "wait_there", "to_tokens",
        "start_back", "turned_weight", "grad_weight", "scatter_weight", "wait_back", "done_weight",
    ]  # fmt: skip


def test_with_gradients_of_experts_beside_the_exchange_back_all_others_go_beside_the_first():
    g = Graph()
    x = g.input("x")
    arrived = g.exchange("there", x)
    weight = g.reduced_gradient("weight", arrived, g.input("saved"))
    y = g.exchange("back", g.product("to_tokens", arrived))
    shared = g.product("up", g.product("down", x))
    order = g.scheduled(g.call("total", aten.add.Tensor, y, shared), weight)
    assert order[: order.index("wait_there")] == ["start_there", "down", "up"]


def test_gradients_that_are_due_before_an_exchange_are_reduced_behind_its_start():
    g = Graph()
    x = g.input("x")
    weight = g.reduced_gradient("weight", x, g.input("saved"))
    assert g.scheduled(routed(g, x), weight) == [
        "start_there", "turned_weight", "grad_weight", "scatter_weight", "wait_there", "done_weight",
        "experts", "start_back", "wait_back",
    ]  # fmt: skip


def test_gradients_put_off_are_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr("ndcompile.passes.overlap_dispatch.GRADIENT_BYTES", 2 * WIDTH * WIDTH)  # one of them
    g = Graph()
    x, saved = g.input("x"), g.input("saved")
    far, near = g.reduced_gradient("far", x, saved), g.reduced_gradient("near", saved, x)
    order = g.scheduled(routed(g, x), far, near)
    assert order.index("scatter_far") < order.index("start_there") < order.index("scatter_near")


def test_nothing_moves_past_the_exchanges_of_another_layer():
    g = Graph()
    x, other = g.input("x"), g.input("other")
    first = g.product("early", other)
    y = g.exchange("back1", g.product("experts1", g.exchange("there1", x)))
    y = g.exchange("back2", g.product("experts2", g.exchange("there2", g.product("between", y))))
    order = g.scheduled(y, first, g.product("late", other))
    assert order.index("early") < order.index("wait_back1")
    assert order.index("start_there2") < order.index("late")


def test_a_layer_is_not_recomputed_before_the_gradients_of_the_one_behind_it():
    g = Graph()
    gradient = routed(g, g.product("head", g.input("tangents_1")))
    gradient = g.product("attention_gradient", gradient)
    recomputed = g.product("attention_again", g.input("saved"))
    y = g.exchange("again", recomputed)
    order = g.scheduled(g.call("total", aten.mul.Tensor, y, gradient))
    assert order[-5:] == ["attention_gradient", "attention_again", "start_again", "wait_again", "total"]


def test_what_an_exchange_needs_stays_in_front_of_it():
    g = Graph()
    x = g.product("router", g.input("x"))
    assert g.scheduled(routed(g, x)) == ["router", "start_there", "wait_there", "experts", "start_back", "wait_back"]


def test_products_of_one_column_do_not_count():
    g = Graph()
    x = g.input("x")
    y = routed(g, x)
    order = g.scheduled(g.call("total", aten.mul.Tensor, y, g.product("gate", x, width=1)))
    assert order.index("wait_back") < order.index("gate")


def test_nothing_moves_over_a_node_that_writes():
    g = Graph()
    x = g.input("x")
    shared = g.product("shared", x)
    g.call("write", aten.copy_.default, x, g.input("new"))
    assert g.scheduled(routed(g, x), shared)[:2] == ["shared", "write"]


def test_a_graph_without_exchanges_stays_as_it_is():
    g = Graph()
    x = g.input("x")
    weight = g.reduced_gradient("weight", x, g.input("saved"))
    order = ["turned_weight", "grad_weight", "scatter_weight", "done_weight", "up"]
    assert g.scheduled(g.product("up", x), weight) == order


def test_exchanges_of_counts_are_left_alone():
    g = Graph()
    counts = g.exchange("counts", g.input("n", ROWS, dtype=torch.int64))
    order = g.scheduled(g.exchange("there", g.input("x")), counts, g.product("shared", g.input("y")))
    assert order == ["start_counts", "wait_counts", "start_there", "shared", "wait_there"]


def reading(device: str) -> Graph:
    """The host reads counts; rows are put together from `hidden` behind it."""
    g = Graph(device)
    counts = g.input("counts", 3, RANKS, dtype=torch.int64)
    if device != "cpu":
        counts = g.call("copied", torch.ops.prims.device_put.default, counts, torch.device("cpu"))
    g.call("sizes", checked_splits, counts, "experts", 4)
    return g


def test_rows_are_put_together_before_the_host_reads_their_numbers():
    g = reading("cpu")
    rows = g.call("rows", aten.index.Tensor, g.input("hidden"), [g.input("order", ROWS, dtype=torch.int64)])
    assert g.scheduled(g.exchange("there", rows)) == ["rows", "sizes", "start_there", "wait_there"]


def test_on_a_gpu_the_copy_of_the_numbers_is_waited_for_behind_the_rows():
    g = reading("cuda")
    rows = g.call("rows", aten.index.Tensor, g.input("hidden"), [g.input("order", ROWS, dtype=torch.int64)])
    assert g.scheduled(g.exchange("there", rows)) == [
        "start_host_read_default", "rows", "end_host_read_default", "sizes", "start_there", "wait_there",
    ]  # fmt: skip
    (sizes,) = (node for node in g.graph.nodes if node.target is checked_splits)
    assert sizes.meta["val"].device.type == "cpu"
    assert sizes.args[0].name == "end_host_read_default"
    assert [node.name for node in sizes.args[0].args[2]] == ["rows"]  # or inductor would compute them behind the read


def test_what_orders_the_rows_that_arrive_runs_beside_their_exchange():
    g = Graph()
    experts = g.input("experts", ROWS, dtype=torch.int64)
    there = g.exchange("there", g.input("x"))
    order = g.call("order", aten.mul.Tensor, experts, 2)
    rows = g.call("rows", aten.index.Tensor, there, [order])
    read = g.call("read", aten.argmax.default, rows)  # integers too, but of what arrives
    assert g.scheduled(g.exchange("back", g.product("experts_of", rows)), read) == [
        *("start_there", "order", "wait_there", "rows", "read", "experts_of", "start_back", "wait_back"),
    ]


def test_a_copy_to_the_host_holds_the_values_and_is_memory_of_its_own():
    x = torch.arange(6).reshape(3, 2)
    values = END_HOST_READ(START_HOST_READ(x), x, [])
    x.zero_()
    assert values.tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_operators_of_the_read_are_what_tracing_takes_them_for(dtype):
    counts = torch.tensor([[3, 1], [2, 2], [0, 0]], dtype=dtype)
    torch.library.opcheck(checked_splits, (counts, "experts", 4))
    torch.library.opcheck(END_HOST_READ, (START_HOST_READ(counts), counts.t(), []))


def test_products_that_wait_for_each_other_are_found_in_one_walk():
    g = Graph()
    products = [g.product("first", g.input("x"))]
    for number in range(600):
        products.append(g.product(f"next_{number}", products[-1]))
    begin = time.perf_counter()
    assert waited_for(products, g.graph.nodes) == set(products[:-1])
    assert time.perf_counter() - begin < 2  # a walk for each pair takes minutes
