"""Checkpoint keys that need more than a new name: merged experts, concatenated projections, transposed matrices.

This is the seam for conversion on symbolic tensors, which would turn a group into reads of this rank's bytes. For now a
group is read whole and run through the real converter, one group at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ndcompile.loader.catalog import CheckpointError
from ndcompile.loader.keys import ConversionGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    except CheckpointError:
        raise
    except Exception as error:
        keys = ", ".join(key for key, _ in group.sources[:4]) + (", ..." if len(group.sources) > 4 else "")
        raise CheckpointError(f"{group.name} cannot be made of the checkpoint's {keys}: {error}") from error
    return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}
