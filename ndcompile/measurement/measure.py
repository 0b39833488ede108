"""All rates of a machine, as `inspection.rates` states them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ndcompile.inspection.links import Group, collective_seconds
from ndcompile.inspection.rates import Rates
from ndcompile.measurement import compute
from ndcompile.measurement.collectives import Sample, fit, sample
from ndcompile.measurement.machine import Machine
from ndcompile.measurement.overlap import hidden_fraction

LINKS = ("ranks_a_node", "link_bandwidth", "link_latency", "launch_latency", "hidden_fraction")
NETWORK = ("network_bandwidth", "network_latency")
POOR = 0.3
"""Half of the collectives further off than this: the formula says little about this machine."""


@dataclass(frozen=True)
class Measured:
    """rates: with all fractions 1 but attention's and what is hidden, as the rates are those of real kernels.

    samples: the collectives that were measured. taken: fields of `rates` that could not be, and are those of other
    rates.
    """

    rates: Rates
    samples: tuple[Sample, ...]
    taken: tuple[str, ...]

    def estimate(self, each: Sample) -> float:
        """Seconds of a sample by the formula."""
        return collective_seconds(each.kind, each.nbytes, Group("all", each.ranks, each.nodes), self.rates)

    def off(self) -> str:
        """By how much the formula is off, |estimated / measured - 1|, in words."""
        errors = [abs(self.estimate(each) / each.seconds - 1) for each in self.samples]
        half = statistics.median(errors)
        said = f"half of {len(errors)} collectives within {half:.0%}, all within {max(errors):.0%}"
        return f"{said}. POOR: measure longer (--seconds), with nothing else running" if half > POOR else said


def measure_rates(
    machine: Machine, like: Rates, at_least: float = 0.5, stage: Callable[[str], None] = lambda name: None
) -> Measured:
    """Measure what this machine's ranks can; the rest is `like`'s. Collective.

    at_least: seconds of each measurement, as many to warm up; there are about 30, and 20 more of several nodes.
    stage: is told what is measured.

    Raises ValueError where the seconds of collectives tell no bandwidth.
    """
    kernels = _kernels(machine, at_least, stage)
    links, samples = _links(machine, at_least, stage)
    taken = tuple(name for name in (*LINKS, *NETWORK) if name not in links)
    achieved = {name: getattr(like, name) * like.link_fraction for name in taken if name.endswith("bandwidth")}
    name = machine.spell() + _borrowed(taken, like)
    rates = dataclasses.replace(like, name=name, link_fraction=1.0, **kernels, **links, **achieved)
    return Measured(rates, tuple(samples), taken)


def _borrowed(taken: tuple[str, ...], like: Rates) -> str:
    """What a plan's reader is to know of rates that were not measured."""
    parts = [part for part in ("link", "network") if f"{part}_bandwidth" in taken]
    return f" ({' and '.join(parts)} of {like.name})" if parts else ""


def _kernels(machine: Machine, at_least: float, stage: Callable[[str], None]) -> dict[str, Any]:
    """Rates of one rank's kernels, by the names of `Rates`."""
    sizes = compute.SIZES[machine.device.type]
    flops = {}
    for dtype in sizes.dtypes:
        name = str(dtype).removeprefix("torch.")
        stage(f"matrix products in {name}")
        flops[name] = compute.products(machine, dtype, sizes, at_least)
    stage("attention and memory")
    attention = compute.attention(machine, sizes, at_least) / next(iter(flops.values()))
    return {
        "flops": flops,
        "matmul_fraction": 1.0,
        "attention_fraction": min(1.0, attention),
        "memory_bandwidth": compute.memory(machine, sizes, at_least),
        "memory_fraction": 1.0,
    }


def _links(machine: Machine, at_least: float, stage: Callable[[str], None]) -> tuple[dict[str, Any], list[Sample]]:
    """What collectives tell, by the names of `Rates`, and what they were told from."""
    found: dict[str, Any] = {}
    samples: list[Sample] = []
    if machine.started > 1:
        stage("collectives inside a node")
        group = machine.inside or _world()
        samples += sample(machine, group, 1, at_least)
        link = fit(samples)
        stage("products beside a collective")
        hidden = hidden_fraction(machine, group, at_least)
        values = (machine.ranks_a_node, link.bandwidth, link.step, link.launch, hidden)
        found |= dict(zip(LINKS, values, strict=True))
    if machine.nodes > 1:
        stage("collectives between nodes")
        between = sample(machine, machine.between or _world(), machine.nodes, at_least)
        network = fit(between, found.get("launch_latency"))
        samples += between
        found |= dict(zip(NETWORK, (network.bandwidth, network.step), strict=True))
        found |= {"ranks_a_node": machine.ranks_a_node, "launch_latency": network.launch}
    return found, samples


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
