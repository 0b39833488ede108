"""bench/step_estimate.py: the table of docs/time-model.md is what it prints."""

from pathlib import Path

import pytest
from golden_text import golden_torch

from ndcompile.inspection.rates import find_rates

ROOT = Path(__file__).parents[1]
TABLE = [line for line in (ROOT / "docs" / "time-model.md").read_text().splitlines() if line.endswith("H200 |")]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import step_estimate

    return step_estimate


def test_every_row_of_the_docs_is_of_a_measured_line(bench):
    measured = list(bench.lines())
    found = [bench.found(measured, *wanted) for wanted in bench.ROWS]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in TABLE]
    assert [(row[4], row[-1]) for row in cells] == [(str(line.get("ms", "-")), line["file"]) for line in found]


@golden_torch
@pytest.mark.parametrize("number", [2, 8, 12], ids=["one rank of tp=4", "fsdp=2 loss_only", "experts fsdp=4 ep=4"])
def test_a_row_of_the_docs_is_what_the_command_prints(bench, number):
    measured = list(bench.lines())
    assert bench.row(bench.found(measured, *bench.ROWS[number]), measured, "h200-nvlink") == TABLE[number]


def test_rates_that_were_measured_are_a_file_of_rates():
    rates = find_rates(str(ROOT / "bench" / "rates-2xH200-torch2.11.toml"))
    assert (rates.name, rates.ranks_a_node) == ("2 ranks of NVIDIA H200 on one node (network of h200-infiniband)", 2)


def test_lines_that_asked_for_what_the_estimate_has_no_words_for_are_left_out(bench):
    names = {name for line in bench.lines() for name in line}
    assert not names & {"disabled", "accumulate", "async_tp", "sequence_parallel", "cpu_offload", "environment"}
