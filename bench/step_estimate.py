"""Steps and peaks that ndcompile.plan estimates, beside those of bench/*.jsonl, which bench/train.py measured.

    python bench/step_estimate.py

prints the table of docs/time-model.md in markdown, milliseconds and GB, in a minute and without a GPU. With --all it
takes every line that the estimate has words for; --rates FILE are those that `ndcompile rates` measured. A line marked
+ ran with loss_only. One marked * is of one rank alone (bench/one_rank.py): its step is compared without communication.
Exposed and all communication are those of a profile; where the line has none, of another one of the same case. Ratios
are estimated / measured.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import train
import transformers

import ndcompile

HERE = Path(__file__).parent
SYSTEM = "ndcompile:"
KNOWN = {"case", "model", "exchange", "loss_only", "layers", "batch", "sequence", "one_rank"}
"""What a line may say of how it ran; what else it asked for has no place in the estimate."""
MEASURED = {"load_s", "first_loss", "first_s", "compile_s", "communication_ms", "exposed_ms", "ms", "min_ms", "loss"}
MEASURED |= {"call", "tokens_s_gpu", "mfu", "peak_gb", "card", "torch", "transformers", "warm", "losses"}
ROWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("overlap-2xH200", {"case": "ndcompile:fsdp=1"}),
    ("speed-H200", {"case": "ndcompile:tp=2"}),
    ("one-rank-H200", {"case": "ndcompile:tp=4", "one_rank": True}),
    ("4xH200", {"case": "ndcompile:fsdp=2,tp=2", "loss_only": True}),
    ("one-rank-H200", {"case": "ndcompile:fsdp=2,tp=2", "one_rank": True}),
    ("tp-and-replicas-2xH200", {"case": "ndcompile:dp_replicate=2", "loss_only": True}),
    ("peers-2xH200", {"case": "ndcompile:tp=2", "loss_only": True}),
    ("experts-and-logits-2xH200", {"case": "ndcompile:fsdp=2"}),
    ("peers-2xH200", {"case": "ndcompile:fsdp=2", "loss_only": True, "layers": 8}),
    ("4xH200", {"case": "ndcompile:fsdp=4"}),
    ("peers-2xH200", {"case": "ndcompile:fsdp=2", "layers": 32, "loss_only": True}),
    ("peers-2xH200", {"case": "ndcompile:fsdp=2,ep=2", "exchange": "all_to_all"}),
    ("peers-2xH200", {"case": "ndcompile:tp=2,ep=2", "exchange": "all_to_all"}),
    ("moe-4xH200", {"case": "ndcompile:fsdp=4,ep=4", "exchange": "all_to_all"}),
    ("moe-4xH200", {"case": "ndcompile:fsdp=4,ep=4", "exchange": "all_gather"}),
    ("moe-4xH200", {"case": "ndcompile:fsdp=2,tp=2,ep=4", "exchange": "all_to_all"}),
    ("moe-4xH200", {"case": "ndcompile:fsdp=2,tp=2,ep=4", "exchange": "all_gather"}),
)
"""The table of the docs: a file, and which of its lines."""
IN_ORDER = {"chunks-in-order-2xH200", "copies-2xH200", "hidden-2xH200", "one-rank-H200", "peers-2xH200"}
"""Files whose loss_only holds the logits of one chunk at a time. Others were measured when inductor held those of all
chunks, and their peaks are not compared."""
HEAD = (
    "| model | layout | batch | step, estimated | measured | ratio | exposed of communication, estimated | measured | "
    "peak, estimated | measured | ratio | file in `bench/` |\n" + "|---" * 12 + "|"
)


def lines() -> Iterator[dict[str, Any]]:
    """Every step of ndcompile that was measured and has an estimate; "file" is where it stands."""
    for path in sorted(HERE.glob("*H200*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            trained = str(line.get("case")).startswith(SYSTEM) and {"peak_gb", "layers"} <= line.keys()
            if trained and line.keys() <= KNOWN | MEASURED:
                yield line | {"file": path.name.partition("-torch")[0]}


def found(measured: list[dict[str, Any]], file: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """The first line of a file that ran as `wanted`, and with logits unless that says otherwise."""
    wanted = {"loss_only": None, "one_rank": None, **wanted, "file": file}
    return next(line for line in measured if all(line.get(name) == value for name, value in wanted.items()))


def same_case(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line.get(name) for name in ("case", "model", "exchange", "layers", "batch", "sequence", "loss_only"))


@functools.cache
def estimated(
    rates: str,
    case: str,
    model: str,
    exchange: str | None,
    layers: int,
    batch: int,
    sequence: int | None,
    loss_only: bool | None,
) -> Any:
    """Figures of memory and time by name."""
    sizes = train.sizes_of(case)
    asked: dict[str, Any] = {f"{name}_size": size for name, size in sizes.items()}
    if exchange is not None:
        asked["ep_implementation"] = exchange
    report = ndcompile.plan(
        train.config(model, layers),
        asked,
        batch_size=batch // (sizes.get("dp_replicate", 1) * sizes.get("fsdp", 1)),
        seq_len=sequence or 4096,
        rates=rates,
        loss_only=bool(loss_only),
    ).report
    return {figure.name: figure.value for figure in (*report.memory, *report.time)}


def row(line: dict[str, Any], measured: list[dict[str, Any]], rates: str) -> str:
    figures = estimated(rates, *same_case(line))
    alone, chunked = line.get("one_rank"), line.get("loss_only")
    step = (figures["step"] - (figures["exposed communication"] if alone else 0)) * 1e3
    exposed = f"{figures['exposed communication'] * 1e3:.1f} of {figures['communication'] * 1e3:.1f}"
    seen = "-" if alone else profiled(line, measured)
    if not figures["communication"]:
        exposed = seen = "0"
    peak = figures["peak"] / 1e9
    compared = not chunked or line["file"] in IN_ORDER
    known = [f"{line['peak_gb']:.1f}", f"{peak / line['peak_gb']:.2f}"] if compared else ["-", "-"]
    timed = [f"{step:.1f}", f"{line['ms']}", f"{step / line['ms']:.2f}"] if "ms" in line else ["-", "-", "-"]
    named = {"llama": "Llama", "moe": "Qwen3-MoE"}.get(line["model"], line["model"])
    layers = f", {line['layers']} layers" if line["layers"] != (4 if line["model"] == "moe" else 8) else ""
    length = f", sequence {line['sequence']}" if "sequence" in line else ""
    cells = [
        f"{named}{layers}{length}",
        ", ".join([line["case"].removeprefix(SYSTEM).replace(",", ", "), *filter(None, [line.get("exchange")])])
        + (" +" if chunked else "")
        + (" *" if alone else ""),
        str(line["batch"]),
        *timed,
        exposed,
        seen,
        f"{peak:.1f}",
        *known,
        line["file"],
    ]
    return f"| {' | '.join(cells)} |"


def profiled(line: dict[str, Any], measured: list[dict[str, Any]]) -> str:
    """Exposed and all communication of the line, or else of another one of the case."""
    others = [other for other in measured if same_case(other)[:-1] == same_case(line)[:-1] and "exposed_ms" in other]
    others.sort(key=lambda o: (o is not line, o.get("loss_only") != line.get("loss_only"), o["file"] != line["file"]))
    if not others:
        return "-"
    mark = " +" if others[0].get("loss_only") and not line.get("loss_only") else ""
    return f"{others[0]['exposed_ms']} of {others[0]['communication_ms']}{mark}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every line that has an estimate, not the docs' rows alone")
    parser.add_argument("--rates", default="h200-nvlink", help="a preset, or a file of `ndcompile rates`")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    measured = list(lines())
    print(HEAD)
    for line in measured if args.all else [found(measured, *wanted) for wanted in ROWS]:
        print(row(line, measured, args.rates), flush=True)


if __name__ == "__main__":
    main()
