"""A lowered graph with all layers, from one in which a traced layer stands for others.

What is under way while a layer runs belongs to its neighbours: the next layer's weights are gathered, the last one's
gradients reduced. So an order of nodes is a matter of all layers, and a layer that stands for others cannot tell it.

A stretch of layers is traced as its first unit and its last (see `layers`). Here the last one is written once for each
unit that it stands for. What a copy reads from the copy before it follows from the two that are there: in forward the
last unit reads what the first made, and a copy what the one before it made there; in backward the first unit reads what
the last made, and a copy the same of the one before it. Nodes of both units correspond if module, operator, type and
number are the same.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from ndcompile.inspection.layers import LayerStack
from ndcompile.inspection.trace import Traced, module_of

Copy = tuple[fx.Node, int]
"""A node, and the number of its copy in the order in which they run; 0 for nodes that are there once."""


def with_all_layers(traced: Traced, backward: bool) -> fx.Graph:
    """The forward or backward graph with the nodes of all layers; a new graph, in which each stands for itself."""
    graph = (traced.backward if backward else traced.forward).graph
    stack = traced.stack
    units = {unit.last: unit for unit in _units(stack)}
    return _Copies(graph, stack, units, backward).graph()


@dataclass(frozen=True)
class _Unit:
    """Layers [first, first + period) are the first unit, [last, last + period) the last, which stands for `times`."""

    first: int
    last: int
    period: int
    times: int

    def layer(self, layer: int, copy: int, backward: bool) -> int:
        """The layer of the model that a copy of `layer`, one of the last unit, is."""
        return self.first + (self.times + 1 - copy if backward else copy) * self.period + layer - self.last


def _units(stack: LayerStack) -> Iterator[_Unit]:
    for last, times in stack.counts.items():
        if times > 1 and stack.stretch(last)[0] == last:
            period = sum(stack.stretch(layer) == (last, times) for layer in stack.counts)
            yield _Unit(last - times * period, last, period, times)


@dataclass
class _Copies:
    """The new graph as it grows."""

    old: fx.Graph
    stack: LayerStack
    units: Mapping[int, _Unit]
    backward: bool
    new: fx.Graph = field(default_factory=fx.Graph)
    made: dict[Copy, fx.Node] = field(default_factory=dict)

    def graph(self) -> fx.Graph:
        self.unit_of = {node: unit for node in self.old.nodes if (unit := self._unit(node))}
        self.alike = self._correspondence()
        for node in self.old.find_nodes(op="placeholder"):
            for copy in self._numbers(node):
                self._make((node, copy))
        for run in self._runs():
            for copy in self._numbers(run[0]):
                for node in run:
                    self._place((node, copy))
        every = {node: [self.made[node, copy] for copy in self._numbers(node)] for node in self._returned()}
        self.new.output(tuple(made for copies in every.values() for made in copies))
        return self.new

    def _returned(self) -> Sequence[fx.Node]:
        return self.old.output_node().all_input_nodes

    def _runs(self) -> Iterator[list[fx.Node]]:
        """The calls in order, those of one unit together. What runs between them and reads none of them (rotary
        embeddings that backward computes again) goes in front: else each copy would end there."""
        behind: set[fx.Node] = set()
        run: list[fx.Node] = []
        between: list[fx.Node] = []
        for node in self.old.nodes:
            if node.op in ("placeholder", "output"):
                continue
            unit = self.unit_of.get(node)
            if not behind.isdisjoint(node.all_input_nodes) or unit is not None:
                behind.add(node)
            if run and unit is self.unit_of[run[0]]:
                yield from ([each] for each in between)
                between = []
                run.append(node)
            elif run and unit is None and node not in behind:
                between.append(node)
            else:
                yield from filter(None, [run, *([each] for each in between)])
                run, between = ([node], []) if unit is not None else ([], [])
                yield from [[node]] if unit is None else []
        yield from filter(None, [run, *([each] for each in between)])

    def _unit(self, node: fx.Node) -> _Unit | None:
        """The unit that a node is copied with: inputs that nothing else reads are."""
        layer = self.stack.index(module_of(node))
        if layer is None and node.op == "placeholder":
            layers = {self.stack.index(module_of(user)) for user in node.users if user.op != "output"}
            layer = layers.pop() if len(layers) == 1 else None
        return None if layer is None else self.units.get(self.stack.stretch(layer)[0])

    def _numbers(self, node: fx.Node) -> Sequence[int]:
        return range(1, self.unit_of[node].times + 1) if node in self.unit_of else (0,)

    def _place(self, wanted: Copy) -> None:
        """Make a copy behind what it reads, which is made now where it was not yet."""
        waiting = [wanted]
        opened: set[Copy] = set()
        while waiting:
            node, copy = waiting[-1]
            missing = [s for each in node.all_input_nodes if (s := self._source(node, copy, each)) not in self.made]
            assert not missing or (node, copy) not in opened, f"copy {copy} of {node} reads what reads it: {missing}"
            opened.add((node, copy))
            waiting += reversed(missing)
            if not missing:
                self._make(waiting.pop())

    def _make(self, wanted: Copy) -> None:
        if wanted in self.made:
            return
        node, copy = wanted
        made = self.new.node_copy(node, lambda each: self.made[self._source(node, copy, each)])
        custom = dict(node.meta.get("custom") or {})
        if (layer := self.stack.index(custom.get("module", ""))) is not None:
            if copy:
                layer = self.unit_of[node].layer(layer, copy, self.backward)
                inside = rf"^({re.escape(self.stack.path)}[.])\d+"
                custom["module"] = re.sub(inside, rf"\g<1>{layer}", custom["module"])
            custom |= {"layer": layer} if "layer" in custom else {}
        made.meta["custom"] = custom
        self.made[wanted] = made

    def _source(self, reader: fx.Node, copy: int, read: fx.Node) -> Copy:
        """Which copy of `read` a copy of `reader` reads."""
        unit, own = self.unit_of.get(read), self.unit_of.get(reader)
        if unit is not None:
            return (read, copy if unit is own else unit.times)
        before = self._of_unit_before(reader, read) if copy > 1 else None
        return (read, 0) if before is None else (before, copy - 1)

    def _of_unit_before(self, reader: fx.Node, read: fx.Node) -> fx.Node | None:
        """The node of the last unit whose copy before is read instead of `read`, a node outside of the unit."""
        if read.op == "placeholder":
            return None
        if not self.backward:
            found = self.alike.get(read)
            return found if found is not None and self.unit_of[found] is self.unit_of[reader] else None
        other = self.alike.get(reader)
        inputs = reader.all_input_nodes
        if other is None or read not in inputs or len(other.all_input_nodes) != len(inputs):
            return None
        there = other.all_input_nodes[inputs.index(read)]
        return there if self.unit_of.get(there) is self.unit_of[reader] else None

    def _correspondence(self) -> dict[fx.Node, fx.Node]:
        """Nodes of first units -> nodes of the last ones in forward, and the other way in backward."""
        found: dict[fx.Node, fx.Node] = {}
        for unit in self.units.values():
            first, last = self._numbered(unit.first, unit.period), self._numbered(unit.last, unit.period)
            for key in first.keys() & last.keys():
                pairs = zip(reversed(first[key]), reversed(last[key]), strict=False)
                found |= {b: a for a, b in pairs} if self.backward else dict(pairs)
        return found

    def _numbered(self, first: int, period: int) -> Mapping[object, list[fx.Node]]:
        nodes: dict[object, list[fx.Node]] = defaultdict(list)
        for node in self.old.nodes:
            layer = self.stack.index(module_of(node))
            if node.op == "call_function" and layer is not None and first <= layer < first + period:
                inside = module_of(node).removeprefix(f"{self.stack.path}.{layer}")
                nodes[layer - first, inside, node.target, _type(node.meta.get("val"))].append(node)
        return nodes


def _type(value: Any) -> object:
    return (tuple(map(str, value.shape)), value.dtype) if isinstance(value, Tensor) else type(value)
