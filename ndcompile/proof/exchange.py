"""The proof along the ranks that share experts: whose tokens a value is of, and that they come back.

| a value is | meaning |
|---|---|
| home | of this rank's batch, as the model has it outside of its experts |
| part | of this rank's part of the batch that the tp ranks share |
| away | of the tokens that the ranks of the group sent to this rank's experts |
| gathered | of the tokens of all ranks along some of the group's axes |
| summand | of these, from this rank's experts alone: a sum over these axes is missing |
| expert | a weight of this rank's experts |
| any | no token's: a constant, a weight that is no expert's |

| node | takes | gives |
|---|---|---|
| I -> S(0), S(0) -> I over tp | home; part | part; home |
| all_to_all | part (home without tp); away | away; part (home) |
| I -> R over tp, S(0) -> R over ep_rest | home, gathered | gathered, along one axis more |
| P -> I over tp, P -> S(0) over ep_rest | summand | the same with one sum less; home behind the last |
| any operator on an expert's weight | away; gathered along all axes | away; summand |
| any other | operands that are of the same tokens | what they are |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from ndcompile.mesh import StorageMesh
from ndcompile.operators.redistribute import all_to_all, redistribute
from ndcompile.plans.sharding_plan import ShardingPlan
from ndcompile.proof.fact import NotProven
from ndcompile.proof.problem import Problem, exchanged
from ndcompile.proof.use import tensor_of


@dataclass(frozen=True)
class Tokens:
    """kind: as in the table. axes: along which it is gathered, or a summand."""

    kind: str
    axes: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.kind} along {', '.join(sorted(self.axes))}" if self.axes else self.kind


ANY, HOME, PART, AWAY, EXPERT = Tokens("any"), Tokens("home"), Tokens("part"), Tokens("away"), Tokens("expert")
REPAIR = "Keep the exchange as ndcompile/expert_exchange.py emits it: there, the experts, and back."


def exchange_problems(graph: fx.Graph, plan: ShardingPlan, mesh: StorageMesh) -> list[Problem]:
    """What is not proven of the exchange of tokens, in the order of the graph."""
    groups = {mesh.axes[name].group: name for name in ("ep", "ep_rest", "tp") if name in mesh.axes}
    group = frozenset(name for name in ("tp", "ep_rest") if name in mesh.axes)
    found: dict[fx.Node, Tokens] = {}
    problems = []
    for node in graph.nodes:
        operands = [source for source in node.all_input_nodes if source in found]
        if node.op == "output":
            problems += [_problem(o, found, "it leaves the model") for o in operands if found[o] not in (ANY, HOME)]
            continue
        if tensor_of(node) is None:
            continue
        try:
            found[node] = _tokens(node, operands, found, plan, groups, group)
        except NotProven as error:
            problems.append(_problem(node, found, error.reason))
            found[node] = HOME
    return problems


def _problem(node: fx.Node, found: dict[fx.Node, Tokens], reason: str) -> Problem:
    operands = {source.name: str(found[source]) for source in node.all_input_nodes if source in found}
    return Problem(node, reason, REPAIR, operands)


def _tokens(
    node: fx.Node,
    operands: list[fx.Node],
    found: dict[fx.Node, Tokens],
    plan: ShardingPlan,
    groups: dict[str, str],
    group: frozenset[str],
) -> Tokens:
    if node.op == "placeholder":
        source = node.meta["input"]
        if source.name in plan.by_name:
            return EXPERT if plan.by_name[source.name].expert else ANY
        return HOME if source.kind.endswith(("argument", "cache")) else ANY
    if node.target is all_to_all:
        return _exchanged(found[operands[0]], PART if "tp" in group else HOME)
    if node.target is redistribute and exchanged(node, plan):
        return _moved(node, found[operands[0]], groups.get(str(node.args[1]), str(node.args[1])))
    return _joined(node, operands, found, group)


def _exchanged(tokens: Tokens, own: Tokens) -> Tokens:
    if tokens not in (own, AWAY, ANY):
        raise NotProven(f"what is exchanged is {tokens}, and not {own} or away", REPAIR)
    return {own: AWAY, AWAY: own}.get(tokens, ANY)


OVER = {"I->R": "tp", "S->R": "ep_rest", "P->I": "tp", "P->S": "ep_rest", "I->S": "tp", "S->I": "tp"}
"""What moves tokens, and over which axis."""


def _moved(node: fx.Node, tokens: Tokens, axis: str) -> Tokens:
    pair, axes = f"{str(node.args[3])[0]}->{str(node.args[4])[0]}", tokens.axes
    if OVER.get(pair) != axis:
        raise NotProven(f"tokens move {pair} over {OVER.get(pair, 'no axis')}, and not over {axis}", REPAIR)
    if tokens == ANY:
        return ANY
    if pair.endswith("R"):
        if tokens.kind not in ("home", "gathered") or axis in axes:
            raise NotProven(f"it gathers along {axis} what is {tokens}", REPAIR)
        return Tokens("gathered", axes | {axis})
    if tokens.kind == "summand" and axis in axes and pair.startswith("P"):
        return Tokens("summand", axes - {axis}) if len(axes) > 1 else HOME
    given, moved = (HOME, PART) if pair == "I->S" else (PART, HOME)
    if tokens != given or (pair.startswith("P") and node.meta["differentiable"]):  # numbers of rows are added up
        raise NotProven(f"it moves {pair} over {axis} what is {tokens}", REPAIR)
    return moved


def _joined(node: fx.Node, operands: list[fx.Node], found: dict[fx.Node, Tokens], group: frozenset[str]) -> Tokens:
    expert = any(found[o] == EXPERT for o in operands)
    of_tokens = {found[o] for o in operands} - {ANY, EXPERT}
    if len(of_tokens) > 1:
        of_tokens = _alike([o for o in operands if found[o] in of_tokens], found, group & {"tp"})
    if len(of_tokens) > 1:
        if not any(_floating(o) for o in operands):  # numbers of rows to send and to receive
            return ANY
        raise NotProven(f"it takes values for one another's that are {_spell(of_tokens)}", REPAIR)
    tokens = of_tokens.pop() if of_tokens else EXPERT if expert else ANY
    indices = not any(o.meta["differentiable"] for o in operands if found[o] == HOME)
    if expert and tokens == HOME and indices and group == {"tp"}:
        tokens = Tokens("gathered", group)  # what has no gradient is on all tp ranks without I -> R
    if expert and tokens in (HOME, PART):
        raise NotProven("this rank's experts compute tokens that were not sent to them", REPAIR)
    if expert and tokens.kind == "gathered":
        if tokens.axes != group:
            raise NotProven(f"an expert lies on one rank of {sorted(group)}, the tokens are {tokens}", REPAIR)
        return Tokens("summand", group)
    return tokens


def _alike(operands: list[fx.Node], found: dict[fx.Node, Tokens], shared: frozenset[str]) -> set[Tokens]:
    """What several operands are together.

    The tokens of a batch that ranks share (over tp, if there is tp) are on all of them, so what has no gradient is
    gathered without I -> R; and masks and indices of gathered tokens meet summands.
    """
    given = {found[o] for o in operands}
    spread = {
        tokens.axes if o.meta["differentiable"] or tokens == AWAY else tokens.axes | shared
        for o in operands
        for tokens in [found[o]]
    }
    summed = any(tokens.kind == "summand" for tokens in given)
    if given & {AWAY, PART} or len(spread) > 1 or not (summed or any(tokens.axes for tokens in given)):
        return given
    return {Tokens("summand" if summed else "gathered", spread.pop())}


def _floating(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.is_floating_point()


def _spell(tokens: Iterable[Tokens]) -> str:
    return " and ".join(sorted(map(str, tokens)))
