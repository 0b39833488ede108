"""What a model's forward writes into its own parameters, such as `weight.data.clamp_(-c, c)` in train mode.

Such a write has no gradient: the model goes on with the value that it left, and so does the next step. In a rank's
graph it would land in a gathered copy. So it is taken out of the graph and done to the stored shard before every call
that runs the graph: for an operator on single elements, and before the first use, that is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ndcompile.capture.graph_input import PARAMETER
from ndcompile.errors import CaptureError
from ndcompile.operators.redistribute import redistribute
from ndcompile.verify.type_inference import written_arguments

aten = torch.ops.aten

SAME_TENSOR = {aten.detach.default, aten.alias.default}
ELEMENTS_ALONE = {aten.fill_.Scalar, aten.zero_.default}
"""Without torch's tag for operators on single elements, but of them."""
DONE_ONCE = {
    aten.clamp_.default, aten.clamp_min_.default, aten.clamp_max_.default, aten.relu_.default, aten.round_.default,
    aten.fill_.Scalar, aten.zero_.default,
}  # fmt: skip
"""Done twice they change nothing more."""


@dataclass(frozen=True)
class ParameterWrite:
    """An operator in place on one parameter, with its other arguments, which are numbers."""

    fqn: str
    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, stored: Tensor) -> None:
        """Write to the memory of a shard. By `.data`, as in the model: autograd is to take no notice of it."""
        self.operator(stored.data, *self.args, **self.kwargs)


def take_out_writes(graph: fx.Graph) -> tuple[ParameterWrite, ...]:
    """Take the writes to parameters out of the graph, whose values are then those after the writes.

    Raises CaptureError for a write that is no operator on single elements with numbers, and for one behind a use.
    """
    parameters = {
        n: n.meta["input"].name for n in graph.find_nodes(op="placeholder") if n.meta["input"].kind == PARAMETER
    }
    roots = ((node, parameters.get(_root(node))) for node in graph.nodes)
    memory = {storage: name for node, name in roots if name and (storage := _storage(node)) is not None}
    writes: dict[str, list[ParameterWrite]] = {}
    used: set[str] = set()
    for node in list(graph.nodes):
        for target in written_arguments(node):
            fqn = parameters.get(root := _root(target))
            if fqn is None and (fqn := memory.get(_storage(target) or 0)) is None:
                continue
            write = ParameterWrite(fqn, node.target, tuple(node.args[1:]), dict(node.kwargs))
            known = writes.setdefault(fqn, [])
            again = known == [write] and node.target in DONE_ONCE
            alone = root in parameters and _on_elements(node)
            if not alone or (fqn in used and not again):
                raise CaptureError(_explain(node, fqn, alone))
            if not again:
                known.append(write)
            node.replace_all_uses_with(target)
            graph.erase_node(node)
            break
        else:
            if node.target not in SAME_TENSOR and node.target is not redistribute:
                used |= {name for source in node.all_input_nodes if (name := parameters.get(_root(source)))}
    return tuple(write for of_one in writes.values() for write in of_one)


def _root(node: fx.Node) -> fx.Node:
    """The node whose elements a node has. A boundary gives every rank the parameter that it has, with its gradient."""
    while node.target in SAME_TENSOR or (node.target is redistribute and node.args[3:5] == ("I", "R")):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _on_elements(node: fx.Node) -> bool:
    target: Any = node.target
    alone = torch.Tag.pointwise in target.tags or target in ELEMENTS_ALONE
    return alone and len(node.all_input_nodes) == 1


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _explain(node: fx.Node, fqn: str, alone: bool) -> str:
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    why = (
        "after the parameter was used, so that one forward has two values of it"
        if alone
        else "with something else than an operator on every single element with numbers, which a shard cannot do alone"
    )
    return (
        f"{node.target} writes to the parameter {fqn!r} in place, {why}: "
        f"{': '.join(line.strip() for line in lines[-2:])}. Write to parameters outside of forward, after the "
        "optimizer's step, or use torch.where on their value."
    )
