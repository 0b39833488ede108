"""Gradients of rows in another order are gathered, not added to zeros."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from ndcompile.passes.gather_gradients import gather_gradients
from ndcompile.private.inductor import decompositions

aten = torch.ops.aten
TOKENS, TIMES, WIDTH = 6, 4, 8

Rows = Callable[[Tensor, Tensor], Tensor]


def numbered(rows: Tensor) -> Tensor:
    """Rows times their number: so that an order and its inverse do not cancel."""
    return rows * torch.arange(1.0, 1.0 + rows.shape[0])[:, None]


def moved(x: Tensor, keys: Tensor) -> Tensor:
    return x[torch.sort(keys).indices]


def moved_back(x: Tensor, keys: Tensor) -> Tensor:
    order = torch.sort(keys, stable=True).indices
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return numbered(x[order])[inverse]


def sorted_back(x: Tensor, keys: Tensor) -> Tensor:
    order = torch.argsort(keys)
    return numbered(x[order])[torch.argsort(order)]


def reversed_back(x: Tensor, keys: Tensor) -> Tensor:
    order = torch.argsort(keys)
    return numbered(x[order])[torch.argsort(order, descending=True)]


def sorted_down(x: Tensor, keys: Tensor) -> Tensor:
    return x[torch.sort(keys, descending=True).indices]


def repeated(x: Tensor, keys: Tensor) -> Tensor:
    keys = keys.view(x.shape[0], TIMES).reshape(-1)  # so that a symbolic size is that of the rows
    return x[torch.sort(keys).indices // TIMES]


def some(x: Tensor, keys: Tensor) -> Tensor:
    return x[torch.sort(keys).indices[:TOKENS]]


def any_rows(x: Tensor, keys: Tensor) -> Tensor:
    return x[keys]


def divided_by_another_number(x: Tensor, keys: Tensor) -> Tensor:
    return x[torch.sort(keys).indices // (2 * TIMES)]


def written_with_one_number(x: Tensor, keys: Tensor) -> Tensor:
    order = torch.sort(keys).indices
    return x[torch.empty_like(order).index_put((order,), torch.arange(1))]


def added_wide(x: Tensor, keys: Tensor) -> Tensor:
    count = keys.shape[0]
    return torch.zeros(count, count).index_put((torch.argsort(keys),), x[:, 0], accumulate=True)


def added_columns(x: Tensor, keys: Tensor) -> Tensor:
    return torch.zeros(keys.shape[0], WIDTH).index_put((torch.argsort(keys),), x[:, :1], accumulate=True)


def counted(x: Tensor, keys: Tensor) -> Tensor:
    each = torch.zeros(TOKENS).index_put((torch.argsort(keys) // TIMES,), torch.tensor(1.0), accumulate=True)
    return x[:TOKENS] * each[:, None]


def hit(x: Tensor, keys: Tensor) -> Tensor:
    order = torch.argsort(keys) // TIMES
    each = torch.zeros(TOKENS, dtype=torch.bool).index_put((order,), keys >= 0, accumulate=True)
    return x[:TOKENS] * each.float()[:, None]


def wrapped(x: Tensor, keys: Tensor) -> Tensor:
    order, many = torch.argsort(keys) // TIMES, torch.full((keys.shape[0],), 2**30, dtype=torch.int32)
    each = torch.zeros(TOKENS, dtype=torch.int32).index_put((order,), many, accumulate=True)
    return x[:TOKENS] * each.float()[:, None]


def undone_later(x: Tensor, keys: Tensor) -> Tensor:
    order = torch.argsort(keys)
    return torch.zeros_like(x).index_add(0, order, x).sin()[torch.argsort(order)]


def written_narrow(x: Tensor, keys: Tensor) -> Tensor:
    order = torch.argsort(keys)
    narrow = torch.empty(keys.shape[0], dtype=torch.int8).index_put(
        (order,), torch.arange(keys.shape[0], dtype=torch.int8)
    )
    return x[torch.argsort(narrow)]


def half_written(x: Tensor, keys: Tensor) -> Tensor:
    order = torch.sort(keys).indices
    inverse = torch.zeros(2 * order.shape[0], dtype=torch.int64).index_put(
        (order,), torch.arange(order.shape[0], dtype=torch.int64)
    )
    return x[inverse[: x.shape[0]]]


def gradient(rows: Rows, x: Tensor, keys: Tensor, dynamic: bool = False) -> tuple[Tensor, fx.Graph]:
    """The gradient of a weighted sum of rows, by the joint graph behind the pass, and its backward graph."""
    graphs: list[fx.Graph] = []

    def partition(gm: fx.GraphModule, inputs: object, **options: object) -> object:
        gather_gradients(gm.graph)
        return min_cut_rematerialization_partition(gm, inputs, compiler="inductor", **options)

    def kept(gm: fx.GraphModule, inputs: object) -> object:
        graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    compiler = aot_autograd(fw_compiler=kept, bw_compiler=kept, partition_fn=partition, decompositions=decompositions())
    torch._dynamo.reset()
    x = x.detach().requires_grad_()
    found = torch.compile(rows, backend=compiler, fullgraph=True, dynamic=dynamic)(x, keys)
    found.backward(weights(found))
    return x.grad, graphs[-1]


def weights(like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(3))


def expected(rows: Rows, x: Tensor, keys: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    found = rows(x, keys)
    found.backward(weights(found))
    return x.grad


def sums_into_zeros(graph: fx.Graph) -> int:
    return sum(len(node.args) > 3 for node in graph.find_nodes(op="call_function", target=aten.index_put.default))


def case(rows: Rows) -> tuple[Tensor, Tensor]:
    """Rows, and numbers to sort by with doubles among them."""
    torch.manual_seed(1)
    count = TOKENS * TIMES
    return torch.randn(TOKENS if rows is repeated else count, WIDTH), torch.randint(0, 5, (count,))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("rows", [moved, moved_back, sorted_back, reversed_back, sorted_down, repeated])
def test_gradients_of_permuted_rows_are_gathered(rows, dynamic):
    x, keys = case(rows)
    found, graph = gradient(rows, x, keys, dynamic)
    torch.testing.assert_close(found, expected(rows, x, keys), rtol=1e-6, atol=1e-6)  # sums of four in another order
    assert sums_into_zeros(graph) == 0


@pytest.mark.parametrize("rows", [some, any_rows, divided_by_another_number, written_with_one_number, half_written])
def test_gradients_of_rows_that_are_not_all_met_as_often_are_added(rows):
    x, keys = case(rows)
    found, graph = gradient(rows, x, keys)
    torch.testing.assert_close(found, expected(rows, x, keys))
    assert sums_into_zeros(graph) == 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "rows", [added_wide, added_columns, counted, hit, wrapped, undone_later, written_narrow], ids=lambda f: f.__name__
)
def test_sums_of_another_kind_keep_their_values(rows, dynamic):
    x, keys = case(rows)
    found, _ = gradient(rows, x, keys, dynamic)
    torch.testing.assert_close(found, expected(rows, x, keys))


def test_an_inverse_that_the_graph_has_is_used():
    x, keys = case(moved_back)
    _, graph = gradient(moved_back, x, keys)
    assert not graph.find_nodes(op="call_function", target=aten.index_put.default)  # nothing is inverted anew
