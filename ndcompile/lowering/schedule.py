"""Passes on the lowered graphs, which inductor runs behind its own, and its settings that would undo them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import fx

from ndcompile.graphs import collective_chains, exchanges, graph_edits, repetition, sequence_products
from ndcompile.lowering.publish import publish
from ndcompile.operators import host_copies, host_reads, matmul_scatter
from ndcompile.passes import bucket_collectives as bucket
from ndcompile.passes import coalesce_collectives as coalesce
from ndcompile.passes import delay_weight_gradients as delay
from ndcompile.passes import overlap_communication as overlap
from ndcompile.passes import overlap_dispatch as dispatch
from ndcompile.passes import pipeline_matmuls as pipeline
from ndcompile.passes import reuse_layers as reuse
from ndcompile.passes import use_copy_engines as use
from ndcompile.private.inductor import CustomGraphPass, get_hash_for_files

PIPELINE, COPY = "pipeline_matmuls", "use_copy_engines"
WITH_GROUPS = {PIPELINE, COPY}
"""The passes that need process groups, and run only if they are given some."""

SCHEDULING: Mapping[str, Callable[..., None]] = {
    PIPELINE: pipeline.pipeline_matmuls,
    "bucket_collectives": bucket.bucket_collectives,
    "coalesce_collectives": coalesce.coalesce_collectives,
    "overlap_dispatch": dispatch.overlap_dispatch,
    "delay_weight_gradients": delay.delay_weight_gradients,
    "overlap_communication": overlap.overlap_communication,
    COPY: use.use_copy_engines,
    "reuse_layers": reuse.reuse_layers,
}
"""Name of a pass -> the pass, in order."""

HELPERS = (
    collective_chains,
    exchanges,
    graph_edits,
    host_copies,
    host_reads,
    matmul_scatter,
    repetition,
    sequence_products,
)
SOURCES = tuple(
    str(Path(str(module.__file__)))
    for module in (*HELPERS, pipeline, bucket, coalesce, dispatch, delay, overlap, use, reuse)
)

KEEP_ORDER = {"reorder_for_peak_memory": False}
"""Inductor's memory pass would start every gather as late as it can."""

FUNCTIONAL = {"allow_buffer_reuse": False, "inplace_buffers": False}
"""A buffer that a collective still reads, or that a result of a subgraph may share, is never written again: memory is
free when nothing refers to it, collectives under way included, and torch's allocator reuses it."""


class Schedule(CustomGraphPass):
    """The passes of SCHEDULING but the disabled ones, as one pass of inductor.

    beside_products: the process group whose collectives `pipeline_matmuls` rewrites; None leaves that pass out.
    groups: process groups -> names of axes, for what is published after each pass; no part of the pass's identity.
    copies: process groups -> those of the same ranks that copy; none leaves `use_copy_engines` out.
    """

    def __init__(
        self,
        disabled: Collection[str] = (),
        beside_products: str | None = None,
        groups: Mapping[str, str] = MappingProxyType({}),
        copies: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        given: dict[str, dict[str, Any]] = {PIPELINE: {"group": beside_products}, COPY: {"copies": dict(copies)}}
        self.given = {name: each for name, each in given.items() if any(each.values())}
        left_out = {*disabled, *(WITH_GROUPS - self.given.keys())}
        self.names = tuple(name for name in SCHEDULING if name not in left_out)
        self.groups = dict(groups)

    def __call__(self, graph: fx.Graph) -> None:
        for name in self.names:
            SCHEDULING[name](graph, **self.given.get(name, {}))
            publish(name, graph, self.groups)

    def uuid(self) -> str:
        """Part of inductor's cache keys."""
        return f"{get_hash_for_files(SOURCES).hex()} {self.names} {self.given}"


def inductor_settings(
    disabled: Collection[str],
    beside_products: str | None = None,
    groups: Mapping[str, str] = MappingProxyType({}),
    copies: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """What of torch._inductor.config makes it run the passes and keep their order."""
    schedule = Schedule(disabled, beside_products, groups, copies)
    settings = FUNCTIONAL if "reuse_layers" in schedule.names else {}
    return {"post_grad_custom_post_pass": schedule} | KEEP_ORDER | settings
