"""What save_pretrained of a compiled model takes and refuses, in a single process."""

import os
from pathlib import Path

import models
import pytest
import torch
from saving_support import contents, differing
from transformers import AutoModelForCausalLM

import ndcompile
from ndcompile.errors import NdcompileError, UnsupportedError

ONE = {"num_hidden_layers": 1}


@pytest.fixture(scope="module")
def plain():
    return models.build("llama", **ONE)


@pytest.fixture(scope="module")
def model():
    return ndcompile.compile(models.build("llama", **ONE), backend="aot_eager")


@pytest.mark.parametrize(
    ("argument", "value", "remedy"),
    [
        ("state_dict", {}, "saves the shards that the ranks hold. Leave the argument out"),
        ("push_to_hub", True, r"upload it from one rank with huggingface_hub\.upload_folder"),
        ("token", "secret", r"upload it from one rank with huggingface_hub\.upload_folder"),
        ("distributed_checkpoint", True, r"Use torch\.distributed\.checkpoint\.save"),
        ("safe_serialization", False, "Only safetensors are written"),
        ("repo_id", "me/model", "Leave the argument out"),
    ],
)
def test_an_argument_that_is_not_honoured_is_refused_by_name(argument, value, remedy, model, tmp_path):
    with pytest.raises(UnsupportedError, match=rf"save_pretrained\({argument}=\.\.\.\).*{remedy}"):
        model.save_pretrained(tmp_path / "saved", **{argument: value})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "options",
    [
        {"is_main_process": False},
        {"safe_serialization": True},
        {"max_shard_size": 30_000},
        {"variant": "fp32"},
        {"variant": "fp32", "max_shard_size": "30KB"},
        {"save_peft_format": False},
    ],
    ids=str,
)
def test_the_files_are_those_of_the_plain_model_with_the_same_arguments(options, model, plain, tmp_path):
    plain.save_pretrained(tmp_path / "expected", **{**options, "is_main_process": True})
    model.save_pretrained(tmp_path / "saved", **options)
    assert differing(tmp_path / "saved", tmp_path / "expected") == []


def test_names_of_the_model_are_kept_on_demand(tmp_path):
    plain = models.build("mixtral", **ONE)
    plain.save_pretrained(tmp_path / "expected", save_original_format=False)
    model = ndcompile.compile(models.build("mixtral", **ONE), backend="aot_eager")
    ndcompile.save_pretrained(model, tmp_path / "saved", save_original_format=False)
    assert differing(tmp_path / "saved", tmp_path / "expected") == []


def test_a_size_without_unit_is_refused_before_anything_is_written(model, tmp_path):
    with pytest.raises(ValueError, match=r"many' not supported|Unit"):
        model.save_pretrained(tmp_path / "saved", max_shard_size="many")
    assert os.listdir(tmp_path) == []


def test_a_model_without_weights_cannot_be_saved(tmp_path):
    model = ndcompile.compile(models.on_meta("llama", **ONE), backend="aot_eager")
    with pytest.raises(NdcompileError, match=r"is not loaded.*ndcompile\.load"):
        model.save_pretrained(tmp_path / "saved")
    assert os.listdir(tmp_path) == []


def test_a_file_in_the_place_of_the_folder_is_refused(model, tmp_path):
    (tmp_path / "saved").write_text("mine")
    with pytest.raises(ndcompile.CheckpointError, match=r"saved is a file\. Pass a folder"):
        model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved").read_text() == "mine"


def test_other_files_of_the_folder_stay_and_old_weights_go(model, plain, tmp_path):
    folder = tmp_path / "saved"
    plain.save_pretrained(folder, max_shard_size="30KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "runs").mkdir()
    (folder / "runs" / "log").write_text("1")
    (folder / "link").symlink_to("tokenizer.json")
    model.save_pretrained(folder)
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "runs", "link"}
    assert set(os.listdir(folder)) == expected
    assert (folder / "runs" / "log").read_text() == "1"
    assert os.readlink(folder / "link") == "tokenizer.json"
    assert os.listdir(tmp_path) == ["saved"]


def test_missing_parents_are_made_and_a_link_to_the_folder_is_followed(model, tmp_path):
    target = tmp_path / "a" / "b"
    model.save_pretrained(target)
    (tmp_path / "latest").symlink_to(target)
    before = contents(target)
    model.save_pretrained(tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink()
    assert contents(target) == before


def test_transformers_loads_every_bit_of_another_dtype(tmp_path):
    model = ndcompile.compile(models.build("gemma2", torch.bfloat16, **ONE), backend="aot_eager")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    expected = models.build("gemma2", torch.bfloat16, **ONE).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


def test_a_generation_config_that_transformers_refuses_leaves_no_folder(tmp_path):
    model = ndcompile.compile(models.build("llama", **ONE), backend="aot_eager")
    model.generation_config.temperature = 0.5  # without do_sample
    with pytest.raises(ValueError, match="temperature"):
        model.save_pretrained(tmp_path / "saved")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_may_not_be_written_is_named(model, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ndcompile.CheckpointError, match=r"file.* (cannot be created: )?Not a directory|File exists"):
        model.save_pretrained(Path(blocked, "below", "saved"))
