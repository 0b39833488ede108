"""What a safetensors checkpoint holds and where: the headers of its files, checked, without any tensor data."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ndcompile.errors import NdcompileError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# The format allows no longer header; a longer one is not a safetensors file.
_MAX_HEADER_BYTES = 100_000_000

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class CheckpointError(NdcompileError, ValueError):
    """The checkpoint cannot be loaded into this model; the message names files, keys and shapes."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint: `nbytes` bytes of row-major data at byte `offset` of `file`."""

    file: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size


def read_catalog(folder: str | os.PathLike[str]) -> dict[str, Entry]:
    """Every tensor of the checkpoint in `folder` by its key.

    A single `model.safetensors` comes before an index, as in transformers. Raises CheckpointError if there is neither,
    a file of the index is missing, a file is truncated, too long or no safetensors file, a key occurs twice, or the
    index and the headers disagree.
    """
    folder = Path(folder)
    if (folder / SINGLE_FILE).is_file():
        return _read_header(folder / SINGLE_FILE)
    if not (folder / INDEX_FILE).is_file():
        raise CheckpointError(_nothing_found(folder))
    weight_map = _read_index(folder / INDEX_FILE)
    names = sorted(set(weight_map.values()))
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise CheckpointError(f"{folder / INDEX_FILE} names files that are missing: {', '.join(absent)}")
    catalog: dict[str, Entry] = {}
    for name in names:
        for key, entry in _read_header(folder / name).items():
            if key in catalog:
                raise CheckpointError(f"key {key!r} is in two files: {catalog[key].file} and {entry.file}")
            catalog[key] = entry
    _check_index(folder / INDEX_FILE, weight_map, catalog)
    return catalog


def _nothing_found(folder: Path) -> str:
    message = f"no checkpoint in {folder}: looked for {SINGLE_FILE} and {INDEX_FILE}"
    if not folder.is_dir():
        return f"{message}, but the folder does not exist"
    others = sorted(path.name for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".gguf"})
    return f"{message}; it holds {', '.join(others)}: convert them to safetensors first" if others else message


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes(), object_pairs_hook=_refuse_duplicates)["weight_map"]
        if not all(isinstance(name, str) for name in weight_map.values()):
            raise TypeError("weight_map must map keys to file names")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no checkpoint index: {error}") from error
    return weight_map


def _check_index(path: Path, weight_map: Mapping[str, str], catalog: Mapping[str, Entry]) -> None:
    problems = []
    for key, name in weight_map.items():
        if key not in catalog:
            problems.append(f"the index places key {key!r} in {name}, whose header lacks it")
        elif catalog[key].file != path.parent / name:
            problems.append(f"the index places key {key!r} in {name}, it is in {catalog[key].file.name}")
    problems += [
        f"key {key!r} of {entry.file.name} is not in the index"
        for key, entry in catalog.items()
        if key not in weight_map
    ]
    if problems:
        raise CheckpointError(f"{path} and the files disagree:\n  " + "\n  ".join(problems))


def _read_header(path: Path) -> dict[str, Entry]:
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > _MAX_HEADER_BYTES:
            raise CheckpointError(f"{path} is no safetensors file, or its header is corrupt")
        text = file.read(header_bytes)
    if len(text) < header_bytes:
        raise CheckpointError(f"{path} is truncated: its header needs {header_bytes} bytes, {len(text)} are there")
    try:
        header = json.loads(text, object_pairs_hook=_refuse_duplicates)
        header.pop("__metadata__", None)
        entries = {key: _entry(path, 8 + header_bytes, item) for key, item in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has a corrupt header: {error}") from error
    _check_extent(path, 8 + header_bytes, file_bytes, entries)
    return entries


def _entry(path: Path, base: int, item: Mapping[str, Any]) -> Entry:
    start, stop = (int(offset) for offset in item["data_offsets"])
    dtype, shape = _DTYPES.get(item["dtype"]), torch.Size(item["shape"])
    if dtype is None:
        raise ValueError(f"unknown dtype {item['dtype']!r}")
    if any(size < 0 for size in shape) or math.prod(shape) * dtype.itemsize != stop - start:
        raise ValueError(f"{stop - start} bytes do not hold shape {tuple(shape)} of {dtype}")
    return Entry(path, base + start, stop - start, dtype, shape)


def _check_extent(path: Path, base: int, file_bytes: int, entries: Mapping[str, Entry]) -> None:
    """The tensors tile the data part of the file: no hole, no overlap, nothing behind them, nothing cut off."""
    end = base
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            raise CheckpointError(f"{path} has a corrupt header: {key!r} starts at byte {entry.offset}, not at {end}")
        end += entry.nbytes
    if file_bytes < end:
        lost = [key for key, entry in entries.items() if entry.offset + entry.nbytes > file_bytes]
        raise CheckpointError(f"{path} is truncated: {file_bytes} of {end} bytes; cut off: {', '.join(lost)}")
    if file_bytes > end:
        raise CheckpointError(f"{path} has {file_bytes - end} trailing bytes after its {end} bytes")


def _refuse_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"duplicate key {key!r}")
        result[key] = value
    return result
