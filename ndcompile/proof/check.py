"""The proof as a step between passes: refuse, warn, or say what is proven."""

from __future__ import annotations

import logging

from torch import fx

from ndcompile.errors import VerifyError
from ndcompile.pass_context import PassContext
from ndcompile.proof.prove import Problem, Proof, pair_around, prove
from ndcompile.proof.use import Twins
from ndcompile.verifier import where

_logger = logging.getLogger("ndcompile.proof")

MODES = ("error", "warn", "off")


def check_mode(verify: str) -> None:
    """Raises ValueError for another mode than MODES."""
    if verify not in MODES:
        raise ValueError(f"verify={verify!r} is unknown. Use one of {MODES}.")


def twins_of(graph: fx.Graph, context: PassContext) -> Twins | None:
    """The nodes of the captured graph, before all passes, with those of the same code without tp; None where there is
    no such graph, or nothing to prove."""
    if context.verify == "off" or context.axis("tp") is None or context.whole_graph is None or context.plan.experts:
        return None
    return pair_around(graph, context.whole_graph(), context.plan)


def check_proof(graph: fx.Graph, context: PassContext, twins: Twins | None) -> Proof | None:
    """Prove the graph along tp. Raises VerifyError for the first problem; with verify="warn" all are logged."""
    axis = context.axis("tp")
    if twins is None or axis is None:
        return None
    proof = prove(graph, twins, context.plan, axis.group, axis.size)
    if proof.problems and context.verify == "error":
        raise VerifyError(explain(proof.problems[0], axis.size))
    for problem in proof.problems:
        _logger.warning("%s", explain(problem, axis.size))
    if not proof.problems:
        _logger.info("%s", proof.summary())
    return proof


def explain(problem: Problem, ranks: int) -> str:
    """Node, module and source line, axis, what each operand is, and the repair."""
    operands = ", ".join(f"{name!r} is {words}" for name, words in problem.operands.items())
    return (
        f"{where(problem.node)} ({problem.node.target}) is not proven over tp={ranks}: {problem.reason}."
        + (f" Its operands: {operands}." if operands else "")
        + f" {problem.repair} If it is right as it is, compile with verify='warn' or 'off'."
    )
