"""Derived plans on the zoo: `make derive` writes DERIVED.md.

    python tests/derived_table.py --types gpt2,opt

For every type without a tp_plan one is derived for tp=2, and a training step with it on two ranks is compared with the
single-process model. Needs tests, tests/distributed and tests/zoo in PYTHONPATH. Types that have a line in
tests/zoo/derived.jsonl are left out, unless --anew.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import proof_table
import torch
import transformers
import zoo
from pool import Pool
from zoo_case import ZooCase, run_case
from zoo_table import NEXT_TO_NOTHING

from ndcompile.derive import derive
from ndcompile.errors import NdcompileError

TABLE = Path(__file__).parents[1] / "DERIVED.md"
RESULTS = Path(__file__).parent / "zoo" / "derived.jsonl"
TIMEOUT = 180.0

INTRODUCTION = """# Derived plans

Written by `make derive` from `tests/zoo/derived.jsonl`; torch {torch}, transformers {transformers}, gloo on CPU, tp=2.
The {types} types of the zoo for which transformers has no tp_plan. `tp_plan="derive"` proposes pairs from the graph and
keeps what the proof proves ([docs/proof.md](docs/proof.md#derived-plans)). Then a training step in float32 on two ranks
is compared with the single-process model, as in [ZOO.md](ZOO.md): the loss and every gradient, limit 1e-4, or 1e-10 in
float64. `sharded` is the share of the parameters that tp cuts, among those that the model does not use (cross attention
of decoders without an encoder) too.
"""


def without_tp_plan() -> list[str]:
    return [name for name in zoo.types() if not zoo.on_meta(name).tp_plan]


def judge(model_type: str, pool: Pool, folder: Path) -> dict[str, Any]:
    """Derive, and run what was derived on two ranks."""
    started = time.perf_counter()
    line: dict[str, Any] = {"model_type": model_type}
    try:
        found = derive(zoo.on_meta(model_type), 2)
    except Exception as error:  # a fault of ours is a line of the table too
        first, *rest = str(error).splitlines()
        known = isinstance(error, NdcompileError)
        return line | {
            "result": "not derived" if known else "error",
            "why": " ".join([first, *rest[:4]]),
            "seconds": _since(started),
        }
    line |= {"plan": dict(found.rules), "sharded": round(found.sharded, 3), "refused": dict(found.refused)}
    line |= {"seconds": _since(started)}
    case = ZooCase(model_type, "tp2", backend="eager", plan=dict(found.rules))
    ran = run_case(pool, case, folder, TIMEOUT).line()
    return line | {key: ran[key] for key in ("result", "worst", "error", "exact", "message") if key in ran}


def damage(line: dict[str, Any], before: dict[str, Any], anew: bool) -> dict[str, Any]:
    """How many damaged graphs of a derived plan there are, and which of them are proven, see `proof_table`; what was
    found of the same plan before, unless `anew`."""
    if not anew:
        same = line.get("plan") == before.get("plan")
        return {key: before[key] for key in ("damaged", "survivors") if same and key in before}
    if "plan" not in line:
        return {}
    verdict = proof_table.judge(line["model_type"], 2, plan=line["plan"])
    return {"damaged": verdict.damaged, "survivors": verdict.survivors}


def _portable(value: Any) -> Any:
    """The same with files named from the packages' folder."""
    if isinstance(value, dict):
        return {key: _portable(item) for key, item in value.items()}
    return re.sub(r"[^\s\"']*/site-packages/", "", value) if isinstance(value, str) else value


def _since(started: float) -> float:
    return round(time.perf_counter() - started, 1)


def write_table(lines: list[dict[str, Any]]) -> None:
    """DERIVED.md of the results."""
    counts = Counter(line["result"] for line in lines)
    shares = sorted(line["sharded"] for line in lines if line["result"] == "pass")
    damaged, survivors = (sum(count) for count in zip(*map(_damages, lines), strict=True))
    few = sum(share < NEXT_TO_NOTHING for share in shares)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    text = [
        INTRODUCTION.format(types=len(lines), **versions),
        f"Proven and right: **{counts['pass']}** of {len(lines)}. "
        f"Wrong: {counts['wrong loss'] + counts['wrong gradient']}. Nothing derived: {counts['not derived']}. "
        f"Proven, but not run: {counts['refused'] + counts['error']}. "
        + (f"Sharded: {shares[len(shares) // 2]:.0%} of the parameters (median); " if shares else "")
        + f"less than {NEXT_TO_NOTHING:.0%} of {few} types, which are proven and right, but hardly parallel. "
        f"Damaged graphs (a boundary removed, doubled, scaled): {damaged - survivors:,} of {damaged:,} refused.",
        "",
        "| type | result | sharded | rules | worst | s |",
        "|---|---|---|---|---|---|",
        *map(_row, lines),
        "",
        "## Not derived, or only in part",
        "",
        *[f"- {line['model_type']}, {what}: {_short(why)}" for line in lines for what, why in _reasons(line)],
        "",
        "## The plans",
        "",
        *[
            f"{line['model_type']}\n\n```\n{json.dumps(line['plan'], indent=1)}\n```\n"
            for line in lines
            if "plan" in line
        ],
    ]
    TABLE.write_text("\n".join(text))


def _damages(line: dict[str, Any]) -> tuple[int, int]:
    return line.get("damaged", 0), len(line.get("survivors", ()))


def _row(line: dict[str, Any]) -> str:
    worst = f"{line['worst']} {line['error']:.0e}" if "worst" in line else ""
    if line.get("exact") is not None:
        worst += f", {line['exact']:.0e} in float64"
    cells = [line["model_type"], line["result"], f"{line.get('sharded', 0):.0%}", len(line.get("plan", ())), worst]
    return "| " + " | ".join(map(str, [*cells, line["seconds"]])) + " |"


def _reasons(line: dict[str, Any]) -> list[tuple[str, str]]:
    other = [("all", line.get("why") or line.get("message", ""))]
    return list(line.get("refused", {}).items()) + [(what, why) for what, why in other if why]


def _short(text: str) -> str:
    first = text.replace("|", "\\|")
    return first if len(first) < 400 else first[:400] + " ..."


def read_results() -> dict[str, dict[str, Any]]:
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {line["model_type"]: line for line in map(json.loads, lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default="", help="model types, with commas; all without a tp_plan by default")
    parser.add_argument("--anew", action="store_true", help="run types again that have a line")
    parser.add_argument("--damage", action="store_true", help="prove damaged graphs too; otherwise as found before")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    done = read_results()
    with tempfile.TemporaryDirectory() as name:
        pool = Pool(2, Path(name))
        try:
            for model_type in options.types.split(",") if options.types else without_tp_plan():
                if model_type in done and not options.anew:
                    continue
                line = judge(model_type, pool, Path(name))
                line |= damage(line, done.get(model_type, {}), options.damage)
                done[model_type] = _portable(line)
                RESULTS.write_text("".join(json.dumps(done[key]) + "\n" for key in sorted(done)))
                print(f"{model_type}: {line['result']} {line.get('sharded')} {line.get('worst')}", flush=True)
        finally:
            pool.stop()
    write_table([done[key] for key in sorted(done)])


if __name__ == "__main__":
    main()
