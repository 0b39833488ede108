"""Facts that hold after every pass: each function checks one and raises VerifyError with node, module and remedy."""

from __future__ import annotations

from typing import Any

from torch import fx

from ndcompile.accumulation import HOLD, REDUCED
from ndcompile.chunked_loss import vocabulary_loss
from ndcompile.errors import VerifyError
from ndcompile.graph_input import HELD, GraphInput
from ndcompile.opaque import is_opaque
from ndcompile.pass_context import PassContext
from ndcompile.passes.complete_boundaries import unreduced_inputs
from ndcompile.random_ops import attention_op, dropout_op
from ndcompile.redistribute import (
    all_to_all,
    average_gradient,
    divide_gradient,
    hold_gradient,
    redistribute,
    unshard,
)
from ndcompile.type_inference import moves_over, replicated_over_tp, varying_over_tp


def verify(graph: fx.Graph, context: PassContext, after: str) -> None:
    """Check the graph as the pass `after` left it; `after="pipeline"` checks the finished graph."""
    graph.lint()
    check_groups(graph, context)
    tp = context.axis("tp")
    if after == "pipeline" and tp is not None:
        varying = varying_over_tp(graph, context.plan, tp.group)
        check_outputs(graph, varying)
        check_gradients(graph, varying, tp.group)
        check_opaque(graph, varying)
        check_seeds(graph, varying)
    if after == "pipeline":
        check_parameters(graph, context)


SEEDED = {dropout_op: 2, attention_op: 7}
"""Random operators, and which argument is their seed."""

GRADIENT_NODES = (unshard, average_gradient, divide_gradient)
"""What stands between a stored parameter and its uses."""


def check_groups(graph: fx.Graph, context: PassContext) -> None:
    """Every distributed node runs over an axis of the mesh, with its size."""
    sizes = {axis.group: axis.size for axis in context.mesh.axes.values()}
    for node in graph.nodes:
        over_axis = node.target in (redistribute, unshard, average_gradient) or _on_shards(node)
        if over_axis and sizes.get(node.args[1]) != node.args[2]:
            raise VerifyError(f"{where(node)} runs over {node.args[1]!r} of size {node.args[2]}; axes are {sizes}.")
        if node.target is all_to_all and [sizes.get(node.args[3])] * 2 != [len(part) for part in node.args[1:3]]:
            raise VerifyError(f"{where(node)} has {len(node.args[1])} parts over {node.args[3]!r}; axes are {sizes}.")


def check_outputs(graph: fx.Graph, varying: set[fx.Node]) -> None:
    """What the model returns is the same on all ranks of a tp group. A key-value cache need not be."""
    node = graph.output_node()
    outputs: Any = node.args[0]
    for output in outputs[: node.meta.get("returned")]:
        if output in varying:
            raise VerifyError(
                f"An output of the model, {where(output)}, is a shard or a partial sum over tp. Add a tp_plan rule "
                "that gathers or sums it ('colwise_gather_output', 'rowwise', 'all_reduce'), or do not ask for it "
                "(output_attentions is per head)."
            )


def check_gradients(graph: fx.Graph, varying: set[fx.Node], tp: str) -> None:
    """No invariant value's gradient stays partial, and none is summed that is already whole."""
    replicated, mixed = replicated_over_tp(graph, varying, tp)
    for node in graph.nodes:
        for source in unreduced_inputs(node, varying, replicated, tp):
            raise VerifyError(
                f"{where(source)} is the same on all tp ranks but is used on shards by {where(node)}: its gradient "
                "would be partial. Keep the pass 'complete_boundaries' enabled."
            )
        if moves_over(node, tp) and node.args[3] == "I" and node.args[0] in varying:
            raise VerifyError(
                f"{where(node)} takes a value that is the same on all tp ranks, but was given a shard or partial sum, "
                f"{where(node.args[0])}. Close the region before it with 'rowwise' or 'all_reduce' in tp_plan."
            )
    if mixed:
        raise VerifyError(
            f"{where(mixed[0])} mixes values whose gradients are summed over tp with one whose gradient is whole. "
            "Keep the pass 'complete_boundaries' enabled."
        )


def check_opaque(graph: fx.Graph, varying: set[fx.Node]) -> None:
    """Every rank of a tp group runs an opaque module on the same values: what it does with a shard is not known."""
    for node in graph.nodes:
        inputs = [source for source in node.all_input_nodes if source in varying] if is_opaque(node) else []
        if inputs:
            raise VerifyError(
                f"{where(node)} runs a module whose code branches on values as one opaque node, but {where(inputs[0])} "
                "is a shard or a partial sum over tp. Keep what is before it whole in tp_plan: "
                "'colwise_gather_output', 'rowwise' or 'replicate'."
            )


def check_seeds(graph: fx.Graph, varying: set[fx.Node]) -> None:
    """Ranks of a tp group drop the same elements of a value that they share, and each its own of one that varies."""
    for node in graph.nodes:
        if node.target not in SEEDED and not is_opaque(node):
            continue
        seed: Any = node.args[SEEDED.get(node.target, 0)]
        if seed.args[2] != int(node in varying):
            kind = "differs between" if node in varying else "is the same on"
            raise VerifyError(
                f"{where(node)} {kind} the ranks of a tp group, but draws from stream {seed.args[2]} (0 is shared, 1 "
                "is the rank's own). The pass 'seed_random_ops' chooses it."
            )


def check_parameters(graph: fx.Graph, context: PassContext) -> None:
    """Every trainable parameter averages its gradient over each of its data axes exactly once.

    An expert's gradient is a sum over ep_rest, whose ranks sent it their tokens: it is divided once by their number.
    """
    rest = context.mesh.size("ep_rest")
    for placeholder in graph.find_nodes(op="placeholder"):
        if placeholder.meta["input"].kind != "parameter" or not placeholder.meta["differentiable"]:
            continue
        entry = context.plan.by_name[placeholder.meta["input"].name]
        axes = {axis.group for name in entry.data_axes if (axis := context.axis(name)) is not None}
        node = placeholder
        averaged: list[Any] = []
        divided: list[Any] = []
        while len(node.users) == 1 and (user := next(iter(node.users))).target in GRADIENT_NODES:
            node = user
            (divided if node.target is divide_gradient else averaged).append(node.args[1])
        if node.users and (len(averaged) != len(set(averaged)) or set(averaged) != axes):
            raise VerifyError(
                f"The gradient of parameter {entry.fqn!r} is averaged over {averaged}, but its data axes are "
                f"{sorted(axes)}."
            )
        if node.users and averaged:
            check_held(node, entry.fqn, context.gradients)
        if node.users and divided != ([rest] if entry.expert and rest > 1 else []):
            raise VerifyError(
                f"The gradient of parameter {entry.fqn!r} is divided by {divided}, but it is a sum over "
                f"{rest if entry.expert else 1} data ranks."
            )


def check_held(last: fx.Node, name: str, gradients: str) -> None:
    """A gradient is held, or added to what the ranks reduce, where `ndcompile.no_sync` asks for it. last: the node
    behind which the parameter is used."""
    if gradients == HOLD:
        found = [user.args[1] if user.target is hold_gradient else None for user in last.users]
    else:
        found = [last.kwargs["held"]] if "held" in last.kwargs else []
    inputs: list[Any] = [node.meta["input"] if isinstance(node, fx.Node) else None for node in found]
    expected = [] if gradients == REDUCED else [GraphInput(HELD, name)]
    if inputs != expected:
        raise VerifyError(f"The gradient of parameter {name!r} must be {gradients}, but its graph has {inputs}.")


def _on_shards(node: fx.Node) -> bool:
    """Whether the node is a loss on shards of the vocabulary; one on a whole vocabulary runs over no axis."""
    return node.target is vocabulary_loss and node.args[1] != ""


def where(node: fx.Node) -> str:
    """Node, module and source line."""
    module = node.meta.get("custom", {}).get("module")
    line = (node.meta.get("stack_trace") or "").strip().splitlines()
    source = f" ({line[-2].strip()})" if len(line) > 1 else ""
    name = node.meta["input"].name if node.op == "placeholder" else node.name
    return f"{name!r}" + (f" in module {module!r}" if module else "") + source
