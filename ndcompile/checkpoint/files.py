"""The safetensors files of a folder, planned: which key lies at which byte of which file.

A pure function of keys, shapes and dtypes. The bytes are those that safetensors itself would write.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from huggingface_hub import split_state_dict_into_shards_factory

from ndcompile.checkpoint.reversal import SavedTensor
from ndcompile.errors import UnsupportedError
from ndcompile.loader.headers import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = [
    "U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16",
    "F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL",
]  # fmt: skip
"""safetensors sorts the tensors of a file by dtype, so that each is aligned, then by name."""


@dataclass(frozen=True)
class PlannedFile:
    """A file: its header's bytes, and its keys with the byte at which each begins. `size`: of the whole file."""

    name: str
    header: bytes
    offsets: dict[str, int]
    size: int


@dataclass(frozen=True)
class FilePlan:
    """The files of a folder. `total_bytes`: of all tensors."""

    files: tuple[PlannedFile, ...]
    total_bytes: int

    @cached_property
    def place(self) -> dict[str, tuple[str, int]]:
        """Key -> file and byte."""
        return {key: (file.name, offset) for file in self.files for key, offset in file.offsets.items()}

    def index(self, parameters: int) -> str | None:
        """Text of the index; None for a single file, which needs none."""
        if len(self.files) == 1:
            return None
        content = {
            "metadata": {"total_parameters": parameters, "total_size": self.total_bytes},
            "weight_map": {key: name for key, (name, _) in self.place.items()},
        }
        return json.dumps(content, indent=2, sort_keys=True) + "\n"


def plan_files(tensors: Sequence[SavedTensor], max_shard_size: int | str, variant: str | None) -> FilePlan:
    """Split `tensors` into files of at most `max_shard_size` bytes of data, as transformers does.

    A tensor larger than that has a file of its own. Raises UnsupportedError for a dtype that safetensors lacks, and
    ValueError for a size that is no number with a unit.
    """
    for tensor in tensors:
        if tensor.dtype not in _NAMES:
            raise UnsupportedError(f"{tensor.key!r} is {tensor.dtype}, which safetensors cannot hold. Cast it first.")
    split = split_state_dict_into_shards_factory(
        {tensor.key: tensor for tensor in tensors},
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern=weights_pattern(variant),
        max_shard_size=max_shard_size,
    )
    by_key = {tensor.key: tensor for tensor in tensors}
    files = [_plan_file(name, [by_key[key] for key in keys]) for name, keys in split.filename_to_tensors.items()]
    return FilePlan(tuple(files), sum(tensor.nbytes for tensor in tensors))


def weights_pattern(variant: str | None) -> str:
    """Pattern of the files' names, with `{suffix}` for their number."""
    return "model" + ("" if variant is None else f".{variant}") + "{suffix}.safetensors"


def index_name(variant: str | None) -> str:
    return "model.safetensors.index" + ("" if variant is None else f".{variant}") + ".json"


def _plan_file(name: str, tensors: Sequence[SavedTensor]) -> PlannedFile:
    ordered = sorted(tensors, key=lambda tensor: (_ORDER.index(_NAMES[tensor.dtype]), tensor.key.encode()))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset, starts = 0, {}
    for tensor in ordered:
        starts[tensor.key] = offset
        end = offset + tensor.nbytes
        entries[tensor.key] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return PlannedFile(name, header, {key: len(header) + start for key, start in starts.items()}, len(header) + offset)
