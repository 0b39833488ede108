"""An estimate of a training step's time: its graphs on two streams, one that computes and one that sends.

The graph's order is the program's order: the graphs of a plan are `scheduled` as a GPU's are. Kernels run one after the
other on the compute stream, collectives one after the other on the communication stream. A collective starts when the
kernels before it are done, as NCCL's do, and a wait holds the compute stream until its collective is done: what stands
between the two overlaps with it, and where nothing does, the collective is exposed. The optimizer follows the backward
graph.

This is a graph whose longest path is the critical path. A step takes as long, and what kernels lose to collectives that
run beside them inside a node: they share multiprocessors and power. What is left out: the host (launches, and the reads
of routed sizes), and that the collectives are slowed down as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from types import MappingProxyType

import networkx
from torch import fx

from ndcompile.inspection import kernels as timed
from ndcompile.inspection.kernels import Kernels, Size, is_collective, is_wait, kernels, name_of
from ndcompile.inspection.links import FORMULA, Group, collective_seconds, groups_of
from ndcompile.inspection.rates import Rates
from ndcompile.inspection.report import Figure, PathStep
from ndcompile.inspection.trace import module_of
from ndcompile.mesh import Axis

ADAMW_PASSES = 7
"""A fused AdamW reads parameter, gradient and two moments, and writes parameter and moments."""

LOST = "lost to hidden communication"
"""What kernels lose to collectives that run beside them."""


@dataclass(frozen=True)
class TimeEstimate:
    """What a step takes. time, compute: figures for a report; the last of `time` is the step."""

    time: tuple[Figure, ...]
    compute: tuple[Figure, ...]
    critical_path: tuple[PathStep, ...]

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.time[-1].value


@dataclass(frozen=True)
class Task:
    """A kernel, a collective or a wait. inside: a collective's ranks are on one node. waits_for: the number of the
    collective that a wait, or the end, needs."""

    what: str
    module: str
    phase: str
    seconds: float
    sends: bool = False
    inside: bool = False
    waits_for: int | None = None


def estimate(
    forward: fx.Graph,
    backward: fx.Graph,
    axes: Mapping[str, Axis],
    rates: Rates,
    *,
    optimizer_bytes: int = 0,
    size: Size = int,
    filled: Mapping[str, float] | None = None,
    costs: tuple[Kernels, Kernels] | None = None,
    parts: Mapping[str, float] = MappingProxyType({}),
) -> TimeEstimate:
    """Estimate a training step from its graphs, of all layers and in the order in which they run (see `scheduled`).

    axes: of the storage mesh. optimizer_bytes: that an optimizer step reads and writes, see ADAMW_PASSES. size: a
    symbolic size as a number. filled: see `kernels.filled_rows`. costs: what `kernels` makes of the two graphs, where
    that is known; axes have no part in it. parts: axis -> what it moves, as a part of what the graphs say.

    Raises ValueError for a dtype without a rate, and for a collective without a formula.
    """
    groups = groups_of(axes, rates.ranks_a_node)
    tasks: list[Task] = []
    costs = costs or (kernels(forward, rates, size, filled), kernels(backward, rates, size, filled))
    for phase, graph, cost in (("forward", forward, costs[0]), ("backward", backward, costs[1])):
        tasks += _tasks(graph, phase, cost, collective_times(graph, axes, rates, size, parts), groups, len(tasks))
    tasks.append(Task("optimizer", "", "optimizer", optimizer_bytes / (rates.memory_bandwidth * rates.memory_fraction)))
    path = _critical_path(tasks)
    figures = _time(tasks, path, rates)
    lost = next(figure.value for figure in figures if figure.name == LOST)
    slowed = (PathStep(LOST, "", "whole step", lost),) if lost else ()
    return TimeEstimate(figures, _compute(costs, tasks, rates), (*_fold(path), *slowed))


def collective_times(
    graph: fx.Graph,
    axes: Mapping[str, Axis],
    rates: Rates,
    size: Size = int,
    parts: Mapping[str, float] = MappingProxyType({}),
) -> dict[fx.Node, float]:
    """Seconds of every collective node of a graph. parts: see `estimate`.

    Raises ValueError for a collective without a formula.
    """
    groups = groups_of(axes, rates.ranks_a_node)
    return {node: _collective(node, groups, rates, size, parts) for node in graph.nodes if is_collective(node)}


def _collective(
    node: fx.Node, groups: Mapping[str, Group], rates: Rates, size: Size, parts: Mapping[str, float]
) -> float:
    source, group = node.all_input_nodes[0].meta["val"], groups[group_name(node)]
    nbytes = max(timed.bytes_of(source, size), timed.bytes_of(node.meta["val"], size))
    return collective_seconds(name_of(node), nbytes * parts.get(group.axis, 1.0), group, rates)


def group_name(node: fx.Node) -> str:
    """The process group of a collective node: its last argument."""
    return str(node.args[-1])


def _tasks(
    graph: fx.Graph,
    phase: str,
    cost: Kernels,
    started: Mapping[fx.Node, float],
    groups: Mapping[str, Group],
    first: int,
) -> Iterator[Task]:
    """What takes time or waits, in the graph's order. first: number of the first task."""
    number: dict[fx.Node, int] = {}
    for node in graph.nodes:
        module = module_of(node)
        if is_collective(node):
            number[node] = first
            group = groups[group_name(node)]
            what = f"{name_of(node)} over {group.axis}"
            yield Task(what, module, phase, started[node], sends=True, inside=group.nodes == 1)
        elif is_wait(node) and node.args[0] in number:
            yield Task("compute", module, phase, 0.0, waits_for=number[node.args[0]])
        elif seconds := cost.seconds.get(node, 0.0):
            yield Task("compute", module, phase, seconds)
        else:
            continue
        first += 1


def _critical_path(tasks: Sequence[Task]) -> list[Task]:
    """The longest path through the tasks: through each stream's order, from kernels to the collectives issued behind
    them, and from collectives to their waits."""
    order = networkx.DiGraph()
    last: dict[bool, int] = {}

    def follow(before: int | None, after: int) -> None:
        if before is not None:
            order.add_edge(before, after, seconds=tasks[before].seconds)

    for number, task in enumerate(tasks):
        order.add_node(number)
        follow(last.get(False), number)
        follow(last.get(True) if task.sends else task.waits_for, number)
        last[task.sends] = number
    end = len(tasks)
    for number in last.values():  # what nobody waits for must end as well
        follow(number, end)
    path = networkx.dag_longest_path(order, weight="seconds", default_weight=0)
    return [tasks[number] for number in path if number != end]


def _fold(path: Sequence[Task]) -> tuple[PathStep, ...]:
    """Consecutive tasks of one kind, with the innermost module that all of them are in."""
    steps = []
    for (what, phase), group in groupby((t for t in path if t.seconds), key=lambda task: (task.what, task.phase)):
        run = list(group)
        steps.append(PathStep(what, _innermost([task.module for task in run]), phase, sum(t.seconds for t in run)))
    return tuple(steps)


def _innermost(modules: Sequence[str]) -> str:
    levels = zip(*(module.split(".") for module in modules), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels))


def _time(tasks: Sequence[Task], path: Sequence[Task], rates: Rates) -> tuple[Figure, ...]:
    optimizer = tasks[-1].seconds
    computing = sum(t.seconds for t in tasks[:-1] if not t.sends)
    sending = sum(t.seconds for t in tasks if t.sends)
    critical = sum(t.seconds for t in path)
    exposed = max(critical - computing - optimizer, 0.0)
    inside = sum(t.seconds for t in tasks if t.inside) / sending if sending else 0.0
    lost = rates.hidden_fraction * inside * (sending - exposed)
    share = exposed / sending if sending else 0.0
    hidden = max(computing, sending) + optimizer
    return (
        Figure(
            "computation", computing, "sum over the kernels of forward and backward, see the figures of computation"
        ),
        Figure(
            "communication", sending, f"sum over the collectives of forward and backward, merged as they run; {FORMULA}"
        ),
        Figure(
            "exposed communication",
            exposed,
            "critical path - computation - optimizer: while a wait holds the compute stream. Nodes between a "
            "collective and its wait overlap with it; the order is that of bucket_collectives, overlap_dispatch, "
            "delay_weight_gradients and overlap_communication",
        ),
        Figure("exposed share", share, "exposed communication / communication"),
        Figure(
            "optimizer",
            optimizer,
            f"bytes of parameters, gradients and AdamW's moments, {ADAMW_PASSES} passes in all / (memory bandwidth x "
            f"{rates.memory_fraction:g})",
        ),
        Figure(
            LOST,
            lost,
            f"{rates.hidden_fraction:g} x the part of communication inside a node x (communication - exposed)",
        ),
        Figure("step, all hidden", hidden, "max(computation, communication) + optimizer: no order can be faster"),
        Figure("step", critical + lost, "seconds of the critical path, and what is lost to hidden communication"),
    )


def _compute(parts: Sequence[Kernels], tasks: Sequence[Task], rates: Rates) -> tuple[Figure, ...]:
    counts: dict[bool, float] = {True: 0.0, False: 0.0}
    seconds: dict[bool, float] = {True: 0.0, False: 0.0}
    for cost in parts:
        for node, count in cost.flops.items():
            attention = timed.ATTENTION in name_of(node)
            counts[attention] += count
            seconds[attention] += cost.seconds[node]
    others = sum(t.seconds for t in tasks[:-1] if not t.sends) - seconds[True] - seconds[False]
    return (
        Figure("FLOPs of matrix products", counts[False], "2 x rows x inner x columns, forward and backward"),
        Figure("FLOPs of attention", counts[True], "2 products forward, 5 backward; half of it where it is causal"),
        Figure(
            "matrix products",
            seconds[False],
            f"max(FLOPs / (peak of the dtype x {rates.matmul_fraction:g}), bytes / (memory bandwidth x "
            f"{rates.memory_fraction:g})), summed",
        ),
        Figure("attention", seconds[True], f"the same with {rates.attention_fraction:g} of the peak"),
        Figure(
            "other kernels",
            others,
            "bytes that fused kernels read and write / (memory bandwidth x "
            f"{rates.memory_fraction:g}); operators that are connected without a matrix product, attention, collective "
            "or sort between them are one kernel",
        ),
    )
