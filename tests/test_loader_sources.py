"""Where a checkpoint may be: folders, the Hub's cache, and what is refused with the way out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hub_cache import cache, empty_hub
from loader_support import assert_holds, on_meta, targets_of, tiny_model

from ndcompile.loader import CheckpointError, load_into
from ndcompile.loader.catalog import read_catalog
from ndcompile.loader.source import resolve_source


@pytest.fixture
def llama():
    return tiny_model("llama")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    return empty_hub(tmp_path, monkeypatch)


def test_a_hub_id_is_loaded_from_the_cache(hub, llama):
    cache(hub, llama, max_shard_size="30KB")
    meta = on_meta(llama)
    targets = targets_of(meta, (2, 3), (1, 2))
    load_into(meta, targets, "org/tiny")
    assert_holds(targets, llama.state_dict())


def test_a_hub_id_that_is_not_in_the_cache_says_how_to_get_it(hub):
    with pytest.raises(CheckpointError, match=r"'org/tiny' is neither a folder nor .*hf download org/tiny"):
        resolve_source("org/tiny")


def test_a_snapshot_that_lacks_a_file_names_it(hub, llama):
    snapshot = cache(hub, llama, max_shard_size="30KB")
    (lost := sorted(snapshot.glob("*.safetensors"))[1]).unlink()
    with pytest.raises(CheckpointError, match=f"names a file that is missing: {lost.name}"):
        read_catalog(resolve_source("org/tiny"))


def test_a_folder_comes_before_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert resolve_source("org/tiny").samefile(tmp_path / "org" / "tiny")


@pytest.mark.parametrize("source", ["/nowhere/at/all", "./nowhere", "a/b/c"])
def test_a_path_that_does_not_exist_is_no_hub_id(source):
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_source(source)


def test_a_file_is_refused_with_its_folder(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"is a file. Pass the folder"):
        resolve_source(tmp_path / "model.safetensors")


def test_pickled_weights_are_refused_with_the_way_to_convert_them(tmp_path, llama):
    torch.save(llama.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds pytorch_model.bin, and pickled files run code .*save_pretrained"):
        read_catalog(tmp_path)


def test_a_pickled_dcp_folder_is_refused_with_the_way_to_read_it(tmp_path, llama):
    dcp.save(llama.state_dict(), checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError, match=r"pickled metadata. Read it with torch.distributed.checkpoint.load"):
        read_catalog(tmp_path)


def test_several_files_without_an_index_are_refused(tmp_path, llama):
    llama.save_pretrained(tmp_path, max_shard_size="30KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"without an index. Rename a single file, or write the index"):
        read_catalog(tmp_path)
