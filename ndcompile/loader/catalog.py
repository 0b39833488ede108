"""What a safetensors checkpoint holds and where: the headers of all its files, checked against each other."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ndcompile.errors import NdcompileError
from ndcompile.loader.coverage import Rectangle, find_fault
from ndcompile.loader.headers import Block, Header, read_header, refuse_duplicates

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLED = {".bin", ".pt", ".pth", ".ckpt", ".gguf"}


class CheckpointError(NdcompileError, ValueError):
    """The checkpoint cannot be loaded into this model; the message names files, keys and shapes."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One tensor of a checkpoint. Its data is one block, or several that tile it (shards which DCP wrote)."""

    key: str
    dtype: torch.dtype
    shape: torch.Size
    blocks: tuple[Block, ...]

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def file_names(self) -> str:
        return ", ".join(sorted({block.file.name for block in self.blocks}))


def read_catalog(folder: str | os.PathLike[str]) -> dict[str, Entry]:
    """Every tensor of the checkpoint in `folder` by its key.

    A single `model.safetensors` comes before an index, as in transformers; without either, the folder may hold shards
    that `torch.distributed.checkpoint` wrote as safetensors. Raises CheckpointError that lists everything that is
    wrong: no checkpoint, files of the index missing, files truncated, too long or no safetensors files, keys twice,
    shards missing, index and headers that disagree.
    """
    folder = Path(folder)
    index: Mapping[str, str] | None = None
    if (folder / SINGLE_FILE).is_file():
        names = [SINGLE_FILE]
    elif (folder / INDEX_FILE).is_file():
        index = _read_index(folder / INDEX_FILE)
        names = sorted(set(index.values()))
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    present = [name for name in names if (folder / name).is_file()]
    headers = {name: read_header(folder / name) for name in present}
    sharded = any("DCP_SHARDING_INFO" in header.metadata for header in headers.values())
    if not names or (index is None and names != [SINGLE_FILE] and not sharded):
        raise CheckpointError(_nothing_found(folder, names))
    problems = [f"{folder / INDEX_FILE} names a file that is missing: {name}" for name in names if name not in present]
    problems += [problem for header in headers.values() for problem in header.problems]
    catalog = _gather(headers, problems)
    if index is not None and not problems:
        problems += _check_index(folder / INDEX_FILE, index, catalog)
    if problems:
        raise CheckpointError(f"the checkpoint in {folder} is broken, nothing was loaded:\n  " + "\n  ".join(problems))
    return catalog


def _gather(headers: Mapping[str, Header], problems: list[str]) -> dict[str, Entry]:
    """Entries of all files; adds what is wrong with them to `problems`."""
    blocks: dict[str, list[Block]] = {}
    for header in headers.values():
        for block in header.blocks:
            blocks.setdefault(block.key, []).append(block)
    catalog = {}
    for key, found in blocks.items():
        entry = catalog[key] = Entry(key, found[0].dtype, _extent(found), tuple(found))
        if len(found) == 1 and found[0].shape == entry.shape:
            continue
        files = ", ".join(str(block.file) for block in found)
        if len({block.dtype for block in found}) > 1 or len({len(block.shape) for block in found}) > 1:
            problems.append(f"key {key!r} has blocks of different dtypes or numbers of dims in {files}")
        elif not any("DCP_SHARDING_INFO" in headers[block.file.name].metadata for block in found):
            problems.append(f"key {key!r} is in two files: {found[0].file} and {found[1].file}")
        elif (fault := find_fault(entry.shape, [Rectangle(b.origin, tuple(b.shape)) for b in found])) is not None:
            problems.append(f"the shards of key {key!r} in {files} do not tile {tuple(entry.shape)}: {fault}")
    return catalog


def _extent(blocks: Sequence[Block]) -> torch.Size:
    """The smallest shape that contains all `blocks`; those without elements say nothing."""
    filled = [block for block in blocks if block.shape.numel()] or blocks[:1]
    ends = ([o + s for o, s in zip(block.origin, block.shape, strict=True)] for block in filled)
    return torch.Size(max(sizes) for sizes in zip(*ends, strict=False))


def _nothing_found(folder: Path, names: Sequence[str]) -> str:
    message = f"no checkpoint in {folder}: looked for {SINGLE_FILE} and {INDEX_FILE}"
    if not folder.is_dir():
        return f"{message}, but the folder does not exist"
    if names:
        return f"{message}; it holds {', '.join(names)} without an index. Rename a single file, or write the index."
    held = sorted(path.name for path in folder.iterdir())
    if ".metadata" in held or any(name.endswith(".distcp") for name in held):
        return (
            f"{message}; it is a torch.distributed.checkpoint folder with pickled metadata. Read it with "
            "torch.distributed.checkpoint.load into the state dict of the compiled model, or write it with "
            "HuggingFaceStorageWriter, whose safetensors can be loaded"
        )
    if pickled := [name for name in held if Path(name).suffix in _PICKLED]:
        return (
            f"{message}; it holds {', '.join(pickled)}, and pickled files run code when they are opened. Convert them "
            "to safetensors once: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    return message


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes(), object_pairs_hook=refuse_duplicates)["weight_map"]
        if not all(isinstance(name, str) for name in weight_map.values()):
            raise TypeError("weight_map must map keys to file names")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no checkpoint index: {error}") from error
    return weight_map


def _check_index(path: Path, weight_map: Mapping[str, str], catalog: Mapping[str, Entry]) -> list[str]:
    problems = []
    for key, name in weight_map.items():
        if key not in catalog:
            problems.append(f"{path} places key {key!r} in {name}, whose header lacks it")
        elif path.parent / name not in {block.file for block in catalog[key].blocks}:
            problems.append(f"{path} places key {key!r} in {name}, it is in {catalog[key].file_names}")
    problems += [
        f"key {key!r} of {entry.file_names} is not in the index {path}"
        for key, entry in catalog.items()
        if key not in weight_map
    ]
    return problems
