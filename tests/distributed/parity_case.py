"""One comparison of a compiled model with the single-process model: what to run, and the run itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import models
import torch
import workers
from torch import Tensor
from workers import Comparison, Layout, error, full, gradient_errors

import ndcompile
from ndcompile.model_calls import compiled_model

IGNORED = -100


@dataclass(frozen=True)
class Case:
    """A model, a layout, and how it is called.

    shape: batch and sequence of a data rank. ragged: every data rank has a longer batch and sequence than the one
    before. padding: left and right padding masks. items: pass the number of labels of the global batch, as `int` or
    `tensor`. step: compare the parameters after one AdamW step. ranks: permutation of the ranks on the mesh.
    overrides: of the tiny configuration. options: of `ndcompile.compile`.
    """

    model: str
    layout: Layout
    shape: tuple[int, int] = (2, 12)
    ragged: bool = False
    padding: bool = False
    items: str | None = None
    step: bool = False
    ranks: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    overrides: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def batch(case: Case, data_rank: int, seed: int = 0) -> dict[str, Tensor]:
    """The arguments of one data rank's call. Every data rank has another number of ignored labels."""
    rows, length = case.shape
    if case.ragged:
        rows, length = rows + data_rank, length + 3 * data_rank
    vocabulary = case.overrides.get("vocab_size", 128)
    ids = models.token_ids(rows, length, vocabulary, seed=100 * seed + data_rank)
    labels = ids.clone()
    labels[0, : min(2 + 2 * data_rank, length - 2)] = IGNORED  # a batch without labels has no loss
    arguments = {"input_ids": ids, "labels": labels}
    if case.padding:
        mask = torch.ones_like(ids)
        mask[0, : 1 + data_rank] = 0  # left
        mask[-1, length - 2 :] = 0  # right
        labels[mask == 0] = IGNORED
        arguments["attention_mask"] = mask
    return arguments


def compare(case: Case, checkpoint: str, seeds: tuple[int, ...] = (0,)) -> Comparison:
    """Run one step of both models on this rank; with several seeds the gradients accumulate."""
    model = workers.compiled(
        case.model, case.layout, checkpoint, case.overrides, case.dtype, case.ranks, **case.options
    )
    reference = models.build(case.model, case.dtype, **case.overrides)
    return compare_models(model, reference, case, seeds)


def collectives(case: Case, checkpoint: str) -> list[str]:
    """The distributed nodes of the graph that a step of `case` captures, in order."""
    model = workers.compiled(case.model, case.layout, checkpoint, case.overrides, case.dtype, **case.options)
    model(**batch(case, ndcompile.data_rank(model)))
    return [line for signature in compiled_model(model).signatures.values() for line in signature.collectives]


def compare_models(
    model: torch.nn.Module, reference: torch.nn.Module, case: Case, seeds: tuple[int, ...] = (0,)
) -> Comparison:
    """Both models on the same batches: the compiled one on this rank's, the reference on every data rank's."""
    ranks = range(ndcompile.data_world_size(model))
    worst_loss = max(
        step_losses(model, reference, [batch(case, rank, seed) for rank in ranks], case.items) for seed in seeds
    )
    gradients = gradient_errors(model, {name: p.grad for name, p in reference.named_parameters()})
    return Comparison(worst_loss, gradients, _step(model, reference) if case.step else {})


def step_losses(
    model: torch.nn.Module, reference: torch.nn.Module, batches: list[dict[str, Tensor]], items: str | None = None
) -> float:
    """Forward and backward of both models, `batches` being one of each data rank; the error of this rank's loss."""
    world, rank = ndcompile.data_world_size(model), ndcompile.data_rank(model)
    counted = _items(items, batches)
    loss = model(**batches[rank], **counted).loss * (world if counted else 1)
    loss.backward()
    no_cache = {"use_cache": False} if "input_ids" in batches[0] else {}  # what does not read ids has no cache
    expected = [reference(**b, **counted, **no_cache).loss * (world if counted else 1) for b in batches]
    torch.stack(expected).mean().backward()
    return error(loss.detach(), expected[rank].detach())


def _items(items: str | None, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Labels are shifted by one: the first one of a row predicts nothing."""
    if items is None:
        return {}
    count = sum((b["labels"][:, 1:] != IGNORED).sum() for b in batches)
    return {"num_items_in_batch": count if items == "tensor" else int(count)}


def _step(model: torch.nn.Module, reference: torch.nn.Module) -> dict[str, float]:
    """One AdamW step of both; errors of the parameters.

    eps is far above the default: there the first step is lr * sign(gradient), and the sign of a gradient that is zero
    in theory is noise.
    """
    for each in (model, reference):
        torch.optim.AdamW(each.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.1).step()
    expected = dict(reference.named_parameters())
    return {name: error(full(p.detach()), expected[name].detach()) for name, p in model.named_parameters()}


def assert_parity(pool: Any, case: Case, checkpoint: str, seeds: tuple[int, ...] = (0,)) -> None:
    """All ranks agree with the single-process model within LIMIT.

    A tensor over it passes only if both sides agree to EXACT_LIMIT in float64 (a gradient that is zero in theory has
    nothing but noise in float32).
    """
    over = _exceeding(pool, case, checkpoint, seeds, workers.LIMIT)
    if over:
        exact = _exceeding(pool, replace(case, dtype=torch.float64), checkpoint, seeds, workers.EXACT_LIMIT)
        failed = {name: (value, exact[name]) for name, value in over.items() if name in exact}
        assert not failed, f"{case}: errors in float32 and float64: {failed}"


def _exceeding(pool: Any, case: Case, checkpoint: str, seeds: tuple[int, ...], limit: float) -> dict[str, float]:
    over: dict[str, float] = {}
    for comparison in pool(compare, case, checkpoint, seeds):
        over |= comparison.exceeding(limit)
    return over
