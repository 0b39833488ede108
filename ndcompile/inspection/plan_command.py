"""The subcommand `ndcompile plan`: what a layout does to a model and what it costs."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers.distributed import DistributedConfig

from ndcompile.derive import DERIVE
from ndcompile.errors import MeshError
from ndcompile.inspection.api import check_output, load_plan, plan
from ndcompile.inspection.rates import PRESETS
from ndcompile.mesh import check_expert_size

AXES = {
    "fsdp": "ranks that shard parameters and have different batches",
    "tp": "ranks that share a batch",
    "ep": "expert shards, a multiple of tp",
    "dp_replicate": "copies of the sharded model",
}
"""Axes of a mesh that a command takes, and what they are."""


def add_parser(commands: Any) -> None:
    """Add the subcommand to argparse's `commands`."""
    parser = commands.add_parser(
        "plan",
        allow_abbrev=False,
        help="show where parameters live on a mesh, what is communicated, and what a step costs",
        description="Show the sharding plan of a model on a mesh: parameters, boundaries, collectives, memory and time "
        "of a training step. Needs no process group, no GPU and no weights; tracing takes seconds.",
    )
    parser.add_argument("source", help="config.json, a folder that holds one, or a Hub id in the local cache")
    add_axes(parser)
    parser.add_argument("--world", type=size, metavar="N", help="check that the sizes multiply to this many ranks")
    parser.add_argument("--batch", type=size, default=1, metavar="N", help="sequences of a data rank (1)")
    parser.add_argument("--seq", type=size, default=4096, metavar="N", help="tokens of a sequence (4096)")
    parser.add_argument("--rates", default="h100-infiniband", metavar="NAME|FILE", help=_rates())
    parser.add_argument("--optimizer-dtype", type=_dtype, metavar="DTYPE", help="of AdamW's moments, such as float32")
    parser.add_argument("--checkpointing", action="store_true", help="recompute the activations of every layer")
    parser.add_argument("--derive", action="store_true", help="derive and print a tp_plan, for a model that has none")
    parser.add_argument("--cpu-offload", action="store_true", help="keep parameters and moments in host memory")
    parser.add_argument("--memory-budget", metavar="SIZE", help="of activations a rank may save, such as 20GB")
    parser.add_argument("--loss-only", action="store_true", help="return the loss and no logits")
    parser.add_argument("--explain", metavar="NAME", help="tell about one module, parameter or node instead")
    parser.add_argument("--rank", type=rank, metavar="N", help="print the slices that one rank holds instead")
    parser.add_argument("--pass", dest="pass_name", metavar="NAME", help="print what one pass did to the graph instead")
    parser.add_argument("--json", metavar="FILE", help="write the plan as JSON")
    parser.add_argument("--html", metavar="FILE", help="write the plan as an HTML page")
    parser.add_argument("--diff", metavar="FILE", help="print what differs from the plan of a JSON file")
    parser.set_defaults(run=run)


def add_axes(parser: argparse.ArgumentParser) -> None:
    """Options for the sizes of the mesh."""
    for axis, meaning in AXES.items():
        parser.add_argument(option(axis), type=size, default=1, metavar="N", help=f"{meaning} (1)")


def option(axis: str) -> str:
    """How an axis is spelled as an option."""
    return f"--{axis.replace('_', '-')}"


def run(options: argparse.Namespace) -> int:
    """Plan, write and print; returns the exit status. Raises what `plan` raises."""
    for path in filter(None, (options.json, options.html)):
        check_output(path)
    other = load_plan(options.diff) if options.diff else None
    made = plan(
        options.source,
        _config(options),
        batch_size=options.batch,
        seq_len=options.seq,
        world_size=options.world,
        optimizer_dtype=options.optimizer_dtype,
        gradient_checkpointing=options.checkpointing,
        rates=options.rates,
        memory_budget=options.memory_budget,
        loss_only=options.loss_only,
    )
    if options.json:
        made.to_json(options.json)
    if options.html:
        made.to_html(options.html)
    if other is not None:
        print(other.diff(made) or "The plans are equal.")
    elif options.explain:
        print(made.explain(options.explain))
    elif options.pass_name:
        print(made.diff_pass(options.pass_name))
    elif options.rank is not None:
        print(made.of_rank(options.rank))
    else:
        made.show()
    return 0


def _config(options: argparse.Namespace) -> DistributedConfig:
    check_expert_size({"fsdp": options.fsdp, "tp": options.tp}, options.ep)  # names the legal sizes
    try:
        return DistributedConfig(
            dp_replicate_size=options.dp_replicate,
            fsdp_size=options.fsdp,
            tp_size=options.tp,
            ep_size=options.ep,
            fsdp_cpu_offload=options.cpu_offload,
            tp_plan=DERIVE if getattr(options, "derive", False) else None,
        )
    except ValueError as error:
        raise MeshError(f"The sizes cannot be used: {error}") from error


def size(text: str) -> int:
    """A whole number above 0, for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give a whole number, 1 or more")
    return int(text)


def rank(text: str) -> int:
    """A number of a rank, from 0, for argparse."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no rank: give a whole number, 0 or more")
    return int(text)


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise argparse.ArgumentTypeError(f"{text!r} is no floating point dtype, such as float32 or bfloat16")
    return found


def _rates() -> str:
    return f"link and compute rates: {', '.join(PRESETS)}, or a .json or .toml file (h100-infiniband)"
