"""ZOO.md: the results as tables, beside what transformers' own distributed run makes of the same configurations."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import zoo

OUTPUT = Path(__file__).parents[2] / "ZOO.md"
NATIVE = Path(__file__).parent / "native-transformers-5.24.json"
NATIVE_WORDS = {"pass": "pass", "wrong_loss": "wrong loss", "wrong_grad": "wrong gradient", "raises": "raises"}
RESULTS = ("pass", "refused", "error", "wrong loss", "wrong gradient")

NEXT_TO_NOTHING = 0.2
"""A plan that shards less than this share of the parameters (the embedding or the head only) counts apart under tp."""

Lines = dict[tuple[str, str], dict[str, Any]]

INTRODUCTION = """# The zoo: architectures of transformers, one training step each

Written by `make zoo` from `tests/zoo/results.jsonl`; {versions}, gloo on CPU.
A tiny configuration of each of {types} causal language models (`tests/zoo/configs.json`), loaded from a checkpoint of
safetensors by ranks of their own, one training step in float32, other batches and other numbers of ignored labels on
every data rank. The loss and every gradient are compared with the single-process model: max|g - ref| / max(max|ref|,
1e-3 x the largest gradient of the model) is at most 1e-4, or 1e-10 in float64 on both sides.

The row with 3 seeds accumulates the gradients of three steps, whose rows end in padding, of another length on every
data rank.

`transformers` is what its own distributed run makes of the same configuration (`from_pretrained` with a
`DistributedConfig`, eager): right, silently wrong, or an exception. It was not run with dp_replicate.
"""


def write_table(results: list[dict[str, Any]]) -> None:
    """Make ZOO.md anew."""
    lines: Lines = {(line["model_type"], line["layout"]): line for line in results}
    native = json.loads(NATIVE.read_text())
    versions = sorted({f"torch {line['torch']}, transformers {line['transformers']}" for line in results})
    sections = [
        INTRODUCTION.format(versions="; ".join(versions), types=len(zoo.types())),
        "## Counts\n\n" + _counts(lines, native),
        "## What does not pass\n\n" + _failures(lines, native),
        "## Plans that shard next to nothing\n\n" + _apart(lines),
        "## Modules that run as one opaque node\n\n" + _opaque(lines),
        "## All types\n\n" + _types(lines, native),
    ]
    OUTPUT.write_text("\n".join(sections))


def _counts(lines: Lines, native: dict[str, dict[str, Any]]) -> str:
    """One row a layout or variant of it; plans that shard next to nothing have a row of their own under tp."""
    rows = []
    for layout in zoo.ROWS:
        types = [t for t in zoo.types() if (t, layout) in lines]
        few = [t for t in types if "tp" in dict(zoo.ROWS[layout]) and _shards_nothing(lines[t, layout])]
        for title, chosen in (
            (layout, [t for t in types if t not in few]),
            (f"{layout}, next to nothing sharded", few),
        ):
            if chosen:
                ours = Counter(lines[t, layout]["result"] for t in chosen)
                theirs = Counter(_native(native, t, layout) for t in chosen)
                wrong = theirs["wrong loss"] + theirs["wrong gradient"]
                other = (
                    f"{theirs['pass']} / {wrong} / {theirs['raises']}" if theirs["not run"] < len(chosen) else "not run"
                )
                rows.append([title, len(chosen), *(ours[r] for r in RESULTS), other])
    return _table(["layout", "types", *RESULTS, "transformers: pass / wrong / raises"], rows)


def _failures(lines: Lines, native: dict[str, dict[str, Any]]) -> str:
    rows = [
        [
            model_type, layout, line["result"], _native(native, model_type, layout),
            line.get("message") or f"{line['worst']}: {line['error']:.1e}",
            f"{line['repaired']} with {json.dumps(_repair(model_type))}" if "repaired" in line else "",
        ]
        for (model_type, layout), line in sorted(lines.items())
        if line["result"] != "pass"
    ]  # fmt: skip
    return _table(["type", "layout", "result", "transformers", "why", "repaired"], rows) if rows else "Nothing.\n"


def _repair(model_type: str) -> dict[str, Any]:
    repair = zoo.repairs()[model_type]
    return repair.get("plan") or repair["config"]


def _apart(lines: Lines) -> str:
    rows = [
        [model_type, f"{line['sharded']:.1%}", line["result"]]
        for (model_type, layout), line in sorted(lines.items())
        if layout == "fsdp2_tp2" and _shards_nothing(line)
    ]
    return "Share of the parameters that tp shards, on fsdp2_tp2.\n\n" + _table(["type", "sharded", "result"], rows)


def _opaque(lines: Lines) -> str:
    rows = [[t, line["opaque"]] for t in zoo.types() if "opaque" in (line := lines.get((t, "fsdp4"), {}))]
    note = "Their code branches on values of tensors, so that it is no graph; inside they run without a compiler.\n\n"
    return note + _table(["type", "on fsdp4"], rows)


def _types(lines: Lines, native: dict[str, dict[str, Any]]) -> str:
    """One row a type. A cell says what transformers does where that is no pass."""
    rows = []
    for model_type in zoo.types():
        cells = []
        for layout in zoo.ROWS:
            line = lines.get((model_type, layout))
            theirs = _native(native, model_type, layout)
            cell = "" if line is None else line["result"] + (" (eager)" if line["backend"] == "eager" else "")
            cells.append(cell + (f"; transformers: {theirs}" if cell and theirs not in ("pass", "not run") else ""))
        seconds = [line for layout in zoo.ROWS if (line := lines.get((model_type, layout)))]
        capture = max((line.get("capture_seconds", 0.0) for line in seconds), default=0.0)
        lowering = max((line.get("lowering_seconds", 0.0) for line in seconds), default=0.0)
        rows.append([model_type, *cells, f"{capture:.1f}", f"{lowering:.1f}"])
    note = "Seconds are the longest of the layouts, four ranks sharing two cores.\n\n"
    return note + _table(["type", *zoo.ROWS, "capture s", "lowering s"], rows)


def _shards_nothing(line: dict[str, Any]) -> bool:
    return line.get("sharded", 1.0) < NEXT_TO_NOTHING


def _native(native: dict[str, dict[str, Any]], model_type: str, layout: str) -> str:
    found = native[model_type].get(layout)
    return NATIVE_WORDS[found["result"]] if found else "not run"


def _table(header: list[str], rows: list[list[Any]]) -> str:
    lines = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in [header, *rows]]
    lines.insert(1, ["---"] * len(header))
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
