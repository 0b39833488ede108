"""Run the zoo: `make zoo` writes one JSON line a (model type, layout) and makes ZOO.md of them.

    python tests/zoo/sweep.py --types llama,qwen3_moe --layouts fsdp4,tp2
    python tests/zoo/sweep.py --layouts fsdp2_tp2 --seeds 0,1,2 --padding

Cases with a result of the same backend are left out, unless --anew. Needs tests, tests/distributed and tests/zoo in
PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import transformers
import zoo
from pool import Pool
from workers import size
from zoo_case import ZooCase, run_with_repair
from zoo_table import write_table

RESULTS = Path(__file__).parent / "results.jsonl"
TIMEOUT = 120.0
"""Seconds for one case on all ranks: ten times the slowest."""
CASES_OF_A_POOL = 40
"""Ranks start anew after so many cases: what traces and process groups leave behind adds up."""


def cases(types: list[str], layouts: list[str]) -> list[ZooCase]:
    """All layouts of the types; tp and ep only for those with a plan for it."""
    return [
        ZooCase(model_type, layout)
        for layout in layouts
        for model_type in types
        if layout in zoo.layouts_of(model_type)
    ]


class Results:
    """The lines of a file, one a (type, row of the table), written after every case."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.lines = {(line["model_type"], line["layout"]): line for line in map(json.loads, lines)}

    def has(self, case: ZooCase) -> bool:
        """Whether there is a result of this case's backend."""
        return self.lines.get((case.model_type, case.row), {}).get("backend") == case.backend

    def add(self, line: dict) -> None:
        self.lines[line["model_type"], line["layout"]] = line
        ordered = [self.lines[key] for key in sorted(self.lines)]
        self.path.write_text("".join(json.dumps(each) + "\n" for each in ordered))


def sweep(todo: list[ZooCase], results: Results) -> None:
    """Run the cases; a rank that dies or hangs ends its case only."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    pools: dict[int, Pool] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            for number, case in enumerate(todo, start=1):
                ranks = size(zoo.LAYOUTS[case.layout])
                pool = pools.setdefault(ranks, Pool(ranks, folder))
                start = time.perf_counter()
                result = run_with_repair(pool, case, folder, TIMEOUT)
                results.add(result.line() | {"backend": case.backend} | versions)
                took = time.perf_counter() - start
                first = result.message.splitlines()[0] if result.message else f"{result.worst} {result.error:.1e}"
                title = f"{number}/{len(todo)} {case.model_type} {case.row}"
                print(f"{title}: {result.result} ({took:.0f} s) {first}", flush=True)
                if number % CASES_OF_A_POOL == 0:
                    pool.stop()
        finally:
            for pool in pools.values():
                pool.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default="", help="model types, with commas; all by default")
    parser.add_argument("--layouts", default="", help=f"out of {', '.join(zoo.LAYOUTS)}")
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--seeds", default="0", help="of the batches, with commas: one step a seed, in one comparison")
    parser.add_argument("--padding", action="store_true", help="rows end in padding, of other lengths on the ranks")
    parser.add_argument("--anew", action="store_true", help="run cases again that have a result")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    types = options.types.split(",") if options.types else zoo.types()
    layouts = options.layouts.split(",") if options.layouts else list(zoo.LAYOUTS)
    for unknown in [*(set(types) - set(zoo.types())), *(set(layouts) - set(zoo.LAYOUTS))]:
        sys.exit(f"no such type or layout: {unknown}. Layouts: {', '.join(zoo.LAYOUTS)}; types: {zoo.CONFIGS}")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results = Results(options.results)
    seeds = tuple(int(seed) for seed in options.seeds.split(","))
    what = {"backend": options.backend, "seeds": seeds, "padding": options.padding}
    todo = [replace(case, **what) for case in cases(types, layouts)]
    sweep([case for case in todo if options.anew or not results.has(case)], results)
    write_table(list(results.lines.values()))


if __name__ == "__main__":
    main()
