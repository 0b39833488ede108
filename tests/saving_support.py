"""Comparison of saved folders, and a conversion that computes."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter


def contents(folder: str | os.PathLike[str]) -> dict[str, bytes]:
    """Every file of a folder, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def differing(folder: str | os.PathLike[str], expected: str | os.PathLike[str]) -> list[str]:
    """Names of files that are in one folder only, or have other bytes."""
    ours, theirs = contents(folder), contents(expected)
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


class Scale(ConversionOps):
    """Multiplies by a power of two: exact, and nothing that moving elements could express."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        (tensors,) = input_dict.values()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        return {target_patterns[0]: tensor * self.factor}

    @property
    def reverse_op(self) -> ConversionOps:
        return Scale(1 / self.factor)


def with_scaled_heads(model: PreTrainedModel) -> PreTrainedModel:
    """The model with a checkpoint format that stores `o_proj` and `down_proj` halved, under other names."""
    model._weight_conversions = [
        WeightConverter(["attention.wo.weight"], ["self_attn.o_proj.weight"], [Scale(2.0)]),
        WeightConverter(["mlp.w2.weight"], ["mlp.down_proj.weight"], [Scale(2.0)]),
    ]
    return model
