"""Partition the joint graph into forward and backward, and keep both for inspection.

Weights of `free_full_weight` modules are gathered again in backward: everything between the stored shard and the matrix
product (all-gather, wait, views) is tagged to be recomputed, so that the shard is saved instead of the full weight. A
shard in host memory is copied to the device again, also where nothing gathers it.
"""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ndcompile.lowering.own_memory import separate_gradients, wait_once
from ndcompile.operators.host_copies import COPIED
from ndcompile.private.inductor import (
    CustomPartitionerFn,
    get_hash_for_files,
    make_boxed_func,
    min_cut_rematerialization_partition,
)

LOWERING_SOURCES = tuple(
    str(Path(__file__).parents[1] / f"{name}.py")
    for name in (
        "lowering/own_memory",
        "lowering/partition",
        "operators/chunked_loss",
        "operators/host_copies",
        "operators/random_ops",
        "operators/redistribute",
        "operators/weight_shards",
        "private/distributed",
        "private/inductor",
        "private/tracing",
    )
)

aten = torch.ops.aten
collectives = torch.ops._c10d_functional

GATHER_AGAIN = 1_000_000
"""`ac_graph_id` of re-gathered weights: above every checkpointed layer's, see passes/checkpoint_layers.py."""

LAYOUT_OPS = {
    aten.alias.default,
    aten.cat.default,
    aten.permute.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.t.default,
    aten.transpose.int,
    aten.view.default,
    operator.getitem,
    collectives.wait_tensor.default,
}
"""What stands between an all-gather and the use of the full weight."""


class Partitioner(CustomPartitionerFn):
    """Called by AOTAutograd with the joint graph. Keeps the graphs that were compiled, unless they came from a cache.

    tags: what the partition depends on besides the graph's text, see `partition_tags`. It is all that a copy or a
    pickle holds, as inductor makes both of its config to compute cache keys.
    """

    def __init__(self, tags: str = "") -> None:
        self.tags = tags
        self.forward: fx.GraphModule | None = None
        self.backward: fx.GraphModule | None = None

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        tag_regathered_weights(gm)
        kwargs.setdefault("compiler", "inductor")
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        wait_once(forward.graph)
        wait_once(backward.graph)
        separate_gradients(backward.graph)
        forward.recompile()
        backward.recompile()
        self.forward, self.backward = forward, backward
        return forward, backward

    def __deepcopy__(self, memo: dict[int, object]) -> Partitioner:
        return self

    def __reduce__(self) -> tuple[type[Partitioner], tuple[str]]:
        return Partitioner, (self.uuid(),)

    def uuid(self) -> str:
        """Part of the cache keys: the tags, and the sources that say what the distributed nodes lower to."""
        return f"{get_hash_for_files(LOWERING_SOURCES).hex()} {self.tags}"

    def record_and_run(self, gm: fx.GraphModule, backward: bool) -> Callable[..., Any]:
        """Compiler of the `aot_eager` backend: run the graph as it is."""
        if backward:
            self.backward = gm
        else:
            self.forward = gm
        return make_boxed_func(gm.forward)

    def collective_counts(self) -> dict[str, Counter[str]]:
        """Collectives of the forward and the backward graph by kind."""
        graphs = {"forward": self.forward, "backward": self.backward}
        return {name: count_collectives(gm) for name, gm in graphs.items() if gm is not None}


def partition_tags(graph: fx.Graph) -> str:
    """A digest of the metadata that steers the partition and that the graph's text does not show."""
    tags = [
        (node.name, str(node.meta.get("recompute")), node.meta.get("ac_graph_id"), node.meta["custom"].get("unshard"))
        for node in graph.nodes
        if "custom" in node.meta
    ]
    return hashlib.sha256(repr(tags).encode()).hexdigest()[:16]


def count_collectives(gm: fx.GraphModule) -> Counter[str]:
    """How often each collective of `_c10d_functional` occurs; waits are not counted."""
    return Counter(
        node.target._opname
        for node in gm.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "_c10d_functional"
        and node.target is not collectives.wait_tensor.default
    )


def tag_regathered_weights(joint: fx.GraphModule) -> int:
    """Mark the chain of every `free_full_weight` gather, and copy from the host, MUST_RECOMPUTE; returns the number of
    gathers."""
    chain: set[fx.Node] = set()
    gathers = 0
    for node in joint.graph.nodes:
        gathered = node.target is collectives.all_gather_into_tensor.default
        starts = (gathered or node.target is COPIED) and _is_regathered(node)
        if starts:
            gathers += gathered
            chain.update(_back_to_shard(node))
        follows = node.target in LAYOUT_OPS or "unshard" in (node.meta.get("custom") or {})
        if starts or (follows and node.all_input_nodes and chain.issuperset(node.all_input_nodes)):
            chain.add(node)
    for node in chain:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = GATHER_AGAIN
    return gathers


def _is_regathered(node: fx.Node) -> bool:
    return node.meta.get("custom", {}).get("unshard") == "free_full_weight"


def _back_to_shard(node: fx.Node) -> list[fx.Node]:
    """The nodes (casts, copies) between a stored shard and its gather."""
    path: list[fx.Node] = []
    while len(node.all_input_nodes) == 1 and node.all_input_nodes[0].op != "placeholder":
        node = node.all_input_nodes[0]
        path.append(node)
    return path
