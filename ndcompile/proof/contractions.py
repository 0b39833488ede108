"""Rules for products of matrices: each dim of operands and result has a letter, as in einsum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from ndcompile.proof.fact import INVARIANT, KEEP_WHOLE, PARTIAL, SUM_FIRST, Fact, NotProven, shard_on
from ndcompile.proof.pointwise import drawn
from ndcompile.proof.use import Use, ndim, shape

BATCH = "zyxwvu"


def product(use: Use, operands: Sequence[fx.Node], letters: Sequence[str], result: str) -> Fact:
    """A product of operands with lettered dims. Contracting a sharded dim gives a partial sum.

    Every operand that has the sharded letter must be sharded on it; at most one may be partial.
    """
    partial = [o for o in operands if use.fact(o).kind == "P"]
    shards = [(o, use.fact(o), dims) for o, dims in zip(operands, letters, strict=True) if use.fact(o).kind == "S"]
    if partial:
        if len(partial) > 1 or shards:
            raise NotProven("a partial sum meets what differs between the ranks: products do not sum up", SUM_FIRST)
        return PARTIAL
    found = {(dims[known.dim], known.parts) for _, known, dims in shards if not known.uniform}
    found = found or {(dims[known.dim], known.parts) for _, known, dims in shards}
    if not found:
        return INVARIANT
    if len(found) > 1:
        raise NotProven(
            "its operands are sharded on dims that do not correspond: each rank would have a block of the diagonal",
            KEEP_WHOLE,
        )
    (letter, parts), *_ = found
    for operand, dims in zip(operands, letters, strict=True):
        if letter in dims and use.fact(operand).kind != "S" and shape(operand)[dims.index(letter)] > 1:
            raise NotProven(f"{operand.name!r} is whole where the other operand is a shard", KEEP_WHOLE)
    return shard_on(result.index(letter), parts) if letter in result else PARTIAL


def with_bias(use: Use, known: Fact, bias: Any, channels: int | None = None) -> Fact:
    """The product plus a bias, which every rank adds. channels: the dim of the result that a bias of one dim stands on,
    the last one by default."""
    if not isinstance(bias, fx.Node):
        return known
    added = use.fact(bias)
    if (known.kind == "P") != (added.kind == "P") and not added.zero:
        raise NotProven(
            f"the bias {bias.name!r}, {added.words()}, is added to {known.words()}: it would be counted once a rank",
            "Use the style 'rowwise', which adds the bias behind the sum.",
        )
    dim = added.dim + ndim(use.node) - ndim(bias) if channels is None else channels
    alike = known.kind == "S" and known.dim == dim and (known.parts == added.parts or added.uniform)
    if added.kind == "S" and not alike:
        raise NotProven(f"the bias {bias.name!r} is sharded otherwise than the product", KEEP_WHOLE)
    return known


def linear(use: Use) -> Fact:
    x, weight = use.node.args[:2]
    rows = BATCH[: ndim(x) - 1]  # type: ignore[arg-type]
    known = product(use, [x, weight], [rows + "k", "nk"], rows + "n")  # type: ignore[list-item]
    return with_bias(use, known, use.argument("bias"))


def matmul(use: Use) -> Fact:
    """matmul, bmm, mm, mv, dot: batch dims broadcast."""
    first, second = use.node.args[:2]
    counts = ndim(first), ndim(second)  # type: ignore[arg-type]
    batch = BATCH[: max(counts) - 2] if max(counts) > 2 else ""
    left = (batch[len(batch) - (counts[0] - 2) :] + "mk") if counts[0] > 1 else "k"
    right = (batch[len(batch) - (counts[1] - 2) :] + "kn") if counts[1] > 1 else "k"
    result = batch + "m" * (counts[0] > 1) + "n" * (counts[1] > 1)
    return product(use, [first, second], [left, right], result)  # type: ignore[list-item]


def added_matmul(use: Use) -> Fact:
    """addmm, baddbmm."""
    bias, *factors = use.node.args[:3]
    batch = "z" if ndim(factors[0]) == 3 else ""  # type: ignore[arg-type]
    return with_bias(use, product(use, factors, [batch + "mk", batch + "kn"], batch + "mn"), bias)  # type: ignore[arg-type]


def einsum(use: Use) -> Fact:
    """By its equation; an ellipsis stands for the leading dims."""
    equation, operands = str(use.node.args[0]).replace(" ", ""), use.node.args[1]
    given, _, result = equation.partition("->")
    letters = []
    for dims, operand in zip(given.split(","), operands, strict=True):  # type: ignore[arg-type]
        dots = BATCH.upper()[: ndim(operand) - len(dims.replace("...", ""))] if "..." in dims else ""
        letters.append(dims.replace("...", dots))
    dots = max((letter for letter in letters), key=len) if "..." in result else ""
    whole = result.replace("...", "".join(letter for letter in dots if letter in BATCH.upper()))
    return product(use, list(operands), letters, whole)  # type: ignore[arg-type]


def grouped_matmul(use: Use) -> Fact:
    """Rows in groups, each with the matrix of its expert: (t, k) x (e, k, n), with `offs` the ends of the groups."""
    x, weight = use.node.args[:2]
    return product(use, [x, weight], ["tk", "ekn"], "tn")  # type: ignore[list-item]


def attention(use: Use) -> Fact:
    """scaled_dot_product_attention, by batch and heads; a partial value stays one. Dropout draws from its stream."""
    seed = use.argument("seed")
    return _attention(use) if seed is None else drawn(use, _attention(use), seed)


def _attention(use: Use) -> Fact:
    query, key, value = use.node.args[:3]
    known = [use.fact(operand) for operand in (query, key, value)]
    mask = use.argument("attn_mask") if use.argument("seed") is None else use.argument("mask")
    if any(f.kind == "P" for f in [*known[:2], use.fact(mask)]):
        raise NotProven("softmax is no sum: the scores are partial", SUM_FIRST)
    if known[2].kind == "P" and not any(f.varies for f in [*known[:2], use.fact(mask)]):
        return PARTIAL
    shards = {(f.dim - ndim(o), f.parts) for f, o in zip(known, (query, key, value), strict=True) if f.kind == "S"}  # type: ignore[arg-type]
    if not shards:
        if use.fact(mask).kind == "S":
            raise NotProven("the mask is a shard, query, key and value are not", KEEP_WHOLE)
        return INVARIANT
    (dim, parts), *others = shards
    if others or dim >= -2 or any(f.kind != "S" for f in known):
        raise NotProven("query, key and value must be sharded alike, on heads or batch", KEEP_WHOLE)
    if use.fact(mask).kind == "S" and use.fact(mask).dim - ndim(mask) != dim:
        raise NotProven("the mask is sharded on another dim than the query", KEEP_WHOLE)
    return shard_on(dim + ndim(use.node), parts)


def convolution(use: Use) -> Fact:
    """conv1d and its kin: depthwise by channels, or over whole ones. Channels are dim 1 of the input, 0 of the
    weight."""
    x, weight = use.node.args[:2]
    known, filters = use.fact(x), use.fact(weight)
    groups = use.argument("groups") or 1
    if known.kind == "P" and not filters.varies:
        return with_bias(use, PARTIAL, use.argument("bias"), channels=1)
    if known.kind == "P" or filters.kind == "P":
        raise NotProven("a partial sum meets what differs between the ranks: products do not sum up", SUM_FIRST)
    if known.kind == "S" and known.dim > 1:
        raise NotProven(f"a window along dim {known.dim} reaches into another rank's shard", KEEP_WHOLE)
    if known.kind == "S" and known.dim == 1:
        depthwise = groups == shape(x)[1] and filters.kind == "S" and filters.dim == 0 and filters.parts == known.parts  # type: ignore[arg-type]
        if depthwise:
            return with_bias(use, known, use.argument("bias"), channels=1)
        if groups == 1 and filters.kind == "S" and filters.dim == 1:
            return with_bias(use, PARTIAL, use.argument("bias"), channels=1)
        raise NotProven("it mixes channels of which a rank holds a shard", KEEP_WHOLE)
    if filters.kind == "S" and (filters.dim != 0 or groups != 1 or known.kind == "S"):
        raise NotProven("its filters are sharded otherwise than its input", KEEP_WHOLE)
    cut = shard_on(1, filters.parts) if filters.kind == "S" else known
    return with_bias(use, cut, use.argument("bias"), channels=1)
