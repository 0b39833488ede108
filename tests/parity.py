"""The full matrix of architectures and layouts against the single-process model: `make parity` writes PARITY.md.

Needs tests/distributed in PYTHONPATH.
"""

from __future__ import annotations

import math
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import checkpoint_case
import models
import torch
import transformers
from parity_case import Case, collectives, compare
from pool import Pool, RankError, RankTimeout
from workers import EXACT_LIMIT, LAYOUTS, LIMIT, REPLICATE2_TP2, TP2, TP2_FSDP2, Layout, size

OUTPUT = Path(__file__).parent.parent / "PARITY.md"
MODELS = ("llama", "qwen3", "qwen2", "gemma2", "phi3", "gpt_neox", "glm4", "mixtral", "deepseek_v2")
ODD = {"vocab_size": 131}

OTHER_CASES = {
    "vocabulary 131, tp2": Case("llama", TP2, step=True, overrides=ODD),
    "vocabulary 131, tied, tp2": Case("llama", TP2, step=True, overrides={**ODD, "tie_word_embeddings": True}),
    "vocabulary 131, fsdp4": Case("llama", LAYOUTS["fsdp4"], step=True, overrides=ODD),
    "vocabulary 131, tied, fsdp2_tp2": Case(
        "llama", LAYOUTS["fsdp2_tp2"], step=True, overrides={**ODD, "tie_word_embeddings": True}
    ),
    "intermediate size 75, replicate2_tp2": Case("llama", REPLICATE2_TP2, overrides={"intermediate_size": 75}),
    "norms of 2 elements, fsdp4": Case("qwen3", LAYOUTS["fsdp4"], overrides={"head_dim": 2}),
    "num_items_in_batch, fsdp2_tp2": Case("llama", LAYOUTS["fsdp2_tp2"], items="int", padding=True),
    "other sizes on every data rank, fsdp4": Case("gemma2", LAYOUTS["fsdp4"], ragged=True, padding=True),
    "tp-major mesh": Case("qwen3", TP2_FSDP2, step=True),
    "permuted ranks, fsdp2_tp2": Case("qwen3", LAYOUTS["fsdp2_tp2"], ranks=(2, 0, 3, 1), step=True),
    "permuted ranks, fsdp4": Case("qwen3", LAYOUTS["fsdp4"], ranks=(3, 1, 0, 2), step=True),
    "symbolic sizes, fsdp2_tp2": Case("gemma2", LAYOUTS["fsdp2_tp2"], padding=True, options={"dynamic": True}),
}


class Runner:
    """Pools and checkpoints of this run, and what failed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pools: dict[int, Pool] = {}
        self.failures: list[str] = []

    def __call__(self, title: str, cases: list[Case]) -> str:
        """The largest error of the cases as text. A tensor over the limit must agree in float64, and is marked by *."""
        start, worst, mark = time.perf_counter(), 0.0, ""
        for case in cases:
            try:
                over = self._over(case, LIMIT)
                if over:
                    exact = self._over(replace(case, dtype=torch.float64), EXACT_LIMIT)
                    mark = "*"
                    if failed := sorted(over.keys() & exact.keys()):
                        self.failures.append(f"{title}: {[(name, over[name], exact[name]) for name in failed]}")
                        return "FAILED"
                worst = max(worst, self.worst)
            except (RankError, RankTimeout) as error:
                self.failures.append(f"{title}: {str(error).strip().splitlines()[-1]}")
                return "FAILED"
        print(f"{title}: {worst:.1e}{mark} ({time.perf_counter() - start:.0f} s)", flush=True)
        return f"{worst:.1e}{mark}"

    def _over(self, case: Case, limit: float) -> dict[str, float]:
        lowered = replace(case, options={"backend": "aot_eager"} | case.options)
        results = self._pool(case.layout)(compare, lowered, self._checkpoint(case))
        errors: dict[str, float] = {}
        for result in results:
            for name, value in result.exceeding(-1.0).items():
                errors[name] = max(value, errors.get(name, 0.0))
        within = [value for value in errors.values() if value <= limit]
        self.worst = max(within, default=0.0)
        return {name: value for name, value in errors.items() if not value <= limit}

    def same_collectives(self, case: Case) -> str:
        """`same`, or what differs between the two front ends."""
        both = [replace(case, options=case.options | {"dynamo": dynamo}) for dynamo in (False, True)]
        try:
            found = [self._pool(case.layout)(collectives, each, self._checkpoint(case)) for each in both]
        except (RankError, RankTimeout) as error:
            self.failures.append(f"{case.model} {case.layout}: {str(error).strip().splitlines()[-1]}")
            return "FAILED"
        if found[0] != found[1]:
            self.failures.append(f"{case.model} {case.layout}: the front ends have different collectives")
        return "same" if found[0] == found[1] else "DIFFERENT"

    def checkpoints(self, name: str, source: str, layouts: dict[str, Layout]) -> list[str]:
        """`equal` or FAILED for every layout that loads what `source` saved."""
        start, folder = time.perf_counter(), self.folder / f"{name} {source}"
        reference = checkpoint_case.reference(name, self.folder / f"{name} reference")
        try:
            saved = self._pool(layouts[source])(checkpoint_case.save, name, layouts[source], reference, str(folder))[0]
        except (RankError, RankTimeout) as error:
            self.failures.append(f"{name}, saved on {source}: {str(error).strip().splitlines()[-1]}")
            return ["FAILED"] * len(layouts)
        cells = []
        for target, layout in layouts.items():
            try:
                loaded = self._pool(layout)(checkpoint_case.load, name, layout, str(folder))
                wrong = [line for result in loaded for line in checkpoint_case.differing(saved, result)]
            except (RankError, RankTimeout) as error:
                wrong = [str(error).strip().splitlines()[-1]]
            if wrong:
                self.failures.append(f"{name}, {source} to {target}: {sorted(set(wrong))[:5]}")
            cells.append("FAILED" if wrong else "equal")
        print(f"checkpoints of {name} from {source}: {cells} ({time.perf_counter() - start:.0f} s)", flush=True)
        return cells

    def _pool(self, layout: Layout) -> Pool:
        return self.pools.setdefault(size(layout), Pool(size(layout), self.folder))

    def _checkpoint(self, case: Case) -> str:
        folder = self.folder / "_".join([case.model, *(f"{k}{v}" for k, v in sorted(case.overrides.items()))])
        if not folder.exists():
            models.build(case.model, **case.overrides).save_pretrained(folder)
        return str(folder)


def matrix(run: Runner) -> list[str]:
    """Every architecture on every layout: without padding and tied, and with padding and untied."""
    lines = ["| model | " + " | ".join(LAYOUTS) + " |", "|---" * (len(LAYOUTS) + 1) + "|"]
    for name in MODELS:
        cells = []
        for title, layout in LAYOUTS.items():
            tied = Case(name, layout, step=True, overrides={"tie_word_embeddings": True})
            padded = Case(name, layout, step=True, padding=True, overrides={"tie_word_embeddings": False})
            cells.append(run(f"{name} {title}", [tied, padded]))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def single(run: Runner) -> list[str]:
    lines = ["| case | largest error |", "|---|---|"]
    return lines + [f"| {title} | {run(title, [case])} |" for title, case in OTHER_CASES.items()]


def inductor(run: Runner) -> list[str]:
    lines = ["| model | largest error |", "|---|---|"]
    for name in MODELS:
        overrides = {"num_hidden_layers": 2}
        case = Case(name, LAYOUTS["fsdp2_tp2"], padding=True, overrides=overrides, options={"backend": "inductor"})
        lines.append(f"| {name} | {run(f'{name} inductor', [case])} |")
    return lines


def front_ends(run: Runner) -> list[str]:
    """The models and layouts of the first part through torch.compile."""
    lines = [
        "Each cell: the largest error of torch.compile against the single-process model, and whether its collectives"
    ]
    lines += ["are those of ndcompile.compile, one by one.", ""]
    lines += ["| model | " + " | ".join(LAYOUTS) + " |", "|---" * (len(LAYOUTS) + 1) + "|"]
    for name in MODELS:
        cells = []
        for title, layout in LAYOUTS.items():
            case = Case(
                name,
                layout,
                padding=True,
                overrides={"num_hidden_layers": 2},
                options={"dynamo": True, "backend": "eager"},
            )
            cells.append(f"{run(f'{name} {title}, torch.compile', [case])}, {run.same_collectives(case)}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


EXPERT_MODELS = {
    "qwen3_moe": 2, "mixtral": 2, "olmoe": 2, "qwen2_moe": 2, "deepseek_v2": 2, "deepseek_v3": 2, "glm4_moe": 2,
    "gpt_oss": 2, "ernie4_5_moe": 2,
}  # fmt: skip
"""Model -> layers. The second layer is the first with experts in deepseek_v3, glm4_moe and ernie4_5_moe."""
EXPERT_LAYOUTS: dict[str, Layout] = {
    "fsdp4 ep4": (("ep", 4),),
    "fsdp4 ep2": (("fsdp", 2), ("ep", 2)),
    "fsdp2 tp2 ep2": (("fsdp", 2), ("ep", 1), ("tp", 2)),
    "fsdp2 tp2 ep4": (("ep", 2), ("tp", 2)),
    "replicate2 fsdp2 ep2": (("dp_replicate", 2), ("ep", 2)),
    "fsdp4 tp2 ep4": (("fsdp", 2), ("ep", 2), ("tp", 2)),
}
"""An axis "ep" of the mesh holds the ranks of an expert group with batches of their own: ep x tp expert shards."""
GATHER = {"distributed_config": {"ep_implementation": "all_gather"}}
OTHER_EXCHANGES = {
    "qwen3_moe fsdp2 tp2 ep4, all_gather": (
        "fsdp2 tp2 ep4",
        {"distributed_config": {"ep_implementation": "all_gather"}},
    ),
    "qwen3_moe fsdp4 ep4, all_gather": ("fsdp4 ep4", GATHER),
    "qwen3_moe fsdp2 tp2 ep2, all_to_all": (
        "fsdp2 tp2 ep2",
        {"distributed_config": {"ep_implementation": "all_to_all"}},
    ),
    "qwen3_moe fsdp2 tp2 ep4, capacity=inf": ("fsdp2 tp2 ep4", {"expert_capacity": math.inf}),
    "qwen3_moe fsdp2 tp2 ep2, experts only": ("fsdp2 tp2 ep2", {"distributed_config": {"tp_plan": {}}}),
    "qwen3_moe fsdp4 ep4, symbolic sizes": ("fsdp4 ep4", {"dynamic": True}),
    "qwen3_moe fsdp2 tp2 ep4, inductor": ("fsdp2 tp2 ep4", {"backend": "inductor"}),
    "qwen3_moe fsdp4 ep2, inductor": ("fsdp4 ep2", {"backend": "inductor"}),
}


def experts(run: Runner) -> list[str]:
    """Every MoE architecture on every layout, with padding and another length on every data rank."""
    lines = ["| model | " + " | ".join(EXPERT_LAYOUTS) + " |", "|---" * (len(EXPERT_LAYOUTS) + 1) + "|"]
    for name, layers in EXPERT_MODELS.items():
        cells = []
        for title, layout in EXPERT_LAYOUTS.items():
            overrides = {"num_hidden_layers": layers}
            case = Case(name, layout, padding=True, ragged=True, step=True, overrides=overrides)
            cells.append(run(f"{name} {title}", [case]))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| case | largest error |", "|---|---|"]
    for title, (layout, options) in OTHER_EXCHANGES.items():
        case = Case("qwen3_moe", EXPERT_LAYOUTS[layout], overrides={"num_hidden_layers": 2}, options=options)
        lines.append(f"| {title} | {run(title, [case])} |")
    return lines


def checkpoints(run: Runner) -> list[str]:
    """A training state saved on every layout and loaded on every other, in DCP and in Hugging Face form."""
    lines = [
        "Parameters and AdamW state, saved on the layout of the row and loaded on that of the column, by DCP and as"
    ]
    lines += ["a Hugging Face folder: `equal` means that every bit of every tensor is.", ""]
    for name in checkpoint_case.MODELS:
        layouts = checkpoint_case.layouts_of(name)
        lines += [f"| {name}: saved on | " + " | ".join(layouts) + " |", "|---" * (len(layouts) + 1) + "|"]
        for source in layouts:
            cells = run.checkpoints(name, source, layouts)
            lines.append(f"| {source} | " + " | ".join(cells) + " |")
        lines.append("")
    return lines


PARTS: dict[str, Callable[[Runner], list[str]]] = {
    "Architectures and layouts": matrix,
    "Single cases": single,
    "Through inductor, fsdp2_tp2": inductor,
    "torch.compile": front_ends,
    "Expert parallelism": experts,
    "Checkpoints": checkpoints,
}

INTRODUCTION = f"""# Parity with the single-process model

Written by `make parity`: torch {torch.__version__}, transformers {transformers.__version__}, Python
{platform.python_version()}, gloo on CPU. Tiny configurations (`tests/zoo_configs`), float32, one training step on real
processes.

Each number is the largest error of a loss, any gradient, or (in the matrix and where stated in `tests/parity.py`) any
parameter after one AdamW step. The error of a tensor is max|g - ref| / max(max|ref|, 1e-3 x the largest gradient of the
model); the limit is {LIMIT:.0e}. A * marks a tensor over it in float32 that agrees to {EXACT_LIMIT:.0e} in float64.
Every data rank has another number of ignored labels. A cell of the matrix is the worse of two runs: tied without
padding, untied with left and right padding masks.
"""


def main(wanted: list[str]) -> int:
    """Run the `wanted` parts, or all; the sections of the others stay as they are."""
    if unknown := set(wanted) - PARTS.keys():
        sys.exit(f"no such part: {sorted(unknown)}. Parts: {list(PARTS)}")
    kept = dict(section.split("\n\n", 1) for section in OUTPUT.read_text().split("\n## ")[1:]) if wanted else {}
    sections = []
    with tempfile.TemporaryDirectory() as folder:
        run = Runner(Path(folder))
        try:
            for title, part in PARTS.items():
                if not wanted or title in wanted:
                    kept[title] = "\n".join(part(run))
                if title in kept:
                    sections.append(f"## {title}\n\n{kept[title].strip()}\n")
        finally:
            for pool in run.pools.values():
                pool.stop()
    OUTPUT.write_text("\n".join([INTRODUCTION, *sections]))
    for failure in run.failures:
        print(failure, file=sys.stderr)
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
