"""What backward computes again of a layer, in stages, each dearer than the one before.

A stage recomputes all operators of its class and of those below. What leaves a layer is kept at every stage, or
backward would have to start over from the first one; so are numbers that the host has read.

The bytes of each stage are those of torch's own partition of the joint graph, which is traced once.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from ndcompile.graphs.saved_activations import even_rows, is_view, nbytes, saved_activations
from ndcompile.lowering.partition import joint_passes, run_on_joint_graph, tag_regathered_weights
from ndcompile.operators.redistribute import REDISTRIBUTE, all_to_all, identity, narrow, pair, redistribute
from ndcompile.operators.routing_checks import checked_splits
from ndcompile.private.inductor import (
    aot_autograd,
    decompositions,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from ndcompile.private.tracing import FakeTensorMode, TracingContext, tracing

KEPT, CHEAP, PRODUCTS, ATTENTION, COLLECTIVES = range(5)
"""Classes of operators. A layer's stage is the last class that it recomputes; 0 is none."""

STAGES = {CHEAP: "element by element", PRODUCTS: "matrix products", ATTENTION: "attention", COLLECTIVES: "collectives"}

READ_BY_THE_HOST = {all_to_all, checked_splits, torch.ops.aten._local_scalar_dense.default}
"""Numbers of rows that experts exchange: some integers, for which backward need not wait for the host again."""

PRODUCT_NAMES = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "bilinear"}
PRODUCT_NAMES |= {"conv1d", "conv2d", "conv3d", "convolution", "_grouped_mm"}

MARK = 2_000_000
"""First `ac_graph_id` of the marks of `marked`: above all others, see partition.GATHER_AGAIN."""

OUTSIDE = -1


def layer_of(module: str, layers: Mapping[str, int]) -> int:
    """The number of the layer that a module is, or is part of; OUTSIDE for none."""
    parts = module.split(".")
    names = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((layers[name] for name in names if name in layers), OUTSIDE)


def classes(graph: fx.Graph, layers: Sequence[str]) -> dict[fx.Node, tuple[int, int]]:
    """(number of the layer, class) of every operator in one of the layers, but for what has a recompute tag already."""
    numbers = {name: number for number, name in enumerate(layers)}
    layer = {node: layer_of(node.meta.get("custom", {}).get("module", ""), numbers) for node in graph.nodes}
    found = {
        node: (layer[node], _class(node))
        for node in graph.nodes
        if node.op == "call_function"
        and layer[node] != OUTSIDE
        and "unshard" not in node.meta["custom"]
        and "recompute" not in node.meta
    }
    for node in found:
        if any(layer[user] != layer[node] for user in node.users):
            while is_view(node) and node.all_input_nodes[0] in found:
                node = node.all_input_nodes[0]
            found[node] = (layer[node], KEPT)
    return found


LOCAL: tuple[object, ...] = (identity, narrow)
"""Moves of a redistribution that no other rank takes part in."""


def _class(node: fx.Node) -> int:
    if node.target in READ_BY_THE_HOST and not node.meta["differentiable"]:
        return KEPT
    if node.target is redistribute:
        src, dst = pair(node)
        return CHEAP if REDISTRIBUTE[src[0], dst[0]][0] in LOCAL else COLLECTIVES
    if node.target is all_to_all:
        return COLLECTIVES
    if isinstance(node.target, torch._ops.OpOverload):
        name = node.target._opname
        return PRODUCTS if name in PRODUCT_NAMES else ATTENTION if "attention" in name else CHEAP
    plain = getattr(node.target, "__module__", "") in ("_operator", "builtins", "math")
    return CHEAP if plain else ATTENTION  # operators with a body, functions of the model: unknown, so taken to be dear


def tag(node: fx.Node, kind: int, stage: int) -> None:
    """Say whether backward recomputes a node of a layer at `stage`."""
    if stage and kind <= stage:
        keep = kind == KEPT
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.MUST_RECOMPUTE


@dataclass
class Joint:
    """The joint graph of a step, which can be partitioned again and again. Its nodes carry the marks of `marked`.

    inputs, options: what AOTAutograd gives a partitioner. known: bytes of the choices that were asked for.
    """

    layers: Sequence[str]
    fake_mode: FakeTensorMode
    module: fx.GraphModule
    inputs: Sequence[Any]
    options: Mapping[str, Any]
    known: dict[tuple[int, ...], Counter[int]] = field(default_factory=dict)

    def saved_bytes(self, stages: tuple[int, ...]) -> Counter[int]:
        """Bytes that the step keeps with a stage for each layer, by number of the layer."""
        if stages not in self.known:
            forward, backward = self._partition(stages)
            numbers = {name: number for number, name in enumerate(self.layers)}
            found: Counter[int] = Counter({OUTSIDE: 0})
            rows = even_rows(forward.graph)
            for node in saved_activations(forward.graph, backward.graph).values():
                module = (node.meta.get("custom") or {}).get("module", "")
                found[layer_of(module, numbers)] += nbytes(node.meta["val"], rows)
            self.known[stages] = found
        return self.known[stages]

    def _partition(self, stages: tuple[int, ...]) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint = fx.GraphModule(self.module, copy.deepcopy(self.module.graph))
        for node in joint.graph.nodes:
            if (mark := node.meta.get("ac_graph_id", 0) - MARK) >= 0:
                del node.meta["ac_graph_id"]
                tag(node, mark % (COLLECTIVES + 1), stages[mark // (COLLECTIVES + 1)])
        tag_regathered_weights(joint)
        with tracing(TracingContext(self.fake_mode)):
            return min_cut_rematerialization_partition(joint, self.inputs, **self.options)


def joint_of(
    graph: fx.Graph,
    fake_mode: FakeTensorMode,
    layers: Sequence[str],
    found: Mapping[fx.Node, tuple[int, int]],
    disabled: Collection[str] = (),
) -> Joint | None:
    """The joint graph of a captured graph whose classes are `found`; None if there is no backward.

    disabled: passes that are left out of it.
    """
    made: list[Joint] = []

    def keep(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        options.setdefault("compiler", "inductor")
        run_on_joint_graph(gm.graph, joint_passes(disabled))
        made.append(Joint(layers, fake_mode, fx.GraphModule(gm, copy.deepcopy(gm.graph)), inputs, options))
        return min_cut_rematerialization_partition(gm, inputs, **options)

    as_it_is = lambda gm, _: make_boxed_func(gm.forward)  # noqa: E731
    compiler = aot_autograd(
        fw_compiler=as_it_is,
        inference_compiler=as_it_is,
        bw_compiler=as_it_is,
        partition_fn=keep,
        decompositions=decompositions(),
    )
    fakes = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    module = graph.owning_module
    assert module is not None
    module.recompile()
    with tracing(TracingContext(fake_mode)), marked(found):
        compiler(module, fakes)
    return made[0] if made else None


@contextmanager
def marked(found: Mapping[fx.Node, tuple[int, int]]) -> Iterator[None]:
    """While active, nodes carry their layer and class as `ac_graph_id`, which tracing hands on to what they become in
    the forward part of the joint graph, and to nothing else."""
    for node, (layer, kind) in found.items():
        node.meta["ac_graph_id"] = MARK + layer * (COLLECTIVES + 1) + kind
    try:
        yield
    finally:
        for node in found:
            del node.meta["ac_graph_id"]


def has_gradients(graph: fx.Graph) -> bool:
    """Whether a captured graph has a backward."""
    return any(isinstance(v := n.meta["val"], Tensor) and v.requires_grad for n in graph.find_nodes(op="placeholder"))
