"""Branches on data of which one arm only raises: `assert cond`, `if cond: raise ...`. They are checks, not choices.

A trace goes on with the arm that does not raise, and the graph checks the condition at every call. Which branches these
are is read from the source of the line that asks for the truth of a value.
"""

from __future__ import annotations

import ast
import dis
import linecache
import sys
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch import fx

PASSED_OVER = ("torch", "torch._", "torch.fx.", "torch.overrides", "torch.utils.", "torch.nn.functional", "ndcompile.")
"""Modules between the line that branches and the symbolic value: `torch.` itself, those below a prefix that ends so."""

CHECK = torch.ops.aten._assert_scalar.default
"""What checks a condition in a graph."""

SUMMARIES = {("bool", True), ("bool", False), ("all", True), ("any", False)}
"""Calls that ask for the truth of each operand, and the truth that they all must have for theirs to be it."""


def failed_check(graph: fx.Graph, error: Exception) -> str | None:
    """The message of the check that `error` is about, if it is. Inductor raises the condition alone, in symbols."""
    for node in graph.find_nodes(op="call_function", target=CHECK):
        condition: Any = node.args[0]
        if str(error) == str(condition.meta["val"].node.expr):
            return str(node.args[1])
    return None


def asserted_truth() -> tuple[bool, str] | None:
    """What the value whose truth is asked for has to be, and the file and line; None where the branch is a choice.

    To be called below the `__bool__` of a symbolic value.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _passed_over(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    if frame is None:
        return None
    file, line = frame.f_code.co_filename, frame.f_lineno
    truth = _truth_at(frame)
    return None if truth is None else (truth, f"{file}:{line}: {linecache.getline(file, line).strip()}")


def _passed_over(name: str) -> bool:
    return any(name == known or (known.endswith((".", "_")) and name.startswith(known)) for known in PASSED_OVER)


def _truth_at(frame: FrameType) -> bool | None:
    place, called = _asked_for(frame)
    for condition, truth in _conditions(frame.f_code.co_filename):
        for node, required in _leaves(condition, truth):
            if place == (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset):
                return required if not called or _summary(node, required) else None
    return None


def _asked_for(frame: FrameType) -> tuple[tuple[int | None, ...] | None, bool]:
    """Where the expression stands whose truth a frame asks for now, and whether a call asks for it.

    A jump asks for the truth of what the instruction before it left; jumps themselves have no places of their own.
    """
    before = None
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset == frame.f_lasti:
            called = "CALL" in instruction.opname
            asks = called or any(part in instruction.opname for part in ("JUMP", "BOOL"))
            found = instruction if called else before
            place = found.positions if found is not None and asks else None
            return (None if place is None else tuple(place[:4])), called
        before = instruction
    return None, False


def _leaves(node: ast.expr, truth: bool | None) -> list[tuple[ast.expr, bool | None]]:
    """The parts of a condition whose truth is asked for, with what it must be so that the whole one is `truth`; None
    where that depends on other parts."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _leaves(node.operand, None if truth is None else not truth)
    if isinstance(node, ast.BoolOp):
        fixed = truth is not None and truth == isinstance(node.op, ast.And)
        return [leaf for value in node.values for leaf in _leaves(value, truth if fixed else None)]
    if isinstance(node, ast.Compare) and len(node.ops) > 1:  # each comparison is asked
        return [(node, truth if truth else None)]
    return [(node, truth)]


def _summary(node: ast.expr, required: bool | None) -> bool:
    name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
    return (name, required) in SUMMARIES


@lru_cache(maxsize=64)
def _conditions(file: str) -> tuple[tuple[ast.expr, bool], ...]:
    """The conditions in a file that must be true, or must not, for the code behind them to run."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    found: list[tuple[ast.expr, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.append((node.test, True))
        elif isinstance(node, ast.If) and _raises(node.body):
            found.append((node.test, False))
        elif isinstance(node, ast.If) and _raises(node.orelse):
            found.append((node.test, True))
    return tuple(found)


def _raises(body: list[ast.stmt]) -> bool:
    """Whether statements only raise; a call before that makes the message, or warns."""
    return (
        bool(body)
        and isinstance(body[-1], ast.Raise)
        and all(isinstance(statement, ast.Raise | ast.Assign | ast.Expr) for statement in body)
    )
