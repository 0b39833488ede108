"""The cross entropy of a language model's head, a part of the tokens at a time and on shards of the vocabulary.

`vocabulary_loss(hidden, group, size, weight, bias, labels, ...)` is one node for the head's matrix product, what
follows it element by element, and the cross entropy. Logits exist for one chunk of tokens: their gradient is computed
while they are there, and kept as the gradients of `hidden`, `weight` and `bias`; backward only scales these. So nothing
is recomputed, and the weight is not gathered again in backward.

On a vocabulary sharded over tp, ranks exchange two numbers a token (the largest logit and the sum of exponentials) in
place of the logits. A label lives on one rank, so each rank returns the loss of its own labels: a partial sum (P) that
a redistribution P -> I completes. The gradient of `hidden` is partial too, as that of any value that enters shards.

Gradients of the weight are summed over chunks in the weight's dtype. In bf16 each chunk adds one rounding, 2**-9 of the
sum so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ndcompile.operators.redistribute import collectives

Forward = Callable[[Tensor, float], Tensor]
Derivative = Callable[[Tensor, Tensor, float], Tensor]

ELEMENTWISE: dict[str, tuple[Forward, Derivative]] = {
    # name: (z from x and a constant, gradient of x from that of z, z and the constant)
    "mul": (lambda x, constant: x * constant, lambda grad, z, constant: grad * constant),
    "div": (lambda x, constant: x / constant, lambda grad, z, constant: grad / constant),
    "tanh": (lambda x, _: torch.tanh(x), lambda grad, z, _: grad * (1.0 - z * z)),
}
"""What may stand between the head and the cross entropy: scaled and capped logits."""


@dataclass(frozen=True)
class Head:
    """How a head's logits become a loss.

    group, size: ranks that hold shards of the vocabulary; `coordinate` is this rank's index, None where it is whole.
    full: rows of the weight over all ranks; a shard is padded to equal size. ignored: label without a loss. chunks:
    parts of the tokens. dtype: of the cross entropy. steps: names and constants of ELEMENTWISE, in order.
    """

    group: str
    size: int
    coordinate: Tensor | None
    full: int
    ignored: int
    chunks: int
    dtype: torch.dtype
    steps: tuple[tuple[str, float], ...]


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: Head) -> Tensor:
        needed, rows = ctx.needs_input_grad[:3], hidden.reshape(-1, hidden.shape[-1])
        total, grad_weight, grad_bias = None, None, None
        grad_rows: list[Tensor] = []
        for start, stop in _bounds(rows.shape[0], head.chunks):
            part = rows[start:stop]
            if total is not None:
                part = after(part, [total, *grad_rows[-1:], *(g for g in (grad_weight, grad_bias) if g is not None)])
            logits = torch.nn.functional.linear(part, weight, bias)
            loss, grad = _chunk(logits, labels[start:stop], head, any(needed))
            total = loss if total is None else total + loss
            if needed[0]:
                grad_rows.append((grad @ weight).to(hidden.dtype))
            if needed[1] and grad_weight is None:
                grad_weight = (grad.t() @ part).to(weight.dtype)
            elif needed[1]:
                add_product(grad_weight, grad, part)
            if needed[2]:
                summed = grad.sum(0, dtype=head.dtype)
                grad_bias = summed if grad_bias is None else grad_bias + summed
        grad_hidden = torch.cat(grad_rows).view_as(hidden) if grad_rows else None
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        gradients = [x for x in (grad_hidden, grad_weight, grad_bias) if x is not None]
        known = (labels == head.ignored) | ((labels >= 0) & (labels < head.full))
        return finished_loss(total, known.all(), gradients, head.full)

    @staticmethod
    def backward(ctx, grad: Tensor):
        scaled = [
            None if saved is None else (saved * grad).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None


def _bounds(tokens: int, chunks: int) -> Sequence[tuple[int, int]]:
    """Chunks of equal size; the last takes the rest."""
    size = tokens // chunks
    return [(i * size, tokens if i == chunks - 1 else (i + 1) * size) for i in range(chunks)]


def _chunk(logits: Tensor, labels: Tensor, head: Head, with_gradient: bool) -> tuple[Tensor, Any]:
    """The sum of the losses of a chunk's labels that this shard holds, and the gradient of its logits, summed over the
    losses of all labels."""
    values = [logits.to(head.dtype)]
    for name, constant in head.steps:
        values.append(ELEMENTWISE[name][0](values[-1], constant))
    z, columns = values[-1], torch.arange(logits.shape[-1], device=logits.device)
    counted, column = labels != head.ignored, labels
    if head.coordinate is not None:
        first = head.coordinate * logits.shape[-1]
        column = labels - first
        z = torch.where(columns < head.full - first, z, torch.finfo(head.dtype).min)  # the padding of uneven shards
    peak = z.amax(-1, keepdim=True)
    total = torch.exp(z - peak).sum(-1, keepdim=True)  # in this form inductor reads the logits once for both
    log_sum = _log_sum(peak.squeeze(-1), total.squeeze(-1), head)
    here = counted & (column >= 0) & (column < logits.shape[-1])
    picked = z.gather(-1, torch.where(here, column, 0).unsqueeze(-1)).squeeze(-1)
    loss = torch.where(here, log_sum - picked, 0.0).sum()
    if not with_gradient:
        return loss, None
    grad = torch.exp(z - log_sum.unsqueeze(-1)) - (columns == column.unsqueeze(-1)).to(head.dtype)
    grad = torch.where(counted.unsqueeze(-1), grad, 0.0)
    for (name, constant), value in zip(reversed(head.steps), reversed(values), strict=False):
        grad = ELEMENTWISE[name][1](grad, value, constant)
    return loss, grad.to(logits.dtype)


def _log_sum(peak: Tensor, total: Tensor, head: Head) -> Tensor:
    """log(sum(exp(logits))) over all shards of the vocabulary, from each shard's largest logit and its sum."""
    if head.size > 1:
        mine = torch.stack([peak, total]).unsqueeze(0)
        all_ranks = collectives.wait_tensor(collectives.all_gather_into_tensor(mine, head.size, head.group))
        peaks, totals = all_ranks.unbind(1)
        peak = peaks.amax(0)
        total = (totals * torch.exp(peaks - peak)).sum(0)
    return torch.log(total) + peak


@torch.library.custom_op("ndcompile::after", mutates_args=())
def after(value: Tensor, before: Sequence[Tensor]) -> Tensor:
    """A copy of `value` that exists after `before`: inductor would otherwise sum the losses of all chunks in one
    kernel, which reads the logits of all."""
    return value.clone()


@after.register_fake
def _(value: Tensor, before: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(value)


@torch.library.custom_op("ndcompile::add_product", mutates_args=("total",))
def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left.T @ right, in place: inductor's addmm copies the sum so far, which is as large as the weight."""
    left, right = left.to(total.dtype), right.to(total.dtype)
    torch.addmm(total, left.t(), right, out=total)


@add_product.register_fake
def _(total: Tensor, left: Tensor, right: Tensor) -> None:
    return None


@register_flop_formula(torch.ops.ndcompile.add_product)
def _(total: torch.Size, left: torch.Size, right: torch.Size, **_: object) -> int:
    return 2 * left.numel() * right[1]


ADD_PRODUCT = torch.ops.ndcompile.add_product.default
"""The operator as it stands in a graph."""


@torch.library.custom_op("ndcompile::finished_loss", mutates_args=())
def finished_loss(total: Tensor, labels_known: Tensor, gradients: Sequence[Tensor], full: int) -> Tensor:
    """A copy of `total` that exists after `gradients`: the partitioner would otherwise compute them in backward, and
    save all logits for it.

    Raises IndexError, on a GPU a device-side assertion, unless `labels_known`: a label outside the vocabulary of `full`
    tokens is no rank's.
    """
    message = f"A label is outside the vocabulary of {full} tokens and is not the ignored one."
    if labels_known.device.type != "cpu":
        torch._assert_async(labels_known, message)
    elif not labels_known:
        raise IndexError(message)
    return total.clone()


@finished_loss.register_fake
def _(total: Tensor, labels_known: Tensor, gradients: Sequence[Tensor], full: int) -> Tensor:
    return torch.empty_like(total)


def _vocabulary_loss(
    hidden: Tensor,
    group: str,
    size: int,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    full: int,
    ignored: int,
    chunks: int,
    dtype: torch.dtype,
    names: list[str],
    constants: list[float],
    coordinate: Tensor | None = None,
) -> Tensor:
    steps = tuple(zip(names, constants, strict=True))
    head = Head(group, size, coordinate, full, ignored, chunks, dtype, steps)
    return _VocabularyLoss.apply(hidden, weight, bias, labels, head)


_library = torch.library.Library("ndcompile", "FRAGMENT")
_library.define(
    "vocabulary_loss(Tensor hidden, str group, int size, Tensor weight, Tensor? bias, Tensor labels, int full,"
    " int ignored, int chunks, ScalarType dtype, str[] names, float[] constants, Tensor? coordinate=None) -> Tensor"
)
_library.impl("vocabulary_loss", _vocabulary_loss, "CompositeImplicitAutograd")

vocabulary_loss = torch.ops.ndcompile.vocabulary_loss.default
"""The sum over the labels that this rank's shard of the vocabulary holds. hidden (..., width), weight (rows, width),
labels of as many tokens, 1-D."""
