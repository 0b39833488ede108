"""Partition the joint graph into forward and backward, and keep both for inspection.

Weights of `free_full_weight` modules are gathered again in backward: everything between the stored shard and the matrix
product (all-gather, wait, views) is tagged to be recomputed, so that the shard is saved instead of the full weight. A
shard in host memory is copied to the device again, also where nothing gathers it.
"""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ndcompile.graphs.saved_activations import EXCHANGE, even_rows
from ndcompile.lowering.own_memory import separate_gradients, wait_once
from ndcompile.lowering.publish import publish
from ndcompile.operators.host_copies import COPIED
from ndcompile.passes.drop_ones import drop_ones
from ndcompile.passes.gather_gradients import gather_gradients
from ndcompile.passes.sort_by_counts import sort_by_counts
from ndcompile.private.inductor import (
    CustomPartitionerFn,
    get_hash_for_files,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from ndcompile.private.tracing import expect_sizes

ON_JOINT_GRAPH: Mapping[str, Callable[[fx.Graph], None]] = {
    "gather_gradients": gather_gradients,
    "sort_by_counts": sort_by_counts,
    "drop_ones": drop_ones,
}
"""Name of a pass on the joint graph -> the pass, in order."""

LOWERING_SOURCES = tuple(
    str(Path(__file__).parents[1] / f"{name}.py")
    for name in (
        "graphs/graph_edits",
        "graphs/repetition",
        "graphs/saved_activations",
        "graphs/sorts",
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
) + tuple(str(run.__code__.co_filename) for run in ON_JOINT_GRAPH.values())

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


def joint_passes(disabled: Collection[str]) -> tuple[str, ...]:
    """Names of the passes on the joint graph, but the disabled ones."""
    return tuple(name for name in ON_JOINT_GRAPH if name not in disabled)


def run_on_joint_graph(graph: fx.Graph, names: Sequence[str], groups: Mapping[str, str] | None = None) -> None:
    """Run passes of ON_JOINT_GRAPH. groups: process groups -> names of axes, to publish what each leaves; else none."""
    for name in names:
        ON_JOINT_GRAPH[name](graph)
        if groups is not None:
            publish(name, graph, groups)


class Partitioner(CustomPartitionerFn):
    """Called by AOTAutograd with the joint graph. Keeps the graphs that were compiled, unless they came from a cache.

    tags: what the partition depends on besides the graph's text, see `partition_tags`. It is all that a copy or a
    pickle holds, as inductor makes both of its config to compute cache keys. disabled: passes of ON_JOINT_GRAPH to
    leave out. groups: process groups -> names of axes, for the graphs that are published.
    """

    def __init__(
        self, tags: str = "", disabled: Collection[str] = (), groups: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.tags = tags
        self.names = joint_passes(disabled)
        self.groups = dict(groups)
        self.forward: fx.GraphModule | None = None
        self.backward: fx.GraphModule | None = None

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        run_on_joint_graph(gm.graph, self.names, self.groups)
        tag_regathered_weights(gm)
        kwargs.setdefault("compiler", "inductor")
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        wait_once(forward.graph)
        wait_once(backward.graph)
        hint_rows(forward.graph)
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
        return f"{get_hash_for_files(LOWERING_SOURCES).hex()} {self.names} {self.tags}"

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


def hint_rows(graph: fx.Graph) -> None:
    """Tell inductor how many rows of tokens to expect where routing decides: as many as even routing brings.

    Without a hint it takes every expression of such a size for 8192, and launches blocks of 256 elements for millions.
    """
    sizes = [node.meta["val"].shape[0] for node in graph.find_nodes(op="call_function", target=EXCHANGE)]
    symbolic = [size for size in sizes if not isinstance(size, int)]
    if symbolic:
        expect_sizes(symbolic[0].node.shape_env, even_rows(graph))


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
