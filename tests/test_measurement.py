"""Rates that are fitted to measured collectives, and the command that measures a machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ndcompile.cli import main
from ndcompile.inspection.links import ALL_TO_ALL, RINGS, Group, collective_seconds
from ndcompile.inspection.rates import PRESETS, Rates, read_rates, write_rates
from ndcompile.measurement.collectives import Link, Sample, fit_link, fit_network, nearest

RATES = Rates("known", {"bfloat16": 1e15}, 4e12, 300e9, 3e-6, 40e9, 15e-6, 8, launch_latency=9e-6, link_fraction=1.0)
SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 28)


def samples(kinds: tuple[str, ...], ranks: int, nodes: int) -> list[Sample]:
    """What a machine with exactly these rates would measure."""
    group = Group("all", ranks, nodes)
    return [
        Sample(kind, nbytes, ranks, nodes, collective_seconds(kind, nbytes, group, RATES))
        for kind in kinds
        for nbytes in SIZES
    ]


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_link_is_recovered_from_the_collectives_that_it_makes(ranks: int) -> None:
    link = fit_link(samples((*RINGS, ALL_TO_ALL), ranks, nodes=1))
    assert (link.launch, link.step, link.bandwidth) == pytest.approx((9e-6, 3e-6, 300e9), rel=1e-6)


@pytest.mark.parametrize(("ranks", "nodes"), [(16, 2), (32, 4)])
def test_a_network_is_recovered_from_rings_over_nodes(ranks: int, nodes: int) -> None:
    network = fit_network(samples(tuple(RINGS), ranks, nodes), Link(9e-6, 3e-6, 300e9))
    # a ring has the adapters of its 8 ranks of a node, 8 x 40 GB/s, and the link is slower: that is what can be told
    assert (network.step, network.bandwidth) == pytest.approx((15e-6, 300e9 / 8), rel=1e-6)


def test_a_network_slower_than_the_link_is_recovered() -> None:
    network = fit_network(samples(tuple(RINGS), ranks=4, nodes=2), Link(9e-6, 3e-6, 300e9))
    assert (network.step, network.bandwidth) == pytest.approx((15e-6, 40e9), rel=1e-6)


def test_a_number_that_would_be_negative_is_zero_and_the_others_are_fitted_without_it() -> None:
    ratios = [1 / 0.9, 2 / 1.9, 4 / 3.9]
    alone = sum(ratios) / sum(ratio**2 for ratio in ratios)
    seconds = [0.9, 1.9, 3.9]
    assert nearest([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]], seconds, seconds) == pytest.approx([0.0, alone], rel=1e-9)


def test_large_and_small_seconds_count_alike() -> None:
    """With absolute errors the two large ones would decide: 1.0."""
    seconds = [2e-6, 2e-6, 1.0]
    assert nearest([[1e-6], [1e-6], [1.0]], seconds, seconds) == pytest.approx([4 / 3], rel=0.01)


def test_collectives_that_take_no_longer_with_more_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="no bandwidth can be told: measure longer"):
        fit_link([Sample("all_reduce", nbytes, 2, 1, 1e-3 / nbytes) for nbytes in SIZES])


def test_rates_that_are_written_are_read_again(tmp_path: Path) -> None:
    rates = PRESETS["h200-infiniband"]
    write_rates(tmp_path / "machine.toml", rates, "Measured by hand.\nTwice.")
    assert read_rates(tmp_path / "machine.toml") == rates
    assert (tmp_path / "machine.toml").read_text().startswith("# Measured by hand.\n# Twice.\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "nowhere/machine.toml"], "the folder nowhere does not exist"),
        (["--out", "machine.json"], "machine.json: rates are written as TOML"),
        (["--like", "h300"], "rates 'h300' are unknown"),
        (["--seconds", "0"], "--seconds 0.0: give a number above 0"),
    ],
)
def test_options_are_refused_before_anything_is_measured(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rates", "--device", "cpu", *options]) == 2
    assert message in capsys.readouterr().err


def test_one_process_measures_what_it_can_and_says_what_it_takes_over(tmp_path: Path) -> None:
    out = tmp_path / "machine.toml"
    command = [sys.executable, "-m", "ndcompile", "rates", "--device", "cpu", "--seconds", "0.001", "--out", str(out)]
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=alone)
    assert done.returncode == 0, done.stderr
    rates = read_rates(out)
    assert (rates.name, rates.ranks_a_node) == ("1 rank of CPU, one node", 1)
    assert sorted(rates.flops) == ["bfloat16", "float32"]
    assert (rates.link_bandwidth, rates.network_bandwidth) == pytest.approx((0.8 * 450e9, 0.8 * 50e9))
    assert "Not measured, those of h100-infiniband: link_bandwidth" in done.stdout
