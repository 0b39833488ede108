"""Rules for nodes that move values between the ranks, and for the rank's index and what is looked up by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ndcompile.operators.redistribute import pair, shard_dim
from ndcompile.proof.contractions import attention
from ndcompile.proof.fact import EXCHANGED, INVARIANT, OWN, PARTIAL, REPLICATED, Fact, NotProven, shard_on
from ndcompile.proof.pointwise import dropped_out, name_of
from ndcompile.proof.use import Use, ndim, shape
from ndcompile.verify.type_inference import written_arguments

LOOKUP = "A value that is looked up by the rank's own rows needs the style 'embedding_rowwise' in tp_plan."


def moved(use: Use) -> Fact:
    """A redistribution takes what it says it takes: anything else is summed twice, or not summed at all."""
    source: Any = use.node.args[0]
    known = use.fact(source)
    src, dst = pair(use.node)
    dim = shard_dim(src) % ndim(source) if src.startswith("S") else 0
    if known.kind == EXCHANGED and src != "I":  # whose tokens: see `exchange`
        return INVARIANT if dst == "I" else Fact(EXCHANGED)
    # without a gradient R and I are the same
    fits = known.kind == src[0] or (src == "I" and known.kind == "R" and not source.meta["differentiable"])
    if not fits or (src.startswith("S") and (known.dim != dim or known.parts != 1)):
        raise NotProven(
            f"it goes from {src} to {dst}: it takes {EXPECTED[src[0]].format(dim=dim)}, but is given {known.words()}",
            "A reduction is done twice, or one before it is missing: compare the styles around it in tp_plan.",
        )
    if dst.startswith("S"):
        return shard_on(shard_dim(dst) % ndim(source))
    kind = REPLICATED if dst == "R" and use.node.meta["differentiable"] else INVARIANT
    return replace(kind, scale=known.scale)


EXPECTED = {
    "I": "a value that is the same on all ranks",
    "R": "one whose gradient is summed",
    "P": "a partial sum",
    "S": "a shard on dim {dim}",
}


def own(use: Use) -> Fact | None:
    """What follows from the rank's index: looking up the rows that a rank has. None where no operand is of it.

    offset = index x rows; row = ids - offset; inside = (row >= 0) & (row < rows); the rows found count only inside.
    """
    operands = [use.fact(source) for source in use.operands]
    roles = [known.role for known in operands if known.kind == OWN]
    if not roles:
        return None
    rule = OWN_RULES.get(name_of(use))
    found = (rule(use, operands) if rule is not None else None) or _of_each_row(use, operands)
    if found is None:
        raise NotProven(f"it uses this rank's {', '.join(sorted(set(roles)))} in a way that no rule knows", LOOKUP)
    return found


def _offset(use: Use, operands: list[Fact]) -> Fact | None:
    number = use.node.args[1]
    if operands[0].role == "coordinate" and isinstance(number, int):
        return Fact(OWN, role="offset", rows=number)
    return _scaled_rows(use, operands)


def _scaled_rows(use: Use, operands: list[Fact]) -> Fact | None:
    rows = [known for known in operands if known.role == "rows"]
    others = [known for known in operands if known.role != "rows"]
    return rows[0] if len(rows) == 1 and all(known.kind in "IR" for known in others) else None


def _index(use: Use, operands: list[Fact]) -> Fact | None:
    if len(operands) == 2 and operands[0].kind in "IR" and operands[1].role == "offset":
        return Fact(OWN, role="index", rows=operands[1].rows)
    return None


def _bound(use: Use, operands: list[Fact]) -> Fact | None:
    number = use.node.args[1]
    if operands[0].role == "index" and number == (0 if name_of(use) == "ge" else operands[0].rows):
        return Fact(OWN, role="mask", rows=operands[0].rows, bounds=frozenset([name_of(use)]))
    return None


def _both(use: Use, operands: list[Fact]) -> Fact | None:
    if all(known.role == "mask" for known in operands):
        return replace(operands[0], bounds=frozenset().union(*(known.bounds for known in operands)))
    return None


def _inside(use: Use, operands: list[Fact]) -> Fact | None:
    """where(inside, row, 0) and where(inside, rows, 0); where(padding, rows, rows)."""
    mask, value, other = (use.fact(argument) for argument in use.node.args[:3])
    if mask.kind in "IR" and value.role == other.role == "rows":
        return value
    if mask.role != "mask" or mask.bounds != {"ge", "lt"} or use.node.args[2] != 0:
        return None
    if value.role == "index":
        return replace(value, role="row")
    return PARTIAL if value.role == "rows" else None


def _rows(use: Use, operands: list[Fact]) -> Fact | None:
    weight, ids = use.node.args[:2]
    table, row = use.fact(weight), use.fact(ids)
    rows: Any = weight
    fits = table.kind == "S" and table.dim == 0 and table.parts == 1 and row.rows == shape(rows)[0]
    return Fact(OWN, role="rows", rows=row.rows) if fits and row.role == "row" else None


def _of_each_row(use: Use, operands: list[Fact]) -> Fact | None:
    """A norm of what was looked up is that of each row by itself: elements of rows with what all ranks have, and
    statistics along the last dim, which stays."""
    rows = [source for source, known in zip(use.operands, operands, strict=True) if known.role == "rows"]
    others = [known for known in operands if known.role != "rows"]
    if not rows or any(known.kind not in "IR" for known in others):
        return None
    first: Any = rows[0]
    if any(shape(node)[:-1] != shape(first)[:-1] for node in (*rows, use.node)):
        return None
    tags = getattr(use.node.target, "tags", ())
    elementwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    elementwise = elementwise and not written_arguments(use.node)
    return use.fact(first) if elementwise or (rows == use.operands and _along_last(use)) else None


def _along_last(use: Use) -> bool:
    """Whether a statistic is taken along the last dim alone, which it keeps. (Without keepdim a shape is shorter.)"""
    dims: Any = use.argument("dim") if name_of(use) in ("mean", "sum", "amax", "var", "std") else None
    last = ndim(use.operands[0]) - 1
    return dims is not None and [dim % (last + 1) for dim in ([dims] if isinstance(dims, int) else dims)] == [last]


def _kept(use: Use, operands: list[Fact]) -> Fact | None:
    return use.fact(use.node.args[0]) if len(operands) == 1 else None


def _stream(use: Use, operands: list[Fact]) -> Fact | None:
    """seeds[0] is shared by the ranks, seeds[1] is this rank's own."""
    _, dim, number = use.node.args
    if operands[0].role != "seeds" or dim != 0:
        return None
    return Fact(OWN, role="stream") if number == 1 else INVARIANT


def _loss_of_shards(use: Use, operands: list[Fact]) -> Fact | None:
    """vocabulary_loss with a coordinate: each rank sums the losses of the labels that its rows hold."""
    hidden, weight, bias, labels = (use.fact(use.argument(name)) for name in ("hidden", "weight", "bias", "labels"))
    rows = use.whole_shape(use.argument("weight"))[0]
    shards = [weight, bias] if use.argument("bias") is not None else [weight]
    cut = all((known.kind, known.dim, known.parts) == ("S", 0, 1) for known in shards)
    return PARTIAL if cut and {hidden.kind, labels.kind} <= {"I", "R"} and use.argument("full") == rows else None


OWN_RULES = {
    "mul": _offset,
    "div": _scaled_rows,
    "sub": _index,
    "ge": _bound,
    "lt": _bound,
    "__and__": _both,
    "bitwise_and": _both,
    "where": _inside,
    "embedding": _rows,
    "select": _stream,
    "dropout": lambda use, operands: dropped_out(use),
    "attention_with_dropout": lambda use, operands: attention(use),
    "vocabulary_loss": _loss_of_shards,
    **dict.fromkeys(["unsqueeze", "detach", "to", "alias"], _kept),
}
"""Name of an operator -> what follows if an operand depends on the rank's index."""


def looked_up(use: Use) -> Fact:
    """embedding: columns may be sharded; rows only with an index of this rank's rows, which `own` follows."""
    weight, ids = use.node.args[:2]
    table, index = use.fact(weight), use.fact(ids)
    if table.kind == "S" and table.dim == 0:
        raise NotProven("it looks up ids of the whole vocabulary in this rank's rows", LOOKUP)
    if table.kind == "P" or index.kind == "P" or (table.kind == "S" and index.kind == "S"):
        raise NotProven("table or ids differ between the ranks", LOOKUP)
    if table.kind == "S":
        return shard_on(ndim(use.node) - 1, table.parts)
    return shard_on(index.dim, index.parts) if index.kind == "S" else INVARIANT
