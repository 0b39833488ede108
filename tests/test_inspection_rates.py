"""Rates of a machine: presets, files, and what is wrong with a file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ndcompile.inspection.rates import Rates, find_rates, read_rates

DEFAULTS = {field.name: field.default for field in dataclasses.fields(Rates)}
COMPLETE = {
    "flops": {"bfloat16": 1e15},
    "memory_bandwidth": 1e12,
    "link_bandwidth": 1e11,
    "link_latency": 1e-6,
    "network_bandwidth": 1e10,
    "network_latency": 1e-5,
    "ranks_a_node": 4,
}


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_rates_are_read_from_json(tmp_path: Path) -> None:
    rates = read_rates(write(tmp_path, "cluster.json", json.dumps(COMPLETE)))
    assert (rates.name, rates.ranks_a_node, rates.flops["bfloat16"]) == ("cluster", 4, 1e15)
    assert rates.matmul_fraction == DEFAULTS["matmul_fraction"]


def test_rates_are_read_from_toml(tmp_path: Path) -> None:
    lines = [f"{key} = {number}" for key, number in COMPLETE.items() if key != "flops"]
    text = "\n".join(["name = 'mine'", "matmul_fraction = 0.5", *lines, "[flops]", "bfloat16 = 1e15"])
    rates = find_rates(str(write(tmp_path, "rates.toml", text)))
    assert (rates.name, rates.matmul_fraction, rates.flops) == ("mine", 0.5, {"bfloat16": 1e15})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": 1}, r"unknown keys \['speed'\]. Needed: flops, memory_bandwidth"),
        ({"link_latency": None}, r"lacks \['link_latency'\]"),
        ({"flops": 1e15}, "flops must be a table"),
        ({"flops": {"half-ish": 1e15}}, "flops.half-ish is no dtype of torch"),
        ({"memory_bandwidth": -1}, "memory_bandwidth must be a number above 0, not -1"),
        ({"network_bandwidth": "fast"}, "network_bandwidth must be a number above 0, not 'fast'"),
        ({"matmul_fraction": 70}, "matmul_fraction is a part of a whole, at most 1"),
        ({"ranks_a_node": 0.5}, "ranks_a_node must be a whole number"),
    ],
)
def test_faults_of_a_rates_file_are_named(tmp_path: Path, change: dict, message: str) -> None:
    given = {key: v for key, v in (COMPLETE | change).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        read_rates(write(tmp_path, "rates.json", json.dumps(given)))


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rates.json is no JSON"):
        read_rates(write(tmp_path, "rates.json", "{"))


def test_an_unknown_preset_says_which_there_are() -> None:
    with pytest.raises(ValueError, match=r"h100-infiniband.*h200-nvlink"):
        find_rates("h300")
