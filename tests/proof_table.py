"""The proof on the zoo: `make proof` writes PROOF.md. One process, no ranks, no weights.

    python tests/proof_table.py --tp 2,4 --attention sdpa,eager
    python tests/proof_table.py --types llama,qwen3 --tp 2 --layouts dp2_fsdp2

Every type with a tp_plan is captured, taken through all passes and proven behind each of them; with `--damage` it is
proven again with each node between ranks damaged. Results are kept, a line of JSON a cell, and a cell that has one is
left out, so that a run can be continued. Needs tests, tests/distributed and tests/zoo in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import proof_zoo
import torch
import transformers
import zoo
from proof_damage import damages
from proof_report import write_table

from ndcompile.errors import NdcompileError, PlanError, VerifyError
from ndcompile.graphs.pass_context import PassContext
from ndcompile.pipeline import run_passes
from ndcompile.proof.check import explain, twins_of
from ndcompile.proof.exchange import exchange_problems
from ndcompile.proof.made import unknown_nodes
from ndcompile.proof.prove import Proof, prove
from ndcompile.verify.verifier import verify

RESULTS = Path(__file__).parent / "zoo" / "proof.jsonl"
LAYOUTS: dict[str, dict[str, int]] = {
    "tp alone": {},
    "dp2_fsdp2": {"dp_replicate": 2, "fsdp": 2},
    "fsdp4_ep4": {"fsdp": 4, "ep": 4},
    "fsdp2_ep2": {"fsdp": 2, "ep": 2},
}
"""Axes beside tp. With tp=2, fsdp4_ep4 is ep_rest=2 x efsdp=2, and in fsdp2_ep2 the tp ranks are the group that shares
experts. Layouts with ep are of types with an ep_plan."""


@dataclass
class Verdict:
    """Of one cell. seconds: of the proofs behind all passes, and of them, the second capture and the first.

    survivors: damaged graphs that were proven, as text.
    """

    model_type: str
    tp: int
    attention: str
    layout: str
    result: str
    message: str = ""
    summary: str = ""
    torch: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    damaged: int = 0
    survivors: list[str] = field(default_factory=list)

    @property
    def cell(self) -> tuple[str, int, str, str]:
        return self.model_type, self.tp, self.attention, self.layout


def judge(
    model_type: str,
    tp: int,
    attention: str = "sdpa",
    layout: str = "tp alone",
    damage: bool = True,
    plan: dict[str, str] | None = None,
    repair: bool = True,
) -> Verdict:
    """Prove a type behind every pass, and what is left of it when a node is damaged.

    plan: overrides of its tp_plan. repair: as `ndcompile.compile` repairs fused projections.
    """
    verdict = Verdict(model_type, tp, attention, layout, "proven", torch=torch.__version__)
    changes = {} if attention == "sdpa" else {"attn_implementation": attention}  # some types take eager by themselves
    clock = _Clock(verdict.seconds)
    try:
        with clock("capture"):
            captured, context = proof_zoo.captured(model_type, tp, plan, LAYOUTS[layout], repair=repair, **changes)
        with clock("second capture"):
            twins = twins_of(captured.module.graph, context)
        with clock("passes"):
            proof = run_passes(captured, context)
    except NdcompileError as error:
        message = re.sub(r"[^\s\"']*/site-packages/", "", str(error).splitlines()[0])
        alarm = isinstance(error, VerifyError) and " is not proven over " in message
        sizes = isinstance(error, PlanError)
        verdict.result = "alarm" if alarm else "refused for sizes" if sizes else "refused before"
        verdict.message = f"{type(error).__name__}: {message}"
        return verdict
    except ValueError as error:  # transformers has no such attention for this type
        verdict.result, verdict.message = "no such attention", str(error).splitlines()[0]
        return verdict
    repairs = [f"{each.rule} repaired: {each.style}; " for each in context.plan.repairs]
    verdict.summary = "".join(repairs) + (proof.summary() if proof is not None else "")
    if damage:
        graph = captured.module.graph
        known = frozenset(graph.nodes)
        refused = lambda: refusal(graph, context, twins, proof, known) is not None  # noqa: E731
        assert not refused()
        for name, damaged in damages(graph, context.mesh):
            with damaged:
                verdict.damaged += 1
                if not refused():
                    verdict.survivors.append(name)
        assert not refused(), "the graph is no longer what it was before it was damaged"
    return verdict


def refusal(graph: Any, context: PassContext, twins: Any, proof: Proof | None, known: Collection[Any]) -> str | None:
    """Why a finished graph is refused; None where it is not."""
    try:
        verify(graph, context)
    except VerifyError as error:
        return str(error)
    axis = context.axis("tp")
    problems = unknown_nodes(graph, known)
    problems += list(prove(graph, twins, context.plan, axis.group, axis.size, proof).problems) if axis else []
    if context.plan.experts:
        problems += exchange_problems(graph, context.plan, context.mesh)
    return explain(problems[0], "all axes", "pipeline") if problems else None


class _Clock:
    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    def __call__(self, name: str) -> _Clock:
        self.name = name
        return self

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] = round(time.perf_counter() - self.started, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default="", help="model types, with commas; all with a tp_plan by default")
    parser.add_argument("--tp", default="2")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--layouts", default="tp alone", help=f"of {list(LAYOUTS)}, with commas")
    parser.add_argument("--damage", action="store_true", help="prove damaged graphs too")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file that keeps verdicts")
    parser.add_argument("--table", action="store_true", help="write PROOF.md of what is kept, and run nothing")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    done = {v.cell: v for v in (Verdict(**line) for line in map(json.loads, lines))}
    names = options.types.split(",") if options.types else proof_zoo.with_tp_plan()
    cells = [
        (name, int(tp), attention, layout)
        for layout in options.layouts.split(",")
        for attention in options.attention.split(",")
        for tp in options.tp.split(",")
        for name in names
        if "ep" not in LAYOUTS[layout] or zoo.on_meta(name).ep_plan
    ]
    for cell in [] if options.table else cells:
        if cell in done and (done[cell].damaged or not options.damage or done[cell].result != "proven"):
            continue
        done[cell] = verdict = judge(*cell, damage=options.damage)
        print(f"{cell}: {verdict.result} {verdict.message} {verdict.damaged} {verdict.survivors}", flush=True)
        with options.results.open("a") as file:
            file.write(json.dumps(asdict(verdict)) + "\n")
    if not options.types:
        write_table(list(done.values()))


if __name__ == "__main__":
    main()
