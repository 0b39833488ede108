"""Walk a graph with the table: what each value is along tp, and what is not proven."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ndcompile.capture.graph_input import COORDINATE, HELD, PARAMETER, SEEDS
from ndcompile.operators.host_copies import to_device
from ndcompile.operators.redistribute import average_gradient, divide_gradient, redistribute, unshard
from ndcompile.plans.sharding_plan import ShardingPlan
from ndcompile.private.distributed import StridedShard
from ndcompile.proof.fact import (
    EXCHANGED,
    INVARIANT,
    KEEP_WHOLE,
    OWN,
    REPLICATED,
    SUM_GRADIENT,
    Fact,
    NotProven,
    shard_on,
)
from ndcompile.proof.made import NO_SUCH_NODE, may_make
from ndcompile.proof.moves import own
from ndcompile.proof.problem import Problem, exchanged, module_of
from ndcompile.proof.rules import RULES, Row, otherwise
from ndcompile.proof.use import Twins, Use, cut_dim, tensor_of
from ndcompile.verify.sharded_dims import side_by_side
from ndcompile.verify.type_inference import moves_over, written_memory

CHAIN = (to_device, divide_gradient, average_gradient, unshard)
"""What stands between a stored parameter and its uses."""


@dataclass(frozen=True)
class Step:
    """What was concluded of a node, and from what: where that is as it was, so is the conclusion.

    written: its arguments and what is known of its operands. value: its `meta["val"]`.
    """

    written: tuple[Any, ...]
    value: Any
    known: Fact
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Proof:
    """facts: of every value that is a tensor. problems: in the order of the graph; empty where all is proven.

    boundaries: the redistributions over tp. steps: for the next proof of this graph.
    """

    facts: Mapping[fx.Node, Fact]
    problems: tuple[Problem, ...]
    boundaries: tuple[fx.Node, ...]
    steps: Mapping[fx.Node, Step] = field(default_factory=dict, repr=False)

    def summary(self, times: Callable[[str], int] = lambda module: 1) -> str:
        """In numbers. times: how many modules of the whole model a module (or parameter) stands for."""
        inputs = [node.meta["input"] for node in self.facts if node.op == "placeholder"]
        parameters = sum(times(given.name) for given in inputs if given.kind == PARAMETER)
        computed = (node for node in self.facts if node.op != "placeholder" and node.target not in CHAIN)
        activations = sum(times(module_of(node)) for node in computed)
        boundaries = sum(times(module_of(node)) for node in self.boundaries)
        return f"proven: {parameters:,} parameters, {activations:,} activations, {boundaries:,} boundaries"


def pair_around(local: fx.Graph, whole: fx.Graph, plan: ShardingPlan) -> dict[fx.Node, fx.Node]:
    """Every node with its twin in the graph without tp, up to the first that differs by more than shapes.

    The exchange of tokens between experts is another program without tp, and is left out.
    """
    pairs = side_by_side(local, whole, leave_out=lambda node: exchanged(node, plan))
    return {own: twin for own, twin in pairs if twin is not None}


def prove(graph: fx.Graph, twins: Twins, plan: ShardingPlan, tp: str, ranks: int, before: Proof | None = None) -> Proof:
    """What is known of every value of `graph` along the axis of the group `tp`, and what cannot be proven.

    twins: see `pair_around`; nodes that passes made have none. After a problem the walk goes on with what the shapes
    say, so that one fault is one problem. before: a proof of the same graph before it was changed; what the change does
    not reach is taken from it.
    """
    walk = _Walk(graph, _of_whole_weights(graph, twins), plan, tp, ranks, {} if before is None else before.steps)
    for node in graph.nodes:
        if node.op == "output":
            walk.outputs(node)
        elif tensor_of(node) is not None:
            walk.visit(node)
    boundaries = tuple(node for node in graph.nodes if moves_over(node, tp))
    return Proof(walk.facts, tuple(walk.problems), boundaries, walk.steps)


def weight_of(placeholder: fx.Node) -> fx.Node:
    """The parameter as the model uses it: behind what gathers it and averages its gradient."""
    node = placeholder
    while len(node.users) == 1 and (user := next(iter(node.users))).target in CHAIN:
        node = user
    return node


def _of_whole_weights(graph: fx.Graph, twins: Twins) -> Twins:
    """A stored shard has other sizes than the parameter without tp: its twin is that of the gathered weight."""
    moved = dict(twins)
    for node in graph.find_nodes(op="placeholder"):
        if node in twins and (weight := weight_of(node)) is not node:
            moved[weight] = moved.pop(node)
    return moved


class _Walk:
    def __init__(
        self,
        graph: fx.Graph,
        twins: Twins,
        plan: ShardingPlan,
        tp: str,
        ranks: int,
        before: Mapping[fx.Node, Step],
    ) -> None:
        self.twins, self.plan, self.tp, self.ranks = twins, plan, tp, ranks
        self.before, self.steps = before, dict[fx.Node, Step]()
        self.facts: dict[fx.Node, Fact] = {}
        self.problems: list[Problem] = []
        self.memory = written_memory(graph)
        self.same_code = graph.output_node() in twins

    def visit(self, node: fx.Node) -> None:
        operands = tuple(self.facts.get(source) for source in node.all_input_nodes)
        written = (node.args, node.kwargs, operands, node.meta["differentiable"], self.twins.get(node))
        value, step, found = node.meta["val"], self.before.get(node), len(self.problems)
        if step is not None and step.value is value and step.written == written and node not in self.memory:
            self.problems += step.problems
            self.facts[node] = step.known
        else:
            self._conclude(node)
        self.steps[node] = Step(written, value, self.facts[node], tuple(self.problems[found:]))

    def _conclude(self, node: fx.Node) -> None:
        cut = None
        try:
            cut = cut_dim(node, self.twins[node], self.ranks) if node in self.twins else None
            use = Use(node, self.facts, self.twins, self.ranks, cut)
            known = self._input(use) if node.op == "placeholder" else self._value(use)
            if node in self.twins and known.kind != EXCHANGED:
                _agree(known, cut)
        except NotProven as problem:
            self._report(node, problem)
            known = shard_on(cut) if cut is not None else INVARIANT
        self.facts[node] = self._remember(node, known)

    def outputs(self, node: fx.Node) -> None:
        given: Any = node.args[0]
        returned = node.meta.get("returned")
        if node not in self.twins:
            other = next((n for n in self.facts if n not in self.twins), node)
            self._report(other, NotProven("the same code without tp does something else from here on", KEEP_WHOLE))
        for number, source in enumerate(given):
            known = self.facts.get(source) if isinstance(source, fx.Node) else None
            if known is None:
                continue
            if number >= (len(given) if returned is None else returned):  # into the cache
                if known.kind == "P":
                    self._report(source, NotProven("a partial sum goes into the cache", KEEP_WHOLE))
            elif known.varies or known.scale != 1:
                self._report(source, NotProven(OUTPUT.format(known.words()), GATHERED))
            elif known.kind == "R" and source.meta["differentiable"]:
                self._report(source, NotProven("it is returned, but its gradient would be summed", SUM_GRADIENT))

    def _report(self, node: fx.Node, problem: NotProven) -> None:
        operands = {o.name: self.facts[o].words() for o in node.all_input_nodes if o in self.facts}
        self.problems.append(Problem(node, problem.reason, problem.repair, operands))

    def _input(self, use: Use) -> Fact:
        source = use.node.meta["input"]
        if source.kind in (PARAMETER, HELD):
            entry = self.plan.by_name[source.name]
            if getattr(entry, "expert", False):
                return Fact(EXCHANGED)
            dim: Any = getattr(entry.tp, "dim", None)
            if dim is None:
                return INVARIANT
            return shard_on(dim, int(entry.tp.split_factor) if isinstance(entry.tp, StridedShard) else 1)
        if source.kind == COORDINATE:
            return Fact(OWN, role="coordinate") if source.name == "tp" else Fact(EXCHANGED)
        if source.kind == SEEDS:
            return Fact(OWN, role="seeds")
        return shard_on(use.cut) if use.cut is not None else INVARIANT

    def _value(self, use: Use) -> Fact:
        node = use.node
        if node.op == "get_attr" or not use.operands:
            return _fresh_or_whole(use)
        if moves_over(node, self.tp):
            return RULES["redistribute"].rule(use)
        if exchanged(node, self.plan) or use.of_kind(EXCHANGED):
            return _typed(use, Fact(EXCHANGED) if any(use.fact(o).varies for o in use.operands) else INVARIANT)
        if self.same_code and not use.paired and not may_make(node):
            raise NotProven("the same code without tp does not have it, and no pass makes it", NO_SUCH_NODE)
        if node.target is redistribute:  # over another axis: what it is along this one, it stays
            return use.fact(node.args[0])
        if node.target is operator.getitem:
            return use.fact(node.args[0])
        row = RULES.get(_name(node))
        _same_numbers(use, row)
        known = own(use) or (row.rule(use) if row is not None else otherwise(use))
        return _typed(use, _carry_scale(use, known))

    def _remember(self, node: fx.Node, known: Fact) -> Fact:
        """A write through one view is seen by the others: what they were before, and now are, is joined."""
        if node not in self.memory:
            return known
        for other, before in self.facts.items():
            if self.memory.get(other) != self.memory[node] or before.kind == known.kind:
                continue
            if before.kind in ("I", "R") and (known.kind in ("R", "P") or known.kind == "S"):
                self.facts[other] = known if known.kind != "S" else self._written(other, before)
            elif before.kind in ("R", "P") and known.kind == "I":
                known = before
        return known

    def _written(self, node: fx.Node, before: Fact) -> Fact:
        cut = cut_dim(node, self.twins[node], self.ranks) if node in self.twins else None
        if cut is None:
            self._report(node, NotProven("shards are written into a value that is whole", KEEP_WHOLE))
            return before
        return shard_on(cut)


OUTPUT = "an output of the model is {} over tp"
GATHERED = (
    "Add a tp_plan rule that gathers or sums it ('colwise_gather_output', 'rowwise', 'all_reduce'), or do not ask for "
    "it (output_attentions is per head)."
)


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return target._schema.name.partition("::")[2] if hasattr(target, "_schema") else ""


def _agree(known: Fact, cut: int | None) -> None:
    """The rule and the two captures say the same."""
    expected = known.dim if known.kind == "S" else None
    if expected != cut:
        shapes = "is of one size with and without tp" if cut is None else f"is a rank's share of dim {cut}"
        raise NotProven(
            f"its operands make it {known.words()}, but its value {shapes}: it depends on a size that tp cuts",
            KEEP_WHOLE,
        )


def _fresh_or_whole(use: Use) -> Fact:
    row = RULES.get(_name(use.node))
    _same_numbers(use, row)
    return row.rule(use) if row is not None and row.operators.startswith("zeros") else INVARIANT


def _same_numbers(use: Use, row: Row | None) -> None:
    """Numbers in the code that differ without tp come from a size that tp cuts. Sizes are compared as shapes."""
    if not use.paired:
        return
    twin = use.twins[use.node]
    own_numbers, _ = pytree.tree_flatten((use.node.args, use.node.kwargs))
    numbers, _ = pytree.tree_flatten((twin.args, twin.kwargs))
    for number, whole in zip(own_numbers, numbers, strict=False):
        if row is not None and row.sizes and not isinstance(number, float):
            continue
        value, other = (n.meta.get("val") if isinstance(n, fx.Node) else n for n in (number, whole))
        if isinstance(value, Tensor | tuple | list) or str(value) == str(other):
            continue
        if use.of_kind(OWN) or _is_factor(use, value, other):
            continue
        raise NotProven(
            f"the number {value} in it is {other} without tp: it comes from a size that tp cuts",
            "Keep the projections around it whole in tp_plan, or take the number from the config.",
        )


def _is_factor(use: Use, value: Any, other: Any) -> bool:
    """1/tp makes a partial sum of a whole value, see `pointwise.multiplied`."""
    if _name(use.node) not in ("mul", "div") or not isinstance(value, int | float) or not other:
        return False
    return value / other in (use.ranks, 1 / use.ranks) and RULES["mul"].rule(use).kind == "P"


def _carry_scale(use: Use, known: Fact) -> Fact:
    """What is a multiple of the true value stays one in a copy; anything else would go on with a wrong number."""
    scaled = [source for source in use.operands if use.fact(source).scale != 1]
    if not scaled or known.scale != 1 or (_name(use.node) == "div" and len(use.operands) == 1 and not use.paired):
        return known
    raise NotProven(
        f"{scaled[0].name!r} is {use.fact(scaled[0]).words()}", "Divide by the number of ranks behind the reduction."
    )


def _typed(use: Use, known: Fact) -> Fact:
    """I and R: whose gradient is whole, and whose is a sum. Where values vary, the gradient of what meets them is
    partial, and only R sums it."""
    node = use.node
    if not node.meta["differentiable"]:
        return replace(known, kind="I") if known.kind == "R" else known
    inputs = [source for source in use.operands if source.meta["differentiable"]]
    whole = [source for source in inputs if use.fact(source).kind == "I"]
    if known.varies and whole:
        raise NotProven(
            f"{whole[0].name!r} is the same on all ranks but used on shards: its gradient would be partial",
            SUM_GRADIENT,
        )
    if known.varies or not any(use.fact(source).kind == "R" for source in inputs):
        return known
    if whole:
        raise NotProven(
            f"it mixes {whole[0].name!r}, whose gradient is whole, with values whose gradients are summed", SUM_GRADIENT
        )
    return replace(known, kind=REPLICATED.kind)
