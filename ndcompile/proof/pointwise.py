"""Rules for operators that compute each element of the result from one element of each operand."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from torch import fx

from ndcompile.proof.fact import INVARIANT, KEEP_WHOLE, PARTIAL, SUM_FIRST, Fact, NotProven, shard_on
from ndcompile.proof.use import Use, ndim


def pointwise(use: Use) -> Fact:
    """Shards meet shards of the same dim; a partial sum may not go through a function that is not linear."""
    refuse_partial(use, use.operands, f"of a partial sum no rank can compute {name_of(use)} alone")
    return aligned(use, use.operands)


def same_value(use: Use) -> Fact:
    """The operand itself, in another dtype or copied."""
    return use.fact(use.node.args[0])


def added(use: Use) -> Fact:
    """Partial sums may be added to each other; what every rank adds would be counted once a rank."""
    if not use.of_kind("P"):
        return pointwise(use)
    whole = [a for a in use.node.args[:2] if use.fact(a).kind != "P" and not _is_zero(use, a)]
    if whole:
        raise NotProven(
            f"{_spell(use, whole[0])} is added to a partial sum: it would be counted once a rank", SUM_FIRST
        )
    return PARTIAL


def multiplied(use: Use) -> Fact:
    """A partial sum times what is the same everywhere is partial. A constant 1/tp makes a partial sum of a whole."""
    first, other = use.node.args[:2]
    if (scaled := _scaled(use, first, other)) is not None:
        return scaled
    partial = use.of_kind("P")
    if not partial:
        return pointwise(use)
    divides = name_of(use).startswith(("div", "true_divide")) and use.fact(other).kind == "P"
    if divides or use.fact(first).kind == use.fact(other).kind or use.of_kind("S"):
        raise NotProven("a partial sum meets what differs between the ranks: products do not sum up", SUM_FIRST)
    return PARTIAL


def chosen(use: Use) -> Fact:
    """where: of two partial sums, or of one and zero, by a condition that is the same everywhere."""
    if not use.of_kind("P"):
        return pointwise(use)
    condition, *values = use.node.args[:3]
    if use.fact(condition).varies or any(use.fact(v).kind != "P" and not _is_zero(use, v) for v in values):
        raise NotProven("it chooses between a partial sum and another value than zero", SUM_FIRST)
    return PARTIAL


def filled(use: Use) -> Fact:
    """masked_fill."""
    if use.of_kind("P") and (use.argument("value") != 0 or use.fact(use.argument("mask")).varies):
        raise NotProven("it replaces elements of a partial sum: the value would be counted once a rank", SUM_FIRST)
    return PARTIAL if use.of_kind("P") else aligned(use, use.operands)


def fresh(use: Use) -> Fact:
    """A tensor of one number: any part of it is like any other."""
    zero = any(word in name_of(use) for word in ("zeros", "empty", "zero_"))
    if use.cut is None:
        return Fact("I", uniform=True, zero=zero)
    return Fact("S", use.cut, uniform=True, zero=zero)


def copied(use: Use) -> Fact:
    """copy_: the value of the source, in the shape of the target."""
    source: Any = use.node.args[1]
    target: Any = use.node.args[0]
    known = use.fact(source)
    if known.kind == "P" or not isinstance(source, fx.Node):
        return known
    if known.kind != "S" and use.fact(target).kind == "S":
        return shard_on(use.fact(target).dim, use.fact(target).parts)
    return aligned(use, [source])


def dropped_out(use: Use) -> Fact:
    """Dropout: seed_random_ops gives a value that varies the rank's own stream, any other the shared one."""
    known, seed = use.fact(use.node.args[0]), use.argument("seed")
    if known.kind == "P" and (use.argument("train") or seed is not None):
        raise NotProven("each rank would drop other elements of a partial sum", SUM_FIRST)
    return known if seed is None else drawn(use, known, seed)


def drawn(use: Use, known: Fact, seed: Any) -> Fact:
    """What is alike on all ranks draws from the shared stream, what varies from the rank's own."""
    if known.varies != (use.fact(seed).role == "stream"):
        kind, stream = ("differs between", "the shared") if known.varies else ("is the same on", "a rank's own")
        raise NotProven(
            f"it {kind} the ranks, but draws from {stream} stream", "The pass 'seed_random_ops' chooses it."
        )
    return known


def aligned(use: Use, operands: Iterable[fx.Node]) -> Fact:
    """The shard that broadcasting the operands gives. Raises NotProven for shards of different dims."""
    result: Fact | None = None
    for source in operands:
        known = use.fact(source)
        if known.kind != "S":
            continue
        moved = shard_on(known.dim + ndim(use.node) - ndim(source), known.parts)
        if known.uniform:
            result = result or moved
        elif result is None or result == moved:
            result = moved
        else:
            raise NotProven(
                f"a shard on dim {result.dim} in {result.parts} parts meets one on dim {moved.dim} in {moved.parts}",
                KEEP_WHOLE,
            )
    return result or INVARIANT


def refuse_partial(use: Use, operands: Iterable[fx.Node], reason: str) -> None:
    if any(use.fact(source).kind == "P" for source in operands):
        raise NotProven(reason, SUM_FIRST)


def name_of(use: Use) -> str:
    """Name of the operator without its namespace; in-place forms end in "_"."""
    target: Any = use.node.target
    return target._schema.name.partition("::")[2] if hasattr(target, "_schema") else getattr(target, "__name__", "")


def _is_zero(use: Use, operand: Any) -> bool:
    return operand == 0 if not isinstance(operand, fx.Node) else use.fact(operand).zero


def _spell(use: Use, operand: Any) -> str:
    return (
        f"{operand.name!r}, {use.fact(operand).words()}," if isinstance(operand, fx.Node) else f"the number {operand}"
    )


def _scaled(use: Use, source: Any, number: Any) -> Fact | None:
    """Constants that undo or make a factor of tp; None where the product has no such part."""
    known = use.fact(source)
    if isinstance(number, fx.Node) or not isinstance(source, fx.Node):
        return None
    divides = name_of(use).startswith("div")
    if known.scale != 1 and not use.paired and divides and number == known.scale:
        return Fact(known.kind)
    if not use.paired or known.kind not in ("I", "R"):
        return None
    whole: Any = use.twins[use.node].args[1]
    if number == whole or isinstance(whole, fx.Node) or not whole:
        return None
    ratio = Fraction(number) / Fraction(whole)
    return PARTIAL if (1 / ratio if divides else ratio) == Fraction(1, use.ranks) else None
