"""Where a checkpoint is: a folder, or a repository of the Hugging Face Hub in the local cache."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

from ndcompile.loader.catalog import INDEX_FILE, CheckpointError

_FILES = ["*.safetensors", INDEX_FILE, "config.json"]


def resolve_source(source: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder that `source` names: a folder itself, or the snapshot of a Hub id in huggingface_hub's cache.

    A snapshot with safetensors is used as it is; otherwise they are downloaded, unless HF_HUB_OFFLINE is set. Raises
    CheckpointError for a source that is neither.
    """
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file. Pass the folder that holds it, or a Hub id such as 'org/name'.")
    name = os.fspath(source)
    if folder.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise CheckpointError(f"no checkpoint in {folder}: the folder does not exist")
    if (cached := cached_snapshot(name, revision)) is not None:
        return cached
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_FILES))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(
            f"{name!r} is neither a folder nor a repository that can be had: {error}. Pass a folder of safetensors, or "
            f"fill the cache first with: hf download {name}"
        ) from error


def cached_snapshot(name: str, revision: str | None = None) -> Path | None:
    """The folder in huggingface_hub's cache with the safetensors of the Hub id `name`, if they are there."""
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=_FILES, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return folder if has_checkpoint(folder) else None


def has_checkpoint(folder: Path) -> bool:
    """Whether `folder` holds safetensors, complete or not."""
    return (folder / INDEX_FILE).is_file() or any(folder.glob("*.safetensors"))
