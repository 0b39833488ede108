"""What loading would do, without doing it: bytes of every rank, and the command that proves a layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loader_support import in_memory, on_meta, rewrite, tiny_model
from safetensors.torch import load_file

import ndcompile
from ndcompile.cli import main
from ndcompile.loader.catalog import CheckpointError
from ndcompile.loader.load import load_into
from ndcompile.loader.planning import plan_loading
from ndcompile.loader.synthetic import synthetic_catalog

SIZES = {"fsdp": 2, "tp": 2, "dp_replicate": 2}
ZOO = Path(__file__).parent / "zoo_configs"


@pytest.fixture
def folder(tmp_path):
    """A tiny Qwen3-MoE in several files."""
    tiny_model("qwen3_moe", num_experts=4).save_pretrained(tmp_path, max_shard_size="30KB")
    return tmp_path


def meta_model():
    return on_meta(tiny_model("qwen3_moe", num_experts=4))


def test_the_planned_bytes_are_those_that_a_load_reads(folder):
    model = meta_model()
    plan = plan_loading(model, folder, SIZES)
    assert len(plan.reads().ranks) == 8
    for reads in plan.reads().ranks:
        targets = [in_memory(source.target, reads.coordinate) for source in plan.assignment.sources]
        assert load_into(model, targets, folder).bytes_read == reads.total
        assert sum(target.tensor.nbytes for target in targets) == reads.needed


def test_a_plan_prints_files_ranks_and_bytes(folder):
    text = str(ndcompile.read_plan(meta_model(), folder, {"fsdp": 2}, ranks=[1]))
    assert "Qwen3MoeForCausalLM on fsdp=2: bytes read by each rank" in text
    assert "kB" in text


def test_a_plan_needs_no_weights_and_leaves_the_model_alone(folder):
    model = meta_model()
    before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    running = torch.distributed.is_initialized()  # another test's group of one rank may be
    ndcompile.read_plan(model, folder, SIZES)
    assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == before
    assert torch.distributed.is_initialized() == running


def test_a_plan_refuses_what_a_load_refuses(folder):
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        ndcompile.read_plan(meta_model(), folder, SIZES)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mixtral", "deepseek_v3", "gpt_oss", "ernie4_5_moe", "phi3"])
def test_the_synthetic_headers_are_those_of_the_saved_checkpoint(tmp_path, model_type):
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    found = synthetic_catalog(on_meta(model))
    assert {k: (e.shape, e.dtype) for k, e in found.items()} == {k: (t.shape, t.dtype) for k, t in saved.items()}


def test_verify_proves_a_checkpoint(folder, capsys):
    assert main(["verify", str(folder), "--fsdp", "4", "--tp", "2"]) == 0
    out = capsys.readouterr().out
    assert "Qwen3MoeForCausalLM on tp=2 x fsdp=4: 8 ranks" in out
    assert "no byte is used twice" in out


def test_verify_takes_a_config_without_weights(capsys):
    assert main(["verify", str(ZOO / "mixtral.json"), "--fsdp", "3", "--dp-replicate", "2", "--ranks"]) == 0
    out = capsys.readouterr().out
    assert "that it would be saved to (no weights were found)" in out
    assert "bytes read by each rank" in out


def test_verify_proves_expert_layouts(capsys):
    assert main(["verify", str(ZOO / "qwen3_moe.json"), "--fsdp", "8", "--tp", "2", "--ep", "8"]) == 0
    assert "tp=2 x ep_rest=4 x efsdp=2: 16 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("qwen3_moe", ["--fsdp", "4", "--ep", "3"], "ep=3 must be a multiple of tp=1 and divide"),
        ("llama", ["--fsdp", "4", "--ep", "2"], "has no expert-parallel plan"),
        ("llama", ["--tp", "3"], "tp=3 does not divide"),
    ],
)
def test_verify_refuses_sizes_that_the_model_cannot_have(name, sizes, message, capsys):
    assert main(["verify", str(ZOO / f"{name}.json"), *sizes]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_refuses_unknown_axes(folder):
    with pytest.raises(ndcompile.MeshError, match=r"unknown axes \['pp'\]"):
        ndcompile.read_plan(meta_model(), folder, {"pp": 2})


def test_verify_lists_keys_from_which_nothing_is_read(tmp_path, capsys):
    tiny_model("llama").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {"model.extra.weight": torch.zeros(3)})
    assert main(["verify", str(tmp_path)]) == 2
    assert "1 keys that LlamaForCausalLM does not know: model.extra.weight (3,) in model" in capsys.readouterr().err
    assert main(["verify", str(tmp_path), "--lenient"]) == 0
    assert "1 keys of the checkpoint are not used: model.extra.weight" in capsys.readouterr().out


def test_verify_says_what_cannot_be_planned(tmp_path, capsys):
    tiny_model("llama").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {key: value for key, value in tensors.items() if "norm" not in key})
    assert main(["verify", str(tmp_path), "--fsdp", "2"]) == 2
    assert "model.norm.weight" in capsys.readouterr().err


def test_verify_refuses_a_size_that_is_none(capsys):
    with pytest.raises(SystemExit):
        main(["verify", "x", "--fsdp", "0"])
    assert "'0' is no size" in capsys.readouterr().err


LARGE = """
import json, resource, time, torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from ndcompile.loader.planning import plan_loading
config = Qwen3MoeConfig(hidden_size=4096, moe_intermediate_size=1536, num_hidden_layers=94, num_attention_heads=64,
                        num_key_value_heads=4, head_dim=128, num_experts=128, vocab_size=151936, mlp_only_layers=[])
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
start = time.process_time()
plan = plan_loading(model, None, {"fsdp": 64, "tp": 4})
reads = plan.reads([200]).ranks[0]
print(json.dumps({"seconds": time.process_time() - start, "keys": len(plan.catalog), "needed": reads.needed,
                  "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


@pytest.mark.slow
def test_one_rank_of_256_plans_235_billion_parameters_in_10_seconds_and_1_gb():
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, timeout=200, check=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["keys"] == 36945
    assert 1.8e9 < measured["needed"] < 1.9e9  # of 470 GB
    assert measured["seconds"] < 10
    assert measured["peak"] < 1e9
