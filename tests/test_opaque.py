"""Modules that branch on data run as one node: values and gradients are their own, and what cannot be right raises."""

import logging

import pytest
import torch
from branching_model import Branching, rows
from torch import Tensor, nn

import ndcompile
from ndcompile.capture.opaque import describe
from ndcompile.errors import CaptureError, NdcompileError


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_value_and_gradients_are_the_modules_own(backend, caplog):
    reference = Branching()
    with caplog.at_level(logging.WARNING, "ndcompile.opaque"):
        model = ndcompile.compile(Branching(), backend=backend)
        losses = [(model(rows(seed=seed)), reference(rows(seed=seed))) for seed in (1, 2)]
    expected = "'layers.0.experts' and 1 more like it run as one opaque node each, in eager mode, with whole weights"
    assert [record.message.startswith(expected) for record in caplog.records] == [True]
    assert "branching_model.py" in caplog.text
    for loss, own in losses:
        loss.backward()
        own.backward()
        torch.testing.assert_close(loss, own)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), parameter.grad)
    with torch.no_grad():
        torch.testing.assert_close(model(rows(7)), reference(rows(7)))


class Around(nn.Module):
    """A model around a module that branches on data."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x * self.scale) * x).sum()


class Dropping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x if x.sum() > 0 else -x, 0.5)


class Reversed(torch.autograd.Function):
    """Fills the gradient of a module's parameter by itself."""

    @staticmethod
    def forward(ctx, x: Tensor, module: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return x * module.weight

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.module.weight.grad = (grad * ctx.saved_tensors[0]).sum(0)
        return grad * ctx.module.weight, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0))

    def forward(self, x: Tensor) -> Tensor:
        return Reversed.apply(x, self)


class Selecting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(-1) > 0] if x.sum() > 0 else x[x.sum(-1) < 0]


class Pooling(nn.Module):
    """What is selected has a size that depends on values, its sum has none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = Selecting(), nn.Parameter(torch.arange(6.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x * self.weight).sum()


class Growing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else torch.cat([x, x], 0)[None]


class Writing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.detach()
        if y.sum() > -1e9:
            y.mul_(2)
        return y + x


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_backward_draws_the_random_numbers_of_forward(backend):
    model = ndcompile.compile(Around(Dropping()), backend=backend)
    x = rows(40).abs()
    seen = [model(x).detach() for _ in range(2)]
    loss = model(x)
    loss.backward()
    torch.testing.assert_close(model.scale.grad.full_tensor() * model.scale.full_tensor(), loss.detach())
    assert seen[0] != seen[1]


@pytest.mark.parametrize(
    ("kind", "backend"), [(Reversible, "eager"), (Reversible, "aot_eager"), (Pooling, "aot_eager")]
)
def test_gradients_that_a_function_fills_and_those_of_inner_sizes_are_kept(kind, backend):
    model, reference = ndcompile.compile(Around(kind()), backend=backend), Around(kind())
    for each in (model, reference):
        each(rows()).backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), parameter.grad)


def test_an_output_whose_size_depends_on_values_is_refused():
    with pytest.raises(CaptureError, match="which depends on values"):
        ndcompile.compile(Around(Selecting()), backend="eager")(rows())


def test_an_output_of_another_shape_than_traced_raises():
    model = ndcompile.compile(Around(Growing()), backend="eager")
    model(rows().abs())
    with pytest.raises(NdcompileError, match=r"returned torch.float32 \[5, 6\] when it was traced, but"):
        model(-rows().abs())


def test_a_module_that_writes_to_its_input_raises():
    with pytest.raises(NdcompileError, match="writes to its inputs"):
        ndcompile.compile(Around(Writing()), backend="eager")(rows())


def test_the_description_names_files_by_their_package(monkeypatch):
    """Wherever packages are installed: a text is the same on every machine."""
    monkeypatch.syspath_prepend("/opt/elsewhere")
    model = nn.Sequential(nn.Linear(2, 2))
    text = describe(model, ["0"], "layer '0', /opt/elsewhere/package/modeling.py:3: if x:")
    assert text.endswith("because of package/modeling.py:3: if x:")
