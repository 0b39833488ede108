"""Files that change while they are loaded: an error that names the file, never weights of two checkpoints."""

from __future__ import annotations

import os

import pytest
import torch
from loader_support import assert_holds, on_meta, rewrite, targets_of, tiny_model

from ndcompile.loader import CheckpointError, load_into, reading


@pytest.fixture
def llama(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    return model


def truncate(path):
    os.truncate(path, path.stat().st_size - 1000)


def rewrite_in_place(path):
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size - 64)
        file.write(b"\1" * 64)


def replace(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.replace(other, path)


def interrupt(monkeypatch, name, fault, path):
    """Let `fault` happen to `path` when `reading.name` runs for the first time."""
    original, pending = getattr(reading, name), [fault]

    def wrapped(*arguments):
        if pending:
            pending.pop()(path)
        return original(*arguments)

    monkeypatch.setattr(reading, name, wrapped)


def load(model, folder):
    meta = on_meta(model)
    targets = targets_of(meta, (2, 3), (1, 1))
    load_into(meta, targets, folder)
    return targets


@pytest.mark.parametrize("fault", [truncate, rewrite_in_place, replace])
def test_a_file_that_changed_after_its_header_was_read_is_refused(llama, tmp_path, monkeypatch, fault):
    interrupt(monkeypatch, "_open", fault, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"model.safetensors was changed while it was being loaded: expected inode"
    ):
        load(llama, tmp_path)


def test_a_file_that_was_removed_after_its_header_was_read_is_refused(llama, tmp_path, monkeypatch):
    interrupt(monkeypatch, "_open", os.unlink, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors was there .* cannot be opened: No such file"):
        load(llama, tmp_path)


def test_a_file_that_is_truncated_while_it_is_read_is_refused(llama, tmp_path, monkeypatch):
    interrupt(monkeypatch, "_fills_directly", truncate, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors (ends at byte|was changed)"):
        load(llama, tmp_path)


def test_a_file_that_is_rewritten_while_it_is_read_is_refused(llama, tmp_path, monkeypatch):
    interrupt(monkeypatch, "_fills_directly", rewrite_in_place, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="parts of two files"):
        load(llama, tmp_path)


def test_files_may_be_deleted_or_rewritten_after_the_load(llama, tmp_path):
    targets = load(llama, tmp_path)
    rewrite(tmp_path, lambda tensors: {key: torch.zeros_like(value) for key, value in tensors.items()})
    os.unlink(tmp_path / "model.safetensors")
    assert_holds(targets, llama.state_dict())
