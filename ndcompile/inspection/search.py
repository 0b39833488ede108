"""Which layouts of a number of ranks are legal for a model, fit the memory, and how fast they would be.

Memory first: the bytes of parameters, gradients and AdamW's moments follow from the plan of a layout, exactly and at
once. Only where they fit a step is traced, once for each pair (tp, ep) with fsdp, and once without: the ranks' kernels,
and what they gather, are the same however the other ranks are divided into dp_replicate and fsdp. Other layouts differ
from the traced one in the sizes of their groups, by which the collectives are timed anew (a trace has two replicas, if
any layout of the pair has more than one, and all-reduces of one replica take no time); and in the bytes of parameters,
gradients and moments, which replace the traced ones. The order of nodes is that of the traced step. Padding of shards
that do not divide evenly is counted in bytes held, not in time.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from ndcompile.capture.shadow import copy_without_weights
from ndcompile.errors import PlanError
from ndcompile.inspection.kernels import Kernels, Size, filled_rows, kernels
from ndcompile.inspection.layers import LayerStack, keep_traced, stack_of
from ndcompile.inspection.legal_layouts import legal_layouts
from ndcompile.inspection.memory import MOMENTS, Alive, stored_bytes
from ndcompile.inspection.rates import Rates
from ndcompile.inspection.scheduled import scheduled
from ndcompile.inspection.search_result import Candidate, Layout, SearchResult, Unfit
from ndcompile.inspection.time_model import ADAMW_PASSES, estimate
from ndcompile.inspection.trace import Traced, trace
from ndcompile.loader.rank_reads import spell_bytes
from ndcompile.mesh import Axis
from ndcompile.plans.sharding_plan import ShardingPlan, build_plan

FEW = 4
"""Families for which a further process pays: it takes seconds to start."""

_Priced = tuple[list[Candidate], list[Unfit]]
"""Of a family, the layouts that fit and the others."""


def search(
    model: PreTrainedModel,
    world: int,
    memory_bytes: int,
    *,
    batch_size: int,
    seq_len: int,
    rates: Rates,
    stage: Callable[[str], None] = lambda text: None,
    workers: int = 1,
    loss_only: bool = False,
) -> SearchResult:
    """All layouts of `world` ranks for training `model` with AdamW, best first, and why others are not among them.

    memory_bytes: of one rank. batch_size: sequences of `seq_len` tokens of a whole step, over all ranks, so that every
    layout does the same work. stage: told what was done; a trace takes seconds. workers: processes that trace, of
    some 0.7 GB each. More than one import the caller's main module, so a script needs `if __name__ == "__main__"`.
    loss_only: see `ndcompile.compile`.

    Raises ValueError for sizes below 1, and what `trace` and `estimate` raise.
    """
    for name, value in [("world", world), ("memory", memory_bytes), ("batch", batch_size), ("seq", seq_len)]:
        if value < 1:
            raise ValueError(f"{name}={value} must be 1 or more.")
    part = _Part.of(model, loss_only)
    families, illegal = legal_layouts(world, batch_size, part.refusal, part.has_experts)
    priced = partial(_priced, part, memory_bytes, batch_size, seq_len, rates)
    fitting: list[Candidate] = []
    unfit: list[Unfit] = []
    for family, (fit, others) in _each(priced, families, min(workers, len(families) // FEW)):
        if fit or any(other.peak is not None for other in others):
            stage(f"traced a step on {_representative(family)}")
        fitting += fit
        unfit += others
    fitting.sort(key=lambda found: (found.step, found.peak, found.layout))
    unfit.sort(key=lambda other: (other.peak is None, other.needed, other.layout))
    name, found = type(model).__name__, (tuple(fitting), tuple(unfit), tuple(illegal))
    result = SearchResult(name, world, memory_bytes, batch_size, seq_len, rates.name, *found)
    return result if fitting else dataclasses.replace(result, advice=_advice(part, result))


def _each(
    priced: Callable[[list[Layout]], _Priced], families: Sequence[list[Layout]], workers: int
) -> Iterator[tuple[list[Layout], _Priced]]:
    """Every family with its layouts, as soon as they are there."""
    if workers <= 1:
        yield from ((family, priced(family)) for family in families)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))  # torch's threads do not survive a fork
    try:
        pending = {pool.submit(priced, family): family for family in families}
        for future in as_completed(pending):
            yield pending[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _priced(
    part: _Part, memory_bytes: int, batch_size: int, seq_len: int, rates: Rates, layouts: Sequence[Layout]
) -> _Priced:
    """The layouts of a family: what those that fit cost, and what the others need."""
    states = {layout: part.states(layout) for layout in layouts}
    if min(states.values()) > memory_bytes:
        return [], [Unfit(layout, size, None) for layout, size in states.items()]
    replicas = min(2, max(layout.dp_replicate for layout in layouts))
    step = _Step.of(part, _representative(layouts), replicas, batch_size, seq_len, rates)
    tokens = batch_size * seq_len / (layouts[0].data_ranks * layouts[0].tp)
    fit: list[Candidate] = []
    others: list[Unfit] = []
    for layout, size in states.items():
        peak = step.peak(layout) if size <= memory_bytes else None
        if peak is None or peak > memory_bytes:
            others.append(Unfit(layout, size, peak))
        else:
            fit.append(step.candidate(layout, size, peak, tokens))
    return fit, others


def _representative(layouts: Sequence[Layout]) -> Layout:
    """The layout to trace: as few shards as make it gather dense weights and experts. Many make long graphs, as every
    shard that is put in place, or is uneven, has nodes of its own."""
    return next((layout for layout in layouts if layout.fsdp * layout.tp > layout.ep), layouts[-1])


@dataclass(frozen=True)
class _Part:
    """A model, and a copy with one layer of each kind, whose plans are quick and tell those of the whole.

    loss_only: how its step is traced.
    """

    model: PreTrainedModel
    small: PreTrainedModel
    stack: LayerStack
    frozen: frozenset[str]
    loss_only: bool

    @classmethod
    def of(cls, model: PreTrainedModel, loss_only: bool) -> _Part:
        small = copy_without_weights(model)
        plan = build_plan(copy_without_weights(model), dataclasses.asdict(Layout(1, 1, 1)), DistributedConfig())
        stack = stack_of(small, plan)
        keep_traced(small, stack)
        frozen = frozenset(name for name, p in model.named_parameters() if not p.requires_grad)
        return cls(copy_without_weights(model), small, stack, frozen, loss_only)

    @property
    def has_experts(self) -> bool:
        return bool(self.model.ep_plan)

    def plan(self, layout: Layout) -> ShardingPlan:
        return build_plan(copy_without_weights(self.small), dataclasses.asdict(layout), DistributedConfig())

    def refusal(self, layout: Layout) -> str:
        """Why the model cannot have a layout; "" if it can."""
        try:
            self.plan(layout)
        except PlanError as error:
            return str(error)
        return ""

    def stored(self, layout: Layout) -> tuple[int, int]:
        """Bytes of a rank's parameters, and of those that are trained."""
        sizes = [
            (p.fqn in self.frozen, stored_bytes(p) * self.stack.count(p.fqn)) for p in self.plan(layout).parameters
        ]
        return sum(size for _, size in sizes), sum(size for frozen, size in sizes if not frozen)

    def states(self, layout: Layout) -> int:
        """Bytes of a rank's parameters, gradients and AdamW's moments."""
        parameters, trained = self.stored(layout)
        return parameters + (1 + MOMENTS) * trained


@dataclass(frozen=True)
class _Step:
    """A step traced on a layout with few replicas, which stands for the layouts of its family.

    graphs: forward and backward of all layers, as they run. costs: of their kernels, the same on every layout.
    """

    part: _Part
    traced: Traced
    graphs: tuple[fx.Graph, fx.Graph]
    layout: Layout
    costs: tuple[Kernels, Kernels]
    alive: Alive
    rates: Rates
    size: Size

    @classmethod
    def of(cls, part: _Part, layout: Layout, replicas: int, batch_size: int, seq_len: int, rates: Rates) -> _Step:
        sizes, each = dataclasses.asdict(layout) | {"dp_replicate": replicas}, batch_size // layout.data_ranks
        options: dict[str, Any] = {"batch_size": each, "seq_len": seq_len, "loss_only": part.loss_only}
        traced = trace(part.model, sizes, DistributedConfig(), **options, proven=False)
        top_k = getattr(part.model.config.get_text_config(), "num_experts_per_tok", None) or 1
        filled = filled_rows(traced.plan.experts, top_k)
        size = _remembering(traced.size)
        forward, backward = scheduled(traced)
        costs = kernels(forward, rates, size, filled), kernels(backward, rates, size, filled)
        return cls(part, traced, (forward, backward), layout, costs, Alive.of(traced), rates, size)

    def peak(self, layout: Layout) -> int:
        """Bytes at the peak: what the traced layout has alive, with this one's parameters, gradients and moments."""
        parameters, trained = self.part.stored(layout)
        gradients = trained / max(1, self.part.stored(self.layout)[1])
        return self.alive.peak(gradients) + parameters + MOMENTS * trained

    def candidate(self, layout: Layout, states: int, peak: int, tokens: float) -> Candidate:
        """tokens: of a step and rank."""
        result = estimate(
            *self.graphs,
            self._axes(layout),
            self.rates,
            optimizer_bytes=ADAMW_PASSES * self.part.stored(layout)[1],
            size=self.size,
            costs=self.costs,
            parts={"dp_replicate": self.layout.fsdp / layout.fsdp},  # copies of a shard reduce that shard
        )
        exposed = next(figure.value for figure in result.time if figure.name == "exposed share")
        return Candidate(layout, result.step, tokens / result.step, exposed, states, peak)

    def _axes(self, layout: Layout) -> dict[str, Axis]:
        """The traced axes in another layout's sizes."""
        rest = max(layout.ep // layout.tp, 1)
        sizes = dataclasses.asdict(layout) | {"ep_rest": rest, "efsdp": layout.fsdp // rest}
        axes = {name: dataclasses.replace(axis, size=sizes[name]) for name, axis in self.traced.mesh.axes.items()}
        return axes


def _remembering(size: Size) -> Size:
    """`size`, which computes with symbols, once for each expression."""
    known: dict[Any, int] = {}

    def remembered(value: Any) -> int:
        if isinstance(value, int):
            return value
        expression = value.node.expr
        if expression not in known:
            known[expression] = size(value)
        return known[expression]

    return remembered


def _advice(part: _Part, result: SearchResult) -> str:
    """What would fit, where no layout does."""
    if not result.unfit:
        return f"No layout of {result.world} ranks is legal for {result.model}. Change the world size or the batch."
    least = result.unfit[0]
    needed, states = spell_bytes(least.needed), "parameters, gradients and AdamW's moments"
    text = f"No layout of {result.world} ranks fits {spell_bytes(result.memory_bytes)} a rank. The least is {needed} "
    if least.peak is not None:
        return text + (
            f"({least.layout}), {spell_bytes(least.states)} of it {states}. That much memory would do; or a smaller "
            "batch or sequence, or gradient checkpointing."
        )
    ranks = _enough(part, least.layout, result.memory_bytes)
    more = f"They fit from {ranks} ranks." if ranks else "No number of ranks makes them fit."
    return text + f"({least.layout}) for {states} alone. {more}"


def _enough(part: _Part, layout: Layout, memory_bytes: int) -> int | None:
    """Ranks, doubled as often as needed, on which the states of a layout fit; None if they never do."""
    for _ in range(16):
        layout = dataclasses.replace(layout, dp_replicate=1, fsdp=layout.fsdp * 2)
        if part.states(layout) <= memory_bytes:
            return layout.fsdp * layout.tp
    return None
