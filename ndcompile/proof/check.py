"""The proof as a step between passes: refuse, warn, or say what is proven."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import fx

from ndcompile.errors import VerifyError
from ndcompile.graphs.pass_context import PassContext
from ndcompile.proof.exchange import exchange_problems
from ndcompile.proof.made import unknown_nodes
from ndcompile.proof.problem import Problem
from ndcompile.proof.prove import Proof, pair_around, prove
from ndcompile.proof.use import Twins
from ndcompile.verify.verifier import where

_logger = logging.getLogger("ndcompile.proof")

MODES = ("error", "warn", "off")


def check_mode(verify: str) -> None:
    """Raises ValueError for another mode than MODES."""
    if verify not in MODES:
        raise ValueError(f"verify={verify!r} is unknown. Use one of {MODES}.")


def twins_of(graph: fx.Graph, context: PassContext) -> Twins | None:
    """The nodes of the captured graph, before all passes, with those of the same code without tp; None where there is
    no such graph, or nothing to prove."""
    if context.verify == "off" or context.axis("tp") is None or context.whole_graph is None:
        return None
    return pair_around(graph, context.whole_graph(), context.plan)


class Prover:
    """Proves one graph after every pass. What a pass did not change is not walked again.

    twins: see `twins_of`. proof: the last one along tp; None before the first, and where there are no twins.
    """

    def __init__(self, graph: fx.Graph, context: PassContext) -> None:
        self.context, self.twins = context, twins_of(graph, context)
        self.captured = frozenset(graph.nodes)
        self.proof: Proof | None = None
        self.told: set[tuple[fx.Node, str]] = set()

    def check(self, graph: fx.Graph, after: str) -> None:
        """Prove the graph as the pass `after` left it. Raises VerifyError for the first problem; with verify="warn" all
        are logged, each once."""
        if self.context.verify == "off":
            return
        self._tell(unknown_nodes(graph, self.captured), "all axes", after)
        axis = self.context.axis("tp")
        if self.twins is not None and axis is not None:
            self.proof = prove(graph, self.twins, self.context.plan, axis.group, axis.size, self.proof)
            self._tell(self.proof.problems, f"tp={axis.size}", after)
        if self.context.plan.experts:
            problems = exchange_problems(graph, self.context.plan, self.context.mesh)
            self._tell(problems, f"ep={self.context.mesh.size('ep')}", after)

    def _tell(self, problems: Sequence[Problem], ranks: str, after: str) -> None:
        for problem in problems:
            message = explain(problem, ranks, after)
            if self.context.verify == "error":
                raise VerifyError(message)
            if (problem.node, problem.reason) not in self.told:
                self.told.add((problem.node, problem.reason))
                _logger.warning("%s", message)


def explain(problem: Problem, ranks: str, after: str) -> str:
    """Node, module and source line, axis, what each operand is, and the repair."""
    operands = ", ".join(f"{name!r} is {words}" for name, words in problem.operands.items())
    return (
        f"{where(problem.node)} ({problem.node.target}) is not proven over {ranks} behind the pass {after!r}: "
        f"{problem.reason}."
        + (f" Its operands: {operands}." if operands else "")
        + f" {problem.repair} If it is right as it is, compile with verify='warn' or 'off'."
    )
