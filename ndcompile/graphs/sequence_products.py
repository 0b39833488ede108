"""Matrix products next to an all-gather or a reduce-scatter of the sequence, in a lowered graph.

What `redistribute` lowers to, with what AOTAutograd and inductor leave of it:

    whole = [cast]([slice](cat(split(wait(all_gather(shard))), dim)))
    y = reshape(mm(reshape(whole), weight))                                    a Gather, with all such products

    x = [cast](reshape(mm(reshape(a), v)) + reshape(mm(reshape(b), w)) + ...)
    wait(reduce_scatter(cat(split([pad](x), dim))))                             a Scatter, of the sum of its products

Only with sizes that are numbers: what computes symbolic ones reads the collectives' results as well. Inductor's
`micro_pipeline_tp_pass` finds a part of these: it knows neither sums, nor padding, nor casts, nor biases.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ndcompile.graphs.collective_chains import GATHER, WAIT

aten = torch.ops.aten

REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
CAST = torch.ops.prims.convert_element_type.default
RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


@dataclass(frozen=True, eq=False)
class Product:
    """`node` is mm(rows, weight), or addmm(bias, rows, weight), of rows = reshape(tokens)."""

    node: fx.Node
    rows: fx.Node
    weight: fx.Node
    bias: fx.Node | None = None


@dataclass(frozen=True, eq=False)
class Gather:
    """An all-gather of `dim` and the products of its result.

    whole: the result as the products read it. trim: the arguments of the slice that drops padding. dtype: what the
    result is cast to before anything reads it.
    """

    start: fx.Node
    dim: int
    whole: fx.Node
    trim: tuple[Any, ...] | None
    dtype: torch.dtype | None
    products: tuple[Product, ...]


@dataclass(frozen=True, eq=False)
class Scatter:
    """A reduce-scatter of `dim`, and the products whose sum it reduces.

    padding: the arguments of the pad in front of it. dtype: what the sum is cast to before it is reduced.
    """

    start: fx.Node
    wait: fx.Node
    dim: int
    summed: fx.Node
    padding: tuple[Any, ...] | None
    dtype: torch.dtype | None
    products: tuple[Product, ...]


def gathers(graph: fx.Graph, group: str) -> Iterator[Gather]:
    """All-gathers over `group` with at least one product that can start with a part of the result."""
    position = {node: number for number, node in enumerate(graph.nodes)}
    for cat in list(graph.find_nodes(op="call_function", target=aten.cat.default)):
        source, dim = _pieces(cat)
        if source is None or dim != 0 or source.target is not WAIT or (start := given(source)[0]).target is not GATHER:
            continue
        if not is_static(start):
            continue
        whole, trim, dtype = cat, None, None
        user = _only_user(whole)
        if user is not None and user.target is aten.slice.Tensor and given(user)[1:3] == (_dim(cat), 0):
            whole, trim = user, given(user)[1:]
        if (user := _only_user(whole)) is not None and user.target is CAST:
            whole, dtype = user, given(user)[1]
        products = tuple(_products_of(whole, position[start], position))
        if products and given(start)[2] == group and _only_user(start) is source and _dim(cat) > 0:
            yield Gather(start, _dim(cat), whole, trim, dtype, products)


def scatters(graph: fx.Graph, group: str) -> Iterator[Scatter]:
    """Reduce-scatters over `group` of a sum of products that nothing else reads."""
    for start in list(graph.find_nodes(op="call_function", target=REDUCE_SCATTER)):
        cat, wait = given(start)[0], _only_user(start)
        if given(start)[3] != group or given(start)[1] != "sum" or not is_static(start):
            continue
        if wait is None or wait.target is not WAIT:
            continue
        if cat.target is not aten.cat.default or list(cat.users) != [start] or _dim(cat) != 0:
            continue
        source, dim = _pieces(cat)
        if source is None or not 0 < dim < source.meta["val"].ndim - 1:
            continue
        summed: Any = source
        padding, dtype = None, None
        if summed.target is aten.constant_pad_nd.default and _pads_zeros(summed, dim) and _is_alone(given(summed)[0]):
            padding, summed = given(summed)[1:], given(summed)[0]
        if summed.target is CAST and _is_alone(given(summed)[0]):
            dtype, summed = given(summed)[1], given(summed)[0]
        products = _summands(summed)
        if products is not None:
            yield Scatter(start, wait, dim, summed, padding, dtype, products)


def given(node: fx.Node) -> Any:
    """The arguments of a node, as values that can be anything."""
    return node.args


def is_static(node: fx.Node) -> bool:
    """Whether all sizes are numbers."""
    return all(isinstance(size, int) for size in node.meta["val"].shape)


def _products_of(whole: fx.Node, start: int, position: dict[fx.Node, int]) -> Iterator[Product]:
    """Products of the gathered rows with weights that do not depend on them."""
    for user in whole.users:
        for rows in user.users if user.target is aten.clone.default else [user]:
            if rows.target not in RESHAPES or not _is_rows(rows, whole):
                continue
            for node in rows.users:
                product = _product(node)
                if product is not None and product.rows is rows and not _behind(product.weight, start, position):
                    yield product


def _product(node: fx.Node) -> Product | None:
    if node.target is aten.mm.default and given(node)[0] is not given(node)[1]:
        return Product(node, *given(node))
    if node.target is aten.addmm.default and not node.kwargs and len(given(node)) == 3:
        bias, rows, weight = given(node)
        if bias.meta["val"].ndim == 1 and rows is not weight:
            return Product(node, rows, weight, bias)
    return None


def _summands(total: fx.Node) -> tuple[Product, ...] | None:
    """The products whose sum `total` is; None if something else is in it or reads a part of it."""
    value = total.meta["val"]
    if total.target is aten.add.Tensor and not total.kwargs and len(given(total)) == 2:
        found: tuple[Product, ...] = ()
        for part in given(total):
            if not _is_alone(part) or part.meta["val"].shape != value.shape:
                return None
            if part.meta["val"].dtype != value.dtype or (more := _summands(part)) is None:
                return None
            found += more
        return found
    if total.target not in RESHAPES or not _is_alone(node := given(total)[0]):
        return None
    product = _product(node)
    if product is None or product.bias is not None or value.shape[-1] != node.meta["val"].shape[-1]:
        return None
    return (product,)


def _pieces(cat: fx.Node) -> tuple[Any, int]:
    """(source, dim) where `cat` joins all equal parts of `source` along `dim`, in order, and nothing else reads source;
    (None, 0) otherwise."""
    pieces = given(cat)[0]
    found = {_piece(piece, number, len(pieces)) for number, piece in enumerate(pieces)}
    if len(found) != 1 or None in found or any(_only_user(piece) is not cat for piece in pieces):
        return None, 0
    source, dim = next(each for each in found if each is not None)
    owners = {given(piece)[0] if piece.target is operator.getitem else piece for piece in pieces}
    return (source, dim) if set(source.users) == owners else (None, 0)


def _piece(node: Any, number: int, count: int) -> tuple[fx.Node, int] | None:
    """(source, dim) of which `node` is part `number` out of `count`."""
    if not isinstance(node, fx.Node):
        return None
    if node.target is operator.getitem and given(node)[1] == number and given(node)[0].target in SPLITS:
        split = given(node)[0]
        source, dim = given(split)[0], given(split)[2] if len(given(split)) > 2 else split.kwargs.get("dim", 0)
        return (source, dim % source.meta["val"].ndim) if len(split.users) == count else None
    if node.target is aten.slice.Tensor and len(given(node)) == 4:
        source, dim, begin, _ = given(node)
        length = node.meta["val"].shape[dim]
        whole = source.meta["val"].shape[dim]
        if is_static(node) and is_static(source) and begin == number * length and whole == count * length:
            return source, dim % source.meta["val"].ndim
    return None


def _dim(cat: fx.Node) -> int:
    return (given(cat)[1] if len(given(cat)) > 1 else cat.kwargs.get("dim", 0)) % cat.meta["val"].ndim


def _pads_zeros(pad: fx.Node, dim: int) -> bool:
    """Whether nothing but the end of `dim` is padded, with zeros, for which zero rows of the tokens stand."""
    padding, value = given(pad)[1], given(pad)[2] if len(given(pad)) > 2 else pad.kwargs.get("value", 0)
    before = 2 * (pad.meta["val"].ndim - 1 - dim)
    return bool(value == 0) and len(padding) == before + 2 and not any(padding[: before + 1])


def _is_rows(rows: fx.Node, whole: fx.Node) -> bool:
    shape = rows.meta["val"].shape
    return len(shape) == 2 and shape[-1] == whole.meta["val"].shape[-1]


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_alone(node: Any) -> bool:
    """Whether one other node reads it."""
    return isinstance(node, fx.Node) and len(node.users) == 1


def _behind(node: fx.Node, start: int, position: dict[fx.Node, int]) -> bool:
    """Whether a node depends on the one at `start`."""
    waiting, seen = [node], {node}
    while waiting:
        each = waiting.pop()
        if position[each] == start:
            return True
        more = {x for x in each.all_input_nodes if position[x] >= start} - seen
        seen |= more
        waiting += more
    return False
