"""The subcommand `ndcompile rates`: measure the machine at hand."""

from __future__ import annotations

import argparse
import math
import os
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ndcompile.errors import MeshError, NdcompileError
from ndcompile.inspection.api import check_output
from ndcompile.inspection.rates import PRESETS, Rates, check_rates_path, find_rates, write_rates
from ndcompile.measurement.machine import Machine, machine_of_world, of_first_rank, own_device
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
        "machine.toml. It takes a minute or two, and the machine should do nothing else. Options of rank 0 count.",
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

    Raises what `measure_rates` raises, ValueError and OSError on all ranks for what rank 0's options name, MeshError
    for a world that cannot be started or measured, NdcompileError where another rank ended meanwhile.
    """
    device = own_device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    _start(device)
    try:
        like, seconds = of_first_rank(partial(_checked, options))
        machine = machine_of_world(device)
        first = dist.get_rank() == 0
        with stages(show=first) as stage:
            measured = measure_rates(machine, like, seconds, stage)
        if first:
            print(report(machine, measured, like))
        if first and options.out is not None:
            write_rates(options.out, measured.rates, _comment(machine, measured, like))
    except RuntimeError as error:
        if isinstance(error, NdcompileError):
            raise
        text = str(error).partition("\n")[0]
        raise NdcompileError(f"Measuring failed: {text}. If another rank ended, its own message says why.") from error
    finally:
        dist.destroy_process_group()
    return 0


def _checked(options: argparse.Namespace) -> tuple[Rates, float]:
    """The rates to take over, and the seconds of a measurement."""
    if not (math.isfinite(options.seconds) and options.seconds > 0):
        raise ValueError(f"--seconds {options.seconds}: give a number above 0.")
    like = find_rates(options.like)
    if options.out is not None:
        _check_writable(check_rates_path(options.out))
    return like, options.seconds


def _check_writable(path: Path) -> None:
    """Raises OSError now, and not after measuring. Leaves no file, and one that is there as it is."""
    check_output(path)
    there = path.exists()
    with path.open("a"):
        pass
    if not there:
        path.unlink()


def _start(device: torch.device) -> None:
    """Start the process group; a process that no launcher started is alone."""
    if "RANK" not in os.environ and os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise MeshError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but there is no RANK. Start with torchrun.")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    try:
        dist.init_process_group(backend, timeout=PATIENCE, **({} if "RANK" in os.environ else alone))
    except (ValueError, RuntimeError) as error:
        raise MeshError(f"The process group did not start: {error} Start with torchrun, once a process.") from error


def report(machine: Machine, measured: Measured, like: Rates) -> str:
    """What was measured, a line each."""
    rates = measured.rates
    products = ", ".join(f"{name} {value / 1e12:.3g}" for name, value in rates.flops.items())
    said = [
        ("flops", "matrix products", f"{products} TFLOP/s"),
        ("attention_fraction", "attention", f"{rates.attention_fraction:.2f} of products in {next(iter(rates.flops))}"),
        ("memory_bandwidth", "memory", f"{rates.memory_bandwidth / 1e9:.0f} GB/s"),
        ("ranks_a_node", "a node", f"{rates.ranks_a_node} ranks"),
        ("launch_latency", "launch", _us(rates.launch_latency)),
        ("link_bandwidth", "link", _link(rates.link_bandwidth, rates.link_latency)),
        ("network_bandwidth", "network", _link(rates.network_bandwidth, rates.network_latency)),
        ("hidden_fraction", "hidden", f"products lose {rates.hidden_fraction:.2f} s to a second of a collective"),
    ]
    lines = [machine.spell(), *(f"{label:17}{text}" for name, label, text in said if name not in measured.taken)]
    if measured.samples:
        lines.append(f"{'fit':17}{measured.off()}")
    lines += [
        f"  {each.kind:24} {each.nbytes / 1e6:8.2f} MB, {each.ranks} ranks on {each.nodes}: {_us(each.seconds)}, by "
        f"the formula {_us(measured.estimate(each))}"
        for each in measured.samples
    ]
    return "\n".join([*lines, *_taken(measured, like)])


def _comment(machine: Machine, measured: Measured, like: Rates) -> str:
    head = [f"Measured by `ndcompile rates` with torch {torch.__version__} on {machine.spell()}."]
    fit = [f"By the formula: {measured.off()}."] if measured.samples else []
    return "\n".join([*head, *fit, *_taken(measured, like)])


def _taken(measured: Measured, like: Rates) -> list[str]:
    return [f"Not measured, those of {like.name}: {', '.join(measured.taken)}"] if measured.taken else []


def _link(bandwidth: float, step: float) -> str:
    return f"{bandwidth / 1e9:.3g} GB/s, {_us(step)} a step"


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} us"
