"""The command `ndcompile`: what can be said about a model and a mesh without running them, and how fast a machine is.

ndcompile plan path/to/config.json --fsdp 8 --tp 4
ndcompile verify path/to/checkpoint --fsdp 8 --tp 4
torchrun --nproc-per-node=8 -m ndcompile rates --out machine.toml
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers

from ndcompile.errors import NdcompileError
from ndcompile.inspection.plan_command import AXES, add_axes, option
from ndcompile.inspection.plan_command import add_parser as add_plan
from ndcompile.inspection.search_command import add_parser as add_search
from ndcompile.inspection.source import model_of
from ndcompile.loader.planning import LoadingPlan, plan_loading
from ndcompile.loader.proof import Proof
from ndcompile.loader.rank_reads import ReadPlan, spell_bytes
from ndcompile.loader.source import cached_snapshot, has_checkpoint
from ndcompile.measurement.command import add_parser as add_rates


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0 done or proven, 1 a fault was found, 2 it cannot be planned."""
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}. {_axes(options)}")
    transformers.logging.set_verbosity_error()
    try:
        return options.run(options)
    except (NdcompileError, OSError, ValueError) as error:
        print(f"ndcompile: {error}", file=sys.stderr)
        return 2


def _axes(options: argparse.Namespace) -> str:
    """What a command that was given an option it does not know takes as sizes of the mesh."""
    if not hasattr(options, "fsdp"):
        return "This command takes no sizes of axes: --help lists its options."
    return f"Axes of a mesh: {', '.join(map(option, AXES))}; --help lists the other options."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ndcompile", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="command")
    add_plan(commands)
    add_search(commands)
    add_rates(commands)
    _add_verify(commands)
    return parser


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        allow_abbrev=False,
        help="prove that all ranks together load every tensor",
        description="Prove that the slices of all ranks tile every tensor, and that every byte of the checkpoint is "
        "used once. Needs no process group, no GPU and no memory for weights.",
    )
    verify.add_argument(
        "source",
        help="folder with config.json and safetensors; a folder or config.json without weights is verified for the "
        "checkpoint that it would be saved to; or a Hub id",
    )
    add_axes(verify)
    verify.add_argument("--ranks", action="store_true", help="also print what every rank reads")
    verify.add_argument("--lenient", action="store_true", help="allow missing tensors, as load(strict=False) does")
    verify.set_defaults(run=_verify)


def _verify(options: argparse.Namespace) -> int:
    sizes = {"dp_replicate": options.dp_replicate, "fsdp": options.fsdp, "tp": options.tp, "ep": options.ep}
    folder = _checkpoint(options.source)
    plan = plan_loading(model_of(options.source), folder, sizes, strict=not options.lenient)
    proof = plan.proof()
    reads = plan.reads()
    print(_report(plan, proof, reads, folder))
    if options.ranks:
        print(reads)
    return 1 if proof.faults else 0


def _checkpoint(source: str) -> Path | None:
    """The folder with the weights of `source`, if there are any; nothing is downloaded."""
    path = Path(source)
    if path.exists():
        return path if path.is_dir() and has_checkpoint(path) else None
    return cached_snapshot(source)


def _report(plan: LoadingPlan, proof: Proof, reads: ReadPlan, folder: Path | None) -> str:
    files = {block.file for entry in plan.catalog.values() for block in entry.blocks}
    stored = sum(entry.nbytes for entry in plan.catalog.values())
    where = f"in {folder}" if folder else "that it would be saved to (no weights were found)"
    copies = sum(r.needed for r in reads.ranks) / max(proof.bytes_used, 1)
    totals = [r.total for r in reads.ranks]
    ratios = [r.total / r.needed for r in reads.ranks if r.needed]
    lines = [
        f"{plan.model} on {plan.mesh}: {plan.mesh.ranks} ranks",
        f"checkpoint {where}: {len(plan.catalog)} keys, {spell_bytes(stored)}, {len(files)} files",
        f"slices       {proof.tensors} tensors in {proof.slices} boxes of all ranks",
        f"conversion   {proof.pieces} pieces make them",
        f"sources      {proof.keys} keys, {spell_bytes(proof.bytes_used)}, held {copies:.2f} times",
        f"reads        {spell_bytes(min(totals))} to {spell_bytes(max(totals))} a rank, at most "
        f"{max(ratios, default=1.0):.2f} times its slices",
    ]
    notes = [
        (proof.unused, "keys of the checkpoint are not used"),
        (proof.dropped, "keys are used in part: their converter drops the rest"),
        (proof.whole, "tensors are computed by their converter: only their slices are proven"),
    ]
    for names, meaning in notes:
        if names:
            lines.append(f"note: {len(names)} {meaning}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}")
    if proof.faults:
        return "\n".join([*lines, f"WRONG: {len(proof.faults)} faults", *(f"  {fault}" for fault in proof.faults)])
    return "\n".join([*lines, "proven: every element is in one box, times replication; no byte is used twice"])


if __name__ == "__main__":
    sys.exit(main())
