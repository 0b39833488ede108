"""Checkpoint keys that need more than a new name: merged experts, concatenated projections, transposed matrices.

A converter runs twice: here on symbolic tensors, which tells where each element of its results comes from, so that a
rank reads its own bytes. Where that fails, because the converter computes, it runs on the real tensors of the group.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from ndcompile.loader.catalog import CheckpointError, Entry
from ndcompile.loader.keys import ConversionGroup
from ndcompile.loader.reshaping import Inexpressible
from ndcompile.loader.symbolic import SymbolicTensor, symbol_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def trace_group(
    group: ConversionGroup, model: PreTrainedModel, catalog: Mapping[str, Entry], dtype: torch.dtype
) -> dict[str, SymbolicTensor]:
    """What `group` makes of its keys, cast to `dtype` first, by FQN, as pieces of the checkpoint.

    Raises Inexpressible if the converter does more than move elements, and CheckpointError if it cannot take the
    tensors.
    """
    made = convert_group(group, model, lambda key: symbol_of(catalog[key], dtype))
    for name, value in made.items():
        if not isinstance(value, SymbolicTensor) or value.dtype != dtype:
            raise Inexpressible(f"{name} is no rearrangement of the checkpoint's tensors")
    return made  # type: ignore[return-value]


def convert_group(
    group: ConversionGroup, model: PreTrainedModel, load: Callable[[str], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Global tensors by FQN that `group` makes of the tensors `load(key)`.

    With meta tensors this gives names, shapes and dtypes without any data. Raises CheckpointError if the converter
    cannot take the tensors, such as experts of different shapes.
    """
    # A converter collects its inputs in itself, so each run gets a fresh one.
    converter = copy.deepcopy(group.converter)
    for key, pattern in group.sources:
        converter.add_tensor(group.name, key, pattern, lambda key=key: load(key))
    try:
        results = converter.convert(group.name, model=model, config=model.config)
    except (CheckpointError, Inexpressible):
        raise
    except Exception as error:
        keys = ", ".join(key for key, _ in group.sources[:4]) + (", ..." if len(group.sources) > 4 else "")
        raise CheckpointError(f"{group.name} cannot be made of the checkpoint's {keys}: {error}") from error
    return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}
