"""Which layouts are legal for a model and fit a memory, in which order, and what the others are told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from golden_text import golden_torch, same
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

import ndcompile
from ndcompile.cli import main
from ndcompile.inspection.memory import memory
from ndcompile.inspection.rates import PRESETS
from ndcompile.inspection.scheduled import scheduled
from ndcompile.inspection.search import search
from ndcompile.inspection.search_result import Layout, SearchResult
from ndcompile.inspection.search_table import search_table
from ndcompile.inspection.time_model import ADAMW_PASSES, estimate
from ndcompile.inspection.trace import trace

RATES = dataclasses.replace(PRESETS["h100-infiniband"], ranks_a_node=2)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "tie_word_embeddings": False}
LLAMA = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **SIZES)
WIDE = LlamaConfig(
    num_hidden_layers=3,
    num_attention_heads=1,  # tp has nothing to divide
    num_key_value_heads=1,
    hidden_size=1024,
    intermediate_size=4096,
    vocab_size=16_384,
    tie_word_embeddings=False,
)
EXPERTS = Qwen3MoeConfig(
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    moe_intermediate_size=32,
    num_experts=4,
    num_experts_per_tok=2,
    **SIZES,
)
PARAMETERS = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 2 * 256 * 64 + 64
STATES = 4 * 4 * PARAMETERS
"""Bytes of parameters, gradients and two moments in float32."""


def build(config) -> LlamaForCausalLM | Qwen3MoeForCausalLM:
    with torch.device("meta"):
        return (Qwen3MoeForCausalLM if config is EXPERTS else LlamaForCausalLM)(config)


def find(config, world: int, memory_bytes: int, batch: int | None = None) -> SearchResult:
    return search(build(config), world, memory_bytes, batch_size=batch or world, seq_len=32, rates=RATES)


@pytest.fixture(scope="module")
def four() -> SearchResult:
    return find(LLAMA, 4, 10**9)


@pytest.fixture(scope="module")
def sixteen() -> SearchResult:
    rates = PRESETS["h200-infiniband"]
    return search(build(WIDE), 16, 10**12, batch_size=16, seq_len=16, rates=rates)


@pytest.fixture(scope="module")
def two() -> SearchResult:
    return find(LLAMA, 2, 10**9)


def test_every_legal_layout_that_fits_is_found(four: SearchResult) -> None:
    expected = {(4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2)}
    assert {(c.layout.dp_replicate, c.layout.fsdp, c.layout.tp) for c in four.fitting} == expected


def test_the_fastest_comes_first(four: SearchResult) -> None:
    steps = [found.step for found in four.fitting]
    assert steps == sorted(steps)
    assert four.fitting[0].tokens == pytest.approx(32 / steps[0])  # of a rank: 4 sequences of 32 on 4 ranks


def test_states_are_exact(four: SearchResult) -> None:
    states = {found.layout: found.states for found in four.fitting}
    assert states[Layout(4, 1, 1)] == STATES
    assert states[Layout(1, 4, 1)] == STATES // 4
    norms = 4 * 4 * (2 * 2 + 1) * 64  # whole on tp ranks
    assert states[Layout(2, 1, 2)] == (STATES + norms) // 2


@pytest.mark.parametrize("layout", [Layout(2, 2, 1), Layout(4, 1, 1), Layout(2, 1, 2)], ids=str)
def test_layouts_that_were_not_traced_cost_what_their_own_trace_says(four: SearchResult, layout: Layout) -> None:
    found = next(c for c in four.fitting if c.layout == layout)
    traced = trace(
        build(LLAMA),
        dataclasses.asdict(layout),
        DistributedConfig(),
        batch_size=4 // layout.data_ranks,
        seq_len=32,
    )
    trained = found.states // 4
    direct = estimate(
        *scheduled(traced),
        traced.mesh.axes,
        RATES,
        optimizer_bytes=ADAMW_PASSES * trained,
    )
    assert found.step == pytest.approx(direct.step, rel=0.02)
    assert found.peak == pytest.approx(memory(traced).peak, rel=0.01)


@pytest.mark.parametrize("layout", [Layout(2, 8, 1), Layout(4, 4, 1), Layout(1, 16, 1)], ids=str)
def test_copies_of_shards_hold_and_reduce_what_their_own_trace_says(sixteen: SearchResult, layout: Layout) -> None:
    """Gradients and their all-reduce are most of it here, and the trace that stands for all three has fsdp=2."""
    found = next(c for c in sixteen.fitting if c.layout == layout)
    sizes = {"dp_replicate_size": layout.dp_replicate, "fsdp_size": layout.fsdp}
    report = ndcompile.plan(build(WIDE), sizes, seq_len=16, rates="h200-infiniband").report
    figures = {figure.name: figure.value for figure in (*report.memory, *report.time)}
    assert found.peak == pytest.approx(figures["peak"], rel=0.05)
    assert found.step == pytest.approx(figures["step"], rel=0.05)


def test_two_processes_find_what_one_finds() -> None:
    """Without traces, as nothing fits: 8 pairs, and those with fsdp. Checkpointing leaves a hook on the model."""
    model = build(EXPERTS)
    model.gradient_checkpointing_enable()
    arguments = {"batch_size": 8, "seq_len": 32, "rates": RATES}
    assert search(model, 8, 1, **arguments, workers=2) == find(EXPERTS, 8, 1)


def test_sizes_that_are_not_legal_name_the_axis_and_what_would_be(four: SearchResult) -> None:
    assert [entry.where for entry in four.illegal] == ["tp=4"]
    assert "does not divide the 2 heads" in four.illegal[0].reason
    assert "Legal tp sizes for LlamaForCausalLM: [1, 2]" in four.illegal[0].reason


def test_a_batch_that_does_not_divide_says_which_would() -> None:
    result = find(LLAMA, 4, 10**9, batch=2)
    assert {found.layout.tp for found in result.fitting} == {2}
    assert result.illegal[0].where == "tp=1"
    assert "multiples of 4" in result.illegal[0].reason


def test_layouts_that_exceed_the_memory_say_what_they_need(two: SearchResult) -> None:
    least = min(found.peak for found in two.fitting)
    result = find(LLAMA, 2, least)
    assert [found.peak for found in result.fitting] == [least]
    assert all(other.needed > least for other in result.unfit)


def test_where_nothing_fits_the_least_memory_is_named() -> None:
    result = find(LLAMA, 1, STATES + 1)
    assert not result.fitting
    assert f"The least is {result.unfit[0].peak / 1e6:.4g} MB (one rank)" in result.advice
    assert "That much memory would do" in result.advice


def test_where_not_even_the_states_fit_the_number_of_ranks_is_named() -> None:
    result = find(LLAMA, 2, STATES // 7)
    assert not result.fitting
    assert result.advice.endswith("moments alone. They fit from 8 ranks.")


def test_an_odd_world_without_a_legal_layout_says_so() -> None:
    result = find(LLAMA, 3, 10**9, batch=1)
    assert result.advice.startswith("No layout of 3 ranks is legal for LlamaForCausalLM")


@pytest.fixture(scope="module")
def experts() -> SearchResult:
    return find(EXPERTS, 8, 1)  # nothing fits, so nothing is traced


def test_expert_shards_are_multiples_of_tp(experts: SearchResult) -> None:
    pairs = {(found.layout.tp, found.layout.ep) for found in experts.unfit}
    assert pairs == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 4)}


def test_expert_shards_that_do_not_divide_the_experts_name_what_would(experts: SearchResult) -> None:
    reason = next(entry.reason for entry in experts.illegal if entry.where == "ep=8")
    assert "Legal ep sizes: [2, 4]" in reason


def test_expert_shards_that_are_no_multiple_of_tp_say_so(experts: SearchResult) -> None:
    reason = next(entry.reason for entry in experts.illegal if entry.where == "tp=4, ep=2")
    assert "must be a multiple of tp=4. Multiples on 8 ranks: [4, 8]" in reason
    assert not any(entry.where.startswith("tp=2, ep=2") and "fsdp" not in entry.where for entry in experts.illegal)


def test_fsdp_that_is_no_multiple_of_the_expert_ranks_says_so(experts: SearchResult) -> None:
    reason = next(entry.reason for entry in experts.illegal if entry.where == "tp=1, ep=4, fsdp=1, 2")
    assert "fsdp must be a multiple of ep / tp = 4. Legal fsdp sizes with tp=1, ep=4: [4, 8]" in reason


def test_every_layout_is_found_or_told_about(experts: SearchResult) -> None:
    """Sizes of (fsdp, tp, ep) whose product is the world: each is a candidate, or stands in a reason."""
    found = {(other.layout.fsdp, other.layout.tp, other.layout.ep) for other in experts.unfit}
    reasons = [_sizes(entry.where) for entry in experts.illegal]
    divisors = (1, 2, 4, 8)
    for tp in divisors:
        for fsdp in (n for n in divisors if 8 // tp % n == 0):
            for ep in divisors:
                sizes = {"tp": tp, "fsdp": fsdp, "ep": ep}
                told = any(all(sizes[axis] in values for axis, values in where.items()) for where in reasons)
                assert told != ((fsdp, tp, ep) in found), sizes


def _sizes(where: str) -> dict[str, list[int]]:
    """The axes that an entry names -> sizes."""
    sizes: dict[str, list[int]] = {}
    axis = ""
    for part in where.split(", "):
        axis = part.partition("=")[0] if "=" in part else axis
        sizes.setdefault(axis, []).append(int(part.rpartition("=")[2]))
    return sizes


def test_a_model_without_experts_has_no_ep(four: SearchResult) -> None:
    assert {found.layout.ep for found in four.fitting} == {1}


def test_the_tables_stay_within_100_columns(four: SearchResult, experts: SearchResult) -> None:
    long = dataclasses.replace(experts, fitting=4 * four.fitting)
    lines = str(long).splitlines()
    assert max(map(len, lines)) <= 100
    assert any("tokens/s a rank" in line for line in lines)
    assert "and 8 slower ones that fit (--all lists them)" in lines
    everything = search_table(long, every=True).splitlines()
    assert len(everything) == len(lines) + 8 - 1
    assert max(map(len, everything)) <= 100


@golden_torch
def test_golden_tables() -> None:
    """Two layouts fit, the faster one first; the others need more, two of them for the states alone; one is illegal."""
    same(str(find(LLAMA, 4, 900_000)) + "\n", "llama_search.txt")


def test_reasons_that_differ_in_the_size_alone_are_one_line() -> None:
    result = find(LLAMA, 16, 1, batch=16)
    assert any("tp=8, 16" in line for line in str(result).splitlines())


def save(folder: Path) -> str:
    config = LLAMA.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_the_command_prints_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", save(tmp_path), "--world", "2", "--memory", "1GiB", "--seq", "32"]) == 0
    assert "LlamaForCausalLM on 2 ranks of 1.074 GB" in capsys.readouterr().out


def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    target = tmp_path / "search.json"
    command = ["search", save(tmp_path), "--world", "2", "--memory", "1GiB", "--seq", "32", "--all"]
    assert main([*command, "--json", str(target)]) == 0
    found = json.loads(target.read_text())
    assert found["schema"] == 1
    assert {tuple(entry["layout"].values()) for entry in found["fitting"]} == {(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1)}
    assert found["fitting"][0].keys() == {"layout", "step", "tokens", "exposed", "states", "peak"}


def test_a_missing_folder_is_told_before_the_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "no" / "search.json"
    assert main(["search", "no", "--world", "2", "--memory", "1GB", "--json", str(target)]) == 2
    assert f"the folder {tmp_path / 'no'} does not exist" in capsys.readouterr().err


def test_the_command_fails_where_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", save(tmp_path), "--world", "2", "--memory", "1kB", "--seq", "32"]) == 1
    assert "No layout of 2 ranks fits 1 kB" in capsys.readouterr().out


def test_the_command_names_unknown_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", save(tmp_path), "--world", "2", "--memory", "1GB", "--rates", "h300"]) == 2
    assert "rates 'h300' are unknown" in capsys.readouterr().err


@pytest.mark.parametrize("memory_size", ["80", "80GiB", "1.5 TB"])
def test_memory_is_a_number_with_a_unit(memory_size: str) -> None:
    from ndcompile.inspection.search_command import size

    assert size(memory_size) == {"80": 80, "80GiB": 80 * 2**30, "1.5 TB": 1_500_000_000_000}[memory_size]


def test_memory_without_a_meaning_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["search", save(tmp_path), "--world", "2", "--memory", "lots"])
    assert "'lots' is no size of memory" in capsys.readouterr().err
