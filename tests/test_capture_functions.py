"""Code that a tracer would see through: autograd Functions and scans, each against the module without a graph."""

import pytest
import torch
from torch import Tensor, nn

import ndcompile
from ndcompile.errors import CaptureError
from ndcompile.private.tracing import disable_proxy_modes_tracing


class Rounded(torch.autograd.Function):
    """Rounding with the gradient of three times the input: the derivative of round is zero."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return 3 * grad


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (Rounded.apply(self.linear(x)) * x).sum()


class WithScan(nn.Module):
    """A linear recurrence, as state space models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops.associative_scan import associative_scan  # where transformers imports it

        def combine(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        decay = self.decay.expand_as(x)
        if not torch.compiler.is_compiling():
            states = [x[:, 0]]
            for step in range(1, x.shape[1]):
                states.append(self.decay * states[-1] + x[:, step])
            return torch.stack(states, 1).square().sum()
        return associative_scan(combine, (decay, x), dim=1, combine_mode="generic")[1].square().sum()


class WithConstant(nn.Module):
    """Computes a value where no tracer sees it, as a custom kernel does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with disable_proxy_modes_tracing():
            hidden = x * 2
        return (hidden * self.weight).sum()


@pytest.mark.parametrize("kind", [WithFunction, WithScan])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_value_and_gradient_are_the_modules_own(kind, backend):
    torch.manual_seed(0)
    reference = kind()
    model = kind()
    model.load_state_dict(reference.state_dict())
    model = ndcompile.compile(model, backend=backend)
    x = torch.randn(2, 7, 4)
    value, expected = model(x), reference(x)
    value.backward()
    expected.backward()
    torch.testing.assert_close(value, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), reference.get_parameter(name).grad)
    assert torch.is_grad_enabled()


def test_a_value_that_the_trace_did_not_see_is_refused():
    model = ndcompile.compile(WithConstant(), backend="eager")
    with pytest.raises(CaptureError, match=r"WithConstant, layer '', computes a value outside of the trace: .*weight"):
        model(torch.randn(2, 4))


class Reversible(torch.autograd.Function):
    """Runs a layer without a graph and differentiates it in backward, which fills the gradients of its parameters."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.layer(x).backward(grad)
        return x.grad, None


class WithModuleInFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Reversible.apply(x.requires_grad_(), self.layer).sum()


def test_a_function_that_fills_gradients_of_a_module_is_refused():
    model = ndcompile.compile(WithModuleInFunction(), backend="eager")
    with pytest.raises(CaptureError, match=r"Reversible is given a Linear: gradients .* would pass the graph by"):
        model(torch.randn(2, 4))
