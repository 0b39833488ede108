"""The folder of a checkpoint: staged beside its final name, and put in its place when it is complete."""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.dynamic_module_utils import custom_object_save

from ndcompile.checkpoint.files import FilePlan, index_name, weights_pattern
from ndcompile.loader.catalog import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCRATCH = "scratch"


@dataclass(frozen=True)
class Staging:
    """`path` is beside `final`, on the same file system, and under a name that nothing else uses."""

    final: Path
    path: Path

    @classmethod
    def of(cls, folder: Path, token: str) -> Staging:
        return cls(folder, folder.with_name(f".{folder.name}.saving-{token}"))

    @property
    def previous(self) -> Path:
        """Where the checkpoint before goes for the moment between two renames."""
        return self.path.with_name(self.path.name.replace(".saving-", ".previous-"))

    def scratch(self, number: int) -> Path:
        return self.path / SCRATCH / str(number)

    def discard(self) -> None:
        """Remove what was staged; the final folder is as it was."""
        shutil.rmtree(self.path, ignore_errors=True)


def check_folder(folder: Path) -> None:
    """Raises CheckpointError for a path that cannot become the folder of a checkpoint."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file. Pass a folder.")
    if os.path.ismount(folder) or folder == folder.parent:
        raise CheckpointError(
            f"{folder} is the root of a file system: a checkpoint is put in place by renaming, which it does not "
            f"allow. Save to a folder inside, such as {folder / 'model'}."
        )


def stage(staging: Staging, plan: FilePlan, scratch_bytes: Iterable[int]) -> None:
    """Create the staging folder with every file in its final size: headers, and holes for the data.

    Raises CheckpointError if the file system has not enough space or does not allow it.
    """
    scratch = list(scratch_bytes)
    parent, needed = staging.path.parent, sum(file.size for file in plan.files) + sum(scratch)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
        if free < needed:
            raise CheckpointError(f"{parent} has {free:,} bytes free, the checkpoint {staging.final} needs {needed:,}")
        staging.path.mkdir()
        for file in plan.files:
            _create(staging.path / file.name, file.header, file.size)
        if scratch:
            (staging.path / SCRATCH).mkdir()
        for number, size in enumerate(scratch):
            _create(staging.scratch(number), b"", size)
    except OSError as error:
        raise CheckpointError(f"{error.filename or staging.path} cannot be created: {error.strerror}") from error


def check_visible(staging: Staging, plan: FilePlan, rank: int) -> None:
    """Raises CheckpointError if this rank does not see the files that the first rank created."""
    for file in plan.files:
        path = staging.path / file.name
        found = path.stat().st_size if path.is_file() else None
        if found != file.size:
            raise CheckpointError(
                f"rank {rank} sees {'nothing' if found is None else f'{found} bytes'} at {path}, where rank 0 created "
                f"{file.size} bytes. All ranks must save to one shared file system."
            )


def write_config(model: PreTrainedModel, folder: Path, plan: FilePlan, variant: str | None) -> None:
    """Everything but the weights: index, config, generation config, the code of a custom model."""
    if (index := plan.index(model.num_parameters())) is not None:
        (folder / index_name(variant)).write_text(index, encoding="utf-8")
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).split(".")[1]
    config.architectures = [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def publish(staging: Staging, variant: str | None) -> None:
    """Put the staged folder in the place of the final one. Other files of that (a tokenizer) are kept.

    Two renames: a process that dies between them leaves the checkpoint before under `staging.previous`, complete.

    Raises CheckpointError if the file system refuses; the final folder is then as it was.
    """
    shutil.rmtree(staging.path / SCRATCH, ignore_errors=True)
    try:
        if not staging.final.exists():
            _sync(staging.path)
            os.rename(staging.path, staging.final)
        else:
            _keep_others(staging, variant)
            _sync(staging.path)
            os.rename(staging.final, staging.previous)
            try:
                os.rename(staging.path, staging.final)
            except OSError:
                os.rename(staging.previous, staging.final)
                raise
        _sync(staging.final.parent)
    except OSError as error:
        raise CheckpointError(f"{staging.final} cannot be put in place: {error.strerror}") from error
    shutil.rmtree(staging.previous, ignore_errors=True)


def _keep_others(staging: Staging, variant: str | None) -> None:
    """Give the new folder what is in the old one and is no part of its model: links, without copying."""
    stem = re.escape(weights_pattern(variant).format(suffix="@")).replace("@", r"(-\d{5}-of-\d{5})?")
    ours = re.compile(rf"{stem}|{re.escape(index_name(variant))}")
    for entry in os.scandir(staging.final):
        target = staging.path / entry.name
        if ours.fullmatch(entry.name) or target.exists():
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.copytree(entry.path, target, symlinks=True, copy_function=_link)
        else:
            _link(entry.path, target)


def _link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(source, target, follow_symlinks=False)


def _create(path: Path, header: bytes, size: int) -> None:
    with path.open("xb") as file:
        file.write(header)
        file.truncate(size)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
