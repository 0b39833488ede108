"""All rates of a machine, as `inspection.rates` states them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ndcompile.inspection.links import ALL_TO_ALL, RINGS, Group, collective_seconds
from ndcompile.inspection.rates import Rates
from ndcompile.measurement import collectives, compute
from ndcompile.measurement.collectives import Link, Sample, fit_link, fit_network, sample
from ndcompile.measurement.machine import Machine
from ndcompile.measurement.overlap import hidden_fraction

GATHERED = {"cuda": 128 * compute.MIB, "cpu": 4 * compute.MIB}
"""Bytes of the all-gather that runs beside products: a layer's weight."""


@dataclass(frozen=True)
class Measured:
    """rates: with all fractions 1 but attention's and what is hidden, as the rates are those of real kernels.

    samples: the collectives that were measured. taken: fields of `rates` that could not be, and are those of other
    rates.
    """

    rates: Rates
    samples: tuple[Sample, ...]
    taken: tuple[str, ...]

    def errors(self) -> list[float]:
        """By how much the formula is off, for each sample: |estimated / measured - 1|."""
        return [abs(self.estimate(each) / each.seconds - 1) for each in self.samples]

    def estimate(self, each: Sample) -> float:
        """Seconds of a sample by the formula."""
        return collective_seconds(each.kind, each.nbytes, Group("all", each.ranks, each.nodes), self.rates)

    def off(self) -> str:
        """The errors in words."""
        errors = self.errors()
        return f"half of {len(errors)} within {statistics.median(errors):.0%}, all within {max(errors):.0%}"


def measure_rates(
    machine: Machine, like: Rates, at_least: float = 0.5, stage: Callable[[str], None] = lambda name: None
) -> Measured:
    """Measure what this machine's ranks can; the rest is `like`'s. Collective.

    at_least: seconds of each measurement, as many to warm up; there are about 40. stage: is told what is measured.

    Raises ValueError where the seconds of collectives tell no bandwidth.
    """
    kind = machine.device.type
    sizes = compute.SIZES[kind]
    flops = {}
    for dtype in sizes.dtypes:
        name = str(dtype).removeprefix("torch.")
        stage(f"matrix products in {name}")
        flops[name] = compute.products(machine, dtype, sizes, at_least)
    stage("attention and memory")
    attention = compute.attention(machine, sizes, at_least) / next(iter(flops.values()))
    changes: dict[str, Any] = {
        "name": machine.spell(),
        "flops": flops,
        "memory_bandwidth": compute.memory(machine, sizes, at_least),
        "matmul_fraction": 1.0,
        "attention_fraction": min(1.0, attention),
        "memory_fraction": 1.0,
    }
    links, samples = _links(machine, at_least, stage)
    changes |= links | {"ranks_a_node": _ranks_a_node(machine)}
    names = ("link_bandwidth", "link_latency", "launch_latency", "hidden_fraction", "network_bandwidth")
    taken = tuple(name for name in (*names, "network_latency") if name not in changes)
    achieved = {name: getattr(like, name) * like.link_fraction for name in taken if name.endswith("bandwidth")}
    rates = dataclasses.replace(like, **changes, **achieved, link_fraction=1.0)
    return Measured(rates, tuple(samples), taken)


def _links(machine: Machine, at_least: float, stage: Callable[[str], None]) -> tuple[dict[str, float], list[Sample]]:
    """What collectives tell: by the names of rates, and what they were told from."""
    if machine.ranks == 1:
        return {}, []
    kind = machine.device.type
    found: dict[str, float] = {}
    samples: list[Sample] = []
    link = Link(0.0, 0.0, 0.0)
    if machine.ranks_a_node > 1:
        stage("collectives inside a node")
        inside = sample(machine, machine.node, (*RINGS, ALL_TO_ALL), collectives.SIZES[kind], at_least)
        link = fit_link(inside)
        samples += inside
        stage("products beside a collective")
        hidden = hidden_fraction(machine, machine.node, compute.SIZES[kind], GATHERED[kind], at_least)
        found |= {"link_bandwidth": link.bandwidth, "link_latency": link.step, "launch_latency": link.launch}
        found |= {"hidden_fraction": hidden}
    if machine.nodes > 1:
        stage("collectives between nodes")
        between = sample(machine, None, tuple(RINGS), collectives.SIZES[kind], at_least)
        network = fit_network(between, link)
        samples += between
        found |= {"network_bandwidth": network.bandwidth, "network_latency": network.step}
        found.setdefault("launch_latency", link.launch)  # one rank a node: it is in the step
    return found, samples


def _ranks_a_node(machine: Machine) -> int:
    """On one node as many as it has GPUs, as not all may be in use now."""
    if machine.nodes == 1 and machine.device.type == "cuda":
        return max(machine.ranks, torch.cuda.device_count())
    return machine.ranks_a_node
