"""Compile what repeats in a graph once: every repetition becomes a call of one subgraph.

Runs on the lowered forward and backward graphs, behind the passes that move collectives.

Before:  y0 = mm(x, w0);  z0 = relu(y0);  y1 = mm(z0, w1);  z1 = relu(y1);  return z1
After:   z0 = invoke_subgraph(layer, x, w0);  z1 = invoke_subgraph(layer, z0, w1);  return z1
         layer(a, b):  return relu(mm(a, b))

Layers are found by what their nodes are (operators, constants, shapes), not by names: see `repetition.py`.
Inductor lowers, fuses and writes a subgraph once. Collectives stay where the schedule put them: one that is under way
between two layers leaves one call and is waited for in the next.

A caller of a subgraph takes every result for memory of its own. So no result shares memory with an operand or with
another one: views (and waits, which return what they are given) are made again outside, where they cost nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from ndcompile.graphs.repetition import Repetition, is_view, repetitions
from ndcompile.private.inductor import invoke_subgraph

LEAST = 32
"""Nodes of a part; of smaller ones a call costs as much as it saves. A layer of Llama has 66, its backward 123."""

Place = tuple[int, int]
"""An input of a node in a part: the node's place, and the input's among `all_input_nodes`."""


def reuse_layers(graph: fx.Graph) -> None:
    """Replace repetitions of the graph by calls."""
    for number, found in enumerate(repetitions(graph, LEAST)):
        operands, results = _operands(found), _results(found)
        body = _body(found.parts[0], operands, results)
        module = graph.owning_module
        assert module is not None
        module.add_submodule(name := f"repeated_layer_{number}", fx.GraphModule(module, body))
        places = list(dict.fromkeys(operands.values()))
        for part in found.parts:
            _call(graph, part, name, places, results)


def _operands(found: Repetition) -> dict[Place, Place]:
    """Inputs that come from outside -> the first input that is the same node in every part."""
    inside = set(found.parts[0])
    first: dict[tuple[fx.Node, ...], Place] = {}
    operands = {}
    for at, nodes in enumerate(zip(*found.parts, strict=True)):
        for number, given in enumerate(zip(*(node.all_input_nodes for node in nodes), strict=True)):
            if given[0] not in inside:
                operands[at, number] = first.setdefault(given, (at, number))
    return operands


def _results(found: Repetition) -> list[int]:
    """Places of the nodes that other nodes use in any part; of a view, that which it is a view of."""
    results = set()
    for part in found.parts:
        place = {node: at for at, node in enumerate(part)}
        for node in part:
            if any(user not in place for user in node.users):
                while node in place and is_view(node):
                    node = node.all_input_nodes[0]
                if node in place:
                    results.add(place[node])
    return sorted(results)


def _body(part: Sequence[fx.Node], operands: dict[Place, Place], results: list[int]) -> fx.Graph:
    """The part as a graph of its own, whose results keep their strides."""
    body = fx.Graph()
    inputs: dict[Place, fx.Node] = {}
    for at, number in dict.fromkeys(operands.values()):
        inputs[at, number] = body.placeholder(f"operand_{len(inputs)}")
        inputs[at, number].meta["val"] = part[at].all_input_nodes[number].meta["val"]
    copies: dict[fx.Node, fx.Node] = {}
    for at, node in enumerate(part):
        given = {
            each: inputs[operands[at, number]] if (at, number) in operands else copies[each]
            for number, each in enumerate(node.all_input_nodes)
        }
        copies[node] = body.node_copy(node, given.__getitem__)
    returned = [copies[part[at]] for at in results]
    output = body.output(tuple(returned))
    output.meta["user_visible_output_idxs"] = list(range(len(returned)))
    output.meta["original_output_strides"] = [node.meta["val"].stride() for node in returned]
    body.eliminate_dead_code()
    return body


def _call(graph: fx.Graph, part: Sequence[fx.Node], name: str, operands: list[Place], results: list[int]) -> None:
    """Replace one part by a call, its results, and the views of these that are used outside."""
    inside = set(part)
    outside: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(part[0]):
        given = [part[at].all_input_nodes[number] for at, number in operands]
        call = graph.call_function(invoke_subgraph, (graph.get_attr(name), name, *given))
        call.meta["val"] = tuple(part[at].meta["val"] for at in results)
        for number, at in enumerate(results):
            outside[part[at]] = graph.call_function(operator.getitem, (call, number))
            outside[part[at]].meta = dict(part[at].meta)
        for node in part:
            known = all(each in outside or each not in inside for each in node.all_input_nodes)
            if known and is_view(node) and node not in outside:
                outside[node] = graph.node_copy(node, lambda each: outside.get(each, each))
    for node, copy in outside.items():
        node.replace_all_uses_with(copy, delete_user_cb=lambda user: user not in inside)
    for node in reversed(part):
        graph.erase_node(node)
    for copy in reversed(outside.values()):
        if not copy.users:
            graph.erase_node(copy)
