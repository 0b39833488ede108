"""The subcommand `ndcompile search`: which layouts fit a number of ranks, and how fast they would be."""

from __future__ import annotations

import argparse
from typing import Any

from ndcompile.byte_sizes import parse_bytes
from ndcompile.inspection.api import check_output
from ndcompile.inspection.rates import PRESETS, find_rates
from ndcompile.inspection.search import search
from ndcompile.inspection.search_table import search_table
from ndcompile.inspection.serial import write_search
from ndcompile.inspection.source import model_of
from ndcompile.progress import stages


def add_parser(commands: Any) -> None:
    """Add the subcommand to argparse's `commands`."""
    parser = commands.add_parser(
        "search",
        allow_abbrev=False,
        help="find the layouts of a number of ranks that fit the memory, the fastest first",
        description="List the legal layouts (dp_replicate, fsdp, tp, ep) that fit the memory of a rank, the fastest "
        "first, and why the others do not fit or are not legal. Times are estimates from stated rates. Needs no "
        "process group, no GPU and no weights; tracing takes seconds for each pair of tp and ep.",
    )
    parser.add_argument("source", help="folder with a config.json, a config.json, or a Hub id")
    parser.add_argument("--world", type=number, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--memory", type=size, required=True, metavar="SIZE", help="of a rank, such as 80GiB or 141GB")
    parser.add_argument("--batch", type=number, metavar="N", help="sequences a step, over all ranks (as many as ranks)")
    parser.add_argument("--seq", type=number, default=4096, metavar="N", help="tokens of a sequence (4096)")
    parser.add_argument(
        "--rates",
        default="h100-infiniband",
        metavar="NAME|FILE",
        help=f"link and compute rates: {', '.join(PRESETS)}, or a .json or .toml file (h100-infiniband)",
    )
    parser.add_argument("--checkpointing", action="store_true", help="recompute the activations of every layer")
    parser.add_argument("--loss-only", action="store_true", help="return the loss and no logits")
    parser.add_argument("--all", action="store_true", help="list all layouts that fit, not the fastest alone")
    parser.add_argument("--json", metavar="FILE", help="write what was found as JSON")
    parser.add_argument("--workers", type=number, default=2, metavar="N", help="processes that trace, 0.7 GB each (2)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Search and print; returns the exit status, 1 if nothing fits. Raises what `find_rates` and `search` raise."""
    if options.json:
        check_output(options.json)
    rates, model = find_rates(options.rates), model_of(options.source)
    if options.checkpointing:
        model.activation_checkpointing_enable()
    with stages(show=True) as stage:
        result = search(
            model,
            options.world,
            options.memory,
            batch_size=options.batch or options.world,
            seq_len=options.seq,
            rates=rates,
            stage=stage,
            workers=options.workers,
            loss_only=options.loss_only,
        )
    if options.json:
        write_search(result, options.json)
    print(search_table(result, options.all))
    return 0 if result.fitting else 1


def number(text: str) -> int:
    """A whole number above 0, for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number: give 1 or more")
    return int(text)


def size(text: str) -> int:
    """Bytes, for argparse, see `parse_bytes`."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
