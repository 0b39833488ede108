"""The proof along tp on the zoo: `make proof` writes PROOF.md. One process, no ranks, no weights.

    python tests/proof_table.py --types llama,qwen3 --tp 2

Every type with a tp_plan is captured and proven, and then proven again with each of its boundaries damaged. Needs tests
and tests/zoo in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import proof_zoo
import torch
import transformers
from torch import fx

from ndcompile.errors import NdcompileError
from ndcompile.pass_context import PassContext
from ndcompile.passes.complete_boundaries import complete_boundaries
from ndcompile.passes.reduce_statistics import reduce_statistics
from ndcompile.proof.prove import pair_around, prove
from ndcompile.redistribute import redistribute
from ndcompile.type_inference import moves_over

TABLE = Path(__file__).parents[1] / "PROOF.md"
NUMERIC = Path(__file__).parent / "zoo" / "results.jsonl"
PAIRS = [("I", "R"), ("P", "I"), ("P", "R")]


@dataclass
class Verdict:
    """Of one type. survivors: damaged graphs that were proven, as text."""

    model_type: str
    result: str
    message: str = ""
    summary: str = ""
    seconds: float = 0.0
    damaged: int = 0
    survivors: list[str] = field(default_factory=list)


def judge(model_type: str, tp: int, plan: dict[str, str] | None = None) -> Verdict:
    """Prove a type, and what is left of it when a boundary is damaged. plan: overrides of its tp_plan."""
    try:
        captured, context = proof_zoo.captured(model_type, tp, plan)
        whole = context.whole_graph()
        context = replace(context, whole_graph=lambda: whole)
        graph = captured.module.graph
        twins = pair_around(graph, whole, context.plan)
        reduce_statistics(graph, context)
        complete_boundaries(graph, context)
    except NdcompileError as error:
        message = re.sub(r"[^\s\"']*/site-packages/", "", str(error).splitlines()[0])
        return Verdict(model_type, "refused before", f"{type(error).__name__}: {message}")
    axis = context.axis("tp")
    run = lambda: prove(graph, twins, context.plan, axis.group, tp)  # noqa: E731
    started = time.perf_counter()
    proof = run()
    seconds = time.perf_counter() - started
    if proof.problems:
        problem = proof.problems[0]
        module = (problem.node.meta.get("custom") or {}).get("module", "")
        return Verdict(model_type, "alarm", f"{module}, {problem.node.target}: {problem.reason}", seconds=seconds)
    verdict = Verdict(model_type, "proven", summary=proof.summary(), seconds=seconds)
    for name, damage in _damages(graph, context):
        with damage:
            verdict.damaged += 1
            if not run().problems:
                verdict.survivors.append(name)
    assert not run().problems, "the graph is no longer what it was before it was damaged"
    return verdict


def _damages(graph: fx.Graph, context: PassContext) -> Iterator[tuple[str, object]]:
    """Each boundary over tp removed, doubled, scaled, and taken for another pair; one of those alike in all layers."""
    tp = context.axis("tp").group
    seen = set()
    for node in [n for n in graph.nodes if moves_over(n, tp)]:
        module = re.sub(r"\d+", "*", (node.meta.get("custom") or {}).get("module", ""))
        pair = tuple(node.args[3:5])
        learns = node.meta["differentiable"]
        if (module, pair, learns) in seen or (pair == ("I", "R") and not learns):
            continue  # without a gradient I and R are one
        seen.add((module, pair, learns))
        title = f"{module} {pair[0]}->{pair[1]}"
        yield f"{title} removed", _bypassed(node, node.args[0])
        yield f"{title} doubled", _followed(graph, node, redistribute, node.args[1:])
        yield f"{title} scaled", _followed(graph, node, torch.ops.aten.mul.Tensor, (context.axis("tp").size,))
        for other in PAIRS:
            if other != pair and pair in PAIRS and (learns or other[0] != pair[0]):
                yield f"{title} taken for {other[0]}->{other[1]}", _other_pair(node, other)


@contextmanager
def _bypassed(node: fx.Node, source: fx.Node) -> Iterator[None]:
    """Users of `node` read `source` instead."""
    before = [(user, user.args, user.kwargs) for user in node.users if user is not source]
    for user, _, _ in before:
        user.replace_input_with(node, source)
    yield
    for user, args, kwargs in before:
        user.args, user.kwargs = args, kwargs


@contextmanager
def _followed(graph: fx.Graph, node: fx.Node, target: Any, args: tuple[Any, ...]) -> Iterator[None]:
    """An operator on the value of `node`, in its place."""
    with graph.inserting_after(node):
        again = graph.call_function(target, (node, *args))
    again.meta.update(node.meta)
    with _bypassed(node, again):
        yield
    graph.erase_node(again)


@contextmanager
def _other_pair(node: fx.Node, pair: tuple[str, str]) -> Iterator[None]:
    before = node.args
    node.args = (*before[:3], *pair, *before[5:])
    yield
    node.args = before


def numeric_results() -> dict[str, str]:
    """What the zoo found of a type under tp on real ranks: its worst result."""
    found: dict[str, list[str]] = {}
    for line in map(json.loads, NUMERIC.read_text().splitlines()):
        if "tp2" in line["layout"] and "ep" not in line["layout"]:
            found.setdefault(line["model_type"], []).append(line["result"])
    return {name: max(results, key=lambda r: (r != "pass", r)) for name, results in found.items()}


def write_table(verdicts: list[Verdict], tp: int) -> None:
    """PROOF.md of the verdicts."""
    numeric = numeric_results()
    lines = [
        "# The proof along tp, on the zoo",
        "",
        f"Written by `make proof`; torch {torch.__version__}, transformers {transformers.__version__}, tp={tp}, sdpa.",
        "A training step of each architecture with a tp_plan is captured with and without tp in one process and proven",
        "([docs/proof.md](docs/proof.md)); no weights or ranks. `numeric` is what ZOO.md found on real ranks under tp.",
        "Types are halved by a hash of their names: rules were made with a look at the alarms of the tuned half only.",
        "",
        "| half | types | proven | alarm | refused before | alarm, but right | proven, but wrong |",
        "|---|---|---|---|---|---|---|",
    ]
    for half in (False, True):
        of_half = [v for v in verdicts if proof_zoo.held_out(v.model_type) == half]
        counts = Counter(v.result for v in of_half)
        false = sum(v.result == "alarm" and numeric.get(v.model_type) == "pass" for v in of_half)
        missed = sum(v.result == "proven" and numeric.get(v.model_type, "").startswith("wrong") for v in of_half)
        lines.append(
            f"| {'held out' if half else 'tuned'} | {len(of_half)} | {counts['proven']} | {counts['alarm']} | "
            f"{counts['refused before']} | {false} | {missed} |"
        )
    proven = [v for v in verdicts if v.result == "proven"]
    damaged, survivors = sum(v.damaged for v in proven), [(v.model_type, s) for v in proven for s in v.survivors]
    seconds = sorted(v.seconds for v in proven)
    lines += [
        "",
        f"Damaged graphs: each boundary over tp of the {len(proven)} proven types (one of those alike in all layers)",
        "was removed, doubled, scaled by tp, or taken for another pair. "
        f"{damaged - len(survivors):,} of {damaged:,} were refused.",
        f"The proof took {seconds[len(seconds) // 2]:.2f} s (median), {seconds[-1]:.2f} s at most." if seconds else "",
        "",
        *[f"- proven though damaged: {name}, {survivor}" for name, survivor in survivors],
        "",
        "| type | half | proof | numeric | |",
        "|---|---|---|---|---|",
    ]
    for v in sorted(verdicts, key=lambda v: (v.result == "proven", v.model_type)):
        half = "held out" if proof_zoo.held_out(v.model_type) else "tuned"
        text = (v.message or v.summary).replace("|", "\\|")
        lines.append(f"| {v.model_type} | {half} | {v.result} | {numeric.get(v.model_type, 'not run')} | {text} |")
    TABLE.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default="", help="model types, with commas; all with a tp_plan by default")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--results", type=Path, help="file that keeps verdicts; types that it has are left out")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    done = {}
    if options.results and options.results.exists():
        done = {v["model_type"]: Verdict(**v) for v in map(json.loads, options.results.read_text().splitlines())}
    for name in options.types.split(",") if options.types else proof_zoo.with_tp_plan():
        if name not in done:
            done[name] = judge(name, options.tp)
            print(f"{name}: {done[name].result} {done[name].message} {done[name].survivors}", flush=True)
            if options.results:
                with options.results.open("a") as file:
                    file.write(json.dumps(asdict(done[name])) + "\n")
    if not options.types:
        write_table(list(done.values()), options.tp)


if __name__ == "__main__":
    main()
