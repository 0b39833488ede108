"""Branches on data of which one arm only raises are checks of the graph; other branches on data are refused.

PYTEST_DONT_REWRITE: the asserts of this file are to be those of its source.
"""

import pytest
import torch
from torch import Tensor, nn

import ndcompile
from ndcompile.errors import CaptureError


def _assert(x: Tensor, y: Tensor) -> None:
    assert x.max().item() <= 3 and not (y < 0).any(), "too large"  # noqa: PT018


def _if_raise(x: Tensor, y: Tensor) -> None:
    if x.max() > 3 or (y < 0).any():
        message = "too large"
        raise ValueError(message)


def _else_raise(x: Tensor, y: Tensor) -> None:
    if not (y < 0).any() and not bool(x.max() > 3):
        x = x + 1
    else:
        raise ValueError("too large")


def _choice(x: Tensor, y: Tensor) -> None:
    if x.max() > 3:
        x = x + 1


def _either(x: Tensor, y: Tensor) -> None:
    assert x.max() <= 3 or y.max() <= 3


CHECKS = {check.__name__: check for check in (_assert, _if_raise, _else_raise, _choice, _either)}


class Checked(nn.Module):
    def __init__(self, check: str) -> None:
        super().__init__()
        self.scale, self.check = nn.Parameter(torch.tensor(2.0)), check

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        CHECKS[self.check](x, y)
        return (self.scale * x * y).sum()


FINE = torch.tensor([[1.0, 2.0]])


@pytest.mark.parametrize(
    ("check", "backend"),
    [("_assert", "eager"), ("_assert", "aot_eager"), ("_if_raise", "inductor"), ("_else_raise", "eager")],
)
def test_a_check_is_made_at_every_call(check, backend):
    model = ndcompile.compile(Checked(check), backend=backend)
    model(FINE, FINE).backward()
    assert model.scale.grad.full_tensor().item() == 5.0
    for x, y in ((2 * FINE, FINE), (FINE, -FINE)):
        with pytest.raises(RuntimeError, match=r"This check of the model does not hold: .*test_asserted_branches\.py"):
            model(x, y)
    with torch.no_grad():
        assert model(FINE, FINE).item() == 10.0


@pytest.mark.parametrize("check", ["_choice", "_either"])
def test_a_choice_is_refused_with_its_line(check):
    with pytest.raises(CaptureError, match="This line branches on the values of a tensor"):
        ndcompile.compile(Checked(check), backend="eager")(FINE, FINE)
