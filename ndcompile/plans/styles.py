"""The TP styles of transformers as one table: how the parameter is placed, what happens to inputs and outputs.

Names and meaning follow `ALL_PARALLEL_STYLES` (transformers/distributed/tensor_parallel.py). There a style is a module
hook on DTensors; here it is a row. Model code between plan modules runs on local tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ndcompile.private.distributed import StridedShard

PACKED_PARTS = 2
"""Fused gate and up projections: each half is sharded by itself."""


def replicate(name: str, ndim: int) -> Placement:
    return Replicate()


def out_features(name: str, ndim: int) -> Placement:
    """Rows of a Linear weight (out, in) or its bias; the middle dim of stacked experts (experts, out, in)."""
    return Shard(max(ndim - 2, 0))


def in_features(name: str, ndim: int) -> Placement:
    """The last dim of a weight; a bias is added once, after the sum over the ranks."""
    return Replicate() if name == "bias" else Shard(ndim - 1)


def packed_out_features(name: str, ndim: int) -> Placement:
    return StridedShard(max(ndim - 2, 0), split_factor=PACKED_PARTS)


def packed_in_features(name: str, ndim: int) -> Placement:
    return Replicate() if ndim == 1 else StridedShard(ndim - 1, split_factor=PACKED_PARTS)


def last_dim(name: str, ndim: int) -> Placement:
    """Columns of a transposed weight (in, out), and its bias."""
    return Shard(ndim - 1)


def first_dim(name: str, ndim: int) -> Placement:
    """Rows of a transposed weight (in, out); a bias is added once, after the sum over the ranks."""
    return Replicate() if name == "bias" else Shard(ndim - 2)


def parts_of_out_features(parts: int) -> Callable[[str, int], Placement]:
    """Fused projections that stand behind each other: each is sharded by itself."""
    return lambda name, ndim: StridedShard(max(ndim - 2, 0), split_factor=parts)


def parts_of_last_dim(parts: int) -> Callable[[str, int], Placement]:
    return lambda name, ndim: StridedShard(ndim - 1, split_factor=parts)


def vocabulary(name: str, ndim: int) -> Placement:
    return Shard(0)


def hidden(name: str, ndim: int) -> Placement:
    return Shard(1)


@dataclass(frozen=True)
class Style:
    """One row. Types are those of `redistribute`: I invariant, R replicated, P partial, S(d) sharded.

    place: tp placement of a parameter, from its name and number of dims.
    enter, leave: (src, dst) of the first input and of the output.
    parameters: (src, dst) of the module's own parameters, where its forward uses them.
    width: attribute of the module with the global size of the sharded dim of `enter` or `leave`.
    local: name of the forward in capture that replaces the generic one, for the styles that are more than their ends.
    """

    place: Callable[[str, int], Placement] = replicate
    enter: tuple[str, str] | None = None
    leave: tuple[str, str] | None = None
    parameters: tuple[str, str] | None = None
    width: str | None = None
    local: str | None = None


INTO_SHARDS = ("I", "R")
SUM = ("P", "I")
SPLIT = ("I", "S(-1)")
GATHER = ("S(-1)", "I")

STYLES: dict[str, Style] = {
    "colwise": Style(out_features, enter=INTO_SHARDS),
    "colwise_gather_output": Style(out_features, enter=INTO_SHARDS, leave=GATHER, width="out_features"),
    "colwise_rep": Style(out_features, enter=INTO_SHARDS, leave=GATHER, width="out_features"),
    "rowwise": Style(in_features, leave=SUM, local="rowwise"),
    "rowwise_rep": Style(in_features, enter=SPLIT, leave=SUM, width="in_features", local="rowwise"),
    "rowwise_split_input": Style(in_features, enter=SPLIT, leave=SUM, width="in_features", local="rowwise"),
    "embedding_rowwise": Style(vocabulary, leave=SUM, local="vocabulary"),
    "embedding_colwise": Style(hidden, leave=GATHER, width="embedding_dim"),
    "packed_colwise": Style(packed_out_features, enter=INTO_SHARDS),
    "packed_rowwise": Style(packed_in_features),
    "replicated_with_grad_allreduce": Style(parameters=INTO_SHARDS),
    "mla_kv_a_proj": Style(),  # the pass complete_boundaries finds where its rope part meets the rank's heads
    "all_reduce": Style(leave=SUM),
    "local_params": Style(),  # parameters are local tensors inside the graph anyway
    "replicate": Style(),
    "sequence_parallel": Style(enter=("I", "S(1)"), leave=("S(1)", "I"), parameters=INTO_SHARDS),
    "moe_tp_experts": Style(leave=SUM, local="moe_experts"),
    "moe_identity_expert": Style(local="moe_identity"),
    # Not of transformers, see OWN_STYLES:
    "packed3_colwise": Style(parts_of_out_features(3), enter=INTO_SHARDS),
    "colwise_transposed": Style(last_dim, enter=INTO_SHARDS, local="transposed"),
    "packed_colwise_transposed": Style(parts_of_last_dim(2), enter=INTO_SHARDS, local="transposed"),
    "packed3_colwise_transposed": Style(parts_of_last_dim(3), enter=INTO_SHARDS, local="transposed"),
    "first_dim": Style(vocabulary),
    "rowwise_transposed": Style(first_dim, leave=SUM, local="transposed_rowwise"),
}

EXPERT_STYLES = {"grouped_gemm", "ep_dispatch_experts"}
"""Styles of an ep_plan: whole experts on a rank (dim 0 of their weights over ep), and the module whose tokens are
exchanged, see `expert_exchange`. transformers/distributed/expert_parallel.py"""

OWN_STYLES = {name for name in STYLES if name.startswith("packed3") or name.endswith("_transposed")} | {"first_dim"}
"""Styles that transformers does not have: fused projections of three parts, its Conv1D, a linear whose weight is stored
(in, out), and a parameter of any number of dims of which the first is cut (a convolution's channels)."""

LOCAL_COUNT = "local_count"
"""No style of a module: `{"layers.*.attn.num_heads": "local_count"}` is an integer attribute of a module that counts
what tp cuts, heads or a width. Code that reads it must see a rank's share, see `own_rules`."""
