"""A Hub id as what a plan is made for: its config in the local cache is enough, without weights and offline."""

from __future__ import annotations

import json

import models
import pytest
from hub_cache import cache, empty_hub

import ndcompile
from ndcompile.cli import main

ONE = {"num_hidden_layers": 1}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    return empty_hub(tmp_path, monkeypatch)


@pytest.fixture
def filled(hub):
    """A cache with the config of org/tiny, as `hf download org/tiny config.json` leaves it."""
    snapshot = cache(hub, models.config("llama", **ONE, architectures=["LlamaForCausalLM"], dtype="float32"))
    assert [file.name for file in snapshot.iterdir()] == ["config.json"]


@pytest.mark.usefixtures("filled")
def test_a_plan_of_a_hub_id_is_that_of_its_config():
    sizes = {"fsdp_size": 2, "tp_size": 2}
    made = ndcompile.plan("org/tiny", sizes, seq_len=16)
    assert made.diff(ndcompile.plan(models.on_meta("llama", **ONE), sizes, seq_len=16)) == ""


@pytest.mark.usefixtures("filled")
def test_the_command_plans_a_hub_id(tmp_path, capsys):
    written = tmp_path / "plan.json"
    assert main(["plan", "org/tiny", "--fsdp", "2", "--seq", "16", "--json", str(written)]) == 0
    assert "LlamaForCausalLM on fsdp=2: 2 ranks" in capsys.readouterr().out
    assert json.loads(written.read_text())["mesh"]["fsdp"] == 2


@pytest.mark.usefixtures("filled")
def test_the_command_searches_for_a_hub_id(capsys):
    assert main(["search", "org/tiny", "--world", "1", "--memory", "1GB", "--seq", "16"]) == 0
    assert "LlamaForCausalLM on 1 ranks of 1 GB" in capsys.readouterr().out


@pytest.mark.usefixtures("hub")
def test_a_hub_id_that_is_not_in_the_cache_says_how_to_get_it(capsys):
    assert main(["plan", "org/tiny"]) == 2
    error = capsys.readouterr().err
    assert "'org/tiny' is neither a file, nor a folder, nor a Hub id in the local cache" in error
    assert "hf download org/tiny config.json" in error
