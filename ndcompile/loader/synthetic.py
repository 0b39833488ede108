"""The checkpoint that a model would be saved to, as headers without files: to plan for weights that are elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ndcompile.loader.catalog import Entry
from ndcompile.loader.headers import Block, Stamp
from ndcompile.private.transformers import revert_weight_conversion

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE_BYTES = 5_000_000_000
"""Size of a file, as large as transformers makes them."""


def synthetic_catalog(model: PreTrainedModel) -> dict[str, Entry]:
    """The keys, shapes and files that `save_pretrained` gives `model`: original key names, ties once."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    catalog: dict[str, Entry] = {}
    number, offset = 1, 0
    for key, tensor in revert_weight_conversion(model, tensors).items():
        nbytes = tensor.numel() * tensor.dtype.itemsize
        if offset and offset + nbytes > FILE_BYTES:
            number, offset = number + 1, 0
        file = Path(f"model-{number:05d}.safetensors")
        block = Block(key, file, offset, tensor.dtype, tensor.shape, (0,) * tensor.ndim, Stamp(0, 0, 0))
        catalog[key] = Entry(key, tensor.dtype, tensor.shape, (block,))
        offset += nbytes
    return catalog
