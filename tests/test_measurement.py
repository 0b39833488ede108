"""Rates that are fitted to measured collectives, and the command that measures a machine."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ndcompile.cli import main
from ndcompile.errors import MeshError
from ndcompile.inspection.links import Group, collective_seconds
from ndcompile.inspection.rates import PRESETS, Rates, read_rates, write_rates
from ndcompile.measurement import collectives, command, measure, overlap
from ndcompile.measurement.collectives import KINDS, Link, Sample, fit, nearest
from ndcompile.measurement.compute import SIZES as COMPUTED
from ndcompile.measurement.machine import Machine, own_device
from ndcompile.measurement.measure import Measured, measure_rates

CPU = torch.device("cpu")
RATES = Rates("known", {"bfloat16": 1e15}, 4e12, 300e9, 3e-6, 40e9, 15e-6, 8, launch_latency=9e-6, link_fraction=1.0)
SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 28)


def samples(ranks: int, nodes: int) -> list[Sample]:
    """What a machine with exactly these rates would measure."""
    group = Group("all", ranks, nodes)
    return [
        Sample(kind, nbytes, ranks, nodes, collective_seconds(kind, nbytes, group, RATES))
        for kind in KINDS
        for nbytes in SIZES
    ]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_link_is_recovered_from_the_collectives_that_it_makes(ranks: int) -> None:
    assert dataclasses.astuple(fit(samples(ranks, nodes=1))) == pytest.approx((9e-6, 3e-6, 300e9), rel=1e-6)


@pytest.mark.parametrize("nodes", [2, 3, 16])
@pytest.mark.parametrize("launch", [None, 9e-6], ids=["one rank a node", "launch known from inside of nodes"])
def test_a_network_is_recovered_from_groups_of_one_rank_a_node(nodes: int, launch: float | None) -> None:
    assert dataclasses.astuple(fit(samples(nodes, nodes), launch)) == pytest.approx((9e-6, 15e-6, 40e9), rel=1e-6)


def test_noise_that_doubles_and_halves_alike_leaves_the_bandwidth() -> None:
    exact = samples(2, 1)
    noisy = [
        dataclasses.replace(each, seconds=each.seconds * factor)
        for each, factor in zip(exact, [1.5, 1 / 1.5] * len(exact), strict=False)
    ]
    turned = [
        dataclasses.replace(each, seconds=each.seconds**2 / other.seconds)
        for each, other in zip(exact, noisy, strict=True)
    ]
    assert fit([*noisy, *turned]).bandwidth == pytest.approx(300e9, rel=1e-3)


def test_a_number_that_would_be_negative_is_zero_and_the_others_are_fitted_without_it() -> None:
    """Of x times 1, 2 and 4 the nearest logarithms to these are those of the geometric mean of their ratios."""
    ratios = [0.9 / 1, 1.9 / 2, 3.9 / 4]
    mean = (ratios[0] * ratios[1] * ratios[2]) ** (1 / 3)
    assert nearest([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]], [0.9, 1.9, 3.9]) == pytest.approx([0.0, mean], rel=1e-6)


def test_large_and_small_seconds_count_alike() -> None:
    """With absolute errors the last one would decide: 1.0."""
    assert nearest([[1e-6], [1e-6], [1.0]], [2e-6, 2e-6, 1.0]) == pytest.approx([4 ** (1 / 3)], rel=1e-6)


@pytest.mark.parametrize("seconds", [1e-3, 1.0], ids=["grows by nothing", "shrinks"])
def test_collectives_that_take_no_longer_with_more_bytes_are_refused(seconds: float) -> None:
    taken = {1e-3: lambda n: 1e-3 * (1 + 1e-12 * n), 1.0: lambda n: 1 / n}[seconds]
    with pytest.raises(ValueError, match="no bandwidth can be told"):
        fit([Sample("all_reduce", nbytes, 2, 1, taken(nbytes)) for nbytes in SIZES])


@pytest.mark.parametrize("seconds", [0.0, float("nan")])
def test_what_are_no_seconds_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"Collectives took \["):
        fit([Sample("all_reduce", nbytes, 2, 1, seconds) for nbytes in SIZES])


def test_seconds_are_those_of_one_call() -> None:
    assert 0.01 <= Machine(CPU, 1, 1, 1).seconds(lambda: time.sleep(0.01), at_least=0.3) < 0.1


@dataclasses.dataclass(frozen=True)
class Scripted(Machine):
    """A machine on which calls take what is written down, one after the other."""

    script: tuple[float, ...] = ()
    calls: list[Callable[[], object]] = dataclasses.field(default_factory=list)

    def seconds(self, call: Callable[[], object], at_least: float) -> float:
        self.calls.append(call)
        return self.script[len(self.calls) - 1]


def test_rates_of_kernels_are_operations_and_bytes_over_seconds() -> None:
    """Seconds of products in bfloat16 and float32, of attention, and of a sum."""
    measured = measure_rates(Scripted(CPU, 1, 1, 1, script=(2.0, 5.0, 3.0, 0.5)), PRESETS["h100-infiniband"])
    sizes, rates = COMPUTED["cpu"], measured.rates
    products = 3 * 2 * sizes.tokens * sizes.width * 4 * sizes.width
    attended = 7 * 2 * sizes.heads * sizes.sequence**2 * 128 / 2
    assert rates.flops == {"bfloat16": products / 2, "float32": products / 5}
    assert rates.attention_fraction == pytest.approx(attended / 3 / (products / 2))
    assert rates.memory_bandwidth == 3 * sizes.memory / 0.5
    assert (rates.matmul_fraction, rates.memory_fraction, rates.link_fraction) == (1, 1, 1)


def test_what_is_not_measured_is_taken_over_as_kernels_reach_it() -> None:
    measured = measure_rates(Scripted(CPU, 1, 1, 1, script=(1.0,) * 4), PRESETS["h100-nvlink"])
    rates = measured.rates
    assert measured.taken[0] == "ranks_a_node"
    assert (rates.ranks_a_node, rates.hidden_fraction, rates.launch_latency) == (256, 0.75, 8.4e-6)
    assert (rates.link_bandwidth, rates.network_bandwidth) == pytest.approx((0.8 * 450e9, 0.8 * 50e9))


@pytest.mark.parametrize(("both", "fraction"), [(5.0, 0.6), (4.0, 0.0), (9.0, 1.0)])
def test_what_products_lose_is_told_by_the_seconds_of_the_collective_alone(
    monkeypatch: pytest.MonkeyPatch, both: float, fraction: float
) -> None:
    """The collective takes 1 s alone, a product 0.1 s, and 40 products 4.4 s."""
    monkeypatch.setattr(overlap, "prepare", lambda *_: lambda: None)
    machine = Scripted(CPU, 2, 1, 2, script=(1.0, 0.1, both, 4.4))
    assert overlap.hidden_fraction(machine, None, 0.1) == pytest.approx(fraction)  # type: ignore[arg-type]


def test_what_collectives_tell_is_named_as_rates_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks on two nodes, two of each in a group inside and between, on which collectives take what RATES says."""
    for module in (collectives, overlap):
        monkeypatch.setattr(module, "prepare", lambda *_: lambda: None)
    monkeypatch.setattr(collectives.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(measure, "_world", lambda: None)
    inside, between = (
        [
            collective_seconds(kind, nbytes, Group("all", 2, nodes), RATES)
            for kind in KINDS
            for nbytes in collectives.SIZES["cpu"]
        ]
        for nodes in (1, 2)
    )
    script = (1.0, 1.0, 1.0, 1.0, *inside, 1.0, 0.1, 5.0, 4.4, *between)
    measured = measure_rates(Scripted(CPU, 4, 2, 2, script=script), PRESETS["h100-infiniband"])
    names = ("launch_latency", "link_latency", "link_bandwidth", "network_latency", "network_bandwidth")
    assert [getattr(measured.rates, name) for name in names] == pytest.approx(
        [9e-6, 3e-6, 300e9, 15e-6, 40e9], rel=1e-5
    )
    assert (measured.rates.hidden_fraction, measured.rates.ranks_a_node) == (pytest.approx(0.6), 2)
    assert measured.taken == ()
    assert measured.off() == "half of 32 collectives within 0%, all within 0%"


def test_a_poor_fit_says_so() -> None:
    wrong = [dataclasses.replace(each, seconds=2 * each.seconds) for each in samples(2, 1)]
    assert "half of 16 collectives within 50%" in Measured(RATES, tuple(wrong), ()).off()
    assert "POOR: measure longer" in Measured(RATES, tuple(wrong), ()).off()
    assert Measured(RATES, tuple(samples(2, 1)), ()).off() == "half of 16 collectives within 0%, all within 0%"


def test_rates_that_are_written_are_read_again(tmp_path: Path) -> None:
    rates = dataclasses.replace(PRESETS["h200-infiniband"], name='a "machine" of \U0001f984')
    write_rates(tmp_path / "machine.toml", rates, "Measured by hand.\nTwice\x07.")
    assert read_rates(tmp_path / "machine.toml") == rates
    assert (tmp_path / "machine.toml").read_text().startswith("# Measured by hand.\n# Twice?.\n")


@pytest.mark.parametrize("change", [{"attention_fraction": 0.0}, {"link_bandwidth": float("nan")}, {"flops": {}}])
def test_rates_that_would_not_be_read_are_not_written(tmp_path: Path, change: dict) -> None:
    with pytest.raises(ValueError, match=r"attention_fraction|link_bandwidth|flops"):
        write_rates(tmp_path / "machine.toml", dataclasses.replace(RATES, **change), "")
    assert not (tmp_path / "machine.toml").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "nowhere/machine.toml"], "the folder nowhere does not exist"),
        (["--out", "machine.json"], "machine.json: rates are written as TOML"),
        (["--out", ""], ": rates are written as TOML"),
        (["--out", "/proc/machine.toml"], "/proc/machine.toml"),
        (["--like", "h300"], "rates 'h300' are unknown"),
        (["--seconds", "0"], "--seconds 0.0: give a number above 0"),
        (["--seconds", "nan"], "--seconds nan: give a number above 0"),
        (["--seconds", "inf"], "--seconds inf: give a number above 0"),
    ],
)
def test_options_are_refused_before_anything_is_measured(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "measure_rates", None)
    assert main(["rates", "--device", "cpu", *options]) == 2
    assert message in capsys.readouterr().err


def test_options_reach_the_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def measured(machine: Machine, like: Rates, at_least: float, stage: object) -> Measured:
        asked.append((machine.ranks, machine.nodes, like.name, at_least))
        return Measured(like, (), ())

    monkeypatch.setattr(command, "measure_rates", measured)
    out = tmp_path / "machine.toml"
    assert main(["rates", "--device", "cpu", "--like", "h200-nvlink", "--seconds", "0.25", "--out", str(out)]) == 0
    assert asked == [(1, 1, "h200-nvlink", 0.25)]
    assert read_rates(out) == PRESETS["h200-nvlink"]


def test_an_error_while_measuring_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("Connection closed by peer\nat a line of C++")

    monkeypatch.setattr(command, "measure_rates", fails)
    assert main(["rates", "--device", "cpu"]) == 2
    expected = "Measuring failed: Connection closed by peer. If another rank ended, its own message says why."
    assert capsys.readouterr().err.endswith(f"ndcompile: {expected}\n")


def test_refused_options_leave_no_file_and_no_change(tmp_path: Path) -> None:
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    old.write_text("name = 'old'\n")
    for out in (old, new):
        command._check_writable(out)
        assert main(["rates", "--device", "cpu", "--out", str(out), "--seconds", "0"]) == 2
    assert old.read_text() == "name = 'old'\n"
    assert not new.exists()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"LOCAL_RANK": "0"}, "Rank 0 of this node has no GPU: torch sees 0. Use --device cpu."),
        ({"RANK": "0", "LOCAL_RANK": "x"}, "LOCAL_RANK is 'x', and should be this rank's number on its node"),
        ({"RANK": "0"}, "LOCAL_RANK is '', and should be this rank's number on its node"),
    ],
)
def test_a_rank_without_a_gpu_of_its_own_is_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(MeshError) as raised:
        own_device("cuda")
    assert message in str(raised.value)


def test_a_world_size_without_a_rank_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["rates", "--device", "cpu"]) == 2
    assert "WORLD_SIZE is 2, but there is no RANK. Start with torchrun." in capsys.readouterr().err


def test_one_process_measures_what_it_can_and_says_what_it_takes_over(tmp_path: Path) -> None:
    out = tmp_path / "machine.toml"
    asked = [sys.executable, "-m", "ndcompile", "rates", "--device", "cpu", "--seconds", "0.001", "--out", str(out)]
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(asked, capture_output=True, text=True, timeout=240, env=alone)
    assert done.returncode == 0, done.stderr
    rates = read_rates(out)
    assert (rates.name, rates.ranks_a_node) == ("1 rank of CPU on one node (link and network of h100-infiniband)", 8)
    assert sorted(rates.flops) == ["bfloat16", "float32"]
    taken = "Not measured, those of h100-infiniband: ranks_a_node, link_bandwidth, link_latency, launch_latency, hidden"
    assert taken in done.stdout
    assert taken in out.read_text()


@pytest.mark.slow
def test_the_module_ends_with_the_status_of_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "ndcompile", "plan", "nowhere/config.json"], timeout=240)
    assert done.returncode == 2


def test_a_link_of_known_rates_is_what_the_samples_say() -> None:
    """The properties of a sample are the terms of the formula."""
    for each in samples(4, 1):
        made = Link(9e-6, 3e-6, 300e9)
        assert made.launch + each.steps * made.step + each.moved / made.bandwidth == pytest.approx(each.seconds)
