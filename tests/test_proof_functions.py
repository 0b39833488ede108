"""What the proof knows of a model's own autograd Functions."""

import pytest
import torch

from ndcompile.proof.own_functions import computes_each_element


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.tanh(x) * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.softmax(-1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class ReversedInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.flip(0)


class Branching(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x if x.sum() > 0 else -x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@pytest.mark.parametrize(
    ("function", "elementwise"), [(Scaled, True), (Softmax, False), (ReversedInBackward, False), (Branching, False)]
)
def test_a_function_is_elementwise_if_both_of_its_directions_are(function, elementwise):
    assert computes_each_element(function, (torch.float32,), 1) == elementwise


def test_a_look_at_a_function_draws_no_random_numbers():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    computes_each_element.__wrapped__(Scaled, (torch.float64,), 1)
    assert torch.equal(torch.rand(1), expected)
