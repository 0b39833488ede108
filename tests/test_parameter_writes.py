"""Forwards that write into their own parameters, against the module without a graph: loss, gradients, what is left."""

import copy

import pytest
import torch
from torch import Tensor, nn

import ndcompile
from ndcompile.errors import CaptureError


def clamp_data(module: nn.Module) -> None:
    module.linear.weight.data.clamp_(-0.2, 0.2)


def clamp_without_gradient(module: nn.Module) -> None:
    with torch.no_grad():
        module.linear.weight.clamp_(max=0.1)


def scale_and_shift(module: nn.Module) -> None:
    module.linear.weight.data.mul_(0.5).add_(0.01)


def fill_the_bias(module: nn.Module) -> None:
    module.linear.bias.detach().fill_(0.25)


class Writes(nn.Module):
    """Calls its layer `times` times, each time after a write."""

    def __init__(self, write, times: int = 1) -> None:
        super().__init__()
        self.linear, self.write, self.times = nn.Linear(4, 4), write, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            if self.training:
                self.write(self)
            x = self.linear(x)
        return x.square().sum()


def _pair(write, backend: str, times: int = 1) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Writes(write, times)
    return plain, ndcompile.compile(copy.deepcopy(plain), backend=backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("write", "times"),
    [(clamp_data, 1), (clamp_data, 2), (clamp_without_gradient, 1), (scale_and_shift, 1), (fill_the_bias, 1)],
)
def test_two_steps_are_those_of_the_module(write, times, backend):
    plain, model = _pair(write, backend, times)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for x in torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)):
        losses = [each(x) for each in (plain, model)]
        torch.testing.assert_close(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for name, parameter in plain.named_parameters():
            ours = model.get_parameter(name)
            torch.testing.assert_close(ours.full_tensor(), parameter)  # what the write left
            torch.testing.assert_close(ours.grad.full_tensor(), parameter.grad)
        for optimizer in optimizers:
            optimizer.step()


def test_in_eval_mode_nothing_is_written():
    plain, model = _pair(clamp_data, "eager")
    torch.testing.assert_close(model.eval()(torch.ones(1, 4)), plain.eval()(torch.ones(1, 4)))
    assert model.linear.weight.full_tensor().abs().max() > 0.2


def test_a_write_to_an_activation_keeps_its_gradient():
    class Activation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x)
            hidden.data.clamp_(-0.1, 0.1)
            return (hidden * x).sum()

    torch.manual_seed(0)
    plain, x = Activation(), torch.randn(3, 4)
    model = ndcompile.compile(copy.deepcopy(plain), backend="aot_eager")
    loss, expected = model(x), plain(x)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model.linear.weight.grad.full_tensor(), plain.linear.weight.grad)


def _mean(module: nn.Module) -> None:
    module.linear.weight.data.sub_(module.linear.weight.data.mean())


def _row(module: nn.Module) -> None:
    module.linear.weight.data[0].fill_(0)


def _noise(module: nn.Module) -> None:
    module.linear.weight.data.normal_()


@pytest.mark.parametrize("write", [_mean, _row, _noise])
def test_what_a_shard_cannot_do_alone_is_refused(write):
    _, model = _pair(write, "eager")
    with pytest.raises(
        CaptureError, match=r"writes to the parameter 'linear.weight' in place, with something else .*self.write"
    ):
        model(torch.ones(1, 4))


def test_a_write_behind_a_use_is_refused():
    _, model = _pair(scale_and_shift, "eager", times=2)
    with pytest.raises(
        CaptureError, match=r"writes to the parameter 'linear.weight' in place, after the parameter was"
    ):
        model(torch.ones(1, 4))


def test_other_memory_for_a_parameter_is_refused():
    def replace(module: nn.Module) -> None:
        module.linear.weight.data = torch.zeros(4, 4)

    _, model = _pair(replace, "eager")
    with pytest.raises(CaptureError, match=r"a tensor gets another one's memory by an assignment to .data"):
        model(torch.ones(1, 4))
