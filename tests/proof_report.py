"""PROOF.md of the verdicts that tests/proof_table.py keeps."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import proof_zoo
import transformers

TABLE = Path(__file__).parents[1] / "PROOF.md"
NUMERIC = Path(__file__).parent / "zoo" / "results.jsonl"
COST = Path(__file__).parent / "zoo" / "proof_cost.jsonl"

INTRODUCTION = """# The proof, on the zoo

Written by `make proof`; torch {torch}, transformers {transformers}.
A training step of each architecture with a tp_plan is captured with and without tp in one process, taken through all
passes, and proven behind each of them ([docs/proof.md](docs/proof.md)); no weights or ranks. `numeric` is what ZOO.md
found on real ranks under the same tp. Experts run as grouped_mm. Types are halved by a hash of their names: rules were
made with a look at the alarms of the tuned half only.
"""


Numeric = Mapping[tuple[str, int], str]
"""(type, tp) -> what the zoo found on real ranks."""


def numeric_results() -> Numeric:
    """The worst result of each type and tp, without the layouts of experts."""
    found: dict[tuple[str, int], list[str]] = {}
    for line in map(json.loads, NUMERIC.read_text().splitlines()):
        tp = re.search(r"tp(\d)", line["layout"])
        if tp and "ep" not in line["layout"]:
            found.setdefault((line["model_type"], int(tp[1])), []).append(line["result"])
    return {cell: max(results, key=lambda r: (r != "pass", r)) for cell, results in found.items()}


def write_table(verdicts: Sequence[Any]) -> None:
    """PROOF.md of the verdicts, one a cell."""
    numeric = numeric_results()
    versions = {"torch": " and ".join(sorted({v.torch for v in verdicts})), "transformers": transformers.__version__}
    sections = [INTRODUCTION.format(**versions), _counts(verdicts, numeric), _damages(verdicts), _cost(verdicts)]
    TABLE.write_text("\n".join([*sections, _types(verdicts, numeric)]) + "\n")


def _counts(verdicts: Sequence[Any], numeric: Numeric) -> str:
    lines = [
        "| tp | attention | other axes | half | types | proven | alarm | refused before | refused for sizes "
        "| no such attention | alarm, but right | proven, but wrong |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for tp, attention, layout in sorted({(v.tp, v.attention, v.layout) for v in verdicts}):
        for half in (False, True):
            cell = [
                v
                for v in verdicts
                if (v.tp, v.attention, v.layout) == (tp, attention, layout) and proof_zoo.held_out(v.model_type) == half
            ]
            counts = Counter(v.result for v in cell)
            false = sum(v.result == "alarm" and numeric.get((v.model_type, tp)) == "pass" for v in cell)
            missed = sum(v.result == "proven" and numeric.get((v.model_type, tp), "").startswith("wrong") for v in cell)
            results = [counts[r] for r in ("proven", "alarm", "refused before", "refused for sizes")]
            numbers = [len(cell), *results, counts["no such attention"], false, missed]
            title = [str(tp), attention, layout, "held out" if half else "tuned"]
            lines.append(f"| {' | '.join([*title, *map(str, numbers)])} |")
    return "\n".join(lines) + "\n"


def _damages(verdicts: Sequence[Any]) -> str:
    lines = [
        "## Damaged graphs",
        "",
        "In finished graphs each node between ranks (one of those alike in all layers) was removed, doubled, scaled by",
        "the size of its axis, taken for another pair, put on another axis; means became sums, divisors others. The",
        "added node carries the marks of the pass that made the one before it.",
        "",
        "| tp | other axes | half | types | damaged | refused | |",
        "|---|---|---|---|---|---|---|",
    ]
    damaged = [v for v in verdicts if v.damaged]
    for tp, layout in sorted({(v.tp, v.layout) for v in damaged}):
        for half in (False, True):
            cell = [v for v in damaged if (v.tp, v.layout) == (tp, layout) and proof_zoo.held_out(v.model_type) == half]
            total = sum(v.damaged for v in cell)
            refused = total - sum(len(v.survivors) for v in cell)
            share = f"{100 * refused / total:.2f}%" if total else ""
            title = "held out" if half else "tuned"
            lines.append(f"| {tp} | {layout} | {title} | {len(cell)} | {total:,} | {refused:,} | {share} |")
    survivors = Counter((v.layout, s) for v in damaged for s in v.survivors)
    lines += ["", *[f"- accepted, {layout}: {what} ({n} types)" for (layout, what), n in survivors.most_common(40)]]
    return "\n".join(lines) + "\n"


def _cost(verdicts: Sequence[Any]) -> str:
    proven = [v for v in verdicts if v.result == "proven" and "passes" in v.seconds]
    if not proven:
        return ""
    first, second, passes = ([v.seconds[n] for v in proven] for n in ("capture", "second capture", "passes"))
    lines = [
        "## Cost",
        "",
        f"Capture took {median(first):.2f} s (median; {max(first):.2f} s at most), the second capture "
        f"{median(second):.2f} s ({max(second):.2f} s), all passes with all proofs {median(passes):.2f} s "
        f"({max(passes):.2f} s).",
    ]
    if COST.exists():
        lines += [
            "",
            "Seconds of CPU time on one thread; lowering is forward and backward, without inductor's compiler. The "
            "proof is that behind all passes together, the second capture is made once a model and tp size.",
            "",
            "| model | backend | nodes | proof | second capture | lowering | proof / lowering | both / lowering |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for line in map(json.loads, COST.read_text().splitlines()):
            both = line["proof"] + line["second capture"]
            share = " | ".join(f"{100 * each / line['lowering']:.1f}%" for each in (line["proof"], both))
            numbers = " | ".join(f"{line[name]:.2f}" for name in ("proof", "second capture", "lowering"))
            lines.append(f"| {line['model']} | {line['backend']} | {line['nodes']:,} | {numbers} | {share} |")
    return "\n".join(lines) + "\n"


def _types(verdicts: Sequence[Any], numeric: Numeric) -> str:
    lines = ["## All types", "", "| type | half | tp | attention | other axes | proof | numeric | |", "|" + "---|" * 8]
    for v in sorted(verdicts, key=lambda v: (v.result == "proven", *v.cell)):
        half = "held out" if proof_zoo.held_out(v.model_type) else "tuned"
        text = (v.message or v.summary).replace("|", "\\|")
        known = numeric.get((v.model_type, v.tp), "not run")
        lines.append(
            f"| {v.model_type} | {half} | {v.tp} | {v.attention} | {v.layout} | {v.result} | {known} | {text} |"
        )
    return "\n".join(lines)
