"""`ndcompile.plan` and its command: tables, explain, diff, JSON, and what they refuse."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch
from golden_text import golden_torch, same
from transformers import GPT2Config
from transformers.distributed import DistributedConfig

import ndcompile
from ndcompile.cli import main

ZOO = Path(__file__).parent / "zoo_configs"
LARGE = Path(__file__).parent / "plan_configs"


@functools.cache
def _on_fsdp8():
    return ndcompile.plan(models.on_meta("llama", num_hidden_layers=4), {"fsdp_size": 8}, seq_len=64)


@pytest.fixture(scope="module")
def plan():
    return ndcompile.plan(models.on_meta("llama", num_hidden_layers=4), {"fsdp_size": 4, "tp_size": 2}, seq_len=64)


@golden_torch
def test_golden_parameters_and_boundaries_of_show(plan):
    text = str(plan)
    same("\n".join(line.rstrip() for line in text.partition("Collectives")[0].splitlines()) + "\n", "llama_show.txt")


@golden_torch
def test_golden_explain(plan):
    same(plan.explain("model.layers.3.self_attn.o_proj"), "llama_explain.txt")


@golden_torch
def test_golden_diff_of_a_pass(plan):
    same(plan.diff_pass("unshard_parameters"), "llama_unshard_parameters.txt")


@golden_torch
def test_golden_diff(plan):
    same(plan.diff(_on_fsdp8()), "llama_diff.txt")


def test_the_command_prints_the_diff_to_a_plan_that_was_written(plan, tmp_path, capsys):
    _on_fsdp8().to_json(tmp_path / "other.json")
    model = models.on_meta("llama", num_hidden_layers=4)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path)
    command = ["plan", str(tmp_path), "--fsdp", "4", "--tp", "2", "--seq", "64"]
    assert main([*command, "--diff", str(tmp_path / "other.json")]) == 0
    assert capsys.readouterr().out == _on_fsdp8().diff(plan) + "\n"


def test_a_diff_fits_100_columns(plan):
    assert max(map(len, plan.diff(_on_fsdp8()).splitlines())) <= 100


def test_a_pass_of_another_name_lists_the_known_ones(plan):
    with pytest.raises(ValueError, match=r"'unshard' is no pass of this plan. Passes: captured, .*unshard_parameters"):
        plan.diff_pass("unshard")


def test_the_command_prints_what_a_pass_did(capsys):
    command = ["plan", str(ZOO / "llama.json"), "--fsdp", "2", "--seq", "16", "--pass", "unshard_parameters"]
    assert main(command) == 0
    assert "+ unshard_default" in capsys.readouterr().out


def test_show_says_what_is_proven_of_all_layers(plan):
    parameters = sum(1 for _ in models.on_meta("llama", num_hidden_layers=4).named_parameters())
    assert f"Along tp proven: {parameters} parameters" in str(plan)


def test_explain_says_what_a_value_is_along_tp(plan):
    assert "along tp: S(2), a shard on dim 2" in plan.explain("silu")


def test_show_fits_100_columns(plan):
    assert max(map(len, str(plan).splitlines())) <= 100


def test_show_has_the_critical_path_the_rates_and_the_formulas(plan):
    text = str(plan)
    path = text.partition("Critical path")[2]
    assert "compute" in path
    assert "optimizer" in path
    assert "link_bandwidth=4.5e+11" in text
    assert "sent = what a rank sends" in text


def test_show_prints_plain_text_when_piped(plan, capsys):
    plan.show()
    assert capsys.readouterr().out == str(plan)
    assert "\x1b" not in str(plan)


def test_every_parameter_is_in_one_row(plan):
    model = models.on_meta("llama", num_hidden_layers=4)
    names = [fqn for row in plan.report.parameters for fqn in row.fqns]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_rules_name_the_key_of_the_plan_the_override_or_the_default():
    override = {"model.layers.*.mlp.gate_proj": "colwise", "model.layers.*.mlp.up_proj": "colwise"}
    made = ndcompile.plan(
        models.on_meta("llama", num_hidden_layers=1), DistributedConfig(tp_size=2, tp_plan=override), seq_len=8
    )
    rules = {row.name: row.rule for row in made.report.parameters}
    assert rules["model.layers.0.mlp.gate_proj.weight"] == (
        "distributed_config.tp_plan['model.layers.*.mlp.gate_proj'] = colwise"
    )
    assert rules["model.layers.0.mlp.down_proj.weight"] == "tp_plan['model.layers.*.mlp.down_proj'] = rowwise"
    assert rules["model.norm.weight"] == "default: replicated over tp"


def test_rules_of_experts_name_the_ep_plan():
    made = ndcompile.plan(models.on_meta("qwen3_moe"), {"fsdp_size": 2, "ep_size": 2}, seq_len=8)
    rules = {row.name: row.rule for row in made.report.parameters}
    key = "model.layers.*.mlp.experts.down_proj"
    assert rules[key] == f"ep_plan[{key!r}] = grouped_gemm"


def test_the_ranges_of_all_ranks_tile_every_parameter(plan):
    """Each element is held by one rank of fsdp, and by both of tp where it is replicated."""
    for row in plan.report.parameters:
        seen = torch.zeros(row.shape, dtype=torch.int64)
        for rank in range(plan.report.ranks):
            lines = plan.of_rank(rank).splitlines()
            line = next(line for line in lines if line.startswith((f"  {row.name}:", f"  {row.name} (")))
            dims = line.partition("[")[2].partition("]")[0].split(", ")
            seen[tuple(slice(*map(int, dim.split(":"))) for dim in dims)] += 1
        copies = 2 if row.placements["tp"] == "R" else 1
        assert (seen == copies).all(), row.name


def test_explain_says_which_ranks_hold_which_range(plan):
    text = plan.explain("model.layers.3.self_attn.q_proj.weight")
    assert "dim 0 of 64 is cut by tp x fsdp, without padding:" in text
    assert "    8:16 on rank 2\n" in text


def test_the_command_prints_the_slices_of_a_rank(capsys):
    command = ["plan", str(ZOO / "llama.json"), "--fsdp", "2", "--seq", "16", "--rank"]
    assert main([*command, "1"]) == 0
    assert "rank 1 of 2 of LlamaForCausalLM, at fsdp=1" in capsys.readouterr().out
    assert main([*command, "2"]) == 2
    assert "rank 2 is none of this mesh of 2 ranks: give 0 to 1" in capsys.readouterr().err


def test_explain_knows_a_lowered_node(plan):
    name = next(node.name for node in plan.traced.backward.graph.nodes if "reduce_scatter" in node.name)
    assert "node of the graph backward: " in plan.explain(name)


def test_explain_of_another_name_says_what_is_close(plan):
    with pytest.raises(ValueError, match=r"Close: .*model.layers.3.self_attn.o_proj"):
        plan.explain("model.layers.3.self_attn.oproj")


def test_json_gives_the_same_plan_back(plan, tmp_path):
    plan.to_json(tmp_path / "plan.json")
    assert ndcompile.load_plan(tmp_path / "plan.json") == plan


def test_json_names_the_fields_that_are_documented(plan, tmp_path):
    plan.to_json(tmp_path / "plan.json")
    document = (Path(__file__).parent.parent / "docs" / "inspection.md").read_text()
    given = json.loads((tmp_path / "plan.json").read_text())
    names = set(given) | {
        key for name in ("parameters", "boundaries", "collectives", "passes") for key in given[name][0]
    }
    assert [name for name in sorted(names) if f"`{name}`" not in document] == []


def test_json_of_another_schema_is_refused(plan, tmp_path):
    newer = dataclasses.replace(plan.report, schema=99)
    ndcompile.Plan(newer).to_json(tmp_path / "plan.json")
    with pytest.raises(ndcompile.NdcompileError, match="has schema 99, this ndcompile reads 1"):
        ndcompile.load_plan(tmp_path / "plan.json")


def test_a_file_that_is_no_plan_is_refused(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ndcompile.NdcompileError, match="has no 'schema'"):
        ndcompile.load_plan(tmp_path / "plan.json")


def test_diff_of_a_plan_with_itself_is_empty(plan):
    assert plan.diff(plan) == ""


def test_diff_shows_both_sides_of_what_differs(plan):
    text = plan.diff(_on_fsdp8())
    assert "- LlamaForCausalLM on fsdp=4 x tp=2, 8 ranks" in text
    assert "+ LlamaForCausalLM on fsdp=8, 8 ranks" in text
    assert "- all_reduce over tp=2, forward, activations" in text
    assert "+ all_reduce over tp" not in text


def test_the_command_plans_a_config_and_writes_json(tmp_path, capsys):
    target = tmp_path / "plan.json"
    assert main(["plan", str(ZOO / "llama.json"), "--fsdp", "2", "--seq", "16", "--json", str(target)]) == 0
    assert "LlamaForCausalLM on fsdp=2: 2 ranks" in capsys.readouterr().out
    assert main(["plan", str(ZOO / "llama.json"), "--fsdp", "2", "--seq", "16", "--diff", str(target)]) == 0
    assert "The plans are equal." in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_missing_folder_is_told_before_the_work(option, tmp_path, capsys):
    assert main(["plan", str(tmp_path / "no.json"), option, str(tmp_path / "no" / "plan")]) == 2
    assert f"the folder {tmp_path / 'no'} does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "3"], "tp=3 does not divide the 4 heads"),
        (["--fsdp", "4", "--ep", "2"], "has no expert-parallel plan"),
        (["--fsdp", "4", "--tp", "2", "--world", "16"], "is 8 ranks, not 16. Legal with the other sizes kept"),
        (["--rates", "abacus"], "Presets: ['h100-"),
    ],
)
def test_the_command_says_what_would_be_legal(arguments, message, capsys):
    assert main(["plan", str(ZOO / "llama.json"), "--seq", "16", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("axis", ["--pp", "--cp"])  # --cp is no abbreviation of --cpu-offload
@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        (["plan"], "Axes of a mesh: --fsdp, --tp, --ep, --dp-replicate; --help lists"),
        (["verify"], "Axes of a mesh: --fsdp, --tp, --ep, --dp-replicate; --help lists"),
        (["search", "--world", "2", "--memory", "1GB"], "takes no sizes of axes"),
    ],
)
def test_an_unknown_axis_of_a_command_lists_the_known_ones(command, axis, remedy, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*command, "config.json", axis, "2"])
    error = capsys.readouterr().err
    assert f"unrecognized arguments: {axis} 2. " in error
    assert remedy in error


def test_an_unknown_source_is_refused(capsys):
    assert main(["plan", "nobody/nothing"]) == 2
    assert "neither a file, nor a folder, nor a Hub id in the local cache" in capsys.readouterr().err


def test_an_unknown_axis_is_refused_with_the_known_ones():
    with pytest.raises(ndcompile.MeshError, match=r"unknown keys \['cp_size'\]. Axes: dp_replicate_size, fsdp_size"):
        ndcompile.plan(models.config("llama"), {"cp_size": 2})


def test_a_model_without_a_plan_is_refused():
    with pytest.raises(ndcompile.PlanError, match="has no tensor-parallel plan"):
        ndcompile.plan(GPT2Config(n_layer=1, n_embd=64, n_head=4), {"tp_size": 2})


@pytest.mark.parametrize("name", ["batch_size", "seq_len"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}=0 must be a whole number"):
        ndcompile.plan(models.config("llama"), **{name: 0})


def test_something_else_is_refused():
    with pytest.raises(TypeError, match="A plan cannot be made of a int"):
        ndcompile.plan(5)


SCRIPT = """
import json, resource, sys, time
import ndcompile
start = time.perf_counter()
report = ndcompile.plan(sys.argv[1], json.loads(sys.argv[2]), seq_len=4096).report
print(json.dumps({"seconds": time.perf_counter() - start, "ranks": report.ranks,
                  "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                  "parameters": {f.name: f.value for f in report.memory}["parameters"]}))
"""


@pytest.mark.parametrize(
    ("name", "config", "ranks", "stored"),
    [
        ("llama_3_1_405b", {"fsdp_size": 128, "tp_size": 8}, 1024, 405.85e9 * 2 / 1024),
        pytest.param("deepseek_v3_671b", {"fsdp_size": 2048, "ep_size": 64}, 2048, None, marks=pytest.mark.slow),
        pytest.param(
            "deepseek_v3_671b", {"fsdp_size": 256, "tp_size": 8, "ep_size": 64}, 2048, None, marks=pytest.mark.slow
        ),
    ],
)
def test_large_models_are_planned_in_a_minute_and_4_gb(name, config, ranks, stored):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(LARGE / f"{name}.json"), json.dumps(config)],
        capture_output=True, text=True, timeout=290, check=True,
    )  # fmt: skip
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["ranks"] == ranks
    assert measured["seconds"] < 60
    assert measured["peak"] < 4e9
    if stored:
        assert measured["parameters"] == pytest.approx(stored, rel=0.001)


def test_saved_tensors_are_listed_and_follow_a_memory_budget():
    options = {"batch_size": 2, "seq_len": 64}
    free = ndcompile.plan(models.config("llama"), {"fsdp_size": 2}, **options)
    activations = {figure.name: figure.value for figure in free.report.memory}["activations"]
    assert sum(row.nbytes for row in free.report.saved) == activations
    less = ndcompile.plan(models.config("llama"), {"fsdp_size": 2}, memory_budget=int(0.8 * activations), **options)
    assert sum(row.nbytes for row in less.report.saved) <= 0.8 * activations
    assert "Saved for backward" in str(less)
