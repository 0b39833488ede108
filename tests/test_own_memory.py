"""Gradients that would share memory get their own."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import ndcompile
from ndcompile.graphs.dump import dump
from ndcompile.lowering.own_memory import separate_gradients, wait_once

collectives = torch.ops._c10d_functional


class Step(fx.Interpreter):
    """Gives every node its fake value."""

    def run_node(self, node):
        node.meta["val"] = super().run_node(node)
        return node.meta["val"]


def backward(returned) -> fx.Graph:
    """A backward graph of one gradient; `returned` makes its outputs."""
    graph = fx.Graph()
    gradient = graph.placeholder("gradient")
    graph.output(tuple(returned(graph.call_function, gradient)))
    with FakeTensorMode() as mode:
        Step(fx.GraphModule({}, graph)).run(mode.from_tensor(torch.ones(4, 6)))
    return graph


def test_two_waits_for_one_reduction_become_a_wait_and_a_copy():
    def waits(call, gradient):
        reduced = call(collectives.all_reduce.default, (gradient, "sum", "0"))
        return [call(collectives.wait_tensor.default, (reduced,)) for _ in range(2)]

    graph = backward(waits)
    wait_once(graph)
    separate_gradients(graph)
    assert dump(graph, {}) == (
        "gradient = input | f32[4, 6]\n"
        "all_reduce_default = _c10d_functional.all_reduce(gradient, sum, 0) | f32[4, 6]\n"
        "wait_tensor_default = _c10d_functional.wait_tensor(all_reduce_default) | f32[4, 6]\n"
        "clone_default = clone(wait_tensor_default) | f32[4, 6]\n"
        "return wait_tensor_default, clone_default"
    )


@pytest.mark.parametrize(
    ("views", "copies"),
    [
        ([(0, 0, 2), (0, 2, 4)], 0),
        ([(0, 0, 3), (0, 2, 4)], 1),
        ([(0, 0, 4), (0, 0, 4), (0, 0, 4)], 2),
    ],
)
def test_views_are_copied_where_they_overlap(views, copies):
    def parts(call, gradient):
        whole = call(torch.ops.aten.mul.Tensor, (gradient, 2))
        return [call(torch.ops.aten.slice.Tensor, (whole, *view)) for view in views]

    graph = backward(parts)
    separate_gradients(graph)
    assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)) == copies


def test_a_gradient_that_is_an_input_is_copied():
    graph = backward(lambda call, gradient: [gradient, call(torch.ops.aten.t.default, (gradient,))])
    separate_gradients(graph)
    assert all(node.target is torch.ops.aten.clone.default for node in graph.output_node().all_input_nodes)


class Sum(torch.nn.Module):
    """Two parameters with the gradient of the result."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (torch.nn.Parameter(torch.ones(4, 6)) for _ in range(2))

    def forward(self, x):
        return x + self.one + self.two


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_gradients_in_memory_of_their_own_can_be_clipped(lowering):
    model = ndcompile.compile(Sum(), backend=lowering)
    given = torch.ones(4, 6)
    model(torch.zeros(4, 6)).backward(given)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.testing.assert_close(float(norm), 48**0.5)
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), torch.full((4, 6), 48**-0.5))
    assert given.eq(1).all()


def test_none_and_numbers_among_the_gradients_stay():
    graph = backward(lambda call, gradient: [None, call(torch.ops.aten.mul.Tensor, (gradient, 2)), None])
    before = dump(graph, {})
    separate_gradients(graph)
    assert dump(graph, {}) == before
