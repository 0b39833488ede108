"""huggingface_hub's cache of a machine without network, in a temporary folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PretrainedConfig, PreTrainedModel

COMMIT = "0123456789012345678901234567890123456789"


def empty_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an empty cache below `folder`, which the test uses from now on."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return folder / "hub"


def cache(hub: Path, content: PreTrainedModel | PretrainedConfig, **options: str) -> Path:
    """Put `content` into the cache as "org/tiny", as huggingface_hub does: snapshots that link to blobs."""
    repository = hub / "models--org--tiny"
    snapshot, blobs = repository / "snapshots" / COMMIT, repository / "blobs"
    content.save_pretrained(snapshot, **options)
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(blobs / str(number))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot
