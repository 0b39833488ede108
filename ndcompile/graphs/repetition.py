"""Find what repeats in a graph: runs of nodes that do the same, one behind the other, on other operands.

Two nodes do the same if operator, constants, and shapes, strides, dtypes, devices of inputs and result are equal, and
two runs if their nodes do, and get from each other what is theirs in the same places. Nothing else counts, such as
the names of modules. Left out, and never part of a repetition, are nodes that write into what they are given,
operators of higher order, and nodes with symbolic sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from ndcompile.graphs.collective_chains import WAIT

ALIGNED = 16
"""Bytes to which inductor's kernels may take their operands to be aligned."""


@dataclass(frozen=True)
class Repetition:
    """Parts of a graph that do the same. Each is a run of nodes of one length, in order, without placeholders."""

    parts: tuple[tuple[fx.Node, ...], ...]


def repetitions(graph: fx.Graph, least: int) -> list[Repetition]:
    """What repeats, in parts of at least `least` nodes.

    Ranks with graphs of equal structure find the same.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    numbers: dict[Hashable, int] = {}
    symbols = np.array([numbers.setdefault(_symbol(node), len(numbers)) for node in nodes], dtype=np.int64)
    found, waiting = [], [(0, len(nodes))]
    while waiting:
        begin, end = waiting.pop()
        period, start, length = _longest(symbols[begin:end], least)
        parts = _parts(nodes, begin + start, begin + start + length + period, period)
        if not parts:
            continue
        first = nodes.index(parts[0][0], begin)
        waiting += [(begin, first), (first + len(parts) * period, end)]
        found.append(Repetition(tuple(parts)))
    return found


def is_view(node: fx.Node) -> bool:
    """Whether a node's result is memory of one of its inputs."""
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    if node.target is WAIT:
        return True
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or not node.all_input_nodes:
        return False
    if target is not torch.ops.aten.reshape.default and any(each.alias_info for each in target._schema.returns):
        return True
    memory = _memory(node)
    return memory is not None and memory in map(_memory, node.all_input_nodes)


def _memory(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _symbol(node: fx.Node) -> Hashable:
    """Equal for nodes that do the same with what they are given; unequal to all others for one that cannot repeat."""
    target = node.target
    pure = isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable
    if not pure and target is not operator.getitem:
        return node
    inputs = {each: number for number, each in enumerate(node.all_input_nodes)}
    stand_in: Any = lambda each: _Input(inputs[each])  # noqa: E731
    settings = fx.node.map_arg((node.args, node.kwargs), stand_in)
    values = [_description(each.meta.get("val")) for each in (node, *inputs)]
    return node if None in values else (target, _frozen(settings), *values)


@dataclass(frozen=True)
class _Input:
    """Stands for a node among the arguments of another one."""

    number: int


def _frozen(value: Any) -> Hashable:
    """Arguments of a node as something that can be compared: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(value, tuple | list):
        return (type(value) is tuple, *map(_frozen, value))
    if isinstance(value, dict):
        return tuple((key, _frozen(each)) for key, each in value.items())
    return value if isinstance(value, _Input) else (type(value), repr(value))


def _description(value: Any) -> Hashable:
    """What code for a value depends on; None if that is more than can be told, such as a symbolic size."""
    if isinstance(value, tuple | list):
        parts = tuple(map(_description, value))
        return None if None in parts else parts
    if not isinstance(value, Tensor):
        return "nothing" if value is None else None
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    if not all(isinstance(size, int) for size in sizes) or value.layout is not torch.strided:
        return None
    misaligned = sizes[-1] * value.element_size() % ALIGNED
    return (tuple(value.shape), value.stride(), misaligned, value.dtype, value.device)


def _longest(symbols: np.ndarray, least: int) -> tuple[int, int, int]:
    """(period, start, length): `symbols[start : start + length]` comes again one period later. That with the most
    symbols which need not be there, as they repeat those of the first period."""
    best, saved = (0, 0, 0), 0
    for period in range(least, len(symbols) // 2 + 1):
        differ = np.flatnonzero(symbols[:-period] != symbols[period:])
        ends = np.concatenate(([-1], differ, [len(symbols) - period]))
        at = int(np.argmax(lengths := np.diff(ends) - 1))
        length = int(lengths[at])
        if length // period * period > saved:
            best, saved = (period, int(ends[at]) + 1, length), length // period * period
    return best


def _parts(nodes: Sequence[fx.Node], begin: int, end: int, period: int) -> list[tuple[fx.Node, ...]]:
    """The parts of a run with this period, cut where the fewest tensors go from one to the next."""
    place = {node: at for at, node in enumerate(nodes[begin:end])}
    best: list[tuple[fx.Node, ...]] = []
    fewest = None
    for shift in range(period):
        starts = range(begin + shift, end - period + 1, period)
        if len(starts) < 2:
            continue
        crossing = _crossing(nodes[starts[0] : starts[1]], place, shift + period)
        if crossing is None or (fewest is not None and crossing >= fewest):
            continue
        parts = _alike([tuple(nodes[start : start + period]) for start in starts])
        if len(parts) > 1:
            best, fewest = parts, crossing
    return best


def _crossing(part: Sequence[fx.Node], place: dict[fx.Node, int], cut: int) -> int | None:
    """How many values of a part are used behind its end; None if one of them is not a tensor."""
    used = [node for node in part if any(place.get(user, -1) >= cut for user in node.users)]
    return len(used) if all(isinstance(node.meta["val"], Tensor) for node in used) else None


def _alike(parts: Sequence[tuple[fx.Node, ...]]) -> list[tuple[fx.Node, ...]]:
    """The longest run of parts that use values of their own in the same places."""
    runs: list[list[tuple[fx.Node, ...]]] = []
    last = None
    for part in parts:
        links = tuple(_links(part))
        if links != last:
            runs.append([])
        last = links
        runs[-1].append(part)
    return max(runs, key=len)


def _links(part: tuple[fx.Node, ...]) -> Iterator[int]:
    """For every input of every node its place in the part, or -1."""
    place = {node: at for at, node in enumerate(part)}
    return (place.get(each, -1) for node in part for each in node.all_input_nodes)
