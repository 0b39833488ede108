"""Which linears of a graph make a pair: the first ones' outputs meet again in one that sums over their width."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ndcompile.graph_input import PARAMETER

EMBEDDING = torch.ops.aten.embedding.default


@dataclass(frozen=True)
class Pair:
    """Linears whose outputs reach `row`, and nothing else does that has a gradient. Names have `*` for numbers.

    parameters: those between, of norms and the like. modules: those whose code runs between.
    """

    columns: tuple[str, ...]
    row: str
    parameters: tuple[str, ...]
    modules: tuple[str, ...]


def features(linear: nn.Module) -> tuple[int, int]:
    """Out and in features of a Linear or a Conv1D."""
    if isinstance(linear, Conv1D):
        return linear.nf, linear.nx
    assert isinstance(linear, nn.Linear)
    return linear.out_features, linear.in_features


def find_pairs(graph: fx.Graph, model: nn.Module) -> list[Pair]:
    """The pairs of a graph that was captured without tp; layers that are alike give one."""
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    calls = defaultdict(list)
    for node in graph.nodes:
        calls[module_of(node)].append(node)
    pattern = partial(pattern_of, model)
    found: dict[tuple[tuple[str, ...], str], Pair] = {}
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    for row in sorted(name for name in linears if model.get_submodule(name) is not head):
        pair = _pair_before(row, calls, linears, pattern)
        if pair is not None:
            key = (pair.columns, pair.row)
            found[key] = pair if key not in found else _joined(found[key], pair)
    return list(found.values())


def pattern_of(model: nn.Module, name: str) -> str:
    """A name with `*` for the numbers of layers; a place in an nn.Sequential is no layer, and stays."""
    parts = name.split(".")
    around = [".".join(parts[:place]) for place in range(len(parts))]
    return ".".join(
        "*" if part.isdigit() and not isinstance(model.get_submodule(outer), nn.Sequential) else part
        for part, outer in zip(parts, around, strict=True)
    )


def _pair_before(
    row: str, calls: Mapping[str, list[fx.Node]], linears: set[str], pattern: Callable[[str], str]
) -> Pair | None:
    """Walk back from a linear's inputs to the linears before it. None where there are none in its layer, and where the
    walk comes to an embedding: then `row` reads the residual stream."""
    columns, parameters, modules = set(), set(), set()
    waiting = [source for node in calls.get(row, ()) for source in node.all_input_nodes if module_of(source) != row]
    seen: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            if node.meta["input"].kind == PARAMETER:
                parameters.add(node.meta["input"].name)
        elif node.target == EMBEDDING:
            return None
        elif module_of(node) in linears:
            columns.add(module_of(node))
        elif node.meta["differentiable"]:
            modules.add(module_of(node))
            waiting += node.all_input_nodes
    if not columns or any(_layer(column) != _layer(row) for column in columns):
        return None
    between = {name for name in parameters if name.rpartition(".")[0] not in linears}
    modules |= {name.rpartition(".")[0] for name in (row, *columns)}
    all_of = lambda names: tuple(sorted({pattern(name) for name in names}))  # noqa: E731
    return Pair(all_of(columns), pattern(row), all_of(between), all_of(modules))


def _joined(pair: Pair, other: Pair) -> Pair:
    parameters, modules = {*pair.parameters, *other.parameters}, {*pair.modules, *other.modules}
    return Pair(pair.columns, pair.row, tuple(sorted(parameters)), tuple(sorted(modules)))


def _layer(name: str) -> str:
    """The name up to its first number."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return found.group() if found else ""


def module_of(node: fx.Node) -> str:
    """FQN of the module that made a node."""
    return (node.meta.get("custom") or {}).get("module", "")


@contextmanager
def watched_integers(model: nn.Module) -> Iterator[set[str]]:
    """While active, the integer attributes of modules that are read are collected, by FQN."""
    read: set[str] = set()
    before = [(module, type(module)) for module in model.modules()]
    for name, module in model.named_modules():
        module.__class__ = _watching(type(module), name, read)
    try:
        yield read
    finally:
        for module, kind in before:
            module.__class__ = kind


def _watching(kind: type, fqn: str, read: set[str]) -> type:
    """A class like `kind` that notes which integers of an instance are read."""

    def get(self: Any, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        if type(value) is int and name in object.__getattribute__(self, "__dict__"):
            read.add(f"{fqn}.{name}")
        return value

    return type(kind.__name__, (kind,), {"__getattribute__": get, "__module__": kind.__module__})
