"""Statistics between a colwise and a rowwise projection, over the dim that tp shards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import workers
from torch import Tensor, nn
from workers import LIMIT, TP2, Comparison, error, gradient_errors

import ndcompile

RULES = {"tp_plan": {"up": "colwise", "down": "rowwise"}}

MIDDLES = {
    "mean": lambda h: h - h.mean(-1, keepdim=True),
    "mean without the dim": lambda h: h * h.mean(-1)[..., None],
    "std": lambda h: F.relu(h - h.mean(-1, keepdim=True) - 0.5 * h.std(-1, keepdim=True, unbiased=False)),
    "unbiased std": lambda h: h / h.std(-1, keepdim=True),
    "var, several dims": lambda h: h / h.var((0, 2), keepdim=True, correction=0.5).sqrt(),
}
READ_A_SHARD = {
    "softmax": lambda h: h.softmax(-1),
    "topk": lambda h: h * (h >= h.topk(3, dim=-1).values[..., -1:]),
    "cumsum": lambda h: h.cumsum(-1),
    "quarter": lambda h: torch.cat([h[..., :2] * 3, h[..., 2:] * 2], -1),
}


class Between(nn.Module):
    """Something between two projections."""

    def __init__(self, middle: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.middle = nn.Linear(6, 8), nn.Linear(8, 6), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.down((MIDDLES | READ_A_SHARD)[self.middle](self.up(x))).square().sum()


def _compiled(middle: str, **options) -> nn.Module:
    return ndcompile.compile(
        Between(middle), workers.mesh(TP2), distributed_config=RULES, backend="aot_eager", **options
    )


def _compare(middle: str) -> Comparison:
    model, reference = _compiled(middle), Between(middle)
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1))
    loss, expected = model(x), reference(x)
    loss.backward()
    expected.backward()
    gradients = gradient_errors(model, {name: p.grad for name, p in reference.named_parameters()})
    return Comparison(error(loss.detach(), expected.detach()), gradients)


@pytest.mark.parametrize("middle", MIDDLES)
def test_a_statistic_is_that_of_all_ranks(world, middle):
    for comparison in world(2)(_compare, middle):
        assert not comparison.exceeding(LIMIT)


def _call(middle: str, **options) -> float:
    return _compiled(middle, **options)(torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1))).item()


@pytest.mark.parametrize("middle", READ_A_SHARD)
def test_what_cannot_be_reduced_is_refused(world, middle):
    for kind, message in world(2).errors(_call, middle):
        assert kind == "VerifyError"
        assert "reads along dim 2 of a value of shape (2, 3, 4) on a rank, which tp_plan has sharded" in message


def _half() -> None:
    MIDDLES["half"] = lambda h: torch.cat([h[..., :4], h[..., 4:] * 2], -1)
    _call("half")


def test_code_that_does_something_else_on_a_shard_is_refused(world):
    """The first four columns are all of a rank's, so Python takes no slice there."""
    for kind, message in world(2).errors(_half):
        assert kind == "VerifyError"
        assert "is not what the same code does without tp: it depends on a size that tp=2 cuts" in message


def _without_the_pass(middle: str) -> float:
    return _call(middle, disable_passes=("reduce_statistics",), verify="off")


def test_without_the_pass_the_loss_is_another(world):
    """What the pass is there for: the shard's own statistic gives a plausible number."""
    right, wrong = world(2)(_call, "std")[0], world(2)(_without_the_pass, "std")[0]
    assert abs(right - wrong) > 0.01 * abs(right)
