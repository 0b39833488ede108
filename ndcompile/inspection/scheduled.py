"""A traced step in the order in which a GPU runs it: with all layers, behind the passes of `schedule.py`.

The lowered graphs wait for every collective at once, and are what tables count. Inductor gets them with collectives
merged and moved, and only that order tells what runs beside what. `reuse_layers` moves nothing and is left out, and so
are `coalesce_collectives`, which launches at once what starts one behind the other here, and `pipeline_matmuls`, which
runs when asked for.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from ndcompile.inspection.all_layers import with_all_layers
from ndcompile.inspection.trace import Traced
from ndcompile.passes.bucket_collectives import bucket_collectives
from ndcompile.passes.delay_weight_gradients import delay_weight_gradients
from ndcompile.passes.overlap_communication import overlap_communication
from ndcompile.passes.overlap_dispatch import overlap_dispatch

PASSES: dict[str, Callable[[fx.Graph], None]] = {
    "bucket_collectives": bucket_collectives,
    "overlap_dispatch": overlap_dispatch,
    "delay_weight_gradients": delay_weight_gradients,
    "overlap_communication": overlap_communication,
}
"""Of `schedule.SCHEDULING`, in its order."""


def scheduled(traced: Traced) -> tuple[fx.Graph, fx.Graph]:
    """New forward and backward graphs: every layer once, in the order of the passes that the trace did not disable."""
    graphs = with_all_layers(traced, backward=False), with_all_layers(traced, backward=True)
    for graph in graphs:
        for name, run in PASSES.items():
            if name not in traced.disabled:
                run(graph)
    return graphs
