"""Which linears of a graph make a pair: the first ones' outputs meet again in one that sums over their width."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ndcompile.capture.graph_input import PARAMETER
from ndcompile.verify.type_inference import written_memory

EMBEDDING = torch.ops.aten.embedding.default


@dataclass(frozen=True)
class Pair:
    """Linears whose outputs reach `row`, and nothing else does that has a gradient. Names have `*` for numbers.

    inner: columns that read only what other columns give. parameters: those between, of norms and the like. tables:
    those that are looked up, of positions. modules: those whose code runs between.
    """

    columns: tuple[str, ...]
    row: str
    inner: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


def features(linear: nn.Module) -> tuple[int, int]:
    """Out and in features of a Linear or a Conv1D."""
    if isinstance(linear, Conv1D):
        return linear.nf, linear.nx
    assert isinstance(linear, nn.Linear)
    return linear.out_features, linear.in_features


def find_pairs(graph: fx.Graph, model: PreTrainedModel) -> list[Pair]:
    """The pairs of a graph that was captured without tp; layers that are alike give one."""
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    head, tokens = model.get_output_embeddings(), model.get_input_embeddings()
    calls = defaultdict(list)
    for node in graph.nodes:
        calls[module_of(node)].append(node)
    memory = written_memory(graph)
    found: dict[tuple[tuple[str, ...], str], Pair] = {}
    for row in sorted(name for name in linears & calls.keys() if model.get_submodule(name) is not head):
        walk = _Walk(row, linears & calls.keys(), getattr(tokens, "weight", None), model, memory)
        pair = walk.back(calls[row])
        if pair is not None:
            key = (pair.columns, pair.row)
            found[key] = pair if key not in found else _joined(found[key], pair)
    return [replace(pair, inner=_inner(pair, found.values())) for pair in found.values()]


def _inner(pair: Pair, others: Collection[Pair]) -> tuple[str, ...]:
    """Columns that are the row of a pair within this one."""
    columns = set(pair.columns)
    return tuple(other.row for other in others if other.row in columns and columns.issuperset(other.columns))


def pattern_of(model: nn.Module, name: str) -> str:
    """A name with `*` for the numbers of layers; a place in an nn.Sequential is no layer, and stays."""
    parts = name.split(".")
    around = [".".join(parts[:place]) for place in range(len(parts))]
    return ".".join(
        "*" if part.isdigit() and not isinstance(model.get_submodule(outer), nn.Sequential) else part
        for part, outer in zip(parts, around, strict=True)
    )


class _Walk:
    """From a linear's inputs back to the linears before it.

    linears: those that are called; the weight of another one is a parameter like any. tokens: weight of the model's
    embedding. memory: of nodes that share it, where it is written.
    """

    def __init__(
        self, row: str, linears: set[str], tokens: Any, model: nn.Module, memory: Mapping[fx.Node, Any]
    ) -> None:
        self.row, self.linears, self.tokens, self.model, self.memory = row, linears, tokens, model, memory
        self.columns: set[str] = set()
        self.parameters: set[str] = set()
        self.tables: set[str] = set()
        self.modules: set[str] = set()

    def back(self, calls: list[fx.Node]) -> Pair | None:
        """None where there are no linears in the layer of `row`, and where the walk comes to the embedding of tokens:
        then `row` reads the residual stream."""
        waiting = [source for node in calls for source in node.all_input_nodes if module_of(source) != self.row]
        seen: set[fx.Node] = set()
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.target == EMBEDDING:
                name = _parameter(node.args[0])
                if not name or self.model.get_parameter(name) is self.tokens or self.tokens is None:
                    return None
                self.tables.add(name)
                self.modules.add(module_of(node))
            else:
                waiting += self._before(node)
        if not self.columns or any(_layer(column) != _layer(self.row) for column in self.columns):
            return None
        self.modules |= {name.rpartition(".")[0] for name in (self.row, *self.columns)}
        groups = (self.columns, {self.row}, self.parameters, self.tables, self.modules)
        columns, (row,), *others = (tuple(sorted({pattern_of(self.model, n) for n in names})) for names in groups)
        return Pair(columns, row, (), *others)

    def _before(self, node: fx.Node) -> list[fx.Node]:
        """Note what a node is; the nodes from which to go on."""
        if name := _parameter(node):
            if name.rpartition(".")[0] not in self.linears:
                self.parameters.add(name)
            return []
        if module_of(node) in self.linears:
            self.columns.add(module_of(node))
            return []
        if not node.meta["differentiable"]:
            return []
        self.modules.add(module_of(node))
        written = self.memory.get(node)
        sharing = [] if written is None else [other for other, memory in self.memory.items() if memory == written]
        return [*node.all_input_nodes, *sharing]


def _parameter(node: Any) -> str:
    """The name of the parameter that a node is; "" for other nodes."""
    is_parameter = node.op == "placeholder" and node.meta["input"].kind == PARAMETER
    return node.meta["input"].name if is_parameter else ""


def _joined(pair: Pair, other: Pair) -> Pair:
    """Of two layers that are alike but for what stands between."""
    both = lambda one, two: tuple(sorted({*one, *two}))  # noqa: E731
    return replace(
        pair,
        parameters=both(pair.parameters, other.parameters),
        tables=both(pair.tables, other.tables),
        modules=both(pair.modules, other.modules),
    )


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
        value = kind.__getattribute__(self, name)  # type: ignore[call-arg]
        if type(value) is int and name in object.__getattribute__(self, "__dict__"):
            read.add(f"{fqn}.{name}")
        return value

    return type(kind.__name__, (kind,), {"__getattribute__": get, "__module__": kind.__module__})
