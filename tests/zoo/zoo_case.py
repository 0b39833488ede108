"""One cell of the zoo's table: a model type on a layout, compared with the single-process model on real ranks."""

from __future__ import annotations

import re
import traceback
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import workers
import zoo
from parity_case import step_losses
from pool import Pool, RankError, RankTimeout
from torch.distributed.tensor import Replicate
from workers import EXACT_LIMIT, Comparison, gradient_errors

import ndcompile
from ndcompile import errors
from ndcompile.model_calls import compiled_model

ROOT = Path(__file__).parents[2]

LIMIT = 1e-4
"""Largest error of a float32 tensor. SEMANTICS: ten times that of the parity tests, because some types here have
operators (scans, exponentials of sums) whose float32 noise is that large; what exceeds it must agree in float64."""

PASS, WRONG_LOSS, WRONG_GRADIENT, REFUSED, ERROR = "pass", "wrong loss", "wrong gradient", "refused", "error"
REFUSALS = {name for name in vars(errors) if isinstance(vars(errors)[name], type)}


@dataclass(frozen=True)
class ZooCase:
    """What to run. rows: of a data rank's batch. plan: overrides of tp_plan. config: changes of the configuration."""

    model_type: str
    layout: str
    rows: int = 2
    padding: bool = False
    seeds: tuple[int, ...] = (0,)
    dtype: torch.dtype = torch.float32
    backend: str = "aot_eager"
    plan: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def row(self) -> str:
        """The row of the table that this case counts in."""
        seeds = [f"{len(self.seeds)} seeds"] if len(self.seeds) > 1 else []
        return ", ".join([self.layout, *seeds, *(["padding"] if self.padding else [])])


@dataclass
class Measured:
    """What one rank found. sharded: share of the parameters that tp shards. seconds: of capture, passes, lowering.

    opaque: what is said of modules that run as one node.
    """

    comparison: Comparison
    sharded: float
    seconds: dict[str, float]
    opaque: list[str]


@dataclass
class Result:
    """One line of the results. layout: the row of the case. repaired: the result with the override of `zoo.repairs`."""

    model_type: str
    layout: str
    result: str
    worst: str = ""
    error: float = 0.0
    exact: float | None = None
    message: str = ""
    repaired: str = ""
    traceback: str = ""
    opaque: str = ""
    sharded: float | None = None
    capture_seconds: float | None = None
    lowering_seconds: float | None = None

    def line(self) -> dict[str, Any]:
        """What is set, with files named from the packages' folder or the repository's root."""
        values = {key: value for key, value in asdict(self).items() if value not in (None, "")}
        return {key: _portable(value) if isinstance(value, str) else value for key, value in values.items()}


def measure(case: ZooCase, checkpoint: str) -> Measured:
    """Run on every rank: one step a seed of both models, with gradients accumulated."""
    model = ndcompile.compile(
        zoo.on_meta(case.model_type, case.dtype, **case.config),
        workers.mesh(zoo.LAYOUTS[case.layout]),
        distributed_config={"tp_plan": case.plan} if case.plan else None,
        checkpoint=checkpoint,
        backend=case.backend,
    )
    reference = zoo.build(case.model_type, case.dtype, **case.config)
    world = ndcompile.data_world_size(model)
    batches = [[zoo.batch(case.rows, rank, seed, case.padding) for rank in range(world)] for seed in case.seeds]
    loss = max(step_losses(model, reference, of_ranks) for of_ranks in batches)
    gradients = gradient_errors(model, {name: p.grad for name, p in reference.named_parameters()})
    signatures = compiled_model(model).signatures.values()
    (program,) = (program for signature in signatures for program in signature.programs)
    opaque = compiled_model(model).shadow.opaque.notes()
    return Measured(Comparison(loss, gradients), sharded_share(model.sharding_plan), program.seconds, opaque)


def sharded_share(plan: ndcompile.ShardingPlan) -> float:
    """Share of the parameters' elements that a rank of a tp (or ep) group does not hold whole."""
    elements = {p.fqn: prod(p.shape) for p in plan.parameters}
    return sum(elements[p.fqn] for p in plan.parameters if not isinstance(p.tp, Replicate)) / sum(elements.values())


def run_with_repair(pool: Pool, case: ZooCase, folder: Path, timeout: float) -> Result:
    """The verdict, and that of the repaired case for a type that has one and does not pass as it is."""
    result = run_case(pool, case, folder, timeout)
    repair = zoo.repairs().get(case.model_type)
    if repair and result.result != PASS:
        plan = repair.get("plan", {}) if "tp" in dict(zoo.LAYOUTS[case.layout]) else {}
        repaired = run_case(pool, replace(case, plan=plan, config=repair.get("config", {})), folder, timeout)
        result.repaired = repaired.result
    return result


def run_case(pool: Pool, case: ZooCase, folder: Path, timeout: float) -> Result:
    """The verdict. `folder` keeps the checkpoints."""
    result = Result(case.model_type, case.row, ERROR)
    try:
        checkpoint = _checkpoint(case.model_type, folder)
        errors, first = _worst(pool, case, checkpoint, timeout)
        result.sharded, result.opaque, seconds = first.sharded, " ".join(first.opaque), first.seconds
        result.capture_seconds = round(seconds["capture"] + seconds["passes"], 2)
        result.lowering_seconds = round(seconds["lowering"], 2)
        result.worst, result.error = max(errors.items(), key=lambda item: _rank_of(item[1]))
        over = {name for name, value in errors.items() if not value <= LIMIT}
        result.result = PASS if not over else WRONG_LOSS if "loss" in over else WRONG_GRADIENT
        if over:
            _try_in_float64(pool, case, checkpoint, timeout, result, errors)
    except RankError as error:
        kind, message, trace = error.failures[min(error.failures)]
        result.result = REFUSED if kind in REFUSALS else ERROR
        result.message, result.traceback = f"{kind}: {message}", trace
    except RankTimeout as error:
        result.message, result.traceback = str(error).splitlines()[0], str(error)
    except Exception as error:  # the single-process model itself
        result.message, result.traceback = f"{type(error).__name__}: {error}", traceback.format_exc()
    return result


def _try_in_float64(
    pool: Pool, case: ZooCase, checkpoint: Path, timeout: float, result: Result, errors: dict[str, float]
) -> None:
    """A tensor over the limit passes if both sides agree in float64; some models have fixed float32 parts."""
    over = {name for name, value in errors.items() if not value <= LIMIT}
    try:
        exact, _ = _worst(pool, replace(case, dtype=torch.float64), checkpoint, timeout)
    except RankError as error:
        result.message = f"float64: {error.failures[min(error.failures)][1]}"
        return
    result.worst, result.exact = max(((n, exact[n]) for n in over), key=lambda item: _rank_of(item[1]))
    result.error = errors[result.worst]
    if all(exact[name] <= EXACT_LIMIT for name in over):
        result.result = PASS


def _worst(pool: Pool, case: ZooCase, checkpoint: Path, timeout: float) -> tuple[dict[str, float], Measured]:
    """The largest error of every tensor over the ranks, and what rank 0 measured."""
    measured = pool(measure, case, str(checkpoint), timeout=timeout)
    worst: dict[str, float] = {}
    for rank in measured:
        for name, value in rank.comparison.exceeding(-1.0).items():
            worst[name] = max(value, worst.get(name, 0.0), key=_rank_of)
    return worst, measured[0]


def _portable(text: str) -> str:
    return re.sub(r"[^\s\"']*/site-packages/", "", text).replace(f"{ROOT}/", "")


def _rank_of(error: float) -> float:
    """NaN is worse than any number."""
    return error if error == error else float("inf")


def _checkpoint(model_type: str, folder: Path) -> Path:
    path = folder / model_type
    if not path.exists():
        zoo.build(model_type).save_pretrained(path)
    return path
