"""Which sizes of tp a model allows: a rank must hold whole heads, and shards of its own of packed weights and experts.

What tp need not divide is padded: linear weights and embeddings. All limits are found before any is checked, so that
the sizes that an error offers are legal for the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from ndcompile.errors import PlanError
from ndcompile.plans.styles import STYLES
from ndcompile.private.distributed import StridedShard

PADDED_STYLES = {style for style in STYLES if style.startswith(("colwise", "rowwise", "embedding"))}
"""Padding these with zeros changes nothing: a rowwise weight multiplies what a padded colwise row gives by zero."""


@dataclass(frozen=True)
class Limit:
    """`number` is a multiple of every legal tp. refusal: of a tp that is not, with a place for `tp`; remedy: if any
    besides another size."""

    number: int
    refusal: str
    remedy: str = ""


def check_tp(model: nn.Module, parameters: Mapping[str, nn.Parameter], tp_styles: Mapping[str, str], tp: int) -> None:
    """Raises PlanError with the layer, its sizes, and the tp sizes that are legal for all layers.

    parameters: those that tp shards, by FQN.
    """
    if tp == 1:
        return
    limits = [*_parameter_limits(parameters, tp_styles), *_head_limits(model, tp_styles)]
    common = math.gcd(*(limit.number for limit in limits))
    for limit in limits:
        if limit.number % tp:
            legal = [size for size in range(1, common + 1) if common % size == 0]
            refusal = limit.refusal.format(tp=f"tp={tp}")
            raise PlanError(
                f"{refusal}. Legal tp sizes for {type(model).__name__}: {legal}. Choose one of them{limit.remedy}."
            )


def _parameter_limits(parameters: Mapping[str, nn.Parameter], tp_styles: Mapping[str, str]) -> Iterator[Limit]:
    for fqn, parameter in parameters.items():
        style = tp_styles.get(fqn, "replicate")
        placement = STYLES[style].place(fqn.rpartition(".")[2], parameter.ndim)
        if isinstance(placement, Shard | StridedShard) and not _can_be_padded(style, placement, parameter.ndim):
            size, parts = parameter.shape[placement.dim], _parts(placement)
            packed = f", {parts} packed parts of {size // parts}" if parts > 1 else ""
            refusal = f"{fqn!r} ({style}) has size {size} on dim {placement.dim}{packed}, which {{tp}} does not divide"
            yield Limit(size // parts if size % parts == 0 else 1, refusal)


def _parts(placement: Placement) -> int:
    return int(placement.split_factor) if isinstance(placement, StridedShard) else 1


def _can_be_padded(style: str, placement: Placement, ndim: int) -> bool:
    return _parts(placement) == 1 and style in PADDED_STYLES and ndim <= 2


def _head_limits(model: nn.Module, tp_styles: Mapping[str, str]) -> Iterator[Limit]:
    """Attention code splits a projection's output into heads: a rank must hold whole ones.

    One that fuses queries, keys and values head by head has as many as the config says, each that much wider.
    """
    from ndcompile.plans.sharding_plan import generic

    for fqn, module in model.named_modules():
        width = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
        if not isinstance(width, int):
            continue
        for name, child in module.named_children():
            path = f"{fqn}.{name}"
            if tp_styles.get(path) != "colwise" or not isinstance(child, nn.Linear) or child.out_features % width:
                continue
            count, heads = child.out_features // width, _heads_of_config(model, module)
            fused = ""
            if heads and count > heads and count % heads == 0:
                fused = f", {count // heads} fused projections of {width} features each"
                count = heads
            yield Limit(
                count,
                f"{{tp}} does not divide the {count} heads of {path!r}{fused}",
                f", or leave this projection whole with tp_plan={{{generic(path)!r}: 'colwise_gather_output'}} and a "
                "'rowwise_split_input' output projection",
            )


def _heads_of_config(model: nn.Module, attention: nn.Module) -> int | None:
    config: Any = getattr(attention, "config", None) or getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    return heads if isinstance(heads, int) and heads > 0 else None
