"""Rules for operators that move elements: views, transpositions, concatenations, slices, lookups."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import fx

from ndcompile.proof.fact import INVARIANT, KEEP_WHOLE, OWN, PARTIAL, SUM_FIRST, Fact, NotProven, shard_on
from ndcompile.proof.pointwise import aligned, name_of
from ndcompile.proof.use import Use, ndim, shape
from ndcompile.verify.sharded_dims import READS_ALONG


def viewed(use: Use) -> Fact:
    """A shard is a contiguous piece of each part; the view's dim that it falls into must be cut in the same places."""
    source: Any = use.node.args[0]
    known = use.fact(source)
    if known.kind != "S":
        return _spread(use, known)
    before, after = use.whole_shape(source), _whole_result(use, source)
    if after is None:
        return known
    pieces = prod(before[: known.dim]) * known.parts
    outer = 1
    for dim, size in enumerate(after):
        if outer * size > pieces:
            parts, rest = divmod(pieces, outer)
            if rest or size % parts:
                break
            return Fact("S", dim, parts, uniform=known.uniform, zero=known.zero)
        outer *= size
    raise NotProven(f"the view of {before} as {after} moves parts of a shard to other ranks", KEEP_WHOLE)


def expanded(use: Use) -> Fact:
    """expand and repeat: along a dim of one element every rank may take its share of equal copies."""
    source: Any = use.node.args[0]
    known = use.fact(source)
    offset = ndim(use.node) - ndim(source)
    if known.kind != "S":
        if use.cut is None or known.kind not in ("I", "R"):
            return known
        size = shape(source)[use.cut - offset] if use.cut >= offset else 1
        return shard_on(use.cut) if size == 1 else _spread(use, known)
    dim = known.dim + offset
    times = use.argument("repeats")
    repeated = times[dim] if isinstance(times, list | tuple) else 1
    return Fact("S", dim, known.parts * repeated, uniform=known.uniform, zero=known.zero)


def interleaved(use: Use) -> Fact:
    """repeat_interleave of a number of times: every element stands beside its copies."""
    source: Any = use.node.args[0]
    known, over_all = use.fact(source), use.argument("dim") is None and ndim(source) > 1
    if known.kind == OWN or (known.kind == "S" and over_all):
        raise NotProven("it repeats a value that differs between the ranks over all its dims", KEEP_WHOLE)
    return known


def permuted(use: Use) -> Fact:
    """transpose, permute, unsqueeze, squeeze: the sharded dim moves."""
    source: Any = use.node.args[0]
    known = use.fact(source)
    if known.kind != "S":
        return known
    count, name = ndim(source), name_of(use)
    dim: Any
    if name in ("t", "numpy_T"):
        dim = count - 1 - known.dim
    elif name in ("transpose", "swapaxes", "swapdims", "mT"):
        swapped: Any = (-2, -1) if name == "mT" else use.node.args[1:3]
        first, second = (a % count for a in swapped)
        dim = {first: second, second: first}.get(known.dim, known.dim)
    elif name == "permute":
        dim = [d % count for d in use.argument("dims")].index(known.dim)
    elif name == "unsqueeze":
        new = use.argument("dim") % (count + 1)
        dim = known.dim + (new <= known.dim)
    else:
        given = use.argument("dim")
        listed = range(count) if given is None else [given] if isinstance(given, int) else given
        gone = {d % count for d in listed if use.whole_shape(source)[d] == 1}
        dim = known.dim - sum(d < known.dim for d in gone)
    return Fact("S", dim, known.parts, uniform=known.uniform, zero=known.zero)


def concatenated(use: Use) -> Fact:
    """cat and stack: of shards on another dim a shard; along the sharded dim, of equal sizes, one in several parts."""
    given: Any = use.node.args[0]
    sources = [source for source in given if shape(source) != (0,)]  # an empty cache, to which cat adds the first keys
    stacks = name_of(use) == "stack"
    dim = (use.argument("dim") or 0) % ndim(use.node)
    known = [use.fact(source) for source in sources]
    if any(fact.kind == "P" for fact in known):
        if any(fact.kind != "P" and not fact.zero for fact in known):
            raise NotProven("a partial sum stands beside values that are none", SUM_FIRST)
        return PARTIAL
    shards = {(f.dim + (stacks and dim <= f.dim), f.parts) for f in known if f.kind == "S" and not f.uniform}
    if not shards:
        return aligned(use, sources)
    if len(shards) > 1 or any(f.kind != "S" for f in known):
        raise NotProven("it joins shards with values that are sharded otherwise, or not at all", KEEP_WHOLE)
    (found, parts), *_ = shards
    if found == dim and not stacks:
        if len({shape(source)[dim] for source in sources}) > 1:
            raise NotProven("it joins shards of different sizes along the sharded dim", KEEP_WHOLE)
        parts *= len(sources)
    return shard_on(found, parts)


def taken_apart(use: Use) -> Fact:
    """chunk, split, slice: along another dim than the sharded one, or between the parts of a packed shard."""
    source: Any = use.node.args[0]
    known = use.fact(source)
    if known.kind != "S":
        return known
    if known.dim not in READS_ALONG[use.node.target](use.node, ndim(source)) or known.uniform:
        return known
    size, step = shape(source)[known.dim], use.argument("step")
    taken = (
        [value.shape[known.dim] for value in use.node.meta["val"]] if _several(use) else [shape(use.node)[known.dim]]
    )
    start = use.argument("start") or 0
    unit = size // known.parts
    if not (step or 1) > 1 and known.parts > 1 and all(t % unit == 0 for t in taken) and start % unit == 0:
        parts = {t // unit for t in taken}
        if len(parts) == 1:
            return shard_on(known.dim, parts.pop())
    raise NotProven(
        f"the parts of a shard along dim {known.dim} are no shards of the parts",
        "Give the fused projection before it the style 'packed_colwise' (two parts) or 'colwise_gather_output' in "
        "tp_plan.",
    )


def stepped(use: Use) -> Fact:
    """slice: with a step every rank takes every other of its elements, which needs a multiple of it."""
    source: Any = use.node.args[0]
    known, step = use.fact(source), use.argument("step")
    if known.kind == "S" and step > 1 and known.dim == use.argument("dim") % ndim(source):
        everything = use.argument("end") is None or use.argument("end") >= shape(source)[known.dim]
        if shape(source)[known.dim] // known.parts % step or not everything:
            raise NotProven(f"steps of {step} do not fit a shard of {shape(source)[known.dim]}", KEEP_WHOLE)
        return known
    return taken_apart(use)


def gathered(use: Use) -> Fact:
    """gather, index_select, select: along a dim that is whole, by an index that is the same, or sharded alike."""
    source: Any = use.node.args[0]
    known = use.fact(source)
    index = use.argument("index")
    if use.fact(index).kind == "P":
        raise NotProven("an index is no partial sum", SUM_FIRST)
    if known.kind == "P":
        if use.fact(index).varies:
            raise NotProven("each rank takes other elements of a partial sum", SUM_FIRST)
        return PARTIAL
    dim = use.argument("dim") % ndim(source)
    if known.kind == "S" and known.dim == dim:
        raise NotProven(f"it takes elements along dim {dim}, of which a rank holds a shard", KEEP_WHOLE)
    if name_of(use) == "select":
        return known if known.kind != "S" else shard_on(known.dim - (dim < known.dim), known.parts)
    return aligned(use, [s for s in (source, index) if isinstance(s, fx.Node) and ndim(s) == ndim(use.node)])


def indexed(use: Use) -> Fact:
    """index: the sharded dim must be one that is not indexed."""
    source, indices = use.node.args[:2]
    known, found = use.fact(source), [use.fact(i) for i in indices]  # type: ignore[union-attr]
    if known.kind == "P" and not any(f.varies for f in found):
        return PARTIAL
    if any(f.kind == "P" for f in [known, *found]):
        raise NotProven("each rank takes other elements of a partial sum", SUM_FIRST)
    at = [number for number, index in enumerate(indices) if index is not None]  # type: ignore[arg-type]
    varying = [f for f in found if f.kind == "S"]
    if known.kind == "S":
        if known.dim in at or varying:
            raise NotProven(f"it takes elements along dim {known.dim}, of which a rank holds a shard", KEEP_WHOLE)
        joined = at == list(range(at[0], at[-1] + 1))
        new = max(ndim(i) for i in indices if i is not None)  # type: ignore[union-attr,arg-type]
        moved = known.dim - len(at) + new if not joined or known.dim > at[-1] else known.dim
        return shard_on(moved + sum(number > known.dim for number in at if not joined), known.parts)
    return INVARIANT if not varying else shard_on(use.cut if use.cut is not None else varying[0].dim, varying[0].parts)


def scattered(use: Use) -> Fact:
    """index_add, index_put, scatter: into zeros a partial sum stays one; a shard's own dim is not indexed."""
    target: Any = use.node.args[0]
    dim, indices = use.argument("dim"), use.argument("indices")
    along = {dim % ndim(target)} if isinstance(dim, int) else {n for n, i in enumerate(indices or ()) if i is not None}
    values = [use.argument(name) for name in ("source", "values", "src", "tensor")]
    sources = [v for v in values if isinstance(v, fx.Node)]
    index = [i for i in use.operands if i is not target and i not in sources]
    known = use.fact(target)
    if any(use.fact(i).varies and use.fact(i).kind != "S" for i in index):
        raise NotProven("each rank writes elsewhere", KEEP_WHOLE)
    if any(use.fact(s).kind == "P" for s in [target, *sources]):
        if any(use.fact(s).kind != "P" and not use.fact(s).zero for s in [target, *sources]) or any(
            use.fact(i).varies for i in index
        ):
            raise NotProven("a partial sum is written into a value that is none", SUM_FIRST)
        return PARTIAL
    shards = [use.fact(s) for s in [target, *sources] if use.fact(s).kind == "S"]
    if not shards:
        return INVARIANT
    if known.kind != "S" or known.dim in along or any(f.dim != known.dim and not f.uniform for f in shards):
        raise NotProven(f"it writes along dims {sorted(along)} of a shard, or shards into a whole value", KEEP_WHOLE)
    return shard_on(known.dim, known.parts)


def padded(use: Use) -> Fact:
    """constant_pad_nd: not along the sharded dim; zeros beside a partial sum."""
    source: Any = use.node.args[0]
    known, pad = use.fact(source), use.argument("pad")
    if known.kind == "P" and use.argument("value") not in (None, 0):
        raise NotProven("the padding of a partial sum would be counted once a rank", SUM_FIRST)
    if known.kind == "S":
        last = ndim(source) - 1 - known.dim
        if any(size != 0 for size in pad[2 * last : 2 * last + 2]):
            raise NotProven(f"it pads a shard along dim {known.dim}", KEEP_WHOLE)
    return known if known.kind in ("S", "P") else INVARIANT


def triangular(use: Use) -> Fact:
    """tril and triu read positions in the last two dims."""
    source: Any = use.node.args[0]
    known = use.fact(source)
    if known.kind == "S" and known.dim >= ndim(source) - 2:
        raise NotProven(f"it reads positions along dim {known.dim}, of which a rank holds a shard", KEEP_WHOLE)
    return known


def complex_parts(use: Use) -> Fact:
    """view_as_complex and view_as_real: the last dim holds the two parts."""
    source: Any = use.node.args[0]
    known = use.fact(source)
    if known.kind == "S" and name_of(use) == "view_as_complex" and known.dim == ndim(source) - 1:
        raise NotProven("a complex number's parts are on two ranks", KEEP_WHOLE)
    return known


def _spread(use: Use, known: Fact) -> Fact:
    """A value that is no shard, in a shape that is one: every rank would take the same part."""
    if use.cut is not None and known.kind in ("I", "R"):
        if known.uniform:
            return Fact("S", use.cut, uniform=True, zero=known.zero)
        raise NotProven(
            f"its dim {use.cut} is a rank's share, but no operand is a shard: every rank would take the same part",
            KEEP_WHOLE,
        )
    return known


def _whole_result(use: Use, source: fx.Node) -> tuple[int, ...] | None:
    """The shape of the view without tp; None for an unpaired node of the same shape."""
    if use.paired:
        return use.whole_shape(use.node)
    return None if shape(use.node) == shape(source) else ()


def _several(use: Use) -> bool:
    return isinstance(use.node.meta["val"], list | tuple)
