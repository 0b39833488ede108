"""The header of one safetensors file, checked against the file, without any tensor data."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

# The format allows no longer header; a longer one is not a safetensors file.
_MAX_HEADER_BYTES = 100_000_000

DTYPES = {
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


class Stamp(NamedTuple):
    """What changes when a file is rewritten, replaced or truncated."""

    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, eq=False)
class Block:
    """Row-major data of `shape` at byte `offset` of `file`: the tensor `key`, or the part of it at `origin`.

    `stamp` is the file's when its header was read.
    """

    key: str
    file: Path
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    origin: tuple[int, ...]
    stamp: Stamp

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """The tensors of a file, its free-form metadata, and one line for everything that is wrong with it."""

    blocks: tuple[Block, ...]
    metadata: Mapping[str, str]
    problems: tuple[str, ...]


def read_header(path: Path) -> Header:
    """Header of the safetensors file at `path`. A file without usable header has no blocks, and a problem."""
    try:
        with path.open("rb") as file:
            stamp = Stamp.of(os.fstat(file.fileno()))
            prefix = file.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or header_bytes > _MAX_HEADER_BYTES:
                return _broken(f"{path} is no safetensors file, or its header is corrupt ({_size_of(prefix)})")
            text = file.read(header_bytes)
    except OSError as error:
        return _broken(f"{path} cannot be read: {error.strerror}")
    if len(text) < header_bytes:
        return _broken(f"{path} is truncated: its header needs {header_bytes} bytes, {len(text)} are there")
    try:
        items = json.loads(text, object_pairs_hook=refuse_duplicates)
        metadata = items.pop("__metadata__", None) or {}
        shardings = json.loads(metadata.get("DCP_SHARDING_INFO", "{}"))
    except (ValueError, TypeError, AttributeError) as error:
        return _broken(f"{path} has a corrupt header: {error}")
    blocks: list[Block] = []
    problems: list[str] = []
    for key, item in items.items():
        try:
            blocks.append(_block(key, path, 8 + header_bytes, item, shardings.get(key), stamp))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            detail = f"has no {error}" if isinstance(error, KeyError) else str(error)
            problems.append(f"{path} has a corrupt header: key {key!r}: {detail}")
    if not problems:
        problems = _check_extent(path, 8 + header_bytes, stamp.size, blocks)
    return Header(tuple(blocks), metadata, tuple(problems))


def refuse_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """For `object_pairs_hook`: JSON lets a key occur twice, and Python would take the last."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"duplicate key {key!r}")
        result[key] = value
    return result


def _broken(problem: str) -> Header:
    return Header((), {}, (problem,))


def _size_of(prefix: bytes) -> str:
    if len(prefix) < 8:
        return f"{len(prefix)} bytes"
    return f"it claims a header of {int.from_bytes(prefix, 'little')} bytes, at most {_MAX_HEADER_BYTES} are legal"


def _block(key: str, path: Path, base: int, item: Mapping[str, Any], sharding: Any, stamp: Stamp) -> Block:
    start, stop = (int(offset) for offset in item["data_offsets"])
    dtype, shape = DTYPES.get(item["dtype"]), torch.Size(item["shape"])
    if dtype is None:
        raise ValueError(f"unknown dtype {item['dtype']!r}; known are {', '.join(DTYPES)}")
    if any(size < 0 for size in shape) or math.prod(shape) * dtype.itemsize != stop - start:
        raise ValueError(
            f"{stop - start} bytes do not hold shape {tuple(shape)} of {dtype}, which needs "
            f"{math.prod(shape) * dtype.itemsize}"
        )
    origin = (0,) * len(shape) if sharding is None else tuple(int(start) for start in sharding["saved_offsets"])
    if len(origin) != len(shape) or any(start < 0 for start in origin):
        raise ValueError(f"saved_offsets {origin} do not fit shape {tuple(shape)}")
    return Block(key, path, base + start, dtype, shape, origin, stamp)


def _check_extent(path: Path, base: int, file_bytes: int, blocks: Iterable[Block]) -> list[str]:
    """The tensors tile the data part of the file: no hole, no overlap, nothing behind them, nothing cut off."""
    problems, end = [], base
    for block in sorted(blocks, key=lambda block: (block.offset, block.nbytes)):
        if block.offset != end:
            problems.append(
                f"{path} has a corrupt header: key {block.key!r} starts at byte {block.offset}, not at {end}, where "
                "the tensor before it ends"
            )
        end = max(end, block.offset + block.nbytes)
    if problems:
        return problems
    if file_bytes < end:
        lost = [block.key for block in blocks if block.offset + block.nbytes > file_bytes]
        return [f"{path} is truncated: {file_bytes} of {end} bytes; cut off: {', '.join(lost)}"]
    if file_bytes > end:
        return [f"{path} has {file_bytes - end} trailing bytes after its {end} bytes"]
    return []
