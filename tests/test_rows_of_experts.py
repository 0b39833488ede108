"""Passes on the joint graph that shorten what experts do with exchanged rows: each on a small function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ndcompile.passes.drop_ones import drop_ones
from ndcompile.passes.sort_by_counts import sort_by_counts
from ndcompile.private.inductor import decompositions

aten = torch.ops.aten


def rewritten(run: Callable[[fx.Graph], None], function: Callable, *inputs: Tensor) -> fx.GraphModule:
    """A function's graph behind a pass, which computes the same bits."""
    table = decompositions()
    table.pop(aten.repeat_interleave.Tensor, None)  # torch takes it apart where the number of rows is known
    module = make_fx(function, table, tracing_mode="fake")(*inputs)
    run(module.graph)
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(*inputs), function(*inputs), rtol=0, atol=0)
    return module


def count(module: fx.GraphModule, *targets) -> int:
    return sum(node.target in targets for node in module.graph.nodes)


# drop_ones


def one_by_one(x: Tensor, order: Tensor) -> Tensor:
    """As experts of transformers weight and sum the rows of a token, here one of weight 1."""
    x = x.sin()
    weights = x.new_ones(()).expand(x.shape[0], 1).reshape(-1)[order]
    return (x * weights.unsqueeze(-1))[order].view(x.shape[0], 1, -1).sum(dim=1) + 1


def test_products_with_ones_and_sums_of_one_summand_are_dropped():
    module = rewritten(drop_ones, one_by_one, torch.randn(6, 4), torch.randperm(6))
    assert count(module, aten.mul.Tensor, aten.sum.dim_IntList, aten.full.default) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x, order: (x * torch.full((), 2.0).expand(6, 1)) + 1,
        lambda x, order: (x[:1] * torch.full((), 1.0).expand(6, 4)) + 1,  # broadcasts
        lambda x, order: (order * torch.full((), 1.0).expand(6)) + 1,  # makes floating point of integers
        lambda x, order: x.sin() * torch.full((), 1.0).expand(6, 1),  # is returned
        lambda x, order: (x.sin() * torch.full((), 1.0).expand(6, 1)).transpose(0, 1),  # a view of it is
        lambda x, order: (x * torch.full((), 1.0).expand(6, 1)).sin(),  # an input may be written to later
        lambda x, order: (x.sin()[:, :1].expand(6, 4) * torch.full((), 1.0).expand(6, 1)).view(24).sin(),  # strides
    ],
    ids=["of twos", "broadcasting", "of another dtype", "returned", "returned as a view", "of an input", "expanded"],
)
def test_other_products_stay(function):
    assert count(rewritten(drop_ones, function, torch.randn(6, 4), torch.arange(6)), aten.mul.Tensor) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sin().view(2, 3, 4).sum(dim=1) + 1,
        lambda x: x.sin().view(6, 1, 4).sum(dim=1, keepdim=True) + 1,
        lambda x: x.sin().view(6, 1, 4).sum(dim=1, dtype=torch.float64) + 1,
        lambda x: torch.ops.aten.sum.dim_IntList(x.sin(), None) + 1,
        lambda x: x.sin().view(6, 1, 4).sum(dim=1).t(),
        lambda x: x.view(6, 1, 4).sum(dim=1) + 1,
    ],
    ids=["of several", "that keeps the dim", "of another dtype", "of everything", "returned", "of an input"],
)
def test_other_sums_stay(function):
    assert count(rewritten(drop_ones, function, torch.randn(6, 4)), aten.sum.dim_IntList) == 1


# sort_by_counts

RANKS, EXPERTS = 3, 4
COUNTS = torch.tensor([[2, 0, 1, 3], [0, 0, 4, 1], [1, 2, 0, 0]])


def received(counts: Tensor, numbers: Tensor | None = None) -> Tensor:
    """The expert of each row that arrived: from every rank those of its first expert, then those of the second."""
    numbers = torch.arange(EXPERTS).repeat(RANKS) if numbers is None else numbers
    return numbers.repeat_interleave(counts.reshape(-1), output_size=14).unsqueeze(1).reshape(-1)


def in_order(counts: Tensor) -> tuple[Tensor, Tensor]:
    experts, order = torch.sort(received(counts), stable=True)
    return experts, order


@pytest.mark.parametrize(
    "counts",
    [
        COUNTS,
        COUNTS.flip(0),
        torch.tensor([[14] + [0] * 3] + [[0] * 4] * 2),
        torch.tensor([[0] * 4] * 2 + [[0] * 3 + [14]]),
    ],
    ids=["spread", "the other way round", "all of the first block", "all of the last block"],
)
def test_rows_in_blocks_are_ordered_without_a_sort(counts):
    module = rewritten(sort_by_counts, in_order, counts)
    assert count(module, aten.sort.default, aten.sort.stable, aten.repeat_interleave.Tensor) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda counts: torch.sort(received(counts), descending=True, stable=True),
        lambda counts: torch.sort(received(counts, torch.tensor([5, 1, 2] * 4)), stable=True),
        lambda counts: torch.sort(received(counts, torch.arange(1, 5).repeat(RANKS)), stable=True),
        lambda counts: torch.sort(received(counts, torch.arange(0, 8, 2).repeat(RANKS)), stable=True),
        lambda counts: torch.sort(received(counts) + 1, stable=True),
        lambda counts: torch.sort(received(counts, torch.arange(4, dtype=torch.int32).repeat(RANKS)), stable=True),
        lambda counts: torch.sort(received(counts).view(2, 7), stable=True),
    ],
    ids=["descending", "of other numbers", "from one", "of every second", "of sums", "of another dtype", "of two dims"],
)  # fmt: skip
def test_other_sorts_stay(function):
    assert count(rewritten(sort_by_counts, function, COUNTS), aten.sort.stable) == 1
