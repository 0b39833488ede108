"""Facts that hold after every pass: each function checks one and raises VerifyError with node, module and remedy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from ndcompile.capture.graph_input import HELD, GraphInput
from ndcompile.capture.opaque import is_opaque
from ndcompile.errors import VerifyError
from ndcompile.graphs.pass_context import PassContext
from ndcompile.operators.chunked_loss import vocabulary_loss
from ndcompile.operators.host_copies import HOST, to_device
from ndcompile.operators.random_ops import attention_op, dropout_op
from ndcompile.operators.redistribute import (
    all_to_all,
    average_gradient,
    divide_gradient,
    hold_gradient,
    redistribute,
    unshard,
)
from ndcompile.passes.complete_boundaries import unreduced_inputs
from ndcompile.plans.sharding_plan import ParameterPlan
from ndcompile.proof.problem import exchanged
from ndcompile.runtime.accumulation import HOLD, REDUCED
from ndcompile.verify.type_inference import moves_over, replicated_over_tp, varying_over_tp

Check = Callable[[fx.Graph, PassContext], None]


def verify(graph: fx.Graph, context: PassContext, facts: Collection[Check] | None = None) -> None:
    """Check that `facts` hold; by default all that do of a finished graph."""
    graph.lint()
    for check in FINISHED if facts is None else facts:
        check(graph, context)


SEEDED = {dropout_op: 2, attention_op: 7}
"""Random operators, and which argument is their seed."""

GRADIENT_NODES = (to_device, unshard, average_gradient, divide_gradient)
"""What stands between a stored parameter and its uses."""


def check_groups(graph: fx.Graph, context: PassContext) -> None:
    """Every distributed node runs over an axis of the mesh, with its size."""
    sizes = {axis.group: axis.size for axis in context.mesh.axes.values()}
    for node in graph.nodes:
        over_axis = node.target in (redistribute, unshard, average_gradient) or _on_shards(node)
        if node.target is redistribute and not _belongs(node, context):
            raise VerifyError(
                f"{where(node)} moves values over {node.args[1]!r}. Over other axes than tp only tokens of experts and "
                "the router's auxiliary loss are moved."
            )
        if over_axis and sizes.get(node.args[1]) != node.args[2]:
            raise VerifyError(f"{where(node)} runs over {node.args[1]!r} of size {node.args[2]}; axes are {sizes}.")
        if node.target is all_to_all and [sizes.get(node.args[3])] * 2 != [len(part) for part in node.args[1:3]]:
            raise VerifyError(f"{where(node)} has {len(node.args[1])} parts over {node.args[3]!r}; axes are {sizes}.")


def check_types(graph: fx.Graph, context: PassContext) -> None:
    """Outputs are the same on all tp ranks, and gradients are summed over them once where they are partial."""
    if (tp := context.axis("tp")) is not None:
        varying = varying_over_tp(graph, context.plan, tp.group)
        check_outputs(graph, varying)
        check_gradients(graph, varying, tp.group)


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


def check_opaque(graph: fx.Graph, context: PassContext) -> None:
    """Every rank of a tp group runs an opaque module on the same values: what it does with a shard is not known."""
    if (tp := context.axis("tp")) is None:
        return
    varying = varying_over_tp(graph, context.plan, tp.group)
    for node in graph.nodes:
        inputs = [source for source in node.all_input_nodes if source in varying] if is_opaque(node) else []
        if inputs:
            raise VerifyError(
                f"{where(node)} runs a module whose code branches on values as one opaque node, but {where(inputs[0])} "
                "is a shard or a partial sum over tp. Keep what is before it whole in tp_plan: "
                "'colwise_gather_output', 'rowwise' or 'replicate'."
            )


def check_seeds(graph: fx.Graph, context: PassContext) -> None:
    """Ranks of a tp group drop the same elements of a value that they share, and each its own of one that varies."""
    if (tp := context.axis("tp")) is None:
        return
    varying = varying_over_tp(graph, context.plan, tp.group)
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
    """Every parameter is gathered over the axis that shards it, and every trainable one averages its gradient over each
    of its data axes exactly once.

    An expert's gradient is a sum over ep_rest, whose ranks sent it their tokens: it is divided once by their number.
    """
    rest = context.mesh.size("ep_rest")
    for placeholder, entry in _parameters(graph, context):
        chain = _chain(placeholder)
        divided = [node.args[1] for node in chain if node.target is divide_gradient]
        averaged: list[Any] = [node.args[1] for node in chain if node.target in MEANS]
        axes = {axis.group for name in entry.data_axes if (axis := context.axis(name)) is not None}
        trained = placeholder.meta["differentiable"]
        if trained and (len(averaged) != len(set(averaged)) or set(averaged) != axes):
            raise VerifyError(
                f"The gradient of parameter {entry.fqn!r} is averaged over {averaged}, but its data axes are "
                f"{sorted(axes)}."
            )
        if trained and divided != ([rest] if entry.expert and rest > 1 else []):
            raise VerifyError(
                f"The gradient of parameter {entry.fqn!r} is divided by {divided}, but it is a sum over "
                f"{rest if entry.expert else 1} data ranks."
            )
        _check_gathered(entry, chain, context)


def _parameters(graph: fx.Graph, context: PassContext) -> Iterator[tuple[fx.Node, ParameterPlan]]:
    """The inputs of the graph that are parameters and are used, each with its plan."""
    for placeholder in graph.find_nodes(op="placeholder"):
        if placeholder.meta["input"].kind == "parameter" and placeholder.users:
            yield placeholder, context.plan.by_name[placeholder.meta["input"].name]


def _chain(placeholder: fx.Node) -> list[fx.Node]:
    """What stands between a stored parameter and its uses."""
    nodes, node = [], placeholder
    while len(node.users) == 1 and (user := next(iter(node.users))).target in GRADIENT_NODES:
        nodes.append(node := user)
    return nodes


def _check_gathered(entry: ParameterPlan, chain: list[fx.Node], context: PassContext) -> None:
    """The weight is whole over the axis that shards it, and means are taken as the groups of the mesh take them."""
    axis = context.axis(entry.data_axes[1]) if isinstance(entry.fsdp, Shard) else None
    found = [(node.args[1], *node.args[3:5]) for node in chain if node.target is unshard]
    dim = getattr(entry.fsdp, "dim", 0)
    expected = [] if axis is None else [(axis.group, dim, entry.compute_shape[dim])]
    if found != expected:
        raise VerifyError(
            f"Parameter {entry.fqn!r} is gathered over {found} (group, dim, size), but must be over {expected}."
        )
    means = {str(node.args[MEANS[node.target]]) for node in chain if node.target in MEANS}
    if means - {context.mean}:
        raise VerifyError(
            f"The gradient of parameter {entry.fqn!r} is averaged by {sorted(means)}, but groups of this mesh take a "
            f"mean by {context.mean!r}."
        )


MEANS = {unshard: 6, average_gradient: 3}
"""Nodes that average a gradient, and which argument says how the group takes the mean."""


def check_offloaded(graph: fx.Graph, context: PassContext) -> None:
    """Parameters in host memory are copied to the mesh's device once, first of all; others are there."""
    for placeholder, entry in _parameters(graph, context):
        place, device = placeholder.meta["val"].device, context.mesh.device
        found = [user.args[1] if user.target is to_device else user.name for user in placeholder.users]
        copied = [each for each in found if isinstance(each, torch.device)]
        if (place != HOST or found != [device]) if context.offloads else copied:
            raise VerifyError(
                f"Parameter {entry.fqn!r} is on {place} and used by {found}, but with offload={context.offloads} it "
                f"must be {f'on the host and copied once to {device}' if context.offloads else 'copied nowhere'}."
            )


def check_held_gradients(graph: fx.Graph, context: PassContext) -> None:
    """Gradients that the ranks reduce are held, or added to those held before, as `context.gradients` says."""
    for placeholder, entry in _parameters(graph, context):
        chain = _chain(placeholder)
        if placeholder.meta["differentiable"] and any(node.target in MEANS for node in chain):
            check_held(chain[-1], entry.fqn, context.gradients)


def check_auxiliary_loss(graph: fx.Graph, context: PassContext) -> None:
    """Sums and counts of the router's auxiliary loss are reduced once over each data axis before they are divided: what
    it adds to the loss is the same on all data ranks."""
    region = {node: None for node in graph.nodes if "auxiliary_loss" in (node.meta.get("custom") or {})}
    for axis in (context.axis(name) for name in ("dp_replicate", "fsdp")):
        varies: set[fx.Node] = set()
        for node in region:
            if axis is not None and _differs(node, region, varies, axis.group):
                varies.add(node)
        # router logits are a data rank's own, and are returned as such
        used = {user: node for node in varies for user in node.users if user not in region and user.op != "output"}
        left = next(iter(used.values()), None)
        if left is not None and axis is not None:
            raise VerifyError(
                f"{where(left)}, of the router's auxiliary loss, is the data rank's own: sums and counts must be "
                f"reduced over {axis.name!r} before they are divided. Keep the pass 'reduce_auxiliary_loss' enabled."
            )


def _differs(node: fx.Node, region: Collection[fx.Node], varies: set[fx.Node], group: str) -> bool:
    """Whether a value of the auxiliary loss is of this data rank's tokens alone. Counts of tokens are."""
    sources = node.all_input_nodes
    own = any(source in varies or source not in region for source in sources)
    if moves_over(node, group):
        if not own:
            raise VerifyError(f"{where(node)} sums over {group!r} what is the same on its ranks: a sum taken twice.")
        return False
    return own or node.target is torch.ops.aten.full.default


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


def _belongs(node: fx.Node, context: PassContext) -> bool:
    """Whether a redistribution may be over its axis."""
    axes = {name for name, axis in context.mesh.axes.items() if axis.group == node.args[1]}  # fused ones share a group
    auxiliary = "auxiliary_loss" in (node.meta.get("custom") or {})
    anywhere = not axes or "tp" in axes or exchanged(node, context.plan)
    return anywhere or (auxiliary and bool(axes & {"dp_replicate", "fsdp"}))


def _on_shards(node: fx.Node) -> bool:
    """Whether the node is a loss on shards of the vocabulary; one on a whole vocabulary runs over no axis."""
    return node.target is vocabulary_loss and node.args[1] != ""


FACTS: Mapping[str, tuple[Check, ...]] = {
    "complete_boundaries": (check_types, check_opaque),
    "reduce_auxiliary_loss": (check_auxiliary_loss,),
    "seed_random_ops": (check_seeds,),
    "unshard_parameters": (check_parameters,),
    "offload_parameters": (check_offloaded,),
    "hold_gradients": (check_held_gradients,),
}
"""Name of a pass -> what holds behind it, and behind every later pass."""
FINISHED = (
    check_groups,
    check_types,
    check_opaque,
    check_seeds,
    check_parameters,
    check_offloaded,
    check_held_gradients,
)
"""What holds of every finished graph, whichever passes ran."""


def where(node: fx.Node) -> str:
    """Node, module and source line."""
    module = node.meta.get("custom", {}).get("module")
    line = (node.meta.get("stack_trace") or "").strip().splitlines()
    source = f" ({line[-2].strip()})" if len(line) > 1 else ""
    name = node.meta["input"].name if node.op == "placeholder" else node.name
    return f"{name!r}" + (f" in module {module!r}" if module else "") + source
