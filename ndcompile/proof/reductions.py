"""Rules for operators that read along a dim: sums, statistics, orders."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from ndcompile.proof.fact import INVARIANT, PARTIAL, Fact, NotProven, shard_on
from ndcompile.proof.pointwise import aligned, name_of, refuse_partial
from ndcompile.proof.use import Use, ndim

GATHER_FIRST = (
    "Gather before it ('colwise_gather_output'), and let the projection behind it take its part of a whole input "
    "('rowwise_split_input') in tp_plan."
)


def summed(use: Use) -> Fact:
    """The sum over a sharded dim is partial."""
    return _reduced(use, INVARIANT, PARTIAL)


def averaged(use: Use) -> Fact:
    """The mean over a sharded dim is the shard's own; as `reduce_statistics` makes it, a partial sum of tp means."""
    known = use.fact(use.node.args[0])
    if known.kind == "S" and known.dim in along(use) and use.paired:
        raise NotProven(
            f"it averages over dim {known.dim}, of which a rank holds a shard", "Keep 'reduce_statistics' enabled."
        )
    return _reduced(use, INVARIANT, Fact("P", scale=Fraction(use.ranks)))


def read_along(use: Use) -> Fact:
    """What depends on order or on all values along a dim needs the dim whole."""
    refuse_partial(use, use.operands, f"of a partial sum no rank can compute {name_of(use)} alone")
    if use.argument("other") is not None:  # max and min of two tensors
        return aligned(use, use.operands)
    return _reduced(use, INVARIANT, None)


def unbound(use: Use) -> Fact:
    """unbind: the parts lose the dim."""
    return _reduced(use, INVARIANT, None)


def normalized(use: Use) -> Fact:
    """layer_norm, rms_norm: over the last dims, which must be whole."""
    refuse_partial(use, use.operands, f"of a partial sum no rank can compute {name_of(use)} alone")
    known = use.fact(use.node.args[0])
    if known.kind == "S" and known.dim in along(use):
        raise NotProven(f"it reads along dim {known.dim}, of which a rank holds a shard", GATHER_FIRST)
    return known


def along(use: Use) -> set[int]:
    """The dims of the first operand that the operator reads along."""
    source: Any = use.node.args[0]
    count = ndim(source)
    if (shape := use.argument("normalized_shape")) is not None:
        return set(range(count - len(shape), count))
    name = name_of(use)
    if name in ("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss_forward"):
        return {min(1, count - 1)}
    given = next((d for d in map(use.argument, ("dim", "dims")) if d is not None), None)
    listed = given if isinstance(given, list | tuple) else [] if given is None else [given]
    return {dim % count for dim in listed} or set(range(count))


def _reduced(use: Use, whole: Fact, over_shard: Fact | None) -> Fact:
    """What is left of a shard: the renumbered dim, or `over_shard` where it was reduced; None refuses that."""
    source: Any = use.node.args[0]
    known, dims = use.fact(source), along(use)
    if known.kind != "S":
        return known if known.kind == "P" else whole
    if known.dim in dims:
        if over_shard is None:
            raise NotProven(f"it reads along dim {known.dim}, of which a rank holds a shard", GATHER_FIRST)
        return over_shard
    kept = ndim(use.node) == ndim(source)
    return shard_on(known.dim if kept else known.dim - sum(dim < known.dim for dim in dims), known.parts)


def own_loss(use: Use) -> Fact:
    """cross_entropy_loss: over whole classes; the mean over sharded tokens would be the shard's own."""
    refuse_partial(use, use.operands, "the loss of a partial sum is no partial loss")
    for source in use.of_kind("S"):
        raise NotProven(
            f"it reads {source.name!r}, of which a rank holds a shard on dim {use.fact(source).dim}", GATHER_FIRST
        )
    return INVARIANT
