"""The subcommand `ndcompile rates`: measure the machine at hand."""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ndcompile.errors import MeshError
from ndcompile.inspection.api import check_output
from ndcompile.inspection.rates import PRESETS, Rates, check_rates_path, find_rates, write_rates
from ndcompile.measurement.machine import Machine, machine_of_world
from ndcompile.measurement.measure import Measured, measure_rates
from ndcompile.progress import stages

PATIENCE = timedelta(minutes=2)
"""How long a rank waits for another one. Each measurement takes a second or so."""


def add_parser(commands: Any) -> None:
    """Add the subcommand to argparse's `commands`."""
    parser = commands.add_parser(
        "rates",
        allow_abbrev=False,
        help="measure how fast this machine computes and communicates, for --rates of plan and search",
        description="Measure matrix products, attention, memory and collectives of the ranks that it is started on, "
        "and what products lose to a collective beside them: torchrun --nproc-per-node=8 -m ndcompile rates --out "
        "machine.toml. It takes a minute or two, and the machine should do nothing else.",
    )
    parser.add_argument("--out", metavar="FILE", help="write the rates as TOML")
    parser.add_argument(
        "--like",
        default="h100-infiniband",
        metavar="NAME|FILE",
        help="rates for what cannot be measured, the network on one node and links on one rank: "
        f"{', '.join(PRESETS)}, or a file (h100-infiniband)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="what to measure (cuda where there is one)")
    parser.add_argument("--seconds", type=float, default=0.5, metavar="S", help="of each measurement (0.5)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, print and write on rank 0; returns the exit status.

    Raises what `measure_rates` raises, MeshError for more ranks than devices, and before anything starts ValueError
    and OSError for what the options name.
    """
    like = find_rates(options.like)
    if options.out:
        check_output(check_rates_path(options.out))
    if options.seconds <= 0:
        raise ValueError(f"--seconds {options.seconds}: give a number above 0.")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    _start(device)
    try:
        machine = machine_of_world(device)
        first = dist.get_rank() == 0
        with stages(show=first) as stage:
            measured = measure_rates(machine, like, options.seconds, stage)
        if first:
            print(report(machine, measured, like))
        if first and options.out:
            write_rates(options.out, measured.rates, _comment(machine, measured, like))
    finally:
        dist.destroy_process_group()
    return 0


def _start(device: str) -> None:
    """Start the process group; a process that no launcher started is alone."""
    if device == "cuda":
        index, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if index >= there:
            raise MeshError(
                f"LOCAL_RANK is {index}, but this node has {there} GPUs. Start as many ranks a node, or measure the "
                "CPU with --device cpu."
            )
        torch.cuda.set_device(index)
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=PATIENCE)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def report(machine: Machine, measured: Measured, like: Rates) -> str:
    """What was measured, a line each."""
    rates = measured.rates
    products = ", ".join(f"{name} {value / 1e12:.3g}" for name, value in rates.flops.items())
    said = {
        "matrix products": f"{products} TFLOP/s",
        "attention": f"{rates.attention_fraction:.2f} of matrix products in {next(iter(rates.flops))}",
        "memory": f"{rates.memory_bandwidth / 1e9:.0f} GB/s",
        "link": _link(rates.link_bandwidth, rates.link_latency),
        "launch": _us(rates.launch_latency),
        "hidden": f"products lose {rates.hidden_fraction:.2f} s to a second of a collective beside them",
        "network": _link(rates.network_bandwidth, rates.network_latency),
    }
    taken = {name.partition("_")[0] for name in measured.taken}
    lines = [machine.spell(), *(f"{name:17}{text}" for name, text in said.items() if name not in taken)]
    if measured.samples:
        lines.append(f"{'fit':17}collectives: {measured.off()}")
    lines += [
        f"  {each.kind:24} {each.nbytes / 1e6:8.2f} MB on {each.ranks}: {_us(each.seconds)}, by the formula "
        f"{_us(measured.estimate(each))}"
        for each in measured.samples
    ]
    return "\n".join([*lines, *_taken(measured, like)])


def _comment(machine: Machine, measured: Measured, like: Rates) -> str:
    head = [f"Measured by `ndcompile rates` with torch {torch.__version__} on {machine.spell()}."]
    fit = [f"Collectives by the formula: {measured.off()}."] if measured.samples else []
    return "\n".join([*head, *fit, *_taken(measured, like)])


def _taken(measured: Measured, like: Rates) -> list[str]:
    return [f"Not measured, those of {like.name}: {', '.join(measured.taken)}"] if measured.taken else []


def _link(bandwidth: float, step: float) -> str:
    return f"{bandwidth / 1e9:.3g} GB/s, {_us(step)} a step"


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} us"
